"""A kernel over a batch as one launch: axes in front of its grid, and of tensors that have them.

What the kernel's author sees stays: group_id, num_groups and linear_id count the groups of one row
of the batch, and every place in a tensor lies in that row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from tessera.dims import Dim
from tessera.lazy_dataclass import dataclass
from tessera.numerics import as_type, i32
from tessera.tile.ir.ir import (
    Const,
    Def,
    Function,
    GridAxis,
    Names,
    Node,
    Op,
    Operand,
    Param,
    SSAValue,
    map_operands,
    with_regions,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar

NUMBER = Scalar(i32)
KEY = "batch_key"  # the parameter with the words of a row's key


def batch_extent(axis: int) -> str:
    """The name of the extent of an axis of the batch, which a launch binds."""
    return f"batch_{axis}"


def with_batch_axes(function: Function, count: int, has: Mapping[str, Sequence[bool]],
                    rank: int) -> Function:
    """The function for a batch of `count` axes.

    has: for each tensor parameter, which of the axes it has; the others give every row the same.
    rank: the axes of the grid of one row.
    """
    params = tuple(_batched(p, has) if isinstance(p.type, GlobalTensor) else p
                   for p in function.params)
    sizes = tuple(Param(SSAValue(batch_extent(a)), NUMBER, "dim") for a in range(count))
    table = {p.value: tuple(has[p.value.name]) for p in function.params
             if isinstance(p.type, GlobalTensor)}
    dims = {p.value: len(p.type.dims) for p in function.params if isinstance(p.type, GlobalTensor)}
    body = _BatchedBody(Names.of(function), count, rank, table, dims).of(function.body)
    grid = (*(GridAxis(batch_extent(a)) for a in range(count)),
            *(function.grid if len(function.grid) == rank
              else (GridAxis(f"groups_{a}") for a in range(rank))))
    return replace(function, params=(*params, *sizes), grid=grid, launch="axes", body=body)


def with_key(function: Function) -> Function:
    """What draws by the launch's key draws by the two words of one more parameter, KEY, instead;
    stores that round at random do not."""
    names = Names.of(function)
    key, low, high = SSAValue(KEY), names.fresh("key_low"), names.fresh("key_high")
    words = as_type("uint32")

    def visit(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(replace(n, args=(*n.args, low, high)) if isinstance(n, Op) and _is_draw(n)
                     else with_regions(n, visit) for n in nodes)

    loads = tuple(Op("load_element", (key, Const(i, i32)), (Def(word, Scalar(words.dtype)),))
                  for i, word in enumerate((low, high)))
    param = Param(key, GlobalTensor(words, (2,)))
    return replace(function, params=(*function.params, param),
                   body=(*loads, *visit(function.body)))


def _is_draw(op: Op) -> bool:
    draws = OPS[op.name].draws
    return draws is not None and draws(op)


def _batched(p: Param, has: Mapping[str, Sequence[bool]]) -> Param:
    assert isinstance(p.type, GlobalTensor)
    front = tuple(Dim.of(batch_extent(a)) for a, mine in enumerate(has[p.value.name]) if mine)
    return replace(p, type=replace(p.type, dims=(*front, *p.type.dims)))


@dataclass
class _BatchedBody:
    """Rewrites the ops of a body. tensors: which axes each has; dims: its own rank."""

    names: Names
    count: int
    rank: int
    tensors: dict[SSAValue, tuple[bool, ...]]
    dims: dict[SSAValue, int]
    first: list[Op] = field(default_factory=list)  # computed once, in front
    table: dict[SSAValue, SSAValue] = field(default_factory=dict)  # values that these stand for

    def of(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        self.row = [self.emit(self.first, "group_id", hint="row", axis=a)
                    for a in range(self.count)]
        made = self.nodes(body)
        return (*self.first, *(map_operands(n, self._known) for n in made))

    def _known(self, x: Operand) -> Operand:
        return self.table.get(x, x) if isinstance(x, SSAValue) else x

    def emit(self, to: list[Op], name: str, *args: Operand, hint: str = "t",
             **attrs: Any) -> SSAValue:
        value = self.names.fresh(hint)
        to.append(Op(name, args, (Def(value, NUMBER),), tuple(sorted(attrs.items()))))
        return value

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(made for n in nodes for made in (
            self.op(n) if isinstance(n, Op) else [with_regions(n, self.nodes)]))

    def op(self, op: Op) -> list[Op]:
        if op.name in IDS:
            return [replace(n, where=op.where) for n in IDS[op.name](self, op)]
        places = [a for a in op.args if isinstance(a, SSAValue) and a in self.tensors]
        return [self._placed(op, places[0]) if places else op]

    # --- places ---------------------------------------------------------------------------------
    def _placed(self, op: Op, place: SSAValue) -> Op:
        """An access or a view of a tensor: the row is an index in front of its own."""
        rows = [r for r, mine in zip(self.row, self.tensors[place], strict=True) if mine]
        own = self.dims[place] - (OPS[op.name].access == "vector")  # a vector has the last axis
        at, attrs = len(op.args) - own, op.attr
        if "kept" in attrs:
            attrs["box"] = (*[1] * len(rows), *attrs["box"])
            attrs["kept"] = tuple(a + len(rows) for a in attrs["kept"])
            if "axis" in attrs:
                attrs["axis"] += len(rows)
        return replace(op, args=(*op.args[:at], *rows, *op.args[at:]),
                       attrs=tuple(sorted(attrs.items())))

    # --- numbers of groups ----------------------------------------------------------------------
    @cached_property
    def linear(self) -> SSAValue:
        """The number of the group in its row: row-major over the grid's own axes."""
        at = self.emit(self.first, "group_id", hint="group", axis=self.count)
        for a in range(self.count + 1, self.count + self.rank):
            size = self.emit(self.first, "num_groups", hint="groups", axis=a)
            before = self.emit(self.first, "mul", at, size, hint="before")
            at = self.emit(self.first, "add", before,
                           self.emit(self.first, "group_id", hint="group", axis=a), hint="group")
        return at

    @cached_property
    def total(self) -> SSAValue:
        """The groups of a row."""
        size = self.emit(self.first, "num_groups", hint="groups", axis=self.count)
        for a in range(self.count + 1, self.count + self.rank):
            size = self.emit(self.first, "mul", size,
                             self.emit(self.first, "num_groups", hint="groups", axis=a),
                             hint="groups")
        return size

    def group_id(self, op: Op) -> list[Op]:
        return self._number(op, lambda: self.linear)

    def num_groups(self, op: Op) -> list[Op]:
        return self._number(op, lambda: self.total)

    def _number(self, op: Op, of_row: Callable[[], SSAValue]) -> list[Op]:
        axis = op.attr["axis"]
        if axis is not None:
            return [replace(op, attrs=(("axis", axis + self.count),))]
        self.table[op.outs[0].value] = of_row()
        return []

    def linear_id(self, op: Op) -> list[Op]:
        made: list[Op] = []
        size = self.emit(made, "group_size", hint="size")
        before = self.emit(made, "mul", self.linear, size, hint="before")
        lane = Def(self.names.fresh("lane"), Scalar(i32, uniform=False))
        return [*made, Op("local_id", (), (lane,)), Op("add", (before, lane.value), op.outs)]


IDS = {"group_id": _BatchedBody.group_id, "num_groups": _BatchedBody.num_groups,
       "linear_id": _BatchedBody.linear_id}

__all__ = ["KEY", "batch_extent", "with_batch_axes", "with_key"]
