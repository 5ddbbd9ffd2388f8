"""Rows of targets: what is there runs, and what is not says so."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart


@pytest.mark.row("CORE-16")
@pytest.mark.parametrize("name", ["amd", "rocm", "intel", "tpu", "npu", "webgpu"])
def test_another_target_is_refused_by_name(name: str) -> None:
    with pytest.raises(ts.UnsupportedTargetError) as e:
        ts.jit(lambda x: x + 1.0, target=name)(ts.ones((3,)))
    assert name in str(e.value) and "cuda" in str(e.value)


@pytest.mark.row("CORE-16")
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.usefixtures("gpu", "apart")
def test_both_targets_run(target: str, rng: np.random.Generator) -> None:
    """cuda: lowered for a GPU, its kernels run by the interpreter."""
    x = rng.standard_normal((5, 7)).astype(np.float32)
    y = ts.jit(lambda x: ts.sum(x * 2.0, axis=-1), target=target)(ts.tensor(x))
    np.testing.assert_allclose(y.numpy(), 2 * x.astype(float).sum(-1), rtol=1e-5, atol=1e-6)
