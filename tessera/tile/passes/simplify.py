"""Removes what changes nothing: dead ops, carried values that stay as they were, empty branches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tessera.tile.ir.ir import (
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    map_operands,
    operands,
    regions,
    walk,
    with_regions,
)
from tessera.tile.ir.op_record import OPS

REMOVABLE = ("pure", "read", "alloc")


def simplify(function: Function) -> Function:
    """The same function with less in it; runs until nothing changes."""
    while True:
        body = _forward(function.body)
        body = _sweep(body, set())
        if body == function.body:
            return function
        function = replace(function, body=body)


def _forward(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Carried values that every iteration leaves alone are their initial values."""
    table: dict[SSAValue, Operand] = {}

    def follow(x: Operand) -> Operand:
        while isinstance(x, SSAValue) and x in table:
            x = table[x]
        return x

    def block(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out = []
        for node in nodes:
            node = map_operands(with_regions(node, block), follow)
            if isinstance(node, For | While):
                node = map_operands(_still(node, table), follow)
            elif isinstance(node, If):
                node = _agreeing(node, table)
            out.append(node)
        return tuple(out)

    return block(nodes)


def _still(node: For | While, table: dict[SSAValue, Operand]) -> For | While:
    keep = []
    for i, (d, init, end) in enumerate(zip(node.carried, node.inits, node.yields, strict=True)):
        if end == d.value or end == init:
            table[d.value] = init
        else:
            keep.append(i)
    if len(keep) == len(node.carried):
        return node
    return replace(node, carried=tuple(node.carried[i] for i in keep),
                   inits=tuple(node.inits[i] for i in keep),
                   yields=tuple(node.yields[i] for i in keep))


def _agreeing(node: If, table: dict[SSAValue, Operand]) -> If:
    keep = []
    for i, (d, x, y) in enumerate(zip(node.outs, node.thens, node.elses, strict=True)):
        if x == y:
            table[d.value] = x
        else:
            keep.append(i)
    return replace(node, outs=tuple(node.outs[i] for i in keep),
                   thens=tuple(node.thens[i] for i in keep),
                   elses=tuple(node.elses[i] for i in keep))


def _sweep(nodes: tuple[Node, ...], live: set[SSAValue]) -> tuple[Node, ...]:
    """Nodes that define a live value or act. `live` gains what they read."""
    out: list[Node] = []
    for node in reversed(nodes):
        if isinstance(node, Op):
            record = OPS[node.name]
            used = any(d.value in live for d in node.outs)
            if record.effect in REMOVABLE and not used:
                continue
        else:
            node = _trim(node, live)
            if not _acts(node) and not any(d.value in live for d in _results_of(node)):
                continue
        live |= _values(operands(node))
        for region in regions(node):
            live |= _values(x for n in _inside(region) for x in operands(n))
        out.append(node)
    return tuple(reversed(out))


def _inside(nodes: tuple[Node, ...]) -> Iterable[Node]:
    return walk(nodes)


def _values(xs: Iterable[Operand]) -> set[SSAValue]:
    return {x for x in xs if isinstance(x, SSAValue)}


def _results_of(node: For | While | If) -> tuple:
    return node.outs if isinstance(node, If) else node.carried


def _acts(node: For | While | If) -> bool:
    """Whether an op inside has an effect. A while may also not end: it stays."""
    if isinstance(node, While):
        return True
    return any(OPS[n.name].effect not in REMOVABLE for region in regions(node)
               for n in _inside(region) if isinstance(n, Op))


def _trim(node: For | While | If, live: set[SSAValue]) -> For | While | If:
    """Dead results dropped, then dead ops inside."""
    if isinstance(node, If):
        keep = [i for i, d in enumerate(node.outs) if d.value in live]
        node = replace(node, outs=tuple(node.outs[i] for i in keep),
                       thens=tuple(node.thens[i] for i in keep),
                       elses=tuple(node.elses[i] for i in keep))
        then = _sweep(node.then, live | _values(node.thens))
        return replace(node, then=then, orelse=_sweep(node.orelse, live | _values(node.elses)))
    inner = [x for region in regions(node) for n in _inside(region) for x in operands(n)]
    needed = live | _values(inner) | (_values([node.cond]) if isinstance(node, While) else set())
    keep = _needed(node, needed)
    node = replace(node, carried=tuple(node.carried[i] for i in keep),
                   inits=tuple(node.inits[i] for i in keep),
                   yields=tuple(node.yields[i] for i in keep))
    inside = live | _values(node.yields) | {d.value for d in node.carried}
    if isinstance(node, For):
        return replace(node, body=_sweep(node.body, inside))
    body = _sweep(node.body, set(inside))
    read = _values(x for n in _inside(body) for x in operands(n))
    test = _sweep(node.test, inside | _values([node.cond]) | read)
    return replace(node, test=test, body=body)


def _needed(node: For | While, needed: set[SSAValue]) -> list[int]:
    """Carried values that something reads besides the carrying itself."""
    keep: list[int] = []
    wanted = set(needed)
    while True:
        new = [i for i, d in enumerate(node.carried) if d.value in wanted]
        if new == keep:
            return keep
        keep = new
        wanted |= _values(node.yields[i] for i in keep)
