"""Stores that go along one extent by blocks of another: y of "N" written at tile_m.

That is right where the two are equal, and where a part is meant, so that only a run that is
checked says it, when the extents differ. And stores by groups whose number the launch says: fewer
than go along the axis leave its end.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.ir import Const, For, Function, Op, Operand, SSAValue, defining_ops, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.passes.group_blocks import blocks_of_grid, times_group
from tessera.tile.passes.written_arguments import read_parameters


@dataclass(frozen=True)
class OtherExtent:
    """A store to `tensor` along `axis`, of extent `dim`, at blocks of the extent `of`."""

    tensor: str
    axis: int
    dim: str
    of: str
    where: SourceLine | None


@dataclass(frozen=True)
class GroupStore:
    """A store to `tensor` along `axis`, of extent `dim`, of `size` elements by each group along
    axis `of` of the grid, or of all where it is None."""

    tensor: str
    axis: int
    dim: str
    of: int | None
    size: int
    where: SourceLine | None


def stores_by_other_extents(function: Function) -> Iterator[OtherExtent]:
    """Of tensors that one store alone touches: what others leave, or need, is not known here."""
    made = defining_ops(function.body)
    blocks = _blocks(function, made)
    for op, view, tensor, kind in _only_stores(function, made):
        for axis, (at, dim) in enumerate(zip(view.args[1:], kind.dims, strict=False)):
            of = blocks.get(at)
            if of is not None and of != str(dim):
                yield OtherExtent(tensor.name, axis, str(dim), of, op.where)


def stores_by_groups(function: Function) -> Iterator[GroupStore]:
    """As above, of groups that the launch counts: group_id(axis) * size along an axis."""
    if function.launch not in ("given", "elements"):
        return
    made = defining_ops(function.body)
    for op, view, tensor, kind in _only_stores(function, made):
        for axis, (at, dim, size) in enumerate(zip(view.args[1:], kind.dims, view.attr["box"],
                                                   strict=False)):
            of, step = times_group(at, made) or (None, None)
            if isinstance(step, Const) and step.value == size:
                yield GroupStore(tensor.name, axis, str(dim), of, size, op.where)


@dataclass(frozen=True)
class StoreWithGaps:
    """A store to `tensor` along `axis` of `size` elements at each `step`-th."""

    tensor: str
    axis: int
    size: int
    step: int
    where: SourceLine | None


def stores_with_gaps(function: Function) -> Iterator[StoreWithGaps]:
    """As above, of blocks that begin further from each other than they are long. Between those of
    a loop that begins at a number of the group's, other groups may store."""
    made = defining_ops(function.body)
    loops = {n.var.value: n.step for n in walk(function.body) if isinstance(n, For)
             and isinstance(n.lo, Const)}
    for op, view, tensor, _ in _only_stores(function, made):
        for axis, (at, size) in enumerate(zip(view.args[1:], view.attr["box"], strict=False)):
            step = loops.get(at) if isinstance(at, SSAValue) else None
            if step is None:
                step = (times_group(at, made) or (None, None))[1]
            if isinstance(step, Const) and step.value > size > 1:
                yield StoreWithGaps(tensor.name, axis, size, int(step.value), op.where)


def _only_stores(function: Function, made: dict[Operand, Op]
                 ) -> Iterator[tuple[Op, Op, SSAValue, GlobalTensor]]:
    """(store, its view, the tensor, its type) of tensors that one store alone touches."""
    tensors = {p.value: p.type for p in function.params if isinstance(p.type, GlobalTensor)}
    read = read_parameters(function)
    stores: dict[Operand, list[Op]] = {}
    for op in walk(function.body):
        if isinstance(op, Op) and OPS[op.name].writes:
            stores.setdefault(_base_of(made, op.args[OPS[op.name].place]), []).append(op)
    for place, kind in tensors.items():
        if len(stores.get(place, ())) != 1 or place.name in read:
            continue
        (op,) = stores[place]
        view = made.get(op.args[0]) if isinstance(op.args[0], SSAValue) else None
        if op.name == "store_tile" and view is not None and view.name == "view" and (
                view.args[0] == place):
            yield op, view, place, kind


def _base_of(made: dict[Operand, Op], x: Operand) -> Operand:
    """The tensor or buffer of which x is a part."""
    while x in made and OPS[made[x].name].alias:
        x = made[x].args[0]
    return x


def _blocks(function: Function, made: dict[Operand, Op]) -> dict[Operand, str]:
    """Where blocks of an extent begin: the number of the group by their size, or a loop's."""
    dims = {p.value: p.value.name for p in function.params if p.role == "dim"}
    found: dict[Operand, str] = {}
    for value, grid in blocks_of_grid(
            function, made, lambda x: x.value if isinstance(x, Const) else None):
        found[value] = grid.dim
    for loop in walk(function.body):
        if isinstance(loop, For) and loop.hi in dims and isinstance(loop.hi, SSAValue):
            found[loop.var.value] = dims[loop.hi]
    return found


__all__ = ["GroupStore", "OtherExtent", "StoreWithGaps", "stores_by_groups",
           "stores_by_other_extents", "stores_with_gaps"]
