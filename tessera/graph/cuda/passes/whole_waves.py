"""Matmuls of one wave of blocks come behind a message, and what else can run beside it.

    send(bucket), dw = x.T @ dy, dx = dy @ w.T, ...   ->   send(bucket), dx = dy @ w.T, ..., dw

NCCL takes some multiprocessors while it sends. A matmul that has a block for nearly each of them is
two waves then, and takes twice as long; others take longer by what is gone. A gradient of a weight
is such a matmul, and nothing needs it soon: so it waits until the message is over, by the estimate
of overlap.py, while what follows runs in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

from ...ir import value_bytes
from ...op import by_engines
from ...schedule.group_order import group_order
from ...schedule.groups import FusionGroup
from ...schedule.target import ScheduleTarget
from ..kernels.anchors import anchor_extents, anchor_frame, whole_steps
from ..kernels.matmul_form import matmul_form
from .overlap import FLOPS_PER_BYTE, SPARE

FLOPS_PER_MOVED_BYTE = 150.0  # of matmuls, while other kernels move a byte: 600 TFLOP/s, 4 TB/s


def keep_waves_whole(groups: Sequence[FusionGroup], target: ScheduleTarget, multiprocessors: int,
                     shared_bytes: int) -> list[FusionGroup]:
    """The groups in such an order. Messages keep theirs, which all ranks have."""
    if not any(g.kind == "exchange" for g in groups):
        return list(groups)
    before = group_order(groups, target).before
    out: list[FusionGroup] = []
    held: list[int] = []
    brings: set[int] = set()  # messages under way, and views of what they bring
    left = 0.0  # of what runs beside them, in flops
    taken = SPARE  # multiprocessors, by the last of them

    def release() -> None:
        out.extend(groups[i] for i in held)
        held.clear()

    for _, batch in itertools.groupby(range(len(groups)), lambda i: _batch(groups, i)):
        run = list(batch)
        first, needs = groups[run[0]], set[int]().union(*(before[i] for i in run))
        sends = first.kind == "exchange"
        if needs & brings and first.kind != "view" and not sends:  # it waits for them
            left, brings = 0.0, set()
        if left <= 0 or sends and needs.intersection(held):
            release()
        if left > 0 and not sends and (needs.intersection(held) or first.anchor is not None and (
                first.kind == "gemm" and one_wave(first, multiprocessors, taken, shared_bytes))):
            held += run
            continue
        out += (groups[i] for i in run)
        if sends:
            brings.add(run[0])
            left = max(left, 0.0) + _bytes(first) * FLOPS_PER_BYTE
            taken = _communication_blocks(first)
        elif first.kind == "view":
            brings.update(run if needs & brings else ())
        else:
            left -= sum(_flops(groups[i]) for i in run)
    release()
    return out


def _batch(groups: Sequence[FusionGroup], i: int) -> tuple[bool, int]:
    batch = groups[i].batch
    return (False, i) if batch is None else (True, batch)


def one_wave(group: FusionGroup, multiprocessors: int, taken: int, shared_bytes: int) -> bool:
    """Whether blocks of a matmul fit a chip, but not what NCCL leaves of it."""
    assert group.anchor is not None
    frame = anchor_frame(group.anchor, group.space)
    if frame is None:
        return False
    blocks = prod(matmul_form(group, frame, shared_bytes).grid)
    return multiprocessors - taken < blocks <= multiprocessors


def _communication_blocks(message: FusionGroup) -> int:
    """Multiprocessors that it has."""
    attrs = message.nodes[0].attrs
    return 0 if by_engines(attrs) else attrs.get("blocks", 0) or SPARE


def _flops(group: FusionGroup) -> float:
    """Of matmuls that take as long."""
    if group.kind == "gemm" and group.anchor is not None:
        return 2.0 * prod(anchor_extents(group.anchor)) * whole_steps(group.anchor)
    return FLOPS_PER_MOVED_BYTE * sum(map(value_bytes, (*group.inputs, *group.outputs)))


def _bytes(group: FusionGroup) -> int:
    return max(sum(map(value_bytes, values)) for values in (group.inputs, group.outputs))


__all__ = ["keep_waves_whole", "one_wave"]
