"""Arrays of any library as pointer, shape, strides and type: Tensor, NumPy, CuPy, torch, JAX, and
whatever offers `__cuda_array_interface__` or DLPack.

    view = read_array(x, "x")        # Array(pointer, shape, strides, dtype, device, library, owner)
    place_of(x)                      # a GPU's number, HOST, or None: no array

Readers are chosen by the name of the class, so no library is imported to recognise its arrays.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, DTypeError, ShapeError
from ..lazy_dataclass import dataclass
from ..numerics import DType, dtype_of_numpy, find_dtype, stored_bytes
from . import dlpack

HOST = -1  # device number of host memory


@dataclass(slots=True)
class Array:
    """Where an array lies. strides are in elements; `device` is a GPU's number or HOST; stream: the
    one on which its elements are made, where the array says it."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: int
    library: str
    owner: Any
    writable: bool = True
    stream: int = 0

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps; the stride of an axis of extent 1 does not matter."""
        if self.strides == dense_strides(self.shape) or 0 in self.shape:
            return True
        return all(got == dense or extent == 1 for got, dense, extent in
                   zip(self.strides, dense_strides(self.shape), self.shape, strict=True))

    @property
    def nbytes(self) -> int:
        """Of its elements; packed ones take whole bytes per row."""
        return stored_bytes(self.shape, self.dtype)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def overlap(places: Sequence[tuple[int, int]], written: Sequence[bool] | None = None) -> set[int]:
    """Those of (address, bytes), by number, that share a byte with another; with `written`, where
    one of the two is written."""
    known = sorted(p for p in places if p[1])
    if not any(at + size > then for (at, size), (then, _) in itertools.pairwise(known)):
        return set()
    each = enumerate(zip(places, written or [True] * len(places), strict=True))
    return {n for (i, ((at, size), w)), (j, ((then, more), v)) in itertools.combinations(each, 2)
            if (w or v) and size and more and at < then + more and then < at + size
            for n in (i, j)}


Reader = Callable[[Any, str], Array]


@dataclass(frozen=True)
class Face:
    """How the arrays of one library are read.

    place: array -> where it lies. pointer, facts: expressions over `{}` for launches that were seen
    before: they cost less than a whole Array. Equal facts: equal shape, strides, type and device.
    """

    read: Reader
    place: Callable[[Any], int]
    pointer: str = ""
    facts: tuple[str, ...] = ()
    library: str = ""

    @functools.cached_property
    def address(self) -> Callable[[Any], int] | None:
        """array -> its pointer, where that costs less than reading all of it."""
        return eval(f"lambda x: {self.pointer.format('x')}") if self.pointer else None  # noqa: S307


FACES: dict[str, Face] = {}  # by qualified class name
_by_class: dict[type, Face | None] = {}


def reader(*classes: type | str, place: Callable[[Any], int] = lambda x: HOST, pointer: str = "",
           facts: tuple[str, ...] = ()) -> Callable[[Reader], Reader]:
    """Registers a reader for these classes and for their subclasses; those that are not imported
    here, of other libraries and of modules above, by their qualified names."""
    def declare(read: Reader) -> Reader:
        for cls in classes:
            name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            if name in FACES:
                raise ArgumentError(f"a reader for {name} is declared twice")
            FACES[name] = Face(read, place, pointer, facts, name.partition(".")[0])
        return read

    return declare


def face_of(cls: type) -> Face | None:
    """How instances of a class are read; None: they are no arrays."""
    if cls not in _by_class:
        _by_class[cls] = _lookup(cls)
    return _by_class[cls]


def read_array(value: Any, name: str) -> Array:
    """`value` as an Array. Raises ArgumentError naming the argument when it is no array."""
    face = face_of(type(value))
    if face is None:
        raise ArgumentError(
            f"argument {name} is a {type(value).__name__}, which is no array",
            hint="Tensor, NumPy, CuPy, torch and JAX arrays are accepted, and whatever offers "
                 "__cuda_array_interface__ or __dlpack__",
        )
    return face.read(value, name)


def is_array(value: Any) -> bool:
    return face_of(type(value)) is not None


def place_of(value: Any) -> int | None:
    """The number of the GPU on which an array lies, HOST, or None for what is no array."""
    face = face_of(type(value))
    return None if face is None else face.place(value)


def _lookup(cls: type) -> Face | None:
    for base in cls.__mro__:
        if found := FACES.get(f"{base.__module__}.{base.__qualname__}"):
            return found
    if hasattr(cls, "__cuda_array_interface__"):
        return _INTERFACE
    return _DLPACK if hasattr(cls, "__dlpack__") else None


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


@reader(np.ndarray)
def read_numpy(x: Any, name: str) -> Array:
    return Array(x.ctypes.data, x.shape, _element_strides(x.strides, x.shape, x.itemsize, name),
                 _numpy_type(x.dtype, name), HOST, "numpy", x, bool(x.flags.writeable))


@reader("tessera.tensor.Tensor")
def read_tensor(x: Any, name: str) -> Array:
    """The buffer as it lies in memory, packed rows for types under 8 bits."""
    array = read_numpy(x.buffer, name)
    array.dtype, array.owner, array.library = x.type.dtype, x, "tessera"
    return array


@reader("cupy.ndarray", "cupy._core.core.ndarray", place=lambda x: x.device.id,
        pointer="{}.data.ptr", facts=("{}.shape", "{}.strides", "{}.dtype", "{}.data.device_id"))
def read_cupy(x: Any, name: str) -> Array:
    return Array(x.data.ptr, x.shape, _element_strides(x.strides, x.shape, x.itemsize, name),
                 _numpy_type(x.dtype, name), x.device.id, "cupy", x)


_TORCH_TYPES: dict[Any, DType] = {}


@reader("torch.Tensor", place=lambda x: x.get_device(),  # -1 for the CPU
        pointer="{}.data_ptr()",
        facts=("{}.shape", "{}.is_contiguous()", "{}.dtype", "{}.get_device()"))
def read_torch(x: Any, name: str) -> Array:
    dtype = _TORCH_TYPES.get(x.dtype)
    if dtype is None:
        dtype = _TORCH_TYPES[x.dtype] = _torch_type(x.dtype, name)
    return Array(x.data_ptr(), tuple(x.shape), x.stride(), dtype, x.get_device(), "torch", x)


def _torch_type(dtype: Any, name: str) -> DType:
    word = str(dtype).removeprefix("torch.")
    spelled = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "bool": "bool_"}
    try:
        return find_dtype(spelled.get(word, word))
    except DTypeError as error:
        raise DTypeError(f"argument {name} has the type torch.{word}", hint=error.hint) from None


def _place_of_jax(x: Any) -> int:
    (where,) = x.devices()
    return where.local_hardware_id if where.platform in ("gpu", "cuda") else HOST


@reader("jaxlib._jax.ArrayImpl", "jaxlib.xla_extension.ArrayImpl", place=_place_of_jax)
def read_jax(x: Any, name: str) -> Array:
    """JAX arrays are immutable: kernels may read them. Waits until the array is computed."""
    x.block_until_ready()
    return Array(x.unsafe_buffer_pointer(), x.shape, dense_strides(x.shape),
                 _numpy_type(np.dtype(x.dtype), name), _place_of_jax(x), "jax", x, writable=False)


def read_interface(x: Any, name: str) -> Array:
    """`__cuda_array_interface__` of any version."""
    facts = x.__cuda_array_interface__
    dtype = np.dtype(facts["typestr"])
    pointer, read_only = facts["data"]
    shape = tuple(facts["shape"])
    strides = _element_strides(facts.get("strides"), shape, dtype.itemsize, name)
    return Array(pointer, shape, strides,
                 _numpy_type(dtype, name), device_of_pointer(pointer), type(x).__module__, x,
                 not read_only, facts.get("stream") or 0)


def read_dlpack(x: Any, name: str) -> Array:
    """DLPack; on a GPU behind what the producer launched before, for work on the default stream."""
    if _place_of_dlpack(x) == HOST:
        array = read_numpy(dlpack.imported(x), name)
        array.library, array.owner = type(x).__module__, (x, array.owner)
        return array
    m = dlpack.imported_memory(x)
    return Array(m.pointer, m.shape, m.strides, m.dtype, m.device[1], type(x).__module__,
                 (x, m.owner), not m.read_only)


# Type of the device: DLPack 1.1, DLDeviceType kDLCUDA and kDLCUDAManaged; others are the host's.
_ON_CUDA = (2, 13)


def _place_of_dlpack(x: Any) -> int:
    kind, number = x.__dlpack_device__()
    return number if kind in _ON_CUDA else HOST


_INTERFACE = Face(read_interface,
                  lambda x: device_of_pointer(x.__cuda_array_interface__["data"][0]))
_DLPACK = Face(read_dlpack, _place_of_dlpack)


def device_of_pointer(pointer: int) -> int:
    from .device import check, driver
    from .libcuda import POINTER_DEVICE_ORDINAL

    if not pointer:
        return 0
    return check(driver().cuPointerGetAttribute(POINTER_DEVICE_ORDINAL, pointer),
                 "find an array's device")


def _place_text(device: int) -> str:
    return "in host memory" if device == HOST else f"on cuda:{device}"


def current_stream(library: str, device: int) -> int:
    """The stream on which a library works now; those without streams use the default one."""
    return stream_of(library)(device)


def stream_of(library: str) -> Callable[[int], int]:
    """The function that gives a library's current stream on a device."""
    if library == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream
    if library == "cupy":
        current = sys.modules["cupy"].cuda.get_current_stream
        return lambda device: current(device).ptr
    return lambda device: 0
