"""Kernels of whole arrays on arguments that lie in larger ones: boxes and elements are read and
written where they are.

    with_layouts(function, {"Q": layout})     # %Q has the extents of the memory from here on
    boxes(function, "Q")                      # along which axes it takes boxes of it
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tessera.numerics import i32
from tessera.tile.ir.argument_layout import ArgumentLayout, AxisPlace
from tessera.tile.ir.ir import (
    Const,
    Def,
    Function,
    Names,
    Node,
    Op,
    Operand,
    SSAValue,
    definitions,
    operands,
    walk,
    with_regions,
)
from tessera.tile.ir.types import GlobalTensor, Scalar, View

ARITHMETIC = {"floordiv": operator.floordiv, "mod": operator.mod, "mul": operator.mul,
              "add": operator.add}
INDEXED = {"view": 1, "load_element": 1, "store_element": 2}  # where the indices of each begin


def boxes(function: Function, name: str) -> dict[int, int] | None:
    """The axes of a tensor along which boxes are taken, each with its widest box; None where the
    kernel uses the tensor in another way."""
    key = "boxes", name
    if key not in function.kept:
        function.kept[key] = _boxes(function, name)
    return function.kept[key]


def _boxes(function: Function, name: str) -> dict[int, int] | None:
    tensor, found = SSAValue(name), dict[int, int]()
    for node in walk(function.body):
        if tensor not in operands(node):
            continue
        if not isinstance(node, Op) or node.name not in INDEXED or tensor in node.args[1:]:
            return None
        if node.name == "view":
            box = node.attr["box"]
            for a in node.attr["kept"]:
                found[a] = max(found.get(a, 0), box[a])
    return found


def with_layouts(function: Function, layouts: Mapping[str, ArgumentLayout]) -> Function:
    """The function on arguments that lie so. Of an axis along which boxes are taken it needs a
    place of its own (`ArgumentLayout.place_of`)."""
    if not layouts:
        return function
    params = tuple(
        replace(p, type=GlobalTensor(p.type.numeric, layouts[p.value.name].extents))
        if p.value.name in layouts and isinstance(p.type, GlobalTensor) else p
        for p in function.params)
    work = _Indices(function, layouts)
    return replace(function, params=params, body=work.block(function.body))


class _Indices:
    def __init__(self, function: Function, layouts: Mapping[str, ArgumentLayout]):
        self.names, self.layouts = Names.of(function), layouts
        self.types = definitions(function)

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(made for node in nodes for made in self.node(node))

    def node(self, node: Node) -> Iterator[Node]:
        if not isinstance(node, Op):
            yield with_regions(node, self.block)
            return
        base = node.args[0] if node.args else None
        layout = self.layouts.get(base.name) if isinstance(base, SSAValue) else None
        if layout is None:
            yield node
            return
        assert node.name in INDEXED, f"{node.name} of {base}, which lies in a larger array"
        first = INDEXED[node.name]
        index: list[Operand] = []
        for place in layout.places:
            made: list[Op] = []
            index.append(self.index(place, node.args[first:], made, node))
            yield from made
        op = replace(node, args=(*node.args[:first], *index))
        yield from self.view(op, layout) if node.name == "view" else [op]

    def view(self, op: Op, layout: ArgumentLayout) -> Iterator[Op]:
        """A box of the memory; turned where its axes lie the other way round there."""
        attr = op.attr
        own: dict[int, int] = {}  # axes of memory
        for a in attr["kept"]:
            at = layout.place_of(a)
            assert at is not None, f"boxes of {op.args[0]} along axes that lie apart: {layout}"
            own[at] = a
        box = tuple(attr["box"][own[i]] if i in own else 1 for i in range(len(layout.places)))
        attrs = tuple(sorted({**attr, "box": box, "kept": tuple(sorted(own))}.items()))
        (out,) = op.outs
        if list(own) == sorted(own):
            yield replace(op, attrs=attrs)
            return
        assert isinstance(out.type, View) and len(own) == 2
        turned = Def(self.names.fresh(out.value.name),
                     replace(out.type, shape=out.type.shape[::-1]))
        yield replace(op, attrs=attrs, outs=(turned,))
        yield Op("view_transpose", (turned.value,), (out,), (), op.where)

    def index(self, place: AxisPlace, given: tuple[Operand, ...], made: list[Op],
              of: Op) -> Operand:
        """The index along one axis of memory, by ops that are put into `made`."""
        if place.axis < 0:
            return Const(place.start, i32)
        x = given[place.axis]
        for name, number, neutral in (("floordiv", place.divisor, 1), ("mod", place.modulus, 0),
                                      ("mul", -1 if place.reversed else 1, 1),
                                      ("add", place.start, 0)):
            if number != neutral:
                x = self._arithmetic(name, x, number, made, of)
        return x

    def _arithmetic(self, name: str, x: Operand, number: int, made: list[Op], of: Op) -> Operand:
        if isinstance(x, Const):
            return Const(ARITHMETIC[name](x.value, number), x.dtype)
        kind = self.types[x]
        assert isinstance(kind, Scalar)
        out = Def(self.names.fresh("at"), kind)
        self.types[out.value] = kind
        made.append(Op(name, (x, Const(number, kind.dtype)), (out,), (), of.where))
        return out.value


__all__ = ["boxes", "with_layouts"]
