"""A compiled function gives what its ops give one by one: special values, types, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import TesseraError
from tessera.graph.op import OPS, GraphOp
from tessera.graph.trace import apply
from tessera.numerics import as_type
from tessera.tensor import Tensor

# --- loops at special values --------------------------------------------------------------------
FLOATS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 2.0, -3.0,
          1e-40, -1e-40, 1e-7, 1e-3, 88.0, -88.0, 89.0, -104.0, 1e20, -1e20, 3e38, -3e38, 2.0**31]
TYPES = ["f32", "f64", "int32", "int64", "uint32", "bool_"]
WHOLE_ONLY = {"floor", "ceil", "trunc", "round"}  # ts.floor of integers is one of f32
ANY_ZERO = {"maximum", "minimum", "relu"}  # which of two zeros is left open


def values(numeric: str) -> np.ndarray:
    kind: Any = as_type(numeric).dtype.numpy
    if kind.kind == "f":
        return np.array(FLOATS + ([1e300, -1e-310] if kind.itemsize == 8 else []), kind)
    if kind.kind == "b":
        return np.array([True, False])
    i = np.iinfo(kind)
    found = [0, 1, 2, 3, 31, 32, 33, -1, -2, -5, i.min, i.min + 1, i.max, i.max - 1, 2**31 - 1]
    return np.array(sorted({x for x in found if i.min <= x <= i.max}), kind)


def operands(op: GraphOp, numeric: str) -> list[Tensor]:
    """Every combination of special values, of two operands."""
    v, t = values(numeric), as_type(numeric)
    n = len(op.samples[0].args)
    if n == 3:
        chosen = Tensor(np.array([True, False] * v.size), as_type("bool_"))
        return [chosen, Tensor(np.tile(v, 2), t), Tensor(np.tile(v[::-1], 2), t)]
    columns = zip(*itertools.product(*[v] * n), strict=True)
    return [Tensor(np.array(c, v.dtype), t) for c in columns]


def defined(op: GraphOp, numeric: str) -> bool:
    """Whether a graph can have the op on these types: NumPy gives what its shape rule says."""
    if op.loop is None or not op.samples[0].args or "random" in op.name:
        return False
    if as_type(numeric).dtype.kind not in op.loop_kinds:
        return False
    if op.name in WHOLE_ONLY and "int" in numeric:
        return False
    if numeric == "bool_" and not op.name.startswith(("bitwise", "equal", "not_equal", "where")):
        return False
    try:
        one = [Tensor(x.array[:1], x.type) for x in operands(op, numeric)]
        made = apply(op, *one, **op.samples[0].attrs)
    except (TesseraError, TypeError):
        return False
    return bool(made.array.dtype == made.type.dtype.numpy)


MANY = 16  # ops in one compiled function
CASES = [(numeric, ops[i:i + MANY]) for numeric in TYPES
         for ops in [[op for op in OPS.values() if defined(op, numeric)]]
         for i in range(0, len(ops), MANY)]


@pytest.mark.parametrize(("numeric", "ops"), CASES, ids=[f"{n}-{o[0].name}" for n, o in CASES])
def test_loops_at_special_values(numeric: str, ops: list[GraphOp]) -> None:
    """Infinities, NaN, zeros of both signs, the ends of integers: as NumPy, within a few ulp."""
    flat = [x for op in ops for x in operands(op, numeric)]

    def run(*xs: Tensor) -> list[Tensor]:
        it = iter(xs)
        return [apply(op, *[next(it) for _ in op.samples[0].args], **op.samples[0].attrs)
                for op in ops]

    with ts.config.scope(loop_min_elements=0):
        compiled = ts.jit(run)(*flat)
    for op, got, want in zip(ops, compiled, run(*flat), strict=True):
        assert_same(op, got.array, want.array)


def assert_same(op: GraphOp, got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, op.name)
        return
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), op.name)
    zero = (want == 0) & (got == 0)
    if op.name not in ANY_ZERO:
        np.testing.assert_array_equal(np.signbit(got)[zero], np.signbit(want)[zero], op.name)
    limits = np.finfo(want.dtype)
    np.testing.assert_allclose(got, want, rtol=8 * float(limits.eps), err_msg=op.name,
                               atol=4 * float(limits.smallest_subnormal))


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_large_angles(name: str, rng: np.random.Generator) -> None:
    """Of every exponent from 2^45 on; NumPy reduces f64 exactly."""
    bits = rng.integers(0x56000000, 0x7F800000, 4096).astype(np.uint32)
    x = (bits | (rng.integers(0, 2, 4096).astype(np.uint32) << 31)).view(np.float32)
    got = ts.jit(getattr(ts, name))(ts.tensor(x)).array.astype(np.float64)
    want = getattr(np, name)(x.astype(np.float64))
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got - want) / ulp) <= (4 if name == "tan" else 2)


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool_"]


@pytest.mark.parametrize("source", INTEGERS)
def test_casts_of_integers_saturate(source: str) -> None:
    x = Tensor(values(source), as_type(source))
    with ts.config.scope(loop_min_elements=0):
        compiled = ts.jit(lambda x: [ts.cast(x, to) for to in INTEGERS])(x)
    for to, got in zip(INTEGERS, compiled, strict=True):
        low, high = (0, 1) if to == "bool_" else (np.iinfo(got.array.dtype).min,
                                                  np.iinfo(got.array.dtype).max)
        exact = [v != 0 if to == "bool_" else min(max(int(v), low), high) for v in x.array]
        assert got.array.tolist() == ts.cast(x, to).tolist() == exact


def test_casts_of_integers_saturate_on_a_gpu(gpu: Any, apart: Any) -> None:
    for source, to in itertools.product(("int64", "int32", "uint32"), ("int32", "uint32", "int64")):
        x = Tensor(values(source), as_type(source))
        got = ts.jit(lambda x, to=to: ts.cast(x, to), target="cuda")(x)
        np.testing.assert_array_equal(got.array, ts.cast(x, to).array)


def test_a_negative_power_of_integers_is_an_error() -> None:
    two, minus = ts.full(4096, 2, "int32"), ts.full(4096, -1, "int32")
    for f in (ts.power, ts.jit(ts.power)):
        with pytest.raises(ts.ArgumentError, match="negative power"):
            f(two, minus)
        np.testing.assert_array_equal(f(two, -minus + 2).array, np.full(4096, 8))


def test_a_sum_of_one_element_rounds_in_its_accumulate_type() -> None:
    x = ts.tensor([[1.0 + 2.0**-9]], "f32 @accum(bf16)")
    for least in (0, 10**9):
        with ts.config.scope(loop_min_elements=least):
            assert ts.jit(lambda x: ts.sum(x, axis=1))(x).tolist() == ts.sum(x, axis=1).tolist()
    assert ts.sum(x).item() == 1.0
    for shape in ((4, 1), (1, 4), (1, 1, 1)):
        zeros = ts.full(shape, -0.0)  # 0 + -0 is 0
        for f in (ts.sum, lambda x: ts.sum(x, axis=0), lambda x: ts.max(x, axis=1)):
            want = np.signbit(f(zeros).array)
            np.testing.assert_array_equal(np.signbit(ts.jit(f)(zeros).array), want)


def test_zeros_of_both_signs_are_two_constants() -> None:
    f = ts.jit(lambda x, *, k: x * k)
    assert [np.signbit(f(ts.ones(2), k=k).array[0]) for k in (0.0, -0.0, 0.0)] == [0, 1, 0]
    many = ts.jit(lambda x: (x * -0.0, x + -0.0, ts.where(x > 2.0, x, -0.0),
                             ts.full((4096,), -0.0)))
    for x, signs in ((-0.0, [0, 1, 1, 1]), (1.0, [1, 0, 1, 1])):
        for y, sign in zip(many(ts.full((4096,), x)), signs, strict=True):
            assert (np.signbit(y.array) == sign).all()
    nan = ts.jit(lambda x, *, k: x + k)
    for _ in range(3):
        nan(ts.ones(2), k=float("nan"))
    assert nan.specializations == 1


# --- Python numbers -----------------------------------------------------------------------------
NUMBERS = [2.0, -0.5, 0.1, 3, -2, 0, True, np.float32(0.1), np.float64(0.1), np.int8(3)]
USES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, s: x * s, "reflected": lambda x, s: s - x, "quotient": lambda x, s: x / s,
    "expression": lambda x, s: x * (1 - s * 0.5), "integers": lambda x, s: x + (s + 1) // 2,
    "power": lambda x, s: x ** s, "maximum": ts.maximum, "alone": lambda x, s: ts.exp(s) + x,
    "choice": lambda x, s: ts.where(x > s, x, s), "clip": lambda x, s: ts.clip(x, s, 4),
    "negated": lambda x, s: x + -s * abs(s), "compared": lambda x, s: ts.where(s > 1, x, x + 1),
}


@pytest.mark.parametrize("numeric", ["bf16", "f16", "f32", "f64", "fp8_e4m3", "int8", "int32",
                                     "uint8", "bool_", "bf16 @saturate"])
@pytest.mark.parametrize("use", USES)
def test_python_numbers_are_weak(use: str, numeric: str) -> None:
    """As arguments of compiled functions too: types, values and errors are those without."""
    x = ts.tensor([1, 0, 1], numeric) if numeric == "bool_" else ts.tensor([1, 2, 4], numeric)
    f = ts.jit(USES[use])
    for s in NUMBERS:
        try:
            want = USES[use](x, s)
        except TesseraError as error:
            with pytest.raises(type(error)):
                f(x, s)
            continue
        got = f(x, s)
        assert got.type == want.type, s
        np.testing.assert_allclose(got.numpy().astype(np.float64),
                                   want.numpy().astype(np.float64), rtol=1e-5)


def test_a_traced_number_keeps_its_digits() -> None:
    x = ts.tensor([1.0], "f64")
    assert ts.jit(lambda x, s: x * s)(x, 0.1).item() == 0.1
    assert ts.jit(lambda x, s: x * (s / 3))(x, 0.1).item() == 0.1 / 3
    assert ts.jit(lambda x, s: ts.jit(lambda x, s: x * s)(x, s + 1))(x, 0.1).item() == 1.1


def test_a_traced_number_is_data() -> None:
    """One trace for all values; an integer that does not fit is refused as it is without jit."""
    f = ts.jit(lambda x, s: x + s)
    assert [f(ts.ones(1, "int8"), s).item() for s in (1, 100, -100)] == [2, 101, -99]
    assert f.specializations == 1
    for wrong in (300, -129):
        for g in (f, f.fn):
            with pytest.raises(ts.ArgumentError, match=f"{wrong} is outside int8"):
                g(ts.ones(1, "int8"), wrong)


@pytest.mark.parametrize("large", [2**63 + 5, np.uint64(2**63 + 5)])
def test_integers_that_uint64_alone_holds_keep_their_value(large: Any) -> None:
    x, mapped = ts.tensor([0, 1], "uint64"), {"in_axes": (0, None)}
    for f in (lambda x, s: x + s, ts.jit(lambda x, s: x + s), ts.vmap(lambda x, s: x + s, **mapped),
              ts.jit(lambda x, s: ts.stack([s, s + ts.ones((), "uint64")]))):
        assert f(x, large).tolist() == [2**63 + 5, 2**63 + 6]
    assert ts.jit(lambda x, s: x * s)(ts.ones(()), large).item() == 2.0**63
    with pytest.raises(ts.ArgumentError, match="is outside int64"):
        ts.jit(lambda x, s: x + (s + 2**63))(ts.ones(1), 1)


@pytest.mark.parametrize("yes", [True, np.True_])
def test_bools_choose_what_is_traced_whoever_made_them(yes: Any) -> None:
    def f(x: ts.Tensor, flag: bool) -> ts.Tensor:
        return ts.sum(x * 2 if flag else x) + ts.sum(ts.where(flag, x, 0))

    x = ts.ones(2)
    for g in (f, ts.jit(f), ts.vmap(lambda x, b: f(x, b), in_axes=(0, None)), ts.checkpoint(f)):
        assert np.sum(g(x, yes)) == 6.0
    for g in (ts.grad(f), ts.jit(ts.grad(f))):
        assert g(x, yes).tolist() == [3.0, 3.0]
    b = ts.tensor([True, False])
    assert ts.jit(lambda b, s: b + s)(b, yes).type == (b + yes).type == "bool_"


def _with_rule(kind: Any) -> Callable[[Any, Any], Any]:
    f = kind(lambda x, s: x * s)
    if kind is ts.custom_vjp:
        f.defvjp(lambda x, s: (f(x, s), (x, s)), lambda saved, g: (g * saved[1], None))
    else:
        f.defjvp(lambda xs, moved: (f(*xs), None if moved[0] is None else moved[0] * xs[1]))
    return f


HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda x, s: ts.vmap(lambda x, s: x * s, in_axes=(0, None))(x, s),
    "cond": lambda x, s: ts.cond(ts.max(x) > 0, lambda x, s: x * s, lambda x, s: x + s, x, s),
    "checkpoint": lambda x, s: ts.checkpoint(lambda x, s: x * (s * 2 - s))(x, s),
    "custom_vjp": _with_rule(ts.custom_vjp), "custom_jvp": _with_rule(ts.custom_jvp),
}


@pytest.mark.parametrize("numeric", ["bf16", "f32", "f64", "int32", "uint8"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_numbers_are_weak_in_functions_that_ops_hold(holder: str, numeric: str) -> None:
    """Of which the transforms make graphs of their own; a NumPy number is no exception."""
    x = ts.tensor([1, 2, 4], numeric)
    for s in (2.0, 0.1, 3, np.float32(0.1), np.float64(0.1), np.int32(3)):
        want = x * s
        for f in (HOLDERS[holder], ts.jit(HOLDERS[holder])):
            got = f(x, s)
            assert got.type == want.type, s
            np.testing.assert_allclose(got.numpy().astype(np.float64),
                                       want.numpy().astype(np.float64), rtol=1e-5)


@pytest.mark.parametrize("holder", HOLDERS)
def test_derivatives_beside_numbers_that_ops_hold(holder: str) -> None:
    f, x = HOLDERS[holder], ts.tensor([1.0, 2.0], "bf16")
    slope = ts.jit(ts.grad(lambda x, s: ts.sum(f(x, s))))
    assert [slope(x, s).tolist() for s in (0.5, 3.0)] == [[0.5, 0.5], [3.0, 3.0]]
    assert slope.specializations == 1
    value, back = ts.vjp(lambda x: f(x, 0.5), x)
    assert value.type == "bf16" and back(ts.ones(2)).tolist() == [0.5, 0.5]


def test_the_tangent_of_a_number_is_a_number() -> None:
    """A rule that multiplies by it stays in the tensor's type."""
    f = ts.custom_jvp(lambda x, s: x * s)
    seen: list[Any] = []

    @f.defjvp
    def rule(xs: Any, moved: Any) -> Any:
        seen.append((xs[0] * moved[1]).type)
        return f(*xs), moved[0] * xs[1] + xs[0] * moved[1]

    ts.jit(lambda x, s: f(x, s))(ts.ones(2, "bf16"), 0.5)
    assert seen == ["bf16"]


@pytest.mark.parametrize("holder", ["vmap", "cond", "checkpoint"])
def test_numbers_that_ops_hold_on_a_gpu(holder: str, gpu: Any, apart: Any) -> None:
    f = ts.jit(lambda x, s: HOLDERS[holder](x, s), target="cuda")
    x = ts.tensor([1.0, 2.0], "bf16")
    got, want = f(x, 0.25), x * 0.25
    assert got.type == want.type
    np.testing.assert_array_equal(got.array, want.array)


def test_gradients_of_traced_numbers() -> None:
    assert ts.grad(lambda s: s * s * 3.0)(2.0).item() == 12.0
    assert ts.grad(lambda x, s: ts.sum(x * s))(ts.ones(2, "bf16"), 3.0).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("numeric", ["bf16", "f32"])
def test_traced_numbers_on_a_gpu(numeric: str, gpu: Any, apart: Any) -> None:
    f = ts.jit(lambda x, s, n: (x * s + n) * (1 - s), target="cuda")
    x = ts.tensor([1.0, 2.0], numeric)
    got, want = f(x, 0.25, 3), f.fn(x, 0.25, 3)
    assert got.type == want.type
    np.testing.assert_array_equal(got.array, want.array)


# --- powers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("numeric", "exponent", "result"), [
    ("int8", 2, "int8"), ("int8", 2.0, "f32"), ("int8", 1.0, "f32"), ("bool_", 3, "int64"),
    ("bf16", 2, "bf16"), ("bf16", 1, "bf16"), ("f64", 3.0, "f64")])
def test_a_power_has_the_type_of_other_arithmetic(numeric: str, exponent: float, result: str
                                                  ) -> None:
    y = ts.tensor([1, 1], numeric) ** exponent
    assert str(y.type) == result and y.tolist() == [1, 1]


@pytest.mark.parametrize("f", [
    lambda n: ts.where(n > 1.0, 1.0 / n, 1.0), lambda n: ts.where(n > 1.0, 1.0, n),
    lambda n: ts.maximum(n, 1.0), lambda n: ts.minimum(1.0, 2 * n), lambda n: ts.power(n, 2.0)])
def test_operations_on_numbers_alone(f):
    """Traced numbers beside written ones, with no tensor among them."""
    step = ts.jit(f)
    for n in (2.0, 0.5, 4.0):
        assert step(n).item() == f(n).item()


def test_clipping_by_a_norm_that_is_a_number():
    clip = ts.jit(lambda g, norm: ts.optim.clip_by_global_norm(g, 1.0, norm)[0])
    assert [clip({"w": ts.ones(())}, n)["w"].item() for n in (2.0, 0.5)] == [0.5, 1.0]


def test_numbers_must_fit_at_every_call() -> None:
    """What is computed of numbers is looked at when it is there, not where it will lie."""
    f = ts.jit(lambda x, s: x + (s + 1) // 2)
    x = ts.cast(ts.arange(4), "int8")
    for s in (5, 7, 256):
        with pytest.raises(ts.ArgumentError, match="is outside int8") if s > 255 else nullcontext():
            np.testing.assert_array_equal(f(x, s).array, np.arange(4) + (s + 1) // 2)


@pytest.mark.parametrize("passed", [False, True], ids=["constant", "argument"])
def test_numbers_take_the_type_of_what_they_are_put_into(passed: bool) -> None:
    """0.1 is 0.1 in f64, not what f32 makes of it."""
    x, at = ts.tensor([0.3, 0.2, 0.1], "f64"), ts.tensor([0])

    def run(f: Any) -> list:
        out = ts.jit(f)(x, 0.1) if passed else f(x, 0.1)
        return out.tolist()

    assert run(lambda x, k: ts.stack([x[1], k, x[0]])) == [0.2, 0.1, 0.3]
    assert run(lambda x, k: ts.index_put(x, (at,), k)) == [0.1, 0.2, 0.1]
    assert run(lambda x, k: ts.scatter(x, at, k)) == [0.1, 0.2, 0.1]
    assert run(lambda x, k: ts.scatter_add(x, at, k)) == [0.3 + 0.1, 0.2, 0.1]
    assert run(lambda x, k: ts.put_along_axis(x, at, k, 0)) == [0.1, 0.2, 0.1]
    assert run(lambda x, k: ts.isin(x, k)) == [False, False, True]
    half = ts.ones((), "bf16")
    assert ts.stack([half, 0.5]).dtype is ts.bf16
    assert ts.stack([ts.ones((), "int32"), 5]).dtype is ts.int32


def test_lists_of_numbers_are_exact_beside_f64() -> None:
    x = ts.tensor([0.3, 0.2, 0.1], "f64")
    assert (x == [0.3, 0.2, 0.1]).tolist() == ts.isin(x, [0.1, 0.2, 0.3]).tolist() == [True] * 3
    assert (x + [0.1, 0.1, 0.1]).tolist() == [0.3 + 0.1, 0.2 + 0.1, 0.1 + 0.1]
    assert (ts.ones(2, "bf16") + [0.5, 0.25]).dtype is ts.f32
