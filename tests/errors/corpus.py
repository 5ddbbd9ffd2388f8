"""Small wrong programs with the error each must give (corpus.py)."""

from __future__ import annotations

from pathlib import Path

from corpus import programs_of

PRELUDE = "import numpy as np\nimport tessera as ts\nfrom tessera import Tensor\n"
PROGRAMS = [program for file in sorted(Path(__file__).parent.glob("*.txt"))
            for program in programs_of(file, PRELUDE)]
