"""The KV cache beyond its rows: handles, types, attention over it, transforms, messages."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import KVCache, bf16, f32, rolling_window
from tolerance import assert_close

KIND = KVCache["B", "H", "S_max", "D_h", f32]


def entries(rng, n, B=2, H=3, D=4):
    return rng.standard_normal((2, B, H, n, D)).astype(np.float32)


def reference(q, k, v, causal=True):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    S, T = q.shape[2], k.shape[2]
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s[..., np.arange(T)[None] > np.arange(S)[:, None] + T - S] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    return y.transpose(0, 2, 1, 3).reshape(q.shape[0], S, -1)


class TestHandles:
    def test_appends_share_storage_and_older_handles_stay_as_they_were(self, rng):
        k, v = entries(rng, 6)
        empty = ts.kv_cache((2, 3, 8, 4))
        first = empty.append(k[:, :, :2], v[:, :, :2])
        second = first.append(k[:, :, 2:], v[:, :, 2:])
        assert np.shares_memory(first.K.array, second.K.array)
        assert (empty.length, first.length, second.length) == (0, 2, 6)
        assert (first.K.numpy() == k[:, :, :2]).all() and (second.K.numpy() == k).all()

    def test_two_continuations_of_one_handle_do_not_meet(self, rng):
        k, v = entries(rng, 6)
        start = ts.kv_cache((2, 3, 8, 4)).append(k[:, :, :2], v[:, :, :2])
        one = start.append(k[:, :, 2:4], v[:, :, 2:4])
        other = start.append(k[:, :, 4:], v[:, :, 4:])
        assert not np.shares_memory(one.K.array, other.K.array)
        assert (one.K.numpy() == k[:, :, :4]).all()
        assert (other.K.numpy() == k[:, :, [0, 1, 4, 5]]).all()

    def test_a_handle_whose_entries_have_been_overwritten_says_so(self, rng):
        k, v = entries(rng, 8)
        old = (KIND @ rolling_window)(2, 3, 8, 4).append(k, v)
        new = old.append(k[:, :, :1], v[:, :, :1])
        for use in (lambda: old.K, lambda: old.append(k, v), lambda: old.prune(last=1),
                    lambda: ts.jit(lambda c: c)(old), lambda: ts.flash_attention(k, old)):
            with pytest.raises(ts.ArgumentError, match="entries of this cache are gone") as e:
                use()
            assert e.value.code == "E_STALE"
        assert new.length == 8

    def test_a_result_of_jit_can_be_appended_to_in_place(self, rng):
        k, v = entries(rng, 2)
        cache = ts.jit(lambda c, k, v: c.append(k, v))(ts.kv_cache((2, 3, 8, 4)), k, v)
        longer = cache.append(k, v)
        assert np.shares_memory(cache.K.array, longer.K.array) and longer.length == 4

    def test_offloaded_entries_are_there_when_used(self, rng):
        k, v = entries(rng, 3)
        cache = ts.kv_cache((2, 3, 8, 4)).append(k, v).offload()
        assert cache.place == "host" and (cache.K.numpy() == k).all()
        back = cache.prefetch()
        assert back.place == "device" and (back.append(k, v).V.numpy()[:, :, 3:] == v).all()


class TestTypes:
    def test_how_it_is_written(self):
        kind = KVCache["B", "H", "S_max", "D_h", bf16] @ rolling_window @ ts.device("cpu")
        assert kind.rolling and kind.numeric.policy.device == "cpu"
        assert repr(kind) == "KVCache['B', 'H', 'S_max', 'D_h', bf16 @device(\"cpu\")]" \
                             " @rolling_window"
        assert eval(repr(kind), vars(ts) | {"cpu": "cpu"}) == kind
        assert repr(kind(1, 2, 3, 4)).endswith(", 0 of 3 entries")

    @pytest.mark.parametrize("make", [
        lambda: KVCache["B", "H", bf16], lambda: KIND(2, 3), lambda: KIND(2, 3, 8, 4, 5),
        lambda: KIND(2, 3, 8, D=4), lambda: KIND(2, 3, 8, -4), lambda: KIND(2, 3, 8, 4.0)])
    def test_extents_that_are_wrong(self, make):
        with pytest.raises(ts.ArgumentError):
            make()

    def test_policies_that_are_wrong(self):
        with pytest.raises(ts.PolicyError, match="scaled"):
            KVCache["B", "H", "S", "D", ts.int8 @ ts.scaled("amax")]
        with pytest.raises(ts.PolicyError, match="no numeric type"):
            KVCache["B", "H", "S", "D"] @ ts.saturate

    @pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "fp6_e3m2", "fp4_e2m1", "int8"])
    def test_entries_are_rounded_to_its_type(self, rng, dtype):
        k, v = entries(rng, 3)
        kind = KVCache[2, 3, 8, 4, dtype]
        want = ts.cast(ts.tensor(k), dtype).array
        eager = kind().append(k, v)
        compiled = ts.jit(lambda c, k, v: c.append(k, v))(kind(), k, v)
        for cache in (eager, compiled):
            assert cache.dtype.name == dtype and (cache.K.array == want).all()

    def test_as_an_annotation(self, rng):
        @ts.jit
        def f(x: ts.Tensor["B", "D", f32], cache: KVCache["B", 3, "S", "D", f32]):
            return ts.sum(x)

        f(ts.ones((2, 4)), ts.kv_cache((2, 3, 8, 4)))
        with pytest.raises(ts.ShapeError):
            f(ts.ones((2, 5)), ts.kv_cache((2, 3, 8, 4)))
        with pytest.raises(ts.DTypeError, match="holds bf16"):
            f(ts.ones((2, 4)), ts.kv_cache((2, 3, 8, 4), bf16))
        with pytest.raises(ts.DTypeError, match="is a tensor, its annotation says KVCache"):
            f(ts.ones((2, 4)), ts.ones((2, 4)))
        with pytest.raises(ts.DTypeError, match="no rolling window"):
            ts.jit(_typed(lambda c: c, KIND @ rolling_window))(ts.kv_cache((2, 3, 8, 4)))

    def test_a_type_stands_for_a_cache_in_inspection(self):
        @ts.jit
        def f(q: ts.Tensor["B", "H", 1, 8, f32], cache: KVCache["B", "H", "S", 8, f32]):
            cache = cache.append(q, q)
            return ts.flash_attention(q, cache), cache

        kinds = (ts.Tensor["B", 4, 1, 8, f32], KVCache["B", 4, "S", 8, f32])
        assert "f32[B, 4, S, 8] = dynamic_update_slice(" in f.inspect_ir("graph", *kinds)
        y, cache = f.infer(*kinds)
        assert str(y) == "Tensor['B', 1, 32, f32]" and isinstance(cache, KVCache)
        assert ts.shape.check(f)

    def test_guards_know_its_extents(self):
        @ts.jit
        @ts.shape.guard(ts.shape.Divisible("S", 4))
        def f(cache: KVCache["B", "H", "S", "D", f32]):
            return cache

        f(ts.kv_cache((1, 1, 8, 2)))
        with pytest.raises(ts.ShapeError):
            f(ts.kv_cache((1, 1, 6, 2)))

    def test_as_the_annotation_of_a_result(self, rng):
        def f(c) -> KVCache[2, 3, 9, 4]:
            return c

        with pytest.raises(ts.ShapeError):
            ts.jit(f)(ts.kv_cache((2, 3, 8, 4)))

    @pytest.mark.parametrize("shape", [(2, 3, 1, 5), (2, 2, 1, 4), (3, 4), (1, 3, 1, 4)])
    def test_entries_of_another_shape(self, shape):
        with pytest.raises(ts.ShapeError, match="append: k is"):
            ts.kv_cache((2, 3, 8, 4)).append(np.zeros(shape), np.zeros(shape))

    def test_keys_and_values_of_different_lengths(self, rng):
        with pytest.raises(ts.ShapeError, match="append: k is"):
            ts.kv_cache((2, 3, 8, 4)).append(entries(rng, 1)[0], entries(rng, 2)[1])

    def test_prune_wants_one_of_two(self):
        cache = ts.kv_cache((2, 3, 8, 4))
        for bad in ({}, {"last": 1, "keep": [0]}, {"last": -1}, {"last": 1.5}, {"keep": [0]},
                    {"keep": [[0]]}, {"keep": [0.5]}):
            with pytest.raises((ts.ArgumentError, ts.DTypeError)):
                cache.prune(**bad)


def _typed(fn, kind):
    fn.__annotations__ = {"c": kind}
    return fn


class TestAttention:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("heads", [3, 6])
    def test_over_a_cache(self, rng, causal, heads):
        k, v = entries(rng, 7)
        q = rng.standard_normal((2, heads, 3, 4)).astype(np.float32)
        cache = ts.kv_cache((2, 3, 16, 4)).append(k, v)
        want = reference(q, k, v, causal)
        f = ts.jit(lambda q, c: ts.flash_attention(q, c, causal=causal))
        for y in (ts.flash_attention(q, cache, causal=causal), f(q, cache)):
            assert y.shape == (2, 3, heads * 4)
            assert_close(y.numpy(), want, n=16)

    @pytest.mark.parametrize("n", [5, 8, 9, 13, 21])
    def test_over_a_rolling_window(self, rng, n):
        k, v = entries(rng, n)
        q = rng.standard_normal((2, 3, 3, 4)).astype(np.float32)
        cache = (KIND @ rolling_window)(2, 3, 8, 4).append(k, v)
        want = reference(q, k[:, :, -8:], v[:, :, -8:])
        f = ts.jit(lambda q, c: ts.flash_attention(q, c))
        for y in (ts.flash_attention(q, cache), f(q, cache)):
            assert_close(y.numpy(), want, n=16)

    def test_what_is_not_filled_is_not_seen(self, rng):
        k, v = entries(rng, 3)
        q = rng.standard_normal((2, 3, 1, 4)).astype(np.float32)
        cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
        cache._storage.K.array[:, :, 3:], cache._storage.V.array[:, :, 3:] = 1e30, 1e30
        f = ts.jit(lambda q, c: ts.flash_attention(q, c, causal=False))
        assert_close(f(q, cache).numpy(), reference(q, k, v), n=8)

    def test_options(self, rng):
        k, v = entries(rng, 4)
        cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
        mask = np.array([True, False, True, True])
        want = reference(k, k[:, :, mask], v[:, :, mask], causal=False)
        assert_close(ts.flash_attention(k, cache, causal=False, mask=mask).numpy(), want, n=8)
        with pytest.raises(ts.ArgumentError, match="a mask over a cache"):
            ts.jit(lambda q, c: ts.flash_attention(q, c, mask=mask))(k, cache)
        key = ts.next_key()
        a, b = (ts.flash_attention(k, cache, dropout=0.5, key=key).numpy() for _ in range(2))
        assert (a == b).all() and (a != ts.flash_attention(k, cache).numpy()).any()
        with pytest.raises(ts.ArgumentError, match="contradict"):
            ts.flash_attention(k, cache, causal=True, is_causal=False)

    def test_without_keys(self):
        with pytest.raises(ts.ArgumentError, match="queries and a Tensor") as e:
            ts.flash_attention(ts.ones((1, 1, 2, 4)), ts.ones((1, 1, 2, 4)))
        assert "KVCache" in e.value.hint


class TestTransforms:
    def test_cotangents_reach_what_is_appended_in_the_call_and_stop_at_what_was_there(self, rng):
        k, v = entries(rng, 2)
        cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)

        def loss(x):
            grown = cache.append(x, x * x).append(x * 3.0, x)
            return ts.sum(grown.K ** 2) + ts.sum(grown.V * 2.0)

        x = rng.standard_normal((2, 3, 1, 4)).astype(np.float32)
        g = ts.grad(loss)(ts.tensor(x))
        assert_close(g.numpy(), 20 * np.float64(x) + 4 * np.float64(x) + 2, n=4)
        assert cache.length == 2 and (cache.K.numpy() == k).all()

    @pytest.mark.parametrize("rolling", [False, True])
    def test_through_attention(self, rng, rolling):
        kind = KVCache[2, 3, 8, 4, "f64"]
        k, v = entries(rng, 6)
        cache = (kind @ rolling_window if rolling else kind)().append(k, v)
        x = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)

        def loss(x, c):
            return ts.sum(ts.flash_attention(x, c.append(x, x * 0.5)) ** 2)

        x = ts.tensor(x, "f64")
        assert ts.gradcheck(lambda x: loss(x, cache), (x,))
        found = ts.grad(loss)(x, cache).numpy()
        assert_close(found, ts.grad(lambda x: loss(x, cache))(x).numpy(), n=16)

    def test_vmap_over_entries(self, rng):
        k, v = entries(rng, 2)
        cache = ts.kv_cache((2, 3, 8, 4)).append(k, v)
        xs = rng.standard_normal((5, 2, 3, 1, 4)).astype(np.float32)
        f = ts.vmap(lambda x: ts.flash_attention(x, cache.append(x, x)))
        want = np.stack([ts.flash_attention(x, cache.append(x, x)).numpy() for x in xs])
        assert_close(f(xs).numpy(), want, n=8)

    def test_scan_decodes(self, rng):
        k, v = entries(rng, 8)

        def step(cache, x):
            cache = cache.append(x, x * 2.0)
            return cache, ts.flash_attention(x, cache)

        xs = k.transpose(2, 0, 1, 3)[:, :, :, None]
        cache, ys = ts.jit(lambda xs, c: ts.scan(step, c, xs))(xs, ts.kv_cache((2, 3, 8, 4)))
        assert cache.length == 8 and (cache.V.numpy() == 2 * k).all()
        want = reference(k, k, 2 * k).transpose(1, 0, 2)[:, :, None]
        assert_close(ys.numpy(), want, n=8)

    def test_the_length_of_a_traced_cache_is_not_known(self):
        for use in (lambda c: c.length, lambda c: c.K, lambda c: c.prune(keep=[0])):
            with pytest.raises(ts.TraceError):
                ts.jit(use)(ts.kv_cache((2, 3, 8, 4)))

    def test_what_a_draft_appended_is_taken_back(self, rng):
        """By a number that is data: entries behind it are written over, and older handles stay."""
        k, v = entries(rng, 8)
        part = lambda x, a, b: x[:, :, a:b]  # noqa: E731
        whole = ts.kv_cache((2, 3, 8, 4)).append(part(k, 0, 6), part(v, 0, 6))

        def verify(c, n, q, k, v):
            c = c.prune(first=n).append(k, v)
            return ts.flash_attention(q, c), c

        q, more = k[:, :, :1], (part(k, 6, 8), part(v, 6, 8))
        f = ts.jit(verify)
        for n in (0, 4, 6, 9):
            m = min(n, 6)
            kept = [np.concatenate([x[:, :, :m], x[:, :, 6:]], axis=2) for x in (k, v)]
            for call in (f, verify):
                y, short = call(whole, n, q, *more)
                assert short.length == m + 2
                assert np.array_equal(short.K.numpy(), kept[0])
                assert_close(y.numpy(), reference(q, *kept), n=8)
            assert np.array_equal(whole.K.numpy(), part(k, 0, 6))
        assert f.specializations == 1
        with pytest.raises(ts.ArgumentError, match="of a rolling cache"):
            (KVCache["B", "H", "S", "D", f32] @ ts.rolling_window)(1, 1, 4, 2).prune(first=1)
        with pytest.raises(ts.ArgumentError, match="a number of entries"):
            whole.prune(first=1.5)

    def test_prune_in_a_trace(self, rng):
        k, v = entries(rng, 5)
        with pytest.raises(ts.TraceError, match="Python needs an integer"):
            ts.jit(lambda c, n: c.prune(last=n))(ts.kv_cache((2, 3, 8, 4)), 3)
        f = ts.jit(lambda c: c.prune(last=3))
        for n in (2, 5):
            short = f(ts.kv_cache((2, 3, 8, 4)).append(k[:, :, :n], v[:, :, :n]))
            assert (short.K.numpy() == k[:, :, max(n - 3, 0):n]).all()
        assert f.specializations == 1


class TestPlacement:
    def test_blocks(self, rng):
        cache = ts.kv_cache((2, 3, 8, 4))
        with ts.device(ts.cpu), ts.prefetch([cache, ts.ones(3)], into="hbm", overlap="none"):
            assert ts.config.device == "cpu"
        with ts.device(ts.gpu) as where:
            assert str(where) == '@device("gpu")' and ts.config.device in ("auto", "cuda")
        assert ts.gpu[2] == "cuda:2"

    @pytest.mark.parametrize("make", [
        lambda: ts.prefetch(ts.ones(2), into="l2"), lambda: ts.prefetch(ts.ones(2), overlap="x"),
        lambda: ts.prefetch(3), lambda: ts.gpu[-1], lambda: ts.device(3)])
    def test_what_is_not_there(self, make):
        with pytest.raises((ts.ArgumentError, ts.PolicyError)):
            make()

    def test_a_policy_opens_no_block(self):
        with pytest.raises(ts.PolicyError, match="opens no block"):
            with ts.saturate:
                pass

    def test_a_device_that_is_missing(self, no_gpu):
        for name in ("cuda:99", "tpu"):
            with pytest.raises(ts.UnsupportedTargetError):
                with ts.device(name):
                    pass


# --- on a GPU -----------------------------------------------------------------------------------
@pytest.mark.usefixtures("gpu", "apart")
class TestOnGpu:
    def decoded(self, rng, step, kind, place, count, more=1):
        cache, out = ts.to(kind(2, 3, 8, 4), place), []
        for _ in range(count):
            q, (k, v) = entries(rng, more)[0], entries(rng, more)
            y, cache = step(*(ts.tensor(x).to(place) for x in (q, k, v)), cache)
            assert y.device == cache.K.device
            out.append(y.array)
        return cache, out

    @pytest.mark.parametrize("more", [1, 3])
    @pytest.mark.parametrize("rolling", [False, True])
    @pytest.mark.parametrize("how", ["eager", "jit", "donated"])
    def test_decoding_there_is_decoding_here(self, how, rolling, more):
        def step(q, k, v, cache):
            cache = cache.append(k, v)
            return ts.flash_attention(q, cache), cache

        wrap = {"eager": lambda f: f, "jit": ts.jit, "donated": ts.jit(donate="cache")}[how]
        kind = KIND @ rolling_window if rolling else KIND
        count = (11 if rolling else 8) // more
        made = [self.decoded(np.random.default_rng(3), wrap(step), kind, place, count, more)
                for place in ("cpu", "cuda")]
        for a, b in zip(made[1][1], made[0][1], strict=True):
            assert_close(a, b, n=8)
        there, here = made[1][0], made[0][0]
        assert there.length == here.length and (there.K.array == here.K.array).all()

    @pytest.mark.parametrize("how", ["eager", "donated"])
    def test_an_append_moves_the_new_entries_alone(self, how, rng, driver):
        def grown(cache, k):
            return cache.append(k, k)

        step = grown if how == "eager" else ts.jit(grown, donate="cache")
        cache = ts.to(ts.kv_cache((2, 3, 9, 4)), "cuda")  # a shape of this test's own
        k = ts.tensor(entries(rng, 1)[0]).cuda()
        old = cache
        for _ in range(3):
            cache = step(cache, k)
        pointers = cache._storage.K.memory.pointer, cache._storage.V.memory.pointer
        made = len(driver.memory)
        cache = step(step(cache, k), k)
        assert pointers == (cache._storage.K.memory.pointer, cache._storage.V.memory.pointer)
        assert all(m is None or len(m) < cache._storage.K.nbytes
                   for m in list(driver.memory.values())[made:])
        assert (cache.K.array == np.concatenate([k.array] * 5, axis=2)).all()
        if how == "eager":
            assert old.length == 0 and old.append(k, k).length == 1
            assert cache.length == 5 and (cache.V.array == cache.K.array).all()

    def test_older_handles_keep_their_entries(self, rng):
        k, v = (ts.tensor(x).cuda() for x in entries(rng, 2))
        start = ts.to(ts.kv_cache((2, 3, 8, 4)), "cuda").append(k, k)
        one, other = start.append(k, k), start.append(v, v)
        assert (one.K.array[:, :, 2:] == k.array).all()
        assert (other.K.array[:, :, 2:] == v.array).all() and start.length == 2
        grown = ts.jit(lambda c, k: c.append(k, k))(start, k)  # not donated: start is as it was
        assert grown.length == 4 and (start.K.array == k.array).all()

    @pytest.mark.parametrize("rolling", [False, True])
    @pytest.mark.parametrize("how", ["eager", "jit"])
    def test_pruning_there_is_pruning_here(self, how, rolling, rng):
        grow = ts.jit(lambda c, k: c.append(k, k)) if how == "jit" else lambda c, k: c.append(k, k)
        kind = KIND @ rolling_window if rolling else KIND
        here = kind(2, 3, 8, 4)
        there = ts.to(here, "cuda")
        for n in (3, 4, 1):
            k = ts.tensor(entries(rng, n)[0])
            here, there = grow(here, k), grow(there, k.cuda())
        for cut in ({"last": 5}, {"keep": [0, 2]}, {"keep": np.arange(8) % 2 == 0}):
            a, b = here.prune(**cut), there.prune(**cut)
            assert b.K.device == "cuda:0" and a.length == b.length
            assert (a.K.array == b.K.array).all()
            k = ts.tensor(entries(rng, 1)[0])
            assert (grow(a, k).V.array == grow(b, k.cuda()).V.array).all()
