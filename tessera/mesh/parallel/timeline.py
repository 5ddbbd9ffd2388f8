"""When each rank did what, as a picture in text or SVG: planned by a schedule, or recorded."""

from __future__ import annotations

from html import escape

from ...lazy_dataclass import dataclass

_COLUMNS = 84  # of a measured timeline
_COLOURS = (("#7fb3d5", "#2874a6"), ("#f5b895", "#ca6f1e"))  # forward, backward: chunk 0, others


@dataclass(frozen=True)
class TimelineSpan:
    """One step of one row: `label` from begin to end."""

    row: int
    label: str
    backward: bool
    chunk: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Rows of spans. `print(timeline)` draws it; a notebook shows the SVG."""

    title: str
    row: str  # what a row is called
    rows: int
    spans: tuple[TimelineSpan, ...]
    unit_s: float | None = None  # a unit of begin and end in seconds, when it was measured

    @property
    def begin(self) -> float:
        return min((s.begin for s in self.spans), default=0.0)

    @property
    def length(self) -> float:
        """From the first begin to the last end."""
        return max((s.end for s in self.spans), default=0.0) - self.begin

    @property
    def idle(self) -> float:
        """The part of rows times length in which no span lies."""
        busy = sum(s.end - s.begin for s in self.spans)
        return 1 - busy / (self.rows * self.length) if self.length else 0.0

    def overlap(self) -> float:
        """The part of the length in which two rows or more are busy."""
        edges = sorted([(s.begin, 1) for s in self.spans] + [(s.end, -1) for s in self.spans])
        busy, since, shared = 0, self.begin, 0.0
        for at, change in edges:
            shared += at - since if busy > 1 else 0.0
            busy, since = busy + change, at
        return shared / self.length if self.length else 0.0

    def __str__(self) -> str:
        """One line per row; a step is its label and dashes up to its end."""
        longest = max((len(s.label) for s in self.spans), default=0)
        columns = longest + 1 if self.unit_s is None else _COLUMNS / (self.length or 1)
        lines = [f"{self.row} {r}  {self._line(r, columns)}" for r in range(self.rows)]
        return "\n".join([self._head(), *lines])

    def _head(self) -> str:
        length = "" if self.unit_s is None else f", {1e3 * self.length * self.unit_s:.3g} ms"
        return f"{self.title}{length}, {round(100 * self.idle)} % idle"

    def _line(self, row: int, columns: float) -> str:
        cells = [" "] * (round(self.length * columns) + 1)
        for span in sorted((s for s in self.spans if s.row == row), key=lambda s: s.begin):
            lo, hi = (round((at - self.begin) * columns) for at in (span.begin, span.end))
            width = max(1, hi - lo - 1)
            cells[lo:lo + width] = span.label[:width].ljust(width, "-")
        return "".join(cells).rstrip()

    def svg(self) -> str:
        """The picture as SVG text."""
        scale, high, left = 960 / (self.length or 1), 26, 60
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{960 + left}" '
                 f'height="{high * (self.rows + 1)}" font-family="sans-serif" font-size="11">',
                 f'<text x="0" y="16">{escape(self._head())}</text>']
        parts += [f'<text x="0" y="{high * (r + 1) + 16}">{self.row} {r}</text>'
                  for r in range(self.rows)]
        for s in self.spans:
            x, width = left + (s.begin - self.begin) * scale, (s.end - s.begin) * scale
            y, colour = high * (s.row + 1), _COLOURS[s.backward][s.chunk > 0]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{high - 4}" '
                         f'fill="{colour}" stroke="white"><title>{s.label} {s.begin:g} to '
                         f'{s.end:g}</title></rect>')
            if width > 7 * len(s.label):
                parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle">'
                             f'{s.label}</text>')
        return "\n".join([*parts, "</svg>"])

    def _repr_svg_(self) -> str:
        return self.svg()
