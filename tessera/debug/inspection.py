"""`python -m tessera inspect FILE::kernel`: all levels of a kernel, and what it takes.

    python -m tessera inspect examples/04_gemm.py::gemm_nt --size M=4096 N=4096 K=4096
    python -m tessera inspect kernels.py::softmax --target sm_80 --html softmax.html
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, SourceLine, TesseraError, did_you_mean, short_path
from ..tile.arguments import Bound
from ..tile.gpus import gpu as find_gpu
from ..tile.ir import Function
from ..tile.kernel import Kernel
from .checked import Counting, checked_run
from .kernels import bank_report, sector_report
from .levels import TITLES, Section, kernel_sections
from .resources import compiled_pressure
from .rooflines import roofline_of
from .samples import missing_extents, sample_arguments

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
    sections: dict[str, Section]

    def __str__(self) -> str:
        parts = [f"{self.name}  {short_path(self.where.file)}:{self.where.line}  {self.how}"]
        parts += [f.text for f in self.figures]
        for level, s in self.sections.items():
            parts.append(f"--- {TITLES[level]} ---\n{s.text or 'not available: ' + s.missing}")
        return "\n\n".join(parts)


# --- the command ------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="FILE::KERNEL", help="a Python file and a kernel in it")
    parser.add_argument("--target", help="sm_80, sm_90a, ...; by default this machine's GPU, else "
                                         "sm_90a; no GPU is needed")
    parser.add_argument("--size", metavar="NAME=N", nargs="+", action="extend", default=[],
                        help="named extents: --size M=4096 K=512")
    parser.add_argument("--set", metavar="NAME=VALUE", nargs="+", action="extend", default=[],
                        help="parameters that are no tensors: --set causal=True BM=64")
    parser.add_argument("--html", metavar="PAGE", help="also write one self-contained page")
    parser.add_argument("--only", metavar="LEVEL", nargs="+", choices=[*TITLES, "figures"],
                        help=f"print only some of: figures, {', '.join(TITLES)}")


def run(args: argparse.Namespace) -> int:
    kernel = load_kernel(args.kernel)
    found = inspect_kernel(kernel, args.target, pairs("--size", args.size, _size),
                           pairs("--set", args.set, _value))
    if args.html:
        from .inspect_page import page

        Path(args.html).write_text(page(found), encoding="utf-8")
    print(chosen(found, args.only))
    return 0


def chosen(found: Inspection, only: list[str] | None) -> Inspection:
    if not only:
        return found
    sections = {level: s for level, s in found.sections.items() if level in only}
    figures = found.figures if "figures" in only else ()
    return Inspection(found.name, found.where, found.how, figures, sections)


def pairs(option: str, texts: list[str], convert: Callable[[str], Any]) -> dict[str, Any]:
    """{"N": 4096} of ["N=4096"]. Raises ArgumentError."""
    found = {}
    for text in texts:
        name, mark, value = text.partition("=")
        try:
            if not mark or not name.isidentifier():
                raise ValueError
            found[name] = convert(value)
        except (ValueError, SyntaxError):
            raise ArgumentError(f"{option} {text} is not NAME=VALUE",
                                hint="--size N=4096 or --set causal=True") from None
    return found


def _size(text: str) -> int:
    if int(text) < 0:
        raise ValueError
    return int(text)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:  # a bare word
        return text


# --- finding the kernel -----------------------------------------------------------------------
def load_kernel(text: str) -> Kernel:
    """The kernel of FILE::NAME; of FILE alone when it has only one. Raises ArgumentError."""
    path, _, name = text.partition("::")
    file = Path(path)
    if not file.is_file():
        raise ArgumentError(f"there is no file {path!r}", hint="python -m tessera inspect "
                            "FILE::KERNEL, with the path of a Python file")
    module = import_file(file)
    kernels = {n: x for n, x in vars(module).items() if isinstance(x, Kernel)}
    if not name and len(kernels) == 1:
        return next(iter(kernels.values()))
    if not kernels:
        raise ArgumentError(f"{path} has no kernel", hint="decorate a function with @ts.kernel")
    if name not in kernels:
        what = f"{name!r} in {path} is no kernel" if hasattr(module, name or " ") else (
            f"{path} has no kernel {name!r}" if name else f"{path} has several kernels")
        raise ArgumentError(what, hint=did_you_mean(name, sorted(kernels)))
    return kernels[name]


def import_file(file: Path) -> ModuleType:
    """The module of a file, as its package imports it when it lies in one."""
    file = file.resolve()
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts).removesuffix(".__init__"))
    # Not its own name: json.py of the user's must not take the place of another json.
    spec = importlib.util.spec_from_file_location(f"inspected.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{file.name} is no Python file", hint="its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


# --- the figures ------------------------------------------------------------------------------
def inspect_kernel(kernel: Kernel, target: str | None, sizes: dict[str, int],
                   values: dict[str, Any]) -> Inspection:
    """Levels and figures of a kernel for these extents; those that need extents say so."""
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
        raise ArgumentError(error.message, hint="--size " + " ".join(
            f"{n}=1024" for n in missing)) from None
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
    gpu = find_gpu(target or "sm_90a")
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


__all__ = ["Figure", "Inspection", "add_arguments", "import_file", "inspect_kernel", "load_kernel",
           "run"]
