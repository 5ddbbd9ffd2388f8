"""Tiles of all groups as they lie in a tensor: what a kernel does by blocks, done to whole arrays.

A tile that is loaded by blocks along an axis of a tensor keeps that axis whole, and remembers that
it is groups times elements. What works element by element, along other axes, or multiplies, then
works on the tensor as it is, and what is stored by the same blocks was never cut. Other ops take
the blocks apart, `BlockedTile.apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ...tensor import Tensor, as_tensor
from .. import functions as F

# What an axis of a tensor counts: i, axis i of the tile; ~k, axis k of the grid.
Group = tuple[int, ...]


@dataclass(frozen=True)
class BlockedTile:
    """A tile or number of every group. form: of each axis of the tensor, what it counts, the last
    the fastest; () an axis of extent 1. An axis of the tile or the grid that is in none: all are
    alike along it. shape: of the tile; none of a number."""

    tensor: Tensor
    form: tuple[Group, ...]
    shape: tuple[int, ...]
    grid: tuple[int, ...]

    def extent(self, part: int) -> int:
        return self.shape[part] if part >= 0 else self.grid[~part]

    def apart(self) -> Tensor:
        """[*grid, *tile], with extent 1 along axes of the grid where all groups have the same."""
        parts = [p for group in self.form for p in group]
        split = F.reshape(self.tensor, tuple(map(self.extent, parts)))
        order = sorted(parts, key=lambda p: ~p if p < 0 else len(self.grid) + p)
        split = F.transpose(split, tuple(parts.index(p) for p in order))
        lead = [n if ~k in parts else 1 for k, n in enumerate(self.grid)]
        tile = [n if i in parts else 1 for i, n in enumerate(self.shape)]
        if not self.shape:
            return F.reshape(split, (*lead, 1))
        return F.broadcast_to(F.reshape(split, (*lead, *tile)), (*lead, *self.shape))

    def along(self, form: Sequence[Group], like: BlockedTile | None = None) -> Tensor | None:
        """The tensor with the axes of a form, of extent 1 where it is alike; None where that would
        take it apart. like: a block with these extents, by default this one."""
        mine = [g for g in self.form if g]
        shape = []
        for group in form:
            found = bool(mine) and mine[0] == group
            shape.append(prod(map(self.extent, group)) if found else 1)
            if found and shape[-1] not in (1, prod(map((like or self).extent, group))):
                return None
            mine = mine[found:]
        if mine:
            return None
        return self.tensor if tuple(shape) == tuple(self.tensor.shape) else F.reshape(
            self.tensor, tuple(shape))

    def renamed(self, names: dict[int, int], shape: tuple[int, ...]) -> BlockedTile:
        """The same elements as a tile of another shape, whose axes have other numbers."""
        form = tuple(tuple(names.get(p, p) for p in group) for group in self.form)
        return replace(self, form=form, shape=shape)


def is_recorded(x: Any) -> bool:
    """Whether a value follows from elements of tensors."""
    return isinstance(x, Tensor | BlockedTile)


def joined(f: Callable, args: Sequence[Any], shape: tuple[int, ...]) -> BlockedTile | None:
    """A function of elements of blocks and of numbers that are known, [*grid, *tile]; None where
    the blocks lie differently. shape: of the result."""
    blocks = [a for a in args if isinstance(a, BlockedTile)]
    widest = max(blocks, key=lambda b: sum(map(len, b.form)))
    form = widest.form
    full = replace(widest, shape=shape if len(shape) >= len(widest.shape) else widest.shape)
    operands = [a.along(form, full) if isinstance(a, BlockedTile) else known_along(full, a)
                for a in args]
    if any(x is None for x in operands):
        return None
    return BlockedTile(f(*operands), form, shape, widest.grid)


def known_along(block: BlockedTile, x: np.ndarray) -> Any:
    """An array [*grid, *tile], with extents of 1 where it is alike, with the axes of a block; a
    number where it is one."""
    if x.size == 1:
        return x.reshape(()).item()
    n = len(block.grid)
    if x.ndim == n + 1 and x.shape[n] == 1:  # a number of each group
        x = x.reshape(*x.shape[:n], *(1,) * len(block.shape))
    for axis in range(n, x.ndim):
        first = np.take(x, [0], axis)
        x = first if x.shape[axis] > 1 and (x == first).all() else x
    parts = [~k for k in range(n)] + list(range(x.ndim - n))
    there = {p for p, m in zip(parts, x.shape, strict=True) if m > 1}
    order = [p for group in block.form for p in group]
    if not there <= set(order) or any(block.extent(p) != x.shape[parts.index(p)] for p in there):
        return None
    x = x.transpose([parts.index(p) for p in order if p in parts]
                    + [i for i, p in enumerate(parts) if p not in order])
    x = x.reshape(x.shape[:len(order)])
    return as_tensor(np.ascontiguousarray(_merged(block, x, there)))


def _merged(block: BlockedTile, x: np.ndarray, there: set[int]) -> np.ndarray:
    """What a form lists one by one, with its axes, each whole where a part of it is there."""
    shape, at = [], 0
    for group in block.form:
        axes = range(at, at + len(group))
        at += len(group)
        if any(p in there for p in group):
            wide = list(x.shape)
            for axis, p in zip(axes, group, strict=True):
                wide[axis] = block.extent(p)
            x = np.broadcast_to(x, wide)
        shape.append(prod(x.shape[a] for a in axes))
    return x.reshape(shape)


def reduced(f: Callable, x: BlockedTile, axis: int | None) -> BlockedTile | None:
    """A reduction along an axis of the tile, or of all, where no group's elements are cut from
    another's."""
    axes = range(len(x.shape)) if axis is None else (axis,)
    if any((a,) not in x.form for a in axes):
        return None
    at = tuple(x.form.index((a,)) for a in axes)
    form = tuple(() if i in at else g for i, g in enumerate(x.form))
    y = BlockedTile(f(x.tensor, axis=at, keepdims=True), form, x.shape, x.grid)
    if axis is None:
        return y.renamed({}, ())
    names = {i: i - 1 for i in range(axis + 1, len(x.shape))}
    return y.renamed(names, (*x.shape[:axis], *x.shape[axis + 1:]))


def multiplied(a: BlockedTile, b: BlockedTile) -> BlockedTile | None:
    """a @ b as one product of matrices, where the blocks of each lie along its own axes."""
    left, right = [g for g in a.form if g], [g for g in b.form if g]
    if (1,) not in left or (0,) not in right:
        return None
    k, m = left.index((1,)), right.index((0,))
    rows, columns = left[:k] + left[k + 1:], right[:m] + right[m + 1:]
    if {p for g in rows for p in g if p < 0} & {p for g in columns for p in g if p < 0}:
        return None
    x, y = a.along(left), b.along(right)
    assert x is not None and y is not None
    sizes = [prod(map(a.extent, g)) for g in rows], [prod(map(b.extent, g)) for g in columns]
    x = F.moveaxis(x, k, -1) if k + 1 < len(left) else x
    y = F.moveaxis(y, m, 0) if m else y
    inner = a.shape[1]
    made = F.matmul(F.reshape(x, (prod(sizes[0]), inner)), F.reshape(y, (inner, prod(sizes[1]))))
    shape = a.shape[0], b.shape[1]
    return BlockedTile(F.reshape(made, (*sizes[0], *sizes[1])), (*rows, *columns), shape, a.grid)


__all__ = ["BlockedTile", "Group", "is_recorded", "joined", "known_along", "multiplied", "reduced"]
