"""A kernel at all its levels, line by line beside the user's source; and `ts.debug.lowering`, which
shows compiled functions too (function_lowering.py)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ArgumentError, TesseraError, short_path, user_line
from ..graph import jit
from ..graph.signature import callable_name
from ..lazy_dataclass import dataclass
from ..runtime.ptxas import sass
from ..tile.ir.ir import Function
from ..tile.ir.printing import print_ir
from ..tile.kernel.kernel import Kernel
from .function_lowering import FunctionLowering, LevelText, function_lowering, lines_of

TITLES = {"source": "Source", "graph": "Graph IR", "schedule": "Schedule", "tile": "Tile IR",
          "target": "Target source", "ptx": "PTX", "sass": "Machine code (SASS)"}


@dataclass(frozen=True)
class Lowering:
    """A function at all its levels: `.sections["tile"].text`, and `.of("kernels.py:12")`.

    As text: each line of the source with what became of it.
    """

    name: str
    sections: dict[str, LevelText]

    def of(self, link: str) -> dict[str, tuple[str, ...]]:
        """What a line of the user's became, by level."""
        return lines_of(self.sections, link)

    def __str__(self) -> str:
        lines = [f"lowering of {self.name}: {', '.join(self.sections)}"]
        lines += [f"{s.level}: {s.missing}" for s in self.sections.values() if s.missing]
        for link in self._links():
            became = self.of(link)
            source = became.pop("source", ("",))[0]
            lines.append(f"{link}  {source}".rstrip())
            for level, texts in became.items():
                shown = texts if level not in ("ptx", "sass") else (f"{len(texts)} lines",)
                lines += [f"  {level if i == 0 else '':8s} {_bare(t)}" for i, t in enumerate(shown)]
        return "\n".join(lines)

    def _links(self) -> list[str]:
        """Those of the lowered levels: the source's lines first, then those of helpers."""
        lowered = {link for level, s in self.sections.items() if level != "source"
                   for link in s.links if link}
        source = self.sections["source"].links if "source" in self.sections else ()
        return [x for x in source if x in lowered] + sorted(lowered - set(source), key=_number)


def _number(link: str) -> tuple[str, int]:
    file, _, line = link.rpartition(":")
    return file, int(line)


def _bare(text: str) -> str:
    """A line without the mark of where it came from, which stands above it."""
    return re.split(r"\s+(?://|#) \S*\d+(?::|$|  )", text)[0]


def lowering(fn: Any, *args: Any, target: str | None = None, **kwargs: Any
             ) -> Lowering | FunctionLowering:
    """A kernel or compiled function at all its levels, each line linked to the user's.

    A kernel has source, schedule, tile, target, ptx and sass. A @ts.jit function has graph,
    schedule, tile and target, which share the ids of its ops; print() shows them side by side.
    Arguments as in a call; without them the last one counts. target: 'sm_80', 'sm_90a', ...; no
    GPU is needed. What cannot be shown here says why in `.missing`.
    """
    if isinstance(fn, Kernel):
        function = fn.lower(*args, **kwargs) if args or kwargs or fn.last is None else fn.last
        return Lowering(fn.__name__, kernel_sections(fn, function, target))
    if not isinstance(fn, jit.JitFunction):
        raise ArgumentError(f"{callable_name(fn)} is neither a kernel nor compiled",
                            hint="decorate it with @ts.kernel or @ts.jit", where=user_line())
    traced = fn.traced(*args, **kwargs) if args or kwargs else fn._last_traced()
    return function_lowering(fn, traced, target)


def kernel_sections(kernel: Kernel, function: Function, target: str | None) -> dict[str, LevelText]:
    """All levels of a kernel's specialisation."""
    found = _source(kernel.fn)
    found["schedule"] = _unlinked_text("schedule", kernel.schedule.explained())
    found["tile"] = _commented("tile", print_ir(function), "//")
    try:
        from ..tile.launch.levels import compiled_for

        compiled = compiled_for(kernel, function, target)
    except TesseraError as error:
        reason = error.message + (f"; {error.hint}" if error.hint else "")
        return found | {level: LevelText(level, missing=reason) for level in
                        ("target", "ptx", "sass")}
    return found | {"target": target_section(compiled), "ptx": ptx_section(compiled),
                    "sass": sass_section(compiled)}


# --- the levels -------------------------------------------------------------------------------
def _unlinked_text(level: str, text: str) -> LevelText:
    lines = tuple(text.rstrip("\n").splitlines())
    return LevelText(level, lines, ("",) * len(lines))


def _source(fn: Callable) -> dict[str, LevelText]:
    try:
        lines, first = inspect.getsourcelines(fn)
    except (OSError, TypeError):  # a function without source, as in exec
        return {}
    file = short_path(fn.__code__.co_filename)
    links = tuple(f"{file}:{first + i}" for i in range(len(lines)))
    return {"source": LevelText("source", tuple(x.rstrip("\n") for x in lines), links)}


def _commented(level: str, text: str, mark: str) -> LevelText:
    """For a text whose lines end in `// file:12` or `# file:12  the line`."""
    found = re.compile(rf"\s{{2,}}{mark} (\S+:\d+)(?:  .*)?$")
    lines = tuple(text.rstrip("\n").splitlines())
    hits = [found.search(line) for line in lines]
    return LevelText(level, lines, tuple(h[1] if h else "" for h in hits))


def target_section(compiled: Any) -> LevelText:
    """The emitted source, below what the compiler decided."""
    notes = [f"# {note}" for note in compiled.notes]
    lines = [*notes, *compiled.source.rstrip("\n").splitlines()]
    links = [_link(compiled, compiled.built.file, i - len(notes) + 1) for i in range(len(lines))]
    return LevelText("target", tuple(lines), tuple(links))


def _link(compiled: Any, file: str, line: int) -> str:
    """The user's line for a line of a file that the compiler has seen."""
    users = compiled.emitted.lines
    if file == compiled.built.file:
        file, line = users.get(line, ("", 0))
    return f"{short_path(file)}:{line}" if file in {f for f, _ in users.values()} else ""


def ptx_section(compiled: Any) -> LevelText:
    """Instructions belong to the .loc before them."""
    text = compiled.built.ptx
    files = {n: path for n, path in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', text, re.M)}
    lines = tuple(text.rstrip("\n").splitlines())
    return LevelText("ptx", lines, tuple(_located(compiled, lines, files)))


def _located(compiled: Any, lines: tuple[str, ...], files: dict[str, str]) -> Iterator[str]:
    link = ""
    for line in lines:
        if places := re.findall(r"(?:\.loc|inlined_at)\s+(\d+) (\d+)", line):
            number, at = places[-1]  # the outermost call
            link = _link(compiled, files.get(number, ""), int(at)) or link
        elif line.startswith("}"):
            link = ""
        yield link if line.startswith(("\t", " ")) else ""


def sass_section(compiled: Any) -> LevelText:
    """Machine code; the assembler's line numbers become links and leave the text."""
    try:
        text = sass(compiled.built.kernel.cubin, lines=True)
    except TesseraError as error:
        return LevelText("sass", missing=error.message + (f"; {error.hint}" if error.hint else ""))
    lines, links, link = [], [], ""
    for line in text.rstrip("\n").splitlines():
        if places := re.findall(r'(?:File|inlined at) "([^"]*)", line (\d+)', line):
            link = _link(compiled, places[-1][0], int(places[-1][1])) or link
            continue
        lines.append(line)
        links.append(link if line.lstrip().startswith("/*") else "")
    return LevelText("sass", tuple(lines), tuple(links))


__all__ = ["TITLES", "Lowering", "LevelText", "kernel_sections", "lowering"]
