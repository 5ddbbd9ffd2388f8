"""What sentinels in kernels count: words of device memory for each launch and each place in it.

    site k, four words of 64 bits:   NaNs   infinities   overflows of casts   first element
    first element: its number in the tensor in the upper half, its value as an f32 in the lower; the
    least is kept, so the report does not depend on which thread came first

Kernels get the address of their words as a parameter. Those of one owner lie together; looking at
them takes one copy, behind the kernels that write them, for which nobody has to wait (`later`).
Nothing is here unless TESSERA_NUMERICS is on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ..errors import SourceLine
from ..lazy_dataclass import dataclass
from .buffer import DEFAULT, DeviceBuffer, copy_bytes
from .copies import CopiedOut
from .device import device
from .flags import ReportSite

SITE_WORDS, WORD_BYTES = 4, 8
SITE_BYTES = SITE_WORDS * WORD_BYTES
FIRST = 3
INDEX_BITS = 32
SITES_OF_CHUNK = 1024
CLEAN = np.array([0, 0, 0, ~np.uint64(0)], np.uint64)


@dataclass(frozen=True, eq=False)
class WatchedLaunch:
    """Whose words they are. shapes: of the tensors, by name. where: the line of the call that was
    the first. function: its Tile IR. owner, part: what launched it and which of its launches it
    is, where that was not the user: see `owned`."""

    name: str
    sites: Sequence[ReportSite]
    shapes: dict[str, tuple[int, ...]]
    where: SourceLine | None = None
    function: Any = field(default=None, repr=False)
    owner: Any = None
    part: int = 0


@dataclass(frozen=True)
class BadElements:
    """What one place of a launch has counted. index: of the first element in its tensor, or None
    where its number does not fit."""

    launch: WatchedLaunch
    site: ReportSite
    nan: int
    inf: int
    overflow: int
    index: tuple[int, ...] | None
    value: float

    @property
    def bad(self) -> int:
        """NaNs and infinities, those too that a cast made of numbers beyond its range."""
        return self.nan + self.inf + (self.overflow if self.site.formats[2] != "max" else 0)

    @property
    def what(self) -> str:
        """'load' or 'store'."""
        return self.site.formats[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.launch.shapes.get(self.site.message, ())

    @staticmethod
    def of(launch: WatchedLaunch, site: ReportSite, words: np.ndarray) -> BadElements:
        nan, inf, overflow, first = (int(n) for n in words)
        number, bits = first >> INDEX_BITS, first & ((1 << INDEX_BITS) - 1)
        value = float(np.array([bits], np.uint32).view(np.float32)[0])
        shape = launch.shapes.get(site.message, ())
        known = number < int(np.prod(shape, dtype=object))
        index = tuple(int(i) for i in np.unravel_index(number, shape)) if known else None
        return BadElements(launch, site, nan, inf, overflow, index, value)


@dataclass
class _Chunk:
    """Words of many launches of one owner side by side. clean: what they hold when nothing was
    seen; spare: host memory of copies that were read."""

    memory: DeviceBuffer
    clean: DeviceBuffer
    launches: list[tuple[int, WatchedLaunch]] = field(default_factory=list)  # by first site
    taken: int = 0
    spare: list[CopiedOut] = field(default_factory=list)

    def copied(self) -> CopiedOut:
        """Begins to copy the words behind what was launched, and lets them be clean behind that."""
        sites = self.memory.nbytes // SITE_BYTES
        made = self.spare.pop() if self.spare else CopiedOut(
            (sites, SITE_WORDS), CLEAN.dtype, self.memory.device)
        made.begin(self.memory.pointer, DEFAULT)
        copy_bytes(self.memory.pointer, self.clean.pointer, self.memory.nbytes, DEFAULT)
        return made

    def found(self, words: np.ndarray) -> list[BadElements]:
        """What the words of its launches have seen."""
        if (words[:self.taken] == CLEAN).all():
            return []
        return [BadElements.of(launch, site, words[start + i])
                for start, launch in self.launches for i, site in enumerate(launch.sites)
                if (words[start + i] != CLEAN).any()]


class LaterWords:
    """The words of an owner as they are behind what was launched so far: read when that is done."""

    def __init__(self, chunks: Sequence[_Chunk]):
        self._copies = [(chunk, chunk.copied()) for chunk in chunks]

    @property
    def done(self) -> bool:
        return all(copy.done for _, copy in self._copies)

    def read(self) -> list[BadElements]:
        """What was counted, in the order in which launches were first seen. Once; waits for it."""
        found = []
        for chunk, copy in self._copies:
            found += chunk.found(copy.array())
            chunk.spare.append(copy)
        self._copies = []
        return found


class SentinelWords:
    """The words of one device. They stay with the process: a captured launch may be replayed."""

    def __init__(self, index: int):
        self.device = device(index)
        self._chunks: dict[int, list[_Chunk]] = {}  # by the id of an owner, whom its launches keep
        self._lock = threading.Lock()

    def take(self, launch: WatchedLaunch) -> int:
        """The address of a launch's words."""
        count = len(launch.sites)
        with self._lock:
            chunks = self._chunks.setdefault(id(launch.owner), [])
            if not chunks or chunks[-1].taken + count > self._room(chunks[-1]):
                chunks.append(self._new(max(count, SITES_OF_CHUNK)))
            chunk = chunks[-1]
            chunk.launches.append((chunk.taken, launch))
            chunk.taken += count
            return chunk.memory.pointer + SITE_BYTES * (chunk.taken - count)

    @staticmethod
    def _room(chunk: _Chunk) -> int:
        return chunk.memory.nbytes // SITE_BYTES

    def _new(self, sites: int) -> _Chunk:
        memory, clean = (DeviceBuffer(SITE_BYTES * sites, self.device) for _ in range(2))
        for each in (memory, clean):
            each.write(np.tile(CLEAN, sites))
        return _Chunk(memory, clean)

    def collect(self, owner: Any = None) -> list[BadElements]:
        """What launches of an owner (None: of the user) counted since the last time. Waits for the
        device."""
        if not self._chunks.get(id(owner)):
            return []
        self.device.synchronize()
        return self.later(owner).read()

    def later(self, owner: Any = None) -> LaterWords:
        """The same of what was launched on the default stream so far; waits for nothing."""
        with self._lock, self.device.current():
            return LaterWords(self._chunks.get(id(owner), ()))


_words: dict[int, SentinelWords] = {}
_lock = threading.Lock()


def sentinel_words(index: int = 0) -> SentinelWords:
    """Those of a device."""
    with _lock:
        if index not in _words:
            _words[index] = SentinelWords(index)
        return _words[index]


def collect_all() -> list[BadElements]:
    """What the user's launches counted on all devices; none is started that was not used."""
    return [found for words in list(_words.values()) for found in words.collect()]


# --- who launches -------------------------------------------------------------------------------
class _Local(threading.local):
    owner: tuple[Any, int] = (None, 0)


_local = _Local()


def owner() -> tuple[Any, int]:
    """What launches kernels in this thread and looks at their words itself (None: the user does),
    and which of its launches this is."""
    return _local.owner


class owned:
    """Launches inside are `by`'s: they have words of their own, and nobody waits for them."""

    __slots__ = ("_mine", "_before")

    def __init__(self, by: Any, part: int):
        self._mine = by, part

    def __enter__(self) -> None:  # around every launch: a generator takes twice as long
        self._before = _local.owner
        _local.owner = self._mine

    def __exit__(self, *exc: object) -> None:
        _local.owner = self._before


__all__ = ["BadElements", "LaterWords", "SentinelWords", "WatchedLaunch", "collect_all", "owned",
           "owner", "sentinel_words"]
