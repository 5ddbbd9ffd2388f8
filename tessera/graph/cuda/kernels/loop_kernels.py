"""Kernels of groups without products: loops over a space, rows with their statistics, columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame
from ..choose_schedule import blocks
from .column_passes import column_passes_source
from .group_statements import (
    ColumnReduction,
    FrameBlock,
    KernelValue,
    combined,
    emit_step,
    finished,
    fold_rows,
    start,
    store,
)
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .row_elements import read_elements
from .row_parts import row_parts_source
from .row_passes import write_passes
from .same_powers import share_powers
from .scaled_differences import are_of_means, scale_differences

POWER = re.compile(r"tile\.exp\(\{0\}( \* 1\.0)?\)")
APPROXIMATED = re.compile(r"\b(tile\.(?:exp|sigmoid))\(")


def templates(group: ScheduledGroup) -> dict[str, str]:
    """The expression of each elementwise step."""
    narrow = narrow_steps(group)
    texts = {s.name: str(dict(s.attrs)["text"]) for s in group.steps if "text" in dict(s.attrs)}
    return {name: APPROXIMATED.sub(r"\1_approx(", text) if name in narrow else text
            for name, text in texts.items()}


def narrow_steps(group: ScheduledGroup) -> set[str]:
    """The f32 values of which nothing is kept but what elementwise steps make of them and round to
    16 bits. An approximation of 2^-17 changes these by less than 2^-5 of a last place, unless
    they are a difference of numbers 2^7 times as large; f32's own rounding shows from 2^12 on.

    So are the powers of a row that are only summed, with what follows from the row's maximum, also
    when that is still looked for (running_columns.py: the distances of all steps add up): of
    p_i = e^-d_i / sum_j e^-d_j the mean of d_i is the entropy less the sum's logarithm, at most
    log n, so the sum is within (1.4 log n + 4) 2^-24: five last places for rows of 2^17. And those
    that weight what is summed, where nothing but 16 bits is kept of that sum: it is off by as much
    as the sum of sizes would be."""
    wide, steps = {o.name for o in group.writes}, {s.name: s for s in group.steps}
    for s in reversed(group.steps):
        rounds = s.type.dtype.kind == "float" and s.type.dtype.bits <= 16
        sums = _sums_powers(s, steps) or s.name not in wide and _sums_weighted(s, steps)
        if not rounds and not sums and (
                s.name in wide or s.reduction or s.type.dtype.name != "f32"):
            wide.update(a for a in s.args if isinstance(a, str))
    return {s.name for s in group.steps if s.name not in wide and s.type.dtype.name == "f32"}


def _sums_powers(step: GroupStep, steps: dict[str, GroupStep]) -> bool:
    """Whether it is a row's sum of e^(x - max x)."""
    return step.reduction == "sum" and _is_power(step.args[0], steps)


def _sums_weighted(step: GroupStep, steps: dict[str, GroupStep]) -> bool:
    """Whether it is a row's sum of v e^(x - max x)."""
    product = _producing_step(step.args[0], steps) if step.reduction == "sum" else None
    return product is not None and _text(product) == "{0} * {1}" and any(
        _is_power(a, steps) for a in product.args)


def _is_power(arg: object, steps: dict[str, GroupStep]) -> bool:
    power = _producing_step(arg, steps)
    shifted = _producing_step(power.args[0],
                              steps) if power and POWER.fullmatch(_text(power)) else None
    if shifted is None or _text(shifted) != "{0} - {1}":
        return False
    top = _producing_step(shifted.args[1], steps)
    if top is not None and top.op == "where" and top.args[2] == 0.0:  # where it is no number
        top = _producing_step(top.args[1], steps)
    return top is not None and top.reduction == "max" and top.args[0] == shifted.args[0]


def _producing_step(arg: object, steps: dict[str, GroupStep]) -> GroupStep | None:
    return steps.get(arg) if isinstance(arg, str) else None


def _text(step: GroupStep) -> str:
    return str(dict(step.attrs).get("text", ""))


def _frame(group: ScheduledGroup) -> Frame:
    return Frame(group.space, group.attr("axes"))


def parameters(w: KernelWriter, b: FrameBlock,
               operands: tuple[GroupOperand, ...]) -> tuple[list[str], list]:
    """Parameters of the kernel, and the extents in which each is passed."""
    shapes = [b.dims(o) for o in operands]
    texts = []
    for o, shape in zip(operands, shapes, strict=True):
        named = any(k == "extent" for k, _ in w.group.attrs) and any(b.pattern(o))
        texts.append(f"{capital(o.name)}: "
                     f"{w.annotation(o, (w.group.attr('extent'),) if named else shape)}")
    return texts, shapes


# --- elementwise ------------------------------------------------------------------------------
def loop_source(group: ScheduledGroup) -> KernelText:
    """A block of the space for each group: load, compute, store."""
    w, frame = KernelWriter(group), _frame(group)
    BM, BN = group.schedule.m or 1, group.schedule.n
    last, along = len(frame.members) - 1, dict(group.attrs).get("along", -2)
    for i in range(last):
        rows = i == last + 1 + along
        w.line(f"m = tile.group_id({i}) * {BM}" if rows else f"g{i} = tile.group_id({i})")
    w.line(f"n = tile.group_id({last}) * {BN}")
    index = tuple(f"g{i}" for i in range(last) if i != last + 1 + along)
    b = FrameBlock(frame, f"m:m+{BM}" if last and along else "", f"n:n+{BN}", index, BM, BN,
                   {r.name: r for r in group.reads}, along=along,
                   row=dict(group.attrs).get("row", 0))
    body(w, b, group, list(group.steps))
    for o in group.writes:
        store(w, b, o, maker(group, o.name))
    texts, grid, shapes = signature(w, b, group, (*group.reads, *group.writes))
    if any(k == "extent" for k, _ in group.attrs):
        name = group.attr("extent")
        grid = f"(grid=lambda {name}: (-(-{name} // {BN}),))"
    return w.finish(texts, grid, shapes)


def body(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, steps: list[GroupStep]) -> None:
    texts = templates(group)
    for step in steps:
        if step.reduction:
            fold = ColumnReduction.of(step)
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
    if dict(group.attrs).get("parts"):
        return row_parts_source(group, templates(group))
    w, frame = KernelWriter(group), _frame(group)
    BM, BN, N = group.schedule.m or 1, group.schedule.n, frame.extents[-1]
    outer = len(frame.members) - 2
    for i in range(outer):
        w.line(f"g{i} = tile.group_id({i})")
    index, together = tuple(f"g{i}" for i in range(outer)), dict(group.attrs).get("cluster", 1)
    if together > 1:
        w.line(f"m = tile.group_id({outer}) // {together} * {BM}")
        w.line(f"first = tile.group_id({outer}) % {together} * {N // together}")
    else:
        w.line(f"m = tile.group_id({outer}) * {BM}")
    reads = {r.name: r for r in group.reads}
    if BN >= N:
        b = FrameBlock(frame, f"m:m+{BM}", f"0:{N}", index, BM, N, reads)
        _ask_near(w, b, group)
        _stage(w, b, [group.reads[i] for i in dict(group.attrs).get("staged", ())])
        group = share_powers(read_elements(b, group, N), held=True)
        body(w, b, group, list(group.steps))
        # Rows before their numbers: cross entropy of 1024 columns and its gradient takes 72.6 us in
        # place of 74.0 (2^26 elements of bf16, H200, 2026-11-27).
        for o in sorted(group.writes, key=lambda o: not b.pattern(o)[-1]):
            store(w, b, o, maker(group, o.name))
    else:
        at = "first+n" if together > 1 else "n"
        b = FrameBlock(frame, f"m:m+{BM}", f"{at}:{at}+{BN}", index, BM, BN, reads)
        first = "first" if together > 1 else "0"
        _ask_near(w, replace(b, columns=f"{first}:{first}+{N // together}"), group)
        group = share_powers(read_elements(b, group, N), held=False)
        if are_of_means(group):
            group = scale_differences(group)
        write_passes(w, b, group, N // together, templates(group))
    return w.finish(*signature(w, b, group, (*group.reads, *group.writes)))


def _ask_near(w: KernelWriter, b: FrameBlock, group: ScheduledGroup) -> None:
    """The first groups, which begin while the kernel in front ends, have rows of several operands
    brought to L2 meanwhile (lower/dependent_launch.py). Not where they take the last rows, which
    that kernel has left there (cached_reads.py)."""
    if dict(group.schedule.extra).get("LAST_FIRST"):
        return
    rows = [r for r in group.reads if all(b.pattern(r)) and r.layout is None
            and not r.type.dtype.packed]
    if len(rows) > 1 and (first := dict(group.attrs).get("near")):
        with w.block(f"if tile.group_id() < {first}:"):
            for r in rows:
                w.line(f"tile.prefetch_box({b.place(r)[0]})")


def _stage(w: KernelWriter, b: FrameBlock, operands: Sequence[GroupOperand]) -> None:
    """Brings these to shared memory, all at once."""
    for r in operands:
        w.line(f"{r.name}_s = tile.alloc_shared({b.shape}, {w.type(r.type)})")
        w.line(f"tile.cp_async({r.name}_s, {b.place(r)[0]})")
        b.shared[r.name] = f"{r.name}_s"
    if operands:
        w.line("tile.cp_commit_group()")
        w.line("tile.cp_wait_group(0)")
        w.line("tile.barrier()")


# --- columns ----------------------------------------------------------------------------------
def columns_source(group: ScheduledGroup) -> KernelText:
    """[A, R, C] -> [A, C], a run of columns of one of the sums for each group: every lane combines
    what stands in its place of the blocks, and at the end lanes combine what they have."""
    if "axes" in dict(group.attrs):
        return column_passes_source(group, templates)
    w = KernelWriter(group)
    A, R, C = group.space
    sums = list(zip(group.steps, group.reads, group.writes, strict=True))
    w.line("a = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {group.schedule.n}")
    for i, (step, x, y) in enumerate(sums):
        if len(sums) == 1:
            _write_column_sum(w, group, step, x, y)
        else:
            with w.block(f"if tile.group_id(2) == {i}:"):
                _write_column_sum(w, group, step, x, y)
    shapes: list[tuple[int, ...]] = [(A, R, C)] * len(sums) + [(A, C)] * len(sums)
    return w.finish_operands(shapes)


def _write_column_sum(w: KernelWriter, group: ScheduledGroup, step: GroupStep, x: GroupOperand,
                      y: GroupOperand) -> None:
    R, BR, BN = group.space[1], group.schedule.m or 1, group.schedule.n
    fold, name = ColumnReduction.of(step, blocks(R, BR)), step.name
    w.line(f"{name}_a = {start(w, fold, f'({BR}, {BN})')}", step)
    with w.block(f"for m in range(0, {R}, {BR}):"):
        w.line(f"{name}_p = tile.load({capital(x.name)}[a, m:m+{BR}, n:n+{BN}])", step)
        part = f"tile.where(tile.inside({name}_p), {name}_p, {fold.neutral})"
        if fold.kept is not fold.source:
            part = f"tile.cast({part}, {fold.kept})"
        w.line(f"{name}_a = {combined(w, fold, f'{name}_a', part)}", step)
    made = finished(w, fold, f"tile.col_{fold.way}({name}_a)")
    w.line(f"{capital(y.name)}[a, n:n+{BN}] = {made}", step)
    if dict(group.attrs).get("read_last"):
        w.line("tile.barrier()", step)
        with w.block(f"for m in range(0, {R}, {BR}):"):
            w.line(f"tile.discard_box({capital(x.name)}[a, m:m+{BR}, n:n+{BN}])", step)


kernel_kind("loop", "elementwise", loop_source)
kernel_kind("rows", "reduction", rows_source)
kernel_kind("columns", "reduction", columns_source)

__all__ = ["body", "maker", "signature", "templates"]
