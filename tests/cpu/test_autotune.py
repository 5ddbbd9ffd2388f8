"""The parts of tuning: what is counted, what fits, is compared, measured, kept and chosen."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.tile.passes.operation_counts import MatmulShape, count, register_bytes, ring_bytes
from tessera.tile.tuning import accuracy, gpus, search, tuned_schedules
from tessera.tile.tuning.cost import explain, shared_traffic
from tessera.tile.tuning.legality import fits, require_legal
from tessera.tile.tuning.tuned_schedules import TunedSchedule, TuningCache, TuningCacheWarning

GEMM = """@kernel
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32]):
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range(0, K, T.k):
        acc += tile.dot(tile.load(A[tile_m:tile_m+T.m, k:k+T.k]), tile.load(B[k:k+T.k,
        tile_n:tile_n+T.n]))
    C[tile_m:tile_m+T.m, tile_n:tile_n+T.n] = acc
"""  # noqa: E501
SCALE = """@ts.kernel.autotune(space, cache=False, {options})
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    T = tile.context()
    tile.store(y, tile.load(x, rows=T.m, cols=N) * 2.0{body})
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """And no budget that a busy machine spends before the last candidate."""
    monkeypatch.setattr(search.Search, "elapsed_ms", property(lambda _: 1.0))
    with config.scope(cache_dir=tmp_path / "cache"):
        yield tmp_path


def halves(*shape):
    return np.zeros(shape, ml_dtypes.bfloat16)


def gemm_at(schedule, m=256, k=128, n=256):
    kernel = build(GEMM)["gemm"]
    bound = kernel.bind((halves(m, k), halves(k, n), np.zeros((m, n), np.float32)), {})
    return kernel.specialise(bound, schedule), bound


def scaled(options="measure=measure", body="", space=None, **names):
    return build(SCALE.format(options=options, body=body), space=space or dict(BM=[1, 2, 4]),
                 **names)["k"]


# --- GPUs -------------------------------------------------------------------------------------
def test_gpus_are_found_by_name_and_target():
    assert gpus.gpu("H200") is gpus.DEFAULT is gpus.gpu("NVIDIA H200")
    assert gpus.gpu("NVIDIA H100 80GB HBM3").memory_gbps == 3350
    assert gpus.gpu("sm_90") is gpus.gpu("sm_90a") is gpus.DEFAULT
    assert gpus.gpu("sm_80").name == "A100" and gpus.gpu("sm_87").name == "A10"
    assert gpus.gpu("sm_120").name == "B200"  # the nearest that is known
    with pytest.raises(ts.UnsupportedTargetError, match="no figures of 'MI300'") as info:
        gpus.gpu("MI300")
    assert "A100" in info.value.hint
    with pytest.raises(ts.UnsupportedTargetError, match="MI300"):
        ts.kernel.autotune(dict(BM=[16]), gpu="MI300")(seeds.gemm.fn)


def test_a_device_of_this_machine():
    made = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), multiprocessors=132,
                           shared_bytes=232448, l2_bytes=50 << 20)
    assert gpus.gpu_of(made) == gpus.DEFAULT
    card = SimpleNamespace(name="NVIDIA RTX A6000", cc=(8, 6), multiprocessors=84,
                           shared_bytes=101376, l2_bytes=6 << 20)
    got, near = gpus.gpu_of(card), gpus.gpu("A10")
    assert got.name == "NVIDIA RTX A6000" and "in proportion" in got.source
    assert got.matmuls("f16") == pytest.approx(near.matmuls("f16") * 84 / 72)


@pytest.mark.parametrize("g", gpus.GPUS.values(), ids=lambda g: g.name)
def test_figures_are_consistent(g):
    assert g.source and g.shared_bytes <= g.generation.shared_bytes and g.generation.lanes % 32 == 0
    # A tensor core does at least what the other units do, and narrower operands are faster.
    assert g.matmuls("f16") > g.f32_tflops * 1e12 and g.matmuls("int8") >= g.matmuls("f16")
    assert g.matmuls("bf17") == g.f32_tflops * 1e12


# --- work and cost ----------------------------------------------------------------------------
def test_the_work_of_a_matmul():
    function, bound = gemm_at(ts.Schedule(m=64, n=32, k=16))
    work = count(function, bound.sizes, 128, (4, 8))
    assert work.matmuls == {MatmulShape("f16", 64, 32, 16, 16): 8.0}
    assert work.matmul_flops == 2 * 64 * 32 * 128
    assert work.bytes == 8 * (64 * 16 + 16 * 32) * 2 + 64 * 32 * 4
    assert work.steps == 8 and work.flops == work.matmul_flops + work.other + work.special
    assert register_bytes(function) == 64 * 32 * 4
    assert ring_bytes(function, 3) == 3 * (64 * 16 + 16 * 32) * 2


def test_loops_that_depend_on_the_group_count_for_the_middle_one():
    k = build("""@kernel
def k(x: Tensor["M", 16, f32], y: Tensor["M", 16, f32]):
    acc = tile.zeros((16, 16), f32)
    for i in tile.range(0, tile_m + 16, 16):
        acc += tile.load(x[i:i+16])
    y[tile_m:tile_m+16] = acc
""")["k"]
    x = np.zeros((1024, 16), np.float32)
    bound = k.bind((x, x), {})
    function = k.specialise(bound, ts.Schedule())
    work = count(function, bound.sizes, 128, (64,))
    assert work.steps == 32 and work.bytes == 33 * 16 * 16 * 4  # loads, and the store


def test_the_estimate_has_parts_that_follow_from_the_machine():
    s = ts.Schedule(m=128, n=128, k=64, warps=8, stages=3)
    function, bound = gemm_at(s, 4096, 4096, 4096)
    here, old = (explain(function, s, bound, gpus.gpu(n)) for n in ("H200", "A100"))
    assert here.groups == old.groups == 1024
    # 8 groups on the busiest of 132, each 2 * 128 * 128 * 4096 flops at its share of the rate
    ideal_us = 8 * 2 * 128 * 128 * 4096 / (989e12 / 132) * 1e6
    assert here.arithmetic_us == pytest.approx(ideal_us, rel=0.02)
    assert here.memory_us == pytest.approx((2 * 2 + 4) * 4096**2 / 4.8e12 * 1e6)
    assert old.us > 2 * here.us and old.bound == "arithmetic"
    assert "groups" in str(here) and f"{here.us:.1f} us on H200" in str(here)
    small, where = gemm_at(s, 64, 64, 64)
    assert explain(small, s, where).bound in ("waiting", "arithmetic", "cache")


def test_shared_memory_feeds_matmuls():
    p = MatmulShape("f16", 128, 256, 64, 16)
    hopper, ampere = gpus.gpu("H200"), gpus.gpu("A100")
    assert shared_traffic(p, 8, hopper) == (128 + 2 * 256) * 64 * 2  # B once per warpgroup
    assert shared_traffic(p, 8, ampere) == (128 * 4 + 256 * 2) * 64 * 2  # 2 x 4 warps
    assert shared_traffic(p, 4, ampere) == (128 * 2 + 256 * 2) * 64 * 2


def test_what_fits():
    s = ts.Schedule(m=128, n=128, k=64, warps=8, stages=4)
    function, bound = gemm_at(s)
    assert fits(function, s, bound, gpus.gpu("H200"))
    assert not fits(function, s, bound, gpus.gpu("A10"))  # 128 KiB of buffers
    require_legal(function, s, bound, gpus.gpu("A10"))  # the kernel itself allocates none
    with pytest.raises(ts.ArgumentError, match="1056 lanes, a group has at most 1024"):
        require_legal(function, s.with_warps(33), bound, gpus.DEFAULT)


# --- the accuracy gate ------------------------------------------------------------------------
def test_tolerance_comes_from_the_roundings_of_the_kernel():
    plain, bound = gemm_at(ts.Schedule(m=16, n=16, k=16))
    tight = accuracy.limit_of(plain, bound).relative
    assert tight == pytest.approx(4 * (2.0**-23 + 2.0**-23 * 16))  # to f32, sums of up to 256
    rounded = build(GEMM.replace("acc += tile.dot(tile.load(A[tile_m:tile_m+T.m, k:k+T.k])",
                                 "a = tile.cast(tile.exp(tile.load(A[tile_m:tile_m+T.m, k:k+T.k]))"
                                 ", bf16)\n        acc += tile.dot(a"))["gemm"]
    bound = rounded.bind((halves(16, 16), halves(16, 16), np.zeros((16, 16), np.float32)), {})
    loose = accuracy.limit_of(rounded.specialise(bound, ts.Schedule(m=16, n=16, k=16)), bound)
    assert 4 * 2.0**-7 <= loose.relative < 5 * 2.0**-7
    counts = build("""@kernel
def k(x: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        x[i] += 1
""")["k"]
    bound = counts.bind((np.zeros(3, np.int32),), {})
    assert accuracy.limit_of(counts.specialise(bound, ts.Schedule()), bound).relative == 0


def test_comparisons():
    limit, want = accuracy.Limit(1e-3), np.array([1.0, np.nan, np.inf, -2.0, 0.0])
    assert limit.miss("y", want + np.array([1e-4, 0, 0, 0, 1e-4]), want) == ""
    for i, bad in ((0, 1.1), (1, 0.0), (2, 5.0), (2, -np.inf), (3, np.nan), (4, np.inf)):
        got = want.copy()
        got[i] = bad
        assert f"1 of 5 elements of y are wrong: [{i}] is" in limit.miss("y", got, want)
    assert "has shape [2], not [3]" in limit.miss("y", np.zeros(2), np.zeros(3))
    assert accuracy.Limit(0.0).miss("n", np.arange(3), np.array([0, 1, 3]))


def test_only_what_is_written_is_copied():
    function, bound = gemm_at(ts.Schedule(m=16, n=16, k=16))
    given = accuracy.copies(function, bound)
    assert given["A"] is bound.given["A"] and given["C"] is not bound.given["C"]
    t = ts.tensor(np.ones((2, 3), np.float32), "fp4_e2m1")
    made = accuracy.copied(t, "t")
    assert made is not t and made.type == t.type and np.array_equal(made.numpy(), t.numpy())
    assert np.array_equal(accuracy.on_host(t), np.ones((2, 3)))
    with pytest.raises(ts.ArgumentError, match="does not know how to copy an array of"):
        accuracy.copied(_Foreign(), "x")


class _Foreign:
    """Memory of a library that nobody knows."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (0,), "typestr": "<f4", "data": (0, False), "version": 3}


def test_the_callers_arrays_change_once(rng):
    """In-place kernels: tuning runs on copies, the call itself on the arguments."""
    k = build("""@ts.kernel.autotune(dict(warps=[1, 2, 4]), cache=False, measure=measure)
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        x[i] += 1.0
""", measure=lambda launch, s: [launch() for _ in range(3)] and float(s.warps))["k"]
    x = rng.standard_normal(300).astype(np.float32)
    before = x.copy()
    k(x)
    assert np.array_equal(x, before + 1) and k.best_config == {"warps": 1}
    k2 = build("""@ts.kernel.autotune(dict(BM=[1, 2]), cache=False, measure=measure)
def k(x: Tensor["n", "m", bf16], alpha: f32, *, n_times: int) -> Tensor["n", "m", f32]:
    T = tile.context()
    y = tile.load(x, rows=T.m, cols=m) * alpha
    return y * float(n_times)
""", measure=lambda launch, s: launch() is not None and 1.0 / s.m)["k"]
    got = k2(ts.tensor(np.ones((5, 3), np.float32), "bf16"), 2.0, n_times=3)
    assert np.array_equal(got.numpy(), np.full((5, 3), 6.0)) and k2.best_config == {"m": 2}


# --- the search -------------------------------------------------------------------------------
def xy(rng, m=8, n=4):
    x = rng.standard_normal((m, n)).astype(np.float32)
    return x, np.zeros_like(x)


def test_nothing_is_measured_on_the_host(rng, own_cache):
    k = build("""@ts.kernel.autotune(dict(BM=[1, 2, 4]))
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    tile.store(y, tile.load(x, rows=tile.context().m, cols=N) * 2.0)
""")["k"]
    x, y = xy(rng)
    k(x, y)
    assert np.array_equal(y, 2 * x) and k.tuning_trace.source == "model"
    assert all(t.measured_ms is None for t in k.tuning_trace)
    assert "nothing is measured on the host" in k.tuning_trace.chosen.reason
    assert not (own_cache / "cache").exists()


def test_without_a_space_the_compilers_proposals_are_tuned():
    source = GEMM.replace("@kernel", "@ts.kernel.autotune(measure=measure, budget_ms=6e4)")
    kernel = build(source, measure=lambda launch, s: 1000.0 / s.m / s.n)["gemm"]
    kernel(halves(64, 32), halves(32, 64), np.zeros((64, 64), np.float32))
    assert len(kernel.tuning_trace) > 3 and kernel.space == ()
    assert kernel.schedule.source == "tuned"
    areas = [t.schedule.m * t.schedule.n for t in kernel.tuning_trace if t.measured_ms]
    assert kernel.best_config["m"] * kernel.best_config["n"] == max(areas) > min(areas)
    bare = build("""@ts.kernel.autotune
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        x[i] = 1.0
k(x)
""")
    assert set(bare["x"]) == {1.0} and len(bare["k"].tuning_trace) == 1


def test_the_measure_function_gets_a_launch_that_runs(rng):
    seen = []

    def measure(launch, schedule):
        seen.append(schedule.m)
        assert launch() is None
        return float(schedule.m)

    k = scaled(measure=measure)
    x, y = xy(rng)
    k(x, y)
    assert sorted(seen) == [1, 2, 4] and k.best_config == {"m": 1}
    assert k.tuning_trace.bench.endswith("measure")


@pytest.mark.parametrize("got", [0, -1.0, float("nan"), None, True, "fast"])
def test_a_measure_that_gives_no_time(got, rng):
    k = scaled(measure=lambda launch, s: got)
    with pytest.raises(ts.ArgumentError, match="a time in milliseconds is a number above 0"):
        k(*xy(rng))
    assert k.tuning_trace.count("skipped") == 3


def test_a_kernel_that_is_wrong_with_every_schedule_shows_its_own_error(rng):
    k = scaled(measure=lambda launch, s: 1.0, body=" + nothing")
    with pytest.raises(ts.TesseraError, match="'nothing' is not defined") as info:
        k(*xy(rng))
    assert info.value.where.text.startswith("tile.store(y")
    k = build("""@ts.kernel.autotune(dict(BM=[1, 2], warps=[64]))
def k(x: Tensor["M", "N", f32]):
    tile.store(x, tile.load(x, rows=tile.context().m, cols=N))
""")["k"]
    with pytest.raises(ts.ArgumentError, match="no schedule of the space fits k: 2048 lanes"):
        k(xy(rng)[0])


def test_a_compilation_that_does_not_end_is_left_behind(rng, monkeypatch):
    hung = threading.Event()
    compiled = []

    def prepare(kernel, bound, config):
        compiled.append(kernel.schedule.m)
        if kernel.schedule.m == 2:
            hung.wait(60)
        if kernel.schedule.m == 4:
            raise KeyError("of the compiler")

    monkeypatch.setattr(search, "prepare", prepare)
    k = scaled("measure=measure, compile_limit_s=1, budget_ms=9e4",
               measure=lambda launch, s: 1.0 / s.m)
    x, y = xy(rng)
    start = time.perf_counter()
    k(x, y)
    hung.set()
    assert time.perf_counter() - start < 30 and np.array_equal(y, 2 * x)
    errors = {t.schedule.m: (t.status, t.error) for t in k.tuning_trace}
    assert errors == {1: ("chosen", ""), 2: ("skipped", "E_COMPILE_TIME"),
                      4: ("skipped", "KeyError")}
    assert set(compiled) == {1, 2, 4, None}  # None: the default, which is the reference


def test_a_lost_context_ends_the_search(rng):
    def measure(launch, schedule):
        raise ts.DeviceError("launch k: CUDA_ERROR_ILLEGAL_ADDRESS", hint="an earlier kernel "
                             "failed and its context is lost: run it under ts.debug.bounds()")

    with pytest.raises(ts.DeviceError, match="tuning, candidate {'m': .}: launch k") as info:
        scaled(measure=measure)(*xy(rng))
    assert "leave this candidate out" in info.value.hint


def test_large_results_are_compared_when_they_would_win(rng, monkeypatch):
    monkeypatch.setattr(search, "COMPARE_ALL", 1)
    k = scaled(measure=lambda launch, s: float(s.m), body=" + (1.0 if T.m == 1 else 0.0)")
    x, y = xy(rng)
    k(x, y)
    assert np.array_equal(y, 2 * x) and k.best_config == {"m": 2}
    (wrong,) = [t for t in k.tuning_trace if t.status == "skipped"]
    assert wrong.error == "E_WRONG_RESULT" and wrong.schedule.m == 1


def test_the_reference_is_the_first_that_works_when_the_defaults_do_not(rng):
    k = scaled(measure=lambda launch, s: float(s.m), body=" + (0.0 if T.m < 64 else undefined)")
    x, y = xy(rng)
    k(x, y)
    assert np.array_equal(y, 2 * x)
    assert k.tuning_trace.reference.startswith("the candidate {'m':")


def test_explicit_launches_and_grids_are_tuned(rng):
    seen = []
    k = build("""@ts.kernel.autotune(dict(STEP=[1, 2]), cache=False, measure=measure,
                    grid=lambda M: (M,))
def k(x: Tensor["M", i32]):
    x[tile.group_id(0)] = tile.num_groups(0) * tile.context().STEP // tile.context().STEP
""", measure=lambda launch, s: seen.append(s) or 1.0)["k"]
    x = np.zeros(6, np.int32)
    k(x)
    assert set(x) == {6} and len(seen) == 2
    free = build("""@ts.kernel.autotune(dict(STEP=[1, 2]), cache=False, measure=measure)
def k(x: Tensor["M", i32]):
    x[tile.group_id(0)] = tile.num_groups(0) + 0 * tile.context().STEP
""", measure=lambda launch, s: launch() is None and 1.0)["k"]
    free[5](x)
    assert list(x) == [5] * 5 + [6]


def test_keys(rng):
    asked = []

    def measure(launch, schedule):
        asked.append(schedule.m)
        return float(schedule.m)

    by_name = scaled("measure=measure, key='N'", measure=measure)
    for m, n, new in ((8, 4, True), (16, 4, False), (8, 5, True)):
        before = len(asked)
        by_name(*xy(rng, m, n))
        assert (len(asked) > before) == new
    by_function = scaled("measure=measure, key=lambda N: N > 10", measure=measure)
    for n, new in ((4, True), (9, False), (11, True), (30, False)):
        before = len(asked)
        by_function(*xy(rng, 4, n))
        assert (len(asked) > before) == new
    with pytest.raises(ts.ArgumentError, match="no extent or parameter 'Q'"):
        scaled("key=['Q']")


@pytest.mark.parametrize("options, match", [
    ("budget_ms=0", "budget_ms=0: a time above 0"), ("budget_ms='1s'", "budget_ms='1s'"),
    ("compile_limit_s=-1", "compile_limit_s=-1"), ("measure=3", "measure=3: a function"),
    ("space={'BM': []}", "no value for 'BM'"), ("space={'blok': [1]}", "a space has no 'blok'"),
    ("space=3", "a space is a dict of lists")])
def test_bad_arguments_name_the_users_line(options, match):
    options = options if "space" in options else f"space=dict(BM=[1]), {options}"
    with pytest.raises(ts.ArgumentError, match=match) as info:
        build(f"""@ts.kernel.autotune({options})
def k(x: Tensor["n", f32]):
    x[0] = 1.0
""")
    assert "autotune(" in info.value.where.text


@pytest.mark.parametrize("cache", [3, "", ["a"]])
def test_a_cache_that_is_no_folder(cache):
    with pytest.raises(ts.ArgumentError, match="cache=.*a folder, None for the default one"):
        ts.kernel.autotune(dict(BM=[1]), cache=cache)(seeds.gemm.fn)


def test_schedules_that_extents_do_not_decide_are_proposed_once(rng, monkeypatch):
    traced = []
    k = build("""@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        x[i] = 1.0
""")["k"]
    compile = type(k).compile
    monkeypatch.setattr(type(k), "compile", lambda self, *a: traced.append(a) or compile(self, *a))
    for n in (3, 300, 5000):
        k(np.zeros(n, np.float32))
    assert len(traced) == 1  # to propose; the same function runs
    blocked, sizes = build(GEMM)["gemm"], set()
    for n in (64, 4096):
        blocked.choose(blocked.bind((halves(n, 64), halves(64, n), np.zeros((n, n), np.float32)),
                                    {}))
        sizes.add(blocked.schedule.values["m"] * blocked.schedule.values["n"])
    assert len(sizes) == 2
    latest = blocked.schedule
    blocked.choose(blocked.bind((halves(64, 64), halves(64, 64), np.zeros((64, 64), np.float32)),
                                {}))
    assert blocked.schedule != latest  # `schedule` is the one of the last call


# --- the cache --------------------------------------------------------------------------------
KEY = {"kernel": "k", "hash": "0", "shapes": {"x": [3]}, "types": {"x": "f32"}, "constants": {},
       "space": "s", "arch": "sm_90a", "gpu": "H200", "metric": "latency_ms", "bench": "b",
       "user": ""}


def test_entries_are_found_by_their_whole_key(tmp_path):
    cache = TuningCache(tmp_path / "a" / "b")
    schedule = ts.Schedule(m=16, SPLIT=2, source="tuned")
    entry = TunedSchedule(KEY, schedule, 0.5, 7.0, [{"status": "measured"}])
    assert cache.find(KEY) is None
    cache.store(entry)
    found = cache.find(KEY)
    assert found == entry and found.schedule.source == "tuned"
    for field, value in KEY.items():
        other = KEY | {field: {"y": [1]} if isinstance(value, dict) else value + "x"}
        assert cache.find(other) is None, field
    assert os.stat(tmp_path / "a" / "b").st_mode & 0o777 == 0o700
    assert [p.name[0] for p in (tmp_path / "a" / "b").iterdir()] == ["k"]  # nothing half-written
    assert cache.clear() == 1 and cache.entries() == []


def test_a_key_of_another_kernel_in_the_file_is_noticed(tmp_path):
    cache = TuningCache(tmp_path)
    cache.store(TunedSchedule(KEY, ts.Schedule(m=16), 0.5))
    other = KEY | {"user": "u"}
    cache.path(KEY).rename(cache.path(other))
    with pytest.warns(TuningCacheWarning, match="another kernel's schedule"):
        assert cache.find(other) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "sched")
    with pytest.warns(TuningCacheWarning, match="cannot be kept"):
        cache.store(TunedSchedule(KEY, ts.Schedule(m=16), 0.5))
    with cache.tuning(1.0):
        pass
    with pytest.raises(ts.ArgumentError, match="cannot be written"):
        tuned_schedules.export(tmp_path / "no" / "where.json", [])
    with pytest.raises(ts.ArgumentError, match="cannot be read"):
        tuned_schedules.read_export(tmp_path / "missing.json")


def test_a_tuned_schedule_outside_of_the_space_is_not_taken(rng, tmp_path):
    measure = lambda launch, s: float(s.m)  # noqa: E731
    def kernel():
        return build(SCALE.format(options="measure=measure", body="").replace(
            "cache=False", "cache=cache"), space=dict(BM=[1, 2]), measure=measure,
            cache=tmp_path)["k"]

    x, y = xy(rng)
    kernel()(x, y)
    (file,) = tmp_path.glob("*.json")
    document = json.loads(file.read_text())
    document["schedule"] = {"m": 1000}
    file.write_text(json.dumps(document))
    again = kernel()
    again(x, y)
    assert again.best_config == {"m": 1} and again.tuning_trace.source == "measured"


def _tune(folder, name, done):
    import time as clock

    cache = TuningCache(folder)
    with cache.tuning(20.0):
        if cache.find(KEY) is None:
            clock.sleep(0.3)
            cache.store(TunedSchedule(KEY, ts.Schedule(m=16), 0.5))
            done.put(name)


def test_one_process_of_several_tunes(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Queue()
    workers = [spawn.Process(target=_tune, args=(tmp_path, i, done)) for i in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert done.get(timeout=5) in (0, 1, 2) and done.empty()


def test_threads_of_a_process_tune_once(rng):
    asked = []

    def measure(launch, s):
        asked.append(s)
        time.sleep(0.02)
        return float(s.m)

    k = scaled(measure=measure)
    x, _ = xy(rng)
    outs = [np.zeros_like(x) for _ in range(3)]
    threads = [threading.Thread(target=k, args=(x, y)) for y in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(asked) == 3 and all(np.array_equal(y, 2 * x) for y in outs)


def test_notes_do_not_distinguish_schedules():
    s = ts.Schedule(m=16).with_notes("why")
    assert s == ts.Schedule(m=16) and hash(s) == hash(ts.Schedule(m=16))
    assert "why" in s.explained() and "why" not in s.text()
