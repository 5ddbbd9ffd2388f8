"""Random numbers of lowered functions: keys from the host at each call, bits from the kernels."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import Tensor
from tessera.graph.cuda import CudaProgram
from tessera.graph.ir import Graph
from tessera.graph.tree import flatten
from tolerance import assert_close

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def drop(x: Tensor) -> Tensor:
    return ts.random.dropout(x, 0.3)


def gradient(x: Tensor) -> Tensor:
    """Its mask is that of the forward pass."""
    return ts.grad(lambda x: ts.sum(ts.square(ts.random.dropout(x, 0.3))))(x)


def recomputed(x: Tensor) -> Tensor:
    """A mask that the backward pass draws again."""
    return ts.grad(lambda x: ts.sum(ts.remat(lambda x: ts.square(ts.random.dropout(x, 0.3)))(x)))(x)


def two(x: Tensor) -> Tensor:
    return drop(x) - drop(x)


def calls(run: Any, count: int = 4) -> list[bytes]:
    """The results of calls from one state on; the state is that behind them afterwards."""
    ts.random.seed(7)
    return [np.asarray(run()).tobytes() for _ in range(count)]


def test_rows_that_the_grid_counts_draw_their_own_words():
    """A row of three began at a word that is no multiple of four, and took those of the run that
    it lies in."""
    m, key = ts.tensor([0.5, -1.0, 2.0], "f32"), ts.random.key(3)
    f = ts.jit(lambda m, key: ts.random.uniform((4, 3), m, m + 1.0, key=key))
    (got,) = CudaProgram(f.graph(m, key)).run([m.array, key.array])
    assert np.array_equal(got, f(m, key).numpy())


@pytest.mark.parametrize("fn", [drop, gradient, recomputed, two])
def test_calls_draw_what_the_cpu_draws(fn, rng):
    """Bit for bit, loops of the CPU included; each call draws anew, and takes one step."""
    x = ts.tensor(rng.standard_normal((7, 35)).astype(np.float32))
    made, f = CudaProgram(ts.jit(fn).graph(x)), ts.jit(fn)
    got = calls(lambda: made.run([x.array])[0])
    assert len(set(got)) == 4 and ts.random.get_state() == ts.random.RandomState(7, 4)
    for least in (0, 10**9):
        with ts.config.scope(loop_min_elements=least):
            assert calls(lambda: f(x).array) == got
    assert calls(lambda: made.run([x.array])[0]) == got


@pytest.mark.parametrize("capture", [False, True])
def test_on_a_device_as_on_the_cpu(capture, gpu, apart, driver, rng):
    """A recorded call draws anew each time it is launched."""
    x = ts.tensor(rng.standard_normal((7, 35)).astype(np.float32))
    f = ts.jit(gradient, target="cuda", capture_graph=capture)
    for late in ("", "kernels"):
        driver.late = late
        got = calls(lambda: f(x).array)
        assert got == calls(lambda: ts.jit(gradient)(x).array) and len(set(got)) == 4
    assert driver.graph_launches == (7 if capture else 0)


def test_results_that_nothing_waits_for(gpu, apart, driver, rng):
    """The keys of a call are its own when later calls come before its kernels have run."""
    x = ts.tensor(rng.standard_normal((5, 9)).astype(np.float32))
    f = ts.jit(drop, target="cuda")
    want = calls(lambda: f(x).array)
    ts.random.seed(7)
    driver.late = "kernels"
    got = [f(x) for _ in range(4)]
    assert [y.array.tobytes() for y in got] == want


@pytest.mark.parametrize("donate", [(), ("x",)])
@pytest.mark.parametrize("graph", [False, True])
def test_one_copy_takes_all_keys_of_many_calls(graph, donate, gpu, apart, driver, monkeypatch, rng):
    """Whoever else takes steps meanwhile, and where a state is set; a graph has one at each."""
    copied: list[int] = []
    copy = driver.cuMemcpyHtoDAsync

    def counted(target: int, source: int, nbytes: int, stream: int) -> tuple:
        copied.append(nbytes)
        return copy(target, source, nbytes, stream)

    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", counted)
    x = rng.standard_normal((5, 9)).astype(np.float32)

    def fn(x: Tensor) -> Tensor:
        y = two(two(x))
        return ts.reshape(ts.sort(ts.sort(y)), (5, 9)) if graph else y

    f, on_cpu = ts.jit(fn, target="cuda", donate=donate), ts.jit(fn)
    made = CudaProgram(on_cpu.graph(ts.tensor(x)))
    assert len([b for b in made.plan.buffers if b.kind == "drawn"]) == 8
    states = [ts.random.RandomState(7, step) for step in (*range(3), *range(500, 540), 2, 10**10)]
    arguments = [ts.tensor(x).to("cuda") for _ in states]
    copied.clear()
    got = []
    for state, y in zip(states, arguments, strict=True):
        ts.random.set_state(state)
        got.append(f(y))
    keys = [n for n in copied if n % (8 * 16) == 0]
    assert max(keys) > min(keys) and f.capture.startswith("off: its" if graph else "off: it is")
    assert len(keys) < 16 if graph else len(keys) == 5  # launched as graphs at first
    for state, y in zip(states, got, strict=True):
        ts.random.set_state(state)
        np.testing.assert_array_equal(y.array, on_cpu(ts.tensor(x)).array)
    del f
    gc.collect()  # memory goes while there is a driver to give it back to


def test_what_is_computed_on_the_host():
    """Keys, and what is folded from them; not the bits."""
    made = CudaProgram(ts.jit(lambda x: x + ts.random.normal((3,))).graph(ts.ones(3)))
    (group,) = made.plan.groups
    assert sorted(r.name for r in group.reads) == ["k0", "k1", "k2", "k3", "v0"]
    assert {n.op.name for n in made.lowered.draws.nodes} == {
        "rng_key", "fold_in", "slice", "reshape"}
    fates = dict(made.plan.fates)
    assert list(fates.values()).count("on the host, at each call") == 2
    assert "k0: uint32[] drawn" in str(made.plan)


def test_a_draw_that_nothing_reads_takes_its_step():
    def f(x):
        ts.random.normal((3,))
        return x * 2.0

    graph = ts.jit(f).graph(ts.ones(3))
    assert "random" in graph.effects
    ts.random.seed(1)
    CudaProgram(graph).run([np.ones(3, np.float32)])
    assert ts.random.get_state().step == 1


def test_keys_are_values(gpu, apart, rng):
    """Given as an argument, and returned."""
    key = ts.tensor(rng.integers(0, 2**32, 2, dtype=np.uint32))
    graph = ts.jit(lambda k: ts.random.uniform((4, 9), key=k)).graph(key)
    (got,) = CudaProgram(graph).run([key.array])
    np.testing.assert_array_equal(got, ts.random.uniform((4, 9), key=key).array)

    def both(x):
        k = ts.random.next_key()
        return ts.random.bernoulli(0.5, (5,), key=k), k, ts.reshape(k, (2, 1)), x

    f, x = ts.jit(both, target="cuda"), ts.ones(2)
    for _ in range(2):
        state = ts.random.get_state()
        there = [y.array.tobytes() for y in f(x)]
        ts.random.set_state(state)
        assert there == [y.array.tobytes() for y in ts.jit(both)(x)]


# --- a step of training ---------------------------------------------------------------------------
def reference(graph: Graph, arrays: list[np.ndarray]) -> list[np.ndarray]:
    from tessera.graph.execute import Executable

    with ts.config.scope(loop_min_elements=10**9):
        return Executable(graph).run(arrays)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_step_of_the_example(rate, rng):
    """Loss and gradients of examples/train.py; then its whole step, with clipping and AdamW."""
    import train
    import transformer

    c = transformer.Config(d=32, layers=1, T=8, B=2, dropout=rate)
    ts.random.seed(3)
    params = transformer.init_params(c)
    tokens, targets = (ts.tensor(rng.integers(0, 256, (2, 8))) for _ in range(2))
    (stage,) = transformer.stages_of(c, rate)
    loss = ts.value_and_grad(lambda p, a, b: transformer.loss_of(stage(p, a), b))
    state = c.optimizer.init(params)
    for f, args in ((ts.jit(loss), (params, tokens, targets)),
                    (train.Model(c).step, (params, state, tokens, targets, 0.1))):
        graph = f.graph(*args)
        arrays = [np.asarray(x.array if isinstance(x, Tensor) else x, v.aval.dtype.numpy)
                  for x, v in zip(flatten(args)[0], graph.inputs, strict=True)]
        made, before = CudaProgram(graph), ts.random.get_state()
        assert {"gather", "segments"} <= {g.kind for g in made.plan.groups}
        got = made.run(arrays)
        ts.random.set_state(before)
        want = reference(graph, arrays)
        if len(args) == 3:
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
        else:  # Adam's first step is the gradient's sign: the loss and the norm, and all finite
            assert_close(np.stack(got[-2:]), np.stack(want[-2:]), "f32", 64)
            assert all(np.isfinite(a).all() for a in got)


@pytest.mark.parametrize("number", [0, 5, -3, 2**40 + 7])
def test_keys_from_numbers_of_the_device(number):
    key = ts.tensor(np.array([123456789, 4000000000], np.uint32))
    data = ts.tensor(np.int64(number))
    made = CudaProgram(ts.jit(lambda k, n: ts.random.fold_in(k, n)).graph(key, data))
    np.testing.assert_array_equal(made.run([key.array, data.array])[0],
                                  ts.random.fold_in(key, data).array)


@pytest.mark.parametrize("fn", [
    lambda k: ts.random.fold_in(k, 5), lambda k: ts.random.random_bits((5,), key=k),
    lambda k: ts.random.split(k, 9)])
def test_keys_of_rows_are_loops(fn, rng):
    """Bit for bit, in as many groups for many rows as for few."""
    programs = []
    for rows in (4, 300):
        keys = ts.tensor(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
        batched = ts.jit(ts.vmap(fn))
        programs.append(CudaProgram(batched.graph(keys)))
        if rows == 4:
            np.testing.assert_array_equal(programs[0].run([keys.array])[0], batched(keys).array)
    assert len({len(p.plan.groups) for p in programs}) == 1


def test_draws_by_a_key_that_is_an_argument():
    key, x = ts.tensor(np.array([7, 9], np.uint32)), ts.ones((5, 3))
    fn = lambda k, x: x + ts.random.normal((5, 3), key=k)  # noqa: E731
    made = CudaProgram(ts.jit(fn).graph(key, x))
    assert_close(made.run([key.array, x.array])[0], fn(key, x).array, "f32")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5, 1), (1, 5)])
def test_a_few_numbers_by_a_key(shape):
    """A key's words are numbers of the group where the space has one element, too: one draw, as a
    chain's acceptance or a time step is, was refused by the kernel that was made of it."""
    def draws(key):
        return (ts.random.uniform(shape, key=key) + ts.cast(key[1], "f32"),
                ts.random.randint(0, 9, shape, key=key), ts.random.bernoulli(0.5, shape, key=key))

    key = ts.random.key(5)
    got = CudaProgram(ts.jit(draws).graph(key)).run([key.array])
    for a, b in zip(got, draws(key), strict=True):
        np.testing.assert_array_equal(a, b.array)


@pytest.mark.parametrize("fn", [
    lambda x: ts.cast(x, "bf16 @stochastic_round"),
    lambda x: ts.exp(ts.cast(ts.cast(x, "bf16 @stochastic_round") * 1.37, "f32"))],
    ids=["a cast", "in a chain"])
def test_types_that_draw_do_so_at_once_on_a_gpu(fn: Any, apart: None, gpu: Any, rng: Any) -> None:
    """What rounds at random takes no key: it was called with one, a TypeError of ours."""
    x = ts.tensor(rng.standard_normal((5, 64)).astype(np.float32))
    drawn = []
    for here in (x, ts.to(x, "cuda")):
        ts.random.seed(4)
        drawn.append([np.asarray(ts.cast(fn(here), "f32")) for _ in range(2)])
    assert np.array_equal(*drawn) and not np.array_equal(*drawn[0])
