"""gather and scatter on the GPU as under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from kernels.gathers import CASES, values
from tessera.tile.cuda.compile import ArgumentFacts
from tile_gpu import compare

require_gpu()


@pytest.mark.parametrize("lanes", [32, 100, 256])
@pytest.mark.parametrize("name", CASES)
def test_cases(name, lanes, rng):
    case = CASES[name]
    compare(build(case.source)["k"], *case.args(rng), lanes=lanes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [1024, 1000, 999])
@pytest.mark.parametrize("dtype", ["bf16", "f32", "fp8_e4m3", "int4"])
def test_embeddings_and_their_gradient(dtype, D, rng):
    """Rows of a table by tokens, and a gradient's rows added to them."""
    look = build(f"""@kernel
def k(t: Tensor["V", "D", ts.{dtype}], ids: Tensor["n", i64], y: Tensor["n", "D", ts.{dtype}]):
    for c in range(0, D, 256):
        y[tile_n:tile_n+16, c:c+256] = tile.gather(t[:, c:c+256], ids[tile_n:tile_n+16])
""")["k"]
    V, n = 5000, 333
    ids = rng.integers(-3, V + 3, n)
    table = values(rng, (V, D), dtype)
    compare(look, table, ids, values(rng, (n, D), dtype), rtol=0, atol=0)
    if dtype in ("int4", "fp8_e4m3"):
        return
    back = build(f"""@kernel
def k(g: Tensor["n", "D", ts.{dtype}], ids: Tensor["n", i64], t: Tensor["V", "D", ts.{dtype}]):
    for i in range(0, n, 16):
        for c in range(0, D, 256):
            tile.scatter(t[:, c:c+256], ids[i:i+16], tile.load(g[i:i+16, c:c+256]), mode="add")
""")["k"]
    few = rng.integers(-1, 40, n)  # many meet; whole numbers below 256 * 7 are exact in bf16 sums
    zeros = np.zeros((40, D), np.float32) if dtype == "f32" else ts.zeros((40, D), dtype)
    compare(back, values(rng, (n, D), dtype), few, zeros, rtol=0, atol=0)


@pytest.mark.parametrize("aligned", [True, False])
def test_tables_that_start_anywhere(aligned, rng):
    """Without the fact of alignment each element is an access of its own."""
    k = build(CASES["rows_wide"].source)["k"]
    args = CASES["rows_wide"].args(rng)
    facts = None if aligned else ArgumentFacts()
    compare(k, *args, lanes=128, facts=facts, rtol=0, atol=0)


def test_order_within_a_group(rng):
    """What one iteration scatters the next one gathers, by other threads."""
    k = build("""@kernel
def k(ids: Tensor["m", i32], y: Tensor["n", f32]):
    for i in range(0, m, 64):
        at = tile.load(ids[i:i+64])
        tile.scatter(y, at, tile.gather(y, at) * 0.5 + 1.0)
""")["k"]
    ids = np.concatenate([rng.permutation(64) for _ in range(20)]).astype(np.int32)
    compare(k, ids, rng.standard_normal(64).astype(np.float32), lanes=128)
