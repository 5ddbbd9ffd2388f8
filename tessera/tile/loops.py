"""Loops of a kernel: carried names, their types, and counted and conditional loops in the IR."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from tessera.tile.exits import RETURN
from tessera.tile.handles import Handle, Row, Undefined, Unset, describe, is_number
from tessera.tile.ir import Def, For, Operand, While
from tessera.tile.ops.rules import promote
from tessera.tile.statements import Statements, same
from tessera.tile.types import Buffer, Scalar, Tensor, Type, View


@dataclass(frozen=True, eq=False)
class Carried:
    """A name that a loop changes, the type it is carried in, and what it is before the loop."""

    name: str
    type: Type
    init: Any


class Loops(Statements):
    """Traces loops until the types of what they carry are stable."""

    def do_While(self, s: ast.While) -> None:
        if s.orelse:
            self.fail("else after a loop is not part of the kernel language")
        exits = list(getattr(s, "exits", ()))
        tests = [ast.UnaryOp(ast.Not(), ast.Name(f, ast.Load())) for f in exits]
        test = ast.BoolOp(ast.And(), [*tests, s.test]) if tests else s.test
        ast.fix_missing_locations(ast.copy_location(test, s.test))
        self.while_loop(s, test, resets(s) + s.body)

    def while_loop(self, s: Any, test: ast.expr, body: list[ast.stmt]) -> None:
        """Traces until the types of the carried names are those they have after a turn."""
        names = [n for n in stored_names(body) if n in self.env]
        mark, lane = self.mark(), False
        types: dict[str, Type] = {}
        for _ in range(6):
            carried = self.carry(names, types)
            inits = [self.converted(c.init, c.type, self.block) for c in carried]
            defs = self.enter(carried)
            outer, self.block = self.block, []
            cond = self.decided(self.condition(test), "a while",
                                "loop on one number: while ts.tile.reduce_min(t) < 10.0")
            if not isinstance(cond, Handle):
                cond = self.emit("constant", [], dtype=self.literal(True).dtype, value=cond)
            tested, self.block = self.block, []
            lane = not self.is_uniform(cond)
            self.turn(body, lane)
            nodes, self.block = self.block, outer
            again = self.close(carried, lane)
            if again is None:
                break
            types = again
            self.rewind(mark)
        yields = tuple(self.converted(self.env[c.name], c.type, nodes) for c in carried)
        self.loop_env.append(mark[0])
        self.leave(names, carried, defs, lambda: self.block.append(While(
            defs, tuple(inits), tuple(tested), self.operand(cond), tuple(nodes), yields,
            self.where())))
        self.loop_env.pop()

    def turn(self, body: list[ast.stmt], lane: bool) -> None:
        self.depth += 1
        self.divergent += lane
        self.statements(body)
        self.divergent -= lane
        self.depth -= 1

    def mark(self) -> Any:
        """What a second trace of a loop starts from."""
        return (dict(self.env), len(self.block), set(self.names.taken), dict(self.names.next),
                self.forms.copy(), len(self.axis_names), dict(self.contents))

    def rewind(self, mark: Any) -> None:
        env, length, taken, counts, forms, axes, contents = mark
        self.contents = dict(contents)
        self.env = dict(env)
        del self.block[length:]
        del self.axis_names[axes:]
        self.names.taken, self.names.next, self.forms = set(taken), dict(counts), forms.copy()

    def carry(self, names: list[str], types: dict[str, Type]) -> list[Carried]:
        out = []
        for name in names:
            init = self.env[name]
            if isinstance(init, Undefined | tuple | list | str | Row) or init is None or not (
                    isinstance(init, Handle | Unset) or is_number(init)):
                continue
            if isinstance(init, Handle) and isinstance(init.type, Buffer | View | Tensor):
                continue
            if isinstance(init, Unset) and name not in types:
                continue
            kind = types.get(name) or self.type_of(init)
            out.append(Carried(name, kind, init))
        return out

    def enter(self, carried: list[Carried]) -> tuple[Def, ...]:
        defs = tuple(Def(self.names.fresh(c.name.strip("_") or c.name), c.type) for c in carried)
        for c, d in zip(carried, defs, strict=True):
            edges = c.init.edges if isinstance(c.init, Handle) else ()
            self.env[c.name] = Handle(d.value, d.type, edges)
            self.block_types[d.value] = d.type
        return defs

    def close(self, carried: list[Carried], lane: bool) -> dict[str, Type] | None:
        """None when every carried type is what it is after a turn, else the types to try."""
        types, changed = {}, False
        for c in carried:
            after = self.env[c.name]
            if isinstance(after, Undefined):
                self.fail(after.why, "give it a value in both branches")
            before: Any = c.init if not isinstance(c.init, Handle) else Handle(c.init.value, c.type)
            said = f"before the loop at line {self.where().line} and after one turn it is"
            joined = self.join(c.name, before, after, said, lane)
            if isinstance(c.type, Scalar) and not c.type.uniform and isinstance(joined, Scalar):
                joined = Scalar(joined.dtype, uniform=False)
            types[c.name] = joined
            changed |= joined != c.type
        for name, value in self.env.items():
            if name == RETURN and name not in types and (isinstance(value, Handle)
                                                         or is_number(value)):
                types[name], changed = self.type_of(value), True
        return types if changed else None

    def leave(self, names: list[str], carried: list[Carried], defs: tuple[Def, ...],
              append: Any) -> None:
        """After the loop: carried names have their last value, others set inside have none."""
        append()
        self.contents = {}
        inside = dict(self.env)
        for c, d in zip(carried, defs, strict=True):
            after = inside[c.name]
            edges = after.edges if isinstance(after, Handle) else ()
            self.env[c.name] = Handle(d.value, d.type, edges)
            self.block_types[d.value] = d.type
        known = {c.name for c in carried}
        for name, value in inside.items():
            if name in known:
                continue
            if name in self.before_loop and same(self.before_loop[name], value):
                continue
            if isinstance(value, Undefined):
                self.env[name] = value
                continue
            if name in self.before_loop and not isinstance(value, Handle):
                self.fail(f"{name!r} changes in a loop from {describe(self.before_loop[name])} to "
                          f"{describe(value)}", "only numbers, scalars and tiles may change in a "
                          "loop; of buffers, index a list by a stage number")
            self.env[name] = Undefined(
                f"{name!r} has a value only inside the loop at line {self.where().line}",
                self.where())

    @property
    def before_loop(self) -> dict[str, Any]:
        return self.loop_env[-1] if self.loop_env else {}

    loop_env: list[dict[str, Any]]

    def for_loop(self, s: Any, lo: Any, hi: Any, step: Any, over: str,
                 body: list[ast.stmt]) -> For:
        """One counted loop with bounds as given; returns the node that was appended."""
        self.require_bounds(lo, hi, step)
        names = [n for n in stored_names(body) if n in self.env and n != s.target.id]
        dtype = promote([self.type_of(x).dtype for x in (lo, hi, step)])
        lane = not all(map(self.is_uniform, (lo, hi, step)))
        mark, types = self.mark(), {}  # type: ignore[var-annotated]
        first, last, by = (self.operand(self.to(x, dtype)) for x in (lo, hi, step))
        start = self.mark()
        for _ in range(6):
            carried = self.carry(names, types)
            inits = [self.converted(c.init, c.type, self.block) for c in carried]
            defs = self.enter(carried)
            var = Def(self.names.fresh(s.target.id), Scalar(dtype, not lane))
            self.env[s.target.id] = Handle(var.value, var.type)
            self.block_types[var.value] = var.type
            self.loop_bounds[var.value] = (first, last, by)
            outer, self.block = self.block, []
            self.turn(body, lane)
            nodes, self.block = self.block, outer
            again = self.close(carried, lane)
            if again is None:
                break
            types = again
            self.rewind(start)
        yields = tuple(self.converted(self.env[c.name], c.type, nodes) for c in carried)
        node = For(var, first, last, by, defs, tuple(inits), tuple(nodes), yields, over,
                   self.where())
        self.loop_env.append(mark[0])
        self.leave(names, carried, defs, lambda: self.block.append(node))
        self.loop_env.pop()
        return node

    loop_bounds: dict[Any, tuple[Operand, Operand, Operand]]

    def require_bounds(self, lo: Any, hi: Any, step: Any) -> None:
        for x, what in ((lo, "start"), (hi, "stop"), (step, "step")):
            kind = self.type_of(x).dtype.kind if isinstance(x, Handle) or is_number(x) else None
            if kind not in ("int", "uint") or (isinstance(x, Handle)
                                               and not isinstance(x.type, Scalar)):
                self.fail(f"the {what} of a range must be an integer, got {describe(x)}")
        if isinstance(step, int) and step == 0:
            self.fail("the step of a range is 0")


def resets(s: Any) -> list[ast.stmt]:
    """Assignments that clear a loop's continue flag at the start of a turn."""
    made = [ast.Assign([ast.Name(f, ast.Store())], ast.Constant(False))
            for f in getattr(s, "resets", ())]
    return [ast.fix_missing_locations(ast.copy_location(m, s)) for m in made]


def stored_names(body: list[ast.stmt]) -> list[str]:
    """Names that a block assigns, in order of their first appearance."""
    found: dict[str, None] = {}
    for s in body:
        for n in ast.walk(s):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                found[n.id] = None
            if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name):
                found[n.target.id] = None
            if isinstance(n, ast.Call) and mutates_first(n):
                found[n.args[0].id] = None  # type: ignore[attr-defined]
    return list(found)


def mutates_first(n: ast.Call) -> bool:
    """mask_causal(S, ...) assigns S."""
    name = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
    return name == "mask_causal" and bool(n.args) and isinstance(n.args[0], ast.Name)
