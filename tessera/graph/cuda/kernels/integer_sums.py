"""Sums of integers by integers, and counts: exact in any order, so nothing is put in order first.

    y[ids[t]] += u[t]

Counts of few numbers are kept by each group in shared memory, and added to the others at its end:
atomic updates of one number in memory come one after another, 1.4 ns each.
"""

from __future__ import annotations

from ....numerics import as_type
from ...ir import Graph, Node, Value
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import IDS, blocks, chosen
from .gathers import adds_slices, around
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG

INTEGER_SUMS = library_call("integer_sums")  # ids [T] (, u [T]) -> [V]
COUNTERS = 8192  # of 32 bits, that a group has in shared memory
BLOCK, ZEROS = 2048, 1024  # elements of an iteration, of a group that writes zeros
GROUPS = 528  # of threads: four for each multiprocessor of an H100
INT32, INT64 = as_type("int32"), as_type("int64")


def sum_integers(graph: Graph) -> Graph:
    """Sums of numbers of 32 and 64 bits by more integers than a group looks through at once."""
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not adds_slices(node.op) or node.op.meets not in ("", "sum"):
            return None
        u, ids = inputs
        out, V = node.outputs[0].aval, node.attrs["extent"]
        if out.dtype.kind not in ("int", "uint") or out.dtype.bits < 32 or not all(
                isinstance(d, int) for v in inputs for d in v.aval.shape):
            return None
        A, T, C = around(extents_of(u), node.attrs["axis"], ids.aval.ndim)
        if A > 1 or C > 1 or not IDS < T < LONG or not 0 < V < LONG:
            return None
        ids, wrap = _as_made(rw, ids, V)
        given, each = [rw.emit("reshape", ids, shape=(T,))], _same_all_along(rw, u)
        if each is None:
            given.append(rw.emit("reshape", u, shape=(T,)))
        sums = Value(Aval((V,), out.type))
        rw.add(Node(INTEGER_SUMS, tuple(given), {"wrap": wrap, "each": each}, (sums,), rw.where))
        return rw.emit("reshape", sums, shape=out.shape)

    return rebuild(graph, visit)


def _as_made(rw: Rewriter, ids: Value, extent: int) -> tuple[Value, bool]:
    """The integers before they were checked and widened, and whether negative ones count from the
    end: the kernel checks what it reads."""
    wrap = True
    while (made := rw.producer.get(ids)) is not None:
        if made.op.name == "check_index" and made.attrs["extent"] == extent:
            wrap = made.attrs["wrap"]
        elif made.op.name == "cast":
            narrow, wide = made.inputs[0].aval.dtype, ids.aval.dtype
            if narrow.kind not in ("uint", wide.kind) or narrow.bits >= wide.bits:
                break  # else each is the same number
        elif made.op.name != "reshape":
            break
        ids = made.inputs[0]
    return ids, wrap and ids.aval.dtype.kind == "int"


def _same_all_along(rw: Rewriter, u: Value) -> int | None:
    """The number that all of u are."""
    made = rw.producer.get(u)
    while made is not None and made.op.name in ("broadcast_to", "reshape"):
        made = rw.producer.get(made.inputs[0])
    return int(made.attrs["value"]) if made is not None and made.op.name in (
        "constant", "full") else None


def schedule_integer_sums(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """Zeros everywhere, then what is added."""
    (node,) = group.nodes
    reads = [builder.operand(v) for v in dict.fromkeys(node.inputs)]
    y, (T,) = builder.operand(node.outputs[0]), extents_of(node.inputs[0])
    (V,), step = y.shape, builder.step(node)
    builder.add(group.kind, (V,), [], [y], [step], chosen(None, ZEROS, warps=4),
                (blocks(V, ZEROS),))
    groups = min(GROUPS, blocks(T, BLOCK))
    builder.add(group.kind, (T,), reads, [y], [step], chosen(None, BLOCK, warps=8), (groups,),
                **node.attrs)


def integer_sums_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    (V,), Y = y.shape, capital(y.name)
    if not group.reads:
        w.line(f"n = tile.group_id(0) * {BN}")
        w.line(f"{Y}[n:n+{BN}] = 0", step)
        return w.finish_operands()
    each, kind = group.attr("each"), w.type(y.type)
    shared = each is not None and V <= COUNTERS
    if shared:
        w.line(f"counts = tile.alloc_shared(({V},), {w.type(INT32)})", step)
        with w.block(f"for v in range(0, {V}, {ZEROS}):"):
            w.line(f"tile.scatter(counts, tile.arange(0, {ZEROS}) + v, 0)", step)
        w.line("tile.barrier()")
    (T,), (groups,) = group.reads[0].shape, group.grid
    with w.block(f"for n in range(tile.group_id(0) * {BN}, {T}, {groups * BN}):"):
        _find_places(w, group, V)
        if shared:
            w.line('tile.atomic_add(counts, at, 1, scope="group")', step)
        else:
            value = f"tile.load({capital(group.reads[-1].name)}[n:n+{BN}])" if each is None else (
                f"tile.full(({BN},), {each}, {kind})")
            w.line(f"tile.atomic_add({Y}, at, tile.cast({value}, {kind}))", step)
    if shared:
        w.line("tile.barrier()")
        with w.block(f"for v in range(0, {V}, {ZEROS}):"):
            w.line(f"i = tile.arange(0, {ZEROS}) + v", step)
            w.line(f"total = tile.cast(tile.gather(counts, i), {kind}) * {each}", step)
            w.line(f"tile.atomic_add({Y}, i, total)", step)
    return w.finish_operands()


def _find_places(w: KernelWriter, group: ScheduledGroup, V: int) -> None:
    """`at`: which sums the elements from n on are added to."""
    (step,), ids, BN = group.steps, group.reads[0], group.schedule.n
    dtype = ids.type.dtype
    w.line(f"at = tile.load({capital(ids.name)}[n:n+{BN}])", step)
    if dtype.bits < 32:
        w.line(f"at = tile.cast(at, {w.type(INT32)})", step)
    elif dtype.kind == "uint":
        w.line(f"at = tile.cast(at, {w.type(INT64)})", step)
    w.check_index("at", V, step, group.attr("wrap"))
    if group.attr("wrap"):
        w.line(f"at = tile.where(at < 0, at + {V}, at)", step)
    w.line(f"at = tile.cast(at, {w.type(INT32)})", step)


kernel_kind("integer_sums", "index", integer_sums_source, schedule_integer_sums,
            [INTEGER_SUMS])

__all__ = ["sum_integers"]
