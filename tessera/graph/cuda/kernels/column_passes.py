"""Statistics of columns, what follows from them, and elements made with both, in one kernel.

    softmax(x, axis=1),  (x - mean(x, 1)) * rsqrt(var(x, 1))          # x: [A, R, C]

A group has a run of columns of one [R, C]. Where it holds all their rows in registers, the operand
is read once; else each level of statistics is a pass over the rows, and so is what is written:
what the first pass read comes from the second-level cache then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.generations import Generation
from ....tile.ir.schedule import Schedule
from ...ir import Node, Value
from ...schedule.groups import MAX_OPS, MAX_READS, FusionGroup, in_order
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame, extents_of
from ..choose_schedule import blocks, chosen, power
from .column_frames import ColumnFrame, column_frame, reductions
from .group_statements import (
    ColumnReduction,
    FrameBlock,
    KernelValue,
    combined,
    depends_on_index,
    emit_step,
    finished,
    reduction_source,
    start,
    store,
    value,
)
from .kernel_text import KernelText, KernelWriter, capital
from .row_passes import needed
from .running_columns import running_blocks, running_columns, write_running
from .shifted_sums import SAMPLE, about_column_samples, hold_column_samples

if TYPE_CHECKING:
    from ...schedule.build_schedule import ScheduleBuilder

LANE = 64  # f32 numbers of a lane, of operands and a result, of columns that are held
WARPS, MOST_WARPS = 4, 16
LINE_BITS, LEAST_BITS = 1024, 256  # of a row of a block: a line of memory, a sector
GROUPS = 264  # two for each multiprocessor
SMALL = 1 << 20  # elements that a few groups read as quickly as kernels are launched
STEP = 8192  # elements of a block, of columns that are not held
AXES = ((0,), (1,), (2,))
# Of one pass over columns that are not held: elements of a block, columns, warps, and blocks that
# are on their way to L2. Variances of [64, 1024, 1024] of bf16 over axis 1 take 46.0 us, in blocks
# of 4096 elements 47.4, of 4096 in 32 columns 57.0, of 8192 in sixteen warps 85.9; of [16, 4096,
# 1024] 50.9 and 58.0 (H200, 2026-11-27, in turn).
ONCE, ONCE_COLUMNS, ONCE_WARPS, AHEAD = 8192, 64, 8, 2


# --- which groups are one -----------------------------------------------------------------------
def join_columns(groups: Sequence[FusionGroup], results: Sequence[Value]) -> list[FusionGroup]:
    """The groups, with reductions of columns, others of the same elements and what reads them as
    one where all else that it reads is there before the first of them. results: of the graph"""
    made_at = {v: i for i, group in enumerate(groups) for v in group.outputs}
    readers: dict[Value, list[int]] = {}
    for i, group in enumerate(groups):
        for v in group.inputs:
            readers.setdefault(v, []).append(i)
    taken: dict[int, FusionGroup | None] = {}
    for i, group in enumerate(groups):
        if i not in taken and group.kind == "columns" and len(reductions(group)) == 1:
            members = _members(i, groups, made_at, readers, taken)
            if len(members) > 1:
                taken |= dict.fromkeys(members)
                kept = {v for v in results} | {v for v, at in readers.items()
                                               if not members.issuperset(at)}
                taken[i] = _merge_groups([groups[j] for j in sorted(members)], kept)
    found = (taken.get(i, group) for i, group in enumerate(groups))
    return [group for group in found if group is not None]


def _members(first: int, groups: Sequence[FusionGroup], made_at: dict[Value, int],
             readers: dict[Value, list[int]], taken: dict[int, FusionGroup | None]) -> set[int]:
    """The numbers of the groups that are one with the first."""
    group, whole = groups[first], column_frame(groups[first])
    A, R, C = whole.extents
    members, nodes = {first}, len(group.nodes)
    if A * blocks(C, 32) < GROUPS and A * R * C > SMALL:
        return members
    inside, reads = set(group.outputs), {v for v in group.inputs if extents_of(v) == group.space}
    beside = [j for v in reads for j in readers[v] if j > first and groups[j].kind == "columns"]
    work = [*beside, *(j for v in group.outputs for j in readers.get(v, ()))]
    heapq.heapify(work)
    while work:
        j = heapq.heappop(work)
        other = groups[j]
        outside = [v for v in other.inputs if v not in inside]
        more = reads | {v for v in outside if extents_of(v) == group.space}
        if j in members or j in taken or not _may_join(other, group, whole) or (
                nodes + len(other.nodes) > MAX_OPS or len(more) > MAX_READS
                or any(made_at.get(v, -1) >= first for v in outside)):
            continue
        members.add(j)
        inside.update(other.outputs)
        reads, nodes = more, nodes + len(other.nodes)
        for v in other.outputs:
            for k in readers.get(v, ()):
                heapq.heappush(work, k)
    return members


def _may_join(other: FusionGroup, group: FusionGroup, whole: ColumnFrame) -> bool:
    axis = reductions(group)[0].attrs["axis"]
    if other.batch is not None or not whole.takes((*other.inputs, *other.outputs)):
        return False
    if other.kind == "columns":
        sums = reductions(other)
        return other.space == group.space and len(sums) == 1 and sums[0].attrs["axis"] == axis
    numbers = tuple(1 if a in axis else n for a, n in enumerate(group.space))
    return other.kind == "loop" and other.space in (group.space, numbers) and not any(
        n.op.placed or n.op.makes or n.op.effects or n.op.reduction or n.op.name == "check_index"
        for n in other.nodes)


def _merge_groups(groups: Sequence[FusionGroup], kept: set[Value]) -> FusionGroup:
    """One group of the nodes of several; what they compute twice is computed once."""
    known: dict[object, Value] = {}
    same: dict[Value, Value] = {}
    nodes: list[Node] = []
    for n in (n for g in groups for n in g.nodes):
        inputs = tuple(same.get(v, v) for v in n.inputs)
        key, own = (n.meaning, inputs), n.outputs[0]
        if n.meaning is not None and key in known and own not in kept:
            same[own] = known[key]
            continue
        known.setdefault(key, own)
        nodes.append(n if inputs == n.inputs else Node(n.op, inputs, n.attrs, n.outputs, n.where))
    nodes = in_order(nodes)  # one may make again what an earlier one has read
    inside = {v for n in nodes for v in n.outputs}
    reads = list(dict.fromkeys(v for n in nodes for v in n.inputs if v not in inside))
    return FusionGroup("columns", groups[0].space, nodes, reads,
                       [v for n in nodes for v in n.outputs if v in kept])


# --- blocks -------------------------------------------------------------------------------------
def schedule_column_passes(builder: ScheduleBuilder, group: FusionGroup, chip: Generation) -> None:
    """All rows of a run of columns where registers hold them, the run at least a sector wide."""
    whole = column_frame(group)
    A, R, C = whole.extents
    reads = [builder.operand(v, whole.shape(v)) for v in builder.reads(group)]
    writes = [builder.operand(v, whole.shape(v)) for v in group.outputs]
    tall = [o for o in (*reads, *writes) if o.shape[1] == R > 1]
    s = column_blocks((A, R, C), max(1, sum(o in reads for o in tall)),
                      min((o.type.dtype.bits for o in tall), default=32))
    steps = [builder.step(n) for n in group.nodes]
    if (running := running_blocks((A, R, C), writes, steps, chip)) is not None:
        builder.add("columns", (A, R, C), reads, writes, steps, running, (A, blocks(C, running.n)),
                    axes=AXES, running=True)
        return
    once = s.value("warps_") == MOST_WARPS and not any(o in writes for o in tall) and (
        R >= 2 * SAMPLE and is_one_pass((A, R, C), reads, writes, steps))
    streamed = streamed_blocks((A, R, C))
    # What is read once needs no registers for rows, and goes in wider ones.
    flat = (s.m or 1) >= R >= 2 * SAMPLE and streamed.n >= 2 * s.n and A * R * C > SMALL and (
        _depth(steps, reads) == 1 and not any(o in writes for o in tall))
    s = streamed if once or flat else s
    builder.add("columns", (A, R, C), reads, writes, steps, s, (A, blocks(C, s.n)), axes=AXES,
                **{"once": True} if once else {}, **{"ahead": AHEAD} if flat and not once else {})


def _depth(steps: Sequence[GroupStep], reads: Sequence[GroupOperand]) -> int:
    """How many statistics follow from each other."""
    levels = dict.fromkeys((r.name for r in reads), 0)
    for s in steps:
        levels[s.name] = _level(s, levels)
    return max(levels.values())


def is_one_pass(space: tuple[int, int, int], reads: Sequence[GroupOperand],
                writes: Sequence[GroupOperand], steps: Sequence[GroupStep]) -> bool:
    """Whether statistics of columns, some about others, may all be made in one pass, about samples
    of the columns (shifted_sums.py)."""
    frame = Frame(space, AXES)
    group = ScheduledGroup("g", "columns", space, tuple(reads), tuple(writes), tuple(steps),
                           Schedule(), (1,))
    b = FrameBlock(frame, "m", "n", ("a",), 1, 1, {r.name: r for r in reads})
    made, centres = about_column_samples(b, group)
    levels = dict.fromkeys((*b.operands, *(c.near for c in centres)), 0)
    for s in made.steps:
        levels[s.name] = _level(s, levels)
    return bool(centres) and max(levels.values()) == 1


def _level(step: GroupStep, levels: dict[str, int]) -> int:
    """How many statistics of columns deep it is."""
    names = (a for a in step.args if isinstance(a, str))
    return max((levels[a] for a in names), default=0) + bool(step.reduction)


def streamed_blocks(extents: tuple[int, int, int]) -> Schedule:
    """Of columns whose statistics take one pass: lines of memory where these are groups enough, a
    sector at least."""
    A, R, C = extents
    n, least = min(power(C), ONCE_COLUMNS), min(power(C), LEAST_BITS // 16)
    while n > least and A * blocks(C, n) < GROUPS:
        n //= 2
    return chosen(max(1, min(power(R) // 2, ONCE // n)), n, warps=ONCE_WARPS)


def column_blocks(extents: tuple[int, int, int], operands: int, bits: int) -> Schedule:
    """operands: that lie along all axes; bits: of the narrowest.

    Groups of half as many warps, where these hold the rows, or with registers for two of sixteen on
    a multiprocessor, so that some load while others reduce. Of [64, 512, 2048] of bf16 over axis 1
    softmax takes 121.8 us in eight warps, 139.4 in two groups of sixteen and 182.8 in one, a norm
    105.2, 115.8 and 168.7; variances of [64, 1024, 1024] 86.1 in two and 112.4 in one (H200,
    2026-11-27, in turn)."""
    A, R, C = extents
    bits = max(16, min(32, bits))
    n, least = min(power(C), LINE_BITS // bits), min(power(C), LEAST_BITS // bits)
    most = 32 * MOST_WARPS * LANE // (operands + 1)
    if 2 * power(R) * least <= most:
        most //= 2
    while n > least and (power(R) * n > most or A * blocks(C, n) < GROUPS):
        n //= 2
    if power(R) * n <= most:
        warps = max(WARPS, min(MOST_WARPS, power(R) * n * (operands + 1) // (32 * LANE)))
        s = chosen(R, n, warps=warps)
        return replace(s, extra=(("RESIDENT", 2),)) if warps == MOST_WARPS else s
    n = min(power(C), max(n, LINE_BITS // 2 // bits))
    return chosen(min(power(R) // 2, STEP // n), n, warps=MOST_WARPS)


# --- the kernel ---------------------------------------------------------------------------------
def column_passes_source(group: ScheduledGroup,
                         templates: Callable[[ScheduledGroup], dict[str, str]]) -> KernelText:
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    R, BR, BN = group.space[1], group.schedule.m or 1, group.schedule.n
    w.line("a = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    held = BR >= R
    b = FrameBlock(frame, f"0:{R}" if held else f"m:m+{BR}", f"n:n+{BN}", ("a",), BR, BN,
                   {r.name: r for r in group.reads}, fill=", fill=0")
    if dict(group.attrs).get("once"):
        group, centres = about_column_samples(b, group)
        hold_column_samples(w, b, centres)
    b.ahead = AHEAD if dict(group.attrs).keys() & {"once", "ahead"} else 1
    texts = templates(group)
    passes = _Passes(w, b, R, group.steps, texts)
    for r in group.reads:
        if not b.pattern(r)[1]:  # the same for all rows
            value(w, b, r.name, r.type.dtype.kind, group.steps[0])
    if dict(group.attrs).get("running"):
        passes.running()
    passes.statistics()
    for o in group.writes:
        if not b.pattern(o)[1]:
            w.line(f"{capital(o.name)}[a, 0:1, n:n+{BN}] = {b.held[o.name].text}",
                   passes.steps.get(o.name))
    full = [o for o in group.writes if b.pattern(o)[1]]
    if full:
        for inner in passes.blocks("_w"):
            for o in full:
                needed(w, inner, (o.name,), passes.steps, texts)
                store(w, inner, o, passes.steps.get(o.name))
    return w.finish_operands([b.dims(o) if o in full or o in group.reads else o.shape
                              for o in w.operands])


class _Passes:
    """Writes the statistics of a group's columns, and the blocks of one pass after another."""

    def __init__(self, w: KernelWriter, b: FrameBlock, R: int, steps: Sequence[GroupStep],
                 texts: dict[str, str]):
        self.w, self.b, self.R, self.texts = w, b, R, texts
        self.steps = {s.name: s for s in steps}
        self.tall = {r for r, o in b.operands.items() if b.pattern(o)[1]}
        self.levels = dict.fromkeys((*b.operands, *b.held), 0)
        for s in steps:
            names = [a for a in s.args if isinstance(a, str)]
            self.levels[s.name] = _level(s, self.levels)
            if not s.reduction and (depends_on_index(s) or self.tall.intersection(names)):
                self.tall.add(s.name)

    def blocks(self, suffix: str) -> Iterator[FrameBlock]:
        """The block that is held, or those of a pass."""
        if self.b.BM >= self.R:
            yield self.b
            return
        with self.w.block(f"for m in range(0, {self.R}, {self.b.BM}):"):
            yield replace(self.b, held=dict(self.b.held), suffix=suffix)

    def running(self) -> None:
        found = running_columns(self.R, [*self.steps.values()])
        assert found is not None
        write_running(self.w, self.b, self.R, found, self.steps, self.texts)

    def statistics(self) -> None:
        known = set(self.b.held)
        for level in range(max(self.levels.values()) + 1):
            for s in self.steps.values():
                if self.levels[s.name] == level and not s.reduction and (
                        s.name not in self.tall | known):
                    emit_step(self.w, self.b, s, self.texts[s.name])
            folds = [ColumnReduction.of(s, blocks(self.R, self.b.BM)) for s in self.steps.values()
                     if s.reduction and self.levels[s.name] == level + 1 and s.name not in known]
            if folds:
                self.fold(folds, level)

    def fold(self, folds: list[ColumnReduction], level: int) -> None:
        """Each place of the blocks has totals of its own, which are put together at the end."""
        w, b = self.w, self.b
        whole, shape = b.BM >= self.R, f"({b.BM}, {b.BN})"
        for f in () if whole else folds:
            w.line(f"{f.step.name}_a = {start(w, f, shape)}", f.step)
        for inner in self.blocks(f"_p{level}"):
            for f in folds:
                needed(w, inner, f.step.args, self.steps, self.texts)
                name, part = f.step.name, reduction_source(w, inner, f)
                if self.R % b.BM:
                    w.line(f"{name}_p = {part}", f.step)
                    there = f"tile.arange(0, {b.BM})[:, None] < {self.R} - m"
                    part = f"tile.where({there}, {name}_p, {f.neutral})"
                total = part if whole else combined(w, f, f"{name}_a", part)
                w.line(f"{name}_a = {total}", f.step)
        for f in folds:
            made = f"tile.col_{f.way}({f.step.name}_a)[None, :]"
            w.line(f"{f.step.name} = {finished(w, f, made)}", f.step)
            b.held[f.step.name] = KernelValue(f.step.name, False, True)


__all__ = ["column_blocks", "column_passes_source", "join_columns", "schedule_column_passes"]
