"""`ts.pmap`: a function of one row, on all rows, which are spread over the first axis of a mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import numpy as np

from tessera.ad.transform import need_function
from tessera.ad.vmap import vmap
from tessera.errors import ArgumentError, SourceLine, TraceError, user_line
from tessera.graph import tree
from tessera.graph.donation import use_up
from tessera.graph.signature import callable_name, is_data
from tessera.graph.trace import current_builder
from tessera.tensor import Tensor, as_tensor
from tessera.tile.launch.resident import Resident

from ..device_mesh import Mesh, current_mesh
from ..layout import Layout, replicated
from ..partition import balanced, take
from ..placement import join, warn_of_play
from ..tensor import DistTensor, distribute, held_ranks, moved_to_mesh, need_plain
from .batches import rows_of


def pmap(fn: Callable, donate: Collection[str | int] = (), *, mesh: Mesh | None = None) -> PMap:
    """fn on each slice of its arguments along their first dimension: what `ts.vmap` gives, computed
    by the ranks of the mesh's first axis, a block of slices each.

    Arguments are tensors that every rank has whole, distributed tensors, or trees of them; keyword
    arguments are passed whole. Results are distributed tensors, split over that axis; nothing is
    communicated for an argument that is whole or split so already. Without a mesh, here and as
    plain tensors.
    donate: names or positions of arguments whose memory may be overwritten: it is given back, and
    using such a tensor again raises. mesh: default the one whose `with` block is open
    Raises ArgumentError for a donated argument that is not there or used twice, ShapeError when
    first extents differ.
    """
    need_function(fn, "pmap")
    return PMap(fn, donate, mesh)


class PMap:
    """A mapped function. Make one with `ts.pmap`."""

    def __init__(self, fn: Callable, donate: Collection[str | int], mesh: Mesh | None):
        self.fn, self.mesh, self.mapped = fn, mesh, vmap(fn)
        self.__name__, self.__doc__ = f"pmap({callable_name(fn)})", fn.__doc__
        self.donated = frozenset(self._position(d) for d in
                                 ((donate,) if isinstance(donate, str | int) else donate))

    def _position(self, which: str | int) -> int:
        names = list(inspect.signature(self.fn).parameters)
        if isinstance(which, str) and which in names:
            return names.index(which)
        if isinstance(which, int) and not isinstance(which, bool) and 0 <= which < len(names):
            return which
        raise ArgumentError(f"donate={which!r} is no argument of {callable_name(self.fn)}",
                            hint=f"names or positions of {', '.join(names)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_builder() is not None:
            raise TraceError(f"{self.__name__} cannot be traced: it runs on the parts of ranks",
                             hint="ts.vmap(fn) inside ts.jit; or call it outside")
        self._check_donated(args, kwargs)
        mesh = self.mesh if self.mesh is not None else current_mesh()
        out = self.mapped(*args, **kwargs) if mesh is None else self._on(mesh, args, kwargs)
        line = user_line()
        for at in self.donated & set(range(len(args))):
            for t in tree.flatten(args[at])[0]:
                _give_up(t, self.__name__, line)
        return out

    def _on(self, mesh: Mesh, args: tuple, kwargs: dict) -> Any:
        warn_of_play(mesh)
        join(mesh)
        kwargs = moved_to_mesh(kwargs, mesh)
        rows, axis = rows_of(args, "the arguments"), mesh.axes[0]
        mine = {r: tree.map_tree(lambda t: _Rows(t, mesh, axis), args) for r in held_ranks(mesh)}
        found = {}
        for rank, own in mine.items():
            block = moved_to_mesh(tree.map_tree(lambda rows_, rank=rank: rows_.of(rank), own), mesh)
            found[rank] = tree.flatten(self.mapped(*block, **kwargs))
        if not found:
            return None
        leaves = {rank: flat for rank, (flat, _) in found.items()}
        structure = next(iter(found.values()))[1]
        count = len(next(iter(leaves.values())))
        return tree.unflatten(structure, [
            _join_results({r: flat[i] for r, flat in leaves.items()}, rows, mesh, axis)
            for i in range(count)])

    def _check_donated(self, args: tuple, kwargs: dict) -> None:
        own = [tree.flatten(args[at])[0] for at in sorted(self.donated) if at < len(args)]
        given = [id(t) for flat in own for t in flat]
        rest = [a for at, a in enumerate(args) if at not in self.donated]
        others = {id(t) for t in tree.flatten([rest, kwargs])[0]}
        for t in (t for flat in own for t in flat):
            if not isinstance(t, Tensor):
                raise ArgumentError(f"{self.__name__}: a donated argument is a "
                                    f"{type(t).__name__}", hint="only tensors can be given up")
            if id(t) in others or given.count(id(t)) > 1:
                raise ArgumentError(f"{self.__name__}: a donated tensor is an argument twice",
                                    hint="its memory may be overwritten while the other is read")

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class _Rows:
    """The rows of one argument, by rank."""

    def __init__(self, x: Any, mesh: Mesh, axis: str):
        t = as_tensor(x)
        need_plain(t.type)
        self.layout = _row_layout(mesh, axis, t.ndim)
        self.x = distribute(t, self.layout) if isinstance(t, DistTensor) else t

    def of(self, rank: int) -> Tensor:
        if isinstance(self.x, DistTensor):
            return self.x.held[rank]
        if isinstance(self.x, Resident):
            cuts = balanced(self.x.shape[0], self.layout.parts(0))
            return self.x[slice(*cuts[self.layout.part(rank, 0)])]
        return Tensor(take(self.x.array, self.layout, rank, self.x.dtype), self.x.type)


def _row_layout(mesh: Mesh, axis: str, ndim: int) -> Layout:
    return replicated(mesh, ndim).with_split(0, (axis,))


def _join_results(parts: dict[int, Any], rows: int, mesh: Mesh, axis: str) -> Any:
    """A result of all ranks as one tensor; what is no tensor is the same on all."""
    first = next(iter(parts.values()))
    if not is_data(first):
        return first
    held = {r: as_tensor(p) for r, p in parts.items()}
    like = next(iter(held.values()))
    need_plain(like.type)
    return DistTensor(held, (rows, *like.shape[1:]), like.type, _row_layout(mesh, axis, like.ndim))


# --- tensors that were given up -------------------------------------------------------------------
class _DonatedTensor(Tensor):
    """A tensor whose memory was given up. Its shape and type are still there."""

    __slots__ = ()

    def _raise(self) -> NoReturn:
        by, line = self._buffer
        raise ArgumentError(f"a tensor {self.type}{list(self.shape)} is used after it was donated "
                            f"to {by}{f' at {line}' if line else ''}",
                            hint="leave it out of donate=, or use the result instead",
                            code="E_DONATED")

    @property
    def array(self) -> np.ndarray:
        self._raise()

    @property
    def buffer(self) -> np.ndarray:
        self._raise()

    def __repr__(self) -> str:
        return f"Tensor{list(self.shape)} {self.type} donated"


class _DonatedDistTensor(_DonatedTensor, DistTensor):
    """The same of a distributed tensor."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def held(self) -> dict[int, Tensor]:
        self._raise()


def _give_up(t: Tensor, by: str, line: SourceLine | None) -> None:
    if isinstance(t, Resident):
        return use_up([t], by)
    if isinstance(t, DistTensor):
        t.held = {}
    t._buffer = (by, line)  # type: ignore[assignment]
    t.__class__ = _DonatedDistTensor if isinstance(t, DistTensor) else _DonatedTensor


__all__ = ["PMap", "pmap"]
