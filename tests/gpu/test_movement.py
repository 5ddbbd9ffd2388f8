"""Data moves on a GPU: caches in place, tensors to the host and back, values that are printed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from lowered_functions import normal
from tessera.runtime.device import device
from tessera.runtime.memory_pools import holders
from tessera.runtime.timeline import EventTimeline, KernelEvent
from tolerance import assert_close

require_gpu()


def in_use() -> int:
    """Bytes of the device that tessera uses."""
    device().synchronize()
    with device().current():
        return holders(device())["tessera"]


# --- caches -------------------------------------------------------------------------------------
def decode(q: Any, k: Any, v: Any, cache: Any) -> Any:
    cache = cache.append(k, v)
    return ts.flash_attention(q, cache), cache


@pytest.mark.parametrize("how", ["eager", "jit", "donated"])
def test_decoding_there_is_decoding_here(how: str, rng: Any) -> None:
    step = {"eager": decode, "jit": ts.jit(decode), "donated": ts.jit(decode, donate="cache")}[how]
    reference = ts.jit(decode)
    here = ts.kv_cache((2, 4, 64, 64))
    there = ts.to(here, "cuda")
    pointers = set()
    for n in (16, *(1,) * 12):
        q, k, v = (normal(rng, 2, 4, n, 64) for _ in range(3))
        want, here = reference(q, k, v, here)
        got, there = step(*(x.cuda() for x in (q, k, v)), there)
        pointers.add(there._storage.K.memory.pointer)
        assert got.device == "cuda:0"
        assert_close(got.array, want.array, "f32", 64, scale=4.0)
    assert there.length == here.length == 28
    np.testing.assert_array_equal(there.K.array, here.K.array)
    np.testing.assert_array_equal(there.V.array, here.V.array)
    assert len(pointers) == 1 or how == "jit"


@pytest.mark.parametrize("how", ["read", "call"])
def test_a_full_cache_says_so(how: str, rng: Any) -> None:
    step = ts.jit(lambda cache, k: cache.append(k, k))
    k = normal(rng, 1, 2, 3, 64).cuda()
    cache = step(step(ts.to(ts.kv_cache((1, 2, 8, 64)), "cuda"), k), k)
    with pytest.raises(ts.ArgumentError, match="a cache of 8 entries holds 6: 3 more") as info:
        full = step(cache, k)  # which may say so itself: a kernel behind the first one asks
        full._storage.K.array if how == "read" else step(cache, k).length
    assert info.value.code == "E_OVERFLOW"
    assert step(ts.to(ts.kv_cache((1, 2, 8, 64)), "cuda"), k).length == 3


@pytest.mark.row("STATE-06", "STATE-07")
def test_a_cache_leaves_the_device_and_comes_back(rng: Any) -> None:
    cache = ts.to(ts.kv_cache((4, 8, 4096, 128)), "cuda")  # 64 MiB each of keys and values
    q, k = normal(rng, 4, 8, 1, 128).cuda(), normal(rng, 4, 8, 16, 128).cuda()
    cache = cache.append(k, k).append(k, k)
    want, full = ts.flash_attention(q, cache).array, in_use()
    cache = cache.offload()
    assert cache.place == "host" and full - in_use() >= 0.95 * cache.nbytes  # and no other grew
    np.testing.assert_array_equal(ts.flash_attention(q, cache).array, want)  # brought and dropped
    cache = cache.offload()
    assert full - in_use() >= 0.95 * cache.nbytes
    cache = cache.prefetch()
    device().synchronize()
    assert cache.place == "device" and full - in_use() < cache.nbytes // 2
    np.testing.assert_array_equal(ts.flash_attention(q, cache).array, want)
    np.testing.assert_array_equal(cache.append(k, k).K.array, np.concatenate([k.array] * 3, axis=2))


@pytest.mark.row("STATE-03")
def test_the_type_of_a_cache_places_it(rng: Any) -> None:
    kind = ts.KVCache["B", "H", "S_max", "D_h", ts.bf16] @ ts.rolling_window
    there = (kind @ ts.device(ts.gpu))(1, 2, 64, 32)
    k = normal(rng, 1, 2, 3, 32)
    longer = there.append(k.cuda(), k.cuda())
    for x in (there._storage.K, there._storage.V, longer.K, longer.V):
        assert x.device == "cuda:0"
    cupy = pytest.importorskip("cupy")
    assert isinstance(cupy.from_dlpack(ts.cast(longer.K, "f32")), cupy.ndarray)
    assert (kind @ ts.device(ts.gpu[0]))(1, 2, 64, 32)._storage.K.device == "cuda:0"
    here = (kind @ ts.device(ts.cpu))(1, 2, 64, 32).append(k, k)
    assert here.K.device == "cpu" and isinstance(here.K.array, np.ndarray)
    np.testing.assert_array_equal(here.K.array, longer.K.array)


# --- tensors ------------------------------------------------------------------------------------
def meets(a: KernelEvent, b: KernelEvent) -> bool:
    return a.start_ns < b.end_ns and b.start_ns < a.end_ns


@pytest.mark.row("PLACE-06")
@pytest.mark.alone
def test_a_prefetch_is_a_copy_beside_kernels(rng: Any) -> None:
    x = normal(rng, 4096, 4096, dtype="bf16").cuda()
    held = ts.offload(normal(rng, 4096, 8192).cuda())  # 128 MiB
    again = ts.jit(lambda x: x @ x * (1 / 64))
    total = ts.jit(lambda x: ts.sum(x * x))
    want = float((held.array.astype(np.float64) ** 2).sum())
    again(x), total(held + 0.0)
    ts.offload(held)
    device().synchronize()
    timeline = EventTimeline()
    timeline.start()
    for _ in range(32):
        x = again(x)
    ts.prefetch(held, into="device", overlap="compute")
    for _ in range(4):
        x = again(x)
    got = total(held)
    timeline.stop()
    (copy,) = [e for e in timeline.events if e.name == "prefetch"]
    kernels = [e for e in timeline.events if e is not copy]
    assert copy.stream != 0 and sum(meets(copy, e) for e in kernels) >= 3
    assert copy.end_ns <= kernels[-1].end_ns  # the sum waited
    assert_close(np.float64(got.item()), np.float64(want), "f32", held.size)
    print("a prefetch beside matmuls", {"gb_per_s": held.nbytes / (copy.end_ns - copy.start_ns)})


@pytest.mark.row("PLACE-06")
def test_what_a_block_prefetches_passes_a_pipeline(rng: Any) -> None:
    @ts.jit
    def f(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        with ts.device(ts.gpu), ts.prefetch(w, into="smem", overlap="compute"):
            return x @ w

    x, w = (normal(rng, 512, 512, dtype="bf16").cuda() for _ in range(2))
    np.testing.assert_array_equal(f(x, w).array, ts.jit(lambda x, w: x @ w)(x, w).array)
    (row,) = ts.plan(f)
    assert (row.verb, row.destination, row.nbytes) == ("prefetch", "smem", 2 * 512 * 512)
    assert int(row.overlap.split(", ")[1].split()[0]) >= 2


def adam(params: Any, state: Any, grads: Any) -> Any:
    made, kept = [], []
    for p, (m, v), g in zip(params, state, grads, strict=True):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        made.append(p - 0.1 * m / (ts.sqrt(v) + 1e-3))
        kept.append((m, v))
    return made, kept


def test_moments_lie_on_the_host_between_steps(rng: Any) -> None:
    """The bits of a run whose moments stay; of 8 pairs few are on the device at once."""
    def draw() -> Any:
        params = [ts.zeros((1024, 2048)).cuda() for _ in range(8)]
        return params, [(ts.zeros_like(p), ts.zeros_like(p)) for p in params]

    stays = ts.jit(adam, donate=("params", "state"))
    leaves = ts.jit(lambda params, state, grads: (
        lambda made: (made[0], ts.offload(made[1])))(adam(params, state, grads)),
        donate=("params", "state"))
    a, b = draw(), draw()
    ts.offload(b[1])
    size = 4 * 1024 * 2048
    for _ in range(5):
        grads = [normal(rng, 1024, 2048).cuda() for _ in range(8)]
        a, b = stays(*a, grads), leaves(*b, grads)
        assert all(x.offloaded for pair in b[1] for x in pair)
    for x, y in zip((*a[0], *sum(a[1], ())), (*b[0], *sum(b[1], ())), strict=True):
        np.testing.assert_array_equal(x.array, y.array)
    times = {}
    for name, f, run in (("stay", stays, a), ("leave", leaves, b)):
        device().synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run = f(*run, grads)
        device().synchronize()
        times[name] = (time.perf_counter() - start) / 10
        a, b = (run, b) if f is stays else (a, run)
    del run, f
    print("moments that stay and leave", {f"{k}_ms": 1e3 * v for k, v in times.items()},
          {"gb_per_s": 32 * size / times["leave"] / 1e9})
    plan = leaves.traced(*b, grads).executable.program.plan
    assert len(plan.transfers) == 32 and plan.temporary_bytes <= 8 * size
    used = in_use()
    del a, stays, x, y
    assert used - in_use() >= 24 * size  # what stayed took parameters and both moments
    assert ts.plan(leaves).nbytes == 32 * size


def test_what_is_offloaded_is_used_as_it_is(rng: Any) -> None:
    for dtype in ("f32", "bf16", "int4", 'fp8_e4m3 @scaled("amax")'):
        x = ts.cast(normal(rng, 65, 130), dtype)
        there = ts.offload(x.cuda())
        assert there.offloaded and there.device == "cuda:0"
        assert there.cpu().buffer.tobytes() == x.buffer.tobytes()
        assert (there if "int4" in dtype else there.copy()).cpu().buffer.tobytes() == \
            x.buffer.tobytes()
    torch = pytest.importorskip("torch")
    x = normal(rng, 100)
    y = torch.from_dlpack(ts.offload(x.cuda()))
    np.testing.assert_array_equal(y.cpu().numpy(), x.array)


@pytest.mark.parametrize("part", [1, slice(2, 5), (slice(None), slice(3, 9)), (..., 0), [0, 2]],
                         ids=["row", "rows", "columns", "front", "list"])
def test_a_part_is_written_where_it_lies(part: Any, rng: Any) -> None:
    x = normal(rng, 6, 40, dtype="bf16")
    there = x.cuda()
    pointer = there.memory.pointer
    for value in (2.0, normal(rng, *x.array[part].shape[-1:]).cuda()):
        there[part] = value
        x[part] = value
        assert there.memory.pointer == pointer and there.array.tobytes() == x.array.tobytes()


def test_a_pool_of_pages_lies_there(rng: Any) -> None:
    made = []
    for where in ("cpu", "cuda"):
        with ts.device(where):
            manager = ts.KVCacheManager(heads=2, head_size=32, pages=6, page_size=8)
        draw = np.random.default_rng(5)
        seq, other = manager.alloc(), manager.alloc()
        for n in (5, 9, 1):
            for s in (seq, other):
                s.append(*(ts.tensor(draw.standard_normal((2, n, 32)).astype(np.float32)).to(where)
                           for _ in range(2)))
        q = ts.tensor(draw.standard_normal((1, 2, 1, 32)).astype(np.float32)).to(where)
        y = ts.flash_attention(q, seq)
        assert y.device == other.K.device == ("cpu" if where == "cpu" else "cuda:0")
        made.append((other.K.array, other.V.array, y.array))
    for a, b in zip(*made, strict=True):
        assert_close(b, a, "f32", 64)


# --- what the host does -------------------------------------------------------------------------
def test_prints_come_in_order(capsys: Any, rng: Any) -> None:
    def f(x: ts.Tensor, n: int) -> ts.Tensor:
        y = x @ x
        ts.debug.print("{} {}", y.shape, n)
        for i in range(3):
            y = y * 0.5
            ts.debug.print("{} {}", i, ts.cast(y[0, 0], "bf16"))
        return y

    x = ts.tensor(np.eye(256, dtype=np.float32) * 2)
    for capture in (False, True):
        g = ts.jit(f, capture_graph=capture)
        for n in range(3):
            capsys.readouterr()
            g(x.cuda(), n)
            assert capsys.readouterr().out == f"(256, 256) {n}\n0 2.0\n1 1.0\n2 0.5\n"


def test_promises_and_numbers_are_checked(rng: Any) -> None:
    @ts.verify.numerics(stable=True)
    def root(x: ts.Tensor) -> ts.Tensor:
        return ts.sqrt(x)

    f = ts.jit(root)
    assert np.isfinite(f(ts.ones(4).cuda()).array).all()
    with pytest.raises(ts.NumericsError, match="root: the result"):
        f(ts.tensor([1.0, -1.0]).cuda())
    g, x = ts.jit(lambda x, n: x + n), ts.tensor(np.arange(3), "int8").cuda()
    assert g(x, 5).array.tolist() == [5, 6, 7]
    with pytest.raises(ts.TesseraError, match="300"):
        g(x, 300)


# --- the state of an optimizer --------------------------------------------------------------------
@pytest.mark.row("STATE-12")
@pytest.mark.parametrize("pages", [0, 4])
def test_a_paged_state_keeps_to_its_limit(pages: int, rng: Any) -> None:
    """16 parameters of 16 MiB, whose moments take 512 MiB; values are those of a state that stays,
    as far as multiply-adds are fused alike."""
    def start() -> tuple[Any, Any]:
        values = [np.random.default_rng(i).standard_normal((2048, 2048)) for i in range(16)]
        return ([ts.param(v.astype(np.float32)).cuda() for v in values],
                [ts.tensor((v * 0.1).astype(np.float32)).cuda() for v in values])

    page = 4 * 2048 * 2048
    params, grads = start()
    optimizer = ts.optim.paged(ts.optim.AdamW(), resident_bytes=pages * page + 64)
    before = in_use()
    state = optimizer.init(params)
    assert in_use() - before <= (pages + 1) * page

    def train(optimizer: Any, params: Any, state: Any, grads: Any) -> Any:
        @ts.jit(donate=("params", "state"))
        def step(params: Any, state: Any, grads: Any) -> Any:
            return optimizer.update(params, grads, state, 0.1)

        for _ in range(3):
            params, state = step(params, state, grads)
        return params, state

    params, state = train(optimizer, params, state, grads)
    held = in_use() - before
    print(f"{pages} pages stay: {held / page:.2f} pages are in use beside the parameters")
    assert held <= (pages + 6) * page  # and those of a step under way
    found = [*params, *state["m"].values(), *state["v"].values()]
    assert [x.offloaded for x in state["m"].values()] == [i >= pages for i in range(16)]
    plain, (params, grads) = ts.optim.AdamW(), start()
    params, state = train(plain, params, plain.init(params), grads)
    want = [*params, *state["m"].values(), *state["v"].values()]
    print("bits alike:", [(x.array == y.array).all() for x, y in zip(found, want, strict=True)])
    for x, y in zip(found, want, strict=True):
        assert_close(x.array, y.array, "f32", n=3, scale=4.0)
