"""How a product is launched on a GPU: in which blocks, whether swapped, in how many parts of K.

The estimates are those of matmul_blocks.py; here is what each type of operands may choose from, and
what was measured on a card instead (tuned_tables.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass
from ..numerics import DType, f32
from ..tile.ir.schedule import shares_rows
from .matmul_blocks import (
    BLOCK_US,
    CLUSTER,
    FP8_BLOCKS,
    FP8_COLUMNS,
    PAIRS_US,
    STEP_BYTES,
    MatmulBlocks,
    MatmulExtents,
    choose_either_way,
    choose_thread_block,
    default_block,
    lines_of,
    rank_either_way,
    short_sums,
)

PAIRED = 2  # choices that are also measured in pairs
LINE_BYTES = 128  # of the second-level cache
# Of products that gain by beginning early: 512^3 3.21 -> 2.79 us, 1024^3 5.94 -> 5.63, but 2048^3
# 23.66 -> 23.88 and 128 x 8192 x 8192 50.0 -> 51.9 (H100, in CUDA graphs, 2026-11-25).
SHORT_US = 10.0


@dataclass(frozen=True)
class ProductPlan:
    """rows, columns, step: of a block, and of K at once.  swapped: D' = B' A'.  parts, depth: of
    K.  cluster: blocks that share what both read.  dependent: whether it begins while the kernel
    before it ends, and waits there.  resident: blocks that a multiprocessor has room for, one of
    the next launch's among them.  warps: of a group, None as usual.  why: in words."""

    rows: int
    columns: int
    step: int
    why: str
    swapped: bool = False
    parts: int = 1
    depth: int = 0
    cluster: int = 1
    dependent: bool = False
    resident: int = 1
    warps: int | None = None


@functools.lru_cache(maxsize=4096)
def plan_product(dtype: DType, M: int, N: int, K: int, layout: str, card: Card,
                 result_bits: int = 16, free: bool = True, fast_sums: bool = False) -> ProductPlan:
    """The plan for D [M, N] with sums over K, operands of one type.

    layout: of the operands, as of kernels.gemm.product.
    Integers are summed whole, for parts are in f32.
    free: whether nobody has chosen a block. Else what is not chosen is as usual, and nothing is
    swapped or in parts.  fast_sums: whether sums of fp8 may stay in the tensor cores.
    """
    rows, columns, step = default_block(dtype, M, N)
    if dtype.name in card.formats:
        step = 8 * STEP_BYTES // dtype.bits
    if free and dtype is f32:
        b = choose_thread_block(M, N, card)
        return ProductPlan(b.rows, b.columns, b.depth, f"blocks of {b.rows} x {b.columns} by "
                           f"{b.warps} warps: the quickest by the estimate", warps=b.warps)
    if free and dtype.name in card.by_columns and layout == "nn":  # B' is its first operand
        p = plan_product(dtype, N, M, K, "tt", card, result_bits)
        return replace(p, rows=p.columns, columns=p.rows, swapped=not p.swapped)
    short = short_sums(dtype) and not fast_sums
    columns = min(columns, FP8_COLUMNS) if short else columns
    if not free or dtype.name not in card.formats:
        return ProductPlan(rows, columns, step, f"blocks of {rows} x {columns} for {dtype}")
    extents, blocks = _product(dtype, M, N, K, layout, result_bits, short)
    found = tuned_blocks(choose_either_way(extents, blocks, layout, card, dtype.kind == "float"),
                         extents, dtype, layout, card)
    return _plan(found, extents, card, step)


def _product(dtype: DType, M: int, N: int, K: int, layout: str, result_bits: int, short: bool
             ) -> tuple[MatmulExtents, tuple[tuple[int, int], ...]]:
    """The extents, and the blocks that there are."""
    lines = (lines_of((M if layout[0] == "t" else K) * dtype.bits // 8),
             lines_of((K if layout[1] == "t" else N) * dtype.bits // 8))
    return (MatmulExtents(M, N, K, dtype.bits, result_bits, short=short, lines=lines),
            FP8_BLOCKS if short else (*BLOCK_US, *PAIRS_US))


def _plan(b: MatmulBlocks, extents: MatmulExtents, card: Card, step: int) -> ProductPlan:
    return ProductPlan(b.rows, b.columns, step, explained(b, card), b.swapped, b.parts, b.depth,
                       b.cluster, b.us < SHORT_US, 2 if _leaves_room(b, extents, card) else 1)


def _leaves_room(b: MatmulBlocks, x: MatmulExtents, card: Card) -> bool:
    """Whether a short product's block leaves half of a multiprocessor to the next launch's: four
    slots of 64 x 128 in place of eight. In us with and without, `nt` of bf16, and cuBLAS's, all in
    turn: 768 cubed 3.74, 4.06 and 4.51; 896 4.21, 4.55, 4.95; 1000, by clusters, 6.72, 6.96, 7.06,
    in `tt` 6.72 to 7.03, 7.12 to 7.16, 6.59 to 6.68; 128 x 4096 of 1024, 128 blocks of 64 x 64,
    3.85, 3.96, 4.34. But 1024 cubed, 128 of 64 x 128 alone, 4.97, 4.87, 5.27, and 16 or 32 columns
    nothing (H200, 2026-11-27)."""
    block = (b.columns, b.rows) if b.swapped else (b.rows, b.columns)
    groups = -(-x.M // b.rows) * -(-x.N // b.columns)
    all_of_it = b.cluster > 1 or block[1] < 128
    most = card.multiprocessors if all_of_it else card.multiprocessors * 11 // 12
    return (b.us < SHORT_US and b.parts == 1 and x.bits == 16 and groups <= most
            and block[0] == 64 and 64 <= block[1] <= 128)


# --- what is measured -----------------------------------------------------------------------------
def _problem_text(extents: MatmulExtents, dtype: DType, layout: str) -> str:
    """As tables of tuned choices name a product."""
    x = extents
    words = [dtype.name, layout, f"{x.M}x{x.N}x{x.K}"]
    words += [f"to {x.result_bits} bits"] * (x.result_bits != x.bits)
    return " ".join([*words, *["fast"] * (short_sums(dtype) and not x.short)])


def product_text(dtype: DType, M: int, N: int, K: int, layout: str, result_bits: int) -> str:
    """The same of a product by its extents."""
    return _problem_text(_product(dtype, M, N, K, layout, result_bits, short_sums(dtype))[0], dtype,
                        layout)


CHOICE = re.compile(r"(\d+)x(\d+)( swapped)?(?: parts=(\d+))?(?: cluster=(\d+))?")


def read_choice(text: str, extents: MatmulExtents) -> MatmulBlocks:
    """What `MatmulBlocks.choice` spells. Raises ArgumentError."""
    found = CHOICE.fullmatch(text)
    if found is None:
        raise ArgumentError(f"{text!r} is no choice of blocks", hint="such as '128x256', or "
                            "'16x64 swapped parts=4 cluster=2'")
    rows, columns, parts = int(found[1]), int(found[2]), int(found[4] or 1)
    depth = -(-extents.steps // parts) * 8 * STEP_BYTES // extents.bits if parts > 1 else 0
    return MatmulBlocks(rows, columns, parts, depth, 0.0, bool(found[3]), int(found[5] or 1))


def tuned_blocks(model: MatmulBlocks, extents: MatmulExtents, dtype: DType, layout: str,
                 card: Card, allowed: Callable[[MatmulBlocks], bool] = lambda b: True
                 ) -> MatmulBlocks:
    """What was measured to be quicker than the model's choice, else that."""
    if card.tuned is None:
        return model
    found = card.tuned.find("gemm", _problem_text(extents, dtype, layout), model.choice,
                            lambda text: allowed(read_choice(text, extents)))
    if found is None:
        return model
    return replace(read_choice(found.choice, extents), us=found.us, tuned=found.why)


def plans_to_measure(dtype: DType, M: int, N: int, K: int, layout: str, card: Card, count: int,
                     result_bits: int = 16) -> dict[str, ProductPlan]:
    """By choice: the model's, the next best of its estimates, pairs of blocks for the first of
    them, and what a table says."""
    extents, blocks = _product(dtype, M, N, K, layout, result_bits, short_sums(dtype))
    ranked = rank_either_way(extents, blocks, layout, card, dtype.kind == "float")[:count]
    paired = [replace(b, cluster=CLUSTER) for b in ranked[:PAIRED]]
    known = tuned_blocks(ranked[0], extents, dtype, layout, card)
    step = 8 * STEP_BYTES // dtype.bits
    return {b.choice: _plan(b, extents, card, step) for b in (*ranked, *paired, known)}


def explained(b: MatmulBlocks, card: Card) -> str:
    """In a line, for the notes of a schedule."""
    words = [f"blocks of {b.rows} x {b.columns}"]
    words += ["of the transposed result"] * b.swapped
    block = (b.columns, b.rows) if b.swapped else (b.rows, b.columns)
    shared = "rows" if shares_rows(block) != b.swapped else "columns"
    words += [f"two side by side that share {shared}"] * (b.cluster > 1)
    words += [f"in {b.parts} parts of K, {b.depth} each"] * (b.parts > 1)
    if b.tuned:
        return f"{', '.join(words)}: {b.tuned}"
    return (f"{', '.join(words)}: the quickest by the estimate, {b.us:.1f} us on "
            f"{card.multiprocessors} multiprocessors")


__all__ = ["LINE_BYTES", "ProductPlan", "explained", "plan_product", "plans_to_measure",
           "product_text", "read_choice", "tuned_blocks"]
