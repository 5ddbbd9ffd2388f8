"""Overlap: the first matmul of an iteration is issued before the last one of the iteration before.

An iteration is  head (what the first matmul needs, and it), middle, tail (the last matmul and what
needs it). A loop becomes

    head(0) middle(0) | for j = 1, ...: head(j) tail(j - 1) middle(j) | tail(last)

so that the arithmetic of `middle` runs while tensor cores do the tail. What the middle reads of the
tail (a rescaled accumulator) comes last in it, behind a wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    made_by,
    map_blocks,
    out,
    reads,
    redefined,
    substituted,
)
from tessera.tile.ir.ir import Const, Def, For, If, Node, Op, Operand, SSAValue

MARK = -1  # a wait whose `pending` the pass `waits` fills in


def overlap(nodes: Nodes, maker: Maker, nonempty: object) -> Nodes:
    """Loops with two or more matmuls rotated. nonempty(loop): it surely runs once."""
    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        for node in nodes:
            parts = _parts(node) if isinstance(node, For) else None
            if parts is None:
                kept.append(node)
                continue
            rotated = _rotated(parts, maker)
            kept += rotated if nonempty(parts.loop) else _guarded(parts.loop, rotated, maker)  # type: ignore[operator]
        return kept

    return map_blocks(nodes, block)


@dataclass(frozen=True)
class LoopSections:
    """A loop cut in three; by_tail: carried value -> what the tail makes it."""

    loop: For
    head: Nodes
    middle: Nodes
    tail: Nodes
    by_tail: dict[SSAValue, SSAValue]

    @property
    def crossing(self) -> list[SSAValue]:
        """What the tail of an iteration needs from the rest of it."""
        inside = {v for n in self.tail for v in made_by(n)}
        wanted = {v for n in self.tail for v in reads(n)} - inside
        return [v for n in (*self.head, *self.middle) for v in _in_order(n) if v in wanted]


def _in_order(node: Node) -> list[SSAValue]:
    found = made_by(node)
    outs = node.outs if isinstance(node, Op | If) else node.carried
    return [d.value for d in outs if d.value in found]


def _parts(loop: For) -> LoopSections | None:
    """None where the loop has no such shape."""
    body = loop.body
    matmuls = [n for n in body if is_op(n, "async_matmul")]
    if len(matmuls) < 2 or not isinstance(loop.step, Const) or loop.step.value <= 0:
        return None
    head = _needed(matmuls[0], body)
    tail = _needing(matmuls[-1], body, head)
    head_reads = set().union(*(reads(n) for n in head))
    made = {v for n in tail for v in made_by(n)}
    tail_reads = set().union(*(reads(n) for n in tail)) - made
    carried = {d.value for d in loop.carried}
    if any(n in head for n in tail) or head_reads & carried or tail_reads & (
            carried | {loop.var.value}):
        return None
    by_tail = {d.value: y for d, y in zip(loop.carried, loop.yields, strict=True) if y in made}
    middle = tuple(n for n in body if n not in head and n not in tail)
    if any(y == d.value for d, y in zip(loop.carried, loop.yields, strict=True)):
        return None
    parts = LoopSections(loop, tuple(n for n in body if n in head), middle, tail, by_tail)
    slots = {v for n in body if is_op(n, "ring_wait", "slot_tile") for v in made_by(n)}
    return None if slots & set(parts.crossing) else parts


def _needed(matmul: Node, body: Nodes) -> list[Node]:
    """The matmul and what it needs of the iteration."""
    need, got = reads(matmul), [matmul]
    for node in reversed(body[:body.index(matmul)]):
        if made_by(node) & need:
            got.append(node)
            need |= reads(node)
    return got


def _needing(matmul: Node, body: Nodes, head: list[Node]) -> Nodes:
    """The matmul, what needs it, and the wait for the slot that only these read."""
    tail, made = [matmul], made_by(matmul)
    for node in body[body.index(matmul) + 1:]:
        if reads(node) & made:
            tail.append(node)
            made |= made_by(node)
    for node in reversed(body):
        if not is_op(node, "slot_tile", "ring_wait") or node in head:
            continue
        readers = [n for n in body if reads(n) & made_by(node)]
        if readers and all(n in tail for n in readers):
            tail.insert(0, node)
    return tuple(n for n in body if n in tail)


def _halves(parts: LoopSections) -> tuple[Nodes, Nodes, Nodes]:
    """(early, late, meeting) of the middle.

    meeting begins with the first node that reads what the tail makes. Packed operands that only the
    next tail reads come late, behind the wait: the running matmul still reads their registers. So
    does the test that only the meeting needs.
    """
    middle = parts.middle
    wanted = set(parts.by_tail)
    at = next((i for i, n in enumerate(middle) if reads(n) & wanted), len(middle))

    def readers(node: Node) -> list[Node]:
        return [n for n in middle if reads(n) & made_by(node)]

    def is_late(node: Node) -> bool:
        if is_op(node, "pack_operand"):
            return not readers(node)
        return is_op(node, "any_differs") and readers(node) == list(middle[at:at + 1])

    early = tuple(n for n in middle[:at] if not is_late(n))
    packs = tuple(n for n in middle if is_op(n, "pack_operand") and is_late(n))
    tests = tuple(n for n in middle[:at] if is_late(n) and n not in packs)
    return early, (*packs, *tests), tuple(n for n in middle[at:] if n not in packs)


def _rotated(parts: LoopSections, maker: Maker) -> list[Node]:
    loop, crossing = parts.loop, parts.crossing
    early, late, meeting = _halves(parts)
    types = {v: maker.type(v) for v in crossing}
    inits = {d.value: i for d, i in zip(loop.carried, loop.inits, strict=True)}
    first, t0 = maker.copy((*parts.head, *early, *late, *meeting),
                           {**inits, loop.var.value: loop.lo})
    second = maker.op("add", (loop.lo, loop.step), loop.var.value.name, where=loop.where)
    carry = {v: maker.define(v.name, types[v]) for v in crossing}
    table = {v: d.value for v, d in carry.items()}
    previous, t1 = maker.copy(parts.tail, table)
    waits, settled = _waits(parts, t1, maker)
    kept = [(d, i, y) for d, i, y in zip(loop.carried, loop.inits, loop.yields, strict=True)
            if d.value not in parts.by_tail]
    body = (*parts.head, *previous, *early, *waits, *substituted((*late, *meeting), settled))
    turned = For(
        loop.var, out(second), loop.hi, loop.step,
        (*(d for d, _, _ in kept), *carry.values()),
        (*(_known(t0, y) for _, _, y in kept), *(t0[v] for v in crossing)), body,
        (*(y for _, _, y in kept), *crossing), loop.over, loop.where)
    last, t2 = maker.copy(parts.tail, table)
    ended = {t2[y]: d for d, y in parts.by_tail.items()}
    last = redefined(substituted(last, ended), ended)  # type: ignore[arg-type]
    return [*first, second, turned, *last]


def _known(table: dict[SSAValue, Operand], x: Operand) -> Operand:
    return table.get(x, x) if isinstance(x, SSAValue) else x


def _waits(parts: LoopSections, table: dict[SSAValue, Operand], maker: Maker
           ) -> tuple[list[Op], dict[SSAValue, Operand]]:
    """Markers for what the tail makes, in front of the nodes that meet it."""
    made: list[Op] = []
    settled: dict[SSAValue, Operand] = {}
    for carried, y in parts.by_tail.items():
        x = table[y]
        made.append(maker.op("matmul_wait", (x,), y.name, maker.type(x), parts.loop.where,
                             pending=MARK))
        settled[carried] = out(made[-1])
    return made, settled


def _guarded(loop: For, rotated: list[Node], maker: Maker) -> list[Node]:
    """The rotated loop where it runs, else what it begins with."""
    test = maker.op("lt", (loop.lo, loop.hi), "iterations", where=loop.where)
    names = {d.value: maker.define(d.value.name, d.type) for d in loop.carried}
    table = {v: d.value for v, d in names.items()}
    inside = substituted(redefined(tuple(rotated), table), table)
    outs = tuple(Def(d.value, d.type) for d in loop.carried)
    return [test, If(out(test), inside, (), outs, tuple(table[d.value] for d in outs), loop.inits,
                     loop.where)]


__all__ = ["MARK", "overlap"]
