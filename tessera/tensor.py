"""Tensor: a buffer with a numeric type; and `Tensor["B", "D", bf16 @accum(f32)]`, its type.

The buffer is a NumPy array here. Types of fewer than 8 bits are stored packed, row by row, and are
unpacked where they are read. Operators and methods are graph ops; the graph layer installs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from . import hooks, wide_arrays
from .complex_pair import Complex
from .dims import Dim, bind_shape, show_shape, size_of
from .errors import (
    ArgumentError,
    AxisError,
    DTypeError,
    ShapeError,
    UnknownNameError,
    UnsupportedTargetError,
)
from .foreign import METHODS
from .lazy_dataclass import dataclass
from .numerics import (
    DType,
    NumericType,
    as_type,
    decode,
    encode,
    pack,
    row_bytes,
    unpack,
)
from .numerics.parse import is_type
from .open_trace import trace_state
from .runtime import dlpack
from .runtime.arrays import HOST
from .runtime.host_memory import before_write
from .tensor_operators import FUNCTIONS as FUNCTIONS
from .tensor_operators import OPERATORS as OPERATORS
from .tensor_operators import Operators

PLAIN: set[type] = set()  # Tensor and subclasses that differ in where their buffer lies
DEVICES: set[str] = {"cpu"}  # where this process can place a tensor; a device's runtime adds it


def need_device(numeric: NumericType, what: str = "a tensor") -> None:
    """Raise UnsupportedTargetError when `numeric` names a device this process cannot use."""
    device = numeric.policy.device
    if device is None or device in DEVICES or hooks.can_place.get()(device):
        return
    hint = f"leave the device out, or name one of those: {numeric.dtype} @device(\"cpu\")"
    hint += "; python -m tessera doctor says what cuda needs" * device.startswith("cuda")
    raise UnsupportedTargetError(
        f"{what} of type {numeric} cannot be placed: there is no device {device!r} here; devices "
        f"that exist: {', '.join(sorted(DEVICES))}", hint=hint)


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: extents (ints, names, products) and a numeric type.

    `type` is None when any numeric type is accepted: `Tensor["B", "D"]`. optional: None in place
    of a tensor is accepted too, as `Tensor["B", "D"] | None` says.
    """

    shape: tuple[int | Dim, ...]
    type: NumericType | None
    optional: bool = False

    def __or__(self, other: Any) -> TensorType:
        return replace(self, optional=True) if other is None else NotImplemented

    __ror__ = __or__

    @property
    def dtype(self) -> DType | None:
        return self.type.dtype if self.type else None

    @property
    def policy(self) -> Any:
        return self.type.policy if self.type else None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def check(self, value: Any, sizes: dict[str, int | Dim], what: str) -> None:
        """Bind `value`'s extents into `sizes` and compare types. Raises ShapeError, DTypeError."""
        bind_shape(self.shape, value.shape, sizes, what)
        if self.type is None:
            return
        mine, given = self.type.policy, value.type.policy
        if value.type.dtype is not self.type.dtype or any(
                getattr(mine, f) != getattr(given, f) for f in ("scaled", "per_channel", "custom")):
            raise DTypeError(f"{what} is {value.type}, its annotation says {self.type}",
                             hint=f"convert it: ts.cast({what.split()[-1]}, {str(self.type)!r}), "
                             "or @ts.jit(cast=True)")

    def __str__(self) -> str:
        parts = [repr(str(d)) if isinstance(d, Dim) else str(d) for d in self.shape]
        text = "Tensor[" + ", ".join(parts + ([str(self.type)] if self.type else [])) + "]"
        return text + " | None" if self.optional else text

    __repr__ = __str__


def _told_of(slot: str, doc: str) -> property:
    """An attribute that users set. What has its memory in turn with another is as its program made
    it, so that nobody looks: who sets one ends the turns, see MemoryTurns."""
    def put(x: Tensor, value: Any) -> None:
        if x.origin is not None and x.origin.turns is not None:
            x.origin.turns.end()
        setattr(x, slot, value)

    return property(attrgetter(slot), put, doc=doc)


class Tensor(Operators):
    """An array with a numeric type. Make one with `ts.tensor`, `ts.zeros`, `ts.param`, ...

    x.shape x.ndim x.size x.dtype x.policy x.type x.nbytes, x.numpy(), np.asarray(x), x.item().
    A scaled or quantised type carries its scale in `x.scale`.
    """

    __slots__ = ("_buffer", "_shape", "type", "_scale", "_is_param", "_name", "__weakref__")
    traced = False  # whether it is known by shape and type only, while a function is traced
    __array_priority__ = 1000
    type: NumericType
    layout: Any = None  # how a distributed tensor lies on its mesh; None for all others
    memory: Any = None  # device memory, of a tensor that lies on a GPU
    storage: Any = None  # the same, to read
    place = HOST  # the number of that GPU
    offloaded = False  # a GPU's, in host memory until it is used
    origin: Any = None  # which result of a program it is, while it lies where that put it
    scale: Any = _told_of("_scale", "Of a scaled or quantised type, what its codes are times.")
    is_param: Any = _told_of("_is_param", "Whether it is trained: what `ts.param` marks.")
    name: Any = _told_of("_name", "What its user calls it.")

    def __init__(self, array: np.ndarray,
                 type: NumericType = None,  # type: ignore[assignment]  # absent only by mistake
                 *, scale: Tensor | None = None, is_param: bool = False, name: str | None = None):
        if type.__class__ is not NumericType:
            _need_parts(array, type)
        if type.policy.device is not None:
            need_device(type)
        self._shape = array.shape
        packed = type.dtype.packed  # a scalar is a row of one
        self._buffer = pack(np.atleast_1d(array), type.dtype) if packed else array
        self.type, self._scale, self._is_param, self._name = type, scale, is_param, name

    def __class_getitem__(cls, items: Any) -> TensorType:
        items = items if isinstance(items, tuple) else (items,)
        numeric = None
        if items and is_type(items[-1]):
            numeric, items = as_type(items[-1]), items[:-1]
        return TensorType(tuple(Dim.of(d) for d in items), numeric)

    # --- what it is ---------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return size_of(self.shape)  # type: ignore[return-value]

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def policy(self) -> Any:
        return self.type.policy

    @property
    def device(self) -> str:
        """Where the buffer lies: "cpu", "cuda:0"."""
        return "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer (of this tensor's own scale too)."""
        if not self.dtype.packed:
            own = self.size * self.dtype.numpy.itemsize
        elif self.ndim == 0:
            own = row_bytes(1, self.dtype)
        else:
            own = int(size_of(self.shape[:-1])) * row_bytes(self.shape[-1], self.dtype)
        return own + (self.scale.nbytes if self.scale is not None else 0)

    @property
    def buffer(self) -> np.ndarray:
        """The storage as it lies in memory: packed bytes for types under 8 bits."""
        return self._buffer

    @property
    def array(self) -> np.ndarray:
        """The stored elements, unpacked, in the type's own NumPy dtype; a view where possible."""
        if not self.type.dtype.packed:
            return self._buffer
        n = self._shape[-1] if self._shape else 1
        return unpack(self._buffer, self.dtype, n).reshape(self._shape)

    # --- out to Python and NumPy --------------------------------------------------------------
    def numpy(self) -> np.ndarray:
        """The values as a NumPy array: no copy for NumPy's own types; scaled types are multiplied
        out; fp4_e3m0, which NumPy cannot name, comes as f32."""
        if trace_state.read is not None:
            trace_state.read.append(self)
        if self.scale is not None:
            return OPERATORS["dequantize"](self).numpy()
        if self.dtype.packed and self.dtype.numpy == np.uint8 and self.dtype.kind == "float":
            return decode(self.array, self.dtype)
        return self.array

    def item(self) -> Any:
        """The value of a tensor with one element as a Python scalar."""
        if self.size != 1:
            raise ArgumentError(
                f"item() needs a tensor with one element, this has shape {show_shape(self.shape)}",
                hint="index it first, or use .tolist()")
        return self._plain().reshape(()).item()

    def tolist(self) -> Any:
        return self._plain().tolist()

    def _plain(self) -> np.ndarray:
        """Values in a dtype whose elements Python knows (low-precision floats as f32)."""
        values = self.numpy()
        if values.dtype.kind in "biuf":
            return values
        return values.astype(np.float32 if self.dtype.kind == "float" else np.int32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = self.numpy()
        if dtype is not None and np.dtype(dtype) != out.dtype:
            return out.astype(dtype)
        return out.copy() if copy else out

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy ufuncs on tensors are the ops of the same name: np.exp(x), np_array + x."""
        op = OPERATORS.get("ufunc_" + ufunc.__name__)
        if method != "__call__" or kwargs or op is None:
            raise DTypeError(
                f"np.{ufunc.__name__} ({method}) is not available on a Tensor",
                hint="use the op of ts, or np.asarray(x) for a NumPy array",
            )
        return op(*inputs)

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """NumPy functions that have a namesake here are that: np.sum(x) is ts.sum(x). The others
        are NumPy's own, of x as an array."""
        return OPERATORS["array_function"](func, args, kwargs)

    def __dlpack__(self, **options: Any) -> Any:
        """The elements for another library, where they lie: torch.from_dlpack(x). bf16 and fp8 too.

        Raises DTypeError for scaled and packed types, BufferError for another device than the host.
        """
        dlpack.check_type(self.type)
        return dlpack.exported_array(self.array, self.dtype, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """f"{loss:.3f}" of a tensor with one element is that of its number."""
        if not spec:
            return str(self)
        if self.size != 1:
            raise ArgumentError(
                f"the format {spec!r} of a tensor of shape {show_shape(self.shape)}: one number is "
                "needed", hint="reduce or index it first; np.array2string(x.numpy(), ...) "
                "formats arrays")
        return format(self.item(), spec)

    def __index__(self) -> int:
        if self.dtype.kind not in ("int", "uint", "bool"):
            raise DTypeError(f"a {self.dtype} tensor cannot index", hint="cast it to int64")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ArgumentError(
                f"the truth of a tensor of shape {show_shape(self.shape)} is ambiguous",
                hint="reduce it: ts.any(x) or ts.all(x)")
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write into the buffer, converting the value to this tensor's type, to the nearest where
        that rounds stochastically: ts.cast draws. A scaled tensor is quantised anew as a whole, so
        that its scale follows."""
        before_write(self._buffer)
        if self.scale is not None:
            before_write(self.scale._buffer)
        if self.scale is None:
            target, update = self.array, encode_value(value, self.type)
        else:
            target, update = np.array(self.numpy()), to_numpy(value)
        source = value.type if isinstance(value, Tensor) else np.asarray(value).dtype
        if not target.flags.writeable:
            raise ArgumentError(f"a {self.type}{show_shape(self.shape)} that cannot be written: a "
                                "view that repeats elements, or memory that is read-only",
                                hint="x = x.copy() first")
        try:
            target[_plain_index(index)] = update
        except IndexError as err:
            raise AxisError(f"index into {self.type}{show_shape(self.shape)}: {err}") from err
        except ValueError as err:
            raise ShapeError(
                f"assignment of {source}{show_shape(update.shape)} to a part of "
                f"{self.type}{show_shape(self.shape)}: {err}",
                hint="the value must broadcast to the part that is assigned",
            ) from err
        if self.scale is not None:
            new = OPERATORS["quantize"](target, self.type)
            self._buffer[...], self.scale._buffer[...] = new._buffer, new.scale._buffer
        elif self.dtype.packed:
            self._buffer[...] = pack(np.atleast_1d(target), self.dtype)

    def copy(self) -> Tensor:
        return Tensor(
            self.array.copy(), self.type, scale=None if self.scale is None else self.scale.copy(),
            is_param=self.is_param, name=self.name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *_attributes()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        op = OPERATORS.get(name)
        if op is None:
            function = {name: f"ts.{name}(x)"} if name in FUNCTIONS else {}
            raise UnknownNameError(f"a tensor has no attribute {name!r}", name, _attributes,
                                   {**function, **METHODS})
        return op(self) if name in PROPERTIES else MethodType(op, self)

    if TYPE_CHECKING:  # of the graph layer, see Operators
        def __getitem__(self, index: Any) -> Tensor: ...

    # --- how it looks -------------------------------------------------------------------------
    def __repr__(self) -> str:
        head = f"Tensor{list(self.shape)} {self.type}"
        head += f" on {self.device}{', offloaded' * self.offloaded}" * (self.device != "cpu")
        values = self._plain()
        body = np.array2string(values, precision=4, threshold=24, edgeitems=2, max_line_width=88)
        return f"{head}{' param' if self.is_param else ''}{summarize(values)}\n{body}"


PLAIN.add(Tensor)


INNER = ("ufunc", "array_function")  # begins of names in OPERATORS that are no attributes


def _attributes() -> list[str]:
    every = {**OPERATORS, **dict.fromkeys(dir(Tensor))}
    return [n for n in every if not n.startswith(("_", *INNER))]


PROPERTIES = frozenset({"T", "mT"})


def _need_parts(array: Any, kind: Any) -> None:
    """Raise ArgumentError: Tensor(...) was called as if it made a tensor of data."""
    text = np.array2string(np.asarray(array), threshold=4) if isinstance(array, np.ndarray) \
        else repr(array)
    data = text if len(text) < 40 and "\n" not in text else "data"
    raise ArgumentError("Tensor(...) takes a stored buffer and a ts.NumericType; "
                        f"got {type(array).__name__}" + ("" if kind is None else f" and {kind!r}"),
                        hint=f"ts.tensor({data}) makes a tensor of numbers")


def summarize(values: np.ndarray) -> str:
    """` min .. max .., mean ..` of the finite part, and how many elements are not finite; of
    bools how many are True."""
    if values.size < 2 or values.dtype.kind not in "biuf":
        return ""
    if values.dtype.kind == "b":
        return f"  {int(values.sum())} of {values.size} True"
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    bad = f"  NOT FINITE: {wide.size - finite.size}" if finite.size < wide.size else ""
    if not finite.size:
        return bad
    return f"  min {finite.min():.4g} max {finite.max():.4g} mean {finite.mean():.4g}{bad}"


def encode_value(value: Any, numeric: NumericType) -> np.ndarray:
    """A tensor, array or number as elements of `numeric`, unpacked."""
    if isinstance(value, Tensor):
        array, source = value.array, value.dtype
    else:
        array = np.asarray(value)
        source = as_type(array.dtype).dtype
    if source is numeric.dtype:
        return array
    policy = numeric.policy
    if source.kind == "float" and source.numpy.itemsize < 4:
        array = decode(array, source)
    cut = policy.rounding == "toward_zero"
    return encode(array, numeric.dtype, saturate=policy.saturate,
                  rounding="toward_zero" if cut else "nearest_even")


def _plain_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_plain_index(i) for i in index)
    numbers = index.numpy() if isinstance(index, Tensor) else index
    return decode(numbers, "int4") if getattr(numbers, "dtype", None) == "int4" else numbers


def tensor(data: Any, dtype: Any = None, *, name: str | None = None) -> Tensor:
    """A tensor from nested lists, numbers, NumPy, anything with DLPack or `__array__`.

    Lists that hold tensors are joined as `ts.stack` joins them, in traced functions too. Python
    floats become f32, integers int64 (those beyond it uint64) and bools bool_ unless `dtype` says
    otherwise; arrays keep their type (f64 ones as the setting f64_arrays says). Numbers are
    rounded as `dtype` says, but to the nearest where it rounds stochastically: `ts.cast` draws. The
    buffer is a copy, on the device that the setting `device` chooses; that of a tensor on a GPU
    stays there.
    Raises DTypeError for element types without a numeric type, ArgumentError for ragged lists.
    """
    data = _stack_nested(data)
    data = data if isinstance(data, Tensor | np.ndarray) else hooks.adopt.get()(data, "data")
    if isinstance(data, Tensor) and (data.traced or data.place != HOST):
        made = data.copy() if dtype is None else OPERATORS["to_nearest"](data, dtype)
        made.is_param, made.name = False, name
        return made
    return hooks.place_new.get()(_on_host(data, dtype, name))


def _stack_nested(value: Any) -> Any:
    """Nested lists that hold tensors as the tensor of them, where these are: it follows their
    values in a traced function, and stays on their GPU. Anything else as it is."""
    if isinstance(value, Complex):
        raise ArgumentError("a complex tensor where a real one is needed",
                            hint="its parts are z.real and z.imag, its magnitude abs(z); it has "
                            "+ - * / and @; ts.map_tree(f, z) is f of both parts")
    if type(value) not in (list, tuple) or not _holds_tensor(value):
        return value
    return FUNCTIONS["stack"]([_stack_nested(x) for x in value])


def _holds_tensor(value: Any) -> bool:
    kinds = set(map(type, value))
    return any(issubclass(kind, Tensor) for kind in kinds) or (
        not kinds.isdisjoint((list, tuple)) and any(
            type(x) in (list, tuple) and _holds_tensor(x) for x in value))


def of_codes(codes: np.ndarray, shape: tuple[int, ...], numeric: NumericType) -> Tensor:
    """The tensor of a packed type whose bytes these are, in any shape: they are not packed anew."""
    made = Tensor(np.zeros((*(0 for _ in shape[:-1]), 1), numeric.dtype.numpy), numeric)
    rows = (*shape[:-1], row_bytes(shape[-1] if shape else 1, numeric.dtype))
    made._buffer, made._shape = codes.reshape(rows), shape
    return made


def _on_host(data: Any, dtype: Any, name: str | None) -> Tensor:
    array = to_numpy(data)
    if dtype is None:
        weak = not hasattr(data, "dtype") and array.dtype == np.float64
        array = array if weak or isinstance(data, Tensor) else wide_arrays.admit(array)
        numeric = data.type if isinstance(data, Tensor) else as_type("f32" if weak else array.dtype)
    else:
        numeric = as_type(dtype)
    policy = numeric.policy
    if policy.custom is not None or policy.scaled or policy.per_channel is not None:
        return OPERATORS["quantize"](array, numeric)
    out = Tensor(np.array(encode_value(array, numeric), order="C"), numeric, name=name)
    stated = dtype is not None or (isinstance(data, Tensor) and not wide_arrays.is_unstated(data))
    return out if stated else wide_arrays.remember(out)

def to_numpy(data: Any) -> np.ndarray:
    """Anything array-like on the host as a NumPy array, without a copy where possible."""
    if isinstance(data, np.ndarray):
        return _base_array(data)
    if isinstance(data, Tensor):
        return data.numpy()
    if hasattr(data, "__dlpack__") and not isinstance(data, np.generic):
        try:
            return dlpack.imported(data)
        except (BufferError, RuntimeError, TypeError) as err:
            raise DTypeError(
                f"{type(data).__module__}.{type(data).__name__} does not pass DLPack: {err}",
                hint="move it to the host, for example x.cpu(), or detach() it") from err
    try:
        array = np.asarray(data)
    except ValueError as err:
        raise ArgumentError(f"not a rectangular array: {err}") from err
    if data is None:
        raise DTypeError("a tensor holds numbers, got None", hint="None is what a function without "
                         "a return gives, and a kernel that only writes: use what it wrote")
    if array.dtype == object and (large := _beyond_64_bits(array)) is not None:
        raise DTypeError(f"the integer {large} has more than 64 bits",
                         hint="int64 holds -2^63 .. 2^63 - 1, uint64 0 .. 2^64 - 1; ts.tensor("
                         "float(i)) is the nearest number that a float holds")
    if array.dtype == object or array.dtype.kind in "USMm":
        raise DTypeError(
            f"a tensor holds numbers, got {type(data).__name__} of {_KINDS[array.dtype.kind]}",
            hint="nested lists of numbers, a NumPy array, or an object with __dlpack__")
    return _base_array(_integers(data, array))


def _base_array(array: np.ndarray) -> np.ndarray:
    """An array as loops and devices read it: no np.matrix, whose * is matmul, nothing under a
    mask, and in this machine's order of bytes, which that of a big-endian file is not."""
    if type(array) is not np.ndarray:
        if np.ma.is_masked(array):
            raise ArgumentError("a masked array: a tensor would have the elements under its mask",
                                hint="a.filled(0.0), a.compressed(), or ts.where with a mask")
        array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _integers(data: Any, array: np.ndarray) -> np.ndarray:
    """The array of a list of Python integers, some of 2^63 and more: NumPy makes f64 of it where
    others are smaller, and loses their last digits."""
    if array.dtype == np.float64 and isinstance(data, list | tuple) and (array >= 2**63).any():
        exact = np.array(data, object)
        if all(type(i) is int and 0 <= i < 2**64 for i in exact.flat):
            return exact.astype(np.uint64)
    return array


def _beyond_64_bits(array: np.ndarray) -> int | None:
    """An integer of an array of Python integers that no type of 64 bits holds."""
    if not all(type(i) is int for i in array.flat):
        return None
    return next((i for i in array.flat if not -2**63 <= i < 2**64), None)


_KINDS = {"U": "text (str)", "S": "bytes", "O": "Python objects", "M": "dates", "m": "durations"}


def param(data: Any, dtype: Any = None, *, name: str | None = None) -> Tensor:
    """A trainable tensor: `ts.grad` differentiates the arguments that are params.

    data: as for `ts.tensor`. A traced or a distributed tensor stays one: the result is its copy,
    marked.
    """
    if isinstance(data, Tensor) and data.__class__ is not Tensor:
        out = (data if dtype is None else OPERATORS["astype"](data, dtype)).copy()
        out.name = name or out.name
    else:
        out = tensor(data, dtype, name=name)
    out.is_param = True
    return out


def as_tensor(value: Any) -> Tensor:
    """`value` itself when it is a Tensor, else a tensor around it (NumPy memory is shared)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        array = wide_arrays.admit(_base_array(value))
        return wide_arrays.remember(Tensor(array, as_type(array.dtype)))
    if isinstance(value, TensorType | type | str) or callable(value):
        raise DTypeError(f"expected a tensor, an array or a number, got {value!r}")
    value = _stack_nested(value)
    if isinstance(value, Tensor):
        return value
    there = hooks.adopt.get()(value, "x")
    return there if isinstance(there, Tensor) else _on_host(value, None, None)


hooks.as_tensor.fill(as_tensor)

# How a Python value reaches a traced function as a constant.
STATIC_HINT = 'declare it after *: def f(x, *, k), called f(x, k=3); or ts.jit(static=("k",))'
Shape = Sequence[int | Dim]
