"""The knobs that a schedule left open, derived from the function (see `PipelineKnobs`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.tile.cuda.lower.warp_specialised.persist import uneven
from tessera.tile.cuda.lower.warp_specialised.pressure import pressure
from tessera.tile.cuda.lower.warp_specialised.program import ROWS, PipelineKnobs, Refused
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, is_op, ops_in, out
from tessera.tile.cuda.lower.warp_specialised.sink import sink_loads
from tessera.tile.ir.ir import Const, For, Function, Op, Operand, SSAValue, walk
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.integer_facts import Knowledge

# Registers of a lane of the producer and of a consumer, for so many consumers: 65536 in all, in
# steps of 8 (PTX ISA 9.7.19 setmaxnreg). One consumer has 255 without asking.
REGISTERS = {1: None, 2: (40, 232), 3: (32, 160)}
MOST_REGISTERS = {1: 255, 2: 232, 3: 160}
OTHERS = 32  # registers of a consumer besides tiles: addresses, statistics, temporaries
DEEP, SHALLOW = 4, 2  # stages of a loop with one product, with several


def complete(pipeline: PipelineKnobs, function: Function, maker: Maker) -> PipelineKnobs:
    """The pipeline with every knob set, except raster and reversed. Raises Refused."""
    rows = rows_of(function)
    groups = pipeline.warpgroups or 0
    if groups not in REGISTERS or rows % (ROWS * groups):  # a wish that cannot be met
        groups = consumers(rows)
    if rows % (ROWS * groups):
        raise Refused(f"{rows} rows for {groups} consumer warpgroups")
    pipeline = replace(pipeline, warpgroups=groups)
    if pipeline.registers is None:
        pipeline = replace(pipeline, registers=REGISTERS[groups])
    rotated = any(is_chain(n) for n in walk(function.body) if isinstance(n, For))
    packed, held = operand_registers(function, maker)
    # Rotated, the operand of the turn before lives beside the scores of this one.
    tiles = pressure(sink_loads(function.body), maker, groups) + (packed if rotated else 0)
    room = MOST_REGISTERS[groups] - OTHERS
    if tiles > room:
        raise Refused(f"its tiles take {tiles} registers of a lane, there is room for {room}")
    fits = tiles + held <= room and rows == ROWS * groups
    chosen: dict[str, Any] = {
        "stages": SHALLOW if rotated else DEEP, "overlap": rotated, "split": True,
        "a_in_registers": fits, "pin": pinned(function) if rotated else 0,
        # One consumer has nobody beside it: its next product is issued before it waits.
        "in_flight": int(groups == 1),
        "tiles": "dynamic" if uneven(function) else "static"}
    if rows > ROWS * groups and ops_in(function.body, "pack_operand"):
        raise Refused("several blocks of rows for a consumer, and a computed operand")
    return replace(pipeline, **{k: v for k, v in chosen.items()
                                if getattr(pipeline, k) is None})


def pinned(function: Function) -> int:
    """Registers to pin: half of the tile that becomes an operand. With that much of the softmax in
    front of the wait the rest of it covers the product's end.
    Three eighths where tiles are of different length: 1 % more of causal attention (H200,
    2026-11-21, benchmarks/kernels.py attention)."""
    packed = max((p.outs[0].type.shape[1]  # type: ignore[union-attr]
                  for p in ops_in(function.body, "pack_operand")), default=0)
    return packed * 3 // 16 if uneven(function) else packed // 4


def rows_of(function: Function) -> int:
    """The rows of all products."""
    found = {d.type.shape[0] for n in ops_in(function.body, "async_product")  # type: ignore[union-attr]
             for d in n.outs}
    if len(found) != 1:
        raise Refused(f"its products have {' and '.join(map(str, sorted(found)))} rows; consumers "
                      "share one number of rows")
    return found.pop()


def consumers(rows: int) -> int:
    """128 rows a pair; 192 for three; more rows are several blocks of each consumer."""
    blocks = rows // ROWS
    return blocks if blocks <= 3 else 2 if blocks % 2 == 0 else 3


def is_chain(loop: For) -> bool:
    """Whether a product of a turn feeds another: worth rotating."""
    products = [n for n in loop.body if is_op(n, "async_product")]
    return len(products) > 1 and any(is_op(n, "pack_operand") for n in loop.body)


def operand_registers(function: Function, maker: Maker) -> tuple[int, int]:
    """Registers of a lane: of computed first operands, of those that may be held."""
    packed = held = 0
    packs = {out(p) for p in ops_in(function.body, "pack_operand")}
    for product in ops_in(function.body, "async_product"):
        a = product.args[0]
        type = maker.type(a)
        assert isinstance(type, TileType)
        words = type.shape[1] * type.dtype.bits // 64  # 64 rows: 4 registers for 32 bytes of k
        packed += words if a in packs else 0
        held += words if a not in packs and _invariant(product, function) else 0
    return packed, held


def _invariant(product: Op, function: Function) -> bool:
    """Whether the first operand is loaded outside of the loop that multiplies it."""
    for loop in walk(function.body):
        if isinstance(loop, For) and product in loop.body:
            return not any(out(n) == product.args[0] for n in ops_in(loop.body, "ring_load"))
    return False


def nonempty(function: Function, known: Knowledge) -> Callable[[For], bool]:
    """(loop) -> whether it surely turns once.

    An extent of a tensor that every group loads anyway is not 0: TMA has no descriptor for it.
    """
    views = {out(n): n for n in ops_in(function.body, "view")}
    always = [views[n.args[0]].args[0] for n in function.body if is_op(n, "ring_load")]  # type: ignore[index]
    extents = {str(d) for p in function.params if p.value in always
               and isinstance(p.type, GlobalTensor) for d in p.type.dims}
    made: dict[SSAValue, Any] = {d.value: n for n in walk(function.body) if isinstance(n, Op)
                                 for d in n.outs}

    def positive(x: Operand) -> bool:
        if isinstance(x, Const):
            return bool(x.value > 0)
        if x in known.extents:
            return x.name in extents
        op = made.get(x)
        if op is None:
            return False
        if op.name in ("minimum", "mul"):
            return all(map(positive, op.args))
        if op.name == "maximum":
            return any(map(positive, op.args))
        return op.name == "add" and any(map(positive, op.args)) and all(
            known.natural(a) for a in op.args)

    return lambda loop: isinstance(loop.lo, Const) and loop.lo.value <= 0 and positive(loop.hi)
