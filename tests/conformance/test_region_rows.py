"""Rows REG, EX-05 and AD-28: what a function may do with its arguments' memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from snippet import run
from tessera import Region, Tensor, bf16, f32, read, reduce_max, reduce_min, reduce_sum, write
from tolerance import assert_close, f64

UPDATE_GRAD = '''\
@jit
def update_grad(A: Region[read], B: Region[read], G: Region[reduce_sum]):
    G[:] += gemm(A, B)   # reductions in FP32 before casting
'''


def product(rng, M=5, K=7, N=3):
    return (rng.standard_normal((M, K)).astype(np.float32),
            rng.standard_normal((K, N)).astype(np.float32))


@pytest.mark.row("EX-05", "REG-03", "REG-05", "CORE-07")
@pytest.mark.parametrize("make", [np.array, ts.tensor], ids=["numpy", "tensor"])
def test_update_grad_as_printed(rng, make):
    update_grad = run(UPDATE_GRAD)["update_grad"]
    a, b = product(rng)
    start = rng.standard_normal((5, 3)).astype(np.float32)
    G = make(start)
    seen = G if isinstance(G, np.ndarray) else G.array  # the caller's own memory
    assert update_grad(make(a), make(b), G) is None
    assert_close(seen, f64(start) + f64(a) @ f64(b), n=8)
    update_grad(make(a), make(b), G)
    assert_close(seen, f64(start) + 2 * (f64(a) @ f64(b)), n=9)


@pytest.mark.row("REG-01")
@pytest.mark.parametrize("line", ["X[:] = 1.0", "X[0] = 1.0", "X[:] += X", "X += 1.0"])
def test_a_region_that_is_read_cannot_be_written(line):
    space = run(f"@jit\ndef f(X: Region[read]):\n    {line}\n    return X\n")
    x = ts.ones((3,))
    with pytest.raises(ts.PrivilegeError, match=r"X is Region\[read\]: it may not be written") as e:
        space["f"](x)
    assert (e.value.where.line, e.value.where.text) == (3, line)
    assert "Region[write]" in e.value.hint and x.tolist() == [1, 1, 1]


@pytest.mark.row("REG-01")
def test_a_region_that_is_read_is_a_tensor(rng):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    f = ts.jit(_annotated(lambda X: ts.sum(X[1:] * X.T[0, 0] + ts.exp(X)[1:]), X=Region[read]))
    assert_close(f(x).numpy(), (f64(x)[1:] * f64(x)[0, 0] + np.exp(f64(x))[1:]).sum(), n=8)


def _annotated(fn, **annotations):
    fn.__annotations__ = annotations
    return fn


@pytest.mark.row("REG-02", "REG-08")
def test_a_region_that_is_written(rng):
    space = run("@jit\ndef step(W: Region[read], Y: Region[write]):\n    Y[:] = relu(W)\n")
    w = rng.standard_normal((4, 3)).astype(np.float32)
    y = np.full((4, 3), np.nan, np.float32)  # what it held before is not seen
    space["step"](w, y)
    assert (y == np.maximum(w, 0)).all()


@pytest.mark.row("REG-02")
@pytest.mark.parametrize("body", [
    "return Y * 2.0", "return Y[0]", "Y[:] = Y + 1.0", "Y += 1.0", "Y[0:2] = 1.0\n    return Y",
    "Y[0:2] = 1.0\n    return Y[1:3]", "return Y", "Y[1] += 1.0",
])
def test_reading_before_writing(body):
    f = run(f"@jit\ndef f(Y: Region[write]):\n    {body}\n")["f"]
    y = np.zeros(4, np.float32)
    with pytest.raises(ts.PrivilegeError, match=r"Region\[write\]: it is read before"):
        f(y)
    assert not y.any()


@pytest.mark.row("REG-03")
@pytest.mark.parametrize("body", [
    "G[:] = x", "G[0] = x[0]", "return G", "return G[:]", "return ts.sum(G)", "G[:] = G[:] + x",
    "y = G[0] * 2.0", "G[:] *= x", "G[:] = ts.maximum(G[:], x)",
])
def test_a_sum_can_only_be_added_to(body):
    f = run(f"@jit\ndef f(x, G: Region[reduce_sum]):\n    {body}\n")["f"]
    g = np.zeros(3, np.float32)
    with pytest.raises(ts.PrivilegeError, match=r"G is Region\[reduce_sum\]: it may") as e:
        f(np.ones(3, np.float32), g)
    assert "G[:] += value" in e.value.hint and not g.any()


@pytest.mark.row("REG-03")
def test_several_additions_in_one_call_sum(rng):
    @ts.jit
    def f(x: Region[read], G: Region[reduce_sum]):
        G[:] += x
        G[1:3] += x[1:3] * 2.0
        G[-1] += 5.0
        G += x

    x, g = rng.standard_normal((2, 4)).astype(np.float32)
    want = f64(g) + 2 * f64(x)
    want[1:3] += 2 * f64(x)[1:3]
    want[-1] += 5
    f(x, g)
    assert_close(g, want, n=5)


@pytest.mark.row("REG-04")
@pytest.mark.parametrize(("privilege", "combine", "name"), [
    (reduce_max, np.maximum, "maximum"), (reduce_min, np.minimum, "minimum")])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_extrema(rng, privilege, combine, name, dtype):
    f = run(f"@jit\ndef f(x: Region[read], y: Region[read], G: Region[{privilege}]):\n"
            f"    G[:] = ts.{name}(G[:], x)\n    G[2:] = ts.{name}(y[2:], G[2:])\n")["f"]
    x, y, start = (rng.standard_normal((3, 6)) * 9).astype(dtype)
    g = start.copy()
    f(x, y, g)
    want = combine(start, x)
    want[2:] = combine(want[2:], y[2:])
    assert (g == want).all()


@pytest.mark.row("REG-04")
@pytest.mark.parametrize("body", [
    "G[:] = x", "G[:] += x", "return G[:]", "return ts.sum(G)", "y = G[:] * 2.0",
    "G[:] = ts.minimum(G[:], x)", "G[:] = ts.maximum(x, x)",
    "m = ts.maximum(G[:], x)\n    G[:] = m\n    return m", "G[:] = ts.maximum(G[:], x) + 0.0",
    "m = ts.maximum(G[:], x)\n    y = ts.exp(m)\n    G[:] = m",
])
def test_a_maximum_can_only_be_raised(body):
    f = run(f"@jit\ndef f(x, G: Region[reduce_max]):\n    {body}\n")["f"]
    g = np.zeros(3, np.float32)
    with pytest.raises(ts.PrivilegeError, match=r"G is Region\[reduce_max\]: it may not be"):
        f(np.ones(3, np.float32), g)
    assert not g.any()


@pytest.mark.row("REG-06")
def test_the_sum_is_rounded_once(rng):
    """bf16 G: the f32 sum of G and an f32 product, then one cast. Rounding the product first gives
    other bits somewhere, so the test can tell."""
    update_grad = run(UPDATE_GRAD)["update_grad"]
    a, b = (x.astype(ml_dtypes.bfloat16) for x in product(rng, 32, 64, 32))
    g = rng.standard_normal((32, 32)).astype(ml_dtypes.bfloat16)
    exact = a.astype(np.float32) @ b.astype(np.float32)  # products of bf16 are exact in f32
    once = (g.astype(np.float32) + exact).astype(ml_dtypes.bfloat16)
    twice = (g.astype(np.float32) + exact.astype(ml_dtypes.bfloat16).astype(np.float32)).astype(
        ml_dtypes.bfloat16)
    assert (once != twice).any()
    update_grad(a, b, g)
    near = np.abs(f64(g) - f64(once)) <= np.abs(f64(once)) * 2**-7  # the order of an f32 sum
    assert near.all() and (g == once).mean() > 0.99
    assert (g != twice).any()


@pytest.mark.row("REG-06")
def test_several_additions_are_rounded_once():
    @ts.jit
    def f(G: Region[reduce_sum]):
        for _ in range(256):
            G[:] += 0.25  # to 256 in bf16 this adds nothing, as often as it is done

    g = ts.full((4,), 256.0, bf16)
    f(g)
    assert g.tolist() == [320.0] * 4


@pytest.mark.row("REG-09")
def test_what_may_overlap():
    @ts.jit
    def look(A: Region[read], Y: Region[write]):
        Y[:] = ts.exp(A)

    @ts.jit
    def total(A: Region[read], G: Region[reduce_sum]):
        G[:] += A

    w, y, z, g = (ts.ones((4,)) for _ in range(4))
    halves = np.zeros(8, np.float32)
    with ts.graph.deps() as d:
        look(w, y)                  # 0
        look(w, z)                  # 1  reads what 0 reads, writes elsewhere
        total(y, g)                 # 2  reads what 0 has written
        look(z, y)                  # 3  writes what 0 wrote and 2 reads, reads what 1 wrote
        look(w, halves[:4])         # 4
        look(w, halves[4:])         # 5  another part of the same array
    kinds = {(e.before, e.after, e.kind) for e in d.edges}
    assert kinds == {(0, 2, "write-read"), (0, 3, "write-write"), (2, 3, "read-write"),
                     (1, 3, "write-read")}
    assert d.between(0, 1) == [] and [e.memory for e in d.between(0, 2)] == ["Y = A"]
    assert d.waves() == [[0, 1, 4, 5], [2], [3]]
    assert [c.function for c in d.calls] == ["look", "look", "total", "look", "look", "look"]
    look(w, y)
    assert len(d.calls) == 6


@pytest.mark.row("REG-09")
def test_reductions_whose_order_cannot_be_told_may_overlap():
    @ts.jit
    def total(x: Region[read], G: Region[reduce_sum]):
        G[:] += x

    @ts.jit
    def top(x: Region[read], G: Region[reduce_max]):
        G[:] = ts.maximum(G[:], x)

    def edges(f, x, g):
        with ts.graph.deps() as d:
            f(x, g)
            f(x, g)
        return [e.kind for e in d.edges]

    assert edges(total, ts.ones(3), ts.ones(3)) == ["reduce_sum-reduce_sum"]  # rounding has order
    assert edges(total, np.ones(3, np.int32), np.ones(3, np.int32)) == []
    assert edges(top, ts.ones(3), ts.ones(3)) == []
    x, g = ts.ones(3), ts.ones(3)
    with ts.graph.deps() as d:
        total(x, g)
        top(x, g)
    assert [e.kind for e in d.edges] == ["reduce_sum-reduce_max"]


@pytest.mark.row("REG-10")
@pytest.mark.parametrize(("a", "b", "clash"), [
    ("read", "write", True), ("write", "write", True), ("read", "reduce_sum", True),
    ("reduce_sum", "reduce_sum", True), ("read", "read", False)])
def test_the_same_memory_twice(a, b, clash):
    f = run(f"@jit\ndef f(A: Region[{a}], B: Region[{b}]):\n    pass\n")["f"]
    whole = np.zeros((4, 6), np.float32)
    t = ts.zeros((4, 6))
    for x, y in [(whole, whole), (t, t), (whole[:2], whole[1:3]), (whole, whole[1])]:
        if clash:
            with pytest.raises(ts.PrivilegeError, match=r"A \(\w+\) and B \(\w+\) are") as e:
                f(x, y)
            assert e.value.code == "E_ALIAS"
        else:
            f(x, y)
    f(whole[:, :3], whole[:, 3:])  # neighbours in memory, yet apart
    f(whole[::2], whole[1::2])


@pytest.mark.row("REG-10")
def test_an_argument_without_a_privilege_is_read():
    f = run("@jit\ndef f(A, B: Region[write]):\n    B[:] = A * 2.0\n")["f"]
    x = np.ones(3, np.float32)
    with pytest.raises(ts.PrivilegeError, match="same memory"):
        f(x, x[:])


# --- derivatives ------------------------------------------------------------------------------
def _loss(w, x):
    return ts.sum(ts.tanh(x @ w))


def _loss_gradient(w, x):
    return f64(x).T @ (1 - np.tanh(f64(x) @ f64(w)) ** 2)


@pytest.mark.row("AD-28")
def test_gradients_accumulate_across_calls(rng):
    @ts.jit
    def step(w: Region[read], x: Region[read], G: Region[reduce_sum]):
        G[:] += ts.grad(_loss)(w, x)

    w = rng.standard_normal((4, 3)).astype(np.float32)
    first, second = rng.standard_normal((2, 5, 4)).astype(np.float32)
    G = ts.zeros((4, 3))
    step(w, first, G)
    step(w, second, G)
    assert_close(G.numpy(), _loss_gradient(w, first) + _loss_gradient(w, second), n=16)


@pytest.mark.row("AD-28")
def test_derivatives_flow_through_what_calls_accumulate(rng):
    update_grad = run(UPDATE_GRAD)["update_grad"]

    def loss(w, x):
        G = ts.zeros((5, 3))
        update_grad(x, w, G)
        update_grad(x * 2.0, w, G)
        return ts.sum(G * G)

    x, w = product(rng)
    want = 18 * f64(x).T @ (f64(x) @ f64(w))
    assert_close(ts.grad(loss)(w, x).numpy(), want, n=32)
    assert_close(ts.jvp(lambda v: loss(v, x), (w,), (w,))[1].numpy(), (want * f64(w)).sum(), n=64)


@pytest.mark.row("AD-28")
def test_a_tree_of_gradients_is_a_tree_of_regions(rng):
    @ts.jit
    def step(p: Region[read], x, G: Region[reduce_sum]):
        found = ts.grad(lambda p: ts.sum((x @ p["w"] + p["b"]) ** 2))(p)
        for name in found:
            G[name][:] += found[name]

    p = {"w": rng.standard_normal((4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
    x = rng.standard_normal((5, 4)).astype(np.float32)
    G = {name: ts.zeros(v.shape) for name, v in p.items()}
    for _ in range(2):
        step({k: ts.tensor(v) for k, v in p.items()}, x, G)
    assert_close(G["w"].numpy(), 4 * f64(x).T @ (f64(x) @ f64(p["w"])), n=32)
    assert_close(G["b"].numpy(), 4 * (f64(x) @ f64(p["w"])).sum(0), n=32)


def test_names_and_types():
    assert repr(Region["read"]) == "Region[read]" and Region["read"] == Region[read]
    assert repr(Region[write, Tensor["B", 3, f32]]) == "Region[write, Tensor['B', 3, f32]]"
