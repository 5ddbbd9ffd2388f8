"""Layouts of the consumers' tiles: accumulators of wgmma and what follows from them."""

from __future__ import annotations

from tessera.runtime.generations import Generation
from tessera.tile.cuda.lower.assign_layouts import Hint, assign_layouts
from tessera.tile.cuda.lower.insert_barriers import order
from tessera.tile.cuda.lower.warp_specialised.program import WARPGROUP
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in
from tessera.tile.ir.ir import Function, Op, Operand, SSAValue, definitions
from tessera.tile.ir.register_layout import (
    RegisterLayout,
    warpgroup_codes,
    warpgroup_columns,
    warpgroups,
)
from tessera.tile.ir.types import TileType

PLACED = "async_matmul", "pack_operand", "read_tile", "lane_sum"


def in_fragments(op: Op) -> tuple[Operand, ...]:
    """What of an op lies as the registers of matmuls."""
    return op.args if op.name == "lane_sum" else (op.outs[0].value, *op.args)


def fragments(op: Op, shape: tuple[int, ...], groups: int) -> RegisterLayout:
    """Of the operands in registers and of the result of an async_matmul, a pack_operand or a
    read_tile, and of what a lane_sum adds: its summands are those of four lanes."""
    if panel := op.attr.get("panel"):
        return warpgroup_codes(shape, groups, panel)
    layout = warpgroup_columns if op.attr.get("columns") else warpgroups
    return layout(shape, groups)


def place_tiles(function: Function, groups: int, overlapping: bool,
                generation: Generation) -> Function:
    """The function with layouts, conversions between them and barriers of the consumers."""
    types = definitions(function)
    given: dict[SSAValue, RegisterLayout] = {}
    for op in ops_in(function.body, *PLACED):
        for x in in_fragments(op):
            t = types.get(x)  # type: ignore[arg-type]
            if isinstance(t, TileType):
                given[x] = fragments(op, t.shape, groups)  # type: ignore[index]
    threads = 1 << (WARPGROUP * groups).bit_length() - 1
    hint = Hint(threads, generation, down_only=True)
    return order(assign_layouts(function, hint, given), overlapping)
