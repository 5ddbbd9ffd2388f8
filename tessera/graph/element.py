"""How one element of a result follows from elements of the operands: an op without arithmetic.

The text is an expression in Python's syntax over o0, o1, ..., the place of the element in the
result, and x0[i, j], ..., elements of the operands: 0 where a place is outside of the operand.
Kernels compute all elements at once from it. `evaluate` says what it means in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import AxisError
from ..lazy_dataclass import dataclass


@dataclass(frozen=True)
class IndexBound:
    """An integer of the text that must lie in 0..extent-1; wrap: in -extent..extent-1."""

    text: str
    extent: Any
    wrap: bool = False


@dataclass(frozen=True)
class Element:
    """text: of one element.  over: extents of r0, r1, ..., the sum over which is the element, in
    row-major order, or for another `way` the largest ("max") or smallest ("min"), for which what
    is outside counts nothing.  bounds: what fails where an integer lies outside.
    into: where operand 0 is written over, the places in it of the elements o0, o1, ... of operand
    1; the others stay as they are."""

    text: str
    over: tuple[Any, ...] = ()
    bounds: tuple[IndexBound, ...] = ()
    into: tuple[str, ...] | None = None
    way: str = "sum"


def index_names(axes: Sequence[int | str], letter: str = "o") -> str:
    """o0, o1, ... of axes; a text stands for itself."""
    return ", ".join(a if isinstance(a, str) else f"{letter}{a}" for a in axes) or "()"


def evaluate(element: Element, shape: tuple[int, ...], xs: Sequence[np.ndarray]) -> np.ndarray:
    """The result in NumPy: what the text means."""
    names: dict[str, Any] = {f"x{i}": _Operand(x) for i, x in enumerate(xs)}
    names |= {f"o{a}": np.arange(n).reshape(n, *(1,) * (len(shape) - a - 1))
              for a, n in enumerate(shape)}
    names["where"] = np.where
    total: Any = None
    for r in np.ndindex(*element.over):
        names |= {f"r{i}": n for i, n in enumerate(r)}
        for b in element.bounds:
            at = np.asarray(eval(b.text, names))  # noqa: S307
            if ((at < (-b.extent if b.wrap else 0)) | (at >= b.extent)).any():
                raise AxisError(f"{b.text} is outside of extent {b.extent}")
        term = eval(element.text, names)  # noqa: S307
        total = term if total is None else total + term
    if total is None:
        return np.zeros(shape, xs[0].dtype)
    return np.broadcast_to(total, shape).astype(xs[0].dtype)


@dataclass(frozen=True)
class _Operand:
    """An array with zeros around it."""

    array: np.ndarray

    def __getitem__(self, place: Any) -> np.ndarray:
        at = np.broadcast_arrays(*place) if isinstance(place, tuple) else [np.asarray(place)]
        x, inside = self.array, np.ones(np.shape(at[0]) if at else (), bool)
        for i, n in zip(at, x.shape, strict=True):
            inside &= (i >= 0) & (i < n)
        if not x.size:
            return np.zeros(inside.shape, x.dtype)
        clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(at, x.shape, strict=True))
        return np.where(inside, x[clipped], x.dtype.type(0))


__all__ = ["Element", "IndexBound", "evaluate", "index_names"]
