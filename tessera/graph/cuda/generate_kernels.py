"""Schedule IR to kernels: the text of each group, and the kernel of that text.

Values have the numbers of the ops that made them, so two layers of a model have kernels that differ
in names alone. One of them runs for all: a training step of 345 groups has 75 kernels to compile.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from ...numerics import NumericType
from ..schedule.ir import ScheduledGroup
from .copy_kernels import move_source
from .gathers import gather_source, segments_source
from .kernel_text import GroupKernel, KernelText, compiled
from .library_kernels import attention_source, gemm_source
from .loop_kernels import columns_source, loop_source, rows_source

WRITERS: dict[str, Callable[[ScheduledGroup], KernelText]] = {
    "loop": loop_source, "rows": rows_source, "columns": columns_source, "gemm": gemm_source,
    "attention": attention_source, "move": move_source, "gather": gather_source,
    "segments": segments_source,
}
_kernels: dict[tuple, GroupKernel] = {}  # by what a text means, and the schedule
_lock = threading.Lock()


def source_of(group: ScheduledGroup) -> KernelText:
    """The text of a group's kernel. It follows from the group alone."""
    return WRITERS[group.kind](group)


_VALUE = re.compile(r"\b[vVcChHkK]\d+(?:_\d+)*\b")  # names that are numbered by ops


def kernel_of(source: KernelText, group: ScheduledGroup) -> GroupKernel:
    """The kernel that runs for a group: its own, or that of an earlier one that differs in names
    alone. What checks something while it runs is its own: it names the line."""
    own = "assert " in source.text
    key = (source.text if own else meaning(source), group.schedule.text())
    with _lock:
        if key not in _kernels:
            _kernels[key] = compiled(source, group)
        return _kernels[key]


def meaning(source: KernelText) -> tuple:
    """Equal for texts that differ in the names of values, of the kernel, and in comments."""
    names: dict[str, str] = {}
    plain = re.sub(r"\s+#.*", "", source.text.replace(source.name, "kernel"))
    text = _VALUE.sub(lambda m: names.setdefault(m[0], f"{m[0][0]}.{len(names)}"), plain)
    types = sorted((n, str(t)) for n, t in source.scope.items() if isinstance(t, NumericType))
    return text, tuple(types)


__all__ = ["WRITERS", "kernel_of", "meaning", "source_of"]
