"""Loop splitting: the iterations before any mask acts, without the tests, then the rest with all
masks.

A branch between a wait and the arithmetic after it makes the assembler wait for everything there,
and the overlap is gone. A mask that need not be taken may be: it is the identity then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """An If that an iteration takes when var + reach > bound, bound the same in all iterations."""

    node: If
    reach: int
    bound: Operand


def split_loops(nodes: Nodes, maker: Maker) -> Nodes:
    """Loops with tests that begin to hold at some iteration, in two."""
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
    inside = set(made) | {d.value for d in loop.carried} | {
        d.value for n in loop.body if isinstance(n, If) for d in n.outs}
    found = []
    for node in loop.body:
        if not isinstance(node, If) or node.orelse or not _pure(node):
            continue
        test = made.get(node.cond)  # type: ignore[arg-type]
        if not is_op(test, "gt"):
            continue
        last, bound = made.get(test.args[0]), test.args[1]  # type: ignore[arg-type]
        if is_op(last, "add") and last.args[0] == loop.var.value and isinstance(
                last.args[1], Const) and bound not in inside:
            found.append(Test(node, int(last.args[1].value), bound))
    return found


def _pure(node: If) -> bool:
    return all(isinstance(n, Op) and OPS[n.name].effect in REMOVABLE for n in node.then)


def _split(loop: For, tests: list[Test], maker: Maker) -> list[Node]:
    """First the iterations with var <= bound - reach for all tests; `at` carries where they end."""
    kept: list[Node] = []

    def scalar(name: str, *args: Operand) -> SSAValue:
        kept.append(maker.op(name, args, loop.var.value.name, where=loop.where))
        return out(kept[-1])  # type: ignore[arg-type]

    end: Operand = loop.hi
    for test in dict.fromkeys((t.bound, t.reach) for t in tests):
        end = scalar("minimum", end, scalar("sub", test[0], number(test[1] - 1)))
    plain, names = maker.copy((_without(loop, tests),), {})
    (first,) = plain
    assert isinstance(first, For)
    at = maker.define(f"{loop.var.value.name}_end", INT)
    step = maker.op("add", (first.var.value, first.step), at.value.name, where=loop.where)
    first = replace(first, hi=end, carried=(*first.carried, at), inits=(*first.inits, loop.lo),
                    body=(*first.body, step), yields=(*first.yields, out(step)))
    rest = _taken(loop, tests)
    inits = tuple(names[d.value] for d in loop.carried)
    return [*kept, first, replace(rest, lo=at.value, inits=inits)]


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


def _taken(loop: For, tests: list[Test]) -> For:
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
