"""Complex tensors: two real ones, with the arithmetic of complex numbers.

There is no complex numeric type: no tensor core and no low precision has one, and each part has its
own rounding. What NumPy gives as complex arrays, `ts.fft.fft` or `ts.eig`, is a `Complex`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import hooks
from .errors import ArgumentError, DTypeError, ShapeError
from .tensor_operators import FUNCTIONS

if TYPE_CHECKING:  # this module stands below it
    from .tensor import Tensor


class _Parts(NamedTuple):
    real: Tensor
    imag: Tensor


class Complex(_Parts):
    """A complex tensor: its parts, of one shape and one real type.

    It is a tuple, so that `re, im = ts.fft.fft(x)` and functions of trees take it apart, and it has
    + - * / @ == !=, whole powers, abs, .conj() and .angle() beside numbers, real tensors and others
    of its kind. A number in the place of a part, ts.Complex(x, 0), is all of its elements. An
    index is one of its elements, z[0, 2:], as in an array of complex numbers. Where a real tensor
    is needed it is an ArgumentError.

        z = ts.fft.rfft(x)
        y = ts.fft.irfft(z * ts.Complex(ts.cos(t), ts.sin(t)))
        z = ts.Complex(np.exp(1j * angles))         # of an array of complex numbers
        total = ts.map_tree(ts.sum, z)              # what is linear, of both parts
    """

    __slots__ = ()
    __array_ufunc__ = None  # NumPy's arrays and numbers leave operators with it to it

    def __new__(cls, real: Any, imag: Any = None) -> Complex:
        if imag is None and isinstance(real, Complex):
            return real
        if imag is None:
            parts = _real_and_imaginary(real)
            if parts is None or parts[1] is None:
                raise ArgumentError(
                    "ts.Complex takes two real tensors, or an array of complex numbers, got "
                    f"{type(real).__name__}", hint="ts.Complex(x, ts.zeros_like(x))")
            real, imag = (np.array(part) for part in parts)
        return super().__new__(cls, *_same_shape_parts(*map(_of_array, (real, imag))))

    def _no_order(self, other: Any) -> Any:
        raise DTypeError("complex numbers have no order", hint="compare abs(z), z.real or z.imag")

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __eq__(self, other: Any) -> Any:
        """Which elements are equal, a bool tensor."""
        parts = _real_and_imaginary(other)
        if parts is None:
            return NotImplemented
        re, im = parts
        return FUNCTIONS["logical_and"](FUNCTIONS["equal"](self.real, re),
                                        FUNCTIONS["equal"](self.imag, 0.0 if im is None else im))

    def __ne__(self, other: Any) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else FUNCTIONS["logical_not"](same)

    __hash__ = _Parts.__hash__

    def __bool__(self) -> bool:
        """Whether its one element is not 0; of more, an error as that of a tensor."""
        return bool(self != 0.0)

    def __complex__(self) -> complex:
        return complex(float(self.real), float(self.imag))

    def item(self) -> complex:
        """The one element as a Python number."""
        return complex(self.real.item(), self.imag.item())

    def tolist(self) -> Any:
        """Python's complex numbers in nested lists."""
        return self.numpy().tolist()

    def __getitem__(self, index: Any) -> Complex:  # type: ignore[override]  # not of the tuple
        return Complex(self.real[index], self.imag[index])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a complex tensor has no {name!r}; of both its parts: "
                             f"ts.map_tree(lambda t: t.{name}, z), with (...) for a method")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    @property
    def ndim(self) -> int:
        return self.real.ndim

    @property
    def type(self) -> Any:
        """The type of the parts."""
        return self.real.type

    def conj(self) -> Complex:
        return Complex(self.real, -self.imag)

    def angle(self) -> Tensor:
        """The angle to the positive real axis, -pi to pi."""
        return FUNCTIONS["atan2"](self.imag, self.real)

    def numpy(self) -> np.ndarray:
        """A copy as an array of complex64, or of complex128 where the parts are f64."""
        re, im = (np.asarray(part) for part in self)
        wide = np.complex128 if np.float64 in (re.dtype, im.dtype) else np.complex64
        out = np.empty(np.broadcast_shapes(re.shape, im.shape), wide)
        out.real, out.imag = re, im
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __neg__(self) -> Complex:
        return Complex(-self.real, -self.imag)

    def __abs__(self) -> Tensor:
        """The distance from 0, without overflow of squares; its gradient at 0 is 0."""
        return FUNCTIONS["hypot"](self.real, self.imag)

    def __add__(self, other: Any) -> Complex:
        other = _real_and_imaginary(other)
        return NotImplemented if other is None else _sum(self, *other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Complex:
        other = _real_and_imaginary(other)
        if other is None:
            return NotImplemented
        re, im = other
        return _sum(self, -re, None if im is None else -im)

    def __rsub__(self, other: Any) -> Complex:
        return -self + other

    def __mul__(self, other: Any) -> Complex:
        return _product(self, other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Complex:
        if isinstance(other, Complex):
            return self * _reciprocal(other)
        if isinstance(other, complex | np.complexfloating):
            return self * (1 / other)
        return Complex(self.real / other, self.imag / other)

    def __rtruediv__(self, other: Any) -> Complex:
        return _reciprocal(self) * other

    def __pow__(self, exponent: Any) -> Complex:
        """Whole powers, as products."""
        if isinstance(exponent, bool) or not isinstance(exponent, int | np.integer):
            raise ArgumentError(
                f"a complex tensor has whole powers, got {exponent!r}: others are not one number",
                hint="r = abs(z) ** k, t = k * z.angle(), ts.Complex(r * ts.cos(t), r * ts.sin(t))")
        return _whole_power(self if exponent >= 0 else _reciprocal(self), abs(int(exponent)))

    def __matmul__(self, other: Any) -> Complex:
        return _product(self, other, operator.matmul)

    def __rmatmul__(self, other: Any) -> Complex:
        return _product(self, other, lambda mine, theirs: FUNCTIONS["matmul"](theirs, mine))


def _of_array(part: Any) -> Any:
    return hooks.as_tensor.get()(part) if isinstance(part, np.ndarray) else part


def _same_shape_parts(real: Any, imag: Any) -> tuple[Any, Any]:
    """Two parts of one shape: a number beside a tensor is all of its part. What else a tree may
    hold in the place of tensors stays as it is."""
    mine, other = (getattr(part, "shape", None) for part in (real, imag))
    if mine == other:
        return real, imag
    if isinstance(imag, int | float):
        return real, FUNCTIONS["full_like"](real, imag)
    if isinstance(real, int | float):
        return FUNCTIONS["full_like"](imag, real), imag
    if mine is None or other is None:
        return real, imag
    raise ShapeError(f"the parts of ts.Complex have shapes {list(mine)} and {list(other)}",
                     hint="both are of one shape: ts.broadcast_to(x, shape)")


def _whole_power(z: Complex, n: int) -> Complex:
    if n < 2:
        return z if n else Complex(FUNCTIONS["ones_like"](z.real), FUNCTIONS["zeros_like"](z.imag))
    half = _whole_power(z, n // 2)
    return half * half * z if n % 2 else half * half


def _real_and_imaginary(x: Any) -> tuple[Any, Any] | None:
    """(real part, imaginary part or None where there is none); None for what is no number."""
    if isinstance(x, Complex):
        return x
    if isinstance(x, complex | np.complexfloating) or (
            isinstance(x, np.ndarray) and x.dtype.kind == "c"):
        return x.real, x.imag
    return None if isinstance(x, tuple | list | str | dict) or x is None else (x, None)


def _sum(z: Complex, re: Any, im: Any | None) -> Complex:
    real = z.real + re
    if im is not None:
        return Complex(real, z.imag + im)
    return Complex(real, FUNCTIONS["broadcast_to"](z.imag, real.shape))


def _product(z: Complex, other: Any, times: Callable[[Any, Any], Any]) -> Any:
    """Of each element, or of matrices."""
    parts = _real_and_imaginary(other)
    if parts is None:
        return NotImplemented
    re, im = parts
    if im is None:
        return Complex(times(z.real, re), times(z.imag, re))
    return Complex(times(z.real, re) - times(z.imag, im), times(z.real, im) + times(z.imag, re))


def _reciprocal(z: Complex) -> Complex:
    """1 / z, divided by the larger part first so that no square over- or underflows."""
    f = FUNCTIONS
    larger = f["stop_gradient"](f["maximum"](f["abs"](z.real), f["abs"](z.imag)))
    larger = f["where"](f["logical_or"](larger == 0.0, larger == math.inf), 1.0, larger)
    re, im = z.real / larger, z.imag / larger
    square = (re * re + im * im) * larger
    return Complex(re / square, -im / square)
