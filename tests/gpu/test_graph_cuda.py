"""Graph functions on the GPU: the same cases as under the interpreter, and their timelines."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from lowering_cases import CASES, arrays, check
from tessera.graph.cuda.program.device import DeviceExecutable
from tolerance import assert_close

require_gpu()


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_computes_what_the_graph_means(name, rng):
    case = CASES[name]
    inputs = arrays(case, rng)
    executable = DeviceExecutable(ts.jit(case.fn).graph(*inputs))
    for _ in range(2):  # the second call runs in the same memory
        check(case, executable.run([x.array for x in inputs]), inputs, fused=True)


@pytest.mark.parametrize("S, causal", [(256, False), (1024, True), (1000, True)])
def test_attention_of_many_queries(S, causal, rng):
    """Blocks of queries are one kernel; f32 scores against f64."""
    from library_cases import attention

    q, k, v = (ts.tensor(rng.standard_normal((2, 4, S, 128)).astype(np.float32), "bf16")
               for _ in range(3))
    f = ts.jit(lambda q, k, v: ts.attention(q, k, v, causal=causal), target="cuda")
    want = attention(*(x.array.astype(np.float64) for x in (q, k, v)), causal=causal)
    assert_close(f(q, k, v).array, want, "bf16", 16)
    assert f.inspect_ir("schedule").count(" attention over") == 1


@pytest.mark.row("PAR-06")
def test_a_chain_of_five_ops_is_one_kernel(rng):
    def chain(x):
        return ts.sqrt(ts.abs(ts.sin(x * 2.0) + 2.0))

    x = ts.tensor(rng.standard_normal((500, 700)).astype(np.float32))
    f = ts.jit(chain, target="cuda")
    f(x)
    with ts.debug.profile() as p:
        got = f(x)
    assert len(p.kernels) == 1
    assert_close(got.array, chain(x).array, "f32", 4)


def test_larger_extents(rng):
    """More groups than the GPU has multiprocessors, and extents that are no multiples of blocks."""
    x, w, b = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
               for s in ((1030, 520), (520, 2050), (2050,)))

    def layer(x, w, b):
        return ts.softmax(ts.gelu(x @ w + b))

    with ts.config.scope(loop_min_elements=10**9):
        want = ts.jit(layer)(x, w, b)
    assert_close(ts.jit(layer, target="cuda")(x, w, b).array, want.array, "bf16", 16)


@pytest.mark.parametrize("numeric", ["f32", "f32 @accum(f32)", "f32 @saturate"])
@pytest.mark.parametrize("capture", [False, True])
def test_released_memory_is_not_read(capture, numeric, rng):
    """Filled with NaN behind its last reader, or not: the same bits; policies change none."""
    x = ts.tensor(rng.standard_normal((192, 192)).astype(np.float32), numeric)

    def run(x):
        a = x @ x
        return ts.tanh(a * 3.0) @ x + ts.softmax(a.T @ a) @ (x * 2.0), a

    found = []
    for poison in (False, True):
        with ts.config.scope(poison=poison):
            f = ts.jit(run, target="cuda", capture_graph=capture)
            found.append([[y.array.copy() for y in f(x)] for _ in range(3)][-1])
    for a, b, want in zip(*found, run(ts.cast(x, "f64")), strict=True):
        assert a.tobytes() == b.tobytes()
        assert_close(a, want.array, "f32", 192**2)


def test_equal_calls_give_equal_bits(rng):
    x, w = (ts.tensor(rng.standard_normal((300, 300)).astype(np.float32)) for _ in range(2))
    f = ts.jit(lambda x, w: ts.softmax(x @ w), target="cuda")
    assert f(x, w).array.tobytes() == f(x, w).array.tobytes()


@pytest.mark.row("PAR-07")
def test_offloaded_activations_leave_the_gpu(rng):
    """The memory that a run allocates; the same bits with and without."""
    layers, shape = 16, (2048, 2048)
    x, w = (ts.tensor(rng.standard_normal(shape).astype(np.float32) / 64, "bf16")
            for _ in range(2))

    def run(wrap):
        def loss(x, w):
            for _ in range(layers):
                x = wrap(lambda v, w: ts.tanh(ts.tanh(v @ w) @ w))(x, w)
            return ts.sum(ts.cast(x, "f32"))

        executable = DeviceExecutable(ts.grad(loss).graph(x, w))
        for _ in range(2):
            (found,) = executable.run([x.array, w.array])
        return executable._workspace.device_bytes, found.tobytes()

    kept, want = run(lambda f: f)
    again, same = run(ts.remat)
    offloaded, also = run(ts.remat(offload=True))
    one = 2 * shape[0] * shape[1]
    assert kept > again + 4 * one and again > offloaded + 4 * one, (kept, again, offloaded)
    assert same == want and also == want


# --- what lies on the GPU ------------------------------------------------------------------------
def mlp(params, x):
    for w, b in params:
        x = ts.tanh(x @ w + b)
    return ts.mean(ts.square(x))


def descend(params, x):
    loss, grads = ts.value_and_grad(mlp)(params, x)
    return [(w - 0.1 * gw, b - 0.1 * gb)
            for (w, b), (gw, gb) in zip(params, grads, strict=True)], loss


def draw_mlp(rng, layers, width):
    return [(ts.tensor(rng.standard_normal((width, width)).astype(np.float32) / width**0.5),
             ts.tensor(rng.standard_normal(width).astype(np.float32)))
            for _ in range(layers)]


@pytest.mark.row("RT-05", "RT-06")
@pytest.mark.parametrize("capture", [False, True])
def test_training_where_the_parameters_lie(capture, rng):
    """Against the CPU, step by step; batches of two sizes; the same bits with and without capture.
    """
    step = ts.jit(descend, target="cuda", capture_graph=capture)
    plain = ts.jit(descend, target="cuda")
    params = there = also = draw_mlp(rng, 3, 96)
    for i in range(6):
        x = ts.tensor(rng.standard_normal((64 if i % 2 else 40, 96)).astype(np.float32))
        params, loss = ts.jit(descend)(params, x)
        there, got = step(there, x)
        also, _ = plain(also, x)
        assert got.device == there[0][0].device == "cuda:0"
        assert_close(got.array, loss.array, "f32", 96)
    for (a, b), (c, d), (e, f) in zip(there, params, also, strict=True):
        assert_close(a.array, c.array, "f32", 400)
        assert_close(b.array, d.array, "f32", 400)
        assert a.array.tobytes() == e.array.tobytes() and b.array.tobytes() == f.array.tobytes()
    assert step.capture.endswith("in one launch") == capture


def test_arrays_of_other_libraries_go_in_and_out(rng):
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x, w = (rng.standard_normal((33, 33)).astype(np.float32) for _ in range(2))
    f = ts.jit(lambda x, w: ts.tanh(x @ w), target="cuda")
    want = np.tanh(x.astype(np.float64) @ w)
    for a, b in ((torch.tensor(x).cuda(), cupy.asarray(w)), (x, torch.tensor(w).cuda())):
        for _ in range(3):
            y = f(a, b)
        assert_close(y.array, want, "f32", 33)
        assert_close(torch.as_tensor(y, device="cuda").cpu().numpy(), want, "f32", 33)
        assert_close(cupy.asarray(y).get(), want, "f32", 33)
    with torch.cuda.stream(torch.cuda.Stream()):  # work of other streams is waited for
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            big = torch.sin(big @ big)
        same = torch.tensor(x).cuda() + 0 * big[:33, :33]
        assert_close(f(same, w).array, want, "f32", 33)


@pytest.mark.alone
def test_call_overhead(rng):
    """Host time of a small step: kernel by kernel, and as one launch; arguments lie there."""
    import time

    from tessera.runtime.device import device

    found = {}
    for capture in (False, True):
        step = ts.jit(descend, target="cuda", capture_graph=capture)
        params, x = draw_mlp(rng, 4, 64), ts.ones((32, 64))
        x = ts.jit(lambda x: x, target="cuda")(x)
        for _ in range(3):
            params, _ = step(params, x)
        times = []
        for _ in range(5):
            device().synchronize()
            start = time.perf_counter()
            for _ in range(50):
                params, _ = step(params, x)
            times.append((time.perf_counter() - start) / 50)
            device().synchronize()
        found[capture] = 1e6 * min(times)
    print("test_call_overhead", {"plain_us": found[False], "captured_us": found[True]})
    assert found[True] < found[False]


@pytest.mark.row("DBG-15")
def test_kernel_timeline(rng):
    """Two groups of a function, after each other on the default stream."""
    x, w = (ts.tensor(rng.standard_normal((1024, 1024)).astype(np.float32), "bf16")
            for _ in range(2))
    f = ts.jit(lambda x, w: ts.softmax(x @ w), target="cuda")
    f(x, w)
    with ts.debug.profile() as p:
        f(x, w)
    trace = json.loads(p.chrome_trace())["traceEvents"]
    events = [e for e in trace if e.get("cat") == "kernel"]
    assert [e["name"][:2] for e in events] == ["g0", "g1"]
    assert all(0 < e["dur"] < 1e4 for e in events)  # microseconds
    first, second = events
    assert first["tid"] == second["tid"] == 0
    assert second["ts"] >= first["ts"] + 0.9 * first["dur"]


@pytest.mark.row("DBG-15")
def test_timeline_of_two_streams():
    torch = pytest.importorskip("torch")

    @ts.kernel
    def double(x: ts.Tensor["n", ts.f32]):
        x[tile_n:tile_n+1024] = 2.0 * ts.tile.load(x[tile_n:tile_n+1024])

    x, y = (torch.ones(1 << 24, device="cuda") for _ in range(2))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    double(x)
    torch.cuda.synchronize()
    with ts.debug.profile() as p:
        for _ in range(2):
            double.launch(x, stream=one)
            double.launch(y, stream=two)
    assert {k.stream for k in p.kernels} == {one.cuda_stream, two.cuda_stream}
    for stream in (one, two):
        a, b = [k for k in p.kernels if k.stream == stream.cuda_stream]
        assert a.start_ns < a.end_ns <= b.start_ns + 2000 and b.start_ns < b.end_ns
    starts = [k.start_ns for k in p.kernels]
    assert starts == sorted(starts)
    assert float(x[0]) == 8.0 and float(y[0]) == 4.0


@pytest.mark.parametrize("shape, axis", [
    ((1_000_000, 10), 0), ((3, 500_000, 40), 1), ((50_000_000,), 0), ((400_000, 4, 5), (0, 2))])
def test_long_sums_keep_the_bound(shape, axis):
    """docs/reference/numerics.md, Sums: equal terms, whose rounding errors all have one sign."""
    x = ts.full(shape, 0.1)
    axes = (axis,) if isinstance(axis, int) else axis
    n = int(np.prod([shape[a] for a in axes]))
    want, u = n * float(np.float32(0.1)), 2.0**-24
    got = np.asarray(ts.jit(lambda x: ts.sum(x, axis), target="cuda")(x).numpy(), np.float64)
    assert np.abs(got - want).max() <= len(axes) * ((512 * u + n * 2.0**-53) * want + u * want)
