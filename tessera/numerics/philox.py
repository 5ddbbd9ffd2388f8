"""Counter-based random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3", SC'11, section 3.3; constants from Random123's philox.h).

Element i of a stream is word i % 4 of philox(counter=(lo(i//4), hi(i//4), 0, 0), key), with i the
global element index. A value therefore depends on the key and its position only: not on the number
of ranks, the order of evaluation, or how a tensor is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError

FACTOR_0, FACTOR_1 = 0xD2511F53, 0xCD9E8D57  # Random123's philox.h
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(FACTOR_0), np.uint64(FACTOR_1)
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio, sqrt(3) - 1
_STEP_0, _STEP_1 = np.uint64(WEYL_0), np.uint64(WEYL_1)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10
_CHUNK = 1 << 14  # counters per pass: the working set stays in a 1 MiB second-level cache

FEW = 8  # counters that Python's integers do in less time than NumPy's arrays

# Word 2 of the counter separates key derivation from the streams, which leave it 0.
FOLD_DOMAIN = 1


def as_key(key: Any) -> np.ndarray:
    """`key` as a uint32 [2] array; an int seed s becomes (lo(s), hi(s))."""
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return np.array([int(key) & 0xFFFFFFFF, (int(key) >> 32) & 0xFFFFFFFF], np.uint32)
    array = np.asarray(key)
    if array.shape != (2,) or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"a random key is a uint32 array of shape (2,) or an int seed; got {key!r}",
            hint="pass a seed such as 0, or derive a key with fold_in(key, data)",
        )
    return array.astype(np.uint32)


def philox4x32(counter: Any, key: Any) -> np.ndarray:
    """Ten rounds of Philox4x32 on each counter.

    counter: [..., 4] uint32   key: [2] uint32   result: [..., 4] uint32
    """
    counter = np.asarray(counter, dtype=np.uint32)
    if counter.ndim == 0 or counter.shape[-1] != 4:
        raise ArgumentError(f"a Philox counter has shape [..., 4]; got {counter.shape}")
    words = counter.reshape(-1, 4).astype(np.uint64)  # [N, 4]
    out = np.empty((len(words), 4), np.uint32)
    key = as_key(key).tolist()
    for start in range(0, len(words), _CHUNK):
        stop = start + _CHUNK
        columns = [words[start:stop, i].copy() for i in range(4)]
        _store(out[start:stop], _rounds(columns, key))
    return out.reshape(counter.shape)


def _rounds(words: Sequence[np.ndarray], key: Any) -> list[np.ndarray]:
    """The ten rounds on four uint64 [N] columns that hold 32-bit values.

    key: two uint32, or columns of them, uint64 [..., 1], of one key for each row of words [..., N]
    """
    c0, c1, c2, c3 = words
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> _HALF) ^ c1
        c0 ^= k0
        c2 = (product_0 >> _HALF) ^ c3
        c2 ^= k1
        c1 = product_1
        c1 &= _LOW
        c3 = product_0
        c3 &= _LOW
        k0, k1 = (k0 + _STEP_0) & _LOW, (k1 + _STEP_1) & _LOW
    return [c0, c1, c2, c3]


def _store(out: np.ndarray, words: Sequence[np.ndarray]) -> None:
    for i, word in enumerate(words):
        out[..., i] = word  # each word is below 2^32


def random_bits(key: Any, n: int, offset: int = 0) -> np.ndarray:
    """Words offset .. offset+n-1 of the key's stream: uint32 [n]."""
    if n < 0 or offset < 0:
        raise ArgumentError(f"random_bits needs n >= 0 and offset >= 0; got n={n} offset={offset}")
    key = as_key(key).tolist()
    first, last = offset // 4, -(-(offset + n) // 4)
    if last - first <= FEW:
        few = [w for i in range(first, last)
               for w in _words((i & 0xFFFFFFFF, i >> 32, 0, 0), tuple(key))]
        return np.array(few[offset - 4 * first:][:n], np.uint32)
    out = np.empty((last - first, 4), np.uint32)
    for start in range(first, last, _CHUNK):
        block = np.arange(start, min(start + _CHUNK, last), dtype=np.uint64)
        _store(out[start - first : start - first + len(block)], _blocks(block, key))
    skip = offset - 4 * first
    return out.reshape(-1)[skip : skip + n]


def _blocks(block: np.ndarray, key: Sequence[int]) -> list[np.ndarray]:
    """The four words of each block number: uint64 [N] -> four uint64 [N]."""
    zero = np.zeros_like(block)
    return _rounds([block & _LOW, block >> _HALF, zero, zero], key)


def random_bits_at(key: Any, index: Any) -> np.ndarray:
    """The stream's words at the given global indices: int64 [...] -> uint32 [...].

    Neighbours that are words of one block share its work, as those of a row do, quickest where all
    words of a block are asked for; others cost four words of work each. `random_bits` is the way
    where all are consecutive.
    """
    index = np.asarray(index)
    if index.dtype.kind not in "iu" or (index.size and int(index.min()) < 0):
        raise ArgumentError(f"indices must be integers >= 0; got {index.dtype}: {index}")
    flat, key = index.reshape(-1).astype(np.uint64), as_key(key).tolist()
    out = np.empty(flat.shape, np.uint32)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        whole = _whole_blocks(part)
        if whole is not None:
            _store(out[start : start + _CHUNK].reshape(-1, 4), _blocks(whole, key))
            continue
        block = part >> np.uint64(2)
        first = np.ones(len(block), bool)  # of its run of equal blocks
        np.not_equal(block[1:], block[:-1], out=first[1:])
        words = np.empty((int(first.sum()), 4), np.uint32)
        _store(words, _blocks(block[first], key))
        column = (part & np.uint64(3)).astype(np.intp)
        out[start : start + _CHUNK] = words[np.cumsum(first) - 1, column]
    return out.reshape(index.shape)


def _whole_blocks(index: np.ndarray) -> np.ndarray | None:
    """The blocks of which these are all words, in order; None of others."""
    if len(index) % 4:
        return None
    words = index.reshape(-1, 4)
    first = words[:, 0]
    if (first & np.uint64(3)).any() or any(
            not np.array_equal(words[:, i], first + np.uint64(i)) for i in (3, 1, 2)):
        return None
    return first >> np.uint64(2)


def random_bits_of_keys(keys: np.ndarray, n: int) -> np.ndarray:
    """Words 0 .. n-1 of the stream of each key: uint32 [N, 2] -> uint32 [N, n]."""
    keys, blocks = keys.astype(np.uint64), -(-n // 4)
    out = np.empty((len(keys), blocks, 4), np.uint32)
    block, zero = np.arange(blocks, dtype=np.uint64), np.uint64(0)
    rows = max(1, _CHUNK // max(blocks, 1))
    for start in range(0, len(keys), rows):
        some = keys[start : start + rows]
        counter = [np.broadcast_to(word, (len(some), blocks))
                   for word in (block & _LOW, block >> _HALF, zero, zero)]
        _store(out[start : start + rows], _rounds(counter, (some[:, :1], some[:, 1:])))
    return out.reshape(len(keys), 4 * blocks)[:, :n]


def fold_in_each(keys: np.ndarray, data: np.ndarray) -> np.ndarray:
    """fold_in of each key and its integer, or of one key and each: uint32 [N, 2] or [1, 2] and
    integers [N] below 2^64 -> uint32 [N, 2]."""
    keys, data = keys.astype(np.uint64), data.astype(np.uint64)
    counter = [data & _LOW, data >> _HALF, np.full_like(data, FOLD_DOMAIN), np.zeros_like(data)]
    words = _rounds(counter, (keys[:, 0], keys[:, 1]))
    return np.stack(words[:2], axis=1).astype(np.uint32)


def fold_in(key: Any, data: int) -> np.ndarray:
    """A new key from `key` and an integer (an op's id, a step, an axis): uint32 [2].

    The first two words of philox((lo(data), hi(data), 1, 0), key); data counts modulo 2^64.
    """
    k0, k1 = as_key(key)
    return np.array(fold_words((int(k0), int(k1)), int(data)), np.uint32)


def fold_words(key: tuple[int, int], data: int) -> tuple[int, int]:
    """fold_in on Python's integers, which are quicker for one key."""
    return _words((data & 0xFFFFFFFF, (data >> 32) & 0xFFFFFFFF, FOLD_DOMAIN, 0), key)[:2]


def _words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds on Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * FACTOR_0, c2 * FACTOR_1
        c0, c1 = (product_1 >> 32) ^ c1 ^ k0, product_1 & 0xFFFFFFFF
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & 0xFFFFFFFF
        k0, k1 = (k0 + WEYL_0) & 0xFFFFFFFF, (k1 + WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(key: Any, n: int, offset: int = 0) -> np.ndarray:
    """f32 [n] in [0, 1): (bits >> 8) * 2^-24, every multiple of 2^-24 equally likely."""
    bits = random_bits(key, n, offset)
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
