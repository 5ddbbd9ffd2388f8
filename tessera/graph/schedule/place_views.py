"""Which values are views of others' memory: what reads a part, or transposed, reads it where it
lies; what makes a part of a larger value writes it there.

    views = place_views(graph, groups, target)
    views.layouts[v], views.owners[v]      # how v lies in the memory of another value
    views.copies[v]                        # why v is a copy of what it could be a view of

From first to last group: a view stays one where every group that reads it can (`target.reads`).
Then, from last to first, each copy that is left is asked whether its source can be made in the
copy's memory at once (`target.writes`); parts of a concatenation are such sources. At last what can
be written over a part of what it is made of is (part_overwrites.py). So nothing is recognised: a
value lies where the records of the ops say it may, and where both sides can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..ir import Graph, Value
from .groups import FusionGroup
from .layouts import StridedLayout, argument_layout
from .loop_axes import extents_of
from .part_overwrites import find_part_overwrites
from .region_copies import moves_of
from .target import ScheduleTarget
from .view_plan import ViewPlan, dense, is_copy, nbytes, parts_of, view_layout

PARTS_ALONE = "its strides do not allow a view"


class _Placer:
    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], target: ScheduleTarget):
        self.groups, self.target, self.results = groups, target, set(graph.outputs)
        self.readers: dict[Value, list[FusionGroup]] = {}
        self.maker = {v: g for g in groups for v in g.outputs}
        for group in groups:
            for v in group.inputs:
                self.readers.setdefault(v, []).append(group)
        lies = {id(g): target.memory(g) for g in groups}
        self.views = {g for g, m in lies.items() if m.kind == "view"}
        self.flat = {g for g, m in lies.items() if m.kind == "view" and m.flat}
        self.plan = ViewPlan()

    def run(self) -> ViewPlan:
        self.forward({})
        self.settle(self.backward())
        before, pieces = self.plan, self.made_before
        over = find_part_overwrites(before, self.groups, self.target, self.results)
        if over:
            self.settle(pieces | over)
            if any(v not in self.plan.pieces for v in over) or (
                    self.plan.copies.keys() - before.copies.keys()):
                self.forward(pieces)
        return self.plan

    def settle(self, pieces: dict[Value, tuple[Value, StridedLayout]]) -> None:
        """Views with those of the pieces that all that reads them can take."""
        while pieces:
            self.forward(pieces)
            # what reads a piece may lie elsewhere itself by now, and not take it so any more
            wrong = {owner for v, (owner, layout) in pieces.items()
                     if self.refused(v, layout, owner)}
            if not wrong:
                return
            pieces = {v: at for v, at in pieces.items() if at[0] not in wrong}
        self.forward({})

    # --- what is read where it lies ---------------------------------------------------------------
    def forward(self, pieces: dict[Value, tuple[Value, StridedLayout]]) -> None:
        self.plan = plan = ViewPlan(pieces=set(pieces))
        self.made_before = pieces
        self.owned = {owner for owner, _ in pieces.values()}
        for group in self.groups:
            for v in group.outputs:
                if v in pieces:
                    plan.owners[v], plan.layouts[v] = pieces[v]
                elif id(group) in self.views and v not in self.owned:
                    self.view(group, v)

    def view(self, group: FusionGroup, v: Value) -> None:
        x = group.inputs[0]
        owner, source = self.plan.owner(x), self.plan.layout(x)
        flat = id(group) in self.flat
        layout = view_layout(group, flat, source)
        if layout is None and flat and source.is_dense:
            layout = dense(v)  # of another type
        why = PARTS_ALONE if layout is None else self.refused(v, layout, owner)
        if layout is None or why:
            self.plan.copies[v] = why
        else:
            self.plan.owners[v], self.plan.layouts[v] = owner, layout

    def refused(self, v: Value, layout: StridedLayout, owner: Value,
                but: FusionGroup | None = None) -> str:
        """Why a value cannot lie so; "" where all that read it can. but: a reader that is not
        asked."""
        if nbytes(v) != nbytes(owner) and self.becomes_result(v):
            return "a result has memory of its own, of its size"
        if layout.is_dense:
            return ""
        if v in self.results:
            return "a result is in row-major order"
        begin, rest = layout.from_pointer
        lies = argument_layout(rest, extents_of(v))
        if lies is None or begin + prod(lies.extents) > dense(owner).end:
            return "its strides are no multiples of each other"
        for reader in self.readers.get(v, ()):
            if reader is but or self.belongs(v, layout, owner, reader):
                continue
            if why := self.reader_refuses(reader, v, layout, owner):
                return why
        return ""

    def becomes_result(self, v: Value) -> bool:
        """Whether its elements, as they lie or reshaped, are a result of the graph."""
        return v in self.results or any(
            self.becomes_result(g.outputs[0]) for g in self.readers.get(v, ())
            if id(g) in self.flat)

    def belongs(self, v: Value, layout: StridedLayout, owner: Value, reader: FusionGroup) -> bool:
        """Whether a copy finds a part of its result where it belongs."""
        if not is_copy(reader):
            return False
        y = reader.outputs[0]
        home, lies = self.made_before.get(y, (y, dense(y)))
        return home is owner and (v, layout) in parts_of(reader, lies)

    def reader_refuses(self, reader: FusionGroup, v: Value, layout: StridedLayout,
                       owner: Value) -> str:
        if id(reader) not in self.flat:
            return self.target.reads(reader, v, layout)
        seen = view_layout(reader, True, layout)
        return PARTS_ALONE if seen is None else self.refused(reader.outputs[0], seen, owner)

    # --- what is written where it belongs ---------------------------------------------------------
    def backward(self) -> dict[Value, tuple[Value, StridedLayout]]:
        """Values that are made in the memory of a copy: (the copy, where)."""
        found: dict[Value, tuple[Value, StridedLayout]] = {}
        for group in reversed(self.groups):
            if not is_copy(group) or group.outputs[0] in {*self.plan.owners, *found}:
                continue
            (y,) = group.outputs
            for x, layout in parts_of(group, dense(y)):
                if layout is None or group.nodes[0].inputs.count(x) > 1:
                    continue
                made = self.made_there(x, layout, y, group, found)
                found |= {} if made is None else {v: (y, lies) for v, lies in made.items()}
        return found

    def made_there(self, x: Value, layout: StridedLayout, y: Value, reader: FusionGroup,
                   found: dict[Value, tuple[Value, StridedLayout]]
                   ) -> dict[Value, StridedLayout] | None:
        """What is made in y's memory so that x lies there, and how; None where another reader or
        the kernel cannot. Of what is joined parts that cannot are copied there."""
        group = self.maker.get(x)
        if group is None or x in found or x in self.results or (
                self.refused(x, layout, y, but=reader)):
            return None
        if id(group) not in self.views and is_copy(group):
            return self.joined_there(group, x, layout, y, found)
        if id(group) not in self.views:
            return None if self.target.writes(group, x, layout) else {x: layout}
        source = group.inputs[0]
        before = _source_layout(group, id(group) in self.flat, source, layout)
        return None if before is None else self.made_there(source, before, y, group, found)

    def joined_there(self, group: FusionGroup, x: Value, layout: StridedLayout, y: Value,
                     found: dict[Value, tuple[Value, StridedLayout]]
                     ) -> dict[Value, StridedLayout] | None:
        made = {x: layout}
        copies = False
        for part, at in parts_of(group, layout):
            once = at is not None and group.nodes[0].inputs.count(part) == 1
            below = self.made_there(part, at, y, group, found) if once and at is not None else None
            if below is None or below.keys() & made.keys():
                copies = True
            else:
                made |= below
        return None if copies and self.target.writes(group, x, layout) else made


def _source_layout(group: FusionGroup, flat: bool, source: Value,
                   layout: StridedLayout) -> StridedLayout | None:
    """How a view's operand lies where all of it is the view."""
    if flat:
        (node,) = group.nodes
        same = source.aval.dtype.numpy.itemsize == node.outputs[0].aval.dtype.numpy.itemsize
        return layout.reshaped(extents_of(source)) if same else None
    (_, _, move), *more = moves_of(group.nodes[0])
    return None if more else move.part_of_result(extents_of(source), layout)


def place_views(graph: Graph, groups: Sequence[FusionGroup], target: ScheduleTarget) -> ViewPlan:
    """Views that stay views, and values that are made where they belong."""
    return _Placer(graph, groups, target).run()


def joined_owners(graph: Graph, groups: Sequence[FusionGroup],
                  target: ScheduleTarget) -> dict[Value, Value]:
    """Of what can lie in the memory of what it is a part of, the whole; not all of it will."""
    if not any(is_copy(g) and len(g.inputs) > 1 for g in groups):
        return {}
    placer = _Placer(graph, groups, target)
    placer.forward({})
    made = placer.backward()
    return placer.plan.owners | {v: owner for v, (owner, _) in made.items()}


__all__ = ["joined_owners", "place_views"]
