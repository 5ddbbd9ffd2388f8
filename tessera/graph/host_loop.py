"""How an op that holds a graph is run again and again by a host: what a record says of its loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..lazy_dataclass import dataclass
from .ir import Graph, Node, node_effects, subgraphs

LONG = 5_000  # ops of a loop that is written out: planning them takes a quarter of a second
LAUNCHED = 500  # of one whose iterations can be launches of a program


@dataclass(frozen=True)
class HostLoop:
    """body: (index, carries, elements, constants) -> (carries, results), which are stacked.

    carries, sequences: how many of the op's inputs are each, in this order; the rest are constants.
    length: None where `test`, of the same inputs, says whether there is another iteration.
    """

    body: Graph
    carries: int
    sequences: int = 0
    length: int | None = None
    reverse: bool = False
    test: Graph | None = None

    @property
    def is_long(self) -> bool:
        """Whether it has too many ops to be written out."""
        return self.length is None or self.length * len(self.body.nodes) > LONG

    @property
    def is_launched(self) -> bool:
        """Whether its iterations are better launched than written out: a body alone is planned, and
        for few launches. What runs in libraries or on the host is in the way of a graph, and keys
        that a body draws by are those of all iterations at once where it is written out."""
        return self.length is not None and self.length * len(self.body.nodes) > min(
            LAUNCHED, LONG) and not any(
                n.op.library or n.op.host or n.op.makes == "key" or node_effects(n)
                for n in _nodes(self.body))

    @property
    def order(self) -> range:
        """The numbers of the iterations, where they are known."""
        assert self.length is not None
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)

    def split(self, inputs: Sequence) -> tuple[list, list, list]:
        """(carries, sequences, constants)"""
        a, b = self.carries, self.carries + self.sequences
        return list(inputs[:a]), list(inputs[a:b]), list(inputs[b:])


def _nodes(graph: Graph) -> Iterator[Node]:
    """With those of the graphs that they hold."""
    for node in graph.nodes:
        yield node
        for held in subgraphs(node):
            yield from _nodes(held)


__all__ = ["HostLoop"]
