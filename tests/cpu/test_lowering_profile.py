"""Timelines of kernels: on a fake GPU with a clock, and under the interpreter."""

from __future__ import annotations

import json
import time
from xml.etree import ElementTree

import numpy as np
import pytest

import tessera as ts
from device_kernels import fresh
from fake_gpu import Cupy
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import Tensor, f32
from tessera.runtime import libcuda, module, nvtx


@ts.kernel
def double(x: Tensor["n", f32]):
    x[tile_n:tile_n+64] = 2.0 * ts.tile.load(x[tile_n:tile_n+64])


@ts.kernel
def add(x: Tensor["n", f32], y: Tensor["n", f32]):
    x[tile_n:tile_n+64] = ts.tile.load(x[tile_n:tile_n+64]) + ts.tile.load(y[tile_n:tile_n+64])


@pytest.fixture
def clock(driver, monkeypatch):
    """Events of the fake driver: each has the time at which it was recorded. `made` and `freed`
    count them; `streams` are those they were recorded on."""
    driver.made, driver.freed, driver.streams, times = 0, 0, [], {}

    def create(flags):
        driver.made += 1
        return 0, driver.made

    def record(event, stream):
        time.sleep(1e-4)  # a kernel is never faster than the clock
        times[event] = time.perf_counter()
        driver.streams.append(stream)
        return (0,)

    def destroy(event):
        driver.freed += 1
        del times[event]
        return (0,)

    for name, function in {
        "cuEventCreate": create, "cuEventRecord": record, "cuEventDestroy": destroy,
        "cuEventSynchronize": lambda event: (0,),
        "cuEventElapsedTime": lambda a, b: (0, 1e3 * (times[b] - times[a])),
    }.items():
        monkeypatch.setattr(driver, name, function, raising=False)
    return driver


def kernel_events(profile):
    trace = json.loads(profile.chrome_trace())["traceEvents"]
    return [e for e in trace if e.get("cat") == "kernel"], [e for e in trace if e["ph"] == "M"]


@pytest.mark.row("DBG-15")
class TestTimeline:
    def test_kernels_on_their_streams(self, gpu, clock):
        """Two streams, interleaved: one track for each, in the order of the launches."""
        x, y = Cupy(np.ones(200, np.float32)), Cupy(np.ones(200, np.float32))
        twice, plus = fresh(double), fresh(add)
        before = time.perf_counter_ns()
        with ts.debug.profile() as p:
            twice.launch(x, stream=5)
            plus.launch(x, y, stream=7)
            twice.launch(x, stream=5)
            twice.launch(y, stream=7)
        after = time.perf_counter_ns()
        events, names = kernel_events(p)
        assert [(e["name"].split("_")[0], e["tid"]) for e in events] == [
            ("double", 5), ("add", 7), ("double", 5), ("double", 7)]
        assert all(e["dur"] > 0 for e in events)
        starts = [e["ts"] for e in events]
        assert starts == sorted(starts)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(events, events[1:], strict=False))
        assert before <= 1e3 * starts[0] and 1e3 * starts[-1] <= after  # on the host's clock
        assert [n["args"]["name"] for n in names] == ["kernels on cuda:0"]
        assert {e["pid"] for e in events} == {names[0]["pid"]}
        assert x.x[0] == 6.0 and y.x[0] == 2.0

    def test_a_compiled_function_shows_its_groups(self, gpu, clock, rng, apart):
        f = ts.jit(lambda x, w: ts.softmax(x @ w), target="cuda")
        x, w = (ts.tensor(rng.standard_normal((30, 30)).astype(np.float32)) for _ in range(2))
        f(x, w)
        with ts.debug.profile() as p:
            f(x, w)
        assert [k.name for k in p.kernels] == ["g0_product", "g1_reduce_max_sub_exp_reduce_sum_div"]
        assert clock.freed == clock.made
        product, softmax = (x for x in p.launches.records if x.work.kind != "copy")
        assert (product.work.kind, softmax.work.kind) == ("matmul", "reduction")
        assert product.work.flops == product.work.matmuls == 2 * 30**3
        assert product.work.read_bytes == 2 * product.work.written_bytes == 2 * 4 * 30**2
        assert softmax.work.flops == 5 * 30**2  # max, sub, exp, sum, div
        assert min(product.us, product.least_us, softmax.us, softmax.least_us) > 0
        assert product.event.end_ns <= softmax.event.start_ns + 1
        rows = {g.name: g for g in p.launches.by_kind()}
        assert set(rows) - {"copy"} == {"matmul forward", "reduction forward"}
        assert sum(g.us for g in rows.values()) == pytest.approx(p.launches.us)
        assert "f32[30, 30] f32[30, 30] -> f32[30, 30]" in p.launches.table()
        text = p.html()
        root = ElementTree.fromstring(text.partition("\n")[2].replace('<meta charset="utf-8">', ""))
        circles = [c for c in root.iter() if c.tag.endswith("circle")]  # the roofline
        assert len(circles) == 2 and all(0 < float(c.get("cx")) < 1120 for c in circles)
        copies = [x.work for x in p.launches.records if x.work.name == "copy to the GPU"]
        assert [w.read_bytes for w in copies if w.read_bytes == 4 * 30**2] == [4 * 30**2] * 2

    def test_nvtx_ranges_name_the_users_line(self, gpu, rng, apart, monkeypatch):
        f = ts.jit(lambda x, w: ts.softmax(x @ w), target="cuda")
        x, w = (ts.tensor(rng.standard_normal((30, 30)).astype(np.float32)) for _ in range(2))
        f(x, w)
        calls = []
        monkeypatch.setattr(nvtx, "functions", lambda: (calls.append, lambda: calls.append("")))
        with ts.config.scope(nvtx=True):
            f(x, w)
        product, end, *_ = [c for c in calls if not c.startswith("poison")]
        assert product.startswith("g0_product  tests/cpu/test_lowering_profile.py:") and end == ""

    def test_the_first_run_of_a_program_counts_only_alone(self, gpu, clock, rng, apart):
        """Its kernels are loaded between its steps."""
        f = ts.jit(lambda x: ts.exp(x), target="cuda")
        x = ts.tensor(rng.standard_normal((30, 30)).astype(np.float32))
        for calls in (1, 3):
            f = ts.jit(lambda x: ts.exp(x), target="cuda")
            with ts.debug.profile() as p:
                for _ in range(calls):
                    f(x)
            kernels = [r for r in p.launches.records if r.work.kind != "copy"]
            assert len(kernels) == max(1, calls - 1)
            assert len(p.kernels) == calls

    def test_launches_outside_of_functions(self, gpu, clock):
        x = Cupy(np.ones(200, np.float32))
        twice = fresh(double)
        with ts.debug.profile() as p:
            twice(x)
        (launch,) = (x for x in p.launches.records if x.work.kind != "copy")
        assert launch.work.kind == "kernel" and launch.work.name.startswith("double")
        assert launch.us > 0 and "double" in p.launches.table() and "<circle" not in p.html()

    def test_nothing_stays_behind(self, gpu, clock):
        """Events are freed, and a launch afterwards goes straight to the driver."""
        x, twice = Cupy(np.ones(100, np.float32)), fresh(double)
        twice(x)
        with ts.debug.profile():
            twice(x)
            assert clock.made == 3  # one to begin with, and two around the launch
        assert clock.freed == clock.made
        twice(x)
        assert clock.made == 3 and not module._watchers
        assert x.x[0] == 8.0

    def test_profiles_nest(self, gpu, clock):
        x, twice = Cupy(np.ones(100, np.float32)), fresh(double)
        with ts.debug.profile() as outer:
            twice(x)
            with ts.debug.profile() as inner:
                twice(x)
            twice(x)
        assert (len(outer.kernels), len(inner.kernels)) == (3, 1)
        assert clock.freed == clock.made

    def test_what_is_captured_does_not_run(self, gpu, clock):
        x, twice = Cupy(np.ones(100, np.float32)), fresh(double)
        twice(x)
        clock.capturing = libcuda.CAPTURE_STATUS_NONE + 1
        with ts.debug.profile() as p:
            twice(x)
        assert not p.kernels and clock.made == 0

    def test_the_interpreter_has_a_track_too(self, tmp_path):
        x = np.ones(200, np.float32)
        with ts.debug.profile() as p:
            double(x)
            with ts.debug.range("second"):
                add(x, x)
        events, names = kernel_events(p)
        assert [e["name"] for e in events] == ["double", "add"]
        assert all(e["dur"] > 0 for e in events)
        assert events[0]["ts"] + events[0]["dur"] <= events[1]["ts"]
        assert [n["args"]["name"] for n in names] == ["kernels on interpreter"]
        double(x)
        assert len(p.kernels) == 2  # only while the block is open
        text = p.chrome_trace(tmp_path / "trace.json")
        assert (tmp_path / "trace.json").read_text() == text
        (span,) = [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "range"]
        assert span["ts"] <= events[1]["ts"] <= span["ts"] + span["dur"]
