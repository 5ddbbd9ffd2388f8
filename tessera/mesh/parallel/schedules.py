"""Which rank of a pipeline does what, and when: plain data, made before anything runs.

    schedule("1f1b", stages=4, microbatches=8)        one rank per stage
    schedule("1f1b", stages=8, microbatches=8, ranks=4)        two chunks of the model per rank

A schedule is a list of steps per rank. `timeline` plays it: when each step begins if a forward step
takes one unit and a backward step two. With p ranks and m microbatches both kinds are idle for
(p - 1) / (m + p - 1) of the time; v chunks per rank divide the idle units by v.
GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B and chunks: Narayanan et al. 2021,
arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tessera.errors import ArgumentError, did_you_mean

from ...lazy_dataclass import dataclass
from .timeline import Timeline, TimelineSpan

FORWARD_UNITS, BACKWARD_UNITS = 1, 2  # a backward step computes two products where forward has one


@dataclass(frozen=True)
class PipelineStep:
    """One microbatch through one stage."""

    microbatch: int
    stage: int


class Forward(PipelineStep):
    """The stage's function; its residuals are kept for the backward step."""

    def __str__(self) -> str:
        return f"F{self.microbatch}"


class Backward(PipelineStep):
    """The pullback of the stage's function; it frees the residuals."""

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The steps of each rank, in order. Stage s is on rank s % ranks."""

    kind: str
    stages: int
    microbatches: int
    steps: tuple[tuple[PipelineStep, ...], ...]  # by rank

    @property
    def ranks(self) -> int:
        return len(self.steps)

    def peak(self, rank: int) -> int:
        """The most microbatches whose residuals a rank keeps at the same time."""
        live = most = 0
        for step in self.steps[rank]:
            live += 1 if isinstance(step, Forward) else -1
            most = max(most, live)
        return most

    @functools.cached_property
    def order(self) -> tuple[PipelineStep, ...]:
        """All steps in an order in which one process can run them."""
        return tuple(step for step, _, _ in play(self.stages, self.steps))

    @property
    def timeline(self) -> Timeline:
        """When each step begins and ends, in units of a forward step."""
        return self.picture([(step, begin, end)
                             for step, begin, end in play(self.stages, self.steps)])

    def picture(self, played: Sequence[tuple[PipelineStep, float, float]],
                unit_s: float | None = None
                ) -> Timeline:
        """The timeline of steps with begin and end, planned or recorded. With several chunks per
        rank a step is called F3a in the first of them, F3b in the second."""
        chunks = self.stages // self.ranks
        spans = [TimelineSpan(step.stage % self.ranks,
                              f"{step}{_letter(step.stage // self.ranks)}" if chunks > 1
                              else str(step),
                              isinstance(step, Backward), step.stage // self.ranks, begin, end)
                 for step, begin, end in played]
        on = f" on {self.ranks} ranks" if chunks > 1 else ""
        title = f"{self.kind}: {self.stages} stages{on}, {self.microbatches} microbatches"
        row = "stage" if chunks == 1 else "rank"
        return Timeline(title, row, self.ranks, tuple(spans), unit_s)

    @property
    def bubble(self) -> float:
        """The part of the time for which ranks wait, of all ranks together."""
        return self.timeline.idle

    def __str__(self) -> str:
        return str(self.timeline)


@functools.lru_cache(maxsize=256, typed=True)
def schedule(kind: str, stages: int, microbatches: int,
             ranks: int | None = None) -> PipelineSchedule:
    """The steps of each rank for a training step, or of "forward" for an evaluation.

    kind: "1f1b" keeps at most `stages` microbatches alive, "gpipe" all of them, and runs all
    forward steps first   ranks: as many as stages, or a divisor of them: each rank then has
    several chunks. Raises ArgumentError for what cannot be.
    """
    ranks = stages if ranks is None else ranks
    for name, value in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} is an integer >= 1, got {value!r}")
    if kind not in KINDS:
        raise ArgumentError(f"there is no pipeline schedule {kind!r}",
                            hint=did_you_mean(str(kind), list(KINDS)))
    if stages % ranks:
        raise ArgumentError(
            f"{stages} stages cannot be spread over {ranks} ranks",
            hint=f"as many stages as ranks, or a multiple: {ranks * (stages // ranks + 1)}")
    steps = tuple(KINDS[kind](rank, ranks, stages // ranks, microbatches) for rank in range(ranks))
    return PipelineSchedule(kind, stages, microbatches, steps)


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk % 26) * (chunk // 26 + 1)


def _passes(make: type[PipelineStep], rank: int, ranks: int, chunks: int, microbatches: int
            ) -> list[PipelineStep]:
    """A rank's forward or backward steps: `ranks` microbatches through one chunk, then through
    the next one; those of a backward pass begin with the last chunk."""
    order = range(chunks) if make is Forward else range(chunks - 1, -1, -1)
    width = ranks if chunks > 1 else microbatches
    return [make(i, chunk * ranks + rank)
            for first in range(0, microbatches, width)
            for chunk in order
            for i in range(first, min(first + width, microbatches))]


def _evaluation(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[PipelineStep, ...]:
    return tuple(_passes(Forward, rank, ranks, chunks, microbatches))


def _gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[PipelineStep, ...]:
    return tuple(make for kind in (Forward, Backward)
                 for make in _passes(kind, rank, ranks, chunks, microbatches))


def _one_forward_one_backward(rank: int, ranks: int, chunks: int, microbatches: int
                              ) -> tuple[PipelineStep, ...]:
    """Some forward steps ahead, as many as a microbatch has stages before it on its way from here
    to the end; then a forward and a backward step in turn. With chunks, Narayanan et al. go up to
    ranks - 1 steps further ahead: that keeps more residuals and shortens nothing, whatever a
    backward step costs (tests/mesh/test_schedules.py)."""
    ahead = chunks * ranks - 1 - rank
    forward = _passes(Forward, rank, ranks, chunks, microbatches)
    backward = _passes(Backward, rank, ranks, chunks, microbatches)
    ahead = min(ahead, len(forward))
    steps = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        steps += [f, b]
    return (*steps, *backward[len(forward) - ahead:])


KINDS: dict[str, Callable[[int, int, int, int], tuple[PipelineStep, ...]]] = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _gpipe,
    "forward": _evaluation,
}


def needs(step: PipelineStep, stages: int) -> list[PipelineStep]:
    """The steps whose results a step reads."""
    i, s = step.microbatch, step.stage
    if isinstance(step, Forward):
        return [Forward(i, s - 1)] if s else []
    return [Forward(i, s)] + ([Backward(i, s + 1)] if s < stages - 1 else [])


def play(stages: int, steps: Sequence[Sequence[PipelineStep]]
         ) -> list[tuple[PipelineStep, int, int]]:
    """(step, begin, end) of every step, by begin: each as early as its rank and its needs allow.

    Raises ArgumentError when ranks wait for each other.
    """
    ends: dict[PipelineStep, int] = {}
    free, at = [0] * len(steps), [0] * len(steps)
    played: list[tuple[PipelineStep, int, int]] = []
    while any(a < len(own) for a, own in zip(at, steps, strict=True)):
        before = len(played)
        for rank, own in enumerate(steps):
            while at[rank] < len(own):
                step = own[at[rank]]
                wanted = needs(step, stages)
                if any(n not in ends for n in wanted):
                    break
                begin = max([free[rank], *(ends[n] for n in wanted)])
                units = FORWARD_UNITS if isinstance(step, Forward) else BACKWARD_UNITS
                free[rank] = ends[step] = begin + units
                played.append((step, begin, begin + units))
                at[rank] += 1
        if len(played) == before:
            stuck = [str(own[a]) for a, own in zip(at, steps, strict=True) if a < len(own)]
            raise ArgumentError(f"the schedule cannot go on: every rank waits, for {stuck}")
    return sorted(played, key=lambda p: (p[1], p[0].stage))
