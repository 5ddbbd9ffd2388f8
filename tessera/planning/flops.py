"""What a graph computes and moves: operations and bytes of each unit that runs, and who is alive.

    work = count_graph(graph)              a list of UnitWork, one for each loop or library call
    held = peak_memory(graph)              bytes by role at the moment when most is held

A multiply-add is two operations. Bytes are those of global memory: a fused loop reads its inputs
and writes its results once, a view moves nothing.

The graph says in which type an op computes: bf16 operands are widened to f32 before a matmul. A
device's matmul reads them as they are stored, so a widening cast is free here and the matmul is
one of bf16; and a matmul that is only read by a narrowing cast is written in the narrow type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import prod

from tessera.dims import Dim, show_shape
from tessera.errors import ArgumentError, SourceLine
from tessera.graph.cpu.target import CPU
from tessera.graph.expand import rule_graph
from tessera.graph.ir import Graph, Node, Value, readers_of, subgraphs
from tessera.graph.schedule.fuse import fuse
from tessera.graph.schedule.groups import FusionGroup
from tessera.numerics import DType, f32, row_bytes

from ..lazy_dataclass import dataclass
from .fabric import DeviceModel

Shape = tuple[int, ...]


@dataclass(frozen=True)
class UnitWork:
    """One unit of a graph on one rank.

    matmuls: operations of matmuls by the type of the operands   other: all further ones
    bytes: read and written   times: how often it runs (in a loop)
    """

    name: str
    matmuls: tuple[tuple[DType, float], ...]
    other: float
    bytes: float
    where: SourceLine | None = None
    times: float = 1.0

    @property
    def flops(self) -> float:
        """All its operations, over all times that it runs."""
        return self.times * (sum(n for _, n in self.matmuls) + self.other)


def global_shape(value: Value) -> Shape:
    """The extents of a value; its own, not a rank's. Raises ArgumentError for symbolic ones."""
    if any(isinstance(d, Dim) for d in value.aval.shape):
        raise ArgumentError(f"a plan needs extents, {value.aval.type}"
                            f"{show_shape(value.aval.shape)} has symbols",
                            hint="trace the function for types with numbers: Tensor[32, 128, f32]")
    return value.aval.shape  # type: ignore[return-value]


def bytes_of(shape: Sequence[int], dtype: DType) -> int:
    """Bytes of a tensor, packed rows included."""
    if not shape:
        return row_bytes(1, dtype)
    return prod(shape[:-1]) * row_bytes(shape[-1], dtype)


# --- how values are stored ------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredTypes:
    """The type in which each value lies in memory, and the value in whose memory it lies.

    literals: numbers and ranges, made where they are needed
    written: casts of results of matmuls, which are written in that type
    """

    dtypes: dict[Value, DType]
    owners: dict[Value, Value]
    literals: set[Value]
    written: set[Node] = field(default_factory=set)

    def dtype(self, v: Value) -> DType:
        return self.dtypes.get(v, v.aval.dtype)

    def owner(self, v: Value) -> Value:
        return self.owners.get(v, v)

    def size(self, v: Value) -> int:
        return 0 if self.owner(v) in self.literals else bytes_of(global_shape(v), self.dtype(v))


def storage_of(graph: Graph) -> StoredTypes:
    """Views and widening casts lie in what they are of; see above for matmuls."""
    made = StoredTypes({}, {}, {v for n in graph.nodes if n.op.free for v in n.outputs})
    readers = readers_of(graph)
    kept = set(graph.outputs)
    for node in graph.nodes:
        if node.op.name == "matmul" and node.outputs[0] not in kept:
            rounds = readers.get(node.outputs[0], [])
            if len(rounds) == 1 and rounds[0].op.name == "cast":
                made.dtypes[node.outputs[0]] = rounds[0].outputs[0].aval.dtype
                made.owners[rounds[0].outputs[0]] = node.outputs[0]
                made.written.add(rounds[0])
        if _is_alias(node):
            source, v = node.inputs[0], node.outputs[0]
            made.owners[v] = made.owner(source)
            made.dtypes[v] = made.dtype(source)
    return made


def _is_alias(node: Node) -> bool:
    if node.op.view:
        return True
    if node.op.name != "cast":
        return False
    source, to = node.inputs[0].aval.dtype, node.outputs[0].aval.dtype
    return source.kind == to.kind == "float" and source.bits < to.bits


# --- operations of an op --------------------------------------------------------------------------
def _operations(node: Node, stored: StoredTypes) -> tuple[dict[DType, float], float]:
    """(matmuls by type, other operations) of one node; one for each element of an elementwise op
    and of those that have no rule of their own."""
    outputs = tuple(map(global_shape, node.outputs))
    if (rule := node.op.operations) is not None:
        flops = rule(tuple(map(global_shape, node.inputs)), outputs, **node.attrs)
        return ({_operand(node, stored): flops}, 0.0) if node.op.matmul else ({}, flops)
    if node.op.expand is not None:
        return _opened(node, stored)
    return {}, float(sum(map(prod, outputs)))


def _operand(node: Node, stored: StoredTypes) -> DType:
    """The wider of the types in which the two operands of a matmul are stored."""
    return max(map(stored.dtype, node.inputs[:2]), key=lambda t: t.bits)


def _opened(node: Node, stored: StoredTypes) -> tuple[dict[DType, float], float]:
    """Of an op that is a chain of others. What is one unit is a kernel, which multiplies in the
    type of its operands."""
    inner = count_graph(rule_graph(node))
    matmuls: dict[DType, float] = {}
    for work in inner:
        for dtype, count in work.matmuls:
            kind = min(dtype, _operand(node, stored), key=lambda t: t.bits)
            matmuls[kind] = matmuls.get(kind, 0.0) + count
    return matmuls, sum(w.other for w in inner)


# --- units ----------------------------------------------------------------------------------------
def count_graph(graph: Graph) -> list[UnitWork]:
    """The work of every loop and library call of a graph, in order; views and constants apart."""
    return [work for _, works in works_of(graph) for work in works]


def works_of(graph: Graph) -> list[tuple[FusionGroup, list[UnitWork]]]:
    """All units of a graph, in order, with their work."""
    stored = storage_of(graph)
    return [(unit, _unit_work(unit, stored)) for unit in fuse(graph, CPU)]


def _unit_work(unit: FusionGroup, stored: StoredTypes) -> list[UnitWork]:
    nodes = unit.nodes
    if unit.call is not None:
        op = unit.call.op
        if op.graph_attrs:
            return _nested(unit.call)
        if op.free or ("collective" in op.effects and not op.matmul):
            return []
    if all(_is_alias(n) or n in stored.written for n in nodes):
        return []
    matmuls: dict[DType, float] = {}
    other = 0.0
    for node in nodes:
        made, more = _operations(node, stored)
        other += more
        for dtype, count in made.items():
            matmuls[dtype] = matmuls.get(dtype, 0.0) + count
    return [UnitWork(_name(unit), tuple(matmuls.items()), other, _moved_bytes(unit, stored),
                     nodes[-1].where)]


def _name(unit: FusionGroup) -> str:
    if unit.call is not None:
        return unit.call.op.name
    names = list(dict.fromkeys(n.op.name for n in unit.nodes))
    return "loop " + " ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _moved_bytes(unit: FusionGroup, stored: StoredTypes) -> float:
    gathers = unit.call is not None and unit.call.op.picks
    read = sum(stored.size(v) for v in unit.inputs[1 if gathers else 0:])
    written = sum(stored.size(v) for v in unit.outputs if stored.owner(v) is v)
    return read + written * (2 if gathers else 1)


def _nested(node: Node) -> list[UnitWork]:
    """Of an op that holds graphs: a scan's body as often as it runs, the costlier branch of a
    cond, one iteration of a while_loop (how many there are depends on data), any other's first
    graph."""
    graphs = [count_graph(g) for g in subgraphs(node)]
    if node.op.name == "cond":
        return max(graphs, key=lambda works: sum(w.flops for w in works))
    times = float(node.attrs["length"]) if node.op.name == "scan" else 1.0
    held = graphs if node.op.name == "while_loop" else graphs[:1]
    return [UnitWork(w.name, w.matmuls, w.other, w.bytes, w.where, w.times * times)
            for works in held for w in works]


# --- who is alive ---------------------------------------------------------------------------------
@dataclass
class PeakBytes:
    """Bytes of one rank at the moment when it holds most; roles as peak_memory names them."""

    bytes: dict[str, int] = field(default_factory=dict)
    where: SourceLine | None = None  # the unit at which that is

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def peak_memory(graph: Graph, roles: dict[Value, str]) -> PeakBytes:
    """The bytes that a rank holds at the peak, by role.

    roles: of inputs and captures: "parameters", "optimizer", "data". Those are held all the time,
    and a result of an argument's type is written over it, as a training step does. Of the rest,
    at the peak: "gradients" has the extents of a parameter, "workspace" is what the unit at the
    peak reads for the last time and writes, "activations" is what is kept for later.
    """
    given = graph.given
    base: dict[str, int] = {}
    for v in given:
        role = roles.get(v, "data")
        base[role] = base.get(role, 0) + bytes_of(global_shape(v), v.aval.dtype)
    units, stored = fuse(graph, CPU), storage_of(graph)
    lives = _lives(units, graph, stored, set(given))
    over = _overwrites(graph, stored, given)
    sizes = {v: 0 if v in over else stored.size(v) for v in lives}
    most = _busiest(lives, sizes, len(units))
    shapes = {tuple(v.aval.shape) for v in given if roles.get(v) == "parameters" and v.aval.ndim}
    held = dict(base)
    for v, (birth, end) in lives.items():
        if birth <= most <= end and sizes[v]:
            now = birth == most or end == most
            role = "gradients" if tuple(v.aval.shape) in shapes else (
                "workspace" if now else "activations")
            held[role] = held.get(role, 0) + sizes[v]
    return PeakBytes(held, units[most].nodes[-1].where if units else None)


def _lives(units: Sequence[FusionGroup], graph: Graph, stored: StoredTypes, given: set[Value]
           ) -> dict[Value, tuple[int, int]]:
    """Of each value with memory of its own: the unit that makes it, and the last that reads it."""
    lives: dict[Value, tuple[int, int]] = {}
    for i, unit in enumerate(units):
        if unit.call is not None and unit.call.op.free:
            continue
        for v in unit.outputs:
            root = stored.owner(v)
            if root not in given:  # in a loop, the root of what leaves it may stay inside
                lives.setdefault(root, (i, i))
        for v in (*unit.inputs, *unit.outputs):
            root = stored.owner(v)
            if root in lives:
                lives[root] = (lives[root][0], i)
    for v in graph.outputs:
        root = stored.owner(v)
        if root in lives:
            lives[root] = (lives[root][0], len(units))
    return lives


def _overwrites(graph: Graph, stored: StoredTypes, given: Sequence[Value]) -> set[Value]:
    """Results that take an argument's place: one for each argument of that type."""
    free = [v.aval for v in given]
    over: set[Value] = set()
    for v in graph.outputs:
        root = stored.owner(v)
        if v.aval in free and root not in over and root not in given:
            free.remove(v.aval)
            over.add(root)
    return over


def _busiest(lives: dict[Value, tuple[int, int]], sizes: dict[Value, int], units: int) -> int:
    """The unit at which most bytes are alive."""
    change = [0] * (units + 2)
    for v, (birth, end) in lives.items():
        change[birth] += sizes[v]
        change[end + 1] -= sizes[v]
    now = most = at = 0
    for i in range(units):
        now += change[i]
        if now > most:
            most, at = now, i
    return at


def work_us(work: UnitWork, device: DeviceModel) -> float:
    """The longest of its matmuls, its other arithmetic and its bytes: they overlap in a kernel."""
    matmuls = sum(n / (device.peak(dtype) * device.matmul_efficiency) for dtype, n in work.matmuls)
    other = work.other / device.peak(f32)
    moved = work.bytes / (1e9 * device.memory_gbps * device.memory_efficiency)
    return 1e6 * work.times * max(matmuls, other, moved)


__all__ = ["PeakBytes", "StoredTypes", "UnitWork", "bytes_of", "count_graph",
           "peak_memory", "storage_of", "global_shape", "work_us", "works_of"]
