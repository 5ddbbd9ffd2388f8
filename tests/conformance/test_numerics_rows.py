"""Rows of the area NUM, at the level of tensors, and the policy rows of AD."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import (
    accum,
    bf16,
    f16,
    f32,
    fp8_e4m3,
    fp8_e5m2,
    hooks,
    int8,
    loss_scale,
    per_channel,
    saturate,
    scaled,
    stochastic_round,
)
from tessera.numerics import all_dtypes, as_type, decode, from_codes, pack
from tolerance import assert_close, f64

ROOT = Path(__file__).resolve().parents[2]
ML = {  # independent codecs; fp4_e3m0 has none
    "fp4_e2m1": ml_dtypes.float4_e2m1fn, "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn, "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16, "f16": np.float16,
}
LISTED = ["fp4_e2m1", "fp4_e3m0", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", "f16", "bf16",
          "tf32", "f32", "int8", "int4"]
E3M0 = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16])


def spread(rng, n):
    """f32 of all magnitudes that narrow formats tell apart, ties among them."""
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-20, 18, n)
    return np.concatenate([x, np.round(x * 8) / 8]).astype(np.float32)


# --- formats ----------------------------------------------------------------------------------
@pytest.mark.row("NUM-01", "NUM-03", "NUM-04", "NUM-05", "NUM-06", "NUM-08", "NUM-09", "OPS-04")
@pytest.mark.parametrize("name", ML)
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_casts_are_bit_exact(name, run, rng):
    x = spread(rng, 4096)
    with np.errstate(over="ignore"):
        want = x.astype(ML[name])
    got = run(lambda v: ts.cast(v, name))(ts.tensor(x))
    assert got.dtype.name == name
    np.testing.assert_array_equal(got.array.view(np.uint8), want.view(np.uint8))


@pytest.mark.row("NUM-01", "NUM-03", "NUM-04", "NUM-05", "NUM-06")
@pytest.mark.parametrize("name", [n for n in ML if n.startswith("fp")])
def test_all_codes_decode(name):
    t = as_type(name).dtype
    codes = np.arange(2**t.bits, dtype=np.uint8)
    want = codes.view(ML[name]).astype(np.float64)
    np.testing.assert_array_equal(f64(decode(from_codes(codes, t), t)), want)
    x = ts.Tensor(from_codes(codes, t), as_type(name))
    np.testing.assert_array_equal(f64(ts.cast(x, f32)), want)


@pytest.mark.row("NUM-02")
def test_e3m0():
    t = as_type("fp4_e3m0").dtype
    values = f64(decode(from_codes(np.arange(16, dtype=np.uint8), t), t))
    np.testing.assert_array_equal(np.abs(values), np.tile(E3M0, 2))
    assert np.all(np.signbit(values[8:])) and not np.any(np.signbit(values[:8]))
    ties = np.float32([0.125, 0.375, 0.75, 1.5, 3, 6, 12])  # between codes k and k + 1
    even = [E3M0[k + k % 2] for k in range(7)]
    np.testing.assert_array_equal(ts.cast(ties, "fp4_e3m0").numpy(), even)


@pytest.mark.row("NUM-07")
def test_scaled_fp8(rng):
    x = (rng.standard_normal((64, 64)) * 1e4).astype(np.float32)
    q = ts.cast(x, fp8_e4m3 @ scaled("amax"))
    assert q.scale.dtype is f32 and q.scale.shape == ()
    assert np.linalg.norm(f64(q) - x) / np.linalg.norm(x) < 0.07
    plain = f64(ts.cast(x, fp8_e4m3))
    assert not np.isfinite(plain).all()  # without the scale it overflows
    jitted = ts.jit(lambda v: ts.cast(v, fp8_e4m3 @ scaled("amax")))(ts.tensor(x))
    np.testing.assert_array_equal(jitted.numpy(), q.numpy())


@pytest.mark.row("NUM-10")
def test_tf32(rng):
    a, b = (rng.standard_normal(s).astype("f4") for s in [(16, 64), (64, 24)])
    A, B = ts.tensor(a, ts.tf32), ts.tensor(b, ts.tf32)
    assert A.nbytes == 4 * a.size
    y = ts.jit(_tf32_product)(A, B)
    want = _ten_bits(a) @ _ten_bits(b)
    assert np.linalg.norm(f64(y) - want) < 1e-6 * np.linalg.norm(want)
    assert np.linalg.norm(f64(y) - f64(a) @ f64(b)) > 1e-5 * np.linalg.norm(want)


def _tf32_product(a: ts.Tensor["M", "K", ts.tf32], b: ts.Tensor["K", "N", ts.tf32]
                  ) -> ts.Tensor["M", "N", ts.f32]:
    return ts.gemm(a, b)


def _ten_bits(x):
    """f32 rounded to nearest even at 10 mantissa bits, in f64."""
    mantissa, exponent = np.frexp(f64(x))
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11)


@pytest.mark.row("NUM-11")
def test_f32_accumulation_by_default():
    x = ts.tensor(np.ones((1, 8192)), bf16)
    assert (x @ x.T).item() == 8192.0 == ts.sum(x).item()
    for t in all_dtypes():
        if t.kind == "float" and t.bits <= 32:
            one = ts.ones((1, 4), t)
            assert "accum=f32" in str(ts.jit(lambda v: v @ v.T).graph(one))
            assert "accum=f32" in str(ts.jit(ts.sum).graph(one))


@pytest.mark.row("NUM-12")
def test_int8_products_are_exact(rng):
    a, b = rng.integers(-128, 128, (17, 300)), rng.integers(-128, 128, (300, 9))
    y = ts.tensor(a, int8) @ ts.tensor(b, int8)
    assert y.dtype is ts.int32
    np.testing.assert_array_equal(y.numpy(), a @ b)
    q = ts.cast(a.astype("f4"), int8 @ scaled("amax"))
    assert q.scale is not None and q.array.dtype.itemsize == 1


@pytest.mark.row("NUM-13")
def test_int4_bytes():
    for byte in range(256):
        low, high = (v - 16 if v > 7 else v for v in (byte & 15, byte >> 4))
        x = ts.tensor([low, high], "int4")
        assert x.buffer.tolist() == [byte] and x.tolist() == [low, high]


@pytest.mark.row("NUM-14")
@pytest.mark.parametrize("t", [
    "int8 @scaled(amax)", "int8 @per_channel(0)", "int4 @per_channel(1)",
])
def test_quantized_embedding(t, rng):
    table = ts.cast(rng.standard_normal((11, 6)).astype("f4"), t)
    ids = rng.integers(0, 11, (3, 5))
    rows = ts.embedding(table, ts.tensor(ids))
    np.testing.assert_array_equal(f64(rows), f64(table)[ids])


@pytest.mark.row("NUM-15")
@pytest.mark.parametrize("bits, name", [(8, "int8"), (4, "int4")])
@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel_scales(bits, name, axis, rng):
    x = (rng.standard_normal((5, 7)) * 10.0 ** rng.integers(-3, 4, (5, 7))).astype("f4")
    q = ts.cast(x, as_type(name) @ per_channel(axis))
    step = np.abs(x).max(1 - axis, keepdims=True) / (2 ** (bits - 1) - 1)
    assert q.scale.size == x.shape[axis]
    assert np.all(np.abs(f64(q) - x) <= step / 2 * (1 + 1e-5))


# --- policies ---------------------------------------------------------------------------------
@pytest.mark.row("NUM-17")
def test_policies_are_visible():
    t = bf16 @ accum(f32) @ stochastic_round @ loss_scale(4.0) @ saturate
    kind = ts.Tensor["B", "D", t]
    for thing in (kind, ts.zeros((2, 3), t), ts.tensor([1.0], t), ts.zeros_like_type(kind, B=1,
                                                                                   D=2)):
        assert thing.dtype is bf16
        p = thing.policy
        assert (p.accum, p.rounding, p.loss_scale, p.saturate) == (f32, "stochastic", 4.0, True)


@pytest.mark.row("NUM-18", "NUM-24", "NUM-39")
def test_annotations_and_strings_are_the_same_types():
    t = fp8_e4m3 @ accum(ts.fp32) @ loss_scale(128.0)
    assert ts.Tensor["B", "D", t].type == as_type("fp8_e4m3 @accum(f32) @loss_scale(128.0)")
    assert as_type(str(t)) == t
    with pytest.raises(ts.PolicyError, match="position 9"):
        as_type("fp8_e4m3 loss")


@pytest.mark.row("NUM-19")
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_accumulate_in_bf16_or_f32(run):
    ones = np.ones(4096)
    assert run(ts.sum)(ts.tensor(ones, bf16 @ accum(bf16))).item() == 256
    assert run(ts.sum)(ts.tensor(ones, bf16 @ accum(f32))).item() == 4096


@pytest.mark.row("NUM-20")
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name, x", [("bf16", 1.001), ("fp8_e4m3", 1.03), ("fp4", 0.7)])
def test_stochastic_rounding(run, name, x):
    n, t = 100_000, as_type(name) @ stochastic_round
    fn = run(lambda v: ts.cast(v, t))
    ts.random.seed(11)
    first = fn(ts.full((n,), x))
    ts.random.seed(11)
    again = fn(ts.full((n,), x))
    np.testing.assert_array_equal(first.buffer, again.buffer)
    values = f64(first)
    low, high = np.unique(values)
    assert low < x < high
    p = (np.float64(np.float32(x)) - low) / (high - low)
    sigma = np.sqrt(p * (1 - p) / n) * (high - low)
    assert abs(values.mean() - np.float32(x)) < 4 * sigma
    assert np.any(fn(ts.full((n,), x)).buffer != first.buffer)  # the next step draws anew


@pytest.mark.row("NUM-21")
@pytest.mark.parametrize("storage", [f16, fp8_e5m2])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_small_gradients_survive_under_a_loss_scale(storage, run, rng):
    """1e-8 is below half the least f16 number (3e-8) and of fp8_e5m2 (8e-6)."""
    w0 = rng.standard_normal((4, 4))

    def gradient(t):
        x, w = ts.tensor(np.eye(4), t), ts.param(w0, t)
        return run(ts.grad(lambda x, w: ts.sum(ts.cast(x @ w, f32) * 1e-8)))(x, w)

    assert not np.any(gradient(storage).numpy())
    g = gradient(storage @ loss_scale(2.0**16))
    assert g.dtype is f32
    np.testing.assert_allclose(g.numpy(), 1e-8, rtol=2**-3)  # unscaled again


@pytest.mark.row("NUM-22")
def test_dynamic_loss_scale(rng):
    W, scale = rng.standard_normal(3).astype("f4"), ts.DynamicLossScale(value=2.0**10, interval=2)
    x = ts.tensor(np.float32([1, 2, 3]))
    grads = ts.grad(lambda w, x, k: ts.sum(w * x) * k)

    def update(w):
        return lambda g: ts.tensor(w.numpy() - 0.1 * g.numpy())

    w = ts.param(W)
    bad = ts.tensor(np.float32([1, np.inf, 3]))
    w2, after = scale.step(grads(w, bad, scale.value), update(w), w)
    assert w2 is w and after.value == 2.0**9
    w3, good = after.step(grads(w, x, after.value), update(w), w)
    np.testing.assert_allclose(w3.numpy(), W - np.float32(0.1) * x.numpy(), rtol=1e-6)
    assert good.value == 2.0**9
    assert good.step(grads(w3, x, good.value), update(w3), w3)[1].value == 2.0**10


@pytest.mark.row("NUM-23")
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("t, top", [(fp8_e4m3, 448), (fp8_e5m2, 57344), (f16, 65504)])
def test_saturation(run, t, top):
    x = ts.tensor(np.float32([1e9, -1e9, np.inf]))
    got = f64(run(lambda v: ts.cast(v, as_type(t) @ saturate))(x))
    np.testing.assert_array_equal(got[:2], [top, -top])
    plain = f64(run(lambda v: ts.cast(v, t))(x))
    assert not np.isfinite(plain).any()


# --- mixed precision --------------------------------------------------------------------------
@pytest.mark.row("NUM-25")
@pytest.mark.parametrize("a, b", [("fp8_e4m3", "bf16"), ("fp6", "bf16"), ("fp4", "f16"),
                                  ("fp8_e5m2", "f32")])
def test_products_of_different_storages(a, b, rng):
    def wide(x, w):
        return x @ w

    wide.__annotations__ = {"x": ts.Tensor["M", "K"], "w": ts.Tensor["K", "N"],
                            "return": ts.Tensor["M", "N", f32]}
    x, w = ts.tensor(rng.standard_normal((8, 64)), a), ts.tensor(rng.standard_normal((64, 5)), b)
    assert_close(ts.jit(wide)(x, w).numpy(), f64(x) @ f64(w), n=64)


@pytest.mark.row("NUM-26")
def test_the_type_of_a_result():
    def annotated(x: ts.Tensor["M", "K"], w: ts.Tensor["K", "N"]) -> ts.Tensor["M", "N", f32]:
        return ts.gemm(x, w)

    one = {n: ts.ones((2, 2), n) for n in ("fp6", "fp8_e4m3", "bf16")}
    assert ts.jit(annotated)(one["fp8_e4m3"], one["bf16"]).dtype is f32
    assert ts.gemm(one["fp6"], one["fp6"]).dtype is ts.fp6_e3m2
    assert ts.gemm(one["fp8_e4m3"], one["bf16"]).dtype is bf16


@pytest.mark.row("NUM-28")
def test_casts_are_nodes_of_the_graph():
    f = ts.jit(lambda x, w: ts.gemm(x, w))
    f(ts.ones((2, 2), fp8_e4m3), ts.ones((2, 2), fp8_e4m3))
    lines = f.inspect_ir("graph").splitlines()
    product = next(i for i, line in enumerate(lines) if "= matmul(" in line)
    assert ": f32[2, 2] = matmul(" in lines[product] and "accum=f32" in lines[product]
    assert "matmul(%0, %1)" in lines[product]  # as they are stored: two of them multiply exactly
    assert not any("= cast(" in line for line in lines[:product])
    assert ": fp8_e4m3[2, 2] = cast(" in lines[product + 1]


@pytest.mark.row("NUM-40")
def test_a_value_of_another_type_is_never_reinterpreted():
    def double(x: ts.Tensor["N", fp8_e4m3 @ accum(f32)]):
        return x + x

    x = ts.tensor([1.5, 3.0], fp8_e5m2)
    with pytest.raises(ts.DTypeError, match="argument x is fp8_e5m2, its annotation says fp8_e4m3"):
        ts.jit(double)(x)
    f = ts.jit(double, cast=True)
    y = f(x)
    assert y.dtype is fp8_e4m3 and y.tolist() == [3.0, 6.0]
    assert "cast(%0) source=fp8_e5m2 to=fp8_e4m3 @accum(f32)" in f.inspect_ir("graph")


@pytest.mark.row("NUM-44")
@pytest.mark.parametrize("name", LISTED)
def test_every_listed_format_works(name):
    x = ts.tensor([[1, 2], [0, 1]], name)
    assert x.dtype is as_type(name).dtype and x.tolist() == [[1, 2], [0, 1]]
    assert ts.cast(ts.tensor([[1.0, 2.0], [0.0, 1.0]]), name).tolist() == [[1, 2], [0, 1]]
    assert ts.cast(x, f32).tolist() == [[1, 2], [0, 1]]
    assert ts.matmul(x, x).tolist() == [[1, 4], [0, 1]]
    assert (ts.sum(x).item(), ts.max(x).item(), ts.min(x).item()) == (4, 2, 0)
    assert ts.sum(x, axis=1).tolist() == [3, 1] if name != "fp4_e3m0" else True
    assert ts.jit(lambda v: ts.matmul(v, v))(x).tolist() == [[1, 4], [0, 1]]


@pytest.mark.parametrize("t", all_dtypes(), ids=str)
def test_bytes_of_a_tensor(t):
    """The host side of NUM-45: rows of ceil(n bits / 8) bytes, fp6 in groups of three."""
    n = 13
    row = {6: 12, 4: 7}.get(t.bits, n * t.numpy.itemsize)  # 13 codes of 6 bits: 4 groups of 3
    assert ts.zeros((n,), t).nbytes == row
    x = ts.zeros((3, n), t)
    assert x.nbytes == 3 * row == (x.buffer.nbytes)
    if t.packed:
        np.testing.assert_array_equal(pack(x.array, t), x.buffer)


# --- derivatives ------------------------------------------------------------------------------
@pytest.mark.row("AD-17")
@pytest.mark.parametrize("t", [bf16, fp8_e4m3, f16])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_gradients_are_and_accumulate_f32(t, run):
    """4096 uses of one parameter, each with a gradient of 2^-10: 4 exactly, which no bf16 or fp8
    accumulation would give."""
    rows = ts.tensor(np.full((4096, 1), 2.0**-10), f32)
    w = ts.param([1.0], t)
    g = run(ts.grad(lambda w: ts.sum(rows * w)))(w)
    assert g.dtype is f32 and g.item() == 4.0
    low = ts.tensor(np.ones((4096, 1)), t)
    g = run(ts.grad(lambda w: ts.sum(ts.cast(low * w, f32)) * 2.0**-6))(w)
    assert g.dtype is f32 and g.item() == 64.0


@pytest.mark.row("AD-18")
def test_a_loss_scale_reaches_every_stored_cotangent(rng):
    """The cotangents of x @ w and of relu(x @ w), both stored in f16, are k times larger; the
    gradient is the same."""
    x0, w0 = rng.standard_normal((5, 4)), rng.standard_normal((4, 3))

    def stored(k):
        t = f16 @ loss_scale(k)
        seen = []

        def watch(op, args, attrs, made):
            if op.name == "cast" and attrs["to"].dtype is f16:
                seen.append(made[0].array.astype(np.float64))

        x, w = ts.tensor(x0, t), ts.param(w0, t)
        y, pull = ts.vjp(lambda w: ts.relu(x @ w), w)
        hooks.eager_ops.append(watch)
        try:
            return pull(ts.full(y.shape, 2.0**-6)), seen
        finally:
            hooks.eager_ops.remove(watch)

    (g1, plain), (gk, larger) = stored(1.0), stored(64.0)
    assert len(plain) == len(larger) == 2
    for a, b in zip(plain, larger, strict=True):
        np.testing.assert_array_equal(b, 64 * a)
    np.testing.assert_array_equal(g1.numpy(), gk.numpy())
    assert g1.dtype is gk.dtype is f32


@pytest.mark.row("AD-26")
def test_return_annotations():
    def f(x: ts.Tensor["B", "S", f32]) -> ts.Tensor["B", "S", bf16]:
        return x * 2.0

    def wrong(x: ts.Tensor["B", "S", f32]) -> ts.Tensor["B", bf16]:
        return x * 2.0

    assert ts.jit(f)(ts.ones((2, 3))).dtype is bf16
    with pytest.raises(ts.ShapeError, match="wrong: the result"):
        ts.jit(wrong)(ts.ones((2, 3)))


# --- the document -----------------------------------------------------------------------------
PAGE = ROOT / "docs/reference/numerics.md"
TOPICS = {"Rounding", "Overflow", "NaN", "Subnormals", "Determinism"}


def _rules():
    """(heading, text, tests) of each rule of docs/reference/numerics.md."""
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        heading = part.splitlines()[0]
        for rule in re.findall(r"^- (.*?)(?=^- |^<|\Z)", part, flags=re.M | re.S):
            yield heading, rule, re.findall(r"(tests/[\w/]+\.py)::(\w+)", rule)


@pytest.mark.row("NUM-43")
def test_each_rule_of_the_document_has_a_test():
    rules = list(_rules())
    assert {heading for heading, _, _ in rules} >= TOPICS and len(rules) > 20
    for _, rule, tests in rules:
        assert tests, f"no test holds this rule: {rule}"
        for file, name in tests:
            tree = ast.parse((ROOT / file).read_text())
            names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in names, f"{file} has no {name}, which docs/reference/numerics.md names"


@pytest.mark.row("NUM-43")
def test_the_document_has_a_line_for_each_format():
    text = PAGE.read_text().partition("<!-- table: ranges -->")[2].partition("<!-- end -->")[0]
    rows = {line.split("|")[1].strip(" `"): line.split("|")[2:-1] for line in
            text.strip().splitlines()[2:]}
    assert set(rows) == {t.name for t in all_dtypes() if t.kind != "bool"}
    assert [c.strip() for c in rows["fp8_e4m3"]] == [
        "NaN", "448", "NaN", "NaN", "448", "NaN", "0.001953125"]
    assert [c.strip() for c in rows["fp6_e2m3"]] == ["7.5", "7.5", "-7.5", "7.5", "7.5", "0",
                                                     "0.125"]
