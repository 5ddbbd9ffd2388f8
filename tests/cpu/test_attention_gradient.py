"""The gradient of attention by the library's kernels: under the interpreter, against f64."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, result_and_cotangents, sizes64
from tessera import Tensor, bf16
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import program_of
from tessera.graph.simplify import simplify
from tessera.kernels.attention import largest_share, tile_knobs
from tolerance import assert_close

HEADS = {  # extents of queries, of keys, width of values
    "heads": ((2, 3, 40, 32), (2, 3, 40, 32), 32),
    "cross": ((2, 33, 16), (2, 70, 16), 24),
    "groups": ((1, 4, 37, 32), (1, 2, 37, 32), 16),
    "more queries than keys": ((1, 40, 16), (1, 24, 16), 16),
    "wide heads": ((1, 1, 36, 256), (1, 1, 36, 256), 256),
    "odd width": ((2, 30, 80), (2, 30, 80), 80),
}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_against_f64(name, causal, dtype, rng):
    q, k, E = HEADS[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    wide = [np.asarray(ts.cast(x, "f64")) for x in xs]
    want, sizes = attention64(*wide, causal), sizes64(*wide, causal)
    made = CudaProgram(ts.jit(result_and_cotangents(causal=causal)).graph(*xs), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    own = not (causal and q[-2] > k[-2])  # else the first queries see no key, and give 0
    assert kinds.count("attention") == own and kinds.count("launch") == 3 - own
    assert "gemm" not in kinds
    for got, w, size in zip(made.run([x.array for x in xs]), want, sizes, strict=True):
        assert_close(np.asarray(got, np.float64), w, dtype, n=k[-2] + q[-1], scale=size)
    here = result_and_cotangents(causal=causal)(*xs)  # and on the CPU
    for got, w, size in zip(here, want, sizes, strict=True):
        assert_close(np.asarray(ts.cast(got, "f64")), w, dtype, n=k[-2] + q[-1], scale=size)


def test_a_gradient_without_the_result_in_its_graph(rng):
    """The sums of the weights are made where they are needed."""
    q, g = (ts.tensor(rng.standard_normal((2, 20, 16)).astype(np.float32)) for _ in range(2))

    def f(q, g):
        loss = ts.checkpoint(lambda q: ts.sum(ts.attention(q, q, q) * g))
        return ts.grad(loss)(q)

    (got,) = CudaProgram(ts.jit(f).graph(q, g), "sm_90a").run([q.array, g.array])
    _, *want = attention64(*(np.asarray(x, np.float64) for x in (q, q, q, g)), False)
    assert_close(got, sum(want), "f32", n=64)


def test_what_the_kernels_do_not_take_is_computed_by_others(rng):
    """f64: the composition, on GPUs too."""
    q = ts.tensor(rng.standard_normal((1, 2, 9, 8)))
    f = lambda q: ts.grad(lambda q: ts.sum(ts.attention(q, q, q, causal=True) ** 2))(q)  # noqa: E731
    made = CudaProgram(ts.jit(f).graph(q), "sm_90a")
    assert not {"attention", "launch"} & {g.kind for g in made.plan.groups}
    assert_close(made.run([q.array])[0], f(q).array, "f64", n=64)


def test_second_derivatives_are_those_of_the_composition(rng):
    q = ts.tensor(rng.standard_normal((2, 5, 4)))
    once = ts.grad(lambda q: ts.sum(ts.attention(q, q, q) ** 2))
    assert ts.gradcheck(once, (q,))


@pytest.mark.parametrize("causal", [False, True])
def test_both_run_their_common_ops_once(causal):
    """On a CPU the gradient reads the weights that the result made."""
    both = ts.jit(result_and_cotangents(causal=causal))
    graph = both.graph(*(ts.zeros((2, 8, 4)) for _ in range(4)))
    names = [n.op.name for n in simplify(graph).nodes]
    assert names.count("matmul") == 6 and names.count("exp") == 1


# queries, heads of 64, causal; whether the blocks of queries are dealt out beforehand
DEALT = [(512, 512, True, True), (1024, 256, True, False), (512, 96, True, False),
         (4096, 256, True, False), (512, 512, False, False)]


@pytest.mark.parametrize("S, heads, causal, static", DEALT)
def test_short_causal_blocks_are_dealt_out_where_that_is_even(S, heads, causal, static):
    assert (tile_knobs(S, heads, 64, 128, causal) == {"TILES": "static"}) == static
    x = Tensor[1, heads, S, 64, bf16]
    made = program_of(ts.jit(lambda q, k, v: ts.attention(q, k, v, causal=causal)).graph(x, x, x),
                      "sm_90a")
    (group,) = (g for g in made.plan.groups if g.kind == "attention")
    assert (dict(group.schedule.extra).get("TILES") == "static") == static


def test_blocks_that_are_dealt_out_take_turns():
    """As the share says that decides it: by the order of a persistent kernel."""
    assert largest_share(1, 132 * 8, 132) == 1.0 and largest_share(16, 4, 132) > 1.5
    assert tile_knobs(8192, 64, 128, 128, False, spans=True) == {"TILES": "static"}
    assert tile_knobs(8192, 64, 64, 192, False, spans=True) == {"stages": 3, "PIN": 0}
    assert tile_knobs(8192, 64, 64, 192, True, window=9) == {"stages": 4}
    assert not tile_knobs(512, 512, 64, 128, True, window=9)
