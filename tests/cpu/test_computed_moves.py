"""Results computed of elements that move: one kernel, which reads each where it lies."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from emulator import compare
from tessera import config
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.element_places import ElementPlace, flat, unflat
from tessera.graph.cuda.passes import computed_moves, short_reductions
from tessera.graph.cuda.program.run import run_of
from tolerance import assert_close


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(computed_moves, "LEAST_BYTES", 0)


def normal(rng: Any, *shape: int, dtype: str = "f32") -> ts.Tensor:
    return ts.tensor(rng.standard_normal(shape).astype(np.float32), dtype)


def emulate(fn: Any, *xs: ts.Tensor, **tolerance: float) -> None:
    """Its kernels' machine instructions beside the interpreter."""
    program = CudaProgram(ts.jit(fn).graph(*xs), "sm_90a")
    memory = program._host_memory([x.array for x in xs])
    types = {b.name: b.type for b in program.plan.buffers}
    for launch in program.launches:
        given = [ts.Tensor(run_of(memory[program.base(n)], types[n].dtype, shape, at), types[n])
                 for (n, shape), at in zip(launch.arguments, launch.offsets, strict=True)]
        if launch.group.kind == "computed":
            compare(launch.kernel, *given, lanes=launch.group.schedule.lanes, target="sm_90a",
                    schedule=launch.group.schedule, **tolerance)
        launch.kernel(*given)


def run(fn: Any, *xs: ts.Tensor) -> tuple[list[str], list[np.ndarray], list[Any]]:
    """The kinds of its kernels, what they give, and what the graph's ops give on a CPU."""
    program = CudaProgram(ts.jit(fn).graph(*xs), "sm_90a")
    with config.scope(device="cpu"):
        want = fn(*xs)
    got = program.run([x.array for x in xs])
    return [g.kind for g in program.plan.groups], got, list(want) if isinstance(
        want, tuple | list) else [want]


def turned(x: Any, c: Any, s: Any) -> Any:
    p, q = x[..., ::2], x[..., 1::2]
    return ts.reshape(ts.stack([p * c - q * s, p * s + q * c], axis=-1), x.shape)


def windows(x: Any) -> Any:
    x = ts.roll(x, (-1, -2), axis=(1, 2))
    return ts.reshape(ts.transpose(ts.reshape(x, (2, 2, 3, 3, 4, 16)), (0, 1, 3, 2, 4, 5)),
                      (-1, 12, 16))


def convolution(x: Any, w: Any) -> Any:
    return ts.silu(sum(ts.pad(x, ((0, 0), (3 - i, 0), (0, 0)))[:, :7] * w[i] for i in range(4)))


def sobel(x: Any) -> Any:
    p = ts.pad(x, ((0, 0), (1, 1), (1, 1)), 2.0)
    u = p[:, :-2, 2:] + 2 * p[:, 1:-1, 2:] + p[:, 2:, 2:] - p[:, 1:-1, :-2]
    return ts.sqrt(u * u + 1e-6)


def halves(x: Any, c: Any, s: Any) -> Any:
    y = ts.rmsnorm(x)
    h = x.shape[-1] // 2
    return y * c + ts.concatenate([-y[..., h:], y[..., :h]], axis=-1) * s


def turned_part(x: Any, c: Any, s: Any) -> Any:
    """Rotary positions of the first half of what a softmax gives, parts of 32 columns."""
    y = ts.softmax(x)
    return y * c + ts.concatenate([-y[..., 32:64], y[..., :32], y[..., 64:]], axis=-1) * s


def wide(x: Any) -> Any:
    both = ts.concatenate([x, x])
    return ts.concatenate([ts.roll(ts.sigmoid(both), -2, 0), both, both * 2], axis=1)


CASES = {
    "rope of neighbours": (turned, [(2, 3, 5, 128), (5, 64), (5, 64)], ["computed"]),
    "rope of few neighbours": (turned, [(2, 3, 5, 6), (5, 3), (5, 3)], ["computed"]),
    "norm and rope": (halves, [(2, 7, 128), (7, 128), (7, 128)], ["computed"]),
    "norm and rope, no power of two": (halves, [(2, 7, 120), (7, 120), (7, 120)], ["computed"]),
    "softmax and rope of a part": (turned_part, [(2, 7, 128), (7, 128), (7, 128)], ["computed"]),
    "swiglu of neighbours": (lambda x: ts.silu(x[:, ::2]) * x[:, 1::2], [(9, 200)], ["computed"]),
    "shifted windows": (windows, [(2, 6, 12, 16)], ["computed"]),
    "causal convolution": (convolution, [(2, 7, 96), (4, 96)], ["computed"]),
    "sobel": (sobel, [(2, 9, 70)], ["computed"]),
    "channels first": (lambda x, m, s: ts.transpose((x - m) / s, (0, 3, 1, 2)),
                       [(2, 5, 16, 3), (3,), (3,)], ["computed"]),
    "mirrored": (lambda x: ts.flip(x, (0, 2)) + 2 * x, [(3, 4, 65)], ["computed"]),
    "parts wider than a block": (wide, [(3, 2048)], ["computed"]),
    "rolled with zeros around": (
        lambda x: ts.flip(ts.roll(ts.pad(x, ((0, 0), (1, 2), (0, 0))), 3, 1), 1) * 2,
        [(5, 7, 128)], ["computed"]),
    "zeros around both parts": (
        lambda x: ts.concatenate([ts.pad(x[:, :3], ((0, 0), (2, 0), (0, 0))),
                                  ts.pad(x[:, 3:], ((0, 0), (0, 1), (0, 0)))], axis=1),
        [(5, 7, 128)], ["computed"]),
    "of one column": (lambda x: ts.pad(x[:, ::3] * 2, ((0, 0), (2, 1))), [(130, 1)], ["computed"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_of_moved_elements_is_one_kernel(name, rng):
    fn, shapes, kinds = CASES[name]
    for dtype in ("f32", "bf16"):
        made, got, want = run(fn, *(normal(rng, *s, dtype=dtype) for s in shapes))
        assert made == kinds
        for a, b in zip(got, want, strict=True):
            assert_close(a, np.asarray(b, np.float64), dtype, n=8)


def mixed(x: Any, w: Any, k: Any) -> Any:
    return w * x + (1 - w) * x[k]


def weighed(y: Any, w: Any, k: Any) -> Any:
    return ts.cast(ts.sum(ts.reshape(ts.cast(y[k], "f32"), (5, 2, 128)) * w[:, :, None], axis=1),
                   y.type)


def probabilities(x: Any, k: Any) -> Any:
    return ts.take_along_axis(ts.log_softmax(x), k[:, None], -1)


PICKS = {
    "mixed with others": (mixed, [(6, 3, 70), (6, 1, 1)], ((6,), 6), ["computed"]),
    "experts": (weighed, [(9, 128), (5, 2)], ((10,), 9), ["computed"]),
    "probabilities of tokens": (probabilities, [(7, 300)], ((7,), 300), ["rows", "computed"]),
    "scaled embedding": (lambda t, p, k: t[k] * 8 + p, [(11, 64), (9, 64)], ((9,), 11),
                         ["computed"]),
    "of each column, of what is joined": (
        lambda x, y, k: ts.take_along_axis(ts.concatenate([x, y], axis=1), k, 0),
        [(3, 5, 128), (3, 5, 128)], ((4, 10, 128), 3), ["computed"]),
    "of each column, mirrored": (
        lambda x, k: ts.take_along_axis(ts.flip(ts.tanh(x), 1) + 1, k, 0),
        [(5, 6, 128)], ((4, 6, 128), 5), ["computed"]),
    "bilinear": (lambda x, k: ts.interpolate(x, scale_factor=2, mode="bilinear"), [(2, 3, 8, 8)],
                 ((1,), 2), ["computed"]),
}


@pytest.mark.parametrize("name", PICKS)
def test_what_integers_pick_is_read_where_it_lies(name, rng, monkeypatch):
    fn, shapes, (ids, n), kinds = PICKS[name]
    monkeypatch.setattr(short_reductions, "LEAST", 0)
    k = ts.tensor(rng.integers(-n, n, ids).astype(np.int32))
    made, got, want = run(fn, *(normal(rng, *s) for s in shapes), k)
    assert made == kinds
    assert_close(got[0], np.asarray(want[0], np.float64), "f32", n=8)


@pytest.mark.parametrize("shape, ids, axis", [((9, 3, 128), (5,), 0), ((2, 9, 64), (2, 3), 1),
                                              ((40,), (7,), 0)])
def test_writes_at_positions(shape, ids, axis, rng):
    """The last of two at one place stays, as on a CPU."""
    u = normal(rng, *shape[:axis], *ids, *shape[axis + 1:])
    k = ts.tensor(rng.integers(-shape[axis], shape[axis], ids).astype(np.int32))
    made, got, want = run(lambda x, k, u: ts.scatter(x, k, u, axis=axis) * 2 + 1,
                          normal(rng, *shape), k, u)
    assert made[-1] == "computed" and "elements" not in made
    np.testing.assert_allclose(got[0], np.asarray(want[0]), rtol=1e-6)


@pytest.mark.parametrize("shape, axis", [((5, 1), 1), ((1,), 0), ((3, 3), 1), ((1, 5), 0)])
def test_what_is_written_where_integers_say_among_moved_elements(shape, axis, rng):
    """Where an integer picks is part of conditions, too, and of nothing else on an axis of one."""
    x, ids = normal(rng, *shape), ts.tensor(np.array([0]))
    w = normal(rng, *(1 if a == axis else n for a, n in enumerate(shape)))
    _, (got,), (want,) = run(lambda x, ids, w: ts.scatter(
        ts.flip(x, 0) * 2, ids, w, axis=axis) * 3, x, ids, w)
    assert_close(got, want.array)


def test_operands_of_different_sizes_are_read_at_places_of_one_text(rng):
    """a ends before the last place at which b is read: its parts begin where they did."""
    a, b, c = normal(rng, 8), normal(rng, 9), normal(rng, 1)
    kinds, (got,), (want,) = run(
        lambda a, b, c: a[1::2] + ts.concatenate([a[2::2], c]) * b[2::2], a, b, c)
    assert "computed" in kinds
    assert_close(got, want.array)


def test_integers_of_numbers_alone(rng):
    """Their kernel has no tile to take the type from."""
    _, (got,), (want,) = run(lambda x: ts.grad(lambda x: ts.sum(ts.fori_loop(
        0, 4, lambda t, h: h + ts.take(x, t % 5, axis=0), x)))(x), normal(rng, 5, 65))
    assert_close(got, want.array)


def test_an_integer_outside_is_told(rng):
    x, k = normal(rng, 6, 80), ts.tensor(np.array([0, 6, 1, 2, 3, 4], np.int32))
    program = CudaProgram(ts.jit(lambda x, k: x[k] * 2 + x).graph(x, k), "sm_90a")
    assert [g.kind for g in program.plan.groups] == ["computed"]
    with pytest.raises(ts.AxisError, match=r"an index is outside of -6\.\.5") as info:
        program.run([x.array, k.array])
    assert info.value.where.file == __file__


@pytest.mark.parametrize("name", ["norm and rope", "norm and rope, no power of two",
                                  "softmax and rope of a part", "shifted windows", "sobel",
                                  "channels first", "rope of neighbours", "causal convolution"])
def test_kernels_in_emulated_instructions(name, rng):
    fn, shapes, _ = CASES[name]
    emulate(fn, *(normal(rng, *s, dtype="bf16") for s in shapes), rtol=2.0**-7, atol=1e-2)


@pytest.mark.parametrize("axis, n", [(1, 3), (2, 4), (0, 2)])
@pytest.mark.parametrize("way", ["sum", "prod", "max", "min"])
def test_short_reductions_are_ops(axis, n, way, rng, monkeypatch):
    monkeypatch.setattr(short_reductions, "LEAST", 0)
    shape = [6, 5, 64]
    shape[axis] = n
    x, y = normal(rng, *shape), normal(rng, *(1 if a == 0 else s for a, s in enumerate(shape)))
    made, got, want = run(lambda x, y: getattr(ts, way)(ts.abs(x - y), axis=axis) + 1, x, y)
    assert "columns" not in made and "rows" not in made
    assert_close(got[0], np.asarray(want[0], np.float64), "f32", n=4)


def test_long_transposes_and_single_copies_stay_moves(rng):
    """Tiles of a transposition touch fewer sectors, and a copy alone is one pass in any case."""
    x = normal(rng, 4, 64, 96)
    assert "computed" not in run(lambda x: ts.transpose(x * 2 + 1, (0, 2, 1)), x)[0]
    heads = run(lambda x: ts.transpose(ts.reshape(x, (4, 8, 8, 96)), (0, 2, 1, 3)), x)[0]
    assert heads == ["move"]


def test_what_lies_in_memory_in_any_case_is_read(rng):
    """A value that is a result itself is not computed twice."""
    def fn(x: Any) -> Any:
        y = ts.exp(x[:, ::2])
        return y, ts.pad(y, ((0, 0), (1, 1))) * 2

    kinds, got, want = run(fn, normal(rng, 6, 256))
    assert kinds.count("computed") == 2
    for a, b in zip(got, want, strict=True):
        assert_close(a, np.asarray(b, np.float64), "f32", n=4)


def test_rows_that_a_reduction_widens_are_not_stored_for_what_is_picked_of_them(rng):
    """Each reads the narrow row: a log softmax of 32000 words would store four bytes for each."""
    x, k = normal(rng, 7, 300, dtype="bf16"), ts.tensor(rng.integers(0, 300, 7), "i32")
    program = CudaProgram(ts.jit(lambda x, k: probabilities(ts.cast(x, "f32"), k)).graph(x, k),
                          "sm_90a")
    written = [o.shape for g in program.plan.groups for o in g.writes]
    assert [g.kind for g in program.plan.groups] == ["rows", "computed"]
    assert max(prod(shape) for shape in written) == 7


@given(st.data())
def test_chains_of_moves_and_ops(data):
    """Any chain gives what its ops give one by one."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)))
    steps, begin = [], shape
    for _ in range(data.draw(st.integers(2, 6))):
        shape, step = data.draw(_move(shape))
        steps.append(step)

    def fn(x: Any) -> Any:
        y = x
        for step in steps:
            y = step(y)
        return y * 2 + 1

    x = ts.tensor(np.random.default_rng(1).standard_normal(begin).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed_moves, "LEAST_BYTES", 0)
        patch.setattr(computed_moves, "APART", 1e9)
        _, got, want = run(fn, x)
    np.testing.assert_allclose(got[0], np.asarray(want[0]), rtol=1e-5)


@st.composite
def _move(draw: Any, shape: tuple[int, ...]) -> Any:
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["slice", "pad", "turn", "cut", "flip", "join", "roll", "op"]))
    if kind == "slice" and shape[axis] > 1:
        start = draw(st.integers(0, shape[axis] - 1))
        step = draw(st.integers(1, 3))
        at = (slice(None),) * axis + (slice(start, None, step),)
        n = len(range(start, shape[axis], step))
        return (*shape[:axis], n, *shape[axis + 1:]), lambda x: x[at]
    if kind == "pad":
        width = [(0, 0)] * len(shape)
        width[axis] = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        n = shape[axis] + sum(width[axis])
        return (*shape[:axis], n, *shape[axis + 1:]), lambda x: ts.pad(x, width, 3.0)
    if kind == "turn":
        order = draw(st.permutations(range(len(shape))))
        return tuple(shape[a] for a in order), lambda x: ts.transpose(x, order)
    if kind == "cut":
        primes = [p for n in shape for p in {4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}.get(n, [n])]
        cuts = sorted(draw(st.sets(st.integers(0, len(primes)), max_size=3)) | {0, len(primes)})
        new = tuple(prod(primes[a:b]) for a, b in itertools.pairwise(cuts)) or (1,)
        return (new, lambda x: ts.reshape(x, new)) if prod(new) == prod(shape) else (
            shape, lambda x: x)
    if kind == "flip":
        return shape, lambda x: ts.flip(x, axis)
    if kind == "join":
        n = 2 * shape[axis]
        return (*shape[:axis], n, *shape[axis + 1:]), lambda x: ts.concatenate(
            [x * 3, ts.exp(x)], axis=axis)
    if kind == "roll":
        return shape, lambda x: ts.roll(x, 1, axis=axis)
    return shape, lambda x: ts.sin(x) + 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_places_in_other_extents(shape, data):
    """A place in other axes of as many elements is what NumPy says."""
    primes = [p for n in shape for p in {4: [2, 2], 6: [2, 3]}.get(n, [n])]
    other = data.draw(st.permutations(primes))
    at = tuple(ElementPlace.along(a, n) for a, n in enumerate(shape))
    names = {f"o{a}": n for a, n in enumerate(np.indices(shape))}
    number = np.arange(prod(shape)).reshape(shape)
    want = np.unravel_index(number, tuple(other))
    for place, exact in zip(unflat(flat(at, shape), other), want, strict=True):
        made = np.broadcast_to(eval(place.text, dict(names)), shape)
        assert (made == exact).all(), place.text
        assert place.least <= made.min() and made.max() <= place.most


def test_a_transposition_of_short_rows_that_is_a_result(rng):
    """Matmuls read one as it lies; a result is written in its order, by no tiles of short sides."""
    x = normal(rng, 64, 48, 4)
    kinds, (got,), (want,) = run(lambda x: ts.transpose(x, (0, 2, 1)), x)
    assert kinds == ["computed"]
    np.testing.assert_array_equal(got, want.array)
    kinds, _, _ = run(lambda x: ts.transpose(x, (0, 2, 1)) @ x, x)
    assert "computed" not in kinds
