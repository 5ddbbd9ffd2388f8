"""Tensors in the memory of a GPU: what functions and kernels there give back.

    y = f(x)                        # f compiled with target="cuda": y lies on the GPU
    f(y), kernel(y)                 # taken as it lies
    y.numpy(), y + 1, y.item()      # the elements are copied to the host, anew each time

Other libraries take one without a copy, through DLPack: torch.from_dlpack(y), cupy.from_dlpack(y),
jax.dlpack.from_dlpack(y), also of bf16 and fp8 where they have them; types that NumPy has also
through `__cuda_array_interface__`: cupy.asarray(y), torch.as_tensor(y, device="cuda").
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tessera.errors import ArgumentError
from tessera.numerics import DType, NumericType, as_type, row_bytes
from tessera.runtime import dlpack
from tessera.runtime.arrays import HOST, Array, dense_strides, face_of, reader, stream_of
from tessera.runtime.buffer import Borrowed, DeviceBuffer, PooledBuffer
from tessera.runtime.device import check, device, driver
from tessera.tensor import PLAIN, Tensor


class Resident(Tensor):
    """A tensor whose buffer is device memory. What reads its elements copies them to the host, so
    a copy does not follow later changes.

    memory: where it lies   device: "cuda:0", ...
    """

    __slots__ = ("memory",)

    def __init__(self, shape: tuple[int, ...], numeric: NumericType, index: int,
                 memory: DeviceBuffer | None = None):
        self._shape, self.type = tuple(shape), numeric
        self.scale, self.is_param, self.name = None, False, None
        self.memory = memory or PooledBuffer(stored_bytes(shape, numeric.dtype), device(index))

    @property
    def device(self) -> str:
        return f"cuda:{self.memory.device.index}"

    @property
    def _buffer(self) -> np.ndarray:  # type: ignore[override]
        """A copy on the host, of packed rows for types under 8 bits."""
        self.memory.device.synchronize()
        out = np.empty(self._shape, self.dtype.numpy)
        if self.dtype.packed:
            last = self._shape[-1] if self._shape else 1
            out = np.empty((*self._shape[:-1], row_bytes(last, self.dtype)), np.uint8)
        if out.size:
            self.memory.read(out)
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        """As of any tensor; the whole of it is copied to the host and back."""
        host = Tensor(self.array, self.type, scale=self.scale)
        host[index] = value
        if host.size:
            self.memory.write(np.ascontiguousarray(host.buffer))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Raises AttributeError for types that it has no name for: bf16, fp8, scaled and packed
        ones. The first two pass DLPack."""
        if self.dtype.packed or self.scale is not None or self.dtype.name in dlpack.SPECIAL:
            raise AttributeError  # answered by __getattr__
        return {"shape": self._shape, "typestr": self.dtype.numpy.str, "version": 3,
                "data": (self.memory.pointer, False), "strides": None, "stream": 1}

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":
            if self.dtype.name in dlpack.SPECIAL and self.scale is None:
                raise AttributeError(f"{name} has no {self.dtype}: use DLPack, "
                                     "torch.from_dlpack(y)")
            raise AttributeError(f"{self.type} is packed or scaled: other libraries cannot read it")
        return super().__getattr__(name)

    def __dlpack__(self, *, stream: Any = None,  # type: ignore[override]
                   max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """The elements for another library, on the GPU where they lie; a copy on the host where
        `dl_device` asks for one.

        stream: on which the other library reads them: None and 1, the default stream, see what was
        launched before; -1 waits for nothing. For any other stream the GPU is waited for.
        """
        dlpack.check_type(self.type)
        here = (dlpack.CUDA, self.memory.device.index)
        if dl_device is not None and tuple(dl_device) != here:
            if tuple(dl_device) != (dlpack.CPU, 0) or copy is False:
                raise BufferError(f"the tensor lies on {self.device}, not on DLPack device "
                                  f"{tuple(dl_device)}" + " without a copy" * (copy is False))
            return dlpack.exported_array(self.array, self.dtype, max_version=max_version)
        if stream not in (None, 1, -1):
            self.memory.device.synchronize()
        memory = self.memory
        if copy:
            memory = PooledBuffer(self.memory.nbytes, self.memory.device)
            memory.copy(self.memory)
        given = dlpack.ExportedMemory(memory.pointer, self._shape, dense_strides(self._shape),
                                      self.dtype,
                                      here, copied=bool(copy))
        return dlpack.exported(given, memory, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.memory.device.index)

    def to_host(self, tensors: bool) -> Any:
        """As a call on host arrays returns it."""
        return Tensor(self.array, self.type) if tensors or self.dtype.packed else self.array


PLAIN.add(Resident)


def stored_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """Of a tensor's buffer: packed types take whole bytes per row."""
    if not dtype.packed:
        return prod(shape) * dtype.numpy.itemsize
    return prod(shape[:-1]) * row_bytes(shape[-1] if shape else 1, dtype)


@reader(Resident, place=lambda x: x.memory.device.index, pointer="{}.memory.pointer",
        facts=("{}._shape", "{}.type.dtype", "{}.memory.device.index"))
def read_resident(x: Any, name: str) -> Array:
    """A result of one kernel as the argument of another; of types, too, that only we have."""
    return Array(x.memory.pointer, x.shape, dense_strides(x.shape), x.dtype,
                 x.memory.device.index, "resident", x)


def adopted(value: Any, name: str) -> Any:
    """An array that another library has on a GPU as a tensor on the same memory; anything else as
    it is. Raises ArgumentError for one with gaps."""
    face = None if isinstance(value, Tensor | np.ndarray) else face_of(type(value))
    if face is None or face.place(value) == HOST:
        return value
    array = face.read(value, name)
    stream = stream_of(array.library)(array.device)
    if stream:  # what is on its way there was not asked of the default stream
        check(driver().cuStreamSynchronize(stream), "wait for an argument")
    if not array.contiguous:
        raise ArgumentError(f"argument {name} has shape {array.shape} and strides {array.strides}: "
                            "functions on a GPU take contiguous arrays", hint="pass a copy")
    size = prod(array.shape) * array.dtype.numpy.itemsize
    memory = Borrowed(array.pointer, size, device(array.device), array)
    return Resident(array.shape, as_type(array.dtype), array.device, memory)


__all__ = ["Resident", "adopted", "stored_bytes"]
