"""print, assert and breakpoint: reports to the host (reports.py).

A line holds four values; a longer one goes on in the next. A tile is printed element by element,
each with its index; the numbers that are printed with it come in a line of their own before.
"""

from __future__ import annotations

import string

from tessera.errors import UnsupportedTargetError
from tessera.runtime.flags import VALUES
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.reduce import inside_only
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.reports import Word, print_line, report, site, who, word
from tessera.tile.cuda.emit.thread_elements import first_lane, once_per_group
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Op, Operand
from tessera.tile.ir.types import Scalar, TileType

CONTINUED = "    "


def pieces(text: str) -> list[str]:
    """The texts between the values of a message, one more than those; braces stay doubled."""
    out = [""]
    for literal, field, _, _ in string.Formatter().parse(text):
        out[-1] += literal.replace("{", "{{").replace("}", "}}")
        if field is not None:
            out.append("")
    return out


# --- print ----------------------------------------------------------------------------------------
@emits("print")
def _print(e: Emitter, op: Op) -> None:
    texts, values = pieces(op.attr["text"]), list(op.args)
    tiles = [i for i, x in enumerate(values) if isinstance(e.type(x), TileType)]
    if len(tiles) < max(1, len(values)):
        _print_numbers(e, texts, values)
    for i in tiles:
        _print_tile(e, texts, values, i)


def _print_numbers(e: Emitter, texts: list[str], values: list[Operand]) -> None:
    """Lines with the numbers of a print; tiles stand there by their types."""
    kept, numbers = [texts[0]], []
    for x, text in zip(values, texts[1:], strict=True):
        if isinstance(e.type(x), TileType):
            kept[-1] += _operand_text(e, x) + text
        else:
            numbers.append(x)
            kept.append(text)
    if once_per_group(e, *numbers):
        with e.block(f"if {first_lane(e)} != 0"):
            _print_scalars(e, kept, numbers, lanes=False)
    else:
        _print_scalars(e, kept, numbers, lanes=True)


def _print_scalars(e: Emitter, texts: list[str], values: list[Operand], lanes: bool) -> None:
    """One line, or several of VALUES values."""
    for start in range(0, max(1, len(values)), VALUES):
        part = values[start:start + VALUES]
        message = (CONTINUED if start else "") + texts[start]
        for between in texts[start + 1:start + 1 + len(part)]:
            message += "{}" + between
        if start + VALUES < len(values):  # the text before the next value opens the next line
            message = message[:len(message) - len(texts[start + len(part)])]
        e.line(print_line(e, message, [word(e, x) for x in part], lanes))


def _print_tile(e: Emitter, texts: list[str], values: list[Operand], which: int) -> None:
    """A line for each element of one of the values: its index, then the element."""
    x = values[which]
    layout, dtype = e.layout(x), e.dtype(x)
    rank = len(layout.shape)
    if rank >= VALUES:
        raise UnsupportedTargetError(f"print of a tile of {rank} axes", where=e.where,
                                     hint="print a part of it, of at most 3 axes")
    before = "".join(t + (_operand_text(e, values[i]) if i < which else "")
                     for i, t in enumerate(texts[:which + 1]))
    after = "".join((_operand_text(e, v) if i else "") + t for i, (v, t) in enumerate(
        zip(values[which:], texts[which + 1:], strict=True)))
    kind = kind_of(dtype)
    how = "bool" if dtype.kind == "bool" else "u64" if dtype.kind == "uint" and kind == "i64" \
        else kind if kind[0] == "f" else "i64"
    words: list[Word] = [("", "i64")] * rank + [("", how)]
    index = ", ".join(["{}"] * rank)
    number = site(e, f"{before}[{index}] {{}}{after}", "print", words)
    text = intrinsic("debug.tile", number, layout.text, layout.shape, kind,
                     unsigned=dtype.kind == "uint")
    owner = e.owner(layout) or "i32(1)"
    args = [e.param("count", "count", "i64"), e.param("lines", "lines", "i64"),
            e.param("kernel", "kernel", "i64"), who(e, lanes=False), owner,
            *(e.index(layout, a) for a in range(rank))]
    e.line(f"{e.use('print_tile', text)}({e.name(x)}, {', '.join(args)})")


def _operand_text(e: Emitter, x: Operand) -> str:
    """What stands for a value that has lines of its own: its type."""
    t = e.type(x)
    return f"({TileType(t.dtype, t.shape) if isinstance(t, TileType) else t})"


# --- assert ---------------------------------------------------------------------------------------
@emits("device_assert")
def _assert(e: Emitter, op: Op) -> None:
    condition, *values = op.args
    texts = pieces(op.attr["message"])
    shown = [x for x in values if isinstance(e.type(x), Scalar)][:VALUES]
    message = texts[0]
    for x, text in zip(values, texts[1:], strict=True):
        message += ("{}" if x in shown else _operand_text(e, x)) + text
    if isinstance(e.type(condition), TileType):
        held, lanes = all_of(e, condition), False
    else:
        held, lanes = e.name(condition), not once_per_group(e, condition)
    report(e, f"{held} == 0", message, "assert", [word(e, x) for x in shown], lanes)


def all_of(e: Emitter, x: Operand) -> str:
    """Whether a condition holds in all elements of a tile that this thread has."""
    layout, text = e.layout(x), e.name(x)
    for axis in range(len(layout.shape)):
        if layout.overhangs(axis):
            text = inside_only(e, text, layout, axis, "i32", "1")
    return f"{e.use('all_of', intrinsic('debug.all_of', layout.count))}({text})"


# --- breakpoint -----------------------------------------------------------------------------------
@emits("stop")
def _stop(e: Emitter, op: Op) -> None:
    raise UnsupportedTargetError("breakpoint() stops the interpreter, not a GPU", where=op.where,
                                 hint="call the kernel with NumPy arrays, or print the values")
