"""Conditions of lanes and of tiles on a GPU: guarded reads, values of `and` and `or`, logical ops.
A read that is not guarded would fault or show in the results."""

from __future__ import annotations

import numpy as np

import truth_programs
from gpu_harness import require_gpu
from tile_gpu import compare, on_gpu

require_gpu()


def test_random_conditions(rng):
    for _ in range(10):
        program, args, want = truth_programs.guarded(rng)
        k = truth_programs.kernel(program)
        compare(k, *args, groups=2, lanes=32)
        got = on_gpu(k, *args, groups=2, lanes=32).arrays["o"]
        assert np.asarray(got).tolist() == want, program
