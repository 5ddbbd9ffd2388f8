"""Checkpoints on a GPU: less is kept, what is kept may lie on the host, gradients are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import ArgumentError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.ir import Graph
from tessera.graph.schedule.ir import ByteRange, GroupOperand, ScheduledGroup, Transfer, aligned
from tessera.graph.schedule.offload import _starts, waits
from tessera.numerics import as_type
from tessera.runtime.copies import CopyQueue
from tessera.tensor import Tensor
from tessera.tile.ir.schedule import Schedule

LAYERS, WIDTH = 5, 128  # a value of 128 x 128 in f32 takes 64 KiB, the least that is copied
SIZE = 4 * WIDTH * WIDTH


def layer(x: Tensor, w: Tensor) -> Tensor:
    return ts.tanh(ts.tanh(x @ w) @ w)


def network(wrap: Any, layers: int = LAYERS) -> Any:
    def loss(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws[:layers]:
            x = wrap(layer)(x, w)
        return ts.sum(x * x)

    return ts.value_and_grad(loss, argnums=(0, 1))


def arguments(rng: np.random.Generator, layers: int = LAYERS) -> tuple[Tensor, list[Tensor]]:
    x, *ws = (ts.tensor(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8)
              for _ in range(1 + layers))
    return x, ws


def graph_of(wrap: Any, x: Tensor, ws: list[Tensor]) -> Graph:
    return network(wrap, len(ws)).graph(x, ws)


WRAPS: dict[str, Any] = {
    "nothing": lambda f: f,
    "remat": ts.remat,
    "offload": ts.remat(offload=True),
    "offload all": ts.remat(policy="save_everything", offload=True),
}


@pytest.mark.row("PAR-07")
def test_offloading_plans_less_device_memory(rng: np.random.Generator) -> None:
    x, ws = arguments(rng, 12)
    plans = {name: CudaProgram(graph_of(wrap, x, ws)).plan for name, wrap in WRAPS.items()}
    peak = {name: plan.temporary_bytes for name, plan in plans.items()}
    assert peak["offload"] < peak["remat"] < 0.7 * peak["nothing"]
    assert peak["offload"] < 0.5 * peak["remat"] and peak["offload all"] < 0.5 * peak["nothing"]
    assert plans["offload"].host_bytes == 11 * SIZE  # the first layer's input is an argument
    assert not plans["remat"].transfers and not plans["nothing"].transfers


def test_batches_take_no_memory_that_was_offloaded() -> None:
    """What lies on the host is no memory of the GPU, so none that products of several layers, side
    by side in one launch, may take: alone they need 5 values at a time."""
    x = ts.zeros((2048, 2048), "bf16")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(16):
            x = ts.remat(offload=True)(layer)(x, w)
        return ts.sum(ts.cast(x, "f32"))

    plan = CudaProgram(ts.grad(loss).graph(x, x)).plan
    assert plan.temporary_bytes <= 5 * 2 * 2048**2


def test_remat_computes_again_and_saving_everything_does_not(rng: np.random.Generator) -> None:
    x, ws = arguments(rng)
    products = {name: sum(g.kind == "gemm" for g in CudaProgram(graph_of(wrap, x, ws)).plan.groups)
                for name, wrap in WRAPS.items()}
    plain = 2 * LAYERS + 4 * LAYERS  # forward; two for each product backward
    # The layer's result is not needed for its derivative, that of its first product is.
    assert products == {"nothing": plain, "remat": plain + 2 * LAYERS,
                        "offload": plain + 2 * LAYERS, "offload all": plain}


@pytest.mark.row("PAR-07")
@pytest.mark.parametrize("wrap", [n for n in WRAPS if n != "nothing"])
def test_gradients_are_those_without(wrap: str, rng: np.random.Generator) -> None:
    x, ws = arguments(rng)
    arrays = [t.array for t in (x, *ws)]
    want = CudaProgram(graph_of(WRAPS["nothing"], x, ws)).run(arrays)
    got = CudaProgram(graph_of(WRAPS[wrap], x, ws)).run(arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    on_cpu, grads = ts.jit(network(WRAPS[wrap]))(x, ws)
    plain, expected = ts.jit(network(WRAPS["nothing"]))(x, ws)
    assert on_cpu.item() == plain.item()
    for a, b in zip([grads[0], *grads[1]], [expected[0], *expected[1]], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("poison", [False, True])  # to fill memory waits for copies out of it
@pytest.mark.parametrize("late", ["", "copies", "kernels"])
@pytest.mark.parametrize("wrap", ["offload", "offload all"])
def test_copies_and_kernels_wait_for_each_other(
        wrap: str, late: str, poison: bool, gpu: Any, driver: Any, apart: Any,
        rng: np.random.Generator) -> None:
    """On a driver that runs the one or the other only when it must: places are used again while
    copies are on their way."""
    x, ws = arguments(rng)
    graph, arrays = graph_of(WRAPS[wrap], x, ws), [t.array for t in (x, *ws)]
    want = CudaProgram(graph).run(arrays)
    executable = DeviceExecutable(graph)
    driver.late = late
    with ts.config.scope(poison=poison):
        for _ in range(2):
            for a, b in zip(executable.run(arrays), want, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("late", "name"), [("copies", "wait"), ("kernels", "begin")])
def test_a_missing_wait_would_show(late: str, name: str, gpu: Any, driver: Any, apart: Any,
                                   monkeypatch: Any, rng: np.random.Generator) -> None:
    monkeypatch.setattr(CopyQueue, name, lambda *_: None)
    x, ws = arguments(rng)
    graph, arrays = graph_of(WRAPS["offload"], x, ws), [t.array for t in (x, *ws)]
    want = CudaProgram(graph).run(arrays)
    driver.late = late
    with ts.config.scope(poison=False):
        got = DeviceExecutable(graph).run(arrays)
    assert not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_schedule_shows_the_copies(rng: np.random.Generator) -> None:
    x, ws = arguments(rng, 3)
    plan = CudaProgram(graph_of(WRAPS["offload"], x, ws)).plan
    text = str(plan)
    assert [t.kind for t in plan.transfers] == ["offload", "offload", "fetch", "fetch"]
    first = plan.transfers[0]
    assert f"x0 offload {first.source} -> {first.target}  {SIZE} bytes" in text
    assert f"{first.target}: f32[128, 128] host" in text
    assert f"host memory: {2 * aligned(plan.buffer(first.target))} bytes" in text
    where = text.split("x0 offload")[1].split("\n")[0]
    assert "test_offload.py" in where
    assert plan.hash != CudaProgram(graph_of(WRAPS["remat"], x, ws)).plan.hash


def test_what_gains_nothing_stays(rng: np.random.Generator) -> None:
    """Arguments, results, small values, and what another kernel reads as late."""
    def transfers(fn: Any, *shapes: tuple[int, ...]) -> int:
        args = [ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in shapes]
        return len(CudaProgram(ts.jit(fn).graph(*args)).plan.transfers)

    f = ts.remat(lambda x: ts.tanh(ts.tanh(x)), offload=True)
    big, small = (WIDTH, WIDTH), (WIDTH, WIDTH - 1)
    gradient = lambda g: ts.grad(lambda x: ts.sum(g(x)))  # noqa: E731
    assert transfers(gradient(lambda x: f(x @ x)), big) == 2
    assert transfers(gradient(lambda x: f(x)), big) == 0
    assert transfers(gradient(lambda x: f(x @ x.T)), (8, 8)) == 0
    assert transfers(gradient(lambda x: f(ts.exp(x))), small) == 0

    def returned(x: Tensor) -> Any:
        y, pull = ts.vjp(lambda v: f(v @ v), x)
        return y, pull(y)[0], x @ x

    assert transfers(returned, big) == 0  # x @ x is a result
    assert transfers(gradient(lambda x: (lambda y: f(y) * y * y)(x @ x)), big) == 0


def test_a_view_may_leave_for_the_host(gpu: Any, apart: Any, rng: np.random.Generator) -> None:
    """A result that is placed there is copied behind the view, not only behind what it shows."""
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ts.abs(x)
        shown = ts.reshape(ts.broadcast_to(y, (3, 5))[:2], (-1,))
        return ts.cast(shown, 'f32 @device("host")'), y

    x = ts.tensor(rng.standard_normal((1, 5)), "f32")
    placed, y = ts.jit(fn, target="cuda")(x)
    assert placed.offloaded and not y.offloaded
    np.testing.assert_array_equal(placed.array, np.tile(np.abs(x.array), 2)[0])


def test_when_copies_back_begin() -> None:
    """One kernel ahead of the first reader; then as many as fit into the largest."""
    def starts(*copies: tuple[int, int, int]) -> list[tuple[int, int]]:
        given = [SimpleNamespace(at=a, used=u, nbytes=n) for a, u, n in copies]
        return [(c.used, at) for c, at in _starts(given, [0, 8, 16, 18])]  # type: ignore[arg-type]

    assert starts((1, 9, 4)) == [(9, 8)] and starts((1, 5, 4)) == [(5, 5)]
    assert starts((1, 30, 4), (2, 20, 4), (3, 10, 4)) == [(10, 8), (20, 10), (30, 20)]
    assert starts((1, 30, 1), (2, 20, 1), (3, 10, 2)) == [(10, 8), (20, 10), (30, 10)]
    # It has not left when the first is read.
    assert starts((1, 10, 4), (15, 20, 4)) == [(10, 8), (20, 18)]


def test_which_copy_a_kernel_waits_for() -> None:
    f32 = as_type("f32")

    def kernel(reads: str, writes: str) -> ScheduledGroup:
        operands = [tuple(GroupOperand(n, (1,), f32) for n in names) for names in (reads, writes)]
        return ScheduledGroup("g", "loop", (1,), *operands, (), Schedule(), (1,))

    def copy(kind: str, x: str) -> Transfer:
        return Transfer("x", kind, *((x, "h") if kind == "offload" else ("h", x)), 4)

    steps = [kernel("", "a"), copy("offload", "a"), kernel("a", "b"), kernel("b", "a"),
             copy("fetch", "b"), kernel("a", "c"), kernel("b", "a"), kernel("b", "a")]
    apart = waits(steps, lambda name: ByteRange(name, 0, 4))
    assert apart == [None, None, None, 0, None, None, 1, None]
    # Two that overlap in part: what writes the one waits for the copy out of the other.
    spans = {"a": (0, 8), "b": (4, 12), "c": (8, 16), "h": (20, 24)}
    steps = [copy("offload", "a"), kernel("h", "c"), kernel("h", "b"), kernel("b", "a")]
    assert waits(steps, lambda name: ByteRange("x", *spans[name])) == [None, None, 0, None]


def test_offload_is_a_bool() -> None:
    with pytest.raises(ArgumentError, match="offload is True or False, got 'host'"):
        ts.checkpoint(layer, offload="host")
