"""Whether what was sent through NCCL arrives: a thread that looks once a second, and costs a call
nothing but a note.

A rank whose partner has died, hangs or does something else waits on its GPU, where nobody can raise
an error. So the thread puts an event behind what was sent last on each stream, and when that is not
reached in config.comm_timeout seconds, or NCCL reports an error, it ends all ranks and says in
which collective, as the host's messages do (abort.py). Streams of ours are there for good; behind
what is sent on another, which may be gone when the thread looks, the event is put at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera import config
from tessera.errors import SourceLine
from tessera.graph.trace import current_line
from tessera.runtime import libcuda
from tessera.runtime.buffer import lasts
from tessera.runtime.copies import StreamEvent
from tessera.runtime.device import check, device, driver, outside_capture
from tessera.runtime.libcuda import NOT_READY
from tessera.runtime.recordings import nothing_recorded

from ...lazy_dataclass import dataclass
from ..errors import MeshError, StalledError
from . import call_numbers, status_page
from .abort import stop_with
from .envelope import ranks_text

if TYPE_CHECKING:
    from .communicator import Communicator

LOOK_S, POLL_S = 1.0, 0.05


@dataclass(slots=True)
class SentCall:
    """The last call that went through NCCL. event: behind it, on a stream that may be gone.
    looked_at: not while a graph was being recorded."""

    by: Communicator
    what: str
    stream: int
    limit_s: int
    where: Any
    number: int
    event: StreamEvent | None = None
    looked_at: bool = False


_last: dict[tuple[Communicator, int], SentCall] = {}  # by communicator and stream
_numbers = itertools.count(1)
_started = threading.Lock()
_running = False


def sent(by: Communicator, what: str, stream: int, where: SourceLine | None = None) -> None:
    """Note a call. The first starts the thread. where: not at the line that runs now."""
    event = None
    if not lasts(stream):
        if _is_capturing(stream):
            return  # an event would be part of the graph; who launches it is asked for no note
        event = StreamEvent(device(by.index), stream)
    _last[by, stream] = SentCall(by, what, stream, config.comm_timeout, where or current_line(),
                                 next(_numbers), event)
    if not _running:
        _start()


def replayed(by: Communicator, what: str, stream: int, where: SourceLine | None) -> None:
    """Note the launch of a CUDA graph. what: the last call in it."""
    status_page.note(what)
    sent(by, "a CUDA graph", stream, where)


def _start() -> None:
    global _running
    with _started:
        if not _running:
            _running = True
            threading.Thread(target=_watch, name="tessera-nccl-watch", daemon=True).start()


def _watch() -> None:
    seen = 0
    with outside_capture():  # what it asks the driver spoils no graph that somebody records
        while True:
            time.sleep(LOOK_S)
            if (error := call_numbers.exchange()) is not None:
                stop_with(error)
            seen = look_at_new(seen)


def look_at_new(seen: int) -> int:
    """Looks at the calls behind number `seen`; the last that it has looked at."""
    new = sorted((c for c in list(_last.values()) if c.number > seen), key=lambda c: c.number)
    for call in new:
        if (error := look(call)) is not None:
            stop_with(error)
        if not call.looked_at:
            break  # again in a second: it may be the last call, and never be done
        seen = call.number
    return seen


def look(call: SentCall) -> MeshError | None:
    """Waits until a call has been done by the GPU; what is wrong when it is not in time."""
    with device(call.by.index).current():
        call.looked_at = True
        if (behind := call.event) is not None:
            return _reached(call, lambda: behind.done)
        event = check(driver().cuEventCreate(libcuda.EVENT_DISABLE_TIMING), "make an event")
        try:
            with nothing_recorded() as alone:
                if not alone or _is_capturing(call.stream):
                    call.looked_at = False  # an event in there would be part of the graph
                    return None
                if driver().cuEventRecord(event, call.stream)[0] != libcuda.SUCCESS:
                    return None  # the process ends
            return _reached(call, lambda: driver().cuEventQuery(event)[0] != NOT_READY)
        finally:
            driver().cuEventDestroy(event)


def _is_capturing(stream: int) -> bool:
    status, capturing = driver().cuStreamIsCapturing(stream)
    return bool(status) or capturing != libcuda.CAPTURE_STATUS_NONE


def _reached(call: SentCall, done: Callable[[], bool]) -> MeshError | None:
    if done():
        return None
    group = call.by.group
    text = f"{call.what} over {group.axis!r} through NCCL"
    status_page.wait_on_gpu(text)
    begin = time.monotonic()
    while not done():
        others = [r for r in group.ranks if r != group.transport.rank]
        if failure := call.by.failure():
            return MeshError(f"rank {group.transport.rank} has lost {ranks_text(others)} in "
                             f"{text}: {failure}", where=call.where)
        if (error := call_numbers.exchange()) is not None:
            return error
        if call.limit_s and time.monotonic() - begin > call.limit_s:
            late = status_page.late()  # of the others, most wait as this one does
            return StalledError(
                "\n".join([f"rank {group.transport.rank} of {group.transport.size} has waited "
                           f"{call.limit_s} s for "
                           f"{ranks_text([r for r in others if r in late] or others)} in {text}, "
                           "or in one before", *status_page.rank_locations()]), where=call.where,
                hint="that rank hangs, computes for longer, or is in another call. All ranks must "
                "make this one; TESSERA_COMM_TIMEOUT is the limit in seconds; 0 waits forever")
        time.sleep(POLL_S)
    status_page.wait_on_gpu("")
    return None


__all__ = ["SentCall", "look", "sent"]
