"""Where the results of a program lie: on the device, or on the host beside it."""

from __future__ import annotations

from ..op import FLAT_VIEW, GraphOp, sample
from ..trace import apply

PLACE = GraphOp(
    "place",
    shape=lambda x, to: x,
    ref=lambda x, to: x,
    vjp=lambda g, y, x, to: (g,),
    jvp=lambda ts, y, x, to: ts[0],
    batch=lambda size, batched, x, to: (apply(PLACE, x, to=to), True),
    axes="...->...",
    linear="joint",
    memory=FLAT_VIEW,
    samples=(sample((2, 3), to="host"), sample((2, 3), to="device")),
    doc="x; where it is a result of a program on a GPU, it lies on the host or on the device",
)

__all__ = ["PLACE"]
