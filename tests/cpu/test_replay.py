"""ts.debug.replay: the op or kernel of a report runs again from what it was given."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, f32

tile = ts.tile


pytestmark = pytest.mark.usefixtures("no_findings")


@ts.kernel
def roots(x: Tensor["N", f32], y: Tensor["N", f32]):
    t = tile.load(x[0:16])
    x[0:16] = t + 1.0
    y[0:16] = tile.sqrt(t - 3.0)


def spoiled():
    x = np.full(16, 4.0, np.float32)
    x[5] = 2.0
    return x


@pytest.mark.parametrize("mode", ["flag", "raise"])
def test_an_op_of_a_compiled_function(mode):
    f = ts.jit(lambda x: ts.sum(ts.log(x * 2.0)))
    x = ts.tensor(-spoiled())
    with ts.debug.numerics(mode):
        if mode == "raise":
            with pytest.raises(ts.NumericsError) as e:
                f(x)
            report = e.value
        else:
            f(x)
            report = ts.debug.flags()
    again = ts.debug.replay(report)
    assert again.name == "log" and not ts.debug.flags()
    np.testing.assert_array_equal(again.inputs["operand 0"].numpy(), x.numpy() * 2)
    assert np.isnan(again.results["result 0"].numpy()).all()


def test_inputs_are_those_of_then():
    x = ts.tensor(np.array([1.0, -1.0], np.float32))
    with ts.debug.numerics("flag"):
        ts.log(x)
        found = ts.debug.flags()
    x[1] = 5.0
    for _ in range(2):
        again = ts.debug.replay(found.first)
        np.testing.assert_array_equal(again.inputs["operand 0"].numpy(), [1.0, -1.0])
        assert np.isnan(again.results["result 0"].numpy()).tolist() == [False, True]


def test_a_kernel_and_what_it_wrote_over():
    x, y = spoiled(), np.zeros(16, np.float32)
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as e:
        roots(x, y)
    assert (x == spoiled() + 1).all()
    for _ in range(2):
        again = ts.debug.replay(e.value)
        assert again.name == "kernel roots" and list(again.results) == ["x", "y"]
        np.testing.assert_array_equal(again.inputs["x"].numpy(), spoiled())
        np.testing.assert_array_equal(again.results["x"].numpy(), spoiled() + 1)
        assert np.isnan(again.results["y"].numpy()).nonzero()[0].tolist() == [5]
    assert (x == spoiled() + 1).all() and "kernel roots\n  x: f32[16]" in str(again)


def test_a_kernel_on_a_gpu(gpu):
    kernel = ts.kernel(roots.fn)
    x, y = filled(spoiled()), filled(np.zeros(16, np.float32))
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as e:
        kernel[1](Torch(x), Torch(y))
    again = ts.debug.replay(e.value)
    np.testing.assert_array_equal(again.inputs["x"].numpy(), spoiled())
    assert np.isnan(again.results["y"].numpy()).nonzero()[0].tolist() == [5]
    x[:] = spoiled()
    with ts.debug.numerics("flag"):
        kernel[1](Torch(x), Torch(y))
        found = ts.debug.flags()
    with pytest.raises(ts.ArgumentError, match="no inputs of kernel roots were kept"):
        ts.debug.replay(found)


def test_what_is_no_report_is_refused():
    with pytest.raises(ts.ArgumentError, match="no finding to run again"):
        ts.debug.replay(ts.debug.flags())
    with pytest.raises(ts.ArgumentError, match="no finding to run again"):
        ts.debug.replay(ts.NumericsError("by hand"))
