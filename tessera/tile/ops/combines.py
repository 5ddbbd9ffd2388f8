"""Reductions and scans of tiles by a function of the user's, also of several tiles as one.

Each element keeps what its block of 2^k neighbours along the axis comes to, and what precedes it in
the block and itself. A step asks the neighbouring block, whose elements' numbers differ in one bit:
the upper of the two puts the lower's before its own. Along the last axis a thread has pieces of
four neighbours: only what these come to is asked for across threads, and put before each of the
next piece. The function is called with whole tiles, so it is traced a few times and needs no form
of its own on any target. It has to be associative; it need not commute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, bool_, i32
from tessera.tile.builder import edge_masks, edge_rules, rules
from tessera.tile.builder.edge_rules import Carry
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir.edges import Axis, Edge, Listed, Mixed, open_
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Buffer, TileType, View
from tessera.tile.ops.combine_laws import broken_law
from tessera.tile.ops.reduce import reduced_type

Tiles = tuple[Handle, ...]
PIECE = 4  # neighbours of 32 bits in one access to memory, so in one thread


def _type(x: Handle) -> TileType:
    assert isinstance(x.type, TileType)
    return x.type


# --- the one op -----------------------------------------------------------------------------------
def _exchange_rule(types: Any, attrs: Any) -> TileType:
    t = rules.require_tile(types[0], None, "an exchange of neighbours")
    if not 0 <= attrs["axis"] < len(t.shape) or t.dtype is bool_:
        raise RuleError(f"neighbours along axis {attrs['axis']} of {t}")
    return t


def _exchange_edges(c: Carry) -> Iterable[Axis]:
    """The other axes'; along this one somebody else says what exists."""
    return [None if i == c.op.attr["axis"] else a for i, a in enumerate(c.facts[0].axes)]


@declare(rule=_exchange_rule, attrs=("axis", "bit"), public=False, edges=_exchange_edges,
         layouts="same", samples=(lambda rng: (rng.standard_normal((8, 16)),)))
def exchange(x: Any, axis: Any = 1, bit: Any = 1) -> Any:
    """x at the place whose number along an axis differs in a bit; anything beyond the tile."""
    n = x.shape[axis + 1]
    other = np.arange(n) ^ 1 << bit
    return np.take(x, np.where(other < n, other, np.arange(n)), axis=axis + 1)


@declare(rule=reduced_type, attrs=("axis", "at"), public=False, edges=edge_rules.reduced,
         layouts="reduced", samples=(lambda rng: (rng.standard_normal((8, 16)),)))
def one_along(x: Any, axis: Any = 1, at: Any = 0) -> Any:
    """The element at a place along an axis (tile/cuda/lower/pick_elements.py)."""
    one = np.take(x, at, axis=axis + 1)
    return one.reshape(-1, 1) if one.ndim == 1 else one


def _piece_rule(types: Any, attrs: Any) -> TileType:
    t = rules.require_tile(types[0], None, "the ends of pieces")
    if t.shape[-1] % attrs["size"]:
        raise RuleError(f"pieces of {attrs['size']} of {t}")
    return replace(t, shape=(*t.shape[:-1], t.shape[-1] // attrs["size"]))


@declare(rule=_piece_rule, attrs=("size",), public=False,
         edges=lambda c: [*c.facts[0].axes[:-1], None], layouts="any",
         samples=(lambda rng: (rng.standard_normal((8, 16)),)))
def piece_ends(x: Any, size: Any = 4) -> Any:
    """Every size-th element of the last axis (tile/cuda/lower/pick_elements.py)."""
    return x[..., size - 1::size]


# --- calls ----------------------------------------------------------------------------------------
@dataclass
class Combination:
    """A call: the tiles along an axis, and the user's function. single: it takes no tuples. whole:
    its tiles are those of the call, not what pieces of these come to."""

    t: OpTracer
    name: str
    tiles: Tiles
    combine: Any
    axis: int
    single: bool
    whole: bool = True

    @property
    def extent(self) -> int:
        return _type(self.tiles[0]).shape[self.axis]

    def of(self, x: Tiles, y: Tiles) -> Tiles:
        """The user's function, its results in the types of the tiles."""
        given = (x[0], y[0]) if self.single else (x, y)
        made = self.t.call_function(self.combine, *given)
        results = (made,) if self.single else made
        wanted = [_type(h) for h in self.tiles]
        if not isinstance(results, tuple) or len(results) != len(wanted):
            self.fail(describe(made), wanted)
        for r, want in zip(results, wanted, strict=True):
            made_of = r.type if isinstance(r, Handle) and isinstance(r.type, TileType) else None
            if made_of is None or made_of.shape != want.shape or (
                    made_of.dtype.kind != want.dtype.kind):
                self.fail(", ".join(map(describe, results)), wanted)
        return tuple(self.t.ir.cast(r, w.dtype) for r, w in zip(results, wanted, strict=True))

    def fail(self, got: str, wanted: list[Any]) -> NoReturn:
        self.t.fail(f"{self.name}: the combination of two elements gives {got}, its operands are "
                    f"{', '.join(map(str, wanted))}",
                    "combine(a, b) gives what a and b are: of a tuple of tiles a tuple of as many")

    def neighbours(self, xs: Tiles, bit: int) -> Tiles:
        return tuple(self.as_numbers(x, "exchange", axis=self.axis, bit=bit) for x in xs)

    def numbers(self) -> Handle:
        """The number of each element along the axis, with extents of 1 along the others."""
        shape = [1] * len(_type(self.tiles[0]).shape)
        shape[self.axis] = self.extent
        at = self.t.call_op(OPS["arange"], [0, self.extent], {})
        return self.t.call_op(OPS["reshape"], [at, tuple(shape)], {})

    def chosen(self, where: Handle, xs: Tiles, ys: Tiles) -> Tiles:
        return tuple(self.t.ir.arithmetic("where", (where, x, y))
                     for x, y in zip(xs, ys, strict=True))

    def scanned(self) -> Tiles:
        """What the elements up to each come to."""
        if not self.in_pieces:
            return self.steps(self.tiles, (self.extent - 1).bit_length())
        within = self.steps(self.tiles, (PIECE - 1).bit_length())
        before = tuple(map(self.spread, self.totals(within).preceding()))
        first = self.t.ir.arithmetic("lt", (self.numbers(), PIECE))
        return self.chosen(first, within, self.of(before, within))

    def reduced(self) -> Tiles:
        """What all elements come to."""
        if not self.in_pieces:
            return self.last(self.scanned())
        return self.totals(self.steps(self.tiles, (PIECE - 1).bit_length())).reduced()

    @property
    def in_pieces(self) -> bool:
        """Whether threads have several neighbours; else the ends of pieces lie as all elements."""
        last = self.axis == len(_type(self.tiles[0]).shape) - 1
        return last and self.whole and self.extent % PIECE == 0 and self.extent > PIECE

    def steps(self, before: Tiles, bits: int) -> Tiles:
        """What the elements up to each come to, within their block of 2^bits."""
        ir, at, block = self.t.ir, self.numbers(), before
        for bit in range(bits):
            upper = ir.arithmetic("ne", (ir.arithmetic("bitand", (at, 1 << bit)), 0))
            other = self.neighbours(block, bit)
            before = self.chosen(upper, self.of(other, before), before)
            if bit + 1 < bits:
                block = self.joined(block, other, upper, bit)
        return before

    def preceding(self) -> Tiles:
        """What the elements before each come to; anything for the first."""
        ir, at, block = self.t.ir, self.numbers(), self.tiles
        before, bits = block, (self.extent - 1).bit_length()
        for bit in range(bits):
            upper = ir.arithmetic("ne", (ir.arithmetic("bitand", (at, 1 << bit)), 0))
            other = found = self.neighbours(block, bit)
            if bit:
                first = ir.arithmetic("eq", (ir.arithmetic("bitand", (at, (1 << bit) - 1)), 0))
                found = self.chosen(first, other, self.of(other, before))
            before = self.chosen(upper, found, before)
            if bit + 1 < bits:
                block = self.joined(block, other, upper, bit)
        return before

    def joined(self, block: Tiles, other: Tiles, upper: Handle, bit: int) -> Tiles:
        """Two neighbouring blocks as one, in both; a block that has no neighbour stays."""
        both = self.of(self.chosen(upper, other, block), self.chosen(upper, block, other))
        if self.extent % (2 << bit) == 0:
            return both
        at = self.numbers()
        there = self.t.ir.arithmetic("lt", (self.t.ir.arithmetic("bitxor", (at, 1 << bit)),
                                            self.extent))
        return self.chosen(there, both, block)

    def totals(self, within: Tiles) -> Combination:
        """What the pieces come to."""
        ends = tuple(self.as_numbers(x, "piece_ends", size=PIECE) for x in within)
        return replace(self, tiles=ends, whole=False)

    def spread(self, x: Handle) -> Handle:
        """What each piece has, for each of its elements."""
        shape = _type(x).shape
        flags = _type(x).dtype is bool_
        wide = self.t.call_op(OPS["reshape"], [self.t.ir.cast(x, i32) if flags else x,
                                               (*shape, 1)], {})
        wide = self.t.call_op(OPS["broadcast_to"], [wide, (*shape, PIECE)], {})
        flat = self.t.call_op(OPS["reshape"], [wide, (*shape[:-1], shape[-1] * PIECE)], {})
        return self.t.ir.arithmetic("ne", (flat, 0)) if flags else flat

    def last(self, xs: Tiles) -> Tiles:
        """The last element of each along the axis."""
        return tuple(self.as_numbers(x, "one_along", axis=self.axis, at=self.extent - 1)
                     for x in xs)

    def as_numbers(self, x: Handle, name: str, **attrs: Any) -> Handle:
        """An op that moves elements, of flags as numbers."""
        flags = _type(x).dtype is bool_
        found = self.t.ir.emit(name, [self.t.ir.cast(x, i32) if flags else x], **attrs)
        return self.t.ir.arithmetic("ne", (found, 0)) if flags else found


def _combination(t: OpTracer, name: str, x: Any, combine: Any, axis: Any, identity: Any
                 ) -> Combination:
    single = not isinstance(x, tuple | list)
    if not single and not x:
        t.fail(f"{name} of {describe(x)}: it needs a tile, or a tuple of tiles")
    tiles = tuple(_tile(t, name, item) for item in ((x,) if single else x))
    shapes = {_type(h).shape for h in tiles}
    if len(shapes) != 1:
        t.fail(f"{name} of {', '.join(str(h.type) for h in tiles)}: they go together, element by "
               "element", "load parts of one shape")
    rank = len(_type(tiles[0]).shape)
    along = t.ir.constant_int(axis, "axis")
    if not -rank <= along < rank:
        t.fail(f"{name} along axis {along} of {tiles[0].type}", f"-{rank} to {rank - 1}")
    along %= rank
    if identity is not None and (
            isinstance(identity, tuple | list) == single or not single and len(identity) != len(x)):
        t.fail(f"{name} of {describe(x)} with the identity {describe(identity)}",
               "a number for a tile, and for a tuple of tiles a tuple of as many")
    neutral = (identity,) * len(tiles) if single or identity is None else identity
    broken = broken_law(combine, [_type(h).dtype for h in tiles],
                        None if identity is None else tuple(neutral))
    if broken is not None:
        t.position.warn(f"{name} by {getattr(combine, '__name__', 'a function')}: {broken}")
    ready = tuple(_existing(t, name, h, along, n) for h, n in zip(tiles, neutral, strict=True))
    return Combination(t, name, ready, combine, along, single)


def _tile(t: OpTracer, name: str, x: Any) -> Handle:
    """A tile in the type in which it is computed."""
    if isinstance(x, TensorRow):
        x = t.memory.view_of_row(x)
    if not isinstance(x, Handle) or not isinstance(x.type, TileType):
        places = isinstance(x, Handle) and isinstance(x.type, View | Buffer)
        t.fail(f"{name} of {describe(x)}: it needs a tile, or a tuple of tiles",
               "load it first: ts.tile.load(x[a:a+64])" if places else None)
    dtype: DType = x.type.dtype
    return x if dtype is bool_ else t.ir.cast(x, rules.compute_dtype(dtype))


def _existing(t: OpTracer, name: str, x: Handle, axis: int, identity: Any) -> Handle:
    """The tile with what changes nothing where elements do not exist along the axis."""
    edge = t.facts.of(x).at(axis)
    if isinstance(edge, Mixed):
        edge_masks.refuse(t.ir, name, edge)
    if not open_(edge) or (name == "scan" and isinstance(edge, Edge) and not edge.low):
        return x  # what lies behind the last element is behind all that count
    if identity is None:
        t.fail(f"{name} goes over the edge of a tensor, and its function does not tell what "
               "changes nothing there", f"say it: ts.tile.{name}(x, combine, identity=0.0), for a "
               "tuple of tiles a tuple of numbers", code="E_EDGE")
    assert isinstance(edge, Edge | Listed)
    there = t.call_op(OPS["inside"], [x], {})
    return t.ir.cast(t.ir.arithmetic("where", (there, x, identity)), _type(x).dtype)


@macro()
def scan(t: OpTracer, x: Any, combine: Any, axis: Any = -1, *, identity: Any = None) -> Any:
    """What the elements up to each come to by combine(a, b), a function that is associative: a
    before b along the axis. x may be a tuple of tiles of one shape: then a, b and the result are
    tuples. identity: a number, or one for each, that changes nothing, where a tile begins before
    its tensor."""
    c = _combination(t, "scan", x, combine, axis, identity)
    made = c.scanned()
    return made[0] if c.single else made


@macro(name="reduce")
def reduce_by(t: OpTracer, x: Any, combine: Any, axis: Any = -1, *, identity: Any = None) -> Any:
    """What all elements along the axis come to, in their order, by combine(a, b), a function that
    is associative. x may be a tuple of tiles of one shape: then a, b and the result are tuples.
    identity: a number, or one for each, that changes nothing, where tiles go beyond their
    tensors."""
    c = _combination(t, "reduce", x, combine, axis, identity)
    made = c.reduced()
    return made[0] if c.single else made


__all__ = ["exchange", "one_along", "piece_ends"]
