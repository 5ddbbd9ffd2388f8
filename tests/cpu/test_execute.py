"""Compiled graphs: fusion, memory plan and steps give what the ops give one by one."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import tessera as ts
from tessera import config
from tessera.graph import execute
from tessera.graph.cpu import blas
from tessera.graph.cpu.target import CPU
from tessera.graph.execute import Executable
from tessera.graph.expand import expand, expand_control
from tessera.graph.ir import subgraphs, verify
from tessera.graph.jit import JitFunction
from tessera.graph.schedule.fuse import fuse
from tessera.graph.schedule.memory_plan import aligned_bytes, fold_constants, plan_memory
from tessera.graph.schedule.op_ids import id_of, number
from tessera.graph.simplify import PIPELINE, simplify
from tessera.runtime.blas_threads import single_thread
from tessera.tensor import Tensor
from tolerance import assert_close


@pytest.fixture(autouse=True)
def compile_everything():
    """Small groups too: the tests' arrays are small."""
    with config.scope(loop_min_elements=0):
        yield


def graph_of(fn, *args):
    return ts.jit(fn).graph(*args)


def agree(fn, *args, n=1):
    """Compiled and node by node give the same, and every pass leaves a well-formed graph."""
    graph = graph_of(fn, *args)
    arrays = [a.array for a in args]
    expected = execute.interpret(graph, arrays)
    stage = graph
    for step in PIPELINE:
        stage = step(stage)
        verify(stage)
        for got, want in zip(execute.interpret(stage, arrays), expected, strict=True):
            assert_close(got, want, n=n, scale=1.0)
    exe = Executable(graph)
    for _ in range(2):  # the second run reuses the workspace
        for got, want in zip(exe.run(arrays), expected, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            assert_close(got, want, n=n, scale=1.0)
    return exe


def normal(rng, *shape):
    return ts.tensor(rng.normal(size=shape), dtype="f32")


# --- random programs --------------------------------------------------------------------------
UNARY = [ts.exp, ts.tanh, ts.negative, ts.sigmoid, ts.abs, lambda x: x * x, lambda x: x + 1.5]
BINARY = [ts.add, ts.multiply, ts.subtract, ts.maximum, lambda a, b: ts.where(a > b, a, b)]
SHAPES = [(), (5,), (3, 5), (3, 1), (2, 3, 5), (2, 1, 1), (1, 5)]


def bounded(x):
    return ts.tanh(x)


@st.composite
def programs(draw):
    """A list of steps: ('u', op, operand) | ('b', op, a, b) | ('r', kind, operand) | views."""
    n_inputs = draw(st.integers(1, 3))
    shapes = [draw(st.sampled_from(SHAPES)) for _ in range(n_inputs)]
    steps = []
    for i in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from("ubbbrrvsm"))
        a, b = (draw(st.integers(0, n_inputs + i - 1)) for _ in range(2))
        steps.append((kind, draw(st.integers(0, 99)), a, b))
    outs = draw(st.lists(st.integers(0, n_inputs + len(steps) - 1), min_size=1, max_size=3))
    return shapes, steps, outs


def run_program(steps, outs, *xs):
    values = list(xs)
    for kind, pick, a, b in steps:
        values.append(apply_step(kind, pick, values[a], values[b]))
    return [values[o] for o in outs]


def apply_step(kind, pick, x, y):
    if kind == "u":
        return bounded(UNARY[pick % len(UNARY)](x))
    if kind == "b":
        return bounded(BINARY[pick % len(BINARY)](x, y))
    if kind == "r" and x.ndim:
        axis = [None, -1, 0, tuple(range(x.ndim - 1)) or -1][pick % 4]
        reduce = [ts.sum, ts.max, ts.mean][pick % 3]
        return bounded(reduce(x, axis=axis, keepdims=bool(pick % 2)))
    if kind == "v" and x.ndim > 1:
        return [ts.transpose, lambda x: x.reshape(-1), lambda x: x[..., ::-1]][pick % 3](x)
    if kind == "s" and x.ndim:
        return x[..., : max(1, x.shape[-1] // 2)]
    if kind == "m" and x.ndim >= 2:
        return bounded(x @ ts.swapaxes(x, -1, -2))
    return x * 0.5


@given(programs(), st.integers(0, 2**32 - 1))
def test_random_programs_compile_to_what_their_ops_mean(program, seed):
    shapes, steps, outs = program
    rng = np.random.default_rng(seed)
    xs = [ts.tensor(rng.normal(size=s), dtype="f32") for s in shapes]
    with config.scope(loop_min_elements=0):
        try:
            graph = graph_of(lambda *a: run_program(steps, outs, *a), *xs)
        except ts.ShapeError:
            return  # operands that do not broadcast
        arrays = [x.array for x in xs]
        want = execute.interpret(graph, arrays)
        exe = Executable(graph)
        for _ in range(2):
            for a, b in zip(exe.run(arrays), want, strict=True):
                assert_close(a, b, n=256, scale=1.0)


# --- what fuses -------------------------------------------------------------------------------
def loops(exe):
    return [u for u in exe.compiled.units if u.kind == "loop"]


def test_softmax_is_one_loop(rng):
    exe = agree(lambda x: ts.softmax(x), normal(rng, 7, 33), n=33)
    assert len(exe.compiled.units) == 1


@pytest.mark.row("PAR-06")
def test_five_elementwise_ops_are_one_loop(rng):
    exe = agree(lambda x, y: ts.tanh(x * y + 1.0) / 2.0 - x, normal(rng, 4, 9), normal(rng, 9))
    assert len(exe.compiled.units) == 1
    assert len(loops(exe)[0].nodes) == 5


def test_low_precision_rounds_inside_the_loop(rng):
    x = ts.cast(normal(rng, 6, 40), "bf16")
    for dtype in ("bf16", "f16", "fp8_e4m3", "fp8_e5m2", "bf16 @saturate"):
        y = ts.cast(x, dtype)
        exe = agree(lambda a: ts.exp(a) * 3.0 + a, y)
        assert len(exe.compiled.units) == 1
        eager = ts.exp(y) * 3.0 + y
        got = ts.jit(lambda a: ts.exp(a) * 3.0 + a)(y)
        assert got.type == eager.type


def test_gradient_with_row_and_column_sums(rng):
    def loss(x, w, b):
        h = ts.tanh(x @ w + b)
        h = h * ts.rsqrt(ts.mean(h * h, axis=-1, keepdims=True) + 1e-5)
        return ts.mean(ts.square(ts.softmax(h)))

    x, w, b = normal(rng, 8, 5), normal(rng, 5, 12), normal(rng, 12)
    fn = ts.grad(loss, argnums=(0, 1, 2))
    exe = Executable(fn.graph(x, w, b))
    arrays = [t.array for t in (x, w, b)]
    for got, want in zip(exe.run(arrays), execute.interpret(exe.graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)
    assert sum(u.call is not None and u.call.op.name == "matmul" for u in exe.compiled.units) == 3


def test_a_path_through_a_matmul_is_not_swallowed(rng):
    """y = tanh(x); z = y @ y.T; y + sum z: y and the last sum cannot share a loop."""
    x = normal(rng, 6, 6)
    exe = agree(lambda x: ts.tanh(x) + ts.tanh(ts.tanh(x) @ ts.tanh(x).T), x, n=6)
    assert len(loops(exe)) == 2


def test_dropout_bits_in_a_loop_are_philox_by_global_index(rng):
    x = normal(rng, 33, 65)
    key = ts.Tensor(np.array([3, 9], np.uint32), ts.as_type("uint32"))
    exe = agree(lambda x, k: ts.dropout(x, 0.3, key=k) * 2.0, x, key)
    assert len(exe.compiled.units) == 1


def test_strided_inputs_and_outputs(rng):
    x = normal(rng, 4, 6, 8)
    agree(lambda x: (ts.exp(x.transpose((2, 0, 1))), x[:, ::-1, 1::3] + 1.0), x)
    agree(lambda x: ts.tanh(x.transpose((0, 2, 1)).reshape(32, 6)), x)


def test_windows_are_put_together_again(rng):
    """Copies into a short last axis: of a transposed array, and of one that is stretched."""
    agree(lambda x: ts.exp(ts.reshape(ts.transpose(x, (0, 3, 1, 4, 2)), (2, 18, 24))),
          normal(rng, 2, 2, 3, 9, 8))
    agree(lambda x: ts.exp(ts.reshape(ts.broadcast_to(x[..., None], (2, 9, 8, 3)), (2, 9, 24))),
          normal(rng, 2, 9, 8))


def test_non_contiguous_argument_arrays(rng):
    base = rng.normal(size=(6, 8)).astype(np.float32)
    f = ts.jit(lambda x: ts.exp(x) * 2.0)
    want = np.exp(base.T) * 2
    got = f(Tensor(base.T, ts.as_type("f32")))
    assert_close(got.numpy(), want)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,), (1, 1), ()])
def test_empty_and_unit_shapes(shape, rng):
    agree(lambda x: (ts.exp(x) * 2.0, ts.sum(ts.tanh(x))), normal(rng, *shape))


# --- memory -----------------------------------------------------------------------------------
def memory_of(fn, *args):
    known, graph = fold_constants(simplify(graph_of(fn, *args)))
    units = fuse(graph, CPU)
    return plan_memory(graph, units, known, CPU), units


@pytest.mark.row("PAR-08")
def test_a_chain_needs_two_buffers(rng):
    """x -> a -> b -> ... each read once: two live at a time is the optimum."""
    w = normal(rng, 16, 16)

    def chain(x):
        for _ in range(6):
            x = ts.tanh(x) @ w
        return ts.tanh(x) @ w

    plan, units = memory_of(chain, normal(rng, 16, 16))
    one = 16 * 16 * 4
    assert plan.unshared_bytes == 13 * one  # 7 tanh and 6 inner products
    assert plan.arena_bytes == 2 * one


@pytest.mark.row("PAR-08")
def test_a_long_sum_is_taken_in_parts(rng):
    """Of twenty products: one loop would need them all in memory."""
    ws = [normal(rng, 16, 16) for _ in range(20)]

    def total(x, ws):
        y = x
        for w in ws:
            y = y + x @ w
        return y

    x, one = normal(rng, 16, 16), 16 * 16 * 4
    plan, units = memory_of(total, x, ws)
    loops = [u for u in units if u.kind == "loop"]
    assert plan.arena_bytes <= 9 * one and max(len(u.inputs) for u in loops) == 8
    assert_close(ts.jit(total)(x, ws).array, total(x, ws).array, "f32", 16)


def test_live_ranges_do_not_overlap(rng):
    def f(x):
        a, b = ts.tanh(x) @ x, ts.exp(-x) @ x
        c = a @ b
        return ts.softmax(c @ a) @ b + c

    plan, units = memory_of(f, normal(rng, 12, 12))
    spans = []
    for i, unit in enumerate(units):
        for v in unit.outputs:
            if plan.places[v].kind == "arena":
                spans.append((i, plan.last_use[v], plan.places[v].offset, aligned_bytes(v, CPU)))
    assert len(spans) > 3
    for i, (s, e, at, n) in enumerate(spans):
        for s2, e2, at2, n2 in spans[:i]:
            if s <= e2 and s2 <= e:
                assert at + n <= at2 or at2 + n2 <= at


def test_results_are_not_overwritten_by_the_next_call(rng):
    f = ts.jit(lambda x: (ts.exp(x), x.reshape(-1), ts.ones((3,)), x))
    x = normal(rng, 5, 6)
    first = f(x)
    copies = [t.numpy().copy() for t in first]
    f(normal(rng, 5, 6))
    for t, want in zip(first, copies, strict=True):
        np.testing.assert_array_equal(t.numpy(), want)
    assert not any(np.may_share_memory(t.array, x.array) for t in first)


def test_threads_share_an_executable(rng):
    f = ts.jit(lambda x: ts.softmax(ts.tanh(x) @ ts.tanh(x).T))
    xs = [normal(rng, 40, 40) for _ in range(4)]
    want = [f(x).numpy() for x in xs]
    wrong = []

    def work(i):
        for _ in range(20):
            if not np.array_equal(f(xs[i]).numpy(), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_captured_tensors_are_read_at_each_call(rng):
    w = ts.param(rng.normal(size=(3, 3)), dtype="f32")
    f = ts.jit(lambda x: x @ w)
    x = normal(rng, 2, 3)
    f(x)
    w[...] = 2.0
    assert_close(f(x).numpy(), x.numpy() @ np.full((3, 3), 2.0, np.float32), n=3)


# --- simplification ---------------------------------------------------------------------------
def ops_after(fn, *args):
    return [n.op.name for n in simplify(graph_of(fn, *args)).nodes]


def test_identities(rng):
    x = normal(rng, 2, 3)
    assert ops_after(lambda x: ts.negative(ts.negative(x)), x) == []
    assert ops_after(lambda x: x.T.T, x) == []
    assert ops_after(lambda x: x.reshape(3, 2).reshape(6).reshape(2, 3), x) == []
    assert ops_after(lambda x: ts.cast(ts.cast(x, "f64"), "f32"), x) == []
    assert "mul" not in ops_after(lambda x: x * 1.0, x)


def test_one_expansion_opens_held_graphs_first_and_keeps_what_it_does_not_open(rng):
    def inner(x):
        return ts.tanh(x)  # the line of tanh

    def outer(x):
        return ts.softmax(ts.checkpoint(inner)(ts.exp(x)))

    graph = ts.jit(outer).graph(ts.ones((3, 4)))
    held = expand_control(graph)
    assert [n.op.name for n in held.nodes] == ["exp", "tanh", "softmax"]
    assert held.nodes[0] is graph.nodes[0]
    lines = {n.op.name: n.where.line - outer.__code__.co_firstlineno for n in held.nodes}
    assert lines == {"exp": 1, "tanh": -2, "softmax": 1}
    whole = expand(held)
    assert {n.op.name for n in whole.nodes} > {"exp", "tanh", "reduce_max", "div"}
    assert all(n.where == held.nodes[2].where for n in whole.nodes[2:])
    # In a numbered graph, what an op becomes keeps its id.
    ids = [id_of(n) for n in expand(number(graph)).nodes]
    assert ids == ["%1", "%2", *["%3"] * (len(ids) - 2)]


def test_what_must_stay(rng):
    x = normal(rng, 2, 3)
    assert "add" in ops_after(lambda x: x + 0.0, x)  # -0 + 0 is +0
    assert ops_after(lambda x: ts.cast(ts.cast(x, "bf16"), "f32"), x) == ["cast", "cast"]


def test_common_subexpressions_keep_signs_of_zero_and_types_apart(rng):
    x = normal(rng, 2)
    names = ops_after(lambda x: (ts.exp(x) + 1.0, ts.exp(x) * ts.exp(x)), x)
    assert names.count("exp") == 1
    out = ts.jit(lambda x: (x * 0.0, x * -0.0))(ts.tensor([1.0]))
    assert [np.signbit(t.numpy()[0]) for t in out] == [False, True]


def test_dead_code_goes_and_unread_captures_with_it(rng):
    w = ts.param(rng.normal(size=(3,)), dtype="f32")
    graph = simplify(graph_of(lambda x: (ts.exp(x + w), x * 2.0)[1], normal(rng, 3)))
    assert [n.op.name for n in graph.nodes if n.op.name != "constant"] == ["mul"]
    assert not graph.captures


def test_run_time_errors_name_the_line_of_the_op(rng):
    f = ts.jit(lambda t, i: ts.take(t, i, axis=0) * 2.0)
    with pytest.raises(ts.TesseraError) as err:
        f(normal(rng, 3, 2), ts.tensor([0, 7]))
    assert "ts.take(t, i, axis=0)" in str(err.value)


# --- products over our threads ----------------------------------------------------------------
@pytest.mark.parametrize("a, b", [
    ((700, 300), (300, 90)), ((90, 700), (700, 300)), ((6, 2, 80, 64), (6, 2, 64, 90)),
    ((3, 200, 64), (64, 200)), ((1, 200, 64), (5, 64, 200)), ((2, 200, 64), (3, 1, 64, 200)),
])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_cut_into_pieces(a, b, transposed, rng):
    """Every piece is written once, whatever the strides; one and two threads give equal bits."""
    x, y = (rng.normal(size=s).astype(np.float32) for s in (a, b))
    if transposed:
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    want = np.matmul(x.astype(np.float64), y.astype(np.float64))
    results = []
    for threads in (1, 2):
        out = np.full(want.shape, np.nan, np.float32)
        compute = blas.product(x, y, out)
        assert compute is not blas.blocked_matmul
        with config.scope(num_threads=threads), single_thread:
            compute(x, y, out)
        assert_close(out, want, n=a[-1], scale=a[-1] ** 0.5)
        results.append(out)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("a, b", [((5, 1), (1, 7)), ((3, 1, 4, 1), (2, 1, 6)), ((4, 1), (0, 1, 2))])
def test_products_of_one_column_are_rounded_once(a, b, rng):
    x, y = (rng.standard_normal(s).astype(np.float32) for s in (a, b))
    want = np.matmul(x.astype(np.float64), y).astype(np.float32)
    got = blas.multiply(x, y)
    assert got.dtype == np.float32 and np.array_equal(got, want)


def test_blas_threads_are_restored():
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads():
        return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}

    with threadpool_limits(2, "blas"):
        with single_thread, single_thread:
            seen = threads()
        assert seen == {1} and threads() == {2}


@ts.kernel
def interpreted(a: ts.Tensor["M", "K", ts.f32]) -> ts.Tensor["M", "M", ts.f32]:
    rows = ts.tile.load(a[tile_m:tile_m + 120, 0:K])
    return ts.tile.dot(rows, ts.tile.load(a[0:M, 0:K]).T)


@pytest.mark.parametrize("n", [120, 200])  # the larger is cut into pieces
@pytest.mark.parametrize("f", [lambda x: x @ x.T, ts.jit(lambda x: ts.sin(x) @ x), interpreted],
                         ids=["eager", "compiled", "interpreted"])
def test_products_leave_blas_one_thread(f, n, monkeypatch, rng):
    from threadpoolctl import threadpool_info, threadpool_limits

    def spy(*args, **options):
        seen.extend(x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas")
        return matmul(*args, **options)

    seen, matmul = [], np.matmul
    with threadpool_limits(2, "blas"):
        x = normal(rng, n, n)
        f(x)
        monkeypatch.setattr(np, "matmul", spy)
        f(x)
    assert set(seen) == {1}


def test_a_compiled_product_equals_the_eager_one(rng):
    x = normal(rng, 300, 260)
    f = ts.jit(lambda x: ts.tanh(x) @ x.T)
    f(x)
    assert f._last.executable.compiled.multiplies
    want = np.tanh(x.numpy().astype(np.float64)) @ x.numpy().T.astype(np.float64)
    assert_close(f(x).numpy(), want, n=260, scale=16.0)


# --- calls that are like one before --------------------------------------------------------------
@pytest.fixture
def bound(monkeypatch):
    """Counts the calls that look at each parameter."""
    bind, seen = JitFunction.bind, []
    monkeypatch.setattr(JitFunction, "bind", lambda s, *a: seen.append(s.name) or bind(s, *a))
    return seen


def test_arguments_in_containers_are_known_at_once(bound):
    f = ts.jit(lambda p, x: {"y": x * p["w"] + p["list"][0], "w": p["w"]})

    def check(w, b, x):
        made = f({"w": w, "list": [b, (b,)]}, x)
        np.testing.assert_array_equal(made["y"].numpy(), np.asarray(x) * np.asarray(w)
                                      + np.asarray(b))

    w, b, x = (ts.tensor(np.full(3, v, np.float32)) for v in (2, 3, 4))
    for i in range(4):
        check(w, b, x + float(i))
    assert bound == ["<lambda>"]
    bound.clear()
    w[...] = 7.0  # its values are no part of what is known
    check(w, b, x)
    assert not bound
    others = [(ts.tensor(np.ones(1, np.float32)), b, x), (w, b, ts.cast(x, "bf16").astype("f32")),
              (w.numpy(), b, x), (w, 3.0, x), (ts.param(w), b, x)]
    for _ in range(2):
        for arguments in others:
            check(*arguments)
    assert f.specializations == 5
    f({"list": [b, (b,)], "w": w}, x)  # keys in another order
    assert f.specializations == 6
    check(w, b, x)


def test_a_tensor_that_is_a_default():
    two = ts.tensor(np.full(3, 2.0, np.float32))

    @ts.jit
    def f(x, scale=two):
        return x * scale

    x = ts.tensor(np.arange(3, dtype=np.float32))
    for _ in range(3):
        np.testing.assert_array_equal(f(x).numpy(), [0, 2, 4])
        np.testing.assert_array_equal(f(x, x).numpy(), [0, 1, 4])
        two[...] = 2.0


def test_a_captured_tensor_of_a_call_with_containers():
    global captured
    captured = ts.tensor(np.ones(3, np.float32))
    f = ts.jit(lambda p: p["x"] + captured)
    x = ts.tensor(np.zeros(3, np.float32))
    for k in (1.0, 5.0):
        captured = ts.tensor(np.full(3, k, np.float32))
        for _ in range(3):
            np.testing.assert_array_equal(f({"x": x}).numpy(), k)


# --- bodies as compiled loops -----------------------------------------------------------------
def units_of_bodies(graph):
    """What the bodies of a graph's loops run as, the innermost last."""
    found = []
    for node in graph.nodes:
        for held in subgraphs(node):
            run = held.kept["iteration"].compiled
            found += [u.kind for u in run.units] + units_of_bodies(held)
    return found


@pytest.mark.parametrize("length, inner, want", [
    (8, None, {"call"}), (32, None, {"loop"}), (8, 4, {"loop"}), (4, 4, {"call"})])
def test_groups_of_a_body_count_with_its_iterations(length, inner, want):
    """64 elements are compiled from 32 iterations on: 2048 elements, as outside of loops."""
    def step(c, x):
        return ts.tanh(c + x) * 0.5, None

    def outer(c, x):
        return ts.scan(step, c, ts.broadcast_to(x, (inner, *x.shape)))

    f = ts.jit(lambda c, xs: ts.scan(step if inner is None else outer, c, xs)[0])
    c, xs = ts.ones(64), ts.ones((length, 64))
    with config.scope(loop_min_elements=2048):
        got = f(c, xs)
    kinds = units_of_bodies(f.graph(c, xs))
    assert set(kinds[-1:]) == want and kinds.count("loop") <= 1
    for _ in range(length * (inner or 1)):
        c = ts.tanh(c + 1.0) * 0.5
    np.testing.assert_allclose(got.numpy(), c.numpy(), rtol=1e-6)
