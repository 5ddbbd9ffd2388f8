"""What is rounded behind a sum of ranks is rounded before it is whole, on meshes of GPUs.

    cast(all_reduce(x), bf16)   ->   all_gather(cast(reduce_scatter(x), bf16))

An all_reduce is a reduce_scatter and an all_gather in any case; so the second half sends the
narrower type. Values are the same: an element is rounded where its sum is made. A sum that has time
until it is read, such as that of a gradient, stays one message: it runs beside other steps. A sum
of narrow terms is such a sum as well: without windows its terms are sent wide (narrow_terms.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from tessera import hooks
from tessera.numerics import DType

from ..device_mesh import Mesh
from ..partition import extents, local_shape
from .layout_changes import Hop, hops
from .narrow_terms import term_dtype
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
        if step.hop.kind == "all_reduce" and whole in reads(cast) and (
                made := _narrow_halves(step, mesh)):
            instead[step] = made
        elif step.hop.kind == "all_reduce" and cast.node.op.name == "cast" and (
                readers[whole] == [cast] and whole not in outputs):
            if made := _in_halves(step, cast, mesh):
                instead[step], instead[cast] = made[:1], made[1:]
    return [s for step in steps for s in instead.get(step, [step])]


def _in_halves(move: LayoutHop, cast: PartitionedOp, mesh: Mesh) -> list[Step] | None:
    """The reduce_scatter, the cast of a part and the all_gather; None where that does not pay."""
    found, wide = halves_of(move, cast, mesh), move.value.aval.dtype
    if found is None or halves_us(move, mesh, wide, cast.node.outputs[0].aval.dtype
                                  ) * LEAST_GAIN > _us("all_reduce", move, mesh, wide):
        return None
    scatter, gather = found
    return [replace(move, hop=scatter), replace(cast, ins=(scatter.target,),
                                                outs=(scatter.target,)),
            LayoutHop(cast.node.outputs[0], gather, move.why, move.where)]


def _narrow_halves(move: LayoutHop, mesh: Mesh) -> list[Step] | None:
    """The reduce_scatter and the all_gather of narrow terms; None where that does not pay."""
    narrow, wide = move.value.aval.dtype, term_dtype(move.value, mesh.size(move.hop.axes))
    found = two_hops(move, mesh, narrow, narrow) if wide is not narrow else None
    if found is None or halves_us(move, mesh, wide, narrow) * LEAST_GAIN > _us(
            "all_reduce", move, mesh, wide):
        return None
    return [replace(move, hop=hop) for hop in found]


def halves_of(move: LayoutHop, cast: PartitionedOp, mesh: Mesh) -> tuple[Hop, Hop] | None:
    """The reduce_scatter and the all_gather of an all_reduce whose result is rounded; None where
    rows do not divide, or nothing is gained."""
    wide, narrow = move.value.aval.dtype, cast.node.outputs[0].aval.dtype
    if narrow.kind != "float" or narrow.bits >= wide.bits or cast.outs[0] != move.hop.target:
        return None
    return two_hops(move, mesh, wide, narrow)


def two_hops(move: LayoutHop, mesh: Mesh, wide: DType, narrow: DType) -> tuple[Hop, Hop] | None:
    """The reduce_scatter and the all_gather of an all_reduce; None where rows do not divide."""
    hop, shape = move.hop, extents(move.value.aval)
    if hop.source.op != "sum" or not shape or shape[0] % mesh.size(hop.axes) or (
            hop.target.axes_of(0)):
        return None
    part = hop.target.with_split(0, hop.axes)
    (scatter,), (gather,) = hops(hop.source, part, shape, wide), hops(part, hop.target, shape,
                                                                      narrow)
    return scatter, gather


def halves_us(move: LayoutHop, mesh: Mesh, wide: DType, narrow: DType, parts: float = 1) -> float:
    """Microseconds of both, of one of so many parts."""
    return _us("reduce_scatter", move, mesh, wide, parts) + _us("all_gather", move, mesh, narrow,
                                                                parts)


def _us(op: str, move: LayoutHop, mesh: Mesh, dtype: DType, parts: float = 1) -> float:
    value = move.value.aval
    size = prod(local_shape(move.hop.target, extents(value), 0, value.dtype)) * dtype.bits / 8
    return hooks.step_times.get().collective_us(op, size / parts, mesh, move.hop.axes)


__all__ = ["halves_of", "halves_us", "round_before_gather", "two_hops"]
