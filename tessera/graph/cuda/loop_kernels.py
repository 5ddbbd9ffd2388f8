"""Kernels of groups without products: loops over a space, rows with their statistics, columns."""

from __future__ import annotations

from ..schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ..schedule.loop_axes import Frame
from .choose_schedule import blocks
from .group_statements import (
    Fold,
    FrameBlock,
    KernelValue,
    combined,
    emit_step,
    finished,
    fold_rows,
    placed,
    start,
    store,
)
from .kernel_text import KernelText, KernelWriter, capital


def templates(group: ScheduledGroup) -> dict[str, str]:
    """The expression of each elementwise step."""
    return {s.name: dict(s.attrs)["text"] for s in group.steps if "text" in dict(s.attrs)}


def _frame(group: ScheduledGroup) -> Frame:
    return Frame(group.space, group.attr("axes"))


def parameters(w: KernelWriter, b: FrameBlock,
               operands: tuple[GroupOperand, ...]) -> tuple[list[str], list]:
    """Parameters of the kernel, and the extents in which each is passed."""
    shapes = [b.dims(o) for o in operands]
    texts = [f"{capital(o.name)}: {w.annotation(o, s)}"
             for o, s in zip(operands, shapes, strict=True)]
    return texts, shapes


def unique(group: ScheduledGroup) -> tuple[GroupOperand, ...]:
    return (*group.reads, *group.writes)


# --- elementwise ------------------------------------------------------------------------------
def loop_source(group: ScheduledGroup) -> KernelText:
    """A block of the space for each group: load, compute, store."""
    w, frame = KernelWriter(group), _frame(group)
    BM, BN = group.schedule.m or 1, group.schedule.n
    outer = len(frame.members) - (1 if len(frame.members) == 1 else 2)
    for i in range(outer):
        w.line(f"g{i} = tile.group_id({i})")
    flat = len(frame.members) == 1
    if not flat:
        w.line(f"m = tile.group_id({outer}) * {BM}")
    w.line(f"n = tile.group_id({outer + (not flat)}) * {BN}")
    b = FrameBlock(frame, "" if flat else f"m:m+{BM}", f"n:n+{BN}",
                   tuple(f"g{i}" for i in range(outer)), BM, BN, {r.name: r for r in group.reads})
    body(w, b, group, list(group.steps))
    for o in group.writes:
        store(w, b, o, maker(group, o.name))
    return w.finish(*signature(w, b, group, unique(group)))


def body(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, steps: list[GroupStep]) -> None:
    texts = templates(group)
    for step in steps:
        if step.reduction:
            fold = Fold.of(step)
            w.line(f"{step.name} = {finished(w, fold, fold_rows(w, b, fold))}", step)
            b.held[step.name] = _column(step.name)
        elif step.name not in b.held:
            emit_step(w, b, step, texts[step.name])


def _column(name: str) -> KernelValue:
    return KernelValue(name, True, False)


def maker(group: ScheduledGroup, name: str) -> GroupStep | None:
    return next((s for s in group.steps if s.name == name), None)


def signature(w: KernelWriter, b: FrameBlock, group: ScheduledGroup,
              operands: tuple[GroupOperand, ...]) -> tuple[list[str], str, list]:
    texts, shapes = parameters(w, b, operands)
    return texts, f"(grid={group.grid})", shapes


# --- rows -------------------------------------------------------------------------------------
def rows_source(group: ScheduledGroup) -> KernelText:
    """Whole rows for each group when they fit; else passes over them, one for each level of
    statistics and one for what is written."""
    w, frame = KernelWriter(group), _frame(group)
    BM, BN, N = group.schedule.m or 1, group.schedule.n, frame.extents[-1]
    outer = len(frame.members) - 2
    for i in range(outer):
        w.line(f"g{i} = tile.group_id({i})")
    w.line(f"m = tile.group_id({outer}) * {BM}")
    index = tuple(f"g{i}" for i in range(outer))
    reads = {r.name: r for r in group.reads}
    if BN >= N:
        b = FrameBlock(frame, f"m:m+{BM}", f"0:{N}", index, BM, N, reads)
        body(w, b, group, list(group.steps))
        for o in group.writes:
            store(w, b, o, maker(group, o.name))
    else:
        b = FrameBlock(frame, f"m:m+{BM}", f"n:n+{BN}", index, BM, BN, reads)
        _passes(w, b, group, N)
    return w.finish(*signature(w, b, group, unique(group)))


def _passes(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int) -> None:
    """Row statistics are held across passes; everything that varies along a row is computed anew
    in each pass that needs it."""
    levels, wide = _levels(group, b)
    steps = {s.name: s for s in group.steps}
    texts = templates(group)
    rows: list[GroupStep] = [s for s in group.steps if not s.reduction and s.name not in wide]
    for level in range(max(levels.values(), default=0) + 1):
        _narrow(w, b, [s for s in rows if levels[s.name] == level], texts)
        folds = [Fold.of(s, blocks(N, b.BN)) for s in group.steps
                 if s.reduction and levels[s.name] == level + 1]
        if not folds:
            continue
        for f in folds:
            w.line(f"{f.step.name}_a = {start(w, f, f'({b.BM},)')}", f.step)
        inner = _inside(b, f"_p{level}")
        with w.block(f"for n in range(0, {N}, {b.BN}):"):
            for f in folds:
                _needed(w, inner, f.step.args, steps, texts)
                name = f"{f.step.name}_a"
                part = fold_rows(w, inner, f, f"{N} - n")
                w.line(f"{name} = {combined(w, f, name, part)}", f.step)
        for f in folds:
            w.line(f"{f.step.name} = {finished(w, f, f'{f.step.name}_a')}", f.step)
            b.held[f.step.name] = _column(f.step.name)
    _write_rows(w, b, group, N, steps, texts)


def _write_rows(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, N: int,
                steps: dict[str, GroupStep],
                texts: dict[str, str]) -> None:
    full = [o for o in group.writes if b.pattern(o)[-1]]
    for o in group.writes:
        if o not in full:
            store(w, b, o, steps.get(o.name))
    if full:
        inner = _inside(b, "_w")
        with w.block(f"for n in range(0, {N}, {b.BN}):"):
            for o in full:
                _needed(w, inner, (o.name,), steps, texts)
                store(w, inner, o, steps.get(o.name))


def _inside(b: FrameBlock, suffix: str) -> FrameBlock:
    return FrameBlock(b.frame, b.rows, b.columns, b.index, b.BM, b.BN, b.operands, dict(b.held),
                      suffix)


def _levels(group: ScheduledGroup, b: FrameBlock) -> tuple[dict[str, int], set[str]]:
    """How many statistics deep each value is, and which values vary along a row."""
    levels = {r.name: 0 for r in group.reads}
    wide = {r.name for r in group.reads if b.pattern(r)[-1]}
    for s in group.steps:
        names = [a for a in s.args if isinstance(a, str)]
        levels[s.name] = max((levels[a] for a in names), default=0)
        if s.reduction:
            levels[s.name] += 1
        elif placed(s) or any(a in wide for a in names):
            wide.add(s.name)
    return levels, wide


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


# --- columns ----------------------------------------------------------------------------------
def columns_source(group: ScheduledGroup) -> KernelText:
    """[A, R, C] -> [A, C], a run of columns for each group: every lane combines what stands in its
    place of the blocks, and at the end lanes combine what they have."""
    w = KernelWriter(group)
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    A, R, C = group.space
    BR, BN = group.schedule.m or 1, group.schedule.n
    fold, name = Fold.of(step, blocks(R, BR)), step.name
    w.line("a = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    w.line(f"{name}_a = {start(w, fold, f'({BR}, {BN})')}", step)
    with w.block(f"for m in range(0, {R}, {BR}):"):
        w.line(f"{name}_p = tile.load({capital(x.name)}[a, m:m+{BR}, n:n+{BN}])", step)
        part = f"tile.where(tile.inside({name}_p), {name}_p, {fold.neutral})"
        if fold.kept is not fold.source:
            part = f"tile.cast({part}, {fold.kept})"
        w.line(f"{name}_a = {combined(w, fold, f'{name}_a', part)}", step)
    made = finished(w, fold, f"tile.col_{fold.way}({name}_a)")
    w.line(f"{capital(y.name)}[a, n:n+{BN}] = {made}", step)
    shapes: list[tuple[int, ...]] = [(A, R, C), (A, C)]
    texts = [f"{capital(o.name)}: {w.annotation(o, s)}"
             for o, s in zip((x, y), shapes, strict=True)]
    return w.finish(texts, f"(grid={group.grid})", shapes)


__all__ = ["body", "columns_source", "loop_source", "maker", "rows_source", "signature",
           "templates"]
