"""Matrix products: D = A B for any extents, and the loop over K that other kernels build on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import ArgumentError, DTypeError, ShapeError
from ..numerics import DType, as_type, bf16, f32, i32, tf32, u8
from ..runtime.arrays import read_array
from ..tensor import Tensor, tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .cards import Card, card_of
from .matmul_plan import LINE_BYTES, plan_product
from .record import Benchmark, CompiledCall, KernelSample
from .routine import RoutineArray, empty_like, reshaped, routine, type_of, viewed


def of_transposed(layout: str) -> str:
    """Of B' and A', whose product is the transposed one."""
    return layout[::-1].translate(str.maketrans("nt", "tn"))


@kernel
def product(A, B, m, n, batch, layout, sums, BM, BN, BK, part=None, acc=None):
    """The block [m:m+BM, n:n+BN] of A B, kept in the type `sums`. Other kernels call it.

    layout: 'nn', 'nt', 'tn' or 'tt'; t is an operand that lies transposed, [K, M] or [N, K].
    batch: which matrix of each operand, (i, j); None for an operand that is one matrix.
    part: (i, depth, before) of a sum over [i*depth : (i+1)*depth] alone, of K behind as many terms
    of other products.
    acc: what it is added to, such as another product.
    """
    if acc is None:
        acc = tile.zeros((BM, BN), sums)
    begin, end = 0, A.shape[-1] if layout[0] == "n" else A.shape[-2]
    if part is not None:
        begin = part[0] * part[1] - part[2]
        end = tile.minimum(end, begin + part[1])
        if part[2] > 0:
            begin = tile.maximum(begin, 0)
    for k in range(begin, end, BK):
        if layout[0] == "n":
            a = tile.load(A[m:m+BM, k:k+BK] if batch[0] is None else A[batch[0], m:m+BM, k:k+BK])
        else:
            a = tile.load(A[k:k+BK, m:m+BM] if batch[0] is None else A[batch[0], k:k+BK, m:m+BM]).T
        if layout[1] == "n":
            b = tile.load(B[k:k+BK, n:n+BN] if batch[1] is None else B[batch[1], k:k+BK, n:n+BN])
        else:
            b = tile.load(B[n:n+BN, k:k+BK] if batch[1] is None else B[batch[1], n:n+BN, k:k+BK]).T
        acc = tile.dot(a, b, acc)
    return acc


@kernel
def gemm_whole(A: Tensor["A0", "A1"], B: Tensor["B0", "B1"], D: Tensor["M", "N"], sums,
               layout="nn", swapped=False, result=bf16, BM=128, BN=256, BK=64, CLUSTER=1,
               DEPENDENT=False):
    """D = A B.

    layout: of A and B, see product.
    swapped: D' = B' A' instead, so that the columns of D are the rows that tensor cores take 64 at
    a time, and few rows of D are few columns.
    CLUSTER, DEPENDENT: of the form of warpgroups that specialise.
    """
    if swapped:
        D[tile_m:tile_m+BM, tile_n:tile_n+BN] = product(
            B, A, tile_n, tile_m, (None, None), layout, sums, BN, BM, BK).to(result).T
    else:
        D[tile_m:tile_m+BM, tile_n:tile_n+BN] = product(
            A, B, tile_m, tile_n, (None, None), layout, sums, BM, BN, BK)


@kernel(grid=lambda M, N, parts, BM, BN: (-(-M // BM), -(-N // BN), parts))
def gemm_parts(A: Tensor["A0", "A1"], B: Tensor["B0", "B1"], P: Tensor["parts", "M", "N", f32],
               depth: i32, sums, layout="nn", swapped=False, BM=128, BN=256, BK=64, CLUSTER=1):
    """The same with the sum over K in parts of `depth` terms: D is the sum of P over its first
    axis."""
    m, n, p = tile.group_id(0) * BM, tile.group_id(1) * BN, tile.group_id(2)
    if swapped:
        P[p, m:m+BM, n:n+BN] = product(
            B, A, n, m, (None, None), layout, sums, BN, BM, BK, (p, depth, 0)).T
    else:
        P[p, m:m+BM, n:n+BN] = product(
            A, B, m, n, (None, None), layout, sums, BM, BN, BK, (p, depth, 0))


@kernel
def sum_of_parts(P: Tensor["parts", "L", f32], D: Tensor["L"], count=2, BL=1024):
    total = tile.load(P[0, tile_l:tile_l+BL])
    for p in range(1, count):
        total = total + tile.load(P[p, tile_l:tile_l+BL])
    D[tile_l:tile_l+BL] = total


@kernel
def aligned_rows(X: Tensor["R", "C"], Y: Tensor["R", "E"], BR=8, BE=512):
    """X with zeros behind its rows."""
    Y[tile_r:tile_r+BR, tile_e:tile_e+BE] = tile.load(X[tile_r:tile_r+BR, tile_e:tile_e+BE])


@kernel
def turned_rows(X: Tensor["R", "C"], Y: Tensor["C", "E"], BC=64, BE=64):
    """X transposed, with zeros behind its rows."""
    Y[tile_c:tile_c+BC, tile_e:tile_e+BE] = tile.load(X[tile_e:tile_e+BE, tile_c:tile_c+BC]).T


def reference(a: np.ndarray, b: np.ndarray, transpose_a: bool = False,
              transpose_b: bool = False, dtype: Any = None) -> np.ndarray:
    return (a.T if transpose_a else a) @ (b.T if transpose_b else b)


def _in_ops(F: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False,
            dtype: Any = None, precision: str | None = None) -> Any:
    a, b = (x if precision is None else F.cast(x, precision) for x in (a, b))
    y = (F.transpose(a) if transpose_a else a) @ (F.transpose(b) if transpose_b else b)
    return y if dtype is None else F.cast(y, dtype)


def _in_torch(torch: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
              ) -> Any:
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    return lambda: torch.mm(a, b)


# Rows and columns of a result of f32 from which on it is made of operands whose rows lie across K:
# threads read one k of many rows at once, which leaves registers for what is read ahead.
ACROSS_FROM = 3072
# Rows of an operand, and of K, from which on wgmma takes its columns from registers.
COLUMNS_FROM = 64
SPECIALISED = "matmuls by wgmma, loads by TMA"
LAYOUTS = {w: {f"transpose_{x}": True for x, way in zip("ab", w, strict=True) if way == "t"}
           for w in ("nn", "nt", "tn", "tt")}


@routine(
    gemm_whole, gemm_parts, sum_of_parts, aligned_rows, turned_rows,
    arrays="`[M, K]` or `[K, M]`, `[K, N]` or `[N, K]`", reference=reference, ops=_in_ops,
    samples=(
        KernelSample("", ((70, 50), (50, 90)), terms=50),
        KernelSample("bf16 nt", ((130, 80), (300, 80)), "bf16", {"transpose_b": True}, terms=4),
        KernelSample("bf16 tn", ((80, 130), (80, 72)), "bf16", {"transpose_a": True}, terms=4),
        KernelSample("bf16 tt", ((72, 130), (40, 72)), "bf16", LAYOUTS["tt"], terms=4),
        KernelSample("few rows", ((3, 200), (200, 72)), "bf16", terms=4),
        KernelSample("one row, in parts", ((4096, 1), (4096, 136)), "bf16", LAYOUTS["tn"],
                     terms=16),
        KernelSample("f16, long sums", ((72, 6000), (80, 6000)), "f16", LAYOUTS["nt"], terms=16),
    ),
    variant=Schedule(block=(64, 64), k=16, warps=4, stages=3),
    compiled=(
        *(CompiledCall(w, ((512, 512),) * 2, "bf16", how, says=SPECIALISED)
          for w, how in LAYOUTS.items()),
        CompiledCall("large", ((4096, 4096),) * 2, "bf16", says=SPECIALISED),
        CompiledCall("few rows", ((16, 4096), (4096, 4096)), "bf16"),
        CompiledCall("fp8", ((512, 512),) * 2, "fp8_e4m3", LAYOUTS["nt"] | {"dtype": "bf16"},
                     says=SPECIALISED),
        CompiledCall("int8", ((512, 512),) * 2, "int8", LAYOUTS["nt"], says=SPECIALISED),
        CompiledCall("f32", ((512, 512),) * 2),
    ),
    benchmarks=tuple(
        Benchmark(f"{'A Bᵀ' if nt else 'A B'}, {n}³, bf16", ((n, n),) * 2, "bf16",
                  {"transpose_b": nt}, flops=2 * n**3, beside=("cuBLAS", _in_torch))
        for n in (4096, 8192) for nt in (False, True)),
)
def gemm(run: Any, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False,
         dtype: Any = None, precision: str | None = None) -> Any:
    """D = A B, with A' for A under transpose_a and B' for B under transpose_b.

    a: [M, K], or [K, M] with transpose_a   b: [K, N], or [N, K] with transpose_b   D: [M, N] of
    `dtype`, by default a's type, int32 for integers
    Both of one type: f64, a float of up to 32 bits, int8 or uint8. Sums are kept in f32 (f64 for
    f64, int32 for integers) and rounded once. Operands of 16 bits or fewer are multiplied by tensor
    cores; sums of fp8 are added up outside of them every 128 of K, but not under
    ts.Schedule(FAST_SUMS=True).
    precision: "tf32" rounds operands of f32 to 10 bits of mantissa, which tensor cores multiply.
    Raises ShapeError, DTypeError, ArgumentError.
    """
    kind, (M, N, K) = _checked(run, a, b, transpose_a, transpose_b)
    whole = kind.kind != "float"
    if dtype is None and whole:
        dtype = i32
    result = kind if dtype is None else as_type(dtype).dtype
    out, card, sums = empty_like(a, (M, N), dtype), card_of(a), i32 if whole else kind.compute
    if precision is not None:
        kind, a, b = tf32, *(_as_tf32(run, x, precision, card) for x in (a, b))
    across = kind is f32 and min(M, N) >= ACROSS_FROM
    (a, turned_a), (b, turned_b) = (_operand(run, *which, across, kind, card) for which in zip(
        (a, b), (transpose_a, transpose_b), (False, True), _by_columns(
            run, (transpose_a, not transpose_b), M, N, K, kind, card), strict=True))
    plan = run.trial or plan_product(
        kind, M, N, K, "nt"[turned_a] + "nt"[turned_b], card, result.bits, not run.has_sizes,
        bool(run.extra("FAST_SUMS")))
    run.note(plan.why)
    layout = "nt"[turned_a] + "nt"[turned_b]
    how = {"layout": of_transposed(layout) if plan.swapped else layout, "swapped": plan.swapped,
           "BM": run.size("m", plan.rows), "BN": run.size("n", plan.columns),
           "BK": run.size("k", plan.step), "CLUSTER": plan.cluster}
    if plan.parts == 1:
        run.run("gemm_whole", a, b, out, sums, warps=plan.warps, result=result, **how,
                DEPENDENT=plan.dependent,
                knobs={"RESIDENT": plan.resident} if plan.resident > 1 else None)
        return out
    parts = empty_like(a, (plan.parts, M, N), f32)
    run.run("gemm_parts", a, b, parts, plan.depth, sums, **how)
    run.run("sum_of_parts", reshaped(parts, (plan.parts, M * N)), reshaped(out, (M * N,)),
            count=plan.parts)
    return out


def _checked(run: Any, a: Any, b: Any, transpose_a: bool, transpose_b: bool
             ) -> tuple[DType, tuple[int, int, int]]:
    """The operands' type, and M, N, K. Raises ShapeError, DTypeError."""
    kinds = type_of(a, "a"), type_of(b, "b")
    if kinds[0].dtype is not kinds[1].dtype or not (
            kinds[0].dtype.kind == "float" or kinds[0].name in ("int8", "uint8")):
        run.fail(f"the operands are {kinds[0]} and {kinds[1]}",
                 "two of one float type, of int8 or of uint8", DTypeError)
    shapes = tuple(a.shape), tuple(b.shape)
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or (
            shapes[0][1 - transpose_a] != shapes[1][transpose_b]):
        ways = [f"{x}'" if t else x for x, t in (("a", transpose_a), ("b", transpose_b))]
        run.fail(f"{show_shape(shapes[0])} and {show_shape(shapes[1])} do not fit as "
                 f"{' '.join(ways)}", "a [M, K] or, with transpose_a=True, [K, M]; b [K, N] or, "
                 "with transpose_b=True, [N, K]", ShapeError)
    return kinds[0].dtype, (shapes[0][transpose_a], shapes[1][1 - transpose_b],
                            shapes[0][1 - transpose_a])


def _as_tf32(run: Any, x: Any, precision: str, card: Card) -> Any:
    """An operand of f32 rounded to tf32, where that is not done on its way (see _operand)."""
    if precision != "tf32" or type_of(x, "x").dtype is not f32:
        run.fail(f"precision={precision!r} with operands of {type_of(x, 'x')}",
                 "precision='tf32' for operands of f32", ArgumentError)
    if card.copies:
        return x
    if isinstance(x, RoutineArray):
        run.fail("precision='tf32' in a traced function", "cast the operands to tf32")
    return tensor(read_array(x, "x").owner, tf32)


def _by_columns(run: Any, across: tuple[bool, bool], M: int, N: int, K: int, kind: DType,
                card: Card) -> tuple[bool, bool]:
    """Which operand is read as it lies though it lies across K: one of them, the larger, as the
    first operand of the product or of its transpose. A small one is copied sooner.

    across: which of them lie so.
    """
    if kind.name not in card.by_columns or run.has_sizes or K < COLUMNS_FROM:
        return False, False
    a, b = (lies and n >= COLUMNS_FROM for lies, n in zip(across, (M, N), strict=True))
    return a and not (b and N > M), b and not (a and N <= M)


def _operand(run: Any, x: Any, turned: bool, along: bool, by_columns: bool, across: bool,
             kind: DType, card: Card) -> tuple[Any, bool]:
    """An operand as what multiplies reads it, and whether it lies transposed: one column as a row,
    and a copy with rows of whole 128 bytes where they do not begin at 16, or where they have to lie
    along K, or across, and do not.

    along: whether it lies transposed when its rows lie along K.  by_columns: whether it may lie
    otherwise.  across: whether rows across K pay for a copy.  kind: the type that is multiplied;
    TMA rounds f32 to tf32.
    """
    rows, columns = x.shape
    if columns == 1:
        x, turned, rows, columns = reshaped(x, (1, rows)), not turned, 1, rows
    if not card.copies or not (across or kind.name in card.formats) or 0 in x.shape:
        return x, turned
    line, name = 8 * LINE_BYTES // kind.bits, ""
    if turned == along if across else (
            turned != along and kind.name in card.along_k and not by_columns):
        name, shape, turned = "turned_rows", (columns, -(-rows // line) * line), not turned
    elif columns * kind.bits % 128:
        name, shape = "aligned_rows", (rows, -(-columns // line) * line)
    if name:
        y = empty_like(x, shape)
        run.run(name, *(viewed(v, u8) if kind.bits == 8 else v for v in (x, y)))
        x = y
    return (x if type_of(x, "x").dtype is kind else viewed(x, kind)), turned
