"""Matmuls of whole blocks by mma.sync, as intrinsics: fragments from shared memory or registers.

Both operands are seen as [u, k]: u is a row of A or a column of B. A step of k is 32 bytes, k16 of
16-bit types, k8 of tf32, k32 of 8-bit ones, and fragments all look the same in bytes. Per step a
warp reads A in blocks of 16 x 32 bytes, B in blocks of 8 x 32 bytes or two of them at once; the
next step's fragments are read before this one's matmuls, so that they arrive meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import access, decode, operand
from tessera.tile.cuda.intrinsics.shared_tiles import PLACE
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.cuda.ptx import matrix, memory, mma
from tessera.tile.ir.register_layout import RegisterLayout

LLVM = Any
STEP_BYTES = 32
# The type in which each format of mma is stored, and its bytes.
STORED = {"bf16": "bf16", "f16": "f16", "tf32": "f32", "s8": "int8", "u8": "uint8",
          "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


def bytes_of(kind: str) -> int:
    return find_dtype(STORED[kind]).bits // 8


# --- where fragments come from --------------------------------------------------------------------
class _Matrix:
    """ldmatrix: 16-byte rows of 8 x 8 blocks of a shared buffer, transposed when u is contiguous.

    deep: rows of the buffer run along u (k is contiguous).
    """

    args = PLACE

    def __init__(self, side: str, kind: str, K: int, panel: tuple, deep: bool, zeros: int,
                 clamped: bool, rounded: bool):
        self.side, self.panel, self.deep, self.zeros = side, Panel(*panel), deep, zeros
        self.size, self.K, self.rounded = bytes_of(kind), K, rounded
        self.clamped = clamped or K * self.size % STEP_BYTES != 0

    def bind(self, b: Builder, values: list[LLVM]) -> None:
        self.b = b
        chunk = 16 // self.size
        self.where = Addresses(b, self.panel, values, self.zeros,
                               self.panel.ends(chunk) if self.clamped else None)

    def read(self, step: int, u: int, count: int) -> list[LLVM]:
        k = step * STEP_BYTES // self.size
        at = self.where.at(u, k) if self.deep else self.where.at(k, u)
        got = self.b.call(matrix.ldmatrix(count, trans=not self.deep), at)
        half = (step + 1) * STEP_BYTES > self.K * self.size
        return [self._kept(x, i, half) for i, x in enumerate(got)]

    def _kept(self, x: LLVM, i: int, half: bool) -> LLVM:
        """The second 16 bytes of the last step may lie beyond k."""
        second = i >= 2 if self.side == "A" else i % 2 == 1
        if half and second:
            return self.b.i32(0)
        return round_tf32(self.b, x) if self.rounded else x


class _Elements:
    """One load per element, converted to the format of mma: for buffers that ldmatrix cannot read
    (other formats, rows that are no whole chunks, bytes that are contiguous along u)."""

    args = PLACE

    def __init__(self, side: str, kind: str, K: int, panel: tuple, deep: bool, zeros: int,
                 clamped: bool, rounded: bool):
        self.side, self.panel, self.deep, self.zeros = side, Panel(*panel), deep, zeros
        self.kind, self.K, self.rounded = kind, K, rounded
        self.per = 4 // bytes_of(kind)  # elements of a register
        self.ragged = K * bytes_of(kind) % STEP_BYTES != 0
        self.clamped = clamped or self.ragged

    def bind(self, b: Builder, values: list[LLVM]) -> None:
        self.b = b
        self.where = Addresses(b, self.panel, values, self.zeros,
                               self.panel.ends(1) if self.clamped else None)

    def read(self, step: int, u: int, count: int) -> list[LLVM]:
        registers = []
        for i in range(count):
            across, along = (i & 1, i >> 1) if self.side == "A" else (i >> 1, i & 1)
            k = (step * 8 + 4 * along) * self.per
            registers.append(self._register(u + 8 * across, k))
        return registers

    def _register(self, u: int, k: int) -> LLVM:
        word = operand(self.b, find_dtype(STORED[self.kind]),
                       [self._element(u, k + j) for j in range(self.per)])
        return round_tf32(self.b, word) if self.rounded else word

    def _element(self, u: int, k: int) -> LLVM:
        b, d = self.b, find_dtype(self.panel.dtype)
        at = self.where.at(u, k) if self.deep else self.where.at(k, u)
        got = b.call(memory.ld("shared", *access(d, 1)), at)
        (value,) = decode(b, d, [got], 1)
        return b.select(self._inside(k), value, b.zero(value)) if self.ragged else value

    def _inside(self, k: int) -> LLVM:
        """Whether the thread's element k on lies below K."""
        return self.b.compare("<", self.b.add(self._lane_k(), self.b.i32(k)), self.b.i32(self.K))

    def _lane_k(self) -> LLVM:
        lane = self.b.and_(self.b.call(find_instruction("tid_x")), self.b.i32(3))
        return self.b.mul(lane, self.b.i32(self.per))


class _Registers:
    """A fragment that already is where mma wants A: an accumulator of the same rows."""

    def __init__(self, side: str, kind: str, K: int, layout: str, shape: tuple[int, int]):
        self.number = RegisterLayout.parse(layout, shape).number
        self.kind = kind
        self.args = (Operand("x", "f32", len(self.number)),)

    def bind(self, b: Builder, values: list[LLVM]) -> None:
        self.b, (self.values,) = b, values

    def read(self, step: int, u: int, count: int) -> list[LLVM]:
        k = 16 * step
        return [self._word(u, k), self._word(u + 8, k), self._word(u, k + 8),
                self._word(u + 8, k + 8)]

    def _word(self, u: int, k: int) -> LLVM:
        if (u, k) not in self.number:
            return self.b.i32(0)
        pair = [self.values[self.number[(u, k + i)]] for i in (0, 1)]
        return operand(self.b, find_dtype(STORED[self.kind]), pair)


class _LoadedFragments:
    """Fragments of one step that `take` read: in the order of rows_of or columns_of."""

    def __init__(self, side: str, kind: str, K: int, first: tuple[int, ...]):
        each = EACH[side]
        self.at = {u: each * i for i, u in enumerate(first)}
        self.args = (Operand("x", "i32", each * len(first)),)

    def bind(self, b: Builder, values: list[LLVM]) -> None:
        (self.values,) = values

    def read(self, step: int, u: int, count: int) -> list[LLVM]:
        return self.values[self.at[u]:self.at[u] + count]


READERS = {"matrix": _Matrix, "elements": _Elements, "registers": _Registers,
           "taken": _LoadedFragments}
EACH = {"A": 4, "B": 2}  # registers of 16 rows of A, of 8 columns of B, for a step of k


def round_tf32(b: Builder, x: LLVM) -> LLVM:
    """f32 bits -> those of the nearest tf32 number, ties to even; infinities and NaN stay."""
    odd = b.and_(b.lshr(x, b.i32(13)), b.i32(1))
    moved = b.and_(b.add(b.add(x, b.i32(0xFFF)), odd), b.i32(-0x2000))
    special = b.compare("==", b.and_(x, b.i32(0x7F800000)), b.i32(0x7F800000))
    return b.select(special, x, moved)


def rows_of(layout: RegisterLayout) -> list[int]:
    """Where the 16-row blocks of a lane's accumulators begin."""
    return sorted({base[0] & ~8 for base in layout.bases})


def columns_of(layout: RegisterLayout) -> list[int]:
    """Where its 8-column blocks do."""
    return sorted({base[1] & ~1 for base in layout.bases})


def taken(layout: RegisterLayout, side: str) -> tuple[str, tuple[int, ...]]:
    """The reader of what `take` gave for these accumulators."""
    return "taken", tuple((rows_of if side == "A" else columns_of)(layout))


@functools.cache
def take(side: str, kind: str, layout: str, shape: tuple[int, int], how: tuple) -> Operation:
    """(operands of the reader) -> the fragments of one step of k.  layout, shape: of the
    accumulators.  how: (reader, arguments...)."""
    size, found = bytes_of(kind), RegisterLayout.parse(layout, shape)
    source = READERS[how[0]](side, kind, STEP_BYTES // size, *how[1:])

    def body(b: Builder, *values: Any) -> list[LLVM]:
        source.bind(b, list(values))
        if side == "A":
            return [x for m in rows_of(found) for x in source.read(0, m, 4)]
        return [x for _, parts in read_columns(source, 0, columns_of(found)) for x in parts]

    count = EACH[side] * len((rows_of if side == "A" else columns_of)(found))
    form = InstructionForm(source.args, (Operand("x", "i32", count),), body)
    return Operation("take", len(source.args), lambda *_: form)


def read_columns(source: Any, step: int, columns: list[int]) -> Iterator[tuple[int, list[LLVM]]]:
    """(8 columns of B, their registers), 16 columns by one instruction where there are as many."""
    done: set[int] = set()
    for n in columns:
        if n in done:
            continue
        if n & 8 == 0 and n + 8 in columns:
            got = source.read(step, n, 4)
            yield n, got[:2]
            yield n + 8, got[2:]
            done.add(n + 8)
        else:
            yield n, source.read(step, n, 2)


# --- the matmul ----------------------------------------------------------------------------------
@functools.cache
def matmul(kinds: tuple[str, str], layout: str, shape: tuple[int, int], K: int, a: tuple, b: tuple,
           start: bool, half: bool = False, longest: int = 0) -> Operation:
    """([accumulator,] operands of a, operands of b) -> accumulator + A B.

    kinds: formats of A and B.  layout, shape: of the accumulator.  a, b: (reader, arguments...).
    start: there is no accumulator, sums begin at 0.  half: instructions of half the k (sm_75).
    longest: terms that the tensor cores add before a sum begins anew; 0: all.
    """
    return _Product(kinds, RegisterLayout.parse(layout, shape), K, a, b, start, half,
                    longest).operation()


class _Product:
    def __init__(self, kinds: tuple[str, str], layout: RegisterLayout, K: int, a: tuple, b: tuple,
                 start: bool, half: bool, longest: int):
        self.kinds, self.layout, self.start, self.half = kinds, layout, start, half
        self.A = READERS[a[0]]("A", kinds[0], K, *a[1:])
        self.B = READERS[b[0]]("B", kinds[1], K, *b[1:])
        self.steps = -(-K * bytes_of(kinds[0]) // STEP_BYTES)
        self.rows, self.columns = rows_of(layout), columns_of(layout)
        self.integer = kinds[0] in ("s8", "u8")
        whole = longest * bytes_of(kinds[0]) // STEP_BYTES
        self.fresh = whole if whole and self.steps > whole else 0
        d = "s32" if self.integer else "f32"
        other = kinds[1] if kinds[1] != kinds[0] else ""
        self.instruction = mma.mma(kinds[0], d, b=other, k=8 if half else 0)

    def operation(self) -> Operation:
        kind = "i32" if self.integer else "f32"
        x = Operand("acc", kind, self.layout.count)  # type: ignore[arg-type]
        args = (*(() if self.start else (x,)), *self.A.args, *self.B.args)
        form = InstructionForm(args, (x,), self.body)
        return Operation("product_" + "_".join(self.kinds), len(args), lambda *_: form)

    def body(self, b: Builder, *values: Any) -> list[LLVM]:
        given = list(values)
        acc = None if self.start else given.pop(0)
        self.A.bind(b, given[:len(self.A.args)])
        self.B.bind(b, given[len(self.A.args):])
        self.zero = b.const("i32" if self.integer else "f32", 0)
        tiles = self.tiles(acc)
        total, ready = tiles, self.fragments(0)
        for step in range(self.steps):
            after = self.fragments(step + 1) if step + 1 < self.steps else ready
            if self.fresh and step % self.fresh == 0:
                total = self.added(b, total, tiles) if step else tiles
                tiles = self.tiles(None)
            self.multiply(b, ready, tiles)
            ready = after
        if self.fresh:
            tiles = self.added(b, total, tiles)
        return self.registers(tiles)

    def tiles(self, acc: list[LLVM] | None) -> dict[tuple[int, int], list[LLVM]]:
        """Accumulators by the block of 16 x 8 that they are of."""
        def one(row: int, column: int) -> LLVM:
            at = self.layout.number.get((row, column))
            return self.zero if acc is None or at is None else acc[at]

        return {(m, n): [one(m + 8 * i, n + j) for i in (0, 1) for j in (0, 1)]
                for m in self.rows for n in self.columns}

    def fragments(self, step: int) -> tuple[dict[int, list], dict[int, list]]:
        """Of a step of k: registers by row of A, and by column of B.

        In the order in which the matmuls need them, so that the first need not wait for all.
        """
        a: dict[int, list] = {}
        b: dict[int, list] = {}
        for n, parts in read_columns(self.B, step, self.columns):
            b[n] = parts
            if not a:
                a |= {m: self.A.read(step, m, 4) for m in self.rows}
        return a, b

    def multiply(self, b: Builder, ready: Any, tiles: dict[tuple[int, int], list[LLVM]]) -> None:
        left, right = ready
        for n in self.columns:
            for m in self.rows:
                if self.half:
                    first = b.call(self.instruction, left[m][:2], right[n][0], tiles[m, n])
                    tiles[m, n] = b.call(self.instruction, left[m][2:], right[n][1], first)
                else:
                    tiles[m, n] = b.call(self.instruction, left[m], right[n], tiles[m, n])

    def added(self, b: Builder, x: dict, y: dict) -> dict:
        return {key: [b.fadd(p, q) for p, q in zip(x[key], y[key], strict=True)] for key in x}

    def registers(self, tiles: dict[tuple[int, int], list[LLVM]]) -> list[LLVM]:
        out: list[LLVM] = [None] * self.layout.count
        for (m, n), parts in tiles.items():
            for i, value in enumerate(parts):
                at = self.layout.number.get((m + 8 * (i >> 1), n + (i & 1)))
                if at is not None:
                    out[at] = value
        return out


__all__ = ["READERS", "STORED", "bytes_of", "matmul", "take", "taken"]
