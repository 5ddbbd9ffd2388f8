"""The instructions generated loops are written in: memory access, bits, selects, accumulators.

Imports numba: only the compiler imports this module. Each instruction is a Numba intrinsic that
emits one or a few LLVM instructions, so that a loop body stays straight-line and vectorises.

Three facts decide the form (Numba 0.68, LLVM 22):
- Addresses are int64. LLVM would guard a loop over many arrays with pairwise overlap checks and
  give up vectorising beyond a few; each access instead carries alias scopes ("in", "out0",
  "keep0", ...) that say which accesses never overlap. Scopes survive inlining, argument
  attributes do not.
- Sums must be reassociated to vectorise; only the accumulating addition carries the flag, so all
  other arithmetic keeps its IEEE meaning, element for element that of NumPy.
- `llvm.maximum`/`llvm.minimum` propagate NaN and vectorise as reductions.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...numerics import dtype_names, find_dtype
from ..schedule.loop_dtypes import is_narrow, register_of
from .storage import decode, encode, memory_bits

BOOL, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32, F64 = ir.FloatType(), ir.DoubleType()
NUMBA = {
    "f64": types.float64, "f32": types.float32, "i64": types.int64, "i32": types.int32,
    "u32": types.uint32, "bool_": types.boolean,
}
LLVM = {"f64": F64, "f32": F32, "i64": I64, "i32": I32, "u32": I32, "bool_": BOOL}
SCOPES = ("in", *(f"out{i}" for i in range(16)), *(f"keep{i}" for i in range(16)), "partial")

POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD  # Numba reads the signature of an intrinsic
INSTRUCTIONS: dict[str, object] = {}


def instruction(
    name: str, result: types.Type, *params: types.Type
) -> Callable[[Callable], object]:
    """Declare `build(builder, *llvm_values) -> llvm_value` as an intrinsic of a fixed signature."""

    def declare(build: Callable) -> object:
        signature = result(*params)

        def typing(typing_context: Any, *args: types.Type) -> tuple:
            def emit(context: Any, builder: ir.IRBuilder, sig: Any, values: list) -> ir.Value:
                out = build(builder, *values)
                return context.get_dummy_value() if result is types.void else out

            return signature, emit

        typing.__name__ = name
        names = ("typing_context", *(f"a{i}" for i in range(len(params))))
        typing.__dict__["__signature__"] = Signature([Parameter(n, POSITIONAL) for n in names])
        INSTRUCTIONS[name] = intrinsic(typing)
        return INSTRUCTIONS[name]

    return declare


# ---- memory -----------------------------------------------------------------------------------


def _tag(builder: ir.IRBuilder, access: ir.Instruction, scope: str) -> None:
    """Say that `access` touches `scope` and none of the other scopes."""
    module = builder.module
    domain = module.add_metadata(["tessera loops"])
    own = [module.add_metadata([scope, domain])]
    rest = [module.add_metadata([s, domain]) for s in SCOPES if s != scope]
    access.set_metadata("alias.scope", module.add_metadata(own))
    access.set_metadata("noalias", module.add_metadata(rest))


def _element(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, bits: int) -> ir.Value:
    return builder.gep(builder.inttoptr(base, ir.IntType(bits).as_pointer()), [index])


def _make_load(name: str, memory: str, scope: str) -> object:
    register = register_of(memory)

    @instruction(name, NUMBA[register], types.int64, types.int64)
    def load(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
        bits = memory_bits(memory)
        raw = builder.load(_element(builder, base, index, bits))
        raw.align = bits // 8
        _tag(builder, raw, scope)
        return decode(builder, raw, memory)

    return load


def _make_store(name: str, memory: str, scope: str) -> object:
    register = register_of(memory)

    @instruction(name, types.void, types.int64, types.int64, NUMBA[register])
    def store(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
        bits = memory_bits(memory)
        raw = encode(builder, value, memory)
        access = builder.store(raw, _element(builder, base, index, bits))
        access.align = bits // 8
        _tag(builder, access, scope)

    return store


@cache
def memory_access(name: str) -> object | None:
    """The load or store of a name like `load_bf16`, `store_f32_out0`, `load_f32_keep1`."""
    match = re.fullmatch(r"(load|store)_(.+?)(?:_(out\d+|keep\d+|partial))?", name)
    if match is None or match[2] not in dtype_names() or not register_of(match[2]):
        return None
    scope = match[3] or "in"
    if scope not in SCOPES:  # beyond 16 outputs the rest share one scope: slower, still right
        scope = scope.rstrip("0123456789") + "15"
    return (_make_load if match[1] == "load" else _make_store)(name, match[2], scope)


@instruction("word", types.int64, types.int64, types.int64)
def word(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Word `index` of a table of int64."""
    return builder.load(_element(builder, base, index, 64))


@instruction("claim", types.int64, types.int64, types.int64)
def claim(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Add one to a shared word; its former value."""
    return builder.atomic_rmw("add", _element(builder, base, index, 64), I64(1), "seq_cst")


@instruction("claim_unit", types.int64, types.int64, types.int64, types.int64)
def claim_unit(builder: ir.IRBuilder, base: ir.Value, units: ir.Value, side: ir.Value) -> ir.Value:
    """A unit that no other thread has: the first of those left, on side 1 the last; -1 if none is.

    The first shared word counts those taken from the front, and above its 32 bits from the back.
    """
    back = builder.icmp_signed("!=", side, I64(0))
    step = builder.select(back, I64(1 << 32), I64(1))
    before = builder.atomic_rmw("add", _element(builder, base, I64(0), 64), step, "seq_cst")
    front, behind = builder.and_(before, I64((1 << 32) - 1)), builder.lshr(before, I64(32))
    unit = builder.select(back, builder.sub(builder.sub(units, I64(1)), behind), front)
    left = builder.icmp_signed("<", builder.add(front, behind), units)
    return builder.select(left, unit, I64(-1))


@instruction("deposit", types.void, types.int64, types.int64)
def deposit(builder: ir.IRBuilder, base: ir.Value, count: ir.Value) -> None:
    """Add to a shared word."""
    builder.atomic_rmw("add", _element(builder, base, I64(0), 64), count, "seq_cst")


# ---- words that threads hand to each other ----------------------------------------------------


LOOKS = 4096  # at a word that another thread will change, before this one sleeps
DOZE_US = 20
HINTS = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", 1)}


def shared(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    return builder.load_atomic(_element(builder, base, index, 64), "acquire", 8)


def hold(builder: ir.IRBuilder) -> None:
    """A few dozen cycles in which a core that waits leaves its neighbour alone."""
    machine, module = platform.machine(), builder.module
    if machine in HINTS:
        name, *args = HINTS[machine]
        kind = ir.FunctionType(ir.VoidType(), [I32] * len(args))
        builder.call(module.globals.get(name) or ir.Function(module, kind, name),
                     [I32(a) for a in args])


@instruction("look_again", types.int64, types.int64, types.int64)
def look_again(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """A shared word, a little later."""
    hold(builder)
    return shared(builder, base, index)


@instruction("clock_ns", types.int64)
def clock_ns(builder: ir.IRBuilder) -> ir.Value:
    """The time of CLOCK_MONOTONIC."""
    module, name = builder.module, "clock_gettime"
    read = module.globals.get(name) or ir.Function(
        module, ir.FunctionType(I32, [I32, I64.as_pointer()]), name)
    time = cgutils.alloca_once(builder, I64, I64(2))
    builder.call(read, [I32(1), time])
    seconds, rest = builder.load(time), builder.load(builder.gep(time, [I64(1)]))
    return builder.add(builder.mul(seconds, I64(10**9)), rest)


@instruction("await_word", types.void, types.int64, types.int64, types.int64)
def await_word(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Until another thread has set a shared word to this. (A thread that gives its core away at
    each look, by sched_yield, has its next slices taken from it: EEVDF of Linux.)"""
    module = builder.module
    usleep = module.globals.get("usleep") or ir.Function(
        module, ir.FunctionType(I32, [I32]), "usleep")
    look, wait, doze, done = (
        builder.append_basic_block(name) for name in ("look", "wait", "doze", "done"))
    begin = builder.block
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(I64)
    looks.add_incoming(I64(0), begin)
    builder.cbranch(builder.icmp_signed("==", shared(builder, base, index), value), done, wait)
    builder.position_at_end(wait)
    hold(builder)
    more = builder.add(looks, I64(1))
    looks.add_incoming(more, wait)
    builder.cbranch(builder.icmp_signed("<", more, I64(LOOKS)), look, doze)
    builder.position_at_end(doze)
    builder.call(usleep, [I32(DOZE_US)])
    looks.add_incoming(more, doze)
    builder.branch(look)
    builder.position_at_end(done)


@instruction("set_word", types.void, types.int64, types.int64, types.int64)
def set_word(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    builder.store(value, _element(builder, base, index, 64))


@instruction("publish", types.void, types.int64, types.int64, types.int64)
def publish(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Set a shared word behind everything that this thread has written."""
    builder.store_atomic(value, _element(builder, base, index, 64), "release", 8)


@instruction("exchanged", types.boolean, types.int64, types.int64, types.int64, types.int64)
def exchanged(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, old: ir.Value, new: ir.Value
              ) -> ir.Value:
    """Whether a shared word was `old`, and is `new` now."""
    place = _element(builder, base, index, 64)
    return builder.extract_value(builder.cmpxchg(place, old, new, "seq_cst", "seq_cst"), 1)


@instruction("invoke", types.void, types.int64, types.int64, types.int64, types.int64)
def invoke(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
    """Run a loop at this address: layout, call, scratch. Its result and exception slots stay."""
    slot = cgutils.alloca_once(builder, I64)
    slots = [builder.bitcast(slot, I8.as_pointer())] * 2
    kind = ir.FunctionType(I32, [I8.as_pointer()] * 2 + [I64] * 3)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [*slots, *args])


# ---- arithmetic of single instructions --------------------------------------------------------


def _intrinsic(builder: ir.IRBuilder, name: str, *args: ir.Value, **flags: tuple) -> ir.Value:
    kind = args[0].type
    signature = ir.FunctionType(kind, [kind] * len(args))
    declared = builder.module.declare_intrinsic(name, [kind], signature)
    return builder.call(declared, args, **flags)


def _declare_float(suffix: str, kind: types.Type, bits: ir.IntType, whole: types.Type) -> None:
    for name in ("sqrt", "floor", "ceil", "trunc", "rint", "fabs"):
        instruction(f"{name.replace('fabs', 'abs')}_{suffix}", kind, kind)(
            lambda b, x, name=name: _intrinsic(b, f"llvm.{name}", x)
        )
    instruction(f"copysign_{suffix}", kind, kind, kind)(
        lambda b, x, y: _intrinsic(b, "llvm.copysign", x, y)
    )
    instruction(f"remainder_{suffix}", kind, kind, kind)(lambda b, x, y: b.frem(x, y))
    instruction(f"fma_{suffix}", kind, kind, kind, kind)(lambda b, x, y, z: b.fma(x, y, z))
    for name in ("maximum", "minimum"):
        # nsz: which zero of max(-0, +0) is returned is left open, as in NumPy.
        instruction(f"{name}_{suffix}", kind, kind, kind)(
            lambda b, x, y, name=name: _intrinsic(b, f"llvm.{name}", x, y, fastmath=("nsz",))
        )
    instruction(f"accumulate_{suffix}", kind, kind, kind)(
        lambda b, total, x: b.fadd(total, x, flags=("reassoc",))
    )
    instruction(f"bits_{suffix}", whole, kind)(lambda b, x: b.bitcast(x, bits))
    instruction(f"from_bits_{suffix}", kind, whole)(
        lambda b, x: b.bitcast(x, F32 if suffix == "f32" else F64)
    )
    instruction(f"isnan_{suffix}", types.boolean, kind)(lambda b, x: b.fcmp_unordered("uno", x, x))


_declare_float("f32", types.float32, I32, types.int32)
_declare_float("f64", types.float64, I64, types.int64)


def _declare_integer(suffix: str, kind: types.Type, signed: bool) -> None:
    less = "icmp_signed" if signed else "icmp_unsigned"

    def pick(order: str) -> Callable:
        return lambda b, x, y: b.select(getattr(b, less)(order, x, y), x, y)

    instruction(f"maximum_{suffix}", kind, kind, kind)(pick(">"))
    instruction(f"minimum_{suffix}", kind, kind, kind)(pick("<"))
    instruction(f"accumulate_{suffix}", kind, kind, kind)(lambda b, x, y: b.add(x, y))
    for name, op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("and", "and_"),
                     ("or", "or_"), ("xor", "xor")):
        instruction(f"{name}_{suffix}", kind, kind, kind)(
            lambda b, x, y, op=op: getattr(b, op)(x, y)
        )
    bits = LLVM[suffix].width

    def shift(op: str) -> Callable:
        def build(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
            # A shift by the width or more is undefined in LLVM; NumPy gives 0, or the sign.
            inside = b.icmp_unsigned("<", y, y.type(bits))
            out = getattr(b, op)(x, b.select(inside, y, y.type(bits - 1 if op == "ashr" else 0)))
            return out if op == "ashr" else b.select(inside, out, y.type(0))

        return build

    instruction(f"shl_{suffix}", kind, kind, kind)(shift("shl"))
    instruction(f"shr_{suffix}", kind, kind, kind)(shift("ashr" if signed else "lshr"))


_declare_integer("i64", types.int64, True)
_declare_integer("i32", types.int32, True)
_declare_integer("u32", types.uint32, False)

for _name, _op in (("or_bool_", "or_"), ("and_bool_", "and_"), ("xor_bool_", "xor"),
                   ("maximum_bool_", "or_"), ("minimum_bool_", "and_"),
                   ("accumulate_bool_", "or_")):
    instruction(_name, types.boolean, types.boolean, types.boolean)(
        lambda b, x, y, op=_op: getattr(b, op)(x, y)
    )
instruction("not_bool_", types.boolean, types.boolean)(lambda b, x: b.not_(x))
for _suffix, _kind in NUMBA.items():
    instruction(f"where_{_suffix}", _kind, types.boolean, _kind, _kind)(
        lambda b, c, x, y: b.select(c, x, y)
    )


# ---- casts ------------------------------------------------------------------------------------


def _cast(builder: ir.IRBuilder, x: ir.Value, source: str, target: str) -> ir.Value:
    """Register cast; float to integer truncates, saturates, and NaN becomes 0."""
    to = LLVM[target]
    if source == target or {source, target} == {"i32", "u32"}:
        return x
    if target == "bool_":
        if source in ("f32", "f64"):
            return builder.fcmp_unordered("une", x, x.type(0.0))
        return builder.icmp_signed("!=", x, x.type(0))
    if source in ("f32", "f64") and target in ("f32", "f64"):
        return builder.fpext(x, to) if target == "f64" else builder.fptrunc(x, to)
    if source in ("f32", "f64"):
        name = f"llvm.fpto{'ui' if target == 'u32' else 'si'}.sat.i{to.width}.{source}"
        module = builder.module
        call = module.globals.get(name) or ir.Function(module, ir.FunctionType(to, [x.type]), name)
        return builder.call(call, [x])
    unsigned = source in ("u32", "bool_")
    if target in ("f32", "f64"):
        return builder.uitofp(x, to) if unsigned else builder.sitofp(x, to)
    if x.type.width > to.width:
        return builder.trunc(x, to)
    return builder.zext(x, to) if unsigned else builder.sext(x, to)


for _source in NUMBA:
    for _target in NUMBA:
        instruction(f"{_target}_from_{_source}", NUMBA[_target], NUMBA[_source])(
            lambda b, x, s=_source, t=_target: _cast(b, x, s, t)
        )


@instruction("u64_high", types.uint32, types.uint32, types.uint32)
def u64_high(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The upper 32 bits of a 32 x 32 bit product."""
    product = builder.mul(builder.zext(x, I64), builder.zext(y, I64))
    return builder.trunc(builder.lshr(product, I64(32)), I32)


@cache
def rounding(name: str) -> object | None:
    """The rounding of an f32 to the numbers of a narrow float, by a name like `round_bf16`."""
    grid = name.removeprefix("round_")
    if grid == name or grid not in dtype_names() or not is_narrow(find_dtype(grid)):
        return None
    return instruction(name, types.float32, types.float32)(
        lambda b, x: decode(b, encode(b, x, grid), grid))


OBJECT_HEADER = object.__basicsize__


@instruction("data", types.int64, types.int64, types.int64)
def data(builder: ir.IRBuilder, call: ir.Value, index: ir.Value) -> ir.Value:
    """The data address of the ndarray whose object address is word `index` of `call`.

    `data` is the first field after the object header in NumPy's ABI (PyArrayObject_fields); reading
    it here costs nothing, asking Python for it costs half a microsecond an array.
    """
    thing = builder.load(_element(builder, call, index, 64))
    return builder.load(_element(builder, builder.add(thing, I64(OBJECT_HEADER)), I64(0), 64))
