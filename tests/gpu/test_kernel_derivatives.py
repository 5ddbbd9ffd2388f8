"""Derivatives that follow from a kernel's body, on a GPU: those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from derived_kernels import PROGRAMS
from gpu_harness import require_gpu
from tolerance import assert_close

require_gpu()


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_cpu(name, rng):
    f, shapes = PROGRAMS[name]
    given = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    w = rng.standard_normal(f(*map(ts.tensor, given)).shape).astype(np.float32)

    def slopes(target):
        scale, xs = ts.tensor(w), [ts.tensor(x) for x in given]
        made = ts.jit(ts.grad(lambda xs: ts.sum(f(*xs) * scale)), target=target)(xs)
        return [g.numpy() for g in made]

    for got, want in zip(slopes("cuda"), slopes("cpu"), strict=True):
        assert_close(got, want, np.float32, 300)
