"""`ts.dist`: meshes, layouts of tensors on them, collectives, and running on several ranks.

    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))
    spec = ts.dist.ShardSpec(partition=("row",), mesh_axes=("dp",))
    with mesh: y = ts.dist.all_reduce(x, axis="tp")          on every rank, under mpirun
    ts.dist.simulate(program, mesh)                          or all ranks in this process
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .errors import UnknownNameError
from .foreign import DIST
from .mesh.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    permute,
    reduce_scatter,
    replicated,
)
from .mesh.collectives.record import COLLECTIVES, call_of
from .mesh.collectives.traffic import Sent, traffic
from .mesh.device_mesh import Mesh, current_mesh, mesh
from .mesh.errors import (
    DisagreementError,
    MeshError,
    PolicyMismatch,
    RankAloneWarning,
    StalledError,
    StoppedError,
)
from .mesh.from_local import from_local
from .mesh.layout import Layout, Split
from .mesh.parallel.fsdp import fsdp
from .mesh.parallel.moe import moe
from .mesh.parallel.ring import ring_attention
from .mesh.parallel.zero import Zero, zero
from .mesh.partition import assemble, indices, local_shape, pieces, take
from .mesh.ranks.messages import share
from .mesh.ranks.output import rank0_only
from .mesh.sharding.constraints import shard
from .mesh.sharding.overlap import overlap
from .mesh.sharding.reshard import ReshardPlan, plan
from .mesh.sharding.sharded_graph import ShardedProgram
from .mesh.spec import Block, Cyclic, Replicated, ShardSpec, axes_of_names, spec_of
from .mesh.tensor import DistTensor, distribute, tensor
from .mesh.world import backend, rank, simulate, world_size
from .planning.public import alpa_shard, plan_report, stand_in, stand_ins


def __getattr__(name: str) -> Callable[..., Any]:
    """A collective whose record has no function here: call(x, axis, mesh=, and its attributes)."""
    if name in COLLECTIVES:
        return partial(call_of, COLLECTIVES[name])
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownNameError(f"ts.dist has no name {name!r}", name, lambda: sorted(__all__), DIST)


__all__ = [
    "Block", "Cyclic", "DisagreementError", "DistTensor", "Layout", "Mesh", "MeshError",
    "ReshardPlan", "PolicyMismatch", "RankAloneWarning", "ShardedProgram", "Replicated", "Sent",
    "ShardSpec", "Split", "StalledError",
    "StoppedError", "Zero", "all_gather", "all_reduce", "all_to_all", "alpa_shard", "assemble",
    "axes_of_names", "backend", "barrier", "broadcast", "current_mesh", "distribute", "from_local",
    "fsdp", "indices", "local_shape", "mesh", "moe", "overlap", "permute", "pieces", "plan",
    "plan_report", "rank", "rank0_only", "reduce_scatter", "replicated", "ring_attention", "shard",
    "share", "simulate", "spec_of", "stand_in", "stand_ins", "take", "tensor", "traffic",
    "world_size", "zero",
]
