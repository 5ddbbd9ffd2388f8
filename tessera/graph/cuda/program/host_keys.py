"""What a call computes on the host before its kernels start: the keys of random numbers.

A key follows from the seed, the step and the number of a stream; others are folded from it. So
whatever depends on keys and constants alone, and is small, is computed at each call, and the
kernels read it as they read arguments. Bits are drawn in the kernels:

    bits at indices (i, key) ->  random_bits of i and the words, elementwise
    random_bits(key)         ->  random_bits(word 0 of key, word 1), elementwise
    cast_stochastic(x, key)  ->  cast_stochastic(x, word 0 of key, word 1), elementwise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property

import numpy as np

from ....dims import size_of
from ....lazy_dataclass import dataclass
from ....numerics.philox import fold_in_each
from ....numerics.random_state import next_step
from ...ir import Graph, Node, Value
from ...ops.convert import CAST_STOCHASTIC
from ...ops.random import FOLD_IN, RNG_KEY, keys_ahead
from ...ops.shape import RESHAPE, SLICE, slices_of
from ...schedule.library_call import LibraryCall, library_call
from ...simplify import Rewriter
from ..kernels.spell import no_kernel
from ..passes.packed_values import ROUND

LOW = np.uint64(0xFFFFFFFF)
SMALL = 4096  # elements of a value that the host computes at each call
BITS = library_call("random_bits", makes="bits",
                    tile="tile.random_bits({index}, seed=({0}, {1}), runs={runs})")
BITS_AT = library_call("random_bits_at", tile="tile.random_bits({0}, seed=({1}, {2}))")
CAST = library_call("cast_stochastic", converts=True,
                    tile="tile.cast({0}, {to}, bits=tile.random_bits({index}, seed=({1}, {2}), "
                         "runs={runs}))")


def open_keys(graph: Graph) -> Graph:
    """Random bits of two numbers, the words of a key, as a loop reads them."""
    rw = Rewriter()
    for node in graph.nodes:
        rw.where = node.where
        if node.op.makes in ("bits", "bits_at") or node.op in (CAST_STOCHASTIC, ROUND):
            *xs, key = node.inputs
            words = (_word(rw, key, i) for i in (0, 1))
            op = BITS_AT if node.op.makes == "bits_at" else {
                CAST_STOCHASTIC: CAST, ROUND: ROUND}.get(node.op, BITS)
            if op is not BITS_AT:
                _require_exact(node)
            attrs = node.attrs if op is ROUND else {}
            node = Node(op, (*xs, *words), attrs, node.outputs, node.where)
        rw.add(node)
    return replace(graph, nodes=tuple(rw.nodes))


def _require_exact(node: Node) -> None:
    """A fraction is cut off an f32: what f32 does not have exactly would round twice."""
    for v in node.inputs[:-1]:
        dtype = v.aval.dtype
        if dtype.bits > (32 if dtype.kind == "float" else 16):
            raise no_kernel(node, f"kernels round f32 at random, and f32 does not hold every "
                            f"{dtype}; cast to f32 first")
    out = node.outputs[0].aval.dtype
    if node.op is CAST_STOCHASTIC and out.kind == "float" and out.bits > 16:
        raise no_kernel(node, f"{out} is no narrow type")


def _word(rw: Rewriter, key: Value, i: int) -> Value:
    word = rw.emit("slice", key, starts=(i,), stops=(i + 1,), steps=(1,))
    return rw.emit("reshape", word, shape=())


@dataclass(frozen=True, eq=False)
class Draws:
    """nodes: what is computed at each call.  known: constants that they read.

    random: whether a call takes a step of the random state.  values: what kernels read.
    """

    random: bool
    nodes: tuple[Node, ...] = ()
    known: dict[Value, np.ndarray] = field(default_factory=dict)
    values: tuple[Value, ...] = ()

    @cached_property
    def steps(self) -> bool:
        """Whether values differ from step to step."""
        return any(node.op is RNG_KEY for node in self.nodes)

    def run(self) -> list[np.ndarray]:
        """The values of the next call, in their order."""
        if self.random:
            next_step()
        return [made[0] for made in self.ahead(1)]

    def ahead(self, count: int) -> list[np.ndarray]:
        """The values at this step and at those behind it: [count, ...] of each."""
        env = {v: a[None] for v, a in self.known.items()}  # [1, ...] where all steps have the same
        for node in self.nodes:
            env.update(zip(node.outputs, _ahead(node, [env[v] for v in node.inputs], count),
                           strict=True))
        made = [env[v] for v in self.values]
        return [np.ascontiguousarray(np.broadcast_to(a, (count, *a.shape[1:]))) for a in made]


def _ahead(node: Node, given: Sequence[np.ndarray], count: int) -> Sequence[np.ndarray]:
    """The results of a node at steps, of operands at them. Words of keys, which most are, take no
    more of many steps than of one."""
    op, attrs = node.op, node.attrs
    if op is RNG_KEY:
        return [keys_ahead(attrs["stream"], count)]
    if op is SLICE:
        return [given[0][:, *slices_of(**attrs)]]
    if op is RESHAPE:
        return [given[0].reshape(-1, *attrs["shape"])]
    rows = max(map(len, given), default=1)
    if op is FOLD_IN:
        keys, data = np.broadcast_to(given[0], (rows, 2)), given[1].astype(np.uint64) & LOW
        return [fold_in_each(keys, np.broadcast_to(data, rows))]
    made = [_results(node, [a[i % len(a)] for a in given]) for i in range(rows)]
    return [np.stack(results) for results in zip(*made, strict=True)]


def _results(node: Node, given: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    made = node.op.ref(*given, **node.attrs)
    return made if node.op.multi else (made,)


def split_draws(graph: Graph, known: dict[Value, np.ndarray],
                random: bool) -> tuple[Graph, Draws]:
    """The graph without what the host computes at each call, and that."""
    mine: list[Node] = []
    rest: list[Node] = []
    made: set[Value] = set()
    for node in graph.nodes:
        own = _on_host(node) and all(v in made or v in known for v in node.inputs)
        (mine if own else rest).append(node)
        if own:
            made.update(node.outputs)
    read = [v for n in rest for v in n.inputs] + list(graph.outputs)
    values = tuple(v for v in dict.fromkeys(read) if v in made)
    constants = {v: known[v] for n in mine for v in n.inputs if v in known}
    left = replace(graph, nodes=tuple(rest))
    return left, Draws(random, tuple(mine), constants, values)


def _on_host(node: Node) -> bool:
    small = all(all(isinstance(d, int) for d in v.aval.shape) and size_of(v.aval.shape) <= SMALL
                for v in node.outputs)
    return not isinstance(node.op, LibraryCall) and not node.op.graph_attrs and small and (
        not node.op.effects - {"random"})


__all__ = ["Draws", "open_keys", "split_draws"]
