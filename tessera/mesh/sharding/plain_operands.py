"""Operands of a compiled function that each rank has for itself: numbers, such as a learning rate,
and plain arrays on its host. Ranks must give the same, at each call: else each computes its own.

A call looks at some elements of each, which takes a microsecond. On hosts they go in the message
that compares the program anyway; behind calls that NCCL carries, ranks tell them with their call
numbers (ranks/call_numbers.py). A program that exchanges nothing, such as an update apart from its
gradients, leaves them to the next one of its mesh that does. So does what makes a distributed
tensor of what each rank has, as a batch that those along an axis are to have alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from weakref import WeakKeyDictionary

import numpy as np

from tessera.errors import SourceLine, user_line
from tessera.graph.op import Aval
from tessera.numerics import decode
from tessera.runtime.arrays import HOST
from tessera.runtime.host_memory import take_written
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..errors import PolicyMismatch
from ..layout import Layout
from ..ranks.call_numbers import ALIKE, LeftSamples, Samples, differing_operand, values_text
from ..ranks.transport import Transport
from ..world import transport

CALLS = 1 << 62
WRITTEN = 0x9E3779B97F4A7C15 % CALLS  # counted for a rank that wrote where others hold the same
SAMPLE = 4  # elements of each that are looked at
WEIGHTS = [math.cos(i * i * 0.1 + 1.0) for i in range(SAMPLE)]


def samples_of(operands: Sequence[Tensor]) -> Samples:
    """Elements of each; none of what lies on a GPU, where looking would wait for it."""
    return tuple(_sample(x) if x.place == HOST else () for x in operands)


def _sample(x: Tensor) -> tuple[float, ...]:
    dtype = x.dtype
    array = x.buffer if dtype.packed else x.array
    if array.ndim == 0 and dtype.numpy.itemsize > 2:
        return (float(array),)
    found = array.flat[_chosen(array.size)]
    if dtype.kind == "float" and dtype.numpy.itemsize < 4 and not dtype.packed:
        found = decode(found, dtype)
    return tuple(found.astype(np.float64).tolist())


@functools.lru_cache(maxsize=256)
def _chosen(size: int) -> np.ndarray:
    """The numbers of some elements, the first and the last among them."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, SAMPLE)).astype(np.intp))


def number_of(samples: Samples) -> float:
    """A number that other elements, another order and other sizes of them change."""
    found = 0.0
    for i, values in enumerate(samples):
        finite = [v if math.isfinite(v) else 0.0 for v in values]
        size = sum(map(abs, finite))
        if size:
            weighted = sum(map(float.__mul__, WEIGHTS, finite))
            found += (weighted / size + 7 * math.log2(size)) * (1 + i * 0.618034 % 1)
    return found


def was_written(given: Sequence[Tensor]) -> bool:
    """Whether this rank has written into its part of an operand that others hold too."""
    return take_written(p.buffer for t in given if t.layout is not None and t.layout.repeated
                        for p in t.read_parts.values() if p.place == HOST)


# --- of programs that exchange nothing -----------------------------------------------------------
@dataclass
class CallOfParts:
    """A program that sends nothing and is given a split tensor: what it is, from where, how often.
    """

    name: str
    where: SourceLine | None
    times: int = 0


@dataclass
class LeftOperands:
    """What calls on a mesh were given since ranks compared anything there. by_program: names of
    plain operands, how many calls there were, the numbers of all, what the last was given, and the
    axes along which others are given the same. Some ranks may make more calls, as where one prints:
    those of a program that all have made as often must have been given the same.
    calls: a sum that tells these calls apart. Where those of ranks differ, some hold perhaps what
    others do not: epoch is how often that was, the same on all, and a program that was compared in
    an earlier one is compared again. of_parts: of these calls, those that were given a split
    tensor: their results lack the parts of ranks that have not made them."""

    by_program: LeftSamples = field(default_factory=dict)
    calls: int = 0
    epoch: int = 0
    of_parts: dict[int, CallOfParts] = field(default_factory=dict)

    def count(self, call: int, name: str = "") -> None:
        """A call that sends nothing. name: of a program that is given a split tensor"""
        self.calls = (self.calls + call) % CALLS
        if name:
            if call not in self.of_parts:
                self.of_parts[call] = CallOfParts(name, user_line())
            self.of_parts[call].times += 1

    def add(self, program: str, names: Sequence[str], given: Samples, along: Sequence[str]
            ) -> None:
        before = self.by_program.get(program)
        calls, number = (0, 0.0) if before is None else (before[1], before[2])
        self.by_program[program] = [names, calls + 1, number + number_of(given), given, along]

    def take_calls(self) -> tuple[int, dict[int, CallOfParts]]:
        found = self.calls, self.of_parts
        self.calls, self.of_parts = 0, {}
        return found

    def take(self) -> LeftSamples:
        """All of it, which is forgotten."""
        found, self.by_program = self.by_program, {}
        return found


def leave_values(what: str, layout: Layout, parts: Mapping[int, Tensor], whole: Aval) -> None:
    """A tensor is made of what each rank has: those that are to hold the same block must have given
    the same. what: the function that makes it   parts: of this process, on the host where they are
    """
    here, along = transport(), layout.repeated
    if here.size == 1 or not along:
        return
    for rank, part in parts.items():
        if samples := samples_of([part]):
            name = f"{what} of {whole} as {layout.describe()} at {user_line()}"
            block = [layout.mesh.index(rank, (a,)) for a in layout.mesh.axes if a not in along]
            left_on(here, layout.mesh).add(f"~{name} {block}", [name], samples, along)


def left_at_end(here: Transport) -> dict[str, LeftSamples]:
    """By mesh, what a rank's calls were given that no exchange came behind."""
    return {str(mesh): found for mesh, left in _left.get(here, {}).items()
            if (found := left.take())}


def error_at_end(left: Sequence[dict[str, LeftSamples]]) -> PolicyMismatch | None:
    """What is wrong with it, by rank: such a program trains as many models as there are ranks."""
    for mesh in sorted(set().union(*left)):
        found = differing_operand([one.get(mesh, {}) for one in left])
        if found is not None:
            name, values = found
            shown = "\n".join(f"  rank {rank}: {values_text(own)}"
                              for rank, own in enumerate(values) if own)
            return PolicyMismatch(
                f"the ranks of {mesh} have given different values of what they hold alike, {name}, "
                f"and exchanged nothing from there on:\n{shown}",
                hint=f"{ALIKE}. A batch of which each rank has a part is split: "
                "ts.dist.from_local(part, ts.ShardSpec(('row',), ('dp',)), mesh)")
    return None


_left: WeakKeyDictionary[Transport, dict[Mesh, LeftOperands]] = WeakKeyDictionary()


def left_on(here: Transport, mesh: Mesh) -> LeftOperands:
    return _left.setdefault(here, {}).setdefault(mesh, LeftOperands())


__all__ = ["SAMPLE", "WRITTEN", "CallOfParts", "LeftOperands", "error_at_end", "leave_values",
           "left_at_end", "left_on", "number_of", "samples_of", "was_written"]
