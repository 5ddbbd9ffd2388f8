"""Types of other objects than tensors, as annotations of a function's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..dims import Dim
from ..tensor import TensorType


class ValueType(ABC):
    """An annotation that is the type of another object than a tensor, such as a KVCache."""

    shape: tuple[int | Dim, ...]

    @abstractmethod
    def check(self, value: Any, sizes: dict[str, int | Dim], what: str) -> None:
        """Bind `value`'s extents into `sizes`. Raises ShapeError, DTypeError."""

    @abstractmethod
    def example(self, make: Callable[[TensorType], Any]) -> Any:
        """An object of this type, of tensors that `make` gives."""
