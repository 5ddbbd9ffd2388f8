"""The gradient of the largest elements of windows in a compiled loop, without windows in memory.

A thread takes whole images. Windows are met from the last one on, so that an element's terms are
added in the order of their places in the windows, as `fold` adds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from . import pool
from .kernel import bind_units, unit_source
from .machine_code import obtain

LEAST = 1 << 14  # elements that are worth machine code, whose first use of all takes a second
PARTED = 1 << 16  # elements that are worth waking a thread for
LAUNCHES = 512  # that are kept
AXES = 2
UNROLLED = 36  # elements of a window that lies inside of the image, which are kept in registers
NAMES = ("H", "W", "PH", "PW", "KH", "KW", "SH", "SW", "DH", "DW", "BH", "BW")
Ints = tuple[int, ...]
SOURCE = unit_source('''\
    """gradient of largest elements, {t}"""
    units = word(layout, 0)
''' + "".join(f"    {name} = word(layout, {i + 1})\n" for i, name in enumerate(NAMES)), '''\
        x = data(call, 3) + unit * H * W * {size}
        g = data(call, 4) + unit * PH * PW * {size}
        y = data(call, 5) + unit * H * W * {size}
        for p in range({cleared}):
            store_{t}_out0(y, p, {t}(0.0))
        for row in range(PH):
            a = (PH - 1 - row) * SH - BH
            i0, i1 = 0, KH
            while i0 < KH and a + i0 * DH < 0:
                i0 += 1
            while i1 > i0 and a + (i1 - 1) * DH >= H:
                i1 -= 1
            for column in range(PW):
                b = (PW - 1 - column) * SW - BW
                at_g = (PH - 1 - row) * PW + PW - 1 - column
                cotangent = load_{t}(g, at_g)
                if {unrolled} and i1 - i0 == KH and b >= 0 and b + (KW - 1) * DW < W:
                    first = a * W + b
{inside}                    continue
                j0, j1 = 0, KW
                while j0 < KW and b + j0 * DW < 0:
                    j0 += 1
                while j1 > j0 and b + (j1 - 1) * DW >= W:
                    j1 -= 1
                top = {t}(-inf)
                for i in range(i0, i1):
                    at = (a + i * DH) * W + b
                    for j in range(j0, j1):
                        top = maximum_{t}(top, load_{t}(x, at + j * DW))
                ties = where_i64(top == {t}(-inf), KH * KW - (i1 - i0) * (j1 - j0), 0)
                for i in range(i0, i1):
                    at = (a + i * DH) * W + b
                    for j in range(j0, j1):
                        ties += where_i64(load_{t}(x, at + j * DW) == top, 1, 0)
                count = {t}(ties)
                for i in range(i0, i1):
                    at = (a + i * DH) * W + b
                    for j in range(j0, j1):
                        to = at + j * DW
                        store_{t}_out0(y, to, load_{t}_out0(y, to) + where_{t}(
                            load_{t}(x, to) == top, cotangent / count, {t}(0.0) / count))
''')


def _inside(t: str, count: Ints, apart: bool) -> str:
    """Of a window whose elements all lie in the image.  apart: they lie in no other one"""
    if prod(count) > UNROLLED:
        return ""
    places = list(itertools.product(*map(range, count)))
    names = [f"v{i}_{j}" for i, j in places]
    lines = [f"at{i}_{j} = first + {i} * DH * W + {j} * DW" for i, j in places]
    lines += [f"v{i}_{j} = load_{t}(x, at{i}_{j})" for i, j in places]
    lines += [f"top = {names[0]}", *(f"top = maximum_{t}(top, {v})" for v in names[1:])]
    ties = " + ".join(f"where_{t}({v} == top, {t}(1.0), {t}(0.0))" for v in names)
    lines += [f"count = {ties}", "share = cotangent / count",
              f"none = where_{t}(count > {t}(0.0), {t}(0.0), {t}(nan))"]
    for i, j in places:
        term = f"where_{t}(v{i}_{j} == top, share, none)"
        before = "" if apart else f"load_{t}_out0(y, at{i}_{j}) + "
        lines.append(f"store_{t}_out0(y, at{i}_{j}, {before}{term})")
    return "".join(f"{' ' * 20}{line}\n" for line in lines)


def takes(x: np.ndarray, window: Ints) -> bool:
    """Whether images are worth the loop."""
    return len(window) <= AXES and x.size >= LEAST and x.dtype in (np.float32, np.float64)


def max_gradient(g: np.ndarray, x: np.ndarray, out: np.ndarray, window: Ints, stride: Ints,
                 dilation: Ints, before: Ints) -> None:
    """out: contiguous."""
    rank = len(window)
    each = (x.shape[-rank:], g.shape[-rank:], window, stride, dilation, before)
    words = tuple(n for of, one in zip(each, (1, 1, 1, 1, 1, 0), strict=True)
                  for n in (*(one,) * (AXES - rank), *of))
    units = x.size // (words[0] * words[1])
    threads = pool.threads_wanted() if x.size >= PARTED else 1
    _launch("f32" if x.itemsize == 4 else "f64", units, words, threads)(
        np.ascontiguousarray(x), np.ascontiguousarray(g), out)


@lru_cache(maxsize=LAUNCHES)
def _launch(t: str, units: int, words: Ints, threads: int) -> Callable[..., None]:
    extents, places, count, stride, dilation, before = (
        words[i:i + AXES] for i in range(0, len(words), AXES))
    apart = all(s > d * (k - 1) for s, k, d in zip(stride, count, dilation, strict=True))
    covered = stride == count and before == (0, 0) and extents == tuple(
        n * k for n, k in zip(places, count, strict=True))
    return bind_units(_function(t, count, apart, covered), units, words, threads)


@cache
def _function(t: str, count: Ints, apart: bool, covered: bool) -> Any:
    """covered: each element is in a window"""
    inside = _inside(t, count, apart)
    return obtain(SOURCE.format(t=t, size=4 if t == "f32" else 8, inside=inside,
                                cleared=0 if covered else "H * W", unrolled=bool(inside)))


__all__ = ["max_gradient", "takes"]
