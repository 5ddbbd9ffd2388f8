"""When hinted collectives begin: the order of a program's steps after `ts.overlap`."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives.record import COLLECTIVES
from .overlap import asked
from .partitioned_steps import Held, LayoutHop, Step, makes


def issue_early(steps: Sequence[Step]) -> list[Step]:
    """Hinted reductions right behind what makes their operand; hinted gathers right behind the one
    before over the same axes, so that one more value is whole at a time."""
    out: list[Step] = []
    for step in steps:
        if not isinstance(step, LayoutHop) or not asked(step.where, step.hop):
            out.append(step)
            continue
        at = _after_source(out, (step.value, step.hop.source))
        if step.hop.kind == "all_gather":
            at = max(at, _after_gather(out, step.hop.axes))
        elif not COLLECTIVES[step.hop.kind].reduces:
            at = len(out)
        out.insert(at, step)
    return out


def _after_source(out: Sequence[Step], source: Held) -> int:
    """The place behind the step that makes a value, and other collectives that begin there."""
    at = next((i + 1 for i in reversed(range(len(out))) if source in makes(out[i])), 0)
    while at < len(out) and isinstance(out[at], LayoutHop) and source not in makes(out[at]):
        at += 1
    return at


def _after_gather(out: Sequence[Step], axes: tuple[str, ...]) -> int:
    """The place behind the last hinted gather over these axes; the end where there is none."""
    return next((i + 1 for i in reversed(range(len(out))) if _is_gather(out[i], axes)), len(out))


def _is_gather(step: Step, axes: tuple[str, ...]) -> bool:
    return isinstance(step, LayoutHop) and step.hop.kind == "all_gather" and step.hop.axes == axes \
        and asked(step.where, step.hop)

