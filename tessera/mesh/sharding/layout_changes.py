"""How a value comes from one layout to another: a few hops, each a collective or a local slice.

    (-, -) + sum over tp  ->  (-, tp)     reduce_scatter
    (dp, tp)              ->  (dp, -)     all_gather
    (tp, -)               ->  (-, tp)     all_to_all
    (-, -)                ->  (tp, -)     slice, nothing is sent

Layouts and extents decide the hops, so every rank finds the same ones without asking. What no
collective does in one step (other cuts of one dimension, cyclic parts) is a `permute`: each rank
sends others the boxes that they lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from tessera.numerics import DType

from ...lazy_dataclass import dataclass
from ..layout import Layout, Split
from ..partition import group_of, intervals

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """One step: `kind` over `axes`, from a layout to a layout.

    kind: all_reduce, reduce_scatter, all_gather, all_to_all, permute, slice; term: what all ranks
    have, as the term of the first of them and zeros on the others
    dim: what reduce_scatter cuts, all_gather joins, all_to_all joins; split: what all_to_all cuts
    received: elements that a rank gets from others, on average
    """

    kind: str
    source: Layout
    target: Layout
    axes: tuple[str, ...] = ()
    dim: int = 0
    split: int = 0
    received: float = 0.0

    def __str__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{over}"


@lru_cache(maxsize=8192)
def hops(source: Layout, target: Layout, shape: Shape, dtype: DType) -> tuple[Hop, ...]:
    """The hops from `source` to `target` for a value of this shape; none when it is there."""
    found: list[Hop] = []
    here = source
    if target.pending and not source.pending:
        before = hops(source, target.settled(), shape, dtype)
        return (*before, Hop("term", target.settled(), target, target.pending))
    if source.pending and source.pending != target.pending:
        found += _settle(source, target, shape)
        here = found[-1].target
    if same_cuts(here, target, shape, dtype):
        return tuple(found)
    whole = [d for d in range(len(shape)) if not _inside(here, target, d, shape, dtype)]
    if whole and (exchanged := _all_to_all(here, target, shape, dtype)) is not None:
        found.append(exchanged)
        here = exchanged.target
    elif any(_recut(here, target, d) for d in whole):
        size = _local(target, shape)
        return (*found, Hop("permute", here, target, _moved_axes(here, target), received=size))
    else:
        for d in whole:
            found.append(_gather(here, d, shape))
            here = found[-1].target
    if not same_cuts(here, target, shape, dtype):
        found.append(Hop("slice", here, target))
    return tuple(found)


def received(source: Layout, target: Layout, shape: Shape, dtype: DType) -> float:
    """Elements that a rank gets from others on the way from `source` to `target`."""
    return sum(hop.received for hop in hops(source, target, shape, dtype))


# --- one hop each --------------------------------------------------------------------------------
def _settle(source: Layout, target: Layout, shape: Shape) -> list[Hop]:
    """The pending reduction: scattered where the target splits a whole dimension over its axes,
    else on all ranks."""
    found, here = [], source
    for d in range(len(shape)):
        axes = target.axes_of(d)
        fits = axes and not here.axes_of(d) and set(axes) <= set(here.pending) and shape[d] > 1
        if fits and not target.splits[d].cyclic:
            left = tuple(a for a in here.pending if a not in axes)
            n = source.mesh.size(axes)
            after = replace(here, splits=_with(here, d, target.splits[d]), pending=left,
                            op=here.op if left else None)
            found.append(Hop("reduce_scatter", here, after, axes, d,
                             received=_local(here, shape) * (n - 1) / n))
            here = after
    if here.pending:
        n = source.mesh.size(here.pending)
        found.append(Hop("all_reduce", here, here.settled(), here.pending,
                         received=2 * _local(here, shape) * (n - 1) / n))
    return found


def _gather(here: Layout, d: int, shape: Shape) -> Hop:
    after = here.with_split(d)
    axes = here.axes_of(d)
    size = _local(after, shape)
    return Hop("all_gather", here, after, axes, d, received=size * (1 - 1 / here.mesh.size(axes)))


def _all_to_all(here: Layout, target: Layout, shape: Shape, dtype: DType) -> Hop | None:
    """The hop, when one dimension gives its axes to another and nothing else changes."""
    changed = [d for d in range(len(shape)) if here.splits[d] != target.splits[d]]
    if len(changed) != 2:
        return None
    for a, b in (changed, changed[::-1]):
        axes = tuple(x for x in here.axes_of(a) if x not in target.axes_of(a))
        if axes and _extends(target, here, a, axes, shape) and _extends(here, target, b, axes,
                                                                        shape):
            n = here.mesh.size(axes)
            size = _local(target, shape) * (1 - 1 / n)
            return Hop("all_to_all", here, target, axes, a, b, received=size)
    return None


def _extends(short: Layout, long: Layout, d: int, axes: tuple[str, ...], shape: Shape) -> bool:
    """Whether one dimension is split over `axes` in `long` and not in `short`, and each block of
    `short` is made of blocks of `long`."""
    had, has = short.splits[d], long.splits[d]
    if has.cyclic or had.cyclic or has.axes != (*had.axes, *axes):
        return False
    return not had.axes or shape[d] % (has.unit * long.parts(d)) == 0 and had.unit == has.unit


def _recut(here: Layout, target: Layout, d: int) -> bool:
    """Whether a dimension is split before and after, or in runs: no gather for that."""
    return bool(here.axes_of(d)) and (bool(target.axes_of(d)) or bool(here.splits[d].cyclic))


def _moved_axes(here: Layout, target: Layout) -> tuple[str, ...]:
    used = {a for s, t in zip(here.splits, target.splits, strict=True) if s != t
            for a in (*s.axes, *t.axes)}
    return tuple(a for a in here.mesh.axes if a in used)


def _with(layout: Layout, d: int, split: Split) -> tuple[Split, ...]:
    return (*layout.splits[:d], split, *layout.splits[d + 1:])


# --- cuts ----------------------------------------------------------------------------------------
def _local(layout: Layout, shape: Shape) -> float:
    """Elements of a rank's part, on average."""
    return prod(shape) / max(1, prod(layout.parts(d) for d in range(len(shape))))


def _group(shape: Shape, d: int, dtype: DType | None) -> int:
    return group_of(dtype) if d == len(shape) - 1 else 1


def same_cuts(a: Layout, b: Layout, shape: Shape, dtype: DType | None) -> bool:
    """Whether every rank has the same elements in both layouts."""
    return a.pending == b.pending and all(
        s == t or _cuts(a, d, shape, dtype) == _cuts(b, d, shape, dtype)
        for d, (s, t) in enumerate(zip(a.splits, b.splits, strict=True)))


def _inside(here: Layout, target: Layout, d: int, shape: Shape, dtype: DType | None) -> bool:
    """Whether every rank has, along one dimension, what it will have."""
    if not here.axes_of(d):
        return True
    if here.splits[d] == target.splits[d]:
        return True
    if here.splits[d].cyclic or target.splits[d].cyclic:
        return False
    have, want = _cuts(here, d, shape, dtype), _cuts(target, d, shape, dtype)
    return all(w is None or (h is not None and h[0] <= w[0] and w[1] <= h[1])
               for h, w in zip(have, want, strict=True))


@lru_cache(maxsize=8192)
def _cuts(layout: Layout, d: int, shape: Shape, dtype: DType | None) -> tuple:
    """Per rank: [lo, hi) of its block along one dimension, None for nothing; runs if cyclic."""
    group = _group(shape, d, dtype)
    runs = [intervals(layout, d, shape[d], layout.part(r, d), group)
            for r in range(layout.mesh.size())]
    if layout.splits[d].cyclic:
        return tuple(runs)
    return tuple(own[0] if own else None for own in runs)


def block(layout: Layout, rank: int, d: int, shape: Sequence[int], dtype: DType | None
          ) -> tuple[int, int]:
    """[lo, hi) of a rank's block along one dimension of a layout without runs."""
    shape = tuple(shape)
    own = intervals(layout, d, shape[d], layout.part(rank, d), _group(shape, d, dtype))
    return own[0] if own else (0, 0)
