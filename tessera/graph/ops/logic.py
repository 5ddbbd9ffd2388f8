"""Logic of what is true, elementwise, and operators on the bits of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import DTypeError
from ...numerics import NumericType
from ...tensor import Tensor, as_tensor
from ..op import OPS, GraphOp
from ..operand import literal, promote, public, store, to_compute
from ..trace import apply
from .elementwise import AND, NOT, OR, SHIFT_LEFT, SHIFT_RIGHT, XOR


def _bitwise(name: str, op: GraphOp, sign: str) -> Callable:
    def fn(a: Any, b: Any) -> Tensor:
        (x, y), numeric = promote(a, b)
        _need_bits(x, numeric, sign, name)
        return store(apply(op, x, y), numeric)

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"a {sign} b of the bits of integers, or of bools. Raises DTypeError on floats."
    return public(fn)


def _need_bits(x: Tensor, numeric: NumericType, sign: str, name: str) -> None:
    """Of floats an operator on bits is most likely a mistake for `and`. x: as it is computed with,
    which of a scaled type are floats."""
    if x.dtype.kind == "float":
        logical = name.replace("bitwise", "logical")
        raise DTypeError(f"{sign} needs integers or bools, got {numeric}",
                         hint=f"compare first, x != 0, or ts.{logical}(...), which does")


def _shift(name: str, op: GraphOp, sign: str, outside: str) -> Callable:
    def fn(a: Any, b: Any) -> Tensor:
        (x, y), numeric = promote(a, b)
        if x.dtype.kind not in ("int", "uint"):
            raise DTypeError(f"{sign} needs integers, got {numeric}",
                             hint=f"ts.cast(x, 'int32') {sign} n, or x * 2.0**n of floats")
        return store(apply(op, x, y), numeric)

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = (f"a {sign} b of integers, elementwise, as NumPy has it: {outside} where b is "
                  "outside of 0..bits - 1. Raises DTypeError on floats and bools.")
    return public(fn)


def _logical(name: str, op: GraphOp, doc: str) -> Callable:
    def fn(a: Any, b: Any) -> Tensor:
        return apply(op, truth(a), truth(b))

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"{doc}, of what is not 0, elementwise with broadcasting; bool_."
    return public(fn)


def truth(x: Any) -> Tensor:
    """x as bool_: whether each element is not 0. NaN is not 0."""
    x = as_tensor(x)
    return x if x.dtype.kind == "bool" else apply(NOT_EQUAL, to_compute(x), literal(0, x))


NOT_EQUAL = OPS["not_equal"]
bitwise_and = _bitwise("bitwise_and", AND, "&")
bitwise_or = _bitwise("bitwise_or", OR, "|")
bitwise_xor = _bitwise("bitwise_xor", XOR, "^")
left_shift = _shift("left_shift", SHIFT_LEFT, "<<", "0")
right_shift = _shift("right_shift", SHIFT_RIGHT, ">>", "all bits the sign")
logical_and = _logical("logical_and", AND, "a and b")
logical_or = _logical("logical_or", OR, "a or b")
logical_xor = _logical("logical_xor", XOR, "exclusive or")


@public
def bitwise_not(x: Any) -> Tensor:
    """~x of the bits of integers, not x of bools, elementwise. Raises DTypeError on floats."""
    (c,), numeric = promote(x)
    _need_bits(c, numeric, "~", "bitwise_not")
    return store(apply(NOT, c), numeric)


@public
def logical_not(x: Any) -> Tensor:
    """Whether each element is 0; bool_."""
    return apply(NOT, truth(x))
