"""Attention with a mask or dropout and its gradient by the library's kernels, which keep no scores
in memory.

A mask's own cotangent is one of every matrix of scores before it is summed: where it is asked for
these lie in memory. Dropout's draws are made in the kernels: they get the keys of its blocks of
queries, which the host computes where it knows the graph's.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np

from ...kernels.attention_scores import DropoutRule, MaskRule, ScoreRule
from ...kernels.modified_attention import (
    modified_attention,
    modified_attention_keys,
    modified_attention_queries,
    modified_attention_scores,
    modified_blocks,
)
from ...numerics import NumericType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..ir import Graph, Node, Value
from ..op import Aval
from ..operand import convert, to_compute
from ..ops.attention_blocks import BLOCK_ROWS
from ..ops.dropout_attention_op import DROPOUT_ATTENTION, DROPOUT_ATTENTION_VJP
from ..ops.elementwise import unbroadcast
from ..ops.masked_attention_op import MASKED_ATTENTION, MASKED_ATTENTION_VJP
from ..schedule.library_call import library_call
from ..schedule.loop_axes import extents_of
from .attention_kernels import WIDEST, rounded_values

F32 = as_type("f32")
FORWARD = (MASKED_ATTENTION, DROPOUT_ATTENTION)
BACKWARD = (MASKED_ATTENTION_VJP, DROPOUT_ATTENTION_VJP)


class _Call:
    """The operands of one call as the kernels take them, and their constants.

    operands: queries, keys and values by heads, the mask and the keys of draws, None without one
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor, ...], scale: float,
                 causal: bool, dropout: float):
        self.mask, key = _mask_and_key(rest)
        (S, D), (T, E) = tuple(q.shape[-2:]), tuple(v.shape[-2:])
        count, keys = prod(q.shape[:-2]), prod(k.shape[:-2])
        self.Q, self.K = F.reshape(q, (count, S, D)), F.reshape(k, (keys, T, D))
        self.V = F.reshape(v, (keys, T, E))
        self.rows, self.scale = (count, S), scale
        self.rows_of_block, self.step, self.gradient_step = modified_blocks(
            q.dtype, max(D, E), key is not None)
        M, mask_rule = _mask_operand(self.mask, q.shape[-3])
        W, dropout_rule = _draws_operand(key, S, T, dropout)
        self.operands = self.Q, self.K, self.V, M, W
        self.constants: dict[str, Any] = {
            "group": count // keys, "rule": ScoreRule(causal, mask_rule, dropout_rule)}


def _mask_operand(mask: Tensor | None, heads: int) -> tuple[Tensor | None, MaskRule | None]:
    """One axis for all masks in place of those of sequences and heads."""
    if mask is None:
        return None, None
    lead, (rows, columns) = tuple(mask.shape[:-2]), tuple(mask.shape[-2:])
    per_batch = lead[-1] if len(lead) > 1 and lead[0] > 1 else 0
    rule = MaskRule(mask.dtype.kind == "float", heads, per_batch, int(lead[-1] > 1), rows > 1,
                    columns > 1)
    return F.reshape(mask, (prod(lead), rows, columns)), rule


def _draws_operand(key: Tensor | None, S: int, T: int, dropout: float
                   ) -> tuple[Tensor | None, DropoutRule | None]:
    """The keys of the blocks of queries: one of all queries has the graph's own."""
    if key is None:
        return None, None
    blocks = range(0, S, BLOCK_ROWS) if S > BLOCK_ROWS else ()
    keys = [F.fold_in(key, start) for start in blocks] or [key]
    rule = DropoutRule(BLOCK_ROWS if blocks else S, S % 4 == 0 and T % 4 == 0,
                       smallest_kept(dropout), 1 / (1 - dropout))
    return F.stack(keys), rule


def smallest_kept(dropout: float) -> int:
    """The smallest word of a draw that keeps a weight: its upper 24 bits are a fraction that is
    compared with the f32 of a probability."""
    return math.ceil(float(np.float32(dropout)) * 2**24) << 8


def _mask_and_key(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Of what follows the values: a mask, a key, or both."""
    key = rest[-1] if rest[-1].ndim == 1 else None
    return (None if len(rest) == 1 and key is not None else rest[0]), key


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, scale: float, causal: bool,
             types: tuple[NumericType, ...], dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    c = _Call(q, k, v, rest, scale, causal, dropout)
    out, lse = F.zeros((*c.rows, v.shape[-1]), types[0]), F.zeros(c.rows)
    modified_attention(*c.operands, out, lse, c.scale, BM=c.rows_of_block, BN=c.step, **c.constants)
    return F.reshape(out, (*q.shape[:-1], v.shape[-1])), F.reshape(lse, q.shape[:-1])


def _gradient(g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor,
              scale: float, causal: bool, types: tuple[NumericType, ...], wanted: bool,
              dropout: float = 0.0) -> tuple[Tensor, ...]:
    """Two kernels, and one more where the mask's cotangent is wanted. The result's own row sums are
    taken of it as it is stored."""
    c = _Call(q, k, v, rest, scale, causal, dropout)
    delta = F.sum(to_compute(g) * to_compute(convert(y, q.type)), axis=-1)
    G = g if g.dtype is q.dtype else convert(g, q.type)
    common = (*c.operands, F.reshape(G, (*c.rows, v.shape[-1])), F.reshape(lse, c.rows),
              F.reshape(delta, c.rows))
    dQ, dK, dV = (F.zeros(x.shape, t) for x, t in zip((c.Q, c.K, c.V), types, strict=False))
    n, step = c.rows_of_block, c.gradient_step
    modified_attention_keys(*common, dK, dV, c.scale, BM=step, BN=n, **c.constants)
    modified_attention_queries(*common, dQ, c.scale, BM=n, BN=step, **c.constants)
    made = F.reshape(dQ, q.shape), F.reshape(dK, k.shape), F.reshape(dV, v.shape)
    if c.mask is None or c.mask.dtype.kind == "bool":
        return made
    if not wanted:
        return *made, F.zeros(c.mask.shape, types[3])
    dM = F.zeros((*c.rows, k.shape[-2]))
    modified_attention_scores(*common, dM, c.scale, BM=n, BN=n, **c.constants)
    whole = F.reshape(dM, (*q.shape[:-1], k.shape[-2]))
    return *made, convert(unbroadcast(whole, tuple(c.mask.shape)), types[3])


MODIFIED = library_call("modified_attention", multi=True, expand=_forward)
MODIFIED_GRADIENT = library_call("modified_attention_gradient", multi=True, expand=_gradient)


def use_modified_kernels(graph: Graph) -> Graph:
    """The graph with the attention with a mask or dropout that the kernels take as their calls."""
    ops = (*FORWARD, *BACKWARD)
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
        q, _, v, *_ = operands = _operands(node)
        attrs = {name: x for name, x in node.attrs.items() if name != "accum"}
        key = (*operands, repr(attrs))
        if node.op in FORWARD or key not in saved:
            made = Value(Aval((*q.aval.shape[:-1], v.aval.shape[-1]), F32))
            if node.op in FORWARD:
                made = rounded.get(node.outputs[0], node.outputs[0])
            saved[key] = made, Value(Aval(q.aval.shape[:-1], F32))
            nodes.append(Node(MODIFIED, operands, attrs | {"types": (made.aval.type,)},
                              saved[key], node.where))
        if node.op in BACKWARD:
            outputs = tuple(rounded.get(v, v) for v in node.outputs)
            attrs |= {"types": tuple(v.aval.type for v in outputs),
                      "wanted": len(outputs) == 4 and node.outputs[3] in read}
            nodes.append(Node(MODIFIED_GRADIENT, (node.inputs[0], *saved[key], *operands), attrs,
                              outputs, node.where))
    return Graph(graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def _operands(node: Node) -> tuple[Value, ...]:
    """Queries, keys and values, the mask and the key of dropout if there are."""
    return node.inputs[1:] if node.op in BACKWARD else node.inputs


def _is_taken(node: Node) -> bool:
    operands = _operands(node)
    q, _, v, *rest = (x.aval for x in operands)
    shapes = [x.aval.shape for x in operands]
    if smallest_kept(node.attrs.get("dropout", 0.0)) >= 2**32:
        return False
    if not all(isinstance(n, int) and n for s in shapes for n in s) or q.ndim < 3:
        return False
    width = max(extents_of(operands[0])[-1], extents_of(operands[2])[-1])
    return q.dtype.bits <= 32 and node.attrs["accum"].name == "f32" and width <= WIDEST and (
        rest[0].ndim == 1 or rest[0].dtype.name in ("bool", "bool_", "f32"))


__all__ = ["use_modified_kernels"]
