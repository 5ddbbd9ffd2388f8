"""Attention that a graph spells in plain ops becomes the op `attention`, and its gradient too.

The result is found by what it computes (weighted_keys.py). Its gradient is not looked for at all:
the derivative of the ops that were found is traced again, and where the graph has just these
values, which common subexpressions show, they are the cotangents, and the derivative of `attention`
takes their place. So whatever reverse mode makes of a spelling is what is recognised. If then a
matrix of weights is still read, nothing is changed.

What a program rounds on the way, scores or weights, is rounded no more than attention does. A query
that sees no key gives NaN, as its softmax does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .... import hooks
from ....lazy_dataclass import dataclass
from ....numerics import as_type
from ....tensor import Tensor
from ... import functions as F
from ...ir import Graph, Node, Value, producers_of, readers_of
from ...op import Aval
from ...operand import convert
from ...ops.attention import key_spans
from ...ops.attention_op import ATTENTION, DROPOUT_ATTENTION
from ...schedule.loop_axes import extents_of
from ...schedule.op_ids import OpLine, id_of
from ...simplify import merge_common, remove_dead
from ...trace import apply, at_line, trace
from .attention_kernels import WIDEST
from .attention_masks import takes_matrix
from .weighted_keys import (
    Heads,
    Mask,
    Matrices,
    NotFusible,
    Reader,
    WeightedKeys,
    ends_first,
    is_known,
    matrices_met,
    reach_of,
)

F32 = as_type("f32")
ANCHORS = ("softmax", "exp")  # one of them is in every such graph
# Bytes of scores up to which those ways that are slower without them keep them (16 heads of four
# sequences, result and cotangents, NVIDIA H200, 2026-11-27, in turn): of f32 and 1024 queries of 64
# 7.0 ms, with scores 1.8; with a bias for each score that the fastest kernels do not take, in bf16,
# 2048 of 64 2.4 and 1.8 ms, 1024 of 128 0.87 and 0.49.
ROOM = 1 << 32
LOWEST = -1e30  # of what is added to scores: in base 2 it is still a number


@dataclass(frozen=True)
class Fused:
    """One attention. out: what is replaced.  leaves: queries, keys, values and masks, of which it
    is a function, in plain ops by `nodes`, and in one by `run`; and what else the plain ops read,
    which changes nothing."""

    found: WeightedKeys
    out: Value
    leaves: tuple[Value, ...]
    nodes: tuple[Node, ...]
    run: Any

    def graph(self) -> Graph:
        return Graph("attention", self.leaves, (), self.nodes, (self.out,))


# --- the call ----------------------------------------------------------------------------------
def _apply_moves(x: Tensor, moves: Sequence[Node]) -> Tensor:
    """Rows moved as those of scores, whatever the last axis is."""
    for m in moves:
        x = F.transpose(x, m.attrs["axes"]) if m.op.name == "transpose" else F.reshape(
            x, (*m.attrs["shape"][:-1], x.shape[-1]))
    return x


def _moved_mask(x: Tensor, shape: tuple[Any, ...], moves: Sequence[Node]) -> Tensor:
    """A mask that broadcasts to scores of this shape, as they are moved."""
    x = F.reshape(x, (*(1,) * (len(shape) - x.ndim), *x.shape))
    for m in moves:
        if m.op.name == "transpose":
            x = F.transpose(x, m.attrs["axes"])
            continue
        new, old = m.attrs["shape"], m.inputs[0].aval.shape
        if all(d == 1 for d in x.shape[:-2]) and new[-2:] == old[-2:]:
            x = F.reshape(x, (*(1,) * (len(new) - 2), *x.shape[-2:]))
        else:
            x = F.reshape(F.broadcast_to(x, (*old[:-1], x.shape[-1])), (*new[:-1], x.shape[-1]))
    return x


def _of_heads(x: Tensor, lead: tuple[Any, ...], split: int) -> Tensor:
    """[*lead, S, T] or 1 in place of extents as [B, H, S, T] or 1."""
    own: list[Any] = []
    x = F.reshape(x, (*(1,) * (len(lead) + 2 - x.ndim), *x.shape))
    given = tuple(x.shape[:-2])
    for part in (slice(0, split), slice(split, None)):
        whole = any(d != 1 for d in given[part])
        own += lead[part] if whole else (1,) * len(lead[part])
    x = F.broadcast_to(x, (*own, *x.shape[-2:]))
    return F.reshape(x, (math.prod(own[:split]), math.prod(own[split:]), *x.shape[-2:]))


def _mask(masks: Sequence[Mask], xs: Sequence[Tensor], found: WeightedKeys, split: int
          ) -> Tensor | None:
    """All masks in one: bools while each of them hides wholly, else floats that are added."""
    lead = found.operand.aval.shape[:-2]
    bools: Tensor | None = None
    floats: Tensor | None = None
    for m, x in zip(masks, xs, strict=True):
        shape = m.moves[0].inputs[0].aval.shape if m.moves else found.operand.aval.shape
        x = _of_heads(_moved_mask(x, shape, m.moves), lead, split)
        if m.kind != "added" and m.number == -math.inf:
            x = F.logical_not(x) if m.kind == "hidden" else x
            bools = x if bools is None else F.logical_and(bools, x)
            continue
        if m.kind == "added":
            x = convert(x, F32)
            x = x if m.number == 1 else F.multiply(x, m.number)
        else:
            other = F.zeros((), F32), F.full((), max(m.number, LOWEST), F32)
            x = F.where(x, *(other if m.kind == "seen" else other[::-1]))
        floats = x if floats is None else F.add(floats, x)
    if floats is None or bools is None:
        return bools if floats is None else floats
    return F.where(bools, floats, F.full((), -math.inf, F32))


def _lengths(n: Tensor) -> Tensor:
    """[B], or one number, of [B, 1, ...]."""
    return F.reshape(n, () if n.size == 1 else (-1,))


def _matrices(x: Tensor, heads: Heads) -> Tensor:
    """[B, H / group, T, D] of matrices that lie in any number of axes."""
    return F.reshape(x, (heads.B, heads.H // heads.group, *x.shape[-2:]))


def _call(found: WeightedKeys, heads: Heads, turned: bool, rule: dict[str, Any],
          masks: Sequence[Mask], moves_of_out: Sequence[Node], places: Sequence[int]) -> Any:
    """A function of leaves, of which those at `places` are queries, keys, values and masks, to
    what is replaced."""
    scores = found.scores
    attrs = {"scale": scores.scale, "causal": False, "accum": F32.dtype, **rule}
    attrs |= {"cap": scores.cap} if scores.cap else {}
    attrs |= {"nan": True} if masks else {}  # known ones hide no row wholly
    *lead, S = extents_of(found.operand)[:-1]

    def run(*leaves: Tensor) -> Tensor:
        q, k, v, *xs = (leaves[i] for i in places)
        wide = q.type if q.dtype is v.dtype else F32
        q, k, v = (x if x.dtype is wide.dtype else convert(x, wide) for x in (q, k, v))
        rows = scores.product.outputs[0].aval.shape[:-1]
        q = _apply_moves(F.broadcast_to(q, (*rows, q.shape[-1])) if q.shape[:-1] != rows else q,
                         scores.moves)
        q = F.reshape(q, (heads.B, heads.H, S, q.shape[-1]))
        k, v = _matrices(F.transpose(k, _transposed_axes(k)) if turned else k,
                         heads), _matrices(v, heads)
        n = sum(m.kind == "ends" for m in masks)
        mask = _mask(masks[n:], xs[n:len(masks)], found, heads.split)
        given = [q, k, v, *(() if mask is None else (mask,))]
        given += [key_spans(q, k, None, _lengths(x)) for x in xs[:n]]
        y = apply(ATTENTION, *given, **attrs) if found.key is None else apply(
            DROPOUT_ATTENTION, *given, xs[-1], dropout=found.dropout, together=True, **attrs)
        y = _apply_moves(F.reshape(y, (*lead, S, y.shape[-1])), found.moves)
        y = F.reshape(y, found.node.outputs[0].aval.shape)
        for m in moves_of_out:
            y = apply(m.op, y, **m.attrs)
        return y

    return run


def _transposed_axes(x: Tensor) -> tuple[int, ...]:
    return (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


# --- finding -----------------------------------------------------------------------------------
def _tail(graph: Graph, readers: dict[Value, list[Node]], v: Value) -> list[Node]:
    """What alone reads a product: moves, up to where it is rounded. [] if it is not."""
    tail: list[Node] = []
    while len(reads := readers.get(v, [])) == 1 and v not in graph.outputs:
        (node,) = reads
        if node.op.name == "cast" and node.attrs["to"].dtype.kind == "float":
            return [*tail, node]
        if node.op.name not in ("transpose", "reshape"):
            return []
        tail.append(node)
        v = node.outputs[0]
    return []


def _inside(reader: Reader, out: Value, leaves: Sequence[Value]
            ) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
    """The nodes that make a value of the leaves, in order, and what else they read."""
    seen: dict[Node, None] = {}
    others: list[Value] = []
    done = set(leaves)

    def visit(v: Value) -> None:
        if v in done:
            return
        done.add(v)
        node = reader.made.get(v)
        if node is None or node.op.effects:
            others.append(v)
            return
        for x in node.inputs:
            visit(x)
        seen[node] = None

    visit(out)
    return tuple(seen), tuple(others)


def _checked(found: WeightedKeys) -> None:
    (q, k), v = (x.aval for x in found.scores.product.inputs), found.node.inputs[1].aval
    weights = found.node.inputs[0].aval
    if not all(isinstance(n, int) and n for x in (q, k, v, weights) for n in x.shape):
        raise NotFusible("extents are not numbers, or are 0")
    if any(x.dtype.kind != "float" or x.dtype.bits not in (16, 32) for x in (q, k, v, weights)) or (
            weights.dtype is not v.dtype or q.dtype is not k.dtype):
        raise NotFusible("types are not those of attention: bf16, f16 or f32")
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        raise NotFusible(f"heads are wider than {WIDEST}")
    if v.ndim < 2 or k.ndim < 2 or q.ndim < 2:
        raise NotFusible("keys or values are vectors")


def _need_gain(found: WeightedKeys, masks: Sequence[Mask]) -> None:
    """Raises Kept where scores in memory are quicker and have room."""
    scores = extents_of(found.operand)
    wide = found.node.inputs[0].aval.dtype.bits > 16 or found.scores.product.inputs[
        0].aval.dtype.bits > 16
    width = max(extents_of(x)[-1] for x in (found.scores.product.inputs[0], found.node.inputs[1]))
    biased = any(m.kind == "added" and m.value.aval.shape[-2:] == scores[-2:] for m in masks) and (
        not takes_matrix(scores[-2], scores[-1], width))
    if 4 * math.prod(scores) <= ROOM and (wide or biased):
        what = "of f32" if wide else "with a bias for each"
        raise NotFusible(f"those {what} are quicker so, and take {4 * math.prod(scores)} bytes "
                         "of f32")


def _fused(graph: Graph, reader: Reader, found: WeightedKeys) -> Fused:
    _checked(found)
    q, k = found.scores.product.inputs
    keys, values = Matrices.of(reader, k, turned=True), Matrices.of(reader, found.node.inputs[1])
    heads = matrices_met(found, keys, values)
    S, T = extents_of(found.operand)[-2:]
    known = [m for m in found.scores.masks if is_known(reader, m, S)]
    rest = [m for m in found.scores.masks if m not in known]
    soft = any(m.kind == "added" or m.number > -math.inf for m in rest)
    hard = all(m.kind != "added" and m.number == -math.inf for m in known)
    rule = reach_of(reader, known, S, T) if hard or not soft else None
    masks = rest if rule is not None else list(found.scores.masks)
    masks = ends_first(reader, masks, found.operand, heads.split)
    tail = _tail(graph, reader.readers, found.result)
    out = tail[-1].outputs[0] if tail else found.result
    _need_gain(found, masks)
    operands = (q, keys.value, values.value, *(m.value for m in masks),
                *(() if found.key is None else (found.key,)))
    leaves = tuple(dict.fromkeys(operands))
    inside, others = _inside(reader, out, leaves)
    run = _call(found, heads, keys.turned, rule or {}, masks, tail,
                [leaves.index(x) for x in operands])
    return Fused(found, out, (*leaves, *others), inside, run)


# --- the gradient ------------------------------------------------------------------------------
def _derivative(graph: Graph, out: Any, leaves: Sequence[Any]) -> tuple[Graph, list[int]]:
    """(leaves, cotangent of the result) -> those of the leaves that have one, and which do."""
    wrt: list[int] = []

    def body(*xs: Tensor) -> list[Tensor]:
        made = hooks.pull_back.get()(graph, xs[:-1], xs[-1])
        wrt.extend(i for i, g in enumerate(made) if g is not None)
        return [g for g in made if g is not None]

    return remove_dead(merge_common(trace(body, [v.aval for v in leaves] + [out], "gradient"))), wrt


class Matcher:
    """Finds the values of another graph in this one, given which its inputs are."""

    def __init__(self, graph: Graph):
        self.graph, self.readers = graph, readers_of(graph)
        self.made = {(n.meaning, n.inputs): n.outputs for n in graph.nodes
                     if n.meaning is not None}
        self.producer = producers_of(graph)

    def extend(self, other: Graph, env: dict[Value, Value]) -> dict[Value, Value]:
        env = dict(env)
        for node in other.nodes:
            if node.meaning is None or not all(v in env for v in node.inputs):
                continue
            found = self.made.get((node.meaning, tuple(env[v] for v in node.inputs)))
            if found is not None:
                env.update(zip(node.outputs, found, strict=True))
        return env

    def cotangents(self, other: Graph, env: dict[Value, Value]) -> list[Value]:
        """What the last input of the other graph may be: where it meets, behind ops of one
        operand, a value that is known."""
        given = other.inputs[-1]
        chain: dict[Value, tuple[Node, ...]] = {given: ()}
        found: list[Value] = []
        for node in other.nodes:
            moving = [i for i, v in enumerate(node.inputs) if v in chain]
            if len(moving) != 1:
                continue
            (i,) = moving
            if len(node.inputs) == 1:
                chain[node.outputs[0]] = (*chain[node.inputs[0]], node)
                continue
            fixed = next((v for v in node.inputs if v in env and v is not given), None)
            for n in self.readers.get(env[fixed], []) if fixed is not None else []:
                if n.op is node.op and n.meaning == node.meaning:
                    v = self._behind(n.inputs[i], chain[node.inputs[i]])
                    if v is not None and v.aval == given.aval and v not in found:
                        found.append(v)
        return found

    def _behind(self, v: Value, chain: Sequence[Node]) -> Value | None:
        for node in reversed(chain):
            made = self.producer.get(v)
            if made is None or made.meaning != node.meaning:
                return None
            (v,) = made.inputs
        return v


def _gradients(fused: Fused, matcher: Matcher
               ) -> list[tuple[Value, dict[int, Value], list[Node]]]:
    """Of each cotangent of the result that the graph pulls back, that, those of the leaves, and
    the nodes that do it."""
    found = []
    aval = fused.out.aval
    for given in dict.fromkeys((aval, Aval(aval.shape, F32))):
        other, wrt = _derivative(fused.graph(), given, fused.leaves)
        env = matcher.extend(other, dict(zip(other.inputs, fused.leaves, strict=False)))
        for g in matcher.cotangents(other, env):
            whole = matcher.extend(other, env | {other.inputs[-1]: g})
            made = {i: whole[v] for i, v in zip(wrt, other.outputs, strict=True) if v in whole}
            if made:
                pulled = [whole[v] for n in other.nodes for v in n.outputs if v in whole]
                nodes = [matcher.producer[v] for v in pulled if v in matcher.producer]
                inside = set(fused.nodes)
                found.append((g, made, [n for n in nodes if n not in inside]))
    return found


# --- the rewrite -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Splice:
    """Nodes in front of a node of the graph, and what they give in place of values. ids: of the
    ops that they stand for."""

    graph: Graph
    inputs: tuple[Value, ...]
    instead: tuple[Value, ...]
    ids: str


def _splices(fused: Fused, matcher: Matcher) -> list[Splice]:
    where = fused.found.node.where
    with at_line(where):
        own = trace(lambda *xs: [fused.run(*xs)], [v.aval for v in fused.leaves], "attention")
    made = [Splice(own, fused.leaves, (fused.out,), _ids(fused.nodes))]
    for g, given, nodes in _gradients(fused, matcher):
        places = list(given)

        def body(*xs: Tensor, places: list[int] = places) -> list[Tensor]:
            pulled = hooks.pull_back.get()(own, xs[:-1], xs[-1])
            return [F.zeros(xs[i].shape, F32) if (x := pulled[i]) is None else x for i in places]

        graph = trace(body, [v.aval for v in (*fused.leaves, g)], "attention")
        made.append(Splice(graph, (*fused.leaves, g), tuple(given.values()), _ids(nodes)))
    return made


def _ids(nodes: Sequence[Node]) -> str:
    return " ".join(dict.fromkeys(i for n in nodes if n.inputs for i in id_of(n).split()))


def _spliced(graph: Graph, splices: Sequence[Splice]) -> Graph:
    """The graph with each put in front of the first node that makes what it replaces."""
    at: dict[Node, list[Splice]] = {}
    order = {v: (i, n) for i, n in enumerate(graph.nodes) for v in n.outputs}
    for s in splices:
        at.setdefault(min((order[v] for v in s.instead), key=lambda x: x[0])[1], []).append(s)
    env: dict[Value, Value] = {}
    nodes: list[Node] = []
    captures = list(graph.captures)
    for node in graph.nodes:
        for s in at.get(node, ()):
            own = dict(zip(s.graph.inputs, (env.get(v, v) for v in s.inputs), strict=True))
            captures += s.graph.captures
            where = replace(node.where, id=s.ids) if isinstance(node.where, OpLine) else node.where
            for n in s.graph.nodes:
                inputs = tuple(own.get(v, v) for v in n.inputs)
                nodes.append(Node(n.op, inputs, n.attrs, n.outputs, where))
            env.update(zip(s.instead, (own.get(v, v) for v in s.graph.outputs), strict=True))
        nodes.append(Node(node.op, tuple(env.get(v, v) for v in node.inputs), node.attrs,
                          node.outputs, node.where))
    outputs = tuple(env.get(v, v) for v in graph.outputs)
    return remove_dead(Graph(graph.name, graph.inputs, tuple(captures), tuple(nodes), outputs))


def fused_attention(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """The graph with the attention that it spells as `attention`; and why other sums over keys by
    weights that are exponentials are left as they are, by the ids of their products."""
    if not any(n.op.name in ANCHORS for n in graph.nodes):
        return graph, {}
    graph = merge_common(graph)
    reader = Reader(graph)
    why: dict[Node, str] = {}
    chosen: list[tuple[Fused, list[Splice]]] = []
    matcher: Matcher | None = None
    for node in graph.nodes:
        try:
            found = reader.weighted_keys(node)
            if found is None:
                continue
            fused = _fused(graph, reader, found)
        except NotFusible as e:
            why[node] = str(e)
            continue
        matcher = matcher or Matcher(graph)
        chosen.append((fused, _splices(fused, matcher)))
    made = graph
    while chosen:
        made = _spliced(graph, [s for _, splices in chosen for s in splices])
        left = {v for n in made.nodes for v in n.outputs}
        again = [(f, s) for f, s in chosen if f.found.weights.outputs[0] not in left]
        if len(again) == len(chosen):
            break
        why |= {f.found.node: "something else reads the weights" for f, _ in chosen
                if f.found.weights.outputs[0] in left}
        chosen, made = again, graph
    left = {v for n in made.nodes for v in n.outputs}
    return made, {id_of(n): w for n, w in why.items() if n.outputs[0] in left}


__all__ = ["fused_attention"]
