"""What a loop of a kernel carries as factor * value + terms, op by op, see kernel_loops.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...tile.ir.ir import Op
from ...tile.ir.types import TileType


@dataclass(frozen=True)
class Affine:
    """factor (None: 1) times what is carried, and the sum of the terms."""

    factor: Any
    terms: list[Any]


def _add(m: Any, kind: Any, xs: list[Any], op: Op) -> Affine | None:
    at = _only(xs)
    return None if at is None else Affine(xs[at].factor, [*xs[at].terms, xs[1 - at]])


def _sub(m: Any, kind: Any, xs: list[Any], op: Op) -> Affine | None:
    if _only(xs) != 0:
        return None
    return Affine(xs[0].factor, [*xs[0].terms, m.applied("neg", kind, xs[1])])


def _scale(m: Any, kind: Any, xs: list[Any], op: Op) -> Affine | None:
    at = _only(xs)
    if at is None or op.name == "div" and at:
        return None
    x, by = xs[at], xs[1 - at]
    if op.name == "mul":
        factor = by if x.factor is None else m.applied("mul", kind, x.factor, by)
    else:
        one = np.ones((1,) * max(2, len(shape_of(kind)) + 1), np.float32)
        factor = m.applied("div", kind, one if x.factor is None else x.factor, by)
    return Affine(factor, [m.applied(op.name, kind, t, by) for t in x.terms])


def _matmul(m: Any, kind: Any, xs: list[Any], op: Op) -> Affine | None:
    if len(xs) != 3 or not isinstance(xs[2], Affine) or isinstance(xs[0], Affine) or isinstance(
            xs[1], Affine):
        return None
    return Affine(xs[2].factor, [*xs[2].terms, m.valued(op, xs[:2])])


def _fma(m: Any, kind: Any, xs: list[Any], op: Op) -> Affine | None:
    x, y, z = xs
    if isinstance(z, Affine):
        return None if isinstance(x, Affine) or isinstance(y, Affine) else Affine(
            z.factor, [*z.terms, m.applied("mul", kind, x, y)])
    made = _scale(m, kind, [x, y], replace(op, name="mul"))
    return None if made is None else Affine(made.factor, [*made.terms, z])


def _only(xs: list[Any]) -> int | None:
    """Which operand is what is carried; None where both are."""
    found = [i for i, x in enumerate(xs) if isinstance(x, Affine)]
    return found[0] if len(found) == 1 else None


AFFINE: dict[str, Callable] = {"add": _add, "sub": _sub, "mul": _scale, "div": _scale, "fma": _fma,
                               "matmul": _matmul}


def shape_of(kind: Any) -> tuple[int, ...]:
    """The extents of a tile's type; none of a number's."""
    return kind.shape if isinstance(kind, TileType) else ()


__all__ = ["AFFINE", "Affine", "shape_of"]
