"""Kernels of rows too long to be held in registers: passes over them, one for each level of
statistics and one for what is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ....lazy_dataclass import dataclass
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame, Pattern
from ..choose_schedule import blocks
from .group_statements import (
    ColumnReduction,
    FrameBlock,
    KernelValue,
    combined,
    depends_on_index,
    emit_step,
    finished,
    fold_rows,
    reduction_source,
    start,
    store,
    value,
)
from .kernel_text import KernelWriter

# Of a row that is brought, each waited for alone: where a group has a multiprocessor to itself. Of
# two, one computes while the other waits, and loops over parts take registers.
PARTS = 4
# Of operands of rows that a group holds whole. Gradients of softmax take 93.0 us in place of 97.9
# in rows of 64, 92.8 and 99.0 of 256, 93.1 and 98.0 of 512, 93.1 and 97.5 of 2048, of log softmax
# 93.2 and 97.8, 93.1 and 98.3 of 64 and 256 (2^26 elements of bf16, H200, 2026-11-26).
STAGED_BYTES = 16 << 10
# The longest of them, in four warps: softmax's gradient takes 92.6 us in place of 94.4 in passes,
# and 93.0 in eight warps (the same elements, H200, 2026-11-27).
STAGED_COLUMNS = 4096


@dataclass(frozen=True)
class RowLoop:
    """A loop over some whole blocks of a row.

    head: of the loop.  shared: the places of operands' blocks that lie in shared memory then.
    pending: parts of the row that may still be on their way, None where nothing is waited for
    """

    head: str
    shared: dict[str, str]
    pending: int | None = None


def write_passes(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int,
                 texts: dict[str, str]) -> None:
    """N: columns of a row that this group has: all, or of a cluster its share.

    Row statistics are held across passes; everything that varies along a row is computed anew
    in each pass that needs it. Operands of several passes are brought to shared memory, as much of
    them as has room, all at once; the first pass goes over what has come, while the rest is on its
    way."""
    arriving = _copy_loops(w, b, group, N)
    held = set.intersection(*(set(x.shared) for x in arriving)) if arriving else set()
    turns, back = any(all(b.pattern(r)[-2:]) and r.name not in held for r in group.reads), False

    def pass_loops() -> Iterator[list[RowLoop]]:
        nonlocal back
        yield arriving or [RowLoop(f"for n in range(0, {N // b.BN * b.BN}, {b.BN}):", {})]
        while True:
            back = turns and not back
            yield _all_blocks(b, group, N, back)

    loops = pass_loops()
    write_statistics(w, b, group.reads, group.steps, N, texts, loops, group.attr("cluster"))
    _write_rows(w, b, group, next(loops), N, {s.name: s for s in group.steps}, texts)


def write_statistics(w: KernelWriter, b: FrameBlock, reads: Sequence[GroupOperand],
                     among: Sequence[GroupStep], N: int, texts: dict[str, str],
                     loops: Iterator[list[RowLoop]], together: int,
                     meanwhile: Iterable[Callable[[], None]] = ()) -> None:
    """What is one number for each row, in as many passes as there are levels of it. loops: those of
    one pass after another.  meanwhile: of each, writes what is done before its numbers are read
    """
    levels, wide = _levels(b.frame, reads, among)
    steps, others = {s.name: s for s in among}, iter(meanwhile)
    for r in reads:
        if r.name not in wide:  # a number for each row, read once
            user = next(s for s in among if r.name in s.args)
            value(w, b, r.name, r.type.dtype.kind, user)
    rows = [s for s in among if not s.reduction and s.name not in wide]
    for level in range(max(levels.values(), default=0) + 1):
        _narrow(w, b, [s for s in rows if levels[s.name] == level], texts)
        folds = [ColumnReduction.of(s, blocks(N, b.BN)) for s in among
                 if s.reduction and levels[s.name] == level + 1]
        if folds:
            _fold_pass(w, b, folds, next(loops), N, level, steps, texts, together)
            for write in itertools.islice(others, 1):
                write()


def _spans(b: FrameBlock, group: ScheduledGroup, N: int) -> list[tuple[int, int, dict[str, str]]]:
    """(first block, end, the operands that are in shared memory there) along a row."""
    brought = {group.reads[i].name: many for i, many in group.attr("brought")}
    ends = sorted({0, N // b.BN, *brought.values()})
    places = {name: f"{name}_s" + f"[n // {b.BN}]" * (many > 1) for name, many in brought.items()}
    return [(begin, end, {name: place for name, place in places.items() if end <= brought[name]})
            for begin, end in pairwise(ends)]


def _all_blocks(b: FrameBlock, group: ScheduledGroup, N: int, back: bool) -> list[RowLoop]:
    """Loops over the whole blocks of a row."""
    found = []
    for begin, end, shared in _spans(b, group, N):
        first, last = begin * b.BN, end * b.BN
        span = f"{last - b.BN}, {first - b.BN if first else -1}, -{b.BN}" if back else \
            f"{first}, {last}, {b.BN}"
        found.append(RowLoop(f"for n in range({span}):", shared))
    return found[::-1] if back else found


def _copy_loops(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int) -> list[RowLoop]:
    """The loops over the blocks as they come, none where nothing is brought. Each whole block has
    a buffer, so that no access to it needs to look for the end."""
    brought = {group.reads[i].name: (group.reads[i], many) for i, many in group.attr("brought")}
    rest = _rest(b, N, "")
    for name, (o, many) in brought.items():
        kind, rows = w.type(o.type), f"{b.BM}, " if b.pattern(o)[-2] else ""
        w.line(f"{name}_s = tile.alloc_shared(({rows}{b.BN},), {kind}, stages={many})")
        if rest is not None and many == N // b.BN:
            w.line(f"{name}_t = tile.alloc_shared(({rows}{rest.BN},), {kind})")
            w.line(f"tile.cp_async({name}_t, {rest.place(o)[0]})")
            b.shared[name] = f"{name}_t"
    if not brought:
        return []
    parts = PARTS if group.attr("alone") else 1
    loops = [RowLoop(f"for n in range({first * b.BN}, {last * b.BN}, {b.BN}):", shared)
             for begin, end, shared in _spans(b, group, N)
             for first, last in pairwise(_split_points(begin, end, parts if begin == 0 else 1))]
    for loop in loops:
        if loop.shared:
            with w.block(loop.head):
                for name, place in loop.shared.items():
                    w.line(f"tile.cp_async({place}, {b.place(brought[name][0])[0]})")
            w.line("tile.cp_commit_group()")
    coming = sum(bool(loop.shared) for loop in loops)
    return [replace(loop, pending=coming - 1 - i) if loop.shared else loop
            for i, loop in enumerate(loops)]


def _split_points(begin: int, end: int, parts: int) -> list[int]:
    parts = min(parts, end - begin)
    return [begin + (end - begin) * i // parts for i in range(parts + 1)]


def _fold_pass(w: KernelWriter, b: FrameBlock, folds: list[ColumnReduction], loops: list[RowLoop],
               N: int, level: int, steps: dict[str, GroupStep], texts: dict[str, str],
               together: int) -> None:
    """Statistics of one level. Every lane combines what stands in its places of the blocks, and at
    the end lanes combine what they have, and what the rest of the row gives behind the last; then
    the groups of a cluster theirs."""
    for f in folds:
        w.line(f"{f.step.name}_a = {start(w, f, f'({b.BM}, {b.BN})')}", f.step)
    for inner in inside_loops(w, b, loops, f"_p{level}"):
        for f in folds:
            needed(w, inner, f.step.args, steps, texts)
            name, part = f"{f.step.name}_a", reduction_source(w, inner, f)
            w.line(f"{name} = {combined(w, f, name, part)}", f.step)
    rest, found = _rest(b, N, f"_q{level}"), list[str]()
    for f in folds:
        name = f"{f.step.name}_a"
        text = f"tile.row_{f.way}({name})"
        if rest is not None:
            needed(w, rest, f.step.args, steps, texts)
            text = combined(w, f, text, fold_rows(w, rest, f))
        if rest is not None or together > 1:
            w.line(f"{name} = {text}", f.step)
            text = name
        found.append(f"tile.cluster_{f.way}({text}, {together})" if together > 1 else text)
    for f, text in zip(folds, found, strict=True):
        w.line(f"{f.step.name} = {finished(w, f, text)}", f.step)
        b.held[f.step.name] = KernelValue(f.step.name, True, False)


def _write_rows(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, loops: list[RowLoop],
                N: int, steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    full = [o for o in group.writes if b.pattern(o)[-1]]
    for o in group.writes:
        if o not in full:
            store(w, b, o, steps.get(o.name))

    def write(inner: FrameBlock) -> None:
        for o in full:
            needed(w, inner, (o.name,), steps, texts)
            store(w, inner, o, steps.get(o.name))

    if full:
        for inner in inside_loops(w, b, loops, "_w"):
            write(inner)
        if (rest := _rest(b, N, "_x")) is not None:
            write(rest)


def inside_loops(w: KernelWriter, b: FrameBlock, loops: list[RowLoop], suffix: str
            ) -> Iterator[FrameBlock]:
    """The same block in each loop of a pass: all of it is inside of the rows."""
    for i, loop in enumerate(loops):
        if loop.pending is not None:
            w.line(f"tile.cp_wait_group({loop.pending})")
            w.line("tile.barrier()")
        with w.block(loop.head):
            yield replace(b, held=dict(b.held), suffix=suffix + f"_{i}" * (len(loops) > 1),
                          fill=", fill=0", shared=loop.shared)


def _rest(b: FrameBlock, N: int, suffix: str) -> FrameBlock | None:
    """What is left of rows behind the last whole block."""
    left = N % b.BN
    first = "first+" if b.columns.startswith("first+") else ""
    return replace(b, columns=f"{first}{N - left}:{first}{N}", BN=left, held=dict(b.held),
                   suffix=suffix) if left else None


def _levels(frame: Frame, reads: Sequence[GroupOperand], steps: Sequence[GroupStep]
            ) -> tuple[dict[str, int], set[str]]:
    """How many statistics deep each value is, and which values vary along a row."""
    levels = {r.name: 0 for r in reads}
    wide = {r.name for r in reads if _along(frame, r)[-1]}
    for s in steps:
        names = [a for a in s.args if isinstance(a, str)]
        levels[s.name] = max((levels.get(a, 0) for a in names), default=0)
        if s.reduction:
            levels[s.name] += 1
        elif depends_on_index(s) or any(a in wide for a in names):
            wide.add(s.name)
    return levels, wide


def _along(frame: Frame, operand: GroupOperand) -> Pattern:
    found = frame.pattern(operand.shape)
    assert found is not None, f"{operand} does not lie along {frame}"
    return found


def read_for_all(frame: Frame, reads: Sequence[GroupOperand]) -> dict[int, int]:
    """The numbers of the operands that are one row, the same for all, and its bytes."""
    return {i: frame.extents[-1] * r.type.dtype.bits // 8 for i, r in enumerate(reads)
            if _along(frame, r)[-1] and not any(_along(frame, r)[:-1]) and r.layout is None}


def statistics_deep(frame: Frame, reads: Sequence[GroupOperand], steps: Sequence[GroupStep]) -> int:
    """How many statistics of a row follow from each other."""
    return max(_levels(frame, reads, steps)[0].values(), default=0)


def read_again(frame: Frame, reads: Sequence[GroupOperand], writes: Sequence[GroupOperand],
               steps: Sequence[GroupStep]) -> dict[int, int]:
    """The numbers of the operands whose rows are read in several passes, and the bytes of a row."""
    levels, wide = _levels(frame, reads, steps)
    by_name = {s.name: s for s in steps}
    passes: dict[int, list[str]] = {}
    for s in steps:
        if s.reduction:
            passes.setdefault(levels[s.name], []).extend(a for a in s.args if isinstance(a, str))
    passes[-1] = [o.name for o in writes]
    counts = Counter(name for wanted in passes.values() for name in _read(wanted, wide, by_name))
    return {i: frame.extents[-1] * r.type.dtype.bits // 8 for i, r in enumerate(reads)
            if counts[r.name] > 1 and all(_along(frame, r)[-2:]) and r.layout is None}


def staged_rows(reads: Sequence[GroupOperand], again: dict[int, int], rows: int
                ) -> tuple[int, ...]:
    """Which of these come to shared memory in front of all statistics, in a group that holds so
    many rows: several of 16 bits and fewer, in whole accesses. again: as of read_again"""
    fits = all(reads[i].type.dtype.bits <= 16 and size % 16 == 0 for i, size in again.items())
    return tuple(again) if len(again) > 1 and fits and (
        rows * sum(again.values()) <= STAGED_BYTES) else ()


def brought_rows(sizes: dict[int, int], room: int, columns: int, step: int
                 ) -> tuple[tuple[int, int], ...]:
    """As many of these operands as have room in so many bytes of shared memory, with the number of
    their blocks of `step` columns there: all, or some, if these are a fourth at least."""
    brought, whole = [], columns // step
    for i, size in sizes.items():
        each = size // columns * step
        if size <= room:
            brought.append((i, whole))
            room -= size
        elif 4 * (many := min(whole - 1, room // each)) >= whole:
            brought.append((i, many))
            room -= many * each
    return tuple(brought)


def _read(wanted: Sequence[str], wide: set[str], steps: dict[str, GroupStep]) -> set[str]:
    """The values that vary along rows and from which these are made in a pass."""
    found, work = set[str](), list(wanted)
    while work:
        name = work.pop()
        if name in wide and name not in found:
            found.add(name)
            work += [a for a in steps[name].args if isinstance(a, str)] if name in steps else []
    return found


def _narrow(w: KernelWriter, b: FrameBlock, steps: list[GroupStep], texts: dict[str, str]) -> None:
    """Steps on row statistics, outside of any pass."""
    for s in steps:
        emit_step(w, b, s, texts[s.name])


def needed(w: KernelWriter, b: FrameBlock, names: tuple, steps: dict[str, GroupStep],
            texts: dict[str, str]) -> None:
    """Whatever of these values is not held yet, operands first."""
    for name in names:
        if isinstance(name, str) and name not in b.held and name in steps:
            needed(w, b, steps[name].args, steps, texts)
            emit_step(w, b, steps[name], texts[name])


__all__ = ["STAGED_COLUMNS", "RowLoop", "brought_rows", "inside_loops", "needed", "read_again",
           "read_for_all", "staged_rows", "statistics_deep", "write_passes", "write_statistics"]
