"""A compiled function at its four levels, side by side: Graph, Schedule, Tile, Target.

The levels share op ids: `%3` of the graph is `v3` in the kernels, and every line below the graph
says which op it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import compress, zip_longest
from typing import Any

from ..errors import TesseraError
from ..graph import jit
from ..graph.ir import Graph
from ..graph.traced_signature import TracedSignature
from ..lazy_dataclass import dataclass

LEVELS = ("graph", "schedule", "tile", "target")
WIDTH = 160  # columns of the listing


@dataclass(frozen=True)
class LevelText:
    """The text of one level. links: the user's `file:line` of each line, "" where there is none.

    missing: why there is no text, and what to do.
    """

    level: str
    lines: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    missing: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Level(LevelText):
    """The text of one level of a graph. ops: of each line, the ids of the ops that it does."""

    ops: tuple[tuple[str, ...], ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """Ids of all ops that some line does."""
        return frozenset(i for ids in self.ops for i in ids)


def lines_of(sections: Mapping[str, LevelText], link: str) -> dict[str, tuple[str, ...]]:
    """What a line of the user's became, by level."""
    return _chosen(sections, lambda s: [at == link for at in s.links])


def _chosen(sections: Mapping[str, Any], which: Callable[[Any], list[bool]]
            ) -> dict[str, tuple[str, ...]]:
    """Lines by level, of those that have some."""
    found = {level: tuple(t.strip() for t in compress(s.lines, which(s)))
             for level, s in sections.items()}
    return {level: lines for level, lines in found.items() if lines}


@dataclass(frozen=True)
class FunctionLowering:
    """A function at its levels: `.sections["tile"].text`, `.op("%3")`, `.of("model.py:12")`.

    fates: what became of each op of the graph, its group or why it needs none. As text: op by op,
    the four levels beside each other.
    """

    name: str
    sections: dict[str, Level]
    fates: dict[str, str]

    def op(self, id: str) -> dict[str, tuple[str, ...]]:
        """The lines of an op, by level."""
        return _chosen(self.sections, lambda s: [id in ids for ids in s.ops])

    def of(self, link: str) -> dict[str, tuple[str, ...]]:
        """What a line of the user's became, by level."""
        return lines_of(self.sections, link)

    def __str__(self) -> str:
        return self.side_by_side()

    def side_by_side(self, width: int = WIDTH) -> str:
        """The four levels in columns, op by op; what does not fit its column is cut."""
        column = max(12, width // len(self.sections) - 3)
        lines = [f"lowering of {self.name}: {' | '.join(self.sections)}"]
        lines += [f"{s.level}: {s.missing}" for s in self.sections.values() if s.missing]
        for id in self._in_order():
            lines.append(f"{id}  {self.fates.get(id, '')}".rstrip())
            cells = [list(self._own(s, id)) for s in self.sections.values()]
            lines += ["  " + " | ".join(_cell(c, column) for c in row).rstrip(" |")
                      for row in zip_longest(*cells, fillvalue="")]
        return "\n".join(lines)

    def _in_order(self) -> list[str]:
        return list(dict.fromkeys(i for ids in self.sections["graph"].ops for i in ids))

    def _own(self, section: Level, id: str) -> Iterator[str]:
        """The lines that an op is named by: one that does several stands with the last of them."""
        for text, ids in zip(section.lines, section.ops, strict=True):
            if ids and ids[-1] == id:
                yield _bare(text)


def _bare(text: str) -> str:
    """A line without its marks and indentation."""
    return re.split(r"\s+(?://|#) (?:%|!|g\d|\S*:\d)", text.strip())[0]


def _cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[:width - 1] + "…"


def function_lowering(fn: jit.JitFunction, traced: TracedSignature,
                      target: str | None = None) -> FunctionLowering:
    """The levels of one traced signature; target: 'sm_90a', ...; no GPU is needed."""
    graph = traced.graph
    sections = {"graph": _graph_level(graph)}
    try:
        from ..graph.cuda.levels import LEVELS as LOWERED
        from ..graph.cuda.levels import program_of

        program = program_of(graph, target)
        fates = dict(program.plan.fates)
        for level in LEVELS[1:]:
            made = LOWERED[level](program)
            sections[level] = Level(level, tuple(x.text for x in made),
                                    tuple(_link(x.text) for x in made),
                                    ops=tuple(x.ops for x in made))
    except TesseraError as error:
        at = f" at {error.where}" if error.where is not None else ""
        reason = error.message + at + (f"; {error.hint}" if error.hint else "")
        missing = {level: Level(level, missing=reason) for level in LEVELS if level not in sections}
        return FunctionLowering(fn.name, sections | missing, {})
    return FunctionLowering(fn.name, sections, fates)


def _graph_level(graph: Graph) -> Level:
    """The Graph IR; its own numbers are the ids."""
    nodes = iter(graph.nodes)
    lines = tuple(str(graph).splitlines())
    ops: list[tuple[str, ...]] = []
    first = 1 + len(graph.inputs) + len(graph.captures)
    for i, text in enumerate(lines):
        mine = re.match(r"  (%\d+): ", text) if i >= first else None
        ops.append((mine[1],) if mine and next(nodes, None) is not None else ())
    return Level("graph", lines, tuple(map(_link, lines)), ops=tuple(ops))


def _link(text: str) -> str:
    """`file:12` of a line that ends in `# %3 file:12` or `# file:12  the line`."""
    found = re.search(r"\s{2,}(?:#|//) (?:%\d+ )?(\S+:\d+)(?:  .*)?$", text)
    return found[1] if found else ""


__all__ = ["FunctionLowering", "Level", "LevelText", "function_lowering", "lines_of"]
