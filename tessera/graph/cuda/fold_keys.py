"""The kernel of fold_in: a key from a key and a number that is known on the device alone.

Ten rounds of Philox4x32 on one counter (numerics/philox.py), whose first word is the number modulo
2^32, in 64-bit integers: products of two words, and their halves.
"""

from __future__ import annotations

from ...numerics import as_type, philox
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.groups import FusionGroup
from ..schedule.ir import ScheduledGroup
from ..schedule.loop_axes import extents_of
from .choose_schedule import chosen
from .kernel_text import KernelText, KernelWriter, capital

LOW = 0xFFFFFFFF


def schedule_key(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    reads = [builder.operand(v, extents_of(v) or (1,)) for v in builder.reads(group)]
    builder.add("key", (2,), reads, [builder.operand(node.outputs[0])], [builder.step(node)],
                chosen(None, 1, warps=1), (1,))


def key_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    words = w.type(as_type("int64"))
    key, data = step.args
    number = f"tile.cast({capital(data)}[0], {words})" if isinstance(data, str) else str(data)
    w.line(f"data = {number}", step)
    for i in (0, 1):
        w.line(f"k{i} = tile.cast({capital(key)}[{i}], {words})", step)
    w.line("zero = k0 * 0", step)
    w.line(f"a, b, c, d = data & {LOW}, zero, zero + {philox.FOLD_DOMAIN}, zero", step)
    for _ in range(philox.ROUNDS):
        w.line(f"p, q = a * {philox.FACTOR_0}, c * {philox.FACTOR_1}", step)
        w.line(f"a, b = ((q >> 32) & {LOW}) ^ b ^ k0, q & {LOW}", step)
        w.line(f"c, d = ((p >> 32) & {LOW}) ^ d ^ k1, p & {LOW}", step)
        w.line(f"k0, k1 = (k0 + {philox.WEYL_0}) & {LOW}, (k1 + {philox.WEYL_1}) & {LOW}", step)
    for i, word in enumerate("ab"):
        w.line(f"{capital(y.name)}[{i}] = tile.cast({word}, {w.type(y.type)})", step)
    operands = (*group.reads, y)
    texts = [f"{capital(o.name)}: {w.annotation(o, o.shape)}" for o in operands]
    return w.finish(texts, f"(grid={group.grid})", [o.shape for o in operands])


__all__ = ["key_source", "schedule_key"]
