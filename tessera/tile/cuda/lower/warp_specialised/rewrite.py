"""What the passes of this folder share: making nodes, reading and renaming them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from tessera.errors import SourceLine
from tessera.numerics import i32
from tessera.tile.ir.ir import (
    Const,
    Def,
    For,
    Function,
    If,
    Names,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    definitions,
    map_operands,
    operands,
    outs_of,
    regions,
    walk,
    with_regions,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, Type

Nodes = tuple[Node, ...]
Table = dict[SSAValue, Operand]
INT = Scalar(i32)
# That make a first operand in registers of shared memory, while a matmul of the piece before runs.
READ_IN_PIECES = "unpack_codes", "read_columns"


class Maker:
    """Fresh names for one function, and the types of all values that have one."""

    def __init__(self, function: Function):
        self.names = Names.of(function)
        self.types: dict[SSAValue, Type] = definitions(function)

    def define(self, hint: str, type: Type) -> Def:
        value = self.names.fresh(hint)
        self.types[value] = type
        return Def(value, type)

    def op(self, name: str, args: Iterable[Operand], hint: str = "", type: Type | None = None,
           where: SourceLine | None = None, **attrs: Any) -> Op:
        """An op whose type the rule gives, unless one is given. No hint: it defines nothing."""
        given = tuple(args)
        if hint and type is None:
            record = OPS[name]
            assert record.rule is not None
            type = record.rule([self.type(a) for a in given], dict(record.defaults) | attrs)
        outs = (self.define(hint, type),) if hint and type is not None else ()
        return Op(name, given, outs, tuple(sorted(attrs.items())), where)

    def type(self, x: Operand) -> Type:
        return Scalar(x.dtype) if isinstance(x, Const) else self.types[x]

    def copy(self, nodes: Nodes, table: Mapping[SSAValue, Operand]) -> tuple[Nodes, Table]:
        """The nodes with fresh definitions; `table` maps what they read from outside. Returns the
        table with the new definitions in it."""
        known: Table = dict(table)
        for node in walk(nodes):
            made = [*outs_of(node), *([node.var] if isinstance(node, For) else [])]
            known |= {d.value: self.define(d.value.name, d.type).value for d in made}
        return substituted(redefined(nodes, known), known), known


def number(n: int) -> Const:
    return Const(n, i32)


def is_op(node: Node | None, *names: str) -> TypeGuard[Op]:
    return isinstance(node, Op) and node.name in names


def is_part(node: Node | None) -> TypeGuard[Op]:
    """Whether it is a view of a part of a tensor."""
    return isinstance(node, Op) and OPS[node.name].part


def out(node: Op) -> SSAValue:
    return node.outs[0].value


def made_by(node: Node) -> set[SSAValue]:
    return {d.value for d in outs_of(node)}


def reads(node: Node) -> set[SSAValue]:
    """Values that a node reads from outside of itself, also deep inside."""
    inner = [n for region in regions(node) for n in walk(region)]
    own = {d.value for n in inner for d in outs_of(n)}
    own |= {n.var.value for n in (node, *inner) if isinstance(n, For)}
    own |= made_by(node) if not isinstance(node, Op) else set()
    used = {x for n in (node, *inner) for x in operands(n) if isinstance(x, SSAValue)}
    return used - own


def substituted(nodes: Nodes, table: Mapping[SSAValue, Operand]) -> Nodes:
    """The nodes with the values that they read replaced."""
    return tuple(map_operands(n, lambda x: table.get(x, x) if isinstance(x, SSAValue) else x)
                 for n in nodes)


def redefined(nodes: Nodes, table: Mapping[SSAValue, Any]) -> Nodes:
    """The nodes with the values that they define replaced."""
    def new(d: Def) -> Def:
        return Def(table.get(d.value, d.value), d.type)

    def one(node: Node) -> Node:
        node = with_regions(node, lambda inner: tuple(map(one, inner)))
        if isinstance(node, Op | If):
            return replace(node, outs=tuple(map(new, node.outs)))
        node = replace(node, carried=tuple(map(new, node.carried)))
        return replace(node, var=new(node.var)) if isinstance(node, For) else node

    return tuple(map(one, nodes))


def map_blocks(nodes: Nodes, f: Callable[[Nodes], Iterable[Node]]) -> Nodes:
    """f on every block, inner blocks first."""
    return tuple(f(tuple(with_regions(n, lambda inner: map_blocks(inner, f)) for n in nodes)))


def ops_in(nodes: Nodes, *names: str) -> list[Op]:
    """The ops of these names in nodes and inside them, in order."""
    return [n for n in walk(nodes) if isinstance(n, Op) and n.name in names]


def with_attrs(op: Op, **attrs: Any) -> Op:
    return replace(op, attrs=tuple(sorted((op.attr | attrs).items())))


__all__ = ["INT", "Maker", "Nodes", "Table", "While", "is_op", "is_part", "made_by", "map_blocks",
           "number", "ops_in", "out", "reads", "redefined", "substituted", "with_attrs"]
