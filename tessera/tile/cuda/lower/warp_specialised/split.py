"""Loop splitting: the iterations before any mask acts, without the tests, then the rest with all
masks.

A branch between a wait and the arithmetic after it makes the assembler wait for everything there,
and the overlap is gone. A mask that need not be taken may be: it is the identity then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    INT,
    Maker,
    Nodes,
    Table,
    is_op,
    map_blocks,
    number,
    out,
    reads,
    substituted,
)
from tessera.tile.ir.ir import Const, For, If, Node, Op, Operand, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes.simplify import REMOVABLE


@dataclass(frozen=True)
class Test:
    """An If that an iteration takes when var + reach > bound; early: when
    var - reach < bound - less. `bound` and `less` are the same in all iterations."""

    node: If
    reach: int
    bound: Operand
    less: Operand | None = None
    early: bool = False


def split_loops(nodes: Nodes, maker: Maker) -> Nodes:
    """Loops with tests that begin, or cease, to hold at some iteration, in two or three."""
    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        for node in nodes:
            tests = _tests(node) if isinstance(node, For) else []
            kept += _split(node, tests, maker) if tests else [node]  # type: ignore[arg-type]
        return kept

    return map_blocks(nodes, block)


def _tests(loop: For) -> list[Test]:
    if not isinstance(loop.step, Const) or loop.step.value <= 0:
        return []
    made = {out(n): n for n in loop.body if isinstance(n, Op) and n.outs}
    inside = set(made) | {d.value for d in loop.carried} | {loop.var.value} | {
        d.value for n in loop.body if isinstance(n, If) for d in n.outs}
    found = []
    for node in loop.body:
        if not isinstance(node, If) or node.orelse or not _pure(node):
            continue
        test = made.get(node.cond)  # type: ignore[arg-type]
        if is_op(test, "gt"):
            found += _compared(node, test, loop, made, inside)
    return found


def _compared(node: If, test: Op, loop: For, made: dict[SSAValue, Op],
              inside: set[SSAValue]) -> list[Test]:
    """The test of an If as one of its loop: start + reach > bound, of which one varies."""
    start, bound, reach = *test.args, 0
    last = made.get(start)  # type: ignore[arg-type]
    if is_op(last, "add") and isinstance(last.args[1], Const):
        start, reach = last.args[0], int(last.args[1].value)
    if start == loop.var.value and bound not in inside:
        return [Test(node, reach, bound)]
    moved = made.get(bound)  # type: ignore[arg-type]
    at, less = moved.args if is_op(moved, "add") else (bound, None)
    if at == loop.var.value and start not in inside and less not in inside:
        return [Test(node, reach, start, less, early=True)]
    return []


def _pure(node: If) -> bool:
    return all(isinstance(n, Op) and OPS[n.name].effect in REMOVABLE for n in node.then)


def _split(loop: For, tests: list[Test], maker: Maker) -> list[Node]:
    """The iterations in which early tests hold, those in which none does, those in which others do.
    The first part has the early masks alone and ends where another begins; what is left then has
    all of them. `at` carries where one part ends and the next begins."""
    early, late = [t for t in tests if t.early], [t for t in tests if not t.early]
    kept: list[Node] = []
    end = _late_start(loop, late, maker, kept) if late else loop.hi
    if early:
        until = _early_end(loop, early, end, maker, kept)
        only = _without(loop, late)
        first, rest = _until(loop, _with_branches_taken(only, _tests(only)), until, maker)
        kept.append(first)
        loop = replace(loop, **rest)
        if not late:
            return [*kept, _without(loop, early)]
    first, rest = _until(loop, _without(loop, tests), end, maker)
    return [*kept, first, replace(_with_branches_taken(loop, tests), **rest)]


def _late_start(loop: For, tests: list[Test], maker: Maker, kept: list[Node]) -> Operand:
    """var <= bound - reach for all tests before it."""
    end: Operand = loop.hi
    for bound, reach in dict.fromkeys((t.bound, t.reach) for t in tests):
        begin = _scalar(loop, maker, kept, "sub", bound, number(reach - 1))
        end = _scalar(loop, maker, kept, "minimum", end, begin)
    return end


def _early_end(loop: For, tests: list[Test], most: Operand, maker: Maker, kept: list[Node]
               ) -> Operand:
    """var >= bound - less + reach for all tests from it on; `most` at most."""
    last: Operand | None = None
    for bound, less, reach in dict.fromkeys((t.bound, t.less, t.reach) for t in tests):
        end = _scalar(loop, maker, kept, "add", bound, number(reach))
        end = end if less is None else _scalar(loop, maker, kept, "sub", end, less)
        last = end if last is None else _scalar(loop, maker, kept, "maximum", last, end)
    assert last is not None
    return _scalar(loop, maker, kept, "minimum", most, last)


def _scalar(loop: For, maker: Maker, kept: list[Node], name: str, *args: Operand) -> SSAValue:
    op = maker.op(name, args, loop.var.value.name, where=loop.where)
    kept.append(op)
    return out(op)


def _until(loop: For, part: For, end: Operand, maker: Maker) -> tuple[For, dict[str, Any]]:
    """The iterations of a part of a loop up to `end`; what the loop with the others has else."""
    copied, names = maker.copy((part,), {})
    (first,) = copied
    assert isinstance(first, For)
    at = maker.define(f"{loop.var.value.name}_end", INT)
    step = maker.op("add", (first.var.value, first.step), at.value.name, where=loop.where)
    first = replace(first, hi=end, carried=(*first.carried, at), inits=(*first.inits, loop.lo),
                    body=(*first.body, step), yields=(*first.yields, out(step)))
    return first, {"lo": at.value, "inits": tuple(names[d.value] for d in loop.carried)}


def _without(loop: For, tests: list[Test]) -> For:
    table: Table = {d.value: x for t in tests
                    for d, x in zip(t.node.outs, t.node.elses, strict=True)}
    table = {k: _follow(table, v) for k, v in table.items()}
    gone = [t.node for t in tests]
    body = substituted(tuple(n for n in loop.body if n not in gone), table)
    return swept(replace(loop, body=body, yields=tuple(_follow(table, y) for y in loop.yields)))


def _follow(table: Table, x: Operand) -> Operand:
    while isinstance(x, SSAValue) and x in table:
        x = table[x]
    return x


def _with_branches_taken(loop: For, tests: list[Test]) -> For:
    table: Table = {}
    body: list[Node] = []
    gone = {id(t.node): t.node for t in tests}
    for node in loop.body:
        if id(node) in gone:
            assert isinstance(node, If)
            body += substituted(node.then, table)
            table |= {d.value: _follow(table, x)
                      for d, x in zip(node.outs, node.thens, strict=True)}
        else:
            body += substituted((node,), table)
    return swept(replace(loop, body=tuple(body),
                         yields=tuple(_follow(table, y) for y in loop.yields)))


def swept(loop: For) -> For:
    """Without the scalars that only the tests read."""
    body = loop.body
    while True:
        wanted = {y for y in loop.yields if isinstance(y, SSAValue)}.union(*map(reads, body))
        kept = tuple(n for n in body if not (
            isinstance(n, Op) and OPS[n.name].effect == "pure"
            and not any(d.value in wanted for d in n.outs)))
        if kept == body:
            return replace(loop, body=body)
        body = kept
