"""The traces that a compiled function keeps: as many as may be in use, and a warning that names the
argument that changes when there are ever more of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ..dims import show_shape
from ..errors import user_line, warn_user
from ..tensor import TensorType
from . import tree

MOST = 256  # traces of one function; each holds its graph, its steps and its memory
TELL_AFTER = 32
REBOUND_OFTEN = 3
ASIDE = 3  # traces for other settings, of one key


class RetracingWarning(RuntimeWarning):
    """A compiled function meets new signatures again and again."""


class Signatures:
    """Traces by key, those used longest ago forgotten first. `fast` maps the short keys of plain
    calls to the same traces."""

    def __init__(self, name: str):
        self.name, self.told, self.clock, self.made, self.rebound = name, False, 0, 0, 0
        self.kept: dict[Any, Any] = {}
        self.aside: dict[Any, list] = {}  # by key, for other settings
        self.setting = ""  # the name of the last one that changed
        self.fast: dict[Any, Any] = {}
        self.types: dict[Any, list] = {}  # of a short key: keeps the ids in it alive

    def used(self, traced: Any) -> None:
        self.clock += 1
        traced.used = self.clock

    def get(self, key: Any) -> Any:
        traced = self.kept.get(key)
        if traced is not None:
            self.used(traced)
        return traced

    def drop(self, traced: Any, name: str, setting: bool) -> None:
        """A trace of something that is no longer what this name of the user's program holds. Where
        it was a setting, such as `training` of an object, it may soon be so again."""
        for key in [k for k, t in list(self.kept.items()) if t is traced]:
            if self.kept.pop(key, None) is traced and setting:  # another thread may have done it
                self.aside[key] = [*self.aside.get(key, ()), traced][-ASIDE:]
        self._drop_short(traced)
        if setting:
            self.setting = name
            if len(self.aside) > MOST:
                self.aside.pop(next(iter(self.aside)), None)
            return
        self.made -= 1
        self.rebound += 1
        if self.rebound == REBOUND_OFTEN:
            warn_user(f"{self.name} has been traced and compiled anew {self.rebound} times, as "
                      f"{name!r}, which it reads from outside, was bound to something else: give "
                      "it as an argument, which is read at each call", RetracingWarning)

    def back(self, key: Any) -> Any:
        """A trace that was put aside, whose names hold again what they did."""
        found = None
        for t in self.aside.pop(key, ()):
            moved = t.captured.rebound()
            if moved is None and found is None:
                found = self.kept[key] = t
                self.used(t)
            elif moved is not None and moved.setting:
                self.aside.setdefault(key, []).append(t)
        return found

    def _drop_short(self, traced: Any) -> None:
        for short in [s for s, t in list(self.fast.items()) if t is traced]:
            self.fast.pop(short, None)
            self.types.pop(short, None)

    def keep(self, key: Any, traced: Any) -> None:
        """A new trace; the one used longest ago goes when there are too many."""
        self.made += 1
        self.used(traced)
        self.kept[key] = traced
        if self.made > TELL_AFTER and not self.told:
            self.told = True
            self._warn()
        if len(self.kept) > MOST:
            old = min(self.kept, key=lambda k: self.kept[k].used)
            self._drop_short(self.kept.pop(old))

    def remember(self, short: Any, types: list, traced: Any) -> None:
        if len(self.fast) >= MOST:  # types that are equal, but others at each call
            self.fast.clear()
            self.types.clear()
        self.fast[short], self.types[short] = traced, types

    def _warn(self) -> None:
        where = user_line()
        place = (where.file, where.line) if where is not None else ("", 0)
        text = "\n".join([
            f"{self.name} has been traced and compiled {self.made} times, each time for other "
            "arguments" + f", or another value of {self.setting!r}" * bool(self.setting) + ":",
            *(f"  {line}" for line in changes([t.types for t in self.kept.values()])),
            f"  each takes time and memory, and {MOST} are kept. Pad what changes its extents to "
            "a few sizes (powers of two), and give numbers that change as tensors: "
            "ts.tensor(x)",
        ])
        warnings.warn_explicit(text, RetracingWarning, *place)


def changes(signatures: list[dict[str, Any]]) -> list[str]:
    """One line for each argument that is not the same in all signatures: what of it differs."""
    seen: dict[str, list[Any]] = {}
    for types in signatures:
        for name, held in types.items():
            leaves, _ = tree.flatten(held)
            for i, leaf in enumerate(leaves):
                seen.setdefault(f"{name}[{i}]" if len(leaves) > 1 else name, []).append(leaf)
    lines = [line for name, held in seen.items() if (line := _change(name, held))]
    return lines or ["the structure of the arguments, or what surrounds the calls"]


def _change(name: str, held: list[Any]) -> str:
    if all(isinstance(x, TensorType) for x in held):
        ranks = {len(x.shape) for x in held}
        if len(ranks) == 1:
            axes = [_few(f"axis {a} of {name}", [x.shape[a] for x in held]) for a in
                    range(ranks.pop())]
            kinds = _few(f"the type of {name}", [x.type for x in held])
            found = "; ".join(filter(None, [*axes, kinds]))
            return f"{found}   ({name} was {_type_text(held[0])}, is {_type_text(held[-1])})" \
                if found else ""
    return _few(name, held)


def _type_text(x: TensorType) -> str:
    return f"{x.type}{show_shape(x.shape)}"


def _few(what: str, values: Iterable[Any]) -> str:
    """`axis 0 of x: 33 different extents, 1, 2, 3 ...`; nothing when all are the same."""
    texts = list(dict.fromkeys(map(str, values)))
    if len(texts) < 2:
        return ""
    return f"{what} has {len(texts)} values: {', '.join(t[:40] for t in texts[:3])} ..."


__all__ = ["MOST", "RetracingWarning", "Signatures", "TELL_AFTER"]
