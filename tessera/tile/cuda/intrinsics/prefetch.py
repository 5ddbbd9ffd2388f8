"""The intrinsic that prefetches the cache lines of a box, shared by the threads."""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.cuda.intrinsics.tiles import _Access
from tessera.tile.ir.register_layout import RegisterLayout

LINE_BYTES = 128
FAR = 1 << 30  # an extent that no box reaches


@functools.cache
def box(layout: str, shape: tuple[int, ...], axis: int, guards: tuple[str, ...],
        owner: bool) -> Operation:
    """(address, strides..., bounds..., lines left of the thread's first [, owner])"""
    how = _Access(RegisterLayout.parse(layout, shape), axis, 1, guards)
    args = (*how.arguments("i64"), Operand("lines", "i32"),
            *([Operand("owner", "i32")] if owner else []))
    record = find_instruction("prefetch_L2")

    def body(b: Any, *values: Any) -> None:
        mine = b.true(values[-1]) if owner else None
        *where, left = values[:-1] if owner else values
        found = how.run(b, where, "i64", LINE_BYTES, mine)
        for (at, condition, _), (base, _) in zip(found, how.groups, strict=True):
            there = b.compare("<", b.i32(base[axis]), left)
            with b.when(there if condition is None else b.and_(condition, there)):
                b.call(record, at)

    return operation("prefetch_box", args, (), body)
