"""Matmuls beside the collective of their operand or of their result, on meshes of GPUs.

    y = reduce_scatter(x @ w)      in parts of its rows: while one is reduced the next is multiplied
    y = all_gather(x) @ w          this rank's own rows at once, those of others when they are there

Parts of rows are runs of memory: each is read and written where the whole lies. Whether it pays is
what the model of the planner says (planning/fabric.py). A collective that has another matmul beside
it anyway, such as that of a gradient which the optimizer reads, stays whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from tessera import hooks
from tessera.graph import functions as F
from tessera.graph.trace import apply, at_line
from tessera.tensor import Tensor

from ..collectives.exchange_ops import COPIED, cut_along
from ..device_mesh import Mesh
from ..layout import Layout, Split
from ..partition import extents, local_shape
from .collective_order import REDUCTIONS
from .layout_change_ops import ALL_REDUCE, apply_hops
from .layout_changes import Hop
from .narrow_terms import as_sent, rounds_terms, term_dtype, wide_terms
from .partitioned_steps import CutProduct, Held, LayoutHop, PartitionedOp, Step, reads
from .rounded_sums import halves_of, halves_us, two_hops

Shares = tuple[int, ...]
ALL_REDUCED = "all_reduce"
# How large parts are beside each other. A small one first: nothing is beside its matmul.
PARTS = ((1, 1), (1, 1, 1, 1), (1,) * 8, (1, 1, 2, 4), (1, 2, 2, 3))
BLOCKS = 32  # of NCCL's kernels, for which matmuls leave multiprocessors
ROWS = 128  # a part has a multiple of so many: blocks of matmuls stay whole
# What a part's message costs beside its share: launches, bandwidth that it is too short for; and
# how much longer a matmul takes beside it. See "Matmuls with a collective" in
# docs/internals/ranks_measured.md for what was measured.
MESSAGE_US = 60.0
BESIDE = 1.3
ROWS_US = 20.0  # of a matmul in two or three, with one message
LEAST_GAIN = 1.05  # below, the model is no better than that


def cut_products(steps: Sequence[Step], mesh: Mesh) -> list[Step]:
    """The steps with matmuls in parts where that pays."""
    return _reduced_in_parts(_own_rows_first(steps, mesh), mesh)


# --- all_gather, matmul --------------------------------------------------------------------------
def _own_rows_first(steps: Sequence[Step], mesh: Mesh) -> list[Step]:
    gathered: dict[Held, LayoutHop] = {}  # since the last matmul
    out: list[Step] = []
    for step in steps:
        if isinstance(step, LayoutHop) and step.hop.kind == "all_gather" and step.hop.dim == 0 and (
                _is_even(step.hop.source, step)):
            gathered[step.value, step.hop.target] = step
        elif isinstance(step, PartitionedOp) and _is_product(step):
            move = gathered.get((step.node.inputs[0], step.ins[0]))
            if move is not None and _gather_pays(step, move, mesh):
                if not move.blocks:
                    at = out.index(move)
                    out[at] = move = replace(move, blocks=BLOCKS)
                step = CutProduct(step, move, (1,) * mesh.size(move.hop.axes), ())
            gathered = {} if move is None else {(move.value, move.hop.target): move}
        out.append(step)
    return out


def _gather_pays(step: PartitionedOp, move: LayoutHop, mesh: Mesh) -> bool:
    n = mesh.size(move.hop.axes)
    whole, comes = _product_us(step, mesh), _move_us(move, mesh, 1)
    rows = local_shape(move.hop.source, extents(move.value.aval), 0, move.value.aval.dtype)[0]
    cut = max(comes, whole / n) + whole * (n - 1) / n + ROWS_US
    return rows % ROWS == 0 and comes + whole > LEAST_GAIN * cut


# --- matmul, reduction ---------------------------------------------------------------------------
def _reduced_in_parts(steps: Sequence[Step], mesh: Mesh) -> list[Step]:
    readers = Counter(held for step in steps for held in reads(step))
    rounded = {(s.node.inputs[0], s.ins[0]): s for s in steps
               if isinstance(s, PartitionedOp) and rounds_terms(s.node) and s.outs[0].pending}
    by_source = {(s.value, s.hop.source): s for s in steps
                 if isinstance(s, LayoutHop) and s.hop.kind in REDUCTIONS}
    behind = {(s.node.inputs[0], s.ins[0]): s for s in steps
              if isinstance(s, PartitionedOp) and s.node.op.name == "cast"}
    found: dict[Step, CutProduct] = {}
    gone: set[Step] = set()
    for i, step in enumerate(steps):
        if not isinstance(step, PartitionedOp) or not _is_product(step):
            continue
        before = rounded.get(step.makes[0])
        term = step.makes[0] if before is None else before.makes[0]
        move = by_source.get(term)
        if move is None or readers[step.makes[0]] != 1 or readers[term] != 1:
            continue
        made = (move.value, move.hop.target)
        cast = behind.get(made) if readers[made] == 1 else None
        if _multiplies_before(steps[i + 1:], made if cast is None else cast.makes[0]):
            continue
        shares = _best_shares(step, move, mesh, cast)
        if shares == (1,):
            continue
        found[step] = CutProduct(step, move, shares, () if cast is None else (cast,),
                                 _halves(step, move, mesh, cast, shares),
                                 () if before is None else (before,))
        gone.update(s for s in (before, move, cast) if s is not None)
    return [found.get(s, s) for s in steps if s not in gone]


def _multiplies_before(steps: Sequence[Step], result: Held) -> bool:
    """Whether there is a matmul in front of the first step that reads a value."""
    for step in steps:
        if result in reads(step):
            return False
        if isinstance(step, CutProduct) or _is_matmul(step):
            return True
    return False


def _is_matmul(step: Step) -> bool:
    return isinstance(step, PartitionedOp) and step.node.op.name == "matmul"


def _best_shares(step: PartitionedOp, move: LayoutHop, mesh: Mesh, cast: PartitionedOp | None
                 ) -> Shares:
    """(1,): as a whole."""
    rows = _rows(step)
    blocks = mesh.size(move.hop.axes) if _scatters_rows(move) else 1
    if blocks > 1 and (move.hop.source.splits[0].axes or not _is_even(move.hop.target, move)):
        return (1,)
    whole = _product_us(step, mesh)
    best: Shares = (1,)
    least = (whole + _sent_us(step, move, mesh, cast, (1,), 1)) / LEAST_GAIN
    for shares in PARTS:
        if rows % (sum(shares) * blocks * ROWS):
            continue
        us = in_parts_us(shares, whole, [_sent_us(step, move, mesh, cast, shares, share)
                                         for share in shares])
        if us < least:
            best, least = shares, us
    return best


def in_parts_us(shares: Shares, whole: float, sent: Sequence[float]) -> float:
    """Of a matmul of `whole` in parts. Each is sent when it is multiplied and the one before it was
    sent, and multiplied when the last but one was: that is read in between."""
    multiplied = done = before = 0.0
    for c, (share, us) in enumerate(zip(shares, sent, strict=True)):
        part = whole * share / sum(shares)
        multiplied = max(multiplied, before) + (part * BESIDE if c else part)
        before, done = done, max(done, multiplied) + us
    return done


def _halves(step: PartitionedOp, move: LayoutHop, mesh: Mesh, cast: PartitionedOp | None,
            shares: Shares) -> tuple[Hop, Hop] | None:
    """Of an all_reduce of parts of rows that is rounded between them, or whose terms are narrow."""
    if move.hop.kind != ALL_REDUCED or _rows(step) % (sum(shares) * mesh.size(move.hop.axes)):
        return None
    narrow = move.value.aval.dtype
    if term_dtype(move.value, mesh.size(move.hop.axes)) is not narrow:
        return two_hops(move, mesh, narrow, narrow)
    return None if cast is None else halves_of(move, cast, mesh)


def _sent_us(step: PartitionedOp, move: LayoutHop, mesh: Mesh, cast: PartitionedOp | None,
             shares: Shares, share: int) -> float:
    """Of the collective of one part."""
    parts, message = sum(shares) / share, MESSAGE_US if len(shares) > 1 else 0.0
    if _halves(step, move, mesh, cast, shares) is None:
        return _move_us(move, mesh, parts) + message
    gathered = move.value if cast is None else cast.node.outputs[0]
    wide = term_dtype(move.value, mesh.size(move.hop.axes))
    return halves_us(move, mesh, wide, gathered.aval.dtype, parts) + 2 * message


def _scatters_rows(move: LayoutHop) -> bool:
    return move.hop.kind == "reduce_scatter" and move.hop.dim == 0


# --- what is cut, and how long it takes ----------------------------------------------------------
def _is_product(step: PartitionedOp) -> bool:
    """Rows times a matrix, of extents that every rank has alike."""
    node = step.node
    return node.op.name == "matmul" and not step.bodies and step.placed is None and (
        node.inputs[0].aval.ndim > 1 and node.inputs[1].aval.ndim == 2) and all(
        not split.cyclic and extents(v.aval)[d] % at.parts(d) == 0
        for v, at in zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
        for d, split in enumerate(at.splits))


def _is_even(layout: Layout, move: LayoutHop) -> bool:
    split = layout.splits[0]
    return not split.cyclic and split.unit == 1 and (
        extents(move.value.aval)[0] % layout.parts(0) == 0)


def _rows(step: PartitionedOp) -> int:
    v = step.node.inputs[0]
    return local_shape(step.ins[0], extents(v.aval), 0, v.aval.dtype)[0]


def _product_us(step: PartitionedOp, mesh: Mesh) -> float:
    (a, _), (y,) = step.node.inputs, step.node.outputs
    inner = local_shape(step.ins[0], extents(a.aval), 0, a.aval.dtype)[-1]
    out = prod(local_shape(step.outs[0], extents(y.aval), 0, y.aval.dtype))
    return hooks.step_times.get().matmul_us(2.0 * out * inner, a.aval.dtype, mesh)


def _move_us(move: LayoutHop, mesh: Mesh, parts: float) -> float:
    """Of one of so many parts of a collective. Its size is that of what is whole."""
    whole = move.hop.target if move.hop.kind == "all_gather" else move.hop.source
    shape, dtype = extents(move.value.aval), move.value.aval.dtype
    sent = dtype if move.hop.kind == "all_gather" else term_dtype(move.value,
                                                                  mesh.size(move.hop.axes))
    size = prod(local_shape(whole, shape, 0, dtype)) * sent.bits / 8
    return hooks.step_times.get().collective_us(move.hop.kind, size / parts, mesh, move.hop.axes)


# --- on one rank ---------------------------------------------------------------------------------
def run_cut(step: CutProduct, given: Mapping[Held, Tensor], rank: int, wide: bool, copied: bool
            ) -> Tensor:
    """The result, of this rank's parts of what the step reads. wide: narrow terms are sent wide
    copied: sums are brought to where the result lies"""
    a, b = step.product.node.inputs
    weights = given[b, step.product.ins[1]]
    if step.gathers:
        return _own_first(step, given[a, step.move.hop.source], given[a, step.move.hop.target],
                          weights, rank)
    return _in_parts(step, given[a, step.product.ins[0]], weights, rank, wide, copied)


def _own_first(step: CutProduct, own: Tensor, rows: Tensor, weights: Tensor, rank: int) -> Tensor:
    """own: [R, ..., K]   rows: [n R, ..., K], of all   weights: [K, N]"""
    R, node = own.shape[0], step.product.node
    at = step.move.hop.source.mesh.index(rank, step.move.hop.axes) * R
    made = {at: apply(node.op, own, weights, **node.attrs)}
    for lo, hi in ((0, at), (at + R, rows.shape[0])):
        if lo < hi:
            made[lo] = apply(node.op, cut_along(rows, 0, lo, hi), weights, **node.attrs)
    return F.concatenate([made[lo] for lo in sorted(made)])


def _in_parts(step: CutProduct, rows: Tensor, weights: Tensor, rank: int, wide: bool, copied: bool
              ) -> Tensor:
    """rows: [M, ..., K]   weights: [K, N]. A part is read when the next one is multiplied, so that
    its collective has ended by then."""
    node, hop = step.product.node, step.move.hop
    scatters = _scatters_rows(step.move)
    n = hop.source.mesh.size(hop.axes) if scatters else 1
    blocks = F.reshape(rows, (n, rows.shape[0] // n, *rows.shape[1:]))
    reduced: list[Tensor] = []
    made: list[Tensor] = []

    def behind(y: Tensor) -> Tensor:
        y = _apply_epilogue(step, y, rank)
        return apply(COPIED, y) if copied else y

    for c, (lo, hi) in enumerate(_cuts(blocks.shape[1], step.shares)):
        part = cut_along(blocks, 1, lo, hi) if scatters else cut_along(rows, 0, lo, hi)
        y = apply(node.op, part, weights, **node.attrs)
        for op in step.before:
            y = apply(op.node.op, y, **op.node.attrs)
        if wide:
            y = as_sent(y, wide_terms(y.type, "sum", hop.source.mesh.size(hop.axes)))
        reduced.append(_reduced(step, y, rank, scatters))
        if c:
            made.append(behind(reduced[c - 1]))
    return F.concatenate([*made, behind(reduced[-1])])


def _cuts(rows: int, shares: Shares) -> list[tuple[int, int]]:
    """Where each part begins and ends."""
    ends = [rows * n // sum(shares) for n in accumulate(shares)]
    return list(pairwise([0, *ends]))


def _reduced(step: CutProduct, y: Tensor, rank: int, blocks: bool) -> Tensor:
    """y: [r, ..., N], or with blocks [n, r, ..., N]"""
    hop = step.halves[0] if step.halves else step.move.hop
    hop = _of_blocks(hop) if blocks else hop
    if hop.kind == ALL_REDUCED:
        return apply(ALL_REDUCE, y, hop=hop, rank=rank, type=y.type, what=_what(step, hop),
                     blocks=BLOCKS)[0]
    made = _apply_hop(step, y, hop, rank)
    return F.reshape(made, tuple(made.shape[1:])) if blocks else made


def _apply_hop(step: CutProduct, y: Tensor, hop: Hop, rank: int) -> Tensor:
    whole = tuple(d * hop.source.parts(i) for i, d in enumerate(y.shape))
    return apply_hops([y], [hop], rank, [whole], _what(step, hop), BLOCKS)[0]


def _what(step: CutProduct, hop: Hop) -> str:
    move = step.move
    return f"part of {hop} of {move.value.aval}" + (f", line {move.where}" if move.where else "")


def _of_blocks(hop: Hop) -> Hop:
    """The hop of what has an axis of the members in front of its rows."""
    def wider(at: Layout, first: Split) -> Layout:
        return replace(at, splits=(first, Split(), *at.splits[1:]))

    return replace(hop, source=wider(hop.source, Split()), target=wider(hop.target,
                                                                        Split(hop.axes)))


def _apply_epilogue(step: CutProduct, y: Tensor, rank: int) -> Tensor:
    y = as_sent(y, step.move.value.aval.type)
    for op in step.behind:
        with at_line(op.node.where):
            y = apply(op.node.op, y, **op.node.attrs)
    return _apply_hop(step, y, step.halves[1], rank) if step.halves else y


__all__ = ["cut_products", "run_cut"]
