"""Fabrics: what joins the ranks of a mesh, how fast, and how long a collective takes on it.

    fabric("nvl72").time("all_reduce", 1 << 30, mesh, "tp").us
    ts.dist.mesh(axes=("dp", "tp"), shape=(8, 9), topology="nvl72")     names one for planning

A fabric has domains of ranks that are joined by one kind of link (a rack, a node), and may have
another link between domains. Rank r is in domain r // domain: ranks are row-major, so the last axes
of a mesh stay inside a domain as long as they fit.

The model is alpha-beta (Hockney 1994; Thakur, Rabenseifner and Gropp 2005): a ring takes

    base + steps * step + sent / bandwidth                                microseconds

with `sent` the bytes that a rank sends: 2 (n-1)/n S of an all_reduce, (n-1)/n S of an all_gather,
reduce_scatter or all_to_all, S of a broadcast or permute. S is the size by NCCL's convention: of
what a rank has before or after, whichever is larger. bandwidth is therefore what NCCL's tests call
bus bandwidth (NVIDIA/nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tessera import config
from tessera.errors import ArgumentError, did_you_mean
from tessera.numerics import DType
from tessera.tile.tuning.gpus import GPUS, Gpu

from ..lazy_dataclass import dataclass
from ..mesh.collectives.cost import COSTS, CollectiveCost
from ..mesh.device_mesh import Mesh

FABRICS: dict[str, Fabric] = {}
LOW_PART = 0.25  # of the bandwidth, by the protocol for small messages: see Link


@dataclass(frozen=True)
class Link:
    """What one rank sends while it receives as much, over one kind of wire. Times in microseconds.

    gbps      10^9 bytes a second, one way, of the data sheet
    bus_gbps  of it, what a ring reaches with large messages
    step, base          of a ring's step and of a call, for large messages
    low_step, low_base  by the protocol for small ones, which has a quarter of the bandwidth
    sum_gbps  S / time of an all_reduce that the switch adds up, from `sum_ranks` ranks on, after
    `sum_base`; 0: the switch cannot
    """

    name: str
    gbps: float
    bus_gbps: float
    step: float
    base: float
    low_step: float
    low_base: float
    sum_gbps: float = 0.0
    sum_base: float = 0.0
    sum_ranks: int = 0

    def ring(self, steps: int, sent: float, bus_gbps: float | None = None) -> float:
        """Microseconds of `steps` steps in which a rank sends `sent` bytes in all, by the protocol
        that is quicker."""
        rate = 1e3 * (self.bus_gbps if bus_gbps is None else bus_gbps)  # bytes a microsecond
        return min(self.base + steps * self.step + sent / rate,
                   self.low_base + steps * self.low_step + sent / (LOW_PART * rate))


@dataclass(frozen=True)
class DeviceModel:
    """What a rank computes with. tflops: dense matmuls by kind of operand, (kind, 10^12 / s)

    matmul_efficiency, memory_efficiency: of the peaks, what large matmuls and long streams reach.
    """

    name: str
    tflops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_gbps: float
    matmul_efficiency: float
    memory_efficiency: float
    source: str

    def peak(self, dtype: DType) -> float:
        """Multiply-adds of matmuls per second, times two, by the data sheet.

        A type that the device has no matmuls of runs in the next wider one that it has.
        """
        rates = dict(self.tflops)
        return 1e12 * next(rates[k] for k in _kinds(dtype) if k in rates)


def _kinds(dtype: DType) -> tuple[str, ...]:
    """What matmuls of a type may run as, the best first."""
    if dtype.kind in ("int", "uint", "bool"):
        return ("int8", "f32") if dtype.bits <= 8 else ("f32",)
    if dtype.name in ("f64", "tf32"):
        return dtype.name, "f32"
    if dtype.bits <= 8:  # every value of fp4 and fp6 is one of fp8: see docs/reference/numerics.md
        return "fp8", "f16", "f32"
    return ("f16", "f32") if dtype.bits == 16 else ("f32",)


@dataclass(frozen=True)
class CollectiveTime:
    """The time of a collective, how it goes, and which links it takes."""

    us: float
    how: str
    crosses: bool = False  # whether it leaves a domain


@dataclass(frozen=True)
class Fabric:
    """Domains of `domain` ranks joined by `inside`, and these by `between`; None: one domain.

    shared: the ranks take turns on one machine, so that every rate is divided among them.
    """

    name: str
    doc: str
    domain: int
    inside: Link
    between: Link | None
    device: DeviceModel
    shared: bool = False

    def __post_init__(self) -> None:
        if self.name in FABRICS:
            raise ArgumentError(f"the fabric {self.name!r} is declared twice")
        FABRICS[self.name] = self

    def device_of(self, mesh: Mesh) -> DeviceModel:
        """What each rank of the mesh computes with: its share, where ranks share a machine."""
        if not self.shared:
            return self.device
        part = 1 / mesh.size()
        d = self.device
        return replace(d, tflops=tuple((k, v * part) for k, v in d.tflops),
                       memory_bytes=d.memory_bytes * part, memory_gbps=d.memory_gbps * part)

    def need(self, mesh: Mesh) -> None:
        """Raise ArgumentError when the mesh has more ranks than the fabric joins."""
        ranks = mesh.world_size
        if self.between is None and ranks > self.domain:
            larger = [f.name for f in FABRICS.values() if f.between or f.domain >= ranks]
            raise ArgumentError(f"{mesh} has {ranks} ranks, the fabric {self.name} joins "
                                f"{self.domain}", hint="fabrics that join as many: "
                                + ", ".join(larger))

    def spread(self, mesh: Mesh, axes: str | Sequence[str] | None) -> tuple[int, int, int]:
        """(ranks of a group along `axes`, domains it lies in, fewest of its ranks in one)."""
        names = mesh.axes if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        return _spread(mesh, names, self.domain)

    def crosses(self, mesh: Mesh, axes: str | Sequence[str] | None) -> bool:
        """Whether groups along `axes` leave their domain."""
        return self.spread(mesh, axes)[1] > 1

    def time(self, op: str, size: float, mesh: Mesh,
             axes: str | Sequence[str] | None = None) -> CollectiveTime:
        """Of the collective `op` of `size` bytes in each group along `axes`, all at the same time.

        size: NCCL's: all_reduce, broadcast: the tensor; all_gather: the result; reduce_scatter,
        all_to_all: the operand; permute: what a rank sends
        Raises ArgumentError for an unknown op or too many ranks, AxisError for an unknown axis.
        """
        if op not in COSTS:
            raise ArgumentError(f"there is no collective {op!r}",
                                hint=did_you_mean(op, list(COSTS)))
        self.need(mesh)
        ranks, domains, least = self.spread(mesh, axes)
        cost = COSTS[op]
        if ranks == 1 or (size == 0 and cost.sent(ranks)):
            return CollectiveTime(0.0, "nothing to send")
        if self.shared:
            return self._in_turn(cost, size, ranks, mesh.size() // ranks)
        if domains == 1:
            return self._inside(cost, size, ranks)
        if cost.route == "pairs":
            return self._exchange(size, ranks, least)
        return self._across(cost, size, ranks, domains, least)

    def _in_turn(self, cost: CollectiveCost, size: float, ranks: int,
                 groups: int) -> CollectiveTime:
        link = self.inside
        one = link.ring(cost.steps(ranks), cost.sent(ranks) * size, link.bus_gbps / ranks)
        return CollectiveTime(groups * one, f"{groups} groups of {ranks} in turn")

    def _inside(self, cost: CollectiveCost, size: float, ranks: int) -> CollectiveTime:
        link = self.inside
        ring = link.ring(cost.steps(ranks), cost.sent(ranks) * size)
        found = CollectiveTime(ring, f"ring of {ranks} over {link.name}")
        if cost.switch_adds and link.sum_gbps and ranks >= link.sum_ranks:
            summed = link.sum_base + size / (1e3 * link.sum_gbps)
            if summed < ring:
                found = CollectiveTime(summed, f"{ranks} ranks, added by {link.name}'s switch")
        return found

    def _across(self, cost: CollectiveCost, size: float, ranks: int, domains: int, least: int
                ) -> CollectiveTime:
        """One ring over all ranks, as fast as the slowest domain leaves and enters; or, where
        each domain has as many, in the stages that the collective has."""
        assert self.between is not None  # need() has seen to it
        inside, between = self.inside, self.between
        rails = 1 if cost.route == "one" else least  # one wire for each of the group's ranks
        rate = min(inside.bus_gbps, rails * between.bus_gbps)
        crossing = cost.steps(domains)  # of the steps, those that leave a domain
        wait = (cost.steps(ranks) - crossing) * inside.step + crossing * between.step
        low = (cost.steps(ranks) - crossing) * inside.low_step + crossing * between.low_step
        sent = cost.sent(ranks) * size / (1e3 * rate)
        best = CollectiveTime(min(between.base + wait + sent,
                                  between.low_base + low + sent / LOW_PART),
                              f"ring of {ranks} over {domains} domains, {rails} x {between.name}",
                              True)
        if cost.stages and least * domains == ranks and least > 1:
            staged = _in_stages(self, cost, size, least, domains)
            if staged.us < best.us:
                best = staged
        return best

    def _exchange(self, size: float, ranks: int, least: int) -> CollectiveTime:
        """all_to_all: what stays in the domain beside what leaves it, on a rank's own wire."""
        assert self.between is not None
        away = ranks - least
        near = self.inside.ring(least - 1, size * (least - 1) / ranks)
        far = self.between.ring(away, size * away / ranks)
        return CollectiveTime(max(near, far),
                              f"{least - 1} ranks over {self.inside.name} beside {away} over "
                              f"{self.between.name}", True)


@lru_cache(maxsize=1024)
def _spread(mesh: Mesh, axes: tuple[str, ...], domain: int) -> tuple[int, int, int]:
    """Of the groups, which are all the same when extents divide, the one that is spread most."""
    found = []
    for group in mesh.groups(axes):
        held = Counter(mesh.world_ranks[rank] // domain for rank in group)
        found.append((len(group), len(held), min(held.values())))
    return max(found, key=lambda s: (s[1], -s[2]))


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth / (size / time): what a rank sends of each byte of the size.

    NVIDIA/nccl-tests doc/PERFORMANCE.md, "Summary".
    """
    return COSTS[op].sent(ranks)


# --- in stages over domains -----------------------------------------------------------------------
def _in_stages(fabric: Fabric, cost: CollectiveCost, size: float, k: int,
               domains: int) -> CollectiveTime:
    """k ranks of each domain exchange the whole, and the domains a rank's part along each rail."""
    links = {"inside": fabric.inside, "between": _between(fabric)}
    ranks = {"inside": k, "between": domains}
    bytes_of = {"inside": size, "between": size / k}
    us = {where: sum(_stage(links[where], stage, bytes_of[where], ranks[where])
                     for w, stage in cost.stages if w == where) for where in links}
    order = list(dict.fromkeys(where for where, _ in cost.stages))
    words = [f"{ranks[w]} {'ranks' if w == 'inside' else 'domains'} over {links[w].name}"
             for w in order]
    then = ", then " if len(order) == len(cost.stages) else ", "
    return CollectiveTime(us["inside"] + us["between"], f"in stages: {then.join(words)}", True)


def _stage(link: Link, cost: CollectiveCost, size: float, ranks: int) -> float:
    return link.ring(cost.steps(ranks), cost.sent(ranks) * size) if ranks > 1 else 0.0


def _between(fabric: Fabric) -> Link:
    assert fabric.between is not None
    return fabric.between


def fabric(name: str | Fabric) -> Fabric:
    """By name, or of a file that `python -m tessera fabric` wrote, FILE.json. Raises ArgumentError
    naming those that exist."""
    if isinstance(name, Fabric):
        return name
    if name not in FABRICS and name.endswith(".json"):
        return read_fabric(name)
    if name not in FABRICS:
        raise ArgumentError(f"there is no fabric {name!r}", hint=did_you_mean(name, list(FABRICS)))
    return FABRICS[name]


def read_fabric(path: str) -> Fabric:
    """The fabric of a file, which keeps its path as its name."""
    try:
        data = json.loads(Path(path).read_text())
        like, inside, rates = fabric(data["like"]), data["inside"], data["rates"]
        return replace(
            like, name=path, doc=f"{data.get('device', like.device.name)}, measured; else as "
            f"{like.name}", inside=replace(like.inside, **inside),
            device=replace(like.device, **rates))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is no file of a measured fabric: {error}",
                            hint="mpirun -n 2 python -m tessera fabric --out FILE writes one"
                            ) from error


def fabric_of(mesh: Mesh, name: str | Fabric | None = None) -> Fabric:
    """The fabric that is asked for, the mesh's topology, or that of the setting; else by its
    devices: "8xh200" of up to 8 CUDA devices, "infiniband" of more, "cpu" of others."""
    if asked := name or mesh.topology or config.get("fabric"):
        return fabric(asked)
    if not mesh.devices[0].startswith("cuda"):
        return FABRICS["cpu"]
    return FABRICS["8xh200" if mesh.size() <= FABRICS["8xh200"].domain else "infiniband"]


# --- the records ----------------------------------------------------------------------------------
# Steps and bases: NVIDIA/nccl src/graph/tuning.cc, tables baseLat and hwLat, "Ring", protocols
# Simple and LL, for NVLINK, PCI and NET; LL has a quarter of the bandwidth there.
_BASE, _LOW_BASE = 8.4, 6.6
_GB = 1e9


def _device(gpu: Gpu, memory_bytes: float, tflops: tuple[tuple[str, float], ...] = (),
            name: str = "", memory_gbps: float = 0.0, source: str = "") -> DeviceModel:
    """Matmuls reach 0.7 of the peak: cuBLAS on H100 and H200 gives 632 to 827 of 989 TFLOP/s of
    bf16 for shapes of 4096 and more (pranjalssh/fast.cu, NVIDIA/tilus pull request 154,
    waynehacking8/blackwell-tensorcore-kernels). A copy reaches 0.9 of HBM3: 3.0 of 3.35 TB/s
    (QuACK's README)."""
    rates = tflops or (*gpu.matmul_tflops, ("f32", gpu.f32_tflops))
    return DeviceModel(name or gpu.name, rates, memory_bytes, memory_gbps or gpu.memory_gbps, 0.7,
                       0.9,
                       source or gpu.source)


_H200 = _device(GPUS["H200"], 141 * _GB)
# 72 GPUs: 180 PFLOP/s of bf16, 360 of fp8, 13.4 TB and 576 TB/s of HBM3e, 130 TB/s of NVLink 5.
# NVIDIA GB200 NVL72 product page, 2025; rates with sparsity are halved there and here.
_GB200 = _device(GPUS["B200"], 186 * _GB, (("f16", 2500), ("tf32", 1250), ("fp8", 5000),
                                          ("int8", 5000), ("f64", 40), ("f32", 80)),
                 "GB200", 8000, "NVIDIA GB200 NVL72 product page, 2025")
# NVLink 4: 18 links of 25 GB/s one way (NVIDIA H200 datasheet). Measured on 8 x H200, NCCL 2.27.7
# (stas00/ml-engineering, network/README): a ring 365.6 GB/s on the bus at 8 GiB, all_gather 361.4,
# reduce_scatter 362.9; with NVLS, which NCCL takes from 5 GPUs on, an all_reduce of 8 GiB 473.1 on
# the bus of 8 and 414.2 of 5: 259 to 274 GB/s of the size. sum_base: what 64 MiB and 128 MiB (346.5
# and 401.9 on the bus) take beyond their bytes.
_NVLINK4 = Link("NVLink 4", 450, 364, 3.4, _BASE, 0.6, _LOW_BASE, 270, 90, 5)
# NVLink 5: 18 links of 50 GB/s one way. A ring 680 GB/s on the bus of 32 GPUs (NVIDIA GTC25,
# S72583); an all_reduce of 4 and 8 GiB on all 72: 835 to 847 on the bus (nccl-tests pull request
# 43), 426 GB/s of the size. sum_base: NVLink 4's.
_NVLINK5 = Link("NVLink 5", 900, 680, 3.4, _BASE, 0.6, _LOW_BASE, 426, 90, 5)
# One ConnectX-7 of 400 Gb/s for each GPU (DGX H200 and DGX GB200 user guides). NCCL's model takes
# 12 GB/s of 12.5 (topo.h, NET_BW): 0.96.
_NDR = Link("InfiniBand NDR", 50, 48, 14.0, _BASE, 2.7, _LOW_BASE)
# PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 = 31.5 GB/s one way. NCCL's model takes 12 of the 15.75
# GB/s of PCIe 3.0 (topo.h, PCI_BW): 24 here.
_PCIE4 = Link("PCIe 4.0", 31.5, 24, 5.7, _BASE, 1.0, _LOW_BASE)
# Two cores of an AMD EPYC (family 26), 2026-11-21: benchmarks/fabric.py. Ranks are those of
# ts.dist.simulate, which take turns.
_TURNS = Link("memory", 11, 1.1, 600, 0, 600, 0)

Fabric("nvl72", "GB200 NVL72: 72 GPUs on NVLink 5; racks joined by one NDR port for each GPU", 72,
       _NVLINK5, _NDR, _GB200)
Fabric("8xh200", "one node of 8 H200 on NVSwitch (NVLink 4)", 8, _NVLINK4, None, _H200)
Fabric("8xh100", "one node of 8 H100 on NVSwitch (NVLink 4)", 8, _NVLINK4, None,
       _device(GPUS["H100"], 80 * _GB))
Fabric("infiniband", "nodes of 8 H200 on NVLink 4, joined by one NDR port for each GPU", 8,
       _NVLINK4, _NDR, _H200)
Fabric("pcie", "one node of 8 L40S on PCIe 4.0 x16", 8, _PCIE4, None,
       _device(GPUS["L40S"], 48 * _GB))
Fabric("cpu", "the ranks of ts.dist.simulate on the machine the figures were measured on", 1 << 16,
       _TURNS, None,
       DeviceModel("two CPU cores", (("f32", 0.2), ("f64", 0.1)), 24 * _GB, 22, 1.0, 1.0,
                                 "measured, see the record"), shared=True)

__all__ = ["FABRICS", "CollectiveTime", "DeviceModel", "Fabric", "Link", "bus_factor", "fabric",
           "fabric_of", "read_fabric"]
