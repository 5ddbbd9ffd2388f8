"""Kernels as steps of programs for GPUs: what is launched, filled before, read and refused."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from graph_kernels import (
    below,
    cube,
    cubed,
    dropped,
    loss_of_cubes,
    patch,
    sums_of,
    two,
    written,
)
from graph_kernels import x as x
from tessera import Tensor, f32, i32, stdlib
from tessera.errors import ArgumentError, TraceError
from tessera.graph.cuda import CudaProgram, text_of
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.program.placed_launch import BufferAddress

tile = ts.tile


def scaled_row_sums(x):
    m = ts.reshape(x, (4, 5)) * 2.0
    return sums_of(m) + 1.0


def both_parts(x):
    s, c = ts.zeros(x.shape), ts.ones(x.shape)
    two(x, s, c)
    return s * c


def partly(x):
    """What is not written keeps what was there: zeros, ones, and elements of x."""
    made = []
    for y in (ts.zeros(x.shape), ts.ones(x.shape), x * 1.0):
        patch(x, y)
        made.append(y)
    return tuple(made)


def by_rows(x):
    return ts.vmap(ts.vmap(lambda x: written(x) + cubed(x)))(ts.reshape(x, (2, 2, 5)))


def total_of(x):
    @ts.kernel
    def total(x: Tensor["N", f32]) -> f32:
        return tile.reduce_sum(tile.load(x[0:N]))

    return total(x) * 2.0


def differentiated(x):
    return ts.grad(loss_of_cubes())(x)


STEPS = [written, cubed, scaled_row_sums, both_parts, partly, by_rows, total_of, differentiated,
         lambda x: stdlib.stable_softmax(x), lambda x: written(written(x, add_one_to), cube)]


@ts.kernel
def add_one_to(x: Tensor["N"], y: Tensor["N"]):
    i = tile.linear_id()
    if i < N:
        y[i] = x[i] + 1.0


def results(f, *xs):
    made = ts.jit(f)(*xs)
    return [y.numpy() for y in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("f", STEPS, ids=[getattr(f, "__name__", "") for f in STEPS])
def test_as_steps_of_a_program_for_gpus(f, x, gpu):
    """On memory full of NaN: the interpreter's run of the program, then a pretended driver's."""
    graph, want = ts.jit(f).graph(x), results(f, x)
    program = CudaProgram(graph)
    executable = DeviceExecutable(graph)
    for got in (program.run([x.array]), executable.run([x.array]), executable.run([x.array])):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_numbers_that_are_data_are_read_by_the_step(x, gpu):
    def f(x, a):
        y = ts.zeros(x.shape)
        cube(x, y, a * 2.0)
        return y

    a = ts.tensor(1.5)
    graph = ts.jit(f).graph(x, a)
    executable = DeviceExecutable(graph)
    for number in (1.5, -2.0):
        (got,) = executable.run([x.array, np.float32(number)])
        np.testing.assert_allclose(got, 2 * number * x.numpy().astype(float) ** 3, rtol=1e-6)
    text = text_of("tile", graph, "sm_90a")
    assert "%a: f32 = load_element(%a_data, 0:int32)" in text

    def by_data(x, n):
        @ts.kernel
        def upto(x: Tensor["N"], y: Tensor["N"], n: i32):
            i = tile.linear_id()
            if i < n:
                y[i] = x[i]

        y = ts.zeros(x.shape)
        upto(x, y, n)
        return y

    with pytest.raises(ts.UnsupportedTargetError, match=r"grid of upto depends on n, which is data"
                                                        r"[\s\S]*upto\[groups\]"):
        CudaProgram(ts.jit(by_data).graph(x, ts.tensor(3, "int32")))


def test_the_schedule_shows_the_users_kernel(x):
    graph = ts.jit(lambda x: written(x * 2.0)).graph(x)
    text = text_of("schedule", graph, "sm_90a")
    group = text[text.index("g1 launch over [20]"):]
    assert "call cube()" in group and "= kernel(v2, 0.0)" in group and "kernel(x, y)" not in group
    assert "graph_kernels.py" in group
    source = text_of("target", graph, "sm_90a")
    assert "def cube(" in source and "cube(" in text_of("ptx", graph, "sm_90a")


def test_draws_on_a_gpu_are_those_of_the_cpu(gpu):
    x = ts.ones((64,))
    f = ts.jit(lambda x: written(x, dropped))
    ts.random.seed(3)
    want = [f(x).numpy() for _ in range(2)]
    program = CudaProgram(f.graph(x))
    ts.random.seed(3)
    for y in want:
        assert np.array_equal(program.run([x.array])[0], y)


def test_a_grid_that_is_data_is_refused_on_gpus(x):
    @ts.kernel(grid=lambda n: (n,))
    def first(x: Tensor["N"], y: Tensor["N"], n: i32):
        i = tile.group_id(0)
        y[i] = x[i] + n

    def f(x, n):
        y = ts.zeros(x.shape)
        first(x, y, n)
        return y

    n = ts.tensor(7, "int32")
    assert ts.jit(f)(x, n).numpy()[:8].tolist() == [*(x.numpy()[:7] + 7), 0]
    with pytest.raises(ts.UnsupportedTargetError, match="grid of first depends on n"):
        CudaProgram(ts.jit(f).graph(x, n))


FACTOR = 2.0


def test_a_global_that_changed_is_an_error_of_a_compiled_program(x, gpu, monkeypatch):
    @ts.kernel
    def times(x: Tensor["N"], y: Tensor["N"]):
        y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16]) * FACTOR

    executable = DeviceExecutable(ts.jit(lambda x: written(x, times)).graph(x))
    np.testing.assert_allclose(executable.run([x.array])[0], 2 * x.numpy(), rtol=1e-6)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    for _ in range(2):  # also behind a call that traced the kernel anew
        with pytest.raises(TraceError, match="kernel times reads a global or closure variable"):
            executable.run([x.array])
        np.testing.assert_allclose(written(x, times).numpy(), 3 * x.numpy(), rtol=1e-6)


# --- what a kernel says that it overwrites --------------------------------------------------------
def doubled_in_steps(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.local_id()
    for j in range(i, N, 128):  # noqa: F821
        y[j] = x[j] * 2.0


@pytest.mark.parametrize("said", [(), ("y",)])
def test_memory_that_a_kernel_overwrites_is_not_filled_before(said):
    kernel = ts.kernel(doubled_in_steps, grid=lambda: 1, overwrites=said)
    assert kernel.with_schedule(ts.Schedule(warps=4)).overwrites == set(said)

    def fn(x):
        y = ts.zeros(x.shape)
        kernel(x, y)
        return y

    x = ts.tensor(np.arange(300, dtype=np.float32))
    program = CudaProgram(ts.jit(fn).graph(x), "sm_90a")
    (group,) = program.plan.groups
    assert dict(group.attr("call").fills) == {"y": None if said else 0}
    np.testing.assert_array_equal(program.run([x.array])[0], 2 * x.array)


def test_what_is_overwritten_is_a_parameter():
    with pytest.raises(ArgumentError, match="has no parameter 'z' to overwrite"):
        ts.kernel(doubled_in_steps, overwrites=("z",))
    with pytest.raises(ArgumentError, match="has no parameter 'z' to count in"):
        ts.kernel(doubled_in_steps, counters=("z",))


@ts.kernel(grid=lambda: 4, overwrites=("y",), counters=("begun",))
def in_turn(x: Tensor["N", f32], y: Tensor["N", f32], begun: Tensor["K", i32]):
    """Adds how many groups had begun before; the last one sets that back."""
    g, i = tile.group_id(0), tile.local_id()
    n = tile.group_max(tile.atomic_add(begun, 0, 1))
    if i < N // 4:
        y[g * (N // 4) + i] = x[g * (N // 4) + i] + float(n)
    if n == 3:
        begun[0] = 0


def test_what_a_kernel_counts_in_is_cleared_once(gpu):
    x = ts.tensor(np.arange(64, dtype=np.float32))

    def fn(x):
        y, begun = ts.zeros(x.shape), ts.zeros((1,), "int32")
        in_turn(x, y, begun)
        return y

    executable = DeviceExecutable(ts.jit(fn).graph(x))
    for _ in range(2):
        got = executable.run([x.array])[0]
        np.testing.assert_array_equal(got, x.array + np.arange(4).repeat(16))
    (step,) = CudaProgram(ts.jit(fn).graph(x), "sm_90a").steps
    asked = []
    made = step.steps(lambda name, at: BufferAddress(), lambda name: asked.append(name)
                      or BufferAddress(),
                      None, 0, 0)
    assert [kind for kind, _ in made] == ["kernel"] and len(asked) == 1
    assert in_turn.with_schedule(ts.Schedule(warps=4)).counters == {"begun"}


# --- kernels that report --------------------------------------------------------------------------
@ts.kernel
def tells(x: Tensor["N", f32], y: Tensor["N", f32]):
    if tile.linear_id() == 0:
        print("first", x[0])
    y[tile_n:tile_n + 16] = tile.load(x[tile_n:tile_n + 16])


def test_a_kernel_that_prints_is_a_step_though_nobody_reads_what_it_writes(x, capsys):
    @ts.jit
    def f(x):
        y = x * 2.0
        tells(y, ts.zeros_like(y))
        return ts.sum(y)

    program = CudaProgram(f.graph(x))
    (total,) = program.run([x.array])
    np.testing.assert_allclose(total, 2 * x.numpy().sum(dtype=np.float64), rtol=1e-6)
    assert capsys.readouterr().out == f"first {2 * x.numpy()[0]!s}\n"


def test_a_kernel_that_gives_nothing_is_a_step(x, gpu, driver):
    @ts.jit
    def f(x, limit):
        y = x * 2.0
        below(y, limit)
        return ts.sum(y), y

    graph, want = f.graph(x, 9.0), 2 * x.numpy().astype(np.float64)
    for made in (CudaProgram(graph), executable := DeviceExecutable(graph), executable):
        total, y = made.run([x.array, np.float64(9.0)])
        np.testing.assert_allclose(total, want.sum(), rtol=1e-6)
        np.testing.assert_allclose(y, want, rtol=1e-6)
    with pytest.raises(ts.TesseraError, match="assertion failed in lane .*x is"):
        CudaProgram(graph).run([x.array, np.float64(0.0)])
    text = f.inspect_ir("schedule", x, 9.0, target="sm_90a")
    assert "call below" in text[text.index("launch over [20]"):]
    assert "g2_kernel" in {p.work.name for p in f.schedule(x, 9.0, target="sm_90a").launches}
