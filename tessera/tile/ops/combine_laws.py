"""Whether a function of the user's can combine elements: in any grouping, with an identity.

Elements meet in groups of 2, 4, 8, ..., which no one wrote down: by a function that is not
associative, a - b or (a + b) / 2, each schedule and each extent gives another result. It is called
with 0 and 1, which all that it may stand for are among (numbers, flags, counts), as plain Python;
one that calls ts.tile is not asked.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.numerics import DType

Numbers = tuple[Any, ...]


def broken_law(combine: Any, kinds: Sequence[DType], identity: Numbers | None) -> str | None:
    """What does not hold, in numbers; None where all holds, or nothing can be said."""
    if not isinstance(combine, types.FunctionType):
        return None
    try:
        with np.errstate(all="ignore"):
            return _broken(_of_tuples(combine, kinds), _samples(kinds), identity)
    except Exception:  # whatever a kernel's function raises outside of a kernel
        return None


def _of_tuples(combine: Callable, kinds: Sequence[DType]) -> Callable[[Numbers, Numbers], Numbers]:
    def f(a: Numbers, b: Numbers) -> Numbers:
        made = (combine(a[0], b[0]),) if len(kinds) == 1 else combine(a, b)
        if any(not isinstance(x, bool if k.kind == "bool" else int | float) or (
                k.kind != "bool" and isinstance(x, bool))
               for x, k in zip(made, kinds, strict=True)):
            raise TypeError("other numbers than its operands")  # which is told where it is traced
        return tuple(made)

    return f


def _samples(kinds: Sequence[DType]) -> list[Numbers]:
    one = {"float": (0.0, 1.0), "bool": (False, True)}
    return list(itertools.islice(itertools.product(*(one.get(k.kind, (0, 1)) for k in kinds)), 8))


def _broken(f: Callable, samples: list[Numbers], identity: Numbers | None) -> str | None:
    for x in samples if identity is not None else ():
        for left, right in ((identity, x), (x, identity)):
            if not _nearly_equal(f(left, right), x):
                return (f"identity={_value_text(identity)} changes something: of "
                        f"{_value_text(left)} and {_value_text(right)} it makes "
                        f"{_value_text(f(left, right))}")
    for a, b, c in itertools.product(samples, repeat=3):
        first, last = f(f(a, b), c), f(a, f(b, c))
        if not _nearly_equal(first, last):
            return (f"it is not associative: of {_value_text(a)}, {_value_text(b)} and "
                    f"{_value_text(c)} it makes {_value_text(first)} from the left and "
                    f"{_value_text(last)} from the right, and elements meet in any grouping")
    return None


def _nearly_equal(x: Numbers, y: Numbers) -> bool:
    return bool(np.allclose(np.asarray(x, float), np.asarray(y, float), 1e-3, 1e-6, equal_nan=True)
                or np.isnan(np.asarray((*x, *y), float)).any())


def _value_text(x: Numbers | None) -> str:
    return str(x[0] if x is not None and len(x) == 1 else x)


__all__ = ["broken_law"]
