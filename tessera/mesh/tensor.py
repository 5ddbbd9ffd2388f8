"""Distributed tensors: one global shape, of which every rank of a mesh has a part.

    W = ts.dist.tensor((8192, 8192), ts.ShardSpec(("col",), ("tp",)), mesh, "bf16", init="normal")
    W.shape is global, W.local is this rank's part, W.layout how it lies; ops on it are on the whole

Under mpirun, and in `ts.dist.simulate`, a rank holds its own part. In a program that runs alone
the process holds all of them, and runs every rank in turn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from tessera import hooks
from tessera.dims import show_shape
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.graph import functions as F
from tessera.graph import tree
from tessera.graph.donation import DONATABLE, Donatable, blank
from tessera.graph.op import Aval
from tessera.graph.operand import shape_tuple
from tessera.graph.ops import random as rng
from tessera.numerics import NumericType, as_type, encode, random_bits_at
from tessera.numerics.random_state import seed_and_step
from tessera.runtime.arrays import HOST
from tessera.runtime.host_memory import watch
from tessera.tensor import Tensor, as_tensor, encode_value
from tessera.tile.launch.memory_turns import InTurn
from tessera.tile.launch.resident import on_gpu
from tessera.tile.launch.used_by import UsedBy

from .device_mesh import Mesh, current_mesh
from .errors import DisagreementError, MeshError, PolicyMismatch
from .layout import Layout, Split, replicated
from .partition import assemble, group_of, indices, local_shape, take
from .placement import gpu_of, join, warn_of_play
from .ranks.group import find_group
from .ranks.ledger import agree, call
from .sharding.plain_operands import leave_values
from .sharding.reshard import plan, reshard
from .spec import Distribution, spec_of
from .world import (
    is_here,
    mesh_rank,
    need_playable,
    own_ranks,
    transport,
)

ALIKE = ("shape, numeric type, layout, number and seed must be the same on all ranks; look for one "
         "that depends on the rank; ts.dist.from_local makes a tensor of what each rank has")


class DistTensor(Tensor):
    """A tensor whose parts lie on the ranks of a mesh. Make one with `ts.dist.tensor`.

    shape, type: of the whole   layout: which rank has what   local: this rank's part
    parts: the parts that this process holds, by rank of the mesh
    """

    __slots__ = ("layout", "_held", "origin")

    def __init__(self, held: Mapping[int, Tensor], shape: Sequence[int], numeric: NumericType,
                 layout: Layout, *, is_param: bool = False, name: str | None = None):
        self._shape, self.type, self.layout = tuple(shape), numeric, layout
        self._held: Any = to_mesh_devices(held, layout.mesh)
        self.origin = None
        self._scale, self._is_param, self._name = None, is_param, name

    @staticmethod
    def of_many(held: Sequence[dict[int, Tensor]], shapes: Sequence[tuple[int, ...]],
                types: Sequence[NumericType], layouts: Sequence[Layout],
                origins: Sequence[Any] = ()) -> list[DistTensor]:
        """What a program gives, of parts that lie where they are to."""
        made: list[DistTensor] = blank(DistTensor, len(held))
        for y, parts, shape, numeric, layout, origin in zip(made, held, shapes, types, layouts,
                                                            origins or (None,) * len(made),
                                                            strict=True):
            y._shape = shape
            y.type = numeric
            y.layout = layout
            y._held = parts
            y.origin = origin
            y._scale = y._name = None
            y._is_param = False
        return made

    # --- what it is ---------------------------------------------------------------------------
    @property
    def held(self) -> dict[int, Tensor]:
        """The parts that are here, by rank. Raises ArgumentError when it was donated."""
        if self._held.__class__ is InTurn:
            self._held.turns.end()
        held = self.read_parts
        self.origin = None  # whoever is told may put them elsewhere
        return held

    @held.setter
    def held(self, parts: dict[int, Tensor]) -> None:
        if self._held.__class__ is InTurn:
            self._held.turns.end()
        self._held = parts
        self.origin = None

    def held_now(self) -> Any:
        """The parts, or the call that used them up."""
        while (held := self._held).__class__ is InTurn:
            now = held.now()
            if now is not None:  # else the turns have ended, and the tensor has them
                return now
        return held

    @property
    def read_parts(self) -> dict[int, Tensor]:
        """As `held`, for those who only read and keep none."""
        held: Any = self.held_now()
        if held.__class__ is UsedBy:
            raise held.error(self)
        parts: dict[int, Tensor] = held
        return parts

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def parts(self) -> _PartsByRank:
        """The parts held here, by rank: `W.parts[0]`; `W.parts("tp")` is the list along an axis
        that `ts.index_launch` takes."""
        return _PartsByRank(self)

    @property
    def local(self) -> Tensor:
        """This rank's part; rank 0's in a program that runs alone. Of codes with a scale it is a
        copy. Raises MeshError on a rank that is not in the mesh."""
        held = self.held
        rank = next(iter(held)) if len(held) == 1 else (
            0 if transport().size == 1 else mesh_rank(self.mesh))
        if rank not in held:
            raise MeshError(f"no part of a tensor on {self.mesh} is held here")
        if self.scale is None:
            _watch(held[rank], self.layout)
            return held[rank]
        part = held[rank].copy()
        part.scale = self.scale.held[rank]
        return part

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that this process holds."""
        return sum(part.nbytes for part in self.read_parts.values())

    @property
    def buffer(self) -> np.ndarray:
        raise ArgumentError("a distributed tensor has one buffer per rank",
                            hint="x.local.buffer is this rank's; x.numpy() gathers the whole")

    @property
    def array(self) -> np.ndarray:
        """The whole tensor's elements, where this process has all of them. Raises MeshError where
        others have some: a property does not communicate."""
        found = _held_whole(self)
        if found is None:
            raise MeshError(f"the elements of {self.type}{show_shape(self.shape)} in {self.layout} "
                            "lie on several ranks", hint="x.numpy(), which all ranks of the mesh "
                            "call, gathers them; x.local.array is this rank's part")
        return found

    def _own_arrays(self) -> list[np.ndarray]:
        """Of terms of a sum that is pending there are none: they are no elements."""
        return [] if self.layout.pending else [p.array for p in self.read_parts.values()]

    def numpy(self) -> np.ndarray:
        """The elements of the whole tensor; so have them tolist, item, float and np.asarray.

        Where this process has them, as of a replicated tensor, nothing is sent. Else it
        communicates: all ranks of the mesh call it, from one line. Raises DisagreementError when
        one of them does something else instead, StalledError when it does not come in time.
        """
        scale = None if self.scale is None else Tensor(self.scale.numpy(), self.scale.type)
        found = Tensor(gather_whole(self), self.type, scale=scale).numpy()
        # A copy of what this rank holds: who writes into it would change one rank of several.
        return found.copy() if self.layout.is_replicated else found

    def copy(self) -> DistTensor:
        made = DistTensor({r: p.copy() for r, p in self.held.items()}, self._shape, self.type,
                          self.layout, is_param=self.is_param, name=self.name)
        made.scale = None if self.scale is None else self.scale.copy()
        return made

    def __copy__(self) -> DistTensor:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> DistTensor:
        return self.copy()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Overwrite the whole: `x[:] = value`, a tensor, an array or a number that broadcasts."""
        if not isinstance(index, slice | EllipsisType) or index not in (Ellipsis, slice(None)):
            raise ArgumentError("a part of a distributed tensor cannot be assigned to",
                                hint="x[:] = value sets the whole; x.local[...] this rank's part")
        value = as_tensor(value)
        if value.shape != self.shape:
            value = F.broadcast_to(value, self.shape)
        if not isinstance(value, DistTensor) or value.layout != self.layout:
            value = distribute(value, self.layout, self.type)
        for rank, part in self.held.items():
            part[...] = value.held[rank]

    def __repr__(self) -> str:
        held: Any = self.held_now()
        if held.__class__ is UsedBy:
            return held.text(self)
        head = f"DistTensor{list(self.shape)} {self.type}{' param' if self.is_param else ''}"
        parts = list(self.read_parts.items())
        shown = ", ".join(f"rank {r}: {show_shape(p.shape)}" for r, p in parts[:4])
        more = f", {len(parts) - 4} more" if len(parts) > 4 else ""
        return f"{head} {self.layout}\n{shown}{more}"


def _watch(part: Tensor, layout: Layout) -> None:
    """A part is given away, and who has it may write there. Of what other ranks hold too, programs
    that are given it compare the values then (ShardedProgram)."""
    if layout.repeated and part.place == HOST and layout.mesh.size() > 1:
        watch(part.buffer)


NOTHING: dict[int, Tensor] = {}  # what a tensor holds whose parts are another's now


def held_parts(tensors: Sequence[DistTensor]) -> list[Tensor]:
    """The parts of many tensors that are held here."""
    held = [x._held for x in tensors]
    if InTurn in {*map(type, held)}:
        held = [x.held_now() for x in tensors]
    if held[0] is NOTHING and held.count(NOTHING) == len(held):
        return []
    with contextlib.suppress(KeyError, TypeError):  # of other ranks, or used up
        if sum(map(len, held)) == len(held):  # the rule, and quick: parts of one rank
            (rank,) = held[0]
            return [parts[rank] for parts in held]
    return [p for x in tensors for p in x.held.values()]


def _take(tensors: Sequence[DistTensor], call: Any) -> None:
    for x in tensors:
        x._held = call
        x.origin = None


def _like(tensors: Sequence[DistTensor], params: Sequence[bool]) -> list[DistTensor]:
    made = [DistTensor.__new__(DistTensor) for _ in tensors]
    for x, y, param in zip(tensors, made, params, strict=True):
        y._shape, y.type, y.layout = x._shape, x.type, x.layout
        y._scale, y._is_param, y._name = None, param, None
    return made


DONATABLE[DistTensor] = Donatable(_take, DistTensor.__dict__["_held"], _like, held_parts)


class _PartsByRank(Mapping[int, Tensor]):
    """The parts held here; called with an axis, the list of parts along it."""

    def __init__(self, x: DistTensor):
        self.x = x

    def __getitem__(self, rank: int) -> Tensor:
        part = self.x.held[rank]
        _watch(part, self.x.layout)
        return part

    def __iter__(self) -> Any:
        return iter(self.x.held)

    def __len__(self) -> int:
        return len(self.x.held)

    def __call__(self, axis: str) -> list[Tensor | None]:
        """One entry per place along the axis: the part that is held here, None elsewhere."""
        mesh = self.x.mesh
        found: list[Tensor | None] = [None] * mesh.size(axis)
        for rank, part in self.x.held.items():
            at = mesh.index(rank, (axis,))
            found[at] = part if found[at] is None else found[at]
        return found

    def __repr__(self) -> str:
        return repr(dict(self))


def to_mesh_devices(held: Mapping[int, Tensor], mesh: Mesh) -> dict[int, Tensor]:
    """The parts that are here, where the mesh says: those on the host go to this rank's GPU."""
    index = gpu_of(mesh) if any(type(p) is Tensor for p in held.values()) else None
    if index is None:
        return dict(held)
    return {r: on_gpu(p, index) if type(p) is Tensor else p for r, p in held.items()}


def moved_to_mesh(value: Any, mesh: Mesh | None) -> Any:
    """A tree with its plain tensors and arrays where the mesh computes: on this rank's GPU, or as
    they are."""
    index = None if mesh is None else gpu_of(mesh)

    def copied(t: Any) -> Any:
        plain = isinstance(t, Tensor | np.ndarray) and not isinstance(t, DistTensor)
        return on_gpu(as_tensor(t), index) if plain and index is not None else t

    return value if index is None else tree.map_tree(copied, value)


# --- which ranks are here ------------------------------------------------------------------------
def held_ranks(mesh: Mesh) -> tuple[int, ...]:
    """The ranks of a mesh whose parts this process holds: its own, none if it is not in the mesh,
    all of them in a program that runs alone."""
    if transport().size == 1 and mesh.world_size > 1:
        warn_of_play(mesh)
        need_playable(mesh.world_size, str(mesh))
        return tuple(range(mesh.size()))
    return own_ranks(mesh)


# --- making --------------------------------------------------------------------------------------
def tensor(shape: Any, layout: Any = None, mesh: Mesh | None = None, dtype: Any = "f32",
           init: Any = None, *, seed: int | None = None, param: bool = False,
           name: str | None = None, dims: Sequence[str] | None = None) -> DistTensor:
    """A distributed tensor of a global shape.

    layout: ShardSpec, Block, Cyclic, Replicated, a Layout, or a dict of logical names, for which
    `dims` names the dimensions; None: replicated, or what `with mesh(..., layout=)` says of `dims`
    mesh: default the one whose `with` block is open
    init: None (zeros), a number, "normal" or "uniform" (standard), an array of the whole, or a
    function of the index arrays of a part: init(i, j) -> values. Random values are drawn by index
    in the whole, so they do not depend on the mesh; `seed` names their stream.
    Raises ArgumentError, AxisError for a layout that does not fit, DTypeError for a scaled type.
    """
    if isinstance(shape, Tensor | np.ndarray) and shape.ndim != 1:
        raise ArgumentError("ts.dist.tensor takes a shape, got the values themselves",
                            hint="ts.dist.tensor(x.shape, layout, mesh, x.dtype, init=x)")
    mesh = need_mesh(mesh)
    extents = numbers(shape)
    numeric = need_plain(as_type(dtype))
    resolved = resolve(layout, mesh, extents, numeric, dims)
    agree_on(extents, numeric, resolved, init=_compared_text(init, seed))
    join(mesh)
    if isinstance(init, np.ndarray | Tensor | list | tuple):
        init = as_tensor(init)
        if init.shape != extents:
            raise ShapeError(f"init has {show_shape(init.shape)}, the tensor {show_shape(extents)}")
        made = distribute(init, resolved, numeric)
        made.is_param, made.name = param, name
        return made
    fill, on_host = _filler(init, numeric, seed), gpu_of(mesh) is None
    held = {}
    for r in held_ranks(mesh):
        part = _as_term(fill(resolved, extents, r), resolved, r)
        held[r] = Tensor(part if part.flags.writeable or not on_host else part.copy(), numeric)
    return DistTensor(held, extents, numeric, resolved, is_param=param, name=name)


def _compared_text(init: Any, seed: int | None) -> str:
    """What ranks compare of `init`: a number, or where draws come from."""
    if isinstance(init, str):
        whence = "seed {}, step {} of ts.random".format(*seed_and_step())
        return f"{init} of {whence if seed is None else f'seed {seed}'}"
    return str(init or 0) if init is None or isinstance(init, int | float | np.number) else "values"


def _as_term(part: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """What a rank holds of known values: of a pending sum they are the first rank's term, and the
    others' are zeros."""
    added = layout.op == "sum" and layout.mesh.index(rank, layout.pending) > 0
    return np.zeros_like(part) if added else part


def numbers(shape: Any) -> tuple[int, ...]:
    extents = shape_tuple(shape)
    if not all(isinstance(n, int) for n in extents):
        raise ShapeError(f"a distributed tensor needs numbers for extents, got {extents}")
    return extents  # type: ignore[return-value]


def need_mesh(mesh: Mesh | None) -> Mesh:
    found = mesh if mesh is not None else current_mesh()
    if found is None:
        raise ArgumentError("a distributed tensor needs a mesh: none is given and no `with mesh:` "
                            "is open", hint='mesh=ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))')
    return found


def need_plain(numeric: NumericType) -> NumericType:
    policy = numeric.policy
    if policy.scaled or policy.per_channel is not None or policy.custom is not None:
        raise DTypeError(f"a distributed tensor of type {numeric}: each rank would need a scale of "
                         "its own", hint="distribute the values in a plain type and quantize the "
                         "parts where they are used")
    return numeric


def resolve(layout: Any, mesh: Mesh, shape: Sequence[int], numeric: NumericType,
            dims: Sequence[str] | None = None) -> Layout:
    """What users write as a Layout, with no packed byte cut."""
    if layout is None:
        layout = mesh.layout if mesh.layout and dims else None
    if layout is None:
        found = replicated(mesh, len(shape))
    elif isinstance(layout, Layout):
        found = layout
    elif isinstance(layout, Mapping):
        if dims is None:
            raise ArgumentError("a layout dict needs the names of the dimensions",
                                hint='dims=("batch", "d_model")')
        found = spec_of(layout, dims, mesh).resolve(mesh, len(shape), dims)
    elif hasattr(layout, "resolve") and not isinstance(layout, type):
        spec: Distribution = layout
        found = spec.resolve(mesh, len(shape), dims)
    else:
        raise ArgumentError(f"{layout!r} is no layout",
                            hint='ts.ShardSpec(partition=("col",), mesh_axes=("tp",)), a dict, '
                            "Block, Cyclic or Replicated")
    if found.ndim != len(shape):
        raise ShapeError(f"the layout {found} is for {found.ndim} dimensions, the tensor has "
                         f"{len(shape)}")
    return whole_bytes(found, numeric)


def whole_bytes(layout: Layout, numeric: NumericType) -> Layout:
    """The layout with the last dimension cut between bytes of a packed type."""
    group = group_of(numeric.dtype)
    if group == 1 or not layout.ndim or not layout.axes_of(-1 % layout.ndim):
        return layout
    last = layout.splits[-1]
    if last.unit % group == 0:
        return layout
    splits = (*layout.splits[:-1], Split(last.axes, last.cyclic, last.unit * group))
    return replace(layout, splits=splits)


Filler = Callable[[Layout, tuple[int, ...], int], np.ndarray]


def _filler(init: Any, numeric: NumericType, seed: int | None) -> Filler:
    """How a rank makes its part: a function of layout, global shape and rank."""
    dtype = numeric.dtype
    if init is None or isinstance(init, int | float | np.number):
        value = encode(np.float32(init or 0), dtype) if dtype.kind == "float" else init or 0
        return lambda layout, shape, rank: np.broadcast_to(
            np.full((), value, dtype.numpy), local_shape(layout, shape, rank, dtype))
    if callable(init):
        return lambda layout, shape, rank: encode_value(
            _filled(init(*_coordinates(layout, shape, rank, dtype)),
                    local_shape(layout, shape, rank, dtype)), numeric)
    if init in ("normal", "uniform"):
        key = rng.key_of(seed) if seed is not None else F.next_key().array
        draw = _normal if init == "normal" else _uniform
        return lambda layout, shape, rank: encode_value(_draw_part(
            draw, key, local_shape(layout, shape, rank, dtype),
            functools.partial(indices, layout, shape, rank, dtype)), numeric)
    raise ArgumentError(f"init={init!r}", hint='None, a number, "normal", "uniform", an array, or '
                        "a function of index arrays")


def _filled(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """What a function of indices gave for a part of this shape: one value for all will do."""
    values = np.asarray(values)
    try:
        return values if values.shape == shape else np.broadcast_to(values, shape).copy()
    except ValueError:
        raise ShapeError(f"init gave {show_shape(values.shape)} for a part {show_shape(shape)}",
                         hint="its arguments are arrays of indices, one for each dimension, and "
                         "its result has their shape: init=lambda i, j: i + j") from None


def _coordinates(layout: Layout, shape: tuple[int, ...], rank: int, dtype: Any) -> list[np.ndarray]:
    flat = indices(layout, shape, rank, dtype)
    return list(np.unravel_index(flat, shape)) if shape else []


DRAWN = 1 << 16  # elements at once, so that what is made on the way stays in memory that is there


def _draw_part(draw: Callable[[np.ndarray, np.ndarray], np.ndarray], key: np.ndarray,
               shape: tuple[int, ...], index: Callable[..., np.ndarray]) -> np.ndarray:
    """The draws of a part: f32 [local shape]. index: of some of its rows, in the whole."""
    if not shape:
        return draw(key, index())
    out = np.empty(shape, np.float32)
    rows = max(1, DRAWN // max(1, prod(shape[1:])))
    for first in range(0, shape[0], rows):
        out[first:first + rows] = draw(key, index(rows=slice(first, first + rows)))
    return out


def _uniform(key: np.ndarray, index: np.ndarray) -> np.ndarray:
    """In [0, 1): 24 bits of each element's word."""
    return (random_bits_at(key, index) >> 8).astype(np.float32) * np.float32(2**-24)


def _normal(key: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Box and Muller (1958): two words per element, side by side in the stream."""
    words = random_bits_at(key, np.stack((index * 2, index * 2 + 1), axis=-1)) >> 8  # [..., 2]
    u, v = words[..., 0].astype(np.float64) + 1.0, words[..., 1].astype(np.float64)
    radius = np.sqrt(-2.0 * np.log(u * 2.0**-24))
    return (radius * np.cos(2.0 * np.pi * v * 2.0**-24)).astype(np.float32)


# --- between whole and parts ---------------------------------------------------------------------
def distribute(x: Any, layout: Any, dtype: Any = None, mesh: Mesh | None = None,
               dims: Sequence[str] | None = None) -> DistTensor:
    """A tensor that every rank has whole, or a distributed one, in a layout.

    x: array or tensor, the same on all ranks   layout, mesh, dims: as `ts.dist.tensor`
    What several ranks are to hold alike is compared by the first function that reads it and
    exchanges something.
    A distributed x is moved: only what a rank lacks is sent. Then it communicates: all ranks of
    the mesh call it, and of another mesh all of both.
    """
    if isinstance(dtype, Mesh):
        raise ArgumentError("distribute(x, layout, mesh): its third argument is a type, dtype=",
                            hint="give the mesh by name: ts.dist.distribute(x, layout, mesh=mesh)")
    x = as_tensor(x)
    numeric = need_plain(x.type if dtype is None else as_type(dtype))
    if isinstance(layout, Layout):
        mesh = layout.mesh
    elif isinstance(x, DistTensor) and mesh is None:
        mesh = x.mesh
    resolved = resolve(layout, need_mesh(mesh), x.shape, numeric, dims)
    join(resolved.mesh)
    if isinstance(x, DistTensor) and x.mesh == resolved.mesh:
        return _relay(x, resolved, numeric)
    array = gather_whole(x) if isinstance(x, DistTensor) else x.array
    array = encode_value(Tensor(array, x.type), numeric)
    copy = gpu_of(resolved.mesh) is None  # else it is copied to the GPU
    held = {r: Tensor(_as_term(take(array, resolved, r, numeric.dtype, copy), resolved, r), numeric)
            for r in held_ranks(resolved.mesh)}
    leave_values("ts.dist.distribute", resolved, held, Aval(x.shape, numeric))
    return DistTensor(held, x.shape, numeric, resolved, is_param=x.is_param, name=x.name)


def _relay(x: DistTensor, layout: Layout, numeric: NumericType) -> DistTensor:
    """A distributed tensor in another layout of its mesh."""
    y = hooks.shard.get()(x, layout) if x.layout != layout else x
    made = y if y.type == numeric else F.cast(y, numeric)
    return DistTensor(made.held, x.shape, numeric, made.layout, is_param=x.is_param, name=x.name)


def _held_whole(x: DistTensor) -> np.ndarray | None:
    """The elements of the whole tensor when this process has them."""
    layout, held = x.layout, x.read_parts
    if layout.is_replicated and held:
        return next(iter(held.values())).array
    if len(held) == layout.mesh.size():
        return assemble([held[r].array for r in sorted(held)], layout, x.shape, x.dtype)
    return None


def gather_whole(x: DistTensor) -> np.ndarray:
    """The elements of the whole tensor. Unless this process has them a collective of the mesh."""
    found, layout = _held_whole(x), x.layout
    if found is not None:
        return found
    made = plan(layout, replicated(layout.mesh, x.ndim), x.shape, x.dtype)
    what = f"numpy() of {x.type}{show_shape(x.shape)} in {layout}"
    return reshard(transport(), made, x.local.array, x.dtype, what)


def agree_on(shape: Sequence[int], numeric: NumericType, layout: Layout,
             function: str = "tensor", hint: str = ALIKE, **more: Any) -> None:
    """Raise PolicyMismatch on every rank of the mesh when they are about to make different
    tensors with a function of ts.dist. more: what else they are to have the same."""
    mesh = layout.mesh
    if transport().size == 1 or not is_here(mesh):
        return
    group = find_group(None, mesh)
    attrs = {"type": str(numeric), "shape": tuple(shape), "layout": str(layout), **more}
    try:
        agree(group, call(group, f"dist.{function}", (), None, attrs))
    except DisagreementError as err:
        raise PolicyMismatch(f"the ranks make different tensors:\n{err.message}",
                             hint=hint, where=err.where) from err
