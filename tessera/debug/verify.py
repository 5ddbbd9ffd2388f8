"""`@ts.verify.numerics(stable=True, bounded=[-100, 100])`: a contract on a function's results."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import config
from ..dims import show_shape
from ..errors import ArgumentError, NumericsError
from ..graph import tree
from ..graph.op import GraphOp, Sample, sample
from ..graph.operand import to_compute
from ..graph.signature import callable_name
from ..graph.trace import apply
from ..tensor import Tensor, as_tensor


class NumericsWarning(RuntimeWarning):
    """A broken contract in flag mode."""


def numerics(*, stable: bool = False, bounded: Sequence[float] | None = None) -> Callable:
    """Decorator: results of the function keep a contract, else NumericsError with value and index.

    stable   finite arguments give finite results
    bounded  every element of every result lies in the closed interval [lo, hi]
    Works on plain and compiled functions and under other decorators. Where TESSERA_NUMERICS (or
    ts.debug.numerics) says "off" nothing is checked, where it says "flag" a warning is given;
    where nobody has chosen a mode, it raises.
    """
    interval = _interval(bounded)
    if not stable and interval is None:
        raise ArgumentError("verify.numerics has nothing to verify",
                            hint="give stable=True, bounded=[lo, hi] or both")

    def decorate(fn: Callable) -> Callable:
        if not callable(fn):
            raise ArgumentError(f"verify.numerics decorates a function, got {type(fn).__name__}")
        return _Verified(fn, bool(stable), interval)

    return decorate


def _interval(bounded: Any) -> tuple[float, float] | None:
    if bounded is None:
        return None
    items = tuple(bounded) if isinstance(bounded, tuple | list) else ()
    numbers = [x for x in items if isinstance(x, int | float) and not math.isnan(x)]
    if len(items) != 2 or len(numbers) != 2 or items[0] > items[1]:
        raise ArgumentError(f"bounded is [lo, hi] with lo <= hi, got {bounded!r}")
    return float(items[0]), float(items[1])


class _Verified:
    """The decorated function; everything else of it (graph, infer, ...) is reachable through it."""

    def __init__(self, fn: Callable, stable: bool, bounded: tuple[float, float] | None):
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.stable, self.bounded = fn, stable, bounded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.fn(*args, **kwargs)
        given = _floats((args, kwargs)) if self.stable else []
        results = _floats(out)
        if results:
            apply(CHECK, *given, *results, name=callable_name(self.fn), given=len(given),
                  stable=self.stable, bounded=self.bounded)
        return out

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "fn":
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __repr__(self) -> str:
        return f"<verified {self.fn!r}>"


def _floats(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, as numbers."""
    found = [as_tensor(x) for x in tree.flatten(value)[0] if isinstance(x, Tensor | np.ndarray)]
    return [to_compute(x) for x in found if x.dtype.kind == "float" or x.scale is not None]


def _check_ref(*arrays: np.ndarray, name: str, given: int, stable: bool,
               bounded: tuple[float, float] | None) -> tuple[()]:
    mode = config.get("numerics") if config.chosen("numerics") else "raise"
    if mode == "off":
        return ()
    problem = _problem(arrays[:given], arrays[given:], stable, bounded)
    if problem is not None:
        error = NumericsError(f"{name}: {problem}", code="E_VERIFY",
                              hint="promised by @verify.numerics on this function")
        if mode == "raise":
            raise error
        warnings.warn(str(error), NumericsWarning, stacklevel=2)
    return ()


def _problem(given: Sequence[np.ndarray], results: Sequence[np.ndarray], stable: bool,
             bounded: tuple[float, float] | None) -> str | None:
    for i, y in enumerate(results):
        which = f"result {i}" if len(results) > 1 else "the result"
        if stable and not np.isfinite(y).all() and all(np.isfinite(x).all() for x in given):
            return _element(which, y, ~np.isfinite(y), "is not finite, all arguments are")
        if bounded is not None:
            outside = ~((y >= bounded[0]) & (y <= bounded[1]))  # NaN lies in no interval
            if outside.any():
                return _element(which, y, outside, f"is outside [{bounded[0]:g}, {bounded[1]:g}]")
    return None


def _element(which: str, y: np.ndarray, wrong: np.ndarray, says: str) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    at = f" at {list(index)}" if index else ""
    return (f"{which} {show_shape(y.shape)} holds {float(y[index]):g}{at}, which {says} "
            f"({int(wrong.sum())} of {y.size} elements)")


def _check_batch(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
    return apply(CHECK, *xs, **attrs), False


CHECK = GraphOp(
    "verify_numerics",
    shape=lambda *xs, **attrs: (),
    ref=_check_ref,
    batch=_check_batch,
    effects=frozenset({"io"}),
    host="now",
    multi=True,
    differentiable=False,
    samples=(
        Sample(sample((2, 3)).args, {"name": "f", "given": 0, "stable": True, "bounded": None}),
    ),
    doc="raise unless results are finite and in an interval",
)

__all__ = ["NumericsWarning", "numerics"]
