"""Rotary positions: each pair of a head's elements is turned by its position times a frequency."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..numerics import f32, f64, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .angles import TURN, turned_part
from .record import Benchmark, CompiledCall, Draw, KernelSample
from .routine import empty_like, reshaped, routine, type_of

INTEGERS = "int", "uint"
GROUPS = 1024  # about eight for each of 132 multiprocessors


@kernel
def cosine_and_sine(turns):
    """Of angles in turns, f64: what is left of whole turns is exact, so far positions keep their
    digits."""
    return turned_part(tile.cast(turns - tile.round(turns), f32))


@kernel
def turned(x, y, first, s, at, half, rate, BM, BZ):
    """Rows [s:s+BM] of matrices [first:first+BZ], turned to the positions `at` (BM,), whose sines
    and cosines they share. Other kernels call it."""
    frequency = tile.exp2(tile.cast(tile.arange(0, half), f64) * rate)      # base^(-i / half)
    c, d = cosine_and_sine(tile.cast(at, f64)[:, None] * frequency[None, :] * (1.0 / TURN))
    for z in range(first, min(first + BZ, x.shape[0])):
        a, b = tile.load(x[z, s:s+BM, 0:half]), tile.load(x[z, s:s+BM, half:2*half])
        y[z, s:s+BM, 0:half] = a * c - b * d
        y[z, s:s+BM, half:2*half] = b * c + a * d


@kernel(grid=lambda S, Z, BM, BZ: (-(-S // BM), -(-Z // BZ)))
def rotary(x: Tensor["Z", "S", "D"], y: Tensor["Z", "S", "D"], start: i32, half: int, rate: float,
           BM=16, BZ=4):
    s = tile.group_id(0) * BM
    turned(x, y, tile.group_id(1) * BZ, s, tile.arange(0, BM) + s + start, half, rate, BM, BZ)


@kernel(grid=lambda S, Z, BM, BZ: (-(-S // BM), -(-Z // BZ)))
def rotary_at(x: Tensor["Z", "S", "D"], y: Tensor["Z", "S", "D"], positions: Tensor["S"],
              half: int, rate: float, BM=16, BZ=4):
    s = tile.group_id(0) * BM
    turned(x, y, tile.group_id(1) * BZ, s, tile.load(positions[s:s+BM]), half, rate, BM, BZ)


def sharing(Z: int, S: int, BM: int) -> int:
    """How many matrices a group turns: as many as leave groups for every GPU."""
    BZ = 4
    while BZ > 1 and -(-S // BM) * -(-Z // BZ) < GROUPS:
        BZ //= 2
    return BZ


def reference(x: np.ndarray, base: float = 10000.0, positions: np.ndarray | None = None,
              start: int = 0) -> np.ndarray:
    h = x.shape[-1] // 2
    at = start + np.arange(x.shape[-2]) if positions is None else positions
    t = at[:, None] * base ** (-np.arange(h) / h)
    a, b = x[..., :h], x[..., h:]
    return np.concatenate([a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)], -1)


def _positions(n: int) -> Draw:
    return Draw((n,), "int32", lambda rng, shape: rng.integers(0, 5000, shape))


def _in_torch(torch: Any, x: Any) -> Any:
    """Compiled by PyTorch's own compiler; the angles are computed once."""
    S, h = x.shape[-2], x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(h, device=x.device, dtype=torch.float64) / h)
    t = torch.arange(S, device=x.device)[:, None] * rate
    c, d = t.cos().float(), t.sin().float()
    turn = torch.compile(lambda x: torch.cat([x[..., :h] * c - x[..., h:] * d,
                                              x[..., h:] * c + x[..., :h] * d], -1).to(x.dtype))
    return lambda: turn(x)


def in_ops(F: Any, x: Any, base: float = 10000.0, positions: Any = None, start: int = 0) -> Any:
    at = F.arange(start, start + x.shape[-2], dtype="int32") if positions is None else positions
    return F.rotary_embedding(x, base, at)


@routine(
    rotary, rotary_at, arrays="`[..., S, D]`", reference=reference, ops=in_ops,
    samples=(
        KernelSample("", ((2, 3, 50, 32),), options={"start": 100000}, terms=8),
        KernelSample("bf16", ((4, 33, 64),), "bf16", {"base": 500.0}, terms=2),
        KernelSample("of positions", ((2, 40, 16),), options={"positions": _positions(40)},
                     terms=8),
    ),
    variant=Schedule(m=16, warps=2),
    compiled=(
        CompiledCall("bf16", ((2, 512, 128),), "bf16", {"base": 2.0**6.4}),
        CompiledCall("of positions", ((2, 512, 128),), "bf16", {"base": 2.0**6.4,
                                                                "positions": _positions(512)}),
    ),
    benchmarks=(Benchmark("bf16[64, 4096, 128]", ((64, 4096, 128),), "bf16",
                          bytes=4 * 64 * 4096 * 128, beside=("torch.compile", _in_torch)),),
)
def rotary_embedding(run: Any, x: Any, *, base: float = 10000.0, positions: Any = None,
                     start: int = 0) -> Any:
    """(a, b) -> (a cos t - b sin t, b cos t + a sin t), t = position base^(-i / (D/2))

    x: [..., S, D], D even; a and b are the halves of the last axis, i counts within a half.
    y: same shape and type. positions: [S] integers, or start, start + 1, ... when None.
    Angles are f64 up to one turn, the rest f32; rounded once. Norms are kept up to rounding.
    Raises ShapeError, DTypeError. Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    shape = tuple(x.shape)
    if len(shape) < 2 or shape[-1] % 2:
        run.fail(f"x is {show_shape(shape)}", "[..., S, D] with an even D", ShapeError)
    dtype = type_of(x, "x").dtype
    if dtype.kind != "float" or dtype.bits > 32:
        run.fail(f"x is {dtype}", "a float of up to 32 bits", DTypeError)
    if positions is not None and (t := type_of(positions, "positions")).dtype.kind not in INTEGERS:
        run.fail(f"positions are {t}", "integers", DTypeError)
    if positions is not None and tuple(positions.shape) != shape[-2:-1]:
        run.fail(f"positions are {show_shape(tuple(positions.shape))}, x is {show_shape(shape)}",
                 "one for each row, [S]; ts.rotary_embedding takes [B, S] too", ShapeError)
    out = empty_like(x)
    if 0 in shape:
        return out
    half, flat = shape[-1] // 2, (math.prod(shape[:-2]), *shape[-2:])
    BM = run.size("m", 16)
    at = {"half": half, "rate": -math.log2(base) / half, "BM": BM,
          "BZ": sharing(flat[0], flat[1], BM)}
    if positions is None:
        run.run("rotary", reshaped(x, flat), reshaped(out, flat), int(start), **at)
    else:
        run.run("rotary_at", reshaped(x, flat), reshaped(out, flat), positions, **at)
    return out
