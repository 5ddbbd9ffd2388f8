"""Emission of the matmuls of a warp-specialised program, and of what warps read and compute of
tiles beside them."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.warp_specialised import WarpSpecialisedEmitter, specialised
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.shared_memory import descriptor_bits
from tessera.tile.cuda.lower.warp_specialised.program import (
    PANEL_BYTES,
    WARPGROUP,
    Load,
)
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import Op, SSAValue
from tessera.tile.ir.types import TileType


def step_offsets(load: Load, k: int, major: str, step_bytes: int) -> tuple[int, ...]:
    """Descriptor offsets, in 16-byte units, of the instructions' steps of the contracted axis."""
    bits = load.dtype.bits
    count = k * bits // (8 * step_bytes)
    if major == "M":
        return tuple(i * (8 * step_bytes // bits) * load.width_bytes >> 4 for i in range(count))
    per_panel = load.width_bytes // step_bytes
    return tuple((i // per_panel * load.panel_bytes >> 4) + i % per_panel * (step_bytes >> 4)
                 for i in range(count))


def descriptor(h: WarpSpecialisedEmitter, x: SSAValue, side: str, major: str, apart: int = 0
               ) -> str:
    """The expression of an operand's descriptor. apart: bytes between the parts that warpgroups
    have of a second operand."""
    ring, load, slot = h.slots[x]
    lead = load.panel_bytes if major == "M" else 16
    bits = descriptor_bits(lead, 8 * load.width_bytes, load.width_bytes)
    group = row_offset(load, major, h.form.rows) if side == "a" else apart
    make = h.part(f"describe_{base_name(load.name)}", "describe",
                  ring.offset_bytes + load.offset_bytes, ring.slot_bytes, group, bits)
    return f"{make}({slot}, {h.group})"


def row_offset(load: Load, major: str, rows: int) -> int:
    """Bytes between one row of A and the one so many rows below."""
    if major == "K":
        return rows * load.width_bytes
    return rows * load.dtype.bits // (8 * load.width_bytes) * load.panel_bytes


@emits("async_matmul")
def _async_matmul(e: Emitter, op: Op) -> None:
    h = specialised(e)
    (made,), (a, b, *accumulator) = op.outs, op.args
    attr = op.attr
    assert isinstance(made.type, TileType) and isinstance(a, SSAValue) and isinstance(b, SSAValue)
    m, n = made.type.shape
    right = h.slots[b][1]
    k = right.shape[1] if attr["b_major"] == "K" else right.shape[0]
    part = k // attr.get("parts", 1)
    offsets = step_offsets(right, part, attr["b_major"], h.form.step_bytes)
    piece, pieces = attr.get("piece", 0), attr.get("pieces", 1)
    offsets = offsets[piece * len(offsets) // pieces:(piece + 1) * len(offsets) // pieces]
    form = h.form
    options = {"b": form.operands[right.dtype.name].name, "b_offsets": offsets,
        "majors": attr["a_major"] + attr["b_major"],
        "accumulate": "yes" if accumulator else "no", "wait": h.fused.get(made.value)}
    if a in h.slots:
        left = h.slots[a][1]
        blocks = m // (form.rows * h.program.warpgroups)
        step = row_offset(left, attr["a_major"], form.rows * h.program.warpgroups) >> 4
        options |= {"a_offsets": step_offsets(left, k, attr["a_major"], form.step_bytes),
                    "rows": tuple(i * step for i in range(blocks))}
        x = descriptor(h, a, "a", attr["a_major"])
    else:
        x = e.name(a)
    total = "f32" if attr["dtype"].kind == "float" else "s32"
    settings = ", ".join(f"{key}={value!r}" for key, value in options.items())
    kind = form.operands[e.type(a).dtype.name].name
    e.matmul_forms["wgmma"] = None
    make = e.use("dot", f"use(ptx.wgmma.matmul({n}, {kind!r}, {total!r}, {settings}))")
    apart = part * right.dtype.bits // (8 * right.width_bytes) * right.panel_bytes
    args = [*map(e.name, accumulator), x,
            descriptor(h, b, "b", attr["b_major"], apart if part < k else 0)]
    e.define(made, f"{make}({', '.join(args)})")


@emits("matmul_wait")
def _matmul_wait(e: Emitter, op: Op) -> None:
    (made,), (x,) = op.outs, op.args
    if made.value in specialised(e).absorbed:
        e.define(made, e.name(x))
        return
    count, kind = e.layout(x).count, kind_of(e.dtype(x))
    wait = e.use("wait", f"use(ptx.wgmma.wait({op.attr['pending']}, {count}, {kind!r}))")
    e.define(made, f"{wait}({e.name(x)})")


@emits("hold_operand")
def _hold_operand(e: Emitter, op: Op) -> None:
    _read_fragments(specialised(e), op, "hold")


@emits("read_tile")
def _read_tile(e: Emitter, op: Op) -> None:
    _read_fragments(specialised(e), op, "read_tile", e.dtype(op.outs[0].value).name)


def _read_fragments(h: WarpSpecialisedEmitter, op: Op, name: str, *how: object) -> None:
    assert isinstance(op.args[0], SSAValue)
    ring, load, slot = h.slots[op.args[0]]
    make = h.part(f"{name}_{base_name(load.name)}", name, ring.offset_bytes + load.offset_bytes,
                  ring.slot_bytes, load.panel_bytes, load.width_bytes, load.row_bytes, *how)
    h.define(op.outs[0], f"{make}({slot}, {h.thread})")


@emits("read_row")
def _read_row(e: Emitter, op: Op) -> None:
    h = specialised(e)
    assert isinstance(op.args[0], SSAValue)
    ring, load, slot = h.slots[op.args[0]]
    layout = e.layout(op.outs[0].value)
    make = h.part(f"read_{base_name(load.name)}", "read_row", ring.offset_bytes + load.offset_bytes,
                  ring.slot_bytes, layout.text, layout.shape, load.dtype.name)
    e.define(op.outs[0], f"{make}({slot}, {e.index(layout, 0)})")


@emits("read_columns")
def _read_columns(e: Emitter, op: Op) -> None:
    h = specialised(e)
    assert isinstance(op.args[0], SSAValue)
    ring, load, slot = h.slots[op.args[0]]
    assert load.width_bytes == PANEL_BYTES
    where = (ring.offset_bytes + load.offset_bytes, ring.slot_bytes, load.panel_bytes,
             load.shape[0], op.attr["piece"], op.attr["pieces"])
    make = h.use(f"columns_{base_name(load.name)}", f"use(operand_columns.read{where})")
    e.define(op.outs[0], f"{make}({slot}, {h.thread})")


@emits("pack_operand")
def _pack_operand(e: Emitter, op: Op) -> None:
    kind = specialised(e).form.operands[op.attr["dtype"].name].name
    make = e.use("pack", f"use(fragments.packed(ptx.convert.pack_half({kind!r})))")
    e.define(op.outs[0], f"{make}({e.name(op.args[0])})")


@emits("pin")
def _pin(e: Emitter, op: Op) -> None:
    h = specialised(e)
    layout = e.layout(op.args[0])
    if "pin" not in h.cached:
        h.cached["pin"] = str(h.shared_bytes)
        h.shared_bytes += 16
    make = h.part("pin", "pin", layout.text, layout.shape, op.attr["registers"],
                  int(h.cached["pin"]))
    e.line(f"{make}({e.name(op.args[0])})")


TURN_BARRIER = 2  # of the first consumer; those of the others follow


@emits("turn_begin")
def _turn_begin(e: Emitter, op: Op) -> None:
    h = specialised(e)
    arrive = e.use("bar_arrive", "use('bar_arrive')")
    e.line(f"if {h.group} == {h.program.warpgroups - 1}: "
           f"{arrive}({TURN_BARRIER}, {2 * WARPGROUP})")


@emits("turn_take")
def _turn_take(e: Emitter, op: Op) -> None:
    h = specialised(e)
    take = e.use("turn_take", "use('turn_take')")
    e.line(f"{take}({h.group}, {TURN_BARRIER}, {2 * WARPGROUP})")


@emits("turn_pass")
def _turn_pass(e: Emitter, op: Op) -> None:
    h = specialised(e)
    to_next = e.use("turn_pass", "use('turn_pass')")
    e.line(f"{to_next}({h.group}, {h.program.warpgroups - 1}, {TURN_BARRIER}, {2 * WARPGROUP})")


# --- statistics and results ---------------------------------------------------------------------
@emits("lane_sum")
def _lane_sum(e: Emitter, op: Op) -> None:
    layout = e.layout(op.args[0])
    make = specialised(e).part("lane_sum", "lane_sum", layout.text, layout.shape)
    e.define(op.outs[0], f"{make}({e.name(op.args[0])})")


@emits("quad_sum")
def _quad_sum(e: Emitter, op: Op) -> None:
    make = specialised(e).part("quad_sum", "quad_sum", e.layout(op.args[0]).count)
    e.define(op.outs[0], f"{make}({e.name(op.args[0])})")


@emits("any_differs")
def _any_differs(e: Emitter, op: Op) -> None:
    make = specialised(e).part("any_differs", "any_differs", e.layout(op.args[0]).count,
                               float(op.attr["value"]))
    e.define(op.outs[0], f"{make}({e.name(op.args[0])})")


@emits("row_quotient")
def _row_quotient(e: Emitter, op: Op) -> None:
    (made,), (x, y) = op.outs, op.args
    rows = e.layout(y)
    which = tuple(rows.number[(base[0], 0)] for base in e.layout(made.value).bases)
    make = specialised(e).part("quotient", "quotient", which, rows.count)
    e.define(made, f"{make}({e.name(x)}, {e.name(y)})")
