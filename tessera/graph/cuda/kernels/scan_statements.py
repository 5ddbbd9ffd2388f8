"""The statements of kernels of scans, in each of the forms of scans.py."""

from __future__ import annotations

from dataclasses import replace

from ....lazy_dataclass import dataclass
from ....numerics import DType, as_type
from ...schedule.ir import ScheduledGroup
from ...schedule.loop_axes import Frame
from .group_statements import FrameBlock, KernelValue, emit_step, store, value
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import maker, templates
from .scan_kinds import SCANS, SEGMENT, State, column_states
from .scans import schedule_scan
from .searches import LONG
from .spell import literal, stored_as


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
        return column_states(self.group.attr("scan"), self.dtype)

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
    """Blocks of rows, one after another along them; what all before have made is carried on. Loops
    in front and behind are part of it where blocks end with the rows."""
    w, (A, T, _), s = KernelWriter(group), group.space, SCANS[group.attr("scan")]
    step, BM, BN = group.steps[group.attr("scanned")], group.schedule.m or 1, group.schedule.n
    types = {o.name: o.type for o in group.reads} | {g.name: g.type for g in group.steps}
    (arg,) = step.args
    dtype = types[arg].dtype
    assert s.rows is not None
    (kept,), (none,), (scan, total, join) = s.kept(dtype), s.none(dtype), s.rows
    kind, texts = w.type(as_type(kept.name)), templates(group)
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"carry = tile.full(({BM}, 1), {none}, {kind})")
    b = FrameBlock(Frame((A, T), ((0,), (1,))), f"m:m+{BM}", f"n:n+{BN}", (), BM, BN,
                   {r.name: r for r in group.reads}, fill=f", fill={none}" if T % BN else "")
    with w.block(f"for n in range(0, {T}, {BN}):"):
        for g in group.steps:
            if g is not step:
                emit_step(w, b, g, texts[g.name])
                continue
            w.line(f"x = tile.cast({value(w, b, arg, dtype.kind, step).text}, {kind})", step)
            w.line(f"{step.name} = tile.cast(carry {join} tile.{scan}(x), {w.type(step.type)})",
                   step)
            w.line(f"carry = carry {join} tile.{total}(x)", step)
            b.held[step.name] = KernelValue(step.name, True, True)
        for o in group.writes:
            store(w, b, o, maker(group, o.name))
    return w.finish_operands([(A, T)] * len(w.operands))


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


kernel_kind("scan", "reduction", scan_source, schedule_scan)
