"""How much Python a call runs: a measure of its host time that is the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent)


def python_calls(run: Callable[[], Any]) -> int:
    """Functions called, of Python and built in, the outermost `run` among them.

    A call of Python's takes some 50 to 100 ns of host time (3.11, 2026), so 20 are 1 to 2 us.
    """
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count - 1  # the call of setprofile that ends it


def opcodes(call: Callable[[], Any]) -> int:
    """Of Python, that a call runs; not those of what pretends to be a driver, in tests."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode" and not frame.f_code.co_filename.startswith(TESTS)
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
