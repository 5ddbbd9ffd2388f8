"""What fusion and memory planning know of the CPU: loops, and calls of NumPy and libraries."""

from __future__ import annotations

from ..ir import Node
from ..op import FRESH, ResultMemory
from ..schedule.groups import FusionGroup, call_group
from ..schedule.loop_ops import loop_space
from ..schedule.target import ScheduleTarget


def _memory(group: FusionGroup) -> ResultMemory:
    """A loop writes buffers of its own; of a call its op's record says it."""
    return FRESH if group.call is None else group.call.op.lies(group.call.attrs)


def _buffer(group: FusionGroup) -> str:
    return "arena" if group.call is None or group.call.op.out else "dynamic"


def _from_node(node: Node) -> list[FusionGroup]:
    return [call_group(node)]


CPU = ScheduleTarget(
    name="cpu", loop_space=loop_space, from_loop=lambda loop: [loop], from_node=_from_node,
    memory=_memory, buffer=_buffer, align_bytes=64, strides=True)

__all__ = ["CPU"]
