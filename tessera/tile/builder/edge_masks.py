"""Masks in front of ops whose elements meet each other, and the error where none can be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import bool_, i32
from tessera.tile.ir.edges import NOTHING, Edge, Listed, Mixed, TileEdges, lines_of, open_
from tessera.tile.ir.handles import Handle
from tessera.tile.ir.ir import Const
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType, space_of

if TYPE_CHECKING:
    from tessera.tile.builder.edge_facts import EdgeFacts
    from tessera.tile.builder.ir_builder import IRBuilder

HINT = ("say what counts there: ts.tile.load(view, fill=0) reads that number beyond the edge, and "
        "ts.tile.where(ts.tile.inside(t), t, 0.0) puts it there as long as the edge is known")


@dataclass(frozen=True)
class Along:
    """Elements of operand `operand` along an axis meet each other.

    neutral   what those beyond the edge become
    sums      zeros beyond the edge change nothing, so that no mask is needed
    before    only elements before others matter to them: those beyond the upper edge do not
    ordered   those that exist must come first, so that the axis must not begin below 0
    always    masked even where zeros are known to lie beyond
    covered   an operand (a place) whose own edge leaves them out, where it is the same
    said      what the op is called in an error
    """

    operand: int
    axis: int
    neutral: float
    sums: bool = False
    before: bool = False
    ordered: bool = False
    always: bool = True
    covered: int | None = None
    said: str = ""


def fill_of(fill: float, dtype: Any) -> Any:
    """A neutral number in a type: the largest integer for infinity."""
    if fill != fill and dtype.kind != "float":
        fill = np.inf  # the last in ascending order, where there is no NaN
    if dtype is bool_:
        return bool(fill > 0)
    if dtype.kind in ("int", "uint") and fill in (np.inf, -np.inf):
        return dtype.max if fill > 0 else dtype.min
    return fill


def list_of(b: IRBuilder, listed: Listed) -> Handle:
    """The tile of bool that says which elements exist."""
    out = b.emit("full", [], shape=listed.shape, value=True, dtype=bool_)
    for i, edge in enumerate(listed.edges):
        if edge is not None:
            out = mask_edge(b, out, i, edge, -np.inf)
    for name, value in listed.steps:
        if name == "any":
            out = b.emit("reduce_max", [b.cast(out, i32)], axis=value)
            out = b.emit("ne", [out, Const(0, i32)])
        else:
            out = b.emit(name, [out], **{attr: value for attr in OPS[name].attrs})
    b.facts.declare(out.value, NOTHING)
    b.facts.implied[out.value] = TileEdges((listed,) * len(out.type.shape))
    return out


def mask_listed(b: IRBuilder, x: Handle, listed: Listed, fill: float) -> Handle:
    """x with the elements that do not exist replaced."""
    dtype = x.type.dtype
    return b.emit("where", [list_of(b, listed), x, Const(fill_of(fill, dtype), dtype)])


def mask_edge(b: IRBuilder, x: Handle, axis: int, edge: Edge, fill: float) -> Handle:
    """x with the elements beyond the edge along an axis replaced."""
    assert isinstance(x.type, TileType)
    low: dict[str, Any] = {"low": True} if edge.low else {}
    start, stop = b.bounds_of(edge)
    out = b.emit("edge_mask", [x, start, stop], axis=axis, fill=fill_of(fill, x.type.dtype), **low)
    assert isinstance(out, Handle)
    return out


def within(b: IRBuilder, record: Any, args: list[Any], attrs: dict[str, Any]) -> list[Any]:
    """The operands of an op with what lies beyond their edges masked where elements meet."""
    types = [b.type_of(x) for x in args]
    for a in record.combines(types, attrs):
        axis = visible_edge(b.facts, a, args, types)
        x = args[a.operand]
        if axis is None:
            continue
        if isinstance(axis, Mixed):
            refuse(b, a.said or record.name, axis)
        elif a.ordered and (isinstance(axis, Listed) or axis.low):
            why = "was reshaped" if isinstance(axis, Listed) else "may begin below 0"
            refuse(b, a.said or record.name, Mixed(why + lines_of([axis]), where=axis.where))
        elif isinstance(axis, Listed):
            args[a.operand] = mask_listed(b, x, axis, a.neutral)
        else:
            args[a.operand] = mask_edge(b, x, a.axis, axis, a.neutral)
    return args


def visible_edge(facts: EdgeFacts, a: Along, args: Sequence[Any], types: Sequence[Any]
                 ) -> Edge | Listed | Mixed | None:
    """What an op would see beyond the edge of an operand; None where that changes nothing."""
    whole = isinstance(types[a.operand], TileType)
    axis = facts.of(args[a.operand]).at(a.axis) if whole else None
    if axis is None or not open_(axis):
        return None
    if a.covered is not None and space_of(types[a.covered]) == "global":
        own = facts.of(args[a.covered]).at(a.axis)
        if isinstance(own, Edge) and isinstance(axis, Edge) and own.key == axis.key:
            return None
    if isinstance(axis, Mixed):
        return None if a.sums and axis.zero else axis
    if axis.zero and not a.always or a.before and isinstance(axis, Edge) and not axis.low:
        return None
    return axis


def refuse(b: IRBuilder, what: str, axis: Mixed) -> NoReturn:
    elsewhere = axis.where is not None and axis.where != b.position.where()
    also = (("there", axis.where),) if elsewhere else ()
    b.fail(f"{what} needs to know which elements lie beyond the edge of a tensor, and its operand "
           f"does not tell: it {axis.why}", HINT, code="E_EDGE", also=also)


__all__ = ["Along", "fill_of", "list_of", "mask_edge", "mask_listed", "refuse", "visible_edge",
           "within"]
