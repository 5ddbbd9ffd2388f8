"""The levels of a compiled function as text, and its launches on a GPU: `f.inspect_ir`,
`f.schedule`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError, did_you_mean
from .ir import Graph

if TYPE_CHECKING:
    from .cuda.launch_plan import LaunchPlan
    from .traced_signature import TracedSignature

LEVELS = ("graph", "schedule", "tile", "target", "ptx", "sass")


def need_level(level: str) -> None:
    """Raises ArgumentError for a level that there is not."""
    if level not in LEVELS:
        raise ArgumentError(f"there is no level {level!r}: levels are {', '.join(LEVELS)}",
                            hint=did_you_mean(str(level), LEVELS), code="E_LEVEL")


def level_text(level: str, traced: TracedSignature, target: str | None) -> str:
    """One level. Below the graph and the schedule, and for a target that is not the CPU, that of
    the graph lowered for a GPU, wherever it runs."""
    if level == "graph":
        return str(traced.graph) if traced.layouts is None else f"{traced.graph}\n{traced.program}"
    if level == "schedule" and target in (None, "cpu"):
        return traced.executable.compiled.describe()
    from .cuda import text_of  # loads what lowers for GPUs

    return text_of(level, traced.graph, None if target == "cpu" else target)


def launch_plan(graph: Graph, target: str | None) -> LaunchPlan:
    """Every launch of a graph on a GPU."""
    from .cuda import launches_of

    return launches_of(graph, target)


__all__ = ["LEVELS", "launch_plan", "level_text", "need_level"]
