"""An inspection as one HTML page: no scripts, nothing from elsewhere.

Hovering a line marks the lines of all levels that came from the same line of the source; this is
done by style rules alone, one for each line. Light or dark as the reader's system is.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..errors import short_path
from .function_lowering import LevelText
from .inspection import Inspection
from .kernel_lowering import TITLES

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f4f5f7;
  --rule: #d5d9df; --faint: #5f6873; --mark: #ffe49b; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --paper: #15181c; --soft: #1d2126;
  --rule: #373d45; --faint: #9aa4b0; --mark: #5b4a12; --link: #7db7ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.5rem 4rem; max-width: 110rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; } header p { margin: 0; color: var(--faint); }
h2, summary { font-size: 1rem; font-weight: 600; margin: 1rem 0 0.25rem; cursor: default; }
nav { margin: 0.75rem 0; } nav a { margin-right: 1rem; } a { color: var(--link); }
pre { margin: 0; padding: 0.6rem 0.8rem; overflow-x: auto; background: var(--soft);
  border: 1px solid var(--rule); border-radius: 6px; tab-size: 4;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.figures { display: grid; gap: 0 1rem; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr));
  align-items: start; }
.levels { display: grid; gap: 0 1rem; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr);
  align-items: start; }
.levels > .source { position: sticky; top: 0; } .source pre { max-height: 95vh; overflow: auto; }
.missing { color: var(--faint); } .n { color: var(--faint); text-decoration: none; }
pre span { display: inline-block; min-width: 100%; }
@media (max-width: 60rem) { .levels, .figures { grid-template-columns: minmax(0, 1fr); }
  .levels > .source { position: static; } .source pre { max-height: none; } }
@media print { details > pre { display: block; } }
"""
CLOSED = ("ptx", "sass")  # long: opened by a click, or by searching in the page


def page(found: Inspection) -> str:
    """The whole document."""
    numbers = {link: i for i, link in enumerate(dict.fromkeys(_linked(found)))}
    rules = "\n".join(f"body:has(.u{i}:hover) .u{i} {{ background: var(--mark); }}"
                      for i in numbers.values())
    where = f"{short_path(found.where.file)}:{found.where.line}"
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(found.name)}</title>", f"<style>{STYLE}{rules}\n</style>", "</head>",
        "<body>", "<header>", f"<h1>{escape(found.name)}</h1>",
        f"<p>{escape(where)} {escape(found.how)}</p>", "</header>", _navigation(found),
        '<section class="figures" id="figures">', *_figures(found), "</section>",
        '<main class="levels">', *_levels(found, numbers), "</main>", "</body>", "</html>", ""])


def _linked(found: Inspection) -> Iterator[str]:
    for section in found.sections.values():
        yield from filter(None, section.links)


def _navigation(found: Inspection) -> str:
    links = [f'<a href="#{level}">{escape(TITLES[level])}</a>' for level in found.sections]
    return "<nav>" + "".join(['<a href="#figures">Figures</a>', *links]) + "</nav>"


def _figures(found: Inspection) -> Iterator[str]:
    for figure in found.figures:
        yield (f"<div><h2>{escape(figure.title)}</h2>\n<pre>{escape(figure.text)}</pre></div>")


def _levels(found: Inspection, numbers: dict[str, int]) -> Iterator[str]:
    """The source on the left, the levels below each other on the right."""
    source = found.sections.get("source")
    if source is not None:
        yield f'<div class="source" id="source"><h2>{TITLES["source"]}</h2>'
        yield f"<pre>{_source_lines(source, numbers, _first_places(found))}</pre></div>"
    yield "<div>"
    for level, section in found.sections.items():
        if level == "source":
            continue
        is_open = "" if level in CLOSED else " open"
        yield f'<details id="{level}"{is_open}><summary>{escape(TITLES[level])}</summary>'
        if section.missing:
            yield f'<p class="missing">{escape("not available: " + section.missing)}</p></details>'
        else:
            yield f"<pre>{_lines(section, numbers)}</pre></details>"
    yield "</div>"


def _first_places(found: Inspection) -> dict[str, str]:
    """Link -> the first level that has a line of it, in order of lowering."""
    places: dict[str, str] = {}
    for level, section in found.sections.items():
        if level != "source":
            for link in filter(None, section.links):
                places.setdefault(link, level)
    return places


def _source_lines(source: LevelText, numbers: dict[str, int], places: dict[str, str]) -> str:
    """Lines with their numbers; a number leads to the first line that it became."""
    out = []
    for text, link in zip(source.lines, source.links, strict=True):
        number = f"{link.rpartition(':')[2]:>5} "
        if link in places:
            number = f'<a class="n" href="#{places[link]}-u{numbers[link]}">{number}</a>'
        else:
            number = f'<span class="n" style="min-width:0">{number}</span>'
        out.append(f'<span class="u{numbers[link]}">{number} {escape(text)}</span>')
    return "\n".join(out)


def _lines(section: LevelText, numbers: dict[str, int]) -> str:
    out, seen = [], set()
    for text, link in zip(section.lines, section.links, strict=True):
        if not link:
            out.append(escape(text))
            continue
        number = numbers[link]
        anchor = "" if link in seen else f' id="{section.level}-u{number}"'
        seen.add(link)
        out.append(f'<span class="u{number}"{anchor} title="{escape(link)}">{escape(text)}</span>')
    return "\n".join(out)


__all__ = ["page"]
