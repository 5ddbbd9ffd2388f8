"""The benchmarks of the standard library's records, beside what each names. kernels.py runs them.

An entry is a routine and a `Benchmark` of its record: a routine with a new one needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.kernels import ROUTINES, Routine
from tessera.kernels.record import Benchmark, Draw
from tessera.numerics import as_dtype

TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "int32": "int32"}


@dataclass(frozen=True)
class Entry:
    routine: Routine
    case: Benchmark

    @property
    def title(self) -> str:
        return f"{self.routine.__name__} {self.case.name}"

    @property
    def limit(self) -> float:
        """Of the relative difference (Frobenius) between two results that are each rounded."""
        return 2.0 ** -as_dtype(self.case.dtype).man

    def runs(self, torch: Any) -> dict[str, Callable[[], Any]]:
        """Both sides, each on arrays of its own: some are written in place."""
        arguments, options = on_gpu(torch, self.case)
        whose, build = self.case.beside
        clones = [x.clone() if hasattr(x, "clone") else x for x in arguments]
        return {"tessera": lambda: self.routine(*arguments, **options),
                whose: build(torch, *clones, **options)}

    def figures(self, times: dict[str, float]) -> dict[str, Any]:
        """From milliseconds of each side."""
        whose = self.case.beside[0]
        return {name: {self.case.unit: round(self.case.rate(t)),
                       f"of {whose}": round(times[whose] / t, 3)} for name, t in times.items()}


def entries(routines: Iterable[Routine] | None = None) -> list[Entry]:
    """Every benchmark of the library."""
    found = ROUTINES.values() if routines is None else routines
    return [Entry(r, case) for r in found for case in r.record.benchmarks]


def on_gpu(torch: Any, case: Benchmark) -> tuple[list[Any], dict[str, Any]]:
    """The case's arguments as tensors of PyTorch on the GPU."""
    def made(x: Any) -> Any:
        if isinstance(x, tuple):
            return torch.randn(*x, device="cuda", dtype=getattr(torch, TORCH[case.dtype]))
        if isinstance(x, Draw):
            values = np.asarray(x.values(np.random.default_rng(0), x.shape))
            return torch.from_numpy(values).to(device="cuda", dtype=getattr(torch, TORCH[x.dtype]))
        return x

    return [made(x) for x in case.arguments], {k: made(x) for k, x in case.options.items()}
