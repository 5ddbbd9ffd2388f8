"""NumPy's functions called on tensors: np.sum(x) is ts.sum(x).

A function of the table has the same meaning here, so it is traced and differentiated like any op.
Every other one gets the tensors as arrays and returns what NumPy returns, as np.asarray(x) would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ..call_errors import show_call
from ..errors import ArgumentError, TraceError
from ..tensor import OPERATORS, Tensor
from . import functions as F
from .operand import PUBLIC

# NumPy's name -> ours; arguments go through as they are given.
_SAME = {
    **{n: n for n in (
        "sum prod max min mean var std any all argmax argmin reshape transpose squeeze swapaxes "
        "moveaxis expand_dims concatenate stack sort argsort clip where einsum tile flip roll "
        "broadcast_to zeros_like ones_like tril triu diag diagonal trace split").split()},
    "amax": "max", "amin": "min", "round": "round", "around": "round", "ravel": "flatten",
}
# Those whose axis is None by default, which here they are not: the flat tensor then.
_FLAT = {"cumsum": "cumsum", "cumprod": "cumprod", "take": "take", "repeat": "repeat"}
# NumPy's name of an argument -> ours, where they differ. The first argument has no name.
_ARGUMENTS = {"a_min": "low", "a_max": "high", "indices": "ids", "newshape": "shape", "reps":
              "repeats", "indices_or_sections": "sections", "axis1": "a", "axis2": "b", "x": "a",
              "y": "b", "offset": "offset"}
# Arguments that say nothing when they have these values.
_IGNORED = {"dtype": None, "out": None, "order": "C", "copy": None, "subok": True, "kind": "stable"}


def _flat_unless_axis(ours: Callable) -> Callable:
    def call(x: Any, *args: Any, axis: int | None = None, **kwargs: Any) -> Any:
        if axis is None:
            x, axis = F.reshape(x, (-1,)), 0
        return ours(x, *args, axis=axis, **kwargs)

    return call


def _split(x: Any, sections: Any, axis: int = 0) -> list[Any]:
    """np.split: a list says where to cut, that of ts.split how long the parts are."""
    if np.ndim(sections) == 0:
        return F.split(x, sections, axis)
    lead = (slice(None),) * (axis % x.ndim)
    places = [int(i) for i in sections]
    return [x[(*lead, slice(start, stop))]
            for start, stop in zip([0, *places], [*places, x.shape[axis]], strict=True)]


_OWN = {"split": _split}  # which differ from what has their name here


def array_function(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What `func`, a function of NumPy, is on these arguments, some of which are tensors."""
    name = func.__name__
    ours = PUBLIC.get(_SAME.get(name, _FLAT.get(name, "")))
    if ours is None or getattr(np, name, None) is not func:
        try:
            arrays = {k: _as_arrays(v) for k, v in kwargs.items()}
            return func(*map(_as_arrays, args), **arrays)
        except TraceError as err:
            if name in PUBLIC:
                err.hint = show_call(f"ts.{name}", inspect.signature(PUBLIC[name]))
            raise
    first, given = _bound(func, name, args, kwargs)
    refused = sorted(given.keys() & _IGNORED.keys())
    if refused:
        raise ArgumentError(
            f"np.{name} of a tensor takes no {refused[0]}={given[refused[0]]!r}",
            hint=f"ts.cast(x, dtype) before it, or np.{name}(x.numpy(), ...) for an array")
    ours = _OWN.get(name, ours)
    return (_flat_unless_axis(ours) if name in _FLAT else ours)(*first, **given)


def _bound(func: Callable, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The first argument, and the others that are not at their defaults by our names: NumPy's
    functions have more arguments than ours, and in another order."""
    parameters = inspect.signature(func).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return args, kwargs
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    names = {"diagonal": {}, "trace": {}, "diag": {"k": "offset"}}.get(name, _ARGUMENTS)
    (_, first), *rest = bound.items()
    if name == "reshape":  # ours takes the extents by position
        return (first, bound["shape"]), {k: v for k, v in rest if k != "shape" and v != "C"
                                         and v is not parameters[k].default}
    return (first,), {
        names.get(k, k): v for k, v in rest
        if v is not parameters[k].default and (k not in _IGNORED or v is not _IGNORED[k])
    }


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return np.asarray(value)
    if type(value) in (tuple, list):
        return type(value)(map(_as_arrays, value))
    return value


OPERATORS["array_function"] = array_function
