"""Whether a candidate fits the machine, before anything is compiled for it."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError
from tessera.runtime.generations import GENERATIONS
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import Function, Op, walk
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Buffer
from tessera.tile.passes.operation_counts import register_bytes, ring_bytes
from tessera.tile.tuning.gpus import Gpu

HEADS = ("D", "D_h")


def require_shared(function: Function) -> None:
    """Raises TileError for buffers that no target has the shared memory for, at the largest."""
    largest = max(GENERATIONS.values(), key=lambda g: g.group_shared_bytes)  # the first of them
    most = largest.group_shared_bytes
    if function.shared_bytes <= most:
        return
    made = [(d.type, d.value.name, n.where) for n in walk(function.body) if isinstance(n, Op)
            for d in n.outs if isinstance(d.type, Buffer) and d.type.space == "shared"]
    made.sort(key=lambda m: -m[0].bytes)
    parts = ", ".join(f"{name} {'x'.join(map(str, t.shape))} {t.dtype}" + f" x {t.stages}" * (
        t.stages > 1) for t, name, _ in made[:3])
    raise TileError(
        f"{function.name} needs {function.shared_bytes} bytes of shared memory, a group has at "
        f"most {most}, on {largest.target}: {parts}", where=made[0][2],
        hint="use smaller tiles or buffers, or fewer stages; go over a large array in blocks")


def require_legal(function: Function, schedule: Schedule, bound: Bound, gpu: Gpu) -> None:
    """Raises ArgumentError when a group does not fit a multiprocessor, or BD the head size."""
    if function.shared_bytes > gpu.shared_bytes:
        raise ArgumentError(f"{function.shared_bytes} bytes of shared memory, a group has "
                            f"{gpu.shared_bytes} on {gpu.name}")
    lanes, top = schedule.lanes, gpu.generation
    if lanes > top.group_threads:
        raise ArgumentError(f"{lanes} lanes, a group has at most {top.group_threads}")
    limit = min(top.thread_registers, top.registers // lanes)
    need = -(-register_bytes(function) // (4 * lanes))
    if need > limit:
        raise ArgumentError(f"the tiles that its loops carry need {need} registers of each thread, "
                            f"which has {limit} among {lanes} lanes on {gpu.name}")
    _require_head(schedule, bound)


def _require_head(schedule: Schedule, bound: Bound) -> None:
    for name in HEADS:
        size = bound.texts.get(name)
        if schedule.d is not None and size is not None and schedule.d != size:
            raise ArgumentError(f"BD={schedule.d} is not the extent {name}={size}")


def fits(function: Function, schedule: Schedule, bound: Bound, gpu: Gpu) -> bool:
    """Whether also the buffers that the compiler adds for the schedule's stages fit."""
    try:
        require_legal(function, schedule, bound, gpu)
    except ArgumentError:
        return False
    stages: Any = schedule.value("stages_")
    return function.shared_bytes + ring_bytes(function, stages) <= gpu.shared_bytes


__all__ = ["fits", "require_legal"]
