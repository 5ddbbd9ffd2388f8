"""Meshes: named grids of devices, how tensors lie on them, and what their ranks exchange.

Here: meshes, layouts, parts and distributed tensors. ranks/: who takes part and how bytes travel.
collectives/: what ranks exchange. sharding/: from a graph to what each rank runs. parallel/:
pipelines and other forms. planning/: what a program will cost elsewhere. `ts.dist` has the public
names; `ts.mesh(devices, ...)` is `ts.dist.mesh`. No module starts MPI before a rank communicates.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tessera import hooks

from .collectives import functions as functions
from .collectives import merge as merge
from .collectives import rank_extents as rank_extents
from .collectives import replicated as replicated
from .device_mesh import Mesh, mesh
from .ranks import abort
from .world import surroundings


class _MeshModule(ModuleType):
    """The package; called, it builds a mesh."""

    def __call__(self, *args: Any, **kwargs: Any) -> Mesh:
        return mesh(*args, **kwargs)


def _backend_of(where: Mesh) -> str:
    from .ranks.communicator import backend_of  # it stands on the runtime of GPUs, which few need

    return backend_of(where)


MODULE: Any = sys.modules[__name__]
MODULE.__class__ = _MeshModule
hooks.backend_of.fill(_backend_of)
hooks.surroundings.append(surroundings)
abort.install()
