"""A kernel begins while the one in front of it ends, and reads what that one writes last."""

from __future__ import annotations

import numpy as np

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build

require_gpu()
GROUPS, STEPS, LAUNCHES = 64, 20000, 20
SOURCE = f"""
@kernel
def k(x: Tensor["N", f32], y: Tensor["N", f32]):
    g = tile.group_id(0)
    at = (g + 1) % {GROUPS} * 128
    v = tile.load(x[at:at+128])
    steps = {STEPS} if g % 7 == 3 else 1
    for i in range(0, steps):
        v = v * 0.5 + 1.0
    y[g*128:g*128+128] = v
"""


def test_what_is_written_last_is_read(rng):
    """Groups that take long, whose results others read in the next launch."""
    kernel = build(SOURCE)["k"]
    x = rng.standard_normal(128 * GROUPS).astype(np.float32)
    a, b = ts.tensor(x).to("cuda"), ts.zeros(len(x)).to("cuda")
    for _ in range(LAUNCHES):
        kernel[GROUPS](a, b)
        a, b = b, a
    want = x.astype(np.float64)
    for _ in range(LAUNCHES):
        rows = np.roll(want.reshape(GROUPS, 128), -1, 0)
        slow = (np.arange(GROUPS) % 7 == 3)[:, None]
        want = np.where(slow, 2.0 + (rows - 2.0) * 0.5**STEPS, rows * 0.5 + 1).reshape(-1)
    np.testing.assert_allclose(a.numpy(), want, rtol=1e-6)
