"""slice, concatenate and pad along a split dimension: each rank sends others what they lack.

All three put boxes of their operands somewhere into the result, so nothing is gathered: the part
of a rank is made of the boxes that fall into it, wherever they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.graph import functions as F
from tessera.graph.ir import Node
from tessera.graph.op import Aval, GraphOp
from tessera.numerics import DType
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..collectives.exchange_ops import GpuGroup, MovedBox, move_boxes
from ..layout import Layout, Split
from ..partition import extents, local_shape, pieces
from ..ranks.array_bytes import byte_count, from_bytes, to_bytes
from ..ranks.envelope import here_in
from ..world import transport

Shape = tuple[int, ...]
Span = tuple[tuple[int, int], ...]  # [lo, hi) per dimension


@dataclass(frozen=True)
class Shift:
    """An operand whose element i becomes element i + offset of the result."""

    layout: Layout
    shape: Shape
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """What goes from a rank of the mesh to one of them: from operand number `operand`, a span of
    its part, to a span of the result's part."""

    source: int
    target: int
    operand: int
    read: Span
    write: Span

    @property
    def size(self) -> int:
        return int(np.prod([hi - lo for lo, hi in self.write], dtype=np.int64))


# --- which nodes, and where to ------------------------------------------------------------------
def shifts(node: Node, layouts: Sequence[Layout]) -> list[Shift] | None:
    """How the operands lie in the result of a node, None for one that does more than that."""
    name, attrs = node.op.name, node.attrs
    shapes = [extents(v.aval) for v in node.inputs]
    if name == "slice" and all(s == 1 for s in attrs["steps"]):
        offsets = [tuple(-s for s in attrs["starts"])]
    elif name == "pad" and not any(attrs["holes"]):
        offsets = [tuple(attrs["before"])]
    elif name == "concatenate":
        axis, at, offsets = attrs["axis"], 0, []
        for shape in shapes:
            offsets.append(tuple(at if d == axis else 0 for d in range(len(shape))))
            at += shape[axis]
    else:
        return None
    return [Shift(at, shape, offset)
            for at, shape, offset in zip(layouts, shapes, offsets, strict=False)]


def targets(node: Node, layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts of the result that those of the operands suggest: split alike where there is enough
    to split."""
    aval, found = node.outputs[0].aval, []
    for v, at in zip(node.inputs, layouts, strict=True):
        if at.ndim != aval.ndim or not any(s.axes for s in at.splits):
            continue
        splits = tuple(_fitting(at, d, extents(v.aval)[d], extents(aval)[d])
                       for d in range(aval.ndim))
        made = Layout(at.mesh, splits)
        if made not in found:
            found.append(made)
    return found


def _fitting(at: Layout, d: int, before: int, after: int) -> Split:
    split = at.splits[d]
    if before == after:
        return split
    return Split(split.axes) if after >= at.parts(d) else Split()


# --- who sends what to whom ---------------------------------------------------------------------
@lru_cache(maxsize=512)
def boxes(operands: tuple[Shift, ...], target: Layout, shape: Shape, dtype: DType
          ) -> tuple[Box, ...]:
    """Every box of the result, from a rank that has it: the one that needs it, else the one that
    sends least so far."""
    load: dict[int, int] = defaultdict(int)
    found = []
    for number, operand in enumerate(operands):
        holders = _holders(operand, dtype)
        for rank in range(target.mesh.size()):
            for piece in pieces(target, shape, rank, dtype):
                box = tuple(zip(piece.box.lo, piece.box.hi, strict=True))
                for (span, at), ranks in holders.items():
                    meet = _overlap(box, span)
                    if meet is None:
                        continue
                    giver = rank if rank in ranks else min(ranks, key=lambda r: (load[r], r))
                    made = Box(giver, rank, number, _within_part(meet, span, at),
                               _within_part(meet, box, piece.at))
                    load[giver] += made.size if giver != rank else 0
                    found.append(made)
    return tuple(found)


def _holders(operand: Shift, dtype: DType) -> dict[tuple[Span, Shape], list[int]]:
    """Each piece of an operand, in coordinates of the result, with the ranks that have it."""
    found: dict[tuple[Span, Shape], list[int]] = {}
    for rank in range(operand.layout.mesh.size()):
        for piece in pieces(operand.layout, operand.shape, rank, dtype):
            span = tuple((lo + o, hi + o) for lo, hi, o in
                         zip(piece.box.lo, piece.box.hi, operand.offset, strict=True))
            found.setdefault((span, piece.at), []).append(rank)
    return found


def _overlap(a: Span, b: Span) -> Span | None:
    meet = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return meet if all(lo < hi for lo, hi in meet) else None


def _within_part(span: Span, outer: Span, at: Shape) -> Span:
    """A span within a piece, in coordinates of the part that has the piece at `at`."""
    return tuple((lo - o[0] + a, hi - o[0] + a)
                 for (lo, hi), o, a in zip(span, outer, at, strict=True))


def received(node: Node, ins: Sequence[Layout], out: Layout) -> float:
    """Elements that a rank gets from others, on average."""
    every = _boxes_of(node, ins, out)
    return sum(b.size for b in every if b.source != b.target) / out.mesh.size()


def crossed(node: Node, ins: Sequence[Layout], out: Layout) -> tuple[str, ...]:
    """The axes along which something is sent."""
    mesh, pairs = out.mesh, {(b.source, b.target) for b in _boxes_of(node, ins, out)}
    coords = [(mesh.coords(a), mesh.coords(b)) for a, b in pairs]
    return tuple(axis for i, axis in enumerate(mesh.axes) if any(a[i] != b[i] for a, b in coords))


def _boxes_of(node: Node, ins: Sequence[Layout], out: Layout) -> tuple[Box, ...]:
    aval, found = node.outputs[0].aval, shifts(node, ins)
    assert found is not None
    return boxes(tuple(found), out, extents(aval), aval.dtype)


# --- on a rank ----------------------------------------------------------------------------------
def place_attrs(node: Node, ins: Sequence[Layout], out: Layout, rank: int) -> dict[str, Any]:
    """The attributes of `mesh_place` for a node on a rank."""
    aval = node.outputs[0].aval
    mine = tuple(b for b in _boxes_of(node, ins, out) if rank in (b.source, b.target))
    return {"boxes": mine, "rank": rank, "world": out.mesh.world_ranks,
            "shape": local_shape(out, extents(aval), rank, aval.dtype),
            "filled": node.op.name == "pad", "what": f"{node.op.name} of {aval}"}


def _copy_pieces(*parts: np.ndarray, boxes: tuple[Box, ...], rank: int, world: Shape, shape: Shape,
                 filled: bool, type: Any, what: str) -> np.ndarray:
    out = np.full(shape, parts[-1], parts[0].dtype) if filled else np.empty(shape, parts[0].dtype)
    to, come = defaultdict(list), defaultdict(list)
    for b in boxes:
        if b.source == b.target:
            out[_at(b.write)] = parts[b.operand][_at(b.read)]
        elif b.source == rank:
            to[world[b.target]].append(parts[b.operand][_at(b.read)].reshape(-1))
        else:
            come[world[b.source]].append(b)
    dtype = type.dtype
    buffers = {r: np.empty(byte_count(sum(b.size for b in got), dtype), np.uint8)
               for r, got in come.items()}
    transport().exchange({r: to_bytes(np.concatenate(sent), dtype) for r, sent in to.items()},
                         buffers, here_in(what))
    for r, got in come.items():
        values = iter(np.split(from_bytes(buffers[r], dtype, sum(b.size for b in got)),
                               list(_ends(got))))
        for b in got:
            out[_at(b.write)] = next(values).reshape([hi - lo for lo, hi in b.write])
    return out


def _ends(got: Sequence[Box]) -> Iterator[int]:
    end = 0
    for b in got[:-1]:
        end += b.size
        yield end


def _at(span: Span) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in span)


def _place_on_gpu(*parts: Tensor, boxes: tuple[Box, ...], rank: int, world: Shape, shape: Shape,
                  filled: bool, type: Any, what: str) -> Tensor:
    out = F.broadcast_to(parts[-1], shape) if filled else F.zeros(shape, type)
    moved = [MovedBox(b.source, b.target, b.operand, *(tuple(x) for x in (
        [hi - lo for lo, hi in b.write], [lo for lo, _ in b.read], [lo for lo, _ in b.write])))
        for b in boxes if b.size]
    return move_boxes(GpuGroup(tuple(world), "boxes", rank, type, what), parts, out, moved)


PLACE = GraphOp(
    "mesh_place",
    shape=lambda *xs, shape, **attrs: Aval(shape, xs[0].type),
    ref=_copy_pieces, effects=frozenset({"collective"}), expand_gpu=_place_on_gpu,
    differentiable=False,
    doc="boxes of the operands put into a part of the result, from the ranks that have them",
)
