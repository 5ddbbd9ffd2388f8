"""Comparisons of unsigned 64-bit integers with signed ones: no integer type holds both."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...tensor import Tensor
from .. import functions as F
from ..op import GraphOp
from ..operand import dequantized
from ..trace import apply
from ..weak_numbers import is_number


def compare_mixed_signs(op: GraphOp, a: Any, b: Any) -> Tensor | None:
    """op(a, b) of integers of which one is uint64 and the other signed, exactly; None of others.

    Their common type is f64, in which 2**53 + 1 is 2**53. A number below 0 is below every unsigned
    one, others are compared as uint64.
    """
    named = [getattr(getattr(x, "dtype", None), "name", "") for x in (a, b)]
    if "uint64" not in named or is_number(a) or is_number(b):
        return None
    x, y = dequantized(a), dequantized(b)
    if "int" not in (x.dtype.kind, y.dtype.kind):
        return None
    left = x.dtype.kind == "int"
    below = F.less(x if left else y, 0)
    there = bool(getattr(np, op.name)(*((-1, 0) if left else (0, -1))))
    whole = apply(op, F.cast(x, "uint64"), F.cast(y, "uint64"))  # what is below 0 becomes 0
    return F.logical_or(below, whole) if there else F.logical_and(F.logical_not(below), whole)
