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
