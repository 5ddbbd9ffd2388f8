"""Round trips with torch, CuPy and JAX on the GPU: bit for bit, without a copy, on side streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera.numerics import as_type
from tessera.tensor import Tensor

require_gpu()

ALL = ["f64", "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int64", "int32", "int16", "int8",
       "uint8", "bool_"]
UNSIGNED = ["uint16", "uint32", "uint64"]
NUMPY_HAS = [t for t in ALL if t not in ("bf16", "fp8_e4m3", "fp8_e5m2")] + UNSIGNED
PACKED = ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "int4"]
LARGE = (2048, 2048)  # what is launched on it is still under way when the next call is made


def drawn(rng: Any, dtype: str, shape: tuple[int, ...] = (33, 65)) -> Tensor:
    """Every bit pattern of the type, NaN too."""
    numeric = as_type(dtype)
    bits = rng.integers(0, 256, (*shape, numeric.dtype.numpy.itemsize), np.uint8)
    if dtype == "bool_":
        return ts.tensor(bits[..., 0] > 99)
    return Tensor(bits.reshape(-1).view(numeric.dtype.numpy).reshape(shape), numeric)


def torch_bytes(t: Any) -> bytes:
    import torch

    return t.contiguous().view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.row("RT-13")
@pytest.mark.parametrize("dtype", ALL)
def test_torch_and_back(dtype: str, rng: Any) -> None:
    torch = pytest.importorskip("torch")
    host = drawn(rng, dtype)
    x = host.to("cuda")
    theirs = torch.from_dlpack(x)
    assert theirs.is_cuda and theirs.data_ptr() == x.memory.pointer
    assert torch_bytes(theirs) == host.array.tobytes()
    back = ts.from_dlpack(theirs)
    assert back.type == x.type and back.memory.pointer == x.memory.pointer
    assert back.array.tobytes() == host.array.tobytes()
    copy = ts.tensor(theirs)
    assert copy.device == "cuda:0" and copy.memory.pointer != x.memory.pointer
    theirs.zero_()
    assert copy.array.tobytes() == host.array.tobytes()
    assert not ts.as_bytes(back).array.any()


@pytest.mark.row("RT-13")
@pytest.mark.parametrize("dtype", NUMPY_HAS)
def test_cupy_and_back(dtype: str, rng: Any) -> None:
    cupy = pytest.importorskip("cupy")
    host = drawn(rng, dtype)
    x = host.to("cuda")
    for theirs in (cupy.from_dlpack(x), cupy.asarray(x)):
        assert theirs.data.ptr == x.memory.pointer
        assert cupy.asnumpy(theirs).tobytes() == host.array.tobytes()
        back = ts.from_dlpack(theirs)
        assert back.type == x.type and back.memory.pointer == x.memory.pointer
        assert back.array.tobytes() == host.array.tobytes()


@pytest.mark.row("RT-14")
@pytest.mark.parametrize("dtype", [t for t in ALL + UNSIGNED if "64" not in t])
def test_jax_and_back(dtype: str, rng: Any) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    host = drawn(rng, dtype)
    theirs = jax.dlpack.from_dlpack(host.to("cuda"))
    assert np.asarray(theirs).tobytes() == host.array.tobytes()
    back = ts.from_dlpack(theirs)
    assert back.type == host.type and back.device == "cuda:0"
    assert back.array.tobytes() == host.array.tobytes()


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_types_go_as_bytes(dtype: str, rng: Any) -> None:
    torch = pytest.importorskip("torch")
    host = ts.tensor(rng.standard_normal((33, 65)).astype(np.float32), dtype)
    x = host.to("cuda")
    with pytest.raises(ts.DTypeError, match="packed"):
        torch.from_dlpack(x)
    theirs = torch.from_dlpack(ts.as_bytes(x))
    assert theirs.data_ptr() == x.memory.pointer
    assert torch_bytes(theirs) == host.buffer.tobytes()
    back = ts.from_bytes(theirs.clone(), dtype, (33, 65))
    assert back.device == "cuda:0" and back.buffer.tobytes() == host.buffer.tobytes()


# --- streams ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e4m3"])
def test_what_torch_makes_on_a_side_stream_is_waited_for(dtype: str, rng: Any) -> None:
    torch = pytest.importorskip("torch")
    f = ts.jit(lambda x: ts.reshape(x, (LARGE[1], LARGE[0])))
    stream = torch.cuda.Stream()
    source = torch.from_dlpack(drawn(rng, dtype, LARGE).to("cuda"))
    want = torch_bytes(source)
    torch.cuda.synchronize()
    for take in (lambda t: t, ts.from_dlpack, ts.tensor):
        with torch.cuda.stream(stream):
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(10):
                busy = busy @ busy / 64
            theirs = torch.zeros_like(source.view(torch.uint8)).view(source.dtype)
            theirs.view(torch.uint8).copy_(source.view(torch.uint8))
            y = f(take(theirs))
            del theirs
            torch.zeros(LARGE, device="cuda").fill_(7.0)  # may take the memory of theirs
        assert ts.as_bytes(y).array.tobytes() == want


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e5m2"])
def test_what_is_made_here_is_waited_for_on_a_side_stream(dtype: str, rng: Any) -> None:
    """And its memory is not used again before torch has read it."""
    torch = pytest.importorskip("torch")
    x = ts.tensor(rng.standard_normal((2048, 2048)).astype(np.float32) / 64).to("cuda")
    f = ts.jit(lambda x: ts.cast(((x @ x) @ x) @ x, dtype))
    want = f(x).array.tobytes()
    stream = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream):
            theirs = torch.from_dlpack(f(x))
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(5):
                busy = busy @ busy / 64
            kept = theirs.view(torch.uint8).clone()
            del theirs
        f(x * 2.0)
        stream.synchronize()
        assert kept.cpu().numpy().tobytes() == want


def test_cupy_on_a_side_stream(rng: Any) -> None:
    cupy = pytest.importorskip("cupy")
    a = rng.standard_normal((2048, 2048)).astype(np.float32)
    f = ts.jit(lambda x: x * 2.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(5):
            busy = busy @ busy / 4096
        theirs = cupy.asarray(a) + 0 * busy[:2048, :2048]
        y = f(theirs)
        z = cupy.from_dlpack(f(theirs)) + 1
    assert np.array_equal(y.array, 2 * a) and np.array_equal(cupy.asnumpy(z), 2 * a + 1)


# --- the array interface ------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ALL)
def test_the_interface_has_a_type_or_says_what_to_do(dtype: str, rng: Any) -> None:
    x = drawn(rng, dtype).to("cuda")
    if dtype in NUMPY_HAS:
        facts = x.__cuda_array_interface__
        assert facts["data"] == (x.memory.pointer, False) and facts["typestr"] == x.array.dtype.str
        return
    with pytest.raises(AttributeError, match=r"torch\.from_dlpack"):
        _ = x.__cuda_array_interface__
