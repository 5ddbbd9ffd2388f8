"""Steps of decoding over pages of a pool on a GPU, against f64; replayed, and in the pool's own
memory."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_paged_batch import checked
from gpu_harness import require_gpu

require_gpu()


def decoded(rng, D, S, page, window, heads=2, pages=200, count=5):
    """Steps of S entries each for sequences of several lengths, checked; the schedule of a step."""
    lengths = (700, 3, 129, 0)

    @ts.jit(donate="batch")
    def step(q, k, v, batch):
        batch = batch.append(k, v)
        return ts.flash_attention(q, batch, window=window), batch

    def numbers(*shape):
        return ts.tensor(rng.standard_normal(shape).astype(np.float32), "bf16")

    with ts.device("cuda"):
        manager = ts.KVCacheManager(heads=heads, head_size=D, pages=pages, page_size=page,
                                    dtype="bf16")
        sequences, entries = [manager.alloc() for _ in lengths], []
        for s, n in zip(sequences, lengths, strict=True):
            k, v = numbers(heads, n, D), numbers(heads, n, D)
            s.append(k.to("cuda"), v.to("cuda"))
            entries.append((k.numpy(), v.numpy()))
        batch = manager.batch(sequences, room=S)
        for i in range(count):
            q, k, v = (numbers(4, h, S, D) for h in (4 * heads, heads, heads))
            entries = [(np.concatenate([a, x], 1), np.concatenate([b, y], 1)) for (a, b), x, y in
                       zip(entries, k.numpy(), v.numpy(), strict=True)]
            there = [x.to("cuda") for x in (q, k, v)]
            if i == 1:
                batch = batch.append(*there[1:])
                y = ts.flash_attention(there[0], batch, window=window)
            else:
                y, made = step(*there, batch)
                batch = batch.keep(made)
            checked(y.numpy(), q.numpy(), entries, True, "bf16", window)
    assert [s.length for s in sequences] == [n + count * S for n in lengths]
    return step.inspect_ir("schedule")


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("S, page, window", [(1, 64, None), (1, 16, 100), (4, 256, None),
                                             (40, 32, None), (1, 10, None)])
def test_steps(S, page, window, D, rng):
    decoded(rng, D, S, page, window)


@pytest.mark.parametrize("D, S, page, window, heads", [
    (64, 8, 128, 300, 2), (128, 6, 64, None, 2), (128, 1, 64, None, 32)])
def test_steps_by_warpgroups(D, S, page, window, heads, rng):
    """More rows than a warp multiplies, and one query of more heads than there are
    multiprocessors to split their keys."""
    plan = decoded(rng, D, S, page, window, heads, pages=24, count=4)
    assert "call decode_many_pages" in plan and "call decode_pages" not in plan
