"""What a kernel read from outside of it while it was traced: globals, closure variables and
attributes of plain objects. They are constants of its code, so each call asks whether they are what
they were.

The question is one expression, written when the reads are known: a few dictionary look-ups, 20 to
40 ns each.
"""

from __future__ import annotations

import ast
import marshal
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from ...lazy_dataclass import dataclass

# What nobody changes: their attributes are not watched.
_OURS = ("tessera", "math", "numpy", "builtins", "operator", "_operator")
_PLAIN = (bool, int, float, str, bytes, type(None))
_CHANGEABLE = (list, dict, set)
VERSION = 2  # of marshal's bytes: later ones depend on who else holds the objects
_SOURCE = """\
def unchanged():
    try:
        return {terms}
    except (KeyError, AttributeError, ValueError):  # it is gone
        return False
"""


@dataclass(frozen=True, eq=False)
class Read:
    """holder: of the value, a dict, a cell or an object; text: how it is read there.

    content: the bytes of a value that can change in place.
    """

    holder: Any
    text: str
    value: Any
    content: Any


class Captured:
    """The reads of one kernel. `unchanged()` says whether each would give the same today."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, str], Read] = {}
        self.unchanged: Callable[[], bool] = _nothing_read

    def clear(self) -> None:
        self._reads.clear()
        self.unchanged = _nothing_read

    def name(self, fn: FunctionType, name: str, value: Any) -> None:
        """A global or closure variable that a function read. Modules are not watched."""
        if isinstance(value, ModuleType):
            return
        if name in fn.__code__.co_freevars:
            self._note(_cell(fn, name), ".cell_contents", value)
        elif name in fn.__globals__:
            self._note(fn.__globals__, f"[{name!r}]", value)

    def names_of(self, fn: Any, code: Any = None) -> None:
        """All that a plain function, or an expression in its place, may read by name."""
        if not isinstance(fn, FunctionType):
            return
        code = code or fn.__code__
        for name in (*code.co_names, *code.co_freevars):
            if name in fn.__code__.co_freevars:
                with suppress(ValueError):  # not assigned yet
                    self.name(fn, name, _cell(fn, name).cell_contents)
            elif name in fn.__globals__:
                self.name(fn, name, fn.__globals__[name])

    def expression(self, fn: FunctionType, text: str, scope: dict[str, Any]) -> None:
        """The names that an expression in a function's place reads, and their attributes."""
        tree = ast.parse(text, mode="eval")
        self.names_of(fn, compile(tree, "<expression>", "eval"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                holder = _dotted(node.value, scope)
                if hasattr(holder, node.attr):
                    self.attribute(holder, node.attr, getattr(holder, node.attr))

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """An attribute of an object or module of the user's."""
        module = holder.__name__ if isinstance(holder, ModuleType) else type(holder).__module__
        plain = isinstance(value, (*_PLAIN, *_CHANGEABLE, tuple, FunctionType, type)) or type(
            value).__module__.startswith("tessera.numerics")
        if module.partition(".")[0] not in _OURS and plain and name.isidentifier():
            self._note(holder, f".{name}", value)

    def _note(self, holder: Any, text: str, value: Any) -> None:
        content = marshal.dumps(value, VERSION) if _is_plain(value) and _changes(value) else None
        self._reads[id(holder), text] = Read(holder, text, value, content)
        self.unchanged = self._first

    def _first(self) -> bool:
        self.unchanged = self._written()
        return self.unchanged()

    def _written(self) -> Callable[[], bool]:
        """The expression as a function."""
        scope: dict[str, Any] = {"equal": equal, "dumps": marshal.dumps}
        terms = []
        for i, read in enumerate(self._reads.values()):
            scope |= {f"h{i}": read.holder, f"v{i}": read.value, f"c{i}": read.content}
            now = f"h{i}{read.text}"
            if read.content is None:
                terms.append(f"({now} is v{i} or equal({now}, v{i}))")
            else:
                terms.append(f"dumps({now}, {VERSION}) == c{i}")
        exec(_SOURCE.format(terms=" and ".join(terms)), scope)
        return scope["unchanged"]


def _dotted(node: ast.expr, scope: dict[str, Any]) -> Any:
    """The object that `a.b.c` says; None for what is no such name."""
    if isinstance(node, ast.Attribute):
        return getattr(_dotted(node.value, scope), node.attr, None)
    return scope.get(node.id) if isinstance(node, ast.Name) else None


def _cell(fn: FunctionType, name: str) -> Any:
    return (fn.__closure__ or ())[fn.__code__.co_freevars.index(name)]


def _nothing_read() -> bool:
    return True


def _is_plain(x: Any) -> bool:
    """Whether a value is data whose bytes say all of it."""
    if type(x) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in x.items())
    if type(x) in (list, tuple, set):
        return all(map(_is_plain, x))
    return type(x) in _PLAIN


def _changes(x: Any) -> bool:
    """Whether plain data can change in place."""
    return isinstance(x, _CHANGEABLE) or (isinstance(x, tuple) and any(map(_changes, x)))


def equal(x: Any, y: Any) -> bool:
    """Whether two pieces of plain data are the same constants: 1, 1.0 and True are not."""
    return type(x) is type(y) and _is_plain(x) and _is_plain(y) and (
        marshal.dumps(x, VERSION) == marshal.dumps(y, VERSION))


__all__ = ["Captured"]
