"""Scans whose iterations are launches of the program around them: in one CUDA graph, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loop_programs
import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from loop_programs import nested
from lowering_cases import apart as apart
from tessera.graph import host_loop
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program import graph_limits, placed_graphs
from tessera.runtime.recordings import is_recording
from tessera.tensor import Tensor
from tessera.tile.launch import machine_code

T, B, D = 6, 3, 8


@pytest.fixture
def short(monkeypatch):
    """Every scan is too long to be written out."""
    monkeypatch.setattr(host_loop, "LONG", 0)


pytestmark = pytest.mark.usefixtures("gpu", "apart", "short")


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return ts.tensor((0.4 * rng.standard_normal(shape)).astype(np.float32))


def gru(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """States, as h, y <- f(h, x) with y = h."""
    def step(h: Tensor, g: Tensor) -> Any:
        (gr, gn), (ur, un) = ts.split(g, 2, -1), ts.split(h @ w, 2, -1)
        z = ts.sigmoid(gr + ur)
        h = (1 - z) * ts.tanh(gn + z * un) + z * h
        return h, h

    return ts.scan(step, h, xs)


def trained(driver: Any, batches: list[Tensor], donate: tuple[str, ...]) -> Any:
    """The bytes of parameters and losses of a run, and by call how many kernels and graphs were
    launched."""
    def loss(p: Any, h: Tensor, x: Tensor) -> Tensor:
        return ts.mean(gru(p["w"], h, x @ p["v"])[1] ** 2)

    @ts.jit(donate=donate, target="cuda")
    def step(p: Any, m: Any, h: Tensor, x: Tensor) -> Any:
        value, g = ts.value_and_grad(loss)(p, h, x)
        m = {k: 0.9 * m[k] + g[k] for k in p}
        return {k: p[k] - 0.1 * m[k] for k in p}, m, value

    rng = np.random.default_rng(5)
    p = {"w": normal(rng, D, 2 * D).to("cuda"), "v": normal(rng, 4, 2 * D).to("cuda")}
    m, h = {k: ts.zeros_like(x) for k, x in p.items()}, normal(rng, B, D).to("cuda")
    seen, losses = [], []
    for x in batches:
        before = len(driver.launches), driver.graph_launches
        p, m, value = step(p, m, h, x)
        seen.append((len(driver.launches) - before[0], driver.graph_launches - before[1]))
        losses.append(value.item())
    return [x.array.tobytes() for x in (*p.values(), *m.values())], losses, seen, step


@pytest.mark.parametrize("donate", [(), ("p", "m")])
def test_a_training_step_with_a_loop_is_one_launch(donate, driver, rng, monkeypatch):
    """With the bits of the loop that the host launches, batches at places that change."""
    batches = [normal(rng, T, B, 4).to("cuda") for _ in range(5)]
    with monkeypatch.context() as m:
        m.setattr(graph_limits, "MOST_LAUNCHES", 0)
        want = trained(driver, batches, donate)
        assert want[-1].capture == "off: the host launches the iterations of scan, which are " \
            f"{want[-1].capture.split()[10]} launches, and a graph takes 0"
    driver.late = "kernels"
    got = trained(driver, batches, donate)
    assert got[:2] == want[:2] and not driver.spoilt
    count = got[2][0][0]
    assert count > 4 * T and all(graphs == 1 for _, graphs in got[2][1:])
    assert got[2][-1][0] < count / 4  # what reads the batch is given another place
    assert got[-1].capture == f"on: {count} kernels in one launch"


def deep(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """A loop in a loop; what is stacked is the state before, and after, and a row as it was."""
    def step(c: Any, x: Tensor) -> Any:
        h, before = c
        new = ts.scan(lambda a, _: (ts.tanh(a @ w), None), h + x, None, length=2)[0]
        return (new, h), (h, new, x, before)

    return ts.scan(step, (h, 2.0 * h), xs, reverse=True)


def odd(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """Rows that begin at no whole access; a constant, what never changes, and the number."""
    def step(c: Any, x: Tensor) -> Any:
        a, kept, n = c
        a = ts.tanh(a + x[:, :3])
        return (a, kept, n + 1), (a[:2, 0], kept, w[0], n)

    return ts.scan(step, (h[:, :3], h, ts.tensor(0, "int32")), xs)


def swapped(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """Carries that change places, one of them kept for two iterations."""
    def step(c: Any, x: Tensor) -> Any:
        a, b, old = c
        return (ts.tanh(b @ w), a, b), (old, a)

    return ts.scan(step, (h, 2.0 * h, 3.0 * h), xs)


def drawn(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        return ts.dropout(ts.tanh(h @ w), 0.5) + ts.random.normal(x.shape), x + h

    return ts.scan(step, h, xs)


@ts.kernel
def doubled(x: Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    if i < N:  # noqa: F821
        x[i] = 2.0 * x[i]


def own_kernel(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    kernel = ts.kernel(doubled.fn)

    def step(h: Tensor, x: Tensor) -> Any:
        y = ts.reshape(ts.tanh(h @ w), (B * D,))
        kernel(y)
        return ts.tanh(ts.reshape(y, (B, D)) + x), y

    return ts.scan(step, h, xs)


def gradient(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def loss(w: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        last, states = ts.scan(lambda h, x: (h := ts.tanh(h @ w + x), h), h, xs)
        return ts.sum(last**2) + ts.sum(states**3)

    return ts.grad(loss, (0, 1, 2))(w, h, xs)


LOOPS = [deep, odd, swapped, drawn, own_kernel, gradient]


@pytest.mark.parametrize("f", LOOPS)
def test_loops_of_all_sorts(f, driver, rng, monkeypatch):
    """As on the CPU, and with the bits of the loop that the host launches; as a graph from the
    second call on, with arguments elsewhere at each."""
    w, h = normal(rng, D, D), normal(rng, B, D)
    rows = [normal(rng, T, B, D) for _ in range(4)]

    def run(target: str) -> list[list[np.ndarray]]:
        ts.random.seed(3)
        g = ts.jit(f, target=target)
        there = [x if target == "cpu" else x.to("cuda") for x in (w, h)]
        made = [g(*there, x if target == "cpu" else x.to("cuda")) for x in rows]
        return [[y.numpy() for y in ts.graph.tree.flatten(m)[0]] for m in made]

    with monkeypatch.context() as m:
        m.setattr(graph_limits, "MOST_LAUNCHES", 0)
        want, on_cpu = run("cuda"), run("cpu")
    driver.late, before = "kernels", driver.graph_launches
    got = run("cuda")
    assert driver.graph_launches - before == len(rows) - 1 and not driver.spoilt
    for a, b, c in zip(got, want, on_cpu, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-5)


def test_rows_are_written_where_they_are_stacked(rng):
    """A GRU's states, those before each iteration too, lie in no other memory, and one copy is all
    that is left of them."""
    def f(w: Tensor, h: Tensor, xs: Tensor) -> Any:
        def step(h: Tensor, x: Tensor) -> Any:
            new = ts.tanh(h @ w + x)
            return new, (new, h)

        return ts.scan(step, h, xs)

    given = [x.to("cuda") for x in (normal(rng, D, D), normal(rng, B, D), normal(rng, T, B, D))]
    g = ts.jit(f)
    g(*given)
    (space,) = [e._workspace for e in [g._last.executable]]
    (loop,) = space.loops.values()
    assert not loop.slots and not any(i.copies for i in loop.iterations)
    assert len(loop.ends) == 3  # the last state, the first one, and all others between
    parts = [s.what.part for s in space.timed]
    assert parts.count("copy") == 3 and len(parts) == 3 + T * len(CudaProgram(
        g.graph(*given)).inner[0].runs())


def test_a_sequence_that_lies_elsewhere_at_each_call_is_copied(driver, rng, monkeypatch):
    """To one place, since nearly all launches read of it; then nothing is recorded anew."""
    monkeypatch.setattr(placed_graphs, "LOUD_STEPS", T)
    w, h = normal(rng, D, D).to("cuda"), normal(rng, B, D).to("cuda")
    g = ts.jit(lambda w, h, xs: ts.scan(lambda h, x: (h := ts.tanh(h @ w) * x, h), h, xs)[1])
    kept = [normal(rng, T, B, D).to("cuda") for _ in range(9)]
    counts = []
    for xs in kept:
        before = len(driver.launches)
        y = g(w, h, xs)
        counts.append(len(driver.launches) - before)
        c, want = h.array, []
        for x in xs.array:
            c = np.tanh(c @ w.array) * x
            want.append(c)
        np.testing.assert_allclose(y.array, np.stack(want), rtol=1e-4, atol=1e-5)
    assert not any(counts[-3:]) and driver.graph_launches == len(kept) - 1


def newton(x: Tensor, w: Tensor) -> Any:
    """What is carried passes from one to the other; the condition is of matrices."""
    y, _, n = loop_programs.newton(x)
    return y @ w, n


def swapping(x: Tensor, w: Tensor) -> Any:
    """A bool is carried; two values change places; an iteration knows its number."""
    def step(i: Tensor, c: Any) -> Any:
        a, b, _ = c
        return b, ts.tanh(a @ w) + ts.cast(i, "f32"), ts.sum(b) < 40.0

    def body(c: Any) -> Any:
        n, rest = c
        return n + 1, step(n, rest)

    return ts.while_loop(lambda c: c[1][2], body,
                         (ts.tensor(0, "int64"), (x, x * 2.0, ts.tensor(True))))


def counted(x: Tensor, w: Tensor) -> Any:
    return ts.fori_loop(0, ts.cast(ts.sum(x * 0) + 5, "int64"),
                        lambda i, c: ts.tanh(c @ w) + ts.cast(i, "f32"), x)


def never(x: Tensor, w: Tensor) -> Any:
    return ts.while_loop(lambda c: ts.sum(c[0]) < 0.0, lambda c: (c[1], c[0] @ w), (x, x * 2.0))


@pytest.mark.parametrize("f", [newton, swapping, counted, nested, never])
def test_loops_whose_end_is_data_are_nodes_of_graphs(f, driver, rng, monkeypatch):
    """As on the CPU; nothing is waited for, and nothing launched, from the third call on; kernels
    are compiled before they are recorded."""
    compiled = machine_code.compile_request

    def apart_from_recordings(*given: Any, **more: Any) -> Any:
        assert not is_recording()
        return compiled(*given, **more)

    monkeypatch.setattr(machine_code, "compile_request", apart_from_recordings)
    w = ts.tensor(np.eye(D, dtype=np.float32) * 0.9)
    xs = [ts.tensor(rng.uniform(0.5, 4, (B, D)).astype(np.float32)) for _ in range(4)]
    want = [[y.numpy() for y in ts.graph.tree.flatten(ts.jit(f)(x, w))[0]] for x in xs]
    g, there, at = ts.jit(f), w.to("cuda"), xs[0].to("cuda")
    driver.late = "kernels"
    for i, x in enumerate(xs):
        at[...] = x
        before = driver.waits, len(driver.launches)
        made = g(at, there)
        if i > 1:
            assert (driver.waits, len(driver.launches)) == before
        for y, z in zip(ts.graph.tree.flatten(made)[0], want[i], strict=True):
            np.testing.assert_allclose(y.numpy(), z, rtol=1e-5, atol=1e-6)
        del made, y
    assert driver.graph_launches == len(xs) - 1 and g.capture.startswith("on: ")


def test_a_driver_whose_graphs_have_no_loops(driver, monkeypatch):
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12030))
    g, x, w = ts.jit(newton), ts.ones((B, D)).to("cuda"), ts.ones((D, D)).to("cuda")
    for _ in range(3):
        g(x, w)
    assert driver.graph_launches == 0 and g.capture == (
        "off: the host launches the iterations of while_loop: graphs of this driver have no loops")
    with pytest.raises(ts.UnsupportedTargetError, match="graphs of this driver have no loops"):
        ts.jit(newton, capture_graph=True)(x, w)


@pytest.mark.usefixtures("fresh_config")
def test_what_goes_wrong_in_a_graph_s_loops_is_blamed(driver):
    """At the line inside of the loop, call after call."""
    def rows(x: Tensor) -> Any:
        return ts.scan(lambda c, _: (ts.log(c) + 0.0, ts.sum(c)), x, None, length=4)  # rows

    def last(x: Tensor) -> Tensor:
        return ts.while_loop(lambda c: c[1] < 4, lambda c: (ts.log(c[0]) + 0.0, c[1] + 1),  # last
                             (x, ts.tensor(0, "int32")))[0]

    good, wrong = ts.full((B, D), 20.0).to("cuda"), ts.full((B, D), 3.0).to("cuda")
    with ts.debug.numerics("raise"):
        for f in (rows, last):
            g = ts.jit(f)
            for x in (good, good, wrong, good, wrong):
                if x is good:
                    g(x)
                    continue
                with pytest.raises(ts.NumericsError, match="log: nan in f32") as e:
                    g(x)
                assert f"# {f.__name__}" in e.value.where.text
    assert driver.graph_launches == 2 * 4
