"""Every layout of a tensor on a mesh, and tensors spread in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

import tessera as ts
from tessera.mesh.device_mesh import Mesh
from tessera.mesh.layout import Layout, Split
from tessera.mesh.tensor import DistTensor, distribute, whole_bytes
from tessera.numerics import NumericType, decode, encode
from tessera.tensor import Tensor

MESH = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))


def block_layouts(ndim: int, mesh: Mesh = MESH) -> list[Layout]:
    """Every assignment of the axes to dimensions or to none; two on one dimension in both
    orders."""
    found = {}
    for order in itertools.permutations(mesh.axes):
        for owners in itertools.product([None, *range(ndim)], repeat=len(order)):
            splits = tuple(Split(tuple(a for a, d in zip(order, owners, strict=True) if d == dim))
                           for dim in range(ndim))
            found[splits] = Layout(mesh, splits)
    return list(found.values())


def odd_layouts(ndim: int, rng: np.random.Generator, mesh: Mesh = MESH) -> list[Layout]:
    """Some that are dealt out in runs, and some in blocks of whole units."""
    if not ndim:
        return []
    blocks = [x for x in block_layouts(ndim, mesh) if not x.is_replicated]
    found = []
    for change in ({"cyclic": 1}, {"cyclic": 2}, {"unit": 2}):
        x = blocks[rng.integers(len(blocks))]
        found.append(Layout(mesh, tuple(Split(s.axes, **change) if s.axes else s
                                        for s in x.splits)))
    return found


def every_term_layout(ndim: int, mesh: Mesh = MESH) -> list[Layout]:
    """Every block layout with a sum that is pending over some of what splits nothing."""
    return [Layout(mesh, at.splits, axes, "sum") for at in block_layouts(ndim, mesh)
            for n in range(len(at.repeated)) for axes in itertools.combinations(at.repeated, n + 1)]


def term_layouts(ndim: int, rng: np.random.Generator, mesh: Mesh = MESH) -> list[Layout]:
    """Two of them."""
    every = every_term_layout(ndim, mesh)
    return [every[i] for i in rng.permutation(len(every))[:2]]


def spread(x: Tensor, layout: Layout, rng: np.random.Generator) -> DistTensor:
    """x in a layout; the terms of a pending sum are random and add up to x. Of types in which they
    would be rounded, or that are held as codes, each element is the term of one rank."""
    if not layout.pending:
        return distribute(x, layout)
    terms = [Tensor(t, x.type) for t in _terms(x, layout.mesh.size(layout.pending), rng)]
    parts = [distribute(t, layout.settled()) for t in terms]
    held = {r: parts[layout.mesh.index(r, layout.pending)].held[r]
            for r in range(layout.mesh.size())}
    return DistTensor(held, x.shape, x.type, layout)


def _terms(x: Tensor, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """n arrays of numbers of x's type that add up to x: to its last digits, of 8 bits and fewer
    exactly. They are numbers and not their codes, which is all NumPy has of fp4_e3m0."""
    rest, terms = decode(x.array, x.dtype).astype(np.float64), []
    for _ in range(n - 1):
        made = _rounded(rng.standard_normal(x.shape), x)
        if x.dtype.bits <= 8:  # what remains is to be a number of the type as well
            for other in (2 * rest, rest / 2, rest):
                left = rest - made
                bad = (_rounded(left, x) != left) | (_rounded(made, x) != made)
                made = np.where(bad, other, made)
        terms.append(made)
        rest = rest - made
    return [encode(t, x.dtype) for t in (*terms, rest)]


def _rounded(values: np.ndarray, x: Tensor) -> np.ndarray:
    return decode(encode(values, x.dtype), x.dtype).astype(np.float64)


def legal(layout: Layout, numeric: NumericType) -> Layout:
    """The layout with no byte of a packed type cut."""
    return whole_bytes(layout, numeric)


def deal(options: Sequence[Sequence[Any]], most: int, rng: np.random.Generator) -> list[tuple]:
    """All tuples of one option each when they are few, else so many, in which each option comes up
    as often as any other of its place, give or take one."""
    if prod(len(o) for o in options) <= most:
        return list(itertools.product(*options))
    hands = [[i for _ in range(0, most, len(o)) for i in rng.permutation(len(o))] for o in options]
    return [tuple(o[hand[k]] for o, hand in zip(options, hands, strict=True)) for k in range(most)]


def cover(options: Sequence[Sequence[Any]], whole: int, most: int, rng: np.random.Generator
          ) -> list[tuple]:
    """Tuples of one option each in which any two options of any two places meet, and every
    combination of the first `whole` places while these are at most `most`.

    A further place is added to the tuples there are, each with the option that meets most of what
    it has not met, and then to new tuples for the rest: in parameter order, Lei and Tai 1998.
    """
    counts = [len(o) for o in options]
    first = whole if prod(counts[:whole]) <= most else 1
    rows = list(itertools.product(*map(range, counts[:first])))
    for j in range(first, len(counts)):
        rows = _with_place(rows, counts[:j], counts[j], rng)
    return [tuple(o[i] for o, i in zip(options, row, strict=True)) for row in rows]


def _with_place(rows: list[tuple], counts: list[int], count: int, rng: np.random.Generator
                ) -> list[tuple]:
    """One more place of `count` options: in the rows, and in new ones."""
    unmet = [np.ones((k, count), bool) for k in counts]
    found = []

    def add(row: tuple, last: int) -> None:
        for pairs, i in zip(unmet, row, strict=True):
            pairs[i, last] = False
        found.append((*row, last))

    for row in rows:
        gain = np.sum([pairs[i] for pairs, i in zip(unmet, row, strict=True)], axis=0)
        add(row, int(np.argmax(gain + rng.random(count))))
    for last in range(count):
        while any(pairs[:, last].any() for pairs in unmet):
            add(tuple(int(np.argmax(pairs[:, last] + rng.random(len(pairs)) / 2))
                      for pairs in unmet), last)
    return found
