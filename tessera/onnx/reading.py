"""The table of what each op of ONNX is among the functions of `ts`. The families are in readers.py
and reading_layers.py, which fill it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import BundleError, did_you_mean
from ..lazy_dataclass import dataclass
from ..tensor import Tensor, as_tensor

OLDEST, NEWEST = 13, 24  # opsets: from where axes are operands to the last that was read through


@dataclass(frozen=True)
class OnnxNode:
    """One node of a model: its kind, its attributes, and how many results are used."""

    kind: str
    name: str
    attrs: dict[str, Any]
    n_outputs: int

    def option(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def only(self, **wanted: Any) -> None:
        """Raises BundleError where an attribute is another than that which is read."""
        for name, value in wanted.items():
            if self.option(name, value) != value:
                raise self.refuse(f"{name}={self.option(name)!r}")

    def one_result(self) -> None:
        if self.n_outputs > 1:
            raise self.refuse("more than its first result")

    def static(self, x: Any, what: str) -> list[int]:
        """The integers of an operand that the program must know before it runs."""
        if isinstance(x, Tensor):
            raise self.refuse(f"{what} that are data")
        return [int(n) for n in np.asarray(x).reshape(-1)]

    def axes(self, xs: tuple, place: int = 1) -> list[int] | None:
        """Axes, which are an attribute in some opsets and an operand in others."""
        if "axes" in self.attrs:
            return list(self.attrs["axes"])
        given = xs[place] if len(xs) > place else None
        return None if given is None else self.static(given, "axes")

    def refuse(self, what: str) -> BundleError:
        return BundleError(f"ONNX's {self.kind} (node {self.name!r}) is not read with {what}")


Reader = Callable[..., Any]
READERS: dict[str, Reader] = {}


def reads(*kinds: str) -> Callable[[Reader], Reader]:
    """Registers what ops of ONNX are: reader(node, *operands) -> tensor, or a tuple of them.
    Operands are tensors, or arrays where their values are known; None for one that is left out."""
    def register(reader: Reader) -> Reader:
        for kind in kinds:
            if kind in READERS:
                raise ValueError(f"what ONNX's {kind!r} is is declared twice")
            READERS[kind] = reader
        return reader

    return register


def need_readers(kinds: list[tuple[str, str, str]]) -> None:
    """Raises BundleError for the first (domain, kind, node) that is not read."""
    for domain, kind, name in kinds:
        if domain not in ("", "ai.onnx") or kind not in READERS:
            of = f" of the domain {domain}" if domain not in ("", "ai.onnx") else ""
            raise BundleError(f"the model has an ONNX {kind}{of} (node {name!r}), which is not "
                              "read", hint=did_you_mean(kind, sorted(READERS)))


def tensor(x: Any) -> Tensor:
    """An operand as a tensor; arrays of the model are captured, without a copy."""
    return as_tensor(x)
