"""The source of a kernel or helper: parsed once, when the function is decorated or first called.

Works wherever Python can show source: files, notebooks, an exec whose text is in linecache. A file
that was edited after it was imported is noticed: its text no longer compiles to the function.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from tessera.errors import source_line
from tessera.lazy_dataclass import dataclass
from tessera.tile.frontend.captured import Captured
from tessera.tile.frontend.exits import Exits
from tessera.tile.ir.errors import Site, TileError

# What pytest's rewritten asserts call and hold (seen with 9.2).
_PYTEST = re.compile(r"@py|_(should_repr|saferepr|call_reprcompare|format_|call_assertion)|"
                     r"(AssertionError|locals|append)$")
_PYTEST_NUMBERS = {"True", "False", "0", "1"}


@dataclass(frozen=True, eq=False)
class KernelSource:
    """tree: the function's definition; positions in it count from `first` and `indent`.
    captured: what its traces read from outside."""

    tree: ast.FunctionDef
    file: str
    first: int
    indent: int
    lines: tuple[str, ...]
    captured: Captured

    @functools.cached_property
    def exits(self) -> Exits:
        """The body as it is traced, which no trace changes."""
        return Exits(self.tree)

    def site(self, node: Any) -> Site:
        """The place of an AST node in the user's file."""
        line = getattr(node, "lineno", 1)
        text = self.lines[min(line, len(self.lines)) - 1].strip()
        start = getattr(node, "col_offset", 0) + self.indent
        same = getattr(node, "end_lineno", line) == line
        stop = getattr(node, "end_col_offset", 0) + self.indent if same else 0
        return Site(self.file, self.first + line - 1, text, start=start, stop=stop)


def closure_of(f: FunctionType) -> dict[str, Any]:
    """Globals and closure variables by name."""
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    found = dict(f.__globals__)
    for name, cell in cells.items():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def capture(fn: Callable, captured: Captured | None = None) -> KernelSource:
    """The source of a plain function, whose traces write what they read into `captured`. Raises
    TileError when there is none or it changed."""
    file = fn.__code__.co_filename
    if fn.__name__ == "<lambda>":
        raise TileError("a lambda is no kernel, and none calls one: the source of an expression "
                        "cannot be told apart", where=source_line(file, fn.__code__.co_firstlineno),
                        hint="write def f(x): return ...")
    linecache.checkcache(file)
    try:
        lines, first = inspect.getsourcelines(fn)
    except (OSError, TypeError, IndentationError) as err:
        raise TileError(
            f"the source of {fn.__name__} is not available ({err})",
            hint="define it in a file or a notebook cell; for exec, put the text into linecache",
            code="E_NO_SOURCE") from None
    text = "".join(lines)
    indent = len(lines[0]) - len(lines[0].lstrip())
    tree = _definition(textwrap.dedent(text), fn)
    _require_unchanged(tree, fn)
    return KernelSource(tree, file, first, indent, tuple(lines),
                        Captured() if captured is None else captured)


_HELPERS: WeakKeyDictionary[FunctionType, tuple[CodeType, KernelSource]] = WeakKeyDictionary()


def capture_helper(fn: FunctionType) -> KernelSource:
    """`capture` of what kernels call, which is read again only when the function has other code, as
    after a reload in a notebook."""
    found = _HELPERS.get(fn)
    if found is None or found[0] is not fn.__code__:
        found = _HELPERS[fn] = fn.__code__, capture(fn)
    return found[1]


def _definition(text: str, fn: Callable) -> ast.FunctionDef:
    try:
        node = ast.parse(text).body[0]
    except SyntaxError:
        raise _changed(fn) from None
    if isinstance(node, ast.FunctionDef):
        return node
    where = source_line(fn.__code__.co_filename, fn.__code__.co_firstlineno)
    raise TileError(f"{fn.__name__} is no plain function but {type(node).__name__}", where=where,
                    hint="a kernel, and what it calls, is a function made by def")


def _require_unchanged(tree: ast.FunctionDef, fn: Callable) -> None:
    bare = ast.FunctionDef(
        **{f: getattr(tree, f) for f in tree._fields if f not in ("decorator_list", "returns")},
        decorator_list=[], returns=None)
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(bare, tree)], []))
    made = compile(module, "<check>", "exec", dont_inherit=True)
    codes = [c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == fn.__name__]
    if not codes or not _agree(codes[0], fn.__code__):
        raise _changed(fn)


def _agree(fresh: CodeType, code: CodeType) -> bool:
    """Whether the text compiles to the function. pytest compiles the asserts of test files to code
    of its own, which has more names and texts: what the text says must be there, and no number
    that it does not say."""
    wanted, got = _outline(fresh), _outline(code)
    if wanted == got or not any(n.startswith("@py") for n in got.names):
        return wanted == got
    less = wanted.numbers <= got.numbers and wanted.names <= got.names
    return less and wanted.arguments == got.arguments and not (
        {n for n in got.names - wanted.names if not _PYTEST.match(n)}
        or {n for n in got.numbers - wanted.numbers if n not in _PYTEST_NUMBERS})


@dataclass(frozen=True)
class _Outline:
    arguments: tuple[int, int]
    names: frozenset[str]
    numbers: frozenset[str]
    texts: frozenset[str]


def _outline(code: CodeType) -> _Outline:
    names = {*code.co_names, *code.co_freevars, *code.co_cellvars, *code.co_varnames}
    consts = [c for c in code.co_consts if isinstance(c, int | float | str)]
    return _Outline((code.co_argcount, code.co_kwonlyargcount), frozenset(names),
                    frozenset(repr(c) for c in consts if not isinstance(c, str)),
                    frozenset(c for c in consts if isinstance(c, str)))


def _changed(fn: Callable) -> TileError:
    code = fn.__code__
    return TileError(f"the file of {fn.__name__} changed after it was imported",
                     where=source_line(code.co_filename, code.co_firstlineno),
                     hint="import it anew, or restart", code="E_STALE_SOURCE")
