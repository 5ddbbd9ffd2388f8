"""Random numbers in kernels: each launch draws anew, and the same in every run, on every rank, in
every schedule and on every device."""

from __future__ import annotations

import math
from hashlib import blake2b

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from emulator import Block, Builder, GlobalMemory, compare, register
from fake_driver import FENCE
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, bf16, checkpoints, config, f32, stochastic_round
from tessera.numerics import fold_in, random_bits
from tessera.numerics.random_state import next_launch
from tessera.runtime.replays import ADD_ONE
from tessera.tile.cuda.emit.emitter import Parameter
from tessera.tile.cuda.intrinsics import random

tile = ts.tile
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@ts.kernel
def bits(out: Tensor["N", ts.uint32]):
    i = tile.linear_id()
    if i < N:
        out[i] = tile.random_bits(i)


@ts.kernel
def rounded(x: Tensor["N", f32], y: Tensor["N", bf16 @stochastic_round]):
    y[tile_n:tile_n + 64] = tile.load(x[tile_n:tile_n + 64])


@ts.kernel
def dropped(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    t = tile.load(x[tile_m:tile_m + 16, tile_n:tile_n + 16])
    y[tile_m:tile_m + 16, tile_n:tile_n + 16] = tile.dropout(t, 0.5)


@ts.kernel
def seeded(out: Tensor["N", ts.uint32], seed: int):
    i = tile.linear_id()
    if i < N:
        out[i] = tile.random_bits(i, seed)


@ts.kernel
def by_place(out: Tensor["M", "N", ts.uint32], seed: int, at: int):
    """Indices of elements as a user writes them."""
    i = (tile_m + tile.arange(0, 2))[:, None] * N + tile.arange(0, 32)[None, :] + at
    out[tile_m:tile_m + 2, 0:32] = tile.random_bits(i, seed)


@pytest.mark.parametrize("N, at, runs", [
    (32, 0, True), (32, 3, False), (30, 0, False), (32, 24 - 2**31, True), (32, -40, True),
    (32, 2**31 - 48, True)])
def test_neighbours_share_a_computation_where_places_are_runs(N, at, runs):
    """As the interpreter has it, of negative indices and of sums that overflow, too."""
    made = compare(by_place, np.zeros((4, N), np.uint32), 7, at, target="sm_90")
    assert ("random_runs" in made.emitted.source) == runs


@ts.kernel
def by_other_places(out: Tensor["M", "N", ts.uint32], seed: int):
    """Every fifth index: what is added to numbers that count is divisible by 4, but no run's."""
    i = (tile.arange(0, 32) + tile.arange(0, 32) * 4)[None, :] + tile.arange(0, 4)[:, None] * 256
    out[0:4, 0:32] = tile.random_bits(i, seed)


def test_indices_that_go_further_than_by_one_are_no_runs():
    made = compare(by_other_places, np.zeros((4, 32), np.uint32), 7, target="sm_90")
    assert "random_runs" not in made.emitted.source


def words(kernel=bits, n=40, *args):
    out = np.zeros(n, np.uint32)
    kernel(out, *args)
    return out


def stream(kernel, seed, launch):
    """The key of a launch, from its definition."""
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1 << 63
    return fold_in(fold_in(seed, number), launch)


def test_each_launch_draws_anew():
    for seed in (0, 2**40 + 5):
        with config.scope(seed=seed):
            for launch in range(3):
                assert np.array_equal(words(), random_bits(stream(bits, seed, launch), 40))


def test_a_launch_of_another_kernel_does_not_count():
    other = np.zeros((16, 16), np.float32)
    with config.scope(seed=3):
        first = words()
        dropped(other, other)
        second = words()
    assert not np.array_equal(first, second)
    assert np.array_equal(second, random_bits(stream(bits, 3, 1), 40))
    kept = np.ones((16, 16), np.float32)
    with config.scope(seed=3):
        dropped(kept, kept)
    mask = random_bits(fold_in(stream(dropped, 3, 0), 0xD5), 256).reshape(16, 16) >= 2**31
    assert np.array_equal(kept != 0, mask)


def test_many_steps_of_stochastic_rounding_are_right_on_average():
    """100 steps of -1e-3 at a spacing of 2^-8 below 1: each element is a sum of 100 draws."""
    @ts.kernel
    def step(p: Tensor["N", bf16 @stochastic_round], rate: f32):
        p[tile_n:tile_n + 256] = tile.load(p[tile_n:tile_n + 256]) - rate

    p = np.ones(4096, ml_dtypes.bfloat16)
    with config.scope(seed=1):
        for _ in range(100):
            step(p, 1e-3)
    x = p.astype(np.float64)
    spacing, part = 2.0**-8, 1e-3 * 2**8
    sigma = spacing * math.sqrt(100 * part * (1 - part))  # of one element: 0.0170
    assert abs(x.mean() - 0.9) < 6 * sigma / math.sqrt(x.size)
    assert 0.9 * sigma < x.std() < 1.1 * sigma
    assert (x < 1).all()  # none is stuck: 0.744^100 is 1e-13


@pytest.mark.parametrize("block", [8, 64, 100])
def test_the_tiling_and_the_grid_do_not_matter(block, rng):
    x = rng.standard_normal((50, 70)).astype(np.float32)

    def run(rows, cols, groups=None):
        @ts.kernel
        def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
            t = tile.load(x[tile_m:tile_m + rows, tile_n:tile_n + cols])
            y[tile_m:tile_m + rows, tile_n:tile_n + cols] = tile.dropout(t, 0.3)

        y = np.zeros_like(x)
        with config.scope(seed=7):
            k(x, y)
        return y

    got = run(block, 16)
    assert np.array_equal(got, run(16, block)) and 0 < (got == 0).mean() < 0.5
    with config.scope(seed=4):
        out = np.zeros(200, np.uint32)
        bits[-(-200 // block), block](out)
    assert np.array_equal(out, random_bits(stream(bits, 4, 0), 200))


def test_dropout_of_a_vector(rng):
    @ts.kernel
    def k(x: Tensor["N", f32], y: Tensor["N", f32]):
        y[tile_n:tile_n + 32] = tile.dropout(tile.load(x[tile_n:tile_n + 32]), 0.25)

    x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
    with config.scope(seed=9):
        k(x, y)
        key = fold_in(stream(k, 9, 0), 0xD5)
        assert np.array_equal(y, np.where(random_bits(key, 100) >= 2**30, np.float32(4 / 3), 0))
        compare(k, x, y, lanes=32, target="sm_90", exact=True)


# --- the seed of the run ----------------------------------------------------------------------
def test_a_scope_with_a_seed_is_a_run_of_its_own():
    with config.scope(seed=5):
        first = words(), words()
        with config.scope(seed=6):
            inner = words()
        third = words()
    with config.scope(seed=5):
        again = words(), words()
        with config.scope(numerics="off"):
            also = words()
    assert np.array_equal(first, again) and np.array_equal(third, also)
    assert len({w.tobytes() for w in (*first, inner, third)}) == 4
    assert len(bits.specializations) == 1


def test_seeding_starts_again_and_a_state_goes_on():
    with config.scope(seed=0):
        ts.random.seed(11)
        a, b = words(), words()
        state = ts.random.get_state()
        c = words()
        ts.random.set_state(state)
        assert np.array_equal(c, words())
        ts.random.seed(11)
        assert np.array_equal([a, b], [words(), words()])
    name = f"{bits.fn.__module__}.bits"
    assert state == ts.random.RandomState(11, 0, ((name, 2),))


def test_a_checkpoint_keeps_the_launches(tmp_path):
    with config.scope(seed=2):
        words()
        checkpoints.save(tmp_path / "c", {"x": ts.tensor([1.0])})
        want = words()
        ts.random.set_state(checkpoints.load(tmp_path / "c").random)
        assert np.array_equal(words(), want)


def test_simulated_ranks_draw_as_one_process_does():
    def program():
        return [words(), words()]

    with config.scope(seed=8):
        ranks = ts.dist.simulate(program, 2)
        alone = program()
    assert np.array_equal(ranks[0], ranks[1]) and np.array_equal(ranks[0], alone)


def test_trials_of_a_search_do_not_count():
    @ts.kernel.autotune(dict(BM=[16, 32]), measure=lambda launch, schedule: launch() or 1.0,
                        cache=False)
    def k(x: Tensor["N", f32], y: Tensor["N", bf16 @stochastic_round], *, BM: int = 16):
        y[tile_n:tile_n + BM] = tile.load(x[tile_n:tile_n + BM])

    x, y = np.full(64, 1.001, np.float32), np.zeros(64, ml_dtypes.bfloat16)
    with config.scope(seed=1):
        k(x, y)
        assert [n for _, n in ts.random.get_state().launches] == [1]
        assert {t.status for t in k.tuning_trace} <= {"chosen", "measured"}  # none was "wrong"


def test_checks_do_not_count():
    with config.scope(seed=1):
        ts.debug.race_check(bits, np.zeros(40, np.uint32))
        assert np.array_equal(words(), random_bits(stream(bits, 1, 0), 40))


# --- seeds that are given ---------------------------------------------------------------------
def test_a_seed_is_used_as_given_and_compiles_once():
    k = ts.kernel(seeded.fn)
    for seed in (0, 1, -1, 2**40 + 3, 0):
        got = words(k, 40, seed)
        assert np.array_equal(got, random_bits(seed, 40)), seed
    assert len(k.specializations) == 1


def test_seeds_by_keyword_and_in_expressions():
    @ts.kernel
    def k(out: Tensor["N", ts.uint32], *, seed: int = 4):
        i = tile.linear_id()
        if i < N:
            out[i] = tile.random_bits(i, seed=seed * 2 + 1)

    out = np.zeros(40, np.uint32)
    k(out)
    assert np.array_equal(out, random_bits(9, 40))
    k(out, seed=2**33)
    assert np.array_equal(out, random_bits(2**34 + 1, 40)) and len(k.specializations) == 1


def test_dropout_by_a_seed_of_the_call(rng):
    @ts.kernel
    def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], seed: int):
        y[0:8, 0:32] = tile.dropout(tile.load(x[0:8, 0:32]), 0.5, seed=seed)

    x = np.ones((8, 32), np.float32)
    for seed in (3, 2**50):
        y = np.zeros_like(x)
        k(x, y, seed)
        want = random_bits(fold_in(seed, 0xD5), 256).reshape(8, 32) >= 2**31
        assert np.array_equal(y != 0, want)
        compare(k, x, y, seed, lanes=32, target="sm_90", exact=True)
    assert len(k.specializations) == 1


def test_a_number_that_is_more_than_a_seed_stays_a_constant():
    @ts.kernel
    def k(out: Tensor["N", ts.uint32], n: int):
        out[0:n] = tile.random_bits(tile.arange(0, n), n)

    out = np.zeros(16, np.uint32)
    k(out, 8)
    assert np.array_equal(out[:8], random_bits(8, 8)) and not out[8:].any()


def test_seeds_that_are_none():
    @ts.kernel
    def lane(out: Tensor["N", ts.uint32]):
        i = tile.linear_id()
        if i < N:
            out[i] = tile.random_bits(0, i)

    with pytest.raises(ts.TesseraError, match="a seed is an integer, the same in all lanes, got "
                                              "lane int32"):
        lane(np.zeros(4, np.uint32))
    with pytest.raises(ts.TesseraError, match="argument seed: 9223372036854775808 does not fit"):
        words(seeded, 4, 2**63)
    with pytest.raises(ts.TesseraError, match="argument seed must be a number of type int64"):
        words(seeded, 4, "7")


# --- on a GPU ---------------------------------------------------------------------------------
@pytest.mark.row("TILE-62")
def test_a_launch_there_takes_the_interpreters_key(gpu, rng):
    gpu.extra = (*(Parameter("seed", f"word{a}", "i32", a) for a in (0, 1)),
                 Parameter("replays", "replays", "i64"))
    kernel, out = ts.kernel(bits.fn), filled(np.zeros(40, np.uint32))
    with config.scope(seed=21):
        for launch in (0, 2):  # counted with those of the interpreter
            kernel(Torch(out))
            seen = [gpu.seen[f"word{a}"] % 2**32 for a in (0, 1)]
            assert seen == stream(bits, 21, launch).tolist() and gpu.seen["replays"] == 0
            words()


def test_a_captured_launch_counts_its_replays(gpu, driver):
    gpu.extra = (Parameter("replays", "replays", "i64"),)
    driver.formats[b"tessera_add_one"] = "q"
    real, added = driver.run, []
    driver.run = lambda launch: added.append(launch.values[0]) \
        if launch.f == b"tessera_add_one" else real(launch)
    kernel, out = ts.kernel(bits.fn), filled(np.zeros(40, np.uint32))
    kernel(Torch(out))
    assert not added
    driver.capturing = CAPTURING
    for _ in range(2):
        kernel(Torch(out))
        assert added[-1] == gpu.seen["replays"] != 0
        assert not any(bytes(driver.memory[added[-1]])[len(FENCE):-len(FENCE)])
    assert added[0] != added[1]  # each launch in a graph has its own


@pytest.mark.parametrize("count", [0, 1, 2**33 + 7])
def test_the_key_of_a_replay(count):
    memory = GlobalMemory({"count": np.array([count])})
    body = random.launch_key().rule().body
    key = np.array([0x9E3779B9, 0x243F6A88], np.uint32)

    def run(at):
        given = [register(np.asarray(k), "i32") for k in key.view(np.int32)]
        got = body(Builder(Block(2, memory=memory)), *given, register(np.int64(at), "i64"))
        return [int(np.asarray(w).flat[0]) % 2**32 for w in got]

    assert run(0) == key.tolist()
    assert run(memory.pointers["count"]) == fold_in(key, count).tolist()


def test_the_kernel_that_counts_assembles():
    import subprocess
    import tempfile

    from tessera.runtime.ptxas import find_ptxas

    tool = find_ptxas()
    if tool is None:
        pytest.skip("no ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ADD_ONE)
        file.flush()
        for arch in ("sm_75", "sm_90a"):
            subprocess.run([tool, f"-arch={arch}", file.name, "-o", "/dev/null"], check=True)


def test_a_key_is_one_of_numerics():
    with config.scope(seed=77):
        assert list(next_launch("a kernel")) != list(next_launch("a kernel"))
