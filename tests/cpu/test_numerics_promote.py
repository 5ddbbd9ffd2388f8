"""Result types of mixed operands; scaled storage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tessera.numerics as tn
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError
from tessera.numerics import accum, loss_scale, per_channel, saturate, scaled, stochastic_round

FLOATS = [t for t in tn.all_dtypes() if t.kind == "float"]
INTS = [t for t in tn.all_dtypes() if t.kind in ("int", "uint")]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("fp8_e4m3", "bf16", "bf16"), ("bf16", "f32", "f32"), ("bf16", "f16", "f32"),
        ("fp6_e3m2", "fp8_e5m2", "fp8_e5m2"), ("fp4", "fp6", "fp6_e3m2"), ("tf32", "f32", "f32"),
        ("tf32", "f16", "tf32"), ("f32", "f64", "f64"), ("int64", "fp4", "fp4_e2m1"),
        ("int8", "f16", "f16"), ("bool_", "int4", "int4"), ("bool_", "fp8", "fp8_e4m3"),
        ("int4", "int8", "int8"), ("int4", "uint8", "int16"), ("int8", "uint8", "int16"),
        ("int64", "uint64", "f64"), ("uint8", "uint32", "uint32"),
    ],
)
def test_storage_of_a_result(a, b, expected):
    a, b = tn.find_dtype(a), tn.find_dtype(b)
    assert tn.result_type(a, b).name == tn.result_type(b, a).name == expected
    assert tn.result_type(tn.as_type(a), b) == tn.as_type(expected)


def test_equal_storages_stay():
    for t in tn.all_dtypes():
        assert tn.result_type(t, t) is t


def test_integers_follow_numpy():
    for a, b in itertools.product([t for t in INTS if t is not tn.int4], repeat=2):
        assert tn.result_type(a, b).numpy == np.result_type(a.numpy, b.numpy)


@pytest.mark.parametrize(
    ("a", "b"), [("fp8_e4m3", "fp8_e5m2"), ("fp6_e3m2", "fp6_e2m3"), ("fp4_e2m1", "fp4_e3m0")]
)
def test_formats_of_one_width_must_be_cast(a, b):
    with pytest.raises(DTypeError, match=f"{a} and {b} are different formats") as info:
        tn.result_type(tn.find_dtype(a), tn.find_dtype(b))
    assert "cast one of them" in info.value.hint


@pytest.mark.parametrize(
    ("wide", "narrow"), [("fp8_e5m2", "fp6_e2m3"), ("fp6_e2m3", "fp4_e3m0")]
)
def test_a_wider_format_that_does_not_hold_the_other_must_be_cast(wide, narrow):
    with pytest.raises(DTypeError, match=f"{wide} is wider than {narrow} and does not hold"):
        tn.result_type(tn.find_dtype(narrow), tn.find_dtype(wide))


def finite_values(t):
    codes = range(t.max_code + 1) if t.bits <= 16 else [0, 1, t.max_code, (1 << t.man) - 1]
    return np.array([t.value_of(code) for code in codes])


def test_the_type_of_two_floats_holds_every_number_of_both():
    for a, b in itertools.permutations(FLOATS, 2):
        values = finite_values(b)
        held = np.array_equal(tn.decode(tn.encode(values, a), a), values)
        try:
            assert tn.result_type(a, b) is not a or held
        except DTypeError:
            assert not held


def test_every_pair_of_floats_commutes_or_raises_both_ways():
    for a, b in itertools.combinations(FLOATS, 2):
        try:
            expected = tn.result_type(a, b)
        except DTypeError:
            with pytest.raises(DTypeError):
                tn.result_type(b, a)
        else:
            assert tn.result_type(b, a) is expected
            assert expected.bits >= max(a.bits, b.bits)


def test_policy_of_the_storage_wins_and_gaps_are_filled():
    a = tn.fp8 @ stochastic_round @ accum(tn.f32) @ loss_scale(8.0)
    b = tn.bf16 @ saturate @ loss_scale(2.0)
    expected = tn.bf16 @ saturate @ loss_scale(2.0) @ stochastic_round
    assert tn.result_type(a, b) == tn.result_type(b, a) == expected
    assert tn.result_type(a, tn.bf16 @ accum(tn.f16)).policy.accum is tn.f32


def test_an_accumulate_type_that_is_the_results_own_does_not_spread():
    a = tn.bf16 @ accum(tn.f32)
    assert tn.result_type(a, tn.f32) == tn.result_type(tn.f32, a) == tn.as_type(tn.f32)
    assert tn.result_type(a, tn.bf16) == tn.result_type(tn.bf16, a) == a  # declared by its storage
    assert tn.result_type(a, tn.f32 @ accum(tn.f32)) == tn.f32 @ accum(tn.f32)
    assert tn.result_type(tn.fp8 @ accum(tn.bf16), tn.f32) == tn.f32 @ accum(tn.bf16)
    assert str(a) == "bf16 @accum(f32)" and tn.parse(str(a)) == a


def test_of_two_accumulate_types_the_wider_counts():
    a, b = tn.bf16 @ accum(tn.f32), tn.bf16 @ accum(tn.f64)
    assert tn.result_type(a, b).accum is tn.result_type(b, a).accum is tn.f64
    a, b = tn.fp8 @ accum(tn.bf16), tn.f16 @ accum(tn.f16)
    assert tn.result_type(a, b).accum is tn.f32


def test_scales_belong_to_their_storage():
    a = tn.int8 @ scaled("amax") @ per_channel(0)
    assert tn.result_type(a, tn.bf16) == tn.as_type(tn.bf16)
    assert tn.result_type(a, tn.int8) == a
    assert tn.result_type(tn.bf16 @ scaled("amax"), tn.f16) == tn.as_type(tn.f32)


def test_a_policy_class_counts_as_its_compute_type():
    @tn.precision_policy
    class Q:
        storage, scale, compute, accumulate = tn.int8, tn.f32, tn.bf16, tn.f32

        def quantize(self, x):
            return x, 1.0

        def dequantize(self, x, scale):
            return x

    assert tn.result_type(Q, tn.fp8) == tn.as_type(tn.bf16)  # sums in f32 anyway
    assert tn.result_type(Q, Q) == tn.as_type(Q)


def test_python_scalars_are_weak():
    for t in tn.all_dtypes():
        assert tn.weak_result(t, True) is t
        assert tn.weak_result(t, 0.5) is (t if t.kind == "float" else tn.f32)
        assert tn.weak_result(t, 3) is (tn.int64 if t is tn.bool_ else t)
    with pytest.raises(ArgumentError, match=r"8 is outside int4 \(-8 .. 7\)"):
        tn.weak_result(tn.int4, 8)
    with pytest.raises(ArgumentError, match=r"-1 is outside uint8"):
        tn.weak_result(tn.uint8, -1)
    with pytest.raises(DTypeError, match="1j is not a real number"):
        tn.weak_result(tn.f32, 1j)


# -- scaled storage --


@pytest.mark.row("NUM-07")
def test_scaled_fp8_keeps_seven_percent(rng):
    x = (rng.standard_normal(100_000) * 1e4).astype(np.float32)
    codes, scale = tn.quantize_amax(x, tn.fp8_e4m3)
    assert scale.dtype == np.float32 and scale.shape == ()
    y = tn.dequantize(codes, scale, tn.fp8_e4m3).astype(np.float64)
    normal = np.abs(x) >= tn.fp8_e4m3.tiny * float(scale)
    assert normal.mean() > 0.99
    assert np.max(np.abs(y - x)[normal] / np.abs(x)[normal]) < 0.07
    assert np.max(np.abs(y - x)[~normal]) <= tn.fp8_e4m3.smallest / 2 * float(scale) * 1.0001
    # without a scale the same data does not fit
    assert np.isnan(tn.decode(tn.encode(x, "fp8"), "fp8")).any()


@pytest.mark.row("NUM-15")
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_error_is_half_a_step(name, axis, rng):
    x = rng.standard_normal((6, 40)) * 10.0 ** rng.integers(-6, 6, (6, 1))
    x = x.T if axis != 0 else x  # channels of very different size along `axis`
    x = x.astype(np.float32)
    codes, scale = tn.quantize_amax(x, name, axis)
    assert scale.shape == (6,) and codes.dtype == tn.as_dtype(name).numpy
    error = np.abs(tn.dequantize(codes, scale, name, axis).astype(np.float64) - x)
    step = scale.astype(np.float64).reshape((6, 1) if axis == 0 else (1, 6))
    assert np.all(error <= step / 2 * (1 + 1e-5))
    assert np.all(np.abs(codes.astype(np.int32)).max(axis=1 if axis == 0 else 0)
                  == tn.as_dtype(name).max)
    one, single = tn.quantize_amax(x, name)
    assert np.max(np.abs(tn.dequantize(one, single, name) - x) / step) > 1  # one scale is worse


@pytest.mark.parametrize("name", [t.name for t in FLOATS if t.exp < 8])
def test_the_largest_value_survives_scaling(name, rng):
    x = (rng.standard_normal(1000) * 1e-3).astype(np.float32)
    codes, scale = tn.quantize_amax(x, name)
    at = np.argmax(np.abs(x))
    assert abs(tn.decode(codes, name)[at]) == tn.as_dtype(name).max
    assert tn.dequantize(codes, scale, name)[at] == pytest.approx(x[at], rel=1e-6)


def test_a_zero_scale_becomes_one():
    codes, scale = tn.quantize_amax(np.zeros((2, 3)), "int8", 0)
    assert scale.tolist() == [1.0, 1.0]
    assert not tn.dequantize(codes, scale, "int8", 0).any()
    assert tn.dequantize(np.int8([5]), 0.0, "int8").tolist() == [5.0]
    assert tn.quantize_amax(np.empty((0, 3)), "fp8")[1] == 1
    assert tn.quantize_amax(np.empty((0, 3)), "fp8", 1)[1].tolist() == [1, 1, 1]


def test_nan_and_inf_do_not_spoil_the_scale():
    x = np.float32([1, -2, np.nan, np.inf, -np.inf])
    counts = tn.CastCounts()
    codes, scale = tn.quantize_amax(x, "int8", counts=counts)
    assert codes.tolist() == [64, -127, 0, 127, -127] and counts.nan == 1
    assert scale == np.float32(2 / 127)


def test_stochastic_quantisation_is_symmetric_and_unbiased():
    x = np.full(100_000, 0.3)
    x[0] = -127.0
    codes, scale = tn.quantize_amax(x, "int8", rounding="stochastic", key=2)
    assert scale == 1 and codes.min() == -127
    assert abs(codes[1:].mean() - 0.3) < 5 * np.sqrt(0.21 / x.size)


def test_wrong_scales_and_axes_are_named():
    for name in ("uint8", "bool_", "bf16", "f64"):
        with pytest.raises(DTypeError, match=f"cannot scale to {name}"):
            tn.quantize_amax(np.ones(3), name)
    with pytest.raises(AxisError, match="axis 2 of an array of 2 dimensions"):
        tn.quantize_amax(np.ones((3, 4)), "int8", 2)
    with pytest.raises(ShapeError, match=r"shape \(3,\); axis 1 of \(3, 4\) needs \(4,\)"):
        tn.dequantize(np.ones((3, 4), np.int8), np.ones(3), "int8", 1)
    with pytest.raises(ShapeError, match="needs axis="):
        tn.dequantize(np.ones((3, 4), np.int8), np.ones(3), "int8")
