"""Memory formats of compiled loops: LLVM code that decodes to a register and encodes from one.

encode agrees bit for bit with `astype` of NumPy and ml_dtypes: round to nearest even, a format
without infinity overflows to NaN, the others to infinity, a NaN becomes the format's canonical NaN
(f16 keeps its payload). Imports llvmlite: only the compiler imports this module.
"""

from __future__ import annotations

from llvmlite import ir

from ...numerics import DType, find_dtype
from ..schedule.loop_dtypes import is_narrow, item_bytes, register_of

BOOL, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def memory_bits(memory: str) -> int:
    return 8 * item_bytes(memory)


def decode(b: ir.IRBuilder, raw: ir.Value, memory: str) -> ir.Value:
    """The register value of the bits `raw`."""
    dtype = find_dtype(memory)
    if dtype.kind == "float":
        return _decode_narrow(b, raw, dtype) if is_narrow(dtype) else b.bitcast(
            raw, F64 if dtype.bits == 64 else F32)
    if dtype.kind == "bool":
        return b.icmp_unsigned("!=", raw, I8(0))
    register = I64 if register_of(memory) == "i64" else I32
    if raw.type == register:
        return raw
    return b.sext(raw, register) if dtype.kind == "int" else b.zext(raw, register)


def is_upper(dtype: DType, exp: int) -> bool:
    """Whether its code is the upper bits of an IEEE format with that many exponent bits."""
    return dtype.special == "ieee" and dtype.exp == exp


def _decode_narrow(b: ir.IRBuilder, raw: ir.Value, dtype: DType) -> ir.Value:
    if is_upper(dtype, 8):
        return b.bitcast(b.shl(b.zext(raw, I32), I32(32 - dtype.bits)), F32)
    if is_upper(dtype, 5):  # of a half
        wide = raw if dtype.bits == 16 else b.shl(b.zext(raw, I16), I16(16 - dtype.bits))
        return b.fpext(b.bitcast(wide, F16), F32)
    return _decode_rescaled(b, raw, dtype)


def _decode_rescaled(b: ir.IRBuilder, raw: ir.Value, dtype: DType) -> ir.Value:
    """exponent and mantissa moved into an f32 and rescaled by 2**(127 - bias): exact, subnormals
    too. Codes beyond the largest number are infinity and NaN."""
    code, sign = b.zext(raw, I32), 1 << dtype.sign_shift
    magnitude = b.and_(code, I32(sign - 1))
    moved = b.bitcast(b.shl(magnitude, I32(23 - dtype.man)), F32)
    bits = b.bitcast(b.fmul(moved, F32(2.0 ** (127 - dtype.bias))), I32)
    if dtype.inf_code is not None:
        infinite = b.icmp_unsigned("==", magnitude, I32(dtype.inf_code))
        bits = b.select(infinite, I32(0x7F800000), bits)
        nan = b.icmp_unsigned(">", magnitude, I32(dtype.inf_code))
    else:
        nan = b.icmp_unsigned("==", magnitude, I32(dtype.nan_code))
    bits = b.select(nan, I32(0x7FC00000), bits)
    return b.bitcast(b.or_(bits, b.shl(b.and_(code, I32(sign)), I32(31 - dtype.sign_shift))), F32)


def encode(b: ir.IRBuilder, value: ir.Value, memory: str) -> ir.Value:
    """The bits of a register value in this format."""
    dtype = find_dtype(memory)
    bits = ir.IntType(memory_bits(memory))
    if dtype.kind == "float":
        return _encode_narrow(b, value, dtype) if is_narrow(dtype) else b.bitcast(value, bits)
    if dtype.kind == "bool":
        return b.zext(value, I8)
    return value if value.type == bits else b.trunc(value, bits)


def _encode_narrow(b: ir.IRBuilder, value: ir.Value, dtype: DType) -> ir.Value:
    if dtype.bits == 16:
        return _encode_bf16(b, value) if is_upper(dtype, 8) else _encode_f16(b, value)
    return _encode_fp8(b, value, dtype)


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


def _encode_fp8(b: ir.IRBuilder, value: ir.Value, dtype: DType) -> ir.Value:
    """Normal numbers round in the integer domain; subnormals by adding a power of two whose unit in
    the last place is the format's smallest number: the rounded code is left in the low bits."""
    man_bits, bias, nan = dtype.man, dtype.bias, dtype.nan_code
    overflow = nan if dtype.inf_code is None else dtype.inf_code
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
