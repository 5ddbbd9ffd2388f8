"""Parameters that hold several arrays: `cache: KVCache` is one parameter for each array of it.

In the kernel's body the arrays are attributes, cache.K and cache.V; everywhere else, and in the
Tile IR, they are parameters of their own, cache_K and cache_V.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.tensor import TensorType


@dataclass(frozen=True)
class RecordClass:
    """A class of such parameters.

    kinds(name, annotation) -> the type of each array by field; arrays(value) -> the arrays.
    """

    kinds: Callable[[str, Any], dict[str, TensorType]]
    arrays: Callable[[Any], dict[str, Any]]


RECORDS: dict[type,
              RecordClass] = {}  # by class, and by the class of its types; filled by upper floors


def record_of(annotation: Any) -> RecordClass | None:
    return RECORDS.get(annotation if isinstance(annotation, type) else type(annotation))


def fields_of(annotations: dict[str, Any]) -> dict[str, dict[str, TensorType]]:
    """The fields of each parameter that is a record."""
    found = {n: (record_of(a), a) for n, a in annotations.items()}
    return {n: r.kinds(n, a) for n, (r, a) in found.items() if r is not None}


def flat_annotations(annotations: dict[str, Any]) -> dict[str, Any]:
    """The annotations, those of records replaced by the types of their arrays."""
    fields = fields_of(annotations)
    out: dict[str, Any] = {}
    for name, annotation in annotations.items():
        if name in fields:
            out |= {f"{name}_{f}": kind for f, kind in fields[name].items()}
        else:
            out[name] = annotation
    return out


def flat_signature(signature: inspect.Signature, annotations: dict[str, Any]) -> inspect.Signature:
    """The signature with a parameter for each array of a record. Raises ArgumentError."""
    fields = fields_of(annotations)
    if not fields:
        return signature
    made: list[inspect.Parameter] = []
    for p in signature.parameters.values():
        names = [f"{p.name}_{f}" for f in fields[p.name]] if p.name in fields else [p.name]
        made += [p.replace(name=n) for n in names]
    names = [p.name for p in made]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"two parameters are called {name}, one of them an array of a "
                                "record", hint="rename the other")
    return signature.replace(parameters=made)


def among(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an argument of a call is a record."""
    return any(type(a) in RECORDS for a in (*args, *kwargs.values()))


def spread(name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
           ) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call, records replaced by their arrays. Raises ArgumentError."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as err:
        raise ArgumentError(f"{name}: {err}", hint=f"{name}{signature}",
                            where=user_line()) from None
    bound.apply_defaults()
    flat: list[Any] = []
    named: dict[str, Any] = {}
    for p in signature.parameters.values():
        value = bound.arguments[p.name]
        record = RECORDS.get(type(value))
        parts = {p.name: value} if record is None else {
            f"{p.name}_{f}": a for f, a in record.arrays(value).items()}
        if p.kind is p.KEYWORD_ONLY:
            named |= parts
        else:
            flat += parts.values()
    return tuple(flat), named


class RecordFields:
    """A record in a kernel's body: its arrays are attributes."""

    def __init__(self, fields: dict[str, Any]):
        self.__dict__.update(fields)
