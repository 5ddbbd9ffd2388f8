"""`python -m tessera profile SCRIPT`: runs a program and prints where its time went.

    python -m tessera profile benchmarks/gpt2_step.py --steps 3
    python -m tessera profile --html page.html --json figures.json train.py --steps 20

Options of the profile stand before the script, what is behind it is the script's own.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

from ..errors import ArgumentError
from .profiling import Profile, profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="PAGE", help="also write one self-contained page")
    parser.add_argument("--json", metavar="FILE", help="also write the figures")
    parser.add_argument("--trace", metavar="FILE", help="also write Chrome's trace events")
    parser.add_argument("--top", metavar="N", type=int, default=40,
                        help="launches to print, the longest first (40)")
    parser.add_argument("script", metavar="SCRIPT", help="a Python program")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER,
                        help="arguments of the program")


def run(args: argparse.Namespace) -> int:
    """The program's exit code."""
    if not Path(args.script).is_file():
        raise ArgumentError(f"there is no file {args.script!r}",
                            hint="python -m tessera profile SCRIPT, with the path of a program")
    with profile() as p:
        code = run_script(args.script, args.arguments)
    print(p.table(args.top))
    write(p, args)
    return code


def run_script(script: str, arguments: list[str]) -> int:
    """As `python script ...` does; the exit code."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def write(p: Profile, args: argparse.Namespace) -> None:
    """The files that were asked for."""
    if args.html:
        p.html(args.html)
    if args.json:
        Path(args.json).write_text(json.dumps(p.launches.figures(), indent=2) + "\n")
    if args.trace:
        p.chrome_trace(args.trace)


__all__ = ["add_arguments", "run", "run_script", "write"]
