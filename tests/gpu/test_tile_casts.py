"""Casts on a GPU, bit for bit against tessera.numerics: every code of small types, many numbers of
large ones; NaN with its sign and payload."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from tessera.numerics import all_dtypes, decode, encode, find_dtype
from tessera.tile.ir.numpy_values import array_dtype, convert

require_gpu()
TYPES = tuple(d.name for d in all_dtypes())
NARROW = tuple(d.name for d in all_dtypes() if d.kind == "float" and d.name not in ("f32", "f64"))
LANES, TILE = 256, 1024


def source_numbers(rng, name: str, n: int) -> np.ndarray:
    """Every code, or n numbers: random bits, magnitudes around 1, and ties of narrower formats."""
    d = find_dtype(name)
    if d.kind == "bool":
        return np.array([True, False] * 512)
    if d.bits <= 16 and d.kind == "float":
        return decode(np.arange(1 << d.bits).astype(d.code_type).view(d.numpy), d)
    if d.bits <= 16:
        return np.arange(int(d.min), int(d.max) + 1).astype(array_dtype(d))
    if d.kind != "float":
        bits = rng.integers(0, 2**64, n, np.uint64, endpoint=False)
        shifted = (bits >> rng.integers(0, 63, n).astype(np.uint64)).view(np.int64)
        return np.where(rng.random(n) < 0.5, shifted, -shifted).astype(array_dtype(d))
    with np.errstate(over="ignore", invalid="ignore"):
        word = np.uint64 if d.bits == 64 else np.uint32
        wild = rng.integers(0, 2**d.bits, n // 2, word, endpoint=False).view(array_dtype(f64_or(d)))
        near = (rng.standard_normal(n // 4) * np.exp2(rng.integers(-30, 20, n // 4)))
        ties = rng.integers(-4096, 4096, n - n // 2 - n // 4) / 512 * np.exp2(
            rng.integers(-20, 4, n - n // 2 - n // 4))
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448, 464, 465, 57344, 61440, 65504,
                 65520, 2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17, 28, 30, 7.5, 5, 0.125, 2**31, 2**63]
        x = np.concatenate([wild, near, ties]).astype(wild.dtype)
        x[:len(edges)] = edges
        return decode(encode(x, d), d)


def f64_or(d):
    return d if d.bits == 64 else find_dtype("f32")


def padded(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.repeat(x[-1:], -x.size % TILE)])


def cast_kernel(source: str, targets: tuple[str, ...], modifier=None):
    """A kernel y_i[...] = cast(x) for all targets at once."""
    outs = ", ".join(f"y{i}: Tensor['n', ts.{t}]" for i, t in enumerate(targets))
    lines = "".join(f"    tile.store(y{i}[at:at + {TILE}], tile.cast(x, T{i}))\n"
                    for i in range(len(targets)))
    types = {f"T{i}": find_dtype(t) if modifier is None else find_dtype(t) @ modifier
             for i, t in enumerate(targets)}
    return build(f"@kernel\ndef k(x_: Tensor['n', ts.{source}], {outs}):\n"
                 f"    at = tile.group_id(0) * {TILE}\n    x = tile.load(x_[at:at + {TILE}])\n"
                 + lines, **types)["k"]


def tensor_of(x: np.ndarray, name: str):
    """x as an argument of that type; the halves of 16 bits with the payloads of their NaNs, which
    encoding would make one."""
    d = find_dtype(name)
    if name == "f16":
        return (x.view(np.uint32) >> 16 & 0x8000 | np.where(
            np.isnan(x), 0x7C00 | x.view(np.uint32) >> 13 & 0x3FF,
            np.abs(x).astype(np.float16).view(np.uint16))).astype(np.uint16).view(d.numpy)
    if name == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(d.numpy)
    return x if d.numpy == x.dtype and name != "tf32" else ts.tensor(x, name)


def outputs(targets: tuple[str, ...], n: int) -> list:
    made = []
    for t in targets:
        zeros = np.zeros(n, array_dtype(find_dtype(t)))
        made.append(tensor_of(zeros, t))
    return made


def assert_same(got: np.ndarray, want: np.ndarray, x: np.ndarray, what: str,
                any_nan: bool) -> None:
    """Equal bits. any_nan: a NaN is one whatever its bits."""
    got, want = np.asarray(got), np.asarray(want)
    if want.dtype.kind != "f":
        wrong = got != want
    else:
        word = f"u{want.itemsize}"
        wrong = got.view(word) != want.view(word)
        if any_nan:
            wrong &= ~(np.isnan(got) & np.isnan(want))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.size} differ, first "
                             f"{x[i]!r}: GPU {got[i]!r}, numerics {want[i]!r}")


def check(source: str, targets: tuple[str, ...], x: np.ndarray, modifier=None, **policy) -> None:
    from tile_gpu import on_gpu

    x = padded(x)
    given = tensor_of(x, source)
    ran = on_gpu(cast_kernel(source, targets, modifier), given, *outputs(targets, x.size),
                 groups=x.size // TILE, lanes=LANES)
    for i, t in enumerate(targets):
        with np.errstate(all="ignore"):
            want = convert(x, find_dtype(t), **policy)
        assert_same(ran.arrays[f"y{i}"], want, x, f"{source} to {t} {policy}", t in ("bf16", "f16"))


@pytest.mark.parametrize("source", ["f64", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2",
                                    "fp4_e2m1", "fp4_e3m0", "int64", "uint64", "int32", "uint32",
                                    "int8", "uint16", "int4", "bool_"])
def test_every_cast(source, rng):
    x = source_numbers(rng, source, 200_000)
    check(source, tuple(t for t in TYPES if t != source), x)


def test_many_f32(rng, note):
    """10^7 numbers to every narrow type."""
    x = source_numbers(rng, "f32", 10**7)
    start = time.perf_counter()
    check("f32", NARROW, x)
    note(seconds=time.perf_counter() - start)


@pytest.mark.parametrize("modifier, policy", [
    (ts.saturate, {"saturate": True}),
    (ts.rounding("toward_zero"), {"rounding": "toward_zero"})], ids=["saturate", "toward_zero"])
@pytest.mark.parametrize("source", ["f32", "f64", "int64"])
def test_other_roundings(source, modifier, policy, rng):
    x = source_numbers(rng, source, 300_000)
    check(source, NARROW, x, modifier, **policy)
