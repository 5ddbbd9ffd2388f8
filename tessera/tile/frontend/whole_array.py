"""Whole-array functions as kernels: traced once on whole tiles.

    def scores(q: Tile, k: Tile) -> Tile:
        return tile.dot(q, k.T) / sqrt(d)

The trace is a dag of tile ops without memory; whole_array_blocks.py cuts it into blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.builder.edge_check import check_edges
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.parameters import declare
from tessera.tile.frontend.source import KernelSource
from tessera.tile.frontend.trace_kernel import trace_body
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.handles import UNSET, Handle, Undefined, describe
from tessera.tile.ir.ir import Op, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, TileType


@dataclass(frozen=True)
class WholeArrayTrace:
    """The trace of a function on whole tiles. loads: the parameter that a value was loaded from."""

    ops: dict[SSAValue, Op]
    loads: dict[SSAValue, str]
    result: Handle
    batch: int | None


def trace_whole(source: KernelSource, fn: Callable, spec: KernelSpec) -> WholeArrayTrace:
    """The dag of a function for these shapes. Raises TileError at what is no pure op on whole
    tiles."""
    t = KernelTracer(source, fn, replace(spec, result=None))
    loads = declare_tiles(t)
    trace_body(t)
    result = returned_tile(t)
    check_edges(t.facts, t.ir.block)
    batches = [a for a in t.grid.axes if a.block == 1]
    if len(batches) != len(t.grid.axes):
        t.fail("row_index and col_index in a whole-array function",
               "ts.tile.arange(0, x.shape[0]) is the position of each row")
    ops: dict[SSAValue, Op] = {}
    for node in t.ir.block:
        if not isinstance(node, Op):
            refuse(node.where, "a loop or branch at run time")
        elif OPS[node.name].effect not in ("pure", "read"):
            refuse(node.where, f"{node.name}: it computes, and does not store")
        else:
            ops |= {d.value: node for d in node.outs}
    batch = int(batches[0].dim) if batches else None
    return WholeArrayTrace(ops, loads, result, batch)


def matrix_axes(t: KernelTracer, kind: GlobalTensor) -> tuple[int, ...]:
    """The first of three axes counts the matrices."""
    if len(kind.dims) != 3:
        return ()
    return (t.grid.axis(str(t.grid.dim_value(kind.dims[0])), 1),)


def declare_tiles(t: KernelTracer) -> dict[SSAValue, str]:
    """The parameters, tensors as tiles from the start; the parameter that each was loaded from."""
    declare(t, matrix_axes)
    loads: dict[SSAValue, str] = {}
    for name, kind in t.spec.params:
        if isinstance(kind, GlobalTensor):
            place = t.env[name]
            t.env[name] = t.call_op(OPS["load"], [t.memory.make_view(place, [])], {})
            loads[t.env[name].value] = name
    return loads


def returned_tile(t: KernelTracer) -> Handle:
    value = t.env[RETURN]
    if t.exits.returns:
        t.position.node = t.exits.returns[-1]
    if isinstance(value, Undefined) or value is None or value is UNSET:
        t.fail("a whole-array function returns a tile on every path", "return at the end")
    if not isinstance(value, Handle) or not isinstance(value.type, TileType):
        t.fail(f"a whole-array function returns a tile, not {describe(value)}",
               "for numbers and several results write a @ts.kernel with stores")
    return value


def refuse(where: SourceLine | None, what: str) -> NoReturn:
    raise TileError(f"in a whole-array function: {what}", where=where,
                    hint="write a @ts.kernel with blocks, loads and stores")


__all__ = ["WholeArrayTrace", "matrix_axes", "trace_whole"]
