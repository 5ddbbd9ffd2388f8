"""Decorators that compose on one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..call_errors import refusing
from .signature import callable_name


class Decorator:
    """A decorator that composes with others on one line: `@jit @autodiff` above a def.

    Python reads that line as `jit @ autodiff`; (a @ b)(f) is a(b(f)).
    """

    def __init__(self, wrap: Callable, name: str | None = None):
        functools.update_wrapper(self, wrap, updated=())
        self.__name__ = name or callable_name(wrap)
        self.wrap = refusing(f"ts.{self.__name__}", wrap)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.wrap(*args, **options)

    def __matmul__(self, other: Callable) -> Decorator:
        if not callable(other):
            return NotImplemented
        return Decorator(lambda fn: self(other(fn)), f"{self.__name__} @ {callable_name(other)}")

    def __rmatmul__(self, other: Callable) -> Decorator:
        if not callable(other):
            return NotImplemented
        return Decorator(lambda fn: other(self(fn)), f"{callable_name(other)} @ {self.__name__}")

    def __repr__(self) -> str:
        return f"<decorator {self.__name__}>"
