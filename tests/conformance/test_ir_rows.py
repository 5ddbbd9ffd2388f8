"""Rows IR that need no compiler for GPUs; those that do are in tests/golden/test_kernel_inspect."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from corpus import Program
from kernels.corpus import read
from tessera import config, hooks
from tessera.graph.cuda import CudaProgram
from tessera.graph.graph_text import parse_graph, print_graph
from tessera.graph.ir import Graph
from tessera.graph.schedule.schedule_text import callees, parse_schedule, print_schedule
from tessera.tile.ir.ir import Function, Op, definitions, walk
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.kernel.kernel import Kernel
from tessera.tile.passes import map_ops
from tessera.tile.passes.registered import REGISTERED

PROGRAMS = [*read("correct"), *read("racy")]


@pytest.mark.row("IR-01")
class TestGraph:
    def test_ops_types_attributes_and_lines(self):
        @ts.jit
        def f(x: ts.Tensor["B", 8, ts.f32]):
            return ts.softmax(x * 2.0, axis=-1)

        text = f.inspect_ir("graph", ts.Tensor["B", 8, ts.f32])
        assert text.startswith("graph f v1 effects={}")
        assert "f32[B, 8] = softmax(" in text and "axis=1" in text
        assert "test_ir_rows.py:" in text and "return ts.softmax(x * 2.0, axis=-1)" in text

    def test_effects_are_listed(self):
        @ts.jit
        def noisy(x):
            ts.debug.print("{}", x)
            return x + ts.random.normal((3,))

        text = noisy.inspect_ir("graph", ts.ones(3))
        assert "effects={io, random}" in text.splitlines()[0]

    def test_autodiff_and_algebra(self):
        @ts.jit
        def loss(w):
            return ts.sum(ts.tanh(w) * 1.0)

        loss(ts.ones(4))
        backward = loss.inspect_ir("graph", backward=True)
        assert "tanh" in backward and backward != loss.inspect_ir("graph")


LEVELS = {
    "gemm": (ts.gemm, (ts.Tensor[64, 32, ts.f32], ts.Tensor[32, 48, ts.f32])),
    "softmax": (ts.softmax, (ts.Tensor[8, 96, ts.f32],)),
    "attention": (lambda q, k, v: ts.attention(q, k, v, causal=True),
                  (ts.Tensor[1, 2, 64, 32, ts.bf16],) * 3),
    "a gradient": (ts.grad(lambda x: ts.sum(ts.tanh(x) * x)), (ts.Tensor[7, 5, ts.f32],)),
}


@pytest.mark.row("IR-06", "IR-07")
@pytest.mark.parametrize("name", LEVELS)
class TestTextsReadBack:
    """Graph, Schedule and Tile IR: one op a line, `%3: type = op(%1) {...}`, and a version."""

    def levels(self, name):
        fn, types = LEVELS[name]
        graph = ts.jit(fn).graph(*types)
        program = CudaProgram(graph)
        yield graph, print_graph(graph), parse_graph, [n.op.name for n in graph.nodes]
        yield (program.plan, print_schedule(program.plan),
               lambda text: parse_schedule(text, callees(program.plan)),
               [s.op for g in program.plan.groups for s in g.steps])
        for launch in program.launches:
            function = launch.kernel.function()
            yield (function, print_ir(function), parse_ir,
                   [n.name for n in walk(function.body) if isinstance(n, Op)])

    def test_what_was_printed_is_read(self, name):
        for ir, text, parse, ops in self.levels(name):
            again = parse(text)
            if isinstance(ir, Graph):  # whose values are objects: their numbers and uses count
                assert again.hash == ir.hash and print_graph(again) == text
            else:
                assert again == ir
            assert ops and all(re.search(rf"\b{op}\(", text) for op in ops)
            assert re.search(r"^ +%[\w.-]+: .* = \w+\(%", text, re.M)

    def test_the_version_stands_in_the_text_and_a_newer_one_is_refused(self, name):
        for _, text, parse, _ in self.levels(name):
            found = re.search(r"(?<= v)1\b|(?<=^  version )1$", text, re.M)
            assert found, text
            newer = text[:found.start()] + "2" + text[found.end():]
            with pytest.raises(ts.TesseraError, match="version 2"):
                parse(newer)


def functions(program: Program, seed: int) -> list[Function]:
    """The Tile IR of every specialisation that a program makes, be it until it fails."""
    found: list[Function] = []
    def note(fn):
        if isinstance(fn, Kernel):
            found.append(fn.last)

    hooks.compiled.append(note)
    try:
        with config.scope(debug=False), contextlib.suppress(ts.TesseraError):
            program.run(seed)
    finally:
        hooks.compiled.remove(note)
    return found


@pytest.mark.row("IR-06", "IR-07")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.file}-{p.name}".replace(" ", "-"))
def test_the_text_of_every_kernel_reads_back(program, pytestconfig):
    found = functions(program, pytestconfig.option.seed)
    assert found
    for function in found:
        text = print_ir(function)
        again = parse_ir(text)
        assert again == function and print_ir(again) == text
        assert again.content_hash == function.content_hash
        assert parse_ir(print_ir(function, lines=False)) == function


def test_together_the_corpora_use_every_construct(pytestconfig):
    found = [f for p in PROGRAMS for f in functions(p, pytestconfig.option.seed)]
    nodes = [n for f in found for n in walk(f.body)]
    assert {type(n).__name__ for n in nodes} == {"Op", "For", "While", "If"}
    types = {type(t).__name__ for f in found for t in definitions(f).values()}
    assert types >= {"Scalar", "GlobalTensor", "Buffer", "View", "TileType"}
    assert len({n.name for n in nodes if isinstance(n, Op)}) > 40


# --- passes of users ----------------------------------------------------------------------------
@pytest.fixture
def registered():
    """What a test registers goes with it."""
    before = list(REGISTERED)
    yield REGISTERED
    REGISTERED[:] = before


def kernels_of_a_pass():
    @ts.kernel
    def scaled(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32]):
        for i in ts.tile.range(0, N, 16):  # noqa: F821
            y[i:i + 16] = ts.tile.exp(ts.tile.load(x[i:i + 16])) * 3.0

    return scaled


@pytest.mark.row("RT-03")
class TestPassesOfUsers:
    def test_one_is_called_for_kernels_that_are_traced_from_there_on(self, registered, rng):
        seen = []

        @ts.register_pass
        def note(function):
            seen.append((function.name, [n.name for n in walk(function.body)
                                         if isinstance(n, Op)]))
            return function

        x, y = rng.standard_normal(32).astype(np.float32), np.zeros(32, np.float32)
        kernel = kernels_of_a_pass()
        kernel(x, y)
        kernel(x, y)  # traced once
        ((name, ops),) = seen
        assert name == "scaled" and "exp" in ops and "mul" in ops
        graph = ts.jit(lambda x: ts.exp(x) + 1.0)
        text = graph.inspect_ir("tile", x, target="sm_90a")  # the kernel of a fused group
        assert len(seen) == 2 and seen[1][0] in text
        ts.unregister_pass(note)
        kernels_of_a_pass()(x, y)
        assert len(seen) == 2
        with pytest.raises(ts.ArgumentError, match="is not registered"):
            ts.unregister_pass(note)

    def test_it_may_rewrite_for_every_target(self, registered, rng):
        @ts.register_pass
        def exp_is_sin(function):
            return map_ops(function, lambda op: replace(op, name="sin") if op.name == "exp"
                           else op)

        x, y = rng.standard_normal(32).astype(np.float32), np.zeros(32, np.float32)
        kernel = kernels_of_a_pass()
        kernel(x, y)
        np.testing.assert_allclose(y, 3 * np.sin(x.astype(np.float64)), rtol=1e-5, atol=1e-6)
        for level in ("tile", "target"):
            text = kernel.inspect_ir(level, **({} if level == "tile" else {"target": "sm_80"}))
            assert "= sin(" in text and "= exp(" not in text
        with pytest.raises(ts.ArgumentError, match="is registered already"):
            ts.register_pass(exp_is_sin)

    @pytest.mark.parametrize(("made", "says"), [
        (lambda f: None, "the pass .* gave NoneType for kernel scaled"),
        (lambda f: replace(f, body=f.body[1:]), "made ill-formed Tile IR of kernel scaled: ")])
    def test_what_it_makes_is_checked(self, registered, made, says):
        ts.register_pass(made)
        with pytest.raises(ts.TesseraError, match=says):
            kernels_of_a_pass()(np.zeros(16, np.float32), np.zeros(16, np.float32))
        with pytest.raises(ts.ArgumentError, match="cannot be called"):
            ts.register_pass(3)
