"""What became of each candidate of a search: `k.tuning_trace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.schedule import Schedule

STATUSES = ("chosen", "measured", "estimated", "pruned", "skipped")


@dataclass(frozen=True)
class Trial:
    """One candidate.

    status        'chosen' | 'measured' | 'estimated' (fits, not measured) | 'pruned' (the model
                  rules it out) | 'skipped' (does not fit, is wrong, raised, or took too long)
    estimate_us   of the cost model        measured_ms   median of the repetitions
    error         code of what it raised   reason        why it has its status, in words
    """

    schedule: Schedule
    status: str
    estimate_us: float | None = None
    measured_ms: float | None = None
    error: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is empty."""
        facts = {"status": self.status, "estimate_us": self.estimate_us,
                 "measured_ms": self.measured_ms, "error": self.error, "reason": self.reason}
        return {"schedule": self.schedule.to_dict()} | {k: v for k, v in facts.items()
                                                        if v not in (None, "")}


@dataclass(frozen=True)
class Trace(Sequence):
    """The candidates of one search, in the order of the space.

    source       'measured' | 'model' (nothing was measured) | 'cache'
    elapsed_ms   wall time of the search    bench   what measured
    reference    what the results were compared with
    """

    trials: tuple[Trial, ...] = ()
    source: str = "model"
    elapsed_ms: float = 0.0
    bench: str = ""
    reference: str = ""
    gpu: str = ""

    def __getitem__(self, index: Any) -> Any:
        return self.trials[index]

    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    def count(self, status: Any) -> int:
        """How many trials have this status."""
        return sum(t.status == status for t in self.trials)

    @property
    def chosen(self) -> Trial | None:
        return next((t for t in self.trials if t.status == "chosen"), None)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of estimates and measured times; None with fewer than three of both."""
        both = [(t.estimate_us, t.measured_ms) for t in self.trials
                if t.estimate_us is not None and t.measured_ms is not None]
        return spearman([a for a, _ in both], [b for _, b in both]) if len(both) > 2 else None

    def text(self) -> str:
        """A table, fastest first, then those that were not measured."""
        facts = [f"{len(self)} candidates", f"by {self.bench or self.source}",
                 f"{self.elapsed_ms:.0f} ms", self.gpu]
        if self.rank_correlation is not None:
            facts.append(f"rank correlation of the model {self.rank_correlation:.2f}")
        lines = [", ".join(f for f in facts if f)]
        far = float("inf")
        for t in sorted(self.trials, key=lambda t: (t.measured_ms or far, t.estimate_us or far)):
            ms = f"{t.measured_ms:10.4f} ms" if t.measured_ms is not None else " " * 13
            us = f"{t.estimate_us:9.1f} us" if t.estimate_us is not None else " " * 12
            config = " ".join(f"{k}={v}" for k, v in t.schedule.values.items())
            lines.append(f"{t.status:9} {ms} {us}  {config}  {t.reason}".rstrip())
        return "\n".join(lines) + "\n"


def spearman(x: Sequence[Any], y: Sequence[Any]) -> float:
    """Correlation of the ranks, equal values sharing theirs; 0 where one side is constant."""
    a, b = _ranks(x), _ranks(y)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(x: Sequence[Any]) -> np.ndarray:
    values = np.asarray(x, np.float64)
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[where]


__all__ = ["STATUSES", "Trace", "Trial", "spearman"]
