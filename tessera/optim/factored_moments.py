"""Adafactor: second moments of large matrices as the means of their rows and columns."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import functions as F
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from .first_order import step_number
from .record import OptimizerRecord, check, optimizer
from .trainable import decays_matrices

SMALLEST_SCALE = 1e-3  # of a parameter, eps_2 of the paper


@optimizer
@dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerRecord):
    """AdamW's step for a state that is as small as a row and a column of each matrix.

    b = 1 - t^-decay_rate,   R <- b R + (1 - b) mean_j(g^2 + eps),   C likewise over rows
    u = g / sqrt(R C / mean(R)),   u <- u / max(1, rms(u) / clipping_threshold)
    p <- p - lr (max(rms(p), 1e-3) u + weight_decay p)

    The two largest axes are factored where both have min_dim_size_to_factor elements; other
    parameters have a second moment for each element. multiply_by_parameter_scale=False leaves
    rms(p) out. momentum: of the steps, 0 for none, which holds no other state. decays(path, param)
    and the f32 master copies of narrow parameters are those of AdamW.
    Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5; names and defaults of Optax.
    """

    min_dim_size_to_factor: int = 128
    decay_rate: float = 0.8
    multiply_by_parameter_scale: bool = True
    clipping_threshold: float = 1.0
    momentum: float = 0.0
    eps: float = 1e-30
    weight_decay: float = 0.0
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        check(self, fractions=("momentum",),
              positive=("eps", "decay_rate", "clipping_threshold", "min_dim_size_to_factor"))

    @property
    def holds(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("v_row", "v_col", "v", *(("m",) if self.momentum else ()))

    def axes_of(self, path: str, p: Tensor) -> dict[str, tuple[int, ...]]:
        every, factored = tuple(range(p.ndim)), self._factored(p)
        more = {"m": every} if self.momentum else {}
        if factored is None:
            return {"v": every, **more}
        d1, d0 = factored
        return {"v_row": tuple(a for a in every if a != d0),
                "v_col": tuple(a for a in every if a != d1), **more}

    def _factored(self, p: Tensor) -> tuple[int, int] | None:
        """The second largest axis and the largest; None where that one is too short."""
        if p.ndim < 2:
            return None
        *_, d1, d0 = sorted(range(p.ndim), key=lambda a: (p.shape[a], a))
        return (d1, d0) if p.shape[d1] >= self.min_dim_size_to_factor else None

    def rates(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        return lr, -F.expm1(F.log(step_number(step, lr)) * -self.decay_rate)

    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        lr, b = rates
        u, made = self._scaled(g, held, b)
        u = u / F.maximum(1.0, _rms(u) / self.clipping_threshold) * lr
        if self.multiply_by_parameter_scale:
            u = u * F.maximum(_rms(w), SMALLEST_SCALE)
        if self.momentum:
            u = made["m"] = held["m"] * self.momentum + u * (1 - self.momentum)
        return w - (u + lr * decay * w if decay else u), made

    def _scaled(self, g: Tensor, held: dict[str, Tensor], b: Tensor
                ) -> tuple[Tensor, dict[str, Tensor]]:
        """g over the root of its second moment, and what is held of that."""
        square = g * g + self.eps
        if "v" in held:
            v = held["v"] * b + square * (1.0 - b)
            return g * F.rsqrt(v), {"v": v}
        factored = self._factored(g)
        assert factored is not None
        d1, d0 = factored
        row = held["v_row"] * b + F.mean(square, axis=d0) * (1.0 - b)
        col = held["v_col"] * b + F.mean(square, axis=d1) * (1.0 - b)
        whole = F.mean(row, axis=d1 - (d1 > d0), keepdims=True)
        u = g * F.expand_dims(F.rsqrt(row / whole), d0) * F.expand_dims(F.rsqrt(col), d1)
        return u, {"v_row": row, "v_col": col}


def _rms(x: Tensor) -> Tensor:
    return F.sqrt(F.mean(x * x))
