"""A layout: how the dimensions of a tensor lie on the axes of a mesh, in one normal form.

    Layout(mesh, (Split(("dp",)), Split()))      rows in blocks over dp, columns whole
    pending=("tp",), op="sum"                    every rank along tp holds a term of a sum

A mesh axis does one thing: it splits a dimension, holds pending terms, or repeats. What users
write (ShardSpec, Block, dicts) is resolved to this; propagation and resharding work with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.errors import ArgumentError, AxisError
from tessera.graph.text_values import RECORDS

from ..lazy_dataclass import dataclass
from .device_mesh import Mesh

REDUCTIONS = ("sum", "max", "min", "mean")


@dataclass(frozen=True)
class Split:
    """What splits one dimension: mesh axes, the last fastest; none: every rank has it whole.

    cyclic: 0 for one balanced block per part; k deals out runs of k elements in turn.
    unit: blocks are balanced in whole runs of so many elements: with unit=64 a dimension of
    heads x 64 is cut between heads.
    """

    axes: tuple[str, ...] = ()
    cyclic: int = 0
    unit: int = 1

    def __str__(self) -> str:
        text = "*".join(self.axes) or "-"
        by = f" by {self.unit}" if self.unit > 1 else ""
        return (f"{text} cyclic {self.cyclic}" if self.cyclic else text) + by


@dataclass(frozen=True)
class Layout:
    """One Split per dimension of the tensor, and the axes over which a reduction is pending.

    regather: axes over which a value is gathered for each use anew, and freed after it (fsdp)
    Raises AxisError for an axis that the mesh does not have, ArgumentError for one used twice.
    """

    mesh: Mesh
    splits: tuple[Split, ...]
    pending: tuple[str, ...] = ()
    op: str | None = None
    regather: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [a for split in self.splits for a in split.axes] + list(self.pending)
        for axis in used:
            self.mesh.position(axis)
            if used.count(axis) > 1:
                raise ArgumentError(
                    f"the axis {axis!r} of {self.mesh} is used twice in {self._text()}",
                    hint="a mesh axis splits one dimension; a dimension may have several axes")
        if bool(self.pending) != (self.op is not None) or (self.op and self.op not in REDUCTIONS):
            raise ArgumentError(f"a pending reduction needs axes and one of "
                                f"{', '.join(REDUCTIONS)}; got {self.op!r} over {self.pending}")
        if any(self.dim_of(axis) is None for axis in self.regather):
            raise ArgumentError(f"regather={self.regather} of {self._text()}: only what is split "
                                "over an axis can be gathered over it")
        if any(split.cyclic < 0 for split in self.splits):
            raise ArgumentError("cyclic is the length of a run, at least 1; 0 for blocks")
        if any(split.unit < 1 for split in self.splits):
            raise ArgumentError("unit is a number of elements that stay together, at least 1")

    @property
    def ndim(self) -> int:
        return len(self.splits)

    @property
    def repeated(self) -> tuple[str, ...]:
        """The axes along which every rank holds the same."""
        used = {a for split in self.splits for a in split.axes} | set(self.pending)
        return tuple(a for a in self.mesh.axes if a not in used)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return not self.pending and all(self.parts(d) == 1 for d in range(self.ndim))

    def parts(self, dim: int) -> int:
        """Into how many parts a dimension is split."""
        return self.mesh.size(self.splits[dim].axes)

    def part(self, rank: int, dim: int) -> int:
        """Which of them a rank has."""
        return self.mesh.index(rank, self.splits[dim].axes)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        return self.splits[dim].axes

    def dim_of(self, axis: str) -> int | None:
        """The dimension that a mesh axis splits, if any."""
        self.mesh.position(axis)
        return next((d for d, s in enumerate(self.splits) if axis in s.axes), None)

    def with_split(self, dim: int, axes: Sequence[str] = (), cyclic: int = 0, unit: int = 1
                   ) -> Layout:
        """This layout with another split of one dimension."""
        if not -self.ndim <= dim < self.ndim:
            raise AxisError(f"{self} has {self.ndim} dimensions, asked for {dim}")
        splits = list(self.splits)
        splits[dim] = Split(tuple(axes), cyclic, unit)
        left = {a for split in splits for a in split.axes}
        return replace(self, splits=tuple(splits),
                       regather=tuple(a for a in self.regather if a in left))

    def settled(self) -> Layout:
        """This layout after its pending reduction: the axes repeat."""
        return replace(self, pending=(), op=None)

    def unmarked(self) -> Layout:
        """This layout without `regather`: which rank has what, and nothing else."""
        return replace(self, regather=()) if self.regather else self

    def gathered(self, axes: Sequence[str]) -> Layout:
        """This layout with no dimension split over these axes."""
        found = self
        for d, s in enumerate(self.splits):
            if set(axes) & set(s.axes):
                left = tuple(a for a in s.axes if a not in axes)
                found = found.with_split(d, left, *((s.cyclic, s.unit) if left else ()))
        return found.unmarked()

    def _text(self) -> str:
        text = "(" + ", ".join(map(str, self.splits)) + ")"
        if self.pending:
            text += f" + {self.op} over {', '.join(self.pending)}"
        return f"{text} regather {', '.join(self.regather)}" if self.regather else text

    def describe(self) -> str:
        """The layout without its mesh: "(dp, -)", "(-, -) + sum over tp"."""
        return self._text()

    def __str__(self) -> str:
        return f"{self._text()} on {self.mesh}"


RECORDS |= {"Mesh": Mesh, "Layout": Layout, "Split": Split}  # ops have them as attributes


def replicated(mesh: Mesh, ndim: int) -> Layout:
    """The layout in which every rank has everything."""
    return Layout(mesh, (Split(),) * ndim)
