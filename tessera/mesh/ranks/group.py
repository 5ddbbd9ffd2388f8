"""A group: the ranks that take part in one collective, in their order, seen from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tessera.errors import ArgumentError
from tessera.numerics import DType

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh, created_meshes, current_mesh
from ..world import mesh_rank, transport
from .array_bytes import byte_count, from_bytes, to_bytes
from .envelope import MessageLabel, Shape
from .transport import Transport


@dataclass(frozen=True)
class Group:
    """Some ranks of a transport, by its numbers. `axis` is what they are called in messages."""

    transport: Transport
    ranks: tuple[int, ...]
    axis: str

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return self.ranks.index(self.transport.rank)

    def swap_bytes(self, sends: Sequence[np.ndarray], counts: Sequence[int], label: MessageLabel
                   ) -> list[np.ndarray]:
        """sends[j] to member j, and counts[j] bytes from it: uint8 arrays by member. A message
        without bytes is not sent: both sides know its length."""
        me = self.index
        out = [np.empty(n, np.uint8) for n in counts]
        out[me] = sends[me]
        to = {r: np.ascontiguousarray(sends[j]) for j, r in enumerate(self.ranks)
              if j != me and sends[j].size}
        come = {r: out[j] for j, r in enumerate(self.ranks) if j != me and counts[j]}
        self.transport.exchange(to, come, label)
        return out

    def swap(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape], dtype: DType,
             label: MessageLabel) -> list[np.ndarray]:
        """arrays[j] to member j, and an array of shapes[j] from it."""
        got = self.swap_several([[a] for a in arrays], [[s] for s in shapes], [dtype], label)
        return [one for (one,) in got]

    def swap_several(self, arrays: Sequence[Sequence[np.ndarray]],
                     shapes: Sequence[Sequence[Shape]], dtypes: Sequence[DType],
                     label: MessageLabel) -> list[list[np.ndarray]]:
        """arrays[j], of these types, to member j in one message, and arrays of shapes[j] from it.
        """
        sends = [_concatenate([*map(to_bytes, own, dtypes)]) for own in arrays]
        sizes = [[*map(byte_count, map(prod, own), dtypes)] for own in shapes]
        kinds = " ".join(dict.fromkeys(d.name for d in dtypes))
        got = self.swap_bytes(sends, [*map(sum, sizes)], label.of(kinds))
        found = []
        for data, own, size in zip(got, shapes, sizes, strict=True):
            parts = np.split(data, np.cumsum(size[:-1]))
            found.append([from_bytes(part, d, prod(s)).reshape(s)
                          for part, d, s in zip(parts, dtypes, own, strict=True)])
        return found


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def find_mesh(axis: str | Sequence[str] | None = None, mesh: Mesh | None = None
              ) -> tuple[Mesh | None, tuple[str, ...] | None]:
    """The mesh and the axes that a call means: the given mesh, else the one whose `with` block is
    open, else the only one created. Without axis, mesh and block: (None, None), all ranks.

    Raises ArgumentError when an axis is named and there is no mesh, or more than one; AxisError
    for an axis that the mesh does not have.
    """
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is None and axis is None:
        return None, None
    mesh = mesh if mesh is not None else _only_mesh(axis)
    names = mesh.axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        mesh.position(name)
    return mesh, names


def _only_mesh(axis: Any) -> Mesh:
    found = created_meshes()
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArgumentError(f"the axis {axis!r} is of no mesh: none is given and there is none",
                            hint=f"mesh = ts.dist.mesh(...), or leave out axis={axis!r} for all "
                            "ranks")
    raise ArgumentError(f"the axis {axis!r} may be of any of {len(found)} meshes: "
                        f"{', '.join(map(str, found))}",
                        hint="with mesh: ..., or mesh=mesh, says which")


def make_group(mesh: Mesh | None, axes: Sequence[str] | None) -> Group:
    """This rank's group along axes of a mesh; without a mesh, every rank of the program.

    Raises MeshError when the program runs on another number of ranks than the mesh asks for and on
    ranks that are not in it.
    """
    if mesh is None:
        here = transport()
        return Group(here, tuple(range(here.size)), "all ranks")
    axes = mesh.axes if axes is None else tuple(axes)
    world, me = mesh.world_ranks, mesh_rank(mesh)
    members = tuple(world[r] for r in mesh.group(me, axes))
    return Group(transport(), members, "*".join(axes) or "one rank")


def find_group(axis: str | Sequence[str] | None = None, mesh: Mesh | None = None) -> Group:
    """This rank's group of a call: `make_group` of what `find_mesh` finds."""
    return make_group(*find_mesh(axis, mesh))
