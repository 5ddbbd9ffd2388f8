"""Kernels of rows too long to be held in registers: passes over them, one for each level of
statistics and one for what is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ..schedule.loop_axes import Frame, Pattern
from .choose_schedule import blocks
from .group_statements import (
    Fold,
    FrameBlock,
    KernelValue,
    combined,
    emit_step,
    finished,
    fold_rows,
    folded,
    placed,
    start,
    store,
    value,
)
from .kernel_text import KernelWriter

PARTS = 4  # of a row that is brought, each waited for alone


def write_passes(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int,
                 texts: dict[str, str]) -> None:
    """Row statistics are held across passes; everything that varies along a row is computed anew
    in each pass that needs it. Operands of several passes are brought to shared memory, where there
    is room, all at once; the first pass goes over what has come, while the rest is on its way."""
    levels, wide = _levels(b.frame, group.reads, group.steps)
    steps = {s.name: s for s in group.steps}
    arriving = _bring(w, b, group, N)
    for r in group.reads:
        if r.name not in wide:  # a number for each row, read once
            user = next(s for s in group.steps if r.name in s.args)
            value(w, b, r.name, r.type.dtype.kind, user)
    rows: list[GroupStep] = [s for s in group.steps if not s.reduction and s.name not in wide]
    turns, back = any(all(b.pattern(r)[-2:]) and r.name not in b.shared for r in group.reads), False
    for level in range(max(levels.values(), default=0) + 1):
        _narrow(w, b, [s for s in rows if levels[s.name] == level], texts)
        folds = [Fold.of(s, blocks(N, b.BN)) for s in group.steps
                 if s.reduction and levels[s.name] == level + 1]
        if folds:
            loops = [_blocks(b, N, back)]
            if arriving:
                loops, arriving = arriving, []
            _fold_pass(w, b, folds, loops, N, level, steps, texts)
            back = turns and not back
    _write_rows(w, b, group, _blocks(b, N, back), N, steps, texts)


def _blocks(b: FrameBlock, N: int, back: bool) -> str:
    """The head of a loop over the whole blocks of a row."""
    whole = N // b.BN * b.BN
    span = f"{whole - b.BN}, -1, -{b.BN}" if back else f"0, {whole}, {b.BN}"
    return f"for n in range({span}):"


def _bring(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int) -> list[str]:
    """The heads of loops over the blocks as they come, none where nothing is brought. Each whole
    block has a buffer, so that no access to it needs to look for the end."""
    brought = [group.reads[i] for i in group.attr("brought")]
    many, rest = N // b.BN, _rest(b, N, "")
    for o in brought:
        kind = w.type(o.type)
        w.line(f"{o.name}_s = tile.alloc_shared((1, {b.BN}), {kind}, stages={many})")
        b.shared[o.name] = f"{o.name}_s[n // {b.BN}]"
        if rest is not None:
            w.line(f"{o.name}_t = tile.alloc_shared((1, {rest.BN}), {kind})")
            w.line(f"tile.cp_async({o.name}_t, {rest.place(o)[0]})")
    if not brought:
        return []
    parts = min(PARTS, many)
    ends = [many * i // parts * b.BN for i in range(parts + 1)]
    loops = [f"for n in range({begin}, {end}, {b.BN}):" for begin, end in pairwise(ends)]
    for loop in loops:
        with w.block(loop):
            for o in brought:
                w.line(f"tile.cp_async({b.shared[o.name]}, {b.place(o)[0]})")
        w.line("tile.cp_commit_group()")
    return loops


def _fold_pass(w: KernelWriter, b: FrameBlock, folds: list[Fold], loops: list[str], N: int,
               level: int, steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    """Statistics of one level. Every lane combines what stands in its places of the blocks, and at
    the end lanes combine what they have, and what the rest of the row gives behind the last.

    loops: over parts of the blocks, that come one after another where there are several
    """
    for f in folds:
        w.line(f"{f.step.name}_a = {start(w, f, f'({b.BM}, {b.BN})')}", f.step)
    for i, loop in enumerate(loops):
        inner = _inside(b, f"_p{level}" + f"_{i}" * (len(loops) > 1))
        if b.shared and not level:
            w.line(f"tile.cp_wait_group({len(loops) - 1 - i})")
            w.line("tile.barrier()")
        with w.block(loop):
            for f in folds:
                _needed(w, inner, f.step.args, steps, texts)
                name, part = f"{f.step.name}_a", folded(w, inner, f)
                w.line(f"{name} = {combined(w, f, name, part)}", f.step)
    rest = _rest(b, N, f"_q{level}")
    for f in folds:
        name = f"{f.step.name}_a"
        text = f"tile.row_{f.way}({name})"
        if rest is not None:
            _needed(w, rest, f.step.args, steps, texts)
            w.line(f"{name} = {combined(w, f, text, fold_rows(w, rest, f))}", f.step)
            text = name
        w.line(f"{f.step.name} = {finished(w, f, text)}", f.step)
        b.held[f.step.name] = KernelValue(f.step.name, True, False)


def _write_rows(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, loop: str, N: int,
                steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    full = [o for o in group.writes if b.pattern(o)[-1]]
    for o in group.writes:
        if o not in full:
            store(w, b, o, steps.get(o.name))

    def write(inner: FrameBlock) -> None:
        for o in full:
            _needed(w, inner, (o.name,), steps, texts)
            store(w, inner, o, steps.get(o.name))

    if full:
        with w.block(loop):
            write(_inside(b, "_w"))
        if (rest := _rest(b, N, "_x")) is not None:
            write(rest)


def _inside(b: FrameBlock, suffix: str) -> FrameBlock:
    """The same block in a pass: all of it is inside of the rows."""
    return replace(b, held=dict(b.held), suffix=suffix, fill=", fill=0")


def _rest(b: FrameBlock, N: int, suffix: str) -> FrameBlock | None:
    """What is left of rows behind the last whole block."""
    left = N % b.BN
    return replace(b, columns=f"{N - left}:{N}", BN=left, held=dict(b.held), suffix=suffix,
                   shared={name: f"{name}_t" for name in b.shared}) if left else None


def _levels(frame: Frame, reads: Sequence[GroupOperand], steps: Sequence[GroupStep]
            ) -> tuple[dict[str, int], set[str]]:
    """How many statistics deep each value is, and which values vary along a row."""
    levels = {r.name: 0 for r in reads}
    wide = {r.name for r in reads if _along(frame, r)[-1]}
    for s in steps:
        names = [a for a in s.args if isinstance(a, str)]
        levels[s.name] = max((levels[a] for a in names), default=0)
        if s.reduction:
            levels[s.name] += 1
        elif placed(s) or any(a in wide for a in names):
            wide.add(s.name)
    return levels, wide


def _along(frame: Frame, operand: GroupOperand) -> Pattern:
    found = frame.pattern(operand.shape)
    assert found is not None, f"{operand} does not lie along {frame}"
    return found


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


def brought_rows(sizes: dict[int, int], room: int) -> tuple[int, ...]:
    """As many of these operands as have room in so many bytes of shared memory."""
    brought = []
    for i, size in sizes.items():
        if size <= room:
            brought.append(i)
            room -= size
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


def _needed(w: KernelWriter, b: FrameBlock, names: tuple, steps: dict[str, GroupStep],
            texts: dict[str, str]) -> None:
    """Whatever of these values is not held yet, operands first."""
    for name in names:
        if isinstance(name, str) and name not in b.held and name in steps:
            _needed(w, b, steps[name].args, steps, texts)
            emit_step(w, b, steps[name], texts[name])


__all__ = ["brought_rows", "read_again", "write_passes"]
