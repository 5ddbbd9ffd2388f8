"""One element along an axis, by its bits: a sum of integers in which all others are 0. What is
infinite or NaN stays what it is, and warps add integers in one instruction. The ends of pieces are
the last elements of these as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tessera.numerics import bool_, f32, i32, i64
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, is_op, map_blocks, out
from tessera.tile.ir.ir import Const, Function, Node, Op, Operand, walk
from tessera.tile.ir.types import TileType

PICKED = ("one_along", "piece_ends")


def pick_elements(function: Function) -> Function:
    """The function with ops of which GPUs know each in place of those that pick elements."""
    if not any(is_op(n, *PICKED) for n in walk(function.body)):
        return function
    maker = Maker(function)

    def block(nodes: Nodes) -> Iterable[Node]:
        for node in nodes:
            if is_op(node, *PICKED):
                yield from _picked(maker, node)
            else:
                yield node

    return replace(function, body=map_blocks(function.body, lambda nodes: tuple(block(nodes))))


def _picked(maker: Maker, pick: Op) -> list[Op]:
    made: list[Op] = []

    def op(name: str, *args: Operand, **attrs: Any) -> Any:
        made.append(maker.op(name, args, "t", where=pick.where, **attrs))
        return out(made[-1])

    def tile(x: Operand) -> TileType:
        t = maker.type(x)
        assert isinstance(t, TileType)
        return t

    (x,), type = pick.args, tile(pick.args[0])
    if pick.name == "piece_ends":
        *rows, n = type.shape
        size = pick.attr["size"]
        x = op("reshape", x, shape=(*rows, n // size, size))
        type = tile(x)
    axis = pick.attr.get("axis", len(type.shape) - 1)
    assert type.dtype is not bool_
    narrow = type.dtype if type.dtype.kind == "float" and type.dtype.bits < 32 else None
    if narrow is not None:  # registers hold it as f32
        x = op("convert", x, dtype=f32)
        type = tile(x)
    bits = {32: i32, 64: i64}[type.dtype.bits] if type.dtype.kind == "float" else None
    extent = type.shape[axis]
    at = op("reshape", op("arange", size=extent, start=0, dtype=i32),
            shape=tuple(extent if i == axis else 1 for i in range(len(type.shape))))
    where = op("eq", at, Const(pick.attr.get("at", extent - 1), i32))
    if bits is not None:
        x = op("with_bits", x, dtype=bits)
    zero = op("full", shape=type.shape, value=0, dtype=bits or type.dtype)
    found = op("reduce_sum", op("where", where, x, zero), axis=axis)
    if bits is not None:
        found = op("with_bits", found, dtype=type.dtype)
    if narrow is not None:
        op("convert", found, dtype=narrow)
    made[-1] = replace(made[-1], outs=pick.outs)
    return made


__all__ = ["pick_elements"]
