"""Tiles of all groups as they lie in a tensor: what a kernel does by blocks, done to whole arrays.

A tile that is loaded by blocks along an axis of a tensor keeps that axis whole, and remembers that
it is groups times elements. What works element by element, along other axes, or multiplies, then
works on the tensor as it is, and what is stored by the same blocks was never cut. Where operands
lie differently, axes are split into what they count and put in one order, which are views mostly;
`BlockedTile.apart` takes all of them apart.

Blocks that overhang a tensor are not padded: an axis has the tensor's extent, and `full` gives the
same block with what the kernel computes beyond, for ops that need it. What is stored needs it not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ...numerics import DType
from ...tensor import Tensor
from .. import functions as F
from .contract import is_multiplied_as_stored, matmul_compute
from .kernel_masks import known_tensor
from .kernel_places import as_dtype

OPERATIONS: dict[str, Callable] = {"mul": operator.mul, "div": operator.truediv}
# What an axis of a tensor counts: i, axis i of the tile; ~k, axis k of the grid.
Group = tuple[int, ...]


@dataclass(frozen=True)
class BlockedTile:
    """A tile or number of every group. form: of each axis of the tensor, what it counts, the last
    the fastest; () an axis of extent 1. An axis of the tile or the grid that is in none: all are
    alike along it. shape: of the tile; none of a number.

    products: pairs of blocks whose matmuls add up to it; summed: the block and the axis that it is
    the sum along. Sums of it over iterations of a loop are then made in one. full: where axes are
    shorter than what they count, the block with all elements.
    """

    tensor: Tensor
    form: tuple[Group, ...]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    products: tuple[tuple[BlockedTile, BlockedTile], ...] = ()
    summed: tuple[BlockedTile, int] | None = None
    full: Callable[[], BlockedTile] | None = field(default=None, compare=False)
    views: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False, compare=False)

    def extent(self, part: int) -> int:
        """1 for an axis of tiles that a number, say, does not have."""
        if part < 0:
            return self.grid[~part]
        return self.shape[part] if part < len(self.shape) else 1

    @property
    def parts(self) -> list[int]:
        """What it varies along, in the order of its axes."""
        return [p for group in self.form for p in group if self.extent(p) > 1]

    @property
    def cuts(self) -> dict[Group, int]:
        """The extents of axes that are shorter than what they count."""
        found = {}
        for group, n in zip(self.form, self.tensor.shape, strict=True):
            if n != prod(map(self.extent, group)):
                found[tuple(p for p in group if self.extent(p) > 1)] = n
        return found

    def whole(self) -> BlockedTile:
        """With what lies beyond the tensor."""
        return self.full() if self.full is not None else self

    def through(self, f: Callable[[BlockedTile], BlockedTile]) -> BlockedTile:
        """f of this, where that needs nothing beyond the tensor."""
        return with_full(f(self), lambda: f(self.whole()))

    def mapped(self, f: Callable[[Tensor], Tensor]) -> BlockedTile:
        """A function of each element."""
        return self.through(lambda b: replace(b, tensor=f(b.tensor), full=None))

    def needs_whole(self, form: Sequence[Group]) -> bool:
        """Whether an axis that is short is no axis of a form."""
        given = {tuple(p for p in g if self.extent(p) > 1) for g in form}
        return not {*self.cuts} <= given

    def arranged(self, form: Sequence[Group]) -> Tensor:
        """The tensor with the axes of a form, in which all its parts are; of extent 1 where it is
        alike. A group of the form has all its parts, or none of them."""
        if self.needs_whole(form):
            return self.whole().arranged(form)
        mine, cuts = self.parts, self.cuts
        shown = [tuple(p for p in group if p in mine) for group in form]
        order = [p for group in shown for p in group]
        shape = tuple(cuts.get(g, prod(map(self.extent, g))) for g in shown)
        if order == mine:
            return self.viewed(shape)
        groups = [tuple(p for p in g if p in mine) for g in self.form]
        units: list[Group] = [u for g in filter(None, groups)
                              for u in ([g] if g in cuts else [(p,) for p in g])]
        x = self.viewed(tuple(cuts.get(u, prod(map(self.extent, u))) for u in units))
        wanted = [u for g in shown for u in ([g] if g in cuts else [(p,) for p in g])]
        x = F.transpose(x, tuple(map(units.index, wanted)))
        return x if tuple(x.shape) == shape else F.reshape(x, shape)

    def viewed(self, shape: tuple[int, ...]) -> Tensor:
        """The tensor in another shape, the same one each time, so that cotangents meet in it."""
        if tuple(self.tensor.shape) == shape:
            return self.tensor
        if shape not in self.views:
            self.views[shape] = F.reshape(self.tensor, shape)
        return self.views[shape]

    def filled(self, form: Sequence[Group]) -> Tensor:
        """The tensor with the axes of a form, in which all its parts are, each of full extent."""
        if self.needs_whole(form):
            return self.whole().filled(form)
        mine, singles = self.parts, [(p,) for group in form for p in group]
        cuts = {} if self.full is None else self.cuts
        sizes = tuple(cuts.get(tuple(p for p in g if self.extent(p) > 1), prod(
            map(self.extent, g))) for g in form)
        if all({*group} & {*mine} in (set(), {p for p in group if self.extent(p) > 1})
               for group in form):
            return F.broadcast_to(self.arranged(form), sizes)
        if cuts:  # a group in part, beside an axis that is short
            return self.whole().filled(form)
        wide = F.broadcast_to(self.arranged(singles), tuple(self.extent(p) for (p,) in singles))
        return F.reshape(wide, sizes)

    def isolated(self, *parts: int) -> BlockedTile:
        """The same where each of these parts is an axis of its own."""
        if any(p in parts for group in self.cuts for p in group):
            return self.whole().isolated(*parts)
        form: list[Group] = []
        for group in self.form:
            run: Group = ()
            for p in group:
                alone = p in parts
                form += [run] * (alone and bool(run)) + [(p,)] * alone
                run = () if alone else (*run, p)
            form += [run] * (bool(run) or not group)
        if tuple(form) == self.form:
            return self
        cuts, every = self.cuts, tuple(form)
        sizes = tuple(cuts.get(tuple(p for p in g if self.extent(p) > 1), prod(
            map(self.extent, g))) for g in every)
        made = replace(self, tensor=self.viewed(sizes), form=every)
        return with_full(made, lambda: self.whole().isolated(*parts))

    def apart(self) -> Tensor:
        """[*grid, *tile], with extent 1 along axes of the grid where all groups have the same."""
        if self.cuts:
            return self.whole().apart()
        n, mine = len(self.grid), self.parts
        lead = tuple(g if ~k in mine else 1 for k, g in enumerate(self.grid))
        split = self.arranged([*((~k,) for k in range(n)), *((i,) for i in range(len(self.shape)))])
        if not self.shape:
            return F.reshape(split, (*lead, 1))
        return F.broadcast_to(split, (*lead, *self.shape))

    def renamed(self, names: dict[int, int], shape: tuple[int, ...]) -> BlockedTile:
        """The same elements as a tile of another shape, whose axes have other numbers."""
        form = tuple(tuple(names.get(p, p) for p in group if self.extent(p) > 1 or p in names)
                     for group in self.form)
        return self.relabelled(form, shape, self.grid)

    def relabelled(self, form: tuple[Group, ...], shape: tuple[int, ...], grid: tuple[int, ...]
                   ) -> BlockedTile:
        """The same tensor, whose axes count something else."""
        made = BlockedTile(self.tensor, form, shape, grid)
        return with_full(made, lambda: self.whole().relabelled(form, shape, grid)
                         ) if self.full is not None else made


def with_full(x: BlockedTile, full: Callable[[], BlockedTile]) -> BlockedTile:
    """A block, and what it is with all elements, which is found when it is asked for."""
    return replace(x, full=cache(full)) if x.cuts else replace(x, full=None)


def is_recorded(x: Any) -> bool:
    """Whether a value follows from elements of tensors."""
    return isinstance(x, Tensor | BlockedTile)


# --- operands side by side -----------------------------------------------------------------------
@dataclass(frozen=True)
class KnownBlock:
    """An array [*grid, *tile], with extents of 1 where it is alike, among blocks."""

    array: np.ndarray  # an axis for each part
    parts: list[int]

    def arranged(self, form: Sequence[Group], cuts: dict[Group, int] | None = None) -> Any:
        order = [self.parts.index(p) for group in form for p in group if p in self.parts]
        extents = dict(zip(self.parts, self.array.shape, strict=True))
        shape = [prod(extents.get(p, 1) for p in group) for group in form]
        x = self.array.transpose(order).reshape(shape)
        for axis, group in enumerate(form):
            if cuts and group in cuts and x.shape[axis] > 1:
                x = np.take(x, range(cuts[group]), axis)
        return known_tensor(x)

    @property
    def form(self) -> tuple[Group, ...]:
        many = sum(p >= 0 for p in self.parts) != 1
        return tuple((p,) for p in self.parts) if many else (tuple(self.parts),)


def known_block(x: np.ndarray, grid: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """What is known of all groups as an operand among blocks; a number where it is one."""
    n = len(grid)
    if x.ndim == n + 1 and x.shape[n] == 1:  # a number of each group
        x = x.reshape(*x.shape[:n], *(1,) * len(shape))
    for axis in range(x.ndim):
        first = np.take(x, [0], axis)
        x = first if x.shape[axis] > 1 and (x == first).all() else x
    if x.size == 1:
        return x.reshape(()).item()
    names = [*(~k for k in range(n)), *range(x.ndim - n)]
    parts = [p for p, m in zip(names, x.shape, strict=True) if m > 1]
    return KnownBlock(x.reshape([m for m in x.shape if m > 1]), parts)


def common_form(operands: Sequence[BlockedTile | KnownBlock], alone: Sequence[int] = ()
                ) -> tuple[Group, ...]:
    """A form with all parts of some operands, in which none has a group in part or in another
    order. alone: parts that are groups of their own."""
    blocks = [x for x in operands if isinstance(x, BlockedTile)]
    order: list[int] = []
    ranked = sorted(blocks, key=lambda b: -len(b.parts))
    known = [x for x in operands if isinstance(x, KnownBlock)]
    every: list[BlockedTile | KnownBlock] = [*ranked, *known]
    for x in every:
        _insert(order, x)
    form: list[Group] = []
    for i, p in enumerate(order):
        q = order[i - 1] if i else None
        if q is None or p in alone or q in alone or any(_cut_between(x, q, p) for x in operands):
            form.append((p,))
        else:
            form[-1] = (*form[-1], p)
    return tuple(form)


def _insert(order: list[int], x: BlockedTile | KnownBlock) -> None:
    """The parts of an operand among others: beside those that it has them beside, else by the axis
    of the tile that they go with."""
    before: int | None = None
    for group in x.form:
        mine = [p for p in group if p in x.parts]
        for i, p in enumerate(mine):
            if p not in order:
                behind = next((order.index(q) for q in mine[i + 1:] if q in order), None)
                if behind is not None:
                    at = behind
                elif before is not None:
                    at = order.index(before) + 1
                elif mine[-1] < 0:
                    at = 0
                else:
                    at = next((k for k, q in enumerate(order) if q > mine[-1]), len(order))
                    while 0 < at < len(order) and order[at - 1] < 0:
                        at -= 1
                order.insert(at, p)
            before = p


def _cut_between(x: BlockedTile | KnownBlock, q: int, p: int) -> bool:
    """Whether two parts that follow each other cannot be one axis of an operand."""
    parts = x.parts
    if (p in parts) != (q in parts):
        return True
    if p not in parts or isinstance(x, KnownBlock):
        return False
    return not any((q, p) in pairwise([r for r in g if r in parts]) for g in x.form)


def aligned(args: Sequence[Any], shape: tuple[int, ...], alone: Sequence[int] = ()
            ) -> tuple[list[Any], tuple[Group, ...]]:
    """(tensors and numbers with the axes of one form, the form) of blocks and of numbers that are
    known, [*grid, *tile]."""
    grid = next((a.grid for a in args if isinstance(a, BlockedTile)), None)
    assert grid is not None
    made = [a if isinstance(a, BlockedTile) else known_block(a, grid, shape) for a in args]
    blocks = [a for a in made if isinstance(a, BlockedTile | KnownBlock)]
    form = common_form(blocks, alone)
    cuts = _common_cuts(blocks, form)
    if cuts is None:
        return aligned([a.whole() if isinstance(a, BlockedTile) else a for a in args], shape, alone)
    return [a.arranged(form, cuts) if isinstance(a, KnownBlock) else a.arranged(form)
            if isinstance(a, BlockedTile) else a for a in made], form


def _common_cuts(operands: Sequence[BlockedTile | KnownBlock], form: Sequence[Group]
                 ) -> dict[Group, int] | None:
    """The axes of a form that are short in all operands that have them; None where some are not."""
    blocks = [x for x in operands if isinstance(x, BlockedTile)]
    found: dict[Group, int] = {}
    for x in blocks:
        for group, n in x.cuts.items():
            if group not in form or found.setdefault(group, n) != n:
                return None
    alike = all(x.cuts.get(g) == n for g, n in found.items() for x in blocks if {*g} & {*x.parts})
    return found if alike else None


def map_blocks(f: Callable, args: Sequence[Any], shape: tuple[int, ...]) -> BlockedTile:
    """A function of elements of blocks and of numbers that are known. shape: of the result."""
    grid = next(a.grid for a in args if isinstance(a, BlockedTile))
    operands, form = aligned(args, shape)
    made = BlockedTile(f(*operands), form, shape, grid)
    return with_full(made, lambda: map_blocks(
        f, [a.whole() if isinstance(a, BlockedTile) else a for a in args], shape))


def compared_blocks(f: Callable, x: np.ndarray, y: np.ndarray, grid: tuple[int, ...],
                    shape: tuple[int, ...]) -> BlockedTile:
    """A function of two arrays that are known, [*grid, *tile], computed in the graph."""
    operands = [known_block(a, grid, shape) for a in (x, y)]
    form = common_form([a for a in operands if isinstance(a, KnownBlock)])
    made = f(*(a.arranged(form) if isinstance(a, KnownBlock) else a for a in operands))
    return BlockedTile(made, form, shape, grid)


def products_of(name: str, args: Sequence[Any]) -> tuple[tuple[BlockedTile, BlockedTile], ...]:
    """The products that add up to a sum of such sums, or to one that is scaled along its rows or
    columns; none where that is not so."""
    found = [a.products if isinstance(a, BlockedTile) else () for a in args]
    if name == "add" and all(found):
        return tuple(p for ps in found for p in ps)
    if name == "neg":
        return tuple((x.mapped(operator.neg), y) for x, y in found[0])
    if name not in ("mul", "div") or not found[0] and not (name == "mul" and found[1]):
        return ()
    at = 0 if found[0] else 1
    made = [_scaled(x, y, args[1 - at], OPERATIONS[name]) for x, y in found[at]]
    return () if None in made else tuple(p for p in made if p is not None)


def _scaled(x: BlockedTile, y: BlockedTile, by: Any, f: Callable
            ) -> tuple[BlockedTile, BlockedTile] | None:
    """Two blocks whose product is scaled, where that is alike along its columns, or its rows."""
    if isinstance(by, BlockedTile):
        along = {*by.parts}
    else:
        known = known_block(by, x.grid, (1, 1))
        along = {*known.parts} if isinstance(known, KnownBlock) else set()
    if 1 not in along and along <= {*x.parts}:
        return map_blocks(f, (x, by), x.shape), y
    if 0 not in along and along <= {*y.parts}:
        return x, map_blocks(f, (y, by), y.shape)
    return None


# --- reductions and products ---------------------------------------------------------------------
def reduced(f: Callable, x: BlockedTile, axis: int | None) -> BlockedTile | None:
    """A reduction along an axis of the tile, or of all; None where a tensor is alike along it."""
    axes = tuple(range(len(x.shape))) if axis is None else (axis,)
    if any(a not in x.parts and x.shape[a] > 1 for a in axes):
        return None
    y = over(f, x, axes)
    if axis is None:
        return y.renamed({}, ())
    names = {i: i - 1 for i in range(axis + 1, len(x.shape))}
    return y.renamed(names, (*x.shape[:axis], *x.shape[axis + 1:]))


def over(f: Callable, x: BlockedTile, parts: Sequence[int]) -> BlockedTile:
    """A reduction along parts, of which each is an axis of its own, or all are one."""
    if any(p in parts for group in x.cuts for p in group):
        return over(f, x.whole(), parts)
    if tuple(parts) not in x.form:
        x = x.isolated(*parts)
    at = tuple(i for i, g in enumerate(x.form) if g and all(p in parts for p in g))
    form = tuple(() if i in at else g for i, g in enumerate(x.form))
    y = f(x.tensor, axis=at, keepdims=True) if at else x.tensor
    made = BlockedTile(y, form, x.shape, x.grid)
    return with_full(made, lambda: over(f, x.whole(), parts))


def product(wide: DType) -> Callable[[Tensor, Tensor], Tensor]:
    """x @ y in a type; operands of a narrow one are multiplied as they are stored."""
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        if x.type == y.type and is_multiplied_as_stored(x.dtype):
            return as_dtype(matmul_compute(x, y, wide), wide)
        return F.matmul(as_dtype(x, wide), as_dtype(y, wide))

    return multiply


def multiplied(f: Callable, a: BlockedTile, b: BlockedTile, over: Group = ()
               ) -> BlockedTile | None:
    """f(a, b), a @ b as one product of matrices, or of stacks of them where both vary along an
    axis of the grid. over: parts of the grid that the sums go over too, along which both vary."""
    left, right = a.parts, b.parts
    if len(a.shape) != 2 or 1 not in left or 0 not in right or not {*over} <= {*left} & {*right}:
        return None
    stack = [p for p in left if p < 0 and p in right and p not in over]
    if any(p in (1, *over, *stack) for g in a.cuts for p in g) or any(
            p in (0, *over, *stack) for g in b.cuts for p in g):
        return multiplied(f, a.whole(), b.whole(), over)
    rows = [p for p in left if p != 1 and p not in stack and p not in over]
    columns = [p for p in right if p != 0 and p not in stack and p not in over]
    x = a.arranged([*((p,) for p in stack), tuple(rows), (*over, 1)])
    y = b.arranged([*((p,) for p in stack), (*over, 0), tuple(columns)])
    made = f(x, y)
    form: list[Group] = [*((p,) for p in stack), tuple(rows), tuple(columns)]
    out = BlockedTile(made, tuple(form), (a.shape[0], b.shape[1]), a.grid)

    def full() -> BlockedTile:
        every = multiplied(f, a.whole(), b.whole(), over)
        assert every is not None
        return every

    return with_full(out, full)


__all__ = ["BlockedTile", "Group", "KnownBlock", "aligned", "compared_blocks", "is_recorded",
           "map_blocks", "known_block", "multiplied", "over", "product", "products_of", "reduced",
           "with_full"]
