"""The collectives of a partitioned program, as ops of the graph that one rank runs.

Every rank knows all layouts and extents, so nothing is agreed on before a message is sent, unlike
with a collective that is called by hand. Terms are added in the accumulate type, in the order of
ranks, and rounded once (collectives/reduce.py). On GPUs they are written in what NCCL has and in
ops with kernels (collectives/exchange_ops.py). Narrow terms that come so far lie in windows of
NCCL; others were widened (localize.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from tessera.graph import functions as F
from tessera.graph.op import Aval, GraphOp
from tessera.graph.trace import apply
from tessera.numerics import NumericType
from tessera.tensor import Tensor

from ..collectives.exchange_ops import (
    GpuGroup,
    MovedBox,
    cut_along,
    move_boxes,
    reduce_together,
)
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
Hops = Sequence[Hop]
Shapes = Sequence[Shape]


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
def _all_reduce(*arrays: np.ndarray, hop: Hop, rank: int, type: NumericType, what: str,
                blocks: int = 0) -> tuple:
    return reduce_together(_group(hop.source, rank, hop.axes), arrays, type, _summed_by(hop), what)


def _all_reduce_on_gpu(*xs: Tensor, hop: Hop, rank: int, type: NumericType, what: str,
                       blocks: int = 0) -> tuple[Tensor, ...]:
    return _gpu_group(hop, rank, type, what, blocks).all_reduce(xs, _summed_by(hop))


def _gpu_group(hop: Hop, rank: int, type: NumericType, what: str, blocks: int = 0) -> GpuGroup:
    group = _group(hop.source, rank, hop.axes)
    return GpuGroup(group.ranks, group.axis, group.index, type, what, blocks, in_windows=True)


# --- reduce_scatter, all_gather: several values in one exchange ----------------------------------
def _reduce_scatter(*arrays: np.ndarray, hops: Hops, rank: int, shapes: Shapes,
                    types: Sequence[NumericType], what: str, blocks: int = 0) -> tuple:
    group, dtypes = _group(hops[0].source, rank, hops[0].axes), [t.dtype for t in types]
    cuts = [_cuts(*each, rank) for each in zip(hops, shapes, types, strict=True)]
    sends = [[x[_along(hop.dim, *own[j])] for x, hop, own in zip(arrays, hops, cuts, strict=True)]
             for j in range(group.size)]
    mine = [a.shape for a in sends[group.index]]
    got = group.swap_several(sends, [mine] * group.size, dtypes, here_in(what))
    ops = [*map(_summed_by, hops)]
    return tuple(round_once(reduce_terms(list(terms), t, op), t, None, None)
                 for *terms, t, op in zip(*got, types, ops, strict=True))


def _reduce_scatter_on_gpu(*xs: Tensor, hops: Hops, rank: int, shapes: Shapes,
                           types: Sequence[NumericType], what: str, blocks: int = 0
                           ) -> tuple[Tensor, ...]:
    return tuple(_gpu_group(hop, rank, t, what, blocks).reduce_scatter(
        x, hop.dim, _cuts(hop, shape, t, rank), _summed_by(hop))
        for x, hop, shape, t in zip(xs, hops, shapes, types, strict=True))


def _summed_by(hop: Hop) -> str:
    assert hop.source.op is not None
    return hop.source.op


def _cuts(hop: Hop, shape: Shape, type: NumericType, rank: int) -> list[tuple[int, int]]:
    """The block of each member."""
    return [block(hop.target, r, hop.dim, shape, type.dtype)
            for r in _members(hop.source, rank, hop.axes)]


def _all_gather(*arrays: np.ndarray, hops: Hops, rank: int, shapes: Shapes,
                types: Sequence[NumericType], what: str, blocks: int = 0) -> tuple:
    group = _group(hops[0].source, rank, hops[0].axes)
    theirs = [_part_shapes(*each, rank) for each in zip(hops, shapes, types, strict=True)]
    got = group.swap_several([arrays] * group.size, [*zip(*theirs, strict=True)],
                             [t.dtype for t in types], here_in(what))
    return tuple(np.concatenate(parts, axis=hop.dim)
                 for *parts, hop in zip(*got, hops, strict=True))


def _all_gather_on_gpu(*xs: Tensor, hops: Hops, rank: int, shapes: Shapes,
                       types: Sequence[NumericType], what: str, blocks: int = 0
                       ) -> tuple[Tensor, ...]:
    return tuple(_gpu_group(hop, rank, t, what, blocks).all_gather(
        x, hop.dim, _part_shapes(hop, shape, t, rank))
        for x, hop, shape, t in zip(xs, hops, shapes, types, strict=True))


def _part_shapes(hop: Hop, shape: Shape, type: NumericType, rank: int) -> list[Shape]:
    """The shape of each member's part."""
    return [local_shape(hop.source, shape, r, type.dtype)
            for r in _members(hop.source, rank, hop.axes)]


# --- the others: one value -----------------------------------------------------------------------
def _all_to_all(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                ) -> np.ndarray:
    group = _group(hop.source, rank, hop.axes)
    cuts, shapes = _exchanged(hop, rank, shape, type)
    blocks = [_along(hop.split, lo, hi) for lo, hi in cuts]
    got = group.swap([x[b] for b in blocks], shapes, type.dtype, here_in(what))
    return np.concatenate(got, axis=hop.dim)


def _all_to_all_on_gpu(x: Tensor, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                       ) -> Tensor:
    cuts, shapes = _exchanged(hop, rank, shape, type)
    blocks = [cut_along(x, hop.split, lo, hi) for lo, hi in cuts]
    return F.concatenate(_gpu_group(hop, rank, type, what).swap(blocks, shapes), axis=hop.dim)


def _exchanged(hop: Hop, rank: int, shape: Shape, type: NumericType
               ) -> tuple[list[tuple[int, int]], list[Shape]]:
    """Of each member the block of this rank's part that it gets, and the shape of what it gives."""
    members = _members(hop.source, rank, hop.axes)
    base = block(hop.source, rank, hop.split, shape, type.dtype)[0]
    cuts = [block(hop.target, r, hop.split, shape, type.dtype) for r in members]
    lo, hi = cuts[members.index(rank)]
    shapes = []
    for r in members:
        theirs = list(local_shape(hop.source, shape, r, type.dtype))
        theirs[hop.split] = hi - lo
        shapes.append(tuple(theirs))
    return [(a - base, b - base) if b > a else (0, 0) for a, b in cuts], shapes


def _permute(x: np.ndarray, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
             ) -> np.ndarray:
    made = plan(hop.source, hop.target, shape, type.dtype)
    return reshard(transport(), made, x, type.dtype, what)


def _permute_on_gpu(x: Tensor, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str
                    ) -> Tensor:
    world = list(hop.target.mesh.world_ranks)
    boxes = [MovedBox(world.index(m.source), world.index(m.target), 0, m.box.shape, m.source_at,
                      m.target_at) for m in plan(hop.source, hop.target, shape, type.dtype).moves
             if world[rank] in (m.source, m.target) and m.box.size]
    group = GpuGroup(tuple(world), "*".join(hop.axes), rank, type, what)
    return move_boxes(group, [x], F.zeros(local_shape(hop.target, shape, rank, type.dtype), type),
                      boxes)


def _along(dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(lo, hi))


def _local_aval(x: Aval, hop: Hop, rank: int, shape: Shape, type: NumericType, what: str) -> Aval:
    return Aval(local_shape(hop.target, shape, rank, type.dtype), x.type)


def _local_avals(*xs: Aval, hops: Hops, rank: int, shapes: Shapes, types: Sequence[NumericType],
                 what: str, blocks: int = 0) -> tuple[Aval, ...]:
    return tuple(_local_aval(x, hop, rank, shape, t, what)
                 for x, hop, shape, t in zip(xs, hops, shapes, types, strict=True))


def _moving(kind: str, ref: Callable, on_gpu: Callable, doc: str, several: bool = False) -> GraphOp:
    return GraphOp(f"mesh_{kind}", shape=_local_avals if several else _local_aval, ref=ref,
                   multi=several, effects=EFFECT, expand_gpu=on_gpu, differentiable=False, doc=doc)


ALL_REDUCE = GraphOp(
    "mesh_all_reduce", shape=lambda *xs, **attrs: xs, ref=_all_reduce, multi=True, effects=EFFECT,
    expand_gpu=_all_reduce_on_gpu, differentiable=False,
    doc="terms of all ranks of an axis, added up")
MOVES = {
    "reduce_scatter": _moving("reduce_scatter", _reduce_scatter, _reduce_scatter_on_gpu,
                              "terms of all ranks of an axis, added up; each keeps a block",
                              several=True),
    "all_gather": _moving("all_gather", _all_gather, _all_gather_on_gpu,
                          "the blocks of an axis, on all its ranks", several=True),
    "all_to_all": _moving("all_to_all", _all_to_all, _all_to_all_on_gpu,
                          "blocks of one dimension become those of another"),
    "permute": _moving("permute", _permute, _permute_on_gpu,
                       "other cuts: each rank sends what others lack"),
}


def apply_hops(xs: Sequence[Tensor], hops: Hops, rank: int, shapes: Shapes, what: str,
               blocks: int = 0) -> tuple[Tensor, ...]:
    """Parts of values of these shapes by hops of one kind over the same axes, in one exchange."""
    op, types = MOVES[hops[0].kind], tuple(x.type for x in xs)
    if not op.multi:
        ((x,), (hop,), (shape,)) = xs, hops, shapes
        return (apply(op, x, hop=hop, rank=rank, shape=shape, type=x.type, what=what),)
    made: tuple[Tensor, ...] = apply(
        op, *xs, hops=tuple(hops), rank=rank, shapes=tuple(shapes), types=types, what=what,
        **({"blocks": blocks} if blocks else {}))
    return made
