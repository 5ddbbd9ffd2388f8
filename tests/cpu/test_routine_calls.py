"""A routine's call like one before does what that did, without the routine's function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import stdlib
from tessera.kernels.routine import Routine
from tessera.tile.kernel.kernel import Kernel
from tolerance import assert_close


@pytest.fixture
def gemm() -> Routine:
    """One whose kernels have not been called."""
    kernels = {n: Kernel(k.fn, grid=k.grid) for n, k in stdlib.gemm.kernels.items()}
    return Routine(stdlib.gemm.fn, kernels, stdlib.gemm.record)


def operands(rng: Any, *shapes: tuple[int, int]) -> list[Torch]:
    return [Torch(rng.standard_normal(s).astype(np.float16)) for s in shapes]


def product(a: Torch, b: Torch) -> np.ndarray:
    return a.x.astype("f8") @ b.x.astype("f8")


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("the function is asked again")


@pytest.mark.parametrize("shapes, launches", [
    (((72, 200), (200, 80)), ["gemm_whole"]), (((72, 6000), (6000, 80)), ["gemm_parts",
                                                                          "sum_of_parts"])],
    ids=["whole", "parts"])
def test_the_second_call_launches_the_same(gemm, gpu, rng, shapes, launches):
    gemm(*operands(rng, *shapes))
    first, notes = list(gpu.launched), gemm.schedule.notes
    assert first == launches
    gemm.fn = forbidden
    for _ in range(2):
        a, b = operands(rng, *shapes)
        got = gemm(a, b)
        assert isinstance(got, Torch)
        assert_close(got.x, product(a, b), "f16", n=shapes[0][1])
    assert gpu.launched == 3 * first and gemm.schedule.notes == notes


def test_other_arguments_are_another_call(gemm, gpu, rng):
    a, b = operands(rng, (64, 64), (64, 64))
    gemm(a, b)
    gemm.fn = forbidden
    for change in (lambda: gemm(a, b, transpose_b=True), lambda: gemm(*operands(
            rng, (64, 128), (128, 64))), lambda: gemm(Torch(a.x, -1), Torch(b.x, -1))):
        with pytest.raises(AssertionError, match="asked again"):
            change()
    assert_close(gemm(b, a).x, product(b, a), "f16", n=64)


def test_numbers_and_host_arrays_are_not_written_down(gpu, rng):
    x = rng.standard_normal((2, 40, 16)).astype(np.float32)
    rotary, softmax = stdlib.rotary_embedding, stdlib.stable_softmax
    before = len(rotary.calls._calls), len(softmax.calls._calls)
    rotary(Torch(x), start=3)
    softmax(x[0])
    assert (len(rotary.calls._calls), len(softmax.calls._calls)) == before
    softmax(Torch(x[0]))
    assert len(softmax.calls._calls) == before[1] + 1


def test_a_traced_call_is_a_node(gemm, gpu, rng):
    a, b = ts.to([ts.tensor(rng.standard_normal((64, 64)).astype("f4"), "f16") for _ in "ab"],
                 "cuda")
    gemm(a, b)
    assert len(gemm.calls._calls) == 1
    launched = len(gpu.launched)
    ops = [n.op.name for n in ts.jit(lambda a, b: gemm(a, b)).graph(a, b).nodes]
    assert ops == ["custom_rules_call"]
    assert len(gpu.launched) == launched
