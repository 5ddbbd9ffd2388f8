"""The functions of numpy.fft, on pairs (real, imaginary) where NumPy has complex numbers.

Functions take a pair (a tuple) or a real tensor and give a pair, a ts.Complex; irfft, irfft2,
irfftn and hfft give one tensor. Each has NumPy's arguments in NumPy's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...complex_pair import Complex
from ...errors import ArgumentError, UnknownNameError
from ...numerics import NumericType, as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import Aval
from ..operand import PUBLIC, axes_tuple, axis_index, dequantized, public, store
from ..trace import apply
from .create import elements_of
from .linalg import floats
from .spectral import ADJOINT_NORM, FFT, IRFFT, RFFT, both_parts, need_pair

Pair = tuple[Tensor, Tensor]


# --- arguments --------------------------------------------------------------------------------
def _operand(x: Any) -> tuple[Tensor, Tensor | None, NumericType]:
    """(real part, imaginary part or None, type of the result) of a tensor or a pair."""
    if not isinstance(x, tuple):
        (re,), numeric = floats(x)
        return re, None, numeric
    if len(x) != 2:
        raise ArgumentError(f"a complex tensor is a pair (real, imaginary), got {len(x)} parts")
    (re, im), numeric = floats(*x)
    need_pair(Aval(re.shape, re.type), Aval(im.shape, im.type))
    return re, im, numeric


def _real_operand(x: Any, name: str, instead: str) -> tuple[Tensor, NumericType]:
    re, im, numeric = _operand(x)
    if im is not None:
        raise ArgumentError(f"{name} takes a real tensor, got a pair",
                            hint=f"ts.{instead} takes pairs")
    return re, numeric


def _norm(norm: str | None) -> str:
    if norm is None:  # NumPy's default
        return "backward"
    if norm not in ADJOINT_NORM:
        raise ArgumentError(f"norm {norm!r}", hint='"backward", "ortho" or "forward"')
    return norm


def _resized(x: Tensor, n: int | None, axis: int) -> Tensor:
    """x with n elements along the axis: zeros added, or elements left out, at its end."""
    if n is None or x.shape[axis] == n:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, _points(n) - x.shape[axis])
    return F.pad(x, width)


def _axes_and_lengths(x: Tensor, s: Any, axes: Any) -> tuple[tuple[int, ...], list[int | None]]:
    """(axes, points along each, or None): of all axes, or the last as many as there are points."""
    if s is not None and not isinstance(s, tuple | list):
        raise ArgumentError(f"s={s!r}", hint="a number of points for each of the axes")
    if axes is None and s is not None:
        axes = tuple(range(-len(s), 0))
    if axes is None:
        axes = tuple(range(x.ndim))
    elif not isinstance(axes, tuple | list):
        raise ArgumentError(f"axes={axes!r}", hint="a tuple of axes")
    places = tuple(axis_index(a, x.ndim) for a in axes)
    axes_tuple(places, x.ndim)  # refuses an axis that is named twice
    if s is None:
        return places, [None] * len(places)
    if len(s) != len(places):
        raise ArgumentError(f"s={s!r} for {len(places)} axes",
                            hint="a number of points for each of the axes")
    return places, [x.shape[a] if _is_integer(n) and n == -1 else n
                    for a, n in zip(places, s, strict=True)]


def _is_integer(n: Any) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


def _length_tuple(n: Any) -> tuple | None:
    """Points along one axis, as those along several."""
    return None if n is None else (_points(n),)


def _points(n: Any) -> int:
    if not _is_integer(n) or n < 1:
        raise ArgumentError(f"a transform has a positive number of points, got n={n!r}")
    return int(n)


def _two(axes: Any) -> tuple:
    if not isinstance(axes, tuple | list) or len(axes) != 2:
        raise ArgumentError(f"two axes are needed, got axes={axes!r}")
    return tuple(axes)


def _some(axes: tuple[int, ...]) -> tuple[int, ...]:
    if not axes:
        raise ArgumentError("at least one axis is transformed of real tensors")
    return axes


# --- transforms -------------------------------------------------------------------------------
def _along(pair: Pair, axes: Sequence[int], points: Sequence[int | None], norm: str | None,
           inverse: bool) -> Pair:
    for a, n in zip(axes, points, strict=True):
        pair = apply(FFT, _resized(pair[0], n, a), _resized(pair[1], n, a), axis=a,
                     inverse=inverse, norm=_norm(norm))
    return pair


def _transform(x: Any, s: Any, axes: Any, norm: str | None, inverse: bool) -> Complex:
    re, im, numeric = _operand(x)
    places, points = _axes_and_lengths(re, s, axes)
    # NumPy's order, from the last axis on
    re, im = _along(both_parts(re, im), places[::-1], points[::-1], norm, inverse)
    return Complex(store(re, numeric), store(im, numeric))


def _real(x: Any, s: Any, axes: Any, norm: str | None, name: str, instead: str) -> Complex:
    re, numeric = _real_operand(x, name, instead)
    places, points = _axes_and_lengths(re, s, axes)
    last = _some(places)[-1]
    pair = apply(RFFT, _resized(re, points[-1], last), axis=last, norm=_norm(norm))
    re, im = _along(pair, places[-2::-1], points[-2::-1], norm, inverse=False)
    return Complex(store(re, numeric), store(im, numeric))


def _real_back(x: Any, s: Any, axes: Any, norm: str | None, name: str,
               conjugate: bool = False) -> Tensor:
    re, im, numeric = _operand(x)
    if conjugate and im is not None:
        im = F.negative(im)
    places, points = _axes_and_lengths(re, s, axes)
    last = _some(places)[-1]
    n = 2 * (re.shape[last] - 1) if points[-1] is None else points[-1]
    if not _is_integer(n) or n < 1:
        raise ArgumentError(f"{name} to n={n!r} elements", hint="n counts the real elements: "
                            "2 (M - 1) or 2 M - 1 for M frequencies")
    pair = _along(both_parts(re, im), places[:-1], points[:-1], norm, inverse=True)
    pair = tuple(_resized(part, int(n) // 2 + 1, last) for part in pair)  # type: ignore[assignment]
    return store(apply(IRFFT, *pair, axis=last, n=int(n), norm=_norm(norm)), numeric)


# --- one axis ---------------------------------------------------------------------------------
@public
def fft(x: Any, n: int | None = None, axis: int = -1,
        norm: str | None = "backward") -> Complex:
    """y_k = sum_j x_j exp(-2 pi i j k / n) along an axis, as a pair (real, imaginary).

    x: [..., N] real, or a pair   n: points, N when None: x is cut or followed by zeros
    norm: 1/n stands before the inverse ("backward") or this ("forward"), 1/sqrt(n) before both
    ("ortho"). f32 is computed in f32. Raises ShapeError, ArgumentError, AxisError.
    The functions of numpy.fft are its attributes, too: ts.fft.rfft is ts.rfft.
    """
    return _transform(x, _length_tuple(n), (axis,), norm, inverse=False)


@public
def ifft(x: Any, n: int | None = None, axis: int = -1,
         norm: str | None = "backward") -> Complex:
    """The inverse of ts.fft, as a pair; its arguments."""
    return _transform(x, _length_tuple(n), (axis,), norm, inverse=True)


@public
def rfft(x: Any, n: int | None = None, axis: int = -1,
         norm: str | None = "backward") -> Complex:
    """The frequencies 0..n/2 of a real tensor along an axis: the first n//2 + 1 of ts.fft.

    x: [..., N] real   y: a pair of [..., n//2 + 1]   Raises ArgumentError for a pair.
    """
    return _real(x, _length_tuple(n), (axis,), norm, "rfft", "fft")


@public
def irfft(x: Any, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Tensor:
    """The n real elements of which ts.rfft gives x; n = 2 (M - 1) when None.

    x: [..., M], a pair or a real tensor   y: [..., n]
    """
    return _real_back(x, _length_tuple(n), (axis,), norm, "irfft")


@public
def hfft(x: Any, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Tensor:
    """The n frequencies, which are real, of points whose second half is the conjugate of the
    first; n = 2 (M - 1) when None.

    x: [..., M], a pair or a real tensor   y: [..., n]
    """
    return _real_back(x, _length_tuple(n), (axis,), ADJOINT_NORM[_norm(norm)], "hfft",
                      conjugate=True)


@public
def ihfft(x: Any, n: int | None = None, axis: int = -1,
          norm: str | None = "backward") -> Complex:
    """The inverse of ts.hfft: the first n//2 + 1 points of real frequencies, as a pair."""
    re, im = _real(x, _length_tuple(n), (axis,), ADJOINT_NORM[_norm(norm)], "ihfft", "ifft")
    return Complex(re, F.negative(im))


# --- several axes -----------------------------------------------------------------------------
@public
def fft2(x: Any, s: Any = None, axes: Any = (-2, -1),
         norm: str | None = "backward") -> Complex:
    """ts.fft along two axes. s: points along each, the extents when None, as n of ts.fft."""
    return _transform(x, s, _two(axes), norm, inverse=False)


@public
def ifft2(x: Any, s: Any = None, axes: Any = (-2, -1),
          norm: str | None = "backward") -> Complex:
    """The inverse of ts.fft2; its arguments."""
    return _transform(x, s, _two(axes), norm, inverse=True)


@public
def fftn(x: Any, s: Any = None, axes: Any = None,
         norm: str | None = "backward") -> Complex:
    """ts.fft along axes, all when None, or the last len(s).

    s: points along each, the extents when None; -1 is an axis' own extent
    """
    return _transform(x, s, axes, norm, inverse=False)


@public
def ifftn(x: Any, s: Any = None, axes: Any = None,
          norm: str | None = "backward") -> Complex:
    """The inverse of ts.fftn; its arguments."""
    return _transform(x, s, axes, norm, inverse=True)


@public
def rfft2(x: Any, s: Any = None, axes: Any = (-2, -1),
          norm: str | None = "backward") -> Complex:
    """ts.rfft along the second of two axes, then ts.fft along the first; s as for ts.fft2."""
    return _real(x, s, _two(axes), norm, "rfft2", "fft2")


@public
def irfft2(x: Any, s: Any = None, axes: Any = (-2, -1), norm: str | None = "backward") -> Tensor:
    """The real elements of which ts.rfft2 gives x. s: how many along each of the axes."""
    return _real_back(x, s, _two(axes), norm, "irfft2")


@public
def rfftn(x: Any, s: Any = None, axes: Any = None,
          norm: str | None = "backward") -> Complex:
    """ts.rfft along the last of some axes, then ts.fft along the others; see ts.fftn."""
    return _real(x, s, axes, norm, "rfftn", "fftn")


@public
def irfftn(x: Any, s: Any = None, axes: Any = None, norm: str | None = "backward") -> Tensor:
    """The real elements of which ts.rfftn gives x. s: how many along each of the axes."""
    return _real_back(x, s, axes, norm, "irfftn")


# --- frequencies and their order --------------------------------------------------------------
@public
def fftfreq(n: int, d: float = 1.0, dtype: Any = "f32") -> Tensor:
    """The frequencies of ts.fft's n results in cycles, of points that are d apart."""
    return _frequencies(np.fft.fftfreq, n, d, dtype)


@public
def rfftfreq(n: int, d: float = 1.0, dtype: Any = "f32") -> Tensor:
    """The frequencies of ts.rfft's n//2 + 1 results in cycles, of points that are d apart."""
    return _frequencies(np.fft.rfftfreq, n, d, dtype)


def _frequencies(made: Callable, n: Any, d: float, dtype: Any) -> Tensor:
    points = _points(n)
    if d == 0:
        raise ArgumentError("points are d=0 apart, so that no frequency is finite")
    numeric = as_type(dtype)
    return Tensor(elements_of(made(points, d), numeric), numeric)


def _shifted(x: Any, axes: Any, back: bool) -> Any:
    """Halves exchanged; of a pair, those of both parts."""
    if isinstance(x, tuple):
        re, im, numeric = _operand(x)
        return tuple(store(_shifted(part, axes, back), numeric) for part in both_parts(re, im))
    x = dequantized(x)
    places = axes_tuple(axes, x.ndim)
    halves = [x.shape[a] // 2 for a in places]
    return F.roll(x, [-h for h in halves] if back else halves, places)


@public
def fftshift(x: Any, axes: Any = None) -> Any:
    """Frequencies in rising order: 0 moves from the start of each axis to its middle.

    x: a tensor, or a pair, which gives a pair   axes: all when None
    """
    return _shifted(x, axes, back=False)


@public
def ifftshift(x: Any, axes: Any = None) -> Any:
    """The inverse of ts.fftshift: they differ for odd extents."""
    return _shifted(x, axes, back=True)


# --- numpy.fft's functions under its names: ts.fft.rfft is ts.rfft ------------------------------
NAMES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2",
         "fftn", "ifftn", "rfftn", "irfftn", "fftfreq", "rfftfreq", "fftshift", "ifftshift")


class Transforms:
    """The function ts.fft, which has those of numpy.fft as attributes."""

    def __init__(self, fft: Callable) -> None:
        functools.update_wrapper(self, fft)
        self._fft = fft

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fft(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function ts.fft; its attributes: {', '.join(NAMES)}>"

    def __reduce__(self) -> str:
        return "fft"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(f"ts.fft has no {name!r}", name, lambda: NAMES)


fft = Transforms(fft)
F.fft = fft
PUBLIC.update(fft=fft)
for _name in NAMES:
    setattr(fft, _name, getattr(F, _name))
