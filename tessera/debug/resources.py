"""Registers, spills and occupancy of a compiled kernel. Compiling needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_dataclass import dataclass
from ..runtime.occupancy import Occupancy, occupancy
from ..runtime.target import Target
from ..tile.ir.ir import Function
from ..tile.kernel.kernel import Kernel
from .checked import need_kernel

if TYPE_CHECKING:
    from ..tile.cuda.build import Built


@dataclass(frozen=True)
class Pressure:
    """What the machine code of a kernel takes. registers: of a lane; lanes: of a group, with those
    that the compiler adds; shared_bytes: of a group; warnings, notes: of ptxas, of the compiler."""

    kernel: str
    target: Target
    lanes: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    occupancy: Occupancy
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes + self.spill_load_bytes > 0

    def __bool__(self) -> bool:
        """Whether there is something to mend."""
        return self.spills or bool(self.warnings)

    @property
    def fix(self) -> str:
        """What to try against spills, or where few groups fit; empty when neither is."""
        if self.spills:
            return ("values do not fit the registers of a thread: a smaller block, more warps to "
                    "share it, or fewer tiles alive at once")
        few = self.occupancy.fraction < FEW
        return _ROOM.get(self.occupancy.limit, "") if few else ""

    def __str__(self) -> str:
        spilled = (f"{self.spill_store_bytes} bytes stored, {self.spill_load_bytes} loaded"
                   if self.spills else "none")
        top = self.target.generation
        lines = [f"resources of {self.kernel} for {self.target}, {self.lanes} lanes a group",
                 f"  registers  {self.registers} of {top.thread_registers} a lane",
                 f"  spills     {spilled}",
                 f"  shared     {self.shared_bytes} of {top.group_shared_bytes} bytes a group",
                 f"  occupancy  {self.occupancy}"]
        lines += [f"  stack      {self.stack_bytes} bytes: arrays indexed at run time"] * bool(
            self.stack_bytes and not self.spills)
        lines += [f"  ptxas: {w}" for w in self.warnings] + [f"  note: {n}" for n in self.notes]
        return "\n".join(lines + ([f"  fix: {self.fix}"] if self.fix else []))


FEW = 0.25  # of the warps: below it waiting shows, unless a pipeline hides it
_ROOM = {
    "registers": "unless its loop is a pipeline, waiting for memory shows with so few warps: a "
                 "smaller block lets more groups run at once",
    "shared memory": "unless its loop is a pipeline, waiting for memory shows with so few warps: "
                     "fewer stages or a smaller block",
}


def pressure_of(name: str, built: Built, lanes: int, notes: tuple[str, ...] = ()) -> Pressure:
    """The figures of a built kernel of `lanes` threads a group."""
    r = built.resources
    shared = r.shared_bytes + built.kernel.shared_bytes
    held = occupancy(built.target, threads=lanes, registers=r.registers, shared_bytes=shared)
    return Pressure(name, built.target, lanes, r.registers, r.spill_store_bytes,
                    r.spill_load_bytes, r.stack_bytes, shared, held, built.warnings, notes)


def register_pressure(kernel: Kernel, *args: Any, target: str | None = None,
                      **kwargs: Any) -> Pressure:
    """Registers, spills and occupancy of the machine code for kernel(*args, **kwargs).

    target: 'sm_80', 'sm_90a', ...; by default this machine's GPU, else sm_90a. Without arguments
    the last specialisation counts. Nothing runs and no GPU is needed, but the compiler is: raises
    UnsupportedTargetError with the command that installs it.
    """
    need_kernel(kernel)
    function = kernel.lower(*args, **kwargs) if args or kwargs or kernel.last is None \
        else kernel.last
    return compiled_pressure(kernel, function, target)


def compiled_pressure(kernel: Kernel, function: Function, target: str | None) -> Pressure:
    from ..tile.launch.levels import compiled_for

    compiled = compiled_for(kernel, function, target)
    return pressure_of(kernel.__name__, compiled.built, compiled.threads, compiled.notes)


__all__ = ["Pressure", "compiled_pressure", "pressure_of", "register_pressure"]
