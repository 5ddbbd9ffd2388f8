"""Attention in plain ops becomes the op, with its gradient, whatever the spelling.

The oracle is the same function of f64 operands, op by op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, bf16, f32, f64
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.lower import lower
from tessera.graph.cuda.passes import plain_attention
from tessera.graph.cuda.passes.plain_attention import fused_attention
from tessera.graph.interpret import interpret
from tessera.graph.ir import Graph
from tessera.runtime.target import parse_target
from tolerance import assert_close

TARGET = parse_target("sm_90a")

B, H, S, T, D, E = 2, 4, 13, 13, 8, 6
Q, K, V = (B, H, S, D), (B, H, T, D), (B, H, T, E)
FORMS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...], str]] = {}


def form(*shapes: tuple[int, ...], rule: str = "") -> Callable:
    def add(fn: Callable) -> Callable:
        FORMS[fn.__name__] = fn, shapes or (Q, K, V), rule
        return fn

    return add


def seen() -> Any:
    return ts.tril(ts.ones((S, T), "bool_"))


@form()
def plain(q, k, v):
    return ts.softmax(q @ k.mT * D ** -0.5, axis=-1) @ v


@form(rule="causal=True")
def causal_by_tril(q, k, v):
    return ts.softmax(ts.where(seen(), q @ k.mT / math.sqrt(D), -math.inf), axis=-1) @ v


@form(rule="causal=True")
def causal_by_a_large_number(q, k, v):
    return ts.softmax(q @ k.mT + ts.where(seen(), 0.0, -1e9), axis=-1) @ v


@form(rule="causal=True window=5")
def a_window_by_places(q, k, v):
    i, j = ts.arange(S)[:, None], ts.arange(T)[None, :]
    return ts.softmax(ts.where((j > i) | (i - j >= 5), -1e30, q @ k.mT), axis=-1) @ v


@form((B, S, H, D), (B, T, H, D), (B, T, H, E))
def heads_inside(q, k, v):
    s = ts.einsum("bqhd,bkhd->bhqk", q, k)
    return ts.einsum("bhqk,bkhd->bqhd", ts.softmax(s, axis=-1), v)


@form((B, 2, 2, S, D), (B, 2, T, D), (B, 2, T, E))
def groups_in_an_axis(q, k, v):
    s = ts.einsum("bhgqd,bhkd->bhgqk", q, k)
    return ts.einsum("bhgqk,bhkd->bhgqd", ts.softmax(s, axis=-1), v)


@form(Q, (B, 2, T, D), (B, 2, T, E))
def groups_by_repeat(q, k, v):
    return plain(q, ts.repeat(k, 2, axis=1), ts.repeat(v, 2, axis=1))


@form(Q, (T, D), (T, E))
def one_head_of_keys(q, k, v):
    return ts.softmax(q @ k.T, axis=-1) @ v


@form((S, D), (T, D), (T, E))
def one_head(q, k, v):
    return ts.softmax(q @ k.T, axis=-1) @ v


@form((B, H, 1, D), K, V)
def one_query(q, k, v):
    return plain(q, k, v)


@form((B, S, D))
def of_itself(x):
    return ts.softmax(x @ x.mT, axis=-1) @ x


@form()
def by_exp_and_sum(q, k, v):
    s = q @ k.mT
    e = ts.exp(s - ts.max(s, axis=-1, keepdims=True))
    return (e / ts.sum(e, axis=-1, keepdims=True)) @ v


@form()
def divided_last(q, k, v):
    e = ts.exp(q @ k.mT * 0.1)
    return e @ v / ts.sum(e, axis=-1, keepdims=True)


@form()
def by_log_softmax(q, k, v):
    return ts.exp(ts.log_softmax(q @ k.mT, axis=-1)) @ v


@form(rule="cap=5.0")
def capped(q, k, v):
    return ts.softmax(5.0 * ts.tanh(q @ k.mT / 5.0), axis=-1) @ v


@form(Q, K, V, (H, S, T))
def a_bias(q, k, v, b):
    return ts.softmax((q @ k.mT + b) * 0.5, axis=-1) @ v


@form(Q, K, V, (B, T), rule="causal=True")
def padding_and_causal(q, k, v, n):
    m = (n > 0)[:, None, None, :] & seen()
    m = m | (ts.arange(T) == 0)[None, :] & seen()
    s = ts.where(seen(), q @ k.mT, -math.inf)
    return ts.softmax(ts.where(m, s, -math.inf), axis=-1) @ v


@form(Q, K, V, (B,), rule="ends")
def padding_by_lengths(q, k, v, n):
    n = ts.maximum(ts.cast(n * 9 + 6, "int32"), 1)[:, None, None, None]
    return ts.softmax(ts.where(ts.arange(T) < n, q @ k.mT, -math.inf), axis=-1) @ v


@form()
def dropped(q, k, v):
    return ts.dropout(ts.softmax(q @ k.mT, axis=-1), 0.3, key=ts.random.key(7)) @ v


def loss(fn: Callable) -> Callable:
    return lambda *xs: ts.sum(fn(*xs) ** 2)


def scores_of(graph: Graph) -> list[str]:
    """Ops that make as many numbers as there are scores in more than one head."""
    return [n.op.name for n in graph.nodes for v in n.outputs
            if v.aval.shape[-2:] in ((S, T), (1, T)) and math.prod(v.aval.shape[:-2]) > 1
            and v.aval.dtype.kind == "float"]


def run(graph: Graph, xs: list[np.ndarray]) -> list[np.ndarray]:
    ts.random.seed(0)
    return interpret(graph, xs)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("gradient", [False, True], ids=["result", "gradient"])
def test_every_spelling_is_the_op(name: str, gradient: bool, rng: np.random.Generator,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention, "ROOM", 0)
    fn, shapes, rule = FORMS[name]
    floats = tuple(range(len(shapes) - ("padding" in name)))
    whole = ts.grad(loss(fn), argnums=floats) if gradient else fn
    xs = [rng.standard_normal(s) * 0.4 for s in shapes]
    graph, why = fused_attention(ts.jit(whole).graph(*(Tensor[*s, f32] for s in shapes)))
    found = [n for n in graph.nodes if "attention" in n.op.name]
    assert len(found) == 1 + gradient and not why
    assert all(f"{k}={v}" in rule for n in found for k, v in n.attrs.items()
               if k in ("causal", "window", "cap") and v), found[0].attrs
    assert rule.count("=") == sum(bool(found[0].attrs.get(k)) for k in ("causal", "window", "cap"))
    keys = [v.aval.shape[-3] for v in found[0].inputs[1:3]]
    assert keys == [2, 2] or "groups" not in name, "heads of keys are copied"
    assert ("ends" in rule) == any(v.aval.shape == (B, 1, 2, S) for v in found[0].inputs)
    given = ("attention", "dropout_attention", "attention_vjp", "dropout_attention_vjp")
    masks = ("add", "reshape", "mul", "where", "broadcast_to")
    assert set(scores_of(graph)) <= ({*given, *masks} if "bias" in name else set())
    want = run(ts.jit(whole).graph(*(Tensor[*s, f64] for s in shapes)), xs)
    for got, y in zip(run(graph, [x.astype(np.float32) for x in xs]), want, strict=True):
        assert_close(got, y, f32, 64)


def test_weights_that_are_read_are_left() -> None:
    def both(q, k, v):
        w = ts.softmax(q @ k.mT, axis=-1)
        return w @ v, w

    text = str(lower(ts.jit(both).graph(*[Tensor[2, 2, 64, 64, bf16]] * 3), TARGET).plan)
    assert "scores of attention lie in memory: something else reads the weights" in text


KEPT = {
    "scores are multiplied by what is no number": lambda q, k, v: ts.softmax(
        q @ k.mT * ts.sum(q, axis=-1, keepdims=True), axis=-1) @ v,
    "hidden scores are -9": lambda q, k, v: ts.softmax(
        ts.where(seen(), q @ k.mT, -9.0), axis=-1) @ v,
    "scores come from sin": lambda q, k, v: ts.softmax(ts.sin(q @ k.mT), axis=-1) @ v,
    "mul changes the weights": lambda q, k, v: (ts.softmax(q @ k.mT, axis=-1) * 2.0) @ v,
    "heads of queries do not read those of keys": lambda q, k, v: ts.softmax(
        q @ k[:, :1].mT, axis=-1) @ v,
    "tanh of scores behind a mask": lambda q, k, v: ts.softmax(
        ts.tanh(ts.where(seen(), q @ k.mT, -math.inf)), axis=-1) @ v,
}


@pytest.mark.parametrize("why", KEPT)
def test_what_attention_does_not_know_is_left(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention, "ROOM", 0)
    graph = ts.jit(KEPT[why]).graph(*(Tensor[*s, f32] for s in (Q, K, V)))
    made, said = fused_attention(graph)
    assert not any("attention" in n.op.name for n in made.nodes)
    assert [why in x for x in said.values()] == [True], said


def test_a_layer_in_plain_ops_has_the_schedule_of_the_op() -> None:
    """Forward and backward: the same kernels, as many launches, as much memory."""
    heads, S, D = 4, 512, 64

    def parts(x: Any, w: Any) -> list[Any]:
        return [ts.transpose(ts.reshape(y, (1, S, heads, D)), (0, 2, 1, 3))
                for y in ts.split(x @ w, 3, axis=-1)]

    def by_hand(x: Any, w: Any) -> Any:
        q, k, v = parts(x, w)
        s = ts.cast(q @ k.mT, "f32") * D ** -0.5
        s = ts.where(ts.tril(ts.ones((S, S), "bool_")), s, -math.inf)
        return ts.cast(ts.softmax(s, axis=-1), "bf16") @ v

    def by_name(x: Any, w: Any) -> Any:
        return ts.attention(*parts(x, w), causal=True)

    def planned(fn: Callable) -> Any:
        step = ts.grad(lambda x, w: ts.sum(ts.cast(fn(x, w), "f32") ** 2), argnums=(0, 1))
        at = Tensor[S, heads * D, bf16], Tensor[heads * D, 3 * heads * D, bf16]
        return lower(ts.jit(step).graph(*at), TARGET).plan

    hand, name = planned(by_hand), planned(by_name)
    assert [g.kind for g in hand.groups] == [g.kind for g in name.groups]
    assert hand.temporary_bytes == name.temporary_bytes


@pytest.mark.parametrize("name, shapes, dtype, why", [
    ("plain", ((2, 2, 64, 32),) * 3, "f32", "those of f32 are quicker so"),
    ("plain", ((2, 2, 64, 32),) * 3, "bf16", ""),
    ("plain", ((1, 64, 8192, 32),) * 3, "f32", ""),
    ("a_bias", (*((2, 2, 60, 32),) * 3, (2, 60, 60)), "bf16", "with a bias for each"),
    ("a_bias", (*((2, 2, 64, 32),) * 3, (2, 64, 64)), "bf16", ""),
    ("a_bias", (*((2, 2, 64, 32),) * 3, (64,)), "bf16", ""),
])
def test_scores_that_are_quicker_in_memory_stay_there(name: str, shapes: Any, dtype: str, why: str
                                                      ) -> None:
    graph = ts.jit(FORMS[name][0]).graph(*(Tensor[*s, getattr(ts, dtype)] for s in shapes))
    made, said = fused_attention(graph)
    assert [why in x for x in said.values()] == [True] * bool(why), said
    assert any(n.op.name == "attention" for n in made.nodes) == (not why)


def test_two_numbers_to_choose_from_are_constants() -> None:
    graph = ts.jit(lambda m: ts.where(m, 0.0, -1e9)).graph(Tensor[4, ts.bool_])
    assert not graph.captures


def test_the_kernel_drops_what_the_plain_ops_drop(rng: np.random.Generator,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more queries than `ts.attention` draws for at once."""
    monkeypatch.setattr(plain_attention, "ROOM", 0)
    graph = ts.jit(dropped).graph(*(Tensor[1, 2, n, 8, f32] for n in (520, 12, 12)))
    xs = [rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (520, 12, 12)]
    program = CudaProgram(graph, TARGET)
    assert {g.kind for g in program.plan.groups} <= {"launch", "move"}  # its key
    (got,), (want,) = program.run(xs), interpret(graph, xs)
    assert_close(got, want, f32, 64)


def hidden_rows(q, k, v, n):
    """Of sequences by bools of keys; those of a sequence without a place see nothing."""
    s = ts.where((n > 0)[:, None, None, :], q @ k.mT, -math.inf)
    return ts.softmax(s, axis=-1) @ v


def hidden_by_length(q, k, v, n):
    s = ts.where(ts.arange(k.shape[-2]) < ts.cast(n[:, :1, None, None], "int32"), q @ k.mT,
                 -math.inf)
    return ts.softmax(s, axis=-1) @ v


@pytest.mark.parametrize("fn, S, dtype", [(hidden_rows, 64, "bf16"), (hidden_rows, 13, "f32"),
                                          (hidden_by_length, 64, "bf16"),
                                          (hidden_by_length, 1, "bf16")])
def test_rows_that_see_nothing_are_nan_as_their_softmax_is(
        fn: Callable, S: int, dtype: str, rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as on a CPU; what other sequences give, and their cotangents, are numbers."""
    monkeypatch.setattr(plain_attention, "ROOM", 0)
    T, D = 280, 16
    shapes = (2, 2, S, D), (2, 2, T, D), (2, 2, T, D)
    xs = [rng.standard_normal(x).astype(getattr(ts, dtype).numpy) for x in shapes]
    n = np.zeros((2, T), np.float32)
    n[1] = 40.0 if fn is hidden_by_length else rng.random(T) - 0.3
    for whole in (fn, ts.grad(lambda *a: ts.sum(ts.cast(fn(*a), "f32")), argnums=(0, 1, 2))):
        graph = ts.jit(whole).graph(*map(ts.tensor, (*xs, n)))
        program = CudaProgram(graph, TARGET)
        assert not any(g.kind == "gemm" for g in program.plan.groups)
        got, want = (tuple(np.asarray(x, np.float64) for x in ys)
                     for ys in (program.run([*xs, n]), interpret(graph, [*xs, n])))
        assert whole is not fn or np.isnan(got[0][0]).all() and np.isnan(want[0][0]).all()
        for y, w in zip(got, want, strict=True):
            assert_close(y[1], w[1], dtype, 64, scale=np.abs(w[1]).max())
