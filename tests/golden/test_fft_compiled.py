"""Kernels of Fourier transforms as compiled: they keep 16 or 32 points in registers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.launch_forms import emitted_of
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import compile_function
from tessera.tile.cuda.ptx_text import opcode_counts

require_compiler()


def convolved(x: Any, re: Any, im: Any) -> Any:
    a, b = ts.rfft(x)
    return ts.irfft((a * re - b * im, a * im + b * re))


CASES = {
    "lines of 4096": (lambda a, b: ts.fft((a, b)), ((4, 4096), (4, 4096))),
    "lines of 16384": (lambda a, b: ts.fft((a, b)), ((4, 16384), (4, 16384))),
    "lines of 2^15": (lambda a, b: ts.fft((a, b)), ((3, 1 << 15),) * 2),
    "longer columns": (lambda a, b: ts.fft((a, b)), ((1, 1 << 20), (1, 1 << 20))),
    "planes": (lambda a, b: ts.fft2((a, b)), ((2, 256, 1024),) * 2),
    "two launches": (lambda a, b: ts.fft((a, b), axis=0), ((1 << 18, 32),) * 2),
    "real lines": (ts.rfft, ((4, 2048),)),
    "real lines of 1024": (ts.rfft, ((64, 1024),)),
    "short real lines": (ts.rfft, ((64, 256),)),
    "back to real lines": (lambda a, b: ts.irfft((a, b)), ((4, 1025), (4, 1025))),
    "real lines of 32768": (ts.rfft, ((4, 32768),)),
    "back to real lines of 2^14": (lambda a, b: ts.irfft((a, b)), ((4, (1 << 13) + 1),) * 2),
    "long real lines": (ts.rfft, ((2, 1 << 18),)),
    "back to long real lines": (lambda a, b: ts.irfft((a, b)), ((2, (1 << 17) + 1),) * 2),
    "lines of 2^11": (lambda a, b: ts.fft((a, b)), ((64, 2048),) * 2),
    "lines of 1000": (lambda a, b: ts.fft((a, b)), ((4, 1000),) * 2),
    "columns of 480": (lambda a, b: ts.fft((a, b), axis=0), ((480, 64),) * 2),
    "lines of 6144": (lambda a, b: ts.fft((a, b)), ((4, 6144),) * 2),
    "back to real lines of 400": (lambda a, b: ts.irfft((a, b)), ((4, 201),) * 2),
    "convolution": (convolved, ((4, 2048), (1025,), (1025,))),
}


@functools.cache
def compiled(name: str) -> list[tuple[Any, Any, Any]]:
    """What is compiled for each launch, its threads and its schedule."""
    fn, shapes = CASES[name]
    xs = [ts.tensor(np.zeros(s, np.float32)) for s in shapes]
    calls = [g.attr("call") for g in CudaProgram(ts.jit(fn).graph(*xs), "sm_90a").plan.groups]
    return [(compile_function(c.work.function, c.work.lanes, target="sm_90a",
                              schedule=c.call.kernel.schedule), c.work, c.call.kernel.schedule)
            for c in calls]


def test_a_pass_that_is_counted_and_one_that_waits() -> None:
    """What the first wrote is released, and the second acquires it."""
    ((made, _, _),) = compiled("lines of 2^15")
    found = opcode_counts(made.built.ptx)
    assert found["red.release.gpu.global.add.u32"] == 1
    assert found["atom.acq_rel.gpu.global.add.u32"] == 1


@pytest.mark.parametrize(("name", "calls", "apart"), [
    ("real lines of 32768", {"load_x": 54, "store_yr": 66}, "store_yr"),  # 22 loads are of angles
    ("real lines of 1024", {"load_x": 30}, ""),  # 14 of angles
    ("back to real lines of 2^14", {"store_y": 32}, ""),
    ("lines of 1000", {"load_xr": 40, "store_yr": 20}, ""),  # 20 loads are of angles
    ("back to long real lines", {"store_y": 64, "load_y": 32}, "")])
def test_points_move_in_pairs(name: str, calls: dict[str, int], apart: str) -> None:
    """All 32 real ones of a thread, and those between both passes back to a long line; points of
    two butterflies side by side where rows of others would begin within 32 bytes."""
    fn, shapes = CASES[name]
    xs = [ts.tensor(np.zeros(s, np.float32)) for s in shapes]
    (step,) = CudaProgram(ts.jit(fn).graph(*xs), "sm_90a").steps
    source = emitted_of(step, parse_target("sm_90a")).source
    at_once = "".join(line for line in source.splitlines() if "_pair('global', 'f32', 2)" in line)
    for call, count in calls.items():
        assert source.count(f" {call}(") == count
        assert (f"{call} = use(" in at_once) == (call != apart)


@pytest.mark.parametrize("name", ["real lines", "real lines of 1024"])
def test_rows_that_begin_anywhere_are_written_by_the_copy_engine(name: str) -> None:
    """Real and imaginary parts, but for what lies in front of whole sectors and behind."""
    ((made, _, _),) = compiled(name)
    found = opcode_counts(made.built.ptx)
    assert sum(n for k, n in found.items() if k.startswith("cp.async.bulk.global.shared")) == 2
    assert sum(n for k, n in found.items() if k.startswith("st.global")) == 4


@pytest.mark.parametrize("name", CASES)
def test_registers(name: str) -> None:
    for made, work, schedule in compiled(name):
        r = made.built.resources
        many = dict(schedule.extra).get("RESIDENT", 1) if schedule else 1
        assert not r.spill_store_bytes, made.notes
        assert r.registers * work.lanes * many <= 65536
        assert f".minnctapersm {many}" in made.built.ptx
        assert many == 1 or (made.built.kernel.shared_bytes + r.shared_bytes + 1024) * many <= \
            parse_target("sm_90a").generation.shared_bytes
