"""Reductions and scans of tiles, and sorting of rows. Sums are kept in the compute type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.numerics import bool_, i32
from tessera.tile.builder import edge_masks, edge_rules, rules
from tessera.tile.builder.edge_masks import Along, mask_edge
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir import edges
from tessera.tile.ir.edges import Edge, Mixed, TileEdges
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe, is_number
from tessera.tile.ir.numpy_values import array_dtype
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.ops.elementwise import as_float


def axes_of(t: TileType) -> str:
    return f"its axes are 0 to {len(t.shape) - 1}, or -1 to -{len(t.shape)} from the last"


def reduced_type(types: Any, attrs: dict[str, Any]) -> Any:
    t = rules.require_tile(types[0], None, "a reduction")
    axis = attrs["axis"]
    if axis is None:
        return Scalar(t.dtype)
    if not 0 <= axis < len(t.shape):
        raise RuleError(f"axis {axis} of {t}", axes_of(t))
    shape = t.shape[:axis] + t.shape[axis + 1:]
    return TileType(t.dtype, shape) if shape else Scalar(t.dtype)


def _axes(x: np.ndarray, axis: int | None) -> Any:
    return tuple(range(1, x.ndim)) if axis is None else axis + 1


def _flat(x: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """[G] of a whole reduction as a scalar [G, 1]."""
    return rest.reshape(-1, 1) if rest.ndim == 1 else rest


def _meeting(neutral: float, said: str, sums: bool = False) -> Any:
    """The axes that a reduction runs along, with its neutral element."""
    def combines(types: Any, attrs: dict[str, Any]) -> list[Along]:
        axis = attrs["axis"]
        axes = range(len(types[0].shape)) if axis is None else (axis,)
        return [Along(0, i, neutral, sums=sums, said=said) for i in axes]

    return combines


def _reduction(name: str, said: str, neutral: float, joined_by: str, doc: str, f: Any) -> None:
    """The op reduce_<name>, and row_<name> and col_<name> that call it."""
    def meaning(x: Any, axis: Any = None) -> Any:
        return _flat(x, f(x, _axes(x, axis)))

    def lower(t: OpTracer, x: Any, axis: Any = None) -> Any:
        return reduce(t, op, x, axis)

    op, sums = f"reduce_{name}", name == "sum"
    meaning.__doc__ = f"{doc} along an axis, or of the whole tile as a number."
    declare(rule=reduced_type, name=op, attrs=("axis",), edges=edge_rules.reduced,
            layouts="reduced", combines=_meeting(neutral, said, sums), joined_by=joined_by,
            neutral=neutral, widens=name in ("sum", "prod"), lower=lower)(meaning)
    _along(f"row_{name}", op, 1, f"{doc} of each row: (M, N) -> (M,).")
    _along(f"col_{name}", op, 0, f"{doc} of each column: (M, N) -> (N,).")


def _along(name: str, op: str, axis: int, doc: str) -> None:
    def lower(t: OpTracer, x: Any) -> Any:
        if isinstance(x, Handle) and isinstance(x.type, TileType) and len(x.type.shape) <= axis:
            t.fail(f"{name} of {describe(x)}, which has no rows", "of all of it: "
                   f"ts.tile.{op}(x{', axis=None' if op.startswith('arg') else ''})")
        return reduce(t, op, x, axis)

    lower.__doc__ = doc
    macro(name=name)(lower)


def _position(name: str, word: str, neutral: float, f: Any) -> None:
    """The op argmax or argmin, and its name by rows."""
    def meaning(x: Any, axis: Any = None) -> Any:
        if axis is None:
            return f(x.reshape(len(x), -1), axis=1).reshape(-1, 1)
        return _flat(x, f(x, axis=axis + 1))

    doc = f"The first position of the {word} of each row."
    meaning.__doc__ = (f"The first position of the {word} along an axis, the last unless told "
                       "otherwise; None: in the whole tile, row by row. NaN is beyond all numbers.")
    declare(rule=_extreme, name=name, attrs=("axis",), edges=edge_rules.reduced, neutral=neutral,
            combines=_meeting(neutral, name), layouts="reduced",
            lower=lambda t, x, axis=-1: reduce(t, name, x, axis))(meaning)
    _along(f"row_{name}", name, 1, doc)


def _extreme(types: Any, attrs: dict[str, Any]) -> Any:
    out = reduced_type(types, attrs)
    return replace(out, dtype=i32)


def reduce(t: OpTracer, name: str, x: Any, axis: int | None) -> Any:
    """A reduction that leaves out what lies beyond the tensor."""
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    if isinstance(x, Handle) and not isinstance(x.type, Scalar | TileType):
        t.ir.value_of(x)
    if not isinstance(x, Handle) or not isinstance(x.type, TileType):
        t.fail("a reduction needs a tile", "load it first: ts.tile.load(x[a:a+64])")
    if axis is not None:
        axis = _axis_of(t, x, axis)
    if OPS[name].widens:
        x = t.ir.cast(x, rules.compute_dtype(x.type.dtype))
    return t.ir.emit(name, [x], axis=axis)


def _axis_of(t: OpTracer, x: Any, axis: Any) -> int:
    """The number of an axis of a tile, which counts from the end below 0."""
    axis = t.ir.constant_int(axis, "axis")
    tile = isinstance(x, Handle) and isinstance(x.type, TileType)
    return axis + len(x.type.shape) if axis < 0 and tile else axis


def _edge_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "edge_mask")
    for bound in types[1:]:
        if not isinstance(bound, Scalar) or not bound.uniform or bound.dtype.kind == "float":
            raise RuleError(f"edge_mask needs uniform integers, got {bound}")
    return t


def _edge_lower(t: OpTracer, x: Any, start: Any, stop: Any, *, axis: Any = 1,
                fill: Any = -np.inf) -> Any:
    x = t.ir.value_of(x)
    return t.ir.emit("edge_mask", [x, start, stop], axis=_axis_of(t, x, axis), fill=fill)


@declare(rule=_edge_rule, attrs=("axis", "fill", "low"), lower=_edge_lower, edges=edge_rules.masked,
         layouts="same", pointwise=True)
def edge_mask(x: Any, start: Any, stop: Any, axis: int = 1, fill: Any = -np.inf,
              low: bool = False) -> Any:
    """Element i along an axis stays where start + i < stop; the others become `fill` (-inf)."""
    shape = [1] * x.ndim
    shape[axis + 1] = x.shape[axis + 1]
    at = np.arange(x.shape[axis + 1]).reshape(shape)
    wide = (-1,) + (1,) * (x.ndim - 1)
    inside = at + np.reshape(start, wide) < np.reshape(stop, wide)
    if low:  # nor do those exist that lie before the tensor
        inside &= at + np.reshape(start, wide) >= 0
    return np.where(inside, x, x.dtype.type(fill))


_reduction("sum", "a sum", 0.0, "add", "The sum",
           lambda x, axis: x.sum(axis=axis, dtype=x.dtype))
_reduction("max", "a maximum", -np.inf, "maximum", "The maximum",
           lambda x, axis: x.max(axis=axis))
_reduction("min", "a minimum", np.inf, "minimum", "The minimum",
           lambda x, axis: x.min(axis=axis))
_reduction("prod", "a product of elements", 1.0, "mul", "The product",
           lambda x, axis: x.prod(axis=axis, dtype=x.dtype))
_position("argmax", "largest", -np.inf, np.argmax)
_position("argmin", "smallest", np.inf, np.argmin)


@macro()
def row_mean(t: OpTracer, x: Any) -> Any:
    """The mean of each row over the columns that lie inside the tensor."""
    edge = t.facts.of(x).at(1) if isinstance(x, Handle) else None
    if isinstance(edge, Mixed):
        edge_masks.refuse(t.ir, "row_mean", edge)
    total = reduce(t, "reduce_sum", x, 1)
    if isinstance(edge, edges.Listed):
        listed = t.ir.cast(edge_masks.list_of(t.ir, edge), total.type.dtype)
        there = reduce(t, "reduce_sum", listed, 1)
        return t.ir.arithmetic("div", (total, t.ir.arithmetic("maximum", (there, 1.0))))
    if not isinstance(edge, Edge) or edge.inside:
        return t.ir.arithmetic("div", (total, float(x.type.shape[1])))
    first, stop = t.ir.bounds_of(edge)
    count = t.ir.arithmetic("minimum", (t.ir.arithmetic("sub", (stop, first)), x.type.shape[1]))
    if edge.low:
        before = t.ir.arithmetic("maximum", (t.ir.arithmetic("neg", (first,)), 0))
        count = t.ir.arithmetic("sub", (count, before))
    return t.ir.arithmetic("div", (total, as_float(t.ir, t.ir.arithmetic("maximum", (count, 1)))))


@macro()
def inside(t: OpTracer, x: Any) -> Any:
    """Where the elements of a tile exist: False beyond the edges of the tensors it came from.

    where(inside(x), x, number) puts a number there, which counts from then on.
    """
    x = t.ir.value_of(x)
    if not isinstance(x, Handle) or not isinstance(x.type, TileType):
        t.fail("inside needs a tile", "load it first: ts.tile.load(x[a:a+64])")
    axes = t.facts.of(x).axes
    out = t.ir.emit("full", [], shape=x.type.shape, value=True, dtype=bool_)
    for i, edge in enumerate(axes):
        if isinstance(edge, Mixed):
            edge_masks.refuse(t.ir, "inside", edge)
        if isinstance(edge, edges.Listed):
            out = t.ir.arithmetic("and", (out, edge_masks.list_of(t.ir, edge)))
        elif isinstance(edge, Edge) and edges.open_(edge):
            out = mask_edge(t.ir, out, i, edge, -np.inf)
    t.facts.declare(out.value, TileEdges(tuple(edges.WHOLE for _ in axes)))
    t.facts.implied[out.value] = TileEdges(axes)
    return out


# --- scans and sorting ------------------------------------------------------------------------
def _scan_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "a scan")
    if not 0 <= attrs["axis"] < len(t.shape):
        raise RuleError(f"axis {attrs['axis']} of {t}", axes_of(t))
    return t


def _scan(name: str, neutral: float, doc: str, f: Any) -> None:
    def meaning(x: Any, axis: Any = 1) -> Any:
        return f(x, axis=axis + 1)

    def lower(t: OpTracer, x: Any, axis: Any = None) -> Any:
        x = t.ir.value_of(x)
        if not isinstance(x, Handle) or not isinstance(x.type, TileType):
            t.fail("a scan needs a tile")
        last = len(x.type.shape) - 1 if axis is None else _axis_of(t, x, axis)
        if name == "cumsum":
            x = t.ir.cast(x, rules.compute_dtype(x.type.dtype))
        return t.ir.emit(name, [x], axis=last)

    def combines(types: Any, attrs: dict[str, Any]) -> list[Along]:
        return [Along(0, attrs["axis"], neutral, sums=name == "cumsum", before=True)]

    meaning.__doc__ = doc
    declare(rule=_scan_rule, name=name, attrs=("axis",), lower=lower,
            edges=edge_rules.first_operand_edges, combines=combines, layouts="same")(meaning)


_scan("cumsum", 0.0,
      "Sums of the elements up to each, along the last axis unless told otherwise.",
      lambda x, axis: np.cumsum(x, axis=axis, dtype=x.dtype))
_scan("cummax", -np.inf, "The largest of the elements up to each.",
      lambda x, axis: np.maximum.accumulate(x, axis=axis))
_scan("cumprod", 1.0, "Products of the elements up to each.",
      lambda x, axis: np.cumprod(x, axis=axis, dtype=x.dtype))


def _sort_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "a sort")
    if attrs.get("bitonic") and t.shape[-1] & (t.shape[-1] - 1):
        raise RuleError(f"a merge of rows of {t}, whose length is no power of two",
                        "sort them without bitonic=True")
    return t


def _ordered(types: Any, attrs: dict[str, Any]) -> list[Along]:
    """What does not exist comes last, so that the edge stays where it is: NaN does, or -inf."""
    fill = -np.inf if attrs["descending"] else np.nan
    return [Along(0, len(types[0].shape) - 1, fill, ordered=True)]


@declare(rule=_sort_rule, attrs=("descending", "bitonic"), edges=edge_rules.first_operand_edges,
         combines=_ordered, layouts="rows",
         lower=lambda t, x, descending=False, bitonic=False: t.ir.emit(
             "sort", [t.ir.value_of(x)], descending=descending, bitonic=bitonic))
def sort(x: Any, descending: Any = False, bitonic: Any = False) -> Any:
    """Each row in ascending (or descending) order; NaN last (first).

    bitonic: rows are a power of two long and rise before they fall, so that one merge puts them in
    order; others come out in any.
    """
    out = np.sort(x, axis=-1)
    return out[..., ::-1] if descending else out


@declare(rule=lambda types, attrs: replace(_sort_rule(types, attrs), dtype=i32),
         attrs=("descending",), edges=edge_rules.first_operand_edges, combines=_ordered,
         lower=lambda t, x, descending=False: t.ir.emit(
             "argsort", [t.ir.value_of(x)], descending=descending), layouts="rows")
def argsort(x: Any, descending: Any = False) -> Any:
    """The positions that sort each row; equal elements keep their order."""
    if descending:
        n = x.shape[-1]
        back = np.argsort(x[..., ::-1], axis=-1, kind="stable")
        return (n - 1 - back)[..., ::-1]
    return np.argsort(x, axis=-1, kind="stable")


def _first_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "the smallest of rows")
    if not isinstance(attrs["k"], int) or not 1 <= attrs["k"] <= t.shape[-1]:
        raise RuleError(f"the {attrs['k']} smallest of rows of {t}",
                        f"1 to {t.shape[-1]}, known when the kernel is traced")
    return replace(t, shape=(*t.shape[:-1], attrs["k"]))


def _smallest(t: OpTracer, x: Any, k: Any) -> Any:
    return t.ir.emit("smallest", [t.ir.value_of(x)], k=t.ir.constant_int(k, "k"))


@declare(rule=_first_rule, attrs=("k",), edges=edge_rules.firsts, lower=_smallest,
         combines=lambda types, attrs: _ordered(types, {"descending": False}), layouts="first")
def smallest(x: Any, k: Any) -> Any:
    """The k smallest elements of each row in ascending order, NaN last: (M, N) -> (M, k)."""
    return np.sort(x, axis=-1)[..., :k]


__all__ = ["array_dtype", "is_number", "reduce"]
