"""Every record of an optimizer, present and future: its recurrence in f64, and what all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from mesh.training import COLUMNS, mesh_of
from tessera.optim import OPTIMIZERS, Adafactor, AdamW, Lion, Muon
from tolerance import assert_close

LR, DECAY = 0.03, 0.2


# --- the recurrences ----------------------------------------------------------------------------
def sgd(w, gs, s):
    m = 0.0
    for g in gs:
        m = s.momentum * m + g
        w = w - LR * (m + DECAY * w)
    return w


def adamw(w, gs, s):
    m = v = 0.0
    for t, g in enumerate(gs, 1):
        m, v = s.b1 * m + (1 - s.b1) * g, s.b2 * v + (1 - s.b2) * g**2
        w = w - LR * (m / (1 - s.b1**t) / (np.sqrt(v / (1 - s.b2**t)) + s.eps) + DECAY * w)
    return w


def lion(w, gs, s):
    """arXiv:2302.06675, algorithm 2"""
    m = 0.0
    for g in gs:
        w = w - LR * (np.sign(s.b1 * m + (1 - s.b1) * g) + DECAY * w)
        m = s.b2 * m + (1 - s.b2) * g
    return w


def adafactor(w, gs, s):
    """arXiv:1804.04235, algorithm 4, and 5 for a matrix whose sides are not too short"""
    rms = lambda x: np.sqrt((x**2).mean())  # noqa: E731
    rows = columns = v = m = 0.0
    for t, g in enumerate(gs, 1):
        b, square = 1 - t**-s.decay_rate, g**2 + s.eps
        if min(w.shape) >= s.min_dim_size_to_factor:
            rows = b * rows + (1 - b) * square.mean(1)
            columns = b * columns + (1 - b) * square.mean(0)
            v = np.outer(rows, columns) / rows.mean()
        else:
            v = b * v + (1 - b) * square
        u = g / np.sqrt(v)
        u = LR * u / max(1, rms(u) / s.clipping_threshold)
        u *= max(1e-3, rms(w)) if s.multiply_by_parameter_scale else 1
        m = s.momentum * m + (1 - s.momentum) * u
        w = w - m - LR * DECAY * w
    return w


def muon(w, gs, s):
    """kellerjordan.github.io/posts/muon; arXiv:2502.16982, eq. 4"""
    a, b, c = s.ns_coeffs
    m = 0.0
    for g in gs:
        m = s.momentum * m + (1 - s.momentum) * g
        u = s.momentum * m + (1 - s.momentum) * g if s.nesterov else m
        x = u / np.linalg.norm(u)
        for _ in range(s.ns_steps):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        rows, columns = w.shape
        scale = (max(1, columns / rows) ** 0.5 if s.consistent_rms is None
                 else s.consistent_rms * max(rows, columns) ** 0.5)
        w = w - LR * (scale * x + DECAY * w)
    return w


CASES: list[tuple[Callable, str, dict[str, Any]]] = [
    (sgd, "SGD", {"momentum": 0.9}), (adamw, "AdamW", {}), (lion, "Lion", {}),
    (adafactor, "Adafactor", {"min_dim_size_to_factor": 5}), (adafactor, "Adafactor", {}),
    (adafactor, "Adafactor", {"min_dim_size_to_factor": 5, "momentum": 0.9, "decay_rate": 0.7,
                              "clipping_threshold": 0.6, "multiply_by_parameter_scale": False}),
    (muon, "Muon", {"ns_type": "f32"}), (muon, "Muon", {"ns_type": "f32", "nesterov": False}),
    (muon, "Muon", {"ns_type": "f32", "consistent_rms": None, "ns_steps": 3}),
]


def draws(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("recurrence, name, settings", CASES)
def test_steps_are_those_of_the_recurrence_in_f64(recurrence, name, settings, shape, rng):
    record = OPTIMIZERS[name](**settings, weight_decay=DECAY)
    w, gs = draws(rng, *shape), [draws(rng, *shape) for _ in range(4)]
    params, update = {"w": ts.param(w)}, ts.jit(record.update)
    state = record.init(params)
    for g in gs:
        params, state = update(params, {"w": ts.tensor(g)}, state, LR)
    want = recurrence(w.astype(np.float64), [g.astype(np.float64) for g in gs], record)
    # the products of Muon multiply what f32 has rounded by its coefficients, ns_steps times
    assert_close(params["w"].numpy(), want, "f32", n=3000 if name == "Muon" else 40)
    assert update.specializations == 1
    if settings.get("ns_type") is None:  # parameters of f64: the rate and the count, too, are f64
        params, wide = {"w": ts.param(w, "f64")}, record.init({"w": ts.param(w, "f64")})
        for g in gs:
            params, wide = update(params, {"w": ts.tensor(g, "f64")}, wide, LR)
        assert_close(params["w"].numpy(), want, "f64", n=40)


def test_every_record_has_a_recurrence():
    assert {name for _, name, _ in CASES} == set(OPTIMIZERS)


# --- what all share -----------------------------------------------------------------------------
RECORDS = [pytest.param(kind(**({"momentum": 0.9} if name == "SGD" else {}), **more), id=name)
           for name, kind in OPTIMIZERS.items()
           for more in ({"min_dim_size_to_factor": 2} if kind is Adafactor else {},)]
RECORDS.append(pytest.param(Muon(ns_type="f32"), id="Muon in f32"))


@pytest.mark.parametrize("record", RECORDS)
def test_masters_of_narrow_parameters_and_states_on_a_mesh(record, rng):
    """Eager and compiled, whole and in parts: the same steps, and states that lie as they did."""
    values = {"a": draws(rng, 5, 7), "b": draws(rng, 7), "stack": draws(rng, 2, 4, 3)}
    plain = {k: ts.param(v, "bf16") for k, v in values.items()} | {"kept": ts.tensor([1, 2])}
    mesh = mesh_of(dp=2, tp=2)
    spread = {k: ts.dist.distribute(p, COLUMNS if k == "a" else None, mesh=mesh)
              for k, p in plain.items()}
    run = {"whole": (plain, record.update), "parts": (spread, ts.jit(record.update))}
    grads = [{k: draws(rng, *v.shape) for k, v in values.items()} for _ in range(3)]
    ends = {}
    for how, (params, update) in run.items():
        state = first = record.init(params)
        assert state["master"]["a"].layout == params["a"].layout
        for g in grads:
            params, state = update(params, {k: ts.tensor(x) for k, x in g.items()}, state, 0.1)
        for m in record.holds:
            assert {k: (x.layout, x.shape) for k, x in state[m].items()} == {
                k: (x.layout, x.shape) for k, x in first[m].items()}
        assert params["kept"].numpy().tolist() == [1, 2]
        ends[how] = {k: x.numpy() for k, x in state["master"].items()}
        for k in values:
            assert params[k].is_param and params[k].type == plain[k].type
            np.testing.assert_array_equal(
                params[k].numpy(), ts.cast(ts.tensor(ends[how][k]), "bf16").numpy())
    assert run["parts"][1].specializations == 1
    # sums over parts are added in another order; where Muon multiplies in bf16, each rank's term of
    # such a product is rounded
    narrow = isinstance(record, Muon) and record.ns_type == "bf16"
    for k in values:
        error = np.abs(ends["parts"][k] - ends["whole"][k]).max()
        assert error <= (3 * 0.1 * 3 * 2.0**-8 if narrow else 2e-6)


def test_settings_are_given_by_name():
    for name, kind in OPTIMIZERS.items():
        with pytest.raises(ts.ArgumentError, match=f"{name} takes its settings by name, got 0.1") \
                as info:
            kind(0.1)
        assert "opt.update(params, grads, state, lr)" in info.value.hint


@pytest.mark.parametrize("make, words", [
    (lambda: Lion(b2=1.0), "Lion: b2 must be in"), (lambda: Adafactor(decay_rate=0), "decay_rate"),
    (lambda: Muon(momentum=-1), "Muon: momentum"), (lambda: Muon(weight_decay=-1), "negative"),
    (lambda: Muon(ns_steps=2.5), "Muon: ns_steps takes int, got the float 2.5"),
    (lambda: Muon(ns_coeffs=(1.0, 2.0)), "ns_coeffs takes tuple"),
    (lambda: Muon(muon="w"), "Muon: muon takes Callable"),
    (lambda: AdamW(b1="0.9"), "AdamW: b1 takes float, got the str '0.9'"),
    (lambda: ts.optim.CosineSchedule("1", 3), "CosineSchedule: peak takes float"),
    (lambda: Muon(muon=lambda path, p: True).init({"b": ts.param(1.0)}), "'b' has 0 axes")])
def test_settings_are_checked(make, words):
    with pytest.raises(ts.ArgumentError, match=words):
        make()


def test_what_adafactor_and_muon_hold(rng):
    params = {"wide": ts.param(draws(rng, 3, 130, 150)), "embed": ts.param(draws(rng, 130, 4))}
    state = Adafactor().init(params)
    assert {m: {k: x.shape for k, x in state[m].items()} for m in Adafactor().holds} == {
        "v_row": {"wide": (3, 130)}, "v_col": {"wide": (3, 150)}, "v": {"embed": (130, 4)}}
    state = Muon().init(params)
    assert state["m"].keys() == {"wide", "embed"} and state["v"].keys() == {"embed"}
    with pytest.raises(ts.ArgumentError, match="differ in wide"):
        AdamW().update(params, params, state, 0.1)
    with pytest.raises(ts.ArgumentError, match="this is no Adafactor state"):
        Adafactor().update(params, params, state, 0.1)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_adafactor_factors_the_two_largest_axes(place, rng):
    """Stacked matrices, along any axis: each as it is alone, where nothing is of all of them."""
    record = Adafactor(min_dim_size_to_factor=5, clipping_threshold=1e9, weight_decay=DECAY,
                       multiply_by_parameter_scale=False)
    w, gs = draws(rng, 3, 6, 9), [draws(rng, 3, 6, 9) for _ in range(2)]
    params = {"w": ts.param(np.moveaxis(w, 0, place))}
    state = record.init(params)
    for g in gs:
        grads = {"w": ts.tensor(np.moveaxis(g, 0, place))}
        params, state = record.update(params, grads, state, LR)
    got = np.moveaxis(params["w"].numpy(), place, 0)
    for i in range(3):
        want = adafactor(w[i].astype(np.float64), [g[i].astype(np.float64) for g in gs], record)
        assert_close(got[i], want, "f32", n=40)


def test_muon_moves_matrices_by_about_one_size(rng):
    """In bf16, as by default: singular values between 0.7 and 1.2 (the blog's figure), and zeros
    stay zeros."""
    params, record = {"w": ts.param(draws(rng, 32, 48))}, Muon(weight_decay=0, consistent_rms=None)
    new, _ = record.update(params, {"w": draws(rng, 32, 48)}, record.init(params), 1.0)
    moved = np.linalg.svd(params["w"].numpy() - new["w"].numpy(), compute_uv=False)
    moved /= np.sqrt(48 / 32)
    assert 0.6 < moved.min() and moved.max() < 1.25
    still, _ = record.update(params, {"w": ts.zeros((32, 48))}, record.init(params), 1.0)
    np.testing.assert_array_equal(still["w"].numpy(), params["w"].numpy())
