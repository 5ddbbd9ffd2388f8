"""Python operators, NumPy ufuncs and methods of Tensor, as ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DTypeError
from ..tensor import OPERATORS, Tensor
from .operand import PUBLIC

_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "power",
}
_BITS = {"and": ("&", "logical_and"), "or": ("|", "logical_or"), "xor": ("^", "logical_xor"),
         "invert": ("~", "logical_not")}
_COMPARE = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal",
}
_UNARY = {"neg": "negative", "abs": "abs"}
_METHODS = (
    "reshape transpose squeeze expand_dims swapaxes flatten sum mean var std prod max min argmax "
    "argmin any all cumsum exp log sqrt tanh abs round clip"
).split()
_UFUNCS = {
    **{n: n for n in (
        "add subtract multiply divide floor_divide remainder power maximum minimum exp expm1 log "
        "log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc sign less less_equal greater "
        "greater_equal equal not_equal isnan isinf isfinite square logical_and logical_or "
        "logical_xor logical_not matmul negative").split()},
    "true_divide": "divide", "absolute": "abs", "rint": "round", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arctan2": "atan2",
}


def _swapped(op: Callable) -> Callable:
    return lambda a, b: op(b, a)


def _of_bits(symbol: str, name: str) -> Callable:
    """An operator on integers and bools. Of floats it is most likely a mistake for `and`."""
    def call(*operands: Any) -> Any:
        for x in operands:
            kind = x.dtype.kind if isinstance(x, Tensor) else np.asarray(x).dtype.kind
            if kind in ("float", "f"):
                shown = x.type if isinstance(x, Tensor) else type(x).__name__
                raise DTypeError(f"{symbol} needs integers or bools, got {shown}",
                                 hint=f"compare first, x != 0, or ts.{name}(...), which does")
        return PUBLIC[name](*operands)

    return call


def install() -> None:
    """Fill the table through which Tensor reaches the ops."""
    for method, name in _BINARY.items():
        OPERATORS[f"__{method}__"] = PUBLIC[name]
        OPERATORS[f"__r{method}__"] = _swapped(PUBLIC[name])
    for method, (symbol, name) in _BITS.items():
        op = _of_bits(symbol, name)
        OPERATORS[f"__{method}__"] = op
        if method != "invert":
            OPERATORS[f"__r{method}__"] = _swapped(op)
        OPERATORS[f"ufunc_{'invert' if method == 'invert' else 'bitwise_' + method}"] = op
    for method, name in (_COMPARE | _UNARY).items():
        OPERATORS[f"__{method}__"] = PUBLIC[name]
    for name in _METHODS:
        OPERATORS[name] = PUBLIC[name]
    for ufunc, name in _UFUNCS.items():
        OPERATORS[f"ufunc_{ufunc}"] = PUBLIC[name]
    OPERATORS["astype"] = _astype


def _astype(x: Any, dtype: Any) -> Any:
    """x converted to another type; float to integer truncates toward zero and saturates."""
    return PUBLIC["cast"](x, dtype)
