"""The record of a collective, and how one is run.

A collective is one Collective record: what it means on the arrays of all ranks, how one rank does
it, which extents may differ between ranks, what it sends, and samples. Tests iterate over
`COLLECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.dims import show_shape
from tessera.errors import ArgumentError, AxisError, DTypeError, TraceError
from tessera.graph.trace import Tracer
from tessera.numerics import NumericType, as_type
from tessera.tensor import Tensor, as_tensor

from .device_mesh import Mesh
from .group import Group, Shape, find_group
from .ledger import agree, call

COLLECTIVES: dict[str, Collective] = {}


@dataclass(frozen=True, eq=False)
class Operand:
    """What one rank brings to a collective, and what it is to get."""

    group: Group
    array: np.ndarray  # elements of `type`
    type: NumericType
    shapes: list[Shape]  # of every member's array
    out: NumericType
    key: Any = None
    index: np.ndarray | None = None
    what: str = ""

    def swap(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape],
             numeric: NumericType | None = None) -> list[np.ndarray]:
        dtype = (numeric or self.type).dtype
        return self.group.swap(arrays, shapes, dtype, self.what)


@dataclass(frozen=True)
class Sample:
    """Attributes, and the shape of each rank's array: a function of (rank, ranks)."""

    shape: Callable[[int, int], Shape]
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective operation.

    meaning(arrays, **attrs) -> arrays: every rank's result from every rank's numbers, in NumPy
    run(operand, **attrs) -> array: this rank's result, by exchanging with the group
    varies(ndim, **attrs) -> the dimensions whose extents may differ between ranks
    check(shape, members, **attrs) -> attrs, normalised; raises for what cannot be
    sends(elements, members) -> elements that the busiest rank sends, of `elements` it holds
    reduces: whether values are combined, so that the result is rounded
    """

    name: str
    meaning: Callable[..., list[np.ndarray]]
    run: Callable[..., np.ndarray]
    sends: Callable[[int, int], float]
    varies: Callable[..., Sequence[int]] = lambda ndim, **attrs: ()
    check: Callable[..., dict[str, Any]] = lambda shape, members, **attrs: attrs
    reduces: bool = False
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if self.name in COLLECTIVES:
            raise ArgumentError(f"a collective named {self.name!r} is registered already")
        COLLECTIVES[self.name] = self

    def __repr__(self) -> str:
        return f"Collective({self.name})"


def collect(which: Collective, x: Any, axis: Any, mesh: Mesh | None, *, dtype: Any = None,
            key: Any = None, index: Any = None, **attrs: Any) -> Tensor:
    """Run a collective on this rank's tensor: check, agree with the group, exchange."""
    x = as_tensor(x)
    if isinstance(x, Tracer):
        raise TraceError(f"{which.name} of a traced value ({x.type}{show_shape(x.shape)}): "
                         "collectives run on values",
                         hint="call it on what the function of ts.jit or ts.grad returns")
    if x.scale is not None:
        raise DTypeError(f"{which.name} of a scaled tensor ({x.type}): every rank has a scale of "
                         "its own", hint="ts.dequantize it first, and quantize the result")
    group = find_group(axis, mesh)
    array = x.array
    out = x.type if dtype is None else as_type(dtype)
    attrs = which.check(array.shape, group.size, **attrs)
    named = attrs | ({"dtype": str(out)} if out != x.type else {})
    mine = call(group, which.name, array.shape, x.type, named)
    shapes = agree(group, mine, which.varies(array.ndim, **attrs))
    operand = Operand(group, array, x.type, shapes, out, key, _index(index, array), str(mine))
    return Tensor(which.run(operand, **attrs), out)


def _index(index: Any, array: np.ndarray) -> np.ndarray | None:
    if index is None:
        return None
    index = np.asarray(index)
    if index.shape != array.shape or index.dtype.kind not in "iu":
        raise ArgumentError(f"index has {index.dtype}{show_shape(index.shape)}, the operand is "
                            f"{show_shape(array.shape)}",
                            hint="the index in the whole tensor of each element, as integers")
    return index


def axis_of(dim: int, ndim: int, what: str) -> int:
    """`dim` from 0; AxisError when there is no such dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise AxisError(f"{what}: dim={dim!r} of a tensor with {ndim} dimensions",
                        hint=f"dim from {-ndim} to {ndim - 1}" if ndim else
                        "a scalar has none: reshape it to (1,)")
    return dim % ndim
