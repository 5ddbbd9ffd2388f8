"""The products of a training step, each kernel as the step launches it, in a row under load.

    for p in matmuls_of(program): SustainedClock(device()).loads({"ours": MatmulRun(p, ...)}, ...)

A step is limited by the GPU's power, so what counts of a product is its time at the clock that
this leaves (runtime/sustained.py). Operands are normal numbers in memory of their own, in as many
copies as the second-level cache cannot hold: in a step, other things come between a product and the
next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import tessera as ts

from ..graph.cuda.levels import program_of
from ..graph.cuda.program.compile_program import compile_launches
from ..graph.cuda.program.placed_launch import PlacedLaunch
from ..graph.cuda.program.run import CudaProgram, GroupLaunch
from ..graph.schedule.ir import GroupOperand, ScheduledGroup
from ..kernels.routine import ForeignArray
from ..lazy_dataclass import dataclass
from ..numerics import DType
from ..runtime.buffer import DeviceBuffer
from ..runtime.device import Device, device
from ..runtime.normal_numbers import normal_numbers
from ..runtime.sustained import SustainedClock, SustainedLoad
from .models.record import StepModel, shapes_of
from .models.step import first_state, training_step

CACHES = 3  # times the second-level cache that all copies of the operands take, at least
FLOPS_PER_US = 6e8  # about: of how many launches are recorded together
OURS, THEIRS = "ours", "cuBLAS"


@dataclass(frozen=True)
class Pair:
    """Two operands that are multiplied, [M, K] and [K, N], or transposed where `layout` says t."""

    a: GroupOperand
    b: GroupOperand
    layout: str

    @property
    def extents(self) -> tuple[int, int, int]:
        """M, N, K"""
        a, b = self.a.shape[-2:], self.b.shape[-2:]
        M, K = a if self.layout[0] == "n" else a[::-1]
        return M, b[1] if self.layout[1] == "n" else b[0], K


@dataclass(frozen=True)
class StepMatmul:
    """launches: of the matmul, and of the sum of its parts.  count: how often a step has it."""

    launches: tuple[GroupLaunch, ...]
    count: int

    @property
    def group(self) -> ScheduledGroup:
        return self.launches[0].group

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Whose products are added."""
        own, layout = self.group.reads[:len(self.group.steps[0].args)], self.group.attr("layout")
        return tuple(Pair(own[i], own[i + 1], layout[i:i + 2]) for i in range(0, len(own), 2))

    @property
    def beside(self) -> tuple[GroupOperand, ...]:
        """What is read behind the matmul: a bias."""
        return self.group.reads[2 * len(self.pairs):]

    @property
    def flops(self) -> float:
        return self.group.steps[0].flops

    @property
    def title(self) -> str:
        M, N, _ = self.pairs[0].extents
        depths = " + ".join(str(p.extents[2]) for p in self.pairs)
        more = [f"+ {o.type.dtype}{list(o.shape)}" for o in self.beside]
        return " ".join([f"{self.group.attr('layout')} {M}x{N}x{depths}", *more])

    @property
    def how(self) -> str:
        """The block, the parts, the pairs of blocks. Where the kernel that adds the parts goes on
        with them, as an optimizer does, its ops are said: its time is more than a sum's."""
        s, attrs = self.group.schedule, dict(self.group.attrs)
        words = [f"parts={self.group.writes[0].shape[0]}"] * ("depth" in attrs)
        more = [launch.group for launch in self.launches[1:]]
        words += [f"cluster={s.cluster}"] * bool(s.cluster)
        if sum(len(g.writes) for g in more) > 1:
            words += [f"(added by {sum(len(g.steps) for g in more)} ops)"]
        return " ".join([f"{s.m}x{s.n}", *words])


def step_program(model: StepModel) -> CudaProgram:
    """The lowered step of a model. Nothing is compiled, and no weights are made."""
    params = shapes_of(model, ts.zeros)
    x = ts.zeros((model.B, model.T), "int32")
    return program_of(training_step(model).traced(
        params, first_state(model, params), x, x).graph)


def matmuls_of(program: CudaProgram) -> list[StepMatmul]:
    """Each kind once, in the order of the program."""
    found: dict[Any, list[GroupLaunch]] = {}
    for launch in program.launches:
        if isinstance(launch, GroupLaunch) and launch.group.kind == "gemm":
            shapes = tuple(shape for _, shape in launch.arguments)
            found.setdefault((launch.shared, shapes), []).append(launch)
    return [StepMatmul((each[0], *_sums(each[0], program)), len(each)) for each in found.values()]


def _sums(launch: GroupLaunch, program: CudaProgram) -> list[GroupLaunch]:
    """The launches that add the parts of a matmul."""
    if "depth" not in dict(launch.group.attrs):
        return []
    readers = program.plan.readers[program.base(launch.group.writes[0].name)]
    return [s for s in (program.steps[i] for i in readers) if isinstance(s, GroupLaunch)]


# --- runs -----------------------------------------------------------------------------------------
class MatmulMemory:
    """Copies of all that a product reads and writes. buffers: of each copy, by name."""

    def __init__(self, product: StepMatmul, on: Device):
        sizes: dict[str, tuple[int, DType]] = {}
        for launch in product.launches:
            operands = *launch.group.reads, *launch.group.writes
            for (name, shape), o in zip(launch.arguments, operands, strict=True):
                count = max(prod(shape), sizes.get(name, (0, None))[0])
                sizes[name] = count, o.type.dtype
        nbytes = sum(n * dtype.numpy.itemsize for n, dtype in sizes.values())
        self.copies = max(1, -(-CACHES * on.l2_bytes // nbytes))
        self.buffers: list[dict[str, DeviceBuffer]] = [
            {name: normal_numbers(on, i, n, dtype) for i, (name, (n, dtype)) in enumerate(
                sizes.items())} for _ in range(self.copies)]

    def arrays(self, launch: GroupLaunch, copy: int, on: Device) -> list[ForeignArray]:
        operands = *launch.group.reads, *launch.group.writes
        return [ForeignArray(self.buffers[copy][name].pointer, shape, o.type.dtype, on.index, self)
                for (name, shape), o in zip(launch.arguments, operands, strict=True)]


class MatmulRun:
    """Calls of a product, each with the next copy of its operands."""

    def __init__(self, product: StepMatmul, memory: MatmulMemory, on: Device):
        self.memory = memory
        self.calls = [[(launch, memory.arrays(launch, i, on)) for launch in product.launches]
                      for i in range(memory.copies)]
        self._next = itertools.cycle(range(memory.copies))
        self._made: dict[int, list[list[PlacedLaunch]]] = {}

    def __call__(self, stream: int) -> None:
        if stream not in self._made:
            self._made[stream] = [[PlacedLaunch(partial(launch.recipe, arrays), arrays, stream)
                                   for launch, arrays in call] for call in self.calls]
        for launch in self._made[stream][next(self._next)]:
            launch()


def compile_runs(runs: Sequence[MatmulRun], on: Device) -> None:
    """All of their kernels, side by side."""
    compile_launches([call for run in runs for calls in run.calls for call in calls], (), (),
                     lambda name: 0, on.index)


def measure_matmuls(model: StepModel, clock: SustainedClock,
                     peer: Callable[[StepMatmul, MatmulRun], Any] | None,
                     told: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each product of a step.

    peer: makes a run of cuBLAS on the same operands: `distance()` says how far our result lies from
    its, `kernels()` which it launches.
    """
    on, products = device(), matmuls_of(step_program(model))
    ours = [MatmulRun(p, MatmulMemory(p, on), on) for p in products]
    compile_runs(ours, on)
    peers = [] if peer is None else [peer(p, run) for p, run in zip(products, ours, strict=True)]
    off = [{"off": theirs.distance()} for theirs in peers]
    rows = []
    for i, (p, run) in enumerate(zip(products, ours, strict=True)):
        runs = {OURS: run} | ({THEIRS: peers[i]} if peers else {})
        rows.append(row(p, clock.loads(runs, p.flops / FLOPS_PER_US)))
        times = ", ".join(f"{name} {rows[-1][name]['us']:.1f} us" for name in runs)
        told(f"{model.name}: {p.title}: {p.how}: {times}")
    names = [{"kernels": theirs.kernels()} for theirs in peers]  # a profiler slows what follows
    return [r | o | n for r, o, n in zip(rows, off, names, strict=True)] if peers else rows


def row(p: StepMatmul, loads: dict[str, SustainedLoad]) -> dict[str, Any]:
    """For JSON."""
    made: dict[str, Any] = {"product": p.title, "how": p.how, "count": p.count}
    for name, load in loads.items():
        made[name] = {"us": round(load.us, 2), "spread": round(load.spread, 4),
                      "tflops": round(p.flops / load.us / 1e6, 1)}
        if load.watts is not None and load.joules is not None:
            made[name] |= {"watts": round(load.watts), "mj": round(1e3 * load.joules, 2)}
    return made


__all__ = ["OURS", "THEIRS", "MatmulMemory", "MatmulRun", "StepMatmul", "compile_runs",
           "measure_matmuls", "matmuls_of", "row", "step_program"]
