"""Who owns which buffer: plans are proved, released memory is NaN, results are the caller's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import GraphError
from tessera.graph.cpu.compiled import CompiledGraph
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.execute import Executable
from tessera.graph.interpret import own_memory
from tessera.graph.ir import Graph
from tessera.graph.op import FRESH, OPS, VIEW
from tessera.graph.schedule import memory_plan as planning
from tessera.graph.schedule import offload
from tessera.graph.schedule.check_memory_plan import verify_plan
from tessera.graph.simplify import simplify
from tolerance import assert_close

POLICIES = ["f32 @accum(f32)", 'f32 @rounding("toward_zero")', "f32 @stochastic_round",
            "f32 @saturate"]


def graph_of(fn: Any, *xs: Any) -> Graph:
    return ts.jit(fn).graph(*xs)


def compiled(fn: Any, *xs: Any) -> CompiledGraph:
    return CompiledGraph(simplify(graph_of(fn, *xs)))


def products(x: Any) -> Any:
    """The first product is read after the second operand has been made."""
    return x @ x, (x * 3.0) @ x, ts.sum((x * 2.0) @ (x @ x))


# --- casts between policies of one storage ----------------------------------------------------
@pytest.mark.parametrize("numeric", POLICIES)
@pytest.mark.parametrize("least", [0, 10**9])
def test_a_policy_changes_no_result(numeric: str, least: int, rng: np.random.Generator) -> None:
    """Compiled, node by node and differentiated: what plain f32 gives."""
    x = rng.integers(-3, 4, (4, 4)).astype(np.float32)  # sums are exact

    def loss(x: Any) -> Any:
        a = x @ x
        return ts.sum(a * a) + ts.sum((x * 3.0) @ a @ x)

    plain, mine = ts.tensor(x), ts.tensor(x, numeric)
    with ts.config.scope(loop_min_elements=least):
        for got, want in zip(ts.jit(products)(mine), products(plain), strict=True):
            np.testing.assert_array_equal(got.array, want.array)
        np.testing.assert_array_equal(ts.grad(loss)(mine).array, ts.grad(loss)(plain).array)
        assert [y.type for y in ts.jit(products)(mine)[:2]] == [ts.as_type(numeric)] * 2


@pytest.mark.parametrize("numeric", POLICIES)
def test_a_policy_changes_no_result_on_a_gpu(numeric: str, gpu: Any, apart: Any,
                                             rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (20, 20)).astype(np.float32), numeric)  # sums are exact
    f = ts.jit(products, target="cuda")
    for got, want in zip(f(x), products(ts.tensor(x.array)), strict=True):
        np.testing.assert_array_equal(got.array, want.array)


@pytest.mark.parametrize("mode", ["off", "flag"])
@pytest.mark.parametrize("fn", [
    lambda v: ts.cast(v, "f32 @saturate"), lambda v: v, lambda v: v.reshape(2, 2).T[0],
    lambda v: ts.cast(v, "f32 @accum(f32)").reshape(-1)])
def test_writing_into_a_result_leaves_the_argument(fn: Any, mode: str) -> None:
    x = ts.ones(4)
    with ts.config.scope(numerics=mode):
        y = ts.jit(fn)(x)
    y[0] = 9.0
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("mode", ["off", "flag"])
@pytest.mark.parametrize("fn", [
    lambda x: ts.broadcast_to(x @ x, (2, 3, 3)), lambda x: ts.diagonal(x @ x),
    lambda x: ts.broadcast_to(ts.sum(x), (4,)), lambda x: ts.broadcast_to(x, (2, 3, 3))])
def test_a_result_is_not_its_own_alias(fn: Any, mode: str) -> None:
    """A view that repeats elements leaves as a whole array, which can be written."""
    with ts.config.scope(numerics=mode):
        y = ts.jit(fn)(ts.ones((3, 3)))
    y[0] = 7.0
    assert float(ts.sum(y == 7.0)) == y.size // y.shape[0]


def test_what_cannot_be_written_says_so() -> None:
    fixed = np.ones(3)
    fixed.setflags(write=False)
    for x in (ts.broadcast_to(ts.ones(3), (2, 3)), ts.Tensor(fixed, ts.as_type("f64"))):
        with pytest.raises(ts.ArgumentError, match="cannot be written") as error:
            x[0] = 2.0
        assert "copy()" in error.value.hint
        y = x.copy()
        y[0] = 2.0


def test_a_cast_is_a_copy_eagerly() -> None:
    x = ts.ones(4)
    y = ts.cast(x, "f32 @saturate")
    y[0] = 9.0
    assert x.tolist() == [1.0] * 4 and ts.cast(x, "f32") is x


def test_results_own_their_memory_each() -> None:
    base = np.arange(6.0)
    first, second, third = own_memory([base[:2], base[4:], np.zeros(2)], [base])
    assert not any(np.shares_memory(a, base) for a in (first, second, third))
    again = own_memory([base[:2], base[:2]], [])
    assert np.shares_memory(again[0], base) and not np.shares_memory(*again)


# --- donated operands -------------------------------------------------------------------------
def place_of(made: CompiledGraph, name: str) -> Any:
    node = next(u.call for u in made.units if u.call and u.call.op is OPS[name])
    return made.plan.places[node.outputs[0]]


def updated(x: Any, u: Any) -> Any:
    return ts.dynamic_update_slice(x @ x, u, (1, 2))


@pytest.mark.parametrize(("fn", "over"), [
    (lambda x, u: ts.tanh(updated(x, u)) @ x, True),
    (updated, True),  # the product lies in the result's memory at once
    (lambda x, u: ts.dynamic_update_slice(x, u, (0, 0)) @ x, False),  # the caller's
    (lambda x, u: (updated(x, u), x @ x), False),  # the product is a result too
    (lambda x, u: (updated(x, u) @ x, (x @ x).T @ x), False),  # read afterwards, by a view
    (lambda x, u: ts.dynamic_update_slice(x @ x, (x @ x)[:2, :2], (1, 2)) @ x, False),
])
def test_what_nothing_reads_again_is_written_over(fn: Any, over: bool,
                                                  rng: np.random.Generator) -> None:
    x, u = ts.tensor(rng.standard_normal((6, 6))), ts.tensor(rng.standard_normal((2, 3)))
    with ts.config.scope(loop_min_elements=0):
        made = compiled(fn, x, u)
        assert (place_of(made, "dynamic_update_slice").kind == "view") == over
        want = fn(x, u)
        for _ in range(2):
            got = made.run([x.array, u.array])
            for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
                assert_close(a, b.array, n=6)


# --- plans are proved -------------------------------------------------------------------------
def chain(x: Any) -> Any:
    a = x @ x
    b = ts.tanh(a) @ x
    return ts.tanh(b.T @ a) @ x + a


@pytest.fixture
def plan(rng: np.random.Generator) -> Any:
    """(graph, units, plan) of a chain whose memory is reused."""
    with ts.config.scope(loop_min_elements=0):
        made = compiled(chain, ts.tensor(rng.standard_normal((8, 8))))
    verify_plan(made.graph, made.units, made.plan)
    return made.graph, made.units, made.plan


def arena(plan: Any, kind: str = "arena") -> list[Any]:
    return [v for v, p in plan[2].places.items() if p.kind == kind]


def test_overlapping_memory_is_found(plan: Any) -> None:
    for v in arena(plan):
        plan[2].places[v].offset = 0
    with pytest.raises(GraphError, match="still read.*\n.*test_ownership.py"):
        verify_plan(*plan)


def test_early_release_is_found(plan: Any) -> None:
    released = plan[2].released
    last = max(released)
    released[0] = released.pop(last)
    with pytest.raises(GraphError, match="reads it later"):
        verify_plan(*plan)


def test_a_view_without_its_operand_is_found(plan: Any) -> None:
    view = arena(plan, "view")[0]
    plan[2].places[view].root = plan[0].inputs[0]
    with pytest.raises(GraphError, match="transpose .* lies in the memory of its operand 0"):
        verify_plan(*plan)


def test_a_new_buffer_called_a_view_is_found(plan: Any) -> None:
    v = arena(plan)[0]
    plan[2].places[v] = planning.ValueStorage("view", plan[0].inputs[0])
    with pytest.raises(GraphError, match="makes a new buffer"):
        verify_plan(*plan)


def test_results_in_shared_memory_are_found(rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal((4, 4)))
    for fn in (lambda x: x.T, lambda x: ((x @ x), (x @ x).T)):
        made = compiled(fn, x)
        made.plan.copied = [False] * len(made.plan.copied)
        with pytest.raises(GraphError, match="would leave in"):
            verify_plan(made.graph, made.units, made.plan)


def test_reading_what_was_written_over_is_found(rng: np.random.Generator) -> None:
    def fn(x: Any, u: Any) -> Any:
        a = x @ x
        return ts.dynamic_update_slice(a, u, (1, 2)) @ x + a.T

    x, u = ts.tensor(rng.standard_normal((6, 6))), ts.tensor(rng.standard_normal((2, 3)))
    made = compiled(fn, x, u)
    node = next(u.call for u in made.units if u.call and u.call.op is OPS["dynamic_update_slice"])
    root = made.plan.places[node.inputs[0]].root
    made.plan.places[node.outputs[0]] = planning.ValueStorage("view", root)
    with pytest.raises(GraphError, match="written over"):
        verify_plan(made.graph, made.units, made.plan)


def test_released_memory_is_poisoned(monkeypatch: Any, rng: np.random.Generator) -> None:
    """A record that is wrong, which the proof believes, shows in the values."""
    x = ts.tensor(rng.standard_normal((8, 8)).astype(np.float32))
    graph = graph_of(lambda x: (x @ x, (x * 3.0)[1:5] @ x), x)
    want = (x.array @ x.array, (x.array * 3)[1:5] @ x.array)
    for memory, right in ((OPS["slice"].memory, True), (FRESH, False)):
        monkeypatch.setitem(OPS["slice"].__dict__, "memory", memory)
        with ts.config.scope(loop_min_elements=1):
            got = Executable(graph).run([x.array])
        assert all(np.allclose(a, b, 1e-5) for a, b in zip(got, want, strict=True)) == right


def test_an_unwritten_result_is_poisoned() -> None:
    made = compiled(lambda x: x @ x, ts.ones((3, 3)))
    made.steps = []
    assert np.isnan(made.run([np.ones((3, 3), np.float32)])[0]).all()


def test_the_view_of_a_record_is_that_of_its_operand() -> None:
    """Only an op that computes nothing is a view whatever its attributes."""
    for op in OPS.values():
        if op.memory is VIEW:
            assert not op.multi and not op.out and op.loop is None


# --- plans of kernels -------------------------------------------------------------------------
@pytest.fixture
def device_plan(rng: np.random.Generator) -> Any:
    """(graph, groups, plan) of kernels whose memory is reused."""
    x = ts.tensor(rng.standard_normal((32, 32)).astype(np.float32))
    made = CudaProgram(graph_of(chain, x)).lowered
    verify_plan(made.graph, made.groups, made.memory)
    return made.graph, made.groups, made.memory


def test_device_plans_are_proved(device_plan: Any) -> None:
    graph, _, plan = device_plan
    places, temporaries = plan.places, arena(device_plan)
    assert len({places[v].offset for v in temporaries}) > 1
    offsets = [places[v].offset for v in temporaries]
    for v in temporaries:
        places[v].offset = 0
    with pytest.raises(GraphError, match="still read.*\n.*test_ownership.py"):
        verify_plan(*device_plan)
    for v, offset in zip(temporaries, offsets, strict=True):
        places[v].offset = offset + 64
    with pytest.raises(GraphError, match="no multiple of 256"):
        verify_plan(*device_plan)
    for v, offset in zip(temporaries, offsets, strict=True):
        places[v].offset = offset
    result = places[graph.outputs[0]]
    result.kind = "arena"
    result.offset = plan.arena_bytes
    with pytest.raises(GraphError, match="result 0 would leave in memory of kind 'arena'"):
        verify_plan(*device_plan)
    result.kind = "input"
    with pytest.raises(GraphError, match="writes input memory"):
        verify_plan(*device_plan)


def test_a_kernel_beside_a_copy_in_its_memory_is_found(monkeypatch: Any,
                                                       rng: np.random.Generator) -> None:
    """A plan that does not wait for copies is refused."""
    x = ts.tensor(rng.standard_normal((128, 128)).astype(np.float32))
    f = ts.remat(lambda x: ts.tanh(ts.tanh(x)), offload=True)
    graph = ts.grad(lambda x: ts.sum(f(x @ x))).graph(x)
    assert CudaProgram(graph).plan.transfers
    monkeypatch.setattr(offload, "waits", lambda steps, region_of: [None] * len(steps))
    with pytest.raises(GraphError, match=r"runs beside x\d, which still copies"):
        CudaProgram(graph)


def test_released_places_are_poisoned(gpu: Any, apart: Any, rng: np.random.Generator) -> None:
    """What is released too early is NaN for the kernel that reads it."""
    x = ts.tensor(rng.standard_normal((32, 32)).astype(np.float32))
    graph = graph_of(chain, x)
    (got,) = DeviceExecutable(graph).run([x.array])
    assert_close(got, chain(ts.tensor(x.array, "f64")).array, "f32", 10**4)
    early = DeviceExecutable(graph)
    first = next(b for b in early.program.plan.buffers if b.kind == "temporary")
    early.program.lowered.released = {0: [(first.offset, first.nbytes)]}
    assert np.isnan(early.run([x.array])[0]).any()
