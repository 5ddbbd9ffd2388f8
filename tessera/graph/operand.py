"""What public op functions share: operands as tensors, promotion, compute and storage types.

An op of the graph computes in a NumPy type (f32, f64, integers, bool). A function on low-precision
tensors therefore reads: convert the operands to the compute type, apply ops, round once to the
result's type as its policy says.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import config, hooks, wide_arrays
from ..call_errors import FAILURES, call_refusal, refuses, show_call
from ..dims import Dim, as_index, show_shape
from ..errors import (
    ArgumentError,
    AxisError,
    DTypeError,
    OutOfMemoryError,
    TesseraError,
    warn_user,
)
from ..numerics import DType, NumericType, as_type, result_type
from ..numerics.promote import overflow
from ..open_trace import trace_state
from ..runtime.arrays import HOST
from ..tensor import FUNCTIONS, Tensor, as_tensor
from ..tile.launch.resident import Resident
from . import functions as F
from .eager_forms import LONG_WAY, UNKNOWN, EagerCalls
from .op import name_operands
from .trace import LITERAL, Tracer, apply, current_builder
from .weak_numbers import Number, fitting, is_number, weak_type

Function = TypeVar("Function", bound=Callable[..., Any])
F64 = as_type("f64").dtype
MOST_ELEMENTS = 1 << 59  # of one tensor: NumPy counts bytes in 63 bits
PUBLIC = FUNCTIONS  # every public op function, for ts.* and the docs


def public(fn: Function) -> Function:
    """Register a public function; its errors name it and its tensor arguments."""
    name, states_type = f"ts.{fn.__name__}", getattr(fn, "states_type", False)

    def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            out = _run(name, fn, args, kwargs)
        except TesseraError as err:
            name_operands(err, name, _tensor_arguments(inspect.signature(fn), args, kwargs))
            raise
        except FAILURES as err:
            signature = inspect.signature(fn)
            refusal = call_refusal(name, fn, signature, args, kwargs,
                                   _how_to_call(name, signature, args))
            if refusal is None:
                raise
            raise refusal from err
        if wide_arrays.ANY_UNSTATED and not states_type:
            wide_arrays.inherit(out, (*args, *kwargs.values()))
        return out

    call = _known_or(name, fn, compute)
    if fn.__name__ in PUBLIC:
        raise ArgumentError(f"a public function named {fn.__name__!r} exists already")
    PUBLIC[fn.__name__] = call
    setattr(F, fn.__name__, refuses(call))
    F.__all__.append(fn.__name__)
    return call  # type: ignore[return-value]


def _known_or(name: str, fn: Callable, compute: Callable[[tuple, dict[str, Any]], Any]) -> Callable:
    """fn as it is called: as a call like one before, where it is one, else the long way, compute.
    """
    calls = EagerCalls(name, fn)
    readers = calls.readers

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        now: Any = LONG_WAY
        if trace_state.builder is None:
            if kwargs:
                now = calls.read(args, kwargs)
            else:
                read = readers.get(tuple(map(type, args)))
                now = UNKNOWN if read is None else read(*args)
            if now is not UNKNOWN and now is not LONG_WAY:
                return now
        out = compute(args, kwargs)
        for leave in hooks.exits:  # of this frame, which the sentinel knows
            leave(out)
        if now is UNKNOWN:
            calls.met(args, kwargs)
        return out

    call.eager = calls  # type: ignore[attr-defined]
    return call


def _run(name: str, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The call: traced, now on the host, or now on the GPU where its operands lie."""
    if trace_state.builder is None and _elsewhere(args, kwargs):
        return hooks.on_gpu.get().call(name, fn, args, kwargs)
    return fn(*args, **kwargs)


def _elsewhere(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call is computed on a GPU: an operand lies there, or the setting says so."""
    if config.device not in ("auto", "cpu"):
        return True
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is Resident:
            return True
        if kind is not Tensor and isinstance(a, Tensor):
            if a.place != HOST:
                return True
        elif isinstance(a, tuple | list) and any(
                isinstance(x, Tensor) and x.place != HOST for x in a):
            return True
    return False


def states_type(fn: Function) -> Function:
    """Decorator below `public`: the call states the type of its result."""
    fn.states_type = True  # type: ignore[attr-defined]
    return fn


def named(name: str) -> Callable[[Function], Function]:
    """Decorator: errors of a function that is no public one say `name` and its tensor arguments."""

    def decorate(fn: Function) -> Function:
        signature = inspect.signature(fn)

        def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
            try:
                return _run(name, fn, args, kwargs)
            except TesseraError as err:
                name_operands(err, name, _tensor_arguments(signature, args, kwargs))
                raise

        return _known_or(name, fn, compute)  # type: ignore[return-value]

    return decorate


def _how_to_call(name: str, signature: inspect.Signature, args: tuple) -> str | None:
    """Where extents were given one by one: as one shape."""
    if next(iter(signature.parameters), "") == "shape" and len(args) > 1 and all(
        isinstance(a, int) and not isinstance(a, bool) for a in args
    ):
        return f"{name}({args}): the extents are one argument; {show_call(name, signature)}"
    return None


def _tensor_arguments(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, str]:
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    shown = {}
    for name, value in bound.items():
        items = enumerate(value) if isinstance(value, tuple | list) else [(None, value)]
        for i, item in items:
            if isinstance(item, Tensor | np.ndarray):
                label = name if i is None else f"{name}[{i}]"
                shown[label] = describe(item)
    return shown


def describe(x: Any) -> str:
    """`bf16[8, 64]`, with the name of a named tensor."""
    kind = x.type if isinstance(x, Tensor) else x.dtype
    name = x.name if isinstance(x, Tensor) and x.name and x.name != LITERAL else ""
    return f"{kind}{show_shape(x.shape)}" + (f" {name!r}" if name else "")


# --- literals and promotion -------------------------------------------------------------------
_literals: dict[tuple, Tensor] = {}  # keyed by repr: 0.0 == -0.0 and 1 == True, but differ


def literal(value: Any, like: Tensor | NumericType) -> Tensor:
    """A Python number as a 0-d tensor of `like`'s compute type."""
    numeric = compute_type(like.type if isinstance(like, Tensor) else like)
    key = (repr(value), numeric)
    made = _literals.get(key)
    if made is None:
        fraction = isinstance(value, float) and not value.is_integer()  # or no number at all
        if numeric.dtype.kind in ("int", "uint") and fraction:
            raise DTypeError(f"{value!r} is not an element of {numeric.dtype}",
                             hint="cast the tensor to a floating type first")
        if numeric.dtype.kind in ("int", "uint") and not (
                numeric.dtype.min <= value <= numeric.dtype.max):
            raise ArgumentError(f"{value} is outside {numeric.dtype} ({numeric.dtype.min} .. "
                                f"{numeric.dtype.max})",
                                hint="cast the tensor to a wider integer first")
        lost = overflow(value, numeric.dtype)
        if lost is not None:
            warn_user(lost, RuntimeWarning)
            value = np.inf if value > 0 else -np.inf
        made = Tensor(np.array(value, numeric.dtype.numpy), numeric, name=LITERAL)
        if lost is None and len(_literals) < 4096:
            _literals[key] = made
    return made


@functools.lru_cache(maxsize=4096)
def compute_type(numeric: NumericType) -> NumericType:
    """The plain type in which ops on `numeric` compute: f32, f64, or the integer itself; int8 for
    int4, in which NumPy does not compute."""
    if numeric.policy.custom is not None:
        return as_type(numeric.policy.custom.compute)  # type: ignore[attr-defined]
    if numeric.policy.scaled or numeric.policy.per_channel is not None:
        return as_type("f32")
    packed = numeric.dtype.packed and numeric.dtype.kind == "int"
    return as_type("int8" if packed else numeric.dtype.compute)


def to_compute(x: Tensor) -> Tensor:
    """x in its compute type: decoded, unscaled. x itself when it is there already."""
    numeric = compute_type(x.type)
    if x.scale is not None:
        return F.dequantize(x)
    return x if x.type.dtype is numeric.dtype else convert(x, numeric)


def dequantized(x: Any) -> Tensor:
    """x as a tensor whose elements are its values: a scaled one, codes and scale, is multiplied
    out, because moving the codes would lose the scale."""
    x = as_tensor(x)
    return x if x.scale is None else to_compute(x)


def with_one_scale(x: Any) -> Tensor:
    """x as a tensor whose elements may change places: codes that share one scale keep it; others
    are multiplied out."""
    x = as_tensor(x)
    one = x.scale is None or (x.scale.ndim == 0 and x.policy.custom is None)
    return x if one else to_compute(x)


def keep_scale(y: Tensor, x: Tensor) -> Tensor:
    """y, made of x by moving its elements, with x's scale."""
    y.scale = x.scale
    return y


def convert(x: Tensor, numeric: NumericType) -> Tensor:
    """x as `numeric`, rounded as its policy says. x itself when nothing changes."""
    if x.type == numeric:
        return x
    return hooks.cast.get()(x, numeric)


def promote(*xs: Any) -> tuple[list[Tensor], NumericType]:
    """Operands in one compute type, and the numeric type of the result.

    Python numbers are weak: they take the tensors' type. Raises DTypeError when two formats have
    no common type (fp8_e4m3 with fp8_e5m2).
    """
    if _are_alike(xs):
        return [*xs], xs[0].type
    given: list[Tensor | None] = [None if is_number(x) else as_tensor(x) for x in xs]
    if all(t is None for t in given):  # as_tensor of a traced number is that number still
        xs = tuple(x if isinstance(x, Tensor) else _named(as_tensor(x)) for x in xs)
        given = [*xs]
    tensors = [t for t in given if t is not None]
    common = tensors[0].type
    for tensor in tensors[1:]:
        if tensor.type is not common:
            common = result_type(common, tensor.type)
    for x in xs:
        if is_number(x):
            dtype = weak_type(common.dtype, x)
            common = common if dtype is common.dtype else as_type(dtype)
    if common.dtype is F64 and wide_arrays.UNSTATED:
        wide_arrays.check_widening(tensors)
    numeric = compute_type(common)
    out = []
    for x, t in zip(xs, given, strict=True):
        if t is None:
            out.append(number_in(x, numeric))
        elif numeric.dtype is F64 and isinstance(x, list | tuple) and t.dtype.kind == "float":
            out.append(Tensor(np.asarray(x, np.float64), numeric))  # as_tensor has rounded it
        else:
            out.append(convert(to_compute(t), numeric))
    return out, common


def _named(x: Tensor) -> Tensor:
    """A tensor of a Python number as a literal: a trace has a constant for it, no capture."""
    return x if type(x) is not Tensor else Tensor(x.array, x.type, name=LITERAL)


def _are_alike(xs: Sequence[Any]) -> bool:
    """Whether operands are tensors on the host, of one type in which ops compute."""
    for x in xs:
        if x.__class__ is not Tensor or x._scale is not None or x.type is not xs[0].type:
            return False
    numeric = xs[0].type
    return numeric.dtype is not F64 and compute_type(numeric) == numeric


def number_in(x: Any, numeric: NumericType) -> Tensor:
    """A Python or NumPy number, known or traced, in a type in which ops compute."""
    if isinstance(x, Number):
        return convert(fitting(x, numeric.dtype), numeric)
    return literal(x.item() if isinstance(x, np.generic) else x, numeric)


def holds_integers(x: Tensor) -> bool:
    """Whether its elements are integers: those of a scaled type are multiples of a scale."""
    return x.dtype.kind in ("int", "uint") and x.scale is None


def countable(x: Tensor) -> Tensor:
    """x in a type whose sums do not wrap at once: bools as int64, narrow integers as int32."""
    if x.dtype.kind == "bool":
        return convert(x, as_type("int64"))
    if holds_integers(x) and x.dtype.bits < 32:
        return convert(x, as_type("int32"))
    return x


def floating(x: Any) -> tuple[Tensor, NumericType]:
    """x in its floating compute type (integers and bools become f32), and the result's type."""
    x = as_tensor(x)
    numeric = x.type
    if numeric.dtype.kind != "float" and x.scale is None:
        numeric = as_type("f32")
        return convert(x, numeric), numeric
    return to_compute(x), numeric


def store(y: Tensor, numeric: NumericType) -> Tensor:
    """y rounded once to the result's type."""
    if y.type == numeric:
        return y
    policy = numeric.policy
    if policy.custom is not None or policy.scaled or policy.per_channel is not None:
        return y  # results of quantised operands stay in the compute type
    out = convert(y, numeric)
    if isinstance(out, Tracer):
        out.builder.unrounded[out.value] = y
    return out


def as_stored(x: Tensor) -> tuple[Tensor, float]:
    """(z, factor) with x = factor z, where a trace shows that x was widened from the narrow type of
    z: through views, and multiplications by a number, which commute with it. Else (x, 1)."""
    if not isinstance(x, Tracer) or x.builder is not current_builder():
        return x, 1.0
    node = x.builder.makers.get(x.value)
    if node is None or not node.inputs or node.op.multi:
        return x, 1.0
    inner = Tracer(x.builder, node.inputs[0])
    if node.op.converts and inner.dtype.kind == x.dtype.kind and _widens(inner.dtype, x.dtype):
        return inner, 1.0
    if node.op.view and inner.type == x.type:
        z, factor = as_stored(inner)
        return (apply(node.op, z, **node.attrs), factor) if z is not inner else (x, 1.0)
    number = x.builder.makers.get(node.inputs[1]) if node.op.name == "mul" else None
    if number is not None and number.op.name == "constant":
        z, factor = as_stored(inner)
        return (z, factor * float(number.attrs["value"])) if z is not inner else (x, 1.0)
    return x, 1.0


def _widens(narrow: DType, wide: DType) -> bool:
    """Of fewer bits, or of fewer digits in as many, as tf32 is beside f32."""
    return narrow.bits < wide.bits or (narrow.exp == wide.exp and narrow.man < wide.man)


def need_float(x: Tensor, what: str) -> None:
    if x.dtype.kind != "float":
        raise DTypeError(f"{what} needs a floating type, got {x.type}", hint="ts.cast(x, ts.f32)")


# --- axes -------------------------------------------------------------------------------------
def axis_index(axis: Any, ndim: int) -> int:
    """A Python axis as 0..ndim-1. Raises AxisError."""
    i = as_index(axis)
    if i is None:
        raise ArgumentError(f"axis must be an integer, got {axis!r}")
    if not -ndim <= i < ndim:
        raise AxisError(
            f"axis {i} is outside a tensor of {ndim} axes",
            hint=f"valid: {-ndim}..{ndim - 1}" if ndim else "the tensor is a scalar: the axes of a "
            "reduction are then 0, -1, () or None",
        )
    return i % ndim


def axes_tuple(axis: Any, ndim: int) -> tuple[int, ...]:
    """None (all), an axis, or several as a sorted tuple. Raises AxisError on repeats."""
    if axis is None:
        return tuple(range(ndim))
    items = axis if isinstance(axis, tuple | list) else (axis,)
    if ndim == 0 and len(items) == 1 and _is_line(items[0]):
        return ()  # a scalar is reduced as a line of one element, as in NumPy
    axes = tuple(axis_index(a, ndim) for a in items)
    if len(set(axes)) != len(axes):
        raise AxisError(f"axis {tuple(items)} names an axis twice")
    return tuple(sorted(axes))


def _is_line(axis: Any) -> bool:
    return isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis in (0, -1)


def scalar_line(fn: Function) -> Function:
    """Decorator below `public` of a function along an axis: a scalar is a line of one element, on
    which axis 0, -1, None and () are the same, and its results are scalars."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = as_tensor(x)
        if x.ndim:
            return fn(x, *args, **kwargs)
        bound = signature.bind(x, *args, **kwargs)
        axis = bound.arguments.get("axis", 0)
        if axis is None or (isinstance(axis, tuple) and not axis) or _is_line(axis):
            line = F.reshape(dequantized(x), (1,))
            out = fn(**{**bound.arguments, "x": line, "axis": 0})
            back = [F.reshape(y, ()) if tuple(y.shape) == (1,) else y
                    for y in (out if isinstance(out, tuple) else (out,))]
            return tuple(back) if isinstance(out, tuple) else back[0]
        return fn(x, *args, **kwargs)

    return call  # type: ignore[return-value]


def shape_tuple(shape: Any) -> tuple[int | Dim, ...]:
    """A shape given as int, str, Dim or a sequence of them. Raises ArgumentError."""
    items: Sequence = shape if isinstance(shape, tuple | list | range) else (shape,)
    if isinstance(shape, np.ndarray) and shape.ndim == 1:
        items = shape.tolist()
    dims = tuple(Dim.of(d) for d in items)
    for d in dims:
        if isinstance(d, int) and d < 0:
            raise ArgumentError(f"extents cannot be negative: {show_shape(dims)}")
    count = math.prod(d for d in dims if isinstance(d, int))
    if count > MOST_ELEMENTS:
        raise OutOfMemoryError(f"no memory has room for {show_shape(dims)}, {count:.3g} elements",
                               hint="does the shape hold what was meant as a value?")
    return dims
