"""The collectives of a partitioned program, as ops of the graph that one rank runs.

Every rank knows all layouts and extents, so nothing is agreed on before a message is sent, unlike
with a collective that is called by hand. Terms are added in the accumulate type, in the order of
ranks, and rounded once (collectives/reduce.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from tessera.graph.op import Aval, GraphOp
from tessera.numerics import NumericType

from ..collectives.record import COLLECTIVES, CollectiveOperand
from ..collectives.reduce import reduce_terms, round_once
from ..device_mesh import Mesh
from ..layout import Layout
from ..partition import local_shape
from ..ranks.envelope import here_in
from ..ranks.group import Group
from ..world import transport
from .layout_changes import Hop, Shape, block
from .reshard import plan, reshard

EFFECT = frozenset({"collective"})


# An all-reduce of which a rank gets no more bytes than this from all others together is one
# exchange of whole terms, not two of parts: what counts is how often ranks wait.
ONE_EXCHANGE_BYTES = 1 << 15


def group_along(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> Group:
    """The ranks along axes of a mesh, the given one among them."""
    return Group(transport(), _world_members(mesh, rank, axes), "*".join(axes))


def _group(layout: Layout, rank: int, axes: tuple[str, ...]) -> Group:
    return group_along(layout.mesh, rank, axes)


@lru_cache(maxsize=4096)
def _world_members(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(mesh.world_ranks[r] for r in mesh.group(rank, axes))


def _members(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    return layout.mesh.group(rank, axes)


# --- all_reduce: several values in one exchange --------------------------------------------------
def _all_reduce(*arrays: np.ndarray, hop: Hop, rank: int, type: NumericType, what: str) -> tuple:
    group = _group(hop.source, rank, hop.axes)
    flat = np.concatenate([a.reshape(-1) for a in arrays]) if len(arrays) > 1 else \
        arrays[0].reshape(-1)
    assert hop.source.op is not None
    label = here_in(what)
    if flat.nbytes * (group.size - 1) <= ONE_EXCHANGE_BYTES:
        terms = group.swap([flat] * group.size, [flat.shape] * group.size, type.dtype, label)
        total = round_once(reduce_terms(terms, type, hop.source.op), type, None, None)
    else:
        operand = CollectiveOperand(group, flat, type, type, label=label)
        total = COLLECTIVES["all_reduce"].run(operand, op=hop.source.op)
    found, at = [], 0
    for a in arrays:
        found.append(total[at:at + a.size].reshape(a.shape))
        at += a.size
    return tuple(found)


# --- the others: one value -----------------------------------------------------------------------
def _reduce_scatter(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                    ) -> np.ndarray:
    group, d = _group(hop.source, rank, hop.axes), hop.dim
    blocks = [_along(d, *block(hop.target, r, d, shape, type.dtype))
              for r in _members(hop.source, rank, hop.axes)]
    mine = x[blocks[group.index]]
    terms = group.swap([x[b] for b in blocks], [mine.shape] * group.size, type.dtype,
                       here_in(what))
    assert hop.source.op is not None
    return round_once(reduce_terms(terms, type, hop.source.op), type, None, None)


def _all_gather(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                ) -> np.ndarray:
    group = _group(hop.source, rank, hop.axes)
    shapes = [local_shape(hop.source, shape, r, type.dtype)
              for r in _members(hop.source, rank, hop.axes)]
    got = group.swap([x] * group.size, shapes, type.dtype, here_in(what))
    return np.concatenate(got, axis=hop.dim)


def _all_to_all(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                ) -> np.ndarray:
    group, members = _group(hop.source, rank, hop.axes), _members(hop.source, rank, hop.axes)
    base = block(hop.source, rank, hop.split, shape, type.dtype)[0]
    cuts = [block(hop.target, r, hop.split, shape, type.dtype) for r in members]
    blocks = [_along(hop.split, lo - base, hi - base) if hi > lo else _along(hop.split, 0, 0)
              for lo, hi in cuts]
    lo, hi = cuts[group.index]
    shapes = []
    for r in members:
        theirs = list(local_shape(hop.source, shape, r, type.dtype))
        theirs[hop.split] = hi - lo
        shapes.append(tuple(theirs))
    got = group.swap([x[b] for b in blocks], shapes, type.dtype, here_in(what))
    return np.concatenate(got, axis=hop.dim)


def _permute(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
             ) -> np.ndarray:
    made = plan(hop.source, hop.target, shape, type.dtype)
    return reshard(transport(), made, x, type.dtype, what)


def _along(dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(lo, hi))


def _local_aval(x: Aval, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str) -> Aval:
    return Aval(local_shape(hop.target, shape, rank, type.dtype), x.type)


ALL_REDUCE = GraphOp(
    "mesh_all_reduce", shape=lambda *xs, **attrs: xs, ref=_all_reduce, multi=True, effects=EFFECT,
    differentiable=False, doc="terms of all ranks of an axis, added up")


def _moving(kind: str, ref: Callable, doc: str) -> GraphOp:
    return GraphOp(f"mesh_{kind}", shape=_local_aval, ref=ref, effects=EFFECT,
                   differentiable=False, doc=doc)


MOVES = {
    "reduce_scatter": _moving("reduce_scatter", _reduce_scatter,
                              "terms of all ranks of an axis, added up; each keeps a block"),
    "all_gather": _moving("all_gather", _all_gather, "the blocks of an axis, on all its ranks"),
    "all_to_all": _moving("all_to_all", _all_to_all, "blocks of one dimension become those of "
                          "another"),
    "permute": _moving("permute", _permute, "other cuts: each rank sends what others lack"),
}
