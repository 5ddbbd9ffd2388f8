"""Views that kernels read and write where they lie: strides of values in buffers, what a kernel's
indices become, and the proof of a plan with them."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda.levels import emitted_of, program_of
from tessera.graph.schedule import memory_plan
from tessera.graph.schedule.layouts import StridedLayout, argument_layout
from tessera.graph.schedule.region_copies import RegionCopy
from tessera.graph.schedule.view_plan import ViewPlan
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def program(fn, *args):
    return program_of(ts.jit(fn).graph(*args), "sm_90a")



# --- strides --------------------------------------------------------------------------------------
@pytest.mark.parametrize("axes, repeats", [
    ((((4, 8),), ((8, 1),)), False), ((((4, 0),), ((8, 1),)), True),
    ((((4, -8),), ((8, 1),)), False), ((((5, 2),), ((3, 1),)), True),
    ((((1, 0),), ((8, 1),)), False), ((((2, 12), (3, 4)), ((4, 1),)), False),
    ((((2, 8), (3, 4)), ((4, 1),)), True)])
def test_elements_that_stand_in_several_places(axes, repeats):
    """Counted from what the layout is of: numbers of elements."""
    layout = StridedLayout(axes, 40)
    seen = np.array([40])
    for n, stride in itertools.chain(*axes):
        seen = (seen[:, None] + stride * np.arange(n)).ravel()
    assert layout.repeats == repeats == (len(set(seen)) < len(seen))


def _random_view(array, layout, rng):
    """One more step on an array of NumPy's and on a layout; the same array where it is no view."""
    way = rng.integers(5)
    if way == 3:  # in steps, and from the end on
        axis, step = int(rng.integers(array.ndim)), int(rng.choice([-1, 2, -2]))
        n = array.shape[axis]
        start, count = (n - 1, -(-n // -step)) if step < 0 else (0, -(-n // step))
        made = layout.part([start * (a == axis) for a in range(array.ndim)],
                           [count if a == axis else e for a, e in enumerate(array.shape)],
                           [step if a == axis else 1 for a in range(array.ndim)])
        spans = tuple(slice(None, None, step if a == axis else 1) for a in range(array.ndim))
        return (array, layout) if made is None else (array[spans], made)
    if way == 4:  # again and again along a new axis
        move = RegionCopy((3, *array.shape), (0,) * (array.ndim + 1),
                          tuple((a + 1, 0, 1) for a in range(array.ndim)))
        made = move.part_of_source(layout)
        return np.broadcast_to(array, (3, *array.shape)), made
    if way == 0:
        order = tuple(map(int, rng.permutation(array.ndim)))
        return array.transpose(order), layout.permuted(order)
    if way == 1:
        starts = tuple(int(rng.integers(n)) for n in array.shape)
        shape = tuple(int(rng.integers(1, n - s + 1)) for n, s in zip(array.shape, starts,
                                                                      strict=True))
        spans = tuple(slice(s, s + n) for s, n in zip(starts, shape, strict=True))
        part = layout.part(starts, shape)
        return (array, layout) if part is None else (array[spans], part)
    flat = [int(p) for n in array.shape for p in _factors(n)]
    cuts = sorted(rng.choice(range(1, len(flat)), min(2, len(flat) - 1), replace=False)) \
        if len(flat) > 1 else []
    shape = tuple(int(np.prod(flat[a:b])) for a, b in itertools.pairwise([0, *cuts, len(flat)]))
    made = layout.reshaped(shape)
    return (array, layout) if made is None else (array.reshape(shape), made)


def _factors(n):
    found = []
    for p in (2, 3, 5, 7):
        while n % p == 0:
            n //= p
            found.append(p)
    return found or [1]


@pytest.mark.parametrize("case", range(100))
def test_layouts_are_numpys_views(case, rng):
    """Each element of random slices, flips, repetitions, transposes and reshapes lies where the
    layout says, and a kernel's index finds it there."""
    shape = (4, 6, 2, 5)
    array, layout = np.arange(240).reshape(shape), StridedLayout.dense(shape)
    for _ in range(rng.integers(1, 6)):
        array, layout = _random_view(array, layout, rng)
    assert layout.shape == array.shape
    assert (layout.begin, layout.end) == (array.min(), array.max() + 1)
    assert layout.is_dense == (array.reshape(-1) == np.arange(array.size)).all()
    begin, rest = layout.from_pointer
    lies = argument_layout(rest, array.shape)
    if lies is None or begin + np.prod(lies.extents) > 240:
        return
    memory = np.arange(240)[begin:begin + np.prod(lies.extents)].reshape(lies.extents)
    index = np.indices(array.shape)
    found = memory[tuple(
        np.full(array.shape, p.start) if p.axis < 0 else p.start + (
            index[p.axis] // p.divisor) % (p.modulus or 1 << 30) * (-1 if p.reversed else 1)
        for p in lies.places)]
    np.testing.assert_array_equal(found, array)


def test_merged_axes_keep_their_strides():
    heads = StridedLayout.dense((2, 8, 3, 4)).permuted((0, 2, 1, 3)).reshaped((6, 8, 4))
    assert heads is not None and str(heads) == "at 0 with strides (96x4, 12, 1)"
    assert heads.reshaped((2, 24, 4)) is not None and heads.part((1, 0, 0), (2, 8, 4)) is None
    assert heads.reshaped((4, 12, 4)) is None


# --- attention's heads ----------------------------------------------------------------------------
def _heads(t, h):
    B, T, d = t.shape
    return ts.transpose(ts.reshape(t, (B, T, h, d // h)), (0, 2, 1, 3))


def _split(x, w, h):
    return [_heads(t, h) for t in ts.split(x @ w, 3, axis=-1)]


def _slices(x, w, h):
    y, d = x @ w, x.shape[-1]
    return [_heads(y[..., i * d:(i + 1) * d], h) for i in range(3)]


def _weights(x, w, h):
    d = x.shape[-1]
    return [_heads(x @ w[:, i * d:(i + 1) * d], h) for i in range(3)]


def _one_axis(x, w, h):
    B, T, d = x.shape
    return list(ts.transpose(ts.reshape(x @ w, (B, T, 3, h, d // h)), (2, 0, 3, 1, 4)))


def _einsum(x, w, h):
    d = x.shape[-1]
    w = ts.reshape(w, (d, 3, h, d // h))
    return [ts.einsum("btd,dhk->bhtk", x, w[:, i]) for i in range(3)]


def _loss(project, h):
    def loss(x, w, c):
        y = ts.attention(*project(x, w, h), causal=True)
        B, H, T, D = y.shape
        return ts.sum(ts.cast(ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (B, T, H * D)) @ c, "f32"))

    return ts.value_and_grad(loss, argnums=(0, 1))


def _expected(x, w, c, h):
    """The same in f64, and the size of what is summed: for the loss the root of the sum of the
    squares of its B T d terms, which may cancel; for a gradient its largest element."""
    B, T, d = x.shape
    D = d // h
    q, k, v = (t.reshape(B, T, h, D).transpose(0, 2, 1, 3) for t in np.split(x @ w, 3, -1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(D)
    s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = p @ v
    g = np.broadcast_to(c.sum(1), (B, T, d)).reshape(B, T, h, D).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(D)
    parts = (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g)
    dh = np.concatenate([t.transpose(0, 2, 1, 3).reshape(B, T, d) for t in parts], -1)
    y = y.transpose(0, 2, 1, 3).reshape(B, T, d)
    dx, dw = dh @ w.T, np.einsum("btd,bte->de", x, dh)
    size = math.hypot(np.linalg.norm(y @ c), np.linalg.norm(y * c.sum(1)))  # both are rounded
    return ((y @ c).sum(), size), (dx, np.abs(dx).max()), (dw, np.abs(dw).max())


@pytest.mark.parametrize("project", [_split, _slices, _weights, _one_axis, _einsum])
@pytest.mark.parametrize("T", [64, 40])
def test_heads_are_read_and_written_where_they_lie(project, T, rng):
    """Forward and backward, however the heads are cut: no kernel copies, every matmul is wgmma, and
    gradients are those of f64."""
    B, h, D = 2, 2, 32
    d = h * D
    arrays = [rng.standard_normal(s) * f for s, f in (((B, T, d), 1), ((d, 3 * d), 0.1),
                                                      ((d, d), 0.2))]
    x, w, c = (ts.cast(ts.tensor(a.astype(np.float32)), BF16) for a in arrays)
    made = program(_loss(project, h), x, w, c)
    kinds = [g.kind for g in made.plan.groups]
    assert not {"move", "elements"}.intersection(kinds)  # no copies, and no zeros around parts
    gradients = [o for g in made.plan.groups if g.kind == "launch" for o in g.writes]
    # the sums of dO O, which the kernel of queries makes; gradients are rounded by the kernels
    assert [str(o.type.dtype) for o in gradients] == ["f32", *["bf16"] * 3]
    got = made.run([t.array for t in (x, w, c)])
    wide = [t.array.astype(np.float64) for t in (x, w, c)]
    for y, (want, size) in zip(got, _expected(*wide, h), strict=True):
        assert_close(y.astype(np.float64), want, "bf16", n=64, scale=size)
    laid = [g for g in made.launches if any(o.layout for o in (*g.group.reads, *g.group.writes))]
    assert {g.group.kind for g in laid} >= {"attention", "launch"}
    for launch in laid:
        if forms := emitted_of(launch, made.target).matmul_forms:
            assert set(forms) == {"wgmma"}


def test_what_cannot_read_a_layout_makes_a_copy_and_says_why(rng):
    x = ts.tensor(rng.standard_normal((16, 6, 8)).astype(np.float32))
    w = ts.tensor(rng.standard_normal((96, 5)).astype(np.float32))
    made = program(lambda x, w: ts.reshape(ts.transpose(x, (2, 1, 0)), (8, 96)) @ w, x, w)
    notes = [line for line in str(made.plan).splitlines() if "note: a copy" in line]
    assert len(notes) == 1 and "is no run of an axis of its memory" in notes[0]
    (got,) = made.run([x.array, w.array])
    want = x.array.astype(np.float64).transpose(2, 1, 0).reshape(8, 96) @ w.array
    assert_close(got, want, "f32", n=96)


@pytest.mark.parametrize("turn", [
    lambda x: ts.rotary_embedding(ts.transpose(ts.reshape(x, (2, 24, 3, 16)), (0, 2, 1, 3))),
    lambda x: ts.rotary_embedding(ts.reshape(ts.cast(x, "f32"), (2, 3, 24, 16)))])
def test_rotary_positions_of_halves_are_read_and_written_as_halves(turn, rng):
    """One loop reads both halves where they lie and writes both; nothing is in memory between."""
    x = ts.cast(ts.tensor(rng.standard_normal((2, 24, 48)).astype(np.float32)), "bf16")
    made = program(lambda x: ts.cast(turn(x), "bf16"), x)
    assert [g.kind for g in made.plan.groups] == ["loop"]
    assert not [b for b in made.plan.buffers if b.kind == "temporary"]
    want = np.asarray(turn(ts.tensor(x.array.astype(np.float64))), np.float64)
    assert_close(made.run([x.array])[0].astype(np.float64), want, "bf16", n=2)


def test_what_is_stored_wide_is_widened_once(rng):
    """A result, or an operand of a sum over slices, is what it was."""
    x = ts.cast(ts.tensor(rng.standard_normal((8, 12)).astype(np.float32)), "bf16")
    made = program(lambda x: ts.reshape(ts.cast(x, "f32"), (4, 24)), x)
    assert [g.kind for g in made.plan.groups if g.kind != "view"] == ["loop"]
    np.testing.assert_array_equal(made.run([x.array])[0], x.array.astype(np.float32).reshape(4, 24))
    made = program(lambda x: ts.flip(ts.cast(x, "f32"), 0) @ ts.ones((12, 3)), x)
    want = x.array.astype(np.float64)[::-1] @ np.ones((12, 3))
    assert_close(made.run([x.array])[0], want, "f32", n=12)


@pytest.mark.parametrize("fn, kind", [
    (lambda x: ts.exp(ts.transpose(x, (1, 0, 2))) * 2.0, "loop"),
    (lambda x: ts.exp(x[1:5, :, 3:]) + 1.0, "loop"),
    (lambda x: ts.softmax(ts.transpose(x, (1, 0, 2)), axis=-1), "rows"),
    (lambda x: ts.sum(x[2:5] * 2.0, axis=0), "loop"),
    (lambda x: ts.sum(x[2:5], axis=(1, 2)), "rows"),
    (lambda x: ts.take(x[3:], ts.tensor([2, 0, 1]), axis=0), "gather")])
def test_loops_and_sums_read_parts_where_they_lie(fn, kind, rng):
    x = ts.tensor(rng.standard_normal((6, 7, 16)).astype(np.float32))
    made = program(fn, x)
    assert kind in [g.kind for g in made.plan.groups]
    assert "move" not in [g.kind for g in made.plan.groups]
    (got,) = made.run([x.array])
    wide = ts.tensor(x.array.astype(np.float64))
    assert_close(got, fn(wide).array, "f32", n=80)


def test_cotangents_of_slices_are_joined_only_where_they_fill_the_whole(rng):
    """Slices that leave a gap, overlap, or run along two axes are padded and added."""
    x = ts.tensor(rng.standard_normal((6, 8)).astype(np.float32))
    cuts = ((lambda x: (x[:2], x[2:6]), True), (lambda x: (x[:2], x[3:6]), False),
            (lambda x: (x[:4], x[2:6]), False), (lambda x: (x[:3, :4], x[3:, 4:]), False))
    for cut, joins in cuts:
        made = program(ts.grad(lambda x, cut=cut: sum(ts.sum(y ** 3) for y in cut(x))), x)
        assert ("elements" in [g.kind for g in made.plan.groups]) != joins
        wide = ts.tensor(x.array.astype(np.float64))
        want = ts.grad(lambda x, cut=cut: sum(ts.sum(y ** 3) for y in cut(x)))(wide)
        assert_close(made.run([x.array])[0], want.array, "f32")


def test_what_lies_first_in_a_larger_array_is_read_by_everything(rng):
    """A library's step, a kernel, a loop and the caller."""
    x = ts.tensor(rng.standard_normal((3, 4, 4)).astype(np.float32))
    made = program(lambda x: (ts.inv(x[0]), ts.exp(x[:2]), x[0], ts.sort(x[0])), x)
    assert [g.kind for g in made.plan.groups].count("move") <= 1
    want = (np.linalg.inv(x.array[0]), np.exp(x.array[:2]), x.array[0], np.sort(x.array[0]))
    for got, w in zip(made.run([x.array]), want, strict=True):
        assert_close(got, w.astype(np.float64), "f32", n=64)


def test_parts_that_begin_elsewhere_share_a_kernel(rng):
    x = ts.tensor(rng.standard_normal((6, 4, 8)).astype(np.float32))
    made = program(lambda x: [ts.exp(x[i]) for i in range(6)], x)
    assert len(made.launches) == 6 and len({g.shared for g in made.launches}) == 1
    for i, y in enumerate(made.run([x.array])):
        assert_close(y, np.exp(x.array[i].astype(np.float64)), "f32")


@pytest.mark.parametrize("kind", ["f32", BF16])
@pytest.mark.parametrize("begin, copies", [(0, 0), (40, 0), (80, 0), (3, 1)])
def test_what_follows_a_matmul_reads_parts_where_they_lie(begin, copies, kind, rng):
    """A block of a bias, as ranks of tp have one, and rows of what is added. Where words of 16
    bytes begin elsewhere it is a copy."""
    shapes = (32, 24), (24, 40), (120,), (100, 40)
    x, w, b, r = (ts.tensor(rng.standard_normal(s).astype(np.float32), kind) for s in shapes)

    def fn(x, w, b, r):
        return ts.gelu(x @ w + b[begin:begin + 40]) + r[begin // 2:begin // 2 + 32]

    made = program(fn, x, w, b, r)
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("gemm") == 1 and kinds.count("move") == copies, kinds
    (got,) = made.run([t.array for t in (x, w, b, r)])
    want = fn(*(ts.tensor(t.array.astype(np.float64)) for t in (x, w, b, r)))
    assert_close(got.astype(np.float64), want.array, kind.split()[0], n=28)


# --- kernels of the user's ------------------------------------------------------------------------
@ts.kernel(grid=lambda N, M: (-(-N // 16), -(-M // 16)))
def doubled(X: ts.Tensor["N", "M", ts.f32], Y: ts.Tensor["N", "M", ts.f32]):
    i, j = ts.tile.group_id(0) * 16, ts.tile.group_id(1) * 16
    Y[i:i+16, j:j+16] = ts.tile.load(X[i:i+16, j:j+16]) * 2.0


@pytest.mark.parametrize("M", [32, 20])
def test_a_kernel_of_the_users_reads_and_writes_layouts(M, rng):
    """A transposed operand, and a result that is a part of another where its blocks do not reach
    beyond it."""
    x = ts.tensor(rng.standard_normal((M, 48)).astype(np.float32))

    def both(x):
        once, twice = ts.zeros((48, M)), ts.zeros((48, M))
        doubled(ts.transpose(x), once)
        doubled(once, twice)
        return ts.flip(ts.concatenate([once, twice], axis=1), 0) + 0.0

    made = program(both, x)
    (got,) = made.run([x.array])
    want = np.concatenate([x.array.T * 2, x.array.T * 4], 1)[::-1]
    np.testing.assert_array_equal(got, want)
    pieces = re.findall(rf"view of \w+ at \d+ with strides \({2 * M}, 1\)", str(made.plan))
    assert len(pieces) == (2 if M == 32 else 0)


# --- the proof ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", ["shifted", "beyond", "unread"])
def test_a_wrong_layout_is_found_before_anything_runs(wrong, monkeypatch):
    right = memory_plan.place_views

    def place(graph, groups, target):
        views: ViewPlan = right(graph, groups, target)
        for v, layout in views.layouts.items():
            if layout.offset and wrong == "shifted":
                views.layouts[v] = StridedLayout(layout.axes, layout.offset - 32)
            elif v in views.pieces and wrong == "beyond":
                views.layouts[v] = StridedLayout(layout.axes, layout.offset + 1 << 20)
            elif wrong == "unread" and not layout.is_dense and v not in views.pieces:
                views.layouts[v] = StridedLayout(layout.axes[::-1], layout.offset)
        return views

    monkeypatch.setattr(memory_plan, "place_views", place)
    x, w, c = (ts.zeros(s, dtype="bf16") for s in ((1, 64, 64), (64, 192), (64, 64)))
    with pytest.raises(ts.TesseraError, match="memory plan"):
        program(_loss(_split, 2), x, w, c)


def test_a_piece_whose_reader_moved_lies_by_itself(monkeypatch):
    """One head of attention: what reads a part of the joined projections is made elsewhere itself,
    and cannot take it where it would lie."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    transformer = __import__("transformer")
    c = transformer.Config(layers=1, d=8, heads=1, T=8, B=2, dtype="bf16")
    (run,) = transformer.stages_of(c)
    tokens = ts.zeros((c.B, c.T), "int32")
    graph = ts.jit(lambda p, t, u: ts.grad(lambda p: transformer.loss_of(run(p, t), u))(p)).graph(
        transformer.init_params(c), tokens, tokens)
    assert program_of(graph, "sm_90a").plan.groups
