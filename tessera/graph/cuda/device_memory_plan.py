"""Places of temporaries: memory that is used again when what lay there has been read last."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...dims import size_of
from ..ir import Value
from ..schedule.ir import ALIGN_BYTES
from .fusion_groups import Unit


class Places:
    """Hands out places in the order in which units run. root: the value whose memory a view has."""

    def __init__(self, units: Iterable[Unit], root: Callable[[Value], Value]):
        self.root = root
        self.last: dict[Value, int] = {}
        self.sizes: dict[str, int] = {}
        self.free: list[str] = []
        self.held: dict[Value, str] = {}
        self.now = 0
        for i, unit in enumerate(units):
            for v in (*unit.inputs, *unit.outputs):
                self.last[root(v)] = i

    def take(self, v: Value) -> str:
        """A place for a value: the tightest that is free, else the largest, which grows, else a
        new one."""
        need = -(-max(nbytes(v), 1) // ALIGN_BYTES) * ALIGN_BYTES
        enough = [p for p in self.free if self.sizes[p] >= need]
        if enough or self.free:
            place = min(enough, key=self.sizes.__getitem__) if enough else max(
                self.free, key=self.sizes.__getitem__)
            self.free.remove(place)
        else:
            place = f"t{len(self.sizes)}"
        self.sizes[place] = max(self.sizes.get(place, 0), need)
        self.held[v] = place
        return place

    def next(self) -> None:
        """The unit has run: what it was the last to read is free."""
        for v in [v for v in self.held if self.last.get(v, -1) <= self.now]:
            self.free.append(self.held.pop(v))
        self.now += 1


def nbytes(v: Value) -> int:
    return int(size_of(v.aval.shape)) * v.aval.dtype.numpy.itemsize


__all__ = ["Places", "nbytes"]
