"""Rows in order by keys: sorts, and the first of them; of long ones runs (see key_merges.py).

Keys (sort_keys.py) have 32 bits where that is enough: comparing and exchanging these takes a third
of the time. Numbers of 64 bits have none; see sorting.py.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type
from ....tile.ir.schedule import Schedule
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ..choose_schedule import blocks, power
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG
from .sort_keys import KeyFormat

# x, or keys -> of each run of `width` the first `kept`: as keys, or as values and positions.
ORDER_ROWS = library_call("order_rows")

# Of 2^26 elements of bf16 (NVIDIA H200, 2026-11-26, by programs around benchmarks/rows.py): rows of
# 4096 sorted in 612 us with 16 words of keys a thread, 624 with 32 and 1002 with 64; their first
# eight taken in 207, 135 and 118.
THREAD_WORDS, FIRST_THREAD_WORDS = 32, 64
# Two groups of 16 warps with a word of each key share a multiprocessor where a word of each is
# written: rows of 16384 take 716 us, 861 with one. More does not fit into the registers of both.
SHARING_WARPS = 16
BLOCK_WORDS = 4096  # of a group of short rows
RUN_WORDS = 16384  # of a run that is sorted
FIRST_WORDS = 4096  # of a run of which a few are taken without sorting it
# Words of these few, all of which each thread holds: the first 16 of rows of 4096 take 155 us, and
# 364 from runs that are sorted; the first 32 take 247 and 368, the first 50 800 and 624. In rows
# shorter than a run more than MOST_FIRST were slower: of 256 columns the first 50 take 2776 us, a
# sort 388.
MOST_FIRST, MOST_OF_RUN = 16, 32
SORTED_RUN = 1024  # elements of a run that is sorted, of which more are taken
# --- runs -------------------------------------------------------------------------------------
def run_length(f: KeyFormat, N: int) -> int:
    """Elements of a run that a group sorts."""
    return min(N, RUN_WORDS // f.of_run(min(N, RUN_WORDS)).words)


def first_lengths(f: KeyFormat, N: int, k: int) -> list[int] | None:
    """Elements of the runs whose first k a group takes, of the row and of the keys that were left
    before; the last is all. None where k are too many for that."""
    lengths, words = list[int](), f.of_run(min(N, FIRST_WORDS)).words
    while True:
        few = takes_few(k, min(N, FIRST_WORDS // words), words)
        run = FIRST_WORDS // words if few else SORTED_RUN
        if N <= (run if few else 2 * run) or 4 * k > run:
            return [*lengths, N] if N * words <= RUN_WORDS else None
        lengths.append(run)
        N, words = -(-N // run) * k, f.words


def takes_few(k: int, width: int, words: int) -> bool:
    """Whether the first k of rows or runs are taken without sorting these."""
    most = MOST_OF_RUN if width * words >= FIRST_WORDS else MOST_FIRST
    return k < width and power(k) * words <= most


def schedule_order(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    (x,), attrs = node.inputs, node.attrs
    shape, width = extents_of(x), attrs["width"]
    space = (prod(shape[:-1]), shape[-1])
    runs = blocks(space[1], width)
    f = KeyFormat.of(attrs["format"])
    words = (f if attrs["of_keys"] else f.of_run(width)).words
    held = FIRST_THREAD_WORDS if takes_few(attrs["kept"], width, words) else THREAD_WORDS
    m = min(power(space[0]), max(1, BLOCK_WORDS // (power(width) * words)))
    warps = max(1, min(16, m * power(width) * words // (32 * held)))
    written = sum(y.aval.type.dtype.bits for y in node.outputs)
    two = warps == SHARING_WARPS and words == 1 and written <= 32
    builder.add("order", space, [builder.operand(x, space)],
                [builder.operand(y, (space[0], extents_of(y)[-1])) for y in node.outputs],
                [builder.step(node, shape=space)],
                Schedule(m=m, n=width, warps=warps, RESIDENT=1 + two),
                (blocks(space[0], m), runs), **attrs)


def order_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (x,), s = KernelWriter(group), group.steps, group.reads, group.schedule
    BM, W, kept, f = s.m, s.n, group.attr("kept"), KeyFormat.of(group.attr("format"))
    part = f if group.attr("of_keys") else f.of_run(W)
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"n = tile.group_id(1) * {W}")
    w.line(f"x = tile.load({capital(x.name)}[m:m+{BM}, n:n+{W}])", step)
    if group.attr("of_keys"):
        w.line("key = x", step)
    else:
        position = f"tile.arange(0, {W}, {w.type(as_type('int32'))})[None, :]"
        part.keys(w, step, "x", position + (" + n" if part is f and group.grid[1] > 1 else ""))
    few = takes_few(kept, W, part.words)
    w.line(f"key = {f'tile.smallest(key, {kept})' if few else 'tile.sort(key)'}", step)
    w.line(f"r = tile.group_id(1) * {kept}")
    if group.attr("gives") == ("keys",) and part is not f:
        part.rebased(w, step, f, "n")
        part = f
    texts = part.results(w, step, group)
    picked = not few and kept < W and group.grid[1] > 1
    if picked:
        _first_places(w, step, group)
    for y, text in zip(group.writes, texts, strict=True):
        w.line(f"tile.scatter({capital(y.name)}, place, {text})" if picked else
               f"{capital(y.name)}[m:m+{BM}, r:r+{kept if few else W}] = {text}", step)
    shapes = [x.shape, *((prod(y.shape),) if picked else y.shape for y in group.writes)]
    return w.finish_operands(shapes)


def _first_places(w: KernelWriter, step: GroupStep, group: ScheduledGroup) -> None:
    """place = ... of the first elements of runs in the result, -1 of the others."""
    (y, *_), BM, W = group.writes, group.schedule.m, group.schedule.n
    M, C = y.shape
    kind = w.type(as_type("int64" if M * C >= LONG else "int32"))
    w.line(f"row = tile.arange(0, {BM}, {kind})[:, None] + m", step)
    w.line(f"at = tile.arange(0, {W}, {kind})[None, :]", step)
    w.line(f"place = tile.where((row < {M}) & (at < {group.attr('kept')}), row * {C} + r + at, -1)",
           step)


kernel_kind("order", "sort", order_source, schedule_order, [ORDER_ROWS])

__all__ = ["ORDER_ROWS", "THREAD_WORDS", "first_lengths", "run_length"]
