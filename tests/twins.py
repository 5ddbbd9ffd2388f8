"""Random programs that run twice: by tessera, and by NumPy alone, which knows none of our rules.

    program = Twin(rng)              steps of ops on f64, integers and bools, and blocks in them:
    program.ours(xs)                 ts.scan, ts.cond, ts.fori_loop, ts.while_loop, ts.checkpoint,
    program.numpy(arrays)            ts.vmap, ts.jit; NumPy runs these as Python's own loops

Every step is written once, as a function of a library (twin_libraries.py). A block reads values of
the program around it as well as its own, as closures of users do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tessera as ts
from twin_libraries import Ours, Plain
from twin_regions import Made, Step, axis_of, cond, fori, more, scan, vmap, while_, wrapped

FEW_ELEMENTS, DEEPEST = 400, 2


@dataclass
class Block:
    """Steps on a list of values: first those given, then what each step made."""

    rng: np.random.Generator
    steps: list[tuple[str, Step]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # of NumPy, from the run that made it
    result: int = -1
    depth: int = 0
    reverse_mode: bool = True  # whether nothing in it has forward mode alone,
    forward_mode: bool = True  # or reverse mode alone

    def run(self, library: Any, given: Sequence[Any]) -> Any:
        values = list(given)
        for _, step in self.steps:
            values.append(step(library, values))
        return values[self.result]

    def __str__(self) -> str:
        at = len(self.values) - len(self.steps)
        return "\n".join(f"{'  ' * self.depth}v{at + k} = {name}"
                         for k, (name, _) in enumerate(self.steps)) + (
            f"\n{'  ' * self.depth}return v{self.result % max(len(self.values), 1)}")

    # --- drawing ---------------------------------------------------------------------------------
    def pick(self, kind: str = "f", where: Callable[[Any], bool] = lambda x: True) -> int:
        """A value, of late ones more often; -1 when there is none."""
        fits = [i for i, x in enumerate(self.values) if np.asarray(x).dtype.kind in kind
                and where(np.asarray(x))]
        if not fits:
            return -1
        late = int(self.rng.random() ** 0.5 * len(fits))
        return fits[min(late, len(fits) - 1)]

    def add(self, name: str, step: Step) -> bool:
        """Whether the step was taken: not when NumPy refuses it, or numbers or sizes explode."""
        try:
            with np.errstate(all="ignore"):
                y = np.asarray(step(Plain, self.values))
        except (ValueError, IndexError, TypeError, np.exceptions.AxisError):
            return False
        if y.size > FEW_ELEMENTS or y.ndim > 4:
            return False
        if y.dtype.kind == "f" and (not np.isfinite(y).all() or np.abs(y).max(initial=0) > 50):
            return False
        if y.dtype.kind == "i" and np.abs(y).max(initial=0) > 1000:
            return False
        self.values.append(y)
        self.steps.append((name, step))
        return True

    def grow(self, count: int) -> None:
        """Add this many steps."""
        done = 0
        for _ in range(20 * count):
            kinds = MAKERS if self.depth < DEEPEST else MAKERS[:-len(BLOCKS)]
            made = kinds[int(self.rng.integers(len(kinds)))](self, self.rng)
            done += made is not None and self.add(*made)
            if done == count:
                return

    def inner(self, given: Sequence[Any], count: int, like: Any = None) -> tuple[Block, list[int]]:
        """A block of `given` and of some of this block's values; whose result is as `like`."""
        near = [self.pick("fib", lambda x: x.size <= 60) for _ in range(2)]
        outer = [i for i in dict.fromkeys(near) if i >= 0]
        block = Block(self.rng, depth=self.depth + 1)
        block.values = [*map(np.asarray, given), *[self.values[i] for i in outer]]
        block.grow(count)
        last = block.pick("f")
        if like is not None:
            shape, some = np.shape(like), last
            block.add(f"tanh fit v{last} {shape}", lambda L, v: L.broadcast_to(
                L.tanh(L.sum(v[some])), shape))
            k = len(block.values) - 1
            if not block.add(f"v0 * 0.5 + v{k}", lambda L, v: v[0] * 0.5 + v[k]):
                block.result = k
                return block, outer
            last = len(block.values) - 1
        block.result = last
        self.reverse_mode &= block.reverse_mode
        self.forward_mode &= block.forward_mode
        return block, outer




def unary(b: Block, rng: Any) -> Made:
    i = b.pick()
    name, fn = [
        ("sin", lambda L, x: L.sin(x)), ("tanh", lambda L, x: L.tanh(x)),
        ("exp tanh", lambda L, x: L.exp(L.tanh(x))), ("sqrt", lambda L, x: L.sqrt(x * x + 1.0)),
        ("log1p", lambda L, x: L.log1p(x * x)), ("abs", lambda L, x: L.abs(x)),
        ("square", lambda L, x: L.square(L.sin(x))), ("neg", lambda L, x: -x),
        ("cube", lambda L, x: L.cos(x) ** 3), ("1/", lambda L, x: 1.0 / (2.0 + L.sin(x))),
        ("clip", lambda L, x: L.clip(x, -1.1, 1.3)), ("2-x", lambda L, x: 2 - x),
        ("2**sin", lambda L, x: 2.0 ** L.sin(x)), ("pow", lambda L, x: (x * x + 0.5) ** 1.7),
    ][int(rng.integers(14))]
    return f"{name}(v{i})", lambda L, v: fn(L, v[i])


def binary(b: Block, rng: Any) -> Made:
    i = b.pick()
    j = b.pick("fib" if rng.random() < 0.3 else "f")
    name, fn = [
        ("+", lambda L, x, y: x + y), ("-", lambda L, x, y: x - y), ("*", lambda L, x, y: x * y),
        ("/", lambda L, x, y: x / (y * y + 1.0)), ("max", lambda L, x, y: L.maximum(x, y)),
        ("min", lambda L, x, y: L.minimum(x, y)),
        ("atan2", lambda L, x, y: L.arctan2(x, L.f64(y) * y + 1.0)),
        ("pow", lambda L, x, y: (x * x + 1.0) ** L.tanh(L.f64(y))),
    ][int(rng.integers(8))]
    return f"v{i} {name} v{j}", lambda L, v: fn(L, v[i], v[j])


def integers(b: Block, rng: Any) -> Made:
    i, j = b.pick("ib"), b.pick("ib")
    if i < 0:
        return None
    c = int(rng.integers(1, 5))
    name, fn = [
        ("+", lambda L, x, y: x + y), ("-", lambda L, x, y: (x + 0) - (y + 1)),
        ("* 2", lambda L, x, y: x * 2), (f"// {c}", lambda L, x, y: L.floor_divide(x + 0, -c)),
        (f"% {c}", lambda L, x, y: L.remainder(x + 0, c)), ("<", lambda L, x, y: x < y),
        ("==", lambda L, x, y: x == y), ("& |", lambda L, x, y: (x > 0) & (y > 1) | (x == y)),
        ("~", lambda L, x, y: ~(x > y)), ("xor", lambda L, x, y: L.logical_xor(x > 0, y > 0)),
        ("max", lambda L, x, y: L.maximum(x + 0, y + 0)), ("abs", lambda L, x, y: L.abs(x - 3)),
    ][int(rng.integers(12))]
    return f"v{i} int {name} v{j}", lambda L, v: fn(L, v[i], v[j])


def compare(b: Block, rng: Any) -> Made:
    i, j = b.pick(), b.pick("fi")
    if rng.random() < 0.5:
        return f"v{i} > 0.1", lambda L, v: v[i] > 0.1
    return f"v{i} <= v{j}", lambda L, v: v[i] <= v[j]


def choose(b: Block, rng: Any) -> Made:
    p, i, j = b.pick("b"), b.pick(), b.pick()
    if p < 0:
        return None
    if rng.random() < 0.3:
        return f"where(v{p}, v{i}, 0.25)", lambda L, v: L.where(v[p], v[i], 0.25)
    return f"where(v{p}, v{i}, v{j})", lambda L, v: L.where(v[p], v[i], v[j])


def reduction(b: Block, rng: Any) -> Made:
    kind = "f" if rng.random() < 0.8 else "ib"
    i = b.pick(kind)
    if i < 0:
        return None
    x = b.values[i]
    r = rng.random()
    axes: Any = None
    if r < 0.4 and x.ndim:
        axes = axis_of(rng, x, 0)
    elif r < 0.7 and x.ndim:
        chosen = rng.permutation(x.ndim)[: int(rng.integers(1, x.ndim + 1))]
        axes = tuple(int(a) - x.ndim if rng.random() < 0.5 else int(a) for a in chosen)
    keep = bool(rng.random() < 0.4)
    if kind == "f":
        name = str(rng.choice(["sum", "mean", "max", "min", "prod", "logsumexp", "std"]))
        if name in ("max", "min") and x.size == 0 or name == "logsumexp" and (
                not isinstance(axes, int) or x.size == 0) or name in ("mean", "std") and not x.size:
            return None
        if name == "logsumexp":
            return f"logsumexp(v{i}, {axes})", lambda L, v: L.logsumexp(v[i], axes)
    elif x.dtype.kind == "b":
        name = str(rng.choice(["any", "all", "sum"]))
    else:
        name = str(rng.choice(["sum", "max", "any", "prod"]))
        if name == "max" and x.size == 0:
            return None
    return f"{name}(v{i}, {axes}, keepdims={keep})", lambda L, v: getattr(L, name)(
        v[i], axis=axes, keepdims=keep)


def along(b: Block, rng: Any) -> Made:
    i = b.pick()
    a = axis_of(rng, b.values[i])
    if a is None:
        return None
    k = int(rng.integers(9))
    down = bool(rng.random() < 0.5)
    n = b.values[i].shape[a]
    some = int(rng.integers(1, n + 1))
    shift = int(rng.integers(-3, 4))
    name, fn = [
        ("cumsum", lambda L, x: L.cumsum(x, axis=a)), ("cummax", lambda L, x: L.cummax(x, axis=a)),
        ("cumprod", lambda L, x: L.cumprod(x, axis=a)), ("softmax", lambda L, x: L.softmax(x, a)),
        (f"sort {down}", lambda L, x: L.sort(x, a, down)),
        ("argsort", lambda L, x: L.argsort(x, a)),
        ("argmax", lambda L, x: L.argmax(x, axis=a)),
        (f"roll {shift}", lambda L, x: L.roll(x, shift, a)),
        ("flip", lambda L, x: L.flip(x, a)),
    ][k]
    if rng.random() < 0.1 and b.values[i].shape[-1:] > (0,):
        some = min(some, b.values[i].shape[-1])
        return f"top_k(v{i}, {some})", lambda L, v: L.top_k(v[i], some)
    return f"{name}(v{i}, {a})", lambda L, v: fn(L, v[i])


def _basic_index(rng: Any, shape: tuple) -> tuple:
    items: list[Any] = []
    for n in shape[: int(rng.integers(0, len(shape) + 1))]:
        r = rng.random()
        if r < 0.25 and n:
            items.append(int(rng.integers(-n, n)))
        elif r < 0.75:
            ends = [None if rng.random() < 0.4 else int(rng.integers(-n - 1, n + 2)) for _ in "ab"]
            step = int(rng.choice([1, 1, 2, -1, -2, 3]))
            items.append(slice(*ends, step))
        else:
            items.append(slice(None))
    if rng.random() < 0.3:
        items.insert(int(rng.integers(len(items) + 1)), None)
    if len(shape) > len([x for x in items if x is not None]) and rng.random() < 0.5:
        items.append(Ellipsis)
        if rng.random() < 0.4 and shape and sum(x is not None for x in items) <= len(shape):
            n = shape[-1]
            items.append(slice(None, None, -1) if n == 0 or rng.random() < 0.5
                         else int(rng.integers(-n, n)))
    return tuple(items)


def _advanced(b: Block, rng: Any, shape: tuple) -> tuple[str, Callable] | None:
    """An index of constants or of integers that the program computes."""
    if not shape or not shape[0]:
        return None
    r = rng.random()
    n = shape[0]
    if r < 0.2:
        mask = rng.random(shape[: int(rng.integers(1, len(shape) + 1))]) < 0.6
        return f"mask{mask.tolist()}", lambda v: mask
    if r < 0.45:
        ids = rng.integers(-n, n, tuple(rng.integers(0, 4, int(rng.integers(1, 3)))))
        if len(shape) > 1 and rng.random() < 0.6 and shape[-1]:
            more = rng.integers(-shape[-1], shape[-1], ids.shape)
            mid = [slice(None, None, int(rng.choice([1, -1])))] * (len(shape) - 2)
            return f"{ids.tolist()}, {mid}, {more.tolist()}", lambda v: (ids, *mid, more)
        return f"{ids.tolist()}", lambda v: ids
    k = b.pick("i", lambda x: x.ndim <= 2 and x.size <= 12)
    if k < 0:
        return None
    if len(shape) > 1 and shape[1] and rng.random() < 0.5:
        m = shape[1]
        if rng.random() < 0.5:
            at = int(rng.integers(-m, m))
            return f"v{k} % {n}, {at}", lambda v: (v[k] % n, at)
        return f":, v{k} % {m}", lambda v: (slice(None), v[k] % m)
    return f"v{k} % {n}", lambda v: v[k] % n


def index(b: Block, rng: Any) -> Made:
    i = b.pick("f" if rng.random() < 0.8 else "ib")
    if i < 0:
        return None
    shape = b.values[i].shape
    if rng.random() < 0.4:
        found = _advanced(b, rng, shape)
        return found and (f"v{i}[{found[0]}]", lambda L, v: v[i][found[1](v)])
    items = _basic_index(rng, shape)
    return f"v{i}[{items}]", lambda L, v: v[i][items]


def put(b: Block, rng: Any) -> Made:
    i, j = b.pick(), b.pick()
    x = b.values[i]
    if rng.random() < 0.5:
        found = _advanced(b, rng, x.shape)
        if found is None:
            return None
        text, at = found
    else:
        items = _basic_index(rng, x.shape)
        text, at = str(items), lambda v: items
    where = at(b.values)
    mode = str(rng.choice(["set", "add", "add", "max", "min"]))
    if mode == "set" and np.unique(np.arange(x.size).reshape(x.shape)[where]).size != (
            x[where].size):
        mode = "add"  # of two values for one place neither is promised
    if rng.random() < 0.5:
        return f"put {mode}(v{i}, {text}, 0.5)", lambda L, v: L.put(v[i], at(v), 0.5, mode)
    if np.ndim(b.values[j]) > x[where].ndim:
        return None
    return f"put {mode}(v{i}, {text}, v{j})", lambda L, v: L.put(v[i], at(v), v[j], mode)


def shape_of(b: Block, rng: Any) -> Made:
    i = b.pick("fib")
    x = b.values[i]
    k = int(rng.integers(7))
    if k == 0:
        axes = tuple(int(a) for a in rng.permutation(x.ndim))
        return f"transpose(v{i}, {axes})", lambda L, v: L.transpose(v[i], axes)
    if k == 1:
        shapes = [(x.size,), (1, x.size), (*x.shape, 1), (-1,) if x.size else (0,)]
        shapes += [(2, x.size // 2)] if x.size % 2 == 0 else [(x.size, 1)]
        shape = shapes[int(rng.integers(len(shapes)))]
        return f"reshape(v{i}, {shape})", lambda L, v: L.reshape(v[i], shape)
    if k == 2:
        shape = (int(rng.integers(1, 3)), *x.shape)
        return f"broadcast_to(v{i}, {shape})", lambda L, v: L.broadcast_to(v[i], shape)
    if k == 3 and x.dtype.kind == "f":
        mode = str(rng.choice(["constant", "reflect", "edge", "wrap", "symmetric"]))
        width = [tuple(int(w) for w in rng.integers(0, 3, 2)) for _ in x.shape]
        if mode != "constant" and any(max(w) >= n for w, n in zip(width, x.shape, strict=True)):
            return None
        return f"pad(v{i}, {width}, {mode})", lambda L, v: L.pad(v[i], width, mode)
    if k == 4 and x.ndim >= 2:
        d = int(rng.integers(-2, 3))
        name = str(rng.choice(["tril", "triu", "diagonal"]))
        return f"{name}(v{i}, {d})", lambda L, v: getattr(L, name)(v[i], d)
    if k == 5:
        j = b.pick("fib", lambda y: y.shape == x.shape and y.dtype == x.dtype)
        a = int(rng.integers(-x.ndim - 1, x.ndim + 1))
        return f"stack(v{i}, v{j}, {a})", lambda L, v: L.stack([v[i], v[j]], a)
    if x.ndim:
        a = int(rng.integers(-x.ndim, x.ndim))
        other = [n for d, n in enumerate(x.shape) if d != a % x.ndim]
        j = b.pick("f" if x.dtype.kind == "f" else "i", lambda y: y.ndim == x.ndim and [
            n for d, n in enumerate(y.shape) if d != a % x.ndim] == other)
        if j >= 0 and x.dtype.kind != "b":
            return (f"concatenate(v{i}, v{j}, {a})",
                    lambda L, v: L.concatenate([v[i], v[j], v[i]], a))
    return None


def product(b: Block, rng: Any) -> Made:
    i, j = b.pick(), b.pick()
    x, y = b.values[i], b.values[j]
    if rng.random() < 0.4 and x.ndim and y.ndim:
        return f"v{i} @ v{j}", lambda L, v: L.matmul(v[i], v[j]) * 0.25
    letters = "abcdef"
    one = "".join(rng.choice(list(letters), x.ndim))
    two = "".join(rng.choice(list(letters), y.ndim))
    known = sorted(set(one + two))
    result = "".join(rng.permutation([c for c in known if rng.random() < 0.5])) if known else ""
    spec = f"{one},{two}->{result}"
    return f"einsum({spec!r}, v{i}, v{j})", lambda L, v: L.einsum(spec, v[i], v[j]) * 0.25


def conv(b: Block, rng: Any) -> Made:
    i, j = b.pick(where=lambda x: x.ndim == 3 and 0 not in x.shape), b.pick()
    if i < 0:
        return None
    C, L_ = b.values[i].shape[1:]
    K, stride, padding = (int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.integers(0, 2)))
    w = rng.standard_normal((2, C, K))
    if L_ + 2 * padding < K:
        return None
    return f"conv(v{i}, v{j}, {K}, {stride}, {padding})", lambda L, v: L.conv(
        v[i], L.f64(w) * L.tanh(L.sum(v[j])), stride, padding)


def ids(b: Block, rng: Any) -> Made:
    i = b.pick(where=lambda x: x.ndim >= 1 and x.size > 0)
    if i < 0:
        return None
    x = b.values[i]
    n = x.shape[0]
    k = int(rng.integers(3))
    if k == 0:
        at = b.pick("i", lambda y: y.shape == (n,))
        return at >= 0 and (f"segment_sum(v{i}, v{at} % 3)",
                            lambda L, v: L.segment_sum(v[i], v[at] % 3, 3)) or None
    if k == 1:
        at, size = b.pick("i", lambda y: y.ndim == 0), int(rng.integers(1, n + 1))
        return at >= 0 and (f"dynamic_slice(v{i}, v{at}, {size})", lambda L, v: L.dynamic_slice(
            v[i], v[at] % (n - size + 1), size)) or None
    a = axis_of(rng, x)
    return f"take_along_axis(v{i}, argsort sin, {a})", lambda L, v: L.take_along_axis(
        v[i], L.argsort(L.sin(3.0 * v[i]), a), a)


BLOCKS = [scan, scan, cond, cond, fori, while_, vmap, vmap, wrapped, wrapped]
MAKERS = [unary, unary, unary, binary, binary, binary, integers, integers, compare, choose, choose,
          reduction, reduction, along, along, index, index, index, put, put, shape_of, shape_of,
          product, product, conv, ids, more, more, more, *BLOCKS]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (0,), (2, 3), (3, 1), (1, 3), (3, 3), (2, 0),
                                 (2, 1, 3), (3, 2, 2), (2, 3, 4)]


class Twin:
    """A program of three f64 and two integer arguments, whose result is one f64 array."""

    def __init__(self, rng: np.random.Generator):
        base = SHAPES[int(rng.integers(len(SHAPES)))]
        near = [base, base[-1:], (), (3,), SHAPES[int(rng.integers(len(SHAPES)))]]
        self.floats = [rng.standard_normal(near[int(rng.integers(len(near)))]) for _ in range(3)]
        self.integers = [rng.integers(-4, 5, s) for s in (base[-1:], ())]
        self.block = Block(rng)
        self.block.values = [*self.floats, *self.integers]
        self.block.grow(int(rng.integers(3, 9)))
        self.block.result = self.block.pick("f")

    def __str__(self) -> str:
        return f"{[x.shape for x in self.block.values[:5]]}\n{self.block}"

    def numpy(self, *floats: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(self.block.run(Plain, [*floats, *self.integers]))

    def ours(self, *floats: Any) -> Any:
        y = self.block.run(Ours, [*floats, *map(ts.tensor, self.integers)])
        return ts.cast(y, "f64")
