"""Optimizers that hold up to two numbers of each element: SGD, AdamW, Lion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ..graph import functions as F
from ..graph.operand import compute_type, convert
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from .record import OptimizerRecord, check, optimizer
from .trainable import decays_matrices

if TYPE_CHECKING:
    from .orthogonal_steps import Muon


def step_number(step: Tensor, lr: Tensor) -> Tensor:
    """The number of a step in the type of its rate."""
    return convert(step, compute_type(lr.type))


def unbias(b: float, t: Tensor) -> Tensor:
    """1 / (1 - b^t). expm1: 1 - b^t in f32 would lose digits for b near 1 and small t."""
    if b == 0:
        return F.ones_like(t)
    return 1.0 / -F.expm1(t * math.log(b))


def adam_change(settings: AdamW | Muon, g: Tensor, held: dict[str, Tensor], unbias1: Tensor,
                unbias2: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The direction of a step of Adam, and the moments after it."""
    m, v = held["m"], held["v"]
    m = m * settings.b1 + g * (1 - settings.b1)
    v = v * settings.b2 + (g * g) * (1 - settings.b2)
    return (m * unbias1) / (F.sqrt(v * unbias2) + settings.eps), {"m": m, "v": v}


@optimizer
@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerRecord):
    """Gradient descent, with momentum if that is not 0, and decoupled weight decay.

    m <- momentum m + g,   p <- p - lr (m + weight_decay p)

    decays(path, param) and the f32 master copies of narrow parameters are those of AdamW.
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1 with the rate on the whole step.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        check(self, fractions=("momentum",))

    @property
    def holds(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("m",) if self.momentum else ()

    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        change = held["m"] * self.momentum + g if held else g
        made = {"m": change} if held else {}
        return w - rates[0] * (change + w * decay if decay else change), made


@optimizer
@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerRecord):
    """Adam with decoupled weight decay.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

    decays(path, param) says which parameters decay. Moments are f32 (f64 for f64 parameters). A
    parameter of a narrower type has an f32 master copy in the state: updates add up there, and the
    parameter is the master rounded once, as its type says. One whose type rounds stochastically,
    `bf16 @stochastic_round`, has none: its updates add up on average.
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2 with the rate as schedule.
    """

    holds: ClassVar[tuple[str, ...]] = ("m", "v")
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        check(self, fractions=("b1", "b2"), positive=("eps",))

    def rates(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        t = step_number(step, lr)
        return lr, unbias(self.b1, t), unbias(self.b2, t)

    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        lr, *unbiases = rates
        change, made = adam_change(self, g, held, *unbiases)
        return w - lr * (change + w * decay if decay else change), made


@optimizer
@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerRecord):
    """The sign of a momentum: one number of state for each element, steps of one size.

    p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p),   m <- b2 m + (1 - b2) g

    Rates are 3 to 10 times smaller than those of AdamW, and weight_decay as much larger.
    decays(path, param) and the f32 master copies of narrow parameters are those of AdamW.
    Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """

    holds: ClassVar[tuple[str, ...]] = ("m",)
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1e-3
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        check(self, fractions=("b1", "b2"))

    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        change = F.sign(held["m"] * self.b1 + g * (1 - self.b1))
        m = held["m"] * self.b2 + g * (1 - self.b2)
        return w - rates[0] * (change + w * decay if decay else change), {"m": m}
