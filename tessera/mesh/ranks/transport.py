"""What carries bytes between ranks: one small interface.

A transport is a rank, a size, and `exchange`: all sends and receives of one step at once, so that
no order of them can block. Collectives are written on it once (collectives/record.py), and give
the same bits on every transport. `isend` and `irecv` begin a message between two ranks and return
at once; a pipeline moves its activations by them while it computes.

Every message carries a MessageLabel (envelope.py), which its receiver compares with its own
before it uses the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from ..errors import MeshError
from .envelope import Header, MessageLabel, check, raise_broken, raise_forked

EXCHANGE = -1  # the tag of what is not sent by isend
MAX_TAG = 16381


class Request(ABC):
    """A message on its way: what isend and irecv return."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has arrived, or its bytes may be overwritten. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Return when done. Raises what `exchange` raises."""


class Receive(Request):
    """A message that is to come.

    buffer: for its bytes, of their number; None for a message of any length
    compare: whether it must be of the same label; else its header is for who asked
    """

    header: Header | None = None

    def __init__(self, here: Transport, source: int, tag: int, label: MessageLabel,
                 buffer: np.ndarray | None, compare: bool):
        self.here, self.source, self.tag, self.label = here, source, tag, label
        self.buffer, self.compare = buffer, compare

    def accept(self, got: Header) -> None:
        """Check the header; afterwards `buffer` has room for the bytes. Raises what is wrong, and
        then nobody communicates here any more."""
        number = self.here.count_received(self.source, self.tag)
        if self.compare:
            expected = None if self.buffer is None else self.buffer.size
            try:
                check(got, self.label, number, self.here.rank, self.source, expected)
            except MeshError as error:
                self.here.broken = error
                raise
        self.header = got
        if self.buffer is None:
            self.buffer = np.empty(got.length, np.uint8)


class Transport(ABC):
    """A rank among `size`. Buffers are contiguous uint8 arrays."""

    name: str
    rank: int
    size: int
    processes = False  # whether its ranks are processes of a launcher, which may have a GPU each
    broken: MeshError | None = None  # after which no message can be trusted
    may_tell = True  # whether any thread may call `tell` and `told`
    forked = False  # whether this process is a child of the rank

    def long_act(self, usual_s: float) -> AbstractContextManager[None]:
        """Something of ours in which ranks wait for each other longer than usual_s."""
        return nullcontext()

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], int] = {}  # messages so far, by rank and tag
        self._received: dict[tuple[int, int], int] = {}

    # --- what a transport does ------------------------------------------------------------------
    @abstractmethod
    def begin_send(self, to: int, data: np.ndarray, tag: int, label: MessageLabel) -> Request:
        """Begin to send a header and these bytes."""

    @abstractmethod
    def begin_receive(self, source: int, tag: int, label: MessageLabel, buffer: np.ndarray | None,
                      compare: bool) -> Receive:
        """Begin to receive the next message of a tag."""

    def finish(self, requests: Sequence[Request], label: MessageLabel) -> None:
        """Wait until all are done."""
        for request in requests:
            request.wait()

    def one_thread(self, label: MessageLabel) -> AbstractContextManager[None]:
        """A call of several messages, within which no other thread of this rank may send: which
        thread comes first differs between ranks. Raises MeshError in a second thread."""
        return nullcontext()

    def note(self, label: MessageLabel) -> None:  # noqa: B027  most have nobody to tell
        """The call that the next messages belong to, for what is said of a rank that is killed."""

    def tell(self, to: int, data: bytes) -> None:
        """Send a rank what it looks at when it has time: from any thread, and nobody waits."""
        raise AssertionError(f"rank {to} is told nothing by {self.name}")

    def told(self) -> list[bytes]:
        """What other ranks have told since it was asked last."""
        return []

    # --- what its users call --------------------------------------------------------------------
    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray],
                 label: MessageLabel) -> None:
        """Send each array to its rank and fill each buffer from its rank; returns when all is done.

        Messages between two ranks arrive in the order in which they were sent. Raises StalledError
        when a rank does not come, DisagreementError when it does something else, StoppedError when
        another one failed.
        """
        self._ready((*receives, *sends), label)
        with self.one_thread(label):
            coming = [self.begin_receive(r, EXCHANGE, label, b, True) for r, b in receives.items()]
            going = [self.begin_send(r, d, EXCHANGE, label) for r, d in sends.items()]
            self.finish([*coming, *going], label)

    def meet(self, ranks: Iterable[int], label: MessageLabel) -> dict[int, Header]:
        """What each of these ranks does now, once all of them do something: headers, which are not
        compared. Nothing else is sent."""
        ranks, nothing = list(ranks), np.empty(0, np.uint8)
        self._ready(ranks, label)
        with self.one_thread(label):
            coming = [self.begin_receive(r, EXCHANGE, label, None, False) for r in ranks]
            going = [self.begin_send(r, nothing, EXCHANGE, label) for r in ranks]
            self.finish([*coming, *going], label)
        found = {c.source: c.header for c in coming if c.header is not None}
        if any(h.length for h in found.values()):
            self.broken = MeshError("a rank has sent data where calls are compared")
        return found

    def send(self, to: int, data: np.ndarray, label: MessageLabel) -> None:
        """Send bytes to a rank."""
        self.exchange({to: data}, {}, label)

    def take(self, source: int, label: MessageLabel) -> np.ndarray:
        """The bytes that a rank sends, as many as they are."""
        self._ready((source,), label)
        with self.one_thread(label):
            coming = self.begin_receive(source, EXCHANGE, label, None, True)
            self.finish([coming], label)
        assert coming.buffer is not None
        return coming.buffer

    def isend(self, to: int, data: np.ndarray, tag: int, label: MessageLabel) -> Request:
        """Begin to send bytes, which stay as they are until the request is done.

        tag: 0 to MAX_TAG. Messages of one tag between two ranks arrive in the order in which they
        were sent; those of different tags, and those of `exchange`, do not wait for each other.
        """
        self._ready((to,))
        return self.begin_send(to, np.ascontiguousarray(data), tag, label)

    def irecv(self, source: int, buffer: np.ndarray | None, tag: int,
              label: MessageLabel) -> Receive:
        """Begin to receive: `buffer` of the request holds the message when it is done."""
        self._ready((source,))
        return self.begin_receive(source, tag, label, buffer, True)

    # --- for transports -------------------------------------------------------------------------
    def count_sent(self, to: int, tag: int) -> int:
        """The number of the message that is sent now: how many went before it."""
        number = self._sent.get((to, tag), 0)
        self._sent[to, tag] = number + 1
        return number

    def count_received(self, source: int, tag: int) -> int:
        number = self._received.get((source, tag), 0)
        self._received[source, tag] = number + 1
        return number

    def _ready(self, ranks: Iterable[int], label: MessageLabel | None = None) -> None:
        """Raise MeshError for a rank that is not there, or that is this one, and after an error
        that has left messages on their way."""
        if self.forked:
            raise_forked(self.rank)
        if self.broken is not None:
            raise_broken(self.rank, self.broken)
        for rank in ranks:
            if not 0 <= rank < self.size or rank == self.rank:
                raise MeshError(f"rank {self.rank} of {self.size} cannot exchange with rank {rank}")
        if label is not None:
            self.note(label)


class Single(Transport):
    """The transport of a program that runs alone: nobody to send to."""

    name, rank, size = "single", 0, 1

    def begin_send(self, to: int, data: np.ndarray, tag: int, label: MessageLabel) -> Request:
        raise AssertionError(f"rank {to} is none of one")

    def begin_receive(self, source: int, tag: int, label: MessageLabel, buffer: np.ndarray | None,
                      compare: bool) -> Receive:
        raise AssertionError(f"rank {source} is none of one")
