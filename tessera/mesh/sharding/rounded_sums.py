"""What is rounded behind a sum of ranks is rounded before it is whole, on meshes of GPUs.

    cast(all_reduce(x), bf16)   ->   all_gather(cast(reduce_scatter(x), bf16))

An all_reduce is a reduce_scatter and an all_gather in any case; so the second half sends the
narrower type. Values are the same: an element is rounded where its sum is made. A sum that has time
until it is read, such as that of a gradient, stays one message: it runs beside other steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from tessera import hooks

from ..device_mesh import Mesh
from ..partition import extents, local_shape
from .layout_changes import hops
from .partitioned_steps import Held, LayoutHop, PartitionedOp, Step, reads

LEAST_GAIN = 1.1  # by the model of the planner


def round_before_gather(steps: Sequence[Step], outputs: Collection[Held], mesh: Mesh
                        ) -> list[Step]:
    """outputs: what the program returns, as it lies."""
    readers = defaultdict[Held, list[Step]](list)
    for step in steps:
        for held in reads(step):
            readers[held].append(step)
    instead: dict[Step, list[Step]] = {}
    for step, cast in zip(steps, steps[1:], strict=False):
        if not isinstance(step, LayoutHop) or not isinstance(cast, PartitionedOp):
            continue
        whole = step.value, step.hop.target
        if step.hop.kind == "all_reduce" and cast.node.op.name == "cast" and (
                readers[whole] == [cast] and whole not in outputs):
            if made := _in_halves(step, cast, mesh):
                instead[step], instead[cast] = made[:1], made[1:]
    return [s for step in steps for s in instead.get(step, [step])]


def _in_halves(move: LayoutHop, cast: PartitionedOp, mesh: Mesh) -> list[Step] | None:
    """The reduce_scatter, the cast of a part and the all_gather; None where that does not pay, or
    rows do not divide."""
    hop, shape, result = move.hop, extents(move.value.aval), cast.node.outputs[0]
    wide, narrow = move.value.aval.dtype, result.aval.dtype
    n = mesh.size(hop.axes)
    if hop.source.op != "sum" or narrow.kind != "float" or not shape or shape[0] % n or (
            hop.target.axes_of(0)) or cast.outs[0] != hop.target:
        return None
    part = hop.target.with_split(0, hop.axes)
    size, us = prod(local_shape(hop.target, shape, 0, wide)), hooks.step_times.get().collective_us
    wide_size, narrow_size = (size * t.bits / 8 for t in (wide, narrow))
    halves = us("reduce_scatter", wide_size, mesh, hop.axes) + us("all_gather", narrow_size, mesh,
                                                                  hop.axes)
    if us("all_reduce", wide_size, mesh, hop.axes) < LEAST_GAIN * halves:
        return None
    (scatter,), (gather,) = hops(hop.source, part, shape, wide), hops(part, hop.target, shape,
                                                                      narrow)
    return [replace(move, hop=scatter), replace(cast, ins=(part,), outs=(part,)),
            LayoutHop(result, gather, move.why, move.where)]


__all__ = ["round_before_gather"]
