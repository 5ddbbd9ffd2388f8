"""f64 that nobody asked for: NumPy makes f64 of nearly everything, and an op of such an array and
f32 tensors computes in f64, as does all that follows.

An f64 array that enters without a stated type is remembered, and so are the f64 results of ops on
it. Where one meets a narrower float, the user is told: once for each line. `f64_arrays` says what
happens instead: "f32" converts such arrays as they enter, "keep" says nothing. A type that is
stated (`ts.tensor(a, "f64")`, `ts.cast`, `ts.zeros(n, "f64")`) is never changed or spoken of.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from . import config
from .errors import user_line
from .numerics import f64

NARROW = frozenset({"f32", "tf32", "bf16", "f16"})


class WideArrayWarning(UserWarning):
    """An f64 array whose type nobody stated makes f64 of an op on narrower floats."""


# By id: tensors compare elementwise, so they cannot be members of a set.
UNSTATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
ANY_UNSTATED: dict[int, Any] = UNSTATED.data  # type: ignore[attr-defined]  # whose bool() is quicker
_told: set[tuple[str, int]] = set()


def admit(array: np.ndarray) -> np.ndarray:
    """An array of no stated type as it enters: of f32 where the setting says so."""
    if array.dtype == np.float64 and config.f64_arrays == "f32":
        return array.astype(np.float32)
    return array


def remember(x: Any) -> Any:
    """x, made of an array of no stated type."""
    if x.type.dtype is f64 and config.f64_arrays == "warn":
        UNSTATED[id(x)] = x
    return x


def forget(x: Any) -> None:
    """The type of x has been stated."""
    UNSTATED.pop(id(x), None)


def is_unstated(x: Any) -> bool:
    """Whether x is f64 because an array was, and not because somebody said so."""
    return id(x) in UNSTATED or (type(x) is np.ndarray and x.dtype == np.float64 and x.ndim > 0)


def inherit(out: Any, sources: Sequence[Any]) -> None:
    """An f64 result of an op on such arrays is one too."""
    wide = [y for y in _members(out) if getattr(getattr(y, "type", None), "dtype", None) is f64]
    if wide and any(is_unstated(x) for x in _members(sources)):
        for y in wide:
            UNSTATED[id(y)] = y


def _members(values: Any) -> Iterator[Any]:
    """What nested tuples and lists hold, such as the parts of complex tensors."""
    if isinstance(values, tuple | list):
        for x in values:
            yield from _members(x)
    else:
        yield values


def check_widening(xs: Iterable[Any]) -> None:
    """Warn, once per line, where one of the operands makes the others f64."""
    operands = [x for x in xs if hasattr(x, "type")]
    narrow = [x for x in operands if x.type.dtype.name in NARROW]
    if not narrow or not any(id(x) in UNSTATED for x in operands):
        return
    where = user_line()
    place = (where.file, where.line) if where is not None else ("", 0)
    if place in _told:
        return
    _told.add(place)
    kind = narrow[0].type.dtype.name
    warnings.warn_explicit(
        f"an f64 array meets {kind}: the result is f64, and so is what is computed with it. NumPy "
        f"makes f64 where nothing else is said (np.linspace, np.random). Convert it, "
        f'ts.tensor(a, "{kind}"), or say that f64 is meant, ts.tensor(a, "f64"); for all arrays: '
        'ts.config.set(f64_arrays="f32"), or "keep" to hear nothing of it',
        WideArrayWarning, *place)
