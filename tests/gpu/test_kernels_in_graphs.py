"""Kernels of the user and of the library as nodes of graphs, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from graph_kernels import (
    below,
    matmul,
    patch,
)
from tessera import Tensor, f32, i32, stdlib
from tessera.runtime.device import device
from tolerance import assert_close

require_gpu()
tile = ts.tile


@ts.kernel
def cube(x: Tensor["N"], y: Tensor["N"], a: f32 = 1.0):
    t = tile.load(x[tile_n:tile_n + 256])
    y[tile_n:tile_n + 256] = t * t * t * a


cube.defvjp(lambda x, y, a: ((cube(x, y, a), y)[1], (x, a)),
            lambda saved, g: (g * 3.0 * saved[0] * saved[0] * saved[1], None))


@ts.kernel
def dropped(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 64] = tile.dropout(tile.load(x[tile_n:tile_n + 64]), 0.5)


@ts.kernel
def upto(x: Tensor["N"], y: Tensor["N"], n: i32):
    i = tile.linear_id()
    if i < N and i < n:
        y[i] = x[i]


def into_zeros(kernel, x, *args):
    y = ts.zeros(x.shape)
    kernel(x, y, *args)
    return y


@pytest.fixture
def x(rng: np.random.Generator) -> Tensor:
    return ts.tensor(rng.uniform(0.5, 1.5, 1000).astype(np.float32))


def same_on_both(f, *xs, rtol=1e-5):
    here, there = ts.jit(f)(*xs), ts.jit(f, target="cuda")(*xs)
    for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (here, there)), strict=True):
        assert a.type == b.type
        np.testing.assert_allclose(a.numpy().astype(float), b.numpy().astype(float), rtol=rtol,
                                   atol=rtol)


@pytest.mark.row("AD-27")
def test_a_kernel_with_a_rule_inside_a_loss(x):
    """sum (c (2 x)^3)^2 and its gradient against NumPy in f64, compiled for the GPU."""
    def loss(x):
        return ts.sum(into_zeros(cube, x * 2.0, 0.5) ** 2)

    t = x.numpy().astype(np.float64)
    value, slope = ts.jit(ts.value_and_grad(loss), target="cuda")(x)
    np.testing.assert_allclose(value.item(), np.sum((4 * t**3) ** 2), rtol=1e-5)
    np.testing.assert_allclose(slope.numpy(), 96 * t**5, rtol=1e-5)


@pytest.mark.row("RT-15")
def test_a_registered_op_binds_to_a_kernel(x):
    @ts.register_op("gpu_cube")
    def op(x):
        return into_zeros(cube, x)

    op.defvjp(lambda x: (op(x), x), lambda x, g: 3.0 * g * x * x)
    f = ts.jit(ts.grad(lambda x: ts.sum(op(x))), target="cuda")
    np.testing.assert_allclose(f(x).numpy(), 3 * x.numpy().astype(float) ** 2, rtol=1e-5)
    g = ts.jit(op, target="cuda")
    np.testing.assert_allclose(g(x).numpy(), x.numpy().astype(float) ** 3, rtol=1e-5)
    assert " = gpu_cube(" in g.inspect_ir("graph")


def test_what_is_not_written_keeps_what_was_there(x):
    def f(x):
        made = []
        for y in (ts.zeros(x.shape), ts.ones(x.shape), x * 1.0):
            patch(x, y)
            made.append(y)
        return tuple(made)

    same_on_both(f, x)


def test_vmap_returned_values_and_numbers_that_are_data(x, rng):
    same_on_both(lambda x: ts.vmap(ts.vmap(lambda x: into_zeros(cube, x)))(
        ts.reshape(x, (10, 4, 25))), x)
    a, b = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
            for s in ((128, 192), (192, 256)))
    same_on_both(lambda a, b: matmul(a, b) * 2.0, a, b, rtol=1e-4)
    g = ts.jit(lambda x, n: (lambda y: (upto[8](x, y, n), y)[1])(ts.zeros(x.shape)), target="cuda")
    for n in (3, 700):
        want = np.where(np.arange(1000) < n, x.numpy(), 0)
        assert np.array_equal(g(x, ts.tensor(n, "int32")).numpy(), want)


def test_draws_are_those_of_the_cpu():
    x, made = ts.ones((640,)), []
    for target in ("cpu", "cuda"):
        ts.random.seed(9)
        f = ts.jit(lambda x: into_zeros(dropped, x), target=target)
        made.append([f(x).numpy() for _ in range(3)])
    assert np.array_equal(*made) and not np.array_equal(made[0][0], made[0][1])


ROUTINES = [(n, s) for n, r in stdlib.ROUTINES.items() if r.record.ops for s in r.record.samples]


@pytest.mark.parametrize(("name", "s"), ROUTINES,
                         ids=[f"{n} {s.name}".strip() for n, s in ROUTINES])
def test_routines_of_the_library(name, s, rng):
    routine = stdlib.ROUTINES[name]
    arguments, options = s.drawn(rng)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    bits = tensors[0].dtype.bits
    same_on_both(lambda *xs: routine(*xs, **options), *tensors,
                 rtol=1e-4 if bits == 32 else 2e-2 if bits == 16 else 0.1)


@pytest.mark.row("AD-27")
def test_a_batch_is_one_launch_with_the_bits_of_its_rows(rng):
    """Nested vmaps, an operand that all rows share, a matmul in its form for warpgroups, and its
    gradient by a rule of the kernel."""
    def rows(a, b):
        return ts.vmap(ts.vmap(lambda a: matmul(a, b)))(a)

    a, b = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
            for s in ((3, 2, 256, 128), (128, 256)))
    f = ts.jit(rows, target="cuda")
    got, one = f(a, b).numpy(), ts.jit(matmul, target="cuda")
    for i in range(3):
        for j in range(2):
            assert np.array_equal(got[i, j], one(a[i, j], b).numpy())
    x = ts.tensor(rng.uniform(0.5, 1.5, (7, 1000)).astype(np.float32))
    slope = ts.jit(ts.vmap(ts.grad(lambda x: ts.sum(into_zeros(cube, x)))), target="cuda")(x)
    np.testing.assert_allclose(slope.numpy(), 3 * x.numpy().astype(float) ** 2, rtol=1e-5)


def test_rows_draw_by_their_own_keys():
    x, made = ts.ones((5, 640)), []
    for target in ("cpu", "cuda"):
        ts.random.seed(9)
        f = ts.jit(lambda x: ts.vmap(lambda x: into_zeros(dropped, x))(x), target=target)
        made.append([f(x).numpy() for _ in range(2)])
    assert np.array_equal(*made) and len({r.tobytes() for r in made[0][0]}) == 5


def test_a_kernel_that_asserts_runs_though_it_gives_nothing(rng):
    x = ts.tensor(rng.uniform(0, 1, 300).astype(np.float32)).to("cuda")

    @ts.jit
    def f(x, limit):
        y = x * 1.0
        below(y, limit)
        return ts.sum(y)

    for _ in range(3):
        assert_close(f(x, 2.0).numpy(), x.numpy().astype(np.float64).sum(), "f32", 300)
    with pytest.raises(ts.TesseraError, match="assertion failed .*x is"):
        f(x, -1.0).numpy()
        device().synchronize()
