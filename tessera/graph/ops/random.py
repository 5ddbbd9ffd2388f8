"""Random numbers: Philox counters, so every draw is a function of (seed, stream, step, index).

A compiled function that draws takes one step of the state (numerics/random_state.py) per call and
its draws are numbered streams; a draw outside takes a step of its own. A key is a u32[2] tensor, an
ordinary value in the graph: backward passes and recomputation read the same key and so see the same
bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from ... import hooks, numerics
from ...call_errors import refuse_wrong_init, show_call
from ...dims import show_shape, size_of
from ...errors import ArgumentError, DTypeError, ShapeError, TraceError, UnknownNameError
from ...foreign import RANDOM
from ...numerics import NumericType, as_type
from ...numerics.philox import fold_in_each, fold_words
from ...numerics.random_state import (
    RandomState,
    get_state,
    next_step,
    seed,
    seed_and_step,
    set_state,
)
from ...open_trace import trace_state
from ...tensor import Tensor, as_tensor
from .. import functions as F
from .. import trace as tracing
from ..op import Arg, Aval, GraphOp, Sample, sample
from ..operand import (
    axis_index,
    compute_type,
    convert,
    floating,
    holds_integers,
    literal,
    named,
    public,
    shape_tuple,
    store,
    to_compute,
)
from ..trace import apply
from ..weak_numbers import Number, is_number
from .key_rows import bits_rows, fold_rows, numbered_keys

Function = TypeVar("Function", bound=Callable[..., Any])
U32, F32, INT64 = as_type("uint32"), as_type("f32"), as_type("int64")
FEW_KEYS = 8  # of which each is a value of its own, which a GPU has from the host where it can
EAGER_STREAM = 0xFFFFFFFF  # draws outside any compiled function


def key_of(stream: int) -> np.ndarray:
    """The u32[2] key of a stream at the current step."""
    return keys_ahead(stream, 1)[0]


def keys_ahead(stream: int, count: int) -> np.ndarray:
    """The keys of a stream at the current step and at those behind it: u32 [count, 2]."""
    seed, step = seed_and_step()
    root = _root(seed, stream)
    if count == 1:
        return np.array([fold_words(root, step)], np.uint32)
    return fold_in_each(np.array([root], np.uint32), np.arange(step, step + count, dtype=np.uint64))


@functools.lru_cache(4096)
def _root(seed: int, stream: int) -> tuple[int, int]:
    return fold_words((seed & 0xFFFFFFFF, seed >> 32), stream)


RNG_KEY = GraphOp(
    "rng_key",
    shape=lambda stream: Aval((2,), U32),
    ref=lambda stream: key_of(stream),
    axes="->k",
    spread=lambda size, batched, stream: None,
    effects=frozenset({"random"}),
    differentiable=False,
    samples=(sample(stream=3),),
    makes="key",
    doc="the key of a stream at this step",
)


def _keyed(data: np.ndarray, key: np.ndarray) -> np.ndarray:
    return numerics.fold_in(key, int(data) & 0xFFFFFFFF)


FOLD_IN = GraphOp(
    "fold_in",
    shape=lambda key, data: Aval((2,), U32),
    ref=lambda key, data: _keyed(data, key),
    batch=fold_rows,
    spread=lambda size, batched, key, data: (
        None if any(batched) else (apply(FOLD_IN, key, data), False)),
    axes="_,->_",
    differentiable=False,
    samples=(Sample((Arg((2,), "key", False), Arg((), "int", False))),),
    makes="key",
    doc="a key derived from a key and a number",
)


@public
def fold_in(key: Tensor, data: Any) -> Tensor:
    """A new key from a key and an integer."""
    counted = isinstance(data, int) and not isinstance(data, bool) and -(2**63) <= data < 2**63
    value = literal(data, as_type("int64")) if counted else as_tensor(data)
    if not holds_integers(value) or value.ndim:
        raise DTypeError(f"fold_in needs an integer scalar, got {value.type}{list(value.shape)}")
    return apply(FOLD_IN, key, value)


class LoopKeys:
    """Keys inside a traced body: derived from one key drawn outside, so that a body is pure.

    index: the traced iteration of a loop, or None for a body that runs once
    like: those of another body that computes the same, and draws the same
    """

    def __init__(self, outer: Any, index: Tensor | None = None, like: LoopKeys | None = None):
        self.outer, self.index, self.count = outer, index, 0
        self._base: list[Tensor] = [] if like is None else like._base

    def next(self) -> Tensor:
        if not self._base:
            self._base.append(self._outside())
        key = fold_in(self._base[0], self.count)
        self.count += 1
        return key if self.index is None else fold_in(key, self.index)

    def _outside(self) -> Tensor:
        inner, trace_state.builder = trace_state.builder, self.outer
        try:
            return next_key()
        finally:
            trace_state.builder = inner


@public
def next_key() -> Tensor:
    """A fresh key: a stream of the function being traced, or a step of its own outside."""
    builder = tracing.current_builder()
    if builder is None:
        next_step()
        return apply(RNG_KEY, stream=EAGER_STREAM)
    if builder.rng is not None:
        return builder.rng.next()
    builder.streams += 1
    return apply(RNG_KEY, stream=builder.streams)


hooks.next_key.fill(next_key)


def _bits_ref(key: np.ndarray, shape: tuple) -> np.ndarray:
    return numerics.random_bits(key, int(np.prod(shape, dtype=np.int64))).reshape(shape)


BITS = GraphOp(
    "random_bits",
    shape=lambda key, shape: Aval(shape, U32),
    axes=lambda key, shape: "_->" + "abcdefghijklmnop"[: len(shape)],
    ref=_bits_ref,
    batch=bits_rows,
    spread=lambda size, batched, key, shape: (apply(BITS, key, shape=(size, *shape)), True),
    differentiable=False,
    samples=(Sample((Arg((2,), "key", False),), {"shape": (2, 3)}),),
    makes="bits",
    doc="uint32 per element: Philox4x32-10 of (key, global element index)",
)


@refuse_wrong_init
class philox:
    """A generator with a seed of its own: `ts.random.uniform((4,), generator=philox(seed=42))`.

    Each draw takes the next key; equal seeds give equal sequences on every machine. A compiled
    function draws with a generator that it makes, or with keys that it is given, key=.
    """

    def __init__(self, seed: int = 0):
        self._made_in = tracing.current_builder()
        self.root = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
        self.count = 0

    def next_key(self) -> Tensor:
        """Raises TraceError inside of what is traced once and runs several times, which would all
        have this key: a compiled function, the body of a loop, ts.vmap."""
        builder = tracing.current_builder()
        while builder is not None and builder is not self._made_in:
            if builder.repeats:
                raise TraceError("a generator from outside of a traced function: each call, or "
                                 "iteration, would draw the same", hint="give a key, key=..., as "
                                 "an argument; draws without one go on with ts.random.seed's "
                                 "numbers")
            builder = builder.outer
        key = numerics.fold_in(self.root, self.count)
        self.count += 1
        return Tensor(key, U32)


def _key(key: Any, generator: philox | None) -> Tensor:
    if key is not None and generator is not None:
        raise ArgumentError("give a key or a generator, not both")
    if key is not None:
        return as_tensor(key)
    if generator is not None and not isinstance(generator, philox):
        raise ArgumentError(f"a generator is a ts.random.philox, got {generator!r}",
                            hint="generator=ts.random.philox(seed=0)")
    return generator.next_key() if generator is not None else next_key()


def keys_by_name(fn: Function) -> Function:
    """Decorator below `public`: refuses uniform(shape, key) and normal(key, shape), where the key
    would be the lower end or a shape."""
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_key, args)):
            name, at = fn.__name__, next(i for i, a in enumerate(args, 1) if _is_key(a))
            raise ArgumentError(f"a key is given by name, key=; argument {at} is one",
                                hint=show_call(name, inspect.signature(fn)))
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def _is_key(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray) and x.shape == (2,) and x.dtype == np.uint32


def one_shape(fn: Function) -> Function:
    """Decorator below `public`: refuses normal(2, 3), which would mean shape 2 and mean 3."""
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        extents = list(itertools.takewhile(_is_extent, args))
        if len(extents) > 1:
            rest = "".join(f", {a!r}" for a in args[len(extents):])
            raise ArgumentError(
                f"the extents are one argument, what follows them is no extent; got {args}",
                hint=f"ts.random.{fn.__name__}({tuple(extents)}{rest}); numbers that are no "
                f"extents have names: {show_call(fn.__name__, inspect.signature(fn))}")
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def _is_extent(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@public
@keys_by_name
def random_bits(shape: Any, *, key: Any = None, generator: Any = None) -> Tensor:
    """uint32 random bits."""
    return apply(BITS, _key(key, generator), shape=shape_tuple(shape))


def _unit(bits: Tensor) -> Tensor:
    """[0, 1) with 24 bits, as numerics.uniform."""
    return convert(F.floor_divide(bits, 256), F32) * (2.0**-24)


@public
@keys_by_name
@one_shape
def uniform(shape: Any, low: float | Tensor = 0.0, high: float | Tensor = 1.0,
            dtype: Any = "f32", *, key: Any = None, generator: Any = None) -> Tensor:
    """Uniform on [low, high), 24 bits of it. Reproducible: a function of seed, stream, step, index.

    Ends are numbers, or tensors that broadcast to the shape. What the type rounds to `high`, which
    is outside, is the number below it, and `low` where ends are data. Where the type does not hold
    `low`, what it rounds to less is the number above.
    """
    numeric = as_type(dtype)
    dims = shape_tuple(shape)
    low, high = _over(low, dims), _over(high, dims)
    unit = _in_range(_unit(random_bits(dims, key=key, generator=generator)), numeric)
    out = store(unit * (high - low) + low, numeric)
    out = store(F.where(out >= high, _below(high, low, numeric), out), numeric)
    above = _above(low, high, numeric)
    return out if above is None else store(F.where(out < low, above, out), numeric)


def _in_range(draw: Tensor, numeric: NumericType) -> Tensor:
    """An f32 draw as it is scaled and moved: in f64 where the result is, whose numbers lie closer
    than those of f32."""
    return convert(draw, compute_type(numeric)) if numeric.dtype.name == "f64" else draw


def _below(high: Any, low: Any, numeric: NumericType) -> Any:
    """The greatest number below `high` that the type of a draw holds, and not below `low`."""
    if not _is_static(low, high) or numeric.dtype.kind != "float":
        return low
    return max(numeric.dtype.below(float(high)), low)


def _above(low: Any, high: Any, numeric: NumericType) -> float | None:
    """The least number above `low` that a narrow type holds; None where it holds `low` itself, or
    no number between the ends."""
    dtype = numeric.dtype
    if not _is_static(low, high) or dtype.kind != "float" or dtype is dtype.compute:
        return None
    above = -dtype.below(-float(low))
    return None if dtype.below(above) == low or above >= high else above


@public
@keys_by_name
@one_shape
def normal(shape: Any, mean: float | Tensor = 0.0, std: float | Tensor = 1.0,
           dtype: Any = "f32", *, key: Any = None, generator: Any = None) -> Tensor:
    """Normal by Box and Muller (1958), one pair of uniforms per element, in f32. std and mean are
    applied in f64 where that is the type; they are numbers, or tensors that broadcast to the shape,
    which have gradients."""
    base, numeric = _key(key, generator), as_type(dtype)
    dims = shape_tuple(shape)
    u = _unit(apply(BITS, base, shape=dims))
    v = _unit(apply(BITS, fold_in(base, 1), shape=dims))
    radius = F.sqrt(-2.0 * F.log(1.0 - u))
    out = radius * F.cos((2.0 * math.pi) * v)
    if not _is_static(std, mean) or std != 1.0 or mean != 0.0:
        out = _in_range(out, numeric) * _over(std, dims) + _over(mean, dims)
    return store(out, numeric)


def _is_static(*parameters: Any) -> bool:
    """Whether all are numbers of the trace: one that a compiled function is given is data."""
    return all(is_number(p) and not isinstance(p, Number) for p in parameters)


def _over(parameter: Any, dims: tuple) -> Any:
    """A number as it is; a tensor of parameters spread over the draws, which it may not outgrow."""
    return parameter if is_number(parameter) else F.broadcast_to(as_tensor(parameter), dims)


@public
@keys_by_name
def bernoulli(p: float | Tensor, shape: Any = None, *, key: Any = None,
              generator: Any = None) -> Tensor:
    """bool_, true with probability p: a number in [0, 1], or a tensor that broadcasts to the shape,
    by default of its own. Raises ArgumentError for other numbers; those of a tensor are not looked
    at, NaN is false."""
    if _is_static(p) and not 0 <= p <= 1:
        raise ArgumentError(f"a probability is in [0, 1], got {p}")
    dims = (() if is_number(p) else as_tensor(p).shape) if shape is None else shape_tuple(shape)
    return F.less(_unit(random_bits(dims, key=key, generator=generator)), _over(p, dims))


@public
@keys_by_name
def randint(low: int | Tensor, high: int | Tensor, shape: Any, dtype: Any = "int64", *,
            key: Any = None, generator: Any = None) -> Tensor:
    """Integers in low..high-1: 64 bits modulo the range, so that no number is more likely than
    another by more than range / 2^64. Ends are numbers, or tensors of integers that broadcast to
    the shape, which are not looked at: an empty range gives `low`."""
    known = _is_static(low, high)
    if known and (not low < high or high - low > 2**32):
        raise ArgumentError(f"randint needs low < high and a range of at most 2^32, got {low}, "
                            f"{high}")
    base, dims = _key(key, generator), shape_tuple(shape)
    low, high = _over(low, dims), _over(high, dims)
    size: Any = high - low
    if not known and size.dtype.kind == "float":
        raise DTypeError(f"randint draws integers, its ends give a range of {size.type}")
    rest = F.remainder(convert(apply(BITS, base, shape=dims), INT64), size)
    if not known or size & (size - 1):  # no power of two: 32 further bits, 16 at a time
        more = convert(apply(BITS, fold_in(base, 1), shape=dims), INT64)
        for half in (more // 65536, F.remainder(more, 65536)):
            rest = F.remainder(rest * 65536 + half, size)
    return store(rest + low, as_type(dtype))


@public
@keys_by_name
def permutation(n: int, *, key: Any = None, generator: Any = None) -> Tensor:
    """A random order of 0..n-1; int64. Ties in the 32-bit draws keep their order."""
    bits = random_bits((n,), key=key, generator=generator)
    return F.argsort(convert(bits, as_type("int64")))


@public
@keys_by_name
def dropout(x: Any, p: float | Tensor, *, key: Any = None, training: bool = True) -> Tensor:
    """Zero each element with probability p and divide the rest by 1 - p. x itself when p is 0 or
    not training. The backward pass uses the same mask. Raises ArgumentError unless 0 <= p < 1; of a
    p that is data, such as a rate that a schedule gives, this is not looked at."""
    x, known = as_tensor(x), _is_static(p)
    if known and not 0 <= p < 1:
        raise ArgumentError(f"dropout needs 0 <= p < 1, got {p}")
    if not training or known and p == 0:
        return x
    keep = F.greater_equal(_unit(random_bits(x.shape, key=key)), _over(p, x.shape))
    c = to_compute(x)
    return store(F.where(keep, c * (1.0 / (1.0 - p)), literal(0.0, c)), x.type)


# --- keys and draws that follow weights ---------------------------------------------------------
_SPLIT = 0x53504C49  # keeps the keys of a split apart from those that draws derive of a key


@named("ts.random.key")
def key(seed: int) -> Tensor:
    """The key of a seed: uint32 [2], for the key= of draws."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ArgumentError(f"a seed is an integer, got {seed!r}")
    return Tensor(np.array([int(seed) & 0xFFFFFFFF, (int(seed) >> 32) & 0xFFFFFFFF], np.uint32),
                  U32)


@named("ts.random.split")
def split(key: Any, num: int = 2) -> Tensor:
    """`num` keys derived from one, uint32 [num, 2]: `a, b = ts.random.split(key)`.

    Their draws are independent of each other and of those of `key`. ts.split cuts tensors.
    """
    base = as_tensor(key)
    if tuple(base.shape) != (2,) or not holds_integers(base):
        raise DTypeError(f"a key is uint32 [2], got {base.type}{list(base.shape)}",
                         hint="ts.random.key(seed), ts.random.next_key()")
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ArgumentError(f"split into num={num!r} keys")
    root = fold_in(base, _SPLIT)
    if num <= FEW_KEYS:
        return F.stack([fold_in(root, i) for i in range(num)])
    return numbered_keys(root, num)


def _exponential(shape: tuple, key: Tensor) -> Tensor:
    """-log(1 - u) with u in steps of 2^-32 near 0, where the smallest of many draws lies."""
    bits = convert(apply(BITS, key, shape=shape), as_type("f64"))
    u = convert((bits + 0.5) * 2.0**-32, F32)
    return -F.log1p(-F.minimum(u, 1.0 - 2.0**-24))


@public
@keys_by_name
def categorical(logits: Any, shape: Any = None, axis: int = -1, *, key: Any = None,
                generator: Any = None) -> Tensor:
    """Indices along an axis, drawn with the probabilities softmax(logits); int64.

    logits: [..., K], -inf for what is never drawn   shape: of the result; its last extents are
    those of logits without the axis, which is the shape when None
    By the smallest of exponential variables of rates exp(logits) (the Gumbel trick).
    """
    x = floating(logits)[0]
    a = axis_index(axis, x.ndim)
    rows = F.moveaxis(x, a, -1)
    lead = tuple(rows.shape[:-1]) if shape is None else shape_tuple(shape)
    if lead[len(lead) - rows.ndim + 1:] != tuple(rows.shape[:-1]):
        raise ShapeError(f"draws of shape {show_shape(lead)} from logits {show_shape(x.shape)}: "
                         f"the last extents must be {show_shape(rows.shape[:-1])}")
    noise = _exponential((*lead, rows.shape[-1]), _key(key, generator))
    return F.argmax(convert(rows, F32) - F.log(noise), axis=-1)


def _check_probabilities_ref(p: np.ndarray, slack: float) -> np.ndarray:
    wide = p.astype(np.float64)
    bad = ~((wide >= 0) & (wide < np.inf))
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), p.shape)
        raise ArgumentError(f"choice: p[{int(at[-1])}] = {float(wide[at]):g} is no probability",
                            hint="exp(logits) cannot be negative: ts.random.categorical(logits)")
    sums = wide.sum(-1)
    off = np.abs(sums - 1.0) > slack
    if off.any():
        raise ArgumentError(f"choice: p adds up to {float(sums[off].flat[0]):g}, not to 1",
                            hint="p / ts.sum(p); ts.random.categorical(ts.log(p)) takes weights")
    return p.copy()


CHECK_PROBABILITIES = GraphOp(
    "check_probabilities",
    shape=lambda p, slack: p,
    ref=_check_probabilities_ref,
    batch=lambda size, batched, p, slack: (apply(CHECK_PROBABILITIES, p, slack=slack), True),
    axes="..._->..._",
    differentiable=False,
    host="now",
    samples=(Sample((Arg((2, 3), "positive", False),), {"slack": math.inf}),),
    doc="probabilities along the last axis; an ArgumentError where one is none, or their sum "
    "differs from 1 by more than the slack",
)


@public
@keys_by_name
def choice(a: Any, shape: Any = (), replace: bool = True, p: Any = None, axis: int = 0, *,
           key: Any = None, generator: Any = None) -> Tensor:
    """Slices of `a` along an axis, drawn at random: of shape `shape` in place of that axis.

    a: a tensor, or an integer n for 0..n-1   p: [n] probabilities, equal when None
    replace=False: no slice twice
    np.random.choice and jax.random.choice. Raises ShapeError, and ArgumentError, when it runs, for
    p that is negative, not finite, or does not add up to 1 (within the square root of its epsilon).
    """
    values = F.arange(a) if isinstance(a, int) and not isinstance(a, bool) else as_tensor(a)
    if values.ndim == 0:
        raise ShapeError("a choice of a scalar", hint="an integer n draws from 0..n-1")
    place = axis_index(axis, values.ndim)
    n, dims = values.shape[place], shape_tuple(shape)
    count = size_of(dims)
    if n == 0 or (not replace and count > n):
        raise ArgumentError(f"{count} different elements of {n}", hint="replace=True")
    weights, kind = (None, None) if p is None else floating(p)
    if weights is not None and tuple(weights.shape) != (n,):
        raise ShapeError(f"probabilities {show_shape(weights.shape)} for {n} elements")
    if weights is not None and kind is not None:
        slack = math.sqrt(float(kind.dtype.eps))
        weights = apply(CHECK_PROBABILITIES, weights, slack=slack)
    made = _key(key, generator)
    if weights is None and replace:
        ids = randint(0, n, dims, key=made)
    elif weights is None:
        ids = F.reshape(permutation(n, key=made)[:count], dims)
    elif replace:
        ids = categorical(F.log(weights), dims, key=made)
    else:
        score = convert(F.log(weights), F32) - F.log(_exponential((n,), made))
        ids = F.reshape(F.top_k(score, count)[1], dims)  # type: ignore[arg-type]  # it refuses a Dim
    return F.take(values, ids, place)


def __getattr__(name: str) -> NoReturn:
    """A name that ts.random does not have: the error says which is near."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownNameError(f"tessera.random has no name {name!r}", name, lambda: sorted(__all__),
                           RANDOM)


__all__ = [
    "RandomState", "bernoulli", "categorical", "choice", "dropout", "fold_in", "get_state", "key",
    "next_key", "normal", "permutation", "philox", "randint", "random_bits", "seed", "set_state",
    "split", "uniform",
]
