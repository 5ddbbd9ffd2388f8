"""Which trace is open in this thread: what a call of an op, a kernel or a routine asks first.

    if trace_state.builder is not None: ...      # a graph is being built: the call becomes a node

It stands below the graph, which writes it, so that kernels can ask without importing the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import SourceLine
    from .graph.trace import GraphBuilder


class TraceState(threading.local):
    """builder: of the open trace. where: set while a graph is evaluated again: the original line.
    hints: of the open `with` blocks, noted on the lines within.  part, of: of a step, see
    SourceLine.  read: tensors whose values the function that is compiled has read as it was traced.
    quiet: calls a function of arrays where NumPy does not speak of what overflows.
    """

    builder: GraphBuilder | None = None
    where: SourceLine | None = None
    hints: tuple[str, ...] = ()
    part: str = ""
    of: str = ""
    read: list[Any] | None = None
    quiet: Callable[..., Any] | None = None


trace_state = TraceState()


@contextmanager
def values_read() -> Iterator[list[Any]]:
    """The tensors whose values Python reads in the block."""
    around, trace_state.read = trace_state.read, []
    try:
        yield trace_state.read
    finally:
        trace_state.read = around


__all__ = ["TraceState", "trace_state", "values_read"]
