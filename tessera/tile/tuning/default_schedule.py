"""The schedule of a kernel that has none: from its Tile IR, the extents of the call and the GPU.

    lane kernels       4 warps, as they are written for (Q41)
    tile kernels       warps by the size of their largest tile
    those that ask     ts.tile.context() for block sizes get the cheapest of a short list of legal
                       ones, by the cost model

The same call on the same GPU always gets the same schedule; its `notes` say why it was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.ir.ir import For, Function, Op, While, definitions, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import ALIASES, Schedule
from tessera.tile.ir.types import GlobalTensor, TileType, is_lane
from tessera.tile.passes.operation_counts import largest_tile
from tessera.tile.tuning.cost import explain
from tessera.tile.tuning.gpus import Gpu
from tessera.tile.tuning.legality import fits

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel

BLOCKS = ("m", "n", "k_")
ELEMENTS_PER_LANE = 32  # of the largest tile: four 16-byte accesses of bf16, eight of f32
MOST_WARPS = {"matmul": 8, "reduction": 16, "stream": 16}
USUAL_WARPS = 4  # of a group that has as many elements as it likes
MOST_PER_LANE = 64  # beyond it a tile kernel has no registers left to compute with
ROW_BYTES = 128  # of a step's operands: the width of the widest swizzle
SMALL = 32  # an extent for which blocks of 64 would be mostly empty


class ParameterRecorder(Schedule):
    """A schedule that notes which of its parameters a kernel asks for."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        for f in fields(schedule):
            object.__setattr__(self, f.name, getattr(schedule, f.name))
        object.__setattr__(self, "read", set())

    read: set[str]

    def value(self, name: str) -> Any:
        self.read.add(ALIASES.get(name, name))
        return super().value(name)

    def extra_value(self, name: str) -> Any:
        self.read.add(name)
        return super().extra_value(name)

    def for_parameter(self, name: str, default: Any) -> Any:
        if self.source != "auto":  # a proposal leaves arguments as the kernel's author chose them
            self.read.add(ALIASES.get(name, name))
        return super().for_parameter(name, default)


@dataclass(frozen=True)
class Subject:
    """A kernel at a call. read: the schedule's parameters that its body asks for."""

    kernel: Kernel
    bound: Bound
    gpu: Gpu
    read: frozenset[str]
    function: Function  # traced with the defaults

    @staticmethod
    def of(kernel: Kernel, bound: Bound, gpu: Gpu) -> Subject:
        recorder = ParameterRecorder(Schedule(source="auto"))
        function = kernel.compile(kernel.spec(bound, recorder), bound.sizes)
        return Subject(kernel, bound, gpu, frozenset(recorder.read), function)

    def trace(self, schedule: Schedule) -> Function:
        return self.kernel.compile(self.kernel.spec(self.bound, schedule), self.bound.sizes)

    @property
    def matmuls(self) -> list[Op]:
        return [n for n in walk(self.function.body) if isinstance(n, Op) and n.name == "matmul"]

    @property
    def by_lanes(self) -> bool:
        """Whether the body says what each lane does: then its author chose the group."""
        return (self.function.lanes is not None or self.function.result[0] == "scalar"
                or any(isinstance(n, Op) and OPS[n.name].by_thread
                       for n in walk(self.function.body))
                or any(map(is_lane, definitions(self.function).values())))


def propose(kernel: Kernel, bound: Bound, gpu: Gpu) -> tuple[Schedule, bool]:
    """The schedule for a kernel without one, and whether the extents of the call decided it."""
    subject = Subject.of(kernel, bound, gpu)
    fixed = {name for name, _ in subject.function.constants}.intersection(bound.sizes)
    asked = subject.read.intersection((*BLOCKS, "vector_"))
    schedule = _proposal(subject)
    if not subject.read:  # then the function is the same under any schedule
        kernel.keep(kernel.spec(bound, schedule), bound.sizes, subject.function)
    return schedule, bool(fixed or asked)


def _proposal(subject: Subject) -> Schedule:
    if subject.by_lanes and not subject.read.intersection(BLOCKS):
        return _noted(Schedule(source="auto"), "a kernel by lanes: the group that it is written "
                      "for")
    if not subject.read.intersection(BLOCKS):
        return _by_tile(subject)
    best, count = _cheapest(subject)
    if best is None:
        return _noted(Schedule(source="auto"), "no block size of the list fits "
                      f"{subject.gpu.name}: the defaults")
    _, schedule, function = best
    estimate = explain(function, schedule, subject.bound, subject.gpu)
    return _noted(schedule, f"the cheapest of {count} that fit", f"estimate {estimate}")


def _noted(schedule: Schedule, *notes: str) -> Schedule:
    return schedule.with_notes(*notes)


def space(kernel: Kernel, bound: Bound, gpu: Gpu) -> tuple[Schedule, ...]:
    """What `propose` chooses from; for tuning without a space."""
    subject = Subject.of(kernel, bound, gpu)
    if subject.read.intersection(BLOCKS):
        return tuple(s.with_source("tuned") for s, _ in _legal(subject)) or (Schedule(),)
    if subject.by_lanes:
        return (Schedule(source="tuned"),)
    warps = _by_tile(subject).value("warps_")
    near = {max(1, warps // 2), warps, min(32, 2 * warps)}
    return tuple(Schedule(warps=n, source="tuned") for n in sorted(near))


# --- kernels that leave block sizes open ------------------------------------------------------
def _cheapest(subject: Subject) -> tuple[tuple[float, Schedule, Function] | None, int]:
    found = [(explain(f, s, subject.bound, subject.gpu).us, s, f) for s, f in _legal(subject)]
    return (min(found, key=lambda item: item[0]) if found else None), len(found)


def _legal(subject: Subject) -> Iterator[tuple[Schedule, Function]]:
    """Candidates that fit, each with the deepest pipeline that still does."""
    for schedule in _blocks(subject):
        function = subject.trace(schedule)
        depths = (4, 3, 2) if subject.matmuls else (2,)
        for depth in depths:
            deep = schedule.with_values({"stages": depth}) if subject.matmuls else schedule
            if "stages_" in subject.read:
                function = subject.trace(deep)
            if fits(function, deep, subject.bound, subject.gpu) and (
                    subject.matmuls or largest_tile(function) <= MOST_PER_LANE * deep.lanes):
                yield deep, function
                break


def _blocks(subject: Subject) -> Iterator[Schedule]:
    """Blocks of the sizes that the kernel asks for, small before large."""
    rows, columns = _sides(subject)
    depth = _depth(subject) if subject.matmuls else 64
    wide = subject.gpu.generation.warpgroup_matmul is not None
    for m in rows if "m" in subject.read else (None,):
        for n in columns if "n" in subject.read else (None,):
            if (m or 0) * (n or 0) > 128 * 256:
                continue
            values = {"m": m, "n": n, "k": depth if "k_" in subject.read else None}
            values |= {"vector": _vector(subject)} if "vector_" in subject.read else {}
            for warps in _warps(subject, m, n, wide):
                chosen = {k: v for k, v in values.items() if v is not None}
                yield Schedule(**chosen, warps=warps, source="auto")


def _sides(subject: Subject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not subject.matmuls:
        return (1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512, 1024)
    sizes = (64, 128, 256)
    small = min(subject.bound.texts.values(), default=SMALL + 1) <= SMALL
    return (16, 32, *sizes) if small else sizes, (32, *sizes) if small else sizes


def _warps(subject: Subject, m: int | None, n: int | None, wide: bool) -> tuple[int, ...]:
    """A matmul's warps by its rows: four for each 64 of them, what one wgmma has; others try."""
    if not subject.matmuls:
        return (1, 2, 4, 8, 16)
    if wide:
        return (4,) if (m or 64) <= 64 else (8,)
    return (4,) if (m or 64) * (n or 64) <= 128 * 128 else (8,)  # 64 x 64 of the sums each


def _depth(subject: Subject) -> int:
    """Depth of a step: rows of 128 bytes, at least one instruction's 16 elements."""
    types = definitions(subject.function)
    bits = max(types[a].dtype.bits for op in subject.matmuls for a in op.args[:2]
               if a in types)
    return max(16, ROW_BYTES * 8 // bits)


def _vector(subject: Subject) -> int:
    """Elements of a 16-byte access, fewer where rows are no multiple of them."""
    width = 16
    for p in subject.function.params:
        if isinstance(p.type, GlobalTensor):
            width = min(width, max(1, 128 // p.type.dtype.bits))
            row = subject.bound.texts.get(str(p.type.dims[-1]), 1) if p.type.dims else 1
            while row % width:
                width //= 2
    return width


# --- kernels that say their tiles -------------------------------------------------------------
def _by_tile(subject: Subject) -> Schedule:
    """Warps so that each lane holds a handful of elements of the largest tile."""
    shapes = [t.shape for t in definitions(subject.function).values() if isinstance(t, TileType)]
    if not shapes:
        return _noted(Schedule(source="auto"), "no tiles: the default group")
    largest = max(shapes, key=lambda s: prod(s))
    size, share = prod(largest), _share(subject, largest)
    most = MOST_WARPS["matmul" if subject.matmuls else "reduction" if share > 16 else "stream"]
    warps = 1
    while warps < most and size > 32 * warps * share:
        warps *= 2
    warps = max(warps, 4) if subject.matmuls else warps
    extra = {"vector": _vector(subject)} if "vector_" in subject.read else {}
    return _noted(Schedule(warps=warps, **extra, source="auto"),
                  f"{warps} warps for a largest tile of {'x'.join(map(str, largest))}: "
                  f"{-(-size // (32 * warps))} elements of it in each thread")


def _share(subject: Subject, largest: tuple[int, ...]) -> int:
    """Elements of the largest tile for one lane.

    One 16-byte access where tiles only stream through; more where lanes reduce, because a barrier
    costs the less the fewer warps meet at it. Kernels of examples/ over group sizes, H200,
    2026-11-21: copies of f32 reach 0.97 of memcpy with one access a thread and 0.90 with eight; a
    softmax of 4096 bf16 is fastest with four. Where loops add up tiles and all that is reduced
    stands behind them, tiles stream, by two accesses: a softmax in one pass over [4096, 32768] and
    another, by blocks of 1024, 2048 and 4096 in 2, 4 and 8 warps, takes 263, 252 and 250 us, with
    one access 278, 271 and 279; a cross entropy 289, 284 and 287 for 310, 312 and 318; a layer norm
    of [16384, 4096] 76, 78 and 93 for 75, 85 and 122, and by 512 88 in two warps, 109 in one
    (H200, 2026-11-28). A scan by a user's function of rows of 1024, with 4, 8, 16 and 32 elements:
    110, 103, 119 and 142 us (H200, 2026-11-27).
    """
    if subject.matmuls or _meets_often(subject.function):
        return ELEMENTS_PER_LANE
    bits = [p.type.dtype.bits for p in subject.function.params if isinstance(p.type, GlobalTensor)]
    access = max(1, 128 // max(8, min(bits, default=32)))
    scans = any(isinstance(n, Op) and n.name == "exchange" for n in walk(subject.function.body))
    return access * (2 if scans else _accesses(subject.function, largest, access))


def _meets_often(function: Function) -> bool:
    """Whether lanes reduce, and not only when loops that load tiles have ended: then one barrier
    stands for many blocks, and what is added up in registers is less in each of more lanes. Of
    nested loops the innermost count, as one over rows may go through the groups."""
    loops = [n for n in walk(function.body) if isinstance(n, For | While) and _loads(n)]
    inner = [n for n in loops if not any(
        isinstance(m, For | While) and _loads(m) for m in walk(n.body))]
    where = [m for n in inner for m in walk(n.body)] if inner else walk(function.body)
    return any(isinstance(n, Op) and OPS[n.name].neutral is not None for n in where)


def _loads(loop: For | While) -> bool:
    return any(isinstance(n, Op) and OPS[n.name].access == "tile" and not OPS[n.name].writes
               for n in walk(loop.body))


def _accesses(function: Function, largest: tuple[int, ...], access: int) -> int:
    """How many accesses of a lane at each place of a tile pay for finding it.

    Rows and columns, and whether there are such, take some twenty instructions a place, however
    many elements follow. A causal convolution's loop over four taps, blocks of 16 x 32 and 32 x 64
    of f32, with 1, 2 and 4 accesses a lane: 106, 87 and 87 us, 123, 92 and 82; a five-point
    stencil, of which an access moves one number, with 4, 8 and 16 of them in blocks of 32: 162, 156
    and 165, of 64 in 1024 and 512 threads 161 and 157; a copy of blocks of 32 134, 136 and 139, of
    64 in 1024 and 512 threads 140 and 132 (H200, 2026-11-27).
    """
    if sum(n > 1 for n in largest) < 2:
        adds_up = any(isinstance(n, Op) and OPS[n.name].neutral is not None
                      for n in walk(function.body)) and any(
            isinstance(n, For | While) and _loads(n) for n in walk(function.body))
        return 2 if adds_up and prod(largest) > 2 * 32 * access else 1
    ops = [n for n in walk(function.body) if isinstance(n, Op)]
    places = [n for n in ops if OPS[n.name].access == "tile"]
    looped = any(isinstance(n, Op) and OPS[n.name].access == "tile" and not OPS[n.name].writes
                 for loop in walk(function.body) if isinstance(loop, For | While)
                 for n in walk(loop.body))
    if looped and prod(largest) >= 4 * access * 32 * USUAL_WARPS:
        return 4
    return 2 if looped or len(places) > 2 else 1


__all__ = ["propose", "space"]
