"""The wire of ranks that torchrun, srun or a shell has started: a socket between any two of them.

Messages go in the order in which they are sent, each behind its tag and length. What nobody has
asked for yet is kept. Nothing is read or written but when this process looks. Any thread may call.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera import config

from ..errors import MeshError
from .abort import end_by
from .end_all import EndAll
from .launcher import launched_rank, launched_size
from .rendezvous import join_world
from .waiting import never_started
from .wire import MAX_TAG, ProcessWire, WireBatch

_HEAD = struct.Struct("<iq")  # tag, bytes
_NAME_TAG = MAX_TAG  # of share_here
_PIECE_BYTES = 1 << 22  # read or written at a time, so that all peers get on


class TcpRequest:
    """A message on its way. data: of a send, to be kept; of a receive, where it goes."""

    __slots__ = ("data", "done", "nbytes")

    def __init__(self, data: Any):
        self.data, self.done, self.nbytes = data, False, 0


class Peer:
    """The socket to another rank, what is to be written there, and what comes."""

    def __init__(self, link: socket.socket):
        self.link = link
        self.gone = False
        self._out: deque[tuple[memoryview, TcpRequest | None]] = deque()
        self._asked: dict[int, deque[TcpRequest]] = defaultdict(deque)  # by tag
        self.kept: dict[int, deque[np.ndarray]] = defaultdict(deque)
        self._head, self._got = bytearray(_HEAD.size), 0
        self._tag = 0  # of the message that comes just now, whose head is there:
        self._body: np.ndarray | None = None
        self._request: TcpRequest | None = None

    # --- out ------------------------------------------------------------------------------------
    @property
    def has_to_write(self) -> bool:
        return bool(self._out)

    def send(self, data: Any, tag: int) -> TcpRequest:
        body, request = memoryview(data).cast("B"), TcpRequest(data)
        self._out.append((memoryview(_HEAD.pack(tag, body.nbytes)), None))
        self._out.append((body, request))
        self.write()
        return request

    def write(self) -> None:
        """What the socket takes now."""
        try:
            while self._out:
                data, request = self._out[0]
                count = self.link.send(data[:_PIECE_BYTES]) if data.nbytes else 0
                if count < data.nbytes:
                    self._out[0] = data[count:], request
                    continue
                self._out.popleft()
                if request is not None:
                    request.done = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    # --- in -------------------------------------------------------------------------------------
    def receive(self, buffer: np.ndarray, tag: int) -> TcpRequest:
        request, kept = TcpRequest(buffer), self.kept[tag]
        if kept:
            _fill(request, kept.popleft())
        else:
            self._asked[tag].append(request)
        return request

    def read(self) -> None:
        """What has come."""
        left = _PIECE_BYTES
        try:
            while left > 0 and not self.gone:
                into = memoryview(self._head if self._body is None else self._body.data)[self._got:]
                count = self.link.recv_into(into[:left])
                self.gone = not count
                self._got, left = self._got + count, left - count
                if count == into.nbytes:
                    self._complete()
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def _complete(self) -> None:
        """A head or a body is there."""
        self._got, body, request = 0, self._body, self._request
        if body is None:
            self._tag, nbytes = _HEAD.unpack(self._head)
            asked = self._asked[self._tag]
            request = asked.popleft() if asked else None
            body = _start(np.empty(nbytes, np.uint8) if request is None else request.data, nbytes)
            if nbytes:
                self._body, self._request = body, request
                return
        self._body = None
        if request is not None:
            request.nbytes, request.done = body.nbytes, True
        elif self._asked[self._tag]:  # asked for while it came
            _fill(self._asked[self._tag].popleft(), body)
        else:
            self.kept[self._tag].append(body)


def _start(buffer: np.ndarray, nbytes: int) -> np.ndarray:
    if nbytes > buffer.size:
        raise MeshError(f"a rank has sent {nbytes} bytes where {buffer.size} are expected")
    return buffer[:nbytes]


def _fill(request: TcpRequest, body: np.ndarray) -> None:
    _start(request.data, body.size)[...] = body
    request.nbytes, request.done = body.size, True


class TcpBatch(WireBatch):
    """Requests of all peers."""

    def __init__(self, wire: TcpWire, requests: Sequence[TcpRequest]):
        self.wire, self.requests = wire, requests

    def arrived(self) -> list[tuple[int, int]]:
        self.wire.look()
        return [(i, r.nbytes) for i, r in enumerate(self.requests) if r.done]


class TcpWire(ProcessWire):
    """A socket to every other rank."""

    name = "tcp"

    def __init__(self) -> None:
        self.rank, self.size = launched_rank(), launched_size()
        with socket.create_server(("", 0), backlog=self.size) as listener:
            world = join_world(listener.getsockname()[1])
            self._all = EndAll(self.rank, world.links, world.hosts)
            end_by(self.stop)
            links = _connect(self.rank, listener, world.addresses, world.token)
        self._peers = {rank: Peer(link) for rank, link in links.items()}
        self._machine = [r for r, host in enumerate(world.hosts) if host == world.hosts[self.rank]]
        self.here, self.local = len(self._machine), self._machine.index(self.rank)
        self._lock = threading.RLock()
        self._ready = select.poll()
        self._by_number = {peer.link.fileno(): peer for peer in self._peers.values()}
        for number, peer in self._by_number.items():
            peer.link.setblocking(False)
            self._ready.register(number, select.POLLIN)

    def send(self, data: Any, to: int, tag: int) -> TcpRequest:
        with self._lock:
            return self._peers[to].send(data, tag)

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> TcpRequest:
        with self._lock:
            return self._peers[source].receive(buffer, tag)

    def batch(self, requests: Sequence[TcpRequest]) -> WireBatch:
        return TcpBatch(self, requests)

    def all_done(self, requests: Sequence[TcpRequest]) -> bool:
        self.look()
        return all(r.done for r in requests)

    def probe(self, source: int | None, tag: int | None) -> tuple[int, int, int] | None:
        self.look()
        with self._lock:
            return next(((rank, at, kept[0].size) for rank, peer in self._peers.items()
                         if source in (None, rank) for at, kept in peer.kept.items()
                         if kept and tag in (None, at)), None)

    def take(self, found: tuple[int, int, int]) -> np.ndarray:
        rank, tag, _ = found
        with self._lock:
            return self._peers[rank].kept[tag].popleft()

    def look(self) -> None:
        """Read and write what can be."""
        with self._lock:
            for peer in self._peers.values():
                if peer.has_to_write:
                    peer.write()
            for number, _ in self._ready.poll(0):
                peer = self._by_number[number]
                peer.read()
                if peer.gone:  # end_all.py finds out whether that is well
                    self._ready.unregister(number)
                    del self._by_number[number]

    def pause(self, seconds: float) -> None:
        waiting = select.poll()  # of its own: another thread may look meanwhile
        for number, peer in list(self._by_number.items()):
            waiting.register(number, select.POLLIN | (peer.has_to_write and select.POLLOUT))
        waiting.poll(1e3 * seconds)

    def share_here(self, numbers: np.ndarray) -> None:
        if self.local == 0:
            asked = [self.send(numbers.view(np.uint8), r, _NAME_TAG) for r in self._machine[1:]]
        else:
            asked = [self.receive(numbers.view(np.uint8), self._machine[0], _NAME_TAG)]
        _until(lambda: self.all_done(asked))

    def stop(self, status: int) -> None:
        self._all.stop(status)

    def close(self) -> None:
        self._all.leave()

    def forget(self) -> None:
        self._all.forget()
        for peer in self._peers.values():
            peer.link.close()


def _connect(rank: int, listener: socket.socket, addresses: Sequence[tuple[str, int]],
             token: bytes) -> dict[int, socket.socket]:
    """A socket to every other rank: this one calls those before it, and is called by the rest."""
    links = dict[int, socket.socket]()
    limit = config.comm_timeout or None
    try:
        for other in range(rank):
            links[other] = socket.create_connection(addresses[other], limit)
            links[other].sendall(token + struct.pack("<i", rank))
        listener.settimeout(limit)
        while len(links) < len(addresses) - 1:
            link, _ = listener.accept()
            link.settimeout(limit)
            said = _exactly(link, len(token) + 4)
            if said[:-4] != token:  # a stranger
                link.close()
                continue
            links[struct.unpack("<i", said[-4:])[0]] = link
    except TimeoutError:
        raise never_started(config.comm_timeout) from None
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := link.recv(count - len(data))):
        data += more
    return data


def _until(done: Callable[[], bool]) -> None:
    limit, begin = config.comm_timeout, time.monotonic()
    while not done():
        time.sleep(1e-3)
        if limit and time.monotonic() - begin > limit:
            raise never_started(limit)


__all__ = ["TcpWire"]
