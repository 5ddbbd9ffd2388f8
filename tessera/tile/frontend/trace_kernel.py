"""A kernel's body to Tile IR: parameters, statements and the result, for one specialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

from tessera.tile.builder.edge_check import check_edges
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.frontend import block_origins
from tessera.tile.frontend import constructs as constructs  # fills the tables
from tessera.tile.frontend.constructs.ranges import walk_ops
from tessera.tile.frontend.parameters import declare
from tessera.tile.frontend.results import finish
from tessera.tile.frontend.source import KernelSource
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.handles import NeedConstants, NeedGroupNumbers
from tessera.tile.ir.ir import Function
from tessera.tile.ir.op_record import OPS


def trace(source: KernelSource, fn: Callable, spec: KernelSpec, sizes: dict[str, int]) -> Function:
    """The Tile IR of a kernel for `spec`. Extents that must be constants are taken from sizes."""
    fixed = dict(spec.fixed_dims)
    while True:
        try:
            spec = replace(spec, fixed_dims=tuple(sorted(fixed.items())))
            t = KernelTracer(source, fn, spec)
            declare(t)
            trace_body(t)
            finish(t)
            return function_of(t)
        except NeedConstants as need:
            fixed |= {n: sizes[n] for n in need.names}
        except NeedGroupNumbers:
            spec = replace(spec, numbered=True)


def trace_body(t: KernelTracer) -> None:
    """The statements, after the parameters are declared."""
    t.statements(block_origins.bind(t, t.exits.body))
    t.position.node = t.position.source.tree


def function_of(t: KernelTracer) -> Function:
    """What was traced, verified."""
    check_edges(t.facts, t.ir.block)
    constants = {**dict(t.spec.constants), **t.grid.fixed}
    dims = [p for p in t.params if p.role == "dim"]
    rest = [p for p in t.params if p.role == "argument"
            or (p.role == "output" and p.value.name in t.result[1:])]
    return Function(t.fn.__name__, (*rest, *dims), tuple(t.grid.axes), launch_of(t),
                    t.result, tuple((k, record_constant(v)) for k, v in constants.items()),
                    tuple(t.ir.block), t.spec.lanes, modes=t.spec.modes)


def launch_of(t: KernelTracer) -> str:
    """Where the groups of a launch come from, see Function.launch."""
    if t.spec.given_grid:
        return "given"
    if t.grid.axes:
        require_axes(t)
        return "axes"
    if t.result[0] == "scalar":
        return "one"
    named = {n.name for n in walk_ops(t.ir.block) if n.name in ("linear_id", "group_id",
                                                                 "num_groups")}
    ids = [n for n in walk_ops(t.ir.block) if n.name == "group_id"]
    if any(n.attr["axis"] is not None for n in ids):
        return "given"
    return "elements" if named else "one"


def require_axes(t: KernelTracer) -> None:
    """The kernel asks for no axis that the grid of its own blocks lacks."""
    for n in walk_ops(t.ir.block):
        if OPS[n.name].family == "ids" and (n.attr.get("axis") or 0) >= len(t.grid.axes):
            t.position.line = n.where
            t.fail(f"{n.name}({n.attr['axis']}): the grid of this kernel is that of its blocks "
                   f"along {', '.join(a.dim for a in t.grid.axes)}",
                   "number all groups yourself, without tile_<extent>, or give the other axis a "
                   "named block too: tile_n")


def record_constant(v: Any) -> Any:
    """A constant for the record of a specialisation."""
    if isinstance(v, FunctionType):
        return f"{v.__module__}.{v.__qualname__}"
    return v if v is None or isinstance(v, int | float | str) else str(v)


__all__ = ["record_constant", "trace", "trace_body"]
