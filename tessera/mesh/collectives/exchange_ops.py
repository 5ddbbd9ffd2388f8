"""What ranks do to each other inside of a program for a GPU: four ops on dense arrays.

    mesh_rank_sums       arrays -> their reductions over the ranks of a group
    mesh_rank_blocks     arrays x -> [members, *x.shape], the x of every member
    mesh_scattered_sums  arrays x [members, ...] -> this rank's block of the reduction
    mesh_rank_swap       blocks to some members -> blocks from some

Collectives of a graph are written in these and in ops that have kernels, by their records'
`expand_gpu`. NCCL has the first three where it adds as the policy says (ranks/own_arithmetic.py);
other reductions are a swap, additions in the order of ranks, and a rounding: the bits of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import SourceLine, UnsupportedTargetError
from tessera.graph import functions as F
from tessera.graph.ir import Node
from tessera.graph.op import ENGINES, OPS, Aval, Exchange, GraphOp, sample
from tessera.graph.trace import apply
from tessera.numerics import NumericType, as_type, stored_bytes
from tessera.runtime import libnccl
from tessera.runtime.buffer import copy_bytes
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..partition import balanced
from ..ranks.envelope import here_in
from ..ranks.group import Group, make_group
from ..ranks.own_arithmetic import adds_as_told
from ..world import transport
from .record import COLLECTIVES, EFFECT, CollectiveOperand
from .reduce import reduce_terms, round_once

if TYPE_CHECKING:
    from ..ranks.communicator import Communicator

Shape = tuple[int, ...]
Places = Sequence[tuple[int, int]]  # address and bytes of each


def _group(members: Shape, axis: str) -> Group:
    return Group(transport(), members, axis)


def _route(members: Shape, axis: str, **attrs: Any) -> str:
    from ..ranks.communicator import uses_nccl  # it stands on NCCL, which few need

    found = uses_nccl(_group(members, axis))
    return "" if found is None else "nccl" if found else "host"


def _by(members: Shape, axis: str, what: str, index: int, blocks: int = 0
        ) -> Communicator | None:
    """The way between GPUs, where there is one; and a note of what happens, for who is asked.
    blocks: how many of NCCL's, of which each takes a multiprocessor; 0: as many as it likes;
    ENGINES: none"""
    from ..ranks.communicator import communicator

    found = communicator(_group(members, axis), index, what)
    return found.of_blocks(blocks) if blocks and found is not None else found


def _replayed(index: int, stream: int, where: SourceLine | None, *, members: Shape, axis: str,
              what: str, blocks: int = 0, **attrs: Any) -> Callable[[], None]:
    from ..ranks import nccl_watch

    by = _by(members, axis, what, index, blocks)
    return (lambda: None) if by is None else partial(nccl_watch.replayed, by, what, stream, where)


# --- reductions over all ------------------------------------------------------------------------
def reduce_together(group: Group, arrays: Sequence[np.ndarray], type: NumericType, op: str,
                    what: str) -> tuple[np.ndarray, ...]:
    """Several arrays in one exchange, on hosts."""
    flat = np.concatenate([a.reshape(-1) for a in arrays]) if len(arrays) > 1 else \
        arrays[0].reshape(-1)
    label = here_in(what)
    if flat.nbytes * (group.size - 1) <= ONE_EXCHANGE_BYTES:
        terms = group.swap([flat] * group.size, [flat.shape] * group.size, type.dtype, label)
        total = round_once(reduce_terms(terms, type, op), type, None, None)
    else:
        operand = CollectiveOperand(group, flat, type, type, label=label)
        total = COLLECTIVES["all_reduce"].run(operand, op=op)
    found, at = [], 0
    for a in arrays:
        found.append(total[at:at + a.size].reshape(a.shape))
        at += a.size
    return tuple(found)


# An all-reduce of which a rank gets no more bytes than this from all others together is one
# exchange of whole terms, not two of parts: what counts is how often ranks wait.
ONE_EXCHANGE_BYTES = 1 << 15


def _sums(*arrays: np.ndarray, members: Shape, axis: str, op: str, type: NumericType, what: str,
          blocks: int = 0) -> tuple[np.ndarray, ...]:
    return reduce_together(_group(members, axis), arrays, type, op, what)


def _launch_sums(sources: Places, targets: Places, index: int, stream: int, *, members: Shape,
                 axis: str, op: str, type: NumericType, what: str, blocks: int = 0) -> bool:
    by = _by(members, axis, what, index, blocks)
    if by is None:
        return False
    size = type.dtype.numpy.itemsize
    by.all_reduce([(a, b, nbytes // size) for (a, nbytes), (b, _) in
                   zip(sources, targets, strict=True) if nbytes],
                  libnccl.TYPES[type.dtype.name], libnccl.OPS[op], stream)
    return True


SUMS = GraphOp(
    "mesh_rank_sums", shape=lambda *xs, **attrs: xs, ref=_sums, multi=True, effects=EFFECT,
    differentiable=False, exchange=Exchange(_launch_sums, _route, _replayed, in_place=True,
                                            joins=True),
    doc="reductions over ranks, on a GPU")


# --- blocks of all ------------------------------------------------------------------------------
def _blocks(*xs: np.ndarray, members: Shape, axis: str, what: str, blocks: int = 0
            ) -> tuple[np.ndarray, ...]:
    group, label, found = _group(members, axis), here_in(what), []
    for x in xs:
        raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        got = group.swap_bytes([raw] * group.size, [raw.size] * group.size, label)
        found.append(np.concatenate(got).view(x.dtype).reshape(group.size, *x.shape))
    return tuple(found)


def _launch_blocks(sources: Places, targets: Places, index: int, stream: int, *, members: Shape,
                   axis: str, what: str, blocks: int = 0) -> bool:
    by = _by(members, axis, what, index, blocks)
    if by is not None and blocks == ENGINES:
        sources = _own_places(sources, targets, by.group.index)
    arrays = [(a, b, nbytes) for (a, nbytes), (b, _) in zip(sources, targets, strict=True)
              if nbytes]
    if by is not None and arrays:
        by.all_gather(arrays, stream)
    return by is not None


def _own_places(sources: Places, targets: Places, rank: int) -> Places:
    """Where a rank's blocks lie in what is gathered."""
    return [(b + rank * nbytes, nbytes) for (_, nbytes), (b, _) in zip(sources, targets,
                                                                      strict=True)]


def _bring_blocks(sources: Places, targets: Places, index: int, stream: int, *, members: Shape,
                  axis: str, what: str, blocks: int = 0) -> None:
    """Copy engines send from memory that all ranks reach, where this rank's blocks are not yet. By
    the copy engine they would come there as a kernel, which waits for a multiprocessor behind the
    matmul beside it."""
    by = _by(members, axis, what, index, blocks) if blocks == ENGINES else None
    if by is not None:
        for (source, nbytes), (target, _) in zip(
                sources, _own_places(sources, targets, by.group.index), strict=True):
            copy_bytes(target, source, nbytes, stream)


BLOCKS = GraphOp(
    "mesh_rank_blocks",
    shape=lambda *xs, members, **attrs: tuple(Aval((len(members), *x.shape), x.type) for x in xs),
    ref=_blocks, multi=True, effects=EFFECT, differentiable=False,
    exchange=Exchange(_launch_blocks, _route, _replayed, joins=True, ahead=_bring_blocks),
    doc="the arrays of all ranks of a group, on a GPU")


def _scattered(*xs: np.ndarray, members: Shape, axis: str, op: str, type: NumericType, what: str,
               blocks: int = 0) -> tuple[np.ndarray, ...]:
    group, label = _group(members, axis), here_in(what)
    terms = (group.swap(list(x), [x.shape[1:]] * group.size, type.dtype, label) for x in xs)
    return tuple(round_once(reduce_terms(t, type, op), type, None, None) for t in terms)


def _launch_scattered(sources: Places, targets: Places, index: int, stream: int, *, members: Shape,
                      axis: str, op: str, type: NumericType, what: str, blocks: int = 0
                      ) -> bool:
    by, size = _by(members, axis, what, index, blocks), type.dtype.numpy.itemsize
    arrays = [(a, b, nbytes // size) for (a, _), (b, nbytes) in zip(sources, targets, strict=True)
              if nbytes]
    if by is not None and arrays:
        by.reduce_scatter(arrays, libnccl.TYPES[type.dtype.name], libnccl.OPS[op], stream)
    return by is not None


SCATTERED = GraphOp(
    "mesh_scattered_sums",
    shape=lambda *xs, **attrs: tuple(Aval(x.shape[1:], x.type) for x in xs), ref=_scattered,
    multi=True, effects=EFFECT, differentiable=False,
    exchange=Exchange(_launch_scattered, _route, _replayed, joins=True),
    doc="blocks of reductions over ranks, on a GPU")


def adds_only_in_windows(node: Node) -> bool:
    """Whether it is a sum that NCCL makes as the policy of its type says in windows alone."""
    if node.op not in (SUMS, SCATTERED):
        return False
    given, members = node.attrs["type"], len(node.attrs["members"])
    return not adds_as_told(node.attrs["op"], given, given, members)


COPIED = GraphOp(
    "mesh_copied", shape=lambda x: x, ref=np.copy, loop="({0})", axes="...->...",
    samples=(sample((2, 3)),), differentiable=False,
    doc="the elements in memory of a program, where all ranks reach them")


# --- blocks between some ------------------------------------------------------------------------
def _swap(*xs: np.ndarray, members: Shape, axis: str, to: Shape,
          come: tuple[tuple[int, Shape], ...], type: NumericType, what: str, blocks: int = 0
          ) -> tuple[np.ndarray, ...]:
    group, empty = _group(members, axis), np.empty(0, type.dtype.numpy)
    given, coming = dict(zip(to, xs, strict=True)), dict(come)
    n = group.size
    shapes = [coming.get(j, (0,)) for j in range(n)]
    got = group.swap([given.get(j, empty) for j in range(n)], shapes, type.dtype, here_in(what))
    return tuple(got[j] for j, _ in come)


def _launch_swap(sources: Places, targets: Places, index: int, stream: int, *, members: Shape,
                 axis: str, to: Shape, come: tuple[tuple[int, Shape], ...], type: NumericType,
                 what: str, blocks: int = 0) -> bool:
    by = _by(members, axis, what, index, blocks)
    if by is not None:
        by.swap(dict(zip(to, sources, strict=True)),
                dict(zip((j for j, _ in come), targets, strict=True)), stream)
    return by is not None


SWAP = GraphOp(
    "mesh_rank_swap",
    shape=lambda *xs, come, type, **attrs: tuple(Aval(shape, type) for _, shape in come),
    ref=_swap, multi=True, effects=EFFECT, differentiable=False,
    exchange=Exchange(_launch_swap, _route, _replayed), doc="blocks between ranks, on a GPU")


# --- collectives in these -----------------------------------------------------------------------
class GpuGroup:
    """The ranks of a collective, seen from one of them, while a rule for GPUs is traced.

    blocks: of NCCL's, for which matmuls beside it leave multiprocessors (cut_products.py)
    in_windows: what it sums lies in windows, if its terms are narrow
    """

    def __init__(self, members: Shape, axis: str, index: int, type: NumericType, what: str,
                 blocks: int = 0, in_windows: bool = False):
        self.n, self.index, self.type, self.in_windows = len(members), index, type, in_windows
        self.attrs: dict[str, Any] = {"members": members, "axis": axis, "type": type, "what": what}
        if blocks:
            self.attrs["blocks"] = blocks

    def swap(self, blocks: Sequence[Tensor | None], shapes: Sequence[Shape]) -> list[Tensor]:
        """blocks[j] to member j, and an array of shapes[j] from it; its own block stays."""
        others = [j for j in range(self.n) if j != self.index]
        given = {j: b for j in others if (b := blocks[j]) is not None and b.size}
        come = tuple((j, tuple(shapes[j])) for j in others if prod(shapes[j]))
        mine = blocks[self.index]
        got = {} if mine is None else {self.index: mine}
        if given or come:
            made = apply(SWAP, *given.values(), to=tuple(given), come=come, **self.attrs)
            got.update(zip((j for j, _ in come), made, strict=True))
        return [got[j] if j in got else F.zeros(tuple(shapes[j]), self.type)
                for j in range(self.n)]

    def all_reduce(self, xs: Sequence[Tensor], op: str, to: NumericType | None = None
                   ) -> tuple[Tensor, ...]:
        to = to or self.type
        if self.n == 1:
            return tuple(self.total([x], op, to) for x in xs)
        if adds_as_told(op, self.type, to, self.n, self.in_windows):
            return self._sums(xs, op)
        flat = [F.reshape(x, (prod(x.shape),)) for x in xs]
        whole = F.concatenate(flat) if len(flat) > 1 else flat[0]
        cuts = balanced(whole.shape[0], self.n)
        parts = [cut_along(whole, 0, lo, hi) for lo, hi in cuts]
        own = self.total(self.swap(parts, [tuple(parts[self.index].shape)] * self.n), op, to)
        back = GpuGroup(self.attrs["members"], self.attrs["axis"], self.index, to,
                        self.attrs["what"])
        made = F.concatenate(back.swap([own] * self.n, [(hi - lo,) for lo, hi in cuts]))
        found, at = [], 0
        for x in xs:
            found.append(F.reshape(cut_along(made, 0, at, at + prod(x.shape)), tuple(x.shape)))
            at += prod(x.shape)
        return tuple(found)

    def _sums(self, xs: Sequence[Tensor], op: str) -> tuple[Tensor, ...]:
        """Short ones side by side in one array: what makes them writes there, and its parts are
        read where they lie. NCCL takes a while for each array of a message, however short it is; a
        loss, which as a result lies in no window, had a kernel of its own behind the others."""
        short = [i for i, x in enumerate(xs) if 0 < stored_bytes(
            tuple(x.shape), x.dtype) <= SHORT_BYTES]
        if len(short) < 2:
            return tuple(apply(SUMS, *xs, op=op, **self.attrs))
        short.sort(key=lambda i: -xs[i].size)  # so that parts begin where vectors of them do
        long = [i for i in range(len(xs)) if i not in set(short)]
        flat = [F.reshape(xs[i], (xs[i].size,)) for i in short]
        *made, whole = apply(SUMS, *(xs[i] for i in long), F.concatenate(flat), op=op,
                             **self.attrs)
        found, at = dict(zip(long, made, strict=True)), 0
        for i, x in zip(short, flat, strict=True):
            found[i] = F.reshape(cut_along(whole, 0, at, at + x.size), tuple(xs[i].shape))
            at += x.size
        return tuple(found[i] for i in range(len(xs)))

    def reduce_scatter(self, x: Tensor, dim: int, cuts: Sequence[tuple[int, int]], op: str,
                       to: NumericType | None = None) -> Tensor:
        """cuts: the block of each member along `dim`."""
        to, size = to or self.type, x.shape[dim] // self.n
        if self.n > 1 and adds_as_told(op, self.type, to, self.n, self.in_windows) and list(
                cuts) == [(j * size, (j + 1) * size) for j in range(self.n)] and x.size:
            if runs := _in_runs(x, dim):
                blocks = [F.reshape(r, (self.n, size, *x.shape[dim + 1:])) for r in runs]
                return _join_runs(apply(SCATTERED, *blocks, op=op, **self.attrs), x.shape[:dim])
            shape = (*x.shape[:dim], self.n, size, *x.shape[dim + 1:])
            moved = F.moveaxis(F.reshape(x, shape), dim, 0)
            return apply(SCATTERED, moved, op=op, **self.attrs)[0]
        parts = [cut_along(x, dim, lo, hi) for lo, hi in cuts]
        mine = tuple(parts[self.index].shape)
        return self.total(self.swap(parts, [mine] * self.n), op, to)

    def all_gather(self, x: Tensor, dim: int, shapes: Sequence[Shape]) -> Tensor:
        if self.n == 1:
            return x
        if len({tuple(s) for s in shapes}) == 1 and x.size and not x.dtype.packed:
            attrs = {name: value for name, value in self.attrs.items() if name != "type"}
            if runs := _in_runs(x, dim):
                each = (self.n * x.shape[dim], *x.shape[dim + 1:])
                return _join_runs([F.reshape(y, each) for y in apply(BLOCKS, *runs, **attrs)],
                                  x.shape[:dim])
            blocks = F.moveaxis(apply(BLOCKS, x, **attrs)[0], 0, dim)
            return F.reshape(blocks, (*x.shape[:dim], self.n * x.shape[dim], *x.shape[dim + 1:]))
        return F.concatenate(self.swap([x] * self.n, shapes), axis=dim)

    def total(self, terms: Sequence[Tensor], op: str, to: NumericType) -> Tensor:
        """As reduce.reduce_terms and round_once: pairwise, in the accumulate type, rounded once."""
        accum = as_type(self.type.accum)
        wide = [F.cast(t, accum) if t.dtype is not accum.dtype else t for t in terms]
        combine = {"max": F.maximum, "min": F.minimum}.get(op, F.add)
        while len(wide) > 1:
            pairs = [combine(a, b) for a, b in zip(wide[::2], wide[1::2], strict=False)]
            wide = pairs + wide[2 * len(pairs):]
        made = wide[0] / float(self.n) if op == "mean" else wide[0]
        return made if made.type == to else F.cast(made, to)


SHORT_BYTES = 1 << 17
MOST_RUNS, RUN_BYTES = 16, 1 << 20


def _in_runs(x: Tensor, dim: int) -> list[Tensor]:
    """x[i] for each i along what stands in front of `dim`, where these are few and each long, such
    as sequences: ranks send them side by side, each from where it lies to where it belongs, and
    nothing is transposed before or behind. Else none."""
    count = prod(x.shape[:dim])
    if not 1 < count <= MOST_RUNS or count * RUN_BYTES > stored_bytes(tuple(x.shape), x.dtype):
        return []
    flat = F.reshape(x, (count, *x.shape[dim:]))
    return [F.reshape(cut_along(flat, 0, i, i + 1), tuple(x.shape[dim:])) for i in range(count)]


def _join_runs(runs: Sequence[Tensor], front: Shape) -> Tensor:
    """front: the extents that the runs are along"""
    made = F.concatenate([F.reshape(y, (1, *y.shape)) for y in runs])
    return F.reshape(made, (*front, *runs[0].shape)) if len(front) > 1 else made


@dataclass(frozen=True)
class MovedBox:
    """A box from operand number `operand` of a member to the result of one: extents, and where it
    begins in either."""

    source: int
    target: int
    operand: int
    shape: Shape
    read: Shape
    write: Shape


def move_boxes(group: GpuGroup, parts: Sequence[Tensor], out: Tensor, boxes: Sequence[MovedBox]
               ) -> Tensor:
    """`out` with the boxes of this member put into it, its own and those that come. boxes: those
    from or to it, in an order that all members have."""
    def cut(b: MovedBox) -> Tensor:
        stops = tuple(lo + n for lo, n in zip(b.read, b.shape, strict=True))
        return apply(OPS["slice"], parts[b.operand], starts=b.read, stops=stops,
                     steps=(1,) * len(b.shape))

    me, n = group.index, group.n
    going: list[list[Tensor]] = [[] for _ in range(n)]
    coming: list[list[MovedBox]] = [[] for _ in range(n)]
    pieces = [(b, cut(b)) for b in boxes if b.source == b.target == me]
    for b in boxes:
        if b.source == me != b.target:
            going[b.target].append(F.reshape(cut(b), (prod(b.shape),)))
        elif b.target == me != b.source:
            coming[b.source].append(b)
    got = group.swap([F.concatenate(flat) if flat else None for flat in going],
                     [(sum(prod(b.shape) for b in own),) for own in coming])
    for flat, own in zip(got, coming, strict=True):
        at = 0
        for b in own:
            size = prod(b.shape)
            pieces.append((b, F.reshape(cut_along(flat, 0, at, at + size), b.shape)))
            at += size
    for b, piece in pieces:
        if b.shape == tuple(out.shape):
            return piece
        starts = Tensor(np.array(b.write, np.int32), as_type("int32"))
        out = F.dynamic_update_slice(out, piece, starts)
    return out


def by_group(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """run(group, x, to, **attrs) as the rule for GPUs of a collective that is called by hand."""
    def rule(x: Tensor, *rest: Tensor, axis: Any, mesh: Mesh | None, index: int,
             type: NumericType, to: NumericType | None = None, **attrs: Any) -> Tensor:
        if rest:
            raise UnsupportedTargetError(
                f"{name} to {to} rounds at random, which is done on hosts alone",
                hint="sum in f32, dtype=ts.f32, and cast the result")
        at = make_group(mesh, axis)
        group = GpuGroup(at.ranks, at.axis, at.index, type, f"{name} over {at.axis}")
        return run(group, x, to, **attrs)

    return rule


def cut_along(x: Tensor, dim: int, lo: int, hi: int) -> Tensor:
    """x[..., lo:hi, ...] along one dimension."""
    if (lo, hi) == (0, x.shape[dim]):
        return x
    starts, stops = [0] * x.ndim, list(x.shape)
    starts[dim], stops[dim] = lo, hi
    return apply(OPS["slice"], x, starts=tuple(starts), stops=tuple(stops), steps=(1,) * x.ndim)


__all__ = ["BLOCKS", "COPIED", "SCATTERED", "SUMS", "SWAP", "GpuGroup", "MovedBox",
           "adds_only_in_windows", "by_group", "cut_along", "move_boxes", "reduce_together"]
