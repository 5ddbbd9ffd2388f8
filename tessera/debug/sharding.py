"""A picture of a layout: which ranks hold which part of a tensor, as text, HTML and SVG.

    print(ts.debug.show_sharding(ShardSpec(("row",), ("dp",)), (8, 4), mesh))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import Any

from ..dims import show_shape
from ..errors import ArgumentError
from ..lazy_dataclass import dataclass
from ..mesh.device_mesh import Mesh, current_mesh
from ..mesh.layout import Layout
from ..mesh.partition import group_of, intervals, local_shape
from ..numerics import DType, as_type

CELL, LINE = 8, 26  # pixels of a letter, with its space, and of a row of the SVG
MOST = 16  # rows and columns of one grid; further ones are counted
Cut = tuple[int, int, int]  # lo, hi, number of the part


@dataclass(frozen=True)
class Grid:
    """One table of the picture: headings, and in each cell the ranks that hold the box."""

    title: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Picture:
    """A layout of one tensor: print it, or show it in a notebook; `.html()` is the page's part,
    `.svg()` a file.

    A cell names the ranks that hold it: "0, 1" hold the same, "0 + 1" hold terms of a sum.
    """

    head: str
    grids: tuple[Grid, ...]
    between: str
    notes: tuple[str, ...]

    def _cell(self, ranks: tuple[int, ...]) -> str:
        return self.between.join(_runs(ranks)) if self.between == ", " else \
            self.between.join(map(str, ranks))

    def __str__(self) -> str:
        lines = [self.head]
        for grid in self.grids:
            lines += [grid.title] if grid.title else []
            lines += _table(grid, self._cell)
        return "\n".join([*lines, *self.notes])

    def html(self) -> str:
        """The picture as an HTML fragment without scripts; each holder has its own colour."""
        parts = [f"<p>{escape(self.head)}</p>"]
        for grid in self.grids:
            head = "".join(f"<th>{escape(c)}</th>" for c in grid.columns)
            body = "".join(
                f"<tr><th>{escape(row)}</th>" + "".join(
                    f'<td style="background:{_colour(ranks)};padding:4px 10px">'
                    f"{escape(self._cell(ranks))}</td>" for ranks in cells) + "</tr>"
                for row, cells in zip(grid.rows, grid.cells, strict=True))
            title = f"<caption>{escape(grid.title)}</caption>" if grid.title else ""
            parts.append(f'<table style="border-collapse:collapse;font-family:monospace">{title}'
                         f"<tr><th>{escape(grid.corner)}</th>{head}</tr>{body}</table>")
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        return "\n".join(parts)

    _repr_html_ = html

    def svg(self) -> str:
        """The picture as SVG text, with the same colours."""
        parts, y = [_text(0, 0, self.head)], LINE
        for grid in self.grids:
            if grid.title:
                parts.append(_text(0, y, grid.title))
                y += LINE
            parts += _draw_grid(grid, self._cell, y)
            y += LINE * (len(grid.rows) + 1)
        parts += [_text(0, y + LINE * i, note) for i, note in enumerate(self.notes)]
        y += LINE * len(self.notes)
        wide = max([CELL * len(self.head), *(sum(_widths(g, self._cell)) for g in self.grids)])
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 2}" height="{y + 2}" '
            'font-family="ui-monospace, monospace" font-size="12">', *parts, "</svg>"])


def show_sharding(layout: Any, shape: Sequence[int], mesh: Mesh | None = None, *,
                  dtype: Any = None) -> Picture:
    """The parts of a tensor of this shape and the ranks that hold them.

    layout: a ShardSpec, Block, Cyclic, Replicated or Layout   mesh: for all but the last; default:
    that of the open `with mesh:`   dtype: types under 8 bits are split in whole groups
    Raises ArgumentError without a mesh, and what resolving the layout raises.
    """
    shape = tuple(shape)
    made = layout if isinstance(layout, Layout) else layout.resolve(_mesh(mesh), len(shape))
    kind = as_type(dtype).dtype if dtype is not None else None
    local_shape(made, shape, 0, kind)  # raises when layout and shape do not fit
    cuts = [_cuts(made, d, shape, kind) for d in range(len(shape))]
    shown, rest = _axes_shown(made, len(shape))
    slabs = itertools.product(*(list(enumerate(cuts[d][:MOST])) for d in rest))
    grids = tuple(_grid(made, cuts, shown, dict(zip(rest, slab, strict=True))) for slab in slabs)
    between = f" {'+' if made.op in ('sum', 'mean') else made.op} " if made.pending else ", "
    return Picture(f"{kind or ''}{show_shape(shape)} in {made}", grids, between,
                   tuple(_notes(cuts)))


def _mesh(mesh: Mesh | None) -> Mesh:
    found = mesh if mesh is not None else current_mesh()
    if found is None:
        raise ArgumentError("show_sharding needs the mesh that the layout is for",
                            hint="show_sharding(spec, shape, mesh), or inside `with mesh:`")
    return found


def _cuts(layout: Layout, dim: int, shape: tuple[int, ...], dtype: DType | None) -> list[Cut]:
    """The intervals of one dimension with the part that has them; one, of extent 0, if empty."""
    group = group_of(dtype) if dim == len(shape) - 1 else 1
    found = [(lo, hi, part) for part in range(layout.parts(dim))
             for lo, hi in intervals(layout, dim, shape[dim], part, group)]
    return sorted(found) or [(0, 0, 0)]


def _axes_shown(layout: Layout, ndim: int) -> tuple[list[int | None], list[int]]:
    """The dimensions of rows and columns, and those of which each part gets a grid."""
    split = [d for d in range(ndim) if layout.parts(d) > 1]
    chosen = split[-2:] if len(split) > 1 else list(range(ndim))[-2:]
    if len(split) == 1 and split[0] not in chosen:
        chosen = [split[0], ndim - 1]
    shown: list[int | None] = [None] * (2 - len(chosen)) + [*chosen]
    return shown, [d for d in split if d not in chosen]


def _grid(layout: Layout, cuts: list[list[Cut]], shown: list[int | None],
          fixed: dict[int, tuple[int, Cut]]) -> Grid:
    row, column = shown
    down = cuts[row][:MOST] if row is not None else [None]
    across = cuts[column][:MOST] if column is not None else [None]
    known = {d: cut[2] for d, (_, cut) in fixed.items()}
    cells = tuple(tuple(
        _holders(layout, known | _shard_numbers(row, r) | _shard_numbers(column, c))
        for c in across) for r in down)
    title = ", ".join(f"dim {d} {cut[0]}:{cut[1]}" for d, (_, cut) in sorted(fixed.items()))
    corner = f"dim {row} by {column}" if len(cuts) > 2 else ""
    return Grid(title, corner, tuple(map(_heading, down)), tuple(map(_heading, across)), cells)


def _shard_numbers(dim: int | None, cut: Cut | None) -> dict[int, int]:
    return {} if dim is None or cut is None else {dim: cut[2]}


def _heading(cut: Cut | None) -> str:
    return "" if cut is None else f"{cut[0]}:{cut[1]}"


def _holders(layout: Layout, parts: dict[int, int]) -> tuple[int, ...]:
    return tuple(rank for rank in range(layout.mesh.size())
                 if all(layout.part(rank, d) == part for d, part in parts.items()))


def _notes(cuts: list[list[Cut]]) -> list[str]:
    return [f"dim {d}: {len(c) - MOST} more intervals" for d, c in enumerate(cuts) if len(c) > MOST]


def _runs(ranks: tuple[int, ...]) -> list[str]:
    """Ranks with three or more neighbours as a range: 0, 1, 4-7."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return [text for run in found
            for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]


def _table(grid: Grid, text: Any) -> list[str]:
    table = [[grid.corner, *grid.columns]] + [[row, *map(text, cells)]
                                     for row, cells in zip(grid.rows, grid.cells, strict=True)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
            for line in table]


# --- drawing --------------------------------------------------------------------------------------
def _text(x: float, y: int, text: str, anchor: str = "start", fill: str = "currentColor") -> str:
    return (f'<text x="{x:g}" y="{y + 17}" text-anchor="{anchor}" fill="{fill}">{escape(text)}'
            "</text>")


def _widths(grid: Grid, text: Any) -> list[int]:
    """In pixels: of the row headings, then of each column."""
    table = [(grid.corner, *grid.columns), *(
        (row, *map(text, cells)) for row, cells in zip(grid.rows, grid.cells, strict=True))]
    return [CELL * (2 + max(map(len, column))) for column in zip(*table, strict=True)]


def _draw_grid(grid: Grid, text: Any, top: int) -> list[str]:
    """A table of coloured cells whose first line, the headings, begins at `top`."""
    widths = _widths(grid, text)
    left = [sum(widths[:i]) for i in range(len(widths))]
    parts = [_text(0, top, grid.corner)] if grid.corner else []
    parts += [_text(x + w / 2, top, name, "middle")
              for x, w, name in zip(left[1:], widths[1:], grid.columns, strict=True)]
    for i, (row, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        y = top + LINE * (i + 1)
        parts.append(_text(0, y, row))
        for x, w, ranks in zip(left[1:], widths[1:], cells, strict=True):
            parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{LINE}" stroke="#888" '
                         f'fill="{_colour(ranks)}"/>')
            parts.append(_text(x + w / 2, y, text(ranks), "middle", "#111"))
    return parts


def _colour(ranks: tuple[int, ...]) -> str:
    """One hue per first holder, spread by the golden angle."""
    return f"hsl({ranks[0] * 137.508 % 360:.0f},70%,80%)" if ranks else "none"
