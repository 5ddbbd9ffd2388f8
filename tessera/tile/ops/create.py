"""Making values: constants, tiles, memory, and conversions between types."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import TesseraError
from tessera.numerics import DType, NumericType, as_type, bool_, f32, i32, uint32
from tessera.tile.builder import edge_rules, rules
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe, is_number
from tessera.tile.ir.numpy_values import array_dtype, cast_attrs, poison, rounded
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Buffer, Scalar, TileType, View


def _shape(t: OpTracer, shape: Any, what: str) -> tuple[int, ...]:
    """A shape of compile-time extents >= 1."""
    items = shape if isinstance(shape, tuple | list) else (shape,)
    out = tuple(t.ir.constant_int(n, f"an extent of {what}") for n in items)
    if any(n < 1 for n in out):
        t.fail(f"{what} of shape {list(out)}: extents are at least 1")
    return out


def as_dtype(t: OpTracer, dtype: Any, what: str) -> DType:
    """A dtype given as an object, a policy type or a string."""
    if isinstance(dtype, Handle | tuple | list) or dtype is None:
        t.fail(f"{what} needs a dtype, got {describe(dtype)}", "for example ts.f32")
    return _numeric(t, dtype, what).dtype


def _numeric(t: OpTracer, dtype: Any, what: str) -> NumericType:
    try:
        python = {float: f32, int: i32}
        return as_type(python.get(dtype, dtype) if isinstance(dtype, type) else dtype)
    except TesseraError as err:
        t.fail(f"{what}: {err.message}", err.hint)
        raise AssertionError from err


def _tile_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    return TileType(attrs["dtype"], attrs["shape"])


@declare(rule=lambda types, attrs: Scalar(attrs["dtype"]), attrs=("dtype", "value"), public=False,
         total=True)
def constant(dtype: Any, value: Any) -> Any:
    """A number."""
    return np.array([[value]], array_dtype(dtype))


def _full(t: OpTracer, shape: Any, value: Any, dtype: Any = None) -> Any:
    """A tile filled with one number; f32 unless told otherwise."""
    dtype = f32 if dtype is None else as_dtype(t, dtype, "full")
    if is_number(value):
        held = t.ir.to(value, dtype).value
        return t.ir.emit("full", [], shape=_shape(t, shape, "a tile"), value=held, dtype=dtype)
    if isinstance(value, Handle) and isinstance(value.type, Scalar) and value.type.uniform:
        return t.ir.emit("broadcast_to", [t.ir.cast(value, dtype)],
                         shape=_shape(t, shape, "a tile"))
    t.fail(f"full needs one number for the whole group, got {describe(value)}")


@declare(rule=_tile_rule, attrs=("shape", "value", "dtype"), lower=_full)
def full(shape: Any, value: Any, dtype: Any = None) -> Any:
    """A tile filled with one number; f32 unless told otherwise."""
    return np.full((1, *shape), value, array_dtype(dtype))


@macro()
def zeros(t: OpTracer, shape: Any, dtype: Any = None) -> Any:
    """A tile of zeros; f32 unless told otherwise."""
    return _full(t, shape, 0, dtype)


@macro()
def ones(t: OpTracer, shape: Any, dtype: Any = None) -> Any:
    """A tile of ones; f32 unless told otherwise."""
    return _full(t, shape, 1, dtype)


@declare(rule=lambda types, attrs: TileType(attrs["dtype"], (attrs["size"],)),
         attrs=("size", "start", "dtype"),
         lower=lambda t, start, stop=None, dtype=None: _arange(t, start, stop, dtype))
def arange(size: Any, start: Any = 0, dtype: Any = i32) -> Any:
    """start, start + 1, ..., stop - 1 as a tile; bounds are compile-time integers."""
    return np.arange(start, start + size)[None].astype(array_dtype(dtype))


def _arange(t: OpTracer, start: Any, stop: Any = None, dtype: Any = None) -> Any:
    lo, hi = (0, start) if stop is None else (start, stop)
    lo, hi = t.ir.constant_int(lo, "start"), t.ir.constant_int(hi, "stop")
    if hi <= lo:
        t.fail(f"arange({lo}, {hi}) is empty")
    kind = i32 if dtype is None else as_dtype(t, dtype, "arange")
    return t.ir.emit("arange", [], size=hi - lo, start=lo, dtype=kind)


def _ramp_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    for x in types:
        if not isinstance(x, Scalar) or not x.uniform or x.dtype != f32:
            raise RuleError(f"ramp needs two numbers of f32, got {x}")
    return TileType(f32, (attrs["size"],))


def _ramp_lower(t: OpTracer, start: Any, step: Any, size: Any) -> Any:
    return t.ir.emit("ramp", [t.ir.to(t.ir.value_of(x), f32) for x in (start, step)],
                     size=_shape(t, size, "ramp")[0])


@declare(rule=_ramp_rule, attrs=("size",), lower=_ramp_lower)
def ramp(start: Any, step: Any, size: Any) -> Any:
    """start, start + step, ..., start + (size - 1) step as a tile of f32. It costs an instruction
    for each element, where integers that are converted cost three."""
    start, step = (np.reshape(x, (-1, 1)) for x in (start, step))
    return start + step * np.arange(size, dtype=np.float32)


@macro()
def alloc_shared(t: OpTracer, shape: Any, dtype: Any = f32, swizzle: Any = None,
                 alignment: Any = 16, stages: Any = 1) -> Any:
    """Memory that the lanes of a group share; nothing is in it at first.

    swizzle='xor' permutes the columns of each row so that reading a column meets no bank twice.
    stages: that many buffers, chosen by buffer[stage].
    """
    if swizzle not in (None, "none", "xor"):
        t.fail(f"swizzle={swizzle!r} is not known", "'xor' or None")
    align = t.ir.constant_int(alignment, "alignment")
    if align < 1 or align & (align - 1):
        t.fail(f"alignment={align}: a power of two in bytes")
    return t.ir.emit("allocate", [], dtype=as_dtype(t, dtype, "alloc_shared"),
                     shape=_shape(t, shape, "alloc_shared"), space="shared",
                     stages=t.ir.constant_int(stages, "stages"),
                     swizzle=None if swizzle == "none" else swizzle, alignment=align)


@macro()
def alloc_register(t: OpTracer, shape: Any, dtype: Any = None) -> Any:
    """A variable of each lane: alloc_register(dtype); or a small array: (shape, dtype)."""
    if dtype is None:
        kind = as_dtype(t, shape, "alloc_register")
        return t.ir.emit("undefined", [], dtype=kind)
    return t.ir.emit("allocate", [], dtype=as_dtype(t, dtype, "alloc_register"),
                     shape=_shape(t, shape, "alloc_register"), space="register", stages=1,
                     swizzle=None, alignment=4)


@declare(rule=lambda types, attrs: Scalar(attrs["dtype"]), attrs=("dtype",), public=False)
def undefined(dtype: Any) -> Any:
    """A register that nothing has written: NaN, or a number nobody expects."""
    return poison((1, 1), dtype)


@macro()
def cast(t: OpTracer, x: Any, dtype: Any, bits: Any = None) -> Any:
    """x in another type, rounded to nearest even or as the type's policy says.

    bits: random words, uint32, one for each element, by which `@stochastic_round` rounds up where
    a word is below the fraction that is cut off, as 32 bits: tile.random_bits(index).
    """
    if isinstance(x, TensorRow) or (isinstance(x, Handle) and isinstance(x.type, View | Buffer)):
        x = t.call_op(OPS["load"], [x], {})
    numeric = _numeric(t, dtype, "cast")
    policy = numeric.policy
    if bits is not None:
        return _by_words(t, x, numeric, bits)
    if policy.rounding == "stochastic":
        t.fail("a cast with stochastic rounding has no element index to draw by",
               "store to a tensor of that type: the store rounds stochastically; or give words: "
               "cast(x, dtype, bits=ts.tile.random_bits(index))")
    extra = cast_attrs(policy)
    if is_number(x):
        return t.ir.emit("constant", [], dtype=numeric.dtype,
                         value=rounded(x, numeric.dtype, **extra))
    if not isinstance(x, Handle):
        t.fail(f"cast of {describe(x)}")
    return t.ir.cast(x, numeric.dtype, **extra)


def _by_words(t: OpTracer, x: Any, numeric: NumericType, bits: Any) -> Any:
    """A cast that rounds at random by words that are given."""
    dtype, policy = numeric.dtype, numeric.policy
    if policy.rounding != "stochastic":
        t.fail(f"a cast to {numeric} draws no bits", "a type with @stochastic_round")
    x, bits = t.ir.value_of(x), t.ir.value_of(bits)
    if x.type.dtype.kind != "float" and x.type.dtype.bits < 32:
        x = t.ir.cast(x, f32)
    if dtype.kind == "float":
        extra = {"saturate": True} if policy.saturate else {}
        return t.ir.emit("convert_random", [x, bits], t.ir.hint(x), dtype=dtype, **extra)
    whole = t.ir.arithmetic("trunc", (x,))
    cut = t.ir.arithmetic("abs", (t.ir.arithmetic("sub", (x, whole)),))
    # a fraction of an f32 has 24 bits: its 32 bits are exact
    fraction = t.ir.cast(t.ir.arithmetic("mul", (cut, 2.0**32)), uint32)
    up = t.call_op(OPS["where"], [t.ir.arithmetic("lt", (bits, fraction)), 1.0, 0.0], {})
    away = t.call_op(OPS["where"], [t.ir.arithmetic("lt", (x, 0.0)),
                                    t.ir.arithmetic("neg", (up,)), up], {})
    return t.ir.cast(t.ir.arithmetic("add", (whole, away)), dtype)


@macro()
def bitcast(t: OpTracer, x: Any, dtype: Any) -> Any:
    """The numbers of another type of 32 or 64 bits that have the bits of x."""
    x = t.ir.value_of(x)
    if not isinstance(x, Handle) or not isinstance(x.type, Scalar | TileType):
        t.fail(f"bitcast of {describe(x)}", "it takes a tile or a number of a kernel")
    return t.ir.emit("with_bits", [x], t.ir.hint(x), dtype=_numeric(t, dtype, "bitcast").dtype)


@macro()
def bytes_of(t: OpTracer, x: Any) -> Any:
    """The codes of numbers of a type of 8 bits, such as fp8_e4m3, as uint8: what lies in memory of
    them, to be moved as it is."""
    if isinstance(x, Handle) and isinstance(x.type, View | Buffer):
        x = t.call_op(OPS["load"], [x], {})
    if not isinstance(x, Handle) or not isinstance(x.type, Scalar | TileType):
        t.fail(f"bytes_of {describe(x)}", "it takes a tile or a number of a kernel")
    return t.ir.emit("encode_bytes", [x], t.ir.hint(x), dtype=x.type.dtype)


def _convert_builtin(name: str, dtype: DType, python: Any) -> None:
    def lower(t: OpTracer, x: Any = 0) -> Any:
        if is_number(x) or isinstance(x, str):
            return t.ir.call_python(python, x)
        if not isinstance(x, Handle):
            t.fail(f"{python.__name__} of {describe(x)}")
        if dtype is bool_:
            return t.ir.truth(x)
        if dtype is f32 and x.type.dtype.name == "f64":
            return x
        if dtype is i32 and x.type.dtype.kind in ("int", "uint") and x.type.dtype.bits >= 32:
            return x
        return t.ir.cast(x, dtype)

    lower.__doc__ = f"{python.__name__}(x) of Python."
    macro(name=name, public=False)(lower)


_convert_builtin("to_float", f32, float)
_convert_builtin("to_int", i32, int)
_convert_builtin("to_bool", bool_, bool)


# --- shapes of tiles --------------------------------------------------------------------------
def _expand_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "a new axis")
    shape = list(t.shape)
    shape.insert(attrs["axis"], 1)
    return TileType(t.dtype, tuple(shape))


@declare(rule=_expand_rule, attrs=("axis",), run=True, public=False, edges=edge_rules.new_axis,
         moves=True)
def expand_dims(m: Any, op: Any, x: Any) -> Any:
    """The tile with a new axis of extent 1."""
    # Not a pure op of the machine: that would widen a tile of one element as if it were a number.
    return np.expand_dims(x, op.attr["axis"] + 1)


@macro()
def stack(t: OpTracer, tiles: Any, axis: Any = -1) -> Any:
    """Tiles of one shape beside each other along a new axis, the last unless told otherwise:
    stack((re, im))[..., 0] is re."""
    given = [t.ir.value_of(x) for x in tiles] if isinstance(tiles, tuple | list) else []
    shapes = {x.type.shape for x in given if isinstance(x, Handle) and isinstance(
        x.type, TileType)}
    if not given or len(shapes) != 1 or not all(isinstance(x, Handle) and isinstance(
            x.type, TileType) for x in given):
        t.fail(f"stack of {describe(tiles)}", "a tuple of tiles of one shape: stack((a, b))")
    rank = len(shapes.pop()) + 1
    along = t.ir.constant_int(axis, "axis")
    if not -rank <= along < rank:
        t.fail(f"stack along axis {along} of tiles with {rank - 1} axes", f"-{rank} to {rank - 1}")
    along %= rank
    at = t.call_op(OPS["arange"], [0, len(given)], {})
    at = t.call_op(OPS["reshape"], [at, tuple(len(given) if i == along else 1
                                              for i in range(rank))], {})
    out, *rest = [t.ir.expand(x, along) for x in reversed(given)]
    for i, x in zip(reversed(range(len(rest))), rest, strict=True):
        out = t.ir.arithmetic("where", (t.ir.arithmetic("eq", (at, i)), x, out))
    return out


def _transpose_lower(t: OpTracer, x: Any, axes: Any = None) -> Any:
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    rank = len(x.type.shape) if isinstance(x, Handle) and isinstance(
        x.type, View | Buffer | TileType) else 2
    order = tuple(range(rank))[::-1] if axes is None else _order(t, axes, rank)
    if order == (1, 0):
        if isinstance(x, Handle) and isinstance(x.type, View | Buffer):
            return t.ir.emit("view_transpose", [x], t.ir.hint(x))
        return t.ir.emit("transpose", [x])
    return t.ir.emit("permute", [t.ir.value_of(x)], axes=order)


def _order(t: OpTracer, axes: Any, rank: int) -> tuple[int, ...]:
    found = tuple(t.ir.constant_int(a, "an axis") for a in axes) if isinstance(
        axes, tuple | list) else ()
    order = tuple(a + rank if a < 0 else a for a in found)
    if sorted(order) != list(range(rank)):
        t.fail(f"axes={found or axes} of a tile of {rank} axes",
               f"each of 0..{rank - 1} once: axes={tuple(range(rank))[::-1]}")
    return order


@declare(rule=lambda types, attrs: _transposed(types[0]), lower=_transpose_lower,
         edges=edge_rules.reversed_axes, moves=True,
         samples=(lambda rng: (rng.standard_normal((6, 5)),),))
def transpose(x: Any, axes: Any = None) -> Any:
    """The tile with its axes in another order, reversed unless told otherwise: axis i of the result
    is axis axes[i]. Of a matrix rows and columns change places."""
    return np.swapaxes(x, 1, 2)


def _permuted(types: Any, attrs: dict[str, Any]) -> TileType:
    tile = rules.require_tile(types[0], None, "transpose")
    return TileType(tile.dtype, tuple(tile.shape[a] for a in attrs["axes"]))


@declare(rule=_permuted, attrs=("axes",), run=True, public=False, edges=edge_rules.permuted,
         moves=True)
def permute(m: Any, op: Any, x: Any) -> Any:
    """The tile with axis axes[i] as axis i."""
    return np.transpose(x, (0, *(a + 1 for a in op.attr["axes"])))


def _transposed(t: Any) -> TileType:
    tile = rules.require_tile(t, 2, "transpose")
    return TileType(tile.dtype, tile.shape[::-1])


def _broadcast_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    (t,) = types
    rules.require_numbers(types, "broadcast")
    if isinstance(t, Scalar):
        if not t.uniform:
            raise RuleError("broadcast of a number that differs between lanes")
        return TileType(t.dtype, attrs["shape"])
    try:
        fits = np.broadcast_shapes(t.shape, attrs["shape"]) == attrs["shape"]
    except ValueError:
        fits = False
    if not fits or len(t.shape) != len(attrs["shape"]):
        raise RuleError(f"{t} does not broadcast to {list(attrs['shape'])}")
    return TileType(t.dtype, attrs["shape"])


@declare(rule=_broadcast_rule, attrs=("shape",), public=False, edges=edge_rules.broadcast,
         moves=True, layouts="same")
def broadcast_to(x: Any, shape: Any) -> Any:
    """A number, or extents of 1, repeated to a shape."""
    return np.broadcast_to(x, (x.shape[0], *shape))


@macro()
def broadcast(t: OpTracer, x: Any, shape: Any) -> Any:
    """A number, a row statistic (M,) or a tile with extents of 1 repeated to a shape."""
    extents = _shape(t, shape, "broadcast")
    x = t.ir.value_of(x)
    if is_number(x):
        return _full(t, shape, x)
    if isinstance(x.type, TileType) and len(x.type.shape) == 1 and len(extents) == 2:
        x = t.ir.expand(x, 1)
    return t.ir.emit("broadcast_to", [x], shape=extents)


def _reshape_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    t = rules.require_tile(types[0], None, "reshape")
    if int(np.prod(t.shape)) != int(np.prod(attrs["shape"])):
        raise RuleError(f"reshape of {t} to {list(attrs['shape'])}: the sizes differ")
    return TileType(t.dtype, attrs["shape"])


def _reshape_lower(t: OpTracer, x: Any, shape: Any) -> Any:
    return t.ir.emit("reshape", [t.ir.value_of(x)], shape=_shape(t, shape, "reshape"))


@declare(rule=_reshape_rule, attrs=("shape",), lower=_reshape_lower, edges=edge_rules.reshaped,
         moves=True,
         samples=(lambda rng: (rng.standard_normal((6, 4)), (8, 3)),))
def reshape(x: Any, shape: Any) -> Any:
    """The elements in row-major order in another shape."""
    return x.reshape(x.shape[0], *shape)
