"""Which dimensions of an op's operands and results are split together.

    matmul: ...mk, ...kn -> ...mn        a [8, 64], b [64, 32]: (m, k), (k, n) -> (m, n)

Every dimension gets a label, or None when each shard needs it whole. Dimensions of one label are
cut at the same places. They come from the index letters of the op records; reshape, whose
dimensions are products of each other, has labels with an `inner` extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tessera.graph.ir import Node
from tessera.graph.op import Aval

from ...lazy_dataclass import dataclass
from ..partition import extents
from .masked_indexing import SPLIT, can_mask


@dataclass(frozen=True)
class DimensionLabel:
    """A dimension: its letter, and how many of the letter's elements one index spans."""

    letter: str
    inner: int = 1


Labels = tuple[DimensionLabel | None, ...]


@dataclass(frozen=True)
class NodeLabels:
    """Labels of every operand and result of a node."""

    ins: tuple[Labels, ...]
    outs: tuple[Labels, ...]

    @property
    def reduced(self) -> set[str]:
        """Letters of operands alone: shards of them give partial results."""
        return _letters(self.ins) - _letters(self.outs)


def reduces_of(node: Node) -> str:
    """How partial results of a node combine."""
    return node.op.reduces or ("sum" if can_mask(node) else "")


def _letters(groups: Sequence[Labels]) -> set[str]:
    return {label.letter for labels in groups for label in labels if label is not None}


def labels_of(node: Node) -> NodeLabels:
    """The labels of a node. An op without index letters needs everything whole."""
    ins = tuple(v.aval for v in node.inputs)
    outs = tuple(v.aval for v in node.outputs)
    if node.op.name == "reshape":
        return NodeLabels(*_reshape(extents(ins[0]), extents(outs[0])))
    axes = node.op.axes
    if axes is None or not all(isinstance(n, int) for a in (*ins, *outs) for n in a.shape):
        return NodeLabels(tuple(_no_labels(a) for a in ins), tuple(_no_labels(a) for a in outs))
    text = axes if isinstance(axes, str) else axes(*ins, **node.attrs)
    if can_mask(node):
        text = text.replace("_", SPLIT)
    left, right = text.split("->")
    specs = _per_operand(left, len(ins)), _per_operand(right, len(outs))
    return _named(specs[0], ins, specs[1], outs)


def _no_labels(aval: Aval) -> Labels:
    return (None,) * aval.ndim


def _per_operand(text: str, count: int) -> list[str]:
    parts = text.split(",") if count else []
    return parts + [parts[-1]] * (count - len(parts)) if parts else [""] * count


def _named(left: list[str], ins: Sequence[Aval], right: list[str], outs: Sequence[Aval]
           ) -> NodeLabels:
    """Labels by letters; a dimension of extent 1 that stretches has none, and one of a part of the
    letter's extent, such as heads of keys, spans several of its elements."""
    found = [_spell(spec, a.ndim) for spec, a in zip((*left, *right), (*ins, *outs), strict=True)]
    extent: dict[str, int] = {}
    for names, aval in zip(found, (*ins, *outs), strict=True):
        for name, n in zip(names, extents(aval), strict=True):
            if name is not None:
                extent[name] = max(extent.get(name, 1), n)
    made = tuple(
        tuple(None if name is None or not n or n == 1 != extent[name] or extent[name] % n else
              DimensionLabel(name, extent[name] // n)
              for name, n in zip(names, extents(aval), strict=True))
        for names, aval in zip(found, (*ins, *outs), strict=True)
    )
    return NodeLabels(made[:len(ins)], made[len(ins):])


def _spell(spec: str, ndim: int) -> list[str | None]:
    """One name per dimension: letters, and for "..." names that count from its end."""
    head, dots, tail = spec.partition("...")
    rest = ndim - len(head) - len(tail) if dots else 0
    middle = [f".{rest - i}" for i in range(rest)]
    return [None if c in ("_", "1") else c for c in (*head, *middle, *tail)]


def _reshape(source: Sequence[int], target: Sequence[int]) -> tuple[tuple[Labels], tuple[Labels]]:
    """Labels of a reshape: in each run of dimensions with equal products, the first of each side
    (extents of 1 aside) may be split, between whole runs of what follows it."""
    ins: list[DimensionLabel | None] = [None] * len(source)
    outs: list[DimensionLabel | None] = [None] * len(target)
    for k, (a, b) in enumerate(reshape_runs(source, target)):
        first = [next((i for i in run if shape[i] != 1), None)
                 for run, shape in ((a, source), (b, target))]
        if first[0] is None or first[1] is None:
            continue
        ins[first[0]] = DimensionLabel(f"r{k}", prod(source[i] for i in a if i > first[0]))
        outs[first[1]] = DimensionLabel(f"r{k}", prod(target[i] for i in b if i > first[1]))
    return (tuple(ins),), (tuple(outs),)


def reshape_runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """The shortest runs of dimensions on both sides with the same number of elements."""
    found, i, j = [], 0, 0
    if 0 in source:
        return []
    while i < len(source) or j < len(target):
        a, b = i, j
        left = right = 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target):
            right, j = target[j], j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        found.append((range(a, i), range(b, j)))
    return found
