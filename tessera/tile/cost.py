"""The analytic cost of a kernel: what it computes and moves, how well the grid fills the device.

time = max(flops / peak, bytes / bandwidth) / occupancy + waves * overhead, with the figures of an
H200 (sm_90, dense bf16 989 TFLOP/s, 4.8 TB/s, 132 multiprocessors; NVIDIA H200 datasheet).
Counts come from the Tile IR: loop turns where bounds are known, else from the extents of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tessera.tile.arguments import Bound
from tessera.tile.ir import For, Function, If, Node, Op, Value, definitions
from tessera.tile.schedule import Schedule
from tessera.tile.types import Scalar, Tile, View

PEAK_FLOPS = {16: 989e12, 8: 1979e12, 32: 67e12, 64: 34e12}  # by bits of the operands
BANDWIDTH = 4.8e12
PROCESSORS = 132
WAVE_US = 2.0


@dataclass
class Work:
    """Of one group: flops of products, other flops, and bytes of global memory."""

    product: float = 0.0
    other: float = 0.0
    bytes: float = 0.0
    bits: int = 32

    @property
    def flops(self) -> float:
        return self.product + self.other


def count(function: Function, sizes: dict[str, int], lanes: int) -> Work:
    """The work of one group."""
    counter = _Counter(function, sizes, lanes)
    counter.block(function.body, 1.0)
    return counter.work


class _Counter:
    def __init__(self, function: Function, sizes: dict[str, int], lanes: int):
        self.types, self.sizes, self.lanes, self.work = definitions(function), sizes, lanes, Work()
        self.known: dict[Value, float] = {p.value: sizes[p.value.name] for p in function.params
                                          if p.role == "dim" and p.value.name in sizes}

    def number(self, x: Any) -> float | None:
        if isinstance(x, Value):
            return self.known.get(x)
        return float(x.value)

    def block(self, nodes: tuple[Node, ...], times: float) -> None:
        for node in nodes:
            if isinstance(node, Op):
                self.op(node, times)
            elif isinstance(node, If):
                self.block(node.then, times)
                self.block(node.orelse, times)
            elif isinstance(node, For):
                self.block(node.body, times * self.turns(node))
            else:
                self.block(node.body, times * 8)

    def turns(self, node: For) -> float:
        lo, hi, step = (self.number(x) for x in (node.lo, node.hi, node.step))
        if hi is None or not step:
            return 1.0
        return max(1.0, -(-(hi - (lo or 0.0)) // step))

    def op(self, op: Op, times: float) -> None:
        types = [self.types[a] if isinstance(a, Value) else Scalar(a.dtype) for a in op.args]
        if op.name == "matmul":
            a, b = types[0], types[1]
            self.work.product += times * 2 * prod(a.shape) * b.shape[1]  # type: ignore[union-attr]
            self.work.bits = min(self.work.bits, a.dtype.bits)
        elif op.name in ("load_tile", "store_tile", "cp_async"):
            for t in types:
                if isinstance(t, View) and t.space == "global":
                    self.work.bytes += times * prod(t.shape) * t.dtype.bits / 8
        elif op.name in ("load_element", "store_element", "atomic"):
            t = types[0]
            if getattr(t, "space", "") == "global":
                uniform = all(isinstance(x, Scalar) and x.uniform for x in types[1:])
                self.work.bytes += times * (1 if uniform else self.lanes) * t.dtype.bits / 8
        elif op.outs:
            made = op.outs[0].type
            if isinstance(made, Tile):
                self.work.other += times * prod(made.shape)
            elif isinstance(made, Scalar) and not made.uniform and made.dtype.kind == "float":
                self.work.other += times * self.lanes


def estimate(function: Function, schedule: Schedule, bound: Bound) -> float:
    """Microseconds of a launch on an H200, by the model."""
    from tessera.tile.launch import Config, grid_of

    lanes = schedule.lanes
    groups = max(1, prod(grid_of(function, bound, Config(), lanes)))
    work = count(function, bound.sizes, lanes)
    resident = max(1, min(2048 // lanes, 232_448 // max(1, function.shared_bytes)))
    waves = -(-groups // (PROCESSORS * resident))
    busy = min(1.0, groups / PROCESSORS)
    compute = groups * (work.product / PEAK_FLOPS.get(work.bits, 67e12) + work.other / 67e12)
    move = groups * work.bytes / BANDWIDTH
    # Few warps leave the tensor cores waiting; more buffers hide the latency of a step.
    hidden = min(1.0, 0.55 + 0.1 * schedule.value("stages_") + 0.03 * schedule.value("warps_"))
    return 1e6 * max(compute / hidden, move) / busy + WAVE_US * waves


__all__ = ["Work", "count", "estimate"]
