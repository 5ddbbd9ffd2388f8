"""Matmuls with weights of 4 and 6 bits, packed as tensors keep them: y = x W' for few rows of x."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..lazy_dataclass import dataclass
from ..numerics import NumericType, as_type, f16, f32
from ..numerics.packed_order import order_of
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .record import CompiledCall, Draw, KernelSample
from .routine import empty_like, routine, type_of


@kernel
def packed_nt(X: Tensor["M", "K"], W: Tensor["N", "K"], S: Tensor["N", f32] | None,
              D: Tensor["M", "N"], BM=16, BN=64, BK=512, RESIDENT=1,
              STREAMED=False, AHEAD=0, DIVIDED=1):
    """Rows of weights are those of the matmul, rows of x its columns: weights are the many.
    RESIDENT, STREAMED, AHEAD, DIVIDED: of the form of warpgroups that specialise."""
    tile.grid_dependency_wait()
    tile.launch_dependents()
    depth = min(BK, K)
    acc = tile.zeros((BN, BM))
    for k in range(0, K, depth):
        w = tile.cast(tile.load(W[tile_n:tile_n+BN, k:k+depth]), X.dtype)
        acc = tile.dot(w, tile.load(X[tile_m:tile_m+BM, k:k+depth]).T, acc)
    if S is not None:
        acc = acc * tile.load(S[tile_n:tile_n+BN])[:, None]
    D[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc.T


@kernel
def as_halves(X: Tensor["R", "C"], Y: Tensor["R", "C", f16], BR=4, BC=1024):
    Y[tile_r:tile_r+BR, tile_c:tile_c+BC] = tile.load(X[tile_r:tile_r+BR, tile_c:tile_c+BC])


def reference(x: np.ndarray, w: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    y = x @ np.asarray(w, np.float64).T
    return y if scale is None else y * scale


def in_ops(F: Any, x: Any, w: Any, scale: Any = None) -> Any:
    y = F.matmul(F.cast(x, f32), F.transpose(F.cast(w, f32)))
    return F.cast(y if scale is None else y * scale, result_type(x.type))


TAKES = ("bf16", "f16", "fp8_e4m3")  # of x: all numbers of weights are numbers of these
GROUPS = 128  # that a GPU should have to read from memory at its speed
MOST_ROWS = 64  # of x, in a group
RESIDENT_ROWS = 16  # of x of 8 bits, up to which two groups share a multiprocessor
AHEAD = 4  # steps whose weights of 4 bits come early, where no group has begun by then
MANY_AHEAD = 2  # the same of floats beside 16 rows of 16 bits and more, whose x comes behind them
PAIR_COLUMNS, PAIR_DEPTH = 128, 256  # of a group whose steps two blocks share
PAIR_ROWS = {4: 64, 6: 32}  # of x of 16 bits, from which on: beside codes in registers' order
LAID_DEPTH = 512  # of a step of weights that lie as registers have them, or half of it
FEW_ROWS = 16  # of 8 bits, which warps multiply by themselves; more become f16 for warpgroups


def numbers(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def integers(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-8, 8, shape).astype(np.int8)


@routine(
    packed_nt, as_halves, arrays="`[M, K]`, `[N, K]`, `[N]`", reference=reference, ops=in_ops,
    samples=(
        KernelSample("fp4", ((3, 192), Draw((70, 192), "fp4_e2m1", numbers)), "bf16", terms=8),
        KernelSample("fp6", ((17, 128), Draw((64, 128), "fp6_e3m2", numbers)), "bf16", terms=8),
        KernelSample("fp6 ragged", ((2, 71), Draw((40, 71), "fp6_e2m3", numbers)), "bf16", terms=8),
        KernelSample("int4", ((66, 64), Draw((33, 64), "int4", integers)), "f16",
                     {"scale": Draw((33,), "f32", numbers)}, terms=8),
    ),
    variant=Schedule(m=8, n=16, k=64, warps=4),
    compiled=tuple(
        CompiledCall(f"{codes} {x}", ((m, k), Draw((8192, k), codes, numbers)), x,
                     says=f"become {x} in registers: {codes.split()[0]}" if m > 8 else
                     f"by mma.sync: {codes}")
        for codes, x, rows, k in (
            ("fp4_e2m1", "bf16", (8, 16, 64), 8192), ("fp4_e2m1", "bf16", (32,), 4096),
            ("fp4_e2m1 @packed_for(bf16)", "bf16", (32, 64), 8192),
            ("fp6_e2m3 @packed_for(bf16)", "bf16", (32,), 8192),
            ("fp6_e2m3", "bf16", (8, 32), 8192), ("fp4_e2m1", "fp8_e4m3", (16, 64), 8192),
            ("fp6_e2m3", "fp8_e4m3", (16, 64), 8192))
        for m in rows),
)
def gemm_packed(run: Any, x: Any, w: Any, *, scale: Any = None) -> Any:
    """y_mn = s_n sum_k x_mk w_nk, with weights of 4 or 6 bits that are read as they lie packed.

    x: [M, K] bf16, f16 or fp8_e4m3   w: [N, K] of a packed type: fp4_e2m1, fp6_e2m3, int4, ...
    scale: [N] f32, one for each row of w; None: ones   y: [M, N] of x's type, bf16 for fp8
    For few rows of x: up to 16, the time is nearly that of reading w. Weights are made bf16 in
    registers, exactly, f16 for an x of f16, and beside fp8 floats fp8 where tensor cores multiply
    that. Sums are kept in f32, of fp8 those of 256 or 512 products in 14 bits, and rounded once.
    Raises ShapeError, DTypeError.
    """
    kinds = type_of(x, "x"), type_of(w, "w")
    if kinds[0].name not in TAKES:
        run.fail(f"x is {kinds[0]}", f"one of {', '.join(TAKES)}", DTypeError)
    if not kinds[1].dtype.packed:
        run.fail(f"w is {kinds[1]}", "a type of 4 or 6 bits, "
                 "ts.from_bytes(w, 'fp4_e2m1', (N, K)) of bytes; gemm takes others", DTypeError)
    shapes = tuple(x.shape), tuple(w.shape)
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][1]:
        run.fail(f"x is {show_shape(shapes[0])}, w is {show_shape(shapes[1])}",
                 "x [M, K] with w [N, K]", ShapeError)
    (M, K), N = shapes[0], shapes[1][0]
    if K == 0:
        run.fail("rows of no elements have no products", "K of at least 1", ShapeError)
    if scale is not None and tuple(scale.shape) != (N,):
        run.fail(f"scale is {show_shape(tuple(scale.shape))}", f"[{N}], one for each row of w",
                 ShapeError)
    if scale is not None and type_of(scale, "scale").dtype is not f32:
        run.fail(f"scale is {type_of(scale, 'scale')}", "f32", DTypeError)
    out = empty_like(x, (M, N), result_type(kinds[0]))
    if widened(kinds[0], kinds[1], M):
        halves = empty_like(x, (M, K), f16)
        run.run("as_halves", x, halves)
        x = halves
    use = blocks(M, N, K, type_of(x, "x"), kinds[1])
    run.run("packed_nt", x, w, scale, out, BM=run.size("m", use.rows),
            BN=run.size("n", use.columns), BK=run.size("k", use.depth), RESIDENT=use.resident,
            STREAMED=use.streamed, AHEAD=use.ahead, DIVIDED=use.divided)
    return out


def meet(x: NumericType, w: NumericType) -> bool:
    """Whether weights become fp8 in registers, beside an x of that."""
    return x.dtype.bits == 8 and w.dtype.kind == "float"


def laid(x: NumericType, w: NumericType, K: int) -> bool:
    """Whether weights lie on a GPU as these rows meet them, in whole steps."""
    return order_of(w, (K,)) == x.name and K >= LAID_DEPTH // 2


def widened(x: NumericType, w: NumericType, rows: int) -> bool:
    """Whether x is multiplied as f16, which holds all its numbers: integers become f16."""
    return x.dtype.bits == 8 and not meet(x, w) and rows > FEW_ROWS


def result_type(x: NumericType) -> NumericType:
    return x if x.dtype.bits == 16 else as_type("bf16")


@dataclass(frozen=True)
class PackedBlocks:
    """Of a group: rows of x, rows of weights, depth of a step. resident: groups for which there is
    room on a multiprocessor, so that those of the next launch are there when this one ends.
    streamed: whether weights are read by one group alone.  ahead: steps whose weights are asked
    for while the kernel in front ends.  divided: blocks of a cluster that share the steps of a
    group, whose two warpgroups have 64 rows of weights each."""

    rows: int
    columns: int
    depth: int
    resident: int = 1
    streamed: bool = False
    ahead: int = 0
    divided: int = 1


def blocks(M: int, N: int, K: int, x: NumericType, w: NumericType) -> PackedBlocks:
    """A group has all rows of x, up to 64, and as many rows of weights as leave enough groups: each
    of them reads x.

    A step is 512 deep, 64 for each of eight warps, or half where many rows of x would not leave
    room for copies under way; of 4 bits and few rows twice as deep, with half of the barriers (1 x
    8192 x 8192 fp4: 13.9 -> 13.2 us, H200, 2026-11-26). Of 64 rows groups with twice the weights
    and half of K, and a sum of both behind them, were slower by a third (H100, 2026-11-25). Two
    groups of a cluster that share one's steps pay where their own warps bring much of x into order:
    16 rows of 16 bits, and 32 beside codes of 6; and where x is most of what a group reads beside
    codes that lie as registers have them (PAIR_ROWS).
    """
    rows, most = min(MOST_ROWS, max(8, 1 << (M - 1).bit_length())), 1 << K.bit_length() - 1
    columns = 64
    while columns > 16 and -(-N // columns) * -(-M // rows) < GROUPS:
        columns //= 2
    wide, pairs = x.dtype.bits == 16, -(-N // PAIR_COLUMNS) * -(-M // rows)
    shared = wide and w.dtype.kind == "float" and K >= 4 * PAIR_DEPTH and 2 * pairs >= GROUPS
    ahead = MANY_AHEAD if wide and w.dtype.kind == "float" and rows >= 16 else AHEAD
    if laid(x, w, K):
        if shared and rows >= PAIR_ROWS[w.dtype.bits]:
            return PackedBlocks(rows, PAIR_COLUMNS, PAIR_DEPTH, 1, M <= rows, 1, divided=2)
        resident = 2 if not wide and rows <= RESIDENT_ROWS else 1
        whole = K >= LAID_DEPTH and (rows <= 32 or not wide)
        depth = LAID_DEPTH if whole else LAID_DEPTH // 2
        return PackedBlocks(rows, 64, depth, resident, M <= rows, ahead if resident == 1 else 0)
    if shared and (rows == 16 or rows == 32 and w.dtype.bits == 6):
        return PackedBlocks(rows, PAIR_COLUMNS, PAIR_DEPTH, 1, M <= rows,
                            ahead if w.dtype.bits == 4 else 0, divided=2)
    few = rows <= 8 and w.dtype.bits == 4 and not meet(x, w)
    depth = 1024 if few else 512 if rows <= 32 or meet(x, w) else 256
    resident = 2 if meet(x, w) and rows <= RESIDENT_ROWS else 1
    return PackedBlocks(rows, columns, min(depth, most), resident, M <= rows,
                        ahead if resident == 1 and w.dtype.bits == 4 else 0)
