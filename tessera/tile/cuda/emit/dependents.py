"""Emission of programmatic dependent launch: see the ops of tile/ops/dependents.py."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.ir.ir import Op


@emits("launch_dependents")
def _launch_dependents(e: Emitter, op: Op) -> None:
    if e.generation.dependent_launches:
        e.line(e.use("launch_dependents", "use('dependents_launch')") + "()")


@emits("grid_dependency_wait")
def _grid_dependency_wait(e: Emitter, op: Op) -> None:
    if e.generation.dependent_launches and not e.facts.batched:  # a batch reads its table first
        e.line(e.use("dependency_wait", "use('dependents_wait')") + "()")
        e.dependent = True
