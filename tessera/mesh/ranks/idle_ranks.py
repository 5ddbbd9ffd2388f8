"""Ranks that others wait for and that do nothing: told long before the limit of what compiles.

A rank that compiles a function for the first time, or writes files, may keep others for ten
minutes. One that hangs before it looks the same to them, but not to its machine: it is in no call,
marks no long act of ours, and uses no core, nor do its children.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import status_page

FIRST_S = 1.0  # of a wait, before anything is asked
SHARE = 0.005  # of a core: less is a sleep in a loop. Of 72 ranks on two cores each has 0.028


class IdleRanks:
    """Of one wait. limit_s: after which a rank that does nothing is missed"""

    def __init__(self, limit_s: float, begin: float):
        self.limit_s, self.at = limit_s, begin + FIRST_S
        self.before: dict[int, int] = {}

    def look(self, now: float, late: Iterable[int]) -> list[int]:
        """Those of the ranks that have done nothing since the last look, which is limit_s ago."""
        if now < self.at:
            return []
        ticks = status_page.ticks()
        before, self.before, self.at = self.before, ticks, now + self.limit_s
        most = max(1.0, SHARE * self.limit_s * os.sysconf("SC_CLK_TCK"))
        return sorted(r for r in {*late} & ticks.keys() & before.keys()
                      if abs(ticks[r] - before[r]) <= most)


__all__ = ["IdleRanks"]
