"""Small kernel programs: wrong ones with the error they must give, and right ones.

A program is text after `== name | code | fragment ; fragment ...`. The fragments stand in the
error's whole text, in any order; the line marked `#!` is the one the error must name. Programs of
correct.txt have a name only and check their result themselves.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELUDE = """import math
import numpy as np
import tessera as ts
from tessera import Tensor, bf16, f16, f32, f64, i32, i64, int8, kernel
tile = ts.tile
rng = np.random.default_rng(seed)
def floats(*shape): return rng.standard_normal(shape).astype(np.float32)
def halves(*shape): return ts.tensor(floats(*shape), "bf16")
x, y = floats(300), floats(300)
A, B, C = floats(70, 50), floats(50, 90), np.zeros((70, 90), np.float32)
"""


@dataclass(frozen=True)
class Program:
    file: str
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

    @property
    def path(self) -> str:
        return f"/kernels/{self.file}_{self.name.replace(' ', '_')}.py"

    def run(self, seed: int) -> dict[str, Any]:
        """Executes the program as a file whose text Python can show."""
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self.source), None, lines, self.path)
        names = {"__name__": "program", "__file__": self.path, "seed": seed}
        exec(compile(self.source, self.path, "exec"), names)
        return names


def read(file: str) -> list[Program]:
    """Programs of a file: separated by lines that begin with `== `."""
    programs = []
    text = "\n" + (Path(__file__).parent / f"{file}.txt").read_text()
    for block in text.split("\n== ")[1:]:
        head, body = block.split("\n", 1)
        name, code, fragments = ([part.strip() for part in head.split("|", 2)] + ["", ""])[:3]
        wanted = tuple(f.strip() for f in fragments.split(" ; ") if f.strip())
        programs.append(Program(file, name, code, wanted, body))
    return programs
