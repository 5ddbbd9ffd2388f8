"""What is done to PTX as text: plain names, the user's lines, and the figures tests assert on."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .instruction import mnemonics

# (the user's file, line) of a line of the emitted source
LineMap = Mapping[int, tuple[str, int]]


def entry_name(ptx: str) -> str:
    """The symbol of the one kernel in a text."""
    (name,) = re.findall(r"\.entry\s+([\w$]+)", ptx)
    return name


def normalised_ptx(ptx: str, name: str) -> str:
    """PTX whose kernel is called `name`, without the front end's stamps.

    Mangled names count the functions compiled before them, so they differ from process to process:
    renaming makes equal kernels equal text (the cache's key) and profilers show the user's name.
    """
    text = ptx.replace(entry_name(ptx), name)
    text = re.sub(r"^\.common \.global \.align 8 \.u64 _ZN08NumbaEnv\w+;\n", "", text, flags=re.M)
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("//")]
    return "\n".join(lines).strip() + "\n"


def relocate(ptx: str, emitted: str, lines: LineMap) -> str:
    """Line information that names the user's files, where the emitted line has one.

    `.loc` with the emitted file and line becomes one with the user's; new `.file` entries are
    appended. A line without an origin keeps pointing into the emitted source.
    """
    files = {path: int(n) for n, path in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', ptx, re.M)}
    if emitted not in files:
        return ptx
    known = dict(files)

    def loc(found: re.Match[str]) -> str:
        origin = lines.get(int(found[2]))
        if int(found[1]) != files[emitted] or origin is None:
            return found[0]
        number = files.setdefault(origin[0], max(files.values()) + 1)
        return f".loc\t{number} {origin[1]} {found[3]}"

    text = re.sub(r"\.loc\s+(\d+) (\d+) (\d+)", loc, ptx)
    new = [f'\t.file\t{n} "{path}"' for path, n in files.items() if path not in known]
    return "\n".join([text.rstrip(), *new, ""]) if new else text


def opcode_counts(ptx: str) -> dict[str, int]:
    """How often each opcode stands in a PTX text."""
    counts: dict[str, int] = {}
    for line in ptx.splitlines():
        for opcode in mnemonics(line):
            counts[opcode] = counts.get(opcode, 0) + 1
    return counts
