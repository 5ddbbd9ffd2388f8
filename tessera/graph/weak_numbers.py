"""Python numbers as arguments of a traced function: weak there too.

Beside a tensor a Python number takes the tensor's type: bf16 * 2.0 is bf16. As an argument of a
compiled function its value is data, so it is passed in the widest type of its kind and cast where
it is used. Arithmetic of such numbers among themselves is Python's: in f64 and int64, and the
result is a number again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..numerics import DType, NumericType, as_type, weak_result
from ..tensor import OPERATORS, Tensor, as_tensor
from .op import FLAT_VIEW, Arg, GraphOp, Sample
from .trace import LITERAL, Tracer, apply

F32, F64, INT64 = as_type("f32"), as_type("f64"), as_type("int64")
NUMBER = "python number of "  # begin of the name of leaves that stand for one; then its type


class Number(Tracer):
    """A Python number whose value is data. Where a tensor is needed it is one of f32 or int64 (a
    NumPy number: of its own type); `wide` is its value in f64 or int64."""

    __slots__ = ("wide",)

    def __init__(self, wide: Tracer, narrow: Tracer):
        super().__init__(narrow.builder, narrow.value)
        self.wide = wide


def number_leaf(value: Any) -> Tensor:
    """A Python or NumPy number as the array that is passed for it."""
    if isinstance(value, np.generic):
        own = as_type(value.dtype)
    else:
        own = F32 if isinstance(value, float) else as_tensor(value).type
    wide = F64 if own.dtype.kind == "float" else INT64
    if wide is INT64:
        weak_result(INT64.dtype, int(value))
    return Tensor(np.array(value, wide.dtype.numpy), wide, name=f"{NUMBER}{own}")


def carried(number: Number) -> Tensor:
    """The leaf for a number of a trace around the one that begins."""
    leaf = number.wide.copy()
    leaf.name = f"{NUMBER}{number.type}"
    return leaf


def number_type(leaf: Tensor) -> NumericType | None:
    """The type as a tensor of the number that a leaf stands for; None for other leaves."""
    if leaf.name is None or not leaf.name.startswith(NUMBER):
        return None
    return as_type(leaf.name[len(NUMBER):])


def number_of(wide: Any, own: NumericType | None = None) -> Number:
    """The number whose value is a traced scalar of f64 or int64; own: its type as a tensor."""
    own = own or (F32 if wide.dtype is F64.dtype else INT64)
    return Number(wide, OPERATORS["astype"](wide, own))


def leaf_of(value: Any) -> Tensor:
    """What is passed for a number, known or traced, or for other data, as which an integer counts
    that uint64 alone holds."""
    if isinstance(value, Number):
        return carried(value)
    large = isinstance(value, int | np.integer) and value >= 2**63
    return number_leaf(value) if is_number(value) and not large else as_tensor(value)


def is_internal(name: str) -> bool:
    """Whether a tensor's name says that it stands for a number, and was given by no user."""
    return name == LITERAL or name.startswith(NUMBER)


def standing_for(leaf: Tensor, t: Tensor) -> Tensor:
    """A tensor in the place of a leaf: a number again where the leaf stands for one."""
    own = number_type(leaf)
    return t if own is None else number_of(t, own)


def is_number(x: Any) -> bool:
    """Whether x is a Python or NumPy number, known or traced: one that takes others' types."""
    return isinstance(x, bool | int | float | Number) or (
        isinstance(x, np.generic) and x.dtype.kind in "biuf" and not hasattr(x, "type")
    )


def weak_type(dtype: DType, x: Any) -> DType:
    """The type of an operation on a tensor of `dtype` and a number."""
    if isinstance(x, Number):
        return weak_result(dtype, 0.0 if x.dtype.kind == "float" else 0)
    return weak_result(dtype, x.item() if isinstance(x, np.generic) else x)


def fitting(x: Number, dtype: DType) -> Tensor:
    """The wide value of a number, which must lie in an integer type's range when it runs."""
    if dtype.kind not in ("int", "uint") or dtype is INT64.dtype or x.dtype.kind == "float":
        return x.wide
    return apply(CHECK_FITS, x.wide, dtype=dtype)


def _check_fits(x: np.ndarray, dtype: DType) -> np.ndarray:
    for value in x.reshape(-1):
        weak_result(dtype, int(value))
    return x


CHECK_FITS = GraphOp(
    "check_fits",
    shape=lambda x, dtype: x,
    ref=_check_fits,
    batch=lambda size, batched, x, dtype: (apply(CHECK_FITS, x, dtype=dtype), True),
    axes="...->...",
    differentiable=False,
    memory=FLAT_VIEW,
    host="now",
    samples=(Sample((Arg((), "int", False),), {"dtype": as_type("int8").dtype}),),
    doc="an integer that must lie within the range of an integer type; an ArgumentError otherwise",
)


# --- arithmetic among numbers -------------------------------------------------------------------
def _promoted_numbers(a: Any, b: Any, floating: bool) -> list[Any]:
    """Two numbers as Python computes with them: in f64 when one is a float, or must become one."""
    floating = floating or any(
        isinstance(x, float) or (isinstance(x, Number) and x.dtype.kind == "float") for x in (a, b))
    out = []
    for x in (a, b):
        wide = x.wide if isinstance(x, Number) else number_leaf(x)
        out.append(OPERATORS["astype"](wide, F64) if floating else wide)
    return out


def _arithmetic(method: str) -> Callable[[Number, Any], Any]:
    def run(self: Number, other: Any) -> Any:
        if not is_number(other):
            return OPERATORS[method](self, other)
        a, b = _promoted_numbers(self, other, method.endswith("truediv__"))
        made = OPERATORS[method](a, b)
        return made if made.dtype.kind == "bool" else number_of(made)

    return run


def _unary(method: str) -> Callable[[Number], Any]:
    return lambda self: number_of(OPERATORS[method](self.wide))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Number, _method, _arithmetic(_method))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _arithmetic(f"__{_name}__"))
Number.__neg__, Number.__abs__ = _unary("__neg__"), _unary("__abs__")  # type: ignore
Number.__hash__ = Tensor.__hash__  # type: ignore[method-assign]

__all__ = ["NUMBER", "Number", "fitting", "is_internal", "is_number", "leaf_of", "number_of",
           "number_type", "standing_for", "weak_type"]
