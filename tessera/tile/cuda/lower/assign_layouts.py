"""Chooses the layout of every tile, and converts where two choices meet.

Layouts are anchored where they matter and spread from there until nothing changes: first the
accumulators of matmuls, then global memory (the largest box first), then whatever is left.
Elementwise ops want one layout for operands and result; a reduction, a new axis and the like hand
on a relabelled one. Where a value arrives in another layout than its reader wants, a
`convert_layout` is put in; a tile that is computed of positions alone is computed again.

A transposed tile is read along one axis and written along the other. Its threads have blocks, of
neighbours along both, and change between the two accesses: memory is reached in 16 bytes a thread
and whole rows of a tile on either side.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.runtime.generations import Generation
from tessera.tile.cuda.intrinsics.layout_conversion import Route
from tessera.tile.cuda.lower.choose_matmul_unit import format_of
from tessera.tile.cuda.lower.layout_relations import (
    Relabel,
    index_layout,
    inverse,
    is_elementwise,
    relations,
)
from tessera.tile.cuda.lower.row_numbers import LEAST_ROWS, RowNumbers
from tessera.tile.ir.ir import (
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
    defining_ops,
    definitions,
    walk,
)
from tessera.tile.ir.op_record import OPS, declare
from tessera.tile.ir.register_layout import (
    RegisterLayout,
    accumulator,
    bits_of,
    blocked,
    dealt,
    in_parts,
    warps_over,
)
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.integer_facts import LARGEST, Knowledge

ACCESS_BYTES = 16  # of one lane at once
WIDE = 32  # sums of a thread
SCANS = ("cumsum", "cummax", "cumprod")
MOST_AGAIN = 8  # ops that are done again for another layout, in place of exchanging their result


@declare(rule=lambda types, attrs: types[0], attrs=("stored",), public=False, layouts="any",
         moves=True)
def convert_layout(x: Any, stored: bool = False) -> Any:
    """The tile; only where its elements lie changes. stored: they are as they lie in memory, so
    that the bits of their type are all there is to move."""
    return x


@dataclass(frozen=True)
class Hint:
    """What the caller knows: threads of the group, what multiplies matrices there, the split of
    accumulators over warps, how many neighbours an access to global memory shall move, and whether
    the last warp is whole."""

    threads: int  # that share tiles: a power of two
    generation: Generation
    down_only: bool = False  # all warps down the rows, so that a row belongs to one warp
    vector: int | None = None
    known: Knowledge | None = None  # of the function's integers
    whole: bool = True

    @property
    def exchanges(self) -> bool:
        """Whether lanes of all warps may exchange what they have."""
        return self.whole and self.threads % 32 == 0


def assign_layouts(function: Function, hint: Hint,
                   given: dict[SSAValue, RegisterLayout] | None = None) -> Function:
    """The function with a layout in each tile's type and `convert_layout` where they differ.

    given: layouts that are already fixed, for example those of a warp-specialised pipeline.
    """
    chooser = _Chooser(function, hint, given or {})
    chosen = chooser.run()
    types = definitions(function)
    table = {v: replace(t, layout=chosen[v].text) for v,
             t in types.items() if isinstance(t, TileType)}
    return _Rewriter(function, table, chosen, chooser.stores(), hint).run()


# --- choosing ---------------------------------------------------------------------------------
class _Chooser:
    def __init__(self, function: Function, hint: Hint, given: dict[SSAValue, RegisterLayout]):
        self.function, self.hint, self.given = function, hint, given
        self.types = definitions(function)
        self.made = defining_ops(function.body)
        self.rows = None if self.given or any(
            n.name == "matmul" for n in self.made.values()) else RowNumbers(function, self.types)
        self.links: dict[SSAValue, list[tuple[SSAValue, Relabel]]] = defaultdict(list)
        for node in walk(function.body):
            for a, b, there, back in relations(node, self.types, self.of_rows):
                if there:
                    self.links[a].append((b, there))
                if back:
                    self.links[b].append((a, back))

    def of_rows(self, value: SSAValue, layout: RegisterLayout, axis: int) -> RegisterLayout:
        """The layout of numbers of a tile's rows along an axis."""
        divided = layout.divided(axis) if self.hint.exchanges else None
        if divided is not None and self.rows is not None and (
                self.rows.worth_dividing(value, layout.drop(axis).count)):
            return divided
        return layout.drop(axis)

    def tile(self, x: Operand) -> TileType | None:
        t = self.types.get(x) if isinstance(x, SSAValue) else None
        return t if isinstance(t, TileType) else None

    def run(self) -> dict[SSAValue, RegisterLayout]:
        self.chosen = dict(self.given)  # all before any spreads: none of them follows from another
        for value, layout in self.given.items():
            self.spread(value, layout)
        for value, layout in self.anchors():
            if value not in self.chosen:
                self.settle(value, layout)
        return self.chosen

    def settle(self, value: SSAValue, layout: RegisterLayout) -> None:
        """Fixes a value's layout and what follows from it."""
        work = [(value, layout)]
        while work:
            v, layout = work.pop()
            if v in self.chosen:
                continue
            self.chosen[v] = layout
            work += self.neighbours(v, layout)

    def spread(self, value: SSAValue, layout: RegisterLayout) -> None:
        """Fixes what follows from a layout that is fixed already."""
        for other, made in self.neighbours(value, layout):
            self.settle(other, made)

    def neighbours(self, value: SSAValue, layout: RegisterLayout
                   ) -> list[tuple[SSAValue, RegisterLayout]]:
        """Values without a layout, with the one that follows from a neighbour's."""
        return [(other, made) for other, relabel in self.links[value]
                if other not in self.chosen and (made := relabel(layout)) is not None]

    def anchors(self) -> Iterator[tuple[SSAValue, RegisterLayout]]:
        """Values with the layout that suits them, the most important first."""
        nodes = [n for n in walk(self.function.body) if isinstance(n, Op)]
        for op in nodes:
            if op.name == "matmul" and self.hint.threads >= 32 and not self.by_threads(op):
                yield op.outs[0].value, self.matmul(op)
            elif op.name == "matmul" and self.wide(op):
                yield op.outs[0].value, self.thread_matmul(op)
            if op.name == "matmul_codes":
                bits = self.types[op.args[1]].dtype.bits  # type: ignore[index]
                yield op.outs[0].value, in_parts(
                    op.outs[0].type.shape, self.hint.threads // 32, bits)  # type: ignore[union-attr]
        memory: list[tuple[bool, int, SSAValue, int,
                           int | None]] = []  # said by the user, size, ...
        for op in nodes:
            record = OPS[op.name]
            value = None if record.access not in ("tile", "scattered") else \
                op.args[1] if record.writes else op.outs[0].value
            if value is not None and (t := self.tile(value)) is not None:
                bits = self.types[op.args[0]].dtype.bits  # type: ignore[index]
                said = op.attr.get("vector")
                memory.append((said is not None, prod(t.shape) * bits, value,  # type: ignore
                               bits, said or self.hint.vector))
        # Of tiles as large those whose accesses move fewer neighbours than 16 bytes first.
        memory.sort(key=lambda m: (*m[:2], self.narrow(m[2], m[3])), reverse=True)
        for *_, value, bits, vector in memory:
            yield value, self.in_memory(value, bits, vector)
        for value in sorted((v for v, t in self.types.items() if isinstance(t, TileType)),
                            key=lambda v: -prod(self.types[v].shape)):  # type: ignore[union-attr]
            yield value, self.in_memory(value, self.types[value].dtype.bits)

    def by_threads(self, op: Op) -> bool:
        """Whether a matmul is done by fused multiply-adds of threads."""
        a, b = (self.types[x] for x in op.args[:2])  # type: ignore[index]
        return format_of(a.dtype, b.dtype, op.attr, self.hint.generation) is None

    def wide(self, op: Op) -> bool:
        """Whether each thread of a matmul by threads has so many sums that it takes longer to read
        what it multiplies than to write them. Not where a row belongs to one warp."""
        return self.hint.threads >= 32 and not self.hint.down_only and (
            prod(op.outs[0].type.shape) >= WIDE * self.hint.threads)  # type: ignore[union-attr]

    def thread_matmul(self, op: Op) -> RegisterLayout:
        """Operands that lie along K are read along K, others several rows or columns at once."""
        turned = [(made := self.made.get(x)) is not None and made.name in (
            "transpose", "view_transpose") for x in op.args[:2]]
        bits = max(self.types[x].dtype.bits for x in op.args[:2])  # type: ignore[index]
        width = max(1, ACCESS_BYTES * 8 // bits)
        vectors = (width if turned[0] else 1, 1 if turned[1] else width)
        return dealt(op.outs[0].type.shape, self.hint.threads, vectors)  # type: ignore[union-attr]

    def matmul(self, op: Op) -> RegisterLayout:
        rows, columns = op.outs[0].type.shape  # type: ignore[union-attr]
        shape = (rows, columns)
        warps = max(1, self.hint.threads // 32)
        down, across = (warps, 1) if self.hint.down_only and 16 * warps <= rows else (
            split_warps(shape, warps))
        return accumulator(shape, warps_over(shape, down, across))

    def in_memory(self, value: SSAValue, bits: int, vector: int | None = None) -> RegisterLayout:
        """16 bytes a thread along the last axis, fewer when the tile is small; or as many as are
        asked for: `vector`.

        bits: of an element in memory, where the tile may be held in a wider type.
        """
        t = self.tile(value)
        assert t is not None
        share = max(1, prod(1 << bits_of(n) for n in t.shape) // self.hint.threads)
        if t.shape in self.turned and not vector:
            bits = self.turned[t.shape]
        width = max(1, ACCESS_BYTES * 8 // max(8, bits))
        wanted = bits_of(vector) if vector else share.bit_length() - 1
        if t.shape in self.scanned_columns:
            return down_columns(t.shape, self.hint.threads)
        if t.shape in self.turned and not vector:
            along, down = _both_ways(t.shape, wanted, width)
            return blocked(t.shape, self.hint.threads, along, down=down)
        if not vector:
            width = min(width, self.at_once.get(t.shape, width))
        neighbours = 1 << min(bits_of(width), wanted, bits_of(t.shape[-1]))
        return blocked(t.shape, self.hint.threads, neighbours, t.shape in self.reduced_rows)

    @functools.cached_property
    def scanned_columns(self) -> frozenset[tuple[int, ...]]:
        """The shapes of tiles that are only computed, and of which columns are scanned, such as the
        ranks of elements in their bins: threads have pieces of columns, and few exchange."""
        nodes = [n for n in walk(self.function.body) if isinstance(n, Op)]
        if self.given or any(n.name == "matmul" for n in nodes):
            return frozenset()
        tiles = {op: t for op in nodes for x in (*op.args, *(d.value for d in op.outs))
                 if (t := self.tile(x)) is not None and len(t.shape) == 2}
        moved = {t.shape for op, t in tiles.items() if OPS[op.name].access}
        return frozenset(t.shape for op, t in tiles.items()
                         if op.name in SCANS and op.attr["axis"] == 0) - moved

    @functools.cached_property
    def at_once(self) -> dict[tuple[int, ...], int]:
        """By the shapes of tiles, how many neighbours the accesses to all of them in global memory
        may move, where rows or places are known not to be multiples of 16 bytes. A lane with more
        of them than one access moves would touch each sector again for the next: with neighbours
        in neighbouring lanes an access of a warp is one run."""
        nodes = [n for n in walk(self.function.body) if isinstance(n, Op)]
        if self.hint.known is None or self.given or any(n.name == "matmul" for n in nodes):
            return {}
        found: dict[tuple[int, ...], int] = {}
        for n in nodes:
            t = self.tile(n.args[1] if OPS[n.name].writes else n.outs[0].value) \
                if OPS[n.name].access == "tile" else None
            if t is not None and (width := self.surely_at_once(n.args[0])) is not None:
                found[t.shape] = min(width, found.get(t.shape, width))
        return found

    def narrow(self, value: SSAValue, bits: int) -> bool:
        width = self.at_once.get(self.types[value].shape)  # type: ignore[union-attr]
        return width is not None and width * bits < 8 * ACCESS_BYTES

    def surely_at_once(self, place: Operand) -> int | None:
        """The neighbours along the last axis that an access to a view of global memory may move;
        None where that axis is not one of the tile's, or elements are packed."""
        view, known = self.made.get(place), self.hint.known
        if view is None or view.name != "view" or known is None:
            return None
        whole = self.types[view.args[0]]  # type: ignore[index]
        last = len(view.attr["box"]) - 1
        if not isinstance(whole, GlobalTensor) or whole.dtype.packed or (
                last not in view.attr["kept"]):
            return None
        rows = known.extent(str(whole.dims[-1])) if last else LARGEST
        return min(rows, known.divisor(view.args[1 + last]))

    @functools.cached_property
    def turned(self) -> dict[tuple[int, ...], int]:
        """The shapes of tiles that are transposed, of both sides; none where accumulators or
        reductions decide, which leave bytes alone: four of these share a register. Each with the
        bits of the narrowest elements that memory has of such tiles: all of a shape have one
        layout, and no wide numbers change places for the sake of narrow ones."""
        nodes = [n for n in walk(self.function.body) if isinstance(n, Op)]
        if self.given or any(n.name == "matmul" for n in nodes):
            return {}
        shapes = {t.shape for n in nodes if n.name == "transpose"
                  for x in (n.args[0], n.outs[0].value) if (t := self.tile(x)) is not None}
        bits = dict.fromkeys(shapes, 64)
        for n in nodes:
            if OPS[n.name].access == "tile":
                t = self.tile(n.args[1] if OPS[n.name].writes else n.outs[0].value)
                if t is not None and t.shape in shapes:
                    bits[t.shape] = min(bits[t.shape], self.types[n.args[0]].dtype.bits)  # type: ignore[index]
        reduced = any(OPS[n.name].layouts in ("reduced", "first") for n in nodes)
        return {shape: b for shape, b in bits.items() if b <= 8 or not reduced}

    def stores(self) -> dict[SSAValue, RegisterLayout]:
        """The layouts in which tiles of such shapes are written, where they have others."""
        found = {}
        for op in walk(self.function.body):
            if isinstance(op, Op) and OPS[op.name].writes and OPS[op.name].access == "tile" and (
                    op.attr.get("vector") is None and self.hint.vector is None):
                value = op.args[1]
                t = self.tile(value)
                if t is not None and t.shape in self.turned:
                    assert isinstance(value, SSAValue)
                    bits = self.types[op.args[0]].dtype.bits  # type: ignore[index]
                    found[value] = self.in_memory(value, bits)
        return found

    @functools.cached_property
    def reduced_rows(self) -> frozenset[tuple[int, ...]]:
        """The shapes of tiles of which rows are reduced or put in order; none where accumulators
        decide."""
        nodes = [n for n in walk(self.function.body) if isinstance(n, Op)]
        if any(n.name == "matmul" for n in nodes):
            return frozenset()
        tiles = [t for n in nodes if OPS[n.name].layouts in ("reduced", "first", "rows") and
                 (t := self.tile(n.args[0])) is not None and len(t.shape) == 2
                 and n.attr.get("axis", 1) == 1]
        return frozenset(t.shape for t in tiles)


def _both_ways(shape: tuple[int, ...], share: int, width: int) -> tuple[int, int]:
    """Neighbours along the last axis and the one before, of a thread with 2^share elements: an
    access of `width` along the last, but a square, or nearly, of few elements.

    Of 8 or 16 bits four, or two, along the other axis share a register between the accesses.
    """
    along = min(bits_of(width), max((share + 1) // 2, share - 2), bits_of(shape[-1]))
    return 1 << along, 1 << min(share - along, bits_of(shape[-2]))


def down_columns(shape: tuple[int, ...], threads: int) -> RegisterLayout:
    """Pieces of columns in threads, and columns side by side in those of a warp."""
    rows, columns = (tuple((axis, i) for i in range(bits_of(n))) for axis, n in enumerate(shape))
    wanted = bits_of(threads)
    share = max(0, len(rows) + len(columns) - wanted)
    order = (*rows[:share], *columns, *rows[share:])
    spare = wanted - (len(order) - share)
    return RegisterLayout(shape, order[:share], (*order[share:], *(None,) * spare))


def split_warps(shape: tuple[int, int], warps: int) -> tuple[int, int]:
    """down x across, so that the part of one warp is as square as it gets."""
    choices = [(1 << i, warps >> i) for i in range(bits_of(warps) + 1)]
    return min(choices, key=lambda c: (max(1, 16 * c[0] / shape[0]) * max(1, 8 * c[1] / shape[1]),
                                       shape[0] / c[0] + shape[1] / c[1]))


def needs_exchange(before: RegisterLayout, after: RegisterLayout) -> bool:
    """Whether threads have to choose or exchange elements for another layout."""
    route = Route(before, after)
    return route.kind != "thread" or bool(route.choices)


# --- rewriting --------------------------------------------------------------------------------
class _Rewriter:
    """Puts the types in, and conversions in front of readers that want another layout."""

    def __init__(self, function: Function, types: dict[SSAValue, TileType],
                 chosen: dict[SSAValue, RegisterLayout], stores: dict[SSAValue, RegisterLayout],
                 hint: Hint):
        self.hint, self.function, self.types, self.chosen = hint, function, types, chosen
        self.stores, self.names = stores, Names.of(function)
        self.ops = defining_ops(function.body)
        self.positions: dict[SSAValue, int] = {}  # ops that make a tile of them
        self.stored: set[SSAValue] = set()  # tiles whose elements are as they lie in memory

    def run(self) -> Function:
        return replace(self.function, body=self.block(self.function.body))

    def made(self, d: Def) -> Def:
        return Def(d.value, self.types.get(d.value, d.type))

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        ready: dict[tuple[SSAValue, str], SSAValue] = {}
        for node in nodes:
            if isinstance(node, Op):
                self.op(node, out, ready)
            else:
                out.append(self.nested(node, out, ready))
        return tuple(out)

    def want(self, x: Operand, layout: RegisterLayout | None, out: list[Node],
             ready: dict) -> Operand:
        """x in a layout; what converts it is added to `out`."""
        if layout is None or not isinstance(x, SSAValue) or self.chosen[x] == layout:
            return x
        key = (x, layout.text)
        if key not in ready:
            new = self.names.fresh(x.name)
            made = replace(self.types[x], layout=layout.text)
            self.types[new], self.chosen[new] = made, layout
            if self.ops_of_positions(x) <= MOST_AGAIN and needs_exchange(self.chosen[x], layout):
                op = replace(self.ops[x], outs=(Def(new, made),))
                args = (self.want(a, self.wanted(op, a), out, ready) for a in op.args)
                out.append(replace(op, args=tuple(args)))
            else:
                stored = (("stored", True),) if x in self.stored else ()
                out.append(Op("convert_layout", (x,), (Def(new, made),), stored))
            ready[key] = new
        return ready[key]

    def ops_of_positions(self, x: Operand) -> int:
        """The ops by which a tile is computed of positions and of numbers that threads share, which
        each thread may do for elements of any layout; more than MOST_AGAIN where it is not."""
        if not isinstance(x, SSAValue) or x not in self.types:
            return 0
        op = self.ops.get(x)
        if op is None:
            return MOST_AGAIN + 1
        if x not in self.positions:
            simple = op.name in ("arange", "expand_dims") or (
                is_elementwise(op) and OPS[op.name].effect == "pure" and OPS[op.name].draws is None)
            self.positions[x] = 1 + sum(map(self.ops_of_positions, op.args)) if simple \
                else MOST_AGAIN + 1
        return self.positions[x]

    def op(self, op: Op, out: list[Node], ready: dict) -> None:
        args = tuple(self.want(x, self.wanted(op, x), out, ready) for x in op.args)
        op = replace(op, args=args, outs=tuple(map(self.made, op.outs)))
        moved = op.name == "transpose" and op.args[0] in self.stored
        if op.name in ("load_tile", "encode_bytes") or moved:
            self.stored.update(d.value for d in op.outs)
        natural = self.natural(op)
        if natural is None or natural == self.chosen[op.outs[0].value]:
            out.append(op)
            return
        (d,) = op.outs
        assert isinstance(d.type, TileType)
        first = Def(self.names.fresh(d.value.name), replace(d.type, layout=natural.text))
        self.types[first.value], self.chosen[first.value] = first.type, natural  # type: ignore
        out += [replace(op, outs=(first,)), Op("convert_layout", (first.value,), (d,))]

    def natural(self, op: Op) -> RegisterLayout | None:
        """The layout that a reduction's result has by itself; None for ops that follow theirs."""
        how = OPS[op.name].layouts
        if how not in ("reduced", "first") or op.outs[0].value not in self.chosen:
            return None
        given = self.chosen[op.args[0]]  # type: ignore[index]
        if how == "first":
            return given.first(op.attr["k"])
        axis, wanted = op.attr["axis"], self.chosen[op.outs[0].value]
        divided, rest = given.divided(axis) if self.divides(op) else None, given.drop(axis)
        if divided is None or wanted == rest:
            return rest
        return divided if divided == wanted or rest.count >= LEAST_ROWS else rest

    def divides(self, op: Op) -> bool:
        """Whether a reduction may leave rows in one lane each."""
        return self.hint.exchanges and bool(OPS[op.name].joined_by) and len(
            self.types[op.args[0]].shape) > 1  # type: ignore[index]

    def wanted(self, op: Op, x: Operand) -> RegisterLayout | None:
        """The layout that an op reads x in; None when any is right."""
        if not isinstance(x, SSAValue) or x not in self.types:
            return None
        result = self.chosen.get(op.outs[0].value) if op.outs else None
        record = OPS[op.name]
        if record.writes and record.access == "tile" and x == op.args[1]:
            return self.stores.get(x)
        if record.positions is not None:
            if x != op.args[record.positions]:
                return result if record.writes and x == op.args[1] else None
            tile = result or self.chosen[op.args[1]]  # type: ignore[index]
            return index_layout(op, tile, self.types[x].shape)
        if op.name == "matmul":
            return result if len(op.args) == 3 and x == op.args[2] else None
        if record.layouts in ("any", "reduced", "first") or result is None:
            return None
        shape = self.types[x].shape
        if op.name == "expand_dims":
            return result.drop(op.attr["axis"])
        if op.name == "transpose":
            return result.permuted((1, 0))
        if op.name == "permute":
            return result.permuted(inverse(op.attr["axes"]))
        if op.name == "reshape":
            return result.reshaped(shape)
        return result if shape == result.shape else result.shrunk(shape)

    def nested(self, node: For | While | If, out: list[Node], ready: dict) -> Node:
        """Regions get their own conversions; what a loop begins with is converted before it."""
        if isinstance(node, If):
            then, thens = self.ending(node.then, node.thens, node.outs)
            orelse, elses = self.ending(node.orelse, node.elses, node.outs)
            return replace(node, then=then, orelse=orelse, thens=thens, elses=elses,
                           outs=tuple(map(self.made, node.outs)))
        inits = tuple(self.want(x, self.chosen.get(d.value), out, ready)
                      for x, d in zip(node.inits, node.carried, strict=True))
        body, yields = self.ending(node.body, node.yields, node.carried)
        node = replace(node, inits=inits, body=body, yields=yields,
                       carried=tuple(map(self.made, node.carried)))
        return replace(node, test=self.block(node.test)) if isinstance(node, While) else node

    def ending(self, nodes: tuple[Node, ...], values: tuple[Operand, ...],
               defs: tuple[Def, ...]) -> tuple[tuple[Node, ...], tuple[Operand, ...]]:
        """A region and the values that leave it, in the layouts of what they become."""
        body = list(self.block(nodes))
        ready: dict = {}
        left = tuple(self.want(x, self.chosen.get(d.value), body, ready)
                     for x, d in zip(values, defs, strict=True))
        return tuple(body), left


__all__ = ["Hint", "assign_layouts", "split_warps"]
