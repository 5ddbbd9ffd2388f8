"""Kernels on a GPU without a GPU: a fake one runs the interpreter on the launch parameters."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import tessera as ts
from counting import python_calls
from fake_gpu import Cupy, Foreign, Parameter, Torch, aligned, filled, memory
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from kernels import seeds
from tessera import config
from tessera.runtime import device as devices
from tessera.runtime import flags, tensormap
from tessera.runtime.flags import ReportSite
from tessera.tile.ir.errors import BoundsError, KernelAssertionError
from tessera.tile.kernel import kernel as kernel_module
from tessera.tile.passes.written_arguments import written_parameters
from tessera.tile.tuning.gpus import DEFAULT, gpu_of
from tolerance import assert_close

CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def fresh(kernel):
    """The same kernel, never called."""
    return ts.kernel(kernel.fn)


def floats(rng, *shape, offset=0):
    return filled(rng.standard_normal(shape).astype(np.float32), offset)


@ts.kernel
def double(x: ts.Tensor["N", ts.f32]) -> ts.Tensor["N", ts.f32]:
    i = ts.tile.linear_id()
    if i < N:
        x[i] = 2.0 * x[i]
    return x


@ts.kernel
def rows_doubled(x: ts.Tensor["M", "N", ts.f32]) -> ts.Tensor["M", "N", ts.f32]:
    for row in ts.tile.range(0, M, 1):
        y = 2.0 * ts.tile.load(x[row:row + 1, 0:64])
    return y


@ts.kernel
def scaled(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32], k: ts.i32 = 3, *,
           negate: bool = False):
    i = ts.tile.linear_id()
    if i < N:
        if negate:
            y[i] = -k * x[i]
        else:
            y[i] = k * x[i]


# --- arrays in, arrays out ---------------------------------------------------------------------


@pytest.mark.row("KERN-01", "KERN-08", "EX-30")
@pytest.mark.parametrize("library", [Torch, Cupy, Foreign])
@pytest.mark.parametrize("n", [1, 127, 1000])
def test_saxpy(gpu, driver, rng, library, n):
    x, y = floats(rng, n), floats(rng, n)
    want = np.float32(2) * x + y
    a, b = library(x), library(y)
    saxpy = fresh(seeds.saxpy)
    assert saxpy(a, b, 2) is b
    np.testing.assert_array_equal(y, want)
    assert saxpy(a, b, alpha=0.5) is b
    np.testing.assert_array_equal(y, np.float32(0.5) * x + want)
    assert len(driver.launches) == 2 and len(gpu.requests) == 1
    assert driver.launches[0].grid == (-(-n // 128), 1, 1)


@pytest.mark.row("KERN-09", "EX-12")
@pytest.mark.parametrize("n", [1, 128, 1000])
def test_a_number_is_read_back(gpu, driver, monkeypatch, rng, n):
    x = floats(rng, n)
    total = fresh(seeds.cooperative_reduction)
    for _ in range(2):
        got = total(Torch(x))
        assert type(got) is float
        assert_close(np.float32(got), x.astype(np.float64).sum(), dtype="f32", n=n, scale=n**0.5)
        monkeypatch.setattr(driver, "cuMemHostAlloc", lambda *a: pytest.fail("again"))


@pytest.mark.row("KERN-10")
@pytest.mark.parametrize("library", [Torch, Cupy])
@pytest.mark.parametrize("rows", [1, 5])
def test_results_are_of_the_arguments_library(gpu, rng, library, rows):
    x, kernel = floats(rng, rows, 64), fresh(rows_doubled)
    for _ in range(2):
        got = kernel(library(x))
        assert type(got) is library and got.dtype == library(x).dtype
        np.testing.assert_array_equal(got.x, 2 * x)


def test_a_result_for_a_library_we_do_not_know(gpu, rng):
    x = floats(rng, 3, 64)
    got = fresh(rows_doubled)(Foreign(x))
    np.testing.assert_array_equal(got.numpy(), 2 * x)
    facts = got.__cuda_array_interface__
    assert facts["shape"] == (3, 64) and facts["typestr"] == "<f4"
    np.testing.assert_array_equal(memory(facts["data"][0], (3, 64), np.float32), 2 * x)


def test_no_elements(gpu, driver):
    x = aligned((0,), np.float32)
    a = Torch(x)
    kernel = fresh(double)
    assert kernel(a) is a and kernel(a) is a
    assert not driver.launches


# --- parameters --------------------------------------------------------------------------------


@ts.kernel
def numbers(out: ts.Tensor[8, ts.f64], a: ts.f32, b: ts.f64, c: ts.int8, d: ts.uint32,
            e: ts.int64, f: ts.bool_, g: ts.uint64):
    out[0] = a
    out[1] = b
    out[2] = c
    out[3] = d
    out[4] = e
    out[5] = f
    out[6] = g


@pytest.mark.row("KERN-06")
@pytest.mark.parametrize("values", [
    (0.1, 0.1, -3, 7, 2**40, True, 5), (2, 3, 4, 2**32 - 1, -(2**62), False, 2**63),
    (np.float32(0.5), np.float64(1e300), np.int8(5), np.uint32(2**31), np.int64(-1), np.True_, 0)])
def test_numbers_of_every_type(gpu, monkeypatch, values):
    out, kernel = aligned((8,), np.float64), fresh(numbers)
    counted = long_ways(kernel, monkeypatch)
    for _ in range(2):  # the first time through the checks, then straight into the parameters
        out[...] = np.nan
        kernel(Torch(out), *values)
        want = [float(np.float32(values[0])), *map(float, values[1:])]
        np.testing.assert_array_equal(out[:7], want)
    assert len(counted) == 1


def test_a_number_too_large_for_its_type_is_infinite(gpu):
    out, kernel = aligned((8,), np.float64), fresh(numbers)
    for huge in (1.0, 1e300):
        kernel(Torch(out), huge, 0.0, 0, 0, 0, False, 0)
    assert out[0] == np.inf


@pytest.mark.parametrize("values, says", [
    ((0.0, 0.0, 200, 0, 0, False, 0), "argument c: 200 does not fit into int8"),
    ((0.0, 0.0, 0, -1, 0, False, 0), "argument d: -1 does not fit into uint32"),
    ((0.0, 0.0, 0, 0, 2**63, False, 0), "argument e: 9223372036854775808 does not fit")])
def test_numbers_that_do_not_fit(gpu, driver, values, says):
    out, kernel = aligned((8,), np.float64), fresh(numbers)
    kernel(Torch(out), 0.0, 0.0, 0, 0, 0, False, 0)
    for k in (kernel, fresh(numbers)):
        with pytest.raises(ts.DTypeError, match=says):
            k(Torch(out), *values)
    assert len(driver.launches) == 1


@pytest.mark.row("KERN-07", "KERN-21")
def test_defaults_and_constants(gpu, rng):
    x, y, kernel = floats(rng, 50), floats(rng, 50), fresh(scaled)
    a, b = Torch(x), Torch(y)
    for _ in range(2):
        for given, factor in (({}, 3), ({"negate": True}, -3), ({"k": 5}, 5), (
                {"k": 5, "negate": True}, -5), ({"negate": False}, 3)):
            y[...] = np.nan
            assert kernel(a, b, **given) is None
            np.testing.assert_array_equal(y, np.float32(factor) * x)
    assert len(gpu.requests) == 2  # negate, not k


def test_the_grid(gpu, driver, rng):
    @ts.kernel(grid=lambda N, k: (k, N // 50))
    def where(x: ts.Tensor["N", ts.i32], k: ts.i32):
        i = ts.tile.group_id(0) * ts.tile.num_groups(1) + ts.tile.group_id(1)
        if ts.tile.local_id() == 0:
            x[i] = i + 1

    x = aligned((100,), np.int32)
    a = Torch(x)
    for k in (3, 4, 3):
        x[...] = 0
        where(a, k)
        np.testing.assert_array_equal(x[:2 * k + 1], [*range(1, 2 * k + 1), 0])
    assert [launch.grid[0] for launch in driver.launches] == [6, 8, 6]
    where[(5, 2), 64](a, 3)
    where.launch(a, 3, groups=(5, 2), lanes=64)
    assert driver.launches[-1].grid == (10, 1, 1) and driver.launches[-1].threads == 64
    assert len(where.images) == 2  # 128 lanes and 64


@pytest.mark.parametrize("grid, most", [("persistent", 132), ("persistent-24", 108),
                                        ("persistent-200", 1)])
def test_a_persistent_grid_is_as_large_as_the_device(gpu, driver, rng, grid, most):
    gpu.grid = grid
    gpu.extra = (Parameter("groups", "groups", "i32"),)
    for rows, blocks in ((5, min(5, most)), (500, most)):
        fresh(rows_doubled)(Torch(floats(rng, rows, 64)))
        assert driver.launches[-1].grid == (blocks, 1, 1) and gpu.seen["groups"] == rows


def test_a_persistent_grid_has_the_clusters_that_run_at_one_time(gpu, driver, rng):
    """Of four groups a card may run 32 where it has 132 multiprocessors."""
    gpu.grid, gpu.cluster = "persistent-0-0", (4,)
    gpu.extra = (Parameter("groups", "groups", "i32"),)
    for clusters, rows, blocks in ((32, 500, 128), (1000, 500, 132), (32, 60, 60)):
        driver.clusters = clusters
        fresh(rows_doubled)(Torch(floats(rng, rows, 64)))
        assert driver.launches[-1].grid == (blocks, 1, 1) and gpu.seen["groups"] == rows


@pytest.mark.parametrize("axis, blocks", [(0, 12), (1, 10)])
def test_clusters_that_have_a_group_begin_together(gpu, driver, rng, axis, blocks):
    """Of five groups side by side the last has a cluster of two, in which it is alone."""
    gpu.grid, gpu.cluster, driver.clusters = f"persistent-0-{axis}", (2,), 66
    gpu.extra = (Parameter("groups", "groups", "i32"),)

    @ts.kernel(grid=lambda N: (N // 4, 2))
    def twice(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32]):
        n = ts.tile.group_id(0) * 4 + ts.tile.group_id(1) * 2
        y[n:n+2] = ts.tile.load(x[n:n+2]) * 2

    x, y = floats(rng, 20), floats(rng, 20)
    twice(Torch(x), Torch(y))
    np.testing.assert_array_equal(y, 2 * x)
    assert driver.launches[-1].grid == (blocks, 1, 1)


def test_counters_are_zero_and_of_one_stream(gpu, driver, rng, monkeypatch):
    """The first time; from then on what the kernel before left there, since nothing is cleared."""
    monkeypatch.setattr(type(driver), "cuMemsetD8Async", None)
    gpu.extra = (Parameter("counter", "next", "i64"),)
    seen = []

    def count(values):
        at = memory(gpu.seen["next"], (1,), np.int32)
        seen.append(at[0])
        at += 1

    gpu.after = count
    kernels, a = (fresh(double), fresh(double)), Torch(floats(rng, 4))
    places = set()
    for kernel in kernels:
        for stream in (None, 9, None, 9):
            kernel.launch(a, stream=stream)
            places.add(gpu.seen["next"])
    assert seen == 2 * [0, 0, 1, 1] and len(places) == 4
    assert not any((p - q) % 128 for p in places for q in places)


def test_descriptors(gpu, driver, monkeypatch, rng):
    made = []
    monkeypatch.setattr(tensormap, "_stores", {})
    monkeypatch.setattr(tensormap, "_encode", lambda array, *rest: made.append(
        (array.pointer, array.shape, *rest)) or bytes(128))
    gpu.extra = (Parameter("map", "x", "i64", box=(8, 32)), Parameter("map", "y", "i64",
                                                                      box=(4, 4)))

    @ts.kernel
    def copied(x: ts.Tensor["M", "N", ts.f32], y: ts.Tensor["M", "N", ts.f32]):
        y[0:1, 0:1] = ts.tile.load(x[0:1, 0:1])

    x, y = floats(rng, 16, 64), floats(rng, 16, 64)
    for _ in range(2):
        copied(Torch(x), Torch(y))
    first = gpu.seen
    assert made == [(x.ctypes.data, (16, 64), (8, 32), 128, 128),
                    (y.ctypes.data, (16, 64), (4, 4), 0, 128)]
    copied(Torch(y), Torch(x))
    assert len(made) == 4 and gpu.seen["x"] != first["x"] and y[0, 0] == x[0, 0]
    store = tensormap._stores[0]
    assert not store._pinned
    driver.capturing = CAPTURING
    copied(Torch(x), Torch(y))
    assert len(store._pinned) == 2 and len(made) == 4
    driver.capturing = 0
    x, y = floats(rng, 16, 64), floats(rng, 16, 64)
    for count in (6, 8):
        for _ in range(2):
            copied(Torch(x), Torch(y))
            assert len(made) == count
        store._slots.clear()  # given to other arrays
        store.rewritten += 1


# --- the same call again -----------------------------------------------------------------------


def long_ways(kernel, monkeypatch):
    """How often the kernel was called the long way."""
    counted = []
    real = type(kernel).run
    monkeypatch.setattr(kernel, "run", lambda *a: counted.append(a) or real(kernel, *a),
                        raising=False)
    return counted


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


# --- where it runs -----------------------------------------------------------------------------


def test_arrays_in_several_places(gpu, driver, rng):
    kernel = fresh(seeds.saxpy)
    x, y = floats(rng, 8), floats(rng, 8)
    with pytest.raises(ts.ArgumentError) as info:
        kernel(Torch(x), y, 1.0)
    assert "x lies on cuda:0, y lies in host memory" in info.value.message
    with pytest.raises(ts.ArgumentError, match="x lies on cuda:0, y lies on cuda:1"):
        kernel(Torch(x), Torch(y, 1), 1.0)
    kernel(Torch(x, 1), Torch(y, 1), 1.0)
    assert driver.launches[0].context == devices.device(1).context
    kernel(Torch(x), Torch(y), 1.0)  # the same classes, another device
    assert driver.launches[1].context == devices.device(0).context
    before = y.copy()
    assert kernel(x, y, np.array(1.0)) is y  # the interpreter
    np.testing.assert_array_equal(y, x + before)
    assert len(driver.launches) == 2


def test_the_setting(gpu, driver, rng):
    kernel, x, y = fresh(seeds.saxpy), floats(rng, 300), floats(rng, 300)
    want = np.float32(2) * x + y
    with config.scope(device="cuda"):
        assert kernel(x, y, 2.0) is y
    np.testing.assert_array_equal(y, want)
    assert len(driver.launches) == 1
    kernel(Torch(x), Torch(y), 2.0)
    with config.scope(device="cpu"), pytest.raises(ts.ArgumentError, match="saxpy is to run on "
                                                   "the CPU, but x and y lie on cuda:0"):
        kernel(Torch(x), Torch(y), 2.0)
    with pytest.raises(ts.ArgumentError, match="target='gpu' of a launch"):
        kernel.launch(x, y, 2.0, target="gpu")
    kernel.launch(x, y, 2.0, target="cpu")
    assert len(driver.launches) == 2
    kernel.launch(x, y, 2.0, target="cuda")
    assert len(driver.launches) == 3


def test_host_arrays_go_there_and_back(gpu, driver, rng):
    strided = floats(rng, 50, 2)[:, 0]
    x, want = floats(rng, 50), None
    want = np.float32(2) * x + strided
    kernel = fresh(seeds.saxpy)
    assert kernel.launch(x, strided, 2.0, target="cuda") is strided
    np.testing.assert_array_equal(strided, want)
    a, b = ts.tensor(x.copy()), ts.tensor(x.copy())
    assert kernel.launch(a, b, 3.0, target="cuda") is b
    np.testing.assert_array_equal(b.numpy(), np.float32(3) * x + x)
    rows = fresh(rows_doubled)
    got = rows.launch(x[:48].reshape(1, 48).repeat(2, 1)[:, :64], target="cuda")
    assert type(got) is np.ndarray
    got = rows.launch(ts.tensor(floats(rng, 3, 64)), target="cuda")
    assert type(got) is ts.Tensor and got.shape == (3, 64)
    total = fresh(seeds.cooperative_reduction).launch(x, target="cuda")
    assert_close(np.float32(total), x.astype(np.float64).sum(), dtype="f32", n=50, scale=7.0)
    assert driver.waits >= 5


def test_the_schedule_is_for_the_gpu_that_runs_the_call(gpu, driver, rng, monkeypatch):
    """Also where host arrays are copied there by the launch's own target, or by the setting."""
    x, asked = floats(rng, 3, 64), []
    by_model = kernel_module.propose
    monkeypatch.setattr(kernel_module, "propose", lambda kernel, bound, gpu: asked.append(gpu)
                        or by_model(kernel, bound, gpu))
    here = gpu_of(devices.device())
    assert here != DEFAULT
    fresh(rows_doubled).launch(x, target="cuda")
    with config.scope(device="cuda"):
        fresh(rows_doubled)(x)
    fresh(rows_doubled)(x)
    assert asked == [here, here, DEFAULT]



# --- streams and graphs ------------------------------------------------------------------------


def test_streams(gpu, driver, rng):
    kernel, x = fresh(double), floats(rng, 4)
    for library, stream in ((Torch, 70), (Cupy, 80), (Foreign, 0)):
        for _ in range(2):
            kernel(library(x))
            kernel.launch(library(x), stream=13)
        assert [launch.stream for launch in driver.launches[-4:]] == [stream, 13, stream, 13]
    kernel(Torch(x, 1))
    assert driver.launches[-1].stream == 71


def test_a_result_on_another_stream_is_kept_for_it(gpu, rng):
    kernel = fresh(rows_doubled)
    for _ in range(2):
        assert kernel(Torch(floats(rng, 2, 64))).streams == []
        assert kernel.launch(Torch(floats(rng, 2, 64)), stream=13).streams == [13]


def test_a_repeated_call_neither_waits_nor_allocates(gpu, driver, monkeypatch, rng):
    kernel, rows, x = fresh(double), fresh(rows_doubled), floats(rng, 4)
    kernel(Torch(x)), rows(Torch(floats(rng, 2, 64)))
    before = driver.waits
    driver.capturing = CAPTURING
    for name in ("cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuMemcpyHtoDAsync"):
        monkeypatch.setattr(driver, name, lambda *a: pytest.fail("it allocates"), raising=False)
    kernel(Torch(x)), rows(Torch(floats(rng, 2, 64)))
    assert driver.waits == before and len(driver.launches) == 4


def test_a_number_cannot_be_captured(gpu, driver, rng):
    total, x = fresh(seeds.cooperative_reduction), Torch(floats(rng, 4))
    total(x)
    driver.capturing = CAPTURING
    with pytest.raises(ts.ArgumentError, match="returns a number, which is read back"):
        total(x)
    assert len(driver.launches) == 1


# --- reports -----------------------------------------------------------------------------------

REPORT = (Parameter("claim", "claim", "i64"), Parameter("report", "report", "i64"),
          Parameter("kernel", "kernel", "i32"))


def reporting(gpu, *sites, words=()):
    """The fake kernels fail with the first site: (group, lane, values...)."""
    gpu.sites, gpu.extra = sites, REPORT

    def after(values):
        if words and not memory(gpu.seen["claim"], (1,), np.int32)[0]:
            memory(gpu.seen["claim"], (1,), np.int32)[0] = 1
            report = memory(gpu.seen["report"], (8,), np.int64)
            report[:] = [1, gpu.seen["kernel"], *words, *[0] * (6 - len(words))]

    gpu.after = after


@ts.kernel
def asserted(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    ts.tile.device_assert(x[i] < 0.5, f"x is {x[i]}")  # pytest rewrites `assert`


def site_of(kernel, kind, message, *formats):
    line = next(n.where for n in kernel.lower(np.zeros(128, np.float32)).body
                if n.name in ("device_assert", "load_element"))
    return ReportSite(line, message, kind, formats)


@pytest.mark.row("TILE-60")
def test_asserts_are_those_of_the_interpreter(gpu, driver, rng):
    x = np.zeros(128, np.float32)
    x[7] = 0.7
    with pytest.raises(KernelAssertionError) as wanted:
        asserted(x)
    bits = struct.unpack("<i", struct.pack("<f", 0.7))[0]
    site = site_of(asserted, "assert", "x is {}", "f32")
    reporting(gpu, site, words=(0, 7, bits))
    kernel, a = fresh(asserted), Torch(aligned((128,), np.float32))  # only the fake reports
    kernel(a)  # it fails, and nobody has waited
    with pytest.raises(KernelAssertionError) as found:
        kernel(a)
    assert found.value.message == wanted.value.message
    assert found.value.where.text == wanted.value.where.text
    assert found.value.code == "E_KERNEL_ASSERT"
    assert len(driver.launches) == 1
    kernel(a)
    with pytest.raises(KernelAssertionError):
        devices.device(0).synchronize()
    with config.scope(debug=True), pytest.raises(KernelAssertionError):
        kernel(a)  # at once
    driver.capturing = CAPTURING
    with config.scope(debug=True):
        kernel(a)  # a captured launch is not waited for
    driver.capturing = 0
    with pytest.raises(KernelAssertionError):
        fresh(double)(a)  # the next launch of any kernel


def test_bounds_errors_are_those_of_the_interpreter(gpu, rng):
    with pytest.raises(BoundsError) as wanted:
        asserted[2](np.zeros(200, np.float32))
    message = "index {} is outside of 'x': axis 0 has extent {}"
    reporting(gpu, site_of(asserted, "bounds", message), words=(1, 72, 200, 200))
    with config.scope(debug=True), pytest.raises(BoundsError) as found:
        fresh(asserted)[2](Torch(aligned((200,), np.float32)))
    assert found.value.message == wanted.value.message and found.value.hint == wanted.value.hint
    assert found.value.where.line == wanted.value.where.line


def test_reports_of_the_group_and_of_the_runtime(gpu, rng):
    reporting(gpu, ReportSite(None, "value {1} of {0}", formats=("i64", "f64")), words=(
        3, flags.WHOLE_GROUP, 5, struct.unpack("<q", struct.pack("<d", 2.25))[0]))
    with config.scope(debug=True), pytest.raises(ts.TesseraError) as info:
        fresh(double)(Torch(floats(rng, 4)))
    assert info.value.message == "kernel double, group 3: value 2.25 of 5"


def test_printed_lines(gpu, driver, rng, capsys):
    site = ReportSite(None, "lane {} has {}", "print", ("i64", "f32"))
    gpu.sites = (site,)
    gpu.extra = (Parameter("count", "count", "i64"), Parameter("lines", "lines", "i64"),
                 Parameter("kernel", "kernel", "i32"))

    def after(values):
        lines = memory(gpu.seen["lines"], (flags.LINES, 8), np.int64)
        for at, (group, lane) in enumerate([(1, 0), (0, 3), (0, 2)]):
            bits = struct.unpack("<i", struct.pack("<f", group + 0.5))[0]
            lines[at] = [1, gpu.seen["kernel"], group, lane, lane, bits, 0, 0]
        memory(gpu.seen["count"], (1,), np.int64)[0] = 3

    gpu.after = after
    kernel = fresh(double)
    for _ in range(2):
        kernel(Torch(floats(rng, 4)))
        assert capsys.readouterr().out == "lane 2 has 0.5\nlane 3 has 0.5\nlane 0 has 1.5\n"
    gpu.after = lambda values: after(values) or memory(gpu.seen["count"], (1,), np.int64).fill(2000)
    kernel(Torch(floats(rng, 4)))
    assert capsys.readouterr().out.endswith("\n...\n")


# --- machine code ------------------------------------------------------------------------------


def test_machine_code_comes_from_the_disk(gpu, rng):
    line = seeds.saxpy.source.site(seeds.saxpy.source.tree.body[-1])
    assert line.stop > line.start
    gpu.sites = ((line, "a message", "assert", ("f32",)),)
    first, second = fresh(seeds.saxpy), fresh(seeds.saxpy)
    x, y = floats(rng, 100), floats(rng, 100)
    first(Torch(x), Torch(y), 1.0)
    want = y + np.float32(2) * x
    second(Torch(x), Torch(y), 2.0)
    np.testing.assert_array_equal(y, want)
    (one,), (two,) = first.images.values(), second.images.values()
    assert (one.cached, two.cached) == (False, True) and len(gpu.requests) == 1
    assert one.sites == two.sites and two.sites[0].where.stop == line.stop
    assert one.slots == two.slots and one.resources == two.resources and one.key != two.key
    assert second.compiled[0].notes == ("a note",)  # made again for whoever asks
    assert len(gpu.requests) == 2
    for schedule in (ts.Schedule(warps=2), ts.Schedule(stages=3)):
        ts.kernel(seeds.saxpy.fn, schedule=schedule)(Torch(x), Torch(y), 1.0)
    assert len(gpu.requests) == 4


def test_the_levels_below_tile_ir(gpu, rng):
    kernel = fresh(seeds.saxpy)
    assert kernel.inspect_ir("target") == "# a note\nsource for sm_90a"
    assert gpu.requests[-1].divisible == {"n"} and gpu.requests[-1].aligned == {"x", "y"}
    assert kernel.inspect_ir("target", target="sm_80") == "# a note\nsource for sm_80"
    with pytest.raises(ts.UnsupportedTargetError, match="there is no target 'sm_70'"):
        kernel.inspect_ir("ptx", target="sm_70")
    with pytest.raises(ts.ArgumentError, match="saxpy has not run on a GPU yet"):
        _ = kernel.resources
    kernel(Torch(floats(rng, 99)), Torch(floats(rng, 99)), 1.0)
    count = len(gpu.requests)
    assert kernel.inspect_ir("ptx") == "the ptx" and kernel.inspect_ir("sass") == "the sass"
    assert kernel.resources.registers == 32 and len(kernel.compiled) == 1
    assert len(gpu.requests) == count  # what ran, not compiled again


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
