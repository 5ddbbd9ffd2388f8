"""Whether NCCL's sums of what lies in windows are made in f32 and rounded once: it is tried.

Its kernels for windows add bf16 in f32, its rings round at each addition. Which of them runs NCCL
decides. So before a program sends bf16 there, the ranks add terms, small and as long as its longest
message, whose sum in f32 is exact in any order: there is one right result, and additions in bf16
miss it in most elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tessera.numerics import as_type, encode
from tessera.runtime import libnccl
from tessera.runtime.buffer import DeviceBuffer
from tessera.runtime.window_memory import WindowBuffer

from ...lazy_dataclass import dataclass
from .communicator import Communicator, communicator
from .group import Group

RUN = 4096  # terms repeat
SHORT_BYTES = 1 << 11  # of a rank's block
ALIGN = 16
_PROVED: dict[tuple[Communicator, str, bool], int] = {}  # up to how many bytes of a rank's block


@dataclass(frozen=True)
class NarrowSum:
    """A sum in windows, of bf16. kind: "all_reduce" or "reduce_scatter"; nbytes: of all terms of a
    rank in its message; blocks: of its communicator, 0 for the usual one; inside: the sums lie in
    the window, and not the terms alone"""

    group: Group
    kind: str
    nbytes: int
    blocks: int = 0
    inside: bool = True


def added_in_f32(sums: Sequence[NarrowSum], memory: WindowBuffer, index: int) -> bool:
    """Whether this rank found all sums right that it tried in the memory. All ranks call it."""
    return all([_holds(one, memory, index) for one in _longest(sums)])


def _longest(sums: Sequence[NarrowSum]) -> Iterator[NarrowSum]:
    """Of each communicator and kind."""
    most: dict[tuple, NarrowSum] = {}
    for one in sums:
        key = one.group.ranks, one.blocks, one.kind, one.inside
        if key not in most or most[key].nbytes < one.nbytes:
            most[key] = one
    yield from most.values()


def _holds(one: NarrowSum, memory: WindowBuffer, index: int) -> bool:
    by = communicator(one.group, index)
    if by is None:
        return False
    by = by.of_blocks(one.blocks) if one.blocks else by
    room = memory.nbytes // (one.group.size + (one.kind == "reduce_scatter" and one.inside))
    block = min(one.nbytes // one.group.size, room) // ALIGN * ALIGN
    if not block:
        return False
    if block <= _PROVED.get((by, one.kind, one.inside), 0):
        return True
    right = all([_is_right(one, by, memory, size) for size in {min(SHORT_BYTES, block), block}])
    if right:
        _PROVED[by, one.kind, one.inside] = block
    return right


def _is_right(one: NarrowSum, by: Communicator, memory: WindowBuffer, block: int) -> bool:
    n, scatters = one.group.size, one.kind == "reduce_scatter"
    count, kind, op = n * block // 2, libnccl.TYPES["bf16"], libnccl.OPS["sum"]
    at = block if scatters and one.inside else 0  # the sums stand in front of the terms
    memory.write(np.resize(_terms(n)[one.group.index], count), at)
    target = DeviceBuffer(block, memory.device) if scatters and not one.inside else memory
    with memory.device.current():
        if scatters:
            by.reduce_scatter([(memory.pointer + at, target.pointer, block // 2)], kind, op, 0)
        else:
            by.all_reduce([(memory.pointer, memory.pointer, count)], kind, op, 0)
    memory.device.synchronize()
    got = np.empty(block // 2 if scatters else count, np.uint16)
    target.read(got)
    first = one.group.index * (block // 2) if scatters else 0
    return bool((got == np.resize(np.roll(_sum(n), -first), got.size)).all())


def _terms(n: int) -> np.ndarray:
    """[n, RUN] bf16, as their bits: integers of eight bits times 1 to 128."""
    rng = np.random.default_rng(0)
    values = rng.integers(-255, 256, (n, RUN)) * 2.0 ** rng.integers(0, 8, (n, RUN))
    return _bf16(values)


def _sum(n: int) -> np.ndarray:
    """[RUN] Exact in f32, rounded once."""
    wide = (_terms(n).astype(np.uint32) << 16).view(np.float32)
    return _bf16(wide.sum(0, dtype=np.float64))


def _bf16(values: np.ndarray) -> np.ndarray:
    return encode(values.astype(np.float32), as_type("bf16").dtype).view(np.uint16)


__all__ = ["NarrowSum", "added_in_f32"]
