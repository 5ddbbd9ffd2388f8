"""One launch for the groups of a batch: a table in device memory has what differs between them.

    row 0            the first block of each group
    row 1, 2, ...    the words of each parameter of its kernel: pointers, extents, its own grid

A block finds its group in an array of one number for each block, then reads the group's column of
the table and goes on as a block of the group's own launch would (`Emitter.word`). Where arrays
begin may change from call to call: then the table is written anew, in front of the launch and
behind those before it. A recorded CUDA graph has tables of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .... import config
from ....kernels.routine import ForeignArray
from ....lazy_dataclass import dataclass
from ....numerics import stored_bytes
from ....runtime import flags
from ....runtime.buffer import DEFAULT, DeviceBuffer, PooledBuffer
from ....runtime.device import device
from ....runtime.sentinel_words import owned
from ....tile.interpreter.arguments import Bound
from ....tile.interpreter.launch import Specialisation, extent
from ....tile.ir.types import GlobalTensor
from ....tile.launch.compile_images import WantedImage, at_line
from ....tile.launch.machine_code import CompileRequest, Image, Slot, image_for, target_at
from ....tile.launch.repeated_call import ALIGNMENT_BYTES
from ....tile.launch.sentinels import LaunchSentinels
from ....tile.passes.written_arguments import written_parameters
from .run import GroupLaunch


@dataclass(frozen=True, eq=False)
class BatchTable:
    """A table in device memory, and the launch that reads it."""

    memory: DeviceBuffer
    start: Callable[[int], None]


@dataclass(frozen=True, eq=False)
class _Form:
    """The machine code for pointers of one kind, what its tables hold, and the table that is
    written anew where pointers change."""

    image: Image
    rows: np.ndarray  # [1 + columns of the image, groups], those of pointers to be filled in
    tensors: tuple[tuple[int, int], ...]  # row, and which tensor of a call lies there
    table: BatchTable


class BatchLaunch:
    """The launch of a batch, whose groups have one kernel. arguments: of each group.

    numbers: of its groups among the program's launches.  owner: whose the words of sentinels are.
    """

    def __init__(self, launches: Sequence[GroupLaunch],
                 arguments: Sequence[Sequence[ForeignArray]], index: int,
                 numbers: Sequence[int] = (), owner: Any = None):
        self.launches, self.arguments, self.index = launches, arguments, index
        self.kernel = launches[0].shared
        self._numbers, self._owner = numbers, owner
        self._arrays = [a for given in arguments for a in given]
        self._pointers: list[int] = []
        self._forms: dict[tuple, _Form] = {}
        self._table: BatchTable | None = None

    def __call__(self, stream: int = DEFAULT) -> None:
        pointers = [a.pointer for a in self._arrays]
        if pointers != self._pointers:
            self._place(pointers)
        if self._flags.words[0]:
            self._flags.check()
        assert self._table is not None
        self._table.start(stream)

    def table(self) -> BatchTable:
        """A table for arrays as they lie now, which nothing changes: what is recorded next reads
        it, so it has to be kept as long as that."""
        self._place([a.pointer for a in self._arrays], alone=True)
        assert self._table is not None
        return self._table

    @cached_property
    def _flags(self) -> flags.ErrorFlags:
        """Of its device, which compiling needs not."""
        return flags.error_flags(self.index)

    # --- what does not change -------------------------------------------------------------------
    @cached_property
    def _calls(self) -> list[tuple[Bound, Specialisation]]:
        found = []
        for given in self.arguments:
            bound = self.kernel.bind(tuple(given), {})
            found.append((bound, self.kernel.specialised(bound)))
        return found

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Of each group."""
        return np.array([prod(work.grid) for _, work in self._calls], np.int64)

    @cached_property
    def _places(self) -> DeviceBuffer:
        """The group of each block, on the device."""
        numbers = np.repeat(np.arange(len(self.launches), dtype=np.int32), self._blocks)
        held = DeviceBuffer(numbers.nbytes, device(self.index))
        held.load(numbers)
        return held

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the tensors of a call."""
        return tuple(p.value.name for p in self._calls[0][1].function.params
                     if isinstance(p.type, GlobalTensor))

    @cached_property
    def _bytes(self) -> np.ndarray:
        """Of each tensor of each call: [groups, tensors]."""
        return np.array([[stored_bytes(a.shape, a.dtype) for a in given]
                         for given in self.arguments], np.int64)

    # --- where arrays lie -----------------------------------------------------------------------
    def _facts(self, pointers: np.ndarray) -> tuple[frozenset[str], frozenset[str]]:
        """The tensors that begin at whole accesses in all calls, and those that in some call share
        memory with another, where one of the two is written. pointers: [groups, tensors]."""
        odd: list[bool] = np.any(pointers % ALIGNMENT_BYTES, axis=0).tolist()
        ends, shared = pointers + self._bytes, set[str]()
        written = written_parameters(self._calls[0][1].function)
        for i, name in enumerate(self._names):
            if name in written:
                meets = (pointers[:, [i]] < ends) & (pointers < ends[:, [i]])
                meets[:, i] = False
                others = {n for n, m in zip(self._names, meets.any(axis=0), strict=True) if m}
                shared |= others | ({name} if others else set())
        return (frozenset(n for n, o in zip(self._names, odd, strict=True) if not o),
                frozenset(shared))

    def _request(self, aligned: frozenset[str], shared: frozenset[str]) -> CompileRequest:
        bounds, work = [b for b, _ in self._calls], self._calls[0][1]
        divisible = frozenset(d for d in bounds[0].texts if not d.lstrip("-").isdigit()
                              and all(b.texts[d] % 16 == 0 for b in bounds))
        watched, held = frozenset[str](), frozenset[tuple[int, str]]()
        if config.numerics != "off":
            watched, held = self.kernel.watched_tensors(work.function), self.kernel.held_lines
        return CompileRequest(work.lanes, work.schedule, target_at(self.index), divisible,
                              aligned, shared, False, watched, held, True)

    def _array(self, pointers: Sequence[int]) -> np.ndarray:
        return np.array(pointers, np.int64).reshape(len(self.launches), -1)

    def wanted(self) -> WantedImage:
        """What a launch with the arrays as they lie now has to have compiled."""
        where = self.launches[0].group.where
        with at_line(where):
            request = self._request(*self._facts(self._array([a.pointer for a in self._arrays])))
            return WantedImage(self._calls[0][1].function, request, self.kernel.images, where)

    def _place(self, pointers: list[int], alone: bool = False) -> None:
        at = self._array(pointers)
        facts = self._facts(at)
        if facts not in self._forms:
            self._forms[facts] = self._new_form(self._request(*facts))
        form = self._forms[facts]
        for row, tensor in form.tensors:
            form.rows[row] = at[:, tensor]
        self._table = self._new_table(form.image, form.rows.nbytes) if alone else form.table
        self._table.memory.load(form.rows)
        self._pointers = pointers

    def _new_form(self, request: CompileRequest) -> _Form:
        image = image_for(self._calls[0][1].function, request, self.kernel.images)
        rows = np.zeros((1 + len(image.columns), len(self.launches)), np.int64)
        rows[0, 1:] = np.cumsum(self._blocks)[:-1]
        tensors = []
        for row, column in enumerate(image.columns, 1):
            if column.kind == "tensor":
                tensors.append((row, self._names.index(column.name)))
            else:
                rows[row] = [self._number(column, i, image) for i in range(len(self.launches))]
        return _Form(image, rows, tuple(tensors), self._new_table(image, rows.nbytes))

    def _new_table(self, image: Image, nbytes: int) -> BatchTable:
        table = PooledBuffer(nbytes, device(self.index))
        known = {"calls": self._places.pointer, "table": table.pointer,
                 "call_count": len(self.launches), "claim": self._flags.claim,
                 "report": self._flags.report, "kernel": image.key}
        fixed = {i: known[slot.kind] for i, slot in enumerate(image.slots)}
        start = image.code.prepare((int(self._blocks.sum()),), fixed, (), device=self.index)
        return BatchTable(table, start)

    def _number(self, column: Slot, i: int, image: Image) -> int:
        """What a call has in a row that is no tensor's."""
        bound, work = self._calls[i]
        if column.kind == "sentinels":
            with owned(self._owner, self._numbers[i]):
                return LaunchSentinels(image, bound, self.index, False, (), None).words()
        if column.kind == "dim":
            return extent(column.name, bound)
        if column.kind == "axis":
            return work.grid[column.axis] if column.axis < len(work.grid) else 1
        assert column.kind == "groups", column
        return prod(work.grid)


__all__ = ["BatchLaunch", "BatchTable"]
