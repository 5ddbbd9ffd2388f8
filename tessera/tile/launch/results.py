"""Results of kernels on a GPU: arrays of the library that the arguments came from, and numbers.

    make = maker("torch", (64, 32), bf16, device=0)
    out = make(stream)                 # Output(array, pointer)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np

from tessera.errors import DTypeError, user_line
from tessera.numerics import DType, NumericType, decode, stored_bytes
from tessera.runtime.buffer import MappedMemory, PooledBuffer
from tessera.runtime.device import check, device, driver

from ...lazy_dataclass import dataclass
from .resident import Resident

NAN_BYTE = 0xFF  # a NaN in every float format that has NaNs, when all its bytes are this


@dataclass(frozen=True)
class Output:
    """An array that a kernel fills."""

    array: Any
    pointer: int
    nbytes: int

    def fill(self, byte: int, stream: int) -> None:
        if self.nbytes:
            check(driver().cuMemsetD8Async(self.pointer, byte, self.nbytes, stream),
                  "fill a result")


Maker = Callable[[int | None], Output]  # of the stream, when it is not the library's current one


def maker(library: str, shape: tuple[int, ...], numeric: NumericType, index: int) -> Maker:
    """How outputs of this shape and type are made in a library: quick to call many times."""
    if library in MAKERS:
        return MAKERS[library](shape, numeric.dtype, index)
    return _resident(shape, numeric, index)


def array_maker(library: str, shape: tuple[int, ...], numeric: NumericType, index: int
                ) -> Callable[[], Any]:
    """The same of the arrays alone, on the library's current stream."""
    if library == "torch":
        torch = sys.modules["torch"]
        made = maker(library, shape, numeric, index)(None).array
        return functools.partial(torch.empty, shape, dtype=made.dtype,
                                 device=torch.device("cuda", index))
    if library in MAKERS:
        make = maker(library, shape, numeric, index)
        return lambda: make(None).array
    nbytes, on = stored_bytes(shape, numeric.dtype), device(index)
    return lambda: Resident(shape, numeric, index, PooledBuffer(nbytes, on))


def _torch(shape: tuple[int, ...], dtype: DType, index: int) -> Maker:
    torch = sys.modules["torch"]
    spelled = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "bool_": "bool",
               "bf16": "bfloat16", "f16": "float16", "f32": "float32", "tf32": "float32",
               "f64": "float64"}.get(dtype.name, dtype.name)
    kind = _need(None if dtype.packed else getattr(torch, spelled, None), dtype, "torch")
    options, nbytes = {"dtype": kind, "device": torch.device("cuda", index)}, _nbytes(shape, dtype)

    def make(stream: int | None) -> Output:
        made = torch.empty(shape, **options)
        if stream is not None:  # the allocator must not give it away while that stream works on it
            made.record_stream(torch.cuda.ExternalStream(stream, index))
        return Output(made, made.data_ptr(), nbytes)

    return make


def _cupy(shape: tuple[int, ...], dtype: DType, index: int) -> Maker:
    cupy, nbytes = sys.modules["cupy"], _nbytes(shape, dtype)
    kind = _need(None if dtype.packed else dtype.numpy, dtype, "cupy")

    def make(stream: int | None) -> Output:
        with cupy.cuda.Device(index), (nullcontext() if stream is None
                                       else cupy.cuda.ExternalStream(stream, index)):
            made = cupy.empty(shape, kind)
        return Output(made, made.data.ptr, nbytes)

    return make


def _jax(shape: tuple[int, ...], dtype: DType, index: int) -> Maker:
    """A fresh array that nobody has seen yet; the launch waits before JAX gets to see it."""
    jax = sys.modules["jax"]
    kind = _need(None if dtype.packed else dtype.numpy, dtype, "jax")
    (where,) = [d for d in jax.local_devices() if d.local_hardware_id == index]
    nbytes = _nbytes(shape, dtype)

    def make(stream: int | None) -> Output:
        with jax.default_device(where):
            made = jax.numpy.zeros(shape, kind).block_until_ready()
        if made.dtype != kind:  # narrower: the kernel would write past its end
            raise DTypeError(f"the kernel returns {dtype}, which jax keeps as {made.dtype}",
                             hint='jax.config.update("jax_enable_x64", True)', where=user_line())
        return Output(made, made.unsafe_buffer_pointer(), nbytes)

    return make


def _resident(shape: tuple[int, ...], numeric: NumericType, index: int) -> Maker:
    """For arrays of other libraries, and for host arrays: memory of our own."""
    def make(stream: int | None) -> Output:
        made = Resident(shape, numeric, index)
        return Output(made, made.memory.pointer, made.memory.nbytes)

    return make


MAKERS: dict[str, Callable[[tuple[int, ...], DType, int], Maker]] = {
    "torch": _torch, "cupy": _cupy, "jax": _jax}
WAITED_FOR = frozenset({"jax"})  # libraries whose streams know nothing of ours


def _need(kind: Any, dtype: DType, library: str) -> Any:
    if kind is None:
        raise DTypeError(f"the kernel returns {dtype}, which {library} has no type for",
                         hint="return another type, or pass a tensor that the kernel fills",
                         where=user_line())
    return kind


def _nbytes(shape: tuple[int, ...], dtype: DType) -> int:
    return prod(shape) * dtype.numpy.itemsize


class Numbers:
    """Places for results that are one number: host memory that the kernel writes directly."""

    def __init__(self, index: int):
        self._index = index
        self._free: list[MappedMemory] = []  # append and pop are atomic

    def take(self) -> MappedMemory:
        try:
            return self._free.pop()
        except IndexError:
            return MappedMemory(1, device(self._index))

    def give(self, memory: MappedMemory, dtype: DType) -> Any:
        """The number that was written, as Python has it; the memory is used again."""
        raw = memory.words.view(np.uint8)[:dtype.numpy.itemsize].view(dtype.numpy)
        value = decode(raw, dtype)[0].item()
        self._free.append(memory)
        return value


@functools.cache
def numbers(index: int) -> Numbers:
    """Those of a device."""
    return Numbers(index)
