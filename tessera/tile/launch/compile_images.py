"""The machine code of many kernels: read from the disk, and what is not there compiled at once.

Tracing, lowering and emitting a kernel takes milliseconds, and happens here. What Numba, NVVM and
ptxas make of its source takes up to seconds, and happens in processes, side by side
(tile/cuda/compile_processes.py). Several programs, or ranks of one, that need the same kernels
share the work: each kernel is compiled by the one that first claims it in the disk cache.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Any

from tessera.errors import SourceLine, TesseraError
from tessera.lazy_dataclass import dataclass
from tessera.runtime.cache import CacheEntry
from tessera.tile.ir.ir import Function, Op, walk
from tessera.tile.launch import machine_code
from tessera.tile.launch.compile_progress import CompileProgress
from tessera.tile.launch.machine_code import IMAGES, CompileRequest, Image, from_entry, given_entry

if TYPE_CHECKING:
    from tessera.tile.cuda.compile_processes import CompileProcesses

POLL_S = 0.5  # so often the line that shows progress changes


@dataclass(frozen=True)
class WantedImage:
    """A function that is to be compiled.

    loaded: the images of its kernel, as in image_for.  where: the user's line, of a kernel that is
    generated.
    """

    function: Function
    request: CompileRequest
    loaded: dict[Any, Image]
    where: SourceLine | None = None

    @property
    def key(self) -> tuple[int, CompileRequest]:
        return id(self.function), self.request


@dataclass
class _Missing:
    """An entry that was not on the disk, and all that want it.

    entry, compiled: what became of it; compiled is the compiler's record, if this program made it.
    """

    name: str
    wanted: list[WantedImage]
    emitted: Any = None
    claim: ExitStack = field(default_factory=ExitStack)
    entry: CacheEntry | None = None
    compiled: Any = None

    def weight(self) -> tuple[int, int]:
        """How long it may take: matmuls do, and long functions."""
        nodes = [n for n in walk(self.wanted[0].function.body) if isinstance(n, Op)]
        return sum(n.name == "matmul" for n in nodes), len(nodes)

    def add(self, w: WantedImage) -> None:
        self.wanted.append(w)
        if self.entry is not None:
            self._serve(w)

    def keep(self, entry: CacheEntry, compiled: Any = None) -> None:
        """compiled: of the first that wants it, None where it was on the disk."""
        self.entry, self.compiled = entry, compiled
        for w in self.wanted:
            self._serve(w)

    def _serve(self, w: WantedImage) -> None:
        assert self.entry is not None
        image = from_entry(self.entry, w.function, w.request, self.compiled is None)
        if self.compiled is not None and w.function is self.wanted[0].function:
            image.__dict__["compiled"] = self.compiled
        w.loaded[w.key] = image


@contextmanager
def at_line(where: SourceLine | None) -> Iterator[None]:
    """An error of what is generated is one at the user's line."""
    try:
        yield
    except TesseraError as error:
        error.where = where or error.where
        raise


def compile_images(wanted: Iterable[WantedImage]) -> int:
    """Puts the images of many kernels where their launches look for them; how many were compiled.

    Raises what the compiler raises, as a launch would.
    """
    found = _missing(wanted)
    first = list(itertools.islice(found, 2))
    if not first:
        return 0
    from tessera.tile.cuda.compile_processes import processes

    with processes(begin=len(first) > 1) as pool:
        with CompileProgress(pool.size if pool else 1) as progress:
            if pool is not None:
                left = _Build(pool, progress).run(itertools.chain(first, found))
            else:
                left = [*first, *found]
                progress.total = len(left)
            _compile_here(left, progress)
    return progress.total


def _missing(wanted: Iterable[WantedImage]) -> Iterator[_Missing]:
    """Loads what is on the disk; the rest, each once."""
    missing: dict[str, _Missing] = {}
    for w in wanted:
        if w.key in w.loaded:
            continue
        name = w.request.key(w.function)
        if name in missing:
            missing[name].add(w)
        elif (entry := given_entry(w.function, w.request) or IMAGES.read(name)) is not None:
            w.loaded[w.key] = from_entry(entry, w.function, w.request, True)
        else:
            missing[name] = _Missing(name, [w])
            yield missing[name]


def _compile_here(missing: Sequence[_Missing], progress: CompileProgress) -> None:
    """One after another in this process; then those are waited for that others are at."""
    theirs = []
    for m in missing:
        with IMAGES.claimed(m.name) as mine:
            if not mine:
                theirs.append(m)
                continue
            w, compiled, entry = m.wanted[0], None, IMAGES.read(m.name)
            if entry is None:
                with at_line(w.where):
                    compiled = machine_code.compile_request(w.function, w.request)
                entry = machine_code.to_entry(compiled)
                IMAGES.write(m.name, entry)
            m.keep(entry, compiled)
        progress.step(1)
    for m in theirs:
        for w in m.wanted:
            with at_line(w.where):
                machine_code.image_for(w.function, w.request, w.loaded)
        progress.step(1)


class _Build:
    """One run of the processes."""

    def __init__(self, pool: CompileProcesses, progress: CompileProgress):
        self.pool, self.progress = pool, progress
        self.left: list[_Missing] = []  # what others make, and what failed
        self._claims = ExitStack()

    def run(self, missing: Iterable[_Missing]) -> list[_Missing]:
        """Compiles them while they are found, what takes longest first; what is left to wait for,
        or to compile here for its error."""
        waiting: list[tuple[int, int, int, _Missing]] = []
        with self._claims:
            for n, m in enumerate(missing):
                self.progress.total += 1
                matmuls, nodes = m.weight()
                heapq.heappush(waiting, (-matmuls, -nodes, n, m))
                self._give(waiting)
                self._take(0.0)
            while (waiting and self.pool.size) or self.pool.busy:
                self._give(waiting)
                self._take(POLL_S)
        return self.left + [m for *_, m in waiting]

    def _give(self, waiting: list[tuple[int, int, int, _Missing]]) -> None:
        """Emits what no other program is at, and gives it to the processes that have no work."""
        while waiting and self.pool.idle:
            *_, m = heapq.heappop(waiting)
            self._claims.enter_context(m.claim)
            if not m.claim.enter_context(IMAGES.claimed(m.name)):
                self.left.append(m)
            elif (entry := IMAGES.read(m.name)) is not None:  # made since it was looked for
                self._keep(m, entry)
            else:
                self._submit(m)

    def _submit(self, m: _Missing) -> None:
        w = m.wanted[0]
        with at_line(w.where):
            m.emitted = machine_code.emit_request(w.function, w.request)
        if not self.pool.submit(m, m.emitted.job(w.request.target)):
            self._leave(m)

    def _take(self, timeout_s: float) -> None:
        for m, code in self.pool.finished(timeout_s):
            if code is None:
                self._leave(m)
                continue
            w = m.wanted[0]
            compiled = machine_code.build_request(m.emitted, w.request, code)
            entry = machine_code.to_entry(compiled)
            IMAGES.write(m.name, entry)
            self._keep(m, entry, compiled)
        self.progress.step()

    def _keep(self, m: _Missing, entry: CacheEntry, compiled: Any = None) -> None:
        m.claim.close()
        m.keep(entry, compiled)
        self.progress.step(1)

    def _leave(self, m: _Missing) -> None:
        m.claim.close()
        self.left.append(m)


__all__ = ["WantedImage", "at_line", "compile_images"]
