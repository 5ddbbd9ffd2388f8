"""Conversions between number formats.

NaN: these instructions give one of their own (bf16 and f16 0x7FFF, fp8 0x7F, f32 0x7FFFFFFF), where
our numerics keep the sign and give the one with the least mantissa (tessera.numerics.encode), or
keep the payload where a format is widened. Halves are left so (formats.encode_half says why), for
others the emitter mends it (intrinsics: narrow_floats, casts); everything else is equal bit for bit
to `encode` with the same rounding, with saturate=True for the forms marked satfinite.
"""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

_ISA = "9.7.9 cvt"
ROUND = {"nearest_even": "rn", "toward_zero": "rz"}


@family(*({"type": t, "rounding": r} for t in ("bf16", "f16") for r in ROUND))
def pack_half(type: str, rounding: str = "nearest_even") -> Instruction:
    """(low, high) f32 -> two 16-bit numbers in a register, `low` in the lower half.

    Neighbouring accumulators packed so are the A operand of the next mma or wgmma.
    """
    one_of("type", type, ("bf16", "f16"))
    how = ROUND[one_of("rounding", rounding, ROUND)]
    return Instruction(f"pack_{type}_{how}", "d:i32 <- low:f32, high:f32",
                       f"cvt.{how}.{type}x2.f32 $d, $high, $low;", isa=_ISA, effect="pure",
                       cc="80")


@family({"type": "bf16"}, {"type": "f16"})
def pack_half_there(type: str) -> Instruction:
    """The same where it stands, behind the wait for a matmul that reads the register (C7513)."""
    one_of("type", type, ("bf16", "f16"))
    return Instruction(f"pack_{type}_there", "d:i32 <- low:f32, high:f32",
                       f"cvt.rn.{type}x2.f32 $d, $high, $low;", isa=_ISA, effect="volatile",
                       cc="80")


@family(*({"type": t, "rounding": r} for t in ("bf16", "f16") for r in ROUND))
def to_half(type: str, rounding: str = "nearest_even") -> Instruction:
    """f32 -> the bits of one 16-bit number, zero-extended."""
    one_of("type", type, ("bf16", "f16"))
    how = ROUND[one_of("rounding", rounding, ROUND)]
    return Instruction(f"to_{type}_{how}", "d:i32 <- x:f32",
                       f".reg .b16 h;\ncvt.{how}.{type}.f32 h, $x;\ncvt.u32.u16 $d, h;", isa=_ISA,
                       effect="pure", cc="80" if type == "bf16" else "75")


# f16 -> f32 by halves of a register; bf16 -> f32 is a shift or a mask, and exact.
Instruction("f16_low", "d:f32 <- x:i32",
            ".reg .b16 a, b;\nmov.b32 {a, b}, $x;\ncvt.f32.f16 $d, a;", isa=_ISA, effect="pure")
Instruction("f16_high", "d:f32 <- x:i32",
            ".reg .b16 a, b;\nmov.b32 {a, b}, $x;\ncvt.f32.f16 $d, b;", isa=_ISA, effect="pure")
Instruction("bf16_low", "d:f32 <- x:i32", "shl.b32 $d, $x, 16;", isa="9.7.8 shl", effect="pure")
Instruction("bf16_high", "d:f32 <- x:i32", "and.b32 $d, $x, 0xFFFF0000;", isa="9.7.8 and",
            effect="pure")

FP8 = ("e4m3", "e5m2")


@family(*({"type": t} for t in FP8), {"type": "e4m3", "relu": True})
def pack_fp8(type: str, *, relu: bool = False) -> Instruction:
    """(low, high) f32 -> two fp8 codes in the low 16 bits; nearest even, satfinite."""
    one_of("type", type, FP8)
    return Instruction(
        f"pack_{type}{'_relu' * relu}", "d:i32 <- low:f32, high:f32",
        f".reg .b16 h;\ncvt.rn.satfinite{'.relu' * relu}.{type}x2.f32 h, $high, $low;\n"
        "cvt.u32.u16 $d, h;", isa=_ISA, effect="pure", cc="89")


@family(*({"type": t} for t in FP8))
def pack4_fp8(type: str) -> Instruction:
    """Four f32 -> four fp8 codes in a register, first lowest; nearest even, satfinite."""
    one_of("type", type, FP8)
    return Instruction(
        f"pack4_{type}", "d:i32 <- x:f32*4",
        f".reg .b16 a, b;\ncvt.rn.satfinite.{type}x2.f32 a, $x.1, $x.0;\n"
        f"cvt.rn.satfinite.{type}x2.f32 b, $x.3, $x.2;\nmov.b32 $d, {{a, b}};", isa=_ISA,
        effect="pure", cc="89")


@family(*({"type": t} for t in FP8))
def f16x2_to_fp8(type: str) -> Instruction:
    """Two f16 in a register -> two fp8 codes in the low 16 bits; nearest even, satfinite."""
    one_of("type", type, FP8)
    return Instruction(
        f"f16x2_to_{type}", "d:i32 <- x:i32",
        f".reg .b16 h;\ncvt.rn.satfinite.{type}x2.f16x2 h, $x;\ncvt.u32.u16 $d, h;", isa=_ISA,
        effect="pure", cc="89")


@family(*({"type": t} for t in FP8))
def fp8_to_f16x2(type: str) -> Instruction:
    """Two fp8 codes in the low 16 bits -> two f16 in a register; exact."""
    one_of("type", type, FP8)
    return Instruction(
        f"{type}_to_f16x2", "d:i32 <- x:i32",
        f".reg .b16 h;\ncvt.u16.u32 h, $x;\ncvt.rn.f16x2.{type}x2 $d, h;", isa=_ISA, effect="pure",
        cc="89")


# tf32: f32 with 10 bits of mantissa, in 32. rna rounds ties away from zero; sm_90 has nearest even.
Instruction("to_tf32_rna", "d:i32 <- x:f32", "cvt.rna.tf32.f32 $d, $x;", isa=_ISA, effect="pure",
            cc="80")
Instruction("to_tf32_rn", "d:i32 <- x:f32", "cvt.rn.tf32.f32 $d, $x;", isa=_ISA, effect="pure",
            cc="90")

# Float to int: rni nearest even, rzi toward zero; out of range saturates. NaN gives 0 from f32 to
# 32 bits, elsewhere the highest bit alone.
for _how in ("rni", "rzi", "rmi", "rpi"):
    Instruction(f"f32_to_s32_{_how}", "d:i32 <- x:f32", f"cvt.{_how}.s32.f32 $d, $x;", isa=_ISA,
                effect="pure")
for _int, _kind in (("u32", "i32"), ("s64", "i64"), ("u64", "i64")):
    for _how in ("rni", "rzi"):
        Instruction(f"f32_to_{_int}_{_how}", f"d:{_kind} <- x:f32",
                    f"cvt.{_how}.{_int}.f32 $d, $x;", isa=_ISA, effect="pure")
for _how in ("rni", "rzi"):
    for _int in ("s32", "u32", "s64", "u64"):
        _kind = "i32" if _int.endswith("32") else "i64"
        Instruction(f"f64_to_{_int}_{_how}", f"d:{_kind} <- x:f64",
                    f"cvt.{_how}.{_int}.f64 $d, $x;", isa=_ISA, effect="pure")
    for _int in ("s8", "u8"):
        Instruction(f"f32_to_{_int}_sat_{_how}", "d:i32 <- x:f32",
                    f"cvt.{_how}.sat.{_int}.f32 $d, $x;", isa=_ISA, effect="pure")
for _int, _kind in (("s32", "i32"), ("u32", "i32"), ("s64", "i64"), ("u64", "i64")):
    for _how in ("rn", "rz"):
        for _float in ("f32", "f64"):
            Instruction(f"{_int}_to_{_float}_{_how}", f"d:{_float} <- x:{_kind}",
                        f"cvt.{_how}.{_float}.{_int} $d, $x;", isa=_ISA, effect="pure")
for _how in ("rn", "rz"):
    Instruction(f"f64_to_f32_{_how}", "d:f32 <- x:f64", f"cvt.{_how}.f32.f64 $d, $x;", isa=_ISA,
                effect="pure")
Instruction("f32_to_f64", "d:f64 <- x:f32", "cvt.f64.f32 $d, $x;", isa=_ISA, effect="pure")
for _how in ("rni", "rzi", "rmi", "rpi"):
    Instruction(f"round_f32_{_how}", "d:f32 <- x:f32", f"cvt.{_how}.f32.f32 $d, $x;", isa=_ISA,
                effect="pure")
