"""gather and scatter: under the interpreter, and as the CUDA emitter writes them, emulated."""

from __future__ import annotations

import numpy as np
import pytest

import emulator
import tessera as ts
from kernel_meanings import compared
from kernels.build import build
from kernels.gathers import CASES, TYPES, rows_of, values
from tessera import config
from tessera.errors import TesseraError
from tessera.numerics import decode, f32
from tessera.tile.ir.errors import RaceError


def kernel(source: str):
    return build("@kernel\n" + source)["k"]


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Under the sanitizer, and each kernel is told in ops of the graph beside."""
    with compared(monkeypatch), config.scope(debug=True):
        yield


# --- meaning ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5,), (8, 4), (2, 3, 4)])
def test_elements_at_an_index_of_any_shape(shape, rng):
    k = kernel(f"""def k(x: Tensor["n", f32], at: Tensor[{', '.join(map(str, shape))}, i64],
      y: Tensor[{', '.join(map(str, shape))}, f32]):
    whole = tile.load(at[...])
    y[...] = tile.gather(x, whole, fill=-7.5)
""")
    x, at = floats(rng, 20), rng.integers(-5, 25, shape)
    y = np.empty(shape, np.float32)
    k(x, at, y)
    inside = (at >= 0) & (at < 20)
    assert np.array_equal(y, np.where(inside, x[np.clip(at, 0, 19)], np.float32(-7.5)))


@pytest.mark.parametrize("how", ["tile.gather(t[:, 0:16], at)", "t[at, 0:16]",
                                 "tile.gather(t, at, axis=-2)", "t[at]"])
def test_rows_of_a_table(how, rng):
    whole = "16" not in how
    k = kernel(f"""def k(t: Tensor["V", "D", f32], ids: Tensor["n", i32], y: Tensor["n", "D", f32]):
    for i in range(0, n, 8):
        at = tile.load(ids[i:i+8])
        y[i:i+8, 0:{'D' if whole else 16}] = {how}
""")
    for V, D, n in ((50, 12, 21), (1, 16, 8), (7, 5, 3), (0, 4, 5)):
        t, ids = floats(rng, V, D), rng.integers(-2, V + 2, n).astype(np.int32)
        y = np.full((n, D), np.nan, np.float32)
        k(t, ids, y)
        assert np.array_equal(y, rows_of(t, ids))
    assert len(k.specializations) == (4 if whole else 1)  # D, never V


def test_other_axes_and_single_indices(rng):
    k = kernel("""def k(x: Tensor["B", "S", "V", f32], ids: Tensor["n", i32],
      columns: Tensor[5, "n", f32], block: Tensor[4, "n", 3, f32]):
    at = tile.load(ids[0:8])
    columns[0:5, 0:8] = tile.gather(x[1, 0:5], at, axis=1)
    block[:, 0:8, :] = tile.gather(x[0:4, 1:9, 2:5], at, axis=1, fill=1.0)
""")
    x, ids = floats(rng, 4, 12, 9), rng.integers(0, 9, 8).astype(np.int32)
    columns, block = np.empty((5, 8), np.float32), np.empty((4, 8, 3), np.float32)
    k(x, ids, columns, block)
    assert np.array_equal(columns, x[1, :5][:, ids])
    wanted = x[:4, 1 + ids][:, :, 2:5]  # a slice bounds the positions, and shifts them
    wanted[:, ids >= 8] = 1.0
    assert np.array_equal(block, wanted)


def test_boxes_with_a_name_and_rows(rng):
    k = kernel("""def k(x: Tensor["B", "n", f32], ids: Tensor[4, i32], y: Tensor[3, 4, f32]):
    at, box = tile.load(ids[...]), x[1, 3:9]
    y[0] = tile.gather(box, at, fill=-1.0)
    y[1] = tile.gather(x[0], at, fill=-1.0)
    y[2] = x[tile.group_id() + 1, ids[...]]
""")
    x, ids = floats(rng, 2, 8), np.array([0, 5, 6, 8], np.int32)
    y = np.empty((3, 4), np.float32)
    k(x, ids, y)
    assert np.array_equal(y, [[x[1, 3], -1, -1, -1], [x[0, 0], x[0, 5], x[0, 6], -1],
                              [x[1, 0], x[1, 5], x[1, 6], 0]])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
                                   "uint64"])
def test_an_index_of_any_integer_type(dtype, rng):
    k = kernel(f"""def k(x: Tensor["n", f32], at: Tensor["m", ts.{dtype}], y: Tensor["m", f32],
      z: Tensor["n", f32]):
    for i in range(0, m, 16):
        y[i:i+16] = x[at[i:i+16]]
        tile.scatter(z, at[i:i+16], 1.0, mode="add")
""")
    ids = np.array([0, 3, 3, 19, 20, 127, -1 if dtype[0] == "i" else 255]).astype(dtype)
    x, z = floats(rng, 20), np.zeros(20, np.float32)
    y = np.empty(7, np.float32)
    k(x, ids, y, z)
    assert np.array_equal(y, [*x[[0, 3, 3, 19]], 0, 0, 0])
    assert z.sum() == 4 and z[3] == 2 and z[0] == z[19] == 1  # the tail of the index is nowhere


@pytest.mark.parametrize("dtype", TYPES)
def test_any_type_of_element(dtype, rng):
    k = kernel(f"""def k(t: Tensor["V", "D", ts.{dtype}], ids: Tensor["n", i32],
      y: Tensor["W", "D", ts.{dtype}]):
    at = tile.load(ids[0:8])
    y[at, 0:16] = t[at, 0:16]
""")
    t, y = values(rng, (20, 13), dtype), values(rng, (17, 13), dtype)
    ids = (rng.permutation(24)[:8] - 2).astype(np.int32)
    before, there = _numbers(y), [i for i in ids if 0 <= i < 17]
    k(t, ids, y)
    wanted = before.copy()
    wanted[there] = _numbers(t)[there]
    assert np.array_equal(_numbers(y), wanted)


def _numbers(x) -> np.ndarray:
    return x.copy() if isinstance(x, np.ndarray) else decode(x.numpy(), f32) \
        if x.dtype is f32 else np.array(x.tolist())


@pytest.mark.parametrize("mode", ["store", "add"])
def test_scatter_of_rows(mode, rng):
    k = kernel(f"""def k(x: Tensor["n", 8, f32], ids: Tensor["n", i32], y: Tensor["V", 8, f32]):
    for i in range(0, n, 4):
        tile.scatter(y, ids[i:i+4], x[i:i+4], mode="{mode}")
""")
    x, y = floats(rng, 10, 8), np.ones((30, 8), np.float32)
    ids = rng.permutation(34)[:10].astype(np.int32) - 2 if mode == "store" else \
        rng.integers(-1, 5, 10).astype(np.int32)
    wanted = y.copy()
    for i, row in zip(ids, x, strict=True):
        if 0 <= i < 30:
            wanted[i] = row if mode == "store" else wanted[i] + row
    k(x, ids, y)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)


def test_shared_buffers(rng):
    k = kernel("""def k(x: Tensor[16, 32, f32], ids: Tensor[8, i32], y: Tensor[8, 32, f32],
      z: Tensor[16, 32, f32]):
    s = tile.alloc_shared((16, 32), f32, swizzle="xor")
    s[...] = tile.load(x[...])
    tile.barrier()
    at = tile.load(ids[...])
    y[...] = tile.gather(s, at)
    tile.barrier()
    tile.scatter(s, at, tile.zeros((8, 32)) - 1.0)
    tile.barrier()
    z[...] = tile.load(s)
""")
    x, ids = floats(rng, 16, 32), rng.permutation(16)[:8].astype(np.int32)
    y, z = np.empty((8, 32), np.float32), np.empty((16, 32), np.float32)
    k(x, ids, y, z)
    assert np.array_equal(y, x[ids])
    x[ids] = -1
    assert np.array_equal(z, x)


def test_a_reduction_leaves_out_what_lies_beyond(rng):
    """Rows beyond the index and columns beyond the table are no part of a maximum."""
    k = kernel("""def k(t: Tensor["V", "D", f32], ids: Tensor["n", i32], y: Tensor[16, f32],
      z: Tensor[16, f32]):
    rows = t[tile.load(ids[0:16]), 0:16]
    y[...] = tile.row_max(rows)
    z[...] = tile.col_max(rows)
""")
    t, ids = -1 - np.abs(floats(rng, 9, 11)), np.array([2, 5, 3], np.int32)
    y, z = np.empty(16, np.float32), np.empty(16, np.float32)
    k(t, ids, y, z)
    assert np.array_equal(y[:3], t[ids].max(1)) and np.array_equal(z[:11], t[ids].max(0))


# --- mistakes -----------------------------------------------------------------------------------
SETUP = """def k(x: Tensor["n", 8, f32], ids: Tensor[4, i32], y: Tensor["n", 8, f32]):
    at = tile.load(ids[...])
    v = tile.load(x[0:4])
    """
ARGS = (np.ones((9, 8), np.float32), np.array([1, 2, 2, 3], np.int32), np.ones((9, 8), np.float32))
MISTAKES = {
    "tile.gather(v, at)": "works on a tensor, a buffer or a slice of one",
    "tile.gather(x, 3)": "needs a tile of integers as its index, got 3",
    "tile.gather(x, tile.load(x[0:4, 0]))": "needs a tile of integers as its index, got tile<4 x "
                                            "f32>",
    "tile.gather(x, at, axis=2)": "along axis 2 of a place with 2 axes",
    "tile.gather(x, at, fill=v)": "fill must be a compile-time number",
    "tile.gather(x[0:4], (at, at))": "they are of axes that follow each other, whole ones",
    "tile.gather(x, (at, at, at))": "by 3 tiles of positions: they are of axes that follow",
    "tile.gather(x, (at, 1.5))": "needs tiles of integers as its index, got 1.5",
    "y[at, 0:4] = v": "need a tile of shape [4, 4]",
    "y[at] += v": "ts.tile.scatter(x, index, tile, mode='add') adds each",
    "tile.scatter(y, at, v, mode='max')": "'store' or 'add'",
    "tile.gather(tile.alloc_register((4,), f32), at)": "elements of an array in registers",
}


@pytest.mark.parametrize("code, text", MISTAKES.items())
def test_mistakes_are_said(code, text):
    with pytest.raises(TesseraError) as caught:
        kernel(SETUP + code)(*ARGS)
    assert text in str(caught.value) and "at /kernels" in str(caught.value)


def test_elements_below_a_byte_are_not_added_to():
    with pytest.raises(TesseraError, match="less than a byte share a word"):
        kernel("""def k(y: Tensor["n", ts.int4], ids: Tensor[4, i32]):
    tile.scatter(y, ids[...], 1, mode="add")
""")(ts.zeros((8,), "int4"), np.zeros(4, np.int32))


def test_two_elements_at_one_place_are_a_race():
    with pytest.raises(RaceError) as caught:
        kernel(SETUP + "tile.scatter(y, at, v * tile.cast(at, f32)[:, None] + "
               "tile.cast(tile.arange(4), f32)[:, None])")(*ARGS)
    text = str(caught.value)
    assert "race on 'y'[2, 0]" in text and "elements [1, 0] and [2, 0]" in text
    assert "mode='add'" in text
    kernel(SETUP + "tile.scatter(y, at, v)")(*ARGS)  # equal rows: whichever stays


def test_groups_that_meet_are_a_race(rng):
    k = kernel("""def k(x: Tensor["n", f32], ids: Tensor["n", i32], y: Tensor["n", f32]):
    for i in tile.range(0, n, 4, over="groups"):
        tile.scatter(y, ids[i:i+4], x[i:i+4], mode="add")
        z = tile.gather(y, ids[i:i+4])
        tile.scatter(y, ids[i:i+4], z)
""")
    with pytest.raises(TesseraError):  # said when it is compiled: iterations may touch one element
        k(floats(rng, 16), np.arange(16, dtype=np.int32) // 2, np.zeros(16, np.float32))
    k = kernel("""def k(x: Tensor["n", f32], ids: Tensor["n", i32], y: Tensor["n", f32]):
    i = tile.group_id() * 4
    tile.scatter(y, ids[i:i+4], x[i:i+4])
""")
    with pytest.raises(RaceError, match="group"):
        k[4](floats(rng, 16), np.arange(16, dtype=np.int32) % 4, np.zeros(16, np.float32))


# --- emitted code -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_emitted_as_interpreted(name, rng):
    case = CASES[name]
    emulator.compare(build(case.source)["k"], *case.args(rng), lanes=case.lanes,
                     lockstep=case.lanes > 32, rtol=1e-5, atol=1e-5)


def test_barriers_between_what_may_meet(rng):
    """Another thread may have written what is gathered; sums need no order among themselves."""
    from tessera.tile.ir.ir import Op, walk

    def barriers(body):
        k = kernel(f"""def k(x: Tensor["n", f32], ids: Tensor["m", i32], y: Tensor["n", f32]):
    for i in range(0, m, 32):
        at = tile.load(ids[i:i+32])
        {body}
""")
        made = emulator.compare(k, floats(rng, 64), rng.permutation(64).astype(np.int32),
                                     np.zeros(64, np.float32), lanes=64)
        return sum(isinstance(n, Op) and n.name == "barrier" for n in walk(made.function.body))

    assert barriers("tile.scatter(y, at, x[at])") == 1
    assert barriers("tile.scatter(y, at, y[at])") == 2
