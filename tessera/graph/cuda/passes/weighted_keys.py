"""Where a graph of plain ops sums values over keys by weights that are an exponential, and of what.

A product W V whose W is exp(X) over the sum of it along the last axis is attention, however W was
written, if X is a product of queries and keys to which only what attention knows was done: scaled,
capped, a mask added or chosen by, constants of a row added, rounded, moved. `weighted_keys` follows
X down to that product and says what was done, or why it cannot.

Axes are followed as numbers: which matrix of keys, and of values, each row of the weights meets is
computed for all rows (`matrices_met`), so that heads may lie, be merged and be repeated in any way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value, elements, producers_of, readers_of
from ...schedule.loop_axes import extents_of

SMALL = 1 << 20  # elements of a known value that is computed as a whole
ROWS = 256  # of a larger one at a time
HIDES = -1e8  # what is chosen or added below this leaves no weight
MOVES = ("transpose", "reshape")


class NotFusible(Exception):
    """Why weights stay in memory, in words."""


@dataclass(frozen=True)
class Mask:
    """One term of a mask. kind: "seen" where it is true, "hidden" where it is, "added", or "ends":
    how many of the first keys are seen.  number:
    what hidden scores become, or the factor of what is added.  moves: what was done to the scores
    behind it."""

    value: Value
    kind: str
    number: float
    moves: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Scores:
    """X = [cap tanh](scale Q K') and masks.  scale: behind the cap too.  moves: transposes and
    reshapes of the rows, in order."""

    product: Node
    scale: float = 1.0
    cap: float = 0.0
    masks: tuple[Mask, ...] = ()
    moves: tuple[Node, ...] = ()

    def times(self, c: float) -> Scores:
        if not c > 0 and (self.masks or self.cap):
            raise NotFusible(f"scores with a mask or a cap are multiplied by {c}")
        return Scores(self.product, self.scale * c, self.cap * c, tuple(
            Mask(m.value, m.kind, m.number * c, m.moves) for m in self.masks), self.moves)

    def moved(self, node: Node) -> Scores:
        return Scores(self.product, self.scale, self.cap, tuple(
            Mask(m.value, m.kind, m.number, (*m.moves, node)) for m in self.masks),
            (*self.moves, node))

    def masked(self, value: Value, kind: str, number: float) -> Scores:
        return Scores(self.product, self.scale, self.cap,
                      (*self.masks, Mask(value, kind, number)), self.moves)


@dataclass(frozen=True)
class WeightedKeys:
    """out = moves(dropped(softmax(X))) V.  node: that product.  weights: what makes softmax(X), or
    exp(X), of which `divided` divides the product by their sum.  key: by which weights are dropped.
    """

    node: Node
    weights: Node
    scores: Scores
    operand: Value  # X
    moves: tuple[Node, ...] = ()
    divided: Node | None = None
    dropout: float = 0.0
    key: Value | None = None

    @property
    def result(self) -> Value:
        return (self.divided or self.node).outputs[0]


class Reader:
    """What the values of a graph are made of."""

    def __init__(self, graph: Graph):
        self.made = producers_of(graph)
        self.readers = readers_of(graph)
        self._known: dict[Value, np.ndarray | None] = {}

    # --- what is known without the inputs ------------------------------------------------------
    def known(self, v: Value) -> np.ndarray | None:
        """A small value that follows from constants alone; of one that is filled, one element."""
        if v not in self._known:
            self._known[v] = self._compute(v)
        return self._known[v]

    def _compute(self, v: Value) -> np.ndarray | None:
        node = self.made.get(v)
        if node is None or node.op.effects or node.op.graph_attrs or node.op.multi or not all(
                isinstance(d, int) for d in v.aval.shape):
            return None
        if node.op.name == "full":
            return np.broadcast_to(node.op.ref(**{**node.attrs, "shape": ()}), extents_of(v))
        if elements(v) > SMALL:
            return None
        xs = [self.known(x) for x in node.inputs]
        if any(x is None for x in xs):
            return None
        with np.errstate(all="ignore"):
            return np.asarray(node.op.ref(*xs, **node.attrs))

    def number(self, v: Value) -> float | None:
        x = self.known(v)
        return float(x.reshape(-1)[0]) if x is not None and x.size == 1 or (
            x is not None and x.size and not any(x.strides)) else None

    def rows(self, v: Value, first: int, end: int) -> np.ndarray | None:
        """Rows [first:end] of a known matrix, [rows or 1, columns or 1]; None where it is not one.
        Large ones are made of elementwise ops."""
        shape, whole = v.aval.shape, self.known(v)
        if any(d != 1 for d in shape[:-2]):
            return None
        if whole is not None:
            matrix = whole.reshape((1, 1, *shape)[-2:])
            return matrix if matrix.shape[0] == 1 else matrix[first:end]
        node = self.made.get(v)
        if node is None or not (node.op.loop or node.op.name == "broadcast_to") or node.op.effects:
            return None
        xs = [self.rows(x, first, end) for x in node.inputs]
        if any(x is None for x in xs):
            return None
        with np.errstate(all="ignore"):
            return xs[0] if node.op.name == "broadcast_to" else np.asarray(
                node.op.ref(*xs, **node.attrs))

    def parts(self, v: Value, op: str) -> list[Value]:
        """The bools that make v by this op."""
        node = self.made.get(v)
        if node is None or v.aval.dtype.kind != "bool" or node.op.name not in (
                op, op.replace("bitwise", "logical")):
            return [v]
        return [x for i in node.inputs for x in self.parts(i, op)]

    def repeated(self, v: Value) -> tuple[Value, Node] | None:
        """What a value repeats matrices of, and by which op, with reshapes of the other axes."""
        x, wide = v, None
        while (node := self.made.get(x)) is not None and node.op.name in (
                "reshape", "broadcast_to"):
            y = node.inputs[0]
            if y.aval.shape[-2:] != v.aval.shape[-2:] or node.op.name == "broadcast_to" and (
                    wide is not None or y.aval.ndim != x.aval.ndim):
                break
            wide = node if node.op.name == "broadcast_to" else wide
            x = y
        return None if wide is None else (x, wide)

    # --- scores --------------------------------------------------------------------------------
    def scores(self, v: Value) -> Scores:
        node = self.made.get(v)
        rule = None if node is None else SCORES.get(node.op.name)
        if node is None or rule is None:
            raise NotFusible(f"scores come from {'outside' if node is None else node.op.name}")
        return rule(self, node)

    def either(self, node: Node) -> tuple[Scores, Value, int]:
        """Of an op of two operands the scores, the other one, and where the scores stand."""
        why: NotFusible | None = None
        for i in (0, 1):
            v, other = node.inputs[i], node.inputs[1 - i]
            if v.aval.shape != node.outputs[0].aval.shape or self.known(v) is not None:
                continue
            try:
                return self.scores(v), other, i
            except NotFusible as e:
                why = why or e
        raise why or NotFusible(f"scores are repeated by {node.op.name}")

    def weights(self, v: Value) -> tuple[Node, Value] | None:
        """The op that ends softmax(X), and X, if v is that."""
        node = self.made.get(v)
        if node is None:
            return None
        if node.op.name == "softmax":
            last = node.attrs["axis"] == node.inputs[0].aval.ndim - 1
            return (node, node.inputs[0]) if last else None
        if node.op.name == "exp":
            inner = self.made.get(node.inputs[0])
            if inner is not None and inner.op.name == "log_softmax" and (
                    inner.attrs["axis"] == v.aval.ndim - 1):
                return node, inner.inputs[0]
        if node.op.name == "div":
            e, total = node.inputs
            top = self.made.get(e)
            if top is not None and top.op.name == "exp" and self.sums(total, e):
                return node, top.inputs[0]
        return None

    def sums(self, total: Value, e: Value) -> bool:
        """Whether total is the sum of e along its last axis, as a column."""
        node = self.made.get(total)
        while node is not None and node.op.name in ("reshape", "broadcast_to", "cast"):
            node = self.made.get(node.inputs[0])
        return node is not None and node.op.name == "reduce_sum" and node.inputs[0] is e and (
            node.attrs["axis"] == (e.aval.ndim - 1,)) and (
            total.aval.shape[:-1] == e.aval.shape[:-1])

    def dropped(self, v: Value) -> tuple[Value, float, Value] | None:
        """x, p and the key, where v is ts.dropout(x, p, key)."""
        node = self.made.get(v)
        if node is None or node.op.name != "where" or self.number(node.inputs[2]) != 0:
            return None
        keep, grown = (self.made.get(x) for x in node.inputs[:2])
        if keep is None or grown is None or (keep.op.name, grown.op.name) != (
                "greater_equal", "mul"):
            return None
        key, p = self.uniform(keep.inputs[0]), self.number(keep.inputs[1])
        at = [i for i in (0, 1) if self.number(grown.inputs[i]) is not None]
        if key is None or p is None or not 0 < p < 1 or len(at) != 1:
            return None
        factor = self.number(grown.inputs[at[0]])
        close = factor is not None and abs(factor * (1 - p) - 1) < 1e-6
        return (grown.inputs[1 - at[0]], p, key) if close else None

    def uniform(self, v: Value) -> Value | None:
        """The key of random bits of v's shape, of which v is the numbers in [0, 1) of f32."""
        for name, number in (("mul", 2.0 ** -24), ("cast", None), ("floor_divide", 256.0)):
            node = self.made.get(v)
            if node is None or node.op.name != name or number is not None and (
                    self.number(node.inputs[1]) != number):
                return None
            v = node.inputs[0]
        node = self.made.get(v)
        return node.inputs[0] if node is not None and node.op.name == "random_bits" else None

    def weighted_keys(self, node: Node) -> WeightedKeys | None:
        """What a product is, if its first operand is such weights. Raises Kept."""
        if node.op.name != "matmul":
            return None
        v, moves = node.inputs[0], list[Node]()
        divided, p, key = None, 0.0, None
        while (found := self.weights(v)) is None:
            made = self.made.get(v)
            if made is not None and made.op.name == "exp" and (
                    divided := self.divided(node, v)) is not None:
                found = made, made.inputs[0]
                break
            if key is None and (drop := self.dropped(v)) is not None:
                if any(m.op.name == "transpose" for m in moves):
                    raise NotFusible("weights are transposed behind dropout")
                v, p, key = drop
                continue
            if made is None or made.op.name not in (*MOVES, "cast"):
                self._need_no_weights(v)
                return None
            if made.op.name in MOVES:
                moves.insert(0, made)
            v = made.inputs[0]
        if not all(keeps_columns(m) for m in moves):
            raise NotFusible("keys do not stay the last axis of the weights")
        if key is not None and any(m.op.name == "transpose" for m in moves):
            raise NotFusible("weights are transposed in front of dropout")
        return WeightedKeys(node, found[0], self.scores(found[1]), found[1], tuple(moves), divided,
                            p, key)

    def divided(self, node: Node, e: Value) -> Node | None:
        """What divides a product of e by the sum of e."""
        return next((n for n in self.readers.get(node.outputs[0], []) if n.op.name == "div"
                     and n.inputs[0] is node.outputs[0] and self.sums(n.inputs[1], e)), None)

    def _need_no_weights(self, v: Value) -> None:
        """Raises Kept where elementwise ops stand between weights and what they weigh."""
        node = self.made.get(v)
        if node is not None and node.op.loop and not node.op.reduction:
            for x in node.inputs:
                if x.aval.shape == v.aval.shape and self.known(x) is None:
                    if self.weights(x):
                        raise NotFusible(f"{node.op.name} changes the weights")
                    self._need_no_weights(x)


def keeps_columns(move: Node) -> bool:
    x, y = move.inputs[0].aval, move.outputs[0].aval
    if move.op.name == "transpose":
        return bool(move.attrs["axes"][-1] == x.ndim - 1)
    return bool(x.ndim and y.ndim and x.shape[-1] == y.shape[-1])


def _product(r: Reader, node: Node) -> Scores:
    return Scores(node)


def _elementwise_scores(r: Reader, node: Node) -> Scores:
    if node.outputs[0].aval.shape != node.inputs[0].aval.shape:
        raise NotFusible(f"scores are repeated by {node.op.name}")
    return r.scores(node.inputs[0])


def _move(r: Reader, node: Node) -> Scores:
    if not keeps_columns(node):
        raise NotFusible(f"keys do not stay the last axis behind {node.op.name}")
    return r.scores(node.inputs[0]).moved(node)


def _times(r: Reader, node: Node) -> Scores:
    found, other, at = r.either(node)
    c = r.number(other)
    if c is None or not math.isfinite(c) or not c or node.op.name == "div" and at:
        raise NotFusible("scores are multiplied by what is no number: multiply the queries")
    return found.times(c if node.op.name == "mul" else 1 / c)


def _neg(r: Reader, node: Node) -> Scores:
    return r.scores(node.inputs[0]).times(-1.0)


def _plus(r: Reader, node: Node) -> Scores:
    """What is one number for a row changes no weight."""
    found, other, at = r.either(node)
    sign = -1.0 if node.op.name == "sub" and not at else 1.0
    found = found.times(-1.0) if node.op.name == "sub" and at else found
    if not other.aval.ndim or other.aval.shape[-1] == 1 and node.outputs[0].aval.shape[-1] != 1:
        return found
    return found.masked(other, "added", sign)


def _where(r: Reader, node: Node) -> Scores:
    seen, *branches = node.inputs
    for i, (v, other) in enumerate(zip(branches, reversed(branches), strict=True)):
        fill = r.number(other)
        if fill is not None and v.aval.shape == node.outputs[0].aval.shape:
            if not fill <= HIDES:
                raise NotFusible(f"hidden scores are {fill}: -inf hides them wholly")
            kind = ("seen", "hidden")[i]
            found = r.scores(v)
            for x in r.parts(seen, ("bitwise_and", "bitwise_or")[i]):
                found = found.masked(x, kind, fill)
            return found
    raise NotFusible("scores are chosen from two tensors")


def _cap(r: Reader, node: Node) -> Scores:
    found = r.scores(node.inputs[0])
    if found.masks or found.cap:
        raise NotFusible("tanh of scores behind a mask or a cap")
    return Scores(found.product, found.scale, 1.0, (), found.moves)


SCORES: dict[str, Any] = {
    "matmul": _product, "cast": _elementwise_scores, "broadcast_to": _elementwise_scores,
    "transpose": _move, "reshape": _move,
    "mul": _times, "div": _times, "neg": _neg, "add": _plus, "sub": _plus, "where": _where,
    "tanh": _cap}


# --- which matrices rows meet ------------------------------------------------------------------
def moved_rows(x: np.ndarray, moves: Sequence[Node]) -> np.ndarray:
    """An array of a number for each row, as transposes and reshapes move the rows."""
    for m in moves:
        x = x.transpose(m.attrs["axes"][:-1]) if m.op.name == "transpose" else x.reshape(
            m.attrs["shape"][:-1])
    return x


@dataclass(frozen=True)
class Matrices:
    """What the second operand of a product is made of. numbers: of the matrix of `value` that each
    of its own is.  turned: those of `value` have their rows as columns there."""

    value: Value
    numbers: np.ndarray
    turned: bool

    @staticmethod
    def of(r: Reader, v: Value, turned: bool = False) -> Matrices:
        """turned: rows of the product's operand are columns, as those of keys. Heads that are
        repeated are read where they lie once."""
        numbers = np.arange(math.prod(extents_of(v)[:-2])).reshape(extents_of(v)[:-2])
        node, last = r.made.get(v), v.aval.ndim - 1
        if turned and node is not None and node.op.name == "transpose" and (
                node.attrs["axes"] == (*range(last - 1), last, last - 1)):
            v, turned = node.inputs[0], False
        once = None if turned else r.repeated(v)
        if once is None:
            return Matrices(v, numbers, turned)
        x, wide = once
        numbers = np.arange(math.prod(extents_of(x)[:-2])).reshape(extents_of(wide.inputs[0])[:-2])
        numbers = np.broadcast_to(numbers, extents_of(wide.outputs[0])[:-2])
        return Matrices(x, numbers.reshape(extents_of(v)[:-2]), turned)

    def of_rows(self, product: Node) -> np.ndarray:
        """Which matrix each row of a product meets, [*rows]."""
        return np.broadcast_to(self.numbers[..., None], extents_of(product.outputs[0])[:-1])


@dataclass(frozen=True)
class Heads:
    """The axes of X in front of its last two as [B, H]: the first `split`, and the others. group:
    as many neighbours of the H read one matrix of keys and of values."""

    B: int
    H: int
    split: int
    group: int


def _grouped(B: int, H: int, met: Sequence[np.ndarray]) -> int | None:
    """How many neighbours read one matrix; None where it is not a whole number of them."""
    for G in (g for g in range(H, 0, -1) if H % g == 0):
        wanted = np.arange(B)[:, None] * (H // G) + np.arange(H) // G
        if all((x.reshape(B, H) == wanted).all() for x in met):
            return G
    return None


def matrices_met(found: WeightedKeys, k: Matrices, v: Matrices) -> Heads:
    """Raises Kept where rows of one head meet several, or heads do not share them in groups."""
    *lead, S = extents_of(found.operand)[:-1]
    shape = (*lead, S)
    keys = moved_rows(k.of_rows(found.scores.product), found.scores.moves)
    places = moved_rows(np.arange(math.prod(shape)).reshape(shape), found.moves)
    values = np.empty(math.prod(shape), np.int64)
    values[places.reshape(-1)] = np.broadcast_to(v.of_rows(found.node), places.shape).reshape(-1)
    values = values.reshape(shape)
    for x in (keys, values):
        if x.shape != shape or (x != x[..., :1]).any():
            raise NotFusible("queries of one head meet different keys or values")
    for split in sorted(range(len(lead) + 1), key=lambda i: i != 1):
        B, H = math.prod(lead[:split]), math.prod(lead[split:])
        group = _grouped(B, H, (keys[..., 0], values[..., 0]))
        if group is not None and B * H // group == keys.max() + 1 == values.max() + 1:
            return Heads(B, H, split, group)
    raise NotFusible("heads of queries do not read those of keys and values in groups")


# --- masks that are known ----------------------------------------------------------------------
def hidden_rows(r: Reader, masks: Sequence[Mask], S: int, first: int, end: int
                ) -> np.ndarray | None:
    """Where known masks together hide keys from queries [first:end]; None where one is not known,
    or adds what neither hides nor changes nothing."""
    hidden: Any = np.zeros((1, 1), bool)
    for m in masks:
        x = r.rows(m.value, first, end)
        if x is None:
            return None
        if m.kind == "added":
            x = x.astype(np.float64) * m.number
            if not ((x == 0) | (x <= HIDES)).all():
                return None
            hidden = hidden | (x != 0)
        else:
            hidden = hidden | (x == (m.kind == "hidden"))
    return hidden


def is_known(r: Reader, m: Mask, S: int) -> bool:
    """Whether it is one matrix, for all heads, that follows from constants."""
    still = all(keeps_columns(x) and x.inputs[0].aval.shape[-2:] == x.outputs[0].aval.shape[-2:]
                and (x.op.name == "reshape" or x.attrs["axes"][-2] == len(x.attrs["axes"]) - 2)
                for x in m.moves)
    return still and hidden_rows(r, [m], S, 0, min(S, ROWS)) is not None


ENDS = {("seen", "less"): 0, ("seen", "greater"): 1, ("hidden", "greater_equal"): 0,
        ("hidden", "less_equal"): 1}  # where the places of keys stand


def ends_first(r: Reader, masks: Sequence[Mask], scores: Value, split: int) -> list[Mask]:
    """The masks, one that compares places of keys with a number of each sequence as that number,
    in front."""
    for m in masks:
        n = None if m.moves or m.number != -math.inf else _end(r, m, scores, split)
        if n is not None:
            return [Mask(n, "ends", 0.0), *(x for x in masks if x is not m)]
    return list(masks)


def _end(r: Reader, m: Mask, scores: Value, split: int) -> Value | None:
    node = r.made.get(m.value)
    at = None if node is None else ENDS.get((m.kind, node.op.name))
    if node is None or at is None:
        return None
    places, n = r.known(node.inputs[at]), node.inputs[1 - at]
    *shape, T = (1,) * (scores.aval.ndim - n.aval.ndim) + extents_of(n)
    alike = all(d == 1 for d in (T, *shape[split:])) and n.aval.dtype.kind in ("int", "uint")
    keys = extents_of(scores)[-1]
    if not alike or places is None or places.size != keys or places.shape[-1:] != (keys,):
        return None
    whole = shape[:split] == list(extents_of(scores)[:split]) or math.prod(shape) == 1
    return n if whole and (places.reshape(-1) == np.arange(keys)).all() else None


def reach_of(r: Reader, masks: Sequence[Mask], S: int, T: int) -> dict[str, Any] | None:
    """The rule that known masks together are: {} if they hide nothing, causal, a window; else
    None."""
    rules: list[dict[str, Any]] = [{}, {"causal": True}]
    rows, columns = np.arange(S)[:, None] + (T - S), np.arange(T)
    last = hidden_rows(r, masks, S, S - 1, S)
    first = hidden_rows(r, masks, S, 0, 1)
    if last is None or first is None:
        return None
    width = int(np.broadcast_to(~last[-1:], (1, T)).sum())
    if 0 < width < T:
        rules += [{"causal": True, "window": width}, {"window": width}]
    for a in range(0, S, ROWS):
        hidden = hidden_rows(r, masks, S, a, min(S, a + ROWS))
        if hidden is None:
            return None
        behind = rows[a:a + ROWS] - columns
        rules = [x for x in rules if (hidden == _hides(x, behind)).all()]
        if not rules:
            return None
    return rules[0] if S <= T or not rules[0] else None


def _hides(rule: dict[str, Any], behind: np.ndarray) -> np.ndarray:
    hidden = behind < 0 if rule.get("causal") else np.zeros_like(behind, bool)
    return hidden | (abs(behind) >= rule["window"]) if "window" in rule else hidden


__all__ = ["HIDES", "Heads", "NotFusible", "Mask", "Matrices", "Reader", "Scores", "WeightedKeys",
           "ends_first", "is_known", "matrices_met", "moved_rows", "reach_of"]
