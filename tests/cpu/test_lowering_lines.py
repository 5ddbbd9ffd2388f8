"""What kernels do with whole lines: order, searches, running sums, positions of extrema."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways
from tessera import Tensor, bf16
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import key_merges, row_order, scans, sorting
from tessera.graph.cuda.kernels.sort_keys import KeyFormat
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tolerance import assert_close

KINDS = ["f32", "f64", "bf16", "int64", "int32", "uint8", "bool_"]


def line_of(kind, shape, rng, ties=6):
    """Numbers that tie, with NaN, infinities and both zeros among the floats."""
    x = rng.integers(0, 2 if kind == "bool_" else ties, shape).astype(np.float64)
    if kind in ("f32", "f64", "bf16"):
        special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0])
        x = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), x - 2)
    elif kind.startswith("int"):
        x -= 3
    return ts.cast(ts.tensor(x), kind)


def assert_same(made, want):
    for got, w in zip(made, want, strict=True):
        assert got.dtype == w.dtype and got.shape == w.shape
        np.testing.assert_array_equal(got.astype(np.float64), np.asarray(w).astype(np.float64))


# --- order ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("descending", [False, True])
def test_order_with_ties_and_nan(kind, descending, rng):
    x = line_of(kind, (3, 13), rng)
    assert_same(*both_ways(lambda x: (ts.argsort(x, -1, descending), ts.sort(x, 0, descending)), x))


@pytest.mark.parametrize("n", [1, 4, 5, 8, 9, 31, 33, 70])
@pytest.mark.parametrize("kind, few, merged", [("f32", 16, 4), ("f32", 0, 16), ("int8", 0, 8),
                                               ("int64", 0, 0)])
def test_long_lines_are_runs_that_are_merged(n, kind, few, merged, rng, monkeypatch):
    monkeypatch.setattr(sorting, "RUN", 4)
    monkeypatch.setattr(row_order, "RUN_WORDS", 8)
    monkeypatch.setattr(row_order, "FIRST_WORDS", 16)
    monkeypatch.setattr(row_order, "SORTED_RUN", 4)
    monkeypatch.setattr(row_order, "MOST_FIRST", few)
    monkeypatch.setattr(row_order, "MOST_OF_RUN", few)
    monkeypatch.setattr(key_merges, "MERGED", merged)
    x = line_of(kind, (3, n), rng)
    made, want = both_ways(lambda x: (ts.argsort(x), ts.argsort(x, 1, True), ts.sort(x),
                                    *ts.top_k(x, min(n, 3)), *ts.top_k(x, 1, largest=False)), x)
    assert_same(made, want)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("n", [5000, 9000])
def test_keys_of_runs_become_those_of_lines(n, descending, rng, monkeypatch):
    """Of 32 bits, of which only zeros have one for a sign, or longer than those of runs."""
    monkeypatch.setattr(row_order, "RUN_WORDS", 1024)
    monkeypatch.setattr(row_order, "FIRST_WORDS", 1024)
    x = line_of("f16", (2, n), rng)
    made, want = both_ways(lambda x: (ts.argsort(x, -1, descending), ts.sort(x, -1, descending),
                                    *ts.top_k(x, 3, -1, descending)), x)
    assert_same(made, want)
    signs = [np.signbit(y.astype(np.float64))[y == 0] for y in (made[1], want[1])]
    np.testing.assert_array_equal(*signs)


@pytest.mark.parametrize("kind, n, placed, words", [
    ("bf16", 65536, True, 1), ("bf16", 65537, True, 2), ("bf16", 1 << 27, False, 1),
    ("f16", 8192, True, 1), ("f16", 8193, True, 2), ("f32", 1 << 21, False, 1),
    ("f32", (1 << 21) + 1, False, 2), ("f32", 1, True, 1), ("int32", 1 << 27, False, 1),
    ("uint32", 2, True, 2), ("int8", 1 << 24, True, 1), ("int8", (1 << 24) + 1, True, 2)])
def test_keys_of_32_bits(kind, n, placed, words):
    """Where it takes that, only zeros have a sign, and of sorted values a position."""
    f = KeyFormat(getattr(ts, kind), n, False, placed)
    assert f.words == words


def test_a_long_line_takes_a_merge_for_each_doubling():
    def kinds(dtype, n, fn=ts.argsort):
        program = CudaProgram(ts.jit(fn).graph(ts.Tensor[n, dtype]))
        return [g.kind for g in program.plan.groups]

    assert kinds(ts.f64, 20000) == ["sort", "merge", "merge", "merge"]
    assert kinds(ts.f32, 20000) == ["order", "merge_cuts", "merge_keys", "merge_cuts", "merge_keys"]
    assert kinds(ts.bf16, 16384, ts.sort) == ["order"]


@pytest.mark.parametrize("n, k, groups", [(100, 8, 1), (2048, 64, 1), (4096, 64, 2),
                                          (4097, 8, 2), (1 << 22, 8, 3), (100, 100, 1),
                                          (1 << 17, 50, 3)])
def test_the_first_of_a_line_are_taken_from_runs(n, k, groups):
    """And what they are comes along: nothing is picked afterwards."""
    program = CudaProgram(ts.jit(lambda x: ts.top_k(x, k)).graph(ts.Tensor[3, n, ts.bf16]))
    assert [g.kind for g in program.plan.groups] == ["order"] * groups


KEYED = [*KINDS, "f16", "fp8_e4m3", "fp8_e5m2", "int8", "int16", "uint16", "uint32"]


@pytest.mark.parametrize("kind", KEYED)
@pytest.mark.parametrize("descending", [False, True])
def test_sorted_elements_are_those_that_were_there(kind, descending, rng):
    """Zeros keep their sign and places, extremes their number."""
    x = line_of(kind, (4, 37), rng)
    dtype = x.dtype
    if dtype.kind in ("int", "uint"):
        ends = np.array([dtype.min, dtype.max])[rng.integers(0, 2, x.shape)]
        x = ts.tensor(np.where(rng.random(x.shape) < 0.2, ends, x.array).astype(x.array.dtype))
    made, want = both_ways(lambda x: (ts.sort(x, -1, descending), *ts.top_k(x, 5, -1, descending),
                                    ts.argsort(x, 0, descending), ts.sort(x, 0, descending)), x)
    assert_same(made, want)
    for got, w in ((made[0], want[0]), (made[4], want[4])):
        if dtype.kind == "float":
            got, w = got.astype(np.float64), w.astype(np.float64)
            np.testing.assert_array_equal(np.signbit(got)[got == 0], np.signbit(w)[w == 0])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_order_of_nothing(shape):
    assert_same(*both_ways(lambda x: ts.argsort(x, 0), np.zeros(shape, np.float32)))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9])
def test_searches(side, n, rng):
    line = np.sort(rng.integers(0, 5, n).astype(np.float32))
    values = np.array([-1, 0, 1.5, 2, 4, 9, np.nan, np.inf], np.float32)
    assert_same(*both_ways(lambda a, b: ts.searchsorted(a, b, side), line, values))


# --- positions and reductions -----------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape, axis", [((3, 13), 1), ((5, 7), 0), ((2, 9, 3), 1), ((1, 1), 0)])
def test_positions_of_extrema(kind, shape, axis, rng):
    x = line_of(kind, shape, rng)
    assert_same(*both_ways(lambda x: (ts.argmax(x, axis), ts.argmin(x, axis)), x))


def test_positions_in_lines_longer_than_a_block(rng):
    x = rng.integers(0, 50, (2, 70_000)).astype(np.float32)
    x[1, 69_000] = np.nan
    assert_same(*both_ways(lambda x: (ts.argmax(x, 1), ts.argmin(x, 1)), x))


def test_positions_in_columns_longer_than_a_block(rng):
    """Of places of a block, each with the first that it saw, the first of all wins."""
    x = rng.integers(0, 9, (2, 1030, 5)).astype(np.float32)
    x[1, [700, 130], 2], x[0, :, 3] = np.nan, -np.inf
    assert_same(*both_ways(lambda x: (ts.argmax(x, 1), ts.argmin(x, 1)), x))


def test_positions_are_looked_for_where_elements_are_narrow():
    f = ts.jit(lambda x: ts.argmax(x, axis=-1))
    made = f.schedule(Tensor[64, 512, bf16], target="sm_90a")
    assert len(made.launches) == 1 and made.launches[0].kernel == "g0_argmax"


@pytest.mark.parametrize("axis", [0, 1, (0, 2), None])
def test_any_and_all(axis, rng):
    x = rng.random((3, 5, 2)) < 0.6
    assert_same(*both_ways(lambda x: (ts.any(x, axis), ts.all(x, axis, keepdims=True)), x))


@pytest.mark.parametrize("shape, axis", [((0,), 0), ((3, 0), 1), ((0, 3), 0), ((2, 0, 3), (0, 1))])
def test_reductions_of_nothing(shape, axis):
    made = both_ways(lambda x: (ts.sum(x, axis), ts.prod(x, axis), ts.any(x > 0, axis),
                              ts.all(x > 0, axis)), np.zeros(shape, np.float32))
    assert_same(*made)


# --- running sums and their kin ---------------------------------------------------------------
RUNNING = {
    "cumsum": ts.cumsum, "cumprod": ts.cumprod, "cummax": ts.cummax, "cummin": ts.cummin,
    "logcumsumexp": ts.logcumsumexp,
    "linear_recurrence": lambda x, axis: ts.linear_recurrence(x, ts.flip(x, axis), axis),
}


@pytest.fixture(params=["thread", "group", "segments"])
def form(request, monkeypatch):
    """All forms, on lines that are longer than a block, or than a round of segments. Sums and
    products of rows of memory have a form of their own."""
    monkeypatch.setattr(scans, "BLOCK", 8)
    monkeypatch.setattr(scans, "ROW_BLOCK", 16)
    monkeypatch.setattr(scans, "SEGMENT", 3 if request.param == "segments" else 1000)
    monkeypatch.setattr(scans, "FEW_COLUMNS", 2)
    monkeypatch.setattr(scans, "SHARERS", 4)
    if request.param != "thread":
        monkeypatch.setattr(scans, "SHORT", 0)
    return request.param


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("shape, axis", [((29,), 0), ((3, 1), 1), ((2, 17, 3), 1), ((9, 2), 0)])
def test_running(name, shape, axis, form, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    program = CudaProgram(ts.jit(lambda x: RUNNING[name](x, axis)).graph(x))
    (scan,) = (g for g in program.plan.groups if g.kind == "scan")
    rows = name in ("cumsum", "cumprod") and axis == len(shape) - 1
    segments = form == "segments" and axis < len(shape) - 1
    own = "rows" if rows else form if segments or form == "thread" else "group"
    assert scan.attr("form") == own
    wide = RUNNING[name](ts.tensor(x.astype(np.float64)), axis).array
    assert_close(program.run([x])[0], wide, "f32", n=30)


@pytest.mark.parametrize("name", sorted(RUNNING.keys() - {"logcumsumexp"}))
def test_running_down_columns(name, monkeypatch, rng):
    """Segments of several columns in a thread, in rounds of which the last is not whole."""
    monkeypatch.setattr(scans, "COLUMN_WARPS", 1)
    monkeypatch.setattr(scans, "SEGMENT", 8)
    x = rng.standard_normal((1, 600, 4)).astype(np.float32)
    program = CudaProgram(ts.jit(lambda x: RUNNING[name](x, 1)).graph(x))
    (scan,) = (g for g in program.plan.groups if g.kind == "scan")
    assert scan.attr("form") == "columns" and 600 > scan.attr("length") * scan.schedule.m
    wide = RUNNING[name](ts.tensor(x.astype(np.float64)), 1).array
    assert_close(program.run([x])[0], wide, "f32", n=600)


def test_what_a_scan_alone_reads_is_made_in_it(rng):
    """Down columns: a decay that is computed was written and read again."""
    a, b = rng.standard_normal((2, 64, 12)).astype(np.float32)
    v = rng.standard_normal(12).astype(np.float32)

    def decayed(a, b, v):
        return ts.linear_recurrence(ts.sigmoid(a) * 0.5, b * b + a, axis=0)

    def twice(a, b, v):
        return ts.cumsum(a * b, 0), a * b

    def along(a, b, v):
        return ts.cumsum(a * v, 0)

    def known(a, b, v):
        return ts.linear_recurrence(ts.full((64, 12), 0.5), a * 2.0, axis=0)

    for fn, kinds in ((decayed, ["scan"]), (twice, ["loop", "scan"]), (along, ["loop", "scan"]),
                      (known, ["scan"])):
        program = CudaProgram(ts.jit(fn).graph(a, b, v))
        assert [g.kind for g in program.plan.groups] == kinds
        for got, want in zip(*both_ways(fn, a, b, v), strict=True):
            assert_close(got, want, "f32", n=64)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 100)])
def test_a_loop_between_two_scans_is_part_of_one(shape, rng):
    def twice(x):
        y = ts.cumsum(ts.cumsum(x * 0.125, -1) * 0.5, -1)
        return y, ts.sum(y, axis=-1)

    x = ts.tensor(rng.standard_normal(shape).astype(np.float32))
    program = CudaProgram(ts.jit(twice).graph(x), "sm_90a")
    for got, want in zip(program.run([x.array]), twice(x), strict=True):
        assert_close(got, np.asarray(want.array, np.float64), "f32", n=100)


def test_recurrences_of_infinite_factors_down_columns(rng):
    a, b = rng.choice([0, 1, -1, 0.5, np.inf], (64, 4)), rng.choice([0.0, 1, -1], (64, 4))
    a[3:] = np.where(np.isinf(a[3:]) & (rng.random((61, 4)) < 0.8), 1, a[3:])
    program = CudaProgram(ts.jit(ts.linear_recurrence).graph(a, b))
    assert program.plan.groups[0].attr("form") == "columns"
    want = np.asarray(ts.linear_recurrence(a, b).array)
    assert_close(program.run([a, b])[0], want, "f64", n=64, scale=8)


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
@pytest.mark.parametrize("kind", ["int32", "int64", "uint8", "f64", "bf16"])
def test_running_types(name, kind, form, rng):
    x = ts.cast(ts.tensor(rng.integers(1, 3, (2, 11))), kind)
    (got,), (want,) = both_ways(lambda x: RUNNING[name](x, 1), x)
    assert got.dtype == want.dtype
    assert_close(got, want, kind, n=11)
    (got,), _ = both_ways(lambda x: RUNNING[name](x, 0), ts.transpose(x))
    assert_close(got.T, want, kind, n=11)


def test_sums_of_stored_numbers_are_one_kernel(rng):
    """Read and written in 16 bits, unless something else reads them in 32, or saturates."""
    x = ts.cast(ts.tensor(rng.standard_normal((3, 70)).astype(np.float32)), "bf16")
    (got,), (want,) = both_ways(lambda x: ts.cumsum(x, 1), x)
    assert_close(got, want, "bf16", n=70)

    def kinds(fn):
        return [g.kind for g in CudaProgram(ts.jit(fn).graph(x)).plan.groups]

    def wide(x):
        return ts.cumsum(ts.cast(x, "f32"), 1)

    assert kinds(lambda x: ts.cumsum(x, 1)) == kinds(wide) == ["scan"]
    assert kinds(lambda x: (wide(x), ts.cast(wide(x), "bf16"))) == ["scan", "loop"]
    assert kinds(lambda x: ts.cast(wide(x), "f16 @saturate")) == ["scan", "loop"]
    assert kinds(lambda x: ts.cumsum(x, 0)) == kinds(lambda x: ts.logcumsumexp(x, 0)) == ["scan"]
    (got,), (want,) = both_ways(lambda x: ts.cumsum(x, 0), x)
    assert_close(got, want, "bf16", n=3)
    for axis in (0, 1):
        assert kinds(lambda x, a=axis: ts.cumprod(x, a)) == ["loop", "scan"]  # made in f32


@pytest.mark.parametrize("n", [17, 40])
def test_running_sums_of_rows_of_several_blocks(n, rng, monkeypatch):
    monkeypatch.setattr(scans, "ROW_BLOCK", 16)
    x = rng.standard_normal((5, n))
    x[1, 3], x[2, 20 % n], x[2, 16] = np.inf, np.nan, -np.inf
    made, want = both_ways(lambda x: (ts.cumsum(x, 1), ts.cumprod(x, 1)), x)
    for got, w in zip(made, want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-12, atol=1e-12)


def test_running_extrema_of_nan_and_ties(form, rng):
    x = line_of("f32", (4, 23), rng)
    assert_same(*both_ways(lambda x: (ts.cummax(x, 1), ts.cummin(x, 1)), x))
    assert_same(*both_ways(lambda x: (ts.cummax(x, 0), ts.cummin(x, 0)), ts.transpose(x)))


def test_running_sums_of_infinities(form):
    inf = np.inf
    x = np.array([[-inf, -inf, 1, inf, 2], [-inf, 0, 0, -inf, np.nan]], np.float32)
    (got,), (want,) = both_ways(lambda x: ts.logcumsumexp(x, 1), x)
    assert_close(got, want, "f32", n=5)
    first = np.array([np.nan, 0.5, inf, 2], np.float32)  # nothing stands before the first element
    (got,), (want,) = both_ways(lambda a: ts.linear_recurrence(a, np.ones(4, np.float32)), first)
    np.testing.assert_array_equal(got, want)


def test_recurrences_of_infinite_factors(form, rng):
    """Where 0 meets an infinite factor it is NaN, behind what overflows it is what was there."""
    inf, f = np.inf, np.float32
    a = np.array([[2, inf, 1, 1, 1, 1], [1, 1, 0, 1, inf, 2], [1e38, 1e38, 1e38, 1e38, 1e38, 1e38],
                  [1, 1, inf, 1, 0, 1], [inf, 2, inf, 3, 1, 1]], f)
    b = np.array([[0, 1, 2, 3, 4, 5], [1, 2, 0, 0, 1, 1], [0, 0, 0, 0, 0, 3], [0, 1, 1, 0, 2, 0],
                  [0, 1, 2, 3, 4, 5]], f)
    (got,), (want,) = both_ways(lambda a, b: ts.linear_recurrence(a, b, axis=1), a, b)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(want[0, 1]) and want[2, 5] == 3 and want[4, 2] == inf
    a, b = rng.choice([0, 1, -1, 0.5, inf], (40, 30)), rng.choice([0, 1, -1], (40, 30))
    a[:, 3:] = np.where(np.isinf(a[:, 3:]) & (rng.random((40, 27)) < 0.8), 1, a[:, 3:])
    (got,), (want,) = both_ways(lambda a, b: ts.linear_recurrence(a, b, axis=1), a.astype(f),
                              b.astype(f))
    assert_close(got, want, "f32", n=30, scale=8)
    (got,), _ = both_ways(lambda a, b: ts.linear_recurrence(a, b, axis=0), a.T.astype(f).copy(),
                        b.T.astype(f).copy())
    assert_close(got.T, want, "f32", n=30, scale=8)
    assert np.isnan(want).sum() > 100 and np.isfinite(want).sum() > 100


@pytest.mark.parametrize("shape, axis", [((40,), 0), ((3, 21), 1), ((21, 2), 0), ((2, 19, 3), 1)])
def test_sums_at_places_of_long_lines(shape, axis, monkeypatch, rng):
    """The gradient of a sort, and of reads that repeat and leave out places."""
    monkeypatch.setattr(sorting, "LONG_LINE", 4)
    x = rng.standard_normal(shape).astype(np.float32)
    ids = rng.choice([0, 3, -1, 5], shape)

    def gradients(x, ids):
        return (ts.grad(lambda x: ts.sum(ts.sort(x, axis) ** 3))(x),
                ts.grad(lambda x: ts.sum(ts.take_along_axis(x, ids, axis) * x))(x))

    for got, want in zip(*both_ways(gradients, x, ids), strict=True):
        assert_close(got, want, "f32", n=20)
    made = CudaProgram(ts.jit(gradients).graph(ts.tensor(x), ts.tensor(ids)))
    assert {"sort", "scan", "search"} <= {g.kind for g in made.plan.groups}


def test_sums_at_places_of_integers(monkeypatch, rng):
    monkeypatch.setattr(sorting, "LONG_LINE", 4)
    x, ids = rng.integers(0, 99, (2, 9)), rng.integers(0, 5, (2, 9))
    add = OPS["add_along"]
    (got,), (want,) = both_ways(lambda x, i: apply(add, x, i, axis=1, extent=5), x, ids)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axis", [0, 1])
def test_one_place_of_a_line_is_elementwise(axis, rng):
    """A label's cotangent is made where it is read: by the kernel of the loss's gradient alone."""
    x, ids = rng.standard_normal((6, 6)).astype(np.float32), rng.integers(-6, 6, 6)
    ids = np.expand_dims(ids, axis)

    def gradient(x, ids):
        return ts.grad(lambda x: ts.sum(ts.take_along_axis(ts.log_softmax(x, axis), ids, axis)))(x)

    (got,), (want,) = both_ways(gradient, x, ids)
    assert_close(got, want, "f32", n=6)
    program = CudaProgram(ts.jit(gradient).graph(x, ids))
    assert "elements" not in {g.kind for g in program.plan.groups}
    with pytest.raises(Exception, match="an index is outside of -6..5"):
        program.run([x, ids + 12])


@pytest.mark.parametrize("fn, kind, number", [
    (lambda x: ts.cumprod(x, 1), "uint8", 3), (lambda x: ts.cumsum(x, 1), "int8", 100),
    (lambda x: ts.segment_sum(x, ts.tensor([0, 1, 0]), 2), "int8", 100),
    (lambda x: ts.segment_sum(x, ts.tensor([0, 1, 0]), 2), "uint16", 40000)])
def test_sums_of_narrow_integers_wrap(fn, kind, number):
    x = ts.full((3, 11), number, kind)
    assert_same(*both_ways(fn, x))


@pytest.mark.parametrize("axis", [0, 1])
def test_one_number_all_along_a_line(axis, form, rng):
    """A decay that does not change, or a term; so is the cotangent of a sum."""
    x = rng.standard_normal((11, 19)).astype(np.float32)
    for fn in (lambda x: ts.linear_recurrence(ts.full_like(x, 0.9), x, axis),
               lambda x: ts.linear_recurrence(ts.sigmoid(x), ts.ones_like(x), axis),
               ts.grad(lambda x: ts.sum(ts.cumprod(x, axis)))):
        (got,), (want,) = both_ways(fn, x)
        assert_close(got, want, "f32", n=20)


def test_known_sums_of_16_bits_are_those_of_the_graph():
    """They were folded in bf16, in which 256 + 1 is 256."""
    (got,), (want,) = both_ways(lambda x: x + ts.cumsum(ts.ones(600, "bf16"), 0), np.float32(0))
    np.testing.assert_array_equal(got, want)
    assert got[-1] == 600.0


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_lines_of_one_element(shape):
    """Nothing stands beside it: where it is padded everything is known."""
    x = np.full(shape, 0.7, np.float32)
    for fn in (ts.cumprod, ts.logcumsumexp, ts.prod, lambda x, axis: ts.diff(x, axis=axis),
               lambda x, axis: ts.linear_recurrence(x * 2, x, axis)):
        slope = ts.grad(lambda x, fn=fn: ts.sum(ts.sin(fn(x, len(shape) - 1))))
        (got,), (want,) = both_ways(slope, x)
        assert_close(got, want, "f32", n=4)


def test_norms_of_rows_of_nothing():
    (got,), (want,) = both_ways(lambda x: ts.rmsnorm(x, ts.ones(0)), np.zeros((3, 0), np.float32))
    assert_same([got], [want])
