"""Casts in kernels by the rule of the guide: integers give their nearest end, literals are rounded
to the type like any number. Oracles: Python's integers and ml_dtypes."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

import emulator
import tessera as ts
from kernels.build import build
from tessera import Tensor, bf16, f32
from tessera.numerics import decode, encode, find_dtype

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def casts(source: str, targets: tuple[str, ...]):
    """A kernel that casts x to each target by tile.cast, by a store of a number and of a tile."""
    outs = ", ".join(f"{n}{i}: Tensor['N', ts.as_type({t!r})]"
                     for i, t in enumerate(targets) for n in "cet")
    lanes = "".join(f"        c{i}[j] = tile.cast(x[j], {t!r})\n        e{i}[j] = x[j]\n"
                    for i, t in enumerate(targets))
    tiles = "".join(f"    t{i}[0:16] = tile.load(x[0:16])\n" for i in range(len(targets)))
    return build(f"""@kernel
def k(x: Tensor["N", ts.{source}], {outs}):
    j = tile.local_id()
    if j < N:
{lanes}{tiles}""")["k"]


def numbers(rng, name: str) -> np.ndarray:
    d = find_dtype(name)
    edges = (127, 128, 2**15, 2**31, 2**31 - 1, 2**63)
    some = [d.min, d.max, d.max - 1, 0, 1, 5, *(e for e in edges if e <= d.max)]
    word = rng.integers(0, 2**64, 16 - len(some), np.uint64, endpoint=False)
    return np.array([*some, *word.astype(d.numpy)], d.numpy)


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_give_their_nearest_end(source, rng):
    """In a cast, a store of an element and of a tile, eagerly, and in the emitted code."""
    x = numbers(rng, source)
    k = casts(source, INTEGERS)
    outs = [np.zeros(len(x), find_dtype(t).numpy) for t in INTEGERS for _ in range(3)]
    k[1, 32](x, *outs)
    for i, target in enumerate(INTEGERS):
        d = find_dtype(target)
        want = [min(max(v, int(d.min)), int(d.max)) for v in x.tolist()]
        for got in outs[3 * i:3 * i + 3]:
            assert got.tolist() == want, f"{source} to {target}"
        assert ts.cast(ts.tensor(x, source), target).tolist() == want
    emulator.compare(k, x, *map(np.zeros_like, outs), groups=1, lanes=32, lockstep=False)


@pytest.mark.parametrize("rounding", ["", '@rounding("toward_zero")', "@saturate"])
@pytest.mark.parametrize("source", ["f64", "int32", "int64", "uint32", "bf16", "f32"])
def test_stores_round_once_as_the_type_says(source, rounding, rng):
    """Numbers beside the middle of two of the narrow type, which one of f32 would lie on, and those
    beyond the range: stored as they are cast, by element and by tile, and as ts.cast rounds."""
    if find_dtype(source).kind == "float":
        middles = 1 + (2 * np.arange(4) + 1) * 2.0**-8
        beside = np.r_[middles * (1 + 2.0**-40), middles * (1 - 2.0**-40)]
        x = np.r_[beside, np.inf, -np.inf, 1e300, -1e300, 1 + 2**-24 + 2**-26, 7e4, -0.0, 3.0]
    else:
        x = np.r_[[2**30 + (2 * k + 1) * 2**22 + s for k in range(4) for s in (1, -1)],
                  [2**24 + 1, 2**24 + 3, 2**31 - 1, 2**31 - 65, 7, 0, 65519, 65521]]
    x = ts.cast(ts.tensor(x), source)
    targets = tuple(f"{t} {rounding}".strip() for t in ("bf16", "f16", "f32", "f64", "fp8_e5m2"))
    outs = [ts.zeros(16, t) for t in targets for _ in range(3)]
    k = casts(source, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        k[1, 32](x, *outs)
        emulator.compare(k, x, *outs, groups=1, lanes=32, lockstep=False)
    for i, t in enumerate(targets):
        want = ts.cast(x, t).tolist()
        for made, how in zip(outs[3 * i:3 * i + 3], ("cast", "element", "tile"), strict=True):
            assert str(made.tolist()) == str(want), f"{source} to {t} by {how}"


def test_the_ptx_clamps():
    k = casts("uint32", ("int32",))
    x = np.zeros(16, np.uint32)
    k[1, 32](x, *(np.zeros(16, np.int32) for _ in range(3)))
    ptx = k.inspect_ir("ptx", target="sm_90")
    assert ptx.count("min.u32") >= 3


def test_literals_are_numbers_of_the_type():
    k = build("""@kernel
def k(f: Tensor["N", f32], i: Tensor["M", i64]):
    f[0] = tile.cast(0.1, ts.bf16)
    f[1] = tile.cast(500.0, ts.fp8_e4m3)
    f[2] = tile.cast(500.0, "fp8_e4m3 @saturate")
    f[3] = tile.cast(0.1, "bf16 @rounding(toward_zero)")
    f[4:8] = tile.full((4,), 0.1, ts.bf16)
    f[8] = tile.cast(1e6, ts.f16)
    i[0] = tile.cast(300, ts.int8)
    i[1] = tile.cast(-1, ts.uint8)
    i[2] = tile.cast(2.7, ts.i32)
    i[3] = tile.cast(1e20, ts.i32)
    i[4] = tile.cast(float("nan"), ts.i32)
    i[5] = tile.cast(-(2**80), ts.i64)
""")["k"]
    f, i = np.zeros(9, np.float32), np.zeros(6, np.int64)
    k(f, i)
    tenth = float(np.float32(ml_dtypes.bfloat16(0.1)))
    below = (np.float32([0.1]).view(np.uint32) & 0xFFFF0000).view(np.float32).item()
    want = [tenth, np.nan, 448.0, below, *[tenth] * 4, np.inf]
    assert np.array_equal(f, np.float32(want), equal_nan=True)
    assert i.tolist() == [127, 0, 2, 2**31 - 1, 0, -(2**63)]
    emulator.compare(k, f, i, groups=1, lanes=32, lockstep=False)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name, saturate", [("fp8_e4m3", True), ("fp8_e4m3", False),
                                            ("fp8_e5m2", True), ("fp8_e5m2", False)])
def test_codes_as_bytes_in_both_orders(name, saturate, target, rng):
    """Of what a cast rounds and of what is loaded, beside a reduction of the same tile."""
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", ts.uint8], z: Tensor["N", "M", ts.uint8],
      w: Tensor["M", "N", ts.{name}], v: Tensor["N", "M", ts.uint8], a: Tensor["N", f32]):
    b = tile.load(x[0:64, 0:32])
    c = tile.cast(b, '{name}{" @saturate" if saturate else ""}')
    y[0:64, 0:32] = tile.bytes_of(c)
    z[0:32, 0:64] = tile.bytes_of(c).T
    v[0:32, 0:64] = tile.bytes_of(w[0:64, 0:32]).T
    a[0:32] = tile.col_max(tile.where(tile.abs(b) < 3e38, b, 0.0))
""")["k"]
    d, shape = find_dtype(name), (50, 23)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))).astype(np.float32)
    x[:4, 5] = np.nan, np.inf, -np.inf, -np.nan
    want = encode(x, d, saturate=saturate)
    w = rng.integers(0, 256, shape).astype(np.uint8).view(want.dtype)
    y, z, v = (np.zeros(s, np.uint8) for s in (shape, shape[::-1], shape[::-1]))
    k[1, 64](x, y, z, w, v, a := np.zeros(23, np.float32))
    np.testing.assert_array_equal(y, want.view(np.uint8))
    np.testing.assert_array_equal(z, want.view(np.uint8).T)
    known = decode(w, d)  # of NaN there are several codes
    np.testing.assert_array_equal(v, encode(known, d).view(np.uint8).T)
    np.testing.assert_array_equal(a, np.where(np.abs(x) < np.inf, x, 0).max(0))
    emulator.compare(k, x, *map(np.zeros_like, (y, z)), w, np.zeros_like(v), np.zeros_like(a),
                     groups=1, lanes=64, target=target)


def test_numbers_of_other_widths_have_no_byte_each():
    k = build("""@kernel
def k(x: Tensor["N", f32], y: Tensor["N", ts.uint8]):
    y[0:16] = tile.bytes_of(tile.load(x[0:16]))
""")["k"]
    with pytest.raises(ts.TesseraError, match="codes of tile<16 x f32>: those of floats of 8 bits"):
        k[1, 32](np.zeros(16, np.float32), np.zeros(16, np.uint8))


@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
def test_a_nan_of_8_bits_is_a_nan_of_16(stored, rng):
    """Whatever its sign and payload, which the code for 16 bits does without."""
    k = build(f"""@kernel
def k(x: Tensor["N", ts.{stored}], y: Tensor["N", ts.bf16]):
    y[0:256] = tile.cast(tile.load(x[0:256]), ts.bf16)""")["k"]
    d = find_dtype(stored)
    x, y = np.arange(256).astype(np.uint8).view(d.numpy), np.zeros(256, ml_dtypes.bfloat16)
    k[1, 32](x, y)
    assert np.array_equal(y.astype(np.float32), x.astype(np.float32), equal_nan=True)
    emulator.compare(k, x, np.zeros_like(y), groups=1, lanes=32, target="sm_90a")
    source = k.inspect_ir("target", target="sm_90a")
    assert ", True, True)" in next(line for line in source.splitlines() if "tiles.load" in line)


def test_a_narrow_accumulator_is_told(rng):
    @ts.kernel
    def narrow(a: Tensor["M", "K", bf16], c: Tensor["M", "M", f32], TO: str):
        acc = ts.tile.zeros((16, 16), TO)
        for k in range(0, K, 16):
            t = ts.tile.load(a[0:16, k:k+16])
            acc = ts.tile.dot(t, t.T, acc)
        c[0:16, 0:16] = acc

    x, c = ts.tensor(rng.standard_normal((16, 64)), bf16), np.zeros((16, 16), np.float32)
    with pytest.warns(RuntimeWarning, match="dot adds to a tile of bf16, to which each sum is "):
        narrow(x, c, "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow(x, c, "f32")


def test_a_literal_of_32_bits_beside_int32_asks_for_u32():
    @ts.kernel
    def hashed(x: Tensor["N", ts.int32]):
        x[0] = x[0] * 2654435761

    with pytest.raises(ts.TesseraError, match="2654435761 does not fit into int32") as error:
        hashed(np.zeros(4, np.int32))
    assert error.value.hint.endswith("ts.tile.cast(x, ts.u32)")


@pytest.mark.parametrize("source", ["int32", "f64"])
def test_updates_add_before_they_round(source):
    """257 is no bf16; 257 + 1 is."""
    k = build(f"""@kernel
def k(x: Tensor["N", ts.{source}], a: Tensor["N", bf16], b: Tensor["N", bf16],
      c: Tensor["N", bf16], d: Tensor["N", bf16], e: Tensor["N", bf16]):
    i, at, t = tile.local_id(), tile.arange(4), tile.load(x[0:4])
    a[0:4] += t
    tile.atomic_add(b[0:4], t)
    tile.scatter(c, at, t, mode="add")
    tile.atomic_add(d, at, t)
    if i < N:
        tile.atomic_add(e, i, x[i])
""")["k"]
    outs = [ts.ones(4, "bf16") for _ in range(5)]
    x = np.full(4, 257, find_dtype(source).numpy)
    k[1, 32](x, *outs)
    assert [y.tolist() for y in outs] == [[258.0] * 4] * 5
    emulator.compare(k, x, *(ts.ones(4, "bf16") for _ in outs), groups=1, lanes=32, lockstep=False)
