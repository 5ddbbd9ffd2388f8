"""Loops of a kernel: carried names, their types, and counted and conditional loops in the IR."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NoReturn

from tessera.lazy_dataclass import dataclass
from tessera.tile.builder.rules import promote
from tessera.tile.frontend.constructs.branches import (
    as_name,
    converted,
    join,
    note_type,
    same_value,
)
from tessera.tile.frontend.constructs.conditions import condition
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.tracer import KernelTracer, statement
from tessera.tile.ir.affine import Forms
from tessera.tile.ir.edges import NOTHING, TileEdges, join_facts
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.handles import UNSET, Handle, Undefined, Unset, describe, is_number
from tessera.tile.ir.ir import Def, For, Node, Operand, SSAValue, While
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, Type, View


@dataclass(frozen=True, eq=False)
class Carried:
    """A name that a loop changes, or an item of a tuple of that name, the type it is carried in,
    and what it is before the loop.

    path: the indices of the item, () of a name. whole: what the name is before the loop. facts: of
    its edges, before each iteration.
    """

    name: str
    path: tuple[int, ...]
    whole: Any
    type: Type
    init: Any
    facts: TileEdges = NOTHING

    @property
    def spelled(self) -> str:
        return self.name + "".join(f"[{i}]" for i in self.path)

    def of(self, env: dict[str, Any]) -> Any:
        """What it is now."""
        value = env[self.name]
        for i in () if isinstance(value, Undefined) else self.path:
            value = value[i]
        return value

    def become(self, env: dict[str, Any], value: Any) -> None:
        env[self.name] = with_item(env[self.name], self.path, value)


def with_item(x: Any, path: tuple[int, ...], value: Any) -> Any:
    """x, a tuple, with another item at a path."""
    if not path:
        return value
    at, *rest = path
    return (*x[:at], with_item(x[at], tuple(rest), value), *x[at + 1:])


def items_in(x: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    """The items of a tuple, of tuples in it too, with their paths; of anything else itself."""
    if not isinstance(x, tuple):
        return [(path, x)]
    return [found for i, y in enumerate(x) for found in items_in(y, (*path, i))]


@dataclass(frozen=True, eq=False)
class Start:
    """What an attempt to trace a loop starts from: names that are taken, what shared buffers hold,
    and how many edges were met."""

    taken: set[str]
    contents: dict[SSAValue, TileEdges]
    edges_seen: int


@dataclass(frozen=True, eq=False)
class TraceSnapshot:
    """What a second trace of a loop starts from. nodes: of the block; axes: of the grid."""

    env: dict[str, Any]
    nodes: int
    taken: set[str]
    next: dict[str, int]
    forms: Forms
    axes: int
    contents: dict[SSAValue, TileEdges]
    origins: dict[str, Any]


# (carried, inits, nodes of an iteration, yields) -> the node
MakeLoop = Callable[[tuple[Def, ...], tuple[Operand, ...], tuple[Node, ...], tuple[Operand, ...]],
                    For | While]
Tried = dict[tuple[str, tuple[int, ...]], tuple[Type, TileEdges]]

ATTEMPTS = 16  # a type changes once or twice, what is known of edges a few times


@statement(ast.While)
def while_statement(t: KernelTracer, s: ast.While) -> None:
    exits = list(getattr(s, "exits", ()))
    tests = [ast.UnaryOp(ast.Not(), ast.Name(f, ast.Load())) for f in exits]
    test = ast.BoolOp(ast.And(), [*tests, s.test]) if tests else s.test
    ast.fix_missing_locations(ast.copy_location(test, s.test))
    while_loop(t, s, test, resets(s) + s.body)


def while_loop(t: KernelTracer, s: Any, test: ast.expr, body: list[ast.stmt]) -> None:
    """A loop that tests before each iteration."""
    names = [n for n in stored_names(body) if n in t.env]
    begin = snapshot(t)

    def head() -> tuple[bool, MakeLoop]:
        cond = t.ir.decided(condition(t, test), "a while",
                            "loop on one number: while ts.tile.reduce_min(t) < 10.0")
        if not isinstance(cond, Handle):
            cond = t.ir.emit("constant", [], dtype=t.ir.literal(True).dtype, value=cond)
        tested = tuple(t.ir.block)
        return not t.ir.is_uniform(cond), lambda carried, inits, nodes, yields: While(
            carried, inits, tested, t.ir.operand(cond), nodes, yields, t.position.where())

    trace_loop(t, names, body, begin, begin, head)


def trace_loop(t: KernelTracer, names: list[str], body: list[ast.stmt], begin: TraceSnapshot,
               again_from: TraceSnapshot, head: Callable[[], tuple[bool, MakeLoop]]) -> Any:
    """Traces until the types of the carried names are those they have after an iteration; the node
    is appended and returned.

    begin: before the loop and its bounds.  again_from: where each attempt begins.
    head: traces what is in front of an iteration: whether threads leave the loop one by one, and
    what makes its node
    """
    tried: Tried = {}
    for _ in range(ATTEMPTS):
        start = Start(begin.taken, dict(t.facts.contents), t.facts.edges_seen)
        carried = carried_names(t, names, tried)
        inits = [converted(t, c.init, c.type, t.ir.block) for c in carried]
        defs = enter(t, carried)
        outer, t.ir.block = t.ir.block, []
        lane, make = head()
        t.ir.block = []
        iteration(t, body, lane)
        nodes, t.ir.block = t.ir.block, outer
        again = close(t, names, carried, defs, lane, start)
        if again is None:
            break
        tried, contents = again
        rewind(t, again_from)
        t.facts.contents = contents
    else:
        _never_settles(t)
    yields = tuple(converted(t, c.of(t.env), c.type, nodes) for c in carried)
    node = make(defs, tuple(inits), tuple(nodes), yields)
    t.loop_env.append(begin.env)
    leave(t, carried, defs, start, lambda: t.ir.block.append(node))
    t.loop_env.pop()
    return node


def iteration(t: KernelTracer, body: list[ast.stmt], lane: bool) -> None:
    t.depth += 1
    t.ir.divergent += lane
    t.statements(body)
    t.ir.divergent -= lane
    t.depth -= 1


def snapshot(t: KernelTracer) -> TraceSnapshot:
    return TraceSnapshot(dict(t.env), len(t.ir.block), set(t.ir.names.taken), dict(t.ir.names.next),
                      t.values.forms.copy(), len(t.grid.axes), dict(t.facts.contents),
                      dict(t.grid.origins))


def rewind(t: KernelTracer, to: TraceSnapshot) -> None:
    t.facts.contents, t.grid.origins = dict(to.contents), dict(to.origins)
    t.env = dict(to.env)
    del t.ir.block[to.nodes:]
    del t.grid.axes[to.axes:]
    t.ir.names.taken, t.ir.names.next = set(to.taken), dict(to.next)
    t.values.forms = to.forms.copy()


def carried_names(t: KernelTracer, names: list[str], tried: Tried) -> list[Carried]:
    out = []
    for name in names:
        if isinstance(t.env[name], Unset):  # a tuple, when an iteration returns one
            paths = [p for n, p in tried if n == name]
            t.env[name] = unset_items(paths)
        for path, init in items_in(t.env[name]):
            if not isinstance(init, Handle | Unset) and not is_number(init):
                continue
            if isinstance(init, Handle) and isinstance(init.type, Buffer | View | GlobalTensor):
                continue
            if isinstance(init, Unset) and (name, path) not in tried:
                continue
            kind, facts = tried.get((name, path)) or (t.ir.type_of(init), t.facts.of(init))
            out.append(Carried(name, path, t.env[name], kind, init, facts))
    return out


def unset_items(paths: list[tuple[int, ...]]) -> Any:
    """UNSET, or a tuple of it that has items at these paths."""
    if not any(paths):
        return UNSET
    return tuple(unset_items([p[1:] for p in paths if p[0] == i])
                 for i in range(1 + max(p[0] for p in paths)))


def enter(t: KernelTracer, carried: list[Carried]) -> tuple[Def, ...]:
    defs = tuple(Def(t.ir.names.fresh(as_name(c.spelled)), c.type) for c in carried)
    for c, d in zip(carried, defs, strict=True):
        c.become(t.env, Handle(d.value, d.type))
        note_type(t, c.of(t.env))
        t.facts.state(d.value, c.facts)
    return defs


def close(t: KernelTracer, names: list[str], carried: list[Carried], defs: tuple[Def, ...],
          lane: bool, start: Start) -> tuple[Tried, dict[SSAValue, TileEdges]] | None:
    """None when every carried type is what it is after an iteration, and so are the facts of edges;
    else those to try, and what shared buffers hold. names: what the loop assigns."""
    tried: Tried = {}
    changed = False
    edges = t.facts.edges_seen != start.edges_seen
    for c, d in zip(carried, defs, strict=True):
        require_items(t, c, carried)
        after = c.of(t.env)
        if isinstance(after, Undefined):
            t.fail(after.why, "give it a value in both branches")
        before: Any = c.init if not isinstance(c.init, Handle) else Handle(c.init.value, c.type)
        said = f"before the loop at line {t.position.where().line} and after one iteration it is"
        joined = join(t, c.spelled, before, after, said, lane)
        if isinstance(c.type, Scalar) and not c.type.uniform and isinstance(joined, Scalar):
            joined = Scalar(joined.dtype, uniform=False)
        facts = around(t, c, d.value, start)
        tried[c.name, c.path] = joined, facts
        changed |= joined != c.type or facts.axes != c.facts.axes or edges and facts != c.facts
    for path, value in items_in(t.env.get(RETURN)) if RETURN in names else ():
        if (RETURN, path) not in tried and (isinstance(value, Handle) or is_number(value)):
            tried[RETURN, path], changed = (t.ir.type_of(value), t.facts.of(value)), True
    contents = t.facts.joined_contents(start.contents, t.facts.contents, start.taken,
                                       each_iteration(t), "before and in a loop")
    for root in {**contents, **start.contents}:
        a, b = contents.get(root, NOTHING), start.contents.get(root, NOTHING)
        changed |= a.axes != b.axes or edges and a != b
    return (tried, contents) if changed else None


def _never_settles(t: KernelTracer) -> NoReturn:
    raise TileIRError(f"what this loop carries has other types in each of {ATTEMPTS} traces of it",
                      where=t.position.where())


def require_items(t: KernelTracer, c: Carried, carried: list[Carried]) -> None:
    """A tuple has as many items after an iteration, and those that are not carried are the same."""
    now = t.env[c.name]
    if not c.path or isinstance(now, Undefined):
        return
    items, after = dict(items_in(c.whole)), dict(items_in(now))
    carries = {o.path for o in carried if o.name == c.name}
    if [*items] != [*after] or not all(same_value(items[p], after[p])
                                       for p in items.keys() - carries):
        t.fail(f"{c.name!r} changes in a loop from {describe(c.whole)} to {describe(now)}",
               "a tuple that a loop changes keeps the number of its items, and only numbers, "
               "scalars and tiles among them change")


def _counted(x: Any) -> str:
    return describe(x) + (f" of {len(x)} items" if isinstance(x, list | tuple) else "")


def each_iteration(t: KernelTracer) -> str:
    return f"has another edge in each iteration of the loop at line {t.position.where().line}"


def around(t: KernelTracer, c: Carried, value: SSAValue, start: Start) -> TileEdges:
    """Of a carried tile before any iteration: what it was, or what it is after one."""
    if not isinstance(c.type, TileType):
        return NOTHING
    last = c.of(t.env)
    after = t.facts.outlived(t.facts.of(last), start.taken, each_iteration(t))
    found = join_facts(c.facts, after, len(c.type.shape), "before and in a loop",
                       t.position.where())
    if isinstance(last, Handle):
        t.facts.sources[value] = (c.init.value, last.value) if isinstance(
            c.init, Handle) else ()
        if t.facts.adds_to(last.value, value):
            return t.facts.totals(found)
    return found


def leave(t: KernelTracer, carried: list[Carried], defs: tuple[Def, ...], start: Start,
          append: Callable[[], None]) -> None:
    """After the loop: carried names have their last value, others set inside have none."""
    append()
    inside = dict(t.env)
    ends = [around(t, c, d.value, start) for c, d in zip(carried, defs, strict=True)]
    zeros = all(f == c.facts for f, c in zip(ends, carried, strict=True))
    before = t.loop_env[-1] if t.loop_env else {}
    t.facts.contents = {b: f if zeros else TileEdges(f.axes) for b, f in start.contents.items()}
    for c, d in zip(carried, defs, strict=True):
        c.become(t.env, Handle(d.value, d.type))
        t.values.types[d.value] = d.type
        t.facts.state(d.value, c.facts if zeros else TileEdges(c.facts.axes))
    known = {c.name for c in carried}
    for name, value in inside.items():
        if name in known:
            continue
        if name in before and same_value(before[name], value):
            continue
        if isinstance(value, Undefined):
            t.env[name] = value
            continue
        if name in before and not isinstance(value, Handle):
            grown = isinstance(value, list) and isinstance(before[name], list)
            instead = (f"a list is made at once: {name} = [f(i) for i in range(4)]" if grown else
                       "of buffers, index a list by a stage number")
            t.fail(f"{name!r} changes in a loop from {_counted(before[name])} to "
                   f"{_counted(value)}",
                   f"only numbers, scalars and tiles may change in a loop; {instead}")
        t.env[name] = Undefined(
            f"{name!r} has a value only inside the loop at line {t.position.where().line}",
            t.position.where())


def for_loop(t: KernelTracer, s: Any, lo: Any, hi: Any, step: Any, over: str,
             body: list[ast.stmt]) -> For:
    """One counted loop with bounds as given; returns the node that was appended."""
    require_bounds(t, lo, hi, step)
    names = [n for n in stored_names(body) if n in t.env and n != s.target.id]
    dtype = promote([t.ir.type_of(x).dtype for x in (lo, hi, step)])
    lane = not all(map(t.ir.is_uniform, (lo, hi, step)))
    begin = snapshot(t)
    first, last, by = (t.ir.operand(t.ir.to(x, dtype)) for x in (lo, hi, step))

    def head() -> tuple[bool, MakeLoop]:
        var = Def(t.ir.names.fresh(s.target.id), Scalar(dtype, not lane))
        t.env[s.target.id] = Handle(var.value, var.type)
        note_type(t, t.env[s.target.id])
        t.values.loop_bounds[var.value] = (first, last, by)
        return lane, lambda carried, inits, nodes, yields: For(
            var, first, last, by, carried, inits, nodes, yields, over, t.position.where())

    return trace_loop(t, names, body, begin, snapshot(t), head)


def require_bounds(t: KernelTracer, lo: Any, hi: Any, step: Any) -> None:
    for x, what in ((lo, "start"), (hi, "stop"), (step, "step")):
        kind = t.ir.type_of(x).dtype.kind if isinstance(x, Handle) or is_number(x) else None
        if kind not in ("int", "uint") or (isinstance(x, Handle)
                                           and not isinstance(x.type, Scalar)):
            t.fail(f"the {what} of a range must be an integer, got {describe(x)}")
    if isinstance(step, int) and step == 0:
        t.fail("the step of a range is 0")


def resets(s: Any) -> list[ast.stmt]:
    """Assignments that clear a loop's continue flag at the start of an iteration."""
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
