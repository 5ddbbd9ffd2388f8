"""Rows in order by keys: sorts, the first of them, and merges of runs.

A key is an integer that says where an element stands: the number, in bits that compare as numbers
do (NaN above all, 0 as -0), then its position in the row, and of floats the sign bit, for 0. No two
are equal, so any network sorts them stably, and value and position come out of the key again.
Keys have 32 bits where that is enough: comparing and exchanging these takes a third of the time.
Numbers of 64 bits have none; see sorting.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ...numerics import DType, NumericType, as_type, find_dtype
from ...tile.ir.register_layout import bits_of
from ..op import GraphOp
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.groups import FusionGroup
from ..schedule.ir import GroupStep, ScheduledGroup
from ..schedule.library_call import library_call
from ..schedule.loop_axes import extents_of
from .choose_schedule import blocks, chosen, power
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG, count_before

# x, or keys -> of each run of `width` the first `kept`: as keys, or as values and positions.
ORDER_ROWS = library_call("order_rows")
MERGE_KEYS = library_call("merge_keys")  # keys -> of pairs of runs of `width`; or what they say
KINDS: dict[GraphOp, str] = {ORDER_ROWS: "order", MERGE_KEYS: "merge_keys"}

# Of 2^26 elements of bf16 (NVIDIA H200, 2026-11-26, by programs around benchmarks/rows.py): rows of
# 4096 sorted in 612 us with 16 words of keys a thread, 624 with 32 and 1002 with 64; their first
# eight taken in 207, 135 and 118.
THREAD_WORDS, FIRST_THREAD_WORDS = 32, 64
BLOCK_WORDS = 4096  # of a group of short rows
RUN_WORDS = 16384  # of a run that is sorted
FIRST_WORDS = 4096  # of a run of which a few are taken without sorting it
# Words of these few, all of which each thread holds: the first 16 of rows of 4096 take 155 us, and
# 364 from runs that are sorted; the first 32 take 247 and 368, the first 50 800 and 624. In rows
# shorter than a run more than MOST_FIRST were slower: of 256 columns the first 50 take 2776 us, a
# sort 388.
MOST_FIRST, MOST_OF_RUN = 16, 32
SORTED_RUN = 1024  # elements of a run that is sorted, of which more are taken
MERGED = 2048  # keys of two runs that a group merges: rows of 65536 take 2.3 ms, 3.1 with 8192
NEGATIVE = -(1 << 31)


@dataclass(frozen=True)
class KeyFormat:
    """How the elements of rows of an extent become keys."""

    dtype: DType
    extent: int
    descending: bool

    @property
    def floats(self) -> bool:
        return self.dtype.kind == "float"

    @property
    def value_bits(self) -> int:
        if self.floats:  # of the f32 that it is
            return 9 + max(self.dtype.man, 1)
        return 2 if self.dtype.kind == "bool" else self.dtype.bits

    @property
    def low_bits(self) -> int:
        return bits_of(self.extent) + self.floats

    @property
    def words(self) -> int:
        return 1 + (self.value_bits + self.low_bits > 32)

    @property
    def type(self) -> NumericType:
        return as_type(f"int{32 * self.words}")

    @property
    def attribute(self) -> tuple[str, int, bool]:
        return self.dtype.name, self.extent, self.descending

    @staticmethod
    def of(attribute: Any) -> KeyFormat:
        return KeyFormat(find_dtype(attribute[0]), *attribute[1:])

    # --- texts ------------------------------------------------------------------------------------
    def keys(self, w: KernelWriter, step: GroupStep, x: str, position: str) -> None:
        """key = ... of elements and their positions in a row, int32."""
        i32, key = w.type(as_type("int32")), w.type(self.type)
        if self.floats:
            infinity, most = 0xFF << 23, (1 << 31) - 1
            w.line(f"bits = tile.bitcast(tile.cast({x}, {w.type(as_type('f32'))}), {i32})", step)
            w.line(f"size = bits & {most}", step)
            w.line("v = tile.where(bits < 0, -size, size)", step)
            w.line(f"v = tile.where(size > {infinity}, {most}, v) >> {32 - self.value_bits}", step)
            w.line(f"low = {position} * 2 - (bits >> 31)", step)
        else:
            wide = w.type(as_type("int64")) if self.dtype.name == "uint32" else i32
            less = f" - {1 << self.dtype.bits - 1}" if self.dtype.kind == "uint" else ""
            w.line(f"v = tile.cast({x}, {wide}){less}", step)
            w.line(f"low = {position}", step)
        if self.descending:
            w.line("v = ~v", step)
        w.line(f"key = (tile.cast(v, {key}) << {self.low_bits}) | tile.cast(low, {key})", step)

    def rebased(self, w: KernelWriter, step: GroupStep, to: KeyFormat, first: str) -> None:
        """key = ... in the format of rows of which these have the elements from `first` on."""
        key = w.type(to.type)
        w.line(f"low = key & {(1 << self.low_bits) - 1}", step)
        w.line(f"key = (tile.cast(key >> {self.low_bits}, {key}) << {to.low_bits}) | "
               f"(tile.cast(low, {key}) + {first} * {1 + self.floats})", step)

    def value(self, w: KernelWriter, step: GroupStep, to: NumericType) -> str:
        wide = self.dtype.name == "uint32"
        v = f"key >> {self.low_bits}"
        w.line(f"v = {v if wide else f'tile.cast({v}, ' + w.type(as_type('int32')) + ')'}", step)
        if self.descending:
            w.line("v = ~v", step)
        if not self.floats:
            more = f" + {1 << self.dtype.bits - 1}" if self.dtype.kind == "uint" else ""
            return f"tile.cast(v{more}, {w.type(to)})"
        w.line(f"size = tile.where(v < 0, -v, v) << {32 - self.value_bits}", step)
        w.line("minus = (v < 0) | ((v == 0) & ((key & 1) != 0))", step)
        w.line(f"bits = tile.where(minus, size | {NEGATIVE}, size)", step)
        return f"tile.cast(tile.bitcast(bits, {w.type(as_type('f32'))}), {w.type(to)})"

    def position(self, w: KernelWriter, to: NumericType) -> str:
        low = f"(key & {(1 << self.low_bits) - 1})" + (" >> 1" if self.floats else "")
        return f"tile.cast({low}, {w.type(to)})"


def has_keys(dtype: DType, N: int) -> bool:
    """Whether a number and a position among N fit into 64 bits, and twice the latter into 32."""
    return dtype.bits <= 32 and N < LONG


# --- runs -------------------------------------------------------------------------------------
def run_length(f: KeyFormat, N: int) -> int:
    """Elements of a run that a group sorts."""
    return min(N, RUN_WORDS // KeyFormat(f.dtype, min(N, RUN_WORDS), f.descending).words)


def first_lengths(f: KeyFormat, N: int, k: int) -> list[int] | None:
    """Elements of the runs whose first k a group takes, of the row and of the keys that were left
    before; the last is all. None where k are too many for that."""
    lengths, words = list[int](), KeyFormat(f.dtype, min(N, FIRST_WORDS), f.descending).words
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
    words = f.words if attrs["of_keys"] else KeyFormat(f.dtype, width, f.descending).words
    held = FIRST_THREAD_WORDS if takes_few(attrs["kept"], width, words) else THREAD_WORDS
    m = min(power(space[0]), max(1, BLOCK_WORDS // (power(width) * words)))
    warps = max(1, min(16, m * power(width) * words // (32 * held)))
    builder.add("order", space, [builder.operand(x, space)],
                [builder.operand(y, (space[0], extents_of(y)[-1])) for y in node.outputs],
                [builder.step(node, shape=space)], chosen(m, width, warps=warps),
                (blocks(space[0], m), runs), **attrs)


def order_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (x,), s = KernelWriter(group), group.steps, group.reads, group.schedule
    BM, W, kept, f = s.m, s.n, group.attr("kept"), KeyFormat.of(group.attr("format"))
    part = f if group.attr("of_keys") else KeyFormat(f.dtype, W, f.descending)
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"n = tile.group_id(1) * {W}")
    w.line(f"x = tile.load({capital(x.name)}[m:m+{BM}, n:n+{W}])", step)
    if group.attr("of_keys"):
        w.line("key = x", step)
    else:
        position = f"tile.arange(0, {W}, {w.type(as_type('int32'))})[None, :]"
        part.keys(w, step, "x", position)
    few = takes_few(kept, W, part.words)
    w.line(f"key = {f'tile.smallest(key, {kept})' if few else 'tile.sort(key)'}", step)
    w.line(f"r = tile.group_id(1) * {kept}")
    if group.attr("gives") == ("keys",) and part is not f:
        part.rebased(w, step, f, "n")
        part = f
    texts = _results(w, step, part, group)
    picked = not few and kept < W and group.grid[1] > 1
    if picked:
        _first_places(w, step, group)
    for y, text in zip(group.writes, texts, strict=True):
        w.line(f"tile.scatter({capital(y.name)}, place, {text})" if picked else
               f"{capital(y.name)}[m:m+{BM}, r:r+{kept if few else W}] = {text}", step)
    shapes = [x.shape, *((prod(y.shape),) if picked else y.shape for y in group.writes)]
    given = [f"{capital(o.name)}: {w.annotation(o, d)}"
             for o, d in zip((x, *group.writes), shapes, strict=True)]
    return w.finish(given, f"(grid={group.grid})", shapes)


def _first_places(w: KernelWriter, step: GroupStep, group: ScheduledGroup) -> None:
    """place = ... of the first elements of runs in the result, -1 of the others."""
    (y, *_), BM, W = group.writes, group.schedule.m, group.schedule.n
    M, C = y.shape
    kind = w.type(as_type("int64" if M * C >= LONG else "int32"))
    w.line(f"row = tile.arange(0, {BM}, {kind})[:, None] + m", step)
    w.line(f"at = tile.arange(0, {W}, {kind})[None, :]", step)
    w.line(f"place = tile.where((row < {M}) & (at < {group.attr('kept')}), row * {C} + r + at, -1)",
           step)


def _results(w: KernelWriter, step: GroupStep, f: KeyFormat, group: ScheduledGroup) -> list[str]:
    """What is written of keys, in the order of the results."""
    made = {"keys": lambda t: "key", "values": lambda t: f.value(w, step, t),
            "positions": lambda t: f.position(w, t)}
    return [made[what](y.type) for what, y in zip(group.attr("gives"), group.writes, strict=True)]


# --- merges -----------------------------------------------------------------------------------
def schedule_merge_keys(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    shape = extents_of(node.inputs[0])
    space = (prod(shape[:-1]), shape[-1])
    n = min(MERGED, 2 * power(node.attrs["width"]))
    words = KeyFormat.of(node.attrs["format"]).words
    warps = max(1, min(16, n * words // (32 * THREAD_WORDS)))
    builder.add("merge_keys", space, [builder.operand(node.inputs[0], space)],
                [builder.operand(y, space) for y in node.outputs],
                [builder.step(node, shape=space)], chosen(None, n, warps=warps),
                (space[0], blocks(space[1], n)), **node.attrs)


def merge_keys_source(group: ScheduledGroup) -> KernelText:
    """A group writes so many keys of a pair of runs. How many of the left run stand before its
    first and before its end is found by a search (Odeh et al., Merge Path, 2012); these keys rise,
    those of the right run fall behind them, and one merge of a bitonic network sorts them."""
    w, (step,), (x,), n = KernelWriter(group), group.steps, group.reads, group.schedule.n
    (M, N), W = x.shape, group.attr("width")
    kind = w.type(as_type("int64" if M * N >= LONG else "int32"))
    X, i32 = capital(x.name), w.type(as_type("int32"))
    w.line(f"line = tile.cast(tile.group_id(0), {kind}) * {N}", step)
    w.line(f"first = tile.group_id(1) * {n}", step)
    w.line(f"pair = first // {2 * W} * {2 * W}", step)
    w.line(f"left = tile.minimum({N} - pair, {W})", step)
    w.line(f"right = tile.minimum({N} - pair - left, {W})", step)
    w.line(f"p = tile.minimum(first - pair + tile.arange(0, 2, {i32}) * {n}, left + right)", step)
    begin = "line + pair"
    key = f"tile.gather({X}, {begin} + next - 1)"
    other = f"tile.gather({X}, {begin} + left + tile.minimum(p - next, right - 1))"
    found = count_before(w, step, min(W, N), "tile.minimum(p, left)",
                         lambda at: f"({key} < {other}) | (p - next >= right)", lambda e: e)
    for name, side in (("a", 0), ("b", 1)):
        w.line(f"{name} = tile.reduce_sum(tile.where(tile.arange(0, 2, {i32}) == {side}, {found}, "
               "0))", step)
        w.line(f"{name}p = tile.reduce_sum(tile.where(tile.arange(0, 2, {i32}) == {side}, p, 0))",
               step)
    w.line(f"at = tile.arange(0, {n}, {i32})", step)
    w.line("rises = at < b - a", step)
    w.line(f"falls = at >= {n} - (bp - b - ap + a)", step)
    w.line(f"place = tile.where(rises, a + at, left + ap - a + {n - 1} - at)", step)
    most = (1 << 32 * KeyFormat.of(group.attr("format")).words - 1) - 1
    w.line(f"there = tile.where(rises | falls, {begin} + place, -1)", step)
    w.line(f"key = tile.where(rises | falls, tile.gather({X}, there), {most})", step)
    w.line("key = tile.sort(key, bitonic=True)", step)
    w.line("place = tile.where(at < bp - ap, line + first + at, -1)", step)
    texts = _results(w, step, KeyFormat.of(group.attr("format")), group)
    for y, text in zip(group.writes, texts, strict=True):
        w.line(f"tile.scatter({capital(y.name)}, place, {text})", step)
    operands, total = (x, *group.writes), (M * N,)
    given = [f"{capital(o.name)}: {w.annotation(o, total)}" for o in operands]
    return w.finish(given, f"(grid={group.grid})", [total] * len(operands))


__all__ = ["KINDS", "MERGE_KEYS", "ORDER_ROWS", "KeyFormat", "first_lengths", "has_keys",
           "merge_keys_source", "order_source", "run_length", "schedule_merge_keys",
           "schedule_order"]
