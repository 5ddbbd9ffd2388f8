"""Images padded, each row behind the other, and of a stride s dealt into s by s images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from textwrap import indent
from typing import Any

import numpy as np

from . import pool
from .kernel import bind_units, unit_source
from .machine_code import obtain

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
THREADED = 1 << 18  # elements that are worth waking a thread for
LAUNCHES = 512  # that are kept
TABLE = 11  # words in front of those of columns

# A channel at x is dealt to y, by the words at `deal`.
CHANNEL = '''\
height, rows, columns, top = word(deal, 0), word(deal, 1), word(deal, 2), word(deal, 3)
down, across, apart = word(deal, 4), word(deal, 5), word(deal, 6)
for i in range(down):
    for j in range(across):
        part = y + i * word(deal, 8) + j * word(deal, 9)
        first, last, begin = (word(deal, {table} + 3 * j),
            word(deal, {table} + 1 + 3 * j), word(deal, {table} + 2 + 3 * j))
        for q in range(rows):
            to, h = part + q * word(deal, 10), q * down + i - top
            there, stop = x + h * word(deal, 7), last
            if h < 0 or h >= height:
                stop = first
            for p in range(first):
                store_f32_out0(to, p, f32(0.0))
            for p in range(first, stop):
                store_f32_out0(to, p, load_f32(there, {at}))
            for p in range(stop, columns):
                store_f32_out0(to, p, f32(0.0))
'''
DEAL = unit_source('''\
    units, groups, channels = word(layout, 0), word(layout, 1), word(layout, 2)
    deal = layout + 72
''', '''\
        c, g, n = unit % channels, unit // channels % groups, unit // channels // groups
        x = data(call, 3) + n * word(layout, 3) + g * word(layout, 4) + c * word(layout, 5)
        y = data(call, 4) + n * word(layout, 6) + g * word(layout, 7) + c * word(layout, 8)
{channel}''')


@dataclass(frozen=True)
class Dealing:
    """How a channel of images of so many rows and columns is padded and dealt."""

    shape: Ints
    padding: Pairs  # negative ones cut
    stride: Ints

    @property
    def rows(self) -> int:
        return self._extent(0)

    @property
    def columns(self) -> int:
        return self._extent(1)

    def _extent(self, axis: int) -> int:
        return -(-max(1, self.shape[axis] + sum(self.padding[axis])) // self.stride[axis])

    def offsets(self, channels: int, plane: int, rows: Ints, columns: Ints) -> np.ndarray:
        """Bytes to element (c, i, j) of the padded image, for all c, i of `rows` and j of
        `columns`: int64.

        plane: elements from channel to channel, of all images where these lie side by side
        """
        (s, t), i, j = self.stride, np.array(rows, np.int64)[:, None], np.array(columns, np.int64)
        part = (i % s) * t + j % t
        place = (i // s) * self.columns + j // t + part * (plane // (s * t))
        return 4 * (np.arange(channels)[:, None, None] * plane + place).reshape(-1)

    def words(self, x_row: int, apart: int, strides: Ints) -> Ints:
        """The table of CHANNEL. x_row: bytes between rows of x; apart: elements between its columns
        strides: bytes between parts, down and across, and between rows of what is made"""
        s, t = self.stride
        words = [self.shape[0], self.rows, self.columns, self.padding[0][0], s, t, apart, x_row,
                 *strides]
        for j in range(t):
            words += _there(self.shape[1], self.columns, j - self.padding[1][0], t)
        return tuple(words)


def channel_source(runs: bool, depth: int) -> str:
    """CHANNEL, indented. runs: of elements that lie side by side"""
    at = "begin + p - first" if runs else "(begin + (p - first) * across) * apart"
    return indent(CHANNEL.format(table=TABLE, at=at), " " * depth)


def joined(x: np.ndarray, dealing: Dealing, room: int) -> tuple[np.ndarray, int]:
    """x: [N, channels, height, width] dealt as [channels, s, t, N, rows, columns], `room` zeros
    behind; and the elements of a channel."""
    (n, c), (s, t), size = x.shape[:2], dealing.stride, dealing.rows * dealing.columns
    plane = s * t * n * size
    flat = pool.kept("images", c * plane + room)
    flat[c * plane:] = 0
    made = flat[:c * plane].reshape(c, s, t, n, dealing.rows, dealing.columns)
    deal(x[:, None], made.transpose(3, 0, 1, 2, 4, 5)[:, None], dealing)
    return flat, plane


def deal(x: np.ndarray, made: np.ndarray, dealing: Dealing) -> None:
    """x: [N, groups, channels, height, width], of any strides
    made: [N, groups, channels, s, t, rows, columns], with columns side by side"""
    threads = pool.threads_wanted() if made.size >= THREADED else 1
    _launch(dealing, made.shape[:3], x.strides, made.strides, threads)(x, made)


@lru_cache(maxsize=LAUNCHES)
def _launch(dealing: Dealing, lead: Ints, x_strides: Ints, strides: Ints, threads: int
            ) -> Callable[..., None]:
    apart = x_strides[4] // 4
    return bind_units(_function(dealing.stride[1] * apart == 1), prod(lead), (
        *lead[1:], *x_strides[:3], *strides[:3],
        *dealing.words(x_strides[3], apart, strides[3:6])), threads)


@cache
def _function(runs: bool) -> Callable[..., Any]:
    return obtain(DEAL.format(channel=channel_source(runs, 8)))


def _there(n: int, count: int, at: int, step: int) -> Ints:
    """Of places at, at + step ...: the first and the end of those of the first `count` that are in
    0..n-1, and which the first is."""
    first = min(count, max(0, -(at // step)))
    return first, max(first, min(count, (n - 1 - at) // step + 1)), at + first * step


__all__ = ["Dealing", "channel_source", "deal", "joined"]
