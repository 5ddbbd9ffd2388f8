"""Graph IR to Schedule IR: groups with their blocks, and a buffer for every value between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...errors import UnsupportedTargetError
from ...runtime.target import Target
from ...tensor import Tensor
from ..ir import Graph, Node, Value, value_bytes
from ..schedule.fuse import fuse
from ..schedule.groups import FusionGroup
from ..schedule.ir import (
    GraphSchedule,
    GroupOperand,
    GroupStep,
    PlannedBuffer,
    ScheduledGroup,
    Transfer,
)
from ..schedule.loop_axes import Frame, extents_of, merged
from ..schedule.memory_plan import MemoryPlan, numbers, plan_memory
from ..schedule.offload import place_saved, verify_copies
from ..schedule.op_ids import fates, id_of, line_of, number
from . import choose_schedule
from .anchors import anchor_extents, anchor_frame
from .copy_kernels import moves_of
from .gathers import around
from .host_keys import Draws, split_draws
from .matmul_form import matmul_form
from .prepare import prepare
from .spell import COMBINE, template
from .target import CUDA


class LoweredGraph:
    """A function's Schedule IR, and the arrays it has inside.

    groups, memory: what it was made of.  released: behind each step, by number, the bytes of the
    temporaries' block, (offset, size), that nothing reads any more.
    constants: by buffer.  captures: tensors of the surrounding program, read at each call.
    draws: what the host computes at each call, and `drawn` the buffers that take it.
    """

    def __init__(self, lowering: _Lowering, results: tuple[str, ...]):
        names = lowering.names
        self.graph, self.groups, self.memory = lowering.graph, lowering.units, lowering.memory
        self.constants = lowering.constants()
        self.plan = lowering.schedule(results)
        self.released = {lowering.behind[i]: ranges
                         for i, ranges in self.memory.released.items() if lowering.behind[i] >= 0}
        self.inputs = tuple(names[v] for v in lowering.graph.inputs)
        self.captures: dict[str, Tensor] = {names[v]: t for v, t in lowering.graph.captures}
        self.draws: Draws = lowering.draws
        self.drawn = tuple(names[v] for v in self.draws.values)


def lower(graph: Graph, target: Target) -> LoweredGraph:
    """The Schedule IR of a graph for a GPU. Raises UnsupportedTargetError, with op and line, where
    something has no kernel."""
    return _Lowering(graph, target).run()


class _Lowering:
    def __init__(self, graph: Graph, target: Target):
        self.target, self.shared_bytes = target, target.generation.group_shared_bytes
        if graph.effects - {"random"}:
            raise _effects(graph)
        self.numbered = number(graph)
        prepared, self.known = prepare(self.numbered)
        self.graph, self.draws = split_draws(prepared, self.known, "random" in graph.effects)
        self.numbers: dict[Value, Any] = numbers(self.known)
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self.steps: list[ScheduledGroup | Transfer] = []
        self.groups, self.copies = itertools.count(), itertools.count()
        self.buffers: dict[str, PlannedBuffer] = {}
        self.units: list[FusionGroup] = place_saved(fuse(self.graph, CUDA), self.graph)
        self.memory: MemoryPlan = plan_memory(self.graph, self.units, self.known, CUDA,
                                              self.draws.values)
        self.behind: list[int] = []  # the last step of each group and those before it

    def run(self) -> LoweredGraph:
        given = [*self.graph.inputs, *(v for v, _ in self.graph.captures)]
        for i, v in enumerate(given):
            self._name(v, f"v{i}")
        for i, v in enumerate(self.draws.values):
            self._name(v, f"k{i}")
        for unit in self.units:
            for node in unit.nodes:
                self._name_outputs(node, "h" if unit.kind == "offload" else "v")
        for unit in self.units:
            MAKERS[unit.kind](self, unit)
            self.behind.append(len(self.steps) - 1)
        return LoweredGraph(self, tuple(self._memory(v) for v in self.graph.outputs))

    # --- names --------------------------------------------------------------------------------
    def _name(self, v: Value, wanted: str) -> str:
        if v not in self.names:
            name, n = wanted, 1
            while name in self.taken:
                n += 1
                name = f"{wanted}_{n}"
            self.taken.add(name)
            self.names[v] = name
        return self.names[v]

    def _name_outputs(self, node: Node, letter: str) -> None:
        """v7 for what op %7 gives; parts of it, and what is made of numbers, are told apart."""
        ids = id_of(node).split()
        for v in node.outputs:
            self._name(v, f"{letter}{ids[-1].lstrip('%!')}" if ids else f"c{len(self.names)}")

    def _memory(self, v: Value) -> str:
        """The buffer of a value that is read from memory; constants get theirs now."""
        if v in self.known and v not in self.names:
            self._name(v, f"c{len(self.names)}")
        return self.names[v]

    def _arg(self, v: Value) -> Any:
        return self.numbers[v] if v in self.numbers else self._memory(v)

    def _operand(self, v: Value, shape: tuple[int, ...] | None = None) -> GroupOperand:
        own = extents_of(v) if shape is None else shape
        return GroupOperand(self._memory(v), own, v.aval.type)

    # --- groups -------------------------------------------------------------------------------
    def _add(self, kind: str, space: tuple[int, ...], reads: list[GroupOperand],
             writes: list[GroupOperand],
             steps: list[GroupStep], schedule: Any, grid: tuple[int, ...], **attrs: Any) -> None:
        self.steps.append(ScheduledGroup(f"g{next(self.groups)}", kind, space, tuple(reads),
                                         tuple(writes),
                                         tuple(steps), schedule, grid,
                                         tuple(sorted(attrs.items()))))

    def _reads(self, unit: FusionGroup) -> list[Value]:
        return [v for v in unit.inputs if v not in self.numbers]

    def _step(self, node: Node, args: tuple | None = None, shape: tuple | None = None) -> GroupStep:
        out = node.outputs[0]
        attrs = _attrs(node)
        return GroupStep(self.names[out], node.op.name,
                         tuple(self._arg(v) for v in node.inputs) if args is None else args,
                         tuple(sorted(attrs.items())), extents_of(out) if shape is None else shape,
                         out.aval.type, tuple(id_of(node).split()), line_of(node.where))

    def loop(self, unit: FusionGroup) -> None:
        reads = [self._operand(v) for v in self._reads(unit)]
        writes = [self._operand(v) for v in unit.outputs]
        frame = merged(unit.space, [o.shape for o in (*reads, *writes)], False)
        if not frame.members:
            frame = Frame(unit.space, (tuple(range(len(unit.space))),))
        bits = min(o.type.dtype.bits for o in (*reads, *writes))
        s = choose_schedule.for_loop(frame.extents, bits)
        self._add("loop", unit.space, reads, writes, [self._step(n) for n in unit.nodes], s,
                  choose_schedule.grid_of(frame.extents, s.m, s.n), axes=frame.members)

    def rows(self, unit: FusionGroup) -> None:
        if len(unit.nodes) == 1 and unit.nodes[0].op.reduction in COMBINE:
            return self._one_fold(unit)
        reads = [self._operand(v) for v in self._reads(unit)]
        writes = [self._operand(v) for v in unit.outputs]
        self._rows(unit.space, reads, writes, [self._step(n) for n in unit.nodes])

    def _rows(self, space: tuple[int, ...], reads: list[GroupOperand], writes: list[GroupOperand],
              steps: list[GroupStep]) -> None:
        frame = merged(space, [o.shape for o in (*reads, *writes)], True)
        if len(frame.members) == 1:
            frame = Frame(space, ((), *frame.members))
        s = choose_schedule.for_rows(frame.extents)
        grid = (*frame.extents[:-2], choose_schedule.blocks(frame.extents[-2], s.m))
        self._add("rows", space, reads, writes, steps, s, grid, axes=frame.members)

    def _one_fold(self, unit: FusionGroup) -> None:
        """A reduction alone, over the last run of axes: [A, R] -> [A, 1]."""
        (node,) = unit.nodes
        first = node.attrs["axis"][0]
        space = (prod(unit.space[:first]), prod(unit.space[first:]))
        x = self._operand(node.inputs[0], space)
        y = self._operand(node.outputs[0], (space[0], 1))
        self._rows(space, [x], [y], [self._step(node, shape=(space[0], 1))])

    def columns(self, unit: FusionGroup) -> None:
        (node,) = unit.nodes
        axis = node.attrs["axis"]
        A, R = prod(unit.space[:axis[0]]), prod(unit.space[axis[0]:axis[-1] + 1])
        C = prod(unit.space[axis[-1] + 1:])
        x, y = self._operand(node.inputs[0], (A, R, C)), self._operand(node.outputs[0], (A, C))
        s = choose_schedule.for_columns((R, C))
        self._add("columns", (A, R, C), [x], [y], [self._step(node, shape=(A, C))], s,
                  (A, choose_schedule.blocks(C, s.n)))

    def gemm(self, unit: FusionGroup) -> None:
        anchor = unit.anchor
        assert anchor is not None
        frame = anchor_frame(anchor, unit.space)
        assert frame is not None
        form = matmul_form(unit, frame, self.shared_bytes)
        own = [self._operand(v, shape) for v, shape in zip(anchor.inputs, form.operands,
                                                           strict=True)]
        self._anchored("gemm", unit, frame, own, form.schedule, form.grid, layout=form.layout,
                       batch=form.batch)

    def attention(self, unit: FusionGroup) -> None:
        anchor = unit.anchor
        assert anchor is not None
        frame = anchor_frame(anchor, unit.space) or _head_frame(anchor)
        heads, S, E = anchor_extents(anchor)
        q, k, v = anchor.inputs
        group = anchor.attrs["group"]
        shapes = [(heads, S, extents_of(q)[-1]), (heads // group, *extents_of(k)[-2:]),
                  (heads // group, *extents_of(v)[-2:])]
        own = [self._operand(x, sh) for x, sh in zip((q, k, v), shapes, strict=True)]
        s = choose_schedule.for_attention(q.aval.type, S, max(E, extents_of(q)[-1]),
                                 self.shared_bytes)
        scale = anchor.attrs["scale"] * float(np.log2(np.e))
        self._anchored("attention", unit, frame, own, s, (choose_schedule.blocks(S, s.m), heads),
                       scale=scale, causal=anchor.attrs["causal"], group=group)

    def _anchored(self, kind: str, unit: FusionGroup, frame: Frame, own: list[GroupOperand],
                  schedule: Any, grid: tuple[int, ...], **attrs: Any) -> None:
        """A product or attention and the steps behind it; views between them do nothing."""
        anchor = unit.anchor
        assert anchor is not None
        nodes = [n for n in unit.nodes if n is not anchor]
        for n in nodes:
            if n.op.name == "reshape":
                self.names[n.outputs[0]] = self.names[n.inputs[0]]
        inner = [n for n in nodes if n.op.name != "reshape"]
        reads = [self._operand(v) for v in self._reads(unit)
                 if any(v in n.inputs for n in inner)]
        writes = [self._operand(v, _in_space(v, frame)) for v in unit.outputs]
        first = self._step(anchor, tuple(o.name for o in own))
        views = tuple(i for n in nodes if n.op.name == "reshape" for i in id_of(n).split())
        steps = [first, *(self._step(n) for n in inner)]
        if views:
            steps[0] = GroupStep(first.name, first.op, first.args, first.attrs, first.shape,
                                 first.type,
                                 (*views, *first.ops), first.where)
        self._add(kind, frame.space, [*own, *reads], writes, steps, schedule, grid,
                  axes=frame.members, **attrs)

    def move(self, unit: FusionGroup) -> None:
        (node,) = unit.nodes
        for i, j, move in moves_of(node, self.numbers):
            reads = [] if i is None else [self._operand(node.inputs[i])]
            y = self._operand(node.outputs[j])
            tiles = move.tile_axes()
            s = choose_schedule.for_move(move.region, tiles)
            sizes = dict(zip(reversed(tiles), (s.n, s.m), strict=False))
            grid = tuple(choose_schedule.blocks(n, sizes.get(o, 1))
                         for o, n in enumerate(move.region))
            args = tuple(r.name for r in reads) or (move.fill,)
            step = self._step(node, args, y.shape)
            step = GroupStep(y.name, step.op, step.args, (), y.shape, y.type, step.ops, step.where)
            self._add("move", move.region, reads, [y], [step], s, grid or (1,), tile=tiles,
                      region=move.region, offset=move.offset, fill=move.fill,
                      **{"from": move.axes})

    def gather(self, unit: FusionGroup) -> None:
        (node,) = unit.nodes
        A, V, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
        T = prod(extents_of(node.inputs[1]))
        inner = (T, C) if C > 1 else (A, T)
        s = choose_schedule.for_gather(inner, node.outputs[0].aval.dtype.bits)
        grid = choose_schedule.grid_of((A, T, C) if C > 1 < A else inner, s.m, s.n)
        self._indexed(unit, (A, V, C), (A, T, C), s, grid)

    def segments(self, unit: FusionGroup) -> None:
        (node,) = unit.nodes
        ids = extents_of(node.inputs[1])
        A, T, C = around(extents_of(node.inputs[0]), node.attrs["axis"], len(ids))
        V = node.attrs["extent"]
        s = choose_schedule.for_segments(A * V, T, C)
        self._indexed(unit, (A, T, C), (A, V, C), s,
                      (*((A,) if A > 1 else ()), V, choose_schedule.blocks(C, s.n)))

    def _indexed(self, unit: FusionGroup, source: tuple[int, ...], target: tuple[int, ...],
                 schedule: Any, grid: tuple[int, ...]) -> None:
        """What goes from one to the other by the integers that are the second operand."""
        (node,) = unit.nodes
        x, ids = node.inputs
        reads = [self._operand(x, source), self._operand(ids, (prod(extents_of(ids)),))]
        write = self._operand(node.outputs[0], target)
        self._add(unit.kind, target, reads, [write], [self._step(node, shape=target)], schedule,
                  grid)

    def view(self, unit: FusionGroup) -> None:
        """The value lies where its operand does; the operand's name is known from now on."""
        self._memory(self.memory.places[unit.outputs[0]].root)

    def transfer(self, unit: FusionGroup) -> None:
        (node,) = unit.nodes
        source, target = self._memory(node.inputs[0]), self._memory(node.outputs[0])
        self.steps.append(Transfer(f"x{next(self.copies)}", unit.kind, source, target,
                                   value_bytes(node.outputs[0]), tuple(id_of(node).split()),
                                   line_of(node.where)))

    def empty(self, unit: FusionGroup) -> None:
        """No elements, no kernel."""

    # --- buffers ------------------------------------------------------------------------------
    def constants(self) -> dict[str, np.ndarray]:
        return {self.names[v]: np.ascontiguousarray(a) for v, a in self.known.items()
                if v in self.names}

    def _buffers(self) -> None:
        """A buffer for everything that lies in memory, arguments first."""
        given = [*self.graph.inputs, *(v for v, _ in self.graph.captures), *self.draws.values]
        for v in (*given, *(v for v in self.known if v in self.names)):
            self._buffer(v)
        for unit in self.units:
            for v in unit.outputs:
                self._buffer(v, next(n for n in unit.nodes if v in n.outputs))

    def _buffer(self, v: Value, node: Node | None = None) -> None:
        place, name = self.memory.places[v], self.names[v]
        ops = tuple(id_of(node).split()) if node is not None else ()
        of = self.names[place.root] if place.kind == "view" else ""
        self.buffers[name] = PlannedBuffer(name, extents_of(v), v.aval.type,
                                           BUFFERS.get(place.kind, place.kind), of, place.offset,
                                           ops)

    def schedule(self, results: tuple[str, ...]) -> GraphSchedule:
        self._buffers()
        homes = {i: s.name for s in self.steps for i in s.ops}
        homes |= {i: f"{b.name}, {b.lies}" for b in self.buffers.values()
                  if b.kind == "view" for i in b.ops if i not in homes}
        homes |= {i: "on the host, at each call" for n in self.draws.nodes
                  for i in id_of(n).split() if i not in homes}
        plan = GraphSchedule(self.graph.name, str(self.target), tuple(self.buffers.values()),
                             tuple(self.steps), results, tuple(fates(self.numbered, homes).items()))
        verify_copies(plan)
        return plan


def _attrs(node: Node) -> dict[str, Any]:
    """What the text of a step needs: its expression, the kinds of its operands, its numbers."""
    text = template(node)
    if text is not None:
        plain = {k: v for k, v in node.attrs.items() if isinstance(v, int | float)}
        return {**plain, "text": text, "kinds": tuple(v.aval.dtype.kind for v in node.inputs)}
    if node.op.reduction in COMBINE:
        sums = {"accum": node.attrs["accum"]} if "accum" in node.attrs else {}
        return {**sums, "reduction": node.op.reduction,
                "kinds": (node.inputs[0].aval.dtype.kind,)}
    return {}


def _head_frame(anchor: Node) -> Frame:
    return Frame(anchor_extents(anchor), ((0,), (1,), (2,)))


def _in_space(v: Value, frame: Frame) -> tuple[int, ...]:
    """The extents of a result in the frame's space."""
    shape = extents_of(v)
    return shape if frame.pattern(shape) is not None else frame.space


def _effects(graph: Graph) -> UnsupportedTargetError:
    node = next(n for n in graph.nodes if n.op.effects - {"random"} or n.op.graph_attrs)
    kinds = ", ".join(sorted(graph.effects - {"random"}))
    return UnsupportedTargetError(
        f"{node.op.name} has the effect {kinds}, which kernels for GPUs do not have",
        where=node.where, hint='run the function with target="cpu"')


# The kinds of a plan's places, as buffers of the schedule are called.
BUFFERS = {"arena": "temporary", "fresh": "result", "known": "constant"}
MAKERS: dict[str, Callable[[_Lowering, FusionGroup], None]] = {
    k: getattr(_Lowering, k) for k in ("loop", "rows", "columns", "gemm", "attention", "move",
                                       "gather", "segments", "view", "empty")}
MAKERS |= dict.fromkeys(("offload", "fetch"), _Lowering.transfer)
