"""What kernels on a GPU are given and give back, where a mistake would write past an array's end.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Foreign, Parameter, Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera.errors import DTypeError
from tessera.numerics import as_type
from tessera.runtime.arrays import overlap
from tessera.runtime.buffer import new_stream
from tessera.runtime.device import device
from tessera.tile.launch import results
from tessera.tile.tuning import accuracy

CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@ts.kernel
def double(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = 2.0 * x[i]


@ts.kernel
def rounded(x: ts.Tensor["M", "N", ts.f32]) -> ts.Tensor["M", "N", ts.bf16]:
    for row in ts.tile.range(0, M, 1):
        y = ts.tile.load(x[row:row + 1, 0:64])
    return y


@ts.kernel
def doubled(x: ts.Tensor["M", "N", ts.bf16]) -> ts.Tensor["M", "N", ts.f32]:
    for row in ts.tile.range(0, M, 1):
        y = 2.0 * ts.tile.load(x[row:row + 1, 0:64])
    return y


def jax_like(x64: bool):
    """Makes arrays as jax does: types of 64 bits only where they are enabled."""
    def zeros(shape, kind):
        kind = np.dtype(kind)
        made = np.zeros(shape, kind if x64 or kind.itemsize < 8 else f"{kind.kind}4")
        return SimpleNamespace(dtype=made.dtype, block_until_ready=lambda: SimpleNamespace(
            dtype=made.dtype, unsafe_buffer_pointer=lambda: made.ctypes.data))

    class Default:
        def __init__(self, *_):
            pass

        __enter__ = __exit__ = lambda *_: None

    return SimpleNamespace(local_devices=lambda: [SimpleNamespace(local_hardware_id=0)],
                           default_device=Default, numpy=SimpleNamespace(zeros=zeros))


@pytest.mark.parametrize("dtype", ["f64", "int64", "uint64"])
def test_jax_without_types_of_64_bits(monkeypatch, dtype):
    numeric = as_type(dtype)
    monkeypatch.setitem(sys.modules, "jax", jax_like(True))
    assert results.maker("jax", (3,), numeric, 0)(None).nbytes == 24
    monkeypatch.setitem(sys.modules, "jax", jax_like(False))
    with pytest.raises(DTypeError, match=f"returns {numeric.dtype}, which jax keeps as") as error:
        results.maker("jax", (3,), numeric, 0)(None)
    assert "jax_enable_x64" in error.value.hint


def test_packed_results_are_no_torch_tensors(gpu):
    sys.modules["torch"].int4 = sys.modules["torch"].int8  # newer torch has an empty type
    for name in ("int4", "fp6_e3m2", "fp4_e2m1"):
        with pytest.raises(DTypeError, match="which torch has no type for"):
            results.maker("torch", (4, 64), as_type(name), 0)


def test_a_result_is_an_argument_of_the_next_kernel(gpu, rng):
    x = filled(rng.standard_normal((3, 64)).astype(np.float32))
    y = rounded(Foreign(x))
    assert y.dtype is ts.bf16
    for _ in range(2):  # the long way and the short one
        assert np.array_equal(doubled(y).numpy(), 2 * y.numpy().astype(np.float32))
    assert accuracy.on_host(y).dtype == np.float64  # as tuning compares results
    kept = y.numpy().copy()
    other = accuracy.copied(y, "y")  # and tries kernels that write it, there
    assert other.device == y.device and other.memory.pointer != y.memory.pointer
    assert np.array_equal(other.numpy(), kept)


def test_packed_results_are_not_taken_for_whole_bytes(driver):
    made = results.Resident((3, 5), as_type("fp4_e2m1"), 0)
    assert made.memory.nbytes == 9 and not hasattr(made, "__cuda_array_interface__")
    assert hasattr(results.Resident((3, 5), as_type("f32"), 0), "__cuda_array_interface__")


def test_a_graph_of_others_has_counters_of_its_own(gpu, driver, rng):
    gpu.extra = (Parameter("counter", "next", "i64"),)
    kernel, x = ts.kernel(double.fn), Torch(filled(rng.standard_normal(4).astype(np.float32)))

    def place(stream):
        kernel.launch(x, stream=stream)
        return gpu.seen["next"]

    mine = new_stream(device(0))
    before = [place(9), place(mine)]
    driver.capturing = CAPTURING
    theirs, ours = [place(9), place(9)], [place(mine), place(mine)]
    driver.capturing = 0
    assert len({*before, *theirs}) == 4 and ours == [before[1]] * 2
    assert [place(9), place(mine)] == before


# --- arrays that share memory ------------------------------------------------------------------
@ts.kernel
def moved(x: ts.Tensor["N", ts.f32], y: ts.Tensor["M", ts.f32], z: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < M:
        y[i] = x[i] + z[i]


def test_views_that_overlap_are_known_to(gpu, rng):
    kernel = ts.kernel(moved.fn)
    base, z = (filled(rng.standard_normal(512).astype(np.float32)) for _ in range(2))

    def call(start: int, count: int) -> None:
        x, y = base[:128], base[start:start + count]
        want = x[:count] + z[:count]
        kernel(Torch(x), Torch(y), Torch(z[:128]))
        if start >= 128:
            assert np.array_equal(base[start:start + count], want)

    for start in (128, 256, 64, 128, 124, 64, 384):
        call(start, 64)
    assert [r.shared for r in gpu.requests] == [frozenset(), frozenset("xy")]
    launcher = next(iter(kernel.launchers[next(iter(kernel.launchers))].values()))
    (only,) = launcher.recipes.values()  # the short way tells them apart, too
    assert not only.shared and list(only.twins) == [frozenset("xy")] and only.reach == 512


def test_memory_overlaps():
    assert overlap([(100, 20), (119, 1)]) and overlap([(0, 9), (50, 2), (8, 3)])
    assert not overlap([(100, 20), (120, 5), (0, 100), (110, 0)])


@ts.kernel
def both(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = x[i] + 1.0
        y[i] = 2.0 * x[i]


def test_copies_of_host_arrays_share_what_the_arrays_share(gpu, rng):
    x = rng.standard_normal(200).astype(np.float32)
    want = 2 * (x + 1)
    both.launch(x, x, target="cuda")
    assert np.array_equal(x, want)
    with pytest.raises(ts.ArgumentError, match="share a part of their memory"):
        both.launch(x[:100], x[50:150], target="cuda")


@ts.kernel
def summed(x: ts.Tensor["M", "N", ts.f32],
           y: ts.Tensor["M", "N", ts.f32]) -> ts.Tensor["M", "N", ts.f32]:
    for row in ts.tile.range(0, M, 1):
        z = ts.tile.load(x[row:row + 1, 0:64]) + ts.tile.load(y[row:row + 1, 0:64])
    return z


def test_arrays_that_are_only_read_may_overlap(gpu, rng):
    kernel = ts.kernel(summed.fn)
    x = filled(rng.standard_normal((4, 64)).astype(np.float32))
    for a, b in ((x[:3], x[1:]), (x, x), (x[:3], x[1:])):
        kernel(Torch(a), Torch(b))
    assert [r.shared for r in gpu.requests] == [frozenset()]


@ts.kernel
def unpacked(w: ts.Tensor["N", "K"], y: ts.Tensor["N", "K", ts.f32]):
    y[tile_n:tile_n+16, 0:64] = ts.tile.cast(ts.tile.load(w[tile_n:tile_n+16, 0:64]), ts.f32)


@pytest.mark.parametrize("codes, row_bytes", [("fp4_e2m1", 32), ("fp6_e2m3", 48)])
def test_packed_arrays_take_the_bytes_that_they_are_stored_in(gpu, codes, row_bytes):
    """A result right behind them shares none, but does where it begins a byte before their end."""
    kernel = ts.kernel(unpacked.fn)
    memory = np.zeros(16 * row_bytes + 16 * 64 * 4, np.uint8)
    for shift in (0, 4):
        w = ts.from_bytes(Torch(memory[shift:][:16 * row_bytes].reshape(16, row_bytes)), codes,
                          (16, 64))
        kernel(w, Torch(memory[16 * row_bytes:].view(np.float32).reshape(16, 64)))
    assert [r.shared for r in gpu.requests] == [frozenset(), frozenset("wy")]


@ts.kernel
def signed(x: ts.Tensor["N", ts.f32], *, c=1.0):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = c


def test_zeros_of_both_signs_are_two_constants(gpu):
    x = filled(np.ones(4, np.float32))
    for c in (0.0, -0.0, 0.0, -0.0):
        signed(Torch(x), c=c)
        assert np.signbit(x[0]) == np.signbit(c)
