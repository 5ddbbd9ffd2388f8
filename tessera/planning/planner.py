"""Plans: what a step takes on a mesh that need not exist: memory, exchanges, time.

    Planned       a plan: print it for the table, .html() and .show() for the picture
    plan_graph    of the graph that one rank runs, and the collectives among it
    bubble        the part of a pipeline's time in which ranks wait

Nothing here runs or allocates what it plans. Times are those of fabric.py's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from tessera.errors import ArgumentError, SourceLine
from tessera.graph.ir import Graph, Value
from tessera.graph.schedule.groups import FusionGroup

from ..lazy_dataclass import dataclass
from ..mesh.device_mesh import Mesh
from .fabric import DeviceModel, Fabric, bus_factor
from .flops import PeakBytes, UnitWork, count_graph, peak_memory, work_us, works_of
from .html_page import PlanPicture, page
from .overlap import Streams, exchanges_itself
from .table_text import table

ROLES = ("parameters", "gradients", "optimizer", "activations", "workspace", "data")


class Issued(Protocol):
    """What is known of a collective that a program will issue. `bytes`: that a rank receives;
    `times`: in a loop, how many iterations issue it."""

    @property
    def op(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def times(self) -> int: ...
    @property
    def why(self) -> str: ...
    @property
    def where(self) -> SourceLine | None: ...


@dataclass(frozen=True)
class PlannedCollectives:
    """Collectives of one kind, `count` of them in a step.

    bytes: of one, as fabric.py counts them   us: of one   hidden: whether it runs beside arithmetic
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    count: float
    us: float
    how: str
    why: str
    where: SourceLine | None = None
    hidden: bool = False

    @property
    def total_us(self) -> float:
        return self.count * self.us


@dataclass(frozen=True)
class StepSegment:
    """A stretch of the step: microseconds, and what takes them."""

    name: str
    us: float
    what: str


@dataclass(frozen=True)
class Planned:
    """The plan of a step on every rank of a mesh.

    memory: bytes of the rank that holds most, by role   parts: what the time of a step goes to
    ideal_us: the step's matmuls at the peak of all ranks   notes: what the figures assume
    """

    title: str
    mesh: Mesh
    fabric: Fabric
    device: DeviceModel
    memory: Mapping[str, float]
    exchanges: tuple[PlannedCollectives, ...]
    parts: tuple[StepSegment, ...]
    ideal_us: float
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    works: tuple[UnitWork, ...] = field(default=(), repr=False)

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a rank has the memory."""
        return self.memory_bytes <= self.device.memory_bytes

    @property
    def step_us(self) -> float:
        return sum(p.us for p in self.parts)

    @property
    def exchange_us(self) -> float:
        """Of all collectives of a step, hidden ones too."""
        return sum(e.total_us for e in self.exchanges)

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: the model's matmuls at the peak rate, by the step's time."""
        return self.ideal_us / self.step_us if self.step_us else 0.0

    def exchanged_bytes(self, axis: str | None = None) -> float:
        """Sizes of the collectives of a step, over an axis or all."""
        return sum(e.count * e.bytes for e in self.exchanges if axis is None or axis in e.axes)

    def __str__(self) -> str:
        return table(self)

    def html(self) -> str:
        """A page with the table and the picture; no scripts, nothing from elsewhere."""
        return page(self)

    def show(self) -> Any:
        """The picture, for a notebook; print it for the table."""
        return PlanPicture(self)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The part of a pipeline's time in which a rank waits, (p-1) / (v m + p-1).

    stages: ranks of the pipeline, p   microbatches: m   chunks: of the model on each rank, v; 1 for
    GPipe and 1F1B. Narayanan et al. 2021, arXiv:2104.04473, section 2.2, has the bubble by the
    ideal time, (p-1) / (v m). Raises ArgumentError for numbers below 1.
    """
    if min(stages, microbatches, chunks) < 1:
        raise ArgumentError(f"a pipeline has stages, microbatches and chunks, at least 1 each; got "
                            f"{stages}, {microbatches}, {chunks}")
    return (stages - 1) / (chunks * microbatches + stages - 1)


def exchanges_of(collectives: Iterable[Issued], mesh: Mesh, fabric: Fabric
                 ) -> tuple[PlannedCollectives, ...]:
    """Each with its time; equal ones of one line together."""
    counted: dict[tuple, int] = {}
    for c in collectives:
        key = (c.op, tuple(c.axes), c.bytes, c.why, c.where)
        counted[key] = counted.get(key, 0) + c.times
    found = []
    for (op, axes, received, why, where), count in counted.items():
        size = received / max(bus_factor(op, mesh.size(axes)), 1e-30)
        cost = fabric.time(op, size, mesh, axes)
        found.append(PlannedCollectives(op, axes, size, count, cost.us, cost.how, why, where))
    return tuple(found)


def plan_graph(title: str, graph: Graph, roles: Mapping[Value, str], mesh: Mesh, fabric: Fabric,
               collectives: Sequence[Issued] = (), model: Graph | None = None) -> Planned:
    """The plan of a graph as one rank runs it.

    roles: of its inputs and captures, see flops.peak_memory   collectives: among its nodes
    model: the same computation with the extents of whole tensors, for the MFU; None: `graph` on
    every rank
    """
    fabric.need(mesh)
    device = fabric.device_of(mesh)
    units = works_of(graph)
    works = [w for _, mine in units for w in mine]
    held: PeakBytes = peak_memory(graph, dict(roles))
    exchanges = exchanges_of(collectives, mesh, fabric)
    matmuls = [w for w in works if w.matmuls]
    compute = sum(work_us(w, device) for w in matmuls)
    rest = sum(work_us(w, device) for w in works if not w.matmuls)
    total = sum(e.total_us for e in exchanges)
    waits, how = _waits(units, mesh, fabric, compute + rest, total)
    parts = (StepSegment("matmuls", compute, _many(len(matmuls), "call")),
             StepSegment("loops", rest, _many(len(works) - len(matmuls), "loop or copy")),
             StepSegment("exchanges", waits,
                         _many(sum(int(e.count) for e in exchanges), "collective")))
    notes = [f"matmuls at {device.matmul_efficiency:g} of the peak, memory at "
             f"{device.memory_efficiency:g}", how,
             "results that have an argument's type are written over it"]
    if held.where is not None:
        notes.append(f"most memory is held at {held.where}")
    ideal = ideal_us(works, device) if model is None else (
        ideal_us(count_graph(model), device) / mesh.size())
    return Planned(title, mesh, fabric, device, _in_order(held.bytes), exchanges, parts, ideal,
                   tuple(notes), works=tuple(works))


def _waits(units: Sequence[tuple[FusionGroup, Sequence[UnitWork]]], mesh: Mesh, fabric: Fabric,
           compute: float, exchanges: float) -> tuple[float, str]:
    """Microseconds in which a rank only waits for collectives, and what that assumes. Ops that
    exchange by themselves, such as ring attention, are not taken apart."""
    device = fabric.device_of(mesh)
    taken_apart = not any(exchanges_itself(unit) for unit, _ in units)
    if mesh.names_gpus and not fabric.shared and taken_apart:
        streams = Streams(fabric, mesh)
        step = streams.run((unit, sum(work_us(w, device) for w in works)) for unit, works in units)
        return step - compute, ("collectives run beside arithmetic until something reads what they "
                                f"bring; one after another, {streams.sent / 1e3:.3g} ms")
    return exchanges, ("a collective waits for all before it, and all after it for the collective; "
                       "were every one beside arithmetic, "
                       f"{max(compute, exchanges) / 1e3:.3g} ms")


def _many(count: int, what: str) -> str:
    more = {"call": "calls", "loop or copy": "loops and copies", "collective": "collectives"}
    return f"{count} {what if count == 1 else more[what]}"


def ideal_us(works: Iterable[UnitWork], device: DeviceModel) -> float:
    """Microseconds of the matmuls alone, at the peak."""
    return sum(1e6 * w.times * n / device.peak(dtype) for w in works for dtype, n in w.matmuls)


def _in_order(held: Mapping[str, float]) -> dict[str, float]:
    known = {r: held[r] for r in ROLES if held.get(r)}
    return known | {r: n for r, n in held.items() if r not in known and n}


__all__ = ["PlannedCollectives", "Issued", "StepSegment", "Planned", "bubble", "exchanges_of",
           "ideal_us",
           "plan_graph"]
