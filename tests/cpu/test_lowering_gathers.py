"""Kernels of take and segment_sum: the bits of the CPU, and what they refuse."""

from __future__ import annotations

import linecache
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways, lowered
from tessera.errors import UnsupportedTargetError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import integer_order, sorted_segments
from tessera.graph.cuda.launch_plan import plan_of
from tessera.graph.op import OPS
from tessera.graph.ops.gather import SEGMENT_SUM
from tessera.graph.ops.segments import SEGMENT_MAX, SEGMENT_MIN
from tessera.graph.trace import apply
from tolerance import assert_close

PICKED = {
    "one of each row": lambda x, ids: ts.take_along_axis(x, ids[:, None], 1),
    "a part": lambda x, ids: ts.dynamic_slice(x, (ids[0], ids[1]), (2, 2)),
    "windows": lambda x, ids: ts.avg_pool2d(x[None, None], 3, 2, 1),
}


@pytest.mark.parametrize("name", PICKED)
def test_the_cotangent_of_a_sum_is_where_elements_were_picked(name, rng):
    """A number everywhere, which is none outside of its extents: it was added at every place."""
    x = ts.tensor(rng.standard_normal((5, 4)), "f32")
    ids = ts.tensor(np.array([2, 0, 1, -1, 3]))
    f = ts.jit(lambda x: ts.grad(lambda x: ts.sum(PICKED[name](x, ids)))(x))
    got = CudaProgram(f.graph(x)).run([x.array])[0]
    np.testing.assert_array_equal(got, f(x).array)


def sums(axis: int, extent: int) -> Any:
    """The op itself, which keeps its sums in the type of the values."""
    return lambda u, ids: apply(SEGMENT_SUM, u, ids, axis=axis, extent=extent)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64", "fp8_e4m3", "int32", "int64"])
@pytest.mark.parametrize("shape, ids, axis, extent", [
    ((70, 24), (70,), 0, 9), ((1500, 5), (1500,), 0, 3), ((1024,), (1024,), 0, 2),
    ((2, 8, 5, 6), (8, 5), 1, 4), ((3, 7), (), 1, 4), ((300, 2, 2), (300,), 0, 1),
])
def test_sums_have_the_bits_of_the_cpu(shape, ids, axis, extent, dtype, rng):
    """Added in the order in which the slices stand, whatever the blocks."""
    drawn = 4 * rng.standard_normal(shape)
    u = ts.tensor(np.round(drawn).astype(dtype)) if dtype.startswith("int") else ts.tensor(
        drawn.astype(np.float64 if dtype == "f64" else np.float32), dtype)
    places = ts.tensor(np.asarray(rng.integers(-extent, extent, ids), np.int64))
    fn = sums(axis, extent)
    (got,) = lowered(fn, u, places).run([u.array, places.array])
    want = fn(u, places).array
    assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


def test_a_product_of_picked_rows_may_be_a_result(rng):
    """It is written down then, and its rows are read for the sums."""
    a, b, c = (ts.tensor(rng.standard_normal(s).astype(np.float32))
               for s in ((64, 128), (512, 128), (512, 128)))
    ids = ts.tensor(rng.integers(0, 64, 512))

    def fn(a, b, c, ids):
        x = ts.take(a, ids, axis=0)
        return x * b, ts.sum(x * c, axis=1)

    compiled = ts.jit(fn)
    got = CudaProgram(compiled.graph(a, b, c, ids), "sm_90a").run([a, b, c, ids])
    for y, want in zip(got, compiled(a, b, c, ids), strict=True):
        assert_close(y, want.array, "f32", n=128)


def test_blocks_leave_no_segment_out(rng):
    """Segments without ids, wide slices, several blocks of ids and columns."""
    u = ts.tensor(rng.standard_normal((2, 4200, 1030)).astype(np.float32))
    ids = ts.tensor(rng.integers(0, 40, 4200))
    fn = sums(1, 60)
    made = lowered(fn, u, ids)
    (g,) = made.plan.groups
    assert g.kind == "segments" and g.grid[-1] > 1 and g.schedule.k_ < 4200
    (got,) = made.run([u.array, ids.array])
    assert got.tobytes() == fn(u, ids).array.tobytes()
    assert not got[:, 40:].any()


@pytest.mark.parametrize("bad", [5, -6, 1 << 40])
@pytest.mark.parametrize("fn", [lambda x, i: ts.take(x, i), lambda x, i: ts.segment_sum(x, i, 5),
                                lambda x, i: x[i, 0 * i]], ids=["take", "segment_sum", "x[i, j]"])
def test_an_index_outside_is_an_error(fn, bad):
    """As on the CPU: nothing is clamped or left out."""
    x, ids = ts.ones((5, 4)), np.array([0, 4, -5, 1, 2])
    made = lowered(fn, x, ts.tensor(ids))
    made.run([x.array, ids])
    ids[3] = bad
    with pytest.raises(ts.AxisError, match=r"an index is outside of -5\.\.4") as info:
        made.run([x.array, ids])
    assert info.value.where.file == __file__ and info.value.hint == "valid: -5..4"
    with pytest.raises(ts.AxisError, match="outside"):
        fn(x, ts.tensor(ids))


def test_gathers_of_one_line_share_a_kernel_and_each_line_has_its_own():
    x, ids = ts.ones((5, 4)), ts.tensor(np.array([0, 4, -5, 1, 2]))

    def fn(x, i):
        for _ in range(3):
            x = ts.take(x, i)
        return ts.take(x, i)  # another line

    made = lowered(fn, x, ids)
    first, second, third, last = (launch.shared for launch in made.launches)
    assert first is second is third is not last
    for kernel, text in ((first, "x = ts.take(x, i)"), (last, "# another line")):
        with pytest.raises(ts.AxisError, match="an index is outside") as info:
            kernel(x.array, np.array([0, 5, 0, 0, 0]), np.zeros((5, 4), np.float32))
        assert text in linecache.getline(__file__, info.value.where.line)


def test_a_gather_is_not_fused_away_from_its_reader(rng):
    """A cast behind it is a loop of its own; one of int32 ids in front of it is none."""
    table = ts.tensor(rng.standard_normal((9, 8)).astype(np.float32), "bf16")
    ids = ts.tensor(np.array([1, 8, -1], np.int32))
    made = lowered(lambda t, i: ts.exp(ts.cast(ts.embedding(t, i), "f32")), table, ids)
    assert [g.kind for g in made.plan.groups] == ["gather", "loop"]
    assert [str(r) for r in made.plan.groups[0].reads] == ["v0: bf16[1, 9, 8]", "v1: int32[3]"]


def test_nothing_to_take_from_has_no_kernel():
    with pytest.raises(UnsupportedTargetError, match="no elements"):
        lowered(lambda x, i: ts.take(x, i), ts.zeros((0, 4)), ts.zeros(3, "int64"))


def test_nothing_taken_needs_no_kernel():
    x, ids = ts.ones((5, 4)), ts.zeros((0,), "int64")
    made = lowered(lambda x, i: ts.take(x, i), x, ids)
    (got,) = made.run([x.array, ids.array])
    assert got.shape == (0, 4) and not made.plan.groups


# --- segments and writes ----------------------------------------------------------------------
def segments(x, ids):
    return ts.segment_sum(x, ids, 5), ts.segment_max(x, ids, 5), ts.segment_min(x, ids, 5)


@pytest.mark.parametrize("kind", ["f32", "f64", "int64", "int32", "int8", "uint8", "bf16"])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 33), (0, 3)])
def test_segments_of_every_type(kind, shape, rng):
    """Of no element too: some ids stand nowhere."""
    x = ts.cast(ts.tensor(rng.integers(0, 30, shape)), kind)
    for got, want in zip(*both_ways(segments, x, rng.choice([0, 2, -1], shape[0])), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["f32", "int32", "bf16"])
def test_extrema_of_many_segments_are_those_of_runs(kind, rng):
    """Put in order once for all that ask of the same integers."""
    x = ts.cast(ts.tensor(rng.integers(-90, 90, (5000, 3))), kind)
    ids = np.array([0, *rng.integers(-300, 300, 4998) // 2 * 2, 1])
    numbers = rng.standard_normal((5000, 3)).astype(np.float32)
    numbers[7] = np.nan

    def fn(x, n, ids):
        return (ts.segment_max(x, ids, 300), ts.segment_min(n, ids, 300),
                ts.segment_sum(x, ids, 300))

    for got, want in zip(*both_ways(fn, x, numbers, ids), strict=True):
        np.testing.assert_array_equal(got, want)
    groups = Counter(g.kind for g in lowered(fn, x, ts.tensor(numbers), ts.tensor(ids)).plan.groups)
    assert groups["runs"] == 3 and groups["order"] == groups["search"] == 1
    few = lowered(lambda x, i: ts.segment_max(x, i, 9), x, ts.tensor(ids % 9))
    assert "segments" in [g.kind for g in few.plan.groups]


def test_segment_extrema_hand_nan_on(rng):
    x = np.array([1, np.nan, -np.inf, 4], np.float32)
    for got, want in zip(*both_ways(segments, x, np.array([0, 1, 1, 3])), strict=True):
        np.testing.assert_array_equal(got, want)


WRITES = {
    "rows": lambda x, i, u: ts.scatter(x, i, u),
    "columns": lambda x, i, u: ts.scatter(x, i, ts.transpose(u), axis=1),
    "one place": lambda x, i, u: ts.scatter(x, i[0], u[0]),
    "several axes": lambda x, i, u: ts.index_put(x, (i, i + 1), u[:, 0]),
    "along an axis": lambda x, i, u: ts.put_along_axis(x, ts.reshape(i, (-1, 1)) * 0 + i, 7, 1),
    "added": lambda x, i, u: ts.scatter_add(x, i, u),
    "added at several axes": lambda x, i, u: ts.index_put(x, (i, i + 1), u[:, 0], True),
    "read at several axes": lambda x, i, u: x[i, i + 1],
    "places and values that are known": lambda x, i, u: ts.scatter(x, ts.arange(3) * 2, 7),
    "a block": lambda x, i, u: ts.index_put(x, (slice(1, 3), i[3]), u[:2, 0]),
}


@pytest.mark.parametrize("kind", ["f32", "int64", "bool_"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_keep_the_last_of_repeated_places(name, kind, rng):
    if kind == "bool_" and name.startswith("added"):
        pytest.skip("adding to bools is refused")
    x = ts.cast(ts.tensor(rng.integers(0, 99, (6, 6))), kind)
    u = ts.cast(ts.tensor(rng.integers(0, 2, (6, 6)) * 55), kind)
    ids = np.array([1, -3, 1, 0, 3, 1])
    for got, want in zip(*both_ways(WRITES[name], x, ids, u), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count, extent", [
    (5000, 1), (5000, 300), (6000, 9000), (4100, 70_000)])
@pytest.mark.parametrize("block, bits", [(4096, 9), (512, 4)])
def test_integers_are_dealt_by_digits_in_their_order(count, extent, block, bits, rng, monkeypatch):
    """By as many digits as their extent needs; those that are equal keep their order."""
    monkeypatch.setattr(integer_order, "BLOCK", block)
    monkeypatch.setattr(integer_order, "DIGIT", bits)
    monkeypatch.setattr(integer_order, "run_length", lambda f, n: 1)
    x = rng.standard_normal((count, 2)).astype(np.float32)
    ids = rng.integers(-extent, extent, count)
    fn = lambda x, ids: ts.segment_sum(x, ids, extent)  # noqa: E731
    ((got,), (want,)) = both_ways(fn, x, ids)
    assert got.tobytes() == want.tobytes()
    kinds = Counter(g.kind for g in lowered(fn, ts.tensor(x), ts.tensor(ids)).plan.groups)
    digits = max(1, -(-(extent - 1).bit_length() // bits))
    assert kinds["digit_counts"] == kinds["digit_places"] == kinds["scan"] == digits


@pytest.mark.parametrize("columns", [1, 3, 8, 40, 130])
@pytest.mark.parametrize("busy", [1, 2048])
def test_segments_of_many_slices_beside_those_of_few(columns, busy, rng, monkeypatch):
    """Several segments in a group; sums of more than CHAIN slices from those of blocks, of which a
    group sees to several."""
    monkeypatch.setattr(sorted_segments, "BUSY", busy)
    ids = rng.integers(-200, 200, 9001)
    ids[rng.random(9001) < 0.5], ids[1000:1500] = 3, 7
    x = rng.standard_normal((9001, columns)).astype(np.float32)
    w = rng.standard_normal(9001).astype(np.float32)

    def fn(x, w, ids):
        return ts.segment_sum(x * w[:, None], ids, 200), ts.segment_min(x, ids, 200)

    for got, want in zip(*both_ways(fn, x, w, ids), strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "int32"])
@pytest.mark.parametrize("shape, ids, axis, extent", [
    ((20, 30, 1), (30,), 1, 40), ((6, 300, 5), (300,), 1, 4), ((3, 2, 4, 5, 3), (4, 5), 2, 7),
    ((4, 1), (1,), 1, 3), ((3, 5000), (5000,), 1, 9)])
def test_lines_read_the_slices_that_they_add(shape, ids, axis, extent, dtype, rng, monkeypatch):
    """Where the same integers pick slices of many lines they are put in order once."""
    monkeypatch.setattr(sorted_segments, "LINES", 1)
    drawn = 4 * rng.standard_normal(shape)
    u = ts.tensor(np.round(drawn).astype(dtype)) if dtype.startswith("int") else ts.tensor(
        drawn.astype(np.float64 if dtype == "f64" else np.float32), dtype)
    places = ts.tensor(rng.integers(-extent, extent, ids))
    fns = [sums(axis, extent)] + [
        lambda u, ids, op=op: apply(op, u, ids, axis=axis, extent=extent)
        for op in (SEGMENT_MAX, SEGMENT_MIN) if dtype != "bf16"]
    for fn in fns:
        made = lowered(fn, u, places)
        assert "line_runs" in [g.kind for g in made.plan.groups]
        (got,) = made.run([u.array, places.array])
        want = fn(u, places).array
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


def test_the_gradient_of_picked_elements_of_matrices_is_one_kernel_behind_the_order(rng):
    i, j = (ts.tensor(a) for a in np.tril_indices(9, -1))
    z, u = (ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((300, 9, 9), (300, 36)))
    fn = lambda z, u, i, j: ts.vjp(lambda z: z[:, i, j], z)[1](u)  # noqa: E731
    kinds = [g.kind for g in lowered(fn, z, u, i, j).plan.groups]
    assert "line_runs" in kinds and "segments" not in kinds
    ((got, *_), (want, *_)) = both_ways(fn, z, u, i, j)
    np.testing.assert_array_equal(got, want)


def test_tables_that_are_alike_are_put_in_order_side_by_side(rng):
    t = ts.tensor(rng.standard_normal((3, 500, 20)).astype(np.float32))
    ids = ts.tensor(rng.integers(0, 500, (3, 4200)))
    u = ts.tensor(rng.standard_normal((3, 4200, 20)).astype(np.float32))

    def fn(t, ids, u):
        return [ts.vjp(lambda t, n=n: t[ids[n]], t[n])[1](u[n]) for n in range(3)]

    made = lowered(fn, t, ids, u)
    assert len({g.batch for g in made.plan.groups if g.kind in ("order", "search")}) == 2
    for got, want in zip(made.run([t.array, ids.array, u.array]), ts.jit(fn)(t, ids, u),
                         strict=True):
        assert_close(got, want[0].array if isinstance(want, tuple) else want.array, "f32", n=64)


def summed_rows(t: Any, ids: Any, h: Any) -> Any:
    """Of each table several rows, summed, and their products by pairs."""
    e = ts.sum(ts.stack([t[n][ids[:, n]] for n in range(t.shape[0])], 1), 2)
    z = ts.concatenate([h[:, None], e], 1)
    return ts.mean((z @ z.mT) ** 2)


def test_rows_of_many_tables_are_summed_as_they_are_read(rng):
    """Each sum is written where the rest joins it; the tables' gradients are side by side."""
    N, V, D, B = 10, 5000, 64, 2048
    t, h = (ts.tensor(rng.standard_normal(s), "f32") for s in ((N, V, D), (B, D)))
    ids = ts.tensor(rng.integers(-V, V, (B, N, 4)))
    made = lowered(ts.value_and_grad(summed_rows, argnums=(0, 2)), t, ids, h)
    plan = plan_of(made)
    assert len(plan.launches) < 50, len(plan.launches)
    written = sum(x.work.written_bytes for x in plan.launches if x.work.part == "forward")
    assert written < 2 * 4 * B * ((N + 1) * D + (N + 1) ** 2)  # not the rows that are picked
    assert sum(np.prod(g.space) for g in made.plan.groups if g.kind == "move"
               and g.writes[0].type.dtype.name == "f32") <= 2 * h.array.size
    loss, dt, dh = made.run([t.array, ids.array, h.array])
    x, y = (np.asarray(v.array, np.float64) for v in (t, h))
    z = np.concatenate([y[:, None], np.stack([x[n][ids.array[:, n]].sum(1) for n in range(N)], 1)],
                       1)
    s = z @ z.swapaxes(1, 2)
    dz = 4 * s @ z / s.size
    want = np.zeros((N, V, D))
    for n in range(N):
        np.add.at(want[n], ids.array[:, n], dz[:, n + 1, None])
    scale = np.abs(dz).max()
    assert_close(loss, (s * s).mean(), "f32", n=64, scale=(s * s).max())
    assert_close(dt, want, "f32", n=256, scale=scale)
    assert_close(dh, dz[:, 0], "f32", n=256, scale=scale)


BAGS = {
    "repeated": (lambda t, i, d: ts.vjp(lambda t: ts.mean(t[i], axis=1), t)[1](d), (4100, 2)),
    "a part of what is repeated": (lambda t, i, d: ts.vjp(lambda t: ts.sum(
        ts.stack([t[i], t[i + 1]], 1), 2)[:, 1], t)[1](d), (2100, 2)),
    "other way round": (lambda t, i, d: ts.vjp(lambda t: ts.sum(
        ts.transpose(t[i], (1, 0, 2)), 0), t)[1](d), (1500, 3)),
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("columns", [3, 40])
def test_rows_that_are_repeated_are_summed_where_they_lie(name, columns, rng):
    """Nothing writes them down as often as they are added."""
    fn, shape = BAGS[name]
    t, d = (ts.tensor(rng.standard_normal((n, columns)).astype(np.float32))
            for n in (700, shape[0]))
    ids = ts.tensor(rng.integers(0, 699, shape))
    got, want = both_ways(fn, t, ids, d)
    assert_close(got[0], want[0], "f32", n=64)
    made = lowered(fn, t, ids, d).plan
    assert max(np.prod(o.shape) for g in made.groups for o in (*g.reads, *g.writes)
               if o.type.dtype.name == "f32") <= max(700, 2 * shape[0]) * columns


FEW_WRITES = {
    "rows": lambda x, i, u: ts.scatter(x, i, u),
    "columns": lambda x, i, u: ts.scatter(ts.transpose(x), i, ts.transpose(u), axis=1),
    "several axes": lambda x, i, u: ts.index_put(x, (i, i % 5), u[:, 0]),
    "along an axis": lambda x, i, u: ts.put_along_axis(
        x, ts.reshape(i, (1, -1)), ts.transpose(u[:, :1]), 0),
    "into zeros": lambda x, i, u: ts.scatter(ts.zeros(x.shape, x.type), i, u),
    "one number": lambda x, i, u: ts.scatter(x, i, 7),
    "of what it is written into": lambda x, i, u: ts.scatter(x, i, x[:6]),
}


@pytest.mark.parametrize("kind", ["f32", "int64", "bool_"])
@pytest.mark.parametrize("name", FEW_WRITES)
def test_of_few_places_no_others_are_looked_at(name, kind, rng):
    """The last of repeated ones stays; beside a copy of what was there."""
    x = ts.cast(ts.tensor(rng.integers(0, 99, (90, 6))), kind)
    u = ts.cast(ts.tensor(rng.integers(0, 2, (6, 6)) * 55), kind)
    given = x, ts.tensor(np.array([1, -3, 1, 0, 88, 1])), u
    for got, want in zip(*both_ways(FEW_WRITES[name], *given), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    kinds = [g.kind for g in lowered(FEW_WRITES[name], *given).plan.groups]
    assert "write_places" in kinds, kinds


def test_few_places_are_written_where_a_donated_array_lies(rng):
    """No copy is made of what nobody reads again; what is read again is not written over."""
    cache, rows = (ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((90, 6), (3, 6)))
    ids = ts.tensor(np.array([4, 80, 4]))
    step = lambda cache, i, u: ts.scatter(cache, i, u)  # noqa: E731
    read = lambda cache, i, u: ts.scatter(cache, i, u) * cache  # noqa: E731
    for fn, donate, launches in ((step, (0,), 1), (step, (), 2), (read, (0,), 2)):
        made = CudaProgram(ts.jit(fn).graph(cache, ids, rows), donated=donate)
        groups = [g for g in made.plan.groups if g.kind == "write_places"]
        assert len(groups) == launches
        (got,) = made.run([np.array(cache.array), ids.array, rows.array])
        np.testing.assert_array_equal(got, fn(cache, ids, rows).array)


def test_writing_nothing_gives_what_was_there(rng):
    x = rng.standard_normal((4, 3)).astype(np.float32)
    (got,), _ = both_ways(lambda x, i, u: ts.scatter(x, i, u) * 2.0, x, np.zeros(0, np.int64),
                        np.zeros((0, 3), np.float32))
    np.testing.assert_array_equal(got, 2 * x)


def test_a_place_outside_is_an_error_at_its_line():
    fn = lambda x, i: ts.scatter(x, i, 1.0)  # noqa: E731
    x, ids = ts.zeros((4, 3)), ts.tensor(np.array([0, 4]))
    with pytest.raises(ts.TesseraError, match="outside of -4..3"):
        lowered(fn, x, ids).run([x.array, ids.array])


@pytest.mark.parametrize("shape, size", [((7,), (3,)), ((4, 6), (2, 3)), ((4, 6), (4, 1))])
def test_a_block_is_written_over_an_operand_that_nobody_reads_again(shape, size, rng):
    """The rest of the operand is not moved."""
    x, u = (rng.standard_normal(s).astype(np.float32) for s in (shape, size))
    starts = np.array([n - m for n, m in zip(shape, size, strict=True)], np.int64)

    def once(x, u, starts):
        return ts.dynamic_update_slice(ts.exp(x), u, starts) + ts.sum(u)

    def kept(x, u, starts):
        y = ts.exp(x)
        return ts.dynamic_update_slice(y, u, starts) * y

    given = [ts.tensor(a) for a in (x, u, starts)]
    for fn, kind, count in ((once, "update", 1), (kept, "elements", 1)):
        made, want = both_ways(fn, *given)
        assert_close(made[0], want[0], "f32", n=2)
        kinds = [g.kind for g in lowered(fn, *given).plan.groups]
        assert kinds.count(kind) == count, kinds


@pytest.mark.parametrize("fn, at, bounds", [
    (lambda x, i: ts.take_along_axis(x, ts.reshape(i, (1, 2)), 0), [0, 5], "-5..4"),
    (lambda x, i: ts.take_along_axis(x, ts.reshape(i, (1, 2)), 0), [-6, 0], "-5..4"),
    (lambda x, i: ts.dynamic_slice(x, i, (3, 2)), [3, 0], "0..2"),
    (lambda x, i: ts.dynamic_update_slice(x, ts.ones((5, 1)), i), [0, 2], "0..1"),
    (lambda x, i: ts.dynamic_update_slice(x * 2.0, ts.ones((5, 1)), i) + 1.0, [-1, 0], "0..0"),
    (lambda x, i: ts.grad(lambda x: ts.sum(ts.take_along_axis(x, ts.reshape(i, (1, 2)), 0)))(x),
     [0, 5], "-5..4"),
])
def test_an_index_outside_is_an_error_with_its_bounds(fn, at, bounds):
    x, ids = ts.zeros((5, 2)), ts.tensor(np.array(at))
    with pytest.raises(ts.TesseraError, match=f"outside of {bounds}"):
        lowered(fn, x, ids).run([x.array, ids.array])


@pytest.mark.parametrize("indptr", [[0, 2, 1, 4], [1, 2, 3, 4], [0, 1, 2, 3]])
def test_rows_of_a_sparse_matrix_are_checked(indptr):
    """indptr must rise from 0 to the number of values."""
    rows = ts.jit(lambda p: apply(OPS["csr_rows"], p, nnz=4))
    made = CudaProgram(rows.graph(ts.tensor(np.array([0, 1, 1, 4]))))
    np.testing.assert_array_equal(made.run([np.array([0, 1, 1, 4])])[0], [0, 2, 2, 2])
    with pytest.raises(ts.TesseraError, match="outside of"):
        made.run([np.array(indptr)])


@pytest.mark.parametrize("fn, kinds", [
    (lambda x, s, k: (x - ts.mean(x, axis=-1)[:, None]) * ts.rsqrt(
        ts.var(x, axis=-1)[:, None] + 1e-5), ["rows"]),
    (lambda x, s, k: x * ts.sqrt(ts.exp(s) + 1)[:, None], ["loop"]),
    (lambda x, s, k: ts.one_hot(k, 70), ["loop"]),
    (lambda x, s, k: (x * ts.exp(s)[:, None], ts.exp(s)), ["loop", "loop"])],  # is a result
    ids=["norm", "factor", "one_hot", "result"])
def test_numbers_of_rows_are_computed_where_rows_repeat_them(fn, kinds, rng):
    """As a launch of their own they took some microseconds, or had rows read twice."""
    x, s, k = (rng.standard_normal((37, 70)), rng.standard_normal(37), rng.integers(0, 70, 37))
    args = x.astype(np.float32), s.astype(np.float32), k.astype(np.int32)
    program = CudaProgram(ts.jit(fn).graph(*args))
    assert [g.kind for g in program.plan.groups] == kinds
    for got, want in zip(*both_ways(fn, *args), strict=True):
        assert_close(got, want, "f32", n=70)


def test_indices_are_checked_by_the_loop_that_reads_them(rng):
    k = rng.integers(0, 70, 37).astype(np.int32)
    program = CudaProgram(ts.jit(lambda k: ts.one_hot(k, 70)).graph(k))
    k[36] = 70
    with pytest.raises(ts.AxisError, match="an index is outside of 0..69"):
        program.run([k])
