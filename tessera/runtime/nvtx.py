"""NVTX ranges, which Nsight shows beside kernels: through the nvtx package, or CuPy.

    with nvtx_range("forward"): ...

On with the setting `nvtx`, by default where a profiler is attached (`nsys profile` says so to the
program) and one of the packages is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import config
from ..errors import UnsupportedTargetError

PACKAGES = (("nvtx", "push_range", "pop_range"), ("cupy.cuda.nvtx", "RangePush", "RangePop"))


@functools.cache
def functions() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """(push, pop). Raises UnsupportedTargetError without a package."""
    for name, push, pop in PACKAGES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return getattr(module, push), getattr(module, pop)
    raise UnsupportedTargetError("TESSERA_NVTX is on, and neither nvtx nor CuPy is installed",
                                 hint="pip install nvtx")


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A range around the block, where they are on."""
    if not config.nvtx:
        yield
        return
    push, pop = functions()
    push(name)
    try:
        yield
    finally:
        pop()


__all__ = ["functions", "nvtx_range"]
