"""Sums of many slices by integers where their order may be any: under ts.determinism("fast").

    y[ids[t], c] += u[t, c]

Atomic adds into zeros, slice by slice: nothing is put in order first, as in sorted_segments.py, and
equal inputs need not give equal bits.
"""

from __future__ import annotations

from .... import config
from ...ir import Graph, Node, Value
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import IDS, LANES, blocks, chosen, power
from .gathers import adds_slices, around
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG

ATOMIC_SUMS = library_call("atomic_sums")  # u [T, C], ids [T] -> [V, C]
COLUMNS = 1024  # of a group's slice
ZEROS = 1024  # elements of a group that writes zeros


def add_in_any_order(graph: Graph) -> Graph:
    """Sums in f32 by more integers than a group looks through at once."""
    if config.determinism != "fast":
        return graph

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not adds_slices(node.op) or node.op.meets not in ("", "sum"):
            return None
        u, ids = inputs
        out, V = node.outputs[0].aval, node.attrs["extent"]
        if out.dtype.name != "f32" or u.aval.dtype.name != "f32" or not all(
                isinstance(d, int) for v in inputs for d in v.aval.shape):
            return None
        A, T, C = around(extents_of(u), node.attrs["axis"], ids.aval.ndim)
        if A > 1 or not IDS < T < LONG or not 0 < V * C < LONG:
            return None
        flat = rw.emit("check_index", rw.emit("reshape", ids, shape=(T,)), extent=V, wrap=True)
        sums = Value(Aval((V, C), out.type))
        rows = rw.emit("reshape", u, shape=(T, C))
        rw.add(Node(ATOMIC_SUMS, (rows, flat), {}, (sums,), rw.where))
        return rw.emit("reshape", sums, shape=out.shape)

    return rebuild(graph, visit)


def schedule_atomic_sums(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """Zeros everywhere, then the slices."""
    (node,) = group.nodes
    reads = [builder.operand(v) for v in builder.reads(group)]
    y, (T, C) = builder.operand(node.outputs[0]), extents_of(node.inputs[0])
    V = y.shape[0]
    builder.add(group.kind, (V * C,), [], [y], [builder.step(node)],
                chosen(None, ZEROS, warps=4), (blocks(V * C, ZEROS),))
    n = min(power(C), COLUMNS)
    builder.add(group.kind, (T, C), reads, [y], [builder.step(node)],
                chosen(None, n, warps=max(1, min(4, n // (LANES // 4)))), (T, blocks(C, n)))


def atomic_sums_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    if not group.reads:
        (count,) = group.space
        w.line(f"n = tile.group_id(0) * {BN}")
        w.line(f"{capital(y.name)}[n:n+{BN}] = 0.0", step)
        return w.finish_operands([(count,)])
    u, ids = group.reads
    w.line("t = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    w.line(f"s = {capital(ids.name)}[t]", step)
    w.line(f"slice = tile.load({capital(u.name)}[t:t+1, n:n+{BN}])", step)
    w.line(f"tile.atomic_add({capital(y.name)}[s:s+1, n:n+{BN}], slice)", step)
    return w.finish_operands()


kernel_kind("atomic_sums", "index", atomic_sums_source, schedule_atomic_sums, [ATOMIC_SUMS])

__all__ = ["add_in_any_order"]
