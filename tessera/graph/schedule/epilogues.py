"""Loops that run where their operand is made, and small values that their readers make again.

A matmul or attention takes in the elementwise ops that follow it, when nothing else reads its
result: they run on the sums while these are in registers. Which loops a target's anchors can take
in, and which nodes it computes again, its record says (`ScheduleTarget.epilogue`, `.recomputed`).

While an epilogue reads and writes, its tensor cores wait, and few loads are under way: a byte is
taken to cost twice what it costs in a loop. Of a loop that moves b bytes an element, beside a
result of s, that makes 2 b; apart they take 2 s to write the result, s to read it, and b. So the
loop is taken in where b <= 3 s: a residual is, the moments of an optimizer, of 24 bytes where s
is 4, are not. Of a loop that stays apart, as one with sums does, part may be taken in.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...dims import size_of
from ..ir import Node, Value, value_bytes
from .groups import MAX_OPS, FusionGroup
from .loop_axes import extents_of
from .target import ScheduleTarget

FEW = 4  # ops that readers do again for the sake of bytes
LEAST_BITS = 16  # of what a matmul writes for the rest of a loop
LEAST_ROW = 64  # elements for which a loop computes a number again
SMALL_BYTES = 1 << 20  # not counted: biases, and all where a launch costs more than bytes
Count = dict[Value, int]  # how often each value is read


class _Joiner:
    def __init__(self, groups: list[FusionGroup], count: Count, target: ScheduleTarget):
        self.groups, self.count, self.target = groups, count, target
        self.maker = {v: g for g in groups for v in g.outputs}
        self.gone: set[int] = set()  # groups that are part of another by now

    def run(self) -> list[FusionGroup]:
        """Each anchor with the loop behind it as soon as what they read is there: what others make
        meanwhile finds the memory of its operands free."""
        out: list[list[FusionGroup]] = []  # the groups at each place
        place: dict[Value, int] = {}
        for group in (part for g in self.groups for part in self.cut(g)):
            front = self.source(group) if group.kind == "loop" else None
            at = len(out)
            if front is not None:
                self.gone.update(map(id, front))
                nodes = [n for g in front for n in g.nodes] + group.nodes
                group = FusionGroup(front[0].kind, group.space, nodes, anchor=front[0].anchor)
                group.connect(self.count)
                at = max(place.get(v, -1) for v in (*group.inputs, *front[0].outputs))
            if at == len(out):
                out.append([])
            out[at].append(group)
            place |= dict.fromkeys(group.outputs, at)
        return [g for at in out for g in at if id(g) not in self.gone]

    def cut(self, group: FusionGroup) -> list[FusionGroup]:
        """What is behind an anchor in two: what can run on its result without keeping a matmul
        waiting, and the rest. A loop stays whole where more than 16 bits would lie between."""
        if group.kind not in ("loop", "rows", "strips"):
            return [group]
        light = group.kind == "loop" and all(map(self.target.light, group.nodes))
        for v in filter(self.anchored, group.inputs):
            if (light or _brief(group, v)) and _pays(group, v):
                continue
            for front, bits in _fronts(group, v, self.target):
                if group.kind == "loop" and bits > 16:
                    continue
                head = FusionGroup("loop", group.space, front)
                head.connect(self.count)
                if self.source(head) is not None:
                    rest = [n for n in group.nodes if n not in front]
                    tail = FusionGroup(group.kind, group.space, rest)
                    tail.connect(self.count)
                    return [head, *self.cut(tail)]
        return [group]

    def anchored(self, v: Value) -> bool:
        """Whether a value is an anchor's result or a view of one."""
        at = self.maker.get(v)
        if at is not None and at.kind == "view":
            at = self.maker.get(at.nodes[0].inputs[0])
        return at is not None and at.anchor is not None

    def source(self, loop: FusionGroup) -> list[FusionGroup] | None:
        """The anchor whose result a loop can take from registers, and the view between them."""
        for v in loop.inputs:
            chain, at = [], self.maker.get(v)
            if at is not None and at.kind == "view" and self.count[v] == loop.reads(v):
                chain, v = [at], at.nodes[0].inputs[0]
                at = self.maker.get(v)
            reader = chain[0] if chain else loop
            if at is None or at.anchor is None or len(at.nodes) > 1 or id(at) in self.gone:
                continue
            if self.count[v] == reader.reads(v) and self.fits(loop, at.anchor) and _pays(
                    loop, chain[0].outputs[0] if chain else v):
                return [at, *chain]
        return None

    def fits(self, loop: FusionGroup, anchor: Node) -> bool:
        """Whether the loop's operands lie along the axes of the anchor's result."""
        frame = self.target.epilogue(anchor, loop.space)
        return frame is not None and not any(n.op.beside for n in loop.nodes) and all(
            frame.pattern(extents_of(v)) is not None for v in (*loop.inputs, *loop.outputs))


def join_epilogues(groups: list[FusionGroup], count: Count, target: ScheduleTarget
                   ) -> list[FusionGroup]:
    """Each anchor joined with the loop behind it."""
    if not any(g.anchor is not None for g in groups):
        return groups
    return _Joiner(groups, count, target).run()


def _pays(loop: FusionGroup, v: Value) -> bool:
    """Whether a loop takes less time behind an anchor whose result is v than apart from it."""
    moved = sum(value_bytes(x) for x in (*loop.inputs, *loop.outputs) if x is not v)
    return moved <= 3 * value_bytes(v) + SMALL_BYTES


def _brief(group: FusionGroup, v: Value) -> bool:
    """Whether functions of a loop take less time on an anchor's sums than a launch for them."""
    return group.kind == "loop" and value_bytes(v) <= SMALL_BYTES


def _fronts(group: FusionGroup, v: Value, target: ScheduleTarget) -> list[tuple[list[Node], int]]:
    """Parts of a group that can run on v, of light elementwise nodes that leave one value to the
    others, and its bits: those first with which the least is moved, as bytes count in each, and of
    these the longest. Numbers of rows and columns move nothing. Values of fewer than 16 bits would
    leave a few at a time."""
    behind: dict[Value, list[Node]] = {}  # what makes a value, of light nodes
    on_v, outside = {v}, set(group.inputs)
    for n in group.nodes:
        inner = [x for x in n.inputs if x not in outside]
        whole = not n.op.reduction and extents_of(n.outputs[0]) == group.space
        if whole and target.light(n) and behind.keys() >= set(inner):
            nodes = {m for x in inner for m in behind[x]} | {n}
            behind |= dict.fromkeys(n.outputs, [m for m in group.nodes if m in nodes])
            if on_v.intersection(n.inputs):
                on_v.update(n.outputs)

    def moved(values: Iterable[Value]) -> int:
        return sum(value_bytes(x) for x in values if extents_of(x) == group.space)

    found: list[tuple[tuple[int, int], list[Node], int]] = []
    for x, front in behind.items():
        rest = [n for n in group.nodes if n not in front]
        read = {y for n in rest for y in n.inputs}
        left = {y for n in front for y in n.outputs if y in group.outputs or y in read}
        bits = x.aval.dtype.bits
        if x in on_v and left == {x} and v not in read and bits >= LEAST_BITS:
            beside = {y for n in front for y in n.inputs if y in outside and y is not v}
            made = [y for y in group.outputs if y is not x]
            bytes_moved = 2 * moved((*beside, x)) + moved(
                (*(y for y in read if y is x or y in outside), *made))
            found.append(((bytes_moved, -len(front)), front, bits))
    return [(front, bits) for _, front, bits in sorted(found, key=lambda f: f[0])]


# --- small values that are made again -----------------------------------------------------------
def recompute_small(groups: list[FusionGroup], count: Count, target: ScheduleTarget
                    ) -> list[FusionGroup]:
    """What is repeated along an axis where it is read, such as the cast of a bias, is computed
    there, when the target's record says so of every node that makes it; and what loops alone read
    that repeat it along their rows, as a threshold of each row: a launch would take longer. So is
    what has more bytes than it is made of, as a slope of each head times distances."""
    light = {v: g for g in groups if g.kind == "loop" and all(map(target.recomputed, g.nodes))
             for v in g.outputs if len(g.outputs) == 1}
    small = light | _outer(groups, count, target) | _numbers_of_rows(groups, count, target)
    if not small:
        return groups
    left = {v: count[v] for v in small}
    order = {v: at for at, g in enumerate(groups) for v in g.outputs if v in small}
    for group in groups:
        taken = [v for v in group.inputs if v in small and _repeats(group, v, small[v], target)]
        for v in taken:
            left[v] -= group.reads(v)
        # One may be made of another, and has its nodes already if it repeats it.
        nodes = dict.fromkeys(n for v in sorted(taken, key=order.__getitem__)
                              for n in small[v].nodes)
        at = 1 if group.anchor is not None else 0
        group.nodes[at:at] = nodes
    gone = {id(small[v]) for v, n in left.items() if n == 0}
    for group in (g for g in groups if not g.writes_all):
        group.connect(count)
        group.outputs = [v for v in group.outputs if v not in small or group is small[v]]
    return [g for g in groups if id(g) not in gone]


def _outer(groups: list[FusionGroup], count: Count, target: ScheduleTarget
           ) -> dict[Value, FusionGroup]:
    """What single loops make of values that together are half of it at most, and others repeat."""
    found = {g.outputs[0]: g for g in groups if g.kind == "loop" and len(g.outputs) == 1
             and len(g.nodes) <= FEW and target.takes(g)
             and all(target.recomputed(n) or target.repeatable(n) and target.light(n)
                     for n in g.nodes)
             and 2 * sum(map(value_bytes, g.inputs)) <= value_bytes(g.outputs[0])}
    reads = dict.fromkeys(found, 0)
    for group in groups:
        for v in found.keys() & group.inputs:
            if group.kind in ("loop", "rows") and len(group.nodes) + FEW <= MAX_OPS and _repeats(
                    group, v, found[v], target):
                reads[v] += group.reads(v)
    return {v: g for v, g in found.items() if reads[v] == count[v]}


def _numbers_of_rows(groups: list[FusionGroup], count: Count, target: ScheduleTarget
                     ) -> dict[Value, FusionGroup]:
    """What single loops compute with elementwise ops for others that repeat it along their rows."""
    found = {g.outputs[0]: g for g in groups if g.kind == "loop" and len(g.outputs) == 1
             and target.takes(g) and all(target.recomputed(n) or target.repeatable(n)
                                         for n in g.nodes)}
    reads = dict.fromkeys(found, 0)
    for group in groups:
        for v in found.keys() & group.inputs:
            if group.kind == "loop" and _lies_along_rows(v, group.space) and (
                    len(group.nodes) + len(found[v].nodes) <= MAX_OPS):
                reads[v] += group.reads(v)
    return {v: g for v, g in found.items() if reads[v] == count[v]}


def _lies_along_rows(v: Value, space: tuple[int, ...]) -> bool:
    """Whether a loop has one number of it for each row, of LEAST_ROW elements or more."""
    shape, row = extents_of(v), 1
    if len(shape) != len(space):
        return False
    for n, extent in zip(reversed(shape), reversed(space), strict=True):
        if n != 1:
            break
        row *= extent
    return row >= LEAST_ROW


def _repeats(group: FusionGroup, v: Value, source: FusionGroup, target: ScheduleTarget) -> bool:
    if group is source or size_of(v.aval.shape) * 2 > size_of(group.space):
        return False
    if group.kind in ("loop", "rows", "strips"):
        return not (len(group.nodes) == 1 and group.nodes[0].op.reduction)
    if group.anchor is None or v in group.anchor.inputs:
        return False
    frame = target.epilogue(group.anchor, group.space)
    return frame is not None and all(
        frame.pattern(extents_of(x)) is not None for x in source.inputs)


__all__ = ["join_epilogues", "recompute_small"]
