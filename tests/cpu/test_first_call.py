"""What a first call finds out once, and must not mix up."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import tessera as ts
from tessera import Tensor, f32
from tessera.bench.models.gpt2 import SMALL
from tessera.bench.models.record import batch, weights
from tessera.bench.models.step import first_state, training_step
from tessera.graph import tree
from tessera.graph.cuda.kernels.generate_kernels import form_of, kernel_of, source_of
from tessera.graph.cuda.kernels.kernel_kinds import kernel_kinds
from tessera.graph.cuda.levels import program_of
from tessera.graph.expand import expand
from tessera.graph.ir import readers_of, uses, verify
from tessera.graph.schedule.ir import canonical_group
from tessera.graph.simplify import canonicalize, merge_common, remove_dead
from tessera.runtime.target import parse_target
from tessera.tile.ir.printing import print_ir
from tessera.tile.ir.schedule import Schedule
from tessera.tile.launch.machine_code import CompileRequest
from tessera.tile.passes.written_arguments import written_parameters


def groups_of(f, *types):
    """The groups of a function that have a kernel of their own text."""
    return [g for g in program_of(ts.jit(f).graph(*types)).plan.groups if g.kind == "loop"]


def test_groups_of_one_form_have_one_text():
    """Of a training step of three layers."""
    m = SMALL.sized(B=2, T=64, layers=3, d=64, heads=1, vocabulary=128)
    params = tree.map_tree(ts.tensor, weights(m))
    step = training_step(m).graph(params, first_state(m, params), *map(ts.tensor, batch(m)))
    groups = [g for g in program_of(step).plan.groups if g.kind in kernel_kinds()]
    texts: dict[str, str] = {}
    for g in groups:
        source = source_of(canonical_group(g))
        if not source.checks:
            assert texts.setdefault(form_of(g), source.text) == source.text
    assert 10 < len(texts) < len(groups) / 2


@pytest.mark.parametrize("a, b", [(0.0, -0.0), (3.0, 2.0)])
def test_numbers_that_are_equal_are_not_the_same(a, b):
    """0.0 == -0.0, and what is divided by them differs."""
    (x,), (y,) = (groups_of(lambda x, c=c: x / c, Tensor[64, f32]) for c in (a, b))
    assert form_of(x) != form_of(y) and kernel_of(x)[0] is not kernel_of(y)[0]
    assert kernel_of(x) is kernel_of(replace(x, name="g7"))


def test_which_value_an_op_reads_is_part_of_a_form():
    types = Tensor[64, f32], Tensor[64, f32]
    (x,), (y,) = groups_of(lambda a, b: (a - b) * a, *types), groups_of(lambda a, b: (a - b) * b,
                                                                       *types)
    assert form_of(x) != form_of(y)
    for g in (x, y):
        assert kernel_of(g)[1].text == source_of(canonical_group(g)).text


def test_a_rule_is_recorded_once_for_nodes_that_do_the_same(monkeypatch):
    """Each of them on its own line, with values of its own."""
    def f(x, y):
        a = ts.softmax(x)
        b = ts.softmax(y)
        return a, b, ts.softmax(x, axis=0)

    first = inspect.getsourcelines(f)[1]
    graph = ts.jit(f).graph(Tensor[8, 16, f32], Tensor[8, 16, f32])
    op = next(n.op for n in graph.nodes if n.op.name == "softmax")
    asked, rule = [], op.expand
    object.__setattr__(op, "expand", lambda *xs, **attrs: asked.append(attrs) or rule(*xs, **attrs))
    try:
        made = expand(graph)
    finally:
        object.__setattr__(op, "expand", rule)
    verify(made)
    assert [a["axis"] for a in asked] == [1, 0]
    lines = [n.where.line - first for n in made.nodes if n.op.name == "exp"]
    assert lines == [1, 2, 3]


def test_a_pass_that_changes_nothing_gives_its_graph():
    graph = ts.jit(lambda x, y: ts.exp(x) * y + y).graph(Tensor[8, f32], Tensor[8, f32])
    for step in (canonicalize, merge_common, remove_dead):
        assert step(graph) is graph
    twice = ts.jit(lambda x: ts.exp(x) + ts.exp(x)).graph(Tensor[8, f32])
    assert len(merge_common(twice).nodes) == 2 and len(uses(twice)) == len(readers_of(twice)) + 1


@ts.kernel
def copy(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = ts.tile.group_id(0) * 32
    y[i:i + 32] = x[i:i + 32]


@pytest.fixture
def function():
    return copy.lower(ts.zeros(64), ts.zeros(64))


def test_machine_code_is_found_from_another_folder(function, monkeypatch, tmp_path):
    """Lines are part of its name, as the code has them, by their whole paths."""
    request = CompileRequest(32, Schedule(), parse_target("sm_90a"))
    monkeypatch.chdir(Path(__file__).parent)
    here = request.key(function), print_ir(function)
    monkeypatch.chdir(tmp_path)
    assert request.key(function) == here[0] and print_ir(function) != here[1]
    first, *rest = function.body
    moved = replace(first, where=replace(first.where, line=first.where.line + 1))
    assert request.key(replace(function, body=(moved, *rest))) != here[0]
    moved = replace(first, where=replace(first.where, file="/elsewhere.py"))
    assert request.key(replace(function, body=(moved, *rest))) != here[0]


def test_what_is_known_of_a_function_is_not_known_of_its_copy(function):
    assert written_parameters(function) == {"y"}
    assert written_parameters(replace(function, body=())) == frozenset()
