"""What a call of a compiled function looks like: its leaves, which of them are data, their key."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import hooks, wide_arrays
from ..errors import ArgumentError
from ..numerics import as_type
from ..tensor import Tensor, TensorType, as_tensor
from . import tree
from .escapes import refuse_hidden
from .op import Aval
from .param_places import note_places
from .trace import Tracer
from .value_type import ValueType
from .weak_numbers import leaf_of

F32 = as_type("f32")


def keeps_form(fn: Any) -> bool:
    """Whether a function does another thing with arguments that are named: ts.vmap passes these
    whole, and leaves defaults to what it maps."""
    while fn is not None:
        if getattr(fn, "keeps_form", False) is True:
            return True
        fn = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
    return False


def callable_name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


class Static:
    """A leaf that is a constant of the trace: compared by value, 0.0 apart from -0.0 and each NaN
    equal to itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and (repr(self.value) == repr(other.value) if isinstance(self.value, float)
                 else bool(self.value == other.value))
        )

    def __hash__(self) -> int:
        held = repr(self.value) if isinstance(self.value, float) else self.value
        return hash((type(self.value), held))


def type_of(leaf: Any) -> Any:
    return TensorType(tuple(leaf.shape), leaf.type) if isinstance(leaf, Tensor) else leaf


def find_signature(fn: Callable) -> inspect.Signature | None:
    if isinstance(fn, np.ufunc):  # it refuses the defaults of its signature
        return None
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def is_data(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | int | float | np.generic) or hasattr(
        value, "__dlpack__") or hasattr(type(value), "__cuda_array_interface__")


def hashable(static: Static, fn: str, name: str) -> Static:
    try:
        hash(static)
    except TypeError:
        raise ArgumentError(
            f"{fn}: argument {name} is a {type(static.value).__name__}, neither data nor hashable",
            hint="pass tensors, numbers, strings, or tuples, lists and dicts of them; "
            "ts.register_tree lets a class of yours through",
        ) from None
    return static


def leaf_tensors(leaf: Any) -> list[Tensor]:
    """A data leaf as tensors: itself, and its scale when it has one; numbers are weak."""
    t = leaf_of(leaf)
    return [t] if t.scale is None else [t, t.scale]


def leaf_names(treedef: tree.TreeDef) -> list[str]:
    """The parameter to which each leaf of the bound-arguments dict belongs."""
    out = []
    for name, child in zip(treedef.data, treedef.children, strict=True):
        out.extend([name] * count_leaves(child))
    return out


def count_leaves(treedef: tree.TreeDef) -> int:
    return 1 if treedef.kind is None else sum(map(count_leaves, treedef.children))


def mark_tracers(tracers: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """What stands for arguments in a trace has their marks, and is shown beside them."""
    note_places(tracers, leaves)
    for t, leaf in zip(tracers, leaves, strict=True):
        t.is_param, t.layout = leaf.is_param, leaf.layout
        wide_arrays.inherit(t, (leaf,))
        for show in hooks.traced_arguments:
            show(leaf, t)


def leaf_slots(treedef: tree.TreeDef, statics: dict, leaves: list[Tensor]) -> list[Any]:
    """Per leaf of the arguments: its scale's tensor when it is a scaled tensor, else None."""
    out: list[Any] = []
    it = iter(leaves)
    for i in range(count_leaves(treedef)):
        if i in statics:
            out.append(None)
            continue
        t = next(it)
        out.append(t.scale)
        if t.scale is not None:
            next(it)
    return out


def split_result(flat: list[Any]) -> tuple[list[Tensor], list[Any]]:
    tensors: list[Tensor] = []
    rebuild: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, Tensor) and leaf.scale is not None:
            tensors += [leaf, leaf.scale]
            rebuild.append("scaled")
        elif is_data(leaf):
            tensors.append(as_tensor(leaf))
            rebuild.append("param" if tensors[-1].is_param else "tensor")
        else:
            refuse_hidden(leaf)
            rebuild.append(Static(leaf))
    return tensors, rebuild


class StandIn(Tracer):
    """An argument known by type only, for tracing without data."""

    __slots__ = ()

    def __init__(self, aval: Aval):
        self._shape, self.type, self.layout = aval.shape, aval.type, None
        self.scale, self.is_param, self.name = None, False, None

    def copy(self) -> StandIn:
        return copy.copy(self)


def stand_in(value: Any) -> Any:
    if isinstance(value, TensorType):
        return StandIn(Aval(value.shape, value.type or F32))
    if isinstance(value, ValueType):
        return value.example(stand_in)
    return tree.map_tree(stand_in, value) if isinstance(value, tuple | list | dict) else value


def join_scales(flat: Sequence[Tensor], rebuild: Sequence[Any]) -> list[Any]:
    """Leaves of the result: static values as they were, tensors, and tensors with their scale."""
    it, out = iter(flat), []
    for how in rebuild:
        if how in ("tensor", "param"):
            out.append(next(it))
            if how == "param":
                out[-1].is_param = True
        elif how == "scaled":
            codes = next(it)
            codes.scale = next(it)
            out.append(codes)
        else:
            out.append(how.value)
    return out
