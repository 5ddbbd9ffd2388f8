"""Programs in which ranks make mistakes, for test_messages.py.

    mpirun -n 3 python tests/mesh/faults.py PROGRAM FOLDER     each rank writes FOLDER/<rank>
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import tessera as ts
from tessera.launched import launched_rank
from tessera.mesh.world import patience


def reduce(n: int = 4) -> None:
    ts.dist.all_reduce(ts.ones((n,)))


def wait_briefly() -> None:
    """From here on, for all ranks have started: how long that takes is the machine's affair."""
    reduce()
    ts.config.set(comm_timeout=3)


def part(n: int, value: float = 1.0) -> ts.dist.DistTensor:
    mesh = ts.dist.mesh(axes=("dp",), shape=(ts.dist.world_size(),))
    return ts.dist.tensor((n,), ts.ShardSpec(("row",), ("dp",)), mesh, init=value)


def own(rows: int, **shape: tuple) -> ts.dist.DistTensor:
    mesh = ts.dist.mesh(axes=("dp",), shape=(ts.dist.world_size(),))
    spec = ts.ShardSpec(("row",), ("dp",))
    return ts.dist.from_local(ts.ones((rows, 2)), spec, mesh, **shape)


def shorter_part() -> None:
    own(4)
    own(4 - (ts.dist.rank() == 2))  # the end of the data
    reduce()


def part_that_does_not_fit() -> None:
    reduce()
    own(4 - (ts.dist.rank() == 1), shape=(12, 2))


def other_modes() -> None:
    with ts.determinism("fast" if ts.dist.rank() == 1 else "default"):
        ts.jit(ts.sum)(part(6))


def numpy_on_one() -> None:
    x, y = part(4), part(4, 2.0)
    if ts.dist.rank() == 0:
        x.numpy()  # forgotten on the others
    y.numpy()


def share_on_one() -> None:
    if ts.dist.rank() == 0:
        ts.dist.share("lr=0.1")
    ts.dist.share(5)


def share_at_the_end() -> None:
    for _ in range(3 if ts.dist.rank() == 0 else 2):
        ts.dist.share("one line")


def save_in_the_middle() -> None:
    reduce()
    if ts.dist.rank() == 0:
        ts.checkpoints.save(FOLDER / "c", {"w": ts.zeros(3)})  # rank 0 alone
    reduce()


def save_at_the_end() -> None:
    reduce()
    if ts.dist.rank() == 0:
        ts.checkpoints.save(FOLDER / "c", {"w": ts.zeros(3)})  # rank 0 alone


def large_and_late() -> None:
    """More than a frame holds."""
    x = part(90_000)
    if ts.dist.rank() == 0:
        x.numpy()
    ts.dist.barrier()


def no_start() -> None:
    ts.config.set(comm_timeout=3)
    if launched_rank() == 0:
        ts.dist.barrier()  # the only call


def thread_raises() -> None:
    def work() -> None:
        raise ValueError("in a thread")

    reduce()
    if ts.dist.rank() == 2:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        time.sleep(60)
    reduce()


def two_threads() -> None:
    def work(n: int) -> None:
        for _ in range(1000):
            reduce(n)

    wait_briefly()
    threads = [threading.Thread(target=work, args=(5,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hangs_elsewhere() -> None:
    wait_briefly()
    if ts.dist.rank() == 2:
        time.sleep(60)
    ts.dist.barrier()


def idle_before_the_first_call() -> None:
    """The others have begun a compiled function, for which a rank that compiles has minutes."""
    wait_briefly()
    x = part(6)
    if ts.dist.rank() == 1:
        time.sleep(60)
    ts.jit(ts.sum)(x)


def busy_before_the_first_call() -> str:
    """By itself, by a child, and in something of ours: longer than the limit."""
    wait_briefly()
    x, busy = part(6), "import time\nend = time.time() + 5\nwhile time.time() < end: pass"
    if ts.dist.rank() == 1:
        exec(busy, {})
        subprocess.run([sys.executable, "-c", busy], check=True)
    ts.jit(ts.sum)(x)
    with patience(first=True):
        if ts.dist.rank() == 0:
            time.sleep(5)
        ts.dist.barrier()
    return "well"


def all_fail_differently() -> None:
    reduce()
    raise (ValueError, KeyError, RuntimeError)[ts.dist.rank()]("at the same time")


def ends_at_different_times() -> str:
    """The first to end wait for longer than the limit of a collective."""
    reduce()
    ts.config.set(comm_timeout=1)
    time.sleep(1.5 * ts.dist.rank())
    return "well"


def children() -> str:
    """A child that is forked is no rank: it may not communicate, and fails alone."""
    reduce()
    with warnings.catch_warnings():  # Python 3.12 warns of every fork of a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        try:
            reduce()
        except ts.dist.MeshError as error:
            os._exit(7 if "forked from rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    reduce()
    return "well"


def on_gpus() -> str:
    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")
    try:
        ts.dist.tensor((4,), None, mesh)
    except ts.UnsupportedTargetError as error:
        return f"{error} {ts.dist.all_reduce(ts.ones((2,)), 'dp', mesh=mesh).tolist()}"
    return "computed"


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2])
    told = globals()[sys.argv[1]]()
    if told is not None:
        (FOLDER / str(ts.dist.rank())).write_text(told)
