"""A rank as its launcher sees it; warm_ranks.py says how. It imports next to nothing.

    python -I -S rank_client.py NAME,NAME PROGRAM ARGUMENT...
"""

import array
import json
import os
import signal
import socket
import sys

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """The exit status of the fork, or minus the signal that has ended it."""
    rank = int(next(os.environ[name] for name in RANKS if name in os.environ))
    names = sys.argv[1].split(",")
    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + names[rank % len(names)])
    handles = [0, 1, 2]
    if "PMI_FD" in os.environ:
        handles.append(int(os.environ["PMI_FD"]))
    asked = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(),
             "handles": handles}
    text = (json.dumps(asked) + "\n").encode()
    sent = link.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))])
    link.sendall(text[sent:])
    answers = link.makefile()
    pid = int(answers.readline())
    for handle in handles:
        os.close(handle)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    return int(answers.readline())


if __name__ == "__main__":
    status = main()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
