"""What the CUDA emitter writes, run on NumPy (tests/emulator) against the interpreter: a check of
the lowering itself that needs neither a GPU nor a compiler."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tessera as ts
from emulator import KINDS, Block, Builder, compare
from emulator import register as as_register
from emulator.threads import Team
from kernels.build import build
from tessera.numerics import all_dtypes, decode, encode, find_dtype
from tessera.tile.cuda.emit.emitter import kind_of
from tessera.tile.cuda.instruction import Operand
from tessera.tile.cuda.intrinsics import casts, layout_conversion
from tessera.tile.ir.numpy_values import array_dtype, convert
from tessera.tile.ir.register_layout import (
    RegisterLayout,
    accumulator,
    bits_of,
    blocked,
    warps_over,
)
from tile_cases import CASES

SMALL = (
    "unary_f32", "binary_f32", "binary_f64", "integer_i32", "integer_u64", "compare_bf16",
    "reduce_f32_48x100", "reduce_u32_64x16", "reduce_i64_3x1", "argmax_f32_48x100",
    "argmax_u64_48x100",
    "argmax_bool__8x512", "scan_f32_8x512", "scan_i64_48x100", "sort_f32_5x100", "sort_f64_9x32",
    "sort_u32_5x100", "sort_bf16_1x3", "sort_i64_3x700", "sort_f32_2x1024", "merged_i32_2x1024",
    "merged_f32_5x64", "shapes_32", "shapes_96", "shapes_256",
    "blocks_33x65", "packed_fp4_e2m1_13x77_0", "packed_int4_20x100_5", "packed_fp6_e3m2_16x128_0",
    "packed_fp6_e2m3_20x100_5", "store_fp8_e4m3_stochastic_round_13x77",
    "store_f16_rounding_13x77", "store_fp6_e3m2_stochastic_round_13x77",
    "store_fp8_e5m2_rounding_13x77", "store_fp4_e2m1_saturate_13x77", "added_again",
    *(name for name in CASES if name.endswith("_lanes")
      or name.startswith(("statistics_", "sample_", "permute_"))))


@pytest.mark.parametrize("name", SMALL)
def test_emitted_as_interpreted(name, rng):
    c = CASES[name]
    compare(build(c.source)["k"], *c.args(rng), lanes=c.lanes, rtol=c.rtol, atol=c.atol,
            target="sm_90", **c.options)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_few_rows_of_an_accumulator_are_reduced_over_warps(rows, rng):
    """Its lanes reach beyond them, and what they hold there has places of its own."""
    k = build(f"""@kernel
def k(A: Tensor["M", 16, bf16], B: Tensor[64, 16, bf16], peak: Tensor["M", f32],
      at: Tensor["M", i32], least: Tensor["M", 4, f32], total: Tensor["M", f32]):
    s = tile.dot(tile.load(A[0:{rows}, 0:16]), tile.load(B[0:64, 0:16]).T)
    peak[0:{rows}] = tile.row_max(s)
    at[0:{rows}] = tile.argmax(s)
    least[0:{rows}, 0:4] = tile.smallest(s, 4)
    total[0:{rows}] = tile.row_sum(s)
""")["k"]
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((rows, 16), (64, 16)))
    compare(k, ts.tensor(a, ts.bf16), ts.tensor(b, ts.bf16), np.zeros(rows, np.float32),
            np.zeros(rows, np.int32), np.zeros((rows, 4), np.float32), np.zeros(rows, np.float32),
            lanes=128, exact=True)


@pytest.mark.parametrize("sort, made", [("sort", "f32"), ("argsort", "i32")])
@pytest.mark.parametrize("m, n, lanes", [(64, 64, 128), (16, 128, 128), (2, 512, 512),
                                         (1, 256, 256)])
def test_sorts_of_sums(m, n, lanes, sort, made, rng):
    """Bits of the position lie apart in the numbers of threads, or more warps than registers share
    a row, or each thread has one element."""
    x = f"tile.dot(tile.load(A[0:{m}, 0:16]), tile.load(B[0:16, 0:{n}]))"
    if lanes > 128:
        x = f"tile.load(C[0:{m}, 0:{n}])"
    source = f"""
@kernel
def k(A: Tensor["M", "K", f16], B: Tensor["K", "N", f16], C: Tensor["M", "N", f32],
      O: Tensor["M", "N", {made}]):
    tile.store(O[0:{m}, 0:{n}], tile.{sort}({x}))
"""
    a, b = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((m, 16), (16, n)))
    c, out = rng.integers(-9, 9, (m, n)).astype(np.float32), np.zeros((m, n), made.replace(
        "f", "float").replace("i", "int"))
    compare(build(source)["k"], a, b, c, out, lanes=lanes, rtol=0, atol=0, target="sm_80")


def test_divisions_by_powers_of_two_round_down(rng):
    source = """
@kernel
def k(x: Tensor["n", i32], y: Tensor["n", 4, i32]):
    i = tile.linear_id()
    y[i, 0] = x[i] // 8
    y[i, 1] = x[i] % 8
    y[i, 2] = x[i] // 1
    y[i, 3] = x[i] % 1
"""
    x = np.append(rng.integers(-100, 100, 92), [0, -1, 2**31 - 1, -2**31]).astype(np.int32)
    compare(build(source)["k"], x, np.full((96, 4), 77, np.int32), groups=3, lanes=32,
            target="sm_90")


def test_indices_that_end_in_constants(rng):
    source = """
@kernel
def k(x: Tensor[9, 64, f32], y: Tensor[64, f32]):
    i = tile.local_id()
    back = 40 - i
    y[i] = x[(i + 1) % 4 + 3, i + 5 + 20] - x[2, back + 3 - 7] * x[i - 3 + 3, 1]
    y[i + 8] = x[8, 63 - i]
"""
    x = rng.standard_normal((9, 64)).astype(np.float32)
    compare(build(source)["k"], x, np.zeros(64, np.float32), groups=1, lanes=8, target="sm_90")


def test_threads_that_wait_for_each_other_are_told_and_end():
    """One at a barrier, the other at a vote of its warp: a run of tests goes on behind it."""
    team, before = Team(2), threading.active_count()
    with pytest.raises(AssertionError, match="threads wait for each other"):
        team.run(lambda t: team.together(t, ("sync_threads", "vote_any_sync")[t], None))
    assert threading.active_count() == before


@pytest.mark.parametrize("more", [
    "", "b = b + tile.row_sum(a * b)", "c = tile.row_max(squares)\n        b = b + c",
    "c = tile.row_max(squares)\n        b = b + tile.row_sum(a * b + c)"])
def test_reductions_over_warps_in_a_loop_wait_for_the_iteration_before(more, rng):
    """Warps run as far ahead of each other as barriers let them. Alone in its loop; before one
    whose barrier is enough; beside one, for which warps meet once; and both."""
    source = f"""@kernel
def k(A: Tensor["M", 256, f32], O: Tensor["M", 256, f32]):
    for m in range(0, M):
        a = tile.load(A[m:m+1, 0:256])
        squares = a * a
        b = tile.row_sum(a)
        {more}
        O[m:m+1, 0:256] = squares + b
"""
    a = rng.integers(-9, 9, (5, 256)).astype(np.float32)
    made = build(source)["k"]
    compare(made, a, np.zeros((5, 256), np.float32), lanes=128, lockstep=False, target="sm_90")


# --- casts --------------------------------------------------------------------------------------
def numbers(rng, d) -> np.ndarray:
    if d.kind == "bool":
        return np.array([True, False, True])
    if d.kind != "float" and d.bits <= 16:
        return np.arange(int(d.min), int(d.max) + 1).astype(array_dtype(d))
    if d.kind != "float":
        drop = rng.integers(0, 63, 3000).astype(np.uint64)
        some = rng.integers(0, 2**63, 3000, np.uint64) >> drop
        edges = [int(d.max), int(d.min) & (1 << d.bits) - 1, 0, 2**24 + 1, 2**24 + 3]
        whole = np.concatenate([some, np.array(edges, np.uint64)])
        return whole.astype(f"u{d.bits // 8}").view(array_dtype(d))
    if d.bits <= 16:
        return decode(np.arange(1 << d.bits).astype(d.code_type).view(d.numpy), d)
    x = rng.standard_normal(6000) * np.exp2(rng.integers(-40, 40, 6000))
    ties = rng.integers(-4096, 4096, 6000) / 512 * np.exp2(rng.integers(-16, 4, 6000))
    beyond = np.nextafter(decode(encode(x, "bf16"), "bf16").astype(np.float64) * (1 + 2**-9), 0)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448, 464, 465, 57344, 61440, 65504, 65520,
             2.0**-17, 28, 30, 7.75, 5, 2.0**31, -(2.0**63), 2.0**64, 1e300, 1e-300, 1e-45]
    with np.errstate(over="ignore", under="ignore"):
        return decode(encode(np.concatenate([x, ties, beyond, edges]), d), d)


def register(x: np.ndarray, d) -> np.ndarray:
    kind = kind_of(d)
    if kind[0] == "f":
        return x.astype(KINDS[kind])
    if kind == "i64":
        return x.view(np.int64)
    return (x.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def run_cast(a, z, x: np.ndarray, rounding: str, saturate: bool, hardware: bool) -> np.ndarray:
    """Three numbers a thread, so that pairs and single numbers occur."""
    operation = casts.cast(a.name, z.name, rounding, saturate, hardware)
    held = register(x, a)[:x.size // 3 * 3].reshape(-1, 3)
    body = operation.rule(Operand("x", kind_of(a), 3)).body
    with np.errstate(all="ignore"):
        got = body(Builder(Block(len(held))), [as_register(c) for c in held.T])
    return np.stack([np.broadcast_to(g, len(held)) for g in got], 1).reshape(-1)


@pytest.mark.parametrize("rounding, saturate", [("nearest_even", False), ("nearest_even", True),
                                                ("toward_zero", False), ("toward_zero", True)])
@pytest.mark.parametrize("source", [d.name for d in all_dtypes()])
def test_casts_as_numerics(source, rounding, saturate, rng):
    a = find_dtype(source)
    x = numbers(rng, a)
    x = np.concatenate([x, x[:-x.size % 3 or None]])
    for z in all_dtypes():
        plain = rounding == "nearest_even" and not saturate
        if z is a or (z.kind != "float" and not plain):
            continue
        with np.errstate(all="ignore"):
            want = register(convert(x, z, rounding, saturate), z)[:x.size // 3 * 3]
        for hardware in (False, True) if z.name.startswith("fp8") else (False,):
            got = run_cast(a, z, x, rounding, saturate, hardware)
            wrong = got != want
            if want.dtype.kind == "f":
                word = f"u{want.itemsize}"
                wrong = got.view(word) != want.view(word)
                if z.name in ("bf16", "f16"):  # a NaN is one whatever its bits
                    wrong &= ~(np.isnan(got) & np.isnan(want))
            at = int(np.argmax(wrong))
            assert not wrong.any(), f"{a} to {z}: {x[at]!r} gives {got[at]!r}, not {want[at]!r}"


# --- from layout to layout ----------------------------------------------------------------------
def held(layout: RegisterLayout, threads: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(number of the element, whether it exists) of each register."""
    t, out = np.arange(threads), []
    for base in layout.bases:
        index = [np.full(threads, i) for i in base]
        for i, bit in enumerate(layout.threads):
            if bit:
                index[bit[0]] = index[bit[0]] | (t >> i & 1) << bit[1]
        inside, flat = np.ones(threads, bool), np.zeros(threads, np.int64)
        for at, n in zip(index, layout.shape, strict=True):
            inside, flat = inside & (at < n), flat * n + at
        out.append((np.where(inside, flat + 1, -7), inside))
    return out


def conflicts(addresses: np.ndarray, size: int, width: int) -> int:
    """The most words of one bank in what a warp moves at once."""
    together, worst = max(1, 128 // (size * width)), 0
    for i in range(0, min(32, len(addresses)), together):
        words = {int(a) // 4 + k for a in addresses[i:min(i + together, 32)]
                 for k in range(size * width // 4)}
        worst = max(worst, *np.bincount([w % 32 for w in words]))
    return worst


def carry(before: RegisterLayout, after: RegisterLayout, threads: int, kind: str, most: int) -> str:
    """Moves a tile and checks that every element arrived; what was used."""
    route, block = layout_conversion.Route(before, after), Block(threads)
    b, thread = Builder(block), as_register(np.arange(threads, dtype=np.int32))
    x = [as_register(v.astype(KINDS[kind])) for v, _ in held(before, threads)]
    head = (before.text, after.text, after.shape, kind)
    if route.kind != "block":
        got = layout_conversion.exchanged(*head).rule(None, None).body(b, x, thread)
    else:
        size, got = 8 if kind == "i64" else 4, []
        rounds = layout_conversion.rounds_of(route, size, most)
        start = as_register(np.int32(0))
        for step in range(1 << rounds):
            put = layout_conversion.put(*head, rounds, step)
            put.rule(None, None, None).body(b, x, start, thread)
            block.shared.barrier()
            get = layout_conversion.get(*head, rounds, step)
            got += get.rule(None, None).body(b, start, thread)
            block.shared.barrier()
            for side in (route.before, route.after):
                slots = layout_conversion._Slots(route, side, kind, rounds, step)
                for at in slots.addresses(b, start, thread):
                    full = np.broadcast_to(np.asarray(at), threads)
                    assert conflicts(full, size, slots.width) == 1
        got = [got[i] for i in route.joined(size, rounds)]
    for value, (want, inside) in zip(got, held(after, threads), strict=True):
        assert (np.broadcast_to(value, threads)[inside] == want[inside]).all()
    return route.kind


def random_layout(rng, shape: tuple[int, ...], threads: int) -> RegisterLayout:
    bits = [(a, i) for a, n in enumerate(shape) for i in range(bits_of(n))]
    order = [bits[i] for i in rng.permutation(len(bits))]
    count = bits_of(threads)
    used = int(rng.integers(0, min(count, len(bits)) + 1))
    spread = [*order[:used], *([None] * (count - used))]
    return RegisterLayout(shape, tuple(order[used:]),
                          tuple(spread[i] for i in rng.permutation(count)))


def test_any_layout_to_any_other(rng):
    kinds = set()
    for _ in range(150):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 5, 8, 13, 16, 20], rng.integers(1, 4)))
        threads = int(rng.choice([1, 2, 8, 32, 64, 128]))
        pair = [random_layout(rng, shape, threads) for _ in range(2)]
        kinds.add(carry(*pair, threads, str(rng.choice(["i32", "i64"])), int(rng.choice([512,
                                                                                         32768]))))
    assert kinds == {"thread", "warp", "block"}


@pytest.mark.parametrize("shape", [(64, 64), (64, 40), (128, 64)])
def test_layouts_of_matmuls_and_of_memory(shape):
    matmul, row = accumulator(shape, warps_over(shape, 2, 2)), blocked(shape, 128, 4)
    column = blocked(shape[::-1], 128, 4).permuted((1, 0))
    for before, after in ((matmul, row), (row, matmul), (row, column), (column, matmul)):
        assert carry(before, after, 128, "i32", 32768) == "block"


@pytest.mark.parametrize("y", [255.0, 0.7, -3.0, 1.0000001, 1.9999999, 2.0**70, 1e-45])
def test_division_by_a_constant(y, rng):
    """Rounded once, and the same zeros, infinities and NaN; beyond 2^60 within 1.5 ulp."""
    source = f"""@kernel
def k(A: Tensor["M", "N", f32], O: Tensor["M", "N", f32]):
    tile.store(O[0:64, 0:128], tile.load(A[0:64, 0:128]) / {y!r})
"""
    x = (rng.standard_normal((64, 128)) * np.exp2(rng.integers(-35, 35, (64, 128))))
    x[:, ::7], x[:, ::31], x[:, ::29], x[:, ::37] = 0, np.inf, -0.0, np.nan
    out = np.zeros((64, 128), np.float32)
    compare(build(source)["k"], x.astype(np.float32), out, lanes=128, target="sm_90", exact=True)
    x *= np.exp2(rng.integers(-90, 70, (64, 128)))
    compare(build(source)["k"], x.astype(np.float32), out, lanes=128, target="sm_90",
            rtol=2**-22, atol=3e-45)


def test_division_by_a_statistic(rng):
    """At most 2 ulp from x / y, and the same zeros, infinities and NaN."""
    source = """@kernel
def k(A: Tensor["M", "N", f32], R: Tensor["M", f32], O: Tensor["M", "N", f32]):
    tile.store(O[0:64, 0:128], tile.load(A[0:64, 0:128]) / tile.load(R[0:64]))
"""
    x = (rng.standard_normal((60, 120)) * np.exp2(rng.integers(-140, 120, (60, 120))))
    x[:, ::7], x[:, ::31] = 0, np.inf
    y = rng.standard_normal(60) * np.exp2(rng.integers(-149, 127, 60))
    y[:9] = 0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, 1e-39
    compare(build(source)["k"], x.astype(np.float32), y.astype(np.float32),
            np.zeros((60, 120), np.float32), lanes=128, target="sm_90", rtol=2**-22, atol=3e-45)


COLUMNS = """
@kernel
def columns(x: Tensor["M", "N", bf16], s: Tensor["M", "N", f32], t: Tensor["M", "N", f32],
            BM=64, BN=64):
    for n in range(0, N, BN):
        y = tile.cast(tile.load(x[0:BM, n:n + BN]), f32)
        s[0:1, n:n + BN] = tile.reduce_sum(y, axis=0)[None, :]
        t[0:1, n:n + BN] = tile.reduce_max(y, axis=0)[None, :]
"""


@pytest.mark.parametrize("rows, columns, warps", [
    (64, 64, 4), (64, 64, 8), (32, 256, 8), (128, 64, 16), (16, 512, 4), (100, 48, 16)])
def test_sums_of_columns_are_shared_out(rows, columns, warps, rng):
    """Where warps have found parts of many sums, threads add them up among them, once each: in the
    same order, one thread at a time as well."""
    k = build(COLUMNS)["columns"]
    x = ts.tensor(rng.standard_normal((rows, columns + 40)).astype(np.float32), ts.bf16)
    compare(k, x, *(ts.zeros(x.shape) for _ in range(2)), lanes=32 * warps, target="sm_90a",
            lockstep=rows != 64, rtol=1e-5, atol=1e-5, BM=rows, BN=columns)
