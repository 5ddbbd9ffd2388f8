"""Codecs against ml_dtypes, NumPy and two oracles of our own: a table search, and rint in f64."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
import tessera.numerics as tn
from tessera.errors import ArgumentError, DTypeError, PolicyError

# fp4_e3m0 has no library; this literal table is its definition (NUM-02).
E3M0 = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]

LIBRARY = {
    tn.bf16: ml_dtypes.bfloat16,
    tn.f16: np.float16,
    tn.fp8_e4m3: ml_dtypes.float8_e4m3fn,
    tn.fp8_e5m2: ml_dtypes.float8_e5m2,
    tn.fp6_e3m2: ml_dtypes.float6_e3m2fn,
    tn.fp6_e2m3: ml_dtypes.float6_e2m3fn,
    tn.fp4_e2m1: ml_dtypes.float4_e2m1fn,
}
FLOATS = [t for t in tn.all_dtypes() if t.kind == "float"]
INTEGERS = [t for t in tn.all_dtypes() if t.kind in ("int", "uint")]
SMALL = [*LIBRARY, tn.fp4_e3m0]

ROWS = {
    tn.fp4_e2m1: "NUM-01",
    tn.fp4_e3m0: "NUM-02",
    tn.fp6_e3m2: "NUM-03",
    tn.fp6_e2m3: "NUM-04",
    tn.fp8_e4m3: "NUM-05",
    tn.fp8_e5m2: "NUM-06",
    tn.f16: "NUM-08",
    tn.bf16: "NUM-09",
}


def each(dtypes):
    """One case per format, marked with the row of that format."""
    marks = {t: [pytest.mark.row(ROWS[t])] if t in ROWS else [] for t in dtypes}
    cases = [pytest.param(t, marks=marks[t], id=str(t)) for t in dtypes]
    return pytest.mark.parametrize("dtype", cases)


def random_patterns(rng, n: int) -> np.ndarray:
    return rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def library_cast(x: np.ndarray, dtype: tn.DType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(LIBRARY[dtype])


def generic(x, dtype, **options) -> np.ndarray:
    """encode without the compiled shortcuts, which asking for counts rules out."""
    return tn.encode(x, dtype, counts=tn.CastCounts(), **options)


def assert_same_bits(got: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal codes, except that any NaN equals any NaN."""
    got_codes, expected_codes = tn.to_codes(got), tn.to_codes(expected)
    differ = got_codes != expected_codes
    if differ.any() and expected.dtype != np.uint8:
        both_nan = np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))
        differ &= ~both_nan
    where = np.flatnonzero(differ)[:5]
    assert not where.size, (x[where], got_codes[where], expected_codes[where])


def values_of(dtype: tn.DType) -> np.ndarray:
    """All finite values >= 0 in code order, f64, from the library (or the literal table)."""
    if dtype is tn.fp4_e3m0:
        return np.array(E3M0)
    codes = np.arange(1 << (dtype.bits - 1), dtype=f"u{np.dtype(LIBRARY[dtype]).itemsize}")
    with np.errstate(invalid="ignore"):  # signaling NaN codes
        values = codes.view(LIBRARY[dtype]).astype(np.float64)
    return values[np.isfinite(values)]


def boundaries(dtype: tn.DType) -> np.ndarray:
    """Values, midpoints, the overflow threshold, and their f32 neighbours, both signs."""
    v = values_of(dtype)
    beyond = v[-1] + (v[-1] - v[-2]) * np.array([0.5, 1.0, 2.0])
    with np.errstate(over="ignore"):
        points = np.concatenate([v, (v[1:] + v[:-1]) / 2, beyond]).astype(np.float32)
    inf = np.float32(np.inf)
    around = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
    return np.concatenate([around, -around, [inf, -inf]]).astype(np.float32)


def table_oracle(x: np.ndarray, dtype: tn.DType, rounding: str) -> np.ndarray:
    """Codes of finite |x| up to the largest value, found in the table of values; exact in f64."""
    v = values_of(dtype)
    a = np.abs(x).astype(np.float64)
    low = np.searchsorted(v, a, side="right") - 1
    high = np.minimum(low + 1, len(v) - 1)
    middle = (v[low] + v[high]) / 2  # two more bits than the format: exact
    up = (a > middle) | ((a == middle) & (low % 2 == 1)) if rounding == "nearest_even" else a < 0
    code = np.where(up & (high > low), high, low).astype(np.uint32)
    return code | (np.signbit(x).astype(np.uint32) << dtype.sign_shift)


def rint_oracle(x: np.ndarray, dtype: tn.DType) -> np.ndarray:
    """RNE of finite f32 or f64 input to formats of up to 23 mantissa bits, by rint of x / ulp."""
    x = x.astype(np.float64)
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - dtype.bias)
    ulp = exponent - dtype.man
    rounded = np.ldexp(np.rint(np.ldexp(x, -ulp)), ulp)
    return np.where(np.abs(rounded) > dtype.max, np.copysign(np.inf, x), rounded)


# -- decode --


@pytest.mark.row("SYS-14")
@each(LIBRARY)
def test_every_code_decodes_as_the_library_does(dtype):
    codes = np.arange(1 << dtype.bits, dtype=dtype.code_type)
    got = tn.decode(codes, dtype)
    expected = codes.view(LIBRARY[dtype]).astype(np.float32)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(expected))
    assert np.array_equal(tn.decode(tn.from_codes(codes, dtype), dtype), got, equal_nan=True)


@pytest.mark.row("NUM-02")
def test_e3m0_decodes_to_its_literal_table():
    got = tn.decode(np.arange(16, dtype=np.uint8), tn.fp4_e3m0)
    assert got.tolist() == E3M0 + [-v for v in E3M0]
    assert np.signbit(got[8])


@each(FLOATS)
def test_range_properties_match_the_library(dtype):
    if dtype is tn.fp4_e3m0:
        expected = (16.0, 0.25, 0.25, 1.0)
    elif dtype is tn.tf32:
        expected = (float(np.uint32(0x7F7FE000).view(np.float32)), 2.0**-126, 2.0**-136, 2.0**-10)
    else:
        info = ml_dtypes.finfo(dtype.numpy)
        expected = (info.max, info.tiny, info.smallest_subnormal, info.eps)
    got = (dtype.max, dtype.tiny, dtype.smallest, dtype.eps)
    assert got == tuple(float(value) for value in expected)
    assert dtype.min == -dtype.max


def test_decode_keeps_wide_formats_and_widens_int4():
    assert tn.decode(np.array([1.5]), "f64").dtype == np.float64
    got = tn.decode(np.array([-8, 7], ml_dtypes.int4), "int4")
    assert got.dtype == np.int8 and got.tolist() == [-8, 7]
    assert tn.decode(np.array([3], np.uint16), "uint16").dtype == np.uint16


def test_a_scalar_is_decoded_to_an_array():
    for dtype in SMALL:
        got = tn.decode(tn.encode(np.float32(2.0), dtype), dtype)
        assert isinstance(got, np.ndarray) and got.shape == () and got == 2.0
    assert np.array(ts.tensor(2.0, "fp4_e3m0")).tolist() == 2.0


def test_decode_refuses_another_element_type():
    with pytest.raises(DTypeError, match="takes elements of float8_e4m3fn; got float32"):
        tn.decode(np.ones(3, np.float32), tn.fp8_e4m3)


# -- encode, to nearest --


@pytest.mark.row("SYS-14")
@each(LIBRARY)
def test_ten_million_random_patterns_encode_as_the_library_does(dtype, rng):
    for _ in range(4):
        x = random_patterns(rng, 2_500_000)
        assert_same_bits(tn.encode(x, dtype), library_cast(x, dtype), x)


@each(LIBRARY)
def test_boundaries_encode_as_the_library_does(dtype):
    x = boundaries(dtype)
    expected = library_cast(x, dtype)
    assert_same_bits(tn.encode(x, dtype), expected, x)
    assert_same_bits(generic(x, dtype), expected, x)


@each(SMALL)
def test_in_range_values_encode_as_the_table_says(dtype, rng):
    scale = np.exp2(rng.uniform(np.log2(dtype.smallest) - 3, np.log2(dtype.max), 200_000))
    x = np.minimum(scale, dtype.max).astype(np.float32) * rng.choice([-1, 1], scale.size)
    edges = boundaries(dtype)
    x = np.concatenate([x.astype(np.float32), edges[np.abs(edges) <= dtype.max]])
    for rounding in ("nearest_even", "toward_zero"):
        got = tn.to_codes(tn.encode(x, dtype, rounding=rounding))
        assert np.array_equal(got, table_oracle(x, dtype, rounding)), rounding


@pytest.mark.row("NUM-02")
def test_e3m0_ties_go_to_the_even_code():
    ties = [0.125, 0.375, 0.75, 1.5, 3.0, 6.0, 12.0]  # between codes 0|1, 1|2, 2|3, ...
    assert tn.encode(ties, "fp4_e3m0").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert tn.encode([-t for t in ties], "fp4_e3m0").tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert tn.encode([17.0, 1e9, -np.inf], "fp4_e3m0").tolist() == [7, 7, 15]


@each(SMALL)
def test_f64_is_rounded_once(dtype):
    v = values_of(dtype)
    middles = (v[1:] + v[:-1]) / 2
    x = np.concatenate([middles * (1 + s * 2.0**-50) for s in (-1, 0, 1)])
    got = tn.to_codes(tn.encode(np.concatenate([x, -x]), dtype))
    swapped = tn.encode(np.concatenate([x, -x]).astype(">f8"), dtype)
    assert np.array_equal(tn.to_codes(swapped), got)
    assert np.array_equal(got, table_oracle(np.concatenate([x, -x]), dtype, "nearest_even"))
    through_f32 = tn.to_codes(tn.encode(x.astype(np.float32), dtype))
    assert not np.array_equal(through_f32, got[: x.size])  # the trap is real


def test_f64_to_f32_has_the_bits_of_the_compiled_cast(rng):
    x = rng.integers(0, 2**64, 1_000_000, dtype=np.uint64).view(np.float64)
    near = rng.standard_normal(1_000_000) * np.exp2(rng.integers(-155, 130, 1_000_000))
    for values in (x, near):
        with np.errstate(all="ignore"):
            expected = values.astype(np.float32)
        assert_same_bits(generic(values, "f32"), expected, values)
        assert_same_bits(tn.encode(values, "f32"), expected, values)


def test_f32_to_bf16_shortcut_has_the_generic_bits(rng):
    x = random_patterns(rng, 3_000_000)
    assert np.array_equal(*(tn.to_codes(e(x, tn.bf16)) for e in (generic, tn.encode)))
    saturated = [tn.to_codes(e(x, tn.bf16, saturate=True)) for e in (generic, tn.encode)]
    assert np.array_equal(*saturated)


@pytest.mark.parametrize("source", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("target", [tn.f32, tn.f64], ids=str)
def test_shortcut_of_integers_has_the_generic_bits(source, target, rng):
    """Random integers, and those around the ties of each power of two."""
    kind = np.iinfo(source)
    near = [2**k + half + d for k in range(kind.bits) for half in (0, 2**k >> 24, 2**k >> 53)
            for d in (-1, 0, 1)]
    whole = [v for n in near for v in (n, -n) if kind.min <= v <= kind.max]
    x = np.array([*whole, kind.min, kind.max], source)
    x = np.concatenate([x, rng.integers(kind.min, kind.max, 100_000, source, endpoint=True)])
    for saturate in (False, True):
        quick = tn.encode(x, target, saturate=saturate)
        assert_same_bits(quick, generic(x, target, saturate=saturate), x)


def test_tf32_keeps_ten_mantissa_bits(rng):
    x = random_patterns(rng, 1_000_000)
    x = x[np.isfinite(x)]
    got = tn.encode(x, tn.tf32)
    assert got.dtype == np.float32
    assert not np.any(got.view(np.uint32) & 0x1FFF)
    assert np.array_equal(got, rint_oracle(x, tn.tf32).astype(np.float32))
    y = rng.standard_normal(100_000)  # f64, rounded once
    assert np.array_equal(tn.encode(y, tn.tf32), rint_oracle(y, tn.tf32))
    assert np.array_equal(tn.decode(got, tn.tf32), got)


@each(FLOATS)
def test_encode_of_own_values_is_the_identity(dtype, rng):
    if dtype.bits > 16:
        codes = rng.integers(0, 2**63, 10_000, dtype=np.uint64) >> (64 - dtype.bits)
        codes = (codes >> dtype.pad) << dtype.pad
    else:
        codes = np.arange(1 << dtype.bits)
    elements = tn.from_codes(codes.astype(dtype.code_type), dtype)
    again = tn.encode(tn.decode(elements, dtype), dtype)
    assert np.array_equal(
        tn.decode(again, dtype), tn.decode(elements, dtype), equal_nan=True
    )
    assert again.dtype == dtype.numpy


def exact_nearest(value: int, dtype: tn.DType) -> float:
    """The finite value nearest to an integer, ties to the even code, with exact fractions."""
    v = values_of(dtype)
    at = int(np.searchsorted(v, float(abs(value))))
    nearby = range(max(at - 2, 0), min(at + 3, len(v)))
    distance = {i: abs(Fraction(float(v[i])) - abs(value)) for i in nearby}
    best = min(nearby, key=lambda i: (distance[i], i % 2))
    return float(v[best]) * (-1 if value < 0 else 1)


def test_integers_are_rounded_once(rng):
    tie = [(1 << k) + (odd << (k - 7)) + (1 << (k - 8)) for k in range(54, 63) for odd in (0, 1)]
    traps = [t + d for t in tie for d in (-1, 0, 1)]
    x = np.array([*traps, *(-t for t in traps), *rng.integers(-(2**63), 2**63, 200)], np.int64)
    got = tn.encode(x, tn.bf16).astype(np.float64)
    assert got.tolist() == [exact_nearest(int(v), tn.bf16) for v in x]
    assert np.array_equal(tn.encode(x, "f32"), x.astype(np.float32))  # one conversion in hardware
    assert np.array_equal(tn.encode(x, "f64"), x.astype(np.float64))
    u = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    assert np.array_equal(tn.encode(u, "f64"), u.astype(np.float64))
    assert np.array_equal(tn.encode(u, "f32"), u.astype(np.float32))


def test_long_integers_to_f64_toward_zero_and_stochastic():
    x = np.array([2**53 + 3, -(2**53) - 3, 2**63 - 1, -(2**63), 5], np.int64)
    got = tn.encode(x, "f64", rounding="toward_zero")
    assert [int(v) for v in got] == [2**53 + 2, -(2**53) - 2, 2**63 - 1024, -(2**63), 5]
    exact = np.full(100_000, 2**52 + 7, np.int64)
    assert set(tn.encode(exact, "f64", rounding="stochastic", key=1)) == {2.0**52 + 7}
    many = np.full(100_000, 2**54 + 1, np.int64)  # a quarter of the way to 2^54 + 4
    up = np.mean(tn.encode(many, "f64", rounding="stochastic", key=3) > 2.0**54)
    assert abs(up - 0.25) < 5 * np.sqrt(0.25 * 0.75 / many.size)


@each(SMALL)
def test_every_source_type_gives_the_same_codes(dtype):
    v = values_of(tn.fp8_e4m3)
    v = np.concatenate([v, -v])
    expected = tn.to_codes(tn.encode(v.astype(np.float32), dtype))
    for source in (np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ">f4"):
        assert np.array_equal(tn.to_codes(tn.encode(v.astype(source), dtype)), expected), source
    whole = np.arange(-100, 100)
    expected = tn.to_codes(tn.encode(whole.astype(np.float64), dtype))
    for source in (np.int8, np.int16, np.int32, np.int64):
        assert np.array_equal(tn.to_codes(tn.encode(whole.astype(source), dtype)), expected)
    assert tn.decode(tn.encode([True, False], dtype), dtype).tolist() == [1.0, 0.0]


def test_shapes_are_kept(rng):
    x = rng.standard_normal((3, 5, 2)).astype(np.float32)
    assert np.array_equal(tn.encode(x.T, "fp8"), tn.encode(x, "fp8").T)
    assert tn.encode(x[::2, 1:4], "f16").shape == (2, 3, 2)
    assert tn.encode(np.empty((0, 4)), "fp4").shape == (0, 4)
    assert tn.encode(1.5, "fp8").shape == ()


# -- range, rounding toward zero, saturation --


@pytest.mark.row("NUM-23")
@pytest.mark.parametrize(
    ("dtype", "plain"),
    [(tn.fp8_e4m3, np.nan), (tn.fp8_e5m2, np.inf), (tn.f16, np.inf), (tn.bf16, np.inf),
     (tn.tf32, np.inf), (tn.f32, np.inf), (tn.fp6_e3m2, 28), (tn.fp6_e2m3, 7.5), (tn.fp4_e2m1, 6),
     (tn.fp4_e3m0, 16)],
    ids=str,
)
def test_beyond_the_range(dtype, plain):
    for x in (np.array([1e300, -1e300]), np.array([np.inf, -np.inf])):
        got = tn.decode(tn.encode(x, dtype), dtype)
        assert np.array_equal(got, np.array([plain, -plain], np.float32), equal_nan=True)
        got = tn.decode(tn.encode(x, dtype, saturate=True), dtype)
        assert got.tolist() == [dtype.max, dtype.min]
    got = tn.encode(np.float32([np.inf, -np.inf]), dtype, saturate=True)
    assert tn.decode(got, dtype).tolist() == [dtype.max, dtype.min]
    finite = tn.encode([1e300, -1e300], dtype, rounding="toward_zero")
    assert tn.decode(finite, dtype).tolist() == [dtype.max, dtype.min]  # IEEE 754 section 7.4
    infinite = tn.decode(tn.encode([np.inf], dtype, rounding="toward_zero"), dtype)
    assert np.array_equal(infinite, [plain], equal_nan=True)


@pytest.mark.row("NUM-23")
def test_saturate_clamps_1e9():
    t = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
    for name, largest in t.items():
        ntype = tn.as_type(name) @ tn.saturate
        codes = tn.encode_as(np.float32([1e9, -1e9]), ntype)
        assert tn.decode(codes, name).tolist() == [largest, -largest]


@each(FLOATS)
def test_nan_stays_nan_or_becomes_zero(dtype):
    for saturate in (False, True):
        got = tn.decode(tn.encode([np.nan, -np.nan], dtype, saturate=saturate), dtype)
        assert np.isnan(got).all() if dtype.nan_code is not None else not got.any()


@each(FLOATS)
def test_toward_zero_never_grows(dtype, rng):
    x = random_patterns(rng, 200_000)
    x = x[np.isfinite(x)]
    got = tn.decode(tn.encode(x, dtype, rounding="toward_zero"), dtype).astype(np.float64)
    nearest = tn.decode(tn.encode(x, dtype, saturate=True), dtype).astype(np.float64)
    assert np.all(np.abs(got) <= np.abs(x))
    assert np.all(np.abs(got) <= np.abs(nearest))


def test_generic_formats_toward_zero_f64_to_f32(rng):
    x = rng.standard_normal(100_000)
    got = tn.encode(x, "f32", rounding="toward_zero").astype(np.float64)
    above = np.nextafter(np.abs(got).astype(np.float32), np.float32(np.inf))
    assert np.all(np.abs(got) <= np.abs(x))
    assert np.all(above.astype(np.float64) > np.abs(x))


# -- counters --


def test_counts_of_a_known_input():
    counts = tn.CastCounts()
    x = np.float32([100, -29, 28, 29.9, 1e-4, -0.03, 0, -0.0, 0.1, 0.2, np.nan, np.inf, -np.inf])
    tn.encode(x, tn.fp6_e3m2, counts=counts)  # max 28, next 32; smallest 0.0625, normal 0.25
    # 29 and 29.9 round to 28: in range. 100 is beyond. 0.1 and 0.2 become subnormals.
    assert counts == tn.CastCounts(overflow=1, underflow=2, nan=1, inf=2, subnormal=2)
    tn.encode(np.float32([1e9]), tn.fp6_e3m2, saturate=True, counts=counts)
    assert counts.overflow == 2


@each(SMALL)
def test_counts_match_what_happened(dtype, rng):
    x = np.concatenate([random_patterns(rng, 300_000), boundaries(dtype)])
    counts = tn.CastCounts()
    y = tn.decode(tn.encode(x, dtype, counts=counts), dtype)
    # max + ulp / 2, where a tie is out iff max is odd; the step up from a power of two is itself
    limit = 24.0 if dtype is tn.fp4_e3m0 else values_of(dtype)[-2:] @ [-0.5, 1.5]
    finite = np.isfinite(x)
    out = np.abs(x) >= limit if dtype.max_code % 2 else np.abs(x) > limit
    small = (np.abs(y) > 0) & (np.abs(y) < dtype.tiny)
    assert counts == tn.CastCounts(
        overflow=np.count_nonzero(out & finite),
        underflow=np.count_nonzero((y == 0) & (x != 0) & ~np.isnan(x)),
        nan=np.count_nonzero(np.isnan(x)),
        inf=np.count_nonzero(np.isinf(x)),
        subnormal=np.count_nonzero(small),
    )


def test_counts_of_exact_casts_and_sums():
    counts = tn.CastCounts()
    tn.encode(np.float32([1, np.nan, np.inf, 1e-40, 0]), "f32", counts=counts)
    assert counts == tn.CastCounts(nan=1, inf=1, subnormal=1)
    assert counts + tn.CastCounts(overflow=5, nan=1) == tn.CastCounts(5, 0, 2, 1, 1)
    assert (counts + counts).total == 6


# -- integers and bool --


@each(INTEGERS)
def test_floats_to_integers_truncate_and_saturate(dtype):
    x = np.array([0, 0.99, -0.99, 1.5, -1.5, 2.5, 6.999, np.nan, 1e30, -1e30, np.inf, -np.inf])
    low, high = dtype.min, dtype.max
    negative = -1 if dtype.kind == "int" else 0
    expected = [0, 0, 0, 1, negative, 2, 6, 0, high, low, high, low]
    counts = tn.CastCounts()
    got = tn.encode(x, dtype, counts=counts)
    assert got.dtype == dtype.numpy
    assert [int(v) for v in got] == expected
    assert [int(v) for v in tn.encode(x.astype(np.float32), dtype)] == expected
    overflow = 2 + (dtype.kind == "uint")  # -1.5 truncates to -1, which no unsigned type has
    assert counts == tn.CastCounts(overflow=overflow, underflow=2, nan=1, inf=2)


def test_integer_edges_are_exact():
    edge = float(2**63)
    assert tn.encode([edge, -edge, np.nextafter(edge, 0)], "int64").tolist() == [
        2**63 - 1, -(2**63), 2**63 - 1024]
    counts = tn.CastCounts()
    got = tn.encode(np.int64([200, -200, 7, -8, 8]), tn.int4, counts=counts)
    assert got.astype(np.int8).tolist() == [7, -8, 7, -8, 7]
    assert counts == tn.CastCounts(overflow=3)
    assert tn.encode(np.uint64([2**64 - 1]), "int64").tolist() == [2**63 - 1]
    assert tn.encode(np.int64([-1, 2**40]), "uint32").tolist() == [0, 2**32 - 1]
    assert tn.encode(np.array([3, -8], ml_dtypes.int4), "int32").tolist() == [3, -8]


def test_bool_is_nonzero():
    x = [0.0, -0.0, 0.1, np.nan, np.inf]
    assert tn.encode(x, tn.bool_).tolist() == [False, False, True, True, True]
    assert tn.encode(np.array([0, -1], ml_dtypes.int4), "bool").tolist() == [False, True]


# -- errors --


def test_errors_say_what_to_do():
    with pytest.raises(ArgumentError, match="needs a key") as info:
        tn.encode([1.0], "fp8", rounding="stochastic")
    assert "key=seed" in info.value.hint
    with pytest.raises(PolicyError, match="unknown rounding 'up'"):
        tn.encode([1.0], "fp8", rounding="up")
    with pytest.raises(DTypeError, match="complex128 has no Tessera dtype"):
        tn.encode([1j], "fp8")
    with pytest.raises(ArgumentError, match=r"index has shape \(3,\) but x has shape \(2,\)"):
        tn.encode([1.0, 2.0], "fp8", rounding="stochastic", key=0, index=[0, 1, 2])
