"""Strips of rows too long to be held in registers, with statistics of rows and sums over them.

    g, x -> dx of a norm, and sum(g), sum(g * x) over all rows

A group takes one row of its strip after another through shared memory, where the next is on its
way meanwhile, and keeps the sums of its columns in registers, block by block. Where a row is too
long for one group, the groups of a cluster share it and their statistics. So operands are read
once for the result and the sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...runtime.generations import Generation
from ...tile.ir.schedule import Schedule
from ..ir import Node
from ..schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ..schedule.loop_axes import Frame, extents_of
from .choose_schedule import KEPT_BYTES, blocks, chosen
from .group_statements import CHAIN, FrameBlock, store, value
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import parameters, templates
from .row_passes import RowLoop, inside_loops, needed, write_statistics
from .spell import COMBINE

BLOCK, WARPS = 4096, 16  # columns at once: eight in each lane
MOST_BLOCKS = 4  # of a group's columns
MOST_SUMS = 8  # blocks of sums that lanes have registers for
GROUPS, MOST_WAVES = 128, 64  # about one for each multiprocessor, at one time
ROWS_UNDER_WAY = 2
# Of a cluster. Each row waits for statistics of all its groups, which takes longer the more there
# are: layer norm's and rms norm's gradients of 2^26 elements of bf16 have 0.78 and 0.88 of a copy's
# rate in rows of 16384 (0.48 and 0.57 where the sums are a kernel of their own), 0.67 and 0.88 of
# 32768 (0.44 and 0.57), but in clusters of eight, rows of 131072, 0.35 and 0.58 (0.43 and 0.52;
# H200, 2026-11-26).
MOST_GROUPS = 2


@dataclass(frozen=True)
class LongStrips:
    """rows: of a strip.  groups: of a cluster, of which each has so many columns.  room: bytes of
    shared memory of a group."""

    rows: int
    groups: int
    columns: int
    room: int

    @property
    def schedule(self) -> Schedule:
        return chosen(1, BLOCK, warps=WARPS)


def long_strips(R: int, C: int, chip: Generation) -> LongStrips | None:
    """How strips of long rows are cut; None where they are not whole blocks."""
    for n in (1, MOST_GROUPS):
        S = C // n
        if n <= chip.cluster_groups and C % (n * BLOCK) == 0 and S <= MOST_BLOCKS * BLOCK:
            cuts = (blocks(R * n, GROUPS * waves) for waves in range(1, MOST_WAVES + 1))
            rows = next((r for r in cuts if R % r == 0 and 1 < r <= CHAIN), None)
            room = chip.group_shared_bytes - KEPT_BYTES
            return None if rows is None else LongStrips(rows, n, S, room)
    return None


def fits_long(space: tuple[int, ...], nodes: Sequence[Node], sums: int, how: LongStrips) -> bool:
    """Whether a loop's operands have room in shared memory, two rows and what is the same for all,
    and its sums in registers."""
    made = {v for n in nodes for v in n.outputs}
    read = {v: extents_of(v) for n in nodes for v in n.inputs if v not in made}
    rows = sum(v.aval.type.dtype.bits for v, e in read.items() if e == space)
    for_all = sum(v.aval.type.dtype.bits for v, e in read.items()
                  if e[-1:] == space[-1:] and prod(e) == space[-1])
    bytes_ = (ROWS_UNDER_WAY * rows + for_all) * how.columns // 8
    return sums * how.columns <= MOST_SUMS * BLOCK and bytes_ <= how.room


@dataclass(frozen=True)
class _Strip:
    """What is written of a strip. b: the blocks of the row m.  brought: operands that come through
    shared memory row by row.  for_all: those that are one row.  sums: steps, each with the way in
    which its elements are combined."""

    group: ScheduledGroup
    b: FrameBlock
    brought: tuple[GroupOperand, ...]
    for_all: tuple[GroupOperand, ...]
    sums: tuple[tuple[GroupStep, str], ...]
    rows: int
    groups: int
    columns: int

    @property
    def blocks(self) -> int:
        return self.columns // self.b.BN

    @property
    def steps(self) -> list[GroupStep]:
        """All but the sums."""
        sums = {s.name for s, _ in self.sums}
        return [s for s in self.group.steps if s.name not in sums]

    def loop(self, first: int, end: int) -> RowLoop:
        """Over columns of the row that has come."""
        BN = self.b.BN
        return RowLoop(f"for n in range({first}, {end}, {BN}):",
                       {r.name: f"{r.name}_s[now + n // {BN}]" for r in self.brought}
                       | {r.name: f"{r.name}_s[n // {BN}]" for r in self.for_all})


def _strip_of(group: ScheduledGroup, kept: dict[str, str]) -> _Strip:
    frame, n = Frame(group.space, group.attr("axes")), group.attr("cluster")
    BN, at = group.schedule.n, "first+n" if n > 1 else "n"
    b = FrameBlock(frame, "m:m+1", f"{at}:{at}+{BN}", (), 1, BN, {r.name: r for r in group.reads})
    patterns = {r: b.pattern(r) for r in group.reads}
    return _Strip(group, b, tuple(r for r, p in patterns.items() if all(p)),
                  tuple(r for r, p in patterns.items() if p == (False, True)),
                  tuple((s, kept[s.op]) for s in group.steps if s.op in kept),
                  group.attr("rows"), n, frame.extents[1] // n)


def long_strips_source(group: ScheduledGroup, kept: dict[str, str]) -> KernelText:
    """Row after row of a strip. kept: of the ops that are sums, how elements are combined."""
    w, strip = KernelWriter(group), _strip_of(group, kept)
    b, rows, half = strip.b, strip.rows, strip.blocks
    if strip.groups > 1:
        w.line(f"strip = tile.group_id(0) // {strip.groups}")
        w.line(f"first = tile.group_id(0) % {strip.groups} * {strip.columns}")
    else:
        w.line("strip = tile.group_id(0)")
    _begin(w, strip)
    w.line(f"m = strip * {rows}")
    _bring(w, strip, strip.for_all, "")
    _bring(w, strip, strip.brought, "0 + ")
    w.line("tile.cp_commit_group()")
    with w.block(f"for i in range(0, {rows}):"):
        w.line("tile.cp_wait_group(0)")
        w.line("tile.barrier()")  # the row before this one has been read
        w.line(f"now = i % 2 * {half}")
        w.line(f"next = {half} - now")
        w.line(f"m = strip * {rows} + i + 1")
        with w.block(f"if i + 1 < {rows}:"):
            _bring(w, strip, strip.brought, "next + ")
        w.line("tile.cp_commit_group()")
        w.line(f"m = strip * {rows} + i")
        texts = templates(group)
        write_statistics(w, b, group.reads, strip.steps, strip.columns, texts,
                         itertools.repeat([strip.loop(0, strip.columns)]), strip.groups)
        _write_row(w, strip, texts)
    return _finish(w, strip)


def _begin(w: KernelWriter, strip: _Strip) -> None:
    """Room for rows, and sums of nothing."""
    BN = strip.b.BN
    for r in strip.brought:
        w.line(f"{r.name}_s = tile.alloc_shared((1, {BN}), {w.type(r.type)}, "
               f"stages={ROWS_UNDER_WAY * strip.blocks})")
    for r in strip.for_all:
        w.line(f"{r.name}_s = tile.alloc_shared(({BN},), {w.type(r.type)}, stages={strip.blocks})")
    for s, way in strip.sums:
        for k in range(strip.blocks):
            w.line(f"{s.name}_a{k} = tile.full((1, {BN}), {COMBINE[way][1]}, {w.type(s.type)})", s)


def _bring(w: KernelWriter, strip: _Strip, operands: Sequence[GroupOperand], to: str) -> None:
    """Row m of these into their buffers. to: in front of a buffer's number."""
    if operands:
        with w.block(f"for n in range(0, {strip.columns}, {strip.b.BN}):"):
            for r in operands:
                w.line(f"tile.cp_async({r.name}_s[{to}n // {strip.b.BN}], {strip.b.place(r)[0]})")


def _write_row(w: KernelWriter, strip: _Strip, texts: dict[str, str]) -> None:
    """What is stored of a row, and its elements to the sums: each block of columns has its own."""
    b, steps = strip.b, {s.name: s for s in strip.steps}
    writes = [o for o in strip.group.writes if o.name in steps]
    for o in writes:
        if not b.pattern(o)[-1]:
            store(w, b, o, steps[o.name])
    loops = [strip.loop(k, k + b.BN) for k in range(0, strip.columns, b.BN)]
    for k, inner in enumerate(inside_loops(w, b, loops, "_w")):
        for o in writes:
            if b.pattern(o)[-1]:
                needed(w, inner, (o.name,), steps, texts)
                store(w, inner, o, steps[o.name])
        for s, way in strip.sums:
            needed(w, inner, s.args, steps, texts)
            held, total = value(w, inner, s.args[0], "float", s), f"{s.name}_a{k}"
            whole = held.text if held.m and held.n else f"tile.broadcast({held.text}, {b.shape})"
            w.line(f"{total} = "
                   f"{COMBINE[way][0].format(total, f'tile.cast({whole}, {w.type(s.type)})')}", s)


def _finish(w: KernelWriter, strip: _Strip) -> KernelText:
    """One row of sums for the strip."""
    first, BN, names = "first+" if strip.groups > 1 else "", strip.b.BN, set[str]()
    for s, _ in strip.sums:
        names.add(s.name)
        for k in range(strip.blocks):
            span = f"{first}{k * BN}:{first}{k * BN + BN}"
            w.line(f"{capital(s.name)}[strip:strip+1, {span}] = {s.name}_a{k}", s)
    group = strip.group
    partial = [o for o in group.writes if o.name in names]
    texts, shapes = parameters(w, strip.b, (*group.reads, *(
        o for o in group.writes if o.name not in names)))
    texts += [f"{capital(o.name)}: {w.annotation(o, o.shape)}" for o in partial]
    return w.finish(texts, f"(grid={group.grid})", [*shapes, *(o.shape for o in partial)])


__all__ = ["LongStrips", "fits_long", "long_strips", "long_strips_source"]
