"""Bodies of elementwise ops for each kind of register, as Operations for `use`.

What a body computes is what the op's record says on NumPy arrays. Functions of the C library come
from libdevice, NVIDIA's, which is part of NVVM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.numerics import find_dtype
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import fragments
from tessera.tile.ir.register_layout import RegisterLayout

Body = Callable[..., Any]
LOG2E = 1.4426950408889634
BODIES: dict[tuple[str, str], tuple[int, Body, str | None]] = {}
FLOATS, INTS = ("f32", "f64"), ("i32", "i64", "ui32", "ui64")


def body_of(name: str, arity: int, *kinds: str, result: str | None = None) -> Callable:
    """Registers the body of an op for register kinds. result: the kind when it is another."""
    def register(f: Body) -> Body:
        for kind in kinds:
            if (name, kind) in BODIES:
                raise ValueError(f"{name} for {kind} is declared twice")
            BODIES[name, kind] = (arity, f, result)
        return f

    return register


@functools.cache
def operation(name: str, kind: str) -> Operation:
    """The intrinsic of an op on registers of a kind, 'u' in front for unsigned."""
    arity, body, result = BODIES[name, kind]
    return fragments.elementwise(name, arity, body, result)  # type: ignore[arg-type]


def library(name: str) -> Body:
    """A function of libdevice of the given name, for f32 and f64."""
    return lambda b, *x: b.library(f"__nv_{name}" + ("f" if b.bits(x[0]) == 32 else ""), *x)


for _name, _symbol in (("expm1", "expm1"), ("log", "log"), ("log2", "log2"), ("log1p", "log1p"),
                       ("sin", "sin"), ("cos", "cos"), ("tan", "tan"), ("atan", "atan"),
                       ("tanh", "tanh"), ("erf", "erf"), ("erfc", "erfc"), ("floor", "floor"),
                       ("ceil", "ceil"), ("round", "rint"), ("trunc", "trunc"), ("exp", "exp"),
                       ("sqrt", "sqrt")):
    body_of(_name, 1, *FLOATS)(library(_symbol))
body_of("exp2", 1, "f64")(library("exp2"))
body_of("rsqrt", 1, "f64")(lambda b, x: b.fdiv(b.const("f64", 1), b.library("__nv_sqrt", x)))
body_of("pow", 2, *FLOATS)(library("pow"))
body_of("atan2", 2, *FLOATS)(library("atan2"))
body_of("abs", 1, *FLOATS)(library("fabs"))
body_of("div", 2, *FLOATS)(lambda b, x, y: b.fdiv(x, y))
body_of("exp2", 1, "f32")(lambda b, x: b.call(find_instruction("ex2_approx"), x))
body_of("rsqrt", 1, "f32")(lambda b, x: b.call(find_instruction("rsqrt_approx_full"), x))


@body_of("fma", 3, "f32")
def _fma(b: Builder, x: Any, y: Any, z: Any) -> Any:
    return b.call(find_instruction("fma_rn"), x, y, z)


body_of("fma", 3, "f64")(library("fma"))


def _extreme(name: str, sign: str, instruction: str) -> None:
    @body_of(name, 2, "f32")
    def single(b: Builder, x: Any, y: Any) -> Any:
        return b.call(find_instruction(f"{instruction}_nan"), x, y)

    @body_of(name, 2, "f64")
    def double(b: Builder, x: Any, y: Any) -> Any:
        better = b.select(b.compare(sign, x, y), x, y)
        return b.select(b.compare("!=", x, x), x, b.select(b.compare("!=", y, y), y, better))

    for kind in INTS:
        body_of(name, 2, kind)(functools.partial(_pick, sign, kind[0] == "u"))


def _pick(sign: str, signless: bool, b: Builder, x: Any, y: Any) -> Any:
    return b.select(b.compare(sign, x, y, unsigned=signless), x, y)


_extreme("maximum", ">", "f32_max")
_extreme("minimum", "<", "f32_min")


# --- integers ---------------------------------------------------------------------------------
def _nonzero(b: Builder, y: Any) -> tuple[Any, Any]:
    """(y or 1, whether y is 0): division by zero gives 0, as NumPy's."""
    zero = b.compare("==", y, b.zero(y))
    return b.select(zero, b.like(y, 1), y), zero


@body_of("floordiv", 2, "i32", "i64")
def _floordiv(b: Builder, x: Any, y: Any) -> Any:
    safe, zero = _nonzero(b, y)
    quotient = b.sdiv(x, safe)
    rest = b.sub(x, b.mul(quotient, safe))
    # one less where the division left something and the signs differ
    down = b.and_(b.compare("!=", rest, b.zero(x)), b.compare("<", b.xor(rest, safe), b.zero(x)))
    return b.select(zero, b.zero(x), b.select(down, b.sub(quotient, b.like(x, 1)), quotient))


@body_of("mod", 2, "i32", "i64")
def _mod(b: Builder, x: Any, y: Any) -> Any:
    safe, zero = _nonzero(b, y)
    rest = b.sub(x, b.mul(b.sdiv(x, safe), safe))
    up = b.and_(b.compare("!=", rest, b.zero(x)), b.compare("<", b.xor(rest, safe), b.zero(x)))
    return b.select(zero, b.zero(x), b.select(up, b.add(rest, safe), rest))


@body_of("floordiv", 2, "ui32", "ui64")
def _udiv(b: Builder, x: Any, y: Any) -> Any:
    safe, zero = _nonzero(b, y)
    return b.select(zero, b.zero(x), b.udiv(x, safe))


@body_of("mod", 2, "ui32", "ui64")
def _umod(b: Builder, x: Any, y: Any) -> Any:
    safe, zero = _nonzero(b, y)
    return b.select(zero, b.zero(x), b.urem(x, safe))


@body_of("floordiv", 2, *FLOATS)
def _float_floordiv(b: Builder, x: Any, y: Any) -> Any:
    """Of the exact quotient, step by step as NumPy's: 1.0 // 0.1 is 9.0."""
    rest = library("fmod")(b, x, y)
    exact = b.fdiv(b.fadd(x, b.fneg(rest)), y)
    quotient = b.select(_crosses(b, rest, x, y), b.fadd(exact, b.like(x, -1.0)), exact)
    below = library("floor")(b, quotient)
    far = b.compare(">", b.fadd(quotient, b.fneg(below)), b.like(x, 0.5))
    nearest = b.select(far, b.fadd(below, b.like(x, 1.0)), below)
    plain = b.fdiv(x, y)
    signed = library("copysign")(b, b.zero(x), plain)
    nearest = b.select(b.compare("==", quotient, b.zero(x)), signed, nearest)
    return b.select(b.compare("==", y, b.zero(y)), plain, nearest)


def _crosses(b: Builder, rest: Any, x: Any, y: Any) -> Any:
    """Whether the quotient of a division that leaves `rest` is below 0 and not whole."""
    differ = b.xor(b.compare("<", rest, b.zero(x)), b.compare("<", y, b.zero(y)))
    return b.and_(b.compare("!=", rest, b.zero(rest)), differ)


@body_of("mod", 2, *FLOATS)
def _float_mod(b: Builder, x: Any, y: Any) -> Any:
    """Of the sign of y, as Python's."""
    rest = library("fmod")(b, x, y)
    moved = b.select(_crosses(b, rest, x, y), b.fadd(rest, y), rest)
    return b.select(b.compare("==", rest, b.zero(rest)), library("copysign")(b, rest, y), moved)


@body_of("pow", 2, "ui32", "ui64")
def _unsigned_power(b: Builder, x: Any, n: Any) -> Any:
    """Squares, bit by bit of the exponent; of one that is known the compiler leaves its own."""
    power, square = b.like(x, 1), x
    for i in range(b.bits(x)):
        mask = b.like(n, 1 << i if i < b.bits(x) - 1 else -(1 << i))
        bit = b.compare("!=", b.and_(n, mask), b.zero(n))
        power = b.select(bit, b.mul(power, square), power)
        square = b.mul(square, square)
    return power


@body_of("pow", 2, "i32", "i64")
def _signed_power(b: Builder, x: Any, n: Any) -> Any:
    """A power below 0 is cut off to a whole number."""
    one, zero = b.like(x, 1), b.zero(x)
    odd = b.compare("!=", b.and_(n, one), zero)
    unit = b.or_(b.compare("==", x, one), b.compare("==", x, b.like(x, -1)))
    below = b.select(unit, b.select(odd, x, one), zero)
    return b.select(b.compare("<", n, zero), below, _unsigned_power(b, x, n))


@body_of("shl", 2, *INTS)
def _shl(b: Builder, x: Any, y: Any) -> Any:
    """A shift by the width or more is undefined in LLVM; NumPy gives 0, or the sign. Of a shift
    that is known the compiler leaves one instruction."""
    inside = b.compare("<", y, b.like(y, b.bits(x)), unsigned=True)
    return b.select(inside, b.shl(x, b.select(inside, y, b.zero(y))), b.zero(x))


@body_of("shr", 2, "ui32", "ui64")
def _shr_unsigned(b: Builder, x: Any, y: Any) -> Any:
    inside = b.compare("<", y, b.like(y, b.bits(x)), unsigned=True)
    return b.select(inside, b.lshr(x, b.select(inside, y, b.zero(y))), b.zero(x))


@body_of("shr", 2, "i32", "i64")
def _shr(b: Builder, x: Any, y: Any) -> Any:
    most = b.like(y, b.bits(x) - 1)
    return b.ashr(x, b.select(b.compare("<", y, most, unsigned=True), y, most))


body_of("bitnot", 1, *INTS)(lambda b, x: b.xor(x, b.like(x, -1)))
body_of("not", 1, "i32")(lambda b, x: b.xor(x, b.i32(1)))
body_of("abs", 1, "ui32", "ui64")(lambda b, x: x)


@body_of("abs", 1, "i32", "i64")
def _abs(b: Builder, x: Any) -> Any:
    return b.select(b.compare("<", x, b.zero(x)), b.sub(b.zero(x), x), x)


# --- predicates and composites ------------------------------------------------------------------
@body_of("isnan", 1, *FLOATS, result="i32")
def _isnan(b: Builder, x: Any) -> Any:
    return b.to_int(b.compare("!=", x, x))


@body_of("isinf", 1, *FLOATS, result="i32")
def _isinf(b: Builder, x: Any) -> Any:
    return b.to_int(b.compare("==", library("fabs")(b, x), b.like(x, float("inf"))))


@body_of("sigmoid", 1, "f32")
def _sigmoid(b: Builder, x: Any) -> Any:
    """Within 3 ulp: 1 of exp, 1/2 of the sum, 1 of the reciprocal. It has no branches, which a
    division has and at which the loads of other elements wait; below 2^-126 it is 0, where 1 + e^-x
    is infinite soon after."""
    whole = b.fadd(b.like(x, 1.0), library("exp")(b, b.fneg(x)))
    return b.call(find_instruction("rcp_approx"), whole)


@body_of("sigmoid", 1, "f64")
def _sigmoid_f64(b: Builder, x: Any) -> Any:
    one = b.like(x, 1.0)
    return b.fdiv(one, b.fadd(one, library("exp")(b, b.fneg(x))))


@body_of("exp_approx", 1, "f32")
def _exp_approx(b: Builder, x: Any) -> Any:
    """2^t with t = x log2(e), two roundings: 1.4 |x| 2^-24; ex2 itself: 2^-22."""
    return b.call(find_instruction("ex2_approx"), b.fmul(x, b.like(x, LOG2E)))


@body_of("sigmoid_approx", 1, "f32")
def _sigmoid_approx(b: Builder, x: Any) -> Any:
    """What exp_approx has, 1/2 ulp of the sum, 1 of the reciprocal."""
    return b.call(find_instruction("rcp_approx"),
                  b.fadd(b.like(x, 1.0), _exp_approx(b, b.fneg(x))))


body_of("exp_approx", 1, "f64")(library("exp"))
body_of("sigmoid_approx", 1, "f64")(_sigmoid_f64)


@body_of("exp_sub", 2, *FLOATS)
def _exp_sub(b: Builder, x: Any, y: Any) -> Any:
    """e^(x - y), 0 where x is -inf."""
    value = library("exp")(b, b.fsub(x, y))
    return b.select(b.compare("==", x, b.like(x, -float("inf"))), b.zero(x), value)


@body_of("div_or_zero", 2, *FLOATS)
def _div_or_zero(b: Builder, x: Any, y: Any) -> Any:
    """x / y, 0 for 0 / 0."""
    both = b.and_(b.compare("==", x, b.zero(x)), b.compare("==", y, b.zero(y)))
    return b.select(both, b.zero(x), b.fdiv(x, y))


@functools.cache
def with_bits(kind: str, to: str) -> Operation:
    """The bits of a number as one of another kind of the same width."""
    def body(b: Builder, x: Any) -> Any:
        return x if kind == to else b.bitcast(x, to)

    return fragments.elementwise("with_bits", 1, body, to)  # type: ignore[arg-type]


@functools.cache
def popcount(dtype: str) -> Operation:
    """(x) -> bits that are set, of the bits that the type has."""
    d, popc = find_dtype(dtype), find_instruction("popc")

    def body(b: Builder, x: Any) -> Any:
        if d.bits == 64:
            high = b.trunc(b.lshr(x, b.const("i64", 32)), "i32")
            return b.add(b.call(popc, b.trunc(x, "i32")), b.call(popc, high))
        mask = (1 << max(8, d.bits)) - 1
        return b.call(popc, b.and_(x, b.i32(mask)) if d.bits < 32 else x)

    return fragments.elementwise("popcount", 1, body, "i32")


@functools.cache
def running_max(slack: float, kind: str) -> Operation:
    """(m, x) -> x where x > m + slack, else m"""
    def body(b: Builder, m: Any, x: Any) -> Any:
        return b.select(b.compare(">", x, b.fadd(m, b.like(m, slack))), x, m)

    return fragments.elementwise("running_max", 2, body)


@functools.cache
def causal_mask(layout: str, shape: tuple[int, ...], kind: str, keys: int = 1) -> Operation:
    """(scores, query - key of the thread) -> -inf where key > query. keys: their axis"""
    bases = RegisterLayout.parse(layout, shape).bases
    x = Operand("x", kind, len(bases))  # type: ignore[arg-type]

    def body(b: Builder, values: list[Any], room: Any) -> list[Any]:
        low = b.const(kind, -float("inf"))
        test = functools.cache(lambda d: b.compare("<", room, b.i32(d)))
        return [b.select(test(base[keys] - base[1 - keys]), low, v)
                for base, v in zip(bases, values, strict=True)]

    form = InstructionForm((x, Operand("room", "i32")), (x,), body)
    return Operation("causal_mask", 2, lambda *_: form)


@functools.cache
def span_mask(layout: str, shape: tuple[int, ...], kind: str, behind: bool) -> Operation:
    """(scores, bounds of their rows, first column of the thread) -> -inf in columns that are a
    bound or more; behind=False: that are less. Constants are compared with a number of each row."""
    bases = RegisterLayout.parse(layout, shape).bases
    x = Operand("x", kind, len(bases))  # type: ignore[arg-type]

    def body(b: Builder, values: list[Any], bounds: list[Any], start: Any) -> list[Any]:
        low = b.const(kind, -float("inf"))
        sign = "<=" if behind else ">"
        rooms = [b.sub(bound, start) for bound in bounds]
        return [b.select(b.compare(sign, room, b.i32(base[1])), low, v)
                for base, room, v in zip(bases, rooms, values, strict=True)]

    form = InstructionForm((x, Operand("bounds", "i32", len(bases)), Operand("start", "i32")),
                           (x,), body)
    return Operation("span_mask", 3, lambda *_: form)
