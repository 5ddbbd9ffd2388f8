"""Processes of ranks that begin where `import tessera` has ended: forks of a process that did it.

    python warm_ranks.py NAME        the server: an abstract socket, until its standard input ends

A launcher starts rank_client.py for each rank, which sends what the launcher gave it (arguments,
environment, folder, the descriptors of its streams and of MPI) and lives as long as its fork: it
passes signals on and ends as that does, and the fork is killed when it is gone. So mpirun and a
rank see what they would without. What differs: the import has happened before the launcher's
variables were there, so what it does with them is done again (`become`).

Two servers have ranks of even and of odd numbers, so that ranks still hash strings each in its way.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("rank_client.py")
READY = "ready\n"


_names: list[str] = []


def servers(environment: dict[str, str]) -> list[str]:
    """The names of two servers, which end with this process; of its first call's environment."""
    while len(_names) < 2:
        _names.append(_start(environment))
    return _names


def _start(environment: dict[str, str]) -> str:
    name = f"tessera-warm-ranks-{os.getpid()}-{os.urandom(4).hex()}"
    server = subprocess.Popen([sys.executable, __file__, name], env=environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    atexit.register(_end, server)
    assert server.stdout.readline() == READY, "the server of ranks has not started"
    return name


def _end(server: subprocess.Popen) -> None:
    for stream in (server.stdin, server.stdout):
        stream.close()
    server.wait()


# --- the server -----------------------------------------------------------------------------------
class Server:
    """It forks: `serve` returns in a fork, with what the client has sent, and never here."""

    def __init__(self, name: str):
        self.waiting = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{name}")
        self.listener.listen(128)
        self.ended, signals = socket.socketpair()
        signals.setblocking(False)
        self.links: dict[int, socket.socket] = {}  # pid -> its client
        signal.set_wakeup_fd(signals.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.signals = signals
        for source in (self.listener, self.ended, sys.stdin):
            self.waiting.register(source, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            for key, _ in self.waiting.select():
                if key.fileobj is sys.stdin:
                    self.stop()
                elif key.fileobj is self.ended:
                    self.ended.recv(4096)
                    self.reap()
                elif key.fileobj is self.listener:
                    link = self.listener.accept()[0]
                    asked = _receive(link)
                    if asked is None:
                        link.close()
                    elif pid := os.fork():
                        self.watch(pid, link, asked[1])
                    else:
                        self.leave(link)
                        return asked
                else:  # a client that is gone takes its fork with it
                    self.kill(key.data)

    def watch(self, pid: int, link: socket.socket, handles: list[int]) -> None:
        for handle in handles:
            os.close(handle)
        self.links[pid] = link
        self.waiting.register(link, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            link.sendall(f"{pid}\n".encode())

    def reap(self) -> None:
        while self.links:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            link = self.links.pop(pid)
            with contextlib.suppress(KeyError):  # its client was gone first
                self.waiting.unregister(link)
            with contextlib.suppress(OSError):
                link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            link.close()

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.waiting.unregister(self.links[pid])

    def leave(self, link: socket.socket) -> None:
        """In a fork: nothing of the server is left, least of all an object that closes the number
        of a descriptor later."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self.waiting, self.listener, self.ended, self.signals, link,
                     *self.links.values()):
            held.close()

    def stop(self) -> None:
        for pid in self.links:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a client sends: descriptors with the first bytes, then text until it sends no more."""
    handles = array.array("i")
    text, more, _, _ = link.recvmsg(1 << 16, socket.CMSG_SPACE(16 * handles.itemsize))
    for _, _, data in more:
        handles.frombytes(data[:len(data) - len(data) % handles.itemsize])
    while text and not text.endswith(b"\n"):
        text += link.recv(1 << 16)
    return (json.loads(text), list(handles)) if text else None


def become(asked: dict[str, Any], handles: list[int]) -> None:
    """This fork is the rank's process: its streams, its environment, and what an import does with
    these."""
    beyond = max([2, *asked["handles"], *handles]) + 1  # out of the way of those that it shall have
    high = [fcntl.fcntl(h, fcntl.F_DUPFD, beyond) for h in handles]
    os.closerange(3, beyond)
    for handle, wanted in zip(high, asked["handles"], strict=True):
        os.dup2(handle, wanted)
    os.closerange(beyond, beyond + len(high) + 64)
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)

    import numpy as np

    from tessera import config
    from tessera.mesh.ranks import abort

    np.random.seed()
    config.reset()
    abort.install()


def main() -> dict[str, Any]:
    """In each fork the names of its `__main__`."""
    import tessera.graph.cpu.compile
    import tessera.graph.cpu.disk
    import tessera.graph.cpu.load
    import tessera.mesh.ranks.mpi
    import tessera.mesh.ranks.processes  # noqa: F401

    with contextlib.suppress(ImportError):  # ranks of torchrun need no MPI
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: F401

    gc.collect()
    gc.freeze()
    server = Server(sys.argv[1])
    print(READY, end="", flush=True)
    become(*server.serve())
    module = types.ModuleType("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    return vars(module)


if __name__ == "__main__":
    names = main()
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), names)
