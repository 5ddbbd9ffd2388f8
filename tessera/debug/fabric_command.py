"""`python -m tessera fabric`: what joins the ranks that run it, measured, as a file for planning.

    mpirun -n 2 python -m tessera fabric --out here.json
    torchrun --nproc-per-node 4 -m tessera fabric --out here.json --like nvl72

Collectives of several sizes on all ranks, on their GPUs where they have some; there also a copy and
a matmul. Prints each collective beside what the fabric then says of it.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.jit import jit
from ..mesh.collectives.functions import all_gather, all_reduce, barrier, reduce_scatter
from ..mesh.device_mesh import Mesh
from ..mesh.device_mesh import mesh as make_mesh
from ..mesh.placement import gpu_of
from ..mesh.world import transport
from ..numerics import as_type
from ..planning.fabric import FABRICS, Fabric, fabric
from ..planning.measured_fabric import LARGE, ExchangeTime, write_fabric
from ..runtime.device import device, has_gpu
from ..tensor import Tensor

SIZES, HOST_MOST = tuple(1 << n for n in range(12, 31, 2)), 1 << 26  # bytes
ROUNDS, ROUND_US, MOST_CALLS = 5, 3e4, 50
LEAST_MOST = [n for n in SIZES if n >= LARGE][1]  # bytes: what is fitted takes two such sizes
SIDE = 8192  # of the matmul
CALLS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": all_reduce, "all_gather": partial(all_gather, dim=0),
    "reduce_scatter": partial(reduce_scatter, dim=0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("fabric.json"),
                        help="where the figures go (fabric.json)")
    parser.add_argument("--like", metavar="NAME", help="what is not measured is that of one of "
                        + ", ".join(FABRICS) + "; by the device where it is not said")
    parser.add_argument("--most", type=int, metavar="BYTES",
                        help="the largest message, 2^26 and more (2^30, on hosts 2^26)")


def run(args: argparse.Namespace) -> int:
    here = transport()
    if here.size == 1:
        raise ArgumentError("one rank has nothing to measure",
                            hint="mpirun -n 2 python -m tessera fabric, or torchrun")
    if args.out.suffix != ".json":
        raise ArgumentError(f"--out {args.out}: the name of a fabric's file ends with .json")
    if args.most is not None and args.most < LEAST_MOST:
        raise ArgumentError(f"--most {args.most}: figures need two sizes of {LARGE} bytes and more",
                            hint=f"--most {LEAST_MOST}, or more")
    mesh = make_mesh([f"cuda:{r}" for r in range(here.size)], "ranks") if has_gpu() else \
        make_mesh(axes="ranks", shape=here.size)
    place = gpu_of(mesh)
    like = fabric(args.like) if args.like else _like(place)
    most = args.most or (HOST_MOST if place is None else SIZES[-1])
    times = [measured(op, size, mesh, place) for op in CALLS for size in SIZES if size <= most]
    rates = {} if place is None else measured_rates(like, place)
    if here.rank == 0:
        name = "the hosts of the ranks" if place is None else device(place).name
        about = {"device": f"{here.size} x {name}", "backend": mesh.backend,
                 "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}
        found = write_fabric(args.out, like, times, rates, about)
        print(report(found, times, mesh))
        print(f"{args.out}: {found.doc}\n--fabric {args.out}, or TESSERA_FABRIC={args.out}")
    barrier(mesh=mesh)
    return 0


def _like(place: int | None) -> Fabric:
    """The first declared one of the device at hand."""
    if place is None:
        return FABRICS["cpu"]
    name = device(place).name
    for found in FABRICS.values():
        if found.device.name in name:
            return found
    raise ArgumentError(f"no fabric of {name} is declared",
                        hint=f"--like one of {', '.join(FABRICS)}")


# --- collectives ---------------------------------------------------------------------------------
def measured(op: str, size: int, mesh: Mesh, place: int | None) -> ExchangeTime:
    """Of `size` bytes of f32, NCCL's size, on the slowest rank."""
    n = mesh.size()
    part = max(1, size // (4 * n))
    x = F.zeros((part if op == "all_gather" else n * part,), "f32")
    x = x if place is None else x.to(f"cuda:{place}")
    us = call_us(partial(CALLS[op], x, "ranks", mesh=mesh), mesh, place)
    return ExchangeTime(op, n, 4 * n * part, us)


def call_us(call: Callable[[], Any], mesh: Mesh, place: int | None) -> float:
    """Microseconds of a call in a row of them, on the slowest rank; the median of some rounds."""
    def row(count: int) -> float:
        barrier(mesh=mesh)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _ended(place)
        return 1e6 * (time.perf_counter() - begin) / count

    row(2)
    count = int(min(max(ROUND_US / slowest(row(2), mesh), 1), MOST_CALLS))
    return slowest(statistics.median(row(count) for _ in range(ROUNDS)), mesh)


def slowest(us: float, mesh: Mesh) -> float:
    mine = Tensor(np.array([us]), as_type("f64"))
    return float(all_reduce(mine, "ranks", op="max", mesh=mesh).item())


def _ended(place: int | None) -> None:
    if place is not None:
        device(place).synchronize()


# --- a GPU alone ---------------------------------------------------------------------------------
def measured_rates(like: Fabric, place: int) -> dict[str, float]:
    """Of the rates of its data sheet, what a copy and a large matmul reach."""
    on, kind = f"cuda:{place}", "bf16 @accum(f32)"
    x = F.zeros((1 << 28,), "f32").to(on)
    a = F.zeros((SIDE, SIDE), kind).to(on)
    copied = alone_us(jit(lambda x: x + 1.0), place, x)
    multiplied = alone_us(jit(lambda a, b: a @ b), place, a, a)
    peak = like.device.peak(as_type(kind).dtype)
    return {"memory_efficiency": 2 * 4 * x.shape[0] / (copied * 1e3 * like.device.memory_gbps),
            "matmul_efficiency": 2e6 * SIDE ** 3 / (multiplied * peak)}


def alone_us(f: Callable[..., Any], place: int, *given: Tensor) -> float:
    for _ in range(3):
        f(*given)
    _ended(place)
    begin = time.perf_counter()
    for _ in range(20):
        f(*given)
    _ended(place)
    return 1e6 * (time.perf_counter() - begin) / 20


def report(found: Fabric, times: list[ExchangeTime], mesh: Mesh) -> str:
    """What was measured, and what the fabric says."""
    lines = [f"{'':16}{'bytes':>12}{'us':>10}{'says':>10}{'GB/s on the bus':>17}"]
    for t in times:
        says = found.time(t.op, t.bytes, mesh, "ranks").us
        lines.append(f"{t.op:16}{t.bytes:12}{t.us:10.1f}{says:10.1f}{t.sent / t.us / 1e3:17.1f}")
    link, made = found.inside, found.device
    lines.append(f"{link.name}: {link.bus_gbps:.1f} GB/s; a call {link.base:.1f} us and a step "
                 f"{link.step:.1f}, of small messages {link.low_base:.1f} and {link.low_step:.1f}")
    lines.append(f"{made.name}: matmuls at {made.matmul_efficiency:.2f}, copies at "
                 f"{made.memory_efficiency:.2f} of the data sheet")
    return "\n".join(lines)


__all__ = ["add_arguments", "measured", "measured_rates", "run"]
