"""Attention of few queries over many keys: its kernels under the interpreter, as programs of
warpgroups and as emulated instructions, and where the library and graphs take them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from attention_cases import attended64
from emulator import compare
from hopper_lowering import Known, program, run
from tessera import Tensor, bf16
from tessera.graph import tree
from tessera.graph.cuda.levels import program_of
from tessera.kernels.attention_scores import LOG2E
from tessera.kernels.decode_attention import (
    LEAST_KEYS,
    combine_parts,
    decode_cluster,
    decode_many_rows,
    decode_plan,
    decode_rows,
)
from tessera.stdlib import flash_attention_2
from tolerance import assert_close

FACTS = Known(divisible=frozenset("DE"), aligned=frozenset("QKV"))


def operands(rng, H, Hk, S, T, D, E, dtype=bf16):
    shapes = (1, H, S, D), (1, Hk, T, D), (1, Hk, T, E)
    return [rng.standard_normal(s).astype(dtype.numpy) for s in shapes]


def check(got, want):
    assert_close(got.reshape(want[0].shape), want[0], "bf16", n=2, scale=want[1])


# query heads, key heads, queries, keys, widths, parts, causal
CASES = [(8, 2, 1, 100, 64, 48, 3, False), (4, 2, 4, 70, 32, 32, 4, True),
         (20, 1, 1, 130, 32, 32, 1, False), (16, 1, 2, 33, 32, 64, 9, True),
         (4, 4, 1, 1000, 16, 16, 70, True), (12, 2, 8, 20, 48, 32, 2, True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_the_whole(case, rng):
    """Also where parts have no keys, and rows of a part see none of its keys."""
    H, Hk, S, T, D, E, P, causal = case
    q, k, v = operands(rng, H, Hk, S, T, D, E)
    R = H // Hk * S
    args = q.reshape(Hk, R, D), k[0], v[0]
    for kernel in (decode_rows, decode_many_rows):
        parts, lse = (np.full(s, np.nan, np.float32) for s in ((P, Hk, R, E), (P, Hk, R)))
        kernel(*args, None, parts, lse, D**-0.5 * LOG2E, S=S, causal=causal)
        assert not np.isnan(parts).any() and not np.isnan(lse).any()
        out = np.full((H * S, E), np.nan, bf16.numpy)
        combine_parts(parts.reshape(P, -1, E), lse.reshape(P, -1), out, BP=16)
        check(out, attended64(q, k, v, causal))
        parts = np.full((1, Hk, R, E), np.nan, bf16.numpy)
        kernel(*args, None, parts, None, D**-0.5 * LOG2E, S=S, causal=causal)
        check(parts, attended64(q, k, v, causal))


@pytest.mark.parametrize("P", [2, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_a_cluster_are_the_whole(case, P, rng):
    """No other kernel weighs them; parts without keys have no weight."""
    H, Hk, S, T, D, E, _, causal = case
    q, k, v = operands(rng, H, Hk, S, T, D, E)
    R = H // Hk * S
    if R > 16:
        return
    out, logs = np.full((Hk, R, E), np.nan, bf16.numpy), np.full((Hk, R), np.nan, np.float32)
    decode_cluster(q.reshape(Hk, R, D), k[0], v[0], None, out, logs, D**-0.5 * LOG2E, S=S, P=P,
                   BN=32, ROWS=R, AHEAD=2, causal=causal)
    check(out, attended64(q, k, v, causal))
    wide = (x.astype(np.float64) for x in (q, k, v))
    lse = ts.attention(*wide, causal=causal, return_lse=True)[1]
    assert_close(logs.reshape(lse.shape), lse.numpy(), "f32", n=D, scale=10.0)


def test_rows_of_a_cluster_that_see_no_key_and_elements_that_its_groups_share_unevenly(rng):
    q, k, v = operands(rng, 3, 1, 4, 2, 32, 20)
    out, logs = np.full((1, 12, 20), np.nan, bf16.numpy), np.full((1, 12), np.nan, np.float32)
    decode_cluster(q.reshape(1, 12, 32), k[0], v[0], np.array([2]), out, logs, 32**-0.5 * LOG2E,
                   S=4, P=16, ROWS=12, causal=True)
    got = out.reshape(3, 4, 20)
    assert not got[:, :2].any() and np.isneginf(logs.reshape(3, 4)[:, :2]).all()
    check(got[:, 2:], attended64(q[:, :, 2:], k, v, True))


@pytest.mark.parametrize("once, keys", [(False, 300), (True, 200), (True, 70)])
def test_a_cluster_has_no_races(once, keys, rng):
    q, k, v = operands(rng, 4, 1, 1, keys, 32, 32)
    out = np.zeros((1, 4, 32), bf16.numpy)
    with ts.config.scope(debug=True):
        decode_cluster(q.reshape(1, 4, 32), k[0], v[0], None, out, None, 32**-0.5 * LOG2E, P=4,
                       ROWS=4, ONCE=once)
    check(out, attended64(q, k, v, False))


def test_eight_groups_ask_for_all_of_few_keys_at_once():
    plan = decode_plan(8, 4, 1024, 128, groups=16)
    assert (plan.parts, plan.keys, plan.once) == (8, 128, True)
    assert not decode_plan(8, 4, 1024, 128, groups=16, codes=True).once
    assert not decode_plan(8, 4, 1040, 128, groups=16).once
    assert decode_plan(8, 4, 8192, 128).ahead == 1
    assert not decode_plan(8, 4, 8192, 128, codes=True).ahead


@pytest.mark.parametrize("P", [1, 3])
def test_a_running_maximum_lags(P, rng):
    """Keys that grow along the sequence: sums are scaled anew, and parts differ by far."""
    q, k, v = operands(rng, 4, 1, 1, 320, 32, 32)
    k = (k * np.linspace(0.1, 40, 320)[:, None]).astype(k.dtype)
    parts, lse = np.zeros((P, 1, 4, 32), np.float32), np.zeros((P, 1, 4), np.float32)
    decode_rows(q.reshape(1, 4, 32), k[0], v[0], None, parts, lse, 32**-0.5 * LOG2E)
    assert P == 1 or np.ptp(lse, axis=0).min() > 10
    out = np.zeros((4, 32), bf16.numpy)
    combine_parts(parts.reshape(P, 4, 32), lse.reshape(P, 4), out, BP=2)
    check(out, attended64(q, k, v, False))


@given(heads=st.integers(1, 4096), rows=st.integers(1, 512), T=st.integers(0, 1 << 20),
       width=st.sampled_from([64, 128, 256]), streamed=st.booleans(),
       groups=st.sampled_from([1, 8, 16]))
def test_parts_cover_the_keys_once(heads, rows, T, width, streamed, groups):
    plan = decode_plan(heads, rows, T, width, streamed=streamed and width <= 128, groups=groups)
    P, step = plan.parts, plan.keys
    span = (T + P * step - 1) // (P * step) * step  # as the kernels have it
    assert span * P >= T and (P == 1 or span * (P // 2 if plan.once else P - 1) < T), (
        "a part without keys; where each has one block of them, half of the parts")
    assert not plan.once or span == step
    assert P == 1 or span >= LEAST_KEYS // 2
    assert plan.together == 64 or plan.together // 2 < P <= plan.together


@pytest.mark.parametrize("S, group, causal", [(1, 8, False), (10, 4, True)])
def test_by_warpgroups(S, group, causal, rng):
    """64 rows of a block, of which the last are none."""
    T, D, P = 200, 64, 3
    q, k, v = operands(rng, group, 1, S, T, D, D)
    R = group * S
    parts, lse = (np.full(s, np.nan, np.float32) for s in ((P, 1, R, D), (P, 1, R)))
    args = q.reshape(1, R, D), k[0], v[0], None, parts, lse, D**-0.5 * LOG2E
    made = program(decode_many_rows, *args, facts=FACTS, S=S, causal=causal)
    run(decode_many_rows, made, (P, 1, 1), *args, S=S, causal=causal)
    weights = np.exp2(lse - lse.max(0))
    check((parts * weights[..., None]).sum(0) / weights.sum(0)[..., None],
          attended64(q, k, v, causal))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("lse", [True, False])
def test_emulated(lse, target, rng):
    q, k, v = (x[0] for x in operands(rng, 2, 2, 3, 70, 32, 16))
    P = 2 if lse else 1
    parts = np.zeros((P, 2, 3, 16), np.float32 if lse else bf16.numpy)
    sums = np.zeros((P, 2, 3), np.float32) if lse else None
    count = np.array([60], np.int64) if lse else None
    compare(decode_rows, q, k, v, count, parts, sums, 0.2, S=3, AHEAD=1, causal=True, rtol=2e-2,
            atol=2e-2, lanes=32, target=target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_warps_beside_each_other_emulated(target, rng):
    """Fewer rows than warps multiply by themselves: these share the columns of scores, and then
    those of values."""
    q, k, v = (x[0] for x in operands(rng, 2, 2, 3, 70, 32, 32))
    parts, sums = np.zeros((2, 2, 3, 32), np.float32), np.zeros((2, 2, 3), np.float32)
    compare(decode_rows, q, k, v, None, parts, sums, 0.2, S=3, causal=True, rtol=2e-2, atol=2e-2,
            lanes=128, target=target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_the_combination_emulated(target, rng):
    parts = rng.standard_normal((5, 6, 16)).astype(np.float32)
    lse = (20 * rng.standard_normal((5, 6))).astype(np.float32)
    lse[1:, 2] = -np.inf
    compare(combine_parts, parts, lse, np.zeros((6, 16), np.float32), BP=4, rtol=1e-5, atol=1e-5,
            target=target)


# --- who takes them -----------------------------------------------------------------------------
def kernels(*args, routine=flash_attention_2, **options):
    return [name for name, *_ in routine.launches(*args, **options)]


def test_the_library_takes_them_for_few_queries(rng):
    def zeros(S, T=600, dtype="bf16", D=64):
        return [ts.zeros((1, n, m, D), dtype) for n, m in ((8, S), (2, T), (2, T))]

    assert kernels(*zeros(1)) == kernels(*zeros(4)) == ["decode_rows", "combine_parts"]
    assert kernels(*zeros(16)) == ["decode_many_rows", "combine_parts"]
    assert kernels(*zeros(1, 60)) == ["decode_rows"]
    for xs in (zeros(17), zeros(1, dtype="f32"), zeros(1, D=272), zeros(2, 255)):
        assert kernels(*xs) == ["cross_attention"]
    chosen = flash_attention_2.with_schedule(ts.Schedule(block=(64, 64)))
    assert kernels(*zeros(1), routine=chosen) == ["cross_attention"]


@pytest.mark.parametrize("S, T, causal", [(1, 300, True), (1, 40, False), (5, 256, True),
                                          (16, 700, False)])
def test_graphs_take_them(S, T, causal, rng):
    q, k, v = (ts.tensor(x) for x in operands(rng, 8, 2, S, T, 32, 32))
    made = program_of(ts.jit(lambda *x: ts.attention(*x, causal=causal)).graph(q, k, v), "sm_90a")
    assert "call decode_" in str(made.plan)
    parts = "call decode_cluster" if 4 * S <= 16 else "call combine_parts"
    assert (parts in str(made.plan)) == (T >= 2 * LEAST_KEYS)
    (got,) = made.run([x.array for x in (q, k, v)])
    check(np.asarray(got, np.float64), attended64(*(x.array for x in (q, k, v)), causal))


# queries, entries, capacity, rolling, causal
CACHES = [(1, 300, 1000, False, True), (1, 640, 640, False, True), (1, 2, 300, False, False),
          (4, 300, 640, False, True), (4, 290, 640, False, False), (1, 70, 64, True, True),
          (8, 300, 640, False, True), (6, 4, 300, False, True)]


@pytest.mark.parametrize("case", CACHES, ids=str)
def test_over_a_cache_whose_length_is_data(case, rng):
    """The kernels stop at the last entry: what lies behind it would be infinite."""
    S, n, capacity, rolling, causal = case
    q, k, v = operands(rng, 8, 2, S, n, 32, 32)
    cache = ts.kv_cache((1, 2, capacity, 32), bf16, rolling=rolling).append(k, v)
    for x in (cache._storage.K, cache._storage.V):
        x.array[:, :, n:] = 1e30
    made = program_of(ts.jit(lambda q, c: ts.flash_attention(q, c, causal=causal)).graph(
        ts.tensor(q), cache), "sm_90a")
    assert "call decode_" in str(made.plan) and "cast" not in str(made.plan)
    (got,) = made.run([q, *(x.array for x in tree.flatten(cache)[0])])
    if n < S:
        assert not np.asarray(got)[:, :S - n].any() and np.asarray(got)[:, S - n:].any()
        return
    want, size = (x.swapaxes(1, 2).reshape(got.shape) for x in attended64(
        q, k[:, :, -capacity:], v[:, :, -capacity:], causal))
    assert_close(np.asarray(got, np.float64), want, "bf16", n=2, scale=size)


@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("S, group, dtype", [(1, 4, "bf16"), (4, 8, "f16"), (40, 4, "bf16")])
def test_codes_of_8_bits_are_made_wider_in_registers(S, group, dtype, codes, rng):
    """Few queries read the cache as it lies; of more it is made wider first."""
    q = ts.tensor(rng.standard_normal((2, 2 * group, S, 32)).astype(np.float32), dtype)
    k, v = (ts.tensor(rng.standard_normal((2, 2, 300, 32)).astype(np.float32), codes) for _ in "kv")
    cache = ts.kv_cache((2, 2, 640, 32), codes).append(k, v)
    f = ts.jit(lambda q, c: ts.flash_attention(q, c))
    made = program_of(f.graph(q, cache), "sm_90a")
    kernel = "rows" if S * group > 16 else "cluster"
    assert (f"call decode_{kernel}(" in str(made.plan)) == (S <= 16)
    assert (f"{dtype}[2, 2, 640, 32]" in str(made.plan)) == (S > 16)
    wide = q.array, *(np.asarray(ts.cast(x, "f64")) for x in (k, v))
    want, size = (x.swapaxes(1, 2).reshape(2, S, -1) for x in attended64(*wide, True))
    for got in (made.run([q.array, *(x.array for x in tree.flatten(cache)[0])])[0],
                f(q, cache).array, ts.flash_attention(q, cache).array):
        assert_close(np.asarray(got, np.float64), want, dtype, n=2, scale=size)


def test_a_chunk_of_a_prompt_leaves_out_what_is_not_filled(rng):
    """Spans of keys, which the fastest kernels take, and no mask of the whole capacity."""
    q, k, v = operands(rng, 8, 2, 70, 200, 32, 32)
    cache = ts.kv_cache((1, 2, 640, 32), bf16).append(k, v)
    for x in (cache._storage.K, cache._storage.V):
        x.array[:, :, 200:] = 1e30
    made = program_of(ts.jit(lambda q, c: ts.flash_attention(q, c)).graph(
        ts.tensor(q), cache), "sm_90a")
    assert "attention over" in str(made.plan) and "modified_attention" not in str(made.plan)
    (got,) = made.run([q, *(x.array for x in tree.flatten(cache)[0])])
    want, size = (x.swapaxes(1, 2).reshape(got.shape) for x in attended64(q, k, v, True))
    assert_close(np.asarray(got, np.float64), want, "bf16", n=2, scale=size)


@pytest.mark.parametrize("S, rolling, dtype, D", [(2, True, "bf16", 32), (17, False, "bf16", 32),
                                                  (1, False, "f32", 32), (1, False, "bf16", 272)])
def test_other_caches_are_attended_by_others(S, rolling, dtype, D, rng):
    cache = ts.kv_cache((1, 2, 64, D), dtype, rolling=rolling)
    made = program_of(ts.jit(lambda q, c: ts.flash_attention(q, c)).graph(
        ts.zeros((1, 4, S, D), dtype), cache), "sm_90a")
    assert "call decode_" not in str(made.plan)


def test_where_a_gradient_is_wanted_the_sums_are_saved():
    def f(q, k, v):
        return ts.vjp(ts.attention, q, k, v)[1](q)

    types = Tensor[2, 1, 32, bf16], Tensor[2, 300, 32, bf16], Tensor[2, 300, 32, bf16]
    made = program_of(ts.jit(f).graph(*types), "sm_90a")
    assert "call decode_" not in str(made.plan)
