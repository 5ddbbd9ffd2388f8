"""Small kernel programs: wrong ones with the error they must give, and right ones (corpus.py)."""

from __future__ import annotations

from pathlib import Path

from corpus import Program, programs_of

PRELUDE = """import math
import numpy as np
import tessera as ts
from tessera import Tensor, bf16, f16, f32, f64, i32, i64, int8, kernel
tile = ts.tile
rng = np.random.default_rng(seed)
def floats(*shape): return rng.standard_normal(shape).astype(np.float32)
def halves(*shape): return ts.tensor(floats(*shape), "bf16")
def wide(x): return np.asarray(ts.cast(x, f32) if isinstance(x, ts.Tensor) else x).astype(float)
x, y = floats(300), floats(300)
A, B, C = floats(70, 50), floats(50, 90), np.zeros((70, 90), np.float32)
"""


def read(file: str) -> list[Program]:
    """The programs of <file>.txt."""
    return programs_of(Path(__file__).parent / f"{file}.txt", PRELUDE)


def algorithms() -> list[Program]:
    """Whole algorithms, each of which compares its results with NumPy's of f64."""
    return [p for file in ("algorithms", "sequences", "solvers", "tables") for p in read(file)]
