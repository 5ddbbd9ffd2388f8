"""Parameters of a kernel and its named extents, as values under their own names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.dims import Dim, solved_names
from tessera.numerics import i32, i64
from tessera.tensor import TensorType
from tessera.tile.frontend.composite_parameters import RecordFields
from tessera.tile.frontend.constructs.loops import stored_names
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.handles import Handle
from tessera.tile.ir.ir import Param
from tessera.tile.ir.types import GlobalTensor, Scalar, Type

HiddenAxes = Callable[[KernelTracer, GlobalTensor], tuple[int, ...]]


def composite_axes(t: KernelTracer, kind: GlobalTensor) -> tuple[int, ...]:
    """Leading composite extents, B*H, are grid axes; the kernel sees the rest."""
    out = []
    for dim in kind.dims[:-1]:
        if t.spec.given_grid or not composite(dim):
            break
        out.append(t.grid.axis(str(dim), 1))
    return tuple(out)


def declare(t: KernelTracer, hidden_axes: HiddenAxes = composite_axes) -> None:
    """Parameters, then named extents, as values under their own names.

    hidden_axes: the grid axes that stand for the leading extents of a tensor.
    """
    t.env |= dict(t.spec.constants)
    t.env |= {RETURN: t.exits.unset}
    t.env |= dict.fromkeys(t.exits.flags, False)
    tensors = [(n, kind) for n, kind in t.spec.params if isinstance(kind, GlobalTensor)]
    names = [str(d) for _, kind in tensors for d in kind.dims
             if isinstance(d, Dim) and str(d).isidentifier()]
    for name, kind in t.spec.params:
        parameter(t, name, kind, "argument")
    names += solved_names(d for _, kind in tensors for d in kind.dims)
    refuse_clashes(t, names)
    assigned = frozenset(stored_names(t.exits.body))
    for name in dict.fromkeys(names):
        if name not in t.env:
            dimension(t, name, local=name in assigned)
    for name, kind in tensors:
        t.env[name] = replace(t.env[name], hidden=hidden_axes(t, kind))
    for name, fields in t.spec.records:
        t.env[name] = RecordFields({f: t.env[f"{name}_{f}"] for f in fields})
    for i, kind in enumerate(t.spec.results):
        if isinstance(kind, TensorType) and kind.type is not None:
            output(t, i, GlobalTensor(kind.type, kind.shape), hidden_axes(t, GlobalTensor(
                kind.type, kind.shape)))


def refuse_clashes(t: KernelTracer, extents: list[str]) -> None:
    """N beside x: Tensor["N"] would be another number than x's extent. A tensor N is none."""
    numbers = {n for n, kind in t.spec.params if not isinstance(kind, GlobalTensor)}
    for name in extents:
        if name in numbers or name in dict(t.spec.constants):
            t.fail(f"{name} is a parameter and an extent of a tensor's annotation",
                   f"leave the parameter out, since the body can read {name} of the tensor, or "
                   f"call it something else")


def output(t: KernelTracer, i: int, kind: GlobalTensor, hidden: tuple[int, ...]) -> Handle:
    """Declares the tensor that is result i of the kernel."""
    name = f"result_{i}" if len(t.spec.results) > 1 or i else "result"
    t.outputs[i] = replace(parameter(t, name, kind, "output"), hidden=hidden)
    return t.outputs[i]


def parameter(t: KernelTracer, name: str, kind: Type, role: str) -> Handle:
    value = t.ir.names.fresh(name)
    t.params.append(Param(value, kind, role))
    made = Handle(value, kind)
    t.values.types[value] = kind
    if role == "argument":
        t.env[name] = made
    return made


def dimension(t: KernelTracer, name: str, *, local: bool) -> None:
    """local: a local of that name hides the extent, as in Python."""
    if name in t.grid.fixed:
        if not local:
            t.env[name] = t.grid.fixed[name]
        return
    kind = Scalar(i64 if name in t.spec.wide_dims else i32)
    t.values.dims[parameter(t, name, kind, "dim").value] = name
    t.grid.loaded_dims[name] = Handle(t.params[-1].value, kind)
    if not local:
        t.env[name] = t.grid.loaded_dims[name]


def composite(dim: Any) -> bool:
    """B*H: a product of names."""
    return isinstance(dim, Dim) and len(dim.terms) == 1 and len(dim.terms[0][0]) > 1
