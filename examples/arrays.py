"""What the numbered examples share: arrays on the host or on a GPU, and a check against NumPy.

    python examples/03_softmax.py                  NumPy's: the kernels run in the interpreter
    python examples/03_softmax.py --device cuda    torch's, or CuPy's: they run on the GPU

A kernel runs where its arrays lie, so nothing else in an example knows about devices.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from typing import Any

import numpy as np

import tessera as ts

BITS = {1: np.uint8, 2: np.int16}  # how types that a library does not know travel through it
TORCH = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class Arrays:
    """Random inputs and empty results, on the device that the command line names."""

    def __init__(self, what: str):
        parser = argparse.ArgumentParser(description=(what or "").strip().splitlines()[0])
        parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "torch", "cupy"],
                            help="cuda is torch when it is installed, else CuPy")
        parser.add_argument("--seed", type=int, default=0)
        given = parser.parse_args()
        found = "torch" if importlib.util.find_spec("torch") else "cupy"
        self.device = found if given.device == "cuda" else given.device
        self.rng = np.random.default_rng(given.seed)

    def on_host(self) -> Arrays:
        """The same numbers to come, as NumPy arrays."""
        made = copy.copy(self)
        made.device = "cpu"
        return made

    def normal(self, *shape: int, dtype: Any = ts.f32) -> Any:
        """Standard normal numbers, rounded to `dtype`."""
        return self.put(self.rng.standard_normal(shape, np.float32), dtype)

    def empty(self, *shape: int, dtype: Any = ts.f32) -> Any:
        """A result: NaN everywhere, so that an element that nobody writes is seen."""
        return self.put(np.full(shape, np.nan, np.float32), dtype)

    def zeros(self, *shape: int, dtype: Any = ts.f32) -> Any:
        return self.put(np.zeros(shape, np.float32), dtype)

    def put(self, values: np.ndarray, dtype: Any = ts.f32) -> Any:
        """An array of the device with these values, rounded to `dtype`."""
        stored = np.ascontiguousarray(ts.numerics.encode(values, dtype))
        if self.device == "torch":
            import torch

            known = TORCH.get(str(dtype))
            bits = torch.from_numpy(stored.view(BITS[stored.itemsize]) if known else stored)
            return bits.cuda().view(getattr(torch, known)) if known else bits.cuda()
        if self.device == "cupy":
            import cupy

            return cupy.asarray(stored)
        return stored

    @staticmethod
    def get(x: Any) -> np.ndarray:
        """An array of any device in f64, for the check."""
        if type(x).__module__.startswith("torch"):
            x = x.float().cpu()
        elif type(x).__module__.startswith("cupy"):
            x = x.get()
        return np.asarray(x, np.float64)


def check(what: str, got: Any, want: np.ndarray, limit: float) -> None:
    """Prints the largest error relative to the largest element. Raises SystemExit above `limit`."""
    got = Arrays.get(got)
    error = float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))
    good = error <= limit  # false for NaN, too
    shape, verdict = str(list(np.shape(want))), "ok" if good else "WRONG"
    print(f"{what:34} {shape:14} error {error:.1e}  {verdict}")
    if not good:
        raise SystemExit(f"{what}: the error {error:.3g} is above {limit:.3g}")
