"""The documentation's table of formats, rendered from the registry."""

from __future__ import annotations

from tessera.numerics.dtypes import DType, all_dtypes

_COLUMNS = (
    "name",
    "bits",
    "exp",
    "man",
    "bias",
    "max",
    "smallest normal",
    "smallest subnormal",
    "specials",
    "aliases",
)
_SPECIALS = {"ieee": "inf, NaN", "fn": "NaN", "none": "none"}


def dtype_table() -> str:
    """A Markdown table with one row per format."""
    rows = [_COLUMNS, *(_row(t) for t in all_dtypes())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _row(t: DType) -> tuple[str, ...]:
    names = ", ".join(t.aliases)
    if t.kind != "float":
        return (t.name, str(t.bits), "", "", "", str(t.max), "", "", "", names)
    subnormal = _number(t.smallest) if t.man else "none"
    return (
        t.name,
        str(t.bits),
        str(t.exp),
        str(t.man),
        str(t.bias),
        _number(t.max),
        _number(t.tiny),
        subnormal,
        _SPECIALS[t.special],
        names,
    )


def _number(value: float | int) -> str:
    return f"{value:.8g}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (cell.ljust(widths[i]) for i, cell in enumerate(row))
    return "| " + " | ".join(cells) + " |"
