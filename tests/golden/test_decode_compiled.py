"""Attention of few queries as compiled for sm_90a: nothing spills, and a warp of a block has few
enough registers and bytes for three blocks of a multiprocessor or more."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from tessera import bf16
from tessera.kernels.decode_attention import (
    append_to_pages,
    combine_parts,
    decode_cluster,
    decode_many_pages,
    decode_many_rows,
    decode_pages,
    decode_plan,
    decode_rows,
    planned,
)
from tessera.numerics import as_type

C, T, P = 2, 1024, 4


def compiled(kernel, R, D, parts, count=None, **constants):
    q, k = np.zeros((C, R, D), bf16.numpy), np.zeros((C, T, D), bf16.numpy)
    out = np.zeros((parts, C, R, D), np.float32 if parts > 1 else bf16.numpy)
    lse = np.zeros((parts, C, R), np.float32) if parts > 1 else None
    plan = decode_plan(C, R, T, D)
    assert plan.kernel == kernel.__name__
    return tile_gpu.compiled(kernel, q, k, k, count, out, lse, 0.1, BM=plan.rows, BN=plan.keys,
                             target="sm_90a", **constants)


@pytest.mark.parametrize("D, parts", [(64, P), (96, 1), (128, 1), (128, P), (192, P), (256, P)])
def test_one_warp_multiplies_16_rows(D, parts):
    made = compiled(decode_rows, 4, D, parts)
    resources, sass = made.built.resources, made.built.sass()
    assert made.threads == 32 and not resources.spill_store_bytes and not made.built.warnings
    assert 3 * (made.emitted.shared_bytes + 1024) <= 228 * 1024
    step = 32 if D <= 128 else 16
    assert sass.count(" HMMA") == 2 * step * D // 128  # 16 x 8 x 16 each
    assert " LDGSTS" in sass and " STL" not in sass


@pytest.mark.parametrize("D, codes, page", [
    (64, False, 16), (96, False, 64), (128, False, 16), (128, False, 64), (192, False, 16),
    (256, False, 64), (64, True, 64), (96, True, 16), (128, True, 64), (192, True, 16)])
def test_keys_in_pages_are_read_ahead_too(D, codes, page):
    """The table adds few registers; codes are made wider on their way."""
    stored = as_type("fp8_e4m3").dtype.numpy if codes else bf16.numpy
    q, pool = np.zeros((C, 4, D), bf16.numpy), np.zeros((8, page, D), stored)
    plan = decode_plan(C, 4, T, D, codes=codes, page=page)
    assert page % plan.keys == 0 and plan.kernel == "decode_pages"
    out, lse = np.zeros((P, C, 4, D), np.float32), np.zeros((P, C, 4), np.float32)
    table, count = np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
    made = tile_gpu.compiled(planned(decode_pages, plan), q, pool, pool, table, count, out,
                             lse, 0.1, heads=2, BN=plan.keys, target="sm_90a")
    sass = made.built.sass()
    assert made.threads == 32 and not made.built.resources.spill_store_bytes
    assert 3 * (made.emitted.shared_bytes + 1024) <= 228 * 1024
    assert " LDGSTS" in sass and " STL" not in sass and " HMMA" in sass
    ring = 3 * 2 * plan.keys * D * bf16.numpy.itemsize  # three stages, whose places a table says
    assert codes or made.emitted.shared_bytes >= ring
    new = np.zeros((C, 4, D), stored)
    made = tile_gpu.compiled(append_to_pages, new, table, count, pool.reshape(4, 2, page, D),
                             target="sm_90a")
    assert not made.built.resources.spill_store_bytes


@pytest.mark.parametrize("D", [64, 128, 192])
def test_codes_are_read_ahead_too(D):
    q, keys = np.zeros((C, 4, D), bf16.numpy), np.zeros((C, T, D), as_type("fp8_e4m3").dtype.numpy)
    out, lse = np.zeros((P, C, 4, D), np.float32), np.zeros((P, C, 4), np.float32)
    plan = decode_plan(C, 4, T, D, codes=True)
    made = tile_gpu.compiled(planned(decode_rows, plan), q, keys, keys, None, out, lse, 0.1,
                             BM=plan.rows, BN=plan.keys, target="sm_90a")
    assert not made.built.resources.spill_store_bytes and " LDGSTS" in made.built.sass()


@pytest.mark.parametrize("stored, rule", [
    ("fp8_e5m2", {}), ("fp8_e4m3", {}), ("fp8_e4m3", {"cap": 30.0}),
    ("fp8_e5m2", {"count": np.zeros(1, np.int64)}),
    ("fp8_e4m3", {"spans": np.zeros((1, 2, 1), np.int32), "heads": C})])
def test_sixteen_blocks_of_codes_have_registers(stored, rule):
    """Of heads of 128, one query of each: what hides that codes are not brought ahead."""
    plan = decode_plan(C, 4, T, 128, codes=True)
    keys = np.zeros((C, T, 128), as_type(stored).dtype.numpy)
    q, lse = np.zeros((C, 4, 128), bf16.numpy), np.zeros((P, C, 4), np.float32)
    out, rule = np.zeros((P, C, 4, 128), np.float32), dict(rule)
    made = tile_gpu.compiled(planned(decode_rows, plan), q, keys, keys,
                             rule.pop("count", None), out, lse, 0.1, BM=plan.rows, BN=plan.keys,
                             target="sm_90a", **rule)
    used = made.built.resources
    assert plan.close * 32 * used.registers <= 65536 and not used.spill_store_bytes
    assert " VIMNMX" not in made.built.sass()  # NaN is as the instruction gives it
    assert plan.close * (made.emitted.shared_bytes + 1024) <= 228 * 1024
    assert decode_plan(C, 8, T, 128, codes=True, queries=2).close == 0


SOME = np.zeros(1, np.int64)


@pytest.mark.parametrize("D, S, causal, count", [
    (64, 8, True, SOME), (96, 1, False, SOME), (128, 1, False, None), (128, 8, True, None),
    (128, 8, True, SOME), (256, 1, False, None), (256, 8, True, SOME)])
def test_more_rows_are_multiplied_by_warpgroups(D, S, causal, count):
    made = compiled(decode_many_rows, 32, D, P, count, S=S, causal=causal)
    assert made.notes[0].startswith("matmuls by wgmma")
    assert not made.built.resources.spill_store_bytes and not made.built.warnings


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("stored, ahead", [("bf16", 1), ("fp8_e4m3", 0)])
def test_warps_of_a_cluster_share_columns(D, stored, ahead):
    """Each multiplies a quarter of the keys, and then of the values; no block is alone."""
    plan = decode_plan(C, 4, 512, D, groups=8)
    q, keys = np.zeros((C, 4, D), bf16.numpy), np.zeros((C, 512, D), as_type(stored).dtype.numpy)
    made = tile_gpu.compiled(planned(decode_cluster, plan), q, keys, keys, None, q, None, 0.1,
                             BN=plan.keys, P=plan.parts, ROWS=4, AHEAD=ahead, target="sm_90a")
    resources, sass = made.built.resources, made.built.sass()
    assert (plan.kernel, plan.parts, made.threads) == ("decode_cluster", 8, 128)
    assert not resources.spill_store_bytes and " STL" not in sass
    assert sass.count(" HMMA") == 2 * plan.keys * D // 128 // 4  # 16 x 8 x 16 each
    assert sass.count("UBLKPF") >= 2 * ahead and " UCGABAR_WAIT" in sass


def streamed(kernel, plan, q, keys, *before, lse=True, **constants):
    """By warpgroups that specialise: two blocks of a multiprocessor, and the next launch's begin
    while these end. Keys and values leave L2 first."""
    (C, R, D), P = q.shape, plan.parts
    out = np.zeros((P, C, R, D), np.float32 if lse else bf16.numpy)
    made = tile_gpu.compiled(planned(kernel, plan), q, keys, keys, *before, out,
                             np.zeros((P, C, R), np.float32) if lse else None, 0.1, BM=plan.rows,
                             BN=plan.keys, target="sm_90a", **constants)
    used = made.built.resources
    assert made.notes[0].startswith("matmuls by wgmma, loads by TMA, warpgroups specialised")
    assert made.built.kernel.dependent and "griddepcontrol.launch_dependents" in made.built.ptx
    assert made.built.ptx.count(".L2::cache_hint") == 2 * -(-D // 64)
    assert not used.spill_store_bytes and not made.built.warnings
    assert 2 * made.threads * used.registers <= 65536
    assert 2 * (made.emitted.shared_bytes + 1024) <= 228 * 1024
    assert made.emitted.shared_bytes >= plan.slots * 2 * plan.keys * D * bf16.numpy.itemsize


LENGTHS = np.zeros((1, 2, 1), np.int32)


@pytest.mark.parametrize("D, R, rule", [
    (128, 4, {}), (64, 4, {}), (32, 1, {}), (80, 4, {}), (96, 8, {}), (128, 4, {"count": SOME}),
    (128, 32, {"count": SOME, "S": 8, "causal": True}), (128, 8, {"S": 2, "causal": True}),
    (128, 4, {"window": 2000, "cap": 30.0}), (64, 4, {"window": 2000, "count": SOME}),
    (128, 4, {"spans": LENGTHS, "heads": 2})])
def test_a_stream_of_keys(D, R, rule):
    """Many keys of a block, or many rows."""
    plan, rule = decode_plan(C, R, 1 << 17, D, streamed=True), dict(rule)
    assert (plan.kernel, plan.parts) == ("decode_many_rows", 64)
    q, keys = np.zeros((C, R, D), bf16.numpy), np.zeros((C, 1 << 17, D), bf16.numpy)
    streamed(decode_many_rows, plan, q, keys, rule.pop("count", None), **rule)


def test_a_stream_of_keys_in_one_part():
    plan = decode_plan(128, 4, 1024, 128, streamed=True)
    assert (plan.kernel, plan.parts) == ("decode_many_rows", 1)
    q, keys = np.zeros((128, 4, 128), bf16.numpy), np.zeros((128, 1024, 128), bf16.numpy)
    streamed(decode_many_rows, plan, q, keys, None, lse=False)


@pytest.mark.parametrize("D, page", [(128, 64), (64, 256), (64, 64), (32, 192)])
def test_a_stream_of_pages(D, page):
    plan = decode_plan(128, 4, 8192, D, page=page, streamed=True)
    assert plan.kernel == "decode_many_pages" and page % plan.keys == 0
    q, pool = np.zeros((128, 4, D), bf16.numpy), np.zeros((2048, page, D), bf16.numpy)
    table, count = np.zeros((16, 512), np.int32), np.zeros(16, np.int32)
    streamed(decode_many_pages, plan, q, pool, table, count, lse=False, heads=8)


def test_parts_are_weighed_by_a_kernel_that_is_there_when_they_end():
    """It begins early and waits before its first load; sm_80 has no such launch."""
    parts, lse = np.zeros((33, 8, 128), np.float32), np.zeros((33, 8), np.float32)
    out = np.zeros((8, 128), bf16.numpy)
    made = tile_gpu.compiled(combine_parts, parts, lse, out, target="sm_90a")
    sass = made.built.sass()
    assert made.built.kernel.dependent and sass.index(" ACQBULK") < sass.index(" LDG")
    # Begins early itself, and lets these begin. Its first keys may be asked for before that, unless
    # memory says how many there are.
    before = compiled(decode_rows, 4, 128, P, AHEAD=1).built
    assert before.sass().index("UBLKPF") < before.sass().index(" ACQBULK")
    assert "UBLKPF" not in compiled(decode_rows, 4, 128, P, SOME, AHEAD=1).built.sass()
    assert "griddepcontrol.launch_dependents" in before.ptx and before.kernel.dependent
    assert before.sass().index(" ACQBULK") < before.sass().index(" LDG")
    older = tile_gpu.compiled(combine_parts, parts, lse, out, target="sm_80")
    assert not older.built.kernel.dependent and "griddepcontrol" not in older.built.ptx
