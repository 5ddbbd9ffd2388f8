"""What each sort of scan keeps of a part of a line, and how it combines two parts."""

from __future__ import annotations

from collections.abc import Callable

from ....lazy_dataclass import dataclass
from ....numerics import DType, as_type
from .extrema import beyond, compared, compared_type, least
from .kernel_text import KernelWriter
from .spell import literal

SEGMENT = 16  # elements of a line that a thread walks at a time
State = list[str]
F32, F64, INT32 = as_type("f32").dtype, as_type("f64").dtype, as_type("int32").dtype


@dataclass(frozen=True)
class Scan:
    """kept: types of the parts of a state.  none: the state of nothing.  combine: of a part of the
    line and the one behind it.  lift: the state of one element, from operands and place.  part:
    which of the parts is the result.  next: of a part that begins the line and one element, where
    that is another text.  alone: elements whose blocks are walked one element after another.  rows:
    the tile ops of a block and of its total, and what joins them.  costly: whether to combine takes
    longer than to read: no thread does it for several columns of all segments.
    """

    kept: Callable[[DType], tuple[DType, ...]]
    none: Callable[[DType], State]
    combine: Callable[[DType, State, State], State]
    lift: Callable[[KernelWriter, DType, State, str], State]
    part: int = 0
    next: Callable[[DType, State, State], State] | None = None
    alone: Callable[[State], str] | None = None
    rows: tuple[str, str, str] | None = None
    costly: bool = False


def _wide(dtype: DType) -> DType:
    return F64 if dtype.kind == "float" else dtype


def _unchanged_state(w: KernelWriter, dtype: DType, xs: State, at: str) -> State:
    return xs


def _widened(w: KernelWriter, dtype: DType, xs: State, at: str) -> State:
    return xs if _wide(dtype) is dtype else _in_f64(w, dtype, xs, at)


def _in_f64(w: KernelWriter, dtype: DType, xs: State, at: str) -> State:
    return [f"tile.cast({x}, {w.type(as_type('f64'))})" for x in xs]


def _add_exponentials(dtype: DType, a: State, b: State) -> State:
    """log(e^a + e^b): equal ones differ by 0, infinities too."""
    (x,), (y,) = a, b
    apart = f"tile.where({x} == {y}, 0.0, tile.abs({x} - {y}))"
    return [f"(tile.maximum({x}, {y}) + tile.log1p(tile.exp(-{apart})))"]


def _recur(dtype: DType, p: State, q: State) -> State:
    """h -> a h + b. A product of finite factors may overflow where h is 0, and gives 0 then."""
    grown = f"{q[0]} * {p[1]}"
    if dtype.kind == "float":
        grown = f"tile.where(({p[1]} == 0.0) & tile.isinf({q[0]}), 0.0, {grown})"
    return [f"({p[0]} * {q[0]})", f"({grown} + {q[1]})"]


def _recur_once(dtype: DType, p: State, q: State) -> State:
    return [p[0], f"({q[0]} * {p[1]} + {q[1]})"]


def _factor_and_term(w: KernelWriter, dtype: DType, xs: State, at: str) -> State:
    """Nothing stands before the first element: its factor does nothing."""
    factor, term = _widened(w, dtype, xs, at)
    return [f"tile.where({at} == 0, {literal(1, dtype.kind)}, {factor})", term]


def _arg_extremum_scan(way: str) -> Scan:
    def combine(dtype: DType, a: State, b: State) -> State:
        new = beyond(compared_type(dtype), way, b[0], a[0])
        return [f"tile.where({new}, {y}, {x})" for x, y in zip(a, b, strict=True)]

    return Scan(kept=lambda d: (compared_type(d), INT32),
                none=lambda d: [least(compared_type(d), way), "0"], combine=combine,
                lift=lambda w, d, xs, at: [compared(w, d, xs[0]), at], part=1)


SCANS: dict[str, Scan] = {
    "running sum": Scan(
        kept=lambda d: (_wide(d),), none=lambda d: [literal(0, d.kind)],
        combine=lambda d, a, b: [f"({a[0]} + {b[0]})"], lift=_widened,
        rows=("cumsum", "row_sum", "+")),
    "running prod": Scan(
        kept=lambda d: (d,), none=lambda d: [literal(1, d.kind)],
        combine=lambda d, a, b: [f"({a[0]} * {b[0]})"], lift=_unchanged_state,
        rows=("cumprod", "row_prod", "*")),
    "running logsumexp": Scan(
        kept=lambda d: (F64,), none=lambda d: ["-inf"], combine=_add_exponentials, lift=_in_f64,
        costly=True),
    "running recurrence": Scan(
        kept=lambda d: (_wide(d), _wide(d)), combine=_recur, lift=_factor_and_term,
        none=lambda d: [literal(1, d.kind), literal(0, d.kind)], part=1, next=_recur_once,
        alone=lambda s: f"tile.isinf({s[0]})"),  # what comes of inf h depends on h
    "running largest": _arg_extremum_scan("largest"),
    "running smallest": _arg_extremum_scan("smallest"),
}


def column_states(lines: str, dtype: DType) -> tuple[DType, ...]:
    """The types of states within a round, where few are combined one after another: for sums that
    are carried on in f64 f32 is enough."""
    narrow = lines == "running sum" and dtype.kind == "float" and dtype.bits <= 32
    return (F32,) if narrow else SCANS[lines].kept(dtype)


__all__ = ["F32", "F64", "SCANS", "SEGMENT", "Scan", "State", "column_states"]
