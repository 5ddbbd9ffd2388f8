"""Graph functions that are lowered to kernels, for tests with and without a GPU.

A case is compared with the same function on the CPU, node by node in NumPy. `rounds`: the coarsest
type that anything is rounded to on the way, `terms` the longest sum; both set the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.assignment import _assigned
from tessera.graph.cuda.kernels import generate_kernels
from tessera.graph.cuda.program import eager
from tessera.graph.kept_traces import Signatures
from tessera.state.kv_cache import _append
from tolerance import assert_close


@pytest.fixture
def apart(monkeypatch):
    """Kernels and programs that no other test has launched: on a fake driver of their own."""
    monkeypatch.setattr(generate_kernels, "_kernels", {})
    monkeypatch.setattr(eager, "_programs", eager.EagerPrograms())
    for fn in (_append, _assigned):
        monkeypatch.setattr(fn, "_cache", Signatures(fn.name))


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "f32"
    rounds: str = "f32"
    terms: int = 1
    kinds: str = ""  # of the groups, in order, when they are part of the case
    draw: str = "normal"
    axes: int = 2  # of the largest grid
    scale: float = 1.0  # of the inputs: small weights keep deep functions well conditioned
    ids: tuple[int, tuple[int, ...], str] | None = None  # a last input of -n..n-1: n, shape, type
    draws: bool = False  # random numbers: every run takes a step


def arrays(case: Case, rng: Any) -> list[ts.Tensor]:
    made = []
    for shape in case.shapes:
        if case.draw == "int":
            made.append(ts.tensor(rng.integers(-20, 20, shape).astype(np.int32)))
            continue
        x = case.scale * rng.standard_normal(shape)
        x = rng.uniform(-0.9, 0.9, shape) if case.draw == "unit" else x
        x = np.abs(x) + 0.1 if case.draw == "positive" else x
        made.append(ts.tensor(x.astype(np.float64 if case.dtype == "f64" else np.float32),
                              case.dtype))
    if case.ids is not None:
        below, shape, dtype = case.ids
        made.append(ts.tensor(np.asarray(rng.integers(-below, below, shape), dtype)))
    return made


def expected(case: Case, inputs: list[ts.Tensor]) -> list[Any]:
    """Node by node, which is what the graph means; of random numbers, what the last run drew."""
    fn = ts.jit(case.fn)
    if case.draws:
        state = ts.random.get_state()
        ts.random.set_state(replace(state, step=state.step - 1))
    with ts.config.scope(loop_min_elements=10**9):
        out = fn(*inputs)
    return [out] if isinstance(out, ts.Tensor) else list(out)


def check(case: Case, got: list[np.ndarray], inputs: list[ts.Tensor], fused: bool = False) -> None:
    """fused: where a matmul and a sum are rounded once, sums of two may cancel as longer ones."""
    want = expected(case, inputs)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        a = a.array if isinstance(a, ts.Tensor) else a
        assert a.dtype == b.array.dtype and a.shape == b.shape
        kind = b.type.dtype.kind
        dtype = case.rounds if kind == "float" else b.type.dtype.name
        assert_close(a, b.array, dtype, max(case.terms, 1 + fused) if kind == "float" else 1)


def layer(x, w1, b1, w2):
    return ts.gelu(x @ w1 + b1) @ w2 + x


def heads(x, w):
    """What a transformer does before attention: one matmul, split, and the heads in front."""
    parts = ts.split(x @ w, 3, axis=-1)
    return [ts.transpose(ts.reshape(t, (2, 9, 4, 8)), (0, 2, 1, 3)) for t in parts]


def transformer(x, n1, qkv, o, n2, b2, w1, w2):
    """A block with four heads: norm, attention, norm, feed-forward."""
    B, S, D = x.shape
    parts = ts.reshape(ts.rmsnorm(x, n1) @ qkv, (B, S, 3, 4, D // 4))
    q, k, v = (ts.transpose(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
    y = ts.transpose(ts.attention(q, k, v, causal=True), (0, 2, 1, 3))
    x = x + ts.reshape(y, (B, S, D)) @ o
    return x + ts.gelu(ts.layernorm(x, n2, b2) @ w1) @ w2


def transformer_gradients(*arrays):
    return ts.grad(lambda *xs: ts.mean(transformer(*xs) ** 2), argnums=tuple(range(8)))(*arrays)


BLOCK = ((2, 40, 32), (32,), (32, 96), (32, 32), (32,), (32,), (32, 64), (64, 32))


def embedding(table, w, ids):
    """The gradient of a model that reads rows of a table and compares its result with all of them.
    """
    def loss(table, w):
        return ts.mean(ts.log_softmax(ts.embedding(table, ids) @ w @ ts.transpose(table)) ** 2)

    return ts.grad(loss, argnums=(0, 1))(table, w)


def dropout_gradients(x, w):
    def loss(x, w):
        return ts.sum(ts.tanh(ts.random.dropout(ts.random.dropout(x, 0.4) @ w, 0.2)))

    return ts.grad(loss, argnums=(0, 1))(x, w)


def loss(w, x):
    return ts.mean(ts.square(ts.tanh(x @ w)))


def gradient(w, x):
    return ts.grad(loss)(w, x)


def mirrored(a):
    return ts.swapaxes(a, -1, -2)


def factorizations(a, b):
    """What has one sign: of a positive definite matrix, and of sums that signs leave alone."""
    spd = a @ mirrored(a) + 4.0 * ts.eye(5)
    q, r = ts.qr(spd)
    u, s, v = ts.svd(spd)
    values, vectors = ts.eigh(spd)
    return (ts.cholesky(spd), ts.solve(spd, b), ts.inv(spd), ts.slogdet(spd)[1], q @ r,
            (u * s[..., None, :]) @ v, s, values,
            (vectors * values[..., None, :]) @ mirrored(vectors))


def more_factorizations(a, b):
    """Of matrices with a dominant diagonal."""
    full = a + 4.0 * ts.eye(5)
    order, lower, upper = ts.lu(full)
    (values, _), _ = ts.eig(full @ mirrored(full))
    return (order, lower @ upper, ts.triangular_solve(full, b), ts.pinv(full @ b),
            ts.matrix_exp(0.2 * a), ts.sort(values), ts.det(full),
            ts.triangular_solve(full, b, lower=False, transpose=True, unit_diagonal=True))


def convolutions(x, w, g):
    """A convolution and both of its adjoints."""
    y, back = ts.vjp(lambda x, w: ts.conv2d(x, w, stride=(1, 2), padding=(1, 2), groups=2), x, w)
    return (y, *back(g))


def recurrent(w, xs, h):
    """A gated cell over a sequence: (a loss, the states)."""
    def step(h, x):
        z = ts.sigmoid(x @ w + h @ w)
        h = (1.0 - z) * h + z * ts.tanh(x @ w + z * h)
        return h, h

    h, states = ts.scan(step, h, xs)
    return ts.sum(h * h) + ts.mean(states), states


CASES: dict[str, Case] = {
    # elementwise
    "other bases": Case(lambda x: ts.log2(ts.exp2(x) + 1.0) * ts.log10(2.0 + ts.hypot(x, 0.5)),
                        ((37, 50),), kinds="loop"),
    "special functions": Case(
        lambda x: ts.lgamma(x) + ts.digamma(x + 3.0) * ts.erfinv(0.9 * ts.tanh(x)), ((37, 50),)),
    "chain of five": Case(lambda x: ts.tanh(ts.exp(x * 0.5) + 1.0) - x, ((37, 50),), kinds="loop"),
    "bias and column": Case(lambda x, b, c: x * b + c, ((7, 5, 33), (33,), (7, 1, 1)),
                            kinds="loop", axes=3),
    "middle axis broadcast": Case(lambda x, b: x - b, ((3, 5, 33), (3, 1, 33)), kinds="loop",
                                  axes=3),
    "scalar operand": Case(lambda x, s: x * s + 1.0, ((13, 9), ()), kinds="loop"),
    "one element": Case(lambda x: ts.exp(x), ((1,),), kinds="loop"),
    "no axes": Case(lambda x, y: x * y + 2.0, ((), ()), kinds="loop"),
    "two results": Case(lambda x: (ts.exp(x), ts.exp(x) + 1.0), ((300,),), kinds="loop"),
    "bf16 chain": Case(lambda x, y: ts.relu(x * y) + y, ((19, 130), (130,)), "bf16", "bf16"),
    "f16 chain": Case(lambda x: ts.sqrt(ts.abs(x)) / (1.0 + x * x), ((200,),), "f16", "f16"),
    "f64 chain": Case(lambda x: ts.exp(x) - ts.log1p(ts.abs(x)), ((200,),), "f64", "f64"),
    "comparisons": Case(lambda x, y: (x > y, ts.where(x < y, x, -y), ts.isfinite(x)),
                        ((13, 9), (9,))),
    "integers": Case(lambda x: (ts.where(x > 3, x * 2, x // 3), x % 5, x & 6), ((13, 9),),
                     draw="int"),
    "integers to floats": Case(lambda x: ts.cast(x, "f32") / 3.0, ((13, 9),), draw="int"),
    "floats to integers": Case(lambda x: ts.cast(x * 10.0, "int32"), ((13, 9),)),
    # rows
    "softmax": Case(lambda x: ts.softmax(x), ((9, 70),), kinds="rows", terms=70),
    "softmax bf16": Case(lambda x: ts.softmax(x), ((5, 1000),), "bf16", "bf16", kinds="rows"),
    "softmax of one row": Case(lambda x: ts.softmax(x), ((70,),), kinds="rows", terms=70),
    "softmax of columns": Case(lambda x: ts.softmax(x, axis=0), ((9, 70),), terms=9),
    "safe softmax": Case(lambda x: ts.softmax_safe(ts.where(x > 0.0, x, -ts.inf)), ((9, 17),),
                         terms=17),
    "masked row": Case(lambda x: ts.softmax(x - ts.inf), ((3, 8),)),
    "log softmax": Case(lambda x: (ts.log_softmax(x), ts.logsumexp(x)), ((11, 300),), terms=300),
    "layernorm": Case(lambda x, a, b: ts.layernorm(x, a, b), ((3, 9, 70), (70,), (70,)),
                      kinds="rows", terms=70),
    "rmsnorm bf16": Case(lambda x, a: ts.rmsnorm(x, a), ((9, 130), (130,)), "bf16", "bf16",
                         kinds="rows", terms=16),
    "rows in passes": Case(lambda x: ts.softmax(x * 2.0), ((3, 17000),), kinds="rows", terms=170),
    "norm in passes": Case(lambda x: ts.layernorm(x) + ts.sum(x, axis=-1, keepdims=True),
                           ((2, 16500),), kinds="rows", terms=16500),
    # reductions
    "sum of all": Case(lambda x: ts.sum(x * x), ((100, 77),), terms=7700),
    "sum of a vector": Case(lambda x: ts.sum(x), ((1000,),), terms=1000),
    "sums": Case(lambda x: (ts.mean(x, axis=1), ts.var(x, axis=(0, 2)), ts.sum(x, axis=(0, 1))),
                 ((4, 32, 5),), terms=128),
    "extrema": Case(lambda x: (ts.max(x, axis=0), ts.min(x, axis=(1, 2)), ts.max(x)),
                    ((4, 32, 5),)),
    "integer sums": Case(lambda x: (ts.sum(x, axis=0), ts.max(x, axis=1), ts.min(x, axis=0)),
                         ((40, 7),), draw="int"),
    # matmuls
    "gemm": Case(lambda a, b: ts.gemm(a, b), ((70, 50), (50, 90)), terms=50, kinds="gemm"),
    "gemm bias gelu": Case(lambda a, b, c: ts.gelu(ts.gemm(a, b) + c), ((70, 50), (50, 90), (90,)),
                           "bf16", "bf16", terms=4, kinds="gemm"),
    "gemm of transposes": Case(lambda a, b: ts.gemm(a.T, b.T), ((50, 70), (90, 50)), "f16", "f16",
                               terms=4, kinds="gemm"),
    "gemm and residual": Case(lambda a, b, r: ts.relu(a @ b) + r, ((2, 35, 50), (50, 90),
                                                                  (2, 35, 90)), terms=50),
    "square residual": Case(lambda x, w: x @ w + x, ((64, 64), (64, 64)), terms=64, kinds="gemm"),
    "vector by matrix": Case(lambda x, w: x @ w, ((50,), (50, 33)), terms=50),
    "batch of matmuls": Case(lambda a, b: (a @ b) * 2.0, ((2, 3, 20, 30), (3, 30, 10)), terms=30,
                             axes=3),
    "grouped matmul": Case(lambda a, b: a @ b, ((2, 3, 20, 30), (2, 1, 30, 10)), terms=30, axes=3),
    "f64 matmul": Case(lambda a, b: ts.softmax(a @ b), ((13, 9), (9, 20)), "f64", "f64", terms=20),
    "feed forward": Case(layer, ((30, 64), (64, 128), (128,), (128, 64)), terms=128),
    "transformer block": Case(transformer, BLOCK, terms=64, axes=4, scale=0.3, kinds=(
        "rows gemm attention gemm rows gemm gemm")),
    "gradients of a block": Case(transformer_gradients, BLOCK, terms=1280, axes=4, scale=0.3),
    "gradient": Case(gradient, ((20, 30), (50, 20)), terms=50),
    # attention
    "attention": Case(lambda q, k, v: ts.attention(q, k, v), ((3, 40, 16), (3, 55, 16),
                                                             (3, 55, 16)), terms=55,
                      kinds="attention"),
    "causal bf16": Case(lambda q, k, v: ts.attention(q, k, v, causal=True), ((2, 4, 70, 32),) * 3,
                        "bf16", "bf16", terms=16, kinds="attention"),
    "grouped heads": Case(lambda q, k, v: ts.attention(q, k, v, causal=True),
                          ((2, 4, 70, 32), (2, 2, 70, 32), (2, 2, 70, 32)), terms=70,
                          kinds="attention"),
    "causal with a past": Case(lambda q, k, v: ts.attention(q, k, v, causal=True, scale=0.3),
                               ((1, 2, 20, 16), (1, 2, 50, 16), (1, 2, 50, 24)), terms=50,
                               kinds="attention"),
    "blocks of queries": Case(lambda q, k, v: ts.attention(q, k, v, causal=True),
                              ((1, 600, 16),) * 3, terms=600, kinds="attention"),
    "attention with a mask": Case(lambda q, k, v, m: ts.attention(q, k, v, mask=m),
                                  ((2, 20, 16), (2, 30, 16), (2, 30, 16), (2, 20, 30)), terms=30,
                                  axes=3),
    # moves
    "transpose": Case(lambda x: (x.T, ts.transpose(x, (1, 0, 2))), ((4, 7, 50),), axes=3),
    "slices": Case(lambda x: (x[:, 1:3], x[1, ::2], ts.flip(x, 1)), ((4, 7, 50),), axes=3),
    "concatenate": Case(lambda x, y: ts.concatenate([x, y * 2.0, x], axis=1), ((5, 40), (5, 33))),
    "split": Case(lambda x: ts.split(x, [3, 4], axis=0), ((7, 50),)),
    "pad": Case(lambda x: (ts.pad(x, ((1, 2), (0, 3), (40, 0))), ts.pad(x, 2, value=-1.5)),
                ((3, 5, 70),), axes=3),
    "gradient of a slice": Case(lambda x: ts.grad(lambda x: ts.sum(x[1:, 2:5] ** 2))(x),
                                ((4, 9),)),
    "broadcast": Case(lambda x: ts.broadcast_to(x, (3, 4, 65)), ((4, 1),), axes=3),
    # slices by integers
    "take rows": Case(lambda x, i: ts.take(x, i), ((20, 72),), kinds="gather",
                      ids=(20, (31,), "int64")),
    "take one": Case(lambda x, i: ts.take(x, i), ((20, 3, 5),), kinds="gather",
                     ids=(20, (), "int64")),
    "take int32 of bf16": Case(lambda x, i: ts.take(x, i), ((20, 768),), "bf16", "bf16",
                               kinds="gather", ids=(20, (4, 9), "int32")),
    "take narrow rows": Case(lambda x, i: ts.take(x, i), ((50, 3),), kinds="gather",
                             ids=(50, (300,), "int64")),
    "take of a middle axis": Case(lambda x, i: ts.take(x, i, axis=1), ((3, 7, 40),), axes=3,
                                  kinds="gather", ids=(7, (2, 5), "int64")),
    "take of the last axis": Case(lambda x, i: ts.take(x, i, axis=-1), ((9, 40),), kinds="gather",
                                  ids=(40, (77,), "int64")),
    "take of a vector": Case(lambda x, i: ts.take(x, i), ((40,),), kinds="gather",
                             ids=(40, (5, 33), "int32")),
    "segment sums": Case(lambda u, i: ts.segment_sum(u, i, 50), ((30, 40),), kinds="segments",
                         ids=(50, (30,), "int64"), terms=4),
    "sums of wide slices": Case(lambda u, i: ts.segment_sum(u, i, 300), ((1100, 260),), terms=32,
                                kinds="segments", ids=(9, (1100,), "int32")),
    "sums of many slices": Case(lambda u, i: ts.segment_sum(u, i, 9), ((4500, 20),), terms=128,
                                kinds="loop order search parts runs",
                                ids=(9, (4500,), "int32")),
    "sums of many slices of bf16": Case(lambda u, i: ts.segment_sum(u, i, 60), ((4500, 20),),
                                        "bf16", "bf16", terms=90, ids=(60, (4500,), "int64")),
    "one segment": Case(lambda u, i: ts.segment_sum(u, i * 0 - 2, 5), ((300, 40),), terms=300,
                        ids=(5, (300,), "int64")),
    "segment sums of numbers": Case(lambda u, i: ts.segment_sum(u, i, 6), ((1500,),), terms=300,
                                    kinds="segments", ids=(6, (1500,), "int64")),
    "segment sums of bf16": Case(lambda u, i: ts.segment_sum(u, i, 9), ((60, 24),), "bf16", "bf16",
                                 ids=(9, (60,), "int64"), terms=8),
    "gradient of a take": Case(
        lambda x, i: ts.grad(lambda x: ts.sum(ts.take(x, i, axis=1) ** 2))(x), ((3, 7, 40),),
        axes=3, ids=(7, (2, 5), "int64"), terms=10),
    "index by two tensors": Case(lambda x, i: x[i, :, ts.remainder(i, 7)], ((20, 3, 7),),
                                 ids=(20, (2, 9), "int64"), axes=4),
    "one hot": Case(lambda i: ts.one_hot(ts.abs(i) // 2, 11), (), ids=(20, (2, 9), "int64"),
                    axes=3),
    "a table for each": Case(lambda x, i: ts.vmap(ts.take)(x, ts.reshape(i, (3, 8))), ((3, 20, 6),),
                             axes=3, ids=(20, (24,), "int64")),
    "embedding": Case(embedding, ((20, 16), (16, 16)), ids=(20, (3, 11), "int64"), terms=64,
                      scale=0.3),
    # random numbers
    "random bits": Case(lambda x: (ts.random.random_bits((7, 33)), ts.random.random_bits((1003,))),
                        ((1,),), kinds="loop loop", draws=True),
    "uniform": Case(lambda x: x + ts.random.uniform((3, 5, 33)), ((5, 33),), kinds="loop",
                    draws=True),
    "normal": Case(lambda x: x * ts.random.normal((30, 20), 0.5, 2.0, "f32"), ((30, 20),),
                   draws=True, terms=8),
    "integers and truth": Case(lambda x: (ts.random.randint(-3, 9, (40,)),
                                          ts.random.bernoulli(0.3, (50, 3))), ((1,),), draws=True),
    "dropout": Case(lambda x: (ts.random.dropout(x, 0.3), ts.random.dropout(x, 0.7)), ((19, 33),),
                    "bf16", "bf16", kinds="loop", draws=True),
    "dropout behind a matmul": Case(lambda x, w: ts.random.dropout(x @ w, 0.5) + 1.0,
                                    ((2, 35, 50), (50, 90)), kinds="gemm", draws=True, terms=50),
    "dropout behind a batch": Case(lambda x, w: ts.random.dropout(x @ w, 0.5),
                                   ((3, 2, 20, 30), (2, 30, 10)), axes=3, kinds="gemm", draws=True,
                                   terms=30),
    "dropout of rows": Case(lambda x: ts.random.dropout(ts.softmax(x), 0.5), ((9, 70),),
                            kinds="rows", draws=True, terms=70),
    "dropout in passes": Case(lambda x: ts.softmax(ts.random.dropout(x, 0.5)), ((3, 17000),),
                              kinds="rows", draws=True, terms=170),
    "dropout and a column": Case(lambda x, c: ts.random.dropout(x * c, 0.5),
                                 ((3, 5, 33), (3, 1, 33)), kinds="loop", axes=3, draws=True),
    "gradients of dropout": Case(dropout_gradients, ((20, 30), (30, 50)), draws=True, terms=100,
                                 scale=0.3),
    "heads": Case(heads, ((2, 9, 32), (32, 96)), terms=32, axes=4),
    "convolutions": Case(convolutions, ((2, 32, 9, 10), (48, 16, 3, 3), (2, 48, 9, 6)), "bf16",
                         "bf16", terms=450, axes=3, scale=0.3),
    # vendors' libraries
    "transforms": Case(lambda x: (*ts.fft((x, x * 2.0)), *ts.rfft(x),
                                  ts.irfft(ts.rfft(x + 1.0), 16)), ((3, 16),), terms=16),
    "gradient through a transform": Case(lambda x: ts.grad(lambda x: ts.sum(
        ts.irfft(ts.rfft(x), 16) ** 3))(x), ((3, 16),), terms=64),
    "factorizations": Case(factorizations, ((2, 5, 5), (2, 5, 3)), terms=256),
    "more factorizations": Case(more_factorizations, ((2, 5, 5), (2, 5, 3)), terms=256),
    "cosine transforms": Case(lambda x: (ts.dct(x), ts.idct(x, axis=0), ts.grad(
        lambda x: ts.sum(ts.dct(x) ** 3))(x)), ((3, 16),), terms=64),
    "gradients through LU": Case(lambda a, b: ts.grad(lambda a: ts.sum(
        ts.lu(a + 4.0 * ts.eye(5))[2] @ b) + ts.sum(ts.det(a)))(a), ((2, 5, 5), (2, 5, 3)),
        terms=256),
    "gradient of a solution": Case(lambda a, b: ts.grad(lambda a, b: ts.sum(ts.solve(
        a @ mirrored(a) + 4.0 * ts.eye(5), b)), (0, 1))(a, b), ((2, 5, 5), (2, 5, 3)), terms=256),
    # control flow
    "a recurrent cell": Case(recurrent, ((8, 8), (6, 4, 8), (4, 8)), terms=64, scale=0.5, axes=3),
    "gradients of a recurrent cell": Case(
        lambda w, xs, h: ts.grad(lambda w, xs, h: recurrent(w, xs, h)[0], (0, 1, 2))(w, xs, h),
        ((8, 8), (6, 4, 8), (4, 8)), terms=256, scale=0.5, axes=3),
    "a scan from the end": Case(lambda x: ts.scan(lambda c, r: (c * 0.5 + r, c), ts.zeros((7,)), x,
                                                  reverse=True), ((5, 7),), terms=5),
    "a choice": Case(lambda x, y: ts.cond(ts.sum(x) > ts.sum(y), lambda x, y: (x * 2.0, y),
                                          lambda x, y: (ts.exp(y), x), x, y), ((5, 7), (5, 7)),
                     terms=35),
    "gradient of a choice": Case(
        lambda x: ts.grad(lambda x: ts.sum(ts.cond(ts.sum(x) > 0.0, ts.sin, ts.exp, x)))(x),
        ((5, 7),), terms=35),
    "draws in a loop": Case(lambda x: ts.scan(
        lambda c, _: (c + ts.random.normal(c.shape), ts.sum(c)), x, None, length=3), ((4, 6),),
        terms=24, draws=True),
    "a map": Case(lambda x: ts.map(lambda r: ts.softmax(r), x), ((4, 9),), terms=9),
    "a counted loop": Case(lambda x: ts.fori_loop(0, 4, lambda i, c: c * 0.5 + i, x), ((3, 5),),
                           terms=4),
}
UNARY = {
    "normal": ("exp", "expm1", "sin", "cos", "tan", "atan", "tanh", "sigmoid", "erf", "erfc",
               "relu", "floor", "ceil", "round", "trunc", "abs", "sign", "gelu", "silu",
               "softplus"),
    "positive": ("log", "log1p", "sqrt", "rsqrt"), "unit": ("asin", "acos"),
}
for _draw, _names in UNARY.items():
    for _name in _names:
        CASES[_name] = Case(getattr(ts, _name), ((5, 40),), draw=_draw, kinds="loop", terms=4)
