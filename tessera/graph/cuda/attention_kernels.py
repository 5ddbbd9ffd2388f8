"""Attention and its gradient by the library's kernels, which keep no scores in memory.

Where a graph has both, the result's kernel saves what that of the gradient makes weights from.
Operands that the kernels do not take are left to the composition.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ...kernels.attention_backward import (
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
)
from ...numerics import NumericType, as_type
from ...runtime.generations import GENERATIONS, Generation
from ...tensor import Tensor
from .. import functions as F
from ..flops import Shapes
from ..ir import Graph, Node, Value
from ..op import Aval
from ..operand import convert, to_compute
from ..ops.attention_op import ATTENTION, ATTENTION_VJP
from ..schedule.library_call import library_call
from .move_passes import narrows

F32 = as_type("f32")
WIDEST = 256  # of a head that the kernels take


def _gradient(g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float,
              causal: bool, chip: str, types: tuple[NumericType, ...]
              ) -> tuple[Tensor, Tensor, Tensor]:
    """Two kernels. The result's own row sums are taken of it as it is stored. types: those in which
    the cotangents of q, k and v are written."""
    (S, D), (T, E) = tuple(q.shape[-2:]), tuple(v.shape[-2:])
    heads, keys = prod(q.shape[:-2]), prod(k.shape[:-2])
    delta = F.sum(to_compute(g) * to_compute(convert(y, q.type)), axis=-1)
    G = g if g.dtype is q.dtype else convert(g, q.type)
    Q, G = F.reshape(q, (heads, S, D)), F.reshape(G, (heads, S, E))
    K, V = F.reshape(k, (keys, T, D)), F.reshape(v, (keys, T, E))
    sums = F.reshape(lse, (heads, S)), F.reshape(delta, (heads, S))
    dQ, dK, dV = (F.zeros(x.shape, t) for x, t in zip((Q, K, V), types, strict=True))
    common: dict[str, Any] = {"group": heads // keys, "causal": causal}
    held = q.dtype, max(D, E), GENERATIONS[chip]
    attention_keys(Q, K, V, G, *sums, dK, dV, scale, **keys_block(*held), **common)
    attention_queries(Q, K, V, G, *sums, dQ, scale, **queries_block(*held), **common)
    return F.reshape(dQ, q.shape), F.reshape(dK, k.shape), F.reshape(dV, v.shape)


def _flops(ins: Shapes, outs: Shapes, *, causal: bool, **attrs: Any) -> float:
    """Two matmuls of each query with the keys that it sees: of a causal one, those up to its own.
    """
    (*heads, S, D), (T, E) = ins[0], ins[2][-2:]
    seen = S * (T - (S - 1) / 2) if causal else S * T
    return 2.0 * prod(heads) * seen * (D + E)


# A NaN of a query is in its scores, one of a key in those of the queries that see it, as the last.
FLASH = library_call("flash_attention", flops=_flops, matmul=True, shows=(0, 1, 2))
FLASH_SAVED = library_call("flash_attention_saved", multi=True,  # and log2 of the sums of exp2
                           flops=_flops, matmul=True, shows=(0, 1, 2))
FLASH_GRADIENT = library_call("flash_attention_gradient", multi=True, expand=_gradient)


def use_attention_kernels(graph: Graph, chip: Generation) -> Graph:
    """The graph with the attention that the kernels take as their calls, in blocks that suit the
    chip."""
    wanted = {_key(n) for n in graph.nodes if n.op is ATTENTION_VJP and _is_taken(n)}
    saved: dict[Any, tuple[Value, Value]] = {}
    nodes: list[Node] = []
    rounded = rounded_values(graph, lambda n: n.op is ATTENTION_VJP and _is_taken(n))
    for node in graph.nodes:
        if node.op.name == "cast" and node.inputs[0] in rounded:
            made = rounded[node.inputs[0]]
            attrs = {"source": made.aval.type, "to": node.attrs["to"]}
            node = Node(node.op, (made,), attrs, node.outputs, node.where)
        if node.op not in (ATTENTION, ATTENTION_VJP) or not _is_taken(node):
            nodes.append(node)
            continue
        key = _key(node)
        if node.op is ATTENTION and key not in wanted:
            nodes.append(_call(FLASH, node, node.outputs))
            continue
        if node.op is ATTENTION or key not in saved:
            q, v = node.inputs[-3], node.inputs[-1]
            y = node.outputs[0] if node.op is ATTENTION else Value(
                Aval((*q.aval.shape[:-1], v.aval.shape[-1]), F32))
            saved[key] = y, Value(Aval(q.aval.shape[:-1], F32))
            nodes.append(_call(FLASH_SAVED, node, saved[key]))
        if node.op is ATTENTION_VJP:
            outputs = tuple(rounded.get(v, v) for v in node.outputs)
            attrs = {"scale": node.attrs["scale"], "causal": node.attrs["causal"],
                     "chip": chip.target, "types": tuple(v.aval.type for v in outputs)}
            nodes.append(Node(FLASH_GRADIENT, (node.inputs[0], *saved[key], *node.inputs[1:]),
                              attrs, outputs, node.where))
    return Graph(graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def rounded_values(graph: Graph, by: Callable[[Node], bool]) -> dict[Value, Value]:
    """What these nodes make that is only read rounded, as the values that kernels write: they
    round."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    found = {}
    for v in (v for n in graph.nodes if by(n) for v in n.outputs):
        reads = readers.get(v, [])
        types = {n.attrs["to"] for n in reads if n.op.name == "cast" and narrows(n)}
        if len(types) == 1 and len(reads) == sum(n.op.name == "cast" for n in reads) and (
                v not in graph.outputs):
            found[v] = Value(Aval(v.aval.shape, types.pop()))
    return found


def _call(op: Any, node: Node, outputs: tuple[Value, ...]) -> Node:
    q, k, v = node.inputs[-3:]
    heads, keys = q.aval.shape[-3], k.aval.shape[-3]
    attrs = {"scale": node.attrs["scale"], "causal": node.attrs["causal"],
             "group": heads // keys, "shape": tuple(outputs[0].aval.shape)}
    return Node(op, (q, k, v), attrs, outputs, node.where)


def _key(node: Node) -> Any:
    """What the result and the gradient of one attention have in common."""
    return (*node.inputs[-3:], repr(node.attrs["scale"]), node.attrs["causal"])


def _is_taken(node: Node) -> bool:
    q, k, v = (x.aval for x in node.inputs[-3:])
    extents = (*q.shape, *k.shape, *v.shape)
    if not all(isinstance(n, int) and n for n in extents) or q.ndim < 3:
        return False
    if node.attrs["causal"] and q.shape[-2] > k.shape[-2]:
        return False  # the first queries see no key: 0, where a kernel divides by the sum of none
    width: Any = max(q.shape[-1], v.shape[-1])
    return q.dtype.bits <= 32 and node.attrs["accum"].name == "f32" and width <= WIDEST


__all__ = ["FLASH", "FLASH_GRADIENT", "FLASH_SAVED", "WIDEST", "rounded_values",
           "use_attention_kernels"]
