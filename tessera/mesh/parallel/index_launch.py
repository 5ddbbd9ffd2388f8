"""Index launches: a kernel, or any function, once per part of what it works on.

    ts.index_launch(axis="tp")(gemm_tile)(A.parts("tp"), B, C)

Every rank launches its own part; there is no rank that hands out work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera import config
from tessera.errors import ArgumentError, TraceError
from tessera.graph.signature import callable_name
from tessera.graph.trace import Tracer
from tessera.tensor import Tensor

from ..device_mesh import Mesh
from ..errors import MeshError
from ..ranks.group import find_mesh
from ..tensor import DistTensor, held_ranks
from ..world import mesh_rank, simulate, transport

Axis = str | Sequence[str]


def index_launch(axis: Axis, *, mesh: Mesh | None = None) -> Callable[[Callable], IndexLaunch]:
    """A launcher of kernels: index_launch("tp")(kernel)(*arguments) runs the kernel once per part.

    A distributed tensor is given to the kernel as the part of each rank, a list of parts along the
    axis (`A.parts("tp")`) as the entry of its place; anything else as it is. A kernel that writes
    into a part writes into the tensor. Parts need not have equal extents.
    mesh: default that of the distributed tensors, else the one whose `with` block is open
    """
    return lambda kernel: IndexLaunch(kernel, axis, mesh)


class IndexLaunch:
    """A kernel with the axis over which it is launched. Made by `ts.index_launch`."""

    def __init__(self, kernel: Callable, axis: Axis, mesh: Mesh | None):
        if not callable(kernel):
            raise ArgumentError(f"index_launch needs a kernel or a function, got {kernel!r}",
                                hint='ts.index_launch(axis="tp")(kernel)(A.parts("tp"), ...)')
        self.kernel, self.mesh = kernel, mesh
        self.axis: tuple[str, ...] = (axis,) if isinstance(axis, str) else tuple(axis)
        self.__name__ = f"index_launch({callable_name(kernel)})"

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """The results by place along the axis, None for places of other ranks; None when the kernel
        returns nothing. Raises MeshError for arguments of different meshes, ArgumentError for a
        list of parts of another length."""
        given = [*args, *kwargs.values()]
        where = self._find_mesh(given)
        places = where.size(self.axis)
        for x in given:
            self._check(x, places, where)
        ranks = held_ranks(where)
        if not any(isinstance(x, DistTensor) for x in given):  # one entry per place, not per rank
            firsts = {where.index(r, self.axis): r for r in reversed(ranks)}
            ranks = tuple(sorted(firsts.values()))
        found = self._run(where, ranks, args, kwargs)
        results: list[Any] = [None] * places
        for rank in reversed(ranks):
            results[where.index(rank, self.axis)] = found[rank]
        return results if any(y is not None for y in found.values()) else None

    def _run(self, where: Mesh, ranks: Sequence[int], args: tuple, kwargs: Mapping[str, Any]
             ) -> dict[int, Any]:
        def launch(rank: int) -> Any:
            own = [self._part(x, where, rank) for x in args]
            named = {k: self._part(x, where, rank) for k, x in kwargs.items()}
            return self.kernel(*own, **named)

        def take_part() -> Any:
            rank = mesh_rank(where)
            return launch(rank) if rank in ranks else None

        if transport().size > 1 or where.world_size == 1:
            return {rank: launch(rank) for rank in ranks}
        with config.scope(comm_timeout=0):  # a kernel may take its time
            return dict(enumerate(simulate(take_part, where)))

    def _find_mesh(self, given: Sequence[Any]) -> Mesh:
        meshes = list(dict.fromkeys(x.mesh for x in given if isinstance(x, DistTensor)))
        if len(meshes) > 1:
            raise MeshError(f"{self.__name__}: the arguments lie on different meshes: "
                            + " and ".join(map(str, meshes)))
        found, _ = find_mesh(self.axis, meshes[0] if meshes else self.mesh)
        assert found is not None  # an axis is named
        return found

    def _check(self, x: Any, places: int, where: Mesh) -> None:
        if isinstance(x, Tracer):
            raise TraceError(f"{self.__name__} of a traced value: launches run on parts",
                             hint="call it outside ts.jit and ts.grad")
        if _is_parts(x) and len(x) != places:
            raise ArgumentError(f"{self.__name__}: a list of {len(x)} parts, and "
                                f"{'*'.join(self.axis)} of {where} has {places} places",
                                hint=f"A.parts({self.axis[0]!r}) is such a list")

    def _part(self, x: Any, where: Mesh, rank: int) -> Any:
        if isinstance(x, DistTensor):
            return x.held[rank]
        if not _is_parts(x):
            return x
        at = where.index(rank, self.axis)
        if x[at] is None:
            raise ArgumentError(f"{self.__name__}: the list of parts has nothing at place {at}, "
                                f"that of rank {rank}",
                                hint="each rank gives the part that it holds")
        return x[at]

    def __repr__(self) -> str:
        return f"<{self.__name__} over {'*'.join(self.axis)}>"


def _is_parts(x: Any) -> bool:
    """Whether an argument is a list of parts: tensors or arrays, None for those of other ranks."""
    return type(x) is list and any(isinstance(p, Tensor | np.ndarray) for p in x) and all(
        p is None or isinstance(p, Tensor | np.ndarray) for p in x)
