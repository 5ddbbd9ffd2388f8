"""A whole-array function's kernel: its trace on whole tiles, cut into blocks of the result.

A group asks for its block of the result, and each op asks its operands for what it needs of them: a
matmul its rows of a and its columns of b, a row statistic the whole row. Long contractions and
reductions become loops over steps. So nothing has to fit into a group but blocks, and two uses of
one array in different places are two loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, NumericType, as_type, i32
from tessera.tensor import TensorType
from tessera.tile.builder.edge_masks import mask_edge
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.frontend.parameters import declare, parameter
from tessera.tile.frontend.source import KernelSource
from tessera.tile.frontend.trace_kernel import record_constant
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.frontend.whole_array import WholeArrayTrace, matrix_axes
from tessera.tile.ir.handles import AxisSlice, Handle
from tessera.tile.ir.ir import Const, Def, For, Function, GridAxis, Node, Op, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType
from tessera.tile.ops.macros import store_tile

# Ops whose axis (of a reshape all axes) must be whole: elements of one block depend on others.
SHUFFLING = frozenset({"reshape", "sort", "argsort", "cumsum", "cummax", "cumprod"})
# Ops with numbers that say where their tile lies: operand -> axis of the tile.
PLACED = {"causal_mask": {1: 0, 2: 1}, "span_mask": {2: 1}, "drop": {2: 0, 3: 1}}
UNIT = 16  # extents of a matmul are multiples of it


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
class BlockPlan:
    """Blocks of the result; None: the whole axis. step: of loops over long axes."""

    m: int | None
    n: int | None
    step: int


Rule = Callable[["BlockWriter", Op, Cuts, Scope], Handle]
BLOCKS: dict[str, Rule] = {}  # by op: how its block is computed from blocks of its operands


def block_rule(name: str) -> Callable[[Rule], Rule]:
    """Registers how a block of this op's result is computed."""

    def register(rule: Rule) -> Rule:
        if name in BLOCKS:
            raise ValueError(f"{name} has a rule for its blocks already")
        BLOCKS[name] = rule
        return rule

    return register


class BlockWriter:
    """Writes the kernel of one block of the result."""

    def __init__(self, t: KernelTracer, dag: WholeArrayTrace, plan: BlockPlan, annotated: Any):
        self.t, self.ir, self.dag, self.plan = t, t.ir, dag, plan
        self.annotated = annotated
        self.memo: dict[tuple[SSAValue, Cuts], Handle] = {}
        self.top = Scope(0, t.ir.block)

    def run(self) -> Function:
        self.ir.block = self.top.nodes
        declare(self.t, matrix_axes)
        t = self.dag.result.type
        assert isinstance(t, TileType)
        cuts = tuple(self.cut(extent, size) for extent, size in
                     zip(t.shape, (self.plan.m, self.plan.n), strict=False))
        value = self.value(self.dag.result.value, cuts)
        self.t.position.line = self.dag.ops[self.dag.result.value].where
        self.store_result(value, cuts, t)
        constants = {**dict(self.t.spec.constants), **self.t.grid.fixed}
        return Function(self.t.fn.__name__, tuple(p for p in self.t.params if p.role != "dim"),
                        tuple(self.t.grid.axes), "axes" if self.t.grid.axes else "one",
                        ("tensor", "result"), tuple((k, record_constant(v)) for k,
                                                    v in constants.items()),
                        tuple(self.top.nodes), self.t.spec.lanes, modes=self.t.spec.modes)

    def cut(self, extent: int, size: int | None) -> AxisBlock | None:
        """A grid axis of blocks, also of one that reaches beyond a short axis: matmuls come in
        multiples of 16. None where the axis is wanted whole, or broadcasts."""
        if size is None or extent == 1:
            return None
        size = min(size, max(UNIT, 1 << (extent - 1).bit_length()))
        # Not grid.axis(): rows and columns of a square result are two axes of one extent.
        grid = self.t.grid
        grid.axes.append(GridAxis(str(extent), size))
        at = self.ir.arithmetic("mul", (grid.group_coordinate(len(grid.axes) - 1), size))
        return AxisBlock(at, size, extent, self.top)

    def store_result(self, value: Handle, cuts: Cuts, t: TileType) -> None:
        kind = result_type(self.annotated, self.t.spec, t)
        dims = ((self.dag.batch,) if self.dag.batch is not None else ()) + t.shape
        out = parameter(self.t, "result", GlobalTensor(kind, dims), "output")
        if self.dag.batch is not None:
            out = replace(out, hidden=(0,))
        store_tile(self.t, self.view_at(out, cuts), value)

    def view_at(self, base: Handle, cuts: Cuts) -> Handle:
        parts = [AxisSlice(None, None, ":") if c is None else
                 AxisSlice(c.origin, self.ir.arithmetic("add", (c.origin, c.size)), ":")
                 for c in cuts]
        return self.t.memory.make_view(base, parts)

    def value(self, v: SSAValue, cuts: Cuts) -> Handle:
        """The part of a value of the trace, written where the loops that it depends on begin."""
        key = (v, cuts)
        if key not in self.memo:
            scope = max((c.scope for c in cuts if c is not None), key=lambda s: s.depth,
                        default=self.top)
            op, position = self.dag.ops[v], self.t.position
            outer, self.ir.block = self.ir.block, scope.nodes
            line, position.line = position.line, op.where or position.line
            self.memo[key] = self.block_of(v, op, cuts, scope)
            self.ir.block, position.line = outer, line
        return self.memo[key]

    def block_of(self, v: SSAValue, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        if v in self.dag.loads:
            base = self.t.env[self.dag.loads[v]]
            return self.t.call_op(OPS["load"], [self.view_at(base, cuts)], {})
        if op.name in BLOCKS:
            return BLOCKS[op.name](self, op, cuts, scope)
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
            return next(p.type for p in self.t.params if p.value == x)
        return next(d.type for d in op.outs if d.value == x)

    def elementwise(self, op: Op, cuts: Cuts) -> Handle:
        args = [self.operand_at(a, cuts) for a in op.args]
        for i, axis in PLACED.get(op.name, {}).items():
            if (c := cuts[axis]) is not None:
                at = args[i].value if isinstance(args[i], Const) else args[i]
                args[i] = self.ir.arithmetic("add", (at, c.origin))
        return self.ir.emit(op.name, args, op.outs[0].value.name, **op.attr)

    def as_number(self, x: Any) -> Handle:
        return x if isinstance(x, Handle) else self.ir.emit("constant", [], dtype=i32, value=x)

    def reduced(self, op: Op, cuts: Cuts, scope: Scope) -> Handle:
        """A reduction along an axis, over long ones in steps."""
        x, axis, fill = op.args[0], op.attr["axis"], OPS[op.name].neutral
        assert isinstance(x, SSAValue) and fill is not None
        shape = self.type_in_trace(x).shape
        if axis is None:
            return self.ir.emit(op.name, [self.value(x, (None,) * len(shape))], **op.attr)

        def part(step: AxisBlock | None) -> Handle:
            found = self.value(x, cuts[:axis] + (step,) + cuts[axis:])
            if step is not None:
                found = self.inside(x, found, axis, step, fill, loads=False)
            return self.ir.emit(op.name, [found], **op.attr)

        made, extent = op.outs[0].type, shape[axis]
        join = OPS[op.name].joined_by
        if extent <= self.plan.step or not join or not isinstance(made, TileType):
            return part(self.padded(extent))
        first = self.ir.emit("full", [], shape=_block(made.shape, cuts), dtype=made.dtype,
                               value=neutral(op.name, made.dtype))
        return self.stream(extent, first, lambda step, total: self.ir.emit(
            join, [total, part(step)]), scope)

    def padded(self, extent: int) -> AxisBlock | None:
        """A whole axis of which matmuls can be made: one block of a multiple of 16."""
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
        edge = self.t.facts.make_edge(step.origin, step.extent, False)
        return mask_edge(self.ir, x, axis, edge, fill)

    def stream(self, extent: int, first: Handle, iteration: Callable[[AxisBlock, Handle], Handle],
               scope: Scope) -> Handle:
        """A loop over steps of an axis that carries one tile."""
        inner = Scope(scope.depth + 1, [])
        var = Def(self.ir.names.fresh("step"), Scalar(i32))
        total = Def(self.ir.names.fresh("total"), first.type)
        lo, hi, by = self.t.values.loop_bounds[var.value] = (
            self.ir.literal(0), self.ir.literal(extent), self.ir.literal(self.plan.step))
        outer, self.ir.block = self.ir.block, inner.nodes
        step = AxisBlock(Handle(var.value, var.type), self.plan.step, extent, inner)
        last = iteration(step, Handle(total.value, total.type))
        self.ir.block = outer
        self.memo = {k: h for k, h in self.memo.items()  # what the loop defines ends with it
                     if not any(c is not None and c.scope is inner for c in k[1])}
        outer.append(For(var, lo, hi, by, (total,), (first.value,), tuple(inner.nodes),
                         (last.value,), "serial", self.t.position.where()))
        return Handle(total.value, total.type)


@block_rule("reshape")
def reshape_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    if any(c is not None for c in cuts):
        raise Untileable(op.name)
    x = op.args[0]
    assert isinstance(x, SSAValue)
    whole = (None,) * len(w.type_in_trace(x).shape)
    return w.ir.emit("reshape", [w.value(x, whole)], **op.attr)


@block_rule("transpose")
def transpose_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    x = op.args[0]
    assert isinstance(x, SSAValue)
    return w.ir.emit("transpose", [w.value(x, cuts[::-1])], op.outs[0].value.name)


@block_rule("expand_dims")
def expand_dims_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    axis = op.attr["axis"]
    return w.ir.expand(w.operand_at(op.args[0], cuts[:axis] + cuts[axis + 1:]), axis)


@block_rule("full")
def full_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    return w.ir.emit("full", [], **op.attr | {"shape": _block(op.attr["shape"], cuts)})


@block_rule("broadcast_to")
def broadcast_to_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    x = w.operand_at(op.args[0], cuts)
    return w.ir.emit("broadcast_to", [x], shape=_block(op.attr["shape"], cuts))


@block_rule("arange")
def arange_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    (c,), attrs = cuts, op.attr
    if c is None:
        return w.ir.emit("arange", [], **attrs)
    made = w.ir.emit("arange", [], **attrs | {"size": c.size})
    return w.ir.arithmetic("add", (made, w.ir.cast(w.as_number(c.origin), attrs["dtype"])))


@block_rule("matmul")
def matmul_block(w: BlockWriter, op: Op, cuts: Cuts, scope: Scope) -> Handle:
    """Rows of a by columns of b, over the contracted axis in steps."""
    a, b = op.args[:2]
    assert isinstance(a, SSAValue) and isinstance(b, SSAValue)
    depth = w.type_in_trace(a).shape[1]
    start = [w.operand_at(x, cuts) for x in op.args[2:]]

    def iteration(step: AxisBlock | None, *total: Handle) -> Handle:
        x, y = w.value(a, (cuts[0], step)), w.value(b, (step, cuts[1]))
        if step is not None:
            x, y = w.inside(a, x, 1, step, 0.0), w.inside(b, y, 0, step, 0.0)
        return w.ir.emit("matmul", [x, y, *total], **op.attr)

    if depth <= w.plan.step:
        return iteration(w.padded(depth), *start)
    t = op.outs[0].type
    assert isinstance(t, TileType)
    zero = 0.0 if t.dtype.kind == "float" else 0
    first = start[0] if start else w.ir.emit(
        "full", [], shape=_block(t.shape, cuts), value=zero, dtype=t.dtype)
    return w.stream(depth, first, iteration, scope)


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


def trace_block(source: KernelSource, fn: Callable, spec: KernelSpec, dag: WholeArrayTrace,
                schedule: Schedule) -> Function:
    """The kernel for blocks of a schedule: block=(m, n), k the step; those left open are whole.

    Axes that some op needs whole are not cut.
    """
    m, n, step = schedule.m, schedule.n, schedule.value("k_")
    def written(m: int | None, n: int | None) -> Function:
        t = KernelTracer(source, fn, replace(spec, result=None))
        return BlockWriter(t, dag, BlockPlan(m, n, step), spec.result).run()

    for blocks in ((m, n), (m, None), (None, n)):
        try:
            return written(*blocks)
        except Untileable:
            continue
    return written(None, None)


__all__ = ["trace_block"]
