"""A mesh: devices in a grid with named axes, as plain data that can be built anywhere.

Entry i of `devices` is mesh rank i; ranks are row-major, the last axis fastest. Building a mesh
asks for no device and no process. Running on it needs one rank per entry (see world.py).

A mesh numbers its ranks from 0. The program has numbers of its own for them, its world ranks: the
same ones for a whole mesh, and those in `ranks` for a part of one, `mesh.sub(pp=1)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from math import prod
from typing import Any
from weakref import WeakValueDictionary

from tessera import hooks
from tessera.errors import ArgumentError, AxisError, ShapeError, did_you_mean
from tessera.lazy_dataclass import dataclass

# The meshes whose blocks are open, outermost first. A context variable: the threads that simulate
# ranks run in copies of the context that started them.
_open: ContextVar[tuple[Mesh, ...]] = ContextVar("open meshes", default=())
MOST_RANKS = 1 << 17
_created: WeakValueDictionary[int, Mesh] = WeakValueDictionary()  # by id


@dataclass(frozen=True)
class Mesh:
    """A grid of devices with named axes. Make one with `ts.dist.mesh`.

    `with mesh:` makes it the mesh of the operations inside that name none.
    """

    devices: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    topology: str | None = None
    rules: tuple[tuple[str, Any], ...] = ()  # the layout dict of `with mesh(..., layout=)`
    ranks: tuple[int, ...] | None = None  # of a part: the world rank of each of its ranks
    world: int | None = None  # of a part: how many ranks the whole mesh has

    @property
    def world_ranks(self) -> Sequence[int]:
        """The world rank of each rank of this mesh: 0, 1, 2, ... unless it is part of another."""
        return range(self.size()) if self.ranks is None else self.ranks

    @property
    def world_size(self) -> int:
        """How many ranks a program needs to run on this mesh: those of the whole one."""
        return self.size() if self.world is None else self.world

    def has(self, rank: int) -> bool:
        """Whether a world rank belongs to this mesh."""
        return rank in self.world_ranks

    def sub(self, **places: int) -> Mesh:
        """The part of this mesh at these places, on the axes that are left: `mesh.sub(pp=1)`.

        Its ranks are numbered from 0 anew, in the same order. Of the mesh's layout dict, names
        that an axis splits which is not left are replicated. Raises AxisError for an axis or a
        place that is not there.
        """
        for axis, at in places.items():
            extent = self.shape[self.position(axis)]
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < extent:
                raise AxisError(f"{self} has no place {axis}={at!r}",
                                hint=f"{axis} goes from 0 to {extent - 1}")
        left = [i for i, axis in enumerate(self.axes) if axis not in places]
        found = [r for r in range(self.size()) if all(
            self.index(r, (axis,)) == at for axis, at in places.items())]
        return Mesh(
            tuple(self.devices[r] for r in found), tuple(self.axes[i] for i in left),
            tuple(self.shape[i] for i in left), self.topology,
            tuple((name, _without(entry, places)) for name, entry in self.rules),
            tuple(self.world_ranks[r] for r in found), self.world_size)

    def shard(self, x: Any, which: Any, *, dims: Sequence[str] | None = None) -> Any:
        """x distributed over this mesh: `mesh.shard(W, {"d_model"}, dims=("vocab", "d_model"))`.

        which: a set of dimensions, split over the mesh's last axis, or a dict that names the axes,
        {"d_model": "tp"}. A dimension is a name of `dims`, "row", "col" or a number.
        x: a tensor or array that is the same on all ranks, or a distributed tensor; or a type,
        Tensor["vocab", "d_model"], whose ShardSpec is the result
        Raises AxisError for a dimension or an axis that is not there.
        """
        return hooks.shard_named.get()(self, x, which, dims)

    @property
    def backend(self) -> str:
        """What carries arrays of GPUs between this mesh's ranks: "nccl" where each has a GPU of its
        own, "mpi" elsewhere under mpirun, "tcp" under torchrun and srun, "local" in a
        simulation, "single" without other ranks.

        Nothing is sent for it. Until the first collective of arrays on GPUs, where the ranks find
        out together, it is what this rank finds on its machine. Raises MeshError where
        TESSERA_COMM=nccl demands what is not there.
        """
        return hooks.backend_of.get()(self)

    @property
    def names_gpus(self) -> bool:
        """Whether some of its devices are GPUs."""
        return any(d.startswith("cuda") for d in self.devices)

    @property
    def layout(self) -> dict[str, Any]:
        """What each logical name is under this mesh: {"batch": "shard", ...}."""
        return dict(self.rules)

    def size(self, axis: str | Sequence[str] | None = None) -> int:
        """The number of ranks along an axis, along several, or of the whole mesh."""
        if axis is None:
            return prod(self.shape)
        return prod(self.shape[self.position(a)] for a in _names(axis))

    def position(self, axis: str) -> int:
        """Where `axis` stands among the axes. Raises AxisError with the names there are."""
        if axis not in self.axes:
            raise AxisError(f"{self} has no axis {axis!r}", hint=did_you_mean(axis, self.axes))
        return self.axes.index(axis)

    def coords(self, rank: int) -> tuple[int, ...]:
        """The place of a rank in the grid, one index per axis."""
        if not 0 <= rank < self.size():
            raise AxisError(f"{self} has ranks 0 to {self.size() - 1}, asked for {rank}")
        place = []
        for extent in reversed(self.shape):
            rank, index = divmod(rank, extent)
            place.append(index)
        return tuple(reversed(place))

    def rank(self, coords: Sequence[int]) -> int:
        """The rank at a place of the grid: the inverse of coords."""
        if len(coords) != len(self.shape) or not all(
                0 <= c < n for c, n in zip(coords, self.shape, strict=True)):
            raise AxisError(f"{self} has no place {tuple(coords)}")
        rank = 0
        for index, extent in zip(coords, self.shape, strict=True):
            rank = rank * extent + index
        return rank

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The row-major index of a rank along `axes`, the last of which runs fastest."""
        place, found = self.coords(rank), 0
        for axis in axes:
            at = self.position(axis)
            found = found * self.shape[at] + place[at]
        return found

    def group(self, rank: int, axis: str | Sequence[str] | None = None) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, itself included, by their index."""
        axes = self.axes if axis is None else _names(axis)
        place = list(self.coords(rank))
        at = [self.position(a) for a in axes]
        found = []
        for index in itertools.product(*(range(self.shape[p]) for p in at)):
            for p, i in zip(at, index, strict=True):
                place[p] = i
            found.append(self.rank(place))
        return tuple(found)

    def groups(self, axis: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`: disjoint, together every rank."""
        made = {self.group(rank, axis): None for rank in range(self.size())}
        return tuple(made)

    def __enter__(self) -> Mesh:
        _open.set((*_open.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        _open.set(_open.get()[:-1])

    def __str__(self) -> str:
        grid = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        return f"mesh({grid})" + (f" of ranks {_short(self.ranks)}" if self.ranks else "")


def mesh(
    devices: Sequence[str] | None = None,
    axes: Sequence[str] | str | None = None,
    shape: Sequence[int] | int | None = None,
    topology: str | None = None,
    *,
    layout: Mapping[str, Any] | None = None,
) -> Mesh:
    """A mesh of named axes: `mesh(devices=[...], axes=("dp", "tp"), shape=(4, 2))`.

    devices: one name per rank, row-major; None: "cpu:0" and so on, as many as the shape needs
    axes: one name per axis; None for one axis: ("devices",)   shape: None for one axis: all
    topology: the fabric, kept for planning   layout: what `with mesh:` says of logical names,
    {"batch": "shard", "params": "replicate"}
    Raises ShapeError when the shape and the number of devices differ, ArgumentError otherwise.
    """
    if isinstance(devices, Mapping):
        raise ArgumentError(f"devices are names, got {devices!r}",
                            hint=f"ts.dist.mesh(axes={tuple(devices)}, "
                            f"shape={tuple(devices.values())})")
    names = ("devices",) if axes is None else _names(axes)
    extents = _extents(shape, devices, names)
    need_few(extents)
    found = _devices(devices, extents)
    if prod(extents) != len(found):
        grid = " x ".join(map(str, extents))
        raise ShapeError(f"a mesh of {grid} = {prod(extents)} ranks cannot have {len(found)} "
                         "devices", hint=_fitting(extents, len(found)))
    if len(set(names)) != len(names) or not all(names):
        raise ArgumentError(f"the axes of a mesh need different names, got {names}")
    rules = tuple((layout or {}).items())
    made = Mesh(found, names, extents, topology, rules)
    _created[id(made)] = made
    return made


def need_few(extents: Sequence[int]) -> None:
    """Raise ArgumentError for a mesh of more ranks than one can have, before memory is taken for
    their names."""
    if prod(extents) > MOST_RANKS:
        raise ArgumentError(f"a mesh of {' x '.join(map(str, extents))} = {prod(extents)} ranks: "
                            f"the most is {MOST_RANKS}")


def _without(entry: Any, gone: Mapping[str, int]) -> Any:
    """An entry of a layout dict on a part that has lost some axes."""
    named = (entry,) if isinstance(entry, str) else tuple(entry)
    return "replicate" if any(a in gone for a in named) else entry


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown}, ... {ranks[-1]}" if len(ranks) > 4 else shown


def _names(axis: str | Sequence[str]) -> tuple[str, ...]:
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    if not all(isinstance(a, str) for a in names):
        raise ArgumentError(f"mesh axes are given by name, got {axis!r}", hint='axes=("dp", "tp")')
    return names


def _extents(shape: Any, devices: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    if shape is None:
        if len(names) != 1 or devices is None:
            raise ArgumentError(f"a mesh with the axes {names} needs a shape",
                                hint=f"shape=({', '.join(['2'] * len(names))},)")
        return (len(devices),)
    extents = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in extents):
        raise ArgumentError(f"the shape of a mesh is integers >= 1, got {shape!r}")
    if len(extents) != len(names):
        raise ArgumentError(f"{len(names)} axes {names} and a shape of {len(extents)} extents "
                            f"{extents}", hint="name each axis of the shape")
    return extents


def _devices(devices: Any, extents: tuple[int, ...]) -> tuple[str, ...]:
    if devices is None:
        return tuple(f"cpu:{i}" for i in range(prod(extents)))
    found = tuple(devices) if not isinstance(devices, str) else (devices,)
    if not all(isinstance(d, str) for d in found):
        raise ArgumentError(f"devices are names, got {devices!r}", hint='["cuda:0", "cuda:1"]')
    twice = sorted({d for d in found if found.count(d) > 1})
    if twice:
        raise ArgumentError(
            f"{', '.join(twice)} {'stands' if len(twice) == 1 else 'stand'} twice in the mesh",
            hint="entry i names rank i, not the GPU of its node: cuda:0, cuda:1, ... up to the "
            "number of ranks; without devices= a mesh computes on hosts")
    return found


def _fitting(extents: tuple[int, ...], count: int) -> str:
    """What to do about a shape that does not fit `count` devices."""
    ways = [f"give {prod(extents)} devices"]
    rest = prod(extents[:-1])
    if count and count % rest == 0:
        ways.append(f"shape={(*extents[:-1], count // rest)}")
    return ", or ".join(ways)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost open `with mesh:`, None outside of any."""
    opened = _open.get()
    return opened[-1] if opened else None


def created_meshes() -> list[Mesh]:
    """The different meshes that `mesh` has made and that something still holds."""
    return list(dict.fromkeys(_created.values()))
