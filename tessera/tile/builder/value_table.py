"""What is known of the values of a trace: definitions, types, affine forms, ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.tile.ir import affine
from tessera.tile.ir.affine import Form, Forms
from tessera.tile.ir.edges import Edge
from tessera.tile.ir.ir import Const, Op, Operand, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, Type


class ValueTable:
    """Facts about SSA values, by value."""

    def __init__(self) -> None:
        self.defined_by: dict[SSAValue, Op] = {}
        self.types: dict[SSAValue, Type] = {}  # of parameters and of what control flow makes
        self.forms = Forms()
        self.dims: dict[SSAValue, str] = {}  # values of named extents
        self.loop_bounds: dict[SSAValue, tuple[Operand, Operand, Operand]] = {}  # of counters
        self.coordinates: dict[SSAValue, tuple[int, int] | None] = {}  # of the grid: their ranges

    # --- definitions --------------------------------------------------------------------------
    def type_of_args(self, op: Any) -> list[Any]:
        return [Scalar(a.dtype) if hasattr(a, "dtype") else self.type_of_value(a) for a in op.args]

    def type_of_value(self, value: Any) -> Any:
        made = self.defined_by.get(value)
        if made is not None:
            return next(d.type for d in made.outs if d.value == value)
        return self.types[value]

    def extents_behind(self, x: Any) -> frozenset[str] | None:
        """The named extents that a value is computed from, None when it has other sources."""
        if isinstance(x, Const):
            return frozenset()
        if x in self.dims:
            return frozenset({self.dims[x]})
        op = self.defined_by.get(x)
        if op is None or OPS[op.name].family != "elementwise" and op.name != "convert":
            return None
        found = [self.extents_behind(a) for a in op.args]
        return None if None in found else frozenset().union(*found)  # type: ignore[arg-type]

    # --- numbers that are equal ---------------------------------------------------------------
    def canonical(self, form: Form) -> Any:
        """Equal for forms that are one number, also where it was computed twice."""
        items: dict[Any, int] = {}
        for v, c in form.items():
            key = v if v is None else self.recipe(v)
            items[key] = items.get(key, 0) + c
        return frozenset((k, c) for k, c in items.items() if c or k is None)

    def recipe(self, value: SSAValue) -> Any:
        """How a number is computed from what cannot change; the value itself for anything else."""
        op = self.defined_by.get(value)
        if op is None or OPS[op.name].effect != "pure" or not isinstance(op.outs[0].type, Scalar):
            return value
        args = tuple(self.canonical(self.forms.form(x)) if isinstance(x, SSAValue) and
                     x in self.forms.of else self.recipe(x) if isinstance(x, SSAValue) else x
                     for x in op.args)
        return op.name, op.attrs, args

    # --- edges of these numbers ---------------------------------------------------------------
    def edge_key(self, first: Form, extent: Form) -> Any:
        return self.canonical(first), self.canonical(extent)

    def scaled_edge(self, edge: Edge, n: int) -> Edge:
        """Each element of the axis becomes n of another."""
        if n == 1:
            return edge
        assert edge.first is not None and edge.extent is not None
        first, extent = affine.scale(edge.first, n), affine.scale(edge.extent, n)
        return replace(edge, key=self.edge_key(first, extent), first=first, extent=extent,
                       offset=None, size=None)

    # --- ranges -------------------------------------------------------------------------------
    def reach(self, value: SSAValue) -> tuple[int, int] | None:
        """Least and greatest value of a loop counter or grid coordinate with constant bounds, or of
        a remainder."""
        if value in self.coordinates:
            return self.coordinates[value]
        op = self.defined_by.get(value)
        if op is not None and op.name == "mod" and isinstance(op.args[1], Const) and (
                op.args[1].dtype.kind != "float"):
            return (0, int(op.args[1].value) - 1) if op.args[1].value > 0 else None
        if value not in self.loop_bounds:
            return None
        lo, hi, step = (self.forms.form(x) for x in self.loop_bounds[value])
        if set(step) - {None} or step[None] < 1:
            return None
        low, stop = self.span(lo), self.span(hi)
        if low is None or stop is None:
            return None
        last = low[0] + max(0, stop[1] - 1 - low[0]) // step[None] * step[None]
        return low[0], max(low[1], last)

    def span(self, form: dict) -> tuple[int, int] | None:
        """The least and the greatest value of a form, when loops and grid bound it."""
        low = high = form.get(None, 0)
        for value, c in form.items():
            if value is None:
                continue
            reach = self.reach(value)
            if reach is None:
                return None
            low += c * reach[0 if c > 0 else 1]
            high += c * reach[1 if c > 0 else 0]
        return low, high

    def least(self, form: Form) -> int | None:
        """A number that a form is never below, where one is known."""
        total = form.get(None, 0)
        for value, c in form.items():
            if value is None:
                continue
            if c > 0:
                bound = self.floor_of(value)
            else:
                reach = self.reach(value)
                bound = None if reach is None else reach[1]
            if bound is None:
                return None
            total += c * bound
        return total

    def floor_of(self, value: SSAValue) -> int | None:
        reach = self.reach(value)
        if reach is not None:
            return reach[0]
        if value in self.dims:
            return 0
        if value in self.loop_bounds:
            lo, hi, step = (self.forms.form(x) for x in self.loop_bounds[value])
            up = self.least(step)
            return self.least(lo) if up is not None and up >= 0 else None
        op = self.defined_by.get(value)
        return None if op is None else self.floor_of_op(op)

    def floor_of_op(self, op: Op) -> int | None:
        (made,) = op.outs
        if made.type.dtype.kind == "uint":
            return 0
        least = OPS[op.name].least
        whole = made.type.dtype.kind == "int"
        return least([self.least(self.forms.form(x)) for x in op.args]) if least and whole else None
