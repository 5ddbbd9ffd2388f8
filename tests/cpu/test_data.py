"""Byte corpora: batches follow from seed and step, the split is clean, bad files are named."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tessera as ts
from tessera.data import LEAST_BYTES, ByteCorpus, from_file, python_library


def make_corpus(rng: np.random.Generator, size: int = 20_000) -> ByteCorpus:
    return ByteCorpus("text", rng.integers(0, 256, size, np.uint8),
                      rng.integers(0, 256, LEAST_BYTES, np.uint8))


def test_targets_are_the_bytes_after_the_tokens(rng):
    corpus = make_corpus(rng)
    tokens, targets = corpus.batch(3, B=5, T=17)
    assert tokens.shape == targets.shape == (5, 17) and tokens.dtype == np.int64
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    text = corpus.train.tobytes()
    for row, last in zip(tokens, targets[:, -1], strict=True):
        assert bytes([*row, last]) in text


def test_a_batch_is_a_function_of_seed_and_step(rng):
    corpus = make_corpus(rng)
    first = corpus.batch(7, B=4, T=8, seed=1)[0]
    corpus.batch(8, B=4, T=8, seed=1)
    assert (corpus.batch(7, B=4, T=8, seed=1)[0] == first).all()
    for other in ({"step": 8, "seed": 1}, {"step": 7, "seed": 2}, {"step": 7, "seed": 1 + 2**32}):
        assert (corpus.batch(other["step"], B=4, T=8, seed=other["seed"])[0] != first).any()


def test_ranks_read_rows_of_one_batch(rng):
    corpus = make_corpus(rng)
    whole = corpus.batch(7, B=5, T=8, seed=1)
    for rows in (slice(1, 3), np.array([4, 0]), np.array([], np.int64)):
        for x, y in zip(corpus.batch(7, B=5, T=8, seed=1, rows=rows), whole, strict=True):
            assert x.shape[1] == 8 and (x == y[rows]).all()


def test_windows_reach_the_first_and_the_last_byte(rng):
    corpus = ByteCorpus("text", np.zeros(LEAST_BYTES, np.uint8), np.zeros(LEAST_BYTES, np.uint8))
    marked = corpus.train.copy()
    marked[0], marked[-1] = 1, 2
    corpus = ByteCorpus("text", marked, corpus.held_out)
    T = LEAST_BYTES - 3  # three places to start
    tokens, targets = corpus.batch(0, B=64, T=T)
    assert set(tokens[:, 0]) == {0, 1} and set(targets[:, -1]) == {0, 2}


def test_held_out_windows_are_the_same_each_time_and_cover_the_text(rng):
    corpus = ByteCorpus("text", np.zeros(LEAST_BYTES, np.uint8),
                        np.arange(LEAST_BYTES).astype(np.uint8))
    first = list(corpus.held_out_batches(3, B=4, T=16))
    again = list(corpus.held_out_batches(3, B=4, T=16))
    assert len(first) == 3
    for (a, b), (c, d) in zip(first, again, strict=True):
        assert (a == c).all() and (b == d).all() and (a[:, 1:] == b[:, :-1]).all()
    assert first[0][0][0, 0] == 0 and first[-1][1][-1, -1] == corpus.held_out[-1]


def test_windows_longer_than_the_text_are_refused(rng):
    corpus = make_corpus(rng)
    for T in (0, 20_000):
        with pytest.raises(ts.ArgumentError, match=f"T = {T} do not fit the 20000 bytes of train"):
            corpus.batch(0, B=1, T=T)
    for check in (lambda: list(corpus.held_out_batches(1, B=1, T=LEAST_BYTES)),
                  lambda: corpus.require_window(LEAST_BYTES)):
        with pytest.raises(ts.ArgumentError, match="bytes of held_out"):
            check()
    corpus.require_window(LEAST_BYTES - 1)


def test_a_file_is_split_at_its_end(tmp_path, rng):
    text = rng.integers(0, 256, 100_000, np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(text)
    corpus = from_file(tmp_path / "a.txt", held_out=0.1)
    assert corpus.train.tobytes() == text[:90_000] and corpus.held_out.tobytes() == text[90_000:]
    assert corpus.name == "a.txt"
    assert from_file(tmp_path / "a.txt").held_out.size == 5_000
    with pytest.raises(ts.ArgumentError, match="fraction"):
        from_file(tmp_path / "a.txt", held_out=1.0)


def test_digests_tell_texts_and_splits_apart(rng):
    text = rng.integers(0, 256, 4 * LEAST_BYTES, np.uint8)
    cuts = [ByteCorpus("t", text[:n], text[n:]) for n in (LEAST_BYTES, 2 * LEAST_BYTES)]
    assert cuts[0].sha256 == ByteCorpus("u", text[:LEAST_BYTES], text[LEAST_BYTES:]).sha256
    assert cuts[0].sha256 != cuts[1].sha256


def test_files_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 1000)
    (tmp_path / "locked").write_bytes(b"x" * 1000)
    (tmp_path / "locked").chmod(0)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for name, words in (("none", "No such file"), ("empty", "is empty"), (".", "Is a directory"),
                        ("pipe", "no regular file"), ("/dev/zero", "no regular file"),
                        ("short", "950 bytes are left for train use")):
        with pytest.raises(ts.DataError, match=words) as caught:
            from_file(tmp_path / name)
        assert caught.value.hint
    if os.geteuid():  # root reads everything
        with pytest.raises(ts.DataError, match="Permission denied"):
            from_file(tmp_path / "locked")


def test_a_seed_counts_modulo_2_to_the_64(rng):
    corpus = ByteCorpus("t", *np.split(rng.integers(0, 256, 4 * LEAST_BYTES, np.uint8), 2))
    a, b, c = (corpus.batch(3, B=2, T=8, seed=s)[0] for s in (-1, 2**64 - 1, 2**70 + 5))
    assert (a == b).all() and (c == corpus.batch(3, B=2, T=8, seed=5)[0]).all()
    assert (a != c).any()


def make_library(root, files: int, size: int) -> None:
    for i in range(files):
        folder = root / f"package{i % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"m{i}.py").write_bytes(b"%05d" % i * (size // 5))


def test_the_library_is_split_by_file_in_a_fixed_order(tmp_path):
    make_library(tmp_path, files=100, size=5_000)
    for skipped in ("site-packages", "test", "__pycache__"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "m.py").write_bytes(b"?" * 5_000)
    (tmp_path / "notes.txt").write_bytes(b"?" * 5_000)
    corpus = python_library(tmp_path)
    assert corpus.train.size == 95 * 5_000 and corpus.held_out.size == 5 * 5_000
    names = [{bytes(part[i:i + 5]) for i in range(0, part.size, 5)}
             for part in (corpus.train, corpus.held_out)]
    assert len(names[0]) == 95 and len(names[1]) == 5 and not names[0] & names[1]
    assert python_library(tmp_path).sha256 == corpus.sha256
    half = python_library(tmp_path, limit_bytes=250_000)
    assert half.train.size + half.held_out.size == 250_000
    assert corpus.train.tobytes().startswith(half.train.tobytes())


def test_a_library_without_source_is_an_error(tmp_path):
    with pytest.raises(ts.DataError, match="holds 0 bytes of Python source") as caught:
        python_library(tmp_path)
    assert "--data" in caught.value.hint
    make_library(tmp_path, files=2, size=500)
    with pytest.raises(ts.DataError, match="holds 1000 bytes"):
        python_library(tmp_path)


def test_this_machines_library_is_python():
    corpus = python_library()
    assert corpus.train.size > 1_000_000
    assert b"import " in corpus.train.tobytes() and b"def " in corpus.held_out.tobytes()
