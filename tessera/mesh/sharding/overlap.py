"""Hints that collectives are to run beside arithmetic.

    with ts.overlap("dp"):
        loss, grads = ts.value_and_grad(loss_fn)(params, x, y)

A hint is noted on the lines within, and so follows every value into derivatives and through all
passes. In the program of a mesh a hinted reduction begins as soon as its operand is there, and a
hinted gather one use early, so that a runtime with a second stream has something to run meanwhile.
On CPUs collectives still run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from tessera import hooks
from tessera.errors import ArgumentError, SourceLine, did_you_mean
from tessera.graph.operand import public
from tessera.graph.trace import current_hints, hinted

from ..device_mesh import current_mesh
from .layout_change_ops import ALL_REDUCE, MOVES
from .layout_changes import Hop

KINDS = (ALL_REDUCE.name.removeprefix("mesh_"), *MOVES)
hooks.surroundings.append(current_hints)


@public
def overlap(comm: str | Sequence[str] = ()) -> AbstractContextManager[None]:
    """A block whose collectives begin as early as their operands allow.

    comm: which of them: a mesh axis "dp", a kind "reduce_scatter", both in one "tp_reduce_scatter",
    or several of these; none: all. Values do not change, and gradients keep the hint of what they
    are gradients of. `f.plan` says of a hinted collective how many ops of the program it may run
    beside; `f.inspect_ir("graph")` shows the hint on every line. Hinted reductions are not merged
    with each other.
    Raises ArgumentError for an axis that the open mesh does not have.
    """
    names = (comm,) if isinstance(comm, str) else tuple(comm)
    mesh = current_mesh()
    for name in names:
        axis, kind = _parsed(name)
        if mesh is not None and axis and axis not in mesh.axes:
            raise ArgumentError(f"overlap({name!r}): {mesh} has no axis {axis!r}",
                                hint=did_you_mean(axis, (*mesh.axes, *KINDS)))
    return hinted(*(f"overlap {name}" for name in names or ("all",)))


def _parsed(name: str) -> tuple[str, str]:
    """(axis, kind), each "" when it is not named."""
    for kind in KINDS:
        if name == kind or name.endswith(f"_{kind}"):
            return name.removesuffix(kind).rstrip("_"), kind
    return name, ""


def asked(where: SourceLine | None, hop: Hop) -> bool:
    """Whether a hint on this line means this move."""
    for hint in where.hints if where is not None else ():
        verb, _, name = hint.partition(" ")
        axis, kind = ("", "") if name == "all" else _parsed(name)
        if verb == "overlap" and kind in ("", hop.kind) and (not axis or axis in hop.axes):
            return hop.kind in KINDS
    return False


__all__ = ["overlap"]
