"""Which statement is being traced: the place that an op, or an error, names."""

from __future__ import annotations

import ast
import math
import warnings
from typing import Any, NoReturn, Protocol

from tessera.errors import SourceLine
from tessera.numerics.dtypes import DType
from tessera.numerics.promote import overflow
from tessera.tile.ir.errors import Site, TileError

_told: dict[str, dict] = {}  # by file: what warnings keep of those that were shown


class Source(Protocol):
    """The definition of a function, and where its nodes stand."""

    @property
    def tree(self) -> ast.FunctionDef: ...

    def site(self, node: Any) -> Site: ...


class SourcePosition:
    """The node of a kernel's tree, or of a helper's, that is being traced."""

    def __init__(self, source: Source):
        self.source: Source = source
        self.node: Any = source.tree
        self.sites: list[Site] = []  # calls of inlined helpers, outermost first
        self.line: SourceLine | None = None  # named instead of the node's, where it is known

    def where(self) -> Any:
        return self.line or self.source.site(self.node)

    def told(self, x: Any, dtype: DType) -> Any:
        """A literal as it is in a type; of one that becomes infinite the user hears here."""
        lost = overflow(x, dtype)
        if lost is None:
            return x
        self.warn(lost)
        return math.inf if x > 0 else -math.inf

    def warn(self, message: str) -> None:
        """A warning of the user's line, once."""
        at = self.where()
        warnings.warn_explicit(message, RuntimeWarning, at.file, at.line,
                               registry=_told.setdefault(at.file, {}))

    def fail(self, message: str, hint: str | None = None, **kw: Any) -> NoReturn:
        also: tuple = tuple(("called from", site) for site in reversed(self.sites))
        also += kw.pop("also", ())
        raise TileError(message, where=self.where(), hint=hint, also=also, **kw)
