"""Views of unfolded images: a matmul reads the pixels of each window where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tessera.dims import Dim
from tessera.lazy_dataclass import dataclass
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.memory import Memory, MemoryBox, strides_of
from tessera.tile.ir.edges import TileEdges
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, describe
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import GlobalTensor, View

Pair = tuple[int, int]


class WindowGeometry(NamedTuple):
    """Of two spatial axes: extents of the window, its steps, what stands before the first pixel,
    and the extents of images and of results."""

    window: Pair
    stride: Pair
    dilation: Pair
    before: Pair
    images: Pair
    results: Pair


PAIRS = WindowGeometry._fields


@dataclass(frozen=True)
class Windows:
    """How images are unfolded (tile.windows).

    steps: elements from row to row of an image, and from pixel to pixel
    """

    channels: int
    geometry: WindowGeometry
    steps: Pair

    @staticmethod
    def of(attr: Mapping[str, Any]) -> Windows:
        steps = attr["images"][1] * attr["channels"], attr["channels"]
        return Windows(attr["channels"], WindowGeometry(*(attr[n] for n in PAIRS)), steps)

    def joined(self, panel: int) -> Windows:
        """With the pixels of a row of a window as the channels of one, where they lie together, no
        window reaches over the side of its image, and panels of so many channels need it."""
        (KH, KW), (SH, SW), (DH, DW), before, (IH, IW), results = self.geometry
        channels, OW = KW * self.channels, results[1]
        if self.channels % panel == 0 or channels % panel or DW > 1 or before[1] or (
                (OW - 1) * SW + KW > IW):
            return self
        rows = WindowGeometry((KH, 1), (SH, 1), (DH, 1), (before[0], 0), (IH, OW), results)
        return Windows(channels, rows, (self.steps[0], SW * self.steps[1]))

    @property
    def numbers(self) -> tuple:
        """Channels, the pairs of the geometry in their order, and steps."""
        return self.channels, *self.geometry, self.steps

    @property
    def corners(self) -> tuple[Pair, Pair]:
        """Of the box in which windows begin: its first pixel, and its last counted from the
        image's."""
        g = self.geometry
        first = -g.before[0], -g.before[1]
        last = tuple(b + s * (n - 1) - (i - 1) for b, s, n, i in zip(
            first, g.stride, g.results, g.images, strict=True))
        return first, last  # type: ignore[return-value]

    @property
    def copied(self) -> tuple[tuple[int, ...], ...]:
        """What a descriptor knows of it: extents of an image, first, last, stride, steps."""
        g = self.geometry
        return ((*g.images, self.channels), *self.corners, g.stride, self.steps)

    @property
    def reach(self) -> int:
        """Of the corners, in pixels."""
        return max(abs(n) for corner in self.corners for n in corner)

    @property
    def offset(self) -> int:
        """Of the last pixel of a window."""
        g = self.geometry
        return max(d * (k - 1) for d, k in zip(g.dilation, g.window, strict=True))


@dataclass(frozen=True)
class WindowBox:
    """Rows and columns of the unfolded matrix of a memory [pixels, channels]. place, column: the
    first of each, [1|G, 1].   geometry: by the names of PAIRS"""

    memory: Memory
    place: Any
    column: Any
    shape: tuple[int, int]
    geometry: dict[str, tuple[int, int]]

    def addresses(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([G, rows, columns] addresses clipped into the memory, whether inside)."""
        (rows, columns), (pixels, channels) = self.shape, self.memory.shape
        (OH, OW), (IH, IW) = self.geometry["results"], self.geometry["images"]
        place = np.asarray(self.place, np.int64).reshape(-1, 1, 1) + np.arange(rows)[:, None]
        column = np.asarray(self.column, np.int64).reshape(-1, 1, 1) + np.arange(columns)
        tap, (KH, KW) = column // channels, self.geometry["window"]
        (SH, SW), (DH, DW), (BH, BW) = (self.geometry[n] for n in ("stride", "dilation", "before"))
        h = place // OW % OH * SH - BH + tap // KW * DH
        w = place % OW * SW - BW + tap % KW * DW
        at = (place // (OH * OW) * IH + h) * IW + w
        inside = (h >= 0) & (h < IH) & (w >= 0) & (w < IW) & (place >= 0) & (at < pixels)
        inside = inside & (column >= 0) & (tap < KH * KW)
        address = np.clip(at, 0, max(pixels - 1, 0)) * channels + column % channels
        full = (len(groups), rows, columns)
        return np.broadcast_to(address, full), np.broadcast_to(inside, full)


def _rule(types: Any, attrs: Any) -> View:
    x = types[0]
    if not isinstance(x, GlobalTensor) or len(x.dims) != 2:
        raise RuleError(f"windows of {x}: they are taken of a tensor of pixels and channels",
                        "images [N, H, W, C] as [N H W, C]")
    return View(x.numeric, (attrs["rows"], attrs["columns"]))


def _lower(t: OpTracer, x: Any, place: Any, column: Any, geometry: Any, rows: Any,
           columns: Any) -> Handle:
    if not isinstance(x, Handle) or not isinstance(x.type, GlobalTensor) or t.memory.rank(x) != 2:
        t.fail(f"windows of {describe(x)}: they are taken of a tensor of pixels and channels",
               "images [N, H, W, C] as [N H W, C]")
    rows, columns = t.ir.constant_int(rows, "rows"), t.ir.constant_int(columns, "columns")
    pairs = {name: tuple(getattr(geometry, name)) for name in PAIRS}
    for at in (place, column):
        t.memory.require_index(at)
        if not t.ir.is_uniform(at):
            t.fail("windows at a place that depends on the lane", "a view belongs to the group")
    channels = t.ir.constant_int(t.memory.extent(x, 1), "the number of channels")
    images = t.ir.arithmetic("floordiv", (t.memory.extent(x, 0), prod(pairs["images"])))
    places = t.ir.arithmetic("mul", (images, prod(pairs["results"])))
    made = t.ir.emit("windows", [x, place, column], t.ir.hint(x), rows=rows, columns=columns,
                     channels=channels, **pairs)
    edges = (t.memory.edge_of(place, rows, places),
             t.memory.edge_of(column, columns, prod(pairs["window"]) * channels))
    t.facts.state(made.value, TileEdges.of(edges))
    return made


@declare(rule=_rule, attrs=("rows", "columns", "channels", *PAIRS), run=True, lower=_lower,
         alias=True, part=True)
def windows(m: Any, op: Any, x: Any, place: Any, column: Any, rows: Any = 1, columns: Any = 1,
            channels: Any = 1, window: Any = (1, 1), stride: Any = (1, 1), dilation: Any = (1, 1),
            before: Any = (0, 0), images: Any = (1, 1), results: Any = (1, 1)) -> Any:
    """A view of `rows` rows and `columns` columns of the matrix of unfolded images, from `place`
    and `column` on; a matmul of it is a convolution, and nothing is unfolded in memory.

    x: images [N H W, C].   geometry: has window, stride, dilation, before, images, results, a pair
    for the two axes of an image each: before is what stands before the first pixel, images and
    results are extents.
    A row is a place of the results, [N, OH, OW] in order; a column a pixel of its window and one of
    its channels, [KH, KW, C] in order: x[n, oh stride - before + kh dilation, ..., c], and 0
    outside of the image. What is stored to windows that do not overlap goes to their pixels.
    """
    attr = op.attr
    return WindowBox(x.memory, place, column, (attr["rows"], attr["columns"]),
                     {name: attr[name] for name in PAIRS})


def _flat_rule(types: Any, attrs: Any) -> GlobalTensor:
    (t,) = types
    if not isinstance(t, GlobalTensor):
        raise RuleError(f"flattened of {t}")
    return GlobalTensor(t.numeric, (Dim.of(t.dims[0]) * attrs["columns"],))


@declare(rule=_flat_rule, attrs=("columns",), run=True, public=False, alias=True)
def flattened(m: Any, op: Any, x: Any, columns: int = 1) -> Any:
    """The elements of a matrix in one row. columns: its last extent."""
    memory = copy(x.memory)
    memory.shape = (prod(memory.shape),)
    memory.strides = strides_of(memory.shape)
    return MemoryBox.whole(memory)


__all__ = ["PAIRS", "WindowBox", "Windows"]
