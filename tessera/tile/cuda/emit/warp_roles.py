"""Roles of the warps of a warp-specialised program: which have them, and what helpers ask ahead."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.warp_specialised import map_of, specialised
from tessera.tile.cuda.lower.warp_specialised.program import AHEAD_WARP, DEALERS
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import Op


@emits("is_producer")
def _is_producer(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({specialised(e).role} == 0)")


@emits("is_first")
def _is_first(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({specialised(e).all_threads} == 0)")


@emits("set_registers")
def _set_registers(e: Emitter, op: Op) -> None:
    count, how = op.attr["registers"], op.attr["how"]
    name = "more_registers" if how == "inc" else "fewer_registers"
    e.line(e.use(name, f"use(ptx.barriers.set_registers({count}, {how!r}))") + "()")


@emits("is_dealer")
def _is_dealer(e: Emitter, op: Op) -> None:
    thread = specialised(e).all_threads
    e.define(op.outs[0], f"i32({thread} >= 32 and {thread} < {32 + DEALERS})")


@emits("is_ahead")
def _is_ahead(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({specialised(e).all_threads} == {32 * AHEAD_WARP})")


@emits("ring_ahead")
def _ring_ahead(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    for name, view in zip(op.attr["loads"], op.args, strict=True):
        load = ring.load(name)
        map_, offsets, joined = map_of(h, ring, load, view)
        ask = h.helper(f"{base_name(name)}_ahead", "ring_ahead", len(load.box), load.panels,
                     load.panel_box[-1], *((True,) if joined else ()))
        e.line(f"{ask}({', '.join([map_, *offsets])})")
