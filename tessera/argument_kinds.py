"""Which argument of a call that failed is not what its annotation says.

    wrong_argument(fn, signature, args, kwargs)  # "eps takes float, got the str '1e-5'", or None

Annotations are read when a call has failed, never before: a call that succeeds pays nothing, and
what an annotation does not say (Any) is not judged.
"""

from __future__ import annotations

import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

NUMBERS = {int: numbers.Integral, float: numbers.Real, bool: numbers.Integral}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def wrong_argument(fn: Callable, signature: inspect.Signature, args: tuple,
                   kwargs: Mapping[str, Any]) -> str | None:
    """What to say of the first argument that is not of its annotated kind."""
    names = inspect.unwrap(fn).__globals__
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind not in VARIADIC and not fits(value, _kind(parameter.annotation, names)):
            kind = type(value).__name__
            got = "None" if value is None else f"the {kind} {reprlib.repr(value)}"
            return f"{name} takes {parameter.annotation}, got {got}"
    return None


def _kind(annotation: Any, names: dict[str, Any]) -> Any:
    """The kind that an annotation's text names; Any for what only a type checker imports."""
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated kind. A tensor of no axes counts as a number, a sequence
    is judged by its elements."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, k) for k in inner)
    if kind is inspect.Parameter.empty or not isinstance(origin or kind, type):
        return True
    if kind in NUMBERS:
        index = hasattr(value, "__index__") and not hasattr(value, "shape")  # an extent by name
        return isinstance(value, NUMBERS[kind]) or index or getattr(value, "shape", None) == ()
    if kind is str:
        return isinstance(value, str)
    if origin is tuple and inner[1:] not in ((), (...,)):
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(
            map(fits, value, inner))
    if origin is not None and issubclass(origin, Sequence | Collection) \
            and not issubclass(origin, Mapping):
        return isinstance(value, Iterable) and not isinstance(value, str) and all(
            fits(x, inner[0]) for x in (value if isinstance(value, list | tuple) and inner else ()))
    kind = origin or kind
    judged = kind is not Any and not getattr(kind, "_is_protocol", False)
    return not judged or isinstance(value, kind)


__all__ = ["fits", "wrong_argument"]
