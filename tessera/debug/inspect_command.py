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
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, did_you_mean
from ..tile.kernel.kernel import Kernel
from .inspect_page import page
from .inspection import Inspection, inspect_kernel
from .kernel_lowering import TITLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="FILE::KERNEL", help="a Python file and a kernel in it")
    parser.add_argument("--target", help="sm_80, sm_90a, ...; by default this machine's GPU, else "
                                         "sm_90a; no GPU is needed")
    parser.add_argument("--size", metavar="NAME=N", nargs="+", action="extend", default=[],
                        help="named extents: --size M=4096 K=512")
    parser.add_argument("--set", metavar="NAME=VALUE", nargs="+", action="extend", default=[],
                        help="parameters, and types of tensors whose annotation has "
                             "none: --set causal=True BM=64 x=f32")
    parser.add_argument("--html", metavar="PAGE", help="also write one self-contained page")
    parser.add_argument("--only", metavar="LEVEL", nargs="+", choices=[*TITLES, "figures"],
                        help=f"print only some of: figures, {', '.join(TITLES)}")


def run(args: argparse.Namespace) -> int:
    kernel = load_kernel(args.kernel)
    found = inspect_kernel(kernel, args.target, pairs("--size", args.size, _size),
                           pairs("--set", args.set, _value))
    if args.html:
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


__all__ = ["add_arguments", "import_file", "load_kernel", "run"]
