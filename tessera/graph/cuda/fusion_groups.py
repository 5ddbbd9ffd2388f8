"""Which nodes of a prepared graph run as one kernel.

Loops over rows are those of graph/schedule/fuse.py. A matmul or attention takes in the elementwise
ops that follow it, when nothing else reads its result: they run on the sums while these are in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dims import size_of
from ..ir import Graph, Node, Value, uses
from ..lower import column_sum_axes
from ..schedule.fuse import FusionGroup as Loop
from ..schedule.fuse import fuse
from .copy_kernels import MOVES
from .library_ops import LibraryCall
from .loop_axes import anchor_frame, extents_of
from .spell import COMBINE, is_stored, no_kernel, template

ANCHORS = frozenset({"product", "flash_attention"})


@dataclass(eq=False)
class Unit:
    """Nodes of one kernel, or a view.

    kind: loop | rows | columns | gemm | attention | move | gather | segments | view | saved, which
    offload.py makes a view or a pair of offload | fetch.
    anchor: the product or attention that the loop behind it runs on.
    """

    kind: str
    space: tuple[int, ...]
    nodes: list[Node]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    anchor: Node | None = None


def units_of(graph: Graph) -> list[Unit]:
    """Units in an order in which each runs after those it reads. Raises UnsupportedTargetError at
    an op that has no kernel, with its line."""
    found: list[Unit] = []
    for part in fuse(graph):
        found += _from_loop(part) if isinstance(part, Loop) else _from_node(part)
    count = uses(graph)
    for unit in found:
        _connect(unit, count)
    return _with_casts(_with_epilogues(found, count), count)


def _connect(unit: Unit, count: dict[Value, int]) -> None:
    """What a unit reads from and writes to memory."""
    made = {v for n in unit.nodes for v in n.outputs}
    read: dict[Value, int] = {}
    for n in unit.nodes:
        for v in n.inputs:
            read[v] = read.get(v, 0) + 1
    unit.inputs = [v for v in read if v not in made]
    unit.outputs = [v for n in unit.nodes for v in n.outputs if count.get(v, 0) > read.get(v, 0)]


# --- from the fuser's units ---------------------------------------------------------------------
def _from_loop(loop: Loop) -> list[Unit]:
    """Sums over leading axes leave the loop: they are units of their own behind it."""
    columns = [n for n in loop.nodes if column_sum_axes(n) is not None
               and tuple(n.inputs[0].aval.shape) == loop.shape]
    inside = [n for n in loop.nodes if n not in columns]
    sums = [unit for n in columns for unit in _reduction(n)]
    return [_loop(loop.shape, inside), *sums] if inside else sums


def _loop(shape: tuple[int, ...], nodes: list[Node]) -> Unit:
    for n in nodes:
        if n.op.reduction not in COMBINE and template(n) is None:
            raise no_kernel(n)
    return Unit("rows" if _has_rows(shape, nodes) else "loop", shape, nodes)


def _has_rows(shape: tuple[int, ...], nodes: list[Node]) -> bool:
    """Whether some value is one number per row."""
    rows = (*shape[:-1], 1)
    return any(n.op.reduction in COMBINE for n in nodes) or (shape != rows and any(
        tuple(v.aval.shape) == rows for n in nodes for v in n.outputs))


def _from_node(node: Node) -> list[Unit]:
    name = node.op.name
    if node.op.effects or node.op.graph_attrs:
        raise no_kernel(node)
    shape = _concrete(node)
    viewed = not isinstance(node.op, LibraryCall) and node.op.lies(node.attrs).flat
    if viewed or 0 in shape:
        return [Unit("view" if viewed else "empty", shape, [node])]
    if name == "saved":
        return [Unit("saved", shape, [node])]
    if name in ANCHORS:
        _check_anchor(node)
        return [Unit("gemm" if name == "product" else "attention", shape, [node], anchor=node)]
    if name in MOVES:
        return [Unit("move", shape, [node])]
    if kind := indexed_kind(node):
        _check_indexed(node)
        return [Unit(kind, shape, [node])]
    if node.op.reduction in COMBINE:
        return _reduction(node)
    if template(node) is not None:
        return [_loop(shape, [node])]
    raise no_kernel(node)


def _concrete(node: Node) -> tuple[int, ...]:
    for v in (*node.inputs, *node.outputs):
        if not all(isinstance(d, int) for d in v.aval.shape):
            raise no_kernel(node, "its extents are symbolic; kernels are made for the extents of "
                            "a call")
    return extents_of(node.outputs[0]) if node.outputs else ()


def _check_anchor(node: Node) -> None:
    if node.op.name != "product":
        return
    out, accum = node.outputs[0].aval.dtype, node.attrs["accum"]
    if out.kind == "float" and accum.bits < 32:
        raise no_kernel(node, f"it accumulates in {accum}; kernels do in f32")
    if accum is not out:
        raise no_kernel(node, f"it accumulates in {accum} and gives {out}")


def indexed_kind(node: Node) -> str:
    """The kind of unit that an op on indexed slices becomes; "" when it is none."""
    indexed = node.op.indexed
    if indexed is None or indexed.along:
        return ""
    return "gather" if indexed.reads else "segments"


def _check_indexed(node: Node) -> None:
    x, ids = (v.aval for v in node.inputs)
    if not is_stored(x.dtype):
        raise no_kernel(node, f"of {x.type}")
    if indexed_kind(node) == "segments" and x.dtype.kind != "float" and x.dtype.bits < 32:
        raise no_kernel(node, f"sums in {x.dtype}")
    if 0 in (*x.shape, *ids.shape):
        raise no_kernel(node, "no elements")


def _reduction(node: Node) -> list[Unit]:
    """Over the last axes: rows; else columns. One run of axes (see prepare.split_reductions)."""
    x = node.inputs[0].aval
    if 0 in x.shape or x.dtype.kind == "bool":
        raise no_kernel(node, "no elements" if 0 in x.shape else "of bools")
    accum = node.attrs.get("accum", x.dtype)
    if accum.kind == "float" and accum.bits < x.dtype.bits:
        raise no_kernel(node, f"it accumulates in {accum}; kernels do in {x.dtype}")
    shape = tuple(d for d in x.shape if isinstance(d, int))
    behind = shape[node.attrs["axis"][-1] + 1:]
    rows = all(d == 1 for d in behind)
    return [Unit("rows" if rows else "columns", shape, [node])]


# --- epilogues ----------------------------------------------------------------------------------
def _with_epilogues(units: list[Unit], count: dict[Value, int]) -> list[Unit]:
    """Each product and attention joined with the loop behind it, at the loop's place."""
    maker = {v: u for u in units for v in u.outputs}
    gone: set[int] = set()
    out: list[Unit] = []
    for unit in (part for u in units for part in _cut(u, maker, count)):
        if unit.kind == "loop":
            found = _source(unit, maker, count, gone)
            if found is not None:
                gone.update(map(id, found))
                nodes = [n for u in found for n in u.nodes] + unit.nodes
                made = Unit(found[0].kind, unit.space, nodes, anchor=found[0].anchor)
                _connect(made, count)
                out.append(made)
                continue
        out.append(unit)
    return [u for u in out if id(u) not in gone]


def _cut(unit: Unit, maker: dict[Value, Unit], count: dict[Value, int]) -> list[Unit]:
    """Rows behind a product in two: what can run on its sums, and the rest."""
    if unit.kind != "rows":
        return [unit]
    for v in unit.inputs:
        front = _front(unit, v)
        if not front:
            continue
        head = Unit("loop", unit.space, front)
        _connect(head, count)
        if _source(head, maker, count, set()) is not None:
            tail = Unit("rows", unit.space, [n for n in unit.nodes if n not in front])
            _connect(tail, count)
            return [head, tail]
    return [unit]


def _front(unit: Unit, v: Value) -> list[Node]:
    """Elementwise nodes that need nothing of the unit but v, as many as leave one value to the
    others; that value as narrow as possible."""
    have, nodes = {v}, list[Node]()
    for n in unit.nodes:
        whole = n.op.reduction not in COMBINE and extents_of(n.outputs[0]) == unit.space
        if whole and have.intersection(n.inputs) and have.issuperset(
                set(n.inputs) - set(unit.inputs)):
            nodes.append(n)
            have.update(n.outputs)
    best: tuple[int, list[Node]] | None = None
    for stop in range(len(nodes), 0, -1):
        front, rest = nodes[:stop], [n for n in unit.nodes if n not in nodes[:stop]]
        made = {x for n in front for x in n.outputs}
        left = {x for x in made if x in unit.outputs or any(x in n.inputs for n in rest)}
        if len(left) == 1 and not any(v in n.inputs for n in rest):
            bits = left.pop().aval.dtype.bits
            best = min(best or (bits, front), (bits, front), key=lambda b: b[0])
    return best[1] if best is not None else []


def _source(loop: Unit, maker: dict[Value, Unit], count: dict[Value, int],
            gone: set[int]) -> list[Unit] | None:
    """The anchor whose result a loop can take from registers, and the view between them."""
    for v in loop.inputs:
        chain, at = [], maker.get(v)
        if at is not None and at.kind == "view" and count[v] == _reads(loop, v):
            chain, v = [at], at.nodes[0].inputs[0]
            at = maker.get(v)
        reader = chain[0] if chain else loop
        if at is None or at.anchor is None or len(at.nodes) > 1 or id(at) in gone:
            continue
        if count[v] == _reads(reader, v) and _fits(loop, at.anchor):
            return [at, *chain]
    return None


def _reads(unit: Unit, v: Value) -> int:
    return sum(n.inputs.count(v) for n in unit.nodes)


def _fits(loop: Unit, anchor: Node) -> bool:
    """Whether the loop's operands lie along the axes of the anchor's result."""
    frame = anchor_frame(anchor, loop.space)
    if frame is None:
        return False
    values = [*loop.inputs, *loop.outputs]
    return all(frame.pattern(extents_of(v)) is not None for v in values)


# --- casts of small operands --------------------------------------------------------------------
def _with_casts(units: list[Unit], count: dict[Value, int]) -> list[Unit]:
    """Casts of what is repeated along an axis, such as a bias, are done where they are read."""
    small = {v: u for u in units if u.kind == "loop" and all(n.op.name == "cast" for n in u.nodes)
             for v in u.outputs if len(u.outputs) == 1}
    left = {v: count[v] for v in small}
    for unit in units:
        for v in [v for v in unit.inputs if v in small]:
            if _takes(unit, v, small[v]):
                at = 1 if unit.anchor is not None else 0
                unit.nodes[at:at] = small[v].nodes
                left[v] -= _reads(unit, v)
    gone = {id(small[v]) for v, n in left.items() if n == 0}
    for unit in units:
        _connect(unit, count)
        unit.outputs = [v for v in unit.outputs if v not in small or unit is small[v]]
    return [u for u in units if id(u) not in gone]


def _takes(unit: Unit, v: Value, source: Unit) -> bool:
    if unit is source or size_of(v.aval.shape) * 2 > size_of(unit.space):
        return False
    if unit.kind in ("loop", "rows"):
        return not (len(unit.nodes) == 1 and unit.nodes[0].op.reduction in COMBINE)
    if unit.anchor is None or v in unit.anchor.inputs:
        return False
    frame = anchor_frame(unit.anchor, unit.space)
    return frame is not None and all(
        frame.pattern(extents_of(x)) is not None for x in source.inputs)


__all__ = ["Unit", "units_of"]
