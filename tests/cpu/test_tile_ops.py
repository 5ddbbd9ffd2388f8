"""Every op of the registry against NumPy, on extents that are no multiples of the tile."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from kernel_meanings import compared
from kernels.build import build
from tessera import config
from tessera.tile.ir.errors import TileError
from tessera.tile.ops import OPS
from tolerance import assert_close

SYMBOLS = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "floordiv": "a // b",
           "mod": "a % b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b",
           "eq": "a == b", "ne": "a != b", "bitand": "a & b", "bitor": "a | b", "bitxor": "a ^ b",
           "shl": "a << (b & 7)", "shr": "a >> (b & 7)", "neg": "-a", "bitnot": "~a"}
ORACLES = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "mod": np.mod,
    "floordiv": np.floor_divide, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "bitand": np.bitwise_and,
    "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "neg": np.negative, "bitnot": np.invert,
    "shl": lambda a, b: a << (b & 7), "shr": lambda a, b: a >> (b & 7), "maximum": np.maximum,
    "minimum": np.minimum, "abs": np.abs, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log1p": np.log1p, "sqrt": np.sqrt, "sin": np.sin,
    "rsqrt": lambda a: 1 / np.sqrt(a), "cos": np.cos, "tan": np.tan, "atan": np.arctan,
    "tanh": np.tanh, "floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc,
    "isnan": np.isnan, "isinf": np.isinf, "atan2": np.arctan2,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)), "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
    "popcount": np.vectorize(lambda a: (int(a) & 0xFFFFFFFF).bit_count()),
    "exp_approx": np.exp, "sigmoid_approx": lambda a: 1 / (1 + np.exp(-a)),
}
INTEGER = ("bitand", "bitor", "bitxor", "bitnot", "shl", "shr", "popcount")
BOOLEAN = ("lt", "le", "gt", "ge", "eq", "ne", "isnan", "isinf")


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Under the sanitizer, and each kernel is told in ops of the graph beside."""
    with compared(monkeypatch), config.scope(debug=True):
        yield


def operands(rng, name, count):
    shape = (13, 7)
    if name in INTEGER:
        return [rng.integers(-90, 90, shape).astype(np.int32) for _ in range(count)]
    return [rng.uniform(0.1, 3.0, shape).astype(np.float32) for _ in range(count)]


@pytest.mark.row("TILE-38", "TILE-39", "TILE-53", "TILE-34")
@pytest.mark.parametrize("name", sorted(ORACLES))
@pytest.mark.parametrize("form", ["tile", "lane"])
def test_elementwise(name, form, rng):
    oracle, count = ORACLES[name], len(OPS[name].operands)
    xs = operands(rng, name, count)
    kind = "i32" if name in INTEGER else "f32"
    result = "ts.bool_" if name in BOOLEAN else kind
    call = SYMBOLS.get(name, f"tile.{name}({', '.join('ab'[:count])})")
    params = "".join(f'{p}_: Tensor["M", "N", {kind}], ' for p in "ab"[:count])
    box = "[tile_m:tile_m+8, tile_n:tile_n+4]"
    loads = "\n    ".join(f"{p} = tile.load({p}_{box})" if form == "tile" else f"{p} = {p}_[i, j]"
                          for p in "ab"[:count])
    if form == "tile":
        body = f"    {loads}\n    tile.store(out{box}, {call})"
    else:
        loads = loads.replace("\n", "\n        ")
        body = ("    i = tile.linear_id()\n    for j in range(0, N):\n"
                f"        if i < M:\n            {loads.strip()}".replace("\n            \n", "\n"))
        body = body.replace("\n    b =", "\n    b =") + f"\n            out[i, j] = {call}"
        body = body.replace("            a = a_[i, j]\n            b", "            a = a_[i, j]\n"
                            "            b")
    k = build(f'@kernel\ndef k({params}out: Tensor["M", "N", {result}]):\n{body}\n')["k"]
    out = np.zeros((13, 7), {"f32": np.float32, "i32": np.int32, "ts.bool_": bool}[result])
    k(*xs, out)
    if name in BOOLEAN or name in INTEGER:
        assert np.array_equal(out, oracle(*xs))
    elif name in ("floordiv", "mod"):
        assert_close(out, oracle(*xs), dtype="f32", n=4)
    else:
        assert_close(out, oracle(*(x.astype(np.float64) for x in xs)), dtype="f32")


REDUCTIONS = [("row_sum", 1, np.sum), ("row_max", 1, np.max), ("row_min", 1, np.min),
              ("row_prod", 1, np.prod), ("col_sum", 0, np.sum), ("col_max", 0, np.max),
              ("col_min", 0, np.min), ("row_argmax", 1, np.argmax), ("row_argmin", 1, np.argmin),
              ("row_mean", 1, np.mean), ("argmax", 1, np.argmax)]


@pytest.mark.row("TILE-36", "TILE-37")
@pytest.mark.parametrize("name,axis,oracle", REDUCTIONS, ids=[r[0] for r in REDUCTIONS])
def test_a_reduction_leaves_out_what_is_not_there(name, axis, oracle, rng):
    x = -rng.uniform(0.5, 2.0, (13, 7)).astype(np.float32)  # all below the 0 of a ragged load
    kind = "i32" if "arg" in name else "f32"
    n = 13 if axis else 7
    slices = ("x[tile_m:tile_m+8, 0:8]", "out[tile_m:tile_m+8]") if axis else (
        "x[0:16, tile_n:tile_n+4]", "out[tile_n:tile_n+4]")
    dim = "M" if axis else "N"
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], out: Tensor["{dim}", {kind}]):
    tile.store({slices[1]}, tile.{name}(tile.load({slices[0]})))
""")["k"]
    out = np.zeros(n, np.int32 if kind == "i32" else np.float32)
    k(x, out)
    want = oracle(x if "arg" in name else x.astype(np.float64), axis=axis)
    assert_close(out, want, dtype=None if kind == "i32" else "f32", n=13)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_along_any_axis(name, rng):
    k = build(f"""@kernel
def k(x: Tensor["L", "M", "N", f32], a: Tensor["M", "N", i32], b: Tensor["L", "N", i32],
      c: Tensor["L", "M", i32], d: Tensor["K", i32]):
    t = tile.load(x[0:4, 0:4, 0:8])
    a[0:4, 0:8] = tile.{name}(t, axis=0)
    b[0:4, 0:8] = tile.{name}(t, axis=1)
    c[0:4, 0:4] = tile.{name}(t)
    d[0] = tile.{name}(t, axis=None)
""")["k"]
    x = rng.integers(-9, 9, (3, 4, 7)).astype(np.float32)  # the first one of several
    x[1, 2, 3] = np.nan
    out = [np.full(s, -1, np.int32) for s in ((4, 7), (3, 7), (3, 4), (1,))]
    k(x, *out)
    for axis, got in enumerate(out[:3]):
        assert np.array_equal(got, getattr(np, name)(x, axis))
    assert out[3][0] == np.ravel_multi_index((1, 2, 3), (4, 4, 8))  # the position in the tile


@pytest.mark.parametrize("axes", [*itertools.permutations(range(3)), (-1, 0, 1), None])
def test_axes_in_any_order(axes, rng):
    """And what does not exist stays out of a sum behind it, through a reshape too."""
    order = (2, 1, 0) if axes is None else tuple(a % 3 for a in axes)
    names, box = ", ".join(f"'{'ABC'[a]}'" for a in order), [(2, 4, 8)[a] for a in order]
    slices = ", ".join(f"0:{n}" for n in box)
    k = build(f"""@kernel
def k(x: Tensor["A", "B", "C", f32], y: Tensor[{names}, f32], s: Tensor["K", f32],
      r: Tensor["P", "Q", f32]):
    u = tile.transpose(tile.load(x[0:2, 0:4, 0:8]), {axes})
    y[{slices}] = u
    r[0:{box[0]}, 0:{box[1]}] = tile.reduce_sum(tile.exp(u), axis=2)
    v = tile.transpose(tile.reshape(tile.load(x[0:2, 0:4, 0:8]), (4, 2, 8)), {axes})
    s[0] = tile.reduce_sum(tile.exp(v))
""")["k"]
    x = rng.standard_normal((2, 3, 7)).astype(np.float32)
    y, s = np.zeros([x.shape[a] for a in order], np.float32), np.zeros(1, np.float32)
    r = np.zeros(y.shape[:2], np.float32)
    k(x, y, s, r)
    assert np.array_equal(y, x.transpose(order))
    assert_close(r, np.exp(x.astype(np.float64)).transpose(order).sum(2), dtype="f32", n=8)
    assert_close(s[0], np.exp(x.astype(np.float64)).sum(), dtype="f32", n=64)


WHOLE = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_prod": np.prod}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_reduction_to_a_number(name, rng):
    x = rng.uniform(0.5, 1.5, (5, 7)).astype(np.float32)
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32]) -> f32:
    return tile.{name}(tile.load(x[0:8, 0:8]))
""")["k"]
    assert_close(np.float32(k(x)), WHOLE[name](x.astype(np.float64)), dtype="f32", n=35)


ROWS = {
    "tile.cumsum(t)": lambda x: np.cumsum(x, 1),
    "tile.cummax(t)": lambda x: np.maximum.accumulate(x, 1),
    "tile.cumprod(t)": lambda x: np.cumprod(x, 1), "tile.sort(t)": lambda x: np.sort(x, 1),
    "tile.sort(t, descending=True)": lambda x: -np.sort(-x, 1),
    "tile.cast(tile.argsort(t), f32)": lambda x: np.argsort(x, 1),
    "tile.where(t > 1.0, t, -t)": lambda x: np.where(x > 1, x, -x),
    "tile.fma(t, t, 1.0)": lambda x: x * x + 1,
    "tile.broadcast(tile.row_max(t), (4, 8))": lambda x: np.broadcast_to(x.max(1)[:, None], (4, 8)),
    "tile.reshape(tile.reshape(t, (8, 4)), (4, 8))": lambda x: x,
    "tile.transpose(tile.transpose(t))": lambda x: x, "t.T.T * 2": lambda x: x * 2,
    "t + tile.arange(8)[None, :]": lambda x: x + np.arange(8),
    "t * tile.arange(4)": lambda x: x * np.arange(4)[:, None],
    "t + tile.ramp(2.0, 0.5, 8)[None, :]": lambda x: x + (2 + 0.5 * np.arange(8)),
    "tile.full((4, 8), 2.5) + tile.ones((4, 8))": lambda x: np.full((4, 8), 3.5),
    "t / tile.row_sum(t)": lambda x: x / x.sum(1, keepdims=True),
    "tile.causal_mask(t, 3, 1)": lambda x: np.where(
        1 + np.arange(8) > 3 + np.arange(4)[:, None], -np.inf, x),
    "tile.span_mask(t, tile.arange(0, 4) + 5, 3)": lambda x: np.where(
        3 + np.arange(8) >= 5 + np.arange(4)[:, None], -np.inf, x),
    "tile.span_mask(t, tile.arange(0, 4) + 5, 3, behind=False)": lambda x: np.where(
        3 + np.arange(8) < 5 + np.arange(4)[:, None], -np.inf, x),
    "tile.edge_mask(t, 3, 8, fill=7.0)": lambda x: np.where(3 + np.arange(8) < 8, x, 7.0),
    "t ** 2 + t ** 0.5": lambda x: x * x + np.sqrt(x),
    "tile.running_max(t, t + 1.0, slack=2.0)": lambda x: x,
}


@pytest.mark.row("TILE-35", "TILE-51", "TILE-52")
@pytest.mark.parametrize("text", list(ROWS))
def test_ops_of_a_tile(text, rng):
    x = rng.uniform(0.2, 2.0, (4, 8)).astype(np.float32)
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    t = tile.load(x[0:4, 0:8])
    tile.store(y[0:4, 0:8], {text})
""")["k"]
    y = np.zeros_like(x)
    k(x, y)
    assert_close(y, ROWS[text](x.astype(np.float64)), dtype="f32", n=8)


@pytest.mark.parametrize("text, error, hint", [
    ("t, tile.arange(0, 4), tile.local_id()", "span_mask needs a uniform int32 for its first", ""),
    ("t, tile.arange(0, 4), x[0, 0]", "span_mask needs a uniform int32 for its first column", ""),
    ("t, tile.arange(0, 8), 3", "span_mask needs an int32 for each of 4 rows", ""),
    ("t, tile.load(x[0:4, 0]), 3", "span_mask needs an int32 for each of 4 rows", ""),
    ("tile.cast(t, i32), tile.arange(0, 4), 3", "span_mask writes -inf into a float tile", ""),
    ("tile.arange(0, 4), tile.arange(0, 4), 3", "span_mask", ""),
    ("t, 5, 3", "span_mask takes the bounds of rows as a tile of rank 1",
     r"ts\.tile\.load\(ends\[q0:q0\+BM\]\)"),
    ("t, t, 3", "span_mask takes the bounds of rows as a tile of rank 1",
     r"ts\.tile\.load\(ends\[q0:q0\+BM\]\)")])
def test_what_a_mask_of_spans_refuses(text, error, hint):
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    t = tile.load(x[0:4, 0:8])
    tile.store(y[0:4, 0:8], tile.span_mask({text}))
""")["k"]
    with pytest.raises(TileError, match=f"{error}(.|\n)*{hint}") as raised:
        k(np.ones((4, 8), np.float32), np.ones((4, 8), np.float32))
    assert "tile.span_mask(" in str(raised.value)


@pytest.mark.parametrize("text, hidden", [
    ("tile.span_mask(s, tile.cast(tile.row_sum(ends), 'int32'), 3)",
     lambda row, column, ends: 3 + column >= ends),
    ("tile.span_mask(s, tile.cast(tile.row_sum(ends), 'int32'), 3, behind=False)",
     lambda row, column, ends: 3 + column < ends),
    ("tile.causal_mask(s, 2, 1)", lambda row, column, ends: 1 + column > 2 + row)])
def test_masks_of_whole_arrays_know_where_their_blocks_lie(text, hidden, rng):
    k = ts.kernel.auto(build(f"""@kernel
def k(q: ts.Tile, k: ts.Tile, ends: ts.Tile) -> ts.Tile:
    s = tile.dot(q, k.T)
    return tile.exp({text})
""")["k"].fn)
    q, b = (rng.standard_normal((n, 64)).astype(np.float32) / 8 for n in (300, 400))
    ends = rng.integers(0, 400, (300, 1)).astype(np.float32)
    away = hidden(np.arange(300)[:, None], np.arange(400), ends)
    want = np.where(away, 0, np.exp(q.astype(np.float64) @ b.T))
    assert_close(k(q, b, ends), want, dtype="f32", n=64)


@pytest.mark.row("TILE-40", "TILE-41")
@pytest.mark.parametrize("D", [8, 24])
def test_tiles_of_a_constant_as_the_seed_has_them(D):
    """Shapes from a constant of the kernel and from the context, elements of every bit."""
    k = build("""BM = 16
@kernel
def k(x: Tensor["M", "D", f32], zero: Tensor["M", "D", f32], low: Tensor["M", f32]):
    ctx = tile.context()
    zero[tile_m:tile_m+BM, 0:D] = tile.zeros((BM, ctx.D), f32)
    low[tile_m:tile_m+BM] = tile.full((BM,), -float('inf'), f32)
""")["k"]
    x, zero, low = (np.full(s, np.nan, np.float32) for s in ((40, D), (40, D), 40))
    k(x, zero, low)
    assert zero.tobytes() == np.zeros((40, D), np.float32).tobytes()
    assert (low == -np.inf).all()


@pytest.mark.row("TILE-44", "TILE-45")
@pytest.mark.parametrize("m, n", [(8, 16), (64, 64)])
@pytest.mark.parametrize("form", ["", "[:, None]"])
def test_a_statistic_of_rows_broadcasts_along_columns(m, n, form, rng):
    """Also where a row and a column are equally long, when NumPy would take it for a row."""
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], z: Tensor["M", "N", f32]):
    scores = tile.load(x[0:{m}, 0:{n}])
    m_i = tile.row_max(scores)
    l_i = tile.row_sum(scores)
    tile.store(y[0:{m}, 0:{n}], scores - m_i{form})
    tile.store(z[0:{m}, 0:{n}], l_i{form} * scores)
""")["k"]
    x = rng.uniform(0.5, 2.0, (m, n)).astype(np.float32)
    y, z = np.full_like(x, np.nan), np.full_like(x, np.nan)
    k(x, y, z)
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(y, x - x.max(1)[:, None])
    assert_close(z, wide.sum(1)[:, None] * wide, dtype="f32", n=n)
    if m == n:
        assert (y != x - x.max(1)).any(), "the two readings differ here"


@pytest.mark.row("TILE-42")
def test_full_without_a_dtype_is_f32():
    names = build("""@kernel
def k(x: Tensor["n", f32]):
    t = tile.full((4,), -math.inf)
    assert t.dtype is f32 and t.shape == (4,) and t.space == "register"
    tile.store(x[0:4], t)
x = floats(4)
k(x)
assert np.isneginf(x).all()
""")
    assert "tile<4 x f32>" in names["k"].inspect_ir()


@pytest.mark.row("TILE-43")
@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2"])
def test_a_cast_rounds_as_the_codec(dtype, rng):
    x = (rng.standard_normal((7, 9)) * 10 ** rng.uniform(-4, 4, (7, 9))).astype(np.float32)
    k = build(f"""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", ts.{dtype}]):
    tile.store(y[tile_m:tile_m+4, tile_n:tile_n+4],
               tile.cast(tile.load(x[tile_m:tile_m+4, tile_n:tile_n+4]), ts.{dtype}))
""")["k"]
    y = ts.zeros((7, 9), dtype)
    k(x, y)
    want = ts.numerics.encode(x, dtype)
    assert y.numpy().tobytes() == want.tobytes()


def test_integers_and_casts_between_them(rng):
    x = (rng.standard_normal(50) * 1e3).astype(np.float32)
    x[:3] = [np.nan, 1e30, -1e30]
    k = build("""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", int8], z: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        y[i] = tile.cast(x[i], int8)
        z[i] = int(x[i]) * 2 if i % 2 else y[i] + 200
""")["k"]
    y, z = np.zeros(50, np.int8), np.zeros(50, np.int32)
    k(x, y, z)
    want = ts.numerics.encode(x, "int8")
    assert np.array_equal(y, want)
    twice = ts.numerics.encode(x, "int32").astype(np.int64) * 2
    twice = twice.astype(np.int32)  # wraps, as int32 does
    assert np.array_equal(z, np.where(np.arange(50) % 2, twice, want.astype(np.int32) + 200))


@pytest.mark.parametrize("dtypes", [("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"),
                                    ("fp8_e4m3", "fp8_e5m2"), ("f64", "f64")])
def test_dot_of_floats(dtypes, rng):
    a, b = (ts.tensor(rng.standard_normal(s).astype(np.float32), d)
            for s, d in (((19, 21), dtypes[0]), ((21, 23), dtypes[1])))
    out = "f64" if dtypes[0] == "f64" else "f32"
    k = build(f"""@kernel
def k(A: Tensor["M", "K", ts.{dtypes[0]}], B: Tensor["K", "N", ts.{dtypes[1]}],
      C: Tensor["M", "N", {out}]):
    acc = tile.zeros((16, 8), {out})
    for k in range(0, K, 8):
        a, b = tile.load(A[tile_m:tile_m+16, k:k+8]), tile.load(B[k:k+8, tile_n:tile_n+8])
        acc = tile.dot(a, b, acc)
    tile.store(C[tile_m:tile_m+16, tile_n:tile_n+8], acc)
""")["k"]
    c = np.zeros((19, 23), np.float64 if out == "f64" else np.float32)
    k(a, b, c)
    want = np.asarray(a.numpy(), np.float64) @ np.asarray(b.numpy(), np.float64)
    assert_close(c, want, dtype="f32", n=21)


def test_dot_outside_of_kernels_is_matmul(rng):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (4, 5)))
    assert_close(np.asarray(ts.tile.dot(a, b)), a.astype(np.float64) @ b, dtype="f32", n=4)
    with pytest.raises(ts.TraceError, match="only inside a @ts.kernel"):
        ts.tile.exp(a)


def test_integer_dot_accumulates_in_int32(rng):
    a, b = rng.integers(-128, 128, (9, 20)), rng.integers(-128, 128, (20, 7))
    k = build("""@kernel
def k(A: Tensor["M", "K", int8], B: Tensor["K", "N", int8], C: Tensor["M", "N", i32]):
    c = tile.dot(tile.load(A[0:16, 0:32]), tile.load(B[0:32, 0:8]))
    tile.store(C[0:16, 0:8], c)
""")["k"]
    c = np.zeros((9, 7), np.int32)
    k(a.astype(np.int8), b.astype(np.int8), c)
    assert np.array_equal(c, a @ b)


WARP = {
    "tile.warp_sum(v)": lambda w: np.full(32, w.sum()),
    "tile.warp_max(v)": lambda w: np.full(32, w.max()),
    "tile.warp_min(v)": lambda w: np.full(32, w.min()), "tile.warp_scan(v)": np.cumsum,
    "tile.shuffle(v, 5)": lambda w: np.full(32, w[5]), "tile.shuffle_xor(v, 3)": lambda w: w[
        np.arange(32) ^ 3],
    "tile.shuffle_down(v, 4)": lambda w: np.concatenate([w[4:], w[28:]]),
    "tile.shuffle_up(v, 4)": lambda w: np.concatenate([w[:4], w[:28]]),
    "1.0 if tile.vote_any(v > 20.0) else 0.0": lambda w: np.full(32, float((w > 20).any())),
    "1.0 if tile.vote_all(v > -1.0) else 0.0": lambda w: np.full(32, float((w > -1).all())),
    "1.0 * tile.popcount(tile.ballot(v > 1.0))": lambda w: np.full(32, float((w > 1).sum())),
}


@pytest.mark.parametrize("text", list(WARP))
def test_warp_collectives(text, rng):
    x = rng.standard_normal(128).astype(np.float32)
    k = build(f"""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    i = tile.linear_id()
    v = x[i]
    y[i] = {text}
""")["k"]
    y = np.zeros_like(x)
    k(x, y)
    want = np.concatenate([WARP[text](x[s:s + 32].astype(np.float64)) for s in range(0, 128, 32)])
    assert_close(y, want, dtype="f32", n=32)


@pytest.mark.parametrize("shape", [(1, 128), (128, 1), (1, 1), (4, 128)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("value", ["tile.load(A[tile_m:tile_m+{0}, 0:{1}])",
                                   "tile.full({2}, 2.0) + tile.load(A[tile_m:tile_m+{0}, 0:{1}])"])
def test_row_statistics_of_tiles_with_extents_of_one(shape, groups, value, rng):
    m, n = shape
    k = build(f"""@kernel
def k(A: Tensor["M", "N", f32], Y: Tensor["M", "N", f32]):
    x = {value.format(m, n, shape)}
    top = tile.row_max(x)
    p = tile.exp(x - tile.row_max(x))
    Y[tile_m:tile_m+{m}, 0:{n}] = (x - top) + p / tile.row_sum(p)
""")["k"]
    a = rng.standard_normal((groups * m, n)).astype(np.float32)
    y = np.full_like(a, np.nan)
    k(a, y)
    x = a.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    want = x - x.max(1, keepdims=True) + p / p.sum(1, keepdims=True)
    assert_close(y, want, dtype="f32", n=n, scale=8.0)


ATOMICS = {"atomic_add": np.add, "atomic_max": np.maximum, "atomic_min": np.minimum,
           "atomic_and": np.bitwise_and, "atomic_or": np.bitwise_or, "atomic_xor": np.bitwise_xor}


@pytest.mark.parametrize("name", sorted(ATOMICS))
def test_atomics(name, rng):
    x, where = rng.integers(0, 1000, 700).astype(np.int32), rng.integers(0, 5, 700).astype(np.int32)
    k = build(f"""@kernel
def k(x: Tensor["n", i32], p: Tensor["n", i32], out: Tensor["m", i32], old: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        old[i] = tile.{name}(out, p[i], x[i], scope="system")
""")["k"]
    out = rng.integers(0, 1000, 5).astype(np.int32)
    want = out.copy()
    ATOMICS[name].at(want, where, x)
    k(x, where, out, np.zeros_like(x))
    assert np.array_equal(out, want)


def test_atomics_return_what_was_there(rng):
    k = build("""@kernel
def k(out: Tensor["m", i32], old: Tensor["n", i32], won: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        old[i] = tile.atomic_add(out, 0, 1)
        won[i] = tile.atomic_cas(out, 1, 0, i + 1)
        tile.atomic_exchange(out, 2, 9)
""")["k"]
    out, old, won = np.zeros(3, np.int32), np.zeros(300, np.int32), np.zeros(300, np.int32)
    k(out, old, won)
    assert out[0] == 300 and sorted(old) == list(range(300))
    assert (won == 0).sum() == 1 and out[1] == np.argmin(won != 0) + 1 and out[2] == 9


@pytest.mark.row("TILE-57", "TILE-58")
def test_online_softmax_with_masked_rows(rng):
    s = rng.standard_normal((4, 24)).astype(np.float32)
    s[1] = -np.inf
    v = rng.standard_normal((24, 8)).astype(np.float32)
    k = build("""@kernel
def k(S: Tensor["M", "N", f32], V: Tensor["N", "D", f32], out: Tensor["M", "D", f32]):
    acc, m, l = tile.zeros((4, 8)), tile.full((4,), -math.inf), tile.zeros((4,))
    for c in range(0, N, 8):
        P, m_c, l_c = tile.softmax_online(tile.load(S[0:4, c:c+8]))
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, tile.load(V[c:c+8, 0:8]), m_c, l_c)
    tile.store(out[0:4, 0:8], acc / l)
""")["k"]
    out = np.full((4, 8), np.nan, np.float32)
    k(s, v, out)
    rows = [0, 2, 3]
    e = np.exp(s[rows].astype(np.float64) - s[rows].max(1, keepdims=True))
    assert_close(out[rows], e / e.sum(1, keepdims=True) @ v, dtype="f32", n=24)
    assert not out[1].any()  # no key at all: 0, not NaN


def test_dropout_does_not_depend_on_the_tiling(rng):
    x = np.ones((50, 70), np.float32)
    results = []
    for rows, cols in ((8, 16), (16, 8), (50, 70)):
        k = build(f"""@kernel
def k(X: Tensor["M", "N", f32], Y: Tensor["M", "N", f32]):
    t = tile.load(X[tile_m:tile_m+{rows}, tile_n:tile_n+{cols}])
    tile.store(Y[tile_m:tile_m+{rows}, tile_n:tile_n+{cols}], tile.dropout(t, 0.3, seed=7))
""")["k"]
        y = np.zeros_like(x)
        k(x, y)
        results.append(y)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    kept = results[0] != 0
    assert abs(kept.mean() - 0.7) < 0.05 and np.allclose(results[0][kept], 1 / 0.7)


def test_random_bits_are_those_of_numerics():
    k = build("""@kernel
def k(out: Tensor["n", ts.uint32]):
    i = tile.linear_id()
    if i < n:
        out[i] = tile.random_bits(i, seed=11)
""")["k"]
    out = np.zeros(333, np.uint32)
    k(out)
    assert np.array_equal(out, ts.numerics.random_bits(11, 333))


def test_stochastic_rounding_on_a_store(rng):
    k = build("""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", bf16 @ts.stochastic_round]):
    i = tile.linear_id()
    if i < n:
        y[i] = x[i]
""")["k"]
    x = np.full(20000, 1 + 2.0**-9, np.float32)
    y = np.zeros(20000, ml_dtypes.bfloat16)
    k(x, y)
    assert abs(y.astype(np.float64).mean() - (1 + 2.0**-9)) < 2e-4 and len(np.unique(y)) == 2


def test_no_submodule_hides_an_op():
    hidden = [n for n, op in OPS.items() if op.public and getattr(ts.tile, n) is not op]
    assert not hidden


def test_every_op_is_documented():
    assert all(op.doc and op.doc[0] for op in OPS.values())
    assert len([op for op in OPS.values() if op.public]) > 100


def test_the_op_of_arrays_called_tile_still_works():
    assert np.array_equal(np.asarray(ts.tile(np.arange(3), 2)), np.tile(np.arange(3), 2))
