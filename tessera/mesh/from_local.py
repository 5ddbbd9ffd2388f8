"""Distributed tensors of what each rank has by itself: its part of a batch that it has read.

    x = ts.dist.from_local(batch, ts.ShardSpec(("row",), ("dp",)), mesh)      on every rank

`ts.dist.distribute` takes the whole, which every rank has; `ts.dist.tensor` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tessera.dims import show_shape
from tessera.errors import ArgumentError, DTypeError, ShapeError, TraceError
from tessera.graph import functions as F
from tessera.graph.op import Aval
from tessera.graph.trace import Tracer
from tessera.numerics import NumericType, as_type
from tessera.tensor import Tensor, as_tensor
from tessera.tile.launch.resident import on_gpu, on_host

from .device_mesh import Mesh
from .layout import Layout
from .partition import local_shape
from .placement import gpu_of, join
from .ranks.transport import Transport
from .sharding.plain_operands import leave_values
from .tensor import DistTensor, agree_on, held_ranks, need_mesh, need_plain, numbers, resolve
from .world import transport

Signature = tuple[str, tuple[int, ...], Layout]
_agreed: WeakKeyDictionary[Transport, set[Signature]] = WeakKeyDictionary()
OUTSIDE = -1  # in the place of a rank: where the mesh does not have this one
BY_RANK = ("ts.dist.from_local(lambda rank: batch_of(rank), ...) calls it for each rank that is "
           "here: for all in a program that runs alone, for its own under mpirun")
TOGETHER = ("parts change their shape on all ranks at the same call, since ranks compare new ones "
            "alone; shape= is that of the whole, where the ranks have more and less of it")


def from_local(part: Any, layout: Any = None, mesh: Mesh | None = None, *, shape: Any = None,
               dtype: Any = None, dims: Sequence[str] | None = None) -> DistTensor:
    """A distributed tensor of the part that each rank has; nothing of it is sent.

    part: array or tensor, this rank's; or a function of the rank in the mesh, called for those
    that this process holds: all of them, in a program that runs alone; or a dict by such ranks
    layout, mesh, dims: as `ts.dist.tensor`. Of a pending sum a part is the rank's term
    shape: of the whole; None where each rank has as much as the others of every dimension that is
    split: then it follows   dtype: what parts of other types are converted to
    Arrays are copied; a tensor that lies where the mesh computes is the part itself.
    Ranks compare type, shape and layout when these are new, and send nothing for others like them.
    What several hold alike is compared by the first function that reads it and exchanges something.
    Raises ShapeError that names the rank for a part that does not fit, PolicyMismatch on all ranks
    when they make different tensors, DTypeError for a scaled type, ArgumentError, AxisError.
    """
    if isinstance(part, DistTensor):
        raise ArgumentError("from_local: the part is a distributed tensor itself",
                            hint="x.local is this rank's part of x; ts.shard(x, layout) moves x")
    if isinstance(layout, Mesh):
        raise ArgumentError("from_local(part, layout, mesh): its second argument is a layout",
                            hint="ts.dist.from_local(part, ts.ShardSpec(...), mesh)")
    mesh = layout.mesh if isinstance(layout, Layout) else need_mesh(mesh)
    parts = _parts_here(part, mesh)
    if not parts and (shape is None or dtype is None):
        raise ArgumentError(f"this rank holds no part of a tensor on {mesh}: its shape and type do "
                            "not follow", hint="shape=(64, 128), dtype=ts.f32")
    numeric = need_plain(_type_of(parts) if dtype is None else as_type(dtype))
    given = None if shape is None else numbers(shape)
    like = given if given is not None else next(iter(parts.values())).shape
    resolved = resolve(layout, mesh, like, numeric, dims)
    whole = given if given is not None else _whole_shape(like, resolved)
    _need_fit(parts, whole, resolved, numeric, given is not None)
    _agree_once(whole, numeric, resolved)
    join(mesh)
    here = {r: x for r, x in parts.items() if r != OUTSIDE}
    leave_values("ts.dist.from_local", resolved, here, Aval(whole, numeric))
    held = {r: _local_part(x, numeric, mesh) for r, x in here.items()}
    made = DistTensor(held, whole, numeric, resolved)
    for x in parts.values():
        made.is_param, made.name = x.is_param, x.name
    return made


def _parts_here(part: Any, mesh: Mesh) -> dict[int, Tensor]:
    """The parts of the ranks that this process holds, as they are given."""
    here = held_ranks(mesh)
    if isinstance(part, Mapping):
        missing = [r for r in here if r not in part]
        if missing:
            raise ArgumentError(f"from_local: no part is given for rank {missing[0]} of {mesh}; "
                                f"there are some for {sorted(part)}", hint=BY_RANK)
        found = {r: part[r] for r in here}
    elif callable(part) and not isinstance(part, Tensor | type):
        found = {r: part(r) for r in here}
    elif len(here) > 1:
        raise ArgumentError(f"from_local: this process plays the {len(here)} ranks of {mesh}, and "
                            "is given one part", hint=BY_RANK)
    else:
        found = {here[0] if here else OUTSIDE: part}
    return {r: _tensor(x, r) for r, x in found.items()}


def _tensor(x: Any, rank: int) -> Tensor:
    found = as_tensor(x)
    if isinstance(found, Tracer):
        raise TraceError("from_local: the part is a value of a function that is being traced",
                         hint="make distributed tensors before, and give them to the function")
    if isinstance(found, DistTensor):
        raise ArgumentError(f"from_local: the part of rank {rank} is a distributed tensor itself",
                            hint="x.local is this rank's part of x; ts.shard(x, layout) moves x")
    # Who reads batches into one array writes into it again while the last one is still in use.
    return found if found is x else found.copy()


def _type_of(parts: Mapping[int, Tensor]) -> NumericType:
    first, *others = parts
    for r in others:
        if parts[r].type != parts[first].type:
            raise DTypeError(f"from_local: rank {r} has a part of {parts[r].type}, rank {first} of "
                             f"{parts[first].type}", hint="dtype= converts all of them")
    return parts[first].type


def _whole_shape(part: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Of a tensor of which every rank has a part of this shape."""
    return tuple(n * layout.parts(d) for d, n in enumerate(part))


def _need_fit(parts: Mapping[int, Tensor], whole: Sequence[int], layout: Layout,
              numeric: NumericType, given: bool) -> None:
    """Raise ShapeError for a part of another shape than the layout gives its rank."""
    for rank, part in parts.items():
        if rank == OUTSIDE:
            continue
        expected = local_shape(layout, whole, rank, numeric.dtype)
        if tuple(part.shape) == expected:
            continue
        world = layout.mesh.world_ranks[rank]
        raise ShapeError(
            f"rank {world} gives a part {show_shape(part.shape)}; its part of {show_shape(whole)} "
            f"in {layout} is {show_shape(expected)}",
            hint="ts.dist.local_shape(layout, shape, rank) tells what a rank has" if given else
            "without shape= all ranks have equally much of what is split: shape= is that of the "
            "whole, of which the first ranks have one element more where it does not divide")


def _agree_once(whole: tuple[int, ...], numeric: NumericType, layout: Layout) -> None:
    """The ranks of the mesh are about to make the same tensor: compared where it is a new one."""
    known = _agreed.setdefault(transport(), set())
    signature = (str(numeric), whole, layout)
    if signature not in known:
        agree_on(whole, numeric, layout, "from_local", TOGETHER)
        known.add(signature)


def _local_part(x: Tensor, numeric: NumericType, mesh: Mesh) -> Tensor:
    """A part in the memory where the mesh computes, of the type of the tensor."""
    index = gpu_of(mesh)
    x = on_host(x) if index is None else on_gpu(x, index)
    return x if x.type == numeric else F.cast(x, numeric)


__all__ = ["from_local"]
