"""Recipes of fp8 products: what they record, which scales they take, under every transform."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_scaled_matmuls import as_read
from tessera.bench.catalogue import MODELS
from tessera.bench.models.record import weights
from tessera.bench.models.step import first_state, training_step
from tessera.graph import tree
from tolerance import assert_close

DELAYED = ts.DelayedScaling(amax_history_len=4)
E4M3, E5M2 = 'fp8_e4m3 @scaled("amax")', 'fp8_e5m2 @scaled("amax")'


def numbers(rng: Any, *shape: int, size: float = 1.0) -> ts.Tensor:
    return ts.tensor((rng.standard_normal(shape) * size).astype(np.float32))


def amax(x: Any) -> np.float32:
    return np.abs(np.asarray(x)).max()


def at_scale(x: Any, dtype: str, scale: float) -> np.ndarray:
    return np.asarray(ts.quantize(x, dtype, scale=scale).numpy(), np.float64)


def gradients(scaling: Any, g: Any) -> Any:
    """(x, w, history) -> (y, (dx, dw, amax)) with the cotangent g of y."""
    def loss(x, w, history):
        y = scaling.matmul(x, w, history)
        return ts.sum(y * g), y

    return ts.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


@pytest.mark.parametrize("jitted", [False, True])
def test_scales_are_those_of_the_history(jitted, rng):
    x, w = numbers(rng, 2, 8, 32), numbers(rng, 32, 16, size=0.02)
    g = numbers(rng, 2, 8, 16, size=1e-6)
    scaling = ts.DelayedScaling(amax_history_len=3, margin=1)
    history = {"x": ts.tensor([1.0, 7.0, 2.0]), "w": ts.tensor([0.5, 0.0, 0.0]),
               "cotangent": ts.tensor([0.0, 1e-5, 2e-5])}
    run = gradients(scaling, g)
    (_, y), (dx, dw, found) = (ts.jit(run) if jitted else run)(x, w, history)
    sizes = [np.float32(2 * a) * np.float32(1 / most)
             for a, most in ((7.0, 448), (0.5, 448), (2e-5, 57344))]
    X, W = (at_scale(t, E4M3, s) for t, s in zip((x, w), sizes, strict=False))
    G = at_scale(g, E5M2, sizes[2])
    for got, want in ((y, X @ W), (dx, G @ W.T), (dw, np.einsum("bmk,bmn->kn", X, G))):
        assert_close(got, want, "f32", n=64, scale=amax(want))
    for name, t in (("x", x), ("w", w), ("cotangent", g)):
        np.testing.assert_array_equal(found[name], np.full(3, amax(t)))


def test_what_outgrows_the_history_saturates_and_is_recorded(rng):
    x, w = numbers(rng, 4, 16), numbers(rng, 16, 4)
    g = np.ones((4, 4), np.float32)
    g[1, 1] = np.inf
    history = {n: ts.full((4,), 0.25) for n in ("x", "w", "cotangent")}
    (_, y), (dx, dw, found) = gradients(DELAYED, ts.tensor(g))(x, w, history)
    X, W = (np.clip(np.asarray(t), -0.25, 0.25) for t in (x, w))
    assert np.abs(np.asarray(y) - X @ W).max() < 16 * 2 * 0.25**2 / 16
    assert found["x"][0].item() == amax(x) and found["cotangent"][0].item() == 1.0
    assert not np.isfinite(np.asarray(dx)[1]).any() and np.isfinite(np.asarray(dx)[[0, 2, 3]]).all()


def test_the_newest_takes_the_place_of_the_oldest():
    histories = {"up": DELAYED.init(), "down": [DELAYED.init()]}
    update = ts.jit(DELAYED.update)
    for step in range(1, 7):
        found = tree.map_tree(lambda h, v=float(step): ts.full(h.shape, v), histories)
        histories = update(histories, found, ts.tensor(step))
    for history in (histories["up"], histories["down"][0]):
        for h in history.values():
            assert h.tolist() == [4.0, 5.0, 6.0, 3.0]  # steps 4, 5, 6 and 3, by their remainders


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_stacked_histories_are_updated_row_by_row(layers):
    """Those of the layers of a scan; of one layer each element was replaced."""
    stack = ts.zeros((layers, 4))
    for step in range(6):
        found = np.broadcast_to(np.arange(layers)[:, None] + 10.0 * step, (layers, 4))
        stack = DELAYED.update([stack], [ts.tensor(found, "f32")], step)[0]
    want = np.array([40.0, 50.0, 20.0, 30.0]) + np.arange(layers)[:, None]
    assert stack.tolist() == want.tolist()


def test_a_first_step_records_with_scales_of_its_own(rng):
    """With scales of 1, as an empty history gives them, small cotangents vanish."""
    x, w, g = numbers(rng, 8, 32), numbers(rng, 32, 16, size=0.02), numbers(rng, 8, 16, size=1e-9)
    (_, y), (dx, dw, found) = gradients(DELAYED.first, g)(x, w, DELAYED.init())
    current = ts.cast(x, E4M3) @ ts.cast(w, E4M3)
    np.testing.assert_array_equal(y, current)
    off = np.asarray(dx) - np.asarray(g) @ np.asarray(w).T
    assert np.linalg.norm(off) < 0.1 * np.linalg.norm(dx)
    assert found["cotangent"].tolist() == [amax(g)] * 4
    empty = gradients(DELAYED, g)(x, w, DELAYED.init())[1]
    assert not np.asarray(empty[0]).any()
    guessed = gradients(DELAYED, g)(x, w, DELAYED.init(x=4.0, w=0.1, cotangent=1e-6))[1]
    assert np.linalg.norm(np.asarray(guessed[1]) - np.asarray(dw)) < 0.1 * np.linalg.norm(dw)


# --- transforms ---------------------------------------------------------------------------------
def layers(scaling: Any, rows: list[dict], x: Any) -> Any:
    for p in rows:
        x = ts.tanh(scaling.matmul(x, p["w"], p["h"]))
    return ts.sum(x * x)


def stacked(rows: list[dict]) -> Any:
    return tree.map_tree(lambda *xs: ts.stack(xs), *rows)


def make_layers(rng: Any) -> list[dict]:
    return [{"w": numbers(rng, 16, 16, size=0.3),
             "h": {n: ts.tensor([0.0, s, 0.0, s / 2]) for n, s in
                   (("x", 3.0), ("w", 1.0 + i), ("cotangent", 2.0))}} for i in range(3)]


def assert_same(a: Any, b: Any) -> None:
    leaves = zip(tree.flatten(a)[0], tree.flatten(b)[0], strict=True)
    for x, y in leaves:
        assert_close(x, np.asarray(y, np.float64), "f32", n=64, scale=amax(y))


def test_scan_keeps_a_history_of_each_layer(rng):
    rows, x = make_layers(rng), numbers(rng, 8, 16)

    def scanned(p, x):
        def layer(x, p):
            return ts.tanh(DELAYED.matmul(x, p["w"], p["h"])), None

        y, _ = ts.scan(layer, x, p)
        return ts.sum(y * y)

    want = ts.grad(lambda rows: layers(DELAYED, rows, x))(rows)
    for run in (ts.grad(scanned), ts.jit(ts.grad(scanned))):
        assert_same(run(stacked(rows), x), stacked(want))


@pytest.mark.parametrize("wrap", [ts.checkpoint, ts.remat(policy="save_matmuls")])
def test_checkpoints_record_once(wrap, rng):
    rows, x = make_layers(rng), numbers(rng, 8, 16)
    f = wrap(lambda rows, x: layers(DELAYED, rows, x))
    want = ts.grad(lambda rows: layers(DELAYED, rows, x))(rows)
    for run in (ts.grad(f), ts.jit(ts.grad(f))):
        assert_same(run(rows, x), want)


def test_batched_examples_are_recorded_together_or_each(rng):
    """The gradient of a batched function sees one product; a batched gradient many."""
    rows, x = make_layers(rng), numbers(rng, 5, 8, 16)
    whole = ts.grad(lambda rows: layers(DELAYED, rows, x))(rows)
    batched = ts.grad(lambda rows: ts.sum(ts.vmap(lambda x: layers(DELAYED, rows, x))(x)))(rows)
    assert_same(batched, whole)
    each = ts.vmap(ts.grad(lambda rows, x: layers(DELAYED, rows, x)), in_axes=(None, 0))(rows, x)
    alone = [ts.grad(lambda rows, i=i: layers(DELAYED, rows, x[i]))(rows) for i in range(5)]
    assert_same(each, stacked(alone))
    per_row = ts.vmap(lambda x, rows: layers(DELAYED, rows, x), in_axes=(0, 0))(
        x[:3], stacked([rows] * 3))
    assert_same(per_row, ts.stack([layers(DELAYED, rows, x[i]) for i in range(3)]))


def test_ranks_record_the_largest_of_all(rng):
    x, w = numbers(rng, 64, 32), numbers(rng, 32, 48)
    history = DELAYED.init(x=4.0, w=4.0, cotangent=30.0)
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    X = ts.dist.tensor((64, 32), ts.ShardSpec(("row",), ("dp",)), mesh, init=x.numpy())
    W = ts.dist.tensor((32, 48), ts.ShardSpec(("col",), ("tp",)), mesh, init=w.numpy())
    H = tree.map_tree(lambda h: ts.dist.distribute(h, None, mesh=mesh), history)
    grad = ts.jit(ts.grad(lambda w, h, x: ts.sum(DELAYED.matmul(x, w, h) ** 2), argnums=(0, 1)))
    (dw, found), (want, wanted) = grad(W, H, X), grad(w, history, x)
    assert_close(dw, want, "f32", n=64, scale=amax(want))
    for name in history:
        assert_close(found[name], wanted[name], "f32", n=32)
    assert found["x"].numpy().tolist() == [amax(x)] * 4


def test_saturation_is_no_fault_for_sentinels(rng):
    """Nor are numbers that vanish; both are counted."""
    x, w = numbers(rng, 8, 32), numbers(rng, 32, 16)
    run = ts.jit(gradients(DELAYED, ts.ones((8, 16))))
    with ts.debug.numerics("raise"):
        run(x, w, DELAYED.init(x=0.1, w=0.1, cotangent=0.1))
    with ts.debug.numerics("flag"):
        run(x, w, DELAYED.init(x=0.1, w=0.1, cotangent=0.1))
        found = ts.debug.flags()
    assert found.overflow > 0 and (found.nan, found.inf) == (0, 0)


def test_forward_mode_sees_the_product_alone(rng):
    x, t, w = numbers(rng, 8, 32), numbers(rng, 8, 32), numbers(rng, 32, 16)
    history = DELAYED.init(x=8.0, w=8.0, cotangent=8.0)
    _, tangent = ts.jvp(lambda x: DELAYED.matmul(x, w, history), (x,), (t,))
    scale = np.float32(8.0) * np.float32(1 / 448)
    assert_close(tangent, np.asarray(t, np.float64) @ at_scale(w, E4M3, scale), "f32", n=32,
                 scale=amax(tangent))


def test_products_that_share_a_history_add_up(rng):
    x, w = numbers(rng, 8, 16), numbers(rng, 16, 16)
    history = DELAYED.init(x=9.0, w=9.0, cotangent=9.0)
    found = ts.grad(lambda h: ts.sum(DELAYED.matmul(DELAYED.matmul(x, w, h), w, h)))(history)
    assert found["w"][0].item() == 2 * amax(w)


# --- training -----------------------------------------------------------------------------------
TEXT = Path(__file__).parents[2] / "docs/guide/programming_model.md"


@functools.cache
def trained(name: str, steps: int = 80) -> np.ndarray:
    """Losses of a small GPT-2 on a text, each step on another part of it."""
    model = MODELS[name].sized(B=4, T=32, layers=2, d=64, heads=2, vocabulary=96)
    text = np.frombuffer(TEXT.read_bytes()[:20000], np.uint8).astype(np.int32) % 96
    params = tree.map_tree(ts.tensor, weights(model))
    state, step = first_state(model, params), training_step(model)
    places = np.random.default_rng(1).integers(0, len(text) - 33, (steps, 4))
    losses = []
    for at in places:
        rows = np.stack([text[i:i + 33] for i in at])
        x, y = (ts.tensor(np.ascontiguousarray(t)) for t in (rows[:, :-1], rows[:, 1:]))
        loss, params, state = step(params, state, x, y)
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize("name", ["gpt2-350m-fp8", "gpt2-350m-fp8-current"])
def test_losses_follow_those_of_bf16(name):
    plain, fp8 = trained("gpt2-350m"), trained(name)
    assert plain[-10:].mean() < 0.8 * plain[0]  # it learns
    assert np.abs(fp8 / plain - 1).max() < 0.01
    assert (fp8 != plain).sum() > 70


# --- formats and mistakes -----------------------------------------------------------------------
def test_e4m3_for_both(rng):
    x, w, g = numbers(rng, 8, 32), numbers(rng, 32, 16), numbers(rng, 8, 16)
    scaling = ts.CurrentScaling(fp8_format="e4m3")
    dx = ts.grad(lambda x: ts.sum(scaling.matmul(x, w) * g))(x)
    assert_close(dx, as_read(g, E4M3) @ as_read(w, E4M3).T, "f32", n=32, scale=amax(dx))


@pytest.mark.parametrize("call, text", [
    (lambda x: DELAYED.matmul(x, x), "delayed scaling of a product without a history"),
    (lambda x: DELAYED.matmul(x, x, x), "a history of a product has x, w, cotangent, got Tensor"),
    (lambda x: DELAYED.matmul(x, x, {"x": x}), r"has x, w, cotangent, got \['x'\]"),
    (lambda x: DELAYED.matmul(x, x, dict.fromkeys(("x", "w", "cotangent"), x)),
     "the history of x has 2 axes, not one"),
    (lambda x: ts.DelayedScaling(amax_history_len=0), "amax_history_len=0"),
    (lambda x: ts.CurrentScaling("e5m2"), "fp8_format='e5m2'"),
    (lambda x: DELAYED.init(w=-1.0), "the largest numbers of a tensor are not negative, got -1.0")])
def test_mistakes(call, text):
    with pytest.raises(ts.TesseraError, match=text):
        call(ts.ones((4, 4)))
