"""Shared memory: addresses, the 128-byte swizzle, and the matrix descriptors of wgmma."""

from __future__ import annotations

import functools
from typing import Any

from ....errors import ArgumentError
from ..builder import Builder
from ..instruction import InstructionForm, Operand, Operation

I32 = Operand("x", "i32")
# Descriptor code of a swizzle by the bytes of its rows (PTX ISA 9.7.15.5.1, matrix descriptor).
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


@functools.cache
def address(offset_bytes: int = 0) -> Operation:
    """() -> 32-bit shared address of a byte of the kernel's dynamic shared memory."""
    form = InstructionForm((), (I32,), lambda b: b.add(b.shared_base(), b.i32(offset_bytes)))
    return Operation("shared_address", 0, lambda: form)


def slot_address(b: Builder, offset: int, slot: Any, slot_bytes: int) -> Any:
    """The shared address of one of several slots that lie one behind another from `offset` on."""
    return b.add(b.add(b.shared_base(), b.i32(offset)), b.mul(slot, b.i32(slot_bytes)))


def swizzle(row: int, column_bytes: int, width_bytes: int = 128) -> int:
    """Byte offset of (row, column) in a panel of `width_bytes` rows that TMA wrote swizzled.

    16-byte chunk c of row r lies at chunk c ^ (r mod 8), mod 4 for 64 and mod 2 for 32 byte rows of
    a 128-byte line: bits 4..6 of the offset are xored with bits 7..9.
    """
    if width_bytes not in (32, 64, 128):
        raise ArgumentError(f"a swizzle of {width_bytes} bytes", hint="32, 64 or 128")
    at = row * width_bytes + column_bytes
    return at ^ ((at >> 7) * 16 & (width_bytes - 16))


def _swizzled(width_bytes: int) -> InstructionForm:
    def body(b: Any, at: Any) -> Any:
        line = b.and_(b.lshr(at, b.i32(3)), b.i32(width_bytes - 16))
        return b.xor(at, line)

    return InstructionForm((I32,), (I32,), body)


@functools.cache
def swizzled(width_bytes: int = 128) -> Operation:
    """(byte offset in a panel aligned to its pattern) -> where the swizzle puts it."""
    form = _swizzled(width_bytes)
    return Operation(f"swizzled_{width_bytes}", 1, lambda _: form)


def descriptor_bits(lead_bytes: int, stride_bytes: int, swizzle_bytes: int = 128) -> int:
    """The constant part of a wgmma descriptor (PTX ISA 9.7.15.5.1).

    K-major: stride_bytes between groups of 8 rows; lead_bytes is not used with a swizzle.
    MN-major: lead_bytes between panels of `swizzle_bytes`, stride_bytes between groups of 8 k.
    """
    for name, value in (("lead_bytes", lead_bytes), ("stride_bytes", stride_bytes)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ArgumentError(f"{name}={value} is not a multiple of 16 below 256 KiB")
    if swizzle_bytes not in SWIZZLES:
        raise ArgumentError(f"a swizzle of {swizzle_bytes} bytes", hint="0, 32, 64 or 128")
    return SWIZZLES[swizzle_bytes] << 62 | (stride_bytes >> 4) << 32 | (lead_bytes >> 4) << 16


@functools.cache
def descriptor(lead_bytes: int, stride_bytes: int, swizzle_bytes: int = 128) -> Operation:
    """(shared address) -> descriptor of the matrix that starts there."""
    high = descriptor_bits(lead_bytes, stride_bytes, swizzle_bytes)
    high -= (high >> 63) << 64  # as a signed constant

    def body(b: Any, at: Any) -> Any:
        low = b.lshr(b.and_(at, b.i32(0x3FFFF)), b.i32(4))
        return b.or_(b.zext(low, "i64"), b.const("i64", high))

    form = InstructionForm((I32,), (Operand("d", "i64"),), body)
    return Operation("descriptor", 1, lambda _: form)


def steps(k: int, element_bits: int, *, major: str = "K", panel_bytes: int = 0,
          instruction_k: int = 0) -> tuple[int, ...]:
    """Descriptor offsets (16-byte units) of the k steps of a block, for `wgmma.matmul`.

    K-major, panels of 128 bytes of k: 32 bytes a step, the next panel `panel_bytes` on.
    MN-major, panels of 64 columns of 16-bit elements: 16 rows of 128 bytes a step.
    """
    per_step = instruction_k or 256 // element_bits
    count = k // per_step
    if k % per_step:
        raise ArgumentError(f"k={k} is not a multiple of {per_step}")
    if major == "M":
        return tuple(i * per_step * 128 >> 4 for i in range(count))
    return tuple((i // 4) * (panel_bytes >> 4) + (i % 4) * 2 for i in range(count))
