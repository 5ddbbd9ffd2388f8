"""How reproducible what runs on a GPU is, and how exact its maths: `ts.determinism`.

The interpreter and the CPU's loops are the same in every mode: they define what a kernel computes.
"""

from __future__ import annotations

from tessera import config, hooks
from tessera.tile.ir.modes import FAST_MATH, ORDERED


def determinism(mode: str) -> config.Switch:
    """A call, which holds until the next one, or a block: `with ts.determinism("fast"): step(x)`.

    "default"  compiled functions give the same bits for the same inputs on the same GPU; of sums by
        atomics in kernels of your own the order is not known
    "fast"     functions may add slices by atomics in any order, and kernels and functions take the
        hardware's approximations for divisions, roots and functions of f32: docs/reference/gpu.md
        says which, and how far they are off
    "strict"   as "default", and a kernel that adds floats by atomics is an error
    It is for what runs on GPUs. What was compiled under one mode is kept for it alone, and the mode
    stands in the IR and its hash. TESSERA_DETERMINISM sets it for a program.
    Raises ArgumentError for another mode.
    """
    return config.Switch(determinism=mode)


def modes(fast_math: bool) -> tuple[str, ...]:
    """The modes of a kernel that is traced now. fast_math: what it asks for itself."""
    fast = fast_math or config.determinism == "fast"
    return (FAST_MATH,) * fast + (ORDERED,) * (config.determinism == "strict")


hooks.surroundings.append(lambda: config.determinism)

__all__ = ["determinism", "modes"]
