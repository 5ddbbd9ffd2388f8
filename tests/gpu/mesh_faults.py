"""Programs of tests/gpu/test_mesh_faults.py: rank ranks // 2 goes wrong while others wait for it on
a GPU.

    mpirun -n 2 python tests/gpu/mesh_faults.py killed
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402

import tessera as ts  # noqa: E402
from tessera import config  # noqa: E402


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
    if rank == ranks // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f(x).item())


def raised(rank: int, ranks: int) -> None:
    f, x = made(ranks)
    if rank == ranks // 2:
        raise RuntimeError("on purpose")
    print(f(x).item())


def hangs(rank: int, ranks: int) -> None:
    f, x = made(ranks)
    if rank == ranks // 2:
        time.sleep(1000)
    print(f(x).item())


def another(rank: int, ranks: int) -> None:
    """One calls the compiled function, the other a collective of an array, both known by now."""
    f, x = made(ranks)
    y = ts.ones((64,)).to(x.local.device)
    ts.dist.all_reduce(y)
    if rank == ranks // 2:
        time.sleep(1000)  # in a call that never ends
    ts.dist.all_reduce(y)
    print(ts.dist.all_reduce(y).numpy())


def mixed(rank: int, ranks: int) -> None:
    """All reduce an array, which NCCL takes for one call, one of them from another line."""
    x = made(ranks)[1]
    y = ts.ones((64,)).to(x.local.device)
    ts.dist.all_reduce(y)
    if rank == ranks // 2:
        ts.dist.all_reduce(y)  # other
    else:
        ts.dist.all_reduce(y)  # one
    time.sleep(30)
    print("nobody has noticed")


def memory(rank: int, ranks: int) -> None:
    """One asks for more memory than its GPU has. What others have on that GPU stays theirs."""
    f, x = made(ranks)
    if rank == ranks // 2:
        print(ts.jit(lambda n: ts.zeros((1 << 38,)) + n, target=x.local.device)(1.0))  # a TiB
    print(f(x).item())


def programs(rank: int, ranks: int) -> None:
    """One traces another function, from the same line."""
    f, x = made(ranks)
    print(ts.jit(lambda x: ts.sum(x * (3.0 + (rank == ranks // 2))))(x).item())


def overflow(rank: int, ranks: int) -> None:
    """An element of one rank's part is too large for exp, at step 7."""
    x, g = made(ranks)[1], ts.jit(lambda x: ts.sum(ts.exp(x)))
    spec, bad = ts.ShardSpec(("row",), ("dp",)), (1 << 16) * (ranks // 2) // ranks + 1
    with config.scope(comm_timeout=30), ts.debug.numerics("raise"):  # it compiles
        for step in range(1, 11):
            def data(i: np.ndarray, step: int = step) -> np.ndarray:
                return np.where((i == bad) & (step == 7), 1000.0, 0.0)

            x = ts.dist.tensor((1 << 16,), spec, x.mesh, init=data)
            print(step, g(x).item())


def main() -> None:
    found = {f.__name__: f for f in (killed, raised, hangs, another, mixed, memory, programs,
                                     overflow)}
    found[sys.argv[1]](ts.dist.rank(), ts.dist.world_size())


if __name__ == "__main__":
    main()
