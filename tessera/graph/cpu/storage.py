"""Memory formats of compiled loops: LLVM code that decodes to a register and encodes from one.

encode agrees bit for bit with `astype` of NumPy and ml_dtypes: round to nearest even, fp8_e4m3
overflows to NaN, fp8_e5m2 and f16 to infinity, a NaN becomes the format's canonical NaN (f16 keeps
its payload). Imports llvmlite: only the compiler imports this module.
"""

from __future__ import annotations

from llvmlite import ir

from .program import ITEM_BYTES

BOOL, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
MEMORY_BITS = {name: 8 * size for name, size in ITEM_BYTES.items()}
SIGNED = ("int64", "int32", "int16", "int8")


def decode(b: ir.IRBuilder, raw: ir.Value, memory: str) -> ir.Value:
    """The register value of the bits `raw`."""
    match memory:
        case "f64":
            return b.bitcast(raw, F64)
        case "f32":
            return b.bitcast(raw, F32)
        case "bf16":
            return b.bitcast(b.shl(b.zext(raw, I32), I32(16)), F32)
        case "f16":
            return b.fpext(b.bitcast(raw, F16), F32)
        case "fp8_e5m2":  # the upper byte of a half
            return b.fpext(b.bitcast(b.shl(b.zext(raw, I16), I16(8)), F16), F32)
        case "fp8_e4m3":
            return _decode_e4m3(b, raw)
        case "bool_":
            return b.icmp_unsigned("!=", raw, I8(0))
    register = I64 if memory in ("int64", "uint64") else I32
    if raw.type == register:
        return raw
    return b.sext(raw, register) if memory in SIGNED else b.zext(raw, register)


def _decode_e4m3(b: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """exponent and mantissa moved into an f32 and rescaled by 2**(127-7): exact, subnormals too."""
    code = b.zext(raw, I32)
    magnitude = b.and_(code, I32(0x7F))
    scaled = b.fmul(b.bitcast(b.shl(magnitude, I32(20)), F32), F32(2.0**120))
    nan = b.icmp_unsigned("==", magnitude, I32(0x7F))
    bits = b.select(nan, I32(0x7FC00000), b.bitcast(scaled, I32))
    return b.bitcast(b.or_(bits, b.shl(b.and_(code, I32(0x80)), I32(24))), F32)


def encode(b: ir.IRBuilder, value: ir.Value, memory: str) -> ir.Value:
    """The bits of a register value in this format."""
    match memory:
        case "f64":
            return b.bitcast(value, I64)
        case "f32":
            return b.bitcast(value, I32)
        case "bf16":
            return _encode_bf16(b, value)
        case "f16":
            return _encode_f16(b, value)
        case "fp8_e4m3":
            return _encode_fp8(b, value, exp_bits=4, man_bits=3, overflow=0x7F, nan=0x7F)
        case "fp8_e5m2":
            return _encode_fp8(b, value, exp_bits=5, man_bits=2, overflow=0x7C, nan=0x7E)
        case "bool_":
            return b.zext(value, I8)
    bits = ir.IntType(MEMORY_BITS[memory])
    return value if value.type == bits else b.trunc(value, bits)


def _encode_bf16(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Add half a unit (less one when the kept part is even) and cut; NaN keeps only its sign."""
    bits = b.bitcast(value, I32)
    odd = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(bits, b.add(odd, I32(0x7FFF))), I32(16))
    quiet = b.or_(b.and_(b.lshr(bits, I32(16)), I32(0x8000)), I32(0x7FC0))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(nan, quiet, rounded), I16)


def _encode_f16(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The hardware's f32 to f16; a NaN keeps its upper ten bits as they are, as in NumPy."""
    bits = b.bitcast(value, I32)
    kept = b.and_(b.lshr(bits, I32(13)), I32(0x3FF))
    kept = b.select(b.icmp_unsigned("==", kept, I32(0)), I32(1), kept)
    sign = b.and_(b.lshr(bits, I32(16)), I32(0x8000))
    nan = b.trunc(b.or_(b.or_(sign, I32(0x7C00)), kept), I16)
    rounded = b.bitcast(b.fptrunc(value, F16), I16)
    return b.select(b.fcmp_unordered("uno", value, value), nan, rounded)


def _encode_fp8(
    b: ir.IRBuilder, value: ir.Value, *, exp_bits: int, man_bits: int, overflow: int, nan: int
) -> ir.Value:
    """Normal numbers round in the integer domain; subnormals by adding a power of two whose unit in
    the last place is the format's smallest number: the rounded code is left in the low bits."""
    bias = 2 ** (exp_bits - 1) - 1
    cut = 23 - man_bits
    bits = b.bitcast(value, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, I32(cut)), I32(1))
    rounded = b.lshr(b.add(magnitude, b.add(odd, I32((1 << (cut - 1)) - 1))), I32(cut))
    normal = b.sub(rounded, I32((127 - bias) << man_bits))
    magic = F32(2.0 ** (23 + 1 - bias - man_bits))
    shifted = b.bitcast(b.fadd(b.bitcast(magnitude, F32), magic), I32)
    subnormal = b.sub(shifted, b.bitcast(magic, I32))
    small = b.icmp_unsigned("<", magnitude, I32((128 - bias) << 23))
    code = b.select(small, subnormal, normal)
    code = b.select(b.icmp_signed(">", code, I32(overflow)), I32(overflow), code)
    code = b.select(b.fcmp_unordered("uno", value, value), I32(nan), code)
    sign = b.and_(b.lshr(bits, I32(24)), I32(0x80))
    return b.trunc(b.or_(code, sign), I8)
