"""Errors that kernels report: device asserts, and bounds errors of debug builds.

The first lane that fails claims the flag (an atomic in device memory) and writes its report to host
memory that is mapped into the device; the host looks there without a driver call, so looking at
each launch costs nothing. Words of a report, 64 bits each:
    0 site (1 + number of the check in the kernel's table; 0: nothing)   1 kernel (its launch key)
    2 block (linear)   3 lane   4..7 values of the check (an index, an extent, ...)
The site is written last.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DeviceError, SourceLine
from .buffer import Buffer, MappedMemory
from .device import device

WORDS = 8
VALUES = 4


@dataclass(frozen=True)
class Site:
    """A check in a kernel: the user's line, and a message with {0} ... {3} for the values."""

    where: SourceLine
    message: str


@dataclass(frozen=True)
class Failure:
    """What the first failing lane reported."""

    site: int
    kernel: int
    block: int
    lane: int
    values: tuple[int, ...]


class ErrorFlags:
    """The flag of one device. Kernels get `claim` and `report` as i64 parameters."""

    def __init__(self, index: int):
        on = device(index)
        self._claim, self._report = Buffer(8, on), MappedMemory(WORDS, on)
        self._claim.write(np.zeros(1, np.int64))
        self.claim, self.report = self._claim.pointer, self._report.pointer

    def pending(self) -> Failure | None:
        """The report, when there is one. It may come from a kernel that still runs."""
        words = self._report.words
        if not words[0]:
            return None
        site, kernel, block, lane, *values = (int(w) for w in words)
        return Failure(site - 1, kernel, block, lane, tuple(values))

    def clear(self) -> None:
        self._report.words[:] = 0
        self._claim.write(np.zeros(1, np.int64))

    def check(self, kernels: Mapping[int, tuple[str, Sequence[Site]]]) -> None:
        """Raise DeviceError at the user's line when a kernel reported; the flag is cleared.

        kernels: launch key -> name and table of checks.
        """
        failure = self.pending()
        if failure is None:
            return
        self.clear()
        name, sites = kernels[failure.kernel]
        site = sites[failure.site]
        raise DeviceError(
            f"kernel {name}, block {failure.block}, lane {failure.lane}: "
            + site.message.format(*failure.values),
            where=site.where, code="E_DEVICE_ASSERT")


@functools.cache
def error_flags(index: int = 0) -> ErrorFlags:
    return ErrorFlags(index)
