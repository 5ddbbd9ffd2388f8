"""Rows that machine code shows: kernels compiled for GPUs, on a machine without one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from kernels.build import build
from ptx_harness import require_compiler

require_compiler()

TARGETS = ["sm_80", "sm_90a"]
MODULE_SHARED = re.compile(r"\.shared \.align (\d+)")


def ptx_of(kernel: Any, target: str = "sm_80", **sizes: int) -> str:
    return kernel.inspect_ir("ptx", target=target, **sizes)


def count(word: str, ptx: str) -> int:
    return len(re.findall(word, ptx))


@pytest.mark.row("TILE-17")
@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_is_aligned(target):
    k = build("""@kernel
def k(x: Tensor["n", f32]):
    first = tile.alloc_shared((3,), f32)
    s = tile.alloc_shared((128,), f32, alignment=16)
    t = tile.local_id()
    if t < 3:
        first[t] = 1.0
    s[t] = x[t]
    tile.barrier()
    x[t] = s[127 - t] + first[0]
""")["k"]
    ptx = ptx_of(k, target)
    assert MODULE_SHARED.findall(ptx) and min(map(int, MODULE_SHARED.findall(ptx))) >= 16
    assert "alignment=16" in k.inspect_ir()
    # The second buffer begins behind 12 bytes, at the next multiple of 16.
    assert "st.shared.b32" in ptx and k.shared_bytes >= 16 + 128 * 4


@pytest.mark.row("TILE-22", "TILE-24", "TILE-25")
@pytest.mark.parametrize("target", TARGETS)
def test_copies_are_asynchronous(target):
    ptx = ptx_of(seeds.memory_hierarchy_example, target)
    assert count(r"cp\.async\.c[ag]\.shared\.global", ptx)
    assert count(r"cp\.async\.commit_group", ptx) == count(r"cp\.async\.wait_group\s+0;", ptx) == 1
    both = ptx_of(seeds.corrected_gemm, target)
    assert count(r"cp\.async\.wait_group\s+0;", both) == 2


@pytest.mark.row("TILE-26")
@pytest.mark.parametrize("target", TARGETS)
def test_a_barrier_is_the_barrier_of_the_block(target):
    assert count(r"bar\.sync|barrier\.(cta\.)?sync", ptx_of(seeds.cooperative_reduction, target))
    assert not count(r"bar\.sync|barrier", ptx_of(seeds.saxpy, target))


@pytest.mark.row("TILE-27")
@pytest.mark.parametrize("dtype, access", [("bf16", "v2"), ("f32", "v4")])
def test_a_vector_is_one_access(dtype, access):
    k = build(f"""@kernel
def k(src: Tensor["M", 512, ts.{dtype}], dst: Tensor["M", 512, ts.{dtype}]):
    tile.store_vector(dst[tile.group_id()], tile.load_vector(src[tile.group_id()], width=4))
""")["k"]
    ptx = ptx_of(k)
    assert count(rf"ld\.global[\w.:]*\.{access}\.b32", ptx) == 1 == count(r"ld\.global", ptx)
    assert count(rf"st\.global[\w.:]*\.{access}\.b32", ptx) == 1 == count(r"st\.global", ptx)


PRODUCT = """@kernel
def k(A: Tensor["M", "K", ts.{0}], B: Tensor["N", "K", ts.{0}], C: Tensor["M", "N", ts.{1}]):
    acc = tile.zeros((64, 64), ts.{1})
    for k in range(0, K, 64):
        a, b = tile.load(A[tile_m:tile_m+64, k:k+64]), tile.load(B[tile_n:tile_n+64, k:k+64])
        acc = tile.dot(a, b.T, acc{2})
    C[tile_m:tile_m+64, tile_n:tile_n+64] = acc
"""


@pytest.mark.row("TILE-63")
@pytest.mark.parametrize("dtype, sums, options, target", [
    ("bf16", "f32", "", "sm_80"), ("f16", "f32", "", "sm_80"), ("int8", "int32", "", "sm_80"),
    ("f32", "f32", ", precision='tf32'", "sm_80"), ("fp8_e4m3", "f32", "", "sm_89"),
    ("bf16", "f32", "", "sm_90a")])
def test_matmuls_run_on_tensor_cores(dtype, sums, options, target):
    k = build(PRODUCT.format(dtype, sums, options))["k"]
    assert count(r"\b(mma\.sync|wgmma\.mma_async)", ptx_of(k, target))
    assert count(r"\b[HIQ]?G?MMA\b", k.inspect_ir("sass", target=target))


@pytest.mark.row("TILE-63")
def test_matmuls_in_f32_do_not():
    k = build(PRODUCT.format("f32", "f32", ", precision='f32'"))["k"]
    ptx = ptx_of(k)
    assert not count(r"mma\.sync|wgmma", ptx) and count(r"\bfma", ptx)


@pytest.mark.row("TILE-65")
@pytest.mark.parametrize("dtype, vector, width", [("bf16", 8, "v4.b32"), ("f32", 4, "v4.b32")])
def test_a_vector_hint_is_the_width_of_the_access(dtype, vector, width):
    k = build(f"""@kernel
def k(x: Tensor["M", 1024, {dtype}], y: Tensor["M", 1024, {dtype}]):
    y[tile_m:tile_m+4, :] = tile.load(x[tile_m:tile_m+4, :], vector={vector})
""")["k"]
    loads = re.findall(r"ld\.global\S*?\.(v\d\.b32|b32|[bu]16)\s", ptx_of(k))
    assert loads and set(loads) == {width}


@pytest.mark.row("SCHED-05")
@pytest.mark.parametrize("vector, width", [(1, "b32"), (2, "v2.b32"), (4, "v4.b32")])
def test_a_schedules_vector_is_the_width_of_every_access(vector, width):
    k = build("""@kernel
def k(x: Tensor["M", 1024, f32], y: Tensor["M", 1024, f32]):
    y[tile_m:tile_m+4, :] = tile.load(x[tile_m:tile_m+4, :]) * 2.0
""")["k"].with_schedule(ts.Schedule().vector(vector))
    accesses = re.findall(r"(ld|st)\.global\S*?\.(v\d\.b32|b32)\s", ptx_of(k))
    assert set(accesses) == {("ld", width), ("st", width)}


@pytest.mark.row("TILE-19")
def test_a_register_is_no_memory():
    k = build("""@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    r = tile.alloc_register(f32)
    if i < n:
        r = x[i] * 2.0
        x[i] = r + 1.0
""")["k"]
    pressure = ts.debug.register_pressure(k, np.ones(4, np.float32), target="sm_80")
    assert k.shared_bytes == 0 and "spills     none" in str(pressure)
    sass = k.inspect_ir("sass", target="sm_80")
    assert not count(r"\b(LDL|STL|LDS|STS)\b", sass)


@pytest.mark.row("KERN-06")
def test_a_scalar_is_a_parameter_of_its_type():
    assert count(r"\.param \.f32", ptx_of(seeds.saxpy)) == 1
