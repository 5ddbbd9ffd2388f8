"""The knobs that a schedule left open, derived from the function (see `PipelineKnobs`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from tessera.runtime.generations import Generation, PipelineDefaults, WarpgroupMatmul
from tessera.tile.cuda.lower.warp_specialised.persist import uneven
from tessera.tile.cuda.lower.warp_specialised.pressure import pressure
from tessera.tile.cuda.lower.warp_specialised.program import WARPGROUP, PipelineKnobs, Refused
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    READ_IN_PIECES,
    Maker,
    is_op,
    is_part,
    ops_in,
    out,
)
from tessera.tile.cuda.lower.warp_specialised.rotate import ends
from tessera.tile.cuda.lower.warp_specialised.sink import sink_loads
from tessera.tile.ir.ir import Const, For, Function, Op, Operand, defining_ops, walk
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.integer_facts import Knowledge

MOST_STAGES = 16  # of slots that are small
FEWEST_REGISTERS = 24  # of a lane that only copies (setmaxnreg)
# Of a thread that brings rows into the order of codes, where several blocks share them, or one.
DEALING_REGISTERS = 56, 96
BESIDE_REGISTERS = 40  # of a thread that copies what any loop and its tables say
AHEAD_REGISTERS = 56  # of a thread that copies where weights come early: its loop is unrolled


def complete(pipeline: PipelineKnobs, function: Function, maker: Maker,
             generation: Generation) -> PipelineKnobs:
    """The pipeline with every knob set, except raster and reversed. Raises Refused."""
    rows, form = rows_of(function), generation.warpgroup_matmul
    assert form is not None
    groups = consumers(rows, form, pipeline)
    if rows % (form.rows * groups):
        raise Refused(f"{rows} rows for {groups} consumer warpgroups")
    pipeline = replace(pipeline, warpgroups=groups)
    held, crossing = operand_registers(function, maker, form)
    usual, fewest = form.defaults.other_registers
    few, many = form.registers[groups], form.most_registers[groups]
    room, most = (few or many)[1] - usual, many[1] - fewest
    # Rotated, operands of the iteration before live beside the scores of this one.
    least, rotated = pressure(sink_loads(function.body), maker, groups), len(crossing)
    while rotated and least + sum(crossing[-rotated:]) > max(room, most):
        rotated -= 1
    tiles = least + sum(crossing[len(crossing) - rotated:])
    if tiles > max(room, most):
        raise Refused(f"its tiles take {tiles} registers of a thread, there is room for "
                      f"{max(room, most)}")
    if pipeline.registers is None and pipeline.resident > 1:
        least = DEALING_REGISTERS[0] if deals(function) else (
            BESIDE_REGISTERS if pipeline.beside > 1 else FEWEST_REGISTERS)
        pipeline = replace(pipeline, registers=registers_beside(groups, pipeline.resident,
                                                                generation, least))
        left = pipeline.registers[1] - usual  # type: ignore[index]
        if pipeline.beside > 1 and (groups > 1 or tiles + held > left):
            raise Refused(f"{groups} consumers whose tiles take {tiles + held} registers of a "
                          f"thread, beside another block: one has room for {left}")
    elif pipeline.registers is None and deals(function):
        pipeline = replace(pipeline, registers=registers_beside(groups, 1, generation,
                                                                DEALING_REGISTERS[1]))
    elif pipeline.registers is None and pipeline.ahead and few is not None:
        pipeline = replace(pipeline, registers=registers_beside(groups, 1, generation,
                                                                AHEAD_REGISTERS))
    elif pipeline.registers is None:
        pipeline = replace(pipeline, registers=few if tiles <= room or few is None else many)
    fits = tiles + held <= room and rows == form.rows * groups
    chosen: dict[str, Any] = {
        "stages": form.defaults.stages[1] if crossing else _stages(
            function, maker, form.defaults, pipeline.resident),
        "overlap": rotated, "split": True,
        "a_in_registers": fits, "pin": pinned(function, form.defaults) if rotated else 0,
        # One consumer has nobody beside it: its next matmul is issued before it waits. And those of
        # operands that are read into registers run while the next ones are read, or computed: one
        # of them, for two leave no registers for that.
        "in_flight": int(groups == 1 or bool(ops_in(function.body, *READ_IN_PIECES)) or (
            any(ops_in((n,), "read_tile") for n in function.body if isinstance(n, For))
            and len(ops_in(function.body, "async_matmul")) == 1)),
        "tiles": "dynamic" if uneven(function) else "static"}
    if rows > form.rows * groups and ops_in(function.body, "pack_operand", *READ_IN_PIECES):
        raise Refused("several blocks of rows for a consumer, and a computed operand")
    return replace(pipeline, **{k: v for k, v in chosen.items()
                                if getattr(pipeline, k) is None})


def registers_beside(groups: int, blocks: int, generation: Generation,
                     least: int = FEWEST_REGISTERS) -> tuple[int, int]:
    """Of a lane of the producer and of a consumer, where so many blocks share a multiprocessor."""
    launched = generation.registers // (blocks * WARPGROUP * (groups + 1)) // 8 * 8
    return least, (launched * (groups + 1) - least) // groups // 8 * 8


def deals(function: Function) -> bool:
    """Whether threads of the producer bring rows into the order of codes."""
    return any(len(n.args) == 2 for n in ops_in(function.body, "unpack_codes"))


def _stages(function: Function, maker: Maker, defaults: PipelineDefaults, resident: int) -> int:
    """Slots of a ring in a loop with one matmul: more where they are small, so that enough bytes
    are under way."""
    most = 0
    for loop in walk(function.body):
        if isinstance(loop, For):
            types = [maker.type(out(n)) for n in loop.body if is_op(n, "ring_load")]
            most = max(most, sum(prod(t.shape) * t.dtype.bits // 8 for t in types
                                 if isinstance(t, TileType)))
    wanted = defaults.ring_bytes // resident // most if most else 0
    return max(defaults.stages[0], min(wanted, MOST_STAGES))


def pinned(function: Function, defaults: PipelineDefaults) -> int:
    """Registers to pin, of the tile that becomes an operand. With that much of the softmax in front
    of the wait the rest of it covers the matmul's end."""
    packed = max((p.outs[0].type.shape[1]  # type: ignore[union-attr]
                  for p in ops_in(function.body, "pack_operand")), default=0)
    return packed * defaults.pinned_sixteenths[uneven(function)] // 16


def rows_of(function: Function) -> int:
    """The rows of all matmuls."""
    found = {d.type.shape[0] for n in ops_in(function.body, "async_matmul")  # type: ignore[union-attr]
             for d in n.outs}
    if len(found) != 1:
        raise Refused(f"its matmuls have {' and '.join(map(str, sorted(found)))} rows; consumers "
                      "share one number of rows")
    return found.pop()


def consumers(rows: int, form: WarpgroupMatmul, pipeline: PipelineKnobs) -> int:
    """As many as the knobs say, where that can be; else one for each block of rows while that many
    can run, then pairs; more rows are several blocks of each consumer."""
    wanted = pipeline.warpgroups or 0
    if wanted in form.registers and rows % (form.rows * wanted) == 0:
        return wanted
    blocks, most = rows // form.rows, max(form.registers)
    return blocks if blocks <= most else 2 if most > 1 and blocks % 2 == 0 else most


def is_chain(loop: For) -> bool:
    """Whether a matmul of an iteration feeds another: worth rotating."""
    first, last = ends(loop)
    return len(last) > 0 and first != last and any(is_op(n, "pack_operand") for n in loop.body)


def operand_registers(function: Function, maker: Maker,
                      form: WarpgroupMatmul) -> tuple[int, list[int]]:
    """Registers of a lane: of first operands that may be held, and of the computed ones of the last
    matmuls of a loop that may be rotated, in order."""
    packs = {out(p) for p in ops_in(function.body, "pack_operand", *READ_IN_PIECES)}

    def words(matmul: Op) -> int:
        type = maker.type(matmul.args[0])
        assert isinstance(type, TileType)
        return form.rows * type.shape[1] * type.dtype.bits // (32 * WARPGROUP)

    held = sum(words(m) for m in ops_in(function.body, "async_matmul")
               if m.args[0] not in packs and _invariant(m, function))
    found = [[words(m) if m.args[0] in packs else 0 for m in ends(n)[1]]
             for n in walk(function.body) if isinstance(n, For) and is_chain(n)]
    return held, max(found, key=sum, default=[])


def _invariant(matmul: Op, function: Function) -> bool:
    """Whether the first operand is loaded outside of the loop that multiplies it."""
    for loop in walk(function.body):
        if isinstance(loop, For) and matmul in loop.body:
            return not any(out(n) == matmul.args[0] for n in ops_in(loop.body, "ring_load"))
    return False


def nonempty(function: Function, known: Knowledge) -> Callable[[For], bool]:
    """(loop) -> whether it surely runs once.

    An extent of a tensor that every group loads anyway is not 0: TMA has no descriptor for it.
    """
    views = {out(n): n for n in walk(function.body) if is_part(n)}
    always = [views[n.args[0]].args[0] for n in function.body if is_op(n, "ring_load")]  # type: ignore[index]
    extents = {str(d) for p in function.params if p.value in always
               and isinstance(p.type, GlobalTensor) for d in p.type.dims}
    made = defining_ops(function.body)

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
