"""Who am I: numbers of groups, tiles and lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.numerics import i32
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import Scalar

WARP = 32


def _lane(types: Any, attrs: Any) -> Scalar:
    return Scalar(i32, uniform=False)


def _uniform(types: Any, attrs: Any) -> Scalar:
    return Scalar(i32, uniform=True)


def _numbered(name: str) -> Callable[..., Any]:
    """The call in a kernel of an op that tells groups apart."""
    def lower(t: OpTracer, axis: Any = None) -> Any:
        axis = None if axis is None else t.ir.constant_int(axis, "axis")
        if axis is not None and axis < 0:
            t.fail(f"{name}({axis}): axes of a grid count from 0")
        t.grid.number_groups()
        return t.ir.emit(name, [], axis=axis)

    return lower


def _numbered_lanes(t: OpTracer) -> Any:
    t.grid.number_groups()
    return t.ir.emit("linear_id", [])


def _not_negative(least: Any) -> int:
    return 0


@declare(rule=_lane, run=True, total=True, least=_not_negative, by_thread=True,
         lower=_numbered_lanes)
def linear_id(m: Any, op: Any) -> Any:
    """group_id() * group_size() + local_id(): the number of this tile in the launch."""
    return (m.groups * m.lanes + m.lane_ids()).astype(np.int32)


@declare(rule=_lane, run=True, total=True, least=_not_negative, by_thread=True)
def local_id(m: Any, op: Any) -> Any:
    """The number of this tile in its group, 0 .. group_size() - 1."""
    return m.lane_ids()


@declare(rule=_lane, run=True, total=True, least=_not_negative, by_thread=True)
def lane_id(m: Any, op: Any) -> Any:
    """The number of this lane in its warp, 0 .. 31."""
    return m.lane_ids() % np.int32(WARP)


@declare(rule=_lane, run=True, total=True, least=_not_negative, by_thread=True)
def warp_id(m: Any, op: Any) -> Any:
    """The number of this lane's warp in the group."""
    return m.lane_ids() // np.int32(WARP)


@declare(rule=_uniform, run=True, total=True, least=_not_negative, by_thread=True)
def group_size(m: Any, op: Any) -> Any:
    """The number of tiles (lanes) in a group."""
    return np.array([[m.lanes]], np.int32)


@declare(rule=_uniform, attrs=("axis",), run=True, total=True, least=_not_negative,
         lower=_numbered("group_id"))
def group_id(m: Any, op: Any, axis: Any = None) -> Any:
    """The linear number of the group in the launch, or its coordinate along a grid axis."""
    axis = op.attr["axis"]
    return m.groups.astype(np.int32) if axis is None else _coordinate(m, axis)


@declare(rule=_uniform, attrs=("axis",), run=True, total=True, least=_not_negative,
         lower=_numbered("num_groups"))
def num_groups(m: Any, op: Any, axis: Any = None) -> Any:
    """The number of groups in the launch, or along a grid axis."""
    axis = op.attr["axis"]
    total = np.prod(m.axes, dtype=np.int64) if axis is None else m.axes[axis]
    return np.array([[total]], np.int32)


def _coordinate(m: Any, axis: int) -> np.ndarray:
    """Row-major: the last axis varies fastest."""
    below = int(np.prod(m.axes[axis + 1:], dtype=np.int64))
    return (m.groups // below % m.axes[axis]).astype(np.int32)
