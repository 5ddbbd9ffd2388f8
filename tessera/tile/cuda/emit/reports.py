"""Reports from kernels to the host, as tessera.runtime.flags reads them."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.runtime.flags import VALUES, WHOLE_GROUP
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.ids import group_number
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Operand as IROperand

Word = tuple[str, str]  # an i64 expression, and how the host reads its bits


def word(e: Emitter, x: IROperand) -> Word:
    """A scalar as 64 bits."""
    dtype, name = e.dtype(x), e.name(x)
    kind = kind_of(dtype)
    if kind[0] == "f":
        bits = "i32" if kind == "f32" else "i64"
        cast = e.use("bits_of", f"use(fragments.bitcast({bits!r}))")
        return f"i64({cast}({name}))", kind
    if dtype.kind == "uint" and dtype.bits == 32:
        return f"(i64({name}) & 0xFFFFFFFF)", "i64"
    return f"i64({name})", "bool" if dtype.kind == "bool" else "u64" if dtype.kind == "uint" \
        else "i64"


def site(e: Emitter, message: str, kind: str, words: Sequence[Word]) -> int:
    """The number of a new site of the kernel."""
    assert len(words) <= VALUES, message
    e.sites.append((e.where, message, kind, tuple(how for _, how in words)))
    return len(e.sites) - 1


def who(e: Emitter, lanes: bool) -> str:
    return f"{group_number(e)}, {e.thread if lanes else f'i32({WHOLE_GROUP})'}"


def report(e: Emitter, condition: str, message: str, kind: str, words: Sequence[Word],
           lanes: bool) -> None:
    """Where the condition holds: the first report of the launch is kept. lanes: by this lane, else
    by the group as a whole."""
    number = site(e, message, kind, words)
    call = e.use(f"report_{kind}", f"use(reports.failure({number}, {len(words)}))")
    args = [e.param("claim", "claim", "i64"), e.param("report", "report", "i64"),
            e.param("kernel", "kernel", "i64"), who(e, lanes), *(text for text, _ in words)]
    with e.block(f"if {condition}"):
        e.line(f"{call}({', '.join(args)})")


def print_line(e: Emitter, message: str, words: Sequence[Word], lanes: bool) -> str:
    """The call that prints one line."""
    number = site(e, message, "print", words)
    call = e.use("print_line", f"use(reports.line({number}, {len(words)}))")
    args = [e.param("count", "count", "i64"), e.param("lines", "lines", "i64"),
            e.param("kernel", "kernel", "i64"), who(e, lanes), *(text for text, _ in words)]
    return f"{call}({', '.join(args)})"
