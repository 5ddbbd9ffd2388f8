"""Programs that serve a small decoder, as a user writes them: one compiled step that takes tokens
and caches, prompts in chunks, then token by token; against the whole sequence in f64."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import KVCache, f32, fp8_e4m3, rolling_window

WORDS, LAYERS, HEADS, KEY_HEADS, D = 40, 2, 4, 2, 16
WIDTH = HEADS * D


@pytest.fixture
def params(rng):
    def matrix(*shape):
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[0])).astype(np.float32)

    return {"embed": matrix(WORDS, WIDTH), "head": matrix(WIDTH, WORDS), "layers": [
        {"q": matrix(WIDTH, HEADS * D), "k": matrix(WIDTH, KEY_HEADS * D),
         "v": matrix(WIDTH, KEY_HEADS * D), "o": matrix(HEADS * D, WIDTH)} for _ in range(LAYERS)]}


# --- the program ------------------------------------------------------------------------------
def heads_of(x, n):
    return ts.swapaxes(ts.reshape(x, (*x.shape[:-1], n, D)), 1, 2)


def model(params, tokens, positions, caches, window=None):
    """tokens [B, S], which stand at positions [S] or [B, S]: logits, and the caches with them."""
    x, grown, one = params["embed"][tokens], [], ts.ones((WIDTH,))
    for layer, cache in zip(params["layers"], caches, strict=True):
        h = ts.rmsnorm(x, one)
        q, k, v = (heads_of(h @ layer[name], n) for name, n in
                   (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)))
        q, k = (ts.rotary_embedding(a, positions=positions) for a in (q, k))
        cache = cache.append(k, v)
        x = x + ts.flash_attention(q, cache, window=window) @ layer["o"]
        grown.append(cache)
    return ts.rmsnorm(x, one) @ params["head"], grown


# --- what it has to give ------------------------------------------------------------------------
def whole(params, tokens, window=None, stored=np.float64):
    """Logits of a sequence. stored: in which keys and values are kept."""
    T, at = len(tokens), np.arange(len(tokens))
    seen = (at[:, None] >= at) & (at[:, None] - at < (window or T))
    angle = at[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    c, s = np.cos(angle), np.sin(angle)

    def norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def turned(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    x = params["embed"].astype(np.float64)[tokens]
    for layer in params["layers"]:
        q, k, v = (np.moveaxis((norm(x) @ layer[n]).reshape(T, -1, D), 1, 0) for n in "qkv")
        k, v = (np.repeat(a.astype(stored).astype(np.float64), HEADS // KEY_HEADS, 0)
                for a in (turned(k), v))
        p = np.where(seen, np.exp(turned(q) @ k.swapaxes(1, 2) / np.sqrt(D)), 0)
        y = p / p.sum(-1, keepdims=True) @ v
        x = x + np.moveaxis(y, 0, 1).reshape(T, -1) @ layer["o"]
    return norm(x) @ params["head"]


def error(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def in_chunks(step, params, caches, tokens, prompt, chunk):
    """The logits of all tokens: the prompt's in chunks, others one by one."""
    made, at = [], 0
    while at < tokens.shape[1]:
        more = min(chunk, prompt - at) if at < prompt else 1
        logits, caches = step(params, tokens[:, at:at + more], at, caches)
        made.append(logits.numpy())
        at += more
    return np.concatenate(made, 1)


def test_a_rolling_cache_of_a_window_and_a_chunk(params, rng):
    """What the first query of a chunk sees has to be there still when the chunk is."""
    window, chunk = 9, 5
    kind = KVCache["B", "H", "S_max", "D_h", f32] @ rolling_window
    caches = [kind(1, KEY_HEADS, window + chunk - 1, D) for _ in range(LAYERS)]
    step = ts.jit(lambda params, tokens, start, caches: model(
        params, tokens, start + ts.arange(tokens.shape[1]), caches, window), donate="caches")
    tokens = rng.integers(0, WORDS, (1, 26))
    got = in_chunks(step, params, caches, tokens, 20, chunk)
    assert error(got[0], whole(params, tokens[0], window)) < 1e-5
    assert step.specializations == 2


def test_a_cache_of_codes(params, rng):
    """Two sequences as long. A number beside a border of two codes may become the other one."""
    kind = KVCache["B", "H", "S_max", "D_h", fp8_e4m3]
    step = ts.jit(lambda params, tokens, start, caches: model(
        params, tokens, start + ts.arange(tokens.shape[1]), caches), donate="caches")
    tokens = rng.integers(0, WORDS, (2, 18))
    got = in_chunks(step, params, [kind(2, KEY_HEADS, 32, D) for _ in range(LAYERS)], tokens, 14, 7)
    for logits, text in zip(got, tokens, strict=True):
        coded = error(logits, whole(params, text, stored=fp8_e4m3.numpy))
        assert coded < 0.02 and coded < error(logits, whole(params, text)) / 2


def test_many_users_come_and_go(params, rng):
    """A manager for each layer. Prompts of several lengths come one by one, in front of steps of
    all; a sequence that ends gives its pages to another."""
    managers = [ts.KVCacheManager(heads=KEY_HEADS, head_size=D, pages=9, page_size=4)
                for _ in range(LAYERS)]

    @ts.jit(donate="caches")
    def step(params, tokens, caches):
        positions = ts.expand_dims(caches[0].lengths, 1) + ts.arange(tokens.shape[1])
        return model(params, tokens, positions, caches)

    def run(users, tokens):
        """Logits of further tokens of each."""
        batches = [m.batch([texts[u][1][i] for u in users], room=tokens.shape[1])
                   for i, m in enumerate(managers)]
        logits, grown = step(params, tokens, batches)
        for batch, result in zip(batches, grown, strict=True):
            batch.keep(result, room=0)
        for row, u in enumerate(users):
            texts[u][0].extend(tokens[row])
            got = logits.numpy()[row]
            assert error(got, whole(params, np.array(texts[u][0]))[-len(got):]) < 1e-5

    texts: dict[str, tuple[list, list]] = {}
    for user, n in (("a", 7), ("b", 3), ("c", 10)):
        texts[user] = [], [m.alloc() for m in managers]
        run([user], rng.integers(0, WORDS, (1, n)))
    for _ in range(3):
        run(["a", "b", "c"], rng.integers(0, WORDS, (3, 1)))
    for manager, sequence in zip(managers, texts.pop("c")[1], strict=True):
        manager.free(sequence)
    texts["d"] = [], [m.alloc() for m in managers]
    run(["d"], rng.integers(0, WORDS, (1, 5)))
    for _ in range(2):
        run(["d", "a", "b"], rng.integers(0, WORDS, (3, 1)))
    assert [m.pages_used for m in managers] == [7, 7]
