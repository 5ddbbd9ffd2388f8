"""What is computed of measured times: medians, tokens per second, the share of a GPU's rate."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np


def rate(model_flops: float, tokens: int, ms: Sequence[float], peak_flops: float
         ) -> dict[str, float]:
    """Of steps that took `ms` each. mfu: operations of the model by those that the GPU's data
    sheet promises in that time."""
    middle = median(ms)
    return {"step_ms": round(middle, 3), "least_ms": round(min(ms), 3),
            "most_ms": round(max(ms), 3), "tokens_per_s": round(1e3 * tokens / middle, 1),
            "mfu": round(1e3 * model_flops / middle / peak_flops, 4)}


def spread(ms: dict[str, float]) -> dict[str, float]:
    """How much longer each takes than the quickest: 0.03 is 3 %."""
    least = min(ms.values())
    return {name: round(t / least - 1, 4) for name, t in ms.items()}


def distance(x: np.ndarray, want: np.ndarray) -> float:
    """|x - want| / |want|, sums in f64; NaN where `want` is zero."""
    a, b = (t.reshape(-1) for t in (x, want))
    error = size = 0.0
    for at in range(0, max(a.size, 1), 1 << 20):  # in parts that stay in the cache
        wide = b[at:at + (1 << 20)].astype(np.float64)
        off = a[at:at + (1 << 20)].astype(np.float64) - wide
        error += float(off @ off)
        size += float(wide @ wide)
    return (error / size) ** 0.5 if size else float("nan")


def slope(x: np.ndarray, want: np.ndarray) -> float:
    """(x, want) / (want, want): 1 where x is right but for errors that are not along `want`."""
    a, b = (t.reshape(-1) for t in (x, want))
    along = size = 0.0
    for at in range(0, max(a.size, 1), 1 << 20):
        wide = b[at:at + (1 << 20)].astype(np.float64)
        along += float(a[at:at + (1 << 20)].astype(np.float64) @ wide)
        size += float(wide @ wide)
    return along / size if size else float("nan")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]),
                                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
                               ).rstrip() for row in cells)


__all__ = ["distance", "rate", "slope", "spread", "table"]
