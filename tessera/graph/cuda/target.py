"""What fusion and memory planning know of GPUs: which ops have a kernel, and of which kind.

    loop, rows, columns, ...
              a kernel: those of kernels/kernel_kinds.py
    view      no kernel: the value lies where its operand does; a move whose readers take it as it
              lies is none either
    saved     a copy to the host and one back, or a view (schedule/offload.py)
    empty     no elements, no kernel
    launch    a kernel that is a node of the graph (node_kernels.py)
    repeat    a loop whose iterations the host launches (loop_steps.py)
    library   a vendor's library, through CuPy (library_steps.py)
    host      the host, of copies (host_steps.py)
    exchange  a collective: NCCL, or the host, of copies (collective_steps.py)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..ir import Node, Value
from ..op import FLAT_VIEW, FRESH, VIEW, ResultMemory
from ..ops.gather import CHECK_INDEX
from ..ops.kernel import KERNEL
from ..schedule.groups import MAX_READS, FusionGroup
from ..schedule.ir import ALIGN_BYTES
from ..schedule.loop_axes import extents_of
from ..schedule.loop_ops import column_sum_axes, is_last_axis_reduction, loop_space
from ..schedule.offload import FETCH, OFFLOAD
from ..schedule.region_copies import MOVES
from ..schedule.target import ScheduleTarget, Space
from . import argument_views
from .kernels.anchors import anchor_frame
from .kernels.column_frames import column_frame
from .kernels.kernel_kinds import kinds_by_op
from .kernels.scan_kinds import SCANS
from .kernels.spell import COMBINE, is_light, is_stored, no_kernel, template
from .kernels.strips import STRIP_TURNED, STRIPS_OF, has_rows, strips_of, takes_strips
from .passes.displaced_reads import JOINED
from .passes.packed_values import DECODE, ELEMENTWISE
from .program.collective_steps import collective_group
from .program.host_keys import BITS_AT, CAST
from .program.host_steps import host_groups
from .program.library_steps import library_group
from .program.loop_steps import loop_group
from .program.node_kernels import kernel_group, written_operand

ANCHORS = {"product": "gemm", "flash_attention": "attention",  # the kind of each
           "flash_attention_saved": "attention"}

# The kind of what an op does with whole lines.
LINES = {"search": "search", "largest": "position", "smallest": "position",
         **dict.fromkeys(SCANS, "scan")}


# --- loops ----------------------------------------------------------------------------------------
def _loop_space(node: Node) -> Space | None:
    if node.op in ELEMENTWISE or node.op in (BITS_AT, CAST, CHECK_INDEX, JOINED):
        return extents_of(node.outputs[0]) if 0 not in node.outputs[0].aval.shape else None
    if node.op is STRIP_TURNED:
        return extents_of(node.inputs[0])
    space = loop_space(node)
    if space is None and node.op.name == "cast" and template(node) is not None:
        out = node.outputs[0]  # a float to an integer: loops on a CPU leave it out
        space = extents_of(out) if all(isinstance(n, int) and n for n in out.aval.shape) else None
    return space


# --- what a fused loop becomes --------------------------------------------------------------------
def _from_loop(loop: FusionGroup) -> list[FusionGroup]:
    """Sums over leading axes leave the loop, but for what is made of strips, as far as it can take
    that along: they are groups of their own behind it, one for all sums of as many rows."""
    columns = [n for n in loop.nodes if column_sum_axes(n) is not None
               and tuple(n.inputs[0].aval.shape) == loop.space]
    strips = strips_of(columns)
    sums = [group for n in columns if n not in strips for group in _reduction(n)]
    apart: list[Node] = []
    for apart in ([], [n for n in strips if n.op is STRIP_TURNED], strips):
        inside = [n for n in loop.nodes if n not in columns or n in strips and n not in apart]
        if not strips_of(inside) or takes_strips(loop.space, inside):
            break
    passes: dict[object, list[Node]] = {}  # over what they read
    for n in apart:
        passes.setdefault(n if n.op is STRIP_TURNED else n.attrs["rows"], []).append(n)
    behind = [FusionGroup("strips", loop.space, nodes) for nodes in passes.values()]
    return [*([_loop(loop.space, inside)] if inside else []), *behind, *sums]


def _loop(space: Space, nodes: list[Node]) -> FusionGroup:
    for n in nodes:
        if n.op.reduction not in COMBINE and n.op not in STRIPS_OF and template(n) is None:
            raise no_kernel(n)
    rows = "rows" if has_rows(space, nodes) else "loop"
    return FusionGroup("strips" if strips_of(nodes) else rows, space, nodes)


# --- what readers make again ----------------------------------------------------------------------
def _repeatable(node: Node) -> bool:
    """An elementwise op of its operands alone."""
    return not (node.op.reduction or node.op.makes or node.op.effects) and len(
        node.outputs) == 1 and loop_space(node) is not None and template(node) is not None


def _takes(group: FusionGroup, most_reads: int = MAX_READS) -> bool:
    """Loops, rows, columns and sums of strips that read few values of the whole space."""
    whole = [v for v in group.inputs if extents_of(v) == group.space]
    if len(whole) > most_reads:
        return False
    if group.kind == "strips":
        return takes_strips(group.space, group.nodes)
    if group.kind == "columns":
        return column_frame(group).takes(group.inputs)
    folds = [n for n in group.nodes if n.op.reduction]
    return group.kind == "loop" or group.kind == "rows" and all(map(is_last_axis_reduction, folds))


# --- nodes outside of loops -----------------------------------------------------------------------
def _from_node(node: Node) -> list[FusionGroup]:
    if "collective" in node.op.effects:
        _concrete(node)
        return [collective_group(node)]
    if (node.op.effects and not node.op.host) or (node.op.graph_attrs and not node.op.repeats):
        raise no_kernel(node)
    space = _concrete(node)
    if node.op.repeats:
        return [loop_group(node)]
    if node.op.host:
        return host_groups(node)
    if node.op is KERNEL:
        return [kernel_group(node)]
    if node.op.library is not None and 0 not in space:
        return [library_group(node)]
    if node.op in (FETCH, OFFLOAD):
        return [FusionGroup(node.op.name, space, [node], list(node.inputs), list(node.outputs),
                            writes_all=True)]
    kind = _kind_of(node, space)
    if kind not in ("view", "empty", "saved"):
        _check_stored(node)
    if kind:
        anchor = node if node.op.name in ANCHORS else None
        return [FusionGroup(kind, space, [node], anchor=anchor)]
    if node.op.reduction in COMBINE:
        return _reduction(node)
    if template(node) is not None:
        return [_loop(space, [node])]
    raise no_kernel(node)


def _kind_of(node: Node, space: Space) -> str:
    """The kind of the group that a node is alone; "" of loops and reductions. Raises where the
    kernel of the kind does not take the node."""
    name = node.op.name
    if node.op.lies(node.attrs).flat:
        return "view"
    if 0 in space:
        return "empty"
    if node.op.makes == "key" and node.inputs:
        return "key"
    if name == "saved":
        return name
    if name in ANCHORS:
        _check_anchor(node)
        return ANCHORS[name]
    if name in MOVES:
        return "move"
    if kind := indexed_kind(node):
        _check_indexed(node)
        return kind
    if kind := LINES.get(node.op.lines, "") or kinds_by_op().get(node.op, ""):
        return kind
    return "elements" if node.op.element is not None else ""


def _check_stored(node: Node) -> None:
    for v in (*node.inputs, *node.outputs):
        if not is_stored(v.aval.dtype):
            raise no_kernel(node, f"of {v.aval.type}")


def _concrete(node: Node) -> Space:
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
    """The kind of group that an op on indexed slices becomes; "" when it is none."""
    if node.op.meets in ("max", "min"):
        return "segments"
    indexed = node.op.indexed
    if indexed is None or indexed.along:
        return ""
    return "gather" if indexed.reads else "segments"


def _check_indexed(node: Node) -> None:
    x, ids = (v.aval for v in node.inputs)
    if 0 in (*x.shape, *ids.shape):
        raise no_kernel(node, "no elements")


def _reduction(node: Node) -> list[FusionGroup]:
    """Over the last axes: rows; else columns. One run of axes (see prepare.split_reductions)."""
    x = node.inputs[0].aval
    if node.op in STRIPS_OF:
        return [FusionGroup("strips", extents_of(node.inputs[0]), [node])]
    if 0 in x.shape or x.dtype.kind == "bool":
        raise no_kernel(node, "no elements" if 0 in x.shape else "of bools")
    accum = node.attrs.get("accum", x.dtype)
    if accum.kind == "float" and accum.bits < x.dtype.bits:
        raise no_kernel(node, f"it accumulates in {accum}; kernels do in {x.dtype}")
    shape = tuple(d for d in x.shape if isinstance(d, int))
    behind = shape[node.attrs["axis"][-1] + 1:]
    rows = all(d == 1 for d in behind)
    return [FusionGroup("rows" if rows else "columns", shape, [node])]


# --- memory ---------------------------------------------------------------------------------------
def _memory(group: FusionGroup) -> ResultMemory:
    """Kernels write buffers of their own, or over an operand that nobody reads again. What moves
    elements is a view where its readers take it as it lies (argument_views.py)."""
    if group.kind == "launch":
        return written_operand(group.nodes[0])
    if group.kind in ("elements", "write_places"):
        lies = group.nodes[0].op.lies(group.nodes[0].attrs)
        return lies if lies.kind == "donated" else FRESH
    if group.kind == "move":
        lies = group.nodes[0].op.lies(group.nodes[0].attrs)
        return VIEW if lies.kind == "view" else FRESH
    return FLAT_VIEW if group.kind == "view" else FRESH


def _overwrites(group: FusionGroup, x: Value, y: Value) -> bool:
    """A loop loads each element of an operand before it stores any result, in the one block that
    stores there. So do rows that are held whole; in passes over them those elements come behind all
    statistics, block by block, for each result in turn. Sums over ranks take the place of their
    terms, whose memory so is nobody else's while they are under way."""
    if group.kind == "exchange":
        (node,) = group.nodes
        return bool(node.op.exchange and node.op.exchange.in_place) and (
            node.inputs.count(x) == 1 and node.inputs.index(x) == node.outputs.index(y))
    if group.kind not in ("loop", "rows") or x.aval.dtype.packed or y.aval.dtype.packed or any(
            n.op.beside and x in n.inputs for n in group.nodes):
        return False
    whole = extents_of(x) == extents_of(y) == group.space
    return whole and x.aval.dtype.bits == y.aval.dtype.bits and (
        group.kind == "loop" or _made_along(group, x, y))


def _made_along(group: FusionGroup, x: Value, y: Value) -> bool:
    """Whether elements of y are made of those of x in the same place."""
    along = {x}
    for n in group.nodes:
        if not n.op.reduction and along.intersection(n.inputs):
            along.update(n.outputs)
    return y in along


def _buffer(group: FusionGroup) -> str:
    return "host" if group.kind == "offload" else "arena"


def _lasts(group: FusionGroup) -> str:
    return group.nodes[0].op.name if group.kind == "exchange" else ""


CUDA = ScheduleTarget(
    name="cuda", loop_space=_loop_space, from_loop=_from_loop, from_node=_from_node, memory=_memory,
    buffer=_buffer, align_bytes=ALIGN_BYTES, strides=False, reads=argument_views.reads,
    writes=argument_views.writes, epilogue=anchor_frame, light=is_light,
    recomputed=lambda node: node.op.name == "cast" or node.op in (CHECK_INDEX, DECODE),
    repeatable=_repeatable,
    takes=_takes, overwrites=_overwrites, lasts=_lasts)

# Of an iteration of a loop, which often has little to do: a launch less is worth the registers.
INSIDE = replace(CUDA, most_reads=2 * MAX_READS, takes=partial(_takes, most_reads=2 * MAX_READS))

__all__ = ["CUDA", "INSIDE", "indexed_kind"]
