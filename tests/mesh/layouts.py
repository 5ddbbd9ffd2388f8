"""Random meshes and layouts for property tests."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

import tessera as ts
from tessera.mesh.device_mesh import Mesh
from tessera.mesh.layout import Layout, Split

DTYPES = [ts.f32, ts.fp6_e3m2, ts.fp4_e2m1]


@st.composite
def meshes(draw, ranks: int | None = None) -> Mesh:
    """Up to 12 ranks in one to three axes, or exactly `ranks`."""
    if ranks is None:
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)
                     .filter(lambda s: prod(s) <= 12))
    else:
        first = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
        shape = [first, ranks // first]
    return ts.dist.mesh(axes=("dp", "tp", "pp")[:len(shape)], shape=shape)


@st.composite
def layouts(draw, mesh: Mesh, ndim: int) -> Layout:
    """Each axis splits some dimension or repeats; a dimension is in blocks or dealt out."""
    owner = {axis: draw(st.integers(-1, ndim - 1)) for axis in draw(st.permutations(mesh.axes))}
    return Layout(mesh, tuple(
        Split(tuple(a for a, d in owner.items() if d == dim), draw(st.sampled_from([0, 0, 1, 3])))
        for dim in range(ndim)))


@st.composite
def problems(draw, count: int = 1, ranks: int | None = None):
    """(shape, dtype, layouts...): shapes from a scalar to three dimensions, extents from 0."""
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    found = [draw(layouts(draw(meshes(ranks)), len(shape))) for _ in range(count)]
    return shape, draw(st.sampled_from(DTYPES)), *found
