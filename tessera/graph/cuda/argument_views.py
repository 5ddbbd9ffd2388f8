"""Which kernels take operands and results that lie in larger arrays, or with other strides.

A kernel's indices become indices of the memory (tile/passes/argument_layouts.py), so TMA and loads
read it where it is. What that needs: along an axis of which it takes boxes the elements are one run
of the memory's axis, no box reaches into what lies beside, and rows are of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import prod

from ...errors import TesseraError
from ...tile.passes.argument_layouts import boxes
from ..ir import Node, Value
from ..schedule.groups import FusionGroup
from ..schedule.layouts import StridedLayout, argument_layout
from ..schedule.loop_axes import extents_of, merged
from ..schedule.region_copies import moves_of
from . import choose_schedule
from .kernels.anchors import anchor_extents, anchor_frame
from .kernels.column_frames import column_frame, reductions
from .kernels.computed_moves import computed_block
from .kernels.gathers import around
from .kernels.matmul_form import block_of
from .kernels.strips import strip_blocks
from .passes.followed_values import rows_and_columns
from .program.node_kernels import NodeKernel, launch_of

ROWS = "kernels of this kind take elements in row-major order"
WORD = 16  # bytes of one access
SHORT_ROWS = f"no blocks of {WORD} bytes fit its rows"
MOST_AXES = 5  # of a TMA descriptor
WHOLE = -1
WIDEST = 256  # rows or columns of a block
Extents = tuple[int, ...]


def reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Why a group cannot read an operand that lies so; "" where it can."""
    return READERS[group.kind](group, v, layout) if group.kind in READERS else ROWS


def writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Why a group cannot make a result where it lies so."""
    return WRITERS[group.kind](group, v, layout) if group.kind in WRITERS else ROWS


def refusal(layout: StridedLayout, shape: Extents, box: Mapping[int, int], bits: int,
            row_bytes: int = WORD) -> str:
    """Why a kernel that takes it in these extents cannot; "" where it can.

    box: the axes along which it takes boxes, and a multiple of what they are in them; 0 where
    elements beyond the end do no harm, WHOLE where boxes may have any extent.
    row_bytes: what the length of rows is a multiple of, 0 for any strides
    """
    if bits < 8:
        return "elements of less than a byte lie in rows"
    begin, rest = layout.from_pointer
    lies = argument_layout(rest, shape)
    if lies is None:
        return "its strides are no multiples of each other"
    if len(lies.extents) > MOST_AXES:
        return f"it lies along {len(lies.extents)} axes of memory; a copy describes {MOST_AXES}"
    for axis, most in box.items():
        at = lies.place_of(axis)
        if at is None:
            return f"axis {axis} of {list(shape)} is no run of an axis of its memory"
        whole = lies.extents[at] == shape[axis]
        if not whole and most == WHOLE:
            return f"axis {axis} of {list(shape)} is a part of an axis of its memory"
        if not whole and most and shape[axis] % most:
            return f"blocks of {most} along {shape[axis]} elements reach into what lies beside"
    if row_bytes and lies.places[-1].axis != len(shape) - 1:
        return "neighbours in its rows lie apart"
    if row_bytes and any(n * bits % (8 * row_bytes)
                         for n in (begin, lies.extents[-1], lies.places[-1].start)):
        return f"its rows are not of {row_bytes} bytes"
    return ""


def _begins_further_on(v: Value, layout: StridedLayout) -> bool:
    """Whether it is a tensor of its own, further on in the memory, and accesses to it are whole
    words."""
    begin, rest = layout.from_pointer
    bits = v.aval.dtype.bits
    return rest.is_dense and bits >= 8 and begin * bits % (8 * WORD) == 0


# --- matmuls and attention ------------------------------------------------------------------------
def _anchor_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    anchor = group.anchor
    assert anchor is not None
    behind = any(v in n.inputs for n in group.nodes if n is not anchor)
    if behind and not _begins_further_on(v, layout):
        return "what runs on the result of a matmul reads it in row-major order"
    if v not in anchor.inputs:
        return ""
    shape, bits = extents_of(v), v.aval.dtype.bits
    lead = (prod(shape[:-2]),) if len(extents_of(anchor.outputs[0])) > 2 else ()
    inner = {len(lead): 0, len(lead) + 1: 0}
    if group.kind == "attention" and v in anchor.inputs[3:]:
        return ROWS
    if group.kind == "attention":  # rows beyond the end have to be zeros
        return refusal(layout, (*lead, *shape[-2:]), {1: WIDEST // 2, 2: 1}, bits)
    for i, (x, way) in enumerate(zip(anchor.inputs, anchor.attrs["layout"], strict=True)):
        if x is v:
            along = (i % 2 == 0) != (way == "t")  # the contracted axis is the last
            inner[len(lead) + along] = 64 if bits > 8 else 128
    return refusal(layout, (*lead, *shape[-2:]), inner, bits)


def _anchor_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    anchor = group.anchor
    assert anchor is not None
    if v in anchor.outputs[1:]:
        return ROWS
    frame = anchor_frame(anchor, group.space)
    extents = anchor_extents(anchor) if frame is None else frame.extents
    if prod(extents_of(v)) != prod(extents):
        return ROWS
    rows, columns = WIDEST // 2, 1
    if group.kind == "gemm":  # what memory does not hold is halved
        rows, columns, _ = block_of(group, frame)[0]
    box = {len(extents) - 2: rows, len(extents) - 1: columns}
    return refusal(layout, extents, box, v.aval.dtype.bits)


# --- loops ----------------------------------------------------------------------------------------
def _loop_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Elements beyond the end of a row are left out of what is computed for the row by their number
    alone, and may do harm as indices."""
    space, rows, bits = group.space, group.kind == "rows", v.aval.dtype.bits
    if rows and _is_reduction(group):
        first = group.nodes[0].attrs["axis"][0]
        shape: Extents = (prod(space[:first]), prod(space[first:]))
        return refusal(layout, shape, {0: 0, 1: choose_schedule.for_rows(shape).n}, bits, 1)
    frame = merged(space, [layout.shape], rows, layout.cuts(len(space)))
    along = frame.pattern(layout.shape)
    if along is None:
        return ROWS
    shape = tuple(n for n, p in zip(frame.extents, along, strict=True) if p) or (1,)
    last = WHOLE if v.aval.dtype.kind in ("int", "uint") and any(
        n.op.name == "check_index" for n in group.nodes) else 0
    last = choose_schedule.for_rows(frame.extents).n if rows and len(frame.extents) > 1 else last
    axes = [i for i, p in enumerate(along) if p]
    box = {k: last if a == len(along) - 1 else 0 for k, a in enumerate(axes)
           if a == len(along) - 1 or rows and a == len(along) - 2}
    return refusal(layout, shape, box, bits, 1)


def _is_reduction(group: FusionGroup) -> bool:
    return len(group.nodes) == 1 and bool(group.nodes[0].op.reduction)


def _loop_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Blocks end where a part does (loop_blocks.py), and accesses are as wide as those of a copy,
    which would write the same places."""
    space, rows, bits = group.space, group.kind == "rows", v.aval.dtype.bits
    if layout.shape != space or _is_reduction(group) or max(space, default=1) == 1:
        return ROWS
    frame = merged(space, [space], rows, layout.cuts(len(space)))
    shape, last = frame.extents, len(frame.extents) - 1
    box = {last: choose_schedule.for_rows((1, *shape)).n if rows else 0}
    box |= {last - 1: 0} if rows and last else {}
    if why := refusal(layout, shape, box, bits):
        return why
    columns = next((n for n in reversed(space) if n > 1), 1)  # however finely axes are cut
    if not rows:
        columns = choose_schedule.dividing(columns, choose_schedule.LANES, bits)
    return SHORT_ROWS if columns * bits % (8 * WORD) else ""


def _strips_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    blocks = strip_blocks(group.space, group.nodes)
    along = blocks.frame.pattern(layout.shape)
    if along is None:
        return ROWS
    lies = [(n, box) for n, box, has in zip(
        blocks.frame.extents, (blocks.rows, blocks.schedule.n), along, strict=True) if has]
    box = {axis: box for axis, (_, box) in enumerate(lies)}
    return refusal(layout, tuple(n for n, _ in lies) or (1,), box, v.aval.dtype.bits, 1)


def _strips_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    if layout.shape != group.space:
        return ROWS
    blocks = strip_blocks(group.space, group.nodes)
    box = {0: blocks.rows, 1: blocks.schedule.n}
    return refusal(layout, blocks.frame.extents, box, v.aval.dtype.bits)


def _columns_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    if extents_of(v) != group.space:
        return ROWS
    shape = column_frame(group).extents
    return refusal(layout, shape, {1: WHOLE, 2: 0}, v.aval.dtype.bits, 1)


def _columns_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    A, R, C = column_frame(group).extents
    if len(reductions(group)) < len(group.nodes):
        return ROWS
    n = choose_schedule.for_columns((R, C), ends=True).n
    bits = v.aval.dtype.bits
    why = refusal(layout, (A, C), {1: n}, bits)
    return why or (SHORT_ROWS if n * bits % (8 * WORD) else "")


# --- copies ---------------------------------------------------------------------------------------
def _move_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    shape = extents_of(v)
    for i, _, move in moves_of(group.nodes[0]):
        if group.nodes[0].inputs[i] is v:
            tiles = [a for a, (o, _, _) in enumerate(move.axes) if o in move.tile_axes()]
            if why := refusal(layout, shape, dict.fromkeys(tiles, 0), v.aval.dtype.bits, 0):
                return why
    return ""


def _move_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Blocks end where its parts do."""
    shape, bits = extents_of(v), v.aval.dtype.bits
    for _, _, move in moves_of(group.nodes[0]):
        tiles = move.tile_axes()
        if why := refusal(layout, shape, dict.fromkeys(tiles, 0), bits, 1):
            return why
        if not tiles or choose_schedule.dividing(move.region[tiles[-1]], 64, bits) * bits < (
                8 * WORD):
            return SHORT_ROWS
    return ""


# --- what is picked, and computed where it lies ---------------------------------------------------
def _gather_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Blocks end where its parts do."""
    (node,) = group.nodes
    A, _, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
    T, bits = prod(extents_of(node.inputs[1])), v.aval.dtype.bits
    shape = (A, T, C)[A == 1:] if C > 1 else (A, T)
    s = choose_schedule.for_gather((T, C) if C > 1 else (A, T), bits)
    box = {len(shape) - 2: s.m or 1, len(shape) - 1: s.n}
    return refusal(layout, shape, box, bits) if not layout.from_pointer[1].is_dense else ""


def _computed_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    if layout.from_pointer[1].is_dense:
        return ""
    shape = rows_and_columns(extents_of(v))
    m, n = computed_block(group.nodes[0])
    return ROWS if shape[0] == 1 else refusal(layout, shape, {0: m, 1: n}, v.aval.dtype.bits)


# --- kernels of the graph -------------------------------------------------------------------------
@functools.lru_cache(maxsize=4096)
def _kernel_of(node: Node) -> NodeKernel | None:
    try:
        return launch_of(node, {})
    except TesseraError:  # said when it is lowered
        return None


def _launch_refuses(node: Node, name: str, v: Value, layout: StridedLayout) -> str:
    made = _kernel_of(node)
    if made is None:
        return ROWS
    taken = boxes(made.work.function, name)
    if taken is None and _begins_further_on(v, layout):
        return ""
    if taken is None:
        return f"{made.call.kernel.__name__} uses more of {name} than boxes and elements"
    return refusal(layout, made.shapes[name], taken, v.aval.dtype.bits, 16 if taken else 0)


def _launch_reads(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    (node,) = group.nodes
    made = _kernel_of(node)
    for i, x in enumerate(node.inputs):
        if x is not v:
            continue
        if made is None or i >= len(made.operands) or made.operands[i] in made.call.written:
            return "it is written over"
        if why := _launch_refuses(node, made.operands[i], v, layout):
            return why
    return ""


def _launch_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    (node,) = group.nodes
    made = _kernel_of(node)
    if made is None:
        return ROWS
    name = made.results[node.outputs.index(v)]
    if name in made.call.written and dict(made.fills).get(name, 0) is not None:
        return f"{made.call.kernel.__name__} may leave some of {name} as it was"
    return _launch_refuses(node, name, v, layout)


# --- runs of elements from anywhere on ------------------------------------------------------------
def _is_run(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    return "" if layout.from_pointer[1].is_dense else ROWS


def _exchange_writes(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    return ROWS if v.aval.dtype.packed else _is_run(group, v, layout)


Rule = Callable[[FusionGroup, Value, StridedLayout], str]
READERS: dict[str, Rule] = {
    "attention": _anchor_reads, "gemm": _anchor_reads, "move": _move_reads, "launch": _launch_reads,
    "loop": _loop_reads, "rows": _loop_reads, "strips": _strips_reads, "columns": _columns_reads,
    **dict.fromkeys(("computed", "gather", "segments", "parts", "runs", "line_runs", "exchange",
                     "small_product", "small_system", "steps"), _is_run)}
WRITERS: dict[str, Rule] = {
    "attention": _anchor_writes, "gemm": _anchor_writes, "launch": _launch_writes,
    "move": _move_writes, "loop": _loop_writes, "rows": _loop_writes, "strips": _strips_writes,
    "columns": _columns_writes, "exchange": _exchange_writes, "gather": _gather_writes,
    "computed": _computed_writes, **dict.fromkeys(
        ("segments", "runs", "line_runs", "small_product", "small_system", "steps"), _is_run)}

__all__ = ["reads", "refusal", "writes"]
