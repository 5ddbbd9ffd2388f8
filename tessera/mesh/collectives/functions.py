"""The collectives: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, permute, barrier.

Called by every rank of a mesh axis on its own tensor. `axis` names one or several axes of the mesh
that is given, whose `with` block is open, or that is the only one; without axis and mesh all ranks
of the program take part. In a function of ts.jit or ts.grad a call is an op of its graph, and has
derivatives: those of the sum of all ranks' results (rules.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, AxisError
from tessera.graph import functions as F
from tessera.graph.op import VIEW, Arg, GraphOp
from tessera.graph.op import Sample as OpSample
from tessera.graph.trace import apply
from tessera.numerics import as_type
from tessera.tensor import Tensor, as_tensor

from ..device_mesh import Mesh
from ..layout import REDUCTIONS, Layout
from ..partition import balanced, group_of
from ..ranks.group import find_mesh, make_group
from ..ranks.ledger import agree, call
from . import rules
from .cost import COSTS, ONCE_AROUND, TWICE_AROUND, CollectiveCost
from .exchange_ops import GpuGroup, by_group, cut_along
from .record import (
    EFFECT,
    PLACE,
    Collective,
    CollectiveOperand,
    CollectiveSample,
    OnWholeTensors,
    axis_of,
    collect,
    emit,
    traces_whole_tensors,
)
from .reduce import need_reducible, reduce_terms, round_once

Axis = str | Sequence[str] | None
_SAME = CollectiveSample(lambda rank, ranks: (3, 5))
_SMALL = CollectiveSample(lambda rank, ranks: ())  # fewer elements than ranks
_FOLD: dict[str, Callable] = {"sum": np.sum, "max": np.max, "min": np.min,
                              "mean": np.mean}


def _check_op(op: str) -> None:
    if op not in REDUCTIONS:
        raise ArgumentError(f"op={op!r} is no reduction", hint=f"one of {', '.join(REDUCTIONS)}")


def _along(dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(lo, hi))


def _blocks(shape: tuple[int, ...], dim: int, parts: int, dtype: Any = None) -> list[tuple]:
    """The slices of each member's block along one dimension."""
    group = group_of(dtype) if dim == len(shape) - 1 else 1
    return [_along(dim, lo, hi) for lo, hi in balanced(shape[dim], parts, group)]


# --- all_reduce ----------------------------------------------------------------------------------
def _check_all_reduce(shape: tuple, members: int, op: str) -> dict:
    _check_op(op)
    return {"op": op}


def _run_all_reduce(x: CollectiveOperand, op: str) -> np.ndarray:
    """Each member reduces one stretch of the flattened array, and gives it to the others."""
    need_reducible(x.type, op)
    flat = x.array.reshape(-1)
    cuts = balanced(flat.size, x.group.size, max(group_of(x.type.dtype), group_of(x.out.dtype)))
    lo, hi = cuts[x.group.index]
    terms = x.swap([flat[a:b] for a, b in cuts], [(hi - lo,)] * x.group.size)
    index = None if x.index is None else x.index.reshape(-1)[lo:hi]
    own = round_once(reduce_terms(terms, x.type, op), x.out, x.key, index, lo)
    gathered = x.swap([own] * x.group.size, [(b - a,) for a, b in cuts], x.out)
    return np.concatenate(gathered).reshape(x.array.shape)


def _gpu_all_reduce(group: GpuGroup, x: Tensor, to: Any, op: str) -> Tensor:
    return group.all_reduce([x], op, to)[0]


ALL_REDUCE = Collective(
    name="all_reduce",
    on_gpu=by_group("all_reduce", _gpu_all_reduce),
    doc="sum, max, min or mean over the ranks of an axis, on all of them",
    shape=rules.shape_all_reduce,
    vjp=rules.vjp_all_reduce,
    jvp=rules.jvp_all_reduce,
    adjoint="itself of a sum or mean; of `max` and `min` the sum, for the ranks that hold the "
            "extremum, shared among them",
    same_result=True,
    cost=replace(TWICE_AROUND, switch_adds=True, stages=(
        ("inside", ONCE_AROUND), ("between", TWICE_AROUND), ("inside", ONCE_AROUND))),
    on_whole=OnWholeTensors(lambda at, axes, dim, concat: at, adjoint="all_reduce"),
    meaning=lambda arrays, op: [_FOLD[op](arrays, axis=0)] * len(arrays),
    run=_run_all_reduce,
    sends=lambda elements, n: 2 * elements * (n - 1) / n,
    check=_check_all_reduce,
    reduces=True,
    samples=tuple(CollectiveSample(s.shape, {"op": op}) for s in (_SAME,
                                                                  _SMALL) for op in REDUCTIONS),
)


def all_reduce(x: Any, axis: Axis = None, *, op: str = "sum", mesh: Mesh | None = None,
               dtype: Any = None, key: Any = None, index: Any = None) -> Tensor:
    """y = x_0 + x_1 + ... over the ranks of an axis, on all of them; or their max, min or mean.

    x: [...] of one shape and type on all ranks   y: the same shape, in `dtype` (default: x's type)
    Adds in the accumulate type of x's policy, in the order of ranks, and rounds once. With
    stochastic rounding `key` is needed; `index` is each element's index in the whole tensor.
    Raises DisagreementError when ranks call different things, MeshError for a wrong number of
    ranks, DTypeError for sums of bools and means of integers.
    """
    return collect(ALL_REDUCE, x, axis, mesh, op=op, dtype=dtype, key=key, index=index)


# --- reduce_scatter ------------------------------------------------------------------------------
def _check_reduce_scatter(shape: tuple, members: int, dim: int, op: str) -> dict:
    _check_op(op)
    return {"dim": axis_of(dim, len(shape), "reduce_scatter"), "op": op}


def _cuts(dim: int, sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    """The slices of blocks of these extents along one dimension."""
    ends = [*itertools.accumulate(sizes, initial=0)]
    return [_along(dim, lo, hi) for lo, hi in itertools.pairwise(ends)]


def _balanced_sizes(shape: tuple, dim: int, parts: int, dtype: Any) -> tuple[int, ...]:
    return tuple(b[dim].stop - b[dim].start for b in _blocks(shape, dim, parts, dtype))


def _run_reduce_scatter(x: CollectiveOperand, dim: int, op: str,
                        sizes: Sequence[int]) -> np.ndarray:
    need_reducible(x.type, op)
    blocks = _cuts(dim, sizes)
    mine = blocks[x.group.index]
    terms = x.swap([x.array[b] for b in blocks], [x.array[mine].shape] * x.group.size)
    index = x.index
    if index is None and x.key is not None:
        index = np.arange(x.array.size).reshape(x.array.shape)
    total = reduce_terms(terms, x.type, op)
    return round_once(total, x.out, x.key, None if index is None else index[mine])


def _mean_reduce_scatter(arrays: list[np.ndarray], dim: int, op: str) -> list[np.ndarray]:
    total = _FOLD[op](arrays, axis=0)
    return [total[b] for b in _blocks(total.shape, dim, len(arrays))]


def _layout_scattered(at: Layout, axes: tuple[str, ...], dim: int, concat: int) -> Layout:
    at, d = at.gathered(axes), dim % at.ndim
    return at.with_split(d, (*at.axes_of(d), *axes))


def _gpu_reduce_scatter(group: GpuGroup, x: Tensor, to: Any, dim: int, op: str,
                        sizes: Sequence[int]) -> Tensor:
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return group.reduce_scatter(x, dim, list(ends), op, to)


IN_STAGES = replace(ONCE_AROUND, stages=(("between", ONCE_AROUND), ("inside", ONCE_AROUND)))
REDUCE_SCATTER = Collective(
    name="reduce_scatter",
    on_gpu=by_group("reduce_scatter", _gpu_reduce_scatter),
    doc="this rank's block of a reduction over the ranks of an axis",
    shape=rules.shape_reduce_scatter,
    vjp=rules.vjp_reduce_scatter,
    jvp=rules.jvp_reduce_scatter,
    adjoint="`all_gather`, divided by the number of ranks for a mean; of `max` and `min` as "
            "`all_reduce`",
    same_result=False,
    cost=IN_STAGES,
    dims=("dim",),
    on_whole=OnWholeTensors(_layout_scattered, adjoint="all_gather"),
    meaning=_mean_reduce_scatter,
    run=_run_reduce_scatter,
    sends=lambda elements, n: elements * (n - 1) / n,
    check=_check_reduce_scatter,
    extents=lambda shapes, index, dtype, dim, op: {
        "sizes": _balanced_sizes(shapes[index], dim, len(shapes), dtype)},
    shared=("sizes",),
    reduces=True,
    samples=(CollectiveSample(_SAME.shape, {"dim": 1, "op": "sum"}),
             CollectiveSample(_SAME.shape, {"dim": 0,
             "op": "mean"}), CollectiveSample(lambda rank, ranks: (1, 2), {"dim": 0, "op": "max"})),
)


def reduce_scatter(x: Any, axis: Axis = None, *, dim: int = -1, op: str = "sum",
                   mesh: Mesh | None = None, dtype: Any = None, key: Any = None,
                   index: Any = None) -> Tensor:
    """all_reduce, of which each rank keeps its block along `dim`.

    x: [..., N, ...] of one shape and type   y: [..., N / ranks, ...], balanced where N does not
    divide. Numerics, `dtype`, `key`, `index` and errors as all_reduce; AxisError for a wrong dim.
    """
    return collect(REDUCE_SCATTER, x, axis, mesh, dim=dim, op=op, dtype=dtype, key=key,
                   index=index)


# --- all_gather ----------------------------------------------------------------------------------
def _with(shape: tuple, dim: int, extent: int) -> tuple:
    return (*shape[:dim], extent, *shape[dim + 1:])


def _run_all_gather(x: CollectiveOperand, dim: int, sizes: Sequence[int]) -> np.ndarray:
    shapes = [_with(x.array.shape, dim, n) for n in sizes]
    return np.concatenate(x.swap([x.array] * x.group.size, shapes), axis=dim)


def _gpu_all_gather(group: GpuGroup, x: Tensor, to: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    return group.all_gather(x, dim, [_with(tuple(x.shape), dim, n) for n in sizes])


def _layout_gathered(at: Layout, axes: tuple[str, ...], dim: int, concat: int) -> Layout:
    for d, split in enumerate(at.splits):
        if any(a in split.axes for a in axes):
            left = tuple(a for a in split.axes if a not in axes)
            at = at.with_split(d, left, split.cyclic, split.unit)
    return at


ALL_GATHER = Collective(
    name="all_gather",
    on_gpu=by_group("all_gather", _gpu_all_gather),
    doc="the tensors of all ranks of an axis, joined",
    shape=rules.shape_all_gather,
    vjp=rules.vjp_all_gather,
    adjoint="`reduce_scatter`, of the same parts",
    same_result=True,
    cost=IN_STAGES,
    dims=("dim",),
    on_whole=OnWholeTensors(_layout_gathered, adjoint="reduce_scatter"),
    meaning=lambda arrays, dim: [np.concatenate(arrays, axis=dim)] * len(arrays),
    run=_run_all_gather,
    sends=lambda elements, n: elements * (n - 1),
    varies=lambda ndim, sized, dim: (dim,),
    check=lambda shape, members, dim: {"dim": axis_of(dim, len(shape), "all_gather")},
    extents=lambda shapes, index, dtype, dim: {"sizes": tuple(s[dim] for s in shapes)},
    shared=("sizes",),
    samples=(CollectiveSample(_SAME.shape, {"dim": 0}),
             CollectiveSample(lambda r, n: (2, r), {"dim": 1})),
)


def all_gather(x: Any, axis: Axis = None, *, dim: int = -1, mesh: Mesh | None = None) -> Tensor:
    """The tensors of all ranks of an axis, one after another along `dim`, on all of them.

    x: [..., n_r, ...], where n_r may differ between ranks   y: [..., n_0 + n_1 + ..., ...]
    Bits are moved, never rounded. Raises DisagreementError, MeshError, AxisError.
    """
    return collect(ALL_GATHER, x, axis, mesh, dim=dim)


# --- all_to_all ----------------------------------------------------------------------------------
def _check_all_to_all(shape: tuple, members: int, split: int, concat: int) -> dict:
    return {"split": axis_of(split, len(shape), "all_to_all"),
            "concat": axis_of(concat, len(shape), "all_to_all")}


def _extents_all_to_all(shapes: list[tuple], index: int, dtype: Any, split: int, concat: int
                        ) -> dict:
    """sends: extents along `split` of the blocks that this rank cuts, by who gets them;
    gets: extents along `concat` of the blocks that come, by who sends them."""
    sends = _balanced_sizes(shapes[index], split, len(shapes), dtype)
    gets = tuple(s[concat] for s in shapes) if split != concat else (sends[index],) * len(shapes)
    return {"sends": sends, "gets": gets}


def _run_all_to_all(x: CollectiveOperand, split: int, concat: int, sends: Sequence[int],
                    gets: Sequence[int]
                    ) -> np.ndarray:
    mine = _with(x.array.shape, split, sends[x.group.index])  # of a block that comes
    shapes = [_with(mine, concat, n) for n in gets]
    blocks = [x.array[cut] for cut in _cuts(split, sends)]
    return np.concatenate(x.swap(blocks, shapes), axis=concat)


def _gpu_all_to_all(group: GpuGroup, x: Tensor, to: Any, split: int, concat: int,
                    sends: Sequence[int], gets: Sequence[int]) -> Tensor:
    mine = _with(tuple(x.shape), split, sends[group.index])
    ends = itertools.pairwise(itertools.accumulate(sends, initial=0))
    blocks = [cut_along(x, split, lo, hi) for lo, hi in ends]
    return F.concatenate(group.swap(blocks, [_with(mine, concat, n) for n in gets]), axis=concat)


def _meaning_all_to_all(arrays: list[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    n = len(arrays)
    cut = [[a[b] for b in _blocks(a.shape, split, n)] for a in arrays]
    return [np.concatenate([cut[i][j] for i in range(n)], axis=concat) for j in range(n)]


def _layout_exchanged(at: Layout, axes: tuple[str, ...], dim: int, concat: int) -> Layout:
    d, other = dim % at.ndim, concat % at.ndim
    if not set(axes) <= set(at.axes_of(other)):
        return at
    left = tuple(a for a in at.axes_of(other) if a not in axes)
    return at.with_split(other, left).with_split(d, (*at.axes_of(d), *axes))


ALL_TO_ALL = Collective(
    name="all_to_all",
    on_gpu=by_group("all_to_all", _gpu_all_to_all),
    doc="a block of each rank's tensor, joined",
    shape=rules.shape_all_to_all,
    vjp=rules.vjp_all_to_all,
    adjoint="its inverse",
    same_result=False,
    cost=replace(ONCE_AROUND, route="pairs"),
    dims=("split", "concat"),
    on_whole=OnWholeTensors(_layout_exchanged, adjoint="all_to_all"),
    meaning=_meaning_all_to_all,
    run=_run_all_to_all,
    sends=lambda elements, n: elements * (n - 1) / n,
    varies=lambda ndim, sized, split, concat: {concat, split} if sized else {concat} - {split},
    check=_check_all_to_all,
    extents=_extents_all_to_all,
    samples=(CollectiveSample(_SAME.shape, {"split": 0, "concat": 1}),
             CollectiveSample(lambda r, n: (2 + r, 5), {"split": 1, "concat": 0}),
             CollectiveSample(_SAME.shape, {"split": 1, "concat": 1})),
)


def all_to_all(x: Any, axis: Axis = None, *, split: int = 0, concat: int = -1,
               mesh: Mesh | None = None) -> Tensor:
    """Block j of x along `split` goes to rank j; the blocks that come are joined along `concat`.

    x: extent N along `split`, the same on all ranks; that along `concat` may differ
    Moves the split of a tensor from dimension `concat` to dimension `split`; the call with both
    exchanged takes it back. Raises DisagreementError, MeshError, AxisError.
    """
    return collect(ALL_TO_ALL, x, axis, mesh, split=split, concat=concat)


# --- broadcast, permute, barrier -----------------------------------------------------------------
def _check_broadcast(shape: tuple, members: int, root: int) -> dict:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < members:
        raise AxisError(f"broadcast: root={root!r} of {members} ranks on the axis")
    return {"root": root}


def _run_broadcast(x: CollectiveOperand, root: int) -> np.ndarray:
    n, empty = x.group.size, x.array.reshape(-1)[:0]
    sends = [x.array if x.group.index == root else empty] * n
    shapes = [x.array.shape if j == root else (0,) for j in range(n)]
    return x.swap(sends, shapes)[root].copy()


def _gpu_broadcast(group: GpuGroup, x: Tensor, to: Any, root: int) -> Tensor:
    sends = [x if group.index == root else None] * group.n
    shapes = [tuple(x.shape) if j == root else (0,) for j in range(group.n)]
    return x if group.index == root and group.n == 1 else group.swap(sends, shapes)[root]


BROADCAST = Collective(
    name="broadcast",
    on_gpu=by_group("broadcast", _gpu_broadcast),
    doc="the tensor of one rank of an axis, on all of them",
    shape=rules.shape_broadcast,
    vjp=rules.vjp_broadcast,
    adjoint="the sum at the root, zeros elsewhere",
    same_result=True,
    cost=CollectiveCost(lambda n: n - 1, lambda n: 1.0),
    meaning=lambda arrays, root: [arrays[root]] * len(arrays),
    run=_run_broadcast,
    sends=lambda elements, n: elements * (n - 1),
    check=_check_broadcast,
    samples=(CollectiveSample(_SAME.shape, {"root": 0}),
             CollectiveSample(_SMALL.shape, {"root": 0})),
)


def broadcast(x: Any, axis: Axis = None, *, root: int = 0, mesh: Mesh | None = None) -> Tensor:
    """The tensor of the axis's rank `root`, on all ranks of it.

    x: of one shape and type on all ranks. Raises DisagreementError, MeshError, AxisError.
    """
    return collect(BROADCAST, x, axis, mesh, root=root)


def _check_permute(shape: tuple, members: int, pairs: Any) -> dict:
    pairs = tuple((int(a), int(b)) for a, b in pairs)
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    wrong = [r for r in (*sources, *targets) if not 0 <= r < members]
    if wrong or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        raise ArgumentError(f"permute: pairs={pairs} on {members} ranks",
                            hint="(from, to), each rank at most once on either side; the ring: "
                            "[(r, (r + 1) % n) for r in range(n)]")
    return {"pairs": pairs}


def _extents_permute(shapes: list[tuple], index: int, dtype: Any, pairs: tuple) -> dict:
    come = next((a for a, b in pairs if b == index), index)
    return {"shape": tuple(shapes[come])}


def _run_permute(x: CollectiveOperand, pairs: tuple, shape: tuple) -> np.ndarray:
    me, n, empty = x.group.index, x.group.size, x.array.reshape(-1)[:0]
    to = next((b for a, b in pairs if a == me), None)
    come = next((a for a, b in pairs if b == me), None)
    sends = [x.array if j == to else empty for j in range(n)]
    got = x.swap(sends, [shape if j == come else (0,) for j in range(n)])
    return np.zeros(shape, x.array.dtype) if come is None else got[come].copy()


def _gpu_permute(group: GpuGroup, x: Tensor, to: Any, pairs: tuple, shape: tuple) -> Tensor:
    targets = [b for a, b in pairs if a == group.index]
    come = next((a for a, b in pairs if b == group.index), None)
    got = group.swap([x if j in targets else None for j in range(group.n)],
                     [shape if j == come else (0,) for j in range(group.n)])
    return F.zeros(shape, x.type) if come is None else got[come]


def _meaning_permute(arrays: list[np.ndarray], pairs: Sequence) -> list[np.ndarray]:
    source = {b: a for a, b in pairs}
    return [arrays[source[r]] if r in source else np.zeros_like(a) for r, a in enumerate(arrays)]


PERMUTE = Collective(
    name="permute",
    on_gpu=by_group("permute", _gpu_permute),
    doc="the tensor of the rank that sends to this one, zeros when none does",
    shape=rules.shape_permute,
    vjp=rules.vjp_permute,
    adjoint="its inverse",
    same_result=False,
    cost=CollectiveCost(lambda n: 1, lambda n: 1.0, route="one"),
    meaning=_meaning_permute,
    run=_run_permute,
    sends=lambda elements, n: elements,
    varies=lambda ndim, sized, pairs: range(ndim),
    check=_check_permute,
    extents=_extents_permute,
    samples=(CollectiveSample(_SAME.shape, {"pairs": ()}),
             CollectiveSample(lambda r, n: (r, 2), {"pairs": ((0, 0),)})),
)


def permute(x: Any, axis: Axis = None, *, pairs: Sequence[tuple[int, int]],
            mesh: Mesh | None = None) -> Tensor:
    """Each (from, to) of `pairs` sends its tensor along the axis; who gets none has zeros.

    x: extents may differ between ranks; y has the shape of what came. Raises ArgumentError for a
    rank that sends or gets twice, DisagreementError, MeshError.
    """
    return collect(PERMUTE, x, axis, mesh, pairs=pairs)


REPLICATED = GraphOp(
    "replicated",
    shape=rules.shape_broadcast,
    ref=lambda x, **attrs: x,
    vjp=lambda g, y, x, **attrs: (emit("all_reduce", g, attrs, op="sum"),),
    jvp=lambda ts, y, x, **attrs: apply(REPLICATED, ts[0], **{**attrs, "type": ts[0].type}),
    batch=lambda size, batched, x, **attrs: (apply(REPLICATED, x, **attrs), True),
    memory=VIEW,
    samples=(OpSample((Arg((2, 3)),), {**PLACE, "type": as_type("f32")}),),
    doc="a value that all ranks of an axis hold; its gradient is the sum of theirs",
)


def replicated(x: Any, axis: Axis = None, *, mesh: Mesh | None = None) -> Tensor:
    """x, said to be the same on all ranks of an axis. Nothing is sent or compared.

    What a rank gives `ts.grad` counts as its own. A parameter or label that all ranks hold is one
    value: marked so, its gradient is the sum of those of all ranks, and a loss that follows from
    such values alone is one loss (Megatron-LM's operator f; Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). Of a distributed tensor it is true: that is one value anyway.
    """
    x = as_tensor(x)
    if x.layout is not None or traces_whole_tensors():
        return x
    mesh, axes = find_mesh(axis, mesh)
    group = make_group(mesh, axes)
    return apply(REPLICATED, x, axis=axes, mesh=mesh, index=group.index, type=x.type)


def _run_barrier(axis: tuple[str, ...] | None, mesh: Mesh | None) -> tuple:
    group = make_group(mesh, axis)
    agree(group, call(group, "barrier", (), None, {}))
    return ()


BARRIER = GraphOp(
    "barrier", shape=lambda axis, mesh: (), ref=_run_barrier, multi=True, effects=EFFECT,
    differentiable=False, samples=(OpSample((), {"axis": None, "mesh": None}),),
    doc="all ranks of an axis have come here")
COSTS["barrier"] = CollectiveCost(lambda n: 2 * (n - 1), lambda n: 0.0)  # no record: no operand


def barrier(axis: Axis = None, *, mesh: Mesh | None = None) -> None:
    """Returns when every rank of the axis has come here.

    A compiled function of distributed tensors has none: its ranks wait where they need each other.
    """
    if traces_whole_tensors():
        return
    mesh, axes = find_mesh(axis, mesh)
    apply(BARRIER, axis=axes, mesh=mesh)
