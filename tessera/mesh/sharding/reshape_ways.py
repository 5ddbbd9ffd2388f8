"""Reshapes that join dimensions of which one behind the first is split, and that part them again.

    [B, T, D] -> [B*T, D]       T over sp: of each of B rows a rank has T/n elements in turn
                                (-, sp, -) -> (sp cyclic T/n, -)
                                B over dp, a row on each: its blocks follow each other
                                (dp, sp, -) -> (dp*sp, -)

So matmuls of sequences, which multiply all rows as one matrix, leave sequences where they are. T is
cut evenly; of other layouts only the first dimension of a run stays split (dimension_labels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tessera.graph.ir import Node

from ..device_mesh import Mesh
from ..layout import Layout, Split
from ..partition import extents, group_of
from .dimension_labels import reshape_runs

WHOLE = Split()


def reshaped(node: Node, given: Sequence[Layout]) -> tuple[Layout, Layout] | None:
    """The layouts of a reshape's operand and result that leave everything where it is, where labels
    do not find them; None for other nodes, and where there are none."""
    if node.op.name != "reshape" or group_of(node.inputs[0].aval.dtype) > 1:
        return None
    at = given[0].settled().unmarked()
    source, target = extents(node.inputs[0].aval), extents(node.outputs[0].aval)
    if any(n == 1 and at.axes_of(d) for d, n in enumerate(source)):  # one rank has it, others none
        return None
    splits, found = [WHOLE] * len(target), False
    for left, right in reshape_runs(source, target):
        a, b = ([d for d in left if source[d] != 1], [d for d in right if target[d] != 1])
        if not any(at.axes_of(d) for d in a):
            continue
        if len(a) == len(b) == 1:
            splits[b[0]] = at.splits[a[0]]
            continue
        joins = len(b) == 1
        own = ([at.splits[d] for d in a], [source[d] for d in a]) if joins else (
            [at.splits[a[0]]], [target[d] for d in b])
        made = (_merged if joins else _parted)(*own, at.mesh) if 1 in (len(a), len(b)) else None
        if made is None:
            return None
        for d, split in zip(b, made, strict=True):
            splits[d] = split
        found = True
    return (at, Layout(at.mesh, tuple(splits))) if found else None


def _merged(splits: Sequence[Split], shape: Sequence[int], mesh: Mesh) -> list[Split] | None:
    """The split of dimensions of this shape as one."""
    first, second, *rest = splits
    n, rows = mesh.size(second.axes), mesh.size(first.axes)
    if not second.axes or any(s.axes for s in rest) or shape[1] % n or (
            any(s.cyclic or s.unit > 1 for s in (first, second))):
        return None
    if not first.axes:
        return [Split(second.axes, prod(shape[1:]) // n)]
    return [Split((*first.axes, *second.axes))] if rows == shape[0] else None


def _parted(splits: Sequence[Split], shape: Sequence[int], mesh: Mesh) -> list[Split] | None:
    """The splits of these dimensions of one that lies so."""
    (joined,) = splits
    rest = [WHOLE] * (len(shape) - 2)
    if joined.cyclic:
        n = mesh.size(joined.axes)
        fits = joined.unit == 1 and joined.cyclic * n == prod(shape[1:]) and shape[1] % n == 0
        return [WHOLE, Split(joined.axes), *rest] if fits else None
    for i in range(1, len(joined.axes)):
        first, second = joined.axes[:i], joined.axes[i:]
        if joined.unit == 1 and mesh.size(first) == shape[0] and shape[1] % mesh.size(second) == 0:
            return [Split(first), Split(second), *rest]
    return None


__all__ = ["reshaped"]
