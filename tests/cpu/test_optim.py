"""Optimizers against NumPy in f64, and what they do with narrow parameters and bad arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import tessera as ts
from tessera.graph import tree
from tessera.optim import (
    SGD,
    AdamW,
    CosineSchedule,
    clip_by_global_norm,
    decays_matrices,
    global_norm,
)
from tolerance import assert_close


def make_params(rng: np.random.Generator, dtype: str = "f32") -> dict:
    return {
        "embedding": ts.param(rng.normal(size=(7, 4)), dtype),
        "blocks": [{"w": ts.param(rng.normal(size=(4, 5)), dtype),
                    "gain": ts.param(rng.normal(size=(5,)), dtype)}],
    }


def adamw_reference(w, grads, rates, b1, b2, eps, decay):
    """The recurrence of arXiv:1711.05101, algorithm 2, written out in f64."""
    w, m, v = np.array(w, np.float64), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        w = w - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w)
    return w


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("b1, b2", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
def test_adamw_equals_the_recurrence_in_f64(rng, jit, b1, b2):
    optimizer = AdamW(b1=b1, b2=b2, eps=1e-6, weight_decay=0.3)
    params = make_params(rng)
    structure = tree.flatten(params)[1]
    starts = [np.array(p.numpy()) for p in tree.flatten(params)[0]]
    rates = 10.0 ** rng.uniform(-3, -1, 10)
    slopes = [[rng.normal(size=w.shape).astype(np.float32) for w in starts] for _ in rates]
    update = ts.jit(optimizer.update) if jit else optimizer.update
    state = optimizer.init(params)
    for g, lr in zip(slopes, rates, strict=True):
        grads = tree.unflatten(structure, map(ts.tensor, g))
        params, state = update(params, grads, state, ts.tensor(lr, "f32"))
    for i, (path, w) in enumerate(zip(tree.paths(structure), tree.flatten(params)[0],
                                      strict=True)):
        decay = 0.3 if path == "blocks.0.w" else 0.0
        want = adamw_reference(starts[i], [g[i].astype(np.float64) for g in slopes], rates,
                               b1, b2, 1e-6, decay)
        assert_close(w.numpy(), want, "f32", n=10)
    assert state["step"].item() == 10


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_sgd_equals_the_recurrence_in_f64(rng, jit, momentum, decay):
    optimizer = SGD(momentum=momentum, weight_decay=decay)
    params = make_params(rng)
    structure = tree.flatten(params)[1]
    want = [p.numpy().astype(np.float64) for p in tree.flatten(params)[0]]
    moments = [np.zeros_like(w) for w in want]
    update = ts.jit(optimizer.update) if jit else optimizer.update
    state = optimizer.init(params)
    assert ("m" in state) == bool(momentum)
    for lr in 10.0 ** rng.uniform(-3, -1, 6):
        slopes = [rng.normal(size=w.shape).astype(np.float32) for w in want]
        grads = tree.unflatten(structure, map(ts.tensor, slopes))
        params, state = update(params, grads, state, ts.tensor(lr, "f32"))
        moments = [momentum * m + g for m, g in zip(moments, slopes, strict=True)]
        rates = [decay * (path == "blocks.0.w") for path in tree.paths(structure)]
        want = [w - lr * (m + d * w) for w, m, d in zip(want, moments, rates, strict=True)]
    for p, w in zip(tree.flatten(params)[0], want, strict=True):
        assert p.is_param
        assert_close(p.numpy(), w, "f32", n=6)
    assert state["step"].item() == 6


def test_sgd_keeps_a_master_of_narrow_parameters():
    optimizer = SGD()
    params = {"w": ts.param(np.ones(3), "bf16")}
    state = optimizer.init(params)
    for _ in range(100):
        params, state = optimizer.update(params, {"w": ts.ones((3,))}, state, 1e-4)
    np.testing.assert_allclose(state["master"]["w"].numpy(), 0.99, rtol=1e-5)
    assert params["w"].type == ts.as_type("bf16") and params["w"].tolist() == [0.98828125] * 3


def test_arrays_in_place_of_parameters_are_told_of_param():
    for optimizer in (AdamW(), SGD()):
        for wrong in (np.ones(3), 2.0):
            with pytest.raises(ts.DTypeError, match="an optimizer needs float") as info:
                optimizer.init({"w": wrong})
            assert "ts.param(x)" in info.value.hint
        with pytest.raises(ts.DTypeError) as info:
            optimizer.init({"w": "text"})
        assert "make it a parameter" not in info.value.hint


def with_buffers(rng: np.random.Generator) -> dict:
    return {"w": ts.param(rng.normal(size=(3, 2)), "f32"), "seen": ts.tensor(3), "kind": "relu",
            "mean": ts.tensor(rng.normal(size=2), "f32"), "none": None}


def shifted(params: dict, x: np.ndarray) -> ts.Tensor:
    assert params["kind"] == "relu"
    return ts.mean((x @ params["w"] - params["mean"]) ** 2)


@pytest.mark.parametrize("form", ["eager", "jit", "scan", "argnums"])
@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.1), SGD(momentum=0.9)])
def test_beside_parameters_nothing_is_trained(optimizer, form, rng):
    """Buffers, counters and settings stay as they are, and have no part in the norm."""
    params, x = with_buffers(rng), rng.normal(size=(5, 3)).astype(np.float32)
    alone = {"w": params["w"]}
    grad = ts.grad(shifted, argnums=0) if form == "argnums" else ts.grad(shifted)

    def step(params, state):
        grads, norm = clip_by_global_norm(grad(params, x), 0.5)
        assert grads["mean"] is None and grads["seen"] is None
        return *optimizer.update(params, grads, state, 0.1), norm

    state = optimizer.init(params)
    assert state["m"].keys() == {"w"}
    held = {k: v for k, v in params.items() if k != "kind"}  # what a loop carries are tensors
    run = ts.jit(step) if form == "jit" else step
    if form == "scan":
        (held, state), norm = ts.scan(
            lambda c, _: (lambda p, s, n: (({k: p[k] for k in c[0]}, s), n))(
                *step(c[0] | {"kind": "relu"}, c[1])), (held, state), length=1)
        new, norm = held | {"kind": "relu"}, norm[0]
    else:
        new, state, norm = run(params, state)
    g = ts.grad(lambda p: shifted(params | p, x))(alone)
    assert_close(norm.numpy(), np.linalg.norm(g["w"].numpy().astype(np.float64)), "f32", n=6)
    want, _ = optimizer.update(alone, clip_by_global_norm(g, 0.5)[0], optimizer.init(alone), 0.1)
    assert_close(new["w"].numpy(), want["w"].numpy(), "f32", n=8)
    assert new["w"].is_param and not new["mean"].is_param and new["kind"] == "relu"
    np.testing.assert_array_equal(new["mean"].numpy(), params["mean"].numpy())
    assert new["seen"].item() == 3 and new["none"] is None


def test_a_leaf_that_lost_its_mark_is_told_of(rng):
    params, x = with_buffers(rng) | {"b": ts.param(1.0)}, np.ones((5, 3), np.float32)
    grad, optimizer = ts.grad(shifted), AdamW()
    grads, state = grad(params, x), optimizer.init(params)
    moved = params | {"w": params["w"] - 0.1 * grads["w"]}
    with pytest.warns(UserWarning, match=r"params.w is no ts.param any more.*ts.param\(w - lr"):
        assert grad(moved, x)["w"] is None
    with pytest.raises(ts.ArgumentError, match="differ in w") as info:
        optimizer.update(moved, grads, state, 0.1)
    assert "arithmetic gives plain tensors" in info.value.hint


def test_choices_and_loops_keep_the_mark():
    w = ts.param([1.0, 2.0])
    for x in (ts.cond(ts.sum(w) > 0, lambda w: w * 0.5, lambda w: w, w),
              ts.cond(ts.sum(w) < 0, lambda w: w * 0.5, lambda w: w, w),
              ts.while_loop(lambda w: ts.sum(w) < 9, lambda w: w * 2, w),
              ts.fori_loop(0, 2, lambda i, w: w * 2, w)):
        assert x.is_param
    assert not ts.cond(ts.sum(w) > 0, lambda w: w * 0.5, lambda w: w * 2, w).is_param


def test_trees_are_walked_together():
    """Dicts in any order, None in the place of a leaf; where they differ is said by path."""
    @dataclass
    class Layer:
        w: ts.Tensor
        kind: str = "a"

    first = {"a": 1, "b": [Layer(2), (3, None)]}
    other = {"b": [Layer(None), (30, None)], "a": 10}
    seen = ts.map_tree(lambda x, y: (x, y), first, other)
    assert seen == {"a": (1, 10), "b": [Layer((2, None)), ((3, 30), None)]}
    optimizer, params = SGD(), {"x": ts.param(1.0), "y": ts.param(2.0)}
    new, _ = optimizer.update(params, {"y": 1.0, "x": 3.0}, optimizer.init(params), 1.0)
    assert [new["x"].item(), new["y"].item()] == [-2.0, 1.0]
    for wrong, words in (({"a": 1, "b": []}, "trees differ in b.0.w, b.1.0"),
                         ({"a": 1, "b": [Layer(2, "z"), (3, None)]}, "structures differ")):
        with pytest.raises(ts.ArgumentError, match=words):
            ts.map_tree(lambda x, y: x, first, wrong)


@pytest.mark.parametrize("wrong", [{"lr": 0.1}, {"params": []}])
def test_what_an_optimizer_does_not_take_is_told_of_where_it_goes(wrong):
    for kind in (AdamW, SGD):
        told = f"{kind.__name__}: .*'{next(iter(wrong))}'"
        with pytest.raises(ts.ArgumentError, match=told) as e:
            kind(**wrong)
        assert "opt.update(params, grads, state, lr)" in e.value.hint
        assert "weight_decay, decays; " in e.value.hint


def test_state_has_the_shapes_of_the_parameters_and_params_stay_params(rng):
    params, optimizer = make_params(rng), AdamW()
    state = optimizer.init(params)
    assert {path: m.shape for path, m in state["m"].items()} == {
        "embedding": (7, 4), "blocks.0.w": (4, 5), "blocks.0.gain": (5,)}
    assert state["v"].keys() == state["m"].keys() and state["master"] == {}
    step = ts.jit(lambda p, s: optimizer.update(p, p, s, 0.1))
    new, state = step(params, state)
    assert all(p.is_param for p in tree.flatten(new)[0])
    assert not any(m.is_param for m in state["m"].values())
    step(new, state)
    assert step.specializations == 1, "the second step was traced again"


@pytest.mark.row("NUM-29")
def test_a_policy_says_what_goes_in_what_adds_up_and_what_is_kept(rng):
    """fp8 in, bf16 sums, f32 masters: the forward pass multiplies fp8 weights in bf16 sums, and the
    optimizer keeps in f32 what they are rounded from."""
    policy, seen = ts.as_type("fp8_e4m3 @accum(bf16)"), []
    x = ts.tensor(np.full((1, 600), 0.5), policy)

    def loss(w):
        seen.append(w.type)
        return ts.sum(ts.cast(x @ w, "f32"))

    optimizer = AdamW(weight_decay=0.0)

    @ts.jit
    def step(w, state):
        value, g = ts.value_and_grad(loss)(w)
        return *optimizer.update({"w": w}, {"w": g}, state, 1e-3), value

    params = {"w": ts.param(np.ones((600, 2)), policy)}
    state = optimizer.init(params)
    for _ in range(20):
        params, state, value = step(params["w"], state)
    assert set(seen) == {policy} and params["w"].type == policy
    assert state["master"]["w"].type == ts.as_type("f32")
    np.testing.assert_allclose(state["master"]["w"].numpy(), 0.98, rtol=1e-3)
    assert "accum(bf16)" in step.inspect_ir("graph") or "accum=bf16" in step.inspect_ir("graph")
    rounded = ts.cast(state["master"]["w"], policy)
    assert params["w"].numpy().tobytes() == rounded.numpy().tobytes()


@pytest.mark.row("NUM-29")
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3 @accum(bf16)"])
def test_the_f32_master_adds_up_updates_that_a_narrow_weight_swallows(dtype):
    """AdamW's step is lr for a constant gradient: 1000 of 1e-4 move the master by 0.1, while each
    single one is less than half of bf16's and fp8's distance below 1."""
    optimizer, seen = AdamW(weight_decay=0.0), []

    @ts.jit
    def step(params, state, grads):
        seen.append(params["w"].type)  # what a forward pass sees
        return optimizer.update(params, grads, state, 1e-4)

    params = {"w": ts.param(np.ones((2, 3)), dtype)}
    state = optimizer.init(params)
    grads = {"w": ts.tensor(np.full((2, 3), 0.5, np.float32))}
    for _ in range(1000):
        params, state = step(params, state, grads)
    assert seen == [ts.as_type(dtype)] == [params["w"].type]
    assert state["master"]["w"].type == ts.as_type("f32")
    np.testing.assert_allclose(state["master"]["w"].numpy(), 0.9, rtol=1e-3)
    rounded = ts.cast(state["master"]["w"], dtype)
    assert params["w"].numpy().tobytes() == rounded.numpy().tobytes() != b""
    alone = ts.cast(ts.cast(ts.param(np.ones(3), dtype), "f32") - 1e-4, dtype)
    assert alone.tolist() == [1.0] * 3, "without a master the weight would not stall here"


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.0), SGD()])
@pytest.mark.parametrize("jit", [False, True])
def test_updates_are_rounded_stochastically_where_the_type_says_so(optimizer, jit):
    """Without a master, steps of an eighth of bf16's distance below 1 add up on average, of which
    rounding to the nearest would lose each. A rounding is off by at most the distance, with a
    deviation of half of it; the mean by 4 sigma."""
    n, steps, lr, distance = 20000, 40, 2.0**-11, 2.0**-8
    params = {"w": ts.param(np.ones(n), "bf16 @stochastic_round")}
    state = optimizer.init(params)
    assert state["master"] == {}
    update = ts.jit(optimizer.update) if jit else optimizer.update
    for _ in range(steps):
        params, state = update(params, {"w": ts.ones((n,))}, state, lr)
    assert params["w"].type == ts.as_type("bf16 @stochastic_round") and state["master"] == {}
    w = np.asarray(params["w"].numpy(), np.float64)
    sigma = distance / 2 * np.sqrt(steps / n)
    assert abs(w.mean() - (1 - steps * lr)) < 4 * sigma
    assert len(np.unique(w)) > 3
    near = ts.cast(ts.ones((1,)) - lr, "bf16")
    assert near.item() == 1.0, "a nearest rounding would not stall here"


def test_stochastic_updates_lower_to_kernels():
    optimizer = AdamW()
    params = {"a": ts.zeros((64, 48), "bf16 @stochastic_round"), "b": ts.zeros((48,))}
    state = optimizer.init(params)
    made = ts.jit(optimizer.update).schedule(
        params, {"a": ts.zeros((64, 48)), "b": ts.zeros((48,))}, state, 1e-3, target="sm_90a")
    assert sum(x.work.written_bytes for x in made.launches) <= 4 * 48 * 3 + 64 * 48 * 10 + 64


def test_weight_decay_spares_norms_biases_and_embeddings(rng):
    params = make_params(rng)
    picked = {p for p, x in ts.optim.named_params(params).items() if decays_matrices(p, x)}
    assert picked == {"blocks.0.w"}


def test_adamw_without_gradient_only_decays(rng):
    w = rng.normal(size=(3, 4)).astype(np.float32)
    params = {"w": ts.param(w)}
    optimizer = AdamW(weight_decay=0.5)
    zero = {"w": ts.zeros((3, 4))}
    new, _ = optimizer.update(params, zero, optimizer.init(params), 0.1)
    assert_close(new["w"].numpy(), w * (1 - 0.05), "f32")


@pytest.mark.parametrize("jit", [False, True])
def test_clipping_scales_all_leaves_by_one_factor(rng, jit):
    tensors = [rng.normal(size=s).astype(np.float32) for s in ((3, 4), (5,), ())]
    grads = {"a": ts.tensor(tensors[0]), "b": [ts.tensor(tensors[1]), ts.tensor(tensors[2])]}
    true = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in tensors))
    for limit in (true / 3, true * 3):
        clip = ts.jit(clip_by_global_norm, static=["limit"]) if jit else clip_by_global_norm
        out, norm = clip(grads, limit)
        assert_close(norm.numpy(), np.float64(true), "f32", n=18)
        factor = min(1.0, limit / true)
        for got, g in zip(tree.flatten(out)[0], tensors, strict=True):
            assert_close(got.numpy(), g * np.float64(factor), "f32", n=18)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])  # the square of 1e30 is infinite
def test_a_norm_that_is_not_finite_makes_every_gradient_nan(bad, jit):
    clip = ts.jit(clip_by_global_norm, static=["limit"]) if jit else clip_by_global_norm
    out, norm = clip({"a": ts.tensor([1.0, bad]), "b": ts.tensor([2.0])}, 1.0)
    assert not np.isfinite(norm.item())
    assert np.isnan(out["a"].numpy()).all() and np.isnan(out["b"].numpy()).all()


def test_clipping_is_differentiated_where_nothing_is_to_be_clipped():
    """The derivative of the norm at 0 is 0, so a step through zero gradients stays finite."""
    zero = {"a": ts.zeros(3), "b": ts.zeros(())}
    assert all((g.numpy() == 0).all() for g in tree.flatten(ts.grad(global_norm)(zero))[0])
    through = ts.grad(lambda g: sum(map(ts.sum, tree.flatten(clip_by_global_norm(g, 2.0)[0])[0])))
    assert all((g.numpy() == 1).all() for g in tree.flatten(through(zero))[0])
    some = ts.grad(global_norm)({"a": ts.tensor([3.0, 0.0]), "b": ts.tensor(4.0)})
    assert_close(some["a"].numpy(), np.array([0.6, 0.0]), "f32")
    assert_close(some["b"].numpy(), np.array(0.8), "f32")


def test_the_norm_of_narrow_gradients_is_computed_wide():
    big = ts.tensor(np.full(4, 300.0), "f16")  # 300^2 overflows f16
    assert global_norm([big]).item() == pytest.approx(600.0)


def test_the_schedule_is_linear_then_half_a_cosine():
    s = CosineSchedule(peak=2.0, steps=110, warmup=10, floor=0.5)
    assert [s(0), s(4), s(9)] == pytest.approx([0.2, 1.0, 2.0])
    assert s(10) == pytest.approx(2.0)
    assert s(60) == pytest.approx(1.25)  # half way between peak and floor
    assert s(109) > s(110) == s(10_000) == 0.5
    rates = [s(i) for i in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert CosineSchedule(1.0, steps=5)(0) == 1.0


def test_the_schedule_of_a_tensor_is_that_of_its_numbers():
    """f32: 2^-24 of the peak, and the cosine's 2 ulp."""
    for s in (CosineSchedule(2.0, steps=110, warmup=10, floor=0.5), CosineSchedule(1.0, steps=5)):
        steps = np.arange(130)
        want = [s(int(i)) for i in steps]
        for run in (s, ts.jit(s), ts.vmap(s)):
            got = run(ts.tensor(steps))
            assert got.dtype == "f32"
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * s.peak)
    late = CosineSchedule(1.0, steps=2**26 + 10, warmup=2**26)
    assert ts.jit(late)(ts.tensor(2**26 + 5)).item() == pytest.approx(late(2**26 + 5), abs=1e-6)


@pytest.mark.parametrize("make, words", [
    (lambda: AdamW(b1=1.0), "b1 must be in \\[0, 1\\), got 1.0"),
    (lambda: AdamW(b2=-0.1), "b2 must be"),
    (lambda: AdamW(eps=0.0), "eps must be positive"),
    (lambda: AdamW(weight_decay=-1.0), "weight_decay cannot be negative"),
    (lambda: AdamW(b1=float("nan")), "b1 must be"),
    (lambda: SGD(momentum=1.0), "momentum must be in \\[0, 1\\), got 1.0"),
    (lambda: SGD(weight_decay=-1.0), "weight_decay cannot be negative"),
    (lambda: CosineSchedule(1.0, steps=5, warmup=6), "warmup <= steps"),
    (lambda: CosineSchedule(1.0, steps=0), "steps >= 1"),
    (lambda: CosineSchedule(1.0, steps=5, floor=2.0), "floor <= peak"),
    (lambda: CosineSchedule(float("inf"), steps=5), "floor <= peak"),
    (lambda: clip_by_global_norm([ts.tensor([1.0])], 0.0), "limit must be positive"),
    (lambda: global_norm([]), "without tensors"),
])
def test_bad_settings_are_named(make, words):
    with pytest.raises(ts.ArgumentError, match=words):
        make()


def test_trees_that_do_not_belong_together_are_named(rng):
    params, optimizer = make_params(rng), AdamW()
    state = optimizer.init(params)
    alone = ts.param(ts.ones((3, 2)))
    with pytest.raises(ts.ShapeError, match="the gradient of the parameter has shape"):
        ts.optim.SGD().update(alone, ts.ones((2, 2)), ts.optim.SGD().init(alone), 0.1)
    with pytest.raises(ts.ArgumentError, match="differ in 'blocks.0.gain', 'blocks.0.w'"):
        optimizer.update(params, {"embedding": params["embedding"]}, state, 0.1)
    grads = tree.map_tree(lambda p: p, params) | {"embedding": ts.zeros((4, 7))}
    with pytest.raises(ts.ShapeError, match=r"gradient of 'embedding' .*\[4, 7\].*\[7, 4\]"):
        optimizer.update(params, grads, state, 0.1)
    with pytest.raises(ts.ArgumentError, match=r"AdamW.update: missing .*'lr'") as info:
        optimizer.update(params, params, state)
    assert info.value.hint == "AdamW.update(params, grads, state, lr)"
    with pytest.raises(ts.ArgumentError, match="no AdamW state"):
        optimizer.update(params, params, {}, 0.1)
    with pytest.raises(ts.ArgumentError, match="no SGD state"):
        SGD(momentum=0.9).update(params, params, SGD().init(params), 0.1)
    with pytest.raises(ts.ArgumentError, match="state and parameters differ in x"):
        optimizer.update({"x": ts.param([1.0])}, {"x": ts.param([1.0])},
                         optimizer.init({}), 0.1)
    for wrong, kind in ((ts.tensor([1, 2]), "int64"), (3.0, "float")):
        with pytest.raises(ts.DTypeError, match=f"parameter 'x' is {kind}"):
            optimizer.init({"x": wrong})
