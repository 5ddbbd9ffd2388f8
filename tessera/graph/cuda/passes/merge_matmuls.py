"""Matmuls of one operand as one: x a and x b are parts of x [a b].

    x a + c, x b + d      # are the parts of x [a b] + [c d]

Queries, keys and values of three weights, and the gradients of these, are as many matmuls of the
same rows. Each ends with a wave of blocks that leaves multiprocessors idle; together they have one
such wave. What is done to each of them alike, with a row of its own, goes along, so that it stays
an epilogue. The operands are joined where they are made: a cast of a weight, or the gradient of
attention, writes its part. Which matmuls go together is a matter of the estimated time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ....kernels.matmul_blocks import MatmulExtents, short_sums
from ....lazy_dataclass import dataclass
from ....runtime.generations import Generation, WarpgroupMatmul
from ...ir import Graph, Node, Value, producers_of, readers_of, value_bytes
from ...ops.kernel import KERNEL
from ...schedule.library_call import LibraryCall
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter
from .data_movement import is_plain_loop, is_row
from .library_ops import merged_line, quickest_blocks, swaps_last
from .replace_nodes import Replacement, replace_nodes

GAIN = 0.03  # of the time: estimates are not better
BOX = 1024  # bits: a box of TMA with its swizzle, of which parts of rows are multiples
NARROW = 16  # bits of a result that leaves with its epilogue
# Parts of a joined result stay in memory until the last of them has been read: those of more bytes
# are not joined with one that is read so many nodes later, as the backward pass is.
LATER, HELD_BYTES = 64, 1 << 20


@dataclass(frozen=True)
class _Chain:
    """A matmul and what alone reads it, one after another."""

    nodes: tuple[Node, ...]

    @property
    def product(self) -> Node:
        return self.nodes[0]

    @property
    def end(self) -> Value:
        return self.nodes[-1].outputs[0]


class _Readers:
    """Who reads the values of a graph."""

    def __init__(self, graph: Graph):
        self.results = set(graph.outputs)
        self.maker = producers_of(graph)
        self.place = {n: i for i, n in enumerate(graph.nodes)}
        self.nodes = readers_of(graph)

    def only(self, v: Value) -> Node | None:
        """What reads a value, once, where nothing else does."""
        found = self.nodes.get(v, [])
        alone = len(found) == 1 and v not in self.results and found[0].inputs.count(v) == 1
        return found[0] if alone and len(found[0].outputs) == 1 else None

    def becomes_result(self, v: Value) -> bool:
        """Whether a value is a result of the graph, as it is or reshaped."""
        return v in self.results or any(self.becomes_result(n.outputs[0]) for n in self.nodes.get(
            v, ()) if n.op.name == "reshape")

    def last_use(self, v: Value) -> int:
        """The place of the last node that reads a value, where it lies."""
        return max((self.last_use(n.outputs[0]) if n.op.view else self.place[n]
                    for n in self.nodes.get(v, ())), default=len(self.place))

    def made_of(self, values: Iterable[Value], nodes: Sequence[Node]) -> bool:
        """Whether values are made of what some nodes make."""
        first, seen, work = min(self.place[n] for n in nodes), set[Node](), list(values)
        while work:
            made = self.maker.get(work.pop())
            if made is None or made in seen or self.place[made] < first:
                continue
            if made in nodes:
                return True
            seen.add(made)
            work += made.inputs
        return False


# --- which go together --------------------------------------------------------------------------
def _sharing(graph: Graph, readers: _Readers) -> list[list[Node]]:
    """Matmuls of the same left operand and of rows of it with narrow matrices, none of which is
    made of another."""
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op.name != "matmul":
            continue
        a, b = (v.aval for v in node.inputs)
        if a.ndim == b.ndim == 2 and max(a.dtype.bits, b.dtype.bits) <= NARROW and not (
                b.dtype.packed) and all(isinstance(n, int) and n for n in (*a.shape, *b.shape)):
            key = node.inputs[0], b.type, node.outputs[0].aval.type, *node.attrs.items()
            alike.setdefault(key, []).append(node)
    found = []
    for some in alike.values():
        apart = some[:1]
        apart += [n for n in some[1:] if not readers.made_of(n.inputs, some)]
        if len(apart) > 1:
            found.append(apart)
    return found


def _pays(chains: Sequence[_Chain], chip: WarpgroupMatmul | None) -> bool:
    """Whether the joined matmul takes less time than each by itself."""
    products = [c.product for c in chains]
    (M, K), narrow = extents_of(products[0].inputs[0]), products[0].inputs[0].aval.type
    widths, bits = [extents_of(n.outputs[0])[1] for n in products], narrow.dtype.bits

    def us(n: int) -> float:
        return quickest_blocks(MatmulExtents(M, n, K, bits, NARROW, short=short_sums(narrow)),
                               narrow, chip)[0].us

    return not any(n * bits % BOX for n in widths) and (
        us(sum(widths)) < (1 - GAIN) * sum(map(us, widths)))


def _copies_nothing(chains: Sequence[_Chain], readers: _Readers) -> bool:
    """Whether the operands are made here, or lie side by side already, and no part is a result,
    which has memory of its own."""
    right = [c.product.inputs[1] for c in chains]
    there = _common_value(right, readers.maker) is not None or all(
        _is_made_anywhere(v, readers) for v in right)
    return there and not any(readers.becomes_result(c.end) for c in chains)


def _can_lie_apart(chains: Sequence[_Chain], readers: _Readers) -> bool:
    """Whether heads and the like, into which rows are cut, lie in joined rows as they would alone:
    the whole is a multiple of each."""
    whole = sum(extents_of(c.product.outputs[0])[1] for c in chains)
    cuts = {n.outputs[0].aval.shape[-1] for c in chains for n in readers.nodes.get(c.end, ())
            if n.op.name == "reshape"}
    makers = [readers.maker.get(c.product.inputs[1]) for c in chains]
    cuts |= {m.inputs[0].aval.shape[-1] for m in makers if m is not None
             and m.op.name == "reshape" and m.inputs[0].aval.ndim}
    return all(isinstance(n, int) and n and whole % n == 0 for n in cuts)


def _is_made_anywhere(v: Value, readers: _Readers) -> bool:
    """Whether a value is made by a kernel that can write it where it belongs."""
    made = readers.maker.get(v)
    while made is not None and made.op.view and value_bytes(made.inputs[0]) == value_bytes(v):
        v = made.inputs[0]
        made = readers.maker.get(v)
    return made is not None and v not in readers.results and (
        is_plain_loop(made) or made.op is KERNEL or isinstance(made.op, LibraryCall))


# --- what goes along ----------------------------------------------------------------------------
def _chains(products: Sequence[Node], readers: _Readers) -> list[_Chain]:
    """The matmuls with what is done to all of them alike, up to where it is narrow; none where it
    is not: a wide result would not leave with what follows."""
    chains, end = [_Chain((n,)) for n in products], 0
    for _ in range(8):
        if chains[0].end.aval.dtype.bits <= NARROW:
            end = len(chains[0].nodes)
        after = [readers.only(c.end) for c in chains]
        if not _are_alike(chains, after, readers):
            break
        chains = [_Chain((*c.nodes, n)) for c, n in zip(chains, after, strict=True) if n]
    return [_Chain(c.nodes[:end]) for c in chains] if end else []


def _are_alike(chains: Sequence[_Chain], after: Sequence[Node | None], readers: _Readers) -> bool:
    """Whether the next ops are one op on the joined values: the same, each element by itself, with
    operands that are one number for all or a row for each."""
    first = after[0]
    if first is None or len(set(after)) < len(after):
        return False
    pairs = [(c, n) for c, n in zip(chains, after, strict=True) if n is not None and (
        n.op is first.op and len(n.inputs) == len(first.inputs))]
    if len(pairs) < len(chains):
        return False
    if first.op.name == "reshape":
        return all(_keeps_rows(n, first) for _, n in pairs)
    if not is_plain_loop(first) or any(n.attrs != first.attrs or n.outputs[0].aval.shape !=
                                       c.end.aval.shape for c, n in pairs):
        return False
    rest = [v for c, n in pairs for v in n.inputs if v is not c.end]
    return all(_are_rows([n.inputs[i] for _, n in pairs], chains) for i in range(len(first.inputs))
               ) and not readers.made_of(rest, [c.product for c in chains])


def _are_rows(operands: Sequence[Value], chains: Sequence[_Chain]) -> bool:
    """Whether operands of the same place are the chains, one number, or a row for each chain."""
    first, ends = operands[0], [c.end for c in chains]
    if operands == ends or (operands == [first] * len(ends) and prod(extents_of(first)) == 1):
        return True
    return all(v.aval.type == first.aval.type and v.aval.shape[:-1] == first.aval.shape[:-1]
               and v.aval.shape[-1:] == end.aval.shape[-1:] and is_row(v, end)
               for v, end in zip(operands, ends, strict=True))


def _keeps_rows(node: Node, other: Node) -> bool:
    """Whether a reshape leaves the last axis, and the others as another reshape does."""
    x, y = node.inputs[0].aval.shape, node.outputs[0].aval.shape
    return x[-1:] == y[-1:] and y[:-1] == other.outputs[0].aval.shape[:-1]


def _of_one_life(chains: Sequence[_Chain], readers: _Readers) -> list[list[_Chain]]:
    """The chains in groups whose results are read for the last time about together, in order."""
    groups: list[list[_Chain]] = []
    last = {c: readers.last_use(c.end) for c in chains}
    for c in sorted(chains, key=lambda c: last[c]):
        held = sum(value_bytes(x.end) for x in groups[-1]) if groups else 0
        if not groups or last[c] - last[groups[-1][0]] > LATER and held > HELD_BYTES:
            groups.append([])
        groups[-1].append(c)
    return [[c for c in chains if c in g] for g in groups if len(g) > 1]


# --- the joined matmul --------------------------------------------------------------------------
def _common_value(values: Sequence[Value], maker: Mapping[Value, Node]) -> tuple[Value, int,
                                                                                 int] | None:
    """The value of which others are columns [begin:end], side by side."""
    source, begin, at = None, 0, None
    for v in values:
        cut = maker.get(v)
        if cut is None or cut.op.name != "slice" or set(cut.attrs["steps"]) != {1}:
            return None
        x, starts, stops = cut.inputs[0], cut.attrs["starts"], cut.attrs["stops"]
        rows = all(b == 0 and e == n for b, e, n in zip(
            starts[:-1], stops[:-1], x.aval.shape[:-1], strict=True))
        if not rows or at not in (None, starts[-1]) or source not in (None, x):
            return None
        begin, source, at = begin if at is not None else starts[-1], x, stops[-1]
    return None if source is None or at is None else (source, begin, at)


def _side_by_side(rw: Rewriter, values: Sequence[Value]) -> Value:
    """Values joined along the last axis; of transposed ones what lies there is."""
    there = _common_value(values, rw.producer)
    if there is not None:
        source, begin, end = there
        return source if (begin, end) == (0, extents_of(source)[-1]) else columns_of(
            rw, source, begin, end)
    turns = [rw.made_by(v, "transpose") for v in values]
    if len(values[0].aval.shape) == 2 and all(
            t is not None and swaps_last(t.attrs["axes"]) for t in turns):
        whole = rw.emit("concatenate", *(t.inputs[0] for t in turns if t), axis=0)
        return rw.emit("transpose", whole, axes=(1, 0))
    return rw.emit("concatenate", *values, axis=len(values[0].aval.shape) - 1)


def _replacement(chains: Sequence[_Chain]) -> Replacement:
    nodes = tuple(n for c in chains for n in c.nodes)
    made = {v for n in nodes for v in n.outputs}
    reads = tuple(v for n in nodes for v in n.inputs if v not in made)

    def write(rw: Rewriter) -> None:
        whole, at = _merged_matmul(rw, chains), 0
        for c in chains:
            end = at + extents_of(c.end)[-1]
            rw.where = c.nodes[-1].where
            rw.env[c.end] = columns_of(rw, whole, at, end)
            at = end

    return Replacement(nodes, reads, write)


def columns_of(rw: Rewriter, x: Value, begin: int, end: int) -> Value:
    """x[..., begin:end]"""
    shape = extents_of(x)
    return rw.emit("slice", x, starts=(0,) * (len(shape) - 1) + (begin,),
                   stops=(*shape[:-1], end), steps=(1,) * len(shape))


def _merged_matmul(rw: Rewriter, chains: Sequence[_Chain]) -> Value:
    first = chains[0].product
    rw.where = merged_line(first.where, [c.product for c in chains])
    right = _side_by_side(rw, [rw.env[c.product.inputs[1]] for c in chains])
    whole = rw.emit("matmul", rw.env[first.inputs[0]], right, **first.attrs)
    for nodes in zip(*(c.nodes[1:] for c in chains), strict=True):
        rw.where = merged_line(nodes[0].where, list(nodes))
        whole = _step(rw, nodes, chains, whole)
    return whole


def _step(rw: Rewriter, nodes: Sequence[Node], chains: Sequence[_Chain], whole: Value) -> Value:
    first = nodes[0]
    if first.op.name == "reshape":
        shape = (*extents_of(first.outputs[0])[:-1], extents_of(whole)[-1])
        return rw.emit("reshape", whole, shape=shape)
    made = {n.outputs[0] for n in chains[0].nodes}
    operands = []
    for i, v in enumerate(first.inputs):
        if v in made:
            operands.append(whole)
        elif prod(extents_of(v)) == 1 and all(n.inputs[i] is v for n in nodes):
            operands.append(rw.env[v])
        else:
            operands.append(_side_by_side(rw, [rw.env[n.inputs[i]] for n in nodes]))
    return rw.emit(first.op.name, *operands, **first.attrs)


def merge_matmuls(graph: Graph, chip: Generation) -> Graph:
    """The graph with matmuls of the same left operand as one, where that takes less time."""
    readers, found = _Readers(graph), list[Replacement]()
    for products in _sharing(graph, readers):
        for chains in _of_one_life(_chains(products, readers), readers):
            if _can_lie_apart(chains, readers) and _copies_nothing(chains, readers) and _pays(
                    chains, chip.warpgroup_matmul):
                found.append(_replacement(chains))
    return replace_nodes(graph, found)


__all__ = ["columns_of", "merge_matmuls"]
