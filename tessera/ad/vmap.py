"""vmap: a function of single elements as a function of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentError, AxisError, ShapeError
from ..graph import functions as F
from ..graph import tree
from ..graph.op import Aval
from ..graph.signature import callable_name
from ..graph.trace import aval_of
from ..tensor import Tensor
from .batching import batch_graph, stretch
from .subgraphs import Packed
from .transform import Transform, need_function, trace_flat


def vmap(fn: Callable, in_axes: Any = 0, out_axes: Any = 0) -> Transform:
    """fn applied to each slice of its arguments along `in_axes`, results stacked on `out_axes`.

    in_axes: one axis for all positional arguments, or a tuple with an entry each: an axis, None
    (not mapped), or a nested value like the argument with those as leaves. out_axes likewise for
    the result. Keyword arguments are passed whole. Random draws in fn differ from element to
    element; those of a key that you pass are those of the key.
    Composes with grad, jvp, jit, scan and itself. Raises ShapeError when the extents disagree.
    """
    need_function(fn, "vmap")

    def rule(*args: Any, **kwargs: Any) -> Any:
        packed = Packed(list(args), numbers="weak")
        prefix = list(in_axes) if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
        if len(prefix) != len(args):
            raise ArgumentError(f"vmap: in_axes has {len(prefix)} entries for {len(args)} "
                                "arguments")
        every = _spread(prefix, packed.treedef, "in_axes")
        axes = [every[i] for i in packed.places]
        size, moved, flags = _batch_operands(packed, axes)
        avals = [Aval(tuple(x.shape[1:]), x.type) if b else aval_of(x)
                 for x, b in zip(moved, flags, strict=True)]
        graph, result = trace_flat(lambda a: fn(*a, **kwargs), packed, callable_name(fn), avals,
                                   repeats=True)
        outs, marks = batch_graph(graph, size, moved, flags)
        places = _out_axes(out_axes, result)
        return result.stacked([_with_out_axis(y, size, b, a) for y, b, a in
                               zip(outs, marks, places, strict=True)], places)

    return Transform(fn, rule, "vmap")


def _spread(prefix: Any, treedef: tree.TreeDef, what: str) -> list[int | None]:
    """An axis or None per leaf, from a nested value whose leaves may stand for whole subtrees."""
    if prefix is None or (isinstance(prefix, int) and not isinstance(prefix, bool)):
        return [prefix] * len(tree.paths(treedef))
    if isinstance(prefix, dict) and treedef.kind is dict and set(prefix) == set(treedef.data):
        parts: Sequence[Any] = [prefix[k] for k in treedef.data]
    elif isinstance(prefix, tuple | list) and len(prefix) == len(treedef.children) \
            and treedef.kind is not dict:
        parts = prefix
    elif type(prefix) is treedef.kind and len(
            tree.children_of(prefix)[0]) == len(treedef.children):  # of a class that passes through
        parts = tree.children_of(prefix)[0]
    else:
        raise ArgumentError(f"{what} {prefix!r} does not fit {treedef}",
                            hint="an axis, None, or a nested value like the argument")
    return [a for p, c in zip(parts, treedef.children, strict=True) for a in _spread(p, c, what)]


def _batch_operands(packed: Packed, axes: Sequence[int | None]) -> tuple[Any, list, list]:
    """(extent, operands with the mapped axis first, which are mapped)."""
    size, moved, flags, first = None, [], [], ""
    for name, x, a in zip(packed.names("args"), packed.tensors, axes, strict=True):
        flags.append(a is not None)
        if a is None:
            moved.append(x)
            continue
        if x.scale is not None:
            raise ArgumentError(f"vmap over {name}, a scaled tensor {x.type}",
                                hint="map ts.dequantize(x), or keep it whole with in_axes=None")
        if x.ndim == 0:
            raise ShapeError(f"vmap over a scalar argument, {name}",
                             hint="in_axes=None keeps it whole")
        moved.append(F.moveaxis(x, _axis_of(a, x.ndim, f"in_axes of {name}"), 0))
        extent = moved[-1].shape[0]
        if size is not None and extent != size:
            raise ShapeError(f"vmap: mapped extents differ: {first} has {size}, "
                             f"{name} has {extent}")
        size, first = extent, first or name
    if size is None:
        raise ArgumentError("vmap needs at least one mapped argument")
    return size, moved, flags


def _out_axes(out_axes: Any, result: Any) -> list[int | None]:
    """The axis per tensor of the result."""
    every = _spread(out_axes, result.treedef, "out_axes")
    found: list[int | None] = []
    for how, axis in zip(result.rebuild, every, strict=True):
        if how in ("tensor", "param"):
            found.append(axis)
        elif how == "scaled":
            found += [axis, None if axis is None else 0]
    return found


def _with_out_axis(y: Tensor, size: Any, batched: bool, axis: int | None) -> Tensor:
    if axis is None:
        if batched:
            raise AxisError("vmap: out_axes is None for a result that depends on the batch")
        return y
    full = stretch(y, size, batched)
    at = _axis_of(axis, full.ndim, "out_axes of a result")
    return F.moveaxis(full, 0, at) if at else full


def _axis_of(axis: int, ndim: int, what: str) -> int:
    """The axis as 0..ndim-1. Raises AxisError that says whose it is."""
    if not -ndim <= axis < ndim:
        raise AxisError(f"vmap: axis {axis}, {what}, is outside a tensor of {ndim} axes",
                        hint=f"valid: {-ndim}..{ndim - 1}, counted with the axis of the batch")
    return axis % ndim
