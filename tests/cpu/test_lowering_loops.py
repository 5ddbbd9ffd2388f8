"""Loops that are steps on a GPU: while_loop, and scans too long to be written out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from fake_gpu import Copies
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from loop_programs import newton
from lowering_cases import apart as apart
from tessera import Tensor, f32
from tessera.errors import UnsupportedTargetError
from tessera.graph import host_loop
from tessera.graph.cuda import CudaProgram, text_of
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.program.loop_steps import LoopStep
from tessera.graph.expand import split_loops
from tessera.tile.launch.resident import Resident
from tolerance import assert_close


def loops(graph):
    return [s for s in CudaProgram(graph).steps if isinstance(s, LoopStep)]


def flat(y):
    return [z for part in y for z in flat(part)] if isinstance(y, tuple | list) else [y]


def check(f, *xs, rtol=1e-5, count=1):
    """On the CPU; the program under the interpreter; a pretended driver, twice."""
    graph = ts.jit(f).graph(*xs)
    assert len(loops(graph)) == count
    want = [y.numpy() for y in flat(ts.jit(f)(*xs))]
    executable = DeviceExecutable(graph)
    arrays = [x.array for x in xs]
    for got in (CudaProgram(graph).run(arrays), executable.run(arrays), executable.run(arrays)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), b.astype(np.float64), rtol=rtol,
                                       atol=1e-6)


@pytest.fixture
def short(monkeypatch):
    """Every scan is too long to be written out."""
    monkeypatch.setattr(host_loop, "LONG", 0)


def test_a_while_loop(gpu, rng):
    x = ts.tensor(rng.uniform(0.5, 4, 7).astype(np.float32))
    check(newton, x)
    y, _, n = ts.jit(newton)(x)
    np.testing.assert_allclose(y.numpy(), np.sqrt(x.numpy()), rtol=1e-6)
    assert 2 < n.item() < 20


def test_a_while_loop_of_no_iterations(gpu):
    check(lambda x: ts.while_loop(lambda c: ts.sum(c) < 0.0, lambda c: c * 2.0, x), ts.ones(5))


def test_a_while_loop_under_vmap_and_in_forward_mode(gpu, rng):
    def f(x):
        return ts.while_loop(lambda c: ts.sum(c) < 20.0, lambda c: c * 1.5 + x, x)

    rows = ts.tensor(rng.uniform(0.1, 4, (4, 3)).astype(np.float32))
    check(lambda r: ts.vmap(f)(r), rows)
    check(lambda x: ts.jvp(f, (x,), (x * 0 + 1,)), rows[0])


def test_the_schedule_says_who_goes_on():
    graph = ts.jit(newton).graph(ts.ones(7))
    text = text_of("schedule", graph, "sm_90a")
    assert "as long as while_loop goes on, by a node of the CUDA graph; where none is recorded, " \
        "the host reads the condition back before each iteration" in text
    assert "while_loop" in text and "loop_programs.py" in text


def rnn(w, xs, h):
    def step(h, x):
        h = ts.tanh(h @ w + x)
        return h, (h * 2.0, ts.sum(h))

    return ts.scan(step, h, xs)


def inputs(rng, length=6):
    return [ts.tensor((0.3 * rng.standard_normal(s)).astype(np.float32))
            for s in ((5, 5), (length, 3, 5), (3, 5))]


def test_a_long_scan_and_its_gradients(gpu, rng, short, apart):
    w, xs, h = inputs(rng)
    check(rnn, w, xs, h)
    check(lambda w, xs, h: ts.scan(lambda h, x: (h + x @ w, h), h, xs, reverse=True), w, xs, h)

    def loss(w, xs, h):
        last, (rows, sums) = rnn(w, xs, h)
        return ts.sum(last**2) + ts.sum(rows * rows) + ts.sum(sums)

    check(ts.grad(loss, (0, 1, 2)), w, xs, h, rtol=1e-4, count=2)
    check(lambda w, xs, h: ts.jvp(lambda w: loss(w, xs, h), (w,), (w,)), w, xs, h, rtol=1e-4)
    check(lambda w, xs, h: ts.vmap(lambda h: rnn(w, xs, h)[0])(ts.stack([h, 2 * h])), w, xs, h)


def test_maps_and_loops_in_loops(gpu, rng, short, apart):
    w, xs, h = inputs(rng, 4)
    check(lambda xs: ts.map(lambda x: ts.softmax(x) + ts.max(x), xs), xs)
    check(lambda w, xs, h: ts.scan(lambda h, x: (ts.scan(
        lambda c, _: (ts.tanh(c @ w), None), h + x, None, length=3)[0], x[0]), h, xs), w, xs, h)
    check(lambda xs: ts.scan(lambda c, _: (ts.while_loop(
        lambda c: ts.sum(c) < 30.0, lambda c: c * 2.0, c + 1.0) * 0.1, None), xs[0] * 0 + 1,
        None, length=3)[0], xs)


def test_ten_thousand_iterations_are_lowered_at_once(rng):
    xs = ts.ones((10_000, 3))
    graph = ts.jit(lambda xs: ts.scan(lambda c, x: (c * 0.999 + x, ts.sum(c)), ts.zeros(3), xs)
                   ).graph(xs)
    (step,) = loops(graph)
    assert len(step.body.plan.groups) < 5
    assert "10000 iterations of scan" in text_of("schedule", graph, "sm_90a")


def test_iterations_draw_apart(short):
    x = ts.ones((5, 64))
    f = ts.jit(lambda x: ts.scan(lambda c, r: (c, ts.dropout(r, 0.5)), x[0], x)[1])
    ts.random.seed(3)
    want = [f(x).numpy() for _ in range(2)]
    graph = f.graph(x)
    assert len(loops(graph)) == 1
    program = CudaProgram(graph)
    ts.random.seed(3)
    for y in want:
        (got,) = program.run([x.array])
        assert np.array_equal(got, y) and len({r.tobytes() for r in got}) == 5


def test_carries_stay_on_the_gpu(gpu, driver, monkeypatch, rng, short):
    """An iteration copies nothing to or from the host; a condition reads back one byte."""
    w, xs, h = (x.to("cuda") for x in inputs(rng))
    executable = DeviceExecutable(ts.jit(rnn).graph(w, xs, h))
    executable.tensors([w, xs, h])
    copies = Copies(driver, monkeypatch)
    made = executable.tensors([w, xs, h])
    assert all(isinstance(y, Resident) for y in made)
    assert copies.to_device == copies.to_host == 0
    x = ts.ones(7).to("cuda")
    executable = DeviceExecutable(ts.jit(newton).graph(x))
    (*_, n) = executable.tensors([x])
    before = copies.to_host
    (*_, n) = executable.tensors([x])
    assert copies.to_host - before == 1 + n.array.item()


def test_packed_values_in_loops(gpu, short):
    x = ts.cast(ts.reshape(ts.arange(24) % 7, (4, 2, 3)), "int4")
    check(lambda x: ts.scan(lambda c, r: (r, ts.transpose(c)), x[0], x), x)
    with pytest.raises(UnsupportedTargetError, match="scan.* one int4, less than a byte of a row"):
        CudaProgram(ts.jit(lambda x: ts.map(lambda r: r + r, x)).graph(x[0, 0]))


def test_what_goes_wrong_in_an_iteration_is_blamed(fresh_config, gpu, short, apart):
    """Only in the last one, at the line inside of the loop; an infinity that is meant is none."""
    @ts.jit(target="cuda")
    def f(x):
        return ts.scan(lambda c, _: (ts.log(c) + 0.0, ts.sum(c)), x, None, length=4)  # logs

    @ts.jit(target="cuda")
    def running(x):
        return ts.scan(lambda c, r: (ts.maximum(c, r), c), ts.full((3,), -float("inf")), x)

    good, wrong = ts.full((3,), 20.0), ts.full((3,), 3.0)
    with ts.debug.numerics("raise"):
        running(ts.ones((4, 3)))
        f(good)
        for _ in range(2):
            with pytest.raises(ts.NumericsError, match="log: nan in f32") as e:
                f(wrong)
            assert "# logs" in e.value.where.text
            f(good)
    f(wrong)
    assert not ts.debug.flags()


def test_what_cannot_be_captured_says_so(gpu, rng):
    x = ts.ones((7, 7))
    graph = ts.jit(lambda x: ts.while_loop(
        lambda c: ts.sum(c) > 1.0, lambda c: 0.1 * ts.solve(x + ts.eye(7), c), x)).graph(x)
    with pytest.raises(UnsupportedTargetError, match="since solve runs in cuSOLVER: they cannot"):
        DeviceExecutable(graph, capture=True).run([x.array])


def test_matmuls_that_wait_for_nothing_carried_are_those_of_all_iterations(rng):
    """A recurrent network: inputs are multiplied in front of the loop, what is read out behind it,
    gradients of weights are one matmul each. In the loop stays one matmul, forwards and back."""
    T, B, D, H, K = 6, 5, 7, 8, 3
    shapes = (D, H), (H, H), (H,), (H, K), (B, H), (T, B, D), (T, B, K)
    given = [ts.tensor(rng.standard_normal(s).astype(np.float32) * 0.5) for s in shapes]

    def loss(W, U, b, R, h, x, v):
        def step(h, x):
            h = ts.tanh(x @ W + h @ U + b)
            return h, h @ R

        return ts.sum(ts.scan(step, h, x)[1] * v)

    graph = ts.jit(ts.value_and_grad(loss, argnums=(0, 1, 2, 3, 4, 5))).graph(*given)
    loops = [n.op.repeats(**n.attrs).body for n in split_loops(graph).nodes if n.op.repeats]
    assert [sum(bool(n.op.matmul) for n in body.nodes) for body in loops] == [1, 1]
    got = CudaProgram(graph, "sm_90a").run([x.array for x in given])
    W, U, b, R, h, x, v = (np.asarray(t.array, np.float64) for t in given)
    states = [h]
    for t in range(T):
        states.append(np.tanh(x[t] @ W + states[-1] @ U + b))
    dW, dU, db, dR, dx, g = (np.zeros_like(a) for a in (W, U, b, R, x, h))
    for t in reversed(range(T)):
        dR += states[t + 1].T @ v[t]
        a = (g + v[t] @ R.T) * (1 - states[t + 1] ** 2)
        dW, dU, db = dW + x[t].T @ a, dU + states[t].T @ a, db + a.sum(0)
        dx[t], g = a @ W.T, a @ U.T
    total = sum(((states[t + 1] @ R) * v[t]).sum() for t in range(T))
    for y, want in zip(got, (total, dW, dU, db, dR, g, dx), strict=True):
        assert_close(y, want, "f32", n=T * B * H, scale=np.abs(want).max() + 1)


def test_gradients_of_a_gru_in_bf16(rng, short):
    """Three launches of an iteration backwards, two forwards: gates' gradients are made once, in
    two orders, and kept as narrow as what reads them. Answers as of f64."""
    def loss(w, u, b, c, x, v):
        half = [ts.cast(t, "bf16") for t in (w, u, b, c)]

        def step(h, x):
            g, s = x @ half[0] + half[2], h @ half[1] + half[3]
            (gr, gz, gn), (sr, sz, sn) = ts.split(g, 3, -1), ts.split(s, 3, -1)
            z = ts.sigmoid(gz + sz)
            h = (1 - z) * ts.tanh(gn + ts.sigmoid(gr + sr) * sn) + z * h
            return h, h

        first = ts.zeros((x.shape[1], u.shape[0]), "bf16")
        return ts.sum(ts.cast(ts.scan(step, first, ts.cast(x, "bf16"))[1], "f32") * v)

    def shapes(T, B, D):
        return (D, 3 * D), (D, 3 * D), (3 * D,), (3 * D,), (T, B, D), (T, B, D)

    f = ts.jit(ts.grad(loss, (0, 1, 2, 3, 4)))
    large = CudaProgram(f.graph(*(Tensor[*s, f32] for s in shapes(64, 128, 512))), "sm_90a")
    assert [[g.kind for g in p.plan.groups] for p in large.inner] == [
        ["gemm", "loop"], ["loop", "gemm", "loop"]]
    assert all(b.type.dtype.bits == 16 for b in map(
        large.inner[1].plan.buffer, large.inner[1].plan.results[1:]))
    T, B, D = 5, 2, 8
    given = [0.5 * rng.standard_normal(s).astype(np.float32) for s in shapes(T, B, D)]
    program = CudaProgram(f.graph(*map(ts.tensor, given)), "sm_90a")
    assert [len(p.launches) for p in program.inner] == [2, 2]
    for y, want in zip(program.run(given), gru_gradients(*given), strict=True):
        assert_close(y, want, "bf16", n=4 * T, scale=np.abs(want).max())


def gru_gradients(*given):
    """In f64, from operands as bf16 has them."""
    w, u, b, c, x = (a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in given[:5])
    v, (T, B, D) = given[5].astype(np.float64), x.shape

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    h, kept = np.zeros((B, D)), []
    for t in range(T):
        (gr, gz, gn), (sr, sz, sn) = np.split(x[t] @ w + b, 3, -1), np.split(h @ u + c, 3, -1)
        r, z = sigmoid(gr + sr), sigmoid(gz + sz)
        n = np.tanh(gn + r * sn)
        kept.append((h, r, z, n, sn))
        h = (1 - z) * n + z * h
    dw, du, db, dc, dx, dh = *map(np.zeros_like, (w, u, b, c, x)), np.zeros((B, D))
    for t in reversed(range(T)):
        h, r, z, n, sn = kept[t]
        dh = dh + v[t]
        dn = dh * (1 - z) * (1 - n * n)
        dr, dz = dn * sn * r * (1 - r), dh * (h - n) * z * (1 - z)
        g, s = np.concatenate([dr, dz, dn], -1), np.concatenate([dr, dz, dn * r], -1)
        dw, db, du, dc = dw + x[t].T @ g, db + g.sum(0), du + h.T @ s, dc + s.sum(0)
        dx[t], dh = g @ w.T, dh * z + s @ u.T
    return dw, du, db, dc, dx
