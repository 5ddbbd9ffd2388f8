"""A profile as one HTML page: tables, timeline, memory over time, roofline.

No scripts, nothing from elsewhere; pictures are SVG, and what a mark stands for shows when it is
pointed at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import log10
from typing import TYPE_CHECKING

from ..errors import short_path
from ..graph.schedule.work import amount
from ..tile.tuning.gpus import Gpu
from .launch_profile import LaunchGroup, LaunchRecord
from .memory_timeline import MemoryTimeline

if TYPE_CHECKING:
    from .profiling import Profile

Pixels = Callable[[float, float], tuple[float, float]]

WIDTH, LANE, MEMORY, ROOF = 1120, 34, 220, 420  # pixels
MARKS, MOMENTS, ROWS = 6000, 3000, 60  # shown at most; what is left out is said
COLOURS = {"matmul": "#4c78a8", "attention": "#f58518", "reduction": "#54a24b",
           "elementwise": "#e45756", "optimizer": "#b279a2", "move": "#9d755d",
           "copy": "#bab0ac", "index": "#72b7b2", "sort": "#eeca3b", "library": "#ff9da6",
           "kernel": "#6b5ca5", "exchange": "#d67195"}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f4f5f7; --rule: #9aa4b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --paper: #15181c; --soft: #1d2126; } }
body { margin: 1rem auto; max-width: 74rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 0.4rem; }
svg { background: var(--soft); border-radius: 6px; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid var(--soft); }
td:last-child, th:last-child { text-align: left; font-family: ui-monospace, Menlo, monospace;
  font-size: 12px; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }
"""


def page(profile: Profile) -> str:
    """The whole document."""
    table = profile.launches
    records = table.records
    memory = profile.memory_timeline()
    parts = [f"<p>{len(records)} steps on {escape(table.device)}: {_us(table.us)}</p>",
             _legend(records), "<h2>Time by sort of work</h2>", _table(table.by_kind(), table.us),
             "<h2>Timeline</h2>", _timeline(records), "<h2>Memory</h2>", _memory(memory)]
    if table.gpu is not None:
        parts += ["<h2>Roofline</h2>", _roofline(table.by_launch(), table.gpu)]
    rows = table.by_launch()
    left = f" (the longest {ROWS} of {len(rows)})" if len(rows) > ROWS else ""
    parts += [f"<h2>Launches{left}</h2>", _table(rows[:ROWS], table.us)]
    return "\n".join(["<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
                      "<title>Profile</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
                      "<h1>Profile</h1>", *parts, "</body>", "</html>", ""])


def _us(us: float) -> str:
    return f"{us / 1e3:.3f} ms" if us >= 1e3 else f"{us:.1f} us"


def _colour(kind: str) -> str:
    return COLOURS.get(kind, "#888888")


def _legend(records: Sequence[LaunchRecord]) -> str:
    kinds = sorted({x.work.kind for x in records})
    return "<p>" + "".join(f'<span class="key" style="background:{_colour(k)}"></span>{escape(k)}'
                           for k in kinds) + "</p>"


def _table(groups: Iterable[LaunchGroup], total_us: float) -> str:
    heads = ("time", "%", "n", "TFLOP/s", "GB/s", "of roofline", "what")
    rows = ["<tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"]
    for g in groups:
        f = g.figures()
        cells = (_us(g.us), f"{100 * g.us / max(total_us, 1e-9):.1f}", f["launches"],
                 f"{f['tflops']:.2f}", f"{f['gbps']:.0f}",
                 f"{100 * g.roofline:.0f}%" if g.roofline else "-", escape(g.name))
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return "<table>" + "\n".join(rows) + "</table>"


def _svg(height: float, marks: Iterable[str]) -> str:
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
                      f'width="{WIDTH}" height="{height:.0f}">', *marks, "</svg>"])


# --- timeline ---------------------------------------------------------------------------------
def _timeline(records: Sequence[LaunchRecord]) -> str:
    """A lane for each stream of a device and each thread of the host."""
    if not records:
        return "<p>nothing ran</p>"
    lanes = list(dict.fromkeys((x.event.device, x.event.stream) for x in records))
    begin = min(x.event.start_ns for x in records)
    span = max(1, max(x.event.end_ns for x in records) - begin)
    shown = sorted(records, key=lambda x: -x.us)[:MARKS]
    scale = (WIDTH - 110) / span
    marks = [f'<text x="6" y="{LANE * i + 22}">{_lane(*lane)}</text>'
             for i, lane in enumerate(lanes)]
    for x in sorted(shown, key=lambda x: x.event.start_ns):
        row = lanes.index((x.event.device, x.event.stream))
        at = 100 + (x.event.start_ns - begin) * scale
        wide = max(0.4, (x.event.end_ns - x.event.start_ns) * scale)
        marks.append(f'<rect x="{at:.2f}" y="{LANE * row + 6}" width="{wide:.2f}" '
                     f'height="{LANE - 12}" fill="{_colour(x.work.kind)}">'
                     f"<title>{escape(_tooltip(x))}</title></rect>")
    left = "" if len(shown) == len(records) else (
        f"<p>the longest {len(shown)} of {len(records)} steps</p>")
    return _svg(LANE * len(lanes) + 4, marks) + f"<p>{_us(span / 1e3)} in all</p>{left}"


def _lane(device: int, stream: int) -> str:
    return "host" if device < 0 else f"cuda:{device} {stream or 'default'}"


def _tooltip(x: LaunchRecord) -> str:
    w = x.work
    where = f"{short_path(w.where.file)}:{w.where.line}  {w.where.text}" if w.where else ""
    share = f", {100 * x.least_us / x.us:.0f}% of the roofline" if x.least_us and x.us else ""
    return (f"{w.name}: {_us(x.us)}{share}\n{w.shapes}\n{amount(w.flops, 'flop')}, "
            f"{amount(w.bytes, 'B')}\n{where}")


# --- memory -----------------------------------------------------------------------------------
def _memory(timeline: MemoryTimeline) -> str:
    """Live bytes while each group runs."""
    moments = timeline.moments[:MOMENTS]
    if not moments:
        return "<p>no compiled function ran</p>"
    most, wide = max(timeline.peak_bytes, 1), WIDTH / len(moments)
    marks = []
    for i, m in enumerate(moments):
        high = (MEMORY - 24) * m.bytes / most
        fill = "#e45756" if m is timeline.peak else "#4c78a8"
        marks.append(f'<rect x="{i * wide:.2f}" y="{MEMORY - high:.2f}" width="{wide:.2f}" '
                     f'height="{high:.2f}" fill="{fill}"><title>'
                     f"{escape(f'{m.op}: {m.bytes:,} bytes, {len(m.live)} tensors  {m.where}')}"
                     "</title></rect>")
    marks.append(f'<text x="6" y="16">peak {amount(float(timeline.peak_bytes), "B")}</text>')
    left = "" if len(moments) == len(timeline.moments) else (
        f"<p>the first {len(moments)} of {len(timeline.moments)} groups</p>")
    return _svg(MEMORY, marks) + left


# --- roofline ---------------------------------------------------------------------------------
def _roofline(groups: Sequence[LaunchGroup], gpu: Gpu) -> str:
    """Operations per second over operations per byte, both logarithmic; a larger circle takes more
    of the time."""
    points = [(g, *_point(g)) for g in groups]
    found = [(g, x, y) for g, x, y in points if x > 0 and y > 0]
    peaks = {kind: gpu.matmuls(kind) for kind, _ in gpu.matmul_tflops}
    peaks["f32"] = gpu.f32_tflops * 1e12
    top, low_x, high_x = max(peaks.values()), 0.01, 1e5
    low_y = top / 1e7

    def at(x: float, y: float) -> tuple[float, float]:
        return (60 + (WIDTH - 80) * (log10(x / low_x) / log10(high_x / low_x)),
                ROOF - 30 - (ROOF - 50) * (log10(max(y, low_y) / low_y) / log10(top / low_y)))

    marks = [*_roofs(peaks, gpu.memory_gbps * 1e9, at, high_x)]
    total = sum(g.us for g in groups) or 1.0
    for g, x, y in sorted(found, key=lambda p: -p[0].us):
        cx, cy = at(min(max(x, low_x), high_x), y)
        kind = g.launches[0].work.kind
        said = f"{g.name}: {_us(g.us)}, {x:.3g} flop/B, {y / 1e12:.3g} TFLOP/s"
        radius = 3 + 30 * (g.us / total) ** 0.5
        marks.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}" '
                     f'fill="{_colour(kind)}" fill-opacity="0.6"><title>{escape(said)}</title>'
                     "</circle>")
    return _svg(ROOF, marks)


def _point(g: LaunchGroup) -> tuple[float, float]:
    """Operations per byte, and per second."""
    flops = sum(x.work.flops for x in g.launches)
    moved = sum(x.work.bytes for x in g.launches)
    return flops / moved if moved else 0.0, flops / (g.us / 1e6) if g.us else 0.0


def _roofs(peaks: dict[str, float], bandwidth: float, place: Pixels, high_x: float
           ) -> Iterator[str]:
    for kind, peak in peaks.items():
        ridge = peak / bandwidth
        (x0, y0), (x1, y1) = place(ridge, peak), place(high_x, peak)
        yield (f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" '
               'stroke="var(--rule)"/>')
        yield f'<text x="{x1 - 120:.1f}" y="{y1 - 4:.1f}">{kind} {peak / 1e12:.0f} TFLOP/s</text>'
    (x0, y0), (x1, y1) = (place(f, f * bandwidth) for f in (
        0.01, max(peaks.values()) / bandwidth))
    yield f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="var(--rule)"/>'
    yield (f'<text x="{(x0 + x1) / 2 - 150:.1f}" y="{(y0 + y1) / 2 - 8:.1f}">'
           f"{bandwidth / 1e9:.0f} GB/s</text>")
    yield f'<text x="{WIDTH / 2:.0f}" y="{ROOF - 8}">flop / byte (0.01 to 100,000)</text>'


__all__ = ["page"]
