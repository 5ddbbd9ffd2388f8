"""Ops that a vendor's library does: on a GPU that pretends, with a CuPy that is NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import CASES, Draws, outputs
from fake_driver import driver as driver
from fake_gpu import fake_cupy
from fake_gpu import gpu as gpu
from tessera.graph.cuda import CudaProgram
from tessera.graph.op import GraphOp, Sample
from tolerance import assert_close

LIBRARY_CASES = [p for p in CASES if p.values[0].library is not None]


@pytest.mark.parametrize(("op", "s"), LIBRARY_CASES)
def test_what_is_called_in_cupy_is_what_the_op_means(op: GraphOp, s: Sample, gpu: Any,
                                                     rng: Any) -> None:
    assert op.library is not None
    xs = [Draws(rng)(a).array for a in s.args]
    want = outputs(op, op.ref(*xs, **s.attrs))
    made = outputs(op, op.library.run(fake_cupy(), *xs, **s.attrs))
    assert len(made) == len(want)
    for y, w in zip(made, want, strict=True):
        assert y.shape == w.shape
        assert_close(np.asarray(y).astype(w.dtype), w, "f32", n=64)


@pytest.mark.parametrize(("name", "fn", "text"), [
    ("triangular_solve", lambda x: ts.triangular_solve(x, x), "its diagonal holds a 0"),
    ("eig", lambda x: ts.eig(x / x)[0].real, "holds a NaN"),
])
def test_what_has_no_result_names_the_op_and_the_line(name: str, fn: Any, text: str,
                                                      gpu: Any) -> None:
    with pytest.raises(ts.NumericsError, match=f"{name}: .*{text}") as info:
        ts.jit(fn)(ts.to(ts.zeros((6, 6)), "cuda"))
    assert "test_library_steps.py" in str(info.value.where)


def test_the_schedule_names_the_library() -> None:
    x = ts.zeros((6, 6))
    graph = ts.jit(lambda x: (ts.lu(x)[1], ts.dct(x), ts.triangular_solve(x, x))).graph(x)
    text = "\n".join(line.text for line in CudaProgram(graph, "sm_90a").plan.lines())
    assert all(f"{name} through CuPy" in text for name in ("cuSOLVER", "cuFFT", "cuBLAS"))
