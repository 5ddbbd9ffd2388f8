"""Masked attention and its gradient by the library's kernels, which keep no scores in memory.

A mask's own cotangent is one of every matrix of scores before it is summed: where it is asked for
these lie in memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...kernels.masked_attention import (
    masked_attention,
    masked_attention_keys,
    masked_attention_queries,
    masked_attention_scores,
)
from ...numerics import NumericType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..ir import Graph, Node, Value
from ..op import Aval
from ..operand import convert, to_compute
from ..ops.elementwise import unbroadcast
from ..ops.masked_attention_op import MASKED_ATTENTION, MASKED_ATTENTION_VJP
from ..schedule.library_call import library_call
from ..schedule.loop_axes import extents_of
from .attention_kernels import WIDEST, rounded_values

F32 = as_type("f32")


class _Call:
    """The operands of one call as the kernels take them, and their constants."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, causal: bool):
        (S, D), (T, E) = tuple(q.shape[-2:]), tuple(v.shape[-2:])
        count, keys, lead = prod(q.shape[:-2]), prod(k.shape[:-2]), tuple(mask.shape[:-2])
        self.Q, self.K = F.reshape(q, (count, S, D)), F.reshape(k, (keys, T, D))
        self.V = F.reshape(v, (keys, T, E))
        self.M = F.reshape(mask, (prod(lead), *mask.shape[-2:]))
        self.rows = (count, S)
        heads = q.shape[-3]
        per_head = int(lead[-1] > 1)
        per_batch = lead[-1] if len(lead) > 1 and lead[0] > 1 else 0
        wide = q.dtype.bits > 16
        n = 32 if wide or max(D, E) > 128 else 64
        self.constants: dict[str, Any] = {
            "heads": heads, "group": count // keys, "causal": causal, "BM": n, "BN": n,
            "floats": mask.dtype.kind == "float", "per_batch": per_batch, "per_head": per_head,
            "rows": mask.shape[-2] > 1, "columns": mask.shape[-1] > 1}
        self.scale = scale


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, causal: bool,
             types: tuple[NumericType, ...]) -> tuple[Tensor, Tensor]:
    c = _Call(q, k, v, mask, scale, causal)
    out, lse = F.zeros((*c.rows, v.shape[-1]), types[0]), F.zeros(c.rows)
    masked_attention(c.Q, c.K, c.V, c.M, out, lse, c.scale, **c.constants)
    return F.reshape(out, (*q.shape[:-1], v.shape[-1])), F.reshape(lse, q.shape[:-1])


def _gradient(g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *,
              scale: float, causal: bool, types: tuple[NumericType, ...],
              wanted: bool) -> tuple[Tensor, ...]:
    """Two kernels, and one more where the mask's cotangent is wanted. The result's own row sums are
    taken of it as it is stored."""
    c = _Call(q, k, v, mask, scale, causal)
    delta = F.sum(to_compute(g) * to_compute(convert(y, q.type)), axis=-1)
    G = g if g.dtype is q.dtype else convert(g, q.type)
    common = (c.Q, c.K, c.V, c.M, F.reshape(G, (*c.rows, v.shape[-1])), F.reshape(lse, c.rows),
              F.reshape(delta, c.rows))
    dQ, dK, dV = (F.zeros(x.shape, t) for x, t in zip((c.Q, c.K, c.V), types, strict=False))
    masked_attention_keys(*common, dK, dV, c.scale, **c.constants)
    masked_attention_queries(*common, dQ, c.scale, **c.constants)
    made = F.reshape(dQ, q.shape), F.reshape(dK, k.shape), F.reshape(dV, v.shape)
    if mask.dtype.kind == "bool":
        return made
    if not wanted:
        return *made, F.zeros(mask.shape, types[3])
    dM = F.zeros((*c.rows, k.shape[-2]))
    masked_attention_scores(*common, dM, c.scale, **c.constants)
    whole = F.reshape(dM, (*q.shape[:-1], k.shape[-2]))
    return *made, convert(unbroadcast(whole, tuple(mask.shape)), types[3])


MASKED_FLASH = library_call("masked_flash_attention", multi=True, expand=_forward)
MASKED_GRADIENT = library_call("masked_flash_attention_gradient", multi=True, expand=_gradient)


def use_masked_kernels(graph: Graph) -> Graph:
    """The graph with the masked attention that the kernels take as their calls."""
    ops = (MASKED_ATTENTION, MASKED_ATTENTION_VJP)
    rounded = rounded_values(graph, lambda n: n.op in ops and _is_taken(n))
    read = {v for n in graph.nodes for v in n.inputs} | set(graph.outputs)
    saved: dict[Any, tuple[Value, Value]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op.name == "cast" and node.inputs[0] in rounded:
            made = rounded[node.inputs[0]]
            attrs = {"source": made.aval.type, "to": node.attrs["to"]}
            node = Node(node.op, (made,), attrs, node.outputs, node.where)
        if node.op not in ops or not _is_taken(node):
            nodes.append(node)
            continue
        q, _, v, _ = operands = node.inputs[-4:]
        key = (*operands, repr(node.attrs["scale"]), node.attrs["causal"])
        attrs = {"scale": node.attrs["scale"], "causal": node.attrs["causal"]}
        if node.op is MASKED_ATTENTION or key not in saved:
            made = Value(Aval((*q.aval.shape[:-1], v.aval.shape[-1]), F32))
            if node.op is MASKED_ATTENTION:
                made = rounded.get(node.outputs[0], node.outputs[0])
            saved[key] = made, Value(Aval(q.aval.shape[:-1], F32))
            nodes.append(Node(MASKED_FLASH, operands, attrs | {"types": (made.aval.type,)},
                              saved[key], node.where))
        if node.op is MASKED_ATTENTION_VJP:
            outputs = tuple(rounded.get(v, v) for v in node.outputs)
            attrs |= {"types": tuple(v.aval.type for v in outputs),
                      "wanted": len(outputs) == 4 and node.outputs[3] in read}
            nodes.append(Node(MASKED_GRADIENT, (node.inputs[0], *saved[key], *operands), attrs,
                              outputs, node.where))
    return Graph(graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def _is_taken(node: Node) -> bool:
    q, _, v, mask = (x.aval for x in node.inputs[-4:])
    shapes = [x.aval.shape for x in node.inputs[-4:]]
    if not all(isinstance(n, int) and n for s in shapes for n in s) or q.ndim < 3:
        return False
    width = max(extents_of(node.inputs[-4])[-1], extents_of(node.inputs[-2])[-1])
    return q.dtype.bits <= 32 and node.attrs["accum"].name == "f32" and width <= WIDEST and (
        mask.dtype.name in ("bool", "bool_", "f32"))


__all__ = ["use_masked_kernels"]
