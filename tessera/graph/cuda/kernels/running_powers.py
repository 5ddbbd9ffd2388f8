"""Sums of exponentials of columns about their largest element, while that is still looked for.

    m' = max(m, x_0, .., x_3);  s' = s exp(m - m') + sum exp(x_i - m')          # rows x_0 to x_3

Every place of a block has such a pair for its column, and at the end these are put together. So a
pass over the rows reads each once, whole lines of it, and holds four of them (Milakov and
Gimelshein 2018, arXiv:1805.02867). Where m' is an infinity, powers are about 0: what is put
together at the end is then what the sum about it would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....lazy_dataclass import dataclass
from ....tile.ir.schedule import Schedule
from ...schedule.ir import GroupOperand, GroupStep
from ..choose_schedule import chosen, power
from .group_statements import Fold, FrameBlock, KernelValue, folded
from .kernel_text import KernelWriter
from .row_passes import needed

TOGETHER = 4  # rows for which a place makes one power more
WARPS, BLOCK, COLUMNS = 8, 2048, 256  # elements of a block: 8 in each lane
AHEAD = 1  # blocks on their way to L2
CLOSE = 4  # groups of a multiprocessor


@dataclass(frozen=True)
class RunningPowers:
    """largest, total: the two reductions.  power: exp(away), with away = x - centre."""

    largest: GroupStep
    total: GroupStep
    power: GroupStep
    away: GroupStep


def running_powers(steps: Sequence[GroupStep]) -> RunningPowers | None:
    """Of a group whose only statistics are a largest element and a sum of powers about it, or about
    0 where it is an infinity."""
    known = {s.name: s for s in steps}

    def by(arg: object, op: str) -> GroupStep | None:
        s = known.get(arg) if isinstance(arg, str) else None
        return s if s is not None and s.op == op else None

    folds = [s for s in steps if s.reduction]
    if [s.reduction for s in folds] != ["max", "sum"] or any(
            s.type.dtype.name != "f32" for s in folds):
        return None
    largest, total = folds
    exp = by(total.args[0], "exp")
    away = by(exp.args[0], "sub") if exp else None
    if exp is None or away is None or away.args[0] != largest.args[0]:
        return None
    chosen_centre = by(away.args[1], "where")
    about = chosen_centre.args if chosen_centre else (None, away.args[1], 0.0)
    finite = by(about[0], "isfinite") if chosen_centre else None
    fits = about[1] == largest.name and about[2] == 0.0 and (
        chosen_centre is None or finite is not None and finite.args == (largest.name,))
    return RunningPowers(largest, total, exp, away) if fits else None


def running_blocks(extents: tuple[int, int, int], writes: Sequence[GroupOperand],
                   steps: Sequence[GroupStep]) -> Schedule | None:
    """The blocks of a group of such columns; None where it is another, writes rows or has few."""
    _, R, C = extents
    n = min(power(C), COLUMNS)
    m = BLOCK // n
    if running_powers(steps) is None or any(o.shape[1] == R for o in writes) or (
            R < 2 * TOGETHER * m):
        return None
    s = chosen(m, n, warps=WARPS)
    return replace(s, extra=(("RESIDENT", CLOSE),)) if CLOSE else s


def write_running_powers(w: KernelWriter, b: FrameBlock, R: int, powers: RunningPowers,
                         steps: dict[str, GroupStep], texts: dict[str, str]) -> None:
    """The pass, and what its places give."""
    shape, x, exp = f"({b.BM}, {b.BN})", powers.largest.args[0], texts[powers.power.name]
    largest, total = powers.largest, powers.total
    w.scope["f32"] = largest.type.dtype
    w.line(f"most = tile.full({shape}, -inf, f32)", largest)
    w.line(f"sums = tile.full({shape}, 0.0, f32)", total)
    stride = TOGETHER * b.BM
    with w.block(f"for m in range(0, {R}, {stride}):"):
        parts = []
        for i in range(TOGETHER):
            at = f"m + {i * b.BM}" if i else "m"
            inner = replace(b, rows=f"{at}:{at}+{b.BM}", held=dict(b.held), suffix=f"_r{i}",
                            ahead=AHEAD * TOGETHER if AHEAD > 1 else 1)
            needed(w, inner, (x,), steps, texts)
            parts.append(folded(w, inner, Fold.of(largest)))
            if R % stride:
                there = f"tile.arange(0, {b.BM})[:, None] < {R} - ({at})"
                w.line(f"part_{i} = tile.where({there}, {parts[-1]}, -inf)", largest)
                parts[-1] = f"part_{i}"
        w.line(f"above = {_in_pairs('tile.maximum({}, {})', ['most', *parts])}", largest)
        w.line("about = tile.where(above - above == 0.0, above, 0.0)", largest)
        more = _in_pairs("({} + {})", [exp.format(f"({p} - about)") for p in parts])
        w.line(f"sums = sums * {exp.format('(most - about)')} + {more}", total)
        w.line("most = above", largest)
    w.line(f"{largest.name} = tile.col_max(most)[None, :]", largest)
    b.held[largest.name] = KernelValue(largest.name, False, True)
    needed(w, b, (powers.away.args[1],), steps, texts)
    centre = b.held[str(powers.away.args[1])].text
    weighted = f"sums * {exp.format(f'(most - {centre})')}"
    w.line(f"{total.name} = tile.col_sum({weighted})[None, :]", total)
    b.held[total.name] = KernelValue(total.name, False, True)


def _in_pairs(pair: str, texts: list[str]) -> str:
    """What a function of two makes of many, those beside each other first."""
    while len(texts) > 1:
        odd = texts[len(texts) & ~1:]
        texts = [pair.format(a, b) for a, b in zip(texts[::2], texts[1::2], strict=False)] + odd
    return texts[0]


__all__ = ["RunningPowers", "running_blocks", "running_powers", "write_running_powers"]
