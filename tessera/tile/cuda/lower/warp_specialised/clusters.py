"""Blocks of a cluster share what all of them read.

Blocks that are neighbours in a cluster do tiles that are neighbours on the strip axis (persist.py):
of a matmul, blocks of rows with the same columns, or of columns with the same rows where tiles have
more of these; of attention without a mask, blocks of queries of a head. What does not depend on
that axis, one operand or keys and values, each block would read: so each brings some rows of it,
and they land in all of them.
That leaves the second-level cache, and the unit that copies, half of the work. A slot is filled
anew when the consumers of all blocks have read it, and a block does not end before that was said.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.persist import Order, dependence
from tessera.tile.cuda.lower.warp_specialised.program import BufferRing, Load, PipelineKnobs
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, ops_in
from tessera.tile.ir.ir import For, Function, If, Op, SSAValue, While, walk

SWIZZLED_ROWS = 8  # after which the pattern of a swizzle repeats
RANKS = 2, 3  # of tensors, in copies to several blocks


def share_loads(function: Function, pipeline: PipelineKnobs, order: Order,
                rings: tuple[BufferRing, ...]
                ) -> tuple[PipelineKnobs, Order, tuple[BufferRing, ...]]:
    """The rings with what blocks of a cluster bring for each other, where tiles on the strip axis
    take the same iterations; else, and where they read nothing together, clusters of one."""
    alone = replace(pipeline, cluster=1), order, rings
    if pipeline.cluster == 1 or pipeline.tiles == "dynamic" or order.reach:
        return alone
    strip, depends = order.order[order.outer], dependence(function)
    for node in walk(function.body):
        bounds = (node.lo, node.hi, node.step) if isinstance(node, For) else ()
        if any(isinstance(x, SSAValue) and strip in depends.get(x, ()) for x in bounds) or (
                isinstance(node, If | While) and ops_in((node,), "ring_load")):
            return alone
    same = {d.value.name for n in ops_in(function.body, "ring_load") if isinstance(n, Op)
            for d in n.outs if strip not in depends[n.args[0]]}  # type: ignore[index]
    rings = tuple(replace(r, fills=tuple(tuple(
        replace(x, blocks=pipeline.cluster) if x.name in same and _divisible(x, pipeline.cluster)
        else x for x in fill) for fill in r.fills)) for r in rings)
    if all(r.blocks == 1 for r in rings):
        return alone
    whole = max(1, order.raster // pipeline.cluster) * pipeline.cluster
    return pipeline, replace(order, raster=whole), rings


def _divisible(load: Load, blocks: int) -> bool:
    """Whether each block may bring some of a tile's rows."""
    return len(load.shape) == 2 and len(load.box) in RANKS and (
        load.shape[0] % (SWIZZLED_ROWS * blocks) == 0)


def drains(rings: tuple[BufferRing, ...], maker: Maker) -> tuple[Op, ...]:
    """What a producer waits for at its end."""
    return tuple(maker.op("ring_drain", (), ring=r.name) for r in rings if r.blocks > 1)


__all__ = ["drains", "share_loads"]
