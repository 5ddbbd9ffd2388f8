"""Fusion and memory planning follow a target's record, for targets that nobody has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.errors import GraphError
from tessera.graph.cpu.target import CPU
from tessera.graph.ir import Graph, Node
from tessera.graph.op import FLAT_VIEW, FRESH, OPS
from tessera.graph.schedule.build_schedule import ScheduleBuilder
from tessera.graph.schedule.check_memory_plan import verify_plan
from tessera.graph.schedule.describe import describe
from tessera.graph.schedule.fuse import fuse
from tessera.graph.schedule.groups import FusionGroup, call_group
from tessera.graph.schedule.library_call import library_call
from tessera.graph.schedule.loop_axes import Frame
from tessera.graph.schedule.memory_plan import plan_memory
from tessera.graph.schedule.op_ids import number
from tessera.graph.simplify import simplify
from tessera.tile.ir.schedule import Schedule


def graph_of(fn: Any, *shapes: tuple[int, ...]) -> Graph:
    return simplify(number(ts.jit(fn).graph(*(ts.ones(s) for s in shapes))))


def kinds(groups: list[FusionGroup]) -> list[str]:
    return [f"{g.kind} {' '.join(n.op.name for n in g.nodes)}" for g in groups]


def chain(x: Any, w: Any) -> Any:
    return ts.exp(ts.tanh(x @ w) * x) @ w


def test_loops_hold_what_the_record_says() -> None:
    graph = graph_of(chain, (8, 8), (8, 8))
    assert kinds(fuse(graph, CPU)) == ["call matmul", "loop tanh mul exp", "call matmul"]
    plain = replace(CPU, loop_space=lambda n: CPU.loop_space(n) if n.op.name != "tanh" else None)
    assert kinds(fuse(graph, plain)) == ["call matmul", "call tanh", "loop mul exp", "call matmul"]


def with_epilogues() -> Any:
    """Matmuls take in loops over their result, and casts are made where they are read."""
    def from_node(node: Node) -> list[FusionGroup]:
        if node.op.name != "matmul":
            return [call_group(node)]
        return [FusionGroup("gemm", tuple(node.outputs[0].aval.shape), [node], anchor=node)]

    def epilogue(anchor: Node, space: tuple[int, ...]) -> Frame | None:
        same = tuple(anchor.outputs[0].aval.shape) == space
        return Frame(space, ((0,), (1,))) if same else None

    return replace(CPU, from_node=from_node, epilogue=epilogue,
                   recomputed=lambda node: node.op.name == "cast")


def test_anchors_take_in_the_loops_that_the_record_says() -> None:
    graph = graph_of(chain, (8, 8), (8, 8))
    assert kinds(fuse(graph, with_epilogues())) == ["gemm matmul tanh mul exp", "gemm matmul"]
    x, b = ts.ones((8, 8)), ts.ones(8, "bf16")
    graph = simplify(ts.jit(lambda x, b: ts.tanh(x @ x + ts.cast(b, "f32"))).graph(x, b))
    apart = replace(with_epilogues(), recomputed=CPU.recomputed)
    assert kinds(fuse(graph, apart)) == ["loop cast", "gemm matmul add tanh"]
    assert kinds(fuse(graph, with_epilogues())) == ["gemm matmul cast add tanh"]


def test_anchors_take_in_loops_that_move_few_bytes_beside_their_result() -> None:
    """An optimizer's step reads and writes six times what a gradient has; a residual's sum once."""
    def step(x: Any, w: Any, p: Any, m: Any, v: Any) -> Any:
        g = x @ w
        m, v = m + 0.1 * (g - m), v + 0.1 * (g * g - v)
        return p - m / ts.sqrt(v), m, v

    def add(x: Any, w: Any, p: Any, m: Any, v: Any) -> Any:
        return x @ w + p

    side = 1024
    shapes = ((side, 8), (8, side), *[(side, side)] * 3)
    assert kinds(fuse(graph_of(add, *shapes), with_epilogues())) == ["gemm matmul add"]
    small = ((8, 8),) * 5  # there a launch more costs more than the bytes
    for extents, want in ((shapes, ["gemm", "loop"]), (small, ["gemm"])):
        groups = fuse(graph_of(step, *extents), with_epilogues())
        assert [g.kind for g in groups if g.kind != "call"] == want


def test_an_anchor_with_its_loop_does_not_wait_for_others() -> None:
    """tanh stands at the end of the program: its matmul runs where it stands nevertheless, so that
    what it reads is no longer needed."""
    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        z = ts.softmax(w @ x) @ x
        return z, ts.tanh(y), ts.exp(x @ x) * z

    groups = kinds(fuse(graph_of(fn, (8, 8), (8, 8)), with_epilogues()))
    assert groups[0] == "gemm matmul tanh"
    assert groups[-1] == "gemm matmul exp mul"  # which needs z


@pytest.mark.parametrize("align", [16, 64, 4096])
def test_the_arena_is_aligned_as_the_record_says(align: int) -> None:
    graph = graph_of(lambda x, w: ts.tanh(ts.tanh(ts.tanh(x @ w) @ w) @ w) @ w, (5, 5), (5, 5))
    target = replace(CPU, align_bytes=align)
    groups = fuse(graph, target)
    plan = plan_memory(graph, groups, {}, target)
    offsets = [p.offset for p in plan.places.values() if p.kind == "arena"]
    assert len(set(offsets)) == 2 and all(at % align == 0 for at in offsets)
    assert plan.arena_bytes == 2 * max(align, -(-100 // align) * align)


# --- a node that is a kernel launch ---------------------------------------------------------------
LAUNCH = library_call("launch")


def launched(graph: Graph) -> Graph:
    """The graph with a launch in the place of each matmul."""
    nodes = tuple(replace(n, op=LAUNCH) if n.op.name == "matmul" else n for n in graph.nodes)
    return Graph(graph.name, graph.inputs, graph.captures, nodes, graph.outputs)


def _from_node(node: Node) -> list[FusionGroup]:
    if node.op is LAUNCH:
        return [FusionGroup("launch", tuple(node.outputs[0].aval.shape), [node])]
    return [FusionGroup("view", tuple(node.outputs[0].aval.shape), [node])]


LAUNCHER = replace(
    CPU, name="launcher", from_node=_from_node, strides=False, buffer=lambda group: "arena",
    memory=lambda group: FLAT_VIEW if group.kind == "view" else FRESH)


class _Launches(ScheduleBuilder):
    def write(self, group: FusionGroup) -> None:
        if group.kind != "view":
            self.add(group.kind, group.space, [self.operand(v) for v in self.reads(group)],
                     [self.operand(v) for v in group.outputs], [self.step(n) for n in group.nodes],
                     Schedule(), (1,))


def test_a_launch_is_a_group_like_any_other() -> None:
    """It is fused around, its memory is planned and proved, and the Schedule IR shows it."""
    numbered = number(ts.jit(lambda x, w: ts.exp(ts.tanh(x @ w).reshape(4, 16)).reshape(8, 8) @ w
                             ).graph(ts.ones((8, 8)), ts.ones((8, 8))))
    graph = launched(simplify(numbered))
    groups = fuse(graph, LAUNCHER)
    assert kinds(groups) == ["launch launch", "loop tanh", "view reshape", "loop exp",
                             "view reshape", "launch launch"]
    plan = plan_memory(graph, groups, {}, LAUNCHER)
    assert plan.arena_bytes == 2 * 256 and plan.unshared_bytes == 3 * 256
    text = describe(groups, plan).splitlines()
    assert text[1].startswith("  launch [8, 8]: launch") and "arena 512 bytes" in text[-1]
    made = _Launches(graph, groups, plan).build("launcher", numbered)
    assert [g.kind for g in made.groups] == ["launch", "loop", "loop", "launch"]
    lies = {b.name: b.lies for b in made.buffers}
    assert list(lies.values()) == ["input", "input", "temporary at 0", "temporary at 256",
                                   "view of v3", "temporary at 0", "view of v5", "result"]
    wrong = next(v for v, p in plan.places.items() if p.kind == "arena")
    plan.places[wrong].offset = 256
    with pytest.raises(GraphError, match="is given bytes 256"):
        verify_plan(graph, groups, plan)


def test_a_library_call_has_no_meaning_of_its_own() -> None:
    assert "launch" not in OPS and LAUNCH.lies({}) is FRESH
    with pytest.raises(AssertionError, match="lowered graph"):
        LAUNCH.ref(np.ones(3))
