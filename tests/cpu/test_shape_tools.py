"""`ts.shape`: static checks, inference with symbols, traces and guards."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tessera.tensor import TensorType

B, S, D = ts.sym("B S D")


class TestCheck:
    @pytest.mark.row("SHAPE-01")
    def test_extents_that_nothing_proves_equal(self):
        @ts.jit
        def product(a: Tensor["M", "K", ts.f32], b: Tensor["J", "N", ts.f32]):
            return a @ b

        with pytest.raises(ts.ShapeError) as info:
            ts.shape.check(product)
        text = str(info.value)
        assert "contracted extents differ: K" in text and "J" in text
        assert "a: f32[M, K]" in text and "b: f32[J, N]" in text and "return a @ b" in text
        assert "the last axis" in text or "last axis" in text

    @pytest.mark.row("SHAPE-01")
    def test_a_plain_function_that_fits(self):
        ran = []

        def product(a: Tensor["M", "K", ts.bf16], b: Tensor["K", "N", ts.bf16]):
            ran.append(a)
            return a @ b

        kind = ts.shape.check(product)
        assert str(kind) == "Tensor['M', 'N', bf16]"
        assert not isinstance(ran[0], np.ndarray) and not hasattr(ran[0], "_buffer")  # no data

    def test_results_against_their_annotation(self):
        def wrong(a: Tensor["M", "K", ts.f32]) -> Tensor["M", "M", ts.f32]:
            return a.T @ a

        with pytest.raises(ts.ShapeError, match="wrong: the result: axis 0 is K"):
            ts.shape.check(wrong)

    def test_defaults_and_values_fill_what_is_not_annotated(self):
        def f(x: Tensor["B", "D", ts.f32], w, scale=2.0, *, heads: int = 3):
            return ts.reshape(x @ w, (x.shape[0], heads, -1)) * scale

        with pytest.raises(ts.ArgumentError, match="nothing is known of w"):
            ts.shape.check(f)
        kind = ts.shape.check(f, w=Tensor["D", 12, ts.f32])
        assert str(kind) == "Tensor['B', 3, 4, f32]"

    def test_nested_results(self):
        def f(x: Tensor["B", 4, ts.f32]):
            return {"sum": ts.sum(x, axis=1), "what": "model",
                    "pair": (x, ts.argmax(x, axis=0))}

        found = ts.shape.check(f)
        assert found["what"] == "model"
        assert str(found["sum"]) == "Tensor['B', f32]"
        assert str(found["pair"][1]) == "Tensor[4, int64]"


class TestInfer:
    @pytest.mark.row("SHAPE-02")
    @pytest.mark.parametrize("op, sample", [
        pytest.param(op, s, id=f"{op.name}-{i}") for op in OPS.values()
        for i, s in enumerate(op.samples) if s.args and not op.effects
    ])
    def test_every_op_gives_what_was_inferred(self, op, sample):
        f = ts.jit(lambda *xs: apply(op, *xs, **sample.attrs))
        args = [_draw(a) for a in sample.args]
        inferred = f.infer(*(TensorType(x.shape, x.type) for x in args))
        made = f(*args)
        for kind, y in zip(_several(inferred), _several(made), strict=True):
            assert (kind.shape, kind.type) == (y.shape, y.type)
            assert y.numpy().shape == y.shape

    @pytest.mark.row("SHAPE-02", "SHAPE-03")
    def test_symbols_flow_through_a_model(self, rng):
        def norm(x, g):
            return x / ts.sqrt(ts.mean(x * x, axis=-1, keepdims=True) + 1e-6) * g

        @ts.jit
        def model(ids, table, g, wq, wk, wv, wo, w1, w2):
            x = ts.take(table, ids, axis=0)  # [B, S, D]
            h = norm(x, g)
            q, k, v = (ts.reshape(h @ w, (*h.shape[:2], 4, -1)) for w in (wq, wk, wv))
            q, k, v = (ts.transpose(t, (0, 2, 1, 3)) for t in (q, k, v))
            p = ts.softmax(q @ ts.swapaxes(k, -1, -2) * 0.25)  # [B, 4, S, S]
            y = ts.reshape(ts.transpose(p @ v, (0, 2, 1, 3)), h.shape)
            x = x + y @ wo
            x = x + ts.gelu(norm(x, g) @ w1) @ w2
            return ts.concatenate([x, x[:, :, :2]], axis=-1), ts.argmax(x @ table.T, axis=-1)

        D, F, V = 16, 24, 11
        weights = [(V, D), (D,), (D, D), (D, D), (D, D), (D, D), (D, F), (F, D)]
        types = [Tensor[(*w, ts.bf16)] for w in weights]
        logits, best = model.infer(Tensor["B", "S", ts.int64], *types)
        assert str(logits) == "Tensor['B', 'S', 18, bf16]"
        assert str(best) == "Tensor['B', 'S', int64]"
        arrays = [ts.tensor(rng.standard_normal(w), ts.bf16) for w in weights]
        for shape in ((2, 5), (1, 7)):
            ids = ts.tensor(rng.integers(0, V, shape))
            out, picked = model(ids, *arrays)
            assert out.shape == (*shape, 18) and picked.shape == shape

    @pytest.mark.row("SHAPE-03")
    @pytest.mark.parametrize("fn, kind, says", [
        (lambda x: ts.reshape(x, (B * S, -1)), Tensor["B", "S", "D", ts.f32], "'B*S', 'D'"),
        (lambda x: ts.transpose(x), Tensor["B", "S", ts.f32], "'S', 'B'"),
        (lambda x: ts.concatenate([x, x], axis=0), Tensor["B", 3, ts.f32], "'2*B', 3"),
        (lambda x: ts.sum(x, axis=0), Tensor["B", "S", ts.f32], "'S'"),
        (lambda x: x[None, :, 1:3], Tensor["B", 4, ts.f32], "1, 'B', 2"),
        (lambda x: ts.pad(x, ((1, 2), (0, 0))), Tensor["B", 4, ts.f32], "'B + 3', 4"),
        (lambda x: x[:, None] * x, Tensor["B", ts.f32], "'B', 'B'"),
        (lambda x: ts.cumsum(ts.exp(x), axis=1), Tensor["B", "S", ts.bf16], "'B', 'S'"),
        (lambda x: ts.grad(lambda y: ts.sum(ts.softmax(y)))(x), Tensor["B", "S", ts.f32],
         "'B', 'S'"),
        (lambda x: ts.vmap(lambda r: r / ts.max(r))(x), Tensor["B", "S", ts.f32], "'B', 'S'"),
    ])
    def test_names_of_results(self, fn, kind, says):
        assert f"Tensor[{says}, " in str(ts.jit(fn).infer(kind))

    @pytest.mark.row("SHAPE-06")
    def test_bare_symbols(self):
        assert Tensor[S, D, ts.f16] == Tensor["S", "D", ts.f16]

        def f(x: Tensor[S, D, ts.f16], y: Tensor[D, ts.f16]):
            return x * y

        kind = ts.shape.check(f)
        assert kind.shape == (S, D) and kind.type.dtype is ts.f16
        assert ts.jit(f)(ts.ones((2, 3), ts.f16), ts.ones((3,), ts.f16)).shape == (2, 3)


def _several(x):
    return x if isinstance(x, tuple) else (x,)


def _draw(arg):
    kind, _, detail = arg.draw.partition(":")
    if kind == "type":
        return ts.cast(ts.ones(arg.shape), detail)
    if kind == "key":
        return ts.tensor(np.zeros(arg.shape, np.uint32))
    if kind == "bool":
        return ts.tensor(np.ones(arg.shape, bool))
    if kind in ("index", "int"):
        return ts.tensor(np.zeros(arg.shape, np.int64) + (kind == "int"))
    if kind == "onto":
        return ts.tensor(np.arange(np.prod(arg.shape)).reshape(arg.shape) % int(detail))
    if kind == "offsets":
        return ts.tensor(np.linspace(0, int(detail), arg.shape[-1]).astype(np.int64))
    if kind in ("spd", "wellconditioned", "dominant"):
        return ts.tensor(np.broadcast_to(np.eye(*arg.shape[-2:]), arg.shape).astype(np.float32))
    size = int(np.prod(arg.shape))
    return ts.tensor(np.linspace(0.1, 0.9, size).reshape(arg.shape).astype(np.float32))


@pytest.mark.row("SHAPE-04")
def test_a_trace_lists_ops_and_shapes():
    def f(x):
        return ts.sum(ts.exp(ts.reshape(x, (6,))))

    with ts.shape.trace() as log:
        f(ts.ones((2, 3)))
    full, *lines = str(log).splitlines()
    want = ["reshape: f32[2, 3] -> f32[6]", "exp: f32[6] -> f32[6]", "reduce_sum: f32[6] -> f32[]"]
    assert full.startswith("full") and [re.split(r"  +", line)[0] for line in lines] == want
    assert all("test_shape_tools.py" in line for line in lines)


class TestGuards:
    def guarded(self, order, *guards):
        def f(x: Tensor["B", "S", ts.f32], y: Tensor["S", ts.f32]):
            return x * y

        guard = ts.shape.guard(*guards)
        return ts.jit(guard(f)) if order == "under jit" else guard(ts.jit(f))

    @pytest.mark.row("SHAPE-07")
    @pytest.mark.parametrize("order", ["under jit", "above jit"])
    @pytest.mark.parametrize("guard, good, bad, says", [
        (ts.shape.Divisible("S", 4), (3, 8), (3, 6), "S is a multiple of 4, this call has S = 6"),
        (ts.shape.Range("B", 2, 4), (4, 3), (5, 3), "2 <= B <= 4, this call has B = 5"),
        (ts.shape.Equal("B", "S"), (3, 3), (3, 4), "B == S, this call has B = 3, S = 4"),
        (ts.shape.Equal("S", 2), (3, 2), (3, 4), "S == 2, this call has S = 4"),
    ])
    def test_the_first_bad_call_raises(self, order, guard, good, bad, says):
        f = self.guarded(order, guard)
        for _ in range(2):
            f(ts.ones(good), ts.ones(good[1:]))
            with pytest.raises(ts.ShapeError, match=re.escape(says)) as info:
                f(ts.ones(bad), ts.ones(bad[1:]))
            assert info.value.code == "E_GUARD"

    @pytest.mark.row("SHAPE-07")
    def test_annotations_are_guards_too(self):
        def f(x: Tensor["B", "S", ts.f32], y: Tensor["S", ts.f32]):
            return ts.sum(x) + ts.sum(y)  # nothing in the body needs equal extents

        g = ts.jit(f)
        g(ts.ones((2, 3)), ts.ones((3,)))
        with pytest.raises(ts.ShapeError, match="axis 0 is 4, its annotation says S = 3"):
            g(ts.ones((2, 3)), ts.ones((4,)))

    def test_symbols_are_taken_to_keep_them(self):
        f = self.guarded("under jit", ts.shape.Divisible("S", 4))
        assert str(ts.shape.check(f)) == "Tensor['B', 'S', f32]"

    def test_what_is_no_guard(self):
        with pytest.raises(ts.ArgumentError, match="a guard is"):
            ts.shape.guard("S % 4 == 0")
        with pytest.raises(ts.ArgumentError, match="names T"):
            self.guarded("under jit", ts.shape.Divisible("T", 4))


@pytest.mark.row("SHAPE-08")
def test_shapes_and_types_respecialise():
    @ts.jit
    def f(x: Tensor["B", "D"]):
        return ts.softmax(x)

    for shape, dtype in (((2, 3), ts.f32), ((4, 5), ts.f32), ((2, 3), ts.bf16), ((2, 3), ts.f32)):
        y = f(ts.ones(shape, dtype))
        assert y.shape == shape and y.dtype is dtype
    assert f.specializations == 3
