"""Collectives of arrays on GPUs, ours, torch's and CuPy's: by NCCL where each rank has a GPU of its
own.

    y = ts.dist.all_reduce(x, "dp")        # x, y: arrays of one library on this rank's GPU

Where NCCL's own collective computes what the policy says (own_arithmetic.py) it is called on the
arrays, and nothing else: ranks compare a call when they make it for the first time with these
shapes and types, and not again, unless the setting comm_check says "each".

Of others the bytes go straight between all GPUs of a group at once. What comes is reduced by who
gets it: in the accumulate type, in the order of ranks, rounded once, as on every other transport.

Where ranks share a GPU, or config.comm says so, arrays go through host memory and messages.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera import config, hooks
from tessera.errors import (
    ArgumentError,
    DTypeError,
    TraceError,
    user_frame,
    user_line,
    warn_user,
)
from tessera.graph.trace import current_builder
from tessera.numerics import NumericType, as_type
from tessera.runtime import libnccl
from tessera.runtime.arrays import Array, current_stream, read_array
from tessera.runtime.device import check, device, driver, restore
from tessera.tensor import Tensor
from tessera.tile.launch.resident import Resident, from_dlpack, on_gpu
from tessera.tile.launch.results import array_maker, maker

from ...lazy_dataclass import dataclass
from ..collectives.traffic import Sent, record_sent, recorded
from ..device_mesh import Mesh
from ..partition import balanced
from ..world import transport
from .call_numbers import CallSequence, sequence_of
from .communicator import Communicator, communicator, no_nccl
from .envelope import MessageLabel, Shape, place_of
from .group import Group, find_mesh, make_group
from .ledger import agree, call
from .own_arithmetic import SUMMED, adds_as_told

if TYPE_CHECKING:
    from ..collectives.record import Collective


# --- collectives --------------------------------------------------------------------------------
class NcclCollective:
    """One collective on this rank's array; `x` is contiguous."""

    def __init__(self, by: Communicator, x: Any, array: Array, to: NumericType):
        self.group, self.array, self.type, self.to = by.group, array, as_type(array.dtype), to
        self.xp = sys.modules[array.library]
        self.x, self.by = x, by
        self.stream, self.sent = current_stream(array.library, array.device), 0

    def empty(self, shape: Shape, numeric: NumericType | None = None) -> Any:
        """An array of the operand's library, type (unless given) and GPU."""
        return maker(self.array.library, shape, numeric or self.type, self.array.device)(None).array

    def swap(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """sends[j] to member j and receives[j] filled by it."""
        others = [j for j in range(self.group.size) if j != self.group.index]
        out, into = ({j: place for j in others if (place := _place_of(x[j]))[1]}
                     for x in (sends, receives))
        with device(self.array.device).current():
            self.by.swap(out, into, self.stream)
        self.sent += sum(nbytes for _, nbytes in out.values())

    def terms(self, blocks: Sequence[Any]) -> list[Any]:
        """What the members hold of this rank's block: blocks[j] goes to member j."""
        mine = blocks[self.group.index]
        got = [mine if j == self.group.index else self.empty(tuple(mine.shape))
               for j in range(self.group.size)]
        self.swap(blocks, got)
        return got

    def reduce(self, terms: list[Any], op: str, out: Any) -> None:
        """As reduce.reduce_terms and round_once: added pairwise, wide, and rounded into `out`."""
        combine = {"max": self.xp.maximum, "min": self.xp.minimum}.get(op, self.xp.add)
        if len(terms) == 2 and op != "mean" and self.to.dtype is self.type.dtype:
            combine(*terms, out=out)  # libraries add halves in f32, too, and round once
            return
        values = [self.wide(t) for t in terms]
        while len(values) > 1:
            pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[2 * len(pairs):]
        out[...] = values[0] / len(terms) if op == "mean" else values[0]

    def wide(self, x: Any) -> Any:
        if self.type.accum is self.type.dtype:
            return x
        made = self.empty(tuple(x.shape), as_type(self.type.accum))
        made[...] = x
        return made


def _dense(x: Any, array: Array) -> Any:
    """A copy in row-major order, of the same library."""
    with _working_on(array):
        return x.contiguous() if array.library == "torch" else \
            sys.modules["cupy"].ascontiguousarray(x)


def _place_of(x: Any) -> tuple[int, int]:
    """Address and bytes."""
    array = read_array(x, "x")
    return array.pointer, prod(array.shape) * array.dtype.numpy.itemsize


RUNS: dict[str, Callable[..., Any]] = {}  # by the collective's name


def by_nccl(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: run(run, **attrs, **extents) is how a collective goes on GPUs that NCCL does not
    do alone."""
    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        if RUNS.setdefault(name, run) is not run:
            raise ValueError(f"the run of {name!r} on GPUs is declared twice")
        return run

    return register


@by_nccl("all_reduce")
def _all_reduce(run: NcclCollective, op: str) -> Any:
    flat, me = run.x.reshape(-1), run.group.index
    cuts = balanced(prod(flat.shape), run.group.size)
    out = run.empty(tuple(run.x.shape), run.to)
    parts = [out.reshape(-1)[a:b] for a, b in cuts]
    run.reduce(run.terms([flat[a:b] for a, b in cuts]), op, parts[me])
    run.swap([parts[me]] * run.group.size, parts)
    return out


@by_nccl("reduce_scatter")
def _reduce_scatter(run: NcclCollective, dim: int, op: str, sizes: Sequence[int]) -> Any:
    ends = np.cumsum([0, *sizes])
    blocks = [run.x[(slice(None),) * dim + (slice(int(a), int(b)),)]
              for a, b in zip(ends, ends[1:], strict=False)]
    dense = [b.contiguous() if run.array.library == "torch" else run.xp.ascontiguousarray(b)
             for b in blocks]
    out = run.empty(tuple(dense[run.group.index].shape), run.to)
    run.reduce(run.terms(dense), op, out)
    return out


@by_nccl("all_gather")
def _all_gather(run: NcclCollective, dim: int, sizes: Sequence[int]) -> Any:
    shape, me = tuple(run.x.shape), run.group.index
    got = [run.x if j == me else run.empty((*shape[:dim], n, *shape[dim + 1:]))
           for j, n in enumerate(sizes)]
    run.swap([run.x] * run.group.size, got)
    join: Callable[..., Any] = run.xp.cat if run.array.library == "torch" else run.xp.concatenate
    return join(got, dim)


# --- calls that NCCL does alone -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OwnCall:
    """A call that its group has compared, as NCCL's own collective.

    start(source, target, stream)   shape: of the result   sent_bytes: by this rank
    sequence: of the group's calls   label: of this one   numbers: what it is in there, by line
    """

    start: Callable[[int, int, int], None]
    shape: Shape
    type: NumericType
    index: int
    sent_bytes: int
    name: str
    axis: str
    make: Callable[..., Any]  # the result: an Output of the library of the operand, or a tensor
    sequence: CallSequence
    label: MessageLabel
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)

    def count(self) -> None:
        """The call is made, from the user's line."""
        frame = user_frame()
        at = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
        number = self.numbers.get(at)
        if number is None:
            where = user_line()
            number = self.numbers[at] = self.sequence.number_of(MessageLabel(
                self.label.text, where, f"{self.label.text} {self.type} {place_of(where)}"))
        self.sequence.add(number)

    def __call__(self, source: int, target: int, stream: int) -> None:
        self.count()
        before = device(self.index).activate()
        try:
            self.start(source, target, stream)
        finally:
            if before:
                restore(before)
        if recorded():
            record_sent(Sent(self.name, self.axis, (self.type.dtype.name,), self.sent_bytes,
                             user_line()))


_own: dict[Any, OwnCall] = {}


def _key(which: Collective, library: str, shape: Shape, numeric: Any, index: int, axis: Any,
         mesh: Mesh | None, dtype: Any, attrs: dict[str, Any]) -> Any:
    return (which.name, transport(), *find_mesh(axis, mesh), shape, numeric, index, library, dtype,
            *map(str, attrs.values()))


Alone = tuple[Callable[[int, int, int], None], Shape, float]  # start, result, parts sent
ALONE: dict[str, Callable[..., Alone | None]] = {}  # by the collective's name


def alone(name: str) -> Callable[..., Any]:
    """Decorator: form(by, shape, type, **attrs, **extents) is how NCCL does a collective alone,
    None where it cannot."""
    def register(form: Callable[..., Alone | None]) -> Callable[..., Alone | None]:
        if ALONE.setdefault(name, form) is not form:
            raise ValueError(f"the form of {name!r} in NCCL is declared twice")
        return form

    return register


@alone("all_reduce")
def _reduced(by: Communicator, shape: Shape, type: NumericType, op: str) -> Alone:
    count, n, number = prod(shape), by.group.size, libnccl.OPS[op]
    kind = libnccl.TYPES[type.dtype.name]

    def start(source: int, target: int, stream: int) -> None:
        by.all_reduce(((source, target, count),), kind, number, stream)

    return start, shape, 2 * (n - 1) / n


@alone("reduce_scatter")
def _scattered(by: Communicator, shape: Shape, type: NumericType, op: str, dim: int,
               sizes: Sequence[int]) -> Alone | None:
    if not _one_run(shape, dim, sizes):
        return None
    out, n = (*shape[:dim], sizes[0], *shape[dim + 1:]), by.group.size
    count, kind, number = prod(out), libnccl.TYPES[type.dtype.name], libnccl.OPS[op]

    def start(source: int, target: int, stream: int) -> None:
        by.reduce_scatter(((source, target, count),), kind, number, stream)

    return start, out, (n - 1) / n


@alone("all_gather")
def _gathered(by: Communicator, shape: Shape, type: NumericType, dim: int,
              sizes: Sequence[int]) -> Alone | None:
    if not _one_run(shape, dim, sizes):
        return None
    nbytes = prod(shape) * type.dtype.numpy.itemsize

    def start(source: int, target: int, stream: int) -> None:
        by.all_gather(((source, target, nbytes),), stream)

    return start, (*shape[:dim], sum(sizes), *shape[dim + 1:]), by.group.size - 1


def _one_run(shape: Shape, dim: int, sizes: Sequence[int]) -> bool:
    """Whether the parts of all ranks are of one size, and each a run of memory in the whole."""
    return prod(shape[:dim]) == 1 and len(set(sizes)) == 1


def _own_call(which: Collective, by: Communicator, library: str, shape: Shape,
              numeric: NumericType, to: NumericType, index: int, attrs: dict[str, Any],
              extents: dict[str, Any], label: MessageLabel) -> OwnCall | None:
    """How NCCL does a call itself, None where it cannot."""
    nbytes = prod(shape) * numeric.dtype.numpy.itemsize
    if not nbytes or numeric.dtype.packed or (
            which.reduces and not adds_as_told(attrs["op"], numeric, to, by.group.size)):
        return None
    form = ALONE[which.name](by, shape, numeric, **attrs, **extents)
    if form is None:
        return None
    start, out, sent = form
    make = (array_maker if library == "resident" else maker)(library, out, to, index)
    return OwnCall(start, out, to, index, round(nbytes * sent), which.name, by.group.axis, make,
                   sequence_of(by.group), label)


# --- calls --------------------------------------------------------------------------------------
def collect_on_gpu(on_host: Callable[..., Tensor], which: Collective, x: Any, axis: Any,
                   mesh: Mesh | None, *, dtype: Any = None, key: Any = None, index: Any = None,
                   **attrs: Any) -> Any:
    """A collective on this rank's array on a GPU; the result is an array of the same library.

    on_host: `collect`, for arrays that cannot go by NCCL. As there the ranks compare the call
    first, once. Raises TraceError in a traced function, and DTypeError for what is not added on
    GPUs.
    """
    if current_builder() is not None:
        raise TraceError(f"{which.name} of a {type(x).__name__} in a traced function: its array "
                         "would become a constant", hint="pass it to the function as an argument")
    array = read_array(x, "x")
    if array.library not in ("torch", "cupy") or which.name not in RUNS:
        raise ArgumentError(f"{which.name} of an array of {array.library} on a GPU",
                            hint=f"on GPUs there are {', '.join(RUNS)}, of torch and CuPy arrays")
    if not array.contiguous:  # on one rank alone, maybe: all go the same way
        x = _dense(x, array)
        array = read_array(x, "x")
    shape, at = tuple(array.shape), _key(which, array.library, tuple(array.shape), array.dtype,
                                         array.device, axis, mesh, dtype, attrs)
    own = _own.get(at)
    if own is None or config.comm_check == "each":
        group = make_group(*find_mesh(axis, mesh))
        numeric = as_type(array.dtype)
        to = numeric if dtype is None else as_type(dtype)
        attrs, extents, label = _compared(which, group, shape, numeric, to, attrs)
        by = communicator(group, array.device)
        if by is None:
            return _through_host(on_host, which, array, axis, mesh, group, dtype=dtype, key=key,
                                 index=index, **attrs)
        if which.reduces:
            _need_plain(which.name, numeric, to, attrs["op"])
        own = _own_call(which, by, array.library, shape, numeric, to, array.device, attrs, extents,
                        label)
        if own is None:
            with _working_on(array):
                run = NcclCollective(by, x, array, to)
                out = RUNS[which.name](run, **attrs, **extents)
            record_sent(Sent(which.name, group.axis, (numeric.dtype.name,), run.sent, label.where))
            return out
        _own[at] = own
    made = own.make(None)
    own(array.pointer, made.pointer, current_stream(array.library, array.device))
    return made.array


def _compared(which: Collective, group: Group, shape: Shape, numeric: NumericType, to: NumericType,
              attrs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], MessageLabel]:
    """The attributes of a call, its extents and label, once all members make the same."""
    attrs = which.check(shape, group.size, **attrs)
    mine = call(group, which.name, shape, numeric, attrs | {"dtype": str(to)})
    varies = which.varies(len(shape), False, **attrs)
    shapes = agree(group, mine, varies)
    extents = which.extents(shapes, group.index, numeric.dtype, **attrs)
    return attrs, extents, mine.label(group, varies)


def _working_on(array: Array) -> AbstractContextManager[Any]:
    """The array's GPU as the one that its library works on. Else the ops of a collective would go
    to a stream of another GPU, which waits for none of its copies."""
    cuda = sys.modules[array.library].cuda
    return (cuda.device if array.library == "torch" else cuda.Device)(array.device)


def _need_plain(op: str, numeric: NumericType, to: NumericType, how: str) -> None:
    policy = to.policy
    if numeric.dtype.name not in SUMMED or to.dtype.name not in SUMMED or policy.saturate or \
            policy.rounding != "nearest_even" or how == "mean" and numeric.dtype.kind != "float":
        raise DTypeError(f"{op}(op={how}) of {numeric} to {to} on GPUs",
                         hint=f"of {', '.join(sorted(SUMMED))}, rounded to nearest; others on the "
                         "host: pass a Tensor")


@functools.cache  # once
def _warn_of_host(group: Group) -> None:
    if group.transport.rank == 0:
        warn_user(f"collectives over {group.axis!r} of arrays on GPUs go through host memory: its "
                  "ranks share a GPU, or have no NCCL")


def _through_host(on_host: Callable[..., Tensor], which: Collective, array: Array, axis: Any,
                  mesh: Mesh | None, group: Group, **attrs: Any) -> Any:
    """The collective of a copy in host memory."""
    if group.transport.processes and config.comm == "auto":
        _warn_of_host(group)
    host = np.empty(array.shape, array.dtype.numpy)
    stream = current_stream(array.library, array.device)
    with device(array.device).current():
        check(driver().cuMemcpyDtoHAsync(host.ctypes.data, array.pointer,
                                         host.nbytes, stream), "copy from the GPU")
        check(driver().cuStreamSynchronize(stream), "copy from the GPU")
        y = on_host(which, Tensor(host, as_type(array.dtype)), axis, mesh, **attrs)
        out = maker(array.library, tuple(y.shape), y.type, array.device)(None)
        data = np.ascontiguousarray(y.buffer)
        check(driver().cuMemcpyHtoDAsync(out.pointer, data.ctypes.data, data.nbytes, stream),
              "copy to the GPU")
        check(driver().cuStreamSynchronize(stream), "copy to the GPU")
    return out.array


# --- tensors of ours ----------------------------------------------------------------------------
def collect_resident(on_host: Callable[..., Tensor], which: Collective, x: Resident, axis: Any,
                     mesh: Mesh | None, *, dtype: Any = None, key: Any = None, index: Any = None,
                     **attrs: Any) -> Tensor:
    """A collective on this rank's tensor on a GPU; the result lies there, too. As an array of CuPy
    or torch on the same memory where NCCL does not do it alone and one of them has its type;
    others, and simulated ranks, go through host memory."""
    at = _key(which, "resident", x.shape, x.type, x.place, axis, mesh, dtype, attrs)
    own = _own.get(at) if config.comm_check == "once" and which.name in RUNS else None
    if own is not None:
        return _own_on(own, x)
    group = make_group(*find_mesh(axis, mesh))
    to = x.type if dtype is None else as_type(dtype)
    by = communicator(group, x.place)
    if by is not None and which.name in RUNS:
        checked, extents, label = _compared(which, group, x.shape, x.type, to, attrs)
        own = _own_call(which, by, "resident", x.shape, x.type, to, x.place, checked, extents,
                        label)
        if own is not None:
            _own[at] = own
            return _own_on(own, x)
    plain = all(t == as_type(t.dtype) and t.dtype.name in SUMMED for t in (x.type, to))
    library = _library_of(x.type, to) if plain and by is not None else None
    if library is not None and which.name in RUNS:
        made = collect_on_gpu(on_host, which, library.from_dlpack(x), axis, mesh, dtype=dtype,
                              key=key, index=index, **attrs)
        return from_dlpack(made)
    if group.transport.processes and config.comm == "nccl":
        raise no_nccl(f"{which.name} of {x.type}")
    return on_gpu(on_host(which, x.cpu(), axis, mesh, dtype=dtype, key=key, index=index, **attrs),
                  x.place)


def _own_on(own: OwnCall, x: Resident) -> Tensor:
    made: Resident = own.make()
    source = x.storage
    own(source.pointer, made.storage.pointer, 0)
    source.give_back()
    for leave in hooks.exits:
        leave(made)
    return made


def _library_of(*types: NumericType) -> Any:
    """A library that computes with arrays of these types; None where none is there."""
    if all(t.dtype.name != "bf16" for t in types) and find_spec("cupy") is not None:
        return import_module("cupy")
    return import_module("torch") if find_spec("torch") is not None else None


__all__ = ["RUNS", "collect_on_gpu", "collect_resident"]
