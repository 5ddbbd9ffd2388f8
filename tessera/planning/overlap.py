"""The time of a step whose collectives run beside arithmetic, on a stream of their own, as GPUs run
them (graph/cuda/passes/overlap.py): one begins behind what stands before it and behind the
collective before, and the first unit that reads what it brings waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tessera.graph.ir import Node, Value
from tessera.graph.schedule.groups import FusionGroup

from ..mesh.device_mesh import Mesh
from .fabric import Fabric
from .flops import bytes_of, global_shape


class Streams:
    """arithmetic, exchanges: when each stream has done what it was given, in microseconds
    sent: what the collectives take by themselves"""

    def __init__(self, fabric: Fabric, mesh: Mesh):
        self.fabric, self.mesh = fabric, mesh
        self.arithmetic = self.exchanges = self.sent = 0.0
        self._arrives: dict[Value, float] = {}
        self._message: list[Node] = []  # collectives that go together

    def run(self, units: Iterable[tuple[FusionGroup, float]]) -> float:
        """When all is done. units: of the graph of a rank, in order, with microseconds of each."""
        for unit, us in units:
            if (move := _move_of(unit)) is not None:
                if self._message and _kind(self._message[0]) != _kind(move):
                    self._send()
                self._message.append(move)
                continue
            if us > 0 or self._reads_message(unit):
                self._send()
            there = max((self._arrives.get(v, 0.0) for v in unit.inputs), default=0.0)
            if us > 0:
                there = self.arithmetic = max(self.arithmetic, there) + us
            self._arrives.update(dict.fromkeys(unit.outputs, there))
        self._send()
        return max(self.arithmetic, self.exchanges)

    def _reads_message(self, unit: FusionGroup) -> bool:
        return any(v in move.outputs for move in self._message for v in unit.inputs)

    def _send(self) -> None:
        """What stands next to each other and is of one kind is one message."""
        if not self._message:
            return
        (kind, axes), moves = _kind(self._message[0]), self._message
        size = sum(max(_bytes(m.inputs), _bytes(m.outputs)) for m in moves)
        us = self.fabric.time(kind, size, self.mesh, axes).us
        there = max((self._arrives.get(v, 0.0) for m in moves for v in m.inputs), default=0.0)
        self.exchanges = max(self.exchanges, self.arithmetic, there) + us
        self.sent += us
        self._arrives.update((v, self.exchanges) for m in moves for v in m.outputs)
        self._message = []


def exchanges_itself(unit: FusionGroup) -> bool:
    """Whether a unit sends as a part of what it does."""
    return unit.call is not None and "collective" in unit.call.op.effects and _move_of(unit) is None


def _move_of(unit: FusionGroup) -> Node | None:
    """The node of a change of layout that sends."""
    node = unit.call
    return node if node is not None and "collective" in node.op.effects and (
        _hop_of(node)) else None


def _kind(move: Node) -> tuple[str, tuple[str, ...]]:
    hop = _hop_of(move)
    return hop.kind, hop.axes


def _hop_of(node: Node) -> Any:
    """The first of those of several values, which are of one kind; None of another op."""
    return node.attrs.get("hops", (node.attrs.get("hop"),))[0]


def _bytes(values: Iterable[Value]) -> int:
    return sum(bytes_of(global_shape(v), v.aval.dtype) for v in values)


__all__ = ["Streams", "exchanges_itself"]
