"""Fusion groups: nodes of a graph that run together, as a loop, a kernel or a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ...dims import show_shape
from ...errors import SourceLine
from ...lazy_dataclass import dataclass
from ..ir import Node, Value

MAX_OPS = 96  # of a group: a larger loop compiles slowly and spills
MAX_READS = 8  # values of the whole space that a loop reads


@dataclass(eq=False)
class FusionGroup:
    """Nodes that run together, in graph order, and what they read and write in memory.

    kind: "loop", a loop over `space` that computes all of them, or another kind of the target's:
    "call" of one op (a library's or NumPy's), and those of the kernels for GPUs.
    anchor: the node whose kernel takes in the nodes behind it, such as a matmul.
    writes_all: all results of its node are written, whether something reads them or not.
    batch: the number that groups of one batch have in common (batches.py).
    """

    kind: str
    space: tuple[int, ...]
    nodes: list[Node]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    anchor: Node | None = None
    writes_all: bool = False
    batch: int | None = None

    @property
    def call(self) -> Node | None:
        """The node of a call; None of all others."""
        return self.nodes[0] if self.kind == "call" else None

    @property
    def where(self) -> SourceLine | None:
        return self.nodes[0].where

    def reads(self, v: Value) -> int:
        """How often its nodes read a value."""
        return sum(n.inputs.count(v) for n in self.nodes)

    def connect(self, count: dict[Value, int]) -> None:
        """Set what it reads from and writes to memory. count: readers of each value in the graph,
        its results among them."""
        inside = {v for n in self.nodes for v in n.outputs}
        read: dict[Value, int] = {}
        for n in self.nodes:
            for v in n.inputs:
                read[v] = read.get(v, 0) + 1
        self.inputs = [v for v in read if v not in inside]
        self.outputs = [v for n in self.nodes for v in n.outputs
                        if count.get(v, 0) > read.get(v, 0)]

    def __str__(self) -> str:
        ops = " ".join(n.op.name for n in self.nodes)
        return f"{self.kind} {show_shape(self.space)}: {ops}"


def call_group(node: Node) -> FusionGroup:
    """A call of one op. All its results are written, whether something reads them or not."""
    return FusionGroup("call", (), [node], list(node.inputs), list(node.outputs), writes_all=True)


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Nodes of a group so that each stands behind those it reads, else as they stood."""
    maker, done, out = {v: n for n in nodes for v in n.outputs}, set[Node](), list[Node]()
    work = list(reversed(nodes))
    while work:
        node = work.pop()
        if node in done:
            continue
        ahead = [m for v in node.inputs if (m := maker.get(v)) is not None and m not in done]
        if ahead:
            work += [node, *reversed(ahead)]
            continue
        done.add(node)
        out.append(node)
    return out


def batch_ends(groups: Sequence[FusionGroup]) -> list[int]:
    """For each group the number of the last one of its batch: its own where it has none."""
    ends = list(range(len(groups)))
    for i in reversed(range(len(groups) - 1)):
        if groups[i].batch is not None and groups[i].batch == groups[i + 1].batch:
            ends[i] = ends[i + 1]
    return ends


__all__ = ["MAX_OPS", "MAX_READS", "FusionGroup", "batch_ends", "call_group", "in_order"]
