"""Rows STATE of the KV cache, EFF-05, and the snippets with a cache, run as printed."""

from __future__ import annotations

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from snippet import run
from tessera import KVCache, bf16, f32, rolling_window
from tolerance import assert_close, f64


def entries(rng, n, B=2, H=3, D=4, dtype=np.float32):
    """Keys and values of n entries."""
    return (rng.standard_normal((B, H, n, D)).astype(dtype),
            rng.standard_normal((B, H, n, D)).astype(dtype))


# --- STATE ------------------------------------------------------------------------------------
@pytest.mark.row("STATE-01")
def test_the_type_makes_a_cache():
    kind = KVCache["B", "H", "S_max", "D_h", bf16]
    for cache in (kind(2, 3, 8, 4), kind(B=2, H=3, S_max=8, D_h=4), kind(2, 3, D_h=4, S_max=8),
                  KVCache[2, 3, 8, 4, bf16](), ts.kv_cache((2, 3, 8, 4), bf16)):
        assert isinstance(cache, KVCache) and cache.dtype is bf16 and cache.shape == (2, 3, 8, 4)
        assert (cache.length, cache.capacity, cache.nbytes) == (0, 8, 2 * 2 * 3 * 8 * 4 * 2)
        for held in (cache._storage.K, cache._storage.V):  # capacity; cache.K has what is filled
            assert held.shape == (2, 3, 8, 4) and held.dtype is bf16


@pytest.mark.row("STATE-01")
def test_a_full_cache_has_the_extents_of_its_type(rng):
    k, v = entries(rng, 8)
    cache = KVCache["B", "H", "S_max", "D_h", f32](2, 3, 8, 4).append(k, v)
    assert cache.K.shape == cache.V.shape == (2, 3, 8, 4)


@pytest.mark.row("STATE-02")
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 11])
def test_a_rolling_window_gives_up_the_oldest(rng, chunk):
    kind = KVCache["B", "H", "S_max", "D_h", f32] @ rolling_window
    cache, S_max = kind(2, 3, 8, 4), 8
    k, v = entries(rng, S_max + 3)
    for start in range(0, S_max + 3, chunk):
        part = slice(start, start + chunk)
        cache = cache.append(k[:, :, part], v[:, :, part])
    assert cache.length == 8
    assert (cache.K.numpy() == k[:, :, 3:]).all() and (cache.V.numpy() == v[:, :, 3:]).all()


@pytest.mark.row("STATE-02")
def test_without_one_an_overflow_raises(rng):
    cache = ts.kv_cache((2, 3, 8, 4)).append(*entries(rng, 7))
    for more in (2, 9):
        with pytest.raises(ts.ArgumentError, match="a cache of 8 entries holds 7") as e:
            cache.append(*entries(rng, more))
        assert e.value.code == "E_OVERFLOW" and "rolling_window" in e.value.hint
    assert cache.append(*entries(rng, 1)).length == 8


@pytest.mark.row("STATE-04", "STATE-08")
def test_append_extends_the_sequence(rng):
    cache, k, v = ts.kv_cache((2, 3, 8, 4)), *entries(rng, 6)
    for n, part in enumerate((slice(0, 1), slice(1, 4), slice(4, 6)), 1):
        cache = cache.append(k[:, :, part], v[:, :, part])
        assert cache.K.shape[-2] == cache.V.shape[-2] == cache.length == part.stop, n
    assert (cache.K.numpy() == k).all() and (cache.V.numpy() == v).all()
    assert np.shares_memory(cache.K.array, cache._storage.K.array)  # a view


@pytest.mark.row("STATE-08")
def test_keys_and_values_are_tensors_of_kernels(rng):
    @ts.kernel
    def double(x: ts.Tensor["N", "D", ts.f32], y: ts.Tensor["N", "D", ts.f32]):
        i = ts.tile.linear_id()
        if i < N:  # noqa: F821
            for j in ts.tile.range(0, D, 1):  # noqa: F821
                y[i, j] = 2.0 * x[i, j]

    k, v = entries(rng, 5)
    cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
    out = np.zeros((5, 4), np.float32)
    double(cache.V[1, 2], out)
    assert (out == 2 * v[1, 2]).all()


@pytest.mark.row("STATE-05")
def test_prune(rng):
    k, v = entries(rng, 7)
    cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
    for shorter, kept in [
        (cache.prune(last=3), [4, 5, 6]), (cache.prune(last=0), []),
        (cache.prune(last=99), [*range(7)]), (cache.prune(keep=[0, 2, 6]), [0, 2, 6]),
        (cache.prune(keep=np.arange(7) % 2 == 0), [0, 2, 4, 6]), (cache.prune(keep=[]), []),
    ]:
        assert shorter.length == len(kept)
        assert (shorter.K.numpy() == k[:, :, kept]).all()
        assert (shorter.V.numpy() == v[:, :, kept]).all()
        longer = shorter.append(k[:, :, :1], v[:, :, :1])
        assert (longer.V.numpy() == v[:, :, [*kept, 0]]).all()
    assert cache.length == 7 and (cache.K.numpy() == k).all()


@pytest.mark.row("STATE-05")
def test_prune_of_a_window_that_has_rolled(rng):
    k, v = entries(rng, 11)
    cache = (KVCache[2, 3, 8, 4, f32] @ rolling_window)().append(k, v)
    assert (cache.prune(last=5).K.numpy() == k[:, :, 6:]).all()
    assert (cache.prune(keep=[0, 7]).V.numpy() == v[:, :, [3, 10]]).all()
    assert (cache.prune(last=5).append(k, v).K.numpy() == k[:, :, 3:]).all()


@pytest.mark.row("STATE-09")
def test_the_manager_allocates_frees_and_reuses_pages(rng):
    """Random sequences against plain arrays; at every step each page has one owner or is free."""
    manager = ts.KVCacheManager(heads=3, head_size=4, pages=12, page_size=5)
    held, nbytes, refused = {}, manager.nbytes, 0
    for _ in range(300):
        choice = rng.integers(0, 10)
        if choice == 0 or not held:
            held[manager.alloc()] = entries(rng, 0, 1)
        seq = list(held)[rng.integers(len(held))]
        if choice == 1:
            manager.free(seq)
            del held[seq]
        elif choice == 2:
            n = int(rng.integers(0, 7))
            seq.prune(last=n)
            held[seq] = tuple(x[:, :, max(x.shape[2] - n, 0):] for x in held[seq])
        else:
            k, v = entries(rng, int(rng.integers(0, 9)), 1)
            try:
                seq.append(k, v)
                held[seq] = tuple(np.concatenate(p, 2) for p in zip(held[seq], (k, v), strict=True))
            except ts.OutOfMemoryError as err:
                refused += 1
                assert "a pool of 12 pages" in err.message
        owned = [p for s in held for p in s._pages]
        assert sorted([*owned, *manager._free]) == list(range(12))
        assert all(len(s._pages) == -(-s.length // 5) for s in held)
        for s, (k, v) in held.items():
            assert s.length == k.shape[2]
            assert (s.K.numpy() == k).all() and (s.V.numpy() == v).all()
    for seq in list(held):
        manager.free(seq)
    assert manager.pages_free == 12 and manager.nbytes == nbytes and not manager.sequences
    assert refused  # the pool has been full


@pytest.mark.row("STATE-09")
def test_attention_over_a_paged_cache(rng):
    k, v = entries(rng, 13, 1)
    q = rng.standard_normal((1, 3, 2, 4)).astype(np.float32)
    manager = ts.KVCacheManager(heads=3, head_size=4, pages=8, page_size=4)
    other, seq = manager.alloc(), manager.alloc()
    for start in range(0, 13, 3):  # the pages of two sequences alternate
        part = slice(start, start + 3)
        seq.append(k[:, :, part], v[0, :, part])
        other.append(k[:, :, :1], v[:, :, :1])
    want = ts.flash_attention(q, ts.kv_cache((1, 3, 16, 4)).append(k, v)).numpy()
    assert (ts.flash_attention(q, seq).numpy() == want).all()
    with pytest.raises(ts.TraceError, match="a paged cache is used while"):
        ts.jit(lambda q: ts.flash_attention(q, seq))(q)
    manager.free(seq)
    for use in (lambda: seq.K, lambda: seq.append(k, v), lambda: manager.free(seq)):
        with pytest.raises(ts.ArgumentError) as e:
            use()
        assert e.value.code == "E_STALE"
    for bad in ({"heads": 0}, {"pages": 1.5}, {"dtype": ts.int8 @ ts.scaled("amax")}):
        with pytest.raises((ts.ArgumentError, ts.PolicyError)):
            ts.KVCacheManager(**{"heads": 1, "head_size": 1, "pages": 1} | bad)
    with pytest.raises(ts.ShapeError):
        other.append(k[:, :2], v[:, :2])


@pytest.mark.row("EFF-05")
@pytest.mark.parametrize(("change", "effect"), [
    (lambda c, k, v: c.append(k, v), "state"), (lambda c, k, v: c.prune(last=1), "state"),
    (lambda c, k, v: c.offload(), "movement"), (lambda c, k, v: c.prefetch(), "movement")])
def test_the_effects_of_its_operations(rng, change, effect):
    @ts.jit
    def f(cache, k, v):
        return change(cache, k, v)

    k, v = entries(rng, 2)
    made = f(ts.kv_cache((2, 3, 8, 4)).append(k, v), k, v)
    assert isinstance(made, KVCache) and f.effects == {effect}
    with pytest.raises(ts.EffectError, match=effect):
        ts.pure(lambda c, k, v: change(c, k, v))(ts.kv_cache((2, 3, 8, 4)), k, v)


@pytest.mark.row("EFF-05")
def test_a_prefetch_around_a_block_is_a_movement(rng):
    @ts.jit
    def f(cache, q):
        with ts.prefetch(cache, into="smem", overlap="compute"):
            return ts.flash_attention(q, cache)

    k, v = entries(rng, 2)
    cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
    got = f(cache, k)
    assert f.effects == {"movement"} and "into='smem'" in str(f.graph())
    assert (got.numpy() == ts.jit(lambda c, q: ts.flash_attention(q, c))(cache, k).numpy()).all()


@pytest.mark.row("PLACE-03", "PLACE-04", "PLACE-05")
def test_the_plan_lists_what_a_block_fetches_ahead(rng):
    @ts.jit
    def f(cache, q):
        with ts.device(ts.gpu), ts.prefetch(cache, into="smem", overlap="compute"):
            return ts.flash_attention(q, cache)

    k, v = entries(rng, 2)
    cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
    got = f(cache, k)
    np.testing.assert_array_equal(got.numpy(), ts.jit(lambda c, q: ts.flash_attention(q, c))(
        cache, k).numpy())
    listed = ts.plan(f)
    assert [(m.verb, m.object, m.source, m.destination, m.nbytes, m.overlap) for m in listed] == [
        ("prefetch", "KVCache f32[2, 3, 8, 4]", "host", "smem", 768, "compute")] * 2
    assert listed[0].where.file.endswith("test_state_rows.py") and "smem" in str(listed)
    with ts.device(ts.cpu), ts.prefetch(ts.tensor(k), into="smem", overlap="none"):
        pass
    last = ts.plan()[-1]
    assert (last.object, last.source, last.destination, last.nbytes, last.overlap) == (
        "f32[2, 3, 2, 4]", "host", "smem", 192, "none")


@pytest.mark.row("AD-14")
def test_a_gradient_appends_once(rng):
    k, v = entries(rng, 2)

    def loss(x, cache):
        cache = cache.append(x, x * 2.0)
        return ts.sum(cache._storage.K ** 2), cache

    cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
    for f in (loss, ts.checkpoint(loss)):
        g, grown = ts.grad(f, has_aux=True)(ts.tensor(k), cache)
        assert grown.length == 4 and cache.length == 2
        assert_close(g.numpy(), 2 * f64(k))


# --- the modelling snippet --------------------------------------------------------------------
TRANSFORMER_BLOCK = '''\
@jit @autodiff
def transformer_block(x: Tensor["B","S","D", bf16 @accum(f32)],
                      cache: KVCache, *, heads: int, p: float):
    x = rmsnorm_safe(x)
    with device(gpu), prefetch(cache, into="smem", overlap="compute"):
        qkv = matmul(x, Wqkv)                 # fp8 -> fp32 accum
        q,k,v = split_qkv(qkv, heads=heads)
        cache = cache.append(k,v)
        y = flash_attention(q, cache, dropout=p, causal=True)
    y = residual(x, matmul(y, Wo), dropout=p)
    y = residual(y, gelu(matmul(rmsnorm_safe(y), Wmlp_in)) @ Wmlp_out, dropout=p)
    return cast_like(y, x), cache
'''
WEIGHTS = {"Wqkv": (64, 192), "Wo": (64, 64), "Wmlp_in": (64, 128), "Wmlp_out": (128, 64)}
HEADS, B, S, D = 4, 2, 16, 64


def make_weights(rng):
    return {n: (rng.standard_normal(s) / math.sqrt(s[0])).astype(np.float32)
            for n, s in WEIGHTS.items()}


def reference_block(x, w, keys=None, values=None):
    """The block in float64 NumPy: (y, keys, values), with what the cache held before."""
    def rms(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    B, S, D = x.shape
    x = rms(x)
    q, k, v = (part.reshape(B, S, HEADS, D // HEADS).transpose(0, 2, 1, 3)
               for part in np.split(x @ w["Wqkv"], 3, axis=-1))
    k = k if keys is None else np.concatenate([keys, k], axis=2)
    v = v if values is None else np.concatenate([values, v], axis=2)
    T = k.shape[2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(D // HEADS)
    scores[..., np.arange(T)[None] > np.arange(S)[:, None] + T - S] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    y = x + y.transpose(0, 2, 1, 3).reshape(B, S, D) @ w["Wo"]
    return y + gelu(rms(y) @ w["Wmlp_in"]) @ w["Wmlp_out"], k, v


@pytest.mark.row("CORE-07", "EX-25")
def test_transformer_block_as_printed(rng):
    weights = make_weights(rng)
    space = run(TRANSFORMER_BLOCK, **{n: ts.param(w, bf16) for n, w in weights.items()})
    x = rng.standard_normal((B, S, D)).astype(ml_dtypes.bfloat16)
    cache = ts.kv_cache((B, HEADS, 32, D // HEADS), bf16)
    y, grown = space["transformer_block"](ts.tensor(x), cache, heads=HEADS, p=0.0)
    rounded = {n: f64(w.astype(ml_dtypes.bfloat16)) for n, w in weights.items()}
    want, k, v = reference_block(f64(x), rounded)
    assert y.shape == (B, S, D) and y.dtype is bf16
    assert grown.length == 16 and cache.length == 0
    assert np.sqrt(((f64(y) - want) ** 2).mean()) < 0.02 * np.sqrt((want**2).mean())
    assert_close(f64(grown.K), k, bf16, n=64)
    again, grown = space["transformer_block"](ts.tensor(x), grown, heads=HEADS, p=0.0)
    want, _, _ = reference_block(f64(x), rounded, k, v)
    assert grown.length == 32 and space["transformer_block"].specializations == 1
    assert np.sqrt(((f64(again) - want) ** 2).mean()) < 0.02 * np.sqrt((want**2).mean())
    assert {"state", "movement"} == space["transformer_block"].effects


@pytest.mark.row("AD-24", "EX-25")
def test_transformer_block_gradients(rng):
    """With respect to the weights, in float64 throughout, against differences along a random
    direction. The printed annotation asks for bf16 x; the body is run below it."""
    space = run(TRANSFORMER_BLOCK)
    block = inspect.unwrap(space["transformer_block"])
    weights = {n: f64(w) for n, w in make_weights(rng).items()}
    x, ct = rng.standard_normal((2, B, S, D))
    cache = ts.kv_cache((B, HEADS, 16, D // HEADS), "f64")

    def loss(w):
        space.update(w)
        y, grown = block(ts.tensor(x), cache, heads=HEADS, p=0.0)
        return ts.sum(y * ct), grown

    (value, grown), g = ts.value_and_grad(loss, has_aux=True)(
        {n: ts.tensor(w) for n, w in weights.items()})
    assert grown.length == 16 and cache.length == 0
    assert value.item() == pytest.approx((reference_block(x, weights)[0] * ct).sum())
    for name in WEIGHTS:
        t, h = rng.standard_normal(WEIGHTS[name]), 1e-5
        up, down = ((reference_block(x, weights | {name: weights[name] + s * h * t})[0] * ct).sum()
                    for s in (1, -1))
        got = (g[name].numpy() * t).sum()
        assert got == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-5), name


@pytest.mark.row("AD-24")
def test_transformer_block_specialises_for_its_static_arguments(rng):
    space = run(TRANSFORMER_BLOCK, **{n: ts.param(w, bf16) for n, w in make_weights(rng).items()})
    x = ts.tensor(rng.standard_normal((B, S, D)), bf16)
    for heads in (2, 4):
        y, _ = space["transformer_block"](
            x, ts.kv_cache((B, heads, 16, D // heads), bf16), heads=heads, p=0.1)
        assert np.isfinite(f64(y)).all()
    assert space["transformer_block"].specializations == 2


# --- the kernel snippet -----------------------------------------------------------------------
FLASH_ATTENTION = '''\
@kernel.autotune(space=dict(BM=[64,128], BN=[64,96,128], BD=[64,128],
                            warps=[4,8], stages=[2,3], vector=[4,8]),
                 metric="latency_ms", budget_ms=180, cache="~/.sched")
def flash_attention(q: KTile["B*H","S","D_h", bf16 @accum(f32)], cache: KVCache, *, dropout: float, causal: bool):
    T  = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc = tile.zeros((T.m,T.d), f32); m = tile.full((T.m,), -INF); l = tile.zeros((T.m,), f32)
    for nblk in tile.range_n(cache.K.shape, T.n, prefetch=2):
        Kb = tile.load(cache.K, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(cache.V, nblk, cols=T.d, vector=T.vector)
        S  = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        if causal: tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))
        P, m_c, l_c = tile.softmax_online(S)
        if dropout: P = dropout_in_kernel(P, p=dropout)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return tile.cast(acc / l[:,None], bf16)
'''  # noqa: E501  as printed


def attention_inputs(rng, S, T, D, kind=KVCache["B", "H", "S_max", "D_h", bf16]):
    B, H = 1, 2
    q = rng.standard_normal((B * H, S, D)).astype(ml_dtypes.bfloat16)
    k, v = entries(rng, T, B, H, D, ml_dtypes.bfloat16)
    return q, kind(B, H, 160, D).append(k, v)


def reference_attention(q, cache, causal):
    K, V = (f64(x).reshape(q.shape[0], -1, q.shape[-1]) for x in (cache.K, cache.V))
    S, T = q.shape[1], K.shape[1]
    scores = f64(q) @ K.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores[:, np.arange(T)[None] > np.arange(S)[:, None] + T - S] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ V


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    """The kernel as printed, its ~ an empty folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield run(FLASH_ATTENTION)["flash_attention"]


@pytest.mark.row("EX-26", "CORE-07")
@pytest.mark.parametrize(("S", "T", "causal"), [(70, 130, True), (64, 64, True), (33, 100, False)])
def test_the_kernel_over_a_cache(flash, rng, S, T, causal):
    q, cache = attention_inputs(rng, S, T, 64)
    got = flash(q, cache, dropout=0.0, causal=causal)
    assert got.shape == q.shape
    assert_close(f64(got), reference_attention(q, cache, causal), bf16, n=T)


@pytest.mark.row("EX-26")
@pytest.mark.parametrize("D", [64, 128])
def test_every_legal_candidate_of_the_kernel(flash, rng, D):
    q, cache = attention_inputs(rng, 70, 100, D)
    want = reference_attention(q, cache, True)
    flash(q, cache, dropout=0.0, causal=True)
    trials = flash.tuning_trace
    legal = [t.schedule for t in trials if t.status != "skipped"]
    assert len(trials) == 96 and all(s.d == D for s in legal)
    assert {t.schedule.d for t in trials if t.status == "skipped"} >= {192 - D}
    assert len(legal) == 48 if D == 64 else legal
    for schedule in legal:
        got = flash.candidate(schedule)(q, cache, dropout=0.0, causal=True)
        assert_close(f64(got), want, bf16, n=100)


@pytest.mark.row("EX-26")
def test_dropout_in_the_kernel(flash, rng):
    q, cache = attention_inputs(rng, 64, 128, 64)
    plain, dropped = (f64(flash(q, cache, dropout=p, causal=False)) for p in (0.0, 0.5))
    assert np.isfinite(dropped).all() and (np.abs(dropped - plain) > 1e-3).mean() > 0.5


@pytest.mark.row("EX-26")
def test_the_kernel_over_a_window_that_has_rolled(flash, rng):
    kind = KVCache["B", "H", "S_max", "D_h", bf16] @ rolling_window
    q, cache = attention_inputs(rng, 16, 200, 64, kind)
    assert cache.length == 160
    got = flash(q, cache, dropout=0.0, causal=True)
    assert_close(f64(got), reference_attention(q, cache, True), bf16, n=160)


@pytest.mark.row("STATE-04", "STATE-02")
@pytest.mark.parametrize("rolling", [False, True])
def test_compiled_decoding_is_traced_once_and_equals_eager(rng, rolling):
    kind = KVCache["B", "H", "S_max", "D_h", f32]
    kind = kind @ rolling_window if rolling else kind

    @ts.jit
    def step(q, k, v, cache: kind):
        cache = cache.append(k, v)
        return ts.flash_attention(q, cache), cache

    compiled = eager = kind(2, 3, 8, 4)
    for _ in range(11 if rolling else 8):
        q = rng.standard_normal((2, 6, 1, 4)).astype(np.float32)
        k, v = entries(rng, 1)
        y, compiled = step(q, k, v, compiled)
        eager = eager.append(k, v)
        assert compiled.length == eager.length
        assert (compiled.K.numpy() == eager.K.numpy()).all()
        assert_close(y.numpy(), ts.flash_attention(q, eager).numpy(), n=8)
    assert step.specializations == 1
    if not rolling:
        with pytest.raises(ts.ArgumentError, match="a cache of 8 entries holds 8: 1 more"):
            step(q, k, v, compiled)


# --- the state of an optimizer ------------------------------------------------------------------
@pytest.mark.row("STATE-10")
@pytest.mark.parametrize("optimizer", [ts.optim.AdamW(), ts.optim.SGD(momentum=0.9)])
def test_a_type_of_moments_for_parameters(optimizer, rng):
    for params in (ts.param(rng.standard_normal((3, 5)), "f32"),
                   [ts.param(rng.standard_normal(n), "bf16") for n in (4, 7)],
                   {"a": ts.param(np.ones(2), "f32"),
                    "b": {"c": ts.param(np.ones((2, 3)), "bf16")}}):
        named = ts.optim.named_params(params)
        state = ts.OptimizerState[params](optimizer)
        for moment in state.keys() - {"step", "master"}:
            assert {p: t.shape for p, t in state[moment].items()} == {
                p: t.shape for p, t in named.items()}
            assert all(not t.numpy().any() and t.type.dtype is f32
                       for t in state[moment].values())
        assert int(state["step"]) == 0 and state["master"] == {}
        grads = ts.grad(lambda p: sum(ts.sum(ts.cast(t, f32) ** 2)
                                      for t in ts.optim.named_params(p).values()))(params)
        after, state = optimizer.update(params, grads, state, 0.1)
        assert int(state["step"]) == 1
        for path, p in ts.optim.named_params(after).items():
            assert p.type == named[path].type and (f64(p) < f64(named[path])).any()
    with pytest.raises(ts.DTypeError, match="an optimizer needs float tensors"):
        ts.OptimizerState[{"i": ts.tensor([1, 2])}]
    with pytest.raises(ts.PolicyError, match="has no policy @rolling_window"):
        ts.OptimizerState[params] @ rolling_window


@pytest.mark.row("STATE-11")
def test_updates_add_up_in_a_master_copy(rng):
    """1000 updates of 1e-4 each on 1.0 in bf16, whose numbers there are 2^-8 apart below it."""
    start = ts.param(np.ones(5), "bf16")
    optimizer, ends = ts.optim.SGD(), {}
    step = ts.jit(lambda p, g, s: optimizer.update(p, g, s, 1e-4))
    for name, kind in (("with", ts.OptimizerState[start] @ ts.fp32_master),
                       ("without", ts.OptimizerState[start])):
        p, state = start, kind(optimizer)
        for _ in range(1000):
            p, state = step(p, ts.ones(5), state)
        ends[name] = f64(p), {k: f64(t) for k, t in state["master"].items()}
    assert (ends["without"][0] == 1.0).all() and ends["without"][1] == {}
    (master,) = ends["with"][1].values()
    assert np.abs(master - 0.9).max() < 1000 * 2**-25  # half an ulp of f32 in each
    assert (ends["with"][0] == master.astype(ml_dtypes.bfloat16).astype(np.float64)).all()
    rounded = ts.param(np.ones(5), ts.as_type("bf16") @ ts.stochastic_round)
    made = (ts.OptimizerState[rounded] @ ts.fp32_master)(optimizer)
    assert [t.type.dtype for t in made["master"].values()] == [f32]


@pytest.mark.row("STATE-13")
def test_a_run_that_is_saved_and_loaded_goes_on_to_the_bit(rng, tmp_path):
    params = {"w": ts.param(rng.standard_normal((6, 4)), "bf16"), "b": ts.param(np.ones(4), "f32")}
    x = ts.tensor(rng.standard_normal((8, 6)), "f32")
    optimizer = ts.optim.AdamW()
    kind = ts.OptimizerState[params] @ ts.fp32_master @ ts.checkpointable

    @ts.jit
    def step(params, state):
        def loss(p):
            return ts.mean(ts.dropout(x @ ts.cast(p["w"], f32) + p["b"], 0.5) ** 2)

        value, grads = ts.value_and_grad(loss)(params)
        return *optimizer.update(params, grads, state, 0.01), value

    def run(p, state, steps):
        values = []
        for _ in range(steps):
            p, state, value = step(p, state)
            values.append(value.item())
        return p, state, values

    ts.random.seed(3)
    p, state, _ = run(params, kind(optimizer), 3)
    kind.save(tmp_path / "run", p, state, step=3)
    whole = run(p, state, 4)
    ts.random.seed(99)
    p, state, done = kind.load(tmp_path / "run")
    assert done == 3 == int(state["step"])
    again = run(p, state, 4)
    assert again[2] == whole[2]
    for a, b in zip(*(ts.graph.tree.flatten(r[:2])[0] for r in (again, whole)), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes() and a.type == b.type
    with pytest.raises(ts.ArgumentError, match="does not save"):
        ts.OptimizerState[params].save(tmp_path / "run", p, state)
    with pytest.raises(ts.CheckpointError, match="state.m.b is in it, but not asked for"):
        (ts.OptimizerState[{"w": params["w"]}] @ ts.checkpointable).load(tmp_path / "run")
