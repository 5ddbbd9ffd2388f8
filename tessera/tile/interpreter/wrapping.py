"""Sums and products of signed integers that do not fit into their type: what a checked run tells.

They wrap, as on every machine. That is meant where bits are mixed, for which there are unsigned
types; of positions in memory it is the mistake that shows with the first large tensor.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from tessera.tile.ir.ir import Op
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, TileType

SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def wraps(op: Op, args: list[Any], value: np.ndarray) -> np.ndarray | None:
    """Where the result of an op of integers is not that of its numbers; None where it is nowhere.
    The ends of the type among the operands are masks, not numbers."""
    kind = op.outs[0].type
    if op.name not in SIGNS or not isinstance(kind, Scalar | TileType) or kind.dtype.kind != "int":
        return None
    low, high = kind.dtype.min, kind.dtype.max
    wide = np.int64 if kind.dtype.bits < 64 else np.float64
    f = OPS[op.name].numpy
    assert f is not None
    exact = f(*(np.asarray(a).astype(wide) for a in args))
    wrong = (exact < low) | (exact > high) if wide is np.int64 else (
        np.abs(exact) > 2.0 ** 63 * (1 + 2.0 ** -50))
    if not wrong.any():
        return None
    for a in args:
        wrong = wrong & (a != low) & (a != high)
    return np.broadcast_to(wrong, value.shape) if wrong.any() else None


def tell_wrapped(op: Op, args: list[Any], wrong: np.ndarray, value: np.ndarray) -> None:
    """A warning of the line, with the numbers of the first place."""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    x, y = (np.broadcast_to(a, value.shape)[at] for a in args)
    where, kind = op.where, op.outs[0].type
    assert isinstance(kind, Scalar | TileType)
    warnings.warn_explicit(
        f"{x} {SIGNS[op.name]} {y} does not fit into {kind.dtype} and wraps to {value[at]}: cast "
        "an operand before, ts.tile.cast(x, ts.int64), or to an unsigned type where it is meant",
        RuntimeWarning, where.file if where else "", where.line if where else 0)


__all__ = ["tell_wrapped", "wraps"]
