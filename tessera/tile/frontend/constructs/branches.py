"""Branches of the IR: each traced on its own, and the names that they change joined."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from tessera.tile.builder.rules import promote
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.edges import join_facts
from tessera.tile.ir.handles import Handle, Undefined, Unset, describe, is_number
from tessera.tile.ir.ir import Def, If, Node, Operand
from tessera.tile.ir.types import Scalar, TileType, Type

CHOICE = "__choice"  # the name of a ternary's value, and of `and` and `or`, while it is traced


def branch(t: KernelTracer, test: Handle, then: Callable[[], None],
           orelse: Callable[[], None]) -> None:
    """An If: what each of the two traces, and the names that they change as its results."""
    lane = not t.ir.is_uniform(test)
    before, taken, contents = dict(t.env), set(t.ir.names.taken), dict(t.facts.contents)
    t.ir.divergent += lane
    then_nodes, then_env = region(t, then)
    t.env = dict(before)
    then_contents, t.facts.contents = t.facts.contents, contents
    else_nodes, else_env = region(t, orelse)
    t.ir.divergent -= lane
    t.env = before
    t.facts.contents = t.facts.joined_contents(then_contents, t.facts.contents, taken,
                                               edge_in_branch(t), "in two branches")
    merge(t, test, lane, (then_nodes, then_env), (else_nodes, else_env), taken)


def edge_in_branch(t: KernelTracer) -> str:
    return f"has an edge of its own in a branch of the if at line {t.position.where().line}"


def region(t: KernelTracer, trace: Callable[[], None]) -> tuple[list[Node], dict[str, Any]]:
    """The nodes of a branch and the names after it."""
    outer, t.ir.block = t.ir.block, []
    trace()
    inner, t.ir.block = t.ir.block, outer
    return inner, dict(t.env)


def choice(t: KernelTracer, test: Handle, then: Callable[[], Any],
           orelse: Callable[[], Any]) -> Any:
    """What `then` gives where a condition holds, elsewhere what `orelse` gives; each is
    evaluated only there."""
    def put(value: Callable[[], Any]) -> None:
        t.env[CHOICE] = value()

    branch(t, test, partial(put, then), partial(put, orelse))
    return t.env.pop(CHOICE)


def merge(t: KernelTracer, test: Handle, lane: bool, then: tuple, orelse: tuple,
          taken: set[str]) -> None:
    """Names that the branches changed become results of the If."""
    then_nodes, then_env = then
    else_nodes, else_env = orelse
    new: dict[str, Any] = {}
    outs: list[Def] = []
    thens: list[Operand] = []
    elses: list[Operand] = []

    def merged(name: str, a: Any, b: Any) -> Any:
        """One value for two, of tuples item by item."""
        if same_value(a, b):
            return a
        if (pairs := items_of(a, b)) is not None:
            return tuple(merged(f"{name}[{i}]", *pair) for i, pair in enumerate(pairs))
        type_ = join(t, name, a, b, "the branches of this if give it", lane)
        x = converted(t, a, type_, then_nodes)
        y = converted(t, b, type_, else_nodes)
        made = Def(t.ir.names.fresh(as_name(name)), type_)
        outs.append(made)
        thens.append(x)
        elses.append(y)
        value = Handle(made.value, type_)
        note_type(t, value)
        if isinstance(type_, TileType):
            known = [t.facts.outlived(t.facts.of(v), taken, edge_in_branch(t)) for v in (a, b)]
            t.facts.sources[made.value] = (a.value, b.value) if isinstance(
                a, Handle) and isinstance(b, Handle) else ()
            t.facts.state(made.value, join_facts(known[0], known[1], len(type_.shape),
                                                 "in two branches", t.position.where()))
        return value

    for name in {**then_env, **else_env}:
        a, b = then_env.get(name), else_env.get(name)
        if name in then_env and name in else_env and same_value(a, b):
            t.env[name] = a
            continue
        missing = name not in then_env or name not in else_env
        if missing or isinstance(a, Undefined) or isinstance(b, Undefined):
            new[name] = Undefined(f"{name!r} has a value only in one branch of the if at line "
                                  f"{t.position.where().line}", t.position.where())
            continue
        new[name] = merged(name, a, b)
    t.ir.block.append(If(test.value, tuple(then_nodes), tuple(else_nodes), tuple(outs),
                         tuple(thens), tuple(elses), t.position.where()))
    t.env |= new


def items_of(a: Any, b: Any) -> list[tuple[Any, Any]] | None:
    """The items of two tuples side by side; a function that has not returned yet has as many as
    the other. None where they are no such tuples."""
    if isinstance(a, Unset) and isinstance(b, tuple):
        a = (a,) * len(b)
    if isinstance(b, Unset) and isinstance(a, tuple):
        b = (b,) * len(a)
    if not (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)):
        return None
    return list(zip(a, b, strict=True))


def as_name(spelled: str) -> str:
    """The name in the IR of what the program calls p[1], or of a result."""
    name = spelled.replace("[", "_").replace("]", "")
    return name.strip("_") or name


def note_type(t: KernelTracer, h: Handle) -> None:
    """A value that control flow makes. An earlier trace of a loop may have used its name."""
    t.values.types[h.value] = h.type
    t.values.defined_by.pop(h.value, None)
    t.facts.redefine(h.value)


def join(t: KernelTracer, name: str, a: Any, b: Any, said: str, lane: bool) -> Type:
    """The one type for a name with two values; literals adapt. Errors name both types."""
    for x in (a, b):
        if not isinstance(x, Handle | Unset) and not is_number(x):
            if name == RETURN and x is None:
                t.fail("a value is returned on some paths only",
                       "return one on each path, at the end too")
            t.fail(f"{spelled(t, name)}: {said} {describe(a)} and {describe(b)}",
                   "only numbers, scalars and tiles, and tuples of as many of them, may differ at "
                   "run time")
    if isinstance(a, Unset) or isinstance(b, Unset):
        known = b if isinstance(a, Unset) else a
        return laned(t, t.ir.type_of(known), lane)
    ta, tb = t.ir.type_of(a), t.ir.type_of(b)
    for kind in (ta, tb):
        if not isinstance(kind, Scalar | TileType):
            t.fail(f"{spelled(t, name)}: {said} different places in memory, {ta} and {tb}",
                   "index a list of buffers by a stage number instead")
    common = common_type(a, b, ta, tb)
    if common is None:
        wa, wb = made_at(t, a), made_at(t, b)
        t.fail(f"{spelled(t, name)} changes its type: {said} {ta} and {tb}",
               "give it one type: cast with ts.tile.cast(x, dtype), or use another name",
               code="E_TYPE_CHANGE",
               also=tuple((str(kind), w) for kind, w in ((ta, wa), (tb, wb)) if w is not None))
    return laned(t, common, lane, name)


def laned(t: KernelTracer, kind: Type, lane: bool, name: str = "") -> Type:
    """The type of a name where control depends on the lane: a number then does, too."""
    if not lane:
        return kind
    if isinstance(kind, TileType):
        said = spelled(t, name)
        t.fail(f"the tile {said} is assigned where control depends on the lane",
               "a tile belongs to the whole group: use ts.tile.where")
    return Scalar(kind.dtype, uniform=False)


def spelled(t: KernelTracer, name: str) -> str:
    """A name for a message; what a ternary, `and` or `or` gives has its text."""
    root, bracket, item = name.partition("[")
    if root == RETURN:
        return f"the result{bracket}{item}"
    return repr((ast.unparse(t.position.node) if root == CHOICE else root) + bracket + item)


def made_at(t: KernelTracer, x: Any) -> Any:
    made = t.values.defined_by.get(x.value) if isinstance(x, Handle) else None
    return made.where if made is not None else None


def common_type(a: Any, b: Any, ta: Any, tb: Any) -> Type | None:
    """The type that both values may have; None without one."""
    if isinstance(ta, TileType) != isinstance(tb, TileType):
        tile, other, literal = (ta, tb, b) if isinstance(ta, TileType) else (tb, ta, a)
        return tile if is_number(literal) and fits_dtype(literal, tile.dtype) else None
    dtype = common_dtype(a, b, ta, tb)
    if dtype is None:
        return None
    if isinstance(ta, TileType):
        return TileType(dtype, ta.shape) if ta.shape == tb.shape else None
    return Scalar(dtype, ta.uniform and tb.uniform)


def common_dtype(a: Any, b: Any, ta: Any, tb: Any) -> Any:
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


def converted(t: KernelTracer, x: Any, kind: Any, nodes: list[Node]) -> Operand:
    """x as an operand of a type; conversions are appended to `nodes`."""
    outer, t.ir.block = t.ir.block, nodes
    try:
        if isinstance(x, Unset):
            x = 0 if kind.dtype.kind != "float" else 0.0
        if isinstance(kind, TileType) and not isinstance(x, Handle):
            x = t.ir.emit("full", [], shape=kind.shape, value=x, dtype=kind.dtype)
        if isinstance(x, Handle):
            return t.ir.cast(x, kind.dtype).value
        return t.ir.operand(t.ir.to(x, kind.dtype))
    finally:
        t.ir.block = outer


def same_value(a: Any, b: Any) -> bool:
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
