"""Meshes: named grids of devices, how tensors lie on them, and what their ranks exchange.

`ts.dist` has the public names; `ts.mesh(devices, ...)` is `ts.dist.mesh`. No module here starts
MPI before a rank needs to communicate.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from . import abort
from .device_mesh import Mesh, mesh


class _MeshModule(ModuleType):
    """The package; called, it builds a mesh."""

    def __call__(self, *args: Any, **kwargs: Any) -> Mesh:
        return mesh(*args, **kwargs)


MODULE: Any = sys.modules[__name__]
MODULE.__class__ = _MeshModule
abort.install()
