"""One `ts.param` at two places of a tree: known in a trace, refused by ts.grad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ArgumentError
from ..tensor import Tensor
from .trace import Tracer


def note_places(tracers: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """What is traced for one param is one parameter, though each place has an input of its own."""
    first: dict[int, Tracer] = {}
    for t, leaf in zip(tracers, leaves, strict=True):
        if leaf.is_param and isinstance(t, Tracer):
            one = first.setdefault(id(leaf), t)
            if one is not t:
                t.builder.same_params[t.value] = one.value


def refuse_second_place(named: Iterable[tuple[str, Tensor]], who: str) -> None:
    """Raises ArgumentError for a param at two places of an argument: each would get the gradient of
    its own use, and the two would drift apart. Two arguments that are given one param stay two.
    named: ("params.head.w", tensor) of what is differentiated"""
    places: dict[Any, str] = {}
    for path, x in named:
        if not x.is_param:
            continue
        one = x.builder.same_params.get(x.value, x.value) if isinstance(x, Tracer) else id(x)
        first = places.setdefault((path.partition(".")[0], one), path)
        if first != path:
            raise ArgumentError(
                f"{who}: {first} and {path} are the same ts.param, and would have two gradients",
                hint=f"tied weights stand in the tree once, as {first}, and are used twice; of two "
                     "that only begin alike one is a copy, ts.param(w)")
