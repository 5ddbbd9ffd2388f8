"""What a space may set, benches, and what is kept of trials."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from cpu.test_autotune import own_cache as own_cache
from fake_driver import driver as driver
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.runtime import timing
from tessera.tile.tuning.cost_model import CostModel
from tessera.tile.tuning.measure import DeviceBench, FunctionBench, bench_for
from tessera.tile.tuning.trial import Trace, Trial, spearman


# --- benches ----------------------------------------------------------------------------------
def test_only_a_gpu_or_a_function_measures(driver):
    bound = seeds.saxpy.bind((np.zeros(3, np.float32), np.zeros(3, np.float32), 1.0), {})
    assert bench_for(bound, None) is None
    assert isinstance(bench_for(bound, lambda launch, s: 1.0), FunctionBench)
    with config.scope(device="cuda"):  # host arrays, copied for each call
        staged = seeds.saxpy.bind((np.zeros(3, np.float32), np.zeros(3, np.float32), 1.0), {})
        assert staged.place.staged and bench_for(staged, None) is None


class Events:
    """A driver whose events tick: a launch takes what `cost` says. Of the host's time nothing is
    seen while the memory is overwritten, which is that of `hosts`."""

    def __init__(self, cost, hosts=()):
        self.now, self.cost, self.recorded, self.memsets = 0.0, cost, {}, 0
        self.hosts = itertools.chain(hosts, itertools.repeat(0.0))
        self.covered, self.late = 0.0, False

    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0)

    def cuEventCreate(self, flags):
        self.recorded[len(self.recorded)] = None
        return 0, len(self.recorded) - 1

    def cuEventRecord(self, event, stream):
        self.recorded[event] = self.now
        return (0,)

    def cuMemsetD8Async(self, pointer, value, nbytes, stream):
        self.now, self.covered = self.now + 0.05, self.covered + 0.05
        self.memsets += 1
        return (0,)

    def cuEventSynchronize(self, event):
        return (0,)

    def cuEventDestroy(self, event):
        del self.recorded[event]
        return (0,)

    def cuEventElapsedTime(self, begin, end):
        return 0, self.recorded[end] - self.recorded[begin]

    def cuEventQuery(self, event):
        return (0 if self.late else 600,)

    def launch(self):
        host = next(self.hosts)
        self.late = host > self.covered
        self.now += next(self.cost) + max(0.0, host - self.covered)
        self.covered = 0.0


def timer_of(events, monkeypatch):
    monkeypatch.setattr(timing, "driver", lambda: events)
    monkeypatch.setattr(timing, "device", lambda i: SimpleNamespace(l2_bytes=8,
                                                                    current=nullcontext))
    monkeypatch.setattr(timing, "DeviceBuffer", lambda n, on: SimpleNamespace(pointer=1, nbytes=n))
    return timing.EventTimer(0, 0)


def test_event_times_are_the_kernels_and_the_median(monkeypatch):
    costs = iter([9.0, 9.0] + [1.0, 1.0, 7.0] * 100)  # two warm up
    events = Events(costs)
    timer = timer_of(events, monkeypatch)
    got = timer.time(events.launch, 1e-9)
    assert (got.ms, got.repeats, got.least_ms, got.largest_ms) == (1.0, 1, 1.0, 1.0)
    got = timer.time(events.launch, 50.0)
    assert got.ms == 1.0 and got.repeats == timing.MOST and got.largest_ms == 7.0
    assert events.memsets > got.repeats  # the cache is overwritten before each
    timer.close()
    assert events.recorded == {}


def test_a_repetition_for_which_the_host_was_late_does_not_count(monkeypatch):
    """Where it always is, its time counts: there is no other."""
    late = itertools.chain([0.0] * 2, itertools.cycle([5.0, 0.3, 0.01]))
    events = Events(itertools.repeat(1.0), late)
    got = timer_of(events, monkeypatch).time(events.launch, 50.0)
    assert got.ms == got.largest_ms == 1.0 and got.repeats == timing.MOST
    slow = Events(itertools.repeat(1.0), itertools.repeat(5.0))
    assert timer_of(slow, monkeypatch).time(slow.launch, 1e-9).ms > 4.0


def test_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(timing, "is_capturing", lambda stream: True)
    with pytest.raises(ts.ArgumentError, match="cannot be captured in a graph") as info:
        DeviceBench(0, 0)
    assert "call it once before" in info.value.hint


# --- traces and models ------------------------------------------------------------------------
def test_spearman():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [1, 1, 5, 9]) == pytest.approx(1)
    assert spearman([1, 1], [1, 2]) == 0
    from scipy.stats import spearmanr

    x, y = np.random.default_rng(0).integers(0, 5, (2, 40))
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_a_trace_is_a_sequence_with_a_table():
    s = ts.Schedule(m=16)
    trials = (Trial(s, "chosen", 5.0, 0.1, reason="the fastest"), Trial(s, "skipped", error="E_X"))
    trace = Trace(trials, "measured", 12.3, "CUDA events", gpu="H200")
    assert len(trace) == 2 and trace[0] is trace.chosen and list(trace) == list(trials)
    assert trace.rank_correlation is None and trace.count("skipped") == 1
    first, second, third = trace.text().splitlines()
    assert first == "2 candidates, by CUDA events, 12 ms, H200"
    assert "0.1000 ms" in second and "m=16" in second and third.startswith("skipped")
    assert trials[1].to_dict() == {"schedule": {"m": 16}, "status": "skipped", "error": "E_X"}


def test_an_unfitted_model_is_the_estimate_and_few_points_do_not_bend_it():
    model = CostModel()
    s = ts.Schedule(m=64, warps=4)
    assert model.predict(Trial(s, "estimated", 7.0)) == 7.0 and model.predict(s) == 1.0
    assert model.fit([Trial(s, "skipped", 3.0)]).points == 0 and model.predict(s, 2.0) == 2.0
    model.fit([Trial(s, "measured", 5.0, 0.010)])
    assert model.predict(s, 5.0) == pytest.approx(10.0, rel=1e-3)
    assert model.predict(s.with_warps(8), 5.0) == pytest.approx(10.0, rel=0.3)
    assert model.error is None and "1 points" in repr(model)
    with pytest.raises(ts.ArgumentError, match="one schedule, not a space"):
        model.predict(ts.Schedule(m=[16, 32]))


def test_models_learn_the_kernels_own_parameters(rng):
    trials = [Trial(ts.Schedule(m=16, SPLIT=n), "measured", 10.0, 0.01 * (1 + abs(n - 4)))
              for n in (1, 2, 4, 8, 16)]
    model = CostModel().fit(trials)
    order = [t.schedule.extra_value("SPLIT") for t in model.order(trials)]
    assert order[0] in (2, 4) and order[-1] == 16


# --- what a space may set ---------------------------------------------------------------------
TUNED_GEMM = """@ts.kernel.autotune(space=space, cache=False{options})
def k(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32], BM=32, BN=32,
      BK=32, *, SCALE=1):
    acc = tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = tile.load(A[tile_m:tile_m+BM, k:k+BK])
        acc = tile.dot(a, tile.load(B[k:k+BK, tile_n:tile_n+BN]), acc)
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc * SCALE
"""


def matmuls(rng, m=100, k=50, n=90):
    a, b = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16") for s in ((m, k), (k, n)))
    return a, b, np.zeros((m, n), np.float32)


def right(a, b, c, scale=1):
    want = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64) * scale
    assert np.abs(c - want).max() < 1e-4 * np.abs(want).max()


def test_a_space_sets_the_arguments_of_its_names(rng):
    k = build(TUNED_GEMM.format(options=""), space=dict(BM=[64], BN=[16], SCALE=[3]))["k"]
    a, b, c = matmuls(rng)
    k(a, b, c)
    right(a, b, c, 3)
    text = k.inspect_ir()
    assert "64x16 x f32" in text and "32x32" not in text
    assert dict(k.last.constants)["BM"] == 64 and dict(k.last.constants)["BK"] == 32


def test_candidates_differ_by_the_arguments_that_a_space_sets(rng):
    """Each is measured as what it is: the launches that are timed have its value too."""
    seen = {}

    def measure(launch, schedule):
        launch()
        seen[schedule.m] = schedule
        return 1.0 / schedule.m

    k = build(TUNED_GEMM.format(options=", measure=measure, budget_ms=6e4"),
              space=dict(BM=[16, 64, 32]), measure=measure)["k"]
    a, b, c = matmuls(rng)
    k(a, b, c)
    right(a, b, c)
    assert sorted(seen) == [16, 32, 64] and k.best_config == {"m": 64}
    assert {dict(f.constants)["BM"] for f in k.specializations} >= {16, 32, 64}
    assert "64x32 x f32" in k.inspect_ir()


def test_an_argument_of_the_call_chooses_among_the_candidates(rng):
    k = build(TUNED_GEMM.format(options=""), space=dict(BM=[16, 64]))["k"]
    a, b, c = matmuls(rng)
    k(a, b, c, 16)
    right(a, b, c)
    assert k.best_config == {"m": 16}
    with pytest.raises(ts.ArgumentError, match="the call gives BM=48, its schedule sets 16"):
        k(a, b, c, BM=48)


def test_a_schedule_sets_arguments_too(rng):
    k = build(TUNED_GEMM.format(options="").replace(
        "@ts.kernel.autotune(space=space, cache=False)", "@kernel"))["k"]
    a, b, c = matmuls(rng)
    made = k.with_schedule(ts.Schedule(BM=64, BK=16))
    made(a, b, c)
    right(a, b, c)
    assert "64x32 x f32" in made.inspect_ir() and "x16" in made.inspect_ir()
    with pytest.raises(ts.ArgumentError, match="the call gives BM=32, its schedule sets 64"):
        made(a, b, c, 32)


def test_a_proposal_leaves_arguments_alone(rng):
    """Blocks that are arguments are the author's: no other block sizes are looked for."""
    k = build(TUNED_GEMM.format(options="").replace(
        "@ts.kernel.autotune(space=space, cache=False)", "@kernel"))["k"]
    a, b, c = matmuls(rng)
    k(a, b, c, 64)
    right(a, b, c)
    assert "64x32 x f32" in k.inspect_ir()
    assert k.schedule.source == "auto" and "m" not in k.schedule.values


def test_a_grid_sees_what_the_space_sets():
    k = build("""@ts.kernel.autotune(dict(ROWS=[4]), cache=False, grid=lambda M, ROWS: (M // ROWS,))
def k(x: Tensor["M", i32], ROWS=1):
    x[tile.group_id(0)] = ROWS
""")["k"]
    x = np.zeros(8, np.int32)
    k(x)
    assert x.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]


BLOCK = 8
UNREAD = {
    "dict(BX=[64], BM=[16])": ("BX", "x[0:16] = tile.zeros((tile.context().BM,))"),
    "dict(BM=[16])": ("BM", "x[0:8] = tile.zeros((8,))"),
    "dict(m=[16])": ("BM", "x[0:8] = tile.zeros((8,))"),
    "dict(BLOCK=[16])": ("BLOCK", "x[0:8] = tile.zeros((BLOCK,))"),
    "dict(BN=[16], warps=[4])": ("BN", "x[0:64] = tile.zeros((tile.context().m,))"),
}


@pytest.mark.parametrize("space", UNREAD)
def test_what_nothing_reads_is_refused(space):
    name, line = UNREAD[space]
    k = build(f"""@ts.kernel.autotune({space}, cache=False)
def k(x: Tensor["M", f32]):
    {line}
""", BLOCK=BLOCK)["k"]
    with pytest.raises(ts.ArgumentError, match=f"sets {name}, which k never reads") as info:
        k(np.zeros(64, np.float32))
    assert f"{name}=64" in info.value.hint and "context()" in info.value.hint


@pytest.mark.parametrize("space", [dict(warps=[4], stages=[2], vector=[4], PIN=[8]),
                                   dict(BM=[16], num_warps=[2])])
def test_what_compilers_read_or_a_branch_names_is_not(space):
    k = build("""@ts.kernel.autotune(space, cache=False)
def k(x: Tensor["M", f32], *, tiled=False):
    if tiled:
        x[0:16] = tile.zeros((tile.context().BM,))
    else:
        x[0:8] = tile.zeros((8,))
""", space=space)["k"]
    k(np.zeros(64, np.float32))
