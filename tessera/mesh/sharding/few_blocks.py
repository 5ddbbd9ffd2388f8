"""Sums that have time are sent by few of NCCL's blocks, each of which takes a multiprocessor.

The gradient of a weight is a matmul of 128 blocks, by the choice of place_blocks.py for a chip of
132 multiprocessors. Beside four blocks of NCCL it still is one wave, beside seven it is two. Four
take longer for a message. So they send what is beside matmuls of the backward pass that take
longer still; the last sums, for which the optimizer waits, go by as many as NCCL likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tessera import hooks

from ..device_mesh import Mesh
from ..partition import extents, local_shape
from .collective_order import REDUCTIONS
from .partitioned_steps import CutProduct, LayoutHop, PartitionedOp, Step, Together

FEW = 4
SLOWER = 2.7  # than the model of the planner says, beside matmuls: 1.56 ms for 0.58 (134 MB, H200)


def send_by_few(steps: Sequence[Step], mesh: Mesh) -> list[Step]:
    """The steps with such sums by few blocks."""
    beside, out = 0.0, list[Step]()  # microseconds of matmuls up to the next message
    for step in reversed(steps):
        if isinstance(step, PartitionedOp | CutProduct):
            beside = beside + _matmul_us(step, mesh) if isinstance(step, PartitionedOp) else 0.0
            out.append(step)
            continue
        moves = step.moves if isinstance(step, Together) else (step,)
        if moves[0].hop.kind in REDUCTIONS and SLOWER * _sum_us(moves, mesh) < beside:
            moves = tuple(replace(move, blocks=FEW) for move in moves)
            step = Together(moves) if isinstance(step, Together) else moves[0]
        if moves[0].hop.kind not in ("slice", "term"):
            beside = 0.0
        out.append(step)
    return out[::-1]


def _matmul_us(step: PartitionedOp, mesh: Mesh) -> float:
    node = step.node
    if node.op.name != "matmul" or step.bodies:
        return 0.0
    (a, _), (y,) = node.inputs, node.outputs
    inner = local_shape(step.ins[0], extents(a.aval), 0, a.aval.dtype)[-1]
    out = prod(local_shape(step.outs[0], extents(y.aval), 0, y.aval.dtype))
    return hooks.step_times.get().matmul_us(2.0 * out * inner, a.aval.dtype, mesh)


def _sum_us(moves: Sequence[LayoutHop], mesh: Mesh) -> float:
    hop = moves[0].hop
    size = sum(prod(local_shape(m.hop.source, extents(m.value.aval), 0, m.value.aval.dtype))
               * m.value.aval.dtype.bits / 8 for m in moves)
    return hooks.step_times.get().collective_us(hop.kind, size, mesh, hop.axes)


__all__ = ["FEW", "send_by_few"]
