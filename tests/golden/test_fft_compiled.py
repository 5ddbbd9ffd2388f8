"""Kernels of Fourier transforms as compiled: they keep 16 points in registers. Where two groups of
512 threads share a multiprocessor, four words of a thread may be in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera.graph.cuda import CudaProgram
from tessera.kernels.fft import RESIDENT
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import compile_function

require_compiler()


def convolved(x: Any, re: Any, im: Any) -> Any:
    a, b = ts.rfft(x)
    return ts.irfft((a * re - b * im, a * im + b * re))


CASES = {
    "lines of 4096": (lambda a, b: ts.fft((a, b)), ((4, 4096), (4, 4096))),
    "two passes": (lambda a, b: ts.fft((a, b)), ((1, 1 << 18), (1, 1 << 18))),
    "real lines": (ts.rfft, ((4, 2048),)),
    "convolution": (convolved, ((4, 2048), (1025,), (1025,))),
}


@pytest.mark.parametrize("name", CASES)
def test_registers(name: str) -> None:
    fn, shapes = CASES[name]
    xs = [ts.tensor(np.zeros(s, np.float32)) for s in shapes]
    program = CudaProgram(ts.jit(fn).graph(*xs), "sm_90a")
    for group in program.plan.groups:
        work = group.attr("call").work
        schedule = group.attr("call").call.kernel.schedule
        made = compile_function(work.function, work.lanes, target="sm_90a", schedule=schedule)
        r = made.built.resources
        many = RESIDENT.get(work.lanes, 1)
        assert r.spill_store_bytes <= 16 * (many > 1), made.notes
        assert r.registers * work.lanes * many <= 65536
        assert f".minnctapersm {many}" in made.built.ptx
        assert many == 1 or (made.built.kernel.shared_bytes + r.shared_bytes + 1024) * many <= \
            parse_target("sm_90a").generation.shared_bytes
