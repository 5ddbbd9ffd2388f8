"""All ranks in one process: one thread each, of which exactly one runs at a time.

A rank runs until it waits for a message that is not there; then the next rank that can go on does,
in the order of their numbers. So a run is the same every time, ranks share no state at the same
moment, and a program in which everybody waits is found at once instead of hanging.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera import config
from tessera.errors import SourceLine, TesseraError, user_line

from ...lazy_dataclass import dataclass
from ..errors import StalledError, StoppedError
from .envelope import Header, MessageLabel, disagreement
from .transport import Receive, Request, Transport

_LIBRARY = (os.path.dirname(threading.__file__) + os.sep, "<frozen ")


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for."""

    source: int
    label: MessageLabel
    tag: int

    def __str__(self) -> str:
        return f"waits for rank {self.source} in {self.label}"


@dataclass(frozen=True)
class Message:
    """One that nobody has taken yet."""

    header: Header
    data: np.ndarray


class LocalWorld:
    """The ranks of one simulation: their messages, whose turn it is, and the first failure."""

    def __init__(self, size: int):
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.mail: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)  # from,
        # to, tag; so are the receives that have begun
        self.begun: dict[tuple[int, int, int], deque[LocalReceive]] = defaultdict(deque)
        self.asides: list[list[bytes]] = [[] for _ in range(size)]  # what each is told
        self.waiting: list[Waiting | None] = [None] * size
        self.done = [False] * size
        self.failure: tuple[int | None, BaseException] | None = None  # of which rank
        self.over = threading.Event()
        self.running, self.switches = 0, 0
        self.threads: list[threading.Thread] = []

    def fail(self, rank: int | None, error: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, error)

    def ready(self, rank: int) -> bool:
        """Whether a rank can go on; one that waits goes on to be stopped after a failure."""
        if self.done[rank]:
            return False
        wait = self.waiting[rank]
        return wait is None or self.failure is not None or bool(
            self.mail[wait.source, rank, wait.tag])

    def hand_over(self, rank: int) -> None:
        """Let the next rank after `rank` run; when none can, everybody waits for nothing."""
        for other in [(rank + k) % self.size for k in range(1, self.size + 1)]:
            if self.ready(other):
                self.running, self.switches = other, self.switches + 1
                self.turns[other].release()
                return
        if all(self.done):
            self.need_no_mail()
            self.over.set()
            return
        self.fail(None, self.deadlock())
        self.hand_over(rank)

    def need_no_mail(self) -> None:
        """At the end: what was sent and never received is what only some ranks have called."""
        for (source, to, _), messages in self.mail.items():
            if messages and self.failure is None:
                self.fail(None, disagreement(
                    f"rank {to} has returned, and never received what rank {source} has sent it",
                    [(source, messages[0].header.text, b""), (to, "has returned", b"")], None))

    def deadlock(self) -> StalledError:
        states = [f"  rank {r} " + ("has returned" if self.done[r] else str(self.waiting[r]))
                  for r in range(self.size)]
        first = next(r for r in range(self.size) if not self.done[r])
        wait = self.waiting[first]
        return StalledError("every rank waits for another:\n" + "\n".join(states),
                            where=wait.label.where if wait else None,
                            hint="all ranks of an axis must call the same collectives, in one "
                            "order; look for a branch that depends on the rank")

    def line_of(self, rank: int) -> SourceLine | None:
        """The user's line at which a rank is now, below which Python's own library may run."""
        frame = sys._current_frames().get(self.threads[rank].ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
            frame = frame.f_back
        return user_line(frame) if frame is not None else None

    def take(self, rank: int, source: int, label: MessageLabel, tag: int) -> Message:
        """The next message from `source` to `rank`."""
        while not self.mail[source, rank, tag]:
            self.stop_if_failed(rank)
            self.waiting[rank] = Waiting(source, label, tag)
            self.hand_over(rank)
            self.turns[rank].acquire()
            self.waiting[rank] = None
        self.stop_if_failed(rank)
        return self.mail[source, rank, tag].popleft()

    def stop_if_failed(self, rank: int) -> None:
        if self.failure is not None:
            who, error = self.failure
            name = "the ranks stopped" if who is None else f"rank {who} failed"
            raise StoppedError(f"rank {rank} stops because {name}: {type(error).__name__}: {error}")


class LocalTransport(Transport):
    """One simulated rank."""

    name = "local"

    def __init__(self, world: LocalWorld, rank: int):
        super().__init__()
        self.world, self.rank, self.size = world, rank, world.size

    def begin_send(self, to: int, data: np.ndarray, tag: int, label: MessageLabel) -> Request:
        self.world.stop_if_failed(self.rank)
        header = Header(self.count_sent(to, tag), data.size, label.digest, label.shape, str(label))
        self.world.mail[self.rank, to, tag].append(Message(header, data.copy()))
        return LocalSend()

    def begin_receive(self, source: int, tag: int, label: MessageLabel, buffer: np.ndarray | None,
                      compare: bool) -> LocalReceive:
        begun = LocalReceive(self, source, tag, label, buffer, compare)
        self.world.begun[source, self.rank, tag].append(begun)
        return begun

    def tell(self, to: int, data: bytes) -> None:
        self.world.asides[to].append(data)

    def told(self) -> list[bytes]:
        found, self.world.asides[self.rank] = self.world.asides[self.rank], []
        return found


class LocalSend(Request):
    """A message that lies in the mail already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class LocalReceive(Receive):
    """A receive that has begun; those of one source and tag are filled in the order of begin."""

    here: LocalTransport
    filled = False

    def done(self) -> bool:
        while not self.filled and self.here.world.mail[self.source, self.here.rank, self.tag]:
            self._fill_next()
        return self.filled

    def wait(self) -> None:
        while not self.filled:
            self._fill_next()

    def _fill_next(self) -> None:
        me, world = self.here.rank, self.here.world
        first = world.begun[self.source, me, self.tag].popleft()
        message = world.take(me, first.source, first.label, first.tag)
        first.accept(message.header)
        assert first.buffer is not None
        first.buffer[:] = message.data
        first.filled = True


def run_ranks(size: int, program: Callable[[Transport], Any]) -> list[Any]:
    """program(transport) on every rank of a simulation of `size`; their results by rank.

    The first rank that raises stops the others; its error is raised here, with a note that names
    the rank. Raises StalledError when a rank runs for longer than config.comm_timeout between two
    communications.
    """
    world, results = LocalWorld(size), [None] * size
    ranks = [LocalTransport(world, rank) for rank in range(size)]

    def body(rank: int) -> None:
        world.turns[rank].acquire()
        try:
            if world.failure is None:
                results[rank] = program(ranks[rank])
        except StoppedError:
            pass  # the failure it stops for is raised below
        except BaseException as error:  # handed to the caller's thread
            world.fail(rank, error)
        finally:
            world.done[rank] = True
            world.hand_over(rank)

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(body, rank),
                                name=f"rank {rank}", daemon=True) for rank in range(size)]
    world.threads = threads
    for thread in threads:
        thread.start()
    world.turns[0].release()
    _wait(world)
    for thread in threads if world.over.is_set() else ():
        thread.join()
    operands = sys.modules.get("tessera.mesh.sharding.plain_operands")
    if world.failure is None and operands is not None and (
            error := operands.error_at_end([operands.left_at_end(here) for here in ranks])):
        raise error
    if world.failure is not None:
        who, error = world.failure
        if isinstance(error, TesseraError) and error.where is None:
            error.where = user_line()  # its thread had frames of ours alone
        if who is not None:
            error.add_note(f"raised on rank {who} of {size}; the other ranks were stopped")
        raise error
    return results


def _wait(world: LocalWorld) -> None:
    """Until all ranks are done. A rank that neither communicates nor ends is left behind."""
    seen = -1
    while not world.over.wait(config.comm_timeout or None):
        if world.switches != seen:
            seen = world.switches
            continue
        rank = world.running
        error = StalledError(
            f"rank {rank} of {world.size} has not communicated for {config.comm_timeout} s",
            where=world.line_of(rank),
            hint="TESSERA_COMM_TIMEOUT is how long a rank may compute between two collectives; 0 "
            "waits forever")
        world.fail(None, error)
        for turn in (world.turns[r] for r in range(world.size) if world.waiting[r]):
            turn.release()
        return
