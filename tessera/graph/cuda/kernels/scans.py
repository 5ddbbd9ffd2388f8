"""Kernels of running sums, products, extrema, log-sum-exps and linear recurrences along an axis.

A tensor is seen as [A, T, C] around the axis; it has A C lines of T elements. Where there are very
many lines a thread walks down each, in the order of the CPU. Else the threads of a group share the
lines of some columns: each walks a segment of a line twice, once for its total, once behind the
totals of the segments before it; of several columns where they fill an access of 16 bytes and
segments come out even. A long line that is a row of memory has a group of its own, which
combines a block at a time in log2(block) rounds and carries the last of it on. Sums and products
of rows of memory go by blocks of rows. But for the first the order is then another, and the same
at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ....lazy_dataclass import dataclass
from ....numerics import DType, as_type
from ....tile.ir.schedule import Schedule
from ...ir import Node, Value
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.loop_axes import Frame, extents_of
from ..choose_schedule import blocks, chosen, power
from .extrema import beyond, compared, compared_type, least
from .gathers import around
from .group_statements import FrameBlock, emit_step, value
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import templates
from .searches import LONG
from .spell import literal, stored_as

LINES = 2048  # from so many on each is a thread's
SHORT = 256  # elements of a line that a thread walks down in any case
# Lines of columns that a group shares: fewer than MANY in all, COLUMNS of them at most, as few as a
# sector of memory holds where the card has GROUPS to run; SHARERS threads, of SEGMENT elements.
MANY, COLUMNS, FEW_COLUMNS, GROUPS, SHARERS, SEGMENT = 2**19, 32, 8, 128, 512, 16
# Of columns that fill an access: bits of a row of a block, elements of a segment at least, warps.
# In two, four and eight warps sums over axis 1 of [64, 2048, 512] of bf16 take 81.1 us, 84.1 and
# 82.7, a recurrence down [8, 2048, 4096] of f32 250, 266 and 310; in rows of half as many bits 102
# and 297, in segments of half as many elements 86.6 and 293 (H200, 2026-11-27, in turn).
LINE_BITS, LEAST_SEGMENT, COLUMN_WARPS = 1024, 4, 2
BLOCK = 1024  # elements of a line that a group combines at once
# Of rows of memory: elements of a group, eight in each lane; in longer rows more of them.
ROW_BLOCK, LONG_ROW, LONG_BLOCK = 1024, 4096, 4096

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
        kept=lambda d: (F64,), none=lambda d: ["-inf"], combine=_add_exponentials, lift=_in_f64,
        costly=True),
    "running recurrence": Scan(
        kept=lambda d: (_wide(d), _wide(d)), combine=_recur, lift=_factor_and_term,
        none=lambda d: [literal(1, d.kind), literal(0, d.kind)], part=1, next=_recur_once,
        alone=lambda s: f"tile.isinf({s[0]})"),  # what comes of inf h depends on h
    "running largest": _place("largest"),
    "running smallest": _place("smallest"),
}


# --- which groups are one -----------------------------------------------------------------------
def join_scans(groups: Sequence[FusionGroup], results: Sequence[Value]) -> list[FusionGroup]:
    """The groups, with the loops that make what a scan alone reads as part of it, where it goes by
    tiles. results: of the graph"""
    maker = {v: g for g in groups for v in g.outputs}
    count = dict.fromkeys(results, 1)
    for v in (v for g in groups for v in g.inputs):
        count[v] = count.get(v, 0) + 1
    gone, out = set[int](), list[FusionGroup]()
    for group in groups:
        if group.kind == "scan":
            front = [maker[v] for v in group.inputs if count[v] == 1 and v in maker]
            if front and (made := _with_loops(group, front, maker)) is not None:
                gone.update(map(id, front))
                group = made
        out.append(group)
    return [g for g in out if id(g) not in gone]


def _with_loops(group: FusionGroup, front: Sequence[FusionGroup], maker: dict[Value, FusionGroup]
                ) -> FusionGroup | None:
    (node,) = group.nodes
    space = extents_of(node.inputs[0])
    inside = {v for g in front for v in g.outputs}
    reads = list(dict.fromkeys(v for g in (*front, group) for v in g.inputs if v not in inside))
    whole = [v for v in reads if v.aval.ndim]
    plain = all(g.kind == "loop" and g.batch is None and len(g.outputs) == 1 and not any(
        n.op.beside or n.op.makes or n.op.effects or n.op.placed or n.op.name == "check_index"
        for n in g.nodes) for g in front)
    lies = all(extents_of(v) == space and (v not in maker or maker[v].kind not in ("view", "move"))
               for v in whole)
    if not plain or not lies or not _even_segments(node, around(space, node.attrs["axis"]),
                                                   len(whole)):
        return None
    return FusionGroup("scan", group.space, [*(n for g in front for n in g.nodes), node], reads,
                       group.outputs)


# --- blocks -------------------------------------------------------------------------------------
def schedule_scan(builder: ScheduleBuilder, group: FusionGroup) -> None:
    node = group.nodes[-1]
    A, T, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
    if (length := _even_segments(node, (A, T, C), len(builder.reads(group)))):
        _schedule_columns(builder, group, (A, T, C), length)
        return
    if _are_rows(node.op.lines, node.inputs[0].aval.dtype, C):
        _schedule_rows(builder, node, A, T)
        return
    if (shared := _shared_columns(A * C, T, C)) is not None:
        _schedule_segments(builder, group, (A, T, C), shared)
        return
    walked = A * C >= LINES or T <= SHORT
    n = min(power(A * C), 128) if walked else min(power(T), BLOCK)
    s = chosen(None, n, warps=max(1, n // (32 if walked else 128)))
    _add(builder, group, (A, T, C), s, blocks(A * C, n) if walked else A * C,
         form="thread" if walked else "group")


def _add(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
         schedule: Schedule, grid: int, form: str, **attrs: int) -> None:
    (node,) = group.nodes
    reads = [builder.operand(v, space) for v in dict.fromkeys(builder.reads(group))]
    builder.add("scan", space, reads, [builder.operand(node.outputs[0], space)],
                [builder.step(node, shape=space)], schedule, (grid,), scan=node.op.lines, form=form,
                **attrs)


def _shared_columns(count: int, T: int, C: int) -> int | None:
    """Lines that a group shares, in place of a thread for each, which has one element on its way
    from memory at a time: cumsum down [16384, 4096] of f32 takes 452 us so, and took 7183 (NVIDIA
    H200, 2026-11-27, `benchmarks/user_programs.py`). Where the forms meet was not measured."""
    if C == 1 or count >= MANY or T <= SEGMENT:
        return None
    return min(COLUMNS, max(FEW_COLUMNS, power(count // GROUPS)))


def _schedule_segments(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
                       columns: int) -> None:
    A, T, C = space
    n = columns * min(SHARERS // columns, power(blocks(T, SEGMENT)))
    _add(builder, group, space, chosen(None, n, warps=max(1, n // 32)), blocks(A * C, columns),
         form="segments", columns=columns)


def _even_segments(node: Node, space: tuple[int, int, int], operands: int) -> int:
    """The elements of a segment of lines that a group shares, of as many columns as fill an access;
    0 where these are too few, or lines have no even segments. operands: of all elements"""
    A, T, C = space
    if _shared_columns(A * C, T, C) is None or C % _vector(node) or SCANS[node.op.lines].costly:
        return 0
    most = SEGMENT // max(1, operands)
    return next((n for n in range(most, LEAST_SEGMENT - 1, -1) if T % n == 0), 0)


def _vector(node: Node) -> int:
    """Columns of which states fill 16 bytes."""
    kept = _column_states(node.op.lines, node.inputs[0].aval.dtype)
    return 128 // max(d.bits for d in (*kept, *(v.aval.dtype for v in node.outputs)))


def _column_states(lines: str, dtype: DType) -> tuple[DType, ...]:
    """The types of states within a round, where few are combined one after another: for sums that
    are carried on in f64 f32 is enough."""
    narrow = lines == "running sum" and dtype.kind == "float" and dtype.bits <= 32
    return (F32,) if narrow else SCANS[lines].kept(dtype)


def _schedule_columns(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
                      length: int) -> None:
    """As many segments at once as the threads of a group have, behind each other."""
    node = group.nodes[-1]
    (A, T, C), vector = space, _vector(node)
    bits = min(v.aval.dtype.bits for v in (*node.inputs, *node.outputs))
    n = min(power(C), LINE_BITS // bits)
    if n > vector and A * blocks(C, n) < 2 * GROUPS:
        n //= 2
    warps = COLUMN_WARPS if A * blocks(C, n) >= 4 * GROUPS else 2 * COLUMN_WARPS
    m = min(power(T // length), 32 * warps * vector // n)
    s = chosen(m, n, warps=max(1, m * n // (32 * vector))).with_vector(vector)
    reads = [builder.operand(v, space) for v in dict.fromkeys(builder.reads(group))]
    builder.add("scan", space, reads, [builder.operand(node.outputs[0], space)],
                [builder.step(n, shape=space) for n in group.nodes], s, (A, blocks(C, n)),
                scan=node.op.lines, form="columns", length=length)


def _are_rows(lines: str, dtype: DType, C: int) -> bool:
    """Whether lines are rows of memory, and states numbers of a type that tiles add as they are."""
    scan = SCANS[lines]
    return C == 1 and scan.rows is not None and all(
        d.compute is d and d.bits >= 32 for d in scan.kept(dtype))


def keeps_f64(lines: str, dtype: DType) -> bool:
    """Whether states are of f64, whatever is read or written."""
    return all(d is F64 for d in SCANS[lines].kept(dtype))


def _schedule_rows(builder: ScheduleBuilder, node: Node, A: int, T: int) -> None:
    n = min(power(T), LONG_BLOCK if T >= LONG_ROW else ROW_BLOCK)
    m = min(power(A), max(1, ROW_BLOCK // n))
    s = chosen(m, n, warps=max(1, m * n // (256 if n <= ROW_BLOCK else 512)))
    builder.add("scan", (A, T, 1), [builder.operand(node.inputs[0], (A, T))],
                [builder.operand(node.outputs[0], (A, T))], [builder.step(node, shape=(A, T))], s,
                (blocks(A, m),), scan=node.op.lines, form="rows")


def scan_source(group: ScheduledGroup) -> KernelText:
    if group.attr("form") == "rows":
        return _scan_rows(group)
    if group.attr("form") == "columns":
        return _scan_columns(group)
    w, (A, T, C) = KernelWriter(group), group.space
    kind = w.type(as_type("int64" if A * T * C >= LONG else "int32"))
    FORMS[group.attr("form")](w, group, kind)
    return w.finish_operands([(A * T * C,)] * len(w.operands))


@dataclass
class _Writer:
    """The statements of a scan's kernel: its states are variables s0, s1, ..."""

    w: KernelWriter
    group: ScheduledGroup

    def __post_init__(self) -> None:
        *_, self.step = self.group.steps
        self.scan = SCANS[self.group.attr("scan")]
        read = {o.name: o.type for o in self.group.reads}
        read |= {s.name: s.type for s in self.group.steps}
        types = [read[a] for a in self.step.args if isinstance(a, str)]
        self.dtype = (types or [self.step.type])[0].dtype  # of operands, which have one type
        kept = self.states()
        self.kept = kept
        self.types = [self.w.type(as_type(d.name)) for d in kept]
        self.narrow = [d.compute is not d or d.bits < 32 for d in kept]

    def states(self) -> tuple[DType, ...]:
        return self.scan.kept(self.dtype)

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
        self.gather(held, address)
        self.let(names, self.lift(held, at))

    def held_at(self, j: int) -> State:
        """Names of the operands' elements at a thread's j-th place."""
        return [f"x{j}_{i}" for i in range(len(self.step.args))]

    def gather(self, held: State, address: str) -> None:
        for x, arg in zip(held, self.step.args, strict=True):
            text = f"tile.gather({capital(arg)}, {address})" if isinstance(arg, str) else (
                f"tile.cast({address} * 0, {self.w.type(as_type(self.dtype))}) + "
                f"{literal(arg, self.dtype.kind)}")  # one number all along
            self.w.line(f"{x} = {text}", self.step)

    def store(self, names: State, address: str) -> None:
        (y,) = self.group.writes
        made = f"tile.cast({names[self.scan.part]}, {self.w.type(y.type)})"
        self.w.line(f"tile.scatter({capital(y.name)}, {address}, {made})", self.step)

    def lift(self, held: State, at: str) -> State:
        return self.scan.lift(self.w, self.dtype, held, at)

    def share(self, shared: State, own: State) -> None:
        """What each thread has to the others."""
        for m, o in zip(shared, own, strict=True):
            self.w.line(f"tile.scatter({m}, i, {o})", self.step)
        self.w.line("tile.barrier()", self.step)

    def take(self, shared: State, names: State, k: str) -> None:
        """What the threads of the k-th segment have shared."""
        columns = self.group.attr("columns")
        for m, e in zip(shared, names, strict=True):
            self.w.line(f"{e} = tile.gather({m}, i % {columns} + {k} * {columns})", self.step)

    @property
    def is_carried_wide(self) -> bool:
        """Whether states within a round are of a narrower type than what is carried on."""
        return self.kept != self.scan.kept(self.dtype)

    def for_all(self, name: str) -> str:
        """What is carried, for each segment."""
        return name

    @property
    def segments(self) -> int:
        """That a group has at once."""
        return self.group.schedule.n // self.group.attr("columns")

    def combine(self, a: State, b: State) -> State:
        return self.scan.combine(self.dtype, a, b)

    def next(self, a: State, b: State) -> State:
        """b: of one element, behind all before it."""
        return (self.scan.next or self.scan.combine)(self.dtype, a, b)

    @property
    def may_walk(self) -> bool:
        return self.scan.alone is not None and self.dtype.kind == "float"


@dataclass
class _ColumnWriter(_Writer):
    """Where states are tiles of segments and columns."""

    def states(self) -> tuple[DType, ...]:
        return _column_states(self.group.attr("scan"), self.dtype)

    def lift(self, held: State, at: str) -> State:
        if self.is_carried_wide:
            return [f"tile.cast({x}, {self.types[0]})" for x in held]
        return _Writer.lift(self, held, at)

    def place(self, j: int) -> str:
        """Of the j-th elements of segments."""
        S, BN = self.segments, self.group.schedule.n
        return f"[a, m:m+{S}, {j}, n:n+{BN}]"

    def load_all(self, held: State, j: int) -> None:
        """The elements at j-th places, and what is computed of them in front of the scan."""
        (A, T, C), length = self.group.space, self.group.attr("length")
        S, BN, texts = self.segments, self.group.schedule.n, templates(self.group)
        space = (A, T // length, length, C)
        b = FrameBlock(Frame(space, ((0,), (1,), (2,), (3,))), f"m:m+{S}", f"n:n+{BN}",
                       ("a", str(j)), S, BN,
                       {r.name: replace(r, shape=space) for r in self.group.reads},
                       suffix=f"_{j}", fill=", fill=0", along=-3)
        for step in self.group.steps[:-1]:
            emit_step(self.w, b, step, texts[step.name])
        for x, arg in zip(held, self.step.args, strict=True):
            text = value(self.w, b, arg, self.dtype.kind, self.step).text
            if not isinstance(arg, str):  # one number all along
                text = f"tile.full(({S}, {BN}), {text}, {self.w.type(as_type(self.dtype))})"
            self.w.line(f"{x} = {text}", self.step)

    def store(self, names: State, address: str) -> None:
        (y,) = self.group.writes
        self.w.line(f"{capital(y.name)}{address} = tile.cast({names[self.scan.part]}, "
                    f"{self.w.type(y.type)})", self.step)

    def share(self, shared: State, own: State) -> None:
        for m, o in zip(shared, own, strict=True):
            self.w.line(f"tile.store({m}, {o})", self.step)
        self.w.line("tile.barrier()", self.step)

    def take(self, shared: State, names: State, k: str) -> None:
        for m, e in zip(shared, names, strict=True):
            self.w.line(f"{e} = tile.load({m}[{k}:{k}+1, 0:{self.group.schedule.n}])", self.step)

    def for_all(self, name: str) -> str:
        return f"tile.broadcast({name}, ({self.segments}, {self.group.schedule.n}))"

    @property
    def segments(self) -> int:
        return self.group.schedule.m or 1


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


def _walk_segments(w: KernelWriter, group: ScheduledGroup, kind: str) -> None:
    """Some lines for each group, a segment of one for each thread: rounds of them along the lines.
    Elements behind the end of a line are 0, and nothing behind them is stored."""
    (A, T, C), BN, s = group.space, group.schedule.n, _Writer(w, group)
    columns = group.attr("columns")
    own, carry, before, shared = (s.names(c) for c in ("s", "c", "b", "m"))
    w.line(f"i = tile.arange(0, {BN})")
    w.line(f"segment = i // {columns}")
    w.line(f"p = tile.cast(i % {columns} + tile.group_id(0) * {columns}, {kind})")
    w.line(f"line = p // {C} * {T * C} + p % {C}", s.step)
    nothing = s.scan.none(s.dtype)
    for m, c, t, none in zip(shared, carry, s.types, nothing, strict=True):
        w.line(f"{m} = tile.alloc_shared(({BN},), {t})", s.step)
        w.line(f"{c} = tile.full(({BN},), {none}, {t})", s.step)
    with w.block(f"for n in range(0, {T}, {BN // columns * SEGMENT}):"):
        held = [s.held_at(j) for j in range(SEGMENT)]
        w.line(f"first = segment * {SEGMENT} + n")
        for j, names in enumerate(held):
            inside = f"(first + {j} < {T}) & (p < {A * C})"
            w.line(f"at{j} = tile.where({inside}, tile.cast(first + {j}, {kind}) * {C} + line, -1)")
            s.gather(names, f"at{j}")
        _find_before(s, held, own, carry, before, shared)
        for j, names in enumerate(held):
            s.let(own, s.lift(names, f"(first + {j})"))
            s.let(before, s.next(before, own))
            s.store(before, f"at{j}")


def _find_before(s: _Writer, held: list[State], own: State, carry: State, before: State,
                 shared: State) -> None:
    """What stands before each segment of a round, and behind the last."""
    w, here = s.w, s.names("e")
    if s.is_carried_wide:
        _add_totals(s, held, own, carry, before, shared)
        return
    for b, c in zip(before, carry, strict=True):
        w.line(f"{b} = {s.for_all(c)}", s.step)
    if not s.may_walk:
        _combine_totals(s, held, own, carry, before, shared)
        return
    assert s.scan.alone is not None
    w.line("alone = 0.0", s.step)
    for j, names in enumerate(held):
        s.let(here, s.lift(names, f"(first + {j})"))
        w.line(f"alone = tile.where({s.scan.alone(here)}, 1.0, alone)", s.step)
    with w.block("if tile.reduce_max(alone) > 0.0:"):
        _walk_in_turn(s, held, own, carry, before, shared)
    with w.block("else:"):
        _combine_totals(s, held, own, carry, before, shared)


def _combine_totals(s: _Writer, held: list[State], own: State, carry: State, before: State,
                    shared: State) -> None:
    w, there = s.w, s.names("t")
    _share_totals(s, held, own, shared)
    with w.block(f"for k in range(0, {s.segments}):"):
        s.take(shared, there, "k")
        for b, c in zip(before, carry, strict=True):
            w.line(f"{b} = tile.where(segment == k, {c}, {b})", s.step)
        s.let(carry, s.combine(carry, there))
    w.line("tile.barrier()", s.step)


def _add_totals(s: _Writer, held: list[State], own: State, carry: State, before: State,
                shared: State) -> None:
    """Those of a round by themselves, and behind what is carried on, in a wider type."""
    w, (c,), (b,), (kind,), (none,) = s.w, carry, before, s.types, s.scan.none(s.dtype)
    wide = w.type(as_type(s.scan.kept(s.dtype)[0].name))
    _share_totals(s, held, own, shared)
    w.line(f"total = tile.full((1, {s.group.schedule.n}), {none}, {kind})", s.step)
    w.line(f"{b} = {s.for_all('total')}", s.step)
    with w.block(f"for k in range(0, {s.segments}):"):
        s.take(shared, ["t0"], "k")
        w.line(f"{b} = tile.where(segment == k, total, {b})", s.step)
        s.let(["total"], s.combine(["total"], ["t0"]))
    s.let(before, s.combine([f"tile.cast({c}, {kind})"], before))
    w.line(f"{c} = {s.combine([c], [f'tile.cast(total, {wide})'])[0]}", s.step)
    w.line("tile.barrier()", s.step)


def _share_totals(s: _Writer, held: list[State], own: State, shared: State) -> None:
    here = s.names("e")
    s.let(own, s.lift(held[0], "first"))
    for j, names in enumerate(held[1:], start=1):
        s.let(here, s.lift(names, f"(first + {j})"))
        s.let(own, s.combine(own, here))
    s.share(shared, own)


def _walk_in_turn(s: _Writer, held: list[State], own: State, carry: State, before: State,
                  shared: State) -> None:
    """One segment after another, each behind what the one before it has come to."""
    w, here = s.w, s.names("e")
    with w.block(f"for k in range(0, {s.segments}):"):
        for b, c, o in zip(before, carry, own, strict=True):
            w.line(f"{b} = tile.where(segment == k, {c}, {b})", s.step)
            w.line(f"{o} = {s.for_all(c)}", s.step)
        for j, names in enumerate(held):
            s.let(here, s.lift(names, f"(first + {j})"))
            s.let(own, s.next(own, here))
        s.share(shared, own)
        s.take(shared, carry, "k")
        w.line("tile.barrier()", s.step)


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
    return w.finish_operands([(A, T)] * 2)


def _scan_columns(group: ScheduledGroup) -> KernelText:
    """Some columns for each group, runs of them in a segment for each thread: tiles of segments and
    columns, one for each element of a segment. Rounds of them go down the lines."""
    w, (A, T, C), length = KernelWriter(group), group.space, group.attr("length")
    S, BN, s = group.schedule.m or 1, group.schedule.n, _ColumnWriter(w, group)
    own, carry, before, shared = (s.names(c) for c in ("s", "c", "b", "m"))
    w.line("a = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    w.line(f"segment = tile.arange(0, {S})[:, None]")
    for m, c, t, wide, none in zip(shared, carry, s.types, s.scan.kept(s.dtype),
                                   s.scan.none(s.dtype), strict=True):
        w.line(f"{m} = tile.alloc_shared(({S}, {BN}), {t})", s.step)
        w.line(f"{c} = tile.full((1, {BN}), {none}, {w.type(as_type(wide.name))})", s.step)
    with w.block(f"for m in range(0, {T // length}, {S}):"):
        held = [s.held_at(j) for j in range(length)]
        w.line(f"first = (segment + m) * {length}")
        for j, names in enumerate(held):
            s.load_all(names, j)
        _find_before(s, held, own, carry, before, shared)
        if s.is_carried_wide:
            _store_sums(s, held, own, before)
        else:
            for j, names in enumerate(held):
                s.let(own, s.lift(names, f"(first + {j})"))
                s.let(before, s.next(before, own))
                s.store(before, s.place(j))
    return w.finish_operands([(A, T // length, length, C)] * len(w.operands))


def _store_sums(s: _ColumnWriter, held: list[State], own: State, before: State) -> None:
    """Those within a segment by themselves, which are rounded once at the size of the result."""
    here = s.names("e")
    for j, names in enumerate(held):
        s.let(here, s.lift(names, f"(first + {j})"))
        s.let(own, s.combine(own, here) if j else here)
        s.let(here, s.combine(before, own))
        s.store(here, s.place(j))


FORMS = {"thread": _walk, "segments": _walk_segments, "group": _combine_blocks}


def _exchange(s: _Writer, own: State, other: State, shared: State, at: str) -> None:
    """What other lanes have."""
    for m, o in zip(shared, own, strict=True):
        s.w.line(f"tile.scatter({m}, i, {o})", s.step)
    s.w.line("tile.barrier()", s.step)
    for m, x in zip(shared, other, strict=True):
        s.w.line(f"{x} = tile.gather({m}, {at})", s.step)
    s.w.line("tile.barrier()", s.step)


__all__ = ["SCANS", "join_scans", "keeps_f64", "scan_source", "schedule_scan"]
