"""@ts.kernel.auto: a function of whole arrays becomes a kernel over blocks of its result (Q71)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.dims import Dim
from tessera.errors import ArgumentError, ShapeError, user_line
from tessera.tensor import Tensor as Array
from tessera.tensor import TensorType
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.frontend.whole_array import WholeArrayTrace, trace_whole
from tessera.tile.frontend.whole_array_blocks import trace_block
from tessera.tile.interpreter.arguments import Bound, Tile
from tessera.tile.interpreter.launch import Config
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import Function, Op, definitions, walk
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.kernel.kernel import Kernel
from tessera.tile.passes import run_passes
from tessera.tile.passes.operation_counts import largest_tile, register_bytes
from tessera.tile.tuning.cost import Estimate, explain
from tessera.tile.tuning.gpus import Gpu
from tessera.tile.tuning.measure import gpu_of_call

ROWS, COLUMNS = (16, 64, 128), (64, 128, 256)
BATCH = "batch"


class AutoKernel(Kernel):
    """Called with matrices, or with stacks of matrices: leading axes are a batch.

    The result has the type of the annotation -> Tensor[..., dtype], else that of the widest
    floating argument. It is specialised to the extents of the call.
    """

    def __init__(self, fn: Any, *, schedule: Schedule | None = None,
                 batched: frozenset[str] = frozenset()):
        super().__init__(fn, schedule=schedule)
        self.batched = batched
        self._variants: dict[frozenset[str], AutoKernel] = {batched: self}
        self._dags: dict[KernelSpec, WholeArrayTrace] = {}

    @property
    def annotations(self) -> dict[str, Any]:
        found = super().annotations
        for name in self.batched:
            dims = (BATCH, f"{name}_0", f"{name}_1")
            found[name] = TensorType(tuple(map(Dim.of, dims)), None)
        return found

    def with_schedule(self, schedule: Schedule) -> AutoKernel:
        """The same kernel with another schedule."""
        super().with_schedule(schedule)  # checks it
        made = AutoKernel(self.fn, schedule=schedule, batched=self.batched)
        made.rule = self.rule
        return made

    # --- batches ------------------------------------------------------------------------------
    def run(self, config: Config, args: tuple, kwargs: dict[str, Any], stream: Any = None,
            target: str | None = None, key: tuple[int, int] | None = None) -> Any:
        given = self._arguments(args, kwargs)
        tiles = [n for n, a in super().annotations.items() if a is Tile and n in given]
        deep = {n: given[n].shape for n in tiles if len(getattr(given[n], "shape", ())) > 2}
        if self.batched or not deep:
            return super().run(config, args, kwargs, stream, target, key)
        lead = self._leading(deep)
        names = frozenset(deep)
        if names not in self._variants:
            self._variants[names] = AutoKernel(self.fn, schedule=self._schedule, batched=names)
        kernel = self._variants[names]
        flat = {n: reshaped(x, (-1, *x.shape[-2:])) if n in names else x for n, x in given.items()}
        result = kernel.run(config, (), flat, stream, target, key)
        self.last, self.report = kernel.last, kernel.report
        self._proposed |= kernel._proposed
        return reshaped(result, (*lead, *result.shape[1:]))

    def _leading(self, deep: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        (first, shape), *rest = deep.items()
        for name, other in rest:
            if tuple(other[:-2]) != tuple(shape[:-2]):
                raise ShapeError(
                    f"{self.__name__}: argument {name} is a stack of {list(other[:-2])} matrices, "
                    f"{first} one of {list(shape[:-2])}", where=user_line(),
                    hint="leading axes agree; a matrix alone is used for all")
        return tuple(shape[:-2])

    # --- compilation --------------------------------------------------------------------------
    def forget(self) -> None:
        super().forget()
        self._dags.clear()

    def choose(self, bound: Bound, config: Config | None = None) -> Schedule:
        if self._schedule is not None:
            return self._schedule
        key = (tuple(bound.types.items()), tuple(bound.constants.items()),
               tuple(bound.texts.items()), gpu := gpu_of_call(bound))
        found = self._proposed.pop(key, None) or self._propose(bound, gpu)
        self._proposed[key] = found  # the last one is `schedule`
        return found

    def compile(self, spec: KernelSpec, sizes: dict[str, int]) -> Function:
        """The kernel of one block; extents are constants of it."""
        _check_parameters(self, spec)
        fixed = _fixed(spec, sizes)
        return run_passes(trace_block(self.source, self.fn, fixed, self._dag(fixed),
                                      spec.schedule))

    def _dag(self, spec: KernelSpec) -> WholeArrayTrace:
        key = KernelSpec(spec.params, spec.constants, None, Schedule(), fixed_dims=spec.fixed_dims)
        if key not in self._dags:
            self._dags[key] = trace_whole(self.source, self.fn, spec)
        return self._dags[key]

    def _propose(self, bound: Bound, gpu: Gpu) -> Schedule:
        """The cheapest blocks whose tiles fit registers, by the model."""
        found: list[tuple[bool, float, int, Schedule, Estimate]] = []
        for i, schedule in enumerate(self._candidates(bound)):
            function = self.compile(self.spec(bound, schedule), bound.sizes)
            cost = explain(function, schedule, bound, gpu)
            held = max(register_bytes(function) // 4, largest_tile(function)) // schedule.lanes
            tight = held > _room(function, gpu)
            found.append((tight, held if tight else cost.us, i, schedule, cost))
        tight, _, _, best, cost = min(found, key=lambda c: c[:3])
        notes = [f"blocks of the result: the cheapest of {len(found)}", f"estimate {cost}"]
        if tight:
            notes.append("no blocks fit registers: some axis is needed whole")
        return best.with_notes(*notes)

    def _candidates(self, bound: Bound) -> Iterator[Schedule]:
        bits = max((t.dtype.bits for t in bound.types.values() if isinstance(t, GlobalTensor)),
                   default=32)
        step = max(32, 1024 // bits)  # rows of 128 bytes
        for m, n, k in itertools.product(ROWS, COLUMNS, (step, 8 * step)):
            yield Schedule(m=m, n=n, k=k, warps=8 if m > 64 else 4, source="auto")


def _room(function: Function, gpu: Gpu) -> int:
    """Registers of a thread for tiles: half of them. Sums of warpgroups may be one more, so that
    two have 128 x 256 of them: x @ w of 4096^3 takes 189 us so and 232 with 128 x 128, rows that
    are normalised in front 257 and 344 (bf16, NVIDIA H100, 2026-11-26)."""
    unit, types = gpu.generation.warpgroup_matmul, definitions(function)
    operands = [types[n.args[0]].dtype.name for n in walk(function.body)  # type: ignore[index]
                if isinstance(n, Op) and n.name == "matmul"]
    by_warpgroups = unit is not None and operands and all(x in unit.operands for x in operands)
    return gpu.generation.thread_registers // 2 + bool(by_warpgroups)


def _check_parameters(kernel: AutoKernel, spec: KernelSpec) -> None:
    for name, t in spec.params:
        if isinstance(t, GlobalTensor) and not 1 <= len(t.dims) <= 3:
            raise TileError(f"the parameter {name} of {kernel.__name__} has {len(t.dims)} axes",
                            where=kernel.source.site(kernel.source.tree),
                            hint="a whole-array function takes vectors, matrices and stacks")
    if not any(isinstance(t, GlobalTensor) for _, t in spec.params):
        raise ArgumentError(f"{kernel.__name__} has no array among its arguments",
                            where=user_line())


def _fixed(spec: KernelSpec, sizes: dict[str, int]) -> KernelSpec:
    """All extents as constants."""
    return KernelSpec(spec.params, spec.constants, spec.result, spec.schedule, spec.lanes,
                      spec.given_grid, tuple(sorted(sizes.items())), spec.wide_dims,
                      modes=spec.modes)


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """An array of any library in another shape."""
    if type(x) is Array:
        return Array(np.reshape(x.array, shape), x.type)
    return x.reshape(shape)


__all__ = ["AutoKernel"]
