"""Running sums of numbers of 16 bits read these as they are stored, and write what is stored of
them.

    cast(cumsum(cast(x, f32)), bf16)    # is one kernel, which reads and writes bf16

Their terms are kept in f64 in any case. As casts around it, the sums were written and read in f32
between three kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Graph, Node, Value, readers_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.scan_kinds import SCANS
from ..kernels.scans import keeps_f64
from .data_movement import is_plain, widens


def scans_of_stored(graph: Graph) -> Graph:
    readers, results, known = readers_of(graph), set(graph.outputs), _constant_values(graph)

    def visit(rw: Rewriter, node: Node, inputs: Sequence[Value]) -> Value | None:
        if known.issuperset(node.inputs):  # its value is that of the ops as they stand
            return None
        if node.op.lines in SCANS:
            wide = rw.made_by(inputs[0], "cast")
            if wide is None or not widens(wide) or not _reads_stored(node, wide.inputs[0]):
                return None
            return _scan(rw, node, wide.inputs, node.outputs[0])
        if node.op.name != "cast" or not _narrows(node):
            return None
        scan, scanned = rw.producer.get(inputs[0]), node.inputs[0]
        if (scan is None or scan.op.lines not in SCANS or scanned in results
                or readers[scanned] != [node]):
            return None
        return _scan(rw, scan, scan.inputs, node.outputs[0])

    return remove_dead(rebuild(graph, visit))


def _constant_values(graph: Graph) -> set[Value]:
    """Values that depend on nothing but constants."""
    known: set[Value] = set()
    for node in graph.nodes:
        if not node.op.effects and not node.op.graph_attrs and known.issuperset(node.inputs):
            known.update(node.outputs)
    return known


def _reads_stored(scan: Node, x: Value) -> bool:
    return len(scan.inputs) == 1 and keeps_f64(scan.op.lines, x.aval.dtype)


def _narrows(cast: Node) -> bool:
    source, to = cast.attrs["source"], cast.attrs["to"]
    return source.dtype.kind == to.dtype.kind == "float" and (
        to.dtype.bits == 16 < source.dtype.bits and is_plain(source) and is_plain(to)
        and not to.policy.saturate)


def _scan(rw: Rewriter, scan: Node, inputs: Sequence[Value], out: Value) -> Value:
    made = Value(out.aval)
    rw.add(Node(scan.op, tuple(inputs), scan.attrs, (made,), scan.where))
    return made


__all__ = ["scans_of_stored"]
