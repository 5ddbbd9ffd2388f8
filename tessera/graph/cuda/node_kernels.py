"""Kernels that are nodes of the graph, as steps of its program: the user's and the library's.

A kernel gets its operands and results where the plan put them. What it writes is a value of its
own: it begins as a copy of the operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from ... import config
from ...dims import Dim
from ...errors import TraceError, UnsupportedTargetError, user_line
from ...runtime.arrays import Array, dense_strides
from ...runtime.buffer import copy_bytes, fill_bytes
from ...tile.interpreter.arguments import Bound, Placement
from ...tile.interpreter.launch import (
    Specialisation,
    scalars_in_grid,
)
from ...tile.ir.ir import Function
from ...tile.ir.types import GlobalTensor, Scalar
from ...tile.launch.first_call import request_for
from ...tile.launch.machine_code import image_for
from ...tile.launch.recipe import LaunchTarget, Recipe
from ...tile.launch.repeated_call import grid_names
from ...tile.passes.graph_arguments import held_in, with_given_results, with_loaded_numbers
from ..ir import Node, Value
from ..op import Aval
from ..ops.kernel import KernelCall
from ..schedule.groups import FusionGroup
from ..schedule.ir import ALIGN_BYTES, GroupOperand, ScheduledGroup
from ..schedule.loop_axes import extents_of
from .kernel_text import KernelText
from .spell import no_kernel


@dataclass(frozen=True, eq=False)
class NodeKernel:
    """What a kernel's node launches. operands: the tensor parameters in the order of the node's
    inputs; results: those in the order of its outputs; numbers: the parameters that are data;
    fills: the byte of which what it writes is full before, where that is known."""

    call: KernelCall
    work: Specialisation
    bound: Bound
    operands: tuple[str, ...]
    results: tuple[str, ...]
    numbers: frozenset[str]
    changes: int  # of what the kernel reads from outside, when it was compiled
    fills: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(call: KernelCall, avals: Sequence[Aval]) -> NodeKernel:
        """For operands of these types. Raises UnsupportedTargetError for a grid that is data."""
        bound, kernel = call.bound(avals), call.kernel
        work = kernel.specialised(bound, call.config)
        numbers = frozenset(n for n in call.names if isinstance(bound.types[n], Scalar))
        asked = scalars_in_grid(work.function, bound) | grid_names(kernel.grid)
        if call.config.groups is None and (data := asked & numbers):
            raise UnsupportedTargetError(
                f"the grid of {kernel.__name__} depends on {', '.join(sorted(data))}, which is "
                "data of the graph", hint=f"choose the grid: {kernel.__name__}[groups](...)")
        made = with_loaded_numbers(with_given_results(work.function), numbers)
        return NodeKernel(call, replace(work, function=made), _of_step(made, bound),
                          tuple(held_in(n) if n in numbers else n for n in call.names),
                          (*call.returned, *call.written), numbers, kernel.changes)

    def require_unchanged(self) -> None:
        """Raises TraceError when what the kernel reads from outside has changed since."""
        kernel = self.call.kernel
        if kernel.changes != self.changes or not kernel.unchanged():
            raise TraceError(f"kernel {kernel.__name__} reads a global or closure variable that "
                             "has changed since the function around it was compiled",
                             where=user_line(),
                             hint="pass the value as an argument, or make the function anew")

    def __str__(self) -> str:
        return f"{self.call} {self.work.function.content_hash[:8]}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The extents of each tensor parameter in one launch."""
        return {n: tuple(_extent(d, self.bound) for d in t.dims)
                for n, t in self.bound.types.items() if isinstance(t, GlobalTensor)}


def _of_step(function: Function, bound: Bound) -> Bound:
    """The arguments as the step has them: results and numbers that are data are tensors too."""
    types = {p.value.name: p.type for p in function.params if p.role == "argument"}
    numbers = {n: bound.values[n] for n, t in types.items() if isinstance(t, Scalar)}
    return Bound(types=types, values=numbers, constants=bound.constants, sizes=bound.sizes,
                 texts={"1": 1, **bound.texts}, explicit=bound.explicit, kernel=bound.kernel)


def _extent(d: Any, bound: Bound) -> int:
    size = d.bind(bound.sizes) if isinstance(d, Dim) else d
    return bound.texts[str(d)] if isinstance(size, Dim) else int(size)


# --- as a group -----------------------------------------------------------------------------------
def kernel_group(node: Node) -> FusionGroup:
    """The group of a kernel's node. Raises UnsupportedTargetError for packed types."""
    for v in (*node.inputs, *node.outputs):
        if v.aval.dtype.packed:
            raise no_kernel(node, f"a graph on a GPU keeps {v.aval.dtype} unpacked")
    return FusionGroup("launch", extents_of(node.outputs[0]), [node], list(node.inputs),
                       list(node.outputs), writes_all=True)


def launch_of(node: Node, numbers: Mapping[Value, Any]) -> NodeKernel:
    """numbers: values that are one number repeated."""
    try:
        made = NodeKernel.of(node.attrs["call"], [v.aval for v in node.inputs])
        fills = tuple((name, byte) for name, v in zip(made.operands, node.inputs, strict=False)
                      if name in made.call.written and v in numbers
                      and (byte := _byte(v, numbers[v])) is not None)
        return replace(made, fills=fills)
    except UnsupportedTargetError as error:
        error.where = error.where or node.where
        raise


def _byte(v: Value, number: Any) -> int | None:
    """The byte that all bytes of an element are, if there is one."""
    found = set(np.asarray(number).astype(v.aval.dtype.numpy).tobytes())
    return found.pop() if len(found) == 1 else None


# --- as a step ------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class NodeLaunch:
    """The step of a group of kind "launch"."""

    group: ScheduledGroup

    @property
    def shared(self) -> NodeKernel:
        return self.group.attr("call")

    @property
    def kernel(self) -> NodeLaunch:
        return self

    def function(self) -> Function:
        """Its Tile IR."""
        return self.shared.work.function

    @cached_property
    def source(self) -> KernelText:
        """Its lines are the user's: nothing is generated."""
        return KernelText(self.group.kernel, "", (), {}, {})

    @property
    def lanes(self) -> int:
        return self.shared.work.lanes

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(buffer, extents) in the order of the tensor parameters."""
        shapes, at = self.shared.shapes(), self.buffers()
        return tuple((at[p.value.name], shapes[p.value.name]) for p in self.function().params
                     if isinstance(p.type, GlobalTensor))

    def buffers(self) -> dict[str, str]:
        """The buffer of each tensor parameter."""
        found = {n: o.name for n, o in self._operands().items()}
        return found | {n: o.name for n, o in self._results().items()}

    def _operands(self) -> dict[str, GroupOperand]:
        """By parameter; what is filled has none."""
        made = self.shared
        filled = dict(made.fills)
        return dict(zip((n for n in made.operands if n not in filled), self.group.reads,
                        strict=False))

    def _results(self) -> dict[str, GroupOperand]:
        return dict(zip(self.shared.results, self.group.writes, strict=True))

    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """On host memory, under the interpreter. read: the memory of a buffer."""
        call, operands, results = self.shared.call, self._operands(), self._results()
        fills = dict(self.shared.fills)
        given: list[np.ndarray] = []
        for name in self.shared.operands:
            o = results[name] if name in fills else operands[name]
            array = read(o.name).reshape(o.shape)
            if name in fills:
                array.view(np.uint8)[...] = fills[name]
            given.append(array)
        if call.drawn:
            given.append(read(self.group.reads[-1].name))
        for o, y in zip(results.values(), call.run_rows(given), strict=True):
            read(o.name).reshape(o.shape)[...] = y

    # --- on a GPU -------------------------------------------------------------------------------
    def steps(self, pointer: Callable[[str], int], key: Callable[[str], tuple[int, int]],
              index: int, stream: int) -> list[tuple[str, Callable[[], Any]]]:
        """Copies of what it writes, then one launch for each row of the batch, with what each is:
        fill | copy | kernel. pointer: where a buffer lies in the call under way. key: the words of
        a buffer that the host filled for it.
        """
        found: list[tuple[str, Callable[[], Any]]] = []
        operands, results, fills = self._operands(), self._results(), dict(self.shared.fills)
        for name in self.shared.call.written:
            o = results[name]
            nbytes = prod(o.shape) * o.type.dtype.numpy.itemsize
            if nbytes and name in fills:
                fill = partial(_fill, pointer, o.name, fills[name], nbytes, stream)
                found.append(("fill", fill))
            elif nbytes:
                copy = partial(_copy, pointer, o.name, operands[name].name, nbytes, stream)
                found.append(("copy", copy))
        for row in itertools.product(*map(range, self.shared.call.batch)):
            found.append(("kernel", self._launch(row, pointer, key, index, stream)))
        return found

    def _launch(self, row: tuple[int, ...], pointer: Callable[[str], int],
                key: Callable[[str], tuple[int, int]], index: int,
                stream: int) -> Callable[[], Any]:
        tensors = [(n, b, self._offset(n, row)) for n, b, _ in self._tensors()]
        recipes: dict[tuple[int, ...], Recipe] = {}  # by how the arrays are aligned
        drawn = self.group.reads[-1].name if self.shared.call.drawn else ""

        def launch() -> None:
            values = [pointer(b) + offset for _, b, offset in tensors]
            aligned = tuple(v % ALIGN_BYTES for v in values)
            if aligned not in recipes:
                recipes[aligned] = self._recipe(values, index)
            recipes[aligned].run(stream, values, (), stream != 0, *([key(drawn)] if drawn else ()))

        return launch

    def _recipe(self, values: list[int], index: int) -> Recipe:
        """How it is launched on arrays that begin there."""
        made = self.shared
        arrays = {n: Array(at, shape, dense_strides(shape), made.bound.types[n].dtype, index, "",
                           None)
                  for at, (n, _, shape) in zip(values, self._tensors(), strict=True)}
        made.bound.place = Placement(index)
        target = LaunchTarget(index, made.work.grid, "", numerics=config.numerics)
        kernel = made.call.kernel
        image = image_for(made.work.function,
                          request_for(kernel, made.work, made.bound, arrays, target), kernel.images)
        return Recipe(image, made.bound, target, tuple(arrays), ())

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        shapes = self.shared.shapes()
        for name, buffer in self.buffers().items():
            yield name, buffer, shapes[name]

    def _offset(self, name: str, row: tuple[int, ...]) -> int:
        """Where one launch's part of a parameter begins, in bytes."""
        made = self.shared
        call, size = made.call, prod(made.shapes()[name])
        if name in made.results:
            has = [True] * len(call.batch)
        else:
            has = [b[made.operands.index(name)] for b in call.batched]
        at = 0
        for i, n, mine in zip(row, call.batch, has, strict=True):
            at = at * n + i if mine else at
        return at * size * made.bound.types[name].dtype.numpy.itemsize


def _fill(pointer: Callable[[str], int], name: str, byte: int, nbytes: int, stream: int) -> None:
    fill_bytes(pointer(name), byte, nbytes, stream)


def _copy(pointer: Callable[[str], int], name: str, source: str, nbytes: int, stream: int) -> None:
    copy_bytes(pointer(name), pointer(source), nbytes, stream)


__all__ = ["NodeKernel", "NodeLaunch", "kernel_group", "launch_of"]
