"""Graph functions on a GPU with sentinels on: what their kernels counted, and whose it is.

Every kernel counts the bad elements that it stores, and those that it could hide inside
(tile/cuda/emit/sentinels.py). After a call the words are read; where a value was bad that could be
hidden or leaves (`checked_values`), the call is run again on the host from its arguments, op by op,
which says what the CPU's sentinels would have: the op that made it, its line and operands, or
nothing where it is meant. What the host does not see at all was made on the GPU alone, and is told
as its kernel counted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ... import hooks
from ...errors import SourceLine
from ...numerics.random_state import get_state, next_step, set_state
from ...runtime.sentinel_words import BadElements, sentinel_words
from ...tensor import Tensor
from ...tile.passes.written_infinities import writes_infinity
from ..ir import Graph
from ..run_with_sentinels import blame, checked_values
from ..schedule.op_ids import value_ids
from .kernel_text import hidden_lines
from .node_kernels import NodeLaunch

if TYPE_CHECKING:
    from .device import Workspace
    from .run import CudaProgram, GroupLaunch


def run_watched(graph: Graph, space: Workspace, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call whose kernels count. Raises NumericsError in that mode."""
    before = get_state()
    results = space.run(leaves)
    program, (found, bad), inside = space.program, _found(space), _found_inside(space)
    if not found and not inside:
        return results
    if not bad and not inside:
        _tell([placed(program, f) for f in found if f.overflow and f.what == "store"])
        return results
    after = get_state()
    try:
        _rewind(before, program)
        seen = blame(graph, [x.array for x in leaves])
    finally:
        set_state(after)
    ids = value_ids(graph)
    known = {ids[v] for v in seen}
    _tell([placed(program, f) for f in bad
           if f.what == "store"
           and known.isdisjoint(program.launches[f.launch.part].group.ops)])
    return results


def _found(space: Workspace) -> tuple[list[BadElements], list[BadElements]]:
    """What was counted, and what of it is bad."""
    found = sentinel_words(space.device.index).collect(space.owner)
    program, checked = space.program, checked_buffers(space.program) if found else {}
    came = {f.launch.part for f in found if f.what == "load" and f.inf}
    return found, [f for f in found if _counts(program, checked, f, f.launch.part in came)]


def _found_inside(space: Workspace) -> bool:
    """Whether an iteration of a loop made something bad. Which of them did, and whether it is
    meant, the run on the host says alone."""
    found = [bool(_found(s)[1]) | _found_inside(s) for s in space.inner]
    return any(found)


def _rewind(state: object, program: CudaProgram) -> None:
    """The random numbers of the call that has run."""
    set_state(state)  # type: ignore[arg-type]
    if program.lowered.draws.random:
        next_step()


def _tell(found: list[BadElements]) -> None:
    for observe in hooks.bad_elements:
        observe(found, None)


# --- what the words of a launch belong to -------------------------------------------------------
def checked_buffers(program: CudaProgram) -> dict[str, str]:
    """Buffers in which something bad counts: "any", or "nan" where infinities are no harm."""
    names, out = program.lowered.names, dict[str, str]()
    stored = {b.name for b in program.plan.buffers}
    for v, kind in checked_values(program.lowered.graph).items():
        if names.get(v) in stored:
            at = program.base(names[v])
            out[at] = "any" if "any" in (kind, out.get(at)) else "nan"
    return out


def _counts(program: CudaProgram, checked: dict[str, str], found: BadElements, came: bool) -> bool:
    """came: whether the launch has loaded an infinity."""
    launch = program.launches[found.launch.part]
    if found.what == "load" or not found.bad:
        return False
    if isinstance(launch, NodeLaunch):  # as of a launch of the user's: what reads it is no matter
        return bool(found.bad - found.inf) or not (came or writes_infinity(launch.function()))
    if found.what == "held":
        assert found.site.where is not None and not isinstance(launch, NodeLaunch)
        kind = hidden_lines(launch.source, launch.group).get(found.site.where.line)
    else:
        kind = checked.get(program.base(_buffer(launch, found)))
    return kind == "any" or (kind == "nan" and (found.nan > 0 or found.site.formats[2] == "nan"))


def _buffer(launch: GroupLaunch | NodeLaunch, found: BadElements) -> str:
    """The buffer that a tensor of a kernel, which others may share, stands for."""
    if isinstance(launch, NodeLaunch):
        return launch.buffers()[found.site.message]
    names = [p.value.name for p in found.launch.function.params if p.role != "dim"]
    return launch.arguments[names.index(found.site.message)][0]


def placed(program: CudaProgram, found: BadElements) -> BadElements:
    """With the names of this launch's ops, and the user's line."""
    launch = program.launches[found.launch.part]
    ops = " ".join(dict.fromkeys(s.op for s in launch.group.steps))
    named = replace(found.launch, name=f"{launch.group.name} ({ops})",
                    where=launch.group.where or found.launch.where)
    if isinstance(launch, NodeLaunch):
        return replace(found, launch=named)
    line = found.site.where.line if found.site.where is not None else 0
    origin = launch.source.origins.get(line)
    where: SourceLine | None = origin.where if origin is not None else launch.group.where
    shapes = dict(found.launch.shapes)
    buffer = _buffer(launch, found)
    b = program.plan.buffer(buffer)
    number = None if found.index is None else int(np.ravel_multi_index(
        found.index, found.shape)) if found.shape else 0
    index = None if number is None else tuple(int(i) for i in np.unravel_index(number, b.shape))
    shapes[buffer] = b.shape
    site = replace(found.site, where=where, message=buffer)
    return replace(found, launch=replace(named, shapes=shapes), site=site, index=index)


__all__ = ["checked_buffers", "placed", "run_watched"]
