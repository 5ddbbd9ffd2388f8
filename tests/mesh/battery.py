"""Programs that every transport runs: the same functions on simulated ranks and under mpirun.

    mpirun -n 2 python tests/mesh/battery.py PROGRAM FOLDER     each rank writes FOLDER/<rank>
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # mpirun starts this file alone

import tessera as ts  # noqa: E402
from mesh import programs  # noqa: E402
from mesh.processes import processes_of_run  # noqa: E402
from tessera.launched import launched_rank  # noqa: E402
from tessera.mesh.collectives.record import COLLECTIVES  # noqa: E402
from tessera.mesh.ranks.messages import gather, share  # noqa: E402
from tessera.mesh.sharding.reshard import plan, reshard  # noqa: E402
from tessera.mesh.world import transport  # noqa: E402

TYPES = ("f64", "f32", "bf16", "f16", "fp8_e4m3", "fp6_e3m2", "fp4_e2m1", "int64", "int8", "int4",
         "bf16 @accum(bf16)", "bf16 @stochastic_round", "fp8_e4m3 @saturate", "bool_")


def operand(shape: tuple, kind: str, rank: int, salt: int = 0) -> ts.Tensor:
    """A rank's own random tensor."""
    rng = np.random.default_rng([17, rank, salt])
    values = rng.integers(0, 2, shape) if kind == "bool_" else 3 * rng.standard_normal(shape)
    return ts.tensor(values, kind.replace("@stochastic_round", ""))


def legal(name: str, attrs: dict, kind: str) -> bool:
    numeric, op = ts.as_type(kind).dtype, attrs.get("op")
    return not (op == "sum" and numeric.kind == "bool") and \
        not (op == "mean" and numeric.kind != "float")


def collectives() -> str:
    """Every collective, sample and type on all ranks and on a mesh axis: a hash of all bits."""
    rank, size = ts.dist.rank(), ts.dist.world_size()
    digest = hashlib.sha256()
    for record, kind in itertools.product(COLLECTIVES.values(), TYPES):
        for number, sample in enumerate(record.samples):
            if not legal(record.name, sample.attrs, kind):
                continue
            x = operand(sample.shape(rank, size), kind, rank, number)
            more = {"dtype": kind, "key": 3} if record.reduces else {}
            y = getattr(ts.dist, record.name)(x, **sample.attrs, **more)
            digest.update(f"{record.name} {kind} {y.shape}".encode() + y.array.tobytes())
    digest.update(axes().encode())
    ts.dist.barrier()
    return digest.hexdigest()


def axes() -> str:
    """Collectives along the axes of a mesh, and a change of layout, one after another."""
    rank, size = ts.dist.rank(), ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size % 2 == 0 else (1, size))
    with mesh:
        x = operand((3, 5), "bf16", rank)
        y = ts.dist.all_gather(ts.dist.reduce_scatter(x, "tp"), "tp")
        z = ts.dist.all_reduce(y, ("dp",), op="mean") + ts.dist.all_reduce(y, mesh=mesh)
    rows = ts.ShardSpec(("row",), ("dp",)).resolve(mesh, 2)
    columns = ts.ShardSpec(("col",), (("tp", "dp"),)).resolve(mesh, 2)
    whole = operand((7, 9), "fp6_e3m2", 0)
    part = ts.dist.take(whole.array, rows, rank, whole.dtype)
    moved = reshard(transport(), plan(rows, columns, (7, 9), whole.dtype), part, whole.dtype)
    assert (moved == ts.dist.take(whole.array, columns, rank, whole.dtype)).all()
    return hashlib.sha256(z.array.tobytes() + moved.tobytes()).hexdigest()


def rows() -> str:
    """What the conformance rows ask of collectives under mpirun; any failure stops all ranks."""
    rank, size = ts.dist.rank(), ts.dist.world_size()
    digest = hashlib.sha256()
    for kind in ("bf16", "fp6"):
        terms = [operand((6, 5), kind, r) for r in range(size)]
        exact = np.sum([t.numpy().astype(np.float64) for t in terms], axis=0)
        wide = ts.dist.all_reduce(terms[rank], dtype="f32").numpy()
        scale = np.sum([np.abs(t.numpy().astype(np.float64)) for t in terms], axis=0)
        assert (np.abs(wide - exact) <= 1e-5 * scale).all()
        assert np.linalg.norm(wide - exact) <= 1e-5 * np.linalg.norm(exact)
        stored = ts.dist.all_reduce(terms[rank])
        assert (stored.array == ts.cast(ts.tensor(wide), kind).array).all()
        digest.update(wide.tobytes())
    return digest.hexdigest()


def chatter(steps: int, rank: int) -> None:
    for _ in range(steps):
        ts.dist.all_reduce(ts.ones((4,)))


def wait_briefly() -> None:
    """From here on, for all ranks have started: how long that takes is the machine's affair."""
    chatter(2, 0)
    ts.config.set(comm_timeout=3)


def fail_early() -> str:
    """Before MPI has started on the rank that fails."""
    if launched_rank() == 1:
        raise ValueError("broken before the first collective")
    chatter(1000, 0)
    return "unreached"


def fail() -> str:
    chatter(3, 0)
    if ts.dist.rank() == 1:
        raise ValueError("broken on purpose")
    chatter(1000, 0)
    return "unreached"


def fails() -> str:
    """A mistake that every rank makes."""
    ts.jit(lambda x: x @ ts.ones((3, 3)))(ts.ones((4, 4)))
    return "unreached"


def disagree() -> str:
    x = ts.ones((4,))
    chatter(2, 0)
    if ts.dist.rank() == 1:
        ts.dist.all_gather(x)
    else:
        ts.dist.all_reduce(x)
    return "unreached"


def hang() -> str:
    wait_briefly()
    if ts.dist.rank() == 1:
        time.sleep(300)
    chatter(1000, 0)
    return "unreached"


def leave() -> str:
    """A rank that returns while others still communicate."""
    if ts.dist.rank() != 1:
        ts.dist.barrier()
    return "left"


def killed() -> str:
    chatter(2, 0)
    if ts.dist.rank() == 1:
        time.sleep(0.5)  # the others are in the next one
        os.kill(os.getpid(), signal.SIGKILL)
    chatter(1000, 0)
    return "unreached"


def killed_as_it_waits() -> str:
    """By another rank, which waits for nothing."""
    pids = share(gather(os.getpid()))
    chatter(2, 0)
    if ts.dist.rank() == 2:
        time.sleep(0.3)  # the others are in the next one
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(60)
    chatter(1000, 0)
    return "unreached"


def killed_with_a_child() -> str:
    """A child that lives on has all that its parent had open."""
    chatter(2, 0)
    if ts.dist.rank() == 1:
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        os._exit(0)
    chatter(1000, 0)
    return "unreached"


def unwatched() -> str:
    """Where the process that watches cannot start."""
    sys.executable = "/nowhere/python"
    ts.dist.barrier()
    return "done"


def watchers() -> str:
    """How many processes of this run watch it."""
    chatter(2, 0)
    count = sum("watcher.py" in p for p in processes_of_run(os.environ["RUN_OF_TEST"]))
    ts.dist.barrier()
    return str(count)


def leave_with_3() -> str:
    """sys.exit on one rank, after another that is caught."""
    chatter(2, 0)
    if ts.dist.rank() == 1:
        try:
            sys.exit(5)
        except SystemExit:
            sys.exit(3)
    chatter(1000, 0)
    return "unreached"


def leave_early_with_3() -> str:
    """Before MPI has started on the rank that leaves."""
    if launched_rank() == 1:
        sys.exit(3)
    chatter(1000, 0)
    return "unreached"


def catch_an_exit() -> str:
    """An exit that somebody catches, and one that says that all is well, end nothing."""
    try:
        sys.exit(5)
    except SystemExit as caught:
        assert caught.code == 5
    ts.dist.barrier()
    (Path(sys.argv[2]) / str(ts.dist.rank())).write_text("well")
    sys.exit(0)


def talk() -> str:
    """Prints of every rank, of rank 0 alone, and of the libraries below Python."""
    rank = ts.dist.rank()
    print(f"rank {rank} speaks")
    with ts.dist.rank0_only():
        print(f"rank {rank} speaks in the block")
    os.write(1, f"rank {rank} writes\n".encode())
    print(f"rank {rank} warns", file=sys.stderr)
    ts.dist.barrier()
    return "talked"


def talk_and_fail() -> str:
    talk()
    if ts.dist.rank() == 1:
        raise ValueError("broken on purpose")
    chatter(1000, 0)
    return "unreached"


def nan() -> str:
    """A NaN on rank 2, in a compiled function with a collective; the sentinels raise."""
    ts.debug.numerics("raise")
    rank = ts.dist.rank()

    @ts.jit
    def step(x):
        y = ts.log(x)  # here rank 2 has a negative number
        return ts.all_reduce(ts.sum(y))

    x = np.ones((4, 4), np.float32)
    for _ in range(2):
        step(x)
    x[1, 2] = -1.0 if rank == 2 else 2.0
    for _ in range(1000):
        step(x)
    return "unreached"


def gradients() -> str:
    """Gradients by hand-called collectives: their bits, once they are right."""
    digest = hashlib.sha256()
    for name, (got, meant) in sorted(programs.gradients().items()):
        np.testing.assert_allclose(got, meant, rtol=1e-9, atol=1e-9, err_msg=name)
        digest.update(got.tobytes())
    return digest.hexdigest()


def backend() -> str:
    return ts.dist.backend()


def who() -> str:
    """What a process has of its own, and what it was given."""
    return json.dumps([os.getpid(), hash("a word"), os.environ.get("WORD"), sys.argv[1:],
                       os.getcwd(), __name__, ts.config.seed])


def sleep_long() -> str:
    (Path(sys.argv[2]) / "pid").write_text(str(os.getpid()))
    time.sleep(100)
    return "unreached"


def stay() -> str:
    """All ranks are there, and none waits for another."""
    chatter(2, 0)
    time.sleep(100)
    return "unreached"


def seed_snippet() -> str:
    """The guide's distributed_loss: each rank's gradient is its shard of that of one process."""
    rank, size = ts.dist.rank(), ts.dist.world_size()
    rng = np.random.default_rng(3)
    x, whole = rng.standard_normal((3, 4)), rng.standard_normal((4, 7))
    parts, loss = np.array_split(whole, size, axis=1), programs.distributed_loss()
    with ts.dist.mesh(axes=("tp",), shape=(size,)):
        got = ts.grad(loss)(x, ts.param(parts[rank])).numpy()
        backward = loss.inspect_ir("graph", backward=True)
    np.testing.assert_allclose(got, 2 * x.T @ (x @ parts[rank]), rtol=1e-12)
    (scatter,) = [line for line in backward.splitlines() if " reduce_scatter(" in line]
    assert "axis=('tp')" in scatter, scatter
    return "right"


def proofs() -> str:
    """Two programs in one run: what each says, as JSON."""
    return json.dumps({f.__name__: f() for f in (gradients, seed_snippet)})


if __name__ == "__main__":
    text = globals()[sys.argv[1]]()
    (Path(sys.argv[2]) / str(ts.dist.rank())).write_text(text)
