"""Matmuls as calls of the library's kernel, on operands as they lie in memory.

Transpositions of operands and of results go into the call. Of attention see attention_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ....errors import SourceLine
from ....kernels.cards import Card, card_for
from ....kernels.matmul_blocks import (
    BLOCKS,
    FP8_COLUMNS,
    LARGE,
    PAIRS_US,
    USUAL,
    MatmulBlocks,
    MatmulExtents,
    choose_blocks,
    default_block,
    short_sums,
)
from ....lazy_dataclass import dataclass
from ....numerics import NumericType
from ....runtime.generations import WarpgroupMatmul
from ...flops import Shapes
from ...ir import Graph, Node, Value, producers_of, uses, value_bytes
from ...op import OPS, Aval
from ...schedule.library_call import LibraryCall, library_call
from ...schedule.loop_axes import extents_of
from ...schedule.op_ids import OpLine, id_of
from ...simplify import Rewriter, rebuild, remove_dead
from .packed_values import BYTE, BYTES_OF, FROM_BYTES


def _product_flops(ins: Shapes, outs: Shapes, *, layout: str, **attrs: Any) -> float:
    """2 m n k, of each pair of operands."""
    depth = sum(a[-1 if way == "n" else -2] for a, way in zip(ins[::2], layout[::2], strict=True))
    return 2.0 * prod(outs[0]) / attrs.get("parts", 1) * depth


MOST_PAIRS = 4  # of operands whose products one call adds up
# The sum of the products of its operands, pair by pair.
PRODUCT = library_call("product", flops=_product_flops, matmul=True,
                       shows=tuple(range(2 * MOST_PAIRS)))


def merged_line(where: SourceLine | None, parts: list[Node]) -> SourceLine | None:
    """The line of a call, with the ids of all that it stands for."""
    if not isinstance(where, OpLine):
        return where
    ids = dict.fromkeys(i for n in parts for i in id_of(n).split() if i)
    return replace(where, id=" ".join(ids))


# --- results ----------------------------------------------------------------------------------
def transpose_operands(graph: Graph) -> Graph:
    """A matmul whose result, or that rounded, is only read transposed as that of its operands
    transposed, which a kernel reads as they lie: (a b)' = b' a'."""
    count = uses(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "transpose" or not swaps_last(node.attrs["axes"]):
            return None
        cast = rw.made_by(inputs[0], "cast")
        made = rw.made_by(inputs[0] if cast is None else cast.inputs[0], "matmul")
        read = [node.inputs[0]] if cast is None else [node.inputs[0], cast.inputs[0]]
        if made is None or any(count[v] > 1 for v in read):
            return None
        rw.where = merged_line(node.where, [made, *([] if cast is None else [cast]), node])
        b, a = (rw.emit("transpose", v, axes=_swapped(v)) for v in reversed(made.inputs))
        out = rw.emit("matmul", b, a, **made.attrs)
        return out if cast is None else rw.emit("cast", out, **cast.attrs)

    return remove_dead(rebuild(graph, visit))


def _swapped(v: Value) -> tuple[int, ...]:
    n = v.aval.ndim
    return (*range(n - 2), n - 1, n - 2)


def swaps_last(axes: tuple[int, ...]) -> bool:
    n = len(axes)
    return n >= 2 and axes == (*range(n - 2), n - 1, n - 2)


# --- rows that TMA brings ---------------------------------------------------------------------
EIGHT = 8  # elements of 16 bits: rows of 16 bytes
# us of a multiplication and addition by words less by TMA, of 270 and 600 TFLOP/s; of a byte that a
# copy moves; of its launch.
SAVED_US, BYTE_US, LAUNCH_US = 2 * (1 / 270e6 - 1 / 600e6), 1 / 4e6, 3.0
WORTH = 1.5  # times what copies take


def saves_time(node: Node, copied: Sequence[int]) -> bool:
    """Whether a matmul of 16 bits saves more by rows that TMA brings than copies of so many bytes
    each take."""
    (*_, M, N), K = extents_of(node.outputs[0]), extents_of(node.inputs[0])[-1]
    takes = sum(2 * n * BYTE_US + LAUNCH_US for n in copied)
    return M * N * K * SAVED_US > WORTH * max(takes, LAUNCH_US)


# --- calls ------------------------------------------------------------------------------------
def reads_rows_alone(v: Value, node: Node, chip: WarpgroupMatmul | None) -> bool:
    """Whether wgmma reads both operands of a matmul, one of which is v, along the contracted axis
    alone, and TMA brings such rows: of multiples of 16 bytes."""
    operand = None if chip is None else chip.operands.get(v.aval.dtype.name)
    depth: Any = node.inputs[0].aval.shape[-1]
    return operand is not None and not operand.any_major and isinstance(depth, int) and (
        depth * v.aval.dtype.bits % 128 == 0)


@dataclass(frozen=True)
class _Side:
    """An operand as it lies. copied: made so by a copy, because the instruction reads no other."""

    value: Value
    transposed: bool
    parts: list[Node]
    copied: bool = False


class _Calls:
    """The nodes of a graph, its matmuls as calls. chip: how warpgroups multiply, if they do."""

    def __init__(self, graph: Graph, chip: WarpgroupMatmul | None):
        self.maker = producers_of(graph)
        self.chip, self.nodes = chip, list[Node]()
        self.copies: dict[Value, Value] = {}

    def add(self, node: Node) -> None:
        if node.op.name != "matmul":
            self.nodes.append(node)
            return
        a, b = map(self.side, node.inputs)
        where = merged_line(node.where, [*a.parts, *b.parts, node])
        if reads_rows_alone(a.value, node, self.chip):
            a = self.along(a, False, where)
            b = self.along(b, True, where)
        elif not b.transposed and self.is_brought_by_words(b.value, node):
            b = self.along(b, True, where)
        attrs = {"layout": "".join("t" if s.transposed else "n" for s in (a, b)),
                 "copied": "".join(n for n, s in zip("ab", (a, b), strict=True) if s.copied),
                 **node.attrs}
        self.nodes.append(Node(PRODUCT, (a.value, b.value), attrs, node.outputs, where))

    def is_brought_by_words(self, v: Value, node: Node) -> bool:
        """Whether a second operand of 16 bits has rows that TMA does not bring as they lie, but
        along the contracted axis, and a copy takes less than that costs."""
        if self.chip is None or v.aval.dtype.name not in self.chip.operands or v.aval.ndim != 2 or (
                not all(isinstance(n, int) for x in node.inputs for n in x.aval.shape)):
            return False
        K, N = extents_of(v)
        bits = v.aval.dtype.bits
        return bits == 16 and bool(N % EIGHT) and not K % EIGHT and saves_time(
            node, [value_bytes(v)])

    def side(self, v: Value) -> _Side:
        transposed, parts = False, list[Node]()
        while (turn := self.maker.get(v)) is not None and turn.op.name == "transpose" and (
                swaps_last(turn.attrs["axes"])):
            parts.append(turn)
            v, transposed = turn.inputs[0], not transposed
        return _Side(v, transposed, parts)

    def along(self, side: _Side, transposed: bool, where: SourceLine | None) -> _Side:
        """The operand with rows along the contracted axis, copied where it lies otherwise."""
        if side.transposed == transposed:
            return side
        v = side.value
        if v not in self.copies:
            self.copies[v] = self.turned(v, where)
        return _Side(self.copies[v], transposed, side.parts, True)

    def turned(self, v: Value, where: SourceLine | None) -> Value:
        """A value with its last two axes exchanged, as a copy of bytes where it has floats of 8
        bits: kernels would make numbers of these, and codes of the numbers again."""
        axes, kind = _swapped(v), v.aval.type
        shape = tuple(v.aval.shape[i] for i in axes)
        raw = kind.dtype.kind == "float" and kind.dtype.bits == 8
        source, moved = v, Value(Aval(shape, BYTE if raw else kind))
        if raw:
            source = Value(Aval(v.aval.shape, BYTE))
            self.nodes.append(Node(BYTES_OF, (v,), {}, (source,), where))
        self.nodes.append(Node(OPS["transpose"], (source,), {"axes": axes}, (moved,), where))
        if not raw:
            return moved
        made = Value(Aval(shape, kind))
        self.nodes.append(Node(FROM_BYTES, (moved,), {}, (made,), where))
        return made


# --- blocks ---------------------------------------------------------------------------------------
def quickest_blocks(extents: MatmulExtents, numeric: NumericType, chip: WarpgroupMatmul | None,
                    split: bool = True, whole: bool = True, left: int | None = None
                    ) -> tuple[MatmulBlocks, bool]:
    """The blocks of a matmul, and whether there was a choice: warpgroups have one, but not of codes
    of 8 bits, whose sums are kept twice. Where TMA cannot read the operands others multiply, and
    large results alone have a choice.

    numeric: the type of operands, of 16 bits or fewer.  split: whether K may be summed in parts.
    whole: whether TMA reads the operands' rows.  left: multiprocessors that messages beside it
    take; None: there is none, and pairs of blocks run side by side.
    """
    m, n, _ = default_block(numeric, extents.M, extents.N)
    usual = (m, min(n, FP8_COLUMNS)) if short_sums(numeric) else (m, n)
    chosen = chip is not None and numeric.dtype.bits == 16 and (
        numeric.dtype.name in chip.operands) and (whole or usual == USUAL)
    blocks = BLOCKS if chosen and whole else LARGE if chosen else (usual,)
    if chosen and whole and left is None:
        blocks = *blocks, *PAIRS_US
    return choose_blocks(extents, blocks, split, card_beside(chip, left)), chosen


def card_beside(chip: WarpgroupMatmul | None, left: int | None) -> Card:
    """The card without the multiprocessors that messages take. What was measured on all of them
    holds where it is as many waves then (place_blocks.py)."""
    card = card_for(chip)
    return replace(card, multiprocessors=card.multiprocessors - left) if left else card


def call_products(graph: Graph, chip: WarpgroupMatmul | None) -> Graph:
    """The graph with its matmuls as calls of the library's kernel."""
    calls = _Calls(graph, chip)
    for node in graph.nodes:
        calls.add(node)
    return replace(graph, nodes=tuple(calls.nodes))


__all__ = ["MOST_PAIRS", "PRODUCT", "LibraryCall", "call_products", "card_beside", "merged_line",
           "quickest_blocks", "reads_rows_alone", "saves_time", "swaps_last", "transpose_operands"]
