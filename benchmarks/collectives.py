"""Collectives of arrays on GPUs beside torch.distributed's, in one run: bus bandwidth and latency.

    mpirun -n 2 python benchmarks/collectives.py

Each rank has a GPU of its own. Ours and torch's take turns on arrays of the same size; times are
those of the GPU, by events around several calls, the median of a few such rounds, and the slowest
rank's. Bus bandwidth is counted as by nccl-tests: what each link has to carry.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable

import numpy as np
import record
import torch
import torch.distributed as peers

import tessera as ts

SIZES = {"16 KiB": 1 << 14, "1 MiB": 1 << 20, "64 MiB": 1 << 26, "1 GiB": 1 << 30}
ROUNDS = 7


def factor(op: str, n: int) -> float:
    """Of the size, what each link carries."""
    return (2 if op == "all_reduce" else 1) * (n - 1) / n


def join_torch(rank: int, ranks: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    device = torch.device("cuda", torch.cuda.current_device())
    peers.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)


def calls(op: str, size: int, rank: int, ranks: int) -> dict[str, Callable[[], object]]:
    """Ours on our tensors and on torch's, and torch's, of `size` bytes in all."""
    count = size // 4
    whole = torch.arange(count, device="cuda", dtype=torch.float32).add_(rank)
    part, out = whole[:count // ranks], torch.empty_like(whole)
    if op == "all_reduce":
        mine = whole
        torch_call = lambda: peers.all_reduce(out)  # noqa: E731
    elif op == "all_gather":
        mine = part
        torch_call = lambda: peers.all_gather_into_tensor(out, part)  # noqa: E731
    else:
        mine = whole
        torch_call = lambda: peers.reduce_scatter_tensor(out[:count // ranks], whole)  # noqa: E731
    call = getattr(ts.dist, op)
    options = {} if op == "all_reduce" else {"dim": 0}
    ours = ts.from_dlpack(mine.clone())
    return {"ours": lambda: call(ours, **options), "ours, torch array": lambda: call(
        mine, **options), "torch": torch_call}


def seconds(run: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def measure(op: str, size: int, rank: int, ranks: int) -> dict[str, float]:
    """Seconds of each, on the slowest rank."""
    runs = calls(op, size, rank, ranks)
    repeats = max(5, min(100, (1 << 30) // size))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        seconds(run, repeats)  # the first calls of a process take longer
    for _ in range(ROUNDS):
        for name, run in runs.items():
            peers.barrier()
            times[name].append(seconds(run, repeats))
    medians = torch.tensor([statistics.median(t) for t in times.values()], device="cuda")
    peers.all_reduce(medians, peers.ReduceOp.MAX)
    return dict(zip(runs, medians.tolist(), strict=True))


def check(rank: int, ranks: int) -> None:
    """The sums are right, before anything is timed."""
    x = ts.tensor(np.arange(1000, dtype=np.float32) + rank)
    x = x.to(f"cuda:{torch.cuda.current_device()}")
    want = ranks * np.arange(1000, dtype=np.float32) + sum(range(ranks))
    np.testing.assert_array_equal(ts.dist.all_reduce(x).numpy(), want)


def main() -> None:
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    if ranks < 2:
        sys.exit("mpirun -n 2 python benchmarks/collectives.py")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join_torch(rank, ranks)
    check(rank, ranks)
    rows = []
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name()}, NCCL "
              f"{'.'.join(map(str, torch.cuda.nccl.version()))}, torch {torch.__version__}")
        print(f"{'':16}{'bytes':>8}{'call':>20}{'us':>10}{'bus GB/s':>10}{'torch time / time':>19}")
    for size_name, size in SIZES.items():
        for op in ("all_reduce", "all_gather", "reduce_scatter"):
            found = measure(op, size, rank, ranks)
            torch.cuda.empty_cache()
            for name, took in found.items() if rank == 0 else ():
                bus = size * factor(op, ranks) / took / 1e9
                rows.append({"op": op, "size": size_name, "call": name, "us": 1e6 * took,
                             "bus_gbps": bus})
                print(f"{op:16}{size_name:>8}{name:>20}{1e6 * took:10.1f}{bus:10.1f}"
                      f"{found['torch'] / took:19.3f}", flush=True)
    if rank == 0:
        record.write("collectives", {
            "device": f"{ranks} x {torch.cuda.get_device_name()}", "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "rows": rows}, shown=False,
            ranks=ranks)
    peers.destroy_process_group()


if __name__ == "__main__":
    main()
