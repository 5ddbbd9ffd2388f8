"""How values lie in the memory of others, and what copies move: for placing views, and for proving
their places."""

from __future__ import annotations

from dataclasses import field

from ...lazy_dataclass import dataclass
from ...numerics import stored_bytes
from ..ir import Value
from .groups import FusionGroup
from .layouts import StridedLayout
from .loop_axes import extents_of
from .region_copies import MOVES, moves_of


def dense(v: Value) -> StridedLayout:
    return StridedLayout.dense(extents_of(v))


@dataclass
class ViewPlan:
    """layouts, owners: of values that lie in another's memory.  pieces: those among them that are
    made there, before the value that owns it or over a part of it.  copies: reasons, of the results
    of ops that could be views.
    """

    layouts: dict[Value, StridedLayout] = field(default_factory=dict)
    owners: dict[Value, Value] = field(default_factory=dict)
    pieces: set[Value] = field(default_factory=set)
    copies: dict[Value, str] = field(default_factory=dict)

    def layout(self, v: Value) -> StridedLayout:
        return self.layouts.get(v) or dense(v)

    def owner(self, v: Value) -> Value:
        return self.owners.get(v, v)

    def is_there(self, part: Value, at: StridedLayout | None, whole: Value) -> bool:
        """Whether a part of a copy's result lies where it belongs."""
        return self.owner(part) is self.owner(whole) and at == self.layout(part)


def nbytes(v: Value) -> int:
    return stored_bytes(extents_of(v), v.aval.dtype)


def view_layout(group: FusionGroup, flat: bool, source: StridedLayout) -> StridedLayout | None:
    """How the result of a view lies, by the record of its op; None where it has to be copied."""
    (node,) = group.nodes
    if flat:
        x, y = node.inputs[0].aval, node.outputs[0].aval
        same = x.dtype.numpy.itemsize == y.dtype.numpy.itemsize
        return source.reshaped(extents_of(node.outputs[0])) if same else None
    if node.op.name not in MOVES:
        return None
    (_, _, move), *more = moves_of(node)
    return None if more else move.part_of_source(source)


def is_copy(group: FusionGroup) -> bool:
    """Whether a group does nothing but move elements into one result."""
    if len(group.nodes) != 1 or len(group.outputs) != 1:  # what the host does gives nothing
        return False
    return group.nodes[0].op.name in MOVES and 0 not in extents_of(group.outputs[0])


def parts_of(group: FusionGroup,
             result: StridedLayout) -> list[tuple[Value, StridedLayout | None]]:
    """What a copy copies, and where that belongs in its result, which lies so."""
    (node,) = group.nodes
    return [(node.inputs[i], move.part_of_result(extents_of(node.inputs[i]), result))
            for i, _, move in moves_of(node)]


__all__ = ["ViewPlan", "dense", "is_copy", "nbytes", "parts_of", "view_layout"]
