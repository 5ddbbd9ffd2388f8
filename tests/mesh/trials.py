"""Every call that communicates, made by all ranks but one: it is killed, or does something else.

    mpirun -n 4 python tests/mesh/trials.py CALL FAULT VICTIM SEED FOLDER

Each call checks what it gives. test_trials.py says what is to be reported.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera.checkpoints import History, load, save

CALLS: dict[str, Callable[[State], Any]] = {}
FAULTS = ("skips", "ends", "other", "alone")


class State:
    """What the calls work on, the same on all ranks. folder: for checkpoints."""

    def __init__(self, folder: Path):
        self.rank, self.size, self.folder = ts.dist.rank(), ts.dist.world_size(), folder
        self.mesh = ts.dist.mesh(axes=("dp",), shape=(self.size,))
        self.values = np.arange(4 * self.size, dtype=np.float32)
        self.x = ts.dist.distribute(self.values, ts.ShardSpec(("row",), ("dp",)), mesh=self.mesh)
        self.mine, self.ones = ts.full((3,), float(self.rank)), ts.ones((3,))
        self.weight = ts.dist.tensor((), None, self.mesh, init=2.0)
        self.total = sum(range(self.size))
        self.twice = ts.jit(lambda x: ts.sum(x * 2))
        self.reduced = ts.jit(lambda y: ts.all_reduce(y) + 1)
        self.pipe = ts.pipeline([lambda p, h: h * p] * self.size, 2, axis="dp", mesh=self.mesh)
        self.train = self.pipe.value_and_grad(lambda y: ts.mean(y))
        self.history = History(folder / "history")
        rows = np.random.default_rng(0).standard_normal((1, 1, 4 * self.size, 8))
        spec = ts.ShardSpec((2,), ("dp",))
        self.q = ts.dist.distribute(rows.astype(np.float32), spec, mesh=self.mesh)
        save(folder / "saved", {"w": self.x}, step=3)
        self.saved = load(folder / "saved")


def call(function: Callable[[State], Any]) -> Callable[[State], Any]:
    CALLS[function.__name__] = function
    return function


def same(found: Any, meant: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(meant, np.float64))


# --- the calls, each on a line that a report can show -----------------------------------------
@call
def all_reduce(s: State) -> None:
    same(ts.dist.all_reduce(s.mine), [s.total] * 3)


@call
def reduce_scatter(s: State) -> None:
    y = ts.dist.reduce_scatter(ts.ones((s.size,)))
    same(y, [s.size])


@call
def all_gather(s: State) -> None:
    same(ts.dist.all_gather(s.mine), np.repeat(np.arange(s.size), 3))


@call
def all_to_all(s: State) -> None:
    y = ts.dist.all_to_all(ts.full((s.size,), float(s.rank)), split=0, concat=0)
    same(y, range(s.size))


@call
def broadcast(s: State) -> None:
    same(ts.dist.broadcast(s.mine, root=1), [1] * 3)


@call
def permute(s: State) -> None:
    ring = [(r, (r + 1) % s.size) for r in range(s.size)]
    same(ts.dist.permute(s.mine, pairs=ring), [(s.rank - 1) % s.size] * 3)


@call
def barrier(s: State) -> None:
    ts.dist.barrier("dp", mesh=s.mesh)


@call
def share(s: State) -> None:
    assert ts.dist.share([s.rank, "text"]) == [0, "text"]


@call
def numpy(s: State) -> None:
    same(s.x.numpy(), s.values)


@call
def tolist(s: State) -> None:
    same(s.x.tolist(), s.values)


@call
def asarray(s: State) -> None:
    same(np.asarray(s.x), s.values)


@call
def a_sum(s: State) -> None:
    same(float(ts.sum(s.x)), s.values.sum())


@call
def shard(s: State) -> None:
    same(ts.shard(s.x, ts.ShardSpec(replicate=True)).local, s.values)


@call
def tensor(s: State) -> None:
    same(ts.dist.tensor((2,), None, s.mesh, init=5.0).local, [5, 5])


@call
def compiled(s: State) -> None:
    same(s.twice(s.x), 2 * s.values.sum())


@call
def compiled_collective(s: State) -> None:
    same(s.reduced(s.mine), [s.total + 1] * 3)


@call
def gradient(s: State) -> None:
    g = ts.grad(lambda w: ts.sum(s.x * w))(s.weight)
    same(g, s.values.sum())


@call
def ring_attention(s: State) -> None:
    y = ts.dist.ring_attention(s.q, s.q, s.q, axis="dp")
    assert np.isfinite(y.local.numpy()).all()


@call
def pipeline(s: State) -> None:
    same(s.train([ts.ones(()) for _ in range(s.size)], ts.ones((4, 2)))[0], 1)


@call
def saving(s: State) -> None:
    save(s.folder / "other", {"w": s.x}, step=1)


@call
def loading(s: State) -> None:
    assert load(s.folder / "saved").step == 3


@call
def tree(s: State) -> None:
    same(s.saved.tree({"w": s.x})["w"].local, s.x.local)


@call
def history_load(s: State) -> None:
    assert s.history.load().step >= 0


@call
def claim(s: State) -> None:
    with s.history.claim():
        pass


# --- what goes wrong --------------------------------------------------------------------------
def everyone(s: State) -> None:
    ts.dist.barrier()  # all ranks come here


def mistaken(s: State, name: str, fault: str, victim: int) -> None:
    """One round that is right, and one in which the victim does something else."""
    CALLS[name](s)
    everyone(s)
    is_victim = s.rank == victim
    if fault == "ends" and is_victim:
        return
    if (fault == "alone") == is_victim or fault not in ("alone", "skips", "other"):
        CALLS[name](s)
    elif fault == "other" and is_victim:
        ts.dist.all_gather(ts.ones((7,)))  # the victim alone
    everyone(s)


def killed(s: State, name: str, victim: int, seed: int) -> None:
    """Rounds of the call and a checkpoint, until the victim is gone at any moment."""
    if s.rank == victim:
        threading.Thread(target=kill, args=(random.Random(seed).uniform(0.0, 0.4),)).start()
    for step in range(1, 100_000):
        CALLS[name](s)
        if step % 3 == 0:
            s.history.save(step, {"w": ts.full((5,), float(step)), "x": s.x})
            if s.rank == 0:  # from here on it is never lost
                (s.folder / "promised").write_text(str(step))


def kill(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, fault: str, victim: str, seed: str, folder: str) -> None:
    s = State(Path(folder))
    s.history.save(0, {"w": ts.zeros((5,)), "x": s.x})
    everyone(s)
    run = partial(killed, seed=int(seed)) if fault == "killed" else partial(mistaken, fault=fault)
    run(s, name, victim=int(victim))


if __name__ == "__main__":
    main(*sys.argv[1:])
