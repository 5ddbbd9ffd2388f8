"""Loops that never end are noticed, groups may wait for each other, and Ctrl-C shows the line."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, config, f32, int32
from tessera.tile.ir.errors import KernelError

tile = ts.tile


@ts.kernel
def chain(flag: Tensor["G", int32], y: Tensor["G", int32]):
    g = tile.group_id(0)
    if g > 0:
        while tile.group_max(tile.atomic_add(flag, g - 1, 0)) == 0:
            pass
    y[g] = g
    tile.atomic_add(flag, g, 1)


@ts.kernel
def backwards(flag: Tensor["G", int32], y: Tensor["G", int32]):
    g = tile.group_id(0)
    tries = 0
    while g + 1 < G and flag[g + 1] == 0:
        tries += 1
    y[g] = tries
    flag[g] = 1


@ts.kernel
def scan(x: Tensor["N", f32], y: Tensor["N", f32], total: Tensor["G", f32],
         state: Tensor["G", int32]):
    """Prefix sums in one pass: each group waits for the sum of those before it."""
    g = tile.group_id(0)
    own = tile.cumsum(tile.load(x[g * 32:g * 32 + 32]))
    before = 0.0
    if g > 0:
        while tile.atomic_add(state, g - 1, 0) == 0:
            pass
        before = total[g - 1]
    y[g * 32:g * 32 + 32] = own + before
    total[g] = before + tile.reduce_sum(tile.load(x[g * 32:g * 32 + 32]))
    tile.atomic_add(state, g, 1, release=True)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 100])
def test_groups_that_wait_for_others_go_on(groups, debug):
    flag, y = np.zeros(groups, np.int32), np.full(groups, -1, np.int32)
    with config.scope(debug=debug):
        chain[groups](flag, y)
    assert np.array_equal(y, np.arange(groups)) and (flag != 0).all()


def test_waiting_for_a_later_group_that_counts_its_tries():
    flag, y = np.zeros(20, np.int32), np.full(20, -1, np.int32)
    backwards[20](flag, y)
    assert (flag == 1).all() and y[19] == 0 and (y >= 0).all()


def test_a_scan_in_one_pass(rng):
    x = rng.integers(-8, 9, 20 * 32).astype(np.float32)
    y = np.full_like(x, np.nan)
    scan[20](x, y, np.zeros(20, np.float32), np.zeros(20, np.int32))
    assert np.array_equal(y, np.cumsum(x))  # small integers: every order of the sum is exact


def test_what_a_kernel_did_before_it_waited_is_done_once():
    @ts.kernel
    def k(flag: Tensor["G", int32], count: Tensor["G", int32]):
        g = tile.group_id(0)
        if tile.local_id() == 0:
            tile.atomic_add(count, g, 1)
        while g > 0 and tile.atomic_add(flag, g - 1, 0) == 0:
            pass
        tile.atomic_add(flag, g, 1)

    flag, count = np.zeros(5, np.int32), np.zeros(5, np.int32)
    k[5](flag, count)
    assert (count == 1).all() and (flag == 1).all()


def test_groups_that_wait_for_each_other():
    @ts.kernel
    def k(flag: Tensor["G", int32]):
        g = tile.group_id(0)
        while tile.atomic_add(flag, (g + 1) % G, 0) == 0:
            pass
        tile.atomic_add(flag, g, 1)

    flag = np.zeros(3, np.int32)
    with pytest.raises(KernelError, match="group 0 waits here for what no group does: all 3 groups "
                                          "that have not ended wait") as caught:
        k[3](flag)
    assert caught.value.code == "E_ENDLESS"
    assert "while tile.atomic_add" in str(caught.value.where)


def test_a_group_that_waits_for_nobody():
    @ts.kernel
    def k(flag: Tensor["G", int32]):
        if tile.group_id(0) == 2:
            while flag[5] == 0:
                pass
        else:
            flag[tile.group_id(0)] = 1

    with pytest.raises(KernelError, match="group 2 waits here .* all 1 groups"):
        k[4](np.zeros(6, np.int32))


def forever(x: Tensor["N", f32]):
    while True:
        pass


def never_changes(x: Tensor["N", f32]):
    y = x[0]
    while y < 10.0:
        y *= 1.0


def writes_the_same(x: Tensor["N", f32]):
    while x[0] > 0.0:
        x[1] = 3.0
        for _ in range(4):
            x[2] = x[1]


def one_lane_waits(x: Tensor["N", f32]):
    s = tile.alloc_shared((1,), f32)
    s[0] = 0.0
    tile.barrier()
    if tile.local_id() == 0:
        while s[0] == 0.0:
            pass
    else:
        s[0] = 1.0


@pytest.mark.parametrize("body", [forever, never_changes, writes_the_same, one_lane_waits])
def test_a_loop_that_never_ends(body):
    start = time.process_time()
    with pytest.raises(KernelError, match="an iteration changes nothing") as e:
        ts.kernel(body)(np.ones(8, np.float32))
    assert "while" in str(e.value.where) and time.process_time() - start < 5


def test_long_loops_are_no_endless_ones():
    @ts.kernel
    def k(x: Tensor["N", int32], y: Tensor["N", int32]):
        at, steps = 0, 0
        while x[at] != at:  # a list of 6000 links, read and not written
            at = x[at]
            steps += 1
        y[tile.group_id(0)] = steps

    links = np.minimum(np.arange(6000) + 1, 5999).astype(np.int32)
    y = np.zeros(6000, np.int32)
    k[2, 1](links, y)
    assert y[0] == y[1] == 5999


# --- Ctrl-C -------------------------------------------------------------------------------------
def counts(x: Tensor["N", f32]):
    i = 0
    while i >= 0:
        i = (i + 1) % 1000


def counts_and_reads(x: Tensor["N", f32]):
    i = 0
    while x[0] > 0.0:
        i = (i + 1) % 1000


@pytest.mark.parametrize("body", [counts, counts_and_reads])
def test_an_interrupt_shows_the_line(body):
    def stop(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            ts.kernel(body)[3](np.ones(4, np.float32))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    text = str(caught.value)
    assert f"{body.__name__} was interrupted at tests/cpu/test_kernel_progress.py:" in text
    assert "while" in text or "i = (i + 1)" in text
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
