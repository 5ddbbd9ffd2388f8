"""Images padded, each row behind the other, and of a stride s dealt into s by s images."""

from __future__ import annotations

from textwrap import indent

import numpy as np

from ...lazy_dataclass import dataclass

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
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


@dataclass(frozen=True)
class PhaseSplit:
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
            words += _inside_image(self.shape[1], self.columns, j - self.padding[1][0], t)
        return tuple(words)


def channel_source(runs: bool, depth: int) -> str:
    """CHANNEL, indented. runs: of elements that lie side by side"""
    at = "begin + p - first" if runs else "(begin + (p - first) * across) * apart"
    return indent(CHANNEL.format(table=TABLE, at=at), " " * depth)


def _inside_image(n: int, count: int, at: int, step: int) -> Ints:
    """Of places at, at + step ...: the first and the end of those of the first `count` that are in
    0..n-1, and which the first is."""
    first = min(count, max(0, -(at // step)))
    return first, max(first, min(count, (n - 1 - at) // step + 1)), at + first * step


__all__ = ["PhaseSplit", "channel_source"]
