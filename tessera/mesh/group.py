"""A group: the ranks that take part in one collective, in their order, seen from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tessera.errors import ArgumentError
from tessera.numerics import DType

from .device_mesh import Mesh, current_mesh
from .transport import Transport
from .wire import byte_count, from_bytes, to_bytes
from .world import need_world, transport

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Some ranks of a transport. `axis` is what they are called in messages."""

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

    def swap_bytes(self, sends: Sequence[np.ndarray], counts: Sequence[int], what: str
                   ) -> list[np.ndarray]:
        """sends[j] to member j, and counts[j] bytes from it: uint8 arrays by member. A message
        without bytes is not sent: both sides know its length."""
        me = self.index
        out = [np.empty(n, np.uint8) for n in counts]
        out[me] = sends[me]
        to = {r: np.ascontiguousarray(sends[j]) for j, r in enumerate(self.ranks)
              if j != me and sends[j].size}
        come = {r: out[j] for j, r in enumerate(self.ranks) if j != me and counts[j]}
        self.transport.exchange(to, come, what)
        return out

    def swap(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape], dtype: DType, what: str
             ) -> list[np.ndarray]:
        """arrays[j] to member j, and an array of shapes[j] from it."""
        sends = [to_bytes(a, dtype) for a in arrays]
        counts = [byte_count(prod(s), dtype) for s in shapes]
        got = self.swap_bytes(sends, counts, what)
        return [from_bytes(data, dtype, prod(s)).reshape(s)
                for data, s in zip(got, shapes, strict=True)]


def find_group(axis: str | Sequence[str] | None = None, mesh: Mesh | None = None) -> Group:
    """This rank's group along mesh axes, of the given mesh or the one whose `with` block is open;
    without axis and mesh, every rank of the program.

    Raises MeshError when the program runs on another number of ranks than the mesh has, AxisError
    for an axis it does not have.
    """
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is None:
        here = transport()
        if axis is not None:
            _need_mesh(axis)
        return Group(here, tuple(range(here.size)), "all ranks")
    mesh.group(0, axis)  # an axis that is not there is the first thing to say
    here = need_world(mesh)
    names = mesh.axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    return Group(here, mesh.group(here.rank, axis), "*".join(names))


def _need_mesh(axis: str | Sequence[str]) -> None:
    raise ArgumentError(f"the axis {axis!r} is of no mesh: none is given and no `with mesh:` is "
                        "open", hint=f"with mesh: ..., or mesh=mesh, or leave out axis={axis!r} "
                        "for all ranks")
