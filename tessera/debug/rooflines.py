"""Roofline: what a launch computes and moves, and which of the two bounds it on a GPU.

    ts.debug.roofline(gemm, A, B, C).bound               'compute'
    ts.debug.roofline(saxpy, x, y, 2.0, gpu="A100")

Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009: a kernel of intensity I (operations
for each byte) runs at most at min(peak, I * bandwidth).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..graph.schedule.work import amount
from ..lazy_dataclass import dataclass
from ..tile.interpreter.arguments import Bound
from ..tile.interpreter.launch import extent
from ..tile.ir.ir import Function
from ..tile.ir.types import GlobalTensor
from ..tile.kernel.kernel import Kernel
from ..tile.passes.operation_counts import GroupWork, count
from ..tile.tuning.cost import CACHE_BYTES_PER_CLOCK
from ..tile.tuning.gpus import DEFAULT, Gpu
from ..tile.tuning.gpus import gpu as find_gpu
from .checked import launch_of, need_kernel


@dataclass(frozen=True)
class Traffic:
    """One tensor: bytes that the kernel asks for, and those that must come from or go to global
    memory at least: no more than the tensor holds."""

    tensor: str
    write: bool
    asked_bytes: float
    least_bytes: float


@dataclass(frozen=True)
class Roofline:
    """flops: a multiply-add is two; bytes: of global memory at least, reads and writes.

    compute_us, memory_us: each alone at the rates of the GPU's data sheet. cache_us: what the
    groups ask for, at the rate of the second-level cache.
    """

    kernel: str
    gpu: str
    flops: float
    bytes: float
    compute_us: float
    memory_us: float
    cache_us: float
    rows: tuple[Traffic, ...]

    @property
    def intensity(self) -> float:
        """flop / byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def ridge(self) -> float:
        """The intensity at which both take equally long."""
        return self.intensity * self.memory_us / self.compute_us if self.compute_us else 0.0

    @property
    def bound(self) -> str:
        """'compute' | 'memory'"""
        return "compute" if self.compute_us > self.memory_us else "memory"

    @property
    def least_us(self) -> float:
        return max(self.compute_us, self.memory_us)

    @property
    def fix(self) -> str:
        if self.cache_us > self.least_us:
            worst = max(self.rows, key=lambda t: t.asked_bytes - t.least_bytes)
            times = worst.asked_bytes / max(worst.least_bytes, 1.0)
            return (f"{worst.tensor} is {'written' if worst.write else 'read'} {times:.3g} times "
                    "over, which the second-level cache does not keep up with: larger blocks, or "
                    "sums kept in registers")
        if self.bound == "memory":
            return ("fewer bytes make it faster: a narrower type, or the kernels before and behind "
                    "it in the same one")
        return ""

    def __str__(self) -> str:
        than = "above" if self.bound == "compute" else "below"
        lines = [f"roofline of {self.kernel} on {self.gpu}: bound by {self.bound}",
                 f"  {amount(self.flops, 'flop')}, {amount(self.bytes, 'B')}: "
                 f"{self.intensity:.3g} flop/B, {than} the ridge of {self.ridge:.3g}",
                 f"  at least {self.least_us:.3g} us: compute {self.compute_us:.3g}, "
                 f"memory {self.memory_us:.3g}, second-level cache {self.cache_us:.3g}"]
        lines += [f"  {'writes' if t.write else 'reads '} {t.tensor}: "
                  f"{amount(t.least_bytes, 'B')}, asked for {amount(t.asked_bytes, 'B')}"
                  for t in self.rows]
        return "\n".join(lines + ([f"  fix: {self.fix}"] if self.fix else []))


def roofline(kernel: Kernel, *args: Any, gpu: str | Gpu = DEFAULT, groups: Any = None,
             lanes: int | None = None, **kwargs: Any) -> Roofline:
    """What kernel(*args, **kwargs) computes and moves; nothing runs.

    gpu: a name ("H200", "A100", ...) or a target ("sm_80"). Loops count as often as they run;
    where that depends on the group, the one in the middle of the grid counts.
    """
    need_kernel(kernel)
    bound = kernel.bind(args, kwargs)
    return roofline_of(kernel, bound, find_gpu(gpu), groups, lanes)


def roofline_of(kernel: Kernel, bound: Bound, gpu: Gpu, groups: Any = None,
                lanes: int | None = None) -> Roofline:
    found = launch_of(kernel, bound, groups, lanes)
    function, many = found.function, prod(found.grid)
    work = count(function, bound.sizes, found.lanes, found.grid)
    rows = _traffic(function, bound, work, many)
    matmuls = sum(2.0 * p.M * p.N * p.K * n / gpu.matmuls(p.kind)
                   for p, n in work.matmuls.items())
    seconds = many * (matmuls + (work.other + work.special) / (gpu.f32_tflops * 1e12))
    bytes_ = sum(t.least_bytes for t in rows)
    cache = many * work.bytes / (CACHE_BYTES_PER_CLOCK * gpu.multiprocessors * gpu.clock_ghz * 1e3)
    return Roofline(kernel.__name__, gpu.name, many * work.flops, bytes_, seconds * 1e6,
                    bytes_ / (gpu.memory_gbps * 1e3), cache, rows)


def _traffic(function: Function, bound: Bound, work: GroupWork, groups: int) -> tuple[Traffic, ...]:
    holds = {p.value.name: prod(extent(str(d), bound) for d in p.type.dims) * p.type.dtype.bits / 8
             for p in function.params if isinstance(p.type, GlobalTensor)}
    return tuple(Traffic(name, write, groups * moved, min(groups * moved, holds[name]))
                 for (name, write), moved in sorted(work.moved.items()))


__all__ = ["Roofline", "Traffic", "roofline", "roofline_of"]
