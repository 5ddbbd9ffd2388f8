"""Schedule IR to kernels: the text of each group, and the kernel of that text.

Values have the numbers of the ops that made them, so two layers of a model have kernels that differ
in names alone. One runs for all groups with one canonical form (schedule/ir.py), and that form's
text is what is compiled: a training step of 345 groups had 75 kernels to compile, and a model with
more layers, or the same program with a line more, finds them on the disk.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ....numerics import NumericType
from ...schedule.ir import GroupOperand, ScheduledGroup, canonical_group
from ...schedule.layouts import argument_layout
from .kernel_kinds import kernel_kinds
from .kernel_text import GroupKernel, KernelText, compiled

# By the text of the canonical group and the schedule; where no line is named, by the form, too.
_kernels: dict[tuple | str, tuple[GroupKernel, KernelText]] = {}
_lock = threading.Lock()


def source_of(group: ScheduledGroup) -> KernelText:
    """The text of a group's kernel, and how its arguments lie. It follows from the group alone."""
    source, operands = kernel_kinds()[group.kind].source(group), (*group.reads, *group.writes)
    if not any(o.layout for o in operands):
        return source
    layouts = []
    for name, o, shape in zip(source.parameters, operands, source.shapes, strict=True):
        if o.layout is not None:
            lies = argument_layout(o.layout, shape)
            assert lies is not None, f"{o} of {group.name} cannot be passed as {shape}"
            layouts.append((name, lies))
    return replace(source, layouts=tuple(layouts))


def kernel_of(group: ScheduledGroup) -> tuple[GroupKernel, KernelText]:
    """The kernel that runs for a group, and its text: that of all groups that differ in names
    alone; of those of one line, where it checks something while it runs, since it names the line.
    """
    form = form_of(group)
    if form in _kernels:
        return _kernels[form]
    canonical = canonical_group(group)
    source = source_of(canonical)
    if source.checks:
        canonical = canonical_group(group, lines=True)
        source = source_of(canonical)
    key = (source.text, source.layouts, _types(source), group.schedule.text())
    with _lock:
        if key not in _kernels:
            _kernels[key] = compiled(source, canonical), source
        made = _kernels[key][0], source
        if not source.checks:
            _kernels[form] = made
    return made


def form_of(group: ScheduledGroup) -> str:
    """All of a canonical group, without making it, but lines: most groups of a model are those of
    another layer. Of numbers the text is compared: 1 is True, and 0.0 is -0.0."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def operands(found: tuple[GroupOperand, ...]) -> list[tuple]:
        return [(number(o.name), o.shape, o.type, o.layout) for o in found]

    reads = operands(group.reads)
    steps = [([f"v{number(a)}" if isinstance(a, str) else a for a in s.args], number(s.name), s.op,
              s.attrs, s.shape, s.type, s.picks) for s in group.steps]
    return repr((group.kind, group.space, group.grid, group.attrs, reads, steps,
                 operands(group.writes), group.schedule.text()))


def _types(source: KernelText) -> tuple:
    """What the names of types in a text stand for."""
    return tuple(sorted((n, str(t)) for n, t in source.scope.items()
                        if isinstance(t, NumericType)))


__all__ = ["kernel_of", "source_of"]
