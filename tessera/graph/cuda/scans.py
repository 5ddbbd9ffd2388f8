"""Kernels of running sums, products, extrema, log-sum-exps and linear recurrences along an axis.

A tensor is seen as [A, T, C] around the axis; it has A C lines of T elements. Where there are many
lines a thread walks down each, in the order of the CPU. A long line among few has a group of its
own, which combines a block at a time in log2(block) rounds and carries the last of it on; the order
is then another, and the same at each run. So it is of sums and products of lines that are rows of
memory, of which a group has a block and carries its total on.
"""

from __future__ import annotations

from collections.abc import Callable

from ...lazy_dataclass import dataclass
from ...numerics import DType, as_type
from ..ir import Node
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.groups import FusionGroup
from ..schedule.ir import ScheduledGroup
from ..schedule.loop_axes import extents_of
from .choose_schedule import blocks, chosen, power
from .extrema import beyond, compared, compared_type, least
from .gathers import around
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG
from .spell import literal, stored_as

LINES = 2048  # from so many on each is a thread's
SHORT = 256  # elements of a line that a thread walks down in any case
BLOCK = 1024  # elements of a line that a group combines at once
# Of rows of memory: elements of a group, eight in each lane; in longer rows more of them.
ROW_BLOCK, LONG_ROW, LONG_BLOCK = 1024, 4096, 4096

State = list[str]
F64, INT32 = as_type("f64").dtype, as_type("int32").dtype


@dataclass(frozen=True)
class Scan:
    """kept: types of the parts of a state.  none: the state of nothing.  combine: of a part of the
    line and the one behind it.  lift: the state of one element, from operands and place.  part:
    which of the parts is the result.  next: of a part that begins the line and one element, where
    that is another text.  alone: elements whose blocks are walked one element after another.  rows:
    the tile ops of a block and of its total, and what joins them.
    """

    kept: Callable[[DType], tuple[DType, ...]]
    none: Callable[[DType], State]
    combine: Callable[[DType, State, State], State]
    lift: Callable[[KernelWriter, DType, State, str], State]
    part: int = 0
    next: Callable[[DType, State, State], State] | None = None
    alone: Callable[[State], str] | None = None
    rows: tuple[str, str, str] | None = None


def _wide(dtype: DType) -> DType:
    return F64 if dtype.kind == "float" else dtype


def _plain(w: KernelWriter, dtype: DType, xs: State, at: str) -> State:
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


def _place(way: str) -> Scan:
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
        combine=lambda d, a, b: [f"({a[0]} * {b[0]})"], lift=_plain,
        rows=("cumprod", "row_prod", "*")),
    "running logsumexp": Scan(
        kept=lambda d: (F64,), none=lambda d: ["-inf"], combine=_add_exponentials, lift=_in_f64),
    "running recurrence": Scan(
        kept=lambda d: (_wide(d), _wide(d)), combine=_recur, lift=_factor_and_term,
        none=lambda d: [literal(1, d.kind), literal(0, d.kind)], part=1, next=_recur_once,
        alone=lambda s: f"tile.isinf({s[0]})"),  # what comes of inf h depends on h
    "running largest": _place("largest"),
    "running smallest": _place("smallest"),
}


def schedule_scan(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    A, T, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
    if are_rows(node.op.lines, node.inputs[0].aval.dtype, C):
        _schedule_rows(builder, node, A, T)
        return
    walked = A * C >= LINES or T <= SHORT
    n = min(power(A * C), 128) if walked else min(power(T), BLOCK)
    s = chosen(None, n, warps=max(1, n // (32 if walked else 128)))
    reads = {v: builder.operand(v, (A, T, C)) for v in builder.reads(group)}
    builder.add("scan", (A, T, C), list(reads.values()),
                [builder.operand(node.outputs[0], (A, T, C))],
                [builder.step(node, shape=(A, T, C))], s,
                (blocks(A * C, n) if walked else A * C,), scan=node.op.lines, walked=walked)


def are_rows(lines: str, dtype: DType, C: int) -> bool:
    """Whether lines are rows of memory, and states numbers of a type that tiles add as they are."""
    scan = SCANS[lines]
    return C == 1 and scan.rows is not None and all(
        d.compute is d and d.bits >= 32 for d in scan.kept(dtype))


def _schedule_rows(builder: ScheduleBuilder, node: Node, A: int, T: int) -> None:
    n = min(power(T), LONG_BLOCK if T >= LONG_ROW else ROW_BLOCK)
    m = min(power(A), max(1, ROW_BLOCK // n))
    s = chosen(m, n, warps=max(1, m * n // (256 if n <= ROW_BLOCK else 512)))
    builder.add("scan", (A, T, 1), [builder.operand(node.inputs[0], (A, T))],
                [builder.operand(node.outputs[0], (A, T))], [builder.step(node, shape=(A, T))], s,
                (blocks(A, m),), scan=node.op.lines, walked=False)


def scan_source(group: ScheduledGroup) -> KernelText:
    if group.schedule.m is not None:
        return _scan_rows(group)
    w, (A, T, C) = KernelWriter(group), group.space
    kind = w.type(as_type("int64" if A * T * C >= LONG else "int32"))
    (_walk if group.attr("walked") else _combine_blocks)(w, group, kind)
    operands = (*group.reads, *group.writes)
    texts = [f"{capital(o.name)}: {w.annotation(o, (A * T * C,))}" for o in operands]
    return w.finish(texts, f"(grid={group.grid})", [(A * T * C,)] * len(operands))


@dataclass
class _Writer:
    """The statements of a scan's kernel: its states are variables s0, s1, ..."""

    w: KernelWriter
    group: ScheduledGroup

    def __post_init__(self) -> None:
        (self.step,), self.scan = self.group.steps, SCANS[self.group.attr("scan")]
        read = {o.name: o.type for o in self.group.reads}
        types = [read[a] for a in self.step.args if isinstance(a, str)]
        self.dtype = (types or [self.step.type])[0].dtype  # of operands, which have one type
        kept = self.scan.kept(self.dtype)
        self.kept = kept
        self.types = [self.w.type(as_type(d.name)) for d in kept]
        self.narrow = [d.compute is not d or d.bits < 32 for d in kept]

    def let(self, names: State, texts: State) -> None:
        """All at once: what is on the right is read before."""
        new = [f"{n}_new" for n in names]
        for n, t, kind, dtype, narrow in zip(new, texts, self.types, self.kept, self.narrow,
                                             strict=True):
            self.w.line(f"{n} = " + (stored_as(t, dtype, kind) if narrow else t), self.step)
        for n, t in zip(names, new, strict=True):
            self.w.line(f"{n} = {t}", self.step)

    def names(self, letter: str) -> State:
        return [f"{letter}{i}" for i in range(len(self.types))]

    def load(self, names: State, address: str, at: str) -> None:
        """The states of the elements at these addresses; at: their places in the line."""
        held = [f"x{i}" for i in range(len(self.step.args))]
        for x, arg in zip(held, self.step.args, strict=True):
            text = f"tile.gather({capital(arg)}, {address})" if isinstance(arg, str) else (
                f"tile.cast({at} * 0, {self.w.type(as_type(self.dtype))}) + "
                f"{literal(arg, self.dtype.kind)}")  # one number all along
            self.w.line(f"{x} = {text}", self.step)
        self.let(names, self.scan.lift(self.w, self.dtype, held, at))

    def store(self, names: State, address: str) -> None:
        (y,) = self.group.writes
        made = f"tile.cast({names[self.scan.part]}, {self.w.type(y.type)})"
        self.w.line(f"tile.scatter({capital(y.name)}, {address}, {made})", self.step)

    def combine(self, a: State, b: State) -> State:
        return self.scan.combine(self.dtype, a, b)

    def next(self, a: State, b: State) -> State:
        """b: of one element, behind all before it."""
        return (self.scan.next or self.scan.combine)(self.dtype, a, b)

    @property
    def may_walk(self) -> bool:
        return self.scan.alone is not None and self.dtype.kind == "float"


def _walk(w: KernelWriter, group: ScheduledGroup, kind: str) -> None:
    """A line for each thread. Lines behind the last are outside of the tensors."""
    (_, T, C), BN, s = group.space, group.schedule.n, _Writer(w, group)
    own, here = s.names("s"), s.names("e")
    w.line(f"p = tile.arange(0, {BN}, {kind}) + tile.group_id(0) * {BN}")
    w.line(f"line = p // {C} * {T * C} + p % {C}", s.step)
    zeros = w.type(as_type("int32"))
    w.line(f"zero = tile.zeros(({BN},), {zeros})", s.step)
    s.load(own, "line", "zero")
    s.store(own, "line")
    with w.block(f"for t in range(1, {T}):"):
        w.line(f"at = line + t * {C}", s.step)
        s.load(here, "at", "(zero + t)")
        s.let(own, s.next(own, here))
        s.store(own, "at")


def _combine_blocks(w: KernelWriter, group: ScheduledGroup, kind: str) -> None:
    """A line for each group: blocks of it, one after another."""
    (_, T, C), BN, s = group.space, group.schedule.n, _Writer(w, group)
    own, left, carry, shared = (s.names(c) for c in ("s", "l", "c", "m"))
    w.line(f"line = tile.group_id(0) // {C} * {T * C} + tile.group_id(0) % {C}")
    w.line(f"i = tile.arange(0, {BN})")
    for m, c, t, none in zip(shared, carry, s.types, s.scan.none(s.dtype), strict=True):
        w.line(f"{m} = tile.alloc_shared(({BN},), {t})", s.step)
        w.line(f"{c} = tile.full(({BN},), {none}, {t})", s.step)
    with w.block(f"for n in range(0, {T}, {BN}):"):
        w.line(f"at = tile.where(i + n < {T}, tile.cast(i + n, {kind}) * {C} + line, -1)", s.step)
        s.load(own, "at", "(i + n)")
        if s.may_walk:
            assert s.scan.alone is not None
            alone = f"tile.where({s.scan.alone(own)}, 1.0, 0.0)"
            with w.block(f"if tile.reduce_max({alone}) > 0.0:"):
                _walk_block(s, own, carry, shared, BN)
            with w.block("else:"):
                _combine_block(s, own, left, carry, shared, BN)
        else:
            _combine_block(s, own, left, carry, shared, BN)
        s.store(own, "at")
        _exchange(s, own, carry, shared, f"i * 0 + {BN - 1}")


def _combine_block(s: _Writer, own: State, left: State, carry: State, shared: State, BN: int
                   ) -> None:
    """In log2(BN) rounds."""
    for round_ in range(BN.bit_length() - 1):
        _exchange(s, own, left, shared, f"i - {1 << round_}")
        made = s.combine(left, own)
        s.let(own, [f"tile.where(i >= {1 << round_}, {m}, {o})"
                    for m, o in zip(made, own, strict=True)])
    s.let(own, s.combine(carry, own))


def _walk_block(s: _Writer, own: State, carry: State, shared: State, BN: int) -> None:
    """One element after another: all lanes compute the same, and each keeps its own."""
    for m, x in zip(shared, own, strict=True):
        s.w.line(f"tile.scatter({m}, i, {x})", s.step)
    s.w.line("tile.barrier()", s.step)
    here = s.names("e")
    with s.w.block(f"for j in range(0, {BN}):"):
        for m, x in zip(shared, here, strict=True):
            s.w.line(f"{x} = tile.gather({m}, i * 0 + j)", s.step)
        s.let(carry, s.next(carry, here))
        for o, c in zip(own, carry, strict=True):
            s.w.line(f"{o} = tile.where(i == j, {c}, {o})", s.step)
    s.w.line("tile.barrier()", s.step)


def _scan_rows(group: ScheduledGroup) -> KernelText:
    """Blocks of rows, one after another along them; what all before have made is carried on."""
    w, (A, T, _), s = KernelWriter(group), group.space, SCANS[group.attr("scan")]
    (step,), (x,), (y,), BM, BN = (group.steps, group.reads, group.writes, group.schedule.m,
                                   group.schedule.n)
    assert s.rows is not None
    (kept,), (none,), (scan, total, join) = s.kept(x.type.dtype), s.none(x.type.dtype), s.rows
    kind = w.type(as_type(kept.name))
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"carry = tile.full(({BM}, 1), {none}, {kind})")
    with w.block(f"for n in range(0, {T}, {BN}):"):
        w.line(f"x = tile.cast(tile.load({capital(x.name)}[m:m+{BM}, n:n+{BN}], fill={none}), "
               f"{kind})", step)
        w.line(f"{capital(y.name)}[m:m+{BM}, n:n+{BN}] = "
               f"tile.cast(carry {join} tile.{scan}(x), {w.type(y.type)})", step)
        w.line(f"carry = carry {join} tile.{total}(x)", step)
    texts = [f"{capital(o.name)}: {w.annotation(o, (A, T))}" for o in (x, y)]
    return w.finish(texts, f"(grid={group.grid})", [(A, T)] * 2)


def _exchange(s: _Writer, own: State, other: State, shared: State, at: str) -> None:
    """What other lanes have."""
    for m, o in zip(shared, own, strict=True):
        s.w.line(f"tile.scatter({m}, i, {o})", s.step)
    s.w.line("tile.barrier()", s.step)
    for m, x in zip(shared, other, strict=True):
        s.w.line(f"{x} = tile.gather({m}, {at})", s.step)
    s.w.line("tile.barrier()", s.step)


__all__ = ["SCANS", "are_rows", "scan_source", "schedule_scan"]
