"""Steps of a group as statements: operands are loaded where they are first used.

A value is a number for the group, a row of the block (BN,) as [1, BN], a column (BM,), or a tile;
which of them follows from the axes its operands lie along.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from math import prod
from types import MappingProxyType
from typing import Any

from ....lazy_dataclass import dataclass
from ....numerics import DType, as_type
from ...schedule.ir import HIDDEN, GroupOperand, GroupStep
from ...schedule.loop_axes import Frame, Pattern
from .kernel_text import KernelWriter, capital
from .spell import COMBINE, literal, stored_as

COLUMNS = "{columns}"  # the text of a step that gives the numbers of the columns
DISPLACED = re.compile(r"\{(\d) by (-?\d+)\}")  # an operand, and how much further on it is read
WORDS = re.compile(r"seed=\(\{(\d)\}, \{(\d)\}\)")  # of a key that is data


def depends_on_index(step: GroupStep) -> bool:
    """Whether it is elementwise by where an element stands, as random bits are."""
    text = dict(step.attrs).get("text", "")
    return "{index}" in text or "{place}" in text or text == COLUMNS


@dataclass(frozen=True)
class KernelValue:
    """A value in a kernel: its expression, and whether it varies along rows and columns."""

    text: str
    m: bool
    n: bool


@dataclass
class FrameBlock:
    """The block of a frame that a kernel works on, and what it holds of it.

    rows, columns: slices of two axes ("" for tiles of columns alone).  index: of the others.  The
    columns are those of the last axis, the rows of axis `along`, by default the one before it.
    """

    frame: Frame
    rows: str
    columns: str
    index: tuple[str, ...]
    BM: int
    BN: int
    operands: dict[str, GroupOperand]
    held: dict[str, KernelValue] = field(default_factory=dict)
    suffix: str = ""  # of names in a further pass over the same elements
    fill: str = ""  # of loads, where what lies beyond the edges counts nowhere
    ahead: int = 1  # blocks of rows that are under way, in a loop over them
    shared: dict[str, str] = field(default_factory=dict)  # blocks of operands there
    along: int = -2
    row: int = 0  # columns of a row, of a flat loop over rows; see loop_blocks.flat_rows

    @property
    def flat(self) -> bool:
        """Whether tiles have one axis."""
        return not self.rows

    @property
    def shape(self) -> str:
        return f"({self.BN},)" if self.flat else f"({self.BM}, {self.BN})"

    def pattern(self, operand: GroupOperand) -> Pattern:
        found = self.frame.pattern(operand.shape)
        assert found is not None, f"{operand} does not lie along {self.frame}"
        return tuple(p or e == 1 for p, e in zip(found, self.frame.extents, strict=True))

    def repeats(self, operand: GroupOperand) -> bool:
        """Whether it has a number for each row, or column, of a flat loop over rows."""
        return self.row > 0 and self.frame.pattern(operand.shape) is None

    def is_row(self, operand: GroupOperand) -> bool:
        """Whether that is a number for each column: it lies along the last axes, which these are.
        """
        space, last = self.frame.space, len(self.frame.space)
        while prod(space[last:]) < self.row:
            last -= 1
        return prod(operand.shape[last - len(space):]) == self.row

    def dims(self, operand: GroupOperand) -> tuple[int, ...]:
        """The extents in which an operand is passed: those that it lies along."""
        if self.repeats(operand):
            return (prod(operand.shape),)
        along = self.pattern(operand)
        return tuple(e for e, p in zip(self.frame.extents, along, strict=True) if p) or (1,)

    def place(self, operand: GroupOperand, by: Mapping[int, int] = MappingProxyType({})
              ) -> tuple[str, bool, bool]:
        """`V7[g0, m:m+8, n:n+64]`, and whether it has rows and columns. by: axes of the frame along
        which it lies further on, and how much; what is beyond the edges there may be anything."""
        along = self.pattern(operand)
        slices = [_shifted_span(s, by[a], self.frame.extents[a]) if a in by else s
                  for a, s in enumerate(self.slices)]
        parts = [s for s, p in zip(slices, along, strict=True) if p] or ["0"]
        m = not self.flat and along[self.along]
        return f"{capital(operand.name)}[{', '.join(parts)}]", m, along[-1]

    @property
    def slices(self) -> tuple[str, ...]:
        """By axis of the frame."""
        if self.flat:
            return *self.index, self.columns
        at = len(self.frame.members) + self.along
        return *self.index[:at], self.rows, *self.index[at:], self.columns

    @property
    def runs(self) -> bool:
        """Whether fours of numbers along the columns begin at multiples of four."""
        extents = self.frame.extents  # of a tile with one axis too, in rows that the grid counts
        return self.BN % 4 == 0 and (len(extents) == 1 or extents[-1] % 4 == 0)

    def column_numbers(self, kind: str) -> str:
        """Those of the block's columns."""
        text = f"(tile.arange(0, {self.BN}, {kind}) + {_start(self.columns)})"
        return text if self.flat else f"{text}[None, :]"

    def number_along(self, axis: int, kind: str) -> str:
        """Those of the block's elements along an axis of the frame."""
        last = len(self.frame.members) - 1
        if axis == last:
            return self.column_numbers(kind)
        if self.flat or axis != last + 1 + self.along:
            return _start(self.slices[axis])
        return f"(tile.arange(0, {self.BM}, {kind}) + {_start(self.rows)})[:, None]"

    def number(self, w: KernelWriter) -> str:
        """The numbers of the block's elements in the row-major order of the whole space."""
        extents, long = self.frame.extents, prod(self.frame.extents) >= 1 << 30
        kind = w.type(as_type("int64" if long else "int32"))
        columns = f"tile.arange(0, {self.BN}, {kind})"
        row = ""
        for at, extent in zip(map(_start, self.slices[:-1]), extents[:-1], strict=True):
            row = f"({row}) * {extent} + {at}" if row else f"tile.cast({at}, {kind})"
        if self.flat:
            before = f"({row}) * {extents[-1]} + " if row else ""
            return f"{before}{columns} + {_start(self.columns)}"
        apart = prod(extents[self.along + 1:-1])
        times = f" * {apart}" if apart > 1 else ""
        rows = f"(tile.arange(0, {self.BM}, {kind}){times} + {row})[:, None]"
        return f"{rows} * {extents[-1]} + ({columns} + {_start(self.columns)})[None, :]"


def _start(span: str) -> str:
    """Where a slice begins."""
    return span.partition(":")[0]


def _shifted_span(span: str, by: int, extent: int) -> str:
    """A slice, or an index, which stays one of the axis."""
    begin, colon, end = span.partition(":")
    sign = f"{'-' if by < 0 else '+'} {abs(by)}"
    if not colon:
        return f"tile.minimum(tile.maximum({span} {sign}, 0), {extent - 1})"
    return f"{begin} {sign}:{end} {sign}"


def value(w: KernelWriter, b: FrameBlock, arg: Any, kind: str, step: GroupStep) -> KernelValue:
    """An operand of a step: held already, a number, or loaded now."""
    if not isinstance(arg, str):
        return KernelValue(literal(arg, kind), False, False)
    if arg in b.held:
        return b.held[arg]
    operand = b.operands[arg]
    if b.repeats(operand):
        kind = w.type(as_type("uint32"))
        at = f"(tile.arange(0, {b.BN}, {kind}) + tile.cast({_start(b.columns)}, {kind}))"
        which = "%" if b.is_row(operand) else "//"
        w.line(f"{arg} = tile.gather({capital(arg)}, {at} {which} {b.row})", step)
        return b.held.setdefault(arg, KernelValue(arg, False, True))
    place, m, n = b.place(operand)
    name = arg + b.suffix
    ahead = f", prefetch={b.ahead}" if b.ahead > 1 and m and n else ""
    text = place if not (m or n) else f"tile.load({place}{b.fill}{ahead})"
    if arg in b.shared:
        text = f"tile.load({b.shared[arg]})"
    if n and not m and not b.flat:
        text += "[None, :]"
    w.line(f"{name} = {text}", step)
    b.held[arg] = KernelValue(name, m, n)
    return b.held[arg]


def _word(w: KernelWriter, b: FrameBlock, arg: str, step: GroupStep) -> KernelValue:
    """A word of a key, which is one number for a whole group, in a space of one element too."""
    along = sum(b.pattern(b.operands[arg])) if arg in b.operands else 0
    if not along:
        return value(w, b, arg, "int", step)
    name = f"{arg}_word{b.suffix}"
    if name not in b.held:
        w.line(f"{name} = {capital(arg)}[{', '.join('0' * along)}]", step)
        b.held[name] = KernelValue(name, False, False)
    return b.held[name]


def emit_step(w: KernelWriter, b: FrameBlock, step: GroupStep, template: str) -> None:
    """One elementwise step as a statement."""
    if "{place}" in template:
        w.line(f"{step.name + b.suffix} = {_displaced(w, b, step, template)}", step)
        b.held[step.name] = KernelValue(step.name + b.suffix, not b.flat, True)
        return
    kinds, words = dict(step.attrs)["kinds"], [int(i) for s in WORDS.findall(template) for i in s]
    args = [_word(w, b, a, step) if i in words and isinstance(a, str) else value(w, b, a, k, step)
            for i, (a, k) in enumerate(zip(step.args, kinds, strict=True))]
    m, n = any(a.m for a in args), any(a.n for a in args)
    texts = [a.text for a in args]
    if step.op == "check_index":
        attrs = dict(step.attrs)
        w.check_index(texts[0], attrs["extent"], step, attrs["wrap"], _beyond(w, b, m, n))
    if step.op == "div" and not b.flat and args[1].m and not args[1].n and n:
        texts[1] = f"tile.broadcast({texts[1]}, {b.shape})"  # 0 / 0 stays NaN, as in the graph
    known = {k: repr(v) for k, v in step.attrs if k not in HIDDEN}
    if template == COLUMNS:
        known["columns"], n = b.column_numbers(w.type(step.type)), True
    elif depends_on_index(step):
        known |= {"index": b.number(w), "runs": repr(b.runs)}
        m, n = not b.flat, True
    if "{to}" in template:
        known["to"] = w.type(step.type)
    text = template.format(*map(_bracketed, texts), **known)
    dtype = step.type.dtype
    if dtype.kind in ("int", "uint") and dtype.bits < 32 and "{to}" not in template:
        text = stored_as(text, dtype, w.type(as_type(dtype)))  # tiles compute it in 32 bits
    name = step.name + b.suffix
    w.line(f"{name} = {text}", step)
    b.held[step.name] = KernelValue(name, m, n)


def _beyond(w: KernelWriter, b: FrameBlock, m: bool, n: bool) -> str:
    """Which of the block's elements lie beyond the space, of a value that varies along rows (m),
    columns (n) or both; "" where none does."""
    kind, parts, extents = w.type(as_type("int32")), [], b.frame.extents
    if n and extents[-1] % b.BN:
        parts.append(f"({b.column_numbers(kind)} >= {extents[-1]})")
    if m and extents[b.along] % b.BM:
        rows = f"(tile.arange(0, {b.BM}, {kind}) + {_start(b.rows)})"
        parts.append(f"({rows}{'[:, None]' if n else ''} >= {extents[b.along]})")
    return " | ".join(parts)


def _displaced(w: KernelWriter, b: FrameBlock, step: GroupStep, template: str) -> str:
    """The expression of a step that reads its operands elsewhere, see displaced_reads.py."""
    axis = dict(step.attrs)["axis"]
    at = next(i for i, members in enumerate(b.frame.members) if axis in members)

    def load(found: re.Match[str]) -> str:
        arg, by = step.args[int(found[1])], int(found[2])
        name = f"{arg}_{'back' if by < 0 else 'on'}_{axis}_{abs(by)}{b.suffix}"
        if name not in b.held:
            w.line(f"{name} = tile.load({b.place(b.operands[arg], {at: by})[0]}, fill=0)", step)
            b.held[name] = KernelValue(name, not b.flat, True)
        return name

    return DISPLACED.sub(load, template).replace("{place}", b.number_along(
        at, w.type(as_type("int32"))))


def _bracketed(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def store(w: KernelWriter, b: FrameBlock, operand: GroupOperand, step: GroupStep | None) -> None:
    """A value into its tensor; one that does not vary along an axis is repeated."""
    held = b.held[operand.name]
    place, m, n = b.place(operand)
    text = held.text
    if (held.m, held.n) != (m, n) and (held.m or held.n):
        text = f"tile.broadcast({text}, {b.shape})"
    w.line(f"{place} = {text}", step)


# --- reductions -------------------------------------------------------------------------------
CHAIN = 128  # blocks whose f32 sums are added one after another in f32; more of them in f64


@dataclass(frozen=True)
class ColumnReduction:
    """A reduction over columns: sum | max | min | prod. Blocks are reduced in `kept`, and what they
    give is combined in `total`."""

    step: GroupStep
    way: str
    kept: DType
    source: DType
    total: DType

    @staticmethod
    def of(step: GroupStep, blocks: int = 1) -> ColumnReduction:
        kept = dict(step.attrs).get("accum", step.type.dtype)
        way = step.reduction
        long = way == "sum" and kept.name == "f32" and blocks > CHAIN
        return ColumnReduction(step, way, kept, step.type.dtype, as_type("f64").dtype if long
                               else kept)

    @property
    def neutral(self) -> str:
        """The value that changes nothing."""
        if self.kept.kind == "float" or self.way in ("sum", "prod"):
            text = COMBINE[self.way][1]
            return text if self.kept.kind == "float" else text.split(".")[0]
        return str(int(self.kept.min if self.way == "max" else self.kept.max))


def reduction_source(w: KernelWriter, b: FrameBlock, fold: ColumnReduction) -> str:
    """The elements of a block that are reduced, in the type in which they are."""
    (arg,) = fold.step.args
    held = value(w, b, arg, fold.source.kind, fold.step)
    text = held.text if held.m and held.n else f"tile.broadcast({held.text}, {b.shape})"
    return text if fold.kept is fold.source else f"tile.cast({text}, {_partial_type(w, fold)})"


def fold_rows(w: KernelWriter, b: FrameBlock, fold: ColumnReduction) -> str:
    """The expression of a block's row statistic."""
    return f"tile.row_{fold.way}({reduction_source(w, b, fold)})"


def finished(w: KernelWriter, fold: ColumnReduction, text: str) -> str:
    """A statistic in the type of the step."""
    return text if fold.total is fold.source else f"tile.cast({text}, {w.type(fold.step.type)})"


def _partial_type(w: KernelWriter, fold: ColumnReduction) -> str:
    return _named(w, fold.kept)


def _named(w: KernelWriter, dtype: DType) -> str:
    w.scope[dtype.name] = dtype
    return dtype.name


def combined(w: KernelWriter, fold: ColumnReduction, a: str, b: str) -> str:
    """A running total `a` and what a block gave."""
    if fold.total is not fold.kept:
        b = f"tile.cast({b}, {_named(w, fold.total)})"
    return COMBINE[fold.way][0].format(a, b)


def start(w: KernelWriter, fold: ColumnReduction, shape: str) -> str:
    return f"tile.full({shape}, {fold.neutral}, {_named(w, fold.total)})"


__all__ = ["COLUMNS", "FrameBlock", "ColumnReduction", "KernelValue", "combined", "emit_step",
           "finished",
           "fold_rows", "reduction_source", "depends_on_index", "start", "store", "value"]
