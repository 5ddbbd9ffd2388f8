"""What the bytecode of a Python function says of the names outside of it: which it reads, and which
it writes itself, such as a counter of its traces."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any, NamedTuple

# Methods of lists, dicts, sets and deques that change them.
_CHANGING = frozenset({
    "append", "extend", "insert", "pop", "popitem", "remove", "clear", "sort", "reverse", "update",
    "setdefault", "add", "discard", "difference_update", "intersection_update",
    "symmetric_difference_update", "appendleft", "extendleft", "popleft", "rotate"})

_ASKING = frozenset({"getattr", "vars", "__dict__"})  # what asks for attributes by strings


class CodeNames(NamedTuple):
    """names: globals and attributes.  read: globals.  written: attributes, globals and variables
    around it that are bound, and lists and dicts that are changed.  constants: strings, which may
    be keys, and names of attributes where some are asked for so.  imported: (level, module).  Of a
    function and of those inside of it."""

    names: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    imported: frozenset[tuple[int, str]] = frozenset()


def code_names(value: Any) -> CodeNames:
    """Those of a function; none of what is no Python function, which is asked for nothing: an
    attribute that it makes when asked may raise, or start a driver."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return _names_in(function.__code__) if isinstance(function, types.FunctionType) else CodeNames()


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> CodeNames:
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    steps = list(dis.get_instructions(code))
    globals_read = (i.argval for i in steps if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    # pytest's rewritten asserts read `@pytest_ar`, which no program can bind.
    constants = frozenset(c for c in code.co_consts if isinstance(c, str))
    mine = not is_installed(code.co_filename)
    asked = constants if mine and _ASKING.intersection(code.co_names) else frozenset()
    own = CodeNames(frozenset(filter(str.isidentifier, asked.union(code.co_names))),
                    frozenset(filter(str.isidentifier, globals_read)),
                    _bound(steps, code) | _changed(steps), constants,
                    frozenset((steps[at - 2].argval, i.argval) for at, i in enumerate(steps)
                              if mine and i.opname == "IMPORT_NAME"))
    return CodeNames(*(frozenset().union(*parts) for parts in zip(own, *inner, strict=True)))


def is_installed(file: str) -> bool:
    """Whether code is of an installed package and not of the user's program: such code is read as
    it is called, since one method may lead to thousands of functions."""
    return "site-packages" in file or "dist-packages" in file


def _bound(steps: list[dis.Instruction], code: types.CodeType) -> frozenset[str]:
    return frozenset(i.argval for i in steps if i.opname in ("STORE_ATTR", "STORE_GLOBAL") or (
        i.opname == "STORE_DEREF" and i.argval in code.co_freevars))


def _changed(steps: list[dis.Instruction]) -> frozenset[str]:
    """The names of what items are stored in, or such methods are called of: their expressions begin
    where those of the item and the method do."""
    begin = {_source_position(i) for i in steps if i.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
             or (
        i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval in _CHANGING)} - {None}
    return frozenset(i.argval for i in steps if _source_position(i) in begin
                     and isinstance(i.argval, str))


def _source_position(step: dis.Instruction) -> tuple[int, int] | None:
    at = step.positions
    return None if at is None or at.lineno is None or at.col_offset is None else (
        at.lineno, at.col_offset)


__all__ = ["CodeNames", "code_names", "is_installed"]
