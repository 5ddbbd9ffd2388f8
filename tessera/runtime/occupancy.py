"""How many groups of a kernel a multiprocessor holds at the same time, and what limits them.

    occupancy("sm_90a", threads=128, registers=168, shared_bytes=49152)
    Occupancy(groups=3, warps=12, of=64, limits=(("registers", 3), ("shared memory", 4), ...))

The arithmetic is that of cuda_occupancy.h (CUDA 13): registers are given out in units of 256 to
each warp, within one quarter of the multiprocessor; shared memory in units of 128 bytes, and from
8.0 on the system keeps 1 KiB of each group's. The record of the generation has these numbers.
"""

from __future__ import annotations

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass
from .generations import Generation
from .target import Target, parse_target

WARP = 32
QUARTERS = 4  # of a multiprocessor, each with its own registers


@dataclass(frozen=True)
class Occupancy:
    """groups: of a multiprocessor at once; warps: in them, `of` so many; limits: groups that each
    resource alone would allow, the scarcest first."""

    groups: int
    warps: int
    of: int
    limits: tuple[tuple[str, int], ...]

    @property
    def fraction(self) -> float:
        return self.warps / self.of

    @property
    def limit(self) -> str:
        """What is scarcest: 'registers' | 'shared memory' | 'warps' | 'groups'."""
        return self.limits[0][0]

    def __str__(self) -> str:
        many = "s" * (self.groups != 1)
        return (f"{self.groups} group{many}, {self.warps} of {self.of} warps "
                f"({self.fraction:.0%}), limited by {self.limit}")


def occupancy(target: Target | str, *, threads: int, registers: int,
              shared_bytes: int = 0) -> Occupancy:
    """The occupancy of groups of `threads` threads. shared_bytes: static and dynamic, of a group.

    Raises ArgumentError for what no group may have.
    """
    top = parse_target(target).generation
    if not 1 <= threads <= top.group_threads or not 0 <= registers <= top.thread_registers:
        raise ArgumentError(f"{threads} threads of {registers} registers: a group has 1 to "
                            f"{top.group_threads} threads, a thread at most "
                            f"{top.thread_registers} registers")
    warps = -(-threads // WARP)
    counts = {"groups": top.groups, "warps": top.warps // warps,
              "registers": _by_registers(top, warps, registers),
              "shared memory": _by_shared(top, shared_bytes)}
    order = sorted(counts.items(), key=lambda item: item[1])
    groups = order[0][1]
    return Occupancy(groups, groups * warps, top.warps, tuple(order))


def _by_registers(top: Generation, warps: int, registers: int) -> int:
    """Groups for which there are registers."""
    per_warp = -(-max(registers, 1) * WARP // top.register_unit) * top.register_unit
    if -(-warps // QUARTERS) * QUARTERS * per_warp > top.registers:
        return 0  # one group alone has too few
    return top.registers // QUARTERS // per_warp * QUARTERS // warps


def _by_shared(top: Generation, shared_bytes: int) -> int:
    """Groups for which there is shared memory."""
    if shared_bytes > top.group_shared_bytes:
        return 0
    taken = -(-(shared_bytes + top.reserved_bytes) // top.shared_unit) * top.shared_unit
    return top.shared_bytes // taken if taken else top.groups


__all__ = ["Occupancy", "occupancy"]
