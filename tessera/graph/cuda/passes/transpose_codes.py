"""Codes of 8 bits in both orders: written so by the loop that makes them.

    codes = fp8(x / s)         # x w reads rows of codes, and the gradient of w their columns

wgmma reads codes along the contracted axis alone. A copy that exchanges the axes of what lies in
memory reads it again, while the loop that makes the codes has them in registers: it writes both.
Loops that hold whole rows, for their statistics, keep the codes of a strip of rows in shared memory
until its end. Where there is no room, and where no loop makes them, codes are copied
(library_ops.py).
"""

from __future__ import annotations

from math import prod

from ....numerics import NumericType
from ....runtime.generations import Generation, WarpgroupMatmul
from ...ir import Graph, Node, Value
from ...op import Aval
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import loop_space
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.strips import STRIP_TURNED, StripLoops
from .library_ops import reads_rows_alone, swaps_last
from .packed_values import BYTE, FROM_BYTES


def write_transposed_codes(graph: Graph, chip: Generation) -> Graph:
    """The graph with operands of matmuls of which columns are contracted as what the loops that
    make them write transposed."""
    how = chip.warpgroup_matmul
    loops = StripLoops(graph)
    graph = _read_once(graph, loops, [codes for n in graph.nodes if n.op.name == "matmul"
                                      for codes in _columns(loops, n, how) if codes is not None])
    loops = StripLoops(graph)
    written: dict[tuple[Value, NumericType], Value] = {}

    def turned(rw: Rewriter, codes: Value, v: Value) -> Value:
        key = codes, v.aval.type
        if key not in written:
            written[key] = _transposed_codes(rw, rw.env[codes], v.aval.type,
                                             loops.turned_rows(codes))
        return written[key]

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "matmul":
            return None
        found = _columns(loops, node, how)
        if not any(found):
            return None
        a, b = (v if codes is None else turned(rw, codes, v)
                for v, codes in zip(inputs, found, strict=True))
        b = b if found[1] is None else rw.emit("transpose", b, axes=(1, 0))
        return rw.emit("matmul", a, b, **node.attrs)

    return remove_dead(rebuild(graph, visit))


def _columns(loops: StripLoops, node: Node, how: WarpgroupMatmul | None) -> list[Value | None]:
    """Of each operand of a matmul the codes of which it contracts the columns; see _columns_of."""
    return [_columns_of(loops, v, i) if reads_rows_alone(v, node, how) else None
            for i, v in enumerate(node.inputs)]


def _columns_of(loops: StripLoops, v: Value, side: int) -> Value | None:
    """The codes whose columns an operand contracts, where the loop that makes them can write them
    transposed. side: 0 or 1, which operand."""
    columns = side == 1
    while (made := loops.maker.get(v)) is not None and made.op.name == "transpose" and (
            swaps_last(made.attrs["axes"])):
        v, columns = made.inputs[0], not columns
    if not columns or v.aval.ndim != 2:
        return None
    while made is not None and made.op.name in ("reshape", "retype") and (
            made.inputs[0].aval.shape[-1:] == v.aval.shape[-1:]):
        v = made.inputs[0]
        made = loops.maker.get(v)
    narrow = v.aval.dtype.kind == "float" and v.aval.dtype.bits == 8
    if not narrow or made is None or loop_space(made) is None:
        return None
    return v if loops.turned_rows(v) else None


def _read_once(graph: Graph, loops: StripLoops, codes: list[Value]) -> Graph:
    """The graph in which codes and the largest of the numbers that they are of, where these lie in
    memory, are made of one value of a loop: it is one loop then, which reads them once. Not of
    codes by the scale that follows from this largest number, which come behind it."""
    largest: dict[Value, list[tuple[Node, set[Value]]]] = {}  # by what lies in memory
    for n in filter(loops.towards_largest, graph.nodes):
        values, statistics = loops.values(n.inputs[0])
        for x in () if statistics else filter(loops.lies, values):
            largest.setdefault(x, []).append((n, values))
    made: dict[Value, set[Value]] = {}  # by what lies in memory: what is to be made of one value
    for c in dict.fromkeys(codes):
        mine, _ = loops.values(c)
        before = loops.largest_before(mine)
        for x in mine & largest.keys():
            for n, other in largest[x]:
                if n not in before and all(map(loops.lies, mine & other)):
                    made.setdefault(x, set()).update(mine | other)
    once: dict[Value, Value] = {}

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        read = [v for v in node.inputs if v in made and made[v].intersection(node.outputs)]
        if not read:
            return None
        for v in read:
            if v not in once:
                once[v] = rw.emit("cast", rw.env[v], source=v.aval.type, to=v.aval.type)
        given = (once[v] if v in read else new for v, new in zip(node.inputs, inputs, strict=True))
        return rw.emit(node.op.name, *given, **node.attrs)

    return rebuild(graph, visit) if made else graph


def _transposed_codes(rw: Rewriter, codes: Value, kind: NumericType, rows: int) -> Value:
    """[..., C] -> [C, R], where the loop that makes the codes writes them."""
    *lead, C = extents_of(codes)
    raw, made = (Value(Aval((C, prod(lead)), t)) for t in (BYTE, kind))
    axis = tuple(range(len(lead)))
    rw.add(Node(STRIP_TURNED, (codes,), {"axis": axis, "rows": rows}, (raw,), rw.where))
    rw.add(Node(FROM_BYTES, (raw,), {}, (made,), rw.where))
    return made


__all__ = ["write_transposed_codes"]
