"""Runs emitted kernels on NumPy, all threads of a block at once: their meaning, without a GPU.

A register is an array [threads]. Intrinsics run their own bodies on a builder of NumPy functions;
only PTX instructions are written again here, with the hardware's treatment of NaN. Reads and
writes of shared memory by different threads without a barrier between them are errors.

For what tiles do in registers: maths, conversions bit by bit, reductions, scans, sorts, exchanges.
A shuffle that asks a thread which does not exist is an error, and so is control flow that threads
do not share. Products and copies of a pipeline are for emulate_ptx, lanes apart for emulate_lanes.
"""

from __future__ import annotations

import copy
import re
from math import prod

import ml_dtypes
import numpy as np

from tessera.numerics import decode, encode, find_dtype
from tessera.tile.cuda.instruction import Instruction, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.types import GlobalTensor

TYPES = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64, "pred": np.int32,
         "i16": np.int32}
SHARED_BYTES = 232448
BASE = 4096  # address of the first tensor: 0 is none


class Lanes(np.ndarray):
    """One number for each thread; true or false only where all agree."""

    def __bool__(self):
        flat = np.asarray(self).reshape(-1)
        assert (flat == flat[0]).all(), "control flow differs between threads"
        return bool(flat[0])


def lanes(x, kind=None):
    a = np.asarray(x)
    if kind is not None:
        with np.errstate(all="ignore"):
            a = a.astype(TYPES[kind])
    return a.view(Lanes)


class Builder:
    """The Builder of numba_gate on arrays. Conditions are bools."""

    def __init__(self, block):
        self.block = block

    def const(self, kind, value):
        if kind[0] == "i":
            bits = 64 if kind == "i64" else 32
            value = int(value) & ((1 << bits) - 1)
            value -= (value >> (bits - 1)) << bits
        return lanes(np.asarray(value, TYPES[kind]))

    def i32(self, value):
        assert -2**31 <= value < 2**32, value
        return self.const("i32", value)

    def like(self, x, value):
        return self.const(self.kind(x), value)

    def zero(self, x):
        return lanes(np.zeros((), x.dtype))

    def undefined(self, kind):
        return self.const(kind, 0x7EADBEEF)

    @staticmethod
    def kind(x):
        return {np.dtype(np.int32): "i32", np.dtype(np.int64): "i64", np.dtype(np.float32): "f32",
                np.dtype(np.float64): "f64"}[x.dtype]

    def bits(self, x):
        return 8 * x.dtype.itemsize

    def is_float(self, x):
        return x.dtype.kind == "f"

    # arithmetic
    def same(self, x, y):
        assert x.dtype == y.dtype, f"{x.dtype} meets {y.dtype}"

    def add(self, x, y):
        self.same(x, y)
        return lanes(x + y)

    def sub(self, x, y):
        self.same(x, y)
        return lanes(x - y)

    def mul(self, x, y):
        self.same(x, y)
        return lanes(x * y)

    def fadd(self, x, y):
        assert self.is_float(x)
        return self.add(x, y)

    def fsub(self, x, y):
        assert self.is_float(x)
        return self.sub(x, y)

    def fmul(self, x, y):
        assert self.is_float(x)
        return self.mul(x, y)

    def fdiv(self, x, y):
        self.same(x, y)
        return lanes(x / y)

    def fneg(self, x):
        return lanes(-x)

    def unsigned(self, x):
        return np.asarray(x).view(f"u{x.dtype.itemsize}")

    def back(self, x, like):
        return lanes(np.asarray(x).astype(f"u{like.dtype.itemsize}").view(like.dtype))

    def udiv(self, x, y):
        return self.back(self.unsigned(x) // self.unsigned(y), x)

    def urem(self, x, y):
        return self.back(self.unsigned(x) % self.unsigned(y), x)

    def sdiv(self, x, y):
        q = np.abs(x.astype(np.float64)) // np.abs(y.astype(np.float64)) if x.dtype == np.int32 \
            else np.abs(x) // np.abs(y)
        return lanes((q * np.sign(x) * np.sign(y)).astype(x.dtype))

    def and_(self, x, y):
        self.same(x, y)
        return lanes(x & y)

    def or_(self, x, y):
        self.same(x, y)
        return lanes(x | y)

    def xor(self, x, y):
        self.same(x, y)
        return lanes(x ^ y)

    def _amount(self, x, n):
        self.same(x, n)
        assert ((n >= 0) & (n < self.bits(x))).all(), "a shift by the width or more is undefined"
        return self.unsigned(n)

    def shl(self, x, n):
        return self.back(self.unsigned(x) << self._amount(x, n), x)

    def lshr(self, x, n):
        return self.back(self.unsigned(x) >> self._amount(x, n), x)

    def ashr(self, x, n):
        self._amount(x, n)
        return lanes(x >> n)

    def select(self, c, x, y):
        assert c.dtype == bool
        self.same(x, y)
        return lanes(np.where(c, x, y))

    def compare(self, op, x, y, *, unsigned=False):
        self.same(x, y)
        if unsigned:
            x, y = self.unsigned(x), self.unsigned(y)
        f = {"<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal,
             ">=": np.greater_equal, ">": np.greater}[op]
        return lanes(f(np.asarray(x), np.asarray(y)))

    def true(self, x):
        return lanes(np.asarray(x) != 0)

    def to_int(self, c):
        assert c.dtype == bool
        return lanes(c.astype(np.int32))

    def zext(self, x, kind):
        return lanes(self.unsigned(x).astype(TYPES[kind]))

    def sext(self, x, kind):
        return lanes(x.astype(TYPES[kind]))

    def trunc(self, x, kind):
        return lanes(self.unsigned(x).astype(np.uint32).view(np.int32))

    def bitcast(self, x, kind):
        return lanes(np.ascontiguousarray(x).view(TYPES[kind]).reshape(x.shape))

    def library(self, name, *args):
        word = name.removeprefix("__nv_")
        if args[0].dtype == np.float32 and word not in ("erf",):
            word = word.removesuffix("f")
        from math import erf

        special = {"fma": lambda x, y, z: x * y + z, "fabs": np.abs, "pow": np.power,
                   "erf": np.vectorize(erf, otypes=[np.float64]),
                   "atan": np.arctan, "atan2": np.arctan2}
        f = special.get(word) or getattr(np, word)
        wide = [np.asarray(a, np.float64) for a in args]
        return lanes(f(*wide).astype(args[0].dtype))

    def shared_base(self):
        return self.i32(0)

    def call(self, instruction, *args):
        given = []
        for o, a in zip(instruction.args, args, strict=True):
            parts = a if isinstance(a, list) else [a]
            for p in parts:
                assert p.dtype == TYPES[o.kind], f"{instruction.name}: {o} gets {p.dtype}"
            given.append(a)
        return execute(self.block, instruction, given)


# --- instructions -----------------------------------------------------------------------------
def canonical(x, nan):
    """Floats with the one NaN that the hardware makes."""
    out = np.array(x)
    word = out.view(f"u{out.dtype.itemsize}")
    word[np.isnan(out.astype(np.float32))] = nan
    return out


def to_code(x, name, rounding="nearest_even", saturate=False):
    d = find_dtype(name)
    nan = {"bf16": 0x7FFF, "f16": 0x7FFF, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F}[name]
    got = encode(np.asarray(x), d, rounding=rounding, saturate=saturate)
    return np.where(np.isnan(x), nan, got.view(d.code_type).astype(np.int64)).astype(np.int32)


def to_integer(x, bits, signed, nan):
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    out = [nan if v != v else min(max(int(v) if abs(v) != np.inf else
                                      (high if v > 0 else low), low), high)
           for v in np.asarray(x, np.float64).reshape(-1).tolist()]
    whole = np.array([v & ((1 << bits) - 1) for v in out], np.uint64).astype(f"u{bits // 8}")
    return lanes(whole.view(f"i{bits // 8}").reshape(np.shape(x)))


def from_integer(x, kind, signed, rounding):
    wide = x if signed else np.asarray(x).view(f"u{x.dtype.itemsize}")
    d = find_dtype(kind)
    if d.name == "f64" and x.dtype.itemsize == 4:
        return lanes(np.asarray(wide).astype(np.float64))
    return lanes(encode(np.asarray(wide), d, rounding=rounding))


ROUNDS = {"rn": "nearest_even", "rz": "toward_zero"}


def execute(block, i: Instruction, a):
    name = i.name
    if name in SIMPLE:
        return SIMPLE[name](block, *a)
    if name in ("red_bits_and", "red_bits_or"):
        return bits_in_memory(block, np.bitwise_and if name.endswith("and") else np.bitwise_or, *a)
    if name.startswith(("ld_", "st_")) and "hint" not in name:
        return access(block, i, a)
    if m := re.match(r"shfl_(\w+?)_(i32|f32)(?:_w(\d+))?$", name):
        return shuffle(block, m[1], a[0], a[1], int(m[3] or 32))
    if m := re.match(r"pack_(bf16|f16)_(r[nz])$", name):
        low, high = (to_code(x, m[1], ROUNDS[m[2]]) for x in a)
        return lanes((low | high << 16).astype(np.int32))
    if m := re.match(r"to_(bf16|f16)_(r[nz])$", name):
        return lanes(to_code(a[0], m[1], ROUNDS[m[2]]))
    if m := re.match(r"pack_(e4m3|e5m2)$", name):
        low, high = (to_code(x, "fp8_" + m[1], saturate=True) for x in a)
        return lanes(low | high << 8)
    if m := re.match(r"pack4_(e4m3|e5m2)$", name):
        codes = [to_code(x, "fp8_" + m[1], saturate=True) << 8 * n for n, x in enumerate(a[0])]
        return lanes(codes[0] | codes[1] | codes[2] | codes[3])
    if m := re.match(r"(e4m3|e5m2)_to_f16x2$", name):
        return fp8_to_halves(a[0], m[1])
    if m := re.match(r"(f32|f64)_to_([su])(32|64)_rzi$", name):
        bits = int(m[3])
        nan = 0 if m[1] == "f32" and bits == 32 else 1 << bits - 1
        return to_integer(a[0], bits, m[2] == "s", nan - (nan << 1 if m[2] == "s" else 0))
    if m := re.match(r"([su])(32|64)_to_(f32|f64)_(r[nz])$", name):
        return from_integer(a[0], m[3], m[1] == "s", ROUNDS[m[4]])
    if m := re.match(r"f64_to_f32_(r[nz])$", name):
        got = encode(np.asarray(a[0]), find_dtype("f32"), rounding=ROUNDS[m[1]])
        return lanes(canonical(got, 0x7FFFFFFF))
    raise NotImplementedError(f"the emulator has no {name}")


def bits_in_memory(block, f, at, x, on):
    on = spread(block, on) != 0
    at, x = spread(block, at)[on], spread(block, x)[on]
    assert (at % 4 == 0).all()
    f.at(block.memory.view(np.int32), at // 4, x)


def fp8_to_halves(x, name):
    d = find_dtype("fp8_" + name)
    def half(code):
        values = decode(code.astype(np.uint8).view(d.numpy), d).astype(np.float16)
        return np.asarray(canonical(values, 0x7FFF)).view(np.uint16).astype(np.int32)

    word = np.asarray(x)
    return lanes(half(word & 0xFF) | half(word >> 8 & 0xFF) << 16)


def half_to_f32(x, shift):
    h = (np.asarray(x).view(np.uint32) >> shift & 0xFFFF).astype(np.uint16).view(np.float16)
    return lanes(canonical(h.astype(np.float32), 0x7FFFFFFF))


def prmt(block, x, y, selector):
    x, y, s = (np.asarray(v).astype(np.uint32).astype(np.uint64) for v in (x, y, selector))
    both = y << np.uint64(32) | x
    out = np.zeros(np.broadcast_shapes(x.shape, y.shape, s.shape), np.uint64)
    for i in range(4):
        nibble = s >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        byte = np.where(nibble >= 8, np.where(byte >= 128, 0xFF, 0), byte).astype(np.uint64)
        out |= byte << np.uint64(8 * i)
    return lanes(out.astype(np.uint32).view(np.int32))


def mul_hi(block, x, y):
    x, y = (np.asarray(v).view(np.uint32).astype(np.uint64) for v in (x, y))
    return lanes((x * y >> np.uint64(32)).astype(np.uint32).view(np.int32))


def extreme(f, nan):
    def run(block, x, y):
        with np.errstate(all="ignore"):
            out = f(np.asarray(x), np.asarray(y))
        return lanes(np.asarray(canonical(out, 0x7FFFFFFF)) if nan else out)

    return run


def f32(f):
    return lambda block, *x: lanes(f(*(np.asarray(v, np.float64) for v in x)).astype(np.float32))


def min_of_halves(block, x, y):
    """Of signed numbers of 16 bits, two in a register."""
    x, y = (np.broadcast_to(np.asarray(v, np.int32)[..., None], (*np.shape(v), 1)) for v in (x, y))
    return lanes(np.minimum(np.ascontiguousarray(x).view(np.int16),
                            np.ascontiguousarray(y).view(np.int16)).view(np.int32)[..., 0])


def lop3(table):
    def run(block, x, y, z):
        out = np.zeros((), np.int32)
        for n in range(8):
            if table >> n & 1:
                out = out | ((x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z))
        return lanes(out)

    return run


def popcount(block, x):
    return lanes(np.bitwise_count(np.asarray(x).view(np.uint32)).astype(np.int32))


def synchronize(block):
    block.epoch += 1


def votes(f):
    def run(block, p):
        full = spread(block, p)
        pad = -len(full) % 32
        wide = np.concatenate([full, full[-1:].repeat(pad)]).reshape(-1, 32) != 0
        return lanes(f(wide).astype(np.int32).repeat(32)[:len(full)])

    return run


SIMPLE = {
    "tid_x": lambda block: lanes(np.arange(block.threads, dtype=np.int32)),
    "ctaid_x": lambda block: lanes(np.int32(block.number)),
    "sync_threads": synchronize,
    "bf16_low": lambda block, x: lanes((np.asarray(x) << 16).astype(np.int32).view(np.float32)),
    "bf16_high": lambda block, x: lanes((np.asarray(x) & np.int32(-65536)).view(np.float32)),
    "f16_low": lambda block, x: half_to_f32(x, 0),
    "f16_high": lambda block, x: half_to_f32(x, 16),
    "f32_to_f64": lambda block, x: lanes(canonical(x.astype(np.float64), 0x7FFFFFFF << 32)),
    "prmt": prmt, "mul_hi_u32": mul_hi, "popc": popcount,
    "f32_max_nan": extreme(np.maximum, True), "f32_min_nan": extreme(np.minimum, True),
    "f32_max": extreme(np.fmax, False), "f32_min": extreme(np.fmin, False),
    "min_s16x2": min_of_halves,
    "s32_max": extreme(np.maximum, False), "s32_min": extreme(np.minimum, False),
    "fma_rn": f32(lambda x, y, z: x * y + z), "rcp_approx_full": f32(lambda x: 1 / x),
    "rcp_approx": f32(lambda x: 1 / x), "rcp_rn": f32(lambda x: 1 / x),
    "div_rn": f32(lambda x, y: x / y),
    "ex2_approx": f32(np.exp2), "ex2_approx_full": f32(np.exp2),
    "lg2_approx": f32(np.log2), "lg2_approx_full": f32(np.log2),
    "rsqrt_approx_full": f32(lambda x: x ** -0.5), "sqrt_rn": f32(np.sqrt),
    "mul_rn": f32(lambda x, y: x * y), "add_rn": f32(lambda x, y: x + y),
    "sub_rn": f32(lambda x, y: x - y),
    "round_f32_rni": f32(np.rint), "round_f32_rzi": f32(np.trunc),
    "vote_any": votes(lambda w: w.any(1)), "vote_all": votes(lambda w: w.all(1)),
    **{f"lop3_{t:02X}": lop3(t) for t in range(256)},
    "to_tf32_rn": lambda block, x: lanes(np.asarray(canonical(
        encode(np.asarray(x), find_dtype("tf32")), 0x7FFFFFFF)).view(np.int32)),
}


def spread(block, x):
    return np.broadcast_to(np.asarray(x).reshape(-1) if np.size(x) == 1 else np.asarray(x),
                           (block.threads,))


def shuffle(block, mode, x, lane, width):
    x, lane = spread(block, x), spread(block, lane)
    at = np.arange(block.threads)
    inner, segment = at % width, at - at % width
    source = {"bfly": inner ^ lane, "idx": lane % width, "up": inner - lane,
              "down": inner + lane}[mode]
    source = np.where((source < 0) | (source >= width), inner, source) + segment
    assert (source < block.threads).all(), "a shuffle reads a thread that does not exist"
    return lanes(x[source])


def access(block, i: Instruction, a):
    """ld and st, by what their text says."""
    (opcode,) = [m for m in i.mnemonics if m.startswith(("ld.", "st."))]
    words = opcode.split(".")
    element = words[-1]
    vector = next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1)
    space = "shared" if "shared" in words else "global"
    size = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}[element]
    guarded = i.args[-1].kind == "pred"
    at = spread(block, a[0]).astype(np.int64)
    on = spread(block, a[-1]) != 0 if guarded else np.ones(block.threads, bool)
    on = on & block.active
    offset = re.search(r"\+ (\d+)\]", i.text)
    at = at + int(offset[1]) if offset else at
    assert (at[on] % (size * vector) == 0).all(), f"{i.name}: misaligned"
    memory = block.shared if space == "shared" else block.memory
    index = at[on][:, None] + np.arange(size * vector)  # [n, bytes]
    if len(index):
        assert index.min() >= 0 and index.max() < len(memory), f"{i.name}: outside of memory"
    if words[0] == "ld":
        if space == "shared":
            block.read(index, on)
        raw = np.zeros((block.threads, size * vector), np.uint8)
        raw[on] = memory[index]
        block.count(space, "read", on)
        out = []
        for v in range(vector):
            part = np.ascontiguousarray(raw[:, v * size:(v + 1) * size])
            kind = {"u8": "u1", "s8": "i1", "u16": "u2", "s16": "i2", "b32": "i4", "b64": "i8",
                    "f32": "f4", "f64": "f8"}[element]
            got = part.view(kind)[:, 0]
            out.append(lanes(got.astype(np.int32) if size < 4 else got))
        return out if vector > 1 else out[0]
    values = a[1] if isinstance(a[1], list) else [a[1]]
    raw = np.concatenate([np.ascontiguousarray(spread(block, v)).view(np.uint8).reshape(
        block.threads, -1)[:, :size] for v in values], 1)
    if space == "shared":
        block.write(index, on, raw[on])
    else:
        block.claim(index, on)
    memory[index] = raw[on]
    block.count(space, "write", on)
    return None


class Block:
    """One block: its number, shared memory, and who touched which byte since the last barrier."""

    def __init__(self, number, threads, memory):
        self.number, self.threads, self.memory = number, threads, memory
        self.shared = np.full(SHARED_BYTES, 0xC7, np.uint8)
        self.active = np.ones(threads, bool)
        self.epoch, self.touched = 1, np.zeros((2, SHARED_BYTES), np.int64)
        self.who = np.zeros((2, SHARED_BYTES), np.int64)
        self.accesses, self.written = {}, {}

    def count(self, space, how, on):
        key = f"{space} {how}"
        self.accesses[key] = self.accesses.get(key, 0) + 1

    def read(self, index, on):
        me = np.broadcast_to(np.flatnonzero(on)[:, None], index.shape)
        fresh = self.touched[1][index] == self.epoch
        assert not (fresh & (self.who[1][index] != me)).any(), "read before the barrier"
        # -2: several readers
        again = (self.touched[0][index] == self.epoch) & (self.who[0][index] != me)
        self.touched[0][index] = self.epoch
        self.who[0][index] = np.where(again, -2, me)
        unique, counts = np.unique(index, return_counts=True)
        self.who[0][unique[counts > 1]] = -2

    def write(self, index, on, raw):
        me = np.broadcast_to(np.flatnonzero(on)[:, None], index.shape)
        for side, what in ((0, "written while another thread may still read"),
                           (1, "written twice")):
            fresh = self.touched[side][index] == self.epoch
            other = fresh & (self.who[side][index] != me)
            if side == 1:
                other &= self.shared[index] != raw
            assert not other.any(), what
        order = np.argsort(index.reshape(-1), kind="stable")
        flat, values = index.reshape(-1)[order], raw.reshape(-1)[order]
        clash = (flat[1:] == flat[:-1]) & (values[1:] != values[:-1])
        assert not clash.any(), "two threads write different bytes to one place"
        self.touched[1][index] = self.epoch
        self.who[1][index] = me

    def claim(self, index, on):
        """Two threads of one access must not write the same byte of global memory."""
        flat = index.reshape(-1)
        assert len(np.unique(flat)) == len(flat), "two threads write the same byte"


# --- running ----------------------------------------------------------------------------------
def user(block):
    """The `use` of emitted sources."""
    def use(what):
        made = find_instruction(what) if isinstance(what, str) else what
        if isinstance(made, Instruction):
            return lambda *a: call(block, made.args, made.results,
                                   lambda b, *v: b.call(made, *v), a)
        assert isinstance(made, Operation)

        def run(*a):
            assert len(a) == made.arity, f"{made.name} takes {made.arity}, not {len(a)}"
            form = made.rule(*[operand(f"a{i}", x) for i, x in enumerate(a)])
            return call(block, form.args, form.results, form.body, a)

        return run

    return use


def operand(name, x):
    one = x[0] if isinstance(x, tuple) else x
    a = np.asarray(one)
    kind = {"f": {4: "f32", 8: "f64"}, "i": {4: "i32", 8: "i64"}, "b": {1: "i32"}}[a.dtype.kind]
    if isinstance(one, int) and not isinstance(one, bool):
        return Operand(name, "i32" if -2**31 <= one < 2**31 else "i64",
                       len(x) if isinstance(x, tuple) else 0)
    return Operand(name, kind[a.dtype.itemsize], len(x) if isinstance(x, tuple) else 0)


def call(block, args, results, body, given):
    values = []
    for o, x in zip(args, given, strict=True):
        have = operand(o.name, x)
        assert have.count == o.count and (have.kind[0] == "f") == (o.kind[0] == "f"), \
            f"takes {o}, is given {have}"
        values.append([lanes(v, o.kind) for v in x] if o.count else lanes(x, o.kind))
    with np.errstate(all="ignore"):
        made = body(Builder(block), *values)
    if not results:
        return None
    many = made if len(results) > 1 else [made]
    out = []
    for o, m in zip(results, many, strict=True):
        parts = m if o.count else [m]
        assert len(parts) == (o.count or 1), f"{o} comes out as {len(parts)}"
        for p in parts:
            assert p.dtype == TYPES[o.kind], f"{o} comes out as {p.dtype}"
        out.append(tuple(parts) if o.count else m)
    return out[0] if len(results) == 1 else tuple(out)


def load(source, name, block):
    """The function of an emitted source, bound to a block."""
    text = re.sub(r"from tessera.tile.cuda.numba_gate import[^\n]*\n", "", source)
    text = re.sub(r"(from tessera.tile.cuda import [^\n]*), use\n", r"\1\n", text)
    scope = {"__name__": "emulated", "use": user(block)}
    for kind in ("i32", "i64", "f32", "f64"):
        scope[kind] = lambda x, kind=kind: lanes(x, kind)
    exec(compile(text, f"<{name}>", "exec"), scope)
    return scope[name]


def emulate(kernel, *args, groups=None, lanes_=None, target="sm_90", facts=None, **kwargs):
    """(arrays after the run, emitted) with copies of the arguments; see tile_gpu.on_gpu."""
    import tile_gpu
    from tessera.numerics import pack, row_bytes, unpack
    from tessera.runtime.target import parse_target
    from tessera.tile.cuda.compile import emit
    from tessera.tile.interpreter.launch import extent

    bound, function, _, count, grid, schedule = tile_gpu.prepare(kernel, args, kwargs, groups,
                                                                 lanes_)
    made = emit(function, count, parse_target(target), facts or tile_gpu.facts_of(function, bound))
    emitted = made[1]
    memories, at, where = {}, BASE, {}
    for p in function.params:
        if isinstance(p.type, GlobalTensor):
            name = p.value.name
            if p.role == "output":
                from tessera.tile.interpreter.arguments import allocate

                shape = tuple(extent(str(d), bound) for d in p.type.dims)
                memories[name] = Memory(name, shape, p.type.numeric, allocate(
                    shape, p.type.numeric, True).reshape(-1))
            else:
                memories[name] = bound.values[name]
            m = memories[name]
            host = pack(m.flat.reshape(-1, m.shape[-1]), m.numeric.dtype) \
                if m.numeric.dtype.packed else m.flat
            raw = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
            where[name] = (at, raw)
            at += -(-len(raw) // 256) * 256 + 256
    memory = np.full(-(-at // 8) * 8, 0xC7, np.uint8)
    for start, raw in where.values():
        memory[start:start + len(raw)] = raw
    before = memory.copy()
    blocks = []
    for g in range(prod(grid)):
        block = Block(g, count, memory)
        values = []
        for p in emitted.parameters:
            if p.kind == "tensor":
                values.append(lanes(np.int64(where[p.name][0])))
                continue
            got = tile_gpu._value(p, bound, {}, memories, grid, kernel)
            values.append(lanes(np.asarray(got), p.abi))
        with np.errstate(all="ignore"):
            load(emitted.source, emitted.name, block)(*values)
        blocks.append(block)
    inside = np.zeros(len(memory), bool)
    arrays = {}
    for name, (start, raw) in where.items():
        inside[start:start + len(raw)] = True
        m, d = memories[name], memories[name].numeric.dtype
        got = memory[start:start + len(raw)]
        if d.packed:
            n = m.shape[-1]
            flat = unpack(got.reshape(-1, row_bytes(n, d)), d, n)
        else:
            flat = got.copy().view(m.flat.dtype)
        arrays[name] = flat.reshape(m.shape)
    assert (memory == before)[~inside].all(), "written outside of the tensors"
    return arrays, made, blocks


def compare(kernel, *args, groups=None, lanes=None, rtol=1e-5, atol=1e-5, exact=False,
            target="sm_90", facts=None, **kwargs):
    """Asserts that interpreter and emulated kernel leave the same arrays. exact: equal codes."""
    import tile_gpu
    from tessera.tile.interpreter.launch import run as interpret

    bound, function, chosen, count, _, _ = tile_gpu.prepare(kernel, copy.deepcopy(args), kwargs,
                                                            groups, lanes)
    interpret(function, bound, chosen, count, kernel.__name__, key=tile_gpu.LAUNCH_KEY)
    arrays, made, blocks = emulate(kernel, *args, groups=groups, lanes_=lanes, target=target,
                                   facts=facts, **kwargs)
    for name, m in bound.values.items():
        if not isinstance(m, Memory):
            continue
        got, wanted = arrays[name], m.flat.reshape(m.shape)
        if exact:
            word = f"u{wanted.dtype.itemsize}"
            a, b = np.ascontiguousarray(got).view(word), np.ascontiguousarray(wanted).view(word)
            wrong = a != b
            assert not wrong.any(), f"{name}: {wrong.sum()} codes differ, first at " \
                f"{np.argwhere(wrong)[0]}: {a[wrong][0]:#x}, wanted {b[wrong][0]:#x}"
            continue
        tile_gpu.same(decode(got, m.numeric.dtype), decode(wanted, m.numeric.dtype), rtol, atol,
                      name)
    return made, blocks


__all__ = ["compare", "emulate", "ml_dtypes"]
