"""Kernels of results that are computed of elements wherever these lie (passes/computed_moves.py).

A block has rows and columns of the result, which are its last axis where that fills blocks, so what
a place owes to other axes is computed once for each row. Each read is a gather; what lies as the
result does is loaded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from ....numerics import as_type
from ...ir import Node, Value
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame, extents_of
from ...schedule.op_ids import id_of, line_of
from ..choose_schedule import blocks, chosen, power
from ..passes.computed_moves import COMPUTED, At, ElementStep
from ..passes.followed_values import column_block, rows_and_columns
from .elements import LONG
from .group_statements import (
    ColumnReduction,
    FrameBlock,
    KernelValue,
    combined,
    emit_step,
    finished,
    fold_rows,
)
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import templates
from .spell import literal

LANES = 128
BYTES, ACCESS = 16, 128  # of the result for each lane; bits of the widest access


def schedule_computed(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    (v,) = node.outputs
    y, reads = builder.operand(v), [builder.operand(x) for x in builder.reads(group)]
    R, C = rows_and_columns(y.shape)
    found = node.attrs["steps"]
    width = node.attrs["width"] if R > 1 else C  # of a part of a row, or all of it
    m, n = computed_block(node)
    names = [builder.inner_name(Value(Aval(extents_of(v), s.type))) for s in found[:-1]]
    steps = [_step(s, builder, node.inputs, [*names, y.name], i) for i, s in enumerate(found)]
    steps[-1] = replace(steps[-1], ops=tuple(id_of(node).split()), where=line_of(node.where))
    s = chosen(m, n, warps=4)
    last = re.compile(rf"\bo{len(y.shape) - 1}\b|\bi\d+\b")
    if R == 1 or not all(_is_whole(step, last) for step in found):
        s = s.with_vector(max(1, 32 // y.type.dtype.bits))
    builder.add("computed", y.shape, reads, [y], steps, s,
                (blocks(R, m), blocks(width, n)), extents=(R, C))


def computed_block(node: Node) -> tuple[int, int]:
    """Rows and columns of a block."""
    y = node.outputs[0]
    R, C = rows_and_columns(extents_of(y))
    total = LANES * max(1, 8 * BYTES // y.aval.dtype.bits)
    n = min(column_block(C), total) if R > 1 else min(power(C), total)
    if any(step.kind == "fold" for step in node.attrs["steps"]):
        n = power(C)
    n = min(n, node.attrs["width"] if R > 1 else C)
    return min(power(R), max(1, total // n)), n


def _is_whole(s: ElementStep, last: re.Pattern[str]) -> bool:
    """Whether a lane reads whole accesses of a row: else neighbouring lanes read neighbours, one by
    one, where an access of a warp would touch 32 sectors otherwise."""
    assert s.type is not None
    bits = s.type.dtype.bits
    return s.kind != "read" or all(
        not last.search(at.flat) or at.row and at.shift * bits % ACCESS == 0 for at in s.at)


def _step(s: ElementStep, builder: ScheduleBuilder, operands: tuple[Value, ...], names: list[str],
          i: int) -> GroupStep:
    """A step of the node as one of the group."""
    assert s.type is not None
    if s.kind in ("op", "fold"):
        return GroupStep(names[i], s.name, tuple(names[a] for a in s.args), s.attrs, (), s.type,
                         s.ids, s.where)
    own: dict[str, dict[str, Any]] = {
        "read": {"at": s.at}, "choice": {"condition": s.text}, "number": {"number": s.text},
        "index": {"place": s.text}, "parts": {}}
    args = tuple(builder.argument(operands[a]) for a in s.args) if s.kind == "read" else \
        tuple(names[a] for a in s.args)
    attrs = tuple(sorted({**own[s.kind], "kind": s.kind}.items()))
    return GroupStep(names[i], s.kind if s.kind != "choice" else s.name, args, attrs, (), s.type,
                     s.ids, s.where)


def computed_source(group: ScheduledGroup) -> KernelText:
    return _Computed(group).source()


class _Computed:
    """Writes the kernel. axes: by name of a place, or of an integer in one, whether it varies along
    rows and columns; what varies along rows alone is a vector, as numbers of rows are."""

    def __init__(self, group: ScheduledGroup):
        self.group, self.w, self.texts = group, KernelWriter(group), templates(group)
        (self.R, self.C), (self.y,) = group.attr("extents"), group.writes
        BM, BN = group.schedule.m or 1, group.schedule.n
        parts = len(group.steps[-1].args) if group.steps[-1].op == "parts" else 1
        self.width = self.C // parts  # of a part of a row; a block has these columns of all parts
        self.cut = self.width == BN and parts > 1  # whether it has all columns of its rows
        self.own_row = " + ".join(_identity(self.y.shape[:-1]))
        columns = f"0:{BN}" if self.cut else f"n:n+{BN}"
        self.b = FrameBlock(Frame((self.R, self.C), ((0,), (1,))), f"m:m+{BM}", columns, (), BM, BN,
                            {})
        self.axes: dict[str, tuple[bool, bool]] = {}
        size = max(prod(o.shape) for o in (*group.reads, self.y))
        self.kind = as_type("int64" if size >= LONG else "int32")  # of places
        self.reads = {r.name: r for r in group.reads}
        self.forms = {name: self.form(name) for name in self.reads}

    def form(self, name: str) -> str:
        """How an operand is passed: as the "same" rows and columns, as "rows" that are picked, of
        as many columns, or as a vector of "elements"."""
        ways: list[At] = [at for s in self.group.steps if dict(s.attrs).get("kind") == "read"
                          and s.args[0] == name for at in dict(s.attrs)["at"]]
        size = prod(self.reads[name].shape)
        same = At(" + ".join(_identity(self.y.shape)))
        if size == self.R * self.C and all(
                (at.flat, at.guard) == (same.flat, same.guard) for at in ways):
            return "same"
        return "rows" if all(at.row for at in ways) else "elements"

    def source(self) -> KernelText:
        w, b, y = self.w, self.b, self.y
        w.line(f"m = tile.group_id(0) * {b.BM}")
        if not self.cut:
            w.line(f"n = tile.group_id(1) * {b.BN}")
        self.places()
        for s in self.group.steps:
            KINDS[dict(s.attrs).get("kind", "fold" if s.reduction else "op")](self, s)
        if y.name in b.held:
            self.store(self.columns(0), b.held[y.name])
        return w.finish_operands([self.passed(o) for o in w.operands])

    def columns(self, by: int) -> str:
        """The block's, so many further on."""
        if self.cut:
            return f"{by}:{by + self.b.BN}"
        begin = f"n + {by}" if by > 0 else f"n - {-by}" if by else "n"
        return f"{begin}:{begin}+{self.b.BN}"

    def store(self, columns: str, held: KernelValue) -> None:
        b, text = self.b, held.text
        if not (held.m or held.n):  # numbers alone have no type of their own
            text = f"tile.full({b.shape}, {text}, {self.w.type(self.y.type)})"
        elif (held.m, held.n) != (True, True):
            text = f"tile.broadcast({self.tall(held)}, {b.shape})"
        self.w.line(f"{capital(self.y.name)}[m:m+{b.BM}, {columns}] = {text}",
                    self.group.steps[-1])

    def parts(self, s: GroupStep) -> None:
        for i, name in enumerate(s.args):
            self.store(self.columns(i * self.width), self.b.held[name])

    def passed(self, o: GroupOperand) -> tuple[int, ...]:
        size, form = prod(o.shape), self.forms.get(o.name, "same")
        return {"same": (self.R, self.C), "rows": (size // self.C, self.C),
                "elements": (size,)}[form]

    def places(self) -> None:
        """Writes the places along the axes of the result that steps ask for."""
        w, R, shape = self.w, self.R, self.y.shape
        asked = " ".join(repr(v) for s in self.group.steps for k, v in s.attrs
                         if k in ("at", "condition"))
        kind = w.type(self.kind)
        if R > 1:
            w.line(f"r = tile.arange(0, {self.b.BM}, {kind}) + m")
        by = "" if self.cut else " + n"
        w.line(f"c = (tile.arange(0, {self.b.BN}, {kind}){by})[None, :]")
        for a, extent in enumerate(shape):
            if not re.search(rf"\bo{a}\b", asked):
                continue
            last = R > 1 and a == len(shape) - 1
            stride = 1 if last else prod(shape[a + 1:]) // (shape[-1] if R > 1 else 1)
            number = "c" if last or R == 1 else "r"
            text = f"{number} // {stride}" if stride > 1 else number
            text = f"{text} % {extent}" if not last and prod(shape[:a]) > 1 else text
            w.line(f"o{a} = {text}")
            self.axes[f"o{a}"] = (number == "r", number == "c")

    def varies(self, text: str) -> tuple[bool, bool]:
        found = [self.axes[a] for a in PLACES.findall(text)]
        return any(m for m, _ in found), any(n for _, n in found)

    def tile(self, text: str) -> str:
        """A text of places for what varies along rows and columns."""
        return PLACES.sub(lambda f: f"{f[0]}[:, None]" if self.axes[f[0]] == (True, False)
                          else f[0], text)

    def tall(self, v: KernelValue) -> str:
        return f"{v.text}[:, None]" if v.m and not v.n else v.text

    # --- steps --------------------------------------------------------------------------------
    def op(self, s: GroupStep) -> None:
        emit_step(self.w, self.b, s, self.texts[s.name])

    def fold(self, s: GroupStep) -> None:
        """The block's columns are the row, and zeros, or what is read there, behind it."""
        w, b, f, (x, *more) = self.w, self.b, ColumnReduction.of(s), s.args
        if not more and b.BN != self.C:
            w.line(f"{x}_in = tile.where(c < {self.C}, {self.tall(b.held[x])}, {f.neutral})", s)
            b.held[x] = KernelValue(f"{x}_in", b.held[x].m, True)
        for name in more:
            joined = combined(w, f, *(self.tall(b.held[v]) for v in (x, name)))
            w.line(f"{name}_in = {joined}", s)
            x = f"{name}_in"
            b.held[x] = KernelValue(x, True, True)
        whole = replace(f, step=replace(s, args=(x,)))
        w.line(f"{s.name} = {finished(w, f, fold_rows(w, b, whole))}", s)
        b.held[s.name] = KernelValue(s.name, True, False)

    def number(self, s: GroupStep) -> None:
        self.b.held[s.name] = KernelValue(dict(s.attrs)["number"], False, False)

    def index(self, s: GroupStep) -> None:
        held, name = self.b.held[s.args[0]], dict(s.attrs)["place"]
        text, made = held.text, next(t for t in self.group.steps if t.name == s.args[0])
        if made.op == "check_index" and made.type.dtype.bits == 64 > self.kind.dtype.bits:
            # It is below the extent: bits above say so, or the cast would look for its ends.
            mask = power(dict(made.attrs)["extent"]) - 1
            text = f"tile.cast({text} & {mask}, {self.w.type(self.kind)})"
        self.w.line(f"{name} = {text}", s)
        self.axes[name] = (held.m, held.n)

    def read(self, s: GroupStep) -> None:
        ways, (x,), b = dict(s.attrs)["at"], s.args, self.b
        if not isinstance(x, str):
            b.held[s.name] = KernelValue(literal(x, s.type.dtype.kind), False, False)
            return
        X = capital(x)
        if self.forms[x] == "same":
            text, m, n = f"tile.load({X}[m:m+{b.BM}, n:n+{b.BN}])", True, True
        elif self.forms[x] == "rows":
            row = self.place([(at.row_guard, at.row) for at in ways], True, False)
            columns, m, n = self.columns(ways[0].shift), True, True
            text = f"tile.gather({X}[:, {columns}], {row})"
            if row == self.own_row:
                text = f"tile.load({X}[m:m+{b.BM}, {columns}], fill=0)"
            elif row == f"r * 0 + {ways[0].row}":  # one for all
                text, m = f"tile.load({X}[{ways[0].row}, {columns}], fill=0)[None, :]", False
        else:
            m, n = self.varies(" ".join(f"{at.flat} {at.guard}" for at in ways))
            flat = self.place([(at.guard, at.flat) for at in ways], m, n)
            text = f"tile.gather({X}, {flat})" if m or n else f"{X}[{flat}]"
        self.w.line(f"{s.name} = {text}", s)
        b.held[s.name] = KernelValue(s.name, m, n)

    def place(self, ways: list[tuple[str, str]], m: bool, n: bool) -> str:
        """The place of the first way whose guard holds, -1 where none does, in a tile that varies
        along rows and columns."""
        text = "-1"
        for guard, at in reversed(ways):
            if m or n:
                at, guard = (self.tile(t) if m and n else t for t in (at, guard))
                if not any(self.varies(at)):
                    at = f"{'c' if n else 'r'} * 0 + {at}"
            text = f"tile.where({guard}, {at}, {text})" if guard else at
        return text

    def choose(self, s: GroupStep) -> None:
        condition, (one, other) = dict(s.attrs)["condition"], (self.b.held[a] for a in s.args)
        m, n = self.varies(condition)
        m, n = m or one.m or other.m, n or one.n or other.n
        texts = [self.tall(v) if n else v.text for v in (one, other)]
        condition = self.tile(condition) if n else condition
        self.w.line(f"{s.name} = tile.where({condition}, {', '.join(texts)})", s)
        self.b.held[s.name] = KernelValue(s.name, m, n)


KINDS = {"op": _Computed.op, "fold": _Computed.fold, "number": _Computed.number,
         "index": _Computed.index, "read": _Computed.read, "choice": _Computed.choose,
         "parts": _Computed.parts}
PLACES = re.compile(r"\b[oi]\d+\b")


def _identity(shape: tuple[int, ...]) -> list[str]:
    """The text of a place in row-major order, as sums have it."""
    out = []
    for a, n in enumerate(shape):
        stride = prod(shape[a + 1:])
        if n > 1:
            out.append(f"o{a} * {stride}" if stride > 1 else f"o{a}")
    return out


kernel_kind("computed", "elementwise", computed_source, schedule_computed, [COMPUTED])

__all__ = ["computed_block", "computed_source", "schedule_computed"]
