"""Statements of a kernel: assignments, branches and loops as structured SSA."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tessera.numerics import f32, i32
from tessera.tile.frontend.calls import Calls
from tessera.tile.frontend.expressions import BINARY, WHERE
from tessera.tile.ir.edges import join_facts
from tessera.tile.ir.handles import (
    AxisSlice,
    Handle,
    TensorRow,
    Traced,
    Undefined,
    Unset,
    describe,
    is_number,
)
from tessera.tile.ir.ir import Def, If, Node, Op, Operand
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, Type, View
from tessera.tile.ops.rules import promote

REFUSED = {
    "With": "with blocks", "Try": "try: errors cannot be caught inside a kernel", "Raise":
    "raise: write assert condition, \"message\"", "Import": "import: do it outside of the kernel",
    "ImportFrom": "import: do it outside of the kernel", "ClassDef": "a class",
    "FunctionDef": "a nested function: define it outside of the kernel", "Global": "global",
    "Nonlocal": "nonlocal", "Delete": "del", "Match": "match: write if / elif",
    "AsyncFor": "async for", "AsyncWith": "async with", "AsyncFunctionDef": "an async function",
    "TryStar": "try: errors cannot be caught inside a kernel",
}
CHOICE = "__choice"  # the name of a ternary's value, and of `and` and `or`, while it is traced


class Statements(Calls):
    """Traces statement lists into `self.block`."""

    depth = 0  # of loops

    def statements(self, body: list[ast.stmt]) -> None:
        for s in body:
            outer, self.node = self.node, s
            do = getattr(self, "do_" + type(s).__name__, None)
            if do is None:
                what = REFUSED.get(type(s).__name__, type(s).__name__)
                self.fail(f"{what.partition(':')[0]} is not part of the kernel language",
                          what.partition(": ")[2] or "write it with if, for, while and assignments")
            do(s)
            self.node = outer

    def do_Pass(self, s: ast.Pass) -> None:
        pass

    def do_Expr(self, s: ast.Expr) -> None:
        if not isinstance(s.value, ast.Constant):
            self.expr(s.value)

    def do_Assert(self, s: ast.Assert) -> None:
        test = self.condition(s.test)
        message = self.expr(s.msg) if s.msg else ast.unparse(s.test)
        if not isinstance(test, Traced):
            if not test:
                self.fail(f"assertion fails at compile time: {message}", code="E_KERNEL_ASSERT")
            return
        self.call(OPS["device_assert"], [test, message], {})

    # --- assignments --------------------------------------------------------------------------
    def do_Assign(self, s: ast.Assign) -> None:
        for target in s.targets:
            self.require_no_argument(target, s.value)
        if len(s.targets) == 1 and isinstance(s.targets[0], ast.Tuple) and isinstance(
                s.value, ast.Tuple) and len(s.targets[0].elts) == len(s.value.elts):
            values = [self.named(self.expr(e), t.id) if isinstance(t, ast.Name) else self.expr(e)
                      for t, e in zip(s.targets[0].elts, s.value.elts, strict=True)]
            self.assign(s.targets[0], tuple(values))
            return
        value = self.expr(s.value)
        for target in s.targets:
            self.assign(target, value)

    def do_AnnAssign(self, s: ast.AnnAssign) -> None:
        if s.value is None:
            return
        self.require_no_argument(s.target, s.value)
        value, kind = self.expr(s.value), self.expr(s.annotation)
        if isinstance(kind, type) and kind in (int, float, bool):
            kind = {int: i32, float: f32, bool: bool}[kind]
        self.assign(s.target, self.call(OPS["cast"], [value, kind], {}))

    def require_no_argument(self, target: ast.expr, value: ast.expr) -> None:
        """`y = t` stores nothing in the argument y. `x = tile.load(x)` is meant as it stands."""
        if isinstance(target, ast.Tuple | ast.List):
            for t in target.elts:
                self.require_no_argument(t, value)
            return
        held = self.env.get(target.id) if isinstance(target, ast.Name) else None
        if not isinstance(target, ast.Name) or target.id not in self.argument_names or not (
                isinstance(held, Handle) and isinstance(held.type, GlobalTensor)):
            return
        if not any(isinstance(n, ast.Name) and n.id == target.id for n in ast.walk(value)):
            name = target.id
            self.fail(f"{ast.unparse(target)} is an argument: this gives its name to another "
                      "value, and nothing is stored in it",
                      f"{name}[...] = t stores a tile as the whole of it, {name}[a:a+64] = t as a "
                      f"part, ts.tile.store({name}, t) as the group's block; for a value of its "
                      "own take another name")

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = self.named(value, target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            items = value
            if not isinstance(items, tuple | list) or len(items) != len(target.elts):
                self.fail(f"{describe(value)} cannot be unpacked into {len(target.elts)} names")
            for t, v in zip(target.elts, items, strict=True):
                self.assign(t, v)
        elif isinstance(target, ast.Subscript):
            self.store(target, value)
        else:
            self.fail(f"assignment to {ast.unparse(target)}",
                      "names, tuples and x[i] can be assigned")

    def named(self, value: Any, name: str) -> Any:
        """A fresh value gets the user's name."""
        last = self.block[-1] if self.block else None
        if not isinstance(value, Handle) or not isinstance(last, Op) or len(last.outs) != 1:
            return value
        made = last.outs[0]
        if made.value != value.value or not made.value.name.startswith("t"):
            return value
        if made.value.name.rstrip("0123456789") not in ("t", "t_") or name.startswith("__"):
            return value
        self.names.taken.discard(made.value.name)
        self.names.next["t"] = max(0, self.names.next.get("t", 0) - 1)
        new = self.names.fresh(name)
        op = replace(last, outs=(Def(new, made.type),))
        self.block[-1] = op
        self.defined_by[new] = op
        self.renamed(made.value, new)
        if made.value in self.forms.of:
            self.forms.of[new] = self.forms.of.pop(made.value)
        if made.value in self.forms.below:
            self.forms.below[new] = self.forms.below.pop(made.value)
        return replace(value, value=new)

    def place(self, target: ast.Subscript) -> tuple[Handle, list[Any]]:
        """The tensor or buffer of x[i] and the indices, stages resolved."""
        base: Any = self.expr(target.value)
        parts = self.parts(target)
        if isinstance(base, TensorRow):
            base, parts = base.base, [*base.index, *parts]
        if isinstance(base, tuple | list | dict):
            self.fail("assignment to an item of a tuple, list or dict",
                      "use a shared buffer or names")
        if not isinstance(base, Handle) or isinstance(base.type, Scalar | TileType):
            hint = "a tile is a value: make a new one, for example with ts.tile.where"
            self.fail(f"assignment to a part of {describe(base)}", hint)
        if isinstance(base.type, Buffer) and base.type.stages > 1:
            base, parts = self.pick_stage(base, parts[0]), parts[1:]
        return base, self.expand_ellipsis(base, parts or [...])

    def store(self, target: ast.Subscript, value: Any) -> None:
        base, parts = self.place(target)
        self.store_at(base, parts, value)

    def store_at(self, base: Handle, parts: list[Any], value: Any) -> None:
        if picked := self.picked(parts):
            region, axis = self.chosen_along(base, parts, picked)
            self.call(OPS["scatter"], [region, parts[picked - 1], value, axis], {})
            return
        elements = all(not isinstance(p, AxisSlice) for p in parts) \
            and len(parts) == self.rank(base)
        for p in parts:
            if not isinstance(p, AxisSlice):
                self.require_index(p)
        if elements and parts:
            self.store_element(base, parts, value)
            return
        view = base if isinstance(base.type, View) else self.make_view(base, parts)
        self.store_tile(view, value)

    def store_tile(self, view: Handle, value: Any) -> None:
        """A tile, a number, or another place (loaded) into a box."""
        if isinstance(value, TensorRow):
            value = self.view_of_row(value)
        if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
            value = self.call(OPS["load"], [value], {})
        value = self.value_of(value)
        if not isinstance(value, Handle):
            dtype = view.type.dtype
            value = self.to(value, dtype if dtype.kind != "float" else dtype.compute)
        else:
            value = self.storable(value, view.type.dtype, view)
        self.emit("store_tile", [view, value])

    def do_AugAssign(self, s: ast.AugAssign) -> None:
        name = BINARY.get(type(s.op))
        if name is None:
            self.fail("@= is not part of the kernel language", "x = ts.tile.dot(x, y)")
        if isinstance(s.target, ast.Name):
            old = self.get_Name(ast.copy_location(ast.Name(s.target.id, ast.Load()), s.target))
            if isinstance(old, Handle) and isinstance(old.type, GlobalTensor | Buffer | View):
                self.update_block(old, name, self.expr(s.value))
                return
            self.env[s.target.id] = self.named(self.binary(name, old, self.expr(s.value)),
                                               s.target.id)
        elif isinstance(s.target, ast.Subscript):
            base, parts = self.place(s.target)
            if self.picked(parts):
                self.fail(f"{ast.unparse(s)} with a tile of positions: two of them may be equal",
                          "ts.tile.scatter(x, index, tile, mode='add') adds each")
            if all(not isinstance(p, AxisSlice) for p in parts) and len(parts) == self.rank(base):
                old = self.load_element(base, parts)
                self.store_at(base, parts, self.binary(name, old, self.expr(s.value)))
                return
            self.update(self.make_view(base, parts), name, self.expr(s.value))
        else:
            self.fail(f"assignment to {ast.unparse(s.target)}")

    def update(self, view: Handle, name: str, value: Any) -> None:
        """view op= value: load, compute, store."""
        if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
            value = self.call(OPS["load"], [value], {})
        old = self.call(OPS["load"], [view], {})
        self.store_tile(view, self.binary(name, old, value))

    def update_block(self, tensor: Handle, name: str, value: Any) -> None:
        """C += tile: the group's own block of C."""
        if not isinstance(value, Handle) or not isinstance(value.type, TileType):
            self.fail(f"{describe(value)} added to the whole of {describe(tensor)}",
                      "add a tile (the group's block), or index elements")
        self.update(self.own_block(tensor, value.type.shape), name, value)

    @abstractmethod
    def own_block(self, tensor: Handle, shape: tuple[int, ...]) -> Handle:
        """The group's own block of a tensor, of a tile's extents."""

    # --- branches -----------------------------------------------------------------------------
    def do_If(self, s: ast.If) -> None:
        test = self.decided(self.condition(s.test), "an if", WHERE)
        if not isinstance(test, Handle):
            self.statements(s.body if test else s.orelse)
            return
        self.branch(test, partial(self.statements, s.body), partial(self.statements, s.orelse))

    def branch(self, test: Handle, then: Callable[[], None], orelse: Callable[[], None]) -> None:
        """An If: what each of the two traces, and the names that they change as its results."""
        lane = not self.is_uniform(test)
        before, taken, held = dict(self.env), set(self.names.taken), dict(self.contents)
        self.divergent += lane
        then_nodes, then_env = self.region(then)
        self.env = dict(before)
        held_then, self.contents = self.contents, held
        else_nodes, else_env = self.region(orelse)
        self.divergent -= lane
        self.env = before
        self.contents = self.joined_contents(held_then, self.contents, taken, self.in_branch(),
                                             "in two branches")
        self.merge(test, lane, (then_nodes, then_env), (else_nodes, else_env), taken)

    def in_branch(self) -> str:
        return f"has an edge of its own in a branch of the if at line {self.where().line}"

    def region(self, walk: Callable[[], None]) -> tuple[list[Node], dict[str, Any]]:
        """The nodes of a branch and the names after it."""
        outer, self.block = self.block, []
        walk()
        inner, self.block = self.block, outer
        return inner, dict(self.env)

    def choice(self, test: Handle, then: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
        def put(value: Callable[[], Any]) -> None:
            self.env[CHOICE] = value()

        self.branch(test, partial(put, then), partial(put, orelse))
        return self.env.pop(CHOICE)

    def merge(self, test: Handle, lane: bool, then: tuple, orelse: tuple,
              taken: set[str]) -> None:
        """Names that the branches changed become results of the If."""
        then_nodes, then_env = then
        else_nodes, else_env = orelse
        new: dict[str, Any] = {}
        outs: list[Def] = []
        thens: list[Operand] = []
        elses: list[Operand] = []
        for name in {**then_env, **else_env}:
            a, b = then_env.get(name), else_env.get(name)
            if name in then_env and name in else_env and same(a, b):
                self.env[name] = a
                continue
            missing = name not in then_env or name not in else_env
            if missing or isinstance(a, Undefined) or isinstance(b, Undefined):
                new[name] = Undefined(f"{name!r} has a value only in one branch of the if at line "
                                      f"{self.where().line}", self.where())
                continue
            type_ = self.join(name, a, b, "the branches of this if give it", lane)
            x = self.converted(a, type_, then_nodes)
            y = self.converted(b, type_, else_nodes)
            made = Def(self.names.fresh(name.strip("_") or name), type_)
            outs.append(made)
            thens.append(x)
            elses.append(y)
            new[name] = Handle(made.value, type_)
            self.note_type(new[name])
            if isinstance(type_, TileType):
                known = [self.outlived(self.facts_of(v), taken, self.in_branch()) for v in (a, b)]
                self.sources[made.value] = (a.value, b.value) if isinstance(
                    a, Handle) and isinstance(b, Handle) else ()
                self.state(made.value, join_facts(known[0], known[1], len(type_.shape),
                                                  "in two branches", self.where()))
        self.block.append(If(test.value, tuple(then_nodes), tuple(else_nodes), tuple(outs),
                             tuple(thens), tuple(elses), self.where()))
        self.env |= new

    def note_type(self, h: Handle) -> None:
        """A value that control flow makes. An earlier trace of a loop may have used its name."""
        self.block_types[h.value] = h.type
        self.defined_by.pop(h.value, None)
        tables: tuple[dict[Any, Any], ...] = (self.facts, self.implied, self.loop_bounds,
                                              self.coordinates)
        for table in tables:
            table.pop(h.value, None)

    def join(self, name: str, a: Any, b: Any, said: str, lane: bool) -> Type:
        """The one type for a name with two values; literals adapt. Errors name both types."""
        for x in (a, b):
            if not isinstance(x, Handle | Unset) and not is_number(x):
                self.fail(f"{self.spelled(name)}: {said} {describe(a)} and {describe(b)}",
                          "only numbers, scalars and tiles may differ at run time")
        if isinstance(a, Unset) or isinstance(b, Unset):
            known = b if isinstance(a, Unset) else a
            return self.laned(self.type_of(known), lane)
        ta, tb = self.type_of(a), self.type_of(b)
        for t in (ta, tb):
            if not isinstance(t, Scalar | TileType):
                self.fail(f"{self.spelled(name)}: {said} different places in memory, {ta} and {tb}",
                          "index a list of buffers by a stage number instead")
        joined = self.joined(a, b, ta, tb)
        if joined is None:
            wa, wb = self.made_at(a), self.made_at(b)
            self.fail(f"{self.spelled(name)} changes its type: {said} {ta} and {tb}",
                      "give it one type: cast with ts.tile.cast(x, dtype), or use another name",
                      code="E_TYPE_CHANGE",
                      also=tuple((str(t), w) for t, w in ((ta, wa), (tb, wb)) if w is not None))
        return self.laned(joined, lane, name)

    def laned(self, t: Type, lane: bool, name: str = "") -> Type:
        if not lane:
            return t
        if isinstance(t, TileType):
            said = self.spelled(name)
            self.fail(f"the tile {said} is assigned where control depends on the lane",
                      "a tile belongs to the whole group: use ts.tile.where")
        return Scalar(t.dtype, uniform=False)

    def spelled(self, name: str) -> str:
        """A name for a message; what a ternary, `and` or `or` gives has its text."""
        return repr(ast.unparse(self.node) if name == CHOICE else name)

    def made_at(self, x: Any) -> Any:
        made = self.defined_by.get(x.value) if isinstance(x, Handle) else None
        return made.where if made is not None else None

    def joined(self, a: Any, b: Any, ta: Any, tb: Any) -> Type | None:
        if isinstance(ta, TileType) != isinstance(tb, TileType):
            tile, other, literal = (ta, tb, b) if isinstance(ta, TileType) else (tb, ta, a)
            return tile if is_number(literal) and fits_dtype(literal, tile.dtype) else None
        dtype = self.joined_dtype(a, b, ta, tb)
        if dtype is None:
            return None
        if isinstance(ta, TileType):
            return TileType(dtype, ta.shape) if ta.shape == tb.shape else None
        return Scalar(dtype, ta.uniform and tb.uniform)

    @staticmethod
    def joined_dtype(a: Any, b: Any, ta: Any, tb: Any) -> Any:
        da, db = ta.dtype, tb.dtype
        if da is db:
            return da
        if is_number(a) and is_number(b):
            return promote([da, db])
        for literal, dtype in ((a, db), (b, da)):
            if is_number(literal):
                return dtype if fits_dtype(literal, dtype) else None
        if da.kind == "float" and db.kind == "float" and promote([da, db]) in (da, db):
            return promote([da, db])  # a storage format and its compute type: exact
        return None

    def converted(self, x: Any, t: Type, nodes: list[Node]) -> Operand:
        """x as an operand of type t; conversions are appended to `nodes`."""
        outer, self.block = self.block, nodes
        try:
            if isinstance(x, Unset):
                x = 0 if t.dtype.kind != "float" else 0.0
            if isinstance(t, TileType) and not isinstance(x, Handle):
                x = self.emit("full", [], shape=t.shape, value=x, dtype=t.dtype)
            if isinstance(x, Handle):
                return self.cast(x, t.dtype).value
            return self.operand(self.to(x, t.dtype))
        finally:
            self.block = outer


def same(a: Any, b: Any) -> bool:
    """Whether two traced values are one."""
    if a is b:
        return True
    if isinstance(a, Handle) and isinstance(b, Handle):
        return a.value == b.value
    return type(a) is type(b) and is_number(a) and a == b


def fits_dtype(x: Any, dtype: Any) -> bool:
    """Whether a literal may take this type."""
    if dtype.kind == "bool":
        return isinstance(x, bool)
    if isinstance(x, bool):
        return False
    return dtype.kind == "float" or isinstance(x, int)
