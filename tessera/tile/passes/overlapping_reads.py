"""Loads of tiles that overlap: those of a stencil, or of a loop whose boxes advance by less than
they are long. What they share is read again at once, so it is worth a place in the L1 cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir import affine
from tessera.tile.ir.affine import Form, Forms
from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    Node,
    Op,
    Operand,
    SSAValue,
    definitions,
    regions,
)
from tessera.tile.ir.types import GlobalTensor, Scalar, Type

SECTOR_BITS = 256  # what a cache fetches at once: neighbours along a row come with what is read


@dataclass(frozen=True)
class Footprint:
    """A load of a box of a tensor. reach: how far apart along each axis two such boxes still
    share a sector. loops: the step of each loop around it, by its variable."""

    loaded: SSAValue
    tensor: SSAValue
    box: tuple[int, ...]
    offsets: tuple[Form, ...]
    reach: tuple[int, ...]
    loops: dict[SSAValue, int]

    def meets(self, other: Footprint) -> bool:
        return (self.tensor, self.box) == (other.tensor, other.box) and self._near(
            [affine.add(a, b, -1) for a, b in zip(self.offsets, other.offsets, strict=True)])

    def meets_its_next(self) -> bool:
        """Whether that of the next iteration of a loop overlaps, and is another one."""
        for var, step in self.loops.items():
            moved = [affine.constant(f.get(var, 0) * step) for f in self.offsets]
            if any(m[None] for m in moved) and self._near(moved):
                return True
        return False

    def _near(self, apart: Sequence[Form]) -> bool:
        return all(set(d) <= {None} and abs(d.get(None, 0)) < n
                   for d, n in zip(apart, self.reach, strict=True))


def overlapping_reads(function: Function) -> frozenset[SSAValue]:
    """The tiles whose loads read what another load, or another iteration, reads too."""
    every = [*_footprints(function.body, _Scope(definitions(function)), {})]
    found = {f.loaded for f in every if f.meets_its_next()}
    for a, b in combinations(every, 2):
        if a.meets(b):
            found |= {a.loaded, b.loaded}
    return frozenset(found)


class _Scope:
    def __init__(self, types: dict[SSAValue, Type]):
        self.types, self.forms = types, Forms()
        self.views: dict[SSAValue, Op] = {}

    def note(self, op: Op) -> None:
        if op.name == "view":
            self.views[op.outs[0].value] = op
        elif len(op.outs) == 1 and self._is_integer(op.outs[0].value) and all(
                map(self._is_integer, op.args)):
            self.forms.note(op.name, op.outs[0].value, op.args)

    def _is_integer(self, x: Operand) -> bool:
        kind = Scalar(x.dtype) if isinstance(x, Const) else self.types[x]
        return isinstance(kind, Scalar) and kind.dtype.kind in ("int", "uint")


def _footprints(body: Sequence[Node], scope: _Scope, loops: dict[SSAValue, int]
                ) -> Iterator[Footprint]:
    for node in body:
        if isinstance(node, Op):
            scope.note(node)
            view = scope.views.get(node.args[0]) if node.name == "load_tile" else None  # type: ignore[arg-type]
            tensor = None if view is None else scope.types[view.args[0]]  # type: ignore[index]
            if view is not None and isinstance(tensor, GlobalTensor):
                yield _footprint(node, view, tensor, scope.forms, loops)
            continue
        inside = loops
        if isinstance(node, For) and isinstance(node.step, Const):
            inside = {**loops, node.var.value: int(node.step.value)}
        for part in regions(node):
            yield from _footprints(part, scope, inside)


def _footprint(load: Op, view: Op, tensor: GlobalTensor, forms: Forms, loops: dict[SSAValue, int]
               ) -> Footprint:
    box = tuple(view.attr["box"])
    row = max(box[-1], SECTOR_BITS // tensor.numeric.dtype.bits)
    return Footprint(load.outs[0].value, view.args[0], box,  # type: ignore[arg-type]
                     tuple(map(forms.form, view.args[1:])), (*box[:-1], row), loops)
