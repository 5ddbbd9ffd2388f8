"""Error classes with stable codes, and the user's file, line and source text.

Every error a user can cause is a `TesseraError`. Its text has four parts: what went wrong with the
values involved, the user's line, a hint that says what to do, and the code. Each class also derives
from the Python builtin a caller would expect to catch (`ShapeError` is a `ValueError`).
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from tessera.foreign import instead
from tessera.lazy_dataclass import dataclass

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROGRAMS = os.path.join(PACKAGE_DIR, "bench", "models", "")  # written as users write theirs
# Frames of these stand between a `with` block, a partial, a thread or a NumPy function and the
# user's line.
_BETWEEN = frozenset({contextlib.__file__, functools.__file__, threading.__file__})
_NUMPY_DIR = os.path.dirname(os.path.abspath(np.__file__)) + os.sep


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program: `file:line` and its text (empty when the source is gone).

    hints: what the program asked for around this line (ts.overlap); not part of the text
    part: of a step, that the line is in: "backward", "optimizer"; "" of what the program computes
    of: the op on this line whose gradient the node is part of; "" of nodes outside a gradient
    """

    file: str
    line: int
    text: str = ""
    hints: tuple[str, ...] = field(default=(), compare=False)
    part: str = field(default="", compare=False)
    of: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f"{short_path(self.file)}:{self.line}"
        return f"{where}  {self.text}" if self.text else where


def short_path(file: str) -> str:
    """`file` relative to the working directory when it lies below it, else as it is."""
    if file.startswith("<"):
        return file
    here = os.getcwd() + os.sep
    return file[len(here):] if file.startswith(here) else file


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """The innermost frame outside this package: the line of the user's program that called us."""
    frame: FrameType | None = start if start is not None else sys._getframe(1)
    while frame is not None and not is_user_frame(frame):
        frame = frame.f_back
    return frame


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame is of the user's program: outside this package, and none that stands between
    two of its own."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    # the __init__ that dataclasses make, of ours
    return not _is_ours(file) and not (file == "<string>" and name.startswith("__create_fn__"))


@functools.cache  # asked for each frame of each call
def _is_ours(file: str) -> bool:
    if file.startswith(_PROGRAMS):
        return False
    return file.startswith((PACKAGE_DIR, _NUMPY_DIR, "<frozen ")) or file in _BETWEEN


def user_line(start: FrameType | None = None) -> SourceLine | None:
    """The user's line that led here, or None when every frame is ours."""
    frame = user_frame(start if start is not None else sys._getframe(1))
    if frame is None:
        return None
    return source_line(frame.f_code.co_filename, frame.f_lineno)


_warnings = 0


def warnings_given() -> int:
    """How often a user was warned, whether it was shown or not."""
    return _warnings


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """A warning that stands on the user's line, however many of our frames are in front of it."""
    global _warnings
    _warnings += 1
    frame = user_frame(sys._getframe(1))
    if frame is None:
        return warnings.warn(text, category, stacklevel=2)
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno,
                           frame.f_globals.get("__name__"),
                           frame.f_globals.setdefault("__warningregistry__", {}))


def source_line(file: str, line: int) -> SourceLine:
    return SourceLine(file, line, linecache.getline(file, line).strip())


class TesseraError(Exception):
    """Base of all errors: `.code` (stable), `.hint`, `.where` (a SourceLine or None)."""

    default_code = "E_TESSERA"
    located = False  # whether `where` names the op's own line rather than that of a call

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        where: SourceLine | None = None,
    ):
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.where = where if where is not None else user_line(sys._getframe(1))
        super().__init__(message)

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}"]
        if self.where is not None:
            lines.append(f"  at {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


F = TypeVar("F", bound=Callable[..., Any])


def trimmed(f: F) -> F:
    """Errors of users leave f without the frames between it and the line that they name, and
    without an error that was only being handled: neither says more to a reader."""
    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TesseraError as error:
            raise error.with_traceback(None) from error.__cause__

    return call  # type: ignore[return-value]


class ShapeError(TesseraError, ValueError):
    """Extents that do not fit an operation or an annotation."""

    default_code = "E_SHAPE_MISMATCH"


class DTypeError(TesseraError, TypeError):
    """A numeric type that an operation or an annotation does not accept."""

    default_code = "E_DTYPE"


class PolicyError(DTypeError):
    """A numeric policy that is malformed or contradicts another."""

    default_code = "E_POLICY"


class AxisError(TesseraError, IndexError, ValueError):
    """An axis or index outside its range."""

    default_code = "E_AXIS"


class ArgumentError(TesseraError, TypeError, ValueError):
    """A wrong argument: unknown name, missing value, value outside what is accepted."""

    default_code = "E_ARGUMENT"


class TraceError(TesseraError, TypeError):
    """Python that needs a concrete value where only its shape and type are known."""

    default_code = "E_TRACE"


class GradError(TesseraError, TypeError):
    """Something that cannot be differentiated, or a wrong use of a derivative."""

    default_code = "E_GRAD"


class PrivilegeError(TesseraError, PermissionError):
    """A region used against its privilege (read, write, reduce)."""

    default_code = "E_PRIVILEGE"


class NumericsError(TesseraError, FloatingPointError):
    """A NaN, infinity or bound violation found by a sentinel or by `verify.numerics`.

    finding: the sentinel's report, a ts.debug.BadValue, which ts.debug.replay takes; else None
    """

    default_code = "E_NAN_INF"
    finding: Any = None


class UnknownNameError(TesseraError, AttributeError):
    """A name that a module or a tensor does not have.

    The hint is what `words` gives for it, else the nearest of `known()`. It is looked for when it
    is read: hasattr() makes this error only to throw it away.
    """

    default_code = "E_NAME"

    def __init__(self, message: str, word: str = "",
                 known: Callable[[], Sequence[str]] = tuple, words: Mapping[str, str] | None = None,
                 **options: Any):
        self._nearest = lambda: instead(word, words or {}, known())
        super().__init__(message, where=user_line(sys._getframe(1)), **options)

    @property
    def hint(self) -> str | None:
        return self._given or self._nearest()

    @hint.setter
    def hint(self, value: str | None) -> None:
        self._given = value


class EffectError(TesseraError, RuntimeError):
    """An effect in a function that was declared to be without it."""

    default_code = "E_EFFECT"


class OutOfMemoryError(TesseraError, MemoryError):
    """A result that does not fit into the memory there is."""

    default_code = "E_OOM"


class UnsupportedTargetError(TesseraError, RuntimeError):
    """A device or target that this system does not have or does not support."""

    default_code = "E_TARGET"


class CompileError(TesseraError, RuntimeError):
    """Code that a compiler or an assembler of the toolchain refuses."""

    default_code = "E_COMPILE"


class DeviceError(TesseraError, RuntimeError):
    """A call of the GPU driver that fails, or an error that a kernel reports."""

    default_code = "E_DEVICE"


class CheckpointError(TesseraError, OSError):
    """A checkpoint that cannot be written, is incomplete, or is not what it claims to be."""

    default_code = "E_CHECKPOINT"


class BundleError(TesseraError, OSError):
    """A function as a file that cannot be written, is damaged, or of a newer version."""

    default_code = "E_BUNDLE"


class DataError(TesseraError, OSError):
    """Input data that cannot be read or holds too little."""

    default_code = "E_DATA"


class GraphError(TesseraError, RuntimeError):
    """An ill-formed graph, or a graph text of another version."""

    default_code = "E_GRAPH"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?` for the nearest known word, else the list of what exists."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)


__all__ = [
    "ArgumentError", "AxisError", "BundleError", "CheckpointError", "CompileError", "DTypeError",
    "DataError", "DeviceError", "EffectError", "GradError", "GraphError", "NumericsError",
    "OutOfMemoryError", "PolicyError", "PrivilegeError", "ShapeError", "SourceLine",
    "TesseraError", "TraceError", "UnknownNameError", "UnsupportedTargetError",
]
