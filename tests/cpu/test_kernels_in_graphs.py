"""Kernels under jit, grad, jvp, vmap, scan, checkpoint and on distributed tensors: a call is a node
of the graph, what it returns and what it writes are values."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, bf16, f32, i32, stdlib
from tessera.errors import ArgumentError, GradError, TraceError
from tessera.graph.cuda import CudaProgram, text_of
from tessera.graph.cuda.device import DeviceExecutable
from tessera.graph.op import OPS

tile = ts.tile


@ts.kernel
def cube(x: Tensor["N"], y: Tensor["N"], a: f32 = 1.0):
    t = tile.load(x[tile_n:tile_n + 16])
    y[tile_n:tile_n + 16] = t * t * t * a


@ts.kernel
def cubed(x: Tensor["N"]) -> Tensor["N", f32]:
    t = tile.load(x[tile_n:tile_n + 16])
    return t * t * t


@ts.kernel(axes="mn,mn->mn")
def doubled(x: Tensor["M", "N"], y: Tensor["M", "N"]):
    y[tile_m:tile_m + 4, tile_n:tile_n + 16] = 2.0 * tile.load(
        x[tile_m:tile_m + 4, tile_n:tile_n + 16])


@ts.kernel
def row_sums(x: Tensor["M", "N"], s: Tensor["M"]):
    s[tile_m:tile_m + 4] = tile.row_sum(tile.load(x[tile_m:tile_m + 4, 0:N]))


@ts.kernel
def add_one(x: Tensor["N"]):
    i = tile.linear_id()
    if i < N:
        x[i] += 1.0


@ts.kernel
def dropped(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 16] = tile.dropout(tile.load(x[tile_n:tile_n + 16]), 0.5)


@ts.kernel
def two(x: Tensor["N"], s: Tensor["N"], c: Tensor["N"]):
    t = tile.load(x[tile_n:tile_n + 16])
    s[tile_n:tile_n + 16] = tile.sin(t)
    c[tile_n:tile_n + 16] = tile.cos(t)


@pytest.fixture
def x(rng: np.random.Generator) -> Tensor:
    return ts.tensor(rng.uniform(0.5, 1.5, 20).astype(np.float32))


def written(x, kernel=cube):
    y = ts.zeros(x.shape)
    kernel(x, y)
    return y


def with_rule(kernel):
    """The kernel anew with a rule of its own; the module's have none."""
    return kernel.with_schedule(ts.Schedule(warps=4))


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
    k = with_rule(cube)
    k.defvjp(lambda x, y, a: ((k(x, y, a), y)[1], (x, a)),
             lambda saved, g: (g * 3.0 * saved[0] * saved[0] * saved[1], None))

    def loss(x):
        y = ts.zeros(x.shape)
        k(x * 2.0, y, a=0.5)
        return ts.sum(y * y)

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


def test_without_a_rule_the_error_says_how_to_add_one(x):
    with pytest.raises(GradError, match=r"kernel cube is differentiated in reverse mode"
                                        r"[\s\S]*kernel\(x, y\)[\s\S]*cube.defvjp"):
        ts.grad(lambda x: ts.sum(written(x)))(x)
    with pytest.raises(GradError, match="forward mode"):
        ts.jvp(written, (x,), (x,))
    stopped = ts.grad(lambda x: ts.sum(ts.stop_gradient(written(x)) * x))(x)
    np.testing.assert_allclose(stopped.numpy(), x.numpy().astype(float) ** 3, rtol=1e-6)


# --- transforms ---------------------------------------------------------------------------------
def test_vmap_adds_rows_to_what_has_them(rng):
    xs = rng.standard_normal((3, 2, 5, 7)).astype(np.float32)
    made = ts.vmap(ts.vmap(lambda x: _sums(x)))(ts.tensor(xs))
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


def _sums(x):
    s = ts.zeros(x.shape[:-1])
    row_sums(x, s)
    return s


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

    with pytest.raises(TraceError, match=r"writes into f32\[20\], an argument of lost[\s\S]*"
                                         r"return the tensor"):
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


# --- the library --------------------------------------------------------------------------------
ROUTINE_CASES = [(name, s) for name, r in stdlib.ROUTINES.items() if r.record.ops is not None
                 for s in r.record.samples]


@pytest.mark.parametrize(("name", "s"), ROUTINE_CASES,
                         ids=[f"{n} {s.name}".strip() for n, s in ROUTINE_CASES])
def test_routines_are_nodes_with_the_derivative_of_their_ops(name, s, rng):
    routine = stdlib.ROUTINES[name]
    arguments, options = s.drawn(rng)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    want = routine(*arguments, **options)
    made = ts.jit(lambda *xs: routine(*xs, **options))(*tensors)
    assert made.type == want.type and np.array_equal(made.numpy(), want.numpy())
    if tensors[0].dtype.bits < 16:
        return
    weight = ts.tensor(rng.standard_normal(want.shape).astype(np.float32))

    def loss(f, *xs):
        return ts.sum(ts.cast(f(*xs), f32) * weight)

    moving = tuple(i for i, x in enumerate(tensors) if x.dtype.kind == "float")
    found = ts.grad(lambda *xs: loss(lambda *ys: routine(*ys, **options), *xs), moving)(*tensors)
    ops = ts.grad(lambda *xs: loss(lambda *ys: routine.record.ops(ts, *ys, **options), *xs),
                  moving)(*tensors)
    for a, b in zip(_tuple(found), _tuple(ops), strict=True):
        np.testing.assert_allclose(a.numpy().astype(float), b.numpy().astype(float), rtol=1e-5,
                                   atol=1e-5)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def test_a_routine_in_forward_mode_and_batched(rng):
    x = ts.tensor(rng.standard_normal((3, 4, 10)).astype(np.float32))
    t = ts.tensor(rng.standard_normal((3, 4, 10)).astype(np.float32))
    got = ts.jvp(lambda x: stdlib.stable_softmax(x), (x,), (t,))[1]
    np.testing.assert_allclose(got.numpy(), ts.jvp(ts.softmax, (x,), (t,))[1].numpy(), atol=1e-6)
    rows = ts.vmap(stdlib.stable_softmax)(x)
    np.testing.assert_allclose(rows.numpy(), ts.softmax(x).numpy(), atol=1e-6)


def test_a_routine_that_writes_its_arguments(rng):
    p, g, m, v = (ts.tensor(rng.uniform(0.1, 1, (5, 7)).astype(np.float32)) for _ in range(4))
    before = p.numpy().copy()

    @ts.jit
    def step(p, g, m, v):
        stdlib.fused_adam(p, g, m, v, 3, lr=0.1)
        return p, m, v

    made = step(p, g, m, v)
    assert np.array_equal(p.numpy(), before)
    stdlib.fused_adam(p, g, m, v, 3, lr=0.1)
    for a, b in zip(made, (p, m, v), strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
    with pytest.raises(GradError, match="kernel adam is differentiated"):
        ts.grad(lambda p: ts.sum(step(p, g, m, v)[0]))(p)


# --- ops of the user's --------------------------------------------------------------------------
@pytest.fixture
def ops_of_before():
    """What a test registers goes with it: tables of the docs list every op."""
    before = dict(OPS)
    yield
    for name in OPS.keys() - before.keys():
        del OPS[name]


def test_a_registered_op_binds_to_a_kernel(x, ops_of_before):
    @ts.register_op("my_cube")
    def op(x, *, scale=1.0):
        y = ts.zeros_like(x)
        cube(x, y, scale)
        return y

    op.defvjp(lambda x, scale: (op(x, scale=scale), (x, scale)),
              lambda saved, g: 3.0 * g * saved[0] * saved[0] * saved[1])
    loss = ts.jit(lambda x: ts.sum(op(x, scale=2.0)))
    slope = ts.grad(loss)(x)
    np.testing.assert_allclose(slope.numpy(), 6 * x.numpy().astype(float) ** 2, rtol=1e-6)
    assert np.array_equal(op(x).numpy(), written(x).numpy())
    loss(x)
    text = loss.inspect_ir("graph")
    assert " = my_cube(%0)" in text and "call=cube" in text
    rows = ts.vmap(ts.grad(loss))(ts.stack([x, x]))
    np.testing.assert_allclose(rows.numpy()[1], slope.numpy(), rtol=1e-6)
    with pytest.raises(GradError, match="the rule of my_cube is one for reverse mode"):
        ts.jvp(loss, (x,), (x,))
    with pytest.raises(ArgumentError, match="'my_cube' is registered already"):
        ts.register_op("my_cube")(lambda x: x)
    with pytest.raises(ArgumentError, match="rules are fixed"):
        op.defjvp(lambda p, t: (p, t))


def test_a_registered_op_without_rules_has_those_of_its_body(x, ops_of_before):
    @ts.register_op
    def weighted_sin(x, w):
        return ts.sin(x) * w, x + w

    def f(x):
        a, b = weighted_sin(x, 3.0)
        return ts.sum(a * b)

    t = x.numpy().astype(np.float64)
    want = 3 * np.cos(t) * (t + 3) + 3 * np.sin(t)
    np.testing.assert_allclose(ts.grad(f)(x).numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(ts.jvp(f, (x,), (ts.ones(x.shape),))[1].item(), want.sum(),
                               rtol=1e-5)
    g = ts.jit(f)
    g(x)
    assert " = weighted_sin(" in g.inspect_ir("graph")


def test_both_rules_of_a_kernel(x):
    k = with_rule(cubed)
    k.defvjp(lambda x: (k(x), x), lambda x, g: g * 3.0 * x * x)
    k.defjvp(lambda primals, tangents: (k(*primals), 3.0 * primals[0] * primals[0] * tangents[0]))
    want = 3 * x.numpy().astype(np.float64) ** 2
    np.testing.assert_allclose(ts.grad(lambda x: ts.sum(k(x)))(x).numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(ts.jvp(lambda x: k(x), (x,), (ts.ones(x.shape),))[1].numpy(), want,
                               rtol=1e-6)


# --- on a GPU -------------------------------------------------------------------------------------
@ts.kernel
def patch(x: Tensor["N"], y: Tensor["N"]):
    i = tile.linear_id()
    if i < N // 2:
        y[i] += x[i]


def scaled_row_sums(x):
    m = ts.reshape(x, (4, 5)) * 2.0
    return _sums(m) + 1.0


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
    k = with_rule(cube)
    k.defvjp(lambda x, y, a: ((k(x, y, a), y)[1], (x, a)),
             lambda saved, g: (g * 3.0 * saved[0] * saved[0] * saved[1], None))

    def loss(x):
        y = ts.zeros(x.shape)
        k(x * 2.0, y, a=0.5)
        return ts.sum(y * y)

    return ts.grad(loss)(x)


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
    assert "test_kernels_in_graphs.py" in group
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
