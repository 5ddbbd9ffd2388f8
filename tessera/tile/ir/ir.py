"""Tile IR: structured, typed, immutable.

A function body is a tuple of nodes: Op, For, While, If. An `SSAValue` is a name; its type stands at
its one definition (`Def`), so that changing a type renames nothing. A loop's carried values also
name their last value after the loop: there are no result lists, and two loops chain.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import field, replace
from typing import Any

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.tile.ir.types import Buffer, Type

VERSION = 1


@dataclass(frozen=True)
class SSAValue:
    """A name that is defined once in its function."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Const:
    """A number of a given type. NaN equals NaN: constants compare by their text."""

    value: Any = field(compare=False)
    dtype: DType
    text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", const_text(self.value, self.dtype))

    def __str__(self) -> str:
        return self.text


def const_text(value: Any, dtype: DType) -> str:
    if dtype.kind == "bool":
        return "true" if value else "false"
    number = repr(float(value)) if dtype.kind == "float" else str(int(value))
    return f"{number}:{dtype}"


Operand = SSAValue | Const


@dataclass(frozen=True)
class Def:
    """The definition of a value: its name and type."""

    value: SSAValue
    type: Type

    def __str__(self) -> str:
        return f"{self.value}: {self.type}"


@dataclass(frozen=True)
class Op:
    """outs = name(args) {attrs}. attrs: sorted (key, value) pairs."""

    name: str
    args: tuple[Operand, ...]
    outs: tuple[Def, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    where: SourceLine | None = field(default=None, compare=False)

    @property
    def attr(self) -> dict[str, Any]:
        return dict(self.attrs)


@dataclass(frozen=True)
class For:
    """for var = lo; var < hi; var += step (or > for a negative constant step): body.

    carried[i] begins as inits[i], becomes yields[i] after each iteration, and keeps its last value
    after the loop. over: 'serial' | 'lanes' | 'groups', how a range was spread (bounds are already
    those of one lane or group).
    """

    var: Def
    lo: Operand
    hi: Operand
    step: Operand
    carried: tuple[Def, ...]
    inits: tuple[Operand, ...]
    body: tuple[Node, ...]
    yields: tuple[Operand, ...]
    over: str = "serial"
    where: SourceLine | None = field(default=None, compare=False)


@dataclass(frozen=True)
class While:
    """Before each iteration `test` runs and decides by `cond`; carried as in For."""

    carried: tuple[Def, ...]
    inits: tuple[Operand, ...]
    test: tuple[Node, ...]
    cond: Operand
    body: tuple[Node, ...]
    yields: tuple[Operand, ...]
    where: SourceLine | None = field(default=None, compare=False)


@dataclass(frozen=True)
class If:
    """outs[i] = thens[i] where cond holds, else elses[i]."""

    cond: Operand
    then: tuple[Node, ...]
    orelse: tuple[Node, ...]
    outs: tuple[Def, ...]
    thens: tuple[Operand, ...]
    elses: tuple[Operand, ...]
    where: SourceLine | None = field(default=None, compare=False)


Node = Op | For | While | If


@dataclass(frozen=True)
class Param:
    """role: 'argument' | 'dim' (the run-time size of a named extent) | 'output' (allocated)."""

    value: SSAValue
    type: Type
    role: str = "argument"


@dataclass(frozen=True)
class GridAxis:
    """One axis of the launch grid: ceil((hi - lo) / block) groups; extents as text over the dims.

    stride: the loop over it goes on by the number of groups, so any number of groups is right.
    """

    dim: str
    block: int = 1
    lo: str = "0"
    stride: bool = False


@dataclass(frozen=True)
class Function:
    """One specialisation of a kernel."""

    name: str
    params: tuple[Param, ...]
    grid: tuple[GridAxis, ...]
    launch: str  # how groups are counted: 'axes' | 'elements' | 'one' | 'given'
    result: tuple[str, ...]  # ('none',), or ('param' | 'scalar' | 'tensor', name, ...)
    constants: tuple[tuple[str, Any], ...]
    body: tuple[Node, ...]
    lanes: int | None = None  # the group size that the kernel needs, if it needs one
    version: int = VERSION
    modes: tuple[str, ...] = ()  # of ir/modes.py: what its target may do, or must not
    # What was found out about it and is asked again at each call of a new form; no part of a copy.
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a group: its buffers one after the other, each aligned."""
        total = 0
        for node in walk(self.body):
            for made in outs_of(node):
                shared = isinstance(made.type, Buffer) and made.type.space == "shared"
                if shared and isinstance(node, Op) and node.name == "allocate":
                    assert isinstance(made.type, Buffer)
                    total = -(-total // made.type.alignment) * made.type.alignment
                    total += made.type.bytes
        return total

    @property
    def content_hash(self) -> str:
        """Of the printed form without source lines: equal on every machine."""
        from tessera.tile.ir.printing import print_ir

        return hashlib.sha256(print_ir(self, lines=False).encode()).hexdigest()[:16]


# --- walking ----------------------------------------------------------------------------------
def outs_of(node: Node) -> tuple[Def, ...]:
    """What a node defines for the nodes after it."""
    if isinstance(node, Op | If):
        return node.outs
    return node.carried


def regions(node: Node) -> tuple[tuple[Node, ...], ...]:
    if isinstance(node, For):
        return (node.body,)
    if isinstance(node, While):
        return (node.test, node.body)
    return (node.then, node.orelse) if isinstance(node, If) else ()


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node, outer before inner, in order."""
    for node in nodes:
        yield node
        for region in regions(node):
            yield from walk(region)


def operands(node: Node) -> tuple[Operand, ...]:
    """What a node reads itself; not what its regions read."""
    if isinstance(node, Op):
        return node.args
    if isinstance(node, For):
        return (node.lo, node.hi, node.step, *node.inits, *node.yields)
    if isinstance(node, While):
        return (*node.inits, node.cond, *node.yields)
    return (node.cond, *node.thens, *node.elses)


def definitions(function: Function) -> dict[SSAValue, Type]:
    """The type of every value of a function."""
    found = {p.value: p.type for p in function.params}
    for node in walk(function.body):
        found |= {d.value: d.type for d in outs_of(node)}
        if isinstance(node, For):
            found[node.var.value] = node.var.type
    return found


def defining_ops(nodes: tuple[Node, ...]) -> dict[Operand, Op]:
    """The op that each value is a result of, inside regions too. Constants have none, nor have
    parameters and what loops carry and branches give."""
    return {d.value: n for n in walk(nodes) if isinstance(n, Op) for d in n.outs}


def uses(nodes: tuple[Node, ...]) -> dict[SSAValue, int]:
    """How often each value is read."""
    count: dict[SSAValue, int] = {}
    for node in walk(nodes):
        for x in operands(node):
            if isinstance(x, SSAValue):
                count[x] = count.get(x, 0) + 1
    return count


def map_operands(node: Node, f: Any) -> Node:
    """The node with f applied to every operand, also inside its regions."""

    def all_of(xs: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(f(x) for x in xs)

    def inner(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(map_operands(n, f) for n in nodes)

    if isinstance(node, Op):
        args = all_of(node.args)
        return node if all(map(operator.is_, args, node.args)) else replace(node, args=args)
    if isinstance(node, For):
        return replace(node, lo=f(node.lo), hi=f(node.hi), step=f(node.step),
                       inits=all_of(node.inits), body=inner(node.body), yields=all_of(node.yields))
    if isinstance(node, While):
        return replace(node, inits=all_of(node.inits), test=inner(node.test), cond=f(node.cond),
                       body=inner(node.body), yields=all_of(node.yields))
    return replace(node, cond=f(node.cond), then=inner(node.then), orelse=inner(node.orelse),
                   thens=all_of(node.thens), elses=all_of(node.elses))


def with_regions(node: Node, f: Any) -> Node:
    """The node with f applied to each of its regions."""
    if isinstance(node, For):
        return replace(node, body=f(node.body))
    if isinstance(node, While):
        return replace(node, test=f(node.test), body=f(node.body))
    if isinstance(node, If):
        return replace(node, then=f(node.then), orelse=f(node.orelse))
    return node


class Names:
    """The one allocator of names: the user's name, then name_1, name_2, ..."""

    def __init__(self, taken: Any = ()):
        self.taken = set(taken)
        self.next: dict[str, int] = {}

    def fresh(self, hint: str) -> SSAValue:
        name, n = hint, self.next.get(hint, 0)
        while name in self.taken:
            n += 1
            name = f"{hint}_{n}"
        self.next[hint] = n
        self.taken.add(name)
        return SSAValue(name)

    @staticmethod
    def of(function: Function) -> Names:
        return Names(v.name for v in definitions(function))
