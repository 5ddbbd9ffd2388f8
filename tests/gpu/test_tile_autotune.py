"""Tuning on a GPU: CUDA events, the accuracy gate and the cache, with arrays of torch."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from tessera import config
from tessera.runtime.device import device
from tessera.runtime.timing import EventTimer
from tessera.tile.tuning.gpus import gpu_of
from tessera.tile.tuning.trial import spearman

require_gpu()
torch = pytest.importorskip("torch")

GEMM = """@ts.kernel.autotune(space, cache=cache, budget_ms=budget, **options)
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32]):
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range(0, K, T.k):
        a = tile.load(A[tile_m:tile_m+T.m, k:k+T.k])
        acc = tile.dot(a, tile.load(B[k:k+T.k, tile_n:tile_n+T.n]), acc)
    C[tile_m:tile_m+T.m, tile_n:tile_n+T.n] = acc
"""
SPACE = dict(BM=[64, 128], BN=[64, 96, 128], BK=[32], warps=[4, 8, 64], stages=[2, 3])


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.scope(cache_dir=tmp_path):
        yield tmp_path


def tuned(space=SPACE, budget=60_000, cache=None, source=GEMM, **options):
    return build(source, space=space, cache=cache, budget=budget, options=options)["gemm"]


def operands(m=1000, k=512, n=900):
    made = torch.Generator("cuda").manual_seed(m)
    a, b = (torch.randn(s, device="cuda", generator=made).bfloat16() for s in ((m, k), (k, n)))
    return a, b, torch.full((m, n), float("nan"), device="cuda")


def check(a, b, c):
    want = a.double() @ b.double()
    assert (c.double() - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.alone
def test_events_measure_the_kernel_and_no_overhead_of_the_host():
    x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    timer = EventTimer(0, torch.cuda.current_stream().cuda_stream)

    def slow_host():
        time.sleep(0.0002)
        x.zero_()

    fast, slow = timer.time(x.zero_, 200.0), timer.time(slow_host, 200.0)
    timer.close()
    assert fast.repeats >= 5 and 0.03 < fast.ms < 1.0  # 256 MiB at 0.3 to 8 TB/s
    assert slow.ms == pytest.approx(fast.ms, rel=0.25)


@pytest.mark.alone
@pytest.mark.row("SCHED-18", "SCHED-22", "KERN-15", "SCHED-28")
def test_candidates_are_timed_with_events_on_the_device(note):
    gemm, (a, b, c) = tuned(), operands()
    gemm(a, b, c)
    torch.cuda.synchronize()
    check(a, b, c)
    trace = gemm.tuning_trace
    print(trace.text())
    measured = [t for t in trace if t.measured_ms is not None]
    assert trace.source == "measured" and trace.bench == "CUDA events" and len(measured) >= 3
    assert trace.gpu == gpu_of(device(0)).name
    assert all(0.001 < t.measured_ms < 50 for t in measured)
    assert gemm.metric == "latency_ms"
    assert trace.chosen.measured_ms == min(t.measured_ms for t in measured)
    assert trace.chosen.schedule.values == gemm.best_config
    assert gemm.best_config["m"] in (64, 128) and gemm.best_config["warps"] in (4, 8)
    skipped = [t for t in trace if t.status == "skipped"]
    assert any("2048 lanes" in t.reason for t in skipped)
    estimates = [t.estimate_us for t in measured], [t.measured_ms for t in measured]
    note(candidates=len(trace), measured=len(measured), elapsed_ms=round(trace.elapsed_ms),
         rank_correlation=round(spearman(*estimates), 2), best=gemm.best_config,
         best_ms=trace.chosen.measured_ms)
    start = time.perf_counter()
    gemm(a, b, c)
    assert 1e3 * (time.perf_counter() - start) < 50  # nothing is measured again
    assert gemm.tuning_trace is trace


@pytest.mark.row("SCHED-20")
def test_a_new_kernel_finds_it_on_the_disk(own_cache, monkeypatch):
    monkeypatch.setenv("HOME", str(own_cache))
    first, (a, b, c) = tuned(cache="~/.sched"), operands()
    first(a, b, c)
    assert len(list((own_cache / ".sched").glob("gemm-*.json"))) == 1
    second = tuned(cache="~/.sched")
    second(a, b, c)
    check(a, b, c)
    assert second.tuning_trace.source == "cache" and second.best_config == first.best_config
    second(*operands(m=500))
    assert second.tuning_trace.source == "measured"  # another shape


@pytest.mark.alone
@pytest.mark.row("SCHED-19", "KERN-16")
def test_the_budget_bounds_the_search_and_a_file_keeps_the_choice(tmp_path):
    """The time that the call takes, of which one candidate may begin inside the budget."""
    gemm, a = tuned(budget=500, cache=tmp_path / "tuned", metric="latency_ms"), operands()
    start = time.perf_counter()
    gemm(*a)
    spent_ms, trace = 1e3 * (time.perf_counter() - start), gemm.tuning_trace
    longest_ms = 5000  # one candidate: compiled, compared, measured
    assert trace.elapsed_ms <= spent_ms and trace.elapsed_ms < 500 + longest_ms
    assert gemm.metric == "latency_ms" and trace.count("chosen") == 1
    left = [t for t in trace if t.status == "estimated"]
    assert left and all("the budget of 500 ms was spent" in t.reason for t in left)
    (file,) = (tmp_path / "tuned").glob("gemm-*.json")
    again = tuned(cache=tmp_path / "tuned")
    again(*a)
    assert again.tuning_trace.source == "cache" and again.best_config == gemm.best_config
    file.unlink()
    alone = tuned(budget=1e-6, cache=False)
    alone(*a)
    assert sum(t.measured_ms is not None for t in alone.tuning_trace) == 1


def test_a_wrong_candidate_is_skipped_on_the_device():
    wrong = "    if T.m == 128:\n        acc = acc + 1.0\n"
    gemm = tuned(space=dict(BM=[64, 128], BN=[128], BK=[32], warps=[8]),
                 source=GEMM.replace("    C[tile_m", wrong + "    C[tile_m"))
    a, b, c = operands()
    gemm(a, b, c)
    check(a, b, c)
    assert {t.schedule.m: t.error for t in gemm.tuning_trace} == {64: "", 128: "E_WRONG_RESULT"}
    assert gemm.tuning_trace.reference == "the default schedule"


@pytest.mark.row("SCHED-17")
@pytest.mark.parametrize("m", [64, 100])
def test_blocks_of_96_columns(m):
    gemm = tuned().with_schedule(ts.Schedule(m=64, n=96, k=32, warps=4, stages=3))
    a, b, c = operands(m=m, n=500)
    gemm(a, b, c)
    check(a, b, c)


@pytest.mark.row("SCHED-03")
def test_warps_are_the_block_size():
    k = build("""@ts.kernel.schedule(ts.Schedule().warps(8))
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        x[i] = 1.0 * tile.group_size()
""")["k"]
    x = torch.zeros(1000, device="cuda")
    k(x)
    assert set(x.tolist()) == {256.0}


def test_a_row_kernel_gets_its_own_schedule():
    k = build("""@kernel
def softmax(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for i in tile.range(0, M, 1):
        r = tile.load(x[i:i+1, 0:N])
        e = tile.exp(r - tile.row_max(r)[:, None])
        tile.store(y[i:i+1, 0:N], e / tile.row_sum(e)[:, None])
""")["softmax"]
    for width in (100, 4096):
        x = torch.randn(64, width, device="cuda")
        y = torch.empty_like(x)
        k(x, y)
        assert torch.allclose(y, torch.softmax(x, 1), atol=1e-6, rtol=1e-4)
    assert k.schedule.source == "auto" and "for a largest tile" in k.inspect_ir("schedule")


@pytest.mark.row("KERN-17", "EX-27")
@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (1, 5)])
def test_a_whole_array_function(shape):
    score = build("""from math import sqrt
d = 64
@kernel.auto
def attention_score(q: ts.Tile, k: ts.Tile) -> ts.Tile:
    scores = tile.dot(q, k.T) / sqrt(d)
    return scores
""")["attention_score"]
    q, k = (torch.randn(n, 64, device="cuda").bfloat16() for n in shape)
    got = score(q, k)
    want = q.double() @ k.double().T / 8
    assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() < 0.05
    batch = score(torch.stack([q, q]), k)
    assert batch.shape == (2, *shape) and np.array_equal(*(x.float().cpu().numpy()
                                                         for x in (batch[1], got)))


def test_a_space_sets_arguments():
    """Each candidate is measured as what it is."""
    source = """@ts.kernel.autotune(space, cache=cache, budget_ms=budget, **options)
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32], BM=32,
         BN=64, BK=32):
    acc = tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = tile.load(A[tile_m:tile_m+BM, k:k+BK])
        acc = tile.dot(a, tile.load(B[k:k+BK, tile_n:tile_n+BN]), acc)
    C[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc
"""
    k = tuned(dict(BM=[16, 64], BN=[32]), source=source)
    a, b, c = operands(200, 100, 300)
    k(a, b, c)
    check(a, b, c)
    assert {t.schedule.m for t in k.tuning_trace if t.measured_ms} == {16, 64}
    assert k.best_config["m"] in (16, 64) and "x32 x f32" in k.inspect_ir()
