"""Intrinsics of reports from kernels to the host, as tessera.runtime.flags reads them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tessera.runtime.flags import LINES, WORDS
from tessera.tile.cuda.instruction import InstructionForm, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.ptx import atomics, memory

BYTES = 8


def _arguments(first: str, second: str, count: int) -> tuple[Operand, ...]:
    words = (first, second, "kernel", *(f"value{i}" for i in range(count)))
    args = [Operand(w, "i64") for w in words]
    return (*args[:3], Operand("group", "i32"), Operand("lane", "i32"), *args[3:])


def _write_record(b: Any, at: Any, number: int, kernel: Any, group: Any, lane: Any,
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
            _write_record(b, at, number, kernel, group, lane, values)

    form = InstructionForm(args, (), body)
    return Operation("report_failure", len(args), lambda *_: form)


@functools.cache
def line(number: int, count: int) -> Operation:
    """(count, lines, kernel, group, lane, values...): one line; none when all places are taken."""
    args = _arguments("count", "lines", count)

    def body(b: Any, counter: Any, lines: Any, kernel: Any, group: Any, lane: Any,
             *values: Any) -> None:
        printed(b, counter, lines, number, kernel, group, lane, values)

    form = InstructionForm(args, (), body)
    return Operation("print_line", len(args), lambda *_: form)


def printed(b: Any, counter: Any, lines: Any, number: int, kernel: Any, group: Any, lane: Any,
            values: Sequence[Any]) -> None:
    """A line, where one of LINES places is left."""
    place = b.call(atomics.atom("add", "u64"), counter, b.const("i64", 1))
    with b.when(b.compare("<", place, b.const("i64", LINES), unsigned=True)):
        at = b.add(lines, b.mul(place, b.const("i64", BYTES * WORDS)))
        _write_record(b, at, number, kernel, group, lane, values)
