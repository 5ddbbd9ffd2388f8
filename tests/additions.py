"""One of each thing that can be added, each in one place, as docs/internals/adding.md shows it.

test_adding.py calls these, looks at what appears by itself, and takes them away again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import tessera as ts
from tessera import Tensor
from tessera.kernels.record import Benchmark, CompiledCall, KernelSample
from tessera.kernels.routine import Routine, empty_like, routine
from tessera.mesh.collectives import rules
from tessera.mesh.collectives.cost import ONCE_AROUND
from tessera.mesh.collectives.record import Collective, CollectiveSample, emit
from tessera.numerics import DType, dtypes
from tessera.optim.record import OptimizerRecord, optimizer
from tessera.runtime.generations import GENERATIONS, Generation, register
from tessera.tile import MODULE as tile
from tessera.tile.builder import edge_rules
from tessera.tile.builder import rules as tile_rules
from tessera.tile.ir.op_record import TileOp, declare


def add_dtype() -> DType:
    """E3M4, which ml_dtypes has, too."""
    return dtypes._float("fp8_e3m4", 3, 4, "ieee", ml_dtypes.float8_e3m4)


@ts.kernel
def normalize(x: Tensor["M", "N"], y: Tensor["M", "N"], BM=1):
    row = tile.load(x[tile_m:tile_m+BM, 0:N])
    y[tile_m:tile_m+BM, 0:N] = row * tile.rsqrt(tile.row_sum(row * row))


def unit_rows_f64(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def add_routine() -> Routine:
    @routine(
        normalize, arrays="`[M, N]`", reference=unit_rows_f64,
        samples=(KernelSample("", ((13, 100),), terms=100),
                 KernelSample("bf16", ((5, 64),), "bf16")),
        variant=ts.Schedule(m=2, warps=2), compiled=(CompiledCall("f32", ((64, 1024),)),),
        benchmarks=(Benchmark("f32[8192, 1024]", ((8192, 1024),), bytes=8 * 8192 * 1024, beside=(
            "PyTorch", lambda torch, x: lambda: torch.nn.functional.normalize(x))),),
    )
    def unit_rows(run: Any, x: Any) -> Any:
        """y_i = x_i / sqrt(sum_j x_j^2), along the last axis."""
        y = empty_like(x)
        run.run("normalize", x, y, BM=run.size("m", 1))
        return y

    return unit_rows


def add_collective() -> Collective:
    """Each rank's tensor goes to the rank that mirrors it: 0 to n - 1, 1 to n - 2, ..."""
    def run(x: Any) -> np.ndarray:
        n, me = x.group.size, x.group.index
        empty = x.array.reshape(-1)[:0]
        sends = [x.array if j == n - 1 - me else empty for j in range(n)]
        shapes = [x.array.shape if j == n - 1 - me else (0,) for j in range(n)]
        return x.swap(sends, shapes)[n - 1 - me].copy()

    return Collective(
        name="mirror",
        doc="the tensor of the rank at the other end of the axis",
        meaning=lambda arrays: arrays[::-1],
        run=run,
        shape=rules.shape_broadcast,
        vjp=lambda g, y, x, **attrs: (emit("mirror", g, attrs),),
        adjoint="itself",
        same_result=False,
        sends=lambda elements, n: elements if n > 1 else 0,
        cost=ONCE_AROUND,
        samples=(CollectiveSample(lambda rank, ranks: (3, 5)),),
    )


def add_tile_op() -> TileOp:
    """Its record, and how it is emitted: the two places that an op of kernels has."""
    @declare(rule=tile_rules.floats, edges=edge_rules.elementwise,
             samples=(lambda rng: (rng.standard_normal((13, 7)),),))
    def log1p_exp(x):
        """log(1 + e^x), also where e^x overflows."""
        return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))

    return log1p_exp


def emit_tile_op() -> None:
    from tessera.tile.cuda.emit.elementwise import apply
    from tessera.tile.cuda.emit.emitter import kind_of
    from tessera.tile.cuda.emit.registry import emits
    from tessera.tile.cuda.intrinsics.elementwise import body_of, library

    @body_of("log1p_exp", 1, "f32", "f64")
    def _log1p_exp(b, x):
        small = library("exp")(b, b.fneg(library("fabs")(b, x)))
        return b.fadd(library("fmax")(b, x, b.zero(x)), library("log1p")(b, small))

    @emits("log1p_exp")
    def _emit_log1p_exp(e, op):
        kind = kind_of(e.dtype(op.args[0]))
        apply(e, op, e.use("log1p_exp", f"use(elementwise.operation('log1p_exp', {kind!r}))"))


def add_optimizer() -> type:
    """Steps of one size, along the last gradient's signs."""
    @optimizer
    @dataclass(frozen=True, kw_only=True)
    class SignDescent(OptimizerRecord):
        """The sign of the gradient: steps of one size."""

        weight_decay: float = 0.0
        decays: Callable[[str, Tensor], bool] = ts.optim.decays_matrices

        def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
                  decay: float) -> tuple[Tensor, dict[str, Tensor]]:
            return w - rates[0] * (ts.sign(g) + w * decay), {}

    return SignDescent


def add_generation(change: Callable[[Generation], Generation] = lambda g: g) -> Generation:
    """A chip that nobody makes: a smaller Hopper, with bf16 alone in its wgmma. change: what else
    differs."""
    hopper = GENERATIONS["sm_90a"]
    assert hopper.warpgroup_matmul is not None
    form = replace(
        hopper.warpgroup_matmul, operands={"bf16": hopper.warpgroup_matmul.operands["bf16"]},
        registers={1: None, 2: (40, 208)}, most_registers={1: (255, 255), 2: (40, 208)})
    return register(change(replace(
        hopper, target="sm_91a", name="Pretended", shared_bytes=132 << 10,
        group_shared_bytes=99 << 10, warpgroup_matmul=form)))
