"""Reductions and scans by a function of the user's, of one tile and of tuples of tiles."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from combinations import later, linear
from emulator import compare
from kernels.build import build
from tessera import Tensor, bf16, f32, int32
from tessera.tile.ir.ir import Op, walk
from tolerance import assert_close

tile = ts.tile


@ts.kernel
def first(a, b):  # neither commutes nor has it an identity
    return a


def either(a, b):
    return a | b


def times(a, b):
    """Matrices of two rows: associative, and does not commute."""
    return (a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3],
            a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3])


@ts.kernel
def rows(g: Tensor["M", "N", f32], x: Tensor["M", "N", f32], y: Tensor["M", "N", f32],
         end: Tensor["M", f32], top: Tensor["M", int32]):
    gates, t = tile.load(g[tile_m:tile_m + 2, 0:N]), tile.load(x[tile_m:tile_m + 2, 0:N])
    _, y[tile_m:tile_m + 2, 0:N] = tile.scan((gates, t), linear)
    _, end[tile_m:tile_m + 2] = tile.reduce((gates, t), linear)
    _, top[tile_m:tile_m + 2] = tile.reduce(
        (t, tile.broadcast(tile.arange(0, N)[None, :], (2, N))), later)


@pytest.mark.parametrize("n, lanes", [(1, 32), (5, 32), (16, 128), (37, 32), (200, 256),
                                      (512, 512)])
def test_recurrences_along_rows(n, lanes, rng):
    g = rng.uniform(0.5, 1.0, (5, n)).astype(np.float32)
    x = rng.standard_normal((5, n), np.float32)
    y, end, top = np.full_like(x, np.nan), np.zeros(5, np.float32), np.zeros(5, np.int32)
    compare(rows, g, x, y, end, top, lanes=lanes, target="sm_90", rtol=1e-4, atol=1e-4)
    rows(g, x, y, end, top)
    want, all_ = np.zeros(5), []
    for i in range(n):
        want = want * g[:, i].astype(np.float64) + x[:, i]
        all_.append(want)
    scale = float(np.abs(x).max())
    assert_close(y, np.stack(all_, 1), "f32", n=n, scale=scale)
    assert_close(end, want, "f32", n=n, scale=scale)
    assert np.array_equal(top, x.argmax(1))


def test_pieces_of_four_are_asked_for_across_threads(rng):
    """Each thread hands on what its four neighbours come to; and exchanges through shared memory
    take turns in two areas, so that one barrier is enough for each."""
    g = np.ones((4, 1024), np.float32)
    made = compare(rows, g, g, g.copy(), np.zeros(4, np.float32), np.zeros(4, np.int32), lanes=512,
                   target="sm_90", rtol=1e-4, atol=1e-3)
    asked = [n.outs[0].type.shape for n in walk(made.function.body)
             if isinstance(n, Op) and n.name == "exchange" and n.attr["bit"] > 1]
    assert asked and set(asked) == {(2, 256)}
    source = made.emitted.source
    assert source.count(" sync()") <= source.count(" put_") + 6  # the last elements of rows


@ts.kernel
def columns(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], end: Tensor["N", f32],
            some: Tensor["N", ts.bool_], top: Tensor["N", f32]):
    t = tile.load(x[0:M, tile_n:tile_n + 4])
    given = t, t * 0.5, 1.0 - t, t + 0.25
    y[0:M, tile_n:tile_n + 4] = tile.scan(given, times, axis=0)[1]
    end[tile_n:tile_n + 4] = tile.reduce(given, times, axis=0)[1]
    some[tile_n:tile_n + 4] = tile.reduce(t > 0.25, either, axis=0)
    top[tile_n:tile_n + 4] = tile.reduce(t, first, axis=0)


@pytest.mark.parametrize("lanes", [32, 128])
def test_products_of_matrices_along_columns(lanes, rng):
    x = rng.uniform(-0.3, 0.3, (21, 6)).astype(np.float32)
    args = np.zeros_like(x), np.zeros(6, np.float32), np.zeros(6, bool), np.zeros(6, np.float32)
    compare(columns, x, *args, lanes=lanes, target="sm_90", rtol=1e-4, atol=1e-5)
    columns(x, *args)
    wide, product, want = x.astype(np.float64), None, []
    for a in wide:
        m = np.array([[a, a * 0.5], [1 - a, a + 0.25]]).transpose(2, 0, 1)
        product = m if product is None else product @ m
        want.append(product[:, 0, 1])
    assert_close(args[0], np.array(want), "f32", n=21, scale=1.0)
    assert np.array_equal(args[1], args[0][-1])
    assert np.array_equal(args[2], (x > 0.25).any(0)) and np.array_equal(args[3], x[0])


@ts.kernel
def over_edges(x: Tensor["N", bf16], y: Tensor["N", f32], z: Tensor["N", f32],
               out: Tensor["P", f32]):
    t = tile.load(x[0:16])
    y[0:16] = tile.scan(t, add)
    z[-3:13] = tile.scan(tile.load(x[-3:13]), add, identity=0.0)
    out[0] = tile.reduce(tile.exp(t), product, identity=1.0)


def add(a, b):
    return a + b


def product(a, b):
    return a * b


def test_what_lies_beyond_the_tensor_does_not_count(rng):
    x = ts.tensor(rng.integers(-2, 3, 11).astype(np.float32), bf16)
    y, z, out = np.zeros(11, np.float32), np.zeros(11, np.float32), np.zeros(1, np.float32)
    compare(over_edges, x, y, z, out, lanes=32, target="sm_90")
    over_edges(x, y, z, out)
    want = np.cumsum(x.numpy().astype(np.float64))
    assert np.array_equal(y, want) and np.array_equal(z, want)
    assert_close(out, [np.exp(want[-1])], "f32", n=11)


def no_identity(x: Tensor["N", f32]):
    x[0] = tile.reduce(tile.load(x[0:16]), add)


def begins_before(x: Tensor["N", f32]):
    x[0:16] = tile.scan(tile.load(x[-3:13]), add)


def one_of_two(x: Tensor["N", f32]):
    t = tile.load(x[0:8])
    x[0:8] = tile.scan((t, t), add_first)[0]


def other_type(x: Tensor["N", f32]):
    x[0:8] = tile.scan(tile.load(x[0:8]), compared)


def two_shapes(x: Tensor["N", f32]):
    x[0] = tile.reduce((tile.load(x[0:8]), tile.load(x[0:4])), linear)[0]


def no_tile(x: Tensor["N", f32]):
    x[0] = tile.reduce(x[0:8], add)


def no_tiles(x: Tensor["N", f32]):
    x[0:8] = tile.scan((), linear)


def one_identity(x: Tensor["N", f32]):
    t = tile.load(x[0:16])
    x[0] = tile.reduce((t, t), linear, identity=0.0)[0]


def many_identities(x: Tensor["N", f32]):
    x[0] = tile.reduce(tile.load(x[0:16]), add, identity=(0.0,))


def no_function(x: Tensor["N", f32]):
    x[0:8] = tile.scan(tile.load(x[0:8]), 1.0)


def add_first(a, b):
    return a[0] + b[0]


def compared(a, b):
    return a < b


@pytest.mark.parametrize("body, said", [
    (no_identity, "[E_EDGE] reduce goes over the edge of a tensor"),
    (begins_before, "[E_EDGE] scan goes over the edge of a tensor"),
    (one_of_two, "the combination of two elements gives tile<8 x f32>, its operands are tile<8 x "
                 "f32>, tile<8 x f32>"),
    (other_type, "the combination of two elements gives tile<8 x bool_>"),
    (two_shapes, "reduce of tile<8 x f32>, tile<4 x f32>: they go together"),
    (no_tile, "reduce of view<8 x f32 in global>: it needs a tile"),
    (no_tiles, "scan of a tuple of 0: it needs a tile, or a tuple of tiles"),
    (one_identity, "reduce of a tuple of 2 with the identity 0.0"),
    (many_identities, "reduce of tile<16 x f32> with the identity a tuple of 1"),
    (no_function, "1.0 is not a function"),
])
def test_what_cannot_be_combined_is_told_at_its_line(body, said):
    with pytest.raises(ts.TesseraError) as err:
        ts.kernel(body)(np.ones(11, np.float32))
    assert said in str(err.value), str(err.value)
    assert "tests/cpu/test_combines.py" in err.value.where.file
    lines = range(body.__code__.co_firstlineno + 1, body.__code__.co_firstlineno + 3)
    assert err.value.where.line in lines


def apart(a, b):
    return a - b


def mean_of(a, b):
    return (a[0] + b[0]) * 0.5, b[1]


def either_flag(a, b):
    return a[0] | b[0], b[1] + (1 - b[0]) * a[1]


LAWS = {
    "subtraction": ("tile.reduce(t, apart)", r"reduce by apart: it is not associative: of 0.0, 0.0 "
                    r"and 1.0 it makes -1.0 from the left and 1.0 from the right"),
    "half sums": ("tile.scan((t, t), mean_of)[0]", "scan by mean_of: it is not associative"),
    "another's identity": ("tile.reduce(t, product, identity=0.0)",
                           r"identity=0.0 changes something: of 0.0 and 1.0 it makes 0.0"),
    "flags": ("tile.scan((tile.cast(t > 0.0, int32), t), either_flag)[1]", None),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_function_that_cannot_combine_is_told(name, rng):
    text, said = LAWS[name]
    k = build(f"""
@kernel
def k(x: Tensor[8, f32], y: Tensor[8, f32]):
    t = tile.load(x[0:8])
    y[0:8] = {text} + tile.zeros((8,))
""", apart=apart, mean_of=mean_of, product=product, either_flag=either_flag, int32=ts.int32)["k"]
    x, y = rng.standard_normal(8).astype("f"), np.zeros(8, np.float32)
    if said is None:
        k(x, y)
    else:
        with pytest.warns(RuntimeWarning, match=said):
            k(x, y)
