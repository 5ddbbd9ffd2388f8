"""Atomic updates at a tile of positions, which give what was there."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera import Tensor, f32, int32

tile = ts.tile


@ts.kernel
def places(e: Tensor["T", int32], fill: Tensor["E", int32], at: Tensor["T", int32], BT=16):
    i = tile.load(e[tile_t:tile_t+BT])
    at[tile_t:tile_t+BT] = tile.atomic_add(fill, i, 1)


@ts.kernel
def updates(x: Tensor["A", "B", int32], i: Tensor["N", int32], old: Tensor["N", int32],
            MODE: int):
    t = tile.load(i[0:8])
    if MODE == 0:
        old[0:8] = tile.atomic_max(x, (t, t), 5)
    elif MODE == 1:
        old[0:8] = tile.atomic_exchange(x[1], t, t * 2)
    elif MODE == 2:
        tile.atomic_add(x, (1, t), t)
    elif MODE == 3:
        old[0:8] = tile.atomic_add(x, (t, 1), t)
    elif MODE == 4:
        old[0:8] = tile.atomic_add(x, t, t)
    else:
        old[0:8] = tile.atomic_add(x, (1, t), t, release=True)


@pytest.mark.parametrize("lanes", [32, 128])
def test_an_update_at_a_tile_of_positions_gives_what_was_there(lanes, rng):
    """Each of equal positions gets a number of its own; threads that repeat others learn what the
    first of them got."""
    e = rng.integers(0, 5, 40).astype(np.int32)
    fill, at = np.zeros(5, np.int32), np.full(40, -1, np.int32)
    with ts.config.scope(debug=True):
        places(e, fill, at)
    assert np.array_equal(fill, np.bincount(e, minlength=5))
    assert all(np.array_equal(np.sort(at[e == j]), np.arange(n)) for j, n in enumerate(fill))
    compare(places, e, np.zeros(5, np.int32), np.full(40, -1, np.int32), lanes=lanes,
            target="sm_90", lockstep=False)


def test_updates_of_other_kinds_and_places(rng):
    i = np.array([0, 1, 2, 3, 9, -1, 5, 6], np.int32)
    for mode in range(3):
        x = rng.integers(0, 10, (4, 9)).astype(np.int32)
        got, old = x.copy(), np.zeros(8, np.int32)
        updates(got, i, old, mode)
        want = x.copy()
        if mode == 0:
            want[range(4), range(4)] = np.maximum(want[range(4), range(4)], 5)
            assert old.tolist() == [*x[range(4), range(4)], 0, 0, 0, 0]
        else:
            inside = i[(i >= 0) & (i < 9)]
            want[1, inside] = inside * 2 if mode == 1 else want[1, inside] + inside
            if mode == 1:
                assert old.tolist() == [*x[1, :4], 0, 0, *x[1, 5:7]]
        assert np.array_equal(got, want)
        compare(updates, x, i, np.zeros(8, np.int32), mode, lanes=32, target="sm_90",
                lockstep=False)


@pytest.mark.parametrize("mode, said", [
    (3, "tiles of positions stand behind the numbers"), (4, "1 indices for tensor<A x B"),
    (5, "atomic_add(release=True) is of one element")])
def test_updates_that_are_refused(mode, said):
    with pytest.raises(ts.TesseraError, match=re.escape(said)):
        updates(np.zeros((4, 9), np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32), mode)


@ts.kernel
def chosen_by_rows(x: Tensor["M", 8, f32], one: Tensor["M", int32], count: Tensor[8, int32],
                   slots: Tensor[64, int32], LOADED: bool, READ: bool):
    for m in tile.range(0, M, 32):
        at = tile.row_argmin(tile.load(x[m:m+32, 0:8]))
        at = tile.where(m + tile.arange(0, 32) < M, at, -1)
        before = tile.atomic_add(count, at, tile.load(one[m:m+32]) if LOADED else 1)
        if READ:
            slots[at * 8 + before] = tile.full((32,), 1, int32)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_positions_that_a_row_has_chosen(loaded, read, rng):
    """The tile of positions has what is left of a matrix' layout, four threads to a row; each
    position is met once."""
    x = rng.standard_normal((29, 8), np.float32)
    arrays = [np.ones(29, np.int32), np.zeros(8, np.int32), np.zeros(64, np.int32)]
    chosen_by_rows(x, *arrays, loaded, read)
    assert np.array_equal(arrays[1], np.bincount(x.argmin(1), minlength=8))
    assert arrays[2].sum() == (29 if read else 0)
    compare(chosen_by_rows, x, np.ones(29, np.int32), np.zeros(8, np.int32),
            np.zeros(64, np.int32), loaded, read, target="sm_90a", lanes=128, lockstep=not read)
