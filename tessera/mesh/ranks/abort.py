"""Under a launcher, an exception or `sys.exit(n)` on one rank ends the program on all: said once.

Installed by `import tessera` when a launcher started several processes; costs nothing otherwise.
An exception in a thread counts. mpirun's exit status is then 1 for an exception and n for
sys.exit(n). `raise SystemExit(n)` is not seen here: ranks that wait for one that left so learn that
it has ended.

Of several ranks of a machine that fail, the first to ask the watcher (status_page.py) speaks, for
all. Before ranks have reached each other there is no watcher: then the first to take a name that
the machine's ranks share speaks. Elsewhere they speak in turn, and the first ends the others.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from tessera import config
from tessera.errors import TesseraError, is_user_frame
from tessera.launched import mark_rank, rank_above

from ..errors import StalledError
from .launcher import launched_rank, launched_size
from .output import also_on_terminal, log_to_file, silence_other_ranks

_GRACE_S = 0.3  # ranks that notice the same thing do so within this time of each other
_FIRST_TURN_S, _TURN_S, _LAST_TURN_S = 1.5, 0.05, 5.0  # of those that speak in turn
_GIVE_UP_S = 10.0  # after which a rank for which another was to speak ends them all itself
_LEFT: list[int] = []  # the status with which sys.exit has ended this rank, unless it is 0
_NAME: list[socket.socket] = []  # the name that says that this rank speaks, while it lives
_STOPPED: list[int] = []  # that with which this rank ends all; MPI_Abort may return
_ends_all: Callable[[int], None] | None = None  # once ranks have reached each other


def install() -> None:
    """Put our hooks before those of Python, and lead what this rank prints where it is to go."""
    if launched_size() == 1 or sys.excepthook is _stop_all or rank_above() is not None:
        return
    mark_rank()
    global _print
    _print = sys.excepthook
    _set_hooks(_stop_all, _exit, _stop_all_for_thread)
    os.register_at_fork(after_in_child=_be_no_rank)
    atexit.register(_leave)
    if config.rank_logs is not None:
        log_to_file(config.rank_logs, launched_rank())
    elif config.rank_output == "first":
        silence_other_ranks()


_print, _python_exit, _print_of_thread = sys.excepthook, sys.exit, threading.excepthook


def end_by(stop: Callable[[int], None]) -> None:
    """Ranks reach each other from here on: `stop(status)` ends them all."""
    global _ends_all
    _ends_all = stop


def _set_hooks(hook: Any, leave: Any, hook_of_threads: Any) -> None:
    sys.excepthook, sys.exit, threading.excepthook = hook, leave, hook_of_threads


def _be_no_rank() -> None:
    """A child that is forked may fail without ending the ranks."""
    _set_hooks(_print, _python_exit, _print_of_thread)
    atexit.unregister(_leave)


# --- errors ---------------------------------------------------------------------------------------
def _stop_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _speak(kind, error, trace, "")
    _end_all(1)


def _stop_all_for_thread(args: Any) -> None:
    if args.exc_type is SystemExit:  # it ends the thread alone
        return
    name = args.thread.name if args.thread is not None else "a thread"
    _speak(args.exc_type, args.exc_value, args.exc_traceback, f" in {name}")
    _end_all(1)


def stop_with(error: BaseException) -> NoReturn:
    """End all ranks for an error that nobody can raise: at the end of a program, or while MPI
    starts."""
    _speak(type(error), error, error.__traceback__, "")
    _end_all(1)
    time.sleep(_GRACE_S)  # mpirun passes on what was printed
    os._exit(1)


def _speak(kind: type[BaseException], error: BaseException, trace: TracebackType | None,
           where: str) -> None:
    """Print what went wrong and what the other ranks do, unless another rank does. Returns when it
    is time to end all."""
    rank, size = launched_rank(), launched_size()
    _wait_for_turn(f"{kind.__name__}: {str(error).partition(chr(10))[0]}")
    with also_on_terminal():
        print(f"tessera: rank {rank} of {size} failed{where}; stopping all ranks", file=sys.stderr)
        if isinstance(error, TesseraError):
            print(_short(kind, error, trace), end="", file=sys.stderr)
        else:
            _print(kind, error, trace)
        if not isinstance(error, StalledError):  # it has told
            _print_others(kind.__name__)


def _short(kind: type[BaseException], error: TesseraError, trace: TracebackType | None) -> str:
    """The user's own frames, and the error, which says the rest."""
    frames = traceback.StackSummary.extract(
        (frame, line) for frame, line in traceback.walk_tb(trace) if is_user_frame(frame))
    head = ["Traceback (most recent call last):\n"] * bool(frames) + traceback.format_list(frames)
    return "".join([*head, *traceback.format_exception_only(kind, error)])


def _print_others(like: str) -> None:
    """Where the other ranks are. Those that have failed alike need no mention."""
    board = _board()
    lines = [] if board is None else [
        p for p in board.rank_locations() if f": has failed: {like}" not in p]
    if lines:
        print("\n".join(["where the other ranks are:", *lines]), file=sys.stderr)


def _board() -> Any:
    """What ranks of one machine know of each other, when MPI has started."""
    return sys.modules.get("tessera.mesh.ranks.status_page")


def _wait_for_turn(what: str) -> None:
    board, rank = _board(), launched_rank()
    first = None if board is None else board.claim_report(what)
    if first is not None:
        time.sleep(_GRACE_S if first else _GIVE_UP_S)
    elif _take_name():
        time.sleep(min(_FIRST_TURN_S + rank * _TURN_S, _LAST_TURN_S) if rank else 0.1)
    else:
        time.sleep(_GIVE_UP_S)


def _take_name() -> bool:
    """Whether this rank is the first of its machine to fail, as far as can be known without MPI.

    The launcher, whose children the ranks are, gives the name, in no folder: on Linux one that
    begins with a zero ends with the process that has it. Elsewhere, and where a shell lies between
    the launcher and a rank, each is the first.
    """
    if sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0tessera-failed-{os.getuid()}-{os.getppid()}")
    except OSError:  # another has it
        name.close()
        return False
    _NAME.append(name)
    return True


# --- leaving --------------------------------------------------------------------------------------
class _Exit(SystemExit):
    """What sys.exit raises. When it is dropped with no frame left it has ended the program; else
    somebody has caught it."""

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            _LEFT.append(_status_of(self.code))  # the first counts: it held those before it


def _exit(status: Any = None, /) -> NoReturn:
    raise _Exit(status)


def _status_of(code: Any) -> int:
    """As Python has it: None is 0, and what is no integer is printed and is 1."""
    return 0 if code is None else code if isinstance(code, int) else 1


def leaves_well() -> bool:
    """At the end of this process: whether it has come there neither by an error nor by sys.exit
    with one."""
    return not _STOPPED and not (_LEFT and _LEFT[0])


def _leave() -> None:
    """At the end of this process."""
    if not leaves_well() and not _STOPPED:
        rank, size, text = launched_rank(), launched_size(), f"has left by sys.exit({_LEFT[0]})"
        _wait_for_turn(text)
        with also_on_terminal():
            print(f"tessera: rank {rank} of {size} {text}; stopping all ranks", file=sys.stderr)
        _end_all(_LEFT[0])


def _end_all(status: int) -> None:
    """End the processes of all ranks with this exit status, whether they have reached each other
    or not.

    Before, MPICH's mpirun is told so by a line of its PMI-1 protocol: it goes on when a process
    exits, whatever its status. Others end the rest when this one exits.
    """
    _STOPPED.append(status)
    sys.stderr.flush()
    sys.stdout.flush()
    board = _board()
    if _ends_all is not None:
        if board is not None:
            board.stop_all()
        time.sleep(0.1)
        _ends_all(status)
    elif "PMI_FD" in os.environ:
        time.sleep(0.1)  # mpirun passes on what was printed
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
