"""Functions behind a matmul of up to 1 MiB run on its sums, whoever reads what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.run import run_of
from tolerance import assert_close

Fn = Callable[[ts.Tensor, ts.Tensor, ts.Tensor], Any]
AT = [0, 2, 5]
READERS: dict[str, Callable[[Callable], Fn]] = {
    "nobody": lambda act: lambda x, w, r: act(x @ w),
    "a copy": lambda act: lambda x, w, r: [y := act(x @ w), y.copy(), r.copy()],
    "the product's": lambda act: lambda x, w, r: [y := x @ w, act(y)],
    "transposed": lambda act: lambda x, w, r: ts.transpose(act(x @ w), (1, 0)) + 0.0,
    "a slice": lambda act: lambda x, w, r: [y := act(x @ w), y[1:, 3:]],
    "rows": lambda act: lambda x, w, r: act(x @ w)[2:5],
    "joined": lambda act: lambda x, w, r: ts.concatenate([act(x @ w), r], axis=0),
    "stacked": lambda act: lambda x, w, r: ts.stack([act(x @ w), r]),
    "padded": lambda act: lambda x, w, r: ts.pad(act(x @ w), ((1, 2), (0, 3))),
    "picked": lambda act: lambda x, w, r: [y := act(x @ w), y[3],
                                           ts.take(y, ts.tensor(AT), axis=0)],
    "residual": lambda act: lambda x, w, r: act(x @ w) + r,
    "gate": lambda act: lambda x, w, r: act(x @ w) * (x @ (w * 2.0)),
    "bias": lambda act: lambda x, w, r: act(x @ w + r[0]) * 2.0,
    "matmul": lambda act: lambda x, w, r: act(x @ w) @ w.mT,
    "sums": lambda act: lambda x, w, r: [y := act(x @ w), ts.sum(y, axis=0), ts.sum(y)],
    "softmax": lambda act: lambda x, w, r: ts.softmax(act(x @ w), axis=-1),
    "gradient": lambda act: lambda x, w, r: ts.grad(
        lambda w: ts.sum(ts.square(ts.cast(act(x @ w), "f32"))))(w)}


def operands(rng: np.random.Generator, M: int, K: int, N: int, dtype: str) -> list[ts.Tensor]:
    return [ts.tensor((rng.standard_normal(s) / 4).astype(np.float32), dtype)
            for s in ((M, K), (K, N), (M, N))]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shape", [(16, 64, 128), (17, 40, 72)])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_results_are_those_of_two_launches(reader: str, shape: tuple[int, int, int], dtype: str,
                                           rng: np.random.Generator) -> None:
    for act in (ts.gelu, ts.silu):
        given, f = operands(rng, *shape, dtype), ts.jit(READERS[reader](act))
        graph = f.graph(*given)
        leaves = [x.array for x in given][:len(graph.inputs)]
        want = tree.flatten(f(*given))[0]
        for got, y in zip(CudaProgram(graph, "sm_90a").run(leaves), want, strict=True):
            assert_close(got.astype(np.float32), y.array.astype(np.float32), y.type, shape[1])


def kinds(M: int, K: int, N: int) -> list[str]:
    x, w = (ts.zeros(s, "bf16") for s in ((M, K), (K, N)))
    program = CudaProgram(ts.jit(lambda x, w: ts.gelu(x @ w)).graph(x, w), "sm_90a")
    return [s.group.kind for s in program.steps]


def test_small_results_take_one_launch_and_large_ones_two() -> None:
    assert kinds(16, 512, 8192) == kinds(512, 512, 512) == ["gemm"]
    assert kinds(2048, 512, 2048) == ["gemm", "loop"]


@pytest.mark.parametrize("reader", ["nobody", "a copy", "joined", "transposed", "gate"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_in_emulated_instructions(reader: str, target: str, rng: np.random.Generator) -> None:
    given = operands(rng, 17, 32, 40, "bf16")
    program = CudaProgram(ts.jit(READERS[reader](ts.gelu)).graph(*given), target)
    memory = program._host_memory([x.array for x in given][:len(program.lowered.inputs)])
    types = {b.name: b.type for b in program.plan.buffers}
    for launch in program.launches:
        read = [ts.Tensor(run_of(memory[program.base(n)], types[n].dtype, shape, at), types[n])
                for (n, shape), at in zip(launch.arguments, launch.offsets, strict=True)]
        compare(launch.kernel, *read, lanes=launch.group.schedule.lanes, target=target,
                schedule=launch.group.schedule, rtol=2.0**-7, atol=2.0**-7)
        launch.kernel(*read)
