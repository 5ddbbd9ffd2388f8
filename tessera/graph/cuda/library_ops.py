"""Ops that library kernels do as a whole: they replace what they stand for in a lowered graph.

A product takes in the transpositions of its operands; attention is recognised before its softmax is
opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import SourceLine
from ..ir import Graph, Node, Value
from ..schedule.library_call import LibraryCall, library_call
from ..schedule.loop_axes import extents_of
from ..schedule.op_ids import OpLine, id_of

PRODUCT, ATTENTION = library_call("product"), library_call("flash_attention")
NARROW = frozenset({"bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8"})  # widened exactly by a product


class Makers:
    """Who makes each value of a graph."""

    def __init__(self, graph: Graph):
        self.maker: dict[Value, Node] = {v: n for n in graph.nodes for v in n.outputs}

    def made_by(self, v: Value, *names: str) -> Node | None:
        node = self.maker.get(v)
        return node if node is not None and node.op.name in names else None

Matcher = Callable[[Makers, Node], Node | None]


def replace_calls(graph: Graph, match: Matcher) -> Graph:
    """The graph with each node for which `match` gives a call replaced by it."""
    users = Makers(graph)
    nodes = [match(users, node) or node for node in graph.nodes]
    return Graph(graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def joined(where: SourceLine | None, parts: list[Node]) -> SourceLine | None:
    """The line of a call, with the ids of all that it stands for."""
    if not isinstance(where, OpLine):
        return where
    ids = dict.fromkeys(i for n in parts for i in id_of(n).split() if i)
    return replace(where, id=" ".join(ids))


# --- products ---------------------------------------------------------------------------------
def match_product(users: Makers, node: Node) -> Node | None:
    """matmul of operands as they lie in memory: transposed matrices included."""
    if node.op.name != "matmul":
        return None
    sides = [_operand(users, v) for v in node.inputs]
    attrs = {"layout": "".join("t" if s.transposed else "n" for s in sides), **node.attrs}
    parts = [*sides[0].parts, *sides[1].parts, node]
    return Node(PRODUCT, tuple(s.value for s in sides), attrs, node.outputs,
                joined(node.where, parts))


@dataclass(frozen=True)
class _Side:
    value: Value
    transposed: bool
    parts: list[Node]


def _operand(users: Makers, v: Value) -> _Side:
    transposed, parts = False, list[Node]()
    while (turn := users.made_by(v, "transpose")) and _swaps_last(turn.attrs["axes"]):
        parts.append(turn)
        v, transposed = turn.inputs[0], not transposed
    return _Side(v, transposed, parts)


def _widens(cast: Node) -> bool:
    source, to = cast.attrs["source"].dtype, cast.attrs["to"].dtype
    return source.name in NARROW and to.name == ("int32" if source.kind == "int" else "f32")


def _swaps_last(axes: tuple[int, ...]) -> bool:
    n = len(axes)
    return n >= 2 and axes == (*range(n - 2), n - 1, n - 2)


# --- attention --------------------------------------------------------------------------------
def match_attention(users: Makers, node: Node) -> Node | None:
    """softmax(scale q k', causal or not) v as ts.attention writes it; None for all else.

    Blocks of queries that are concatenated are one call.
    """
    if node.op.name == "concatenate":
        return _joined_blocks(users, node)
    found = _block(users, node)
    return _call(users, node, [found]) if found is not None and _consecutive([found]) else None


@dataclass(frozen=True)
class _Block:
    """One block of queries. first: their first row in `queries`; last: the key that it sees."""

    queries: Value
    keys_of: Value
    values_of: Value
    scale: float
    causal: bool
    last: int
    first: int
    rows: int
    seen: int
    keys: int
    group: int
    parts: list[Node]


def _block(users: Makers, node: Node) -> _Block | None:
    """The parts of one product of weights and values, from its end to its beginning."""
    parts: list[Node] = [node]
    if node.op.name != "matmul":
        return None
    p, v = node.inputs
    p = _through(users, p, parts, "reshape")
    soft = users.made_by(p, "softmax")
    if soft is None or soft.attrs["axis"] != soft.inputs[0].aval.ndim - 1:
        return None
    parts.append(soft)
    s, causal, last = _unmasked(users, soft.inputs[0], parts)
    if causal != soft.attrs["safe"]:  # another mask
        return None
    scaled = users.made_by(s, "mul")
    scale = 1.0 if scaled is None else _number(users, scaled.inputs[1])
    if scaled is not None:
        if scale is None:
            return None
        parts.append(scaled)
        s = scaled.inputs[0]
    s = _through(users, s, parts, "reshape")
    scores = users.made_by(s, "matmul")
    if scores is None:
        return None
    parts.append(scores)
    return _operands(users, scores, v, (scale, causal, last), soft, parts)


def _operands(users: Makers, scores: Node, v: Value, rule: Any, soft: Node,
              parts: list[Node]) -> _Block | None:
    """Queries, keys and values as they lie: before slices of blocks, casts and grouping."""
    q = _through(users, scores.inputs[0], parts, "reshape")
    turned = users.made_by(scores.inputs[1], "transpose")
    if turned is None or not _swaps_last(turned.attrs["axes"]):
        return None
    parts.append(turned)
    q, first = _split_part(users, q, parts)
    k, v = _sliced(users, turned.inputs[0], parts), _sliced(users, v, parts)
    seen = scores.outputs[0].aval.shape[-1]
    rows = soft.outputs[0].aval.shape[-2]
    q, k, v = (_through(users, x, parts, "cast") for x in (q, k, v))
    kinds = {x.aval.dtype.name for x in (q, k, v)}
    if len(kinds) != 1 or kinds & {"f64"} or not _heads(q, k, v):
        return None
    group = q.aval.shape[-3] // k.aval.shape[-3]
    return _Block(q, k, v, *rule, first, rows, seen, k.aval.shape[-2], group, parts)  # type: ignore


def _heads(q: Value, k: Value, v: Value) -> bool:
    a, b, c = extents_of(q), extents_of(k), extents_of(v)
    return len(a) == len(b) == len(c) and len(a) in (3, 4) and b[:-1] == c[:-1] and (
        a[:-3] == b[:-3]) and a[-3] % b[-3] == 0


def _unmasked(users: Makers, s: Value, parts: list[Node]) -> tuple[Value, bool, int]:
    """Scores before the causal mask, whether there is one, and the last key of the first row."""
    chosen = users.made_by(s, "where")
    if chosen is None or _number(users, chosen.inputs[2]) != -math.inf:
        return s, False, 0
    seen = users.made_by(chosen.inputs[0], "less_equal")
    if seen is None:
        return s, False, 0
    columns, rows = users.made_by(seen.inputs[0], "iota"), users.made_by(seen.inputs[1], "reshape")
    added = None if rows is None else users.made_by(rows.inputs[0], "add", "iota")
    if columns is None or added is None or rows is None:
        return s, False, 0
    mask = [chosen, seen, columns, rows, added]
    last = 0
    if added.op.name == "add":
        counted, number = users.made_by(added.inputs[0], "iota"), _number(users, added.inputs[1])
        if counted is None or number is None:
            return s, False, 0
        mask.append(counted)
        last = int(number)
    parts += mask
    return chosen.inputs[1], True, last


def _number(users: Makers, v: Value) -> float | None:
    node = users.made_by(v, "constant")
    return None if node is None else float(node.attrs["value"])


def _through(users: Makers, v: Value, parts: list[Node], name: str) -> Value:
    while node := users.made_by(v, name):
        if name == "cast" and not _widens(node):
            return v
        parts.append(node)
        v = node.inputs[0]
    return v


def _split_part(users: Makers, q: Value, parts: list[Node]) -> tuple[Value, int]:
    """The queries that a block is a part of, and its first row."""
    split = users.made_by(q, "split")
    if split is None or split.attrs["axis"] != q.aval.ndim - 2:
        return q, 0
    parts.append(split)
    return split.inputs[0], sum(split.attrs["sizes"][:split.outputs.index(q)])


def _sliced(users: Makers, x: Value, parts: list[Node]) -> Value:
    """The keys that a causal block sees the first of."""
    cut = users.made_by(x, "slice")
    whole = cut is not None and not any(cut.attrs["starts"]) and set(cut.attrs["steps"]) == {1}
    inner = cut.inputs[0].aval.shape if cut is not None else ()
    if not whole or cut is None or x.aval.shape[:-2] != inner[:-2] or (
            x.aval.shape[-1] != inner[-1]):
        return x
    parts.append(cut)
    return cut.inputs[0]


def _joined_blocks(users: Makers, node: Node) -> Node | None:
    if node.attrs["axis"] != node.outputs[0].aval.ndim - 2:
        return None
    blocks, heads = [], []
    for v in node.inputs:
        product = users.made_by(v, "matmul")
        if product is None and (shaped := users.made_by(v, "reshape")):
            heads.append(shaped)
            product = users.made_by(shaped.inputs[0], "matmul")
        if product is None or (found := _block(users, product)) is None:
            return None
        blocks.append(found)
    same = {(b.queries, b.keys_of, b.values_of, b.scale, b.causal) for b in blocks}
    if len(same) > 1 or not _consecutive(blocks):
        return None
    return _call(users, node, blocks, heads)


def _consecutive(blocks: list[_Block]) -> bool:
    """Whether the blocks are all rows in order, each seeing the keys that the whole would see."""
    S, T, at = sum(b.rows for b in blocks), blocks[0].keys, 0
    for b in blocks:
        sees = min(T, at + b.rows + T - S) if b.causal else T
        if b.first != at or b.seen != sees or (b.causal and b.last != at + T - S):
            return False
        at += b.rows
    return at == blocks[0].queries.aval.shape[-2]


def _call(users: Makers, node: Node, blocks: list[_Block], more: list[Node] | None = None) -> Node:
    b = blocks[0]
    parts = [n for one in blocks for n in one.parts] + (more or []) + [node]
    parts = sorted(set(parts), key=lambda n: int(id_of(n).split()[-1].lstrip("%!") or 0))
    out = node.outputs[0]
    attrs = {"scale": b.scale, "causal": b.causal, "group": b.group,
             "shape": tuple(out.aval.shape)}
    return Node(ATTENTION, (b.queries, b.keys_of, b.values_of), attrs,
                node.outputs, joined(node.where, parts))


__all__ = ["ATTENTION", "PRODUCT", "LibraryCall", "Makers", "joined", "match_attention",
           "match_product",
           "replace_calls"]
