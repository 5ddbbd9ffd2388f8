"""Sequences of a pool side by side: their kernels under the interpreter and as emulated
instructions, what graphs make of them, and the batch as a value that steps of decoding carry."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from attention_cases import attended64, seen_keys
from emulator import compare
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import bf16
from tessera.errors import ArgumentError, OutOfMemoryError, ShapeError
from tessera.graph.cuda.levels import program_of
from tessera.kernels.attention_scores import LOG2E
from tessera.kernels.decode_attention import append_to_pages, combine_parts, decode_pages
from tolerance import assert_close

LENGTHS = (70, 3, 128)


def truth(q, ks, vs, causal, window=None):
    """The result of each sequence in f64, and the size of its terms."""
    each = [attended64(x, k, v, causal, seen_keys(1, x.shape[1], k.shape[1], window or None)[0])
            for x, k, v in zip(q, ks, vs, strict=True)]
    return tuple(map(np.stack, zip(*each, strict=True)))


def paged(rng, lengths, heads, page, D, dtype, pages=40):
    """(entries of each sequence, a pool that has them, NaN in pages that are nobody's, and large
    numbers behind the last entry; a table and counts)"""
    order = rng.permutation(pages)
    pool = np.full((pages, heads, page, D), np.nan, dtype)
    most = -(-max(lengths) // page)
    table, entries = np.zeros((len(lengths), most + 1), np.int32), []
    table[:] = order[-1]
    for row, n in zip(table, lengths, strict=True):
        x = rng.standard_normal((heads, n, D)).astype(dtype)
        entries.append(x)
        mine, order = order[:-(-n // page)], order[-(-n // page):]
        row[:len(mine)] = mine
        whole = np.full((heads, len(mine) * page, D), 1e30, dtype)
        whole[:, :n] = x
        pool[mine] = whole.reshape(heads, len(mine), page, D).swapaxes(0, 1)
    return entries, pool, table, np.array(lengths, np.int32)


@pytest.mark.parametrize("S, causal, window", [(1, False, 0), (3, True, 0), (2, True, 20)])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("page", [32, 64])
def test_the_kernel(page, P, S, causal, window, rng):
    H, Hk, D, E = 4, 2, 32, 16
    ks, K, table, count = paged(rng, LENGTHS, Hk, page, D, bf16.numpy)
    vs, V, *_ = paged(np.random.default_rng(1), LENGTHS, Hk, page, E, bf16.numpy)
    V = V[np.argsort(np.random.default_rng(1).permutation(40))]  # by its own table's order
    _, V_pool, own, _ = paged(np.random.default_rng(1), LENGTHS, Hk, page, E, bf16.numpy)
    V = np.full_like(V_pool, np.nan)
    V[table] = V_pool[own]
    q = rng.standard_normal((3, H, S, D)).astype(bf16.numpy)
    R = H // Hk * S
    parts = np.full((P, 3 * Hk, R, E), np.nan, np.float32 if P > 1 else bf16.numpy)
    lse = np.full((P, 3 * Hk, R), np.nan, np.float32) if P > 1 else None
    decode_pages(q.reshape(3 * Hk, R, D), K.reshape(-1, page, D), V.reshape(-1, page, E), table,
                 count, parts, lse, D**-0.5 * LOG2E, heads=Hk, S=S, causal=causal, window=window)
    out = parts
    if P > 1:
        out = np.full((3 * H * S, E), np.nan, bf16.numpy)
        combine_parts(parts.reshape(P, -1, E), lse.reshape(P, -1), out, BP=4)
    want, size = truth(q, ks, vs, causal, window)
    assert_close(np.asarray(out, np.float64).reshape(want.shape), want, "bf16", n=2, scale=size)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_emulated(target, rng):
    _, K, table, count = paged(rng, (40, 7), 2, 32, 32, bf16.numpy, pages=6)
    K = np.nan_to_num(K, nan=1.0)
    q = rng.standard_normal((4, 2, 32)).astype(bf16.numpy)
    compare(decode_pages, q, K.reshape(-1, 32, 32), K.reshape(-1, 32, 32), table, count,
            np.zeros((2, 4, 2, 32), np.float32), np.zeros((2, 4, 2), np.float32), 0.2, heads=2,
            rtol=2e-2, atol=2e-2, lanes=32, target=target)
    compare(append_to_pages, rng.standard_normal((4, 3, 32)).astype(bf16.numpy), table,
            np.array([30, 7], np.int32), K, target=target)


def grown(rng, page=16, dtype="bf16", heads=2, D=32, lengths=LENGTHS, pages=40):
    manager = ts.KVCacheManager(heads=heads, head_size=D, pages=pages, page_size=page, dtype=dtype)
    entries, sequences = [], [manager.alloc() for _ in lengths]
    for s, n in zip(sequences, lengths, strict=True):
        k, v = (ts.tensor(rng.standard_normal((heads, n, D)).astype(np.float32), dtype)
                for _ in "kv")
        s.append(k, v)
        entries.append((k.array, v.array))
    return manager, sequences, entries


def checked(y, q, entries, causal, dtype, window=None):
    """y [B, S, H D] of queries over the entries."""
    ks, vs = zip(*entries, strict=True)
    want, size = (x.swapaxes(1, 2).reshape(np.shape(y)) for x in truth(q, ks, vs, causal, window))
    assert_close(np.asarray(y, np.float64), want, dtype, n=64, scale=size + 1e-3)


@pytest.mark.parametrize("S, page, dtype, window, kind", [
    (1, 16, "bf16", None, "decode_pages"), (4, 32, "bf16", None, "decode_pages"),
    (1, 64, "f16", 9, "decode_pages"), (1, 5, "bf16", None, "gather"), (1, 16, "f32", 9, "gather"),
    (40, 16, "bf16", None, "gather"), (33, 16, "bf16", 30, "gather")])
def test_graphs_read_pages_where_they_lie(S, page, dtype, window, kind, rng):
    """Few queries; of others, and of other pages, they are gathered, and attention with spans
    leaves out what is behind the last entry."""
    manager, sequences, entries = grown(rng, page, dtype, lengths=(70, 50, 300), pages=120)
    q = ts.tensor(rng.standard_normal((3, 4, S, 32)).astype(np.float32), dtype)
    batch = manager.batch(sequences)
    manager._V.array[list(manager._free)] = np.nan  # what nobody has
    f = ts.jit(lambda q, b: ts.flash_attention(q, b, window=window))
    made = program_of(f.graph(q, batch), "sm_90a")
    plan = str(made.plan)
    assert ("call decode_pages" in plan) == (kind == "decode_pages")
    dense = "call decode_cluster" if (S, dtype) == (1, "bf16") else "attention over"
    assert dense in plan or kind == "decode_pages"
    t = batch._tensors
    if kind == "gather":
        t.V.array[0], t.K.array[0] = t.V.array[0], t.K.array[0]
        np.nan_to_num(t.V.array, copy=False)
    got = made.run([q.array, *(x.array for x in (t.K, t.V, t.table, t.count))])[0]
    checked(got, q.array, entries, True, dtype, window)
    checked(f(q, batch).array, q.array, entries, True, dtype, window)


@pytest.mark.parametrize("more", [1, 3])
def test_steps_of_decoding(more, rng):
    """In turn compiled and not; sequences grow over the ends of pages, and one graph does all."""
    manager, sequences, entries = grown(rng, 4, "f32", lengths=(5, 0, 9))

    @ts.jit(donate="batch")
    def step(q, k, v, batch):
        batch = batch.append(k, v)
        return ts.flash_attention(q, batch), batch

    batch = manager.batch(sequences, room=more)
    for i in range(6):
        q, k, v = (rng.standard_normal((3, h, more, 32)).astype(np.float32) for h in (4, 2, 2))
        entries = [(np.concatenate([a, x], 1), np.concatenate([b, y], 1))
                   for (a, b), x, y in zip(entries, k, v, strict=True)]
        if i % 3:
            y, made = step(q, k, v, batch)
            batch = batch.keep(made)
        else:
            batch = batch.append(k, v)
            y = ts.flash_attention(q, batch)
        checked(y.numpy(), q, entries, True, "f32")
    assert [s.length for s in sequences] == [n + 6 * more for n in (5, 0, 9)]
    assert batch.lengths.tolist() == [s.length for s in sequences]
    assert step.specializations <= 2  # tables have powers of two of pages
    for s, (k, v) in zip(sequences, entries, strict=True):
        assert (s.K.numpy()[0] == k).all() and (s.V.numpy()[0] == v).all()


def test_codes_of_8_bits_are_read_as_they_lie(rng):
    manager, sequences, entries = grown(rng, 16, "fp8_e4m3")
    q = ts.tensor(rng.standard_normal((3, 4, 1, 32)).astype(np.float32), "bf16")
    batch = manager.batch(sequences)
    wide = [tuple(np.asarray(ts.cast(x, "f64"))[0] for x in (s.K, s.V)) for s in sequences]
    for run in (lambda f: f, ts.jit):
        checked(run(ts.flash_attention)(q, batch).numpy(), q.numpy(), wide, True, "bf16")
    plan = str(program_of(ts.jit(ts.flash_attention).graph(q, batch), "sm_90a").plan)
    assert "call decode_pages" in plan and "bf16[40, 2, 16, 32]" not in plan


def test_gradients_are_those_of_queries(rng):
    """What is in a pool is a constant; a graph writes into what it was given alone."""

    manager, sequences, _ = grown(rng, 4, "f32", lengths=(5, 2))
    batch = manager.batch(sequences, room=1)
    q, k, v = (ts.tensor(rng.standard_normal((2, 2, 1, 32)).astype(np.float32)) for _ in "qkv")

    def loss(q, k, v, batch):
        return ts.sum(ts.flash_attention(q, batch.append(k, v)) ** 2)

    for f in (ts.grad(loss, argnums=(1, 2)), ts.jit(lambda q, k, v, b: loss(q, k, v, batch))):
        with pytest.raises(ts.TraceError, match="append_to_pages writes its argument pool"):
            f(q, k, v, batch)
    got = ts.grad(lambda q: ts.sum(ts.flash_attention(q, batch) ** 2))(q)
    assert np.abs(got.numpy()).max() > 0


def test_pages_are_empty_when_they_are_taken(rng):
    manager, (first, second), _ = grown(rng, 4, "f32", lengths=(9, 1), pages=4)
    manager._V.array[first._pages] = np.nan
    manager.free(first)
    k = np.ones((2, 4, 32), np.float32)
    second.append(k, k)
    q = ts.ones((1, 2, 1, 32))
    assert np.isfinite(ts.flash_attention(q, manager.batch([second])).numpy()).all()


def test_pages_that_are_kept_for_what_comes_next(rng):
    """What was appended stays where there are no pages for more."""
    manager, sequences, _ = grown(rng, 4, "f32", lengths=(0,), pages=4)
    step = ts.jit(lambda b, k: b.append(k, k))
    prompt, k = ts.ones((1, 2, 6, 32)), ts.ones((1, 2, 1, 32))
    batch = manager.batch(sequences, room=6)
    batch = batch.keep(step(batch, prompt), room=1)
    assert (batch.room, batch.lengths.tolist(), manager.pages_used) == (1, [6], 2)
    batch = batch.keep(step(batch, k), room=0)
    assert (batch.room, batch.lengths.tolist(), manager.pages_used) == (0, [7], 2)
    batch = manager.batch(sequences, room=6)
    with pytest.raises(OutOfMemoryError, match="has 0 free, 1 are needed"):
        batch.keep(step(batch, prompt))
    assert sequences[0].length == 13 and (sequences[0].V.numpy() == 1).all()


def test_what_is_refused(rng):
    manager, sequences, _ = grown(rng, 4, "f32", lengths=(5, 2), pages=4)
    batch = manager.batch(sequences, room=1)
    q, k = ts.zeros((2, 2, 1, 32)), ts.zeros((2, 2, 1, 32))
    step = ts.jit(lambda b, k: b.append(k, k).append(k, k))
    with pytest.raises(ArgumentError, match="room for 0") as e:
        step(batch, k)
    assert e.value.code == "E_OVERFLOW"
    free = manager.pages_free
    with pytest.raises(OutOfMemoryError, match="a pool of 4 pages has 1 free, 2 are needed"):
        manager.batch(sequences, room=4)
    assert manager.pages_free == free
    with pytest.raises(ShapeError, match="the batch has 2 sequences"):
        batch.append(k[:1], k[:1])
    with pytest.raises(ShapeError, match="over 2 sequences of 2 heads of 32"):
        ts.flash_attention(q[:1], batch)
    with pytest.raises(ArgumentError, match="a mask or dropout over a batch"):
        ts.flash_attention(q, batch, mask=ts.ones((1, 1), "bool_"))
    for bad in ([], [sequences[0]] * 2, sequences[0]):
        with pytest.raises(ArgumentError, match="one sequence or more"):
            manager.batch(bad)
    with pytest.raises(ArgumentError, match="of sequences, got a int"):
        manager.batch([1, 2])
    with pytest.raises(ArgumentError, match="attention takes keys and values, got a PagedBatch"):
        ts.attention(q, batch, batch)
    with pytest.raises(ShapeError, match="queries of 2 sequences and keys of 1"):
        ts.flash_attention(q, sequences[0])
    with pytest.raises(ts.TraceError, match="a paged cache is used") as e:
        ts.jit(lambda q: ts.flash_attention(q, manager.batch(sequences)))(q)
    assert "as an argument" in e.value.hint
    with pytest.raises(ArgumentError, match="entries >= 0"):
        manager.batch(sequences, room=-1)
    other = ts.KVCacheManager(heads=2, head_size=32, pages=4).alloc()
    with pytest.raises(ArgumentError, match="of another pool"):
        manager.batch([other])
    with pytest.raises(ArgumentError, match="what appends to this batch"):
        batch.keep(batch)
    grown_ = ts.jit(lambda b, k: b.append(k, k))(batch, k)
    with pytest.raises(ArgumentError, match="what a function was given"):
        grown_.keep(grown_)
    sequences[0].append(k[0], k[0])
    for use in (lambda: batch.keep(grown_), lambda: ts.flash_attention(q, batch)):
        with pytest.raises(ArgumentError, match="have changed since") as e:
            use()
        assert e.value.code == "E_STALE"


# --- on a GPU -----------------------------------------------------------------------------------
@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize("more", [1, 37])
def test_the_pool_grows_in_its_own_memory_outside_of_functions(more, rng, driver):
    """Two launches, of one sequence and of several."""
    with ts.device("cuda"):
        manager, sequences, entries = grown(rng, 16, lengths=(20, 0, 5))
        pointers = manager._K.memory.pointer, manager._V.memory.pointer
        k, v = (ts.tensor(rng.standard_normal((3, 2, more, 32)).astype(np.float32), "bf16")
                for _ in "kv")
        batch = manager.batch(sequences)
        launches = len(driver.launches)
        batch.append(k.to("cuda"), v.to("cuda"))
        assert len(driver.launches) <= launches + 2
        assert pointers == (manager._K.memory.pointer, manager._V.memory.pointer)
        for s, (a, b), x, y in zip(sequences, entries, k.array, v.array, strict=True):
            assert (s.K.numpy()[0] == np.concatenate([a, x], 1)).all()
            assert (s.V.numpy()[0] == np.concatenate([b, y], 1)).all()


@pytest.mark.usefixtures("gpu", "apart")
def test_a_donated_pool_grows_in_its_own_memory(rng, driver):
    with ts.device("cuda"):
        manager = ts.KVCacheManager(heads=2, head_size=32, pages=40, page_size=16, dtype="bf16")
        sequences = [manager.alloc() for _ in range(3)]

        @ts.jit(donate="batch")
        def step(q, k, batch):
            batch = batch.append(k, k)
            return ts.flash_attention(q, batch), batch

        q, k = ts.ones((3, 4, 1, 32), "bf16"), ts.ones((3, 2, 1, 32), "bf16")
        batch = manager.batch(sequences, room=1)
        for _ in range(3):
            y, made = step(q, k, batch)
            batch = batch.keep(made)
        pointers = manager._K.memory.pointer, manager._V.memory.pointer
        before = len(driver.memory)
        y, made = step(q, k, batch)
        batch = batch.keep(made)
        assert pointers == (manager._K.memory.pointer, manager._V.memory.pointer)
        assert all(m is None or len(m) < manager._K.nbytes
                   for m in list(driver.memory.values())[before:])
    assert (y.numpy() == 1).all() and [s.length for s in sequences] == [4] * 3
