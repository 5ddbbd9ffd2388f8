"""Which collectives of a program run beside its kernels, on a stream of their own, and who waits.

A collective begins behind the kernels that stand before it. The first step that reads or writes
what it writes, or writes what it reads, waits for it: until then kernels run meanwhile. The memory
plan gives memory on as if steps ran one after another, but for what a collective reads or brings,
which stays until the next one of its kind, or until its results are read; so its byte ranges are
what is compared.
Where no step comes between a collective and the one that waits for it, nothing can run meanwhile;
then all of a program stay in the stream of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import field, replace
from math import prod
from typing import Any

from ....lazy_dataclass import dataclass
from ...op import by_engines
from ...schedule.ir import ByteRange, GraphSchedule, GroupOperand, ScheduledGroup, Transfer

SPARE = 24  # multiprocessors that NCCL 2.28 takes on four GPUs joined by NVLink
# Of matmuls while NVLink carries a byte of an operand: 600 TFLOP/s, 150 GB/s.
FLOPS_PER_BYTE = 4000.0
RangeOf = Callable[[str], ByteRange]
Regions = tuple[list[ByteRange], list[ByteRange]]  # read, written


@dataclass(frozen=True)
class Overlap:
    """numbers: of the collectives that run beside kernels, by step.  awaited: by step, the last of
    them that has to be done before it; of the end of the program behind the last step.
    meanwhile: steps while which one of them may be under way."""

    numbers: dict[int, int]
    awaited: dict[int, int]
    meanwhile: frozenset[int] = field(default=frozenset(), compare=False)


def overlapped(steps: Sequence[ScheduledGroup | Transfer], beside: Iterable[int],
               alone: Container[int], region_of: RangeOf) -> Overlap | None:
    """How the collectives `beside`, steps by number, run beside the others; None where they cannot.

    alone: steps that wait for all of them, since they send too
    """
    numbers = {k: n for n, k in enumerate(sorted(beside))}
    if not numbers:
        return None
    running: dict[int, Regions] = {}
    awaited: dict[int, int] = {}
    meanwhile: set[int] = set()
    for k, step in enumerate(steps):
        regions = _regions(step, region_of)
        if k in numbers:
            if _takes_engines(step):  # its own part is brought to its place in front of it
                need = max((n for n, other in running.items() if _has_hazard(regions, other)),
                           default=None)
                if need is not None:
                    awaited[k] = need
                    running = {n: r for n, r in running.items() if n > need}
            running[numbers[k]] = regions
            continue
        need = max((n for n, other in running.items() if k in alone or _has_hazard(regions, other)),
                   default=None)
        if need is not None:
            awaited[k] = need
            running = {n: r for n, r in running.items() if n > need}
        if running:
            meanwhile.add(k)
    if running:
        awaited[len(steps)] = max(running)
    return Overlap(numbers, awaited, frozenset(meanwhile)) if meanwhile else None


def share_chip(plan: GraphSchedule, multiprocessors: int) -> GraphSchedule:
    """Matmuls that may run while ranks send give out their tiles one by one: NCCL takes some of the
    multiprocessors, and a block that waits for one to be free would keep its share of tiles. Where
    there is a block for each tile anyway nothing has to be given out, nor a counter be cleared.
    Those beside a collective that takes as long as they do leave it some: it begins with them, and
    would wait for their end."""
    exchanges = [k for k, s in enumerate(plan.steps)
                 if getattr(s, "kind", "") == "exchange" and not _takes_engines(s)]
    made = overlapped(plan.steps, exchanges, (), plan.region)
    if made is None:
        return plan
    full = _full_of_messages(plan.steps, made)
    return replace(plan, steps=tuple(
        _shared(s, full.get(k, 0)) if k in made.meanwhile and isinstance(s, ScheduledGroup)
        and s.kind == "gemm" and prod(s.grid) > multiprocessors else s
        for k, s in enumerate(plan.steps)))


def _takes_engines(step: ScheduledGroup | Transfer) -> bool:
    return isinstance(step, ScheduledGroup) and by_engines(step.attr("calls").node.attrs)


def _shared(group: ScheduledGroup, spare: int) -> ScheduledGroup:
    values: dict[str, Any] = {"TILES": "dynamic"}
    note = "tiles one by one, because NCCL may have some multiprocessors"
    if spare:
        values["SPARE"] = spare
        note = f"tiles one by one; {spare} multiprocessors are left to NCCL"
    return replace(group, schedule=group.schedule.with_values(values).with_notes(
        *group.schedule.notes, note))


def _full_of_messages(steps: Sequence[ScheduledGroup | Transfer], made: Overlap) -> dict[int, int]:
    """Matmuls beside a collective that takes about as long as all that run beside it, and how many
    multiprocessors it has."""
    found: dict[int, int] = {}
    for k, number in made.numbers.items():
        until = min((j for j, n in made.awaited.items() if j > k and n >= number),
                    default=len(steps))
        sent = steps[k]
        assert isinstance(sent, ScheduledGroup)
        products = {j: s for j, s in enumerate(steps[k + 1:until], k + 1)
                    if isinstance(s, ScheduledGroup) and s.kind == "gemm"}
        nbytes = max(sum(prod(o.shape) * o.type.dtype.bits / 8 for o in operands)
                     for operands in (sent.reads, sent.writes))
        flops = sum(step.flops for s in products.values() for step in s.steps)
        if flops < nbytes * FLOPS_PER_BYTE:
            blocks = sent.attr("calls").node.attrs.get("blocks", 0) or SPARE
            found.update(dict.fromkeys(products, blocks))
    return found


def _regions(step: ScheduledGroup | Transfer, region_of: RangeOf) -> Regions:
    if isinstance(step, Transfer):
        at = [region_of(step.on_device)]
        return (at, []) if step.kind == "offload" else ([], at)
    reads, writes = ([_run_of(o, region_of) for o in operands]
                     for operands in (step.reads, step.writes))
    return reads, writes


def _run_of(o: GroupOperand, region_of: RangeOf) -> ByteRange:
    """The bytes of an operand: of a run of a buffer's elements those alone."""
    whole = region_of(o.name)
    if o.layout is not None or o.type.dtype.packed:
        return whole
    size = o.type.dtype.numpy.itemsize
    begin = whole.begin + o.offset * size
    return ByteRange(whole.block, begin, begin + max(prod(o.shape), 1) * size)


def _has_hazard(step: Regions, other: Regions) -> bool:
    """Whether a step has to wait for a collective that is under way."""
    (reads, writes), (sent, received) = step, other
    return any(a.meets(b) for a in (*reads, *writes) for b in received) or any(
        a.meets(b) for a in writes for b in sent)


__all__ = ["Overlap", "overlapped", "share_chip"]
