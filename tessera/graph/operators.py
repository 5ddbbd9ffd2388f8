"""Python operators, NumPy ufuncs and methods of Tensor, as ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..complex_pair import Complex
from ..open_trace import trace_state
from ..tensor import INNER, OPERATORS, PROPERTIES
from ..tensor_operators import Operators
from . import functions as F
from .eager_forms import LONG_WAY, UNKNOWN
from .operand import PUBLIC

_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "power",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "left_shift", "rshift": "right_shift", "matmul": "matmul",
}
_COMPARE = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal",
}
_UNARY = {"neg": "negative", "abs": "abs", "invert": "bitwise_not"}
_METHODS = (
    "reshape transpose squeeze expand_dims swapaxes flatten sum mean var std prod max min argmax "
    "argmin any all cumsum exp log sqrt tanh abs round clip"
).split()
_UFUNCS = {  # beside those that are the meaning of an elementwise op: see ops/elementwise.py
    **{n: n for n in "power square logical_and logical_or logical_xor logical_not matmul "
                     "bitwise_and bitwise_or bitwise_xor left_shift right_shift".split()},
    "rint": "round", "invert": "bitwise_not",
}


def _operator(op: Callable) -> Callable:
    """The operator of a tensor and another operand, which a complex one does itself."""
    readers = op.eager.readers  # type: ignore[attr-defined]

    def operator(a: Any, b: Any) -> Any:
        if trace_state.builder is None and (read := readers.get((type(a), type(b)))) is not None:
            made = read(a, b)
            if made is not LONG_WAY and made is not UNKNOWN:
                return made
        return NotImplemented if type(b) is Complex else op(a, b)

    return operator


def _swapped(op: Callable) -> Callable:
    readers = op.eager.readers  # type: ignore[attr-defined]

    def operator(a: Any, b: Any) -> Any:
        if trace_state.builder is None and (read := readers.get((type(b), type(a)))) is not None:
            made = read(b, a)
            if made is not LONG_WAY and made is not UNKNOWN:
                return made
        return op(b, a)

    return operator


def install() -> None:
    """Fill the table through which Tensor reaches the ops, and put operators and methods into it.
    """
    for method, name in _BINARY.items():
        OPERATORS[f"__{method}__"] = _operator(PUBLIC[name])
        OPERATORS[f"__r{method}__"] = _swapped(PUBLIC[name])
    for method, name in (_COMPARE | _UNARY).items():
        OPERATORS[f"__{method}__"] = PUBLIC[name]
    for name in _METHODS:
        OPERATORS[name] = PUBLIC[name]
    for ufunc, name in _UFUNCS.items():
        OPERATORS[f"ufunc_{ufunc}"] = PUBLIC[name]
    OPERATORS["astype"] = _astype
    for name, function in OPERATORS.items():
        if not name.startswith(INNER):
            setattr(Operators, name, property(function) if name in PROPERTIES else function)


def _astype(x: Any, dtype: Any) -> Any:
    """x converted to another type; float to integer truncates toward zero and saturates."""
    return F.cast(x, dtype)
