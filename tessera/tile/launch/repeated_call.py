"""Calls like one before: the recipe is looked up, pointers and numbers packed, the kernel launched.

One Python function is written for each kernel, launch configuration and tuple of the arguments'
classes, since a loop over the arguments costs as much as the rest. For torch tensors x and y and a
number it reads

    def launch(a0, a1, a2, stream=None):
        p0 = a0.data_ptr()
        p1 = a1.data_ptr()
        recipe = find((a0.shape, a0.is_contiguous(), ..., (p0 | p1) & 15 and (p0 & 15, p1 & 15),
                       config.debug, config.determinism, config.device, config.numerics))
        if recipe is None:
            return first(stream, a0, a1, a2)
        at = recipe.current(recipe.device) if stream is None else stream_pointer(stream)
        if recipe.quick and not recipe.words[0]:
            recipe.quick(at, p0, p1, a2)
            ...

What a number may be is checked by the packing; when it does not fit, the long way says why.
"""

from __future__ import annotations

import inspect
import itertools
import struct
from collections.abc import Callable
from typing import Any

from tessera import config
from tessera.numerics import DType
from tessera.runtime.arrays import face_of
from tessera.runtime.buffer import stream_pointer
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.ir.types import GlobalTensor, Scalar
from tessera.tile.launch.recipe import Recipe

KEPT = 4096  # recipes of one function; more are shapes that do not come again
ALIGNMENT_BYTES = 16

SOURCE = """\
def key({arguments}):
{reads}    return ({key},)

def known({arguments}):
{reads}    recipe = find(({key},))
    return recipe.at(({pointers})) if recipe is not None and recipe.reach else recipe

def launch({arguments}stream=None):
{reads}    try:
        recipe = find(({key},))
    except TypeError:  # a constant that cannot be one
        return first(stream, {arguments})
    if recipe is None:
        return first(stream, {arguments})
{apart}    at = recipe.current(recipe.device) if stream is None else stream_pointer(stream)
    try:
        if recipe.quick and not recipe.words[0]:
            recipe.quick(at, {values})
            return recipe.returned(({arguments})) if recipe.returns else None
        return recipe.run(at, ({values}), ({arguments}), stream is not None)
    except MISFIT:
        return first(stream, {arguments})
"""


# Arrays that a kernel writes must lie where the code believes: known for the pointers of the call
# before, surely so at a distance, else looked at closely.
APART = """\
    if recipe.reach and ({pointers}) != recipe.apart:
        if {near}:
            recipe = recipe.at(({pointers}))
            if recipe is None:
                return first(stream, {arguments})
        else:
            recipe.apart = ({pointers})
"""
FEW = 4  # arrays of which all pairs are compared in line


class Launcher:
    """Launches of one kernel with arguments of these classes. recipe(*arguments): that of a call,
    where there was one like it.

    names: of the arguments that are passed, in order.  varying: of those whose values differ from
    call to call with one recipe.  first: the long way, called when there is no recipe.
    """

    def __init__(self, names: tuple[str, ...], arguments: tuple[Any, ...], bound: Bound,
                 in_grid: frozenset[str], first: Callable[..., Any]):
        self.names, self.in_grid = names, in_grid
        self.recipes: dict[tuple, Recipe] = {}
        scope: dict[str, Any] = {
            "find": self.recipes.get, "first": first, "config": config,
            "stream_pointer": stream_pointer, "MISFIT": (struct.error, OverflowError)}
        writer = _Writer(scope)
        for i, (name, value) in enumerate(zip(names, arguments, strict=True)):
            writer.argument(i, name, value, bound, in_grid)
        self.varying = tuple(writer.varying)
        exec(writer.source(len(names)), scope)
        self.key, self.launch, self.recipe = scope["key"], scope["launch"], scope["known"]

    def add(self, key: tuple, recipe: Recipe) -> None:
        if len(self.recipes) >= KEPT:
            self.recipes.clear()
        known = self.recipes.get(key)
        if known is not None and not recipe.shared <= known.shared:
            known.twins[recipe.shared] = recipe  # the same arrays, but where others share memory
        else:
            self.recipes[key] = recipe


class _Writer:
    """Gathers the pieces of the two functions."""

    def __init__(self, scope: dict[str, Any]):
        self.scope = scope
        self.reads: list[str] = []
        self.key: list[str] = []
        self.values: list[str] = []
        self.varying: list[str] = []

    def argument(self, i: int, name: str, value: Any, bound: Bound,
                 in_grid: frozenset[str]) -> None:
        kind = bound.types.get(name)
        if isinstance(kind, GlobalTensor):
            self.varying.append(name)
            self.array(i, name, type(value))
        elif isinstance(kind, Scalar):
            self.varying.append(name)
            self.number(i, kind.dtype)
            if name in in_grid:
                self.key.append(f"a{i}")
        else:  # equal numbers may be other constants: 0.0 and -0.0, (1,) and (1.0,)
            self.key.append(f"repr(a{i})" if isinstance(value, float | tuple) else f"a{i}")

    def array(self, i: int, name: str, cls: type) -> None:
        face = face_of(cls)
        assert face is not None
        self.values.append(f"p{i}")
        pointer, facts, given = face.pointer, face.facts, f"a{i}"
        if not pointer:
            given, self.scope[f"read{i}"] = f"r{i}", face.read
            self.reads.append(f"r{i} = read{i}(a{i}, {name!r})")
            pointer = "{}.pointer"
            facts = ("{}.shape", "{}.strides", "{}.dtype", "{}.device", "{}.writable")
        self.reads.append(f"p{i} = {pointer.format(given)}")
        self.key += [fact.format(given) for fact in facts]

    def number(self, i: int, dtype: DType) -> None:
        if dtype.kind == "float" or dtype.name in ("int32", "int64"):
            self.values.append(f"a{i}")  # the packing converts and checks it
            return
        self.scope[f"to{i}"] = as_parameter(dtype)
        self.values.append(f"to{i}(a{i})")

    def source(self, count: int) -> str:
        values = "".join(f"{v}, " for v in self.values)
        arguments = "".join(f"a{i}, " for i in range(count))
        pointers, apart = [v for v in self.values if v.startswith("p")], ""
        if pointers:  # most begin at whole accesses
            low = ALIGNMENT_BYTES - 1
            each = "".join(f"{p} & {low}, " for p in pointers)
            self.key.append(f"({' | '.join(pointers)}) & {low} and ({each})")
        if len(pointers) > 1:
            pairs = list(itertools.combinations(pointers, 2)) if len(pointers) <= FEW else []
            self.key.append(" or ".join(f"{p} == {q}" for p, q in pairs)  # given twice
                            or f"len({{{', '.join(pointers)}}}) < {len(pointers)}")
            near = " or ".join(f"-recipe.reach < {p} - {q} < recipe.reach"
                               for p, q in pairs) or "True"
            apart = APART.format(near=near, pointers=", ".join(pointers), arguments=arguments)
        return SOURCE.format(
            arguments=arguments, values=values, apart=apart, pointers=", ".join(pointers),
            reads="".join(f"    {line}\n" for line in self.reads),
            key=", ".join([*self.key, "config.debug", "config.determinism", "config.device",
                           "config.numerics"]))


def as_parameter(dtype: DType) -> Callable[[Any], int]:
    """Number -> the int of its parameter. Raises OverflowError for one that does not fit."""
    if dtype.kind == "bool":
        return lambda x: 1 if x else 0
    low, high = int(dtype.min), int(dtype.max)
    wrap = 1 << (64 if dtype.bits == 64 else 32)

    def convert(x: Any) -> int:
        if not low <= x <= high or x != int(x):
            raise OverflowError
        return int(x) - wrap if x >= wrap // 2 else int(x)

    return convert


def grid_names(grid: Any) -> frozenset[str]:
    """The parameters of a grid that is a function."""
    return frozenset(inspect.signature(grid).parameters) if callable(grid) else frozenset()
