"""Merges of pairs of sorted runs of keys.

A group writes so many keys of a pair. How many of the left run stand before its first is a cut
(Odeh et al., Merge Path, 2012), which a kernel in front has found for all groups at once. So a
group's keys of the left run rise, those of the right run fall behind them, and the one merge of a
bitonic network sorts them.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....numerics import as_type
from ...ir import Node, Value
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter
from ..choose_schedule import blocks, chosen, for_loop, power
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .row_order import THREAD_WORDS
from .searches import LONG, count_before
from .sort_keys import KeyFormat

MERGE_CUTS = library_call("merge_cuts")  # keys -> of the left run, before each group's first
MERGE_KEYS = library_call("merge_keys")  # keys, cuts -> of pairs of runs; or what they say
MERGED = 2048  # keys that a group merges: rows of 65536 take 2.3 ms, 3.1 with 8192


def merged(rw: Rewriter, keys: Value, types: Any, **attrs: Any) -> list[Value]:
    """The pairs of runs of `width` of the keys as runs, of the types that `gives` names."""
    *lead, N = extents_of(keys)
    n = min(MERGED, 2 * power(attrs["width"]))
    attrs |= {"block": n}
    cuts = Value(Aval((*lead, blocks(N, n)), as_type("int32")))
    rw.add(Node(MERGE_CUTS, (keys,), {"width": attrs["width"], "block": n}, (cuts,), rw.where))
    made = tuple(Value(Aval(keys.aval.shape, types[g])) for g in attrs["gives"])
    rw.add(Node(MERGE_KEYS, (keys, cuts), attrs, made, rw.where))
    return list(made)


def _pair(w: KernelWriter, step: GroupStep, group: ScheduledGroup, N: int) -> None:
    """Where the pair of runs of the keys from `first` on begins, and how long its runs are."""
    W = group.attr("width")
    w.line(f"pair = first // {2 * W} * {2 * W}", step)
    w.line(f"left = tile.minimum({N} - pair, {W})", step)
    w.line(f"right = tile.minimum({N} - pair - left, {W})", step)


def schedule_merge_cuts(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    shape = extents_of(node.inputs[0])
    space = (prod(shape[:-1]), shape[-1])
    cuts = builder.operand(node.outputs[0])
    s = for_loop((prod(cuts.shape),), 64)
    builder.add("merge_cuts", cuts.shape, [builder.operand(node.inputs[0], space)], [cuts],
                [builder.step(node)], s, (blocks(prod(cuts.shape), s.n),), **node.attrs)


def merge_cuts_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (x,), (y,) = KernelWriter(group), group.steps, group.reads, group.writes
    (M, N), BN, n = x.shape, group.schedule.n, group.attr("block")
    kind, X = w.type(as_type("int64" if M * N >= LONG else "int32")), capital(x.name)
    w.line(f"n = tile.group_id(0) * {BN}")
    w.line(f"p = tile.arange(0, {BN}, {kind}) + n")
    w.line(f"first = p % {y.shape[-1]} * {n}", step)
    _pair(w, step, group, N)
    w.line(f"begin = p // {y.shape[-1]} * {N} + pair", step)
    w.line("front = first - pair", step)
    key = f"tile.gather({X}, begin + next - 1)"
    other = f"tile.gather({X}, begin + left + tile.minimum(front - next, right - 1))"
    found = count_before(w, step, min(group.attr("width"), N), "tile.minimum(front, left)",
                         lambda at: f"({key} < {other}) | (front - next >= right)", lambda e: e)
    w.line(f"{capital(y.name)}[n:n+{BN}] = tile.cast({found}, {w.type(y.type)})", step)
    return w.finish_flat()


def schedule_merge_keys(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    keys, cuts = node.inputs
    space = (prod(extents_of(keys)[:-1]), extents_of(keys)[-1])
    n = node.attrs["block"]
    words, grid = KeyFormat.of(node.attrs["format"]).words, (space[0], blocks(space[1], n))
    warps = max(1, min(16, n * words // (32 * THREAD_WORDS)))
    builder.add("merge_keys", space, [builder.operand(keys, space), builder.operand(cuts, grid)],
                [builder.operand(y, space) for y in node.outputs],
                [builder.step(node, shape=space)], chosen(None, n, warps=warps), grid,
                **node.attrs)


def merge_keys_source(group: ScheduledGroup) -> KernelText:
    w, (step,), n = KernelWriter(group), group.steps, group.schedule.n
    x, cuts = group.reads
    (M, N), f = x.shape, KeyFormat.of(group.attr("format"))
    kind = w.type(as_type("int64" if M * N >= LONG else "int32"))
    X, C, i32 = capital(x.name), capital(cuts.name), w.type(as_type("int32"))
    w.line("row = tile.group_id(0)")
    w.line("g = tile.group_id(1)")
    w.line(f"line = tile.cast(row, {kind}) * {N}", step)
    w.line(f"first = g * {n}", step)
    _pair(w, step, group, N)
    w.line("front = first - pair", step)
    w.line(f"end = tile.minimum(front + {n}, left + right)", step)
    w.line(f"a = {C}[row, g]", step)
    w.line(f"b = {C}[row, tile.minimum(g + 1, {cuts.shape[1] - 1})]", step)
    w.line("b = tile.where(end == left + right, left, b)", step)
    w.line(f"at = tile.arange(0, {n}, {i32})", step)
    w.line("rises = at < b - a", step)
    w.line(f"falls = at >= {n} - (end - b - front + a)", step)
    w.line(f"place = tile.where(rises, a + at, left + front - a + {n - 1} - at)", step)
    w.line("there = tile.where(rises | falls, line + pair + place, -1)", step)
    most = (1 << 32 * f.words - 1) - 1
    w.line(f"key = tile.where(rises | falls, tile.gather({X}, there), {most})", step)
    w.line("key = tile.sort(key, bitonic=True)", step)
    w.line("place = tile.where(at < end - front, line + first + at, -1)", step)
    for y, text in zip(group.writes, f.results(w, step, group), strict=True):
        w.line(f"tile.scatter({capital(y.name)}, place, {text})", step)
    return w.finish_operands([(M * N,), cuts.shape, *[(M * N,)] * len(group.writes)])


kernel_kind("merge_cuts", "sort", merge_cuts_source, schedule_merge_cuts, [MERGE_CUTS])
kernel_kind("merge_keys", "sort", merge_keys_source, schedule_merge_keys, [MERGE_KEYS])

__all__ = ["MERGE_KEYS", "merged"]
