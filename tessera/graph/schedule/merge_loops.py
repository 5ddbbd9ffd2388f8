"""Loops that read the same large values are one loop, which reads them once.

    a c - b s,  b c + a s      # both halves of rotary positions

Fusion joins a node to the groups of its producers; two loops of given values have none in common.
Only neighbours are joined, between which nothing but elements move: what is made earlier than it
was takes memory until it is read, and what is computed again for the memory's sake stays late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Value
from .groups import MAX_OPS, FusionGroup
from .loop_axes import extents_of

NEAR = ("loop", "move", "view")
MOST_SUMS = 4  # over leading axes in one group


def merge_loops(groups: Sequence[FusionGroup]) -> list[FusionGroup]:
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
                out[i], at = _merge_groups(one, group), i
                break
        else:
            if key is not None:
                first.setdefault(key, []).append(at)
            out.append(group)
        made_at |= dict.fromkeys(group.outputs, at)
    return out


def merge_column_sums(groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """The groups, with sums over leading axes of values that one group makes as one: they are there
    at one time, as those of a norm's weights are. As a batch each block would find its sum in a
    table first: layer norm's gradient of 1024, 16384, 65536 and 131072 columns takes 110.5 us in
    place of 111.0, 109.2 and 110.2, 109.1 and 110.4, 111.6 and 112.4; where a block has all sums
    111.4, 111.7, 110.2 and 112.9 (2^26 elements of bf16, H200, 2026-11-27)."""
    made_at = {v: i for i, group in enumerate(groups) for v in group.outputs}
    first: dict[object, int] = {}
    out: list[FusionGroup] = []
    for group in groups:
        key = _column_sum(group, made_at)
        at = first.get(key) if key is not None else None
        if at is not None and len(out[at].nodes) < MOST_SUMS and (
                group.inputs[0] not in out[at].inputs):
            out[at] = _merge_groups(out[at], group)
            continue
        if key is not None:
            first[key] = len(out)
        out.append(group)
    return out


def _column_sum(group: FusionGroup, made_at: Mapping[Value, int]) -> object:
    """What is the same of sums that may be one; None of other groups."""
    if group.kind != "columns" or len(group.nodes) > 1 or group.nodes[0].inputs[0] not in made_at:
        return None
    (node,) = group.nodes
    return (made_at[node.inputs[0]], group.space, node.op.name, repr(sorted(node.attrs.items())),
            str(node.inputs[0].aval.type), str(node.outputs[0].aval.type))


def _reads(group: FusionGroup) -> object:
    """The space of a loop and the values that it reads of all of it; None of other groups."""
    whole = frozenset(v for v in group.inputs if extents_of(v) == group.space)
    return (group.space, whole) if group.kind == "loop" and whole else None


def _merge_groups(a: FusionGroup, b: FusionGroup) -> FusionGroup:
    return FusionGroup(a.kind, a.space, [*a.nodes, *b.nodes],
                       list(dict.fromkeys((*a.inputs, *b.inputs))), [*a.outputs, *b.outputs])


__all__ = ["merge_column_sums", "merge_loops"]
