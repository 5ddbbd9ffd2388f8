"""Running the snippets of the source documents as printed."""

from __future__ import annotations

import linecache

PREAMBLE = """\
import math
from math import sqrt
import tessera
import tessera as ts
from tessera import *
"""


def run(snippet: str, **names: object) -> dict:
    """The namespace after the preamble, then these names, then the snippet. The snippet does not
    inherit the caller's postponed annotations: it evaluates its own, as in a script. Kernels read
    their source through linecache."""
    file = f"<snippet {hash(snippet):x}>"
    linecache.cache[file] = (len(snippet), None, snippet.splitlines(keepends=True), file)
    space: dict = {"__name__": "snippet"}
    exec(compile(PREAMBLE, "preamble", "exec", dont_inherit=True), space)
    space.update(names)
    exec(compile(snippet, file, "exec", dont_inherit=True), space)
    return space
