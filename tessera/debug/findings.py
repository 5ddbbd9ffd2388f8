"""What a sentinel found: one bad value with its operands, and counters per op and line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace

import numpy as np

from ..dims import show_shape
from ..errors import NumericsError, SourceLine
from ..graph.iterations import iterations
from ..lazy_dataclass import dataclass
from ..mesh.ranks.launcher import rank_of_program
from ..numerics import CastCounts, DType, decode
from ..tensor import Tensor


def values_of(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Stored elements as numbers NumPy can test."""
    return decode(array, dtype) if dtype.kind == "float" else array


@dataclass(frozen=True, eq=False)
class SavedCall:
    """An op or kernel with what it was given. run: of inputs by name, results by name."""

    name: str
    inputs: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]

    def kept(self) -> SavedCall:
        """With inputs that nobody else writes."""
        return replace(self, inputs={n: Tensor(t.array.copy(), t.type)
                                     for n, t in self.inputs.items()})


@dataclass(frozen=True)
class BadValue:
    """The first bad element of one result.

    kind     "nan" or "inf"
    origin   False when an operand held NaN already: it came in with the data
    operands one line each: type and shape, range, and the element beside the bad one
    graph    the compiled function it ran in, or None outside of one
    run      how many calls of compiled functions this thread had begun with a sentinel on
    step     of ts.random
    iterations  (loop, number) of the loops that it ran in, the outermost first; numbers from 0
    hint     what the op's record advises
    rank     of a program of several processes, else 0
    sources  the arguments of the graph that it was computed of, where they are few; where an
             operand held NaN already, or infinities of which NaN came, those that brought it
    whole    of a rank's part: the place in the whole tensor, and its shape
    """

    op: str
    where: SourceLine | None
    kind: str
    value: float
    index: tuple[int, ...]
    count: int
    size: int
    result: str
    operands: tuple[str, ...]
    origin: bool
    graph: str | None
    run: int
    step: int
    hint: str = ""
    rank: int = field(default_factory=rank_of_program)
    iterations: tuple[tuple[str, int], ...] = field(default_factory=iterations)
    saved: SavedCall | None = field(default=None, repr=False, compare=False)
    sources: tuple[str, ...] = ()
    whole: str = ""

    @property
    def name(self) -> str:
        """The op, and the one whose gradient it is part of: that one stands on the user's line."""
        of = self.where.of if self.where is not None else ""
        return f"{self.op} in the gradient of {of}" if of else self.op

    @property
    def label(self) -> str:
        """The op when it made the value, "data into op" when an operand brought it."""
        return self.op if self.origin else f"data into {self.op}"

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        at += f" ({self.whole} on the mesh)" if self.whole else ""
        head = (f"{self.name}: {self.value} in {self.result}{at}, "
                f"{self.count} of {self.size} elements")
        brought = " and ".join(self.sources) or "the data"
        cause = f"an operand held it already: it came in with {brought}"
        if self.origin:
            cause = "no operand held nan" if self.kind == "nan" else "all operands were finite"
        place = f"in {self.graph}, call {self.run}" if self.graph else "outside compiled functions"
        lines = [f"{head}; {cause}", *(f"  {line}" for line in self.operands)]
        if self.origin and self.sources:
            lines.append(f"  computed of {', '.join(self.sources)}")
        place += "".join(f", iteration {i} of {loop}" for loop, i in self.iterations)
        rank = f", rank {self.rank}" if self.rank else ""
        return "\n".join([*lines, f"  {place}, random step {self.step}{rank}"])

    def error(self) -> NumericsError:
        hint = self.hint if self.origin else "look at the arguments and captured tensors"
        error = NumericsError(str(self), hint=hint or None, where=self.where)
        error.finding = self
        error.located = self.where is not None  # in a kernel that is a node: its own line
        return error


def describe_operand(name: str, array: np.ndarray, dtype: DType, index: tuple[int, ...],
                     shape: tuple[int, ...]) -> str:
    """`operand 0: f32[2, 3], -1.0 to 4.0, there -1.0`: `there` where the shapes broadcast."""
    values = values_of(array, dtype)
    text = f"{name}: {dtype}{show_shape(array.shape)}"
    if dtype.kind != "float":
        return text
    finite = values[np.isfinite(values)]
    if finite.size:
        text += f", {_number(finite.min())} to {_number(finite.max())}"
    for word, count in (("nan", int(np.isnan(values).sum())), ("inf", int(np.isinf(values).sum()))):
        text += f", {count} {word}" if count else ""
    try:
        there = np.broadcast_to(values, shape)[index]
    except ValueError:
        return text
    return f"{text}, there {_number(there)}"


def _number(x: np.floating) -> str:
    """Six digits; all where six would show an integer that it is not: acos(1.0000001) is NaN."""
    text = f"{x:.6g}"
    return text if "." in text or "e" in text or float(text) == x else f"{x!s}"


def describe_operands(operands: Sequence[tuple[np.ndarray, DType]], index: tuple[int, ...],
                      shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(
        describe_operand(f"operand {i}", a, d, index, shape) for i, (a, d) in enumerate(operands)
    )


@dataclass(frozen=True)
class Flags:
    """Counters of one period, and its first bad value. Falsy when nothing was seen.

    counts   {(op, "file:line  text"): CastCounts}: overflow, underflow and subnormal of casts, and
             the elements that the op made NaN or infinite; those of "data into op" came with the
             arguments. Elements are counted where they arise, not in the results they reach.
    """

    first: BadValue | None = None
    counts: dict[tuple[str, str], CastCounts] = field(default_factory=dict)

    @property
    def total(self) -> CastCounts:
        return sum(self.counts.values(), CastCounts())

    @property
    def overflow(self) -> int:
        return self.total.overflow

    @property
    def underflow(self) -> int:
        return self.total.underflow

    @property
    def nan(self) -> int:
        return self.total.nan

    @property
    def inf(self) -> int:
        return self.total.inf

    @property
    def subnormal(self) -> int:
        return self.total.subnormal

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.counts)

    def __str__(self) -> str:
        if not self:
            return "numerics: nothing to report"
        names = ("overflow", "underflow", "nan", "inf", "subnormal")
        totals = " ".join(f"{n} {getattr(self, n)}" for n in names)
        lines = [f"numerics: {totals} (elements, at the op where they arose)"]
        for (op, where), c in self.counts.items():
            seen = ", ".join(f"{n} {getattr(c, n)}" for n in names if getattr(c, n))
            lines.append(f"  {op}: {seen}   {where}")
        if self.first is not None:
            lines.append(f"first {'made' if self.first.origin else 'met'} by {self.first}")
            lines.append(f"  at {self.first.where}")
        return "\n".join(lines)
