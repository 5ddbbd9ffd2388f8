"""Rules of the collectives as ops of the Graph IR: shapes of results, and derivatives.

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

from typing import Any

from tessera.dims import show_shape
from tessera.errors import DTypeError, ShapeError
from tessera.graph import functions as F
from tessera.graph.op import Aval
from tessera.graph.operand import compute_type, convert
from tessera.graph.ops.convert import store_cotangent
from tessera.numerics import NumericType
from tessera.tensor import Tensor

from .record import emit
from .reduce import need_reducible


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
def shape_all_reduce(x: Aval, *rest: Aval, type: NumericType, to: NumericType, op: str,
                      **attrs: Any) -> Aval:
    _need_type(x, type)
    need_reducible(type, op)
    return Aval(x.shape, to)


def shape_reduce_scatter(x: Aval, *rest: Aval, type: NumericType, to: NumericType, op: str,
                          dim: int, sizes: tuple, index: int, **attrs: Any) -> Aval:
    _need_type(x, type)
    need_reducible(type, op)
    _need_extent(x, dim, sum(sizes), "reduce_scatter")
    return _with(x, dim, sizes[index], to)


def shape_all_gather(x: Aval, *, type: NumericType, dim: int, sizes: tuple, index: int,
                      **attrs: Any) -> Aval:
    _need_type(x, type)
    _need_extent(x, dim, sizes[index], "all_gather")
    return _with(x, dim, sum(sizes))


def shape_all_to_all(x: Aval, *, type: NumericType, split: int, concat: int, sends: tuple,
                      gets: tuple, index: int, **attrs: Any) -> Aval:
    _need_type(x, type)
    _need_extent(x, split, sum(sends), "all_to_all")
    return _with(_with(x, split, sends[index]), concat, sum(gets))


def shape_permute(x: Aval, *, type: NumericType, shape: tuple, **attrs: Any) -> Aval:
    _need_type(x, type)
    if len(shape) != x.ndim:
        raise ShapeError(f"permute of {show_shape(x.shape)} cannot give {show_shape(shape)}")
    return Aval(shape, x.type)


def shape_broadcast(x: Aval, *, type: NumericType, **attrs: Any) -> Aval:
    _need_type(x, type)
    return x


# --- derivatives of what moves --------------------------------------------------------------------
def vjp_all_gather(g: Tensor, y: Tensor, x: Tensor, *, dim: int, sizes: tuple, **attrs: Any
                    ) -> tuple:
    return (emit("reduce_scatter", g, attrs, dim=dim, sizes=sizes, op="sum"),)


def vjp_all_to_all(g: Tensor, y: Tensor, x: Tensor, *, split: int, concat: int, sends: tuple,
                    gets: tuple, **attrs: Any) -> tuple:
    return (emit("all_to_all", g, attrs, split=concat, concat=split, sends=gets, gets=sends),)


def vjp_permute(g: Tensor, y: Tensor, x: Tensor, *, pairs: tuple, **attrs: Any) -> tuple:
    back = tuple((b, a) for a, b in pairs)
    return (emit("permute", g, attrs, pairs=back, shape=tuple(x.shape)),)


def vjp_broadcast(g: Tensor, y: Tensor, x: Tensor, *, root: int, **attrs: Any) -> tuple:
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


def vjp_all_reduce(g: Tensor, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                    **attrs: Any) -> tuple:
    none = (None,) * len(rest)
    g = convert(_stored(g, to), compute_type(x.type))
    if op in ("sum", "mean"):
        return (emit("all_reduce", g, attrs, op=op), *none)
    share = _share(x, _extremum(y, x, attrs, "all_reduce", op), attrs)
    return (emit("all_reduce", g, attrs, op="sum") * share, *none)


def jvp_all_reduce(ts: tuple, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                    **attrs: Any) -> Tensor:
    t = ts[0]
    if op in ("max", "min"):
        t, op = t * _share(x, _extremum(y, x, attrs, "all_reduce", op), attrs), "sum"
    return convert(emit("all_reduce", t, attrs, op=op), compute_type(to))


def vjp_reduce_scatter(g: Tensor, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                        dim: int, sizes: tuple, **attrs: Any) -> tuple:
    none = (None,) * len(rest)
    g = convert(_stored(g, to), compute_type(x.type))
    if op == "mean":
        g = g / len(sizes)
    whole = emit("all_gather", g, attrs, dim=dim, sizes=sizes)
    if op in ("max", "min"):
        whole = whole * _share_of_blocks(y, x, op, dim, sizes, attrs)
    return (whole, *none)


def _share_of_blocks(y: Tensor, x: Tensor, op: str, dim: int, sizes: tuple, attrs: dict) -> Tensor:
    mine = _extremum(y, x, attrs, "reduce_scatter", op, dim=dim, sizes=sizes)
    return _share(x, emit("all_gather", mine, attrs, dim=dim, sizes=sizes), attrs)


def jvp_reduce_scatter(ts: tuple, y: Tensor, x: Tensor, *rest: Tensor, op: str, to: NumericType,
                        dim: int, sizes: tuple, **attrs: Any) -> Tensor:
    t = ts[0]
    if op in ("max", "min"):
        t, op = t * _share_of_blocks(y, x, op, dim, sizes, attrs), "sum"
    return convert(emit("reduce_scatter", t, attrs, op=op, dim=dim, sizes=sizes), compute_type(to))
