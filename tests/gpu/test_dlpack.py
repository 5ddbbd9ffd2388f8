"""Results on a GPU in the hands of torch, CuPy and JAX: the same memory, every type they have."""

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera.numerics import as_type

require_gpu()


def result(rng, dtype):
    """A tensor on the GPU, made there, and its elements."""
    x = ts.tensor(rng.standard_normal((33, 65)).astype(np.float32), dtype)
    y = ts.jit(lambda x: ts.reshape(x, (65, 33)), target="cuda")(x)
    assert y.device == "cuda:0" and y.type == as_type(dtype)
    return y, x.array.reshape(65, 33)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "f64"])
def test_torch_takes_a_result_where_it_lies(dtype, rng):
    torch = pytest.importorskip("torch")
    y, want = result(rng, dtype)
    t = torch.from_dlpack(y)
    assert t.is_cuda and t.data_ptr() == y.memory.pointer and tuple(t.shape) == (65, 33)
    assert t.view(torch.uint8).cpu().numpy().tobytes() == want.tobytes()
    pointer = y.memory.pointer
    del y
    ts.jit(lambda x: x + 1.0, target="cuda")(ts.ones((65, 33)))  # takes no memory that is read
    assert t.data_ptr() == pointer
    assert t.view(torch.uint8).cpu().numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_on_a_stream_of_torchs_own(dtype, rng):
    torch = pytest.importorskip("torch")
    y, want = result(rng, dtype)
    with torch.cuda.stream(torch.cuda.Stream()):
        t = torch.from_dlpack(y).clone()
    torch.cuda.synchronize()
    assert t.view(torch.uint8).cpu().numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_cupy_takes_a_result_both_ways(dtype, rng):
    cupy = pytest.importorskip("cupy")
    y, want = result(rng, dtype)
    for taken in (cupy.from_dlpack(y), cupy.asarray(y)):
        assert taken.data.ptr == y.memory.pointer
        assert cupy.asnumpy(taken).tobytes() == want.tobytes()


def test_the_interface_refuses_what_it_has_no_name_for(rng):
    y, _ = result(rng, "bf16")
    with pytest.raises(AttributeError, match="has no bf16: use DLPack"):
        _ = y.__cuda_array_interface__


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_jax_takes_a_result(dtype, rng):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    y, want = result(rng, dtype)
    assert np.asarray(jax.dlpack.from_dlpack(y)).tobytes() == want.tobytes()


def test_on_the_host_where_that_is_asked_for(rng):
    y, want = result(rng, "f32")
    assert np.from_dlpack(y, device="cpu").tobytes() == want.tobytes()
