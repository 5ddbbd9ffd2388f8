"""Calls of compiled functions as CUDA graphs, with the setting on: recorded at the second call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera import f32
from tessera.runtime.flags import ReportSite, error_flags, register
from tessera.runtime.memory_pools import trim
from tessera.tensor import Tensor

tile = ts.tile


@pytest.fixture
def graphs_on():
    with ts.config.scope(cuda_graphs=True):
        yield


pytestmark = pytest.mark.usefixtures("gpu", "apart", "graphs_on")


def descend(params: Any, state: Any, x: Tensor) -> Any:
    """A step of descent with momentum: parameters and state in and out, and the loss."""
    def loss(params: Any) -> Tensor:
        for w in params["ws"]:
            x_ = ts.tanh((x if w is params["ws"][0] else x_) @ w + params["b"])  # noqa: F821
        return ts.mean(ts.square(x_))

    value, grads = ts.value_and_grad(loss)(params)
    state = {"ws": [0.9 * m + g for m, g in zip(state["ws"], grads["ws"], strict=True)],
             "b": 0.9 * state["b"] + grads["b"]}
    params = {"ws": [w - 0.1 * m for w, m in zip(params["ws"], state["ws"], strict=True)],
              "b": params["b"] - 0.1 * state["b"]}
    return params, state, value


def start(rng: np.random.Generator, n: int = 3) -> Any:
    def to(*shape: int) -> Tensor:
        return normal(rng, *shape).to("cuda")

    return ({"ws": [to(8, 8) for _ in range(n)], "b": to(8)},
            {"ws": [ts.zeros((8, 8)).to("cuda") for _ in range(n)], "b": ts.zeros(8).to("cuda")})


def copied(tree: Any) -> Any:
    return ts.graph.tree.map_tree(lambda x: x.copy(), tree)


def trained(driver: Any, step: Any, params: Any, state: Any, batches: Any) -> Any:
    """Losses and parameters of a run, and by call what was launched: kernels and graphs."""
    losses, seen = [], []
    params, state = copied(params), copied(state)
    for x in batches:
        before = len(driver.launches), driver.graph_launches
        params, state, value = step(params, state, x)
        seen.append((len(driver.launches) - before[0], driver.graph_launches - before[1]))
        losses.append(value.item())
    found = [x.array.tobytes() for x in ts.graph.tree.flatten((params, state))[0]]
    return losses, found, seen


@pytest.mark.parametrize("late", ["", "kernels"])
@pytest.mark.parametrize("donate", [(), ("params", "state")])
@pytest.mark.parametrize("there", [False, True])
def test_a_training_step_is_one_launch(donate, late, there, driver, rng):
    """From some call on, with the same bits: batches on the host, and on the GPU at places that
    change."""
    params, state = start(rng)
    batches = [normal(rng, 4, 8) for _ in range(7)]
    if there:
        batches = [x.to("cuda") for x in batches]
    with ts.config.scope(cuda_graphs=False):
        want = trained(driver, ts.jit(descend, donate=donate, target="cuda"), params, state,
                       batches)
    count = want[2][1][0]
    assert all(seen == (count, 0) for seen in want[2]) and count > 8
    step = ts.jit(descend, donate=donate, target="cuda")
    driver.late = late
    got = trained(driver, step, params, state, batches)
    assert got[:2] == want[:2]
    assert got[2][0] == (count, 0) and all(graphs == 1 for _, graphs in got[2][1:])
    if there:  # only what reads the batch is given another place
        assert 0 < got[2][-1][0] < count / 3
    else:
        assert got[2][-1][0] == 0
    assert step.capture == f"on: {count} kernels in one launch"


def chain(x: Tensor, *ws: Tensor) -> Tensor:
    for w in ws:
        x = ts.tanh(x @ w)
    return x


def test_results_that_are_kept_stay_as_they_are(driver, rng):
    """Each is somebody's: later calls write elsewhere."""
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, xs = ts.jit(chain, target="cuda"), [normal(rng, 8, 8) for _ in range(9)]
    kept = [f(x, *ws) for x in xs]
    assert driver.graph_launches == 8 and driver.node_updates > 0
    for x, y in zip(xs, kept, strict=True):
        np.testing.assert_allclose(y.array, chain(x, *(w.cpu() for w in ws)).array, rtol=1e-5,
                                   atol=1e-6)
    assert len({y.memory.pointer for y in kept}) == 9


def test_results_that_nobody_keeps_lie_where_earlier_ones_lay(driver, rng):
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, x = ts.jit(chain), normal(rng, 8, 8).to("cuda")
    for _ in range(3):
        f(x, *ws)
    launches, allocated = len(driver.launches), len(driver.memory)
    places = {f(x, *ws).memory.pointer for _ in range(5)}
    assert len(places) == 1 and len(driver.memory) == allocated
    assert len(driver.launches) == launches and driver.graph_launches == 7
    held = f(x, *ws)
    view = ts.as_bytes(held)  # of its memory
    want = held.array
    del held
    f(2.0 * x, *ws)
    assert view.array.tobytes() == want.tobytes()


def test_captured_tensors_are_read_at_each_call(driver, rng):
    host, there = normal(rng, 8, 8), normal(rng, 8, 8).to("cuda")
    f = ts.jit(lambda x: ts.tanh(ts.tanh(x @ host) @ there) @ host + there)
    x = normal(rng, 8, 8).to("cuda")
    for i in range(4):
        if i > 1:
            host[i] = 1.0
            there[i] = -1.0
        want = ts.tanh(ts.tanh(x.cpu() @ host) @ there.cpu()) @ host + there.cpu()
        np.testing.assert_allclose(f(x).array, want.array, rtol=1e-5, atol=1e-5)
    assert driver.graph_launches == 3


def test_random_numbers_are_drawn_anew(driver, rng):
    def noisy(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            x = ts.dropout(ts.tanh(x @ w), 0.5)
        return x

    x, ws = normal(rng, 8, 8).to("cuda"), [normal(rng, 8, 8).to("cuda") for _ in range(3)]
    runs = []
    for graphs in (False, True):
        ts.random.seed(7)
        with ts.config.scope(cuda_graphs=graphs):
            f = ts.jit(noisy)
            runs.append([f(x, ws).array.tobytes() for _ in range(5)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 5 and driver.graph_launches == 4


@ts.kernel
def doubled(x: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:  # noqa: F821
        x[i] = 2.0 * x[i]


def test_kernels_of_the_user_are_in_it(driver, rng):
    kernel = ts.kernel(doubled.fn)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = ts.reshape(ts.tanh(x @ w), (64,))
        kernel(y)
        return ts.tanh(ts.reshape(y, (8, 8)) @ w)

    x, w = normal(rng, 8, 8).to("cuda"), normal(rng, 8, 8).to("cuda")
    g = ts.jit(f)
    runs = [g(x, w).array for _ in range(4)]
    assert driver.graph_launches == 3
    for y in runs:
        np.testing.assert_array_equal(y, runs[0])
    want = np.tanh(2 * np.tanh(x.array @ w.array) @ w.array)
    np.testing.assert_allclose(runs[0], want, rtol=1e-5, atol=1e-6)


def test_arrays_of_other_libraries_and_their_streams(driver, rng):
    """What their stream did comes first, what it does next behind the graph."""
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, x = ts.jit(chain), Torch(filled(rng.standard_normal((8, 8)).astype(np.float32)))
    want = chain(ts.tensor(x.x), *(w.cpu() for w in ws))
    recorded = []
    follow = driver.cuStreamWaitEvent
    driver.cuStreamWaitEvent = lambda stream, event, flags: (
        recorded.append((stream, driver.graph_launches)), follow(stream, event, flags))[1]
    for i in range(4):
        recorded.clear()
        np.testing.assert_allclose(f(x, *ws).array, want.array, rtol=1e-5, atol=1e-6)
        assert driver.graph_launches == i
        assert recorded[0] == (0, max(i - 1, 0)) and recorded[-1] == (70, i)


def test_two_programs_in_turn_and_other_extents(driver, rng):
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, g = ts.jit(chain), ts.jit(lambda x, *ws: chain(x, *ws) * 2.0 + x)
    host = [w.cpu() for w in ws]
    for i in range(8):
        x = normal(rng, 3 + i % 2, 8).to("cuda")
        np.testing.assert_allclose(g(f(x, *ws), *ws).array,
                                   g.fn(f.fn(x.cpu(), *host), *host).array, rtol=1e-4, atol=1e-5)
    assert f.specializations == g.specializations == 2 and driver.graph_launches == 2 * 2 * 3


def test_a_cache_that_is_written_over(driver, rng):
    """Donated, in its own memory; else in a copy, and the caller's stays as it is."""
    def put(cache: Tensor, x: Tensor, at: Tensor) -> Any:
        cache = ts.dynamic_update_slice(cache, ts.tanh(x @ x)[:1], (at, 0))
        return cache, ts.tanh(ts.tanh(cache @ x) @ x)

    for donate in ((), ("cache",)):
        driver.graph_launches = 0
        f, cache = ts.jit(put, donate=donate), ts.zeros((6, 8)).to("cuda")
        want = ts.zeros((6, 8))
        for i in range(6):
            x = normal(rng, 8, 8)
            before, was = cache, None if donate else cache.array
            cache, y = f(cache, x.to("cuda"), ts.tensor(np.int32(i)).to("cuda"))
            want, z = put(want, x, ts.tensor(np.int32(i)))
            np.testing.assert_allclose(cache.array, want.array, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(y.array, z.array, rtol=1e-5, atol=1e-5)
            if not donate:
                np.testing.assert_array_equal(before.array, was)
        assert driver.graph_launches > 0


def test_places_that_never_come_again_are_no_graph(driver, rng):
    ws = [normal(rng, 8, 8) for _ in range(4)]
    f, x = ts.jit(chain), normal(rng, 8, 8).to("cuda")
    kept = []  # all weights lie elsewhere each time
    for _ in range(14):
        kept.append([w.to("cuda") for w in ws])
        y = f(x, *kept[-1])
        np.testing.assert_allclose(y.array, chain(x.cpu(), *ws).array, rtol=1e-5, atol=1e-6)
    assert f.capture == "off: its arguments or results lie elsewhere at every call"
    graphs = driver.graph_launches
    f(x, *kept[-1])
    assert 8 <= graphs == driver.graph_launches < 12


def test_memory_is_given_back_when_it_is_short(driver, monkeypatch, rng):
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, x = ts.jit(chain), normal(rng, 8, 8).to("cuda")
    want = [f(x, *ws).array for _ in range(3)][0]
    executable = f._last.executable
    assert executable.captured == "4 kernels"
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.delitem(sys.modules, "torch")
    trim(executable.device)
    assert executable.captured == "" and not executable._workspace.repeated.memory.sets
    for _ in range(3):
        np.testing.assert_array_equal(f(x, *ws).array, want)
    assert executable.captured == "4 kernels"


def test_profiles_and_debug_run_step_by_step(driver, rng):
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, x = ts.jit(chain), normal(rng, 8, 8).to("cuda")
    for _ in range(3):
        f(x, *ws)
    graphs = driver.graph_launches
    driver.cuEventElapsedTime = lambda begin, end: (0, float(end - begin))
    with ts.debug.profile() as p:
        f(x, *ws)
    assert len({r.work.name for r in p.launches.records} - {"poison"}) == 4
    assert driver.graph_launches == graphs
    f(x, *ws)
    assert driver.graph_launches == graphs + 1


@pytest.mark.parametrize("mode", ["flag", "raise"])
def test_sentinels_count_in_graphs(driver, mode, rng):
    """With words of their own: those of a call are looked at behind its graph."""
    ws = [normal(rng, 8, 8).to("cuda") for _ in range(4)]
    f, x = ts.jit(chain), normal(rng, 8, 8).to("cuda")
    for _ in range(3):
        want = f(x, *ws).array
    bad, before = x * float("nan"), driver.graph_launches
    with ts.debug.numerics(mode):
        for i in range(4):
            np.testing.assert_array_equal(f(x, *ws).array, want)
            assert driver.graph_launches == before + i
        if mode == "raise":
            with pytest.raises(ts.NumericsError, match="nan"):
                f(bad, *ws)
        else:
            assert not ts.debug.flags()
            f(bad, *ws)
            assert "nan" in str(ts.debug.flags())
        assert driver.graph_launches > before + 3
        np.testing.assert_array_equal(f(x, *ws).array, want)
    graphs = driver.graph_launches
    f(x, *ws)  # without sentinels again: other kernels
    np.testing.assert_array_equal(f(x, *ws).array, want)
    assert driver.graph_launches == graphs + 1


def test_a_report_of_a_kernel_is_raised_by_the_next_call(gpu, driver, rng):
    def pick(x: Tensor, i: Tensor, w: Tensor) -> Tensor:
        return ts.tanh(ts.take(ts.tanh(x @ w), i) @ w)

    f, x, w = ts.jit(pick), normal(rng, 8, 8).to("cuda"), normal(rng, 8, 8).to("cuda")
    good = ts.tensor(np.array([1, 2], np.int32)).to("cuda")
    for _ in range(3):
        want = f(x, good, w).array
    words = error_flags(0).words
    key = register("pick", [ReportSite(None, "an index is outside")])
    words[0], words[1] = 1, key  # as a kernel does
    with pytest.raises(ts.DeviceError, match="an index is outside"):
        f(x, good, w)
    np.testing.assert_array_equal(f(x, good, w).array, want)


@pytest.mark.parametrize(("fn", "why"), [
    (lambda x: ts.debug.print("{}", ts.tanh(x @ x)[0, 0]) or ts.tanh(ts.tanh(x @ x) @ x),
     "print runs on the host"),
    (lambda x: ts.while_loop(lambda c: ts.sum(ts.abs(c)) > 1.0, lambda c: 0.1 * ts.solve(
        ts.full((6, 6), 1.0) + ts.eye(6), c), ts.tanh(ts.tanh(x @ x) @ x)),
     "the host launches the iterations of while_loop, since solve runs in cuSOLVER"),
    (lambda x: ts.solve(ts.tanh(ts.tanh(x @ x) @ x), x), "solve runs in "),
])
def test_what_is_no_graph_says_why(fn, why, driver, rng):
    f, x = ts.jit(fn), normal(rng, 6, 6).to("cuda")
    for _ in range(3):
        f(x)
    assert driver.graph_launches == 0
    assert f.capture.startswith(f"off: {why}"), f.capture
    assert f"no CUDA graph, because {why}" in f.inspect_ir("schedule")


def test_the_setting_and_few_launches(driver, rng):
    x = normal(rng, 8, 8).to("cuda")
    f = ts.jit(lambda x: ts.tanh(x))
    for _ in range(3):
        f(x)
    assert f.capture == "off: it is one launch" and driver.graph_launches == 0
    ws = [x for _ in range(4)]
    g = ts.jit(chain)
    with ts.config.scope(cuda_graphs=False):
        for _ in range(3):
            g(x, *ws)
        assert g.capture == "off: the setting cuda_graphs" and driver.graph_launches == 0
    assert ts.jit(chain, capture_graph=False).capture == "off"
    assert g.capture == "on: from the second call of a signature"
    g(x, *ws)
    assert driver.graph_launches == 1
