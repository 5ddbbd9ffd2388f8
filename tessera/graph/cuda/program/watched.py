"""Graph functions on a GPU with sentinels on: what their kernels counted, and whose it is.

Every kernel counts the bad elements that it stores, and those that it could hide inside
(tile/cuda/emit/sentinels.py). When a call has ended the words are read, in the mode "flag" without
waiting for it. Where a value was bad that could be hidden or leaves (`checked_values`), the call is
run again on the host from its arguments, op by op, which says what the CPU's sentinels would have:
the op that made it, its line and operands, or nothing where it is meant. What the host does not see
at all was made on the GPU alone, and is told as its kernel counted it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .... import config, hooks
from ....errors import SourceLine
from ....numerics import find_dtype
from ....numerics.random_state import get_state, next_step, set_state
from ....runtime import late_checks
from ....runtime.arrays import HOST
from ....runtime.host_memory import memory_id
from ....runtime.sentinel_words import BadElements, LaterWords, sentinel_words
from ....tensor import Tensor
from ....tile.passes.written_infinities import writes_infinity
from ...ir import Graph
from ...run_with_sentinels import blame, checked_values
from ...schedule.op_ids import value_ids
from ..kernels.kernel_text import hidden_lines
from .node_kernels import NodeLaunch

if TYPE_CHECKING:
    from .run import CudaProgram, GroupLaunch
    from .workspace import Workspace


def run_watched(graph: Graph, space: Workspace, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call whose kernels count. Waits for it and raises NumericsError in that
    mode; else it is looked at when it has ended."""
    if config.numerics == "raise":
        call = WatchedCall(graph, space, leaves)
        results = space.run(leaves)
        call.judge(_counted(space))
        return results
    late_checks.settle()
    late_checks.settle(wait=True, most=late_checks.MOST - 1)
    call = LateCall(graph, space, [_snapshot(x) for x in leaves])
    results = space.run(leaves)
    call.begin()
    late_checks.add(call)
    return results


def _snapshot(x: Tensor) -> Tensor:
    """An argument as it is now. What lies on a GPU is not written before it is looked at."""
    return Tensor(x.array.copy(), x.type) if x.place == HOST else x


Counted = list[tuple["Workspace", list[BadElements]]]  # of a program and of those of its loops


def _counted(space: Workspace) -> Counted:
    words = sentinel_words(space.device.index)
    return [(s, words.collect(s.owner)) for s in _spaces(space)]


def _spaces(space: Workspace) -> Iterator[Workspace]:
    yield space
    for inner in space.inner.values():
        yield from _spaces(inner)


class WatchedCall:
    """A call of a program, and what has to be known to run it again on the host."""

    def __init__(self, graph: Graph, space: Workspace, leaves: Sequence[Tensor]):
        self.graph, self.space, self.leaves = graph, space, leaves
        self.random = get_state()

    def judge(self, counted: Counted) -> None:
        """Tells whose the bad values are. Which iteration of a loop made one, and whether it is
        meant, the run on the host says alone."""
        (space, found), *inner = counted
        bad = _bad(space, found)
        inside = [f for s, of_loop in inner for f in _bad(s, of_loop)]
        if not found and not inside:
            return
        now = get_state()
        try:
            _rewind(self.random, space.program)
            told = self._not_seen(bad) if bad or inside else [f for f in found if f.overflow]
            _tell([with_launch_names(space.program, f) for f in told if f.what == "store"])
        finally:
            set_state(now)

    def _not_seen(self, bad: list[BadElements]) -> list[BadElements]:
        """Runs it on the host, where the sentinels are shown every op. What was bad on the GPU
        alone. What sends between ranks is not run again, since this rank alone may have seen
        something: then it is told as the kernels counted it, the first of them that made it."""
        if "collective" in self.graph.effects:
            return bad[:1]
        own = self.leaves[:len(self.graph.inputs)]  # without copies of them in other types
        seen = blame(self.graph, [x.array for x in own])
        ids, launches = value_ids(self.graph), self.space.program.launches
        known = {ids[v] for v in seen}
        return [f for f in bad if known.isdisjoint(launches[f.launch.part].group.ops)]


class LateCall(WatchedCall):
    """One that nobody waits for: its words are copied behind it."""

    def __init__(self, graph: Graph, space: Workspace, leaves: Sequence[Tensor]):
        super().__init__(graph, space, leaves)
        self._again = [s.later(graph) for s in hooks.sentinels]
        self._words: list[tuple[Workspace, LaterWords]] = []
        captured = space.program.lowered.captures.values()
        self.host_memory = frozenset(memory_id(x.array) for x in captured if x.place == HOST)

    def begin(self) -> None:
        """The program has been launched."""
        words = sentinel_words(self.space.device.index)
        self._words = [(s, words.later(s.owner)) for s in _spaces(self.space)]

    @property
    def done(self) -> bool:
        return all(words.done for _, words in self._words)

    def look(self) -> None:
        counted = [(s, words.read()) for s, words in self._words]
        if any(found for _, found in counted):
            with ExitStack() as stack:
                for again in self._again:
                    stack.enter_context(again())
                self.judge(counted)


def _bad(space: Workspace, found: Sequence[BadElements]) -> list[BadElements]:
    """What of it counts."""
    program, checked = space.program, checked_buffers(space.program) if found else {}
    came = {f.launch.part for f in found if f.what == "load" and f.inf}
    return [f for f in found if _counts(program, checked, f, f.launch.part in came)]


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


def count_results(program: CudaProgram) -> None:
    """Let the kernels of a program count what is bad in buffers where that matters; the others
    have no code for it. The user's own count everywhere."""
    checked = checked_buffers(program)
    for launch in program.launches:
        if isinstance(launch, NodeLaunch):
            made = zip(launch.shared.results, launch.group.writes, strict=True)
            launch.count(frozenset(n for n, o in made if program.base(o.name) in checked))
            continue
        names = [p.value.name for p in launch.shared.function().params if p.role != "dim"]
        launch.shared.count(frozenset(
            n for n, (buffer, _) in zip(names, launch.arguments, strict=True)
            if program.base(buffer) in checked))


def _counts(program: CudaProgram, checked: dict[str, str], found: BadElements, came: bool) -> bool:
    """came: whether the launch has loaded an infinity."""
    launch = program.launches[found.launch.part]
    if found.what == "load" or not found.bad:
        return False
    if isinstance(launch, NodeLaunch) and launch.of_user:  # what reads it is no matter
        return bool(found.bad - found.inf) or not (came or writes_infinity(launch.function()))
    if found.what == "held":
        assert found.site.where is not None
        kind = hidden_lines(launch.source, launch.group).get(found.site.where.line)
    elif (to := find_dtype(found.site.formats[1])).packed or to.kind != "float":
        kind = "any"  # they have no place for it: it is hidden
    else:
        kind = checked.get(program.base(_buffer(launch, found)))
    return kind == "any" or (kind == "nan" and (found.nan > 0 or found.site.formats[2] == "nan"))


def _buffer(launch: GroupLaunch | NodeLaunch, found: BadElements) -> str:
    """The buffer that a tensor of a kernel, which others may share, stands for."""
    if isinstance(launch, NodeLaunch):
        return launch.buffers()[found.site.message]
    names = [p.value.name for p in found.launch.function.params if p.role != "dim"]
    return launch.arguments[names.index(found.site.message)][0]


def with_launch_names(program: CudaProgram, found: BadElements) -> BadElements:
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


__all__ = ["checked_buffers", "count_results", "with_launch_names", "run_watched"]
