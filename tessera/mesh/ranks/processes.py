"""Ranks that are processes: their messages in frames, on the raw bytes of MPI or of sockets.

A message is a frame, its header with up to INLINE_BYTES of its bytes, and a body with all of them
when there are more. A receiver always has room for a frame; it asks for the body once the header
says that it is the right one and how long it is. So nothing is written beside a buffer, and nothing
is taken for something else.

Waiting polls and sleeps: ranks that share a core give it to the one that has work, and a rank that
does not come is noticed. At its end a rank tells the others, so that those which wait for it do not
wait on.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera import config
from tessera.config import available_cpus

from ...lazy_dataclass import dataclass
from ..errors import MeshError, StalledError
from . import status_page
from .abort import leaves_well, stop_with
from .envelope import HEADER_BYTES, MessageLabel, disagreement, pack, ranks_text, unpack
from .idle_ranks import IdleRanks
from .transport import MAX_TAG, Receive, Request, Transport
from .wire import ProcessWire, WireBatch

INLINE_BYTES = 4096  # above, a copy into the frame costs more than a second message
_FRAME_BYTES = HEADER_BYTES + INLINE_BYTES
_END_TAG = 2 * MAX_TAG + 4  # at most wire.MAX_TAG
_TOLD_TAG = _END_TAG - 1
_GRACE_S = 1.0  # for messages of a rank that has ended, which may come after the word of its end
_END_POLL_S = 5e-3


@dataclass(frozen=True)
class Polling:
    """How a rank waits: polls that give up the core, then sleeps that grow up to the longest."""

    spins: int
    first_s: float
    longest_s: float

    def sleep(self, polls: int, before: float) -> float:
        """The sleep after so many polls, of which the last slept `before` seconds."""
        if polls <= self.spins:
            return 0.0
        return min(self.longest_s, max(self.first_s, before * 1.25))


# Ranks with a core each answer at once. Of many on a core, those that wait must not take it from
# those that compute; longer sleeps than these delay large messages, which take several polls of
# both sides: with 10 ms a step of examples/train.py --mesh dp=1,tp=9,pp=2 under MPICH on 2 cores
# took 10.5 s, with 2 ms 3.6 s (2026-11-21).
OWN_CORE = Polling(spins=50, first_s=2e-5, longest_s=1e-3)
SHARED_CORE = Polling(spins=0, first_s=5e-5, longest_s=2e-3)


# --- messages -----------------------------------------------------------------------------------
class ProcessSend(Request):
    """A frame, and perhaps a body, on their way; their memory lives until they are done."""

    def __init__(self, here: ProcessTransport, to: int, tag: int, label: MessageLabel,
                 data: np.ndarray):
        self.here, self.peer, self.label = here, to, label
        number, data = here.count_sent(to, tag), np.ascontiguousarray(data)
        head, inline = pack(label, number, data.size), data.size <= INLINE_BYTES
        self.memory = [head + data.tobytes() if inline else head, data]
        self.raw = [here.wire.send(self.memory[0], to, _frame_tag(tag))]
        if not inline:
            self.raw.append(here.wire.send(data, to, _frame_tag(tag) + 1))

    def done(self) -> bool:
        if self.raw and self.here.wire.all_done(self.raw):
            self.raw = []
        return not self.raw

    def wait(self) -> None:
        self.here.finish([self], self.label)


class ProcessReceive(Receive):
    """A frame, and perhaps a body, that are to come."""

    here: ProcessTransport

    def __init__(self, here: ProcessTransport, source: int, tag: int, label: MessageLabel,
                 buffer: np.ndarray | None, compare: bool):
        super().__init__(here, source, tag, label, buffer, compare)
        self.peer, self.frame = source, np.empty(_FRAME_BYTES, np.uint8)
        self.arrived: int | None = None  # the bytes of the frame
        self.raw = [here.wire.receive(self.frame, source, _frame_tag(tag))]

    def open(self) -> None:
        """Once the frame has arrived, and those before it are open: check it, take its bytes or
        ask for the body."""
        assert self.arrived is not None
        frame = self.frame.data[:self.arrived]
        try:
            header, at = unpack(frame, self.source)
        except MeshError as error:
            self.here.broken = error
            raise
        self.accept(header)
        assert self.buffer is not None
        if header.length > INLINE_BYTES:
            self.raw = [self.here.wire.receive(self.buffer, self.source,
                                                _frame_tag(self.tag) + 1)]
        elif len(frame) - at == header.length:
            self.buffer[:] = np.frombuffer(frame[at:], np.uint8)
        else:
            raise MeshError(f"rank {self.source} has sent {len(frame) - at} bytes and announced "
                            f"{header.length}, in {header.text}")

    def done(self) -> bool:
        self.here.progress([self, *self.here.before(self)])
        return not self.raw

    def wait(self) -> None:
        self.here.finish([self], self.label)


class ProcessTransport(Transport):
    """This process among those of a launcher."""

    processes = True

    def __init__(self, wire: ProcessWire) -> None:
        super().__init__()
        self.wire, self.name, self.rank, self.size = wire, wire.name, wire.rank, wire.size
        self._polling = OWN_CORE if wire.here <= available_cpus() else SHARED_CORE
        status_page.join(wire)
        # By rank and tag, in the order in which they were asked for.
        self._closed: dict[tuple[int, int], deque[ProcessReceive]] = defaultdict(deque)
        self._ended: dict[int, int] = {}  # by rank that has said so: the messages it has sent us
        self._left: dict[int, Any] = {}  # and see plain_operands.py
        self._aside, self._telling = threading.Lock(), list[tuple[Any, bytes]]()
        self.may_tell = wire.any_thread
        self._usual_s = 0.0  # of a wait, while in something of ours that takes longer
        self._thread = threading.RLock()
        self._user: MessageLabel | None = None  # the outermost call of the thread that has it
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forget)

    def begin_send(self, to: int, data: np.ndarray, tag: int, label: MessageLabel) -> Request:
        return ProcessSend(self, to, tag, label, data)

    def begin_receive(self, source: int, tag: int, label: MessageLabel, buffer: np.ndarray | None,
                      compare: bool) -> Receive:
        begun = ProcessReceive(self, source, tag, label, buffer, compare)
        self._closed[source, tag].append(begun)
        return begun

    def note(self, label: MessageLabel) -> None:
        status_page.note(str(label))

    def tell(self, to: int, data: bytes) -> None:
        with self._aside:
            if not self.wire.closed():
                self._telling = [t for t in self._telling if not self.wire.all_done([t[0]])]
                self._telling.append((self.wire.send(data, to, _TOLD_TAG), data))

    def told(self) -> list[bytes]:
        found = []
        with self._aside:  # another thread may not take what this one has seen
            while not self.wire.closed() and (
                    at := self.wire.probe(None, _TOLD_TAG)) is not None:
                found.append(self.wire.take(at).tobytes())
        return found

    # --- progress -------------------------------------------------------------------------------
    def before(self, request: ProcessReceive) -> list[ProcessReceive]:
        """The receives of its channel that have begun earlier and are not open: they come first."""
        channel = self._closed[request.source, request.tag]
        return list(channel)[:channel.index(request)] if request in channel else []

    def progress(self, requests: Sequence[Any]) -> None:
        """Look once at what has come."""
        self._take(*self._pending(requests))

    def _pending(self, requests: Sequence[Any]) -> tuple[WireBatch, list[tuple[Any, Any]]]:
        """The wire's requests of these, each with the one of ours that it belongs to."""
        raw = [(r, own) for r in requests for own in r.raw]
        return self.wire.batch([own for _, own in raw]), raw

    def _take(self, batch: WireBatch, raw: list[tuple[Any, Any]]) -> bool:
        """Look once at the wire's requests; whether something has come. They are then to be asked
        for anew."""
        changed: dict[int, Any] = {}
        for at, nbytes in batch.arrived():
            owner, done = raw[at]
            changed[id(owner)] = owner
            owner.raw = [r for r in owner.raw if r is not done]
            if isinstance(owner, ProcessReceive) and owner.header is None:
                owner.arrived = nbytes
        for owner in changed.values():
            if isinstance(owner, ProcessReceive) and owner.header is None:
                self._open(owner.source, owner.tag)
        return bool(changed)

    def _open(self, source: int, tag: int) -> None:
        """Open the frames that have come, in the order in which they were asked for."""
        channel = self._closed[source, tag]
        while channel and channel[0].arrived is not None:
            channel.popleft().open()

    def finish(self, requests: Sequence[Any], label: MessageLabel) -> None:
        """Until all are done. Raises StalledError after config.comm_timeout seconds, and for a rank
        that has ended."""
        with self.one_thread(label):
            waiting = [r for r in requests if r.raw or _is_closed(r)]
            for request in list(waiting):
                if isinstance(request, ProcessReceive):
                    waiting += [r for r in self.before(request) if r not in waiting]
            status_page.enter(label.text)
            try:
                self._poll(waiting, label)
            except BaseException as error:  # Ctrl-C too: what is on its way stays there
                self.broken = self.broken or (error if isinstance(error, MeshError) else MeshError(
                    f"{label.text} was interrupted by {type(error).__name__}"))
                raise
            status_page.resume()

    @contextmanager
    def long_act(self, usual_s: float) -> Iterator[None]:
        """While it lasts others wait for this rank longer than usual_s, and it for others; not for
        those that do nothing."""
        outer, self._usual_s = self._usual_s, self._usual_s or usual_s
        try:
            with status_page.long_act():
                yield
        finally:
            self._usual_s = outer

    def _poll(self, waiting: list[Any], label: MessageLabel) -> None:
        begin, sleep, polls, ended = time.monotonic(), 0.0, 0, 0.0
        idle = IdleRanks(self._usual_s, begin) if self._usual_s else None
        pending = self._pending(waiting)
        while waiting:
            if self._take(*pending):
                waiting = [r for r in waiting if r.raw or _is_closed(r)]
                pending = self._pending(waiting)
                continue
            polls += 1
            sleep = self._polling.sleep(polls, sleep)
            self.wire.pause(sleep)
            now, limit = time.monotonic(), config.comm_timeout
            if polls % 16 == 0 and self._hear_ends() & {r.peer for r in waiting}:
                ended = ended or now
                if now - ended > _GRACE_S:
                    raise self._ended_error(waiting, label)
            if limit and now - begin > limit:
                raise self._stalled(waiting, label, limit)
            if idle and (ranks := idle.look(now, (r.peer for r in waiting))):
                raise self._idle_error(ranks, label, now - begin)

    @contextmanager
    def one_thread(self, label: MessageLabel) -> Iterator[None]:
        if not self._thread.acquire(blocking=False):
            raise MeshError(f"two threads of rank {self.rank} communicate at the same time: one in "
                            f"{self._user or 'another call'}, one in {label}",
                            where=label.where, hint="let one thread make all calls that "
                            "communicate, or make them one after another in an order that is the "
                            "same on all ranks")
        outer = self._user
        try:
            self._user = outer or label
            yield
        finally:
            self._user = outer
            self._thread.release()

    # --- ranks that do not come -----------------------------------------------------------------
    def _stalled(self, waiting: Sequence[Any], label: MessageLabel, limit: int) -> StalledError:
        late = sorted({r.peer for r in waiting})
        return StalledError(
            "\n".join([f"rank {self.rank} of {self.size} has waited {limit} s for "
                       f"{ranks_text(late)} in {label.text}", *status_page.rank_locations()]),
            where=label.where,
            hint="that rank hangs, computes for longer, or is in another call. All ranks must make "
            "this one; TESSERA_COMM_TIMEOUT is the limit in seconds; 0 waits forever")

    def _idle_error(self, ranks: Sequence[int], label: MessageLabel, waited: float
                    ) -> StalledError:
        several = len(ranks) > 1
        return StalledError(
            "\n".join([f"rank {self.rank} of {self.size} has waited {waited:.0f} s for "
                       f"{ranks_text(ranks)} in {label.text}; {'they are' if several else 'it is'} "
                       f"in no call of ours and {'have' if several else 'has'} used no core for "
                       f"{self._usual_s:.0f} s", *status_page.rank_locations()]), where=label.where,
            hint="that rank hangs or waits for something else. All ranks must make this call; "
            "TESSERA_COMM_TIMEOUT is the limit in seconds; 0 waits forever")

    def _ended_error(self, waiting: Sequence[Any], label: MessageLabel) -> StalledError:
        gone = sorted({r.peer for r in waiting} & self._ended.keys())
        return StalledError(
            f"rank {self.rank} of {self.size} waits for {ranks_text(gone)} in {label.text}, and "
            f"{ranks_text(gone)} {'have' if len(gone) > 1 else 'has'} ended the program",
            where=label.where, hint="all ranks must make this call; look for a branch that depends "
            "on the rank, or for a rank that has fewer batches")

    # --- the end --------------------------------------------------------------------------------
    def _hear_ends(self) -> set[int]:
        """The ranks that have said that they end."""
        while (found := self.wire.probe(None, _END_TAG)) is not None:
            data = self.wire.take(found)
            self._ended[found[0]] = int(data[:8].view(np.int64)[0])
            self._left[found[0]] = json.loads(data[8:].tobytes())
        return set(self._ended)

    def _leave(self) -> None:
        """At the end of this process: say so, and wait for the others, as MPI would. What has come
        and was never asked for is a call that this rank did not make."""
        if self.wire.closed() or not leaves_well():
            return
        if self.broken is not None:
            stop_with(self.broken)
        status_page.end()
        numbers = sys.modules.get("tessera.mesh.ranks.call_numbers")
        if numbers is not None:
            numbers.tell(self, True)
        others = [r for r in range(self.size) if r != self.rank]
        sent = {r: sum(n for (to, _), n in self._sent.items() if to == r) for r in others}
        operands = sys.modules.get("tessera.mesh.sharding.plain_operands")
        self._left[self.rank] = operands.left_at_end(self) if operands else {}
        left = np.frombuffer(json.dumps(self._left[self.rank]).encode(), np.uint8)
        counts = {r: np.concatenate([np.array([n], np.int64).view(np.uint8), left])
                  for r, n in sent.items()}
        going = [self.wire.send(counts[r], r, _END_TAG) for r in others]
        while len(self._hear_ends()) < len(others) or not self.wire.all_done(going):
            time.sleep(_END_POLL_S)
        if numbers is not None and (error := numbers.look(self, True)) is not None:
            stop_with(error)
        if operands and (error := operands.error_at_end([self._left[r] for r in range(self.size)])):
            stop_with(error)
        self._aside.acquire()  # the wire ends: no thread tells anything any more
        for source in others:
            if self._ended[source] > sum(n for (r, _), n in self._received.items() if r == source):
                stop_with(self._unasked(source))
        self.wire.close()

    def _unasked(self, source: int) -> MeshError:
        """The error of a message that this rank, at its end, has never asked for."""
        text, begin = "something", time.monotonic()
        while time.monotonic() - begin < _GRACE_S:
            if (found := self.wire.probe(source, None)) is not None:
                text = unpack(self.wire.take(found).data, source)[0].text
                break
            time.sleep(_END_POLL_S)
        return disagreement(
            f"rank {self.rank} has ended the program, and never received what rank {source} has "
            "sent it", [(source, text, b""), (self.rank, "has ended the program", b"")], None)

    def _forget(self) -> None:
        """A child that is forked is no rank: what it sent would be taken for ours."""
        self.forked = True
        atexit.unregister(self._leave)
        self.wire.forget()


def _is_closed(request: Any) -> bool:
    return isinstance(request, ProcessReceive) and request.header is None


def _frame_tag(tag: int) -> int:
    """The wire's tag of the frames of a tag; their bodies have the next."""
    return 2 * (tag + 1)
