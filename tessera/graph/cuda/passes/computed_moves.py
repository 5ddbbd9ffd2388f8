"""What is computed of elements that move is one kernel, which reads each element where it lies.

    x[:, ::2] * silu(x[:, 1::2])                       # neighbours
    reshape(stack([a * c - b * s, a * s + b * c], -1))  # rotary positions of neighbours
    transpose((x - mean) / std, (0, 3, 1, 2))          # channels first, of three
    pad(a) + pad(b)                                    # the gradient of slices
    take_along(x - logsumexp(x), ids)                  # of few elements of each row
    y * c + concatenate([-y[..., h:], y[..., :h]]) * s  # y = rms_norm(x), rotary positions

Loops take elements in order, and copies are made of those that lie otherwise: a slice in steps, a
part joined to others, zeros around. Here an element of a result is followed back through ops and
moves alike: a move changes places (element_places.py), an op is computed there. So nothing lies in
memory between what is read and the result. That pays where a warp finds its elements close to each
other, which is counted for some warps; a transposition of long rows goes by tiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, replace
from math import copysign, gcd, prod
from typing import Any

import numpy as np

from ....errors import SourceLine
from ....lazy_dataclass import dataclass
from ....numerics import NumericType
from ...flops import per_operand
from ...ir import Graph, Node, Value, producers_of, readers_of, value_bytes
from ...op import Aval
from ...ops.gather import CHECK_INDEX
from ...schedule.boundaries import LEAST_BYTES
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...schedule.op_ids import id_of, line_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..choose_schedule import power
from ..element_places import MOVED, ElementPlace, Places, broadcast_places, flat
from ..kernels.group_steps import attributes_of
from ..kernels.scatters import WRITE_LAST
from .data_movement import is_joined
from .displaced_reads import JOINED
from .followed_values import (
    MOVES,
    PICKS,
    from_first_elements,
    in_memory,
    is_followed,
    rows_and_columns,
)
from .library_ops import merged_line, swaps_last

MOST_STEPS, MOST_READS = 96, 20  # of an element
SECTOR, APART = 32, 4  # bytes, and how many times the sectors that a dense read would touch
FEW = 8  # times as many bytes, at least
OFTEN = 4  # that an element is picked, of which more are not computed each time
MOST_PARTS, LEAST_PART = 4, 16  # of a row, and columns of each
WARPS, LANES = 16, 64  # that are looked at; elements of each
PICKED = re.compile(r"\bi\d+\b")
DROPPED = re.compile(r"d\d+$")
COMPUTED = library_call("computed", flops=per_operand)


@dataclass(frozen=True)
class At:
    """Where an element is read: at `flat` of the operand as a vector, where `guard` holds.
    row, shift: where the block's columns are those of a row, so many further on: the row, which is
    one where `row_guard` holds."""

    flat: str
    guard: str = ""
    row: str = ""
    row_guard: str = ""
    shift: int = 0


@dataclass(frozen=True)
class ElementStep:
    """A step towards an element. kind: "read" of operand args[0] at the first of `at` that counts |
    "choice" of args[0] where `text` holds, else args[1] | "number" | "op", of the steps args |
    "index", i7 of step 7: an integer, args[0], as part of a place | "fold": of the row that args
    have in a block | "parts" of a row, side by side.
    name, attrs, type, ids: of the graph's op."""

    kind: str
    args: tuple[int, ...] = ()
    text: str = ""
    at: tuple[At, ...] = ()
    name: str = ""
    attrs: tuple[tuple[str, Any], ...] = ()
    type: NumericType | None = None
    ids: tuple[str, ...] = ()
    where: SourceLine | None = field(default=None, compare=False)


class _TooMuch(Exception):
    """An element takes more than a kernel should do for it, or what none can."""


def compute_moves(graph: Graph) -> Graph:
    """The graph with such results as one kernel each."""
    if not any(n.op.name in (*MOVES, *PICKS) for n in graph.nodes):
        return graph
    maker, readers, results = producers_of(graph), readers_of(graph), set(graph.outputs)
    kept, again, inside = in_memory(graph, maker, readers, results)

    def stays(v: Value) -> bool:
        """Whether it lies in memory in any case."""
        return v in kept

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not is_followed(node) or not stays(node.outputs[0]):
            return None
        if rows_and_columns(extents_of(node.outputs[0]))[0] == 1 and is_joined(
                node.outputs[0], readers):
            return None
        found = _followed(maker, stays, inside, node.outputs[0])
        if found is None or not found.saves() or not found.is_close():
            return None
        if not found.loops and node.outputs[0] not in results and _is_read_as_it_lies(
                node, readers):
            return None
        reduced = not inside.isdisjoint(found.nodes) or node.outputs[0] not in results and any(
            n.op.reduction or n in again for n in readers[node.outputs[0]])
        if reduced and found.is_of_few():
            return None
        out = Value(Aval(found.shape, node.outputs[0].aval.type))
        rw.where = merged_line(node.where, found.nodes)
        operands, steps = from_first_elements(rw, found.operands, found.steps, found.by_text,
                                              rows_and_columns(found.shape)[1])
        rw.add(Node(COMPUTED, operands, {"steps": steps, "width": found.width}, (out,), rw.where))
        if out.aval == node.outputs[0].aval:
            return out
        return rw.emit("reshape", out, shape=extents_of(node.outputs[0]))

    return remove_dead(rebuild(graph, visit))


def _is_read_as_it_lies(node: Node, readers: dict[Value, list[Node]]) -> bool:
    """Whether matmuls alone read a transposition, which take either."""
    return node.op.name == "transpose" and swaps_last(node.attrs["axes"]) and all(
        n.op.name == "matmul" for n in readers.get(node.outputs[0], ()))


def _followed(maker: dict[Value, Node], stays: Callable[[Value], bool], inside: set[Node],
              result: Value) -> _Followed | None:
    """The steps to an element; None where they are too many. Followed again where axes of the
    result turn out to go together, and where conditions cut its rows into few parts."""
    def follow(groups: list[tuple[int, ...]], width: int = 0) -> _Followed | None:
        found = _Followed(maker, stays, inside, result)
        try:
            found.follow(groups, width)
        except _TooMuch:
            return None
        return found

    axes: list[tuple[int, ...]] = [(a,) for a in range(result.aval.ndim)]
    found = follow(axes)
    if found is not None and len(groups := found.groups()) < len(axes):
        found = follow(groups)
    if found is not None and (width := found.part_width()):
        return follow(groups, width) or found
    return found


class _Followed:
    """An element of a result, followed back to what lies in memory."""

    def __init__(self, maker: dict[Value, Node], stays: Any, inside: set[Node], result: Value):
        self.maker, self.stays, self.inside, self.result = maker, stays, inside, result
        self.steps: list[ElementStep] = []
        self.operands: list[Value] = []
        self.nodes: list[Node] = []
        self.reads = 0
        self.known: dict[object, int] = {}
        self.loops, self.picking = False, 0  # whether ops compute elements; in integers that pick
        self.shape = extents_of(result)  # of the kernel: axes that go together are one
        self.width = 0  # of a part of a row
        self.places: list[ElementPlace] = []  # that are read, as numbers of elements
        self.by_text: dict[tuple[int, str], ElementPlace] = {}  # of an operand: elements, rows
        self.conditions: list[str] = []
        self.by_columns: list[str] = []  # integers that pick, and differ along the columns

    def follow(self, groups: list[tuple[int, ...]], width: int = 0) -> None:
        """groups: axes that are one of the kernel. The last of them stands for all (`merged`).
        width: of the parts of rows that are followed each by itself."""
        extents, at = extents_of(self.result), list[ElementPlace]()
        self.shape = tuple(prod(extents[a] for a in g) for g in groups)
        for k, g in enumerate(groups):
            last = max((a for a in g if extents[a] > 1), default=g[-1])
            at += [ElementPlace.of(f"o{k}" if a == last else f"d{a}", extents[a]) for a in g]
        self.width = width or (self.shape[-1] if self.shape else 1)
        if not width:
            self.prune(self.make(self.result, tuple(at), ()))
            return
        made = tuple(self.make(self.result, (*at[:-1], p), ()) for p in self.parts_of_row())
        self.prune(self.add(ElementStep("parts", made, type=self.result.aval.type)))

    def parts_of_row(self) -> list[ElementPlace]:
        place = ElementPlace.of(f"o{len(self.shape) - 1}", self.width)
        return [place.plus(n) for n in range(0, self.shape[-1], self.width)]

    def part_width(self) -> int:
        """Of the parts of a row inside of which no condition on its columns changes; 0 where there
        are none, or many. What is chosen is then computed alone, and what several parts need once.
        """
        R, C = rows_and_columns(self.shape)
        if R == 1:
            return 0
        last, at = rf"\bo{len(self.shape) - 1}\b", set[int]()
        for text in {t for c in self.conditions for t in re.split(r"[()&]+", c)}:
            bound = re.fullmatch(rf" *{last} (?:<|>=) (\d+) *", text)
            if bound is not None:
                at.add(int(bound[1]))
            elif re.search(last, text):
                return 0
        width = gcd(C, *at)
        few = 1 < C // width <= MOST_PARTS and width >= LEAST_PART and width == power(width)
        return width if few else 0

    def groups(self) -> list[tuple[int, ...]]:
        """The axes of the result; those together that no place and no condition tells apart."""
        extents = extents_of(self.result)
        out: list[tuple[int, ...]] = []
        for a, n in enumerate(extents):
            long = [b for b in (out[-1] if out else ()) if extents[b] > 1]
            if out and (not long or n == 1 or self.go_together(long[-1], a, n)):
                out[-1] += (a,)
            else:
                out.append((a,))
        return out

    def go_together(self, a: int, b: int, extent: int) -> bool:
        either = re.compile(rf"\bo({a}|{b})\b")
        for p in self.places:
            factors = dict(p.terms)
            if factors.get(f"o{a}", 0) != factors.get(f"o{b}", 0) * extent or any(
                    not t.isidentifier() and either.search(t) for t in factors):
                return False
        return not any(map(either.search, self.conditions))

    def prune(self, last: int) -> None:
        """Without the steps that nothing came of."""
        of, used = self.steps, {last}
        for i in range(last, -1, -1):
            if i in used:
                used |= set(of[i].args if of[i].kind != "read" else ())
                used |= {int(n[1:]) for n in PICKED.findall(f"{of[i].text} {of[i].at}")}
        kept = {i: k for k, i in enumerate(sorted(used))}
        self.steps = [of[i] if of[i].kind == "read" else replace(
            of[i], args=tuple(kept[a] for a in of[i].args)) for i in kept]

    def make(self, v: Value, at: Places, guards: tuple[str, ...]) -> int:
        guards = guards if at else ()
        key = (v, at, guards)
        if key not in self.known:
            node = self.maker.get(v)
            if node in self.inside:
                self.known[key] = self.fold(node, at, guards)
            elif node is None or not is_followed(node) or v is not self.result and self.stays(v):
                self.known[key] = self.read(v, at, guards)
            else:
                self.known[key] = self.of(node, at, guards)
        return self.known[key]

    def add(self, step: ElementStep) -> int:
        if (key := ("step", step)) in self.known:
            return self.known[key]
        self.known[key] = len(self.steps)
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS * (self.shape[-1] // self.width if self.shape else 1):
            raise _TooMuch
        return len(self.steps) - 1

    def read(self, v: Value, at: Places, guards: tuple[str, ...]) -> int:
        if v not in self.operands:
            self.operands.append(v)
        if any(p.least < 0 or p.most >= n for p, n in zip(at, extents_of(v), strict=True)):
            raise _TooMuch
        guarded = guards if any(p.guarded for p in at) else ()
        i = self.operands.index(v)
        where = self.where(i, at, extents_of(v), guarded)
        self.reads += where.flat != "0"
        if self.reads > MOST_READS * (self.shape[-1] // self.width if self.shape else 1):
            raise _TooMuch
        return self.add(ElementStep("read", (i,), at=(where,), type=v.aval.type))

    @property
    def columns(self) -> re.Pattern[str]:
        """What differs along the columns of a block, in a text of places."""
        return re.compile(rf"\b({'|'.join((f'o{len(self.shape) - 1}', *self.by_columns))})\b")

    def where(self, i: int, at: Places, shape: tuple[int, ...], guards: tuple[str, ...]) -> At:
        last, columns = f"o{len(self.shape) - 1}", self.columns
        self.places.append(flat(at, shape))
        self.conditions += guards
        whole = self.noted(i, merged(self.places[-1]))
        made = At(whole.text, _all_of(guards))
        R, C = rows_and_columns(self.shape)
        if R == 1 or not shape:
            return made
        rows = _all_of(tuple(g for g in guards if not columns.search(g)))
        if shape[-1] == C and merged(at[-1]).terms == ((last, 1),):
            if any(columns.search(p.text) for p in at[:-1]):
                return made
            row = self.noted(i, merged(flat(at[:-1], shape[:-1])))
            return At(whole.text, made.guard, row.text, rows, at[-1].constant)
        rest = replace(whole, terms=tuple(t for t in whole.terms if t != (last, 1)))
        shift = rest.constant % C
        if len(rest.terms) == len(whole.terms) or prod(shape) % C or shift + self.width > C or any(
                f % C or columns.search(t) for t, f in rest.terms) or any(
                map(columns.search, guards)):
            return made
        row = self.noted(i, rest.plus(-shift).times_of(C))
        return At(whole.text, made.guard, row.text, rows, shift)

    def noted(self, i: int, place: ElementPlace) -> ElementPlace:
        other = self.by_text.get((i, place.text), place)
        self.by_text[i, place.text] = replace(  # conditions may end two of one text apart
            place, least=min(place.least, other.least), most=max(place.most, other.most))
        return place

    def of(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        if node.op.name == "concatenate":
            return self.concatenate(node, at, guards)
        if node.op.name == "pad":
            return self.pad(node, at, guards)
        if node.op is JOINED:
            return self.join(node, at, guards)
        if node.op.name in PICKS:
            return self.pick(node, at, guards)
        if node.op is WRITE_LAST:
            return self.write(node, at, guards)
        if node.op.name in MOVES:
            (x, *_), attrs = node.inputs, node.attrs
            return self.make(x, MOVED[node.op.name](at, extents_of(x), attrs,
                                                    extents_of(node.outputs[0])), guards)
        args = tuple(self.make(x, broadcast_places(at, extents_of(x)), guards) for x in node.inputs)
        self.loops |= not self.picking
        return self.add(ElementStep(
            "op", args, name=node.op.name, attrs=tuple(sorted(attributes_of(node).items())),
            type=node.outputs[0].aval.type, ids=tuple(id_of(node).split()),
            where=line_of(node.where)))

    def fold(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        """The statistic of a row, of elements where the block has them: its columns are the row."""
        (x,), last = node.inputs, f"o{len(self.shape) - 1}"
        R, C = rows_and_columns(self.shape)
        own = re.compile(rf"\b{last}\b|{PICKED.pattern}")
        if R == 1 or C != extents_of(x)[-1] or any(p.guarded or own.search(p.text) for p in at):
            return self.read(node.outputs[0], at, guards)
        self.places.append(flat(at[:-1], extents_of(x)[:-1]))
        if node not in self.nodes:
            self.nodes.append(node)
        elements = tuple(self.make(x, (*at[:-1], p), ()) for p in self.parts_of_row())
        attrs = tuple(sorted(attributes_of(node).items()))
        return self.add(ElementStep("fold", elements, name=node.op.name, attrs=attrs,
                                    type=node.outputs[0].aval.type,
                                    ids=tuple(id_of(node).split()), where=line_of(node.where)))

    def pick(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        (x, ids), axis = node.inputs, node.attrs["axis"]
        if guards:  # an integer outside is to fail where the element is not read, too
            return self.read(node.outputs[0], at, guards)
        behind = axis + (1 if node.op.name == "take_along" else ids.aval.ndim)
        own = at if node.op.name == "take_along" else at[axis:behind]
        place = self.index(node, ids, own, extents_of(x)[axis])
        moved = (*at[:axis], place, *at[behind:])
        # Each element would be computed as often as it is picked.
        often = prod(extents_of(node.outputs[0])) > OFTEN * prod(extents_of(x))
        return self.read(x, moved, guards) if often else self.make(x, moved, guards)

    def write(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        """What was written last at a place, else what was there."""
        (x, last, u), axis = node.inputs, node.attrs["axis"]
        which = self.make(last, (at[axis],), guards)
        made = self.picked(ElementStep(
            "index", (which,), type=last.aval.type, ids=tuple(id_of(node).split()),
            where=line_of(node.where)), (at[axis],))
        name = self.steps[made].text
        n = extents_of(u)[axis]
        place = replace(ElementPlace.of(name, n), guarded=True)
        there = f"{name} >= 0"
        new = self.make(u, (*at[:axis], place, *at[axis + 1:]), (*guards, there))
        return self.choose(node, there, new, self.make(x, at, guards))

    def index(self, node: Node, ids: Value, at: Places, extent: int) -> ElementPlace:
        if (key := ("index", ids, at, extent)) not in self.known:
            self.picking += 1
            own = self.make(ids, at, ())
            self.picking -= 1
            of, where, text = tuple(id_of(node).split()), line_of(node.where), CHECK_INDEX.tile
            attrs = {"extent": extent, "wrap": True, "text": text, "kinds": (ids.aval.dtype.kind,)}
            checked = self.add(ElementStep("op", (own,), name="check_index", type=ids.aval.type,
                                           attrs=tuple(sorted(attrs.items())), ids=of,
                                           where=where))
            self.known[key] = self.picked(ElementStep(
                "index", (checked,), type=ids.aval.type, ids=of, where=where), at)
        return ElementPlace.of(self.steps[self.known[key]].text, extent)

    def picked(self, step: ElementStep, at: Places) -> int:
        """An integer that lies at such places, by a name of its own."""
        name = f"i{len(self.steps)}"
        if any(self.columns.search(p.text) for p in at):
            self.by_columns.append(name)
        return self.add(replace(step, text=name))

    # --- choices ------------------------------------------------------------------------------
    def choose(self, node: Node, condition: str, one: int, other: int) -> int:
        self.conditions.append(condition)
        return self.add(ElementStep("choice", (one, other), condition, name=node.op.name,
                                    type=node.outputs[0].aval.type, ids=tuple(id_of(node).split()),
                                    where=line_of(node.where)))

    def concatenate(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        axis, begin, parts = node.attrs["axis"], 0, []
        for x in node.inputs:
            parts.append((begin, begin + extents_of(x)[axis], x, 0))
            begin = parts[-1][1]
        return self.parts(node, axis, parts, at, guards)

    def join(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        begin, parts = 0, []
        for end, (i, by, number) in zip(node.attrs["ends"], node.attrs["parts"], strict=True):
            x = node.inputs[i] if i >= 0 else self.add(ElementStep(
                "number", text=number, type=node.outputs[0].aval.type))
            parts.append((begin, end, x, begin + by))
            begin = end
        return self.parts(node, node.attrs["axis"], parts, at, guards)

    def parts(self, node: Node, axis: int, parts: list[Any], at: Places, guards: tuple[str, ...]
              ) -> int:
        """Each: where it begins and ends, what it is of, and from where on; or a step."""
        place, made, where = at[axis], list[tuple[int, int]](), list[tuple[str, ...]]()
        there = [p for p in parts if place.least < p[1] and place.most >= p[0]]
        for i, (begin, end, x, first) in enumerate(there):
            inside = list[str]()
            if i:
                inside.append(f"{place.text} >= {begin}")
            if i < len(there) - 1:
                inside.append(f"{place.text} < {end}")
            where.append((*guards, *inside))
            if isinstance(x, int):
                made.append((end, x))
                continue
            own = place.plus(-begin).within(0, end - begin - 1).plus(first)
            moved = (*at[:axis], own, *at[axis + 1:])
            made.append((end, self.make(x, moved, (*guards, *inside))))
        if (one := self.read_one([step for _, step in made], where, guards)) is not None:
            return one
        out = made[-1][1]
        for end, step in reversed(made[:-1]):
            out = self.choose(node, f"{place.text} < {end}", step, out)
        return out

    def read_one(self, steps: list[int], where: list[tuple[str, ...]], guards: tuple[str, ...]
                 ) -> int | None:
        """Of parts that are read of one operand, each on its conditions: the read of the one that
        counts."""
        found, ways = [self.steps[i] for i in steps], list[At]()
        if any(s.kind != "read" or s.args != found[0].args for s in found) or len(found) == 1:
            return None
        columns, zeros = self.columns, False  # zeros: whether some are read nowhere
        for s, conditions in zip(found, where, strict=True):
            whole = _all_of(conditions)
            self.conditions.append(whole)
            for at in s.at:
                if len(s.at) == 1:  # its own guard has these conditions, and those of what is 0
                    zeros |= at.guard not in ("", whole)
                    at = replace(at, guard=at.guard or whole,
                                 row_guard=(at.row_guard or whole) if at.row else "")
                if at.row and (columns.search(whole) or columns.search(at.row_guard)):
                    return None
                ways.append(at)
        if len({(bool(at.row), at.shift) for at in ways}) > 1:
            return None
        if not guards and not zeros:
            ways[-1] = replace(ways[-1], guard="", row_guard="")
        return self.add(replace(found[0], at=tuple(ways)))

    def pad(self, node: Node, at: Places, guards: tuple[str, ...]) -> int:
        (x, value), inside, moved = node.inputs, list[str](), list[ElementPlace]()
        for place, before, n in zip(at, node.attrs["before"], extents_of(x), strict=True):
            if place.most < before or place.least >= before + n:
                return self.make(value, (), guards)
            if place.least < before:
                inside.append(f"{place.text} >= {before}")
            if place.most >= before + n:
                inside.append(f"{place.text} < {before + n}")
            moved.append(place.plus(-before).within(0, n - 1))
        own = self.make(x, tuple(moved), (*guards, *inside))
        if not inside or self.reads_zero(own, x, value):
            return own
        outside = self.make(value, (), guards)
        return self.choose(node, " & ".join(f"({t})" for t in inside), own, outside)

    def reads_zero(self, step: int, x: Value, value: Value) -> bool:
        """Whether that is what is around: a read gives 0 where its condition does not hold, and a
        cast 0 for 0."""
        read, number = self.steps[step], self.maker.get(value)
        if number is not None and number.op.name == "cast":
            number = self.maker.get(number.inputs[0])
        while read.kind == "op" and read.name == "cast" and x in self.maker:
            read, x = self.steps[read.args[0]], self.maker[x].inputs[0]
        if read.kind != "read" or self.operands[read.args[0]] is not x or number is None:
            return False
        of = number.attrs.get("value")
        return number.op.name == "constant" and of == 0 and copysign(1, of) > 0

    # --- what it is worth ---------------------------------------------------------------------
    def saves(self) -> bool:
        """Whether it would be several passes over memory otherwise, copies and loops, or one that
        takes long."""
        copies = [n for n in self.nodes if _copies(n, n.outputs[0] is self.result)]
        if max((value_bytes(v) for n in self.nodes for v in n.outputs), default=0) < LEAST_BYTES:
            return False
        return len(copies) + self.loops > 1 and bool(copies) or any(map(_takes_long, copies))

    def is_of_few(self) -> bool:
        """Whether the copies are so much smaller than the result that what takes it along, and
        reads them, need not have it in memory."""
        copies = [n.outputs[0] for n in self.nodes if _copies(n, n.outputs[0] is self.result)]
        return FEW * sum(map(value_bytes, copies)) < value_bytes(self.result)

    def is_close(self) -> bool:
        """Whether what a warp reads at once lies in few sectors."""
        shape = self.shape
        numbers = np.linspace(0, max(0, prod(shape) - LANES), WARPS, dtype=np.int64)
        p = (numbers[:, None] + np.arange(LANES)) % prod(shape)  # [WARPS, LANES]
        names = {f"o{a}": p // prod(shape[a + 1:]) % n for a, n in enumerate(shape)}
        names[f"o{len(shape) - 1}"] = p % max(1, self.width)
        for step in self.steps:
            if step.kind != "read" or step.at[0].row or any(
                    PICKED.search(at.flat) for at in step.at):
                continue  # near, or nothing is known of where it lies
            place: Any = -1
            for at in reversed(step.at):
                guard = "True" if PICKED.search(at.guard) else at.guard or "True"
                place = np.where(eval(guard, names), eval(at.flat, names), place)  # noqa: S307
            item = self.operands[step.args[0]].aval.dtype.numpy.itemsize
            sectors = np.where(place < 0, -1, np.broadcast_to(place, p.shape) * item // SECTOR)
            touched = sum(len(np.unique(row[row >= 0])) for row in sectors)
            if touched > WARPS * (APART * max(1, LANES * item // SECTOR) + 1):  # one cut in two
                return False
        return True


def merged(place: ElementPlace) -> ElementPlace:
    """Of axes that are one, the last is counted on behind its end in place of the others."""
    return replace(place, terms=tuple((t, f) for t, f in place.terms if not DROPPED.match(t)))


def _all_of(conditions: tuple[str, ...]) -> str:
    if len(conditions) == 1:
        return conditions[0]
    return " & ".join(f"({c})" for c in dict.fromkeys(conditions))


def _copies(node: Node, last: bool) -> bool:
    """Whether a move would be a copy of its own. last: whether it makes the result, which is
    written in any case: then the copy is what is in front of it."""
    name, attrs = node.op.name, node.attrs
    if max(map(value_bytes, (*node.inputs, *node.outputs))) < LEAST_BYTES:
        return False
    if name == "slice":
        return _lies_apart(node)
    if name == "transpose":
        long = [a for a in attrs["axes"] if extents_of(node.inputs[0])[a] > 1]
        return long != sorted(long) and (long[-1] != max(long) or _takes_long(node))
    if name == "concatenate":
        short = min(extents_of(x)[-1] for x in node.inputs) * node.outputs[0].aval.dtype.bits < 128
        return not last or short and attrs["axis"] == len(extents_of(node.inputs[0])) - 1
    return name in ("pad", "flip", *PICKS) or node.op is WRITE_LAST


def _lies_apart(node: Node) -> bool:
    """Whether a slice has neighbours that are none in memory, or shorter runs than an access."""
    (x,), (y,) = node.inputs, node.outputs
    if not y.aval.ndim:
        return False
    n = extents_of(y)[-1]
    return node.attrs["steps"][-1] != 1 or n < extents_of(x)[-1] and n * y.aval.dtype.bits < 128


def _takes_long(node: Node) -> bool:
    """Whether elements that lie apart are copied, or tiles of a transposition are short."""
    if node.op.name == "slice":
        return node.attrs["steps"][-1] != 1
    if node.op.name != "transpose":
        return node.op is WRITE_LAST
    (x,), (y,) = node.inputs, node.outputs
    sides = {extents_of(v)[-1] * v.aval.dtype.bits // 8 for v in (x, y)}
    return min(sides) <= SECTOR


__all__ = ["COMPUTED", "At", "ElementStep", "compute_moves"]
