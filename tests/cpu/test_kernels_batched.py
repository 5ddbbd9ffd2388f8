"""Kernels under vmap as one launch: the axes of the batch are in front of the grid's, and the
kernel's own numbers of groups stay."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from graph_kernels import (
    matmul,
    row_sums,
)
from tessera import Tensor, f32, i32
from tessera.graph.cuda import CudaProgram, text_of
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.program.node_kernels import NodeLaunch
from tessera.tile.passes.verify import verify
from tolerance import assert_close

tile = ts.tile


@ts.kernel
def add(x: Tensor["N"], w: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16]) + tile.load(w[tile_n:tile_n + 16])


@ts.kernel
def numbers(x: Tensor["N"], y: Tensor["K", i32]):
    """What a lane sees of the launch."""
    i = tile.linear_id()
    if i < K:
        y[i] = i + 1000 * tile.group_id() + 100000 * tile.num_groups()


@ts.kernel
def coordinates(x: Tensor["A", "B", "C", i32], y: Tensor["A", "B", "C", i32]):
    a, b, c = tile.group_id(0), tile.group_id(1), tile.group_id(2)
    y[a, b, c] = x[a, b, c] + 100 * a + 10 * b + c + 1000 * tile.num_groups(1)


@ts.kernel
def picked(x: Tensor["N"], at: Tensor["K", i32], y: Tensor["K"], total: Tensor[1]):
    index = tile.load(at[0:16])
    found = tile.gather(x, index)
    tile.scatter(y, index, found * 2.0)
    tile.atomic_add(total, 0, tile.reduce_sum(found))


@ts.kernel
def copied_vectors(x: Tensor["M", 64], y: Tensor["M", 64]):
    row = tile.group_id(0)
    tile.store_vector(y[row], tile.load_vector(x[row], 2))


@ts.kernel
def total(x: Tensor["N", f32]) -> f32:
    return tile.reduce_sum(tile.load(x[0:N]))


@ts.kernel
def scaled(x: Tensor["N"], y: Tensor["N"], a: f32):
    i = tile.linear_id()
    if i < N:
        y[i] = x[i] * a


@ts.kernel
def dropped(x: Tensor["N"], y: Tensor["N"]):
    t = tile.load(x[tile_n:tile_n + 16])
    y[tile_n:tile_n + 16] = tile.dropout(t, 0.5) + tile.random_uniform(tile.arange(16))


def into(kernel, shape, dtype="f32"):
    def f(*xs):
        y = ts.zeros(shape, dtype)
        kernel(*xs, y)
        return y
    return f


def vmap(f, *axes):
    return lambda *xs: ts.vmap(f, in_axes=axes)(*xs)


def whole_with_total(x, at):
    y, s = ts.zeros((20,)), ts.zeros((1,))
    picked(x, at, y, s)
    return y, s


def scaled_by(x, a):
    y = ts.zeros(x.shape)
    scaled(x, y, a)
    return y


def draw(rng, *shape, kind="f32"):
    if kind == "int32":
        return ts.tensor(rng.integers(0, 20, shape).astype(np.int32))
    return ts.cast(ts.tensor(rng.standard_normal(shape).astype(np.float32)), kind)


CASES = {
    "a shared operand": (vmap(into(add, (7,)), 0, None), [(3, 7), (7,)]),
    "batch in the middle": (vmap(into(add, (7,)), 1, 0), [(7, 3), (3, 7)]),
    "nested": (vmap(vmap(into(row_sums, (5,)), 0), 0), [(3, 2, 5, 7)]),
    "nested, each operand one": (vmap(vmap(into(add, (7,)), None, 0), 0, None), [(3, 7), (2, 7)]),
    "nested, one of three": (vmap(vmap(vmap(into(add, (7,)), 0, 0), 0, None), 0, 0),
                             [(2, 3, 4, 7), (2, 4, 7)]),
    "numbers of lanes": (vmap(into(numbers[3, 32], (96,), "int32"), 0), [(4, 96)]),
    "three axes of a grid": (vmap(vmap(into(coordinates[(2, 3, 4)], (2, 3, 4), "int32"), 0), 0),
                             [(2, 5, 2, 3, 4, "int32")]),
    "places from data": (vmap(whole_with_total, 0, 0), [(3, 20), (3, 20, "int32")]),
    "vectors": (vmap(into(copied_vectors[(5,)], (5, 64)), 0), [(3, 5, 64)]),
    "a number returned": (vmap(total, 0), [(6, 9)]),
    "a number that is data": (vmap(scaled_by, 0, 0), [(6, 9), (6,)]),
    "a number for all": (vmap(scaled_by, 0, None), [(6, 9), ()]),
    "matmul": (vmap(matmul, 0, None), [(3, 70, 64, "bf16"), (64, 65, "bf16")]),
    "nobody": (vmap(into(add, (7,)), 0, 0), [(0, 7), (0, 7)]),
}


def drawn(specs, rng):
    return [draw(rng, *(n for n in s if isinstance(n, int)),
                 kind=next((n for n in s if isinstance(n, str)), "f32")) for s in specs]


def launches(graph):
    return [s for s in CudaProgram(graph).steps if isinstance(s, NodeLaunch)]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_one_launch(name, rng, gpu):
    """Row by row on the CPU; one launch of the program for GPUs, also by a pretended driver."""
    f, specs = CASES[name]
    xs = drawn(specs, rng)
    made = ts.jit(f)(*xs)
    want = [y.numpy() for y in (made if isinstance(made, tuple) else (made,))]
    graph = ts.jit(f).graph(*xs)
    (launch,) = launches(graph)
    verify(launch.function())
    arrays = [x.array for x in xs]
    executable = DeviceExecutable(graph)
    runs = [CudaProgram(graph).run(arrays), executable.run(arrays), executable.run(arrays)]
    for got in runs:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_a_kernel_sees_of_its_launch_is_one_row():
    x = ts.zeros((2, 96))
    f = vmap(into(numbers[3, 32], (96,), "int32"), 0)
    (made,) = CudaProgram(ts.jit(f).graph(x)).run([x.array])
    i = np.arange(96)
    assert np.array_equal(made, np.stack([i + 1000 * (i // 32) + 300000] * 2))


def test_rows_draw_by_their_own_keys():
    x = ts.ones((4, 64))
    f = ts.jit(vmap(into(dropped, (64,)), 0))
    ts.random.seed(3)
    want = [f(x).numpy() for _ in range(2)]
    program = CudaProgram(f.graph(x))
    ts.random.seed(3)
    for y in want:
        (got,) = program.run([x.array])
        assert np.array_equal(got, y) and len({r.tobytes() for r in got}) == 4
    assert len(launches(f.graph(x))) == 1


def test_stores_that_round_at_random_are_refused_in_a_batch():
    @ts.kernel
    def narrow(x: Tensor["N"], y: Tensor["N", "fp8_e4m3 @stochastic_round"]):
        y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16])

    f = vmap(into(narrow, (20,), "fp8_e4m3 @stochastic_round"), 0)
    with pytest.raises(ts.UnsupportedTargetError, match="narrow rounds stochastically where it"):
        CudaProgram(ts.jit(f).graph(ts.ones((2, 20))))


def test_gradients_of_a_batch(rng):
    k = scaled.with_schedule(ts.Schedule(warps=2))
    k.defvjp(lambda x, y, a: ((k(x, y, a), y)[1], a), lambda a, g: (g * a, None, None))

    def loss(x, a):
        y = ts.zeros(x.shape)
        k(x, y, a)
        return ts.sum(y * y)

    x, a = draw(rng, 5, 9), draw(rng, 5)
    graph = ts.jit(ts.vmap(ts.grad(loss))).graph(x, a)
    (got,) = CudaProgram(graph).run([x.array, a.array])
    want = 2 * x.numpy().astype(float) * a.numpy().astype(float)[:, None] ** 2
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(launches(graph)) == 1


def test_the_batch_keeps_the_form_of_a_matmul(rng):
    f = vmap(matmul, 0, 0)
    graph = ts.jit(f).graph(*drawn([(3, 256, 128, "bf16"), (3, 128, 256, "bf16")], rng))
    assert "wgmma" in text_of("ptx", graph, "sm_90a")


# --- what need not be copied ----------------------------------------------------------------------
@ts.kernel
def twice(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 16] = 2.0 * tile.load(x[tile_n:tile_n + 16])


@ts.kernel
def half(x: Tensor["N"], y: Tensor["N"]):
    i = tile.linear_id()
    if i < N // 2:
        y[i] = x[i]


@ts.kernel
def first_block(x: Tensor["N"], y: Tensor["N"]):
    y[0:16] = tile.load(x[0:16])


@ts.kernel
def added(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 16] = tile.load(y[tile_n:tile_n + 16]) + tile.load(x[tile_n:tile_n + 16])


@ts.kernel
def where_positive(x: Tensor["N"], y: Tensor["N"]):
    i = tile.linear_id()
    if i < N:
        t = x[i]
        if t > 0.0:
            y[i] = t


@pytest.mark.parametrize(("kernel", "whole"), [
    (twice, True), (scaled, True), (half, False), (first_block, False), (added, False),
    (where_positive, False)], ids=lambda k: getattr(k, "__name__", ""))
def test_what_a_kernel_writes_whole_is_not_copied(kernel, whole, rng):
    def f(x, y):
        y = y * 3.0
        kernel(x, y, *([2.0] if kernel is scaled else []))
        return y

    x, y = draw(rng, 40), draw(rng, 40)
    graph = ts.jit(f).graph(x, y)
    program = CudaProgram(graph)
    assert_close(program.run([x.array, y.array])[0], ts.jit(f)(x, y), n=2, scale=4)
    ops = [n.op.name for g in program.lowered.groups for n in g.nodes]
    assert ("mul" in ops) is not whole
    (launch,) = launches(graph)
    assert (launch.shared.fills == (("y", None),)) is whole


def test_one_value_that_is_read_and_written(gpu):
    """Zeros for both are one value: what is read stays an operand."""
    graph = ts.jit(lambda x: into(twice, (20,))(ts.zeros((20,))) + x).graph(ts.ones((20,)))
    for run in (CudaProgram(graph).run, DeviceExecutable(graph).run):
        assert np.array_equal(run([np.ones(20, np.float32)])[0], np.ones(20))
