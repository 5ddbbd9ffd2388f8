"""A kernel's body to Tile IR: parameters, named extents, grid axes, ranges and the result."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.dims import Dim
from tessera.numerics import i32, i64
from tessera.tensor import TensorType
from tessera.tile import origins
from tessera.tile.exits import RETURN, RETURNED, Exits
from tessera.tile.expressions import closure_of
from tessera.tile.handles import UNSET, Handle, NeedConstants, Row, Undefined, describe, is_number
from tessera.tile.ir import Axis, For, Function, Op, Param, Value
from tessera.tile.ops.registry import OPS
from tessera.tile.parameters import Context
from tessera.tile.schedule import Schedule
from tessera.tile.source import Source
from tessera.tile.spread import why_dependent
from tessera.tile.statements import Statements, resets
from tessera.tile.types import Buffer, Scalar, Tensor, Tile, Type, View


@dataclass(frozen=True)
class Spec:
    """What one specialisation of a kernel is made for. params: tensors and scalars in order."""

    params: tuple[tuple[str, Type], ...]
    constants: tuple[tuple[str, Any], ...]
    result: TensorType | Any
    schedule: Schedule
    lanes: int | None = None
    given_grid: bool = False
    fixed_dims: tuple[tuple[str, int], ...] = ()
    wide_dims: frozenset[str] = field(default=frozenset())


def trace(source: Source, fn: Callable, spec: Spec, sizes: dict[str, int]) -> Function:
    """The Tile IR of a kernel for `spec`. Extents that must be constants are taken from sizes."""
    fixed = dict(spec.fixed_dims)
    while True:
        try:
            return Tracer(source, fn, replace(spec, fixed_dims=tuple(sorted(fixed.items())))).run()
        except NeedConstants as need:
            fixed |= {n: sizes[n] for n in need.names}


class Tracer(Statements):
    def __init__(self, source: Source, fn: Callable, spec: Spec):
        super().__init__(source)
        self.fn, self.spec = fn, spec
        self.fixed = {n: DimInt(v) for n, v in spec.fixed_dims}
        self.globals = closure_of(fn)  # type: ignore[arg-type]
        self.active_calls: list[Any] = [fn]
        self.block_types: dict[Any, Any] = {}
        self.loop_env: list[dict[str, Any]] = []
        self.loop_bounds: dict[Any, Any] = {}
        self.axis_names: list[Axis] = []
        self.origin: dict[str, Any] = {}  # named extent -> origin of the group's block
        self.params: list[Param] = []
        self.result: tuple[str, ...] = ("none",)
        self.output: Handle | None = None
        self.loaded_dims: dict[str, Handle] = {}
        self.exits = Exits(source.tree)
        self.env: dict[str, Any] = {}
        self.coordinates: dict[Value, int] = {}

    # --- set-up -------------------------------------------------------------------------------
    def run(self) -> Function:
        self.declare()
        body = origins.bind(self, self.exits.body)
        self.statements(body)
        self.node = self.source.tree
        self.finish()
        constants = {**dict(self.spec.constants), **self.fixed}
        dims = [p for p in self.params if p.role == "dim"]
        rest = [p for p in self.params if p.role == "argument"
                or (p.role == "output" and p.value.name in self.result[1:])]
        return Function(self.fn.__name__, (*rest, *dims), tuple(self.axis_names), self.launch(),
                        self.result, tuple((k, plain(v)) for k, v in constants.items()),
                        tuple(self.block), self.spec.lanes)

    def declare(self) -> None:
        """Parameters, then named extents, as values under their own names."""
        self.env |= dict(self.spec.constants)
        self.env |= {RETURN: UNSET if self.exits.flags else None}
        self.env |= dict.fromkeys(self.exits.flags, False)
        names = [str(d) for _, t in self.spec.params if isinstance(t, Tensor)
                 for d in t.dims if isinstance(d, Dim) and str(d).isidentifier()]
        for name, t in self.spec.params:
            self.parameter(name, t, "argument")
        for name in dict.fromkeys(names):
            if name not in self.env:
                self.dimension(name)
        for name, t in self.spec.params:
            if isinstance(t, Tensor):
                self.env[name] = replace(self.env[name], hidden=self.grid_dims(t))
        if isinstance(self.spec.result, TensorType):
            kind = self.spec.result
            assert kind.type is not None
            t = Tensor(kind.type, kind.shape)
            self.output = replace(self.parameter("result", t, "output"), hidden=self.grid_dims(t))

    def parameter(self, name: str, t: Type, role: str) -> Handle:
        value = self.names.fresh(name)
        self.params.append(Param(value, t, role))
        made = Handle(value, t)
        self.block_types[value] = t
        if role == "argument":
            self.env[name] = made
        return made

    def dimension(self, name: str) -> None:
        if name in self.fixed:
            self.env[name] = self.fixed[name]
            return
        kind = Scalar(i64 if name in self.spec.wide_dims else i32)
        self.dims[self.parameter(name, kind, "dim").value] = name
        self.env[name] = Handle(self.params[-1].value, kind)
        self.loaded_dims[name] = self.env[name]

    def grid_dims(self, t: Tensor) -> tuple[int, ...]:
        """Leading composite extents, B*H, are grid axes; the kernel sees the rest."""
        out = []
        for dim in t.dims[:-1]:
            if self.spec.given_grid or not composite(dim):
                break
            out.append(self.axis(str(dim), 1))
        return tuple(out)

    def axis(self, dim: str, block: int, lo: str = "0", stride: bool = False) -> int:
        """The number of a grid axis; the same one for the same extent and block."""
        for i, a in enumerate(self.axis_names):
            if (a.dim, a.lo) == (dim, lo):
                if a.block != block:
                    self.fail(f"the extent {dim} is cut into blocks of {a.block} and of {block}",
                              "one kernel has one block size for an extent")
                return i
        self.axis_names.append(Axis(dim, block, lo, stride))
        return len(self.axis_names) - 1

    def group_coordinate(self, axis: int) -> Handle:
        made = self.emit("group_id", [], f"group_{axis}", axis=axis)
        self.coordinates[made.value] = axis
        return made

    def reach(self, value: Value) -> tuple[int, int] | None:
        """Least and greatest value of a loop counter or grid coordinate with constant bounds."""
        if value in self.coordinates:
            a = self.axis_names[self.coordinates[value]]
            size = self.fixed.get(a.dim, int(a.dim) if a.dim.isdigit() else None)
            if size is None or a.lo != "0":
                return None
            return 0, max(0, -(-size // a.block) - 1)
        if value not in self.loop_bounds:
            return None
        lo, hi, step = (self.forms.form(x) for x in self.loop_bounds[value])
        if set(step) - {None} or step[None] < 1:
            return None
        low, stop = self.span(lo), self.span(hi)
        if low is None or stop is None:
            return None
        last = low[0] + max(0, stop[1] - 1 - low[0]) // step[None] * step[None]
        return low[0], max(low[1], last)

    def dim_value(self, dim: Any) -> Any:
        """A named extent, product or sum as a value."""
        if not isinstance(dim, Dim):
            return int(dim)
        if dim.names - {*self.fixed, *self.loaded_dims}:
            for i, a in enumerate(self.axis_names):
                if a.dim == str(dim) and a.block == 1:
                    return self.emit("num_groups", [], axis=i)
            self.fail(f"the extent {dim} has no value: nothing binds its names",
                      "give a parameter with each name alone")
        total: Any = 0
        for names, count in dim.terms:
            term: Any = count
            for n in names:
                value = self.fixed.get(n, self.loaded_dims.get(n, self.env.get(n)))
                term = value if isinstance(term, int) and term == 1 else self.arithmetic(
                    "mul", (term, value))
            total = term if isinstance(total, int) and total == 0 else self.arithmetic(
                "add", (total, term))
        return total

    def context(self) -> Context:
        dims = {n: self.fixed.get(n, self.env.get(n)) for n in (*self.fixed, *self.loaded_dims)}
        return Context(self.spec.schedule, dims)

    # --- rows and keys of attention -----------------------------------------------------------
    key_extent: Any = None

    def row_dim(self) -> Any:
        """The extent that the group's rows belong to: that of the result, or of the first matrix."""
        for _, t in self.spec.params:
            if isinstance(t, Tensor) and len(t.dims) >= 2:
                return t.dims[-2]
        self.fail("row_index needs a kernel with a matrix parameter")

    def batch_coordinate(self) -> Any:
        """The number of the matrix that the group works on, over the composite leading extents."""
        hidden = {a for n, t in self.spec.params if isinstance(t, Tensor)
                  for a in (self.env[n].hidden if isinstance(self.env.get(n), Handle) else ())}
        out: Any = 0
        for a in sorted(hidden):
            size = self.dim_value(Dim.of(self.axis_names[a].dim))
            out = self.arithmetic("add", (self.arithmetic("mul", (out, size)),
                                          self.group_coordinate(a)))
        return out

    def arange_tile(self, size: int) -> Handle:
        return self.emit("arange", [], size=size, start=0, dtype=i32)

    # --- ranges -------------------------------------------------------------------------------
    def do_For(self, s: ast.For) -> None:
        if s.orelse:
            self.fail("else after a loop is not part of the kernel language")
        items = self.expr(s.iter)
        if isinstance(items, Range):
            if not isinstance(s.target, ast.Name):
                self.fail("a range gives one number: for i in ts.tile.range(...)")
            self.range_loop(s, items)
        elif isinstance(items, tuple | list):
            self.unroll(s, items)
        else:
            self.fail(f"a loop over {describe(items)}",
                      "loop over ts.tile.range(...), range(...) or a compile-time tuple")

    def unroll(self, s: ast.For, items: Any) -> None:
        if getattr(s, "exits", ()):
            self.fail("break in a loop over a tuple", "loop over a range")
        for item in items:
            self.assign(s.target, item)
            self.statements(resets(s) + s.body)

    def range_loop(self, s: Any, r: Range) -> None:
        body = resets(s) + s.body
        if r.prefetch is not None:
            self.constant_int(r.prefetch, "prefetch")
        if getattr(s, "exits", ()):
            self.until(s, r, body)
            return
        lane = not all(map(self.is_uniform, (r.lo, r.hi, r.step)))
        if r.over == "serial" or lane or self.divergent:
            if r.over in ("lanes", "groups"):
                self.fail(f"over={r.over!r}: the range depends on the lane already",
                          "leave out over=, each lane runs its own range")
            self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
            return
        dim = self.output_dim(r)
        if dim is not None and r.over is None:
            self.block_loop(s, r, dim, body)
            return
        wanted = r.over or self.natural(r, dim)
        if wanted is None:
            self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
        else:
            self.spread_loop(s, r, wanted, body)

    def natural(self, r: Range, dim: str | None) -> str | None:
        """How a range with no over= may be spread, when its turns are independent."""
        if not r.has_step:
            return "lanes"
        if self.depth == 0 and is_zero(r.lo) and self.dim_name(r.hi) is not None:
            return "groups"
        return None

    def spread_loop(self, s: Any, r: Range, over: str, body: list[ast.stmt]) -> None:
        """Traced serially first: the turns are spread when they are independent."""
        mark = self.mark()
        node = self.for_loop(s, r.lo, r.hi, r.step, "serial", body)
        why = why_dependent(node, self.forms, self.loop_bounds, self.defined_by)
        if why is None and over == "lanes" and uses_group_ops(node):
            why = "it has ops of the whole group"
        if why is None and over == "groups" and self.depth:
            why = "it stands inside another loop"
        if why is not None:
            if r.over is not None:
                self.fail(f"over={over!r}: the turns of this loop are not independent: {why}",
                          "leave out over=: the loop then runs in order")
            return
        self.rewind(mark)
        if over == "lanes":
            lane = self.emit("local_id", [])
            size = self.emit("group_size", [])
            lo = self.arithmetic("add", (r.lo, self.arithmetic("mul", (lane, r.step))))
            step = self.arithmetic("mul", (size, r.step))
            bounds = tuple(map(self.operand, (r.lo, r.hi, r.step)))
            node = self.for_loop(s, lo, r.hi, step, "lanes", body)
            self.loop_bounds[node.var.value] = bounds
            self.order_lanes(node)
            return
        step = self.constant_int(r.step, "the step of a range spread over groups")
        name = self.dim_name(r.hi) or self.extent_text(r.hi)
        axis = self.axis(name, step, self.extent_text(r.lo), stride=True)
        start = self.arithmetic("mul", (self.group_coordinate(axis), step))
        count = self.emit("num_groups", [], axis=axis)
        self.for_loop(s, self.arithmetic("add", (r.lo, start)), r.hi,
                      self.arithmetic("mul", (count, step)), "groups", body)

    def order_lanes(self, node: For) -> None:
        """As if in order: what the lanes wrote to shared memory is there after the loop."""
        for n in walk_ops(node):
            if n.name == "store_element":
                kind = self.type_of_value(n.args[0])
                if isinstance(kind, Buffer) and kind.space == "shared":
                    self.emit("barrier", [])
                    return

    def extent_text(self, x: Any) -> str:
        if isinstance(x, int):
            return str(x)
        name = self.dim_name(x)
        if name is None:
            self.fail("a range over groups begins and ends at constants or named extents",
                      "use over='serial', or compute the group's part from ts.tile.group_id()")
        return name

    def dim_name(self, x: Any) -> str | None:
        """The name of an extent, when x is one."""
        if isinstance(x, Handle):
            return self.dims.get(x.value)
        names = [n for n, v in self.fixed.items() if v == x] if isinstance(x, DimInt) else []
        return names[0] if names else None

    def output_dim(self, r: Range) -> str | None:
        """The extent of the returned tensor whose blocks this outermost range enumerates (Q51)."""
        if self.output is None or self.depth or not r.has_step or not is_zero(r.lo):
            return None
        name = self.dim_name(r.hi)
        out = self.spec.result.shape
        known = {str(d) for d in out}
        return name if name in known else None

    def block_loop(self, s: Any, r: Range, dim: str, body: list[ast.stmt]) -> None:
        """A kernel that returns one tile runs once per block of its result: the loop is the grid."""
        step = self.constant_int(r.step, "the step of the range over the result's blocks")
        start = self.arithmetic("mul", (self.group_coordinate(self.axis(dim, step)), step))
        self.origin[dim] = self.env[s.target.id] = self.named(start, s.target.id)
        self.depth += 1
        self.statements(body)
        self.depth -= 1

    def until(self, s: Any, r: Range, body: list[ast.stmt]) -> None:
        """A range with break or return in it: a while with the counter carried."""
        if r.over in ("lanes", "groups"):
            self.fail(f"over={r.over!r} with break or return inside: the turns depend on each other")
        if not isinstance(r.step, int):
            self.fail("a range with break or return inside needs a constant step")
        target, at = s.target.id, f"__at_{s.target.id}"
        limit = f"__stop_{s.target.id}"
        self.env[at], self.env[limit] = r.lo, r.hi
        order: ast.cmpop = ast.Lt() if r.step > 0 else ast.Gt()
        tests: list[ast.expr] = [ast.UnaryOp(ast.Not(), name(f)) for f in s.exits]
        tests.append(ast.Compare(name(at), [order], [name(limit)]))
        first = ast.Assign([ast.Name(target, ast.Store())], name(at))
        count = ast.AugAssign(ast.Name(at, ast.Store()), ast.Add(), ast.Constant(r.step))
        new = [first, *body, count]
        test = ast.BoolOp(ast.And(), tests)
        for n in (first, count, test):
            ast.fix_missing_locations(ast.copy_location(n, s))
        self.while_loop(s, test, new)
        del self.env[at], self.env[limit]

    # --- the group's own block and the result -------------------------------------------------
    def own_block(self, tensor: Handle, shape: tuple[int, ...]) -> Handle:
        """The block of a tensor that belongs to this group, for a tile of that shape."""
        from tessera.tile.indexing import Part

        if self.rank(tensor) != len(shape):
            self.fail(f"a tile of shape {list(shape)} for {describe(tensor)}: "
                      f"the kernel sees {self.rank(tensor)} axes of it")
        parts = []
        assert isinstance(tensor.type, Tensor)
        for axis, size in enumerate(shape):
            dim = tensor.type.dims[axis + len(tensor.hidden)]
            lo = self.own_origin(dim, size)
            parts.append(Part(lo, self.arithmetic("add", (lo, size)), ":"))
        return self.make_view(tensor, parts)

    def own_origin(self, dim: Any, size: int) -> Any:
        """Where this group's block of an extent begins."""
        if str(dim) in self.origin:
            return self.origin[str(dim)]
        extent = self.dim_value(dim)
        if isinstance(extent, int) and extent <= size:
            return 0
        if self.spec.given_grid:
            self.fail(f"the group's own block along {dim} is not known with an explicit grid",
                      "slice the tensor: x[a:a+64]")
        axis = self.axis(str(dim), size)
        at = self.arithmetic("mul", (self.group_coordinate(axis), size))
        self.origin[str(dim)] = at
        return at

    def finish(self) -> None:
        """What the call returns: nothing, parameters, a number or a new tensor."""
        value = self.env[RETURN]
        if self.exits.returns:
            self.node = self.exits.returns[-1]
        if isinstance(value, Undefined):
            self.fail("the kernel returns a value on some paths only", "return at the end")
        if value is None or value is UNSET:
            if self.spec.result is not None and self.spec.result is not type(None):
                self.fail("the kernel is annotated with a result and returns none",
                          "return a parameter, a number or a tile")
            return
        items = value if isinstance(value, tuple) else (value,)
        if all(isinstance(v, Handle) and isinstance(v.type, Tensor) for v in items):
            self.result = ("param", *(v.value.name for v in items))
            return
        if self.output is not None:
            self.return_tile(value)
        else:
            self.return_number(value)

    def return_tile(self, value: Any) -> None:
        if isinstance(value, Row):
            value = self.view_of_row(value)
        if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
            value = self.call(OPS["load"], [value], {})
        if not isinstance(value, Handle) or not isinstance(value.type, Tile):
            self.fail(f"the kernel returns {describe(value)}, its annotation says "
                      f"{self.spec.result}", "return a tile, or a parameter")
        assert self.output is not None
        self.store_tile(self.own_block(self.output, value.type.shape), value)
        self.result = ("tensor", self.output.value.name)

    def return_number(self, value: Any) -> None:
        from tessera.numerics import NumericType, as_type

        value = self.value_of(value)
        kind = self.spec.result
        if isinstance(value, Handle) and not isinstance(value.type, Scalar):
            self.fail(f"the kernel returns {describe(value)}",
                      'annotate the result: -> ts.Tensor["M", "N", ts.f32]')
        if kind is None:
            self.fail("the kernel returns a number and has no annotation for it",
                      "annotate it: def kernel(...) -> ts.f32")
        numeric = kind if isinstance(kind, NumericType) else as_type(kind)
        out = self.parameter("result", Tensor(numeric, (1,)), "output")
        if not self.is_uniform(value) or self.divergent:
            self.fail("the returned number differs between lanes",
                      "reduce it over the group, or return one element of a shared buffer")
        self.store_element(out, [0], value)
        self.result = ("scalar", out.value.name)

    def launch(self) -> str:
        if self.spec.given_grid:
            return "given"
        if self.axis_names:
            return "axes"
        if self.result[0] == "scalar":
            return "one"
        named = {n.name for n in walk_ops(self.block) if n.name in ("linear_id", "group_id",
                                                                     "num_groups")}
        if any(n.attr.get("axis") is not None for n in walk_ops(self.block) if n.name == "group_id"):
            return "given"
        return "elements" if named else "one"


@dataclass(frozen=True, eq=False)
class Range:
    """What ts.tile.range(...) or range(...) stands for in a `for`."""

    lo: Any
    hi: Any
    step: Any
    has_step: bool
    over: str | None
    prefetch: Any = None


class DimInt(int):
    """A named extent that is a constant of this specialisation."""


def plain(v: Any) -> Any:
    """A constant for the record of a specialisation."""
    return v if v is None or isinstance(v, int | float | str) else str(v)


def composite(dim: Any) -> bool:
    """B*H: a product of names."""
    return isinstance(dim, Dim) and len(dim.terms) == 1 and len(dim.terms[0][0]) > 1


def is_zero(x: Any) -> bool:
    return is_number(x) and x == 0


def name(n: str) -> ast.Name:
    return ast.Name(n, ast.Load())


def walk_ops(nodes: Any) -> list[Op]:
    from tessera.tile.ir import walk

    return [n for n in walk(tuple(nodes) if isinstance(nodes, tuple | list) else (nodes,))
            if isinstance(n, Op)]


def uses_group_ops(node: For) -> bool:
    """Whether ops of the whole group stand inside."""
    return any(OPS[n.name].group or any(isinstance(d.type, Tile) for d in n.outs)
               for n in walk_ops(node))


__all__ = ["RETURNED", "Range", "Spec", "Tracer", "Value", "trace"]
