"""Stores by TMA of a block in lockstep: they read shared memory when they are waited for, which is
the latest that the hardware may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.tile.cuda.instruction import Instruction

ROW_BYTES = 128  # after which the pattern of a swizzle changes


@dataclass(frozen=True)
class Descriptor:
    """A tensor of 16-bit elements in global memory. Outermost axis first."""

    pointer: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]


class BulkStores:
    """groups: of each thread, lists of (descriptor, corner, shared address)."""

    def __init__(self, block: Any):
        self.block = block
        self.maps: dict[int, Descriptor] = {}  # by the address that code has for it
        self.unfenced = np.zeros(block.threads, bool)
        self.open: dict[int, list] = {}
        self.groups: dict[int, list[list]] = {}

    def fence(self, instruction: Instruction) -> None:
        self.unfenced[self.block.on] = False

    def store(self, instruction: Instruction, map_: Any, *rest: Any) -> None:
        *corner, at = (self.block.spread(x) for x in rest)
        for t in np.flatnonzero(self.block.on):
            warp = slice(t // 32 * 32, t // 32 * 32 + 32)
            assert not self.unfenced[warp].any(), "what was stored is not fenced"
            what = self.maps[int(self.block.spread(map_)[t])]
            self.open.setdefault(int(t), []).append(
                (what, tuple(int(c[t]) for c in reversed(corner)), int(at[t])))

    def store_bytes(self, instruction: Instruction, *where: Any) -> None:
        to, at, size = (self.block.spread(x) for x in where)
        for t in np.flatnonzero(self.block.on):
            assert not self.unfenced.any(), "what was stored is not fenced"
            assert size[t] > 0 and not (int(to[t]) | int(at[t]) | int(size[t])) % 16
            self.open.setdefault(int(t), []).append((int(to[t]), int(at[t]), int(size[t])))
            moved = self.block.counts.get("bulk bytes", 0)
            self.block.counts["bulk bytes"] = moved + int(size[t])

    def commit(self, instruction: Instruction) -> None:
        for t in np.flatnonzero(self.block.on):
            self.groups.setdefault(int(t), []).append(self.open.pop(int(t), []))

    def wait(self, instruction: Instruction) -> None:
        pending = int(instruction.name.rsplit("_", 1)[1])
        for groups in self.groups.values():
            while len(groups) > pending:
                for copy in groups.pop(0):
                    self._run(*copy)

    def _run(self, what: Descriptor | int, corner: Any, at: int) -> None:
        if isinstance(what, int):  # bytes, from a place in shared memory
            self.block.memory.bytes[what:what + at] = self.block.shared.bytes[corner:corner + at]
            return
        assert at % 1024 == 0, "the pattern of the swizzle begins at multiples of 1024 bytes"
        width = 2 * what.box[-1]  # bytes of a row, with the swizzle as wide
        for number, index in enumerate(np.ndindex(what.box)):
            place = tuple(c + i for c, i in zip(corner, index, strict=True))
            if all(0 <= p < n for p, n in zip(place, what.shape, strict=True)):
                byte = 2 * number
                byte ^= (byte // ROW_BYTES & width // 16 - 1) << 4
                to = what.pointer + sum(p * s for p, s in zip(place, what.strides_bytes,
                                                              strict=True))
                source = self.block.shared.bytes[at + byte:at + byte + 2]
                self.block.memory.bytes[to:to + 2] = source
