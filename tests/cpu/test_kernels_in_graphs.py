"""Kernels under jit, grad, jvp, vmap, scan, checkpoint and on distributed tensors: a call is a node
of the graph, what it returns and what it writes are values."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from graph_kernels import (
    add_one,
    below,
    cube,
    cubed,
    doubled,
    dropped,
    loss_of_cubes,
    sums_of,
    two,
    with_rule,
    written,
)
from graph_kernels import x as x
from tessera import Tensor, bf16, f32, i32
from tessera.errors import ArgumentError, TraceError

tile = ts.tile


# --- values -------------------------------------------------------------------------------------
def test_what_is_written_and_what_is_returned_are_values(x):
    want = x.numpy().astype(np.float64) ** 3

    def f(x):
        return written(x) * 2.0, cubed(x + 0.0) + 1.0

    a, b = ts.jit(f)(x)
    np.testing.assert_allclose(a.numpy(), 2 * want, rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), want + 1, rtol=1e-6)
    for eager, compiled in zip(f(x), (a, b), strict=True):
        assert np.array_equal(eager.numpy(), compiled.numpy())


def test_the_graph_shows_the_kernel_and_the_line(x):
    f = ts.jit(lambda x: written(x))
    f(x)
    line = next(t for t in f.inspect_ir("graph").splitlines() if "kernel(" in t)
    assert "call=cube()" in line and "kernel(x, y)" in line and "f32[20]" in line


def test_a_kernel_that_reads_what_it_writes_reads_the_last_value(x):
    @ts.jit
    def f(x):
        y = x * 1.0
        before = y + 0.0
        add_one(y)
        add_one(y)
        return before, y

    before, y = f(x)
    assert np.array_equal(before.numpy(), x.numpy())
    np.testing.assert_allclose(y.numpy(), x.numpy() + 2, rtol=1e-6)


def test_the_callers_array_keeps_its_elements(x):
    @ts.jit
    def f(x):
        add_one(x)
        return x

    before = x.numpy().copy()
    np.testing.assert_allclose(f(x).numpy(), before + 1, rtol=1e-6)
    assert np.array_equal(x.numpy(), before)


def test_a_number_that_is_data_reaches_the_kernel(x):
    @ts.jit
    def f(x, a):
        y = ts.zeros(x.shape)
        cube(x, y, a)
        return y

    for a in (2.0, -0.5):
        np.testing.assert_allclose(f(x, a).numpy(), a * x.numpy().astype(float) ** 3, rtol=1e-6)
    assert f.specializations == 1


def test_launches_schedules_tuned_and_whole_array_kernels(x):
    @ts.kernel
    def each(x: Tensor["N"], y: Tensor["N"]):
        for i in tile.range(tile.group_id(0) * 4, N, tile.num_groups(0) * 4):
            y[i:i + 4] = 3.0 * tile.load(x[i:i + 4])

    @ts.kernel.autotune(space=dict(BN=[16, 32]), cache=False)
    def tuned(x: Tensor["N"], y: Tensor["N"], BN=16):
        y[tile_n:tile_n + BN] = 3.0 * tile.load(x[tile_n:tile_n + BN])

    @ts.kernel.auto
    def whole(x):
        return 3.0 * x

    for call in (each[2], tuned, cube.with_schedule(ts.Schedule(warps=1))):
        made = ts.jit(lambda x, call=call: written(x, call))(x).numpy()
        assert np.array_equal(made, written(x, call).numpy())
    m = ts.reshape(x, (2, 2, 5))
    np.testing.assert_allclose(ts.jit(lambda m: whole(m))(m).numpy(), 3 * m.numpy(), rtol=1e-6)


def test_narrow_and_packed_types(x):
    @ts.kernel
    def narrow(x: Tensor["N"], y: Tensor["N", bf16], z: Tensor["N", ts.fp4_e2m1]):
        t = tile.load(x[tile_n:tile_n + 16])
        y[tile_n:tile_n + 16] = t
        z[tile_n:tile_n + 16] = t

    def f(x):
        y, z = ts.zeros(x.shape, "bf16"), ts.zeros(x.shape, "fp4_e2m1")
        narrow(x, y, z)
        return y, z

    for a, b in zip(f(x), ts.jit(f)(x), strict=True):
        assert a.type == b.type and np.array_equal(a.numpy(), b.numpy())


# --- derivatives --------------------------------------------------------------------------------
def test_a_kernel_with_a_rule_in_a_loss(x):
    loss = loss_of_cubes()
    t = x.numpy().astype(np.float64)
    value, slope = ts.value_and_grad(ts.jit(loss))(x)
    np.testing.assert_allclose(value.item(), np.sum((4 * t**3) ** 2), rtol=1e-5)
    np.testing.assert_allclose(slope.numpy(), 2 * 4 * t**3 * 12 * t**2, rtol=1e-5)
    rows = ts.stack([x, 2.0 * x])
    np.testing.assert_allclose(ts.vmap(ts.grad(loss))(rows).numpy()[0], slope.numpy(), rtol=1e-6)


def test_a_rule_in_forward_mode_serves_both(x):
    k = with_rule(two)

    @k.defjvp
    def rule(primals, tangents):
        x, s, c = primals
        k(x, s, c)
        return (s, c), (c * tangents[0], -s * tangents[0])

    def f(x):
        s, c = ts.zeros(x.shape), ts.zeros(x.shape)
        k(x, s, c)
        return s * 2.0 + c

    t = x.numpy().astype(np.float64)
    want = 2 * np.cos(t) - np.sin(t)
    np.testing.assert_allclose(ts.jvp(f, (x,), (ts.ones(x.shape),))[1].numpy(), want, rtol=1e-5,
                               atol=1e-6)
    np.testing.assert_allclose(ts.grad(lambda x: ts.sum(f(x)))(x).numpy(), want, rtol=1e-5,
                               atol=1e-6)


def test_a_rule_of_what_is_returned(x):
    k = with_rule(cubed)
    k.defvjp(lambda x: (k(x), x), lambda x, g: g * 3.0 * x * x)
    slope = ts.grad(lambda x: ts.sum(k(x)))(x)
    np.testing.assert_allclose(slope.numpy(), 3 * x.numpy().astype(float) ** 2, rtol=1e-6)


def test_without_a_rule_it_follows_from_the_body(x):
    t = x.numpy().astype(float)
    np.testing.assert_allclose(ts.grad(lambda x: ts.sum(written(x)))(x).numpy(), 3 * t ** 2,
                               rtol=1e-5)
    stopped = ts.grad(lambda x: ts.sum(ts.stop_gradient(written(x)) * x))(x)
    np.testing.assert_allclose(stopped.numpy(), t ** 3, rtol=1e-6)


# --- transforms ---------------------------------------------------------------------------------
def test_vmap_adds_rows_to_what_has_them(rng):
    xs = rng.standard_normal((3, 2, 5, 7)).astype(np.float32)
    made = ts.vmap(ts.vmap(lambda x: sums_of(x)))(ts.tensor(xs))
    np.testing.assert_allclose(made.numpy(), xs.sum(-1), rtol=1e-5, atol=1e-6)

    @ts.kernel
    def add(x: Tensor["N"], w: Tensor["N"], y: Tensor["N"]):
        y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16]) + tile.load(w[tile_n:tile_n + 16])

    def f(x, w):
        y = ts.zeros(x.shape)
        add(x, w, y)
        return y

    x, w = rng.standard_normal((2, 4, 7)).astype(np.float32), rng.standard_normal(7).astype("f")
    made = ts.vmap(f, in_axes=(0, None))(ts.tensor(x[0]), ts.tensor(w))
    np.testing.assert_allclose(made.numpy(), x[0] + w, rtol=1e-6)
    assert ts.vmap(f, in_axes=(0, None))(ts.zeros((0, 7)), ts.tensor(w)).shape == (0, 7)


def test_in_loops_and_recomputed(x):
    def step(carry, _):
        add_one(carry)
        return carry, carry[0]

    last, firsts = ts.scan(step, x, None, length=3)
    np.testing.assert_allclose(last.numpy(), x.numpy() + 3, rtol=1e-6)
    np.testing.assert_allclose(firsts.numpy(), x.numpy()[0] + np.arange(1, 4), rtol=1e-6)
    k = with_rule(cubed)
    k.defvjp(lambda x: (k(x), x), lambda x, g: g * 3.0 * x * x)
    slope = ts.grad(ts.checkpoint(lambda x: ts.sum(k(k(x)))))(x)
    np.testing.assert_allclose(slope.numpy(), 9 * x.numpy().astype(float) ** 8, rtol=1e-5)


def test_draws_come_from_the_graphs_keys():
    x = ts.ones((64,))
    f = ts.jit(lambda x: written(x, dropped))
    ts.random.seed(3)
    first, second = f(x).numpy(), f(x).numpy()
    ts.random.seed(3)
    assert np.array_equal(f(x).numpy(), first) and not np.array_equal(first, second)
    rows = ts.vmap(lambda x: written(x, dropped))(ts.ones((4, 64))).numpy()
    assert len({r.tobytes() for r in rows}) == 4
    assert set(np.unique(rows)) == {0.0, 2.0}


def test_a_recomputation_draws_what_the_first_run_drew():
    k = with_rule(dropped)
    # its mask is the value for x = 1, so that the gradient shows the bits of the backward pass
    k.defvjp(lambda x, y: ((k(x, y), y)[1], y), lambda y, g: (g * y, None))
    x = ts.ones((64,))

    def f(x):
        y = written(x, k)
        return ts.sum(y), y

    ts.random.seed(5)
    slope, y = ts.grad(ts.checkpoint(f), has_aux=True)(x)
    assert np.array_equal(slope.numpy(), y.numpy()) and 0 < np.count_nonzero(y.numpy()) < 64


# --- meshes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", [doubled, None], ids=["axes", "whole"])
def test_on_distributed_tensors(rng, kernel):
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    a = rng.standard_normal((8, 6)).astype(np.float32)
    kernel = kernel or ts.kernel(doubled.fn)
    d = ts.dist.tensor(a.shape, ts.ShardSpec(("row",), ("dp",)), mesh, init=a)

    @ts.jit
    def f(d):
        y = ts.zeros_like(d)
        kernel(d, y)
        return y

    made = f(d)
    np.testing.assert_allclose(made.numpy(), 2 * a, rtol=1e-6)
    for y in (ts.zeros(a.shape), np.zeros_like(a), ts.dist.tensor(
            a.shape, ts.ShardSpec(("col",), ("dp",)), mesh)):
        kernel(d, y)
        np.testing.assert_allclose(np.asarray(y), 2 * a, rtol=1e-6)


@pytest.mark.parametrize("kernel", [doubled, None], ids=["axes", "whole"])
def test_rows_of_a_batch_are_split_over_a_mesh(rng, kernel):
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    a = rng.standard_normal((4, 8, 6)).astype(np.float32)
    kernel = kernel or ts.kernel(doubled.fn)
    d = ts.dist.tensor(a.shape, ts.ShardSpec(("row",), ("dp",)), mesh, init=a)
    f = ts.jit(ts.vmap(lambda x: written(x, kernel)))
    made = f(d)
    np.testing.assert_allclose(made.numpy(), 2 * a, rtol=1e-6)
    assert str(f.plan) == "no collectives" and made.local.shape == (2, 8, 6)


def test_draws_do_not_depend_on_the_mesh():
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    kernel = ts.kernel(dropped.fn, axes="n,n->n")
    d = ts.dist.tensor((64,), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
    f = ts.jit(lambda x: written(x, kernel))
    ts.random.seed(3)
    alone = f(ts.ones((64,))).numpy()
    ts.random.seed(3)
    assert np.array_equal(f(d).numpy(), alone)


# --- errors -------------------------------------------------------------------------------------
def test_what_a_graph_cannot_write_is_refused(x):
    outside = ts.zeros(x.shape)
    for target in (outside, np.zeros(20, np.float32)):
        with pytest.raises(TraceError, match=r"cube writes its argument y, which is a tensor from "
                                             r"outside[\s\S]*cube\(x, target\)"):
            ts.jit(lambda x: cube(x, target))(x)  # noqa: B023
    assert not outside.numpy().any()

    @ts.jit
    def lost(x):
        add_one(x)

    with pytest.raises(TraceError, match=r"add_one writes into x, here f32\[20\], an argument of "
                                         r"lost[\s\S]*return the tensor[\s\S]*ts.zeros\(\(20,\), "):
        lost(x)
    with pytest.raises(TraceError, match="of an enclosing function"):
        ts.jit(lambda x: ts.scan(lambda c, _: (c + cube(c, x), c), x * 1.0, None, length=2))(x)


def test_what_is_no_argument_of_a_graphs_kernel(x):
    @ts.kernel
    def powers(x: Tensor["N"], y: Tensor["N"], n: int):
        y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16]) * n

    with pytest.raises(ArgumentError, match=r"argument n is a compile-time parameter"):
        ts.jit(lambda x, n: powers(x, x * 1.0, n))(x, ts.tensor(2, "int32"))
    with pytest.raises(ArgumentError, match=r"target=\.\.\.\) in a traced function"):
        ts.jit(lambda x: cube.launch(x, x * 1.0, target="cpu"))(x)
    with pytest.raises(TraceError, match="extents that are numbers"):
        ts.jit(lambda x: cubed(x)).infer(Tensor["N", f32])
    with pytest.raises(ts.ShapeError, match=r"axis 0 \(N\) is 4"):
        ts.jit(lambda x: cube(x, ts.zeros((4,))))(x)


def test_an_index_that_is_data():
    @ts.kernel
    def shifted(x: Tensor["N"], y: Tensor["N"], by: i32):
        i = tile.linear_id()
        if i < N:
            y[i] = x[(i + by) % N]

    x = ts.tensor(np.arange(7, dtype=np.float32))

    @ts.jit
    def f(x, by):
        y = ts.zeros_like(x)
        shifted(x, y, by)
        return y

    assert f(x, ts.tensor(3, "int32")).tolist() == [3, 4, 5, 6, 0, 1, 2]


# --- what kernels say -----------------------------------------------------------------------------
@ts.kernel
def told(x: Tensor["N", f32], y: Tensor["N", f32]):
    if tile.linear_id() == 0:
        print("first", x[0])
    y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16])


def test_a_kernel_that_reports_runs_though_nobody_reads_what_it_writes(x, capsys):
    @ts.jit
    def f(x, limit):
        y = x * 1.0
        below(y, limit)
        for _ in range(2):  # each says it
            told(y, ts.zeros_like(y))
        return ts.sum(y)

    assert f(x, 9.0).item() == pytest.approx(x.numpy().sum(dtype=np.float64))
    assert capsys.readouterr().out == 2 * f"first {x.numpy()[0]!s}\n"
    assert f.effects == {"io"} and f.inspect_ir("graph").count("!io") == 3
    with pytest.raises(ts.EffectError, match="io"):
        ts.jit(ts.pure(lambda x: f(x, 9.0)))(x)
    assert ts.jit(written).graph(x).effects == frozenset()
    silent = ts.jit(lambda x: (written(x), x)[1])
    silent(x)
    assert "kernel(" not in silent.inspect_ir("schedule")


def test_an_error_in_a_kernel_names_its_line_and_the_call(x):
    @ts.jit
    def f(x):
        y = x * 1.0
        below(y, 0.25)
        return y

    with pytest.raises(ts.TesseraError, match=r"assertion failed in lane 0 of group 0: x is") as e:
        f(x)
    assert "assert x[i] < limit" in e.value.where.text
    ((role, where),) = e.value.also
    assert role == "called" and where.text == "below(y, 0.25)"
    assert "\n  called: " in str(e.value)
