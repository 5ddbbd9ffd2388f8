"""`python -m tessera compare BASELINE NEW`: fails when a measurement is slower than its baseline.

Both are JSON files of figures, nested as they like. The unit that ends a name, or is one, says what
is better: times small (step_ms, softmax.us), rates large (copy_gbps, gemm.TFLOP/s). Other figures
are not compared.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..lazy_dataclass import dataclass

RATES = ("gbps", "tflops", "gflops", "per_s", "GB/s", "TFLOP/s", "GFLOP/s")
TIMES = ("ns", "us", "ms", "s")
_UNIT = re.compile(rf"(?:^|[._, ])(?P<unit>{'|'.join(RATES + TIMES)})$")


def unit_of(name: str) -> str | None:
    """The unit of speed at the end of a name: ms of step_ms, GB/s of `rows.softmax.GB/s`."""
    found = _UNIT.search(name)
    return found["unit"] if found else None


@dataclass(frozen=True)
class Change:
    """One figure in both files. `slower`: 0.25 is a quarter slower, negative is faster."""

    name: str
    before: float
    after: float

    @property
    def slower(self) -> float:
        if unit_of(self.name) in RATES:
            return self.before / self.after - 1 if self.after else float("inf")
        return self.after / self.before - 1 if self.before else 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.before:.6g} -> {self.after:.6g}  ({self.slower:+.1%} time)"


def figures(data: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(`a.b.c_ms`, value) of every figure with a unit of speed."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from figures(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        if unit_of(path):
            yield path, float(data)


def read_figures(path: str | Path) -> dict[str, float]:
    """The figures of a file. Raises DataError when it is no JSON or holds none."""
    try:
        found = dict(figures(json.loads(Path(path).read_text())))
    except (OSError, ValueError) as err:
        raise DataError(f"cannot read the measurements in {path}: {err}") from err
    if not found:
        raise DataError(f"{path} holds no figure with a unit of speed",
                        hint="names end with a unit, as step_ms or rows.softmax.GB/s: "
                        + " ".join(TIMES + RATES))
    return found


def compare(baseline: dict[str, float], new: dict[str, float]) -> list[Change]:
    """The figures that are in both, worst first."""
    both = [Change(name, baseline[name], new[name]) for name in baseline if name in new]
    return sorted(both, key=lambda c: -c.slower)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("baseline", help="JSON of the stored measurements")
    parser.add_argument("new", help="JSON of the new ones")
    parser.add_argument("--margin", type=float, default=0.1, help="0.1: a tenth slower is fine")


def run(args: argparse.Namespace) -> int:
    """Prints the changes; 1 when one is beyond the margin or nothing could be compared."""
    changes = compare(read_figures(args.baseline), read_figures(args.new))
    slow = [c for c in changes if c.slower > args.margin]
    for c in changes:
        print("SLOWER " if c in slow else "       ", c)
    if not changes:
        print("no figure is in both files")
    return int(bool(slow) or not changes)
