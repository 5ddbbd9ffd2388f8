"""Which nodes run in a loop over the elements of a space, and how their expression reads.

A loop computes the same ops on every target: those whose record has a loop template, casts, random
bits, and reductions of rows and columns, of the types that registers have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...numerics import DType
from ...numerics.policy import clamps
from ..ir import Node
from .loop_dtypes import is_narrow

# Integers that a loop computes with; it loads narrower ones only to convert them.
INTEGERS = ("int64", "int32", "uint32", "bool_")
LOADED = ("int16", "int8", "uint16", "uint8")
REDUCTIONS = ("sum", "max", "min")  # that a loop computes along with the rest


def loop_reduction(node: Node) -> str:
    """The kind of loop op that a node is, "reduce_sum" for one; "" when it is none."""
    return f"reduce_{node.op.reduction}" if node.op.reduction in REDUCTIONS else ""


def is_last_axis_reduction(node: Node) -> bool:
    if not loop_reduction(node):
        return False
    x = node.inputs[0].aval
    return node.attrs["axis"] == (x.ndim - 1,) and node.attrs["keepdims"]


def column_sum_axes(node: Node) -> tuple[int, ...] | None:
    """The axes of a sum over all axes but the last, or of what is made of strips of `rows` rows
    over these; None for any other node."""
    strips = node.attrs.keys() >= {"axis", "rows"}
    if node.op.reduction != "sum" and not strips:
        return None
    x = node.inputs[0].aval
    axis = node.attrs["axis"]
    whole = x.ndim > 1 and axis == tuple(range(x.ndim - 1))
    return axis if whole and x.shape[-1] != 1 else None


@cache
def is_computed(dtype: DType) -> bool:
    """Whether a loop computes with elements of a dtype, narrow floats in f32."""
    return dtype.name in ("f64", "f32", *INTEGERS) or is_narrow(dtype)


def can_lower(node: Node) -> bool:
    """Whether a node can run inside a compiled loop."""
    if not node.outputs:
        return False
    out = node.outputs[0].aval
    if node.op.name == "cast":
        return cast_kind(node.attrs["source"], node.attrs["to"]) is not None
    if any(is_narrow(d) or not is_computed(d)
           for d in (*(v.aval.dtype for v in node.inputs), out.dtype)):
        return False
    if loop_reduction(node):
        if node.inputs[0].aval.dtype.kind == "bool":
            return False
        fine = node.attrs.get("accum", out.dtype) is out.dtype
        if column_sum_axes(node) is not None:
            return fine and out.dtype.kind == "float"
        return fine and is_last_axis_reduction(node)
    if node.op.makes == "bits":
        return True
    return node.op.loop is not None and _kind_of(node) in node.op.loop_kinds


def loop_space(node: Node) -> tuple[int, ...] | None:
    """The iteration space in which a node could run as a loop, None when it cannot."""
    if not can_lower(node):
        return None
    v = node.inputs[0] if node.op.reduction else node.outputs[0]
    shape = tuple(d for d in v.aval.shape if isinstance(d, int))
    return shape if len(shape) == v.aval.ndim and 0 not in shape else None


def _kind_of(node: Node) -> str:
    return (node.inputs[-1] if node.inputs else node.outputs[0]).aval.dtype.kind


def cast_kind(source: Any, to: Any) -> str | None:
    """How a loop converts: 'alias', 'map', 'round', or None when the codec does it."""
    a, b = source.dtype, to.dtype
    if not is_computed(a) and a.name not in LOADED or not is_computed(b):
        return None
    if to.policy.rounding != "nearest_even":
        return None
    if a is b:
        return "round" if clamps(source, to) else "alias"
    if is_narrow(b):
        return "round" if a.name == "f32" or is_narrow(a) else None
    if b.kind == "bool":
        return "map"
    if b.kind == "float":
        return "alias" if is_narrow(a) and b.name == "f32" else "map"
    if a.kind == "float":
        return None
    return "map" if a.kind in ("int", "uint", "bool") else None


def filled(node: Node) -> str:
    """The op's loop template with its attributes filled in; {0}, {1} remain."""
    text = node.op.loop or ""
    for key, value in node.attrs.items():
        text = text.replace("{" + key + "}", repr(value))
    return text


__all__ = ["can_lower", "cast_kind", "column_sum_axes", "filled",
           "is_last_axis_reduction", "loop_reduction", "loop_space"]
