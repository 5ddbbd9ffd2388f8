"""Matmuls whose operands go along different extents: x of "K" and w of "L" by one loop.

What lies beyond the shorter one counts as 0, so the matmul is right where the two are equal, and
where a part is meant: a run that is checked says it, when they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.ir import Function, Op, Operand, SSAValue, defining_ops, walk
from tessera.tile.ir.types import GlobalTensor

SAME = ("convert", "edge_mask")  # elements where they were


@dataclass(frozen=True)
class ContractedPart:
    """What an operand is of along the axis that is summed: a tensor's axis from an offset on."""

    tensor: str
    dim: str
    offset: Operand


Doubted = tuple[ContractedPart, ContractedPart, SourceLine | None]


def matmuls_of_other_extents(function: Function) -> Iterator[Doubted]:
    """Of operands that are boxes of tensors, as far along each of them."""
    made = defining_ops(function.body)
    tensors = {p.value: p.type for p in function.params if isinstance(p.type, GlobalTensor)}
    for op in walk(function.body):
        if isinstance(op, Op) and op.name == "matmul":
            x, y = (_contracted_part(made, tensors, op.args[i], 1 - i) for i in (0, 1))
            if x is None or y is None or x.dim.isdigit() and y.dim.isdigit():
                continue  # who has written both extents as numbers has written a part
            if x.dim != y.dim and x.offset == y.offset:
                yield x, y, op.where


def _contracted_part(made: dict[Operand, Op], tensors: dict[SSAValue, GlobalTensor], x: Operand,
                     axis: int) -> ContractedPart | None:
    op = made.get(x)
    while op is not None and (op.name in SAME or op.name == "transpose"):
        axis = 1 - axis if op.name == "transpose" else axis
        x = op.args[0]
        op = made.get(x)
    if op is None or op.name != "load_tile":
        return None
    view = made.get(op.args[0]) if isinstance(op.args[0], SSAValue) else None
    if view is None or view.name != "view" or view.args[0] not in tensors:
        return None
    place = view.args[0]
    assert isinstance(place, SSAValue)
    along = view.attr["kept"][axis]
    return ContractedPart(place.name, str(tensors[place].dims[along]), view.args[1 + along])


__all__ = ["ContractedPart", "matmuls_of_other_extents"]
