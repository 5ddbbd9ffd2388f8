"""Whole-array functions as kernels: traced once on whole tiles, then cut into blocks of the result.

    def scores(q: Tile, k: Tile) -> Tile:
        return tile.dot(q, k.T) / sqrt(d)

The trace is a dag of tile ops without memory. A group asks for its block of the result, and each op
asks its operands for what it needs of them: a product its rows of a and its columns of b, a row
statistic the whole row. Long contractions and reductions become loops over steps. So nothing has to
fit into a group but blocks, and two uses of one array in different places are two loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tessera.errors import SourceLine
from tessera.numerics import DType, NumericType, as_type, i32
from tessera.tensor import TensorType
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.source import KernelSource
from tessera.tile.frontend.tracer import KernelSpec, KernelTracer, plain
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.handles import UNSET, AxisSlice, Handle, Undefined, describe
from tessera.tile.ir.ir import Def, For, Function, GridAxis, Node, Op, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType
from tessera.tile.ops.edge_masks import mask_edge

# Ops whose axis (of a reshape all axes) must be whole: elements of one block depend on others.
SHUFFLING = frozenset({"reshape", "sort", "argsort", "cumsum", "cummax", "cumprod"})
# Ops with numbers that say where their tile lies: operand -> axis of the tile.
PLACED = {"causal_mask": {1: 0, 2: 1}, "drop": {2: 0, 3: 1}}
UNIT = 16  # extents of a product are multiples of it


class Untileable(Exception):
    """An op needs a whole axis where a block was asked for."""


@dataclass(eq=False)
class Scope:
    """Nodes of the kernel, or of the body of a loop inside it."""

    depth: int
    nodes: list[Node]


@dataclass(frozen=True, eq=False)
class AxisBlock:
    """A block of an axis: `size` elements from `origin`, of `extent` in all."""

    origin: Any
    size: int
    extent: int
    scope: Scope


Cuts = tuple[AxisBlock | None, ...]  # per axis of a tile; None: the whole axis


@dataclass(frozen=True)
class Whole:
    """The trace of a function on whole tiles. loads: the parameter that a value was loaded from."""

    ops: dict[SSAValue, Op]
    loads: dict[SSAValue, str]
    result: Handle
    batch: int | None


class WholeTracer(KernelTracer):
    """Traces a body whose tensors are tiles from the start."""

    found: Handle

    def declare(self) -> None:
        super().declare()
        self.loads: dict[SSAValue, str] = {}
        for name, t in self.spec.params:
            if isinstance(t, GlobalTensor):
                place = self.env[name]
                self.env[name] = self.call(OPS["load"], [self.make_view(place, [])], {})
                self.loads[self.env[name].value] = name

    def grid_dims(self, t: GlobalTensor) -> tuple[int, ...]:
        """The first of three axes counts the matrices."""
        return (self.axis(str(self.dim_value(t.dims[0])), 1),) if len(t.dims) == 3 else ()

    def finish(self) -> None:
        value = self.env[RETURN]
        if self.exits.returns:
            self.node = self.exits.returns[-1]
        if isinstance(value, Undefined) or value is None or value is UNSET:
            self.fail("a whole-array function returns a tile on every path", "return at the end")
        if not isinstance(value, Handle) or not isinstance(value.type, TileType):
            self.fail(f"a whole-array function returns a tile, not {describe(value)}",
                      "for numbers and several results write a @ts.kernel with stores")
        self.found = value

    def whole(self) -> Whole:
        """The dag. Raises TileError at what is no pure op on whole tiles."""
        self.run()
        batches = [a for a in self.axis_names if a.block == 1]
        if len(batches) != len(self.axis_names):
            self.fail("row_index and col_index in a whole-array function",
                      "ts.tile.arange(0, x.shape[0]) is the position of each row")
        ops: dict[SSAValue, Op] = {}
        for node in self.block:
            if not isinstance(node, Op):
                self.refuse(node.where, "a loop or branch at run time")
            elif OPS[node.name].effect not in ("pure", "read"):
                self.refuse(node.where, f"{node.name}: it computes, and does not store")
            else:
                ops |= {d.value: node for d in node.outs}
        batch = int(batches[0].dim) if batches else None
        return Whole(ops, self.loads, self.found, batch)

    def refuse(self, where: SourceLine | None, what: str) -> NoReturn:
        raise TileError(f"in a whole-array function: {what}", where=where,
                        hint="write a @ts.kernel with blocks, loads and stores")


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of the result; None: the whole axis. step: of loops over long axes."""

    m: int | None
    n: int | None
    step: int


class BlockTracer(KernelTracer):
    """Writes the kernel of one block of the result."""

    def __init__(self, source: KernelSource, fn: Callable, spec: KernelSpec, dag: Whole,
                 plan: BlockPlan):
        super().__init__(source, fn, replace(spec, result=None))
        self.dag, self.plan, self.annotated = dag, plan, spec.result
        self.memo: dict[tuple[SSAValue, Cuts], Handle] = {}
        self.top = Scope(0, [])
        self.line: Any = None

    grid_dims = WholeTracer.grid_dims

    def where(self) -> Any:
        return self.line or super().where()

    def run(self) -> Function:
        self.block = self.top.nodes
        self.declare()
        t = self.dag.result.type
        assert isinstance(t, TileType)
        cuts = tuple(self.cut(extent, size) for extent, size in
                     zip(t.shape, (self.plan.m, self.plan.n), strict=False))
        value = self.value(self.dag.result.value, cuts)
        self.line = self.dag.ops[self.dag.result.value].where
        self.store_result(value, cuts, t)
        constants = {**dict(self.spec.constants), **self.fixed}
        return Function(self.fn.__name__, tuple(p for p in self.params if p.role != "dim"),
                        tuple(self.axis_names), "axes" if self.axis_names else "one",
                        ("tensor", "result"), tuple((k, plain(v)) for k, v in constants.items()),
                        tuple(self.top.nodes), self.spec.lanes)

    def cut(self, extent: int, size: int | None) -> AxisBlock | None:
        """A grid axis of blocks, also of one that reaches beyond a short axis: products come in
        multiples of 16. None where the axis is wanted whole, or broadcasts."""
        if size is None or extent == 1:
            return None
        size = min(size, max(UNIT, 1 << (extent - 1).bit_length()))
        # Not self.axis(): rows and columns of a square result are two axes of one extent.
        self.axis_names.append(GridAxis(str(extent), size))
        at = self.arithmetic("mul", (self.group_coordinate(len(self.axis_names) - 1), size))
        return AxisBlock(at, size, extent, self.top)

    def store_result(self, value: Handle, cuts: Cuts, t: TileType) -> None:
        kind = result_type(self.annotated, self.spec, t)
        dims = ((self.dag.batch,) if self.dag.batch is not None else ()) + t.shape
        out = self.parameter("result", GlobalTensor(kind, dims), "output")
        if self.dag.batch is not None:
            out = replace(out, hidden=(0,))
        self.store_tile(self.view_at(out, cuts), value)

    def view_at(self, base: Handle, cuts: Cuts) -> Handle:
        parts = [AxisSlice(None, None, ":") if c is None else
                 AxisSlice(c.origin, self.arithmetic("add", (c.origin, c.size)), ":") for c in cuts]
        return self.make_view(base, parts)

    # --- values -------------------------------------------------------------------------------
    def value(self, v: SSAValue, cuts: Cuts) -> Handle:
        """The part of a value of the trace, written where the loops that it depends on begin."""
        key = (v, cuts)
        if key not in self.memo:
            scope = max((c.scope for c in cuts if c is not None), key=lambda s: s.depth,
                        default=self.top)
            outer, self.block = self.block, scope.nodes
            line, self.line = self.line, self.dag.ops[v].where or self.line
            self.memo[key] = self.made(v, self.dag.ops[v], cuts, scope)
            self.block, self.line = outer, line
        return self.memo[key]

    def made(self, v: SSAValue, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        if v in self.dag.loads:
            base = self.env[self.dag.loads[v]]
            return self.call(OPS["load"], [self.view_at(base, cuts)], {})
        rule = getattr(self, "make_" + op.name, None)
        if rule is not None:
            return rule(op, cuts, scope)
        if OPS[op.name].neutral is not None:
            return self.reduced(op, cuts, scope)
        if op.name in SHUFFLING and cuts[op.attr.get("axis", len(cuts) - 1)] is not None:
            raise Untileable(op.name)
        return self.elementwise(op, cuts)

    def operand_at(self, x: Any, cuts: Cuts) -> Any:
        """An operand for an elementwise op: axes of extent 1 stay whole."""
        if not isinstance(x, SSAValue):
            return x
        t = self.type_in_trace(x)
        if isinstance(t, Scalar):
            return self.value(x, ()) if x in self.dag.ops else Handle(x, t)
        return self.value(x, tuple(None if n == 1 else c
                                   for n, c in zip(t.shape, cuts, strict=True)))

    def type_in_trace(self, x: SSAValue) -> Any:
        op = self.dag.ops.get(x)
        if op is None:
            return next(p.type for p in self.params if p.value == x)
        return next(d.type for d in op.outs if d.value == x)

    def elementwise(self, op: Op, cuts: Cuts) -> Handle:
        args = [self.operand_at(a, cuts) for a in op.args]
        for i, axis in PLACED.get(op.name, {}).items():
            if (c := cuts[axis]) is not None:
                args[i] = self.arithmetic("add", (args[i], c.origin))
        return self.emit(op.name, args, op.outs[0].value.name, **op.attr)

    def make_reshape(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        if any(c is not None for c in cuts):
            raise Untileable(op.name)
        x = op.args[0]
        assert isinstance(x, SSAValue)
        whole = (None,) * len(self.type_in_trace(x).shape)
        return self.emit("reshape", [self.value(x, whole)], **op.attr)

    def make_transpose(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        x = op.args[0]
        assert isinstance(x, SSAValue)
        return self.emit("transpose", [self.value(x, cuts[::-1])], op.outs[0].value.name)

    def make_expand_dims(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        axis = op.attr["axis"]
        return self.expand(self.operand_at(op.args[0], cuts[:axis] + cuts[axis + 1:]), axis)

    def make_full(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        return self.emit("full", [], **op.attr | {"shape": _block(op.attr["shape"], cuts)})

    def make_broadcast_to(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        x = self.operand_at(op.args[0], cuts)
        return self.emit("broadcast_to", [x], shape=_block(op.attr["shape"], cuts))

    def make_arange(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        (c,), attrs = cuts, op.attr
        if c is None:
            return self.emit("arange", [], **attrs)
        made = self.emit("arange", [], **attrs | {"size": c.size})
        return self.arithmetic("add", (made, self.cast(self.as_number(c.origin), attrs["dtype"])))

    def as_number(self, x: Any) -> Handle:
        return x if isinstance(x, Handle) else self.emit("constant", [], dtype=i32, value=x)

    # --- products and reductions --------------------------------------------------------------
    def make_matmul(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        """Rows of a by columns of b, over the contracted axis in steps."""
        a, b = op.args[:2]
        assert isinstance(a, SSAValue) and isinstance(b, SSAValue)
        depth = self.type_in_trace(a).shape[1]
        start = [self.operand_at(x, cuts) for x in op.args[2:]]

        def turn(step: AxisBlock | None, *total: Handle) -> Handle:
            x, y = self.value(a, (cuts[0], step)), self.value(b, (step, cuts[1]))
            if step is not None:
                x, y = self.inside(a, x, 1, step, 0.0), self.inside(b, y, 0, step, 0.0)
            return self.emit("matmul", [x, y, *total], **op.attr)

        if depth <= self.plan.step:
            return turn(self.padded(depth), *start)
        t = op.outs[0].type
        assert isinstance(t, TileType)
        zero = 0.0 if t.dtype.kind == "float" else 0
        first = start[0] if start else self.emit(
            "full", [], shape=_block(t.shape, cuts), value=zero, dtype=t.dtype)
        return self.stream(depth, first, turn, scope)

    def reduced(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        """A reduction along an axis, over long ones in steps."""
        x, axis, fill = op.args[0], op.attr["axis"], OPS[op.name].neutral
        assert isinstance(x, SSAValue) and fill is not None
        shape = self.type_in_trace(x).shape
        if axis is None:
            return self.emit(op.name, [self.value(x, (None,) * len(shape))], **op.attr)

        def part(step: AxisBlock | None) -> Handle:
            found = self.value(x, cuts[:axis] + (step,) + cuts[axis:])
            if step is not None:
                found = self.inside(x, found, axis, step, fill, loads=False)
            return self.emit(op.name, [found], **op.attr)

        made, extent = op.outs[0].type, shape[axis]
        join = OPS[op.name].joined_by
        if extent <= self.plan.step or not join or not isinstance(made, TileType):
            return part(self.padded(extent))
        first = self.emit("full", [], shape=_block(made.shape, cuts), dtype=made.dtype,
                          value=neutral(op.name, made.dtype))
        return self.stream(extent, first, lambda step, total: self.emit(
            join, [total, part(step)]), scope)

    def padded(self, extent: int) -> AxisBlock | None:
        """A whole axis of which products can be made: one block of a multiple of 16."""
        size = -(-extent // UNIT) * UNIT
        return None if extent in (1, size) else AxisBlock(0, size, extent, self.top)

    def inside(self, v: SSAValue, x: Handle, axis: int, step: AxisBlock, fill: float,
               loads: bool = True) -> Handle:
        """x with `fill` where the last step reaches beyond the axis. What was loaded is 0 there."""
        if step.extent % step.size == 0:
            return x
        while (op := self.dag.ops[v]).name in ("convert", "transpose") and v not in self.dag.loads:
            v = op.args[0]  # type: ignore[assignment]
        if loads and v in self.dag.loads:
            return x
        return mask_edge(self, x, axis, self.make_edge(step.origin, step.extent, False), fill)

    def stream(self, extent: int, first: Handle, turn: Callable[[AxisBlock, Handle], Handle],
               scope: Scope) -> Handle:
        """A loop over steps of an axis that carries one tile."""
        inner = Scope(scope.depth + 1, [])
        var = Def(self.names.fresh("step"), Scalar(i32))
        total = Def(self.names.fresh("total"), first.type)
        lo, hi, by = self.loop_bounds[var.value] = (
            self.literal(0), self.literal(extent), self.literal(self.plan.step))
        outer, self.block = self.block, inner.nodes
        step = AxisBlock(Handle(var.value, var.type), self.plan.step, extent, inner)
        last = turn(step, Handle(total.value, total.type))
        self.block = outer
        self.memo = {k: h for k, h in self.memo.items()  # what the loop defines ends with it
                     if not any(c is not None and c.scope is inner for c in k[1])}
        outer.append(For(var, lo, hi, by, (total,), (first.value,), tuple(inner.nodes),
                         (last.value,), "serial", self.where()))
        return Handle(total.value, total.type)


def neutral(reduction: str, dtype: DType) -> Any:
    """What a reduction begins with."""
    value = OPS[reduction].neutral
    assert value is not None, reduction
    if dtype.kind == "float":
        return value
    return {float("inf"): dtype.max, -float("inf"): dtype.min}.get(value, int(value))


def _block(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    return tuple(n if c is None or n == 1 else c.size for n, c in zip(shape, cuts, strict=True))


def result_type(annotated: Any, spec: KernelSpec, t: TileType) -> NumericType:
    """The annotation's, else the widest of the floating inputs, as eager ops give."""
    if isinstance(annotated, TensorType) and annotated.type is not None:
        return annotated.type
    floats = [p.numeric.dtype for _, p in spec.params
              if isinstance(p, GlobalTensor) and p.dtype.kind == "float"]
    if t.dtype.kind != "float" or not floats:
        return as_type(t.dtype)
    return as_type(max(floats, key=lambda d: (d.bits, d.man)))


def trace_whole(source: KernelSource, fn: Callable, spec: KernelSpec) -> Whole:
    """The dag of a function for these shapes."""
    return WholeTracer(source, fn, replace(spec, result=None)).whole()


def trace_block(source: KernelSource, fn: Callable, spec: KernelSpec, dag: Whole,
                schedule: Schedule) -> Function:
    """The kernel for blocks of a schedule: block=(m, n), k the step; those left open are whole.

    Axes that some op needs whole are not cut.
    """
    m, n, step = schedule.m, schedule.n, schedule.value("k_")
    for plan in (BlockPlan(m, n, step), BlockPlan(m, None, step), BlockPlan(None, n, step)):
        try:
            return BlockTracer(source, fn, spec, dag, plan).run()
        except Untileable:
            continue
    return BlockTracer(source, fn, spec, dag, BlockPlan(None, None, step)).run()


__all__ = ["Whole", "trace_block", "trace_whole"]
