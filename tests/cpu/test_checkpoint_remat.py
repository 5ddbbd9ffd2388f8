"""checkpoint and remat: the same gradients, less kept, the inside computed twice."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from derivatives import t64
from tessera.errors import ArgumentError
from tessera.graph.ir import Graph, subgraphs
from tessera.tensor import Tensor
from tolerance import assert_close


def count(graph: Graph, name: str) -> int:
    """Nodes of an op, in held graphs too."""
    return sum(
        (node.op.name == name) + sum(count(g, name) for g in subgraphs(node))
        for node in graph.nodes
    )


def block(x: Tensor, w: Tensor) -> Tensor:
    return ts.sin(ts.tanh(x @ w) * x)


@pytest.mark.parametrize("wrap", [
    ts.checkpoint, lambda f: lambda x: ts.map(f, x),
    lambda f: lambda x: ts.cond(ts.sum(x) > 0, f, f, x),
    lambda f: lambda x: ts.scan(lambda c, row: (c, f(row)), 0.0, x)[1],
], ids=["checkpoint", "map", "cond", "scan"])
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_a_cast_written_twice_rounds_one_cotangent_in_held_graphs_too(run, wrap) -> None:
    def f(x: Tensor) -> Tensor:
        return ts.cast(ts.cast(x, ts.fp4) * ts.cast(x, ts.fp4), ts.f32)

    x = ts.tensor([5.0, 100.0, -3.3, 0.4])  # 2 * cast(x) rounded: fp4 ends at 6
    want = [6.0, 6.0, -6.0, 1.0]
    assert run(ts.grad(lambda x: ts.sum(f(x))))(x).tolist() == want
    assert run(ts.grad(lambda x: ts.sum(wrap(f)(x))))(x).tolist() == want


@pytest.mark.row("AD-20")
def test_same_gradients_bit_for_bit(rng: np.random.Generator) -> None:
    x, w = (ts.tensor(rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(2))

    def loss(f: Callable, x: Tensor, w: Tensor) -> Tensor:
        return ts.sum(f(f(x, w), w))

    plain = ts.value_and_grad(lambda x, w: loss(block, x, w), argnums=(0, 1))(x, w)
    for wrap in (ts.checkpoint, ts.remat, ts.remat(policy="save_matmuls")):
        f = wrap(block)
        for run in (lambda x, w, f=f: loss(f, x, w), ts.jit(lambda x, w, f=f: loss(f, x, w))):
            value, grads = ts.value_and_grad(run, argnums=(0, 1))(x, w)
            assert value.item() == plain[0].item()
            for g, want in zip(grads, plain[1], strict=True):
                np.testing.assert_array_equal(g.numpy(), want.numpy())
    np.testing.assert_array_equal(ts.checkpoint(block)(x, w).numpy(), block(x, w).numpy())


@pytest.mark.row("AD-20")
def test_the_inside_runs_twice(rng: np.random.Generator) -> None:
    w = t64(rng.standard_normal((3, 3)))
    plain = ts.grad(lambda w: ts.sum(block(w, w))).graph(w)
    again = ts.grad(lambda w: ts.sum(ts.checkpoint(block)(w, w))).graph(w)
    assert count(plain, "tanh") == 1 and count(again, "tanh") == 2
    assert [n.op.name for n in again.nodes].count("checkpoint") == 1


def peak_bytes(run: Callable, x: Tensor) -> int:
    run(x)  # once before it is measured
    tracemalloc.start()
    run(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def stage(x: Tensor) -> Tensor:
    for _ in range(8):
        x = ts.tanh(x + 1.0)
    return x


@pytest.mark.row("AD-20")
def test_peak_memory_is_lower() -> None:
    """Four stages of sixteen arrays each: 64 of them are kept, or 4 and the inside of one."""
    x = ts.tensor(np.full((100, 100), 0.01, np.float32))
    pull = lambda f: peak_bytes(  # noqa: E731
        lambda v: ts.vjp(lambda u: ts.sum(f(f(f(f(u))))), v)[1](1.0), x)
    kept, again = pull(stage), pull(ts.checkpoint(stage))
    assert again < 0.6 * kept, f"{again} bytes with checkpoint, {kept} without"


@pytest.mark.row("AD-20")
def test_a_compiled_gradient_plans_less_memory() -> None:
    """The arena of the compiled program: matrix products stand between the stages' loops."""
    from tessera.graph.execute import Executable

    def products(x: Tensor) -> Tensor:
        for _ in range(6):
            x = ts.tanh(x @ x)
        return x

    def arena(f: Callable) -> int:
        graph = ts.value_and_grad(lambda x: ts.sum(f(f(f(f(x)))))).graph(ts.ones((64, 64)))
        return Executable(graph).compiled.plan.arena_bytes

    assert arena(ts.checkpoint(products)) < 0.6 * arena(products)


@pytest.mark.row("AD-21")
@pytest.mark.parametrize(("policy", "matmuls", "tanhs"), [
    (None, 2, 2), ("save_nothing", 2, 2), ("save_matmuls", 1, 2), ("save_everything", 1, 1),
    (ts.remat_policies.save_matmuls, 1, 2), (ts.remat_policies.save_ops("tanh"), 1, 1),
    (lambda node: node.op.name in ("tanh", "sin"), 1, 1),
])
def test_policies_decide_what_is_computed_again(
    policy: Any, matmuls: int, tanhs: int, rng: np.random.Generator
) -> None:
    """Counted in the compiled program, where what nobody reads is gone."""
    from tessera.graph.simplify import simplify

    w = t64(rng.standard_normal((3, 3)))
    f = ts.remat(block, policy=policy)
    loss = lambda w: ts.sum(f(w, w))  # noqa: E731
    graph = simplify(ts.value_and_grad(loss).graph(w))
    derivative = 2  # matmuls of the backward pass itself
    assert count(graph, "matmul") - derivative == matmuls
    assert count(graph, "tanh") == tanhs
    assert ts.gradcheck(loss, (w,))


def test_policy_errors() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'save_matmuls'|no remat policy"):
        ts.remat(block, policy="save_matmul")
    with pytest.raises(ArgumentError, match="no op is named 'tahn'"):
        ts.remat_policies.save_ops("tahn")
    with pytest.raises(ArgumentError, match="a remat policy is a function"):
        ts.remat(block, policy=3)
    with pytest.raises(ArgumentError, match="checkpoint needs a function"):
        ts.checkpoint(t64(1.0))


@pytest.mark.row("AD-14")
@pytest.mark.parametrize("policy", ["save_nothing", "save_everything"])
def test_dropout_inside_uses_the_mask_of_the_forward_pass(policy: str) -> None:
    x = ts.ones((500,))

    @ts.remat(policy=policy)
    def f(x: Tensor) -> Tensor:
        return ts.dropout(x, 0.5) * 3.0

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return ts.sum(y), y

    ts.random.seed(11)
    for run in (ts.grad(loss, has_aux=True), ts.jit(ts.grad(loss, has_aux=True))):
        first, seen = None, None
        for _ in range(2):
            g, y = run(x)
            np.testing.assert_array_equal(g.numpy(), y.numpy())
            assert 0 < np.count_nonzero(y.numpy()) < 500
            assert seen is None or not np.array_equal(y.numpy(), seen)
            first, seen = g, y.numpy()
        assert first is not None


COMPOSED: dict[str, Callable] = {
    "nested": lambda f, x: ts.checkpoint(lambda v: f(f(v)) * v)(x),
    "grad(grad)": lambda f, x: ts.grad(
        lambda v: ts.sum(ts.grad(lambda u: ts.sum(f(u)))(v) ** 2))(x),
    "jvp": lambda f, x: ts.jvp(f, (x,), (ts.cos(x),))[1],
    "grad(jvp)": lambda f, x: ts.grad(lambda v: ts.sum(ts.jvp(f, (v,), (v * v,))[1]))(x),
    "vmap": lambda f, x: ts.vmap(f)(ts.stack([x, x * 2.0])),
    "vmap(grad)": lambda f, x: ts.vmap(ts.grad(lambda v: ts.sum(f(v))))(ts.stack([x, x * 2.0])),
    "scan": lambda f, x: ts.scan(lambda c, _: (f(c), c), x, length=3)[1],
    "grad(scan)": lambda f, x: ts.grad(
        lambda v: ts.sum(ts.scan(lambda c, e: (f(c) * e, None), v, ts.stack([v, v]))[0]))(x),
    "cond": lambda f, x: ts.cond(ts.sum(x * x) > 0.0, f, lambda v: v, x),
}


@pytest.mark.row("AD-20")
@pytest.mark.parametrize("name", COMPOSED)
def test_checkpoint_composes(name: str, rng: np.random.Generator) -> None:
    w, x = t64(rng.standard_normal(3)), t64(0.5 * rng.standard_normal(3))
    run = COMPOSED[name]

    def with_w(f: Callable) -> Callable:
        return lambda x, w: run(f(lambda v: ts.tanh(ts.sin(v) * w)), x)

    assert ts.gradcheck(with_w(ts.checkpoint), (x, w))
    assert_close(with_w(ts.checkpoint)(x, w).numpy(), with_w(lambda g: g)(x, w).numpy(), n=4)


def test_results_and_arguments_of_any_structure() -> None:
    @ts.checkpoint
    def f(p: dict, n: int, *, name: str) -> dict:
        return {"y": p["a"] ** n, "name": name, "n": n}

    def loss(a: Tensor) -> Tensor:
        out = f({"a": a}, 3, name="run")
        assert out["name"] == "run"
        return ts.sum(out["y"])

    assert ts.grad(loss)(t64([2.0])).item() == 12.0
    assert f({"a": t64(2.0)}, 2, name="x")["y"].item() == 4.0
    assert f.__name__ == "f"


def test_only_gradients_that_are_asked_for(rng: np.random.Generator) -> None:
    x, w = t64(rng.standard_normal((2, 2))), t64(rng.standard_normal((2, 2)))
    one = ts.grad(lambda x: ts.sum(ts.checkpoint(block)(x, w))).graph(x)
    both = ts.grad(lambda x, w: ts.sum(ts.checkpoint(block)(x, w)), argnums=(0, 1)).graph(x, w)
    assert count(one, "matmul") == count(both, "matmul")
    assert len(one.outputs) == 1 and len(both.outputs) == 2
