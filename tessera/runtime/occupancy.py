"""How many groups of a kernel a multiprocessor holds at the same time, and what limits them.

    occupancy("sm_90a", threads=128, registers=168, shared_bytes=49152)
    Occupancy(groups=3, warps=12, of=64, limits=(("registers", 3), ("shared memory", 4), ...))

The arithmetic is that of cuda_occupancy.h (CUDA 13): registers are given out in units of 256 to
each warp, within one quarter of the multiprocessor; shared memory in units of 128 bytes, and from
8.0 on the system keeps 1 KiB of each group's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError, UnsupportedTargetError
from .target import Target, parse_target

WARP = 32
QUARTERS = 4  # of a multiprocessor, each with its own registers
REGISTER_UNIT = 256
MAX_REGISTERS = 255  # of a thread
RESERVED_BYTES = 1024  # of each group's shared memory, from compute capability 8.0 on


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor. shared_bytes: of all its groups; group_shared_bytes: of one."""

    groups: int
    warps: int
    shared_bytes: int
    group_shared_bytes: int
    registers: int = 65536


_KIB = 1024
# By compute capability: CUDA C++ Programming Guide 13.0, table 27, "Technical Specifications per
# Compute Capability".
LIMITS: dict[tuple[int, int], Limits] = {
    (7, 5): Limits(16, 32, 64 * _KIB, 64 * _KIB),
    (8, 0): Limits(32, 64, 164 * _KIB, 163 * _KIB),
    (8, 6): Limits(16, 48, 100 * _KIB, 99 * _KIB),
    (8, 7): Limits(16, 48, 164 * _KIB, 163 * _KIB),
    (8, 9): Limits(24, 48, 100 * _KIB, 99 * _KIB),
    (9, 0): Limits(32, 64, 228 * _KIB, 227 * _KIB),
    (10, 0): Limits(32, 64, 228 * _KIB, 227 * _KIB),
    (12, 0): Limits(24, 48, 100 * _KIB, 99 * _KIB),
}


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


def limits_of(target: Target | str) -> Limits:
    """The limits of a target's compute capability. Raises UnsupportedTargetError."""
    at = parse_target(target)
    if at.cc not in LIMITS:
        raise UnsupportedTargetError(
            f"the limits of {at} are not known", hint="known: " + ", ".join(
                f"sm_{major}{minor}" for major, minor in LIMITS))
    return LIMITS[at.cc]


def occupancy(target: Target | str, *, threads: int, registers: int,
              shared_bytes: int = 0) -> Occupancy:
    """The occupancy of groups of `threads` threads. shared_bytes: static and dynamic, of a group.

    Raises ArgumentError for what no group may have.
    """
    at, top = parse_target(target), limits_of(target)
    if not 1 <= threads <= 1024 or not 0 <= registers <= MAX_REGISTERS:
        raise ArgumentError(f"{threads} threads of {registers} registers: a group has 1 to 1024 "
                            f"threads, a thread at most {MAX_REGISTERS} registers")
    warps = -(-threads // WARP)
    counts = {"groups": top.groups, "warps": top.warps // warps,
              "registers": _by_registers(top, warps, registers),
              "shared memory": _by_shared(at, top, shared_bytes)}
    order = sorted(counts.items(), key=lambda item: item[1])
    groups = order[0][1]
    return Occupancy(groups, groups * warps, top.warps, tuple(order))


def _by_registers(top: Limits, warps: int, registers: int) -> int:
    """Groups for which there are registers."""
    per_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    if -(-warps // QUARTERS) * QUARTERS * per_warp > top.registers:
        return 0  # one group alone has too few
    return top.registers // QUARTERS // per_warp * QUARTERS // warps


def _by_shared(at: Target, top: Limits, shared_bytes: int) -> int:
    """Groups for which there is shared memory."""
    unit, reserved = (128, RESERVED_BYTES) if at.cc >= (8, 0) else (256, 0)
    if shared_bytes > top.group_shared_bytes:
        return 0
    taken = -(-(shared_bytes + reserved) // unit) * unit
    return top.shared_bytes // taken if taken else top.groups


__all__ = ["LIMITS", "Limits", "Occupancy", "limits_of", "occupancy"]
