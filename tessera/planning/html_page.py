"""A plan as a page: two bars, of memory and of the step's time, and the table. No scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ..graph.schedule.work import amount
from ..lazy_dataclass import dataclass
from .table_text import duration, table

if TYPE_CHECKING:
    from .planner import Planned

WIDTH, BAR, ROW = 720, 34, 20  # pixels of a bar, its height, a line of its legend
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d")
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f4f5f7; --rule: #888; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --paper: #15181c; --soft: #1d2126; } }
body { margin: 1rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; background: var(--soft); padding: 0.6rem 0.8rem; border-radius: 6px;
  font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""


@dataclass(frozen=True)
class BarSegment:
    """A piece of a bar: its name, how much, and that in words."""

    name: str
    size: float
    text: str


@dataclass(frozen=True)
class PlanPicture:
    """The picture of a plan: print it for the table; a notebook shows the bars."""

    plan: Planned

    def __str__(self) -> str:
        return table(self.plan)

    def svg(self) -> str:
        """Both bars, one under the other."""
        plan = self.plan
        memory = [BarSegment(role, n, amount(n, "B")) for role, n in plan.memory.items()]
        time = [BarSegment(p.name, p.us, f"{duration(p.us)} {p.what}") for p in plan.parts if p.us]
        limit = plan.device.memory_bytes
        first, height = _bar(f"memory of a rank: {amount(plan.memory_bytes, 'B')} of "
                             f"{amount(limit, 'B')}", memory, max(limit, plan.memory_bytes),
                             0, limit)
        mfu = f", MFU {plan.mfu:.1%}" if plan.ideal_us else ""
        second, end = _bar(f"step: {duration(plan.step_us)}{mfu}", time, plan.step_us, height + 16)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2} {end}" '
            f'width="{WIDTH + 2}" height="{end}" font-family="system-ui, sans-serif" '
            'font-size="13">', *first, *second, "</svg>"])

    def html(self) -> str:
        """The picture as a fragment of a page."""
        return self.svg()

    _repr_html_ = html


def _bar(title: str, pieces: Sequence[BarSegment], whole: float, top: int,
         limit: float | None = None) -> tuple[list[str], int]:
    """A bar of pieces with its title above and its legend below; and where it ends."""
    lines = [f'<text x="0" y="{top + 14}" font-weight="600" fill="currentColor">{escape(title)}'
             "</text>"]
    y, x = top + 22, 0.0
    lines.append(f'<rect x="0.5" y="{y}" width="{WIDTH}" height="{BAR}" fill="none" '
                 'stroke="#888"/>')
    for i, piece in enumerate(pieces):
        width = WIDTH * piece.size / whole if whole else 0.0
        colour = _COLOURS[i % len(_COLOURS)]
        lines.append(f'<rect x="{x + 0.5:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                     f'fill="{colour}"><title>{escape(f"{piece.name}: {piece.text}")}</title>'
                     "</rect>")
        x += width
        at = y + BAR + 6 + ROW * i
        lines.append(f'<rect x="0" y="{at + 3}" width="12" height="12" fill="{colour}"/>')
        share = f"{piece.size / whole:.1%}" if whole else ""
        lines.append(f'<text x="20" y="{at + 14}" fill="currentColor">'
                     f"{escape(f'{piece.name}  {piece.text}  {share}')}</text>")
    if limit is not None and limit < whole:
        mark = WIDTH * limit / whole
        lines.append(f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 4}" y2="{y + BAR + 4}" '
                     'stroke="#d00" stroke-width="3"><title>what a rank has</title></line>')
    return lines, y + BAR + 6 + ROW * len(pieces)


def page(plan: Planned) -> str:
    """The whole document."""
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f"<title>{escape(plan.title)}</title>", f"<style>{_STYLE}</style>", "</head>", "<body>",
        f"<h1>Plan of {escape(plan.title)}</h1>",
        f"<p>{escape(f'{plan.mesh}, fabric {plan.fabric.name}: {plan.fabric.doc}')}</p>",
        PlanPicture(plan).svg(), f"<pre>{escape(table(plan))}</pre>", "</body>", "</html>", ""])


__all__ = ["PlanPicture", "page"]
