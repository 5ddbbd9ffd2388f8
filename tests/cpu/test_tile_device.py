"""Kernels on a GPU without a GPU: a fake one runs the interpreter on the launch parameters."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from device_kernels import CAPTURING, double, floats, fresh, long_ways, rows_doubled
from fake_gpu import Cupy, Foreign, Parameter, Torch, aligned, memory
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from kernels import seeds
from tessera import config
from tessera.runtime import device as devices
from tessera.runtime import tensormap
from tessera.tile.kernel import kernel as kernel_module
from tessera.tile.tuning.gpus import DEFAULT, gpu_of
from tolerance import assert_close


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
                                        ("persistent-200", 1), ("persistent-0--2", 264)])
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


# --- where it runs -----------------------------------------------------------------------------


def test_arrays_in_several_places(gpu, driver, rng):
    kernel = fresh(seeds.saxpy)
    x, y = floats(rng, 8), floats(rng, 8)
    with pytest.raises(ts.ArgumentError) as info:
        kernel(Torch(x), y, 1.0)
    assert "x lies on cuda:0, y lies in host memory" in info.value.message
    assert "the device that is set" not in info.value.hint
    with ts.device("cuda"), pytest.raises(ts.ArgumentError) as info:
        kernel(Torch(x), y, 1.0)
    assert "only where all of a kernel's arrays lie on the host" in info.value.hint
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
