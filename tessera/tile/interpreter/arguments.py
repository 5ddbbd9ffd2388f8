"""The arguments of a kernel call: checked against the annotations, bound to memories."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from types import FunctionType
from typing import Any

import numpy as np

from tessera.dims import Dim, show_shape, solve, solved_names
from tessera.errors import ArgumentError, DTypeError, ShapeError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, NumericType, as_type, encode, pack
from tessera.runtime.arrays import HOST
from tessera.runtime.dlpack import imported
from tessera.runtime.host_memory import before_write
from tessera.tensor import Tensor as Array
from tessera.tensor import TensorType
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.numpy_values import constant
from tessera.tile.ir.types import GlobalTensor, Scalar, Type


class Tile:
    """Annotation of a kernel parameter: a matrix of any extents and type."""


@dataclass(frozen=True)
class Placement:
    """Where a call runs: `device` is a GPU's number or HOST. staged: host arrays are copied."""

    device: int = HOST
    staged: bool = False

    @property
    def on_host(self) -> bool:
        return self.device == HOST


@dataclass
class Bound:
    """A call's arguments. memories: by parameter; sizes: of named extents; texts: of any extent;
    explicit: the parameters that the call itself gave; place: where it runs; kernel: whose launches
    are counted when it draws.
    """

    types: dict[str, Type] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # memories and scalars
    given: dict[str, Any] = field(default_factory=dict)  # the caller's own objects
    constants: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    storage: dict[str, tuple[Any, np.ndarray]] = field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    place: Placement = Placement()
    kernel: str = ""

    def write_back(self) -> None:
        """Copies what the kernel wrote into arguments that are not plain contiguous arrays."""
        for name, (target, work) in self.storage.items():
            memory = self.values[name]
            if not memory.written:
                continue
            if isinstance(target, Array):
                target.buffer[...] = pack(np.atleast_1d(work), target.dtype).reshape(
                    target.buffer.shape)
            else:
                target[...] = work


def bind(fn_name: str, parameters: dict[str, Any], annotations: dict[str, Any],
         arguments: dict[str, Any], is_constant: Callable[[str], bool],
         read: Callable[[Any, str], tuple[Any, NumericType]] | None = None) -> Bound:
    """Checks and converts each argument. Raises ShapeError, DTypeError, ArgumentError.

    read: how arrays are read that do not lie in host memory, (array, words for messages) ->
    (something with a shape, its type); they are kept as they are.
    """
    bound = Bound()
    for name in parameters:
        value, annotation = arguments[name], annotations.get(name)
        what = f"{fn_name}: argument {name}"
        if is_constant(name) and not isinstance(value, np.ndarray | Array):
            bound.constants[name] = _constant(value, annotation, what, parameters[name].default)
        elif value is None and isinstance(annotation, TensorType) and annotation.optional:
            bound.constants[name] = None
        elif isinstance(annotation, TensorType) or annotation is Tile or (
                annotation is None and not _is_number(value)):
            _tensor(bound, name, value, annotation, what, read or _array)
        elif isinstance(annotation, DType | NumericType | str):
            _scalar(bound, name, value, as_type(annotation), what)
        else:
            bound.constants[name] = _constant(value, annotation, what, parameters[name].default)
    _solve(bound)
    _products(bound, annotations)
    return bound


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | str | bool | tuple | DType | FunctionType) or x is None


def _constant(value: Any, annotation: Any, what: str, default: Any) -> Any:
    """A compile-time argument: a Python number, text, dtype, function or tuple of them."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if annotation is bool and not isinstance(value, bool):
        raise DTypeError(f"{what} must be a bool, got {value!r}", where=user_line())
    if isinstance(annotation, DType | NumericType) and isinstance(value, int | float):
        kind = as_type(annotation).dtype.kind
        value = float(value) if kind == "float" else value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if annotation is None and isinstance(default, int | float):
        if isinstance(value, str):
            raise DTypeError(f"{what} must be a number, as its default {default!r} is, got "
                             f"{value!r}", where=user_line(), hint=_number_in(value))
    elif annotation in (int, float, str) and isinstance(annotation, type) and not isinstance(
            value, annotation):
        said = {int: "an int", float: "a float", str: "a str"}[annotation]
        raise DTypeError(f"{what} must be {said}, got {value!r}", where=user_line(),
                         hint=_number_in(value))
    if not _is_number(value):
        raise DTypeError(f"{what} is a compile-time parameter: a number, text, dtype or function, "
                         f"got {type(value).__name__}", where=user_line(),
                         hint=f'annotate it, {what.split()[-1]}: ts.Tensor["N", ts.f32]'
                         if hasattr(value, "__array__") or hasattr(value, "__dlpack__") else
                         "pass its numbers one by one")
    return math.nan if value != value else value  # one NaN: it is compared with that of other calls


def _number_in(value: Any) -> str | None:
    """A hint for a number in quotes."""
    bare = value.strip() if isinstance(value, str) else ""
    return f"without quotes: {bare}" if bare.replace(".", "", 1).isdigit() else None


def _scalar(bound: Bound, name: str, value: Any, numeric: NumericType, what: str) -> None:
    dtype = numeric.dtype
    if isinstance(value, Array | np.ndarray) and value.size == 1:
        value = np.asarray(value).reshape(()).item()
    ok = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    whole = isinstance(value, int | np.integer)
    if not ok or (dtype.kind in ("int", "uint") and not whole):
        raise DTypeError(f"{what} must be a number of type {dtype}, got {value!r}",
                         where=user_line(), hint=f"pass {int(value)}, or annotate it ts.f32" if ok
                         and np.isfinite(value) else None)
    if dtype.kind in ("int", "uint") and not dtype.min <= value <= dtype.max:
        raise DTypeError(f"{what}: {value} does not fit into {dtype} ({dtype.min} .. {dtype.max})",
                         where=user_line(), hint="annotate it ts.i64, or ts.u64")
    bound.types[name] = Scalar(dtype)
    with np.errstate(over="ignore"):  # a float beyond the type is infinite
        bound.values[name] = constant(value, dtype)
    bound.given[name] = value


def _tensor(bound: Bound, name: str, value: Any, annotation: Any, what: str,
            read: Callable[[Any, str], tuple[Any, NumericType]]) -> None:
    array, numeric = read(value, what)
    if isinstance(annotation, TensorType):
        dims: tuple[Any, ...] = annotation.shape
        if annotation.type is not None:
            numeric = _same_type(annotation.type, numeric, what)
    else:
        rank = len(array.shape)
        dims = tuple(Dim.of(f"{name}_{i}") for i in range(rank))
        if annotation is Tile and rank != 2:
            raise ShapeError(f"{what} has {rank} axes {show_shape(array.shape)}, a Tile has 2",
                             code="E_RANK", where=user_line())
    _extents(bound, name, dims, array.shape, what)
    bound.types[name], bound.given[name] = GlobalTensor(numeric, dims), value
    bound.values[name] = _memory(bound, name, value, array, numeric, what) if isinstance(
        array, np.ndarray) else array


def _memory(bound: Bound, name: str, value: Any, array: np.ndarray, numeric: NumericType,
            what: str) -> Memory:
    """The memory of a host array, contiguous; what was copied for that is written back later."""
    before_write(value.buffer if isinstance(value, Array) else array)
    work = array
    again = next((w for target, w in bound.storage.values() if target is value), None)
    if again is not None:  # given twice: both names have one memory
        work = again
        bound.storage[name] = (value, work)
    elif isinstance(value, Array) and value.dtype.packed:
        bound.storage[name] = (value, work)
    elif not array.flags.c_contiguous:
        work = np.ascontiguousarray(array)
        bound.storage[name] = (array, work)
    if work.dtype != numeric.dtype.numpy:
        raise DTypeError(f"{what} holds {work.dtype}, expected {numeric.dtype}", where=user_line(),
                         hint="bytes in this machine's order: x.astype(x.dtype.newbyteorder('='))")
    return Memory(name, work.shape, numeric, work.reshape(-1))


def _array(value: Any, what: str) -> tuple[np.ndarray, NumericType]:
    """The memory of an argument, shared where NumPy can."""
    if isinstance(value, Array):
        policy = value.type.policy
        if policy.scaled or policy.custom is not None or policy.per_channel is not None:
            raise DTypeError(f"{what} is {value.type}: kernels do not read scaled types",
                             hint="pass ts.dequantize(x), or codes and scale as two tensors",
                             where=user_line())
        return value.array, value.type
    if isinstance(value, np.ndarray):
        return value, as_type(value.dtype)
    if hasattr(value, "__dlpack__"):
        try:
            array = imported(value)
        except (BufferError, RuntimeError, TypeError) as err:
            raise DTypeError(f"{what} cannot pass through DLPack: {err}",
                             hint="the interpreter reads host memory: x.cpu()",
                             where=user_line()) from err
        return array, as_type(array.dtype)
    raise no_array(value, what)


def no_array(value: Any, what: str) -> ArgumentError:
    """The error of an argument where a tensor is annotated."""
    return ArgumentError(f"{what} must be an array, got {type(value).__name__}",
                        hint="a ts.Tensor, a NumPy array, or anything with __dlpack__",
                        where=user_line())


def _same_type(wanted: NumericType, got: NumericType, what: str) -> NumericType:
    stored_alike = wanted.dtype.name == "tf32" and got.dtype.name == "f32"
    if wanted.dtype is not got.dtype and not stored_alike:
        raise DTypeError(f"{what} is {got.dtype}, its annotation says {wanted}",
                         hint=f"convert it: ts.cast(x, ts.{wanted.dtype})", where=user_line())
    return wanted


def _extents(bound: Bound, name: str, dims: tuple[Any, ...], shape: tuple[int, ...],
             what: str) -> None:
    if len(dims) != len(shape):
        fewer = len(shape) > len(dims)
        raise ShapeError(f"{what} has {len(shape)} axes {show_shape(shape)}, its annotation has "
                         f"{len(dims)} {show_shape(dims)}", code="E_RANK", where=user_line(),
                         hint=f"give the annotation {len(shape)} extents, or pass "
                         + (f"{name}.reshape(-1)" if fewer and len(dims) == 1 else "a reshape"))
    for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        text = str(dim)
        known = bound.texts.setdefault(text, size)
        owner = bound.owners.setdefault(text, f"{name} axis {axis}")
        if isinstance(dim, Dim) and text.isidentifier():
            bound.sizes[text] = known
        if isinstance(dim, int) and dim != size:
            raise ShapeError(f"{what}: axis {axis} is {size}, its annotation says {dim}",
                             where=user_line(), hint=f"pass {dim} there, or give the extent a "
                             'name: Tensor["N", ...] takes any')
        if known != size:
            raise ShapeError(f"{what}: axis {axis} ({text}) is {size}, but {owner} ({text}) is "
                             f"{known}", hint=f"{text} is one extent: both must agree",
                             where=user_line())


def _solve(bound: Bound) -> None:
    """The names that only stand in expressions: E of the extent 2*E."""
    dims = [d for t in bound.types.values() if isinstance(t, GlobalTensor) for d in t.dims]
    for name, dim in solved_names(dims).items():
        step = solve(dim, bound.sizes)
        assert step is not None
        _, factor, rest = step
        size, owner = bound.texts[str(dim)], bound.owners[str(dim)]
        left = size - (rest.bind(bound.sizes) if isinstance(rest, Dim) else rest)
        assert isinstance(left, int)
        if left % factor or left // factor < 0:
            raise ShapeError(f"{owner} is {size}, its annotation says {dim}: no {name} gives that",
                             where=user_line(), hint=f"pass an extent that is {dim}")
        bound.sizes[name] = left // factor


def _products(bound: Bound, annotations: dict[str, Any]) -> None:
    """B*H against B and H where those are bound elsewhere."""
    for annotation in annotations.values():
        for dim in getattr(annotation, "shape", ()) if isinstance(annotation, TensorType) else ():
            if not isinstance(dim, Dim) or str(dim) not in bound.texts:
                continue
            value = dim.bind(bound.sizes)
            if isinstance(value, int) and value != bound.texts[str(dim)]:
                known = ", ".join(f"{n}={bound.sizes[n]}" for n in sorted(dim.names))
                raise ShapeError(
                    f"{bound.owners[str(dim)]} is {bound.texts[str(dim)]}, but {dim} = {value} "
                    f"with {known}", where=user_line(), hint=f"{dim} is computed from the "
                    "extents of the other arguments: all must agree")


def allocate(shape: tuple[int, ...], numeric: NumericType, poisoned: bool) -> np.ndarray:
    """A result that the kernel will write; NaN first when `poisoned`."""
    out = np.zeros(shape, numeric.dtype.numpy)
    if poisoned and numeric.dtype.kind == "float" and numeric.dtype.special != "none":
        out[...] = encode(np.float32("nan"), numeric.dtype)
    return out
