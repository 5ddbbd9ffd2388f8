"""What sentinels in kernels on a GPU have counted, as findings.

The words of a launch say where it stored bad elements, and whether it loaded some. So, as under the
interpreter: NaN that was loaded came in with the data, and an infinity is deliberate where one was
loaded or the kernel writes one down. What tensor cores read through shared memory is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..dims import show_shape
from ..errors import PACKAGE_DIR, SourceLine
from ..graph.ops.random import get_state
from ..lazy_dataclass import dataclass
from ..numerics import CastCounts
from ..runtime.sentinel_words import BadElements, WatchedLaunch
from ..tile.passes.written_infinities import writes_infinity
from .findings import BadValue


@dataclass(frozen=True)
class DeviceFinding:
    """One place of a launch. lost: by a cast; cast: what it is counted under."""

    bad: BadValue | None
    lost: CastCounts
    cast: tuple[str, str]


def findings(found: Sequence[BadElements], run: int, graph: str | None = None
             ) -> list[DeviceFinding]:
    """In the order of the launches. run, graph: as in BadValue."""
    launches: dict[WatchedLaunch, list[BadElements]] = {}
    for f in found:
        launches.setdefault(f.launch, []).append(f)
    return [finding for launch, places in launches.items()
            for finding in _of_launch(launch, places, run, graph)]


def _of_launch(launch: WatchedLaunch, places: list[BadElements], run: int, graph: str | None
               ) -> Iterator[DeviceFinding]:
    loads = [p for p in places if p.what == "load"]
    nan_came, inf_came = any(p.nan for p in loads), any(p.inf for p in loads)
    meant = inf_came or (launch.function is not None and writes_infinity(launch.function))
    for p in places:
        if p.what == "load":
            continue
        lost = CastCounts(overflow=p.overflow)
        cut = {p.site.formats[2]: p.overflow}
        counts = {"nan": p.nan + cut.get("nan", 0),
                  "inf": (0 if meant else p.inf) + cut.get("inf", 0)}
        made = [_bad_value(p, kind, n, loads, nan_came and kind == "nan", run, graph)
                for kind, n in counts.items() if n]
        for bad in made:
            yield DeviceFinding(bad, CastCounts(), ("", ""))
        yield DeviceFinding(None, lost, (f"cast to {p.site.formats[1]} in kernel {launch.name}",
                                  str(_line(p))))


def _bad_value(p: BadElements, kind: str, count: int, loads: list[BadElements], came: bool,
               run: int, graph: str | None) -> BadValue:
    tensor, dtype = p.site.message, p.site.formats[1]
    operands = tuple(f"loaded from {f.site.message} at {list(f.index or ())}: {f.value}"
                     for f in loads)
    return BadValue(
        op=f"kernel {p.launch.name}", where=_line(p), kind=kind, value=p.value,
        index=p.index or (), count=count, size=math.prod(p.shape),
        result=f"{tensor}, {dtype}{show_shape(p.shape)}, on the GPU", operands=operands,
        origin=not came, graph=graph, run=run, step=get_state().step)


def _line(p: BadElements) -> SourceLine | None:
    """The user's line: of the kernel, or of the call where the kernel is the library's."""
    where = p.site.where
    if where is None or Path(where.file).is_relative_to(PACKAGE_DIR):
        return p.launch.where
    return where


__all__ = ["DeviceFinding", "findings"]
