"""Reductions and scans of tiles, and sorting of rows. Sums are kept in the compute type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.numerics import bool_, i32
from tessera.tile.errors import RuleError
from tessera.tile.handles import Edge, Handle, Row, is_number
from tessera.tile.ops import rules
from tessera.tile.ops.registry import declare, macro
from tessera.tile.types import Scalar, Tile
from tessera.tile.values import array_dtype


def _matrix(rng: Any) -> tuple:
    return (rng.standard_normal((6, 13)),)


def _reduced(types: Any, attrs: dict[str, Any]) -> Any:
    t = rules.require_tile(types[0], None, "a reduction")
    axis = attrs["axis"]
    if axis is None:
        return Scalar(t.dtype)
    if not 0 <= axis < len(t.shape):
        raise RuleError(f"axis {axis} of {t}")
    shape = t.shape[:axis] + t.shape[axis + 1:]
    return Tile(t.dtype, shape) if shape else Scalar(t.dtype)


def _axes(x: np.ndarray, axis: int | None) -> Any:
    return tuple(range(1, x.ndim)) if axis is None else axis + 1


def _flat(x: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """[G] of a whole reduction as a scalar [G, 1]."""
    return rest.reshape(-1, 1) if rest.ndim == 1 else rest


def _fold(name: str, doc: str, f: Any) -> None:
    def meaning(x: Any, axis: Any = None) -> Any:
        return _flat(x, f(x, _axes(x, axis)))

    meaning.__doc__ = doc
    declare(rule=_reduced, name=name, attrs=("axis",), public=False)(meaning)


_fold("fold_sum", "The sum along an axis, or of all elements.",
      lambda x, axis: x.sum(axis=axis, dtype=x.dtype))
_fold("fold_max", "The largest element; NaN when one is NaN.", lambda x, axis: x.max(axis=axis))
_fold("fold_min", "The smallest element; NaN when one is NaN.", lambda x, axis: x.min(axis=axis))
_fold("fold_prod", "The product.", lambda x, axis: x.prod(axis=axis, dtype=x.dtype))


def _extreme(types: Any, attrs: dict[str, Any]) -> Any:
    out = _reduced(types, attrs)
    return replace(out, dtype=i32)


@declare(rule=_extreme, attrs=("axis",), public=False)
def fold_argmax(x: Any, axis: Any = None) -> Any:
    """The first position of the largest element."""
    return np.argmax(x, axis=axis + 1).reshape((-1, 1) if x.ndim == 2 else (x.shape[0], -1))


@declare(rule=_extreme, attrs=("axis",), public=False)
def fold_argmin(x: Any, axis: Any = None) -> Any:
    """The first position of the smallest element."""
    return np.argmin(x, axis=axis + 1).reshape((-1, 1) if x.ndim == 2 else (x.shape[0], -1))


NEUTRAL = {"fold_sum": 0.0, "fold_max": -np.inf, "fold_min": np.inf, "fold_prod": 1.0,
           "fold_argmax": -np.inf, "fold_argmin": np.inf, "scan_sum": 0.0, "scan_max": -np.inf}


def reduce(t: Any, name: str, x: Any, axis: int | None) -> Any:
    """A reduction that leaves out what lies beyond the tensor."""
    if isinstance(x, Row):
        x = t.view_of_row(x)
    if isinstance(x, Handle) and not isinstance(x.type, Scalar | Tile):
        t.value_of(x)
    if not isinstance(x, Handle) or not isinstance(x.type, Tile):
        t.fail("a reduction needs a tile", "load it first: ts.tile.load(x[a:a+64])")
    if axis is not None:
        axis = t.constant_int(axis, "axis")
        axis = axis + len(x.type.shape) if axis < 0 else axis
    if name not in ("fold_max", "fold_min", "fold_argmax", "fold_argmin"):
        x = t.cast(x, rules.compute_dtype(x.type.dtype))
    for i, edge in enumerate(x.edges):
        if edge is not None and not edge.inside and (axis is None or axis == i):
            x = mask_edge(t, x, i, edge, NEUTRAL[name])
    out = t.emit(name, [x], axis=axis)
    if isinstance(out.type, Tile) and x.edges:
        out = replace(out, edges=tuple(e for i, e in enumerate(x.edges) if i != axis))
    return out


def mask_edge(t: Any, x: Handle, axis: int, edge: Edge, fill: float) -> Handle:
    """x with the elements beyond the tensor along an axis replaced."""
    assert isinstance(x.type, Tile)
    dtype = x.type.dtype
    if dtype.kind in ("int", "uint") and fill in (np.inf, -np.inf):
        fill = dtype.max if fill > 0 else dtype.min
    if dtype is bool_:
        fill = bool(fill > 0)
    out = t.emit("edge_mask", [x, edge.offset, edge.extent], axis=axis, fill=fill)
    # The position stays known (for dropout); what lay outside has its neutral value now.
    edges = (replace(edge, inside=True) if i == axis else e for i, e in enumerate(x.edges))
    return replace(out, edges=tuple(edges))


def _edge_rule(types: Any, attrs: dict[str, Any]) -> Tile:
    t = rules.require_tile(types[0], None, "edge_mask")
    for bound in types[1:]:
        if not isinstance(bound, Scalar) or not bound.uniform or bound.dtype.kind == "float":
            raise RuleError(f"edge_mask needs uniform integers, got {bound}")
    return t


def _edge_lower(t: Any, x: Any, start: Any, stop: Any, *, axis: Any = 1,
                fill: Any = -np.inf) -> Any:
    return t.emit("edge_mask", [t.value_of(x), start, stop], axis=t.constant_int(axis, "axis"),
                  fill=fill)


@declare(rule=_edge_rule, attrs=("axis", "fill"), lower=_edge_lower)
def edge_mask(x: Any, start: Any, stop: Any, axis: int = 1, fill: Any = -np.inf) -> Any:
    """Element i along an axis stays where start + i < stop; the others become `fill` (-inf)."""
    shape = [1] * x.ndim
    shape[axis + 1] = x.shape[axis + 1]
    at = np.arange(x.shape[axis + 1]).reshape(shape)
    wide = (-1,) + (1,) * (x.ndim - 1)
    inside = at + np.reshape(start, wide) < np.reshape(stop, wide)
    return np.where(inside, x, x.dtype.type(fill))


def _public(name: str, fold: str, axis: Any, doc: str) -> None:
    if axis == "any":
        def lower(t: Any, x: Any, axis: Any = None) -> Any:
            return reduce(t, fold, x, axis)
    else:
        def lower(t: Any, x: Any) -> Any:  # type: ignore[misc]
            return reduce(t, fold, x, axis)

    lower.__doc__ = doc
    macro(name=name)(lower)


for _kind, _word in (("sum", "sum"), ("max", "maximum"), ("min", "minimum"), ("prod", "product")):
    _public(f"row_{_kind}", f"fold_{_kind}", 1, f"The {_word} of each row: (M, N) -> (M,).")
    _public(f"col_{_kind}", f"fold_{_kind}", 0, f"The {_word} of each column: (M, N) -> (N,).")
    _public(f"reduce_{_kind}", f"fold_{_kind}", "any",
            f"The {_word} along an axis, or of the whole tile as a number.")
for _kind, _word in (("argmax", "largest"), ("argmin", "smallest")):
    _public(f"row_{_kind}", f"fold_{_kind}", 1, f"The first position of the {_word} of each row.")
    _public(_kind, f"fold_{_kind}", 1, f"The first position of the {_word} of each row.")


@macro()
def row_mean(t: Any, x: Any) -> Any:
    """The mean of each row over the columns that lie inside the tensor."""
    total = reduce(t, "fold_sum", x, 1)
    edge = x.edges[1] if len(x.edges) > 1 else None
    if edge is None or edge.inside:
        return t.arithmetic("div", (total, float(x.type.shape[1])))
    left = t.arithmetic("sub", (edge.extent, edge.offset))
    count = t.arithmetic("maximum", (t.arithmetic("minimum", (left, x.type.shape[1])), 1))
    return t.arithmetic("div", (total, t.as_float(count)))


# --- scans and sorting ------------------------------------------------------------------------
def _scan_rule(types: Any, attrs: dict[str, Any]) -> Tile:
    t = rules.require_tile(types[0], None, "a scan")
    if not 0 <= attrs["axis"] < len(t.shape):
        raise RuleError(f"axis {attrs['axis']} of {t}")
    return t


def _scan(name: str, doc: str, f: Any) -> None:
    def meaning(x: Any, axis: Any = 1) -> Any:
        return f(x, axis=axis + 1)

    def lower(t: Any, x: Any, axis: Any = None) -> Any:
        x = t.value_of(x)
        if not isinstance(x, Handle) or not isinstance(x.type, Tile):
            t.fail("a scan needs a tile")
        last = len(x.type.shape) - 1 if axis is None else t.constant_int(axis, "axis")
        if name == "cumsum":
            x = t.cast(x, rules.compute_dtype(x.type.dtype))
        return replace(t.emit(name, [x], axis=last), edges=x.edges)

    meaning.__doc__ = doc
    declare(rule=_scan_rule, name=name, attrs=("axis",), lower=lower)(meaning)


_scan("cumsum", "Sums of the elements up to each, along the last axis unless told otherwise.",
      lambda x, axis: np.cumsum(x, axis=axis, dtype=x.dtype))
_scan("cummax", "The largest of the elements up to each.",
      lambda x, axis: np.maximum.accumulate(x, axis=axis))
_scan("cumprod", "Products of the elements up to each.",
      lambda x, axis: np.cumprod(x, axis=axis, dtype=x.dtype))


def _sort_rule(types: Any, attrs: dict[str, Any]) -> Tile:
    return rules.require_tile(types[0], None, "a sort")


@declare(rule=_sort_rule, attrs=("descending",),
         lower=lambda t, x, descending=False: t.emit(
             "sort", [t.value_of(x)], descending=descending))
def sort(x: Any, descending: Any = False) -> Any:
    """Each row in ascending (or descending) order; NaN last (first)."""
    out = np.sort(x, axis=-1)
    return out[..., ::-1] if descending else out


@declare(rule=lambda types, attrs: replace(_sort_rule(types, attrs), dtype=i32),
         attrs=("descending",), lower=lambda t, x, descending=False: t.emit(
             "argsort", [t.value_of(x)], descending=descending))
def argsort(x: Any, descending: Any = False) -> Any:
    """The positions that sort each row; equal elements keep their order."""
    if descending:
        n = x.shape[-1]
        back = np.argsort(x[..., ::-1], axis=-1, kind="stable")
        return (n - 1 - back)[..., ::-1]
    return np.argsort(x, axis=-1, kind="stable")


__all__ = ["array_dtype", "is_number", "reduce"]
