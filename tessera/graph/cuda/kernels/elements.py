"""Kernels of ops that say how one element follows from elements of the operands (graph/element.py).

All tensors are seen as vectors. A block takes a run of elements of the result: their places follow
from their numbers, and each read is a gather, of nothing where the place is outside.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import astuple, field, replace
from math import prod
from typing import Any

from ....lazy_dataclass import dataclass
from ....numerics import DType, as_type
from ....tile.ir.schedule import Schedule
from ...element import Element, IndexBound, index_names
from ...ir import Node
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ..choose_schedule import blocks, for_loop
from .extrema import compared_type
from .group_statements import CHAIN
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .spell import COMBINE, literal, stored_as

# Of a block that reads windows, which take registers: the largest of 3 x 3 of [64, 64, 112, 112] of
# bf16 in steps of 2 take 65.2 us, of blocks of 1024 119.0, with 16 bytes in a lane 141.8; averages
# of 2 x 2 of [64, 128, 112, 112] 70.7, 70.8 and 136.9 (H200, 2026-11-27, in turn).
WINDOWS = 512
MERGED = "a copy, because neighbours do not stay neighbours"
LONG = 1 << 30  # from here on numbers of elements are 64 bits wide
BINARY: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//",
                           ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|"}
COMPARE: dict[type, str] = {ast.Eq: "==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


@dataclass(frozen=True)
class _Term:
    """A part of the text. least, most: of an integer that is known to lie between them.
    varies: whether it is a tile, one number for each element of the block."""

    text: str
    varies: bool = False
    least: int | None = None
    most: int | None = None


@dataclass
class _Spelled:
    """An element's text as statements of a kernel; what was computed has a name."""

    w: KernelWriter
    step: GroupStep
    shape: tuple[int, ...]
    operands: list[GroupOperand | Any]  # or a number
    block: int
    kind: str  # of places: int32 or int64
    named: dict[str, _Term] = field(default_factory=dict)
    count: int = 0
    placing: bool = False  # whether an integer that is read is a place
    fill: str = ""  # what is read outside; 0 where nothing is said
    cast: str = ""  # the type in which elements are combined, where that is another

    def spell(self, text: str) -> _Term:
        return self.visit(ast.parse(text, mode="eval").body)

    def bound(self, text: str) -> _Term:
        """An integer that is a place."""
        return self.places(ast.parse(text, mode="eval").body)[0]

    def visit(self, e: ast.AST) -> _Term:
        match e:
            case ast.Constant(value=int() as n):
                return _Term(str(n), False, n, n)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as n)):
                return _Term(f"({-n})", False, -n, -n)
            case ast.Name(id=name):
                return self.named[name] if name in self.named else self.place(int(name[1:]))
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(BINARY[type(op)], self.visit(left), self.visit(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.binary(COMPARE[type(op)], *self.places(left, right))
            case ast.Call(args=args):
                return self.where(*(self.visit(a) for a in args))
            case ast.Subscript(value=ast.Name(id=name), slice=at):
                parts = at.elts if isinstance(at, ast.Tuple) else [at]
                return self.read(int(name[1:]), self.places(*parts))
        raise AssertionError(ast.dump(e))

    def places(self, *parts: ast.AST) -> list[_Term]:
        before, self.placing = self.placing, True
        made = [self.visit(p) for p in parts]
        self.placing = before
        return made

    def name(self, letter: str, text: str, varies: bool = True, **known: Any) -> _Term:
        if text not in self.named:
            made = f"{letter}{self.count}"
            self.count += 1
            self.w.line(f"{made} = {text}", self.step)
            self.named[text] = _Term(made, varies, **known)
        return self.named[text]

    def place(self, axis: int) -> _Term:
        """The place of an element along an axis of the result."""
        n, stride = self.shape[axis], prod(self.shape[axis + 1:])
        if n == 1:
            return _Term("0", False, 0, 0)
        text = f"p // {stride}" if stride > 1 else "p"
        text = f"{text} % {n}" if prod(self.shape[:axis]) > 1 else text
        # Beyond the last element of the result the first axis goes on.
        return self.name("o", text, least=0, most=n - 1)

    def binary(self, op: str, a: _Term, b: _Term) -> _Term:
        least, most = _range(op, a, b)
        return _Term(f"({a.text} {op} {b.text})", a.varies or b.varies, least, most)

    def where(self, condition: _Term, x: _Term, y: _Term) -> _Term:
        least = None if x.least is None or y.least is None else min(x.least, y.least)
        most = None if x.most is None or y.most is None else max(x.most, y.most)
        if not condition.varies and not any(map(str.isalpha, condition.text)):
            # Of a space of one element everything is known; numbers alone make no tile of bools.
            condition = self.name("c", f"(p >= n) == {condition.text}")
        elif not condition.varies:
            condition = self.name("c", f"tile.broadcast({condition.text}, ({self.block},))")
        return self.name("w", f"tile.where({condition.text}, {x.text}, {y.text})", least=least,
                         most=most)

    def read(self, i: int, at: list[_Term]) -> _Term:
        x = self.operands[i]
        if not isinstance(x, GroupOperand):
            return self.number(x, at)
        X, place = capital(x.name), self.placing
        flat, inside, varies = "", [], any(t.varies for t in at)
        for t, n in zip(at, x.shape, strict=True):
            flat = f"({flat}) * {n} + {t.text}" if flat else t.text
            inside += _inside(t, n)
        flat = flat or "0"
        if not varies and not inside:
            made = self.name("x", f"{X}[{flat}]", varies=False)
            return self.index(made) if place else made
        if not varies:
            flat = f"tile.broadcast(tile.cast({flat}, {self.kind}), ({self.block},))"
        if inside:
            flat = self.name("f", f"tile.where({' & '.join(inside)}, {flat}, -1)").text
        fill = f", fill={self.fill}" if self.fill and inside else ""
        text = f"tile.gather({X}, {flat}{fill})"
        made = self.name("x", f"tile.cast({text}, {self.cast})" if self.cast else text)
        return self.index(made) if place else made

    def number(self, x: _Number, at: list[_Term]) -> _Term:
        """An operand whose elements are all one number: outside of it there is none of them."""
        inside = [c for t, n in zip(at, x.shape, strict=True) for c in _inside(t, n)]
        value, fill = literal(x.value, x.kind), self.fill or literal(0, x.kind)
        if not inside or value == fill:
            return _Term(value)
        if self.step.type.dtype.kind == x.kind:  # a number of the result's type
            kept = self.cast or self.w.type(self.step.type)
            value = f"tile.full(({self.block},), {value}, {kept})"
        condition = _Term(" & ".join(inside), any(t.varies for t in at))
        return self.where(condition, _Term(value), _Term(fill))

    def index(self, raw: _Term) -> _Term:
        """An integer operand as a place: where it is far outside it stays there."""
        text = f"tile.maximum(tile.minimum({raw.text}, {LONG}), {-LONG})"
        text = raw.text if self.kind == "int64" else text
        return self.name("i", f"tile.cast({text}, {self.kind})", varies=raw.varies)


@dataclass(frozen=True)
class _Number:
    """An operand that is known: of such extents, with one number everywhere."""

    value: Any
    kind: str
    shape: tuple[int, ...] = ()


def _inside(t: _Term, extent: int) -> list[str]:
    """What says that a place is one of an axis."""
    return [f"({t.text} >= 0)"] * (t.least is None or t.least < 0) + [
        f"({t.text} < {extent})"] * (t.most is None or t.most >= extent)


def _known_extents(step: GroupStep, node: Node) -> dict[str, Any]:
    """The attribute that says of what extents operands are that are numbers."""
    found = tuple((i, extents_of(v)) for i, (a, v) in enumerate(
        zip(step.args, node.inputs, strict=True)) if not isinstance(a, str) and v.aval.ndim)
    return {"known": found} if found else {}


def _range(op: str, a: _Term, b: _Term) -> tuple[int | None, int | None]:
    if None in (a.least, a.most, b.least, b.most):
        return None, None
    assert a.least is not None and a.most is not None
    assert b.least is not None and b.most is not None
    if op == "+":
        return a.least + b.least, a.most + b.most
    if op == "-":
        return a.least - b.most, a.most - b.least
    if op == "%" and b.least == b.most and b.least > 0:
        return 0, b.least - 1
    if op in ("*", "//") and b.least == b.most and b.least > 0:
        return (a.least * b.least, a.most * b.least) if op == "*" else (
            a.least // b.least, a.most // b.least)
    return None, None


def schedule_elements(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    assert node.op.element is not None
    element = node.op.element(*(v.aval for v in node.inputs), **node.attrs)
    reads = [builder.operand(v) for v in builder.reads(group)]
    y = builder.operand(node.outputs[0])
    if builder.memory.places[node.outputs[0]].kind == "view":
        return _schedule_update(builder, group, element, reads, y)
    s, step = _side_by_side(prod(y.shape), y.type.dtype.bits), builder.step(node)
    if "way" in node.attrs and s.n > WINDOWS and not (
            node.attrs.get("each") and prod(element.over) == 1):
        s = replace(s, n=WINDOWS)
    s = s.with_notes(MERGED) if node.op.name == "moved" else s
    builder.add("elements", y.shape, reads, [y], [step], s,
                (blocks(prod(y.shape), s.n),), element=element.text, over=element.over,
                bounds=tuple(map(astuple, element.bounds)), way=element.way,
                kinds=tuple(v.aval.dtype.kind for v in node.inputs),
                **_known_extents(step, node),
                **{"divisor": node.attrs.get("divisor", 1.0)} if "way" in node.attrs else {},
                **{"each": True} if node.attrs.get("each") else {})


def _side_by_side(elements: int, bits: int) -> Schedule:
    """A loop in which a lane writes a word at once: neighbouring lanes read neighbours, one by one,
    where an access of a warp would touch 32 sectors otherwise."""
    return for_loop((elements,), bits).with_vector(max(1, 32 // bits))


def _schedule_update(builder: ScheduleBuilder, group: FusionGroup, element: Element,
                     reads: list[GroupOperand], y: GroupOperand) -> None:
    """The result lies where operand 0 does: what is written over it alone is moved."""
    (node,) = group.nodes
    assert element.into is not None
    space, x = extents_of(node.inputs[1]), builder.buffer_name(node.inputs[0])
    s, step = _side_by_side(prod(space), y.type.dtype.bits), builder.step(node)
    written = {builder.buffer_name(v) for v in node.inputs[1:]}  # x over itself is read, too
    builder.add("update", space, [r for r in reads if r.name != x or x in written], [y], [step], s,
                (blocks(prod(space), s.n),), into=element.into,
                bounds=tuple(map(astuple, element.bounds)),
                kinds=tuple(v.aval.dtype.kind for v in node.inputs), **_known_extents(step, node))


def element_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    element = Element(group.attr("element"), group.attr("over"), _bounds(group),
                      way=group.attr("way"))
    s = _started(w, group, y.shape)
    if "divisor" in dict(group.attrs):
        made = _combined(s, element, y.type.dtype)
    else:
        made = _summed(s, element, y.type.dtype) if element.over else _single(s, element)
    w.line(f"{capital(y.name)}[n:n+{s.block}] = {made}", step)
    return w.finish_flat()


def update_source(group: ScheduledGroup) -> KernelText:
    """The elements of operand 1 to their places in the result."""
    w, (step,), (y,) = KernelWriter(group), group.steps, group.writes
    s = _started(w, group, group.space)
    for b in _bounds(group):
        w.check_index(s.bound(b.text).text, b.extent, step, b.wrap)
    flat = ""
    for text, extent in zip(group.attr("into"), y.shape, strict=True):
        at = s.bound(text).text
        flat = f"({flat}) * {extent} + {at}" if flat else at
    there = f"tile.where(p < {prod(group.space)}, {flat or 'p'}, -1)"
    value = s.spell(f"x1[{index_names(range(len(group.space)))}]")
    made = value.text if value.varies else f"tile.broadcast({value.text}, ({s.block},))"
    w.line(f"tile.scatter({capital(y.name)}, {there}, {made})", step)
    return w.finish_flat()


def _bounds(group: ScheduledGroup) -> tuple[IndexBound, ...]:
    return tuple(IndexBound(*b) for b in group.attr("bounds"))


def _started(w: KernelWriter, group: ScheduledGroup, shape: tuple[int, ...]) -> _Spelled:
    """The block's elements of a space."""
    (step,), (y,), BN = group.steps, group.writes, group.schedule.n
    reads = {r.name: r for r in group.reads}
    size = max(prod(o.shape) for o in (*group.reads, y))
    kind = w.type(as_type("int64" if size >= LONG else "int32"))
    known = dict(dict(group.attrs).get("known", ()))
    operands = [reads.get(a) if isinstance(a, str) else _Number(a, k, known.get(i, ()))
                for i, (a, k) in enumerate(zip(step.args, group.attr("kinds"), strict=True))]
    w.line(f"n = tile.group_id(0) * {BN}")
    w.line(f"p = tile.arange(0, {BN}, {kind}) + n")
    return _Spelled(w, step, shape, operands, BN, kind)


def _single(s: _Spelled, element: Element) -> str:
    _check(s, element)
    return s.spell(element.text).text


def _check(s: _Spelled, element: Element) -> None:
    for b in element.bounds:
        s.w.check_index(s.bound(b.text).text, b.extent, s.step, b.wrap)


def _summed(s: _Spelled, element: Element, dtype: DType) -> str:
    """Terms one after another in order, each sum rounded to the type of the result; more than CHAIN
    of them in f64, rounded once."""
    w, name = s.w, s.step.name
    wide = dtype.name == "f32" and prod(element.over) > CHAIN
    kept = w.type(as_type("f64")) if wide else w.type(s.step.type)
    w.line(f"{name} = tile.full(({s.block},), {literal(0, dtype.kind)}, {kept})", s.step)
    for a in range(len(s.shape)):
        s.place(a)
    with w.block(f"for r in range(0, {prod(element.over)}):"):
        for i, n in enumerate(element.over):
            inner, outer = prod(element.over[i + 1:]), prod(element.over[:i])
            text = "r" if inner == 1 else f"(r // {inner})"
            text = text if outer == 1 else f"({text} % {n})"
            s.named[f"r{i}"] = _Term(text, False, 0, n - 1)
        _check(s, element)
        term = s.spell(element.text).text
        term = f"tile.cast({term}, {kept})" if wide else term
        narrow = dtype.compute is not dtype or dtype.bits < 32
        total = f"{name} + {term}"
        w.line(f"{name} = " + (stored_as(total, dtype, kept) if narrow else total), s.step)
    return f"tile.cast({name}, {w.type(s.step.type)})" if wide else name


def _combined(s: _Spelled, element: Element, dtype: DType) -> str:
    """The few terms of a window one after another, in f32 where they are narrower: all reads may
    be on their way at once. The divisor is that of the result, or of each term."""
    w, name, kept = s.w, s.step.name, as_type(compared_type(dtype).name)
    together, s.fill = COMBINE[element.way]
    if dtype.kind != "float":
        s.fill = literal(dtype.min if element.way == "max" else dtype.max, dtype.kind)
    s.fill = "" if element.way == "sum" else s.fill
    s.cast = w.type(kept) if any(x.type.dtype is not kept.dtype for x in s.operands
                                 if isinstance(x, GroupOperand)) else ""
    total, divisor, each = "", w.group.attr("divisor"), "each" in dict(w.group.attrs)
    for r in itertools.product(*map(range, element.over)):
        s.named |= {f"r{i}": _Term(str(n), False, n, n) for i, n in enumerate(r)}
        term = s.spell(element.text).text
        term = f"({term} / {divisor!r})" if each and divisor != 1.0 else term
        total = together.format(total, term) if total else term
        w.line(f"{name} = {total}", s.step)
        total = name
    if divisor != 1.0 and not each:
        total = f"{total} / {divisor!r}"
    if each and prod(element.over) > 1:
        total += " + 0.0"  # as what is added to 0: no -0
    return total if dtype is kept.dtype else f"tile.cast({total}, {w.type(s.step.type)})"


kernel_kind("elements", "move", element_source, schedule_elements)
kernel_kind("update", "move", update_source)
