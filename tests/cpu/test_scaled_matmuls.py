"""Matmuls of fp8 with a scale: values and derivatives, the codes that they multiply, their form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tessera.kernels.cards import Card
from tessera.numerics import as_type
from tolerance import assert_close

E4M3, E5M2 = 'fp8_e4m3 @scaled("amax")', 'fp8_e5m2 @scaled("amax")'
HALF_STEP = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}  # of a number, relative
FORMS: dict[str, Any] = {  # f(x, w), the extents of x and w
    "nn": (lambda x, w: x @ w, (24, 48), (48, 16)),
    "nt": (lambda x, w: x @ w.T, (24, 48), (16, 48)),
    "tn": (lambda x, w: x.T @ w, (48, 24), (48, 16)),
    "batched": (lambda x, w: x @ w, (3, 24, 48), (3, 48, 16)),
    "shared weights": (lambda x, w: x @ w, (3, 8, 48), (48, 16)),
    "broadcast batch": (lambda x, w: x @ w, (3, 1, 8, 48), (2, 48, 16)),
    "reshaped": (lambda x, w: ts.reshape(x, (24, 48)) @ ts.reshape(w, (48, 16)), (3, 8, 48),
                 (8, 6, 16)),
    "einsum": (lambda x, w: ts.einsum("nd,edf->enf", x, w), (8, 48), (2, 48, 16)),
    "einsum that sums": (lambda x, w: ts.einsum("ndz,df->nf", x, w), (8, 48, 2), (48, 16)),
    "linear": (ts.linear, (24, 48), (16, 48)),
    "vector": (lambda x, w: x @ w, (48,), (48, 16)),
    "gemm": (lambda x, w: ts.gemm(x, w, alpha=2.0), (24, 48), (48, 16)),
}


def quantised(form: str, types: tuple[str, str]) -> Any:
    return lambda x, w: FORMS[form][0](ts.cast(x, types[0]), ts.cast(w, types[1]))


def as_read(x: Any, dtype: str) -> np.ndarray:
    """The numbers that a tensor of a scaled type has, in f64."""
    return np.asarray(ts.cast(x, dtype), np.float64)


def draws(form: str, rng: Any) -> list[ts.Tensor]:
    return [ts.tensor((rng.standard_normal(s) * k).astype(np.float32))
            for s, k in zip(FORMS[form][1:], (3.0, 0.02), strict=True)]


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_derivatives_of_the_codes_against_f64(form, types, rng):
    """Nothing is rounded but the operands and, to e5m2 with a scale, the cotangent; this only where
    codes are multiplied, and not sums of them."""
    f, plain, (x, w) = quantised(form, types), FORMS[form][0], draws(form, rng)
    exact = [ts.tensor(as_read(t, kind)) for t, kind in zip((x, w), types, strict=True)]
    want = np.asarray(plain(*exact))
    g = (rng.standard_normal(want.shape) * 1e-7).astype(np.float32)
    read = ts.tensor(as_read(g, E5M2) if form != "einsum that sums" else g.astype(np.float64))
    slopes = ts.grad(lambda *xs: ts.sum(plain(*xs) * read), argnums=(0, 1))(*exact)
    for run in (f, ts.jit(f)):
        assert run(x, w).type == ts.f32
        assert_close(run(x, w), want, "f32", n=96, scale=np.abs(want).max())
    grad = ts.grad(lambda *xs: ts.sum(f(*xs) * ts.tensor(g)), argnums=(0, 1))
    for run in (grad, ts.jit(grad)):
        for got, wanted in zip(run(x, w), slopes, strict=True):
            assert got.type == ts.f32
            assert_close(got, wanted, "f32", n=96, scale=np.abs(np.asarray(wanted)).max())


def test_gradients_are_those_of_f32_within_the_noise_of_the_types(rng):
    """Of two factors and a scale each result has errors of their half steps, at most."""
    x, w, g = (rng.standard_normal(s).astype(np.float32) for s in ((64, 96), (96, 80), (64, 80)))
    f = quantised("nn", (E4M3, E4M3))
    dx, dw = ts.grad(lambda *xs: ts.sum(f(*xs) * ts.tensor(g)), argnums=(0, 1))(x, w)
    noise = HALF_STEP["fp8_e4m3"] + HALF_STEP["fp8_e5m2"]
    for got, want, most in ((dx, g @ w.T, np.abs(g) @ np.abs(w).T),
                            (dw, x.T @ g, np.abs(x).T @ np.abs(g))):
        error = np.abs(np.asarray(got) - want)
        assert (error <= 1.1 * noise * most + 1e-3 * most.max()).all()
        assert np.linalg.norm(error) < 0.1 * np.linalg.norm(want)


@pytest.mark.parametrize("form", ["nn", "shared weights", "einsum", "linear", "batched"])
def test_a_graph_multiplies_the_codes(form, rng):
    f = quantised(form, (E4M3, E4M3))
    grad = ts.grad(lambda *xs: ts.sum(f(*xs) ** 2), argnums=(0, 1))
    graph = ts.jit(grad).graph(*draws(form, rng))
    kinds = [tuple(v.aval.dtype.name for v in (n.inputs[0], n.inputs[2]))
             for n in graph.nodes if n.op.name == "scaled_matmul"]
    assert sorted(kinds) == [("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"),
                             ("fp8_e5m2", "fp8_e4m3")]
    assert not any(n.op.name in ("matmul", "dequantize") for n in graph.nodes)


def test_second_derivatives_and_forward_mode(rng):
    """With operands and cotangents that fp8 holds exactly it is a plain product, to any order."""
    x, w, t = (ts.tensor(rng.integers(-1, 2, s).astype(np.float32))
               for s in ((8, 16), (16, 4), (8, 16)))

    def loss(multiply):
        return lambda x, w: ts.sum(multiply(x, w) ** 2) / 2

    def plain(x, w):
        return x @ w

    f = quantised("nn", (E4M3, E4M3))
    for transform in (lambda h: ts.jvp(lambda x: h(x, w), (x,), (t,))[1],
                      lambda h: ts.grad(lambda x: ts.sum(ts.grad(h)(x, w) * t))(x)):
        got, want = transform(loss(f)), transform(loss(plain))
        assert_close(got, want, "fp8_e5m2", n=64, scale=np.abs(np.asarray(want)).max())


def test_rows_of_a_batch_have_scales_of_their_own(rng):
    x, w = draws("batched", rng)
    x = x * ts.tensor(np.array([1e-4, 1.0, 1e4], np.float32))[:, None, None]
    f = quantised("nn", (E4M3, E4M3))
    both = ts.vmap(ts.grad(lambda x, w: ts.sum(f(x, w) ** 2), argnums=(0, 1)))(x, w)
    alone = [ts.grad(lambda x, w: ts.sum(f(x, w) ** 2), argnums=(0, 1))(x[i], w[i])
             for i in range(3)]
    for k in (0, 1):
        np.testing.assert_array_equal(both[k], ts.stack([a[k] for a in alone]))
    np.testing.assert_array_equal(ts.vmap(f)(x, w), ts.stack([f(x[i], w[i]) for i in range(3)]))
    shared = ts.vmap(f, in_axes=(0, None))(x, w[0])
    np.testing.assert_array_equal(shared, ts.stack([f(x[i], w[0]) for i in range(3)]))


@pytest.mark.parametrize("x_axes, w_axes", [(("row", "dp"), ("col", "tp")),
                                            (("col", "tp"), ("row", "tp"))])
def test_shards_share_the_scale_of_the_whole(x_axes, w_axes, rng):
    """On a mesh the largest number is that of all ranks, so results are those of one process."""
    x, w = draws("nn", rng)
    grad = ts.jit(ts.value_and_grad(
        lambda *xs: ts.sum(quantised("nn", (E4M3, E4M3))(*xs) ** 2), argnums=(0, 1)))
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    parts = [ts.dist.tensor(tuple(t.shape), ts.ShardSpec((place,), (axis,)), mesh, init=t.numpy())
             for t, (place, axis) in zip((x, w), (x_axes, w_axes), strict=True)]
    (loss, slopes), (want, wanted) = grad(*parts), grad(x, w)
    assert_close(loss, want, "f32", n=24 * 16)
    for got, exact in zip(slopes, wanted, strict=True):
        # a sum of another order may fall to the other side of a rounding of the cotangent
        most = np.abs(np.asarray(exact)).max()
        assert np.abs(np.asarray(got) - np.asarray(exact)).max() <= HALF_STEP["fp8_e5m2"] * most


# --- what is no usual number -------------------------------------------------------------------
def test_zeros_have_the_scale_1(rng):
    z, w = ts.zeros((4, 8)), ts.tensor(rng.standard_normal((8, 4)).astype(np.float32))
    f = quantised("nn", (E4M3, E4M3))
    assert ts.cast(z, E4M3).scale.item() == 1.0
    assert not np.asarray(f(z, w)).any()
    dz, dw = ts.grad(lambda *xs: ts.sum(f(*xs)), argnums=(0, 1))(z, w)
    assert np.isfinite(np.asarray(dz)).all() and not np.asarray(dw).any()
    none = ts.grad(lambda x: ts.sum(f(x, w) * 0.0))(ts.ones((4, 8)))
    assert not np.asarray(none).any()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_numbers_of_any_size(size, rng):
    """Neither a scale nor its reciprocal leaves the range; tiny numbers may vanish."""
    x = (rng.uniform(0.5, 1, (4, 8)) * size).astype(np.float32)
    q = ts.cast(ts.tensor(x), E4M3)
    values = q.numpy()
    assert np.isfinite(values).all() and 2.0**-126 <= q.scale.item() < np.inf
    lost = 2.0**-10 * q.scale.item()  # half of the least number
    assert (np.abs(values - x) <= np.maximum(1.01 * HALF_STEP["fp8_e4m3"] * x, lost)).all()
    np.testing.assert_array_equal(ts.jit(lambda x: ts.dequantize(ts.cast(x, E4M3)))(x), values)


def test_infinities_saturate_and_leave_the_scale_to_finite_numbers(rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    x[1, 2], x[2, 3] = np.inf, np.nan
    for run in (ts.cast, ts.jit(lambda x, t=E4M3: ts.cast(x, t))):
        q = run(ts.tensor(x), E4M3) if run is ts.cast else run(ts.tensor(x))
        most = np.abs(x[np.isfinite(x)]).max()
        assert q.scale.item() == np.float32(most * np.float32(1 / 448))
        values = q.numpy()
        assert values[1, 2] == np.float32(448) * q.scale.item() and np.isnan(values[2, 3])


def test_a_bad_cotangent_shows_in_every_gradient_it_reaches(rng):
    """Saturated it would be a plausible number, and no loss scale would see it."""
    x, w = draws("nn", rng)
    f = quantised("nn", (E4M3, E4M3))
    for bad in (np.inf, -np.inf, np.nan):
        g = np.ones((24, 16), np.float32)
        g[3, 5] = bad
        dx, dw = ts.grad(lambda x, w, g: ts.sum(f(x, w) * g), argnums=(0, 1))(x, w, ts.tensor(g))
        dx, dw = np.asarray(dx), np.asarray(dw)
        assert not np.isfinite(dx[3]).any() and np.isfinite(np.delete(dx, 3, 0)).all()
        assert not np.isfinite(dw[:, 5]).any() and np.isfinite(np.delete(dw, 5, 1)).all()


def test_a_type_with_a_scale_beside_one_without(rng):
    """The codes of the plain one have the scale 1; its cotangent is rounded to it as ever."""
    x, w = draws("nn", rng)
    w = ts.cast(w * 10.0, "fp8_e4m3")
    y = ts.cast(x, E5M2) @ w
    want = as_read(x, E5M2) @ np.asarray(ts.cast(w, "f64"))
    assert_close(y, want, "f32", n=48, scale=np.abs(want).max())
    per_row = ts.cast(x, "fp8_e4m3 @per_channel(0)")  # is multiplied out, as ever
    want = as_read(x, "fp8_e4m3 @per_channel(0)") @ np.asarray(ts.cast(w, "f64"))
    assert_close(per_row @ w, want, "f32", n=48, scale=np.abs(want).max())


def test_a_given_scale_saturates_what_is_beyond():
    x = ts.tensor([1.0, 100.0, -1e6])
    q = ts.quantize(x, E4M3, scale=0.125)
    assert q.numpy().tolist() == [1.0, 56.0, -56.0] and q.scale.item() == 0.125
    with pytest.raises(ts.ShapeError, match="one number for the whole tensor, got 1 axes"):
        ts.quantize(x, E4M3, scale=x)
    with pytest.raises(ts.DTypeError, match="fp8_e4m3 has no scale"):
        ts.quantize(x, "fp8_e4m3", scale=1.0)


def test_sentinels_find_no_fault_with_numbers_that_vanish(rng):
    """Underflow is counted, as of every cast. Nothing overflows, and nothing is refused."""
    x, w = draws("nn", rng)
    w = w * ts.exp(4 * ts.tensor(rng.standard_normal(tuple(w.shape)).astype(np.float32)))
    f = quantised("nn", (E4M3, E4M3))
    grad = ts.jit(ts.grad(lambda *xs: ts.sum(f(*xs) ** 2), argnums=(0, 1)))
    with ts.debug.numerics("raise"):
        grad(x, w), grad(ts.zeros((24, 48)), w)
    with ts.debug.numerics("flag"):
        grad(x, w)
        found = ts.debug.flags()
    assert found.underflow > 0 and (found.overflow, found.nan, found.inf) == (0, 0, 0)


# --- kernels ----------------------------------------------------------------------------------
def step(p: dict, x: Any) -> Any:
    """Two layers as a user writes them."""
    h = ts.gelu(ts.cast(ts.cast(x, E4M3) @ ts.cast(p["up"], E4M3), "bf16"))
    return ts.sum(ts.cast(h, E4M3) @ ts.cast(p["down"], E4M3) * ts.cast(x, "f32"))


@pytest.mark.parametrize("target, form", [("sm_90a", "wgmma"), ("sm_89", "mma")])
def test_every_product_is_made_by_tensor_cores_from_codes(target, form):
    p = {"up": ts.zeros((128, 256)), "down": ts.zeros((256, 128))}
    grad, x = ts.jit(lambda p, x: ts.grad(step)(p, x)), ts.zeros((64, 128), "bf16")
    made = grad.schedule(p, x, target=target)
    found = Counter(((as_type(m.operands[0]).dtype.bits, as_type(m.operands[1]).dtype.bits), f)
                    for m in made.matmuls for f in m.how.all)
    assert found == {((8, 8), form): 4}  # of "down" the result itself is not needed
    if target == "sm_90a":
        plan = CudaProgram(grad.graph(p, x), target).plan
        text = "\n".join(line.text for line in plan.lines())
        assert "operands of fp8_e5m2 and fp8_e4m3, sums in f32" in text
        assert "copy of a and b, because wgmma reads fp8_e4m3 and fp8_e5m2 only along the " \
            "contracted axis" in text


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_kernels_compute_the_same(target, rng):
    x, w = draws("nn", rng)
    f = quantised("nn", (E4M3, E4M3))
    both = ts.value_and_grad(lambda *xs: ts.sum(f(*xs) ** 2), argnums=(0, 1))
    made = CudaProgram(ts.jit(lambda x, w: (f(x, w), both(x, w)[1])).graph(x, w), target)
    got = made.run([x.array, w.array])
    for y, want in zip(got, (f(x, w), *both(x, w)[1]), strict=True):
        assert_close(y, want, "f32", n=96, scale=np.abs(np.asarray(want)).max())


def test_scale_bias_and_rounding_run_in_the_matmul():
    """Of operands with a batch axis, whose rows are those of one matrix, too."""
    scaling = ts.CurrentScaling()

    def linear(x: Any, w: Any, b: Any) -> Any:
        return ts.cast(scaling.matmul(x, w) + b, "bf16")

    x, w, b = ts.ones((2, 512, 64)), ts.ones((64, 512)), ts.ones(512)
    plan = CudaProgram(ts.jit(linear).graph(x, w, b), "sm_90a").plan
    whole = [(g.kind, y.type.dtype.name) for g in plan.groups for y in g.writes
             if y.shape in ((2, 512, 512), (1024, 512))]
    assert whole == [("gemm", "bf16")]


def test_parts_of_a_long_sum_fill_the_multiprocessors_once():
    """By blocks of fp8, which have half the columns of those of bf16."""
    def product(x: Any, y: Any) -> Any:
        return ts.cast(ts.transpose(ts.cast(x, E4M3)) @ ts.cast(y, E4M3), "f32")

    x = ts.zeros((16384, 1024))
    plan = CudaProgram(ts.jit(product).graph(x, x), "sm_90a").plan
    (gemm,) = [g for g in plan.groups if g.kind == "gemm"]
    assert (gemm.schedule.m, gemm.schedule.n) == (128, 128)
    assert 0.9 * Card().multiprocessors < np.prod(gemm.grid) <= Card().multiprocessors
