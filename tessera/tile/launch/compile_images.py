"""The machine code of many kernels: read from the disk, and what is not there compiled at once.

Tracing, lowering and emitting a kernel takes milliseconds, and happens here. What Numba, NVVM and
ptxas make of its source takes up to seconds, and happens in processes, side by side
(tile/cuda/compile_processes.py). Several programs, or ranks of one, that need the same kernels
share the work: each kernel is compiled by the one that first claims it in the disk cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera.errors import SourceLine, TesseraError
from tessera.runtime.cache import CacheEntry
from tessera.tile.ir.ir import Function, Op, walk
from tessera.tile.launch import machine_code
from tessera.tile.launch.compile_progress import CompileProgress
from tessera.tile.launch.machine_code import IMAGES, CompileRequest, Image

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
    """An entry that is not on the disk, and all that want it."""

    name: str
    wanted: list[WantedImage] = field(default_factory=list)
    emitted: Any = None
    claim: ExitStack = field(default_factory=ExitStack)

    def weight(self) -> tuple[int, int]:
        """How long it may take: matmuls do, and long functions."""
        nodes = [n for n in walk(self.wanted[0].function.body) if isinstance(n, Op)]
        return sum(n.name == "matmul" for n in nodes), len(nodes)

    def keep(self, entry: CacheEntry, compiled: Any = None) -> None:
        """compiled: of the first that wants it, None where it was on the disk."""
        for w in self.wanted:
            image = machine_code.from_entry(entry, w.function, w.request, compiled is None)
            if compiled is not None and w.function is self.wanted[0].function:
                image.__dict__["compiled"] = compiled
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
    missing = _from_disk(wanted)
    count = len(missing)
    if not count:
        return 0
    from tessera.tile.cuda.compile_processes import processes

    with processes(begin=count > 1) as pool:
        with CompileProgress(count, pool.size if pool else 1) as progress:
            if pool is not None:
                build = _Build(pool, progress)
                missing = build.run(sorted(missing, key=_Missing.weight, reverse=True))
            _compile_here(missing, progress)
    return count


def _from_disk(wanted: Iterable[WantedImage]) -> list[_Missing]:
    """Loads what is there; the rest, each once."""
    missing: dict[str, _Missing] = {}
    for w in {w.key: w for w in wanted if w.key not in w.loaded}.values():
        name = w.request.key(w.function)
        if name not in missing and (entry := IMAGES.read(name)) is not None:
            w.loaded[w.key] = machine_code.from_entry(entry, w.function, w.request, True)
        else:
            missing.setdefault(name, _Missing(name)).wanted.append(w)
    return list(missing.values())


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

    def run(self, missing: list[_Missing]) -> list[_Missing]:
        """Compiles in this order; what is left to wait for, or to compile here for its error."""
        with ExitStack() as claims:
            for m in missing:
                while self.pool.busy >= self.pool.size and self.pool.busy:
                    self._take()
                self._give(m, claims)
            while self.pool.busy:
                self._take()
        return self.left

    def _give(self, m: _Missing, claims: ExitStack) -> None:
        """Emits it and gives it to a process, if it is nobody else's."""
        claims.enter_context(m.claim)
        if not m.claim.enter_context(IMAGES.claimed(m.name)):
            self.left.append(m)
            return
        if (entry := IMAGES.read(m.name)) is not None:  # made while the others were begun
            return self._keep(m, entry)
        w = m.wanted[0]
        with at_line(w.where):
            m.emitted = machine_code.emit_request(w.function, w.request)
        if not self.pool.submit(m, m.emitted.job(w.request.target)):
            self._leave(m)

    def _take(self) -> None:
        for m, code in self.pool.finished(POLL_S):
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
