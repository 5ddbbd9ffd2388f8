"""Rows about how data is moved: widths of accesses, buffers of pipelines, boxes asked for ahead.

Compiled for GPUs, on a machine without one."""

from __future__ import annotations

import re

import numpy as np
import pytest

import emulator
import tessera as ts
import tile_gpu
from kernels.build import build
from ptx_harness import require_compiler
from tessera.errors import TesseraError
from tessera.numerics import decode, find_dtype
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import lower
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.ir.ir import Op, walk
from tessera.tile.ir.printing import print_ir

COPY = """@kernel
def k(x: Tensor["M", {1}, {0}], y: Tensor["M", {1}, {0}]):
    y[tile_m:tile_m+4, :] = tile.load(x[tile_m:tile_m+4, :]{2})
"""
WIDTHS = {1: {"bf16": "u16", "f32": "b32"}, 2: {"bf16": "b32", "f32": "v2.b32"},
          4: {"bf16": "v2.b32", "f32": "v4.b32"}, 8: {"bf16": "v4.b32"}}


def accesses(kernel, what="ld", target="sm_80", space="global"):
    """The widths of all accesses of a kernel."""
    ptx = kernel.inspect_ir("ptx", target=target)
    return set(re.findall(rf"\b{what}\.{space}\S*?\.((?:v\d\.)?[bu]\d+)\s", ptx))


def notes(kernel, target="sm_80"):
    return [line for line in kernel.inspect_ir("target", target=target).splitlines()
            if line.startswith("#") and "asked for" in line]


# --- widths -------------------------------------------------------------------------------------
@pytest.mark.row("TILE-64", "TILE-65")
@pytest.mark.parametrize("dtype, vector", [(d, v) for v, kinds in WIDTHS.items() for d in kinds])
@pytest.mark.parametrize("how", ["load", "schedule"])
def test_a_width_that_is_asked_for(dtype, vector, how):
    require_compiler()
    said = f", vector={vector}" if how == "load" else ""
    k = build(COPY.format(dtype, 1024, said))["k"]
    if how == "schedule":
        k = k.with_schedule(ts.Schedule(vector=vector))
        assert accesses(k, "st") == {WIDTHS[vector][dtype]}
    assert accesses(k) == {WIDTHS[vector][dtype]} and not notes(k)


@pytest.mark.row("TILE-64")
@pytest.mark.parametrize("columns, dtype, width", [
    (1024, "bf16", "v4.b32"), (1028, "bf16", "v2.b32"), (1026, "bf16", "b32"),
    (1025, "bf16", "u16"), (1024, "f32", "v4.b32"), (1022, "f32", "v2.b32")])
def test_a_width_is_inferred(columns, dtype, width):
    require_compiler()
    assert accesses(build(COPY.format(dtype, columns, ""))["k"]) == {width}
    k = build(COPY.format(dtype, columns, ", vector=4"))["k"]
    narrow = {"u16", "b32"} if dtype == "bf16" else {"v2.b32"}
    if width in narrow:  # what is not aligned is not done, and said
        assert accesses(k) == {width} and "no more are surely aligned" in notes(k)[0]


@pytest.mark.row("TILE-64")
def test_the_schedule_reports_the_width(rng):
    k = build("""@kernel
def k(x: Tensor["M", "N", bf16], y: Tensor["M", "N", bf16]):
    T = tile.context()
    y[tile_m:tile_m+4, 0:64] = tile.load(x[tile_m:tile_m+4, 0:64], vector=T.vector)
""")["k"]
    for columns, vector in ((64, 8), (60, 4), (62, 2), (63, 1)):
        x = ts.zeros((8, columns), "bf16")
        assert f"('vector', {vector})" in str(k.lower(x, x))
        assert k.with_schedule(ts.Schedule(vector=2)).schedule.vector == 2


@pytest.mark.row("TILE-64")
@pytest.mark.parametrize("vector, dtype, text", [
    (3, "f32", "1, 2, 4, 8 or 16"), (8, "f32", "32 bytes, an access has at most 16"),
    (16, "bf16", "an access has at most 16"), (0, "f32", "1, 2, 4, 8 or 16")])
def test_a_width_that_does_not_exist(vector, dtype, text):
    k = build(COPY.format(dtype, 1024, f", vector={vector}"))["k"]
    with pytest.raises(TesseraError, match=text):
        k(ts.zeros((8, 1024), dtype), ts.zeros((8, 1024), dtype))


def test_the_width_of_shared_accesses():
    require_compiler()
    for vector, width in ((1, "b32"), (2, "v2.b32"), (4, "v4.b32")):
        k = build(f"""@kernel
def k(x: Tensor["M", 256, f32], y: Tensor["M", 256, f32]):
    s = tile.alloc_shared((8, 256), f32)
    tile.cp_async(s, x[tile_m:tile_m+8, :])
    tile.barrier()
    y[tile_m:tile_m+8, :] = tile.load(s, vector={vector})
""")["k"]
        assert accesses(k, space="shared") == {width}


# --- columns of a matrix: no two elements are neighbours -----------------------------------------
@pytest.mark.parametrize("body", [
    "y[:, 1] = tile.load(x[:, 3]) * 2.0",
    "s = tile.alloc_shared((256,), f32)\n    tile.cp_async(s, x[:, 3])\n    tile.barrier()\n"
    "    y[:, 0] = tile.load(s)",
    "s = tile.alloc_shared((4, 256), f32)\n    s[1, :] = tile.load(x[:, 3])\n    tile.barrier()\n"
    "    y[:, 2] = tile.load(s[1])"])
@pytest.mark.parametrize("lanes", [32, 256])
def test_columns(body, lanes, rng):
    k = build(f"@kernel\ndef k(x: Tensor[256, 8, f32], y: Tensor[256, 3, f32]):\n    {body}\n")["k"]
    emulator.compare(k, rng.standard_normal((256, 8)).astype(np.float32),
                          np.zeros((256, 3), np.float32), lanes=lanes)


# --- pipelines ----------------------------------------------------------------------------------
GEMM = """@kernel
def k(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32]):
    acc = tile.zeros((64, 64))
    for k in range(0, K, 32):
        acc = tile.dot(tile.load(A[tile_m:tile_m+64, k:k+32]),
                       tile.load(B[k:k+32, tile_n:tile_n+64]), acc)
    C[tile_m:tile_m+64, tile_n:tile_n+64] = acc
"""
STAGE_BYTES = 2 * 64 * 32 * 2  # of A and of B


def staged(stages, rng):
    """(function after lowering, what it computes)"""
    k = build(GEMM)["k"]
    A, B = (ts.tensor(rng.integers(-8, 9, s).astype(np.float32), "bf16")
            for s in ((70, 200), (200, 65)))  # sums that are exact in any order
    args = (A, B, np.zeros((70, 65), np.float32))
    bound, function, chosen, lanes, _, _ = tile_gpu.prepare(k, args, {}, None, 128)
    function = lower(function, lanes, tile_gpu.facts_of(function, bound), parse_target("sm_80"),
                     stages)
    with ts.config.scope(debug=True):
        interpret(function, bound, chosen, lanes, "k")
    return function, decode(bound.values["C"].flat, ts.f32)


@pytest.mark.row("TILE-62")
def test_loops_of_loads_become_pipelines():
    """Any number of buffers gives the same: only when a box is copied differs."""
    results = []
    for stages in (1, 2, 3, 4):
        function, C = staged(stages, np.random.default_rng(5))
        results.append(C)
        rings = [n.attr["stages"] for n in walk(function.body) if isinstance(n, Op)
                 and n.name == "allocate"]
        text = print_ir(function)
        assert rings == [stages, stages] and ("cp_async" in text) and (
            stages == 1 or f"shared<{stages} of 64x32 x bf16" in text)
        assert not any(n.name == "load_tile" for n in walk(function.body) if isinstance(n, Op))
    assert results[0].any() and all(np.array_equal(results[0], r) for r in results)


@pytest.mark.row("TILE-62", "TILE-66")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_are_buffers(stages, rng):
    k = build(GEMM)["k"].with_schedule(ts.Schedule(stages=stages, warps=4))
    A, B = (ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16")
            for s in ((64, 96), (96, 64)))
    made = emulator.compare(k, A, B, np.zeros((64, 64), np.float32), rtol=1e-4, atol=1e-4,
                                 schedule=ts.Schedule(stages=stages))
    assert made.emitted.shared_bytes == stages * STAGE_BYTES


@pytest.mark.row("TILE-66")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_are_shared_memory_of_the_compiled_kernel(stages, rng):
    require_compiler()
    k = build(GEMM)["k"].with_schedule(ts.Schedule(stages=stages, warps=4))
    A, B = (ts.zeros(s, "bf16") for s in ((64, 96), (96, 64)))
    made = tile_gpu.compiled(k, A, B, np.zeros((64, 64), np.float32), target="sm_80")
    assert made.emitted.shared_bytes == stages * STAGE_BYTES
    assert k.schedule.stages == stages


# --- boxes that are asked for ahead --------------------------------------------------------------
AHEAD = """@kernel
def k(x: Tensor["M", "N", {0}], y: Tensor["M", "N", {0}]):
    for c in range(0, N, {1}):
        y[tile_m:tile_m+8, c:c+{1}] = tile.load(x[tile_m:tile_m+8, c:c+{1}]{2})
"""


@pytest.mark.row("TILE-46")
def test_prefetch_asks_for_the_box_of_a_later_iteration():
    require_compiler()
    for said, number in (("", 0), (", prefetch=1", 0), (", prefetch=3", 1)):
        ptx = build(AHEAD.format("bf16", 64, said))["k"].inspect_ir("ptx", target="sm_80")
        assert len(re.findall(r"prefetch\.global\.L2", ptx)) == number  # 8 lines, 8 lanes


@pytest.mark.parametrize("columns", [64, 100, 300])
@pytest.mark.parametrize("dtype, width", [("f32", 64), ("bf16", 128), ("int8", 32), ("f64", 20)])
def test_prefetch_stays_inside_and_covers_the_box(columns, dtype, width, rng, monkeypatch):
    """Each line of the later box that begins in the tensor is asked for, and no other."""
    seen: set[int] = set()

    def call(self, instruction, *args):
        if instruction.name != "prefetch_L2":
            return before(self, instruction, *args)
        at = int(np.asarray(args[0]).reshape(-1)[0])
        if self.on[0]:
            assert self.memory.valid[at], "outside of the arrays"
            seen.add(at)
        return None

    before = emulator.Thread.call
    monkeypatch.setattr(emulator.Thread, "call", call)
    x, y = (ts.zeros((11, columns), dtype) for _ in range(2))
    k = build(AHEAD.format(f"ts.{dtype}", width, ", prefetch=2"))["k"]
    emulator.compare(k, x, y, lanes=32, lockstep=False)
    size = find_dtype(dtype).bits // 8
    first = emulator.GlobalMemory({"x": np.zeros(1)}).pointers["x"]
    wanted = {first + (row * columns + start + i) * size
              for row in range(11) for start in range(width, columns, width)
              for i in range(0, min(width, columns - start), 128 // size)}
    assert seen == wanted


def test_loads_of_no_loop_have_nothing_ahead(rng):
    """What a place depends on is not known before its turn: no box is asked for."""
    k = build("""@kernel
def k(x: Tensor["n", f32], at: Tensor["m", i32], y: Tensor["m", 4, f32]):
    for i in range(0, m):
        j = at[i]
        y[i, :] = tile.load(x[j:j+4], prefetch=2)
    y[0, :] = tile.load(x[0:4], prefetch=2)
""")["k"]
    made = emulator.compare(k, rng.standard_normal(20).astype(np.float32),
                                 rng.integers(0, 16, 5).astype(np.int32),
                                 np.zeros((5, 4), np.float32), lanes=32)
    assert not any(n.name == "prefetch_box" for n in walk(made.function.body) if isinstance(n, Op))
