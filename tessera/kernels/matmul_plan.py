"""How a product is launched on a GPU: in which blocks, whether swapped, in how many parts of K.

The estimates are those of matmul_blocks.py; here is what each type of operands may choose from.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..numerics import DType
from ..runtime.arrays import HOST, place_of
from ..runtime.device import device
from .matmul_blocks import (
    FP8_BLOCKS,
    FP8_COLUMNS,
    MULTIPROCESSORS,
    STEP_US,
    MatmulBlocks,
    MatmulExtents,
    choose_either_way,
    default_block,
    short_sums,
)
from .routine_arrays import RoutineArray


@dataclass(frozen=True)
class Card:
    """multiprocessors: of the GPU.  formats: of operands that its warpgroups multiply.  copies:
    whether operands lie in its memory, so that rows which TMA cannot read may be copied."""

    multiprocessors: int
    formats: frozenset[str]
    copies: bool = True


def card_of(x: Any) -> Card:
    """Of the GPU on which an array lies; for others, the one that is tuned for."""
    where = x.place if isinstance(x, RoutineArray) else place_of(x)
    return _usual() if where is None or where == HOST else _card(where)


@functools.cache
def _usual() -> Card:
    return Card(MULTIPROCESSORS, frozenset({"bf16", "f16", "fp8_e4m3", "fp8_e5m2"}), False)


@functools.cache
def _card(index: int) -> Card:
    chip, unit = device(index), device(index).target.generation.warpgroup_matmul
    return Card(chip.multiprocessors, frozenset() if unit is None else frozenset(unit.operands),
                unit is not None)


@dataclass(frozen=True)
class ProductPlan:
    """rows, columns, step: of a block, and of K at once.  swapped: D' = B' A'.  parts, depth: of
    K.  why: in words."""

    rows: int
    columns: int
    step: int
    why: str
    swapped: bool = False
    parts: int = 1
    depth: int = 0


@functools.lru_cache(maxsize=4096)
def plan_product(dtype: DType, M: int, N: int, K: int, layout: str, card: Card, free: bool = True
                 ) -> ProductPlan:
    """The plan for D [M, N] with sums over K, operands of one type.

    layout: of the operands, as of kernels.gemm.product.
    free: whether nobody has chosen a block. Else what is not chosen is as usual, and nothing is
    swapped or in parts.
    """
    rows, columns, step = default_block(dtype, M, N)
    if short_sums(dtype):
        columns = min(columns, FP8_COLUMNS)
    if not free or dtype.name not in card.formats:
        return ProductPlan(rows, columns, step, f"blocks of {rows} x {columns} for {dtype}")
    blocks = FP8_BLOCKS if short_sums(dtype) else tuple(STEP_US)
    found = choose_either_way(MatmulExtents(M, N, K, dtype.bits, dtype.bits), blocks, layout,
                              card.multiprocessors)
    return ProductPlan(found.rows, found.columns, step, explained(found, card), found.swapped,
                       found.parts, found.depth)


def explained(b: MatmulBlocks, card: Card) -> str:
    """In a line, for the notes of a schedule."""
    words = [f"blocks of {b.rows} x {b.columns}"]
    words += ["of the transposed result"] * b.swapped
    words += [f"in {b.parts} parts of K, {b.depth} each"] * (b.parts > 1)
    return (f"{', '.join(words)}: the quickest by the estimate, {b.us:.1f} us on "
            f"{card.multiprocessors} multiprocessors")
