"""Ring attention: exact attention over a sequence that is split over the ranks of a mesh axis.

    y = ts.ring_attention(q, k, v, causal=True, axis="sp")

Each rank keeps its rows of the queries; keys and values go round the ring of ranks, one block at a
time, and each rank adds up what every block gives. In a program alone, and where the sequence is
whole, it is plain attention in blocks.
Liu et al. 2023, arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.dims import divide, show_shape, size_of
from tessera.errors import ArgumentError, ShapeError
from tessera.graph import functions as F
from tessera.graph.flops import Flops
from tessera.graph.op import OPS, VIEW, Arg, Aval, GraphOp, NoRule, Sample, sample
from tessera.graph.operand import compute_type, dequantized, need_float, promote, public, store
from tessera.graph.ops.gather import stretch
from tessera.graph.trace import apply, current_builder
from tessera.numerics import NumericType
from tessera.tensor import Tensor

from ..collectives.exchange_ops import GpuGroup
from ..device_mesh import Mesh
from ..layout import Layout
from ..partition import intervals, local_shape
from ..ranks.group import Group
from ..sharding.partitioned_steps import (
    CONSTRAINTS,
    EXCHANGES,
    ExchangeStep,
    PartitionedOp,
    PlannedCollective,
)
from ..world import transport
from . import ring_graph
from .ring_steps import SequenceRing, attend, attend_back, relay, zigzag_rows

ONCE = NoRule("its derivative is made for reverse mode, once",
              "use ts.attention for forward mode and for second derivatives")


@public
def ring_attention(q: Any, k: Any, v: Any, *, causal: bool = True, axis: str = "sp",
                   scale: float | None = None, zigzag: bool = False) -> Tensor:
    """y = softmax(scale q k' + causal mask) v, with the sequence split over a mesh axis.

    q: [B, H, S, D]   k: [B, Hk, S, D]   v: [B, Hk, S, Dv]   y: [B, H, S, Dv] of the operands' type
    H is a multiple of Hk, as for `ts.attention`. Distributed operands are split along S over `axis`
    unless they are; the other dimensions stay as they lie. y lies as q does.
    scale    1 / sqrt(D) when None
    zigzag   each rank works on early and on late rows, so that causal ranks have equal work; costs
             one more exchange of q, k, v and y
    A rank holds its S/n rows, two blocks of keys and values, and the scores of 512 queries with one
    block. It receives (n - 1)/n of k and v forward; backward the same again, and their gradients.
    Blocks are sent on in the operands' type while they are used; sums are in f32 (f64 for f64).
    Raises ShapeError, DTypeError, AxisError for an axis that the mesh does not have.
    Liu et al. 2023, arXiv:2310.01889; zigzag: Brandon et al. 2023, arXiv:2311.09431, does the same
    with stripes.
    """
    a, b, c, numeric = _operands(q, k, v)
    mesh = next((x.layout.mesh for x in (a, b, c) if x.layout is not None),
                getattr(current_builder(), "mesh", None))
    if mesh is not None:
        mesh.position(axis)
        a, b, c = (apply(ALONG, x, axis=axis) for x in (a, b, c))
    B, H, S, D = a.shape
    Hk = b.shape[1]
    grouped = F.reshape(a, (B, Hk, divide(H, Hk), S, D))
    scale = 1.0 / math.sqrt(D) if scale is None else float(scale)
    y, _ = apply(RING, grouped, b, c, causal=bool(causal), scale=scale, zigzag=bool(zigzag))
    return store(F.reshape(y, (B, H, S, c.shape[-1])), numeric)


def _operands(*given: Any) -> tuple[Tensor, Tensor, Tensor, NumericType]:
    """The operands in one type, 16-bit ones as they are; and the type of the result."""
    xs = [dequantized(x) for x in given]
    shapes = ", ".join(show_shape(x.shape) for x in xs)
    q, k, v = xs
    if any(x.ndim != 4 for x in xs):
        raise ShapeError(f"ring_attention needs three tensors [B, H, S, D], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(f"queries, keys and values do not fit: {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ShapeError(f"queries and keys must be of one sequence: {shapes}",
                         hint="ts.attention takes keys of another length")
    if divide(q.shape[1], k.shape[1]) is None:
        raise ShapeError(f"the number of query heads must be a multiple of the key heads: {shapes}")
    wide, numeric = promote(*xs)
    need_float(wide[0], "ring_attention")
    narrow = len({x.type for x in xs}) == 1 and q.dtype.bits == 16
    return (*(xs if narrow else wide), numeric)  # type: ignore[return-value]


# --- the sequence on the axis --------------------------------------------------------------------
def _along(node: Any, at: Sequence[Layout]) -> Layout:
    """[B, H, S, D] as it lies, with S split over the axis."""
    home, axis = at[0].settled(), node.attrs["axis"]
    held = home.dim_of(axis)
    if held == 2:
        return home
    if held is not None:
        home = home.gathered((axis,))
    return home.with_split(2, (*home.axes_of(2), axis))


ALONG = GraphOp(
    "along_sequence",
    shape=lambda x, axis: x,
    ref=lambda x, axis: x,
    vjp=lambda g, y, x, axis: (apply(ALONG, g, axis=axis),),
    jvp=lambda ts, y, x, axis: apply(ALONG, ts[0], axis=axis),
    batch=lambda size, batched, x, axis: (x, batched[0]),
    memory=VIEW,
    samples=(sample((1, 2, 3, 4), axis="sp"),),
    doc="[B, H, S, D] with its sequence split over a mesh axis",
)
CONSTRAINTS["along_sequence"] = _along


# --- the ops -------------------------------------------------------------------------------------
def _wide(x: Aval) -> NumericType:
    return compute_type(x.type)


def _ring_shape(q: Aval, k: Aval, v: Aval, **attrs: Any) -> tuple[Aval, Aval]:
    if q.ndim != 5 or q.shape[:2] + q.shape[3:4] != k.shape[:3] or k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"{show_shape(q.shape)}, {show_shape(k.shape)} and {show_shape(v.shape)} "
                         "are not [B, H, G, S, D], [B, H, S, D] and [B, H, S, Dv]")
    return (Aval((*q.shape[:-1], v.shape[-1]), _wide(q)), Aval(q.shape[:-1], _wide(q)))


def _ring_ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool, scale: float,
              zigzag: bool, ring: SequenceRing | None = None, types: Any = (None, None)) -> tuple:
    return attend(ring or _alone(q), q, k, v, types, causal, scale, _numpy(q))


def _numpy(q: np.ndarray) -> np.dtype:
    return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


def _alone(q: np.ndarray) -> SequenceRing:
    return SequenceRing(None, (np.arange(q.shape[-2]),))


def _ring_vjp(gs: tuple, ys: tuple, q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> tuple:
    g, of_lse = gs
    y, lse = ys
    g = F.zeros_like(y) if g is None else g
    delta = F.sum(g * y, axis=-1)
    delta = delta if of_lse is None else delta - of_lse
    return apply(RING_BACK, q, k, v, lse, delta, g, **attrs)


def _back_shape(q: Aval, k: Aval, v: Aval, lse: Aval, delta: Aval, g: Aval, **attrs: Any) -> tuple:
    return tuple(Aval(x.shape, _wide(q)) for x in (q, k, v))


def _back_ref(q: np.ndarray, k: np.ndarray, v: np.ndarray, lse: np.ndarray, delta: np.ndarray,
              g: np.ndarray, *, causal: bool, scale: float, zigzag: bool,
              ring: SequenceRing | None = None, types: Any = (None, None),
              out_type: Any = None) -> tuple:
    return attend_back(ring or _alone(q), q, k, v, lse, delta, g, types, causal, scale, _numpy(q),
                       out_type)


def _flops(widths: Callable[[int, int], int]) -> Flops:
    """Scores and values of a rank's rows with all rows, 2 S T (D + Dv) a head; backward the scores
    again and four products more; half of it when causal."""
    def rule(ins: Sequence[tuple], outs: Sequence[tuple], *, causal: bool,
             rows: Sequence | None = None, **attrs: Any) -> float:
        q, k, v = ins[:3]  # [B, H, G, S, D], [B, H, S, D], [B, H, S, Dv]
        T = k[2] if rows is None else sum(map(len, rows))
        return 2.0 * math.prod(q[:-1]) * T * widths(q[-1], v[-1]) * (0.5 if causal else 1.0)

    return rule


FORWARD, BACKWARD = _flops(lambda D, Dv: D + Dv), _flops(lambda D, Dv: 3 * D + 2 * Dv)


def _merged_batch(op: str) -> Any:
    """vmap: the batch becomes part of B."""

    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        wide = [stretch(x, size, b) for x, b in zip(xs, batched, strict=True)]
        flat = [F.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in wide]
        out = apply(OPS[op], *flat, **attrs)
        return tuple(F.reshape(y, (size, y.shape[0] // size if size else 0, *y.shape[1:]))
                     for y in out), True

    return rule


def _fixed(*shapes: tuple[int, ...], **attrs: Any) -> Sample:
    """A sample whose derivatives the rules above do not have in forward mode."""
    return Sample(tuple(Arg(s, diff=False) for s in shapes), {"zigzag": False, **attrs})


RING = GraphOp(
    "ring_attention",
    shape=_ring_shape, ref=_ring_ref, vjp=_ring_vjp, no_jvp=ONCE, multi=True,
    batch=_merged_batch("ring_attention"),
    axes="bh_s_,bhs_,bhs_->bh_s_,bh_s",
    samples=(_fixed((2, 2, 1, 5, 4), (2, 2, 5, 4), (2, 2, 5, 3), causal=True, scale=0.5),
             _fixed((1, 1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3), causal=False, scale=1.0)),
    flops=FORWARD,
    matmul=True,
    doc="attention over a sequence that ranks share, and the log of the sums of its weights",
)
RING_BACK = GraphOp(
    "ring_attention_back",
    shape=_back_shape, ref=_back_ref, no_vjp=ONCE, no_jvp=ONCE, multi=True,
    batch=_merged_batch("ring_attention_back"),
    axes="bh_s_,bhs_,bhs_,bh_s,bh_s,bh_s_->bh_s_,bhs_,bhs_",
    samples=(_fixed((1, 2, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 3), (1, 2, 2, 5), (1, 2, 2, 5),
                    (1, 2, 2, 5, 3), causal=True, scale=0.5),),
    flops=BACKWARD,
    matmul=True,
    doc="slopes of queries, keys and values of ring_attention",
)


# --- on a mesh -----------------------------------------------------------------------------------
SEQUENCE = {"ring_attention": (-2, -2, -2), "ring_attention_back": (-2, -2, -2, -1, -1, -2)}
RESULTS = {"ring_attention": (-2, -1), "ring_attention_back": (-2, -2, -2)}


def _split(step: PartitionedOp) -> tuple[str, ...]:
    """The axes that split the sequence."""
    return step.ins[1].axes_of(2)


def _planned(step: PartitionedOp) -> list[PlannedCollective]:
    axes, node = _split(step), step.node
    if not axes or node.op.name not in SEQUENCE:
        return []
    layout, k, v = step.ins[1], *node.inputs[1:3]
    n = layout.mesh.size(axes)
    parts = math.prod(layout.parts(d) for d in range(layout.ndim))
    elements = int(size_of(k.aval.shape)) + int(size_of(v.aval.shape))
    narrow = elements / parts * k.aval.dtype.bits / 8

    def entry(size: float, dtype: Any, why: str, times: int) -> PlannedCollective:
        return PlannedCollective("permute", axes, round(size), elements, str(dtype), why,
                                 node.where, times)

    found = [entry(narrow, k.aval.type, "ring_attention sends keys and values on", n - 1)]
    if node.op.name == "ring_attention_back":
        wide = compute_type(k.aval.type)
        found.append(entry(elements / parts * wide.dtype.bits / 8, wide,
                           "ring_attention sends slopes of keys and values on", n))
    if node.attrs["zigzag"]:
        many = [v for v, d in zip(node.inputs, SEQUENCE[node.op.name], strict=True)]
        many += node.outputs
        total = sum(int(size_of(v.aval.shape)) * v.aval.dtype.bits / 8 for v in many)
        found.append(PlannedCollective(
            "all_to_all", axes, round(total / parts * (n - 1) / n), elements, str(k.aval.type),
            "ring_attention balances early and late rows", node.where))
    return found


def _on_rank(step: PartitionedOp, parts: Sequence[Tensor], rank: int) -> tuple[Tensor, ...]:
    """The op on a rank's parts, with the rows that each rank of the ring has."""
    layout, node = step.ins[1], step.node
    if any(at.splits[d] != layout.splits[2] for at, d in
           zip(step.ins, SEQUENCE[node.op.name], strict=True)):
        raise ArgumentError(f"{node.op.name}: queries and keys are split differently")
    mesh, axes, S = layout.mesh, _split(step), node.inputs[1].aval.shape[2]
    members = sorted(mesh.group(rank, axes), key=lambda r: layout.part(r, 2))
    rows = tuple(
        np.concatenate([np.arange(lo, hi) for lo, hi in
                        intervals(layout, 2, S, layout.part(r, 2))] or [np.arange(0)])
        for r in members)
    made = [Aval(local_shape(at, v.aval.shape, rank), v.aval.type)  # type: ignore[arg-type]
            for v, at in zip(node.outputs, step.outs, strict=True)]
    return apply(RING_PART, *parts, name=node.op.name, mesh=mesh, members=members, axes=axes,
                 rows=rows, types=tuple(x.type for x in parts), made=tuple(made),
                 what=f"ring_attention over {', '.join(axes)}", **node.attrs)


def _part_ref(*arrays: np.ndarray, name: str, mesh: Mesh, members: Sequence[int],
              axes: tuple[str, ...], rows: tuple, types: tuple, made: tuple, what: str,
              zigzag: bool, **attrs: Any) -> tuple:
    ranks = tuple(mesh.world_ranks[r] for r in members)
    ring = SequenceRing(Group(transport(), ranks, "*".join(axes)), rows, what)
    outs, xs = [a.type.dtype for a in made], list(arrays)
    even = zigzag_rows(sum(map(len, rows)), len(members)) if zigzag else rows
    work = SequenceRing(ring.group, even, what)
    if zigzag:
        xs = [relay(ring, even, x, d, t.dtype)
              for x, d, t in zip(xs, SEQUENCE[name], types, strict=True)]
    sent = tuple(t.dtype for t in types[1:3])
    if name == "ring_attention":
        found: tuple = _ring_ref(*xs, zigzag=zigzag, ring=work, types=sent, **attrs)
    else:
        found = _back_ref(*xs, zigzag=zigzag, ring=work, types=sent, out_type=outs[1], **attrs)
    if zigzag:
        found = tuple(relay(work, rows, y, d, t)
                      for y, d, t in zip(found, RESULTS[name], outs, strict=True))
    return found


def _part_on_gpu(*xs: Tensor, name: str, mesh: Mesh, members: Sequence[int], axes: tuple[str, ...],
                 rows: tuple, types: tuple, made: tuple, what: str, zigzag: bool, causal: bool,
                 scale: float) -> tuple[Tensor, ...]:
    ranks = tuple(mesh.world_ranks[r] for r in members)
    group = GpuGroup(ranks, "*".join(axes), ranks.index(transport().rank), types[0], what)
    even = zigzag_rows(sum(map(len, rows)), len(members)) if zigzag else rows
    ring, work = ring_graph.GpuRing(group, rows), ring_graph.GpuRing(group, even)
    if zigzag:
        xs = tuple(ring_graph.relay(ring, even, x, d)
                   for x, d in zip(xs, SEQUENCE[name], strict=True))
        shapes = [list(a.shape) for a in made]
        for shape, d in zip(shapes, RESULTS[name], strict=True):
            shape[d] = len(even[group.index])
        wanted = tuple(Aval(tuple(s), a.type) for s, a in zip(shapes, made, strict=True))
    else:
        wanted = made
    run: Any = ring_graph.attend if name == RING.name else ring_graph.attend_back
    found = run(work, *xs, causal=causal, scale=scale, made=wanted)
    if zigzag:
        found = tuple(ring_graph.relay(work, rows, y, d)
                      for y, d in zip(found, RESULTS[name], strict=True))
    return tuple(found)


RING_PART = GraphOp(
    "mesh_ring_attention",
    shape=lambda *xs, made, **attrs: made,
    ref=_part_ref, multi=True, effects=frozenset({"collective"}), expand_gpu=_part_on_gpu,
    differentiable=False,
    flops=lambda ins, outs, *, name, **attrs: (BACKWARD if name == RING_BACK.name else FORWARD)(
        ins, outs, **attrs),
    matmul=True,
    doc="ring attention, or its derivative, on the rows of one rank",
)
for _name in SEQUENCE:
    EXCHANGES[_name] = ExchangeStep(_planned, _on_rank)

__all__ = ["ring_attention"]
