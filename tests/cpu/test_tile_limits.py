"""Where 32 bits end, lanes part, and types are narrower than they look: emitted code at its limits.
"""

from __future__ import annotations

import numpy as np
import pytest

import emulator
import tessera as ts
import tile_gpu
from tessera.runtime.generations import GENERATIONS
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import emit
from tessera.tile.interpreter.launch import Config, grid_of
from tessera.tile.ir.ir import Op, While, walk
from tessera.tile.tuning.gpus import gpu

FAR = 3_000_000_000  # elements of an axis: more than an int32 counts


@ts.kernel
def begins(x: ts.Tensor["N", ts.uint8], y: ts.Tensor["M", ts.uint8]):
    y[0:128] = ts.tile.load(x[64:192])


@ts.kernel
def overlaps_the_start(x: ts.Tensor["N", ts.uint8], y: ts.Tensor["M", ts.uint8]):
    for k in range(0, 1):
        y[0:128] = ts.tile.load(x[k - 10:k + 118])


@ts.kernel
def uneven(x: ts.Tensor["N", ts.uint8], y: ts.Tensor["M", ts.uint8]):
    for k in range(0, 1):
        y[0:100] = ts.tile.load(x[k - 10:k + 90])


@ts.kernel
def blocks(x: ts.Tensor["N", ts.uint8], y: ts.Tensor["N", ts.uint8]):
    for i in ts.tile.range(0, N, 1024):
        y[i:i + 1024] = ts.tile.load(x[i:i + 1024])


@ts.kernel
def elements(x: ts.Tensor["N", ts.uint8]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = x[i] + 1


def bound_of(kernel, *args, N):
    """The arguments bound, and an extent that is said to be larger than it is."""
    bound = kernel.bind(args, {})
    bound.sizes["N"] = bound.texts["N"] = N
    return bound, kernel.specialise(bound, ts.Schedule(warps=2), False)


@pytest.mark.parametrize("N", [1000, FAR])
@pytest.mark.parametrize(("kernel", "wanted"), [
    (begins, lambda x: x[64:192]), (overlaps_the_start, lambda x: np.r_[np.zeros(10), x[:118]]),
    (uneven, lambda x: np.r_[np.zeros(10), x[:90]])])
def test_an_axis_of_more_elements_than_an_int32_counts(rng, kernel, wanted, N):
    x, y = rng.integers(1, 255, 1000).astype(np.uint8), np.zeros(128, np.uint8)
    bound, function = bound_of(kernel, x, y, N=N)
    _, emitted = emit(function, 64, parse_target("sm_80"), tile_gpu.facts_of(function, bound))
    assert [p.abi for p in emitted.parameters if p.name == "N"] == ["i64" if N == FAR else "i32"]
    emulator.run(emitted, 64, (1,), {"x": x, "y": y}, {**bound.sizes})
    want = wanted(x)
    assert np.array_equal(y[:len(want)], want) and not y[len(want):].any()


def test_blocks_of_a_long_axis_are_counted_in_64_bits():
    x = np.zeros(4096, np.uint8)
    _, function = bound_of(blocks, x, x.copy(), N=FAR)
    products = [n for n in walk(function.body) if isinstance(n, Op) and n.name == "mul"]
    assert products and all(d.type.dtype is ts.int64 for n in products for d in n.outs)


def test_lanes_beyond_an_int32_have_no_number():
    bound, function = bound_of(elements, np.zeros(64, np.uint8), N=FAR)
    with pytest.raises(ts.ArgumentError, match=r"linear_id\(\) counts to 2147483647, the launch "
                                               "has 23437500 groups of 128 lanes"):
        grid_of(function, bound, Config(), 128)
    assert grid_of(function, bound, Config((1 << 24,)), 128) == (1 << 24,)  # 2^31 lanes


# --- barriers ----------------------------------------------------------------------------------
@ts.kernel
def leaving(turns: ts.Tensor["L", ts.int32], count: ts.Tensor[1, ts.int32],
            y: ts.Tensor["L", ts.int32]):
    i = ts.tile.local_id()
    done = 0
    while done < turns[i]:
        ts.tile.atomic_add(count, 0, 1)
        y[i] = count[0] - count[0]
        done = done + 1


def test_no_barrier_stands_where_lanes_leave_a_loop_one_by_one(rng):
    turns = rng.integers(0, 5, 64).astype(np.int32)
    args = (turns, np.zeros(1, np.int32), np.zeros(64, np.int32))
    bound, function, *_ = tile_gpu.prepare(leaving, args, {}, lanes=64)
    lowered, _ = emit(function, 64, parse_target("sm_80"), tile_gpu.facts_of(function, bound))
    (loop,) = [n for n in lowered.body if isinstance(n, While)]
    inside = [n.name for n in walk((*loop.test, *loop.body)) if isinstance(n, Op)]
    assert "atomic" in inside and "barrier" not in inside


# --- widths ------------------------------------------------------------------------------------
@ts.kernel
def narrowed(x: ts.Tensor["N", ts.f32], y: ts.Tensor["M", ts.f32], k: ts.i32):
    at = ts.tile.cast(k * 16, ts.int8)  # saturates: 127 is no multiple of 16
    y[0:64] = ts.tile.load(x[at:at + 64])


def test_a_saturating_conversion_keeps_no_divisor(rng):
    x = rng.standard_normal(256).astype(np.float32)
    for k in (3, 9):
        emulator.compare(narrowed, x, np.zeros(64, np.float32), k, lanes=32)


# --- targets -----------------------------------------------------------------------------------
@pytest.mark.parametrize("target", list(GENERATIONS))
def test_the_figures_of_a_target_keep_its_limits(target):
    """A target without a GPU of its own in the table takes another one's rates, not its memory."""
    found, top = gpu(target), GENERATIONS[target]
    assert (found.shared_bytes, found.generation.shared_bytes, found.generation.lanes) == (
        top.group_shared_bytes, top.shared_bytes, 32 * top.warps)
    assert found.source


def test_names_of_the_emitted_text_are_not_those_of_values(rng):
    @ts.kernel
    def clash(x: ts.Tensor["N", ts.f32]):
        parts = ts.tile.local_id()
        i32, routes = x[parts], x[parts] + 1.0
        x[parts] = i32 + routes

    emulator.compare(clash, rng.standard_normal(64).astype(np.float32), lanes=64)


# --- constants ---------------------------------------------------------------------------------
@ts.kernel
def times(x: ts.Tensor["N", ts.int32], y: ts.Tensor["N", ts.f32], *, c=1):
    i = ts.tile.linear_id()
    if i < N:
        y[i] = x[i] * c


def test_equal_constants_of_other_types_are_other_kernels():
    x, y, kernel = np.full(4, 2**30, np.int32), np.zeros(4, np.float32), ts.kernel(times.fn)
    for c, want in ((4, 0.0), (4.0, 2.0**32), (4, 0.0)):
        kernel(x, y, c=c)
        assert y[0] == want  # integers wrap around, floats do not
    assert len(kernel.specializations) == 2
    for c in (0.0, -0.0):
        kernel(-x, y, c=c)
        assert np.signbit(y[0]) == (not np.signbit(c))
