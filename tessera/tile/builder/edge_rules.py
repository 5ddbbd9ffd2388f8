"""What the axes of an op's result know of edges, from those of its operands: the rules that the
records of ops name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.ir.edges import (
    NOTHING,
    WHOLE,
    Axis,
    Edge,
    Listed,
    Mixed,
    TileEdges,
    forget_zero,
    intersection,
    lines_of,
    open_,
)
from tessera.tile.ir.ir import Const, Op, Operand
from tessera.tile.ir.numpy_values import array_dtype
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType


@dataclass(frozen=True)
class Carry:
    """What a rule decides from: an op, the types and facts of its operands, its result's type.

    values: of the trace.  implied: conditions that hold only inside of edges.
    """

    values: ValueTable
    implied: dict[Operand, TileEdges]
    op: Op
    types: tuple[Any, ...]
    facts: tuple[TileEdges, ...]
    made: Any

    def cannot(self) -> Mixed:
        edges = [a for f in self.facts for a in f.axes if open_(a)]
        for a in edges:
            if isinstance(a, Mixed):
                return replace(a, zero=False)
        return Mixed(f"went through {self.op.name}, which cannot carry an edge{lines_of(edges)}",
                     where=self.op.where)

    def zero(self, *values: Any) -> bool:
        """Whether the op gives 0 for these operands; None stands for any number."""
        return gives_zero(self.op.name, values, tuple(t.dtype for t in self.types), self.op.attrs)


def elementwise(c: Carry) -> Iterable[Axis]:
    """An element exists where those it is computed from do."""
    for i, extent in enumerate(c.made.shape):
        axes, values = [], []
        for x, kind, facts in zip(c.op.args, c.types, c.facts, strict=True):
            axes.append(_repeated(c, kind, facts, i, extent))
            beyond = facts.zero_at(i) and isinstance(kind, TileType)
            values.append(0.0 if beyond else x.value if isinstance(x, Const) else None)
        zero = any(map(open_, axes)) and c.zero(*values)
        yield intersection(axes, zero, OPS[c.op.name].zero, c.op.where)


def _repeated(c: Carry, kind: Any, facts: TileEdges, axis: int, extent: int) -> Axis:
    """An operand's axis in the result: one of extent 1 may be repeated."""
    found = facts.at(axis) if isinstance(kind, TileType) else None
    if found is None or kind.shape[axis] == extent or _is_statistic(found, axis):
        return found
    if not open_(found):
        return None
    return Mixed(f"repeats an axis of extent 1 that may lie beyond its tensor{lines_of([found])}",
                 found.zero, where=c.op.where)


def _is_statistic(found: Axis, axis: int) -> bool:
    """Of a tile with a new axis in place of one that was reduced."""
    return isinstance(found, Listed) and found.steps[-2:] == (("any", axis), ("expand_dims", axis))


ANY = (0.0, 1.0, -2.5, 3e30, np.inf, np.nan)  # what an unknown number is tried with


@functools.lru_cache(maxsize=4096)
def gives_zero(name: str, values: tuple[Any, ...], dtypes: tuple[Any, ...], attrs: tuple) -> bool:
    """Whether an op gives 0 for these numbers, by its own meaning."""
    record, kinds = OPS[name], [array_dtype(d) for d in dtypes]
    if record.numpy is None:
        return False
    tried = [(v,) if v is not None else ANY if k.kind == "f" else (0, 1, 2)
             for v, k in zip(values, kinds, strict=True)]
    given = (np.array(x).reshape(-1, 1) for x in zip(*itertools.product(*tried), strict=True))
    with np.errstate(all="ignore"):
        out = record.numpy(*(x.astype(k) for x, k in zip(given, kinds, strict=True)),
                           **dict(attrs))
    return bool(np.all(np.asarray(out, np.float64) == 0))


def first_operand_edges(c: Carry) -> Iterable[Axis]:
    """The first operand's edges; what lies beyond becomes anything."""
    return [forget_zero(a) for a in c.facts[0].axes]


def edges_unchanged(c: Carry) -> Iterable[Axis]:
    return c.facts[0].axes


def intersect_edges(c: Carry) -> Iterable[Axis]:
    """and: where one operand holds only inside of an edge, so does the result."""
    said = [c.implied.get(x, NOTHING) for x in c.op.args]
    known = [next((f.at(i) for f in said if f.at(i) is not None), None)
             for i in range(len(c.made.shape))]
    if any(a is not None for a in known):
        c.implied[c.op.outs[0].value] = TileEdges(tuple(known))
    return [_within_said(a, k) for a, k in zip(elementwise(c), known, strict=True)]


def _within_said(a: Axis, said: Axis) -> Axis:
    """An axis where a condition holds that says all of its edge."""
    if isinstance(a, Mixed) or a is None or a.key != getattr(said, "key", None):
        return a
    return WHOLE if isinstance(a, Listed) else replace(a, inside=True)


def chosen(c: Carry) -> Iterable[Axis]:
    """where: behind a condition that says it, what is chosen lies inside."""
    said = c.implied.get(c.op.args[0])
    if said is None or not c.facts[1].axes:
        return elementwise(c)
    axes = [_within_said(a, said.at(i)) for i, a in enumerate(c.facts[1].axes)]
    return elementwise(replace(c, facts=(c.facts[0], TileEdges.of(axes), *c.facts[2:])))


def reversed_axes(c: Carry) -> Iterable[Axis]:
    return (then(a, "transpose") for a in reversed(c.facts[0].axes))


def permuted(c: Carry) -> Iterable[Axis]:
    axes = c.op.attr["axes"]
    return (then(c.facts[0].axes[a], "permute", axes) for a in axes)


def then(a: Axis, name: str, value: Any = None) -> Axis:
    return a.then(name, value) if isinstance(a, Listed) else a


def new_axis(c: Carry) -> Iterable[Axis]:
    at = c.op.attr["axis"]
    axes = [then(a, "expand_dims", at) for a in c.facts[0].axes]
    axes.insert(at, axes[0] if isinstance(axes[0], Listed) else None)
    return axes


def broadcast(c: Carry) -> Iterable[Axis]:
    (kind,), (facts,) = c.types, c.facts
    return [_repeated(c, kind, facts, i, n) for i, n in enumerate(c.made.shape)]


def reduced(c: Carry) -> Iterable[Axis]:
    """The axes that stay. A sum of zeros is 0."""
    along = c.op.attr["axis"]
    rest = [then(a, "any", along) for i, a in enumerate(c.facts[0].axes) if i != along]
    return rest if c.op.name == "reduce_sum" else [forget_zero(a) for a in rest]


def firsts(c: Carry) -> Iterable[Axis]:
    """Of what is ordered along the last axis the first ones, which all exist."""
    return [*map(forget_zero, c.facts[0].axes[:-1]), None]


def matmul(c: Carry) -> Iterable[Axis]:
    """Rows as a's, columns as b's, and as the accumulator's."""
    a, b, *rest = c.facts
    for i, axis in enumerate((a.at(0), b.at(1))):
        start = rest[0].at(i) if rest else None
        if isinstance(axis, Listed):
            axis = c.cannot()
        yield intersection([forget_zero(axis), start], False, "", c.op.where)


def masked(c: Carry) -> Iterable[Axis]:
    """edge_mask: all exist along an axis whose own edge it was."""
    axis, start, stop = c.op.attr["axis"], *c.op.args[1:]
    key = c.values.edge_key(c.values.forms.form(start), c.values.forms.form(stop))
    for i, a in enumerate(c.facts[0].axes):
        if i != axis:
            yield a
        elif isinstance(a, Edge) and a.key == key and (not a.low or c.op.attr.get("low")):
            yield replace(a, inside=True)
        else:
            yield forget_zero(a)


def reshaped(c: Carry) -> Iterable[Axis]:
    """Axes that stay, or are merged with whole ones behind them. Others become a list."""
    facts, before = c.facts[0], c.types[0].shape
    found = list(_intervals(c))
    lost = [a for a in found if isinstance(a, Mixed)]
    if not lost or any(isinstance(a, Mixed) for a in facts.axes):
        return found
    zero = all(a.zero for a in facts.axes if open_(a))  # type: ignore[union-attr]
    listed = [a for a in facts.axes if isinstance(a, Listed)]
    rest = [a for a in facts.axes if isinstance(a, Edge) and not a.inside]
    if listed and (rest or len(listed) < len(before)):
        return found
    made = listed[0] if listed else Listed(
        tuple(a if isinstance(a, Edge) and not a.inside else None for a in facts.axes), before, (),
        where=c.op.where)
    made = replace(made.then("reshape", c.made.shape), zero=zero)
    return [made] * len(c.made.shape)


def _intervals(c: Carry) -> Iterable[Axis]:
    """The edges of a reshaped tile as far as they are intervals."""
    facts = c.facts[0]
    for inner, outer in grouped(c.types[0].shape, c.made.shape):
        wide = [i for i in inner if c.types[0].shape[i] > 1]
        found = [facts.at(i) for i in inner]
        if not any(map(open_, found)):
            yield from [next((a for a in found if a is not None), None)] * len(outer)
            continue
        size = prod(c.types[0].shape[i] for i in wide[1:])
        lead = facts.at(wide[0]) if wide else None
        alone = wide and not any(open_(facts.at(i)) for i in inner if i != wide[0])
        to = [j for j in outer if c.made.shape[j] > 1]
        if alone and isinstance(lead, Edge) and lead.placed and len(to) == 1:
            yield from (c.values.scaled_edge(lead, size) if j == to[0] else None for j in outer)
        else:
            zero = all(a.zero for a in found if open_(a))  # type: ignore[union-attr]
            gone = replace(c.cannot(), zero=zero)
            yield from (gone if c.made.shape[j] > 1 or not to else None for j in outer)


def grouped(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes of two shapes that hold the same elements, in order."""
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        left: list[int] = []
        right: list[int] = []
        m = n = 1
        while True:
            if i < len(a) and (not left or m < n):
                m, i, left = m * a[i], i + 1, [*left, i]
            elif j < len(b) and (not right or n < m):
                n, j, right = n * b[j], j + 1, [*right, j]
            else:
                break
        out.append((left, right))
    return out


__all__ = ["Carry", "intersect_edges", "broadcast", "chosen", "elementwise", "firsts", "gives_zero",
           "edges_unchanged",
           "masked", "matmul", "new_axis", "permuted", "reduced", "reshaped", "reversed_axes",
           "first_operand_edges"]
