"""Conversions on a GPU, bit for bit against tessera.numerics, and approximations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ptx_kernels as kernels
from gpu_harness import Resident, needs_hopper, poison, require_gpu
from tessera.numerics import decode, encode, find_dtype

require_gpu()


# --- conversions -------------------------------------------------------------------------------


def float_bits(rng, n: int = 10**6) -> np.ndarray:
    """Random f32 bit patterns, and numbers around the formats' thresholds."""
    wild = rng.integers(0, 2**32, n // 2, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(n // 2) * np.exp2(rng.integers(-30, 20, n // 2))).astype(np.float32)
    edges = np.float32([0.0, -0.0, np.inf, -np.inf, 448, 464, 465, 57344, 61440, 65504, 65520,
                        2**-9, 2**-10, 2**-16, 2**-17, 1.5 * 2**-10])
    near[:edges.size] = edges
    return np.concatenate([wild, near])


def convert(record: str, x: np.ndarray, packed_by: int = 1) -> np.ndarray:
    source = Resident(x)
    out = poison(x.size // packed_by, dtype=np.int32)
    kernels.converter(record, x.size, packed_by).build().kernel.launch(
        (264,), (source.pointer, out.pointer))
    return out.numpy().view(np.uint32)


def assert_same_bits(got: np.ndarray, want: np.ndarray, x: np.ndarray) -> None:
    """Equal codes; NaN where NaN (the hardware drops its sign: see ptx/convert.py)."""
    nan = np.isnan(want.astype(np.float32))
    codes = want.view(np.uint8 if want.itemsize == 1 else np.uint16)
    wrong = np.flatnonzero((got != codes) & ~nan)
    assert not wrong.size, f"{wrong.size} differ, first x={x[wrong[0]]!r}: got " \
        f"{got[wrong[0]]:#x}, expected {codes[wrong[0]]:#x}"
    back = got.astype(codes.dtype).view(want.dtype).astype(np.float32)
    assert np.isnan(back[nan]).all()


@pytest.mark.parametrize("rounding, how", [("nearest_even", "rn"), ("toward_zero", "rz")])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_f32_to_halves(name, rounding, how, rng):
    x = float_bits(rng)
    want = encode(x, find_dtype(name), rounding=rounding)
    assert_same_bits(convert(f"to_{name}_{how}", x) & 0xFFFF, want, x)
    pairs = convert(f"pack_{name}_{how}", x, 2)
    assert_same_bits(pairs.view(np.uint16), want, x)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_f32_to_fp8(name, rng):
    x = float_bits(rng)
    pairs = convert(f"pack_{name}", x, 2)
    got = np.stack([pairs & 0xFF, pairs >> 8 & 0xFF], 1).reshape(-1)
    assert_same_bits(got, encode(x, find_dtype(f"fp8_{name}"), saturate=True), x)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_fp8_code(name):
    codes = np.arange(256, dtype=np.uint32)
    got = convert(f"{name}_to_f16x2", (codes | codes[::-1] << 8).astype(np.int32))
    values = np.stack([got & 0xFFFF, got >> 16], 1).astype(np.uint16).view(np.float16)
    dtype = find_dtype(f"fp8_{name}")
    for column, order in ((0, codes), (1, codes[::-1])):
        want = decode(order.astype(np.uint8).view(dtype.numpy), dtype)
        np.testing.assert_array_equal(values[:, column].astype(np.float32), want)


def test_every_half_code():
    codes = np.arange(2**16, dtype=np.uint32)
    both = (codes | codes[::-1] << 16).view(np.int32)
    for name, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        for half, order in (("low", codes), ("high", codes[::-1])):
            got = convert(f"{name}_{half}", both).view(np.float32)
            np.testing.assert_array_equal(got, order.astype(np.uint16).view(dtype)
                                          .astype(np.float32))


@needs_hopper
def test_f32_to_tf32(rng):
    x = float_bits(rng)
    want = np.asarray(encode(x, find_dtype("tf32")), np.float32)
    got = convert("to_tf32_rn", x).view(np.float32)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[finite], want.view(np.uint32)[finite])
    assert np.isnan(got[~finite]).all()


@pytest.mark.parametrize("record, low, high, how", [
    ("f32_to_s32_rni", -2**31, 2**31 - 1, np.rint), ("f32_to_s32_rzi", -2**31, 2**31 - 1, np.trunc),
    ("f32_to_s8_sat_rni", -128, 127, np.rint), ("f32_to_u8_sat_rni", 0, 255, np.rint)])
def test_f32_to_ints(record, low, high, how, rng):
    x = float_bits(rng)
    with np.errstate(invalid="ignore"):
        whole = how(np.nan_to_num(x.astype(np.float64), nan=0.0))
    want = np.clip(whole, low, high).astype(np.int64).astype(np.int32)
    np.testing.assert_array_equal(convert(record, x).view(np.int32), want)


@pytest.mark.parametrize("record, function, low, high, limit", [
    ("ex2_approx_full", np.exp2, -126, 127, 2**-22), ("rcp_approx_full", lambda x: 1 / x, 1e-3, 1e3,
                                                      2**-23),
    ("rsqrt_approx_full", lambda x: x**-0.5, 1e-3, 1e3, 2**-22.4),
    ("tanh_approx", np.tanh, 0.01, 8, 2**-10.98), ("sqrt_approx_full", np.sqrt, 1e-3, 1e3, 2**-23)])
def test_approximations(record, function, low, high, limit, rng, note):
    x = rng.uniform(low, high, 10**6).astype(np.float32)
    got = convert(record, x).view(np.float32).astype(np.float64)
    error = np.max(np.abs(got / function(x.astype(np.float64)) - 1))
    note(log2_error=float(np.log2(error)))
    assert error < 1.01 * limit
