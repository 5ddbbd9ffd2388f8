"""Emission of programmatic dependent launch: see the ops of tile/ops/dependents.py."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import INDENT, EmittedLine, Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.ir.ir import Op

# Groups that run at one time on the largest chips: so many of a multiprocessor, by their threads.
MULTIPROCESSORS, GROUPS, THREADS = 160, 32, 2048


@emits("launch_dependents")
def _launch_dependents(e: Emitter, op: Op) -> None:
    """By the last groups, as many as may run at one time: those before them have ended by then, and
    who ends need not say it. Each that does holds up the start of others: 65536 groups that do
    nothing take 79.6 us where all say it, 42.8 where the last do, 40.3 where none does, whatever
    their threads; 16384 take 20.5, 13.2 and 10.8 (NVIDIA H200, 2026-11-27)."""
    if not e.generation.dependent_launches:
        return
    last = MULTIPROCESSORS * min(GROUPS, max(1, THREADS // e.lanes))
    group, groups = e.use("block_number", "use('ctaid_x')"), e.use("all_groups", "use('nctaid_x')")
    e.line(f"if i32({group}() + {last}) >= {groups}():")
    e.line(INDENT + e.use("launch_dependents", "use('dependents_launch')") + "()")


@emits("grid_dependency_wait")
def _grid_dependency_wait(e: Emitter, op: Op) -> None:
    """In front of all else where it stands first. Elsewhere a batch has none, as it has read its
    table."""
    if not e.generation.dependent_launches or e.lines and e.facts.batched:
        return
    wait = e.use("dependency_wait", "use('dependents_wait')") + "()"
    e.dependent = True
    if e.lines:
        e.line(wait)
    else:
        e.top.insert(0, EmittedLine(INDENT + wait, op.where))
