"""Attention and its gradient by the library's kernels, which keep no scores in memory.

With masks in memory and dropout as attention_masks.py takes them by the fastest, few queries by
those that split keys, else by those of modified_attention_kernels.py. Where a graph has both, the
result's kernel saves what that of the gradient makes weights from.
Operands that the kernels do not take are left to the composition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from .... import config
from ....kernels.attention_backward import (
    SUMMED_ROWS,
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
    sums_products,
)
from ....kernels.attention_fused_backward import (
    QUERIES,
    attention_fused_backward,
    fused_backward_plan,
)
from ....kernels.attention_scores import LOG2E, ScoreRule
from ....kernels.cards import multiprocessors_of
from ....kernels.decode_attention import (
    KERNELS,
    PAGED,
    DecodePlan,
    combine_parts,
    decode_plan,
    few_queries,
    planned,
    streams,
    takes_keys,
)
from ....numerics import DType, NumericType, as_type
from ....runtime.generations import GENERATIONS, Generation
from ....tensor import Tensor
from ... import functions as F
from ...expand import expand_by
from ...flops import Shapes
from ...ir import Graph, Node, Value, producers_of, readers_of
from ...op import Aval
from ...operand import convert, literal
from ...ops.attention_blocks import BLOCK_ROWS, Extras
from ...ops.attention_op import (
    ATTENTION,
    ATTENTION_LSE,
    ATTENTION_LSE_VJP,
    ATTENTION_VJP,
    DROPOUT_ATTENTION,
    DROPOUT_ATTENTION_VJP,
)
from ...ops.cached_attention import CACHED_ATTENTION, PAGED_ATTENTION
from ...ops.score_function import ScoreFunction
from ...ops.sort import SEARCHSORTED
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...trace import apply
from ..choose_schedule import blocks
from .attention_masks import (
    mask_cotangent,
    mask_kind,
    mask_operands,
    mask_rule,
    mask_value,
    takes_draws,
    takes_mask,
)
from .data_movement import narrows
from .modified_attention_kernels import (
    DRAW_KEYS,
    MODIFIED,
    MODIFIED_GRADIENT,
    draws_rule,
    lowered_sums,
    smallest_kept,
)
from .score_code import score_code

F32, I32 = as_type("f32"), as_type("int32")
WIDEST = 256  # of a head that the kernels take
NO_KEY = 1e38  # logs of sums are smaller, but for those of queries that see none
FORWARD = (ATTENTION, ATTENTION_LSE, DROPOUT_ATTENTION)
CACHED = (CACHED_ATTENTION, PAGED_ATTENTION)
BACKWARD = (ATTENTION_VJP, ATTENTION_LSE_VJP, DROPOUT_ATTENTION_VJP)


def _gradient(g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor,
              scale: float, causal: bool, chip: str, types: tuple[NumericType, ...],
              window: int = 0, cap: float = 0.0, score: ScoreFunction | None = None,
              sums: tuple[int, ...] = (), of_sums: bool = False, wanted: bool = False,
              draws: ScoreRule | None = None, nan: bool = False
              ) -> tuple[Tensor, ...]:
    """Two kernels, or one where that is quicker. The result's own row sums are taken of it as it is
    stored. types: those in which the cotangents of q, k and v are written. sums: those of them
    whose columns are summed. of_sums: the last operand is the cotangent of the logs of sums.
    wanted: the cotangent of the mask is, too. draws: which weights were dropped."""
    (S, D), (T, E) = tuple(q.shape[-2:]), tuple(v.shape[-2:])
    heads, keys = prod(q.shape[:-2]), prod(k.shape[:-2])
    rest, of_logs = (rest[:-1], rest[-1]) if of_sums else (rest, None)
    mask, spans, W = Extras.of(rest, float(draws is not None))
    mask_q, mask_k = mask_operands(mask, q.shape[-3], prod(q.shape[:-3]))
    masked = mask_kind(mask_q.get("mask"), draws, S)
    narrow = g if g.dtype is q.dtype else convert(g, q.type)
    Q, G = F.reshape(q, (heads, S, D)), F.reshape(narrow, (heads, S, E))
    K, V = F.reshape(k, (keys, T, D)), F.reshape(v, (keys, T, E))
    dQ, dK, dV = (F.zeros(x.shape, t) for x, t in zip((Q, K, V), types, strict=False))
    code = score and score_code(score, q.shape[-3])
    common: dict[str, Any] = {"group": heads // keys, "causal": causal, "window": window,
                              "cap": cap, "score": code}
    common |= {} if W is None else {"W": W, "draws": draws}
    held = q.dtype, max(D, E), GENERATIONS[chip]
    spanned = spans is not None
    plain = not (spanned or masked or window or cap or score)
    if plain and not causal and not sums and heads == keys and D == E and (
            own := _fused_backward_plan(*held, S, T, heads, types)):
        delta = F.reshape(lowered_sums(g, y, q, of_logs), (heads, S))
        _launch_fused_backward((Q, K, V, G, F.reshape(lse, (heads, S)), delta), (dQ, dK, dV),
                               scale, **own)
        return tuple(F.reshape(x, like.shape)
                     for x, like in zip((dQ, dK, dV), (q, k, v), strict=True))
    of_queries, of_keys = (None, None) if spans is None else _both_spans(spans, T)
    rows_q, rows_k = ({} if x is None else {"spans": x, "heads": n // x.shape[0]}
                      for x, n in ((of_queries, heads), (of_keys, keys)))
    columns = {i: F.zeros((blocks(x.shape[1], SUMMED_ROWS), x.shape[0], x.shape[2]))
               for i, x in enumerate((Q, K, V)) if i in sums}
    block = queries_block(*held, queries=S, causal=causal, mask=masked, spans=spanned,
                          score=bool(score), cap=bool(cap))
    if plain and narrow is g and of_logs is None and sums_products(*held, block["BM"]):
        delta, rows_q["Y"] = F.zeros((heads, S)), F.reshape(convert(y, q.type), (heads, S, E))
    else:
        delta = F.reshape(lowered_sums(g, y, q, of_logs), (heads, S))
    rows = F.reshape(lse, (heads, S)), delta
    attention_queries(Q, K, V, G, *rows, dQ, scale, sums_q=columns.get(0), **block, **rows_q,
                      **mask_q, **common)
    attention_keys(Q, K, V, G, *rows, dK, dV, scale, sums_k=columns.get(1), sums_v=columns.get(2),
                   **keys_block(*held, keys=T, cap=bool(cap or score), spans=spanned,
                                causal=causal, mask=masked, linear=bool(
                                    code and code.linear and not cap)),
                   **rows_k, **mask_k, **common)
    made = [F.reshape(x, like.shape) for x, like in zip((dQ, dK, dV), (q, k, v), strict=True)]
    if len(types) > len(made):
        assert mask is not None
        made.append(F.zeros(mask.shape, types[3]) if not wanted else mask_cotangent(
            (Q, K, V, G, *rows), mask, q, scale, rows_q | common, types[3]))
    return *made, *(F.reshape(columns[i], (columns[i].shape[0], *x.shape[:-2], x.shape[-1]))
                    for i, x in enumerate((q, k, v)) if i in sums)


def _fused_backward_plan(dtype: DType, width: int, chip: Generation, S: int, T: int, heads: int,
                         types: tuple[NumericType, ...]) -> dict[str, int] | None:
    """What the one kernel is given, where it is taken. Where stores are watched or accesses checked
    it would have a form that is slow."""
    if config.numerics != "off" or config.debug or any(t.dtype is not dtype for t in types):
        return None
    return fused_backward_plan(dtype, S, T, width, heads, chip, multiprocessors_of(chip))


def _launch_fused_backward(operands: Sequence[Tensor], results: Sequence[Tensor], scale: float, *,
                           heads: int, slots: int) -> None:
    """The one kernel, with memory for its sums and the words that say whose turn it is."""
    _, S, D = tuple(operands[0].shape)
    turns = F.zeros((2 * slots * (S // QUERIES) + 1,), I32)
    attention_fused_backward(*operands, F.zeros((slots, S, D)), turns, *results, scale, heads=heads,
                      slots=slots)


def _natural(logs: Tensor) -> Tensor:
    """Logs of sums as a user has them, of those to base 2 that kernels save: -inf where there is no
    key. They save a number below or above all others there, for the sake of the gradient."""
    return F.where(F.greater(F.abs(logs), NO_KEY), literal(-math.inf, logs), logs * math.log(2))


def _both_spans(spans: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """[Z, 2, S] of what queries see, and [Z, 2, T] of which queries see a key: from the first whose
    span does not end in front of it, up to the first whose span begins behind it."""
    of_queries = F.reshape(spans, (-1, *spans.shape[-2:]))
    places = F.broadcast_to(F.arange(T, dtype="int32"), (of_queries.shape[0], T))
    first, end = (apply(SEARCHSORTED, of_queries[:, i], places, side="right", lines=1)
                  for i in (1, 0))
    return of_queries, convert(F.stack([first, end], axis=1), spans.type)


def _row_blocks(node: Node, i: int) -> int:
    rows: Any = node.inputs[3 + i].aval.shape[-2]
    return blocks(rows, SUMMED_ROWS)


def _few_queries(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, scale: float, causal: bool,
                 types: tuple[NumericType, ...], chip: str, window: int = 0, cap: float = 0.0,
                 score: ScoreFunction | None = None, sums: bool = False, nan: bool = False
                 ) -> tuple[Tensor, ...]:
    """The queries of a group side by side, over keys in parts. rest: how many keys are there, or
    the spans of one query each. sums: with the logs of their sums. nan: of a query that sees no
    key."""
    (S, D), (T, E), C = tuple(q.shape[-2:]), tuple(v.shape[-2:]), prod(k.shape[:-2])
    R = prod(q.shape[:-1]) // C
    most = min(T, window + S) if window else T
    plan = decode_plan(C, R, most, max(D, E), codes=k.dtype is not q.dtype, queries=S,
                       streamed=score is None and streams(GENERATIONS[chip], D, E),
                       groups=GENERATIONS[chip].most_cluster_groups,
                       multiprocessors=multiprocessors_of(GENERATIONS[chip]))
    count = next((F.reshape(x, (1,)) for x in rest if x.ndim == 0), None)
    spans: dict[str, Any] = {}
    for x in (x for x in rest if x.ndim):
        rows = F.reshape(x, (-1, 2, 1))
        spans = {"spans": rows, "heads": C // rows.shape[0]}
    parts, lse = _split_results(plan, (C, R, E), types[0], sums)
    kernel = planned(next(x for x in KERNELS if x.__name__ == plan.kernel), plan)
    kernel(F.reshape(q, (C, R, D)), F.reshape(k, (C, T, D)), F.reshape(v, (C, T, E)),
           count, parts, lse, scale * LOG2E, S=S, BM=plan.rows, BN=plan.keys,
           causal=causal and S > 1, window=window, cap=cap, **spans, **plan.constants(R),
           score=score and score_code(score, q.shape[-3]))
    made = _combined(plan, parts, lse, q, types[0], sums)
    if not (nan and spans):
        return made
    seen = F.less(rows[:, 0], rows[:, 1])  # [sequences, 1]
    y = F.reshape(made[0], (rows.shape[0], -1))
    return F.reshape(F.where(seen, y, literal(math.nan, y)), made[0].shape), *made[1:]


def _split_results(plan: DecodePlan, extents: tuple[int, int, int], numeric: NumericType,
                   sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """Where parts and the logs of their sums are written, or the result of a cluster and the logs
    of its sums. extents: heads of keys, rows, width."""
    C, R, E = extents
    if plan.clustered:
        return F.zeros((C, R, E), numeric), F.zeros((C, R)) if sums else None
    if plan.parts == 1 and not sums:
        return F.zeros((1, C, R, E), numeric), None
    return F.zeros((plan.parts, C, R, E), F32), F.zeros((plan.parts, C, R))


def _combined(plan: DecodePlan, parts: Tensor, lse: Tensor | None, q: Tensor, numeric: NumericType,
              sums: bool = False) -> tuple[Tensor, ...]:
    """The result from its parts, and the logs of sums where they are wanted."""
    E = parts.shape[-1]
    if lse is None or plan.clustered:
        made = (F.reshape(parts, (*q.shape[:-1], E)),)
        return made if lse is None else (*made, F.reshape(lse, q.shape[:-1]))
    P, C, R, _ = tuple(parts.shape)
    out, logs = F.zeros((C * R, E), numeric), F.zeros((C * R,)) if sums else None
    combine_parts(F.reshape(parts, (P, C * R, E)), F.reshape(lse, (P, C * R)), out, logs,
                  BP=plan.together)
    made = (F.reshape(out, (*q.shape[:-1], E)),)
    return made if logs is None else (*made, F.reshape(logs, q.shape[:-1]))


def _few_queries_of_pages(q: Tensor, K: Tensor, V: Tensor, table: Tensor, count: Tensor, *,
                          scale: float, causal: bool, types: tuple[NumericType, ...], chip: str,
                          window: int = 0, cap: float = 0.0) -> Tensor:
    (B, _, S, D), (N, H, T, E), L = tuple(q.shape), tuple(V.shape), table.shape[1]
    C, R, width = B * H, prod(q.shape[:-1]) // (B * H), max(D, E)
    most = min(L * T, window + S) if window else L * T
    plan = decode_plan(C, R, most, width, codes=K.dtype is not q.dtype, page=T, queries=S,
                       streamed=streams(GENERATIONS[chip], D, E),
                       groups=GENERATIONS[chip].most_cluster_groups,
                       multiprocessors=multiprocessors_of(GENERATIONS[chip]))
    parts, lse = _split_results(plan, (C, R, E), types[0])
    kernel = planned(next(x for x in PAGED if x.__name__ == plan.kernel), plan)
    kernel(F.reshape(q, (C, R, D)), F.reshape(K, (N * H, T, D)), F.reshape(V, (N * H, T, E)),
           table, count, parts, lse, scale * LOG2E, heads=H, S=S, BM=plan.rows, BN=plan.keys,
           causal=causal and S > 1, window=window, cap=cap, **plan.constants(R))
    return _combined(plan, parts, lse, q, types[0])[0]


def _flops(ins: Shapes, outs: Shapes, *, causal: bool, window: int = 0, **attrs: Any) -> float:
    """Two matmuls of each query with the keys that it sees: of a causal one, those up to its own,
    of a window as many as it has. Spans are data."""
    (*heads, S, D), (T, E) = ins[0], ins[2][-2:]
    seen = S * (T - (S - 1) / 2) if causal else S * T
    seen = min(seen, S * (window if causal else 2 * window - 1)) if window else seen
    return 2.0 * prod(heads) * seen * (D + E)


# A NaN of a query is in its scores, one of a key in those of the queries that see it, as the last.
FLASH = library_call("flash_attention", flops=_flops, matmul=True, shows=(0, 1, 2))
FLASH_SAVED = library_call("flash_attention_saved", multi=True,  # and log2 of the sums of exp2
                           flops=_flops, matmul=True, shows=(0, 1, 2))
FEW_QUERIES = library_call("attention_of_few_queries", multi=True, expand=_few_queries)
FEW_QUERIES_OF_PAGES = library_call("attention_of_few_queries_in_pages",
                                    expand=_few_queries_of_pages)
NATURAL = library_call("natural_logs", expand=_natural)
FLASH_GRADIENT = library_call("flash_attention_gradient", multi=True, expand=_gradient,
                              row_blocks=_row_blocks)


def open_cached_attention(graph: Graph) -> Graph:
    """Attention over a part of a cache with a mask, where there are no kernels that stop there."""
    return expand_by(graph, lambda n: n.op.expand if n.op in CACHED and not (
        _is_known(n) and _is_few(n)) else None)


def use_attention_kernels(graph: Graph, chip: Generation) -> Graph:
    """The graph with the attention that the kernels take as their calls, in blocks that suit the
    chip."""
    taken = {n for n in graph.nodes if n.op in (*FORWARD, *BACKWARD) and _is_taken(n)
             or n.op in CACHED}
    wanted = {_key(n) for n in taken if n.op in BACKWARD}
    read = {v for n in graph.nodes for v in n.inputs} | set(graph.outputs)
    rounded = rounded_values(graph, lambda n: n in taken and (
        n.op in BACKWARD or _key(n) not in wanted and _is_few(n) or not _is_fast(n, chip)))
    logs = {n.outputs[1] for n in taken if n.op is ATTENTION_LSE}  # in f32 always
    rounded = {v: x for v, x in rounded.items() if v not in logs}
    saved: dict[Any, tuple[Value, Value]] = {}
    held: dict[Any, Value] = {}  # masks and keys as the fastest kernels read them
    made_by = producers_of(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op.name == "cast" and node.inputs[0] in rounded:
            made = rounded[node.inputs[0]]
            attrs = {"source": made.aval.type, "to": node.attrs["to"]}
            node = Node(node.op, (made,), attrs, node.outputs, node.where)
        if node not in taken:
            nodes.append(node)
            continue
        key, operands = _key(node), _operands(node)
        if _is_fast(node, chip):
            for i, x in _read_otherwise(node).items():
                which = x, x.aval.dtype.kind == "uint" and repr(_draws(node))
                if which not in held:
                    held[which], added = draws_value(node) if which[1] else mask_value(x, made_by)
                    nodes += added
                operands = *operands[:i], held[which], *operands[i + 1:]
        if node.op not in BACKWARD or key not in saved:
            q, _, v, *_ = _operands(node)
            y = Value(Aval((*q.aval.shape[:-1], v.aval.shape[-1]), F32))
            if node.op not in BACKWARD:
                y = rounded.get(node.outputs[0], node.outputs[0])
            saved[key] = y, Value(Aval(q.aval.shape[:-1], F32))
            if node.op is ATTENTION_LSE and key not in wanted and _is_few(node):
                saved[key] = y, node.outputs[1]
            nodes.append(_result_call(node, saved[key], key in wanted, chip, operands))
            if node.op is ATTENTION_LSE and saved[key][1] is not node.outputs[1]:
                nodes.append(Node(NATURAL, saved[key][1:], {}, node.outputs[1:], node.where))
        if node.op in BACKWARD:
            outputs = tuple(rounded.get(v, v) for v in node.outputs)
            unread = len(outputs) == 4 and node.outputs[3] not in read
            nodes.append(_gradient_call(node, saved[key], outputs, chip, unread, operands))
    return replace(graph, nodes=tuple(nodes))


def rounded_values(graph: Graph, by: Callable[[Node], bool]) -> dict[Value, Value]:
    """What these nodes make that is only read rounded, as the values that kernels write: they
    round."""
    readers = readers_of(graph)
    found = {}
    for v in (v for n in graph.nodes if by(n) for v in n.outputs):
        reads = readers.get(v, [])
        types = {n.attrs["to"] for n in reads if n.op.name == "cast" and narrows(n)}
        if len(types) == 1 and len(reads) == sum(n.op.name == "cast" for n in reads) and (
                v not in graph.outputs):
            found[v] = Value(Aval(v.aval.shape, types.pop()))
    return found


def _result_call(node: Node, outputs: tuple[Value, Value], wanted: bool, chip: Generation,
                 operands: tuple[Value, ...]) -> Node:
    """wanted: the gradient is in the graph too. operands: as its kernels read them."""
    attrs = _attributes_without_accum(node) | {"types": (outputs[0].aval.type,)}
    if node.op is PAGED_ATTENTION:
        attrs |= {"chip": chip.target}
        return Node(FEW_QUERIES_OF_PAGES, operands, attrs, outputs[:1], node.where)
    sums = node.op is ATTENTION_LSE
    if _is_few(node) and not wanted:
        attrs |= {"sums": sums, "chip": chip.target}
        return Node(FEW_QUERIES, operands, attrs, outputs[:1 + sums], node.where)
    if not _is_fast(node, chip):
        return Node(MODIFIED, operands, attrs, outputs, node.where)
    q, k, *_ = operands
    attrs = {"scale": node.attrs["scale"], "causal": node.attrs["causal"],
             "group": q.aval.shape[-3] // k.aval.shape[-3], "shape": tuple(outputs[0].aval.shape),
             **{n: node.attrs[n] for n in ("window", "cap", "score", "nan") if n in node.attrs}}
    if (mask := _extras(node).mask) is not None:
        *batch, heads, _, _ = extents_of(q)
        attrs["mask"] = mask_rule(mask.shape, heads, True, prod(batch))
    attrs |= _draws(node)
    if wanted or sums:
        return Node(FLASH_SAVED, operands, attrs, outputs, node.where)
    return Node(FLASH, operands, attrs, outputs[:1], node.where)


def _gradient_call(node: Node, saved: tuple[Value, Value], outputs: tuple[Value, ...],
                   chip: Generation, unread: bool, operands: tuple[Value, ...]) -> Node:
    """unread: nobody asks for a mask's cotangent."""
    op, attrs = FLASH_GRADIENT, _attributes_without_accum(node) | {"types": tuple(v.aval.type
                                                                                  for v in outputs)}
    if _is_fast(node, chip):
        attrs = {n: x for n, x in attrs.items() if n not in ("dropout", "together")}
        attrs |= {"chip": chip.target, **_draws(node)}
        attrs |= {} if _extras(node).mask is None else {"wanted": not unread}
    else:
        op, attrs = MODIFIED_GRADIENT, attrs | {"wanted": not unread}
    of_sums = node.op is ATTENTION_LSE_VJP
    inputs = (node.inputs[0], *saved, *operands, *node.inputs[1:1 + of_sums])
    return Node(op, inputs, attrs | {"of_sums": of_sums}, outputs, node.where)


def _read_otherwise(node: Node) -> dict[int, Value]:
    """The mask and the key of draws, by their places among the operands."""
    operands, extras = _operands(node), _extras(node)
    return {**({} if extras.mask is None else {3: operands[3]}),
            **({} if extras.key is None else {len(operands) - 1: operands[-1]})}


def draws_value(node: Node) -> tuple[Value, list[Node]]:
    """The keys of blocks of queries, and the node that makes them."""
    q, key = _operands(node)[0].aval, _operands(node)[-1]
    together = node.attrs.get("together", False)
    rows = q.shape[-2] if together else BLOCK_ROWS
    made = Value(Aval((-(-q.shape[-2] // rows), *key.aval.shape), key.aval.type))
    return made, [Node(DRAW_KEYS, (key,), {"S": q.shape[-2], "together": together}, (made,))]


def _draws(node: Node) -> dict[str, Any]:
    q, _, v, *_ = map(extents_of, _operands(node))
    if not node.attrs.get("dropout"):
        return {}
    rule = draws_rule(q[-2], v[-2], node.attrs["dropout"], node.attrs.get("together", False))
    return {"draws": ScoreRule(node.attrs["causal"], None, rule)}


def _attributes_without_accum(node: Node) -> dict[str, Any]:
    return {name: x for name, x in node.attrs.items() if name != "accum"}


def _key(node: Node) -> Any:
    """What the result and the gradient of one attention have in common."""
    return (*_operands(node), repr(_attributes_without_accum(node)))


def _operands(node: Node) -> tuple[Value, ...]:
    """Queries, keys and values, the mask, spans and the key of dropout if there are."""
    if node.op is ATTENTION_LSE_VJP:
        return node.inputs[2:]
    return node.inputs[1:] if node.op in BACKWARD else node.inputs


def _extras(node: Node) -> Any:
    """The types of what stands behind the values."""
    return Extras.of(tuple(x.aval for x in _operands(node)[3:]), node.attrs.get("dropout", 0.0))


def _is_fast(node: Node, chip: Generation) -> bool:
    """Whether the fastest kernels take it."""
    q, _, v, *_ = (x.aval for x in _operands(node))
    mask, _, key = _extras(node)
    return _is_plain(node) and (mask is None or takes_mask(mask, q, v, chip)) and (
        key is None or takes_draws(q, v, chip))


def _is_plain(node: Node) -> bool:
    """Whether the fastest kernels take it but for masks in memory and dropout. The others give 0
    where a query sees no key for want of keys, and have -inf in place of a score that is scaled
    already."""
    q, k, *_ = (x.aval.shape for x in _operands(node))
    by_place: Any = (node.attrs["causal"] or node.attrs.get("window")) and q[-2] > k[-2]
    scaled = node.attrs["scale"] > 0 or node.attrs.get("cap") or node.attrs.get("score")
    return not by_place and bool(scaled)


def _is_few(node: Node) -> bool:
    """Whether the kernels of few queries take it, where no gradient is wanted."""
    q, _, v, *_ = (x.aval for x in _operands(node))
    S: Any = q.shape[-2]
    T: Any = v.shape[-2]
    width: Any = max(q.shape[-1], v.shape[-1])
    if node.op in CACHED:
        page = T if node.op is PAGED_ATTENTION else 0
        keys: Any = node.inputs[3].aval.shape[1] * T if page else T
        return node.attrs["scale"] > 0 and few_queries(q.dtype, S, keys, width) and (
            takes_keys(v.dtype, q.dtype, width, page))
    lines = S > 1 and _extras(node).spans is not None  # of several queries each its own
    return _is_plain(node) and not _read_otherwise(node) and not lines and few_queries(
        q.dtype, S, T, width)


def _is_taken(node: Node) -> bool:
    mask, spans, _ = _extras(node)
    if mask is not None and mask.dtype.name not in ("bool", "bool_", "f32"):
        return False
    if spans is not None and spans.shape[1:-2] not in ((), (1,)):
        return False  # heads of a sequence would have spans of their own
    return _is_known(node) and smallest_kept(node.attrs.get("dropout", 0.0)) < 2**32


def _is_known(node: Node) -> bool:
    """Whether extents are numbers, and types and widths those of the kernels."""
    q, _, v, *_ = operands = [x.aval for x in _operands(node)]
    if not all(isinstance(n, int) and n for x in operands for n in x.shape) or q.ndim < 3:
        return False
    width: Any = max(q.shape[-1], v.shape[-1])
    return q.dtype.bits <= 32 and node.attrs["accum"].name == "f32" and width <= WIDEST


__all__ = ["FLASH", "FLASH_GRADIENT", "FLASH_SAVED", "open_cached_attention",
           "use_attention_kernels"]
