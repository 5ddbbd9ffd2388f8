"""What targets before sm_80 do in place of instructions that they lack: the same, bit for bit but
for the payload of a NaN."""

from __future__ import annotations

from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import otherwise
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.narrow_floats import encode_code
from tessera.tile.cuda.ptx.convert import ROUND

LLVM = Any


def _extreme(op: str) -> None:
    @otherwise(f"f32_{op}_nan")
    def extreme(b: Builder, x: LLVM, y: LLVM) -> LLVM:
        plain = b.call(find_instruction(f"f32_{op}"), x, y)
        return b.select(b.compare("!=", x, x), x, b.select(b.compare("!=", y, y), y, plain))


def _half(type: str, rounding: str, how: str) -> None:
    def one(b: Builder, x: LLVM) -> LLVM:
        if type == "f16":
            return b.call(find_instruction(f"to_f16_{how}"), x)
        return encode_code(b, find_dtype(type), x, rounding)

    if type == "bf16":
        otherwise(f"to_bf16_{how}")(one)

    @otherwise(f"pack_{type}_{how}")
    def pack(b: Builder, low: LLVM, high: LLVM) -> LLVM:
        return b.or_(one(b, low), b.shl(one(b, high), b.i32(16)))


_extreme("max")
_extreme("min")
for _type in ("bf16", "f16"):
    for _rounding, _how in ROUND.items():
        _half(_type, _rounding, _how)
