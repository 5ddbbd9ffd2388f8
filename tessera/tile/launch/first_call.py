"""A call on a GPU that was not seen before: bound, checked, compiled, and its recipe written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera import config as settings
from tessera.errors import DTypeError
from tessera.numerics.packed_order import order_of
from tessera.runtime.arrays import HOST, Array, overlap, read_array
from tessera.runtime.buffer import stream_pointer
from tessera.runtime.staging import Staging
from tessera.tensor import Tensor as HostTensor
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config, Specialisation, scalars_in_grid
from tessera.tile.ir.ir import Function
from tessera.tile.ir.types import GlobalTensor, Scalar
from tessera.tile.launch import reports as reports  # makes errors of kernels the interpreter's
from tessera.tile.launch.machine_code import (
    CompileRequest,
    Image,
    divisible_extents,
    image_for,
    target_at,
)
from tessera.tile.launch.recipe import LaunchTarget, Recipe, as_signed
from tessera.tile.launch.repeated_call import ALIGNMENT_BYTES, Launcher, grid_names
from tessera.tile.launch.sentinels import RunAgain
from tessera.tile.passes.written_arguments import require_writable, written_parameters

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel

CONFIGS_KEPT = 256  # k[groups, lanes] of one kernel with calls that are remembered


def call_on_gpu(kernel: Kernel, config: Config, args: tuple, kwargs: dict[str, Any], bound: Bound,
                work: Specialisation, stream: Any) -> Any:
    """Runs a kernel on the GPU of its arguments; returns what the call returns.

    stream: None is the one on which the arrays' library works.
    """
    arrays, place, function = arrays_of(bound), bound.place, work.function
    written = written_parameters(function)
    require_writable(kernel.__name__, written,
                     ((n, a.writable, a.library) for n, a in arrays.items()))
    target = LaunchTarget(place.device, work.grid, _library(arrays), bool(settings.debug),
                          settings.numerics)
    request = request_for(kernel, work, bound, arrays, target)
    image = image_for(function, request, kernel.images)

    def again(given: dict[str, Any], key: tuple[int, int]) -> Any:
        return kernel.run(config, (), given, target="cpu", key=key)

    if place.staged:
        return _run_staged(image, bound, target, arrays, written, stream, again)
    objects = (*args, *kwargs.values())
    launcher, recipe = _remembered(kernel, config, args, kwargs, bound, function, arrays, image,
                                   target, again)
    at = recipe.current(place.device) if stream is None else stream_pointer(stream)
    return recipe.run(at, _values(launcher.varying, bound, arrays), objects, stream is not None)


def recipe_for(kernel: Kernel, arrays: tuple) -> Recipe:
    """How a kernel is launched on arrays of a GPU that lie where these do. Nothing runs."""
    ready = kernel.launchers[Config()].get(form_of(arrays, {}))
    found = None if ready is None else ready.recipe(*arrays)
    if found is None:
        bound = kernel.bind(arrays, {})
        work, held = kernel.specialised(bound), arrays_of(bound)
        target = LaunchTarget(bound.place.device, work.grid, _library(held), bool(settings.debug),
                              settings.numerics)
        image = image_for(work.function, request_for(kernel, work, bound, held, target),
                          kernel.images)
        _, found = _remembered(kernel, Config(), arrays, {}, bound, work.function, held, image,
                               target, None)
    return found


def _remembered(kernel: Kernel, config: Config, args: tuple, kwargs: dict[str, Any], bound: Bound,
                function: Function, arrays: dict[str, Array], image: Image, target: LaunchTarget,
                again: RunAgain | None) -> tuple[Launcher, Recipe]:
    """The recipe of a call, which calls like it find from here on."""
    written = written_parameters(function)
    names = (*list(kernel.signature.parameters)[:len(args)], *kwargs)
    decides = scalars_in_grid(function, bound) if config.groups is None else frozenset()
    launcher = _launcher(kernel, config, args, kwargs, names, bound, decides)
    recipe = Recipe(image, bound, target, launcher.varying, names, again)
    if written.intersection(arrays):
        recipe.arrays = tuple(n for n in names if n in arrays)
        recipe.spans = tuple(arrays[n].nbytes for n in recipe.arrays)
        recipe.written = tuple(n in written for n in recipe.arrays)
        recipe.reach = max(recipe.spans, default=0) if len(recipe.spans) > 1 else 0
    if kernel.key is None:
        launcher.add(launcher.key(*args, *kwargs.values()), recipe)
    return launcher, recipe


def arrays_of(bound: Bound) -> dict[str, Array]:
    """The tensor arguments as they lie; host arrays too when they will be copied."""
    names = [n for n, t in bound.types.items() if isinstance(t, GlobalTensor)]
    staged = bound.place.staged
    return {n: read_array(bound.given[n], n) if staged else bound.values[n] for n in names}


def request_for(kernel: Kernel, work: Specialisation, bound: Bound, arrays: dict[str, Array],
                target: LaunchTarget) -> CompileRequest:
    """What the compiler may know of these arguments.

    Copies of host arrays, and results, begin where the allocator puts them: at 256 bytes.
    """
    named = {text: size for text, size in bound.texts.items() if not text.lstrip("-").isdigit()}
    divisible, eights = divisible_extents(named)
    aligned = {p.value.name for p in work.function.params if p.role == "output"} | {
        name for name, array in arrays.items()
        if array.device == HOST or array.pointer % ALIGNMENT_BYTES == 0}
    written = written_parameters(work.function)
    given = list(arrays)
    shared = frozenset(given[i] for i in overlap([(a.pointer, a.nbytes) for a in arrays.values()],
                                                 [n in written for n in given]))
    watched, held = frozenset[str](), frozenset[tuple[int, str]]()
    if target.numerics != "off":
        watched, held = kernel.watched_tensors(work.function), kernel.held_lines
    return CompileRequest(work.lanes, work.schedule, target_at(target.index),
                          divisible, frozenset(aligned), shared, target.debug, watched, held,
                          eights=eights)


def _library(arrays: dict[str, Array]) -> str:
    return next((a.library for a in arrays.values() if a.device != HOST), "")


def _values(varying: tuple[str, ...], bound: Bound, arrays: dict[str, Array]) -> list[Any]:
    """What a recipe is run with: pointers, and numbers as the interpreter would hold them."""
    values: list[Any] = []
    for name in varying:
        if name in arrays:
            values.append(arrays[name].pointer)
        else:
            kind = bound.types[name]
            assert isinstance(kind, Scalar)
            number = np.asarray(bound.values[name]).item()
            wide = "64" if kind.dtype.bits == 64 else "32"
            values.append(as_signed(number, "f" if kind.dtype.kind == "float" else f"i{wide}"))
    return values


def _launcher(kernel: Kernel, config: Config, args: tuple, kwargs: dict[str, Any],
              names: tuple[str, ...], bound: Bound, decides: frozenset[str]) -> Launcher:
    """The short way for calls of this form, written at the first one, and anew when the grid turns
    out to depend on more numbers."""
    form = form_of(args, kwargs)
    if len(kernel.launchers) > CONFIGS_KEPT and config not in kernel.launchers:
        for other in [c for c in kernel.launchers if c != Config()]:
            del kernel.launchers[other]
    ready = kernel.launchers.setdefault(config, {})
    if form not in ready or not decides <= ready[form].in_grid:
        count = len(args)

        def first(stream: Any, *objects: Any) -> Any:
            return kernel.run(config, objects[:count],
                              dict(zip(names[count:], objects[count:], strict=True)), stream)

        in_grid = grid_names(kernel.grid) if config.groups is None else frozenset()
        in_grid |= decides | (ready[form].in_grid if form in ready else frozenset())
        ready[form] = Launcher(names, (*args, *kwargs.values()), bound, in_grid, first)
    return ready[form]


def form_of(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The classes of a call's arguments, and the names of those that are named."""
    if not kwargs:
        return tuple(map(type, args))
    return (*map(type, args), *kwargs, *map(type, kwargs.values()))


# --- host arrays ------------------------------------------------------------------------------
def _run_staged(image: Image, bound: Bound, target: LaunchTarget, arrays: dict[str, Array],
                written: frozenset[str], stream: Any, again: RunAgain) -> Any:
    """Host arrays are copied there, the kernel is waited for, and what it wrote is copied back."""
    for name, array in arrays.items():
        if order_of(kind := bound.types[name].numeric, array.shape):  # type: ignore[union-attr]
            raise DTypeError(f"{name} is {kind} on the host, where its codes lie in rows",
                             hint=f"{name}.to('cuda') brings them into their order")
    at = 0 if stream is None else stream_pointer(stream)
    numbers = [n for n, t in bound.types.items() if isinstance(t, Scalar)]
    varying = (*arrays, *numbers)
    recipe = Recipe(image, bound, target, varying, tuple(bound.given), again)
    staged = Staging(list(enumerate(arrays.values())), target.index, at,
                     {i for i, name in enumerate(arrays) if name in written})
    values = _values(varying, bound, arrays)
    for i, pointer in staged.pointers():
        values[i] = pointer
    result = recipe.run(at, values, tuple(bound.given.values()), stream is not None)
    recipe.wait(at)
    staged.copy_back()
    if image.function.result[0] != "tensor":
        return result
    tensors = any(isinstance(v, HostTensor) for v in bound.given.values())
    if isinstance(result, tuple):
        return tuple(one.to_host(tensors) for one in result)
    return result.to_host(tensors)

