"""Statistics of columns of which one is about the other, in one pass over their rows.

    m' = max(m, x_0, .., x_3);  s' = s exp(m - m') + sum exp(x_i - m')          # rows x_0 to x_3
    s' = s + sum (x_i - c);  q' = q + sum (x_i - c)^2

Every place of a block has such a pair for its column: the largest element and the sum of powers
about it, or sums of differences from its first element c and of their squares. At the end these
are put together. So a pass reads whole lines of rows, each once, and holds four of them (Milakov
and Gimelshein 2018, arXiv:1805.02867; Chan, Golub and LeVeque 1983,
doi:10.1080/00031305.1983.10483115).

Where m' is an infinity, powers are about 0: what is put together at the end is then what the sum
about it would be. Of n elements q - s^2 / n is sum (x - mean)^2; as c is one of them, q is at most
n + 1 times that, and n is at most 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....kernels.cards import multiprocessors_of
from ....lazy_dataclass import dataclass
from ....runtime.generations import Generation
from ....tile.ir.schedule import Schedule
from ...schedule.ir import GroupOperand, GroupStep
from ..choose_schedule import blocks, chosen, power
from .group_statements import ColumnReduction, FrameBlock, KernelValue, reduction_source
from .kernel_text import KernelWriter
from .row_passes import needed

TOGETHER = 4  # rows that a place combines before it meets what it has
WARPS, BLOCK, COLUMNS = 8, 2048, 256  # elements of a block: 8 in each lane
CLOSE = 4  # groups of a multiprocessor
FEWEST, LONGEST = 64, 1024  # rows of a part of a column
BEGIN = 64  # rows that a group reads while it would begin and end


@dataclass(frozen=True)
class RunningColumns:
    """first, second: the two reductions, of x and of what is made of x and the first.  away: x less
    what follows from the first.  power: exp(away), none of sums of squares"""

    first: GroupStep
    second: GroupStep
    away: GroupStep
    power: GroupStep | None = None


# --- which groups -------------------------------------------------------------------------------
def running_columns(R: int, steps: Sequence[GroupStep]) -> RunningColumns | None:
    """Of a group whose only statistics are a largest element and a sum of powers about it, or about
    0 where it is an infinity; or a sum and one of squares about the mean."""
    folds = [s for s in steps if s.reduction]
    if len(folds) != 2 or any(s.type.dtype.name != "f32" for s in folds):
        return None
    known, (first, second) = _ProducingSteps({s.name: s for s in steps}), folds
    if (first.reduction, second.reduction) == ("max", "sum"):
        return _powers(known, first, second)
    if (first.reduction, second.reduction) == ("sum", "sum"):
        return _squares(known, first, second, R)
    return None


@dataclass(frozen=True)
class _ProducingSteps:
    steps: dict[str, GroupStep]

    def by(self, arg: object, op: str) -> GroupStep | None:
        s = self.steps.get(arg) if isinstance(arg, str) else None
        return s if s is not None and s.op == op else None


def _powers(known: _ProducingSteps, largest: GroupStep, total: GroupStep) -> RunningColumns | None:
    exp = known.by(total.args[0], "exp")
    away = known.by(exp.args[0], "sub") if exp else None
    if exp is None or away is None or away.args[0] != largest.args[0]:
        return None
    guarded = known.by(away.args[1], "where")
    about = guarded.args if guarded else (None, away.args[1], 0.0)
    finite = known.by(about[0], "isfinite") if guarded else None
    fits = about[1] == largest.name and about[2] == 0.0 and (
        guarded is None or finite is not None and finite.args == (largest.name,))
    return RunningColumns(largest, total, away, exp) if fits else None


def _squares(known: _ProducingSteps, total: GroupStep, spread: GroupStep,
             R: int) -> RunningColumns | None:
    square = known.by(spread.args[0], "mul")
    away = known.by(square.args[0], "sub") if square and len({*square.args}) == 1 else None
    mean = known.steps.get(str(away.args[1])) if away else None
    if away is None or mean is None or away.args[0] != total.args[0] or (
            mean.args[0] != total.name or not is_mean(mean.op, mean.args[-1], R)):
        return None
    return RunningColumns(total, spread, away)


def is_mean(op: str, number: object, n: int) -> bool:
    """Whether an op with a number makes the mean of n of their total."""
    return isinstance(number, float) and (
        number == n if op == "div" else op == "mul" and abs(number * n - 1) < 1e-6)


def _block(C: int) -> tuple[int, int]:
    n = min(power(C), COLUMNS)
    return BLOCK // n, n


def one_wave(chip: Generation) -> int:
    """The groups that run at once."""
    return CLOSE * multiprocessors_of(chip)


def running_blocks(extents: tuple[int, int, int], writes: Sequence[GroupOperand],
                   steps: Sequence[GroupStep], chip: Generation) -> Schedule | None:
    """The blocks of a group of such columns; None where it is another, writes rows or has few, or
    where half of the groups that run at once would have nothing to do."""
    A, R, C = extents
    m, n = _block(C)
    if 2 * A * blocks(C, n) < one_wave(chip):
        return None
    found = running_columns(R, steps)
    if found is None or any(o.shape[1] == R for o in writes) or R < 2 * TOGETHER * m or (
            found.power is None and R % (TOGETHER * m)):
        return None
    return replace(chosen(m, n, warps=WARPS), extra=(("RESIDENT", CLOSE),))


def part_rows(A: int, R: int, C: int, chip: Generation) -> int:
    """Rows of the parts of columns of [A, R, C]: those with which groups come out in the fewest and
    fullest waves, then the longest; 0 where R has no such divisor. Logsumexp down [16384, 4096] of
    bf16 takes 42.3 us in parts of 512 rows, which are one wave of groups, 47.7 of 256, 62.6 of 128
    (H200, 2026-11-28, in turn)."""
    stride, wave = TOGETHER * _block(C)[0], one_wave(chip)

    def length(r: int) -> tuple[bool, int, int]:
        waves = blocks(A * (R // r) * blocks(C, COLUMNS), wave)
        return r % stride > 0, waves * (r + BEGIN), -r

    rows = range(FEWEST, min(LONGEST, R // 2) + 1)
    return min((r for r in rows if R % r == 0), key=length, default=0)


# --- the kernel ---------------------------------------------------------------------------------
def write_running(w: KernelWriter, b: FrameBlock, R: int, found: RunningColumns,
                  steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    """The pass, and what its places give. ones, sums: of the first and the second statistic."""
    w.scope["f32"] = found.first.type.dtype
    neutral = "-inf" if found.power else "0.0"
    for name, step, start in (("ones", found.first, neutral), ("sums", found.second, "0.0")):
        w.line(f"{name} = tile.full(({b.BM}, {b.BN}), {start}, f32)", step)
    if not found.power:
        inner = replace(b, rows=f"0:{b.BM}", held=dict(b.held), suffix="_c")
        needed(w, inner, found.first.args, steps, texts)
        w.line(f"centre = {reduction_source(w, inner, ColumnReduction.of(found.first))}",
               found.away)
    stride = TOGETHER * b.BM
    with w.block(f"for m in range(0, {R}, {stride}):"):
        parts = _rows(w, b, R, found, steps, texts)
        if found.power:
            _add_powers(w, found, parts, texts[found.power.name])
        else:
            _add_squares(w, found, parts)
    if found.power:
        _powers_together(w, b, found, steps, texts)
    else:
        _squares_together(w, b, R, found, steps, texts)


def _rows(w: KernelWriter, b: FrameBlock, R: int, found: RunningColumns,
          steps: dict[str, GroupStep], texts: dict[str, str]) -> list[str]:
    """The elements of the blocks that are met together; those beyond the last row change nothing.
    """
    parts = list[str]()
    for i in range(TOGETHER):
        at = f"m + {i * b.BM}" if i else "m"
        inner = replace(b, rows=f"{at}:{at}+{b.BM}", held=dict(b.held), suffix=f"_r{i}")
        needed(w, inner, found.first.args, steps, texts)
        parts.append(reduction_source(w, inner, ColumnReduction.of(found.first)))
        if R % (TOGETHER * b.BM):
            there = f"tile.arange(0, {b.BM})[:, None] < {R} - ({at})"
            w.line(f"part_{i} = tile.where({there}, {parts[-1]}, -inf)", found.first)
            parts[-1] = f"part_{i}"
    return parts


def _add_powers(w: KernelWriter, found: RunningColumns, parts: list[str], exp: str) -> None:
    w.line(f"above = {_in_pairs('tile.maximum({}, {})', ['ones', *parts])}", found.first)
    w.line("about = tile.where(above - above == 0.0, above, 0.0)", found.first)
    more = _in_pairs("({} + {})", [exp.format(f"({p} - about)") for p in parts])
    w.line(f"sums = sums * {exp.format('(ones - about)')} + {more}", found.second)
    w.line("ones = above", found.first)


def _powers_together(w: KernelWriter, b: FrameBlock, found: RunningColumns,
                     steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    assert found.power is not None
    exp = texts[found.power.name]
    _hold(w, b, found.first, "tile.col_max(ones)")
    centre = _centre(w, b, found, steps, texts)
    _hold(w, b, found.second, f"tile.col_sum(sums * {exp.format(f'(ones - {centre})')})")


def _add_squares(w: KernelWriter, found: RunningColumns, parts: list[str]) -> None:
    for i, p in enumerate(parts):
        w.line(f"away_{i} = {p} - centre", found.away)
    away = [f"away_{i}" for i in range(len(parts))]
    w.line(f"ones = ones + {_in_pairs('({} + {})', away)}", found.first)
    w.line(f"sums = sums + {_in_pairs('({} + {})', [f'{a} * {a}' for a in away])}", found.second)


def _squares_together(w: KernelWriter, b: FrameBlock, R: int, found: RunningColumns,
                      steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    """Of each place as many rows."""
    each = R // b.BM
    w.line(f"mean = centre + ones * {1 / each!r}", found.first)
    _hold(w, b, found.first, f"tile.col_sum(mean * {float(each)!r})")
    w.line(f"apart = mean - {_centre(w, b, found, steps, texts)}", found.second)
    w.line(f"sums = sums - ones * ones * {1 / each!r}", found.second)
    _hold(w, b, found.second, f"tile.col_sum(sums + apart * apart * {float(each)!r})")


def _hold(w: KernelWriter, b: FrameBlock, step: GroupStep, text: str) -> None:
    w.line(f"{step.name} = {text}[None, :]", step)
    b.held[step.name] = KernelValue(step.name, False, True)


def _centre(w: KernelWriter, b: FrameBlock, found: RunningColumns, steps: dict[str, GroupStep],
            texts: dict[str, str]) -> str:
    centre: Any = found.away.args[1]
    needed(w, b, (centre,), steps, texts)
    return b.held[centre].text


def _in_pairs(pair: str, texts: list[str]) -> str:
    """What a function of two makes of many, those beside each other first."""
    together: Callable[[str, str], str] = pair.format
    while len(texts) > 1:
        odd = texts[len(texts) & ~1:]
        texts = [*map(together, texts[::2], texts[1::2])] + odd
    return texts[0]


__all__ = ["RunningColumns", "one_wave", "part_rows", "running_blocks", "running_columns",
           "write_running"]
