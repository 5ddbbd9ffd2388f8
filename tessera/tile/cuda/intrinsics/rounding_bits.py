"""The random words by which stores round: one for each element, by its number in the tensor."""

from __future__ import annotations

from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.intrinsics.random import block, chosen, element

LLVM = Any


def words(b: Builder, first: LLVM, count: int, key: tuple[LLVM, LLVM]) -> list[LLVM]:
    """The words of `count` elements from `first` on, which is a multiple of min(count, 4).

    Four neighbours come out of one Philox block.
    """
    if count == 1:
        return [element(b, first, key)]
    if count == 2:
        found, low = block(b, first, key), b.trunc(first, "i32")
        return [chosen(b, found, b.or_(low, b.i32(i))) for i in (0, 1)]
    return [word for i in range(0, count, 4)
            for word in block(b, b.add(first, b.const("i64", i)), key)]


__all__ = ["words"]
