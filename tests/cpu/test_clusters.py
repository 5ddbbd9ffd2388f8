"""Blocks of a cluster that share what all of them read."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import hopper_programs as kernels
import tessera as ts
from hopper_lowering import Known, program, run
from tessera import bf16, f32, stdlib
from tessera.kernels.gemm import LAYOUTS
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import Op, walk
from tolerance import assert_close

PAIRS = ts.Schedule(cluster=2)
FACTS = Known(frozenset({"A0", "A1", "B0", "B1", "M", "N"}), frozenset("ABDP"))


def gemm(rng, layout, M, N, K, schedule=PAIRS, parts=1, block=(64, 128)):
    """The program, what it wrote, and the product in f64."""
    shapes = (M, K) if layout[0] == "n" else (K, M), (K, N) if layout[1] == "n" else (N, K)
    a, b = (rng.standard_normal(s).astype(bf16.numpy) for s in shapes)
    how = {"layout": layout, "BM": block[0], "BN": block[1]}
    grid = (-(-M // block[0]), -(-N // block[1]))
    if parts == 1:
        kernel, args = stdlib.gemm.kernels["gemm_whole"], (
            a, b, np.full((M, N), np.nan, bf16.numpy), f32)
    else:
        kernel, grid = stdlib.gemm.kernels["gemm_parts"], (*grid, parts)
        args = (a, b, np.full((parts, M, N), np.nan, np.float32), 128, f32)
    made = program(kernel, *args, facts=FACTS, schedule=schedule, **how)
    run(kernel, made, grid, *args, blocks=4, **how)
    want = stdlib.gemm.record.reference(a.astype("f8"), b.astype("f8"), **LAYOUTS[layout])
    return made, np.asarray(args[2], np.float64), want


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M", [64, 320, 384])
def test_tiles_are_as_many_as_whole_clusters_have(layout, M, groups, rng):
    """Tiles beyond the last read zeros and write nothing."""
    made, got, want = gemm(rng, layout, M, 272, 336, PAIRS.with_cluster(groups))
    assert made.pipeline.cluster == groups
    assert_close(got, want, "bf16", n=336)


def test_parts_of_k(rng):
    made, got, want = gemm(rng, "nt", 192, 272, 336, parts=3)
    assert made.pipeline.cluster == 2
    assert_close(got.sum(0), want, "bf16", n=336)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_bring_a_share_of_what_does_not_depend_on_the_rows(layout, rng):
    made, _, _ = gemm(rng, layout, 128, 128, 64)
    (ring,) = made.rings
    a, b = ring.loads
    assert (a.blocks, b.blocks, ring.blocks) == (1, 2, 2)
    assert prod(a.panel_box) * 2 == a.panel_bytes
    assert prod(b.panel_box) * 2 * 2 == b.panel_bytes and b.panel_box[b.row_axis] == b.shape[0] // 2
    drains = [n for n in walk(made.function.body) if isinstance(n, Op) and n.name == "ring_drain"]
    assert [n.attr["ring"] for n in drains] == [ring.name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("N", [128, 272, 328])
def test_tiles_of_more_rows_than_columns_share_their_rows(N, groups, layout, rng):
    """Clusters lie along the columns of tiles, and there may be some beyond the last."""
    made, got, want = gemm(rng, layout, 200, N, 136, PAIRS.with_cluster(groups), block=(192, 128))
    (ring,) = made.rings
    a, b = ring.loads
    assert made.pipeline.cluster == groups and (a.blocks, b.blocks) == (groups, 1)
    assert_close(got, want, "bf16", n=136)


@pytest.mark.parametrize("block, shared", [
    ((192, 128), "A"), ((128, 128), "B"), ((192, 192), "B"), ((192, 64), "B"), ((64, 128), "B")])
def test_which_operand_is_shared(block, shared, rng):
    made, _, _ = gemm(rng, "nt", 64, 64, 64, block=block)
    assert [x.tensor for r in made.rings for x in r.loads if x.blocks == 2] == [shared]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_a_head_share_its_keys(causal):
    """Where tiles take as many iterations: under a mask they take numbers from a counter."""
    q = np.zeros((1, 256, 64), bf16.numpy)
    made = program(kernels.attention, q, q, q, q, 1.0, causal=causal, schedule=PAIRS)
    shared = {base_name(x.name) for r in made.rings for x in r.loads if x.blocks == 2}
    assert (made.pipeline.cluster, shared) == ((1, set()) if causal else (2, {"k", "v"}))
