"""A batch in parts: microbatches of a pipeline; sums of gradients over them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.ad.reverse import is_differentiable
from tessera.errors import ArgumentError, ShapeError
from tessera.graph import functions as F
from tessera.graph import tree
from tessera.graph.jit import JitFunction
from tessera.graph.signature import is_data
from tessera.tensor import Tensor, as_tensor
from tessera.tile.launch.resident import Resident

from ..partition import balanced
from ..tensor import DistTensor, distribute


def rows_of(value: Any, what: str) -> int:
    """The extent of the first dimension, which all tensors of a tree have in common."""
    found = {}
    flat, structure = tree.flatten(value)
    for name, leaf in zip(tree.paths(structure, what), flat, strict=True):
        shape = as_tensor(leaf).shape
        if not shape:
            raise ShapeError(f"{name} is a scalar: it has no batch")
        found[shape[0]] = name
    if len(found) != 1:
        shown = ", ".join(f"{name} has {rows}" for rows, name in found.items())
        raise ShapeError(f"the batch of {what} has no size: {shown or 'there is no tensor'}",
                         hint="the first dimension of every tensor is the batch; ranks of all "
                              "stages give the same one")
    return next(iter(found))


def batch_rows(value: Any, count: int, what: str) -> list[int]:
    """The rows of each of the `count` parts that split_batch makes.

    Raises ArgumentError for tensors that it would cut at different rows, and for parts without any.
    """
    flat, structure = tree.flatten(value)
    found = {}
    for name, leaf in zip(tree.paths(structure, what), flat, strict=True):
        t = as_tensor(leaf)
        axes = t.layout.axes_of(0) if t.layout is not None else ()
        found[axes, tuple(map(sum, zip(*_cuts(t, count), strict=True)))] = name
    if len(found) > 1:
        (one, _), (other, _), *_ = found
        names = list(found.values())
        shown = [f"{name} over {'*'.join(axes) or 'no axis'}"
                 for name, axes in zip(names, (one, other), strict=False)]
        raise ArgumentError(f"the rows of a batch are split in different ways: {shown[0]}, "
                            f"{shown[1]}", hint="distribute x and the targets alike")
    (_, rows), = found
    if not all(rows):
        raise ArgumentError(f"{count} microbatches of {what}, whose ranks have too few rows: "
                            f"microbatches of {', '.join(map(str, rows))} rows",
                            hint="fewer microbatches, or a larger batch")
    return list(rows)


def _cuts(t: Tensor, count: int) -> list[list[int]]:
    """The rows of each microbatch, for every part of the first dimension."""
    parts = 1 if t.layout is None else t.layout.parts(0)
    return [[hi - lo for lo, hi in balanced(own_hi - own_lo, count)]
            for own_lo, own_hi in balanced(t.shape[0], parts)]


def split_batch(value: Any, count: int) -> list[Any]:
    """The value in `count` parts along the first dimension, balanced.

    Of a distributed tensor whose rows are split, each rank's own rows are: none changes ranks.
    """
    flat, structure = tree.flatten(value)
    cut = [_split(as_tensor(t), count) for t in flat]
    return [tree.unflatten(structure, [parts[i] for parts in cut]) for i in range(count)]


def _split(t: Tensor, count: int) -> Sequence[Tensor]:
    if isinstance(t, Resident):
        return [t[lo:hi] for lo, hi in balanced(t.shape[0], count)]
    if not isinstance(t, DistTensor):
        return [Tensor(t.array[lo:hi], t.type) for lo, hi in balanced(t.shape[0], count)]
    first = t.layout.splits[0]
    if first.cyclic or first.unit > 1:
        raise ArgumentError(f"a batch in the layout {t.layout} cannot be cut into microbatches",
                            hint="blocks of rows: ts.ShardSpec((\"row\",), (\"dp\",))")
    cut = {r: _split(p, count) for r, p in t.held.items()}
    rows = _cuts(t, count)
    return [DistTensor({r: parts[i] for r, parts in cut.items()},
                       (sum(own[i] for own in rows), *t.shape[1:]), t.type, t.layout)
            for i in range(count)]


def join_batches(values: Sequence[Any]) -> Any:
    """The inverse of split_batch."""
    flats = [tree.flatten(v)[0] for v in values]
    structure = tree.flatten(values[0])[1]
    return tree.unflatten(structure, [_join(ts) for ts in zip(*flats, strict=True)])


def _join(ts: Sequence[Tensor]) -> Tensor:
    first = ts[0]
    if not first.ndim:
        raise ShapeError("the last stage gives a scalar: it has no batch to join",
                         hint="a loss belongs into pipe.value_and_grad(loss_fn)")
    if isinstance(first, Resident):
        return F.concatenate(ts)
    if not isinstance(first, DistTensor):
        return Tensor(np.concatenate([t.array for t in ts]), first.type)
    parts: Sequence[Any] = ts
    held = {r: _join([t.held[r] for t in parts]) for r in first.held}
    return DistTensor(held, (sum(t.shape[0] for t in ts), *first.shape[1:]), first.type,
                      first.layout)


# --- sums over microbatches ----------------------------------------------------------------------
def parts_of(t: Tensor) -> list[Tensor]:
    """What this process holds of a tensor: itself, or the parts of a distributed one."""
    return list(t.held.values()) if isinstance(t, DistTensor) else [t]


def with_parts(t: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A tensor like t that holds these instead."""
    if not isinstance(t, DistTensor):
        return parts[0]
    return DistTensor(dict(zip(t.held, parts, strict=True)), t.shape, t.type, t.layout)


def own_copy(value: Any) -> Any:
    """The tree with arrays of its own, to add into. On a GPU sums are made anew."""
    return tree.map_tree(lambda t: with_parts(t, [
        p if isinstance(p, Resident) else Tensor(p.array.copy(), p.type) for p in parts_of(t)]),
        value)


def sums_of_gradients() -> JitFunction:
    """sums([terms, ...], largest): of lists of tensors on a GPU, from the first on; the maximum
    where `largest` says so."""
    def combined(terms: Sequence[Sequence[Tensor]], largest: tuple[bool, ...] = ()) -> list[Tensor]:
        every = [*zip(*terms, strict=True)]
        return [functools.reduce(F.maximum if m else F.add, same)
                for m, same in zip(largest or [False] * len(every), every, strict=True)]

    return JitFunction(combined, name="sums of gradients")


def added(total: Any, more: Any, sums: JitFunction, largest: Sequence[bool]) -> Any:
    """total + more; on hosts in the arrays of total. Gradients are f32 or f64, so that is what sums
    are made in. largest: of which leaves it is the maximum."""
    flat, structure = tree.flatten(total)
    each = tuple(m for t, m in zip(flat, largest, strict=True) for _ in parts_of(t))
    mine, new = ([p for t in leaves for p in parts_of(t)]
                 for leaves in (flat, tree.flatten(more)[0]))
    if any(isinstance(p, Resident) for p in mine):
        made = iter(sums([mine, new], each if any(each) else ()))
        return tree.unflatten(structure, [with_parts(t, [next(made) for _ in parts_of(t)])
                                          for t in flat])
    for m, a, b in zip(each, mine, new, strict=True):
        (np.maximum if m else np.add)(a.array, b.array, out=a.array)
    return total


def trained_places(leaves: Sequence[Any]) -> list[int]:
    """Which leaves of a stage's parameters are trained: its `ts.param`s, or all where none is one.
    """
    marked = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_param]
    return marked or list(range(len(leaves)))


def like_params(grads: Any, params: Any) -> Any:
    """Gradients with those of distributed parameters in the layout of these."""
    flat, structure = tree.flatten(grads)
    every = tree.flatten(params)[0]
    trained = [p for p in (every[i] for i in trained_places(every))
               if is_data(p) and is_differentiable(as_tensor(p))] if flat else []
    return tree.unflatten(structure, [
        distribute(g, p.layout) if isinstance(p, DistTensor) else g
        for g, p in zip(flat, trained, strict=True)])
