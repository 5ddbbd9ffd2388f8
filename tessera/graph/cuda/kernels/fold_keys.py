"""The kernels of keys that are known on the device alone: a key from a key and a number, many of
them from those of rows, and the random bits of many keys, whose loops read one key.

Ten rounds of Philox4x32 on a counter (numerics/philox.py), in 64-bit integers: products of two
words, and their halves.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type, philox
from ...ops.key_rows import BITS_OF_KEYS, FOLD_IN_EACH
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ..choose_schedule import LANES, blocks, chosen
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital

LOW, WORDS = 0xFFFFFFFF, 4  # words that one counter gives


def schedule_key(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    reads = [builder.operand(v, extents_of(v) or (1,)) for v in builder.reads(group)]
    builder.add("key", (2,), reads, [builder.operand(node.outputs[0])], [builder.step(node)],
                chosen(None, 1, warps=1), (1,))


def schedule_keys(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """A thread for each key."""
    (node,) = group.nodes
    keys, data = (builder.operand(v) for v in node.inputs)
    y = builder.operand(node.outputs[0])
    builder.add("keys", (y.shape[0],), [keys, data], [y], [builder.step(node)],
                chosen(None, LANES, warps=4), (blocks(y.shape[0], LANES),))


def schedule_key_bits(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """A thread for each four words of a key's stream."""
    (node,) = group.nodes
    (keys,), (out,) = map(builder.operand, node.inputs), node.outputs
    y = builder.operand(out, (keys.shape[0], prod(node.attrs["shape"])))
    count = keys.shape[0] * -(-y.shape[1] // WORDS)
    builder.add("key_bits", (count,), [keys], [y], [builder.step(node)],
                chosen(None, LANES, warps=4), (blocks(count, LANES),))


def _words(w: KernelWriter, step: GroupStep, counter: tuple[str, str, str], key: str,
           at: str) -> None:
    """a, b, c, d: the words of a counter, whose last one is 0, by the key at a place."""
    wide = w.type(as_type("int64"))
    for i in (0, 1):
        w.line(f"k{i} = tile.cast({key}[{at}{i}], {wide})", step)
    w.line("zero = k0 * 0", step)
    w.line(f"a, b, c, d = {', '.join(counter)}, zero", step)
    for _ in range(philox.ROUNDS):
        w.line(f"p, q = a * {philox.FACTOR_0}, c * {philox.FACTOR_1}", step)
        w.line(f"a, b = ((q >> 32) & {LOW}) ^ b ^ k0, q & {LOW}", step)
        w.line(f"c, d = ((p >> 32) & {LOW}) ^ d ^ k1, p & {LOW}", step)
        w.line(f"k0, k1 = (k0 + {philox.WEYL_0}) & {LOW}, (k1 + {philox.WEYL_1}) & {LOW}", step)


def key_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    words = w.type(as_type("int64"))
    key, data = step.args
    number = f"tile.cast({capital(data)}[0], {words})" if isinstance(data, str) else str(data)
    w.line(f"data = {number}", step)
    _words(w, step, (f"data & {LOW}", "zero", f"zero + {philox.FOLD_DOMAIN}"), capital(key), "")
    for i, word in enumerate("ab"):
        w.line(f"{capital(y.name)}[{i}] = tile.cast({word}, {w.type(y.type)})", step)
    return w.finish_operands()


def keys_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    (keys, data), words = group.reads, w.type(as_type("int64"))
    w.line("i = tile.linear_id()")
    with w.block(f"if i < {y.shape[0]}:"):
        w.line(f"data = tile.cast({capital(data.name)}[i], {words})", step)
        _words(w, step, (f"data & {LOW}", "zero", f"zero + {philox.FOLD_DOMAIN}"),
               capital(keys.name), "i, ")
        for i, word in enumerate("ab"):
            w.line(f"{capital(y.name)}[i, {i}] = tile.cast({word}, {w.type(y.type)})", step)
    return w.finish_operands()


def key_bits_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    (keys,), (count,), N = group.reads, group.space, y.shape[1]
    each, words = count // keys.shape[0], w.type(as_type("int64"))
    w.line("i = tile.linear_id()")
    with w.block(f"if i < {count}:"):
        w.line(f"row, at = i // {each}, i % {each}", step)
        _words(w, step, (f"tile.cast(at, {words})", "zero", "zero"), capital(keys.name), "row, ")
        for i, word in enumerate("abcd"):
            store = (f"{capital(y.name)}[row, at * {WORDS} + {i}] = "
                     f"tile.cast({word}, {w.type(y.type)})")
            if i < N % WORDS or N % WORDS == 0:  # every block has it
                w.line(store, step)
            elif each > 1:
                with w.block(f"if at < {each - 1}:"):
                    w.line(store, step)
    return w.finish_operands()


kernel_kind("key", "elementwise", key_source, schedule_key)
kernel_kind("keys", "elementwise", keys_source, schedule_keys, [FOLD_IN_EACH])
kernel_kind("key_bits", "elementwise", key_bits_source, schedule_key_bits, [BITS_OF_KEYS])
