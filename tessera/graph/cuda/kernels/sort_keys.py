"""Keys of elements: integers in whose order rows are sorted.

A key is the element's number, in bits that compare as numbers do (NaN above all, 0 as -0), its
position in the row, and of floats the sign, for 0. So any network sorts stably, and value and
position come out of the key again:

    key = v * 2 * positions + 2 * position + sign

Where that takes more than 32 bits and less is enough, only zeros have a sign, and others a position
only if that is asked for (placed): of both zeros the one in front stays there.

    key = v * span + (2 * position + sign   of v = 0,
                      position              of v < 0,
                      position + zeros      of v > 0)

v is the number, span the number of positions, or 1 without them, and zeros = 2 * positions - span
is what zeros take more than other numbers do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....lazy_dataclass import dataclass
from ....numerics import DType, NumericType, as_type, find_dtype
from ....tile.ir.register_layout import bits_of
from ...schedule.ir import GroupStep, ScheduledGroup
from .kernel_text import KernelWriter
from .searches import LONG

INFINITY, NAN, NEGATIVE = 0xFF << 23, (1 << 31) - 1, -(1 << 31)  # bits of f32


@dataclass(frozen=True)
class KeyFormat:
    """How the elements of rows of an extent become keys; placed: with their positions. below: what
    signed integers of 0 and more are below, where that is known."""

    dtype: DType
    extent: int
    descending: bool
    placed: bool
    below: int = 0

    @property
    def floats(self) -> bool:
        return self.dtype.kind == "float"

    @property
    def shift(self) -> int:
        """Bits of an f32 that its numbers do not have."""
        return 23 - max(self.dtype.man, 1)

    @property
    def most(self) -> int:
        """The largest v: of floats NaN, which is the one above infinity."""
        if self.floats:
            return (INFINITY >> self.shift) + 1
        if self.below:
            return self.below - 1
        return 1 if self.dtype.kind == "bool" else (1 << self.dtype.bits - 1) - 1

    @property
    def zero_keys(self) -> int:
        return 2 << bits_of(self.extent)

    @property
    def tight(self) -> bool:
        """Whether only zeros have a sign, so that a key has 32 bits."""
        span = 1 << bits_of(self.extent) * self.placed
        return self.floats and (self.most + 1) * self.zero_keys > 1 << 31 and (
            (self.most + 1) * span + self.zero_keys - span <= 1 << 31)

    @property
    def place_bits(self) -> int:
        """Of a key, below v."""
        bits = bits_of(self.extent)
        return bits * self.placed if self.tight or not self.floats else bits + 1

    @property
    def zeros(self) -> int:
        return self.zero_keys - (1 << self.place_bits)

    @property
    def words(self) -> int:
        return 1 if self.tight else 1 + ((self.most + 1) << self.place_bits > 1 << 31)

    @property
    def type(self) -> NumericType:
        return as_type(f"int{32 * self.words}")

    @property
    def attribute(self) -> tuple[str, int, bool, bool, int]:
        return self.dtype.name, self.extent, self.descending, self.placed, self.below

    @staticmethod
    def of(attribute: Any) -> KeyFormat:
        return KeyFormat(find_dtype(attribute[0]), *attribute[1:])

    def of_run(self, width: int) -> KeyFormat:
        """Of keys of a part of the row: the row's own unless those of the part are shorter."""
        part = replace(self, extent=width)
        return part if part.words < self.words else self

    # --- texts ------------------------------------------------------------------------------------
    def keys(self, w: KernelWriter, step: GroupStep, x: str, position: str) -> None:
        """key = ... of elements and their positions in a row, int32."""
        i32 = w.type(as_type("int32"))
        if self.floats:
            w.line(f"bits = tile.bitcast(tile.cast({x}, {w.type(as_type('f32'))}), {i32})", step)
            w.line(f"size = tile.minimum((bits & {NAN}) >> {self.shift}, {self.most})", step)
            below, v = ("-size", "size") if not self.descending else ("size", "-size")
            w.line(f"v = tile.where((bits < 0) & (size < {self.most}), {below}, {v})", step)
            w.line("sign = (bits >> 31) & 1", step)
        else:
            wide = w.type(as_type("int64")) if self.dtype.name == "uint32" else i32
            less = f" - {1 << self.dtype.bits - 1}" if self.dtype.kind == "uint" else ""
            w.line(f"v = tile.cast({x}, {wide}){less}", step)
            if self.descending:
                w.line("v = ~v", step)
        self._joined(w, step, position)

    def _joined(self, w: KernelWriter, step: GroupStep, position: str) -> None:
        """key = ... of v, sign and positions."""
        key, P = w.type(self.type), self.place_bits
        w.line(f"key = tile.cast(v, {key})" + (f" << {P}" if P else ""), step)
        if self.tight:
            w.line(f"position = {position}", step)
            there = "position" if self.placed else "0"
            w.line(f"low = tile.where(v == 0, position * 2 + sign, {there} + tile.where(v > 0, "
                   f"{self.zeros}, 0))", step)
            w.line(f"key = key + tile.cast(low, {key})", step)
        elif P:
            low = f"({position}) * 2 + sign" if self.floats else position
            w.line(f"key = key | tile.cast({low}, {key})", step)

    def _parted(self, w: KernelWriter, step: GroupStep) -> None:
        """v, sign, position = ... of keys, as far as they have these. The sign is that of a 0."""
        i32 = w.type(as_type("int32"))
        wide = i32 if self.dtype.name != "uint32" else w.type(as_type("int64"))
        if not self.tight:
            w.line(f"v = tile.cast(key >> {self.place_bits}, {wide})", step)
            w.line(f"position = tile.cast(key & {(1 << self.place_bits) - 1}, {i32})"
                   + " >> 1" * self.floats, step)
            if self.floats:
                w.line(f"sign = tile.cast(key & 1, {i32})", step)
            return
        w.line(f"zero = (key >= 0) & (key < {self.zero_keys})", step)
        w.line(f"rest = tile.where(key < 0, key, key - {self.zeros})", step)
        w.line(f"v = tile.cast(tile.where(zero, 0, rest >> {self.place_bits}), {i32})", step)
        w.line(f"sign = tile.cast(tile.where(zero, key & 1, 0), {i32})", step)
        w.line(f"low = tile.where(zero, key >> 1, rest & {(1 << self.place_bits) - 1})", step)
        w.line(f"position = tile.cast(low, {i32})", step)

    def rebased(self, w: KernelWriter, step: GroupStep, to: KeyFormat, first: str) -> None:
        """key = ... in the format of rows of which these have the elements from `first` on."""
        self._parted(w, step)
        to._joined(w, step, f"position + {first}")

    def results(self, w: KernelWriter, step: GroupStep, group: ScheduledGroup) -> list[str]:
        """What is written of keys, in the order of the results."""
        gives = group.attr("gives")
        if gives != ("keys",):
            self._parted(w, step)
        made = {"keys": lambda to: "key", "values": lambda to: self._value(w, step, to),
                "positions": lambda to: f"tile.cast(position, {w.type(to)})"}
        return [made[what](y.type) for what, y in zip(gives, group.writes, strict=True)]

    def _value(self, w: KernelWriter, step: GroupStep, to: NumericType) -> str:
        if not self.floats:
            if self.descending:
                w.line("v = ~v", step)
            more = f" + {1 << self.dtype.bits - 1}" if self.dtype.kind == "uint" else ""
            return f"tile.cast(v{more}, {w.type(to)})"
        ahead = ">" if self.descending else "<"
        w.line("size = tile.abs(v)", step)
        w.line(f"bits = tile.where(size < {self.most}, size << {self.shift}, {NAN})", step)
        w.line(f"minus = (v {ahead} 0) | ((v == 0) & (sign != 0))", step)
        w.line(f"bits = tile.where(minus, bits | {NEGATIVE}, bits)", step)
        return f"tile.cast(tile.bitcast(bits, {w.type(as_type('f32'))}), {w.type(to)})"


def has_keys(dtype: DType, N: int) -> bool:
    """Whether a number and a position among N fit into 64 bits, and twice the latter into 32."""
    return dtype.bits <= 32 and N < LONG


__all__ = ["KeyFormat", "has_keys"]
