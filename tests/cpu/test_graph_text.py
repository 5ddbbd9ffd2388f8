"""Graph IR as text that reads back: the graph of each op of the registry, and of programs."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import CASES, Draws
from tessera.errors import GraphError
from tessera.graph.graph_text import parse_graph, print_graph
from tessera.graph.interpret import interpret
from tessera.graph.ir import VERSION, Graph
from tessera.graph.op import Aval
from tessera.graph.text_values import FUNCTIONS
from tessera.graph.trace import apply, trace


def read_again(graph: Graph) -> Graph:
    text = print_graph(graph)
    again = parse_graph(text, [t for _, t in graph.captures])
    assert print_graph(again) == text and text.startswith(f"graph {graph.name!r} v{VERSION}\n")
    assert again.hash == graph.hash and str(again) == str(graph)
    return again


def several(made):
    return [*made] if isinstance(made, tuple | list) else [made]


@pytest.mark.parametrize("op, s", CASES)
def test_the_graph_of_every_op_reads_back(op, s, rng):
    avals = [Aval(x.shape, x.type) for x in map(Draws(rng), s.args)]
    graph = trace(lambda *xs: several(apply(op, *xs, **s.attrs)), avals, op.name)
    if op.name == "kernel" or any(callable(v) and v not in FUNCTIONS.values()
                                  for v in s.attrs.values()):
        with pytest.raises(GraphError, match=f"{op.name} has .*which the text of a graph cannot"):
            print_graph(graph)
    else:
        read_again(graph)


def test_a_program_with_loops_branches_rules_and_captures(rng):
    w = ts.param(rng.standard_normal((4, 4)), "f32")
    w.name = 'a "quoted" 50% name'
    table = ts.tensor(rng.standard_normal(4), "bf16")

    @ts.jit
    def f(x):
        def body(c, row):
            c = ts.where(c > np.inf, -np.inf, ts.tanh(c @ w + row))
            return c, ts.sum(c)

        c, sums = ts.scan(body, x[0], x)
        c = ts.cond(ts.sum(c) > 0.0, lambda c: c * 2.0, lambda c: -c, c)
        return ts.sum(c + ts.cast(table, "f32")) + ts.mean(ts.maximum(sums, 0.0))

    x = ts.tensor(rng.standard_normal((3, 4)), "f32")
    for graph in (f.graph(x), ts.jit(ts.grad(f)).graph(x)):
        again = read_again(graph)
        for a, b in zip(interpret(again, [x.array]), interpret(graph, [x.array]), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("policy", [None, "save_matmuls",
                                    ts.remat_policies.save_ops("tanh", "sin")], ids=str)
def test_what_is_computed_again_says_what_is_kept(policy, rng):
    layer = ts.checkpoint(lambda x, w: ts.tanh(ts.sin(x) @ w), policy=policy)
    x, w = (ts.tensor(rng.standard_normal((3, 3))) for _ in range(2))
    loss = lambda x, w: ts.sum(ts.scan(lambda c, _: (layer(c, w), None), x, length=2)[0])  # noqa: E731
    for f in (loss, ts.grad(loss, argnums=(0, 1))):
        graph = ts.jit(f).graph(x, w)
        again = read_again(graph)
        for a, b in zip(interpret(again, [x.array, w.array]), interpret(graph, [x.array, w.array]),
                        strict=True):
            assert a.tobytes() == b.tobytes()
    with pytest.raises(GraphError, match="checkpoint has policy=.*cannot hold"):
        print_graph(ts.jit(ts.checkpoint(ts.sin, policy=lambda node: True)).graph(x))


def test_a_kernel_is_named_shortly():
    @ts.kernel
    def twice(x: ts.Tensor["N", ts.f32]) -> ts.Tensor["N", ts.f32]:
        return ts.tile.load(x[tile_n:tile_n+4]) * 2.0  # noqa: F821

    with pytest.raises(GraphError, match=r"kernel has call=twice\(\), which the"):
        print_graph(ts.jit(lambda x: twice(x) + 1.0).graph(ts.ones((6,))))


GOOD = """graph 'f' v1
  %0: 'f32'[3] = input
  %1: 'f32'[3] = exp(%0) {} loc('a.py', 3, 'y = {x} # (1', (), '', '')
  return %1
"""


def test_a_text_by_hand():
    graph = parse_graph(GOOD)
    assert print_graph(graph) == GOOD
    assert str(graph.nodes[0].where) == "a.py:3  y = {x} # (1"
    (y,) = interpret(graph, [np.zeros(3, np.float32)])
    assert (y == 1).all()


@pytest.mark.parametrize(("old", "new", "says"), [
    (" v1", " v2", r"the graph is of version 2, this Tessera reads up to version 1"),
    ("exp", "exq", r"an op 'exq', which is not registered here[\s\S]*exp"),
    ("return %1", "return %2", "line 4 is no Graph IR"),
    ("exp(%0)", "exp(%7)", "line 3 is no Graph IR"),
    ("{}", "{axis=__import__('os')}", "line 3 is no Graph IR"),
    ("{}", "{axis=1 + 1}", "line 3 is no Graph IR"),
    ("  return %1\n", "", "is no Graph IR"),
    ("return %1\n", "return %1\nmore\n", "line 5 stands behind the end"),
    ("'f32'[3] = exp", "'f32'[4] = exp", "its node says"),
    ("  %1", "   %1", "line 3 is no Graph IR")])
def test_other_texts_are_refused(old, new, says):
    assert old in GOOD
    with pytest.raises(GraphError, match=says):
        parse_graph(GOOD.replace(old, new))


def test_what_has_no_text():
    f = ts.jit(lambda x: x + 1.0)
    with pytest.raises(GraphError, match="extents that are names"):
        print_graph(f.graph(ts.Tensor["N", ts.f32]))
