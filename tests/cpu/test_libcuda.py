"""The driver through ctypes: what is passed and given back, and the layout of its records."""

from __future__ import annotations

import ctypes
import re

import pytest

from tessera.errors import ArgumentError
from tessera.runtime import libcuda
from tessera.runtime.libcuda import (
    FUNCTIONS,
    DriverFunction,
    LaunchAttribute,
    LaunchConfig,
    Library,
)


class Symbol:
    """A function of a library, in Python; it gets what ctypes would pass."""

    def __init__(self, run):
        self.run, self.argtypes = run, None

    def __call__(self, *given):
        assert self.argtypes is not None and len(given) == len(self.argtypes)
        return self.run(*given)


def library(**symbols) -> Library:
    return Library({"cuLaunchKernelEx": None, **{n: Symbol(f) for n, f in symbols.items()}})


def test_what_is_given_back_follows_the_status():
    def alloc(out, nbytes):
        assert nbytes == 4096
        out._obj.value = 2**47 + 256
        return 0

    made = library(cuMemAlloc_v2=alloc)
    assert made.cuMemAlloc(4096) == (0, 2**47 + 256)
    assert made.cuMemAlloc(4096)[1] == 2**47 + 256  # bound once, called again


def test_a_null_pointer_is_zero_and_a_mode_is_exchanged():
    def exchange(mode):
        assert mode._obj.value == 2
        mode._obj.value = 1
        return 0

    made = library(cuCtxGetCurrent=lambda out: 0, cuThreadExchangeStreamCaptureMode=exchange)
    assert made.cuCtxGetCurrent() == (0, 0)
    assert made.cuThreadExchangeStreamCaptureMode(2) == (0, 1)


def test_wrong_calls_are_refused():
    made = library(cuMemFree_v2=lambda pointer: 0)
    with pytest.raises(TypeError, match=r"cuMemFree takes \(ptr\), is given \(1, 2\)"):
        made.cuMemFree(1, 2)
    with pytest.raises(AttributeError, match="cuGraphClone is not declared"):
        made.cuGraphClone  # noqa: B018
    with pytest.raises(ArgumentError, match="cuMemFree is declared twice"):
        DriverFunction("cuMemFree_v3", "ptr")


def test_records_lie_as_in_the_header():
    """cuda.h 13.0 on 64-bit machines."""
    assert ctypes.sizeof(LaunchConfig) == 56 and ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchConfig.shared_bytes.offset == 24 and LaunchConfig.stream.offset == 32
    assert LaunchConfig.attributes.offset == 40 and LaunchConfig.attribute_count.offset == 48
    assert LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(libcuda.GraphParams) == 32 and libcuda.GraphParams.result.offset == 24


def test_numbers_are_those_of_nvidias_bindings():
    bindings = pytest.importorskip("cuda.bindings.driver")
    named = {name: int(member) for kind in vars(bindings).values()
             if isinstance(kind, type) and hasattr(kind, "__members__")
             for name, member in kind.__members__.items()}
    assert {n: named["CU_DEVICE_ATTRIBUTE_" + n] for n in libcuda.DEVICE_ATTRIBUTES} \
        == libcuda.DEVICE_ATTRIBUTES
    assert {n: named["CU_TENSOR_MAP_DATA_TYPE_" + n] for n in libcuda.TENSOR_MAP_TYPES} \
        == libcuda.TENSOR_MAP_TYPES
    for width, number in libcuda.TENSOR_MAP_SWIZZLES.items():
        assert named[f"CU_TENSOR_MAP_SWIZZLE_{f'{width}B' if width else 'NONE'}"] == number
    for width, number in libcuda.TENSOR_MAP_PROMOTIONS.items():
        assert named[f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{width}B' if width else 'NONE'}"] == number
    prefixes = {"FUNC_": "CU_FUNC_ATTRIBUTE_", "POINTER_": "CU_POINTER_ATTRIBUTE_",
                "STREAM_": "CU_STREAM_", "EVENT_": "CU_EVENT_",
                "MEMPOOL_": "CU_MEMPOOL_ATTR_", "CAPTURE_": "CU_STREAM_CAPTURE_",
                "LAUNCH_": "CU_LAUNCH_ATTRIBUTE_"}
    for ours, theirs in prefixes.items():
        numbers = [n for n in vars(libcuda) if re.match(ours + "[A-Z_]+$", n)]
        assert numbers
        for name in numbers:
            assert named[theirs + name.removeprefix(ours)] == getattr(libcuda, name), name
    for name in ("OUT_OF_MEMORY", "NOT_INITIALIZED", "INVALID_CONTEXT", "INVALID_HANDLE",
                 "CONTEXT_IS_DESTROYED"):
        assert named["CUDA_ERROR_" + name] == getattr(libcuda, name)
    assert libcuda.MEMHOSTALLOC_PORTABLE == bindings.CU_MEMHOSTALLOC_PORTABLE
    assert libcuda.MEMHOSTALLOC_DEVICEMAP == bindings.CU_MEMHOSTALLOC_DEVICEMAP
    missing = [n for n in FUNCTIONS if not hasattr(bindings, n)]
    assert not missing


def test_this_machines_driver_has_every_function():
    try:
        found = libcuda.open_library()
    except OSError:
        pytest.skip("no driver on this machine")
    for name in FUNCTIONS:
        getattr(found, name)
