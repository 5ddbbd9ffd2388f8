"""Random kernels give the same results under the interpreter and on the GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from gpu_harness import require_gpu
from kernels.build import build
from tessera.tile.ir.errors import TileError
from tile_gpu import compare

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from test_tile_passes import HEAD, TAIL, block, indent  # noqa: E402

require_gpu()
PARTS, EACH = 16, 20


def exact(line: str) -> str:
    """The line, with maths of lane values that is exact everywhere: control flow depends on it, and
    an error in the last place would decide a comparison."""
    return line if re.match(r"\s*[pq] =", line) else line.replace("tile.tanh(", "tile.abs(")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_agree(part):
    @settings(max_examples=EACH, phases=[Phase.generate], deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(block())
    def agree(lines):
        source = HEAD + "\n".join(indent([exact(x) for x in lines])) + "\n" + TAIL
        kernel = build(source)["k"]
        rng = np.random.default_rng(3)
        x = rng.integers(-8, 9, 300).astype(np.float32) / 4
        a = rng.standard_normal((8, 8)).astype(np.float32)
        try:
            compare(kernel, x, a, np.zeros(300, np.float32), np.zeros((8, 8), np.float32),
                    rtol=2e-3, atol=1e-3)
        except TileError as error:  # two edges that differ meet: refused in words
            assume(error.code != "E_EDGE")
            raise
        except AssertionError as error:
            raise AssertionError(f"{error}\n{source}") from error

    agree()
