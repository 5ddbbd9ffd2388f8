"""Which tensors a launch surely writes whole, without a look at what they held before.

Proved for what the groups store side by side: the box of a group at its own number times the box's
extent, along as many axes as the grid has, or the element of a lane at its number in the launch.
What is stored in a loop, or under another condition, is not proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.ir import Const, Function, If, Op, Operand, SSAValue, defining_ops
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.passes.written_arguments import read_parameters, written_parameters


def overwritten_parameters(function: Function, grid: tuple[int, ...], lanes: int,
                           shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
                           ) -> frozenset[str]:
    """Names of the tensor parameters of which nothing is read and every element is written.

    grid, lanes: of the launch; shapes: of the tensor parameters; sizes: of named extents.
    """
    proof = _Proof(function, grid, lanes, sizes)
    found = frozenset(p.value.name for p in function.params
                      if isinstance(p.type, GlobalTensor) and p.value.name in shapes
                      and proof.covers(p.value, shapes[p.value.name]))
    return found & written_parameters(function) - read_parameters(function)


@dataclass
class _Proof:
    function: Function
    grid: tuple[int, ...]
    lanes: int
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        self.made = defining_ops(self.function.body)
        self.dims = {p.value for p in self.function.params if p.role == "dim"}

    def covers(self, tensor: SSAValue, shape: tuple[int, ...]) -> bool:
        for node in self.function.body:
            if isinstance(node, Op) and node.name == "store_tile":
                view = self.made.get(node.args[0])
                if view is not None and view.name == "view" and view.args[0] == tensor and \
                        self._boxes(view, shape):
                    return True
                if view is not None and view.name == "windows" and view.args[0] == tensor and \
                        self._patches(view, shape):
                    return True
            if isinstance(node, If) and self._lanes(node, tensor, shape):
                return True
        return False

    def _boxes(self, view: Op, shape: tuple[int, ...]) -> bool:
        """Whether the boxes of all groups cover the tensor."""
        axes = set[int]()
        for offset, box, size in zip(view.args[1:], view.attr["box"], shape, strict=True):
            if self.number(offset) == 0 and box >= size:
                continue
            axis = self._axis(offset, box)
            if axis is None or axis in axes or self.grid[axis] * box < size:
                return False
            axes.add(axis)
        return True

    def _patches(self, view: Op, shape: tuple[int, ...]) -> bool:
        """Whether windows are patches side by side, and the groups write all of them: a column is
        the number of a pixel of its patch times the channels, and a channel."""
        attr, (_, place, column) = view.attr, view.args
        whole = all(n * s >= i for n, s, i in zip(
            attr["results"], attr["stride"], attr["images"], strict=True))
        plain = attr["window"] == attr["stride"] and set(attr["dilation"]) == {1} and not any(
            attr["before"])
        rows = self._axis(place, attr["rows"])
        add = self.made.get(column)
        if not whole or not plain or rows is None or add is None or add.name != "add":
            return False
        axes = [self._axis(x, n) for x, n in zip(
            add.args, (attr["channels"], attr["columns"]), strict=True)]
        places = shape[0] // prod(attr["images"]) * prod(attr["results"])
        if None in axes or len({rows, *axes}) < 3 or self.grid[rows] * attr["rows"] < places:
            return False
        taps, columns = (self.grid[a] for a in axes)  # type: ignore[index]
        return taps >= prod(attr["window"]) and columns * attr["columns"] >= attr["channels"]

    def _axis(self, offset: Operand, box: int) -> int | None:
        """The axis of the grid of which an offset is the number of the group times the box."""
        op = self.made.get(offset)
        if op is None:
            return None
        if op.name == "mul":
            for a, b in (op.args, op.args[::-1]):
                if self.number(b) == box:
                    return self._axis(a, 1)
            return None
        if box != 1 or op.name != "group_id":
            return None
        return op.attr["axis"] if op.attr["axis"] is not None else \
            0 if len(self.grid) == 1 else None

    def _lanes(self, node: If, tensor: SSAValue, shape: tuple[int, ...]) -> bool:
        """if i < n: tensor[i] = ..., with i the lane's number in the launch."""
        cond = self.made.get(node.cond)
        if len(shape) != 1 or cond is None or cond.name != "lt":
            return False
        i, n = cond.args
        base = self.made.get(i)
        lanes, limit = prod(self.grid) * self.lanes, self.number(n)
        if base is None or base.name != "linear_id" or limit is None or \
                min(limit, lanes) < shape[0]:
            return False
        return any(isinstance(s, Op) and s.name == "store_element" and s.args[0] == tensor
                   and s.args[2] == i for s in node.then)

    def number(self, x: Operand) -> int | None:
        """What is known at the launch: constants and extents."""
        if isinstance(x, Const):
            return int(x.value) if x.dtype.kind in ("int", "uint") else None
        return self.sizes.get(x.name) if x in self.dims else None


__all__ = ["overwritten_parameters"]
