"""Reading and running the pages of the guide: README.md, CONTRIBUTING.md and docs/**/*.md.

    ```python            runs; all blocks of a page share one namespace, as if pasted into one file
    ```python nan.py     is written to that file instead
    ```python compiler   runs where the GPU compiler is installed, and is left out elsewhere
    ```python gpu        runs where a GPU, the compiler and PyTorch are, and is left out elsewhere
    ```python onnx       runs where the onnx package is, and is left out elsewhere
    ```sh run            runs in the folder of those files
    ```sh mpi            the same where mpirun and mpi4py are, and is left out elsewhere
    ```text              right behind one of these: what it prints, compared. `...` stands for any
                         text of a line, alone on a line for any lines
    <!-- table: NAME -->  ...  <!-- end -->    holds a table of guide_tables.py

TESSERA_ACCEPT=1 writes what was printed, and the tables as they are now, into the pages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.launch import ALLOW, MPIRUN

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ACCEPT = os.environ.get("TESSERA_ACCEPT", "") == "1"

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.M | re.S)
TABLE = re.compile(r"(<!-- table: (?P<name>[\w -]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.S)
HEADING = re.compile(r"^(#+) (.+)$", re.M)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
COMPILER, GPU = ("python", "compiler"), ("python", "gpu")
MPI, ONNX = ("sh", "mpi"), ("python", "onnx")
EXAMPLE = "example.py"  # the file that the blocks of a page are lines of, in messages


@dataclass(frozen=True)
class Block:
    """A fenced block: the words behind the fence, its text and where that text lies in the page."""

    words: tuple[str, ...]
    text: str
    start: int
    end: int
    line: int

    @property
    def kind(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def runs(self) -> bool:
        """Whether it prints something here: Python that is not written to a file, or a command."""
        return self.words in (("python",), ("sh", "run")) or (
            self.words == COMPILER and has_compiler()) or (self.words == GPU and has_gpu()) or (
            self.words == MPI and has_mpi()) or (
            self.words == ONNX and importlib.util.find_spec("onnx") is not None)


@dataclass(frozen=True)
class Printed:
    """What a block printed, and the `text` block behind it, if there is one."""

    block: Block
    got: str
    expected: Block | None


@functools.cache
def has_compiler() -> bool:
    """Whether Numba-CUDA and ptxas are here: they compile for GPUs without one."""
    from tessera.errors import UnsupportedTargetError
    from tessera.runtime.ptxas import assembler

    try:
        assembler()
        importlib.import_module("tessera.tile.cuda.numba_gate")
    except UnsupportedTargetError:
        return False
    return True


@functools.cache
def has_gpu() -> bool:
    """Whether kernels run on a GPU here, on PyTorch's arrays."""
    from tessera.runtime import device

    if importlib.util.find_spec("torch") is None or not (has_compiler() and device.has_gpu()):
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


@functools.cache
def has_mpi() -> bool:
    """Whether mpirun and mpi4py are here."""
    return importlib.util.find_spec("mpi4py") is not None and MPIRUN is not None


def blocks_of(page: str) -> list[Block]:
    return [
        Block(tuple(m["info"].split()), m["text"], m.start("text"), m.end("text"),
              page.count("\n", 0, m.start("text")) + 1)
        for m in FENCE.finditer(page)
    ]


def without_blocks(page: str) -> str:
    """The prose: fenced blocks blanked out, line numbers kept."""
    return FENCE.sub(lambda m: "\n" * m[0].count("\n"), page)


def headings(page: str) -> list[tuple[int, str]]:
    return [(len(m[1]), m[2].strip()) for m in HEADING.finditer(without_blocks(page))]


def anchor(heading: str) -> str:
    """The name under which a heading can be linked, as GitHub and GitLab make it."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
    return kept.strip().replace(" ", "-")


def links(page: str) -> list[str]:
    """Where the page's links lead; what stands in code is none."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "code", without_blocks(page)))


def run_page(page: str, folder: Path) -> Iterator[Printed]:
    """Runs the blocks of a page in order, in the current directory `folder`."""
    blocks = blocks_of(page)
    space: dict = {"__name__": "__main__"}
    source = ""
    for i, block in enumerate(blocks):
        if block.kind == "python" and len(block.words) == 2 and block.words not in (
                COMPILER, GPU):
            (folder / block.words[1]).write_text(block.text)
        first = source.count("\n")
        if block.words in (("python",), COMPILER, GPU):  # its lines count, also when it is left out
            source += block.text + "\n"
        if not block.runs:
            continue
        if block.kind == "sh":
            got = run_command(block.text, folder)
        else:
            got = run_python(block.text, source, first, space)
        yield Printed(block, got, text_behind(page, blocks, i))


def text_behind(page: str, blocks: list[Block], i: int) -> Block | None:
    """The next block when it is a `text` block with nothing but empty lines before it."""
    if i + 1 == len(blocks) or blocks[i + 1].kind != "text":
        return None
    between = page[blocks[i].end:blocks[i + 1].start]
    return blocks[i + 1] if between.split() == ["```", "```text"] else None


def run_python(text: str, source: str, first: int, space: dict) -> str:
    """What the block prints. `source` is the page's Python so far, for messages that quote it."""
    linecache.cache[EXAMPLE] = (len(source), None, source.splitlines(keepends=True), EXAMPLE)
    code = compile("\n" * first + text, EXAMPLE, "exec", dont_inherit=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, space)  # noqa: S102  the guide's own text
    return out.getvalue()


def run_command(text: str, folder: Path) -> str:
    """Standard output and error of shell lines; `python` is the one that runs the tests."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path} | ALLOW
    done = subprocess.run(["sh", "-c", text], cwd=folder, env=env, text=True, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout


def agrees(got: str, expected: str) -> bool:
    """Whether the text is as printed; `...` stands for anything."""
    lines = []
    for line in tidy(expected):
        if line == "...":
            lines.append(r"(?:[^\n]*\n)*?")
        else:
            lines.append(r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n")
    return re.fullmatch("".join(lines), "".join(f"{line}\n" for line in tidy(got))) is not None


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").split("\n")]


def with_texts_of(page: str, printed: list[Printed]) -> list[Printed]:
    """The same outputs beside the text blocks that a rewritten page has."""
    blocks = blocks_of(page)
    places = [i for i, b in enumerate(blocks) if b.runs]
    return [Printed(p.block, p.got, text_behind(page, blocks, i))
            for p, i in zip(printed, places, strict=True)]


def stands_for_text(p: Printed) -> bool:
    """Whether some `...` of the expected text is not printed itself, line numbers apart."""
    lines = {re.sub(r"\d+", "0", line) for line in tidy(p.got)}
    return p.expected is not None and any(
        "..." in line and re.sub(r"\d+", "0", line) not in lines for line in tidy(p.expected.text))


def accepted(page: str, printed: list[Printed]) -> str:
    """The page with each text block as printed. One with `...` that disagrees stays as it is, but
    where the dots are printed too, as those of a hint are."""
    for p in reversed(printed):
        if p.expected is None or agrees(p.got, p.expected.text) or stands_for_text(p):
            continue
        page = page[:p.expected.start] + "\n".join(tidy(p.got)) + "\n" + page[p.expected.end:]
    return page
