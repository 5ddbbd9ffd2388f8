"""What a call computes on the host before its kernels start: the keys of random numbers.

A key follows from the seed, the step and the number of a stream; others are folded from it. So
whatever depends on keys and constants alone, and is small, is computed at each call, and the
kernels read it as they read arguments. Bits are drawn in the kernels:

    bits at indices (i, key) ->  random_bits of i and the words, elementwise
    random_bits(key)         ->  random_bits(word 0 of key, word 1), elementwise
    cast_stochastic(x, key)  ->  cast_stochastic(x, word 0 of key, word 1), elementwise
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from ...dims import size_of
from ...lazy_dataclass import dataclass
from ...numerics.random_state import next_step
from ..ir import Graph, Node, Value
from ..ops.convert import CAST_STOCHASTIC
from ..schedule.library_call import LibraryCall, library_call
from ..simplify import Rewriter
from .packed_values import ROUND
from .spell import no_kernel

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
    return Graph(graph.name, graph.inputs, graph.captures, tuple(rw.nodes), graph.outputs)


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

    def run(self) -> list[np.ndarray]:
        """The values of the next call, in their order."""
        if self.random:
            next_step()
        env = dict(self.known)
        for node in self.nodes:
            made = node.op.ref(*(env[v] for v in node.inputs), **node.attrs)
            env.update(zip(node.outputs, made if node.op.multi else (made,), strict=True))
        return [np.ascontiguousarray(env[v]) for v in self.values]


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
    left = Graph(graph.name, graph.inputs, graph.captures, tuple(rest), graph.outputs)
    return left, Draws(random, tuple(mine), constants, values)


def _on_host(node: Node) -> bool:
    small = all(all(isinstance(d, int) for d in v.aval.shape) and size_of(v.aval.shape) <= SMALL
                for v in node.outputs)
    return not isinstance(node.op, LibraryCall) and not node.op.graph_attrs and small and (
        not node.op.effects - {"random"})


__all__ = ["Draws", "open_keys", "split_draws"]
