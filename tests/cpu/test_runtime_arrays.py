"""Arrays of any library read as pointer, shape, strides and type."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.numerics import all_dtypes, f32
from tessera.runtime import arrays
from tessera.runtime.arrays import HOST, dense_strides, is_array, overlap, read_array


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16,
                                   ml_dtypes.float8_e4m3fn])
def test_numpy(dtype):
    x = np.zeros((4, 6), dtype)[1:, ::2]
    found = read_array(x, "x")
    assert found.pointer == x.ctypes.data and found.shape == (3, 3) and found.strides == (6, 2)
    assert found.dtype.numpy == x.dtype and found.device == HOST and found.writable
    assert not found.contiguous and read_array(x.copy(), "x").contiguous


def test_strides_that_are_no_elements():
    x = np.zeros(4, np.dtype([("a", np.int8), ("b", np.float32)]))["b"]
    with pytest.raises(ShapeError, match="argument x has strides"):
        read_array(x, "x")


def test_a_type_we_do_not_have():
    with pytest.raises(DTypeError, match="argument z: NumPy type complex64"):
        read_array(np.zeros(2, np.complex64), "z")


@pytest.mark.parametrize("dtype", [d for d in all_dtypes() if d.kind == "float"], ids=str)
def test_a_tensor_is_its_buffer(dtype):
    x = ts.tensor(np.ones((3, 5)), dtype)
    found = read_array(x, "x")
    assert found.pointer == x.buffer.ctypes.data and found.dtype is dtype
    assert found.shape == x.buffer.shape and found.library == "tessera"


class Foreign:
    """An array of a library that we have never heard of."""

    def __init__(self, strides=None, typestr="<f4", read_only=False):
        self.facts = {"shape": (2, 3), "typestr": typestr, "data": (1 << 20, read_only),
                      "strides": strides, "version": 3}

    @property
    def __cuda_array_interface__(self):
        return self.facts


def test_the_cuda_array_interface(monkeypatch):
    monkeypatch.setattr(arrays, "device_of_pointer", lambda pointer: 2)
    found = read_array(Foreign(), "x")
    assert (found.pointer, found.shape, found.strides) == (1 << 20, (2, 3), (3, 1))
    assert found.dtype is f32 and found.device == 2 and found.writable
    assert read_array(Foreign((4, 8)), "x").strides == (1, 2)
    assert not read_array(Foreign(read_only=True), "x").writable


def test_what_is_no_array():
    assert is_array(np.zeros(2)) and not is_array([1, 2]) and not is_array("abc")
    with pytest.raises(ArgumentError, match="argument rows is a list, which is no array") as caught:
        read_array([1, 2], "rows")
    assert "torch" in caught.value.hint


@pytest.mark.parametrize("shape, strides", [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1))])
def test_dense_strides(shape, strides):
    assert dense_strides(shape) == strides


def test_a_reader_is_declared_once():
    with pytest.raises(ArgumentError, match="declared twice"):
        arrays.reader("numpy.ndarray")(arrays.read_numpy)


OURS = [name for name in arrays.FACES if name.split(".")[0] in ("tessera", "numpy")]


@pytest.mark.parametrize("name", OURS)
def test_a_class_that_a_reader_names_exists(name):
    """A class that was renamed would be read as a stranger, through DLPack."""
    module, _, cls = name.rpartition(".")
    assert arrays.face_of(getattr(importlib.import_module(module), cls)) is arrays.FACES[name]


def test_arrays_that_are_only_read_may_share_memory():
    places = [(0, 16), (8, 16), (64, 16)]
    assert overlap(places) and not overlap(places[1:])
    assert not overlap(places, [False, False, True])
    assert overlap(places, [True, False, False]) and overlap(places, [False, True, False])
    assert not overlap([(0, 0), (0, 16)], [True, True])  # of no bytes
