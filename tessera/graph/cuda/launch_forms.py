"""In which form each step of a program runs, and why it is not a better one.

    wgmma | mma | threads      what multiplies in a kernel, as the compiler decided for the target
    copy                       elements are moved, nothing is computed
    library:cuFFT              a vendor's library
    loop                       iterations whose launches are the program's
    host                       what the host does with values of the call, and iterations that it
                               launches itself
    nccl | exchange            a collective; the latter before the ranks know how
    refused                    the compiler does not take the kernel: the reason is its error

The decision and its reason are the compiler's own record of the kernel, emitted for the extents of
the launch (tile/cuda/compile.py); that of a copy stands in its schedule's notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import TesseraError
from ...lazy_dataclass import dataclass
from ...runtime.target import Target
from ...tile.ir.types import GlobalTensor
from ...tile.launch.machine_code import CompileRequest, divisible_extents
from ..schedule.ir import Transfer
from .program.collective_steps import CollectiveStep
from .program.graph_limits import launch_count, launched_by_host
from .program.host_steps import HostStep
from .program.library_steps import LibraryStep
from .program.loop_steps import LoopStep
from .program.node_kernels import NodeLaunch

if TYPE_CHECKING:
    from .program.run import CudaProgram, GroupLaunch

BEST_FIRST = ("wgmma", "mma", "threads")


@dataclass(frozen=True)
class LaunchForm:
    """name: as above, the worst where a kernel has several.  all: of each of its matmuls, none
    where it has none.  reason: why it is not wgmma, why it is copied, or who does it."""

    name: str
    reason: str = ""
    all: tuple[str, ...] = ()


# --- what the compiler makes of a launch ------------------------------------------------------
def request_of(launch: GroupLaunch | NodeLaunch, target: Target) -> CompileRequest:
    """What the compiler may know: extents by 16, and arrays that begin where allocators put them.
    """
    function = launch.kernel.function()
    tensors = [p.value.name for p in function.params if isinstance(p.type, GlobalTensor)]
    divisible, eights = divisible_extents({
        d: n for d, n in extents_by_name(launch).items() if not d.isdigit()})
    return CompileRequest(launch.lanes, launch.group.schedule, target, divisible,
                          frozenset(tensors), eights=eights)


def extents_by_name(launch: GroupLaunch | NodeLaunch) -> dict[str, int]:
    """The extents of a launch's tensors, by what its kernel calls them."""
    types = [p.type for p in launch.kernel.function().params if isinstance(p.type, GlobalTensor)]
    return {str(d): n for t, (_, shape) in zip(types, launch.arguments, strict=True)
            for d, n in zip(t.dims, shape, strict=True)}


def kernel_of_launch(launch: GroupLaunch | NodeLaunch, target: Target) -> Any:
    """The form that a kernel takes and its source, without compiling it."""
    from ...tile.cuda.compile import emit_kernel
    from ...tile.cuda.emit.emitter import ArgumentFacts

    r, function = request_of(launch, target), launch.kernel.function()
    facts = ArgumentFacts(r.divisible, r.aligned, eights=r.eights)
    return emit_kernel(function, r.lanes, target, facts, schedule=r.schedule)


def emitted_of(launch: GroupLaunch | NodeLaunch, target: Target) -> Any:
    """The source that a kernel becomes, without compiling it."""
    return kernel_of_launch(launch, target).emitted


# --- forms ------------------------------------------------------------------------------------
def forms_of(program: CudaProgram) -> list[LaunchForm]:
    """Of each step, in order. Groups that share a kernel are emitted once."""
    known: dict[Any, LaunchForm] = {}
    found = []
    for step in program.steps:
        if isinstance(step, Transfer):
            found.append(LaunchForm("copy", f"{step.kind}: it lies on the host meanwhile"))
        elif isinstance(step, LibraryStep):
            callee = step.callee
            found.append(LaunchForm(f"library:{callee.record.name}",
                                    f"{callee.node.op.name} is called through CuPy"))
        elif isinstance(step, LoopStep):
            kernels = sum(launch_count(p) for p in step.programs)
            why = launched_by_host(step)
            said = "; ".join([f"{step.callee}; {kernels} launches each", *([why] if why else [])])
            found.append(LaunchForm("host" if why else "loop", said))
        elif isinstance(step, CollectiveStep):
            found.append(LaunchForm(step.callee.route or "exchange", str(step.callee)))
        elif isinstance(step, HostStep):
            found.append(LaunchForm("host", str(step.group.attr("calls"))))
        elif step.group.kind == "move":
            found.append(LaunchForm("copy", "; ".join(step.group.schedule.notes)))
        else:
            key = step.shared, tuple(shape for _, shape in step.arguments)
            if key not in known:
                known[key] = _kernel_form(step, program.target)
            found.append(known[key])
    return found


def _kernel_form(launch: GroupLaunch | NodeLaunch, target: Target) -> LaunchForm:
    try:
        made = kernel_of_launch(launch, target)
    except TesseraError as error:
        return LaunchForm("refused", error.message)
    forms = made.emitted.matmul_forms
    name = max(forms, key=BEST_FIRST.index, default="threads")
    if name == "wgmma":
        return LaunchForm(name, "", forms)
    refusal, extents = made.refusal, extents_by_name(launch)
    given = [f"{d} elements" if d.isdigit() else f"{d} is {extents[d]}" for d in refusal.extents
             if d.isdigit() or d in extents]
    return LaunchForm(name, ": ".join([refusal.reason, ", ".join(given)] if given
                                      else [refusal.reason]), forms)


__all__ = ["BEST_FIRST", "LaunchForm", "emitted_of", "extents_by_name", "forms_of", "request_of"]
