"""Groups that do the same to other values: one launch over all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import run as run_emulated
from emulator.memory import GlobalMemory
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import lowered, normal
from lowering_cases import apart as apart
from tessera import config
from tessera.bench.models.gpt2 import SMALL
from tessera.bench.models.record import weights
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.errors import AxisError, GraphError, NumericsError
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.launch_forms import request_of
from tessera.graph.cuda.launch_plan import plan_of
from tessera.graph.cuda.program.result_buffers import may_overwrite
from tessera.graph.schedule import memory_plan
from tessera.graph.schedule.check_memory_plan import verify_plan
from tessera.graph.schedule.groups import FusionGroup, batch_ends
from tessera.runtime.sentinel_words import CLEAN
from tessera.tile.launch.machine_code import emit_request
from tolerance import assert_close

SHAPES = {"a": (96,), "b": (64, 48), "c": (7, 16), "d": (33,), "e": (5, 7, 3), "f": (2048,)}


def launches(made: CudaProgram) -> list[list[str]]:
    """The kinds and sizes of what runs: the names of the groups of each launch."""
    return [[made.plan.steps[i].name for i in run] for run in made.runs()]


# --- what becomes one launch -------------------------------------------------------------------
def test_a_loop_over_arrays_of_all_shapes_is_one_launch(rng):
    xs = {k: normal(rng, *s) for k, s in SHAPES.items()}
    made = lowered(lambda xs: {k: ts.exp(x) * 2.0 for k, x in xs.items()}, xs)
    assert len(launches(made)) == 1
    text = str(made.plan)
    assert "b0 one launch of 6 groups: g0 g1 g2 g3 g4 g5" in text
    (launch,) = plan_of(made).launches
    nbytes = 4 * sum(map(prod, SHAPES.values()))
    assert launch.work.read_bytes == launch.work.written_bytes == nbytes
    for got, x in zip(made.run([x.array for x in xs.values()]), xs.values(), strict=True):
        assert_close(got, np.exp(x.array.astype(np.float64)) * 2.0, "f32")


def test_what_waits_for_another_is_no_part_of_its_launch(rng):
    """Two chains of matmuls: step by step side by side, never one behind the other."""
    def chains(xs, w):
        for _ in range(2):
            xs = [ts.exp(x - ts.max(x, axis=-1, keepdims=True)) @ w for x in xs]
        return xs

    made = lowered(chains, [normal(rng, 24, 32), normal(rng, 24, 32)], normal(rng, 32, 32))
    kinds = [(made.plan.steps[run.start].kind, len(run)) for run in made.runs()]
    assert [k for k in kinds if k[0] == "rows"] == [("rows", 2)] * 2
    assert ("gemm", 2) not in kinds


@pytest.mark.parametrize("other", [
    lambda x: ts.exp(x) * 3.0, lambda x: ts.exp(x) + 2.0,
    lambda x: ts.cast(ts.exp(x) * 2.0, "bf16"), lambda x: ts.exp(x) * x])
def test_another_body_is_another_launch(other, rng):
    a, b = normal(rng, 64), normal(rng, 64)
    assert len(launches(lowered(lambda a, b: (ts.exp(a) * 2.0, other(b)), a, b))) == 2


def test_draws_have_launches_of_their_own(rng):
    xs = [normal(rng, 64, 8), normal(rng, 64, 8)]
    assert len(launches(lowered(lambda xs: [ts.random.dropout(x, 0.5) for x in xs], xs))) == 2


def test_what_picks_rows_in_one_line_is_one_launch(rng):
    """An integer outside is told at that line; another line has a kernel of its own."""
    tables, ids = [normal(rng, 50, 8) for _ in range(3)], ts.tensor(rng.integers(0, 50, 30))

    def pick(tables, ids):
        rows = [t[ids] for t in tables]
        return rows, tables[0][ids + 1]

    assert [len(run) for run in launches(lowered(pick, tables, ids)) if len(run) > 1] == [3]


def test_broadcasts_share_a_launch_where_their_extents_are_the_same(rng):
    xs = [normal(rng, 12, 8), normal(rng, 12, 8), normal(rng, 6, 8)]
    b = normal(rng, 8)
    made = lowered(lambda xs, b: [x * b for x in xs], xs, b)
    assert [len(run) for run in launches(made)] == [2, 1]


def test_values_are_not_all_made_at_once_where_that_takes_memory(rng):
    """Weights that are cast one after another keep the memory of one cast; without the bound on
    it all of them would be cast in front."""
    ws = [ts.zeros((1024, 1024)) for _ in range(8)]

    def run(x, ws):
        for w in ws:
            x = x @ ts.cast(w, "bf16")
        return x

    made = lowered(run, ts.zeros((16, 1024), dtype="bf16"), ws)
    assert made.plan.temporary_bytes < 4.2e6
    casts = [run for run in made.runs() if made.plan.steps[run.start].kind == "loop"]
    assert max(map(len, casts)) < 8


def test_parts_that_are_made_where_they_are_joined_take_no_memory_together(rng):
    """They are in the whole's."""
    xs = [ts.zeros((2048, 1024)) for _ in range(6)]

    def run(xs):
        return ts.sum(ts.concatenate([ts.sum(ts.reshape(x, (2048, 8, 128)), 1) for x in xs]), 0)

    made = lowered(run, xs)
    assert max(map(len, launches(made))) == 6
    assert made.plan.temporary_bytes < 1.2 * 4 * 6 * 2048 * 128


# --- memory ------------------------------------------------------------------------------------
def test_a_batch_runs_at_once_for_the_memory_plan(rng):
    """What one of its groups reads is not where another writes."""
    def both(xs, w):
        return [ts.softmax(ts.sin(x @ w)) @ w for x in xs]

    made = lowered(both, [normal(rng, 32, 32) for _ in range(4)], normal(rng, 32, 32))
    run = next(r for r in made.runs() if len(r) == 4)
    groups = [made.plan.steps[i] for i in run]
    reads = [[made.plan.region(o.name) for o in g.reads] for g in groups]
    writes = [[made.plan.region(o.name) for o in g.writes] for g in groups]
    assert len({(r.block, r.begin) for own in writes for r in own}) == 4
    assert not any(r.meets(w) for i, own in enumerate(reads) for j, others in enumerate(writes)
                   if i != j for r in own for w in others)


def test_the_proof_takes_a_batch_as_one(rng, monkeypatch):
    """A plan that frees memory inside a batch does not pass."""
    graph = ts.jit(lambda xs, w: [ts.cast(ts.softmax(ts.sin(x @ w)), "bf16") @ ts.cast(w, "bf16")
                                  for x in xs]).graph(
        [normal(rng, 32, 32) for _ in range(4)], normal(rng, 32, 32))
    monkeypatch.setattr(memory_plan, "batch_ends", lambda groups: list(range(len(groups))))
    with pytest.raises(GraphError, match="is still read"):
        CudaProgram(graph, "sm_90a")


def test_the_proof_refuses_a_batch_with_a_path_inside(rng):
    made = lowered(lambda x: ts.sum(ts.exp(x), axis=0), normal(rng, 64, 8)).lowered
    groups = list(made.groups)
    for g in groups:
        g.batch = 0
    with pytest.raises(GraphError, match="makes in the same launch"):
        verify_plan(made.graph, groups, made.memory)


def test_ends_of_batches():
    def group(batch):
        made = FusionGroup("loop", (), [])
        made.batch = batch
        return made

    assert batch_ends([group(b) for b in (None, 1, 1, 2, 2, 2, None)]) == [0, 2, 2, 5, 5, 5, 6]


def test_an_argument_that_a_neighbour_reads_is_not_written_over(rng):
    """x -> exp(x), exp(y): where y's result may lie in y, but not in x, which runs beside it."""
    x, y = normal(rng, 64), normal(rng, 64)
    made = lowered(lambda x, y: (ts.exp(x), ts.exp(y)), x, y, donated=(0, 1))
    (a, b), inputs = made.plan.results, made.lowered.inputs
    assert len(launches(made)) == 1
    assert may_overwrite(made, inputs[0], a) and may_overwrite(made, inputs[1], b)
    assert not may_overwrite(made, inputs[0], b) and not may_overwrite(made, inputs[1], a)


# --- on the device -----------------------------------------------------------------------------
def adamw(p: Any, g: Any, m: Any, v: Any, t: int, lr: float, decay: float) -> tuple:
    """In f64, Loshchilov and Hutter 2019, algorithm 2."""
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    change = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return p - lr * (change + decay * p), m, v


@pytest.mark.parametrize("capture", [False, True])
def test_adamw_over_all_parameters_takes_two_launches(capture, gpu, rng, apart):
    """Those that decay and those that do not; beside them what counts the steps."""
    optimizer = ts.optim.AdamW()
    params = {k: ts.param(normal(rng, *s)) for k, s in SHAPES.items()}
    state = optimizer.init(params)

    def update(params, grads, state):
        return optimizer.update(params, grads, state, 1e-2)

    step = ts.jit(update, target="cuda", capture_graph=capture)
    want = {k: (p.array.astype(np.float64), 0.0, 0.0) for k, p in params.items()}
    for t in range(1, 4):
        grads = {k: normal(rng, *s) for k, s in SHAPES.items()}
        before = len(gpu.launched)
        params, state = step(params, grads, state)
        assert t == 1 or len(gpu.launched) - before == 3, gpu.launched[before:]
        for k, (p, m, v) in want.items():
            want[k] = adamw(p, grads[k].array.astype(np.float64), m, v, t, 1e-2,
                            0.1 if len(SHAPES[k]) > 1 else 0.0)
            assert_close(params[k].array, want[k][0], "f32", n=8)
            assert_close(state["v"][k].array, want[k][2], "f32", n=4)


def test_donated_parameters_are_updated_where_they_lie(gpu, rng, apart):
    xs = [ts.to(normal(rng, n), "cuda") for n in (64, 96, 128)]
    want = [x.array.astype(np.float64) for x in xs]
    f = ts.jit(lambda xs: [x * 0.5 + 1.0 for x in xs], donate=0)
    for _ in range(3):
        at = [x.memory.pointer for x in xs]
        xs = f(xs)
        want = [0.5 * w + 1.0 for w in want]
        assert [x.memory.pointer for x in xs] == at
        for x, w in zip(xs, want, strict=True):
            assert_close(x.array, w, "f32", n=4)
    (batch,) = (r for r in gpu.requests if r.batched)
    assert len(batch.shared) == 2


def test_arrays_that_begin_anywhere(gpu, rng, apart):
    """An image for arrays at whole accesses, and one for others."""
    f = ts.jit(lambda xs: [ts.exp(x) for x in xs])
    base = [ts.to(normal(rng, 67), "cuda") for _ in range(2)]
    for begin in (0, 1, 0):
        xs = [ts.to(ts.tensor(x.array[begin:begin + 64]), "cuda") for x in base]
        for x, y in zip(xs, f(xs), strict=True):
            assert_close(y.array, np.exp(x.array.astype(np.float64)), "f32")


def test_an_integer_outside_is_told_by_a_batch(gpu, rng, apart):
    tables = [ts.to(normal(rng, 50, 8), "cuda") for _ in range(3)]
    f = ts.jit(lambda ts_, ids: [t[i] for t, i in zip(ts_, ids, strict=True)])
    drawn = [rng.integers(-50, 50, 30) for _ in tables]
    for bad in (False, True, False):
        ids = [i.copy() for i in drawn]
        ids[1][7] = 50 if bad else 49
        before = len(gpu.launched)
        given = [ts.to(ts.tensor(i), "cuda") for i in ids]
        if bad:
            with pytest.raises(AxisError, match="outside of -50..49") as info:
                [y.array for y in f(tables, given)]
            assert info.value.where.line == f.__wrapped__.__code__.co_firstlineno
            continue
        for t, i, y in zip(tables, ids, f(tables, given), strict=True):
            np.testing.assert_array_equal(y.array, t.array[i])
        assert len(gpu.launched) - before == 1


def test_checked_builds_launch_each_group_alone(gpu, rng, apart):
    xs = [normal(rng, 64), normal(rng, 96)]
    f = ts.jit(lambda xs: [ts.exp(x) for x in xs], target="cuda")
    counts = []
    for debug in (False, True, False):
        with config.scope(debug=debug):
            before = len(gpu.launched)
            f(xs)
            counts.append(len(gpu.launched) - before)
    assert counts == [1, 2, 1]


def test_sentinels_name_the_value_of_the_group_that_made_it(gpu, rng, apart):
    xs = [normal(rng, n) for n in (64, 96, 128)]
    bad = np.abs(xs[1].array) + 1.0
    bad[17] = -1.0
    xs = [ts.tensor(np.abs(x.array) + 1.0) for x in xs]
    with config.scope(numerics="raise"):
        f = ts.jit(lambda a, b, c: (ts.log(a), ts.log(b), ts.log(c)), target="cuda")
        f(*xs)
        with pytest.raises(NumericsError, match="17") as info:
            f(xs[0], ts.tensor(bad), xs[2])
    assert "log" in str(info.value) and "[96]" in str(info.value)


# --- the machine code --------------------------------------------------------------------------
def emulate(made: CudaProgram, run: range, memory: dict[str, np.ndarray],
            watched: bool = False) -> list[np.ndarray]:
    """A batch in emulated instructions, on the arrays of its program; words of sentinels."""
    steps = [made.steps[i] for i in run]
    requests = [request_of(s, made.target) for s in steps]
    divisible = frozenset.intersection(*(r.divisible for r in requests))
    request = replace(requests[0], batched=True, divisible=divisible,
                      watched=requests[0].aligned if watched else frozenset())
    emitted = emit_request(steps[0].shared.function(), request).emitted
    names = [p.name for p in emitted.columns if p.kind == "tensor"]
    arrays = {f"{i} {n}": memory[made.base(b)] for i, s in enumerate(steps)
              for n, (b, _) in zip(names, s.arguments, strict=True)}
    counts = [prod(s.group.grid) for s in steps]
    words = {f"words {i}": np.tile(CLEAN, len(emitted.sites)).view(np.int64)
             for i in range(len(steps))} if watched else {}
    table = np.zeros((1 + len(emitted.columns), len(steps)), np.int64)
    every = arrays | words | {
        "calls": np.repeat(np.arange(len(steps), dtype=np.int32), counts), "table": table}
    at = GlobalMemory(every).pointers
    table[0, 1:] = np.cumsum(counts)[:-1]
    for row, p in enumerate(emitted.columns, 1):
        for i, s in enumerate(steps):
            table[row, i] = {
                "tensor": lambda n=f"{i} {p.name}": at[n],
                "sentinels": lambda i=i: at[f"words {i}"],
                "dim": lambda s=s: prod(s.group.space),
                "axis": lambda s=s, a=p.axis: s.group.grid[a]}[p.kind]()
    run_emulated(emitted, request.lanes, (sum(counts),), every, {"call_count": len(steps)})
    return list(words.values())


@pytest.mark.parametrize("sizes", [(96, 4096, 16), (33, 2050, 1, 7)])
def test_blocks_find_their_group_and_its_arrays(sizes, rng):
    xs = [normal(rng, n) for n in sizes if n > 1]
    made = lowered(lambda xs, s: [ts.cast(x * s + 1.0, "bf16") for x in xs], xs, ts.tensor(3.0))
    (run,) = made.runs()
    memory = made._host_memory([x.array for x in xs] + [np.float32(3.0)])
    emulate(made, run, memory)
    for name, x in zip(made.plan.results, xs, strict=True):
        want = ts.cast(ts.tensor(x.array * np.float32(3.0) + np.float32(1.0)), "bf16")
        assert np.array_equal(memory[name].view(np.uint16), want.array.view(np.uint16))


def test_rows_of_a_grid_of_two_axes(rng):
    xs = [normal(rng, 3, 40, 24) for _ in range(3)]
    made = lowered(lambda xs: [ts.sum(x, axis=1) for x in xs], xs)
    (run,) = made.runs()
    memory = made._host_memory([x.array for x in xs])
    emulate(made, run, memory)
    for name, x in zip(made.plan.results, xs, strict=True):
        got = memory[made.base(name)].reshape(3, 24)
        assert_close(got, x.array.astype(np.float64).sum(1), "f32", n=40)


def test_small_copies_are_one_launch_and_large_ones_are_not(rng):
    xs = [ts.tensor(rng.integers(0, 256, (40, 48)).astype(np.uint8)) for _ in range(3)]
    made = lowered(lambda xs: [ts.transpose(x) for x in xs], xs)
    (run,) = made.runs()
    memory = made._host_memory([x.array for x in xs])
    emulate(made, run, memory)
    for name, x in zip(made.plan.results, xs, strict=True):
        assert np.array_equal(memory[made.base(name)].reshape(48, 40), x.array.T)
    ways = lowered(lambda xs: [ts.transpose(xs[0]), ts.flip(ts.transpose(xs[1]), 0)], xs)
    assert len(ways.runs()) > 1
    large = [ts.zeros((4096, 4096), "uint8")] * 2
    assert len(lowered(lambda x, y: (ts.transpose(x), ts.transpose(y)), *large).runs()) == 2


def test_each_group_counts_in_words_of_its_own(rng):
    xs = [normal(rng, 48) for _ in range(3)]
    xs[1].array.setflags(write=True)
    xs[1].array[5] = np.inf
    made = lowered(lambda xs: [x * 2.0 for x in xs], xs)
    (run,) = made.runs()
    words = emulate(made, run, made._host_memory([x.array for x in xs]), watched=True)
    clean = [bool((w.view(np.uint64).reshape(-1, 4) == CLEAN).all()) for w in words]
    assert clean == [True, False, True]


# --- a training step ---------------------------------------------------------------------------
def test_launches_of_a_step_of_gpt2():
    """Of 12 layers 633 groups were 633 launches; here a small one of 3, with the same ops."""
    model = SMALL.sized(B=2, T=64, layers=3, d=64, heads=2, vocabulary=512)
    params, tokens = tree.map_tree(ts.tensor, weights(model)), ts.zeros((2, 64), dtype="int32")
    made = lowered(training_step(model).fn, params, OPTIMIZER.init(params), tokens, tokens)
    groups, plan = made.plan.groups, plan_of(made)
    optimizer_launches = [x for x in plan.launches if x.work.part == "optimizer"]
    assert len(optimizer_launches) <= 6  # by whether it decays, and what makes the gradient
    casts = [g for g in groups if [s.op for s in g.steps] == ["cast"] and g.kind == "loop"]
    assert max(Counter(g.batch for g in casts).values()) >= 12  # of all weights of layers
    assert len(plan.launches) < 0.65 * len(groups)


def test_each_recorded_graph_reads_tables_of_its_own(gpu, driver, rng, apart):
    """Two sets of places in turn, and then others of which few are new: graphs that are launched
    again find the tables that they were recorded with."""
    f = ts.jit(lambda xs, ys: ([ts.exp(x) * 2.0 for x in xs], [ts.sum(y) for y in ys],
                               [ts.sqrt(y) for y in ys]))
    sizes = (64, 96, 128, 160)
    sets = [[ts.to(ts.tensor(rng.uniform(1, 2, n).astype(np.float32)), "cuda")
             for n in (*sizes, *sizes)] for _ in range(2)]
    for t in range(10):
        if t > 6:  # one array lies elsewhere
            fresh = ts.tensor(rng.uniform(1, 2, sizes[0]).astype(np.float32))
            sets[t % 2][0] = ts.to(fresh, "cuda")
        xs, ys = sets[t % 2][:4], sets[t % 2][4:]
        with ts.config.scope(cuda_graphs=True):
            made, sums, roots = f(xs, ys)
        for x, y in zip(xs, made, strict=True):
            assert_close(y.array, np.exp(x.array.astype(np.float64)) * 2.0, "f32", n=2)
        for x, y, z in zip(ys, sums, roots, strict=True):
            assert_close(y.array, x.array.astype(np.float64).sum(), "f32", n=160)
            assert_close(z.array, np.sqrt(x.array.astype(np.float64)), "f32")
    assert driver.graph_launches >= 7 and driver.node_updates


def test_the_norm_of_many_gradients_is_a_tree_of_sums(rng):
    """64 of one shape: their sums, eights of them, and all; one after another they were nine."""
    gs = [normal(rng, 24) for _ in range(64)]
    made = lowered(ts.optim.global_norm, gs)
    assert len(launches(made)) <= 3
    (norm,) = made.run([g.array for g in gs])
    assert_close(norm, np.sqrt(sum((g.array.astype(np.float64) ** 2).sum() for g in gs)), "f32",
                 n=64 * 24)


def test_parts_of_joined_results_stay_in_order(rng):
    """A part reaches over its end into the next: that of a batch whose other kernels differ was
    written before it."""
    x, b = normal(rng, 2, 5, 3), normal(rng, 2, 4)
    f = lambda x, b: tuple(ts.concatenate([x[:, i], b], -1) for i in (1, 2))  # noqa: E731
    made = lowered(f, x, b)
    assert any(g.batch for g in made.plan.groups)
    for got, i in zip(made.run([x.array, b.array]), (1, 2), strict=True):
        np.testing.assert_array_equal(got, np.concatenate([x.array[:, i], b.array], -1))
