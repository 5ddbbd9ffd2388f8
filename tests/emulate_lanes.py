"""As emulate_ptx, for kernels whose lanes go their own ways: one lane runs at a time.

A lane is a Python thread that holds the baton until it comes to something that lanes do together
(a barrier, a shuffle, a vote); what they get is computed when all that are still there have come.
Lanes of a warp that ended, or never were, take no part.

For kernels by lanes: branches, loops, atomics, votes, reports. Slower than the emulators of whole
blocks (emulate_ptx, tile_emulator), which need control flow that all threads share.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

import emulate_ptx
import tile_gpu
from emulate_ptx import KINDS, NOBODY, Builder, body_of, namespace
from tessera.numerics import decode, encode, find_dtype
from tessera.runtime.flags import LINES, WORDS, Failure, ReportSite
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import emit
from tessera.tile.cuda.instruction import Instruction, InstructionForm, Operation
from tessera.tile.interpreter.launch import extent
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.ir.types import GlobalTensor

WARP = 32
TOGETHER = re.compile(r"(shfl|vote|redux|sync_threads|sync_warp)")
ATOMIC = re.compile(r"(atom|red)_([a-z]+)_(\w+?)_(global|shared)_(\w+?)_(\w+)$")
REDUX = {"add": sum, "min": min, "max": max}


class LaneBuilder(Builder):
    """One lane: conditions are Python's, and what is under one that is false has no effect."""

    def array(self, name: str, kind: str, count: int) -> np.ndarray:
        return self.block.arrays.setdefault(name, np.full(count, -1, KINDS[kind]))

    def read(self, array: np.ndarray, index: Any) -> Any:
        return array[int(index[0] if np.ndim(index) else index)].reshape(1)

    def write(self, array: np.ndarray, index: Any, x: Any) -> None:
        array[int(index[0] if np.ndim(index) else index)] = np.asarray(x).reshape(-1)[0]

    @contextlib.contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        before = self.block.off
        self.block.off = before or not bool(np.asarray(condition).reshape(-1)[0])
        yield
        self.block.off = before

    def until(self, first: Any, step: Any) -> Any:
        x, done = first, False
        while not bool(np.asarray(done).reshape(-1)[0]):
            x, done = step(x)
        return x


def _signed(self: Any, x: Any, y: Any) -> Any:
    """Toward zero, exactly in 64 bits."""
    x, y = np.broadcast_arrays(x, y)
    wide, by = x.astype(np.int64), y.astype(np.int64)
    return (np.sign(wide) * np.sign(by) * (np.abs(wide) // np.maximum(np.abs(by), 1))).astype(
        x.dtype)


LaneBuilder.sdiv = _signed  # type: ignore[attr-defined]


class Team:
    """The lanes of a group and whose turn it is."""

    def __init__(self, lanes: int):
        self.lanes = lanes
        self.turn = [threading.Semaphore(0) for _ in range(lanes)]
        self.back = threading.Semaphore(0)
        self.waits: dict[int, tuple[str, Any]] = {}
        self.results: dict[int, Any] = {}
        self.live = set(range(lanes))
        self.errors: list[BaseException] = []

    def together(self, lane: int, name: str, value: Any) -> Any:
        """Called by a lane: gives the baton back and waits for the others."""
        self.waits[lane] = (name, value)
        self.back.release()
        self.turn[lane].acquire()
        if self.errors:
            raise SystemExit
        return self.results.pop(lane)

    def run(self, body: Any) -> None:
        def lane(i: int) -> None:
            self.turn[i].acquire()
            try:
                if not self.errors:
                    body(i)
            except SystemExit:
                pass
            except BaseException as error:
                self.errors.append(error)
            self.live.discard(i)
            self.back.release()

        threads = [threading.Thread(target=lane, args=(i,)) for i in range(self.lanes)]
        for t in threads:
            t.start()
        ready = list(range(self.lanes))
        while ready:
            for i in ready:
                self.turn[i].release()
                self.back.acquire()
            ready = sorted(self.live) if self.errors else self.meet()
        for t in threads:
            t.join()
        if self.errors:
            raise self.errors[0]

    def meet(self) -> list[int]:
        """The lanes that go on: whole warps at one collective, or the group at a barrier."""
        if self.live and all(self.waits[i][0] == "sync_threads" for i in self.live):
            return self.go(sorted(self.live), lambda values: [None] * len(values))
        moved = []
        for start in range(0, self.lanes, WARP):
            warp = [i for i in range(start, min(start + WARP, self.lanes)) if i in self.live]
            names = {self.waits[i][0] for i in warp}
            if len(names) == 1 and (name := names.pop()) != "sync_threads":
                moved += self.go(warp, lambda v, n=name, w=warp: collective(n, v, w))
        assert moved or not self.live, f"lanes wait for each other: {self.waits}"
        return moved

    def go(self, lanes: list[int], f: Any) -> list[int]:
        values = [self.waits.pop(i)[1] for i in lanes]
        self.results |= dict(zip(lanes, f(values), strict=True))
        return lanes


def collective(name: str, values: list[Any], lanes: list[int]) -> list[Any]:
    """What each lane of a warp gets."""
    place = {i % WARP: k for k, i in enumerate(lanes)}
    if name.startswith("shfl"):
        out = []
        for i, (x, by) in zip(lanes, values, strict=True):
            own = i % WARP
            to = {"idx": by % WARP, "bfly": own ^ by, "up": own - by, "down": own + by}[
                name.split("_")[1]]
            to = to if 0 <= to < WARP else own
            out.append(values[place[to]][0] if to in place else np.full_like(x, -77))
        return out
    bits = [int(v[0]) for v in values]
    if name == "vote_ballot":
        word = sum((b != 0) << (i % WARP) for b, i in zip(bits, lanes, strict=True))
        return [np.array([word], np.int64).astype(np.int32)] * len(lanes)
    if name.startswith("vote"):
        return [np.int32([(any if "any" in name else all)(bits)])] * len(lanes)
    assert len(lanes) == WARP
    _, op, kind = name.split("_")
    bits = [b % 2**32 if kind == "u32" else b for b in bits]
    return [np.array([REDUX[op](bits)], np.int64).astype(np.int32)] * WARP


class Lane(emulate_ptx.Block):
    """One thread of a group; shared memory belongs to all of them."""

    def begin(self, lane: int, team: Team, common: dict[str, np.ndarray]) -> None:
        self.t, self.lane, self.team = np.array([lane], np.int32), lane, team
        self.shared, self.off, self.arrays = common["shared"], False, {}

    def read(self, space: str, at: np.ndarray, live: np.ndarray, who: Any = None) -> np.ndarray:
        at = at[live]
        self._aligned(at)
        if space == "shared":
            return self.shared[at]
        assert self.valid[at].any(1).all(), "read outside of the arrays"  # words: see atomic
        return self.memory[at]

    def write(self, space: str, at: np.ndarray, raw: np.ndarray, live: np.ndarray) -> None:
        at, raw = at[live], raw[live]
        self._aligned(at)
        if space == "global":
            assert self.valid[at].all(), "write outside of the arrays"
        (self.shared if space == "shared" else self.memory)[at] = raw

    def ld(self, instruction: Instruction, at: Any, on: Any = None) -> Any:
        offset = re.search(r"\+ (\d+)\]", instruction.text)
        at = np.asarray(at, np.int64) + int(offset[1]) if offset else at
        return super().ld(instruction, at, np.int32([0]) if self.off else on)

    def st(self, instruction: Instruction, at: Any, x: Any, on: Any = None) -> None:
        super().st(instruction, at, x, np.int32([0]) if self.off else on)

    def operate(self, operation: Operation, *args: Any) -> Any:
        form: InstructionForm = operation.rule(*[emulate_ptx._operand(i, a) for i,
                                                 a in enumerate(args)])
        values = [self.converted(a, o) for a, o in zip(args, form.args, strict=True)]
        made = form.body(LaneBuilder(self), *values)
        for o, got in zip(form.results, [made] if len(form.results) == 1 else made or [],
                          strict=True):
            for x in got if o.count else [got]:
                assert x.dtype == KINDS[o.kind], (operation.name, o, x.dtype)
        return made

    def call(self, instruction: Instruction, *args: Any) -> Any:
        name = instruction.name
        if found := ATOMIC.match(name):
            return self.atomic(found, *args)
        if name.startswith("red_add_f32x"):
            for i, x in enumerate(args[1]):
                self.atomic(ATOMIC.match("red_add_f32_global_gpu_relaxed"), args[0] + 4 * i, x)
            return None
        if TOGETHER.match(name):
            wide = [np.broadcast_to(np.asarray(a), (1,)) for a in args]
            value = (wide[0], int(wide[1][0])) if name.startswith("shfl") else wide[0] if wide \
                else None
            return self.team.together(self.lane, name, value)
        if name == "popc":
            return np.int32([bin(int(np.asarray(args[0]).reshape(-1)[0]) & 0xFFFFFFFF).count("1")])
        if name.startswith("fence"):
            return None
        if found := re.fullmatch(r"to_(bf16|f16)_rz", name):
            codes = encode(np.asarray(args[0], np.float32), find_dtype(found[1]),
                           rounding="toward_zero")
            return codes.view(np.uint16).astype(np.int32)
        if name == "f32_to_u32_rzi":
            return np.clip(np.nan_to_num(np.asarray(args[0], np.float64)), 0, 2.0**32 - 1).astype(
                np.uint32).view(np.int32)
        if found := re.fullmatch(r"([su])(32|64)_to_f32_rn", name):
            x = np.asarray(args[0])
            return (x.view(f"u{x.dtype.itemsize}") if found[1] == "u" else x).astype(np.float32)
        return super().call(instruction, *args)

    def atomic(self, found: Any, at: Any, *values: Any) -> Any:
        """One step: nobody else has the baton."""
        verb, op, kind, space = found.groups()[:4]
        x = [np.broadcast_to(np.asarray(v), (1,)) for v in values]
        if self.off:
            return np.zeros_like(x[-1])
        size = 4 if "x2" in kind else int(kind[1:]) // 8
        where = self._bytes(at, size)
        self._aligned(where)
        memory = self.shared if space == "shared" else self.memory
        # a word of packed codes may reach beyond its array, whose last bytes it leaves alone
        assert space == "shared" or self.valid[where].any(), "update outside of the arrays"
        raw = memory[where]
        if "x2" in kind:
            new = _pair(raw, x[0], find_dtype(kind[:-2]))
        else:
            dtype = np.dtype({"u": "u", "s": "i", "b": "i", "f": "f"}[kind[0]] + str(size))
            old = raw.view(dtype).reshape(1)
            given = [v.astype(f"i{size}").view(dtype) if v.dtype.kind == "i" else v for v in x]
            new = _updated(op, old, given).astype(dtype).view(np.uint8).reshape(1, size)
        memory[where] = new
        if verb == "red" or "x2" in kind:
            return None
        return old.view(f"i{size}").astype(x[-1].dtype) if x[-1].dtype.kind == "i" else old.copy()


def _pair(raw: np.ndarray, word: np.ndarray, dtype: Any) -> np.ndarray:
    both = [decode(w.reshape(-1).view(dtype.numpy), dtype)
            for w in (raw, np.ascontiguousarray(word).view(np.uint8))]
    return np.asarray(encode(both[0] + both[1], dtype)).view(np.uint8).reshape(1, 4)


def _updated(op: str, old: np.ndarray, x: list[np.ndarray]) -> np.ndarray:
    if op == "cas":
        return x[1] if old[0] == x[0][0] else old
    return {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
            "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda a, b: b}[op](old, x[0])


def run(emitted: Any, lanes: int, grid: tuple[int, ...], arrays: dict[str, np.ndarray],
        values: dict[str, Any]) -> None:
    """Executes all groups, one after the other, on raw arrays (changed in place)."""
    pointers, memory, valid = emulate_ptx._arena(arrays)
    code = compile(body_of(emitted.source), "<emitted>", "exec")
    for number in range(prod(grid)):
        common = {"shared": np.full(max(1, emitted.shared_bytes), 0xFF, np.uint8)}
        team = Team(lanes)

        def body(i: int, number: int = number, team: Team = team, common: Any = common) -> None:
            block = Lane(1, number, memory, valid, 1)
            block.begin(i, team, common)
            names = namespace(block, emitted.source)
            with np.errstate(all="ignore"):
                exec(code, names)
                names[emitted.name](*[emulate_ptx._value(p, pointers, values, grid)
                                      for p in emitted.parameters])

        team.run(body)
    for name, array in arrays.items():
        at = pointers[name]
        array.reshape(-1).view(np.uint8)[:] = memory[at:at + array.nbytes]


def _prepared(kernel: Any, args: tuple, groups: Any, lanes: int | None, target: str) -> Any:
    """(bound, function, config, lanes, grid, emitted, raw arrays, values of other parameters)"""
    bound, function, chosen, count, grid, schedule = tile_gpu.prepare(
        kernel, copy.deepcopy(args), {}, groups, lanes)
    _, emitted = emit(function, count, parse_target(target), tile_gpu.facts_of(function, bound),
                      False, schedule)
    arrays = {p.value.name: np.array(bound.values[p.value.name].flat) for p in function.params
              if isinstance(p.type, GlobalTensor)}
    values: dict[Any, Any] = {p.name: extent(p.name, bound) for p in emitted.parameters
                              if p.kind == "dim"}
    values |= {p.name: np.asarray(bound.values[p.name]).reshape(-1)[0]
               for p in emitted.parameters if p.kind == "scalar"}
    values |= {(p.kind, p.axis): tile_gpu._value(p, bound, {}, {}, grid, kernel)
               for p in emitted.parameters if p.kind in ("seed", "replays")}
    return bound, function, chosen, count, grid, emitted, arrays, values


def compare(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80") -> None:
    """Asserts that interpreter and emulated lanes leave the same arrays."""
    bound, function, chosen, count, grid, emitted, arrays, values = _prepared(
        kernel, args, groups, lanes, target)
    values |= dict.fromkeys(("claim", "report", "kernel"), 0)  # no memory is there
    run(emitted, count, grid, arrays, values)
    interpret(function, bound, chosen, count, kernel.__name__, key=tile_gpu.LAUNCH_KEY)
    for name, got in arrays.items():
        memory = bound.values[name]
        tile_gpu.same(*(decode(x, memory.numeric.dtype) for x in (got, memory.flat)), 0, 0, name)


def printed(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80") -> list[str]:
    """The lines that emulated lanes print, in no order."""
    *_, count, grid, emitted, arrays, values = _prepared(kernel, args, groups, lanes, target)
    arrays |= {"count": np.zeros(1, np.int64), "lines": np.zeros(LINES * WORDS, np.int64)}
    pointers = emulate_ptx._arena(arrays)[0]
    run(emitted, count, grid, arrays, values | {"kernel": 0} | {
        n: pointers[n] for n in ("count", "lines")})
    rows = arrays["lines"].reshape(LINES, WORDS)[:int(arrays["count"][0])]
    found = [Failure.of(row.tolist()) for row in rows]
    return [ReportSite(*emitted.sites[f.site]).text(f.values) for f in found if f is not None]


__all__ = ["NOBODY", "compare", "printed", "run"]
