"""What a target can do, as fusion and memory planning ask it: one record for each target.

The algorithms are in this folder and the same for all; graph/cpu/target.py and graph/cuda/target.py
give the records, and spell and launch what comes out.
"""

from __future__ import annotations

from collections.abc import Callable

from ...lazy_dataclass import dataclass
from ..ir import Node, Value
from ..op import ResultMemory
from .groups import MAX_READS, FusionGroup
from .layouts import StridedLayout
from .loop_axes import Frame

Space = tuple[int, ...]


def no_epilogue(anchor: Node, space: Space) -> Frame | None:
    """Of a target whose matmuls take in nothing."""
    return None


def rows_alone(group: FusionGroup, v: Value, layout: StridedLayout) -> str:
    """Of a target that takes no strides."""
    return "kernels take elements in row-major order"


def never(node: Node) -> bool:
    return False


def takes_nothing(group: FusionGroup) -> bool:
    return False


def beside_operands(group: FusionGroup, x: Value, y: Value) -> bool:
    """Of a target whose results lie in other memory than what they are made of."""
    return False


@dataclass(frozen=True, eq=False)
class ScheduleTarget:
    """Fusion asks:

    loop_space   the space in which a node may run in a loop; None when it cannot
    from_loop    the groups that a fused loop becomes
    from_node    the groups of a node that is in no loop: a call, a kernel, a view. Raises
                 UnsupportedTargetError where there is none. What the graph launches as a kernel of
                 its own is such a node
    epilogue     the axes along which a loop over a space can take an anchor's result from
                 registers; None when it cannot
    most_reads   how many values of the whole space a loop may read
    light        whether a node behind an anchor takes next to nothing: no matmul waits for it
    recomputed   whether a node is computed again by each reader that repeats its result along an
                 axis, instead of being written and read
    repeatable   whether a reader may do a node again where this saves bytes (boundaries.py)
    takes        whether a group can run with the nodes it has, some of which are new before its own

    Planning asks:

    memory       where the results of a group lie
    overwrites   whether a group can write a result where an operand lies that nobody reads
                 afterwards: its kernel reads each element of it before it writes there
    lasts        "" | what kind of group it is, whose operands and results stay as they are until
                 the next of its kind, or until results are read: it may run beside those behind it
    strides      whether a view has the strides that NumPy gives it, and is copied where its
                 operand's do not allow them: a target whose calls take all strides
    reads        of another target: why a group cannot read an operand that lies so; "" where it can
    writes       and why it cannot make a result where it lies so
    buffer       of results in memory of their own: "arena", in the block that is planned |
                 "dynamic", what a call returns | "host", page-locked memory there
    align_bytes  every value of the arena begins at a multiple of it
    """

    name: str
    loop_space: Callable[[Node], Space | None]
    from_loop: Callable[[FusionGroup], list[FusionGroup]]
    from_node: Callable[[Node], list[FusionGroup]]
    memory: Callable[[FusionGroup], ResultMemory]
    buffer: Callable[[FusionGroup], str]
    align_bytes: int
    strides: bool
    reads: Callable[[FusionGroup, Value, StridedLayout], str] = rows_alone
    writes: Callable[[FusionGroup, Value, StridedLayout], str] = rows_alone
    epilogue: Callable[[Node, Space], Frame | None] = no_epilogue
    most_reads: int = MAX_READS
    light: Callable[[Node], bool] = never
    recomputed: Callable[[Node], bool] = never
    repeatable: Callable[[Node], bool] = never
    takes: Callable[[FusionGroup], bool] = takes_nothing
    overwrites: Callable[[FusionGroup, Value, Value], bool] = beside_operands
    lasts: Callable[[FusionGroup], str] = lambda group: ""

    def overwritten(self, group: FusionGroup) -> list[tuple[Value, Value]]:
        """The operands that it can write over, each with a result."""
        return [(x, y) for y in group.outputs for x in group.inputs if self.overwrites(group, x, y)]


__all__ = ["ScheduleTarget", "Space", "takes_nothing"]
