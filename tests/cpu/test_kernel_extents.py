"""Expressions of extents: wherever an extent may stand, so may what is computed from it."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera import Tensor, bf16, f32

tile = ts.tile
EXPRESSIONS = {
    "D // 2": lambda D: D // 2, "2 * D": lambda D: 2 * D, "D - 1": lambda D: D - 1,
    "max(D, 4)": lambda D: max(D, 4), "min(D, 4)": lambda D: min(D, 4),
    "tile.cdiv(D, 3)": lambda D: -(-D // 3), "x.shape[0] // 2": lambda D: D // 2,
    "len(x) - 2": lambda D: D - 2, "1 << (D - 1).bit_length()": lambda D: 1 << (D - 1).bit_length(),
    "D % 5 + 1": lambda D: D % 5 + 1, "abs(3 - D)": lambda D: abs(3 - D),
    "half(D)": lambda D: D // 2,
}
PLACES = {
    "arange": "y[0:{0}] = tile.cast(tile.arange(0, {0}), f32)",
    "arange of one": "y[0:{0}] = tile.cast(tile.arange({0}), f32)",
    "zeros": "y[0:{0}] = tile.zeros(({0},)) + tile.cast(tile.arange({0}), f32)",
    "slice": "y[0:{0}] = tile.load(z[0:{0}])",
    "offset": "y[{0}:{0} + 1] = tile.load(z[0:1])",
    "shared": "s = tile.alloc_shared(({0},), f32)\n    s[0:{0}] = tile.load(z[0:{0}])\n"
              "    tile.barrier()\n    y[0:{0}] = tile.load(s)",
    "range": "for i in range({0}):\n        y[i] = z[i]",
}
HEAD = """
def half(n):
    return n // 2

@kernel
def k(x: Tensor["D", f32], z: Tensor["Z", f32], y: Tensor["Y", f32]):
    """


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_everywhere(expression, place):
    from kernels.build import build

    kernel = build(HEAD + PLACES[place].format(f"({expression})"))["k"]
    z = np.arange(40, dtype=np.float32)
    for D in (7, 16):
        n, y = EXPRESSIONS[expression](D), np.full(40, -1, np.float32)
        kernel(np.zeros(D, np.float32), z, y)
        want = np.full(40, -1, np.float32)
        at = slice(n, n + 1) if place == "offset" else slice(0, n)
        want[at] = z[:at.stop - at.start]
        assert np.array_equal(y, want), (D, n)


@ts.kernel
def swapped(x: Tensor["2*E", f32], y: Tensor["2*E", f32]):
    y[0:E] = tile.load(x[E:2 * E])
    y[E:2 * E] = tile.load(x[0:E]) * 2.0


@ts.kernel
def rotated(x: Tensor["S", "2*H", bf16], c: Tensor["S", "H", f32], y: Tensor["S", "2*H", bf16]):
    for row in tile.range(0, S, 4):
        a = tile.load(x[row:row + 4, 0:H])
        b = tile.load(x[row:row + 4, H:2 * H])
        t = tile.load(c[row:row + 4, 0:H])
        y[row:row + 4, 0:H] = tile.cast(a * t - b, bf16)
        y[row:row + 4, H:2 * H] = tile.cast(b * t + a, bf16)


@ts.kernel
def next_to(x: Tensor["N + 1", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        y[i] = x[i + 1] - x[i]


def test_names_that_only_stand_in_expressions(rng):
    for n in (8, 30):
        x = rng.standard_normal(n).astype(np.float32)
        y = np.full_like(x, np.nan)
        swapped(x, y)
        assert np.array_equal(y, np.concatenate([x[n // 2:], 2 * x[:n // 2]]))
    x, y = rng.standard_normal(301).astype(np.float32), np.zeros(300, np.float32)
    next_to(x, y)
    assert np.array_equal(y, x[1:] - x[:-1])


def test_names_of_expressions_are_checked_against_others(rng):
    import ml_dtypes

    x = rng.standard_normal((12, 32)).astype(ml_dtypes.bfloat16)
    c, y = rng.standard_normal((12, 16)).astype(np.float32), np.zeros_like(x)
    rotated(x, c, y)
    a, b = x[:, :16].astype(np.float32), x[:, 16:].astype(np.float32)
    want = np.concatenate([a * c - b, b * c + a], 1).astype(ml_dtypes.bfloat16)
    assert np.array_equal(y, want)
    with pytest.raises(ts.ShapeError, match=r"2\*H = 30 with H=15"):
        rotated(x, c[:, :15].copy(), y)


@pytest.mark.parametrize("body", ["y[0:D // 2] = tile.load(x[0:D // 2]) * 2.0",
                                  "y[D - 4:D] = tile.load(x[0:min(D, 4)])",
                                  "y[0:tile.cdiv(D, 3)] = tile.zeros((tile.cdiv(D, 3),)) + 1.0"])
def test_the_emitted_code_does_the_same(body, rng):
    from kernels.build import build

    kernel = build(f"""
@kernel
def k(x: Tensor["D", f32], y: Tensor["D", f32]):
    {body}
""")["k"]
    x = rng.standard_normal(24).astype(np.float32)
    compare(kernel, x, np.full_like(x, 7), lanes=32, target="sm_90", exact=True)


def test_names_of_expressions_in_emitted_code(rng):
    x = rng.standard_normal(24).astype(np.float32)
    compare(swapped, x, np.full_like(x, 7), lanes=32, target="sm_90", exact=True)


SCALE = np.float32(3.0)


def test_numbers_of_numpy_are_constants():
    @ts.kernel
    def k(x: Tensor["N", f32]):
        n = np.int64(8)
        x[0:n] = tile.load(x[0:n]) * np.float32(2.0) + SCALE + tile.zeros((np.int32(8),))
        if np.bool_(False):
            x[0] = 0.0

    x = np.ones(16, np.float32)
    k(x)
    assert np.array_equal(x, [5.0] * 8 + [1.0] * 8)


def test_types_in_quotes():
    assert str(Tensor["N", "float32"]) == "Tensor['N', f32]"
    assert Tensor["N", "bf16 @accum(f32)"].dtype is bf16
    assert str(Tensor["f1", "f2"]) == "Tensor['f1', 'f2']"
    with pytest.raises(ts.DTypeError, match="unknown dtype 'float33'") as caught:
        Tensor["N", "float33"]
    assert caught.value.hint == "did you mean 'float32'?"
    with pytest.raises(ts.TesseraError, match="'D // 2' is not an extent") as caught:
        Tensor["D // 2", f32]
    assert 'for a half, name it: "2*H" and "H"' in str(caught.value)
    assert caught.value.__cause__ is None


def given_number(x: Tensor["N", f32], N: ts.int32):
    x[0] = N


def given_constant(x: Tensor["2*N", f32], N=3):
    x[0] = N


def given_tensor(N: Tensor["N", f32]):
    N[0] = 3.0


@pytest.mark.parametrize("body, numbers", [(given_number, (3,)), (given_constant, ())])
def test_a_number_may_not_be_called_as_an_extent_is(body, numbers):
    with pytest.raises(ts.TesseraError, match="N is a parameter and an extent") as caught:
        ts.kernel(body)(np.zeros(8, np.float32), *numbers)
    assert caught.value.where.line == body.__code__.co_firstlineno


def test_a_tensor_may_be_called_as_an_extent_is():
    x = np.zeros(8, np.float32)
    ts.kernel(given_tensor)(x)
    assert x.tolist() == [3.0] + 7 * [0.0]


# --- one traceback, at the user's line --------------------------------------------------------
def frames(error):
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return found


def wrong_name(x: Tensor["N", f32]):
    x[0] = undefined_name  # noqa: F821


def wrong_op(x: Tensor["N", f32]):
    x[0] = tile.exp(x[0], 3)


def wrong_rule(x: Tensor["N", f32]):
    x[0:4] = tile.load(x[0:4]) + tile.zeros((5,))


def beyond(x: Tensor["N", f32]):
    x[tile.linear_id()] = 1.0


@pytest.mark.parametrize("body", [wrong_name, wrong_op, wrong_rule, beyond])
def test_errors_have_one_traceback_without_the_compilers_frames(body):
    with pytest.raises(ts.TesseraError) as caught:
        ts.kernel(body)(np.zeros(100, np.float32))
    error = caught.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    inside = [f for f in frames(error) if "/tessera/" in f]
    assert {f.rpartition("/")[2] for f in inside} <= {"kernel.py", "errors.py"}
    assert len(inside) <= 3
    assert error.where.file == __file__


@ts.kernel
def gated_backward(x: Tensor["M", "2*N", f32], g: Tensor["M", "N", f32],
                   dx: Tensor["M", "2*N", f32], BM=16, BN=64):
    a = tile.load(x[tile_m:tile_m+BM, tile_n:tile_n+BN])
    b = tile.load(x[tile_m:tile_m+BM, N+tile_n:N+tile_n+BN])
    gy = tile.load(g[tile_m:tile_m+BM, tile_n:tile_n+BN])
    dx[tile_m:tile_m+BM, tile_n:tile_n+BN] = gy * b
    dx[tile_m:tile_m+BM, N+tile_n:N+tile_n+BN] = gy * a


def test_blocks_along_a_part_of_an_axis_are_groups(rng):
    x, g = (rng.standard_normal((20, n), np.float32) for n in (256, 128))
    dx = np.full_like(x, np.nan)
    with ts.config.scope(debug=True):
        gated_backward(x, g, dx)
    assert np.array_equal(dx, np.concatenate([g * x[:, 128:], g * x[:, :128]], 1))
    assert "0:N by 64" in gated_backward.inspect_ir() and "for " not in gated_backward.inspect_ir()
    compare(gated_backward, x, g, dx, target="sm_90a")


STORED = "overwrites its elements 70 to 127"
REDUCED = "would be reduced with its elements 70 to 127"
PARTS = {
    "x[0:8, tile_n:tile_n+64] = tile.load(x[0:8, tile_n:tile_n+64]) * 2.0": STORED,
    "for n in range(0, N, 64):\n        x[0:8, n:n+64] = tile.zeros((8, 64))": STORED,
    "s[0:8] = tile.zeros((8,))\n    for n in range(0, N, 64):\n"
    "        s[0:8] = tile.load(s[0:8]) + tile.row_sum(tile.exp(tile.load(x[0:8, n:n+64])))":
        REDUCED,
    "acc = tile.zeros((8, 64))\n    for n in range(0, N, 64):\n"
    "        acc += tile.load(x[0:8, n:n+64], fill=0)\n    s[0:8] = tile.row_sum(acc)": REDUCED,
    # right: the other part comes later, ends with the tensor, is 0 or is masked
    "for n in range(0, N, 64):\n        x[0:8, n:n+64] = tile.zeros((8, 64))\n"
    "    for n in range(0, N, 64):\n        x[0:8, N+n:N+n+64] = tile.ones((8, 64))": None,
    "x[0:8, N+tile_n:N+tile_n+64] = tile.ones((8, 64))": None,
    "w[0:8, tile_n:tile_n+64] = tile.load(x[0:8, tile_n:tile_n+64])": None,
    "acc = tile.zeros((8,))\n    for n in range(0, N, 64):\n        acc += tile.row_sum(tile.load("
    "x[0:8, n:n+64]) * tile.load(w[0:8, n:n+64], fill=0))\n    s[0:8] = acc": None,
    "acc = tile.zeros((8,))\n    for n in range(0, N, 64):\n        t = tile.edge_mask(tile.load("
    "x[0:8, n:n+64]), n, N, fill=0.0)\n        acc += tile.row_sum(t)\n    s[0:8] = acc": None,
}


@pytest.mark.parametrize("body", PARTS)
def test_blocks_that_go_on_into_the_other_part_are_refused(body, rng):
    """As any launch whose extents say so; where they are multiples of the block it runs."""
    from kernels.build import build

    k = build(f"@kernel\ndef k(x: Tensor['M', '2*N', f32], w: Tensor['M', 'N', f32], "
              f"s: Tensor['M', f32]):\n    {body}\n")["k"]
    arrays = [rng.standard_normal((8, 140), np.float32), np.ones((8, 70), np.float32),
              np.zeros(8, np.float32)]
    k(np.ones((8, 256), np.float32), np.ones((8, 128), np.float32), np.zeros(8, np.float32))
    if PARTS[body] is None:
        k(*arrays)
        return
    with pytest.raises(ts.TesseraError, match=PARTS[body]) as caught:
        k(*arrays)
    assert caught.value.code == "E_EDGE" and 'Tensor[..., 2, "N"]' in caught.value.hint
    assert "n:" in caught.value.where.text


def test_a_part_that_is_followed_by_another_extent():
    @ts.kernel
    def joined(a: Tensor["N", f32], b: Tensor["K", f32], y: Tensor["N + K", f32]):
        for k in range(0, K, 8):
            y[N+k:N+k+8] = tile.load(b[k:k+8])
        for n in range(0, N, 8):
            y[n:n+8] = tile.load(a[n:n+8])

    with pytest.raises(ts.TesseraError, match=r"last block overwrites its elements 5 to 7") as e:
        joined(np.ones(5, np.float32), np.ones(9, np.float32), np.ones(14, np.float32))
    assert e.value.hint.startswith("write the part behind it in a later loop")
