"""Integers of any width wrap as NumPy's do: at once, in compiled functions, in kernels for GPUs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import emulator
import tessera as ts
from kernels.build import build
from tessera.graph.cuda import CudaProgram

KINDS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
WRAPPING: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negative": lambda a, b: -a,
    "not": lambda a, b: ~a,
    "quotient": lambda a, b: a // b,
    "square": lambda a, b: a * a,
    "number": lambda a, b: a + 100,
    "a further op on what wrapped": lambda a, b: (a + b) // 2,
    "comparison of what wrapped": lambda a, b: (a + b) > a,
    "widened behind": lambda a, b: (a * b).astype("float64" if a.dtype == "int64" else "int64"),
}


def operands(kind: str, rng: np.random.Generator, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Of the whole range, the ends of it among them; the second without zeros."""
    ends = np.iinfo(kind)
    a, b = (rng.integers(ends.min, ends.max, n, kind, endpoint=True) for _ in range(2))
    a[:4], b[:4] = (ends.min, ends.max, ends.min, ends.max), (1, ends.max, ends.max, 2)
    if ends.min:
        b[0] = -1
    return a, np.where(b == 0, np.array(1, kind), b)


@pytest.mark.parametrize("name", WRAPPING)
@pytest.mark.parametrize("kind", KINDS)
def test_elementwise_integers_wrap(kind: str, name: str, rng: np.random.Generator) -> None:
    fn, (a, b) = WRAPPING[name], operands(kind, rng)
    with np.errstate(over="ignore"):
        want = np.asarray(fn(a, b))
    x, y = ts.tensor(a), ts.tensor(b)
    program = CudaProgram(ts.jit(fn).graph(x, y), "sm_90a")
    for got in (fn(x, y).numpy(), ts.jit(fn)(x, y).numpy(), program.run([a, b])[0]):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", [*KINDS, "uint64"])
def test_shifts_are_numpys(kind: str, rng: np.random.Generator) -> None:
    """By less than nothing and by more bits than there are, too."""
    a, _ = operands(kind, rng)
    b = rng.integers(-3 if np.iinfo(kind).min else 0, 70, a.size).astype(kind)
    b[:3] = 0, np.iinfo(kind).bits - 1, np.iinfo(kind).bits
    def fn(a: Any, b: Any) -> tuple:
        return a << b, a >> b, 1 << b, 5 >> b, a << 3, a >> 3
    x, y = ts.tensor(a), ts.tensor(b)
    program = CudaProgram(ts.jit(fn).graph(x, y), "sm_90a")
    for found in (fn(x, y), ts.jit(fn)(x, y), program.run([a, b])):
        for got, want in zip(found, fn(a, b), strict=True):
            assert np.asarray(got).dtype == kind and np.array_equal(got, want)
    assert np.array_equal(np.right_shift(x, y), a >> b)


@pytest.mark.parametrize("by", ["int8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("kind", [*KINDS, "uint64"])
def test_shifts_in_kernels_have_the_type_of_what_is_shifted(kind, by, rng):
    """So that (x << r) | (x >> (32 - r)) turns the bits of a uint32 round, whatever r is."""
    kernel = build(f"""
@kernel
def k(x: Tensor["n", ts.{kind}], b: Tensor["n", ts.{by}], left: Tensor["n", ts.{kind}],
      right: Tensor["n", ts.{kind}]):
    t, by = tile.load(x[0:64]), tile.load(b[0:64])
    left[0:64] = t << by
    right[0:64] = t >> by
""")["k"]
    a, _ = operands(kind, rng, 64)
    b = rng.integers(-3 if np.iinfo(by).min else 0, 70, a.size).astype(by)
    wide = np.dtype(kind if np.iinfo(kind).bits >= 32 else "int32")
    bits, ends = np.iinfo(wide).bits, np.iinfo(kind)
    inside = (b >= 0) & (b < bits)
    by_bits, x = np.where(inside, b, 0).astype(wide), a.astype(wide)
    want_left = np.clip(np.where(inside, x << by_bits, wide.type(0)), ends.min, ends.max)
    want_right = np.where(inside, x >> by_bits, np.where(x < 0, -1, 0).astype(wide))
    left, right = np.zeros_like(a), np.zeros_like(a)
    kernel(a, b, left, right)
    assert np.array_equal(left, want_left) and np.array_equal(right, want_right)
    emulator.compare(kernel, a, b, left, right, target="sm_90", exact=True)


def test_shifts_of_what_has_no_bits() -> None:
    for x in (ts.ones((2,)), ts.tensor([True, False])):
        with pytest.raises(ts.DTypeError, match="<< needs integers"):
            x << x


def _assigned(i: Any) -> Any:
    y = ts.zeros(128)
    y[i] = 1.0
    return y


@pytest.mark.parametrize("use", [
    lambda i: ts.arange(128.0)[i], lambda i: ts.take(ts.arange(128.0), i), _assigned,
    lambda i: ts.one_hot(i, 128), lambda i: ts.cross_entropy(ts.zeros((2, 128)), i),
    lambda i: ts.segment_sum(ts.ones(2), i, 128), lambda i: ts.scatter_add(ts.zeros(128), i, 1.0),
    lambda i: ts.index_put(ts.zeros(128), i, 1.0), lambda i: ts.fold_in(ts.random.key(0), i[0]),
    lambda i: ts.rotary_embedding(ts.ones((1, 2, 4)), positions=i), lambda i: ts.random.split(i),
    lambda i: i << 1, lambda i: i & 1, lambda i: ~i])
def test_codes_of_a_scaled_type_are_no_integers(use: Any) -> None:
    """They were taken for indices, labels, positions and keys: of 1 and 2 in int8 64 and 127."""
    scaled = ts.cast(ts.tensor([1.0, 2.0]), 'int8 @scaled("amax")')
    codes = ts.tensor([1.0, 2.0], "fp4_e3m0")  # which NumPy holds as uint8
    for i in (scaled, codes):
        for f in (use, ts.jit(use))[:1 + (use is not _assigned)]:
            with pytest.raises((ts.DTypeError, ts.AxisError, ts.ShapeError), match="integer"):
                f(i)


@pytest.mark.parametrize("kind", ["int4", "int8", "uint8", "uint64", "bool_"])
def test_integers_of_any_type_say_what_is_assigned(kind: str) -> None:
    y = ts.zeros(3)
    y[ts.tensor([0, 1, 1], kind)] = 1.0
    assert y.tolist() == [kind != "bool_", True, kind == "bool_"]


@pytest.mark.parametrize("kind", ["int16", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("bits", [10, 15, 20])
def test_sums_of_matmuls_wrap(kind: str, bits: int, rng: np.random.Generator) -> None:
    """Of numbers whose sums are exact in f64, and of those where they are not."""
    ends: Any = np.iinfo(kind)
    low, high = max(ends.min, -1 << bits), min(ends.max, 1 << bits)
    a, b = (rng.integers(low, high, s, kind) for s in ((5, 20), (20, 6)))
    a[0], b[:, 0] = high, high
    x, y = ts.tensor(a), ts.tensor(b)
    assert (x @ y).type == kind
    for got in ((x @ y).numpy(), ts.jit(lambda x, y: x @ y)(x, y).numpy()):
        assert np.array_equal(got, a @ b)


@pytest.mark.parametrize("policy", ["", " @stochastic_round"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int16"])
def test_casts_keep_the_nearest_end_and_sums_of_them_wrap(kind: str, policy: str,
                                                          rng: np.random.Generator) -> None:
    x = ts.tensor(np.float32([1e6, -1e6, 3.0, -7.0, 0.0, 100.0]))

    def f(x: Any) -> Any:
        low = ts.cast(x, kind + policy)
        return low, low + low

    low, twice = CudaProgram(ts.jit(f).graph(x), "sm_90a").run([x.array])
    want = np.clip(x.numpy(), np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)
    with np.errstate(over="ignore"):
        assert np.array_equal(low, want) and np.array_equal(twice, want + want)
    assert np.array_equal(f(x)[1].numpy(), twice)


@pytest.mark.parametrize("narrow", ["uint8", "uint16", "bool_"])
@pytest.mark.parametrize("wide", ["uint32", "uint64"])
def test_narrow_unsigned_numbers_beside_wide_ones_in_kernels(wide: str, narrow: str,
                                                             rng: np.random.Generator) -> None:
    """The result is unsigned as in NumPy and in graphs: a hash of bytes wraps as its type."""
    k = build(f"""@kernel
def k(a: Tensor["N", ts.{wide}], b: Tensor["N", ts.{narrow}], y: Tensor["N", ts.{wide}],
      z: Tensor["N", ts.{wide}]):
    i = tile.linear_id()
    if i < N:
        h = a[i]
        for _ in range(3):
            h = (h ^ b[i]) * 16777619 + b[i]
        y[i] = h
    t = tile.load(a[tile_n:tile_n+64])
    z[tile_n:tile_n+64] = t * 65599 - tile.load(b[tile_n:tile_n+64])""")["k"]
    a, _ = operands(wide, rng, 100)
    b = rng.integers(0, 2 if narrow == "bool_" else 200, 100).astype(narrow.rstrip("_"))
    y, z, h, w = np.zeros_like(a), np.zeros_like(a), a.copy(), b.astype(wide)
    k(a, b, y, z)
    for _ in range(3):
        h = (h ^ w) * h.dtype.type(16777619) + w
    assert np.array_equal(y, h) and np.array_equal(z, a * h.dtype.type(65599) - w)
    assert (ts.tensor(a) ^ ts.tensor(b)).type.name == wide
    emulator.compare(k, a, b, np.zeros_like(a), np.zeros_like(a), lockstep=False, exact=True)


@pytest.mark.parametrize("op", ["&", "|", "^"])
def test_bits_of_uint64_and_of_signed_numbers(op: str) -> None:
    """No type holds both; the graph refuses them too."""
    k = build(f"""@kernel
def k(a: Tensor["N", ts.uint64], b: Tensor["N", i32]):
    i = tile.linear_id()
    if i < N:
        a[i] = a[i] {op} b[i]""")["k"]
    with pytest.raises(ts.TesseraError, match="bits of uint64 and int32: no integer type") as info:
        k(np.ones(3, np.uint64), np.ones(3, np.int32))
    assert "ts.tile.cast(x, ts.uint64)" in str(info.value)
    with pytest.raises(ts.DTypeError):
        eval(f"a {op} b", {"a": ts.ones(3, ts.uint64), "b": ts.ones(3, ts.int32)})


@pytest.mark.parametrize("kind", ["int8", "int32", "uint32", "int64", "uint64"])
def test_powers_in_kernels(kind: str, rng: np.random.Generator) -> None:
    """They wrap; below 0 they are cut off, as no error can be had on a GPU."""
    k = build(f"""@kernel
def k(a: Tensor["N", ts.{kind}], n: Tensor["N", ts.{kind}], y: Tensor["N", ts.{kind}],
      z: Tensor["N", ts.{kind}]):
    i = tile.linear_id()
    if i < N:
        y[i] = a[i] ** n[i]
    t = tile.load(a[tile_n:tile_n+64])
    z[tile_n:tile_n+64] = t ** 5 + 3 ** (tile.load(n[tile_n:tile_n+64]) & 3)""")["k"]
    ends = np.iinfo(kind)
    a = np.concatenate([rng.integers(ends.min, ends.max, 40, kind, endpoint=True),
                        np.arange(-5 if ends.min else 0, 6).astype(kind)])
    n = rng.integers(0, 70, len(a)).astype(kind)
    n[:3] = 0, 1, ends.max
    if ends.min:
        n[-11:] = -rng.integers(1, 4, 11)
    arithmetic = np.int32 if kind == "int8" else np.dtype(kind).type
    bits = np.dtype(arithmetic).itemsize * 8

    def whole(v: int) -> int:  # of the type of arithmetic, then of that of the tensor
        v %= 1 << bits
        v -= (v >> bits - 1 << bits) if ends.min else 0
        return min(max(v, ends.min), ends.max)

    def power(v: int, e: int) -> int:
        return pow(v, e, 1 << bits) if e >= 0 else v ** -e if abs(v) == 1 else 0

    want = [whole(power(v, e)) for v, e in zip(a.tolist(), n.tolist(), strict=True)]
    fifth = [whole(pow(v, 5, 1 << bits) + 3 ** (e & 3)) for v, e in zip(
        a.tolist(), n.tolist(), strict=True)]
    y, z = np.zeros_like(a), np.zeros_like(a)
    k(a, n, y, z)
    assert y.tolist() == want and z.tolist() == fifth
    emulator.compare(k, a, n, np.zeros_like(a), np.zeros_like(a), lockstep=False, exact=True)


@pytest.mark.parametrize("kind", KINDS)
def test_powers_in_graphs(kind: str, rng: np.random.Generator) -> None:
    """Eager, compiled, and in kernels for GPUs, where they have none of the errors that powers
    below 0 are on the CPU."""
    a, _ = operands(kind, rng, 60)
    n = rng.integers(0, 70, 60).astype(kind)
    def fn(a: Any, n: Any) -> tuple:
        return a ** n, a ** 5, 3 ** n
    x, e = ts.tensor(a), ts.tensor(n)
    program = CudaProgram(ts.jit(fn).graph(x, e), "sm_90a")
    for found in (fn(x, e), ts.jit(fn)(x, e), program.run([a, n])):
        for got, want in zip(found, fn(a, n), strict=True):
            assert np.asarray(got).dtype == kind and np.array_equal(got, want)


@pytest.mark.parametrize("name", ["less", "less_equal", "greater", "greater_equal", "equal",
                                  "not_equal"])
@pytest.mark.parametrize("kind", ["int8", "int32", "int64"])
def test_uint64_beside_signed_numbers_is_compared_exactly(kind: str, name: str) -> None:
    """Their common type, f64, has no 2**53 + 1."""
    a = np.array([0, 1, 2**53 + 1, 2**63, 2**64 - 1, 127, 127], np.uint64)
    b = np.array([-1, 1, 2**53, 2**63 - 1, -1, 127, 126])
    b = np.clip(b, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)
    fn, compare = getattr(ts, name), getattr(operator, PYTHONS[name])
    for x, y in ((a, b), (b, a)):
        want = [compare(int(p), int(q)) for p, q in zip(x, y, strict=True)]
        for call in (fn, ts.jit(fn), ts.vmap(fn)):
            assert call(ts.tensor(x), ts.tensor(y)).tolist() == want


PYTHONS = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
                "equal": "eq", "not_equal": "ne"}


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "round"])
@pytest.mark.parametrize("kind", [*KINDS, "uint64"])
def test_integers_are_whole_already(kind: str, name: str) -> None:
    """In f32 the largest of int32 was one more."""
    x = np.array([0, 1, np.iinfo(kind).max, np.iinfo(kind).min], kind)
    fn = getattr(ts, name)
    for call in (fn, ts.jit(fn)):
        y = call(ts.tensor(x))
        assert str(y.type) == kind and y.tolist() == x.tolist()
    assert getattr(np, name)(ts.tensor(x)).tolist() == x.tolist()
