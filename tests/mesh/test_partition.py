"""What a partitioned program exchanges, keeps and refuses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import tessera as ts
from mesh.sharded import numbers, spec
from mesh.sharding import MESH, block_layouts, legal, odd_layouts, spread
from tessera.graph.ir import Graph, subgraphs
from tessera.graph.op import OPS
from tessera.graph.simplify import simplify
from tessera.graph.trace import apply
from tessera.mesh.collectives.exchange_ops import ONE_EXCHANGE_BYTES
from tessera.mesh.layout import Layout, Split
from tessera.mesh.sharding.localize import localize
from tessera.mesh.tensor import DistTensor
from tessera.planning.flops import peak_memory
from tolerance import assert_close


def put(x: np.ndarray, *dims: tuple[int, str], dtype: str | None = None) -> DistTensor:
    return ts.dist.distribute(x, spec(*dims), dtype, mesh=MESH)


def kinds(f: Callable) -> Counter:
    return Counter(c.op for c in f.plan)


# --- all layouts ---------------------------------------------------------------------------------
SMALL = {  # op: attributes and shapes; every pair of layouts of two operands is tried
    "matmul": ({"accum": ts.f32}, (4, 5), (5, 3)),
    "add": ({}, (2, 3), (2, 3)),
    "mul": ({}, (4, 1), (3,)),
    "concatenate": ({"axis": 0}, (2, 3), (5, 3)),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_pair_of_layouts(name: str, rng: np.random.Generator) -> None:
    attrs, *shapes = SMALL[name]
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    want = apply(OPS[name], *xs, **attrs)
    for pair in itertools.product(*(block_layouts(x.ndim) for x in xs)):
        args = [spread(x, at, rng) for x, at in zip(xs, pair, strict=True)]
        got = apply(OPS[name], *args, **attrs)
        assert_close(got.numpy(), want.numpy(), dtype="f32", n=5,
                     scale=1.0 if name == "matmul" else None)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0,), (1, 1), (7, 1), (2, 13)])
def test_extents_of_nothing_and_less_than_the_parts(shape, rng) -> None:
    x = ts.tensor(rng.standard_normal(shape).astype(np.float32))

    def fn(x):
        return (ts.tanh(x) * 2.0, ts.sum(x), ts.sum(x, axis=0), ts.transpose(x), x[1:],
                ts.concatenate([x, x], axis=-1), ts.pad(x, 1),
                ts.reshape(x, (-1,)) if x.size else x)

    want = fn(x)
    for at in block_layouts(x.ndim):
        for got, w in zip(ts.jit(fn)(spread(x, at, rng)), want, strict=True):
            assert_close(got.numpy(), w.numpy(), dtype="f32", n=13, scale=1.0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("find", [ts.argmax, ts.argmin])
def test_the_first_of_equal_extrema_and_nan(find, axis, rng) -> None:
    """Over a split dimension too, and with integers."""
    a = rng.integers(-2, 3, (5, 7)).astype(np.float32)
    for x in (a, np.where(rng.random(a.shape) < 0.2, np.nan, a), a.astype(np.int64)):
        want = getattr(np, find.__name__)(x, axis=axis)
        for at in [*block_layouts(2), *odd_layouts(2, rng)]:
            got = find(ts.dist.distribute(x, at), axis=axis)
            np.testing.assert_array_equal(got.numpy(), want, at.describe())


NARROW = ["bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int4"]


@pytest.mark.parametrize("dtype", NARROW)
def test_packed_and_narrow_types_move_bit_for_bit(dtype, rng) -> None:
    """Slices, joins and other layouts of them send codes; products add in the accumulate type."""
    x = ts.cast(ts.tensor((3 * rng.standard_normal((5, 13))).astype(np.float32)), dtype)

    def fn(x):
        return x[1:4, 2:11], ts.concatenate([x, x[:2]], axis=0), ts.transpose(x), x[:, ::-1]

    want = fn(x)
    for at in block_layouts(2):
        d = spread(x, legal(at, x.type), rng)
        for got, w in zip(ts.jit(fn)(d), want, strict=True):
            assert got.type == w.type
            np.testing.assert_array_equal(got.array, w.array, at.describe())


@pytest.mark.parametrize("dtype", ["bf16 @accum(f32)", "fp8_e4m3 @accum(f32)", "fp6 @accum(f32)"])
def test_products_of_narrow_types_round_once(dtype, rng) -> None:
    """Terms over ranks are added before they are rounded: the result is that of the whole, up to
    the order of f32 sums."""
    x, w = (ts.cast(ts.tensor(rng.standard_normal(s).astype(np.float32)), dtype)
            for s in ((6, 24), (24, 12)))
    want, exact = ts.gemm(x, w), x.numpy().astype(np.float64) @ w.numpy().astype(np.float64)
    inner = put(x, (1, "tp"), dtype=dtype), put(w, (0, "tp"), dtype=dtype)
    got = ts.gemm(*inner)
    assert got.type == want.type
    rounded = ts.cast(ts.tensor(exact.astype(np.float32)), dtype).numpy().astype(np.float64)
    assert (got.numpy().astype(np.float64) == rounded).mean() > 0.95
    assert_close(got.numpy(), want.numpy(), dtype=want.dtype, n=1)


def test_scaled_types_say_what_to_do() -> None:
    with pytest.raises(ts.DTypeError, match="each rank would need a scale of its own"):
        ts.dist.tensor((4, 4), None, MESH, "fp8_e4m3 @scaled(\"amax\")")


# --- what is exchanged ---------------------------------------------------------------------------
def test_attention_by_batch_and_heads_exchanges_nothing(rng) -> None:
    qkv = [put(numbers(4, 6, 5, 3, seed=i), (0, "dp"), (1, "tp")) for i in range(3)]
    step = ts.jit(ts.grad(lambda q, k, v: ts.sum(ts.attention(q, k, v, causal=True) ** 2),
                          argnums=(0, 1, 2)))
    for g, q in zip(step(*qkv), qkv, strict=True):
        assert g.layout == q.layout
    assert not step.plan


def test_heads_that_do_not_divide_are_cut_between_heads() -> None:
    """Four heads of five over three ranks: 2, 1 and 1, in the projection already."""
    x, w = put(numbers(7, 20)), put(numbers(20, 20), (1, "tp"))
    w = ts.shard(w, Layout(MESH, (Split(), Split(("tp",), 0, 5))))

    def heads(x, w):
        return ts.transpose(ts.reshape(x @ w, (7, 4, 5)), (1, 0, 2))

    f = ts.jit(heads)
    y = f(x, w)
    assert [y.parts[r].shape[0] for r in range(3)] == [2, 1, 1] and not f.plan
    assert_close(y.numpy(), heads(x.numpy(), w.numpy()).numpy(), dtype="f32", n=20)


def test_a_fused_projection_is_split_without_gathering_it() -> None:
    a = numbers(6, 90)
    f = ts.jit(lambda x: tuple(ts.split(x, 3, axis=1)))
    parts = f(put(a, (0, "dp"), (1, "tp")))
    for y, want in zip(parts, np.split(a, 3, axis=1), strict=True):
        assert (y.numpy() == want).all() and y.layout.describe() == "(dp, tp)"
    assert kinds(f) == {"permute": 3} and {c.axes for c in f.plan} == {("tp",)}
    third = 6 // 2 * 30 * 4 * (2 / 3) / 3  # of what a rank needs it has a third
    assert all(abs(c.bytes - third) <= 1 for c in f.plan), f.plan
    back = ts.jit(lambda q, k, v: ts.concatenate([q, k, v], axis=1))
    assert (back(*parts).numpy() == a).all() and kinds(back) == {"permute": 1}


def test_cuts_along_whole_dimensions_exchange_nothing() -> None:
    a = numbers(8, 9)
    f = ts.jit(lambda x: (x[2:6], ts.concatenate([x, x], axis=0), ts.pad(x, ((1, 2), (0, 0))),
                          x[::-1]))
    for y, want in zip(f(put(a, (1, "tp"))), (a[2:6], np.concatenate([a, a]), np.pad(
            a, ((1, 2), (0, 0))), a[::-1]), strict=True):
        assert (y.numpy() == want).all() and y.layout.describe() == "(-, tp)"
    assert not f.plan


def test_one_row_of_a_split_tensor_sends_one_row() -> None:
    a = numbers(30, 64)
    f = ts.jit(lambda x: x[11])
    assert (f(put(a, (0, "tp"))).numpy() == a[11]).all()
    assert f.plan.bytes <= 64 * 4, f.plan


def test_an_index_of_a_split_table_is_still_checked() -> None:
    table, ids = put(numbers(7, 4), (0, "tp")), np.array([0, 9])
    with pytest.raises(ts.AxisError, match="9"):
        ts.jit(lambda t: ts.take(t, ids))(table)
    assert (ts.take(table, np.array([-1, -7])).numpy() == numbers(7, 4)[[-1, 0]]).all()


def test_terms_of_several_products_are_reduced_at_once() -> None:
    """Gradients of x from three projections, and what comes past them, are one all_reduce."""
    x = put(numbers(200, 12), (0, "dp"))
    ws = [put(numbers(12, 12, seed=i), (1, "tp")) for i in range(3)]

    def loss(x, a, b, c):
        return ts.sum(x**2) + sum(ts.sum(ts.tanh(x @ w)) for w in (a, b, c))

    step = ts.jit(ts.grad(loss, argnums=0))
    want = ts.grad(loss, argnums=0)(x.numpy(), *(w.numpy() for w in ws))
    assert_close(step(x, *ws).numpy(), want.numpy(), dtype="f32", n=36)
    assert kinds(step) == {"all_reduce": 1}, step.plan


def test_small_and_large_sums_have_the_same_bits(rng) -> None:
    """One exchange of whole terms, or two of parts: the order of the sum is the same."""
    count = ONE_EXCHANGE_BYTES // 4
    terms = rng.standard_normal((3, count)).astype(np.float32)

    def total(n: int) -> np.ndarray:
        layout = Layout(MESH, (Split(),), ("tp",), "sum")
        held = {r: ts.tensor(terms[r % 3, :n]) for r in range(6)}
        return ts.shard(DistTensor(held, (n,), held[0].type, layout), spec()).array

    np.testing.assert_array_equal(total(count)[:7], total(7))


# --- held graphs ---------------------------------------------------------------------------------
def test_a_checkpoint_keeps_nothing_of_its_inside() -> None:
    """Five stages of six products, on one rank: 30 results are kept, or 5 and those of a stage."""
    def stage(x, w):
        for _ in range(6):
            x = ts.tanh(x @ w)
        return x

    def peak(wrap: Callable) -> int:
        def loss(x, w):
            for _ in range(5):
                x = wrap(stage)(x, w)
            return ts.sum(x)

        step = ts.jit(ts.grad(loss, argnums=0))
        step(x, w)
        graph = simplify(localize(next(iter(step._cache.kept.values())).program.made, 0))
        inside = [held(g) for node in graph.nodes for g in subgraphs(node)]
        return held(graph) + max(inside, default=0)

    def held(graph: Graph) -> int:
        return sum(peak_memory(graph, {}).bytes.values())

    x, w = put(numbers(64, 16), (0, "dp")), put(numbers(16, 16))
    plain, again = peak(lambda f: f), peak(ts.checkpoint)
    print(f"peak of a rank: {plain} bytes, with checkpoints {again}")
    assert again < 0.6 * plain


def test_a_checkpoint_reduces_again_where_it_computes_again() -> None:
    x, w = put(numbers(6, 9), (1, "tp")), put(numbers(9, 5), (0, "tp"))
    layer = lambda x, w: ts.tanh(x @ w)  # noqa: E731
    f = ts.jit(lambda x, w: ts.checkpoint(layer)(x, w))
    assert_close(f(x, w).numpy(), np.tanh(x.numpy() @ w.numpy()), dtype="f32", n=9)
    made = next(iter(f._cache.kept.values())).program.made
    assert [n.op.name for n in localize(made, 0).nodes] == ["matmul", "mesh_all_reduce", "tanh"]

    def reductions(wrap: Callable) -> int:
        g = ts.jit(ts.grad(lambda x, w: ts.sum(ts.sin(wrap(layer)(x, w)))))
        g(x, w)
        return sum(c.op == "all_reduce" for c in g.plan)

    assert reductions(ts.checkpoint) == reductions(lambda f: f) + 1


def test_a_loop_lists_its_collectives_and_how_often() -> None:
    ws, x = put(numbers(3, 6, 6), (2, "tp")), put(numbers(4, 6), (0, "dp"))
    f = ts.jit(lambda ws, x: ts.scan(lambda h, w: (ts.tanh(h @ w), None), x, ws)[0])
    want = x.numpy()
    for w in ws.numpy():
        want = np.tanh(want @ w)
    assert_close(f(ws, x).numpy(), want, dtype="f32", n=18)
    assert {(c.op, c.times) for c in f.plan if c.times > 1} == {("all_gather", 3)}, f.plan
    assert f.plan.bytes == sum(c.bytes * c.times for c in f.plan)
    assert "3 times" in str(f.plan)


def test_a_step_of_a_transformer_reduces_twice_a_layer_each_way() -> None:
    """Attention and an MLP, split over tp by columns and rows: Shoeybi et al. 2019,
    arXiv:1909.08053, figure 4; and all gradients with the loss in one more."""
    layers, width = 2, 12

    def block(x, p):
        h = ts.rmsnorm(x, p["gain"])
        q, k, v = (ts.transpose(ts.reshape(h @ p[n], (4, 8, 6, 2)), (0, 2, 1, 3)) for n in "qkv")
        y = ts.transpose(ts.attention(q, k, v, causal=True), (0, 2, 1, 3))
        x = x + ts.reshape(y, (4, 8, width)) @ p["o"]
        return x + ts.gelu(ts.rmsnorm(x, p["gain"]) @ p["up"]) @ p["down"]

    def loss(params, x):
        for p in params:
            x = block(x, p)
        return ts.mean(ts.square(x))

    columns, rows = [(1, "tp")], [(0, "tp")]
    at = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows,
          "gain": []}
    shapes = {**dict.fromkeys("qkvo", (width, width)), "up": (width, 18), "down": (18, width),
              "gain": (width,)}
    whole = [{n: numbers(*s, seed=i) / 3 for n, s in shapes.items()} for i in range(layers)]
    params = [{n: put(a, *at[n]) for n, a in p.items()} for p in whole]
    x = numbers(4, 8, width)
    step = ts.jit(ts.value_and_grad(loss, argnums=0))
    value, grads = step(params, put(x, (0, "dp")))
    plain, want = ts.value_and_grad(loss, argnums=0)(whole, x)
    assert_close(np.asarray(value.numpy()), plain.numpy(), dtype="f32", n=400)
    for g, w in zip(grads, want, strict=True):
        for n in shapes:
            assert_close(g[n].numpy(), w[n].numpy(), dtype="f32", n=400)
            assert g[n].layout == params[0][n].layout
    found = Counter((c.op, c.axes) for c in step.plan)
    assert found == {("all_reduce", ("tp",)): 4 * layers, ("all_reduce", ("dp",)): 1}, step.plan


def test_sequences_split_between_products_are_never_whole_sums() -> None:
    """Where rows lie split in front of and behind a layer, sums of ranks are scattered over them,
    in the backward pass too, though a cast stands between a sum and what lies so: Korthikanti et
    al. 2022, arXiv:2205.05198, figure 5."""
    bf16 = "bf16 @accum(f32)"

    def loss(p, tokens, split=lambda x: x):
        x = split(ts.embedding(p["table"], tokens))
        for _ in range(2):
            h = ts.cast(ts.rmsnorm(x, p["gain"]), bf16)
            y = ts.gelu(h @ ts.cast(p["up"], bf16)) @ ts.cast(p["down"], bf16)
            x = split(x + ts.cast(y, "f32"))
        return ts.mean(ts.square(x))

    def rows_of_tp(x):
        return ts.shard(x, spec((0, "tp")))

    whole = {"table": numbers(8, 24), "gain": numbers(24), "up": numbers(24, 96) / 5,
             "down": numbers(96, 24) / 10}
    params = {n: put(a, *dims) for (n, a), dims in zip(
        whole.items(), ([], [], [(1, "tp")], [(0, "tp")]), strict=True)}
    tokens = np.arange(16, dtype=np.int32) % 7
    step = ts.jit(ts.value_and_grad(lambda p, x: loss(p, x, rows_of_tp), argnums=0))
    value, grads = step(params, put(tokens))
    plain, want = ts.value_and_grad(loss, argnums=0)(whole, tokens)
    assert_close(np.asarray(value.numpy()), plain.numpy(), dtype="bf16", n=96)
    for n, g in grads.items():
        assert_close(np.asarray(g.numpy()), want[n].numpy(), dtype="bf16", n=96)
    large = Counter(c.op for c in step.plan if c.bytes > 200)
    gathers = 2 * 2 + 1  # and what the gradient of the table is a sum of
    assert large == {"all_gather": gathers, "reduce_scatter": 2 * 2}, step.plan


def test_stacked_layers_stay_split_in_a_loop() -> None:
    """ts.dist.fsdp of weights [layers, ...] in a scan: an iteration gathers one layer, once for its
    uses backward, and scatters its gradient."""
    mesh = ts.dist.mesh(axes=("dp",), shape=(4,))
    a, x = numbers(4, 16, 16) / 4, numbers(64, 16)
    ws = ts.dist.fsdp({"w": ts.dist.distribute(a, None, mesh=mesh)}, axis="dp")["w"]

    def loss(ws, x):
        def layer(h, w):
            return h + ts.checkpoint(lambda h, w: ts.tanh(h @ w))(h, w), None

        return ts.mean(ts.square(ts.scan(layer, x, ws)[0]))

    step = ts.jit(ts.value_and_grad(loss, argnums=0))
    _, grad = step(ws, ts.dist.distribute(x, spec((0, "dp")), mesh=mesh))
    assert_close(grad.numpy(), ts.grad(loss, argnums=0)(a, x).numpy(), dtype="f32", n=64)
    inside = Counter(c.op for c in step.plan if c.times == 4)
    assert inside == {"all_gather": 2, "reduce_scatter": 1}, step.plan
    layer = 16 * 16 * 4 * 3 // 4
    assert all(c.bytes == layer for c in step.plan if c.times == 4)
    assert not {"all_gather", "reduce_scatter"} & {c.op for c in step.plan if c.times == 1}


# --- what is refused -----------------------------------------------------------------------------
def test_tensors_of_two_meshes_are_shown_with_their_layouts() -> None:
    other = ts.dist.mesh(axes=("x",), shape=(6,))
    a, b = put(numbers(4, 6), (0, "dp")), ts.dist.distribute(numbers(4, 6), spec((0, "x")),
                                                            mesh=other)
    for f in (lambda a, b: a * b, ts.jit(lambda a, b: a * b)):
        with pytest.raises(ts.dist.MeshError) as err:
            f(a, b)
        assert err.value.code == "E_MESH_CONFLICT"
        for words in ("operand 0: f32[4, 6] in (dp, -) on mesh(dp=2, tp=3)",
                      "operand 1: f32[4, 6] in (x, -) on mesh(x=6)"):
            assert words in err.value.message
        assert "ts.dist.distribute" in err.value.hint
        assert err.value.where is not None and err.value.where.file.endswith("test_partition.py")
