"""How an op that holds a graph is run again and again by a host: what a record says of its loop."""

from __future__ import annotations

from collections.abc import Sequence

from ..lazy_dataclass import dataclass
from .ir import Graph

LONG = 5_000  # ops of a loop that is written out: planning them takes a quarter of a second


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
    def order(self) -> range:
        """The numbers of the iterations, where they are known."""
        assert self.length is not None
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)

    def split(self, inputs: Sequence) -> tuple[list, list, list]:
        """(carries, sequences, constants)"""
        a, b = self.carries, self.carries + self.sequences
        return list(inputs[:a]), list(inputs[a:b]), list(inputs[b:])


__all__ = ["HostLoop"]
