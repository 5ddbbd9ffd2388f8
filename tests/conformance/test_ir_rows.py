"""Rows IR that need no compiler for GPUs; those that do are in tests/golden/test_kernel_inspect."""

from __future__ import annotations

import contextlib

import pytest

import tessera as ts
from corpus import Program
from kernels.corpus import read
from tessera import config, hooks
from tessera.tile.ir.ir import Function, Op, definitions, walk
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.kernel.kernel import Kernel

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
