"""The graph of one rank: the steps of a partitioned program on that rank's parts.

Extents and the attributes that hold them become those of the part. Draws of random numbers become
those of the part's elements in the whole tensor, so that a result does not depend on the mesh.
Narrow terms of sums are widened where NCCL adds no others (narrow_terms.py). Where it does, what
lies outside of windows is copied: sums that are results, parts of parameters that are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from tessera.ad.subgraphs import close_together
from tessera.errors import SourceLine, TesseraError
from tessera.graph import functions as F
from tessera.graph.ir import Graph, Node, Value
from tessera.graph.op import ENGINES, OPS, Aval, GraphOp
from tessera.graph.ops.convert import cast_ref
from tessera.graph.trace import apply, at_line, trace
from tessera.numerics import NumericType, as_type, random_bits_at
from tessera.tensor import Tensor

from ..collectives.exchange_ops import COPIED
from ..layout import Layout
from ..partition import extents, indices, local_shape
from .cut_products import BLOCKS, run_cut
from .layout_change_ops import ALL_REDUCE, apply_hops
from .layout_changes import Hop, block, same_cuts
from .masked_indexing import is_masked, run_masked
from .narrow_terms import as_sent, wide_terms
from .partitioned_steps import (
    CONSTRAINTS,
    EXCHANGES,
    CutProduct,
    Held,
    LayoutHop,
    PartitionedOp,
    Step,
    Together,
    own_exchanges,
)
from .propagate import Propagated
from .split_slices import PLACE, place_attrs

U32 = as_type("uint32")
ALIKE_BITS = 1 << 19  # of a term that is the first rank's: to compute up to 64 KiB takes no time


class LocalValues(dict[Held, Tensor]):
    """The values of a rank.

    wide: narrow terms of sums are sent wide; wide_inside: those of loops and branches are sent so
    wide_sums: totals of such, which are rounded where they are first read
    returned: what the program returns, where it was summed
    copied: parts of parameters in memory that all ranks reach, each until it is gathered
    engines: what is gathered beside a matmul comes by copy engines
    """

    def __init__(self, given: Iterable[tuple[Held, Tensor]], wide: bool, wide_inside: bool,
                 returned: Container[Held] = (), engines: bool = False):
        super().__init__(given)
        self.engines = engines
        self.wide, self.wide_inside, self.returned = wide, wide_inside, returned
        self.copied: dict[Held, Tensor] = {}
        self.wide_sums: dict[Held, Tensor] = {}

    @property
    def in_windows(self) -> bool:
        """Whether temporaries lie where all ranks reach them, as far as this rank knows."""
        return self.wide_inside and not self.wide

    def copy_sources(self, moves: Iterable[Step]) -> None:
        """Parts of parameters that are gathered together: NCCL reads others in rings."""
        for move in itertools.takewhile(brings_parameter, moves):
            assert isinstance(move, LayoutHop)
            if copy_pays(move):
                held = move.value, move.hop.source
                self.copied[held] = apply(COPIED, self[held])

    def __missing__(self, held: Held) -> Tensor:
        made = self[held] = F.cast(self.wide_sums[held], held[0].aval.type)
        return made

    def sent_as(self, x: Tensor, hop: Hop) -> NumericType:
        """The type in which x is sent."""
        if not self.wide or hop.source.op is None:
            return x.type
        return wide_terms(x.type, hop.source.op, hop.source.mesh.size(hop.axes))

    def copies(self, held: Held, hop: Hop) -> bool:
        """Whether a sum is copied to where it is returned: NCCL adds narrow terms in windows alone,
        and results lie in none."""
        numeric, op = held[0].aval.type, hop.source.op
        return self.in_windows and held in self.returned and (
            op is not None and wide_terms(numeric, op, hop.source.mesh.size(hop.axes)) != numeric)

    def keep_sum(self, held: Held, made: Tensor, hop: Hop) -> None:
        self.keep(held, apply(COPIED, made) if self.copies(held, hop) else made)

    def keep(self, held: Held, made: Tensor) -> None:
        """What came of a value, narrow or wide."""
        same = made.dtype is held[0].aval.dtype
        (self if same else self.wide_sums)[held] = made


def localize(made: Propagated, rank: int, wide: bool = False, wide_inside: bool = False,
             engines: bool = False) -> Graph:
    """What a rank runs: a graph of its parts of the inputs, captures last, to those of the
    outputs. wide, wide_inside, engines: see LocalValues"""

    def body(*parts: Tensor) -> list[Tensor]:
        env = LocalValues(zip(made.inputs, parts, strict=True), wide, wide_inside, _returned(made),
                          engines)
        line = made.graph.nodes[0].where if made.graph.nodes else None
        for i, step in enumerate(made.steps):
            line = _line(step) or line
            with at_line(line):
                if env.in_windows and brings_parameter(step) and not (
                        i and brings_parameter(made.steps[i - 1])):
                    env.copy_sources(made.steps[i:])
                _take(step, env, rank)
        return [env[held] for held in made.outputs]

    avals = [_local_aval(v, layout, rank) for v, layout in made.inputs]
    return trace(body, avals, f"{made.graph.name} on rank {rank}")


def brings_parameter(step: Step) -> bool:
    """Whether it is a gather of what is gathered for each use."""
    return isinstance(step, LayoutHop) and step.anew and step.hop.kind == "all_gather"


def gathers_beside(step: Step) -> bool:
    """Whether it is the gather of a matmul's operand, beside this rank's own rows."""
    return isinstance(step, LayoutHop) and step.hop.kind == "all_gather" and step.blocks == BLOCKS


def copy_pays(move: LayoutHop) -> bool:
    """Whether bringing a part to where all ranks reach it costs less than the multiprocessors that
    a ring has and a kernel for windows does not, while the parts of others come."""
    others = move.hop.target.mesh.size(move.hop.axes) - 1
    return 2 / MEMORY_RATE < others / LINK_RATE * SPARED


# Of an H200: memory, NCCL on NVLink, and the multiprocessors of a ring of 24 blocks that one of 9
# blocks leaves to others ("What sending costs" in docs/internals/ranks_measured.md).
MEMORY_RATE, LINK_RATE, SPARED = 4.0e12, 0.33e12, 15 / 132


def _returned(made: Propagated) -> set[Held]:
    """The outputs, and what views and constraints make them of, which move nothing."""
    found = set(made.outputs)
    for step in reversed(made.steps):
        if isinstance(step, PartitionedOp) and found.intersection(step.makes) and (
                step.node.op.view or step.node.op.name in CONSTRAINTS):
            found.add((step.node.inputs[0], step.ins[0]))
    return found


def _local_aval(v: Value, layout: Layout, rank: int) -> Aval:
    return Aval(local_shape(layout, extents(v.aval), rank, v.aval.dtype),
                v.aval.type)


def _line(step: Step) -> SourceLine | None:
    if isinstance(step, PartitionedOp):
        return step.node.where
    if isinstance(step, CutProduct):
        return step.product.node.where
    return step.moves[0].where if isinstance(step, Together) else step.where


def _take(step: Step, env: LocalValues, rank: int) -> None:
    if isinstance(step, PartitionedOp) and step.node.op.name in CONSTRAINTS:
        given = step.node.inputs[0], step.ins[0]
        env.keep(step.makes[0], env.wide_sums[given] if given in env.wide_sums else env[given])
    elif isinstance(step, PartitionedOp):
        env.update(zip(step.makes, _run(step, env, rank), strict=True))
    elif isinstance(step, CutProduct):
        env[step.makes[0]] = run_cut(step, env, rank, env.wide, not step.halves and env.copies(
            step.makes[0], step.move.hop))
    else:
        moves = step.moves if isinstance(step, Together) else (step,)
        if moves[0].hop.kind == "all_reduce":
            _reduce(moves, env, rank)
        elif moves[0].hop.kind in ("term", "slice"):
            (only,) = moves
            _choose(only, env, rank)
        else:
            _move(moves, env, rank)


# --- moves ---------------------------------------------------------------------------------------
def _reduce(moves: Sequence[LayoutHop], env: LocalValues, rank: int) -> None:
    hop = moves[0].hop
    parts = [env[m.value, m.hop.source] for m in moves]
    sent = env.sent_as(parts[0], hop)
    made = apply(ALL_REDUCE, *(as_sent(x, sent) for x in parts), hop=hop, rank=rank, type=sent,
                 what=_what(moves[0]), **_blocks(moves[0]))
    for m, y in zip(moves, made, strict=True):
        env.keep_sum((m.value, m.hop.target), y, m.hop)


def _term(x: Tensor, first: bool) -> Tensor:
    """What all ranks have as the term of the first. A small one, such as the norm of a gradient, is
    computed on the others too: where they left it out, they would fuse what it comes from in
    another way than the first, and sum in another order what all are to have to the same bits."""
    if prod(x.shape) * x.type.dtype.bits > ALIKE_BITS:
        return x if first else F.zeros(tuple(x.shape), x.type)
    return F.where(Tensor(np.asarray(first), as_type("bool_")), x, F.zeros((), x.type))


def _choose(step: LayoutHop, env: LocalValues, rank: int) -> None:
    """What nobody sends."""
    hop, x = step.hop, env[step.value, step.hop.source]
    if hop.kind == "term":
        made = _term(x, hop.target.mesh.index(rank, hop.axes) == 0)
    else:
        made = _slice(x, hop, extents(step.value.aval), rank)
    env[step.value, hop.target] = made


def _move(moves: Sequence[LayoutHop], env: LocalValues, rank: int) -> None:
    parts, first = [], moves[0]
    for m in moves:
        held = m.value, m.hop.source
        x = env.copied.pop(held) if held in env.copied else env[held]
        parts.append(as_sent(x, env.sent_as(x, m.hop)) if m.hop.kind == "reduce_scatter" else x)
    more = f", and {len(moves) - 1} more" if len(moves) > 1 else ""
    made = apply_hops(
        parts, [m.hop for m in moves], rank, [extents(m.value.aval) for m in moves],
        _what(first) + more, ENGINES if env.engines and gathers_beside(first) else first.blocks)
    for m, y in zip(moves, made, strict=True):
        env.keep_sum((m.value, m.hop.target), y, m.hop)


def _blocks(step: LayoutHop) -> dict[str, int]:
    return {"blocks": step.blocks} if step.blocks else {}


def _what(step: LayoutHop) -> str:
    line = f", line {step.where}" if step.where else ""
    return f"{step.hop} of {step.value.aval}{line}"


def _slice(x: Tensor, hop: Hop, shape: tuple[int, ...], rank: int) -> Tensor:
    """The part of a part."""
    if same_cuts(hop.source, hop.target, shape, x.dtype):
        return x
    starts, stops = [], []
    for d in range(len(shape)):
        if hop.source.splits[d] == hop.target.splits[d] or hop.target.splits[d].cyclic:
            starts.append(0)
            stops.append(x.shape[d])
            continue
        lo, hi = block(hop.target, rank, d, shape, x.dtype)
        base = block(hop.source, rank, d, shape, x.dtype)[0] if hi > lo else lo
        starts.append(lo - base)
        stops.append(hi - base)
    if tuple(starts) != (0,) * len(shape) or tuple(stops) != tuple(x.shape):
        x = apply(OPS["slice"], x, starts=tuple(starts), stops=tuple(stops),
                  steps=(1,) * len(shape))
    return _pick(x, hop, shape, rank)


def _pick(x: Tensor, hop: Hop, shape: tuple[int, ...], rank: int) -> Tensor:
    """Runs of the dimensions that are dealt out: each is there whole, and its index that of x."""
    for d, (have, want) in enumerate(zip(hop.source.splits, hop.target.splits, strict=True)):
        if have == want or not want.cyclic:
            continue
        own = Layout(hop.target.mesh, (want,))
        index = indices(own, (shape[d],), rank, x.dtype if d == len(shape) - 1 else None)
        x = apply(OPS["take"], x, Tensor(index, as_type("int64")), axis=d)
    return x


# --- ops -----------------------------------------------------------------------------------------
def _run(step: PartitionedOp, env: LocalValues, rank: int) -> tuple[Tensor, ...]:
    node = step.node
    parts = [env[held] for held in zip(node.inputs, step.ins, strict=True)]
    if step.bodies:
        return _run_held(step, parts, rank, env.wide_inside)
    if own_exchanges(step):
        return EXCHANGES[node.op.name].run(step, parts, rank)
    if step.placed is not None:
        return (apply(PLACE, *parts, type=parts[0].type,
                      **place_attrs(node, step.ins, step.outs[0], rank)),)
    special = SPECIAL.get(node.op.name)
    if special is not None and any(at.splits and not at.is_replicated for at in step.outs):
        return (special(node, parts, step.outs[0], rank),)
    attrs = node.attrs
    if is_masked(node, step.ins, step.outs):
        own = _local_aval(node.outputs[0], step.outs[0], rank)
        return (run_masked(node, parts, step.ins, step.outs, rank, extents(own)),)
    wanted = [_local_aval(v, at, rank) for v, at in zip(node.outputs, step.outs, strict=True)]
    if node.op.local is not None:
        attrs = {**attrs, **node.op.local(attrs, [tuple(p.shape) for p in parts],
                                          [a.shape for a in wanted])}
    out = apply(node.op, *parts, **attrs)
    outs = out if node.op.multi else (out,)
    for y, a in zip(outs, wanted, strict=True):
        if tuple(y.shape) != a.shape:
            raise TesseraError(
                f"{node.op.name} gives {list(y.shape)} on the parts of rank {rank}, its layout "
                f"asks for {list(a.shape)}: its index letters or its local rule are wrong",
                where=node.where)
    return outs


def _run_held(step: PartitionedOp, parts: Sequence[Tensor], rank: int, wide: bool
              ) -> tuple[Tensor, ...]:
    """An op on the local graphs of its bodies; what those capture become operands."""
    node = step.node
    graphs, captured = close_together(*(localize(body, rank, wide, wide) for body in step.bodies))
    bodies = dict(zip(node.op.graph_attrs, graphs, strict=True))
    return apply(node.op, *parts, *captured, **{**node.attrs, **bodies})


def _iota(node: Node, parts: Sequence[Tensor], layout: Layout, rank: int) -> Tensor:
    whole = apply(node.op, **node.attrs)
    index = indices(layout, (node.attrs["size"],), rank)
    if not index.size:
        return apply(OPS["slice"], whole, starts=(0,), stops=(0,), steps=(1,))
    if layout.splits[0].cyclic:
        return apply(OPS["take"], whole, Tensor(index, as_type("int64")), axis=0)
    return apply(OPS["slice"], whole, starts=(int(index[0]),), stops=(int(index[-1]) + 1,),
                 steps=(1,))


def _random_bits(node: Node, parts: Sequence[Tensor], layout: Layout, rank: int) -> Tensor:
    return apply(PART_BITS, parts[0], layout=layout, whole=node.attrs["shape"], rank=rank)


def _cast_stochastic(node: Node, parts: Sequence[Tensor], layout: Layout, rank: int) -> Tensor:
    return apply(PART_CAST, *parts, layout=layout, whole=extents(node.inputs[0].aval), rank=rank,
                 **node.attrs)


SPECIAL: dict[str, Callable[[Node, Sequence[Tensor], Layout, int], Tensor]] = {
    "iota": _iota,
    "random_bits": _random_bits,
    "cast_stochastic": _cast_stochastic,
}


def _bits_of_part(key: np.ndarray, layout: Layout, whole: tuple, rank: int) -> np.ndarray:
    return random_bits_at(key, indices(layout, whole, rank))


def _bits_on_gpu(key: Tensor, layout: Layout, whole: tuple, rank: int) -> Tensor:
    """The index of each element is the sum of what its place along each axis counts."""
    shape, step = local_shape(layout, whole, rank), 1
    wide = as_type("int64" if prod(whole) >= 1 << 31 else "int32")
    index = F.zeros(shape, wide)
    for d in reversed(range(len(whole))):
        own = indices(Layout(layout.mesh, (layout.splits[d],)), (whole[d],), rank) * step
        rows = Tensor(np.ascontiguousarray(own, wide.dtype.numpy), wide)
        index = index + F.reshape(rows, (-1, *[1] * (len(whole) - 1 - d)))
        step *= whole[d]
    return apply(BITS_AT, index, key)


BITS_AT = GraphOp(
    "mesh_random_bits_at", shape=lambda index, key: Aval(index.shape, U32), makes="bits_at",
    ref=lambda index, key: random_bits_at(key, index), differentiable=False,
    doc="random bits of elements by their indices in the whole")
PART_BITS = GraphOp(
    "mesh_random_bits",
    shape=lambda key, layout, whole, rank: Aval(local_shape(layout, whole, rank), U32),
    ref=_bits_of_part, expand_gpu=_bits_on_gpu, differentiable=False,
    doc="the random bits of a part: those of its elements in the whole",
)


def _cast_part(x: np.ndarray, key: np.ndarray, source: Any, to: Any, layout: Layout, whole: tuple,
               rank: int) -> np.ndarray:
    return cast_ref(x, key, source=source, to=to, index=indices(layout, whole, rank))


PART_CAST = GraphOp(
    "mesh_cast_stochastic",
    shape=lambda x, key, source, to, **attrs: Aval(x.shape, to),
    ref=_cast_part, differentiable=False,
    doc="stochastic rounding of a part, by the index of each element in the whole",
)
