"""What fails in a kernel that a graph made, as the error of the op: that of the CPU, at the user's
line. A GPU tells neither which index it was nor which matrix of a batch."""

from __future__ import annotations

from collections.abc import Callable

from ....errors import AxisError, SourceLine, TesseraError
from ....hooks import failed_asserts
from ...ops.factorizations import not_positive
from ...ops.linalg import singular

OUTSIDE = "an index is outside of "
NOT_POSITIVE, SINGULAR = "the matrix is not positive definite", "the matrix is singular"
MEANINGS: dict[str, Callable[[str], TesseraError]] = {
    OUTSIDE: lambda text: AxisError(text, hint=f"valid: {text.removeprefix(OUTSIDE)}"),
    NOT_POSITIVE: lambda text: not_positive(),
    SINGULAR: lambda text: singular(),
}
_written: dict[tuple[str, int], SourceLine | None] = {}  # file and line of a check: the user's line


def note_check(file: str, line: int, where: SourceLine | None) -> None:
    _written[file, line] = where


def error_of(where: SourceLine | None, text: str) -> TesseraError | None:
    """None for an assert that is the user's own."""
    if where is None or (where.file, where.line) not in _written:
        return None
    error = next(made(text) for begin, made in MEANINGS.items() if text.startswith(begin))
    error.where = _written[where.file, where.line]
    return error


failed_asserts.append(error_of)
