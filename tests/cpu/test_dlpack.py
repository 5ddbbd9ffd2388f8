"""Tensors given to other libraries and taken from them: bits, types, lifetimes, refusals."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from fake_driver import driver  # noqa: F401  a fixture
from tessera.numerics import as_type
from tessera.runtime import dlpack
from tessera.tensor import Tensor
from tessera.tile.launch.resident import Resident

NUMPY_HAS = ["f64", "f32", "f16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
             "uint8", "bool_"]
OURS = ["bf16", "fp8_e4m3", "fp8_e5m2"]


def drawn(rng, dtype: str, shape=(3, 5)) -> Tensor:
    numeric = as_type(dtype)
    bits = rng.integers(0, 256, (*shape, numeric.dtype.numpy.itemsize), np.uint8)
    if dtype == "bool_":
        return ts.tensor(bits[..., 0] > 99)
    return Tensor(bits.reshape(-1).view(numeric.dtype.numpy).reshape(shape), numeric)


class Exporter:
    """A library's array. versioned=False: from before DLPack 1.0."""

    def __init__(self, x, versioned=True, device=(1, 0)):
        self.x, self.versioned, self.device = x, versioned, device

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument")
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("dtype", NUMPY_HAS)
def test_numpy_takes_a_tensor_without_a_copy(dtype, rng):
    x = drawn(rng, dtype)
    taken = np.from_dlpack(x)
    assert taken.dtype == x.array.dtype and taken.tobytes() == x.array.tobytes()
    assert np.shares_memory(taken, x.array)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", NUMPY_HAS + OURS)
def test_every_type_comes_back_as_it_went(dtype, versioned, rng):
    x = drawn(rng, dtype)
    y = ts.tensor(Exporter(x, versioned), "f64" if dtype == "f64" else None)
    assert y.type == as_type(dtype) and y.array.tobytes() == x.array.tobytes()
    turned = Tensor(x.array.T[::-1], x.type)
    back = dlpack.imported(Exporter(turned, versioned))
    assert back.strides == turned.array.strides and np.shares_memory(back, x.array)
    assert back.tobytes() == turned.array.tobytes()


@pytest.mark.parametrize("dtype", NUMPY_HAS)
def test_numpys_arrays_are_taken_without_a_copy(dtype, rng):
    a = drawn(rng, dtype).array
    taken = dlpack.imported(Exporter(a))
    assert np.shares_memory(a, taken) and taken.dtype == a.dtype
    np.testing.assert_array_equal(taken.view(np.uint8), a.view(np.uint8))


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 1, 3)])
def test_shapes(shape, rng):
    x = drawn(rng, "f32", shape)
    assert np.from_dlpack(x).shape == shape
    assert dlpack.imported(Exporter(drawn(rng, "bf16", shape))).shape == shape


def test_the_memory_lives_as_long_as_it_is_read(rng):
    a = rng.standard_normal((40, 50)).astype(np.float32)
    alive = weakref.ref(a)
    taken = np.from_dlpack(Tensor(a, as_type("f32")))
    want = a.copy()
    del a
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(taken, want)
    del taken
    gc.collect()
    assert alive() is None


def test_what_was_taken_is_given_back_with_the_last_view(rng):
    x = drawn(rng, "bf16")
    alive = weakref.ref(x.array if x.array.base is None else x.array.base)  # owns the memory
    taken = dlpack.imported(Exporter(x))
    part = taken[1:]
    del taken, x
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_nobody_takes_frees_itself(version):
    x = ts.ones(3)
    alive = weakref.ref(x.array)
    capsule = x.__dlpack__(max_version=version)
    del x
    assert alive() is not None
    del capsule
    assert alive() is None


def test_what_a_library_refuses_is_its_own_error():
    """Its deleter runs while that error is on its way."""
    with pytest.raises((RuntimeError, BufferError), match="dtype|type"):
        np.from_dlpack(ts.ones((2,), ts.bf16))


def test_read_only_memory_stays_so():
    a = np.ones(3, np.float32)
    a.flags.writeable = False
    x = Tensor(a, as_type("f32"))
    assert not np.from_dlpack(x).flags.writeable and not dlpack.imported(x).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        x.__dlpack__()
    copied = dlpack.imported(Exporter(ts.ones(3)))
    copied[0] = 5.0


def test_copies_and_other_devices():
    x = ts.ones(3)
    taken = np.from_dlpack(x, copy=True)
    taken[0] = 7.0
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(BufferError, match=r"not on DLPack device \(2, 0\)"):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ts.DTypeError, match="does not pass DLPack: its memory is that of a device"):
        ts.tensor(Exporter(x, device=(10, 0)))


def test_scaled_and_packed_types_are_refused_in_words():
    for x, why in ((ts.tensor([1.0, 2.0], "fp4_e2m1"), "packed, below a byte"),
                   (ts.tensor([1.0, 2.0], 'fp8_e4m3 @scaled("amax")'), "a scaled type")):
        with pytest.raises(ts.DTypeError, match=f"cannot be given to other libraries: it is {why}"
                           ) as info:
            x.__dlpack__()
        assert "ts.cast(x, ts.f32)" in info.value.hint


def test_a_type_that_we_do_not_have():
    with pytest.raises(ts.DTypeError, match="DLPack type code 5 of 64 bits"):
        ts.tensor(Exporter(np.ones(3, np.complex64)))


def test_kernels_take_bf16_of_other_libraries(rng):
    @ts.kernel
    def doubled(x: ts.Tensor["N", ts.bf16], y: ts.Tensor["N", ts.f32]):  # noqa: F821
        y[0:4] = ts.tile.cast(ts.tile.load(x[0:4]), ts.f32) * 2.0

    x, y = rng.standard_normal(4).astype(ml_dtypes.bfloat16), np.zeros(4, np.float32)
    doubled(Exporter(Tensor(x, as_type("bf16"))), y)
    np.testing.assert_array_equal(y, 2 * x.astype(np.float32))


# --- types that others do not have, as bytes ----------------------------------------------------
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (), (2, 0)])
@pytest.mark.parametrize("dtype", ["fp4_e2m1", "fp6_e3m2", "int4", "bf16", "f32", "bool_"])
def test_bytes_there_and_back(dtype, shape, place, driver, rng):  # noqa: F811
    x = ts.tensor(rng.integers(0, 4, shape).astype(np.float32), dtype).to(place)
    raw = ts.as_bytes(x)
    assert raw.type == as_type("uint8") and raw.nbytes == x.nbytes and raw.device == x.device
    assert raw.shape[:-1] == shape[:-1] and raw.array.tobytes() == x.buffer.tobytes()
    back = ts.from_bytes(raw, dtype, shape)
    assert back.type == x.type and back.shape == shape and back.device == x.device
    assert back.buffer.tobytes() == x.buffer.tobytes()
    if x.nbytes:
        assert (back.memory.pointer == x.memory.pointer if place == "cuda" else
                np.shares_memory(back.buffer, x.buffer))
    assert np.from_dlpack(raw.cpu()).tobytes() == raw.array.tobytes()


def test_bytes_that_do_not_fit():
    with pytest.raises(ts.ArgumentError, match=r"int4\[2, 3\] takes 4 bytes, got 5"):
        ts.from_bytes(np.zeros(5, np.uint8), "int4", (2, 3))
    with pytest.raises(ts.ArgumentError, match="takes uint8, got f32"):
        ts.from_bytes(np.zeros(4, np.float32), "int4", (2, 3))
    with pytest.raises(ts.DTypeError) as info:
        ts.ones((2, 4), "fp4_e2m1").__dlpack__()
    assert "ts.as_bytes(x)" in info.value.hint


# --- on a GPU ---------------------------------------------------------------------------------
def fields(capsule, name=dlpack.NEW):
    address = dlpack._api.PyCapsule_GetPointer(id(capsule), name)
    kind = dlpack._Versioned if name == dlpack.NEW else dlpack._Managed
    return kind.from_address(address)


@pytest.mark.parametrize("dtype, code, bits", [
    ("f32", 2, 32), ("f16", 2, 16), ("bf16", 4, 16), ("fp8_e4m3", 10, 8), ("fp8_e5m2", 12, 8),
    ("int32", 0, 32), ("uint8", 1, 8), ("bool_", 6, 8)])
def test_results_on_a_gpu_are_given_where_they_lie(dtype, code, bits, driver, rng):  # noqa: F811
    host = drawn(rng, dtype)
    y = Resident((3, 5), as_type(dtype), 0)
    y.memory.write(host.array)
    assert y.__dlpack_device__() == (2, 0)
    for version, name in (((1, 1), dlpack.NEW), (None, dlpack.OLD)):
        capsule = y.__dlpack__(max_version=version, stream=1)
        t = fields(capsule, name).tensor
        assert (t.data, t.device_type, t.device_id) == (y.memory.pointer, 2, 0)
        assert (t.code, t.bits, t.lanes) == (code, bits, 1)
        assert t.shape[:t.ndim] == [3, 5] and t.strides[:t.ndim] == [5, 1]
    copied = fields(y.__dlpack__(max_version=(1, 1), copy=True))
    assert copied.tensor.data != y.memory.pointer and copied.flags == dlpack.COPIED
    on_host = fields(y.__dlpack__(max_version=(1, 1), dl_device=(1, 0)))
    assert on_host.tensor.device_type == 1


def test_the_memory_of_a_result_is_kept(driver):  # noqa: F811
    y = Resident((3, 5), as_type("bf16"), 0)
    memory = weakref.ref(y.memory)
    capsule = y.__dlpack__(max_version=(1, 1))
    del y
    gc.collect()
    assert memory() is not None
    del capsule
    gc.collect()
    assert memory() is None


def test_other_streams_wait_for_the_gpu(driver, monkeypatch):  # noqa: F811
    """By an event; and what they may still read when they give it back is waited for."""
    y, waits, given = Resident((3,), as_type("f32"), 0), [], []
    monkeypatch.setattr(driver, "cuStreamWaitEvent", lambda stream, event, flags: waits.append(
        (stream, driver.events[event][0])) or (0,))
    for stream, count in ((None, 0), (1, 0), (-1, 0), (2, 1), (4711, 2)):
        given.append(y.__dlpack__(stream=stream))
        assert len(waits) == count and driver.waits == 0
    assert waits == [(2, 0), (4711, 0)]
    del given[:3]
    assert driver.waits == 0
    del given[:]
    assert driver.waits == 2


def test_refusals_on_a_gpu(driver):  # noqa: F811
    y = Resident((3, 5), as_type("bf16"), 0)
    for wanted, copy in (((2, 1), None), ((1, 0), False)):
        with pytest.raises(BufferError, match="lies on cuda:0, not on DLPack device"):
            y.__dlpack__(dl_device=wanted, copy=copy)
    with pytest.raises(ts.DTypeError, match="packed"):
        Resident((3, 5), as_type("fp4_e2m1"), 0).__dlpack__()


@pytest.mark.parametrize("dtype", OURS)
def test_the_cuda_array_interface_names_dlpack_for_what_it_lacks(dtype, driver):  # noqa: F811
    y = Resident((3, 5), as_type(dtype), 0)
    with pytest.raises(AttributeError, match=f"has no {dtype}: use DLPack, torch.from_dlpack"):
        _ = y.__cuda_array_interface__
    assert Resident((3, 5), as_type("f16"), 0).__cuda_array_interface__["typestr"] == "<f2"


# --- other libraries --------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int32", "bool_"])
def test_torch(dtype, rng):
    torch = pytest.importorskip("torch")
    x = drawn(rng, dtype)
    t = torch.from_dlpack(x)
    assert t.data_ptr() == x.array.ctypes.data and tuple(t.shape) == (3, 5)
    back = ts.tensor(t)
    assert back.type == as_type(dtype) and back.array.tobytes() == x.array.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int32", "bool_"])
def test_jax(dtype, rng):
    jax = pytest.importorskip("jax")
    x = drawn(rng, dtype)
    t = jax.dlpack.from_dlpack(x)
    assert np.asarray(t).tobytes() == x.array.tobytes()
    back = ts.tensor(t)
    assert back.type == as_type(dtype) and back.array.tobytes() == x.array.tobytes()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", NUMPY_HAS + OURS)
def test_arrays_on_a_gpu_come_without_a_copy(dtype, versioned, driver, monkeypatch,  # noqa: F811
                                             rng):
    host = drawn(rng, dtype)
    theirs = host.to("cuda")
    memory, asked = weakref.ref(theirs.memory), []
    exporter = Exporter(theirs, versioned, (2, 0))
    if versioned:
        give = theirs.__dlpack__
        exporter.x = type("Asked", (), {"__dlpack__": lambda self, **o: asked.append(o) or give(
            **o)})()
    else:
        monkeypatch.setattr(Exporter, "__dlpack__", lambda self, stream=None: self.x.__dlpack__(
            stream=stream))
    x = ts.from_dlpack(exporter)
    assert x.memory.pointer == theirs.memory.pointer and x.device == "cuda:0"
    assert x.type == as_type(dtype) and x.array.tobytes() == host.array.tobytes()
    assert not asked or (asked[0]["stream"], asked[0]["max_version"]) == (1, dlpack.VERSION)
    copy = ts.tensor(exporter, as_type(dtype))
    assert copy.device == "cuda:0" and copy.memory.pointer != x.memory.pointer
    assert copy.array.tobytes() == host.array.tobytes()
    exporter = theirs = give = None
    gc.collect()
    assert memory() is not None
    del x
    gc.collect()
    assert memory() is None


def test_on_the_host_it_is_the_same_memory(rng):
    a = rng.standard_normal((3, 4)).astype(np.float32)
    x = ts.from_dlpack(a)
    x[0, 0] = 7.0
    assert a[0, 0] == 7.0 and ts.from_dlpack(x) is x


def test_the_stream_of_the_interface_comes_first(driver, monkeypatch, rng):  # noqa: F811
    """And a library whose streams are not known gets its memory back when it has been read."""
    there, waits = rng.standard_normal(4).astype(np.float32), []

    class Theirs:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "version": 3, "strides": None,
                                    "data": (there.ctypes.data, False), "stream": 42}

    monkeypatch.setattr(driver, "cuStreamWaitEvent", lambda stream, event, flags: waits.append(
        (stream, driver.events[event][0])) or (0,))
    x = ts.from_dlpack(Theirs())
    assert waits == [(0, 42)] and driver.waits == 0
    np.testing.assert_array_equal(x.array, there)
    before = driver.waits
    x.memory.give_back()
    assert driver.waits == before + 1
