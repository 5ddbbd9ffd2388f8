"""Loops that read the same large values are one loop, which reads them once.

    a c - b s,  b c + a s      # both halves of rotary positions

Fusion joins a node to the groups of its producers; two loops of given values have none in common.
Only neighbours are joined, between which nothing but elements move: what is made earlier than it
was takes memory until it is read, and what is computed again for the memory's sake stays late.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Value
from .groups import MAX_OPS, FusionGroup
from .loop_axes import extents_of

NEAR = ("loop", "move", "view")


def join_readers(groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """The groups, in an order in which each runs after those it reads. A loop joins an earlier one
    of the same space that reads the same values of it, if all else that it reads is there by then.
    """
    made_at: dict[Value, int] = {}
    first: dict[object, list[int]] = {}  # by what they read: the loops that others may join
    out: list[FusionGroup] = []
    for group in groups:
        if group.kind not in NEAR:
            first.clear()
        key, at = _reads(group), len(out)
        for i in first.get(key, ()) if key is not None else ():
            one = out[i]
            if len(one.nodes) + len(group.nodes) <= MAX_OPS and all(
                    made_at.get(v, -1) < i for v in group.inputs):
                out[i], at = _joined(one, group), i
                break
        else:
            if key is not None:
                first.setdefault(key, []).append(at)
            out.append(group)
        made_at |= dict.fromkeys(group.outputs, at)
    return out


def _reads(group: FusionGroup) -> object:
    """The space of a loop and the values that it reads of all of it; None of other groups."""
    whole = frozenset(v for v in group.inputs if extents_of(v) == group.space)
    return (group.space, whole) if group.kind == "loop" and whole else None


def _joined(a: FusionGroup, b: FusionGroup) -> FusionGroup:
    return FusionGroup("loop", a.space, [*a.nodes, *b.nodes],
                       list(dict.fromkeys((*a.inputs, *b.inputs))), [*a.outputs, *b.outputs])


__all__ = ["join_readers"]
