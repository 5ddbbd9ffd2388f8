"""The Schedule IR in short: one line for each group, and the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from ...dims import size_of
from .groups import FusionGroup
from .memory_plan import MemoryPlan


def describe(groups: Sequence[FusionGroup], memory: MemoryPlan) -> str:
    """Of any target; the blocks of kernels for GPUs are in the long form (build_schedule.py)."""
    lines = [f"schedule v1 units={len(groups)}"]
    for g in groups:
        if g.call is None:
            work = size_of(g.space)
            lines.append(f"  {g}    # {work} elements, {len(g.inputs)} in, {len(g.outputs)} out")
        else:
            outs = ", ".join(str(v.aval) for v in g.outputs)
            lines.append(f"  call {g.call.op.name} -> {outs}"
                         + (f"    # {g.where}" if g.where else ""))
    lines.append(f"  memory: arena {memory.arena_bytes} bytes, "
                 f"{memory.unshared_bytes} without reuse")
    return "\n".join(lines)


__all__ = ["describe"]
