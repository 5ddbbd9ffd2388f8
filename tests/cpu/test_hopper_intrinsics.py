"""What warp-specialised programs call, emulated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emulator
from emulator.bulk_stores import Descriptor
from tessera.numerics import decode, encode, find_dtype, random_bits_at
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import random, tile_scheduler, warp_specialised
from tessera.tile.cuda.intrinsics.shared_memory import swizzle
from tessera.tile.cuda.lower.warp_specialised.program import Load, turned_panel
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import warpgroups


# --- intrinsics, emulated -----------------------------------------------------------------------
def body_of(operation):
    return operation.rule(*[None] * operation.arity).body


@pytest.mark.parametrize("extents", [(3, 5), (4, 1), (2, 3, 4)])
def test_the_order_on_a_gpu_is_the_order(extents):
    rank, tiles = len(extents), int(np.prod(extents))
    order, outer = (tuple(range(rank))[::-1], 0) if rank == 2 else ((0, 2, 1), 1)
    b = emulator.Builder(emulator.Block(tiles))
    made = body_of(tile_scheduler.tile_order(order, outer, rank - 1))(
        b, b.block.t, b.i32(2), *map(b.i32, extents))
    want = OPS["tile_order"].numpy(
        b.block.t[:, None], np.array([[2]]), *(np.array([[n]]) for n in extents),
        order=order, outer=outer, reversed=rank - 1)
    np.testing.assert_array_equal(np.stack(made), np.stack(want)[..., 0])


@pytest.mark.parametrize("order, outer, extents", [
    ((0, 1), 0, (7, 1)), ((1, 0), 0, (1, 7)), ((0, 1), 1, (1, 7)), ((1, 0), 1, (7, 1))])
def test_where_the_other_axis_has_one_tile_a_tile_is_found_by_its_number(order, outer, extents):
    """What emitted programs rely on, without a division (emit/warp_specialised.py)."""
    found = OPS["tile_order"].numpy(
        np.arange(7)[:, None], np.array([[2]]), *(np.array([[n]]) for n in extents),
        order=order, outer=outer)
    strip = order[outer]
    np.testing.assert_array_equal(found[strip][:, 0], np.arange(7))
    assert not found[1 - strip].any()


@given(lo=st.integers(0, 40), room=st.integers(-20, 200), start=st.integers(0, 200),
       less=st.integers(-40, 40))
def test_a_warpgroup_begins_with_the_first_iteration_of_which_it_keeps_a_score(
        lo, room, start, less):
    """Of 64 rows each, with steps of 24 and 16 columns."""
    step, columns, hi = 24, 16, lo + room
    b = emulator.Builder(emulator.Block(3))
    found = body_of(tile_scheduler.own_start(64, step, columns))(
        b, *map(b.i32, (lo, hi, start, less)), b.block.t)
    for group, got in enumerate(np.broadcast_to(found, 3)):
        kept = [i for i in range(lo, hi, step)
                if start + 64 * group <= i + less + columns - 1]  # its first row, the last column
        assert got == (kept[0] if kept else lo + -(-max(0, hi - lo) // step) * step)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rows", "columns"])
@pytest.mark.parametrize("columns", [8, 16, 24])
def test_lanes_that_share_runs_of_words_exchange_them(order, columns):
    """Of a sum of wgmma a run lies in two lanes, of its transpose in four; each word is that of its
    index, and of as many runs as lanes share them a lane makes one."""
    layout, threads = warpgroups((64, columns), 1).permuted(order), np.arange(128)
    key = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    at = [sum(((threads >> i & 1) << bit[1] for i, bit in enumerate(layout.threads)
               if bit[0] == axis), np.zeros(128, np.int64)) for axis in (0, 1)]
    index = [(base[0] + at[0]) * 4096 + base[1] + at[1] + (1 << 33) for base in layout.bases]
    b = emulator.Builder(emulator.Block(128))
    found = body_of(random.random_runs("int64", layout.text, layout.shape))(
        b, [emulator.register(i) for i in index], *map(b.i32, key.view(np.int32)))
    for x, i in zip(found, index, strict=True):
        assert np.array_equal(np.asarray(x).view(np.uint32), random_bits_at(key, i))


@pytest.mark.parametrize("rows, columns, left", [(128, 64, (128, 64)), (256, 32, (133, 24))])
def test_stores_of_sixteen_bytes_reach_their_places(rows, columns, left):
    layout = warpgroups((rows, columns), 2)
    codes = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    found = np.full((rows, 1000), 0xFFFF, np.uint16)
    store_quads(layout, decode(codes.view(ml_dtypes.bfloat16), "bf16"), found, left)
    want = np.full((rows, columns), 0xFFFF, np.uint16)
    want[:left[0], :left[1]] = codes[:left[0], :left[1]]
    np.testing.assert_array_equal(found[:, :columns], want)
    assert (found[:, columns:] == 0xFFFF).all()


def store_quads(layout, x, found, left, dtype="bf16") -> None:
    """What two consumer warpgroups store of x, from the first element of `found` on."""
    block = emulator.Block(256, memory=emulator.GlobalMemory({"found": found}))
    row = (block.t >> 2 & 7) | (block.t >> 5 & 7) << 4
    column = (block.t & 3) * 2
    held = [x[row + base[0], column + base[1]] for base in layout.bases]
    operation = warp_specialised.store_quads(layout.text, layout.shape, dtype)
    pitch, start = found.strides[0], block.memory.pointers["found"]
    block.operate(operation, held, start + row * pitch, pitch, block.t & 3, left[0] - row, left[1])
    block.memory.copy_back()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_what_is_stored_is_rounded_and_nan_stays(dtype, rng):
    layout, d = warpgroups((128, 64), 2), find_dtype(dtype)
    x = rng.standard_normal(128 * 64).astype(np.float32)
    x[rng.permutation(x.size)[:300]] = np.where(rng.random(300) < 0.5, -np.nan, np.nan)
    x[rng.permutation(x.size)[:20]] = np.repeat(np.float32([np.inf, -np.inf]), 10)
    x = x.reshape(128, 64)
    found = np.zeros((128, 64), np.uint16)
    store_quads(layout, x, found, (128, 64), dtype)
    found = decode(found.view(d.numpy), d)
    np.testing.assert_array_equal(found, decode(encode(x, d), d))
    assert np.isnan(found).any() and np.isinf(found).any()


@pytest.mark.parametrize("rows, columns, groups, buffers, shape, corner", [
    (128, 256, 2, 2, (300, 600), (128, 256)), (128, 256, 2, 2, (200, 296), (128, 256)),
    (256, 128, 2, 3, (256, 128), (0, 0)), (192, 64, 3, 1, (3, 190, 72), (1, 0, 0)),
    (64, 192, 1, 2, (70, 2, 200), (0, 1, 0)), (128, 224, 2, 3, (200, 440), (128, 224)),
    (192, 96, 3, 2, (192, 96), (0, 0)),
    (128, 112, 2, 2, (128, 240), (0, 112)), (64, 72, 1, 2, (70, 80), (0, 0))], ids=str)
def test_panels_leave_by_tma(rows, columns, groups, buffers, shape, corner, rng):
    """Each element at its place, nothing outside, and no panel is overwritten before TMA has
    read it, though it reads as late as it may."""
    layout, rank, axis = warpgroups((rows, columns), groups), len(shape), 0 if shape[1] == 2 else -2
    tile = rng.integers(0, 0x7F80, (rows, columns)).astype(np.uint16)
    x = decode(tile.view(ml_dtypes.bfloat16), "bf16")
    found = np.full(shape, 0xFFFF, np.uint16)
    threads = 128 * groups
    block = emulator.Block(threads, memory=emulator.GlobalMemory({"found": found}))
    t = block.t
    row, column = (t >> 2 & 7) | (t >> 5) << 4, (t & 3) * 2
    held = [x[row + base[0], column + base[1]] for base in layout.bases]
    box = [1] * rank
    box[axis], box[-1] = 16, 64
    block.bulk.maps[77] = Descriptor(block.memory.pointers["found"], shape, found.strides,
                                     tuple(box))
    operation = warp_specialised.store_panels(
        layout.text, layout.shape, "bf16", rank, rank - 1 - axis % rank, 2048, buffers)
    for _ in range(2):  # a second tile finds the buffers of the first
        block.operate(operation, held, 77, t, *reversed(corner))
    block.operate(find_instruction("bulk_wait_read_0"))
    block.memory.copy_back()
    want = np.full(shape, 0xFFFF, np.uint16)
    at = tuple(slice(c, c + n) for c, n in zip(corner, (
        *[1] * (axis % rank), rows, *[1] * (rank - 2 - axis % rank), columns), strict=True))
    part = want[at]
    cut = tile.reshape([rows if i == axis % rank else columns if i == rank - 1 else 1
                        for i in range(rank)])
    part[:] = cut[tuple(slice(n) for n in part.shape)]
    np.testing.assert_array_equal(found, want)
    assert "conflicts of stmatrix" not in block.counts


@pytest.mark.parametrize("rows, columns, groups, buffers, shape, corner", [
    (96, 128, 2, 2, (300, 512), (96, 128)), (128, 256, 2, 3, (200, 296), (128, 0)),
    (64, 64, 1, 1, (3, 100, 72), (1, 64, 0)), (32, 192, 3, 2, (31, 200), (0, 0)),
    (240, 128, 2, 4, (470, 256), (240, 128)), (72, 64, 1, 2, (70, 80), (0, 0))], ids=str)
def test_panels_of_a_transpose_leave_by_tma(rows, columns, groups, buffers, shape, corner, rng):
    """The same of warps that lie side by side, each with 16 columns at a time."""
    layout, rank = warpgroups((columns, rows), groups).permuted((1, 0)), len(shape)
    tile = rng.integers(0, 0x7F80, (rows, columns)).astype(np.uint16)
    x, found = decode(tile.view(ml_dtypes.bfloat16), "bf16"), np.full(shape, 0xFFFF, np.uint16)
    block = emulator.Block(128 * groups, memory=emulator.GlobalMemory({"found": found}))
    t, each = block.t, turned_panel((rows, columns))[0]
    row, column = (t & 3) * 2, (t >> 2 & 7) | (t >> 5) << 4
    held = [x[row + base[0], column + base[1]] for base in layout.bases]
    block.bulk.maps[77] = Descriptor(block.memory.pointers["found"], shape, found.strides,
                                     (*[1] * (rank - 2), each, 16))
    operation = warp_specialised.store_turned_panels(
        layout.text, layout.shape, "bf16", rank, 1, 2048, buffers, each)
    for _ in range(2):
        block.operate(operation, held, 77, t, *reversed(corner))
    block.operate(find_instruction("bulk_wait_read_0"))
    block.memory.copy_back()
    want = np.full(shape, 0xFFFF, np.uint16)
    part = want[corner[:-2]][corner[-2]:corner[-2] + rows, corner[-1]:corner[-1] + columns]
    part[:] = tile[:part.shape[0], :part.shape[1]]
    np.testing.assert_array_equal(found, want)
    assert "conflicts of stmatrix" not in block.counts


def in_panels(tile, load) -> emulator.Block:
    """A block of 256 threads with a tile in shared memory, in panels as TMA writes them."""
    size, wide = load.dtype.bits // 8, load.panel_box[-1]
    memory = np.full(load.bytes, 0xFF, np.uint8)
    for (r, c), x in np.ndenumerate(tile):
        at = c // wide * load.panel_bytes + swizzle(r, c % wide * size, load.width_bytes)
        memory[at:at + size] = np.frombuffer(x.tobytes(), np.uint8)
    block = emulator.Block(256, shared_bytes=memory.size)
    block.shared.bytes[:] = memory
    return block


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 96, 128])
def test_held_operands_are_those_that_tma_wrote(columns, rng):
    """Panels of up to 64 columns, swizzled, to A's registers: rows 16 w + l / 4 and 8 on."""
    load = Load("q", "Q", (128, columns), (128, columns), find_dtype("bf16"))
    tile = rng.integers(0, 1 << 16, (128, columns)).astype(np.uint16)
    block = in_panels(tile, load)
    hold = body_of(warp_specialised.hold(0, 1 << 20, load.panel_bytes, load.width_bytes,
                                         load.row_bytes))
    found = hold(emulator.Builder(block), np.int32(0), block.t)
    assert len(found) == columns // 4
    row, column = (block.t >> 5) * 16 + (block.t & 31) // 4, block.t % 4 * 2
    for i, word in enumerate(found):
        at = row + 8 * (i % 2), column + 16 * (i // 4) + 8 * (i // 2 % 2)
        want = np.stack([tile[at], tile[at[0], at[1] + 1]], 1)
        np.testing.assert_array_equal(np.asarray(word), want.view(np.int32)[:, 0])


@pytest.mark.parametrize("dtype, columns", [
    ("bf16", 16), ("f16", 96), ("bf16", 128), ("f32", 8), ("f32", 16), ("f32", 32), ("f32", 64),
    ("bool_", 32), ("bool_", 64), ("bool_", 96), ("bool_", 128), ("bool_", 256)])
def test_tiles_are_read_as_a_first_operand_lies(dtype, columns, rng):
    d, layout = find_dtype(dtype), warpgroups((128, columns), 2)
    load = Load("x", "X", (128, columns), (128, columns), d)
    codes = rng.integers(0, 2, (128, columns)).astype(np.uint8) if d.kind == "bool" else encode(
        rng.standard_normal((128, columns)).astype(np.float32), d)
    numbers = codes if d.kind == "bool" else np.asarray(decode(codes, d), np.float32)
    block = in_panels(np.asarray(codes), load)
    found = block.operate(warp_specialised.read_tile(
        0, 1 << 20, load.panel_bytes, load.width_bytes, load.row_bytes, dtype), 0, block.t)
    row, column = (block.t >> 5) * 16 + (block.t & 31) // 4, block.t % 4 * 2
    for base, x in zip(layout.bases, found, strict=True):
        np.testing.assert_array_equal(np.asarray(x), numbers[row + base[0], column + base[1]])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "int32"])
def test_rows_in_shared_memory_are_read_by_their_type(dtype, rng):
    d, layout = find_dtype(dtype), warpgroups((128, 64), 2).drop(0)
    row = rng.integers(0, 1000, 64).astype(np.float32)
    codes = encode(row, d) if d.kind == "float" else row.astype(np.int32)
    block = emulator.Block(256, shared_bytes=4096)
    size = d.bits // 8
    block.shared.bytes[2048:2048 + 64 * size] = np.ascontiguousarray(codes).view(np.uint8)
    operation = warp_specialised.read_row(1024, 1024, layout.text, layout.shape, dtype)
    column = (block.t & 3) * 2
    found = block.operate(operation, 1, column)
    want = decode(encode(row, d), d) if d.kind == "float" else codes
    for base, x in zip(layout.bases, found, strict=True):
        np.testing.assert_array_equal(np.asarray(x), want[column + base[0]])


def test_a_quotient_of_nothing_is_nothing():
    b = emulator.Builder(emulator.Block(3))
    x = [np.array([0.0, 2.0, 0.0], np.float32)]
    y = [np.array([0.0, 4.0, 5.0], np.float32)]
    with np.errstate(all="ignore"):
        (found,) = body_of(warp_specialised.quotient((0,), 1))(b, x, y)
    np.testing.assert_array_equal(found, [0.0, 0.5, 0.0])
