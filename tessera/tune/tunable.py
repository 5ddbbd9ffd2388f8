"""What can be tuned: one record for each routine that has a choice.

    Tunable("gemm", ...)     registers itself; `TUNABLES` has all of them by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ArgumentError, did_you_mean
from ..kernels.cards import Card
from ..lazy_dataclass import dataclass
from ..numerics import DType, as_type

TUNABLES: dict[str, Tunable] = {}


@dataclass(frozen=True)
class TuningProblem:
    """A call that is measured. kind: of operands, or of operands and results, "bf16->f32"; way,
    extents: as the record says."""

    kind: str
    way: str
    extents: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        """Of the operands."""
        return as_type(self.kind.partition("->")[0]).dtype

    @property
    def result(self) -> DType:
        return as_type(self.kind.rpartition("->")[2]).dtype

    def __str__(self) -> str:
        return f"{self.kind} {self.way} {'x'.join(map(str, self.extents))}"


@dataclass(frozen=True)
class Tunable:
    """name: of the routine.  extents: the letters of a problem's.  ways: of a call, by name.
    types: that have a choice.  shapes: that are tuned unless others are given, by group.

    key(problem, card) -> what tables call it
    trials(problem, card, count) -> plans by their text, the model's first: RoutineLauncher.trial
    shapes_of(problem) -> the shapes of the arrays
    options(problem) -> the options of a call
    flops(problem) -> how many
    """

    name: str
    extents: str
    ways: tuple[str, ...]
    types: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    key: Callable[[TuningProblem, Card], str]
    trials: Callable[[TuningProblem, Card, int], Mapping[str, Any]]
    shapes_of: Callable[[TuningProblem], Sequence[tuple[int, ...]]]
    options: Callable[[TuningProblem], dict[str, Any]]
    flops: Callable[[TuningProblem], float]

    def __post_init__(self) -> None:
        if self.name in TUNABLES:
            raise ArgumentError(f"{self.name!r} is declared twice among what can be tuned")
        TUNABLES[self.name] = self

    def problems(self, shapes: Sequence[str] = (), types: Sequence[str] = (),
                 ways: Sequence[str] = ()) -> list[TuningProblem]:
        """All of them, or of some shapes, types and ways. Raises ArgumentError for unknown ones."""
        kinds = [self._one(t, self.types, "type") for t in types or self.types[:1]]
        chosen = [self._one(w, self.ways, "way") for w in ways or self.ways]
        extents = [e for s in shapes for e in self._extents(s)] if shapes else [
            e for group in self.shapes.values() for e in group]
        return [TuningProblem(t, w, e) for t in kinds for e in dict.fromkeys(extents)
                for w in chosen]

    def _extents(self, text: str) -> Sequence[tuple[int, ...]]:
        """Of '1536x1536x1536', or of the name of a group."""
        if text in self.shapes:
            return self.shapes[text]
        sizes = text.lower().split("x")
        wanted = len(self.extents.split("x"))
        if len(sizes) != wanted or not all(s.isdigit() and int(s) > 0 for s in sizes):
            raise ArgumentError(f"{text!r} is no shape of {self.name}", hint=f"{self.extents} in "
                                f"numbers, or one of {', '.join(self.shapes)}")
        return [tuple(map(int, sizes))]

    def _one(self, name: str, known: tuple[str, ...], what: str) -> str:
        if name not in known:
            raise ArgumentError(f"{self.name} is not tuned for the {what} {name!r}",
                                hint=f"known: {', '.join(known)}")
        return name


def tunable(name: str) -> Tunable:
    """Raises ArgumentError naming those that there are."""
    if name not in TUNABLES:
        raise ArgumentError(f"there is nothing to tune named {name!r}",
                            hint=did_you_mean(name, list(TUNABLES)))
    return TUNABLES[name]


__all__ = ["TUNABLES", "Tunable", "TuningProblem", "tunable"]
