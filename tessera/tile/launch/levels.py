"""inspect_ir("target" | "ptx" | "sass"): what the compiler for GPUs makes of a function.

No GPU is needed: the machine's first one is the default target, else sm_90a.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera.runtime.device import device, has_gpu
from tessera.runtime.target import DEFAULT_TARGET, Target, parse_target
from tessera.tile.interpreter.launch import Config, lanes_of
from tessera.tile.ir.ir import Function
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.launch.machine_code import CompileRequest, image_for

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel


def compiled_for(kernel: Kernel, function: Function, target: str | None) -> Any:
    """The Compiled of a function: that of its last launch, unless another target is asked for.

    A function that was not launched is compiled for arrays that begin at 16 bytes and named extents
    that are multiples of 16.
    """
    wanted = None if target is None else parse_target(target)
    for image in reversed(kernel.images.values()):
        if image.function is function and wanted in (None, image.request.target):
            return image.compiled
    lanes = lanes_of(function, Config(), kernel.schedule.lanes)
    tensors = [p for p in function.params if isinstance(p.type, GlobalTensor)]
    extents = {str(d) for p in tensors for d in p.type.dims}  # type: ignore[union-attr]
    return image_for(function, CompileRequest(
        lanes, kernel.schedule, wanted or _default(), frozenset(extents),
        frozenset(p.value.name for p in tensors))).compiled


def _default() -> Target:
    return device().target if has_gpu() else parse_target(DEFAULT_TARGET)


def target_text(kernel: Kernel, function: Function, target: str | None = None) -> str:
    """The emitted source, below what the compiler decided."""
    compiled = compiled_for(kernel, function, target)
    notes = "".join(f"# {note}\n" for note in compiled.notes)
    return notes + compiled.source


def ptx_text(kernel: Kernel, function: Function, target: str | None = None) -> str:
    return compiled_for(kernel, function, target).built.ptx


def sass_text(kernel: Kernel, function: Function, target: str | None = None) -> str:
    return compiled_for(kernel, function, target).built.sass()


LEVELS: dict[str, Callable[[Kernel, Function, str | None], str]] = {
    "target": target_text, "ptx": ptx_text, "sass": sass_text}
