"""Extents along which shards of a kernel's tensors can be computed alone.

    y[tile_m:tile_m + 4, 0:N] = softmax(x[tile_m:tile_m + 4, 0:N])      M, not N

Of a grid axis every access of a tensor that has its extent is a box which begins where the group's
block does, all that is written has the extent, nothing else asks where the group is or how far the
extent goes, and no element of a block meets another along it. What is not known to be so is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.tile.ir.ir import Const, For, Function, If, Node, Op, Operand, SSAValue, While
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ir.types import GlobalTensor, TileType

Tags = tuple[str | None, ...]  # of each axis of a tile or a view: the extent that it goes along


def independent_extents(function: Function) -> frozenset[str]:
    """The names of these extents."""
    if function.launch != "axes" or function.result[0] == "scalar":
        return frozenset()
    if independent_extents not in function.kept:  # layouts are chosen among many
        function.kept[independent_extents] = _Reading(function).read()
    return function.kept[independent_extents]


class _Reading:
    """Goes through a function, and takes from `left` what turns out to depend."""

    def __init__(self, function: Function):
        self.function = function
        self.grid = {i: a for i, a in enumerate(function.grid) if a.lo == "0" and not a.stride}
        named = [a.dim for a in function.grid]
        told = {name for name, _ in function.constants}
        self.left = {d for d in named if named.count(d) == 1} - told
        self.left &= {a.dim for a in self.grid.values()}
        self.tensors: dict[Any, tuple[str, ...]] = {}
        for p in function.params:
            if isinstance(p.type, GlobalTensor):
                dims = self.tensors[p.value] = tuple(map(str, p.type.dims))
                self.left -= {d for d in dims if dims.count(d) > 1}
        # where the extents themselves are values, by the name of the extent
        self.groups: dict[Any, str] = {}  # numbers of groups along an axis
        self.starts: dict[Any, str] = {}  # where their blocks begin
        self.sizes: dict[Any, str] = {
            p.value: p.value.name for p in function.params if p.role == "dim"}
        self.tags: dict[Any, Tags] = {}
        self.covered: dict[Any, frozenset[str]] = {}  # by views: extents that they go along

    def read(self) -> frozenset[str]:
        before = None
        while self.left and before != (self.left, self.tags):  # carried tags until they stay
            before = set(self.left), dict(self.tags)
            self.body(self.function.body)
        return frozenset(self.left)

    def body(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if not self.left:
                return
            if isinstance(node, Op):
                self.op(node)
            elif isinstance(node, For):
                self.asks(node.lo, node.hi, node.step)
                self.same(node.carried, node.inits)
                self.body(node.body)
                self.same(node.carried, node.yields)
            elif isinstance(node, If):
                self.asks(node.cond)
                self.body((*node.then, *node.orelse))
                self.same(node.outs, node.thens)
                self.same(node.outs, node.elses)
            else:
                assert isinstance(node, While)
                self.left = set()

    def same(self, outs: Sequence[Any], values: Sequence[Operand]) -> None:
        """Values that become others, of a loop or a branch."""
        for out, value in zip(outs, values, strict=True):
            self.asks(value)
            self.put(out.value, self.join([self.tags.get(out.value, ()), self.of(value)]))

    def asks(self, *values: Operand) -> None:
        """Something asks where the group is, or how far an extent goes."""
        for v in values:
            for named in (self.groups, self.starts, self.sizes):
                self.left.discard(named.get(v, ""))

    def of(self, x: Operand) -> Tags:
        return self.tags.get(x, ())

    def put(self, value: SSAValue, tags: Tags) -> None:
        if any(tags):
            self.tags[value] = tags

    def join(self, every: Sequence[Tags]) -> Tags:
        """Of elements that meet their counterparts: axes are counted from the last one."""
        made: list[str | None] = [None] * max(map(len, every), default=0)
        for tags in every:
            for i, tag in enumerate(reversed(tags), 1):
                if tag is not None and made[-i] not in (None, tag):
                    self.left -= {tag, made[-i]}
                made[-i] = made[-i] or tag
        return tuple(made)

    def op(self, op: Op) -> None:
        record, out = OPS[op.name], op.outs[0].value if len(op.outs) == 1 else None
        if op.name == "group_id" and out is not None:
            axis = self.grid.get(op.attr["axis"])
            if axis is None:
                self.left -= {a.dim for a in self.function.grid[op.attr["axis"]:][:1]}
            else:
                (self.starts if axis.block == 1 else self.groups)[out] = axis.dim
        elif op.name == "mul" and op.args[0] in self.groups:
            dim = self.groups[op.args[0]]
            block = next(a.block for a in self.grid.values() if a.dim == dim)
            if isinstance(op.args[1], Const) and op.args[1].value == block and out is not None:
                self.starts[out] = dim
            else:
                self.asks(*op.args)
        elif op.name == "view" and out is not None:
            self.view(op, out)
        elif op.name == "load_tile" and out is not None:
            self.put(out, self.of(op.args[0]))
        elif op.name == "store_tile":
            self.asks(op.args[1])
            self.join([self.of(op.args[0]), self.of(op.args[1])])
            self.left &= self.covered.get(op.args[0], frozenset())
        else:
            self.asks(*op.args)
            self.pure(op, record, out)

    def view(self, op: Op, out: SSAValue) -> None:
        """A box of a tensor: each axis begins at a block of its extent, or is none of these."""
        dims, box, kept = self.tensors.get(op.args[0]), op.attr["box"], op.attr["kept"]
        if dims is None or len(op.args) != len(dims) + 1:
            self.left = set()
            return
        found: list[str | None] = []
        for dim, start, size in zip(dims, op.args[1:], box, strict=True):
            block = next((a.block for a in self.grid.values() if a.dim == dim), None)
            here = self.starts.get(start) == dim and size == block
            if not here:
                self.asks(start)
                self.left.discard(dim)
            found.append(dim if here else None)
        self.put(out, tuple(found[i] for i in kept))
        self.covered[out] = frozenset(d for d in found if d is not None)

    def pure(self, op: Op, record: TileOp, out: SSAValue | None) -> None:
        """What computes, by where its elements meet; of anything else nothing is known."""
        tags = [self.of(x) for x in op.args]
        if out is None:
            self.left = set()
        elif record.family == "elementwise" or record.pointwise or op.name == "broadcast_to":
            self.put(out, self.join(tags))
        elif record.family == "create" and not op.args:
            pass  # the same in each group
        elif record.neutral is not None and record.family == "reduce":
            self.without(out, tags[0], op.attr["axis"], op)
        elif op.name == "expand_dims":
            i = op.attr["axis"]
            whole = tags[0] or (None,) * self.ndim(op, -1)
            self.put(out, (*whole[:i], None, *whole[i:]))
        elif op.name == "transpose" or "axes" in op.attr:
            order = op.attr.get("axes") or tuple(reversed(range(len(tags[0]))))
            self.put(out, tuple(tags[0][i] for i in order) if tags[0] else ())
        elif op.name == "matmul" and all(len(t) in (0, 2) for t in tags):
            a, b = (t or (None, None) for t in tags[:2])
            self.left -= {d for d in (a[1], b[0]) if d is not None}
            self.put(out, self.join([(a[0], b[1]), *tags[2:]]))
        else:
            self.left -= {d for t in tags for d in t if d is not None}
            if record.effect != "pure" or record.family in ("ids", "warp", "random", "cluster"):
                self.left = set()

    def without(self, out: SSAValue, tags: Tags, axis: int, op: Op) -> None:
        """A reduction along an axis."""
        if tags:
            self.left -= {tags[axis]} if tags[axis] is not None else set()
            self.put(out, (*tags[:axis], *tags[axis:][1:]))

    def ndim(self, op: Op, more: int) -> int:
        kind = op.outs[0].type
        return len(kind.shape) + more if isinstance(kind, TileType) else 0


__all__ = ["independent_extents"]
