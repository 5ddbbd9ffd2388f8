"""The steps of a partitioned graph: ops on parts, and moves of a value between layouts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

from tessera.errors import SourceLine
from tessera.graph.ir import Graph, Node, Value, node_effects
from tessera.graph.simplify import KEEP_EFFECTS
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..layout import Layout
from ..partition import extents
from .layout_changes import Hop
from .narrow_terms import wide_terms
from .overlap import asked
from .split_slices import crossed

Held = tuple[Value, Layout]  # a value as it lies somewhere
# Ops that say how a value is to lie. rule(node, layouts of its operands) -> its layout
CONSTRAINTS: dict[str, Callable[[Node, Sequence[Layout]], Layout]] = {}


@dataclass(frozen=True)
class ExchangeStep:
    """An op that itself sends parts of its operands from rank to rank.

    plan(step) -> its collectives, none when it needs none in these layouts
    run(step, parts, rank) -> its results on one rank, where it has collectives
    """

    plan: Callable[[PartitionedOp], Sequence[PlannedCollective]]
    run: Callable[[PartitionedOp, Sequence[Tensor], int], tuple[Tensor, ...]]


EXCHANGES: dict[str, ExchangeStep] = {}


@dataclass(frozen=True, eq=False)
class PartitionedOp:
    """An op on parts: its operands in these layouts, its results in those.

    bodies: the graphs that it holds, each a propagate.Propagated
    placed: elements that a rank gets from others, when boxes are put in their place
    (split_slices.py)
    """

    node: Node
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    bodies: tuple[Any, ...] = ()
    placed: float | None = None

    @property
    def makes(self) -> tuple[Held, ...]:
        return tuple(zip(self.node.outputs, self.outs, strict=True))

    @property
    def times(self) -> int:
        """How often the bodies run, as far as the program says."""
        return int(self.node.attrs.get("length", 1)) if self.bodies else 1


@dataclass(frozen=True, eq=False)
class LayoutHop:
    """One hop of a value. anew: it is gathered for each use, as a parameter of ts.dist.fsdp.
    blocks: of NCCL's, for which a matmul that begins with it leaves multiprocessors; 0: as many as
    NCCL likes, and none does.
    """

    value: Value
    hop: Hop
    why: str
    where: SourceLine | None
    anew: bool = False
    blocks: int = 0


@dataclass(frozen=True, eq=False)
class Together:
    """Moves of several values over the same axes, all of one kind, in one exchange."""

    moves: tuple[LayoutHop, ...]


@dataclass(frozen=True, eq=False)
class CutProduct:
    """A matmul in parts, beside the collective of its first operand, which then is a step of its
    own, or of its result (cut_products.py). shares: how large parts are, beside each other.
    before: of the result before it is reduced, of each part. behind: of the reduced result alone.
    halves: of an all_reduce that is rounded between them (rounded_sums.py), or whose terms are
    narrow: of the first half the terms alone have to lie in windows.
    """

    product: PartitionedOp
    move: LayoutHop
    shares: tuple[int, ...]
    behind: tuple[PartitionedOp, ...]
    halves: tuple[Hop, Hop] | None = None
    before: tuple[PartitionedOp, ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether its collective is that of its first operand."""
        return self.move.hop.kind == "all_gather"

    def __str__(self) -> str:
        even = len(set(self.shares)) == 1
        return f"{len(self.shares)} parts" + (
            "" if even else f" ({':'.join(map(str, self.shares))})")

    @property
    def moves(self) -> tuple[LayoutHop, ...]:
        """What is sent: a move, or its halves."""
        if self.halves is None:
            return (self.move,)
        scatter, gather = (replace(self.move, hop=hop) for hop in self.halves)
        return scatter, replace(gather, value=self.makes[0][0])

    @property
    def makes(self) -> tuple[Held, ...]:
        if self.behind:
            return self.behind[-1].makes
        return self.product.makes if self.gathers else ((self.move.value, self.move.hop.target),)

    @property
    def reads(self) -> list[Held]:
        own = [(self.move.value, self.move.hop.source)] if self.gathers else []
        return [*own, *zip(self.product.node.inputs, self.product.ins, strict=True)]


Step = PartitionedOp | LayoutHop | Together | CutProduct


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a partitioned program.

    elements: of the whole values   bytes: that a rank receives from others, on average
    times: in a scan, how many iterations do it   beside: with `ts.overlap`, how many ops of the
    program lie between its beginning and the first that waits for it; None without
    parts: in which it goes beside the matmul whose result it is, or its rows are multiplied
    by: between GPUs, "nccl", "windows" of it, or "host", of copies there; "" between hosts, and
    before it is known
    inside: a loop or a branch has it
    blocks: of NCCL's that send it, beside matmuls that take longer (few_blocks.py); 0: as many as
    NCCL likes
    wide: the type in which narrow terms are sent between GPUs without windows; "" where they have
    their own   sent: that, where they are
    """

    op: str
    axes: tuple[str, ...]
    bytes: int
    elements: int
    dtype: str
    why: str
    where: SourceLine | None = None
    times: int = 1
    beside: int | None = None
    by: str = ""
    parts: str = ""
    inside: bool = False
    blocks: int = 0
    wide: str = ""
    sent: str = ""

    def __str__(self) -> str:
        line = f"    # {self.where}" if self.where else ""
        often = f", {self.times} times" if self.times != 1 else ""
        beside = f" beside {self.beside} ops" if self.beside is not None else ""
        by = {"nccl": " through NCCL", "windows": " through NCCL, in windows",
              "host": " through the host"}.get(self.by, "")
        few = f" by {self.blocks} blocks" if self.blocks and self.by in ("nccl", "windows") else ""
        parts = f" in {self.parts} beside its matmul" if self.parts else ""
        sent = f" as {self.sent}" if self.sent else ""
        return (f"{self.op} over {', '.join(self.axes)}: {self.bytes} bytes{sent}{often}{parts}"
                f"{beside}{by}{few}, "
                f"{self.why}{line}")


class CollectivePlan(tuple):
    """The collectives of a program in order; prints one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no collectives"

    __repr__ = __str__

    @property
    def bytes(self) -> int:
        return sum(c.bytes * c.times for c in self)


def planned(steps: Iterable[Step]) -> CollectivePlan:
    """The collectives among steps, in held graphs too; a slice sends nothing."""
    found: list[PlannedCollective] = []
    steps = list(steps)
    beside_own = {s.move: str(s) for s in steps if isinstance(s, CutProduct) and s.gathers}
    for i, step in enumerate(steps):
        if isinstance(step, CutProduct):
            if not step.gathers:
                found += (replace(_planned((move,)), parts=str(step)) for move in step.moves)
            continue
        if isinstance(step, PartitionedOp):
            found += own_exchanges(step)
            found += (replace(c, times=c.times * step.times, inside=True)
                      for body in step.bodies for c in planned(body.steps))
            if step.placed:
                found.append(_planned_collective(step, step.placed))
            continue
        moves = step.moves if isinstance(step, Together) else \
            (step,) if isinstance(step, LayoutHop) else ()
        if moves and moves[0].hop.kind not in ("slice", "term"):
            early = isinstance(step, LayoutHop) and asked(step.where, step.hop)
            beside = _ops_in_flight(steps, i) if early else None
            found.append(replace(_planned(moves), beside=beside,
                                 parts=beside_own.get(moves[0], "")))
    return CollectivePlan(found)


def _ops_in_flight(steps: Sequence[Step], i: int) -> int:
    """How many ops lie between a move and the first step that reads what it brings."""
    move, count = steps[i], 0
    assert isinstance(move, LayoutHop)
    for step in steps[i + 1:]:
        if (move.value, move.hop.target) in reads(step):
            break
        count += isinstance(step, PartitionedOp) and step.node.op.name not in CONSTRAINTS
    return count


def own_exchanges(step: PartitionedOp) -> Sequence[PlannedCollective]:
    """What an op exchanges by itself."""
    own = EXCHANGES.get(step.node.op.name)
    return own.plan(step) if own is not None else ()


def _planned(moves: Sequence[LayoutHop]) -> PlannedCollective:
    first = moves[0]
    size = sum(m.hop.received * m.value.aval.dtype.bits / 8 for m in moves)
    elements = sum(prod(extents(m.value.aval)) for m in moves)
    why = first.why if len(moves) == 1 else f"{first.why}, and {len(moves) - 1} more"
    return PlannedCollective(first.hop.kind, first.hop.axes, round(size), elements,
                             str(first.value.aval.dtype), why, first.where, wide=_wide(first),
                             blocks=first.blocks if first.hop.source.pending else 0)


def _wide(move: LayoutHop) -> str:
    own, at = move.value.aval.type, move.hop.source
    if not at.pending or at.op is None:
        return ""
    wide = wide_terms(own, at.op, at.mesh.size(move.hop.axes))
    return "" if wide == own else str(wide)


def _planned_collective(step: PartitionedOp, elements: float) -> PlannedCollective:
    node, out = step.node, step.outs[0]
    axes = crossed(node, step.ins, out)
    aval = node.outputs[0].aval
    return PlannedCollective("permute", axes, round(elements * aval.dtype.bits / 8),
                             prod(extents(aval)), str(aval.dtype),
                             f"{node.op.name} gives {aval} as {out.describe()}", node.where)


def remove_dead(steps: Sequence[Step], outputs: Sequence[Held]) -> list[Step]:
    """Without steps whose results nothing reads, unless they have an effect."""
    live, kept = set(outputs), []
    for step in reversed(steps):
        acts = isinstance(step, PartitionedOp) and node_effects(step.node) & KEEP_EFFECTS
        if live.isdisjoint(makes(step)) and not acts:
            continue
        kept.append(step)
        live.update(reads(step))
    return kept[::-1]


# --- moves that can wait for each other ----------------------------------------------------------
BUCKET_BYTES = 32 << 20
# Between hosts: of what travels in one message with others though no all_reduce, and of these.
SHORT_BYTES, SHORT_BUCKET_BYTES = 256 << 10, 4 << 20
# Between GPUs. On two H100s an all_reduce of 34 MB in a step of GPT-2 350M takes 240 us, one of 940
# MB 3 ms, and has multiprocessors meanwhile (2026-11-25, benchmarks/mesh_step.py, tp_matmul.py).
GPU_BUCKET_BYTES = 128 << 20


class _Bucket:
    """Moves that wait for more of their kind, and the constraints on their results.
    place: where they go, behind the last of them."""

    def __init__(self) -> None:
        self.moves: list[LayoutHop] = []
        self.after: list[PartitionedOp] = []
        self.place: list[Step] = []

    @property
    def bytes(self) -> int:
        return sum(map(_bytes, self.moves))

    def steps(self) -> list[Step]:
        first: Step = self.moves[0] if len(self.moves) == 1 else Together(tuple(self.moves))
        return [first, *self.after]


def merge_waiting(steps: Sequence[Step], most_bytes: int = BUCKET_BYTES,
                  kinds: Container[str] = ("all_reduce",), longest: float = inf) -> list[Step]:
    """Moves of a kind over the same axes, of at most `longest` bytes each, in one exchange behind
    the last of them: those that come before a result is read, up to so many bytes together. Many
    small messages cost more than one. What has as many alone takes along what is less than a
    quarter of it; more does not wait for it."""
    out: list[list[Step]] = []
    buckets: dict[tuple, _Bucket] = {}
    where: dict[Held, tuple] = {}  # the bucket that a value waits in

    def flush(key: tuple) -> None:
        bucket = buckets.pop(key)
        bucket.place += bucket.steps()
        for held in [h for h, k in where.items() if k == key]:
            del where[held]

    def stay(key: tuple) -> _Bucket:
        bucket = buckets.setdefault(key, _Bucket())
        bucket.place = []
        out.append(bucket.place)
        return bucket

    for step in steps:
        keys = list(dict.fromkeys(where[held] for held in reads(step) if held in where))
        if isinstance(step, PartitionedOp) and step.node.op.name in CONSTRAINTS and keys:
            first = where.get((step.node.inputs[0], step.ins[0]))
            if first is not None and keys == [first]:
                stay(first).after.append(step)
                where[step.node.outputs[0], step.outs[0]] = first
                continue
        for key in keys:
            flush(key)
        if not (isinstance(step, LayoutHop) and step.hop.kind in kinds) or \
                asked(step.where, step.hop) or _bytes(step) > longest:
            out.append([step])
            continue
        hop = step.hop
        key = (hop.kind, hop.axes, hop.source.op, str(step.value.aval.type))
        if key in buckets and most_bytes <= _bytes(step) <= 4 * buckets[key].bytes:
            flush(key)
        stay(key).moves.append(step)
        where[step.value, step.hop.target] = key
        if buckets[key].bytes >= most_bytes:
            flush(key)
    for key in list(buckets):
        flush(key)
    return [step for place in out for step in place]


def _bytes(move: LayoutHop) -> int:
    return prod(extents(move.value.aval)) * move.value.aval.dtype.bits // 8


def makes(step: Step) -> Sequence[Held]:
    """The values of a step, as they lie behind it."""
    if isinstance(step, PartitionedOp | CutProduct):
        return step.makes
    moves = step.moves if isinstance(step, Together) else (step,)
    return [(m.value, m.hop.target) for m in moves]


def reads(step: Step) -> list[Held]:
    """The values that it takes, as they lie."""
    if isinstance(step, CutProduct):
        return step.reads
    if isinstance(step, PartitionedOp):
        return list(zip(step.node.inputs, step.ins, strict=True))
    moves = step.moves if isinstance(step, Together) else (step,)
    return [(m.value, m.hop.source) for m in moves]


def describe(graph: Graph, steps: Sequence[Step], inputs: Sequence[Held], outputs: Sequence[Held],
             indent: str = "  ") -> str:
    """The program as text: every value with its layout, every collective where it happens."""
    names: dict[Value, str] = {}

    def name(v: Value, layout: Layout) -> str:
        own = names.setdefault(v, f"%{len(names)}")
        return f"{own}{layout.describe()}"

    lines = [f"{indent}{name(v, at)}: {v.aval} = input" for v, at in inputs]
    for step in steps:
        if isinstance(step, PartitionedOp):
            args = ", ".join(name(v, at) for v, at in zip(step.node.inputs, step.ins, strict=True))
            outs = ", ".join(f"{name(v, at)}: {v.aval}"
                             for v, at in zip(step.node.outputs, step.outs, strict=True))
            where = f"    # {step.node.where}" if step.node.where else ""
            lines.append(f"{indent}{outs} = {step.node.op.name}({args}){where}")
            lines += (describe(b.graph, b.steps, b.inputs, b.outputs, indent + "  ")
                      for b in step.bodies)
            continue
        if isinstance(step, CutProduct):
            args = ", ".join(name(v, at) for v, at in step.reads)
            lines.append(f"{indent}{name(*step.makes[0])} = {step.move.hop} beside "
                         f"matmul({args}) in {step}    # {step.move.why}")
            continue
        for m in step.moves if isinstance(step, Together) else (step,):
            lines.append(f"{indent}{name(m.value, m.hop.target)} = {m.hop}"
                         f"({name(m.value, m.hop.source)})    # {m.why}")
    lines.append(f"{indent}return " + ", ".join(name(v, at) for v, at in outputs))
    return "\n".join(lines)
