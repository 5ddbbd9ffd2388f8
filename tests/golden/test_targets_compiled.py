"""What a target cannot do: replaced where that is possible, else an error at the user's line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera.errors import UnsupportedTargetError
from tessera.runtime.generations import GENERATIONS
from tessera.runtime.target import parse_target
from tessera.tile.cuda.build import build
from tile_gpu import compiled

require_compiler()


@ts.kernel
def halves(x: ts.Tensor["N", ts.bf16], y: ts.Tensor["N", ts.f16], z: ts.Tensor["N", ts.f32]):
    for i in ts.tile.range(0, N, 1024):
        t = ts.tile.maximum(ts.tile.load(z[i:i + 1024]), 0.0)
        x[i:i + 1024] = t
        y[i:i + 1024] = t


@ts.kernel
def large(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.local_id()
    held = ts.tile.alloc_shared((226, 256), ts.f32)
    held[i, 0] = x[i]
    ts.tile.barrier()
    x[i] = held[0, 0]


@pytest.mark.parametrize("target", list(GENERATIONS))
def test_numbers_of_16_bits_on_every_target(target):
    n = 2048
    made = compiled(halves, np.zeros(n, ml_dtypes.bfloat16), np.zeros(n, np.float16),
                    np.zeros(n, np.float32), target=target)
    assert not made.built.resources.spills
    assert ("cvt.rn.bf16x2" in made.built.ptx) == (target != "sm_75")


@pytest.mark.parametrize("target, most", [("sm_75", 65536), ("sm_80", 166912), ("sm_87", 166912),
                                          ("sm_120", 101376)])
def test_too_much_shared_memory(target, most):
    with pytest.raises(UnsupportedTargetError) as error:
        compiled(large, np.zeros(128, np.float32), target=target)
    assert error.value.message == (f"large needs 231424 bytes of shared memory, a group has {most} "
                                   f"on {target}: held 226x256 f32")
    assert "held = ts.tile.alloc_shared" in str(error.value) and "smaller" in error.value.hint


def test_an_instruction_that_nothing_stands_for():
    source = ("from tessera.tile.cuda import use\nadd = use('add_bf16x2')\n\n"
              "def k(x):\n    add(x, x)\n")
    with pytest.raises(UnsupportedTargetError, match="k: the instruction add.rn.bf16x2 needs "
                                                     "sm_90, the kernel is compiled for sm_80"):
        build(source, "k", ("i32",), parse_target("sm_80"), threads=32)
