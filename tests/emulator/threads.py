"""Threads of a block one at a time, for kernels whose threads go their own ways.

Each is a Python thread that holds the baton until it comes to something that threads do together (a
barrier, a shuffle, a vote); what they get is computed when all that are still there have come.
Threads of a warp that ended, or never were, take no part.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tessera.numerics import decode, encode, find_dtype
from tessera.tile.cuda.instruction import Instruction

from .block import UPDATES, WARP, Block
from .memory import GlobalMemory, SharedMemory, aligned
from .registers import KINDS, Builder

TOGETHER = re.compile(r"(shfl|vote|redux|sync_threads|sync_warp)")
ATOMIC = re.compile(r"(atom|red)_([a-z]+)_(\w+?)_(global|shared)_(\w+?)_(\w+)$")
REDUX: dict[str, Callable[[list[int]], int]] = {"add": sum, "min": min, "max": max}


def _plain(x: Any, kind: str | None = None) -> Any:
    """A register of one thread needs no array of its own kind."""
    if isinstance(x, np.generic) and (kind is None or x.dtype == KINDS[kind]):
        return x
    return np.asarray(x)[()] if kind is None else np.asarray(x).astype(KINDS[kind])[()]


class ThreadBuilder(Builder):
    """One thread: conditions are Python's, and what is under one that is false has no effect."""

    register = staticmethod(_plain)

    def array(self, name: str, kind: str, count: int) -> np.ndarray:
        return self.block.arrays.setdefault(name, np.full(count, -1, KINDS[kind]))

    def read(self, array: np.ndarray, index: Any) -> Any:
        return array[_one(index)].reshape(1)

    def write(self, array: np.ndarray, index: Any, x: Any) -> None:
        array[_one(index)] = np.asarray(x).reshape(-1)[0]

    def until(self, first: Any, step: Any) -> Any:
        x, done = first, False
        while not _one(done):
            x, done = step(x)
        return x


def _one(x: Any) -> int:
    return int(np.asarray(x).reshape(-1)[0])


class Thread(Block):
    """One thread of a block; shared memory belongs to all of them, with no check of barriers."""

    builder = ThreadBuilder

    def __init__(self, t: int, team: Team, number: int, memory: GlobalMemory, shared: SharedMemory):
        super().__init__(1, number, memory, 0)
        self.t, self.team, self.shared = np.array([t], np.int32), team, shared
        self.arrays: dict[str, np.ndarray] = {}

    def read(self, space: str, at: np.ndarray, who: np.ndarray) -> np.ndarray:
        if space == "global":
            return self.memory.read(at, whole_words=True)  # for an atomic's first guess
        aligned(at)
        return self.shared.bytes[at]

    def write(self, space: str, at: np.ndarray, raw: np.ndarray, who: np.ndarray) -> None:
        if space == "global":
            self.memory.write(at, raw)
        else:
            aligned(at)
            self.shared.bytes[at] = raw

    def _by_name(self, instruction: Instruction, args: tuple) -> Any:
        name = instruction.name
        if found := ATOMIC.match(name):
            return self.atomic(found, *args)
        if name.startswith("red_add_f32x"):
            one = ATOMIC.match("red_add_f32_global_gpu_relaxed")
            for i, x in enumerate(args[1]):
                self.atomic(one, args[0] + 4 * i, x)
            return None
        if TOGETHER.match(name):
            wide = [np.broadcast_to(np.asarray(a), (1,)) for a in args]
            value = (wide[0], int(wide[1][0])) if name.startswith("shfl") else wide[0] if wide \
                else None
            return self.team.together(int(self.t[0]), name, value)
        if name.startswith("fence"):
            return None
        return super()._by_name(instruction, args)

    def atomic(self, found: Any, at: Any, *values: Any) -> Any:
        """One step: nobody else has the baton."""
        verb, op, kind, space = found.groups()[:4]
        x = [np.broadcast_to(np.asarray(v), (1,)) for v in values]
        if not self.on[0]:
            return np.zeros_like(x[-1])
        pair = "x2" in kind
        size = 4 if pair else int(kind[1:]) // 8
        place = self.bytes_at(at, size)
        aligned(place)
        memory = self.shared.bytes if space == "shared" else self.memory.bytes
        # a word of packed codes may reach beyond its array, whose last bytes it leaves alone
        assert space == "shared" or self.memory.valid[place].any(), "update outside of the arrays"
        raw = memory[place]
        if pair:
            memory[place] = _pair_sum(raw, x[0], find_dtype(kind[:-2]))
            return None
        dtype = np.dtype({"u": "u", "s": "i", "b": "i", "f": "f"}[kind[0]] + str(size))
        old = raw.view(dtype).reshape(1)
        given = [v.astype(f"i{size}").view(dtype) if v.dtype.kind == "i" else v for v in x]
        memory[place] = _updated(op, old, given).astype(dtype).view(np.uint8).reshape(1, size)
        if verb == "red":
            return None
        return old.view(f"i{size}").astype(x[-1].dtype) if x[-1].dtype.kind == "i" else old.copy()


def _pair_sum(raw: np.ndarray, word: np.ndarray, dtype: Any) -> np.ndarray:
    both = [decode(w.reshape(-1).view(dtype.numpy), dtype)
            for w in (raw, np.ascontiguousarray(word).view(np.uint8))]
    return np.asarray(encode(both[0] + both[1], dtype)).view(np.uint8).reshape(1, 4)


def _updated(op: str, old: np.ndarray, x: list[np.ndarray]) -> np.ndarray:
    if op == "cas":
        return x[1] if old[0] == x[0][0] else old
    return x[0] if op == "exch" else UPDATES[op](old, x[0])


def _taken() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Team:
    """The threads of a block, and who of them holds the baton: a lock for each, free while it is
    handed over."""

    def __init__(self, threads: int):
        self.threads = threads
        self.baton = [_taken() for _ in range(threads)]
        self.back = _taken()
        self.round: Iterator[Any] = iter(())
        self.waits: dict[int, tuple[str, Any]] = {}
        self.results: dict[int, Any] = {}
        self.live = set(range(threads))
        self.errors: list[BaseException] = []
        self.ended = False

    def together(self, t: int, name: str, value: Any) -> Any:
        """Called by a thread: gives the baton away and waits for the others."""
        self.waits[t] = (name, value)
        self._pass()
        self.baton[t].acquire()
        if self.errors:
            raise SystemExit
        return self.results.pop(t)

    def _pass(self) -> None:
        """The baton goes to the next thread of the round, or back to `run` after the last."""
        if not self.ended:
            next(self.round, self.back).release()

    def run(self, body: Callable[[int], None]) -> None:
        python = [threading.Thread(target=self._one, args=(t, body)) for t in range(self.threads)]
        for p in python:
            p.start()
        ready = list(range(self.threads))
        try:
            while ready:  # a warp gets as far ahead of the others as barriers let it
                first = ready[0] // WARP
                now = [t for t in ready if t // WARP == first]
                self.round = iter([self.baton[t] for t in now])
                self._pass()
                self.back.acquire()
                if self.errors:
                    ready = sorted(self.live)
                else:
                    ready = self._alone(first) + ready[len(now):] or self._meet()
        except BaseException as error:  # a deadlock or Ctrl-C: nobody is left waiting
            self.errors.append(error)
            self.ended = True
            for baton in filter(lambda lock: lock.locked(), self.baton):
                baton.release()
        for p in python:
            p.join()
        if self.errors:
            raise self.errors[0]

    def _one(self, t: int, body: Callable[[int], None]) -> None:
        self.baton[t].acquire()
        with contextlib.suppress(SystemExit):
            try:
                if not self.errors:
                    body(t)
            except Exception as error:
                self.errors.append(error)
        self.live.discard(t)
        self._pass()

    def _meet(self) -> list[int]:
        """The threads that go on when none can alone: the block at a barrier."""
        waits = {t: self.waits[t] for t in self.live}
        assert all(name == "sync_threads" for name, _ in waits.values()), \
            f"threads wait for each other: {waits}"
        return self._go(sorted(self.live), lambda values: [None] * len(values))

    def _alone(self, number: int) -> list[int]:
        """The threads of a warp, if all that live have come to one collective."""
        warp = [t for t in range(number * WARP, number * WARP + WARP) if t in self.live]
        names = {self.waits[t][0] for t in warp}
        if len(names) != 1 or (name := names.pop()) == "sync_threads":
            return []
        return self._go(warp, lambda values: _collective(name, values, warp))

    def _go(self, threads: list[int], f: Any) -> list[int]:
        values = [self.waits.pop(t)[1] for t in threads]
        self.results |= dict(zip(threads, f(values), strict=True))
        return threads


def _collective(name: str, values: list[Any], threads: list[int]) -> list[Any]:
    """What each thread of a warp gets."""
    if name.startswith("shfl"):
        return _shuffled(name.split("_")[1], values, [t % WARP for t in threads])
    bits = [int(v[0]) for v in values]
    if name == "vote_ballot":
        word = sum((b != 0) << (t % WARP) for b, t in zip(bits, threads, strict=True))
        return [np.array([word], np.int64).astype(np.int32)] * len(threads)
    if name.startswith("vote"):
        return [np.int32([(any if "any" in name else all)(bits)])] * len(threads)
    assert len(threads) == WARP, f"{name} of {len(threads)} threads"
    _, op, kind = name.split("_")
    bits = [b % 2**32 if kind == "u32" else b for b in bits]
    return [np.array([REDUX[op](bits)], np.int64).astype(np.int32)] * WARP


def _shuffled(mode: str, values: list[Any], lanes: list[int]) -> list[Any]:
    """From a lane that is not there: a value that nobody should use."""
    place, out = {lane: k for k, lane in enumerate(lanes)}, []
    for lane, (x, by) in zip(lanes, values, strict=True):
        source = {"idx": by % WARP, "bfly": lane ^ by, "up": lane - by, "down": lane + by}[mode]
        source = source if 0 <= source < WARP else lane
        out.append(values[place[source]][0] if source in place else np.full_like(x, -77))
    return out
