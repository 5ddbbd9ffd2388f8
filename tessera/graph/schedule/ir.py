"""Schedule IR: the groups that run as one kernel each, their blocks and pipelines, the buffers
between them, and the copies of what lies on the host meanwhile.

Values have the names of the ops that made them: `%7` of the graph is `v7` here and in kernels. The
text has one group after another in the order in which they run; it determines the kernels, and its
hash names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from ...dims import show_shape
from ...errors import SourceLine, short_path
from ...lazy_dataclass import dataclass
from ...numerics import NumericType, stored_bytes
from ...tile.ir.schedule import Schedule
from ..ir import show_attr
from .layouts import StridedLayout

VERSION = 1
ALIGN_BYTES = 256
HIDDEN = ("text", "kinds", "reduction")  # attributes of steps that follow from op and types


@dataclass(frozen=True)
class PlannedBuffer:
    """Memory of a value.
    kind: input | capture | constant | drawn | temporary | result | view | host.

    of: the buffer in which a view lies.  layout: how, where not in row-major order from its first
    element on.  offset: of a temporary in the block that they share.  over: the temporary that lay
    there before, which the group that writes this one reads last.
    drawn: what the host computes at each call.  host: page-locked memory there, all others are on
    the device.
    """

    name: str
    shape: tuple[int, ...]
    type: NumericType
    kind: str
    of: str = ""
    offset: int = 0
    ops: tuple[str, ...] = ()
    layout: StridedLayout | None = None
    over: str = ""

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.type.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{show_shape(self.shape)} {self.lies}"

    @property
    def lies(self) -> str:
        """`view of v3`, `temporary at 4096 over v2`, or the kind alone."""
        if self.kind == "view":
            return f"view of {self.of}" + (f" {self.layout}" if self.layout else "")
        if self.kind == "temporary":
            return f"temporary at {self.offset}" + (f" over {self.over}" if self.over else "")
        return self.kind


@dataclass(frozen=True)
class GroupOperand:
    """What a group reads or writes, with the extents it has in the group's space.

    offset: the element of the buffer at which it begins, for a run of its elements.
    layout: how it lies in the buffer, where not in row-major order.
    """

    name: str
    shape: tuple[int, ...]
    type: NumericType
    offset: int = 0
    layout: StridedLayout | None = None

    def __str__(self) -> str:
        at = f" from {self.offset}" if self.offset else ""
        at += f" {self.layout}" if self.layout else ""
        return f"{self.name}: {self.type}{show_shape(self.shape)}{at}"


@dataclass(frozen=True)
class GroupStep:
    """One op inside a group. args: names of values, or numbers. name: "" where it has no result.

    flops: its operations.  picks: it reads as many elements of its first operand as it gives.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    type: NumericType
    ops: tuple[str, ...] = ()
    where: SourceLine | None = field(default=None, compare=False)
    flops: float = field(default=0.0, compare=False)
    picks: bool = field(default=False, compare=False)

    @property
    def reduction(self) -> str:
        """How elements combine: sum | max | min | prod; "" of an elementwise op."""
        return str(dict(self.attrs).get("reduction", ""))

    def __str__(self) -> str:
        args = ", ".join(str(a) if isinstance(a, str) else repr(a) for a in self.args)
        attrs = "".join(f" {k}={show_attr(v)}" for k, v in self.attrs
                        if k not in HIDDEN)
        done = f"{self.op}({args}){attrs}"
        return f"{self.name}: {self.type}{show_shape(self.shape)} = {done}" if self.name else done


@dataclass(frozen=True)
class ScheduleLine:
    """A line of the text. ops: ids of the graph's ops that it shows; at: its group or copy."""

    text: str
    ops: tuple[str, ...] = ()
    at: str = ""


@dataclass(frozen=True)
class ScheduledGroup:
    """Ops that run as one kernel.

    kind: loop | rows | columns | gemm | attention | move | gather | segments | launch |
    library | host, and others of the target's.
    space: what its grid covers.
    schedule: block, stages, warps of the kernel.  attrs: what the kind needs beyond the steps.
    batch: the name of its launch, where it shares one with the groups beside it of that name.
    """

    name: str
    kind: str
    space: tuple[int, ...]
    reads: tuple[GroupOperand, ...]
    writes: tuple[GroupOperand, ...]
    steps: tuple[GroupStep, ...]
    schedule: Schedule
    grid: tuple[int, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    batch: str = ""

    @property
    def ops(self) -> tuple[str, ...]:
        """Ids of the graph's ops that it does, each once, in the order of the graph."""
        return tuple(sorted({i for s in self.steps for i in s.ops}, key=lambda i: int(i[1:])))

    @property
    def kernel(self) -> str:
        """Its name: that of what it does, behind the group's."""
        names = list(dict.fromkeys(s.op for s in self.steps))
        return "_".join([self.name, *(names[:4] if len(names) > 5 else names)])

    @property
    def where(self) -> SourceLine | None:
        return next((s.where for s in self.steps if s.where is not None), None)

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    def lines(self, canonical: bool = False) -> list[ScheduleLine]:
        s = self.schedule
        blocks = "x".join(str(v) for v in (s.m, s.n, s.k_) if v is not None)
        head = f"{self.name} {self.kind}"
        if self.kind != "host":
            head += (f" over {show_shape(self.space)}  block {blocks}  "
                     f"stages {s.value('stages_')}  warps {s.value('warps_')}  "
                     f"groups {'x'.join(map(str, self.grid))}")
        extra = "".join(f"  {k} {show_attr(v)}" for k, v in self.attrs)
        notes = () if canonical else s.notes
        texts = [head + extra, *(f"  note: {n}" for n in notes), f"  ops {' '.join(self.ops)}",
                 *(f"  read {r}" for r in self.reads)]
        out = [ScheduleLine(text, (), self.name) for text in texts]
        out += [ScheduleLine(f"  {step}{'' if canonical else _mark(step)}", step.ops, self.name)
                for step in self.steps]
        return out + [ScheduleLine(f"  write {w}", (), self.name) for w in self.writes]


def canonical_group(group: ScheduledGroup, lines: bool = False) -> ScheduledGroup:
    """The group with its values numbered in the order in which they appear, without name and ids,
    and without lines unless they are asked for. Groups that do the same to other values have the
    same."""
    names: dict[str, str] = {}

    def renamed(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    def operands(found: tuple[GroupOperand, ...]) -> tuple[GroupOperand, ...]:
        return tuple(replace(o, name=renamed(o.name), offset=0) for o in found)

    reads = operands(group.reads)
    steps = tuple(
        replace(s, args=tuple(renamed(a) if isinstance(a, str) else a for a in s.args),
                name=renamed(s.name), ops=(), where=s.where if lines else None)
        for s in group.steps)
    return replace(group, name="g", batch="", reads=reads, steps=steps,
                   writes=operands(group.writes))


def _mark(step: GroupStep | Transfer) -> str:
    """`    # %7 file.py:12`"""
    at = step.where
    where = f"{short_path(at.file)}:{at.line}" if at is not None and at.file else ""
    text = " ".join([*step.ops[-1:], where]).strip()
    return f"    # {text}" if text else ""


@dataclass(frozen=True)
class Transfer:
    """A copy beside the kernels. kind: offload, to the host | fetch, back to the device."""

    name: str
    kind: str
    source: str
    target: str
    nbytes: int
    ops: tuple[str, ...] = ()
    where: SourceLine | None = field(default=None, compare=False)

    @property
    def on_device(self) -> str:
        """Its buffer on the device."""
        return self.source if self.kind == "offload" else self.target

    @property
    def on_host(self) -> str:
        return self.target if self.kind == "offload" else self.source

    def lines(self, canonical: bool = False) -> list[ScheduleLine]:
        text = f"{self.name} {self.kind} {self.source} -> {self.target}  {self.nbytes} bytes"
        return [ScheduleLine(text if canonical else text + _mark(self), self.ops, self.name)]


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a block of memory."""

    block: str
    begin: int
    end: int

    def meets(self, other: ByteRange) -> bool:
        return self.block == other.block and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class GraphSchedule:
    """The Schedule IR of a function. steps: in the order in which they start.

    fates: what became of each op of its graph.
    """

    name: str
    target: str
    buffers: tuple[PlannedBuffer, ...]
    steps: tuple[ScheduledGroup | Transfer, ...]
    results: tuple[str, ...]
    fates: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def groups(self) -> tuple[ScheduledGroup, ...]:
        """The steps that are kernels."""
        return tuple(s for s in self.steps if isinstance(s, ScheduledGroup))

    @cached_property
    def batches(self) -> dict[str, tuple[ScheduledGroup, ...]]:
        """The groups that one launch runs, by its name."""
        found: dict[str, tuple[ScheduledGroup, ...]] = {}
        for g in self.groups:
            if g.batch:
                found[g.batch] = (*found.get(g.batch, ()), g)
        return found

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(s for s in self.steps if isinstance(s, Transfer))

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The numbers of the groups that read each buffer's memory, by its owner."""
        return self._groups_by_memory(lambda group: group.reads)

    @cached_property
    def writers(self) -> dict[str, list[int]]:
        """The numbers of the groups that write there."""
        return self._groups_by_memory(lambda group: group.writes)

    def _groups_by_memory(self, side: Callable[[ScheduledGroup], Iterable[GroupOperand]]
                          ) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, step in enumerate(self.steps):
            for name in () if isinstance(step, Transfer) else {
                    self.base(o.name) for o in side(step)}:
                found.setdefault(name, []).append(i)
        return found

    @cached_property
    def result_memory(self) -> frozenset[str]:
        """The buffers in whose memory results lie."""
        return frozenset(map(self.base, self.results))

    @cached_property
    def _by_name(self) -> dict[str, PlannedBuffer]:
        return {b.name: b for b in self.buffers}

    def buffer(self, name: str) -> PlannedBuffer:
        return self._by_name[name]

    def base(self, name: str) -> str:
        """The buffer that owns the memory in which another lies."""
        return self.buffer(name).of or name

    def region(self, name: str) -> ByteRange:
        """The bytes in which a buffer lies."""
        b = self.buffer(self.base(name))
        if b.kind == "temporary":
            return ByteRange("temporaries", b.offset, b.offset + aligned(b))
        return ByteRange(b.name, 0, aligned(b))

    @property
    def temporary_bytes(self) -> int:
        """The block that temporaries share."""
        return max((b.offset + aligned(b) for b in self.buffers if b.kind == "temporary"),
                   default=0)

    @property
    def unshared_bytes(self) -> int:
        return sum(aligned(b) for b in self.buffers if b.kind == "temporary")

    @property
    def host_bytes(self) -> int:
        """What lies on the host between a copy there and the one back."""
        return sum(aligned(b) for b in self.buffers if b.kind == "host")

    @property
    def hash(self) -> str:
        """SHA-256 of everything that determines the kernels and their order."""
        text = "\n".join(line.text for line in self.lines(canonical=True))
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines())

    def lines(self, canonical: bool = False) -> list[ScheduleLine]:
        """The text, each line with the ops that it shows. canonical: without names and ids that
        decide nothing."""
        title = "" if canonical else f" {self.name}"
        count = len(self.groups)
        out = [ScheduleLine(f"schedule{title} v{VERSION} target={self.target} groups={count}")]
        out += [ScheduleLine(f"  {b}") for b in self.buffers]
        batches = self.batches
        for step in self.steps:
            if isinstance(step, ScheduledGroup) and step is batches.get(step.batch, (None,))[0]:
                names = " ".join(g.name for g in batches[step.batch])
                out.append(ScheduleLine(f"  {step.batch} one launch of "
                                        f"{len(batches[step.batch])} groups: {names}",
                                        (), step.batch))
            out += [replace(line, text=f"  {line.text}") for line in step.lines(canonical)]
        if not canonical:
            out += self._notes()
        return [*out, ScheduleLine("  return " + ", ".join(self.results))]

    def _notes(self) -> list[ScheduleLine]:
        """What became of ops that no step does, and the memory."""
        inside = {i for s in self.steps for i in s.ops}
        out = [ScheduleLine(f"  {i}: {fate}", (i,)) for i, fate in self.fates
               if i not in inside or SCORES_IN_MEMORY in fate]
        out.append(ScheduleLine(f"  memory: temporaries {self.temporary_bytes} bytes, "
                                f"{self.unshared_bytes} without reuse"))
        if self.transfers:
            out.append(ScheduleLine(f"  host memory: {self.host_bytes} bytes"))
        return out


SCORES_IN_MEMORY = "scores of attention lie in memory"  # in a fate


def aligned(b: PlannedBuffer) -> int:
    return -(-max(b.nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES


__all__ = ["ALIGN_BYTES", "HIDDEN", "PlannedBuffer", "ScheduledGroup", "GroupOperand",
           "GraphSchedule", "GroupStep", "ByteRange", "SCORES_IN_MEMORY", "ScheduleLine",
           "Transfer", "aligned", "canonical_group"]
