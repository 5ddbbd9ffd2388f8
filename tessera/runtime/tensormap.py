"""TMA descriptors: made once for each (array, box) and kept in device memory.

    at = tensor_map(array, box=(128, 64))          # address of the 128 bytes, for tma.load

The box is a tile of rows; its innermost extent must fit the swizzle's width (64 columns of bf16 for
128 bytes). Rules and limits: CUDA driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError, DTypeError
from ..lazy_dataclass import dataclass
from ..numerics import row_bytes, uint8
from . import libcuda
from .arrays import Array, dense_strides
from .buffer import DeviceBuffer
from .device import check, device, driver
from .generations import TensorCopies

MAP_BYTES = 128
SLAB_MAPS = 512  # descriptors of one allocation
KEPT = 4096  # per process; the least recently used slots are written anew
ALIGNMENT_BYTES, MOST_BOX = TensorCopies.alignment_bytes, TensorCopies.most_box
MOST_STRIDE_BYTES = 1 << 40

# Name of the element type; packed and fp8 types travel as bytes, tf32 is rounded by the copy.
TYPES = {
    "bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT32", "tf32": "TFLOAT32", "f64": "FLOAT64",
    "fp8_e4m3": "UINT8", "fp8_e5m2": "UINT8", "int8": "UINT8", "uint8": "UINT8",
    "int16": "UINT16", "uint16": "UINT16", "int32": "INT32", "uint32": "UINT32",
    "int64": "INT64", "uint64": "UINT64", "bool_": "UINT8",
}

Key = tuple[Any, ...]


@dataclass(frozen=True)
class ImageWindows:
    """Copies of an array [N, H, W, C] that unfold it: rows are pixels, one from each window.

    first, last: (h, w) of the box in which windows begin: its first pixel, counted from the
    image's first, and its last, counted from the image's last.   stride: from window to window
    """

    first: tuple[int, int]
    last: tuple[int, int]
    stride: tuple[int, int]


def check_box(array: Array, name: str, box: tuple[int, ...], swizzle_bytes: int) -> None:
    """Raise ArgumentError or DTypeError, in the user's words, for what TMA cannot copy."""
    if array.dtype.name not in TYPES:
        raise DTypeError(f"argument {name} is {array.dtype}, which TMA does not copy",
                         hint=f"types: {', '.join(TYPES)}")
    item = array.dtype.numpy.itemsize
    if not 1 <= len(array.shape) <= 5 or len(box) != len(array.shape):
        raise ArgumentError(f"argument {name} has shape {array.shape}, its box is {box}",
                            hint="one to five axes, and one extent of the box for each")
    if array.pointer % ALIGNMENT_BYTES:
        raise ArgumentError(f"argument {name} begins at {array.pointer:#x}, TMA needs a multiple "
                            f"of {ALIGNMENT_BYTES}", hint="pass a copy, not an offset view")
    if array.strides[-1] != 1 and array.shape[-1] > 1:
        raise ArgumentError(f"argument {name} has strides {array.strides}: its last axis is not "
                            "contiguous", hint="pass a contiguous copy")
    for axis, stride in enumerate(array.strides[:-1]):
        nbytes = stride * item
        if nbytes % ALIGNMENT_BYTES or not 0 <= nbytes < MOST_STRIDE_BYTES:
            raise ArgumentError(
                f"argument {name}: rows of axis {axis} are {nbytes} bytes apart, TMA needs a "
                f"multiple of {ALIGNMENT_BYTES}",
                hint=f"inner extents must be multiples of {ALIGNMENT_BYTES // item} elements")
    if any(not 1 <= extent <= MOST_BOX for extent in box):
        raise ArgumentError(f"the box {box} of {name} has an extent outside 1..{MOST_BOX}")
    inner = box[-1] * item
    if inner % ALIGNMENT_BYTES or (swizzle_bytes and inner > swizzle_bytes):
        raise ArgumentError(
            f"the box {box} of {name} has rows of {inner} bytes",
            hint=f"a multiple of {ALIGNMENT_BYTES}, at most {swizzle_bytes or 'any'} (the swizzle)")


class _Store:
    """The descriptors of one device: slots in slabs of device memory, least recently used first.

    A slot that a captured graph reads is never written anew: the graph may be replayed at any time.
    """

    def __init__(self, index: int):
        self._device = device(index)
        self._slots: OrderedDict[Key, int] = OrderedDict()
        self._pinned: dict[Key, int] = {}
        self._free: list[int] = []
        self._slabs: list[DeviceBuffer] = []
        self.rewritten = 0  # how often slots were given to other arrays
        self._lock = threading.Lock()

    def get(self, key: Key, encode: Any, pinned: bool) -> int:
        with self._lock:
            at = self._pinned.get(key) or self._slots.get(key)
            if at is None:
                with self._device.current():
                    at = self._slot(pinned)
                    self._write(at, encode())
                self._slots[key] = at
            elif key not in self._pinned:
                self._slots.move_to_end(key)
            if pinned and key not in self._pinned:
                self._pinned[key] = self._slots.pop(key)
            return at

    def _slot(self, captured: bool) -> int:
        """A free slot. A reused one may still be read by a kernel, so that is waited for: not where
        a launch is captured, whose stream is no work that ends."""
        if not self._free and len(self._slots) >= KEPT and not captured:
            self._device.synchronize()
            self.rewritten += 1
            for _ in range(SLAB_MAPS):
                self._free.append(self._slots.popitem(last=False)[1])
        if not self._free:
            slab = DeviceBuffer((SLAB_MAPS + 1) * MAP_BYTES, self._device)
            self._slabs.append(slab)
            first = -(-slab.pointer // MAP_BYTES) * MAP_BYTES
            self._free = [first + i * MAP_BYTES for i in range(SLAB_MAPS)]
        return self._free.pop()

    def _write(self, at: int, content: bytes) -> None:
        slab = next(s for s in self._slabs if s.pointer <= at < s.pointer + s.nbytes)
        slab.write(np.frombuffer(content, np.uint8), at - slab.pointer)


_stores: dict[int, _Store] = {}
_lock = threading.Lock()


def _store(index: int) -> _Store:
    if index in _stores:
        return _stores[index]
    with _lock:
        if index not in _stores:
            _stores[index] = _Store(index)
        return _stores[index]


def tensor_map(array: Array, name: str = "x", *, box: tuple[int, ...], swizzle_bytes: int = 128,
               promotion_bytes: int = 128, pinned: bool = False,
               windows: ImageWindows | None = None) -> int:
    """Device address of the descriptor for tiles `box` of `array`, of bytes where its type is
    packed; outside reads as zero.

    pinned: it stays there for the life of the process, as a launch that is captured needs.

    promotion_bytes: what L2 fetches at least; more is fetched in vain past the ends of rows that
    are no multiple of it.
    windows: images are unfolded, and the box is (pixels, channels).
    A box of one axis more is (panels, rows, columns) of an array whose rows are of whole panels.
    Raises as check_box, and DeviceError with the driver's words.
    """
    if array.dtype.packed:
        shape = (*array.shape[:-1], row_bytes(array.shape[-1], array.dtype))
        array = replace(array, shape=shape, strides=dense_strides(shape), dtype=uint8)
    if windows is None and len(box) == len(array.shape) + 1:
        array = _in_panels(array, box[-1])
    key = (array.pointer, array.shape, array.strides, array.dtype.name, box, swizzle_bytes,
           promotion_bytes, windows)

    def encode() -> bytes:
        if windows is not None:
            check_box(array, name, (1, 1, *box), swizzle_bytes)
            return _encode_windows(array, box, windows, swizzle_bytes, promotion_bytes)
        check_box(array, name, box, swizzle_bytes)
        return _encode(array, box, swizzle_bytes, promotion_bytes)

    return _store(array.device).get(key, encode, pinned)


def _in_panels(array: Array, columns: int) -> Array:
    """An array with an axis of panels of so many columns in front: [K / columns, M, columns]."""
    (*rows, last), (*strides, one) = array.shape, array.strides
    return replace(array, shape=(last // columns, *rows, columns), strides=(columns, *strides, one))


def rewritten(index: int) -> int:
    """How often slots of a device were given to other arrays: what was known of them is old."""
    return _store(index).rewritten


def _encode_windows(array: Array, box: tuple[int, ...], windows: ImageWindows, swizzle_bytes: int,
                    promotion_bytes: int) -> bytes:
    """The driver counts axes from the innermost: corners are (w, h)."""
    (pixels, channels), rank = box, len(array.shape)
    words, halves, pair = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank, ctypes.c_int * (rank - 2)
    memory, at = _room()
    answer = driver().cuTensorMapEncodeIm2col(
        at, libcuda.TENSOR_MAP_TYPES[TYPES[array.dtype.name]], rank, array.pointer,
        words(*reversed(array.shape)), (ctypes.c_uint64 * (rank - 1))(*_strides_bytes(array)),
        pair(*reversed(windows.first)), pair(*reversed(windows.last)), channels, pixels,
        halves(1, *reversed(windows.stride), 1), 0,
        libcuda.TENSOR_MAP_SWIZZLES[swizzle_bytes], libcuda.TENSOR_MAP_PROMOTIONS[promotion_bytes],
        0)
    check(answer, f"describe windows {windows} of an array {array.shape} of {array.dtype}")
    return ctypes.string_at(at, MAP_BYTES)


def _room() -> tuple[Any, int]:
    """Memory for a descriptor, and where in it one is written: at a multiple of 64 bytes."""
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    return memory, -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES


def _encode(array: Array, box: tuple[int, ...], swizzle_bytes: int, promotion_bytes: int) -> bytes:
    rank = len(box)
    memory, at = _room()
    words, halves = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*_strides_bytes(array))
    answer = driver().cuTensorMapEncodeTiled(
        at, libcuda.TENSOR_MAP_TYPES[TYPES[array.dtype.name]], rank, array.pointer,
        words(*reversed(array.shape)), strides, halves(*reversed(box)), halves(*(1,) * rank),
        0,  # not interleaved
        libcuda.TENSOR_MAP_SWIZZLES[swizzle_bytes], libcuda.TENSOR_MAP_PROMOTIONS[promotion_bytes],
        0)  # zeros outside of the array
    check(answer, f"describe tiles {box} of an array {array.shape} of {array.dtype}")
    return ctypes.string_at(at, MAP_BYTES)


def _strides_bytes(array: Array) -> list[int]:
    """Bytes from row to row, innermost first.

    One axis has no rows, but no strides at all would be passed as a null pointer, which the driver
    refuses: it gets one that it does not use, the length rounded up.
    """
    item = array.dtype.numpy.itemsize
    if len(array.shape) == 1:
        return [-(-array.shape[0] * item // ALIGNMENT_BYTES) * ALIGNMENT_BYTES]
    return [s * item for s in reversed(array.strides[:-1])]
