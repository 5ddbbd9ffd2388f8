"""DLPack: tensors given to other libraries, and taken from them, without a copy.

    capsule = exported(memory, owner, max_version)    # for __dlpack__
    array = imported(x)                               # anything with __dlpack__ in host memory
    memory = imported_memory(x)                       # and on a GPU

Both go through the structures themselves, because NumPy's own exchange knows neither bf16 nor fp8.
Layouts and codes: dlpack.h of DLPack 1.1, github.com/dmlc/dlpack.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Any

import numpy as np

from ..errors import DTypeError
from ..lazy_dataclass import dataclass
from ..numerics import DType, NumericType, find_dtype

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA
HOST_DEVICES = (CPU, 3)  # kDLCUDAHost too
VERSION = (1, 1)
DEFAULT_STREAM = 1  # of CUDA, as DLPack has it: the legacy one
READ_ONLY, COPIED = 1, 2  # flags of a versioned tensor
READ_ONLY_WORDS = ("the tensor is read-only, which the library's DLPack (before 1.0) cannot say: "
                   "give it a copy")
CODES = {"int": 0, "uint": 1, "float": 2, "bool": 6}
SPECIAL = {"bf16": 4, "fp8_e4m3": 10, "fp8_e5m2": 12}  # kDLBfloat, kDLFloat8_e4m3fn, _e5m2
_NAMES = {(code, 16 if name == "bf16" else 8): name for name, code in SPECIAL.items()}


class _Tensor(Structure):
    _fields_ = [("data", c_uint64), ("device_type", c_int32), ("device_id", c_int32),
                ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
                ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_uint64), ("deleter", _Deleter)]


class _Versioned(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_uint64),
                ("deleter", _Deleter), ("flags", c_uint64), ("tensor", _Tensor)]


_api = ctypes.pythonapi
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

OLD, NEW = b"dltensor", b"dltensor_versioned"
USED = {OLD: b"used_dltensor", NEW: b"used_dltensor_versioned"}


# --- giving -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportedMemory:
    """What is given. strides in elements; device: (kind, number)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: tuple[int, int]
    read_only: bool = False
    copied: bool = False


# What another library still reads, by the address of its structure: the structure, its extents and
# the owner of the memory. The library calls the deleter, from any thread.
_given: dict[int, tuple] = {}
_lock = threading.Lock()


@_Deleter
def _delete(address: int) -> None:
    with _lock:
        _given.pop(address, None)


@_Destructor
def _drop(capsule: int) -> None:
    """A capsule that nobody took gives its tensor back."""
    for name in (OLD, NEW):
        if _api.PyCapsule_IsValid(capsule, name):
            _delete(_api.PyCapsule_GetPointer(capsule, name))


def code_of(dtype: DType) -> tuple[int, int]:
    """(code, bits) of a type. Raises DTypeError for those that have none of whole bytes."""
    if dtype.name in SPECIAL:
        return SPECIAL[dtype.name], dtype.bits
    if dtype.packed or dtype.numpy.kind not in "biuf":
        raise DTypeError(f"DLPack has no {dtype} of whole bytes",
                         hint="exchange ts.cast(x, ts.f32), or ts.as_bytes(x), the bytes as uint8")
    return CODES[dtype.kind], 8 * dtype.numpy.itemsize


def exported(memory: ExportedMemory, owner: Any, max_version: tuple[int, int] | None) -> Any:
    """A capsule for `__dlpack__`. owner: kept as long as the other library reads the memory."""
    code, bits = code_of(memory.dtype)
    n = len(memory.shape)
    extents = (c_int64 * max(n, 1))(*memory.shape)
    strides = (c_int64 * max(n, 1))(*memory.strides)
    tensor = _Tensor(memory.pointer, *memory.device, n, code, bits, 1, extents, strides, 0)
    versioned = max_version is not None and max_version[0] >= 1
    made: Any
    if versioned:
        flags = READ_ONLY * memory.read_only | COPIED * memory.copied
        made = _Versioned(*VERSION, 0, _delete, flags, tensor)
    else:
        if memory.read_only:
            raise BufferError(READ_ONLY_WORDS)
        made = _Managed(tensor, 0, _delete)
    address = ctypes.addressof(made)
    with _lock:
        _given[address] = (made, extents, strides, owner)
    return _api.PyCapsule_New(address, NEW if versioned else OLD, _drop)


def exported_array(array: np.ndarray, dtype: DType, *, stream: Any = None,
                   max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
    """A capsule for an array in host memory, with the options of `__dlpack__`.

    It is NumPy's, with the type's code put in: its deleter may run while an error of the library
    that refused it is on its way, which one written in Python would lose.
    """
    if dl_device is not None and tuple(dl_device) != (CPU, 0):
        raise BufferError(f"the tensor lies in host memory, not on DLPack device "
                          f"{tuple(dl_device)}: move it there with that library")
    array = array.copy() if copy else array
    versioned = max_version is not None and max_version[0] >= 1
    if not (versioned or array.flags.writeable):
        raise BufferError(READ_ONLY_WORDS)
    code, _ = code_of(dtype)
    words = array.view(f"u{array.itemsize}") if dtype.name in SPECIAL else array
    capsule = words.__dlpack__(max_version=VERSION if versioned else None)
    name = NEW if versioned else OLD
    address = _api.PyCapsule_GetPointer(id(capsule), name)
    made = (_Versioned if versioned else _Managed).from_address(address)
    made.tensor.code = code
    if isinstance(made, _Versioned):
        made.minor, made.flags = VERSION[1], made.flags | COPIED * bool(copy)
    return capsule


def check_type(numeric: NumericType) -> None:
    """Raise DTypeError for a type that other libraries cannot have."""
    policy = numeric.policy
    scaled = policy.scaled or policy.custom is not None or policy.per_channel is not None
    if scaled or numeric.dtype.packed:
        what = "packed, below a byte an element" if numeric.dtype.packed else "a scaled type"
        raise DTypeError(f"{numeric} cannot be given to other libraries: it is {what}",
                         hint="exchange ts.cast(x, ts.f32), or ts.as_bytes(x), the bytes as uint8")


# --- taking -----------------------------------------------------------------------------------
def imported(x: Any) -> np.ndarray:
    """The elements of anything with `__dlpack__` in host memory, without a copy.

    Raises BufferError for memory elsewhere, DTypeError for a type that is none of ours.
    """
    kind, _ = x.__dlpack_device__()
    if kind not in HOST_DEVICES:
        raise BufferError(f"its memory is that of a device (DLPack kind {kind})")
    made, dtype, address = _open_capsule(x)
    return _viewed(made.tensor, dtype, made, address, _read_only(made))


@dataclass(frozen=True)
class ImportedMemory:
    """Memory of another library on a GPU. strides in elements; owner: gives it back in the end."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: tuple[int, int]
    read_only: bool
    owner: Any


class _Owner:
    """Calls the deleter of what another library gave, with the last who reads it."""


def imported_memory(x: Any, stream: int = DEFAULT_STREAM) -> ImportedMemory:
    """The memory of anything with `__dlpack__` on a GPU, behind what its library launched before,
    for work on a stream. Raises DTypeError for a type that is none of ours."""
    made, dtype, address = _open_capsule(x, stream=stream)
    tensor: _Tensor = made.tensor
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides and tensor.ndim else tuple(
        int(np.prod(shape[i + 1:])) for i in range(len(shape)))
    owner = _Owner()
    if made.deleter:
        weakref.finalize(owner, made.deleter, address)
    return ImportedMemory(tensor.data + tensor.byte_offset, shape, strides, dtype,
                          (tensor.device_type, tensor.device_id), _read_only(made), owner)


def _open_capsule(x: Any, **options: Any) -> tuple[Any, DType, int]:
    """What `__dlpack__` gives, its type and address. The capsule is ours from here on."""
    try:
        capsule = x.__dlpack__(max_version=VERSION, **options)
    except TypeError:  # from before DLPack 1.0
        capsule = x.__dlpack__(**options)
    name = NEW if _api.PyCapsule_IsValid(id(capsule), NEW) else OLD
    address = _api.PyCapsule_GetPointer(id(capsule), name)
    made = (_Versioned if name == NEW else _Managed).from_address(address)
    dtype = _dtype(made.tensor)  # before the capsule is ours: one that is refused frees itself
    _api.PyCapsule_SetName(capsule, USED[name])
    return made, dtype, address


def _read_only(made: Any) -> bool:
    return isinstance(made, _Versioned) and bool(made.flags & READ_ONLY)


def _dtype(tensor: _Tensor) -> DType:
    found = _NAMES.get((tensor.code, tensor.bits))
    if found is None:
        kind = next((k for k, c in CODES.items() if c == tensor.code), "")
        short = "f" if kind == "float" else kind
        found = "bool_" if kind == "bool" else f"{short}{tensor.bits}"
    if tensor.lanes != 1:
        found = f"{found} x {tensor.lanes}"
    try:
        return find_dtype(found)
    except DTypeError:
        raise DTypeError(f"DLPack type code {tensor.code} of {tensor.bits} bits is none of ours",
                         hint="convert it in the library it comes from") from None


def _viewed(tensor: _Tensor, dtype: DType, made: Any, address: int, read_only: bool) -> np.ndarray:
    shape = tuple(tensor.shape[:tensor.ndim])
    item = dtype.numpy.itemsize
    if tensor.strides and tensor.ndim:
        steps = tuple(tensor.strides[:tensor.ndim])
    else:
        steps = tuple(int(np.prod(shape[i + 1:])) for i in range(len(shape)))
    low = sum(min(0, s * (n - 1)) for s, n in zip(steps, shape, strict=True))
    high = sum(max(0, s * (n - 1)) for s, n in zip(steps, shape, strict=True))
    if 0 in shape:
        made.deleter(address) if made.deleter else None
        return np.empty(shape, dtype.numpy)
    start = tensor.data + tensor.byte_offset + low * item
    raw = (ctypes.c_char * ((high - low + 1) * item)).from_address(start)
    if made.deleter:  # called when the last array over this memory has gone
        weakref.finalize(raw, made.deleter, address)
    out = np.ndarray(shape, dtype.numpy, raw, -low * item, tuple(s * item for s in steps))
    out.flags.writeable = not read_only
    return out


__all__ = ["CPU", "CUDA", "ExportedMemory", "SPECIAL", "VERSION", "check_type", "exported",
           "exported_array", "imported", "imported_memory"]
