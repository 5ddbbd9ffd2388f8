"""What a collective costs, as its record says it: steps, bytes, and the way they go.

The planner turns this into microseconds for a fabric: see planning/fabric.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...lazy_dataclass import dataclass

COSTS: dict[str, CollectiveCost] = {}  # by the op's name; records of collectives put theirs here


@dataclass(frozen=True)
class CollectiveCost:
    """steps(n) of a ring of n ranks; sent(n): the part of the size that each rank sends.

    The size is NCCL's: of what a rank has before or after, whichever is larger.
    route: a "ring" through all ranks; "pairs": a part of its own for each other rank, so that what
           stays in a domain goes beside what leaves it; "one": a rank sends to one other
    switch_adds: whether a switch that can add does it by itself
    stages: where each domain has as many ranks, it may go in these stages instead: "inside" the
            domains with the whole size, or "between" them with a rank's part of it
    """

    steps: Callable[[int], int]
    sent: Callable[[int], float]
    route: Literal["ring", "pairs", "one"] = "ring"
    switch_adds: bool = False
    stages: tuple[tuple[Literal["inside", "between"], CollectiveCost], ...] = ()


ONCE_AROUND = CollectiveCost(lambda n: n - 1, lambda n: (n - 1) / n)
TWICE_AROUND = CollectiveCost(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n)

__all__ = ["COSTS", "ONCE_AROUND", "TWICE_AROUND", "CollectiveCost"]
