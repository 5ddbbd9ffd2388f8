"""What a checked run of a kernel doubts: blocks with gaps, extents that differ, what wraps."""

from __future__ import annotations

import linecache
import warnings

import numpy as np
import pytest

import tessera as ts
from kernels.build import build
from tessera import config

BY_ROWS_OF_X = """
@kernel
def alone(x: Tensor["M", f32], y: Tensor["N", f32], z: Tensor["M", f32]):
    y[tile_m:tile_m + 64] = tile.load(x[tile_m:tile_m + 64])
@kernel
def beside(x: Tensor["M", f32], y: Tensor["N", f32], z: Tensor["M", f32]):
    z[tile_m:tile_m + 64] = tile.load(x[tile_m:tile_m + 64])
    y[tile_m:tile_m + 64] = tile.load(x[tile_m:tile_m + 64])
@kernel
def joined(x: Tensor["M", f32], y: Tensor["N", f32]):
    y[tile_m:tile_m + 64] = tile.load(x[tile_m:tile_m + 64])
    y[M + tile_m:M + tile_m + 64] = tile.load(x[tile_m:tile_m + 64])
"""


@pytest.mark.parametrize("name", ["alone", "beside"])
@pytest.mark.parametrize("n, said", [(300, "100 are left as they were"), (200, None),
                                     (120, "80 of those have no place and are dropped")])
def test_a_store_by_blocks_of_another_extent_is_told(name, n, said):
    kernel = build(BY_ROWS_OF_X)[name]
    x, y, z = np.ones(200, np.float32), np.zeros(n, np.float32), np.zeros(200, np.float32)
    with warnings.catch_warnings(record=True) as told, config.scope(debug=True):
        warnings.simplefilter("always")
        kernel(x, y, z)
    assert y.sum() == min(n, 200) and len(told) == (said is not None)
    for warning in told:
        line = linecache.getline(warning.filename, warning.lineno).strip()
        assert line.startswith("y[tile_m") and said in str(warning.message)
    kernel(x, y, z)  # without the checks nothing is said


def test_a_tensor_that_is_stored_in_parts_is_not_judged():
    y = np.zeros(512, np.float32)
    with config.scope(debug=True):
        build(BY_ROWS_OF_X)["joined"](np.ones(256, np.float32), y)
    assert y.sum() == 512


DOUBTED = {
    "skipped": ("""
@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for n in range(0, N, 64):
        y[tile_m:tile_m + 8, n:n + 32] = tile.load(x[tile_m:tile_m + 8, n:n + 32]) #!
""", (np.ones((8, 128), np.float32), np.zeros((8, 128), np.float32)),
                "y is stored 32 elements at a time along axis 1, and the next ones begin 64"),
    "depths": ("""
@kernel
def k(x: Tensor["M", "K", f32], w: Tensor["N", "L", f32], y: Tensor["M", "N", f32]):
    acc = tile.zeros((8, 16))
    for k in range(0, K, 16):
        acc += tile.load(x[0:8, k:k + 16]) @ tile.load(w[0:16, k:k + 16]).T #!
    y[0:8, 0:16] = acc
""", (np.ones((8, 64), np.float32), np.ones((16, 32), np.float32), np.zeros((8, 16), np.float32)),
               "the matmul sums along K = 64 of x and L = 32 of w: what x has beyond 32 is left"),
    "wrapped": ("""
@kernel
def k(x: Tensor["N", i64]):
    i = tile.linear_id()
    if i < N:
        x[i] = i * 1000000 + i % 3 * 2147483647 #!
""", (np.zeros(3000, np.int64),), "does not fit into int32 and wraps to"),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_a_run_that_is_checked_tells_what_may_be_meant(name):
    source, arguments, said = DOUBTED[name]
    kernel = build(source)["k"]
    with warnings.catch_warnings(record=True) as told, config.scope(debug=True):
        warnings.simplefilter("always")
        kernel(*arguments)
    assert told and all("#!" in linecache.getline(w.filename, w.lineno) for w in told)
    assert said in str(told[0].message)
    kernel(*arguments)  # without the checks nothing is said


def test_rows_that_other_groups_store_are_no_gaps():
    kernel = build("""
@kernel(grid=(4,))
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    for m in tile.range(tile.group_id(0) * 8, M, 32):
        y[m:m + 8, 0:N] = tile.load(x[m:m + 8, 0:N])
""")["k"]
    x, y = np.ones((70, 5), np.float32), np.zeros((70, 5), np.float32)
    with warnings.catch_warnings(), config.scope(debug=True):
        warnings.simplefilter("error")
        kernel(x, y)
    assert y.all()


def test_a_part_of_what_is_written_as_a_number_is_meant():
    kernel = build("""
@kernel
def k(q: Tensor["M", 32, f32], cache: Tensor["T", 48, f32], y: Tensor["M", "T", f32]):
    y[0:16, 0:16] = tile.load(q[0:16, :]) @ tile.load(cache[0:16, 0:32]).T
""")["k"]
    with warnings.catch_warnings(), config.scope(debug=True):
        warnings.simplefilter("error")
        kernel(np.ones((16, 32), np.float32), np.ones((16, 48), np.float32),
               np.zeros((16, 16), np.float32))


def test_results_in_the_same_memory_are_told():
    kernel = build("""
@kernel
def k(x: Tensor["N", f32], a: Tensor["N", f32], b: Tensor["N", f32]):
    t = tile.load(x[tile_n:tile_n + 16])
    a[tile_n:tile_n + 16] = t
    b[tile_n:tile_n + 16] = t * t
""")["k"]
    x, y = np.ones(48, np.float32), np.zeros(96, np.float32)
    with config.scope(debug=True):
        kernel(x, y[:48], y[48:])
        with pytest.warns(RuntimeWarning, match="a and b share memory, and the kernel writes both"):
            kernel(x, y[:48], y[:48])


def test_linters_count_in_kernels_with_asynchronous_copies():
    kernel = build("""
@kernel
def k(x: Tensor["M", 32, f32], y: Tensor["M", 32, f32]):
    m, t = tile.group_id(), tile.local_id()
    s = tile.alloc_shared((1, 32), f32)
    tile.cp_async(s, x[m:m + 1, 0:32])
    tile.barrier()
    y[m, t] = s[0, 31 - t]
""")["k"]
    arguments = np.ones((3, 32), np.float32), np.zeros((3, 32), np.float32)
    for lint, said in ((ts.debug.bank_conflicts, "none"), (ts.debug.coalescing, "100%"),
                       (ts.debug.race_check, "none found")):
        assert said in str(lint(kernel, *arguments, groups=3, lanes=32)).partition("\n")[0]
