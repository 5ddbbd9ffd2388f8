"""Errors of the tile language: the user's line with a caret, and the sites of a race.

`TileError` is raised while a kernel is compiled, the others while the interpreter runs it.
"""

from __future__ import annotations

import linecache
from dataclasses import field
from typing import Any

from tessera import hooks
from tessera.errors import SourceLine, TesseraError
from tessera.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Site(SourceLine):
    """A place in a kernel: the line, and the columns [start, stop) of the expression in it."""

    start: int = field(default=0, compare=False)
    stop: int = field(default=0, compare=False)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.file, self.line, self.start


class KernelError(TesseraError):
    """Base of the errors of kernels: prints the user's line with a caret below the expression."""

    default_code = "E_KERNEL_BASE"

    def __init__(self, message: str, *, also: tuple[tuple[str, SourceLine], ...] = (), **kw: Any):
        super().__init__(message, **kw)
        self.also = also

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}"]
        if self.where is not None:
            lines += [f"  at {self.where}", *_caret(self.where)]
        lines += [f"  {role}: {where}" for role, where in self.also]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


def _caret(where: SourceLine) -> list[str]:
    """The expression's columns marked, when the whole line is still known."""
    if not isinstance(where, Site) or where.stop <= where.start:
        return []
    line = linecache.getline(where.file, where.line).rstrip("\n")
    indent = len(line) - len(line.lstrip())
    if line.strip() != where.text or where.start < indent:
        return []
    return ["     " + line.strip(),
            "     " + " " * (where.start - indent) + "^" * (where.stop - where.start)]


class TileError(KernelError, TypeError):
    """A kernel that is not in the tile language, or uses an op wrongly."""

    default_code = "E_KERNEL"


class TileIRError(KernelError, ValueError):
    """Ill-formed Tile IR, or a Tile IR text that cannot be read."""

    default_code = "E_TILE_IR"


class BoundsError(KernelError, IndexError):
    """An element access outside a tensor or buffer."""

    default_code = "E_BOUNDS"


class RaceError(KernelError, RuntimeError):
    """Two accesses to one address that nothing orders, at least one of them a write.

    .conflict  the same for programs: a sanitize.Conflict
    """

    default_code = "E_RACE"

    def __init__(self, message: str, *, conflict: Any = None, **kw: Any):
        super().__init__(message, **kw)
        self.conflict = conflict


class UninitialisedError(KernelError, RuntimeError):
    """A read of shared or register memory that nothing has written."""

    default_code = "E_UNINITIALISED"


class DivergenceError(KernelError, RuntimeError):
    """An operation of the whole group where only some of its lanes arrive."""

    default_code = "E_DIVERGENCE"


class KernelAssertionError(KernelError, AssertionError):
    """An `assert` of a kernel that does not hold."""

    default_code = "E_KERNEL_ASSERT"


def failed_assert(who: str, text: str, where: SourceLine | None) -> TesseraError:
    """The error of an assert that does not hold. In a kernel that a graph made it is that of the
    op, at the line where the user wrote that."""
    for told in hooks.failed_asserts:
        error = told(where, text)
        if error is not None:
            return error
    return KernelAssertionError(f"assertion failed in {who}: {text}", where=where)


class RuleError(Exception):
    """Raised by an op's type rule: a text and a hint; the frontend adds the line."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message, self.hint = message, hint
