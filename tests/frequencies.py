"""Whether what was drawn follows its probabilities."""

from __future__ import annotations

import numpy as np
from scipy.special import chdtrc


def likely(counts: np.ndarray, p: np.ndarray) -> bool:
    """A chi-squared test that a right sampler fails once in 10^9 runs. p: of each, up to a factor.
    """
    expected = p / p.sum() * counts.sum()
    return bool(chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()) > 1e-9)


__all__ = ["likely"]
