"""Rows combined by integers in a compiled loop: out[a, ids[i]] = out[a, ids[i]] + rows[a, i], in
order of i.

A thread takes some of the a, or some of the columns of all rows, so the order of terms, and with it
every bit, is that of one thread. Of rows of one element the a are the columns: those of a unit are
added side by side, where each addition alone would wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from . import pool
from .kernel import bind_units, unit_source
from .machine_code import obtain

LEAST = 1 << 14  # elements that are worth machine code, whose first use of all takes a second
COLUMNS = 32  # of a thread, at least
PARTED = 1 << 17  # elements that are worth waking a thread for
LAUNCHES = 512  # that are kept
COMBINE = {"sum": "{here} + {there}", "max": "maximum_{t}({here}, {there})",
           "min": "minimum_{t}({here}, {there})"}
SOURCE = unit_source('''\
    """{way} of {t}"""
    units, count, width, parts = (
        word(layout, 0), word(layout, 1), word(layout, 2), word(layout, 3))
    apart, apart_out, apart_sums = word(layout, 10), word(layout, 11), word(layout, 12)
''', '''\
        a, part = unit // parts, unit % parts
        first, last = part * width // parts, (part + 1) * width // parts
        ids, slots = data(call, 3), data(call, 6)
        x = data(call, 4) + a * word(layout, 4)
        y = data(call, 5) + a * word(layout, 5)
        sums = data(call, 7) + a * word(layout, 6)
        for i in range(count):
            row = load_int64(ids, i)
            slot = load_int64(slots, row)
            there = x + i * word(layout, 7)
            if slot < 0:
                here = y + row * word(layout, 8)
                for j in range(first, last):
                    store_{t}_out0(here, {to}, {combined})
            else:
                here = sums + slot * word(layout, 9)
                for j in range(first, last):
                    store_f64_out1(here, {total}, load_f64_out1(here, {total}) + {wide})
''')


def takes(out: np.ndarray, rows: np.ndarray) -> bool:
    """Whether these rows are worth the loop. out: [A, n, D]   rows: [A, T, D]"""
    worth = rows.size >= LEAST and rows.shape[0] * rows.shape[2] > 1
    return worth and out.dtype == rows.dtype and out.dtype in (np.float32, np.float64) and (
        out.flags.c_contiguous)


def combine(way: str, out: np.ndarray, ids: np.ndarray, rows: np.ndarray, slots: np.ndarray,
            sums: np.ndarray) -> None:
    """Of a target with a slot the sum goes there, in f64, and `out` stays as it is.

    out: [A, n, D]   ids: [T], in 0..n-1   rows: [A, T, D]
    slots: [n] int64, -1 for none   sums: [A, slots, D] f64, of way "sum" alone
    """
    ids, (A, T, D) = np.ascontiguousarray(ids, np.int64), rows.shape
    if D > 1 and rows.strides[2] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    threads = pool.threads_wanted() if rows.size >= PARTED else 1
    if alone := D == 1:
        rows, out, sums = rows.transpose(2, 1, 0), out.transpose(2, 1, 0), sums.transpose(2, 1, 0)
        parts = max(1, A // COLUMNS)
    else:
        parts = max(1, min(threads, D // COLUMNS)) if A < threads else 1
    arrays, size = (rows, out, sums), rows.itemsize
    words = (T, rows.shape[2], parts, *(a.strides[0] for a in arrays),
             *(a.strides[1] for a in arrays), *(a.strides[2] // a.itemsize for a in arrays))
    _launch(way, "f32" if size == 4 else "f64", alone, len(rows) * parts, words, threads)(
        ids, rows, out, slots, sums)


@lru_cache(maxsize=LAUNCHES)
def _launch(way: str, t: str, alone: bool, units: int, words: tuple[int, ...], threads: int
            ) -> Callable[..., None]:
    return bind_units(_function(way, t, alone), units, words, threads)


@cache
def _function(way: str, t: str, alone: bool) -> Any:
    """alone: columns lie apart"""
    at, to, total = ("j * apart", "j * apart_out", "j * apart_sums") if alone else "jjj"
    here, there = f"load_{t}_out0(here, {to})", f"load_{t}(there, {at})"
    return obtain(SOURCE.format(
        way=way, t=t, to=to, total=total,
        combined=COMBINE[way].format(t=t, here=here, there=there),
        wide=there if t == "f64" else f"f64_from_f32({there})"))


__all__ = ["combine", "takes"]
