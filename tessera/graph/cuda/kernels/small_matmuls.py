"""Products of many small matrices: a lane for each row of the result.

    y[z, i, j] = sum of a[z, i, k] * b[z, k, j] over k, of up to eight k and j

With a group of threads for each matrix of 4 x 4 the launches of a Kalman filter of 8192 series in
`f64` took 28 us each (NVIDIA H200, 2026-11-27, commit 0cfbde19).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ....numerics import as_type
from ...ir import Graph, Node, Value, producers_of
from ...op import OPS, Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import remove_dead
from ..choose_schedule import blocks, chosen
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital

MOST = 8  # columns, and terms of a sum: a thread has a row of the result in registers
LEAST = 2048  # rows of the result: as many threads
LANES = 128  # of a group
# a, b as [Z, ., .], of which either may be one for all -> [Z * M, N]. turned: whether they lie as
# [Z, K, M] and [Z, N, K].  rows: M.
ROWS = library_call("small_product")


def multiply_small(graph: Graph) -> Graph:
    """Products of a few columns and a short contracted axis as kernels of rows."""
    made = producers_of(graph)
    nodes, changed = list[Node](), False
    for node in graph.nodes:
        if node.op.name == "matmul" and is_small(node):
            nodes += _by_rows(node, made)
            changed = True
        else:
            nodes.append(node)
    return remove_dead(replace(graph, nodes=tuple(nodes))) if changed else graph


def is_small(node: Node) -> bool:
    a, b, out = (v.aval for v in (*node.inputs, *node.outputs))
    if not all(isinstance(d, int) and d for x in (a, b, out) for d in x.shape):
        return False
    if out.dtype.name not in ("f32", "f64") or a.ndim < 2 or b.ndim < 2 or any(
            x.dtype is not out.dtype for x in (a, b)) or node.attrs["accum"] is not out.dtype:
        return False
    shape, leads = extents_of(node.outputs[0]), [extents_of(v)[:-2] for v in node.inputs]
    return (max(int(a.shape[-1]), shape[-1]) <= MOST and prod(shape[:-1]) >= LEAST
            and all(lead == shape[:-2] or prod(lead) == 1 for lead in leads))


def _by_rows(node: Node, made: dict[Value, Node]) -> list[Node]:
    nodes = list[Node]()
    given, turned = list[Value](), list[bool]()
    for v in node.inputs:
        move, n = made.get(v), v.aval.ndim
        swaps = move is not None and move.op.name == "transpose" and tuple(
            move.attrs["axes"]) == (*range(n - 2), n - 1, n - 2)
        x = move.inputs[0] if move is not None and swaps else v
        shape = (prod(extents_of(x)[:-2]), *extents_of(x)[-2:])
        given.append(Value(Aval(shape, x.aval.type)))
        turned.append(swaps)
        nodes.append(Node(OPS["reshape"], (x,), {"shape": shape}, (given[-1],), node.where))
    out = node.outputs[0].aval
    shape = extents_of(node.outputs[0])
    rows = Value(Aval((prod(shape[:-1]), shape[-1]), out.type))
    nodes.append(Node(ROWS, tuple(given), {"turned": tuple(turned), "rows": shape[-2]}, (rows,),
                      node.where))
    nodes.append(Node(OPS["reshape"], (rows,), {"shape": shape}, node.outputs, node.where))
    return nodes


def schedule_small_matmuls(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    a, b = (builder.operand(v) for v in node.inputs)
    y = builder.operand(node.outputs[0])
    R, N = y.shape
    K = a.shape[1 if node.attrs["turned"][0] else 2]
    reads = [a] if a.name == b.name else [a, b]
    builder.add(group.kind, (R, N, K), reads, [y], [builder.step(node)],
                chosen(None, LANES, warps=LANES // 32), (blocks(R, LANES),),
                turned=node.attrs["turned"], rows=node.attrs["rows"],
                alone=(a.shape[0] == 1, b.shape[0] == 1))


def small_matmul_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), (R, N, K) = KernelWriter(group), group.steps, group.writes, group.space
    a, b, M = group.reads[0], group.reads[-1], group.attr("rows")
    (a_turned, b_turned), (one_a, one_b) = group.attr("turned"), group.attr("alone")
    place = w.type(as_type("int64"))
    w.line(f"r = tile.arange(0, {LANES}, {place}) + tile.group_id(0) * {LANES}")
    w.line(f"inside = r < {R}")
    w.line(f"z = r // {M}")
    w.line(f"i = r % {M}")
    first = "0" if one_a else f"z * {M * K}"
    for k in range(K):
        at = f"{first} + {k * M} + i" if a_turned else f"{first} + i * {K} + {k}"
        at = f"tile.where(inside, {at}, {prod(a.shape)})"
        w.line(f"a{k} = tile.gather({capital(a.name)}, {at})", step)
    begin = "0 * z" if one_b else f"z * {K * N}"
    for j in range(N):
        total = ""
        for k in range(K):
            at = f"{begin} + {j * K + k if b_turned else k * N + j}"
            at = f"tile.where(inside, {at}, {prod(b.shape)})"
            w.line(f"b{k} = tile.gather({capital(b.name)}, {at})", step)
            w.line(f"y{j} = {total}a{k} * b{k}", step)
            total = f"y{j} + "
    for j in range(N):
        w.line(f"tile.scatter({capital(y.name)}, tile.where(inside, r * {N} + {j}, -1), y{j})",
               step)
    return w.finish_flat()


kernel_kind("small_product", "matmul", small_matmul_source, schedule_small_matmuls, [ROWS])

__all__ = ["is_small", "multiply_small"]
