"""Tensors in a checkpoint that several ranks write and read together.

A part of a distributed tensor is stored as the boxes of the whole that it has; of ranks with the
same boxes the first one writes them. Reading puts together whatever boxes a rank now needs, so a
run continues on another mesh, or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import CheckpointError
from ..mesh.domain import Rect
from ..mesh.partition import pieces
from ..mesh.ranks.messages import gather, raised_on_all, share
from ..mesh.ranks.transport import Transport
from ..mesh.tensor import DistTensor
from ..tensor import Tensor
from .values import Plain

Claims = dict[str, list[Any]]  # by path: first rank that has the tensor, what it is, its layout


def owners(leaves: Mapping[str, Tensor | Plain], here: Transport) -> dict[str, int]:
    """The rank that a leaf belongs to, for every path that some rank has: the first that has it,
    of a distributed tensor the first of its mesh. Stages of a pipeline have different paths, or the
    same tensor twice; then one of them writes it.

    Raises CheckpointError, on every rank, when two have different tensors, or numbers, under one
    path.
    """
    mine = {path: _claim(x, here.rank) for path, x in leaves.items()}
    if here.size == 1:
        return {path: rank for path, (rank, *_) in mine.items()}
    told, found = gather(mine, here), {}
    with raised_on_all(CheckpointError):
        found = _settled(told)
    return share(found, here)


def _claim(x: Tensor | Plain, rank: int) -> list[Any]:
    if not isinstance(x, Tensor):
        return [rank, f"{type(x).__name__} {x!r}", None]
    what = f"{x.type}{show_shape(x.shape)}"
    if isinstance(x, DistTensor):
        return [x.mesh.world_ranks[0], f"distributed {what}", x.layout.describe()]
    return [rank, what, None]


def _settled(told: Sequence[Claims]) -> dict[str, int]:
    first: dict[str, tuple[int, list[Any]]] = {}
    for rank, claims in enumerate(told):
        for path, (owner, what, layout) in claims.items():
            one, held = first.setdefault(path, (rank, [owner, what, layout]))
            if held[1] != what or (held[0] == owner and held[2] != layout):
                raise CheckpointError(
                    f"{path} is {held[1]} {held[2] or ''} on rank {one} and {what} {layout or ''} "
                    f"on rank {rank}".replace("  ", " "),
                    hint="ranks that save something under the same path have the same")
    return {path: held[0] for path, (_, held) in first.items()}


def need_settled(path: str, x: DistTensor) -> None:
    """Raise CheckpointError for terms of a sum that is still pending."""
    if x.layout.pending:
        raise CheckpointError(f"{path} is {x.layout}: each rank has a term of it, not a part",
                              hint="ts.shard(x, spec) adds them up")


def own_pieces(path: str, x: DistTensor) -> Iterator[tuple[str, Rect, Tensor]]:
    """What this process writes of a distributed tensor: names, boxes of the whole, elements."""
    layout = x.layout
    for rank, part in x.held.items():
        if layout.mesh.index(rank, layout.repeated) != 0:
            continue
        array = part.array
        if not x.size and rank == 0:
            yield f"{path}@0.0", Rect(x.shape), Tensor(np.empty(x.shape, array.dtype), x.type)
        for i, piece in enumerate(pieces(layout, x.shape, rank, x.dtype)):
            if piece.box.size:
                box = array[Rect(piece.box.shape, piece.at).slices()].copy(order="C")
                yield f"{path}@{rank}.{i}", piece.box, Tensor(np.asarray(box), x.type)


def fill_part(x: DistTensor, rank: int, boxes: Sequence[tuple[Rect, Callable[[], np.ndarray]]]
              ) -> np.ndarray:
    """A rank's part of a tensor that lies as x, from boxes that cover the whole, each with a
    function that reads it. Those that the part does not meet are not read."""
    out = np.empty(x.held[rank].shape, x.dtype.numpy)
    for piece in pieces(x.layout, x.shape, rank, x.dtype):
        for box, read in boxes:
            overlap = piece.box & box
            if overlap.size:
                out[_inside(overlap, piece.box, piece.at)] = read()[
                    _inside(overlap, box, (0,) * x.ndim)]
    return out


def _inside(box: Rect, outer: Rect, at: Sequence[int]) -> tuple[slice, ...]:
    """Where a box lies in an array that holds `outer` from `at` on."""
    low = [b - o + a for b, o, a in zip(box.lo, outer.lo, at, strict=True)]
    return Rect(box.shape, low).slices()
