"""What one group of a kernel does, counted from its Tile IR: matmuls, other arithmetic, bytes.

Loops count as often as they run where bounds follow from the extents of the call; what depends on
the group or the lane (a causal loop) is taken for the one in the middle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from math import prod
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.tile.ir.ir import (
    For,
    Function,
    If,
    Node,
    Op,
    SSAValue,
    While,
    defining_ops,
    definitions,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, Scalar, TileType, Type, View

WHILE_TRIPS = 8  # of a loop whose end nobody can know


@dataclass(frozen=True)
class MatmulShape:
    """A tile matmul (M, K) x (K, N). kind: the key of its rate, bits: of an operand's element."""

    kind: str
    M: int
    N: int
    K: int
    bits: int


@dataclass
class GroupWork:
    """Of one group. matmuls: how often each; other, special: lane operations; bytes: of global
    memory; moved: the same by (tensor, whether written); steps: loads that wait for memory one
    after the other."""

    matmuls: dict[MatmulShape, float] = field(default_factory=dict)
    other: float = 0.0
    special: float = 0.0
    bytes: float = 0.0
    moved: dict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))
    steps: float = 0.0

    @property
    def matmul_flops(self) -> float:
        return sum(2.0 * p.M * p.N * p.K * n for p, n in self.matmuls.items())

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.other + self.special


def count(function: Function, sizes: dict[str, int], lanes: int,
          grid: tuple[int, ...] = (1,)) -> GroupWork:
    """The work of one group of `lanes` lanes."""
    counter = _Counter(function, sizes, lanes, grid)
    counter.block(function.body, 1.0)
    return counter.work


def rate_of(dtype: DType, precision: Any) -> str:
    """The name of the rate at which matmuls of these operands run."""
    if dtype.kind != "float":
        return "int8"
    if dtype.name == "tf32" or (dtype.bits == 32 and precision == "tf32"):
        return "tf32"
    return {64: "f64", 32: "f32", 16: "f16"}.get(dtype.bits, "fp8")


class _Counter:
    def __init__(self, function: Function, sizes: dict[str, int], lanes: int,
                 grid: tuple[int, ...]):
        self.types, self.lanes, self.grid = definitions(function), lanes, grid
        self.work = GroupWork()
        self.made_by = defining_ops(function.body)
        self.sums: set[Any] = set()  # results of matmuls
        self.known: dict[SSAValue, float] = {p.value: sizes[p.value.name] for p in function.params
                                             if p.role == "dim" and p.value.name in sizes}

    def number(self, x: Any) -> float | None:
        """Integers as such: ops on bits take no floats."""
        if isinstance(x, SSAValue):
            return self.known.get(x)
        return int(x.value) if x.dtype.kind in ("int", "uint") else float(x.value)

    def block(self, nodes: tuple[Node, ...], times: float) -> None:
        waits = any(isinstance(n, Op) and self.loads(n) for n in nodes)
        self.work.steps += times if waits else 0.0
        for node in nodes:
            if isinstance(node, Op):
                self.op(node, times)
            elif isinstance(node, If):
                self.block(node.then, times)
                self.block(node.orelse, times)
            elif isinstance(node, For):
                trips = self.trip_count(node)
                self.known[node.var.value] = self.middle(node, trips)
                self.block(node.body, times * trips)
            else:
                self.block((*node.test, *node.body), times * WHILE_TRIPS)

    def trip_count(self, node: For) -> float:
        lo, hi, step = (self.number(x) for x in (node.lo, node.hi, node.step))
        if hi is None or lo is None or not step:
            return 1.0
        return max(0.0, -(-(hi - lo) // step))

    def middle(self, node: For, trips: float) -> float:
        lo, step = self.number(node.lo) or 0.0, self.number(node.step) or 1.0
        return lo + step * (trips // 2)

    def type_of(self, x: Any) -> Type:
        return self.types[x] if isinstance(x, SSAValue) else Scalar(x.dtype)

    def loads(self, op: Op) -> bool:
        """Whether the op brings data from global memory."""
        record = OPS[op.name]
        return record.reads and _space(self.type_of(op.args[record.place])) == "global"

    def op(self, op: Op, times: float) -> None:
        types = [self.type_of(a) for a in op.args]
        if op.name == "matmul":
            self.matmul(op, types, times)
        elif (access := OPS[op.name].access) in ("tile", "copy"):
            for x, t in zip(op.args, types, strict=True):
                if isinstance(t, View) and t.space == "global":
                    self.move(x, times * prod(t.shape) * t.dtype.bits / 8, op)
        elif access == "scattered":
            if _space(types[0]) == "global":
                t = op.outs[0].type if op.outs else types[1]
                self.move(op.args[0], times * prod(t.shape)  # type: ignore[union-attr]
                          * types[0].dtype.bits / 8, op)
        elif access in ("element", "vector"):
            self.elements(op, types, times)
        elif op.outs:
            self.arithmetic(op, times)

    def matmul(self, op: Op, types: list[Type], times: float) -> None:
        (M, K), N = types[0].shape, types[1].shape[1]  # type: ignore[union-attr]
        dtype = max((t.dtype for t in types[:2]), key=lambda d: d.bits)
        kind = rate_of(dtype, op.attr["precision"])
        self.sums.add(op.outs[0].value)
        made = MatmulShape(kind, M, N, K, dtype.bits)
        self.work.matmuls[made] = self.work.matmuls.get(made, 0.0) + times

    def elements(self, op: Op, types: list[Type], times: float) -> None:
        """One element per lane; of a uniform access one in all; a vector is several."""
        if _space(types[0]) != "global":
            return
        uniform = all(isinstance(t, Scalar) and t.uniform for t in types[1:])
        width = getattr(op.outs[0].type if op.name == "load_vector" else types[-1], "width", 1)
        many = times * (1 if uniform else self.lanes) * width
        self.move(op.args[0], many * types[0].dtype.bits / 8, op)

    def move(self, place: Any, bytes: float, op: Op) -> None:
        """Bytes between the group and the tensor that a place belongs to."""
        while (made := self.made_by.get(place)) is not None:
            place = made.args[0]
        self.work.bytes += bytes
        self.work.moved[place.name, OPS[op.name].writes] += bytes

    def arithmetic(self, op: Op, times: float) -> None:
        made = op.outs[0].type
        if isinstance(made, Scalar) and (made.uniform or made.dtype.kind != "float"):
            self.follow(op)
            return
        if isinstance(made, TileType):
            sizes = [prod(t.shape) for a in op.args if isinstance(t := self.type_of(a), TileType)]
            size = max(prod(made.shape), *sizes) if sizes else prod(made.shape)
        elif isinstance(made, Scalar) and made.dtype.kind == "float":
            size = self.lanes
        else:
            return
        if op.name == "add" and any(a in self.sums for a in op.args):
            return  # acc + a @ b: the matmul adds to its accumulator
        if OPS[op.name].special:
            self.work.special += times * size
        else:
            self.work.other += times * size

    def follow(self, op: Op) -> None:
        """Numbers, as far as they are known: of the group in the middle of the grid, and of the
        lane in the middle of the group."""
        if op.name in ("local_id", "linear_id"):
            first = (prod(self.grid) - 1) // 2 * self.lanes if op.name == "linear_id" else 0
            self.known[op.outs[0].value] = first + self.lanes // 2
        elif op.name == "group_id":
            axis = op.attr["axis"]
            extent = prod(self.grid) if axis is None else self.grid[axis]
            self.known[op.outs[0].value] = (extent - 1) // 2
        elif op.name == "num_groups":
            axis = op.attr["axis"]
            self.known[op.outs[0].value] = prod(self.grid) if axis is None else self.grid[axis]
        elif op.name == "group_size":
            self.known[op.outs[0].value] = self.lanes
        else:
            values = [self.number(a) for a in op.args]
            known = None if None in values else values[0] if op.name == "convert" else \
                OPS[op.name].value_of(*values)  # type: ignore[arg-type]
            if known is not None:
                self.known[op.outs[0].value] = known


def _space(t: Type) -> str:
    return getattr(t, "space", "register")


def register_bytes(function: Function) -> int:
    """Bytes of the tiles that loops carry: what certainly lives in registers at the same time."""
    def of(nodes: tuple[Node, ...]) -> int:
        most = 0
        for node in nodes:
            if isinstance(node, Op):
                continue
            if isinstance(node, If):
                most = max(most, of(node.then), of(node.orelse))
                continue
            held = sum(tile_bytes(d.type) for d in node.carried)
            most = max(most, held + of(node.body))
        return most

    return of(function.body)


def ring_bytes(function: Function, stages: int) -> int:
    """Shared memory for the operands of matmuls that come straight from global memory: `stages`
    buffers for those of a loop, one for the others. On top of what the kernel allocates."""
    made = defining_ops(function.body)
    turning = {d.value for n in walk(function.body) if isinstance(n, For | While)
               for inner in walk(n.body) if isinstance(inner, Op) for d in inner.outs}
    types, total, seen = definitions(function), 0, set()
    for node in made.values():
        for x in node.args[:2] if node.name == "matmul" else ():
            source = made.get(x)
            while source is not None and source.name in ("convert", "transpose"):
                source = made.get(source.args[0])
            if source is None or source.name != "load_tile" or source.outs[0].value in seen:
                continue
            value = source.outs[0].value
            seen.add(value)
            tile = types[value]
            total += prod(tile.shape) * tile.dtype.bits // 8 * (  # type: ignore[union-attr]
                stages if value in turning else 1)
    return total


def largest_tile(function: Function) -> int:
    """Elements of the largest tile."""
    return max((prod(t.shape) for t in definitions(function).values() if isinstance(t, TileType)),
               default=0)


def tile_bytes(t: Type) -> int:
    """Of the registers of a group."""
    # A fragment holds each element in a register of its own compute type.
    return prod(t.shape) * max(4, t.dtype.bits // 8) if isinstance(t, TileType) else 0


def stages_of(function: Function) -> int:
    """The deepest pipeline that the kernel itself allocates."""
    return max((t.stages for t in definitions(function).values() if isinstance(t, Buffer)),
               default=1)


__all__ = ["GroupWork", "MatmulShape", "count", "largest_tile", "rate_of", "register_bytes",
           "ring_bytes", "stages_of", "tile_bytes"]
