"""Matrix products over our own threads, BLAS on one.

A BLAS that runs its own threads spins while it waits for them: on a machine with other work to do
that costs an order of magnitude (2 cores of AMD EPYC under a load of 3.5, 2026-11-21, `python
examples/train.py`: 13,700 tokens/s with one BLAS thread, with two at most one step in 12 s; under a
load of 8, 2026-11-26, a step of the GRU of benchmarks/cpu_models.py takes 25 ms of CPU time with
one, 500 with two where its products are small). Here a large product is cut into pieces that
threads claim, so a thread that is not scheduled delays only the piece it holds. The pieces depend
on the shapes alone: results are the same for any number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...runtime.blas_threads import single_thread
from . import pool

PIECES = 4
SPLIT_FLOPS = 1 << 22
THREADED_FLOPS = 1 << 20  # from twice as many on OpenBLAS would use threads of its own
DEPTH = 4096  # products of f32 that BLAS adds one after another, at most
BLOCKS = 128  # sums of DEPTH products that are added in f32; more of them in f64

Product = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Product:
    """A function computing out = a @ b for arrays of these shapes and strides."""
    cuts = _cuts(a, b, out)
    if len(cuts) < 2:
        return blocked_matmul

    def split(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        pieces = [
            (a[ca] if ca is not None else a, b[cb] if cb is not None else b, out[co])
            for ca, cb, co in cuts
        ]
        run_pieces(pieces, pool.threads_wanted())

    return split


def blocked_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a @ b, a long contraction in blocks: BLAS's own error grows with the whole length (f32,
    2 x 10^7 equal terms, a vector by a matrix of 4 columns: 1.5 %)."""
    K = a.shape[-1]
    if K <= DEPTH or out.dtype != np.float32:
        np.matmul(a, b, out=out)
        return
    total = out if K <= DEPTH * BLOCKS else np.empty(out.shape, np.float64)
    part = np.empty_like(out)
    for k in range(0, K, DEPTH):
        np.matmul(a[..., k:k + DEPTH], b[..., k:k + DEPTH, :], out=part)
        np.add(total, part, out=total) if k else np.copyto(total, part)
    if total is not out:
        np.copyto(out, total, casting="same_kind")


def multiply(a: np.ndarray, b: np.ndarray) -> Any:
    """a @ b of matrices in one type, large ones over our threads. [..., M, K] x [..., K, N]"""
    if a.shape[-1] == b.shape[-2] == 1 and a.ndim > 1:
        return np.multiply(a, b)  # BLAS takes twice the time for one product an element
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*lead, a.shape[-2], b.shape[-1]), a.dtype)
    if not is_threaded(a, out):
        blocked_matmul(a, b, out)
        return out
    with single_thread:
        product(a, b, out)(a, b, out)
    return out


def is_threaded(a: np.ndarray, out: np.ndarray) -> bool:
    """Whether BLAS could use threads of its own for out = a @ b."""
    return 2 * out.size * a.shape[-1] >= THREADED_FLOPS


def _cuts(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[tuple]:
    """Indices into a, b and out of each piece: of the first batch axis, the rows or the columns."""
    if 2 * out.size * a.shape[-1] < SPLIT_FLOPS:
        return []
    if out.ndim > 2:
        n = out.shape[0]
        parts = _split_extent(n, min(n, PIECES), 1)
        return [(_lead(a, out, s), _lead(b, out, s), s) for s in parts]
    rows, columns = out.shape
    if rows >= columns:
        return [(s, None, s) for s in _split_extent(rows, PIECES, 16)]
    every = slice(None)
    return [(None, (every, s), (every, s)) for s in _split_extent(columns, PIECES, 16)]


def _lead(x: np.ndarray, out: np.ndarray, part: slice) -> slice | None:
    """The same part of an operand, None when it is stretched along the first batch axis."""
    return part if x.ndim == out.ndim and x.shape[0] == out.shape[0] else None


def _split_extent(extent: int, count: int, multiple: int) -> list[slice]:
    step = -(-extent // count)
    step = -(-step // multiple) * multiple
    return [slice(i, min(i + step, extent)) for i in range(0, extent, step)]


def run_pieces(pieces: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], threads: int) -> None:
    """The product of every piece; workers claim pieces beside this thread, from the last one back:
    as those of loops do (shared_launch.py)."""
    left = deque(pieces)
    finished = threading.Semaphore(0)

    def work(claim: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        while True:
            try:
                piece = claim()
            except IndexError:  # none is left
                break
            blocked_matmul(*piece)
            finished.release()

    if threads > 1:
        for worker in pool.POOL.helpers(min(threads, len(pieces)) - 1):
            worker.put(partial(work, left.pop))
    work(left.popleft)
    for _ in pieces:
        finished.acquire()
