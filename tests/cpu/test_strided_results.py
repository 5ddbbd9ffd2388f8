"""Results that loops, rows, sums and copies write where they belong: into parts of larger values,
in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_lowering_emulated import emulate, normal, short_strips  # noqa: F401
from lowered_functions import kinds
from tessera.graph.cuda.kernels import strips
from tessera.graph.cuda.levels import emitted_of, program_of
from tessera.graph.cuda.program.run import CudaProgram
from tessera.graph.schedule import memory_plan
from tessera.graph.schedule.layouts import StridedLayout
from tessera.graph.schedule.view_plan import ViewPlan
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def program(fn: Callable, *args: Any) -> CudaProgram:
    return program_of(ts.jit(fn).graph(*args), "sm_90a")


def laid(made: CudaProgram) -> list[str]:
    """The kinds of the groups that write into a part of something, or in another order."""
    return [g.kind for g in made.plan.groups if any(o.layout for o in g.writes)]


# --- each kind of kernel --------------------------------------------------------------------------
def _heads(x: Any, fn: Callable = ts.exp) -> Any:
    """[B, T, H D] in the order [B, H, T, D], and back behind a function."""
    B, T, d = x.shape
    y = fn(ts.transpose(ts.reshape(x, (B, T, d // 16, 16)), (0, 2, 1, 3)))
    return ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (B * T, d)) @ ts.ones((d, 4), x.type)


def _again(x: Any) -> Any:
    """[2, 12, 48] -> [6, 12, 48], each three times"""
    return ts.reshape(ts.broadcast_to(ts.expand_dims(x, 1), (2, 3, 12, 48)), (6, 12, 48))


CASES = {
    "halves of rows": (lambda x: ts.concatenate([ts.exp(x), ts.sin(x)], -1), ["loop"]),
    "parts in front of each other": (
        lambda x: ts.concatenate([ts.exp(x), ts.sin(x)], 1), ["loop"]),
    "heads that go back": (_heads, ["loop"]),
    "what is read from the end on": (
        lambda x: ts.concatenate([ts.exp(ts.flip(x, (0, 1))), ts.sin(x[:, ::-1])], 1),
        ["loop"] * 2),
    "what is read again": (lambda x: ts.concatenate([ts.exp(_again(x)), ts.sin(_again(x))], -1),
                           ["loop"]),
    "three parts of a new axis": (
        lambda x: ts.stack([ts.exp(x), ts.sin(x), ts.cos(x)], 2), ["loop"]),
    "rows": (lambda x: ts.concatenate([ts.softmax(x), ts.rmsnorm(x, ts.ones(48, x.type))], -1),
             ["rows", "rows"]),
    "rows of heads": (lambda x: _heads(x, ts.softmax), ["rows"]),
    "sums": (lambda x: ts.concatenate([ts.sum(x, 1), ts.exp(ts.sum(x * x, 1) * 0.01)], -1),
             ["columns", "loop"]),
    "a part that is copied": (
        lambda x: ts.concatenate([ts.exp(x), ts.concatenate([x, ts.sin(x)], -1)], -1),
        ["loop", "move"]),
    "a part of what is transposed": (lambda x: ts.transpose(ts.stack([ts.softmax(x), x], 2), (
        1, 2, 0, 3)), ["rows", "move"]),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_written_where_they_belong(case: str, rng: np.random.Generator) -> None:
    fn, want = CASES[case]
    x = normal(rng, 2, 12, 48)
    made = program(fn, x)
    assert sorted(laid(made)) == sorted(want)
    assert kinds(made).count("move") == want.count("move")
    wide = fn(ts.tensor(x.array.astype(np.float64))).array
    assert_close(made.run([x.array])[0], wide, "f32", n=48, scale=float(np.abs(wide).max()))


@pytest.mark.parametrize("case", CASES)
def test_results_are_written_where_they_belong_by_instructions(
        case: str, rng: np.random.Generator) -> None:
    fn, _ = CASES[case]
    emulate(fn, normal(rng, 2, 12, 48), target="sm_90a", rtol=1e-5, atol=1e-5)


def test_a_strip_of_rows_is_written_where_it_belongs(
        short_strips: None, rng: np.random.Generator) -> None:  # noqa: F811
    """A norm's gradient beside another value; the strips end where the rows do."""
    def fn(x: Any, g: Any, b: Any, dy: Any) -> Any:
        dx, dg, db = ts.vjp(lambda x, g, b: ts.layernorm(x, g, b), x, g, b)[1](dy)
        return ts.concatenate([dx, ts.exp(dy)], -1) * 2.0, dg, db

    for rows in (32, 35):
        args = normal(rng, rows, 32), normal(rng, 32), normal(rng, 32), normal(rng, rows, 32)
        made = program(fn, *args)
        assert strips.LONG == 32 and "strips" in laid(made)
        wide = fn(*(ts.tensor(a.array.astype(np.float64)) for a in args))
        for got, w in zip(made.run([a.array for a in args]), wide, strict=True):
            assert_close(got, w.array, "f32", n=rows, scale=float(np.abs(w.array).max()))
        emulate(fn, *args, target="sm_90a", rtol=1e-5, atol=1e-5)


# --- what is there in one place and copied to another ---------------------------------------------
def _rows_in_front(x: Any) -> Any:
    """[2, 12, 48] -> [2, 20, 48], the last rows in front of the first"""
    y = ts.softmax(x)
    return ts.concatenate([y[:, 4:], y], 1)


def _in_a_part_and_behind_it(x: Any) -> Any:
    y, z = ts.softmax(x), ts.softmax(x * 2.0)
    return ts.concatenate([ts.concatenate([z, y], -1), y], -1)


def _in_two_parts(x: Any) -> Any:
    y, z = ts.softmax(x), ts.softmax(x * 2.0)
    return ts.concatenate([ts.concatenate([z, y], -1), ts.concatenate([y[..., :16], x], -1)], -1)


@pytest.mark.parametrize("fn, want", [
    (_rows_in_front, ["rows", "move"]), (_in_a_part_and_behind_it, ["rows", "rows", "move"]),
    (_in_two_parts, ["rows", "rows", "move", "move"])])
def test_what_is_there_is_copied_within_the_result(
        fn: Callable, want: list[str], rng: np.random.Generator) -> None:
    """A value that belongs in two places is made in one, and read there for the other."""
    x = normal(rng, 2, 12, 48)
    made = program(fn, x)
    assert kinds(made) == want
    assert not [b for b in made.plan.buffers if b.kind == "temporary"]
    wide = fn(ts.tensor(x.array.astype(np.float64))).array
    assert_close(made.run([x.array])[0], wide, "f32", n=48)
    emulate(fn, x, target="sm_90a", rtol=1e-5, atol=1e-5)


# --- what stays a copy ----------------------------------------------------------------------------
@pytest.mark.parametrize("fn, why", [
    (lambda x: ts.transpose(ts.exp(x)) + 1.0, "neighbours in its rows lie apart"),
    (lambda x: ts.concatenate([ts.exp(x[:, :5]), ts.sin(x[:, 5:])], -1) + 1.0, "a copy")])
def test_what_would_be_written_in_small_pieces_is_copied(
        fn: Callable, why: str, rng: np.random.Generator) -> None:
    """Neighbours that would lie apart, and rows that begin between words of 16 bytes."""
    x = normal(rng, 16, 24)
    made = program(fn, x)
    assert "loop" not in laid(made) and "move" in kinds(made)
    assert why in str(made.plan)
    wide = fn(ts.tensor(x.array.astype(np.float64))).array
    assert_close(made.run([x.array])[0], wide, "f32", n=16, scale=float(np.abs(wide).max()))


@pytest.mark.parametrize("columns", [40, 37, 100])
def test_a_copied_part_ends_where_the_next_begins(columns: int, rng: np.random.Generator) -> None:
    """What lies behind it was made there already."""
    x, w = normal(rng, 64, columns), normal(rng, columns, 64)

    def fn(x: Any, w: Any) -> Any:
        return ts.concatenate([ts.cast(x[:, :columns // 4 * 4], "f32"), x @ w], -1) * 2.0

    made = program(fn, x, w)
    assert "gemm" in laid(made)
    wide = [t.array.astype(np.float64) for t in (x, w)]
    want = np.concatenate([wide[0][:, :columns // 4 * 4], wide[0] @ wide[1]], -1) * 2
    assert_close(made.run([x.array, w.array])[0], want, "f32", n=columns,
                 scale=float(np.abs(want).max()))


# --- the proof ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong, found", [
    ("shifted", "are made in memory of which they are no part"),
    ("beyond", "writes beyond its part"),
    ("turned", "cannot write a result"), ("lost", "cannot write its result over a part")])
def test_a_part_that_is_written_elsewhere_is_found(
        wrong: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = memory_plan.place_views

    def place(graph: Any, groups: Any, target: Any) -> ViewPlan:
        views: ViewPlan = right(graph, groups, target)
        v = max(views.pieces, key=lambda v: views.layouts[v].offset)
        axes, offset = views.layouts[v].axes, views.layouts[v].offset
        assert offset == 48
        views.layouts[v] = {
            "shifted": StridedLayout(axes, 32), "beyond": StridedLayout(axes, 52),
            "turned": StridedLayout((((48, 1),), ((48, 96),)), 48),
            "lost": views.layouts[v]}[wrong]
        if wrong == "lost":
            lost = next(v for v in graph.outputs)
            views.pieces.add(lost)
            views.owners[lost], views.layouts[lost] = views.owners[v], views.layouts[v]
        return views

    monkeypatch.setattr(memory_plan, "place_views", place)
    x = ts.zeros((48, 48))
    with pytest.raises(ts.TesseraError, match=f"memory plan.*{found}"):
        program(lambda x: ts.sum(ts.concatenate([ts.exp(x), ts.sin(x)], -1)) + ts.sin(x), x)


def test_a_part_that_reaches_beyond_what_is_joined_is_found(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it lies where it belongs; the other half would be copied over."""
    right = memory_plan.place_views

    def place(graph: Any, groups: Any, target: Any) -> ViewPlan:
        views: ViewPlan = right(graph, groups, target)
        joined = next(n for n in graph.nodes if n.op.name == "concatenate")
        half, (whole,) = joined.inputs[0], joined.outputs
        made = views.owners[half]
        views.owners |= {half: whole, made: whole}
        views.layouts[made] = StridedLayout.dense((32, 16))
        views.pieces = {made}
        return views

    x = ts.zeros((32, 16))
    fn = lambda x: ts.concatenate([ts.softmax(x)[:16], x[:16]], 0)  # noqa: E731
    program(fn, x)
    monkeypatch.setattr(memory_plan, "place_views", place)
    with pytest.raises(ts.TesseraError, match="are made in memory of which they are no part"):
        program(fn, x + 0.0)


# --- rotary positions -----------------------------------------------------------------------------
def _angles(x: Any) -> Any:
    T, D = x.shape[-2:]
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    return (ts.tensor(f(angle).astype(np.float32)) for f in (np.cos, np.sin))


def _op(x: Any) -> Any:
    return ts.rotary_embedding(x)


def _halves(x: Any) -> Any:
    c, s = _angles(x)
    a, b = ts.split(x, 2, axis=-1)
    return ts.concatenate([a * c - b * s, b * c + a * s], -1)


def _slices(x: Any) -> Any:
    c, s = _angles(x)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return ts.concatenate([a * c - b * s, b * c + a * s], -1)


def _flipped(x: Any) -> Any:
    T, D = x.shape[-2:]
    c, s = (ts.reshape(t, (T, 1, D // 2)) for t in _angles(x))
    parts = ts.reshape(x, (*x.shape[:-1], 2, D // 2))
    sign = ts.tensor(np.array([[-1.0], [1.0]], np.float32))
    return ts.reshape(parts * c + ts.flip(parts, -2) * s * sign, x.shape)


def _turned_halves(x: Any) -> Any:
    c, s = (ts.concatenate([t, t], -1) for t in _angles(x))
    half = x.shape[-1] // 2
    return x * c + ts.concatenate([-x[..., half:], x[..., :half]], -1) * s


def _stacked(x: Any) -> Any:
    c, s = _angles(x)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return ts.reshape(ts.stack([a * c - b * s, b * c + a * s], -2), x.shape)


ROTARY = {"the op": _op, "split": _halves, "slices": _slices, "stacked": _stacked,
          "flipped": _flipped, "halves that change place": _turned_halves}


@pytest.mark.parametrize("spelling", ROTARY)
def test_rotary_positions_are_one_loop(spelling: str, rng: np.random.Generator) -> None:
    """Of heads where they lie, forward, and back into the order of the projections: nothing is
    copied, and of halves x is read once."""
    B, T, h, D = 2, 40, 3, 32
    x, g = (normal(rng, B, T, h * D, dtype="bf16") for _ in range(2))

    def fn(x: Any, g: Any) -> Any:
        def heads(x: Any) -> Any:
            y = ts.transpose(ts.reshape(ts.cast(x, "f32"), (B, T, h, D)), (0, 2, 1, 3))
            return ROTARY[spelling](y)

        y, back = ts.vjp(heads, x)
        g = ts.transpose(ts.reshape(ts.cast(g, "f32"), (B, T, h, D)), (0, 2, 1, 3))
        dx = back(g)
        rows = ts.reshape(dx, (B * T, h * D))
        return ts.cast(y, "bf16") * 1.0, rows @ ts.ones((h * D, 8), "bf16")

    made = program(fn, x, g)
    assert "move" not in kinds(made) and "elements" not in kinds(made)
    turns = [s for s in made.launches if s.group.kind == "loop" and s.group.space[-1] == D // 2]
    if spelling == "flipped":  # a loop for all, which reads it twice; in reverse one before it
        assert len(turns) == 3 and not laid(made)[:-1]
    else:
        assert len(turns) == 2
        assert all([str(o.type.dtype) for o in t.group.reads].count("bf16") == 2
                   and len(t.group.writes) == 2 for t in turns)
    for launch in turns:
        assert launch.group.schedule.m * launch.group.schedule.n >= 512
        assert "load_" in emitted_of(launch, made.target).source
    (y, dx), wide = made.run([x.array, g.array]), [t.array.astype(np.float64) for t in (x, g)]
    c, s = (t.array.astype(np.float64) for t in _angles(ts.zeros((T, D))))
    a, b = np.split(wide[0].reshape(B, T, h, D).transpose(0, 2, 1, 3), 2, -1)
    turned = np.concatenate([a * c - b * s, b * c + a * s], -1)
    assert_close(y.astype(np.float64), turned, "bf16", n=2)
    a, b = np.split(wide[1].reshape(B, T, h, D).transpose(0, 2, 1, 3), 2, -1)
    turned = np.concatenate([a * c + b * s, b * c - a * s], -1).transpose(0, 2, 1, 3)
    assert_close(dx.astype(np.float64).reshape(B * T, 8),
                 np.repeat(turned.reshape(B * T, -1).sum(-1, keepdims=True), 8, 1), "bf16", n=h * D,
                 scale=float(np.abs(turned).sum((-1, -2)).max()))


# --- loops over parts -----------------------------------------------------------------------------
def test_what_is_computed_of_joined_values_is_computed_of_the_parts(
        rng: np.random.Generator) -> None:
    """Also where parts of the result are read, and through a cast."""
    x, y = normal(rng, 24, 32, dtype="bf16"), normal(rng, 24, 16, dtype="bf16")

    def fn(x: Any, y: Any) -> Any:
        z = ts.cast(ts.sin(ts.concatenate([x, y], -1)) * 2.0, "f32")
        w = ts.exp(ts.cast(x, "f32")) * 0.5
        return z, w[:, :16], w[:, 16:]

    made = program(fn, x, y)
    assert kinds(made) == ["loop"] * 4 and laid(made) == ["loop", "loop"]
    assert not [b for b in made.plan.buffers if b.kind == "temporary"]
    wide = [t.array.astype(np.float64) for t in (x, y)]
    want = (np.sin(np.concatenate(wide, -1)) * 2, *np.split(np.exp(wide[0]) * 0.5, 2, -1))
    for got, w in zip(made.run([x.array, y.array]), want, strict=True):
        assert_close(got.astype(np.float64), w, "bf16", n=2)


@pytest.mark.parametrize("fn, kept", [
    (lambda x, w: ts.split(x @ w + 1.0, 2, -1), "gemm"),
    (lambda x, w: ts.split(ts.rmsnorm(x, w[0]) * 2.0, 2, -1), "rows"),
    (lambda x, w: ts.softmax(ts.concatenate([x @ w, x @ w.T], -1) * 0.5), "rows")])
def test_what_takes_a_loop_along_keeps_it_whole(
        fn: Callable, kept: str, rng: np.random.Generator) -> None:
    """A matmul's epilogue, rows with their statistics: no kernel more."""
    x, w = normal(rng, 32, 32), normal(rng, 32, 32)
    made = program(fn, x, w)
    assert "loop" not in kinds(made)
    (group, *_) = (g for g in made.plan.groups if g.kind == kept)
    assert len(group.steps) > 1
    made.run([x.array, w.array])


def test_a_sum_with_cotangents_of_parts_adds_them_joined(rng: np.random.Generator) -> None:
    """x and both its halves are used: the parts are not padded with zeros."""
    x = normal(rng, 24, 32)

    def fn(x: Any) -> Any:
        return ts.sum(x ** 3) + ts.sum(x[:, :16] ** 2) + ts.sum(ts.sin(x[:, 16:]))

    made = program(ts.grad(fn), x)
    assert "elements" not in kinds(made) and "move" not in kinds(made)
    wide = x.array.astype(np.float64)
    want = 3 * wide ** 2 + np.concatenate([2 * wide[:, :16], np.cos(wide[:, 16:])], -1)
    assert_close(made.run([x.array])[0], want, "f32", n=3, scale=float(np.abs(want).max()))


# --- programs that nobody wrote -------------------------------------------------------------------
MAPS = (lambda x: x, ts.sin, lambda x: ts.cos(x) * 0.5, ts.softmax, lambda x: ts.sin(x * x))


def _step(values: list, rng: np.random.Generator) -> tuple[str, Callable]:
    """An op on values of these shapes: its name, and what makes a new value of them."""
    i = int(rng.integers(len(values)))
    shape = values[i]
    way = rng.choice(["map", "map", "turn", "cut", "join", "join", "rows", "sum", "split",
                      "matmul", "flip", "every other", "repeat"])
    if way == "flip":
        axis = int(rng.integers(len(shape)))
        return way, lambda v: ts.flip(v[i], axis)
    if way == "every other":
        axis = int(rng.integers(len(shape)))
        return way, lambda v: v[i][tuple(slice(None, None, 2 if a == axis else 1)
                                         for a in range(len(shape)))]
    if way == "repeat":
        axis = int(rng.integers(len(shape) + 1))
        wide = (*shape[:axis], 2, *shape[axis:])
        return way, lambda v: ts.broadcast_to(ts.expand_dims(v[i], axis), wide)
    if way == "turn":
        order = tuple(map(int, rng.permutation(len(shape))))
        return way, lambda v: ts.transpose(v[i], order)
    if way == "cut":
        axis = int(rng.integers(len(shape)))
        n = shape[axis]
        unit = 4 if n % 8 == 0 else 1
        start = int(rng.integers(n // unit)) * unit
        length = int(rng.integers(1, (n - start) // unit + 1)) * unit
        span = tuple(slice(start, start + length) if a == axis else slice(None)
                     for a in range(len(shape)))
        return way, lambda v: v[i][span]
    if way == "join":
        axis = int(rng.integers(len(shape)))
        fits = [k for k, s in enumerate(values) if len(s) == len(shape) and all(
            a == axis or s[a] == shape[a] for a in range(len(shape)))]
        parts = [(k, MAPS[rng.integers(len(MAPS))])
                 for k in (i, *map(int, rng.choice(fits, int(rng.integers(1, 3)))))]
        order = tuple(map(int, rng.permutation(len(shape))))
        return way, lambda v: ts.transpose(ts.concatenate([f(v[k]) for k, f in parts], axis), order)
    if way == "rows":
        return way, lambda v: ts.softmax(v[i])
    if way == "sum" and len(shape) > 2:
        return way, lambda v: ts.sum(v[i], int(rng.integers(1)))
    if way == "split" and shape[-1] % 8 == 0:
        return way, lambda v: ts.reshape(v[i], (*shape[:-1], shape[-1] // 8, 8))
    if way == "matmul" and len(shape) == 2:
        return way, lambda v: v[i] @ ts.ones((shape[-1], 16), v[i].type) * 0.1
    return "map", lambda v: ts.sin(v[i]) + 0.5


def _sensitivity(fn: Callable, right: list, rng: np.random.Generator) -> list[np.ndarray]:
    """[*result] each: how far an element of a result moves when every element of every value moves
    by a random part of itself, over that part. Rounding does that, and nothing else."""
    part, draws = 1e-7, 4

    def error(x: Any) -> Any:
        return x * ts.tensor(1 + part * rng.standard_normal(x.shape))

    moved = [[(m.array - r.array) / part for m, r in zip(fn(error), right, strict=True)]
             for _ in range(draws)]
    return [np.sqrt(np.mean(np.square(d), 0)) for d in zip(*moved, strict=True)]


@pytest.mark.parametrize("case", range(40))
def test_programs_of_moves_and_loops(case: int, rng: np.random.Generator) -> None:
    """Loops, rows, sums and matmuls whose values are cut, turned and joined at random: what is
    written where it belongs is what the ops mean, and the plan is proved."""
    shapes: list[tuple[int, ...]] = [(8, 16), (4, 8, 32), (8, 24)]
    given = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    steps: list[Callable] = []
    while len(steps) < 10:
        _, made = _step(shapes, rng)
        values = [ts.zeros(s) for s in shapes]
        shape = tuple(made(values).shape)
        if np.prod(shape) <= 6000 and len(shape) <= 4:
            steps.append(made)
            shapes.append(shape)

    def fn(*xs: Any, error: Callable = lambda x: x) -> list:
        values = [error(x) for x in xs]
        for step in steps:
            values.append(error(step(values)))
        return [v * 1.0 for v in values[-3:]]

    made_program = program(fn, *map(ts.tensor, given))
    wide = [ts.tensor(a.astype(np.float64)) for a in given]
    right = fn(*wide)
    scales = _sensitivity(lambda error: fn(*wide, error=error), right, rng)
    for got, want, scale in zip(made_program.run(given), right, scales, strict=True):
        assert_close(got, want.array, "f32", n=64, scale=scale)


# --- loops that read the same ---------------------------------------------------------------------
def test_neighbours_that_read_the_same_are_one_loop(rng: np.random.Generator) -> None:
    """Behind a matmul the second stays where it is: what it makes would lie in memory meanwhile."""
    x, w = normal(rng, 32, 48), normal(rng, 48, 48)
    made = program(lambda x: (ts.sin(x), ts.exp(x) * x, ts.cos(x[1:])), x)
    assert [len(g.writes) for g in made.plan.groups] == [2, 1]
    wide = x.array.astype(np.float64)
    want = np.sin(wide), np.exp(wide) * wide, np.cos(wide[1:])
    for got, y in zip(made.run([x.array]), want, strict=True):
        assert_close(got, y, "f32", n=2)
    made = program(lambda x, w: (ts.sin(x) @ w, ts.exp(x) @ w), x, w)
    assert [(g.kind, len(g.writes)) for g in made.plan.groups] == [("loop", 1), ("gemm", 1)] * 2
