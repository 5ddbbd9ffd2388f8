"""Random programs on a GPU, eager and compiled, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from programs import as_f64, exact_program

require_gpu()


@pytest.mark.parametrize("part", range(8))
def test_programs_of_integers(part: int, rng: np.random.Generator) -> None:
    """What is wrong is off by a whole number; functions as exp may be off by some ulp."""
    for seed in rng.integers(0, 2**63, 6):
        made = exact_program(np.random.default_rng(seed))
        print(f"--- program {seed}\n{made}")
        if made.on_mesh or not made.steps:
            continue
        on_gpu: Any = ts.jit(made.__call__, target="cuda")
        for y, want in zip(on_gpu(*made.inputs), made(*made.inputs), strict=True):
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            np.testing.assert_allclose(as_f64(y), as_f64(want), rtol=2.0**-20, atol=2.0**-20)
