"""Arguments that share memory: one array given twice, or views of one base.

The sanitizer keeps its records by the place in memory, so that an access by one name is seen by the
others. A view that is not contiguous is copied for the interpreter and written back: what one name
writes the other would not see, so the call is refused where one of them is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from tessera.errors import ArgumentError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.tensor import Tensor
from tessera.tile.interpreter.memory import Memory

if TYPE_CHECKING:
    from tessera.tile.interpreter.arguments import Bound


@dataclass(eq=False)
class Shared:
    """The memory of several arguments, as `size` cells; shadow: the sanitizer's."""

    names: tuple[str, ...]
    size: int
    shadow: Any = None


@dataclass(frozen=True, eq=False)
class Alias:
    """How an argument lies in shared memory: the cells of each of its elements, [n, k]."""

    shared: Shared
    cells: np.ndarray

    def others(self, name: str) -> list[str]:
        return [n for n in self.shared.names if n != name]


def mark(bound: Bound) -> None:
    """Gives the memories of arguments that overlap a common record of accesses."""
    for group in _overlapping(bound):
        arrays = dict(group)
        low = min(byte_bounds(a)[0] for a in arrays.values())
        high = max(byte_bounds(a)[1] for a in arrays.values())
        unit = 0
        for a in arrays.values():
            unit = gcd(unit, a.itemsize, byte_bounds(a)[0] - low, *map(abs, a.strides))
        shared = Shared(tuple(arrays), (high - low) // unit)
        for name, a in arrays.items():
            bound.values[name].alias = Alias(shared, _cells(a, low, unit))


def _cells(a: np.ndarray, low: int, unit: int) -> np.ndarray:
    """[elements, k] of an array, in the order of its contiguous copy."""
    at = np.full(a.shape, a.__array_interface__["data"][0] - low, np.int64)
    for axis, (count, stride) in enumerate(zip(a.shape, a.strides, strict=True)):
        at += (np.arange(count, dtype=np.int64) * stride).reshape(
            (-1,) + (1,) * (a.ndim - 1 - axis))
    return at.reshape(-1, 1) // unit + np.arange(a.itemsize // unit, dtype=np.int64)


def same_cells(bound: Bound, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Pairs of these arguments, once they are marked, that have elements in common."""
    held = [(n, m.alias) for n, m in bound.values.items()
            if n in names and isinstance(m, Memory) and m.alias is not None]
    for i, (a, x) in enumerate(held):
        for b, y in held[i + 1:]:
            if x.shared is y.shared and np.intersect1d(x.cells, y.cells).size:
                yield a, b


def require_views(name: str, bound: Bound, written: frozenset[str]) -> None:
    """Raises ArgumentError for views of one memory that a copy would part."""
    for group in _overlapping(bound):
        parted = [n for n, _ in group if n in bound.storage]
        works = {id(bound.values[n].flat.base) for n, _ in group}
        if not parted or len(works) == 1 or written.isdisjoint(n for n, _ in group):
            continue
        names = " and ".join(n for n, _ in group)
        raise ArgumentError(f"{name}: the arguments {names} share memory, {parted[0]} is not "
                            "contiguous, and the kernel writes one of them", where=user_line(),
                            hint=f"pass a copy: {parted[0]}.copy()")


def _overlapping(bound: Bound) -> Iterator[Sequence[tuple[str, np.ndarray]]]:
    """Groups of arguments whose memory overlaps, each with the caller's array."""
    spans = sorted(((*byte_bounds(a), n, a) for n, a in _originals(bound)), key=lambda s: s[:2])
    group: list[tuple[str, np.ndarray]] = []
    end = 0
    for low, high, name, a in (*spans, (1 << 63, 1 << 63, "", None)):
        if a is None or low >= end:
            if len(group) > 1 and any(
                    np.may_share_memory(x, y) and _share(x, y)
                    for i, (_, x) in enumerate(group) for _, y in group[i + 1:]):
                yield group
            group = []
        if a is not None:
            group.append((name, a))
            end = max(end, high)


def _share(x: np.ndarray, y: np.ndarray) -> bool:
    try:
        return bool(np.shares_memory(x, y, max_work=10**6))  # type: ignore[arg-type]
    except Exception as error:
        if type(error).__name__ != "TooHardError":
            raise
        return True  # nobody knows: then as if


def _originals(bound: Bound) -> Iterator[tuple[str, np.ndarray]]:
    """The caller's memory of each argument in host memory."""
    values: Mapping[str, Any] = bound.values
    for name, memory in values.items():
        if not isinstance(memory, Memory) or not memory.flat.size:
            continue
        target = bound.storage[name][0] if name in bound.storage else memory.flat
        if isinstance(target, Tensor):  # packed: the same one twice has one unpacked copy
            target = memory.flat
        yield name, target


__all__ = ["Alias", "mark", "require_views", "same_cells"]
