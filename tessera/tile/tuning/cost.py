"""The analytic cost of a launch: how long it takes by the figures of a GPU.

    time = max(arithmetic, global memory, second-level cache) + waiting + launch

    arithmetic   groups of the busiest multiprocessor x clocks of a group. Matmuls run at the rate
                 of the tensor cores, or as fast as shared memory feeds them: (M / m + N / n)
                 panels at 128 bytes a clock, with m x n what one warp (where there is wgmma, one
                 warpgroup's) multiplies at once.
    memory       each tensor once at the memory's rate; all loads of all groups at the cache's.
    waiting      loads that follow one another, each a memory latency, divided among the buffers of
                 the pipeline and the groups that share a multiprocessor.

Good for ordering candidates and for saying what bounds a kernel; not a promise. Counts:
operation_counts.py.
"""

from __future__ import annotations

from math import prod

from tessera.lazy_dataclass import dataclass
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config, extent, grid_of
from tessera.tile.ir.ir import Function
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.passes.operation_counts import (
    GroupWork,
    MatmulShape,
    count,
    register_bytes,
    ring_bytes,
    stages_of,
)
from tessera.tile.tuning.gpus import DEFAULT, Gpu

LAUNCH_US = 2.0
LATENCY_US = 0.7  # of global memory: what the model assumes, about 1,200 clocks under load
SHARED_BYTES_PER_CLOCK = 128  # CUDA C++ Programming Guide 13: 32 banks of 4 bytes
CACHE_BYTES_PER_CLOCK = 47  # of a multiprocessor: 5120 for 108 (NVIDIA A100 whitepaper, 2020)
SPECIAL_PER_CLOCK = 16
OTHER_REGISTERS = 48  # of a lane, besides the tiles that loops carry: addresses, operands


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a launch and of its parts, and what bounds it."""

    us: float
    arithmetic_us: float
    memory_us: float
    cache_us: float
    waiting_us: float
    groups: int
    resident: int  # groups of a multiprocessor at the same time
    gpu: str

    @property
    def bound(self) -> str:
        parts = {"arithmetic": self.arithmetic_us, "memory": self.memory_us,
                 "cache": self.cache_us, "waiting": self.waiting_us}
        return max(parts, key=lambda n: parts[n])

    def __str__(self) -> str:
        return (f"{self.us:.1f} us on {self.gpu}, bound by {self.bound}: {self.groups} groups, "
                f"{self.resident} to a multiprocessor; arithmetic {self.arithmetic_us:.1f}, memory "
                f"{self.memory_us:.1f}, cache {self.cache_us:.1f}, waiting {self.waiting_us:.1f}")


def estimate(function: Function, schedule: Schedule, bound: Bound, gpu: Gpu = DEFAULT) -> float:
    """Microseconds of a launch, by the model."""
    return explain(function, schedule, bound, gpu).us


def explain(function: Function, schedule: Schedule, bound: Bound, gpu: Gpu = DEFAULT) -> Estimate:
    """The estimate with its parts."""
    # How large a grid that the caller gives will be is not known: one group stands for it.
    given = Config(groups=(1, 1, 1)) if function.launch == "given" else Config()
    grid = grid_of(function, bound, given, schedule.lanes)
    work = count(function, bound.sizes, schedule.lanes, grid)
    groups = max(1, prod(grid))
    resident = groups_at_once(function, schedule, gpu)
    share = -(-groups // gpu.multiprocessors)  # groups of the busiest multiprocessor
    arithmetic = share * _clocks(work, schedule, gpu) / (gpu.clock_ghz * 1e3)
    memory = _tensor_bytes(function, bound) / (gpu.memory_gbps * 1e3)
    cache = share * work.bytes / (CACHE_BYTES_PER_CLOCK * gpu.clock_ghz * 1e3)
    depth = max(schedule.value("stages_"), stages_of(function))
    waves = -(-groups // (gpu.multiprocessors * resident))
    waiting = LATENCY_US * waves * max(1.0, work.steps / depth)
    total = max(arithmetic, memory, cache) + waiting + LAUNCH_US
    return Estimate(total, arithmetic, memory, cache, waiting, groups, resident, gpu.name)


def groups_at_once(function: Function, schedule: Schedule, gpu: Gpu) -> int:
    """Groups that fit a multiprocessor by lanes, shared memory and registers."""
    lanes = schedule.lanes
    registers = register_bytes(function) // 4 + OTHER_REGISTERS * lanes
    shared = function.shared_bytes + ring_bytes(function, schedule.value("stages_"))
    top = gpu.generation
    return max(1, min(top.lanes // lanes, top.groups, top.registers // registers,
                      top.shared_bytes // max(1024, shared)))


def _clocks(work: GroupWork, schedule: Schedule, gpu: Gpu) -> float:
    """Clocks of one group that has a multiprocessor for itself."""
    hertz = gpu.clock_ghz * 1e9
    matmuls = 0.0
    for p, times in work.matmuls.items():
        rate = gpu.matmuls(p.kind) / gpu.multiprocessors / hertz
        feeding = shared_traffic(p, schedule.value("warps_"), gpu) / SHARED_BYTES_PER_CLOCK
        matmuls += times * max(2.0 * p.M * p.N * p.K / rate, feeding)
    lanes = gpu.f32_tflops * 1e12 / 2 / gpu.multiprocessors / hertz
    return matmuls + work.other / lanes + work.special / SPECIAL_PER_CLOCK


def shared_traffic(p: MatmulShape, warps: int, gpu: Gpu) -> float:
    """Bytes that one matmul reads from shared memory."""
    form = gpu.generation.warpgroup_matmul
    if form is not None and p.M >= form.rows and p.kind != "f32":  # its rows by all columns
        return (p.M + p.N * -(-p.M // form.rows)) * p.K * p.bits / 8
    down = 1
    while 4 * down * down <= warps and p.M // (2 * down) >= 16:  # as square as warps allow
        down *= 2
    across = max(1, min(warps // down, p.N // 8))
    return (p.M * across + p.N * down) * p.K * p.bits / 8


def _tensor_bytes(function: Function, bound: Bound) -> float:
    """Each tensor argument and result once."""
    total = 0.0
    for p in function.params:
        if isinstance(p.type, GlobalTensor):
            total += prod(extent(str(d), bound) for d in p.type.dims) * p.type.dtype.bits / 8
    return total


__all__ = ["Estimate", "GroupWork", "count", "estimate", "explain", "groups_at_once",
           "shared_traffic"]
