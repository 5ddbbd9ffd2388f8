"""The eleven models on a GPU: nothing changed but where their data lies."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from models.training import NAMES, losses, model, step_of, tensors, torch_losses

require_gpu()
STEPS = 20


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_cpu(name: str, note: Any) -> None:
    """20 steps, to 1e-4; how long the first call took is noted."""
    m = model(name)
    rng = np.random.default_rng(1)
    p, batch = (ts.to(tensors(x), "cuda") for x in (m.parameters(rng), m.batch(rng)))
    step, begin = step_of(m), time.perf_counter()
    step(p, batch)[0].item()
    note(model=name, first_call_s=round(time.perf_counter() - begin, 2),
         launches=sum(" over [" in line for line in step.inspect_ir("schedule").splitlines()))
    np.testing.assert_allclose(losses(m, "cuda", STEPS), losses(m, "cpu", STEPS), rtol=1e-4,
                               atol=1e-4)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_torch(name: str) -> None:
    m = model(name)
    np.testing.assert_allclose(losses(m, "cuda", STEPS), torch_losses(m, "cuda", STEPS), rtol=1e-4,
                               atol=1e-4)
