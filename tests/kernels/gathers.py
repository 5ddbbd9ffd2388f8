"""Kernels with gather and scatter, for the tests with and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera.numerics import find_dtype

TYPES = ["f64", "f32", "bf16", "f16", "fp8_e4m3", "fp6_e3m2", "fp4_e2m1", "int64", "int32", "int16",
         "int8", "int4", "uint8", "bool_"]


@dataclass(frozen=True)
class Case:
    source: str
    args: Callable[[Any], tuple]
    lanes: int = 32


def values(rng: Any, shape: Any, dtype: str, below: int = 7) -> Any:
    """Small whole numbers, which every type holds."""
    d = find_dtype(dtype)
    x = rng.integers(0, 2 if d.kind == "bool" else below, shape)
    if d.kind == "float" and dtype not in ("f64", "f32"):
        return ts.tensor(x.astype(np.float32), dtype)
    return ts.tensor(x.astype(np.int8), dtype) if d.packed else x.astype(d.numpy)


def rows_of(t: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """t[ids], and 0 where there is no such row."""
    out = np.zeros((len(ids), t.shape[1]), t.dtype)
    inside = (ids >= 0) & (ids < len(t))
    out[inside] = t[ids[inside]]
    return out


def _ids(rng: Any, n: int, below: int) -> np.ndarray:
    return rng.integers(-2, below + 2, n).astype(np.int32)


def _some(rng: Any, n: int, below: int) -> np.ndarray:
    """Distinct positions, some of them outside."""
    return (rng.permutation(below + 4)[:n] - 2).astype(np.int32)


CASES: dict[str, Case] = {}

for _dtype in TYPES:
    for _D in (16, 13):
        CASES[f"rows_{_dtype}_{_D}"] = Case(f"""@kernel
def k(t: Tensor["V", "D", ts.{_dtype}], ids: Tensor["n", i32], y: Tensor["W", "D", ts.{_dtype}]):
    for i in range(0, n, 8):
        at = tile.load(ids[i:i+8])
        rows = tile.gather(t[:, 2:18], at)
        tile.scatter(y[:, 2:18], at, rows)
""", lambda rng, d=_dtype, D=_D: (values(rng, (20, D), d), _some(rng, 19, 20),
                                  values(rng, (17, D), d)))

for _shape in ((5,), (8, 4), (33, 3)):
    CASES[f"elements_{'x'.join(map(str, _shape))}"] = Case(f"""@kernel
def k(x: Tensor["n", f32], at: Tensor[{', '.join(map(str, _shape))}, i64],
      y: Tensor[{', '.join(map(str, _shape))}, f32]):
    y[...] = tile.gather(x, tile.load(at[...]), fill=2.5) * 2.0
""", lambda rng, s=_shape: (values(rng, 20, "f32"), rng.integers(-5, 25, s),
                            np.empty(s, np.float32)), 64)

CASES["rows_wide"] = Case("""@kernel
def k(t: Tensor["V", "D", bf16], ids: Tensor["n", i64], y: Tensor["n", "D", bf16]):
    y[tile_n:tile_n+16, 0:128] = tile.gather(t[:, 0:128], tile.load(ids[tile_n:tile_n+16]))
""", lambda rng: (values(rng, (100, 128), "bf16"), rng.integers(0, 100, 40),
                  ts.zeros((40, 128), "bf16")), 128)

CASES["columns"] = Case("""@kernel
def k(x: Tensor["B", "S", "V", f32], ids: Tensor["n", i32], y: Tensor[5, "n", f32],
      z: Tensor[4, "n", 3, f32]):
    at = tile.load(ids[0:8])
    y[0:5, 0:8] = tile.gather(x[1, 0:5], at, axis=1)
    z[:, 0:8, :] = tile.gather(x[0:4, 1:9, 2:5], at, axis=1, fill=1.0)
""", lambda rng: (values(rng, (4, 12, 9), "f32"), _ids(rng, 8, 9), np.empty((5, 8), np.float32),
                  np.empty((4, 8, 3), np.float32)), 64)

CASES["no_columns"] = Case("""@kernel
def k(x: Tensor["V", "A", "D", f32], ids: Tensor["n", i32], y: Tensor["n", 64, f32],
      z: Tensor[64, "n", f32]):
    at = tile.load(ids[0:8])
    y[0:8, 0:64] = tile.gather(x[:, 0:64, 3], at)
    z[0:64, 0:8] = tile.gather(x[2, 0:64], at, axis=1)
    tile.scatter(x[:, 0:64, 1], at, tile.load(y[0:8, 0:64]), mode="add")
""", lambda rng: (values(rng, (12, 60, 9), "f32"), _ids(rng, 8, 12), np.empty((8, 64), np.float32),
                  np.empty((64, 8), np.float32)), 32)

for _dtype in ("f32", "f64", "int32", "f16", "bf16", "fp8_e4m3"):
    CASES[f"add_{_dtype}"] = Case(f"""@kernel
def k(x: Tensor["n", 8, ts.{_dtype}], ids: Tensor["n", i32], y: Tensor["V", 8, ts.{_dtype}]):
    for i in range(0, n, 4):
        tile.scatter(y, ids[i:i+4], tile.load(x[i:i+4]), mode="add")
""", lambda rng, d=_dtype: (values(rng, (10, 8), d, 2), _ids(rng, 10, 5),
                              values(rng, (5, 8), d, 2)))  # sums that fp8 holds exactly

CASES["histogram"] = Case("""@kernel
def k(ids: Tensor["n", i32], counts: Tensor["V", i32]):
    for i in range(0, n, 32):
        tile.scatter(counts, tile.load(ids[i:i+32]), 1, mode="add")
""", lambda rng: (_ids(rng, 75, 6), np.zeros(6, np.int32)))

for _swizzle in (None, "xor"):
    CASES[f"shared_{_swizzle}"] = Case(f"""@kernel
def k(x: Tensor[16, 32, f32], ids: Tensor[8, i32], y: Tensor[8, 32, f32], z: Tensor[8, 16, f32],
      w: Tensor[16, 32, f32]):
    s = tile.alloc_shared((16, 32), f32, swizzle={_swizzle!r})
    s[...] = tile.load(x[...])
    tile.barrier()
    at = tile.load(ids[...])
    y[...] = tile.gather(s, at)
    z[...] = tile.gather(s, at, axis=1).T
    tile.barrier()
    tile.scatter(s, at, tile.load(y[...]) - 1.0)
    tile.barrier()
    tile.scatter(s[2:14, 8:24], at, 1.0, mode="add")
    tile.barrier()
    w[...] = tile.load(s)
""", lambda rng: (values(rng, (16, 32), "f32"), rng.permutation(16)[:8].astype(np.int32),
                  np.empty((8, 32), np.float32), np.empty((8, 16), np.float32),
                  np.empty((16, 32), np.float32)))

CASES["product"] = Case("""@kernel
def k(t: Tensor["V", "K", bf16], ids: Tensor["n", i32], B: Tensor["K", 32, bf16],
      y: Tensor["n", 32, f32]):
    at = tile.load(ids[0:64])
    acc = tile.zeros((64, 32))
    for c in range(0, K, 32):
        acc = tile.dot(tile.gather(t[:, c:c+32], at), tile.load(B[c:c+32, :]), acc)
    y[0:64, :] = acc
""", lambda rng: (values(rng, (40, 72), "bf16"), _ids(rng, 50, 40), values(rng, (72, 32), "bf16"),
                  np.empty((50, 32), np.float32)), 128)
