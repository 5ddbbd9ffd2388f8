"""Scales of fp8 products in training: from the tensors of now, or from those of steps before.

    scaling = ts.DelayedScaling(amax_history_len=16)
    histories = {"up": scaling.init(), "down": scaling.init()}     # one for each product

    def loss(params, histories, x, y, scaling):
        h = ts.gelu(scaling.matmul(x, params["up"], histories["up"]))
        return ts.mse(scaling.matmul(h, params["down"], histories["down"]), y)

    @ts.jit
    def step(params, histories, state, x, y, lr):
        value, (grads, amax) = ts.value_and_grad(loss, argnums=(0, 1))(
            params, histories, x, y, scaling)
        histories = scaling.update(histories, amax, state["step"])
        params, state = optimizer.update(params, grads, state, lr)
        return params, histories, state, value

With a scale that is known before the tensor is, the kernel that makes a tensor writes its fp8 codes
and finds its largest number in the same pass. How large cotangents are is known in the backward
pass alone: the "gradient" of a history is the largest number of this step, in every element. It is
data for `update`, no slope. Histories are values like an optimizer's state; there is nothing else
that a step remembers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .call_errors import refuse_wrong_init
from .errors import ArgumentError, ShapeError
from .graph import functions as F
from .graph import tree
from .graph.operand import convert, dequantized
from .graph.ops.record_amax import RECORD_AMAX
from .graph.ops.scaled import scale_of
from .graph.ops.scaled_matmul import scaled_product
from .graph.trace import apply
from .lazy_dataclass import dataclass
from .numerics import NumericType, as_type
from .tensor import Tensor, as_tensor

FORMATS = {"hybrid": ("fp8_e4m3", "fp8_e5m2"), "e4m3": ("fp8_e4m3", "fp8_e4m3")}
HISTORIES = ("x", "w", "cotangent")


@refuse_wrong_init
@dataclass(frozen=True)
class CurrentScaling:
    """Products of fp8 with the scales of the tensors that are multiplied.

    fp8_format  "hybrid": e4m3 forward, e5m2 for cotangents. "e4m3" for both
    """

    fp8_format: str = "hybrid"

    def __post_init__(self) -> None:
        if self.fp8_format not in FORMATS:
            raise ArgumentError(f"fp8_format={self.fp8_format!r}",
                                hint="one of " + ", ".join(map(repr, FORMATS)))

    @property
    def types(self) -> tuple[NumericType, NumericType, NumericType]:
        """Of x, w and the cotangent."""
        forward, backward = (as_type(f'{t} @scaled("amax")') for t in FORMATS[self.fp8_format])
        return forward, forward, backward

    def matmul(self, x: Any, w: Any, history: Any = None) -> Tensor:
        """x w in f32, of both as fp8; in its derivatives the cotangent is fp8, too.

        x: [..., M, K] floats   w: [..., K, N]   y: [..., M, N]
        history: {"x", "w", "cotangent"} of f32 [N] each, whose "gradients" then hold the largest
        finite |x|, |w| and |cotangent| of this call, or of all microbatches of a pipeline. One for
        each product: of several that share one, and of iterations that do, the numbers add up, so
        that scales are too wide and nothing overflows.
        Raises ShapeError, DTypeError.
        """
        x, w = dequantized(x), dequantized(w)
        kept = None if history is None else _checked(history)
        x_scale, w_scale, cotangent_scale = self._scales(kept)
        x_type, w_type, cotangent = self.types
        y = scaled_product(F.quantize(x, x_type, scale=x_scale),
                           F.quantize(w, w_type, scale=w_scale), cotangent_scale, cotangent)
        return y if kept is None else apply(RECORD_AMAX, y, x, w, *kept)

    def _scales(self, history: tuple[Tensor, ...] | None) -> tuple[Tensor | None, ...]:
        """Of x, w and the cotangent; None: found from the tensor."""
        return None, None, None


@refuse_wrong_init
@dataclass(frozen=True)
class DelayedScaling(CurrentScaling):
    """Products of fp8 with scales from the largest numbers of the last steps.

    scale = 2^margin max(history) / largest number of the format

    amax_history_len   steps that a history holds; 1: the step before alone
    margin             powers of two that numbers may grow by before they saturate

    A history of zeros gives the scale 1, in which small numbers vanish: take the first step with
    `scaling.first`, or say in `init` how large numbers may be. What is beyond the range saturates;
    infinities of cotangents become NaN.
    Micikevicius et al. 2022, arXiv:2209.05433; the names are those of NVIDIA's Transformer Engine.
    """

    amax_history_len: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amax_history_len < 1:
            raise ArgumentError(f"amax_history_len={self.amax_history_len}", hint="at least 1")

    @property
    def first(self) -> DelayedScaling:
        """For a step with empty histories: scales of the tensors themselves, which are recorded."""
        return _FirstStep(**{f.name: getattr(self, f.name) for f in fields(self)})

    def init(self, x: float = 0.0, w: float = 0.0, cotangent: float = 0.0) -> dict[str, Tensor]:
        """The history of a product before its first step: f32 [amax_history_len] each for x, w and
        the cotangent. Given: how large these may be, in place of a first step that finds out."""
        sizes = dict(zip(HISTORIES, (x, w, cotangent), strict=True))
        if not all(s >= 0 for s in sizes.values()):
            raise ArgumentError("the largest numbers of a tensor are not negative, got "
                                + ", ".join(str(s) for s in sizes.values() if not s >= 0))
        return {name: F.full((self.amax_history_len,), s, "f32") for name, s in sizes.items()}

    def update(self, histories: Any, amax: Any, step: Any) -> Any:
        """A tree of histories after a step, which takes the place of the oldest one.

        histories: f32 [amax_history_len] each, or [..., amax_history_len], stacked as those of the
        layers of a ts.scan are   amax: their "gradients"
        step: an integer, or a tensor of one, that grows by 1 each time
        """
        place = as_tensor(step) % self.amax_history_len
        here = F.equal(F.arange(self.amax_history_len, dtype=place.dtype), place)

        def put(history: Tensor, found: Tensor) -> Tensor:
            return F.where(here, found, history)

        return tree.map_tree(put, histories, amax)

    def _scales(self, history: tuple[Tensor, ...] | None) -> tuple[Tensor | None, ...]:
        if history is None:
            raise ArgumentError("delayed scaling of a product without a history",
                                hint="scaling.matmul(x, w, history), history = scaling.init()")
        return tuple(scale_of(F.max(F.stop_gradient(h)) * 2.0**self.margin, t)
                     for h, t in zip(history, self.types, strict=True))


@dataclass(frozen=True)
class _FirstStep(DelayedScaling):
    """DelayedScaling before there is anything to scale by."""

    def _scales(self, history: tuple[Tensor, ...] | None) -> tuple[Tensor | None, ...]:
        return None, None, None


def _checked(history: Any) -> tuple[Tensor, ...]:
    hint = "history = scaling.init(), one for each product"
    if not isinstance(history, dict) or history.keys() != set(HISTORIES):
        raise ArgumentError(f"a history of a product has {', '.join(HISTORIES)}, got "
                            f"{list(history) if isinstance(history, dict) else history!r}",
                            hint=hint)
    found = tuple(as_tensor(history[name]) for name in HISTORIES)
    for name, h in zip(HISTORIES, found, strict=True):
        if h.ndim != 1:
            raise ShapeError(f"the history of {name} has {h.ndim} axes, not one", hint=hint)
    return tuple(convert(h, as_type("f32")) for h in found)


__all__ = ["CurrentScaling", "DelayedScaling"]
