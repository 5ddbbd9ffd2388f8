"""What CUDA's driver forbids while streams are captured, for the driver that pretends.

CUDA driver API, cuStreamBeginCapture and cuThreadExchangeStreamCaptureMode; CUDA Programming Guide,
Stream Capture. A call that is forbidden fails, spoils the graph and is noted in `spoilt`: who
frees memory looks at no status.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
(UNSUPPORTED, INVALIDATED, _, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT,
 WRONG_THREAD) = range(900, 909)
LEGACY = (0, 1)


@dataclass(eq=False)
class Capture:
    """A graph on its way. clocks: by stream in it, how much of each stream it comes behind."""

    origin: int
    mode: int
    thread: int
    context: int
    valid: bool = True
    work: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    into: int = 0

    def ask(self, stream: int, node: int, work: Callable[[], Any]) -> None:
        self.work.append((node, work))
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1


class Captures:
    """Which streams are captured, and what may be asked meanwhile."""

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self.blocking: set[int] = set()  # streams that wait for the legacy one
        self.marks: dict[int, tuple[Capture, dict[int, int]]] = {}  # events recorded in a capture
        self.spoilt: list[str] = []
        self._modes = threading.local()

    def capture_of(self, stream: int) -> Capture | None:
        return next((c for c in self.captures if stream in c.clocks), None)

    def spoil(self, captures: Iterable[Capture], status: int, what: str) -> int:
        for c in captures:
            c.valid = False
        frames = traceback.extract_stack()[:-2]
        self.spoilt.append(f"{what}: {status}, from " + " < ".join(
            f"{f.name}:{f.lineno}" for f in frames[:-9:-1]))
        return status

    def unsafe(self, what: str) -> int:
        """A call that no capture sees: which a thread may not make that is not relaxed."""
        mode, me = getattr(self._modes, "mode", GLOBAL), threading.get_ident()
        if mode == RELAXED:
            return 0
        hit = [c for c in self.captures if c.mode != RELAXED and (
            c.thread == me or mode == c.mode == GLOBAL)]
        return self.spoil(hit, UNSUPPORTED, what) if hit else 0

    def waits_for_stream(self, stream: int, what: str) -> int:
        if (mine := self.capture_of(stream)) is not None:
            return self.spoil([mine], UNSUPPORTED, what)
        return self.implicit(stream, what) or self.unsafe(what)

    def waits_for_context(self, context: int, what: str) -> int:
        hit = [c for c in self.captures if c.context == context]
        return self.spoil(hit, UNSUPPORTED, what) if hit else 0

    def implicit(self, stream: int, what: str) -> int:
        """The legacy stream waits for those that are not independent of it."""
        hit = [c for c in self.captures if stream in LEGACY and self.blocking & c.clocks.keys()]
        return self.spoil(hit, IMPLICIT, what) if hit else 0

    def asks_event(self, event: int, what: str) -> int:
        if event in self.marks:
            mine = self.marks[event][0]
            return self.spoil([mine], CAPTURED_EVENT, what)
        return self.unsafe(what)

    # --- of the driver ---------------------------------------------------------------------------
    def begin_capture(self, stream: int, mode: int, context: int, into: int = 0) -> int:
        """into: the graph of a conditional node."""
        if stream in LEGACY or self.capture_of(stream) is not None:
            return UNSUPPORTED
        self.captures.append(Capture(stream, mode, threading.get_ident(), context,
                                     clocks={stream: {}}, into=into))
        return 0

    def end_capture(self, stream: int) -> tuple[int, Capture | None]:
        mine = next((c for c in self.captures if c.origin == stream), None)
        if mine is None:
            return UNMATCHED, None
        if mine.mode != RELAXED and mine.thread != threading.get_ident():
            return WRONG_THREAD, None
        self.captures.remove(mine)
        if not mine.valid:
            return INVALIDATED, None
        seen = mine.clocks[stream]
        if any(clock.get(s, 0) > seen.get(s, 0) for s, clock in mine.clocks.items()):
            return self.spoil([mine], UNJOINED, "end"), None
        return 0, mine

    def event_recorded(self, event: int, stream: int) -> None:
        mine = self.capture_of(stream)
        if mine is None:
            self.marks.pop(event, None)
        else:
            self.marks[event] = mine, dict(mine.clocks[stream])

    def stream_waits(self, stream: int, event: int) -> int:
        """A stream that waits for what is captured is captured from there on."""
        mark, mine = self.marks.get(event), self.capture_of(stream)
        if mark is None:
            hit = [] if mine is None else [mine]
        elif stream in LEGACY or mark[0] not in self.captures or mine not in (None, mark[0]):
            hit = [c for c in (mark[0], mine) if c is not None]
        else:
            clock = mark[0].clocks.setdefault(stream, {})
            for s, n in mark[1].items():
                clock[s] = max(clock.get(s, 0), n)
            return 0
        return self.spoil(hit, ISOLATION, "a wait for what is outside") if hit else 0

    def exchange_mode(self, mode: int) -> int:
        before = getattr(self._modes, "mode", GLOBAL)
        self._modes.mode = mode
        return before


__all__ = ["CAPTURED_EVENT", "INVALIDATED", "ISOLATION", "UNJOINED", "UNSUPPORTED", "Capture",
           "Captures"]
