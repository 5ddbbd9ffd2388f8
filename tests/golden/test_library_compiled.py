"""The standard library, and kernels of graph functions, compiled: nothing spills, no GPU needed."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tessera as ts
from library_cases import compiled_of
from ptx_harness import require_compiler
from tessera import Tensor, bf16, f32
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import compiled_of as program_compiled
from tessera.kernels import ROUTINES

require_compiler()


COMPILED = compiled_of(*ROUTINES.values())
# routine, kernel, arguments, constants
CASES: list[tuple[str, str, list[Any], dict[str, Any]]] = [c[:4] for c in COMPILED]


# Each for Hopper, and the first of each kernel and of each type for the generation before.
FIRST = {(c[1], str(c[4].dtype)): i for i, c in reversed([*enumerate(COMPILED)])}.values()
ON_TARGETS = [("sm_90a", i) for i in range(len(CASES))] + [("sm_80", i) for i in sorted(FIRST)]


@pytest.mark.parametrize("target, case", ON_TARGETS,
                         ids=[f"{CASES[i][1]}{i}-{target}" for target, i in ON_TARGETS])
def test_library_kernels(case, target):
    routine, name, arguments, constants = CASES[case]
    kernel = ROUTINES[routine].kernels[name]
    pressure = ts.debug.register_pressure(kernel, *arguments, target=target, **constants)
    assert not pressure.spills and not pressure.stack_bytes, str(pressure)
    assert pressure.occupancy.groups >= 1


SAYING = [c for c in COMPILED if c[4].says]


@pytest.mark.parametrize("saying", SAYING, ids=[f"{c[0]} {c[4].name}" for c in SAYING])
def test_library_kernels_take_the_form_that_their_records_say(saying):
    routine, name, arguments, constants, case = saying
    kernel = ROUTINES[routine].kernels[name]
    kernel.lower(*arguments, **constants)
    assert case.says in kernel.inspect_ir("target", target="sm_90a")


def test_attention_and_gemm_are_warp_specialised():
    assert {c[1] for c in SAYING if c[4].says == "matmuls by wgmma, loads by TMA"} == {
        "gemm_whole", "attention", "block_scaled_nt"}


def mlp(x, w, b, r):
    return ts.gelu(x @ w + b) + r


FUNCTIONS = {
    "chain": (lambda x, y: ts.tanh(x * y) + ts.exp(x), (Tensor[4096, 1024, f32],
                                                       Tensor[1024, f32])),
    "softmax": (ts.softmax, (Tensor[512, 4096, bf16],)),
    "softmax in passes": (ts.softmax, (Tensor[64, 40000, bf16],)),
    "layernorm": (ts.layernorm, (Tensor[512, 4096, bf16], Tensor[4096, bf16], Tensor[4096, bf16])),
    "column sums": (lambda x: ts.sum(x, axis=0), (Tensor[4096, 1024, f32],)),
    "mlp": (mlp, (Tensor[512, 256, bf16], Tensor[256, 1024, bf16], Tensor[1024, bf16],
                  Tensor[512, 1024, bf16])),
    "f32 matmul": (lambda a, b: ts.relu(a @ b), (Tensor[512, 256, f32], Tensor[256, 512, f32])),
    "batch": (lambda a, b: a @ b, (Tensor[8, 256, 128, bf16], Tensor[8, 128, 256, bf16])),
    "attention": (lambda q, k, v: ts.attention(q, k, v, causal=True), (
        Tensor[2, 8, 1024, 128, bf16],) * 3),
    "transpose": (lambda x: ts.transpose(x, (0, 2, 1, 3)), (Tensor[2, 128, 8, 64, bf16],)),
    "embedding": (ts.embedding, (Tensor[50257, 768, bf16], Tensor[4, 512, ts.int32])),
    "take of elements": (lambda x, i: ts.take(x, i, axis=-1), (Tensor[300, 512, f32],
                                                              Tensor[1000, ts.int64])),
    "segment sums": (lambda u, i: ts.segment_sum(u, i, 50257), (Tensor[2048, 768, f32],
                                                               Tensor[2048, ts.int64])),
    "rows": (lambda x, y: ts.cast(ts.vjp(ts.softmax, x)[1](y), "bf16"), (
        Tensor[4096, 1024, bf16], Tensor[4096, 1024, bf16])),
    "dropout": (lambda x: ts.random.dropout(x, 0.1), (Tensor[4096, 1024, bf16],)),
    "matmul, dropout, residual": (lambda x, w, r: r + ts.random.dropout(x @ w, 0.1), (
        Tensor[512, 256, bf16], Tensor[256, 1024, bf16], Tensor[512, 1024, bf16])),
    "gradient": (lambda w, x: ts.grad(lambda w, x: ts.mean(ts.tanh(x @ w) ** 2))(w, x), (
        Tensor[256, 256, f32], Tensor[128, 256, f32])),
}


ACCESS = re.compile(r"\b(?:LDG?|STG?|ATOMG?|REDG?|LDGSTS|CCTL|UTMA\w+|UBLK(?!PF)\w+)\b")


def accesses_before_the_wait(sass: str) -> list[str]:
    """Of a kernel that may begin while the one in front of it runs: to global memory. What is asked
    for in L2 (UBLKPF) is none."""
    before, wait, _ = sass.partition("ACQBULK")
    assert wait
    return ACCESS.findall(before)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_of_graph_functions(name, target):
    fn, types = FUNCTIONS[name]
    program = CudaProgram(ts.jit(fn).graph(*types), target)
    for launch in program.launches:
        made = program_compiled(launch, program.target)
        assert made.built.resources.spill_store_bytes == 0, (name, launch.group.kernel, made.notes)
        if made.emitted.dependent:
            assert accesses_before_the_wait(made.built.sass()) == []


@pytest.mark.parametrize("name, kernels", [("mlp", 2), ("attention", 1), ("batch", 1)])
def test_matmuls_of_graph_functions_reach_the_tensor_cores(name, kernels):
    fn, types = FUNCTIONS[name]
    f = ts.jit(fn)
    f.graph(*types)
    assert "wgmma.mma_async" in f.inspect_ir("ptx")
    assert "specialised" in f.inspect_ir("target")
    assert f.inspect_ir("ptx").count(".version") == kernels
    assert "HGMMA" in f.inspect_ir("sass")
