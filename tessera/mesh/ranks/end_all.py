"""Without mpirun nobody ends the ranks when one fails: here they do it themselves.

Each has a connection to rank 0, which the kernel closes with the process, and a thread that listens
to it. A rank that fails says so, one that ends well too; rank 0 passes it on. Where a connection
ends without a word, its rank was killed: after a while, in which the watcher of its machine says
which it was (watcher.py), all end.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

from . import status_page

_WORD = struct.Struct("<ci")  # what, exit status
_STOP, _WELL = b"s", b"w"
_GRACE_S = 2.0  # for who says why


class EndAll:
    """links: connections, of rank 0 to all others, of these to rank 0.  hosts: by rank."""

    def __init__(self, rank: int, links: dict[int, socket.socket], hosts: Sequence[str]):
        self.rank, self.links, self.hosts = rank, links, hosts
        self._open = dict(links)
        self._thread = threading.Thread(target=self._listen, name="tessera-ranks", daemon=True)
        self._thread.start()

    def stop(self, status: int) -> None:
        """End all, and then this one."""
        self._tell(_STOP, status)
        os._exit(status)

    def leave(self) -> None:
        """This rank ends well, as all do."""
        self._tell(_WELL, 0)

    def forget(self) -> None:
        """A child that is forked must not hold a connection open."""
        for link in self.links.values():
            link.close()

    def _tell(self, what: bytes, status: int) -> None:
        for link in self.links.values():
            try:
                link.sendall(_WORD.pack(what, status))
            except OSError:  # it has gone
                pass

    def _listen(self) -> None:
        by_number = {link.fileno(): rank for rank, link in self.links.items()}
        ready = select.poll()
        for number in by_number:
            ready.register(number, select.POLLIN)
        while self._open:
            for number, _ in ready.poll():
                rank = by_number[number]
                what, status = _word(self.links[rank])
                ready.unregister(number)
                del self._open[rank]
                if what != _WELL:
                    self._end(rank, what, status)

    def _end(self, rank: int, what: bytes, status: int) -> None:
        """Another rank has failed."""
        if what != _STOP:
            status = 1
            time.sleep(_GRACE_S)
            if self.hosts.count(self.hosts[rank]) == 1 and self.rank == (0 if rank else 1):
                print(f"tessera: rank {rank} of {len(self.hosts)} has ended without a word, on "
                      f"{self.hosts[rank]}; stopping all ranks", file=sys.stderr, flush=True)
        status_page.stop_all()  # it is no news for the watcher
        self.stop(status)


def _word(link: socket.socket) -> tuple[bytes, int]:
    """What a rank says; nothing when it is gone."""
    data = b""
    while len(data) < _WORD.size:
        try:
            more = link.recv(_WORD.size - len(data))
        except OSError:
            more = b""
        if not more:
            return b"", 0
        data += more
    what, status = _WORD.unpack(data)
    return what, status


__all__ = ["EndAll"]
