"""Reductions over ranks: in the accumulate type, in one fixed order, rounded once.

The terms of ranks 0, 1, 2, ... are added pairwise: (0+1) + (2+3), ... The order depends on the
number of ranks only, so the bits are the same on every transport and in every run, and the error
grows with the logarithm of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError
from tessera.numerics import DType, NumericType, decode, encode

_QUIET = np.errstate(over="ignore", invalid="ignore")  # inf and NaN are results


def need_reducible(numeric: NumericType, op: str) -> None:
    """Raise DTypeError for sums of bools and means of integers."""
    kind = numeric.dtype.kind
    if (op == "sum" and kind == "bool") or (op == "mean" and kind != "float"):
        raise DTypeError(f"there is no {op} of {numeric} over ranks",
                         hint="op='max' is any, op='min' is all; or cast the operand first")


@_QUIET
def reduce_terms(terms: Sequence[np.ndarray], numeric: NumericType, op: str) -> np.ndarray:
    """The reduction of the ranks' arrays in their accumulate type (f32 for narrower ones).

    terms: elements of `numeric`, one array per rank, of one shape
    """
    accum = numeric.accum
    wide = [_widen(t, numeric.dtype, accum) for t in terms]
    total = _pairwise(wide, _combine(op, accum))
    return total / total.dtype.type(len(terms)) if op == "mean" else total


def _widen(array: np.ndarray, dtype: DType, accum: DType) -> np.ndarray:
    values = decode(array, dtype)
    if dtype.kind != "float":
        return values.astype(accum.numpy, copy=False)
    return values.astype(np.float64 if accum.bits == 64 else np.float32, copy=False)


def _combine(op: str, accum: DType) -> Callable[[Any, Any], np.ndarray]:
    if op in ("max", "min"):
        return np.maximum if op == "max" else np.minimum
    if accum.kind == "float" and accum.bits < 32:
        return lambda a, b: decode(encode(a + b, accum), accum)
    return np.add


def _pairwise(values: list[np.ndarray], combine: Callable) -> np.ndarray:
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2:]
    return values[0]


def needs_key(numeric: NumericType, to: NumericType) -> bool:
    """Whether rounding sums of `numeric` to `to` draws random bits."""
    return _is_drawn(to, 64 if numeric.accum.bits == 64 else 32)


def _is_drawn(to: NumericType, source_bits: int) -> bool:
    narrows = to.dtype.kind == "float" and to.dtype.bits < source_bits
    return to.policy.rounding == "stochastic" and narrows


def round_once(values: np.ndarray, to: NumericType, key: Any, index: np.ndarray | None,
               offset: int = 0) -> np.ndarray:
    """Reduced values as elements of `to`. Stochastic rounding draws the bits of each element's
    index in the whole result, so it does not matter which rank rounds it."""
    policy = to.policy
    stochastic = _is_drawn(to, values.dtype.itemsize * 8)
    if stochastic and key is None:
        raise key_missing(to)
    rounding = policy.rounding if stochastic or policy.rounding != "stochastic" else "nearest_even"
    return encode(values, to.dtype, rounding=rounding, saturate=policy.saturate,
                  key=key if stochastic else None, index=index if stochastic else None,
                  offset=offset)


def key_missing(to: NumericType) -> ArgumentError:
    return ArgumentError(f"rounding to {to} needs a key that is the same on all ranks",
                         hint="key=0, or a key that ts.next_key() gave every rank alike")
