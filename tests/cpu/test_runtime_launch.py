"""Launching without a GPU: a driver of Python functions that keeps what it is given."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fake_driver import CONTEXT, Driver
from fake_driver import driver as driver
from tessera import config
from tessera.errors import ArgumentError, DeviceError, OutOfMemoryError, UnsupportedTargetError
from tessera.runtime import arrays, buffer, device, libcuda, module, staging, tensormap
from tessera.runtime.module import LoadedKernel
from tessera.runtime.ptxas import Resources
from tessera.runtime.target import Target, parse_target
from tessera.tile.cuda import build as building


def kernel(driver: Driver, *parameters: str, name: str = "k", **options) -> LoadedKernel:
    driver.formats[name.encode()] = "".join(module.FORMATS[p][0] for p in parameters)
    options.setdefault("target", Target(9, 0))
    return LoadedKernel(b"cubin", name, parameters, threads=128, **options)


# --- one launch --------------------------------------------------------------------------------


def test_every_kind_of_parameter_arrives(driver):
    k = kernel(driver, "i64", "i32", "f32", "f64", shared_bytes=1000)
    k.launch((3, 2), (2**40 + 1, -5, 0.1, 0.1), stream=9)
    (one,) = driver.launches
    assert one.grid == (3, 2, 1) and one.threads == 128 and one.shared == 1000 and one.stream == 9
    assert one.values == [2**40 + 1, -5, float(np.float32(0.1)), 0.1]
    assert driver.current == CONTEXT


def test_a_bound_launch_repeats(driver):
    again = kernel(driver, "i64", "i32").bind((4,), (8, 9), stream=2, device=1)
    again()
    again()
    assert [x.values for x in driver.launches] == [[8, 9]] * 2
    assert driver.launches[0].stream == 2 and driver.current == CONTEXT + 1


def test_the_context_of_others_is_left_as_it_was(driver):
    k = kernel(driver, "i32")
    driver.current = CONTEXT  # torch works on device 0
    k.launch((1,), (1,), device=1)
    buffer.DeviceBuffer(16, device.device(1)).write(np.zeros(4, np.int32))
    assert driver.current == CONTEXT and driver.launches[0].context == CONTEXT + 1


def test_a_launch_in_another_context_is_repeated_in_its_own(driver, monkeypatch):
    """Prepared launches too; an explicit stream says itself to which device it belongs."""
    calls, real = [], driver.launch
    monkeypatch.setattr(driver, "launch", lambda *given: calls.append(real(*given)) or calls[-1])
    start = kernel(driver, "i32").prepare((1,), {}, (0,))
    driver.current = 0
    start(0, 5)
    assert calls == [libcuda.INVALID_CONTEXT, 0] and driver.current == CONTEXT
    driver.current = CONTEXT + 1
    start(0, 6)
    assert calls[2:] == [libcuda.INVALID_HANDLE, 0] and driver.current == CONTEXT + 1
    start(9, 7)
    assert calls[4:] == [0]
    assert [(x.context, x.values) for x in driver.launches] == [(CONTEXT, [v]) for v in (5, 6, 7)]


def test_a_handle_that_is_wrong_everywhere_is_an_error(driver):
    k = kernel(driver, "i32")
    k.launch((1,), (1,))
    driver.status, driver.names = libcuda.INVALID_HANDLE, {400: b"CUDA_ERROR_INVALID_HANDLE"}
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_HANDLE"):
        k.launch((1,), (1,), stream=1234)


@pytest.mark.parametrize("options, attributes", [
    ({}, {}), ({"cluster": (2, 1)}, {libcuda.LAUNCH_CLUSTER_DIMENSION: (2, 1, 1)}),
    ({"dependent": True}, {libcuda.LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION: (1, 0, 0)})])
def test_what_a_launch_says_besides_its_grid(driver, options, attributes):
    k = kernel(driver, "i64", **options)
    k.launch((4, 3), (1,), stream=8)
    k.launch((2,), (1,))
    assert [x.attributes for x in driver.launches] == [attributes] * 2
    assert [(x.grid, x.stream) for x in driver.launches] == [((4, 3, 1), 8), ((2, 1, 1), 0)]


@pytest.mark.parametrize("values, says", [
    ((1,), r"takes \(i64, i32\), is given \(1,\)"), ((1, 2, 3), "is given"),
    ((1, 2**31), "is given"), ((1, 0.5), "is given"), (("a", 1), "is given"),
])
def test_wrong_values_are_refused(driver, values, says):
    with pytest.raises(ArgumentError, match=says):
        kernel(driver, "i64", "i32").launch((1,), values)
    assert not driver.launches


@pytest.mark.parametrize("grid", [(0,), (1, 2, 3, 4), (-1,), (1.5,)])
def test_wrong_grids_are_refused(driver, grid):
    with pytest.raises(ArgumentError, match="one to three positive ints"):
        kernel(driver, "i32").launch(grid, (1,))


def test_too_much_shared_memory_says_how_much_there_is(driver):
    with pytest.raises(ArgumentError, match="needs 300000 bytes.*232448"):
        kernel(driver, "i32", shared_bytes=300000).launch((1,), (1,))


def test_driver_errors_name_the_kernel(driver):
    driver.names = {701: b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
    k = kernel(driver, "i32")
    driver.status = 701
    with pytest.raises(DeviceError, match=r"launch k with grid \(7,\), 128 threads.*OUT_OF_RESOUR"):
        k.launch((7,), (1,))
    driver.status = 700
    with pytest.raises(DeviceError) as caught:
        k.launch((7,), (1,))
    assert "bounds()" in caught.value.hint
    driver.status = libcuda.OUT_OF_MEMORY
    with pytest.raises(OutOfMemoryError):
        k.launch((7,), (1,))


def test_threads_do_not_share_parameters(driver, monkeypatch):
    """The driver lets other threads run while it reads the parameters."""
    real = driver.launch

    def slow(*args):
        time.sleep(1e-4)
        return real(*args)

    monkeypatch.setattr(driver, "launch", slow)
    k = kernel(driver, "i64", "i64")
    threads = [threading.Thread(target=lambda n=n: [k.launch((1,), (n, n)) for _ in range(100)])
               for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(x.values[0] for x in driver.launches) == [n for n in range(4) for _ in range(100)]


def test_clusters_must_divide_the_grid(driver):
    k = kernel(driver, "i32", cluster=(2,))
    with pytest.raises(ArgumentError, match="axis 0 has 3 blocks, clusters take 2"):
        k.launch((3,), (1,))


# --- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89", "sm_100", "sm_100a"])
def test_machine_code_of_another_generation_is_refused_before_the_driver_sees_it(
        driver, monkeypatch, target):
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda cubin: pytest.fail("it was loaded"))
    k = kernel(driver, "i32", target=parse_target(target))
    says = rf"kernel k is compiled for {target}, cuda:0 \(fake\) has compute capability 9.0"
    with pytest.raises(UnsupportedTargetError, match=says) as caught:
        k.launch((1,), (1,))
    assert "compile it for sm_90;" in caught.value.hint


@pytest.mark.parametrize("needs, target", [
    ("75", "sm_90"), ("80", "sm_90"), ("90", "sm_90"), ("90a", "sm_90a")])
def test_a_build_without_a_target_is_for_the_device(driver, monkeypatch, tmp_path, needs, target):
    asked = []

    def compiled(job):
        asked.append(str(job.target))
        return building.MachineCode("ptx", b"cubin", "k.py", Resources(0, 0, 0, 0, 0, 0), ())

    monkeypatch.setattr(building.CompileJob, "run", compiled)
    driver.formats[b"k"] = "i"
    with config.scope(cache_dir=tmp_path):
        made = building.build("source", "k", ("i32",), needs=parse_target(needs), threads=32)
    assert asked == [target] and str(made.target) == str(made.kernel.target) == target
    made.kernel.launch((1,), (1,))
    assert len(driver.launches) == 1


@pytest.mark.parametrize("target, needs, says", [
    (None, "100a", "needs sm_100a, the device has compute capability 9.0"),
    (None, "100", "needs sm_100, the device"),
    ("80", "90a", "kernel k needs sm_90a, it is built for sm_80"),
    ("90", "90a", "kernel k needs sm_90a, it is built for sm_90")])
def test_a_build_for_less_than_it_needs_is_refused(driver, target, needs, says):
    with pytest.raises(UnsupportedTargetError, match=says):
        building.build("", "k", (), target and parse_target(target), needs=parse_target(needs),
                       threads=32)


# --- arrays ------------------------------------------------------------------------------------


def test_numpy_arrays_are_copied_there_and_back(driver, monkeypatch):
    x, y = np.arange(6.0).reshape(2, 3), np.zeros((3, 2)).T
    k = kernel(driver, "i64", "i64", "i32")
    real = driver.launch

    def double(*args):
        assert real(*args) == libcuda.SUCCESS
        source, target, n = driver.launches[-1].values
        values = np.ctypeslib.as_array((ctypes.c_double * n).from_address(source))
        np.ctypeslib.as_array((ctypes.c_double * n).from_address(target))[:] = 2 * values
        return libcuda.SUCCESS

    monkeypatch.setattr(driver, "launch", double)
    host = [(i, arrays.read_array(array, "xy"[i])) for i, array in enumerate((x, y))]
    staged = staging.Staging(host, 0, 0, {1})
    k.launch((1,), (*(pointer for _, pointer in staged.pointers()), 6))
    staged.copy_back()
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))


def test_host_arrays_cannot_be_captured(driver):
    driver.capturing = 1
    with pytest.raises(ArgumentError, match="cannot be captured"):
        staging.Staging([(0, arrays.read_array(np.zeros(3), "x"))], 0, 0, set())


# --- streams, devices --------------------------------------------------------------------------


@pytest.mark.parametrize("stream, pointer", [
    (None, 0), (12, 12), (SimpleNamespace(cuda_stream=5), 5), (SimpleNamespace(ptr=6), 6)])
def test_streams_of_every_library(stream, pointer):
    assert buffer.stream_pointer(stream) == pointer


def test_what_is_no_stream_is_refused():
    with pytest.raises(ArgumentError, match="'fast' is not a CUDA stream"):
        buffer.stream_pointer("fast")


def test_a_device_is_read_and_its_name_ends_at_the_first_zero(driver, monkeypatch):
    monkeypatch.setattr(device, "_devices", {})
    found = device.device(0)
    assert str(found) == "cuda:0 (NVIDIA H200)" and found.name == "NVIDIA H200"
    assert found.cc == (9, 0) and str(found.target) == "sm_90a" and found.total_bytes == 140 << 30


@pytest.mark.skipif(device.has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(UnsupportedTargetError) as caught:
        device.device(0)
    assert "device='cpu'" in caught.value.hint, "with a driver or without"


# --- TMA descriptors ---------------------------------------------------------------------------


def tensor(shape, dtype="bf16", pointer=1 << 20, strides=None) -> arrays.Array:
    return arrays.Array(pointer, shape, strides or arrays.dense_strides(shape),
                        arrays.find_dtype(dtype), 0, "test", None)


@pytest.mark.parametrize("array, box, says", [
    (tensor((64, 60)), (64, 64), "rows of axis 0 are 120 bytes apart.*multiple of 16"),
    (tensor((64, 64), pointer=8), (64, 64), "begins at 0x8"),
    (tensor((64, 64)), (64,), "shape .* its box is"),
    (tensor((64, 64)), (512, 64), "outside 1..256"),
    (tensor((64, 128)), (64, 128), "rows of 256 bytes"),
    (tensor((64, 64), strides=(1, 64)), (64, 64), "last axis is not contiguous"),
    (tensor((64, 64), "fp4_e2m1"), (64, 64), "TMA does not copy"),
])
def test_what_tma_cannot_copy_is_refused_in_words(array, box, says):
    with pytest.raises((ArgumentError, TypeError), match=says):
        tensormap.check_box(array, "x", box, 128)


@pytest.mark.parametrize("shape, strides", [
    ((200,), [800]), ((5,), [32]), ((9, 200), [800]), ((3, 5, 96), [384, 1920])])
def test_what_the_driver_is_told_of_an_array(driver, monkeypatch, shape, strides):
    """Also of one axis: it has no strides, but a null pointer would be refused."""
    monkeypatch.setattr(tensormap, "_stores", {})
    box = (1,) * (len(shape) - 1) + (4,)
    at = tensormap.tensor_map(tensor(shape, "f32"), box=box, swizzle_bytes=0)
    told = driver.encoded
    assert told.rank == len(shape) and told.strides == strides
    assert told.shape == list(shape[::-1]) and told.box == list(box[::-1])
    assert ctypes.string_at(at, 128) == bytes([len(shape)]).ljust(128, b"\0")


@pytest.mark.parametrize("dtype, columns, row_bytes", [
    ("bf16", 64, 1024), ("fp6_e2m3", 128, 384)])
def test_what_the_driver_is_told_of_panels(driver, monkeypatch, dtype, columns, row_bytes):
    """One copy brings panels of some rows one behind the other: they are an axis of their own, and
    those behind the last are zeros, not the next row."""
    monkeypatch.setattr(tensormap, "_stores", {})
    tensormap.tensor_map(tensor((6, 512), dtype), box=(2, 4, columns))
    told, panels = driver.encoded, row_bytes // 128
    assert told.shape == [columns, 6, panels] and told.strides == [row_bytes, 128]
    assert told.rank == 3 and told.box == [columns, 4, 2]


def test_what_the_driver_is_told_of_windows(driver, monkeypatch):
    """Everything from the innermost axis on: channels, width, height, images."""
    monkeypatch.setattr(tensormap, "_stores", {})
    windows = tensormap.ImageWindows((-1, -2), (-3, 4), (5, 6))
    x = tensor((2, 9, 11, 64))
    at = tensormap.tensor_map(x, box=(128, 64), windows=windows)
    told = driver.encoded
    assert told.shape == [64, 11, 9, 2] and told.strides == [128, 128 * 11, 128 * 99]
    assert (told.first, told.last, told.steps) == ([-2, -1], [4, -3], [1, 6, 5, 1])
    assert told.box == [64, 128] and told.modes[1] == 3
    assert ctypes.string_at(at, 128) == b"\4".ljust(128, b"\0")
    other = tensormap.ImageWindows((-1, -1), (-3, 4), (5, 6))
    assert tensormap.tensor_map(x, box=(128, 64), windows=other) != at
    assert tensormap.tensor_map(x, box=(128, 64), windows=windows) == at
    with pytest.raises(ArgumentError, match="rows of 256 bytes"):
        tensormap.tensor_map(x, box=(128, 128), windows=windows)


def test_descriptors_are_encoded_once_and_reused(driver, monkeypatch):
    made = []

    def encode(array, box, *rest):
        made.append(box)
        return bytes([len(made)]) * tensormap.MAP_BYTES

    monkeypatch.setattr(tensormap, "_encode", encode)
    monkeypatch.setattr(tensormap, "_stores", {})
    x = tensor((64, 64))
    first = tensormap.tensor_map(x, box=(64, 64))
    assert tensormap.tensor_map(tensor((64, 64)), box=(64, 64)) == first and len(made) == 1
    second = tensormap.tensor_map(x, box=(32, 64))
    assert second != first and first % 128 == 0 and second % 128 == 0 and len(made) == 2
    assert ctypes.string_at(first, 128) == b"\1" * 128
    assert ctypes.string_at(second, 128) == b"\2" * 128


def test_descriptors_unused_for_longest_make_room(driver, monkeypatch):
    monkeypatch.setattr(tensormap, "_encode", lambda array, *rest: bytes(128))
    monkeypatch.setattr(tensormap, "_stores", {})
    monkeypatch.setattr(tensormap, "KEPT", 512)
    monkeypatch.setattr(device.Device, "synchronize", lambda self: None)
    places = {tensormap.tensor_map(tensor((64, 64), pointer=1024 * i), box=(64, 64))
              for i in range(1, 1500)}
    assert len(places) == 512
    assert len(tensormap._stores[0]._slots) <= 512
