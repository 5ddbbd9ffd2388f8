"""A kernel's body to Tile IR: parameters, named extents, grid axes, ranges and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.dims import Dim, solved_names
from tessera.numerics import NumericType, i32, i64
from tessera.tensor import TensorType
from tessera.tile.frontend import block_origins
from tessera.tile.frontend.composite_parameters import RecordFields
from tessera.tile.frontend.context import Context
from tessera.tile.frontend.edge_check import check_edges
from tessera.tile.frontend.exits import RETURN, Exits
from tessera.tile.frontend.expressions import closure_of
from tessera.tile.frontend.loops import stored_names
from tessera.tile.frontend.ranges import DimInt, Ranges, walk_ops
from tessera.tile.frontend.source import KernelSource
from tessera.tile.ir.handles import (
    UNSET,
    AxisSlice,
    Handle,
    NeedConstants,
    TensorRow,
    Undefined,
    describe,
)
from tessera.tile.ir.ir import Function, GridAxis, Param, SSAValue
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, Type, View


@dataclass(frozen=True)
class KernelSpec:
    """What one specialisation of a kernel is made for. params: tensors and scalars in order."""

    params: tuple[tuple[str, Type], ...]
    constants: tuple[tuple[str, Any], ...]
    result: TensorType | Any
    schedule: Schedule
    lanes: int | None = None
    given_grid: bool = False
    fixed_dims: tuple[tuple[str, int], ...] = ()
    wide_dims: frozenset[str] = field(default=frozenset())
    records: tuple[tuple[str, tuple[str, ...]], ...] = ()  # parameters with several arrays
    spelled: tuple[str, ...] = field(init=False, repr=False)  # constants: 1, 1.0 and True differ

    def __post_init__(self) -> None:
        object.__setattr__(self, "spelled", tuple(repr(v) for _, v in self.constants))


def trace(source: KernelSource, fn: Callable, spec: KernelSpec, sizes: dict[str, int]) -> Function:
    """The Tile IR of a kernel for `spec`. Extents that must be constants are taken from sizes."""
    fixed = dict(spec.fixed_dims)
    while True:
        try:
            return KernelTracer(source, fn,
                                replace(spec, fixed_dims=tuple(sorted(fixed.items())))).run()
        except NeedConstants as need:
            fixed |= {n: sizes[n] for n in need.names}


class KernelTracer(Ranges):
    def __init__(self, source: KernelSource, fn: Callable, spec: KernelSpec):
        super().__init__(source)
        self.fn, self.spec = fn, spec
        self.fixed = {n: DimInt(v) for n, v in spec.fixed_dims}
        self.globals = closure_of(fn)  # type: ignore[arg-type]
        self.argument_names = frozenset(n for n, _ in spec.params)
        self.active_calls: list[Any] = [fn]
        self.block_types: dict[Any, Any] = {}
        self.loop_env: list[dict[str, Any]] = []
        self.loop_bounds: dict[Any, Any] = {}
        self.axis_names: list[GridAxis] = []
        self.origin: dict[str, Any] = {}  # named extent -> origin of the group's block
        self.params: list[Param] = []
        self.result: tuple[str, ...] = ("none",)
        self.output: Handle | None = None
        self.loaded_dims: dict[str, Handle] = {}
        self.exits = Exits(source.tree)
        self.assigned = frozenset(stored_names(self.exits.body))
        self.env: dict[str, Any] = {}
        self.coordinates: dict[SSAValue, int] = {}

    # --- set-up -------------------------------------------------------------------------------
    def run(self) -> Function:
        self.declare()
        body = block_origins.bind(self, self.exits.body)
        self.statements(body)
        self.node = self.source.tree
        self.finish()
        check_edges(self, self.block)
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
        names = [str(d) for _, t in self.spec.params if isinstance(t, GlobalTensor)
                 for d in t.dims if isinstance(d, Dim) and str(d).isidentifier()]
        for name, t in self.spec.params:
            self.parameter(name, t, "argument")
        names += solved_names(d for _, t in self.spec.params if isinstance(t, GlobalTensor)
                              for d in t.dims)
        for name in dict.fromkeys(names):
            if name not in self.env:
                self.dimension(name)
        for name, t in self.spec.params:
            if isinstance(t, GlobalTensor):
                self.env[name] = replace(self.env[name], hidden=self.grid_dims(t))
        for name, fields in self.spec.records:
            self.env[name] = RecordFields({f: self.env[f"{name}_{f}"] for f in fields})
        if isinstance(self.spec.result, TensorType):
            kind = self.spec.result
            assert kind.type is not None
            t = GlobalTensor(kind.type, kind.shape)
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
        local = name in self.assigned  # a local of that name hides the extent, as in Python
        if name in self.fixed:
            if not local:
                self.env[name] = self.fixed[name]
            return
        kind = Scalar(i64 if name in self.spec.wide_dims else i32)
        self.dims[self.parameter(name, kind, "dim").value] = name
        self.loaded_dims[name] = Handle(self.params[-1].value, kind)
        if not local:
            self.env[name] = self.loaded_dims[name]

    def grid_dims(self, t: GlobalTensor) -> tuple[int, ...]:
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
        self.axis_names.append(GridAxis(dim, block, lo, stride))
        return len(self.axis_names) - 1

    def group_coordinate(self, axis: int) -> Handle:
        made = self.emit("group_id", [], f"group_{axis}", axis=axis)
        self.coordinates[made.value] = axis
        return made

    def reach(self, value: SSAValue) -> tuple[int, int] | None:
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
        dims = {n: self.fixed.get(n, self.loaded_dims.get(n))
                for n in (*self.fixed, *self.loaded_dims)}
        return Context(self.spec.schedule, dims)

    # --- rows and keys of attention -----------------------------------------------------------
    key_extent: Any = None  # of the last range_n

    def row_dim(self) -> Any:
        """The extent that the group's rows belong to: that of the first matrix."""
        for _, t in self.spec.params:
            if isinstance(t, GlobalTensor) and len(t.dims) >= 2:
                return t.dims[-2]
        self.fail("row_index needs a kernel with a matrix parameter")

    def batch_coordinate(self) -> Any:
        """The number of the matrix that the group works on, over the composite leading extents."""
        hidden = {a for n, t in self.spec.params if isinstance(t, GlobalTensor)
                  for a in (self.env[n].hidden if isinstance(self.env.get(n), Handle) else ())}
        out: Any = 0
        for a in sorted(hidden):
            size = self.dim_value(Dim.of(self.axis_names[a].dim))
            out = self.arithmetic("add", (self.arithmetic("mul", (out, size)),
                                          self.group_coordinate(a)))
        return out

    def arange_tile(self, size: int) -> Handle:
        return self.emit("arange", [], size=size, start=0, dtype=i32)

    # --- the group's own block and the result -------------------------------------------------
    def own_block(self, tensor: Handle, shape: tuple[int, ...]) -> Handle:
        """The block of a tensor that belongs to this group, for a tile of that shape."""
        if self.rank(tensor) != len(shape):
            self.fail(f"a tile of shape {list(shape)} for {describe(tensor)}: "
                      f"the kernel sees {self.rank(tensor)} axes of it")
        parts = []
        assert isinstance(tensor.type, GlobalTensor)
        for axis, size in enumerate(shape):
            dim = tensor.type.dims[axis + len(tensor.hidden)]
            lo = self.own_origin(dim, size)
            parts.append(AxisSlice(lo, self.arithmetic("add", (lo, size)), ":"))
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
        if all(isinstance(v, Handle) and isinstance(v.type, GlobalTensor) for v in items):
            self.result = ("param", *(v.value.name for v in items))
            return
        if self.output is None and self.spec.result is None and isinstance(value, Handle):
            self.output = self.like_the_rows(value)
        if self.output is not None:
            self.return_tile(value)
        else:
            self.return_number(value)

    def like_the_rows(self, value: Handle) -> Handle | None:
        """The result of a kernel without an annotation for it, when the tile it returns is the
        group's own block of its first matrix: a tensor like that, with the tile's elements."""
        first = next((t for _, t in self.spec.params if isinstance(t, GlobalTensor)), None)
        if first is None or not isinstance(value.type, TileType):
            return None
        hidden = self.grid_dims(first)
        own = first.dims[len(hidden):]
        if len(own) != len(value.type.shape) or str(own[0]) not in self.origin:
            return None
        t = GlobalTensor(NumericType(value.type.dtype), first.dims)
        return replace(self.parameter("result", t, "output"), hidden=hidden)

    def return_tile(self, value: Any) -> None:
        if isinstance(value, TensorRow):
            value = self.view_of_row(value)
        if isinstance(value, Handle) and isinstance(value.type, View | Buffer):
            value = self.call(OPS["load"], [value], {})
        if not isinstance(value, Handle) or not isinstance(value.type, TileType):
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
        out = self.parameter("result", GlobalTensor(numeric, (1,)), "output")
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
        ids = [n for n in walk_ops(self.block) if n.name == "group_id"]
        if any(n.attr["axis"] is not None for n in ids):
            return "given"
        return "elements" if named else "one"


def plain(v: Any) -> Any:
    """A constant for the record of a specialisation."""
    return v if v is None or isinstance(v, int | float | str) else str(v)


def composite(dim: Any) -> bool:
    """B*H: a product of names."""
    return isinstance(dim, Dim) and len(dim.terms) == 1 and len(dim.terms[0][0]) > 1


__all__ = ["KernelSpec", "KernelTracer", "trace"]
