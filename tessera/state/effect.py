"""The node that says an effect: `state(%count) verb=append !state`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.op import GraphOp, Sample, sample
from ..graph.trace import apply, current_builder
from ..tensor import Tensor


def _overflow(count: np.ndarray, more: int, capacity: int) -> None:
    if count.size and int(count.max()) + more > capacity:
        raise ArgumentError(
            f"a cache of {capacity} entries holds {int(count.max())}: {more} more do not fit",
            code="E_OVERFLOW", hint="a larger S_max, cache.prune(last=n), or @rolling_window, "
            "which gives up the oldest entries")


def _append_ref(count: np.ndarray, *, verb: str, more: int, capacity: int | None) -> tuple[()]:
    if capacity is not None:
        _overflow(count, more, capacity)
    return ()


def _move_ref(*arrays: np.ndarray, **attrs: Any) -> tuple[()]:
    return ()


def _batch(op_name: str) -> Any:
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        return apply(EFFECTS[op_name], *xs, **attrs), False

    return rule


STATE = GraphOp(
    "state",
    shape=lambda count, **attrs: (),
    ref=_append_ref,
    batch=_batch("state"),
    effects=frozenset({"state"}),
    host="later",
    multi=True,  # no result; a recomputation does not run an op all of whose results it has
    differentiable=False,
    samples=(Sample(sample(((), "index:3")).args, {"verb": "append", "more": 2, "capacity": 8}),),
    doc="a state object changes: entries are appended (raises when they do not fit) or pruned",
)

MOVE = GraphOp(
    "move",
    shape=lambda *xs, **attrs: (),
    ref=_move_ref,
    batch=_batch("move"),
    effects=frozenset({"movement"}),
    multi=True,
    differentiable=False,
    samples=(Sample(sample((2, 3)).args, {"verb": "prefetch", "what": "x", "into": "smem",
                                          "overlap": "compute"}),),
    doc="data is to lie elsewhere: a hint without a result",
)
EFFECTS = {"state": STATE, "move": MOVE}


def changes(verb: str, count: Any, more: int = 0, capacity: int | None = None) -> None:
    """Record a change of a state object. Raises ArgumentError, when it runs, for an overflow of
    `capacity` entries."""
    apply(STATE, F.cast(count, "int64"), verb=verb, more=more, capacity=capacity)


def record_movement(verb: str, what: str, tensors: Any, into: str, overlap: str | None) -> None:
    """Record that tensors are to lie in `into`, in the graph that is traced."""
    if current_builder() is None:
        return
    apply(MOVE, *tensors, verb=verb, what=what, into=into, overlap=overlap)
