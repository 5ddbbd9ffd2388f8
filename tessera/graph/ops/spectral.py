"""Fourier transforms along an axis; the rest is batch. Their public functions are in fourier.py.

There is no complex numeric type: a complex tensor is a pair (real, imaginary) of equal tensors. All
ops are linear, and each one's adjoint is another of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...dims import as_index, show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..op import OPS, Aval, GraphOp, VendorLibrary, sample
from ..operand import axes_tuple, axis_index, dequantized, public
from ..trace import apply

# The factor stands before the forward transform, the inverse one, or its root before both.
ADJOINT_NORM = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


# --- rules ------------------------------------------------------------------------------------
def need_points(x: Aval, axis: int) -> None:
    if x.shape[axis] == 0:
        raise ShapeError(f"no points to transform along axis {axis} of {show_shape(x.shape)}")


def need_pair(re: Aval, im: Aval) -> None:
    if re.shape != im.shape:
        raise ShapeError(f"real part {show_shape(re.shape)} and imaginary part "
                         f"{show_shape(im.shape)} differ")
    if re.dtype is not im.dtype:
        raise DTypeError(f"parts of one type needed, got {re.type} and {im.type}")


def _complex(re: np.ndarray, im: np.ndarray) -> np.ndarray:
    out = np.empty(re.shape, np.complex64 if re.dtype == np.float32 else np.complex128)
    out.real, out.imag = re, im
    return out


def _real_and_imaginary(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(z.real), np.ascontiguousarray(z.imag)


def line_letters(x: Aval, axis: int, operands: int, results: int) -> str:
    names = "abcdefghijklmnopqrstuvwxyz"[: len(x.shape)]
    names = f"{names[:axis]}_{names[axis + 1:]}"
    return ",".join([names] * operands) + "->" + ",".join([names] * results)


def both_parts(re: Tensor | None, im: Tensor | None) -> tuple[Tensor, Tensor]:
    """Parts, of which one may be None for zero."""
    some = re if re is not None else im
    assert some is not None
    zero = F.zeros_like
    return (re if re is not None else zero(some)), (im if im is not None else zero(some))


def line_batch(name: str) -> Callable[..., tuple]:
    def rule(size: Any, batched: tuple, *xs: Tensor, axis: int, **attrs: Any) -> tuple:
        full = [x if flag else F.broadcast_to(x, (size, *x.shape))
                for x, flag in zip(xs, batched, strict=True)]
        return apply(OPS[name], *full, axis=axis + 1, **attrs), True

    return rule


# --- complex to complex -----------------------------------------------------------------------
def _fft_shape(re: Aval, im: Aval, axis: int, inverse: bool, norm: str) -> tuple[Aval, Aval]:
    need_pair(re, im)
    need_points(re, axis)
    return re, im


def _fft_ref(re: np.ndarray, im: np.ndarray, axis: int, inverse: bool, norm: str) -> tuple:
    run = np.fft.ifft if inverse else np.fft.fft
    return _real_and_imaginary(run(_complex(re, im), axis=axis, norm=norm))  # type: ignore[arg-type]


def _complex_array(module: Any, re: Any, im: Any) -> Any:
    """A complex array of another library's."""
    z = module.empty_like(re, module.complex64 if re.dtype == np.float32 else module.complex128)
    z.real, z.imag = re, im
    return z


def _fft_in(module: Any, re: Any, im: Any, axis: int, inverse: bool, norm: str) -> tuple:
    run = module.fft.ifft if inverse else module.fft.fft
    z = run(_complex_array(module, re, im), axis=axis, norm=norm)
    return z.real, z.imag


def _rfft_in(module: Any, x: Any, axis: int, norm: str) -> tuple:
    z = module.fft.rfft(x, axis=axis, norm=norm)
    return z.real, z.imag


FFT = GraphOp(
    "fft",
    shape=_fft_shape,
    ref=_fft_ref,
    library=VendorLibrary("cuFFT", _fft_in),
    vjp=lambda g, y, re, im, axis, inverse, norm: apply(
        FFT, *both_parts(*g), axis=axis, inverse=not inverse, norm=ADJOINT_NORM[norm]
    ),
    jvp=lambda ts, y, re, im, **a: apply(FFT, *both_parts(*ts), **a),
    batch=line_batch("fft"),
    axes=lambda re, im, axis, **a: line_letters(re, axis, 2, 2),
    multi=True,
    samples=(
        sample((5,), (5,), axis=0, inverse=False, norm="backward"),
        sample((2, 4), (2, 4), axis=1, inverse=True, norm="backward"),
        sample((3, 2), (3, 2), axis=0, inverse=False, norm="ortho"),
    ),
    flops=flops.fft(1.0),
    doc="y_k = sum_j x_j exp(-2 pi i j k / n) along an axis, or its inverse; real and imaginary "
    "parts apart",
)


# --- real to complex and back -----------------------------------------------------------------
def _half_weights(n: int, axis: int, like: Tensor, of_pairs: float) -> Tensor:
    """1 for the frequencies that stand alone, 0 and n / 2; `of_pairs` for those whose conjugate
    is left out. Shaped to multiply along the axis."""
    w = np.full(n // 2 + 1, of_pairs, like.dtype.numpy)
    w[0] = 1
    w[n - n // 2:] = 1  # n / 2 when n is even, nothing else
    shape = [1] * like.ndim
    shape[axis] = w.size
    return Tensor(w.reshape(shape), like.type)


def _rfft_shape(x: Aval, axis: int, norm: str) -> tuple[Aval, Aval]:
    need_points(x, axis)
    half = x.shape[axis] // 2 + 1
    out = Aval((*x.shape[:axis], half, *x.shape[axis + 1:]), x.type)
    return out, out


def _rfft_vjp(g: tuple, y: tuple, x: Tensor, axis: int, norm: str) -> tuple:
    re, im = both_parts(*g)
    w = _half_weights(int(x.shape[axis]), axis, re, 0.5)
    return (apply(IRFFT, re * w, im * w, axis=axis, n=int(x.shape[axis]),
                  norm=ADJOINT_NORM[norm]),)


RFFT = GraphOp(
    "rfft",
    shape=_rfft_shape,
    ref=lambda x, axis, norm: _real_and_imaginary(np.fft.rfft(x, axis=axis, norm=norm)),
    library=VendorLibrary("cuFFT", _rfft_in),
    vjp=_rfft_vjp,
    jvp=lambda ts, y, x, **a: apply(RFFT, ts[0], **a),
    batch=line_batch("rfft"),
    axes=lambda x, axis, **a: line_letters(x, axis, 1, 2),
    multi=True,
    samples=(sample((5,), axis=0, norm="backward"), sample((2, 4), axis=1, norm="backward"),
             sample((1, 2), axis=0, norm="ortho"), sample((4, 2), axis=0, norm="forward")),
    flops=flops.fft(0.5),
    doc="the frequencies 0..n/2 of real elements along an axis; the others are their conjugates",
)


def _irfft_shape(re: Aval, im: Aval, axis: int, n: int, norm: str) -> Aval:
    need_pair(re, im)
    if n < 1 or re.shape[axis] != n // 2 + 1:
        raise ShapeError(f"{n} real elements have {n // 2 + 1} frequencies, got "
                         f"{re.shape[axis]} along axis {axis} of {show_shape(re.shape)}")
    return Aval((*re.shape[:axis], n, *re.shape[axis + 1:]), re.type)


def _irfft_vjp(g: Tensor, y: Tensor, re: Tensor, im: Tensor, axis: int, n: int,
               norm: str) -> tuple:
    w = _half_weights(n, axis, g, 2.0)
    return tuple(part * w for part in apply(RFFT, g, axis=axis, norm=ADJOINT_NORM[norm]))


IRFFT = GraphOp(
    "irfft",
    shape=_irfft_shape,
    ref=lambda re, im, axis, n, norm: np.fft.irfft(_complex(re, im), n, axis, norm),
    library=VendorLibrary("cuFFT", lambda module, re, im, axis, n, norm: module.fft.irfft(
        _complex_array(module, re, im), n, axis, norm)),
    vjp=_irfft_vjp,
    jvp=lambda ts, y, re, im, **a: apply(IRFFT, *both_parts(*ts), **a),
    batch=line_batch("irfft"),
    axes=lambda re, im, axis, **a: line_letters(re, axis, 2, 1),
    samples=(
        sample((3,), (3,), axis=0, n=5, norm="backward"),
        sample((2, 3), (2, 3), axis=1, n=4, norm="backward"),
        sample((1, 2), (1, 2), axis=0, n=1, norm="ortho"),
        sample((2, 2), (2, 2), axis=0, n=2, norm="forward"),
    ),
    flops=flops.fft(0.5),
    doc="n real elements from their frequencies 0..n/2 along an axis; the imaginary parts of "
    "those that are their own conjugates are not read",
)


# --- between both ------------------------------------------------------------------------------
def _filter_shape(x: Aval, re: Aval, im: Aval, norm: str, back: str) -> Aval:
    need_pair(re, im)
    half = (*x.shape[:-1], x.shape[-1] // 2 + 1)
    if re.ndim > len(half) or half[len(half) - re.ndim:] != re.shape:
        raise ShapeError(f"factors {show_shape(re.shape)} for frequencies {show_shape(half)}")
    return x


def _filter_ref(x: np.ndarray, re: np.ndarray, im: np.ndarray, norm: str, back: str) -> np.ndarray:
    z = np.fft.rfft(x, norm=norm) * _complex(re, im)  # type: ignore[arg-type]
    return np.fft.irfft(z, x.shape[-1], norm=back)  # type: ignore[arg-type]


def _filter_expand(x: Tensor, re: Tensor, im: Tensor, norm: str, back: str) -> Tensor:
    a, b = apply(RFFT, x, axis=x.ndim - 1, norm=norm)
    return apply(IRFFT, a * re - b * im, a * im + b * re, axis=x.ndim - 1, n=int(x.shape[-1]),
                 norm=back)


FILTER = GraphOp(
    "filter_frequencies",
    shape=_filter_shape,
    ref=_filter_ref,
    expand=_filter_expand,
    samples=(sample((3, 4), (3,), (3,), norm="backward", back="backward"),
             sample((2, 3, 5), (3, 3), (3, 3), norm="ortho", back="forward")),
    flops=flops.fft(1.0),
    doc="irfft(rfft(x) h) along the last axis, of factors h = re + i im of its frequencies: a "
    "circular convolution",
)


# --- two axes as one op -----------------------------------------------------------------------
def _planes_shape(re: Aval, im: Aval, inverse: bool, norm: str) -> tuple[Aval, Aval]:
    need_pair(re, im)
    need_points(re, -2)
    need_points(re, -1)
    return re, im


def _planes_ref(re: np.ndarray, im: np.ndarray, inverse: bool, norm: str) -> tuple:
    run = np.fft.ifft2 if inverse else np.fft.fft2
    return _real_and_imaginary(run(_complex(re, im), norm=norm))  # type: ignore[arg-type]


def _planes_expand(re: Tensor, im: Tensor, inverse: bool, norm: str) -> tuple[Tensor, Tensor]:
    for axis in (re.ndim - 1, re.ndim - 2):
        re, im = apply(FFT, re, im, axis=axis, inverse=inverse, norm=norm)
    return re, im


FFT_PLANES = GraphOp(
    "fft_planes",
    shape=_planes_shape,
    ref=_planes_ref,
    expand=_planes_expand,
    multi=True,
    samples=(sample((3, 4), (3, 4), inverse=False, norm="backward"),
             sample((2, 3, 5), (2, 3, 5), inverse=True, norm="ortho")),
    flops=flops.fft_planes,
    doc="fft along the last two axes; real and imaginary parts apart",
)


# --- public functions: order ------------------------------------------------------------------
@public
def roll(x: Any, shift: int | Sequence[int], axis: Any = None) -> Tensor:
    """Elements moved by `shift` places along an axis, those beyond the end entering at its start.

    shift: an integer or one per axis   axis: None rolls the flat x, as np.roll
    """
    x = dequantized(x)
    if any(as_index(by) is None for by in (shift if isinstance(shift, tuple | list) else [shift])):
        raise ArgumentError(
            f"roll by {shift!r}", hint="a whole number of places, or one per axis; by one that is "
            "data: ts.take(x, (ts.arange(n) - shift) % n, axis)")
    if axis is None:
        flat = F.reshape(x, (-1,))
        return F.reshape(roll(flat, shift, 0), x.shape)
    if x.ndim == 0:
        axes_tuple(axis, 0)  # refuses any but those of a scalar
        return x
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    shifts = shift if isinstance(shift, tuple | list) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ArgumentError(f"{len(shifts)} shifts for {len(axes)} axes")
    for by, a in zip(shifts, axes, strict=True):
        x = _rolled(x, int(by), axis_index(a, x.ndim))
    return x


def _rolled(x: Tensor, by: int, axis: int) -> Tensor:
    n = x.shape[axis]
    if n == 0 or by % n == 0:
        return x
    before = (slice(None),) * axis
    cut = n - by % n
    return F.concatenate([x[(*before, slice(cut, None))], x[(*before, slice(cut))]],
                                 axis=axis)
