"""Programs of tests/gpu/test_mesh_faults.py: one rank goes wrong while others wait for it on a GPU.

    mpirun -n 2 python tests/gpu/mesh_faults.py killed
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tessera as ts  # noqa: E402


def made(ranks: int) -> tuple:
    """A function with a collective, its operand, and its first result, when all have joined."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    x = ts.dist.tensor((1 << 16,), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
    f = ts.jit(lambda x: ts.sum(x * 2.0))
    for _ in range(3):
        assert f(x).item() == float(1 << 17)
    return f, x


def killed(rank: int, ranks: int) -> None:
    f, x = made(ranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f(x).item())


def raised(rank: int, ranks: int) -> None:
    f, x = made(ranks)
    if rank == 1:
        raise RuntimeError("on purpose")
    print(f(x).item())


def hangs(rank: int, ranks: int) -> None:
    f, x = made(ranks)
    if rank == 1:
        time.sleep(1000)
    print(f(x).item())


def another(rank: int, ranks: int) -> None:
    """One calls the compiled function, the other a collective of an array, both known by now."""
    f, x = made(ranks)
    y = ts.ones((64,)).to(x.local.device)
    ts.dist.all_reduce(y)
    if rank == 1:
        time.sleep(1000)  # in a call that never ends
    ts.dist.all_reduce(y)
    print(ts.dist.all_reduce(y).numpy())


def main() -> None:
    programs = {"killed": killed, "raised": raised, "hangs": hangs, "another": another}
    programs[sys.argv[1]](ts.dist.rank(), ts.dist.world_size())


if __name__ == "__main__":
    main()
