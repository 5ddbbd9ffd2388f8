"""Dynamic loss scaling: a factor on the loss that follows what the gradients can hold.

    scale = ts.DynamicLossScale()
    for x, y in batches:
        grads = step_grads(params, x, y, scale.value)       # of loss * scale.value
        params, scale = scale.step(grads, lambda g: update(params, g), params)

`@loss_scale(k)` in a type scales the cotangents stored in that type and is invisible outside; this
one scales the loss itself and is halved when a gradient overflows.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .call_errors import refuse_wrong_init
from .errors import ArgumentError, TraceError
from .graph import tree
from .graph.trace import Tracer
from .lazy_dataclass import dataclass
from .tensor import as_tensor

T = TypeVar("T")


@refuse_wrong_init
@dataclass(frozen=True)
class DynamicLossScale:
    """The factor, and how many steps since it last changed had finite gradients.

    value     current factor on the loss. Give it to a compiled function as a positional argument:
              it is a number of the trace's input then, and a new value compiles nothing
    good      finite steps since the last change
    interval  after so many of them the factor doubles
    smallest, largest  its bounds
    """

    value: float = 2.0**16
    good: int = 0
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.value <= self.largest < float("inf"):
            raise ArgumentError(f"a loss scale of {self.value} is outside {self.smallest} .. "
                                f"{self.largest}")
        if self.interval < 1:
            raise ArgumentError(f"interval counts steps from 1, got {self.interval}")

    def unscale(self, grads: Any) -> Any:
        """The gradients of the loss: those of loss * value, divided by value."""
        return tree.map_tree(lambda g: as_tensor(g) * (1.0 / self.value), grads)

    def after(self, finite: bool) -> DynamicLossScale:
        """The scale for the next step: half after an overflow, double after `interval` good ones.
        """
        if not finite:
            return replace(self, value=max(self.value / 2.0, self.smallest), good=0)
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        return replace(self, value=min(self.value * 2.0, self.largest), good=0)

    def step(self, grads: Any, update: Callable[[Any], T], unchanged: T
             ) -> tuple[T, DynamicLossScale]:
        """(update(unscaled grads), next scale); when a gradient is not finite the step is skipped:
        (unchanged, half the scale). Raises TraceError in a compiled function: which it is depends
        on values."""
        finite = all_finite(grads)
        return update(self.unscale(grads)) if finite else unchanged, self.after(finite)


def all_finite(grads: Any) -> bool:
    """Whether every number in a nested value of tensors is finite."""
    leaves = [as_tensor(g) for g in tree.flatten(grads)[0]]
    if any(isinstance(g, Tracer) for g in leaves):
        raise TraceError(
            "DynamicLossScale looks at the values of gradients, which are not known while tracing",
            hint="give the scale's value to the compiled function as an argument, return the "
            "gradients, and call step outside of it")
    return all(bool(np.isfinite(g.numpy()).all()) for g in leaves)
