"""The identity whose derivative says how large a product's operands and its cotangent were.

A cotangent is known in the backward pass alone, and a derivative has no results but cotangents: so
those of histories of such numbers carry them. They are no slopes.
"""

from __future__ import annotations

from typing import Any

from ...errors import ShapeError
from ...tensor import Tensor
from .. import functions as F
from ..ir import Graph, Value, handed, subgraphs
from ..op import FLAT_VIEW, Aval, GraphOp, sample
from ..trace import apply
from .scaled import finite_amax


def _shape(y: Aval, x: Aval, w: Aval, *histories: Aval) -> Aval:
    for h in histories:
        if h.ndim != 1:
            raise ShapeError(f"a history of amax has one axis, got {h}")
    return y


def _residual(y: Tensor, x: Tensor, w: Tensor, *histories: Tensor) -> tuple[Tensor, Any]:
    """The largest numbers of the operands are found where these are made, not kept for later."""
    return apply(RECORD_AMAX, y, x, w, *histories), (finite_amax(x), finite_amax(w))


def _vjp(g: Tensor, y: Tensor, _: Tensor, x: Tensor, w: Tensor, *histories: Tensor, saved: Any
         ) -> tuple:
    """Each element, so that whoever has a place for it in the history takes the one there."""
    found = (*saved, finite_amax(g))
    return g, None, None, *(F.broadcast_to(amax, h.shape)
                            for amax, h in zip(found, histories, strict=True))


def _batch(size: Any, batched: tuple, *xs: Tensor) -> tuple:
    """With histories for all rows these are one product; with one for each they are many."""
    if not any(batched[3:]):
        return apply(RECORD_AMAX, *xs), batched[0]
    columns = [[F.reshape(t, t.shape[1:]) for t in F.split(x, [1] * size, axis=0)] if on
               else [x] * size for x, on in zip(xs, batched, strict=True)]
    return F.stack([apply(RECORD_AMAX, *row) for row in zip(*columns, strict=True)]), True


_LINE = ((4,), "int")
RECORD_AMAX = GraphOp(
    "record_amax",
    shape=_shape,
    ref=lambda y, x, w, *histories: y,
    vjp=_vjp,
    jvp=lambda ts, y, *xs: ts[0],
    residual=_residual,
    batch=_batch,
    expand=lambda y, x, w, *histories: y,
    axes=lambda y, *xs: ",".join(["...", *("_" * x.ndim for x in xs)]) + "->...",
    memory=FLAT_VIEW,
    samples=(sample(((2, 3), "int"), ((2, 4), "int"), ((4, 3), "int"), _LINE, _LINE, _LINE),),
    doc="y; cotangents of the histories hold the largest |x|, |w| and |cotangent of y|",
)



def histories_among(graph: Graph) -> set[int]:
    """The numbers of a graph's inputs that are histories, or views of which are: what their
    cotangents hold is not added up over calls, but the largest of it."""
    found: set[int] = set()
    _follow(graph, {v: i for i, v in enumerate(graph.inputs)}, found)
    return found


def _follow(graph: Graph, number: dict[Value, int], found: set[int]) -> None:
    for node in graph.nodes:
        if node.op is RECORD_AMAX:
            found.update(number[v] for v in node.inputs[3:] if v in number)
        if node.op.view and node.inputs[0] in number:
            number.update(dict.fromkeys(node.outputs, number[node.inputs[0]]))
        for inner in subgraphs(node):
            given = {mine: number[v] for mine, v in handed(node, inner) if v in number}
            _follow(inner, given, found)


__all__ = ["RECORD_AMAX", "histories_among"]
