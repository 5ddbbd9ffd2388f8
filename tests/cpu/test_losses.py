"""Losses and their options against sums written out in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special

import tessera as ts
from functions import Case, check_derivatives, check_values, check_vmap, each, shapes
from tessera.errors import ArgumentError, ShapeError
from tolerance import assert_close

W = np.array([0.5, 2.0, 0.0, 1.5, 1.0])


def reduced(rows: np.ndarray, reduction: str) -> Any:
    return {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]


def entropy(x, t, w=None, s=0.0, ignore=None, reduction="mean"):
    """Row by row, by the definition."""
    w = np.ones(x.shape[-1]) if w is None else w
    logp = scipy.special.log_softmax(x, axis=-1)
    rows, weights = np.zeros(t.shape), np.zeros(t.shape)
    for i in np.ndindex(t.shape):
        if t[i] != ignore:
            rows[i] = -(1 - s) * w[t[i]] * logp[i][t[i]] - s / len(w) * (w * logp[i]).sum()
            weights[i] = w[t[i]]
    return rows.sum() / weights.sum() if reduction == "mean" else reduced(rows, reduction)


def rows_of(t):
    return lambda rng: (rng.standard_normal((2, 3, 5)) * 2, np.array(t))


LABELS = [[0, 1, 4], [3, 2, 1]]
WITH_IGNORED = [[0, -100, 4], [3, -100, 1]]


def labelled(reduction="mean", **options: Any) -> Case:
    ours = {{"w": "weight", "s": "label_smoothing", "ignore": "ignore_index"}[k]: v
            for k, v in options.items()}
    t = WITH_IGNORED if "ignore" in options else LABELS
    return Case(lambda x, t: ts.cross_entropy(x, t, reduction=reduction, **ours),
                lambda x, t: entropy(x, t, reduction=reduction, **options), rows_of(t), n=30)


def probabilities(rng):
    return rng.standard_normal((4, 5)), rng.dirichlet(np.ones(5), 4)


def kl(reduction):
    """p log p - p log q; p has a 0, which the logarithm must not see."""
    def args(rng):
        p = rng.dirichlet(np.ones(5), 4)
        p[1, 2] = 0.0
        return scipy.special.log_softmax(rng.standard_normal((4, 5)), -1), p

    def oracle(a, p):
        rows = scipy.special.xlogy(p, p) - p * a
        return rows.sum() / 4 if reduction == "batchmean" else reduced(rows, reduction)

    return Case(lambda a, p: ts.kl_div(a, p, reduction=reduction), oracle, args, n=30, order=0)


def huber(d, delta):
    return np.where(np.abs(d) < delta, d * d / 2, delta * (np.abs(d) - delta / 2))


P, WEIGHT = np.array([3.0, 0.25, 1.0]), np.array([[0.5], [2.0]])
CASES = {
    "class weights": labelled(w=W), "weights, sum": labelled("sum", w=W),
    "weights, none": labelled("none", w=W),
    "weights, smoothing": labelled(w=W, s=0.2), "weights, ignored": labelled(w=W, ignore=-100),
    "weights, smoothing, ignored, none": labelled("none", w=W, s=0.1, ignore=-100),
    "smoothing, ignored": labelled(s=0.3, ignore=-100),
    "ignored, sum": labelled("sum", ignore=-100),
    "probabilities, weights": Case(
        lambda x, q: ts.cross_entropy(x, q, weight=W, label_smoothing=0.1),
        lambda x, q: -(W * (0.9 * q + 0.02) * scipy.special.log_softmax(x, -1)).sum(-1).mean(),
        probabilities, n=30),
    "nll": Case(ts.nll_loss, lambda x, t: entropy(x, t), lambda rng: (
        scipy.special.log_softmax(rng.standard_normal((2, 3, 5)), -1), np.array(LABELS)), n=30),
    "nll, weights, ignored": Case(
        lambda x, t: ts.nll_loss(x, t, weight=W, ignore_index=-100),
        lambda x, t: -sum(W[t[i]] * x[i][t[i]] for i in np.ndindex(t.shape) if t[i] >= 0)
        / sum(W[t[i]] for i in np.ndindex(t.shape) if t[i] >= 0),
        rows_of(WITH_IGNORED), n=30),
    "pos_weight": Case(
        lambda x, t: ts.binary_cross_entropy_with_logits(x, t, pos_weight=P, weight=WEIGHT,
                                                         reduction="sum"),
        lambda x, t: -(WEIGHT * (P * t * np.log(scipy.special.expit(x))
                                 + (1 - t) * np.log(scipy.special.expit(-x)))).sum(),
        shapes((2, 3), (2, 3), low=0.0, high=1.0), n=6),
    "l1": Case(ts.l1_loss, lambda a, b: np.abs(a - b).mean(), shapes((3, 4), (3, 4)), n=12),
    "smooth_l1": Case(lambda a, b: ts.smooth_l1_loss(a, b, beta=0.7, reduction="none"),
                      lambda a, b: huber(a - b, 0.7) / 0.7, shapes((3, 9), (3, 9)), scale=1.0),
    "huber": Case(lambda a, b: ts.huber_loss(a, b, delta=0.6, reduction="sum"),
                  lambda a, b: huber(a - b, 0.6).sum(), shapes((3, 9), (3, 9)), n=27),
    "kl, mean": kl("mean"), "kl, batchmean": kl("batchmean"), "kl, none": kl("none"),
    "kl of logarithms": Case(
        lambda a, b: ts.kl_div(a, b, reduction="sum", log_target=True),
        lambda a, b: (np.exp(b) * (b - a)).sum(), shapes((2, 3), (2, 3)), n=12),
}


@each(CASES)
def test_values(case: Case, rng: np.random.Generator) -> None:
    check_values(case, rng)


@each(CASES)
def test_derivatives(case: Case, rng: np.random.Generator) -> None:
    check_derivatives(case, rng)


@each(CASES)
def test_vmap(case: Case, rng: np.random.Generator) -> None:
    check_vmap(case, rng)


def test_edges() -> None:
    """Where both sides meet, and values whose exponentials overflow."""
    zero = np.zeros(3, np.float32)
    for loss in (ts.l1_loss, ts.smooth_l1_loss, ts.huber_loss):
        assert ts.grad(lambda a, f=loss: f(a, zero, reduction="sum"))(zero).tolist() == [0.0] * 3
    slope = ts.grad(lambda a: ts.smooth_l1_loss(a, zero, beta=0.5, reduction="sum"))
    assert slope(np.float32([0.5, -0.5, 9.0])).tolist() == [1.0, -1.0, 1.0]
    x = np.float32([500.0, -500.0])
    assert_close(ts.binary_cross_entropy_with_logits(x, [0.0, 1.0], pos_weight=3.0,
                                                     reduction="none"), [500.0, 1500.0])
    g = ts.grad(lambda p: ts.kl_div(np.log(np.float32([0.5, 0.5])), p, reduction="sum"))
    assert g(np.float32([0.0, 1.0])).tolist() == [0.0, 1 + np.log(np.float32(2))]
    g = ts.grad(lambda a: ts.kl_div(a, np.float32([-np.inf, 0.0]), reduction="sum",
                                    log_target=True))
    assert g(np.float32([-1.0, -1.0])).tolist() == [0.0, -1.0]
    none = ts.cross_entropy(ts.zeros((2, 3)), [5, 5], weight=[1.0, 1.0, 1.0], ignore_index=5)
    assert none.item() == 0.0


def test_errors() -> None:
    x = ts.zeros((2, 3))
    for call, kind, words in (
        (lambda: ts.cross_entropy(x, [0, 1], weight=[1.0]), ShapeError, r"\[1\] for 3 classes"),
        (lambda: ts.nll_loss(x, [0, 3]), ArgumentError, "label 3 is outside 0 .. 2"),
        (lambda: ts.l1_loss(x, ts.zeros(3)), ShapeError, "differ"),
        (lambda: ts.smooth_l1_loss(x, x, beta=-1), ArgumentError, "beta >= 0"),
        (lambda: ts.huber_loss(x, x, delta=0), ArgumentError, "delta > 0"),
        (lambda: ts.kl_div(x, x, reduction="batch"), ArgumentError, "reduction 'batch'"),
        (lambda: ts.binary_cross_entropy_with_logits(x, x, pos_weight=[1.0, 1.0]), ShapeError,
         "the shapes do not broadcast"),
        (lambda: ts.binary_cross_entropy_with_logits(x, x, weight=np.ones((5, 2, 3))), ShapeError,
         r"weight \[5, 2, 3\] for logits \[2, 3\]"),
    ):
        with pytest.raises(kind, match=words):
            call()
