"""Emission of programmatic dependent launch: see the ops of tile/ops/dependents.py."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import INDENT, EmittedLine, Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.ir.ir import Op


@emits("launch_dependents")
def _launch_dependents(e: Emitter, op: Op) -> None:
    if e.generation.dependent_launches:
        e.line(e.use("launch_dependents", "use('dependents_launch')") + "()")


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
