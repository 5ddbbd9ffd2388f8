"""Rings: which loads arrive together, in how many slots, and where in shared memory.

Loads of one block whose first reader is the same matmul share a ring: they are needed together and
free together. A row of numbers comes with the matmul whose result it meets. A load outside of loops
is simply a ring of one slot, or of two where there is room and nobody reads it into registers: that
of the next tile arrives meanwhile. Loops one after another take turns with their rings: what the
next one reads arrives while the one before ends, and no memory lies idle. A load that an
iteration's first matmuls read and its last ones too has a slot more, for a rotated loop holds it
into the next iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from tessera.tile.cuda.lower.warp_specialised.computed import fed
from tessera.tile.cuda.lower.warp_specialised.program import (
    MAIL_BYTES,
    BufferRing,
    Load,
    PipelineKnobs,
    Refused,
    aligned,
    copied_windows,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    READ_IN_PIECES,
    Maker,
    Nodes,
    is_op,
    is_part,
    made_by,
    ops_in,
    out,
    reads,
)
from tessera.tile.cuda.lower.warp_specialised.rotate import held_over
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import Const, For, If, Op, SSAValue, While, regions, walk
from tessera.tile.ir.types import TileType

FEW = 3  # slots of operands at least, beside two of tiles that meet the results


def form_rings(nodes: Nodes, maker: Maker, knobs: PipelineKnobs, room_bytes: int,
               result_bytes: int) -> tuple[BufferRing, ...]:
    """Rings with as many slots in loops as the knobs say, fewer where they do not fit, or where
    tiles that meet the results, and these, of so many bytes, do not. Raises Refused."""
    assert knobs.stages is not None
    held = held_over(nodes, knobs.overlap) if knobs.overlap else set()
    # Codes are unpacked while matmuls of the iteration before run, which hold their slot.
    least = 2 if knobs.in_flight and ops_in(nodes, "unpack_codes") else 1
    counts = range(max(knobs.stages, least), least - 1, -1)
    wanted = [(stages, outside, 0) for stages in counts
              for outside in ((1,) if knobs.a_in_registers else (2, 1))]
    if any(is_op(n, "read_tile") for n in nodes):  # they meet the results
        few = [n for n in counts if n >= min(FEW, knobs.stages)]
        wanted = [*((n, 2, result_bytes) for n in few), *((n, 1, result_bytes) for n in counts),
                  *wanted]
    for stages, outside, beside in wanted:
        rings = _rings(nodes, maker, stages, outside, held)
        needed = max(r.barriers_bytes + r.barrier_bytes for r in rings)
        if needed + MAIL_BYTES + beside <= room_bytes:
            return rings
    raise Refused(f"its tiles need {needed} bytes of shared memory, there are {room_bytes}")


def _rings(nodes: Nodes, maker: Maker, stages: int, outside: int, held: set[SSAValue]
           ) -> tuple[BufferRing, ...]:
    made: list[BufferRing] = []
    at = 0
    for in_loop, fills in groups(nodes):
        placed = tuple(_slot_offsets(loads, nodes, maker) for loads in fills)
        name = ring_name(made, placed[0])
        over = any(out(load) in held for loads in fills for load in loads)
        made.append(BufferRing(name, stages + over if in_loop else outside, placed, at))
        at += made[-1].slots * made[-1].slot_bytes
    for i, ring in enumerate(made):
        made[i] = replace(ring, barriers_bytes=at)
        at += ring.barrier_bytes
    return tuple(made)


def _slot_offsets(loads: list[Op], nodes: Nodes, maker: Maker) -> tuple[Load, ...]:
    """What arrives together, one behind the other in a slot."""
    placed, size = [], 0
    for load in loads:
        placed.append(replace(describe(load, nodes, maker), offset_bytes=size))
        size = aligned(size + placed[-1].bytes)
    return tuple(placed)


def ring_name(made: list[BufferRing], loads: tuple[Load, ...]) -> str:
    name = "_".join(base_name(load.name) for load in loads)
    return name if all(r.name != name for r in made) else f"{name}_{len(made)}"


def groups(nodes: Nodes) -> Iterator[tuple[bool, list[list[Op]]]]:
    """(whether in a loop, the loads of each fill) of each ring, in the order of the program."""
    first: dict[SSAValue, int] = {}
    pieces = {out(n): n.args[0] for n in ops_in(nodes, *READ_IN_PIECES)}
    for i, matmul in enumerate(ops_in(nodes, "async_matmul")):
        for x in matmul.args[:2]:
            x = pieces.get(x, x) if isinstance(x, SSAValue) else x
            if isinstance(x, SSAValue):
                first.setdefault(x, i)
    first |= fed(nodes)
    first |= _meetings(nodes, first)

    def block(nodes: Nodes, in_loop: bool) -> Iterator[tuple[bool, list[list[Op]]]]:
        found: dict[int, list[Op]] = {}
        for node in nodes:
            if is_op(node, "ring_load"):
                assert isinstance(node, Op)
                found.setdefault(first[out(node)], []).append(node)
        yield from ((in_loop, [loads]) for loads in found.values())
        loops = [n for n in nodes if isinstance(n, For | While)]
        inside = [[fills for r in regions(n) for _, fills in block(r, True)] for n in loops]
        yield from ((True, sum(turns, [])) for turns in _rings_by_position(inside))
        for node in nodes:
            if isinstance(node, If):
                for region in regions(node):
                    yield from block(region, in_loop)

    yield from block(nodes, False)


def _rings_by_position(inside: list[list[list[list[Op]]]]) -> Iterator[list[list[list[Op]]]]:
    """The rings of loops one after another: the first of each is one, the second of each is one."""
    for some in zip_longest(*inside):
        yield [fills for fills in some if fills]


def _meetings(nodes: Nodes, first: dict[SSAValue, int]) -> dict[SSAValue, int]:
    """The load of a row, or of a tile that is read into registers -> the number of the matmul whose
    result it meets first; else as it was."""
    number = {out(m): i for i, m in enumerate(ops_in(nodes, "async_matmul"))}
    source: dict[SSAValue, SSAValue] = {}  # value -> the row that it is made of alone
    latest: dict[SSAValue, int] = {}  # value -> the last matmul that it is made of
    found: dict[SSAValue, int] = {}
    for node in walk(nodes):
        if not isinstance(node, Op):
            continue
        if is_op(node, "read_row", "read_tile"):
            source[out(node)] = node.args[0]  # type: ignore[assignment]
            continue
        used = sorted(reads(node), key=str)
        met = max((latest[v] for v in used if v in latest), default=None)
        for v in made_by(node):
            if v in number:
                latest[v] = number[v]
            elif met is not None:
                latest[v] = met
        for row in (source[v] for v in used if v in source):
            if met is not None:
                found.setdefault(row, met)
            elif len(node.outs) == 1:
                source[out(node)] = row
    rows = [x for n in ops_in(nodes, "read_row", "read_tile") for x in n.args
            if isinstance(x, SSAValue)]
    return {row: found.get(row, first.get(row, 0)) for row in rows}


def describe(load: Op, nodes: Nodes, maker: Maker) -> Load:
    """The record of a ring_load."""
    view = next(n for n in walk(nodes) if is_part(n) and out(n) == load.args[0])
    assert isinstance(view, Op) and isinstance(view.args[0], SSAValue)
    type = maker.type(out(load))
    assert isinstance(type, TileType)
    windows = copied_windows(view.attr, type.dtype) if view.name == "windows" else None
    box = type.shape if windows else tuple(view.attr["box"])
    unpacked = [op for op in ops_in(nodes, "unpack_codes") if op.args[0] == out(load)]
    return Load(out(load).name, view.args[0].name, box, type.shape, type.dtype, windows=windows,
                part=not isinstance(view.args[-1], Const), dealt=_order(load, nodes),
                codes=bool(unpacked), laid=any(op.attr["laid"] for op in unpacked))


def _order(load: Op, nodes: Nodes) -> str:
    """The codes beside which a load is multiplied in their order, if any."""
    return next((op.attr["codes"].name for op in ops_in(nodes, "unpack_codes")
                 if op.args[1:] == (out(load),)), "")


__all__ = ["form_rings", "groups"]
