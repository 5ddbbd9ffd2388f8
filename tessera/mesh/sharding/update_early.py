"""Parameters that are gathered behind their update come while gradients are still made.

    g = reduce_scatter(dw)  ...  w = all_gather(part - update(g))          ts.dist.zero

An optimizer stands behind the backward pass. When a bucket of gradients is sent, the one before it
has come: so the update of that one's parts comes there, then the gathers of what is updated, as one
message. They run beside the backward pass, and what is left at its end is the last bucket's. What
needs all gradients first, as parameters do whose gradients are clipped by a norm, stays.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tessera.graph.ir import node_effects
from tessera.graph.simplify import KEEP_EFFECTS

from .collective_order import REDUCTIONS
from .partitioned_steps import (
    CONSTRAINTS,
    Held,
    LayoutHop,
    PartitionedOp,
    Step,
    Together,
    makes,
    reads,
)


def update_early(steps: Sequence[Step]) -> list[Step]:
    """The steps with gathers that nothing computes with, and what they are made of, behind the
    bucket that follows the last one that they need."""
    gathers = _last_gathers(steps)
    needed = _ancestors(gathers, {held: step for step in steps for held in makes(step)})
    buckets = [i for i, s in enumerate(steps) if s in needed and _kind(s) in REDUCTIONS]
    if not buckets:
        return list(steps)
    last = len(buckets) - 1
    moved = [s for s in steps[buckets[last] + 1:] if s in needed]
    came = _came(steps, buckets)
    _wait_for_readers(moved, came)
    if any(_acts(s) for s in moved) or all(came[s] > last for s in moved if s in gathers):
        return list(steps)
    behind = defaultdict[int, list[Step]](list)
    for step in sorted(moved, key=lambda s: (came[s], s in gathers)):
        behind[buckets[min(came[step], last)]].append(step)
    gone = set(moved)
    return [s for i, step in enumerate(steps)
            for s in (*(() if step in gone else (step,)), *behind[i])]


def _last_gathers(steps: Sequence[Step]) -> set[Step]:
    """Those whose results are returned; what says how one is to lie is no reader."""
    read, found = set[Held](), set[Step]()
    for step in reversed(steps):
        says = isinstance(step, PartitionedOp) and step.node.op.name in CONSTRAINTS
        if says and read.isdisjoint(makes(step)):
            continue
        if isinstance(step, LayoutHop) and step.hop.kind == "all_gather" and not step.anew and (
                read.isdisjoint(makes(step))):
            found.add(step)
        read.update(reads(step))
    return found


def _ancestors(steps: Iterable[Step], maker: Mapping[Held, Step]) -> set[Step]:
    found, todo = set(steps), list(steps)
    while todo:
        for held in reads(todo.pop()):
            step = maker.get(held)
            if step is not None and step not in found:
                found.add(step)
                todo.append(step)
    return found


def _came(steps: Sequence[Step], buckets: Sequence[int]) -> dict[Step, int]:
    """By step, the number of the bucket behind which all that it reads is there. What a bucket
    brings is there behind the next, so that nobody waits; len(buckets): it needs the last."""
    found: dict[Step, int] = {}
    at: dict[Held, int] = {}
    for i, step in enumerate(steps):
        found[step] = max((at[held] for held in reads(step) if held in at), default=0)
        there = bisect(buckets, i) if i <= buckets[-1] else found[step]
        at.update(dict.fromkeys(makes(step), there))
    return found


def _wait_for_readers(steps: Sequence[Step], came: dict[Step, int]) -> None:
    """What others read alone comes with the first of them: loops are fused, and one begins where
    its first op stands."""
    first: dict[Held, int] = {}
    for step in reversed(steps):
        came[step] = max(came[step], min((first[h] for h in makes(step) if h in first), default=0))
        for held in reads(step):
            first[held] = min(first.get(held, came[step]), came[step])


def _kind(step: Step) -> str:
    move = step.moves[0] if isinstance(step, Together) else step
    return move.hop.kind if isinstance(move, LayoutHop) else ""


def _acts(step: Step) -> bool:
    return isinstance(step, PartitionedOp) and (
        bool(node_effects(step.node) & KEEP_EFFECTS) or bool(step.bodies))


__all__ = ["update_early"]
