"""Staged matmuls on the interpreter: the same results, and no race under its detector."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
import tile_gpu
from matmul_kernels import ATTENTION, CHAIN, NESTED, Gemm, array, make
from tessera import config, tile
from tessera.errors import TesseraError
from tessera.numerics import decode
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.find_staged_loads import find_feeds
from tessera.tile.cuda.lower.stage_loads import Room, stage_matmul_loads
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.ir import For, Op, walk
from tessera.tile.passes import verify

KIB = 1024
SM80 = GENERATIONS["sm_80"]


def staged(kernel, args, groups, lanes=128, stages=None, room=163 * KIB, change=None,
           tolerance=1e-4, warps=False, **kwargs):
    """Asserts that the staged function leaves what the kernel does; returns it."""
    made = []
    for lowered in (False, True):
        bound, function, chosen, lanes, _, _ = tile_gpu.prepare(
            kernel, copy.deepcopy(args), kwargs, groups, lanes)
        if lowered:
            function = stage_matmul_loads(function, SM80, Room(room, stages, warps=warps))
            verify(function)
            function = change(function) if change else function
        with config.scope(debug=True):
            interpret(function, bound, chosen, lanes, kernel.__name__)
        made.append([decode(m.flat, m.numeric.dtype) for m in bound.values.values()
                     if isinstance(m, Memory)])
    for plain, ring in zip(*made, strict=True):
        np.testing.assert_allclose(plain, ring, rtol=tolerance, atol=tolerance)  # sums in parts
    return function


def ops(function, name):
    return [n for n in walk(function.body) if isinstance(n, Op) and n.name == name]


@given(st.integers(0, 150), st.integers(1, 70), st.integers(1, 70), st.integers(1, 5),
       st.sampled_from(["NT", "NN", "TN", "TT"]), st.integers(0, 2**32 - 1))
def test_any_shape_gives_the_same(K, M, N, stages, orders, seed):
    gemm = Gemm(orders=orders, block=(32, 32, 16))
    args = gemm.arguments(np.random.default_rng(seed), M, N, K)
    function = staged(gemm.kernel, args, gemm.groups(M, N), stages=stages)
    assert not ops(function, "load_tile")
    assert len(ops(function, "cp_async")) == 2 * stages


def test_room_decides_how_many_stages(rng):
    gemm = Gemm(block=(128, 128, 64))
    args = gemm.arguments(rng, 128, 128, 64)
    for room, stages in ((227, 4), (163, 4), (99, 3), (64, 2), (48, 1)):
        function = staged(gemm.kernel, args, (1, 1), room=room * KIB)
        assert {op.attr["stages"] for op in ops(function, "allocate")} == {stages}
        assert function.shared_bytes <= room * KIB


def test_an_iteration_has_one_barrier(rng):
    gemm = Gemm()
    function = staged(gemm.kernel, gemm.arguments(rng, 32, 64, 96), (1, 1))
    (loop,) = [n for n in walk(function.body) if isinstance(n, For)]
    names = [n.name for n in loop.body if isinstance(n, Op)]
    assert names.count("barrier") == names.count("cp_wait_group") == 1
    assert loop.body[0].attr["pending"] == 2


@given(st.integers(0, 200), st.integers(1, 70), st.integers(1, 70), st.integers(2, 5),
       st.sampled_from(["NT", "NN", "TN", "TT"]), st.sampled_from([32, 48, 64]),
       st.integers(0, 2**32 - 1))
def test_fragments_carried_over_iterations_give_the_same(K, M, N, stages, orders, depth, seed):
    gemm = Gemm(orders=orders, block=(32, 32, depth))
    args = gemm.arguments(np.random.default_rng(seed), M, N, K)
    function = staged(gemm.kernel, args, gemm.groups(M, N), stages=stages, warps=True)
    (loop,) = [n for n in walk(function.body) if isinstance(n, For)]
    names = [n.name for n in loop.body if isinstance(n, Op)]
    assert names.count("barrier") == names.count("cp_wait_group") == 1
    assert names.count("matmul") == depth // 16 and names.count("take_operand") == depth // 8
    assert names.index("barrier") < names.index("matmul", names.index("barrier"))


def test_what_has_no_single_matmul_is_not_carried(rng):
    q, k, v = (array(rng, "bf16", (2, 100, 32)) for _ in range(3))
    function = staged(make(ATTENTION, "attention"), (q, k, v, array(rng, "f32", (2, 100, 32)), 0.1),
                      (2, 2), causal=False, tolerance=2e-2, warps=True)
    assert not ops(function, "take_operand")
    gemm = Gemm(block=(32, 32, 16))  # one step of k: nothing to read ahead inside of an iteration
    function = staged(gemm.kernel, gemm.arguments(rng, 32, 32, 64), (1, 1), warps=True)
    assert not ops(function, "take_operand")


@pytest.mark.parametrize("warps", [False, True])
@pytest.mark.parametrize("missing", ["barrier", "cp_wait_group"])
def test_the_detector_sees_what_is_missing(rng, missing, warps):
    """So the tests of this file would fail if the pass forgot one."""
    from dataclasses import replace

    def without(function):
        def part(nodes):
            from tessera.tile.ir.ir import with_regions

            return tuple(with_regions(n, part) for n in nodes
                         if not (isinstance(n, Op) and n.name == missing))

        return replace(function, body=part(function.body))

    gemm = Gemm(block=(32, 32, 16 << warps))
    with pytest.raises((TesseraError, AssertionError)):
        staged(gemm.kernel, gemm.arguments(rng, 32, 32, 320), (1, 1), change=without, warps=warps)


@pytest.mark.parametrize("room", [163, 24, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng, causal, room):
    q, k, v = (array(rng, "bf16", (2, 100, 32)) for _ in range(3))
    function = staged(make(ATTENTION, "attention"),
                      (q, k, v, array(rng, "f32", (2, 100, 32)), 0.125), (2, 2), causal=causal,
                      room=room * KIB, tolerance=2e-2)
    assert {op.attr["stages"] for op in ops(function, "allocate")} == {
        163: {1, 4}, 24: {1, 4}, 12: {1, 2}}[room]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_ring_in_a_loop(rng, stages):
    args = (array(rng, "bf16", (96, 160)), array(rng, "bf16", (100, 160)),
            array(rng, "f32", (96, 100)))
    staged(make(NESTED, "nested"), args, 3, lanes=64, stages=stages)


def test_loads_outside_of_loops(rng):
    args = (*(array(rng, "bf16", s) for s in ((128, 48), (48, 64), (64, 32))),
            array(rng, "f32", (128, 32)))
    function = staged(make(CHAIN.format(t="bf16"), "chain"), args, 2)
    assert len(ops(function, "allocate")) == 3 and not ops(function, "load_tile")


CHANGING = """
@ts.kernel
def changing(A: Tensor["M", "K", ts.bf16], B: Tensor["N", "K", ts.bf16],
             C: Tensor["M", "N", ts.f32]):
    acc = tile.zeros((32, 32))
    for k in range(0, K, 32):
        a = tile.load(A[0:32, k:k+32])
        acc = tile.dot(a, tile.load(B[0:32, k:k+32]).T, acc)
        {write}
    C[0:32, 0:32] = acc
"""


@pytest.mark.parametrize("write, ahead", [("A[0:32, k+32:k+64] = 0.5", 1), ("pass", 2),
                                          ("B[0:32, 0:32] = 0.5", 1), ("C[0:32, 0:32] = acc", 2)])
def test_what_the_loop_writes_is_not_read_ahead(rng, write, ahead):
    kernel = make(CHANGING.format(write=write), "changing")
    args = (*(array(rng, "bf16", (32, 128)) for _ in range(2)), array(rng, "f32", (32, 32)))
    function = staged(kernel, args, 1)
    assert [op.attr["stages"] > 1 for op in ops(function, "allocate")].count(True) == ahead


USED_ELSEWHERE = """
@ts.kernel
def elsewhere(A: Tensor["M", "K", ts.bf16], B: Tensor["N", "K", ts.bf16],
              C: Tensor["M", "N", ts.f32]):
    a, b = tile.load(A[0:32, 0:32]), tile.load(B[0:32, 0:32])
    C[0:32, 0:32] = tile.dot(a * 2.0, b.T) + a
"""


PLACED = """
@ts.kernel
def placed(A: Tensor["M", "L", ts.bf16], B: Tensor["N", "K", ts.bf16], at: Tensor["P", ts.int32],
           C: Tensor["M", "N", ts.f32]):
    acc = tile.zeros((32, 32))
    for k in range(0, K, 32):
        place = at[k // 32]
        a = tile.load(A[0:32, place:place+32])
        acc = tile.dot(a, tile.load(B[0:32, k:k+32]).T, acc)
        {write}
    C[0:32, 0:32] = acc
"""


@pytest.mark.parametrize("write, ahead", [("pass", 2), ("at[0] = 32", 1)])
def test_a_table_says_where_what_is_read_ahead_lies(rng, write, ahead):
    """Only where nothing changes it meanwhile; it is not read behind the last iteration."""
    args = (array(rng, "bf16", (32, 320)), array(rng, "bf16", (32, 160)),
            np.array([32, 256, 0, 96, 96], np.int32), array(rng, "f32", (32, 32)))
    function = staged(make(PLACED.format(write=write), "placed"), args, 1, stages=3,
                      tolerance=2e-2)
    assert sum(a.attr["stages"] == 3 for a in ops(function, "allocate")) == ahead


def test_what_is_used_otherwise_stays_a_tile(rng):
    args = (*(array(rng, "bf16", (32, 32)) for _ in range(2)), array(rng, "f32", (32, 32)))
    function = staged(make(USED_ELSEWHERE, "elsewhere"), args, 1)
    assert len(ops(function, "load_tile")) == len(ops(function, "cp_async")) == 1


def test_the_user_s_own_ring_stays(rng):
    gemm = Gemm(style="ring")
    function = staged(gemm.kernel, gemm.arguments(rng, 32, 64, 96), (1, 1))
    assert {op.attr["swizzle"] for op in ops(function, "allocate")} == {"xor"}


@ts.kernel
def flagging(A: ts.Tensor[64, 64, ts.bf16], flags: ts.Tensor[4, ts.int32],
             C: ts.Tensor[64, 64, ts.f32], UPDATE=0):
    acc = tile.zeros((64, 64))
    for k in tile.range(0, 64, 16):
        if UPDATE == 1:
            tile.atomic_cas(flags, 0, 0, 1)
        if UPDATE == 2:
            tile.atomic_add(flags, 0, 1)
        a = tile.load(A[0:64, k:k + 16])
        acc = tile.dot(a, tile.transpose(a), acc)
    C[0:64, 0:64] = acc


@pytest.mark.parametrize("update", [0, 1, 2])
def test_nothing_is_read_ahead_of_a_write_that_may_meet_it(update, rng):
    """Where arrays may overlap, every write in the loop does; an exchange by comparison too."""
    args = [rng.standard_normal((64, 64)).astype(ts.bf16.numpy), np.zeros(4, np.int32),
            np.zeros((64, 64), np.float32)]
    function = tile_gpu.prepare(flagging, args, {"UPDATE": update}, 1, 128)[1]
    feeds = find_feeds(function, SM80, overlapping=True)
    assert feeds and all(f.ahead is (update == 0) for f in feeds)


@ts.kernel
def weighted(A: ts.Tensor["M", "K", ts.bf16], B: ts.Tensor["K", 32, ts.bf16],
             w: ts.Tensor["K", ts.f32], C: ts.Tensor["M", 32, ts.f32]):
    acc = tile.zeros((32, 32))
    for k in range(0, K, 16):
        a, b = tile.load(A[0:32, k:k + 16]), tile.load(B[k:k + 16, 0:32])
        acc = tile.dot(a, b, acc)
        scaled = tile.cast(b * tile.load(w[k:k + 16])[:, None], ts.bf16)
        acc = tile.dot(a, scaled, acc)
    C[0:32, 0:32] = acc


def test_what_an_operand_is_computed_of_goes_through_the_ring(rng):
    """Threads read their part of a slot; a matmul of the same tile reads the slot itself."""
    args = [rng.standard_normal(s).astype(ts.bf16.numpy) for s in ((32, 100), (100, 32))]
    args += [rng.random(100).astype(np.float32), np.zeros((32, 32), np.float32)]
    function = staged(weighted, args, 1)
    (loop,) = [n for n in walk(function.body) if isinstance(n, For)]
    assert len([n for n in walk(loop.body) if isinstance(n, Op) and n.name == "cp_async"]) == 3
    read = [n for n in walk(loop.body) if isinstance(n, Op) and n.name == "load_tile"]
    assert len(read) == 2
    first = next(n for n in walk(loop.body) if isinstance(n, Op) and n.name == "matmul")
    assert all(x not in {n.outs[0].value for n in read} for x in first.args)


SQUARED = """
@ts.kernel
def squared(A: Tensor[64, 64, ts.bf16], C: Tensor[64, 64, ts.f32]):
    acc = tile.zeros((64, 64))
    for k in range(0, 64, 16):
        a = tile.load(A[0:64, k:k + 16])
""" + "        a = tile.cast(a * a, ts.bf16)\n" * 40 + """
        acc = tile.dot(a, tile.transpose(a), acc)
    C[0:64, 0:64] = acc
"""


def test_values_read_twice_at_each_step_are_looked_at_once():
    """Two to the power of 40 ways lead from the matmul to the load."""
    args = [np.zeros((64, 64), ts.bf16.numpy), np.zeros((64, 64), np.float32)]
    function = tile_gpu.prepare(make(SQUARED, "squared"), args, {}, 1, 128)[1]
    (feed,) = find_feeds(function, SM80, overlapping=False)
    assert feed.computed and feed.ahead
