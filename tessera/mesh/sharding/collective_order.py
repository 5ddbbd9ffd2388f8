"""When collectives begin: the order of a program's steps, after `ts.overlap` and without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod

from ...lazy_dataclass import dataclass
from ..collectives.record import COLLECTIVES
from ..partition import extents, local_shape
from .overlap import asked
from .partitioned_steps import (
    BUCKET_BYTES,
    SHORT_BUCKET_BYTES,
    SHORT_BYTES,
    Held,
    LayoutHop,
    PartitionedOp,
    Step,
    Together,
    makes,
    merge_waiting,
    reads,
)

REDUCTIONS = ("all_reduce", "reduce_scatter")
KEPT_BYTES = 4 << 30  # of gathered parameters, on a GPU: a twentieth of what an H100 has
BEGIN_BYTES = 8 << 20  # of the first two buckets of parameters: little runs beside them
SHORT = 64  # times as long is a bucket


def issue_early(steps: Sequence[Step]) -> list[Step]:
    """Hinted reductions right behind what makes their operand; hinted gathers right behind the one
    before over the same axes, so that one more value is whole at a time."""
    out: list[Step] = []
    for step in steps:
        if not isinstance(step, LayoutHop) or not asked(step.where, step.hop):
            out.append(step)
            continue
        at = _after_source(out, (step.value, step.hop.source))
        if step.hop.kind == "all_gather":
            at = max(at, _after_gather(out, step.hop.axes))
        elif not COLLECTIVES[step.hop.kind].reduces:
            at = len(out)
        out.insert(at, step)
    return out


def reduce_early(steps: Sequence[Step]) -> list[Step]:
    """Reductions right behind what makes their operand: a gradient is read at the end of a program
    by who asked for it, but what it is the sum of is there in the midst of the backward pass."""
    behind = defaultdict[Held, list[Step]](list)
    moved = set[Step]()
    made = {held for step in steps for held in makes(step)}
    for step in steps:
        if isinstance(step, LayoutHop) and step.hop.kind in REDUCTIONS and \
                (step.value, step.hop.source) in made:
            behind[step.value, step.hop.source].append(step)
            moved.add(step)
    out: list[Step] = []

    def emit(step: Step) -> None:
        out.append(step)
        for held in makes(step):
            for move in behind[held]:
                emit(move)

    for step in steps:
        if step not in moved:
            emit(step)
    return out


def _after_source(out: Sequence[Step], source: Held) -> int:
    """The place behind the step that makes a value, and other collectives that begin there."""
    at = next((i + 1 for i in reversed(range(len(out))) if source in makes(out[i])), 0)
    while at < len(out) and isinstance(out[at], LayoutHop) and source not in makes(out[at]):
        at += 1
    return at


def _after_gather(out: Sequence[Step], axes: tuple[str, ...]) -> int:
    """The place behind the last hinted gather over these axes; the end where there is none."""
    return next((i + 1 for i in reversed(range(len(out))) if _is_gather(out[i], axes)), len(out))


def _is_gather(step: Step, axes: tuple[str, ...]) -> bool:
    return isinstance(step, LayoutHop) and step.hop.kind == "all_gather" and step.hop.axes == axes \
        and asked(step.where, step.hop)



# --- parameters that are gathered for each use ---------------------------------------------------
def keep_gathered(steps: Sequence[Step]) -> list[Step]:
    """Parameters that are gathered anew stay whole between two uses, such as those forward and
    backward, as far as KEPT_BYTES hold them: those that are needed again soonest first."""
    last: dict[Held, int] = {}  # where it was gathered
    again: list[tuple[int, int, Held]] = []  # the ops between, where, what
    for i, step in enumerate(steps):
        if isinstance(step, LayoutHop) and step.anew and step.hop.kind == "all_gather":
            (held,) = makes(step)
            if held in last:
                again.append((i - last[held], i, held))
            last[held] = i
    kept, gone, room = set[Held](), set[int](), float(KEPT_BYTES)
    for _, i, held in sorted(again, key=lambda found: found[:2]):
        nbytes = 0.0 if held in kept else whole_bytes(held)
        if nbytes <= room:
            room -= nbytes
            kept.add(held)
            gone.add(i)
    return [step for i, step in enumerate(steps) if i not in gone]


def whole_bytes(held: Held) -> float:
    """What a rank holds of a value in this layout."""
    (value, layout), dtype = held, held[0].aval.dtype
    return prod(local_shape(layout, extents(value.aval), 0, dtype)) * dtype.bits / 8


def prefetch(steps: Sequence[Step], inputs: Sequence[Held]) -> list[Step]:
    """Parameters that are gathered anew come a bucket ahead: while what one bucket of them brings
    is used the next is on its way, so two are whole at a time. inputs: those of the program."""
    maker, given, readers = _makers(steps), set(inputs), defaultdict[Held, list[int]](list)
    for j, step in enumerate(steps):
        for held in reads(step):
            readers[held].append(j)
    moved: dict[int, list[int]] = {}  # by the step in front of which they come
    gone: set[int] = set()
    before: list[int] = []
    for bucket in _buckets(steps):
        first = min((_first_use(steps, i, readers) for i in before), default=bucket[0])
        ahead, sent = list[int](), list[int]()
        for i in bucket:
            step = steps[i]
            assert isinstance(step, LayoutHop)
            needed = _made_ahead((step.value, step.hop.source), first, steps, maker, given)
            if i >= first and needed is not None:
                ahead += [j for j in needed if j not in gone and j not in ahead]
                sent.append(i)
        moved.setdefault(first, []).extend((*ahead, *sent))
        gone.update(ahead, sent)
        before = bucket
    return [steps[j] for i in range(len(steps))
            for j in (*moved.get(i, ()), *(() if i in gone else (i,)))]


@dataclass
class _Gathers:
    """Gathers in one message. first: the step in front of which they come, which is one of them;
    ahead: what makes their operands; place: where they go"""

    first: int
    place: list[Step]
    ahead: list[Step] = field(default_factory=list)
    moves: dict[Held, LayoutHop] = field(default_factory=dict)
    nbytes: float = 0.0


def send_together(steps: Sequence[Step], inputs: Sequence[Held]) -> list[Step]:
    """Between hosts many small messages cost more than one: 83 collectives of a step of `fsdp` took
    24 ms, as three 6 to 12 (2 ranks of MPICH on 2 cores of AMD EPYC, 2026-11-28)."""
    steps = merge_waiting(_gather_together(steps, inputs))
    return merge_waiting(steps, SHORT_BUCKET_BYTES, ("reduce_scatter", "all_gather"), SHORT_BYTES)


def _gather_together(steps: Sequence[Step], inputs: Sequence[Held]) -> list[Step]:
    """On hosts, where nothing runs beside a message: short parameters that are gathered anew come
    in one message with the first of SHORT_BUCKET_BYTES, and stay for other uses until the next."""
    maker, given, out = _makers(steps), set(inputs), list[list[Step]]()
    open_ones: dict[tuple[str, ...], _Gathers] = {}
    buckets: list[_Gathers] = []
    for i, step in enumerate(steps):
        out.append([step])
        if not isinstance(step, LayoutHop) or not step.anew or step.hop.kind != "all_gather":
            continue
        (held,), own = makes(step), whole_bytes((step.value, step.hop.target))
        if own > SHORT_BYTES or asked(step.where, step.hop):
            continue
        out[i].clear()
        bucket = open_ones.get(step.hop.axes)
        if bucket is not None and held in bucket.moves:
            continue
        needed = None if bucket is None or bucket.nbytes + own > SHORT_BUCKET_BYTES else \
            _made_ahead((step.value, step.hop.source), bucket.first, steps, maker, given)
        if bucket is None or needed is None:
            bucket = open_ones[step.hop.axes] = _Gathers(i, out[i])
            buckets.append(bucket)
        for j in needed or ():
            bucket.ahead += out[j]
            out[j].clear()
        bucket.moves[held] = step
        bucket.nbytes += own
    for bucket in buckets:
        moves = tuple(bucket.moves.values())
        bucket.place += [*bucket.ahead, Together(moves) if len(moves) > 1 else moves[0]]
    return [step for place in out for step in place]


def _makers(steps: Sequence[Step]) -> dict[Held, int]:
    return {held: i for i, s in enumerate(steps) if isinstance(s, PartitionedOp)
            for held in s.makes}


def _buckets(steps: Sequence[Step]) -> Iterator[list[int]]:
    """The gathers of parameters, by number, up to BUCKET_BYTES together; of the first two up to
    BEGIN_BYTES. A full one takes along what is short beside it, as a bias behind its weight."""
    bucket, nbytes, begun = list[int](), 0.0, 0
    for i, step in enumerate(steps):
        if not isinstance(step, LayoutHop) or not step.anew or step.hop.kind != "all_gather":
            continue
        own = whole_bytes((step.value, step.hop.target))
        full = nbytes >= (BUCKET_BYTES if begun == 2 else min(BEGIN_BYTES, BUCKET_BYTES))
        if full and own > nbytes / SHORT:
            yield bucket
            bucket, nbytes, begun = [], 0.0, min(begun + 1, 2)
        bucket.append(i)
        nbytes += own
    if bucket:
        yield bucket


def _first_use(steps: Sequence[Step], i: int, readers: Mapping[Held, Sequence[int]]) -> int:
    """The first step that reads what a gather brings."""
    (held,) = makes(steps[i])
    at = readers.get(held, ())
    return next((j for j in at if j > i), len(steps))


def _made_ahead(held: Held, first: int, steps: Sequence[Step], maker: Mapping[Held, int],
                given: Container[Held]) -> list[int] | None:
    """The steps from `first` on that make a value of inputs alone, such as a cast of a parameter;
    None where others do."""
    at = maker.get(held)
    if held in given or at is not None and at < first:
        return []
    if at is None:
        return None
    found: list[int] = []
    for operand in reads(steps[at]):
        needed = _made_ahead(operand, first, steps, maker, given)
        if needed is None:
            return None
        found += [j for j in needed if j not in found]
    return [*found, at]


__all__ = ["KEPT_BYTES", "REDUCTIONS", "issue_early", "keep_gathered", "prefetch", "reduce_early",
           "send_together", "whole_bytes"]
