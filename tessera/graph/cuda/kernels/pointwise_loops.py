"""Loops of known length whose iterations do the same to each element: one kernel, with the loop
inside and what is carried in registers.

    for i in range(length): carries, results[i] = body(i, carries, elements[i], constants)

A carry that only grows by sums over elements, as gradients of what iterations share do, is carried
for each element, and summed behind the loop.

Steps of an integrator, filters, neurons, returns of a policy, and their derivatives: written out or
launched by the host, every iteration would read and write all that it carries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from ....lazy_dataclass import dataclass
from ....tile.ir.schedule import Schedule
from ...expand import expand_by, expand_control
from ...host_loop import HostLoop
from ...ir import Graph, Node, Value, producers_of
from ...op import OPS
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import Frame, extents_of, merged
from ...schedule.memory_plan import fold_constants, numbers
from ...schedule.op_ids import id_of
from ...simplify import canonicalize, merge_common, remove_dead
from ..choose_schedule import chosen, grid_of, power
from ..passes.data_movement import is_plain_loop
from .group_statements import FrameBlock, KernelValue, emit_step
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter
from .spell import literal, template

STEPS = library_call("pointwise_loop")
SHORTEST = 3  # iterations
MOST_OPS = 512  # of a body, each a statement of the kernel
MOST_CARRIED = 16  # values in registers of each thread, beside those of an iteration
LEAST_ELEMENTS = 32  # those of a warp
FULL = 132 * 1024  # threads in flight on an H100 or H200; with fewer elements each thread has one
LANES = 128  # of a group


@dataclass(frozen=True, eq=False)
class PointwiseLoop:
    """body: (index, carries, elements, constants) -> (carries, results), elementwise ops alone.
    numbers: the values of it that are known.  loop: its form otherwise.  sums: by the number of a
    carry that is carried for each element, the reduction of which it is the sum."""

    body: Graph
    numbers: dict[Value, Any]
    loop: HostLoop
    space: tuple[int, ...]
    sums: dict[int, Node]


# --- which loops ----------------------------------------------------------------------------------
def keep_pointwise_loops(graph: Graph) -> Graph:
    """Loops of elementwise ops as one node each."""
    nodes, changed = list[Node](), False
    for node in graph.nodes:
        form = _form(node)
        nodes += [node] if form is None else _loop_and_sums(node, form)
        changed |= form is not None
    return replace(graph, nodes=tuple(nodes)) if changed else graph


def _loop_and_sums(node: Node, form: PointwiseLoop) -> list[Node]:
    """The loop, with what is summed in front of it and behind."""
    inputs, outputs = list(node.inputs), list(node.outputs)
    before, behind = list[Node](), list[Node]()
    for i, fold in form.sums.items():
        kind = fold.inputs[0].aval
        inputs[i], outputs[i], total = Value(kind), Value(kind), Value(node.outputs[i].aval)
        before.append(Node(OPS["full"], (), {"shape": form.space, "type": kind.type, "value": 0},
                           (inputs[i],), node.where))
        behind += [Node(fold.op, (outputs[i],), fold.attrs, (total,), node.where),
                   Node(OPS["add"], (node.inputs[i], total), {}, (node.outputs[i],), node.where)]
    loop = Node(STEPS, tuple(inputs), {"form": form}, tuple(outputs), node.where)
    return [*before, loop, *behind]


def _form(node: Node) -> PointwiseLoop | None:
    if node.op.repeats is None or not all(
            isinstance(d, int) for v in (*node.inputs, *node.outputs) for d in v.aval.shape):
        return None
    loop: HostLoop = node.op.repeats(**node.attrs)
    if loop.length is None or loop.length < SHORTEST or not 0 < loop.carries <= MOST_CARRIED:
        return None
    carries, rows, constants = loop.split(node.inputs)
    if loop.body.captures or len(loop.body.nodes) > MOST_OPS or (
            set(rows) & {*carries, *constants}):
        return None
    space = max(map(extents_of, node.outputs[:loop.carries]), key=prod)
    if prod(space) < LEAST_ELEMENTS:
        return None
    body, sums = _summed_behind(remove_dead(loop.body), loop, space)
    if not _may_be_pointwise(body, space, loop.carries):
        return None
    body = expand_by(expand_control(body), lambda n: n.op.expand_gpu or n.op.expand)
    known, body = fold_constants(remove_dead(merge_common(canonicalize(body))))
    found = numbers(known)
    if set(known) - set(found) or not all(_fits(n, space) for n in body.nodes):
        return None
    made = {v for n in body.nodes for v in n.outputs} | set(body.inputs)
    ends = body.outputs
    plain = all(v in made and extents_of(v) == space for v in ends)
    short = len(body.nodes) <= MOST_OPS
    return PointwiseLoop(body, found, loop, space, sums) if plain and short else None


def _summed_behind(body: Graph, loop: HostLoop, space: tuple[int, ...]
                   ) -> tuple[Graph, dict[int, Node]]:
    """The body with carries c' = c + sum(v) as c' = c + v of the whole space, and their sums."""
    made = producers_of(body)
    count = Counter(v for n in body.nodes for v in n.inputs)
    count.update(body.outputs)
    inputs, outputs, nodes, sums = list(body.inputs), list(body.outputs), list(body.nodes), {}
    for i in range(loop.carries):
        c, node = body.inputs[1 + i], made.get(body.outputs[i])
        if extents_of(c) == space or node is None or node.op.name != "add" or (
                [count[c], count[body.outputs[i]]] != [1, 1] or c not in node.inputs):
            continue
        rest = node.inputs[node.inputs[0] is c]
        folds, terms = list[Node](), list[Node]()
        lifted = _lifted(rest, made, space, folds, terms)
        if lifted is None or any(f.attrs != folds[0].attrs or extents_of(f.outputs[0]) !=
                                 extents_of(c) for f in folds):
            continue
        whole, grown = Value(lifted.aval), Value(lifted.aval)
        terms.append(Node(node.op, (whole, lifted), node.attrs, (grown,), node.where))
        inputs[1 + i], outputs[i], sums[i] = whole, grown, folds[0]
        nodes += terms
    if not sums:
        return body, {}
    return remove_dead(Graph(body.name, tuple(inputs), (), tuple(nodes), tuple(outputs))), sums


def _lifted(v: Value, made: dict[Value, Node], space: tuple[int, ...], folds: list[Node],
            terms: list[Node]) -> Value | None:
    """What sums, added up, are sums of. folds: these.  terms: takes the nodes that add elements."""
    node = made.get(v)
    if node is None:
        return None
    if node.op.reduction == "sum" and extents_of(node.inputs[0]) == space:
        folds.append(node)
        return node.inputs[0]
    if node.op.name not in ("add", "neg"):
        return None
    given = [_lifted(x, made, space, folds, terms) for x in node.inputs]
    if any(x is None for x in given):
        return None
    whole = tuple(x for x in given if x is not None)
    terms.append(Node(node.op, whole, node.attrs, (Value(whole[0].aval),), node.where))
    return terms[-1].outputs[0]


def _may_be_pointwise(body: Graph, space: tuple[int, ...], carries: int) -> bool:
    """Before anything is expanded: values have the loop's extents, or are repeated along them."""
    return all(extents_of(v) == space for v in body.outputs) and all(
        extents_of(v) == space for v in body.inputs[1:1 + carries]) and all(
        _lies_along(v, space) for v in body.inputs) and not any(
        n.op.reduction or n.op.effects for n in body.nodes)


def _lies_along(v: Value, space: tuple[int, ...]) -> bool:
    if not all(isinstance(d, int) for d in v.aval.shape) or v.aval.dtype.packed:
        return False
    shape = extents_of(v)
    full = (1,) * (len(space) - len(shape)) + shape
    return len(full) == len(space) and all(a in (1, b) for a, b in zip(full, space, strict=True))


def _fits(node: Node, space: tuple[int, ...]) -> bool:
    """Whether it is spelled as a statement of a loop over the space."""
    return (is_plain_loop(node) and len(node.outputs) == 1 and template(node) is not None
            and all(_lies_along(v, space) for v in (*node.inputs, *node.outputs)))


# --- schedule -------------------------------------------------------------------------------------
def schedule_steps(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """The first steps stand for the inputs of the body, in order: the index, what is carried,
    elements, constants. Attributes name values by their places among all steps."""
    (node,) = group.nodes
    form: PointwiseLoop = node.attrs["form"]
    body, loop, space = form.body, form.loop, form.space
    names = {v: builder.inner_name(v) for v in (*body.inputs, *(
        y for n in body.nodes for y in n.outputs))}
    used = {v for n in body.nodes for v in n.inputs} | set(body.outputs) | set(
        body.inputs[1:1 + loop.carries])
    inputs = dict(zip(body.inputs[1:], node.inputs, strict=True))
    given = {x: builder.operand(x) for v, x in inputs.items()
             if v in used and x not in builder.numbers}
    steps = [_input(names[body.inputs[0]], body.inputs[0], ())]
    steps += [_input(names[v], v, (builder.argument(x),) if v in used else ())
              for v, x in inputs.items()]
    ids = tuple(id_of(node).split())
    assert loop.length is not None
    for n in body.nodes:
        args = tuple(form.numbers.get(v, names.get(v)) for v in n.inputs)
        step = builder.step(n, args)
        steps.append(replace(step, ops=ids, flops=step.flops * loop.length))
    place = {s.name: i for i, s in enumerate(steps)}
    ends = [place[names[v]] for v in body.outputs]
    kept = [node.outputs.index(v) for v in group.outputs]
    reads, writes = list(given.values()), [builder.operand(v) for v in group.outputs]
    frame = merged(space, [extents_of(v) for v in body.inputs[1:]] + [space], False)
    if not frame.members:
        frame = Frame(space, (tuple(range(len(space))),))
    s = _blocks(frame.extents, len(body.nodes))
    builder.add(group.kind, space, reads, writes, steps, s, grid_of(frame.extents, s.m, s.n),
                axes=frame.members, carries=loop.carries, sequences=loop.sequences,
                length=loop.length, reverse=loop.reverse, ends=tuple(ends), kept=tuple(kept))


def _input(name: str, v: Value, args: tuple[Any, ...]) -> GroupStep:
    attrs = (("kinds", (v.aval.dtype.kind,)),)
    return GroupStep(name, "loop_input", args, attrs, extents_of(v), v.aval.type)


def _blocks(extents: tuple[int, ...], ops: int) -> Schedule:
    """Up to four elements a lane, fewer of a long body or where there are few elements."""
    total = LANES * next(e for e in (4, 2, 1) if e == 1 or (
        e * ops <= 256 and prod(extents) >= e * FULL))
    n = min(power(extents[-1]), total)
    m = min(power(extents[-2]), max(1, total // n)) if len(extents) > 1 else None
    return chosen(m, n, warps=max(1, min(4, n * (m or 1) // 32)))


# --- kernel ---------------------------------------------------------------------------------------
def steps_source(group: ScheduledGroup) -> KernelText:
    w, frame, s = KernelWriter(group), Frame(group.space, group.attr("axes")), group.schedule
    last = len(frame.members) - 1
    BM, BN = s.m or 1, s.n
    for i in range(last):
        w.line(f"m = tile.group_id({i}) * {BM}" if i == last - 1 else f"g{i} = tile.group_id({i})")
    w.line(f"n = tile.group_id({last}) * {BN}")
    index = tuple(f"g{i}" for i in range(last - 1))
    b = FrameBlock(frame, f"m:m+{BM}" if last else "", f"n:n+{BN}", index, BM, BN, {})
    carries, sequences, length = (group.attr(k) for k in ("carries", "sequences", "length"))
    count = 1 + sum(s.op == "loop_input" for s in group.steps[1:])
    inputs, body = group.steps[:count], group.steps[count:]
    operands = {o.name: o for o in group.reads}
    elements = inputs[1 + carries:1 + carries + sequences]
    for k, step in enumerate(inputs[1:]):
        if step not in elements:
            _load(w, b, step, operands, f"carry{k}" if k < carries else step.name, k < carries)
    with w.block(f"for i in range({length}):"):
        at = f"{length - 1} - i" if group.attr("reverse") else "i"
        w.line(f"at = {at}")
        w.line(f"{inputs[0].name} = tile.cast(at, {w.type(inputs[0].type)})")
        b.held[inputs[0].name] = KernelValue(inputs[0].name, False, False)
        for step in elements:
            _load(w, b, step, operands, step.name, False, "at")
        for step in body:
            emit_step(w, b, step, str(dict(step.attrs)["text"]))
        ends = [b.held[group.steps[i].name].text for i in group.attr("ends")]
        for k, o in zip(group.attr("kept"), group.writes, strict=True):
            if k >= carries:
                w.line(f"{_element_address(b, o, 'at')} = {ends[k]}",
                       group.steps[group.attr("ends")[k]])
        for k in range(carries):
            w.line(f"next{k} = {ends[k]}")
        for k in range(carries):
            w.line(f"carry{k} = next{k}")
    for k, o in zip(group.attr("kept"), group.writes, strict=True):
        if k < carries:
            w.line(f"{_element_address(b, o)} = carry{k}", group.steps[group.attr("ends")[k]])
    rows = {a for step in elements for a in step.args} | {
        o.name for k, o in zip(group.attr("kept"), group.writes, strict=True) if k >= carries}
    return w.finish_operands([(length, *b.dims(_element_operand(o))) if o.name in rows
                              else b.dims(o)
                              for o in w.operands])


def _element_operand(o: GroupOperand) -> GroupOperand:
    """An element of a sequence."""
    return replace(o, shape=o.shape[1:])


def _element_address(b: FrameBlock, o: GroupOperand, at: str = "") -> str:
    """at: the iteration, of sequences and results."""
    return b.place(_element_operand(o))[0].replace("[", f"[{at}, ", 1) if at else b.place(o)[0]


def _load(w: KernelWriter, b: FrameBlock, step: GroupStep, operands: dict[str, GroupOperand],
          name: str, carried: bool, at: str = "") -> None:
    """A value of the body's: a number, or a block of an operand. What is carried is whole."""
    if not step.args:  # nothing reads it
        return
    (arg,) = step.args
    if not isinstance(arg, str):
        text = literal(arg, step.type.dtype.kind)
        if carried:
            text = f"tile.full({b.shape}, {text}, {w.type(step.type)})"
            w.line(f"{name} = {text}")
            text = name
        b.held[step.name] = KernelValue(text, carried and not b.flat, carried)
        return
    o = operands[arg]
    _, m, n = b.place(_element_operand(o) if at else o)
    place = _element_address(b, o, at)
    row = "[None, :]" if n and not m and not b.flat else ""
    w.line(f"{name} = {f'tile.load({place}){row}' if m or n else place}")
    b.held[step.name] = KernelValue(name, m, n)


kernel_kind("steps", "elementwise", steps_source, schedule_steps, [STEPS])

__all__ = ["keep_pointwise_loops"]
