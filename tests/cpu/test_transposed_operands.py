"""A computed first operand of wgmma lies in registers as the instruction takes it, however its
transpose is spelled."""

from __future__ import annotations

import numpy as np
import pytest

from hopper_lowering import Known, distance, program, run
from tessera import bf16
from tessera.tile.cuda.lower.warp_specialised import machine
from tessera.tile.cuda.lower.warp_specialised.machine import PipelineError
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in
from tessera.tile.ir.register_layout import warpgroup_columns
from transposed_kernels import SPELLINGS, spelled

FACTS = Known(divisible=frozenset("DE"), aligned=frozenset("ABCQKVG"))


@pytest.mark.parametrize("S", [128, 100])  # 100: rows beyond the end are masked
@pytest.mark.parametrize("how", SPELLINGS)
def test_every_spelling_of_a_transpose(how, S, rng):
    a, k, b = (rng.standard_normal(s).astype(bf16.numpy) for s in ((S, 64), (128, 64), (S, 64)))
    c = np.zeros((128, 64), np.float32)
    kernel = spelled(how)
    made = program(kernel, a, k, b, c, facts=FACTS)
    assert ops_in(made.function.body, "convert_layout")
    run(kernel, made, (2,), a, k, b, c)
    x = np.asarray(k, np.float64) @ np.asarray(a, np.float64).T
    x = np.maximum(x, 0) if how == "masked" else x
    assert distance(c, x @ np.asarray(b, np.float64)) < 6e-3


def test_registers_that_lie_otherwise_are_an_error(rng, monkeypatch):
    """Of an instruction that wants columns where the compiler placed rows."""
    a, k, b = (rng.standard_normal(s).astype(bf16.numpy) for s in ((64, 64), (64, 64), (64, 64)))
    kernel = spelled("rounded")
    made = program(kernel, a, k, b, np.zeros((64, 64), np.float32), facts=FACTS)
    monkeypatch.setattr(machine, "fragments", lambda op, shape, n: warpgroup_columns(shape, n))
    with pytest.raises(PipelineError, match=r"async_matmul takes f32\[64, 64\] as .* lies as"):
        run(kernel, made, (1,), a, k, b, np.zeros((64, 64), np.float32))
