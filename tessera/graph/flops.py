"""Operations of ops, for their records: rules over the extents of operands and results.

    flops(ins, outs, **attrs) -> float      ins, outs: the extents that one rank has of them

A multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod
from typing import Any

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Flops = Callable[..., float]


def none(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """It moves elements and computes none."""
    return 0.0


def per_operand(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """One for each element of operand 0: reductions and running sums."""
    return float(prod(ins[0]))


def matmul(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """2 m n k; k as the rank with least of it has: operands that are not split alike are cut."""
    return 2.0 * prod(outs[0]) * min(ins[0][-1], ins[1][-2])


def fft(scale: float) -> Flops:
    """5 n log2 n of a complex transform (scale 1), half of it of a real one: FFTW's convention."""
    def rule(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
        n = max(s[-1] for s in (*ins, *outs))
        lines = max(prod(s[:-1]) for s in outs)
        return 5.0 * lines * n * log2(max(n, 2)) * scale

    return rule


def fft_planes(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """As fft, of the points of a plane."""
    return 5.0 * prod(outs[0]) * log2(max(prod(outs[0][-2:]), 2))


def cubic(factor: float) -> Flops:
    """factor n^3 for each matrix: Golub and Van Loan, Matrix Computations, 4th ed. 2013."""
    return lambda ins, outs, **attrs: factor * prod(ins[0][:-2]) * float(ins[0][-1]) ** 3


def solve(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """An LU factorization, and two triangular systems for each column."""
    n = ins[0][-1]
    return prod(ins[0][:-2]) * (2 / 3 * float(n) ** 3 + 2.0 * n**2 * ins[1][-1])


def triangular_solve(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    return float(prod(ins[0][:-2])) * ins[0][-1] ** 2 * ins[1][-1]


def qr(ins: Shapes, outs: Shapes, **attrs: Any) -> float:
    """Householder, and Q formed: 2 (2 m n^2 - 2/3 n^3)."""
    m, n = max(ins[0][-2:]), min(ins[0][-2:])
    return prod(ins[0][:-2]) * 2 * (2.0 * m * n**2 - 2 / 3 * float(n) ** 3)


__all__ = ["Flops", "cubic", "fft", "matmul", "none", "per_operand", "qr", "solve",
           "triangular_solve"]
