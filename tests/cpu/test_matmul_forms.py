"""What computes each matmul of a lowered graph: tensor cores for all operands of 16 bits or fewer.

Models as users write them, forward and backward, lowered without a GPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.passes import library_ops, place_blocks
from tessera.kernels.matmul_blocks import (
    BLOCKS,
    CROWDED,
    LARGE,
    MatmulBlocks,
    MatmulExtents,
    choose_blocks,
)
from tessera.numerics import as_type
from tolerance import assert_close

TARGETS = {"sm_90a": "wgmma", "sm_80": "mma"}
PRODUCTS = "bf16 @accum(f32)"


def forms(fn: Any, *args: Any, target: str) -> Counter:
    """(bits of the operands, form) -> launches that multiply so."""
    return Counter((as_type(m.operands[0]).dtype.bits, form)
                   for m in ts.jit(fn).schedule(*args, target=target).matmuls for form in m.how.all)


def narrow_by_others(found: Counter, target: str) -> Counter:
    """The launches of operands of 16 bits or fewer that are not by tensor cores."""
    return Counter({k: n for k, n in found.items() if k[0] <= 16 and k[1] != TARGETS[target]})


# --- a GPT-2 block, as written by hand ------------------------------------------------------------
def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ts.cast(ts.cast(x, PRODUCTS) @ ts.cast(w, PRODUCTS), "f32") + b


def attention(x: Tensor, p: dict, heads: int) -> Tensor:
    B, T, d = x.shape
    q, k, v = (ts.transpose(ts.reshape(ts.cast(t, PRODUCTS), (B, T, heads, d // heads)),
                            (0, 2, 1, 3))
               for t in ts.split(linear(x, p["qkv"], p["qkv_bias"]), 3, axis=-1))
    y = ts.transpose(ts.attention(q, k, v, causal=True), (0, 2, 1, 3))
    return linear(ts.reshape(y, (B, T, d)), p["out"], p["out_bias"])


def gpt2(p: dict, tokens: Tensor, targets: Tensor, heads: int) -> Tensor:
    x = ts.embedding(p["table"], tokens) + p["positions"]
    x = x + attention(ts.layernorm(x, p["g1"], p["b1"]), p, heads)
    h = ts.gelu(linear(ts.layernorm(x, p["g2"], p["b2"]), p["up"], p["up_bias"]))
    x = x + linear(h, p["down"], p["down_bias"])
    logits = ts.cast(x, PRODUCTS) @ ts.transpose(ts.cast(p["table"], PRODUCTS))
    return ts.cross_entropy(logits, targets)


def gpt2_types(vocabulary: int, T: int, d: int) -> dict:
    sizes = {"table": (vocabulary, d), "positions": (T, d), "qkv": (d, 3 * d), "qkv_bias": (3 * d,),
             "out": (d, d), "up": (d, 4 * d), "up_bias": (4 * d,), "down": (4 * d, d)}
    ones = ("g1", "b1", "g2", "b2", "out_bias", "down_bias")
    return {n: ts.zeros(s) for n, s in (sizes | {n: (d,) for n in ones}).items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("vocabulary", [50304, 50257])
def test_a_gpt2_block_and_its_gradient(target, vocabulary):
    p, tokens = gpt2_types(vocabulary, 64, 128), ts.zeros((2, 64), "int32")
    found = forms(lambda p, t, u: ts.value_and_grad(lambda p: gpt2(p, t, u, 2))(p), p, tokens,
                  tokens, target=target)
    assert sum(found.values()) >= 18  # five products, attention, and their derivatives
    assert not any(bits > 16 for bits, _ in found)
    # rows of 50257 elements are not of 16 bytes, which TMA needs: two products read such a matrix
    others = {(16, "mma"): 2} if target == "sm_90a" and vocabulary % 8 else {}
    assert narrow_by_others(found, target) == others


@pytest.mark.parametrize(("dtype", "target"), [
    ("bf16", "sm_90a"), ("f16", "sm_90a"), ("fp8_e4m3 @loss_scale(1024)", "sm_90a"),
    ("bf16", "sm_80")])
def test_the_model_of_train_py(dtype, target, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    transformer = __import__("transformer")
    c = transformer.Config(layers=1, T=64, B=2, dtype=dtype)
    (run,) = transformer.stages_of(c)
    tokens = ts.zeros((c.B, c.T), "int32")
    params = transformer.init_params(c)
    found = forms(lambda p, t, u: ts.value_and_grad(
        lambda p: transformer.loss_of(run(p, t), u))(p), params, tokens, tokens, target=target)
    kind = as_type(dtype).dtype
    assert sum(n for (bits, _), n in found.items() if bits == kind.bits) >= 15
    # wgmma reads fp8 only along the contracted axis: operands of matmuls are copied so, and the
    # three kernels of attention are mma
    others = {(8, "mma"): 3} if kind.bits == 8 else {}
    assert narrow_by_others(found, target) == others


def test_copies_say_why():
    """One for each operand that does not lie along the contracted axis, shared by its readers."""
    x, w = ts.zeros((64, 128), "fp8_e4m3"), ts.zeros((128, 64), "fp8_e4m3")
    made = CudaProgram(ts.jit(lambda x, w: (x @ w, ts.exp(x) @ w)).graph(x, w), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("move") == 1 and kinds.count("gemm") == 2
    assert "copy of b, because wgmma reads fp8_e4m3 only along the contracted axis" in \
        "\n".join(line.text for line in made.plan.lines())


def test_a_transposed_result_is_that_of_transposed_operands(rng):
    x, w = (ts.tensor(rng.standard_normal((32, 32)).astype("float32"), "bf16") for _ in range(2))
    made = CudaProgram(ts.jit(lambda x, w: ts.transpose(x @ w)).graph(x, w), "sm_90a")
    assert [g.kind for g in made.plan.groups] == ["gemm"]
    assert_close(made.run([x.array, w.array])[0], ts.transpose(x @ w).array, "bf16", n=32)


# --- reshapes beside matmuls ----------------------------------------------------------------------
def test_what_is_widened_cut_and_rounded_again_is_a_view(rng: Any) -> None:
    """Each element is as it was; two products, and no loop between them."""
    x, w, u = (ts.tensor(rng.standard_normal(s).astype("f4"), "bf16")
               for s in ((64, 48), (48, 3 * 32), (64, 64)))

    def f(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        parts = ts.reshape(ts.cast(x @ w, "f32"), (64, 3, 32))
        return u @ ts.cast(parts[:, 1], PRODUCTS)

    program = CudaProgram(ts.jit(f).graph(x, w, u), "sm_90a")
    assert [g.kind for g in program.plan.groups if g.kind != "view"] == ["gemm", "gemm"]
    assert_close(np.asarray(program.run([t.array for t in (x, w, u)])[0], np.float64),
                 np.asarray(f(x, w, u).array, np.float64), "bf16", n=64)


def _cut_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ts.reshape(x @ w, (2, 32, 48)) + b


def _cut_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ts.reshape(x @ w + b, (2, 32, 48))


def _not_cut(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ts.reshape(x, (2, 32, 40)) @ w + b


@pytest.mark.parametrize("spelling", [_cut_first, _cut_last, _not_cut])
def test_a_reshape_beside_a_matmul_is_no_loop_of_its_own(spelling: Any, rng: Any) -> None:
    """The bias is the matmul's, and gradients are rounded by the loop that makes them: one loop of
    the whole space beside the casts of the operands, and the values of f64."""
    shapes = ((64, 40), (40, 48), (48,), (2, 32, 48))
    args = [ts.tensor(rng.standard_normal(s).astype("f4")) for s in shapes]

    def loss(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        y = spelling(*(ts.cast(t, PRODUCTS) for t in (x, w, b)))
        return ts.sum(ts.cast(ts.cast(y, "f32") * ts.cast(y, "f32"), "f32") * g)

    program = CudaProgram(ts.jit(ts.value_and_grad(loss, argnums=(0, 1, 2))).graph(*args), "sm_90a")
    groups = program.plan.groups
    assert [g.kind for g in groups].count("gemm") == 3
    assert [g.kind for g in groups if len(g.steps) and g.kind in ("loop", "rows")
            and max(map(len, (o.shape for o in g.writes))) == 3] == ["rows"]
    assert "add" in [s.op for g in groups if g.kind == "gemm" for s in g.steps]
    x, w, b, g = (np.asarray(ts.cast(ts.cast(t, PRODUCTS), "f64")) if i < 3 else t.array.astype(
        "f8") for i, t in enumerate(args))
    y = x @ w + b
    dy = 2 * y * g.reshape(64, 48)
    for got, want in zip(program.run([t.array for t in args]),
                         ((y * y * g.reshape(64, 48)).sum(), dy @ w.T, x.T @ dy, dy.sum(0)),
                         strict=True):
        scale = float(np.abs(dy).sum()) if np.ndim(want) == 0 else float(np.abs(want).max())
        assert_close(np.asarray(got, "f8"), want, "bf16", n=64, scale=scale)


def test_rows_that_a_reshape_cuts_stay_as_they_are(rng: Any) -> None:
    """A bias of rows of 48 is none of rows of 24."""
    args = [ts.tensor(rng.standard_normal(s).astype("f4")) for s in ((64, 40), (40, 48), (48,))]
    made = CudaProgram(ts.jit(lambda x, w, b: ts.exp(ts.reshape(x @ w + b, (64, 2, 24)))).graph(
        *args), "sm_90a")
    x, w, b = (t.array.astype("f8") for t in args)
    assert_close(made.run([t.array for t in args])[0], np.exp(x @ w + b).reshape(64, 2, 24), "f32",
                 n=40, scale=float(np.exp(x @ w + b).max()))


@pytest.mark.parametrize("target", TARGETS)
def test_a_mixture_of_experts(target):
    def loss(x, gates, w1, w2):
        """Every expert on every token, weighted by its gate.   x: [N, D]   w1: [E, D, F]"""
        weights = ts.softmax(ts.cast(ts.cast(x, PRODUCTS) @ ts.cast(gates, PRODUCTS), "f32"))
        h = ts.gelu(ts.einsum("nd,edf->enf", ts.cast(x, PRODUCTS), ts.cast(w1, PRODUCTS)))
        y = ts.einsum("enf,efd->end", h, ts.cast(w2, PRODUCTS))
        return ts.mean(ts.sum(ts.cast(y, "f32") * ts.transpose(weights)[:, :, None], axis=0) ** 2)

    args = [ts.zeros(s) for s in ((64, 128), (128, 8), (8, 128, 256), (8, 256, 128))]
    found = forms(lambda *a: ts.grad(loss, argnums=(0, 1, 2, 3))(*a), *args, target=target)
    assert found[16, TARGETS[target]] >= 9 - (target == "sm_90a")  # a sum of two is one
    assert not narrow_by_others(found, target)


# --- parts of long sums -------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_long_sum_of_few_blocks_is_taken_in_parts(layout: str, rng: Any) -> None:
    M, K, N = 70, 8200, 40
    shapes = [(K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)]
    a, b = (ts.cast(ts.tensor(rng.standard_normal(s).astype("f4")), "bf16") for s in shapes)

    def f(a: Tensor, b: Tensor) -> Tensor:
        a, b = (ts.transpose(x) if way == "t" else x for x, way in zip((a, b), layout, strict=True))
        return ts.cast(ts.cast(a, PRODUCTS) @ ts.cast(b, PRODUCTS), "f32")

    program = CudaProgram(ts.jit(f).graph(a, b), "sm_90a")
    first, second, *_ = program.plan.groups
    parts, depth = first.writes[0].shape[0], first.attr("depth")
    assert parts > 1 and depth % 64 == 0 and (parts - 1) * depth < K <= parts * depth
    assert (first.kind, second.kind) == ("gemm", "columns")
    x, y = (x.array.astype("f8") for x in (a, b))
    want = (x.T if layout[0] == "t" else x) @ (y.T if layout[1] == "t" else y)
    (got,) = program.run([a, b])
    assert_close(got, want, "bf16", n=K)


@pytest.mark.parametrize("parts, kinds", [(2, ["gemm", "loop"]), (5, ["gemm", "loop"]),
                                          (6, ["gemm", "columns", "loop"])])
def test_few_parts_are_added_where_they_are_read(parts: int, kinds: list, rng: Any,
                                                 monkeypatch: Any) -> None:
    """An update reads the parts of its gradient, which is nowhere in memory."""
    M, K, N = 70, 64 * parts - 3, 40
    monkeypatch.setattr(place_blocks, "blocks_of",
                        lambda *args: (MatmulBlocks(64, 64, parts, 64), True))

    def update(p: Tensor, m: Tensor, x: Tensor, g: Tensor) -> tuple:
        dw = ts.cast(ts.transpose(ts.cast(x, PRODUCTS)) @ ts.cast(g, PRODUCTS), "f32")
        m = 0.5 * m + dw
        return p - m * (dw * dw), m

    p, m, x, g = (ts.tensor(rng.standard_normal(s).astype("f4"))
                  for s in ((M, N), (M, N), (K, M), (K, N)))
    x, g = (ts.cast(v, "bf16") for v in (x, g))
    program = CudaProgram(ts.jit(update).graph(p, m, x, g), "sm_90a")
    assert [s.kind for s in program.plan.groups] == kinds
    p8, m8, x8, g8 = (np.asarray(v.array, "f8") for v in (p, m, x, g))
    dw = x8.T @ g8
    got_p, got_m = program.run([p, m, x, g])
    assert_close(got_m, 0.5 * m8 + dw, "bf16", n=K)
    assert_close(got_p, p8 - (0.5 * m8 + dw) * dw * dw, "bf16", n=K)


def test_a_result_of_many_blocks_is_summed_at_once() -> None:
    types = Tensor[8192, 4096, "bf16"], Tensor[4096, 8192, "bf16"]
    groups = CudaProgram(ts.jit(lambda a, b: a @ b).graph(*types), "sm_90a").plan.groups
    assert [g.kind for g in groups] == ["gemm"]


# --- blocks -------------------------------------------------------------------------------------
def gradients(x: Any, w: Any, b: Any, g: Any) -> Any:
    """A product with a bias, and its gradients by the operands."""
    x, w, g = (ts.cast(v, PRODUCTS) for v in (x, w, g))
    return (ts.gemm(x, w, b), g @ ts.transpose(w),
            ts.cast(ts.transpose(x) @ g, "f32"))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_gives_the_product(block: tuple, rng: Any, monkeypatch: Any) -> None:
    """Extents that no block divides, and weights' gradients in parts."""
    for name in ("BLOCKS", "LARGE"):
        monkeypatch.setattr(library_ops, name, (block,))
    M, K, N = 1100, 270, 330
    x, w, b, g = (ts.tensor(rng.standard_normal(s).astype("f4")) for s in
                  ((M, K), (K, N), (N,), (M, N)))
    x, w, g = (ts.cast(v, "bf16") for v in (x, w, g))
    program = CudaProgram(ts.jit(gradients).graph(x, w, b, g), "sm_90a")
    products = [p for p in program.plan.groups if p.kind == "gemm"]
    assert len(products) == 3 and {(p.schedule.m, p.schedule.n) for p in products} == {block}
    xs, ws, bs, gs = (np.asarray(v.array, "f8") for v in (x, w, b, g))
    for got, want, n in zip(program.run([x, w, b, g]),
                            (xs @ ws + bs, gs @ ws.T, xs.T @ gs), (K, N, M), strict=True):
        assert_close(got, want, "bf16", n=n)


BIAS, TILE = (144,), (200, 144)


def layer_of(M: int, N: int, K: int, beside: tuple, layout: str, wide: bool, rng: Any
             ) -> tuple[CudaProgram, list, np.ndarray]:
    """relu(x w + b) as a program, its operands as the layout says, and what it gives. wide: the
    result in f32 too."""
    x, w, b = (ts.tensor(rng.standard_normal(s).astype("f4")) for s in ((M, K), (K, N), beside))
    x, w = (ts.cast(v, "bf16") for v in (x, w))
    xs, ws, bs = (np.asarray(v.array, "f8") for v in (x, w, b))
    given = [ts.cast(ts.tensor(np.asarray(v.array, "f4").T.copy()), "bf16") if way == "t" else v
             for v, way in zip((x, w), layout, strict=True)]

    def layer(x: Any, w: Any, b: Any) -> Any:
        x, w = (ts.cast(v.T if way == "t" else v, PRODUCTS)
                for v, way in zip((x, w), layout, strict=True))
        y = ts.relu(ts.cast(x @ w, "f32") + b)
        return (ts.cast(y, "bf16"), y) if wide else ts.cast(y, "bf16")

    program = CudaProgram(ts.jit(layer).graph(*given, b), "sm_90a")
    return program, [*given, b], np.maximum(xs @ ws + bs, 0)


@pytest.mark.parametrize("beside, swapped", [(BIAS, True), (TILE, False)], ids=["bias", "tile"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_blocks_of_the_transposed_result(layout: str, wide: bool, beside: tuple, swapped: bool,
                                         rng: Any, monkeypatch: Any) -> None:
    """Where nothing that follows reads or writes elements of it one by one."""
    monkeypatch.setattr(place_blocks, "or_transposed",
                        lambda *args: MatmulBlocks(96, 128, swapped=True))
    program, given, want = layer_of(*TILE, 264, beside, layout, wide, rng)
    (group,) = program.plan.groups
    said = any("96 x 128 of the transposed result" in n for n in group.schedule.notes)
    assert said == (swapped and not wide)
    for got in program.run(given):
        assert_close(got, want, "bf16", n=264)


@pytest.mark.parametrize("M, K", [(1, 264), (5, 2560), (16, 264), (30, 264)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("whole", [False, True], ids=["bias", "tile"])
def test_few_rows_are_multiplied_as_narrow_columns(M: int, K: int, layout: str, whole: bool,
                                                   rng: Any) -> None:
    """As the library's own routine does, whatever follows; long sums of few blocks in parts."""
    program, given, want = layer_of(M, 144, K, (M, 144) if whole else BIAS, layout, True, rng)
    product = next(g for g in program.plan.groups if g.kind == "gemm")
    if M <= 16 and (layout[0] == "n" or M == 16):  # TMA brings no column of x that is shorter
        assert product.schedule.m == max(8, 1 << (M - 1).bit_length())
    for got in program.run(given):
        assert_close(got, want, "bf16", n=K)


@pytest.mark.parametrize("extents, split, block, parts", [
    ((8192, 768, 3072), False, (128, 192), 1),  # 256 blocks in two waves, for 192 in two
    ((32768, 3072, 768), False, (192, 192), 1),
    ((768, 3072, 32768), True, (192, 192), 2),  # a weight's gradient: 128 groups in one wave
    ((1024, 3072, 16384), True, (128, 192), 1),
    ((1024, 1024, 16384), True, (128, 256), 4),
    ((8192, 2048, 2048), True, (128, 256), 1)])
def test_blocks_are_chosen_by_the_estimate(extents: tuple, split: bool, block: tuple,
                                           parts: int) -> None:
    """What was quickest of these on an H200."""
    M, N, K = extents
    found = choose_blocks(MatmulExtents(M, N, K, 16, 32 if split else 16), LARGE, split)
    assert ((found.rows, found.columns), found.parts) == (block, parts)
    assert (found.parts - 1) * found.depth < K


def test_what_follows_a_product_leaves_its_block_registers() -> None:
    types = Tensor[4096, 768, "bf16"], Tensor[768, 3072, "bf16"], Tensor[4096, 3072, "f32"]
    rest = ts.jit(lambda x, w, r: r + ts.gemm(ts.cast(x, PRODUCTS), ts.cast(w, PRODUCTS),
                                              ts.zeros((3072,)))).graph(*types)
    (group,) = (g for g in CudaProgram(rest, "sm_90a").plan.groups if g.kind == "gemm")
    assert (group.schedule.m, group.schedule.n) in CROWDED
    assert any("reads a tile of the same extents" in n for n in group.schedule.notes)


@pytest.mark.parametrize("extents, pairs", [((3000, 5000, 1000), True),
                                            ((3072, 4096, 1024), False)])
def test_blocks_are_in_pairs_where_rows_are_two_lines(extents, pairs):
    M, K, N = extents
    x, w, b = (ts.zeros(s, dtype=d) for s, d in (((M, K), "bf16"), ((K, N), "bf16"), ((N,), "f32")))
    plan = ts.jit(lambda x, w, b: ts.relu(ts.gemm(x, w, b))).schedule(x, w, b, target="sm_90a")
    (launch,) = plan.matmuls
    assert launch.how.name == "wgmma"
    assert any("in pairs" in note for note in launch.notes) == pairs
