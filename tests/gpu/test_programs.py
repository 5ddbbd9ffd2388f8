"""Random programs and kernels on a GPU, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from programs import as_f64, exact_program
from tile_programs import TYPES, copies, tile_program

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


@pytest.mark.parametrize("part", range(4))
def test_random_kernels(part: int, rng: np.random.Generator) -> None:
    """Of tiles: what the interpreter leaves, bit by bit."""
    for seed in rng.integers(0, 2**63, 6):
        text, arguments = tile_program(np.random.default_rng(seed))
        print(f"--- kernel {seed}\n{text}")
        kernel = build(text, **TYPES)["k"]
        want, there = copies(arguments), [x.to("cuda") for x in arguments]
        kernel(*want)
        kernel(*there)
        for x, y in zip(there, want, strict=True):
            np.testing.assert_array_equal(as_f64(x), as_f64(y))
