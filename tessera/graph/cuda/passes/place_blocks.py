"""The block of each matmul of a graph and the parts of its sum, by the estimate or as measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import Any

from ....kernels.cards import Card
from ....kernels.matmul_blocks import (
    BLOCKS,
    LARGE,
    PAIRS_US,
    TRANSPOSED_US,
    MatmulBlocks,
    MatmulExtents,
    or_narrow,
    or_transposed,
    short_sums,
)
from ....kernels.matmul_plan import tuned_blocks
from ....runtime.generations import WarpgroupMatmul
from ...ir import Graph, Node, Value, readers_of
from ...op import OPS, Aval, by_engines
from ...schedule.loop_axes import extents_of
from ..kernels.anchors import row_lines, whole_rows, whole_steps
from ..kernels.matmul_form import is_narrow
from .data_movement import is_plain_loop
from .library_ops import PRODUCT, card_beside, quickest_blocks

MOST_ADDED = 5  # parts that a loop reads beside what else it needs
MOST_INSIDE = 8  # in an iteration of a loop, where a launch more is worse than reads
MOST_STEPS = 8  # of elementwise ops that are followed behind a matmul


def place_blocks(graph: Graph, chip: WarpgroupMatmul | None, inner: bool = False) -> Graph:
    """The graph with the block of each product, and long sums of few blocks in parts. inner: of an
    iteration."""
    beside, most = beside_messages(graph), MOST_INSIDE if inner else MOST_ADDED
    nodes = [_in_blocks(n, graph, chip, beside.get(n.outputs[0]), most) if n.op is PRODUCT else [n]
             for n in graph.nodes]
    return replace(graph, nodes=tuple(n for made in nodes for n in made))


def beside_messages(graph: Graph) -> dict[Value, int]:
    """Results of products behind a message and in front of the first one that reads what it brings,
    and how many multiprocessors are left to it: those of messages with blocks of their own. Such
    products take tiles one by one (overlap.py)."""
    found: dict[Value, int] = {}
    left, brought = None, set[Value]()
    for node in graph.nodes:
        follows = bool(brought.intersection(node.inputs))
        if node.op.exchange is not None:
            left, brought = node.attrs.get("blocks", 0), {*brought, *node.outputs}
            left = None if by_engines(node.attrs) else left
        elif node.op is PRODUCT and follows:
            left, brought = None, set()
        elif node.op is PRODUCT and left is not None:
            found[node.outputs[0]] = left
        elif follows:
            brought.update(node.outputs)
    return found


def _in_blocks(node: Node, graph: Graph, chip: WarpgroupMatmul | None, left: int | None,
               most_added: int) -> list[Node]:
    blocks, chosen = blocks_of(node, graph, chip, left)
    attrs = dict(node.attrs)
    if chosen:
        attrs |= {"block": (blocks.rows, blocks.columns), "cluster": blocks.cluster}
    attrs |= {n: x for n in ("swapped", "tuned") if (x := getattr(blocks, n))}
    if blocks.parts == 1:
        return [replace(node, attrs=attrs)]
    out = node.outputs[0].aval
    partial = Value(Aval((blocks.parts, *out.shape), out.type))
    made = replace(node, attrs=attrs | {"parts": blocks.parts, "depth": blocks.depth},
                   outputs=(partial,))
    return [made, *_added(node, partial, most_added)]


def _added(node: Node, partial: Value, most: int) -> list[Node]:
    """The sum of the parts of a product: of few, in the loop that reads it. For the updates of 36
    weights that are 133 us less of a step of 14.9 ms (GPT-2 124M, B 8, H200, 2026-11-26)."""
    parts, *shape = extents_of(partial)
    out = node.outputs[0].aval

    def emit(name: str, inputs: tuple[Value, ...], attrs: dict[str, Any], *extents: int) -> Value:
        result = Value(Aval(extents, out.type)) if extents else node.outputs[0]
        nodes.append(Node(OPS[name], inputs, attrs, (result,), node.where))
        return result

    nodes: list[Node] = []
    if parts > most:
        attrs = {"axis": (0,), "keepdims": True, "accum": out.dtype}
        emit("reshape", (emit("reduce_sum", (partial,), attrs, 1, *shape),), {"shape": out.shape})
        return nodes

    def part(i: int) -> Value:
        attrs = {"starts": (i, *(0 for _ in shape)), "stops": (i + 1, *shape),
                 "steps": (1,) * partial.aval.ndim}
        one = emit("slice", (partial,), attrs, 1, *shape)
        return emit("reshape", (one,), {"shape": out.shape}, *shape)

    total = part(0)
    for i in range(1, parts):
        total = emit("add", (total, part(i)), {}, *(shape if i < parts - 1 else ()))
    return nodes


def blocks_of(node: Node, graph: Graph, chip: WarpgroupMatmul | None, left: int | None = None
              ) -> tuple[MatmulBlocks, bool]:
    """The block of a matmul's result and the parts of K, by the estimate or as measured; whether
    the block is chosen. Extents that only a call knows take no part.

    left: see quickest_blocks.
    """
    numeric, out = node.inputs[0].aval.type, node.outputs[0].aval
    if numeric.dtype.bits > 16 or not all(
            isinstance(n, int) for v in node.inputs for n in v.aval.shape):
        return MatmulBlocks(0, 0), False
    *lead, M, N = extents_of(node.outputs[0])
    extents = MatmulExtents(M, N, whole_steps(node), numeric.dtype.bits, out.dtype.bits,
                            prod(lead), short_sums(numeric), lines=row_lines(node))
    split, whole = not lead and out.dtype.kind == "float", whole_rows(node)
    found, chosen = quickest_blocks(extents, numeric, chip, split, whole, left)
    if chosen and not lead and len(node.inputs) == 2:
        card, sizes = card_beside(chip, left), BLOCKS if whole else LARGE
        if whole:
            found = or_transposed(found, extents, node.attrs["layout"], card,
                                  leaving_bits(node.outputs[0], graph))
            found = or_narrow(found, extents, node.attrs["layout"], card, split)
        if whole and left is None:
            sizes = *sizes, *PAIRS_US
        found = tuned_product(found, node, extents, graph, sizes, split, card, left or 0)
    return found, chosen


def tuned_product(model: MatmulBlocks, node: Node, extents: MatmulExtents, graph: Graph,
                  sizes: Collection[tuple[int, int]], split: bool, card: Card,
                  left: int = 0) -> MatmulBlocks:
    """What a table has for a product of one pair of matrices, else the model's choice. left: of the
    multiprocessors on which it was measured, those that messages take; what is more waves without
    them takes no part.

    sizes: of blocks that a product with others fused behind it may have. Of transposed results
    those may be that leave in panels.
    split: whether K may be summed in parts.  A table tells results apart by their bits in memory:
    here those of what is computed behind the sums.
    """
    if card.tuned is None:
        return model
    layout, a = node.attrs["layout"], extents_of(node.inputs[0])
    asked = replace(extents, K=a[-1] if layout[0] == "n" else a[-2],
                    result_bits=leaving_bits(node.outputs[0], graph))
    return tuned_blocks(model, asked, node.inputs[0].aval.type.dtype, layout, card, lambda b: (
        _waves(b, asked, card.multiprocessors) == _waves(b, asked, card.multiprocessors + left)
        and (whole_rows(node) and (_leaves_in_panels(b, asked) or is_narrow(b.rows) and (
            split or b.parts == 1)) if b.swapped else
             (b.rows, b.columns) in sizes and (split or b.parts == 1))))


def _waves(b: MatmulBlocks, x: MatmulExtents, multiprocessors: int) -> int:
    blocks = -(-x.M // b.rows) * -(-x.N // b.columns) * b.parts
    return -(-blocks // multiprocessors)


def _leaves_in_panels(b: MatmulBlocks, asked: MatmulExtents) -> bool:
    return ((b.columns, b.rows) in TRANSPOSED_US and asked.result_bits == 16
            and asked.N % 16 == 0 and b.parts == b.cluster == 1)


def leaving_bits(v: Value, graph: Graph, steps: int = MOST_STEPS) -> int:
    """Of an element of a value where it leaves: as narrow as elementwise ops first make it, for the
    reader that gets the widest."""
    bits, readers = v.aval.dtype.bits, readers_of(graph).get(v, [])
    if bits < 32 or v in graph.outputs or not readers or not steps:
        return bits
    return max(leaving_bits(r.outputs[0], graph, steps - 1) if _goes_along(r) else bits
               for r in readers)


def _goes_along(node: Node) -> bool:
    return node.op.name == "reshape" or (len(node.outputs) == 1 and is_plain_loop(node))


__all__ = ["leaving_bits", "place_blocks"]
