"""Dynamic loss scaling: a factor on the loss that follows what the gradients can hold.

    @ts.jit
    def step(params, scale, x, y):
        grads = ts.grad(lambda p: loss(p, x, y) * scale.value)(params)
        return scale.step(grads, lambda g: update(params, g), params)

    scale = ts.DynamicLossScale()
    for x, y in batches:
        params, scale = step(params, scale, x, y)

`@loss_scale(k)` in a type scales the cotangents stored in that type and is invisible outside; this
one scales the loss itself and is halved when a gradient overflows.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from .ad import cond
from .call_errors import refuse_wrong_init
from .errors import ArgumentError
from .graph import functions as F
from .graph import tree
from .graph.trace import Tracer
from .lazy_dataclass import dataclass
from .mesh.parallel.stage_trees import StageTrees, need_whole, over_stages
from .tensor import Tensor, as_tensor

T = TypeVar("T")


@refuse_wrong_init
@dataclass(frozen=True)
class DynamicLossScale:
    """The factor, and how many steps since it last changed had finite gradients.

    value     current factor on the loss: a number, or a tensor of one that a compiled function
              returned. It is data of a compiled function that is given the scale, or its value by
              position: a new value compiles nothing
    good      finite steps since the last change; data, too
    interval  after so many of them the factor doubles
    smallest, largest  its bounds
    """

    value: float | Tensor = 2.0**16
    good: int | Tensor = 0
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        value = self.value if isinstance(self.value, int | float) else self.smallest
        if not 0 < self.smallest <= value <= self.largest < float("inf"):
            raise ArgumentError(f"a loss scale of {self.value} is outside {self.smallest} .. "
                                f"{self.largest}")
        if self.interval < 1:
            raise ArgumentError(f"interval counts steps from 1, got {self.interval}")

    def unscale(self, grads: Any) -> Any:
        """The gradients of the loss: those of loss * value, divided by value."""
        return tree.map_tree(lambda g: F.cast_like(as_tensor(g) * (1.0 / self.value), g), grads)

    def after(self, finite: Any) -> DynamicLossScale:
        """The scale for the next step: half after an overflow, double after `interval` good ones.

        finite: a bool, or a tensor of one; what follows from tensors are tensors
        """
        if any(isinstance(x, Tensor) for x in (finite, self.value, self.good)):
            return self._after_data(as_tensor(finite))
        if not finite:
            return replace(self, value=max(self.value / 2.0, self.smallest), good=0)
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        return replace(self, value=min(self.value * 2.0, self.largest), good=0)

    def _after_data(self, finite: Tensor) -> DynamicLossScale:
        value, good = as_tensor(self.value), as_tensor(self.good)
        grows = good + 1 >= self.interval
        grown = F.where(grows, F.minimum(value * 2.0, self.largest), value)
        return replace(self, value=F.where(finite, grown, F.maximum(value / 2.0, self.smallest)),
                       good=F.where(finite, F.where(grows, 0, good + 1), 0))

    def step(self, grads: Any, update: Callable[[Any], T], unchanged: T
             ) -> tuple[T, DynamicLossScale]:
        """(update(unscaled grads), next scale); when a gradient is not finite the step is skipped:
        (unchanged, half the scale). In a compiled function both are results of one ts.cond, so
        `unchanged` has the structure and types of what `update` returns."""
        finite = all_finite(grads)
        if isinstance(finite, Tensor):
            done = cond(finite, lambda: update(self.unscale(grads)), lambda: unchanged)
        else:
            done = update(self.unscale(grads)) if finite else unchanged
        return done, self.after(finite)


tree.register_tree(
    DynamicLossScale, lambda s: ((s.value, s.good), (s.interval, s.smallest, s.largest)),
    lambda fixed, parts: DynamicLossScale(*parts, *fixed))


def all_finite(grads: Any) -> Any:
    """Whether every number in a nested value of tensors is finite; of traced ones, a tensor. Of
    what the step of a pipeline gives, in the whole model: all ranks take the same steps."""
    need_whole(grads, "whether a step is finite",
               "give scale.step what the pipeline returned, the list of all stages' gradients")
    if isinstance(grads, StageTrees):
        finite = over_stages(grads, lambda own: F.where(_finite(own), 1.0, 0.0), F.minimum,
                             "min") > 0.0
    else:
        finite = _finite(tree.flatten(grads)[0])
    return finite if isinstance(finite, Tracer) else bool(finite)


def _finite(leaves: list[Any]) -> Tensor:
    finite = as_tensor(True)
    for g in leaves:
        finite = F.logical_and(finite, F.all(F.isfinite(as_tensor(g))))
    return finite
