"""Tables of choices that were measured on a card, and go before the model's.

    tables = tables_of("NVIDIA H100 80GB HBM3", 132)
    tables.find("gemm", "bf16 nn 1536x1536x1536", "128x256")     a TunedChoice, or None

`python -m tessera tune` writes them. Those of some cards lie beside this file, in tables/; a user's
own lie in `tuned` below TESSERA_CACHE_DIR, and go first. An entry holds for one card, one version
of the routine's kernels and one problem; it has the time of each choice that was measured, the
model's among them, so that who may not take the quickest takes the next. Where the model now makes
a choice that was not measured, the model decides. Nothing in a file is executed: a choice is read
by the routine, which knows its own.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ArgumentError, TesseraError
from ..lazy_dataclass import dataclass
from ..tile.kernel.kernel import Kernel
from ..tile.tuning.tuned_schedules import TuningCacheWarning, write_whole
from .routine import find

SCHEMA, VERSION = "tessera.tuned", 1
SHIPPED = Path(__file__).parent / "tables"
MARGIN = 0.02  # of the model's time, that another choice has to gain
FIELDS = {"schema": str, "version": int, "card": str, "multiprocessors": int, "routines": dict}
ROUTINE_FIELDS = {"kernels": str, "entries": dict}
ENTRY_FIELDS = {"date": str, "us": dict}


@dataclass(frozen=True)
class TunedChoice:
    """What a table says. us, model_us: of it and of the model's choice, as they were measured."""

    choice: str
    us: float
    model: str
    model_us: float
    card: str
    date: str

    @property
    def why(self) -> str:
        """In words, for the notes of a schedule."""
        return (f"from the table, measured on {self.card} on {self.date}: {self.us:.2f} us beside "
                f"{self.model_us:.2f} of the model's {self.model}")


@dataclass(frozen=True)
class TunedEntry:
    """us: microseconds of each choice that was measured."""

    date: str
    us: Mapping[str, float]

    def best(self, model: str, allowed: Callable[[str], bool] = lambda choice: True) -> str | None:
        """The quickest that is allowed, where it beats the model's choice."""
        if model not in self.us:
            return None
        found = min(filter(allowed, self.us), key=self.us.__getitem__, default=model)
        return found if self.us[found] < (1 - MARGIN) * self.us[model] else None


@dataclass(frozen=True)
class TunedTable:
    """One file. kernels: by routine, the hash of the kernels that were measured; entries: by
    routine and problem."""

    card: str
    multiprocessors: int
    kernels: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, Mapping[str, TunedEntry]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> TunedTable:
        """Raises ArgumentError for a file that is not sound, OSError for one that is not there."""
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ArgumentError(f"{path} is no JSON: {error}") from None
        _require(document, FIELDS, str(path))
        if (document["schema"], document["version"]) != (SCHEMA, VERSION):
            raise ArgumentError(
                f"{path} is {document['schema']!r}, version {document['version']}",
                hint=f"this Tessera reads {SCHEMA!r}, version {VERSION}: tune again")
        kernels, entries = {}, {}
        for name, found in document["routines"].items():
            _require(found, ROUTINE_FIELDS, f"{path}, {name}")
            kernels[name] = found["kernels"]
            entries[name] = {problem: _entry(e, f"{path}, {name}, {problem}")
                             for problem, e in found["entries"].items()}
        return TunedTable(document["card"], document["multiprocessors"], kernels, entries)

    def with_entries(self, routine: str, entries: Mapping[str, TunedEntry | None]) -> TunedTable:
        """More of a routine, None for problems that have none any more; those of other versions of
        its kernels are left out."""
        now = kernels_hash(routine)
        kept = self.entries.get(routine, {}) if self.kernels.get(routine) == now else {}
        mine = {p: e for p, e in {**kept, **entries}.items() if e is not None}
        return TunedTable(self.card, self.multiprocessors, {**self.kernels, routine: now},
                          {**self.entries, routine: mine})

    def write(self, path: Path) -> None:
        """As a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.text())

    def text(self) -> str:
        """The file: an entry in a line, its choices from the quickest on."""
        routines = []
        for name, entries in sorted(self.entries.items()):
            lines = [f'   {json.dumps(p)}: {json.dumps({"date": e.date, "us": _ordered(e.us)})}'
                     for p, e in sorted(entries.items())]
            inner = ",\n".join(lines)
            routines.append(f'  {json.dumps(name)}: {{"kernels": "{self.kernels[name]}", '
                            f'"entries": {{\n{inner}\n  }}}}')
        between = ",\n".join(routines)
        return (f'{{"schema": "{SCHEMA}", "version": {VERSION},\n "card": '
                f'{json.dumps(self.card)}, "multiprocessors": {self.multiprocessors},\n '
                f'"routines": {{\n{between}\n }}}}\n')


def _ordered(us: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(us.items(), key=lambda item: item[1]))


def _entry(document: Any, where: str) -> TunedEntry:
    _require(document, ENTRY_FIELDS, where)
    us = document["us"]
    if not all(isinstance(t, int | float) and not isinstance(t, bool) and t > 0
               for t in us.values()):
        raise ArgumentError(f"{where}: times are numbers above 0, in microseconds; got {us}")
    return TunedEntry(document["date"], us)


def _require(document: Any, fields: Mapping[str, type], where: str) -> None:
    if not isinstance(document, dict) or {n: type(v) for n, v in document.items()} != fields:
        got = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise ArgumentError(f"{where}: got {got}", hint="an object of " + ", ".join(
            f"{n} ({t.__name__})" for n, t in fields.items()))


# --- lookup -------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TunedTables:
    """Those of a card, a user's own first."""

    tables: tuple[TunedTable, ...]

    def find(self, routine: str, problem: str, model: str,
             allowed: Callable[[str], bool] = lambda choice: True) -> TunedChoice | None:
        """The choice for a problem, where one beats the model's. model: what that chooses now.
        allowed: of the choices that were measured.

        The first table with an entry decides, also for the model.
        """
        for table, entry in self._entries(routine, problem):
            best = entry.best(model, allowed)
            return best and TunedChoice(best, entry.us[best], model, entry.us[model], table.card,
                                        entry.date) or None
        return None

    def _entries(self, routine: str, problem: str) -> Iterator[tuple[TunedTable, TunedEntry]]:
        for table in self.tables:
            entry = table.entries.get(routine, {}).get(problem)
            if entry is not None and table.kernels[routine] == kernels_hash(routine):
                yield table, entry


def tables_of(card: str, multiprocessors: int) -> TunedTables | None:
    """The tables of a card, by the driver's name of it; None where there are none, and under
    TESSERA_TUNED=0."""
    return _tables(card, multiprocessors, config.get("cache_dir")) if config.get("tuned") else None


@functools.cache
def _tables(card: str, multiprocessors: int, folder: Path) -> TunedTables | None:
    """folder: of the cache, since there are tables in it."""
    read = (_sound(path) for path in (user_table(card), shipped_table(card)))
    found = tuple(t for t in read if t is not None and (t.card, t.multiprocessors) == (
        card, multiprocessors))
    return TunedTables(found) if found else None


def _sound(path: Path) -> TunedTable | None:
    try:
        return TunedTable.read(path)
    except FileNotFoundError:
        return None
    except (OSError, TesseraError) as error:
        words = error.message if isinstance(error, TesseraError) else str(error)
        warnings.warn(f"no table of tuned choices is read: {words}", TuningCacheWarning,
                      stacklevel=2)
        return None


def forget_tables() -> None:
    """Files are read again by the next product of new extents."""
    _tables.cache_clear()


def user_table(card: str) -> Path:
    return Path(config.get("cache_dir")) / "tuned" / file_name(card)


def shipped_table(card: str) -> Path:
    return SHIPPED / file_name(card)


def file_name(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") + ".json"


# --- versions -----------------------------------------------------------------------------------
@functools.cache
def kernels_hash(routine: str) -> str:
    """Of the code of a routine's kernels and of what they call; comments, docstrings and the
    layout of lines are none of it."""
    seen: dict[int, Kernel] = {}
    for kernel in find(routine).kernels.values():
        _reach(kernel, seen)
    texts = sorted(f"{k.__name__} {_code(k.source.tree)}" for k in seen.values())
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _reach(kernel: Kernel, seen: dict[int, Kernel]) -> None:
    if id(kernel) in seen:
        return
    seen[id(kernel)] = kernel
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, Kernel):
            _reach(called, seen)


def _code(tree: ast.FunctionDef) -> str:
    body = tree.body[1:] if ast.get_docstring(tree, clean=False) is not None else tree.body
    return "\n".join(map(ast.unparse, [*tree.decorator_list, tree.args, *body]))


__all__ = ["MARGIN", "TunedChoice", "TunedEntry", "TunedTable", "TunedTables", "file_name",
           "forget_tables", "kernels_hash", "shipped_table", "tables_of", "user_table"]
