"""Collectives of arrays on GPUs, ours, torch's and CuPy's: by NCCL where each rank has a GPU of its
own.

    y = ts.dist.all_reduce(x, "dp")        # x, y: arrays of one library on this rank's GPU

Bytes go straight between all GPUs of a group at once (ncclSend, ncclRecv). What comes is reduced by
who gets it: in the accumulate type, in the order of ranks, rounded once. So the bits are those of
every other transport; ncclAllReduce would add in an order of its own. A group has a communicator of
its own, so a mesh has one for each axis; its id travels by MPI, by which the ranks also compare
their calls (ledger.py).

Where ranks share a GPU, or config.comm says so, arrays go through host memory and MPI.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera import config
from tessera.errors import ArgumentError, DTypeError, TraceError, UnsupportedTargetError
from tessera.graph.trace import current_builder
from tessera.launched import launched_here
from tessera.numerics import NumericType, as_type
from tessera.runtime.arrays import Array, current_stream, read_array
from tessera.runtime.device import check, device, device_count, driver, gpu_id
from tessera.tensor import Tensor
from tessera.tile.launch.resident import from_dlpack, on_gpu
from tessera.tile.launch.results import maker

from ..collectives.traffic import Sent, record_sent
from ..device_mesh import Mesh
from ..errors import MeshError
from ..partition import balanced
from ..world import need_world
from .envelope import Shape, here_in
from .group import Group, find_mesh, make_group
from .ledger import agree, call

if TYPE_CHECKING:
    from ..collectives.record import Collective

_ID_BYTES, _GPU_BYTES = 128, 16
SUMMED = frozenset({"f64", "f32", "bf16", "f16", "int64", "int32"})


# --- which backend ------------------------------------------------------------------------------
def backend_of(mesh: Mesh) -> str:
    """What Mesh.backend says: what its ranks have found out together, else what this one sees."""
    here = need_world(mesh)
    if here.name != "mpi":
        return here.name
    found = [by for (group, _), by in _agreed.items() if set(group.ranks) == set(mesh.world_ranks)]
    by_nccl = found[-1] if found else config.comm != "mpi" and _have_own_gpus() and \
        _nccl() is not None
    if config.comm == "nccl" and not by_nccl:
        raise _no_nccl(f"the ranks of {mesh}")
    return "nccl" if by_nccl else "mpi"


def _no_nccl(who: str) -> MeshError:
    return MeshError(f"{who} cannot use NCCL, which TESSERA_COMM=nccl demands",
                     hint="it needs CuPy with NCCL, and a GPU for each rank")


_agreed: dict[tuple[Group, int], bool] = {}  # what `_by_nccl` has found


def _by_nccl(group: Group, index: int) -> bool:
    """Whether a group's arrays go by NCCL: each rank has a GPU of its own and NCCL is there. The
    first call is a collective. index: the GPU of this rank."""
    if (group, index) not in _agreed:
        _agreed[group, index] = _agree_on_nccl(group, index)
    return _agreed[group, index]


def _agree_on_nccl(group: Group, index: int) -> bool:
    mine = np.zeros(1 + _GPU_BYTES, np.uint8)
    if _nccl() is not None:
        mine[0], mine[1:] = 1, np.frombuffer(gpu_id(index), np.uint8)
    got = group.swap_bytes([mine] * group.size, [mine.size] * group.size,
                           here_in("choosing a backend"))
    separate = all(g[0] for g in got) and len({g.tobytes() for g in got}) == group.size
    if config.comm == "nccl" and not separate:
        raise _no_nccl(f"the ranks of {group.axis!r}")
    return separate and config.comm != "mpi"


def _have_own_gpus() -> bool:
    """Whether this machine has a GPU for each of the ranks that run on it."""
    try:
        count = device_count()
    except UnsupportedTargetError:
        return False
    return count >= launched_here()


def _nccl() -> Any:
    """CuPy's NCCL, None when it is not there."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    return nccl if nccl.available else None


# --- bytes between GPUs -------------------------------------------------------------------------
class GroupCommunicator:
    """A group's communicator on one GPU."""

    def __init__(self, group: Group, index: int):
        nccl, n, mine = _nccl(), group.size, np.empty(0, np.uint8)
        if group.index == 0:
            mine = np.frombuffer(nccl.get_unique_id(), np.uint8)
        got = group.swap_bytes([mine] * n, [_ID_BYTES] + [0] * (n - 1),
                               here_in("sharing an id of NCCL"))
        self.group, self.index, self._nccl = group, index, nccl
        with device(index).current():
            self._comm = nccl.NcclCommunicator(n, got[0].tobytes(), group.index)

    def swap(self, sends: Sequence[Any], receives: Sequence[Any], stream: int) -> int:
        """sends[j] to member j and receives[j] filled by it, arrays on this GPU, in the order of
        the stream. Returns the bytes that are sent."""
        sent, uint8 = 0, self._nccl.NCCL_UINT8
        with device(self.index).current():
            self._nccl.groupStart()
            for j in range(self.group.size):
                if j == self.group.index:
                    continue
                (out, given), (into, taken) = (_bytes_of(x[j]) for x in (sends, receives))
                if given:
                    self._comm.send(out, given, uint8, j, stream)
                if taken:
                    self._comm.recv(into, taken, uint8, j, stream)
                sent += given
            self._nccl.groupEnd()
        return sent


def _bytes_of(x: Any) -> tuple[int, int]:
    array = read_array(x, "x")
    return array.pointer, prod(array.shape) * array.dtype.numpy.itemsize


_links: dict[Group, GroupCommunicator] = {}


def _link(group: Group, index: int) -> GroupCommunicator:
    found = _links.get(group) or _links.setdefault(group, GroupCommunicator(group, index))
    if found.index != index:
        raise MeshError(f"this rank's communicator of {group.axis!r} is on cuda:{found.index}, the "
                        f"array lies on cuda:{index}", hint="keep a rank's arrays on one GPU")
    return found


# --- collectives --------------------------------------------------------------------------------
class NcclCollective:
    """One collective on this rank's array; `x` is contiguous."""

    def __init__(self, group: Group, x: Any, array: Array, to: NumericType):
        self.group, self.array, self.type, self.to = group, array, as_type(array.dtype), to
        self.xp = sys.modules[array.library]
        self.x = x.contiguous() if array.library == "torch" else self.xp.ascontiguousarray(x)
        self.link = _link(group, array.device)
        self.stream, self.sent = current_stream(array.library, array.device), 0

    def empty(self, shape: Shape, numeric: NumericType | None = None) -> Any:
        """An array of the operand's library, type (unless given) and GPU."""
        return maker(self.array.library, shape, numeric or self.type, self.array.device)(None).array

    def swap(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        self.sent += self.link.swap(sends, receives, self.stream)

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


RUNS: dict[str, Callable[..., Any]] = {}  # by the collective's name


def by_nccl(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: run(run, **attrs, **extents) is how a collective goes on GPUs."""
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


# --- calls --------------------------------------------------------------------------------------
def collect_on_gpu(on_host: Callable[..., Tensor], which: Collective, x: Any, axis: Any,
                   mesh: Mesh | None, *, dtype: Any = None, key: Any = None, index: Any = None,
                   **attrs: Any) -> Any:
    """A collective on this rank's array on a GPU; the result is an array of the same library.

    on_host: `collect`, for arrays that cannot go by NCCL. As there the ranks compare the call
    first. Raises TraceError in a traced function, and DTypeError for what is not added on GPUs.
    """
    if current_builder() is not None:
        raise TraceError(f"{which.name} of a {type(x).__name__} in a traced function: its array "
                         "would become a constant", hint="pass it to the function as an argument")
    array = read_array(x, "x")
    if array.library not in ("torch", "cupy") or which.name not in RUNS:
        raise ArgumentError(f"{which.name} of an array of {array.library} on a GPU",
                            hint=f"on GPUs there are {', '.join(RUNS)}, of torch and CuPy arrays")
    group = make_group(*find_mesh(axis, mesh))
    numeric = as_type(array.dtype)
    to = numeric if dtype is None else as_type(dtype)
    attrs = which.check(tuple(array.shape), group.size, **attrs)
    mine = call(group, which.name, tuple(array.shape), numeric, attrs | {"dtype": str(to)})
    shapes = agree(group, mine, which.varies(len(array.shape), False, **attrs))
    if group.transport.name != "mpi" or not _by_nccl(group, array.device):
        return _through_host(on_host, which, x, array, axis, mesh, group, dtype=dtype, key=key,
                             index=index, **attrs)
    if which.reduces:
        _need_plain(which.name, numeric, to, attrs["op"])
    extents = which.extents(shapes, group.index, array.dtype, **attrs)
    with _working_on(array):
        run = NcclCollective(group, x, array, to)
        out = RUNS[which.name](run, **attrs, **extents)
    record_sent(Sent(which.name, group.axis, (numeric.dtype.name,), run.sent, mine.where))
    return out


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
        warnings.warn(f"collectives over {group.axis!r} of arrays on GPUs go through host memory: "
                      "its ranks share a GPU, or have no NCCL", stacklevel=6)


def _through_host(on_host: Callable[..., Tensor], which: Collective, x: Any, array: Array,
                  axis: Any, mesh: Mesh | None, group: Group, **attrs: Any) -> Any:
    """The collective of a copy in host memory."""
    if group.transport.name == "mpi" and config.comm == "auto":
        _warn_of_host(group)
    dense = x.contiguous() if array.library == "torch" else sys.modules["cupy"].ascontiguousarray(x)
    host = np.empty(array.shape, array.dtype.numpy)
    stream = current_stream(array.library, array.device)
    with device(array.device).current():
        check(driver().cuMemcpyDtoHAsync(host.ctypes.data, read_array(dense, "x").pointer,
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
def collect_resident(on_host: Callable[..., Tensor], which: Collective, x: Tensor, axis: Any,
                     mesh: Mesh | None, *, dtype: Any = None, key: Any = None, index: Any = None,
                     **attrs: Any) -> Tensor:
    """A collective on this rank's tensor on a GPU; the result lies there, too. As an array of CuPy
    or torch on the same memory where ranks are processes and one of them has its type; others, and
    simulated ranks, go through host memory."""
    group = make_group(*find_mesh(axis, mesh))
    to = x.type if dtype is None else as_type(dtype)
    plain = all(t == as_type(t.dtype) and t.dtype.name in SUMMED for t in (x.type, to))
    library = _library_of(x.type, to) if plain and group.transport.name == "mpi" else None
    if library is not None and which.name in RUNS:
        made = collect_on_gpu(on_host, which, library.from_dlpack(x), axis, mesh, dtype=dtype,
                              key=key, index=index, **attrs)
        return from_dlpack(made)
    if group.transport.name == "mpi" and config.comm == "nccl":
        raise _no_nccl(f"{which.name} of {x.type}")
    return on_gpu(on_host(which, x.cpu(), axis, mesh, dtype=dtype, key=key, index=index, **attrs),
                  x.place)


def _library_of(*types: NumericType) -> Any:
    """A library that computes with arrays of these types; None where none is there."""
    if all(t.dtype.name != "bf16" for t in types) and find_spec("cupy") is not None:
        return import_module("cupy")
    return import_module("torch") if find_spec("torch") is not None else None


__all__ = ["RUNS", "GroupCommunicator", "backend_of", "collect_on_gpu", "collect_resident"]
