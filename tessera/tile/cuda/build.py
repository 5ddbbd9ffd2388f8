"""Emitted source -> a kernel that can be launched: PTX by NVVM, machine code by ptxas.

Nothing is kept here but the source, for debuggers and line tables; machine code is kept by
tile/launch/machine_code.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import CompileError, UnsupportedTargetError
from ...lazy_dataclass import dataclass
from ...runtime.cache import DiskCache, content_name
from ...runtime.device import device
from ...runtime.module import Grid, LoadedKernel
from ...runtime.occupancy import occupancy
from ...runtime.ptxas import Assembled, Resources, assemble, sass
from ...runtime.target import OLDEST, Target, target_for
from .instruction import Kind
from .ptx_text import LineMap

SOURCES = DiskCache("sources")
FEWER = 0.8  # of its registers: what ptxas finds without spilling, as a rule
INSTRUCTION_NEEDS_MORE = "C7602"  # ptxas of too few registers for one: wgmma of 256 columns has 128


@dataclass(frozen=True)
class MachineCode:
    """What the compilers below make of a source.

    file: where the source lies.  warnings: of ptxas: correct, but slow.
    """

    ptx: str
    cubin: bytes
    file: str
    resources: Resources
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CompileJob:
    """What the compilers below Tile IR are given. It is text, so any process can run it.

    file: the name that the source bears, where it also lies.  lines: see compile_kernel.
    shared_bytes: dynamic shared memory of a block.
    """

    source: str
    file: str
    name: str
    parameters: tuple[Kind, ...]
    target: Target
    threads: int
    min_blocks: int = 1
    lines: LineMap | None = None
    shared_bytes: int = 0

    def run(self) -> MachineCode:
        """Raises CompileError where Numba or ptxas refuses."""
        from .numba_gate import compile_source

        ptx = compile_source(self.source, self.file, self.name, self.parameters, self.target,
                             threads=self.threads, min_blocks=self.min_blocks, lines=self.lines)
        text, made = self.for_two(ptx.text, assemble(ptx.text, self.target, lineinfo=True))
        return MachineCode(text, made.cubin, self.file, made.kernels[self.name],
                           tuple(made.warnings))

    def for_two(self, ptx: str, made: Assembled) -> tuple[str, Assembled]:
        """The same with registers for a second block on a multiprocessor, where these alone keep it
        out and slightly fewer do: beside a block alone nothing runs while it waits at a barrier."""
        took = made.kernels[self.name]
        if self.min_blocks > 1 or took.spills or self.resident(took.registers) != 1 or (
                self.resident(int(FEWER * took.registers)) < 2):
            return ptx, made
        text = ptx.replace(".minnctapersm 1", ".minnctapersm 2")
        assert text != ptx
        try:
            again = assemble(text, self.target, lineinfo=True)
        except CompileError as refused:
            if INSTRUCTION_NEEDS_MORE not in str(refused):
                raise
            return ptx, made
        now = again.kernels[self.name]
        return (ptx, made) if now.spills or self.resident(now.registers) < 2 else (text, again)

    def resident(self, registers: int) -> int:
        """Blocks of a multiprocessor at once."""
        return occupancy(self.target, threads=self.threads, registers=registers,
                         shared_bytes=self.shared_bytes).groups


def job_of(source: str, name: str, parameters: Sequence[Kind], target: Target, *, threads: int,
           min_blocks: int = 1, lines: LineMap | None = None, shared_bytes: int = 0) -> CompileJob:
    """The job of a source, which is written to its place."""
    file = str(SOURCES.path / f"{name}-{content_name(source)[:16]}.py")
    SOURCES.write_text(os.path.basename(file), source)
    return CompileJob(source, file, name, tuple(parameters), target, threads, min_blocks, lines,
                      shared_bytes)


@dataclass(frozen=True)
class Built:
    """A kernel, the text of each level below Tile IR, and what it took."""

    kernel: LoadedKernel
    source: str
    file: str
    ptx: str
    target: Target
    resources: Resources
    warnings: tuple[str, ...]  # of ptxas: correct, but slow

    def sass(self) -> str:
        return sass(self.kernel.cubin)


def build(source: str, name: str, parameters: Sequence[Kind], target: Target | None = None, *,
          threads: int, needs: Target = OLDEST, min_blocks: int = 1, shared_bytes: int = 0,
          cluster: Grid = (), dependent: bool = False, lines: LineMap | None = None,
          code: MachineCode | None = None) -> Built:
    """The function `name` of `source` as a kernel of scalar parameters (pointers are i64).

    target: by default that of this machine's first GPU, where launches go by default. needs: the
    oldest target that has the instructions; "sm_90a" makes the default architecture-specific.
    shared_bytes: dynamic shared memory. lines: emitted line -> (user's file, line). code: what was
    made of this source before.
    Raises CompileError where Numba or ptxas refuses, UnsupportedTargetError without what it needs.
    """
    target = _checked(target, name, needs)
    code = code or job_of(source, name, parameters, target, threads=threads,
                          min_blocks=min_blocks, lines=lines, shared_bytes=shared_bytes).run()
    kernel = LoadedKernel(code.cubin, name, parameters, target=target, threads=threads,
                          shared_bytes=shared_bytes, cluster=cluster, dependent=dependent)
    return Built(kernel, source, code.file, code.ptx, target, code.resources, code.warnings)


def _checked(target: Target | None, name: str, needs: Target) -> Target:
    if target is None:
        return target_for(device().cc, needs)
    if not target.runs(needs):
        raise UnsupportedTargetError(f"kernel {name} needs {needs}, it is built for {target}",
                                     hint=f"build it for {needs}")
    return target
