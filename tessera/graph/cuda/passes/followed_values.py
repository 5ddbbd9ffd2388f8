"""What kernels of moved elements follow back, and what stays in memory (computed_moves.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...ir import Graph, Node, Value, value_bytes
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import is_last_axis_reduction, loop_space
from ...simplify import Rewriter
from ..choose_schedule import SECTOR, blocks, full_block, power
from ..element_places import ElementPlace
from ..kernels.scatters import WRITE_LAST
from ..kernels.spell import is_stored, template
from .data_movement import is_plain_loop
from .displaced_reads import JOINED

MOVES = ("slice", "concatenate", "pad", "reshape", "transpose", "broadcast_to", "flip")
PICKS = ("take", "take_along")
MOST_JOINED = 8  # values; of more each is computed by itself, and written where it belongs
LEAST_ROW = 64  # columns of a block
MOST_COLUMNS = 2048  # of rows whose statistics are made in it: 16 in each lane


def in_memory(graph: Graph, maker: dict[Value, Node], readers: dict[Value, list[Node]],
              results: set[Value]) -> tuple[set[Value], set[Node], set[Node]]:
    """What other kernels read, or several of these: a sum or a row that is picked would be computed
    in each of them, as the residual stream of a transformer in each of its norms. What is made of
    one value of fewer bytes is computed in each. Loops whose
    results reductions take along, and which are computed here again: a widened row, or one less its
    maximum, has no fewer bytes than what it is made of. And the statistics of rows that only one
    of these kernels reads, whose blocks hold such rows whole."""
    kept, roots, again = set[Value](), dict[Value, set[Value]](), set[Node]()
    inside = set[Node]()
    for node in reversed(graph.nodes):
        if not (statistic := _is_statistic(node)) and not is_followed(node):
            continue
        (v,), found, reduced = node.outputs, set[Value](), False
        outside = v in results
        for n in readers.get(v, ()):
            reduced |= n in again or bool(n.op.reduction) and n not in inside
            outside |= not n.op.reduction and not is_followed(n)
            found |= roots.get(n.outputs[0], set()) if n.outputs else set()
        if statistic:
            if outside or reduced or len(found) != 1 or not _has_rows_of(
                    next(iter(found)), node.inputs[0]):
                continue
            inside.add(node)
        elif reduced and not outside and _is_of_one(node):
            again.add(node)
        elif outside or reduced or len(found) > 1 and node.op.name not in MOVES and (
                not _is_widened(v, maker)):
            kept.add(v)
            found = {v}
        roots[v] = found
    return kept, again, inside


def _is_statistic(node: Node) -> bool:
    """Of each row, which a block may hold."""
    return is_last_axis_reduction(node) and loop_space(node) is not None and (
        LEAST_ROW <= extents_of(node.inputs[0])[-1] <= MOST_COLUMNS)


def _has_rows_of(result: Value, x: Value) -> bool:
    made, own = extents_of(result), extents_of(x)
    return made[-1:] == own[-1:] and prod(made) == prod(own) and rows_and_columns(made)[0] > 1


def is_followed(node: Node) -> bool:
    if len(node.outputs) != 1 or not all(
            isinstance(n, int) and n for v in (*node.inputs, *node.outputs) for n in v.aval.shape):
        return False
    if not all(is_stored(v.aval.dtype) for v in (*node.inputs, *node.outputs)):
        return False
    if node.op.name == "pad" and any(node.attrs["holes"]):
        return False
    if node.op.name == "concatenate" and len(node.inputs) > MOST_JOINED:
        return False
    return node.op.name in (*MOVES, *PICKS) or node.op in (JOINED, WRITE_LAST) or (
        (is_plain_loop(node) or node.op.name == "cast") and not node.op.beside
        and template(node) is not None)


def _is_widened(v: Value, maker: dict[Value, Node]) -> bool:
    """Whether ops of each element, and moves, make it of one value of fewer bytes, or a cast of one
    of as many."""
    x = v
    while (node := maker.get(x)) is not None and is_followed(node) and node.op.name not in PICKS:
        large = {i for i in node.inputs if i.aval.ndim}
        if len(large) != 1:
            return False
        (x,) = large
        if value_bytes(x) - (node.op.name == "cast") < value_bytes(v):
            return True
    return False


def _is_of_one(node: Node) -> bool:
    """Whether a loop reads no more bytes of one value than it makes, and little else."""
    if not is_plain_loop(node):
        return False
    (y,) = node.outputs
    whole = list({v: None for v in node.inputs if v.aval.shape == y.aval.shape})
    return len(whole) == 1 and value_bytes(whole[0]) <= value_bytes(y)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """The extents in which blocks see a result: its last axis as columns where blocks of them have
    few beyond its end, else all elements as one row."""
    last = shape[-1] if shape else 1
    n = column_block(last)
    fits = last >= LEAST_ROW and 8 * blocks(last, n) * n <= 9 * last
    return (prod(shape) // last, last) if fits else (1, prod(shape))


def column_block(extent: int) -> int:
    """The size of blocks of columns that has the fewest beyond the end, of LEAST_ROW or more."""
    return full_block(extent, min(16 * LEAST_ROW, max(LEAST_ROW, power(extent))),
                      16 * SECTOR // LEAST_ROW)


def from_first_elements(rw: Rewriter, values: Sequence[Value], steps: Sequence[Any],
                        by_text: Mapping[tuple[int, str], ElementPlace], C: int
                        ) -> tuple[tuple[Value, ...], tuple[Any, ...]]:
    """The operands and steps of a kernel of `values`, its places counted from the first element
    that is read, or the first row of C: what is done to parts of one tensor is one kernel."""
    ways: dict[int, list[Any]] = {}
    for s in steps:
        if s.kind == "read":
            ways.setdefault(s.args[0], []).extend(s.at)
    operands, first = [rw.env[v] for v in values], dict[int, int]()
    for i, found in ways.items():
        places = [by_text[i, at.flat] for at in found]
        unit, size = C if all(at.row for at in found) else 1, prod(extents_of(values[i]))
        begin = min(p.least for p in places) // unit * unit
        end = -(-max(p.most + 1 for p in places) // unit) * unit
        if size % unit or not begin and 2 * end > size:
            continue
        lies = rw.emit("reshape", operands[i], shape=(size,))
        operands[i] = rw.emit("slice", lies, starts=(begin,), stops=(end,), steps=(1,))
        first[i] = begin

    def counted(at: Any, i: int) -> Any:
        if not (begin := first[i]):
            return at
        row = by_text[i, at.row].plus(-(begin // C)).text if at.row else ""
        return replace(at, flat=by_text[i, at.flat].plus(-begin).text, row=row)

    return tuple(operands), tuple(
        replace(s, at=tuple(counted(at, s.args[0]) for at in s.at))
        if s.kind == "read" and s.args[0] in first else s for s in steps)


__all__ = ["MOVES", "PICKS", "column_block", "from_first_elements", "in_memory", "is_followed",
           "rows_and_columns"]
