"""Packed codes placed into wider formats: the bit tricks, run on Python ints for every code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tessera.errors import ArgumentError
from tessera.numerics import decode, find_dtype, int4, pack, unpack
from tessera.tile.cuda import ptx  # noqa: F401  registers the instructions
from tessera.tile.cuda.intrinsics import packed_codes


class Ints:
    """The Builder of numba_gate on arrays of 32-bit ints."""

    def i32(self, value):
        assert -2**31 <= value < 2**32
        return np.uint32(value)

    def and_(self, x, y):
        return x & y

    def or_(self, x, y):
        return x | y

    def shl(self, x, n):
        return (x.astype(np.uint64) << np.uint64(n)).astype(np.uint32)

    def lshr(self, x, n):
        return x >> n

    def call(self, instruction, x, y, selector):
        assert instruction.name == "prmt"
        both = y.astype(np.uint64) << np.uint64(32) | x
        out = np.zeros_like(x)
        for i in range(4):
            at = np.asarray(selector >> 4 * i & 7, np.uint64)
            byte = both >> np.uint64(8) * at & np.uint64(0xFF)
            out |= byte.astype(np.uint32) << np.uint32(8 * i)
        return out


def words(source: str, rng) -> tuple[np.ndarray, np.ndarray]:
    """Random packed words, and the numbers of their codes in order [words, codes]."""
    n, dtype = packed_codes.codes_per_word(source), find_dtype(source)
    raw = rng.integers(0, 256, (4096, n * dtype.bits // 8), dtype=np.uint8)
    codes = unpack(raw, dtype, n) if dtype.packed else raw.view(dtype.numpy)
    full = np.zeros((4096, 4), np.uint8)
    full[:, :raw.shape[1]] = raw
    if dtype.bits == 6:  # what lies above the 24 bits is another word's
        full[:, 3] = rng.integers(0, 256, 4096)
    return full.view(np.uint32)[:, 0], decode(codes, dtype)


CASES = [(s, t) for t, wide in packed_codes.TARGETS.items()
         for s, one in packed_codes.SOURCES.items()
         if one.bits < wide.bits]


@pytest.mark.parametrize("source, target", CASES)
def test_every_code_is_placed_exactly(source, target, rng):
    given, want = words(source, rng)
    operation = packed_codes.place(source, target)
    got = np.stack(operation.rule(None).body(Ints(), given), 1)
    wide = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "f16": np.float16,
            "bf16": ml_dtypes.bfloat16}[target]
    with np.errstate(invalid="ignore"):  # random codes: signalling NaN too
        numbers = got.view(wide).astype(np.float64) * packed_codes.factor(source, target)
    keep = np.isfinite(want) | ((source, target) == ("fp8_e5m2", "f16"))
    np.testing.assert_array_equal(numbers[keep], want.astype(np.float64)[keep])
    assert np.array_equal(np.signbit(numbers), np.signbit(want))
    assert got.shape[1] == operation.rule(None).results[0].count


def test_int4(rng):
    values = rng.integers(-8, 8, (512, 8)).astype(np.int8)
    given = pack(values.astype(int4.numpy), int4).view(np.uint32)[:, 0]
    got = np.stack(packed_codes.int4().rule(None).body(Ints(), given), 1).view(np.int8)
    np.testing.assert_array_equal(got, values * 16)


def test_a_format_does_not_fit_into_its_own_width():
    with pytest.raises(ArgumentError, match="source='fp8_e5m2' is not one of"):
        packed_codes.place("fp8_e5m2", "fp8_e4m3")


@pytest.mark.parametrize("source, target, most", [("fp4_e2m1", "fp8_e4m3", 16),
                                                  ("fp6_e2m3", "fp8_e4m3", 16)])
def test_it_takes_few_instructions(source, target, most):
    pytest.importorskip("numba.cuda.typing", reason="numba-cuda is not installed")
    from tessera.runtime.target import parse_target
    from tessera.tile.cuda.numba_gate import compile_source

    registers = packed_codes.place(source, target).rule(None).results[0].count
    text = (f"from tessera.tile.cuda import use\n"
            f"from tessera.tile.cuda.intrinsics import fragments, packed_codes\n"
            f"from tessera.tile.cuda.ptx import memory\n"
            f"place, store = use(packed_codes.place({source!r}, {target!r})), "
            f"use(memory.st('global', 'b32'))\n"
            f"first, last = use(fragments.pick(0)), use(fragments.pick({registers - 1}))\n"
            f"def k(p, x):\n    d = place(x)\n    store(p, first(d))\n    store(p + 4, last(d))\n")
    ptx_text = compile_source(text, "<k>", "k", ("i64", "i32"), parse_target("90"), threads=32).text
    bits = [line for line in ptx_text.splitlines()
            if line.split()[:1] and line.split()[0].split(".")[0] in
            ("and", "or", "shl", "shr", "prmt", "xor", "lop3")]
    assert len(bits) <= most, ptx_text
