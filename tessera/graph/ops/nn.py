"""Activations, rotary positions, and the small steps between the products of a transformer."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...dims import divide, show_shape
from ...errors import DTypeError, ShapeError
from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..operand import convert, floating, holds_integers, literal, public, store, to_compute
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast
from .elementwise import (
    cos,
    erf,
    expm1,
    sigmoid,
    sin,
    where,
)
from .elementwise_record import elementwise

# --- activations ------------------------------------------------------------------------------
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # 0.5 (1 + tanh u) = sigmoid(2 u)
GELU_CUBIC = 0.044715


def _sigmoid(x: np.ndarray) -> np.ndarray:
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, z) / (1 + z)


def _gelu_ref(x: np.ndarray) -> np.ndarray:
    slope, cubic = x.dtype.type(GELU_SLOPE), x.dtype.type(GELU_CUBIC)
    u = slope * (x * (1 + cubic * (x * x)))
    return np.multiply(x, _sigmoid(u), dtype=x.dtype)


def _gelu_partial(x: Tensor) -> Tensor:
    """s + x s (1 - s) u' with s = sigmoid(u), u = 2 c (x + a x^3); c = GELU_SLOPE, a = GELU_CUBIC.

    Beyond |x| = 32 s is 0 or 1 in f64 too, and u' of a huge x would make 0 * inf of the rest.
    """
    x = F.clip(x, -32.0, 32.0)
    square = x * x
    s = sigmoid(GELU_SLOPE * (x * (1.0 + GELU_CUBIC * square)))
    slope = GELU_SLOPE * (1.0 + (3.0 * GELU_CUBIC) * square)
    return s + x * (s * (1.0 - s)) * slope


def _silu_ref(x: np.ndarray) -> np.ndarray:
    return np.multiply(x, _sigmoid(x), dtype=x.dtype)


def _silu_partial(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _softplus_ref(x: np.ndarray) -> np.ndarray:
    return np.add(np.maximum(x, 0), np.log1p(np.exp(-np.abs(x))), dtype=x.dtype)


# One op each, with a derivative from x alone: the backward pass computes the sigmoid again instead
# of reading it from memory.
GELU = elementwise(
    "gelu", _gelu_ref,
    f"{{0}} * sigmoid({GELU_SLOPE!r} * ({{0}} * (1 + {GELU_CUBIC!r} * ({{0}} * {{0}}))))",
    lambda y, x: (lambda: _gelu_partial(x),),
    doc="0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))",
)
SILU = elementwise("silu", _silu_ref, "{0} * sigmoid({0})",
                   lambda y, x: (lambda: _silu_partial(x),), doc="x sigmoid(x)")
SOFTPLUS = elementwise("softplus", _softplus_ref, "softplus({0})",
                       lambda y, x: (lambda: sigmoid(x),), doc="log(1 + exp(x))")


@public
def gelu(x: Any, *, exact: bool = False) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), or x Phi(x) by erf when `exact`.

    Elementwise, rounded once to x's type. The two differ by at most 5e-4.
    Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    c, numeric = floating(x)
    if not exact:
        return store(apply(GELU, c), numeric)
    return store(0.5 * c * (1.0 + erf(c * math.sqrt(0.5))), numeric)


@public
def silu(x: Any) -> Tensor:
    """x sigmoid(x), elementwise. Hendrycks and Gimpel 2016, arXiv:1606.08415."""
    c, numeric = floating(x)
    return store(apply(SILU, c), numeric)


@public
def swish(x: Any) -> Tensor:
    """x sigmoid(x): another name of `ts.silu`."""
    return silu(x)


@public
def softplus(x: Any) -> Tensor:
    """log(1 + exp(x)), elementwise, without overflow for large x."""
    c, numeric = floating(x)
    return store(apply(SOFTPLUS, c), numeric)


@public
def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x for x > 0, else slope * x; the gradient at 0 is slope."""
    c, numeric = floating(x)
    return store(where(c > 0.0, c, c * float(slope)), numeric)


@public
def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x for x > 0, else alpha (exp(x) - 1); the gradient at 0 is alpha.

    Clevert et al. 2015, arXiv:1511.07289, eq. 15.
    """
    c, numeric = floating(x)
    low = expm1(where(c > 0.0, literal(0.0, c), c))
    return store(where(c > 0.0, c, low * float(alpha)), numeric)


# --- rotary positions -------------------------------------------------------------------------
def _rotary_shape(x: Aval, c: Aval, s: Aval, turn: float) -> Aval:
    half = (*x.shape[:-1], divide(x.shape[-1], 2)) if x.ndim else ()
    if not half or half[-1] is None:
        raise ShapeError(f"rotary positions need an even last axis, got {show_shape(x.shape)}")
    if tuple(c.shape) != tuple(s.shape) or broadcast_shapes(half, c.shape) != half:
        raise ShapeError(f"tables {show_shape(c.shape)} and {show_shape(s.shape)} do not fit x "
                         f"{show_shape(x.shape)}")
    return x


def _rotary_ref(x: np.ndarray, c: np.ndarray, s: np.ndarray, turn: float) -> np.ndarray:
    (a, b), s = np.split(x, 2, axis=-1), s if turn > 0 else -s
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def _halves(x: Tensor) -> Tensor:
    """[..., D] as [..., 2, D/2]"""
    return F.reshape(x, (*x.shape[:-1], 2, divide(x.shape[-1], 2)))


@functools.lru_cache(maxsize=8)
def _sign(dtype: str, turn: float) -> Tensor:
    """-turn for the first half, turn for the second   [2, 1]"""
    numeric = as_type(dtype)
    return Tensor(np.array([[-turn], [turn]], numeric.dtype.numpy), numeric)


def _rotary_expand(x: Tensor, c: Tensor, s: Tensor, turn: float) -> Tensor:
    """One elementwise loop over [..., 2, D/2]: the halves change place as a view."""
    parts = _halves(x)
    other = F.flip(parts, -2)
    c, s = (F.expand_dims(t, -2) for t in (c, s))
    return F.reshape(parts * c + other * s * _sign(x.dtype.name, turn), x.shape)


def _rotary_halves(x: Tensor, c: Tensor, s: Tensor, turn: float) -> Tensor:
    """One elementwise loop over [..., D/2] that reads x once and writes both halves, where they
    belong."""
    half = divide(x.shape[-1], 2)
    a, b = x[..., :half], x[..., half:]
    first, second = (b * s, a * s)
    parts = (a * c - first, b * c + second) if turn > 0 else (a * c + first, b * c - second)
    return F.concatenate(parts, axis=-1)


def _rotary_vjp(g: Tensor, y: Tensor, x: Tensor, c: Tensor, s: Tensor, turn: float) -> tuple:
    """For x the turn back; for the tables the products of corresponding halves."""
    gh, xh = _halves(g), _halves(x)
    other = F.flip(xh, -2)
    dc = F.sum(gh * xh, axis=-2)
    ds = F.sum(gh * other * _sign(x.dtype.name, turn), axis=-2)
    return (apply(ROTARY, g, c, s, turn=-turn), unbroadcast(dc, tuple(c.shape)),
            unbroadcast(ds, tuple(s.shape)))


def _rotary_jvp(ts: tuple, y: Tensor, x: Tensor, c: Tensor, s: Tensor, turn: float) -> Tensor:
    parts = [] if ts[0] is None else [apply(ROTARY, ts[0], c, s, turn=turn)]
    if ts[1] is not None:
        parts.append(apply(ROTARY, x, ts[1], F.zeros_like(s), turn=turn))
    if ts[2] is not None:
        parts.append(apply(ROTARY, x, F.zeros_like(c), ts[2], turn=turn))
    return sum(parts[1:], start=parts[0])


def _rotary_batch(size: Any, batched: tuple, x: Tensor, c: Tensor, s: Tensor,
                  turn: float) -> tuple:
    if not batched[0]:
        x = F.broadcast_to(F.expand_dims(x, 0), (size, *x.shape))
    tables = [pad_batch_axes(t, x.ndim - 1) if b else t for t, b in zip((c, s), batched[1:],
                                                                       strict=True)]
    shape = broadcast_shapes(*(t.shape for t in tables))
    return apply(ROTARY, x, *(F.broadcast_to(t, shape) for t in tables), turn=turn), True


ROTARY = GraphOp(
    "rotary",
    shape=_rotary_shape,
    ref=_rotary_ref,
    vjp=_rotary_vjp,
    jvp=_rotary_jvp,
    batch=_rotary_batch,
    expand=_rotary_expand,
    expand_gpu=_rotary_halves,
    samples=(sample((2, 3, 4), (3, 2), (3, 2), turn=1.0), sample((4,), (2,), (2,), turn=-1.0)),
    doc="(a, b) -> (a c - t b s, b c + t a s) for the halves a, b of the last axis; t is turn",
)


def _frequencies(half: int, base: float) -> np.ndarray:
    """base^(-i / half), i = 0 .. half - 1   [D/2] f64"""
    return float(base) ** (-np.arange(half) / half)


@functools.lru_cache(maxsize=64)
def rotary_table(length: int, half: int, base: float, dtype: str) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-i / half), each [S, D/2]; computed in f64."""
    angle = np.outer(np.arange(length), _frequencies(half, base))
    numeric = as_type(dtype)
    return tuple(  # type: ignore[return-value]
        Tensor(f(angle).astype(numeric.dtype.numpy), numeric, name=f"rotary_{f.__name__}")
        for f in (np.cos, np.sin)
    )


def _rotary_angles(positions: Tensor, half: int, base: float, like: Tensor) -> tuple:
    """cos and sin for positions known when the graph runs; angles in f64, where the product of a
    position beyond 2^24 and a frequency is still exact to 1e-9. [..., S, D/2]"""
    wide = convert(to_compute(positions), as_type("f64"))
    frequencies = Tensor(_frequencies(half, base), wide.type)
    angle = F.expand_dims(wide, -1) * frequencies
    return tuple(convert(f(angle), like.type) for f in (cos, sin))


@public
def rotary_embedding(x: Any, base: float = 10000.0, positions: Any = None) -> Tensor:
    """Rotary positions: element pairs (i, i + D/2) turned by position * base^(-2i / D).

    x: [..., S, D], D even   positions: [S] or [B, S] (then x is [B, ..., S, D]), integers, traced
    or not; 0 .. S-1 when None   y: shape and type of x
    The pairs are the halves of the last axis ("rotate half": GPT-NeoX, Llama), not neighbours.
    Raises ShapeError for odd D or positions that do not fit.
    Su et al. 2021, arXiv:2104.09864, eq. 15.
    """
    c, numeric = floating(x)
    if c.ndim < 2 or not isinstance(c.shape[-1], int) or c.shape[-1] % 2:
        raise ShapeError(f"rotary_embedding needs [..., S, D] with an even D, got "
                         f"{show_shape(c.shape)}")
    length, half = c.shape[-2], c.shape[-1] // 2
    if positions is None and isinstance(length, int):
        tables = rotary_table(length, half, float(base), c.dtype.name)
    else:
        places = F.arange(length) if positions is None else as_tensor(positions)
        tables = _rotary_angles(_fitting(places, c), half, base, c)
    return store(apply(ROTARY, c, *tables, turn=1.0), numeric)


def _fitting(positions: Tensor, x: Tensor) -> Tensor:
    """Positions [S], or [B, S] with axes of 1 put in to meet x's [B, ..., S]."""
    if not holds_integers(positions):
        raise DTypeError(f"positions are integers, got {positions.type}")
    want = tuple(x.shape[:-1])
    if tuple(positions.shape) == want[-1:]:
        return positions
    if positions.ndim == 2 and x.ndim >= 3 and tuple(positions.shape) == (want[0], want[-1]):
        return F.reshape(positions, (want[0],) + (1,) * (x.ndim - 3) + (want[-1],))
    raise ShapeError(f"positions {show_shape(positions.shape)} do not fit x {show_shape(x.shape)}",
                     hint="give [S], or [B, S] for x of [B, ..., S, D]")


# --- residual, heads --------------------------------------------------------------------------
@public
def residual(x: Any, f: Any, *, dropout: float = 0.0, key: Any = None,
             training: bool = True) -> Tensor:
    """x + dropout(f, p): the sum itself when p is 0 or not training."""
    return F.add(x, F.dropout(f, dropout, key=key, training=training))


@public
def split_qkv(qkv: Any, *, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values from one product.

    qkv: [B, S, 3 H D], the last axis ordered (q, k, v) by head by element   each: [B, H, S, D]
    Raises ShapeError when the last axis is not a multiple of 3 heads.
    """
    qkv = as_tensor(qkv)
    width = divide(qkv.shape[-1], 3 * heads) if qkv.ndim == 3 and heads > 0 else None
    if width is None:
        raise ShapeError(f"split_qkv needs [B, S, 3 * heads * D], got {show_shape(qkv.shape)} and "
                         f"heads={heads}")
    B, S, _ = qkv.shape
    parts = F.split(qkv, 3, axis=-1)  # each [B, S, H D]
    split = [F.reshape(p, (B, S, heads, width)) for p in parts]
    q, k, v = (F.transpose(p, (0, 2, 1, 3)) for p in split)
    return q, k, v


@public
def merge_heads(x: Any) -> Tensor:
    """[B, H, S, D] -> [B, S, H D]: the heads side by side again."""
    x = as_tensor(x)
    if x.ndim != 4:
        raise ShapeError(f"merge_heads needs [B, H, S, D], got {show_shape(x.shape)}")
    B, H, S, D = x.shape
    return F.reshape(F.transpose(x, (0, 2, 1, 3)), (B, S, H * D))


@public
def split_heads(x: Any, *, heads: int) -> Tensor:
    """[B, S, H D] -> [B, H, S, D]. Raises ShapeError when the last axis does not divide."""
    x = as_tensor(x)
    width = divide(x.shape[-1], heads) if x.ndim == 3 and heads > 0 else None
    if width is None:
        raise ShapeError(f"split_heads needs [B, S, heads * D], got {show_shape(x.shape)} and "
                         f"heads={heads}")
    B, S, _ = x.shape
    return F.transpose(F.reshape(x, (B, S, heads, width)), (0, 2, 1, 3))
