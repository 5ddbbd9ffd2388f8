"""Which groups a GPU can run in one launch: those whose kernels differ in arrays and extents alone.

A loop over elements whose operands lie along all of its space, or are one number, has a kernel for
any number of elements (`is_flat`), so arrays of all shapes share it. Others have the extents in
their text, and share a launch where these are the same. Of copies the small ones do: a launch is
much of their time, and no copy lies in memory for long before it is read. What a collective sends
shares a launch with what the same one sends: it is not to wait for what comes later. What reads
what one brings shares it with what waits for the same one.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...ir import Node, Value, value_bytes
from ...schedule.groups import FusionGroup
from ...schedule.loop_axes import extents_of
from ...schedule.region_copies import moves_of

KINDS = ("loop", "rows", "columns", "strips", "move", "order", "merge_cuts", "merge_keys",
         "digit_counts", "digit_places", "search", "scan", "parts", "runs", "gather", "computed",
         "small_product")
CHECKED = ("gather", "computed")  # whose kernels check the integers that they pick by
SMALL_COPY = 1 << 23  # bytes, which a GPU moves in the time of a few launches
MOST_ELEMENTS = 1 << 30  # of an array that a flat loop is over: its numbers have 32 bits


def is_flat(group: FusionGroup, numbers: Mapping[Value, Any]) -> bool:
    """Whether a group is a loop over elements that does not depend on their shape."""
    if group.kind != "loop" or not 1 < prod(group.space) <= MOST_ELEMENTS:
        return False
    values = (*(v for v in group.inputs if v not in numbers), *group.outputs)
    shapes = {extents_of(v) for v in values if prod(extents_of(v)) != 1}
    return shapes == {group.space}


def sent_by(groups: Sequence[FusionGroup]) -> dict[Value, int]:
    """The collective, by the number of its group, that sends each value, or something that is made
    of it."""
    found: dict[Value, int] = {}
    for i, group in reversed(list(enumerate(groups))):
        if group.kind == "exchange":
            found.update(dict.fromkeys(group.inputs, i))
        elif group.kind in ("view", *KINDS) and (of := [
                found[v] for v in group.outputs if v in found]):
            found.update(dict.fromkeys(group.inputs, min(of)))
    return found


def parts_that_come(groups: Sequence[FusionGroup]) -> set[Value]:
    """What is made of what a collective brings and is joined with others: while they are on their
    way."""
    come, joined = set[Value](), set[Value]()
    for group in groups:
        if group.kind == "exchange" or group.kind == "view" and come.intersection(group.inputs):
            come.update(group.outputs)
    for group in reversed(groups):
        if group.nodes[0].op.name == "concatenate" or (
                group.kind == "view" and joined.intersection(group.outputs)):
            joined.update(group.inputs)
    return {v for g in groups if come.intersection(g.inputs) for v in g.outputs if v in joined}


def batch_key(group: FusionGroup, numbers: Mapping[Value, Any], attributes: Any,
              sent: Mapping[Value, int], come: Mapping[Value, int],
              apart: Container[Value] = ()) -> Hashable | None:
    """Equal for groups that do the same; None for one that has a launch of its own: it draws, knows
    where its elements stand, or makes one of the values `apart`. What checks an index shares one
    with others of its line. attributes: of a node's step. sent: see sent_by. come: see
    arrival_order.come_by.
    """
    if group.kind not in KINDS or any(v in apart for v in group.outputs) or any(
            n.op.placed or n.op.makes or n.op.effects for n in group.nodes):
        return None
    checks = group.kind in CHECKED or any(n.op.name == "check_index" for n in group.nodes)
    lines = tuple(n.where and (n.where.file, n.where.line) for n in group.nodes) if checks else ()
    moves = ""
    if group.kind == "move":
        (node,) = group.nodes
        if sum(map(value_bytes, node.outputs)) > SMALL_COPY:
            return None
        moves = repr(moves_of(node))
    flat = is_flat(group, numbers)
    names: dict[Value, int] = {}

    def value(v: Value) -> Hashable:
        if v in numbers:
            return repr(numbers[v])
        shape = extents_of(v)
        lies = prod(shape) != 1 if flat else shape
        return names.setdefault(v, len(names)), str(v.aval.type), lies

    def step(n: Node) -> Hashable:
        of: Hashable = repr(sorted(attributes(n).items()))
        if group.kind == "computed":
            of = tuple(replace(s, ids=(), where=None) for s in n.attrs["steps"])
        return n.op.name, of, tuple(map(value, n.inputs)), tuple(map(value, n.outputs))

    steps = tuple(map(step, group.nodes))
    senders = tuple((sent.get(v, -1), come.get(v, -1)) for v in group.outputs)
    return group.kind, () if flat else group.space, steps, moves, senders, lines, tuple(
        map(value, group.outputs))


__all__ = ["batch_key", "is_flat", "parts_that_come", "sent_by"]
