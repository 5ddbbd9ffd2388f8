"""Products by threads: multiply-adds of elements from shared memory, for a few k at once."""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import access, decode
from tessera.tile.cuda.intrinsics.matmul import round_tf32
from tessera.tile.cuda.intrinsics.shared_tiles import PLACE
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.cuda.ptx import memory
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
STEP = 16  # of k at once, at most


class _Side:
    """Elements [u, k] of an operand, `width` neighbours by one load."""

    def __init__(self, kind: str, panel: tuple, deep: bool, zeros: int, clamped: bool, width: int,
                 unsigned: bool, rounded: bool):
        self.kind, self.panel, self.deep, self.zeros = kind, Panel(*panel), deep, zeros
        self.clamped, self.width, self.unsigned, self.rounded = clamped, width, unsigned, rounded
        self.dtype = find_dtype(self.panel.dtype)

    def read(self, b: Builder, values: list[LLVM], us: list[int],
             step: int) -> dict[tuple[int, int], LLVM]:
        where = Addresses(b, self.panel, values, self.zeros,
                          self.panel.ends(1) if self.clamped else None)
        found: dict[tuple[int, int], LLVM] = {}
        for u in us:
            for k in range(step):
                if (u, k) not in found:
                    self._load(b, where, u, k, found)
        return found

    def _load(self, b: Builder, where: Addresses, u: int, k: int,
              found: dict[tuple[int, int], LLVM]) -> None:
        at = where.at(u, k) if self.deep else where.at(k, u)
        got = b.call(memory.ld("shared", *access(self.dtype, self.width)), at)
        values = decode(b, self.dtype, got if isinstance(got, list) else [got], self.width)
        for i, value in enumerate(values):
            key = (u, k + i) if self.deep else (u + i, k)
            found[key] = self._widened(b, value)

    def _widened(self, b: Builder, x: LLVM) -> LLVM:
        if self.rounded and self.dtype.name == "f32":
            x = b.bitcast(round_tf32(b, b.bitcast(x, "i32")), "f32")
        if self.kind == "f64" and b.bits(x) == 32:
            return b.call(find_instruction("f32_to_f64"), x)
        if self.kind == "i64" and b.bits(x) == 32:
            return b.zext(x, "i64") if self.unsigned else b.sext(x, "i64")
        if self.kind == "i32" and b.bits(x) == 64:
            return b.trunc(x, "i32")
        return x


@functools.cache
def matmul(kind: str, layout: str, shape: tuple[int, int], step: int, a: tuple,
           b: tuple) -> Operation:
    """(sums, base, row, column of A at k, the same of B) -> sums + A[:, k:k+step] B[k:k+step, :].

    a, b: (panel, deep, zeros, clamped, width, unsigned, rounded).
    """
    bases = RegisterLayout.parse(layout, shape).bases
    left, right = _Side(kind, *a), _Side(kind, *b)
    x = Operand("sums", kind, len(bases))  # type: ignore[arg-type]

    def body(b: Builder, sums: list[LLVM], *values: LLVM) -> list[LLVM]:
        rows = sorted({base[0] for base in bases})
        columns = sorted({base[1] for base in bases})
        A = left.read(b, list(values[:3]), rows, step)
        B = right.read(b, list(values[3:]), columns, step)
        out = list(sums)
        for k in range(step):
            for i, (m, n) in enumerate(bases):
                out[i] = _add(b, out[i], A[m, k], B[n, k])
        return out

    form = InstructionForm((x, *PLACE, *PLACE), (x,), body)
    return Operation("multiply_add", 7, lambda *_: form)


def _add(b: Builder, total: LLVM, x: LLVM, y: LLVM) -> LLVM:
    if b.is_float(total):
        return b.fadd(total, b.fmul(x, y))
    return b.add(total, b.mul(x, y))
