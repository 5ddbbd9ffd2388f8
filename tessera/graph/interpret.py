"""The meaning of a graph: every node in order, by its op's NumPy meaning, shown to observers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .. import hooks
from ..errors import TesseraError
from ..runtime.host_memory import memory_id
from ..tile.ir.errors import KernelError, Site
from .ir import Graph, Node, Value
from .trace import at_line


def interpret(graph: Graph, arrays: Sequence[np.ndarray],
              *also: hooks.NodeObserver) -> list[np.ndarray]:
    """The meaning of a graph: every node in order, shown to the observers, `also` first."""
    env: dict[Value, np.ndarray] = dict(zip(graph.inputs, arrays, strict=True))
    env.update((v, t.array) for v, t in graph.captures)
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            inputs = tuple(env[v] for v in node.inputs)
            if "collective" in node.op.effects:
                for show in hooks.sending:
                    show(node.op, node.where, node.inputs, inputs)
            if node.op.graph_attrs:
                for sentinel in hooks.sentinels:
                    sentinel.enters(node)
            made = call_node(node, inputs)
            env.update(zip(node.outputs, made, strict=True))
            for observe in (*also, *hooks.nodes, *(s.observe for s in hooks.sentinels)):
                observe(node, inputs, made)
    given = [*arrays, *(t.array for _, t in graph.captures)]
    return list(own_memory(map(env.__getitem__, graph.outputs), given))


def own_memory(results: Iterable[np.ndarray], others: Iterable[np.ndarray]) -> tuple[np.ndarray,
                                                                                     ...]:
    """Results in memory of their own: those that lie in an argument or in another result are
    copied, and those that repeat elements."""
    taken = {memory_id(a) for a in others}
    out = []
    for a in results:
        at = memory_id(a)
        out.append(a.copy() if at in taken or not a.flags.writeable else a)
        taken.add(at)
    return tuple(out)


def locate(err: TesseraError, node: Node) -> None:
    """An error of a node is one at its line; one in a kernel has a line there, and says from where
    the kernel was called."""
    if err.located:  # the innermost node knows best: a scan's body, not the scan
        return
    if isinstance(err, KernelError) and isinstance(err.where, Site):
        err.also += (("called", node.where),) if node.where is not None else ()
    else:
        err.where = node.where or err.where
    err.located = True


@contextmanager
def located(node: Node) -> Iterator[None]:
    try:
        yield
    except TesseraError as err:
        locate(err, node)
        raise


def call_node(node: Node, inputs: tuple) -> tuple[np.ndarray, ...]:
    try:
        if node.op.effects:  # its messages, and other ranks, name the line
            with at_line(node.where):
                made = node.op.ref(*inputs, **node.attrs)
        else:
            made = node.op.ref(*inputs, **node.attrs)
    except TesseraError as err:  # `with located(node)` takes as long as a small op
        locate(err, node)
        raise
    return tuple(map(np.asarray, made)) if node.op.multi else (np.asarray(made),)
