"""Regions around a call: opened when it is traced, checked and written back when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import hooks
from ...errors import ArgumentError, DTypeError, EffectError, PrivilegeError, TraceError
from ...lazy_dataclass import dataclass
from ...tensor import Tensor
from .. import tree
from ..annotate import fit_argument
from ..trace import Tracer, current_builder
from .region_tensor import RegionTensor
from .types import Privilege, RegionType, read


# --- while it is traced -----------------------------------------------------------------------
@dataclass(frozen=True)
class Update:
    """One array that a call writes: leaf number `place` of the argument `name`. `whole`: whether
    every element of it is known then."""

    name: str
    place: int
    whole: bool = False


def open_regions(kinds: dict[str, RegionType], bound: dict[str, Any], sizes: dict, what: str,
                 cast: bool) -> list[tuple[Update, RegionTensor]]:
    """Put a RegionTensor for each array of each region into `bound`.

    Raises ShapeError, DTypeError.
    """
    opened = []
    for name, kind in kinds.items():
        if name not in bound:
            continue
        leaves, treedef = tree.flatten(bound[name])
        made = []
        for i, leaf in enumerate(leaves):
            label = name if leaf is bound[name] else f"{name}.{tree.paths(treedef)[i]}"
            if not isinstance(leaf, Tracer):
                raise DTypeError(f"{what}: region {label} is a {type(leaf).__name__}",
                                 hint="a region is a tensor or a NumPy array, or a list or dict of "
                                      "them")
            if kind.tensor is not None and kind.privilege is read:
                leaf = fit_argument(leaf, kind.tensor, sizes, f"{what}: argument {label}", cast)
            elif kind.tensor is not None:
                kind.tensor.check(leaf, sizes, f"{what}: argument {label}")
            held = RegionTensor(leaf, kind.privilege, label)
            opened.append((Update(name, i), held))
            made.append(held)
        bound[name] = tree.unflatten(treedef, made)
    return opened


def close_regions(opened: Sequence[tuple[Update, RegionTensor]], results: Sequence[Tensor]
                  ) -> tuple[list[Update], list[Tensor]]:
    """What the caller's arrays are to hold, and which they are."""
    ends = [(update, held.close(results)) for update, held in opened]
    changed = [(replace(update, whole=held.covered is True), value)
               for (update, value), (_, held) in zip(ends, opened, strict=True)
               if value is not None]
    return [u for u, _ in changed], [v for _, v in changed]


def check_updates(function: str, updates: Sequence[Update], allowed: frozenset[str] | None) -> None:
    """Raise EffectError when regions are written by a function that promises no such effect."""
    if updates and allowed is not None and "state" not in allowed:
        raise EffectError(f"{function} has the effect state: it writes the region "
                          f"{updates[0].name}", hint="ts.effects(\"state\") allows it")


# --- while it runs ----------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Use:
    """One array argument of a call: `leaf` is the caller's own object. Parameters without a
    Region annotation are read."""

    label: str
    privilege: Privilege
    leaf: Any
    region: bool


class RegionCall:
    """One call of a function with regions: its arguments are checked before it runs, and written
    when it has. Raises PrivilegeError, ArgumentError, TraceError."""

    def __init__(self, function: str, kinds: dict[str, RegionType], bound: dict[str, Any]):
        self.function = function
        self.uses: dict[tuple[str, int], Use] = {}
        for name, value in bound.items():
            kind = kinds.get(name)
            leaves, treedef = tree.flatten(value)
            for i, leaf in enumerate(leaves):
                label = name if leaf is value else f"{name}.{tree.paths(treedef)[i]}"
                if isinstance(leaf, Tensor | np.ndarray):
                    self.uses[name, i] = Use(label, kind.privilege if kind else read, leaf,
                                             kind is not None)
                elif kind is not None and kind.privilege.writes:
                    raise ArgumentError(
                        f"{function}: {label} is {kind}, and a {type(leaf).__name__} cannot be "
                        "updated in place", hint="pass a tensor or a NumPy array")
        for use in self.uses.values():
            if use.privilege.writes:
                _check_writable(function, use)
        _check_apart(function, list(self.uses.values()))

    def lend(self, bound: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the traced function takes them: regions of an enclosing function are
        replaced by what they hold."""
        held = {id(u.leaf): u.leaf.lent(u.privilege, f"{u.label} of {self.function}")
                for u in self.uses.values() if u.region and isinstance(u.leaf, RegionTensor)}
        if not held:
            return bound
        return tree.map_tree(lambda x: held.get(id(x), x), bound)

    def finish(self, updates: Sequence[Update], values: Sequence[Tensor], result: Any) -> Any:
        """Write what the regions hold now into the caller's arrays; the result as it is."""
        for update, value in zip(updates, values, strict=True):
            write_back(self.uses[update.name, update.place].leaf, value, update.whole)
        for observe in hooks.region_calls:
            observe(self.function, list(self.uses.values()), result)
        return result


def write_back(target: Any, value: Tensor, whole: bool) -> None:
    """Give the caller's array, or the traced tensor that stands for it, its new elements."""
    if isinstance(target, RegionTensor):
        target.replace(value, whole)
    elif isinstance(target, Tracer):
        assert isinstance(value, Tracer)
        target.value = value.value
    elif isinstance(target, Tensor):
        target[...] = value
    else:
        target[...] = value.array


def _check_writable(function: str, use: Use) -> None:
    leaf, what = use.leaf, f"{function}: {use.label} is Region[{use.privilege}]"
    builder = current_builder()
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        raise PrivilegeError(f"{what}, and the array is read-only",
                             hint="pass a copy of it, x.copy()")
    if isinstance(leaf, RegionTensor) or (builder is None and not isinstance(leaf, Tracer)):
        return
    around = "" if builder is None else builder.name
    hint = f"declare it a region there, {use.label}: Region[{use.privilege}], or pass a tensor " \
           "that is made there"
    if not isinstance(leaf, Tracer):
        raise TraceError(f"{what}, and the array passed is not an argument of {around}, which is "
                         "being traced: it would be written once, not at each call",
                         hint="make it an argument; " + hint)
    if builder is None or builder is not leaf.builder:
        raise TraceError(f"{what}, and the tensor passed belongs to another trace, that of "
                         f"{leaf.builder.name}", hint="return what is to be stored from there")
    if leaf.scale is not None:
        raise DTypeError(f"{what}, and {leaf.type} is a scaled type: no trace can write into it",
                         hint="pass ts.dequantize(x), and quantize the result")
    if leaf.value in builder.inputs:
        raise PrivilegeError(f"{what}, and {around} may only read the argument that it passes on",
                             hint=hint)


def _check_apart(function: str, uses: list[Use]) -> None:
    """Raise PrivilegeError when two arguments overlap and one of them is written."""
    traced: dict[Any, Use] = {}
    for use in uses:
        if isinstance(use.leaf, Tracer):
            key = id(use.leaf) if isinstance(use.leaf, RegionTensor) else use.leaf.value
            other = traced.setdefault(key, use)
            if other is not use:
                _refuse_alias(function, other, use)
    spans = sorted(((*_bounds(a), a, use) for use in uses for a in memory_of(use.leaf)),
                   key=lambda span: span[:2])
    for i, (_, high, a, use) in enumerate(spans):
        for low, _, b, other in spans[i + 1:]:
            if low >= high:
                break
            if (use.privilege.writes or other.privilege.writes) and np.shares_memory(a, b):
                _refuse_alias(function, use, other)


def _refuse_alias(function: str, a: Use, b: Use) -> None:
    if a.privilege.writes or b.privilege.writes:
        raise PrivilegeError(
            f"{function}: {a.label} ({a.privilege}) and {b.label} ({b.privilege}) are the same "
            "memory, at least in part", code="E_ALIAS",
            hint="pass a copy of one of them, x.copy(); regions may share memory only when all "
                 "of them read")


def memory_of(leaf: Any) -> Iterator[np.ndarray]:
    """The arrays in which an argument lies; none for a traced one."""
    if isinstance(leaf, np.ndarray):
        yield leaf
    elif isinstance(leaf, Tensor) and not isinstance(leaf, Tracer):
        if leaf.layout is not None:  # a distributed tensor: the parts that are here
            yield from (part.buffer for part in leaf.held.values())
            return
        yield leaf.buffer
        if leaf.scale is not None:
            yield leaf.scale.buffer


def _bounds(a: np.ndarray) -> tuple[int, int]:
    """The first address of an array, and the first behind it."""
    start = a.__array_interface__["data"][0]
    if a.size == 0:
        return start, start
    steps = [(n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)]
    return start + sum(s for s in steps if s < 0), \
        start + sum(s for s in steps if s > 0) + a.itemsize
