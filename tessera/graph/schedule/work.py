"""What a launch computes and moves, for whoever looks at its time: profiles and schedules."""

from __future__ import annotations

from math import prod

from ...errors import SourceLine
from ...lazy_dataclass import dataclass
from ...tile.tuning.gpus import Gpu
from .ir import GroupOperand, ScheduledGroup


@dataclass(frozen=True)
class LaunchWork:
    """One launch, copy or library call of a program.

    kind: what sort of work it is: matmul | attention | reduction (norms, softmax, losses, sums) |
    elementwise | move | index | sort | optimizer | copy | library | kernel (a user's)
    part: of a step: forward | backward | optimizer
    matmuls: operations of matmuls, at the rate `rate` of a GPU's record; flops: all of them
    """

    name: str
    kind: str
    part: str
    where: SourceLine | None
    shapes: str
    read_bytes: int
    written_bytes: int
    flops: float = 0.0
    matmuls: float = 0.0
    rate: str = "f32"

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def least_us(self, gpu: Gpu) -> float:
        """Its bound on the GPU's roofline."""
        compute = self.matmuls / gpu.matmuls(self.rate) + (
            (self.flops - self.matmuls) / (gpu.f32_tflops * 1e12))
        return max(1e6 * compute, self.bytes / (gpu.memory_gbps * 1e3))


def part_of(where: SourceLine | None) -> str:
    """Of which part of a step a line is."""
    return (where.part if where is not None else "") or "forward"


def operand_bytes(operands: tuple[GroupOperand, ...], most: int | None = None) -> int:
    """Of each once. most: elements that are moved of one."""
    found = {}
    for o in operands:
        n = prod(o.shape) if most is None else min(most, prod(o.shape))
        found[o.name, o.offset] = n * o.type.dtype.numpy.itemsize
    return sum(found.values())


def read_bytes(group: ScheduledGroup) -> int:
    """What a group reads: of operands that it picks from, as much as it gives."""
    if not any(s.picks for s in group.steps):
        return operand_bytes(group.reads, _moved_elements(group))
    return operand_bytes(group.reads[1:]) + operand_bytes(group.writes)


def written_bytes(group: ScheduledGroup) -> int:
    """What a group writes."""
    return operand_bytes(group.writes, _moved_elements(group))


def _moved_elements(group: ScheduledGroup) -> int | None:
    """How many elements one that only moves elements moves; None of others."""
    return prod(group.space) if group.kind == "move" else None


def amount(x: float, unit: str) -> str:
    """1234567.0 -> '1.23 MB'"""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(x) < 999.5:
            return f"{x:.3g} {prefix}{unit}"
        x /= 1000
    return f"{x:.3g} P{unit}"


__all__ = ["LaunchWork", "amount", "operand_bytes", "part_of", "read_bytes", "written_bytes"]
