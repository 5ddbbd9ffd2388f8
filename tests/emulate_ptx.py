"""Runs emitted kernels without a GPU: the source is executed with all threads of a block as arrays.

An intrinsic's body is given a Builder whose values are NumPy arrays (one number per thread), and an
instruction is carried out by name. Threads run in lockstep, which hides missing barriers, so each
byte of shared memory remembers who touched it since the last barrier: another thread's access then
is an error. A cp.async writes its target no earlier than at the wait for it.

For products and how they are fed: mma, ldmatrix, cp.async and its waits, packed operands, and how
often each instruction ran (tile_emulated.compare). Conversions and maths to the last bit are for
tile_emulator, which has no products.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tessera.numerics import decode, encode, find_dtype
from tessera.tile.cuda.instruction import Instruction, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction

KINDS = {"i16": np.int16, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64,
         "pred": np.int32}
NOBODY, MANY = -1, -2
MMA_TYPES = {"bf16": "bf16", "f16": "f16", "tf32": "f32", "s8": "int8", "u8": "uint8",
             "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


class Builder:
    """The Builder of intrinsics on arrays."""

    def __init__(self, block: Block):
        self.block = block

    def const(self, kind: str, value: float) -> Any:
        if kind[0] == "f":
            return KINDS[kind](value)
        return np.asarray(int(value)).astype(KINDS[kind])[()]

    def i32(self, value: int) -> Any:
        return np.asarray(value).astype(np.int32)[()]

    def undefined(self, kind: str) -> Any:
        return KINDS[kind](123)

    def zero(self, x: Any) -> Any:
        return x.dtype.type(0)

    def like(self, x: Any, value: float) -> Any:
        return x.dtype.type(value)

    def bits(self, x: Any) -> int:
        return 1 if x.dtype == bool else 8 * x.dtype.itemsize

    def is_float(self, x: Any) -> bool:
        return x.dtype.kind == "f"

    def fneg(self, x: Any) -> Any:
        return -x

    def select(self, c: Any, x: Any, y: Any) -> Any:
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        return np.where(c, x, y)

    def compare(self, op: str, x: Any, y: Any, *, unsigned: bool = False) -> Any:
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        if unsigned and x.dtype.kind == "i":
            x, y = (np.asarray(v).view(f"u{v.dtype.itemsize}") for v in (x, y))
        return {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
                "==": np.equal, "!=": np.not_equal}[op](x, y)

    def true(self, x: Any) -> Any:
        return x != 0

    def to_int(self, c: Any) -> Any:
        return np.asarray(c).astype(np.int32)

    def zext(self, x: Any, kind: str) -> Any:
        x = np.asarray(x)
        return (x.view(f"u{x.dtype.itemsize}") if x.dtype.kind == "i" else x).astype(KINDS[kind])

    def sext(self, x: Any, kind: str) -> Any:
        return np.asarray(x).astype(KINDS[kind])

    trunc = sext

    def bitcast(self, x: Any, kind: str) -> Any:
        return np.ascontiguousarray(x).view(KINDS[kind]).reshape(np.shape(x))

    def library(self, name: str, *args: Any) -> Any:
        return {"exp": np.exp, "exp2": np.exp2, "log": np.log, "fmax": np.fmax, "fmin": np.fmin,
                "fabs": np.abs, "tanh": np.tanh, "fma": lambda x, y, z: x * y + z}[
                    name.removeprefix("__nv_").removesuffix("f")](*args)

    def shared_base(self) -> Any:
        return np.int32(0)

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Threads where the condition fails touch no memory inside."""
        before = self.block.on
        self.block.on = before & np.broadcast_to(condition, before.shape)
        yield
        self.block.on = before

    def call(self, instruction: Instruction, *args: Any) -> Any:
        return self.block.call(instruction, *args)


def _arithmetic() -> None:
    def unsigned(f: Any) -> Any:
        def apply(self: Builder, x: Any, y: Any) -> Any:
            x, y = np.broadcast_arrays(x, y)
            kind = f"u{x.dtype.itemsize}"
            return f(np.ascontiguousarray(x).view(kind), np.ascontiguousarray(y).view(kind)
                     ).view(x.dtype).reshape(x.shape)
        return apply

    def same(f: Any) -> Any:
        def apply(self: Builder, x: Any, y: Any) -> Any:
            assert x.dtype == y.dtype, (x.dtype, y.dtype)
            with np.errstate(all="ignore"):
                return f(x, y)
        return apply

    for name, f in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply),
                    ("fadd", np.add), ("fsub", np.subtract), ("fmul", np.multiply),
                    ("fdiv", np.divide), ("and_", np.bitwise_and), ("or_", np.bitwise_or),
                    ("sdiv", lambda x, y: np.trunc(x / y).astype(x.dtype)),
                    ("xor", np.bitwise_xor), ("shl", np.left_shift), ("ashr", np.right_shift)):
        setattr(Builder, name, same(f))
    for name, f in (("lshr", np.right_shift), ("udiv", np.floor_divide), ("urem", np.remainder)):
        setattr(Builder, name, unsigned(f))


_arithmetic()


@dataclass
class Copy:
    place: np.ndarray
    value: np.ndarray
    group: int | None = None


@dataclass
class Block:
    """A block of threads: its shared memory and the memory of the device."""

    threads: int
    number: int
    memory: np.ndarray  # bytes of global memory
    valid: np.ndarray  # which of them belong to an array
    shared_bytes: int
    copies: list[Copy] = field(default_factory=list)
    commits: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.t = np.arange(self.threads, dtype=np.int32)
        self.on = np.ones(self.threads, bool)  # threads that act
        self.shared = np.full(self.shared_bytes, 0xFF, np.uint8)  # NaN, -1
        self.reader = np.full(self.shared_bytes, NOBODY)
        self.writer = np.full(self.shared_bytes, NOBODY)
        self.flying = np.zeros(self.shared_bytes, bool)

    # --- intrinsics ---------------------------------------------------------------------------
    def use(self, what: Any) -> Any:
        if isinstance(what, str):
            what = find_instruction(what)
        if isinstance(what, Instruction):
            return lambda *args: self.call(what, *[
                self.converted(a, o) for a, o in zip(args, what.args, strict=True)])
        return functools.partial(self.operate, what)

    def operate(self, operation: Operation, *args: Any) -> Any:
        assert len(args) == operation.arity, (operation.name, len(args), operation.arity)
        form = operation.rule(*[_operand(i, a) for i, a in enumerate(args)])
        values = [self.converted(a, o) for a, o in zip(args, form.args, strict=True)]
        made = form.body(Builder(self), *values)
        for out, got in zip(form.results, [made] if len(form.results) == 1 else made or [],
                            strict=True):
            assert not out.count or len(got) == out.count, (operation.name, out, len(got))
            for x in got if out.count else [got]:
                assert x.dtype == KINDS[out.kind], (operation.name, out, x.dtype)
        return made

    def converted(self, value: Any, wanted: Operand) -> Any:
        if wanted.count:
            assert len(value) == wanted.count, (wanted, len(value))
            return [self.converted(v, Operand("", wanted.kind)) for v in value]
        assert not isinstance(value, list | tuple), f"{wanted} is given a fragment"
        kind = np.asarray(value).dtype.kind
        assert (kind == "f") == (wanted.kind[0] == "f"), f"{wanted} is given a {kind}"
        return np.asarray(value).astype(KINDS[wanted.kind])

    # --- instructions -------------------------------------------------------------------------
    def call(self, instruction: Instruction, *args: Any) -> Any:
        name = instruction.name
        self.counts[name] = self.counts.get(name, 0) + 1
        if name == "tid_x":
            return self.t
        if name == "ctaid_x":
            return np.int32(self.number)
        if found := re.match(r"(ld|st|red)_", name):
            return getattr(self, found[1])(instruction, *args)
        if found := re.fullmatch(r"shfl_(\w+?)_[a-z]\d+(?:_w(\d+))?", name):
            return self.shuffle(found[1], int(found[2] or 32), *args)
        if name == "vote_any":
            return np.repeat(np.asarray(*args).reshape(-1, 32).any(1), 32).astype(np.int32)
        for start in ("ldmatrix", "mma", "cp_async_commit", "cp_async_wait", "cp_async", "sync"):
            if name.startswith(start):
                return getattr(self, start)(instruction, *args)
        return _scalar(name)(*args)

    def _bytes(self, address: Any, size: int) -> np.ndarray:
        """[T, size] addresses; each aligned to its size."""
        at = np.broadcast_to(np.asarray(address, np.int64), (self.threads,))
        return at[:, None] + np.arange(size)

    def _opcode(self, instruction: Instruction) -> tuple[str, int, str]:
        opcode = re.search(r"\b(?:ld|st)\.[\w.:]+", instruction.text)
        assert opcode is not None
        parts = opcode[0].split(".")
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        return ("shared" if "shared" in parts else "global"), vector, parts[-1]

    def ld(self, instruction: Instruction, at: Any, on: Any = None) -> Any:
        space, vector, element = self._opcode(instruction)
        size = int(element[1:]) // 8
        live = self.on & (True if on is None else np.asarray(on) != 0)
        raw = np.zeros((self.threads, size * vector), np.uint8)
        raw[live] = self.read(space, self._bytes(at, size * vector), live)
        got = raw.view({"b": "u", "u": "u", "s": "i", "f": "f"}[element[0]] + str(size))
        kind = KINDS[instruction.results[0].kind]
        parts = [got[:, i].view(kind) if got.dtype.itemsize == np.dtype(kind).itemsize
                 else got[:, i].astype(kind) for i in range(vector)]
        return parts if instruction.results[0].count else parts[0]

    def st(self, instruction: Instruction, at: Any, x: Any, on: Any = None) -> None:
        space, vector, element = self._opcode(instruction)
        size = int(element[1:]) // 8
        live = self.on & (True if on is None else np.asarray(on) != 0)
        parts = x if isinstance(x, list) else [x]
        assert len(parts) == vector
        raw = np.stack([np.broadcast_to(p, (self.threads,)) for p in parts], 1)
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(self.threads, vector, -1)
        raw = raw[:, :, :size].reshape(self.threads, -1)
        self.write(space, self._bytes(at, size * vector), raw, live)

    def red(self, instruction: Instruction, at: Any, x: Any) -> None:
        """Bits of words of shared memory set or cleared, one thread after the other; f32 added."""
        if found := re.match(r"red_add_f32_(global|shared)", instruction.name):
            self.red_add(found[1], at, x)
            return
        what = re.match(r"red_(and|or)_b32_shared", instruction.name)
        assert what is not None, instruction.name
        words = self.shared.view(np.uint32)
        place = np.broadcast_to(at, (self.threads,))
        bits = np.broadcast_to(x, (self.threads,)).astype(np.uint32)
        change = {"and": np.bitwise_and, "or": np.bitwise_or}[what[1]]
        change.at(words, place[self.on] // 4, bits[self.on])
        self.writer[self._bytes(at, 4)[self.on]] = MANY

    def red_add(self, space: str, at: Any, x: Any) -> None:
        place = self._bytes(at, 4)[self.on]
        self._aligned(place)
        assert space == "shared" or self.valid[place].all(), "update outside of the arrays"
        memory = self.shared if space == "shared" else self.memory
        values = np.broadcast_to(np.asarray(x, np.float32), (self.threads,))[self.on]
        np.add.at(memory.view(np.float32), place[:, 0] // 4, values)
        if space == "shared":
            assert np.isin(self.writer[place], (NOBODY, MANY)).all(), "update without a barrier"
            self.writer[place] = MANY

    def read(self, space: str, at: np.ndarray, live: np.ndarray,
             who: np.ndarray | None = None) -> np.ndarray:
        at, who = at[live], (self.t if who is None else who)[live]
        self._aligned(at)
        if space == "global":
            assert self.valid[at].all(), "read outside of the arrays"
            return self.memory[at]
        assert not self.flying[at].any(), "read of a copy that was not waited for"
        other = self.writer[at]
        assert ((other == NOBODY) | (other == who[:, None])).all(), "read without a barrier"
        seen = self.reader[at]
        self.reader[at] = np.where((seen == NOBODY) | (seen == who[:, None]), who[:, None], MANY)
        for thread in np.unique(who):  # several threads of this access may read one byte
            mine = at[who == thread]
            self.reader[mine] = np.where((self.reader[mine] == thread), thread, MANY)
        return self.shared[at]

    def write(self, space: str, at: np.ndarray, raw: np.ndarray, live: np.ndarray) -> None:
        at, raw, who = at[live], raw[live], self.t[live]
        self._aligned(at)
        if space == "global":
            assert self.valid[at].all(), "write outside of the arrays"
            self.memory[at] = raw
            return
        self._claim(at, who)
        self.shared[at] = raw

    def _claim(self, at: np.ndarray, who: np.ndarray) -> None:
        for table, what in ((self.reader, "read"), (self.writer, "written")):
            other = table[at]
            assert ((other == NOBODY) | (other == who[:, None])).all(), \
                f"write to what another thread has {what} since the last barrier"
        assert not self.flying[at].any(), "write to the target of a copy"
        self.writer[at] = who[:, None]

    def _aligned(self, at: np.ndarray) -> None:
        assert not at.size or not (at[:, 0] % at.shape[1]).any(), f"{at.shape[1]}-byte alignment"

    def sync(self, instruction: Instruction) -> None:
        self.reader[:], self.writer[:] = NOBODY, NOBODY

    def shuffle(self, mode: str, width: int, x: Any, by: Any) -> Any:
        x, by = (np.broadcast_to(v, (self.threads,)) for v in (x, by))
        place = self.t % width
        other = {"bfly": place ^ by, "idx": by % width, "up": place - by, "down": place + by}[mode]
        other = np.where((other >= 0) & (other < width), other, place)
        return x[self.t - place + other]

    # --- copies -------------------------------------------------------------------------------
    def cp_async(self, instruction: Instruction, to: Any, at: Any, *rest: Any) -> None:
        size = int(re.search(r"_(\d+)", instruction.name)[1])  # type: ignore[index]
        given = dict(zip([o.name for o in instruction.args[2:]], rest, strict=True))
        live = np.broadcast_to(np.asarray(given.get("bytes", size)) == size, (self.threads,))
        wanted = np.broadcast_to(np.asarray(given.get("p", 1)) != 0, (self.threads,))
        raw, live = np.zeros((self.threads, size), np.uint8), live & wanted
        raw[live] = self.read("global", self._bytes(at, size), live)
        if size == 16 and self.threads % 8 == 0:
            self.conflicts("cp_async", self._bytes(to, 16)[:, 0].reshape(-1, 8),
                           wanted.reshape(-1, 8))
        place, raw = self._bytes(to, size)[wanted], raw[wanted]
        self._aligned(place)
        self._claim(place, self.t[wanted])
        self.flying[place] = True
        self.copies.append(Copy(place, raw))

    def cp_async_commit(self, instruction: Instruction) -> None:
        for copy in self.copies:
            copy.group = self.commits if copy.group is None else copy.group
        self.commits += 1

    def cp_async_wait(self, instruction: Instruction) -> None:
        every = instruction.name.endswith("all")
        left = 0 if every else int(instruction.name.rsplit("_", 1)[1])
        done = [c for c in self.copies
                if every or c.group is not None and c.group < self.commits - left]
        self.copies = [c for c in self.copies if not any(c is d for d in done)]
        for copy in done:
            self.flying[copy.place] = False
            self.shared[copy.place] = copy.value

    def conflicts(self, what: str, at: np.ndarray, live: np.ndarray) -> None:
        """Counts accesses of 8 lanes, 16 bytes each, of which two meet in the same banks."""
        banks = np.where(live, at >> 4 & 7, -1 - np.arange(8))
        met = sum(len(set(row)) < 8 for row in np.sort(banks, 1).tolist())
        if met:
            self.counts[f"conflicts of {what}"] = self.counts.get(f"conflicts of {what}", 0) + met

    # --- matrices -----------------------------------------------------------------------------
    def ldmatrix(self, instruction: Instruction, at: Any) -> Any:
        count = int(instruction.name.split("_x")[1][0])
        address = self._bytes(at, 16).reshape(-1, 32, 16)[:, :8 * count]
        self.conflicts("ldmatrix", address[..., 0].reshape(-1, 8), np.ones((), bool))
        lanes = self.t.reshape(-1, 32)[:, :8 * count].reshape(-1)
        flat = address.reshape(-1, 16)
        raw = self.read("shared", flat, np.ones(len(flat), bool), lanes)
        tiles = raw.view(np.uint16).reshape(-1, count, 8, 8)  # [W, tile, row, column]
        if "trans" in instruction.name:
            tiles = tiles.swapaxes(2, 3)
        words = np.ascontiguousarray(tiles).view(np.int32).reshape(-1, count, 32)
        parts = [words[:, i].reshape(-1) for i in range(count)]
        return parts if count > 1 else parts[0]

    def mma(self, instruction: Instruction, a: Any, b: Any, c: Any) -> list[np.ndarray]:
        k, d, first, second = re.match(  # type: ignore[union-attr]
            r"mma_m16n8k(\d+)_(\w+?)_(\w+?)_(\w+?)_", instruction.name).groups()
        A = self._fragment(a, first, 2).reshape(-1, 16, int(k))
        B = self._fragment(b if isinstance(b, list) else [b], second, 1)
        B = B.reshape(-1, 8, int(k)).swapaxes(1, 2)
        wide = np.int64 if d == "s32" else np.float64
        C = self._accumulator(c).astype(wide) + A.astype(wide) @ B.astype(wide)
        C = C.astype(np.int32 if d == "s32" else np.float32)
        parts = C.reshape(-1, 2, 8, 4, 2)  # [W, row half, g, t, j]
        return [parts[:, i, :, :, j].reshape(-1) for i in (0, 1) for j in (0, 1)]

    def _fragment(self, registers: list, kind: str, rows: int) -> np.ndarray:
        """[W, rows * 8, k] numbers of A (rows 2) or B (rows 1)."""
        words = np.stack([np.broadcast_to(r, (self.threads,)) for r in registers], 0)
        dtype = find_dtype(MMA_TYPES[kind])
        if kind == "tf32":
            words = words & -0x2000
        words = words.reshape(len(registers) // rows, rows, -1, 8, 4)  # [half, row, W, g, t]
        words = np.ascontiguousarray(words.transpose(2, 1, 3, 0, 4))  # [W, row, g, half, t]
        return decode(words.view(dtype.numpy), dtype)

    def _accumulator(self, c: list) -> np.ndarray:
        parts = np.stack([np.broadcast_to(x, (self.threads,)) for x in c], 0)
        return parts.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)


@functools.cache
def _scalar(name: str) -> Any:
    """Conversions and arithmetic of one number per thread."""
    def bits(x: Any, dtype: str) -> Any:
        x = np.asarray(x, np.float32)
        code = encode(x, find_dtype(dtype)).view(np.uint16).astype(np.int32)
        return np.where(np.isnan(x), np.int32(0x7FFF), code)  # the instruction's own NaN

    def number(x: Any, dtype: str) -> Any:
        return decode(np.asarray(x).astype(np.uint16).view(find_dtype(dtype).numpy),
                      find_dtype(dtype)).astype(np.float32)

    if found := re.fullmatch(r"(bf16|f16)_(low|high)", name):
        shift = 16 * (found[2] == "high")
        return lambda x: number(np.asarray(x) >> shift & 0xFFFF, found[1])
    if found := re.fullmatch(r"add_(bf16|f16)x2", name):
        def add(x: Any, y: Any) -> Any:
            with np.errstate(all="ignore"):
                low, high = (bits(number(x >> s & 0xFFFF, found[1]) +
                                  number(y >> s & 0xFFFF, found[1]), found[1]) for s in (0, 16))
            return low | high << 16
        return add
    if found := re.fullmatch(r"to_(bf16|f16)_rn", name):
        return lambda x: bits(x, found[1])
    if found := re.fullmatch(r"pack_(bf16|f16)_rn", name):
        return lambda x, y: bits(x, found[1]) | bits(y, found[1]) << 16
    if found := re.fullmatch(r"(e4m3|e5m2)_to_f16x2", name):
        def halves(x: Any) -> Any:
            codes = np.stack([np.asarray(x) & 0xFF, np.asarray(x) >> 8 & 0xFF], -1)
            dtype = find_dtype(f"fp8_{found[1]}")
            numbers = decode(codes.astype(np.uint8).view(dtype.numpy), dtype)
            return np.asarray(numbers).astype(np.float16).view(np.int32)[..., 0]
        return halves
    if found := re.fullmatch(r"pack_(e4m3|e5m2)", name):
        def codes(x: Any) -> Any:
            return encode(np.asarray(x, np.float32), find_dtype(f"fp8_{found[1]}"),
                          saturate=True).view(np.uint8).astype(np.int32)
        return lambda x, y: codes(x) | codes(y) << 8
    if found := re.fullmatch(r"f32_(min|max)(_nan)?", name):
        return {"min": np.minimum, "max": np.maximum, "min_": np.fmin, "max_": np.fmax}[
            found[1] + "_" * (not found[2])]
    table = {"f32_to_f64": lambda x: np.float64(x), "f64_to_f32_rn": lambda x: np.float32(x),
             "s32_to_f32_rn": lambda x: np.asarray(x, np.int32).astype(np.float32),
             "u32_to_f32_rn": lambda x: np.asarray(x, np.int32).view(np.uint32).astype(np.float32),
             "ex2_approx": np.exp2, "prmt": _prmt, "s32_min": np.minimum,
             "min_s16x2": _min_of_halves}
    if name not in table:
        raise NotImplementedError(f"the emulator does not know {name}")
    return table[name]


def _min_of_halves(x: Any, y: Any) -> Any:
    """Of signed numbers of 16 bits, two in a register."""
    halves = [np.stack([v << 16 >> 16, v >> 16], -1) for v in (np.asarray(x), np.asarray(y))]
    least = np.minimum(*halves)
    return (least[..., 1] << 16 | least[..., 0] & 0xFFFF).astype(np.int32)


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    a, b, s = (np.asarray(x).astype(np.int64) & 0xFFFFFFFF for x in (a, b, selector))
    both = a | b << 32
    out = sum((both >> 8 * (s >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
    return np.asarray(out).astype(np.uint32).view(np.int32)


def _operand(i: int, value: Any) -> Operand:
    count = len(value) if isinstance(value, list | tuple) else 0
    dtype = np.asarray(value[0] if count else value).dtype
    if dtype.kind == "f":
        return Operand(f"a{i}", "f64" if dtype.itemsize == 8 else "f32", count)
    wide = dtype.itemsize == 8 and not isinstance(value, int)
    return Operand(f"a{i}", "i64" if wide else "i32", count)


def _cast(kind: str) -> Any:
    return lambda x: np.asarray(x).astype(KINDS[kind])[()]


IMPORT = re.compile(r"^from ([\w.]+) import (?:\(([^)]*)\)|(.*))\n", re.M)


def namespace(block: Block, source: str) -> dict[str, Any]:
    """What emitted source imports, with this block's intrinsics."""
    names: dict[str, Any] = {k: _cast(k) for k in ("i32", "i64", "f32", "f64")}
    for folder, several, one in IMPORT.findall(source):
        for part in (several or one).replace(",", " ").split():
            if part != "use" and part not in names:
                names[part] = importlib.import_module(f"{folder}.{part}")
    return names | {"use": block.use, "INF": np.inf, "NAN": np.nan}


def body_of(source: str) -> str:
    """The emitted source without its imports."""
    return IMPORT.sub("", source)


# --- whole launches -------------------------------------------------------------------------------
def run(emitted: Any, lanes: int, grid: tuple[int, ...], arrays: dict[str, np.ndarray],
        values: dict[str, Any]) -> dict[str, int]:
    """Executes all blocks on raw arrays (changed in place); how often each instruction ran."""
    pointers, memory, valid = _arena(arrays)
    counts: dict[str, int] = {}
    code = compile(body_of(emitted.source), "<emitted>", "exec")
    for number in range(prod(grid)):
        block = Block(lanes, number, memory, valid, emitted.shared_bytes)
        names = namespace(block, emitted.source)
        with np.errstate(all="ignore"):
            exec(code, names)
            names[emitted.name](*[_value(p, pointers, values, grid) for p in emitted.parameters])
        for name, n in block.counts.items():
            counts[name] = counts.get(name, 0) + n
    for name, array in arrays.items():
        at = pointers[name]
        array.reshape(-1).view(np.uint8)[:] = memory[at:at + array.nbytes]
    return counts


def _arena(arrays: dict[str, np.ndarray]) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
    pointers, at = {}, 4096
    for name, array in arrays.items():
        pointers[name] = at
        at += -(-array.nbytes // 256) * 256 + 256
    memory, valid = np.zeros(at, np.uint8), np.zeros(at, bool)
    for name, array in arrays.items():
        part = slice(pointers[name], pointers[name] + array.nbytes)
        memory[part], valid[part] = array.reshape(-1).view(np.uint8), True
    return pointers, memory, valid


def _value(p: Any, pointers: dict[str, int], values: dict[str, Any],
           grid: tuple[int, ...]) -> Any:
    if p.kind == "tensor":
        return np.int64(pointers[p.name])
    if p.kind == "axis":
        return KINDS[p.abi](grid[p.axis])
    if p.kind == "groups":
        return KINDS[p.abi](prod(grid))
    if p.kind in ("seed", "replays"):
        return KINDS[p.abi](values[p.kind, p.axis])
    return KINDS[p.abi](values[p.name])
