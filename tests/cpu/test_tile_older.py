"""What stands for an instruction that old targets lack gives what the instruction gives."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import Block, Builder, register
from tessera.errors import ArgumentError
from tessera.tile.cuda.instruction import OTHERWISE, otherwise
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics import older_targets

NAMES = ("f32_max_nan", "f32_min_nan",
         *(f"{what}_bf16_{how}" for what in ("to", "pack") for how in ("rn", "rz")),
         "pack_f16_rn", "pack_f16_rz")


def floats(rng, n: int) -> np.ndarray:
    """All magnitudes, ties between bf16 and between f16 numbers, and the special ones."""
    any_bits = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    ties = (rng.integers(0, 2**16, n).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    f16 = (1 + (2 * rng.integers(0, 1024, n) + 1) / 2048) * np.exp2(rng.integers(-26, 17, n))
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 65504, 65520, 2.0**-149,
                      2.0**-25, -1.0], np.float32)
    return np.concatenate([any_bits, ties, f16.astype(np.float32), np.tile(edges, n)])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_the_instruction(name, rng):
    x = floats(rng, 3000)
    args = [register(x), register(rng.permutation(x))][:len(find_instruction(name).args)]
    if find_instruction(name).args[0].kind == "i32":
        args = [v.view(np.int32) for v in args]
    b = Builder(Block(x.size))
    with np.errstate(all="ignore"):
        want = np.asarray(b.call(find_instruction(name), *args))
        got = np.asarray(OTHERWISE[name](b, *args))
    if want.dtype.kind == "f":
        bits = got.view(np.uint32) == want.view(np.uint32)
        assert np.where(np.isnan(want), np.isnan(got), bits).all()
        return
    for shift in (0, 16):  # NaN stays NaN, perhaps with another payload
        a, z = (v >> shift & 0xFFFF for v in (got, want))
        most = 0x7F80 if "bf16" in name else 0x7C00
        nan = ((a & 0x7FFF) > most) & ((z & 0x7FFF) > most)
        wrong = (a != z) & ~nan
        at = int(np.argmax(wrong))
        assert not wrong.any(), f"{[float(v[at]) for v in args]}: {a[at]:#x}, not {z[at]:#x}"


def test_every_instruction_that_has_one_is_here():
    assert set(OTHERWISE) == set(NAMES)
    with pytest.raises(ArgumentError, match="'f32_max_nan' is declared twice"):
        otherwise("f32_max_nan")(older_targets._extreme)
