"""Whole kernels: the emitted source of a launch executed, and compared with the interpreter."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

import tile_gpu
from tessera.numerics import decode, pack, unpack
from tessera.runtime.flags import LINES, WORDS, Failure, ReportSite
from tessera.runtime.sentinel_words import CLEAN, SITE_WORDS, BadElements, WatchedLaunch
from tessera.runtime.target import parse_target
from tessera.tensor import Tensor
from tessera.tile.cuda.compile import emit
from tessera.tile.interpreter.arguments import allocate
from tessera.tile.interpreter.launch import extent
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.types import GlobalTensor

from .block import Block
from .memory import GlobalMemory, SharedMemory
from .registers import DivergedError
from .threads import Team, Thread


@dataclass
class Emulated:
    """counts: how often each instruction ran, over all warps as one.  function: after lowering."""

    counts: dict[str, int]
    emitted: Any
    function: Any

    def ran(self, start: str) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(start))


@dataclass
class Prepared:
    """A call before its launch. arrays: what a GPU would be given, by parameter."""

    bound: Any
    function: Any
    config: Any
    threads: int
    grid: tuple[int, ...]
    lowered: Any
    emitted: Any
    memories: dict[str, Memory]
    arrays: dict[str, np.ndarray]
    values: dict[Any, Any]


def compare(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80", rtol: float | None = None, atol: float | None = None,
            exact: bool = False, lockstep: bool = True, schedule: Any = None, facts: Any = None,
            **kwargs: Any) -> Emulated:
    """Asserts that the emulated kernel and the interpreter leave the same arrays.

    exact: the same codes. lockstep=False: one thread at a time. rtol, atol: 1e-5, or 0 without
    lockstep.
    """
    usual = 1e-5 if lockstep else 0.0
    rtol, atol = (usual if t is None else t for t in (rtol, atol))
    call = _prepared(kernel, args, kwargs, groups, lanes, target, schedule, facts)
    counts = run(call.emitted, call.threads, call.grid, call.arrays, call.values, lockstep)
    result, _ = interpret(call.function, call.bound, call.config, call.threads, kernel.__name__,
                          key=tile_gpu.LAUNCH_KEY)
    returned = dict(zip(call.function.result[1:], result if isinstance(result, tuple) else (
        result,), strict=False))
    for name, memory in call.memories.items():
        dtype, got = memory.numeric.dtype, call.arrays[name]
        if dtype.packed:
            got = unpack(got, dtype, memory.shape[-1]).reshape(-1)
        wanted = memory.flat
        if exact:
            _same_codes(got, wanted, name)
            continue
        numbers = decode(got, dtype).reshape(memory.shape)
        want = decode(wanted, dtype).reshape(memory.shape) if name in call.bound.values \
            else _numbers(returned[name]).astype(numbers.dtype).reshape(numbers.shape)
        tile_gpu.same(numbers, want, rtol, atol, name)
    return Emulated(counts, call.emitted, call.lowered)


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(x.numpy() if isinstance(x, Tensor) else x)


def _same_codes(got: np.ndarray, wanted: np.ndarray, name: str) -> None:
    a, b = (np.ascontiguousarray(x).view(f"u{wanted.dtype.itemsize}") for x in (got, wanted))
    wrong = a != b
    assert not wrong.any(), f"{name}: {wrong.sum()} codes differ, first at " \
        f"{np.argwhere(wrong)[0]}: {a[wrong][0]:#x}, wanted {b[wrong][0]:#x}"


def printed(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80") -> list[str]:
    """The lines that threads print, in no order."""
    call = _prepared(kernel, args, {}, groups, lanes, target, None, None)
    arrays = call.arrays | {"count": np.zeros(1, np.int64),
                            "lines": np.zeros(LINES * WORDS, np.int64)}
    run(call.emitted, call.threads, call.grid, arrays, call.values, lockstep=False)
    rows = arrays["lines"].reshape(LINES, WORDS)[:int(arrays["count"][0])]
    found = [Failure.of(row.tolist()) for row in rows]
    return [ReportSite(*call.emitted.sites[f.site]).text(f.values) for f in found if f is not None]


def counted(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80", counts: bool = False, **kwargs: Any
            ) -> dict[tuple[str, int], BadElements]:
    """What the sentinels of the tensors of a call count, by (what and tensor, line). counts: of
    those alone that the kernel itself has watched."""
    call = _prepared(kernel, args, kwargs, groups, lanes, target, None, None,
                     kernel.watched_tensors if counts else _all_aligned)
    words = np.tile(CLEAN, len(call.emitted.sites)).view(np.int64)
    arrays = call.arrays | {"sentinels": words}
    try:
        run(call.emitted, call.threads, call.grid, arrays, call.values)
    except DivergedError:  # nothing is written yet
        run(call.emitted, call.threads, call.grid, arrays, call.values, lockstep=False)
    sites = [ReportSite(*s) for s in call.emitted.sites]
    launch = WatchedLaunch(kernel.__name__, sites, {n: m.shape for n, m in call.memories.items()})
    rows = words.view(np.uint64).reshape(-1, SITE_WORDS)
    return {(f"{s.formats[0]} {s.message}", s.where.line): BadElements.of(launch, s, row)
            for s, row in zip(sites, rows, strict=True) if (row != CLEAN).any()}


def _all_aligned(function: Any) -> None:
    """Stands for every tensor."""


def run(emitted: Any, threads: int, grid: tuple[int, ...], arrays: dict[str, np.ndarray],
        values: dict[Any, Any], lockstep: bool = True) -> dict[str, int]:
    """Executes all blocks, one after the other, on raw arrays, changed in place.

    values: of the other parameters, by name; by (kind, axis) of a seed. Returns how often each
    instruction ran.
    """
    memory = GlobalMemory(arrays)
    counts: dict[str, int] = {}
    for number in range(prod(grid)):
        for block in _blocks(emitted, threads, grid, number, memory, values, lockstep):
            for name, n in block.counts.items():
                counts[name] = counts.get(name, 0) + n
    memory.copy_back()
    return counts


def _blocks(emitted: Any, threads: int, grid: tuple[int, ...], number: int, memory: GlobalMemory,
            values: dict[Any, Any], lockstep: bool) -> list[Block]:
    """One block, executed: as itself, or as its threads."""
    def execute(block: Block) -> None:
        block.blocks = prod(grid)
        given = [block.builder.register(_value(p, memory, values, grid), p.abi)
                 for p in emitted.parameters]
        block.run(emitted.source, emitted.name, given)

    if lockstep:
        block = Block(threads, number, memory, emitted.shared_bytes)
        execute(block)
        return [block]
    team, shared = Team(threads), SharedMemory(max(1, emitted.shared_bytes))
    each: list[Block] = [Thread(t, team, number, memory, shared) for t in range(threads)]
    team.run(lambda t: execute(each[t]))
    return each


def _value(p: Any, memory: GlobalMemory, values: dict[Any, Any], grid: tuple[int, ...]) -> Any:
    if p.kind in ("tensor", "count", "lines", "sentinels", "calls", "table"):
        return memory.pointers[p.name]
    if p.kind == "axis":
        return grid[p.axis]
    if p.kind == "groups":
        return prod(grid)
    return values[(p.kind, p.axis) if p.kind in ("seed", "replays") else p.name]


def _prepared(kernel: Any, args: tuple, kwargs: dict[str, Any], groups: Any, lanes: int | None,
              target: str, schedule: Any, facts: Any, watched: Any = None) -> Prepared:
    bound, function, config, count, grid, _ = tile_gpu.prepare(
        kernel, copy.deepcopy(args), kwargs, groups, lanes)
    facts = facts or tile_gpu.facts_of(function, bound)
    if watched is not None:
        names = facts.aligned if watched is _all_aligned else watched(function)
        facts = replace(facts, watched=frozenset(names), held=kernel.held_lines)
    lowered, emitted = emit(function, count, parse_target(target), facts, False, schedule)
    memories = {p.value.name: _memory(p, bound) for p in function.params
                if isinstance(p.type, GlobalTensor)}
    values: dict[Any, Any] = {}
    for p in emitted.parameters:
        if p.kind == "dim":
            values[p.name] = extent(p.name, bound)
        elif p.kind == "scalar":
            values[p.name] = np.asarray(bound.values[p.name]).reshape(-1)[0]
        elif p.kind in ("claim", "report", "kernel"):
            values[p.name] = 0  # a report would go where no memory is
        elif p.kind in ("seed", "replays"):
            values[p.kind, p.axis] = tile_gpu._value(p, bound, {}, {}, grid, kernel)
    return Prepared(bound, function, config, count, grid, lowered, emitted, memories,
                    {n: _raw(m) for n, m in memories.items()}, values)


def _memory(p: Any, bound: Any) -> Memory:
    """Of a tensor parameter; results are made here."""
    if p.role != "output":
        return bound.values[p.value.name]
    shape = tuple(extent(str(d), bound) for d in p.type.dims)
    return Memory(p.value.name, shape, p.type.numeric,
                  allocate(shape, p.type.numeric, True).reshape(-1))


def _raw(memory: Memory) -> np.ndarray:
    """The bytes that a GPU would be given."""
    if memory.numeric.dtype.packed:
        return pack(memory.flat.reshape(-1, memory.shape[-1]), memory.numeric.dtype)
    return np.array(memory.flat)
