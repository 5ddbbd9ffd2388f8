"""What the linters count at each memory access: sectors per request and bank conflicts."""

from __future__ import annotations

import numpy as np

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.interpreter.memory import Local, Memory
from tessera.tile.ir.shared_layout import BANKS, SharedLayout

SECTOR_BYTES = 32  # of global memory moved at once; CUDA C++ Best Practices Guide, 10.2.1
WARP = 32
_SAMPLE = 64  # warps per access: a kernel's pattern shows in the first


@dataclass
class Pattern:
    """One access site. degree: worst bank conflict, 1 is none; sectors, ideal: moved, needed."""

    space: str
    memory: str
    where: SourceLine
    write: bool
    requests: int = 0
    sectors: int = 0
    ideal: int = 0
    degree: int = 1

    @property
    def efficiency(self) -> float:
        """Needed over moved sectors: 1.0 when adjacent lanes touch adjacent elements."""
        return self.ideal / self.sectors if self.sectors else 1.0

    def count_vectors(self, memory: Memory, address: np.ndarray, active: np.ndarray) -> None:
        """As count for address, active: [G, L, width]. Shared memory serves 128 bytes at a time."""
        groups, lanes, width = address.shape
        bytes_ = max(1, width * memory.numeric.dtype.bits // 8)
        served = WARP if not isinstance(memory, Local) else max(1, min(WARP, 128 // bytes_))
        for start in range(0, min(lanes, _SAMPLE * WARP), served):
            for g in range(min(groups, _SAMPLE)):
                used = address[g, start:start + served][active[g, start:start + served]]
                if used.size:
                    self._request(memory, used)

    def count(self, memory: Memory, address: np.ndarray, active: np.ndarray) -> None:
        """One access by the lanes of a batch. address, active: [G, L]"""
        groups, lanes = address.shape
        if lanes < 2:
            return
        for start in range(0, min(lanes, _SAMPLE * WARP), WARP):
            for g in range(min(groups, _SAMPLE)):
                used = address[g, start:start + WARP][active[g, start:start + WARP]]
                if used.size:
                    self._request(memory, used)

    def _request(self, memory: Memory, used: np.ndarray) -> None:
        self.requests += 1
        bits = memory.numeric.dtype.bits
        if isinstance(memory, Local):
            at = used % memory.size
            layout = SharedLayout.of(memory.type)
            words = np.unique(layout.word(at // layout.columns, at % layout.columns))
            self.degree = max(self.degree, int(np.bincount(words % BANKS).max()))
            return
        sectors = np.unique(used * bits // 8 // SECTOR_BYTES).size
        needed = -(-np.unique(used).size * bits // 8 // SECTOR_BYTES)
        self.sectors += sectors
        self.ideal += min(sectors, max(1, needed))
