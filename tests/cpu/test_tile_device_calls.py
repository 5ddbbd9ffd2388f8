"""Kernels called again on a GPU that is not there: what is checked anew, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from counting import python_calls
from device_kernels import double, floats, fresh, long_ways, rows_doubled
from fake_gpu import Cupy, Foreign, Torch, aligned
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from kernels import seeds
from tessera import config
from tessera.tile.passes.written_arguments import written_parameters

# --- the same call again -----------------------------------------------------------------------


def test_equal_facts_take_the_short_way(gpu, monkeypatch, rng):
    kernel = fresh(seeds.saxpy)
    counted = long_ways(kernel, monkeypatch)

    def run(n, offset=0, alpha=2.0, cls=Torch):
        x, y = floats(rng, n, offset=offset), floats(rng, n, offset=offset)
        want = np.float32(alpha) * x + y
        kernel(cls(x), cls(y), alpha)
        np.testing.assert_array_equal(y, want)
        return len(counted)

    assert [run(160), run(160), run(160, alpha=3.5)] == [1, 1, 1]
    assert [run(161), run(161), run(160)] == [2, 2, 2]  # another shape
    assert [run(160, 1), run(160, 1)] == [3, 3]  # another alignment
    assert [run(160, cls=Cupy), run(160, cls=Cupy)] == [4, 4]  # another library
    assert [run(160, alpha=2), run(160, alpha=7)] == [5, 5]  # another class of number
    with config.scope(debug=True):
        assert [run(160), run(160)] == [6, 6]
    assert run(160) == 6
    facts = [(set(r.divisible), set(r.aligned), r.checked) for r in gpu.requests]
    assert facts == [({"n"}, {"x", "y"}, False), (set(), {"x", "y"}, False), ({"n"}, set(), False),
                     ({"n"}, {"x", "y"}, True)]


FACTOR = 2.0


@ts.kernel
def by_a_global(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = FACTOR * x[i]


def test_the_short_way_sees_a_changed_global(gpu, monkeypatch, rng):
    kernel = fresh(by_a_global)
    counted = long_ways(kernel, monkeypatch)
    for factor, ways in ((2.0, 1), (2.0, 1), (3.0, 2), (3.0, 2), (2.0, 3)):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        for call in (kernel, kernel[1]):
            x = floats(rng, 100)
            want = np.float32(factor) * x
            call(Torch(x))
            np.testing.assert_array_equal(x, want)
        assert len(counted) == 2 * ways  # once for each form of the launch


@pytest.mark.row("KERN-03", "KERN-05")
def test_wrong_arguments_are_refused_each_time(gpu, driver, rng):
    kernel = fresh(seeds.saxpy)
    x, y = Torch(floats(rng, 100)), Torch(floats(rng, 100))
    strided = Torch(floats(rng, 200)[::2])
    wrong = [
        ((x, Torch(floats(rng, 99)), 1.0), ts.ShapeError, r"y: axis 0 \(n\) is 99, but x axis 0"),
        ((x, Torch(floats(rng, 10, 10)), 1.0), ts.ShapeError, "argument y has 2 axes"),
        ((x, Torch(aligned((100,), np.float64)), 1.0), ts.DTypeError, "argument y is f64"),
        ((x, strided, 1.0), ts.ArgumentError, r"argument y has shape \(100,\) and strides \(2,\)"),
        ((x, y, "2"), ts.DTypeError, "argument alpha must be a number"),
        ((x, y), ts.ArgumentError, "missing a required argument: 'alpha'"),
        ((x, Torch(aligned((401,), np.uint8)[1:].view(np.float32)), 1.0), ts.ArgumentError,
         "which is not aligned to its elements of 4 bytes"),
    ]
    for _ in range(2):
        for args, error, says in wrong:
            with pytest.raises(error, match=says):
                kernel(*args)
        kernel(x, y, 1.0)
    assert len(driver.launches) == 2
    with pytest.raises(ts.ArgumentError) as info:
        kernel(x, strided, 1.0)
    assert "x.contiguous()" in info.value.hint


def test_an_axis_of_one_may_have_any_stride(gpu, rng):
    x = np.lib.stride_tricks.as_strided(floats(rng, 64), (1, 64), (12, 4))
    np.testing.assert_array_equal(fresh(rows_doubled)(Cupy(x)).x, 2 * x)


def test_read_only_arrays_are_not_written(gpu):
    class ReadOnly(Foreign):
        @property
        def __cuda_array_interface__(self):
            facts = super().__cuda_array_interface__
            return facts | {"data": (facts["data"][0], True)}

    x, y = aligned((8,), np.float32), aligned((8,), np.float32)
    kernel = fresh(seeds.saxpy)
    assert kernel(ReadOnly(x), Foreign(y), 1.0) is not None
    for _ in range(2):
        with pytest.raises(ts.ArgumentError, match="saxpy: argument y is read-only"):
            kernel(Foreign(x), ReadOnly(y), 1.0)


def test_what_a_kernel_writes():
    @ts.kernel
    def writes(a: ts.Tensor["M", "N", ts.f32], b: ts.Tensor["M", "N", ts.f32],
               c: ts.Tensor["N", ts.f32], d: ts.Tensor["N", ts.f32]):
        t = ts.tile.load(a[0:16, 0:16])
        b[0:16, 0:16] = t
        ts.tile.atomic_add(c, 0, d[0])

    x, v = np.zeros((16, 16), np.float32), np.zeros(16, np.float32)
    assert written_parameters(writes.lower(x, x, v, v)) == {"b", "c"}
    assert written_parameters(double.lower(v)) == {"x"}


# --- host time ---------------------------------------------------------------------------------


def test_a_repeated_call_runs_little_python(gpu, driver, monkeypatch, rng):
    """A GPU test has the time. Binding anew makes hundreds of calls."""
    @ts.kernel
    def three(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32], z: ts.Tensor["N", ts.f32],
              a: ts.f32):
        i = ts.tile.linear_id()
        if i < N:
            z[i] = a * x[i] + y[i]

    x, y, z = (Torch(floats(rng, 256)) for _ in range(3))
    monkeypatch.setattr(driver, "launch", lambda *_: 0)
    three(x, y, z, 2.0)
    calls = python_calls(lambda: three(x, y, z, 2.0))
    print(f"a call with 3 arrays makes {calls} calls of Python, without the driver's")
    assert calls <= 80
