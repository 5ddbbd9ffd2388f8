"""What is made of a reduced value alone is made when something needs it.

    dW = all_reduce(...); g = cast(dW)        # of each layer, in the order of the backward pass

A cast right behind its reduction would end the wait of that reduction for others, and on a GPU the
kernels behind it would wait for the ranks. So ops of one reduced value, such as casts of gradients
and constraints on them, stand where what they give is read. Then reductions can go together
(merge_waiting), and run beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.graph.ir import node_effects

from ..collectives.record import COLLECTIVES
from .partitioned_steps import CONSTRAINTS, Held, LayoutHop, PartitionedOp, Step, makes, reads


def defer_readers(steps: Sequence[Step]) -> list[Step]:
    """The steps in an order in which ops of a reduced value alone come late. Collectives keep
    theirs."""
    out: list[Step] = []
    late: dict[Held, PartitionedOp] = {}  # by what they make
    reduced: set[Held] = set()

    def emit(step: Step) -> None:
        """A step behind those of the late ones that it needs."""
        stack = [step]
        while stack:
            needed = next((late[held] for held in reads(stack[-1]) if held in late), None)
            if needed is None:
                out.append(stack.pop())
                continue
            for own in makes(needed):
                del late[own]
            stack.append(needed)

    for step in steps:
        if _follows(step, reduced, late):
            assert isinstance(step, PartitionedOp)
            late.update((held, step) for held in makes(step))
            continue
        emit(step)
        if isinstance(step, LayoutHop) and step.hop.kind in COLLECTIVES and \
                COLLECTIVES[step.hop.kind].reduces:
            reduced.add((step.value, step.hop.target))
    while late:
        step = next(iter(late.values()))
        for own in makes(step):
            del late[own]
        emit(step)
    return out


def _follows(step: Step, reduced: set[Held], late: dict[Held, PartitionedOp]) -> bool:
    """Whether a step is an op of one reduced value, or of what is made of one late, alone. What
    holds a value as it lies, a constraint like another tensor's, reads that one's layout only."""
    if not isinstance(step, PartitionedOp) or step.bodies or step.placed is not None or \
            node_effects(step.node):
        return False
    given = reads(step)
    own = set(given[:1] if step.node.op.name in CONSTRAINTS else given)
    return len(own) == 1 and any(x in reduced or x in late for x in own)


__all__ = ["defer_readers"]
