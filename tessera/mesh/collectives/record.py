"""The record of a collective, and how one is run.

A collective is one Collective record: what it means on the arrays of all ranks, how one rank does
it, which extents may differ between ranks, its shape and derivatives in a graph, what it costs, on
which ranks its result is the same, and samples. Its op is made from it. Tests, the guide's table
and the planner iterate over `COLLECTIVES`.

A call is checked twice. Where it is written the ranks compare it and learn each other's extents:
in a traced function that is when it is traced. Where it runs they compare it again, extents
included, unless that is the same moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from tessera import hooks
from tessera.dims import Dim, show_shape
from tessera.errors import ArgumentError, AxisError, DTypeError, TraceError, user_line
from tessera.graph.op import OPS, Arg, GraphOp
from tessera.graph.op import Sample as OpSample
from tessera.graph.trace import apply, current_builder
from tessera.numerics import NumericType, as_key, as_type
from tessera.runtime.arrays import HOST, place_of
from tessera.tensor import Tensor, as_tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..layout import Layout
from ..ranks.array_bytes import byte_count
from ..ranks.envelope import MessageLabel, Shape
from ..ranks.group import Group, find_mesh, make_group
from ..ranks.ledger import CollectiveCall, agree, call
from .cost import COSTS, CollectiveCost
from .reduce import key_missing, need_reducible, needs_key
from .traffic import Sent, record_sent

COLLECTIVES: dict[str, Collective] = {}
EFFECT = frozenset({"collective"})
PLACE = {"axis": None, "mesh": None, "index": 0}  # of a program that runs alone


@dataclass(frozen=True, eq=False)
class CollectiveOperand:
    """What one rank brings to a collective, and what it is to get."""

    group: Group
    array: np.ndarray  # elements of `type`
    type: NumericType
    out: NumericType
    key: Any = None
    index: np.ndarray | None = None
    label: MessageLabel | None = None
    rounds: list[tuple[str, int]] = field(default_factory=list)  # type and bytes of what was sent

    def swap(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape],
             numeric: NumericType | None = None) -> list[np.ndarray]:
        """arrays[j] to member j, and an array of shapes[j] from it."""
        dtype = (numeric or self.type).dtype
        sent = sum(byte_count(a.size, dtype) for a in arrays)
        sent -= byte_count(arrays[self.group.index].size, dtype)
        self.rounds.append((dtype.name, sent))
        assert self.label is not None
        return self.group.swap(arrays, shapes, dtype, self.label)


@dataclass(frozen=True)
class CollectiveSample:
    """Attributes, and the shape of each rank's array: a function of (rank, ranks)."""

    shape: Callable[[int, int], Shape]
    attrs: dict[str, Any] = field(default_factory=dict)


def _no_dimension(ndim: int, sized: bool, **attrs: Any) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class OnWholeTensors:
    """What a collective called by hand says of a distributed tensor.

    layout(settled, axes, dim, concat) -> the layout it leaves its operand in
    adjoint: the collective whose layout the cotangent takes
    """

    layout: Callable[[Layout, tuple[str, ...], int, int], Layout]
    adjoint: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Collective:
    """One collective operation.

    doc: what each rank gets, in a few words
    meaning(arrays, **attrs) -> arrays: every rank's result from every rank's numbers, in NumPy
    run(operand, **attrs, **extents) -> array: this rank's result, by exchanging with the group
    shape(aval, **attrs) -> aval: of the op in a graph, as `GraphOp.shape`
    vjp, jvp: derivative rules of the op, as `GraphOp.vjp` and `GraphOp.jvp`; jvp None: it is linear
    adjoint: what the derivative is, in words
    same_result: whether all ranks of the axis have the same result
    sends(elements, members) -> elements that the busiest rank sends, of `elements` it holds
    cost: steps and bytes on a fabric of GPUs, for the planner
    varies(ndim, sized, **attrs) -> the dimensions whose extents may differ between ranks, before
                              and after (`sized`) the extents of all are attributes
    check(shape, members, **attrs) -> attrs, normalised; raises for what cannot be
    extents(shapes, index, dtype, **attrs) -> further attributes, from the shapes of all members
    shared: the extents that are the same on all members, so that ranks can compare them
    dims: the attributes that are dimensions
    reduces: whether values are combined, so that the result is rounded
    on_gpu(x, *rest, **attrs) -> this rank's result in a program for a GPU, in ops that have kernels
    and those of exchange_ops.py
    on_whole: what it says of a distributed tensor; None: nothing, and it is refused there
    """

    name: str
    doc: str
    meaning: Callable[..., list[np.ndarray]]
    run: Callable[..., np.ndarray]
    shape: Callable[..., Any]
    vjp: Callable[..., tuple]
    adjoint: str
    same_result: bool
    sends: Callable[[int, int], float]
    cost: CollectiveCost
    samples: tuple[CollectiveSample, ...]
    jvp: Callable[..., Tensor] | None = None
    varies: Callable[..., Iterable[int]] = _no_dimension
    check: Callable[..., dict[str, Any]] = lambda shape, members, **attrs: attrs
    extents: Callable[..., dict[str, Any]] = lambda shapes, index, dtype, **attrs: {}
    shared: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    reduces: bool = False
    on_gpu: Callable[..., Tensor] | None = None
    on_whole: OnWholeTensors | None = None

    def __post_init__(self) -> None:
        if self.name in COLLECTIVES:
            raise ArgumentError(f"a collective named {self.name!r} is registered already")
        COLLECTIVES[self.name] = self
        COSTS[self.name] = self.cost
        _make_op(self)

    @property
    def knows_extents(self) -> bool:
        """Whether a graph holds what other ranks' extents were when it was traced."""
        return self.varies is not _no_dimension

    def __repr__(self) -> str:
        return f"Collective({self.name})"


# --- its op -------------------------------------------------------------------------------------
def emit(name: str, x: Tensor, attrs: dict[str, Any], **changed: Any) -> Tensor:
    """Another collective of the same group on x, in x's own type."""
    group = {k: attrs[k] for k in PLACE}
    if COLLECTIVES[name].reduces:
        changed.setdefault("to", x.type)
    return apply(OPS[name], x, **group, type=x.type, **changed)


def _make_op(which: Collective) -> GraphOp:
    return GraphOp(which.name, shape=which.shape, ref=_ref(which), vjp=which.vjp,
                   jvp=which.jvp or _linear_jvp(which.name), batch=_batch(which), effects=EFFECT,
                   expand_gpu=which.on_gpu,
                   samples=_op_samples(which), doc=which.doc)


def _linear_jvp(name: str) -> Callable[..., Tensor]:
    """jvp of a linear collective: the same one on the tangent."""
    def rule(ts: tuple, y: Tensor, x: Tensor, type: NumericType, **attrs: Any) -> Tensor:
        return emit(name, ts[0], attrs, **{k: v for k, v in attrs.items() if k not in PLACE})

    return rule


def _batch(which: Collective) -> Callable[..., tuple[Tensor, bool]]:
    """The batch axis comes first, so that dimensions move up by one. One key serves the batch."""

    def rule(size: Any, batched: tuple, x: Tensor, *rest: Tensor, **attrs: Any) -> tuple:
        if any(batched[1:]) or not batched[0]:
            raise DTypeError(f"{which.name} under vmap takes one key and no element indices")
        attrs |= {d: attrs[d] + 1 for d in which.dims}
        if "shape" in attrs:
            attrs["shape"] = (size, *attrs["shape"])
        return apply(OPS[which.name], x, *rest, **attrs), True

    return rule


def _ref(which: Collective) -> Callable[..., np.ndarray]:
    def ref(x: np.ndarray, *rest: np.ndarray, index: int, **attrs: Any) -> np.ndarray:
        y = run_collective(which, x, *rest, **attrs)
        return y.copy() if np.may_share_memory(y, x) else y  # of the only member

    return ref


def _op_samples(which: Collective) -> tuple[OpSample, ...]:
    """The record's own samples, for a program that runs alone."""
    f32, samples = as_type("f32"), []
    for s in which.samples:
        shape = s.shape(0, 1)
        attrs = which.check(shape, 1, **s.attrs)
        attrs |= which.extents([shape], 0, f32.dtype, **attrs) | ({"to": f32} if which.reduces
                                                                  else {})
        samples.append(OpSample((Arg(shape),), {**PLACE, "type": f32, **attrs}))
    return tuple(samples)


# --- running ------------------------------------------------------------------------------------
def run_collective(which: Collective, array: np.ndarray, key: Any = None, index: Any = None, *,
                   axis: tuple[str, ...] | None, mesh: Mesh | None, type: NumericType,
                   to: NumericType | None = None, agreed: bool = False, **attrs: Any
                   ) -> np.ndarray:
    """A collective on this rank's array: compare with the group unless it has `agreed`, exchange.

    attrs: those of the call and its extents
    """
    group = make_group(mesh, axis)
    extents = {k: attrs[k] for k in which.shared}
    mine = call(group, which.name, array.shape, type, _shown_attrs(which, attrs, type, to), extents)
    varies = tuple(which.varies(array.ndim, True, **_of_call(which, attrs)))
    label = mine.label(group, varies)
    with group.transport.one_thread(label):
        if not agreed:
            agree(group, mine, varies)
        operand = CollectiveOperand(group, array, type, to or type, key, index, label)
        out = which.run(operand, **attrs)
    types = tuple(dict.fromkeys(name for name, _ in operand.rounds))
    record_sent(Sent(which.name, group.axis, types, sum(n for _, n in operand.rounds), mine.where))
    return out


def _of_call(which: Collective, attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a call gives, without the extents."""
    return {k: attrs[k] for k in which.samples[0].attrs}


def _shown_attrs(which: Collective, attrs: dict[str, Any], type: NumericType, to: NumericType | None
                 ) -> dict[str, Any]:
    return _of_call(which, attrs) | ({"dtype": str(to)} if to not in (None, type) else {})


def collect(which: Collective, x: Any, axis: Any, mesh: Mesh | None, *, dtype: Any = None,
            key: Any = None, index: Any = None, **attrs: Any) -> Tensor:
    """A collective on this rank's tensor: check, agree with the group, exchange; in a traced
    function check and agree, and record the op."""
    if not isinstance(x, Tensor):
        if place_of(x) not in (None, HOST):
            return _by_nccl().collect_on_gpu(collect, which, x, axis, mesh, dtype=dtype, key=key,
                                             index=index, **attrs)
        x = as_tensor(x)
    if current_builder() is None and x.layout is None and x.place != HOST and x.scale is None:
        return _by_nccl().collect_resident(collect, which, x, axis, mesh, dtype=dtype, key=key,
                                           index=index, **attrs)
    _need_plain(which, x)
    if x.layout is not None or traces_whole_tensors():
        return hooks.global_view.get()(which, x, axis, mesh, dtype=dtype, key=key, index=index,
                                       **attrs)
    mesh, axes = find_mesh(axis, mesh)
    group = make_group(mesh, axes)
    attrs = which.check(tuple(x.shape), group.size, **attrs)
    to = x.type if dtype is None else as_type(dtype)
    rest = _rounding_operands(which, x, to, key, index, attrs)
    traced = current_builder() is not None
    mine = _call_here(group, which, x, to, attrs, traced)
    varies = tuple(which.varies(x.ndim, False, **attrs))
    with group.transport.one_thread(mine.label(group, varies)):
        shapes = agree(group, mine, varies)
        attrs |= which.extents(shapes, group.index, x.dtype, **attrs)
        if which.reduces:
            attrs["to"] = to
        if not traced:
            attrs["agreed"] = True
        y = apply(OPS[which.name], x, *rest, axis=axes, mesh=mesh, index=group.index, type=x.type,
                  **attrs)
    for leave in hooks.exits:
        leave(y)
    return y


@functools.cache
def _by_nccl() -> Any:
    """It stands on the runtime of GPUs, which few need."""
    from ..ranks import nccl

    return nccl


def call_of(which: Collective, x: Any, axis: str | Sequence[str] | None = None, *,
            mesh: Mesh | None = None, **attrs: Any) -> Tensor:
    """A collective by its attributes. Raises ArgumentError for others than those of its samples."""
    known = which.samples[0].attrs
    if attrs.keys() - {"dtype", "key", "index"} != known.keys():
        raise ArgumentError(f"{which.name} takes {', '.join(known) or 'no attributes'}; got "
                            f"{', '.join(attrs) or 'none'}", where=user_line())
    return collect(which, x, axis, mesh, **attrs)


def traces_whole_tensors() -> bool:
    """Whether a trace is going on in which extents are those of whole, distributed tensors."""
    builder = current_builder()
    return builder is not None and builder.mesh is not None


def _need_plain(which: Collective, x: Tensor) -> None:
    if x.scale is not None:
        raise DTypeError(f"{which.name} of a scaled tensor ({x.type}): every rank has a scale of "
                         "its own", hint="ts.dequantize it first, and quantize the result")
    if any(isinstance(n, Dim) for n in x.shape):
        raise TraceError(f"{which.name} of {x.type}{show_shape(x.shape)}: ranks compare extents "
                         "when they trace, so these must be numbers",
                         hint="trace with tensors or types of known extents")


def _call_here(group: Group, which: Collective, x: Tensor, to: NumericType, attrs: dict,
               traced: bool) -> CollectiveCall:
    name = f"trace of {which.name}" if traced else which.name
    return call(group, name, tuple(x.shape), x.type, _shown_attrs(which, attrs, x.type, to))


def _rounding_operands(which: Collective, x: Tensor, to: NumericType, key: Any, index: Any,
                       attrs: dict) -> list[Tensor]:
    """The key and the element indices as operands, as far as stochastic rounding reads them."""
    checked = _index(index, x)
    if not which.reduces:
        return []
    need_reducible(x.type, attrs["op"])
    if not needs_key(x.type, to):
        return []
    if key is None:
        raise key_missing(to)
    given = key if isinstance(key, Tensor) else Tensor(as_key(key), as_type("uint32"))
    return [given] if checked is None else [given, checked]


def _index(index: Any, x: Tensor) -> Tensor | None:
    if index is None:
        return None
    index = as_tensor(index)
    if tuple(index.shape) != tuple(x.shape) or index.dtype.kind not in ("int", "uint"):
        raise ArgumentError(f"index has {index.type}{show_shape(index.shape)}, the operand is "
                            f"{show_shape(x.shape)}",
                            hint="the index in the whole tensor of each element, as integers")
    return index


def axis_of(dim: int, ndim: int, what: str) -> int:
    """`dim` from 0; AxisError when there is no such dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise AxisError(f"{what}: dim={dim!r} of a tensor with {ndim} dimensions",
                        hint=f"dim from {-ndim} to {ndim - 1}" if ndim else
                        "a scalar has none: reshape it to (1,)")
    return dim % ndim
