"""Where an element of a rank's part lies in the whole tensor, for people who read a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.dims import show_shape
from tessera.errors import SourceLine

from ...lazy_dataclass import dataclass
from ..partition import extents, index_in_whole, local_shape
from .partitioned_steps import PartitionedOp
from .propagate import Propagated


@dataclass(frozen=True, eq=False)
class PlaceInWhole:
    """Of the results of a rank's ops. They are found by op, line and extents when one is asked for:
    nothing follows values while a program runs."""

    made: Propagated
    rank: int

    def told(self, op: str, where: SourceLine | None, shape: Sequence[int], index: Sequence[int]
             ) -> str:
        """`[3, 7, 0] of [4, 8, 6]`; "" where the rank has the whole, or ops of this name on the
        line have their parts in several ways."""
        found = {(index_in_whole(at, whole, self.rank, index, dtype), whole)
                 for whole, dtype, at in _results(self.made, op, where)
                 if local_shape(at, whole, self.rank, dtype) == tuple(shape)}
        if len(found) != 1:
            return ""
        (place, whole), = found
        return "" if whole == tuple(shape) else f"{list(place)} of {show_shape(whole)}"


def _results(made: Propagated, op: str, where: SourceLine | None) -> Iterator[tuple]:
    """(extents, type, layout) of what the ops of a name on a line make, those in loops too."""
    for step in made.steps:
        if not isinstance(step, PartitionedOp):
            continue
        if step.node.op.name == op and step.node.where == where:
            yield from ((extents(v.aval), v.aval.dtype, at) for v, at in step.makes)
        for body in step.bodies:
            yield from _results(body, op, where)


__all__ = ["PlaceInWhole"]
