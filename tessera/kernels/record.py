"""What is known of a library routine beside its code: reference, samples, tolerance, benchmarks.

Tests, the compiled cases, the guide's table and the benchmarks iterate over these records.

    RoutineRecord(arrays="`[..., N]`", reference=softmax_f64,
                  samples=(KernelSample("", ((3, 100),)),))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass
from ..numerics import as_type, decode, stored_bytes
from ..tensor import Tensor, of_codes, tensor
from ..tile.ir.schedule import Schedule


@dataclass(frozen=True)
class Draw:
    """An argument that is not normal, or not of the case's type.

    values(rng, shape) -> array; rng is a NumPy Generator
    """

    shape: tuple[int, ...]
    dtype: str
    values: Callable[[Any, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of a routine.

    arguments: the shape of a normal array of `dtype`, a Draw, or the value itself
    options: arguments by name, where a Draw stands for an array
    """

    name: str
    arguments: tuple[Any, ...]
    dtype: str = "f32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def drawn(self, rng: Any) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments, their arrays as host tensors of fresh numbers."""
        def draw(x: Any) -> Any:
            if isinstance(x, tuple):
                return tensor(rng.standard_normal(x).astype(np.float32), self.dtype)
            return tensor(x.values(rng, x.shape), x.dtype) if isinstance(x, Draw) else x

        return self._filled(draw)

    def zeros(self) -> tuple[list[Any], dict[str, Any]]:
        """The same with arrays of zeros, which take no memory until they are written."""
        def zero(x: Any) -> Any:
            if not isinstance(x, tuple | Draw):
                return x
            shape, name = (x, self.dtype) if isinstance(x, tuple) else (x.shape, x.dtype)
            numeric = as_type(name)
            if numeric.dtype.packed:
                return of_codes(np.zeros(stored_bytes(shape, numeric.dtype), np.uint8), shape,
                                numeric)
            return Tensor(np.zeros(shape, numeric.dtype.numpy), numeric)

        return self._filled(zero)

    def _filled(self, fill: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        return [fill(x) for x in self.arguments], {k: fill(x) for k, x in self.options.items()}


@dataclass(frozen=True)
class KernelSample(Case):
    """A call that is compared with the reference.

    rounds: the coarsest type on the way, that of the arrays when empty. terms: of the longest sum.
    Both bound the error: 4 eps(rounds) sqrt(terms), see tests/tolerance.py.
    """

    rounds: str = ""
    terms: int = 1

    @property
    def tolerance(self) -> tuple[str, int]:
        """The type and the length of the reduction that bound the error."""
        return self.rounds or self.dtype, self.terms


@dataclass(frozen=True)
class CompiledCall(Case):
    """A call whose kernel is compiled, and may not spill.

    schedule: sizes of blocks other than those that the routine takes
    says: what the text of its target level tells on sm_90a
    """

    schedule: Schedule | None = None
    says: str = ""


@dataclass(frozen=True)
class Benchmark(Case):
    """A call that is timed beside another library's.

    flops or bytes: of one call, read and written; what stands in the table is their rate
    beside: (whose, build), build(torch, *arguments, **options) -> a function without arguments that
        computes the same and returns it
    """

    flops: float = 0.0
    bytes: float = 0.0
    beside: tuple[str, Callable[..., Callable[[], Any]]] = ("", lambda torch: lambda: None)

    def __post_init__(self) -> None:
        if bool(self.flops) == bool(self.bytes) or not self.beside[0]:
            raise ArgumentError(f"the benchmark {self.name!r} gives flops={self.flops:g}, "
                                f"bytes={self.bytes:g}, beside={self.beside[0]!r}",
                                hint="flops or bytes of one call, and whose library it is beside")

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.flops else "GB/s"

    def rate(self, milliseconds: float) -> float:
        """In `unit`."""
        return self.flops / milliseconds / 1e9 if self.flops else self.bytes / milliseconds / 1e6


@dataclass(frozen=True)
class RoutineRecord:
    """reference(*arguments, **options) -> the result, or all of them, in f64 with NumPy.

    arrays: the shapes of its operands, in the guide's table
    variant: a schedule other than the default, with which it computes the same
    ops: the same of tensors, ops(F, *arguments, **options) with the functions of tessera.graph: its
        derivative is the derivative of that. None: it has none
    """

    arrays: str
    reference: Callable[..., Any]
    samples: tuple[KernelSample, ...]
    variant: Schedule
    compiled: tuple[CompiledCall, ...]
    benchmarks: tuple[Benchmark, ...] = ()
    ops: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not self.samples or not self.compiled:
            raise ArgumentError(f"a routine with {len(self.samples)} samples and "
                                f"{len(self.compiled)} compiled calls cannot be tested",
                                hint="at least one of each")

    def expected(self, arguments: list[Any], options: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        """The reference's results for arguments in any type."""
        found = self.reference(*map(wide, arguments), **{k: wide(x) for k, x in options.items()})
        return found if isinstance(found, tuple) else (found,)


def wide(x: Any) -> Any:
    """An array in f64, integers as they are; anything else as it is."""
    if not isinstance(x, Tensor) or x.dtype.kind != "float":
        return x.array if isinstance(x, Tensor) else x
    return np.array(decode(x.array, x.dtype), np.float64)


__all__ = ["Benchmark", "Case", "CompiledCall", "Draw", "RoutineRecord", "KernelSample", "wide"]
