"""Passes keep what a kernel computes: random programs, run before and after each of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tessera as ts
from kernels.build import build
from tessera import config
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.frontend.trace_kernel import trace
from tessera.tile.interpreter.launch import Config, run
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import For, If, Op, definitions, walk
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.passes import PIPELINE, merge, simplify, verify
from tessera.tile.passes.accumulate import accumulate
from tessera.tile.passes.single_iterations import inline_single_iterations

NAMES = ("a", "b", "c")
HEAD = """@kernel
def k(X: Tensor["n", f32], A: Tensor["M", "N", f32], Y: Tensor["n", f32], C: Tensor["M", "N", f32]):
    i = tile.linear_id()
    t = tile.local_id()
    s = tile.alloc_shared((128,), f32)
    s[t] = 0.0
    tile.barrier()
    a = X[min(i, n - 1)]
    b = 0.5 * i
    c = 1.0
    p = tile.load(A[0:8, 0:8])
    q = tile.zeros((8, 8))
"""
TAIL = """    if i < n:
        Y[i] = a + b * 0.25 - c
    if tile.group_id() == 0:
        tile.store(C[0:8, 0:8], p + q)
"""

operand = st.sampled_from([*NAMES, "1.5", "-0.5", "1.0 * t"])
value = st.one_of(
    operand,
    st.tuples(operand, st.sampled_from("+-*"), operand).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
    st.tuples(st.sampled_from(["min", "max"]), operand, operand).map(
        lambda p: f"{p[0]}({p[1]}, {p[2]})"),
    operand.map(lambda x: f"tile.tanh({x})"),
    st.tuples(operand, operand, operand).map(lambda p: f"({p[0]} if {p[1]} < {p[2]} else 2.0)"),
)
tile_value = st.sampled_from([
    "p * 0.5", "p + q", "tile.tanh(p)", "tile.dot(p, q)", "tile.dot(p, p.T, q)", "q - 1.0",
    "q + tile.dot(p, q)", "tile.dot(q, p) + tile.dot(p, q)",
    "tile.where(p > 0.0, p, q)", "p - tile.row_max(p)", "q / (1.0 + tile.row_sum(tile.abs(p)))",
    "tile.exp(p - tile.row_max(p))", "tile.cumsum(tile.tanh(q))",
])
target = st.sampled_from(NAMES)


def indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


@st.composite
def block(draw, depth: int = 0, lane: bool = False) -> list[str]:
    out: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["assign", "assign", "tile", "if", "for", "share", "while"]))
        if kind == "tile" and not lane:
            out.append(f"{draw(st.sampled_from('pq'))} = {draw(tile_value)}")
        elif kind == "if" and depth < 2:
            test = draw(st.sampled_from(["a < b", "t % 3 == 0", "tile.group_id() == 0", "n > 3"]))
            inner = lane or "group" not in test and "n >" not in test
            out += [f"if {test}:", *indent(draw(block(depth + 1, inner)))]
            if draw(st.booleans()):
                out += ["else:", *indent(draw(block(depth + 1, inner)))]
        elif kind == "for" and depth < 2:
            bound = draw(st.sampled_from(["3", "tile.group_id() + 1", "t % 4"]))
            inner = lane or bound.startswith("t %")
            leaves = draw(st.booleans())  # a break that depends on the lane: no tiles inside
            body = indent(draw(block(depth + 1, inner or leaves)))
            if leaves:
                body += ["    if c > 3.0:", "        break"]
            out += [f"for j{depth} in range(0, {bound}):", *body]
        elif kind == "while" and depth < 2:
            out += [f"w{depth} = {draw(st.integers(0, 3))}", f"while w{depth} > 0:",
                    *indent(draw(block(depth + 1, lane))), f"    w{depth} -= 1"]
        elif kind == "share" and not lane:
            out += [f"s[t] = {draw(value)}", "tile.barrier()",
                    f"{draw(target)} = s[127 - t]", "tile.barrier()"]
        else:
            out.append(f"{draw(target)} = {draw(value)}")
    return out


def arguments(kernel):
    rng = np.random.default_rng(3)
    x, a = (rng.standard_normal(s).astype(np.float32) for s in (300, (8, 8)))
    return kernel.bind((x, a, np.zeros(300, np.float32), np.zeros((8, 8), np.float32)), {})


def prepared(kernel):
    bound = arguments(kernel)
    spec = KernelSpec(tuple(bound.types.items()), (), None, ts.Schedule())
    return kernel, trace(kernel.source, kernel.fn, spec, bound.sizes)


def results(function, kernel):
    bound = arguments(kernel)
    with config.scope(debug=True):
        run(function, bound, Config(), 128, "k")
    return bound.given["Y"], bound.given["C"]


@settings(max_examples=40)
@given(block())
def test_random_programs_keep_their_results(lines):
    source = HEAD + "\n".join(indent(lines)) + "\n" + TAIL
    try:
        kernel, function = prepared(build(source)["k"])
    except TileError as error:  # two edges that differ meet: refused in words
        assume(error.code != "E_EDGE")
        raise
    verify(function)
    want = results(function, kernel)
    assert np.abs(want[0]).max() > 0 or np.isnan(want[0]).any()
    for one in PIPELINE:
        function = verify(one(function))
        got = results(function, kernel)
        assert all(np.array_equal(g, w, equal_nan=True) for g, w in zip(got, want, strict=True)), (
            one.__name__, source)
    read = parse_ir(print_ir(function))
    assert read == function
    assert all(np.array_equal(g, w, equal_nan=True)
               for g, w in zip(results(read, kernel), want, strict=True))


def traced(body: str):
    return prepared(build(HEAD + body + TAIL)["k"])[1]


def ops(function) -> list[str]:
    return [n.name for n in walk(function.body) if isinstance(n, Op)]


def test_simplify_removes_what_nobody_reads():
    function = traced(
        "    unused = tile.exp(a)\n    for j in range(3):\n        dead = tile.sin(b)\n")
    assert {"exp", "sin"} <= set(ops(function))
    after = simplify(function)
    assert not {"exp", "sin"} & set(ops(after))
    assert not any(isinstance(n, For) for n in walk(after.body))


def test_simplify_drops_carried_values_that_stay():
    after = simplify(traced("    for j in range(3):\n        a = a + 1.0\n        b = b\n"))
    (loop,) = [n for n in walk(after.body) if isinstance(n, For)]
    assert [d.value.name for d in loop.carried] == ["a_1"] or len(loop.carried) == 1


def test_merge_keeps_one_of_equal_ops():
    function = traced("    a = tile.tanh(b) + tile.tanh(b)\n")
    assert ops(function).count("tanh") == 2 and ops(merge(function)).count("tanh") == 1


def test_merge_does_not_reach_out_of_branches():
    function = traced("    if a < b:\n        a = tile.tanh(b)\n    c = tile.tanh(b)\n")
    assert ops(merge(function)).count("tanh") == 2


@pytest.mark.parametrize("body, matmuls, gone", [
    ("    q = q + tile.dot(p, q)\n", [3], 1),
    ("    for j in range(3):\n        q += p @ q\n", [3], 1),
    ("    q = tile.dot(q, p) + tile.dot(p, q)\n", [2, 3], 1),
    ("    q = tile.dot(p, q) + tile.dot(p, q, q)\n", [3, 3], 1),
    ("    z = tile.dot(p, q)\n    q = q + z + tile.tanh(z)\n", [2], 0),  # z is read twice
    ("    q = tile.dot(p, q) + tile.row_sum(q)\n", [2], 0),  # a column is spread over it
    ("    z = tile.dot(p, q)\n    tile.barrier()\n    q = q + z\n", [2], 0),
    ("    q = tile.dot(p, q, f16) + tile.cast(q, f16)\n", [2], 0)], ids=str)
def test_a_product_that_is_added_adds_itself(body, matmuls, gone):
    """Where nothing else reads it, no op stands between that writes or waits, and sums are not
    rounded."""
    before = traced(body)
    after = accumulate(before)
    assert [len(n.args) for n in walk(after.body) if isinstance(n, Op) and n.name == "matmul"
            ] == matmuls
    assert ops(before).count("add") - ops(after).count("add") == gone


@pytest.mark.parametrize("outer", ["for j in range(3):", "if n > 3:"])
def test_what_a_single_iteration_makes_leaves_what_is_around_it(outer):
    before = traced(f"    j = n\n    {outer}\n        for k in range(j, j + 1):\n"
                    "            a = a + 1.0\n")
    after = verify(inline_single_iterations(simplify(before)))
    loops = [sum(isinstance(n, For) for n in walk(f.body)) for f in (before, after)]
    assert loops == ([2, 1] if outer[:3] == "for" else [1, 0])


def test_verify_refuses_ill_formed_ir():
    function = traced("    a = tile.tanh(b)\n")
    text = print_ir(function)
    for wrong, message in (
        (text.replace("tanh(%b)", "tanh(%nowhere)"), "used where it is not defined"),
        (text.replace("lane f32 = tanh", "lane f64 = tanh"), "tanh gives lane f32, not lane f64"),
        (text.replace("tanh(%b)", "add(%b)"), "add"),
        (text.replace("%a_1: lane f32 = tanh", "%b: lane f32 = tanh"), "defined twice")):
        if wrong == text:
            continue
        with pytest.raises(ts.TesseraError, match=message) if message != "add" else pytest.raises(
                (ts.TesseraError, TypeError, IndexError, ValueError)):
            made = parse_ir(wrong)
            verify(made)
            results(made, prepared(build(HEAD + TAIL)["k"])[0])


def test_uniform_values_are_typed_so():
    function = traced("    u = tile.group_id() * 2 + n\n    if u > 3:\n        c = 2.0\n"
                      "    a = a * u + c\n")
    types = {v.name: str(t) for v, t in definitions(function).items()}
    assert types["u"] == "int32" and types["i"] == "lane int32"
    branch = next(n for n in walk(function.body) if isinstance(n, If))
    assert str(branch.outs[0].type) == "f32"
