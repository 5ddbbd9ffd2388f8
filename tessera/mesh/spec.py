"""How users write layouts: ShardSpec, Block, Cyclic, Replicated, and dicts of logical names.

Each resolves to a Layout for a tensor of known dimensions on a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tessera.call_errors import refuse_wrong_init
from tessera.errors import ArgumentError, AxisError, did_you_mean

from ..lazy_dataclass import dataclass
from .device_mesh import Mesh
from .layout import REDUCTIONS, Layout, Split

Axes = str | tuple[str, ...]  # the mesh axes of one dimension


class Distribution(Protocol):
    """What can be resolved to a layout: ShardSpec, Block, Cyclic, Replicated."""

    def resolve(self, mesh: Mesh, ndim: int, names: Sequence[str] | None = None) -> Layout: ...


@refuse_wrong_init
@dataclass(frozen=True)
class ShardSpec:
    """Which dimensions of a tensor are split, and over which axes of a mesh.

    partition: dimensions, each "row" (the first), "col" (the last), a number, or a name
    mesh_axes: for each of them the axis, or a tuple of axes, that splits it. Axes beyond those
    hold the terms of the pending reduction
    replicate: True says that nothing is split   reduce: "sum", "max", "min" or "mean" when each
    rank holds a term of the result; over the axes beyond the partition, or all that split nothing
    Raises ArgumentError for specs that contradict themselves.
    """

    partition: tuple[str | int, ...] = ()
    mesh_axes: tuple[Axes, ...] = ()
    replicate: bool = False
    reduce: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition", _tuple(self.partition))
        object.__setattr__(self, "mesh_axes", _tuple(self.mesh_axes))
        given, axes = len(self.partition), len(self.mesh_axes)
        if self.replicate and (given or axes):
            raise ArgumentError(f"{self}: what is replicated has no partition",
                                hint="leave out replicate=, or partition= and mesh_axes=")
        if self.reduce is not None and self.reduce not in REDUCTIONS:
            raise ArgumentError(f"reduce={self.reduce!r} is no reduction",
                                hint=f"one of {', '.join(REDUCTIONS)}")
        if axes < given or (axes > given and self.reduce is None):
            raise ArgumentError(
                f"{given} dimensions {self.partition} and {axes} mesh axes {self.mesh_axes}",
                hint='one mesh axis per dimension: partition=("row", "col"), mesh_axes=("dp", '
                '"tp"); a tuple splits a dimension over several: mesh_axes=(("dp", "tp"),)')

    def resolve(self, mesh: Mesh, ndim: int, names: Sequence[str] | None = None) -> Layout:
        """The layout of a tensor of `ndim` dimensions, called `names` if they have names.

        Raises AxisError for a dimension or an axis that is not there, ArgumentError for one that
        is used twice.
        """
        splits = [Split()] * ndim
        for which, axes in zip(self.partition, self.mesh_axes, strict=False):
            dim = find_dim(which, ndim, names)
            if splits[dim].axes:
                raise ArgumentError(f"{self} splits dimension {dim} twice",
                                    hint='both axes at once: mesh_axes=(("dp", "tp"),)')
            splits[dim] = Split(_tuple(axes))
        if self.reduce is None:
            return Layout(mesh, tuple(splits))
        rest = [a for axes in self.mesh_axes[len(self.partition):] for a in _tuple(axes)]
        pending = tuple(rest) or Layout(mesh, tuple(splits)).repeated
        if not pending:
            raise ArgumentError(f"{self}: {mesh} has no axis left for the pending {self.reduce}")
        return Layout(mesh, tuple(splits), pending, self.reduce)


@refuse_wrong_init
@dataclass(frozen=True)
class Block:
    """The first dimensions in balanced blocks, one mesh axis each: `Block(mesh_axes=("dp",))`."""

    mesh_axes: tuple[Axes, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", _tuple(self.mesh_axes))

    def resolve(self, mesh: Mesh, ndim: int, names: Sequence[str] | None = None) -> Layout:
        return Layout(mesh, _leading(self, mesh, ndim, 0))


@refuse_wrong_init
@dataclass(frozen=True)
class Cyclic:
    """The first dimensions dealt out in runs of `run` elements: rank r of n has the runs r, r+n,
    r+2n, ... A rank's part holds them one after another."""

    mesh_axes: tuple[Axes, ...] = ()
    run: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", _tuple(self.mesh_axes))
        if self.run < 1:
            raise ArgumentError(f"a run has at least one element, got run={self.run}")

    def resolve(self, mesh: Mesh, ndim: int, names: Sequence[str] | None = None) -> Layout:
        return Layout(mesh, _leading(self, mesh, ndim, self.run))


@dataclass(frozen=True)
class Replicated:
    """Every rank has the whole tensor."""

    def resolve(self, mesh: Mesh, ndim: int, names: Sequence[str] | None = None) -> Layout:
        return Layout(mesh, (Split(),) * ndim)


def _leading(what: Block | Cyclic, mesh: Mesh, ndim: int, cyclic: int) -> tuple[Split, ...]:
    axes = [_tuple(a) for a in what.mesh_axes]
    if len(axes) > ndim:
        raise AxisError(f"{what} splits {len(axes)} dimensions, the tensor has {ndim}")
    return tuple(Split(a, cyclic) for a in axes) + (Split(),) * (ndim - len(axes))


def _tuple(value: Any) -> tuple:
    if isinstance(value, str | int):
        return (value,)
    if not isinstance(value, Iterable):
        raise ArgumentError(f"a name or a sequence of names is expected, got {value!r}",
                            hint='dimensions, then the axes that split them: ShardSpec(("row",), '
                            '("dp",)); ShardSpec(replicate=True) splits nothing')
    return tuple(value)


def find_dim(which: str | int, ndim: int, names: Sequence[str] | None = None) -> int:
    """The number of the dimension that "row", "col", a number or a name means."""
    if isinstance(which, int):
        if -ndim <= which < ndim:
            return which % ndim
    elif names is not None and which in names:
        return list(names).index(which)
    elif which in ("row", "col") and ndim:
        return 0 if which == "row" else ndim - 1
    known = [*(names or ()), "row", "col"]
    raise AxisError(
        f"a tensor of {ndim} dimensions{f' {tuple(names)}' if names else ''} has no dimension "
        f"{which!r}", hint="a scalar cannot be split" if not ndim else did_you_mean(which, known)
        if isinstance(which, str) else f"numbers go from {-ndim} to {ndim - 1}")


# --- dicts of logical names ----------------------------------------------------------------------
def axes_of_names(layout: Mapping[str, Any], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each logical name: `{"batch": "shard", "d": ("shard", "tp"), ...}`.

    "replicate": none   "shard": the first axis that the dict does not use yet   ("shard", "tp") or
    "tp": that axis. Raises ArgumentError when no axis is left or a word is unknown.
    """
    found = {name: _named_axes(name, entry, mesh) for name, entry in layout.items()}
    taken = [a for axes in found.values() for a in axes or ()]
    free = [a for a in mesh.axes if a not in taken]
    for name, axes in found.items():
        if axes is None:
            if not free:
                raise ArgumentError(
                    f"no axis of {mesh} is left to shard {name!r} over",
                    hint='name one, ("shard", "tp"), or "replicate" it')
            found[name] = (free.pop(0),)
    return {name: axes or () for name, axes in found.items()}


def _named_axes(name: str, entry: Any, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes an entry names; None when it leaves the choice open."""
    if entry == "replicate":
        return ()
    if entry == "shard":
        return None
    axes = _tuple(entry)
    axes = axes[1:] if axes[:1] == ("shard",) else axes
    if not axes or any(a not in mesh.axes for a in axes):
        raise ArgumentError(
            f"the layout of {name!r} is {entry!r}",
            hint=f'"replicate", "shard", or an axis of {mesh}: ("shard", {mesh.axes[-1]!r})')
    return axes


def spec_of(layout: Mapping[str, Any], dims: Sequence[str], mesh: Mesh) -> ShardSpec:
    """The ShardSpec of a tensor with the dimensions `dims` under a layout dict; a dimension that
    the dict does not name is whole."""
    by_name = axes_of_names(layout, mesh)
    split = [(d, by_name[n]) for d, n in enumerate(dims) if by_name.get(n)]
    if not split:
        return ShardSpec(replicate=True)
    return ShardSpec(tuple(d for d, _ in split),
                     tuple(a[0] if len(a) == 1 else a for _, a in split))
