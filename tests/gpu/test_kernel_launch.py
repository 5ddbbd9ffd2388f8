"""Kernels called on a GPU: arrays of every library, streams, graphs, errors, times, the disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from device_kernels import fresh
from gpu_harness import host_us, require_gpu
from kernels import seeds
from tessera import config
from tessera.runtime.device import device
from tessera.tile.ir.errors import BoundsError, KernelAssertionError
from tolerance import assert_close

require_gpu()

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ["torch", "cupy", "jax", "interface", "dlpack", "numpy", "tessera"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.scope(cache_dir=tmp_path):
        yield
        device().synchronize()


def put(library: str, x: np.ndarray):
    """A copy of x in a library, and how it is read back."""
    if library in ("numpy", "tessera"):
        made = x.copy() if library == "numpy" else ts.tensor(x.copy())
        return made, np.asarray
    name = {"interface": "cupy", "dlpack": "torch"}.get(library, library)
    module = pytest.importorskip(name)
    if library == "torch":
        return to_torch(module, x), from_torch
    if library == "cupy":
        return module.asarray(x), module.asnumpy
    if library == "jax":
        return module.device_put(x), np.asarray
    made = Interface(module.asarray(x)) if library == "interface" else Dlpack(to_torch(module, x))
    return made, lambda y: y.numpy()


def to_torch(torch, x: np.ndarray):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(x.copy()).cuda()


def from_torch(y) -> np.ndarray:
    import torch

    if y.dtype == torch.bfloat16:
        return y.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return y.cpu().numpy()


class Interface:
    """An array of a library that we have never heard of, by its interface."""

    def __init__(self, x):
        self.x = x

    @property
    def __cuda_array_interface__(self):
        return self.x.__cuda_array_interface__

    def numpy(self) -> np.ndarray:
        return self.x.get()


class Dlpack:
    """And one that offers DLPack alone."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def numpy(self) -> np.ndarray:
        return from_torch(self.x)


def call(kernel, *args, **kwargs):
    """A call; host arrays are sent to the GPU."""
    with config.scope(device="cuda"):
        return kernel(*args, **kwargs)


# --- the seeds -----------------------------------------------------------------------------------


@pytest.mark.row("KERN-01", "KERN-04", "KERN-06", "KERN-08", "EX-30")
@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "jax"])
@pytest.mark.parametrize("n", [0, 1, 127, 128, 1000, 10**6 + 3])
def test_saxpy(library, n, rng):
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    a, _ = put(library, x)
    b, back = put(library, y)
    kernel = fresh(seeds.saxpy)
    assert call(kernel, a, b, 2) is b
    assert call(kernel, a, b, 2) is b  # the short way
    device().synchronize()
    # two sums, each rounded once; terms may cancel
    wrong = np.abs(back(b) - (y + 4.0 * x.astype(np.float64)))
    assert (wrong <= 2.0**-23 * (np.abs(y) + 4 * np.abs(x))).all()
    assert len(kernel.images) == 1


@pytest.mark.row("KERN-09", "EX-12")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("n", [1, 127, 128, 1000, 10**6])
def test_cooperative_reduction(library, n, rng):
    x = rng.standard_normal(n).astype(np.float32)
    a, _ = put(library, x)
    kernel = fresh(seeds.cooperative_reduction)
    for _ in range(3):
        got = call(kernel, a)
        assert type(got) is float
        assert_close(np.float32(got), x.astype(np.float64).sum(), dtype="f32", n=n, scale=n**0.5)


# --- results -------------------------------------------------------------------------------------


@ts.kernel
def rows_scaled(x: ts.Tensor["M", "N", ts.bf16], k: ts.f32) -> ts.Tensor["M", "N", ts.bf16]:
    for row in ts.tile.range(0, M, 1):
        y = k * ts.tile.load(x[row:row + 1, 0:256])
    return y


@ts.kernel
def halves_scaled(x: ts.Tensor["M", "N", ts.f16], k: ts.f32) -> ts.Tensor["M", "N", ts.f16]:
    for row in ts.tile.range(0, M, 1):
        y = k * ts.tile.load(x[row:row + 1, 0:256])
    return y


@pytest.mark.row("KERN-10")
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_come_in_the_library_of_the_arguments(library, rng):
    x = rng.standard_normal((37, 256)).astype(np.float16)
    a, back = put(library, x)
    for k in (2.0, -0.5):
        got = call(halves_scaled, a, k)
        kind = {"interface": "Resident", "dlpack": "Resident"}.get(library, type(a).__name__)
        assert type(got).__name__ == kind
        np.testing.assert_array_equal(back(got), x * np.float16(k))


@pytest.mark.parametrize("library", ["torch", "jax", "numpy", "tessera"])
def test_results_of_types_that_numpy_does_not_have(library, rng):
    x = rng.standard_normal((37, 256)).astype(ml_dtypes.bfloat16)
    a, back = put(library, x)
    for k in (2.0, -0.5):
        got = call(rows_scaled, a, k)
        assert type(got) is type(a)
        np.testing.assert_array_equal(back(got), x * ml_dtypes.bfloat16(k))


def test_a_result_of_ours_is_taken_by_others(rng):
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")

    @ts.kernel
    def doubled(x: ts.Tensor["M", "N", ts.f32]) -> ts.Tensor["M", "N", ts.f32]:
        for row in ts.tile.range(0, M, 1):
            y = 2.0 * ts.tile.load(x[row:row + 1, 0:64])
        return y

    x = rng.standard_normal((5, 64)).astype(np.float32)
    got = doubled(put("interface", x)[0])
    np.testing.assert_array_equal(cupy.asarray(got).get(), 2 * x)
    np.testing.assert_array_equal(torch.as_tensor(got, device="cuda").cpu().numpy(), 2 * x)


def test_immutable_arrays_are_not_written(rng):
    x, y = (put("jax", v)[0] for v in rng.standard_normal((2, 50)).astype(np.float32))
    for _ in range(2):
        with pytest.raises(ts.ArgumentError, match="argument y is read-only"):
            seeds.saxpy(x, y, 1.0)


# --- streams, graphs -----------------------------------------------------------------------------


@ts.kernel
def increment(x: ts.Tensor["N", ts.i32]) -> ts.Tensor["N", ts.i32]:
    i = ts.tile.linear_id()
    if i < N:
        x[i] += 1
    return x


@pytest.mark.parametrize("given", [False, True])
def test_the_stream_of_torch(given):
    """Behind a kernel that keeps the side stream busy, the increment must wait for the copy."""
    torch = pytest.importorskip("torch")
    x, source = (torch.zeros(1 << 20, dtype=torch.int32, device="cuda") for _ in range(2))
    source.fill_(41)
    increment(x)  # compiled
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        if not given:
            increment(x)
    if given:
        increment.launch(x, stream=side)
    torch.cuda.synchronize()
    assert (x == 42).all()


def test_the_stream_of_cupy():
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros(1000, cupy.int32)
    increment(x)
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        cupy.cuda.Stream.begin_capture(side)
        increment(x)
        graph = side.end_capture()  # an uncaptured launch would have run at once
    cupy.cuda.Device().synchronize()
    assert (x == 1).all()
    graph.launch(side)
    side.synchronize()
    assert (x == 2).all()


@pytest.mark.parametrize("seen", [False, True])
def test_a_call_is_captured_in_a_graph(seen):
    """Also the first call: compiling and loading are not captured."""
    torch = pytest.importorskip("torch")
    kernel = fresh(increment)
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    y = torch.randn(37, 256, device="cuda").to(torch.bfloat16)
    if seen:
        kernel(torch.zeros_like(x)), rows_scaled(y, 2.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x)
        kernel(x)
        z = rows_scaled(y, 2.0)
        with pytest.raises(ts.ArgumentError, match="returns a number, which is read back"):
            seeds.cooperative_reduction(torch.zeros(8, device="cuda"))
    torch.cuda.synchronize()
    assert (x == 0).all()
    for n in (2, 4):
        z.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert (x == n).all() and (z == 2 * y).all()


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.row("KERN-03", "KERN-05")
def test_wrong_arguments():
    torch = pytest.importorskip("torch")
    x = torch.zeros(100, device="cuda")
    wrong = [
        (torch.zeros(99, device="cuda"), ts.ShapeError, r"y: axis 0 \(n\) is 99, but x axis 0"),
        (torch.zeros(10, 10, device="cuda"), ts.ShapeError, "argument y has 2 axes"),
        (x.double(), ts.DTypeError, "argument y is f64, its annotation says f32"),
        (torch.zeros(200, device="cuda")[::2], ts.ArgumentError, r"strides \(2,\).*contiguous"),
        (torch.zeros(100), ts.ArgumentError, "x lies on cuda:0, y lies in host memory"),
        (np.zeros(100, np.float32), ts.ArgumentError, "x lies on cuda:0, y lies in host memory")]
    for y, error, says in wrong:
        for _ in range(2):
            with pytest.raises(error, match=says):
                seeds.saxpy(x, y, 1.0)
    with pytest.raises(ts.DTypeError, match="alpha must be a number"):
        seeds.saxpy(x, x.clone(), "1")


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_arrays_that_begin_anywhere(offset, rng):
    torch = pytest.importorskip("torch")
    x, y = (torch.from_numpy(v).cuda()[offset:] for v in
            rng.standard_normal((2, 1000)).astype(np.float32))
    want = 3 * x + y
    seeds.saxpy(x, y, 3.0)
    torch.testing.assert_close(y, want)


FAILING = '''
@ts.kernel
def asserted(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        assert x[i] < 0.5, f"x is {x[i]}"

@ts.kernel
def beyond(x: ts.Tensor["N", ts.f32], y: ts.Tensor["K", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        y[i] = x[i]
'''


@pytest.fixture
def failing():
    from kernels.build import build

    return build(FAILING)


@pytest.mark.row("TILE-60")
def test_an_assert_is_raised_as_by_the_interpreter(failing):
    torch = pytest.importorskip("torch")
    kernel, x = failing["asserted"], np.zeros(1000, np.float32)
    x[777] = 0.7
    with pytest.raises(KernelAssertionError) as wanted:
        kernel(x)
    a = torch.from_numpy(x).cuda()
    kernel(a)
    torch.cuda.synchronize()
    for later in (lambda: kernel(a), device().synchronize):  # the next launch, the next wait
        with pytest.raises(KernelAssertionError) as found:
            later()
            torch.cuda.synchronize()
        assert found.value.message == wanted.value.message
        assert found.value.where.line == wanted.value.where.line
        kernel(a)
        torch.cuda.synchronize()
    with pytest.raises(KernelAssertionError):
        device().synchronize()
    with config.scope(debug=True), pytest.raises(KernelAssertionError):
        kernel(a)
    kernel(torch.zeros(1000, device="cuda"))  # the context is sound
    device().synchronize()


def test_bounds_of_debug_builds(failing):
    torch = pytest.importorskip("torch")
    kernel = failing["beyond"]
    x, y = np.ones(200, np.float32), np.zeros(150, np.float32)
    with pytest.raises(BoundsError) as wanted:
        kernel(x, y)
    a, b = torch.from_numpy(x).cuda(), torch.zeros(256, device="cuda")
    with config.scope(debug=True), pytest.raises(BoundsError) as found:
        kernel(a, b[:150])
    assert found.value.where.line == wanted.value.where.line
    assert "is outside of 'y': axis 0 has extent 150" in found.value.message
    torch.cuda.synchronize()
    assert (b[150:] == 0).all()


# --- what was compiled ---------------------------------------------------------------------------


def test_resources_and_levels(rng):
    kernel = fresh(seeds.saxpy)
    x, y = (put("torch", v)[0] for v in rng.standard_normal((2, 160)).astype(np.float32))
    kernel(x, y, 1.0)
    assert 0 < kernel.resources.registers <= 64 and not kernel.resources.spills
    (compiled,) = kernel.compiled
    assert compiled.built.resources == kernel.resources
    assert "def saxpy" in kernel.inspect_ir("target")
    assert ".entry" in kernel.inspect_ir("ptx") and "EXIT" in kernel.inspect_ir("sass")
    assert "sm_80" in kernel.inspect_ir("ptx", target="sm_80")


# --- contexts ------------------------------------------------------------------------------------
@ts.kernel
def scaled(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32], a: ts.f32):
    i = ts.tile.linear_id()
    if i < N:
        y[i] = a * x[i]


def in_order(torch, index: int, stream=None) -> None:
    """A call behind long work on the stream of its arrays, with whatever is current."""
    where = f"cuda:{index}"
    with torch.cuda.device(index):
        work = torch.randn(8192, 8192, device=where)
        x, y = torch.zeros(1000, device=where), torch.zeros(1000, device=where)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for _ in range(10):
                work = work @ work * 1e-4
            x += 3 + 0 * work[0, 0].nan_to_num(0, 0, 0)
    if stream:
        scaled.launch(x, y, 2.0, stream=stream)
        stream.synchronize()
    else:
        scaled(x, y, 2.0)
        torch.cuda.synchronize(index)
    assert (y == 6).all()


@pytest.mark.parametrize("index", [0, 1])
def test_the_gpu_is_that_of_the_arrays_whatever_is_current(index):
    """Also the first launches, with kernels that are not loaded there yet; and on other streams."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() <= index:
        pytest.skip("needs two GPUs")
    for current in range(torch.cuda.device_count()):
        with torch.cuda.device(current):
            in_order(torch, index)
            in_order(torch, index, torch.cuda.Stream(index))
            assert torch.cuda.current_device() == current


def test_a_thread_without_a_context_launches():
    torch = pytest.importorskip("torch")
    x, y = torch.full((1000,), 3.0, device="cuda"), torch.zeros(1000, device="cuda")
    scaled(x, y, 1.0)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for a in (2.0, 5.0):
                scaled(x, y, a)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed and (y == 15).all()


# --- times ---------------------------------------------------------------------------------------


@ts.kernel
def three(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32], z: ts.Tensor["N", ts.f32],
          a: ts.f32):
    i = ts.tile.linear_id()
    if i < N:
        z[i] = a * x[i] + y[i]


@pytest.mark.alone
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_launch_overhead_of_a_repeated_call(library, note):
    arrays = [put(library, np.zeros(256, np.float32))[0] for _ in range(3)]
    three(*arrays, 2.0)

    zeros = pytest.importorskip("torch").zeros(256, device="cuda")
    figures = host_us({"call_us": lambda: three(*arrays, 2.0),
                       "groups_us": lambda: three[2](*arrays, 2.0),
                       "torch_zero_us": zeros.zero_})  # of one array, as fast as this host is
    note(library=library, **figures)
    assert figures["call_us"] < max(8, 2 * figures["torch_zero_us"])


PROGRAM = """
import os, sys, time
import torch
import tessera as ts
from kernels import seeds
from tessera.runtime.device import device
x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
device()  # its start, and torch's, are not ours to measure
torch.cuda.synchronize()
start, began = time.perf_counter(), sum(os.times()[:4])
seeds.saxpy(x, y, 2.0)
torch.cuda.synchronize()
ms = 1e3 * (time.perf_counter() - start)
worked_ms = 1e3 * (sum(os.times()[:4]) - began)  # of its processors, and of what it started
heavy = sorted({"numba", "llvmlite", "tessera.tile.cuda.emit.emitter"} & set(sys.modules))
assert (y == 3).all()
(image,) = seeds.saxpy.images.values()
print(image.cached, ms, worked_ms, *heavy)
"""


def saxpy_in_a_process(cache) -> list[str]:
    """What PROGRAM says: whether the image was there, ms of the call, ms of processors, imports."""
    env = dict(os.environ, TESSERA_CACHE_DIR=str(cache), PYTHONPATH=os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          check=True, env=env).stdout.split()


@pytest.mark.alone
def test_compile_speed_and_a_second_process_from_the_disk(tmp_path, note):
    """Of a compilation the work counts, not what else the host does, and the best of three where
    processors that others share are slow."""
    pytest.importorskip("torch")
    said = [saxpy_in_a_process(tmp_path) for _ in range(3)]
    worked = [float(said[0][2])]
    while worked[-1] >= 1500 and len(worked) < 3:
        worked.append(float(saxpy_in_a_process(tmp_path / str(len(worked)))[2]))
    first, second = min(worked), min(float(line[1]) for line in said[1:])
    note(first_ms=float(said[0][1]), first_worked_ms=first, second_ms=second)
    assert said[0][0] == "False" and [line[0] for line in said[1:]] == ["True"] * 2
    assert len(said[1]) == 3, f"a launch from the cache imports {said[1][3:]}"
    assert first < 1500 and second < 20


def test_processes_compile_once(tmp_path):
    pytest.importorskip("torch")
    env = dict(os.environ, TESSERA_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True,
                                env=env) for _ in range(3)]
    said = sorted(p.communicate(timeout=120)[0].split()[0] for p in running)
    assert said == ["False", "True", "True"]


# --- what is read from outside ------------------------------------------------------------------
FACTOR = 2.0


@ts.kernel
def by_a_global(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = FACTOR * x[i]


def test_a_changed_global_is_seen(monkeypatch):
    """Also while launches of the code before are under way."""
    kernel = fresh(by_a_global)
    x, back = put("cupy", np.ones(1000, np.float32))
    want = np.ones(1000, np.float32)
    for factor in (2.0, 2.0, 3.0, 0.5, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        kernel(x)
        want *= np.float32(factor)
    np.testing.assert_array_equal(back(x), want)
