"""Intrinsics of printed tiles and of conditions on tiles."""

from __future__ import annotations

import functools
from typing import Any

from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import Operand, Operation
from tessera.tile.cuda.intrinsics.reports import printed
from tessera.tile.cuda.intrinsics.thread_elements import operation
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any


@functools.cache
def tile(number: int, layout: str, shape: tuple[int, ...], kind: str,
         unsigned: bool = False) -> Operation:
    """(fragment, count, lines, kernel, group, lane, owner, thread part of each index): a line for
    each element that lies in the tile."""
    how = RegisterLayout.parse(layout, shape)
    args = (Operand("x", kind, how.count),  # type: ignore[arg-type]
            *(Operand(n, "i64") for n in ("count", "lines", "kernel")),
            *(Operand(n, "i32") for n in ("group", "lane", "owner")),
            *(Operand(f"at{a}", "i32") for a in range(len(shape))))

    def body(b: Builder, x: list[LLVM], count: LLVM, lines: LLVM, kernel: LLVM, group: LLVM,
             lane: LLVM, owner: LLVM, *at: LLVM) -> None:
        for base, v in zip(how.bases, x, strict=True):
            index = [b.add(i, b.i32(n)) for i, n in zip(at, base, strict=True)]
            inside = [b.compare("<", i, b.i32(n)) for i, n in zip(index, shape, strict=True)]
            with b.when(functools.reduce(b.and_, inside, b.true(owner))):
                printed(b, count, lines, number, kernel, group, lane,
                        [*(b.sext(i, "i64") for i in index), word(b, v, unsigned)])

    return operation("print_tile", args, (), body)


def word(b: Builder, x: LLVM, unsigned: bool) -> LLVM:
    """A number as 64 bits."""
    if b.is_float(x):
        return b.zext(b.bitcast(x, "i32"), "i64") if b.bits(x) == 32 else b.bitcast(x, "i64")
    if b.bits(x) == 64:
        return x
    return b.zext(x, "i64") if unsigned else b.sext(x, "i64")


@functools.cache
def all_of(count: int) -> Operation:
    """(fragment of conditions) -> whether all hold."""
    return operation("all_of", (Operand("x", "i32", count),), (Operand("d", "i32"),),
                     lambda b, x: b.to_int(functools.reduce(b.and_, [b.true(v) for v in x])))
