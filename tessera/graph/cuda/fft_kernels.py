"""Fourier transforms by the library's kernels, on the parts as they lie: one pass over the points,
or two for long lines.

Powers of two in f32. Others are cuFFT's, whose arrays hold both parts of a number side by side: it
takes two copies to reach it.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

from ...kernels.fft import (
    LONGEST,
    LONGEST_ACROSS,
    fft_lines,
    irfft_lines,
    lines_of,
    radices_of,
    real_angles,
    rfft_lines,
    stage_angles,
)
from ...numerics import as_type
from ...tensor import Tensor
from .. import functions as F
from ..expand import Rule, expand_by
from ..ir import Graph, Node
from ..op import GraphOp
from ..ops.spectral import FFT, IRFFT, RFFT

F32 = as_type("f32")


def use_fft_kernels(graph: Graph) -> Graph:
    """The graph with the transforms that the kernels take as their launches."""
    return expand_by(graph, lambda node: RULES[node.op] if node.op in RULES and _is_taken(
        node) else None)


def _is_taken(node: Node) -> bool:
    x = node.inputs[0].aval
    if x.dtype.name != "f32" or not all(isinstance(n, int) and n for n in x.shape):
        return False
    axis = node.attrs["axis"]
    if node.op is FFT:
        return _is_power(x.shape[axis], 2, LONGEST_ACROSS**2)
    real = node.inputs[0] if node.op is RFFT else node.outputs[0]
    return axis == x.ndim - 1 and _is_power(real.aval.shape[axis], 4, 2 * LONGEST)


def _is_power(n: Any, least: int, most: int) -> bool:
    return n & n - 1 == 0 and least <= n <= most


def _fft(re: Tensor, im: Tensor, axis: int, inverse: bool, norm: str) -> tuple[Tensor, Tensor]:
    n, inner = int(re.shape[axis]), prod(re.shape[axis + 1:])
    scale = _scale(n, norm, inverse)
    parts = (im, re) if inverse else (re, im)
    if n <= (LONGEST if inner == 1 else LONGEST_ACROSS):
        made = _lines(parts, n, inner, inner, scale=scale)
    else:
        first = 1 << (n.bit_length() - 1) // 2
        rest = n // first
        made = _lines(_lines(parts, first, rest * inner, rest * inner, n, inner), rest, inner,
                      first * inner, scale=scale)
    yr, yi = (F.reshape(y, re.shape) for y in made)
    return (yi, yr) if inverse else (yr, yi)


def _lines(x: tuple[Tensor, Tensor], n: int, inner: int, outer: int, whole: int = 1,
           apart: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The transforms of lines of n points, see fft_lines."""
    count = prod(x[0].shape) // n
    lines, lanes = lines_of(n, inner > 1 or outer > 1)
    xr, xi = (F.reshape(part, (-1, n * inner)) for part in x)
    yr, yi = (F.zeros((count // outer, n * outer), F32) for _ in x)
    fft_lines.launcher(lanes=lanes)(
        xr, xi, yr, yi, _angles(n), radices_of(n), N=n, inner=inner,
        outer=outer, lines=count, whole=whole, apart=apart, scale=scale,
        BM=lines)
    return yr, yi


def _angles(n: int) -> Tensor:
    return Tensor(stage_angles(n, radices_of(n)), F32)


def _real_angles(n: int) -> Tensor:
    return Tensor(real_angles(n, radices_of(n)), F32)


def _scale(n: int, norm: str, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if (norm == "backward") == inverse else 1.0


# --- of real points ------------------------------------------------------------------------------
def _rfft(x: Tensor, axis: int, norm: str) -> tuple[Tensor, ...]:
    n = int(x.shape[-1])
    count, (lines, lanes) = prod(x.shape) // n, lines_of(n // 2, False)
    yr, yi = (F.zeros((count, n // 2 + 1), F32) for _ in "ri")
    rfft_lines.launcher(lanes=lanes)(
        F.reshape(x, (count, n)), yr, yi, _real_angles(n // 2), radices_of(n // 2), N=n // 2,
        lines=count, scale=_scale(n, norm, False), BM=lines)
    return tuple(F.reshape(y, (*x.shape[:-1], n // 2 + 1)) for y in (yr, yi))


def _irfft(re: Tensor, im: Tensor, axis: int, n: int, norm: str) -> Tensor:
    count, (lines, lanes) = prod(re.shape[:-1]), lines_of(n // 2, False)
    y = F.zeros((count, n), F32)
    xr, xi = (F.reshape(part, (count, n // 2 + 1)) for part in (re, im))
    irfft_lines.launcher(lanes=lanes)(
        xr, xi, y, _real_angles(n // 2), radices_of(n // 2), N=n // 2, lines=count,
        scale=_scale(n, norm, True), BM=lines)
    return F.reshape(y, (*re.shape[:-1], n))


RULES: dict[GraphOp, Rule] = {FFT: _fft, RFFT: _rfft, IRFFT: _irfft}

__all__ = ["use_fft_kernels"]
