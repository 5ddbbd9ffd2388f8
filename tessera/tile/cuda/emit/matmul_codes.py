"""Matmuls of packed weights, which are multiplied as they lie."""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.matmul import prepare
from tessera.tile.cuda.emit.matmul_operands import Stores
from tessera.tile.cuda.emit.memory_operands import ZERO, MemoryOperand, place_of
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.shared_tiles import spot_of, store_buffer
from tessera.tile.cuda.emit.warp_specialised import advance, specialised
from tessera.tile.cuda.intrinsics.matmul_codes import EACH, part_words
from tessera.tile.cuda.intrinsics.swizzle import ALIGNMENT, stage_bytes
from tessera.tile.cuda.intrinsics.unpacked_codes import Part
from tessera.tile.cuda.lower.warp_specialised.program import DEALERS, PANEL_BYTES
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import Op, Operand, SSAValue
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import Buffer, GlobalTensor, TileType


@emits("packed_bytes")
def _packed_bytes(e: Emitter, op: Op) -> None:
    (made,), whole = op.outs, place_of(e, op.args[0])
    t = made.type
    assert isinstance(t, GlobalTensor)
    e.places[made.value] = replace(whole, numeric=t.numeric,
                                   extents=tuple(map(e.extent, t.dims)),
                                   texts=tuple(map(str, t.dims)))


@emits("matmul_codes")
def _matmul_codes(e: Emitter, op: Op) -> None:
    a, b, sums = op.args
    (made,), codes, layout = op.outs, op.attr["codes"], e.layout(op.outs[0].value)
    stores: Stores = []
    x, y = _in_shared(e, a, False, stores), _in_shared(e, b, True, stores)
    prepare(e, stores)
    depth = y.shape[0] // layout.shape[0]
    part, each, lane = depth * codes.bits // 8, EACH * codes.bits // 8, f"({e.thread} & 3)"
    number = e.index(layout, 0)
    # Bits of a column that threads or parts may set: none below those of what a lane reads.
    spots = [spot_of(e, x, [e.index(layout, 1), f"{number} * {part} + {lane} * {each}"],
                     -(each & -each)),
             spot_of(e, y, [f"({_column(e, layout)})",
                         f"{number} * {depth} + {lane} * {EACH}"], -EACH)]
    places = [f"({s.panel.text}, {s.zeros})" for s in spots]
    text = (f"use(matmul_codes.multiply({codes.name!r}, {layout.text!r}, {layout.shape}, "
            f"{places[0]}, {places[1]}, {depth}))")
    e.matmul_forms["mma"] = None
    e.note(f"matmul {'x'.join(map(str, layout.shape[1:]))}x{y.shape[0]} by mma.sync: {codes} as "
           f"they lie, in {layout.shape[0]} parts of k")
    e.define(made, f"{e.use('multiply', text)}({e.name(sums)}, "
             f"{', '.join(p for s in spots for p in s.place)})")


def _column(e: Emitter, layout: RegisterLayout) -> str:
    """The column of x that a lane holds for the tensor cores. Bits of the numbers of their columns
    are a register of the sums and two of the lane."""
    bits = [bit[1] for bit in (layout.registers[0], *layout.threads[:2]) if bit is not None]
    return " | ".join(f"({e.thread} >> {2 + i} & 1) << {bit}" for i, bit in enumerate(bits))


def _in_shared(e: Emitter, x: Operand, turned: bool, stores: Stores) -> MemoryOperand:
    """An operand whose rows run along k in memory."""
    t = e.type(x)
    if not isinstance(t, TileType):
        return place_of(e, x)
    shape = t.shape[::-1] if turned else t.shape
    buffer = Buffer(t.dtype, shape, swizzle="chunks", alignment=ALIGNMENT)
    place = MemoryOperand("shared", "operand", buffer.numeric, shape, tuple(map(str, shape)),
                          (ZERO, ZERO), (1, 0) if turned else (0, 1), t.shape,
                          e.scratch(stage_bytes(buffer), ALIGNMENT), buffer)
    stores.append(lambda: store_buffer(e, place, e.layout(x), e.name(x)))
    return place


@emits("sum_parts")
def _sum_parts(e: Emitter, op: Op) -> None:
    """Each warp writes its part; after a barrier every thread adds up elements of its own."""
    (x,), (made,) = op.args, op.outs
    given, result = e.layout(x), e.layout(made.value)
    count, *rest = given.shape
    shape = (rest[0], rest[1])
    at = e.scratch(4 * count * part_words(shape))
    if e.loops:
        e.sync()
    pitch = part_words((shape[0], 1))
    put = e.use("put_part", f"use(matmul_codes.put_part({given.text!r}, {given.shape}))")
    e.line(f"{put}({e.name(x)}, i32({at} + 4 * ({e.index(given, 0)} * {part_words(shape)} + "
           f"{e.index(given, 2)} * {pitch} + {e.index(given, 1)})))")
    e.sync()
    total = e.use("sum_parts", f"use(matmul_codes.sum_parts({result.text!r}, {result.shape}, "
                  f"{count}))")
    e.define(made, f"{total}(i32({at} + 4 * ({e.index(result, 1)} * {pitch} + "
             f"{e.index(result, 0)})))")


# --- in the registers of warpgroups ---------------------------------------------------------------
@emits("unpack_codes")
def _unpack_codes(e: Emitter, op: Op) -> None:
    """A lane's words are read where the first piece of a batch of them is unpacked."""
    h, attr = specialised(e), op.attr
    codes, *beside = op.args
    assert isinstance(codes, SSAValue)
    ring, load, slot = h.slots[codes]
    part = Part(load.row_bytes // attr["parts"], attr["codes"].name, attr["dtype"].name,
                "laid" if attr["laid"] else "dealt" if beside else "memory")
    how = part.part_bytes, part.codes, part.dtype, part.order_of_k
    name, (piece, pieces) = base_name(load.name), (attr["piece"], attr["pieces"])
    batch, at = divmod(piece, pieces // part.batches)
    words = f"{codes.name}_words"
    if at == 0:
        where = (ring.offset_bytes + load.offset_bytes, ring.slot_bytes, load.panel_bytes,
                 load.width_bytes, *how, batch, attr["panel"], attr["parts"])
        e.line(f"{words} = {e.use(f'read_{name}', f'use(unpacked_codes.read{where})')}"
               f"({slot}, {h.thread})")
    make = e.use(f"unpack_{name}", f"use(unpacked_codes.unpack{(*how, piece, pieces)})")
    e.note(f"codes become {attr['dtype']} in registers: {attr['codes']} as they lie, in "
           f"{attr['parts']} parts of k")
    e.define(op.outs[0], f"{make}({words}, {h.thread})")


@emits("ring_deal")
def _ring_deal(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    at, phase = h.positions[ring.name]
    whole = h.helper(f"{ring.name}_whole", "ring_whole", ring.barriers_bytes)
    e.line(f"{whole}({at}, {phase})")
    for load in ring.loads:
        if load.dealt:
            assert load.width_bytes == PANEL_BYTES
            how = (ring.offset_bytes + load.offset_bytes, ring.slot_bytes, load.panel_bytes,
                   load.shape, load.dtype.name, load.dealt, DEALERS)
            deal = e.use(f"deal_{base_name(load.name)}", f"use(dealt_codes.deal{how})")
            e.line(f"{deal}({at}, i32({h.all_threads} - 32))")
    e.line(f"{h.helper(f'{ring.name}_dealt', 'ring_dealt', ring.dealt_bytes)}({at})")
    advance(h, ring)
