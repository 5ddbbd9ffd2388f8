"""What all ranks have is added behind a sum of ranks, not as the term of one of them.

    all_reduce(term(a) + x)   ->   a + all_reduce(x)

A table that is both ends of a model has two gradients, of which one is summed before it is rounded.
As a term of the other's sum it would be read on the first rank alone, whose program, and the places
of what it sends, would then be others than those of the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..partition import extents
from .collective_order import REDUCTIONS
from .layout_changes import hops
from .partitioned_steps import Held, LayoutHop, PartitionedOp, Step, makes, reads


def add_behind_sums(steps: Sequence[Step], outputs: Collection[Held]) -> list[Step]:
    """outputs: what the program returns, as it lies."""
    readers, maker = defaultdict[Held, list[Step]](list), dict[Held, Step]()
    for step in steps:
        maker.update((held, step) for held in makes(step))
        for held in reads(step):
            readers[held].append(step)
    instead: dict[Step, list[Step]] = {}
    for move in steps:
        if not isinstance(move, LayoutHop) or move.hop.kind not in REDUCTIONS:
            continue
        total = move.value, move.hop.source
        add = maker.get(total)
        if not isinstance(add, PartitionedOp) or add.node.op.name != "add" or (
                readers[total] != [move] or total in outputs):
            continue
        for term, x in (reads(add), reads(add)[::-1]):
            given, cuts = maker.get(term), _cuts(maker.get(term), move)
            if cuts is not None and readers[term] == [add] and x[1] == move.hop.source and (
                    x != term and extents(x[0].aval) == extents(move.value.aval)):
                assert given is not None
                there = move.hop.target
                instead[given], instead[add] = cuts, [replace(move, value=x[0])]
                instead[move] = [replace(add, ins=(there, there), outs=(there,))]
                break
    return [s for step in steps for s in instead.get(step, [step])]


def _cuts(given: Step | None, move: LayoutHop) -> list[Step] | None:
    """What brings a value that would be a term to where the sum is wanted, if nothing is sent."""
    if not isinstance(given, LayoutHop) or given.hop.kind != "term":
        return None
    aval = given.value.aval
    if extents(aval) != extents(move.value.aval):  # it has fewer axes
        return None
    found = hops(given.hop.source, move.hop.target, extents(aval), aval.dtype)
    return None if any(hop.kind != "slice" for hop in found) else [
        LayoutHop(given.value, hop, given.why, given.where) for hop in found]


__all__ = ["add_behind_sums"]
