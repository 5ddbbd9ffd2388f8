"""Rows combined by integers in a compiled loop: out[ids[i]] = out[ids[i]] + rows[i], in order of i.

A thread takes some of the columns of all rows, so the order of terms, and with it every bit, is
that of one thread.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from . import pool
from .kernel import obtain

LEAST = 1 << 14  # elements that are worth machine code, whose first use of all takes a second
COLUMNS = 32  # of a thread, at least
PARTED = 1 << 20  # elements that are worth waking a thread for
COMBINE = {"sum": "{here} + {there}", "max": "maximum_{t}({here}, {there})",
           "min": "minimum_{t}({here}, {there})"}
SOURCE = '''\
def loops(layout, call, scratch):
    """{way} of {t}"""
    rows, width, parts, pitch = (
        word(layout, 0), word(layout, 1), word(layout, 2), word(layout, 3))
    while True:
        part = claim(call, 0)
        if part >= parts:
            break
        first, last = part * width // parts, (part + 1) * width // parts
        ids, x, y = data(call, 3), data(call, 4), data(call, 5)
        slots, sums = data(call, 6), data(call, 7)
        for i in range(rows):
            row = load_int64(ids, i)
            slot = load_int64(slots, row)
            if slot < 0:
                there, here = x + i * pitch, y + row * width * {bytes}
                for j in range(first, last):
                    store_{t}_out0(here, j, {combined})
            else:
                there, here = x + i * pitch, sums + slot * width * 8
                for j in range(first, last):
                    store_f64_out1(here, j, load_f64_out1(here, j) + {wide})
        if claim(call, 1) == parts - 1:
            claim(call, 2)
    while pending(call, 2):
        pass
'''


def takes(out: np.ndarray, rows: np.ndarray) -> bool:
    """Whether these rows are worth the loop."""
    return rows.size >= LEAST and rows.shape[1] > 1 and out.dtype == rows.dtype and (
        out.dtype in (np.float32, np.float64)) and out.flags.c_contiguous and out.flags.aligned


def combine(way: str, out: np.ndarray, ids: np.ndarray, rows: np.ndarray, slots: np.ndarray,
            sums: np.ndarray) -> None:
    """Of a target with a slot the sum goes there, in f64, and `out` stays as it is.

    out: [n, D]   ids: [T], in 0..n-1   rows: [T, D]
    slots: [n] int64, -1 for none   sums: [slots, D] f64, of way "sum" alone
    """
    ids, (T, D) = np.ascontiguousarray(ids, np.int64), rows.shape
    if rows.strides[1] != rows.itemsize or not rows.flags.aligned:
        rows = np.ascontiguousarray(rows)
    threads = min(pool.threads_wanted(), D // COLUMNS) if rows.size >= PARTED else 1
    parts = max(1, threads)
    function = _function(way, "f32" if out.dtype == np.float32 else "f64")
    layout, slot = np.array([T, D, parts, rows.strides[0]], np.int64), np.zeros(1, np.int64)
    # The first three words, which the threads share: the next part, parts that are done, finished.
    call = struct.pack("8q", 0, 0, 0, *map(id, (ids, rows, out, slots, sums)))
    table, dummy = layout.ctypes.data, slot.ctypes.data

    def job(keep: Any = (layout, slot)) -> None:
        function(dummy, dummy, table, call, 0)

    for queue in pool.POOL.helpers(parts - 1):
        queue.put(job)
    job()


@cache
def _function(way: str, t: str) -> Any:
    here, there = f"load_{t}_out0(here, j)", f"load_{t}(there, j)"
    return obtain(SOURCE.format(
        way=way, t=t, bytes=4 if t == "f32" else 8,
        combined=COMBINE[way].format(t=t, here=here, there=there),
        wide=there if t == "f64" else f"f64_from_f32({there})"))


__all__ = ["combine", "takes"]
