"""Muon: the momentum of a matrix, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.operand import compute_type, convert
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..tensor import Tensor
from .first_order import adam_change, step_number, unbias
from .record import OptimizerRecord, check, optimizer
from .trainable import decays_matrices


def hidden_matrices(path: str, param: Tensor) -> bool:
    """What Muon is meant for: matrices, or layers of them stacked, that are neither embeddings nor
    the last layer: neither "embed" nor "head" is in the path."""
    return param.ndim in (2, 3) and not any(word in path for word in ("embed", "head"))


@optimizer
@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerRecord):
    """Steps whose singular values are all about 1, for matrices; AdamW for other parameters.

    m <- momentum m + (1 - momentum) g,   u = orthogonal(momentum m + (1 - momentum) g)
    p <- p - lr (scale u + weight_decay p)

    orthogonal: ns_steps of X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X from X = u / |u|, with ns_coeffs,
    in ns_type.   nesterov=False: u is made of m.   muon(path, param) says which parameters these
    are: [in, out] matrices, or several along a first axis. consistent_rms: scale is that times
    sqrt(max(in, out)), so that rates are those of AdamW; None: sqrt(max(1, out / in)), for which
    rates are larger. b1, b2, eps: of AdamW for the others. decays(path, param) and the f32 master
    copies of narrow parameters are those of AdamW.
    Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, eq. 4.
    """

    holds: ClassVar[tuple[str, ...]] = ("m", "v")
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coeffs: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_type: Any = "bf16"
    consistent_rms: float | None = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon: Callable[[str, Tensor], bool] = hidden_matrices
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        check(self, fractions=("momentum", "b1", "b2"), positive=("eps", "ns_steps"))

    def axes_of(self, path: str, p: Tensor) -> dict[str, tuple[int, ...]]:
        every = tuple(range(p.ndim))
        if not self.muon(path, p):
            return {"m": every, "v": every}
        if p.ndim not in (2, 3):
            raise ArgumentError(f"Muon: {path!r} has {p.ndim} axes, a matrix has 2, several have 3",
                                hint="muon=lambda path, param: param.ndim == 2 and ...")
        return {"m": every}

    def rates(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        t = step_number(step, lr)
        return lr, unbias(self.b1, t), unbias(self.b2, t)

    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        lr, *unbiases = rates
        if "v" in held:
            change, made = adam_change(self, g, held, *unbiases)
        else:
            m = held["m"] * self.momentum + g * (1 - self.momentum)
            u = m * self.momentum + g * (1 - self.momentum) if self.nesterov else m
            change, made = self._orthogonal(u) * self._scale(w), {"m": m}
        return w - lr * (change + w * decay if decay else change), made

    def _scale(self, w: Tensor) -> float:
        n_in, n_out = w.shape[-2:]
        if self.consistent_rms is None:
            return math.sqrt(max(1.0, n_out / n_in))
        return self.consistent_rms * math.sqrt(max(n_in, n_out))

    def _orthogonal(self, u: Tensor) -> Tensor:
        """u with singular values about 1, by products of the smaller square."""
        a, b, c = self.ns_coeffs
        tall = u.shape[-2] > u.shape[-1]
        norm = F.sqrt(F.sum(u * u, axis=(-2, -1), keepdims=True))
        x = convert(u / (norm + self.eps), as_type(self.ns_type))
        x = F.swapaxes(x, -2, -1) if tall else x  # [.., small, large]
        for _ in range(self.ns_steps):
            square = x @ F.swapaxes(x, -2, -1)
            x = x * a + (square * b + (square @ square) * c) @ x
        x = F.swapaxes(x, -2, -1) if tall else x
        return convert(x, compute_type(u.type))
