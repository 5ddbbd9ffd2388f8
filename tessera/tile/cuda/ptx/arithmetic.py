"""Arithmetic that LLVM does not spell: approximations, NaN-aware extrema, packed halves, bits.

Errors as the ISA states them (section 9.7.3): ex2 and lg2 2^-22 (relative; absolute near 1 for
lg2), rcp and rsqrt 1 ulp and 2^-22.9, tanh 2^-11, sin and cos 2^-20.9 absolute in [-pi, pi].
"""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

_ISA = "9.7.3"
for _op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"):
    Instruction(f"{_op}_approx", "d:f32 <- x:f32", f"{_op}.approx.ftz.f32 $d, $x;",
                isa=f"{_ISA} {_op}", effect="pure")
# Keeps subnormal inputs and results, at two or three instructions more.
for _op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt"):
    Instruction(f"{_op}_approx_full", "d:f32 <- x:f32", f"{_op}.approx.f32 $d, $x;",
                isa=f"{_ISA} {_op}", effect="pure")
Instruction("tanh_approx", "d:f32 <- x:f32", "tanh.approx.f32 $d, $x;", isa=f"{_ISA} tanh",
            effect="pure")
Instruction("div_approx", "d:f32 <- x:f32, y:f32", "div.approx.ftz.f32 $d, $x, $y;",
            isa=f"{_ISA} div", effect="pure")
for _op in ("rcp", "sqrt"):
    Instruction(f"{_op}_rn", "d:f32 <- x:f32", f"{_op}.rn.f32 $d, $x;", isa=f"{_ISA} {_op}",
                effect="pure")
Instruction("div_rn", "d:f32 <- x:f32, y:f32", "div.rn.f32 $d, $x, $y;", isa=f"{_ISA} div",
            effect="pure")
# Never fused or re-associated: what `determinism` needs.
for _op in ("add", "sub", "mul"):
    Instruction(f"{_op}_rn", "d:f32 <- x:f32, y:f32", f"{_op}.rn.f32 $d, $x, $y;",
                isa=f"{_ISA} {_op}", effect="pure")
Instruction("fma_rn", "d:f32 <- x:f32, y:f32, z:f32", "fma.rn.f32 $d, $x, $y, $z;",
            isa=f"{_ISA} fma", effect="pure")

# Plain: a NaN operand is ignored (IEEE maxNum); _nan: it is the result, as NumPy's maximum.
for _op in ("min", "max"):
    Instruction(f"f32_{_op}", "d:f32 <- x:f32, y:f32", f"{_op}.f32 $d, $x, $y;",
                isa=f"{_ISA} {_op}", effect="pure")
    Instruction(f"f32_{_op}_nan", "d:f32 <- x:f32, y:f32", f"{_op}.NaN.f32 $d, $x, $y;",
                isa=f"{_ISA} {_op}", effect="pure", cc="80")
    for _type in ("s32", "u32"):
        Instruction(f"{_type}_{_op}", "d:i32 <- x:i32, y:i32", f"{_op}.{_type} $d, $x, $y;",
                    isa=f"9.7.1 {_op}", effect="pure")

# Two 16-bit numbers in a register.
for _type, _cc in (("f16x2", "75"), ("bf16x2", "90")):
    for _op in ("add", "mul", "sub"):
        Instruction(f"{_op}_{_type}", "d:i32 <- x:i32, y:i32",
                    f"{_op}{'.rn' if _cc == '90' else ''}.{_type} $d, $x, $y;",
                    isa=f"9.7.4 {_op}", effect="pure", cc=_cc)
for _type, _cc in (("f16x2", "75"), ("bf16x2", "80")):
    Instruction(f"fma_{_type}", "d:i32 <- x:i32, y:i32, z:i32",
                f"fma.rn.{_type} $d, $x, $y, $z;", isa="9.7.4 fma", effect="pure", cc=_cc)
    for _op in ("min", "max"):
        Instruction(f"{_op}_{_type}", "d:i32 <- x:i32, y:i32", f"{_op}.{_type} $d, $x, $y;",
                    isa=f"9.7.4 {_op}", effect="pure", cc="80")
Instruction("ex2_f16x2", "d:i32 <- x:i32", "ex2.approx.f16x2 $d, $x;", isa="9.7.4 ex2",
            effect="pure")

# --- bits, for packed types ------------------------------------------------------------------
# prmt: byte i of the result is byte (selector >> 4 i) & 7 of y:x; bit 3 of a nibble repeats a sign.
Instruction("prmt", "d:i32 <- x:i32, y:i32, selector:i32", "prmt.b32 $d, $x, $y, $selector;",
            isa="9.7.9 prmt", effect="pure")
for _type in ("s32", "u32"):
    Instruction(f"bfe_{_type}", "d:i32 <- x:i32, at:i32, bits:i32",
                f"bfe.{_type} $d, $x, $at, $bits;", isa="9.7.1 bfe", effect="pure")
Instruction("bfi", "d:i32 <- x:i32, into:i32, at:i32, bits:i32",
            "bfi.b32 $d, $x, $into, $at, $bits;", isa="9.7.1 bfi", effect="pure")
Instruction("shf_left", "d:i32 <- low:i32, high:i32, by:i32",
            "shf.l.wrap.b32 $d, $low, $high, $by;", isa="9.7.8 shf", effect="pure")
Instruction("shf_right", "d:i32 <- low:i32, high:i32, by:i32",
            "shf.r.wrap.b32 $d, $low, $high, $by;", isa="9.7.8 shf", effect="pure")
for _op in ("popc", "clz"):
    Instruction(_op, "d:i32 <- x:i32", f"{_op}.b32 $d, $x;", isa=f"9.7.1 {_op}", effect="pure")
Instruction("find_high", "d:i32 <- x:i32", "bfind.u32 $d, $x;", isa="9.7.1 bfind", effect="pure")
Instruction("reverse_bits", "d:i32 <- x:i32", "brev.b32 $d, $x;", isa="9.7.1 brev", effect="pure")
Instruction("mul_hi_u32", "d:i32 <- x:i32, y:i32", "mul.hi.u32 $d, $x, $y;", isa="9.7.1 mul",
            effect="pure")
for _a in ("s32", "u32"):
    Instruction(f"dp4a_{_a}", "d:i32 <- x:i32, y:i32, z:i32", f"dp4a.{_a}.{_a} $d, $x, $y, $z;",
                isa="9.7.1 dp4a", effect="pure")


@family({"table": 0xEA}, {"table": 0xCA}, {"table": 0x96})
def lop3(table: int) -> Instruction:
    """Any function of three bits at once; `table` is it applied to 0xF0, 0xCC, 0xAA.

    0xEA: (x & y) | z    0xCA: x ? y : z    0x96: x ^ y ^ z
    """
    one_of("table", table, range(256))
    return Instruction(f"lop3_{table:02X}", "d:i32 <- x:i32, y:i32, z:i32",
                       f"lop3.b32 $d, $x, $y, $z, {table};", isa="9.7.8 lop3", effect="pure")
