"""Learning rates by step."""

from __future__ import annotations

import math
from typing import Any

from ..call_errors import refuse_wrong_init
from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.operand import convert
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..tensor import Tensor


@refuse_wrong_init
@dataclass(frozen=True)
class CosineSchedule:
    """Learning rate per step: linear from 0 to `peak` over `warmup` steps, then half a cosine down
    to `floor` at `steps`, and `floor` after that.

    Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5 without restarts. Steps count from 0; the
    first one already has a rate above 0. The rate of an integer is a float, that of a tensor,
    traced or not, an f32 tensor of its shape.
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.peak or not math.isfinite(self.peak):
            raise ArgumentError(f"CosineSchedule needs 0 <= floor <= peak, got floor {self.floor}, "
                                f"peak {self.peak}")
        if not 0 <= self.warmup <= self.steps or self.steps < 1:
            raise ArgumentError(f"CosineSchedule needs 0 <= warmup <= steps and steps >= 1, got "
                                f"warmup {self.warmup}, steps {self.steps}")

    def __call__(self, step: Any) -> Any:
        """The rate of this step."""
        if isinstance(step, Tensor):
            return self._of_tensor(step)
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if step >= self.steps:
            return self.floor
        way = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * way))

    def _of_tensor(self, step: Tensor) -> Tensor:
        """Differences of steps are taken before they become f32, which holds 2^24 of them."""
        kind = as_type("f32")
        rise = convert(step + 1, kind) * (self.peak / max(self.warmup, 1))
        way = convert(step - self.warmup, kind) * (1.0 / max(self.steps - self.warmup, 1))
        fall = self.floor + (self.peak - self.floor) * 0.5 * (1 + F.cos(math.pi * way))
        where = F.where
        return where(step < self.warmup, rise, where(step >= self.steps, self.floor, fall))
