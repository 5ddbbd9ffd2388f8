"""Sine and cosine of angles in turns, for kernels of the library."""

from __future__ import annotations

import math

from ..numerics import i32
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

TURN = 2.0 * math.pi
# Up to an eighth of a turn, within 2^-25 (Cephes 2.8, sinf.c and cosf.c).
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


@kernel
def turned_part(part):
    """Cosine and sine of turns in [-1/2, 1/2], f32, without a branch."""
    quarter = tile.round(part * 4.0)
    u = (part - quarter * 0.25) * TURN                     # [-pi/4, pi/4]
    q, v = tile.cast(quarter, i32), u * u
    sine = u + u * v * ((SINE[0] * v + SINE[1]) * v + SINE[2])
    cosine = 1.0 - 0.5 * v + v * v * ((COSINE[0] * v + COSINE[1]) * v + COSINE[2])
    odd = (q & 1) == 1
    c, s = tile.where(odd, sine, cosine), tile.where(odd, cosine, sine)
    return tile.where(((q + 1) & 2) == 2, -c, c), tile.where((q & 2) == 2, -s, s)


__all__ = ["TURN", "turned_part"]
