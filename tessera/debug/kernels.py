"""Linters of kernels: a call under the sanitizer, on copies of its arguments.

    print(ts.debug.race_check(kernel, a, b))       races, missing barriers, reads before writes
    print(ts.debug.bank_conflicts(kernel, a, b))   shared memory: 1 to 32 wavefronts for one access
    print(ts.debug.coalescing(kernel, a, b))       global memory: sectors moved and needed

The last two look at the accesses of single lanes. Whole tiles are laid out by the compiler.
Reports are falsy when there is nothing to mend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError, SourceLine, user_line
from ..lazy_dataclass import dataclass
from ..tile.interpreter.access_costs import Pattern
from ..tile.interpreter.machine import SanitizerReport
from ..tile.interpreter.sanitizer import Conflict, Sanitizer
from ..tile.ir.errors import KernelError
from ..tile.ir.ir import Function
from ..tile.kernel.kernel import Kernel
from .advice import bank_advice, sector_advice
from .checked import Counting, checked_run, copied, need_kernel


# --- races ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finding:
    """One error of a checked run. other: the earlier access of a race; conflict: its element and
    lanes, None for other errors."""

    code: str
    message: str
    where: SourceLine | None
    other: SourceLine | None
    fix: str
    conflict: Conflict | None

    @staticmethod
    def of(error: KernelError) -> Finding:
        other = error.also[0][1] if error.also else None
        return Finding(error.code, error.message, error.where, other, error.hint or "",
                       getattr(error, "conflict", None))

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}", f"  at {self.where}"]
        lines += [f"  the other access: {self.other}"] if self.other else []
        return "\n".join(lines + ([f"  fix: {self.fix}"] if self.fix else []))


@dataclass(frozen=True)
class RaceReport:
    """What the sanitizer found. nan_sources: (op, line) that made NaN out of numbers."""

    kernel: str
    groups: int
    lanes: int
    findings: tuple[Finding, ...]
    nan_sources: tuple[tuple[str, SourceLine | None], ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        count = f"{len(self.findings)} found" if self.findings else "none found"
        lines = [f"races of {self.kernel}, {self.groups} groups of {self.lanes} lanes: {count}"]
        lines += ["  " + line for f in self.findings for line in str(f).splitlines()]
        lines += [f"  NaN out of numbers: {op} at {where}" for op, where in self.nan_sources]
        return "\n".join(lines)


def race_check(kernel: Kernel, *args: Any, groups: Any = None, lanes: int | None = None,
               **kwargs: Any) -> RaceReport:
    """Races, missing barriers, and reads of memory that nobody wrote, each with both lines.

    Runs kernel(*args, **kwargs) under the interpreter, on copies: the arguments stay as they are.
    Asynchronous copies are delayed as long as is legal and groups run in random order (of the
    setting `seed`). The run goes on behind a race, and ends at any other error.
    """
    need_kernel(kernel)
    done = checked_run(kernel, copied(kernel, args, kwargs), Sanitizer(keep_going=True),
                       groups=groups, lanes=lanes)
    return RaceReport(done.name, done.groups, done.lanes, tuple(map(Finding.of, done.errors)),
                      tuple(dict.fromkeys(done.report.nan_sources)))


# --- patterns of access -----------------------------------------------------------------------
@dataclass(frozen=True)
class BankRow:
    """One line that accesses a shared buffer. degree: wavefronts that a warp's worst access
    takes."""

    memory: str
    where: SourceLine
    write: bool
    degree: int
    requests: int
    fix: str


@dataclass(frozen=True)
class BankReport:
    kernel: str
    rows: tuple[BankRow, ...]

    @property
    def degree(self) -> int:
        """The worst of all: 1 is no conflict."""
        return max((r.degree for r in self.rows), default=1)

    def __bool__(self) -> bool:
        return self.degree > 1

    def __str__(self) -> str:
        if not self.rows:
            return (f"bank conflicts of {self.kernel}: no single lane accesses shared memory; "
                    f"{_TILES}")
        head = f"bank conflicts of {self.kernel}: {f'{self.degree}-way' if self else 'none'}"
        cells = [(f"{r.degree}-way", _verb(r.write), r.memory, str(r.where)) for r in self.rows]
        return "\n".join([head, *_listing(cells, [r.fix for r in self.rows])])


@dataclass(frozen=True)
class SectorRow:
    """One line that accesses global memory. sectors: of 32 bytes, moved; needed: the fewest that
    hold what was asked for."""

    memory: str
    where: SourceLine
    write: bool
    requests: int
    sectors: int
    needed: int
    fix: str

    @property
    def efficiency(self) -> float:
        return self.needed / self.sectors if self.sectors else 1.0


@dataclass(frozen=True)
class SectorReport:
    kernel: str
    rows: tuple[SectorRow, ...]

    @property
    def efficiency(self) -> float:
        """Needed over moved sectors of all accesses: 1.0 is best."""
        moved = sum(r.sectors for r in self.rows)
        return sum(r.needed for r in self.rows) / moved if moved else 1.0

    def __bool__(self) -> bool:
        return any(r.fix for r in self.rows)

    def __str__(self) -> str:
        head = f"coalescing of {self.kernel}: {self.efficiency:.0%} of what moves is needed"
        if not self.rows:
            return f"coalescing of {self.kernel}: no single lane accesses global memory; {_TILES}"
        cells = [(f"{r.efficiency:.0%}", _verb(r.write), r.memory,
                  f"{r.sectors / max(r.requests, 1):.3g} sectors, {r.where}") for r in self.rows]
        return "\n".join([head, *_listing(cells, [r.fix for r in self.rows])])


_TILES = "whole tiles are laid out by the compiler"


def _verb(write: bool) -> str:
    return "writes" if write else "reads"


def _listing(cells: Sequence[tuple[str, ...]], fixes: list[str]) -> list[str]:
    """Lines with columns below each other, each followed by its fix."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row, fix in zip(cells, fixes, strict=True):
        padded = [c.ljust(w) for c, w in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(padded)).rstrip())
        lines += [f"    fix: {fix}"] if fix else []
    return lines


def bank_conflicts(kernel: Kernel, *args: Any, groups: Any = None, lanes: int | None = None,
                   **kwargs: Any) -> BankReport:
    """How many wavefronts a warp's accesses to shared memory take, line by line: 1 (none) to 32.

    With arguments the call is interpreted on copies of them; without, the kernel's last run
    under the sanitizer counts.
    """
    function, report = _counted(kernel, args, kwargs, groups, lanes)
    return bank_report(kernel.__name__, function, report)


def bank_report(name: str, function: Function, report: SanitizerReport) -> BankReport:
    found = [p for p in report.patterns.values() if p.space == "shared"]
    rows = [BankRow(p.memory, p.where, p.write, p.degree, p.requests, bank_advice(function, p))
            for p in sorted(found, key=_access_site)]
    return BankReport(name, tuple(rows))


def coalescing(kernel: Kernel, *args: Any, groups: Any = None, lanes: int | None = None,
               **kwargs: Any) -> SectorReport:
    """How much of what a warp's accesses to global memory move is needed, line by line.

    Arguments as for bank_conflicts.
    """
    function, report = _counted(kernel, args, kwargs, groups, lanes)
    return sector_report(kernel.__name__, function, report)


def sector_report(name: str, function: Function, report: SanitizerReport) -> SectorReport:
    found = [p for p in report.patterns.values() if p.space == "global"]
    rows = [SectorRow(p.memory, p.where, p.write, p.requests, p.sectors, p.ideal,
                      sector_advice(function, p)) for p in sorted(found, key=_access_site)]
    return SectorReport(name, tuple(rows))


def _access_site(p: Pattern) -> Any:
    return p.where.file, p.where.line, p.memory, p.write


def _counted(kernel: Kernel, args: tuple, kwargs: dict[str, Any], groups: Any,
             lanes: int | None) -> tuple[Function, SanitizerReport]:
    need_kernel(kernel)
    if args or kwargs:
        done = checked_run(kernel, copied(kernel, args, kwargs), Counting(), groups=groups,
                           lanes=lanes)
        for error in done.errors:
            raise error
        return done.function, done.report
    if not kernel.report.checked or kernel.last is None:
        raise ArgumentError(f"{kernel.__name__} has not run under the sanitizer",
                            hint="give the arguments of a call, or call it under "
                            "`with ts.debug.enable():` first", where=user_line())
    return kernel.last, kernel.report


__all__ = ["BankReport", "BankRow", "Finding", "RaceReport", "SectorReport", "SectorRow",
           "bank_conflicts", "bank_report", "coalescing", "race_check", "sector_report"]
