"""Reports from kernels to the host, as tessera.runtime.flags reads them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.runtime.flags import LINES, VALUES, WHOLE_GROUP, WORDS
from tessera.tile.cuda.emit.emitter import Emitter, kind_of
from tessera.tile.cuda.emit.ids import group_number
from tessera.tile.cuda.instruction import Form, Operand, Operation, find_instruction
from tessera.tile.cuda.ptx import atomics, memory
from tessera.tile.ir import Operand as IROperand

Word = tuple[str, str]  # an i64 expression, and how the host reads its bits
BYTES = 8


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


# --- intrinsics -----------------------------------------------------------------------------------
def _arguments(first: str, second: str, count: int) -> tuple[Operand, ...]:
    words = (first, second, "kernel", *(f"value{i}" for i in range(count)))
    args = [Operand(w, "i64") for w in words]
    return (*args[:3], Operand("group", "i32"), Operand("lane", "i32"), *args[3:])


def _written(b: Any, at: Any, number: int, kernel: Any, group: Any, lane: Any,
             values: Sequence[Any]) -> None:
    """The words of a record; the site last, which makes it valid."""
    store = memory.st("global", "b64")
    for i, x in enumerate([kernel, b.sext(group, "i64"), b.sext(lane, "i64"), *values], 1):
        b.call(store, b.add(at, b.const("i64", BYTES * i)), x)
    b.call(find_instruction("fence_acq_rel_sys"))
    b.call(memory.st("global", "b64", cache="relaxed.sys"), at, b.const("i64", number + 1))


@functools.cache
def failure(number: int, count: int) -> Operation:
    """(claim, report, kernel, group, lane, values...): written by the first who comes."""
    args = _arguments("claim", "report", count)

    def body(b: Any, claim: Any, at: Any, kernel: Any, group: Any, lane: Any,
             *values: Any) -> None:
        taken = b.call(atomics.atom("exch", "b64"), claim, b.const("i64", 1))
        with b.when(b.compare("==", taken, b.zero(taken))):
            _written(b, at, number, kernel, group, lane, values)

    form = Form(args, (), body)
    return Operation("report_failure", len(args), lambda *_: form)


@functools.cache
def line(number: int, count: int) -> Operation:
    """(count, lines, kernel, group, lane, values...): one line; none when all places are taken."""
    args = _arguments("count", "lines", count)

    def body(b: Any, counter: Any, lines: Any, kernel: Any, group: Any, lane: Any,
             *values: Any) -> None:
        printed(b, counter, lines, number, kernel, group, lane, values)

    form = Form(args, (), body)
    return Operation("print_line", len(args), lambda *_: form)


def printed(b: Any, counter: Any, lines: Any, number: int, kernel: Any, group: Any, lane: Any,
            values: Sequence[Any]) -> None:
    """A line, where one of LINES places is left."""
    place = b.call(atomics.atom("add", "u64"), counter, b.const("i64", 1))
    with b.when(b.compare("<", place, b.const("i64", LINES), unsigned=True)):
        at = b.add(lines, b.mul(place, b.const("i64", BYTES * WORDS)))
        _written(b, at, number, kernel, group, lane, values)
