"""Packed storage: literal layouts, and pack/unpack as inverses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera.numerics as tn
from tessera.errors import DTypeError, ShapeError

PACKED = [t for t in tn.all_dtypes() if t.packed]


def elements(codes, dtype: tn.DType) -> np.ndarray:
    return np.asarray(codes, dtype.code_type).view(dtype.numpy)


@pytest.mark.row("NUM-13")
def test_all_256_bytes_of_int4_round_trip():
    data = np.arange(256, dtype=np.uint8)
    values = tn.unpack(data, tn.int4, 512)
    assert values.dtype == ml_dtypes.int4
    signed = [(nibble ^ 8) - 8 for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert values.astype(np.int8).tolist() == signed  # low nibble first
    assert np.array_equal(tn.pack(values, tn.int4), data)


@pytest.mark.row("NUM-01", "NUM-02")
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp4_e3m0"])
def test_fp4_takes_two_per_byte_low_nibble_first(name):
    dtype = tn.as_dtype(name)
    x = elements([1, 2, 3, 15, 9], dtype)
    assert tn.pack(x, dtype).tolist() == [0x21, 0xF3, 0x09]


@pytest.mark.row("NUM-03", "NUM-04")
@pytest.mark.parametrize("name", ["fp6_e3m2", "fp6_e2m3"])
def test_fp6_takes_four_in_three_bytes_little_endian(name):
    dtype = tn.as_dtype(name)
    codes = [0b100001, 0b010110, 0b111000, 0b001111, 0b101010]
    word = sum(code << (6 * i) for i, code in enumerate(codes[:4]))
    expected = [*word.to_bytes(3, "little"), 0b101010, 0, 0]
    assert tn.pack(elements(codes, dtype), dtype).tolist() == expected


@given(data=st.data(), dtype=st.sampled_from(PACKED), rows=st.integers(0, 3), n=st.integers(0, 19))
def test_pack_then_unpack_is_the_identity(data, dtype, rows, n):
    codes = st.integers(0, (1 << dtype.bits) - 1)
    flat = data.draw(st.lists(codes, min_size=rows * n, max_size=rows * n))
    x = elements(np.reshape(np.array(flat, np.uint8), (rows, n)), dtype)
    b = tn.pack(x, dtype)
    assert b.dtype == np.uint8 and b.shape == (rows, tn.row_bytes(n, dtype))
    assert np.array_equal(tn.to_codes(tn.unpack(b, dtype, n)), tn.to_codes(x))


@given(data=st.binary(max_size=60), dtype=st.sampled_from(PACKED))
def test_unpack_then_pack_is_the_identity(data, dtype):
    group = 1 if dtype.bits == 4 else 3
    b = np.frombuffer(data[: len(data) // group * group], np.uint8)
    n = b.size * 8 // dtype.bits
    assert np.array_equal(tn.pack(tn.unpack(b, dtype, n), dtype), b)


@pytest.mark.parametrize("dtype", tn.all_dtypes(), ids=str)
def test_rows_of_every_format_round_trip(dtype, rng):
    for n in (0, 1, 2, 3, 4, 5, 63, 64, 65):
        x = tn.encode(rng.integers(0, 2, (3, n)), dtype)
        b = tn.pack(x, dtype)
        assert b.shape == (3, tn.row_bytes(n, dtype))
        again = tn.unpack(b, dtype, n)
        assert again.dtype == dtype.numpy
        assert np.array_equal(tn.to_codes(again), tn.to_codes(x))
        assert np.array_equal(tn.pack(x[:, ::-1], dtype), tn.pack(x[:, ::-1].copy(), dtype))


def test_row_bytes_are_whole_groups():
    assert [tn.row_bytes(n, "fp4") for n in range(5)] == [0, 1, 1, 2, 2]
    assert [tn.row_bytes(n, "int4") for n in range(5)] == [0, 1, 1, 2, 2]
    assert [tn.row_bytes(n, "fp6") for n in range(9)] == [0, 3, 3, 3, 3, 6, 6, 6, 6]
    wide = ("fp8", "bf16", "tf32", "f64", "bool_")
    assert [tn.row_bytes(3, name) for name in wide] == [3, 6, 12, 24, 3]


def test_bits_above_the_format_are_ignored():
    codes = np.uint8([0x91, 0xF2, 0x53])
    assert tn.pack(codes, tn.fp4_e3m0).tolist() == [0x21, 0x03]
    assert np.array_equal(tn.decode(codes, tn.fp4_e3m0), [0.25, 0.5, 1.0])


def test_padding_is_zero_codes():
    for dtype in PACKED:
        ones = elements([(1 << dtype.bits) - 1], dtype)
        whole = int.from_bytes(tn.pack(ones, dtype).tobytes(), "little")
        assert whole == (1 << dtype.bits) - 1


def test_wrong_inputs_are_named():
    with pytest.raises(DTypeError, match="takes elements of int4; got int8"):
        tn.pack(np.zeros(4, np.int8), tn.int4)
    with pytest.raises(ShapeError, match="got a scalar"):
        tn.pack(elements(1, tn.int4), tn.int4)
    with pytest.raises(ShapeError, match=r"5 elements of fp6_e3m2 take 6 bytes per row; got .*4"):
        tn.unpack(np.zeros((2, 4), np.uint8), "fp6", 5)
    with pytest.raises(DTypeError, match="takes bytes"):
        tn.unpack(np.zeros(4, np.int8), "fp4", 8)
