"""Loops of a kernel: carried names, their types, and counted and conditional loops in the IR."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.statements import Statements, same
from tessera.tile.ir.edges import NOTHING, TileEdges, join_facts
from tessera.tile.ir.handles import Handle, TensorRow, Undefined, Unset, describe, is_number
from tessera.tile.ir.ir import Def, For, Operand, SSAValue, While
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, Type, View
from tessera.tile.ops.rules import promote


@dataclass(frozen=True, eq=False)
class Carried:
    """A name that a loop changes, the type it is carried in, and what it is before the loop.

    facts: of its edges, before each turn.
    """

    name: str
    type: Type
    init: Any
    facts: TileEdges = NOTHING


@dataclass(frozen=True, eq=False)
class Start:
    """What an attempt to trace a loop starts from: names that are taken, what shared buffers hold,
    and how many edges were met."""

    taken: set[str]
    contents: dict[SSAValue, TileEdges]
    edges_seen: int


Tried = dict[str, tuple[Type, TileEdges]]
ATTEMPTS = 16  # a type changes once or twice, what is known of edges a few times


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
        tried: Tried = {}
        for _ in range(ATTEMPTS):
            start = Start(mark[2], dict(self.contents), self.edges_seen)
            carried = self.carry(names, tried)
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
            again = self.close(carried, defs, lane, start)
            if again is None:
                break
            tried, held = again
            self.rewind(mark)
            self.contents = held
        yields = tuple(self.converted(self.env[c.name], c.type, nodes) for c in carried)
        self.loop_env.append(mark[0])
        self.leave(names, carried, defs, start, lambda: self.block.append(While(
            defs, tuple(inits), tuple(tested), self.operand(cond), tuple(nodes), yields,
            self.where())))
        self.loop_env.pop()

    def turn(self, body: list[ast.stmt], lane: bool) -> None:
        self.depth += 1
        self.divergent += lane
        self.statements(body)
        self.divergent -= lane
        self.depth -= 1

    origin: dict[str, Any]

    def mark(self) -> Any:
        """What a second trace of a loop starts from."""
        return (dict(self.env), len(self.block), set(self.names.taken), dict(self.names.next),
                self.forms.copy(), len(self.axis_names), dict(self.contents), dict(self.origin))

    def rewind(self, mark: Any) -> None:
        env, length, taken, counts, forms, axes, contents, origin = mark
        self.contents, self.origin = dict(contents), dict(origin)
        self.env = dict(env)
        del self.block[length:]
        del self.axis_names[axes:]
        self.names.taken, self.names.next, self.forms = set(taken), dict(counts), forms.copy()

    def carry(self, names: list[str], tried: Tried) -> list[Carried]:
        out = []
        for name in names:
            init = self.env[name]
            if isinstance(init, Undefined | tuple | list | str | TensorRow) or init is None or not (
                    isinstance(init, Handle | Unset) or is_number(init)):
                continue
            if isinstance(init, Handle) and isinstance(init.type, Buffer | View | GlobalTensor):
                continue
            if isinstance(init, Unset) and name not in tried:
                continue
            kind, facts = tried.get(name) or (self.type_of(init), self.facts_of(init))
            out.append(Carried(name, kind, init, facts))
        return out

    def enter(self, carried: list[Carried]) -> tuple[Def, ...]:
        defs = tuple(Def(self.names.fresh(c.name.strip("_") or c.name), c.type) for c in carried)
        for c, d in zip(carried, defs, strict=True):
            self.env[c.name] = Handle(d.value, d.type)
            self.note_type(self.env[c.name])
            self.state(d.value, c.facts)
        return defs

    def close(self, carried: list[Carried], defs: tuple[Def, ...], lane: bool, start: Start
              ) -> tuple[Tried, dict[SSAValue, TileEdges]] | None:
        """None when every carried type is what it is after a turn, and so are the facts of edges;
        else those to try, and what shared buffers hold."""
        tried: Tried = {}
        changed = False
        edges = self.edges_seen != start.edges_seen
        for c, d in zip(carried, defs, strict=True):
            after = self.env[c.name]
            if isinstance(after, Undefined):
                self.fail(after.why, "give it a value in both branches")
            before: Any = c.init if not isinstance(c.init, Handle) else Handle(c.init.value, c.type)
            said = f"before the loop at line {self.where().line} and after one turn it is"
            joined = self.join(c.name, before, after, said, lane)
            if isinstance(c.type, Scalar) and not c.type.uniform and isinstance(joined, Scalar):
                joined = Scalar(joined.dtype, uniform=False)
            facts = self.around(c, d.value, start)
            tried[c.name] = joined, facts
            changed |= joined != c.type or facts.axes != c.facts.axes or edges and facts != c.facts
        for name, value in self.env.items():
            if name == RETURN and name not in tried and (isinstance(value, Handle)
                                                         or is_number(value)):
                tried[name], changed = (self.type_of(value), self.facts_of(value)), True
        held = self.joined_contents(start.contents, self.contents, start.taken, self.each_turn(),
                                    "before and in a loop")
        for root in {**held, **start.contents}:
            a, b = held.get(root, NOTHING), start.contents.get(root, NOTHING)
            changed |= a.axes != b.axes or edges and a != b
        return (tried, held) if changed else None

    def each_turn(self) -> str:
        return f"has another edge in each iteration of the loop at line {self.where().line}"

    def around(self, c: Carried, value: SSAValue, start: Start) -> TileEdges:
        """Of a carried tile before any turn: what it was, or what it is after one."""
        if not isinstance(c.type, TileType):
            return NOTHING
        last = self.env[c.name]
        after = self.outlived(self.facts_of(last), start.taken, self.each_turn())
        found = join_facts(c.facts, after, len(c.type.shape), "before and in a loop", self.where())
        if isinstance(last, Handle):
            self.sources[value] = (c.init.value, last.value) if isinstance(
                c.init, Handle) else ()
            if self.adds_to(last.value, value):
                return self.totals(found)
        return found

    def leave(self, names: list[str], carried: list[Carried], defs: tuple[Def, ...],
              start: Start, append: Any) -> None:
        """After the loop: carried names have their last value, others set inside have none."""
        append()
        inside = dict(self.env)
        ends = [self.around(c, d.value, start) for c, d in zip(carried, defs, strict=True)]
        zeros = all(f == c.facts for f, c in zip(ends, carried, strict=True))
        self.contents = {b: f if zeros else TileEdges(f.axes) for b, f in start.contents.items()}
        for c, d in zip(carried, defs, strict=True):
            self.env[c.name] = Handle(d.value, d.type)
            self.block_types[d.value] = d.type
            self.state(d.value, c.facts if zeros else TileEdges(c.facts.axes))
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
        mark, tried = self.mark(), {}  # type: ignore[var-annotated]
        first, last, by = (self.operand(self.to(x, dtype)) for x in (lo, hi, step))
        again_from = self.mark()
        for _ in range(ATTEMPTS):
            start = Start(mark[2], dict(self.contents), self.edges_seen)
            carried = self.carry(names, tried)
            inits = [self.converted(c.init, c.type, self.block) for c in carried]
            defs = self.enter(carried)
            var = Def(self.names.fresh(s.target.id), Scalar(dtype, not lane))
            self.env[s.target.id] = Handle(var.value, var.type)
            self.note_type(self.env[s.target.id])
            self.loop_bounds[var.value] = (first, last, by)
            outer, self.block = self.block, []
            self.turn(body, lane)
            nodes, self.block = self.block, outer
            again = self.close(carried, defs, lane, start)
            if again is None:
                break
            tried, held = again
            self.rewind(again_from)
            self.contents = held
        yields = tuple(self.converted(self.env[c.name], c.type, nodes) for c in carried)
        node = For(var, first, last, by, defs, tuple(inits), tuple(nodes), yields, over,
                   self.where())
        self.loop_env.append(mark[0])
        self.leave(names, carried, defs, start, lambda: self.block.append(node))
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
