"""The process that says which rank of this machine was killed: run as a file by status_page.py.

    python -I -S watcher.py LISTENER TERMINAL...     file descriptors

SIGKILL lets a rank say nothing, and MPICH's mpirun kills the others at once and names a process
that need not be the first. This process is none of mpirun's: it outlives them by milliseconds. Each
rank holds a connection to it, which the kernel closes with the rank, and writes what it does to a
page of memory that both have. It ends with the ranks.

One for each machine, 5 MB: it imports nothing of this package and little else.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import sys

# A rank's page: its state, how many acts of ours it is in that take long, such as compiling, and
# three texts that end with a zero. GPU: what does not arrive there.
STATE, LONG, CALL, WHAT, GPU, TEXT_BYTES = 0, 1, 512, 1024, 1536, 512
PAGE_BYTES = GPU + TEXT_BYTES
COMPUTES, WAITS, LEFT, SAID = range(4)  # LEFT: it ends well. SAID: it stops all, and has said why

# What a rank may ask: where the others are, which of them do not wait on their GPU, how much of a
# core those have used that are in nothing of ours, and whether it is the first that fails. The
# answer is text, after its length.
ASK, LATE, TICKS, CLAIM, LENGTH = b"?", b"<", b"~", b"!", 4

_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # launchers pass them on to all
_IN_LIBRARIES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_END = "the end of its program"
_CHECKPOINT = "checkpoints that were complete are whole"
_LINES = 6


class Rank:
    """A rank of this machine. No dataclass: importing those takes 2 MB more."""

    def __init__(self, rank: int, size: int, pid: int, page: mmap.mmap, link: socket.socket):
        self.rank, self.size, self.pid, self.page, self.link = rank, size, pid, page, link

    @property
    def state(self) -> int:
        return self.page[STATE]

    def let_go(self) -> None:
        """It has waited until we watch it."""
        try:
            self.link.send(b"!")
        except BrokenPipeError:  # it is gone: that comes next
            pass

    def answer(self, text: str) -> None:
        data = text.encode()
        try:
            self.link.sendall(len(data).to_bytes(LENGTH, "little") + data)
        except OSError:  # it is gone: that comes next
            pass

    def text(self, start: int) -> str:
        return self.page[start:start + TEXT_BYTES].split(b"\0", 1)[0].decode(errors="replace")

    def place(self) -> str:
        """`in` what it waits, or `after` which call it computes, with the user's line."""
        call, what = self.text(CALL), self.text(WHAT)
        if self.state == SAID:
            return f"has failed: {what}"
        if self.state == LEFT or what == _END:
            return "has ended the program"
        if gpu := self.text(GPU):
            return f"on its GPU in {gpu}"
        if self.state != WAITS:
            return f"after {call or what}" if what else "before its first collective"
        return f"in {call if call.startswith(what) else f'{what}, after {call}' if call else what}"

    def wait_status(self) -> int | None:
        """As of waitpid, also while it is ending: 0 of a rank that lives, None of one whose parent
        has seen it end."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return int(file.read().split()[-1])
        except OSError:
            return None


def accept(listener: socket.socket) -> Rank | None:
    """The next rank, None for another user's process and for one that ended as it called."""
    link, _ = listener.accept()
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    hello, files, _, _ = socket.recv_fds(link, 64, 1) if user == os.getuid() else (b"", [], 0, 0)
    if not files:
        return None
    rank, size = map(int, hello.split())
    page = mmap.mmap(files[0], PAGE_BYTES, prot=mmap.PROT_READ)
    os.close(files[0])
    return Rank(rank, size, pid, page, link)


def find_killed(listener: socket.socket) -> tuple[Rank, list[Rank]] | None:
    """The first rank that is gone without a word, and the others; None when all have ended well,
    or one has said why it stops all."""
    ready, known, here, claimed = select.epoll(), [], {}, False
    ready.register(listener.fileno(), select.EPOLLIN)
    while True:
        for number, _ in ready.poll():  # in the order in which it happened: the kernel has a queue
            if number == listener.fileno():
                new = accept(listener)
                if new is not None:
                    known.append(new)
                    here[new.link.fileno()] = new
                    ready.register(new.link.fileno(), select.EPOLLIN)
                    new.let_go()
                continue
            question = _question(here[number])
            if question:
                who = here[number]
                others = [r for r in known if r is not who]
                who.answer(_listed_places(others) if question == ASK else
                           _late(others) if question == LATE else
                           _ticks(others) if question == TICKS else
                           "later" if claimed else "first")
                claimed = claimed or question == CLAIM
                continue
            gone = here.pop(number)
            ready.unregister(number)
            if any(r.state == SAID for r in known):
                return None
            if gone.state != LEFT:
                return gone, [r for r in known if r is not gone]
            if not here:
                return None


def _late(others: list[Rank]) -> str:
    """Those for whom others may wait on their GPUs: they do not wait there themselves."""
    return " ".join(str(r.rank) for r in others if r.state != SAID and not r.text(GPU))


def _ticks(others: list[Rank]) -> str:
    """Of those that are in the user's program: the rank, and what it and its children have used of
    the cores, in ticks of the clock."""
    used, below = dict[int, int](), dict[int, list[int]]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        used[int(name)] = sum(map(int, fields[11:15]))
        below.setdefault(int(fields[1]), []).append(int(name))
    found = []
    for rank in others:
        if rank.state == COMPUTES and not rank.page[LONG] and rank.pid in used:
            tree = [rank.pid]
            for pid in tree:  # as it grows
                tree += below.get(pid, ())
            found.append(f"{rank.rank} {sum(used.get(pid, 0) for pid in tree)}")
    return " ".join(found)


def _question(rank: Rank) -> bytes:
    """What a rank asks; nothing when it is gone."""
    try:
        return rank.link.recv(1)
    except OSError:
        return b""


def is_the_cause(gone: Rank, others: list[Rank], status: int | None) -> bool:
    """Whether the others end, if they do, because this rank was killed, for all we can see."""
    if (status is None or status in _FROM_OUTSIDE) and \
            any(r.wait_status() in _FROM_OUTSIDE for r in others):
        return False  # sent to all, by mpirun: it was asked to stop
    if len(others) + 1 == gone.size:
        return True
    # Of several machines, those where nothing happened see all their ranks killed at once.
    return any(r.wait_status() == 0 for r in others)


def describe(gone: Rank, others: list[Rank], status: int | None) -> str:
    host = os.uname().nodename
    lines = [f"tessera: rank {gone.rank} of {gone.size} (pid {gone.pid} on {host}) "
             f"{_end(status)} {gone.place()}"]
    places = _listed_places([r for r in others if r.state != LEFT])
    return "\n".join([*lines, *places.splitlines(), f"  hint: {_hint(status)}", ""])


def _listed_places(others: list[Rank]) -> str:
    """A line for each place where some of the others are."""
    places: dict[str, list[int]] = {}
    for rank in sorted(others, key=lambda r: r.rank):
        places.setdefault(rank.place(), []).append(rank.rank)
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {place}"
             for place, ranks in list(places.items())[:_LINES]]
    if len(places) > _LINES:
        lines.append(f"  and {len(places) - _LINES} more places")
    return "\n".join(lines)


def _listed(ranks: list[int]) -> str:
    """0-2, 4: ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _end(status: int | None) -> str:
    if status is None:
        return "was killed, or has left by os._exit,"
    number = os.waitstatus_to_exitcode(status)
    if number < 0:
        return f"was killed by signal {-number} ({signal.strsignal(-number)})"
    return f"has left Python with status {number}, by no exception and no sys.exit,"


def _hint(status: int | None) -> str:
    number = 0 if status is None else -os.waitstatus_to_exitcode(status)
    if number in _IN_LIBRARIES:
        return f"a fault in native code: PYTHONFAULTHANDLER=1 shows where; {_CHECKPOINT}"
    if number == signal.SIGKILL or status is None:
        return ("most often the machine was out of memory (dmesg tells), else a scheduler or a "
                f"user did it; {_CHECKPOINT}")
    return _CHECKPOINT


def main(listener: int, *terminals: int) -> None:
    found = find_killed(socket.socket(fileno=listener))
    if found is None:
        return
    gone, others = found
    status = gone.wait_status()
    if not is_the_cause(gone, others, status):
        return
    text = describe(gone, others, status).encode()
    for terminal in terminals:
        try:
            os.write(terminal, text)
        except OSError:  # mpirun itself is gone: there is nobody to tell
            pass


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # mpirun waits for us
