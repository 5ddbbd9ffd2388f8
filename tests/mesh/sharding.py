"""Every layout of a tensor on a mesh, and tensors spread in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import tessera as ts
from tessera.mesh.device_mesh import Mesh
from tessera.mesh.layout import Layout, Split
from tessera.mesh.tensor import DistTensor, distribute, whole_bytes
from tessera.numerics import NumericType
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


def term_layouts(ndim: int, rng: np.random.Generator, mesh: Mesh = MESH) -> list[Layout]:
    """Some with a sum that is pending over what splits nothing."""
    every = [x for x in block_layouts(ndim, mesh) if x.repeated]
    picked = [every[i] for i in rng.permutation(len(every))[:2]]
    return [Layout(mesh, x.splits, x.repeated, "sum") for x in picked]


def spread(x: Tensor, layout: Layout, rng: np.random.Generator) -> DistTensor:
    """x in a layout; the terms of a pending sum are random and add up to x."""
    if not layout.pending:
        return distribute(x, layout)
    terms = [Tensor(rng.standard_normal(x.shape).astype(x.array.dtype), x.type)
             for _ in range(layout.mesh.size(layout.pending) - 1)]
    total = sum((t.array for t in terms), np.zeros(x.shape, x.array.dtype))
    terms.append(Tensor(np.asarray(x.array - total, x.array.dtype), x.type))
    parts = [distribute(t, layout.settled()) for t in terms]
    held = {r: parts[layout.mesh.index(r, layout.pending)].held[r]
            for r in range(layout.mesh.size())}
    return DistTensor(held, x.shape, x.type, layout)


def legal(layout: Layout, numeric: NumericType) -> Layout:
    """The layout with no byte of a packed type cut."""
    return whole_bytes(layout, numeric)


def pick(options: Sequence[Sequence[Any]], most: int, rng: np.random.Generator) -> list[tuple]:
    """All tuples of one option each when they are few, else as many at random."""
    total = int(np.prod([len(o) for o in options]))
    if total <= most:
        return list(itertools.product(*options))
    return [tuple(o[rng.integers(len(o))] for o in options) for _ in range(most)]
