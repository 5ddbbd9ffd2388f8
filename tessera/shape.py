"""`ts.shape`: checking shapes without running, watching them while running, guarding calls.

    ts.shape.check(f)                              from annotations alone, symbols and all
    with ts.shape.trace() as log: ...              op, input shapes -> output shape, line by line
    @ts.shape.guard(Divisible("S", 64))            raises at the first call that breaks it
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .debug.record import program_trace as trace
from .dims import Dim
from .errors import ArgumentError, ShapeError
from .graph.annotate import tensor_annotations
from .graph.jit import JitFunction
from .graph.signature import callable_name
from .graph.value_type import ValueType
from .lazy_dataclass import dataclass
from .tensor import Tensor


def check(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result types of fn, found from its annotations without running it.

    Parameters annotated Tensor[...] are taken by type, their names as symbols; others need a
    default or a value here. Extents that are not provably equal are an error.
    Raises ShapeError, DTypeError with the line of fn that does not fit; ArgumentError for a
    parameter without annotation and value.
    """
    jitted = fn if isinstance(fn, JitFunction) else getattr(fn, "compiled", None) or JitFunction(fn)
    given = dict(jitted.signature.bind_partial(*args, **kwargs).arguments) \
        if jitted.signature else {}
    missing = []
    for name, parameter in (jitted.signature.parameters if jitted.signature else {}).items():
        if name in given:
            continue
        if name in jitted.annotations:
            given[name] = jitted.annotations[name]
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        ):
            missing.append(name)
    if missing:
        raise ArgumentError(
            f"shape.check({callable_name(fn)}): nothing is known of {', '.join(missing)}",
            hint=f'annotate it, {missing[0]}: ts.Tensor["B", "D", ts.f32], or give a value',
        )
    bound = inspect.BoundArguments(jitted.signature, given)  # type: ignore[arg-type]
    return jitted.infer(*bound.args, **bound.kwargs)


@dataclass(frozen=True)
class Divisible:
    """The extent is a multiple of `by`."""

    dim: str
    by: int

    def holds(self, sizes: dict[str, int]) -> bool:
        return sizes[self.dim] % self.by == 0

    def __str__(self) -> str:
        return f"{self.dim} is a multiple of {self.by}"


@dataclass(frozen=True)
class Range:
    """low <= extent <= high."""

    dim: str
    low: int
    high: int

    def holds(self, sizes: dict[str, int]) -> bool:
        return self.low <= sizes[self.dim] <= self.high

    def __str__(self) -> str:
        return f"{self.low} <= {self.dim} <= {self.high}"


@dataclass(frozen=True)
class Equal:
    """Two extents, or an extent and a number, are equal."""

    dim: str
    to: str | int

    def holds(self, sizes: dict[str, int]) -> bool:
        return sizes[self.dim] == (sizes[self.to] if isinstance(self.to, str) else self.to)

    def __str__(self) -> str:
        return f"{self.dim} == {self.to}"


Guard = Divisible | Range | Equal


def guard(*guards: Guard) -> Callable[[Callable], Callable]:
    """Decorator: the extents that the annotations name keep these promises, else ShapeError.

    Under @ts.jit they are looked at once per signature, above it at every call. Names that are
    still symbolic (in ts.shape.check) are taken to keep them.
    """
    for g in guards:
        if not isinstance(g, Guard):
            raise ArgumentError(f"a guard is Divisible, Range or Equal, got {g!r}",
                                hint='ts.shape.guard(ts.shape.Divisible("S", 64))')

    def decorate(fn: Callable) -> Callable:
        kinds = fn.annotations if isinstance(fn, JitFunction) else tensor_annotations(fn)
        known = frozenset[str]().union(
            *(d.names for k in kinds.values() for d in k.shape if isinstance(d, Dim)))
        _need_names(guards, known, callable_name(fn))
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            _enforce(guards, kinds, bound.arguments, callable_name(fn))
            return fn(*args, **kwargs)

        return guarded

    return decorate


def _names_of(g: Guard) -> list[str]:
    return [g.dim, g.to] if isinstance(g, Equal) and isinstance(g.to, str) else [g.dim]


def _need_names(guards: tuple[Guard, ...], known: frozenset[str], fn: str) -> None:
    for g in guards:
        for name in _names_of(g):
            if name not in known:
                raise ArgumentError(f"guard {g}: no annotation of {fn} names {name}",
                                    hint="names there are: " + (", ".join(sorted(known)) or "none"))


def _enforce(guards: tuple[Guard, ...], kinds: dict, arguments: dict, fn: str) -> None:
    sizes: dict[str, Any] = {}
    for name, kind in kinds.items():
        value = arguments.get(name)
        if value is None or not (isinstance(value, Tensor) or isinstance(kind, ValueType)):
            continue
        if len(value.shape) == len(kind.shape):
            sizes.update((str(d), n) for d, n in zip(kind.shape, value.shape, strict=True)
                         if isinstance(d, Dim) and d.names == {str(d)})
    for g in guards:
        if any(not isinstance(sizes.get(n), int) for n in _names_of(g)) or g.holds(sizes):
            continue
        found = ", ".join(f"{n} = {sizes[n]}" for n in _names_of(g))
        raise ShapeError(f"{fn} promises {g}, this call has {found}", code="E_GUARD",
                         hint="pad the argument, or widen the guard")


__all__ = ["Divisible", "Equal", "Guard", "Range", "check", "guard", "trace"]
