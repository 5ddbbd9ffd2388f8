"""The block of a matmul's result that a group makes, and in how many parts K is summed.

Tensor cores of a warpgroup reach their speed in blocks of 128 x 256, but a result is seldom a
multiple of 132 such blocks, and in the last wave of groups many multiprocessors have nothing to do:
a quarter of the time with 192 blocks on 132. A weight's gradient has few blocks and a long K: there
groups for other multiprocessors sum other parts of K, and a sum of partial results follows, which
costs their bytes. The time of each choice is estimated from what was measured of each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..numerics import DType, NumericType

MULTIPROCESSORS = 132  # of an H100, and about as many of other large GPUs
MOST_PARTS = 16
STEP_BYTES = 128  # of K, that a block takes at once
BEGIN_US = 4.0  # of a kernel
SUM_US = 3.0  # of the sum of partial results, besides its bytes
STORE_US = 1.25, 2.5  # of 128 x 256 elements in 16 bits; by the word more. It overlaps with nothing
BYTES_PER_US = 3.75e6  # of the sum of partial results
USUAL = 128, 256
FP8_COLUMNS = 128  # most of a block
# What another block, and a sum in parts, has to gain: estimates are not better, and partial results
# take memory and a launch.
OTHER_BLOCK, IN_PARTS = 0.015, 0.03

# Microseconds of a step by rows and columns of a block (H200, bf16, products of GPT-2's extents,
# 2026-11-23). 192 rows are three warpgroups, whose threads have registers for 128 sums less. In
# blocks of 64 the four stages of operands are too few bytes to be under way.
STEP_US: Mapping[tuple[int, int], float] = {
    (128, 256): 0.65, (192, 192): 0.73, (128, 192): 0.503, (192, 128): 0.503, (128, 128): 0.39,
    (64, 256): 0.39, (64, 128): 0.2, (128, 64): 0.22, (64, 64): 0.15, (64, 32): 0.13,
    (64, 16): 0.12, (64, 8): 0.12}
# Of fp8, whose short sums threads add to others: derived from the weight gradients in one profile
# of a step of GPT-2 350M (H200, 2026-11-23), no product was timed alone.
FP8_STEP_US = {(128, 128): 0.41, (64, 128): 0.25, (64, 64): 0.2}
FP8_BLOCKS = tuple(FP8_STEP_US)
LARGE = tuple(b for b in STEP_US if min(b) >= 128)
# Where what follows needs registers beside the sums: 128 x 256 and 192 x 192 leave none to spare.
CROWDED = tuple(b for b in LARGE if prod(b) <= 128 * 192)


@dataclass(frozen=True)
class MatmulBlocks:
    """rows, columns: of a block.  parts: of K, of `depth` elements each but for the last; 1 and 0
    where it is summed whole.  us: the estimate.  swapped: the operands are, transposed: the columns
    are the rows that tensor cores take 64 at a time."""

    rows: int
    columns: int
    parts: int = 1
    depth: int = 0
    us: float = 0.0
    swapped: bool = False


@dataclass(frozen=True)
class MatmulExtents:
    """Of `matrices` results [M, N] with sums over K. bits: of an element of an operand, and of one
    of the result."""

    M: int
    N: int
    K: int
    bits: int
    result_bits: int
    matrices: int = 1

    @property
    def steps(self) -> int:
        return -(-self.K * self.bits // (8 * STEP_BYTES))


def short_sums(numeric: NumericType | DType) -> bool:
    """Whether tensor cores keep too few digits of long sums, so that short ones are added to others
    beside them: of fp8. Registers are left for blocks of FP8_COLUMNS."""
    dtype = numeric if isinstance(numeric, DType) else numeric.dtype
    return dtype.kind == "float" and dtype.bits == 8


def choose_blocks(extents: MatmulExtents, blocks: Sequence[tuple[int, int]], split: bool = False,
                  multiprocessors: int = MULTIPROCESSORS) -> MatmulBlocks:
    """The quickest of some blocks by the estimate, the first where others are hardly quicker.

    blocks: of STEP_US.  split: whether K may be summed in parts.
    """
    parts = range(1, MOST_PARTS + 1) if split else (1,)

    def cost(b: MatmulBlocks) -> float:
        other = (b.rows, b.columns) != blocks[0]
        return b.us * (1 + other * OTHER_BLOCK + (b.parts > 1) * IN_PARTS)

    return min((_estimate(extents, b, p, multiprocessors) for b in blocks for p in parts), key=cost)


def choose_either_way(extents: MatmulExtents, blocks: Sequence[tuple[int, int]], layout: str,
                      multiprocessors: int = MULTIPROCESSORS) -> MatmulBlocks:
    """The same, of blocks of the result or of its transpose, K also in parts.

    layout: of the operands, as of kernels.gemm.product.
    """
    x = extents
    plain = choose_blocks(x, _readable(blocks, layout[1] == "t", x.bits), True, multiprocessors)
    narrow = _readable([b for b in blocks if b[1] < 64], layout[0] == "n", x.bits)
    if not narrow:
        return plain
    turned = choose_blocks(replace(x, M=x.N, N=x.M), narrow, True, multiprocessors)
    if plain.us <= turned.us:
        return plain
    return replace(turned, rows=turned.columns, columns=turned.rows, swapped=True)


def _readable(blocks: Sequence[tuple[int, int]], along: bool, bits: int) -> list[tuple[int, int]]:
    """Those whose columns TMA brings: rows of 32 bytes or more, where they lie along the columns
    and not along K."""
    return [b for b in blocks if along or b[1] * bits >= 256]


def _estimate(x: MatmulExtents, block: tuple[int, int], parts: int, multiprocessors: int
              ) -> MatmulBlocks:
    (m, n), steps = block, -(-x.steps // parts)
    groups = x.matrices * -(-x.M // m) * -(-x.N // n) * parts
    waves = -(-groups // multiprocessors)
    bits = x.result_bits if parts == 1 else 32
    store = (STORE_US[0] + STORE_US[1] * (bits > 16)) * m * n / (128 * 256)
    step = FP8_STEP_US.get(block, STEP_US[block]) if x.bits == 8 else STEP_US[block]
    us = BEGIN_US + waves * (steps * step + store)
    if parts == 1:
        return MatmulBlocks(m, n, us=us)
    us += SUM_US + (parts + 1) * x.matrices * x.M * x.N * 4 / BYTES_PER_US
    return MatmulBlocks(m, n, parts, steps * 8 * STEP_BYTES // x.bits, us)


def default_block(numeric: NumericType | DType, M: int, N: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a group's block.

    Tensor cores take 128 x 256 (two consumer warpgroups of 64 rows each); steps are rows of 128
    bytes, the widest swizzle. Small products get blocks that leave less of them empty. Threads
    that multiply and add keep sums and operands in registers: 64 x 64.
    """
    bits = (numeric if isinstance(numeric, DType) else numeric.dtype).bits
    if bits > 16:
        return 64, 64, 1024 // bits // 2
    columns = 256 if N >= 256 and M >= 128 else 128 if N >= 128 else 64
    return (128 if M >= 128 else 64), columns, 1024 // max(bits, 8)


__all__ = ["CROWDED", "FP8_BLOCKS", "FP8_COLUMNS", "LARGE", "STEP_US", "USUAL", "MatmulBlocks",
           "MatmulExtents", "choose_blocks", "choose_either_way", "default_block", "short_sums"]
