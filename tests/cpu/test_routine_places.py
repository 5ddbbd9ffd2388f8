"""A routine of the library in a trace chooses for the GPU on which the trace will run."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import stdlib
from tessera.kernels import attention

WAYS = {
    "jit": lambda f: ts.jit(f),
    "jit of a part": lambda f: ts.jit(lambda q: ts.jit(f)(q)),
    "host arrays": lambda f: (lambda q: ts.jit(f, target="cuda")(q.cpu())),
    "grad": lambda f: ts.grad(lambda q: ts.sum(ts.cast(f(q), "f32"))),
    "jit of a gradient": lambda f: ts.jit(ts.grad(lambda q: ts.sum(ts.cast(f(q), "f32")))),
}


def attend(q):
    return stdlib.flash_attention_2(q, q, q)


@pytest.fixture
def chosen(monkeypatch):
    """Whether the chip was known, and the block, of each choice."""
    found, choose = [], attention.attention_block

    def block(dtype, S, width, causal, chip, **rule):
        found.append((chip is not None, choose(dtype, S, width, causal, chip, **rule)))
        return found[-1][1]

    monkeypatch.setattr(attention, "attention_block", block)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_those_of_a_call_alone(gpu, rng, chosen, way):
    q = ts.tensor(rng.standard_normal((1, 1, 512, 64)).astype(np.float32), "bf16").to("cuda")
    stdlib.flash_attention_2.launches(q, q, q)
    alone = chosen[-1]
    assert alone == (True, (192, 128))  # on a host it is (128, 128)
    del chosen[:]
    WAYS[way](attend)(q)
    assert chosen and set(chosen) == {alone}


def test_on_a_host_no_chip_is_known(rng, chosen):
    q = ts.tensor(rng.standard_normal((1, 1, 512, 64)).astype(np.float32), "bf16")
    ts.jit(attend)(q)
    assert chosen and set(chosen) == {(False, (128, 128))}


@pytest.mark.parametrize("call", [
    lambda x: stdlib.stable_softmax(x), lambda x: stdlib.rotary_embedding(x),
    lambda x: stdlib.efficient_layernorm(x, x[0], x[1])], ids=["softmax", "rotary", "layernorm"])
def test_results_are_not_filled_before(call):
    """Rows in several parts, of which the kernel's text does not tell that they are all of it."""
    x = ts.tensor(np.zeros((512, 4096), np.float32), "bf16")
    plan = str(ts.jit(call).schedule(x, target="sm_90a"))
    size = x.size * 2
    assert f"writes {size / 1e6:.3g} MB" in plan and "launches: 1:" in plan, plan
    reads = float(plan.partition("reads ")[2].partition(" MB")[0]) * 1e6
    assert reads <= 1.6 * size, plan  # and angles, in f32


def test_what_a_routine_writes_in_parts_is_whole(rng):
    """One key and value array for many queries: parts, and then their sums."""
    q, k, v = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
               for s in ((1, 8, 1, 64), (1, 1, 2048, 64), (1, 1, 2048, 64)))
    want = stdlib.flash_attention_2(q, k, v)
    assert np.array_equal(ts.jit(stdlib.flash_attention_2)(q, k, v).numpy(), want.numpy())
