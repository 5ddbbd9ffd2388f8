"""The public functions of planning. What they call is imported when they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import hooks
from ..mesh.device_mesh import Mesh
from ..numerics import DType

if TYPE_CHECKING:
    from .alpa import Sharded
    from .fabric import Fabric
    from .functions import DistStandIn
    from .planner import Planned


class _StepTimes:
    """By the model of the mesh's fabric."""

    def matmul_us(self, flops: float, dtype: DType, mesh: Mesh) -> float:
        from .fabric import fabric_of

        device = fabric_of(mesh).device_of(mesh)
        return 1e6 * flops / (device.peak(dtype) * device.matmul_efficiency)

    def collective_us(self, op: str, nbytes: float, mesh: Mesh, axes: Sequence[str]) -> float:
        from .fabric import fabric_of

        return fabric_of(mesh).time(op, nbytes, mesh, tuple(axes)).us


hooks.step_times.fill(_StepTimes())


def plan_report(f: Callable, *args: Any, mesh: Mesh | None = None,
                fabric: str | Fabric | None = None, **kwargs: Any) -> Planned:
    """The plan of f(*args): memory of a rank, collectives, and time on a fabric. Nothing runs.

    f: a function or what `ts.jit` made of one   args: tensors, tensor types, stand-ins
    mesh: default that of the distributed arguments, else the open one
    fabric: "nvl72", "8xh200", "8xh100", "infiniband", "pcie", "cpu"; default the mesh's topology
    Print it for the table; .html() is a page, .show() the picture.
    Raises ArgumentError for extents that are symbols, a fabric that does not exist or is too small.
    """
    from .functions import plan_report as report

    return report(f, *args, mesh=mesh, fabric=fabric, **kwargs)


def stand_in(shape: Any, layout: Any = None, mesh: Mesh | None = None, dtype: Any = "f32", *,
             param: bool = False, dims: Sequence[str] | None = None) -> DistStandIn:
    """What `ts.dist.tensor` of these arguments is, without its elements: for plans.

    Raises what `ts.dist.tensor` raises for a layout that does not fit.
    """
    from .functions import make_stand_in

    return make_stand_in(shape, layout, mesh, dtype, param=param, dims=dims)


def stand_ins(values: Any, layout: Any = None, mesh: Mesh | None = None) -> Any:
    """A tree of tensors or tensor types as stand-ins of distributed tensors: for plans.

    values: nested tuples, lists and dicts; what is no tensor stays as it is
    layout: of all of them; or a function of (path, tensor or type) that gives the layout of each
    """
    from .functions import make_stand_ins

    return make_stand_ins(values, layout, mesh)


def alpa_shard(f: Callable, mesh: Mesh, memory_limit: float | str | None = None, *,
               fabric: str | Fabric | None = None, objective: str = "exchanges") -> Sharded:
    """f with layouts for its parameters on `mesh`: those that communicate least and fit.

    f: a step or a loss; its parameters are what ts.grad would differentiate for: ts.params, else
    the first argument that comes back, else argument 0. Optimizer state lies as its parameter.
    Other arguments keep the layout that they have; plain ones are whole on every rank.
    memory_limit: of a rank: bytes, or "80 GB"; None: what the fabric's device has
    objective: "exchanges", the time of collectives first and of matmuls second; "time", the sum
    The result is called like f; .layouts(*args) has the ShardSpec of each parameter, .choose(*args)
    what they cost. Raises ArgumentError; when called, OutOfMemoryError where nothing fits.
    """
    from .alpa import make_sharded

    return make_sharded(f, mesh, memory_limit, fabric, objective)


__all__ = ["alpa_shard", "plan_report", "stand_in", "stand_ins"]
