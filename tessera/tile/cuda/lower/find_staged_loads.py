"""Which loads feed matmuls, and can be copies to shared memory instead: those that are multiplied
as they lie, and in loops those of which an operand is computed, element by element, such as codes
and their scales.
"""

from __future__ import annotations

import functools
from math import prod

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.runtime.generations import Generation
from tessera.tile.cuda.lower.choose_matmul_unit import format_of
from tessera.tile.cuda.lower.next_iteration import known_ahead
from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    Node,
    Op,
    Operand,
    SSAValue,
    operands,
    regions,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, TileType, View
from tessera.tile.passes.integer_facts import Knowledge, divisor_of


@dataclass(frozen=True)
class Feed:
    """A load for matmuls. view: the box as memory has it; turned: the tile is its transpose.

    ahead: whether the loop around it may copy it iterations ahead.  users: id() of the matmuls.
    computed: threads read it from shared memory to compute an operand; multiplied: matmuls do, too.
    swizzle: of its buffer; None where threads read neighbours of a row, which needs none and spares
    them the exclusive ors.
    """

    value: SSAValue
    tensor: SSAValue
    view: SSAValue
    turned: bool
    dtype: DType
    shape: tuple[int, ...]
    ahead: bool
    users: frozenset[int]
    swizzle: str | None = "chunks"
    computed: bool = False
    multiplied: bool = True

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * self.dtype.bits // 8 // 128) * 128


def find_feeds(function: Function, generation: Generation, overlapping: bool,
               divisible: frozenset[str] = frozenset()) -> list[Feed]:
    """In order of the text. divisible: extents that are multiples of 16."""
    nodes = list(walk(function.body))
    # Where the user copies by himself, groups of ours would take in what his barriers complete.
    if any(isinstance(n, Op) and OPS[n.name].async_copy and OPS[n.name].effect == "async"
           for n in nodes):
        return []
    return _Finder(function, generation, overlapping, divisible).run()


class _Finder:
    def __init__(self, function: Function, generation: Generation, overlapping: bool,
                 divisible: frozenset[str]):
        self.function, self.generation, self.overlapping = function, generation, overlapping
        self.known = Knowledge(function, divisible)
        self.types = self.known.types
        self.made: dict[SSAValue, Op] = {}
        self.users: dict[SSAValue, list[tuple[Node, int]]] = {}
        self.around: dict[int, tuple[Node, ...]] = {}  # loops and branches, outermost first
        self.scan(function.body, ())

    def scan(self, nodes: tuple[Node, ...], around: tuple[Node, ...]) -> None:
        for node in nodes:
            self.around[id(node)] = around
            for i, x in enumerate(operands(node)):
                if isinstance(x, SSAValue):
                    self.users.setdefault(x, []).append((node, i))
            if isinstance(node, Op):
                self.made |= {d.value: node for d in node.outs}
            for region in regions(node):
                self.scan(region, (*around, node))

    def run(self) -> list[Feed]:
        loads = [n for n in walk(self.function.body)
                 if isinstance(n, Op) and n.name == "load_tile" and n.attr["fill"] == 0]
        found = [self.feed(op) for op in loads]
        return [f for f in found if f is not None]

    def feed(self, op: Op) -> Feed | None:
        value = op.outs[0].value
        matmuls, others = self.matmuls(value)
        source = self.source(op.args[0])
        if source is None:
            return None
        if others or not matmuls:
            return self.computed_feed(op, *source)
        tensor, view, turned = source
        t = self.types[view]
        assert isinstance(t, View)
        if len(t.shape) != 2 or not all(
                self.readable(p, i, flip ^ turned) for p, i, flip in matmuls):
            return None
        along = any(self.deep(p, i, flip ^ turned) for p, i, flip in matmuls)
        return Feed(value, tensor, view, turned, t.dtype, t.shape, self.ahead(op, view, tensor),
                    frozenset(id(p) for p, _, _ in matmuls), "chunks" if along else None)

    def computed_feed(self, op: Op, tensor: SSAValue, view: SSAValue, turned: bool) -> Feed | None:
        """A load of a loop of which an operand is computed there: its copy goes ahead of it."""
        users, t = self.computed.get(op.outs[0].value), self.types[view]
        assert isinstance(t, View)
        if not users or turned or t.dtype.packed or len(t.shape) > 2 or (
                not self.ahead(op, view, tensor) or not self.in_words(tensor, t)):
            return None
        own = [x for x in self.matmuls(op.outs[0].value)[0]
               if x[0].name == "matmul" and len(t.shape) == 2 and self.readable(*x)]
        along = any(self.deep(*x) for x in own)
        return Feed(op.outs[0].value, tensor, view, False, t.dtype, t.shape, True,
                    frozenset(users), "chunks" if along else None, True, bool(own))

    def in_words(self, tensor: SSAValue, box: View) -> bool:
        """Whether rows of a box begin where cp.async may: it copies words."""
        dims = self.types[tensor].dims  # type: ignore[union-attr]
        step = box.dtype.bits // 8 * min(self.known.extent(str(dims[-1])),
                                         divisor_of(box.shape[-1]))
        return bool(self.generation.async_copies) and step % 4 == 0

    @functools.cached_property
    def computed(self) -> dict[SSAValue, set[int]]:
        """Loads of which operands of matmuls are computed, with these matmuls: by ops of elements,
        out of loads of the same loop and what stood before it."""
        found: dict[SSAValue, set[int]] = {}
        for matmul in walk(self.function.body):
            if not isinstance(matmul, Op) or matmul.name != "matmul":
                continue
            for x in matmul.args[:2]:
                for load in self.loads_of(x, self.around[id(matmul)][-1:]) or ():
                    found.setdefault(load, set()).add(id(matmul))
        return found

    def loads_of(self, tile: Operand, loop: tuple[Node, ...]) -> list[SSAValue] | None:
        """The loads of a loop's own body that a tile is computed of; None where it is computed of
        anything else that the loop makes."""
        carried = {d.value for n in loop for d in getattr(n, "carried", ())}
        loads, seen, todo = list[SSAValue](), set[Operand](), [tile]
        while todo:
            x = todo.pop()
            if x in seen or not isinstance(x, SSAValue) or not isinstance(self.types[x], TileType):
                continue
            seen.add(x)
            made = self.made.get(x)
            if made is None and x in carried:
                return None
            if made is None or self.around[id(made)][-1:] != loop:
                continue
            if made.name == "load_tile":
                loads.append(x)
                continue
            record = OPS[made.name]
            if record.effect != "pure" or record.layouts in ("reduced", "first", "rows") or (
                    record.multiplies or record.access):
                return None
            todo += made.args
        return loads

    def deep(self, matmul: Op, operand: int, turned: bool) -> bool:
        """Whether what multiplies reads a column of what lies in memory."""
        a, b = (self.types[x].dtype for x in matmul.args[:2])  # type: ignore[index]
        threads = matmul.name == "matmul" and format_of(
            a, b, matmul.attr, self.generation) is None
        return not threads or (operand == 0) ^ turned

    def matmuls(self, x: SSAValue, flip: bool = False) -> tuple[list[tuple[Op, int, bool]], bool]:
        """(matmul, operand, transposed) of the uses that are matmuls; whether there are others."""
        found, others = [], False
        for node, i in self.users.get(x, []):
            if isinstance(node, Op) and OPS[node.name].multiplies and i < 2:
                found.append((node, i, flip))
            elif isinstance(node, Op) and node.name == "transpose":
                more, beside = self.matmuls(node.outs[0].value, not flip)
                found += more
                others |= beside
            else:
                others = True
        return found, others

    def source(self, x: Operand) -> tuple[SSAValue, SSAValue, bool] | None:
        """(tensor, view without transposition, whether it was transposed)"""
        turned = False
        while isinstance(x, SSAValue) and x in self.made and self.made[x].name == "view_transpose":
            x, turned = self.made[x].args[0], not turned
        made = self.made.get(x) if isinstance(x, SSAValue) else None
        if made is None or made.name != "view" or not isinstance(x, SSAValue):
            return None
        tensor = made.args[0]
        whole = isinstance(tensor, SSAValue) and isinstance(self.types[tensor], GlobalTensor)
        return (tensor, x, turned) if whole else None  # type: ignore[return-value]

    def readable(self, matmul: Op, operand: int, turned: bool) -> bool:
        """Whether the matmul reads the type as it lies in memory, at a good speed."""
        if matmul.name == "matmul_codes":
            return turned == (operand == 1)
        a, b = (self.types[x].dtype for x in matmul.args[:2])  # type: ignore[index]
        mine = (a, b)[operand]
        kinds = format_of(a, b, matmul.attr, self.generation)
        if kinds is None:
            return mine.bits >= 16 and not mine.packed
        stored = {"tf32": ("tf32", "f32")}.get(kinds[operand], (kinds[operand],))
        names = {"s8": "int8", "u8": "uint8", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
        if mine.name not in [names.get(s, s) for s in stored]:
            return False
        along_k = (operand == 0) ^ turned  # memory runs along k
        return along_k or mine.bits >= 16

    def ahead(self, op: Op, view: SSAValue, tensor: SSAValue) -> bool:
        """Whether a serial loop is right around it, knows its address and changes no source."""
        around = self.around[id(op)]
        loop = around[-1] if around else None
        if not isinstance(loop, For) or loop.over != "serial":
            return False
        step = loop.step
        uniform = all(not isinstance(x, SSAValue) or getattr(self.types[x], "uniform", False)
                      for x in (loop.lo, loop.hi))
        if not uniform or not isinstance(step, Const) or step.value <= 0:
            return False

        def steady(x: SSAValue) -> bool:
            return isinstance(self.types[x], GlobalTensor) and not any(
                self.changes(n, x) for n in walk(loop.body))

        return known_ahead(loop, view, steady) and steady(tensor)

    def changes(self, node: Node, tensor: SSAValue) -> bool:
        """Whether a node may write to a tensor."""
        if not isinstance(node, Op) or not OPS[node.name].writes:
            return False
        root = node.args[0]
        while isinstance(root, SSAValue) and root in self.made:
            root = self.made[root].args[0] if self.made[root].args else None  # type: ignore
        if not isinstance(root, SSAValue) or not isinstance(self.types[root], GlobalTensor):
            return False
        return self.overlapping or root == tensor


__all__ = ["Feed", "find_feeds"]
