"""Where a pipeline runs: the places of a mesh axis, and which of them this rank is at."""

from __future__ import annotations

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh, current_mesh
from ..placement import gpu_of, join, warn_of_play
from ..world import mesh_rank, need_world, transport


@dataclass(frozen=True)
class PipelineRanks:
    """Where a pipeline runs: on `ranks` places of an axis, of which this process is `me`, or all
    of them (None). `mesh` is None when there is none."""

    ranks: int
    me: int | None
    mesh: Mesh | None
    axis: str

    @property
    def gpu(self) -> int | None:
        """The GPU that this rank's stages run on; None on hosts."""
        return None if self.mesh is None else gpu_of(self.mesh)

    @property
    def parts(self) -> list[Mesh | None]:
        """The ranks of each place, as a mesh."""
        if self.mesh is None:
            return [None] * self.ranks
        return [self.mesh.sub(**{self.axis: r}) for r in range(self.ranks)]

    def world_rank(self, stage: int) -> int:
        """The rank of a stage at this rank's place on the other axes."""
        assert self.mesh is not None
        coords = list(self.mesh.coords(mesh_rank(self.mesh)))
        coords[self.mesh.position(self.axis)] = stage % self.ranks
        return self.mesh.world_ranks[self.mesh.rank(coords)]


def find_place(axis: str, mesh: Mesh | None, alone: int) -> PipelineRanks:
    """Where this call runs: on the given mesh or the open one; without any, on `alone` places that
    are all here, as they are in a program that runs alone.

    Raises AxisError when the mesh has no such axis, MeshError when the program runs on another
    number of ranks than the mesh.
    """
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is None:
        return PipelineRanks(alone, None, None, axis)
    ranks = mesh.shape[mesh.position(axis)]
    warn_of_play(mesh)
    if ranks == 1 or (transport().size == 1 and mesh.world_size > 1):
        return PipelineRanks(ranks, None, mesh, axis)
    need_world(mesh)
    join(mesh)
    return PipelineRanks(ranks, mesh.index(mesh_rank(mesh), (axis,)), mesh, axis)
