"""Blocks of an extent that is a part of an axis: tile_n along "2*N", whose last block goes on
beyond N, into the other part.

A slice ends with its tensor, not with the extent that its blocks are of. What is stored there
overwrites the other part, and what is reduced of it counts that part's elements. Extents are known
at the launch, so each launch asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tessera.dims import Dim
from tessera.errors import user_line
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import (
    Def,
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    defining_ops,
    definitions,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.group_blocks import blocks_of_grid

MASKS = ("where", "edge_mask", "inside")  # by which a kernel says itself what counts


@dataclass(frozen=True)
class ExtentBlocks:
    """Where blocks begin: in `size` elements each, of the extent `dim` that is `extent` long; loop:
    of which they are the iterations, None for those of the grid."""

    dim: str
    size: int
    extent: int
    loop: For | None


@dataclass(frozen=True)
class Beyond:
    """An access of `tensor` along `axis`, by blocks that go on beyond their own extent."""

    op: Op
    tensor: str
    axis: int
    dim: str
    block: ExtentBlocks
    first: int  # elements that belong to no block: from here on
    last: int  # and up to here


def parts_of(function: Function) -> dict[SSAValue, GlobalTensor]:
    """The tensors an axis of which is computed of other extents."""
    return {p.value: p.type for p in function.params if isinstance(p.type, GlobalTensor)
            and any(isinstance(d, Dim) and str(d) not in d.names for d in p.type.dims)}


def beyond_parts(function: Function, parts: dict[SSAValue, GlobalTensor], sizes: Mapping[str, int],
                 number: Callable[[Operand], int | None], extent: Callable[[Any], int]
                 ) -> Iterator[Beyond]:
    """parts: see parts_of; sizes: of the names that have one; number: of what is known at the
    launch; extent: of a tensor, from its text."""
    made = defining_ops(function.body)
    blocks = _blocks(function, made, sizes, number, extent)
    reach = _Reach(parts, made, blocks, number, extent)
    stores = [op for op in walk(function.body) if isinstance(op, Op) and OPS[op.name].writes]
    for op in stores:
        for found in reach(op, op.args[OPS[op.name].place]):
            if reach.overwritten(found, stores):
                yield found
    whole = {extent(str(d)) for t in parts.values() for d in t.dims if isinstance(d, Dim)
             and str(d) not in d.names}
    reduced = _reduced(function, lambda x: number(x) in whole)
    for op in made.values():
        if op.name == "load_tile" and op.outs[0].value in reduced:
            yield from reach(op, op.args[0])


class _Reach:
    """Which elements the last block of an access reaches beyond its extent."""

    def __init__(self, parts: dict[SSAValue, GlobalTensor],
                 made: dict[Operand, Op], blocks: dict[Operand, ExtentBlocks],
                 number: Callable[[Operand], int | None], extent: Callable[[Any], int]):
        self.parts, self.made, self.blocks = parts, made, blocks
        self.number, self.extent = number, extent

    def __call__(self, op: Op, place: Operand) -> Iterator[Beyond]:
        view = self.made.get(place)
        if view is None or view.name != "view" or view.args[0] not in self.parts:
            return
        tensor = view.args[0]
        assert isinstance(tensor, SSAValue)
        for axis, (at, dim, size) in enumerate(zip(view.args[1:], self.parts[tensor].dims,
                                                   view.attr["box"], strict=False)):
            found = self.start(at)
            if found is None or not isinstance(dim, Dim) or str(dim) in dim.names:
                continue
            block, offset = found
            end, whole = offset + block.extent, self.extent(str(dim))
            last = min(whole, offset + -(-block.extent // block.size) * block.size
                       + size - block.size)
            if block.dim in dim.names and block.extent % block.size and end < last:
                yield Beyond(op, tensor.name, axis, str(dim), block, end, last)

    def start(self, x: Operand) -> tuple[ExtentBlocks, int] | None:
        """The block that begins at x, and how much further on: tile_n + N."""
        if x in self.blocks:
            return self.blocks[x], 0
        op = self.made.get(x)
        if op is None or op.name not in ("add", "convert"):
            return None
        if op.name == "convert":
            return self.start(op.args[0])
        for a, b in (op.args, op.args[::-1]):
            found, more = self.start(a), self.number(b)
            if found is not None and more is not None:
                return found[0], found[1] + more
        return None

    def overwritten(self, found: Beyond, stores: list[Op]) -> bool:
        """Whether no later loop writes there: in one block after the other the last one stays."""
        loop = found.block.loop
        if loop is None:
            return True
        inner = {id(n) for n in walk(loop.body)}
        behind = False
        for op in stores:
            behind = behind or op is found.op
            view = self.made.get(op.args[0]) if isinstance(op.args[0], SSAValue) else None
            if behind and id(op) not in inner and view is not None and view.name == "view" and (
                    isinstance(view.args[0], SSAValue) and view.args[0].name == found.tensor):
                return False
        return True


def _blocks(function: Function, made: dict[Operand, Op], sizes: Mapping[str, int],
            number: Callable[[Operand], int | None], extent: Callable[[Any], int]
            ) -> dict[Operand, ExtentBlocks]:
    """Where blocks of an extent begin: the number of the group by their size, or a loop's."""
    found: dict[Operand, ExtentBlocks] = {}
    for value, grid in blocks_of_grid(function, made, number):
        found[value] = ExtentBlocks(grid.dim, grid.block, extent(grid.dim), None)
    for loop in walk(function.body):
        if not isinstance(loop, For) or number(loop.lo) != 0:
            continue
        step, end = number(loop.step), number(loop.hi)
        own = [n for n in sizes if isinstance(loop.hi, SSAValue) and loop.hi.name == n] or [
            n for n, size in sizes.items() if not isinstance(loop.hi, SSAValue) and size == end]
        if step and end and own:
            found[loop.var.value] = ExtentBlocks(own[0], step, end, loop)
    return found


def _reduced(function: Function, whole: Callable[[Operand], bool]) -> set[Operand]:
    """What a reduction of tiles has elements of, as they are or computed with, through loops and
    branches, and no mask but that of the whole axis is on the way."""
    found: set[Operand] = set()
    tiles: set[Operand] = {
        x for x, kind in definitions(function).items() if isinstance(kind, TileType)}
    while True:
        before = len(found)
        for n in [*walk(function.body)][::-1]:
            found.update(_sources(n, found, whole, tiles))
        if len(found) == before:
            return found


def _sources(n: Node, found: set[Operand], whole: Callable[[Operand], bool],
             tiles: set[Operand]) -> Iterator[Operand]:
    def joined(outs: tuple[Def, ...], *sources: tuple[Operand, ...]) -> Iterator[Operand]:
        for values in sources:
            yield from (x for d, x in zip(outs, values, strict=True) if d.value in found)

    if isinstance(n, (For, While)):
        yield from joined(n.carried, n.inits, n.yields)
    elif isinstance(n, If):
        yield from joined(n.outs, n.thens, n.elses)
    elif isinstance(n, Op):
        record = OPS[n.name]
        if record.joined_by:
            yield from n.args
        elif not any(d.value in found for d in n.outs) or n.name in MASKS:
            if n.name == "edge_mask" and n.outs[0].value in found and whole(n.args[2]):
                yield n.args[0]
        elif record.zero == "wins" and len(tiles.intersection(n.args)) > 1:
            return  # by what may be 0 there
        elif record.family == "elementwise" or n.name == "convert":
            yield from n.args


def refusal(found: Beyond) -> TileError:
    """The error of a launch."""
    block, op = found.block, found.op
    count = found.dim.removesuffix(f"*{block.dim}")
    name = block.loop.var.value.name if block.loop is not None else f"tile_{block.dim.lower()}"
    what = "overwrites" if OPS[op.name].writes else "would be reduced with"
    hint = "write the part behind it in a later loop"
    if count.isidentifier() or count.isdigit():
        hint = (f'make the part an axis, which slices end with: Tensor[..., {count}, "{block.dim}"]'
                f" and {found.tensor}[..., 0, {name}:{name}+{block.size}], passed as a reshape")
    return TileError(
        f"blocks of {block.size} along {block.dim} = {block.extent} go on beyond it: axis "
        f"{found.axis} of {found.tensor} is {found.dim}, and the last block {what} its elements "
        f"{found.first} to {found.last - 1}", code="E_EDGE", where=op.where or user_line(),
        hint=f"{hint}, or let {block.dim} be a multiple of {block.size}")


__all__ = ["Beyond", "beyond_parts", "parts_of", "refusal"]
