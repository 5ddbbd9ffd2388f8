"""Programs that every transport runs: the same functions on simulated ranks and under mpirun.

    mpirun -n 2 python tests/mesh/battery.py PROGRAM FOLDER     each rank writes FOLDER/<rank>
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import tessera as ts
from tessera.mesh.collective import COLLECTIVES
from tessera.mesh.reshard import plan, reshard
from tessera.mesh.world import transport

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
    terms = [operand((6, 5), "bf16", r) for r in range(size)]
    exact = np.sum([t.numpy().astype(np.float64) for t in terms], axis=0)
    wide = ts.dist.all_reduce(terms[rank], dtype="f32").numpy()
    scale = np.sum([np.abs(t.numpy().astype(np.float64)) for t in terms], axis=0)
    assert (np.abs(wide - exact) <= 1e-5 * scale).all()
    assert np.linalg.norm(wide - exact) <= 1e-5 * np.linalg.norm(exact)
    assert (ts.dist.all_reduce(terms[rank]).array == ts.cast(ts.tensor(wide), "bf16").array).all()
    return hashlib.sha256(wide.tobytes()).hexdigest()


def chatter(steps: int, rank: int) -> None:
    for _ in range(steps):
        ts.dist.all_reduce(ts.ones((4,)))


def fail_early() -> str:
    """Before MPI has started on the rank that fails."""
    if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
        raise ValueError("broken before the first collective")
    chatter(1000, 0)
    return "unreached"


def fail() -> str:
    chatter(3, 0)
    if ts.dist.rank() == 1:
        raise ValueError("broken on purpose")
    chatter(1000, 0)
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
    chatter(2, 0)
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
        os.kill(os.getpid(), signal.SIGKILL)
    chatter(1000, 0)
    return "unreached"


if __name__ == "__main__":
    text = globals()[sys.argv[1]]()
    (Path(sys.argv[2]) / str(ts.dist.rank())).write_text(text)
