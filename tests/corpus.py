"""Small programs in text files, each with the error that it must give, or right ones.

A program is text after `== name | code | fragment ; fragment ...`. The fragments stand in the
error's whole text, in any order; the line marked `#!` is the one the error must name. A right one
has a name only, and checks its result itself.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Program:
    """folder, file: where it is written. prelude: what stands before the body."""

    folder: str
    file: str
    name: str
    code: str
    fragments: tuple[str, ...]
    prelude: str
    body: str

    @property
    def source(self) -> str:
        return self.prelude + self.body

    @property
    def line(self) -> int:
        lines = self.source.splitlines()
        (marked,) = [i for i, text in enumerate(lines, 1) if text.endswith("#!")]
        return marked

    @property
    def path(self) -> str:
        """Under which Python shows its lines."""
        return f"/{self.folder}/{self.file}_{self.name.replace(' ', '_')}.py"

    def run(self, seed: int) -> dict[str, Any]:
        """Executes the program as a file whose text Python can show."""
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self.source), None, lines, self.path)
        names = {"__name__": "program", "__file__": self.path, "seed": seed}
        exec(compile(self.source, self.path, "exec"), names)
        return names


def programs_of(file: Path, prelude: str) -> list[Program]:
    """Programs of a file: separated by lines that begin with `== `."""
    programs = []
    for block in ("\n" + file.read_text()).split("\n== ")[1:]:
        head, body = block.split("\n", 1)
        name, code, fragments = ([part.strip() for part in head.split("|", 2)] + ["", ""])[:3]
        wanted = tuple(f.strip() for f in fragments.split(" ; ") if f.strip())
        programs.append(Program(file.parent.name, file.stem, name, code, wanted, prelude, body))
    return programs
