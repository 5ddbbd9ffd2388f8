"""Sums, products and maxima of the elements up to each, along any axis of any layout.

The bits of the index along the axis are taken from the lowest up. After a bit, every element knows
the combination of what precedes it within its block of 2^bits elements, and every thread the total
of the block: a register bit merges two blocks of a thread, a lane bit asks another lane for its
total, and a run of warp bits goes through shared memory once. Elements past the end of the tile
come last, so they need no mask.
"""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import pool
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.scan import slots_of, steps_of
from tessera.tile.ir.ir import Op


@emits("cumsum", "cumprod", "cummax")
def _scan(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype, axis = e.layout(x), e.dtype(x), op.attr["axis"]
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    head = f"{op.name!r}, {tag!r}, {layout.text!r}, {layout.shape}, {axis}, {e.warp_bits}"
    steps = steps_of(layout, axis, e.warp_bits)
    values, totals = e.name(x), ""
    for i, step in enumerate(steps):
        if not step.warps:
            within = e.use(op.name, f"use(scan.within({head}, {i}))")
            args = f"{values}, {totals}" if totals else values
            values, totals = _named(e, f"{within}({args}, {e.thread})")
            continue
        size, slots = kind_bytes(tag), slots_of(layout, axis, e.warp_bits, i)
        at, used = pool(e, size * slots.count)
        if used:
            e.sync()
        put = e.use("put_totals", f"use(scan.put({head}, {i}))")
        e.line(f"{put}({totals}, {at}, {e.thread})")
        e.sync()
        across = e.use(op.name, f"use(scan.across({head}, {i}))")
        values, totals = _named(e, f"{across}({values}, {at}, {e.thread})")
    e.define(made, values)


def _named(e: Emitter, call: str) -> tuple[str, str]:
    values, totals = e.fresh("scanned"), e.fresh("totals")
    e.line(f"{values}, {totals} = {call}")
    return values, totals
