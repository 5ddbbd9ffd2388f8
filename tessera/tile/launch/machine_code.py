"""Machine code of a specialisation: from memory, from the disk cache, or compiled. The only cache.

The disk cache is asked before anything is lowered or emitted: its key is the Tile IR and what else
decides the code, so a new process traces the kernel, reads one file and launches. It imports
neither Numba nor the emitter. One process compiles for all that ask at once.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.runtime import flags
from tessera.runtime.cache import CacheEntry, DiskCache, content_name
from tessera.runtime.device import device
from tessera.runtime.module import LoadedKernel as Code
from tessera.runtime.ptxas import Resources
from tessera.runtime.target import Target, parse_target
from tessera.runtime.toolchain import sources, stamps, toolchain
from tessera.tile.ir import errors
from tessera.tile.ir.ir import Function, walk
from tessera.tile.ir.printing import print_ir
from tessera.tile.ir.schedule import Schedule

IMAGES = DiskCache("images")
HASHES = DiskCache("hashes")
GIVEN: dict[str, CacheEntry] = {}  # of exported files that were loaded, by portable key
_ahead: ContextVar[Target | None] = ContextVar("ahead", default=None)
LIVE: weakref.WeakSet[Image] = weakref.WeakSet()  # all that this process holds
FLOORS = ("tile", "numerics", "runtime")  # whose code decides what is emitted


@dataclass(frozen=True)
class CompileRequest:
    """What decides the machine code of a function."""

    lanes: int
    schedule: Schedule
    target: Target
    divisible: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()  # tensors, see ArgumentFacts
    checked: bool = False
    watched: frozenset[str] = frozenset()  # tensors whose bad elements are counted
    held: frozenset[tuple[int, str]] = frozenset()  # and values, by line
    batched: bool = False  # one launch runs many calls
    eights: frozenset[str] = frozenset()  # extents that are multiples of 8, not of 16

    def key(self, function: Function) -> str:
        """The name of the entry in the disk cache: the same in every process."""
        return content_name(*self._parts(function), _op_sites(function), fingerprint())

    def portable_key(self, function: Function) -> str:
        """Its name in an exported file: the same on every machine with this version's sources."""
        return content_name(*self._parts(function), _op_sites(function, whole=False))

    def _parts(self, function: Function) -> list[str]:
        return [
            print_ir(function, lines=False), str(self.lanes),
            self.schedule.text(), f"{self.target} {self.target.generation}",
            " ".join(sorted(self.divisible)), " ".join(sorted(self.aligned)),
            " ".join(sorted(self.shared)), f"{self.checked} {self.batched}",
            " ".join(sorted(self.watched)),
            " ".join(map(str, sorted(self.held))), " ".join(sorted(self.eights))]


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """What is asked for meanwhile is for a GPU of this target, which need not be here."""
    before = _ahead.set(target)
    try:
        yield
    finally:
        _ahead.reset(before)


def target_at(index: int) -> Target:
    """What code for a GPU is compiled for. Raises UnsupportedTargetError without one."""
    return _ahead.get() or device(index).target


def given_entry(function: Function, request: CompileRequest) -> CacheEntry | None:
    """The machine code that an exported file brought."""
    return GIVEN.get(request.portable_key(function)) if GIVEN else None


def divisible_extents(sizes: Mapping[str, int]) -> tuple[frozenset[str], frozenset[str]]:
    """The extents that are multiples of 16, and the others that are of 8: of 16-bit elements, rows
    of so many begin at 16 bytes."""
    return (frozenset(n for n, size in sizes.items() if size % 16 == 0),
            frozenset(n for n, size in sizes.items() if size % 16 == 8))


def _op_sites(function: Function, whole: bool = True) -> str:
    """Where each op stands, by whole paths: the text of the IR has them from the working directory
    on, and a program that is started in another one finds what it compiled. whole=False: by the
    names of files alone."""
    def place(where: SourceLine) -> str:
        return f"{where.file if whole else os.path.basename(where.file)}:{where.line}"

    return "\n".join(place(node.where) if node.where is not None else ""
                     for node in walk(function.body))


@dataclass(frozen=True)
class Slot:
    """One launch parameter; the kinds are those of tile.cuda.emit.emitter.Parameter."""

    kind: str
    name: str
    abi: str
    axis: int = 0
    box: tuple[int, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Image:
    """The machine code of a function for one request, and what a launch has to know.

    ptx, file: for the texts of its levels; file: where its source lies.
    columns: of a batch, what its table has of each call.
    cached: whether it came from the disk.
    """

    function: Function
    request: CompileRequest
    code: Code
    slots: tuple[Slot, ...]
    grid: str
    sites: tuple[flags.ReportSite, ...]
    resources: Resources
    warnings: tuple[str, ...]
    ptx: str
    file: str
    cached: bool
    columns: tuple[Slot, ...] = ()

    @functools.cached_property
    def key(self) -> int:
        """Its launch key in reports."""
        return flags.register(self.function.name, self.sites)

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiler's own record, with every level's text; lowered and emitted again when this
        came from disk."""
        return compile_request(self.function, self.request, self)


def image_for(function: Function, request: CompileRequest,
              loaded: dict[Any, Image] | None = None) -> Image:
    """Machine code for a request. Raises what the compiler raises.

    loaded: what a kernel has had before, most recent last; the image is put there.
    """
    key = (id(function), request)  # the kernel keeps its functions
    loaded = {} if loaded is None else loaded
    image = loaded.pop(key, None) or _from_disk(function, request)
    loaded[key] = image
    return image


def _from_disk(function: Function, request: CompileRequest) -> Image:
    if (given := given_entry(function, request)) is not None:
        return from_entry(given, function, request, True)
    made: list[Any] = []

    def make() -> CacheEntry:
        made.append(compile_request(function, request))
        return to_entry(made[0])

    entry, cached = IMAGES.made(request.key(function), make)
    image = from_entry(entry, function, request, cached)
    if made:
        image.__dict__["compiled"] = made[0]
    return image


def compile_request(function: Function, request: CompileRequest, image: Image | None = None) -> Any:
    """tile.cuda's CompiledKernel. image: what was made of it before; then nothing below the source
    is made again."""
    from tessera.tile.cuda.build import MachineCode

    code = None if image is None else MachineCode(
        image.ptx, image.code.cubin, image.file, image.resources, image.warnings)
    return build_request(emit_request(function, request), request, code)


def emit_request(function: Function, request: CompileRequest) -> Any:
    """tile.cuda's EmittedKernel."""
    from tessera.tile.cuda.compile import emit_kernel
    from tessera.tile.cuda.emit.emitter import ArgumentFacts

    facts = ArgumentFacts(request.divisible, request.aligned, request.shared, request.watched,
                          request.held, request.batched, request.eights)
    return emit_kernel(function, request.lanes, request.target, facts, request.checked,
                       request.schedule)


def build_request(emitted: Any, request: CompileRequest, code: Any = None) -> Any:
    """tile.cuda's CompiledKernel of an EmittedKernel. code: its MachineCode, where that is made."""
    from tessera.tile.cuda.compile import build_kernel

    return build_kernel(emitted, request.lanes, request.target, code)


# --- the disk ---------------------------------------------------------------------------------
def to_entry(compiled: Any) -> CacheEntry:
    """What a launch needs of a CompiledKernel."""
    code = compiled.built.kernel
    sites = [s if isinstance(s, flags.ReportSite) else flags.ReportSite(*s)
             for s in compiled.emitted.sites]
    meta = {
        "name": code.name, "target": str(code.target), "threads": code.threads,
        "shared_bytes": code.shared_bytes, "cluster": code.cluster, "dependent": code.dependent,
        "grid": compiled.grid, "resources": asdict(compiled.built.resources),
        "warnings": compiled.built.warnings, "file": compiled.built.file,
        "slots": [astuple(p) for p in compiled.parameters],
        "columns": [astuple(p) for p in compiled.emitted.columns],
        "sites": [(_line(s.where), s.message, s.kind, s.formats) for s in sites],
    }
    return CacheEntry(meta, {"cubin": code.cubin, "ptx": compiled.built.ptx.encode()})


def _line(where: SourceLine | None) -> list[Any] | None:
    return None if where is None else list(astuple(where))


def from_entry(entry: CacheEntry, function: Function, request: CompileRequest,
               cached: bool) -> Image:
    meta: Mapping[str, Any] = entry.meta
    slots, columns = (tuple(Slot(kind, name, abi, axis, tuple(box), tuple(map(tuple, windows)))
                            for kind, name, abi, axis, box, windows in meta[of])
                      for of in ("slots", "columns"))
    sites = tuple(flags.ReportSite(where and errors.Site(*where), message, kind, tuple(formats))
                  for where, message, kind, formats in meta["sites"])
    code = Code(entry.parts["cubin"], meta["name"], [s.abi for s in slots],
                target=parse_target(meta["target"]), threads=meta["threads"],
                shared_bytes=meta["shared_bytes"], cluster=tuple(meta["cluster"]),
                dependent=meta["dependent"])
    image = Image(function, request, code, slots, meta["grid"], sites,
                  Resources(**meta["resources"]), tuple(meta["warnings"]),
                  entry.parts["ptx"].decode(), meta["file"], cached, columns)
    LIVE.add(image)
    return image


@functools.cache
def fingerprint() -> str:
    """Of everything but the Tile IR that decides the code: the compiler's own sources and tools."""
    return f"{compiler_hash()}\n{toolchain()}"


@functools.cache
def compiler_hash() -> str:
    """Of the compiler's own sources.

    They are read only when one of them has another time stamp than before.
    """
    package = Path(__file__).parents[2]
    folders, without = [package / floor for floor in FLOORS], ("launch",)
    entry, _ = HASHES.made(content_name(*(stamps(f, without) for f in folders)),
                           lambda: CacheEntry({"hash": [sources(f, without) for f in folders]}))
    return "\n".join(entry.meta["hash"])
