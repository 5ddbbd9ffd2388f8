"""Schedule IR to kernels: the text of each group, and the kernel of that text."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .calls import attention_source, gemm_source
from .gathers import gather_source, segments_source
from .loops import columns_source, loop_source, rows_source
from .moves import move_source
from .schedule import Group
from .text import GroupKernel, Source, compiled

WRITERS: dict[str, Callable[[Group], Source]] = {
    "loop": loop_source, "rows": rows_source, "columns": columns_source, "gemm": gemm_source,
    "attention": attention_source, "move": move_source, "gather": gather_source,
    "segments": segments_source,
}
_kernels: dict[tuple[str, str], GroupKernel] = {}  # by text and schedule: groups alike share one
_lock = threading.Lock()


def source_of(group: Group) -> Source:
    """The text of a group's kernel. It follows from the group alone."""
    return WRITERS[group.kind](group)


def kernel_of(source: Source, group: Group) -> GroupKernel:
    key = source.text, group.schedule.text()
    with _lock:
        if key not in _kernels:
            _kernels[key] = compiled(source, group)
        return _kernels[key]


__all__ = ["WRITERS", "kernel_of", "source_of"]
