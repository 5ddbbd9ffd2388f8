"""The numeric formats: one record each, everything else derived from its field widths.

A float of `exp` exponent and `man` mantissa bits with bias b stands for
    (-1)^s * 2^(E-b) * (1 + M/2^man)   for E > 0
    (-1)^s * 2^(1-b) * M/2^man         for E = 0
and `special` says what the largest codes mean: 'ieee' (all-ones exponent is inf and NaN), 'fn'
(only the all-ones code is NaN, no inf), 'none' (every code is a number).

Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0,
section 5.3. fp4_e3m0 has no published encoding: bias 3, values 0 and 2^-2 .. 2^4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tessera.errors import DTypeError, did_you_mean
from tessera.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from tessera.numerics.policy import Modifier, NumericType

_REGISTRY: dict[str, DType] = {}
_ALIASES: dict[str, str] = {}
_BY_NUMPY: dict[np.dtype, DType] = {}  # of formats whose NumPy type means nothing else


@dataclass(frozen=True, eq=False, repr=False)
class DType:
    """A storage format. There is one object per name, and a name, alias or NumPy type equals it:
    `x.dtype == "float32"`. Raises DTypeError when compared with a word that names no format.

    `numpy` is the element type of unpacked arrays, one element per item. For fp4_e3m0, which no
    library has, it is uint8 holding codes; for tf32 it is float32 with 10 mantissa bits in use.
    """

    name: str
    kind: str  # 'float' | 'int' | 'uint' | 'bool'
    bits: int
    exp: int
    man: int
    bias: int
    special: str  # 'ieee' | 'fn' | 'none'
    numpy: np.dtype

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, DType):
            return False
        from tessera.numerics.policy import same_type

        return same_type(self, other)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return find_dtype, (self.name,)  # copies and pickles give back the one object

    def __matmul__(self, modifier: Modifier) -> NumericType:
        """`fp8_e4m3 @accum(f32)`: this storage with a policy."""
        from tessera.numerics.policy import NumericType, Policy

        return NumericType(self, Policy()).__matmul__(modifier)

    # -- layout of a code --

    @property
    def packed(self) -> bool:
        """True when several elements share a byte in storage."""
        return self.bits < 8

    @property
    def has_own_numpy(self) -> bool:
        """Whether NumPy has a type for its elements: not for tf32 (f32) and fp4_e3m0 (codes)."""
        return _BY_NUMPY.get(self.numpy) is self

    @property
    def sign_shift(self) -> int:
        """Position of the sign bit in a float's code, before `pad`."""
        return self.exp + self.man

    @property
    def pad(self) -> int:
        """Unused low bits of the storage word: 13 for tf32, otherwise 0."""
        return self.bits - 1 - self.exp - self.man if self.kind == "float" else 0

    @property
    def code_type(self) -> np.dtype:
        """Unsigned integer type that holds one unpacked element."""
        return np.dtype(f"u{self.numpy.itemsize}")

    @property
    def inf_code(self) -> int | None:
        """Code of +inf, or None when the format has no infinity."""
        return ((1 << self.exp) - 1) << self.man if self.special == "ieee" else None

    @property
    def nan_code(self) -> int | None:
        """Code of the quiet NaN, or None when the format has no NaN."""
        if self.special == "ieee":
            return (((1 << self.exp) - 1) << self.man) | (1 << (self.man - 1))
        return (1 << self.sign_shift) - 1 if self.special == "fn" else None

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.inf_code is not None:
            return self.inf_code - 1
        return (1 << self.sign_shift) - (2 if self.special == "fn" else 1)

    def value_of(self, code: int) -> float:
        """Value of a non-negative finite code, exact in f64."""
        field, fraction = code >> self.man, code & ((1 << self.man) - 1)
        hidden = 1 << self.man if field else 0
        return (hidden + fraction) * 2.0 ** (max(field, 1) - self.bias - self.man)

    def below(self, value: float) -> float:
        """The largest finite number of a float format that is less than `value`, or its least."""
        codes = range(self.max_code + 1)
        if value > 0:
            return self.value_of(bisect_left(codes, value, key=self.value_of) - 1)
        more = bisect_right(codes, -value, key=self.value_of)
        return -self.value_of(min(more, self.max_code))

    # -- range --

    @property
    def max(self) -> float | int:
        """Largest finite value."""
        if self.kind == "float":
            return self.value_of(self.max_code)
        return (1 << (self.bits - (self.kind == "int"))) - 1 if self.kind != "bool" else 1

    @property
    def min(self) -> float | int:
        """Most negative finite value."""
        if self.kind == "float":
            return -self.max
        return -(1 << (self.bits - 1)) if self.kind == "int" else 0

    @property
    def tiny(self) -> float | int:
        """Smallest positive normal value; 1 for integers."""
        return self.value_of(1 << self.man) if self.kind == "float" else 1

    @property
    def smallest(self) -> float | int:
        """Smallest positive value: subnormal where the format has them; 1 for integers."""
        return self.value_of(1) if self.kind == "float" else 1

    @property
    def eps(self) -> float | int:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.man if self.kind == "float" else 1

    @property
    def compute(self) -> DType:
        """Type that arithmetic on this storage is done in."""
        if self.kind != "float":
            return self
        return self if self.name == "f64" else _REGISTRY["f32"]

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(alias for alias, name in _ALIASES.items() if name == self.name)


STORED_BITS = (4, 6, 8, 16, 32, 64)  # widths that packing.py and the packed tiles of GPUs know


def _add(dtype: DType, *aliases: str) -> DType:
    if dtype.bits not in STORED_BITS:
        raise DTypeError(f"{dtype} has {dtype.bits} bits; elements are stored in one of "
                         f"{', '.join(map(str, STORED_BITS))}")
    for name in (dtype.name, *aliases):
        if name in _REGISTRY or name in _ALIASES:
            raise DTypeError(f"dtype name {name!r} is declared twice")
    _REGISTRY[dtype.name] = dtype
    _ALIASES.update(dict.fromkeys(aliases, dtype.name))
    if dtype.kind != "float" or dtype.numpy.kind not in "iu":  # floats kept as codes have no type
        _BY_NUMPY.setdefault(dtype.numpy, dtype)  # tf32 comes after f32
    return dtype


def _float(
    name: str, exp: int, man: int, special: str, numpy: Any, *aliases: str, bits: int | None = None
) -> DType:
    bias = (1 << (exp - 1)) - 1  # IEEE 754 table 3.5; the OCP formats follow it
    bits = bits or 1 + exp + man
    return _add(DType(name, "float", bits, exp, man, bias, special, np.dtype(numpy)), *aliases)


def _int(name: str, kind: str, bits: int, numpy: Any, *aliases: str) -> DType:
    return _add(DType(name, kind, bits, 0, 0, 0, "none", np.dtype(numpy)), *aliases)


f64 = _float("f64", 11, 52, "ieee", np.float64, "fp64", "float64")
f32 = _float("f32", 8, 23, "ieee", np.float32, "fp32", "float32")
tf32 = _float("tf32", 8, 10, "ieee", np.float32, bits=32)
bf16 = _float("bf16", 8, 7, "ieee", ml_dtypes.bfloat16, "bfloat16")
f16 = _float("f16", 5, 10, "ieee", np.float16, "fp16", "float16")
fp8_e4m3 = _float("fp8_e4m3", 4, 3, "fn", ml_dtypes.float8_e4m3fn, "fp8")
fp8_e5m2 = _float("fp8_e5m2", 5, 2, "ieee", ml_dtypes.float8_e5m2)
fp6_e3m2 = _float("fp6_e3m2", 3, 2, "none", ml_dtypes.float6_e3m2fn, "fp6")
fp6_e2m3 = _float("fp6_e2m3", 2, 3, "none", ml_dtypes.float6_e2m3fn)
fp4_e2m1 = _float("fp4_e2m1", 2, 1, "none", ml_dtypes.float4_e2m1fn, "fp4")
fp4_e3m0 = _float("fp4_e3m0", 3, 0, "none", np.uint8)
int64 = _int("int64", "int", 64, np.int64, "i64")
int32 = _int("int32", "int", 32, np.int32, "i32")
int16 = _int("int16", "int", 16, np.int16, "i16")
int8 = _int("int8", "int", 8, np.int8, "i8")
int4 = _int("int4", "int", 4, ml_dtypes.int4, "i4")
uint64 = _int("uint64", "uint", 64, np.uint64, "u64")
uint32 = _int("uint32", "uint", 32, np.uint32, "u32")
uint16 = _int("uint16", "uint", 16, np.uint16, "u16")
uint8 = _int("uint8", "uint", 8, np.uint8, "u8")
bool_ = _int("bool_", "bool", 8, np.bool_, "bool")

fp64 = float64 = f64
fp32 = float32 = f32
fp16 = float16 = f16
bfloat16 = bf16
fp8, fp6, fp4 = fp8_e4m3, fp6_e3m2, fp4_e2m1
i64, i32, i16, i8, i4 = int64, int32, int16, int8, int4
u64, u32, u16, u8 = uint64, uint32, uint16, uint8


def all_dtypes() -> tuple[DType, ...]:
    """All formats in the order of declaration."""
    return tuple(_REGISTRY.values())


def dtype_names() -> tuple[str, ...]:
    """All spellings: names first, then aliases."""
    return (*_REGISTRY, *_ALIASES)


def named_dtype(name: str) -> DType | None:
    """The format that `ts.<name>` is: by its name or an alias, but `bool`, which is Python's."""
    return _REGISTRY.get(_ALIASES.get(name, name)) if name != "bool" else None


def find_dtype(name: str) -> DType:
    """The format called `name` or aliased so; DTypeError otherwise."""
    found = _REGISTRY.get(_ALIASES.get(name, name))
    if found is None:
        raise DTypeError(f"unknown dtype {name!r}", hint=did_you_mean(name, dtype_names()))
    return found


def dtype_of_numpy(numpy: Any) -> DType:
    """The format whose unpacked elements are of that NumPy type; DTypeError when there is none."""
    native = np.dtype(numpy).newbyteorder("=")
    found = _BY_NUMPY.get(native)
    if found is None:
        known = "accepted: " + ", ".join(str(t) for t in _BY_NUMPY)
        pair = "complex numbers are a pair of tensors: ts.Complex(x)"
        raise DTypeError(f"NumPy type {native} has no Tessera dtype",
                         hint=pair if native.kind == "c" else known)
    return found
