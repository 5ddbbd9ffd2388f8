"""The collectives as ops of the Graph IR: shapes, derivatives, batches.

Attributes of every op: `axis` (names of mesh axes; None: all ranks), `mesh`, `index` (which member
of the group this rank is), `type` (of the operand); then those of the call and the extents of all
members, so that a graph knows every shape: `sizes` of the blocks along `dim`, `sends` and `gets` of
all_to_all, `shape` of what permute gives. `type` and `to` are numeric types: sums are made in the
accumulate type of `type` and rounded to `to`.

A derivative is that of the sum over all ranks: with x = (x_0, x_1, ...) and y = A x over the ranks,
the rule gives A^T. So all_gather and reduce_scatter(sum) are each other's adjoint, all_reduce(sum)
is its own, all_to_all and permute have their inverse, and broadcast sums to its root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.dims import show_shape
from tessera.errors import DTypeError, ShapeError
from tessera.graph import functions as F
from tessera.graph.op import OPS, VIEW, Arg, Aval, Op, Sample
from tessera.graph.operand import compute_type, convert
from tessera.graph.ops.convert import store_cotangent
from tessera.graph.trace import apply
from tessera.numerics import NumericType, as_type
from tessera.tensor import Tensor

from .calls import run_barrier
from .record import COLLECTIVES, Collective, run_collective
from .reduce import need_reducible

EFFECT = frozenset({"collective"})
PLACE = {"axis": None, "mesh": None, "index": 0}  # of a program that runs alone


def emit(name: str, x: Tensor, attrs: dict[str, Any], **changed: Any) -> Tensor:
    """Another collective of the same group on x, in x's own type."""
    group = {k: attrs[k] for k in PLACE}
    if COLLECTIVES[name].reduces:
        changed.setdefault("to", x.type)
    return apply(OPS[name], x, **group, type=x.type, **changed)


def _need_type(x: Aval, type: NumericType) -> None:
    if x.type != type:
        raise DTypeError(f"the operand is {x}, the op is of {type}")


def _need_extent(x: Aval, dim: int, extent: int, what: str) -> None:
    if x.shape[dim] != extent:
        raise ShapeError(f"{what}: extent {x.shape[dim]} along dimension {dim}, its attributes say "
                         f"{extent}")


def _with(x: Aval, dim: int, extent: int, type: NumericType | None = None) -> Aval:
    return Aval((*x.shape[:dim], extent, *x.shape[dim + 1:]), type or x.type)


# --- the shapes of results ----------------------------------------------------------------------
def _shape_all_reduce(x: Aval, *rest: Aval, type: NumericType, to: NumericType, op: str,
                      **attrs: Any) -> Aval:
    _need_type(x, type)
    need_reducible(type, op)
    return Aval(x.shape, to)


def _shape_reduce_scatter(x: Aval, *rest: Aval, type: NumericType, to: NumericType, op: str,
                          dim: int, sizes: tuple, index: int, **attrs: Any) -> Aval:
    _need_type(x, type)
    need_reducible(type, op)
    _need_extent(x, dim, sum(sizes), "reduce_scatter")
    return _with(x, dim, sizes[index], to)


def _shape_all_gather(x: Aval, *, type: NumericType, dim: int, sizes: tuple, index: int,
                      **attrs: Any) -> Aval:
    _need_type(x, type)
    _need_extent(x, dim, sizes[index], "all_gather")
    return _with(x, dim, sum(sizes))


def _shape_all_to_all(x: Aval, *, type: NumericType, split: int, concat: int, sends: tuple,
                      gets: tuple, index: int, **attrs: Any) -> Aval:
    _need_type(x, type)
    _need_extent(x, split, sum(sends), "all_to_all")
    return _with(_with(x, split, sends[index]), concat, sum(gets))


def _shape_permute(x: Aval, *, type: NumericType, shape: tuple, **attrs: Any) -> Aval:
    _need_type(x, type)
    if len(shape) != x.ndim:
        raise ShapeError(f"permute of {show_shape(x.shape)} cannot give {show_shape(shape)}")
    return Aval(shape, x.type)


def _shape_broadcast(x: Aval, *, type: NumericType, **attrs: Any) -> Aval:
    _need_type(x, type)
    return x


# --- derivatives of what moves --------------------------------------------------------------------
def _again(name: str) -> Callable[..., Tensor]:
    """jvp of a linear collective: the same one on the tangent."""
    def rule(ts: tuple, y: Tensor, x: Tensor, type: NumericType, **attrs: Any) -> Tensor:
        return emit(name, ts[0], attrs, **{k: v for k, v in attrs.items() if k not in PLACE})

    return rule


def _vjp_all_gather(g: Tensor, y: Tensor, x: Tensor, *, dim: int, sizes: tuple, **attrs: Any
                    ) -> tuple:
    return (emit("reduce_scatter", g, attrs, dim=dim, sizes=sizes, op="sum"),)


def _vjp_all_to_all(g: Tensor, y: Tensor, x: Tensor, *, split: int, concat: int, sends: tuple,
                    gets: tuple, **attrs: Any) -> tuple:
    return (emit("all_to_all", g, attrs, split=concat, concat=split, sends=gets, gets=sends),)


def _vjp_permute(g: Tensor, y: Tensor, x: Tensor, *, pairs: tuple, **attrs: Any) -> tuple:
    back = tuple((b, a) for a, b in pairs)
    return (emit("permute", g, attrs, pairs=back, shape=tuple(x.shape)),)


def _vjp_broadcast(g: Tensor, y: Tensor, x: Tensor, *, root: int, **attrs: Any) -> tuple:
    """The sum, kept by the root. Sent from the root to itself rather than chosen here: all ranks
    record the same ops, so that their derivatives have the same collectives."""
    total = emit("all_reduce", g, attrs, op="sum")
    return (emit("permute", total, attrs, pairs=((root, root),), shape=tuple(x.shape)),)


# --- derivatives of what reduces --------------------------------------------------------------
def _share(x: Tensor, whole: Tensor, attrs: dict) -> Tensor:
    """Weights that share a gradient among the ranks whose element is the extremum `whole`."""
    mask = F.cast(F.equal(x, whole), compute_type(x.type))
    return mask / emit("all_reduce", mask, attrs, op="sum")


def _stored(g: Tensor, to: NumericType) -> Tensor:
    """The cotangent of a result that was rounded to `to`, as a cast's."""
    return g if compute_type(to).dtype is to.dtype else store_cotangent(g, to)


def _extremum(y: Tensor, x: Tensor, attrs: dict, name: str, op: str, **block: Any) -> Tensor:
    """The result as it was before it was rounded to another type than x's."""
    return y if y.dtype is x.dtype else emit(name, x, attrs, op=op, **block)


def _vjp_all_reduce(g: Tensor, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                    **attrs: Any) -> tuple:
    none = (None,) * len(rest)
    g = convert(_stored(g, to), compute_type(x.type))
    if op in ("sum", "mean"):
        return (emit("all_reduce", g, attrs, op=op), *none)
    share = _share(x, _extremum(y, x, attrs, "all_reduce", op), attrs)
    return (emit("all_reduce", g, attrs, op="sum") * share, *none)


def _jvp_all_reduce(ts: tuple, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                    **attrs: Any) -> Tensor:
    t = ts[0]
    if op in ("max", "min"):
        t, op = t * _share(x, _extremum(y, x, attrs, "all_reduce", op), attrs), "sum"
    return convert(emit("all_reduce", t, attrs, op=op), compute_type(to))


def _vjp_reduce_scatter(g: Tensor, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                        dim: int, sizes: tuple, **attrs: Any) -> tuple:
    none = (None,) * len(rest)
    g = convert(_stored(g, to), compute_type(x.type))
    if op == "mean":
        g = g * (1.0 / len(sizes))
    whole = emit("all_gather", g, attrs, dim=dim, sizes=sizes)
    if op in ("max", "min"):
        whole = whole * _share_of_blocks(y, x, op, dim, sizes, attrs)
    return (whole, *none)


def _share_of_blocks(y: Tensor, x: Tensor, op: str, dim: int, sizes: tuple, attrs: dict) -> Tensor:
    mine = _extremum(y, x, attrs, "reduce_scatter", op, dim=dim, sizes=sizes)
    return _share(x, emit("all_gather", mine, attrs, dim=dim, sizes=sizes), attrs)


def _jvp_reduce_scatter(ts: tuple, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                        dim: int, sizes: tuple, **attrs: Any) -> Tensor:
    t = ts[0]
    if op in ("max", "min"):
        t, op = t * _share_of_blocks(y, x, op, dim, sizes, attrs), "sum"
    return convert(emit("reduce_scatter", t, attrs, op=op, dim=dim, sizes=sizes), compute_type(to))


# --- batches ------------------------------------------------------------------------------------
def _batch(name: str, *dims: str) -> Callable[..., tuple[Tensor, bool]]:
    """The batch axis comes first, so that dimensions move up by one. One key serves the batch."""

    def rule(size: Any, batched: tuple, x: Tensor, *rest: Tensor, **attrs: Any) -> tuple:
        if any(batched[1:]) or not batched[0]:
            raise DTypeError(f"{name} under vmap takes one key and no element indices")
        attrs |= {d: attrs[d] + 1 for d in dims}
        if "shape" in attrs:
            attrs["shape"] = (size, *attrs["shape"])
        return apply(OPS[name], x, *rest, **attrs), True

    return rule


# --- the records ----------------------------------------------------------------------------------
def _ref(which: Collective) -> Callable[..., np.ndarray]:
    def ref(x: np.ndarray, *rest: np.ndarray, index: int, **attrs: Any) -> np.ndarray:
        made = run_collective(which, x, *rest, **attrs)
        return made.copy() if np.may_share_memory(made, x) else made  # of the only member

    return ref


def _samples(which: Collective) -> tuple[Sample, ...]:
    """The record's own samples, for a program that runs alone."""
    f32, made = as_type("f32"), []
    for s in which.samples:
        shape = s.shape(0, 1)
        attrs = which.check(shape, 1, **s.attrs)
        attrs |= which.extents([shape], 0, f32.dtype, **attrs) | ({"to": f32} if which.reduces
                                                                  else {})
        made.append(Sample((Arg(shape),), {**PLACE, "type": f32, **attrs}))
    return tuple(made)


def _record(name: str, shape: Callable, vjp: Callable, jvp: Callable, *dims: str, doc: str) -> Op:
    which = COLLECTIVES[name]
    return Op(name, shape=shape, ref=_ref(which), vjp=vjp, jvp=jvp, batch=_batch(name, *dims),
              effects=EFFECT, samples=_samples(which), doc=doc)


ALL_REDUCE = _record(
    "all_reduce", _shape_all_reduce, _vjp_all_reduce, _jvp_all_reduce,
    doc="sum, max, min or mean over the ranks of an axis, on all of them")
REDUCE_SCATTER = _record(
    "reduce_scatter", _shape_reduce_scatter, _vjp_reduce_scatter, _jvp_reduce_scatter, "dim",
    doc="this rank's block of a reduction over the ranks of an axis")
ALL_GATHER = _record(
    "all_gather", _shape_all_gather, _vjp_all_gather, _again("all_gather"), "dim",
    doc="the tensors of all ranks of an axis, joined")
ALL_TO_ALL = _record(
    "all_to_all", _shape_all_to_all, _vjp_all_to_all, _again("all_to_all"), "split", "concat",
    doc="a block of each rank's tensor, joined")
BROADCAST = _record(
    "broadcast", _shape_broadcast, _vjp_broadcast, _again("broadcast"),
    doc="the tensor of one rank of an axis, on all of them")
PERMUTE = _record(
    "permute", _shape_permute, _vjp_permute, _again("permute"),
    doc="the tensor of the rank that sends to this one, zeros when none does")
REPLICATED = Op(
    "replicated",
    shape=_shape_broadcast,
    ref=lambda x, **attrs: x,
    vjp=lambda g, y, x, **attrs: (emit("all_reduce", g, attrs, op="sum"),),
    jvp=lambda ts, y, x, **attrs: apply(REPLICATED, ts[0], **{**attrs, "type": ts[0].type}),
    batch=lambda size, batched, x, **attrs: (apply(REPLICATED, x, **attrs), True),
    memory=VIEW,
    samples=(Sample((Arg((2, 3)),), {**PLACE, "type": as_type("f32")}),),
    doc="a value that all ranks of an axis hold; its gradient is the sum of theirs",
)
BARRIER = Op(
    "barrier", shape=lambda axis, mesh: (), ref=run_barrier, multi=True, effects=EFFECT,
    differentiable=False, samples=(Sample((), {"axis": None, "mesh": None}),),
    doc="all ranks of an axis have come here")
