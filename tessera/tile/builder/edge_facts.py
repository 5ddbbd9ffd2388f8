"""What a trace knows about edges: of values, and of the contents of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.builder.edge_rules import Carry, elementwise
from tessera.tile.builder.source_position import SourcePosition
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.ir import affine
from tessera.tile.ir.affine import Form
from tessera.tile.ir.edges import (
    NOTHING,
    Axis,
    Edge,
    Listed,
    Mixed,
    TileEdges,
    intersection,
    join,
    join_facts,
    open_,
)
from tessera.tile.ir.handles import Handle, is_number
from tessera.tile.ir.ir import Const, Op, Operand, SSAValue
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ir.types import Buffer, TileType, View


@dataclass(frozen=True)
class SharedPlace:
    """A box of a shared buffer. offsets, box: by axis of the buffer; kept: its axes in order."""

    buffer: SSAValue
    type: Buffer
    offsets: tuple[Any, ...]
    box: tuple[int, ...]
    kept: tuple[int, ...]


class EdgeFacts:
    """Facts about edges by value, and about the contents of shared buffers."""

    def __init__(self, values: ValueTable, position: SourcePosition) -> None:
        self.values, self.position = values, position
        self.of_value: dict[SSAValue, TileEdges] = {}
        self.contents: dict[SSAValue, TileEdges] = {}  # of shared buffers, in their own coordinates
        self.implied: dict[Operand, TileEdges] = {}  # conditions that hold only inside of them
        # Of values that control flow made: those that they may be.
        self.sources: dict[SSAValue, tuple[SSAValue, ...]] = {}
        self.stated: set[SSAValue] = set()  # results of which the frontend knows more than the rule
        self.edges_seen = 0

    # --- facts of values ----------------------------------------------------------------------
    def of(self, x: Any) -> TileEdges:
        """Of a tile, a view, a shared buffer or a number."""
        if isinstance(x, Handle):
            x = x.value
        if isinstance(x, SSAValue):
            found = self.of_value.get(x)
            return self.stored_at(x) if found is None else found
        value = x.value if isinstance(x, Const) else x
        return TileEdges((), is_number(value) and value == 0)

    def state(self, value: SSAValue, facts: TileEdges) -> None:
        self.of_value[value] = facts
        self.edges_seen += any(map(open_, facts.axes))

    def redefine(self, value: SSAValue) -> None:
        """A value is made anew: an earlier trace of a loop may have used its name."""
        self.values.loop_bounds.pop(value, None)
        self.values.coordinates.pop(value, None)
        self.implied.pop(value, None)
        self.of_value.pop(value, None)

    def renamed(self, old: SSAValue, new: SSAValue) -> None:
        if old in self.of_value:
            self.of_value[new] = self.of_value.pop(old)
        if old in self.implied:
            self.implied[new] = self.implied.pop(old)
        if old in self.stated:
            self.stated.add(new)

    def carry(self, record: TileOp, op: Op, types: Sequence[Any], facts: Sequence[TileEdges]
              ) -> None:
        """States the facts of an op's results, and of the memory that it writes."""
        known = any(f.axes or f.zeros for f in facts)
        for made in op.outs:
            self.stated.discard(made.value)
            self.redefine(made.value)
            self.sources.pop(made.value, None)
            placed = isinstance(made.type, View) and record.edges is not None and facts[0].axes
            if isinstance(made.type, TileType) or placed:
                c = Carry(self.values, self.implied, op, tuple(types), tuple(facts), made.type)
                self.state(made.value, self.carried(record, c) if known else NOTHING)
        if not op.args and op.outs and op.attr.get("value", 1) == 0:
            self.of_value[op.outs[0].value] = TileEdges((), True)
        if record.effect in ("write", "atomic", "async") and op.args and isinstance(
                op.args[0], SSAValue):
            self.written(record, op, facts)

    def carried(self, record: TileOp, c: Carry) -> TileEdges:
        opened = any(open_(a) for f in c.facts for a in f.axes)
        if record.edges is None:
            return TileEdges((c.cannot(),) * len(c.made.shape)) if opened else NOTHING
        axes = tuple(record.edges(c)) if any(f.axes for f in c.facts) else ()
        if record.edges is elementwise:
            values = [0.0 if f.zeros else x.value if isinstance(x, Const) else None
                      for x, f in zip(c.op.args, c.facts, strict=True)]
            zeros = any(f.zeros for f in c.facts) and c.zero(*values)
        else:
            zeros = record.moves and c.facts[0].zeros
        return TileEdges.of(axes, zeros)

    def fill(self, place: Handle, out: Handle) -> Handle:
        """A load of a tensor said what lies beyond: it counts. Where it lies stays known."""
        axes = [replace(a, inside=True, low=False) if isinstance(a, Edge) else
                Edge(None, inside=True) if a is not None else None
                for a in self.of(place).axes]
        self.declare(out.value, TileEdges.of(axes))
        return out

    def declare(self, value: SSAValue, facts: TileEdges) -> None:
        """What is known beyond the rule of the op that made a value."""
        self.state(value, facts)
        self.stated.add(value)

    # --- edges as numbers ---------------------------------------------------------------------
    def make_edge(self, first: Any, extent: Any, inside: bool) -> Edge:
        """Of a box of a tensor: what is read beyond is 0."""
        lo, size = (self.values.forms.form(x.value if isinstance(x, Handle) else x)
                    for x in (first, extent))
        least = self.values.least(lo)
        low = not inside and (least is None or least < 0)
        return Edge(self.values.edge_key(lo, size), low, inside, True, lo, size, first, extent,
                    self.position.where())

    def shifted(self, axis: Axis, by: Form, sign: int) -> Axis:
        """The edge of an axis that begins `by` elements later (or earlier)."""
        if not isinstance(axis, Edge) or axis.first is None or by == {None: 0}:
            return axis
        first = affine.add(axis.first, by, sign)
        assert axis.extent is not None
        least = self.values.least(first)
        low = not axis.inside and (least is None or least < 0)
        return replace(axis, key=self.values.edge_key(first, axis.extent), first=first, offset=None,
                       low=low)

    # --- shared memory ------------------------------------------------------------------------
    def shared_place(self, value: SSAValue) -> SharedPlace | None:
        """The box of a shared buffer that a value stands for; None for anything else."""
        op = self.values.defined_by.get(value)
        if op is None or op.name != "allocate" and not OPS[op.name].alias:
            return None
        if op.name == "allocate":
            kind = op.outs[0].type
            assert isinstance(kind, Buffer)
            rank = len(kind.shape)
            return SharedPlace(value, kind, (0,) * rank, kind.shape, tuple(range(rank)))
        source = op.args[0]
        assert isinstance(source, SSAValue)
        found = self.shared_place(source)
        if found is None or op.name == "stage":
            return found
        if op.name == "view":
            return replace(found, offsets=op.args[1:], box=op.attr["box"], kept=op.attr["kept"])
        return replace(found, kept=found.kept[::-1])

    def stored_at(self, value: SSAValue) -> TileEdges:
        """Of a place in shared memory: what was stored there."""
        place = self.shared_place(value)
        if place is None or place.buffer not in self.contents:
            return NOTHING
        inside = self.contents[place.buffer]
        return TileEdges.of((self.shifted(inside.at(a), self.values.forms.form(place.offsets[a]), 1)
                             for a in place.kept), inside.zeros)

    def written(self, record: TileOp, op: Op, facts: Sequence[TileEdges]) -> None:
        """What a place holds after an op wrote to it."""
        target = op.args[0]
        assert isinstance(target, SSAValue)
        place = self.shared_place(target)
        if place is None:
            return
        if record.name == "atomic_tile":
            self.replaced(place, self.added(op, self.stored_at(target), facts[1]))
        elif record.fills:
            self.replaced(place, TileEdges(tuple(
                Mixed("was reshaped and stored to shared memory", a.zero, where=a.where)
                if isinstance(a, Listed) else a for a in facts[1].axes), facts[1].zeros))
        else:
            self.touched(place, facts)

    def replaced(self, place: SharedPlace, new: TileEdges) -> None:
        """A tile took the place of what was there."""
        at: list[Axis] = [None] * len(place.box)
        for i, a in enumerate(place.kept):
            at[a] = self.shifted(new.at(i), self.values.forms.form(place.offsets[a]), -1)
        facts, old = TileEdges.of(at, new.zeros), self.contents.get(place.buffer)
        spans = [n == m for n, m in zip(place.box, place.type.shape, strict=True)]
        if old is None or all(spans) and place.type.stages == 1:
            self.contents[place.buffer] = facts
        else:
            self.contents[place.buffer] = self.beside(old, facts, spans)

    def beside(self, old: TileEdges, new: TileEdges, spans: list[bool]) -> TileEdges:
        """Of a buffer of which a part was written anew: along an axis that the part does not span,
        numbers alone do not take the edge of their neighbours."""
        def of(facts: TileEdges, i: int) -> Axis:
            found = facts.at(i)
            return Edge(None, inside=True) if found is None and not spans[i] else found

        def zero(i: int) -> bool:
            return all(not open_(x.at(i)) or x.zero_at(i) for x in (old, new))

        how = "in shared memory"
        return TileEdges.of((join(of(old, i), of(new, i), zero(i), how, self.position.where())
                             for i in range(len(spans))), old.zeros and new.zeros)

    def added(self, op: Op, old: TileEdges, tile: TileEdges) -> TileEdges:
        """Of a place that a tile was added to; what lay beyond the tile's edge added nothing."""
        rank = max(len(old.axes), len(tile.axes))
        add = op.attr["kind"] == "add"

        def axis(i: int) -> Axis:
            zero = add and old.zero_at(i)
            found = intersection([old.at(i), tile.at(i)], zero, "", self.position.where())
            return replace(found, zero=zero) if open_(found) else found  # type: ignore

        return TileEdges.of(map(axis, range(rank)))

    def touched(self, place: SharedPlace, facts: Sequence[TileEdges]) -> None:
        """Single elements were written: which of them exist is not known any more."""
        old = self.contents.get(place.buffer, NOTHING)
        if any(open_(a) for f in (old, *facts[1:2]) for a in f.axes):
            gone = Mixed("had single elements of its shared memory written beside an edge",
                         where=self.position.where())
            old = TileEdges((gone,) * len(place.box))
        self.contents[place.buffer] = replace(old, zeros=False)

    # --- control flow -------------------------------------------------------------------------
    def outlived(self, facts: TileEdges, taken: set[str], why: str) -> TileEdges:
        """Facts behind the block in which a value was made: what they say must still be known."""
        def axis(a: Axis) -> Axis:
            if isinstance(a, Listed):
                edges = [axis(e) for e in a.edges]
                gone = [e for e in edges if isinstance(e, Mixed)]
                kept = tuple(e if isinstance(e, Edge) else None for e in edges)
                return replace(gone[0], zero=a.zero) if gone else replace(a, edges=kept)
            if not isinstance(a, Edge) or a.first is None:
                return a
            names = {v.name for f in (a.first, a.extent) for v in (f or {}) if v is not None}
            if names - taken:
                return Mixed(why, a.zero, where=a.where) if open_(a) else replace(
                    a, key=None, first=None, extent=None, offset=None, size=None)
            return replace(a, offset=self.outer(a.offset, taken), size=self.outer(a.size, taken))

        return TileEdges(tuple(map(axis, facts.axes)), facts.zeros)

    @staticmethod
    def outer(x: Any, taken: set[str]) -> Any:
        return None if isinstance(x, Handle) and x.value.name not in taken else x

    def adds_to(self, value: SSAValue, total: SSAValue,
                seen: frozenset[SSAValue] = frozenset()) -> bool:
        """Whether a value is `total`, or `total` with something added to it."""
        if value == total or value in seen:
            return True
        seen |= {value}
        if value in self.sources:
            ways = self.sources[value]
            return bool(ways) and all(self.adds_to(v, total, seen) for v in ways)
        op = self.values.defined_by.get(value)
        if op is None or op.name not in ("convert", "add", "sub"):
            return False
        terms = op.args[:2 if op.name == "add" else 1]
        return any(self.adds_to(v, total, seen) for v in terms if isinstance(v, SSAValue))

    @staticmethod
    def totals(facts: TileEdges) -> TileEdges:
        """Facts of what a loop adds to: where nothing but zeros lies beyond, it is a total."""
        return TileEdges(tuple(replace(a, running=a.zero) if isinstance(a, Mixed) else a
                               for a in facts.axes), facts.zeros)

    def joined_contents(self, a: dict[SSAValue, TileEdges], b: dict[SSAValue, TileEdges],
                        taken: set[str],
                        why: str, how: str) -> dict[SSAValue, TileEdges]:
        out = {}
        for root in {**a, **b}:
            if root.name not in taken:
                continue
            known = [self.outlived(c[root], taken, why) for c in (a, b) if root in c]
            rank = max(len(f.axes) for f in known)
            out[root] = known[0] if len(known) == 1 else join_facts(known[0], known[1], rank, how,
                                                                     self.position.where())
        return out
