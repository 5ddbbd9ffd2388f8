"""`ts.dist`: meshes, layouts of tensors on them, collectives, and running on several ranks.

    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))
    spec = ts.dist.ShardSpec(partition=("row",), mesh_axes=("dp",))
    with mesh: y = ts.dist.all_reduce(x, axis="tp")          on every rank, under mpirun
    ts.dist.simulate(program, mesh)                          or all ranks in this process
"""

from __future__ import annotations

from .mesh.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    permute,
    reduce_scatter,
)
from .mesh.device_mesh import Mesh, current_mesh, mesh
from .mesh.errors import DisagreementError, MeshError, StalledError, StoppedError
from .mesh.layout import Layout, Split
from .mesh.parts import assemble, indices, local_shape, pieces, take
from .mesh.reshard import Plan, plan
from .mesh.spec import Block, Cyclic, Replicated, ShardSpec, axes_of_names, spec_of
from .mesh.world import rank, simulate, world_size

__all__ = [
    "Block", "Cyclic", "DisagreementError", "Layout", "Mesh", "MeshError", "Plan", "Replicated",
    "ShardSpec", "Split", "StalledError", "StoppedError", "all_gather", "all_reduce",
    "all_to_all", "assemble", "axes_of_names", "barrier", "broadcast", "current_mesh", "indices",
    "local_shape", "mesh", "permute", "pieces", "plan", "rank", "reduce_scatter", "simulate",
    "spec_of", "take", "world_size",
]
