"""Ranges: which loop of the IR a ts.tile.range becomes, and how its turns are shared (A1)."""

from __future__ import annotations

import ast
from abc import abstractmethod
from typing import Any

from tessera.numerics import i64
from tessera.tile.frontend.loops import Loops, resets
from tessera.tile.ir.handles import Handle, LoopRange, describe, is_number
from tessera.tile.ir.ir import For, Op, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, TileType
from tessera.tile.passes.independent_iterations import why_dependent


class DimInt(int):
    """A named extent that is a constant of this specialisation."""


class Ranges(Loops):
    """Loops over ranges and compile-time tuples."""

    spec: Any
    fixed: dict[str, Any]
    output: Handle | None
    origin: dict[str, Any]

    @abstractmethod
    def axis(self, dim: str, block: int, lo: str = "0", stride: bool = False) -> int:
        """The grid axis over an extent, which is added when there is none."""

    def do_For(self, s: ast.For) -> None:
        if s.orelse:
            self.fail("else after a loop is not part of the kernel language")
        items = self.expr(s.iter)
        if isinstance(items, LoopRange):
            if not isinstance(s.target, ast.Name):
                self.fail("a range gives one number: for i in ts.tile.range(...)")
            self.range_loop(s, items)
        elif isinstance(items, tuple | list):
            self.unroll(s, items)
        else:
            self.fail(f"a loop over {describe(items)}",
                      "loop over ts.tile.range(...), range(...) or a compile-time tuple")

    def unroll(self, s: ast.For, items: Any) -> None:
        if getattr(s, "exits", ()):
            self.fail("break in a loop over a tuple", "loop over a range")
        for item in items:
            self.assign(s.target, item)
            self.statements(resets(s) + s.body)

    def range_loop(self, s: Any, r: LoopRange) -> None:
        body = resets(s) + s.body
        if r.prefetch is not None:
            self.constant_int(r.prefetch, "prefetch")
        if getattr(s, "exits", ()):
            self.until(s, r, body)
            return
        lane = not all(map(self.is_uniform, (r.lo, r.hi, r.step)))
        if r.over == "serial" or lane or self.divergent:
            if r.over in ("lanes", "groups"):
                self.fail(f"over={r.over!r}: the range depends on the lane already",
                          "leave out over=, each lane runs its own range")
            self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
            return
        dim = self.output_dim(r)
        if dim is not None and r.over is None:
            self.block_loop(s, r, dim, body)
            return
        wanted = r.over or self.natural(r, dim)
        if wanted is None:
            self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
        else:
            self.spread_loop(s, r, wanted, body)

    def natural(self, r: LoopRange, dim: str | None) -> str | None:
        """How a range with no over= may be spread, when its turns are independent."""
        if not r.has_step:
            return "lanes"
        if self.depth == 0 and is_zero(r.lo) and self.dim_name(r.hi) is not None:
            return "groups"
        return None

    def spread_loop(self, s: Any, r: LoopRange, over: str, body: list[ast.stmt]) -> None:
        """Traced serially first: the turns are spread when they are independent."""
        mark = self.mark()
        node = self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
        why = why_dependent(node, self.forms, self.loop_bounds, self.defined_by)
        if why is None and over == "lanes" and uses_group_ops(node):
            why = "it has ops of the whole group"
        if why is None and over == "groups" and self.depth:
            why = "it stands inside another loop"
        if why is not None:
            if r.over is not None:
                self.fail(f"over={over!r}: the turns of this loop are not independent: {why}",
                          "leave out over=: the loop then runs in order")
            return
        self.rewind(mark)
        if over == "lanes":
            lane = self.emit("local_id", [])
            size = self.emit("group_size", [])
            lo = self.arithmetic("add", (r.lo, self.arithmetic("mul", (lane, r.step))))
            step = self.arithmetic("mul", (size, r.step))
            bounds = self.operand(r.lo), self.operand(r.hi), self.operand(r.step)
            node = self.for_loop(s, lo, r.hi, step, "lanes", body)
            self.loop_bounds[node.var.value] = bounds
            self.order_lanes(node)
            return
        step = self.constant_int(r.step, "the step of a range spread over groups")
        name = self.dim_name(r.hi) or self.extent_text(r.hi)
        axis = self.axis(name, step, self.extent_text(r.lo), stride=True)
        start = self.arithmetic("mul", (self.counted(self.group_coordinate(axis), name), step))
        count = self.counted(self.emit("num_groups", [], axis=axis), name)
        self.for_loop(s, self.arithmetic("add", (r.lo, start)), r.hi,
                      self.arithmetic("mul", (count, step)), "groups", body)

    def counted(self, groups: Handle, dim: str) -> Handle:
        """A number of groups along an extent, wide enough to be multiplied up to the extent."""
        return self.cast(groups, i64) if dim in self.spec.wide_dims else groups

    def order_lanes(self, node: For) -> None:
        """As if in order: what the lanes wrote to shared memory is there after the loop."""
        for n in walk_ops(node):
            if n.name == "store_element":
                kind = self.type_of_value(n.args[0])
                if isinstance(kind, Buffer) and kind.space == "shared":
                    self.emit("barrier", [])
                    return

    def extent_text(self, x: Any) -> str:
        if isinstance(x, int):
            return str(x)
        name = self.dim_name(x)
        if name is None:
            self.fail("a range over groups begins and ends at constants or named extents",
                      "use over='serial', or compute the group's part from ts.tile.group_id()")
        return name

    def dim_name(self, x: Any) -> str | None:
        """The name of an extent, when x is one."""
        if isinstance(x, Handle):
            return self.dims.get(x.value)
        names = [n for n, v in self.fixed.items() if v == x] if isinstance(x, DimInt) else []
        return names[0] if names else None

    def output_dim(self, r: LoopRange) -> str | None:
        """The extent of the returned tensor whose blocks this outermost range enumerates (Q51)."""
        if self.output is None or self.depth or not r.has_step or not is_zero(r.lo):
            return None
        name = self.dim_name(r.hi)
        out = self.spec.result.shape
        known = {str(d) for d in out}
        return name if name in known else None

    def block_loop(self, s: Any, r: LoopRange, dim: str, body: list[ast.stmt]) -> None:
        """A kernel that returns a tile runs once per block of its result: the loop is the grid."""
        step = self.constant_int(r.step, "the step of the range over the result's blocks")
        group = self.counted(self.group_coordinate(self.axis(dim, step)), dim)
        start = self.arithmetic("mul", (group, step))
        self.origin[dim] = self.env[s.target.id] = self.named(start, s.target.id)
        self.depth += 1
        self.statements(body)
        self.depth -= 1

    def until(self, s: Any, r: LoopRange, body: list[ast.stmt]) -> None:
        """A range with break or return in it: a while with the counter carried."""
        if r.over in ("lanes", "groups"):
            self.fail(f"over={r.over!r} with break or return inside: the turns depend on each "
                      "other")
        if not isinstance(r.step, int):
            self.fail("a range with break or return inside needs a constant step")
        target, at = s.target.id, f"__at_{s.target.id}"
        limit = f"__stop_{s.target.id}"
        self.env[at], self.env[limit] = r.lo, r.hi
        order: ast.cmpop = ast.Lt() if r.step > 0 else ast.Gt()
        tests: list[ast.expr] = [ast.UnaryOp(ast.Not(), name(f)) for f in s.exits]
        tests.append(ast.Compare(name(at), [order], [name(limit)]))
        first = ast.Assign([ast.Name(target, ast.Store())], name(at))
        count = ast.AugAssign(ast.Name(at, ast.Store()), ast.Add(), ast.Constant(r.step))
        new = [first, *body, count]
        test = ast.BoolOp(ast.And(), tests)
        for n in (first, count, test):
            ast.fix_missing_locations(ast.copy_location(n, s))
        self.while_loop(s, test, new)
        del self.env[at], self.env[limit]


def is_zero(x: Any) -> bool:
    return is_number(x) and x == 0


def name(n: str) -> ast.Name:
    return ast.Name(n, ast.Load())


def walk_ops(nodes: Any) -> list[Op]:

    return [n for n in walk(tuple(nodes) if isinstance(nodes, tuple | list) else (nodes,))
            if isinstance(n, Op)]


def uses_group_ops(node: For) -> bool:
    """Whether ops of the whole group stand inside."""
    return any(OPS[n.name].group or any(isinstance(d.type, TileType) for d in n.outs)
               for n in walk_ops(node))
