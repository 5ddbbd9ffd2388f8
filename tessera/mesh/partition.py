"""Which part of a tensor each rank owns: pure functions of layout, shape and numeric type.

A dimension of extent E in n balanced blocks gives E // n elements to each part and one more to
the first E % n: 8192 over 9 is 911, 911, 910, ... In types of fewer than 8 bits the last
dimension is split in whole groups (2 elements of 4 bits, 4 of 6 bits), so that no byte is shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import Any, cast

import numpy as np

from tessera.dims import show_shape
from tessera.errors import ArgumentError, ShapeError
from tessera.graph.op import Aval
from tessera.numerics import DType

from ..lazy_dataclass import dataclass
from .domain import Rect
from .layout import Layout


@dataclass(frozen=True)
class RankBox:
    """A box of the whole tensor and where it begins in a rank's own part."""

    box: Rect
    at: tuple[int, ...]


def extents(aval: Aval) -> tuple[int, ...]:
    """The extents of a value on a mesh: numbers, since a call has given the names theirs."""
    return cast("tuple[int, ...]", aval.shape)


def group_of(dtype: DType | None) -> int:
    """Elements that share bytes: 2 in 4-bit types, 4 in 6-bit ones, else 1."""
    return {4: 2, 6: 4}.get(dtype.bits, 1) if dtype is not None else 1


def balanced(extent: int, parts: int, group: int = 1) -> list[tuple[int, int]]:
    """[lo, hi) of each of `parts` blocks; every lo is a multiple of `group`."""
    each, more = divmod(-(-extent // group), parts)
    cuts = [min(extent, (i * each + min(i, more)) * group) for i in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def cyclic_runs(extent: int, parts: int, part: int, run: int) -> list[tuple[int, int]]:
    """The runs of one part when runs of `run` elements are dealt out in turn."""
    return [(lo, min(lo + run, extent)) for lo in range(part * run, extent, parts * run)]


@lru_cache(maxsize=4096)
def intervals(layout: Layout, dim: int, extent: int, part: int, group: int = 1
              ) -> tuple[tuple[int, int], ...]:
    """What part number `part` has of one dimension, in order; () when it has none."""
    parts, run = layout.parts(dim), layout.splits[dim].cyclic
    group = lcm(group, layout.splits[dim].unit)
    if run:
        return tuple(cyclic_runs(extent, parts, part, -(-run // group) * group))
    lo, hi = balanced(extent, parts, group)[part]
    return ((lo, hi),) if hi > lo else ()


def _intervals_of(layout: Layout, shape: Sequence[int], rank: int, dtype: DType | None
                  ) -> list[tuple[tuple[int, int], ...]]:
    need_dims(layout, shape)
    last = len(shape) - 1
    return [intervals(layout, d, extent, layout.part(rank, d), group_of(dtype) if d == last else 1)
            for d, extent in enumerate(shape)]


def need_dims(layout: Layout, shape: Sequence[int]) -> None:
    """Raise ShapeError when a layout is for another number of dimensions."""
    if len(shape) != layout.ndim:
        raise ShapeError(f"the layout {layout} is for {layout.ndim} dimensions, the tensor has "
                         f"{len(shape)}: {show_shape(shape)}",
                         hint="resolve the ShardSpec for this tensor")


def local_shape(layout: Layout, shape: Sequence[int], rank: int, dtype: DType | None = None
                ) -> tuple[int, ...]:
    """The shape of a rank's part."""
    found = _intervals_of(layout, shape, rank, dtype)
    return tuple(sum(hi - lo for lo, hi in runs) for runs in found)


def pieces(layout: Layout, shape: Sequence[int], rank: int, dtype: DType | None = None
           ) -> tuple[RankBox, ...]:
    """The boxes of a rank's part: one for blocks, several for cyclic layouts, none if empty."""
    placed = [_with_local_offsets(runs) for runs in _intervals_of(layout, shape, rank, dtype)]
    return tuple(
        RankBox(Rect([hi - lo for lo, hi, _ in run], [lo for lo, _, _ in run]),
                tuple(at for _, _, at in run))
        for run in itertools.product(*placed)
    )


def _with_local_offsets(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(lo, hi, where it begins in the part) of each run."""
    starts = itertools.accumulate((hi - lo for lo, hi in runs), initial=0)
    return [(lo, hi, at) for (lo, hi), at in zip(runs, starts, strict=False)]


def indices(layout: Layout, shape: Sequence[int], rank: int, dtype: DType | None = None,
            rows: slice = slice(None)) -> np.ndarray:
    """The flat index in the whole tensor of each element of a rank's part: int64 [local shape].
    rows: of some of its rows alone, along its first dimension.

    What random bits are drawn by, so that a part gets the bits of the whole."""
    flat = np.zeros((), np.int64)
    for d, (runs, extent) in enumerate(zip(_intervals_of(layout, shape, rank, dtype), shape,
                                           strict=True)):
        own = np.concatenate([np.arange(lo, hi) for lo, hi in runs] or [np.zeros(0, np.int64)])
        flat = flat[..., None] * extent + (own if d else own[rows])
    return flat


def index_in_whole(layout: Layout, shape: Sequence[int], rank: int, index: Sequence[int],
                   dtype: DType | None = None) -> tuple[int, ...]:
    """The index in the whole tensor of one element of a rank's part."""
    found = []
    for i, runs in zip(index, _intervals_of(layout, shape, rank, dtype), strict=True):
        for lo, hi in runs:
            if i < hi - lo:
                found.append(lo + i)
                break
            i -= hi - lo
    return tuple(found)


def take(array: np.ndarray, layout: Layout, rank: int, dtype: DType | None = None,
         copy: bool = True) -> np.ndarray:
    """A rank's part of the whole array, as a copy; without, in its memory where it is one box."""
    if not copy and len(found := pieces(layout, array.shape, rank, dtype)) == 1:
        box: Any = (*found[0].box.slices(), ...)  # of no dimensions too an array
        return array[box]
    out = np.empty(local_shape(layout, array.shape, rank, dtype), array.dtype)
    for piece in pieces(layout, array.shape, rank, dtype):
        out[Rect(piece.box.shape, piece.at).slices()] = array[piece.box.slices()]
    return out


def assemble(parts: Sequence[np.ndarray], layout: Layout, shape: Sequence[int],
             dtype: DType | None = None) -> np.ndarray:
    """The whole array from every rank's part. Raises ShapeError for a part of another shape,
    ArgumentError when the parts are terms of a pending reduction."""
    if layout.pending:
        raise ArgumentError(f"the parts of {layout} are terms, not the tensor",
                            hint="all_reduce or reduce_scatter them first")
    out = np.empty(tuple(shape), parts[0].dtype)
    for rank, part in enumerate(parts):
        expected = local_shape(layout, shape, rank, dtype)
        if part.shape != expected:
            raise ShapeError(f"rank {rank} holds {show_shape(part.shape)}; its part of "
                             f"{show_shape(shape)} in {layout} is {show_shape(expected)}")
        for piece in pieces(layout, shape, rank, dtype):
            out[piece.box.slices()] = part[Rect(piece.box.shape, piece.at).slices()]
    return out
