"""Graph IR to Schedule IR for GPUs: the blocks, grids and operands of every group's kernel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ...errors import UnsupportedTargetError
from ...kernels.cards import multiprocessors_of
from ...kernels.row_blocks import few_row_share, row_share
from ...runtime.generations import Generation
from ...runtime.target import Target
from ...tensor import Tensor
from ...tile.ir.schedule import Schedule
from ..ir import Graph, Node, Value, subgraphs, uses
from ..schedule.batches import batch_groups
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.fuse import fuse
from ..schedule.groups import FusionGroup
from ..schedule.ir import GraphSchedule, GroupOperand, GroupStep, ScheduledGroup, Transfer
from ..schedule.loop_axes import Frame, extents_of
from ..schedule.memory_plan import MemoryPlan, numbers, plan_memory
from ..schedule.merge_loops import merge_column_sums, merge_loops
from ..schedule.offload import copy_arguments, order_arguments, place_saved
from ..schedule.op_ids import id_of, number
from ..schedule.order_for_cache import order_for_cache
from ..schedule.region_copies import RegionCopy, moves_of
from . import choose_schedule
from .kernels.anchors import anchor_extents, anchor_frame
from .kernels.batch_key import batch_key, is_flat, parts_that_come, sent_by
from .kernels.column_frames import column_frame, reductions
from .kernels.column_passes import join_columns, schedule_column_passes
from .kernels.gathers import around
from .kernels.generate_kernels import kernel_of
from .kernels.group_statements import COLUMNS, depends_on_index
from .kernels.group_steps import attributes_of, head_frame, in_space, operand_frame, without_result
from .kernels.kernel_kinds import kernel_kinds
from .kernels.long_strips import add_long_strips, long_strips
from .kernels.loop_blocks import (
    flat_rows,
    for_vectors,
    loop_blocks,
    loop_grid,
    region_ends,
    row_block,
)
from .kernels.matmul_form import matmul_form
from .kernels.row_parts import SCHEDULE, row_parts
from .kernels.row_passes import (
    STAGED_COLUMNS,
    brought_rows,
    read_again,
    read_for_all,
    staged_rows,
    statistics_deep,
)
from .kernels.scans import join_scans
from .kernels.spell import COMBINE
from .kernels.strips import STRIP_SUM
from .passes.arrival_order import come_by
from .passes.attention_masks import mask_kind
from .passes.cached_reads import turn_around
from .passes.displaced_reads import displaced_axes
from .passes.duplicate_parts import duplicate_parts
from .passes.narrow_copies import NarrowCopy
from .passes.overlap import share_chip
from .passes.score_code import score_code
from .passes.streamed_results import stream_results
from .passes.whole_waves import keep_waves_whole
from .prepare import prepare
from .program.collective_steps import CollectiveCallee
from .program.host_keys import Draws, split_draws
from .program.host_steps import HostCallee
from .program.library_steps import LibraryCallee
from .program.loop_steps import LoopCallee
from .program.node_kernels import launch_of
from .target import CUDA, INSIDE


class LoweredGraph:
    """A function's Schedule IR, and the arrays it has inside.

    groups, memory: what it was made of.  released: behind each step, by number, the bytes of the
    temporaries' block, (offset, size), that nothing reads any more.
    constants: by buffer.  captures: tensors of the surrounding program, read at each call.
    draws: what the host computes at each call, and `drawn` the buffers that take it.
    names: of the values, those of their buffers where they have one.
    overwritten: by buffer, the donated inputs that are written over.
    copies: of donated inputs in narrower types, the last inputs and results.
    """

    def __init__(self, builder: _KernelSchedule, plan: GraphSchedule, draws: Draws,
                 copies: Sequence[NarrowCopy] = ()):
        names, behind = builder.names, builder.behind
        self.plan, self.draws, self.names = plan, draws, names
        self.copies = tuple(copies)
        self.graph, self.groups, self.memory = builder.graph, builder.groups, builder.memory
        self.released = {behind[i]: ranges for i, ranges in self.memory.released.items()
                         if behind[i] >= 0}
        self.constants = builder.constants
        self.inputs = tuple(names[v] for v in self.graph.inputs)
        self.captures: dict[str, Tensor] = {names[v]: t for v, t in self.graph.captures}
        self.drawn = tuple(names[v] for v in draws.values)
        self.overwritten = {names[v]: self.graph.inputs.index(v) for v in self.memory.overwritten}


def lower(graph: Graph, target: Target, donated: Sequence[int] = (),
          on_host: Sequence[int] | None = None, inner: bool = False) -> LoweredGraph:
    """The Schedule IR of a graph for a GPU. donated: inputs that may be written over. on_host:
    those that lie on the host, None where no copies beside kernels are wanted. inner: of an
    iteration, which takes no step of the random state: its draws differ by its number.

    Raises UnsupportedTargetError, with op and line, where something has no kernel.
    """
    _need_effects(graph)
    numbered = number(graph)
    kept = () if on_host is None else [i for i in donated if i not in on_host]
    ready = prepare(numbered, target.generation, kept, inner)
    known = ready.known
    rest, draws = split_draws(ready.graph, known, "random" in graph.effects and not inner)
    rest = rest if on_host is None else copy_arguments(rest, on_host)
    kinds, rest = (INSIDE, duplicate_parts(rest)) if inner else (CUDA, rest)
    groups = join_columns(merge_loops(merge_column_sums(fuse(rest, kinds))), rest.outputs)
    groups = join_scans(groups, rest.outputs)
    groups = order_arguments(place_saved(groups, rest), rest)
    groups = order_for_cache(groups, kinds)
    plain = numbers(known)
    sent, come, apart = sent_by(groups), come_by(groups), parts_that_come(groups)
    groups = batch_groups(
        groups, rest, lambda g: batch_key(g, plain, attributes_of, sent, come, apart), kinds)
    chip = multiprocessors_of(target.generation)
    groups = keep_waves_whole(groups, kinds, chip, target.generation.group_shared_bytes)
    memory = plan_memory(rest, groups, known, kinds, draws.values,
                         [rest.inputs[i] for i in donated])
    builder = _KernelSchedule(rest, groups, memory, draws.values,
                              target.generation)
    built = builder.build(str(target), numbered, draws.nodes, ready.written)
    plan = stream_results(turn_around(share_chip(built, chip)))
    return LoweredGraph(builder, plan, draws, ready.copies)


STATIC_GRIDS = frozenset({"computed", "loop", "move", "rows"})


class _KernelSchedule(ScheduleBuilder):
    """Groups with the blocks and grids of their kernels, for a chip."""

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], memory: MemoryPlan,
                 drawn: Sequence[Value], chip: Generation):
        super().__init__(graph, groups, memory, drawn)
        self.chip = chip

    def add(self, kind: str, space: tuple[int, ...], reads: Sequence[GroupOperand],
            writes: Sequence[GroupOperand], steps: Sequence[GroupStep], schedule: Schedule,
            grid: tuple[int, ...], **attrs: Any) -> None:
        if kind == "rows" and self._batch is None and self.chip.dependent_launches and (
                prod(grid) > choose_schedule.NEAR_GROUPS):
            attrs["near"] = choose_schedule.NEAR_GROUPS
        if self._batch is None and len(grid) > 1 and kind in STATIC_GRIDS:
            schedule = schedule.with_values({"GRID": grid})
        super().add(kind, space, reads, writes, steps, schedule, grid, **attrs)

    def write(self, group: FusionGroup) -> None:
        kind = kernel_kinds().get(group.kind)
        schedule = kind.schedule if kind else None
        (schedule or MAKERS[group.kind])(self, group)

    def attributes(self, node: Node) -> dict[str, Any]:
        return attributes_of(node)

    def launched(self, steps: list[ScheduledGroup | Transfer]) -> list[ScheduledGroup | Transfer]:
        """Groups of a batch whose kernels are the same are one launch: where their operands lie
        otherwise than in order, kernels of groups that do the same may differ. Parts of one result
        stay in order: one may reach over its end into the next, which writes over that."""
        out: list[ScheduledGroup | Transfer] = []
        for name, run in itertools.groupby(steps, lambda s: getattr(s, "batch", "")):
            if not name:
                out += run
                continue
            alike: dict[tuple[int, int], list[ScheduledGroup]] = {}
            parts = Counter[str]()
            for group in run:
                assert isinstance(group, ScheduledGroup)
                part = max((parts[y.name] for y in group.writes), default=0)
                parts.update(y.name for y in group.writes)
                alike.setdefault((part, id(kernel_of(group)[0])), []).append(group)
            for i, (_, mine) in enumerate(sorted(alike.items(), key=lambda of: of[0][0])):
                launch = f"{name}_{i}" if i else name
                out += [replace(g, batch=launch if len(mine) > 1 else "") for g in mine]
        return out

    def loop(self, group: FusionGroup) -> None:
        counted = [v for v in self.reads(group) if self._counts(v, (group.space or (1,))[-1])]
        reads = [self.operand(v) for v in self.reads(group) if v not in counted]
        writes = [self.operand(v) for v in group.outputs]
        cuts = displaced_axes(group.nodes) | ({len(group.space) - 1} if counted else set())
        frame = operand_frame(group.space, (*reads, *writes), False, cuts)
        if not frame.members:
            frame = Frame(group.space, (tuple(range(len(group.space))),))
        bits = min(o.type.dtype.bits for o in (*reads, *writes))
        steps = [*map(self._column_numbers, counted), *(self.step(n) for n in group.nodes)]
        laid = any(o.layout for o in (*reads, *writes))
        if group.batch is not None and is_flat(group, self.numbers) and not laid and (
                len(frame.members) == 1):
            s = choose_schedule.for_many(bits)
            grid = (choose_schedule.blocks(prod(group.space), s.n),)
            self.add("loop", group.space, reads, writes, steps, s, grid, axes=frame.members,
                     extent="N")
            return
        row = flat_rows(frame, reads, writes, bits)
        if row and group.batch is None and not any(map(depends_on_index, steps)):
            s = choose_schedule.for_loop((prod(group.space),), bits)
            self.add("loop", group.space, reads, writes, steps, s,
                     (choose_schedule.blocks(prod(group.space), s.n),),
                     axes=(tuple(range(len(group.space))),), row=row)
            return
        s, along = loop_blocks(frame, reads, writes, bits)
        if group.batch is None and along == -2:
            s = for_vectors(s, frame, reads, writes)
        self.add("loop", group.space, reads, writes, steps, s,
                 loop_grid(frame.extents, s, along), axes=frame.members,
                 **({} if along == -2 else {"along": along}))

    def rows(self, group: FusionGroup) -> None:
        if len(group.nodes) == 1 and group.nodes[0].op.reduction in COMBINE:
            return self._one_reduction(group)
        counted = [v for v in self.reads(group) if self._counts(v, group.space[-1])]
        reads = [self.operand(v) for v in self.reads(group) if v not in counted]
        writes = [self.operand(v) for v in group.outputs]
        steps = [*map(self._column_numbers, counted), *(self.step(n) for n in group.nodes)]
        self._rows(group.space, reads, writes, steps, displaced_axes(group.nodes))

    def _counts(self, v: Value, columns: int) -> bool:
        """Whether a known value is 0, 1, 2 ... along the columns, which a kernel need not read."""
        known = self.known.get(v)
        return known is not None and known.dtype.kind == "i" and known.size == columns > 1 and (
            known.shape[-1] == columns) and bool((known.ravel() == np.arange(columns)).all())

    def _column_numbers(self, v: Value) -> GroupStep:
        attrs = (("kinds", ()), ("text", COLUMNS))
        return GroupStep(self.buffer_name(v), "column_numbers", (), attrs, extents_of(v)[-1:],
                         v.aval.type)

    def _rows(self, space: tuple[int, ...], reads: list[GroupOperand], writes: list[GroupOperand],
              steps: list[GroupStep], cuts: Collection[int] = ()) -> None:
        frame = operand_frame(space, (*reads, *writes), True, cuts)
        if len(frame.members) == 1:
            frame = Frame(space, ((), *frame.members))
        numbers = not any(frame.pattern(o.shape)[-1] for o in writes)  # type: ignore[index]
        again = read_again(frame, reads, writes, steps)
        s = choose_schedule.for_rows(frame.extents, numbers * sum(
            bool(step.reduction) for step in steps))
        if frame.extents[-1] == STAGED_COLUMNS and not numbers and staged_rows(reads, again, 1):
            s = choose_schedule.chosen(1, STAGED_COLUMNS, warps=4)
        m = row_block(frame, writes, s.m or 1)
        s = s if m == s.m else choose_schedule.chosen(m, s.n, warps=s.value("warps_"))
        if sum(all(frame.pattern(r.shape) or (False,)) for r in reads) == 1:
            s = choose_schedule.for_padded(s)
        grid = (*frame.extents[:-2], choose_schedule.blocks(frame.extents[-2], s.m))
        if s.n >= frame.extents[-1]:
            staged = staged_rows(reads, again, s.m or 1)
            self.add("rows", space, reads, writes, steps, s, grid, axes=frame.members,
                     **{"staged": staged} if staged else {})
            return
        if self._in_parts(space, frame, reads, writes, steps):
            return
        laid, total = any(o.layout for o in (*reads, *writes)), sum(again.values())
        (rows, columns), room = frame.extents[-2:], self.chip.group_shared_bytes
        for_all = read_for_all(frame, reads)
        share = None
        if numbers and not laid and statistics_deep(frame, reads, steps) == 1:
            share = few_row_share(prod(frame.extents[:-1]), columns, self.chip)
        if share is not None:
            for_all, again = {}, {}  # read once
        elif not laid:
            share = row_share(rows, columns, total, sum(for_all.values()), self.chip)
        in_turn = share is not None and for_all and (
            not share.brings or share.groups == 8 and statistics_deep(frame, reads, steps) > 1)
        if in_turn and self._in_strips(frame, reads, writes, steps, sum(for_all.values())):
            return
        if share is None:
            passes, room = choose_schedule.for_passes(s, columns, total, room, laid)
            self.add("rows", space, reads, writes, steps, passes, grid, axes=frame.members,
                     alone=passes is not s, brought=brought_rows(again, room, columns, passes.n),
                     cluster=1)
            return
        passes, room = choose_schedule.for_share(share, room)
        brought = {i: size // share.groups for i, size in for_all.items() if share.brings} | {
            i: size * share.rows // share.groups for i, size in again.items()}
        self.add("rows", space, reads, writes, steps, passes,
                 (*grid[:-1], grid[-1] // share.rows * share.groups), axes=frame.members,
                 alone=False, brought=brought_rows(brought, room, share.columns, passes.n),
                 cluster=share.groups)

    def _in_parts(self, space: tuple[int, ...], frame: Frame, reads: list[GroupOperand],
                  writes: list[GroupOperand], steps: list[GroupStep]) -> bool:
        """Rows of which each warp has a part. Whether it is such a group."""
        grid = (frame.extents[0],)
        group = ScheduledGroup("g", "rows", space, tuple(reads), tuple(writes), tuple(steps),
                               SCHEDULE, grid)
        if row_parts(group, frame) is None:
            return False
        self.add("rows", space, reads, writes, steps, SCHEDULE, grid, axes=frame.members,
                 parts=True)
        return True

    def _in_strips(self, frame: Frame, reads: list[GroupOperand], writes: list[GroupOperand],
                   steps: list[GroupStep], for_all_bytes: int) -> bool:
        """Rows that clusters share, in strips: what is the same for all comes to shared memory once
        for a strip of them. Whether there is room."""
        if len(frame.members) != 2 or (how := long_strips(
                frame.extents[0], frame.extents[1], self.chip)) is None:
            return False
        row = sum(r.type.dtype.bits for r in reads if all(frame.pattern(r.shape) or (False,)))
        room = how.room_for(row * how.columns // 8, for_all_bytes // how.groups)
        if room:
            add_long_strips(self, frame.space, frame, reads, writes, steps, how, room)
        return room > 0

    def _one_reduction(self, group: FusionGroup) -> None:
        """A reduction alone, over the last run of axes: [A, R] -> [A, 1]."""
        (node,) = group.nodes
        first = node.attrs["axis"][0]
        space = (prod(group.space[:first]), prod(group.space[first:]))
        x = self.operand(node.inputs[0], space)
        y = self.operand(node.outputs[0], (space[0], 1))
        self._rows(space, [x], [y], [self.step(node, shape=(space[0], 1))])

    def columns(self, group: FusionGroup) -> None:
        if len(group.inputs) < len(group.nodes) or len(reductions(group)) < len(group.nodes):
            schedule_column_passes(self, group, self.chip)
            return
        A, R, C = column_frame(group).extents
        reads = [self.operand(n.inputs[0], (A, R, C)) for n in group.nodes]
        writes = [self.operand(n.outputs[0], (A, C)) for n in group.nodes]
        s = choose_schedule.for_columns((R, C), ends=any(y.layout is not None for y in writes))
        several = (len(reads),) if len(reads) > 1 else ()
        self.add("columns", (A, R, C), reads, writes,
                 [self.step(n, shape=(A, C)) for n in group.nodes], s,
                 (A, choose_schedule.blocks(C, s.n), *several),
                 **{"read_last": True} if self._are_read_last(group, C, s.n) else {})

    def _are_read_last(self, group: FusionGroup, C: int, n: int) -> bool:
        """Whether sums of strips are read here for the last time, and n columns are whole lines:
        L2 need not write them to memory. Layer norm's gradient of 1024, 16384, 65536 and 131072
        columns takes 109.4 us in place of 110.5, 106.6 and 109.2, 108.0 and 109.1, 110.4 and 111.6,
        RMS norm's of 16384 107.1 and 109.8 (2^26 elements of bf16, H200, 2026-11-27)."""
        parts = [node.inputs[0] for node in group.nodes]
        return self.chip.dependent_launches and all(
            x in self._of_strips and x.aval.type.dtype.bits == 32 for x in parts) and (
            C % choose_schedule.LINE == 0 and n % choose_schedule.LINE == 0)

    @cached_property
    def _of_strips(self) -> set[Value]:
        """What sums of strips write and one node reads."""
        count = uses(self.graph)
        return {v for n in self.graph.nodes if n.op is STRIP_SUM
                for v in n.outputs if count[v] == 1}

    def gemm(self, group: FusionGroup) -> None:
        anchor = group.anchor
        assert anchor is not None
        frame = anchor_frame(anchor, group.space)
        assert frame is not None
        form = matmul_form(group, frame, self.chip.group_shared_bytes)
        own = [self.operand(v, shape) for v, shape in zip(anchor.inputs, form.operands,
                                                           strict=True)]
        laid = any(self.operand(v).layout for v in (*anchor.inputs, *group.outputs))
        part = {"depth": anchor.attrs["depth"]} if "parts" in anchor.attrs else {}
        part |= {"swapped": True} if form.swapped else {}
        self._anchored("gemm", group, frame, own, form.schedule, form.grid, layout=form.layout,
                       batch=form.batch, open=form.open and not laid, **part)

    def attention(self, group: FusionGroup) -> None:
        anchor = group.anchor
        assert anchor is not None
        frame = anchor_frame(anchor, group.space) or head_frame(anchor)
        heads, S, E = anchor_extents(anchor)
        q, k, v, *rest = anchor.inputs
        masks, spans, keys = ([x for x in rest if x.aval.dtype.kind == kind]
                              for kind in ("float", "int", "uint"))
        repeats = anchor.attrs["group"]
        shapes = [(heads, S, extents_of(q)[-1]), (heads // repeats, *extents_of(k)[-2:]),
                  (heads // repeats, *extents_of(v)[-2:])]
        own = [self.operand(x, sh) for x, sh in zip((q, k, v), shapes, strict=True)]
        for x in masks:
            (*lead, rows, T) = extents_of(x)
            own.append(self.operand(x, (prod(lead), T) if rows == 1 else (prod(lead), rows, T)))
        own += [self.operand(x, (prod(extents_of(x)[:-2]), 2, S)) for x in spans]
        own += [self.operand(x, extents_of(x)) for x in keys]
        mask, draws = anchor.attrs.get("mask"), anchor.attrs.get("draws")
        rule = {"window": anchor.attrs.get("window", 0), "cap": anchor.attrs.get("cap", 0.0)}
        score = anchor.attrs.get("score")
        s = choose_schedule.for_attention(q.aval.type, S, max(E, extents_of(q)[-1]),
                                          self.chip, anchor.attrs["causal"], heads, bool(spans),
                                          score=score is not None,
                                          mask=mask_kind(mask, draws, S), **rule)
        scale = anchor.attrs["scale"] * float(np.log2(np.e))
        self._anchored("attention", group, frame, own, s, (choose_schedule.blocks(S, s.m), heads),
                       scale=scale, causal=anchor.attrs["causal"], group=repeats,
                       saves=len(anchor.outputs) > 1 and anchor.outputs[1] in group.outputs,
                       score=score and score_code(score, extents_of(q)[-3]), mask=mask, draws=draws,
                       nan=anchor.attrs.get("nan", False), **rule)

    def _anchored(self, kind: str, group: FusionGroup, frame: Frame, own: list[GroupOperand],
                  schedule: Any, grid: tuple[int, ...], /, **attrs: Any) -> None:
        """A product or attention and the steps behind it; views between them do nothing."""
        anchor = group.anchor
        assert anchor is not None
        nodes = [n for n in group.nodes if n is not anchor]
        for n in nodes:
            if n.op.name == "reshape":
                self.names[n.outputs[0]] = self.names[n.inputs[0]]
        inner = [n for n in nodes if n.op.name != "reshape"]
        reads = [self.operand(v) for v in self.reads(group)
                 if any(v in n.inputs for n in inner)]
        own_shapes = {v: extents_of(v) for v in anchor.outputs[1:]}
        results = sorted(group.outputs, key=lambda v: v in own_shapes)
        writes = [self.operand(v, own_shapes.get(v) or in_space(v, frame)) for v in results]
        first = self.step(anchor, tuple(o.name for o in own))
        views = tuple(i for n in nodes if n.op.name == "reshape" for i in id_of(n).split())
        steps = [first, *(self.step(n) for n in inner)]
        if views:
            steps[0] = replace(first, ops=(*views, *first.ops))
        self.add(kind, frame.space, [*own, *reads], writes, steps, schedule, grid,
                  axes=frame.members, **attrs)

    def move(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        views, moves = self.memory.views, []
        for i, j, move in moves_of(node):
            source, target = node.inputs[i], node.outputs[j]
            at = move.part_of_result(extents_of(source), views.layout(target))
            if target not in views.pieces and target in views.owners or (
                    views.is_there(source, at, target)):
                continue  # it lies there already
            moves.append((source, target, move))
        some = 0 < len(moves) < len(moves_of(node))  # parts that no copy may reach into
        for source, target, move in moves:
            self._move(node, source, target, move, some)

    def _move(self, node: Node, source: Value, target: Value, move: RegionCopy,
              some: bool) -> None:
        x, y = self.operand(source), self.operand(target)
        if x.layout is None and y.layout is None:
            move, of_source, of_result = move.merged(x.shape, y.shape)
            x, y = replace(x, shape=of_source), replace(y, shape=of_result)
        ends = region_ends(move, y) if some or y.layout else frozenset()
        # runs of elements are passed alone, so that one kernel copies all of them
        if y.layout is None and (at := move.run_in_result(y.shape)) is not None:
            y = replace(y, shape=move.region, offset=y.offset + at)
            move, ends = replace(move, offset=(0,) * len(move.region)), frozenset()
        if x.layout is None and (at := move.run_in_source(x.shape)) is not None:
            x = replace(x, shape=move.region, offset=x.offset + at)
            move = replace(move, axes=tuple((a, 0, 1) for a in range(len(move.region))))
        tiles = move.tile_axes()
        why = self.memory.views.copies.get(target, "")
        turned = [a for a, _, _ in move.axes if a in tiles] == [*reversed(tiles)]
        s = choose_schedule.for_move(move.region, tiles, why, ends, y.type.dtype.bits,
                                     turned and len(tiles) == 2)
        sizes = dict(zip(reversed(tiles), (s.n, s.m), strict=False))
        grid = tuple(choose_schedule.blocks(n, sizes.get(o, 1))
                     for o, n in enumerate(move.region))
        step = self.step(node, (x.name,), y.shape)
        step = GroupStep(y.name, step.op, step.args, (), y.shape, y.type, step.ops, step.where)
        self.add("move", move.region, [x], [y], [step], s, grid or (1,), tile=tiles,
                 region=move.region, offset=move.offset, **{"from": move.axes})

    def gather(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        A, V, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
        T = prod(extents_of(node.inputs[1]))
        inner = (T, C) if C > 1 else (A, T)
        s = choose_schedule.for_gather(inner, node.outputs[0].aval.dtype.bits)
        grid = choose_schedule.grid_of((A, T, C) if C > 1 < A else inner, s.m, s.n)
        self._indexed(group, (A, V, C), (A, T, C), s, grid)

    def segments(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        ids = extents_of(node.inputs[1])
        A, T, C = around(extents_of(node.inputs[0]), node.attrs["axis"], len(ids))
        V = node.attrs["extent"]
        s = choose_schedule.for_segments(A * V, T, C)
        self._indexed(group, (A, T, C), (A, V, C), s,
                      (*((A,) if A > 1 else ()), V, choose_schedule.blocks(C, s.n)))

    def _indexed(self, group: FusionGroup, source: tuple[int, ...], target: tuple[int, ...],
                 schedule: Any, grid: tuple[int, ...]) -> None:
        """What goes from one to the other by the integers that are the second operand."""
        (node,) = group.nodes
        x, ids = node.inputs
        reads = [self.operand(x, source), self.operand(ids, (prod(extents_of(ids)),))]
        write = self.operand(node.outputs[0], target)
        attrs = {"way": node.op.meets or "sum"} if group.kind == "segments" else {}
        self.add(group.kind, target, reads, [write], [self.step(node, shape=target)], schedule,
                  grid, **attrs)

    def launch(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        made = launch_of(node, self.numbers)
        filled = {made.operands.index(n) for n, _ in made.fills}
        reads = [self.operand(v) for i, v in enumerate(node.inputs) if i not in filled]
        writes = [self.operand(v) for v in node.outputs]
        names = tuple(self.numbers.get(v, "-") if i in filled else self.buffer_name(v)
                      for i, v in enumerate(node.inputs))
        step = self.step(node, names) if writes else without_result(node, names)
        self.add("launch", group.space, reads, writes, [step], made.work.schedule, made.work.grid,
                 call=made)

    def library(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        reads = [self.operand(v) for v in node.inputs]
        writes = [self.operand(v) for v in node.outputs]
        step = self.step(node, tuple(o.name for o in reads))
        self.add("library", group.space, reads, writes, [step], Schedule(), (1,),
                 calls=LibraryCallee(node))

    def host(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        reads = [self.operand(v) for v in node.inputs]
        step = without_result(node, tuple(o.name for o in reads))
        self.add("host", (), reads, (), [step], Schedule(), (1,), calls=HostCallee(node))

    def exchange(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        reads = [self.operand(v) for v in node.inputs]
        writes = [self.operand(v) for v in node.outputs]
        names = tuple(o.name for o in reads)
        step = self.step(node, names) if writes else without_result(node, names)
        self.add("exchange", group.space, reads, writes, [step], Schedule(), (1,),
                 calls=CollectiveCallee(node))

    def repeat(self, group: FusionGroup) -> None:
        (node,) = group.nodes
        reads = [self.operand(v) for v in node.inputs]
        writes = [self.operand(v) for v in node.outputs]
        step = self.step(node, tuple(o.name for o in reads))
        self.add("repeat", group.space, reads, writes, [step], Schedule(), (1,),
                 calls=LoopCallee(node))

    def nothing(self, group: FusionGroup) -> None:
        """No kernel: a view lies where its operand does, and no elements are nowhere."""


def _need_effects(graph: Graph) -> None:
    """Raise UnsupportedTargetError at a node with an effect that a GPU's program has no step for.
    Of random numbers the host draws the keys, a movement is a hint, and what sends is a step."""
    for node in graph.nodes:
        for inner in subgraphs(node):
            _need_effects(inner)
        kinds = node.op.effects - {"random", "movement", "collective"}
        if kinds and not node.op.host:
            raise UnsupportedTargetError(
                f"{node.op.name} has the effect {', '.join(sorted(kinds))}, which kernels for GPUs "
                "do not have", where=node.where, hint='run the function with target="cpu"')


# Of kinds that have no kernel of their own, or whose blocks are chosen here.
MAKERS: dict[str, Callable[[Any, FusionGroup], None]] = {
    k: getattr(_KernelSchedule, k) for k in ("loop", "rows", "columns", "gemm", "attention", "move",
                                             "gather", "segments", "launch", "library", "host",
                                             "exchange", "repeat")}
MAKERS |= dict.fromkeys(("view", "empty"), _KernelSchedule.nothing)
MAKERS |= dict.fromkeys(("offload", "fetch"), _KernelSchedule.transfer)
