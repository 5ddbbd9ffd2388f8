"""Which calls must wait for which: read off the privileges of their regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np

from ... import hooks
from ...lazy_dataclass import dataclass
from ...tensor import Tensor
from .. import tree
from ..trace import Tracer
from .call import Use, memory_of
from .region_tensor import RegionTensor
from .types import Privilege, read, write


@dataclass(frozen=True)
class Dependence:
    """Call `after` must wait for call `before`: both use `memory`, named as each calls it."""

    before: int
    after: int
    kind: str  # "write-read", "read-write", "write-write", "reduce_sum-read", ...
    memory: str

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}  {self.kind}  {self.memory}"


@dataclass(frozen=True, eq=False)
class RegionAccess:
    """One array that a call used. `what` holds it, so that its address stays its own."""

    label: str
    privilege: Privilege
    what: tuple


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call: the function, and what it did with which memory. Its results are written."""

    index: int
    function: str
    accesses: tuple[RegionAccess, ...]

    def __str__(self) -> str:
        args = ", ".join(f"{a.label}: {a.privilege}" for a in self.accesses)
        return f"{self.index}  {self.function}({args})"


@dataclass
class Dependencies:
    """`calls` in the order in which they ran, and `edges` between those that must keep it."""

    calls: list[Recorded] = field(default_factory=list)
    edges: list[Dependence] = field(default_factory=list)

    def between(self, before: int, after: int) -> list[Dependence]:
        """The edges from one call to another; none when the two may overlap."""
        return [e for e in self.edges if (e.before, e.after) == (before, after)]

    def waves(self) -> list[list[int]]:
        """The calls in groups: those of a group may overlap, when all groups before it are done."""
        level: list[int] = []
        for call in self.calls:
            before = [level[e.before] for e in self.edges if e.after == call.index]
            level.append(max(before) + 1 if before else 0)
        return [[i for i, n in enumerate(level) if n == wave]
                for wave in range(max(level, default=-1) + 1)]

    def record(self, function: str, uses: list[Use], result: Any) -> None:
        """Note one call, with an edge to each earlier one that it must wait for."""
        given = [RegionAccess(u.label, u.privilege, _identity(u.leaf)) for u in uses]
        made = [RegionAccess("result", write, _identity(x)) for x in tree.flatten(result)[0]
                if isinstance(x, Tensor | np.ndarray)]
        call = Recorded(len(self.calls), function, (*given, *made))
        for earlier in self.calls:
            self.edges += _edges(earlier, call)
        self.calls.append(call)

    def __str__(self) -> str:
        lines = [f"{call}" for call in self.calls] + [str(edge) for edge in self.edges]
        return "\n".join(lines)


class deps:
    """`with ts.graph.deps() as d:` notes the calls of functions with regions inside it.

    d.edges: call `after` must wait for call `before`, because one of them writes memory that the
    other uses. Two reads need no edge, nor do two calls that both take the maximum (or minimum), or
    both add integers: their order does not change a bit. Sums of floats keep their order, since
    rounding depends on it. d.waves() groups the calls that may overlap. Calls run as ever.
    """

    def __enter__(self) -> Dependencies:
        self.found = Dependencies()
        hooks.region_calls.append(self.found.record)
        return self.found

    def __exit__(self, *exc: object) -> None:
        hooks.region_calls.remove(self.found.record)


def _identity(leaf: Any) -> tuple:
    """What tells two arguments apart: the arrays they lie in; a traced one, its name's object."""
    if isinstance(leaf, RegionTensor):
        return (leaf,)
    return (leaf,) if isinstance(leaf, Tracer) else tuple(memory_of(leaf))


def _edges(a: Recorded, b: Recorded) -> Iterator[Dependence]:
    for x in a.accesses:
        for y in b.accesses:
            if not _commute(x, y) and _overlap(x.what, y.what):
                name = x.label if x.label == y.label else f"{x.label} = {y.label}"
                yield Dependence(a.index, b.index, f"{x.privilege}-{y.privilege}", name)


def _commute(a: RegionAccess, b: RegionAccess) -> bool:
    """Whether the order of two uses of the same memory cannot be told from the result."""
    if a.privilege is not b.privilege or a.privilege is write:
        return False
    if a.privilege is read or a.privilege.combine != "add":
        return True
    return all(isinstance(x, np.ndarray) and x.dtype.kind in "iu" for x in (*a.what, *b.what))


def _overlap(a: tuple, b: tuple) -> bool:
    return any(
        np.shares_memory(x, y) if isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
        else x is y
        for x in a for y in b
    )
