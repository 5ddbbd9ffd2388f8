"""Codes and the operand that is dealt like them, in registers and shared memory, run on arrays of
ints: one element a thread."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.test_stacked_codes import swizzled
from golden.test_ptx_packed import Ints
from tessera.numerics import as_type, decode, find_dtype, unpack
from tessera.numerics.packed_order import from_rows
from tessera.tile.cuda import ptx  # noqa: F401  registers the instructions
from tessera.tile.cuda.intrinsics import dealt_codes, packed_codes, unpacked_codes
from tessera.tile.ir.register_layout import warpgroup_codes

WIDTH, ROWS = 128, 64  # bytes of a panel's row; of codes


CODES = ("fp4_e2m1", "fp4_e3m0", "fp6_e2m3", "fp6_e3m2")
X = find_dtype("fp8_e4m3")


@pytest.mark.parametrize("codes", CODES)
def test_registers_of_codes_meet_the_numbers_dealt_to_them(codes, rng):
    """Of rows of 16 codes, and of as many numbers: what one lane has of a row of four."""
    kind = find_dtype(codes)
    raw = rng.integers(0, 256, (512, 2 * kind.bits), dtype=np.uint8)
    numbers = rng.standard_normal((512, 16)).astype(X.numpy)
    left = dealt_codes.registers(Ints(), kind, list(raw.view(np.uint32).T))
    right = dealt_codes.scales_for_codes(Ints(), kind, list(numbers.view(np.uint32).T))
    left, right = (np.stack(side, 1).view(X.numpy).astype(np.float64) for side in (left, right))
    left *= packed_codes.factor(codes, X.name)
    want = decode(unpack(raw, kind, 16), kind).astype(np.float64) * numbers.astype(np.float64)
    np.testing.assert_array_equal(np.sort(left * right, 1), np.sort(want, 1))


class Threads(Ints):
    """With shared memory, in which each thread has an address of its own."""

    def __init__(self, memory):
        self.memory, self.reads = memory, []

    def shared_base(self):
        return np.uint32(0)

    def add(self, x, y):
        return x + y

    def mul(self, x, y):
        return x * y

    def xor(self, x, y):
        return x ^ y

    def compare(self, op, x, y):
        assert op == ">="
        return x >= y

    def until(self, x, step):
        done = np.zeros(x.shape, bool)
        while not done.any():
            x, done = step(x)
        assert done.all()
        return x

    def call(self, instruction, x, *more):
        if not instruction.name.startswith(("ld_shared", "st_shared")):
            return super().call(instruction, x, *more)
        words = self.memory.view(np.uint32)
        if more:
            for i, word in enumerate(more):
                words[(x >> 2) + i] = word
            return None
        count = int(instruction.name[-1]) if "_x" in instruction.name else 1
        found = [words[(x >> 2) + i] for i in range(count)]
        self.reads.append((x, count))
        return found if count > 1 else found[0]


def in_panels(raw):
    """[rows, bytes] -> the bytes of its panels, chunks of 16 swizzled as TMA does (128 bytes)."""
    rows, width = raw.shape
    chunks = raw.reshape(rows, width // WIDTH, WIDTH // 16, 16).swapaxes(0, 1)
    order = np.arange(WIDTH // 16) ^ (np.arange(rows)[:, None] & 7)
    return np.take_along_axis(chunks, order[None, :, :, None], 2).reshape(-1)


def rows_of_codes(panel):
    """Of each row of an instruction, the row of the tile that lanes have there."""
    layout = warpgroup_codes((ROWS, 8), 1, panel)
    below = [bit for bit in layout.registers if bit[0] == 0]
    bits = [*layout.threads[2:5], *below, *layout.threads[5:7]]
    assert sorted(bits) == [(0, i) for i in range(6)]
    number = np.arange(ROWS)
    return sum((number >> i & 1) << bit for i, (_, bit) in enumerate(bits))


def fragments(registers, x, panel):
    """[threads of a warpgroup, registers] -> [64, k] of the first operand (PTX ISA 9.7.15)."""
    numbers = registers.view(x.numpy).astype(np.float64)
    parts = numbers.reshape(4, 8, 4, -1, 2, 2, 32 // x.bits)
    # warp, g, t, step, half of k, half of rows, number of a register
    made = parts.transpose(0, 5, 1, 3, 4, 2, 6).reshape(ROWS, -1)
    return made[np.argsort(rows_of_codes(panel))]


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("K", [256, 512])  # 192 bytes of fp6 are panels of 64
@pytest.mark.parametrize("order, dtype, codes", [
    *((order, dtype, codes) for order, dtype in (("dealt", "fp8_e4m3"), ("memory", "fp8_e4m3"),
                                                 ("dealt", "f16")) for codes in CODES),
    ("laid", "fp8_e4m3", "fp4_e2m1"), ("laid", "fp8_e4m3", "fp6_e2m3")])
def test_two_warpgroups_multiply_all_of_k(codes, order, dtype, K, rows, rng):
    kind, x, codes_at = find_dtype(codes), find_dtype(dtype), 4096
    raw = rng.integers(0, 256, (ROWS, K * kind.bits // 8), dtype=np.uint8)
    numbers = rng.standard_normal((rows, K)).astype(x.numpy)
    x_at, width = codes_at + raw.size, WIDTH if raw.shape[1] % WIDTH == 0 else WIDTH // 2
    numeric = as_type(codes + f" @packed_for({dtype})" * (order == "laid"))
    stored = from_rows(raw, numeric, (ROWS, K))
    memory = np.concatenate([np.zeros(codes_at, np.uint8), swizzled(stored, width),
                             in_panels(numbers.view(np.uint8))])
    threads, machine = np.arange(256, dtype=np.uint32), Threads(memory)
    slot = np.zeros(256, np.uint32)
    if order == "dealt":
        deal = dealt_codes.deal(x_at, 0, rows * WIDTH, (rows, K), dtype, codes, 32)
        deal.rule(None).body(machine, slot[:32], threads[:32])
    held = memory[x_at:].reshape(-1, rows, WIDTH // 16, 16)
    swizzle = np.arange(WIDTH // 16) ^ (np.arange(rows)[:, None] & 7)
    right = np.take_along_axis(held, swizzle[None, :, :, None], 2).swapaxes(0, 1)
    right = np.ascontiguousarray(right).reshape(rows, -1).view(x.numpy).astype(np.float64)
    total = 0.0
    part = unpacked_codes.Part(raw.shape[1] // 2, codes, dtype, order)
    how, each = (part.part_bytes, codes, dtype, order), K // 2 // part.steps
    for step in range(part.steps):
        batch, at = divmod(step, part.steps // part.batches)
        if at == 0:
            read = unpacked_codes.read(codes_at, 0, ROWS * width, width, *how, batch, width)
            words = read.rule(None).body(machine, slot, threads)
        make = unpacked_codes.unpack(*how, step, part.steps)
        made = np.stack(make.rule(None).body(machine, words, threads), 1)
        for group in (0, 1):
            first = group * K // 2 + step * each
            a = fragments(made[128 * group:128 * group + 128].copy(), x, width)
            total += a @ right[:, first:first + each].T
    want = decode(unpack(raw, kind, K), kind).astype(np.float64) @ numbers.astype(np.float64).T
    np.testing.assert_allclose(total * packed_codes.factor(codes, x.name), want, rtol=1e-12,
                               atol=1e-9)


@pytest.mark.parametrize("order", ["dealt", "laid"])
@pytest.mark.parametrize("codes", ["fp4_e2m1", "fp6_e2m3"])
@pytest.mark.parametrize("K", [256, 512])
def test_lanes_that_read_codes_together_meet_no_bank_twice(order, codes, K):
    """Those of a half of a warp where each reads 8 bytes, of a whole one where it reads 4."""
    row_bytes = K * find_dtype(codes).bits // 8
    width = WIDTH if row_bytes % WIDTH == 0 else WIDTH // 2
    machine = Threads(np.zeros(ROWS * row_bytes, np.uint8))
    how = row_bytes // 2, codes, "bf16", order
    part = unpacked_codes.Part(*how)
    for batch in range(part.batches):
        read = unpacked_codes.read(0, 0, ROWS * width, width, *how, batch, width)
        threads = np.arange(256, dtype=np.uint32)
        read.rule(None).body(machine, np.zeros(256, np.uint32), threads)
    assert len(machine.reads) > 2
    for at, count in machine.reads:
        words = (at[:, None] >> 2) + np.arange(count, dtype=np.uint32)
        for lanes in words.reshape(-1, 32):  # of a wavefront
            assert len(set(lanes % 32)) == len(set(lanes))
