"""All levels of a kernel and its figures: what `python -m tessera inspect` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, SourceLine, TesseraError, short_path
from ..lazy_dataclass import dataclass
from ..runtime.target import DEFAULT_TARGET, parse_target
from ..tile.interpreter.arguments import Bound
from ..tile.ir.ir import Function
from ..tile.kernel.kernel import Kernel
from ..tile.tuning.gpus import gpu as find_gpu
from .checked import Counting, checked_run
from .kernel_lowering import TITLES, LevelText, kernel_sections
from .kernels import bank_report, sector_report
from .resources import compiled_pressure
from .rooflines import roofline_of
from .samples import missing_extents, sample_arguments, tensors_without_type

SAMPLED_GROUPS = 4  # whose accesses are counted: a kernel's pattern shows in the first


@dataclass(frozen=True)
class Figure:
    """One of the figures: a heading and a report, or why there is none."""

    title: str
    text: str


@dataclass(frozen=True)
class Inspection:
    """A kernel's figures and levels. where: of its definition; how: target and extents."""

    name: str
    where: SourceLine
    how: str
    figures: tuple[Figure, ...]
    sections: dict[str, LevelText]

    def __str__(self) -> str:
        parts = [f"{self.name}  {short_path(self.where.file)}:{self.where.line}  {self.how}"]
        parts += [f.text for f in self.figures]
        for level, s in self.sections.items():
            parts.append(f"--- {TITLES[level]} ---\n{s.text or 'not available: ' + s.missing}")
        return "\n\n".join(parts)


# --- the figures ------------------------------------------------------------------------------
def inspect_kernel(kernel: Kernel, target: str | None, sizes: dict[str, int],
                   values: dict[str, Any]) -> Inspection:
    """Levels and figures of a kernel for these extents; those that need extents say so."""
    if target is not None:
        parse_target(target)  # a misspelled one is an error, and no level that is not available
    missing = missing_extents(kernel, sizes)
    bound = None
    if missing and not values:
        function = _from_types(kernel, sizes, missing)
    else:
        bound = kernel.bind((), sample_arguments(kernel, sizes, values))
        function = kernel.specialise(bound, kernel.choose(bound), kernel.grid is not None)
    sections = kernel_sections(kernel, function, target)
    figures = [_resources(kernel, function, target),
               *_counted(kernel, bound, target, missing)]
    extents = ", ".join(f"{n}={v}" for n, v in sizes.items())
    how = ", ".join(filter(None, [target or "", extents]))
    line = SourceLine(kernel.source.file, kernel.source.first)
    return Inspection(kernel.__name__, line, how, tuple(figures), sections)


def _from_types(kernel: Kernel, sizes: dict[str, int], missing: tuple[str, ...]) -> Function:
    """The specialisation that the annotations alone give."""
    try:
        kernel.inspect_ir("tile", **sizes)  # type: ignore[arg-type]  # no extent is `target`
    except ArgumentError as error:
        hint = "--size " + " ".join(f"{n}=1024" for n in missing)
        if untyped := tensors_without_type(kernel):
            hint += " --set " + " ".join(f"{n}=f32" for n in untyped)
        raise ArgumentError(error.message, hint=hint) from None
    assert kernel.last is not None
    return kernel.last


def _resources(kernel: Kernel, function: Function, target: str | None) -> Figure:
    return _figure("Registers and occupancy",
                   lambda: compiled_pressure(kernel, function, target))


def _figure(title: str, make: Callable[[], Any]) -> Figure:
    """A report, or the reason why it cannot be made here."""
    try:
        return Figure(title, str(make()))
    except TesseraError as error:
        hint = f"\n  fix: {error.hint}" if error.hint else ""
        return Figure(title, f"{title.lower()}: not available: {error.message}{hint}")


def _counted(kernel: Kernel, bound: Bound | None, target: str | None,
             missing: tuple[str, ...]) -> list[Figure]:
    """What needs extents: the roofline, and the patterns of a few groups."""
    titles = ("Roofline", "Bank conflicts", "Coalescing")
    if bound is None:
        text = f"give the extents: --size {' '.join(f'{n}=1024' for n in missing)}"
        return [Figure(t, f"{t.lower()}: {text}") for t in titles]
    gpu = find_gpu(target or DEFAULT_TARGET)
    figures = [_figure(titles[0], lambda: roofline_of(kernel, bound, gpu))]
    try:
        done = checked_run(kernel, bound, Counting(), most=SAMPLED_GROUPS)
    except TesseraError as error:
        return [*figures, *(Figure(t, f"{t.lower()}: {error.message}") for t in titles[1:])]
    if done.errors:
        figures.append(Figure("Errors", "\n".join(map(str, done.errors))))
    return [*figures,
            Figure(titles[1], str(bank_report(done.name, done.function, done.report))),
            Figure(titles[2], str(sector_report(done.name, done.function, done.report)))]


__all__ = ["Figure", "Inspection", "inspect_kernel"]
