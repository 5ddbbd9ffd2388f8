"""The launch grid of a kernel, its named extents, and the group's own block."""

from __future__ import annotations

from typing import Any

from tessera.dims import Dim
from tessera.tile.builder.context import Context
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.kernel_spec import DimInt, KernelSpec
from tessera.tile.ir.handles import Handle, NeedGroupNumbers
from tessera.tile.ir.ir import GridAxis
from tessera.tile.ir.types import GlobalTensor


class LaunchGrid:
    """Axes of the grid so far, and what the kernel's extents are."""

    def __init__(self, ir: IRBuilder, spec: KernelSpec):
        self.ir, self.spec = ir, spec
        self.axes: list[GridAxis] = []
        self.origins: dict[str, Any] = {}  # named extent -> origin of the group's block
        self.fixed = {n: DimInt(v) for n, v in spec.fixed_dims}
        self.loaded_dims: dict[str, Handle] = {}
        self.key_extent: Any = None  # of the last range_n
        self.numbered = spec.numbered  # the kernel asks for the number of its group
        self.ranges_spread = False  # over groups, though the kernel did not say so

    def number_groups(self) -> None:
        """The kernel asks which group it is, so its groups are no iterations of a range."""
        self.numbered = True
        if self.ranges_spread:
            raise NeedGroupNumbers

    def axis(self, dim: str, block: int, lo: str = "0", stride: bool = False) -> int:
        """The number of a grid axis; the same one for the same extent and block."""
        for i, a in enumerate(self.axes):
            if (a.dim, a.lo) == (dim, lo):
                if a.block != block:
                    self.ir.fail(f"the extent {dim} is cut into blocks of {a.block} and of {block}",
                                 "one kernel has one block size for an extent")
                return i
        self.axes.append(GridAxis(dim, block, lo, stride))
        return len(self.axes) - 1

    def group_coordinate(self, axis: int) -> Handle:
        made = self.ir.emit("group_id", [], f"group_{axis}", axis=axis)
        self.ir.values.coordinates[made.value] = self.range_along(axis)
        return made

    def range_along(self, axis: int) -> tuple[int, int] | None:
        """Least and greatest number of a group along an axis, where its extent is constant."""
        a = self.axes[axis]
        size = self.fixed.get(a.dim, int(a.dim) if a.dim.isdigit() else None)
        if size is None or a.lo != "0":
            return None
        return 0, max(0, -(-size // a.block) - 1)

    def dim_value(self, dim: Any) -> Any:
        """A named extent, product or sum as a value."""
        if not isinstance(dim, Dim):
            return int(dim)
        if dim.names - {*self.fixed, *self.loaded_dims}:
            for i, a in enumerate(self.axes):
                if a.dim == str(dim) and a.block == 1:
                    return self.ir.emit("num_groups", [], axis=i)
            self.ir.fail(f"the extent {dim} has no value: nothing binds its names",
                         "give a parameter with each name alone")
        total: Any = 0
        for names, count in dim.terms:
            term: Any = count
            for n in names:
                value = self.fixed.get(n, self.loaded_dims.get(n))
                term = value if isinstance(term, int) and term == 1 else self.ir.arithmetic(
                    "mul", (term, value))
            total = term if isinstance(total, int) and total == 0 else self.ir.arithmetic(
                "add", (total, term))
        return total

    def context(self) -> Context:
        dims = {n: self.fixed.get(n, self.loaded_dims.get(n))
                for n in (*self.fixed, *self.loaded_dims)}
        return Context(self.spec.schedule, dims)

    # --- the group's own block ----------------------------------------------------------------
    def own_origin(self, dim: Any, size: int) -> Any:
        """Where this group's block of an extent begins."""
        if str(dim) in self.origins:
            return self.origins[str(dim)]
        extent = self.dim_value(dim)
        if isinstance(extent, int) and extent <= size:
            return 0
        if self.spec.given_grid:
            self.ir.fail(f"the group's own block along {dim} is not known with an explicit grid",
                         "slice the tensor: x[a:a+64]")
        axis = self.axis(str(dim), size)
        at = self.ir.arithmetic("mul", (self.group_coordinate(axis), size))
        self.origins[str(dim)] = at
        return at

    def row_dim(self) -> Any:
        """The extent that the group's rows belong to: that of the first matrix."""
        for _, t in self.spec.params:
            if isinstance(t, GlobalTensor) and len(t.dims) >= 2:
                return t.dims[-2]
        self.ir.fail("row_index needs a kernel with a matrix parameter")

    def batch_coordinate(self, env: dict[str, Any]) -> Any:
        """The number of the matrix that the group works on, over the composite leading extents."""
        hidden = {a for n, t in self.spec.params if isinstance(t, GlobalTensor)
                  for a in (env[n].hidden if isinstance(env.get(n), Handle) else ())}
        out: Any = 0
        for a in sorted(hidden):
            size = self.dim_value(Dim.of(self.axes[a].dim))
            out = self.ir.arithmetic("add", (self.ir.arithmetic("mul", (out, size)),
                                             self.group_coordinate(a)))
        return out
