"""Groups of a cluster on the GPU: their reductions, and rows that they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import needs_hopper, require_gpu
from tessera import stdlib
from tolerance import assert_close

require_gpu()
pytestmark = needs_hopper
torch = pytest.importorskip("torch")


def reduced(kind: str, groups: int, x: Any, loops: int = 1) -> np.ndarray:
    """`kind` of each row, as all groups of its cluster know it."""
    tile = ts.tile
    across, along = getattr(tile, f"cluster_{kind}"), getattr(tile, f"row_{kind}")

    @ts.kernel(grid=lambda M: M * groups)
    def rows(x: ts.Tensor["M", "N"], y: ts.Tensor["L", "G"], S: int):
        g = tile.group_id(0)
        m, first = g // groups, g % groups * S
        part = along(tile.load(x[m:m+1, first:first+64], fill=0))
        for i in range(loops):
            total = across(part, groups)
            y[i, g:g+1] = total
            part = part + total * 0 + 1

    y = torch.zeros(loops, x.shape[0] * groups, dtype=x.dtype, device="cuda")
    rows(x, y, 64)
    return y.cpu().numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
def test_each_group_gets_what_all_of_its_cluster_have(kind: str, groups: int, dtype: str) -> None:
    x = torch.randint(-3, 4, (501, 64 * groups), device="cuda").to(getattr(torch, dtype))
    if kind == "prod":
        x = torch.where(x > 0, 1, -1).to(x.dtype)
    want = getattr(np, kind)(x.cpu().numpy(), axis=1)
    assert np.array_equal(reduced(kind, groups, x)[0], np.repeat(want, groups))


@pytest.mark.parametrize("groups", [2, 8])
def test_again_and_again(groups: int) -> None:
    """No group sends before all have read what came before."""
    x = torch.randint(-3, 4, (700, 64 * groups), device="cuda").to(torch.int32)
    got, want = reduced("sum", groups, x, loops=50), x.sum(1).cpu().numpy()
    for i in range(50):
        assert np.array_equal(got[i], np.repeat(want + groups * i, groups))


def test_several_at_once_and_numbers_of_one_thread() -> None:
    """Two that are sent together, one of their result; and a tile that lies across a warp."""
    tile = ts.tile

    @ts.kernel(grid=lambda M: M * 4)
    def several(x: ts.Tensor["M", "N"], y: ts.Tensor["G"], z: ts.Tensor["G", "L"], loops: int):
        g = tile.group_id(0)
        m, first = g // 4, g % 4 * 64
        t = tile.load(x[m:m+1, first:first+64], fill=0)
        total = tile.row_sum(t) * 0
        for i in range(loops):
            a, b = tile.row_sum(t) + i, tile.row_max(t)
            c, d = tile.cluster_sum(a, 4), tile.cluster_max(b, 4)
            total = total + tile.cluster_sum(d, 4) + c
        y[g:g+1] = total
        z[g:g+1, 0:64] = tile.cluster_sum(t, 4)

    x = torch.randint(-9, 9, (300, 256), device="cuda").to(torch.int32)
    y, z = torch.zeros(1200, dtype=torch.int32), torch.zeros(1200, 64, dtype=torch.int32)
    y, z = y.cuda(), z.cuda()
    several(x, y, z, 20)
    want = 20 * (x.sum(1) + 4 * x.amax(1)) + 4 * 190
    assert torch.equal(y.long(), want.long().repeat_interleave(4))
    parts = x.view(300, 4, 64).sum(1).repeat_interleave(4, 0)
    assert torch.equal(z.long(), parts.long())


# --- rows -------------------------------------------------------------------------------------
def _norms(x: Any, w: Any, b: Any) -> Any:
    return ts.layernorm(x, w, b)


def _softmax_gradient(x: Any, dy: Any) -> Any:
    return ts.cast(ts.vjp(ts.softmax, x)[1](dy), "bf16")


def _loss(x: Any, labels: Any) -> Any:
    value, pull = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), labels), x)
    return ts.cast(pull(ts.ones(())), "bf16"), value


def run(fn: Any, *xs: Any) -> Any:
    direct = fn in (stdlib.stable_softmax, stdlib.efficient_layernorm)
    got = (fn if direct else ts.jit(fn))(*map(ts.from_dlpack, xs))
    return torch.from_dlpack(got[0] if isinstance(got, tuple) else got).double()


@pytest.mark.parametrize("N", [60032, 65536, 100352, 131072])
def test_rows_that_groups_share(N: int) -> None:
    """Against f64, and bit by bit the same each time."""
    x, dy = torch.randn(2, 300, N, device="cuda").bfloat16()
    w, b = torch.randn(2, N, device="cuda").bfloat16()
    wide = [v.double() for v in (x, w, b)]
    labels = torch.randint(0, N, (300,), device="cuda", dtype=torch.int32)
    p = torch.softmax(wide[0], -1)
    cases = [
        (stdlib.stable_softmax, (x,), p),
        (stdlib.efficient_layernorm, (x, w, b),
         torch.nn.functional.layer_norm(wide[0], (N,), *wide[1:])),
        (ts.softmax, (x,), p),
        (_norms, (x, w, b), torch.nn.functional.layer_norm(wide[0], (N,), *wide[1:])),
        (_softmax_gradient, (x, dy),
         p * (dy.double() - (p * dy.double()).sum(-1, keepdim=True))),
        (_loss, (x, labels),
         (p - torch.nn.functional.one_hot(labels.long(), N)) / 300),
    ]
    for fn, xs, want in cases:
        first = run(fn, *xs)
        assert float((first - want).norm() / want.norm()) < 4e-3, fn
        assert all(torch.equal(first, run(fn, *xs)) for _ in range(5)), fn


def test_rows_of_f32(rng: Any) -> None:
    x = rng.standard_normal((200, 57344)).astype(np.float32)
    y = ts.jit(ts.softmax)(ts.tensor(x).to("cuda")).numpy()
    e = np.exp(x.astype(np.float64))
    assert_close(y, e / e.sum(1, keepdims=True), "f32", n=57344)


@pytest.mark.parametrize("N", [256, 1024, 16384, 32768, 65536, 131072])
def test_gradients_of_norms_of_rows(N: int) -> None:
    """Against f64, and bit by bit the same each time."""
    M = (1 << 26) // N
    x, dy = torch.randn(2, M, N, device="cuda").bfloat16()
    w, b = torch.randn(2, N, device="cuda").bfloat16()
    for norm, weights in ((ts.layernorm, (w, b)), (ts.rmsnorm, (w,))):
        fn = ts.jit(lambda *xs, norm=norm: ts.vjp(norm, *xs[:-1])[1](xs[-1]))
        given = [ts.from_dlpack(v) for v in (x, *weights, dy)]
        got = [torch.from_dlpack(v).double() for v in fn(*given)]
        wide = [v.double().requires_grad_() for v in (x, *weights)]
        named = torch.nn.functional.layer_norm if norm is ts.layernorm else \
            lambda x, shape, w: torch.nn.functional.rms_norm(x, shape, w, 1e-6)
        want = torch.autograd.grad(named(wide[0], (N,), *wide[1:]), wide, dy.double())
        for y, z in zip(got, want, strict=True):
            assert float((y - z).norm() / z.norm()) < 4e-3
        del wide, want
        again = [torch.from_dlpack(v).double() for v in fn(*given)]
        assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("N", [1024, 16384])
def test_rows_that_are_asked_for_before_they_are_written(N: int) -> None:
    """A chain of gradients of what the one in front writes, with and without a wait between."""
    fn = ts.jit(lambda x, dy: ts.cast(ts.cast(x, "f32") + ts.cast(
        ts.vjp(ts.softmax, x)[1](dy), "f32"), "bf16"))
    first, dy = torch.randn(2, (1 << 24) // N, N, device="cuda").bfloat16()

    def chain(waits: bool) -> torch.Tensor:
        x, given = ts.from_dlpack(first), ts.from_dlpack(8 * N * dy)
        for _ in range(30):
            x = fn(x, given)
            if waits:
                torch.cuda.synchronize()
        return torch.from_dlpack(x).clone()

    want = chain(True)
    assert want.isfinite().all() and not torch.equal(want, first)
    assert all(torch.equal(chain(False), want) for _ in range(5))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_groups_write_to_each_others_shared_memory(groups: int, dtype: str) -> None:
    """Each gives what it has to the next one of its cluster, 50 times; none overtakes another."""
    tile, lanes, loops = ts.tile, 128, 50

    @ts.kernel(grid=lambda G: G)
    def around(x: ts.Tensor["G", "L"], y: ts.Tensor["G", "L"]):
        g, lane = tile.group_id(0), tile.local_id()
        s = tile.alloc_shared((lanes,), x.dtype)
        number = x[g, lane]
        there = tile.cluster_shared(s, (g % groups + 1) % groups, groups)
        for _ in range(loops):
            there[lanes - 1 - lane] = number
            tile.cluster_barrier(groups)
            number = s[lane]
            tile.cluster_barrier(groups)
        y[g, lane] = number

    x = torch.arange(600 * 8 * lanes, device="cuda").to(getattr(torch, dtype)).view(-1, lanes)
    y = torch.zeros_like(x)
    around.launcher(lanes=lanes)(x, y)
    want = x.view(-1, groups, lanes).roll(loops, 1)
    assert torch.equal(y.view(want.shape), want)


@pytest.mark.parametrize("groups", [2, 8, 16])
def test_groups_wait_for_words_alone(groups: int) -> None:
    """Each gets a word of each lane of all groups of its cluster."""
    tile, lanes = ts.tile, 64

    @ts.kernel(grid=lambda G: G)
    def gathered(x: ts.Tensor["G", "L"], y: ts.Tensor["G", "P", "L"]):
        g, lane = tile.group_id(0), tile.local_id()
        s = tile.alloc_shared((groups, lanes), x.dtype)
        for to in range(groups):
            there = tile.cluster_shared(s, to, groups)
            there[g % groups, lane] = x[g, lane]
        tile.cluster_barrier(groups, words=groups * lanes)
        for p in range(groups):
            y[g, p, lane] = s[p, lane]

    x = torch.rand(100 * 16, lanes, device="cuda")
    y = torch.full((x.shape[0], groups, lanes), float("nan"), device="cuda")
    gathered.launcher(lanes=lanes)(x, y)
    assert torch.equal(y, x.view(-1, groups, lanes).repeat_interleave(groups, 0))
