"""Which tiles of a function want one layout, or a relabelled one, and how each follows from the
other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from tessera.tile.ir.ir import For, If, Node, Op, Operand, SSAValue, While
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import TileType
from tessera.tile.ops.indexed import shape_of

Relabel = Callable[[RegisterLayout], RegisterLayout | None]
OfRows = Callable[[SSAValue, RegisterLayout, int], RegisterLayout]


def relations(node: Node, types: dict, of_rows: OfRows) -> Iterator[
        tuple[SSAValue, SSAValue, Relabel | None, Relabel | None]]:
    """(a, b, a's layout -> b's, b's -> a's). of_rows: (numbers of rows, layout of the tile, axis)
    -> theirs"""
    def tile(x: Operand) -> bool:
        return isinstance(x, SSAValue) and isinstance(types.get(x), TileType)

    if not isinstance(node, Op):
        yield from _ties(node, tile)
        return
    ins = [x for x in node.args if tile(x)]
    if OPS[node.name].access == "scattered" and OPS[node.name].writes:
        value, index = node.args[1:3]
        small = types[index].shape
        yield (value, index, lambda layout: index_layout(node, layout, small),  # type: ignore
               _unchanged if small == types[value].shape else None)
        for d in node.outs:  # of an update: what was there before
            yield value, d.value, _unchanged, _unchanged  # type: ignore[misc]
        return
    if not node.outs or not tile(node.outs[0].value):
        return
    out = node.outs[0].value
    shape = types[out].shape
    if OPS[node.name].layouts == "reduced":
        axis = node.attr["axis"]
        joined = OPS[node.name].joined_by
        yield (ins[0], out, lambda layout: of_rows(  # type: ignore[misc]
            out, layout, axis) if joined else layout.drop(axis), None)
    elif OPS[node.name].layouts == "first":
        yield ins[0], out, lambda layout: layout.first(shape[-1]), None  # type: ignore[misc]
    elif node.name == "expand_dims":
        axis = node.attr["axis"]
        yield (ins[0], out, lambda layout: layout.insert(axis),  # type: ignore[misc]
               lambda layout: layout.drop(axis))
    elif node.name == "transpose":
        yield (ins[0], out, lambda layout: layout.permuted((1, 0)),  # type: ignore[misc]
               lambda layout: layout.permuted((1, 0)))
    elif node.name == "permute":
        axes = node.attr["axes"]
        yield (ins[0], out, lambda layout: layout.permuted(axes),  # type: ignore[misc]
               lambda layout: layout.permuted(inverse(axes)))
    elif node.name == "reshape":
        before = types[ins[0]].shape
        yield (ins[0], out, lambda layout: layout.reshaped(shape),  # type: ignore[misc]
               lambda layout: layout.reshaped(before))
    elif node.name == "gather":
        yield (node.args[1], out, _unchanged if shape == types[ins[0]].shape
               else None,  # type: ignore
               lambda layout: index_layout(node, layout, types[ins[0]].shape))
    elif OPS[node.name].multiplies:
        if len(ins) and len(node.args) == 3:
            yield node.args[2], out, _unchanged, _unchanged  # type: ignore[misc]
    elif is_elementwise(node):
        for x in ins:
            small = types[x].shape
            if small == shape:
                yield x, out, _unchanged, _unchanged  # type: ignore[misc]
            else:
                yield (x, out, None,  # type: ignore[misc]
                       functools.partial(_shrunk, x, small, of_rows))  # type: ignore[arg-type]


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes one."""
    return tuple(axes.index(i) for i in range(len(axes)))


def is_elementwise(op: Op) -> bool:
    """Whether an op maps registers to registers: operands in the result's layout."""
    record = OPS[op.name]
    return record.family == "elementwise" or record.layouts in ("same", "rows")


def index_layout(op: Op, layout: RegisterLayout, index: tuple[int, ...]) -> RegisterLayout:
    """The layout in which a gather or scatter of a tile in this one reads its positions."""
    _, first = shape_of(index, op.attr)
    for axis in reversed(range(len(layout.shape))):
        if not first <= axis < first + len(index):
            layout = layout.drop(axis)
    return layout


def _unchanged(layout: RegisterLayout) -> RegisterLayout:
    return layout


def _shrunk(x: SSAValue, shape: tuple[int, ...], of_rows: OfRows,
            layout: RegisterLayout) -> RegisterLayout:
    gone = [i for i, n in enumerate(shape) if n == 1 != layout.shape[i]]
    if len(gone) == 1:
        return of_rows(x, layout, gone[0]).insert(gone[0])
    return layout.shrunk(shape)


def _ties(node: For | While | If, tile: Callable) -> Iterator[tuple]:
    """Values that are one variable in the emitted code."""
    if isinstance(node, If):
        groups = zip(node.outs, node.thens, node.elses, strict=True)
    else:
        groups = zip(node.carried, node.yields, node.inits, strict=True)
    for made, first, second in groups:
        for x in (first, second):
            if tile(x):
                yield x, made.value, _unchanged, _unchanged


__all__ = ["OfRows", "Relabel", "index_layout", "inverse", "is_elementwise", "relations"]
