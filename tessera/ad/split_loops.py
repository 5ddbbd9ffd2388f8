"""Matmuls that need not wait for what a scan carries: of all iterations at once, in front of the
loop or behind it.

    front   a matmul of elements of sequences and constants, with what it is made of
    behind  a carry that only grows, c' = c + v: the v of all iterations, summed. Where v is a
            matmul that is one matmul, whose contracted axis runs over iterations, too. And results
            that nothing is carried of

A recurrent network's derivative recomputes its cells from saved states, which are known, and adds
the gradients of its weights up: what is left inside are the cotangents of states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..graph import functions as F
from ..graph.ir import Graph, Node, Value, node_effects, producers_of
from ..graph.op import Aval
from ..graph.simplify import remove_dead
from ..graph.trace import apply
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from .batching import batch_graph, stretch

if TYPE_CHECKING:
    from .scan import Loop

SHORTEST = 4  # iterations


@dataclass(frozen=True, eq=False)
class _Split:
    """front, hoisted: nodes in front of the loop, and those of their values that the loop reads.
    grown: numbers of the carries that only grow, with what each grows by.
    made: numbers of the results that are made behind the loop.
    kept: values of the loop that what is behind it reads; behind: its nodes."""

    front: list[Node]
    hoisted: list[Value]
    grown: dict[int, Value]
    made: list[int]
    kept: list[Value]
    behind: list[Node]


def split_of(loop: Loop) -> Callable[..., Sequence[Tensor]] | None:
    """What gives a scan's results with matmuls apart; None where none can be."""
    body = loop.body
    long = isinstance(loop.length, int) and loop.length >= SHORTEST
    if not long or body.captures or not any(n.op.matmul for n in body.nodes) or any(
            node_effects(n) or n.op.host or n.op.makes == "key" for n in body.nodes):
        return None
    loop = replace(loop, body=_with_casts_of_joins(loop))
    found = _partition_body(loop)
    if not found.hoisted and not found.behind:
        return None
    return lambda *xs, **attrs: _run(loop, found, xs)


def _partition_body(loop: Loop) -> _Split:
    body, n = loop.body, loop.n_carry
    carries = body.inputs[1:1 + n]
    made = producers_of(body)
    count = Counter(v for node in body.nodes for v in node.inputs)
    count.update(body.outputs)
    grown = {}
    for i, (c, y) in enumerate(zip(carries, body.outputs[:n], strict=True)):
        node = made.get(y)
        if node is not None and node.op.name == "add" and count[c] == 1 == count[y] and (
                c in node.inputs and node.inputs[0] is not node.inputs[1]):
            v = next(x for x in node.inputs if x is not c)
            if v.aval == c.aval and any(m.op.matmul for m in _ancestors_of([v], made)):
                grown[i] = v
    inside = _ancestors_of([y for i, y in enumerate(body.outputs[:n]) if i not in grown], made)
    apart = [i for i, y in enumerate(body.outputs) if i >= n and any(
        m.op.matmul and m not in inside for m in _ancestors_of([y], made))]
    inside = _ancestors_of([y for i, y in enumerate(body.outputs)
                            if i not in grown and i not in apart], made)
    wanted = [*grown.values(), *(body.outputs[i] for i in apart)]
    late, moving = _reached(loop, body.nodes)
    behind = _with_casts(_ancestors_of(wanted, made) - inside, wanted, made, late | moving)
    inner = {v for m in behind for v in m.outputs}
    kept = dict.fromkeys(v for v in (*(x for m in behind for x in m.inputs), *wanted)
                         if v not in inner)
    if any(carries[i] in kept for i in grown) or not any(m.op.matmul for m in behind):
        grown, apart, behind, kept = {}, [], [], {}
        inside = _ancestors_of(body.outputs, made)
    elif kept:
        behind, kept = _narrow(behind, kept)
        wide = _widened(loop, apart, made)
        apart, behind = [*apart, *wide], [*behind, *wide.values()]
        kept |= dict.fromkeys(m.inputs[0] for m in wide.values())
        inside = _ancestors_of([*(y for i, y in enumerate(body.outputs)
                                  if i not in grown and i not in apart), *kept], made)
    front = _front([m for m in body.nodes if m in inside and late.isdisjoint(m.outputs)], moving,
                   count)
    chosen = set(front)
    rest = [m for m in body.nodes if m in inside and m not in chosen]
    read = {v for m in rest for v in m.inputs} | set(body.outputs) | set(kept)
    hoisted = [v for m in front for v in m.outputs if v in read and v in moving]
    return _Split(front, hoisted, grown, apart, list(kept), behind)


def _narrow(behind: list[Node], kept: dict[Value, None]) -> tuple[list[Node], dict[Value, None]]:
    """The same with casts of what is kept to narrower types in the loop, where nothing else is made
    of it: fewer bytes are kept."""
    readers: dict[Value, list[Node]] = {}
    for m in behind:
        for v in m.inputs:
            readers.setdefault(v, []).append(m)
    found: dict[Value, None] = {}
    gone = set[Node]()
    for v in kept:
        casts = readers.get(v, [])
        narrow = casts and all(m.op.name == "cast" and _bits(m.outputs[0]) < _bits(v)
                               for m in casts)
        gone.update(casts if narrow and len({m.outputs[0].aval for m in casts}) == 1 else ())
        found |= dict.fromkeys([m.outputs[0] for m in casts] if gone.issuperset(casts) and casts
                               else [v])
    return [m for m in behind if m not in gone], found


def _with_casts_of_joins(loop: Loop) -> Graph:
    """The body, with results that are values of a narrower type joined and then cast in place of
    cast and then joined."""
    body, nodes = loop.body, list[Node]()
    made = producers_of(body)
    results = set(body.outputs[loop.n_carry:])
    for node in body.nodes:
        casts = [m for v in node.inputs if (m := made.get(v)) is not None and m.op.name == "cast"]
        sources = {m.inputs[0].aval.type for m in casts}
        if node.op.name == "concatenate" and results.issuperset(node.outputs) and len(
                sources) == 1 and len(casts) == len(node.inputs) and all(map(_widens, casts)):
            whole = Value(Aval(node.outputs[0].aval.shape, sources.pop()))
            nodes += [Node(node.op, tuple(m.inputs[0] for m in casts), node.attrs, (whole,),
                           node.where),
                      Node(casts[0].op, (whole,), casts[0].attrs, node.outputs, casts[0].where)]
        else:
            nodes.append(node)
    return replace(body, nodes=tuple(nodes))


def _widens(cast: Node) -> bool:
    return _bits(cast.inputs[0]) < _bits(cast.outputs[0])


def _widened(loop: Loop, apart: Sequence[int], made: dict[Value, Node]) -> dict[int, Node]:
    """By number, the casts to wider types that are results: they are made behind the loop."""
    found = {i: made[y] for i, y in enumerate(loop.body.outputs)
             if i >= loop.n_carry and i not in apart and y in made}
    return {i: m for i, m in found.items()
            if m.op.name == "cast" and _widens(m)}


def _bits(v: Value) -> int:
    return v.aval.dtype.bits


def _reached(loop: Loop, nodes: Iterable[Node]) -> tuple[set[Value], set[Value]]:
    """What depends on carries, and of the rest what depends on iterations."""
    body = loop.body
    _, elements, _ = loop.split(body.inputs[1:])
    late, moving = set(body.inputs[1:1 + loop.n_carry]), {body.inputs[0], *elements}
    for m in nodes:
        if late.intersection(m.inputs):
            late.update(m.outputs)
        elif moving.intersection(m.inputs):
            moving.update(m.outputs)
    return late, moving


def _ancestors_of(values: Iterable[Value], made: dict[Value, Node],
                  found: set[Node] | None = None) -> set[Node]:
    """The nodes that values depend on; added to those that are known to be of them."""
    found = set() if found is None else found
    todo = [made[v] for v in values if v in made]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [made[v] for v in node.inputs if v in made]
    return found


def _with_casts(behind: set[Node], grown: Iterable[Value], made: dict[Value, Node],
                varying: set[Value]) -> list[Node]:
    """With the casts that its operands are, of which what is cast is kept, and with what is the
    same in all iterations."""
    nodes = set(behind)
    todo = [v for m in behind for v in m.inputs] + list(grown)
    while todo:
        node = made.get(todo.pop())
        if node is not None and node not in nodes and (
                node.op.name == "cast" or varying.isdisjoint(node.outputs)):
            nodes.add(node)
            todo += node.inputs
    return [m for m in dict.fromkeys(made.values()) if m in nodes]


def _front(free: list[Node], moving: set[Value], count: Counter[Value]) -> list[Node]:
    """Of the nodes that no carry reaches matmuls that some sequence does, with all in front of
    them, and what alone is made of a result."""
    made = {v: m for m in free for v in m.outputs}
    matmuls = [m for m in free if m.op.matmul and moving.intersection(m.outputs)]
    chosen = _ancestors_of([v for m in matmuls for v in m.outputs], made)
    if not matmuls:
        return []
    for m in free:
        results = [v for v in m.inputs if v in made and made[v] in chosen and v in moving]
        if m not in chosen and len(results) == 1 and count[results[0]] == 1 and (
                m.op.loop is not None or m.op.converts):
            rest = [v for v in m.inputs if v not in results]
            if not moving.intersection(rest):
                _ancestors_of(m.outputs, made, chosen)
    return [m for m in free if m in chosen]


# --- what runs ------------------------------------------------------------------------------------
def _run(loop: Loop, found: _Split, xs: Sequence[Tensor]) -> list[Tensor]:
    T, body, n = loop.length, loop.body, loop.n_carry
    carry, seqs, consts = loop.split(xs)
    in_carry, in_seqs, in_consts = loop.split(body.inputs[1:])
    rows = {body.inputs[0]: F.arange(T, dtype="i64"), **dict(zip(in_seqs, seqs, strict=True))}
    fixed = dict(zip(in_consts, consts, strict=True))
    made = _batched(found.front, found.hoisted, rows, fixed, T, body.name)
    rows |= zip(found.hoisted, made, strict=True)
    left = [i for i in range(n) if i not in found.grown]
    plain = [i for i in range(n, len(body.outputs)) if i not in found.made]
    more = [v for v in found.kept if v not in rows and v not in fixed]
    hoisted, hoisted_nodes = list(found.hoisted), set(found.hoisted)
    inner = Graph(
        body.name,
        (body.inputs[0], *(in_carry[i] for i in left), *in_seqs, *hoisted, *in_consts), (),
        tuple(m for m in body.nodes if hoisted_nodes.isdisjoint(m.outputs)),
        (*(body.outputs[i] for i in (*left, *plain)), *more))
    rest = replace(loop, body=remove_dead(inner), n_carry=len(left), n_xs=len(seqs) + len(hoisted))
    given = [*(carry[i] for i in left), *seqs, *made, *consts]
    out = list(rest.run(given))
    ends = dict(zip((*left, *plain), out, strict=False))
    rows |= zip(more, out[len(ends):], strict=True)
    made_by = {v: m for m in found.behind for v in m.outputs}
    results = [body.outputs[i] for i in found.made]
    wanted = dict.fromkeys([*(x for v in found.grown.values() for x in _summed(v, made_by)),
                            *results])
    late = [v for v in wanted if v not in rows]
    rows |= zip(late, _batched(found.behind, late, rows, fixed, T, body.name), strict=True)
    ends |= {i: carry[i] + _sum(v, rows, made_by) for i, v in found.grown.items()}
    ends |= zip(found.made, map(rows.__getitem__, results), strict=True)
    return [ends[i] for i in range(len(body.outputs))]


def _batched(nodes: Sequence[Node], wanted: Sequence[Value], rows: dict[Value, Tensor],
             fixed: dict[Value, Tensor], size: int, name: str) -> list[Tensor]:
    """Values of all iterations."""
    if not wanted:
        return []
    graph = remove_dead(Graph(name, (*rows, *fixed), (), tuple(nodes), tuple(wanted)))
    flags = [True] * len(rows) + [False] * len(fixed)
    made, which = batch_graph(graph, size, [*rows.values(), *fixed.values()], flags)
    return [stretch(y, size, b) for y, b in zip(made, which, strict=True)]


# --- sums over all iterations of values behind a loop ---------------------------------------------
def _summed(v: Value, made: dict[Value, Node]) -> list[Value]:
    """The values of all iterations that the sum of v is made of."""
    node = made.get(v)
    if node is not None and _swaps(node):
        return _summed(node.inputs[0], made)
    if node is not None and _is_product(node):
        return [_unswapped(x, made)[0] for x in node.inputs]
    return [v]


def _sum(v: Value, rows: dict[Value, Tensor], made: dict[Value, Node]) -> Tensor:
    """rows: [T, ...] of what it is made of."""
    node = made.get(v)
    if node is not None and _swaps(node):
        return F.swapaxes(_sum(node.inputs[0], rows, made), 0, 1)
    if node is not None and _is_product(node):
        a, b = (_contracted(x, 1 - i, rows, made) for i, x in enumerate(node.inputs))
        return apply(node.op, F.swapaxes(a, 0, 1), b, **node.attrs)
    return F.sum(rows[v], axis=0)


def _contracted(v: Value, axis: int, rows: dict[Value, Tensor], made: dict[Value, Node]) -> Tensor:
    """[T * K, ...] of a matrix whose axis K is contracted."""
    v, swapped = _unswapped(v, made)
    x = F.swapaxes(rows[v], 1, 2) if axis != swapped else rows[v]
    return F.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


def _unswapped(v: Value, made: dict[Value, Node]) -> tuple[Value, bool]:
    """What v is, or is the transpose of."""
    swapped = False
    while (node := made.get(v)) is not None and _swaps(node):
        v, swapped = node.inputs[0], not swapped
    return v, swapped


def _is_product(node: Node) -> bool:
    return node.op.name == "matmul" and all(x.aval.ndim == 2 for x in node.inputs)


def _swaps(node: Node) -> bool:
    return node.op.name == "transpose" and tuple(node.attrs["axes"]) == (1, 0)


__all__ = ["split_of"]
