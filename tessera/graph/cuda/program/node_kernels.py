"""Kernels that are nodes of the graph, as steps of its program: the user's and the library's.

A kernel gets its operands and results where the plan put them. What it writes is a value of its
own: it begins as a copy of the operand, where the kernel does not surely write all of it. Under
vmap it is one launch, whose grid has the axes of the batch in front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from .... import config
from ....dims import Dim
from ....errors import TraceError, UnsupportedTargetError, user_line
from ....lazy_dataclass import dataclass
from ....numerics import stored_bytes
from ....runtime.arrays import Array, dense_strides
from ....runtime.buffer import copy_bytes, fill_bytes
from ....tile.interpreter.arguments import Bound, Placement
from ....tile.interpreter.launch import Specialisation, run_grid, scalars_in_grid
from ....tile.interpreter.memory import Memory
from ....tile.ir.argument_layout import ArgumentLayout
from ....tile.ir.ir import Function
from ....tile.ir.types import GlobalTensor, Scalar
from ....tile.launch.compile_images import WantedImage
from ....tile.launch.first_call import request_for
from ....tile.launch.machine_code import image_for
from ....tile.launch.recipe import LaunchTarget, Recipe
from ....tile.launch.repeated_call import grid_names
from ....tile.passes.argument_layouts import with_layouts
from ....tile.passes.batch_axes import KEY, batch_extent, with_batch_axes, with_key
from ....tile.passes.graph_arguments import held_in, with_given_results, with_loaded_numbers
from ....tile.passes.overwritten_arguments import overwritten_parameters
from ....tile.passes.random_draws import draws
from ...ir import Graph, Node, Value
from ...op import FRESH, Aval, ResultMemory
from ...ops.kernel import KERNEL, KernelCall
from ...schedule.groups import FusionGroup
from ...schedule.ir import ALIGN_BYTES, GroupOperand, ScheduledGroup
from ...schedule.layouts import argument_layout
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.kernel_text import KernelText
from ..passes.packed_values import elements_of, stored_array
from .placed_launch import BufferAddress, PlacedLaunch


@dataclass(frozen=True, eq=False)
class NodeKernel:
    """What a kernel's node launches. operands: the tensor parameters in the order of the node's
    inputs; results: those in the order of its outputs.

    fills: what is written and need not be copied: the byte of which it is full before, or None
    where the kernel writes all of it.
    """

    call: KernelCall
    work: Specialisation
    bound: Bound
    operands: tuple[str, ...]
    results: tuple[str, ...]
    changes: int  # of what the kernel reads from outside, when it was compiled
    fills: tuple[tuple[str, int | None], ...] = ()

    @staticmethod
    def of(call: KernelCall, avals: Sequence[Aval]) -> NodeKernel:
        """For operands of these types. Raises UnsupportedTargetError for a grid that is data."""
        bound, kernel = call.bound(avals), call.kernel
        work = kernel.specialised(bound, call.config)
        whole = _overwritten(call, work, bound)
        numbers = frozenset(n for n in call.names if isinstance(bound.types[n], Scalar))
        asked = scalars_in_grid(work.function, bound) | grid_names(kernel.grid)
        if call.config.groups is None and (data := asked & numbers):
            raise UnsupportedTargetError(
                f"the grid of {kernel.__name__} depends on {', '.join(sorted(data))}, which is "
                "data of the graph", hint=f"choose the grid: {kernel.__name__}[groups](...)")
        made = with_loaded_numbers(with_given_results(work.function), numbers)
        operands = tuple(held_in(n) if n in numbers else n for n in call.names)
        results = (*call.returned, *call.written)
        batch = Batch.of(call, operands, results)
        if batch.sizes and call.drawn:
            made, operands = with_key(made), (*operands, KEY)
            _require_no_rounding(made)
        at = _of_step(made, bound)
        if batch.sizes:
            made = with_batch_axes(made, len(batch.sizes), batch.has, len(work.grid))
            at = _of_step(made, at)
            at.sizes = at.sizes | {batch_extent(i): n for i, n in enumerate(batch.sizes)}
        work = replace(work, function=made, grid=(*batch.sizes, *work.grid))
        return NodeKernel(call, work, at, operands, results, kernel.changes,
                          tuple((n, None) for n in call.written if n in whole))

    @property
    def drawn(self) -> bool:
        """Whether it is given a key at each launch."""
        return draws(self.work.function)

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

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The extents of each tensor parameter in one launch."""
        return _shapes(self.bound)


@dataclass(frozen=True)
class Batch:
    """The axes of a batch as few as they can be: those that the same parameters have are one.

    sizes: their extents; has: for each tensor parameter, which of them it has.
    """

    sizes: tuple[int, ...]
    has: dict[str, tuple[bool, ...]]

    @staticmethod
    def of(call: KernelCall, operands: Sequence[str], results: Sequence[str]) -> Batch:
        names = (*operands, KEY) if call.drawn else tuple(operands)
        sizes: list[int] = []
        flags: list[tuple[bool, ...]] = []
        for n, mine in zip(call.batch, call.batched, strict=True):
            if flags and flags[-1] == mine:
                sizes[-1] *= n
            else:
                sizes.append(n)
                flags.append(mine)
        has = {n: tuple(f[i] for f in flags) for i, n in enumerate(names)}
        return Batch(tuple(sizes), has | dict.fromkeys(results, (True,) * len(sizes)))


def _of_step(function: Function, bound: Bound) -> Bound:
    """The arguments as the step has them: results and numbers that are data are tensors too."""
    types = {p.value.name: p.type for p in function.params if p.role == "argument"}
    numbers = {n: bound.values[n] for n, t in types.items() if isinstance(t, Scalar)}
    return Bound(types=types, values=numbers, constants=bound.constants, sizes=bound.sizes,
                 texts={"1": 1, **bound.texts}, explicit=bound.explicit, kernel=bound.kernel)


def _overwritten(call: KernelCall, work: Specialisation, bound: Bound) -> frozenset[str]:
    return call.fresh | call.kernel.overwrites | overwritten_parameters(
        work.function, work.grid, work.lanes, _shapes(bound), bound.sizes)


def _shapes(bound: Bound) -> dict[str, tuple[int, ...]]:
    return {n: tuple(_extent(d, bound) for d in t.dims)
            for n, t in bound.types.items() if isinstance(t, GlobalTensor)}


def _extent(d: Any, bound: Bound) -> int:
    size = d.bind(bound.sizes) if isinstance(d, Dim) else d
    return bound.texts[str(d)] if isinstance(size, Dim) else int(size)


def _require_no_rounding(function: Function) -> None:
    if draws(function):
        raise UnsupportedTargetError(
            f"kernel {function.name} rounds stochastically where it stores, under vmap",
            hint="let it store f32, and round behind it with ts.cast")


# --- as a group -----------------------------------------------------------------------------------
def kernel_group(node: Node) -> FusionGroup:
    """The group of a kernel's node. One that only reports gives nothing."""
    space = next((extents_of(v) for v in (*node.outputs, *node.inputs)), (1,))
    return FusionGroup("launch", space, [node], list(node.inputs), list(node.outputs),
                       writes_all=True)


def written_operand(node: Node) -> ResultMemory:
    """Where the result of a kernel's node lies: of one that writes an operand and returns nothing
    else in that operand's memory, if nobody else reads it."""
    call = node.attrs["call"]
    if len(node.outputs) != 1 or not call.written:
        return FRESH
    return ResultMemory("donated", call.names.index(call.written[0]))


def drop_overwritten(graph: Graph) -> Graph:
    """What a kernel writes whole need not be computed before: zeros stand for it, which nobody
    fills in."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Any:
        if node.op is not KERNEL or not node.outputs:
            return None
        call = node.attrs["call"]
        bound = call.bound([v.aval for v in node.inputs])
        whole = _overwritten(call, call.kernel.specialised(bound, call.config), bound)
        given = list(inputs)
        for i, (name, v) in enumerate(zip(call.names, inputs, strict=False)):
            if name in whole & set(call.written):
                zero = rw.emit("constant", value=0, type=v.aval.type)
                given[i] = rw.emit("broadcast_to", zero, shape=v.aval.shape)
        rw.add(Node(node.op, tuple(given), node.attrs, node.outputs, node.where))
        rw.env |= {v: v for v in node.outputs}
        return node.outputs[0]

    return remove_dead(rebuild(graph, visit))


def launch_of(node: Node, numbers: Mapping[Value, Any]) -> NodeKernel:
    """numbers: values that are one number repeated."""
    try:
        made = NodeKernel.of(node.attrs["call"], [v.aval for v in node.inputs])
        fills = dict(made.fills)
        for name, v in zip(made.operands, node.inputs, strict=False):
            if name in made.call.written and name not in fills and v in numbers and (
                    byte := _byte(v, numbers[v])) is not None:
                fills[name] = byte
        return replace(made, fills=tuple(fills.items()))
    except UnsupportedTargetError as error:
        error.where = error.where or node.where
        raise


def _byte(v: Value, number: Any) -> int | None:
    """The byte that all bytes of an element are, if there is one."""
    dtype = v.aval.dtype
    if dtype.packed:
        return int(number)  # of what lies packed the bytes are known
    found = set(np.asarray(number).astype(dtype.numpy).tobytes())
    return found.pop() if len(found) == 1 else None


# --- as a step ------------------------------------------------------------------------------------
@dataclass(eq=False)
class NodeLaunch:
    """The step of a group of kind "launch".

    counted: results of a kernel of the library's whose bad elements count; of a user's everything
    does, operands too.
    """

    group: ScheduledGroup
    counted: frozenset[str] = frozenset()
    recipes: dict[Any, Recipe] = field(default_factory=dict)  # by all that decides of them

    @property
    def shared(self) -> NodeKernel:
        return self.group.attr("call")

    @property
    def kernel(self) -> NodeLaunch:
        return self

    def function(self) -> Function:
        """Its Tile IR."""
        return self._laid[0]

    @cached_property
    def _laid(self) -> tuple[Function, Bound]:
        """The kernel and its arguments as they lie here."""
        made, laid = self.shared, self._layouts
        types = {n: GlobalTensor(t.numeric, laid[n].extents) if n in laid and isinstance(
            t, GlobalTensor) else t for n, t in made.bound.types.items()}
        return (with_layouts(made.work.function, laid),
                replace(made.bound, types=types) if laid else made.bound)

    @cached_property
    def _layouts(self) -> dict[str, ArgumentLayout]:
        """By parameter, how it lies in the buffer that owns its memory."""
        found, shapes = {}, self.shared.shapes
        for name, o in (*self._operands().items(), *self._results().items()):
            if o.layout is not None:
                lies = argument_layout(o.layout, shapes[name])
                assert lies is not None, f"{o} cannot be passed"
                found[name] = lies
        return found

    @property
    def of_user(self) -> bool:
        """Whether sentinels look at it as at a kernel of the user's, not as at an op."""
        return not self.shared.call.kernel.of_library

    def count(self, names: frozenset[str]) -> None:
        """Bad values in these results count for a program that launches it."""
        self.counted = names

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
        shapes = {n: shape for n, _, _, shape in self._tensors}
        at = self.buffers()
        return tuple((at[p.value.name], shapes[p.value.name]) for p in self.function().params
                     if isinstance(p.type, GlobalTensor))

    def buffers(self) -> dict[str, str]:
        """The buffer of each tensor parameter."""
        found = {n: o.name for n, o in self._operands().items()}
        return found | {n: o.name for n, o in self._results().items()}

    def _operands(self) -> dict[str, GroupOperand]:
        """By parameter; what is filled or written whole has none."""
        made = self.shared
        filled = dict(made.fills)
        return dict(zip((n for n in made.operands if n not in filled), self.group.reads,
                        strict=False))

    def _results(self) -> dict[str, GroupOperand]:
        return dict(zip(self.shared.results, self.group.writes, strict=True))

    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """On host memory, under the interpreter. read: the memory of a buffer."""
        made, operands, (function, laid) = self.shared, self._operands(), self._laid
        for name in made.call.written:
            whole = read(self._results()[name].name).reshape(-1)
            if name not in (fills := dict(made.fills)):
                source = read(operands[name].name).reshape(-1)
                whole.view(np.uint8)[...] = source.view(np.uint8)
            elif (byte := fills[name]) is not None:
                whole.view(np.uint8)[...] = byte
        types = {p.value.name: p.type for p in function.params
                 if isinstance(p.type, GlobalTensor)}
        memories = {n: Memory(n, shape, types[n].numeric,
                              elements_of(read(buffer).reshape(-1)[begin:], types[n].numeric,
                                          shape).reshape(-1))
                    for n, buffer, begin, shape in self._tensors}
        bound = replace(laid, values=laid.values | memories,
                        given={n: m.flat for n, m in memories.items()})
        words = read(self.group.reads[-1].name).reshape(-1) if made.drawn else None
        key = None if words is None else (int(words[0]), int(words[1]))
        run_grid(function, bound, made.work.lanes, made.work.grid,
                 made.call.kernel.__name__, key=key)
        for name, o in self._results().items():
            if o.type.dtype.packed:
                flat = memories[name].flat.reshape(memories[name].shape)
                read(o.name).reshape(-1)[...] = stored_array(flat, o.type).reshape(-1)

    # --- on a GPU -------------------------------------------------------------------------------
    def steps(self, place: Callable[[str, int], BufferAddress], zeros: Callable[[str],
                                                                                BufferAddress],
              key: Callable[[str], tuple[int, int]], index: int, stream: int
              ) -> list[tuple[str, Callable[[], Any]]]:
        """Copies of what it writes, then the launch, with what each is: fill | copy | kernel.
        place: where a buffer lies from a byte on, in the call under way. zeros: memory of a
        buffer's size that was cleared once. key: the words of a buffer that the host filled for it.
        """
        found: list[tuple[str, Callable[[], Any]]] = []
        operands, results, fills = self._operands(), self._results(), dict(self.shared.fills)
        counters = {n for n in self.shared.call.kernel.counters if fills.get(n) == 0}
        for name in self.shared.call.written:
            o = results[name]
            nbytes = stored_bytes(o.shape, o.type.dtype)
            if not nbytes or name in counters:
                continue
            if name not in fills:
                copy = partial(copy_placed, place(o.name, 0), place(operands[name].name, 0), nbytes,
                               stream)
                found.append(("copy", copy))
            elif (byte := fills[name]) is not None:
                found.append(("fill", partial(_fill, place(o.name, 0), byte, nbytes, stream)))
        drawn = partial(key, self.group.reads[-1].name) if self.shared.drawn else None
        places = [zeros(b) if n in counters else place(b, begin)
                  for (n, *_), (b, begin) in zip(self._tensors, self._places(), strict=True)]
        launch = PlacedLaunch(self._finder(index), places, stream, drawn)
        return [*found, ("kernel", launch)]

    def _finder(self, index: int) -> Callable[[tuple[int, ...]], Recipe]:
        settings = index, config.numerics, bool(config.debug), self.counted

        def find(pointers: tuple[int, ...]) -> Recipe:
            known = (*settings, tuple(p % ALIGN_BYTES for p in pointers))
            if known not in self.recipes:
                self.recipes[known] = self._recipe(pointers, index)
            return self.recipes[known]

        return find

    def wanted(self, pointer: Callable[[str], int], index: int) -> WantedImage:
        """What its launch has to have compiled."""
        values = [pointer(b) + at for b, at in self._places()]
        return self._wanted(values, index)[0]

    def _wanted(self, values: Sequence[int], index: int
                ) -> tuple[WantedImage, LaunchTarget, tuple[str, ...]]:
        """For arrays that begin there: what is compiled, where it runs, the arrays' names."""
        made, (function, bound) = self.shared, self._laid
        arrays = {n: Array(at, shape, dense_strides(shape), bound.types[n].dtype, index, "", None)
                  for at, (n, _, _, shape) in zip(values, self._tensors, strict=True)}
        bound.place = Placement(index)
        target = LaunchTarget(index, made.work.grid, "", numerics=config.numerics)
        kernel, work = made.call.kernel, replace(made.work, function=function)
        # the plan is proved: what it writes nobody else reads or writes meanwhile
        request = request_for(kernel, work, bound, arrays, target)
        watched = request.watched if self.of_user else request.watched & self.counted
        request = replace(request, shared=frozenset(), watched=watched)
        return WantedImage(function, request, kernel.images), target, tuple(arrays)

    def _recipe(self, values: Sequence[int], index: int) -> Recipe:
        """How it is launched on arrays that begin there."""
        wanted, target, names = self._wanted(values, index)
        image = image_for(wanted.function, wanted.request, wanted.loaded)
        return Recipe(image, self._laid[1], target, names, ())

    def _places(self) -> list[tuple[str, int]]:
        """The buffer of each tensor parameter, and the byte of it at which it begins."""
        return [(b, begin * self.shared.bound.types[n].dtype.numpy.itemsize)
                for n, b, begin, _ in self._tensors]

    @cached_property
    def _tensors(self) -> list[tuple[str, str, int, tuple[int, ...]]]:
        """(parameter, buffer, the element of it at which it begins, extents) of each tensor
        parameter, as it is passed."""
        shapes = self.shared.shapes | {n: lies.extents for n, lies in self._layouts.items()}
        begin = {n: o.offset for n, o in (*self._operands().items(), *self._results().items())}
        return [(n, buffer, begin[n], shapes[n]) for n, buffer in self.buffers().items()]


def _fill(target: BufferAddress, byte: int, nbytes: int, stream: int) -> None:
    fill_bytes(target.pointer, byte, nbytes, stream)


def copy_placed(target: BufferAddress, source: BufferAddress, nbytes: int, stream: int) -> None:
    """Nothing where the operand's memory is the result's."""
    if target.pointer != source.pointer:
        copy_bytes(target.pointer, source.pointer, nbytes, stream)


__all__ = ["NodeKernel", "NodeLaunch", "copy_placed", "drop_overwritten", "kernel_group",
           "launch_of", "written_operand"]
