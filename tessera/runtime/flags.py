"""What kernels report to the host: failed asserts, bounds errors of debug builds, printed lines.

Host memory is mapped into the device, so the host looks without a driver call and looking at each
launch costs nothing. A report has eight words of 64 bits:
    0 site (1 + number in the kernel's table; 0: nothing)   1 kernel (its launch key)
    2 group (linear)   3 lane (WHOLE_GROUP: the group as a whole)   4..7 values
The site is written last, after a fence of the system.

The first lane that fails claims the flag (an atomic in device memory) and writes one report. A line
that is printed takes a number (an atomic add in device memory) and, below LINES, writes a report to
that place.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np

from .. import hooks
from ..errors import DeviceError, SourceLine, TesseraError
from ..lazy_dataclass import dataclass
from .buffer import DEFAULT, DeviceBuffer, MappedMemory
from .device import check, device, driver, outside_capture
from .recordings import context_waited_for, is_recording

WORDS = 8
VALUES = 4
LINES = 1024  # printed between two looks of the host
WHOLE_GROUP = -1


@dataclass(frozen=True)
class ReportSite:
    """A place in a kernel that reports: the user's line, and a message with {} for the values.

    kind: names the error in ERRORS; 'print' is none. formats: how the bits of each value are read,
    'i64' (the default), 'u64', 'f32', 'f64' or 'bool'.
    """

    where: SourceLine | None
    message: str
    kind: str = "device"
    formats: tuple[str, ...] = ()

    def text(self, words: Sequence[int]) -> str:
        formats = (*self.formats, *("i64",) * (VALUES - len(self.formats)))
        return self.message.format(*map(_decoded, words, formats))


_READ = {"i64": np.int64, "u64": np.uint64, "f32": np.float32, "f64": np.float64, "bool": np.bool_}


def _decoded(word: int, kind: str) -> str:
    """As the interpreter writes a number of that type: 0.1, and not the f64 nearest to an f32."""
    return str(np.array([word], np.int64).view(_READ[kind])[0])


@dataclass(frozen=True)
class Failure:
    """What one lane reported."""

    site: int
    kernel: int
    group: int
    lane: int
    values: tuple[int, ...]

    @property
    def who(self) -> str:
        group = f"group {self.group}"
        return group if self.lane == WHOLE_GROUP else f"lane {self.lane} of {group}"

    @staticmethod
    def of(words: Sequence[int]) -> Failure | None:
        site, kernel, group, lane, *values = words
        return Failure(site - 1, kernel, group, lane, tuple(values)) if site else None


# kind of a site -> (kernel's name, site, failure) -> the error; upper floors add theirs.
ERRORS: dict[str, Callable[[str, ReportSite, Failure], TesseraError]] = {}


def _device_error(name: str, site: ReportSite, failure: Failure) -> TesseraError:
    return DeviceError(f"kernel {name}, {failure.who}: {site.text(failure.values)}",
                       where=site.where, code="E_DEVICE_ASSERT")


ERRORS["device"] = _device_error

Table = tuple[str, Sequence[ReportSite]]
_tables: dict[int, Table] = {}  # by launch key
_keys = itertools.count(1)


def register(name: str, sites: Sequence[ReportSite]) -> int:
    """The launch key under which a kernel reports its sites."""
    key = next(_keys)
    _tables[key] = (name, tuple(sites))
    return key


@dataclass
class ErrorFlags:
    """The flag of one device. Kernels get `claim` and `report` as i64 parameters."""

    index: int
    claim: int = field(init=False)
    report: int = field(init=False)

    def __post_init__(self) -> None:
        on = device(self.index)
        self._claim, self._report = DeviceBuffer(8, on), MappedMemory(WORDS, on)
        self._claim.write(np.zeros(1, np.int64))
        self.claim, self.report = self._claim.pointer, self._report.pointer
        self.words = self._report.raw  # words[0] is not 0: there is a report

    def pending(self) -> Failure | None:
        """The report, when there is one. It may come from a kernel that still runs."""
        return Failure.of(list(self.words))

    def clear(self) -> None:
        """Forget the report; the kernel is waited for, since its other lanes may report too."""
        what = "wait for the kernel that failed"
        with device(self.index).current(), outside_capture():
            if is_recording():  # whose stream the context has
                check(driver().cuStreamSynchronize(DEFAULT), what)
            else:
                with context_waited_for():
                    check(driver().cuCtxSynchronize(), what)
        self._claim.write(np.zeros(1, np.int64))
        self.words[:] = [0] * WORDS

    def check(self, kernels: Mapping[int, Table] | None = None) -> None:
        """Raise at the user's line when a kernel reported, by ERRORS; the flag is cleared.

        kernels: launch key -> name and table of sites; by default the registered ones.
        """
        if not self.words[0] or (failure := self.pending()) is None:
            return
        self.clear()
        with outside_capture():
            for explain in hooks.reported:
                explain(self.index)
        name, sites = (_tables if kernels is None else kernels)[failure.kernel]
        site = sites[failure.site]
        raise ERRORS[site.kind](name, site, failure)


class PrintedLines:
    """Lines that kernels of one device print. They get `count` and `lines` as i64 parameters."""

    def __init__(self, index: int):
        on = device(index)
        self._count, self._lines = DeviceBuffer(8, on), MappedMemory(WORDS * LINES, on)
        self._count.write(np.zeros(1, np.int64))
        self.count, self.lines = self._count.pointer, self._lines.pointer

    def take(self) -> list[str]:
        """What was printed since the last time, by group and lane; the kernels are done."""
        number = np.zeros(1, np.int64)
        self._count.read(number)
        kept = self._lines.words.reshape(LINES, WORDS)[:min(int(number[0]), LINES)]
        found = sorted((f for f in (Failure.of(row.tolist()) for row in kept) if f),
                       key=lambda f: (f.kernel, f.group, f.lane))
        texts = [_tables[f.kernel][1][f.site].text(f.values) for f in found]
        self._lines.words[:] = 0
        self._count.write(np.zeros(1, np.int64))
        return texts + ["..."] * (int(number[0]) > LINES)


@functools.cache
def error_flags(index: int = 0) -> ErrorFlags:
    with _lock:  # one for a device: kernels of all threads report there
        if index not in _flags:
            _flags[index] = ErrorFlags(index)
        return _flags[index]


@functools.cache
def printed_lines(index: int = 0) -> PrintedLines:
    return PrintedLines(index)


_flags: dict[int, ErrorFlags] = {}
_lock = threading.Lock()


def _check_after_wait(index: int) -> None:
    if index in _flags:
        _flags[index].check()


hooks.synchronised.append(_check_after_wait)
