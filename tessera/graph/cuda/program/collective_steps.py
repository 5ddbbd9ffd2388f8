"""Steps that send between ranks: collectives inside of a program for a GPU.

They stand in the stream where the op stands in the program, on the memory of the plan. Where each
rank has a GPU of its own NCCL takes them from there, and nothing waits. Elsewhere the operands are
copied to the host, which does what the op means, and the results are copied back: the host waits
for the GPU there. Which it is the ranks find out together, at the first step; the record of the op
knows how (op.Exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from ....lazy_dataclass import dataclass
from ....numerics import stored_bytes
from ....runtime.copies import SideStream
from ....runtime.device import check, driver
from ...interpret import call_node
from ...ir import Node
from ...op import Exchange, by_engines
from ...schedule.groups import FusionGroup
from ...schedule.ir import GraphSchedule, GroupOperand, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ...trace import at_line
from ..kernels.spell import no_kernel
from ..passes.packed_values import elements_of, stored_array

WORDS = {"nccl": "NCCL, between the ranks' GPUs",
         "host": "the host, of copies: messages between the ranks",
         "": "NCCL where each rank has a GPU of its own, else the host, of copies"}


@dataclass(frozen=True, eq=False)
class CollectiveCallee:
    """What a step sends."""

    node: Node

    @property
    def record(self) -> Exchange:
        assert self.node.op.exchange is not None
        return self.node.op.exchange

    @property
    def route(self) -> str:
        """"nccl" or "host"; "" before the ranks have found out."""
        return self.record.route(**self.node.attrs)

    def __str__(self) -> str:
        engines = by_engines(self.node.attrs) and self.route != "host"
        return WORDS[self.route] + ", by copy engines" * engines


def collective_group(node: Node) -> FusionGroup:
    """The group of such a node. Raises UnsupportedTargetError for one that sends on hosts alone."""
    if node.op.exchange is None:
        raise no_kernel(node, "it sends between ranks, and has no form for GPUs")
    space = extents_of(node.outputs[0]) if node.outputs else ()
    return FusionGroup("exchange", space, [node], list(node.inputs), list(node.outputs),
                       writes_all=True)


@dataclass(frozen=True, eq=False)
class CollectiveStep:
    """The step of a group of kind "exchange"."""

    group: ScheduledGroup

    @property
    def callee(self) -> CollectiveCallee:
        return self.group.attr("calls")

    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """On host memory. read: the memory of a buffer."""
        node = self.callee.node
        made = call_node(node, tuple(
            elements_of(_run_of(read, o), o.type, o.shape) for o in self.group.reads))
        for o, y in zip(self.group.writes, made, strict=True):
            into = _run_of(read, o)
            into[...] = stored_array(y, o.type).reshape(into.shape)

    def launch(self, pointer: Callable[[str], int], index: int, stream: int) -> None:
        """On a GPU, on the memory that the plan gave."""
        self._ahead(pointer, index, stream)
        self._launch(pointer, index, stream)

    def _places(self, pointer: Callable[[str], int]) -> list[list[tuple[int, int]]]:
        """Address and bytes of what it reads, and of what it writes."""
        return [[(pointer(o.name) + o.offset * o.type.dtype.numpy.itemsize, _bytes(o))
                 for o in operands] for operands in (self.group.reads, self.group.writes)]

    def _ahead(self, pointer: Callable[[str], int], index: int, stream: int) -> None:
        if self.callee.record.ahead is not None:
            self.callee.record.ahead(*self._places(pointer), index, stream,
                                     **self.callee.node.attrs)

    def _launch(self, pointer: Callable[[str], int], index: int, stream: int) -> None:
        node, record = self.callee.node, self.callee.record
        sources, targets = self._places(pointer)
        with at_line(node.where):
            if record.launch(sources, targets, index, stream, **node.attrs):
                return
        self._through_host([p for p, _ in sources], [p for p, _ in targets], stream)

    def beside(self, pointer: Callable[[str], int], index: int, side: SideStream, number: int
               ) -> None:
        """The same on a stream beside that of the kernels; see overlap.py."""
        self._ahead(pointer, index, side.beside)
        side.begin()
        self._launch(pointer, index, side.stream)
        side.end(number)

    def replayed(self, index: int, stream: int) -> Callable[[], None]:
        """What is called each time a CUDA graph that has it was launched."""
        node = self.callee.node
        return self.callee.record.replayed(index, stream, node.where, **node.attrs)

    def _through_host(self, sources: Sequence[int], targets: Sequence[int], stream: int) -> None:
        library, given = driver(), [_empty(o) for o in self.group.reads]
        for array, source in zip(given, sources, strict=True):
            if array.size:
                check(library.cuMemcpyDtoHAsync(array.ctypes.data, source, array.nbytes, stream),
                      "copy from the GPU")
        check(library.cuStreamSynchronize(stream), "copy from the GPU")
        made = call_node(self.callee.node, tuple(
            elements_of(a, o.type, o.shape)
            for a, o in zip(given, self.group.reads, strict=True)))
        held = [np.ascontiguousarray(stored_array(y, o.type))
                for y, o in zip(made, self.group.writes, strict=True)]
        for array, target in zip(held, targets, strict=True):
            if array.size:
                check(library.cuMemcpyHtoDAsync(target, array.ctypes.data, array.nbytes, stream),
                      "copy to the GPU")
        check(library.cuStreamSynchronize(stream), "copy to the GPU")  # `held` ends here


def sent_places(steps: Iterable[Any], plan: GraphSchedule) -> tuple[str, list[Node], set[Node]]:
    """Where in a program's temporaries all that lies which steps send or get, as a text, "" where
    nothing does; the ops that do; and those of which all lies there."""
    lines, nodes, whole, inside = list[str](), list[Node](), set[Node](), False
    for step in steps:
        if not isinstance(step, CollectiveStep):
            continue
        node = step.callee.node
        nodes.append(node)
        whole.add(node)
        reads = () if by_engines(node.attrs) else step.group.reads  # copied to where it writes
        for o in (*reads, *step.group.writes):
            at = plan.region(o.name)
            own = at.begin + o.offset * o.type.dtype.numpy.itemsize
            here = at.block == "temporaries"
            lines.append(f"{node.op.name} {node.attrs.get('blocks', 0)} {o.type} {o.shape} "
                         f"{own if here else 'elsewhere'}")
            inside |= here
            if not here:
                whole.discard(node)
    return "\n".join(lines) if inside else "", nodes, whole


def _bytes(o: GroupOperand) -> int:
    return stored_bytes(o.shape, o.type.dtype)


def _empty(o: GroupOperand) -> np.ndarray:
    if o.type.dtype.packed:
        return np.empty(_bytes(o), np.uint8)
    return np.empty(o.shape, o.type.dtype.numpy)


def _run_of(read: Callable[[str], np.ndarray], o: GroupOperand) -> np.ndarray:
    """The memory of an operand in its buffer."""
    if o.type.dtype.packed:
        return read(o.name)
    return read(o.name).reshape(-1)[o.offset:o.offset + prod(o.shape)].reshape(o.shape)


__all__ = ["CollectiveCallee", "CollectiveStep", "collective_group", "sent_places"]
