"""A traced graph made ready for kernels: simplified, attention and products found, ops opened.

Every pass keeps the ids of the ops (see op_ids.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ...lazy_dataclass import dataclass
from ...numerics import as_type
from ...runtime.generations import Generation
from ..expand import expand_by, expand_control, split_loops
from ..ir import Graph, Node, Value
from ..schedule.memory_plan import fold_constants
from ..simplify import Rewriter, canonicalize, merge_common, rebuild, remove_dead
from .kernels.extrema import narrow_positions
from .kernels.gathered_rows import dot_picked_rows
from .kernels.gathers import nothing
from .kernels.integer_sums import sum_integers
from .kernels.pointwise_loops import keep_pointwise_loops
from .kernels.scatters import open_writes
from .kernels.small_matmuls import multiply_small
from .kernels.small_systems import solve_small_systems
from .kernels.sorted_segments import sort_segments
from .kernels.sorting import open_sorts, sums_along
from .kernels.spell import COMBINE
from .kernels.strips import open_column_sums, open_maxima
from .kernels.unordered_sums import add_in_any_order
from .passes.arrival_order import cut_where_read, use_as_it_comes
from .passes.attention_kernels import open_cached_attention, use_attention_kernels
from .passes.column_parts import variances_of_parts
from .passes.computed_moves import compute_moves
from .passes.constant_factors import sum_once
from .passes.conv_kernels import use_conv_kernels
from .passes.cut_axes import cut_columns, join_reductions, merge_last_axes
from .passes.data_movement import (
    join_parts,
    narrow_moves,
    reshape_matmuls,
    widen_late,
    widens,
)
from .passes.displaced_reads import read_displaced
from .passes.early_axes import give_axes_early
from .passes.fft_kernels import use_fft_kernels
from .passes.hoist_reshapes import hoist_reshapes
from .passes.hoist_scalar_math import hoist_scalar_math
from .passes.library_ops import call_products, transpose_operands
from .passes.long_rows import split_few_rows
from .passes.matrix_transposes import read_matrices_as_they_lie
from .passes.merge_exchanges import merge_exchanges
from .passes.merge_matmuls import merge_matmuls
from .passes.merge_sums import merge_sums
from .passes.merged_moves import gather_merged_moves
from .passes.narrow_copies import NarrowCopy, keep_copies
from .passes.packed_products import multiply_packed
from .passes.packed_values import multiply_narrow, open_packed
from .passes.pad_rows import pad_rows
from .passes.place_blocks import place_blocks
from .passes.plain_attention import fused_attention
from .passes.product_sums import sum_products
from .passes.result_sums import sum_results
from .passes.short_reductions import open_short_reductions
from .passes.sparse_kernels import use_sparse_kernels
from .passes.split_concatenations import (
    loops_of_parts,
    reductions_of_parts,
    slices_of_loops,
)
from .passes.split_exponential_sums import split_exponential_sums
from .passes.split_k import split_k
from .passes.split_losses import split_long_losses
from .passes.stored_scans import scans_of_stored
from .passes.thin_matmuls import open_thin_matmuls
from .passes.transpose_codes import write_transposed_codes
from .passes.weighted_means import divide_last
from .passes.window_kernels import sink_transposes
from .passes.window_launches import launch_windows, open_windows, spread_windows
from .passes.window_reductions import reduce_windows
from .program.host_keys import open_keys
from .program.node_kernels import drop_overwritten
from .target import indexed_kind

Pass = Callable[[Graph], Graph]


# --- reductions of several runs of axes --------------------------------------------------------
def split_reductions(graph: Graph) -> Graph:
    """Reductions over axes that do not lie together become one for each run, kept, last first."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.reduction not in COMBINE:
            return None
        runs = _runs(node.attrs["axis"])
        if len(runs) < 2 and node.attrs["keepdims"]:
            return None
        rest = {k: v for k, v in node.attrs.items() if k not in ("axis", "keepdims")}
        out = inputs[0]
        for run in reversed(runs):
            out = rw.emit(node.op.name, out, axis=run, keepdims=True, **rest)
        if node.attrs["keepdims"]:
            return out
        return rw.emit("reshape", out, shape=node.outputs[0].aval.shape)

    return rebuild(graph, visit)


def open_reductions(graph: Graph) -> Graph:
    """Reductions and segments of no elements are numbers, reductions of bools extrema of integers.
    """

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        way = node.op.reduction
        segments = indexed_kind(node) == "segments"
        if not (way or segments) or not all(isinstance(d, int) for d in inputs[0].aval.shape):
            return None
        x, out = inputs[0], node.outputs[0].aval
        if 0 in x.aval.shape and 0 not in out.shape:
            none = nothing(out.dtype, node.op.meets or "sum") if segments else EMPTY[way]
            value = rw.emit("constant", value=none, type=out.type)
            return rw.emit("broadcast_to", value, shape=out.shape)
        if segments or x.aval.dtype.kind != "bool":
            return None
        wide = rw.emit("cast", x, source=x.aval.type, to=INT32)
        extremum = "reduce_max" if way in ("any", "max", "sum") else "reduce_min"
        made = rw.emit(extremum, wide, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"])
        return rw.emit("cast", made, source=INT32, to=out.type)

    return rebuild(graph, visit)


def _runs(axis: tuple[int, ...]) -> list[tuple[int, ...]]:
    runs: list[tuple[int, ...]] = []
    for a in sorted(axis):
        if runs and runs[-1][-1] == a - 1:
            runs[-1] += (a,)
        else:
            runs.append((a,))
    return runs


def narrow_ids(graph: Graph) -> Graph:
    """Integers that choose slices as they lie: what picks by int64 picks by int32 too."""
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not indexed_kind(node):
            return None
        cast = rw.made_by(inputs[1], "cast")
        if cast is None or cast.inputs[0].aval.dtype.name != "int32":
            return None
        return rw.emit(node.op.name, inputs[0], cast.inputs[0], **node.attrs)

    return remove_dead(rebuild(graph, visit))


def drop_same_casts(graph: Graph) -> Graph:
    """Casts that change a policy alone, or round what was widened from the same type: the elements
    are the same, and what reads them has the policy in its own attributes by now. Results of the
    function keep their type."""
    results = set(graph.outputs)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "cast" or node.outputs[0] in results:
            return None
        source, to = node.attrs["source"], node.attrs["to"]
        plain = not any(p.saturate or p.scaled or p.custom or p.device
                        for p in (source.policy, to.policy))
        if source.dtype is to.dtype and plain:
            return inputs[0]
        wide = rw.made_by(inputs[0], "cast")
        back = wide is not None and wide.attrs["source"].dtype is to.dtype and plain
        return wide.inputs[0] if wide is not None and back and widens(wide) else None

    return rebuild(graph, visit)


def multiply_in_f64(graph: Graph) -> Graph:
    """Products of narrower floats whose sums f64 keeps: those of operands widened to it, which are
    exact, rounded once."""
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        (y,) = node.outputs[:1] or (None,)
        if node.op.name != "matmul" or y is None or y.aval.dtype.kind != "float" or \
                y.aval.dtype is F64.dtype or node.attrs["accum"] is not F64.dtype:
            return None
        wide = [v if v.aval.dtype is F64.dtype else rw.emit("cast", v, source=v.aval.type, to=F64)
                for v in inputs]
        made = rw.emit("matmul", *wide, accum=F64.dtype)
        return rw.emit("cast", made, source=F64, to=y.aval.type)

    return rebuild(graph, visit)


def expand_for_kernels(graph: Graph) -> Graph:
    """Ops in those that have kernels: by the rule for GPUs where there is one."""
    return expand_by(graph, lambda node: sums_along(node) or node.op.expand_gpu or node.op.expand)


EMPTY = {"sum": 0, "prod": 1, "any": False, "all": True}  # of nothing; an extremum has none
INT32, F64 = as_type("int32"), as_type("f64")

PIPELINE: list[Callable[..., Any]] = [
    fused_attention,  # also where a gradient alone is wanted: the result is still there
    remove_dead,
    split_loops,
    keep_pointwise_loops,
    expand_control,
    open_cached_attention,
    remove_dead,
    fused_attention,
    open_windows,
    canonicalize,
    merge_common,
    reduce_windows,
    spread_windows,
    join_parts,
    multiply_in_f64,
    reshape_matmuls,
    narrow_moves,
    gather_merged_moves,
    use_attention_kernels,
    sum_results,
    use_conv_kernels,
    use_fft_kernels,
    use_sparse_kernels,
    multiply_packed,
    split_long_losses,
    drop_overwritten,
    expand_for_kernels,
    cut_where_read,
    merge_exchanges,
    canonicalize,
    sink_transposes,
    launch_windows,
    drop_overwritten,  # of windows: results are written whole
    read_matrices_as_they_lie,
    multiply_narrow,
    open_packed,
    canonicalize,
    merge_common,
    sum_once,
    canonicalize,
    merge_common,
    remove_dead,
    open_thin_matmuls,
    merge_matmuls,
    merge_sums,
    canonicalize,
    keep_copies,
    pad_rows,
    reductions_of_parts,
    open_short_reductions,
    slices_of_loops,
    widen_late,
    narrow_moves,
    loops_of_parts,
    read_displaced,
    hoist_reshapes,
    widen_late,
    merge_common,
    add_in_any_order,
    sum_integers,
    split_k,
    solve_small_systems,
    multiply_small,
    dot_picked_rows,
    sort_segments,
    merge_common,  # sums by the same ids share their order
    open_sorts,
    open_writes,
    drop_same_casts,
    narrow_positions,
    scans_of_stored,
    open_reductions,
    divide_last,
    join_reductions,  # ahead of what takes them in parts
    variances_of_parts,
    split_exponential_sums,
    hoist_reshapes,  # also of parts
    compute_moves,
    split_reductions,
    merge_last_axes,
    open_column_sums,
    write_transposed_codes,
    open_maxima,
    split_few_rows,
    cut_columns,
    hoist_scalar_math,
    give_axes_early,
    narrow_ids,
    transpose_operands,
    use_as_it_comes,
]
# These ask what the chip has.
BY_CHIP: tuple[Callable[..., Graph], ...] = (use_attention_kernels, use_conv_kernels,
                                             merge_matmuls, open_column_sums,
                                             write_transposed_codes, variances_of_parts,
                                             split_exponential_sums, split_few_rows,
                                             multiply_packed, pad_rows, split_k)


@dataclass(frozen=True)
class PreparedGraph:
    """known: the values that depend on nothing but constants.  copies: the last inputs and outputs,
    of its donated inputs in narrower types.  written: of ops that make scores of attention which
    stay in memory why, by id."""

    graph: Graph
    known: dict[Value, np.ndarray]
    copies: tuple[NarrowCopy, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)


def prepare(graph: Graph, chip: Generation, donated: Sequence[int] = (), inner: bool = False
            ) -> PreparedGraph:
    """The graph after every pass. donated: inputs of which copies may be kept. inner: of an
    iteration."""
    copies: tuple[NarrowCopy, ...] = ()
    written: dict[str, str] = {}
    for step in PIPELINE:
        if step is keep_copies:
            graph, copies = keep_copies(graph, donated)
        elif step is fused_attention:
            graph, why = fused_attention(graph)
            written |= why
        else:
            graph = step(graph, chip) if step in BY_CHIP else step(graph)
    known, graph = fold_constants(graph)
    graph = remove_dead(call_products(open_keys(graph), chip.warpgroup_matmul))
    graph = sum_products(graph, chip.warpgroup_matmul)
    placed = place_blocks(graph, chip.warpgroup_matmul, inner)
    return PreparedGraph(placed, known, copies, written)


__all__ = ["PIPELINE", "narrow_ids", "prepare", "split_reductions"]
