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


@pytest.mark.parametrize("n", [2, 40])  # in a kernel of ours, and in the library
@pytest.mark.parametrize(("fn", "code"), [
    (ts.cholesky, "E_NOT_POSITIVE"), (ts.inv, "E_SINGULAR"),
    (lambda x: ts.solve(x, x), "E_SINGULAR")], ids=["cholesky", "inv", "solve"])
def test_a_matrix_without_a_result_is_the_error_of_the_cpu(fn: Any, code: str, n: int,
                                                           gpu: Any) -> None:
    """A program that catches it, to add to the diagonal, does so on every device. The kernel's was
    an AssertionError at a line of its text."""
    x, f = ts.zeros((n, n)), ts.jit(lambda x: fn(x))
    with pytest.raises(ts.NumericsError) as known:
        f(x)
    with pytest.raises(ts.NumericsError) as info:
        f(ts.to(x, "cuda")).numpy()
    assert info.value.code == known.value.code == code
    assert (info.value.message, info.value.hint) == (known.value.message, known.value.hint)
    assert str(info.value.where) == str(known.value.where)


def test_the_schedule_names_the_library() -> None:
    x = ts.zeros((6, 6))
    graph = ts.jit(lambda x: (ts.lu(x)[1], ts.dct(x), ts.triangular_solve(x, x))).graph(x)
    text = "\n".join(line.text for line in CudaProgram(graph, "sm_90a").plan.lines())
    assert all(f"{name} through CuPy" in text for name in ("cuSOLVER", "cuFFT", "cuBLAS"))
