"""Programs of tests/gpu/test_nccl.py, run by mpirun: each rank writes FOLDER/<rank>.

    mpirun -n 2 python tests/gpu/nccl_programs.py values FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.dist import all_gather, all_reduce, mesh, reduce_scatter  # noqa: E402
from tessera.runtime.libnccl import open_library  # noqa: E402

TYPES = ("f32", "f64", "bf16", "f16", "int32", "int64")


def mine(rank: int, shape: tuple, kind: str) -> ts.Tensor:
    rng = np.random.default_rng([3, rank])
    return ts.tensor(50 * rng.standard_normal(shape), kind)


def on_gpu(x: ts.Tensor) -> torch.Tensor:
    spelled = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
    kind = getattr(torch, spelled.get(x.dtype.name, x.dtype.name))
    words = x.buffer.view(f"i{x.dtype.numpy.itemsize}")
    return torch.from_numpy(words.copy()).view(kind).cuda()


def bits(y) -> np.ndarray:
    if isinstance(y, torch.Tensor):
        return y.reshape(-1).view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(y.buffer).view(np.uint8).reshape(-1)


def same(call, x: ts.Tensor, members: int = 2) -> None:
    """The result of arrays on GPUs has the bits of the result of the same numbers on the host; of
    our tensors there, too. Sums of f32 over more than two ranks are added in an order of NCCL's."""
    got, want, ours = call(on_gpu(x)), call(x), call(x.to(f"cuda:{torch.cuda.current_device()}"))
    shapes = [tuple(y.shape) for y in (got, want, ours)]
    assert len(set(shapes)) == 1, (shapes, str(x.type))
    assert got.is_cuda and ours.place == torch.cuda.current_device()
    if members > 2:
        for y in (got.cpu().numpy(), ours.numpy()):
            np.testing.assert_allclose(y, want.numpy(), rtol=1e-5, atol=1e-4)
        return
    np.testing.assert_array_equal(bits(got), bits(want))
    np.testing.assert_array_equal(bits(ours), bits(want))


def values(rank: int, ranks: int) -> dict:
    world = mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    with world:
        backend = world.backend
        for kind in TYPES:
            for op in ("sum", "max", "min", *["mean"] * (kind[0] != "i")):
                for shape in ((), (1,), (7, 33), (1000, 129)):
                    same(lambda x, op=op: all_reduce(x, "dp", op=op), mine(rank, shape, kind))
                for dim in (0, 1):
                    same(lambda x, op=op, dim=dim: reduce_scatter(x, "dp", dim=dim, op=op),
                         mine(rank, (9, 33), kind))
            same(lambda x: all_gather(x, "dp", dim=0), mine(rank, (3 + rank, 5), kind))
            same(lambda x: all_gather(x, "dp", dim=1), mine(rank, (3, 5 + rank), kind))
        same(lambda x: all_reduce(x, "dp", dtype=ts.f32), mine(rank, (100,), "bf16"))
        import cupy

        x = mine(rank, (64, 3), "f32")
        got = all_reduce(cupy.asarray(x.buffer), "dp")
        np.testing.assert_array_equal(cupy.asnumpy(got), all_reduce(x, "dp").buffer)
        try:
            all_reduce(on_gpu(mine(rank, (4 + rank,), "f32")), "dp")
        except ts.TesseraError as error:
            disagreed = "disagree" in str(error)
    return {"backend": backend, "disagreed": disagreed}


def axes(rank: int, ranks: int) -> dict:
    """A communicator for each axis of a mesh, and for parts of one."""
    grid = mesh([f"cuda:{r}" for r in range(ranks)], axes=("dp", "tp"), shape=(ranks // 2, 2))
    with grid:
        for axis in ("tp", "dp", ("dp", "tp"), "tp"):
            same(lambda x, axis=axis: all_reduce(x, axis), mine(rank, (31, 5), "f32"),
                 grid.size(axis))
    return {"backend": grid.backend}


def windows(rank: int, ranks: int) -> dict:
    """A program that sums, sums parts and gathers, and sends from windows where NCCL has them."""
    world = mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    x = np.random.default_rng(5).standard_normal((ranks, 4, 1 << 21)).astype(np.float32)
    rows, whole = ts.ShardSpec(("row",), ("dp",)), ts.ShardSpec(replicate=True)

    def f(x: ts.Tensor, p: ts.Tensor) -> tuple:
        y = x * 2.0 + 1.0
        total = ts.sum(y, axis=(0, 1))
        return total * p, ts.dist.shard(ts.sum(y * y, axis=(0, 1)), rows), \
            ts.dist.shard(ts.sum(y, axis=1), whole)

    given = ts.dist.distribute(ts.tensor(x), rows, mesh=world)
    p = ts.dist.distribute(ts.tensor(np.ones(1 << 21, np.float32)), whole, mesh=world)
    said, found = [], []
    for asked in (True, False):
        with ts.config.scope(comm_windows=asked):
            g = ts.jit(f)
            for _ in range(3):
                made = g(given, p)
            found.append([y.numpy() for y in made])
            said.append(sorted({line.partition(" over")[0] for line in str(g.plan).splitlines()
                                if "in windows" in line}))
    y = 2.0 * x.astype(np.float64) + 1.0
    want = y.sum((0, 1)), (y * y).sum((0, 1)), y.sum(1)
    for got in found:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    library = open_library()
    return {"there": library is not None and library.has_windows, "with": said[0],
            "without": said[1]}


def speed(rank: int, ranks: int) -> dict:
    """GB/s of all_reduce on arrays of 256 MiB, beside a copy from the GPU to pinned host memory."""
    x = torch.ones(1 << 26, device="cuda")
    host = torch.empty(1 << 26, pin_memory=True)

    def seconds(run) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        ts.dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 20

    took = {"all_reduce": seconds(lambda: all_reduce(x)), "host": seconds(lambda: host.copy_(x))}
    small = seconds(lambda: all_reduce(x[:1024]))
    gbps = {name: 4e-9 * x.numel() / t for name, t in took.items()}
    return {"all_reduce GB/s": gbps["all_reduce"], "bus GB/s": gbps["all_reduce"] * 2 *
            (ranks - 1) / ranks, "to host GB/s": gbps["host"], "4 KiB us": 1e6 * small}


def main() -> None:
    program, folder = sys.argv[1:]
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    programs = {"values": values, "axes": axes, "windows": windows, "speed": speed}
    found = programs[program](rank, ranks)
    (Path(folder) / str(rank)).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
