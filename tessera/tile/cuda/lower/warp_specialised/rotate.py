"""Overlap: the first matmuls of an iteration are issued before the last ones of the one before.

An iteration is  head (the matmuls that need no other, and what they need), middle, tail (the last
of the matmuls that no other needs, as many as registers allow, and what needs them). A loop becomes

    head(0) middle(0) | for j = 1, ...: head(j) tail(j - 1) middle(j) | tail(last)

so that the arithmetic of `middle` runs while tensor cores do the tail. What the middle reads of the
tail (a rescaled accumulator) comes last in it, behind a wait. A tail that adds to what the loop
carries does so one iteration later; a slot that it reads together with the head stays held until
then.
"""

from __future__ import annotations

from tessera.lazy_dataclass import dataclass
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
from tessera.tile.ir.ir import Const, Def, For, If, Node, Op, Operand, SSAValue, walk

MARK = -1  # a wait whose `pending` the pass `waits` fills in


def overlap(nodes: Nodes, maker: Maker, nonempty: object, most: int = 1) -> Nodes:
    """Loops with two or more matmuls rotated. nonempty(loop): it surely runs once. most: matmuls of
    a tail."""
    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        for node in nodes:
            parts = _sections_of(node, maker, most) if isinstance(node, For) else None
            if parts is None:
                kept.append(node)
                continue
            rotated = _rotated(parts, maker)
            kept += rotated if nonempty(parts.loop) else _guarded(parts.loop, rotated, maker)  # type: ignore[operator]
        return kept

    return map_blocks(nodes, block)


@dataclass(frozen=True)
class LoopSections:
    """A loop cut in three; by_tail: carried value -> what the tail makes it, direct: those of them
    that the tail itself adds to."""

    loop: For
    head: Nodes
    middle: Nodes
    tail: Nodes
    by_tail: dict[SSAValue, SSAValue]
    direct: frozenset[SSAValue] = frozenset()

    @property
    def crossing(self) -> list[SSAValue]:
        """What the tail of an iteration needs from the rest of it."""
        inside = {v for n in self.tail for v in made_by(n)}
        wanted = {v for n in self.tail for v in reads(n)} - inside - self.direct
        return [v for n in (*self.head, *self.middle) for v in _in_order(n) if v in wanted]


def _in_order(node: Node) -> list[SSAValue]:
    found = made_by(node)
    outs = node.outs if isinstance(node, Op | If) else node.carried
    return [d.value for d in outs if d.value in found]


def _sections_of(loop: For, maker: Maker, most: int) -> LoopSections | None:
    """None where the loop has no such shape."""
    matmuls = [n for n in loop.body if is_op(n, "async_matmul")]
    if len(matmuls) < 2 or not isinstance(loop.step, Const) or loop.step.value <= 0:
        return None
    firsts, lasts = _ends(loop.body, matmuls)
    head = _needed(firsts, loop.body)
    tail = _needing(lasts[-most:], loop.body, head)
    if any(n in head for n in tail):
        return None
    body, tail = _own_views(loop.body, tail, maker)
    head_reads = set().union(*(reads(n) for n in head))
    made = {v for n in tail for v in made_by(n)}
    tail_reads = set().union(*(reads(n) for n in tail)) - made
    carried = {d.value for d in loop.carried}
    by_tail = {d.value: y for d, y in zip(loop.carried, loop.yields, strict=True) if y in made}
    middle = tuple(n for n in body if n not in head and n not in tail)
    direct = frozenset(tail_reads & carried)
    if head_reads & carried or loop.var.value in tail_reads or not direct <= set(by_tail) or (
            direct & set().union(*(reads(n) for n in middle))):
        return None
    if any(y == d.value for d, y in zip(loop.carried, loop.yields, strict=True)):
        return None
    return LoopSections(loop, tuple(n for n in body if n in head), middle, tail, by_tail, direct)


def _ends(body: Nodes, matmuls: list[Op]) -> tuple[list[Op], list[Op]]:
    """(the matmuls that need no other of the iteration, those that no other needs)."""
    needed: dict[SSAValue, set[SSAValue]] = {}  # value -> the matmuls that it is made from
    made = {out(m) for m in matmuls}
    for node in body:
        sources = set().union(*(needed.get(v, set()) for v in reads(node)))
        for v in made_by(node):
            needed[v] = sources | ({v} if v in made else set())
    used = set().union(*(needed[out(m)] - {out(m)} for m in matmuls))
    return ([m for m in matmuls if needed[out(m)] == {out(m)}],
            [m for m in matmuls if out(m) not in used])


def ends(loop: For) -> tuple[list[Op], list[Op]]:
    """The matmuls of an iteration that need no other, and those that no other needs."""
    return _ends(loop.body, [n for n in loop.body if is_op(n, "async_matmul")])


def held_over(nodes: Nodes, most: int) -> set[SSAValue]:
    """The loads of rotated loops that first matmuls of an iteration read and those of the tail."""
    found: set[SSAValue] = set()
    for loop in walk(nodes):
        if not isinstance(loop, For):
            continue
        matmuls = [n for n in loop.body if is_op(n, "async_matmul")]
        if len(matmuls) > 1:
            firsts, lasts = _ends(loop.body, matmuls)
            found |= {v for m in firsts for v in reads(m)} & {
                v for m in lasts[-most:] for v in reads(m)}
    return found


def _needed(ops: list[Op], body: Nodes) -> list[Node]:
    """Some ops and what they need of an iteration."""
    need, got = set().union(*map(reads, ops)), list[Node](ops)
    for node in reversed(body):
        if node not in got and made_by(node) & need:
            got.append(node)
            need |= reads(node)
    return got


def _needing(matmuls: list[Op], body: Nodes, head: list[Node]) -> Nodes:
    """The matmuls, what needs them, and the waits for the slots that only these read."""
    tail, made = list[Node](matmuls), set().union(*map(made_by, matmuls))
    for node in body:
        if node not in tail and reads(node) & made:
            tail.append(node)
            made |= made_by(node)
    for node in reversed(body):
        if not is_op(node, "slot_tile", "ring_wait") or node in head:
            continue
        readers = [n for n in body if reads(n) & made_by(node)]
        if readers and all(n in tail for n in readers):
            tail.insert(0, node)
    return tuple(n for n in body if n in tail)


def _own_views(body: Nodes, tail: Nodes, maker: Maker) -> tuple[Nodes, Nodes]:
    """The body and its tail, which reads slots that others read too through views of its own: what
    crosses into the next iteration is then the slot."""
    wanted = {v for n in tail for v in reads(n)}
    table, views = {}, []
    for node in body:
        if is_op(node, "slot_tile") and node not in tail and out(node) in wanted:
            views.append(maker.op("slot_tile", node.args, out(node).name, where=node.where,
                                  **node.attr))
            table[out(node)] = out(views[-1])
    own = (*views, *substituted(tail, table))
    renamed = dict(zip(tail, own[len(views):], strict=True))
    at = body.index(tail[0])
    return (*body[:at], *views, *(renamed.get(n, n) for n in body[at:])), own


def _halves(parts: LoopSections) -> tuple[Nodes, Nodes, Nodes]:
    """(early, late, meeting) of the middle.

    meeting begins with the first node that reads what the tail makes. Packed operands that only the
    next tail reads come late, behind the wait: the running matmul still reads their registers. So
    does the test that only the meeting needs. What such an operand is made from is early, wherever
    it stands.
    """
    middle = parts.middle
    wanted = set(parts.by_tail)
    at = next((i for i, n in enumerate(middle) if reads(n) & wanted), len(middle))
    for node in middle:
        if reads(node) & wanted:
            wanted |= made_by(node)

    def readers(node: Node) -> list[Node]:
        return [n for n in middle if reads(n) & made_by(node)]

    def is_late(node: Node) -> bool:
        if is_op(node, "pack_operand"):
            return not readers(node) and not reads(node) & wanted
        return is_op(node, "any_differs") and readers(node) == list(middle[at:at + 1])

    packs = [n for n in middle if is_op(n, "pack_operand") and is_late(n)]
    sources = [n for n in _needed(packs, middle[at:]) if n not in packs]
    early = (*(n for n in middle[:at] if not is_late(n)), *(n for n in middle[at:] if n in sources))
    tests = [n for n in middle[:at] if is_late(n) and n not in packs]
    return early, (*packs, *tests), tuple(
        n for n in middle[at:] if n not in packs and n not in sources)


def _rotated(parts: LoopSections, maker: Maker) -> list[Node]:
    loop, crossing = parts.loop, parts.crossing
    early, late, meeting = _halves(parts)
    inits = {d.value: i for d, i in zip(loop.carried, loop.inits, strict=True)}
    first, t0 = maker.copy((*parts.head, *early, *late, *meeting),
                           {**inits, loop.var.value: loop.lo})
    second = maker.op("add", (loop.lo, loop.step), loop.var.value.name, where=loop.where)
    sums = [d for d in loop.carried if d.value in parts.direct]
    carry = {v: maker.define(v.name, maker.type(v)) for v in (*crossing, *(d.value for d in sums))}
    table = {v: d.value for v, d in carry.items()}
    previous, t1 = maker.copy(parts.tail, table)
    waits, settled = _waits(parts, t1, maker)
    kept = [(d, i, y) for d, i, y in zip(loop.carried, loop.inits, loop.yields, strict=True)
            if d.value not in parts.by_tail]
    body = (*parts.head, *previous, *early, *waits, *substituted((*late, *meeting), settled))
    turned = For(
        loop.var, out(second), loop.hi, loop.step,
        (*(d for d, _, _ in kept), *carry.values()),
        (*(_substituted_operand(t0, y) for _, _, y in kept), *(t0[v] for v in crossing),
         *(inits[d.value] for d in sums)), body,
        (*(y for _, _, y in kept), *crossing, *(settled[d.value] for d in sums)),
        loop.over, loop.where)
    last, t2 = maker.copy(parts.tail, table)
    ended = {t2[y]: d for d, y in parts.by_tail.items()}
    last = redefined(substituted(last, ended), ended)  # type: ignore[arg-type]
    return [*first, second, turned, *last]


def _substituted_operand(table: dict[SSAValue, Operand], x: Operand) -> Operand:
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


__all__ = ["MARK", "ends", "held_over", "overlap"]
