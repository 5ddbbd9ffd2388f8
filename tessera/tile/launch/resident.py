"""Tensors in the memory of a GPU: what functions and kernels there give back.

    x = ts.tensor(data).to("cuda")  # the elements are copied to the GPU
    y = f(x)                        # x lies on the GPU: f runs there, and so y lies there
    f(y), kernel(y), y + 1          # taken as it lies
    y.numpy(), y.item(), print(y)   # the elements are copied to the host, anew each time

Other libraries take one without a copy, through DLPack: torch.from_dlpack(y), cupy.from_dlpack(y),
jax.dlpack.from_dlpack(y), also of bf16 and fp8 where they have them; types that NumPy has also
through `__cuda_array_interface__`: cupy.asarray(y), torch.as_tensor(y, device="cuda").
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from tessera import hooks
from tessera.errors import ArgumentError, DTypeError
from tessera.numerics import NumericType, as_type, row_bytes, stored_bytes
from tessera.numerics.packed_order import from_rows, in_rows, order_of
from tessera.open_trace import trace_state
from tessera.runtime import dlpack, late_checks
from tessera.runtime.arrays import HOST, Array, dense_strides, face_of, reader, stream_of
from tessera.runtime.buffer import (
    DEFAULT,
    DEFAULT_STREAMS,
    Borrowed,
    BufferPart,
    DeviceBuffer,
    PooledBuffer,
    follow,
)
from tessera.runtime.device import device, driver, outside_capture, restore
from tessera.runtime.offloaded import OffloadedBuffer, is_offloaded
from tessera.runtime.recordings import between_recordings
from tessera.tensor import PLAIN, Tensor, as_tensor, of_codes, to_numpy
from tessera.tile.launch.memory_turns import InTurn, end_turns
from tessera.tile.launch.shared_views import (
    SharedView,
    end_views,
    export,
    is_exported,
    is_shared,
    whole_of,
)
from tessera.tile.launch.used_by import UsedBy

from .upload import upload


class Resident(Tensor):
    """A tensor whose buffer is device memory. What reads its elements copies them to the host, so
    a copy does not follow later changes.

    storage: where it lies, for those who only read; raises ArgumentError when it was donated
    device: "cuda:0", ...
    narrow: copies in other types that a program wrote beside it, by key; see `memory`
    origin: which result of a program it is, while it has the memory that this gave it and nobody
    was told: so what is equal of all that it was, extents, type and place, is known at a glance
    """

    __slots__ = ("_storage", "narrow", "origin")

    def __init__(self, shape: tuple[int, ...], numeric: NumericType, index: int,
                 memory: DeviceBuffer | None = None):
        self._shape, self.type = tuple(shape), numeric
        self._scale, self._is_param, self._name = None, False, None
        self._storage: Any = memory or PooledBuffer(stored_bytes(shape, numeric.dtype),
                                                    device(index))
        self.narrow: dict[str, tuple[Any, int]] | None = None
        self.origin: Any = None

    @property
    def storage(self) -> Any:
        held = self._storage
        if held.__class__ in IN_PLACE:
            held = self.held_now()
        if held.__class__ is UsedBy:
            raise held.error(self)
        return held

    @storage.setter
    def storage(self, memory: DeviceBuffer | None) -> None:
        if self._storage.__class__ is InTurn:
            self._storage.turns.end()
        self._storage = memory
        self.origin = None

    def held_now(self) -> Any:
        """The memory, or the call that used it up. A view whose elements lie otherwise than those
        of its base is copied."""
        held: Any = self._storage
        while type(held) in IN_PLACE:
            now = held.read() if type(held) is SharedView else held.now()
            if now is not None:  # else the turns have ended, and the tensor has it
                return now
            held = self._storage
        return held

    @property
    def memory(self) -> DeviceBuffer:
        """Where it lies. Whoever is told may write there and keep it, so `narrow` and `origin` are
        forgotten, and views have elements of their own."""
        end_turns((self._storage,))
        self.narrow = self.origin = None
        memory = self.storage
        if is_shared(memory):
            end_views(memory)
        return memory

    @memory.setter
    def memory(self, memory: DeviceBuffer) -> None:
        self.storage, self.narrow = memory, None

    @property
    def place(self) -> int:  # type: ignore[override]
        held = self._storage
        return (held if held.__class__ is SharedView else self.storage).device.index

    @property
    def device(self) -> str:
        return f"cuda:{self.place}"

    @property
    def offloaded(self) -> bool:  # type: ignore[override]
        """Whether its bytes lie in host memory until they are used."""
        return is_offloaded(self.storage)

    @property
    def _buffer(self) -> np.ndarray:  # type: ignore[override]
        """A copy on the host, of packed rows for types under 8 bits."""
        memory, dtype = self.storage, self.type.dtype
        out = np.empty(self._shape, dtype.numpy)
        if dtype.packed:
            last = self._shape[-1] if self._shape else 1
            out = np.empty((*self._shape[:-1], row_bytes(last, dtype)), np.uint8)
        # What only we write is written in the order of the default stream, so one wait is enough.
        ours = type(memory) in OWN and not is_exported(memory)
        if ours and out.size:
            memory.fetch(out)
        memory.device.synchronize()
        if out.size and not ours:
            memory.read(out)
        late_checks.settle()
        return in_rows(out, self.type, self._shape)

    def __repr__(self) -> str:
        used = self.held_now()
        return used.text(self) if used.__class__ is UsedBy else super().__repr__()

    def item(self) -> Any:
        """The value of a tensor with one element as a Python scalar."""
        memory = self._storage
        if type(memory) is SharedView and memory.chain is None:
            memory = memory.memory
        if type(memory) not in SHAREABLE or self._scale is not None or self.type.dtype.packed or \
                prod(self._shape) != 1 or trace_state.read is not None or hooks.timed_steps or \
                is_exported(whole_of(memory)):
            return super().item()
        value = memory.number(self.type.dtype.numpy)
        late_checks.settle()
        return value

    def copy(self) -> Resident:
        source = self.storage
        made = Resident(self._shape, self.type, source.device.index)
        if made._storage.nbytes:
            before = source.device.activate()
            try:
                made._storage.copy(source)
                source.give_back()
            finally:
                restore(before)
        made._scale = None if self._scale is None else self._scale.copy()
        made._is_param, made._name = self._is_param, self._name
        return made

    def __copy__(self) -> Resident:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Resident:
        return self.copy()

    def __getitem__(self, index: Any) -> Tensor:
        if trace_state.builder is not None or index is None:
            return super().__getitem__(index)
        rows = self._row_range(index)
        if rows is None:
            part = hooks.read_part.get()(self, index) if type(index) is tuple else None
            return super().__getitem__(index) if part is None else part
        shape, begin = rows
        shared = rows_of(self, shape, begin)
        if shared is not None:
            return shared
        source = self.storage
        made = Resident(shape, self.type, source.device.index)
        if made._storage.nbytes:
            before = source.device.activate()
            try:
                made._storage.copy(source, begin)
                source.give_back()
            finally:
                restore(before)
        return made

    def _row_range(self, index: Any) -> tuple[tuple[int, ...], int] | None:
        """The extents of the rows that x[3] and x[4:8] select, which one copy takes, and the byte
        at which they begin; None of other indices."""
        if self._scale is not None or not self._shape or self.type.dtype.packed:
            return None
        extent, rest = self._shape[0], self._shape[1:]
        if type(index) is int:
            if not -extent <= index < extent:
                return None
            begin, shape = index % extent, rest
        elif type(index) is slice and index.step in (None, 1) and (
                type(index.start) in BOUNDS and type(index.stop) in BOUNDS):
            begin, end, _ = index.indices(extent)
            shape = (max(begin, end) - begin, *rest)
        else:
            return None
        return shape, begin * prod(rest) * self.type.dtype.numpy.itemsize

    def __setitem__(self, index: Any, value: Any) -> None:
        """As of any tensor. A run along every axis, x[2], x[:, 3:5], is written where it lies, by a
        kernel; for other indices the whole is copied to the host and back."""
        late_checks.settle(wait=True)
        if hooks.assign.get()(self, index, value):
            return
        host = Tensor(self.array, self.type, scale=self.scale)
        host[index] = value
        if host.size:
            self.memory.write(np.ascontiguousarray(from_rows(host.buffer, self.type, self._shape)))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Raises AttributeError for types that it has no name for: bf16, fp8, scaled and packed
        ones. The first two pass DLPack."""
        if self.dtype.packed or self.scale is not None or self.dtype.name in dlpack.SPECIAL:
            raise AttributeError  # answered by __getattr__
        export(self.memory)
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

        stream: on which the other library reads them: there it comes behind what was launched
        here, except for -1. None and 1 are the default stream.
        """
        dlpack.check_type(self.type)
        here = (dlpack.CUDA, self.memory.device.index)
        if dl_device is not None and tuple(dl_device) != here:
            if tuple(dl_device) != (dlpack.CPU, 0) or copy is False:
                raise BufferError(f"the tensor lies on {self.device}, not on DLPack device "
                                  f"{tuple(dl_device)}" + " without a copy" * (copy is False))
            return dlpack.exported_array(self.array, self.dtype, max_version=max_version)
        memory: Any = self.memory
        if copy:
            memory = PooledBuffer(self.memory.nbytes, self.memory.device)
            with memory.device.current():
                memory.copy(self.memory)
        if stream not in (None, -1, *DEFAULT_STREAMS):
            follow(self.memory.device, stream, DEFAULT)
            memory = ReadOnStream(memory)
        if not copy:
            export(self.memory)
        given = dlpack.ExportedMemory(memory.pointer, self._shape, dense_strides(self._shape),
                                      self.dtype,
                                      here, copied=bool(copy))
        return dlpack.exported(given, memory, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.storage.device.index)

    def to_host(self, tensors: bool) -> Any:
        """As a call on host arrays returns it."""
        return Tensor(self.array, self.type) if tensors or self.dtype.packed else self.array


def resident_at(shape: tuple[int, ...], numeric: NumericType, memory: Any) -> Resident:
    """As Resident, more quickly: of what lies there, with a tuple of extents."""
    made = _new(Resident)
    made._shape, made.type, made._storage = shape, numeric, memory
    made._scale = made._name = made.narrow = made.origin = None
    made._is_param = False
    return made


BOUNDS = frozenset({int, type(None)})
_new: Any = Resident.__new__
SharedView.tensor_at = resident_at
PLAIN.add(Resident)
MOST_KEPT = 16  # times the bytes of some rows that they may keep; more are copied
FEW_BYTES = 1 << 20  # that may be kept by fewer


def rows_of(x: Resident, shape: tuple[int, ...], begin: int) -> Resident | None:
    """A view of elements that lie one behind the other from a byte on; None where they are to be
    copied: they begin where new memory would not, by which kernels are compiled, others may write
    there, or they would keep much more memory than they are."""
    memory = x._storage
    if type(memory) is SharedView and memory.chain is None:
        memory = memory.memory
    if type(memory) not in SHAREABLE:
        return None
    nbytes = prod(shape) * x.type.dtype.numpy.itemsize
    whole = memory.whole if type(memory) is BufferPart else memory
    at = memory.pointer - whole.pointer + begin
    if at % ALIGNED or not nbytes or is_exported(whole) or (
            whole.nbytes > FEW_BYTES and whole.nbytes > MOST_KEPT * nbytes):
        return None
    part = BufferPart(whole, at, nbytes)
    made = resident_at(shape, x.type, part)
    made._storage = SharedView(shape, x.type, part, None, made)
    return made


ALIGNED = 256  # bytes at a multiple of which memory begins
OWN = frozenset({PooledBuffer, DeviceBuffer})
SHAREABLE = OWN | {BufferPart}
IN_PLACE = frozenset({InTurn, SharedView})  # of memory, which they tell


class ReadOnStream:
    """Keeps memory that another library reads on a stream of its own. When it drops it, its work
    may still be under way there: that is waited for before the memory is used again."""

    def __init__(self, memory: DeviceBuffer):
        self.memory, self.pointer = memory, memory.pointer

    def __del__(self) -> None:
        between_recordings(partial(_wait, self.memory))


def _wait(memory: DeviceBuffer) -> None:
    with memory.device.current(), outside_capture():
        driver().cuCtxSynchronize()  # a lost context has nothing under way


def on_gpu(x: Tensor, index: int) -> Resident:
    """A copy of a tensor in the memory of a GPU; the tensor itself when it lies there."""
    if isinstance(x, Resident) and x.storage.device.index == index:
        return x
    made = Resident(x.shape, x.type, index)
    with made.storage.device.current():
        if made.storage.nbytes and isinstance(x, Resident):
            made.storage.copy_across(x.storage)
            x.storage.give_back()
        elif made.storage.nbytes:
            upload(made.storage, from_rows(x.buffer, x.type, x.shape))
    made.scale = None if x.scale is None else on_gpu(x.scale, index)
    made.is_param, made.name = x.is_param, x.name
    return made


def on_host(x: Tensor) -> Tensor:
    """A copy of a tensor in host memory; the tensor itself when it lies there."""
    if not isinstance(x, Resident):
        return x
    scale = None if x.scale is None else on_host(x.scale)
    return Tensor(x.array, x.type, scale=scale, is_param=x.is_param, name=x.name)


def offload(x: Tensor) -> None:
    """Let the bytes of a tensor on a GPU lie in page-locked host memory until they are used. What
    shares its memory keeps that. Nothing for a tensor on the host."""
    if isinstance(x, Resident) and not x.offloaded:
        x.memory = OffloadedBuffer.of(x.storage)
        if x.scale is not None:
            offload(x.scale)


def begin_upload(x: Tensor, wait: bool = False) -> None:
    """Begin to copy an offloaded tensor back. wait: what is launched from here on comes behind."""
    memory = x.storage
    if isinstance(memory, OffloadedBuffer):
        with memory.device.current():
            memory.bring()
            if wait:
                assert memory.pointer
        if x.scale is not None:
            begin_upload(x.scale, wait)


@reader(Resident, place=lambda x: x.storage.device.index, pointer="{}.memory.pointer",
        facts=("{}._shape", "{}.type.dtype", "{}.type.policy.packed_for",
               "{}.storage.device.index"))
def read_resident(x: Any, name: str) -> Array:
    """A result of one kernel as the argument of another; of types, too, that only we have."""
    return Array(x.memory.pointer, x.shape, dense_strides(x.shape), x.dtype,
                 x.storage.device.index, "resident", x)


def adopted(value: Any, name: str) -> Any:
    """An array that another library has on a GPU as a tensor on the same memory; anything else as
    it is. Raises ArgumentError for one with gaps."""
    if isinstance(value, Tensor | np.ndarray):
        return value
    face = face_of(type(value))
    if face is None or face.place(value) == HOST:
        return value
    array = face.read(value, name)
    if not array.contiguous:
        raise ArgumentError(f"argument {name} has shape {array.shape} and strides {array.strides}: "
                            "functions on a GPU take contiguous arrays", hint="pass a copy")
    size = prod(array.shape) * array.dtype.numpy.itemsize
    stream = array.stream or stream_of(array.library)(array.device)
    memory = Borrowed(array.pointer, size, device(array.device), array, stream,
                      waits=array.library not in KNOWN_STREAMS)
    return Resident(array.shape, as_type(array.dtype), array.device, memory)


KNOWN_STREAMS = ("torch", "cupy", "view")  # libraries that say on which stream they work
hooks.adopt.fill(adopted)


# --- bytes --------------------------------------------------------------------------------------
def as_bytes(x: Tensor) -> Tensor:
    """The memory of a tensor as uint8, on the same memory: [..., n] as [..., bytes of a row].

    For types that other libraries do not have, packed ones (two fp4 or int4 to a byte, the first in
    the low bits) and the codes of scaled ones; x.scale is a tensor of its own. A write into one is
    seen in the other. Raises ArgumentError for anything but a tensor with data.
    """
    if type(x) not in PLAIN:
        raise ArgumentError(f"as_bytes takes a tensor with data, got {type(x).__name__}")
    shape = (*x.shape[:-1], stored_bytes(x.shape[-1:], x.dtype))
    uint8 = as_type("uint8")
    if isinstance(x, Resident):
        _need_rows(x.type, x.shape, "as_bytes")
        on = x.memory.device
        export(x.memory)
        return Resident(shape, uint8, on.index, x.memory.lend(x.memory.nbytes))
    raw = np.ascontiguousarray(x.buffer).reshape(-1).view(np.uint8)
    return Tensor(raw.reshape(shape), uint8)


def from_bytes(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a type whose memory holds these bytes, on the same memory: of `as_bytes`.

    raw: uint8, a tensor or an array of any library with a GPU or on the host, as many bytes as the
    type takes for the shape. Raises ArgumentError for another number of them, DTypeError.
    """
    numeric, extents = as_type(dtype), tuple(shape)
    x = adopted(raw, "raw")
    x = x if isinstance(x, Tensor) else as_tensor(to_numpy(x))
    if x.dtype.name != "uint8" or type(x) not in PLAIN:
        raise ArgumentError(f"from_bytes takes uint8, got {x.type}", hint="ts.as_bytes(x)")
    if x.size != stored_bytes(extents, numeric.dtype):
        raise ArgumentError(f"{numeric}{list(extents)} takes "
                            f"{stored_bytes(extents, numeric.dtype)} bytes, got {x.size}")
    if isinstance(x, Resident):
        _need_rows(numeric, extents, "from_bytes")
        on = x.memory.device
        export(x.memory)
        return Resident(extents, numeric, on.index, x.memory.lend(x.size))
    flat = np.ascontiguousarray(x.array).reshape(-1)
    if not numeric.dtype.packed:
        return Tensor(flat.view(numeric.dtype.numpy).reshape(extents), numeric)
    return of_codes(flat, extents, numeric)


def _need_rows(numeric: NumericType, shape: tuple[int, ...], what: str) -> None:
    if order_of(numeric, shape):
        raise DTypeError(f"{what} of {numeric}{list(shape)} on a GPU, where its codes do not lie "
                         "in rows", hint=f"take ts.cast(x, '{numeric.dtype}')")


def from_dlpack(x: Any) -> Tensor:
    """An array of another library as a tensor on the same memory, on the host or on a GPU, of every
    type that both have, bf16 and fp8 too. A write into one is seen in the other.

    On a GPU what the other library launched before comes first. Raises DTypeError for types that
    are none of ours, ArgumentError for strides on a GPU.
    """
    made = adopted(x, "x")
    if isinstance(made, Tensor):
        return made
    array = to_numpy(made)
    return Tensor(array, as_type(array.dtype))


__all__ = ["IN_PLACE", "Resident", "adopted", "as_bytes", "begin_upload", "from_bytes",
           "from_dlpack", "offload", "on_gpu", "on_host", "resident_at"]
