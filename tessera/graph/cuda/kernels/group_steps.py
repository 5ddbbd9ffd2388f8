"""What a group's schedule says of its steps, and the axes in which kernels see operands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ....numerics import as_type
from ...ir import Node, Value
from ...schedule.ir import GroupOperand, GroupStep
from ...schedule.loop_axes import Frame, extents_of, merged
from ...schedule.op_ids import id_of, line_of
from .anchors import anchor_extents
from .spell import COMBINE, template
from .strips import STRIPS_OF


def without_result(node: Node, names: tuple[Any, ...]) -> GroupStep:
    """The step of a node that gives nothing. names: its operands"""
    return GroupStep("", node.op.name, names, (), (), as_type("bool_"),
                     tuple(id_of(node).split()), line_of(node.where))


def operand_frame(space: tuple[int, ...], operands: Sequence[GroupOperand], rows: bool,
                  cuts: Collection[int] = ()) -> Frame:
    """The axes of a loop over its operands as they lie. cuts: those that it needs."""
    own = {a for o in operands if o.layout for a in o.layout.cuts(len(space))}
    return merged(space, [o.shape for o in operands], rows, own.union(cuts))


def attributes_of(node: Node) -> dict[str, Any]:
    """What the text of a step needs: its expression, the kinds of its operands, its numbers."""
    text = template(node)
    if text is not None:
        plain = {k: v for k, v in node.attrs.items() if isinstance(v, int | float)}
        return {**plain, "text": text, "kinds": tuple(v.aval.dtype.kind for v in node.inputs)}
    if node.op in STRIPS_OF:
        return {"rows": node.attrs["rows"]}
    if node.op.reduction in COMBINE:
        sums = {"accum": node.attrs["accum"]} if "accum" in node.attrs else {}
        return {**sums, "reduction": node.op.reduction,
                "kinds": (node.inputs[0].aval.dtype.kind,)}
    return {}


def head_frame(anchor: Node) -> Frame:
    return Frame(anchor_extents(anchor), ((0,), (1,), (2,)))


def in_space(v: Value, frame: Frame) -> tuple[int, ...]:
    """The extents of a result in the frame's space."""
    shape = extents_of(v)
    return shape if frame.pattern(shape) is not None else frame.space


__all__ = ["attributes_of", "head_frame", "in_space", "operand_frame", "without_result"]
