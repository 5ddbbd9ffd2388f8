"""Kernels: a program's compiled variants, bound to shapes and launched."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..schedule.loop_dtypes import numpy_of
from . import pool
from .emit import CALL_WORDS, Stream, emit, streams
from .layout import LoopAxis, LoopLayout, element_strides, lay_out
from .machine_code import obtain
from .passes import work_per_element
from .program import REDUCTIONS, LoopProgram
from .shared_launch import sharing

# f32 additions below which waking a worker costs more than it saves: about 80 us of one thread.
# Measured on 2 cores of an EPYC 9005 (softmax and add, 8 Ki to 256 Ki elements).
THREAD_WORK = 1 << 22
SHARED_WORK = 1 << 19  # that are worth sharing with a worker that is awake
Launch = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]

_kernels: dict[str, LoopKernel] = {}
_lock = threading.Lock()


def compile_loops(program: LoopProgram) -> LoopKernel:
    """The kernel of a program; one per program in a process. Code is generated at first `bind`."""
    kernel = _kernels.get(program.key)
    if kernel is None:
        with _lock:
            kernel = _kernels.setdefault(program.key, LoopKernel(program))
    return kernel


class LoopKernel:
    """A program and its compiled functions, one for each pattern of inner strides."""

    def __init__(self, program: LoopProgram):
        self.program = program
        self.streams: tuple[Stream, ...] = streams(program)
        self.work = work_per_element(program)
        self.functions: dict[str, Any] = {}
        self.lock = threading.Lock()
        # row buffers: at most one for each op
        self.slots = len(program.ops)

    @property
    def source(self) -> str:
        """Generated source of the last compiled pattern, else of contiguous arrays."""
        pattern = next(reversed(self.functions), None)
        return emit(self.program, pattern or self._contiguous())

    def _contiguous(self) -> str:
        rows = ("row", "count", "row_count")
        return "".join("0" if s.kind in rows else "1" for s in self.streams)

    def bind(
        self,
        shape: Sequence[int],
        in_strides: Sequence[Sequence[int]],
        out_strides: Sequence[Sequence[int]],
    ) -> Launch:
        """A launch for arrays of these strides, in elements, over the iteration space `shape`.

        in_strides: one per input, len(shape) numbers each (0 where it is broadcast).
        out_strides: len(shape) numbers for 'full' and 'row' outputs (the last of a row output is
        ignored), one number for 'column_sum', none for counts, whose arrays hold 0 before.
        The number of threads is that of `config.num_threads` now.
        The arrays of each call must have these strides and the program's element types; that is
        not checked again. Raises ShapeError when the strides do not fit the shape.
        """
        shape = tuple(shape) or (1,)
        layout = self._layout(shape, in_strides, out_strides)
        if not layout.chunks:
            return _nothing
        return self._launcher(layout, self.function(layout.pattern))

    def _layout(self, shape: tuple[int, ...], in_strides: Any, out_strides: Any) -> LoopLayout:
        rank, program = len(shape), self.program
        table = [self._pad(s, rank, "input") for s in in_strides]
        if len(table) != len(program.inputs) or len(out_strides) != len(program.outputs):
            raise ShapeError(
                f"program has {len(program.inputs)} inputs and {len(program.outputs)} outputs, got "
                f"strides of {len(table)} and {len(out_strides)}"
            )
        for s in self.streams:
            if s.kind == "index":
                table.append(self._index_strides(s, shape))
        for out, strides in zip(program.outputs, out_strides, strict=True):
            if out.mode == "column_sum":
                table.append((0,) * (rank - 1) + tuple(strides))
            elif out.mode in ("count", "row_count"):
                table.append((0,) * rank)
            else:
                row = self._pad(strides, rank, "output")
                table.append((*row[:-1], 0) if out.mode == "row" else row)
        axes = [LoopAxis(n, tuple(t[k] for t in table)) for k, n in enumerate(shape)]
        return lay_out(
            self.streams, axes, elementwise=program.elementwise, work=self.work,
            columns=any(o.mode == "column_sum" for o in program.outputs),
            movable=not any(op.kind == "random_bits" for op in program.ops),
        )

    def _pad(self, strides: Sequence[int], rank: int, what: str) -> tuple[int, ...]:
        """Strides of a 0-d array over the shape (1,) are (0,)."""
        strides = tuple(strides) or (0,) * rank
        if len(strides) != rank:
            raise ShapeError(
                f"strides {strides} of an {what} over an iteration space of {rank} axes"
            )
        return strides

    def _index_strides(self, s: Stream, shape: tuple[int, ...]) -> tuple[int, ...]:
        op, rank = self.program.ops[s.position], len(shape)
        if op.kind == "iota":
            return tuple(int(k == op.value % rank) for k in range(rank))
        linear, step = [], 1
        for n in reversed(shape):
            linear.append(step)
            step *= n
        return tuple(reversed(linear))

    def function(self, pattern: str) -> Any:
        """The compiled code for a pattern: from memory, from disk, or compiled now."""
        found = self.functions.get(pattern)
        if found is None:
            with self.lock:
                if pattern not in self.functions:
                    self.functions[pattern] = obtain(emit(self.program, pattern))
                found = self.functions[pattern]
        return found

    def _launcher(self, layout: LoopLayout, function: Any) -> Launch:
        """The hot path, closed over everything that is fixed."""
        slots = self.slots if self._keeps() else 0
        columns = sum(s.kind == "column_sum" for s in self.streams)
        partial = max(1, 2 * columns * layout.chunks * layout.width)
        arrays = len(self.program.inputs) + len(self.program.outputs)
        pack = struct.Struct(f"{CALL_WORDS + arrays}q").pack
        work = layout.count * self.work
        threads = min(pool.threads_wanted(), layout.chunks) if work >= SHARED_WORK else 1
        share = sharing(function, layout.words, threads, slots * int(layout.words[7]),
                        wake=work >= THREAD_WORK)

        def launch(inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
            # A fresh bytes object that only this launch knows: its first words are the counters
            # the threads share.
            sums = np.empty(partial, np.int64) if columns else None
            at = sums.ctypes.data if sums is not None else 0
            share(pack(0, 0, 0, at, *map(id, inputs), *map(id, outputs)))

        return launch

    def _keeps(self) -> bool:
        """Whether some pattern may need row buffers."""
        return any(op.kind in (*REDUCTIONS, "random_bits") for op in self.program.ops)

    def __call__(self, *inputs: np.ndarray, shape: Sequence[int] | None = None) -> list[np.ndarray]:
        """Broadcast, allocate, bind and launch: for tests and single calls, not the hot path.

        inputs: arrays of the program's memory types. Returns the outputs as new arrays.
        """
        if shape is None:
            shape = np.broadcast_shapes(*(a.shape for a in inputs)) if inputs else (1,)
        shape = tuple(shape) or (1,)
        views = [np.broadcast_to(a, shape) for a in inputs]
        outputs = [self._new(o, shape) for o in self.program.outputs]
        launch = self.bind(
            shape, [element_strides(a) for a in views], [element_strides(a) for a in outputs]
        )
        launch(views, outputs)
        return outputs

    def _new(self, out: Any, shape: tuple[int, ...]) -> np.ndarray:
        extents = {"full": shape, "row": (*shape[:-1], 1), "column_sum": shape[-1:]}
        if out.mode not in extents:
            return np.zeros(1, np.int64)
        return np.empty(extents[out.mode], numpy_of(out.dtype))


def _nothing(inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """The launch of an iteration space with nothing to write."""


def unit_source(words: str, body: str) -> str:
    """The source of such a function. words: lines that read the table, `units` among them.  body:
    what is done for `unit`, indented as in a loop"""
    return f"""def loops(layout, call, scratch):
    side = scratch & 1
    scratch -= side
{words}    while True:
        unit = claim_unit(call, units, side)
        if unit < 0:
            break
{body}        if claim(call, 1) == units - 1:
            claim(call, 2)
    await_word(call, 2, 1)
"""


def bind_units(function: Any, units: int, words: Sequence[int], threads: int, scratch: int = 0
               ) -> Callable[..., None]:
    """The launch of a function of units that threads claim, written by hand: it takes arrays.

    Word 0 of its table is their number, `words` are behind it; of its call the first three words
    are shared by the threads, the arrays follow. scratch: bytes of each thread
    """
    if not units:
        return lambda *arrays: None
    share = sharing(function, np.array([units, *words], np.int64), min(threads, units), scratch)

    def launch(*arrays: np.ndarray) -> None:
        share(struct.pack(f"{3 + len(arrays)}q", 0, 0, 0, *map(id, arrays)))

    return launch
