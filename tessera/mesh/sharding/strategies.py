"""The ways in which one op can run on a mesh: which axes split which of its letters.

An option gives a split to some letters of a node (dimension_labels.py). From it follow the layout
that each operand must come in, and the layouts of the results; a reduced letter that is split
leaves a pending reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import lcm, prod

from tessera.graph.ir import Node
from tessera.graph.op import Aval

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..layout import Layout, Split
from ..partition import balanced, extents, group_of
from .dimension_labels import Labels, NodeLabels, reduces_of
from .masked_indexing import SPLIT
from .reshape_ways import reshaped
from .split_slices import received, shifts, targets

WHOLE = Split()
MOST = 96  # options of one node that are compared


@dataclass(frozen=True)
class Way:
    """One option of a node: the layouts of its operands and of its results, and how much of the
    work each rank does (1: all of it).

    placed: elements that a rank gets from others when boxes are put in their place
    (split_slices.py)
    """

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    share: float
    placed: float | None = None


@dataclass(frozen=True)
class LetterSplit:
    """Axes that split a letter into blocks of whole `unit`s of its elements, or into runs."""

    axes: tuple[str, ...]
    unit: int = 1
    cyclic: int = 0


Choice = Mapping[str, LetterSplit]


def ways(node: Node, labels: NodeLabels, given: Sequence[Layout], mesh: Mesh,
         wished: Sequence[Layout | None] = (), loose: Collection[int] = ()) -> list[Way]:
    """Every option that the layouts of the operands suggest; the first needs all of it whole.

    wished: where results will have to lie, which says how to split what no operand has
    loose: operands that are made where they are needed, or summed there, so that theirs count as
    such too
    """
    found = []
    letters = _suggested(node, labels, given)
    _add_wished(letters, node, labels, wished, loose)
    sets = [[None, *options] for options in letters.values()]
    for picked in itertools.islice(itertools.product(*sets), MOST):
        choice = {c: s for c, s in zip(letters, picked, strict=True) if s is not None}
        axes = [a for s in choice.values() for a in s.axes]
        if len(set(axes)) == len(axes):
            way = make_way(node, labels, choice, mesh)
            if way is not None:
                found.append(way)
    return found


def placements(node: Node, given: Sequence[Layout]) -> list[Way]:
    """The options of reshape, slice, concatenate and pad that leave their operands where they
    are."""
    if (found := reshaped(node, given)) is not None:
        own, out = found
        return [Way((own,), (out,), 1 / prod(out.parts(d) for d in range(out.ndim)))]
    if shifts(node, given) is None:
        return []
    return [Way(tuple(given), (out,), 1 / max(1, prod(out.parts(d) for d in range(out.ndim))),
                received(node, given, out)) for out in targets(node, given)]


def make_way(node: Node, labels: NodeLabels, choice: Choice, mesh: Mesh) -> Way | None:
    """The layouts of a node under a choice, or None when it cannot be."""
    if SPLIT in choice and choice[SPLIT].cyclic:
        return None
    reduced = [s for c, s in choice.items() if c in labels.reduced]
    if reduced and not _can_reduce(node, labels, choice, mesh):
        return None
    pending = tuple(a for a in mesh.axes if any(a in s.axes for s in reduced))
    ins = tuple(_layout(own, v.aval, choice, mesh)
                for own, v in zip(labels.ins, node.inputs, strict=True))
    outs = tuple(_layout(own, v.aval, choice, mesh, pending, reduces_of(node) if pending else None)
                 for own, v in zip(labels.outs, node.outputs, strict=True))
    if any(x is None for x in (*ins, *outs)):
        return None
    share = 1 / max(1, prod(mesh.size(s.axes) for s in choice.values()))
    return Way(ins, outs, share)  # type: ignore[arg-type]


def _can_reduce(node: Node, labels: NodeLabels, choice: Choice, mesh: Mesh) -> bool:
    """Whether partial results combine; a maximum of nothing does not exist."""
    how = reduces_of(node)
    if not how or (any(s.cyclic for s in choice.values()) and not node.op.matmul):
        return False
    if how == "sum":
        return True
    return all(extents(v.aval)[d] >= mesh.size(choice[own.letter].axes) * choice[own.letter].unit
               for labels_in, v in zip(labels.ins, node.inputs, strict=True)
               for d, own in enumerate(labels_in) if own is not None and own.letter in choice)


def _layout(labels: Labels, aval: Aval, choice: Choice, mesh: Mesh,
            pending: tuple[str, ...] = (), op: str | None = None) -> Layout | None:
    splits = []
    for d, label in enumerate(labels):
        chosen = None if label is None else choice.get(label.letter)
        if chosen is None or label is None:
            splits.append(WHOLE)
            continue
        split = _dim_split(chosen, label.inner, extents(aval)[d], mesh)
        if split is None:
            return None
        splits.append(split)
    return _checked_once(mesh, tuple(splits), pending, op)


@lru_cache(maxsize=8192)
def _checked_once(mesh: Mesh, splits: tuple[Split, ...], pending: tuple[str, ...],
                  op: str | None) -> Layout:
    """Options of ops that follow each other have the same few layouts."""
    return Layout(mesh, splits, pending, op)


def _dim_split(chosen: LetterSplit, inner: int, extent: int, mesh: Mesh) -> Split | None:
    """The split of one dimension of a letter, in its own elements."""
    if chosen.cyclic:
        return Split(chosen.axes, chosen.cyclic) if inner == 1 else None
    parts = mesh.size(chosen.axes)
    return _unit_of(chosen.axes, chosen.unit, inner, extent, parts)


@lru_cache(maxsize=8192)
def _unit_of(axes: tuple[str, ...], unit: int, inner: int, extent: int, parts: int) -> Split | None:
    cuts = balanced(extent * inner, parts, unit)
    if any(lo % inner for lo, _ in cuts):
        return None
    own = [(lo // inner, hi // inner) for lo, hi in cuts]
    if balanced(extent, parts) == own:
        return Split(axes)
    each = unit // inner if unit % inner == 0 else 0
    return Split(axes, 0, each) if each and balanced(extent, parts, each) == own else None


# --- what operands suggest -----------------------------------------------------------------------
def _suggested(node: Node, labels: NodeLabels, given: Sequence[Layout]
               ) -> dict[str, list[LetterSplit]]:
    """Per letter the splits in which an operand has it already, brought to cuts that all of its
    dimensions can have."""
    found: dict[str, list[LetterSplit]] = {}
    for own, layout in zip(labels.ins, given, strict=True):
        for label, split in zip(own, layout.splits, strict=True):
            if label is None or not split.axes:
                continue
            wanted = LetterSplit(split.axes, split.unit * label.inner, split.cyclic)
            fitted = _fitted(label.letter, wanted, node, labels, layout.mesh)
            options = found.setdefault(label.letter, [])
            if fitted is not None and fitted not in options:
                options.append(fitted)
    return found


def _add_wished(letters: dict[str, list[LetterSplit]], node: Node, labels: NodeLabels,
                wished: Sequence[Layout | None], loose: Collection[int]) -> None:
    """Splits of letters that only the result has."""
    ins = {label.letter for i, own in enumerate(labels.ins) if i not in loose
           for label in own if label is not None}
    for own, layout in zip(labels.outs, wished, strict=False):
        if layout is None:
            continue
        for label, split in zip(own, layout.splits, strict=True):
            if label is None or not split.axes or label.letter in ins:
                continue
            fitted = _fitted(label.letter, LetterSplit(split.axes, split.unit * label.inner,
                                                       split.cyclic), node, labels, layout.mesh)
            if fitted is not None:
                letters.setdefault(label.letter, []).append(fitted)


def _fitted(letter: str, wanted: LetterSplit, node: Node, labels: NodeLabels, mesh: Mesh
            ) -> LetterSplit | None:
    """`wanted` in units that no dimension with this letter, and no packed byte, is cut inside."""
    need, total = 1, 0
    for own, v in zip((*labels.ins, *labels.outs), (*node.inputs, *node.outputs), strict=True):
        for d, label in enumerate(own):
            if label is None or label.letter != letter:
                continue
            last = d == len(own) - 1
            need = lcm(need, label.inner * (group_of(v.aval.dtype) if last else 1))
            total = extents(v.aval)[d] * label.inner
    if wanted.cyclic:
        unit = lcm(wanted.unit, need)
        return LetterSplit(wanted.axes, 1, -(-wanted.cyclic // unit) * unit)
    cuts = balanced(total, mesh.size(wanted.axes), wanted.unit)
    if all(lo % need == 0 for lo, _ in cuts):
        return wanted
    return LetterSplit(wanted.axes, lcm(wanted.unit, need))
