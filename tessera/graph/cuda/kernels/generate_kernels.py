"""Schedule IR to kernels: the text of each group, and the kernel of that text.

Values have the numbers of the ops that made them, so two layers of a model have kernels that differ
in names alone. One runs for all groups with one canonical form (schedule/ir.py), and that form's
text is what is compiled: a training step of 345 groups had 75 kernels to compile, and a model with
more layers, or the same program with a line more, finds them on the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ....numerics import NumericType
from ...schedule.ir import GroupOperand, ScheduledGroup, canonical_group
from ...schedule.layouts import argument_layout
from .computed_moves import computed_source
from .copy_kernels import move_source
from .elements import element_source, update_source
from .extrema import position_source
from .fold_keys import key_bits_source, key_source, keys_source
from .gathered_rows import dots_source
from .gathers import gather_source, segments_source
from .integer_order import digit_counts_source, digit_places_source
from .integer_sums import integer_sums_source
from .kernel_text import GroupKernel, KernelText, compiled
from .key_merges import merge_cuts_source, merge_keys_source
from .library_kernels import attention_source, gemm_source
from .line_segments import line_runs_source
from .loop_kernels import columns_source, loop_source, rows_source
from .pointwise_loops import steps_source
from .row_order import order_source
from .scan_statements import scan_source
from .scatters import last_source, writes_source
from .searches import search_source
from .small_matmuls import small_matmul_source
from .small_systems import small_source
from .sorted_segments import parts_source, runs_source
from .sorting import merge_source, sort_source
from .strips import strips_source
from .unordered_sums import atomic_sums_source

WRITERS: dict[str, Callable[[ScheduledGroup], KernelText]] = {
    "loop": loop_source, "rows": rows_source, "columns": columns_source, "gemm": gemm_source,
    "attention": attention_source, "move": move_source, "gather": gather_source,
    "segments": segments_source, "elements": element_source, "computed": computed_source,
    "update": update_source,
    "search": search_source, "sort": sort_source, "merge": merge_source,
    "order": order_source, "merge_cuts": merge_cuts_source,
    "merge_keys": merge_keys_source, "position": position_source, "scan": scan_source,
    "last": last_source, "key": key_source, "keys": keys_source, "key_bits": key_bits_source,
    "strips": strips_source, "parts": parts_source, "runs": runs_source,
    "row_dots": dots_source, "steps": steps_source, "small_system": small_source,
    "small_product": small_matmul_source,
    "atomic_sums": atomic_sums_source, "integer_sums": integer_sums_source,
    "line_runs": line_runs_source, "write_places": writes_source,
    "digit_counts": digit_counts_source, "digit_places": digit_places_source,
}
# By the text of the canonical group and the schedule; where no line is named, by the form, too.
_kernels: dict[tuple | str, tuple[GroupKernel, KernelText]] = {}
_lock = threading.Lock()


def source_of(group: ScheduledGroup) -> KernelText:
    """The text of a group's kernel, and how its arguments lie. It follows from the group alone."""
    source, operands = WRITERS[group.kind](group), (*group.reads, *group.writes)
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


__all__ = ["WRITERS", "kernel_of", "source_of"]
