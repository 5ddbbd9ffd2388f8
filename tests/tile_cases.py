"""Kernels for every tile op, with arguments: run by the interpreter, the emulator and the GPU.

Each kernel does a whole family on one type, so that few are compiled: results go to the planes of
O[k, i, j]. Shapes are smaller and larger than the tile, extents that are no powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tessera as ts
from tessera.numerics import find_dtype
from tessera.tile.ir.op_record import OPS as TILE_OPS
from tessera.tile.ir.op_record import TileOp

NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u32": np.uint32,
         "u64": np.uint64, "i16": np.int16, "i8": np.int8, "u8": np.uint8, "u16": np.uint16,
         "bool_": np.bool_, "f16": np.float16}
UNARY = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
         "atan", "tanh", "floor", "ceil", "round", "trunc", "erf", "erfc", "sigmoid",
         "abs")
BINARY = ("x + y", "x - y", "x * y", "x / y", "x // y", "x % y", "tile.maximum(x, y)",
          "tile.minimum(x, y)", "-x", "tile.where(x < y, x, y)", "tile.where(x != y, 1.0, x)",
          "tile.fma(x, y, x)", "tile.atan2(x, y)",
          "tile.where(tile.isnan(x) | tile.isinf(y), y, x)",
          "tile.where((x > 1.0) & ~(y > 1.0), x, y)",
          "tile.abs(x) ** 1.5", "x / tile.row_sum(tile.abs(y))", "tile.exp(x - tile.row_max(x))",
          "tile.exp(x - tile.row_max(x)[:, None])", "x + tile.col_min(y)[None, :]")
INTEGER = ("x + y", "x - y", "x * y", "x // y", "x % y", "x & y", "x | y", "x ^ y", "~x", "-x",
           "x << (y & 7)", "x >> (y & 7)", "x << y", "x >> y",
           "tile.maximum(x, y)", "tile.minimum(x, y)",
           "tile.where(x < y, x, y)", "tile.where(x >= y, x, y)", "tile.abs(x)")
REDUCTIONS = ("sum", "max", "min", "prod")


@dataclass(frozen=True)
class Case:
    """source of a kernel `k`, its arguments, and how near the results must be."""

    name: str
    source: str
    args: Callable[[np.random.Generator], tuple]
    lanes: int = 128
    rtol: float = 1e-5
    atol: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(name: str, source: str, args: Callable, **options: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, source, args, **options)


def values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Numbers of a type with ties, extremes and, for floats, NaN and infinities."""
    d = find_dtype(name)
    if d.kind == "float":
        x = np.round(rng.standard_normal(shape) * 2, 1)
        if d.special == "ieee":
            for special in (np.nan, np.inf, -np.inf, -0.0):
                x[rng.random(shape) < 0.02] = special
        return x.astype(NUMPY[name]) if name in NUMPY else ts.tensor(x.astype(np.float32), name)
    if d.kind == "bool":
        return rng.random(shape) < 0.4
    some = np.array([d.min, d.max, 0, 1, 2, 3, 5, 7], object)
    x = some[rng.integers(0, len(some), shape)]
    return x.astype(NUMPY[name]) if name in NUMPY else ts.tensor(x.astype(np.int8), name)


def plain(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    d = find_dtype(name)
    if d.kind == "float":
        return rng.uniform(0.2, 3.0, shape).astype(NUMPY[name])
    return rng.integers(0 if d.kind == "uint" else -50, 50, shape).astype(NUMPY[name])


def planes(expressions: tuple[str, ...], type: str, body: str, box: tuple[int, int],
           result: str | None = None, extra: str = "") -> str:
    """A kernel that stores each expression to a plane of O."""
    m, n = box
    lines = [f"    tile.store(O[{i}, 0:{m}, 0:{n}], {text})" for i, text in enumerate(expressions)]
    return (f"@kernel\ndef k(A: Tensor['M', 'N', ts.{type}], B: Tensor['M', 'N', ts.{type}], "
            f"O: Tensor['K', 'M', 'N', ts.{result or type}]{extra}):\n{body}"
            + "\n".join(lines) + "\n")


def load_two(box: tuple[int, int]) -> str:
    m, n = box
    return f"    x = tile.load(A[0:{m}, 0:{n}])\n    y = tile.load(B[0:{m}, 0:{n}])\n"


def elementwise() -> None:
    for t, shape, box, lanes in (("f32", (20, 70), (32, 64), 128), ("f64", (5, 40), (8, 64), 64)):
        for name, expressions in (("unary", tuple(f"tile.{u}(x)" for u in UNARY)),
                                  ("binary", BINARY)):
            count = len(expressions)
            case(f"{name}_{t}", planes(expressions, t, load_two(box), box),
                 lambda rng, t=t, shape=shape, count=count: (
                     plain(rng, t, shape), plain(rng, t, shape),
                     np.zeros((count, *shape), NUMPY[t])), lanes=lanes)
    for t in ("i32", "u32", "i64", "u64"):
        expressions = tuple(x for x in INTEGER if t[0] == "i" or not x.startswith("-"))
        case(f"integer_{t}", planes(expressions, t, load_two((8, 48)), (8, 48)),
             lambda rng, t=t, e=expressions: (
                 plain(rng, t, (7, 41)), plain(rng, t, (7, 41)),
                 np.zeros((len(e), 7, 41), NUMPY[t])), lanes=64)
    for t in ("f32", "f64", "i32", "u32", "i64", "u64", "bf16", "i8"):
        signs = ("<", "<=", ">", ">=", "==", "!=")
        case(f"compare_{t}", planes(tuple(f"x {s} y" for s in signs), t, load_two((16, 32)),
                                    (16, 32), "bool_"),
             lambda rng, t=t: (values(rng, t, (13, 30)), values(rng, t, (13, 30)),
                               np.zeros((6, 13, 30), bool)), lanes=32)


def reductions() -> None:
    for t in ("f32", "f64", "i32", "i64", "u32", "u64"):
        for shape, box, lanes in (((33, 70), (48, 100), 128), ((5, 300), (8, 512), 256),
                                  ((64, 9), (64, 16), 96), ((3, 1), (3, 1), 32)):
            m, n = box
            lines = [f"    tile.store(R[{i}, 0:{m}], tile.row_{f}(x))\n"
                     f"    tile.store(C[{i}, 0:{n}], tile.col_{f}(x))\n"
                     f"    S[{i}] = tile.reduce_{f}(x)\n" for i, f in enumerate(REDUCTIONS)]
            source = (f"@kernel\ndef k(A: Tensor['M', 'N', ts.{t}], R: Tensor['K', 'M', ts.{t}], "
                      f"C: Tensor['K', 'N', ts.{t}], S: Tensor['K', ts.{t}]):\n"
                      f"    x = tile.load(A[0:{m}, 0:{n}])\n" + "".join(lines))
            case(f"reduce_{t}_{m}x{n}", source, lambda rng, t=t, s=shape: (
                plain(rng, t, s) if t[0] != "f" else rng.uniform(0.9, 1.1, s).astype(NUMPY[t]),
                np.zeros((4, s[0]), NUMPY[t]), np.zeros((4, s[1]), NUMPY[t]),
                np.zeros(4, NUMPY[t])), lanes=lanes, rtol=1e-4)
    for t in ("f32", "f64", "i32", "i64", "u32", "u64", "i8", "bool_", "f16", "bf16", "fp8_e4m3"):
        for shape, box, lanes in (((33, 70), (48, 100), 128), ((5, 300), (8, 512), 256)):
            _positions(t, shape, box, lanes)


def _positions(t: str, shape: tuple[int, int], box: tuple[int, int], lanes: int) -> None:
    m, n = box
    source = (f"@kernel\ndef k(A: Tensor['M', 'N', ts.{t}], R: Tensor['K', 'M', ts.i32], "
              f"C: Tensor['L', 'N', ts.i32]):\n    x = tile.load(A[0:{m}, 0:{n}])\n"
              f"    for i in range(2):\n"
              f"        tile.store(R[0, 0:{m}], tile.row_argmax(x))\n"
              f"    tile.store(R[1, 0:{m}], tile.row_argmin(x))\n"
              f"    tile.store(C[0, 0:{n}], tile.row_argmax(x.T))\n"
              f"    tile.store(C[1, 0:{n}], tile.argmin(x, axis=0))\n"
              f"    R[2, 0] = tile.argmax(x, axis=None)\n")
    case(f"argmax_{t}_{m}x{n}", source, lambda rng: (
        values(rng, t, shape), np.zeros((3, shape[0]), np.int32),
        np.zeros((2, shape[1]), np.int32)), lanes=lanes)


def permutations() -> None:
    """Of tiles with edges, whose elements are then summed along what was another axis."""
    for t, axes in (("f32", (1, 2, 0)), ("f32", (2, 0, 1)), ("f32", (0, 2, 1)), ("i8", (2, 1, 0))):
        names, box = [f"'{'ABC'[a]}'" for a in axes], [(4, 8, 16)[a] for a in axes]
        slices = ", ".join(f"0:{n}" for n in box)
        shape = tuple((3, 7, 13)[a] for a in axes)
        number, less = NUMPY[t], " - 100.0" if t == "f32" else ""
        case("permute_{}_{}{}{}".format(t, *axes), (
            f"@kernel\ndef k(x: Tensor['A', 'B', 'C', ts.{t}], "
            f"y: Tensor[{', '.join(names)}, ts.{t}], s: Tensor[{', '.join(names[:2])}, ts.{t}]):\n"
            f"    u = tile.transpose(tile.load(x[0:4, 0:8, 0:16]), {axes})\n"
            f"    y[{slices}] = u\n"
            f"    s[0:{box[0]}, 0:{box[1]}] = tile.reduce_max(u{less}, axis=2)\n"),
            lambda rng, t=t, shape=shape, number=number: (
                values(rng, t, (3, 7, 13)), np.zeros(shape, number), np.zeros(shape[:2], number)))


def scans_and_sorts() -> None:
    for t in ("f32", "f64", "i32", "i64", "u32", "u64"):
        for shape, box, lanes in (((33, 70), (48, 100), 128), ((5, 300), (8, 512), 256),
                                  ((3, 1), (3, 1), 32)):
            expressions = ("tile.cumsum(x)", "tile.cumsum(x, 0)", "tile.cumprod(x)",
                           "tile.cummax(x)", "tile.cummax(x.T).T")
            case(f"scan_{t}_{box[0]}x{box[1]}", planes(expressions, t, load_two(box), box),
                 lambda rng, t=t, s=shape: (
                     rng.uniform(0.99, 1.01, s).astype(NUMPY[t]) if t[0] == "f"
                     else plain(rng, t, s), plain(rng, t, s), np.zeros((5, *s), NUMPY[t])),
                 lanes=lanes, rtol=1e-4)
    for t in ("f32", "f64", "i32", "i64", "u32", "u64", "i8", "bool_", "f16", "bf16"):
        for shape, lanes in (((5, 100), 128), ((9, 32), 64), ((1, 3), 32)):
            _sorted(t, shape, lanes)
    for t in ("f32", "f64", "i32", "i64", "u32", "u64", "i8", "bool_", "f16", "bf16"):
        for shape, ks, lanes in (((5, 100), (1, 8, 13), 128), ((16, 32), (2, 32), 64),
                                 ((1, 3), (1, 3), 32)):
            _smallest(t, shape, ks, lanes)
    _smallest("f32", (1, 3000), (5, 100), 256)
    _smallest("i32", (32, 128), (8, 1), 128)
    _smallest("i64", (2, 700), (8,), 128)
    for t in ("f32", "i32", "i64", "u32"):
        for shape, lanes in (((5, 64), 128), ((1, 1), 32), ((2, 1024), 256)):
            _merged(t, shape, lanes)
    _sorted("f32", (2, 1024), 128)
    _sorted("f32", (1, 3000), 256)
    _sorted("i64", (3, 700), 128)


def _sorted(t: str, shape: tuple[int, int], lanes: int) -> None:
    m, n = shape
    lines = "".join(
        f"    tile.store(O[{i}, 0:{m}, 0:{n}], tile.sort(x, descending={d}))\n"
        f"    tile.store(P[{i}, 0:{m}, 0:{n}], tile.argsort(x, descending={d}))\n"
        for i, d in enumerate((False, True)))
    source = (f"@kernel\ndef k(A: Tensor['M', 'N', ts.{t}], O: Tensor['K', 'M', 'N', ts.{t}], "
              f"P: Tensor['K', 'M', 'N', ts.i32]):\n    x = tile.load(A[0:{m}, 0:{n}])\n" + lines)

    def args(rng: np.random.Generator) -> tuple:
        zeros = np.zeros((2, *shape), np.float32)
        out = zeros.astype(NUMPY[t]) if t in NUMPY else ts.tensor(zeros, t)
        return values(rng, t, shape), out, np.zeros((2, *shape), np.int32)

    case(f"sort_{t}_{m}x{n}", source, args, lanes=lanes, atol=0, rtol=0)


def _merged(t: str, shape: tuple[int, int], lanes: int) -> None:
    m, n = shape
    source = (f"@kernel\ndef k(A: Tensor['M', 'N', ts.{t}], O: Tensor['K', 'M', 'N', ts.{t}]):\n"
              f"    x = tile.load(A[0:{m}, 0:{n}])\n" + "".join(
                  f"    O[{i}, 0:{m}, 0:{n}] = tile.sort(x, descending={d}, bitonic=True)\n"
                  for i, d in enumerate((False, True))))

    def args(rng: np.random.Generator) -> tuple:
        x = np.sort(values(rng, t, shape), -1)
        x = np.where(np.isnan(x), np.inf, x) if t[0] == "f" else x
        for row in x:
            at = rng.integers(0, n + 1)
            row[:] = np.concatenate([np.sort(row[::2][:at]), np.sort(np.concatenate(
                [row[1::2], row[::2][at:]]))[::-1]])
        return x, np.zeros((2, *shape), x.dtype)

    case(f"merged_{t}_{m}x{n}", source, args, lanes=lanes, atol=0, rtol=0)


def _smallest(t: str, shape: tuple[int, int], ks: tuple[int, ...], lanes: int) -> None:
    """Of whole tiles and of some that reach over the edges of the tensor, in a loop too."""
    m, n = shape
    params = "".join(f", O{k}: Tensor['C', 'M', {k}, ts.{t}]" for k in ks)
    lines = "".join(
        f"    for i in range(2):\n"
        f"        O{k}[0, 0:{m}, 0:{k}] = tile.smallest(tile.load(A[0:{m}, 0:{n}]), {k})\n"
        f"    part = tile.load(A[{m // 2}:{m // 2 + m}, 1:{n + 1}])\n"
        f"    O{k}[1, 0:{m}, 0:{k}] = tile.smallest(part, {k})\n" for k in ks)
    source = f"@kernel\ndef k(A: Tensor['M', 'N', ts.{t}]{params}):\n{lines}"

    def args(rng: np.random.Generator) -> tuple:
        outs = (np.zeros((2, m, k), np.float32) for k in ks)
        return values(rng, t, shape), *(
            x.astype(NUMPY[t]) if t in NUMPY else ts.tensor(x, t) for x in outs)

    case(f"smallest_{t}_{m}x{n}", source, args, lanes=lanes, atol=0, rtol=0)


def shapes_of_tiles() -> None:
    source = """@kernel
def k(A: Tensor["M", "N", f32], B: Tensor["N", "M", f32], O: Tensor["M", "N", f32],
      P: Tensor["N", "M", f32], V: Tensor["n", f32]):
    x = tile.load(A[0:33, 0:70])
    y = tile.load(B[0:70, 0:33])
    for i in range(3):
        x = x + y.T * (i + 1.0)
    tile.store(O[0:33, 0:70], x)
    row = tile.cast(tile.arange(33), f32)[None, :]
    row += tile.ramp(V[0], 0.5, 33)[None, :]
    tile.store(P[0:70, 0:33], tile.reshape(x, (70, 33)) + x.T + row)
    z = tile.reshape(tile.load(V[0:210]), (5, 6, 7))
    z = tile.cumsum(z, 1) + tile.reduce_max(z, 2)[:, :, None] * 2.0 - tile.full((5, 6, 7), 0.5)
    tile.store(V[0:210], tile.reshape(z, (210,)))
"""
    for lanes in (32, 64, 96, 128, 256):
        case(f"shapes_{lanes}", source, lambda rng: (
            *(rng.standard_normal(s).astype(np.float32)
              for s in ((33, 70), (70, 33), (33, 70), (70, 33), (210,))),), lanes=lanes)
    source = """@kernel
def k(A: Tensor["M", "N", f32], B: Tensor["N", "M", bf16], O: Tensor["M", "N", bf16],
      R: Tensor["M", f32], Q: Tensor["N", ts.f16]):
    m, n = tile.group_id(0) * 32, tile.group_id(1) * 64
    x = tile.load(A[m:m+32, n:n+64])
    y = tile.load(B[n:n+64, m:m+32])
    s = x + tile.cast(y.T, f32) * tile.load(R[m:m+32])[:, None]
    tile.store(O[m:m+32, n:n+64], s + tile.load(Q[n:n+64])[None, :])
"""
    for shape in ((64, 128), (50, 100), (33, 65), (1, 3)):
        m, n = shape
        case(f"blocks_{m}x{n}", source, lambda rng, m=m, n=n: (
            rng.standard_normal((m, n)).astype(np.float32),
            ts.tensor(rng.standard_normal((n, m)).astype(np.float32), "bf16"),
            ts.tensor(np.zeros((m, n), np.float32), "bf16"),
            rng.standard_normal(m).astype(np.float32), rng.standard_normal(n).astype(np.float16)),
            rtol=1e-2, options={"groups": (-(-m // 32), -(-n // 64))})


def packed() -> None:
    for t in ("fp4_e2m1", "fp4_e3m0", "int4", "fp6_e3m2", "fp6_e2m3"):
        wide = "ts.i32" if t == "int4" else "f32"
        for (M, N), (m, n), (bm, bn), lanes in (
                ((16, 128), (0, 0), (16, 128), 64), ((13, 77), (0, 0), (16, 128), 64),
                ((7, 13), (0, 0), (7, 13), 32), ((20, 100), (3, 5), (8, 63), 128)):
            box = f"{m}:{m + bm}, {n}:{n + bn}"
            source = f"""@kernel
def k(A: Tensor["M", "N", ts.{t}], O: Tensor["M", "N", ts.{t}], P: Tensor["M", "N", ts.{t}]):
    x = tile.load(A[{box}])
    y = tile.cast(x, {wide})
    tile.store(O[{box}], tile.cast(tile.minimum(y + y, y + 1), ts.{t}))
    tile.store(P[{box}].T, x.T)
"""
            def args(rng: np.random.Generator, t: str = t, s: tuple = (M, N)) -> tuple:
                raw = rng.integers(-8, 8, (3, *s)) * (1 if t == "int4" else 0.5)
                kind = np.int8 if t == "int4" else np.float32
                return tuple(ts.tensor(x.astype(kind), t) for x in raw)

            case(f"packed_{t}_{M}x{N}_{n}", source, args, lanes=lanes, rtol=0, atol=0)


def roundings() -> None:
    for t in ("bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1"):
        for how in ("stochastic_round", "saturate", 'rounding("toward_zero")'):
            source = f"""@kernel
def k(A: Tensor["M", "N", f32], O: Tensor["M", "N", ts.{t} @ ts.{how}],
      P: Tensor["N", "M", ts.{t} @ ts.{how}]):
    x = tile.load(A[0:32, 0:128])
    tile.store(O[0:32, 0:128], x)
    tile.store(P[0:128, 0:32], x.T)
"""
            policy = getattr(ts, how.split("(")[0])
            numeric = find_dtype(t) @ (policy("toward_zero") if "(" in how else policy)
            for s in ((32, 128), (13, 77)):
                def args(rng: np.random.Generator, s: tuple = s, n: Any = numeric) -> tuple:
                    x = rng.standard_normal(s) * np.exp2(rng.integers(-12, 12, s))
                    return (x.astype(np.float32), ts.tensor(np.zeros(s, np.float32), n),
                            ts.tensor(np.zeros(s[::-1], np.float32), n))

                case(f"store_{t}_{how.split('(')[0]}_{s[0]}x{s[1]}", source, args, lanes=64,
                     rtol=0, atol=0)


def groups_of_no_whole_warps() -> None:
    """Lanes that share no tiles have the numbers too, and decide by them how often they meet."""
    source = """@kernel
def k(A: Tensor["M", "N", f32], y: Tensor["P", f32], z: Tensor["Q", i32]):
    x = tile.load(A[0:16, 0:64])
    total, best = tile.reduce_sum(x), tile.reduce_sum(tile.argmax(x))
    low = tile.reduce_min(tile.row_max(x))
    t = tile.local_id()
    y[t] = total
    y[t + tile.group_size()] = low
    z[t] = best
    for i in range(0, int(tile.reduce_max(tile.abs(x)))):
        A[i, 0:64] = tile.cumsum(tile.load(A[i, 0:64]), axis=0)
"""
    for lanes in (1, 3, 8, 24, 31, 33, 40, 48, 65, 96, 100, 127, 200):
        case(f"numbers_{lanes}_lanes", source, lambda rng, n=lanes: (
            rng.integers(-7, 8, (16, 64)).astype(np.float32), np.zeros(2 * n, np.float32),
            np.zeros(n, np.int32)), lanes=lanes, options={"groups": 1})
    for name in ("reduce_f32_64x16", "argmax_f32_8x512", "sort_f32_5x100", "shapes_96"):
        for lanes in (40, 48):
            made = replace(CASES[name], name=f"{name}_{lanes}_lanes", lanes=lanes)
            CASES[made.name] = made


def statistics_of_rows() -> None:
    """Constant tiles and columns of statistics, of a square tile too."""
    source = """BM = 64
@kernel
def k(A: Tensor["M", "N", f32], O: Tensor["K", "M", "N", f32], low: Tensor["M", f32]):
    ctx = tile.context()
    x = tile.load(A[0:BM, 0:ctx.N])
    m_i, l_i = tile.row_max(x), tile.row_sum(x)
    tile.store(O[0, 0:BM, 0:N], x - m_i)
    tile.store(O[1, 0:BM, 0:N], l_i[:, None] * x)
    tile.store(O[2, 0:BM, 0:N], tile.zeros((BM, ctx.N), f32))
    tile.store(low[0:BM], tile.full((BM,), -float('inf'), f32))
"""
    for n in (64, 16):
        case(f"statistics_64x{n}", source, lambda rng, n=n: (
            plain(rng, "f32", (64, n)), np.full((3, 64, n), np.nan, np.float32),
            np.full(64, np.nan, np.float32)))


def added_again() -> None:
    """Sums of rows added to what lies there, by statements that follow each other: all threads of
    a row read an element that one of them wrote."""
    at = "z[tile_m:tile_m+4]"
    source = (f'@kernel\ndef k(x: Tensor["M", "N", f32], z: Tensor["M", f32]):\n'
              f'    t = tile.load(x[tile_m:tile_m+4, 0:N])\n    {at} += tile.row_sum(t)\n'
              f'    {at} += tile.row_sum(t * t)\n    for i in range(3):\n        {at} *= 0.5\n')
    case("added_again", source, lambda rng: (
        values(rng, "f32", (10, 50)), values(rng, "f32", (10,))))


for _make in (elementwise, statistics_of_rows, reductions, scans_and_sorts, permutations,
              added_again, shapes_of_tiles, packed, roundings, groups_of_no_whole_warps):
    _make()


# --- from the records ---------------------------------------------------------------------------
def sample_case(op: TileOp) -> Case | None:
    """A kernel that calls an op on the first samples of its record, where its operands and its
    result are tiles of one shape; None for others, whose cases are written above."""
    if not (op.public and op.samples and op.numpy and op.rule) or op.attrs or op.lower:
        return None
    xs = [stored_sample(x) for x in op.samples[0](np.random.default_rng(0))]
    result = op.numpy(*xs)
    if any(x.shape != xs[0].shape or x.ndim != 2 for x in (*xs, result)):
        return None
    word = {"float32": "f32", "int32": "i32", "bool": "ts.bool_"}
    kinds = [word[x.dtype.name] for x in xs]
    stored = word[stored_sample(result).dtype.name]
    names = [f"x{i}" for i in range(len(xs))]
    box, head = "[tile_m:tile_m+8, tile_n:tile_n+8]", "".join(
        f'{n}: Tensor["M", "N", {kind}], ' for n, kind in zip(names, kinds, strict=True))
    calls = ", ".join(f"tile.load({n}{box})" for n in names)
    source = (f'@kernel\ndef k({head}out: Tensor["M", "N", {stored}]):\n'
              f'    out{box} = tile.{op.name}({calls})\n')

    def args(rng: np.random.Generator) -> tuple:
        arrays = [stored_sample(x) for x in op.samples[0](rng)]
        return (*arrays, np.zeros_like(stored_sample(op.numpy(*arrays))))

    return Case(f"sample_{op.name}", source, args)


def stored_sample(x: Any) -> np.ndarray:
    """A sample's array in the type in which a case stores it."""
    x = np.asarray(x)
    return x.astype({"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}[x.dtype.kind])


def sample_cases(ops: Iterable[TileOp]) -> dict[str, Case]:
    """Of the ops that no case above names."""
    named = "".join(c.source for c in CASES.values() if not c.name.startswith("sample_"))
    found = [sample_case(op) for op in ops if f"tile.{op.name}(" not in named]
    return {c.name: c for c in found if c is not None}


CASES.update(sample_cases(TILE_OPS.values()))
