"""Values against the tensor types of a function's annotations: never silently another type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..dims import Dim, bind_shape
from ..errors import DTypeError, PolicyError
from ..numerics import NumericType, Policy
from ..numerics.policy import without_host
from ..tensor import Tensor, TensorType, need_device
from . import functions as F
from .ops.convert import RETYPE
from .trace import Tracer, apply
from .value_type import ValueType

STORED = ("scaled", "per_channel", "custom")  # fields of a policy that say what the codes mean
FREE = ("accum", "rounding", "saturate", "loss_scale", "device", "packed_for")


def fit_arguments(bound: dict[str, Any], annotations: dict[str, TensorType | ValueType],
                  function: str, cast: bool) -> dict[str, int | Dim]:
    """Arguments by name, in place, as their annotations say, and the extents that these name."""
    sizes: dict[str, int | Dim] = {}
    for name, kind in annotations.items():
        if name == "return" or name not in bound:
            continue
        value, what = bound[name], f"{function}: argument {name}"
        if isinstance(kind, ValueType):
            kind.check(value, sizes, what)
            continue
        if value is None and kind.optional:
            continue
        if not isinstance(value, Tensor):
            raise DTypeError(f"{what} is {type(value).__name__}, its annotation says {kind}")
        bound[name] = fit_argument(value, kind, sizes, what, cast)
    return sizes


def fit_returned(out: Any, kind: TensorType | ValueType | None, sizes: dict[str, int | Dim],
                 function: str) -> Any:
    """What a function returns as its annotation says; None: it has none."""
    if kind is None or not isinstance(kind, ValueType) and out is None and kind.optional:
        return out
    if isinstance(kind, ValueType):
        kind.check(out, sizes, f"{function}: the result")
        return out
    if not isinstance(out, Tensor):
        raise DTypeError(f"{function} returns {type(out).__name__}, its annotation says {kind}")
    return fit_result(out, kind, sizes, f"{function}: the result")


def fit_argument(value: Tensor, kind: TensorType, sizes: dict[str, int | Dim], what: str,
                 cast: bool) -> Tensor:
    """`value` as its annotation says.

    Another storage is an error, or with `cast` an explicit cast. A policy that the value leaves
    open is filled in by the annotation, and the other way round; where the two contradict each
    other it is an error, or with `cast` the annotation's. Raises ShapeError, DTypeError.
    """
    kind = _bare(kind)
    bind_shape(kind.shape, value.shape, sizes, what)
    if kind.type is None or value.type == kind.type:
        return value
    need_device(kind.type, what)
    if not same_storage(value.type, kind.type):
        if not cast:
            kind.check(value, sizes, what)
        out = F.cast(value, kind.type)
    else:
        out = under_policy(value, merged_policy(value.type, kind.type, what, cast))
    out.is_param = value.is_param
    return out


def _bare(kind: TensorType) -> TensorType:
    """The type of a value that the annotation places on the host."""
    if kind.type is None or kind.type.policy.device != "host":
        return kind
    return TensorType(kind.shape, without_host(kind.type))


def same_storage(a: NumericType, b: NumericType) -> bool:
    """Whether the same codes mean the same values in both types."""
    return a.dtype is b.dtype and all(
        getattr(a.policy, f) == getattr(b.policy, f) for f in STORED
    )


def merged_policy(given: NumericType, wanted: NumericType, what: str, cast: bool) -> NumericType:
    """The annotation's policy, its gaps filled by the value's. Raises PolicyError when they
    contradict each other, unless `cast`."""
    default, fields = Policy(), {}
    for name in FREE:
        mine, theirs = getattr(given.policy, name), getattr(wanted.policy, name)
        gap = getattr(default, name)
        if mine != gap and theirs != gap and mine != theirs and not cast:
            raise PolicyError(
                f"{what} is {given}, its annotation says {wanted}: they differ in {name}",
                hint=f"convert it: ts.cast({what.split()[-1]}, {str(wanted)!r}), or jit(cast=True)",
            )
        fields[name] = theirs if theirs != gap else mine
    return NumericType(given.dtype, replace(given.policy, **fields))


def under_policy(x: Tensor, numeric: NumericType) -> Tensor:
    """The same elements under another policy: a node of the graph, no rounding."""
    if x.type == numeric:
        return x

    out = apply(RETYPE, x, to=numeric)
    out.scale = x.scale
    return out


def fit_result(out: Tensor, kind: TensorType, sizes: dict[str, int | Dim], what: str) -> Tensor:
    """`out` as its annotation says. When the last op has just rounded it to another type, that
    rounding is taken back: a result is rounded once, to what the annotation says. A `ts.cast` of
    the user's stands."""
    placed, kind = kind, _bare(kind)
    if kind.type is not None and out.type != kind.type:
        need_device(kind.type, what)
        out = F.cast(_before_rounding(out), kind.type)
    if placed is not kind and placed.type is not None:
        out = F.cast(out, placed.type)
    kind.check(out, sizes, what)
    return out


def _before_rounding(out: Tensor) -> Tensor:
    if not isinstance(out, Tracer) or out.value not in out.builder.unrounded:
        return out
    if out.builder.nodes[-1].outputs == (out.value,):
        out.builder.nodes.pop()
    return out.builder.unrounded[out.value]


def tensor_annotations(fn: Callable) -> dict[str, TensorType | ValueType]:
    """The annotations that say what a value is."""
    return {n: kind for n, kind in annotations_of(fn).items()
            if isinstance(kind, TensorType | ValueType)}


def placements(annotations: dict[str, Any]) -> dict[str, str]:
    """The devices that annotations name, `Tensor["N", f32 @device(gpu)]`, by parameter."""
    found = {}
    for name, kind in annotations.items():
        numeric = kind.type if isinstance(kind, TensorType) else getattr(kind, "numeric", None)
        if name != "return" and numeric is not None and numeric.policy.device not in (None, "host"):
            found[name] = numeric.policy.device
    return found


def annotations_of(fn: Callable) -> dict[str, Any]:
    """The annotations of fn, postponed ones evaluated; None for those that cannot be."""
    return {name: _evaluate_annotation(kind, fn) if isinstance(kind, str) else kind
            for name, kind in getattr(fn, "__annotations__", {}).items()}


def _evaluate_annotation(text: str, fn: Callable) -> Any:
    """A postponed annotation (`from __future__ import annotations`) in the function's globals."""
    try:
        return eval(text, getattr(inspect.unwrap(fn), "__globals__", {}))  # noqa: S307  as typing.get_type_hints
    except (NameError, SyntaxError, TypeError):
        return None
