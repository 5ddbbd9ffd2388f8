"""Philox against the published vectors; stochastic rounding: unbiased, reproducible, split-free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera.numerics as tn
from tessera.errors import ArgumentError
from tessera.numerics.round_bits import SOURCE_F32, SOURCE_F64, round_up

FLOATS = [t for t in tn.all_dtypes() if t.kind == "float"]
NARROW = [t for t in FLOATS if t.man < 23]

# Random123, kat_vectors: philox4x32 with 10 rounds.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter, key, expected):
    assert np.array_equal(tn.philox4x32(words(counter), words(key)), words(expected))


def test_philox_of_many_counters_is_each_alone(rng):
    key = words("a4093822 299f31d0")
    counters = rng.integers(0, 2**32, (5, 8000, 4), dtype=np.uint32)  # several passes
    got = tn.philox4x32(counters, key)
    assert got.shape == counters.shape
    for i, j in ((0, 0), (4, 7999), (2, 777)):
        assert np.array_equal(got[i, j], tn.philox4x32(counters[i, j], key))


@pytest.mark.row("NUM-20")
@given(
    offset=st.one_of(st.integers(0, 200), st.integers(2**34 - 9, 2**34 + 9)),
    n=st.integers(0, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_random_bits_depend_on_the_global_index_only(offset, n, seed):
    got = tn.random_bits(seed, n, offset)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    for i in range(n):
        block, word = divmod(offset + i, 4)
        counter = np.array([block & 0xFFFFFFFF, block >> 32, 0, 0], np.uint32)
        assert got[i] == tn.philox4x32(counter, key)[word]
    index = np.arange(n)
    for some in (index, index[::-1], index[-offset % 4:][:n // 4 * 4], index[1::2]):
        assert np.array_equal(tn.random_bits_at(key, some + offset), got[some])


def test_random_bits_across_passes():
    whole = tn.random_bits(5, 200_003)
    assert np.array_equal(whole[70_001:], tn.random_bits(5, 130_002, 70_001))


def test_uniform_is_the_top_24_bits():
    bits = tn.random_bits(9, 1000, 3)
    got = tn.uniform(9, 1000, 3)
    assert got.dtype == np.float32
    assert got.tolist() == [float(int(b) >> 8) / 2**24 for b in bits]
    many = tn.uniform(1, 1_000_000)
    assert 0 <= many.min() and many.max() < 1
    assert abs(many.mean() - 0.5) < 5 * np.sqrt(1 / 12 / many.size)
    counts = np.bincount((many * 64).astype(int), minlength=64)
    assert np.sum((counts - 15625.0) ** 2 / 15625.0) < 63 + 6 * np.sqrt(2 * 63)  # chi squared


def test_fold_in_separates_streams():
    keys = [tn.fold_in(tn.fold_in(7, step), op) for step in range(30) for op in range(30)]
    assert len({tuple(k.tolist()) for k in keys}) == 900
    assert keys[0].dtype == np.uint32 and keys[0].shape == (2,)
    assert not np.array_equal(tn.fold_in(7, 0), tn.random_bits(7, 2))  # its own counter domain
    assert np.array_equal(tn.fold_in(7, -1), tn.fold_in(7, 2**64 - 1))
    assert not np.array_equal(tn.fold_in(7, 1), tn.fold_in(7, 1 + 2**32))


def test_bad_keys_and_ranges_are_named():
    with pytest.raises(ArgumentError, match=r"shape \(2,\) or an int seed; got \[1, 2, 3\]"):
        tn.as_key([1, 2, 3])
    with pytest.raises(ArgumentError, match="n=-1 offset=0"):
        tn.random_bits(0, -1)
    with pytest.raises(ArgumentError, match="integers >= 0"):
        tn.random_bits_at(0, [3, -1])
    with pytest.raises(ArgumentError, match=r"shape \[..., 4\]; got \(3,\)"):
        tn.philox4x32([1, 2, 3], 0)


# -- stochastic rounding --


@pytest.mark.row("NUM-20")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_stochastic_rounding_is_unbiased(dtype, source, rng):
    n = 1_000_000 // 8
    for value, fraction in _cases(dtype, rng, source):
        low, high = value[0], value[1]
        x = source(low + fraction * (high - low))
        fraction = (float(x) - low) / (high - low)
        seed = int(rng.integers(2**63))
        for sign in (1, -1):
            codes = tn.encode(np.full(n, sign * x, source), dtype, rounding="stochastic", key=seed)
            got = sign * tn.decode(codes, dtype).astype(np.float64)
            assert set(np.unique(got)) <= {low, high}
            error = abs(np.mean(got == high) - fraction)
            assert error <= 5 * np.sqrt(fraction * (1 - fraction) / n) + 2.0**-32, (x, seed)


def _cases(dtype, rng, source):
    """Pairs of neighbours (normal, subnormal, at a power of two) and a fraction between."""
    at = [1 << dtype.man, 0, (2 << dtype.man) - 1, int(rng.integers(0, dtype.max_code))]
    pairs = [(dtype.value_of(c), dtype.value_of(c + 1)) for c in at]
    if source is np.float32 and dtype in (tn.bf16, tn.tf32):
        pairs.pop(1)  # between 0 and the smallest subnormal f32 has too few values of its own
        pairs.append((1.0, 1.0 + dtype.eps))
    return [(pair, float(rng.uniform(0.02, 0.98))) for pair in pairs]


@pytest.mark.row("NUM-20")
def test_a_million_draws_have_the_right_mean():
    x = np.float32(1.7)  # e4m3 neighbours 1.625 and 1.75
    codes = tn.encode(np.full(1_000_000, x), tn.fp8_e4m3, rounding="stochastic", key=11)
    p = (float(x) - 1.625) / 0.125
    sigma = 0.125 * np.sqrt(p * (1 - p) / 1e6)
    assert abs(tn.decode(codes, tn.fp8_e4m3).mean(dtype=np.float64) - float(x)) < 5 * sigma


@pytest.mark.row("NUM-20")
@pytest.mark.parametrize("dtype", [*NARROW, tn.int8, tn.int4], ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_draws_follow_the_stated_rule(dtype, source, rng):
    """Up iff bits < floor(2^32 fraction): the neighbours from toward_zero, the bits from Philox."""
    x = (rng.standard_normal(50_000) * min(dtype.max / 6, 100)).astype(np.float32)
    x[::2] *= np.exp2(-rng.uniform(0, 30, 25_000))  # far below the smallest value too
    x = np.clip(x, dtype.min, dtype.max).astype(source)
    down = tn.decode(tn.encode(x, dtype, rounding="toward_zero"), dtype).astype(np.float64)
    if dtype.kind == "float":
        magnitude = np.abs(down)
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - dtype.bias)
        step = np.where(magnitude < dtype.tiny, dtype.smallest, np.ldexp(1.0, exponent - dtype.man))
    else:
        step = 1.0
    fraction = (np.abs(x) - np.abs(down)) / step
    up = tn.random_bits(21, x.size, 1000) < np.floor(fraction * 2.0**32)
    expected = np.copysign(np.abs(down) + up * step, x)
    got = tn.encode(x, dtype, rounding="stochastic", key=21, offset=1000, saturate=True)
    assert np.array_equal(tn.decode(got, dtype), expected)


@pytest.mark.row("NUM-20")
@settings(deadline=None, max_examples=30)
@given(cut=st.integers(0, 70_000), name=st.sampled_from([t.name for t in NARROW] + ["int8"]))
def test_a_split_tensor_rounds_as_the_whole(cut, name):
    x = np.random.default_rng(3).standard_normal((100, 700)).astype(np.float32)
    options = {"rounding": "stochastic", "key": tn.fold_in(1, 2)}
    whole = tn.encode(x, name, **options)
    flat = x.reshape(-1)
    parts = [
        tn.encode(flat[:cut], name, **options),
        tn.encode(flat[cut:], name, offset=cut, **options),
    ]
    joined = np.concatenate([tn.to_codes(p) for p in parts])
    assert np.array_equal(joined, tn.to_codes(whole).reshape(-1))
    index = np.arange(70_000).reshape(100, 700)
    columns = slice(cut % 700, None)
    part = tn.encode(x[:, columns], name, index=index[:, columns], **options)
    assert np.array_equal(tn.to_codes(part), tn.to_codes(whole)[:, columns])


@pytest.mark.row("NUM-20")
def test_same_seed_same_bits_other_seed_other_bits(rng):
    x = rng.standard_normal(10_000).astype(np.float32)
    ntype = tn.fp8_e4m3 @ tn.stochastic_round
    a, b, c = (tn.to_codes(tn.encode_as(x, ntype, key=seed)) for seed in (4, 4, 5))
    assert np.array_equal(a, b)
    assert np.mean(a != c) > 0.2
    mirrored = tn.to_codes(tn.encode_as(-x, ntype, key=4))
    assert np.array_equal(mirrored, a ^ 0x80)  # sign-symmetric


def test_a_word_equal_to_the_fraction_stays_down():
    fraction = np.uint32([0, 5, 5, 5, 2**32 - 2])
    bits = np.uint32([0, 4, 5, 6, 2**32 - 2])
    got = round_up(np.zeros(5, np.uint32), fraction, SOURCE_F32, "stochastic", bits)
    assert got.tolist() == [0, 1, 0, 0, 0]
    fraction = fraction.astype(np.uint64) << np.uint64(32)
    got = round_up(np.zeros(5, np.uint64), fraction, SOURCE_F64, "stochastic", bits)
    assert got.tolist() == [0, 1, 0, 0, 0]


def test_tiny_values_round_up_as_rarely_as_they_are_small():
    n, fraction = 1_000_000, 2.0**-11
    for source in (np.float32, np.float64):
        x = np.full(n, tn.fp8_e4m3.smallest * fraction, source)
        up = np.mean(tn.to_codes(tn.encode(x, "fp8", rounding="stochastic", key=6)) == 1)
        assert abs(up - fraction) < 5 * np.sqrt(fraction / n)
        x = np.full(n, tn.fp8_e4m3.smallest * 2.0**-45, source)
        assert not tn.to_codes(tn.encode(x, "fp8", rounding="stochastic", key=6)).any()


def test_representable_values_never_move():
    values = tn.decode(np.arange(0x7F, dtype=np.uint8), tn.fp8_e4m3)
    for seed in range(50):
        codes = tn.encode(values, tn.fp8_e4m3, rounding="stochastic", key=seed)
        assert np.array_equal(tn.decode(codes, tn.fp8_e4m3), values)


def test_stochastic_integers_are_unbiased_and_saturate():
    n = 1_000_000
    got = tn.encode(np.full(n, -2.3), tn.int8, rounding="stochastic", key=8)
    assert set(np.unique(got)) == {-3, -2}
    assert abs(np.mean(got == -3) - 0.3) < 5 * np.sqrt(0.21 / n)
    assert tn.encode([126.5] * 64 + [127.5] * 64, "int8", rounding="stochastic", key=1).max() == 127


@pytest.mark.row("NUM-19")
def test_bf16_accumulation_loses_what_f32_keeps():
    totals = {}
    for accum in (tn.f32, tn.bf16):
        ntype = tn.bf16 @ tn.accum(accum)
        total = np.float32(0)
        for _ in range(4096):
            total = tn.decode(tn.encode(total + np.float32(1), ntype.accum), ntype.accum)
        totals[accum.name] = float(total)
    assert totals == {"f32": 4096.0, "bf16": 256.0}
