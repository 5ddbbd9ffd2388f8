"""Indexed ops with the indexed dimension split: each rank sees to the indices in its own block.

    take         y[i] = x[ids[i]]        a rank gives its rows, zeros for others: a pending sum
    take_along   the same along an axis
    segment_sum  y[ids[i]] += u[i]       a rank makes its block, from the u[i] that belong there
    add_along    the same along an axis

So the table of an embedding, split by rows, is never gathered, nor is its gradient; Shoeybi et al.
2019, arXiv:1909.08053, section 3. The letter of the split dimension is `SPLIT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tessera.graph import functions as F
from tessera.graph.ir import Node
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tessera.tensor import Tensor

from ..layout import Layout
from ..partition import extents
from .layout_changes import block

SPLIT = "Z"


def can_mask(node: Node) -> bool:
    """Whether a node is one of these ops, on numbers: bools have no sum."""
    return node.op.indexed is not None and node.inputs[0].aval.dtype.kind != "bool"


def _reads(node: Node) -> bool:
    """Whether the indexed dimension is one of operand 0, else of the result."""
    return node.op.indexed is not None and node.op.indexed.reads


def is_masked(node: Node, ins: Sequence[Layout], outs: Sequence[Layout]) -> bool:
    """Whether the indexed dimension is split."""
    if not can_mask(node):
        return False
    at = ins[0] if _reads(node) else outs[0]
    return bool(at.axes_of(node.attrs["axis"]))


def run_masked(node: Node, parts: Sequence[Tensor], ins: Sequence[Layout], outs: Sequence[Layout],
               rank: int, shape: tuple[int, ...]) -> Tensor:
    """One of these ops on the parts of a rank. shape: of its part of the result"""
    values, ids = parts
    reads, axis = _reads(node), node.attrs["axis"]
    at, whole = (ins[0], node.inputs[0].aval) if reads else (outs[0], node.outputs[0].aval)
    lo, hi = block(at, rank, axis, extents(whole), whole.dtype)
    if hi == lo or not prod(values.shape) or not prod(shape):
        return F.zeros(shape, whole.type)
    ids = apply(OPS["check_index"], ids, extent=extents(whole)[axis], wrap=True)
    inside = F.logical_and(ids >= lo, ids < hi)
    own = F.where(inside, ids - lo, 0 * ids)
    if reads:
        y = apply(node.op, values, own, **node.attrs)
        return _keep(y, inside, node)
    return apply(node.op, _keep(values, inside, node), own, axis=axis, extent=hi - lo)


def _keep(x: Tensor, inside: Tensor, node: Node) -> Tensor:
    """x where the index is inside, else zeros; the dimensions of ids begin at the axis."""
    if node.op.indexed is not None and not node.op.indexed.along:
        axis, count = node.attrs["axis"], inside.ndim
        inside = F.reshape(
            inside, (1,) * axis + tuple(inside.shape) + (1,) * (x.ndim - axis - count))
    return apply(OPS["where"], inside, x, F.zeros((), x.type))
