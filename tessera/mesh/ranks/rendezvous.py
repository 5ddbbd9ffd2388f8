"""How ranks find each other by TCP: all of them call rank 0, which tells everyone where all are.

    MASTER_ADDR, MASTER_PORT    where rank 0 listens, as torchrun says it. Under srun the first
                                machine of the step and a port that follows from the job, unless
                                they are set

The port may be taken, by another job or by torchrun's own store: then rank 0 takes the next that is
free, and the others look for it there. Rank 0 greets with the name of the run, so nothing is said
to a stranger. The connections stay: over them ranks hear of one that fails (end_all.py).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from tessera import config
from tessera.errors import user_line
from tessera.launched import first_host

from ...lazy_dataclass import dataclass
from ..errors import MeshError, StalledError
from .envelope import ranks_text
from .launcher import launched_rank, launched_size
from .waiting import never_started

PORTS = 8  # tried from MASTER_PORT on
_LAST_PORT = 65535 - PORTS  # at which they may begin, behind torchrun's own
_FIRST_PORT, _PORT_RANGE = 20000, 20000  # of jobs that do not say one
_HELLO = b"tessera "
_GREETING_S = 2.0  # in which rank 0 greets who calls
_RETRY_S = 0.1
_MOST_BYTES = 1 << 20  # of a line
TWICE = ("two programs have one MASTER_ADDR and MASTER_PORT, or two processes the same RANK: it "
         "counts from 0 to WORLD_SIZE - 1, one for each")
NOT_ALL = ("all ranks make the first call of ts.dist, each with a RANK of its own; look for one "
           "that has ended, was never started or has another's RANK, or for a branch that depends "
           "on the rank. TESSERA_COMM_TIMEOUT is the limit in seconds; 0 waits forever")


@dataclass(frozen=True)
class World:
    """What rank 0 has told everyone.

    addresses: where each rank listens, by rank   hosts: the name of its machine
    token: by which ranks know each other   links: connections to all others on rank 0, elsewhere
    to rank 0
    """

    addresses: list[tuple[str, int]]
    hosts: list[str]
    token: bytes
    links: dict[int, socket.socket]


def join_world(port: int) -> World:
    """All ranks call it. port: where this one listens for the others. Raises StalledError when
    they do not come in config.comm_timeout seconds."""
    rank, size, limit = launched_rank(), launched_size(), config.comm_timeout
    if rank >= size:
        raise MeshError(f"this process is told to be rank {rank} of {size}",
                        hint=f"ranks count from 0: the last of {size} is {size - 1}")
    end = time.monotonic() + limit if limit else float("inf")
    mine = {"rank": rank, "size": size, "port": port, "host": socket.gethostname()}
    try:
        return _gather(mine, end) if rank == 0 else _call(mine, end)
    except TimeoutError:
        raise never_started(limit) from None
    except _NotAll as error:
        raise StalledError(f"rank 0 of {size} has waited {limit} s for {error}",
                           where=user_line(), hint=NOT_ALL) from None


def address() -> tuple[str, int]:
    """Where rank 0 is looked for. Raises MeshError where nothing says it."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    host = os.environ.get("MASTER_ADDR") or first_host(nodes)
    if not host:
        raise MeshError("nothing says where rank 0 is",
                        hint="set MASTER_ADDR and MASTER_PORT, as torchrun does")
    job = sum(int(n) for n in _run_of_slurm() if n.isdigit())
    said = os.environ.get("MASTER_PORT") or str(_FIRST_PORT + PORTS * job % _PORT_RANGE)
    if not (said.isdigit() and 0 < int(said) <= _LAST_PORT):
        raise MeshError(f"MASTER_PORT={said} is no port that {PORTS} ports can begin at",
                        hint=f"a number from 1 to {_LAST_PORT}")
    # torchrun's agent has a store of its own there
    return host, int(said) + (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _run_of_slurm() -> list[str]:
    return [os.environ.get(n, "") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID")]


def _greeting() -> bytes:
    """Of this run alone."""
    names = [os.environ.get(n, "") for n in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return _HELLO + "/".join([*names, *_run_of_slurm()]).encode() + b"\n"


# --- rank 0 ---------------------------------------------------------------------------------------
def _gather(mine: dict, end: float) -> World:
    found, links = {0: mine | {"address": ""}}, dict[int, socket.socket]()
    with _listener() as listener:
        while len(found) < mine["size"]:
            try:
                listener.settimeout(_seconds_left(end))
                link, (host, *_) = listener.accept()
            except TimeoutError:
                late = ranks_text([r for r in range(mine["size"]) if r not in found])
                _refuse(links.values(), f"rank 0 has waited for {late}", NOT_ALL)
                raise _NotAll(f"{late}, of which it has heard nothing") from None
            link.settimeout(_GREETING_S)
            try:
                link.sendall(_greeting())
                other = json.loads(_line(link))
            except (OSError, ValueError):  # a stranger, or one that has gone
                link.close()
                continue
            if other["size"] != mine["size"] or other["rank"] in found:
                text = (f"rank {other['rank']} of {other['size']} on {other['host']} calls rank 0 "
                        f"of {mine['size']}")
                text += " for a second time" * (other["size"] == mine["size"])
                _refuse([*links.values(), link], text, TWICE)
                raise MeshError(text, hint=TWICE)
            found[other["rank"]] = other | {"address": "" if _is_local(host) else host}
            links[other["rank"]] = link
    told = {"ranks": [found[r] for r in range(mine["size"])], "token": secrets.token_hex(16)}
    for link in links.values():
        link.sendall(json.dumps(told).encode() + b"\n")
    return _world(told, "localhost", links)


class _NotAll(Exception):
    """Rank 0 has waited for these ranks as long as it may."""


def _refuse(links: Iterable[socket.socket], text: str, hint: str) -> None:
    """Tell those that have called why they do not meet."""
    for link in links:
        with suppress(OSError):
            link.sendall(json.dumps({"error": text, "hint": hint}).encode() + b"\n")


def _listener() -> socket.socket:
    first = address()[1]
    for port in range(first, first + PORTS):
        try:
            return socket.create_server(("", port), backlog=launched_size())
        except OSError as error:
            last = error
    raise MeshError(f"rank 0 cannot listen on the ports {first} to {first + PORTS - 1}: {last}",
                    hint="MASTER_PORT names the first of them")


# --- the others ----------------------------------------------------------------------------------
def _call(mine: dict, end: float) -> World:
    link = _connect_to_first(end)
    link.sendall(json.dumps(mine).encode() + b"\n")
    link.settimeout(_seconds_left(end))
    try:
        told = json.loads(_line(link))
    except (ConnectionError, ValueError):
        told = {"error": "rank 0 has ended while ranks met", "hint": "its own output says why"}
    if "error" in told:
        raise MeshError(f"rank {mine['rank']} of {mine['size']} has not met the others: "
                        f"{told['error']}", hint=told["hint"])
    return _world(told, link.getpeername()[0], {0: link})


def _connect_to_first(end: float) -> socket.socket:
    """A connection to rank 0, once it listens. A name may come to be known while ranks wait."""
    while True:
        unknown = ""
        for at in _addresses_of_first():
            try:
                link = socket.create_connection(
                    at, min(_GREETING_S, _seconds_left(end) or _GREETING_S))
            except socket.gaierror as error:
                unknown = f"{at[0]}, where rank 0 is looked for, is no name known here: {error}"
                break
            except OSError:  # not yet, or not there
                continue
            try:
                if _line(link) == _greeting():
                    return link
            except (OSError, ValueError):
                pass
            link.close()
        time.sleep(_RETRY_S)
        if unknown and time.monotonic() >= end:
            raise MeshError(unknown, hint="MASTER_ADDR names the machine of rank 0")
        _seconds_left(end)


def _addresses_of_first() -> Iterator[tuple[str, int]]:
    host, port = address()
    yield from ((host, port + i) for i in range(PORTS))


def _world(told: dict, master: str, links: dict[int, socket.socket]) -> World:
    """master: where this rank reached rank 0, and so all that share its machine."""
    ranks = told["ranks"]
    for link in links.values():
        link.settimeout(None)
    return World([(r["address"] or master, r["port"]) for r in ranks], [r["host"] for r in ranks],
                 bytes.fromhex(told["token"]), links)


# --- both ----------------------------------------------------------------------------------------
def _seconds_left(end: float) -> float | None:
    """Seconds that are left, None for ever. Raises TimeoutError when there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return None if left == float("inf") else left


def _line(link: socket.socket) -> bytes:
    """What is said up to the end of a line. Raises ValueError for something else."""
    data = b""
    while not data.endswith(b"\n"):
        more = link.recv(1 << 16)
        data += more
        if not more or len(data) > _MOST_BYTES:
            raise ValueError("no line")
    return data


def _is_local(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


__all__ = ["World", "address", "join_world"]
