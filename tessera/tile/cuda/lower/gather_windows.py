"""Views of unfolded images without copies that unfold: their pixels are gathered, or scattered.

A tile whose columns lie in one pixel of each window is gathered in rows of channels. Others, and
those whose columns may begin anywhere, are gathered element by element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tessera.numerics import i32, i64
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, is_op, map_blocks, out
from tessera.tile.ir.ir import Const, Function, Node, Op, Operand, walk
from tessera.tile.passes.integer_facts import Knowledge


def gather_windows(function: Function) -> Function:
    """The function with every load of windows as a gather, every store as a scatter."""
    views = {out(n): n for n in walk(function.body) if is_op(n, "windows")}
    if not views:
        return function
    work = _Accesses(function, views)
    return replace(function, body=map_blocks(function.body, work.block))


class _Accesses:
    def __init__(self, function: Function, views: dict[Any, Op]):
        self.maker, self.views = Maker(function), views
        self.known = Knowledge(function, frozenset())

    def block(self, nodes: Nodes) -> Iterable[Node]:
        for node in nodes:
            if is_op(node, "load_tile", "store_tile") and node.args[0] in self.views:
                view = self.views[node.args[0]]
                columns, channels = view.attr["columns"], view.attr["channels"]
                access = _Access(self.maker, view, node)
                divisor = self.known.divisor(view.args[2])
                if channels % columns == 0 and divisor % (columns & -columns) == 0 == (
                        columns & (columns - 1)):
                    access.rows()
                else:
                    access.elements()
                yield from access.made
            elif not is_op(node, "windows"):
                yield node


class _Access:
    """One load or store: the ops that are put in its place."""

    def __init__(self, maker: Maker, view: Op, access: Op):
        self.maker, self.access, self.made = maker, access, list[Node]()
        self.attr, (self.x, self.place, self.column) = view.attr, view.args

    def op(self, name: str, *args: Operand | int, **attrs: Any) -> Any:
        given = [Const(a, i32) if isinstance(a, int) else a for a in args]
        self.made.append(self.maker.op(name, given, "t", where=self.access.where, **attrs))
        return out(self.made[-1])  # type: ignore[arg-type]

    def rows(self) -> None:
        """The tap is the same for all columns: rows of channels."""
        channels = self.attr["channels"]
        at = self.pixels(self.places(), self.op("floordiv", self.column, channels))
        first = self.op("mod", self.column, channels)
        self.reach(self.x, at, (Const(0, i32), first), axis=0, box=(1, self.attr["columns"]),
                   kept=(1,))

    def elements(self) -> None:
        """Each column has a tap of its own."""
        channels = self.attr["channels"]
        numbers = self.op("arange", size=self.attr["columns"], start=0, dtype=i32)
        column = self.op("expand_dims", self.op("add", numbers, self.column), axis=0)
        at = self.pixels(self.op("expand_dims", self.places(), axis=1),
                         self.op("floordiv", column, channels))
        here = self.op("ge", at, 0)
        wide, channel = (self.op("convert", x, dtype=i64) for x in (
            at, self.op("mod", column, channels)))
        at = self.op("add", self.op("mul", wide, Const(channels, i64)), channel)
        at = self.op("where", here, at, Const(-1, i64))
        flat = self.op("flattened", self.x, columns=channels)
        self.reach(flat, at, (Const(0, i32),), axis=0, box=(1,), kept=())

    def reach(self, x: Operand, at: Operand, offsets: tuple[Operand, ...], **attrs: Any) -> None:
        load = self.access.name == "load_tile"
        attrs |= {"limit": 0, **({"fill": self.access.attr["fill"]} if load else {})}
        args = (x, at, *offsets) if load else (x, self.access.args[1], at, *offsets)
        self.made.append(Op("gather" if load else "store_scatter", args, self.access.outs,
                            tuple(sorted(attrs.items())), self.access.where))

    def places(self) -> Any:
        numbers = self.op("arange", size=self.attr["rows"], start=0, dtype=i32)
        return self.op("add", numbers, self.place)

    def pixels(self, places: Any, tap: Any) -> Any:
        """The pixel that each place reads through a tap, -1 for none."""
        (KH, KW), (OH, OW), (IH, IW) = (self.attr[n] for n in ("window", "results", "images"))
        row = self.op("floordiv", places, OW)
        h, inside_h = self.along(0, self.op("mod", row, OH), self.op("floordiv", tap, KW))
        w, inside_w = self.along(1, self.op("mod", places, OW), self.op("mod", tap, KW))
        inside = self.op("and", inside_h, inside_w)
        inside = self.op("and", inside, self.op("lt", tap, KH * KW))
        image = self.op("mul", self.op("floordiv", row, OH), IH)
        at = self.op("add", self.op("mul", self.op("add", image, h), IW), w)
        return self.op("where", inside, at, -1)

    def along(self, axis: int, number: Any, tap: Any) -> tuple[Any, Any]:
        """The position in the image along one of its axes, and whether it is there."""
        stride, dilation, before, extent = (
            self.attr[n][axis] for n in ("stride", "dilation", "before", "images"))
        begin = self.op("sub", self.op("mul", number, stride), before)
        at = self.op("add", begin, self.op("mul", tap, dilation))
        return at, self.op("and", self.op("ge", at, 0), self.op("lt", at, extent))


__all__ = ["gather_windows"]
