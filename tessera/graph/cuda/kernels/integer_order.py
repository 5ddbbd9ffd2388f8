"""The order of many integers below a known extent: what sums by integers read their slices in.

    order = argsort(ids), at = ids[order]

Few bits tell them apart. Where these and a position fit into a key of 32 bits, or integers are few,
keys are sorted (row_order.py). Else they are dealt by a digit at a time, the lowest first, and each
time those of equal digits keep their order (a radix sort: Satish et al., 2009):

    counts[d, g]     how many of block g have the digit d; then running sums of it along g
    places           a group sorts its block by the digit, so that what it writes are runs

A group's integers of digit d begin behind all of smaller digits, and those of d in blocks before.
"""

from __future__ import annotations

from ....numerics import as_type
from ....tile.ir.register_layout import bits_of
from ...ir import Node, Value
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter
from ..choose_schedule import blocks, chosen
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .row_order import run_length
from .sort_keys import KeyFormat
from .sorting import by_keys

DIGIT_COUNTS = library_call("digit_counts")  # ids [T] -> [D, G]
DIGIT_PLACES = library_call("digit_places")  # running counts, ids (, order) -> ids, order
BLOCK = 4096  # integers of a group
DIGIT = 9  # bits of a digit, at most: eight integers of each in a block
INT32 = as_type("int32")


def ordered(rw: Rewriter, ids: Value, extent: int) -> tuple[Value, Value]:
    """(ids in order, where each stood) of integers [T] of 0..extent - 1, in int32."""
    (T,) = extents_of(ids)
    if ids.aval.dtype is not INT32.dtype:
        ids = rw.emit("cast", ids, source=ids.aval.type, to=INT32)
    f, passes = KeyFormat(INT32.dtype, T, False, True, extent), _passes(extent)
    merges = bits_of(blocks(T, run_length(f, T)))
    if 1 + 2 * merges <= 3 * passes:  # launches
        found = by_keys(rw, ids, T, f, ("values", "positions"), INT32)
        return found[0], found[1]
    order: Value | None = None
    shift = 0
    for i in range(passes):
        bits = _digit(extent, passes, i)
        ids, order = _pass(rw, ids, order, shift, bits)
        shift += bits
    assert order is not None
    return ids, order


def _passes(extent: int) -> int:
    return max(1, blocks(bits_of(extent), DIGIT))


def _digit(extent: int, passes: int, i: int) -> int:
    """Bits of the i-th digit: as even as they come."""
    return max(1, bits_of(extent) * (i + 1) // passes - bits_of(extent) * i // passes)


def _pass(rw: Rewriter, ids: Value, order: Value | None, shift: int, bits: int
          ) -> tuple[Value, Value]:
    (T,), attrs = extents_of(ids), {"shift": shift, "bits": bits}
    counts = Value(Aval((1 << bits, blocks(T, BLOCK)), INT32))
    rw.add(Node(DIGIT_COUNTS, (ids,), attrs, (counts,), rw.where))
    running = rw.emit("cumsum", counts, axis=1)
    made = Value(Aval((T,), INT32)), Value(Aval((T,), INT32))
    given = (running, ids) if order is None else (running, ids, order)
    rw.add(Node(DIGIT_PLACES, given, attrs, made, rw.where))
    return made


def schedule_digits(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    counting = node.op is DIGIT_COUNTS
    (T,) = extents_of(node.inputs[0 if counting else 1])
    builder.add(group.kind, (T,), [builder.operand(v) for v in node.inputs],
                [builder.operand(v) for v in node.outputs], [builder.step(node)],
                chosen(None, BLOCK, warps=8), (blocks(T, BLOCK),), **node.attrs)


def digit_counts_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (ids,), (y,) = KernelWriter(group), group.steps, group.reads, group.writes
    (D, G), BN = y.shape, group.schedule.n
    w.line("g = tile.group_id(0)")
    w.line(f"n = g * {BN}")
    w.line(f"counts = tile.alloc_shared(({D},), {w.type(INT32)})", step)
    w.line(f"tile.scatter(counts, tile.arange(0, {D}), 0)", step)
    w.line("tile.barrier()")
    w.line(f"at = tile.load({capital(ids.name)}[n:n+{BN}])", step)
    w.line(f"digit = {_digit_of(group, 'at')}", step)
    w.line('tile.atomic_add(counts, digit, 1, scope="group")', step)
    w.line("tile.barrier()")
    w.line(f"d = tile.arange(0, {D})", step)
    w.line(f"tile.scatter({capital(y.name)}, d * {G} + g, tile.gather(counts, d))", step)
    return w.finish_flat()


def digit_places_source(group: ScheduledGroup) -> KernelText:
    w, step, BN = KernelWriter(group), group.steps[0], group.schedule.n
    running, ids, *orders = group.reads
    (D, G), (T,), low = running.shape, ids.shape, bits_of(BN)
    R, X, i32 = capital(running.name), capital(ids.name), w.type(INT32)
    w.line("g = tile.group_id(0)")
    w.line(f"n = g * {BN}")
    w.line(f"begin = tile.alloc_shared(({D},), {i32})", step)
    w.line(f"first = tile.alloc_shared(({D + 1},), {i32})", step)
    w.line(f"digits = tile.alloc_shared(({BN},), {i32})", step)
    w.line(f"d = tile.arange(0, {D})", step)
    w.line(f"total = tile.gather({R}, d * {G} + {G - 1})", step)
    w.line(f"before = tile.where(g > 0, tile.gather({R}, tile.maximum(d * {G} + g - 1, 0)), 0)",
           step)
    w.line("tile.scatter(begin, d, tile.cumsum(total) - total + before)", step)
    w.line(f"i = tile.arange(0, {BN}, {i32})", step)
    w.line(f"at = tile.gather({X}, tile.minimum(n + i, {T - 1}))", step)
    w.line(f"digit = tile.where(n + i < {T}, {_digit_of(group, 'at')}, {D})", step)
    w.line(f"key = tile.sort((digit << {low}) | i)", step)
    w.line(f"digit = key >> {low}", step)
    w.line("tile.scatter(digits, i, digit)", step)
    w.line("tile.barrier()")
    w.line("ahead = tile.gather(digits, tile.maximum(i - 1, 0))", step)
    w.line("tile.scatter(first, tile.where((i == 0) | (ahead != digit), digit, -1), i)", step)
    w.line("tile.barrier()")
    w.line(f"inside = digit < {D}", step)
    w.line("start = tile.gather(begin, digit) - tile.gather(first, digit)", step)
    w.line("place = tile.where(inside, start + i, -1)", step)
    w.line(f"own = tile.where(inside, n + (key & {BN - 1}), -1)", step)
    ids_out, order_out = (capital(y.name) for y in group.writes)
    w.line(f"tile.scatter({ids_out}, place, tile.gather({X}, own))", step)
    made = f"tile.gather({capital(orders[0].name)}, own)" if orders else "own"
    w.line(f"tile.scatter({order_out}, place, {made})", step)
    return w.finish_flat()


def _digit_of(group: ScheduledGroup, at: str) -> str:
    shift = f"({at} >> {group.attr('shift')})" if group.attr("shift") else at
    return f"{shift} & {(1 << group.attr('bits')) - 1}"


kernel_kind("digit_counts", "sort", digit_counts_source, schedule_digits, [DIGIT_COUNTS])
kernel_kind("digit_places", "sort", digit_places_source, schedule_digits, [DIGIT_PLACES])

__all__ = ["ordered"]
