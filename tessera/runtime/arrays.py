"""Arrays of any library as pointer, shape, strides and type: Tensor, NumPy, CuPy, torch, JAX, and
whatever offers `__cuda_array_interface__` or DLPack.

    view = read_array(x, "x")        # Array(pointer, shape, strides, dtype, device, library, owner)

Readers are chosen by the name of the class, so no library is imported to recognise its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, DTypeError, ShapeError
from ..numerics import DType, dtype_of_numpy, find_dtype

HOST = -1  # device number of host memory


@dataclass(slots=True)
class Array:
    """Where an array lies. strides are in elements; `device` is a GPU's number or HOST."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: int
    library: str
    owner: Any
    writable: bool = True

    @property
    def contiguous(self) -> bool:
        return self.strides == dense_strides(self.shape) or 0 in self.shape


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


Reader = Callable[[Any, str], Array]
READERS: dict[str, Reader] = {}  # qualified class name -> reader
_by_class: dict[type, Reader] = {}


def reader(*names: str) -> Callable[[Reader], Reader]:
    """Registers a reader for classes of these qualified names and for their subclasses."""
    def declare(read: Reader) -> Reader:
        for name in names:
            if name in READERS:
                raise ArgumentError(f"a reader for {name} is declared twice")
            READERS[name] = read
        return read

    return declare


def read_array(value: Any, name: str) -> Array:
    """`value` as an Array. Raises ArgumentError naming the argument when it is no array."""
    cls = type(value)
    if cls not in _by_class:
        _by_class[cls] = _find(cls, name)
    return _by_class[cls](value, name)


def is_array(value: Any) -> bool:
    return type(value) in _by_class or _lookup(type(value)) is not None


def _lookup(cls: type) -> Reader | None:
    for base in cls.__mro__:
        if found := READERS.get(f"{base.__module__}.{base.__qualname__}"):
            return found
    if hasattr(cls, "__cuda_array_interface__"):
        return read_interface
    return read_dlpack if hasattr(cls, "__dlpack__") else None


def _find(cls: type, name: str) -> Reader:
    found = _lookup(cls)
    if found is None:
        raise ArgumentError(
            f"argument {name} is a {cls.__name__}, which is no array",
            hint="Tensor, NumPy, CuPy, torch and JAX arrays are accepted, and whatever offers "
                 "__cuda_array_interface__ or __dlpack__",
        )
    return found


def _element_strides(strides: tuple[int, ...] | None, shape: tuple[int, ...], itemsize: int,
                     name: str) -> tuple[int, ...]:
    """Byte strides -> element strides."""
    if strides is None:
        return dense_strides(shape)
    if any(s % itemsize for s in strides):
        raise ShapeError(f"argument {name} has strides of {strides} bytes, and elements of "
                         f"{itemsize}", hint="pass a copy with whole-element strides")
    return tuple(s // itemsize for s in strides)


def _numpy_type(dtype: np.dtype, name: str) -> DType:
    try:
        return dtype_of_numpy(dtype)
    except DTypeError as error:
        raise DTypeError(f"argument {name}: {error.message}", hint=error.hint) from None


@reader("numpy.ndarray")
def read_numpy(x: Any, name: str) -> Array:
    return Array(x.ctypes.data, x.shape, _element_strides(x.strides, x.shape, x.itemsize, name),
                 _numpy_type(x.dtype, name), HOST, "numpy", x, bool(x.flags.writeable))


@reader("tessera.tensor.Tensor")
def read_tensor(x: Any, name: str) -> Array:
    """The buffer as it lies in memory, packed rows for types under 8 bits."""
    array = read_numpy(x.buffer, name)
    array.dtype, array.owner, array.library = x.type.dtype, x, "tessera"
    return array


@reader("cupy.ndarray", "cupy._core.core.ndarray")
def read_cupy(x: Any, name: str) -> Array:
    return Array(x.data.ptr, x.shape, _element_strides(x.strides, x.shape, x.itemsize, name),
                 _numpy_type(x.dtype, name), x.device.id, "cupy", x)


_TORCH_TYPES: dict[Any, DType] = {}


@reader("torch.Tensor")
def read_torch(x: Any, name: str) -> Array:
    dtype = _TORCH_TYPES.get(x.dtype)
    if dtype is None:
        dtype = _TORCH_TYPES[x.dtype] = _torch_type(x.dtype, name)
    where = x.get_device()  # -1 for the CPU
    return Array(x.data_ptr(), tuple(x.shape), x.stride(), dtype, where, "torch", x)


def _torch_type(dtype: Any, name: str) -> DType:
    word = str(dtype).removeprefix("torch.")
    spelled = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "bool": "bool_"}
    try:
        return find_dtype(spelled.get(word, word))
    except DTypeError as error:
        raise DTypeError(f"argument {name} has the type torch.{word}", hint=error.hint) from None


@reader("jaxlib._jax.ArrayImpl", "jaxlib.xla_extension.ArrayImpl")
def read_jax(x: Any, name: str) -> Array:
    """JAX arrays are immutable: kernels may read them. Waits until the array is computed."""
    x.block_until_ready()
    (where,) = x.devices()
    number = where.local_hardware_id if where.platform in ("gpu", "cuda") else HOST
    return Array(x.unsafe_buffer_pointer(), x.shape, dense_strides(x.shape),
                 _numpy_type(np.dtype(x.dtype), name), number, "jax", x, writable=False)


def read_interface(x: Any, name: str) -> Array:
    """`__cuda_array_interface__` of any version."""
    facts = x.__cuda_array_interface__
    dtype = np.dtype(facts["typestr"])
    pointer, read_only = facts["data"]
    shape = tuple(facts["shape"])
    strides = _element_strides(facts.get("strides"), shape, dtype.itemsize, name)
    return Array(pointer, shape, strides,
                 _numpy_type(dtype, name), device_of_pointer(pointer), type(x).__module__, x,
                 not read_only)


def read_dlpack(x: Any, name: str) -> Array:
    """DLPack, through cuda-core's view of it; the producer is asked not to synchronise."""
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(x, stream_ptr=-1)
    strides = view.strides or dense_strides(view.shape)
    number = view.device_id if view.is_device_accessible else HOST
    return Array(view.ptr, tuple(view.shape), tuple(strides), _numpy_type(view.dtype, name),
                 number, type(x).__module__, (x, view), not view.readonly)


def device_of_pointer(pointer: int) -> int:
    from .device import check, driver

    if not pointer:
        return 0
    bindings = driver()
    ordinal = bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(bindings.cuPointerGetAttribute(ordinal, pointer), "find an array's device"))


def check_array(array: Array, name: str, *, dtype: DType | None = None, ndim: int | None = None,
                device: int | None = None, written: bool = False, alignment_bytes: int = 1) -> None:
    """Raise for what a kernel cannot take: DTypeError, ShapeError or ArgumentError by `name`."""
    if dtype is not None and array.dtype is not dtype:
        raise DTypeError(f"argument {name} is {array.dtype}, the kernel takes {dtype}",
                         hint="convert it before the call")
    if ndim is not None and len(array.shape) != ndim:
        raise ShapeError(f"argument {name} has shape {array.shape}, the kernel takes {ndim} axes")
    if device is not None and array.device != device:
        raise ArgumentError(
            f"argument {name} lies {_place(array.device)}, the kernel runs on cuda:{device}",
            hint="move it there first")
    if written and not array.writable:
        raise ArgumentError(f"argument {name} is read-only ({array.library}), the kernel writes it",
                            hint="pass an array that may be written")
    if array.pointer % alignment_bytes:
        raise ArgumentError(f"argument {name} begins at {array.pointer:#x}, which is not aligned "
                            f"to {alignment_bytes} bytes", hint="pass a copy, not an offset view")


def _place(device: int) -> str:
    return "in host memory" if device == HOST else f"on cuda:{device}"


def current_stream(library: str, device: int) -> int:
    """The stream on which a library works now; those without streams use the default one."""
    if library == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0
