"""The corpus: small wrong programs with the error each must give.

A program is text after `name | code | fragment ; fragment ...`. The fragments stand in the error's
whole text, in any order; the line marked `#!` is the one the error must name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PRELUDE = "import numpy as np\nimport tessera as ts\nfrom tessera import Tensor\n"


@dataclass(frozen=True)
class Program:
    name: str
    code: str
    fragments: tuple[str, ...]
    body: str

    @property
    def source(self) -> str:
        return PRELUDE + self.body

    @property
    def line(self) -> int:
        lines = self.source.splitlines()
        (marked,) = [i for i, text in enumerate(lines, 1) if text.endswith("#!")]
        return marked


def read(text: str) -> list[Program]:
    """Programs of a file: separated by lines that begin with `== `."""
    programs = []
    for block in text.split("\n== ")[1:]:
        head, body = block.split("\n", 1)
        name, code, fragments = (part.strip() for part in head.split("|", 2))
        programs.append(Program(name, code, tuple(f.strip() for f in fragments.split(" ; ")), body))
    return programs


PROGRAMS = [
    program
    for file in sorted(Path(__file__).parent.glob("*.txt"))
    for program in read("\n" + file.read_text())
]
