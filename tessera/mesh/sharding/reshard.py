"""From one layout to another: who sends which box to whom.

`plan` is a pure function of two layouts and a shape. The layouts may lie on different meshes: a
checkpoint of 4 ranks is read by 6 that way, and a tensor goes from one part of a mesh to another.
`execute` carries a plan out on arrays, `reshard` on the ranks of a transport, with one message per
pair of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.dims import show_shape
from tessera.errors import ArgumentError, ShapeError
from tessera.numerics import DType

from ...lazy_dataclass import dataclass
from ..domain import Rect
from ..layout import Layout
from ..partition import local_shape, need_dims, pieces
from ..ranks.array_bytes import byte_count, from_bytes, to_bytes
from ..ranks.envelope import here_in
from ..ranks.transport import Transport


@dataclass(frozen=True)
class BoxMove:
    """One box that goes from a world rank to a world rank; `source_at` and `target_at` are where
    it begins in their parts. A rank's own data moves too, from itself to itself."""

    source: int
    target: int
    box: Rect
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]

    def read(self, part: np.ndarray) -> np.ndarray:
        return part[Rect(self.box.shape, self.source_at).slices()]

    def write(self, part: np.ndarray, values: np.ndarray) -> None:
        part[Rect(self.box.shape, self.target_at).slices()] = values


@dataclass(frozen=True)
class ReshardPlan:
    """The moves that bring a tensor from one layout to another; every element that a rank needs
    comes to it once."""

    shape: tuple[int, ...]
    dtype: DType | None
    source: Layout
    target: Layout
    moves: tuple[BoxMove, ...]

    @property
    def sent(self) -> dict[tuple[int, int], int]:
        """Bytes by (from, to), of what changes ranks; elements when the type is not known."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for move in self.moves:
            if move.source != move.target:
                found[move.source, move.target] += _bytes(move.box, self.dtype)
        return dict(found)

    @property
    def total(self) -> int:
        """Bytes that change ranks, in all."""
        return sum(self.sent.values())

    def __str__(self) -> str:
        unit = "bytes" if self.dtype else "elements"
        head = (f"reshard {show_shape(self.shape)}: {self.source} -> {self.target}\n"
                f"{self.total} {unit} in {len(self.sent)} messages")
        rows = [f"  {m.source} -> {m.target}  {m.box}" for m in self.moves if m.source != m.target]
        return "\n".join([head, *rows])


def _bytes(box: Rect, dtype: DType | None) -> int:
    return box.size if dtype is None else byte_count(box.size, dtype)


@lru_cache(maxsize=512)
def plan(source: Layout, target: Layout, shape: tuple[int, ...], dtype: DType | None = None
         ) -> ReshardPlan:
    """The moves from `source` to `target` for a tensor of this shape and type.

    A rank takes what it has itself; of other holders of a box, the one that sends least so far.
    Raises ShapeError for layouts of another number of dimensions, ArgumentError while a
    reduction is pending: its terms are added by a collective, not moved.
    """
    for layout in (source, target):
        need_dims(layout, shape)
        if layout.pending:
            raise ArgumentError(f"{layout} has a pending {layout.op}, which moving cannot do",
                                hint="all_reduce gives every rank the result, reduce_scatter a "
                                "block of it; then reshard")
    holders = _holders(source, shape, dtype)
    load: dict[int, int] = defaultdict(int)
    moves = []
    for number, rank in enumerate(target.mesh.world_ranks):
        for piece in pieces(target, shape, number, dtype):
            for ranks, held in holders:
                overlap = piece.box & held.box
                if not overlap.size:
                    continue
                giver = rank if rank in ranks else min(ranks, key=lambda r: (load[r], r))
                load[giver] += overlap.size if giver != rank else 0
                moves.append(BoxMove(giver, rank, overlap, _inside(overlap, held.box, held.at),
                                     _inside(overlap, piece.box, piece.at)))
    return ReshardPlan(shape, dtype, source, target, tuple(moves))


def _holders(layout: Layout, shape: tuple[int, ...], dtype: DType | None) -> list:
    """Each distinct piece of a layout with the world ranks that hold it, in their order."""
    found: dict = {}
    for number, rank in enumerate(layout.mesh.world_ranks):
        for piece in pieces(layout, shape, number, dtype):
            found.setdefault(piece, []).append(rank)
    return [(ranks, piece) for piece, ranks in found.items()]


def _inside(box: Rect, outer: Rect, at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - o + a for b, o, a in zip(box.lo, outer.lo, at, strict=True))


def execute(made: ReshardPlan, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every rank's part after the plan, from every rank's part before it: what a plan means."""
    out = [np.empty(local_shape(made.target, made.shape, r, made.dtype), parts[0].dtype)
           for r in range(made.target.mesh.size())]
    before = dict(zip(made.source.mesh.world_ranks, parts, strict=True))
    after = dict(zip(made.target.mesh.world_ranks, out, strict=True))
    for move in made.moves:
        move.write(after[move.target], move.read(before[move.source]))
    return out


def reshard(transport: Transport, made: ReshardPlan, part: np.ndarray | None, dtype: DType,
            what: str | None = None) -> Any:
    """This rank's part after the plan; all ranks of both meshes call it.

    part: its part before, in the elements of `dtype`; None on a rank that is not in the source's
    mesh, as the result is on one not in the target's   what: the call it belongs to, for messages

    Raises ShapeError when `part` is not what the plan's source layout gives this rank.
    """
    me = transport.rank
    part = _part_before(made, part, me, dtype)
    expected = _part_shape(made.target, made, me)
    out = np.empty((0,) if expected is None else expected, part.dtype)
    to, come = _by_peer(made, me)
    sends = {r: to_bytes(np.concatenate([m.read(part).reshape(-1) for m in moves]), dtype)
             for r, moves in to.items()}
    buffers = {r: np.empty(byte_count(sum(m.box.size for m in moves), dtype), np.uint8)
               for r, moves in come.items()}
    whole = f"{dtype.name}{show_shape(made.shape)}"
    label = here_in(what or f"reshard({whole}) from {made.source} to {made.target}", whole,
                    made.source.describe(), made.target.describe())
    transport.exchange(sends, buffers, label)
    for rank, moves in come.items():
        values, at = from_bytes(buffers[rank], dtype, sum(m.box.size for m in moves)), 0
        for move in moves:
            move.write(out, values[at:at + move.box.size].reshape(move.box.shape))
            at += move.box.size
    for move in made.moves:
        if move.source == move.target == me:
            move.write(out, move.read(part))
    return None if expected is None else out


def _part_shape(layout: Layout, made: ReshardPlan, rank: int) -> tuple[int, ...] | None:
    """The shape of a world rank's part; None when the layout's mesh does not have it."""
    world = layout.mesh.world_ranks
    return local_shape(layout, made.shape, world.index(rank), made.dtype) if rank in world else None


def _part_before(made: ReshardPlan, part: np.ndarray | None, me: int, dtype: DType) -> np.ndarray:
    expected = _part_shape(made.source, made, me)
    held = None if part is None else part.shape
    if held != expected:
        shown = [("nothing" if s is None else show_shape(s)) for s in (held, expected)]
        raise ShapeError(f"rank {me} holds {shown[0]}; the plan begins with {shown[1]}: "
                         f"{made.source}")
    return np.empty((0,), dtype.numpy) if part is None else part


def _by_peer(made: ReshardPlan, me: int) -> tuple[dict[int, list[BoxMove]],
                                                  dict[int, list[BoxMove]]]:
    """What this rank sends, and what it gets, by the other rank."""
    to, come = defaultdict(list), defaultdict(list)
    for move in made.moves:
        if move.source == me != move.target:
            to[move.target].append(move)
        elif move.target == me != move.source:
            come[move.source].append(move)
    return to, come
