"""Strips of rows too long to be held in registers, with statistics of rows and sums over them.

    g, x -> dx of a norm, and sum(g), sum(g * x) over all rows

A group takes one row of its strip, which has every so many-th, after another through shared memory,
where the next is on its way meanwhile, and keeps the sums of its columns in registers, block by
block. Sums about means take no pass of their own (shifted_sums.py). Where a row is too long for one
group, the groups of a cluster share it and their statistics. So operands are read once for the
result and the sums.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ....kernels.cards import multiprocessors_of
from ....kernels.row_blocks import STRIPS, strip_count
from ....lazy_dataclass import dataclass
from ....numerics import as_type
from ....runtime.generations import Generation
from ....tile.ir.schedule import Schedule
from ...ir import Node
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame, extents_of
from ..choose_schedule import KEPT_BYTES, blocks, chosen
from .group_statements import CHAIN, FrameBlock, KernelValue, store, value
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import parameters, templates
from .row_passes import RowLoop, needed, write_statistics
from .scaled_differences import scale_differences
from .shifted_sums import Centre, about_samples, ask_samples, hold_samples
from .spell import COMBINE

WIDE = as_type("f32")
BLOCK, WARPS = 4096, 16  # columns at once: eight in each lane
MOST_BLOCKS = 4  # of a group's columns
# Rows of up to so many columns have two groups of a multiprocessor, of which one computes while
# the other waits, in narrower blocks: layer norm's gradient of rows of 8192 takes 122 us in place
# of 148 with rows held whole, rms norm's 114 and 119; of 4096 columns the latter is quicker (2^26
# elements of bf16, H200, 2026-11-26).
LEAST, SHARED, SHARED_BLOCK, SHARED_WARPS, BESIDE = 4096, 8192, 2048, 8, 2
MOST_SUMS = 8  # blocks of sums that lanes have registers for
# Rows in shared memory, of which one is worked on: two, and three where the groups of a cluster
# wait for each other twice a row, or a group that is alone on a multiprocessor does, which then
# writes one while it makes the statistics of the next: layer norm's gradient of rows of 16384 takes
# 156 us in place of 163 (2^26 elements of bf16, H100, 2026-11-26). Of rows of 131072 layer norm's
# gradient has 0.67 of a copy's rate with three and 0.66 with two, of 32768 0.78 and 0.71; rms
# norm's, which waits once, 0.89 and 0.91, 0.83 and 0.86 (the same elements, H200, 2026-11-26).
UNDER_WAY, LATE_UNDER_WAY = 2, 3
# Bytes of a group's part of a row of which one on its way is enough, where a cluster exchanges its
# sums once: layer norm's gradients of 131072 and 65536 124.7 us and 121.1 with two rows there,
# 126.8 and 123.6 with three, but layer norm of 131072 79.3 and 74.2 (the same elements, H200,
# 2026-11-26).
ON_ITS_WAY = 64 << 10


@dataclass(frozen=True)
class LongStrips:
    """rows: of a strip.  groups: of a cluster, of which each has so many columns.  room: bytes of
    shared memory of a group.  beside: groups of a multiprocessor."""

    rows: int
    groups: int
    columns: int
    room: int
    beside: int = 1

    def room_for(self, row: int, for_all: int) -> int:
        """Rows that have room at one time, 0 where it is not even two.  row: bytes of a group's
        part of one; for_all: of what is the same for all."""
        many = (self.room - for_all) // max(1, row)
        return 0 if many < UNDER_WAY else many

    def under_way(self, room: int, steps: Sequence[GroupStep], row: int) -> int:
        """row: bytes of a group's part of one"""
        late = self.beside == 1 and _waits(steps) > 1 and (self.groups == 1 or row < ON_ITS_WAY)
        return min(room, LATE_UNDER_WAY if late else UNDER_WAY)

    @property
    def block(self) -> int:
        return BLOCK if self.beside == 1 else SHARED_BLOCK

    @property
    def schedule(self) -> Schedule:
        if self.beside == 1:
            return chosen(1, BLOCK, warps=WARPS)
        return Schedule(m=1, n=SHARED_BLOCK, warps=SHARED_WARPS, RESIDENT=self.beside)


def long_strips(R: int, C: int, chip: Generation) -> LongStrips | None:
    """How strips of long rows are cut; None where they are not whole blocks."""
    whole = chip.group_shared_bytes
    if C <= SHARED:
        if C % SHARED_BLOCK or (rows := _rows(R, BESIDE * multiprocessors_of(chip))) < 2:
            return None
        return LongStrips(rows, 1, C, whole // BESIDE - KEPT_BYTES, BESIDE)
    for n in STRIPS:
        S = C // n
        if n <= chip.cluster_groups and C % (n * BLOCK) == 0 and S <= MOST_BLOCKS * BLOCK:
            rows = _rows(R, strip_count(n, chip))
            return LongStrips(rows, n, S, whole - KEPT_BYTES) if rows > 1 else None
    return None


def _rows(R: int, strips: int) -> int:
    return blocks(R, strips * blocks(R, strips * CHAIN))


def _waits(steps: Sequence[GroupStep]) -> int:
    """How many statistics of a row wait for each other."""
    deep: dict[object, int] = {}
    for s in steps:
        below = max((deep.get(a, 0) for a in s.args), default=0)
        deep[s.name] = below + (bool(s.reduction) and s.shape[-1:] == (1,))
    return max(deep.values(), default=0)


def add_long_strips(builder: ScheduleBuilder, space: tuple[int, ...], frame: Frame,
                    reads: list[GroupOperand], writes: list[GroupOperand], steps: list[GroupStep],
                    how: LongStrips, room: int) -> None:
    """A kernel whose rows go through shared memory, which has room for so many."""
    row = sum(r.type.dtype.bits for r in reads if all(frame.pattern(r.shape) or (False,)))
    under_way = how.under_way(room, steps, row * how.columns // 8)
    builder.add("strips", space, reads, writes, steps, how.schedule,
                (blocks(frame.extents[0], how.rows) * how.groups,), axes=frame.members,
                rows=how.rows, cluster=how.groups, under_way=under_way,
                widened=_widened(frame, reads, how, row * under_way))


def _widened(frame: Frame, reads: Sequence[GroupOperand], how: LongStrips, brought: int
             ) -> tuple[int, ...]:
    """Which operands that are one row, of 16 bits, have room as f32. brought: bits of a column of
    all that comes row by row."""
    for_all = {i: r for i, r in enumerate(reads) if frame.pattern(r.shape) == (False, True)}
    narrow = tuple(i for i, r in for_all.items() if r.type.dtype.kind == "float" and (
        r.type.dtype.bits == 16 and r.layout is None))
    bits = brought + sum(r.type.dtype.bits for r in for_all.values()) + 16 * len(narrow)
    return narrow if bits * how.columns // 8 <= how.room else ()


def rows_with_room(space: tuple[int, ...], nodes: Sequence[Node], sums: int, how: LongStrips
                   ) -> int:
    """The rows of a loop's operands that have room in shared memory at one time, beside what is the
    same for all; 0 where two do not, or its sums have none in registers."""
    made = {v for n in nodes for v in n.outputs}
    read = {v: extents_of(v) for n in nodes for v in n.inputs if v not in made}
    rows = sum(v.aval.type.dtype.bits for v, e in read.items() if e == space)
    for_all = sum(v.aval.type.dtype.bits for v, e in read.items()
                  if e[-1:] == space[-1:] and prod(e) == space[-1])
    if sums * how.columns > MOST_SUMS * how.block:
        return 0
    return how.room_for(rows * how.columns // 8, for_all * how.columns // 8)


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
    under_way: int
    samples: tuple[Centre, ...] = ()
    widened: tuple[str, ...] = ()  # operands that lie in shared memory as f32
    slot: str = "now"  # the first buffer of the row that is read

    @property
    def blocks(self) -> int:
        return self.columns // self.b.BN

    @property
    def many(self) -> int:
        """Strips: each has every so many-th row."""
        return blocks(self.b.frame.extents[0], self.rows)

    @property
    def steps(self) -> list[GroupStep]:
        """All but the sums."""
        sums = {s.name for s, _ in self.sums}
        return [s for s in self.group.steps if s.name not in sums]

    def loops(self) -> list[RowLoop]:
        """Over columns of the row that has come. Each block has its own where a cluster's groups
        have sums beside samples: layer norm's gradient of 131072 takes 110.6 us in place of 114.3
        and of 65536 107.8 and 112.2, of 16384, without a cluster, 111.8 and 109.5 (2^26 elements of
        bf16, H200, 2026-11-27, by a program around such kernels)."""
        C, BN = self.columns, self.b.BN
        if self.samples and self.sums and self.groups > 1:
            return [RowLoop(f"for n in range({k * BN}, {k * BN + BN}, {BN}):", self.places(str(k)))
                    for k in range(self.blocks)]
        return [RowLoop(f"for n in range(0, {C}, {BN}):", self.places(f"n // {BN}"))]

    def block(self, k: int) -> FrameBlock:
        """The k-th block of its columns, which stands for itself: no later one touches it."""
        BN = self.b.BN
        first, end = (f"{'first+' * (self.groups > 1)}{i * BN}" for i in (k, k + 1))
        return replace(self.b, columns=f"{first}:{end}", held=dict(self.b.held), suffix=f"_w{k}",
                       fill=", fill=0", shared=self.places(str(k)))

    def places(self, block: str) -> dict[str, str]:
        return {r.name: f"{r.name}_s[{self.slot} + {block}]" for r in self.brought} | {
            r.name: f"{r.name}_s" + f"[{block}]" * (self.blocks > 1) for r in self.for_all}


def _strip_of(group: ScheduledGroup, kept: dict[str, str]) -> _Strip:
    frame, n = Frame(group.space, group.attr("axes")), group.attr("cluster")
    BN, at = group.schedule.n, "first+n" if n > 1 else "n"
    b = FrameBlock(frame, "m:m+1", f"{at}:{at}+{BN}", (), 1, BN, {r.name: r for r in group.reads})
    patterns = {r: b.pattern(r) for r in group.reads}
    group, samples = about_samples(b, group)
    if samples and n > 1:
        group = scale_differences(group, (c.near for c in samples))
    sums = tuple((s, kept[s.op]) for s in group.steps if s.op in kept)
    # Their elements are unpacked twice for each row else: layer norm's gradient of 65536 takes
    # 107.8 us in place of 110.0, of 131072 110.6 in either way, layer norm without sums 76.6 in
    # place of 71.4 (2^26 elements of bf16, H200, 2026-11-27).
    widened = group.attr("widened") if samples and sums and n > 1 else ()
    return _Strip(group, b, tuple(r for r, p in patterns.items() if all(p)),
                  tuple(r for r, p in patterns.items() if p == (False, True)), sums,
                  group.attr("rows"), n, frame.extents[1] // n, group.attr("under_way"), samples,
                  tuple(group.reads[i].name for i in widened))


def long_strips_source(group: ScheduledGroup, kept: dict[str, str]) -> KernelText:
    """Row after row of a strip. kept: of the ops that are sums, how elements are combined."""
    w, strip = KernelWriter(group), _strip_of(group, kept)
    group = strip.group
    b, many, half, under_way = strip.b, strip.many, strip.blocks, strip.under_way
    if strip.groups > 1:
        w.line(f"strip = tile.group_id(0) // {strip.groups}")
        w.line(f"first = tile.group_id(0) % {strip.groups} * {strip.columns}")
    else:
        w.line("strip = tile.group_id(0)")
    _begin(w, strip)
    w.line(f"own = {_own_rows(strip)}")
    _load_row(w, strip, strip.for_all, "" if half > 1 else None)
    if strip.groups == 1 and under_way > UNDER_WAY and not strip.samples:
        _write_behind(w, strip)
        return _finish(w, strip)
    for i in range(under_way - 1):
        w.line(f"m = strip + {i * many}")
        _bring_row(w, strip, str(i), f"{i * half} + ")
    _ask_samples(w, strip, "0")
    with w.block("for i in range(0, own):"):
        hold_samples(w, b, strip.samples)
        _ask_samples(w, strip, "i + 1")
        w.line(f"tile.cp_wait_group({under_way - 2})")
        w.line("tile.barrier()")  # the row before this one has been read
        w.line(f"now = i % {under_way} * {half}")
        w.line(f"next = (i + {under_way - 1}) % {under_way} * {half}")
        w.line(f"m = strip + (i + {under_way - 1}) * {many}")
        _bring_row(w, strip, f"i + {under_way - 1}", "next + ")
        w.line(f"m = strip + i * {many}")
        texts = templates(group)
        write_statistics(w, b, group.reads, strip.steps, strip.columns, texts,
                         itertools.repeat(strip.loops()), strip.groups)
        _write_row(w, strip, texts, range(half))
    return _finish(w, strip)


def _write_behind(w: KernelWriter, strip: _Strip) -> None:
    """Row after row, each written while the statistics of the next are made, some of its blocks
    behind each of these: lanes that wait for others of their group have something to do."""
    b, many, half, under_way, texts = (strip.b, strip.many, strip.blocks, strip.under_way,
                                       templates(strip.group))
    ahead, waits = replace(strip, slot="then"), _waits(strip.steps)

    def statistics(*meanwhile: Callable[[], None]) -> dict[str, KernelValue]:
        """Of the row m; those that are numbers of it."""
        found = replace(b, held=dict(b.held))
        write_statistics(w, found, strip.group.reads, strip.steps, strip.columns, texts,
                         itertools.repeat(ahead.loops()), strip.groups, meanwhile)
        return {name: v for name, v in found.held.items() if v.m and not v.n}

    for i in range(under_way):  # a row again where there are fewer, for statistics nobody reads
        w.line(f"m = strip + min({i}, own - 1) * {many}")
        _load_row(w, strip, strip.brought, f"{i * half} + ")
        w.line("tile.cp_commit_group()")
    w.line(f"tile.cp_wait_group({under_way - 1})")
    w.line("tile.barrier()")
    w.line("m = strip")
    w.line("then = 0")
    made = statistics()
    with w.block("for i in range(0, own):"):
        held = {name: replace(v, text=f"{name}_h") for name, v in made.items()}
        for name, v in held.items():
            w.line(f"{v.text} = {made[name].text}")
        w.line(f"tile.cp_wait_group({under_way - 2})")
        w.line("tile.barrier()")
        w.line(f"now = i % {under_way} * {half}")
        w.line(f"then = (i + 1) % {under_way} * {half}")
        w.line(f"m = strip + (i + 1) * {many}")

        def write(first: int, end: int) -> None:
            w.line(f"m = strip + i * {many}")
            _write_row(w, replace(strip, b=replace(b, held=held)), texts, range(first, end))

        ends = [half * k // waits for k in range(waits + 1)]
        statistics(*(functools.partial(write, *span) for span in itertools.pairwise(ends)))
        w.line("tile.barrier()")  # the row has been read: another one comes in its place
        w.line(f"m = strip + (i + {under_way}) * {many}")
        _bring_row(w, strip, f"i + {under_way}", "now + ")


def _ask_samples(w: KernelWriter, strip: _Strip, i: str) -> None:
    """Loads those of the strip's i-th row, or of its last."""
    if strip.samples:
        w.line(f"a = strip + min({i}, own - 1) * {strip.many}")
        ask_samples(w, replace(strip.b, rows="a:a+1"), strip.samples)


def _own_rows(strip: _Strip) -> str:
    """How many rows a strip has: the last ones may have one less."""
    R, many = strip.b.frame.extents[0], strip.many
    left = R % many
    return f"{R // many + 1} if strip < {left} else {R // many}" if left else str(R // many)


def _begin(w: KernelWriter, strip: _Strip) -> None:
    """Room for rows, and sums of nothing."""
    BN = strip.b.BN
    for r in strip.brought:
        w.line(f"{r.name}_s = tile.alloc_shared((1, {BN}), {w.type(r.type)}, "
               f"stages={strip.under_way * strip.blocks})")
    for r in strip.for_all:
        kind = w.type(WIDE if r.name in strip.widened else r.type)
        w.line(f"{r.name}_s = tile.alloc_shared(({BN},), {kind}, stages={strip.blocks})")
    for s, way in strip.sums:
        for k in range(strip.blocks):
            w.line(f"{s.name}_a{k} = tile.full((1, {BN}), {COMBINE[way][1]}, {w.type(s.type)})", s)


def _load_row(w: KernelWriter, strip: _Strip, operands: Sequence[GroupOperand], to: str | None
              ) -> None:
    """Row m of these into their buffers. to: in front of a buffer's number; None of the only one.
    """
    if operands:
        with w.block(f"for n in range(0, {strip.columns}, {strip.b.BN}):"):
            for r in operands:
                place = f"{r.name}_s" + f"[{to}n // {strip.b.BN}]" * (to is not None)
                if r.name in strip.widened:
                    wide = f"tile.cast(tile.load({strip.b.place(r)[0]}), {w.type(WIDE)})"
                    w.line(f"{place}{'[:]' * (to is None)} = {wide}")
                else:
                    w.line(f"tile.cp_async({place}, {strip.b.place(r)[0]})")


def _bring_row(w: KernelWriter, strip: _Strip, i: str, to: str) -> None:
    """Row m of the strip, its i-th, if it has so many."""
    with w.block(f"if {i} < own:"):
        _load_row(w, strip, strip.brought, to)
    w.line("tile.cp_commit_group()")


def _write_row(w: KernelWriter, strip: _Strip, texts: dict[str, str], among: range) -> None:
    """What is stored of these blocks of a row, numbers of the row with the first of them, and their
    elements to the sums: each block of columns has its own."""
    b, steps = strip.b, {s.name: s for s in strip.steps}
    writes = [o for o in strip.group.writes if o.name in steps]
    for o in writes:
        if 0 in among and not b.pattern(o)[-1]:
            store(w, b, o, steps[o.name])
    for k in among:
        inner = strip.block(k)
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


__all__ = ["LongStrips", "add_long_strips", "long_strips", "long_strips_source", "rows_with_room"]
