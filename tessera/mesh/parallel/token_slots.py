"""Rows to numbered slots and back: how tokens come to the buffers of experts.

    fill_slots: y[..., n, :] = sum of the rows v[..., s, k, :] with slots[..., s, k] = n
    read_slots: v[..., s, k, :] = y[..., slots[..., s, k], :], 0 where there is no such slot

Each is the other's adjoint. A slot that does not exist (n >= the extent) takes and gives nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.dims import show_shape, size_of
from tessera.errors import ShapeError
from tessera.graph import functions as F
from tessera.graph.element import Element, index_names
from tessera.graph.op import Aval, GraphOp, sample
from tessera.graph.ops.gather import SEGMENT_SUM, add_rows, stretch
from tessera.graph.trace import apply
from tessera.tensor import Tensor


def _fill_shape(v: Aval, slots: Aval, extent: Any) -> Aval:
    if v.shape[:-1] != slots.shape:
        raise ShapeError(f"rows {show_shape(v.shape)} and slots {show_shape(slots.shape)} differ")
    return Aval((*v.shape[:-3], extent, v.shape[-1]), v.type)


def _fill_ref(v: np.ndarray, slots: np.ndarray, extent: int) -> np.ndarray:
    lead, width = v.shape[:-3], v.shape[-1]
    groups, each = int(np.prod(lead, dtype=np.int64)), slots.shape[-2] * slots.shape[-1]
    place = np.minimum(slots.reshape(groups, each), extent)  # the last row is thrown away
    place = place + np.arange(groups)[:, None] * (extent + 1)
    wide = v.dtype if v.dtype.kind == "f" and v.dtype.itemsize >= 4 else np.dtype(np.float32)
    out = np.zeros((groups * (extent + 1), width), wide)
    add_rows(out, place.reshape(-1), v.reshape(groups * each, width).astype(wide, copy=False))
    kept = out.reshape(groups, extent + 1, width)[:, :extent]
    return np.ascontiguousarray(kept.reshape(*lead, extent, width)).astype(v.dtype, copy=False)


def _read_shape(y: Aval, slots: Aval) -> Aval:
    if y.shape[:-2] != slots.shape[:-2]:
        raise ShapeError(f"buffers {show_shape(y.shape)} and slots {show_shape(slots.shape)} "
                         "differ in their leading extents")
    return Aval((*slots.shape, y.shape[-1]), y.type)


def _read_ref(y: np.ndarray, slots: np.ndarray) -> np.ndarray:
    extent, width = y.shape[-2:]
    lead, shape = y.shape[:-2], (*slots.shape, width)
    if extent == 0:
        return np.zeros(shape, y.dtype)
    groups = int(np.prod(lead, dtype=np.int64))
    place = slots.reshape(groups, slots.shape[-2] * slots.shape[-1])
    rows = np.minimum(place, extent - 1) + np.arange(groups)[:, None] * extent
    found = y.reshape(groups * extent, width)[rows]
    found[place >= extent] = 0
    return found.reshape(shape)


def _fill_segments(v: Tensor, slots: Tensor, extent: Any) -> Tensor:
    """A segment for each slot of each group, and one for the rows that are left out."""
    lead, width = v.shape[:-3], v.shape[-1]
    groups, each = size_of(lead), slots.shape[-2] * slots.shape[-1]
    wide = v if v.dtype.kind != "float" or v.dtype.bits >= 32 else F.cast(v, "f32")
    places = F.reshape(F.minimum(slots, extent), (groups, each))
    first = F.reshape(F.arange(groups) * (extent + 1), (groups, 1))
    rows, ids = F.reshape(wide, (groups * each, width)), F.reshape(places + first, (groups * each,))
    total = apply(SEGMENT_SUM, rows, ids, axis=0, extent=groups * (extent + 1))
    made = F.reshape(total, (groups, extent + 1, width))[:, :extent]
    return F.cast(F.reshape(made, (*lead, extent, width)), v.type)


def _read_element(y: Aval, slots: Aval) -> Element:
    at = f"x1[{index_names(range(slots.ndim))}]"
    return Element(f"x0[{index_names([*range(y.ndim - 2), at, slots.ndim])}]")


FILL = GraphOp(
    "fill_slots",
    shape=_fill_shape,
    ref=_fill_ref,
    vjp=lambda g, y, v, slots, extent: (apply(READ, g, slots), None),
    jvp=lambda ts, y, v, slots, extent: apply(FILL, ts[0], slots, extent=extent),
    batch=lambda size, batched, v, slots, extent: (
        apply(FILL, stretch(v, size, batched[0]), stretch(slots, size, batched[1]),
              extent=extent), True),
    axes="...skd,...sk->..._d",
    reduces="sum",
    drops=(0,),
    samples=(sample((4, 2, 3), ((4, 2), "index:9"), extent=8),
             sample((2, 5, 1, 3), ((2, 5, 1), "index:7"), extent=6)),
    expand_gpu=_fill_segments,
    doc="rows added up into numbered slots; rows of slots that do not exist are left out",
)
READ = GraphOp(
    "read_slots",
    shape=_read_shape,
    ref=_read_ref,
    vjp=lambda g, v, y, slots: (apply(FILL, g, slots, extent=y.shape[-2]), None),
    jvp=lambda ts, v, y, slots: apply(READ, ts[0], slots),
    batch=lambda size, batched, y, slots: (
        apply(READ, stretch(y, size, batched[0]), stretch(slots, size, batched[1])), True),
    axes="..._d,...sk->...skd",
    drops=(0,),
    samples=(sample((8, 3), ((4, 2), "index:9")), sample((2, 6, 3), ((2, 5, 1), "index:7"))),
    element=_read_element,
    doc="the rows of numbered slots; 0 for slots that do not exist",
)


def fill_slots(v: Tensor, slots: Tensor, extent: int) -> Tensor:
    """v: [..., S, K, D]   slots: [..., S, K] integers   y: [..., extent, D] of v's type"""
    return apply(FILL, v, slots, extent=extent)


def read_slots(y: Tensor, slots: Tensor) -> Tensor:
    """y: [..., N, D]   slots: [..., S, K] integers   v: [..., S, K, D] of y's type"""
    return apply(READ, y, slots)


__all__ = ["fill_slots", "read_slots"]
