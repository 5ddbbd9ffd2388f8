"""A kernel under the interpreter and in emulated machine instructions (emulate_ptx), on the same
arguments."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

import emulate_ptx
import tile_gpu
from tessera.numerics import decode, pack, unpack
from tessera.runtime.target import parse_target
from tessera.tile.interpreter.arguments import allocate
from tessera.tile.interpreter.launch import extent
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.types import GlobalTensor


@dataclass
class Emulated:
    """counts: how often each instruction ran, over all warps as one.  function: after lowering."""

    counts: dict[str, int]
    emitted: Any
    function: Any

    def ran(self, start: str) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(start))


def compare(kernel: Any, *args: Any, groups: Any = None, lanes: int | None = None,
            target: str = "sm_80", rtol: float = 1e-5, atol: float = 1e-5, schedule: Any = None,
            facts: Any = None, **kwargs: Any) -> Emulated:
    """Asserts that both leave the same arrays."""
    from tessera.tile.cuda.compile import emit

    bound, function, chosen, count, grid, _ = tile_gpu.prepare(
        kernel, copy.deepcopy(args), kwargs, groups, lanes)
    lowered, emitted = emit(function, count, parse_target(target),
                            facts or tile_gpu.facts_of(function, bound), False, schedule)
    memories = {p.value.name: _memory(p, bound) for p in function.params
                if isinstance(p.type, GlobalTensor)}
    arrays = {n: _raw(m) for n, m in memories.items()}
    values = {p.name: extent(p.name, bound) for p in emitted.parameters if p.kind == "dim"}
    values |= {p.name: np.asarray(bound.values[p.name]).reshape(-1)[0]
               for p in emitted.parameters if p.kind == "scalar"}
    values |= {p.name: 0 for p in emitted.parameters  # a report would go where no memory is
               if p.kind in ("claim", "report", "kernel")}
    values |= {(p.kind, p.axis): tile_gpu._value(p, bound, {}, {}, grid, kernel)
               for p in emitted.parameters if p.kind in ("seed", "replays")}
    counts = emulate_ptx.run(emitted, count, grid, arrays, values)
    result, _ = interpret(function, bound, chosen, count, kernel.__name__,
                          key=tile_gpu.LAUNCH_KEY)
    for name, memory in memories.items():
        dtype, flat = memory.numeric.dtype, arrays[name]
        if dtype.packed:
            flat = unpack(flat, dtype, memory.shape[-1]).reshape(-1)
        got = decode(flat, dtype).reshape(memory.shape)
        wanted = decode(memory.flat, dtype).reshape(memory.shape) if name in bound.values \
            else np.asarray(result.numpy()).astype(got.dtype)
        tile_gpu.same(got, wanted, rtol, atol, name)
    return Emulated(counts, emitted, lowered)


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
