"""Sentinels in kernels for GPUs: what emitted code counts, and what a launch makes of it."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import emulator
import fake_gpu
import tessera as ts
from device_kernels import fresh
from fake_gpu import Torch, count, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from kernels.build import build
from lowering_cases import CASES, arrays
from lowering_cases import apart as apart
from sentinel_cases import CASES as BAD
from sentinel_cases import (
    INJECTED,
    QUIET,
    casts,
    check_blamed,
    check_injected,
    check_quiet,
    clamps,
    found_by,
    logs,
    spoiled,
)
from tessera import Tensor, bf16, f16, f32, f64, fp8_e4m3, fp8_e5m2
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.execute import Executable
from tessera.numerics import CastCounts, as_type, encode
from tessera.runtime.target import parse_target
from tessera.tile.cuda.intrinsics.sentinels import limit_of, limits_of
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.launch.machine_code import CompileRequest

tile = ts.tile
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("no_findings")


@ts.kernel
def rounds(x: Tensor["N", f32], w: Tensor["N", ts.fp4_e2m1], y: Tensor["N", ts.fp4_e2m1]):
    i = tile.group_id() * 16
    y[i:i + 16] = tile.load(x[i:i + 16]) * tile.load(w[i:i + 16])


@ts.kernel
def threads(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:  # noqa: F821
        y[i] = 1.0 / x[i]  # stored


@ts.kernel
def vectors(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    row = tile.group_id()
    v = tile.load_vector(x[row], width=4)
    tile.store_vector(y[row], v)  # stored


@ts.kernel
def adds(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:  # noqa: F821
        tile.atomic_add(y, i, tile.log(x[i]))  # stored


@ts.kernel
def in_place(x: Tensor["N", f32]):
    i = tile.group_id() * 16
    x[i:i + 16] = tile.sqrt(tile.load(x[i:i + 16])) - 3.0  # stored


@ts.kernel
def masked(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.group_id() * 16
    t = tile.load(x[i:i + 16])
    y[i:i + 16] = tile.where(t > 0.0, t, -float("inf"))


@ts.kernel
def made(x: Tensor["N", f32]) -> Tensor["N", f32]:
    t = tile.load(x[tile_n:tile_n + 16])  # noqa: F821
    return tile.exp(t)


def line_of(kernel, mark="# stored"):
    lines, start = inspect.getsourcelines(kernel.fn)
    return start + next(i for i, text in enumerate(lines) if mark in text)


def load_train(monkeypatch):
    """examples/train.py as a module, with its neighbours."""
    monkeypatch.syspath_prepend(str(Path(ts.__file__).parents[1] / "examples"))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return importlib.import_module("train")


def ones(n, **elements):
    x = np.ones(n, np.float32)
    for at, value in elements.items():
        x[int(at[1:])] = value
    return x


# --- emitted code ---------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kernel", [logs, adds], ids=["tile", "atomic"])
def test_kinds_first_element_and_line(kernel, target):
    x = ones(37, _21=-1.0, _30=0.0, _33=-5.0)
    found = emulator.counted(kernel, x, np.zeros(37, np.float32), groups=3, lanes=32,
                             target=target)
    assert list(found) == [("store y", line_of(kernel))]  # log(0) beyond the end does not count
    bad = found["store y", line_of(kernel)]
    assert (bad.nan, bad.inf, bad.overflow, bad.index) == (2, 1, 0, (21,)) and np.isnan(bad.value)


def test_elements_of_threads():
    found = emulator.counted(threads, ones(37, _5=0.0), np.zeros(37, np.float32), groups=2,
                             lanes=32)
    bad = found["store y", line_of(threads)]
    assert (bad.nan, bad.inf, bad.index, bad.value) == (0, 1, (5,), INF)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_vectors_of_threads(target):
    """What lies beyond the row, and is read as 0, does not count."""
    x = np.ones((3, 45), np.float32)
    x[1, 6], x[1, 44], x[2, 3] = NAN, NAN, -INF
    found = emulator.counted(vectors, x, np.zeros((3, 45), np.float32), groups=3, lanes=32,
                             target=target)
    line = line_of(vectors)
    assert set(found) == {("load x", line - 1), ("store y", line)}
    for bad in found.values():
        assert (bad.nan, bad.inf, bad.overflow, bad.index) == (2, 1, 0, (1, 6))
    assert not emulator.counted(vectors, np.ones((3, 45), np.float32),
                                np.full((3, 45), NAN, np.float32), groups=3, lanes=32)


@ts.kernel
def spans(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32]):
    s, row, i = tile.alloc_shared((64,), f32), tile.group_id(), tile.local_id()
    for n in range(2):
        s[i + 32 * n] = x[row, min(i + 32 * n, 44)]
    tile.store_span(y[row], 0, s, 0, 45)  # stored


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_spans_of_shared_memory(target):
    x = np.ones((3, 45), np.float32)
    x[1, 6], x[1, 44], x[2, 3] = NAN, NAN, -INF
    found = emulator.counted(spans, x, np.zeros((3, 45), np.float32), groups=3, lanes=32,
                             target=target)
    bad = found["store y", line_of(spans)]
    assert (bad.nan, bad.inf, bad.overflow, bad.index) == (2, 1, 0, (1, 6))


def test_loads_tell_what_came_in():
    found = emulator.counted(logs, ones(32, _9=NAN), np.zeros(32, np.float32), groups=2, lanes=32)
    assert {what for what, _ in found} == {"load x", "store y"}
    assert all(f.nan == 1 and f.index == (9,) for f in found.values())


def test_a_clean_run_counts_nothing():
    for kernel in (logs, casts, threads, adds):
        out = np.zeros(37, np.float16 if kernel is casts else np.float32)
        assert emulator.counted(kernel, ones(37), out, groups=3, lanes=32) == {}


@pytest.mark.parametrize(("kernel", "to", "becomes"), [(casts, f16, "inf"),
                                                       (clamps, fp8_e4m3, "max")])
def test_a_cast_counts_what_it_loses(kernel, to, becomes):
    x = ones(37, _4=1e6, _7=-1e6, _36=INF)
    y = np.zeros(37, as_type(to).dtype.numpy)
    found = emulator.counted(kernel, x, y, groups=3, lanes=32)
    bad = found["store y", line_of(kernel)]
    assert (bad.nan, bad.inf, bad.overflow, bad.index) == (0, 1, 2, (4,))
    assert bad.site.formats == ("store", as_type(to).dtype.name, becomes)


PACKED = [ts.fp4_e2m1, ts.fp6_e3m2, ts.fp6_e2m3]


STORES = """@kernel
def stores(x: Tensor["M", "N", f32], y: Tensor["M", "N", to]):
    t = tile.load(x[tile_m:tile_m + 4, tile_n:tile_n + 16])
    y[tile_m:tile_m + 4, tile_n:tile_n + 16] = t * 1.0

@kernel
def elements(x: Tensor["M", "N", f32], y: Tensor["M", "N", to]):
    i, j = tile.group_id(), tile.local_id()
    if j < N:
        y[i, j] = x[i, j] + 0.0
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("to", PACKED, ids=str)
def test_packed_formats_count_what_does_not_fit(to, target, rng):
    """By tiles, at odd places, and by threads; elements beyond the edge do not count."""
    built = build(STORES, to=to)
    x = rng.uniform(-1, 1, (7, 29)).astype(np.float32)
    x[2, 11], x[4, 28], x[6, 3] = 1e3, -1e3, to.max
    for name, grid in (("stores", (2, 2)), ("elements", 7)):
        found = emulator.counted(built[name], x, ts.zeros((7, 29), to), groups=grid, lanes=32,
                                 target=target)
        bad = next(f for (what, _), f in found.items() if what == "store y")
        assert (bad.nan, bad.inf, bad.overflow, bad.index, bad.value) == (0, 0, 2, (2, 11), 1e3)
        assert bad.bad == 0  # the format has neither NaN nor infinity: the largest number


def test_packed_results_are_watched_in_kernels_and_graphs():
    fp4 = ts.zeros((64,), ts.fp4_e2m1)
    assert rounds.watched_tensors(rounds.lower(ones(64), fp4, fp4)) == {"x", "y"}


@pytest.mark.parametrize("to", PACKED, ids=str)
def test_graphs_count_what_casts_to_packed_formats_lose(to, rng):
    """Against the casts of tessera.numerics: their kernels store codes as bytes."""
    x = ts.tensor((rng.standard_normal((32, 64)) * to.max).astype(np.float32))
    counts = CastCounts()
    encode(x.numpy() * np.float32(2), to, counts=counts)
    launch = CudaProgram(ts.jit(lambda x: ts.cast(x * 2.0, to)).graph(x)).launches[0]
    found = emulator.counted(launch.shared, x.array.reshape(-1), np.zeros(x.size, np.uint8),
                             groups=launch.group.grid, lanes=launch.lanes, counts=True)
    (bad,) = found.values()
    assert bad.overflow == counts.overflow > 0 and (bad.nan, bad.inf, bad.bad) == (0, 0, 0)
    assert bad.site.formats == ("store", to.name, "max")


INTEGERS = [ts.int8, ts.uint8, ts.int4, ts.int16, ts.int32, ts.uint32, ts.int64]

CUTS = """
@kernel
def stores(x: Tensor["M", "N", f32], y: Tensor["M", "N", to]):
    t = tile.load(x[tile_m:tile_m + 4, tile_n:tile_n + 16])
    y[tile_m:tile_m + 4, tile_n:tile_n + 16] = tile.cast(t + 0.0, to)

@kernel
def elements(x: Tensor["M", "N", f32], y: Tensor["M", "N", to]):
    i, j = tile.group_id(), tile.local_id()
    if j < N:
        y[i, j] = tile.cast(x[i, j] + 0.0, to)
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("to", INTEGERS, ids=str)
def test_integers_count_what_does_not_fit(to, target, rng):
    """The largest and the least that fit do not count, nor does what lies beyond the edge."""
    built = build(CUTS, to=to)
    low, high = limits_of(f32, to, "nearest_even")
    x = rng.uniform(0, 6, (7, 29)).astype(np.float32)
    x[2, 11], x[4, 28], x[6, 3] = high, low, np.nextafter(np.float32(high), np.float32(0))
    x[0, 0] = np.nextafter(np.float32(low), np.float32(0))
    for name, grid in (("stores", (2, 2)), ("elements", 7)):
        found = emulator.counted(built[name], x, ts.zeros((7, 29), to), groups=grid, lanes=32,
                                 target=target)
        (bad,) = [f for (what, _), f in found.items() if what == "store y"]
        assert (bad.nan, bad.inf, bad.overflow, bad.index, bad.value) == (0, 0, 2, (2, 11), high)
        assert bad.bad == 0


@pytest.mark.parametrize("to", INTEGERS, ids=str)
def test_graphs_count_what_casts_to_integers_lose(to, rng):
    """Against the casts of tessera.numerics, which make 0 of a NaN."""
    x = (rng.standard_normal((32, 64)) * 1.5 * float(to.max)).astype(np.float32)
    x[3, 5], counts = np.nan, CastCounts()
    encode(x, to, counts=counts)
    x = ts.tensor(x)
    launch = CudaProgram(ts.jit(lambda x: ts.cast(x, to)).graph(x)).launches[0]
    launch.shared.count(frozenset())
    stored = np.zeros(x.size, np.uint8 if to.packed else to.numpy)
    found = emulator.counted(launch.shared, x.array.reshape(-1), stored, groups=launch.group.grid,
                             lanes=launch.lanes, counts=True)
    (bad,) = found.values()
    assert bad.overflow == counts.overflow > 0 and (bad.nan, bad.inf, bad.bad) == (1, 0, 1)
    assert bad.site.formats == ("store", to.name, "max")


@pytest.mark.parametrize("to", PACKED, ids=str)
def test_programs_with_packed_casts_run_with_sentinels(to, gpu, apart, rng):
    x = ts.tensor(rng.uniform(0, 1, (32, 64)).astype(np.float32)).to("cuda")
    f = ts.jit(lambda x: ts.cast(ts.sqrt(x), to))
    want = f(x).numpy()
    with ts.debug.numerics("raise"):
        np.testing.assert_array_equal(f(x).numpy(), want)


@pytest.mark.parametrize("to", [t for t in INTEGERS if not t.packed], ids=str)
def test_a_nan_that_a_cast_drops_is_blamed(to, gpu, apart, rng):
    x = rng.standard_normal((32, 64)).astype(np.float32)
    x[3, 5] = -1.0 - abs(x[3, 5])
    f = ts.jit(lambda x: ts.cast(ts.sqrt(x), to))
    with ts.debug.numerics("raise"):
        f(ts.tensor(abs(x)).to("cuda"))
        with pytest.raises(ts.NumericsError, match="nan"):
            f(ts.tensor(x).to("cuda"))


@pytest.mark.parametrize("to", INTEGERS, ids=str)
@pytest.mark.parametrize("source", [f32, f64], ids=str)
def test_the_limits_of_integers_are_where_casts_lose(source, to):
    number = source.numpy.type
    for limit in limits_of(source, to, "nearest_even"):
        for x, lost in ((np.nextafter(number(limit), number(0)), 0), (number(limit), 1)):
            counts = CastCounts()
            encode(np.array([x]), to, counts=counts)
            assert counts.overflow == lost, x


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
@pytest.mark.parametrize("to", [f16, bf16, fp8_e4m3, fp8_e5m2, f32, *PACKED], ids=str)
@pytest.mark.parametrize("source", [f32, f64], ids=str)
def test_the_limit_is_where_casts_begin_to_overflow(source, to, rounding):
    """Against the casts of tessera.numerics, whose own tests have ml_dtypes."""
    limit = limit_of(source, to, rounding)
    number = source.numpy.type
    assert (limit < INF) == (source is f64 or (to, rounding) not in (
        (f32, "nearest_even"), (f32, "toward_zero"), (bf16, "toward_zero")))
    for x, lost in ((np.nextafter(number(limit), number(0)), 0), (number(limit), limit < INF)):
        counts = CastCounts()
        encode(np.array([x, -x]), to, rounding=rounding, counts=counts)
        assert counts.overflow == 2 * lost, x


def test_machine_code_has_the_words_only_when_it_is_asked_for():
    x, y = ones(64), np.zeros(64, np.float32)
    plain, watched = (logs.lower(x, y), frozenset({"x", "y"}))
    off = CompileRequest(32, ts.Schedule(), parse_target("sm_90a"))
    on = CompileRequest(32, ts.Schedule(), parse_target("sm_90a"), watched=watched)
    assert off.key(plain) != on.key(plain)


# --- launches -------------------------------------------------------------------------------------
def test_raise_names_the_op_and_the_line(gpu, driver):
    kernel = fresh(logs)
    x, y = filled(ones(32, _21=-1.0)), filled(np.zeros(32, np.float32))
    with ts.debug.numerics("raise"):
        for _ in range(2):  # the long way, and the short one
            with pytest.raises(ts.NumericsError, match="log in kernel logs: nan") as e:
                kernel[2](Torch(x), Torch(y))
            assert e.value.where.line == line_of(logs)
        x[21] = 1.0
        kernel[2](Torch(x), Torch(y))
    assert not ts.debug.flags()


def test_raise_knows_what_was_there_before_the_kernel_wrote(gpu):
    x = filled(ones(32, _21=-1.0))
    with ts.debug.numerics("raise"):
        with pytest.raises(ts.NumericsError, match="sqrt in kernel in_place") as e:
            fresh(in_place)[2](Torch(x))
    assert e.value.where.line == line_of(in_place)


def test_raise_of_a_result_that_the_call_makes(gpu):
    with ts.debug.numerics("raise"):
        with pytest.raises(ts.NumericsError, match="exp in kernel made: inf"):
            fresh(made)(Torch(filled(ones(32, _3=1000.0))))


def test_flag_collects_until_it_is_asked(gpu, driver):
    kernel = fresh(logs)
    x, y = filled(ones(32, _21=-1.0, _30=0.0)), filled(np.zeros(32, np.float32))
    with ts.debug.numerics("flag"):
        kernel[2](Torch(x), Torch(y))
        waits = driver.waits
        kernel[2](Torch(x), Torch(y))
        assert driver.waits == waits
        found = ts.debug.flags()
    assert (found.nan, found.inf) == (2, 2) and found.first.where.line == line_of(logs)
    assert found.first.op == "kernel logs" and found.first.index == (21,)
    assert "y, f32[32]" in str(found.first)
    assert not ts.debug.flags()


@pytest.mark.parametrize("mode", ["flag", "raise"])
def test_an_infinity_that_was_written_down_is_silent(gpu, mode):
    x, y = filled(ones(32, _4=-1.0)), filled(np.zeros(32, np.float32))
    with ts.debug.numerics(mode):
        fresh(masked)[2](Torch(x), Torch(y))
        assert not ts.debug.flags()
    assert y[4] == -INF


def test_off_has_no_words(gpu):
    kernel = fresh(logs)
    x, y = filled(ones(32, _21=-1.0)), filled(np.zeros(32, np.float32))
    kernel[2](Torch(x), Torch(y))
    assert gpu.requests[-1].watched == frozenset()
    with ts.debug.numerics("flag"):
        kernel[2](Torch(x), Torch(y))
    assert gpu.requests[-1].watched == {"x", "y"}
    assert ts.debug.flags().nan == 1
    count = len(gpu.requests)
    kernel[2](Torch(x), Torch(y))
    assert len(gpu.requests) == count and not ts.debug.flags()


# --- graph programs -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(CASES))
def test_the_verdict_is_that_of_the_cpu(name, rng, gpu, apart):
    case = CASES[name]
    inputs = arrays(case, rng)
    assert found_by(DeviceExecutable, case.fn, *inputs) == \
        found_by(Executable, case.fn, *inputs)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_blamed_as_on_the_cpu(name, rng, gpu, apart):
    check_blamed(name, rng)


@pytest.mark.parametrize("target, at", [("cpu", (63, 95)), ("cuda", (13, 7)), ("cuda", (63, 95))])
@pytest.mark.parametrize("name", INJECTED)
def test_a_chosen_step_and_element_is_blamed(name, target, at, rng, gpu, apart):
    check_injected(name, target, rng, at)


@pytest.mark.parametrize("name", QUIET)
def test_what_is_meant_is_silent(name, rng, gpu, apart):
    check_quiet(name, rng)


@pytest.mark.parametrize("name", [n for n in BAD if n.startswith("hidden")])
def test_kernels_of_functions_count_what_they_hide(name, rng):
    fn, value = BAD[name]
    x = spoiled(ts.ones((3, 50)) * 0.25, value, (1, 7))
    (launch,) = CudaProgram(ts.jit(fn).graph(x)).launches
    given = [x.array.reshape(launch.arguments[0][1]),
             np.zeros(launch.arguments[1][1], np.float32)]
    found = emulator.counted(launch.shared, *given, groups=launch.group.grid, lanes=32)
    bad = next(f for (what, _), f in found.items() if what.startswith("held"))
    assert bad.nan + bad.inf == 1 and bad.index is None
    clean = [np.full_like(given[0], 0.25), given[1]]
    assert not emulator.counted(launch.shared, *clean, groups=launch.group.grid, lanes=32)


def test_a_compiled_function_raises_at_the_users_line(gpu, apart):
    @ts.jit(target="cuda", capture_graph=True)
    def f(x):
        return ts.sum(ts.log(x @ x), axis=-1)  # logs

    good, wrong = ts.ones((32, 32)), spoiled(ts.ones((32, 32)), -100.0)
    for _ in range(2):  # launch by launch, then as one graph
        with ts.debug.numerics("raise"):
            f(good)
            with pytest.raises(ts.NumericsError, match="log: nan in f32") as e:
                f(wrong)
        assert "# logs" in e.value.where.text
        f(wrong)
    assert not ts.debug.flags()


def test_a_kernel_inside_of_a_function_is_blamed(gpu, apart):
    kernel = fresh(logs)

    def f(x):
        y = ts.zeros(x.shape)
        kernel[2](x * 2.0, y)
        return ts.sum(y)

    graph = ts.jit(f).graph(ts.ones(32))
    executable = DeviceExecutable(graph)
    with ts.debug.numerics("raise"):
        executable.run([ones(32)])
        with pytest.raises(ts.NumericsError, match="log in kernel logs: nan") as e:
            executable.run([ones(32, _7=-1.0)])
    assert e.value.where.line == line_of(logs)


def test_what_the_host_does_not_see_is_told_as_the_gpu_counted_it(gpu, apart, monkeypatch):
    """A pretended driver that writes NaN where nothing makes one."""
    x = ts.ones((40, 50))
    graph = ts.jit(lambda x: ts.exp(x) * 2.0).graph(x)  # exps

    def spoiled_first(machine, *rest):
        for box in machine.env.values():
            if isinstance(box, MemoryBox) and box.memory.written:
                box.memory.flat[57] = NAN
        count(machine, *rest)

    monkeypatch.setattr(fake_gpu, "count", spoiled_first)
    executable = DeviceExecutable(graph)
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as e:
        executable.run([x.array])
    assert "exp mul" in str(e.value) and "at [1, 7]" in str(e.value)
    assert "# exps" in e.value.where.text


def test_train_is_silent_and_blames_on_the_gpu(gpu, apart, tmp_path, capsys, monkeypatch):
    """examples/train.py, masked, dropped out and in bf16."""
    train, text = load_train(monkeypatch), tmp_path / "text.txt"
    text.write_bytes(b"tile tensor graph mesh policy kernel " * 3000)
    flags = ["--d", "8", "--layers", "1", "--heads", "1", "--T", "8", "--B", "2", "--steps", "2",
             "--warmup", "0", "--sample", "0", "--eval-every", "2", "--data", str(text),
             "--target", "cuda", "--numerics", "raise", "--dropout", "0.1", "--dtype", "bf16"]
    assert train.main([*flags, "--out", str(tmp_path / "a")]) == 0, capsys.readouterr().err
    assert train.main([*flags, "--lr", "1e38", "--clip", "1e30", "--out", str(tmp_path / "b")]) == 1
    assert "E_NAN_INF" in capsys.readouterr().err


def test_ops_outside_of_functions_on_a_gpu(gpu, apart):
    x = ts.tensor(np.array([1.0, -1.0, 2.0], np.float32)).to("cuda")
    with ts.debug.numerics("flag"):
        ts.log(x + 3.0)
        assert not ts.debug.flags()
        ts.log(x) * 2.0  # here
        found = ts.debug.flags()
        assert found.nan == 1 and found.first.index == (1,) and "# here" in found.first.where.text
        ts.where(x > 0.0, x, -np.inf) + 1.0
        assert not ts.debug.flags()
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError, match="log: nan") as e:
        ts.log(x)  # there
    assert "# there" in e.value.where.text
    ts.log(x)
    assert not ts.debug.flags()
