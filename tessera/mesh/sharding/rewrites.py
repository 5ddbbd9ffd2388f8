"""Ops that are written in others when what they reduce is split, so that no operand is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.graph import functions as F
from tessera.graph.expand import rule_graph
from tessera.graph.ir import Graph, Node
from tessera.graph.op import OPS
from tessera.graph.ops.attention_op import (
    ATTENTION,
    ATTENTION_LSE,
    ATTENTION_LSE_VJP,
    ATTENTION_VJP,
)
from tessera.graph.simplify import simplify
from tessera.graph.trace import apply, at_line, trace
from tessera.tensor import Tensor

from ..layout import Layout


def rewritten(node: Node, given: Sequence[Layout]) -> Graph | None:
    """The graph in place of a node whose operands lie so, None for one that stays."""
    ndim = max((at.ndim for at in given), default=0)  # numbers of queries have an axis less
    if is_whole(node) and any(at.axes_of(d) for at in given for d in range(ndim - 2, at.ndim)):
        return simplify(rule_graph(node))
    rule = RULES.get(node.op.name)
    if rule is None or not any(given[0].axes_of(d) for d in node.attrs["axis"]):
        return None

    def body(*xs: Tensor) -> list[Tensor]:
        with at_line(node.where):
            return [rule(*xs, **node.attrs)]

    return simplify(trace(body, [v.aval for v in node.inputs], node.op.name))


def is_whole(node: Node) -> bool:
    """Whether it is attention that parts of sequences and heads can have alone: the cotangent of a
    mask of floats is a sum over them."""
    return node.op in (ATTENTION, ATTENTION_LSE, ATTENTION_VJP, ATTENTION_LSE_VJP) and (
        len(node.outputs) < 4)


def _arg(extremum: str) -> Callable[..., Tensor]:
    """The first index at which the extremum, or NaN, is: two small reductions."""
    def rule(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
        best = apply(OPS[extremum], x, axis=axis, keepdims=True)
        hit = F.equal(x, best)
        if x.dtype.kind == "float":
            hit = F.logical_or(hit, F.isnan(x))
        shape: list[Any] = [1] * x.ndim
        shape[axis[0]] = x.shape[axis[0]]
        places = F.reshape(F.arange(x.shape[axis[0]]), tuple(shape))
        found = F.where(hit, places, x.shape[axis[0]])
        return apply(OPS["reduce_min"], found, axis=axis, keepdims=keepdims)

    return rule


def _count(all_of_them: bool) -> Callable[..., Tensor]:
    """Whether any are true, or all, by their number: sums of parts are added, where bools would be
    gathered."""
    def rule(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
        counted = F.logical_not(x) if all_of_them else x
        found = F.sum(F.cast(counted, "int64"), axis=axis, keepdims=keepdims)
        return F.equal(found, 0) if all_of_them else F.not_equal(found, 0)

    return rule


RULES: dict[str, Callable[..., Tensor]] = {
    "argmax": _arg("reduce_max"), "argmin": _arg("reduce_min"),
    "reduce_any": _count(False), "reduce_all": _count(True)}
