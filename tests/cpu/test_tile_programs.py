"""Random kernels of tiles in emulated machine instructions, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import compare
from kernels.build import build
from tile_programs import TYPES, tile_program


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("part", range(3))
def test_random_kernels(part: int, target: str, rng: np.random.Generator) -> None:
    """Bit by bit. A failure prints its kernel; `--seed` draws others."""
    for seed in rng.integers(0, 2**63, 4):
        text, arguments = tile_program(np.random.default_rng(seed))
        print(f"--- kernel {seed}\n{text}")
        compare(build(text, **TYPES)["k"], *arguments, lanes=int(rng.choice([32, 64, 128, 256])),
                target=target, rtol=0.0, atol=0.0)


def test_random_kernels_use_most_of_the_language() -> None:
    texts = [tile_program(np.random.default_rng(seed))[0] for seed in range(60)]
    for word in ("row_sum", "col_max", "argmin", "cumsum", "tile.sort(", "tile.argsort(",
                 "tile.transpose(tile.transpose(", "dot",
                 "gather", "inside", "tile.where((", "for j", "if m", "[None, :]", "[:, None]"):
        assert any(word in text for text in texts), word
