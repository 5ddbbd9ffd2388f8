"""A block of threads in lockstep: what each instruction does to all of them at once."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from tessera.tile.cuda.instruction import (
    Instruction,
    InstructionForm,
    Kind,
    Operand,
    Operation,
)
from tessera.tile.cuda.instruction_names import find_instruction

from .arithmetic import arithmetic
from .bulk_stores import BulkStores
from .matrices import Matrices
from .memory import MANY, NOBODY, GlobalMemory, SharedMemory, aligned
from .registers import KINDS, Builder

SHARED_BYTES = 232448  # as much as a block may have
WARP = 32
SHUFFLE = re.compile(r"shfl_(\w+?)_[a-z]\d+(?:_w(\d+))?")
# What a name begins with, in this order -> the method of a Block that does it.
METHODS = {"ld_": "access", "st_": "access", "red_": "red", "vote_": "vote", "ldmatrix": "ldmatrix",
           "stmatrix": "stmatrix", "mma": "mma", "tma_store": "bulk.store",
           "bulk_store": "bulk.store_bytes",
           "bulk_commit": "bulk.commit", "bulk_wait": "bulk.wait",
           "fence_async_shared": "bulk.fence", "cp_async_commit": "commit",
           "cp_async_wait": "wait", "cp_async": "copy", "sync": "sync", "dependents": "dependents",
           "discard_L2": "discard"}
RED = re.compile(r"red_(?:bits_(and|or)|([a-z]+)_([a-z]+)(32|64)_(global|shared)_\w+)")
UPDATES: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor}
NUMBERS = ("i32", "i64", "f32", "f64")  # kinds that emitted source converts to by name
IMPORT = re.compile(r"^from ([\w.]+) import (?:\(([^)]*)\)|(.*))\n", re.M)


@dataclass
class Copy:
    """A cp.async on its way. group: the commit that closed it."""

    place: np.ndarray
    value: np.ndarray
    group: int | None = None


class Block(Matrices):
    """Threads, their shared memory and the memory of the device; counts: how often each
    instruction ran."""

    builder: type[Builder] = Builder

    def __init__(self, threads: int, number: int = 0, memory: GlobalMemory | None = None,
                 shared_bytes: int = SHARED_BYTES):
        self.threads, self.number = threads, number
        self.blocks = 1  # of the launch
        self.memory, self.shared = memory or GlobalMemory({}), SharedMemory(shared_bytes)
        self.memory.barrier()
        self.t = np.arange(threads, dtype=np.int32)
        self.on = np.ones(threads, bool)  # threads that act
        self.copies: list[Copy] = []
        self.commits = 0
        self.bulk = BulkStores(self)
        self.counts: dict[str, int] = {}
        self._builder = self.builder(self)

    # --- emitted source -----------------------------------------------------------------------
    def run(self, source: str, name: str, values: list[Any]) -> None:
        """Calls the function of an emitted source."""
        scope = self._imported(source)
        with np.errstate(all="ignore"):
            exec(_compiled(source), scope)
            scope[name](*values)

    def _imported(self, source: str) -> dict[str, Any]:
        """What emitted source imports, with this block's intrinsics."""
        value = self.builder.register
        kinds = {k: functools.partial(value, kind=k) for k in NUMBERS}
        return _modules(source) | kinds | {"use": self.use, "INF": np.inf, "NAN": np.nan}

    def use(self, what: Any) -> Any:
        """The `use` of emitted sources: an instruction or an operation to call."""
        if isinstance(what, str):
            what = find_instruction(what)
        return functools.partial(self.operate, what)

    def operate(self, what: Instruction | Operation, *args: Any) -> Any:
        """Arguments converted as the compiler does, and what comes out checked."""
        kinds = tuple(map(kind_of, args))
        if isinstance(what, Instruction):
            operands, results = what.args, what.results
            body: Any = self._builder.call
        else:
            assert len(args) == what.arity, f"{what.name} takes {what.arity}, not {len(args)}"
            form = _form(what, kinds)
            operands, results, body = form.args, form.results, form.body
        given = [self._converted(a, k, o) for a, k, o in zip(args, kinds, operands, strict=True)]
        found = body(what if isinstance(what, Instruction) else self._builder, *given)
        parts = [found] if len(results) == 1 else found or []
        out = [_checked(what.name, x, o) for x, o in zip(parts, results, strict=True)]
        return (out[0] if len(out) == 1 else tuple(out)) if out else None

    def _converted(self, value: Any, have: tuple[Kind, int], wanted: Operand) -> Any:
        assert have[1] == wanted.count and (have[0][0] == "f") == (wanted.kind[0] == "f"), \
            f"takes {wanted}, is given {have}"
        one = self.builder.register
        return [one(v, wanted.kind) for v in value] if wanted.count else one(value, wanted.kind)

    # --- instructions -------------------------------------------------------------------------
    def call(self, instruction: Instruction, *args: Any) -> Any:
        """What an instruction's results are; one that stands for several is a list."""
        name = instruction.name
        self.counts[name] = self.counts.get(name, 0) + 1
        found = self._by_name(instruction, args)
        one = self.builder.register
        return [one(x) for x in found] if isinstance(found, list) else \
            None if found is None else one(found)

    def _by_name(self, instruction: Instruction, args: tuple) -> Any:
        name = instruction.name
        if name == "tid_x":
            return self.t
        if name == "laneid":
            return self.t % np.int32(32)
        if name == "ctaid_x":
            return np.int32(self.number)
        if name == "nctaid_x":
            return np.int32(self.blocks)
        if name.startswith("prefetch") or name == "bulk_prefetch":
            return None  # a line comes to a cache
        if method := _method(name):
            return method(self)(instruction, *args)
        return arithmetic(name)(*args)

    def dependents(self, instruction: Instruction) -> None:
        """Launches run one after another here: a wait has to stand before all accesses."""
        early = [n for n in self.counts if n.startswith(("ld_", "st_"))]
        assert instruction.name != "dependents_wait" or not early, f"{early} before the wait"

    def spread(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x if x.shape == (self.threads,) else np.broadcast_to(x, (self.threads,))

    def bytes_at(self, address: Any, size: int) -> np.ndarray:
        """[threads, size] addresses."""
        return self.spread(address).astype(np.int64)[:, None] + _counted_up(size)

    def access(self, instruction: Instruction, at: Any, *rest: Any) -> Any:
        form = _access_form(instruction)
        live = self.on
        if form.predicated:
            live = live & (self.spread(rest[-1]) != 0)
        place = self.bytes_at(at, form.size * form.vector) + form.offset
        if form.space == "shared" and self.threads % WARP == 0:
            self.count_passes(form.verb, place, live)
        if form.verb == "st":
            return self.store(form.space, place, rest[0], form.size, live)
        raw = np.zeros((self.threads, form.size * form.vector), np.uint8)
        raw[live] = self.read(form.space, place[live], self.t[live])
        got, kind = raw.view(form.element), KINDS[instruction.results[0].kind]
        parts = [np.ascontiguousarray(got[:, i]) for i in range(form.vector)]
        parts = [p.view(kind) if p.dtype.itemsize == np.dtype(kind).itemsize else p.astype(kind)
                 for p in parts]
        return parts if instruction.results[0].count else parts[0]

    def store(self, space: str, place: np.ndarray, x: Any, size: int, live: np.ndarray) -> None:
        parts = x if isinstance(x, list) else [x]
        raw = np.stack([self.spread(p) for p in parts], 1)
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(self.threads, len(parts), -1)
        raw = raw[:, :, :size].reshape(self.threads, -1)
        assert raw.shape == place.shape, (raw.shape, place.shape)
        self.write(space, place[live], raw[live], self.t[live])

    def discard(self, instruction: Instruction, at: Any) -> None:
        """What a line has had is gone."""
        place = self.bytes_at(at, 128)[self.on]
        assert not (place[:, 0] % 128).any(), "not a line"
        self.write("global", place, np.full(place.shape, 0xFF, np.uint8), self.t[self.on])

    def read(self, space: str, at: np.ndarray, who: np.ndarray) -> np.ndarray:
        if space == "shared":
            return self.shared.read(at, who)
        self.memory.order(at, who, False)
        return self.memory.read(at)

    def write(self, space: str, at: np.ndarray, raw: np.ndarray, who: np.ndarray) -> None:
        if space == "shared":
            self.shared.write(at, who, raw)
        else:
            self.memory.order(at, who, True)
            self.memory.write(at, raw)

    # --- updates of memory --------------------------------------------------------------------
    def red(self, instruction: Instruction, at: Any, x: Any, p: Any = 1) -> None:
        """Of the threads for which p holds, one after the other."""
        if instruction.name.startswith("red_add_f32x"):
            one = find_instruction("red_add_f32_global_gpu_relaxed")
            for i, part in enumerate(x):
                self.red(one, at + 4 * i, part, p)
            return
        found = RED.fullmatch(instruction.name)
        assert found is not None, f"the emulator has no {instruction.name}"
        bits, op, kind, size, space = found.groups(default="")
        dtype = np.dtype({"u": "u", "s": "i", "b": "u", "f": "f"}[kind or "b"]
                         + str(int(size or 32) // 8))
        live, shared = self.on & (self.spread(p) != 0), space == "shared"
        place = self.bytes_at(at, dtype.itemsize)[live]
        aligned(place)
        assert shared or self.memory.valid[place].any(1).all(), "update outside of the arrays"
        assert shared or bits or self.memory.valid[place].all(), "update outside of the arrays"
        if shared:
            writer = self.shared.writer
            assert kind == "b" or np.isin(writer[place], (NOBODY, MANY)).all(), \
                "update without a barrier"
            writer[place] = MANY
        memory = self.shared.bytes if shared else self.memory.bytes
        values = np.ascontiguousarray(self.spread(x)[live]).view(dtype)
        UPDATES[bits or op].at(memory[:len(memory) // 8 * 8].view(dtype),
                               place[:, 0] // dtype.itemsize, values)

    # --- threads together ---------------------------------------------------------------------
    def sync(self, instruction: Instruction, mask: Any = None) -> None:
        self.shared.barrier()
        self.memory.barrier()

    def vote(self, instruction: Instruction, p: Any) -> np.ndarray:
        full = self.spread(p)
        wide = np.concatenate([full, full[-1:].repeat(-len(full) % WARP)]).reshape(-1, WARP) != 0
        said = {"vote_any": wide.any, "vote_all": wide.all}[instruction.name](1)
        return said.astype(np.int32).repeat(WARP)[:len(full)]

    def shuffle(self, instruction: Instruction, x: Any, by: Any) -> np.ndarray:
        found = SHUFFLE.fullmatch(instruction.name)
        assert found is not None, instruction.name
        mode, width = found[1], int(found[2] or WARP)
        x, by = self.spread(x), self.spread(by)
        place = self.t % width
        source = {"bfly": place ^ by, "idx": by % width, "up": place - by, "down": place + by}[mode]
        source = np.where((source >= 0) & (source < width), source, place) + self.t - place
        assert (source < self.threads).all(), "a shuffle reads a thread that does not exist"
        return x[source]

    # --- copies -------------------------------------------------------------------------------
    def copy(self, instruction: Instruction, to: Any, at: Any, *rest: Any) -> None:
        """cp.async: fewer `bytes` than its size fill with zeros."""
        size = int(re.search(r"_(\d+)", instruction.name)[1])  # type: ignore[index]
        given = dict(zip([o.name for o in instruction.args[2:]], rest, strict=True))
        wanted = self.spread(given.get("p", 1)) != 0
        live = (self.spread(given.get("bytes", size)) == size) & wanted
        raw = np.zeros((self.threads, size), np.uint8)
        raw[live] = self.read("global", self.bytes_at(at, size)[live], self.t[live])
        place = self.bytes_at(to, size)
        if size == 16 and self.threads % 8 == 0:
            self.count_conflicts("cp_async", place[:, 0].reshape(-1, 8), wanted.reshape(-1, 8))
        place = place[wanted]
        aligned(place)
        self.shared.claim(place, self.t[wanted])
        self.shared.flying[place] = True
        self.copies.append(Copy(place, raw[wanted]))

    def commit(self, instruction: Instruction) -> None:
        for copy in self.copies:
            copy.group = self.commits if copy.group is None else copy.group
        self.commits += 1

    def wait(self, instruction: Instruction) -> None:
        every = instruction.name.endswith("all")
        left = 0 if every else int(instruction.name.rsplit("_", 1)[1])
        done = [c for c in self.copies
                if every or c.group is not None and c.group < self.commits - left]
        self.copies = [c for c in self.copies if not any(c is d for d in done)]
        for copy in done:
            self.shared.flying[copy.place] = False
            self.shared.bytes[copy.place] = copy.value

    def count_passes(self, what: str, place: np.ndarray, live: np.ndarray) -> None:
        """Counts passes over shared memory beyond the first, of the lanes that 128 bytes serve."""
        lanes = min(WARP, 128 // place.shape[1])
        words = np.where(live[:, None], place[:, ::4] >> 2, -1).reshape(self.threads // lanes, -1)
        words.sort(1)
        new = (words >= 0) & (np.diff(words, axis=1, prepend=-1) != 0)
        phase = np.broadcast_to(np.arange(len(words))[:, None], words.shape)[new]
        asked = np.zeros((len(words), 32), np.int64)
        np.add.at(asked, (phase, words[new] % 32), 1)
        more = int(np.maximum(asked.max(1) - 1, 0).sum())
        if more:
            self.counts[f"passes of {what}"] = self.counts.get(f"passes of {what}", 0) + more

    def count_conflicts(self, what: str, at: np.ndarray, live: np.ndarray) -> None:
        """Counts accesses of 8 lanes, 16 bytes each, of which two meet in the same banks."""
        banks = np.where(live, at >> 4 & 7, -1 - np.arange(8))
        met = sum(len(set(row)) < 8 for row in np.sort(banks, 1).tolist())
        if met:
            self.counts[f"conflicts of {what}"] = self.counts.get(f"conflicts of {what}", 0) + met


@functools.cache
def _method(name: str) -> Callable[[Block], Callable[..., Any]] | None:
    """Of a block, what does instructions of such a name; None where they are arithmetic."""
    if SHUFFLE.fullmatch(name):
        return attrgetter("shuffle")
    return next((attrgetter(m) for start, m in METHODS.items() if name.startswith(start)), None)


@dataclass(frozen=True)
class AccessForm:
    """What the text of an ld or st says. size: bytes of an element; element: its NumPy type"""

    verb: str
    space: str
    vector: int
    size: int
    element: str
    offset: int
    predicated: bool


@functools.cache
def _access_form(instruction: Instruction) -> AccessForm:
    opcode = re.search(r"\b(ld|st)\.[\w.:]+", instruction.text)
    offset = re.search(r"\+ (\d+)\]", instruction.text)
    assert opcode is not None, instruction.text
    words = opcode[0].split(".")
    size = int(words[-1][1:]) // 8
    return AccessForm(
        opcode[1], "shared" if "shared" in words else "global",
        next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1), size,
        {"b": "u", "u": "u", "s": "i", "f": "f"}[words[-1][0]] + str(size),
        int(offset[1]) if offset else 0, instruction.args[-1].kind == "pred")


@functools.cache
def _counted_up(size: int) -> np.ndarray:
    return np.arange(size)


@functools.cache
def _form(what: Operation, kinds: tuple[tuple[Kind, int], ...]) -> InstructionForm:
    return what.rule(*[Operand(f"a{i}", *k) for i, k in enumerate(kinds)])


@functools.cache
def _modules(source: str) -> dict[str, Any]:
    """That it imports."""
    return {part: importlib.import_module(f"{folder}.{part}")
            for folder, several, one in IMPORT.findall(source)
            for part in (several or one).replace(",", " ").split()
            if part not in ("use", *NUMBERS)}


@functools.cache
def _compiled(source: str) -> Any:
    """The emitted source without its imports."""
    return compile(IMPORT.sub("", source), "<emitted>", "exec")


def _checked(name: str, x: Any, wanted: Operand) -> Any:
    parts = x if wanted.count else [x]
    assert len(parts) == wanted.registers, f"{name}: {wanted} comes out as {len(parts)}"
    for part in parts:
        assert part.dtype == KINDS[wanted.kind], f"{name}: {wanted} comes out as {part.dtype}"
    return tuple(parts) if wanted.count else x


def kind_of(x: Any) -> tuple[Kind, int]:
    """How the compiler sees an argument of an intrinsic: its kind, and elements of a fragment."""
    count = len(x) if isinstance(x, list | tuple) else 0
    one = x[0] if count else x
    dtype = one.dtype if isinstance(one, np.ndarray | np.generic) else np.asarray(one).dtype
    if dtype.kind == "f":
        return "f64" if dtype.itemsize == 8 else "f32", count
    wide = not -2**31 <= one < 2**31 if isinstance(one, int) else dtype.itemsize == 8
    return "i64" if wide else "i32", count
