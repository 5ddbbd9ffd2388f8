"""Plans of programs: a function, and arguments that may be known by type only.

    ts.dist.plan_report(step, params, state, tokens, fabric="nvl72")        a Planned

Arguments are tensors, tensor types, and stand-ins of distributed tensors (`stand_in`); nothing is
allocated and nothing runs. With distributed arguments the layouts of all else, and the collectives,
are those that the program would run with. Without, the function is what each rank runs on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tessera.errors import ArgumentError, SourceLine
from tessera.graph import tree
from tessera.graph.ir import Graph, Value
from tessera.graph.jit import JitFunction
from tessera.graph.jit import jit as compile_function
from tessera.graph.op import Aval
from tessera.graph.operand import shape_tuple
from tessera.graph.signature import StandIn
from tessera.graph.simplify import simplify
from tessera.graph.traced_signature import TracedSignature
from tessera.numerics import as_type
from tessera.tensor import Tensor, TensorType

from ..lazy_dataclass import dataclass
from ..mesh.collectives.cost import COSTS
from ..mesh.device_mesh import Mesh, current_mesh
from ..mesh.device_mesh import mesh as make_mesh
from ..mesh.layout import Layout
from ..mesh.sharding.control_flow import ready
from ..mesh.sharding.localize import localize
from ..mesh.tensor import need_mesh, resolve
from .fabric import Fabric, bus_factor, fabric_of
from .flops import bytes_of, global_shape
from .planner import Issued, Planned, plan_graph


class DistStandIn(StandIn):
    """A distributed tensor known by type and layout only."""

    __slots__ = ()

    def __init__(self, aval: Aval, layout: Layout | None, is_param: bool = False):
        super().__init__(aval)
        self.layout, self.is_param = layout, is_param

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def __repr__(self) -> str:
        return f"stand-in {self.type}{list(self._shape)} {self.layout}"


def make_stand_in(shape: Any, layout: Any, mesh: Mesh | None, dtype: Any, *, param: bool,
                  dims: Sequence[str] | None) -> DistStandIn:
    """ts.dist.stand_in: see planning.py."""
    extents = shape_tuple(shape)
    numeric = as_type(dtype)
    where = resolve(layout, need_mesh(mesh), extents, numeric, dims)  # type: ignore[arg-type]
    return DistStandIn(Aval(extents, numeric), where, param)


def as_stand_in(x: Any, layout: Layout | None = None) -> Any:
    """A tensor or tensor type as a stand-in; in a layout, when one is given."""
    if isinstance(x, TensorType):
        return DistStandIn(Aval(x.shape, x.type or as_type("f32")), layout)
    if isinstance(x, Tensor):
        return DistStandIn(Aval(tuple(x.shape), x.type), layout or x.layout, x.is_param)
    return x


def make_stand_ins(values: Any, layout: Any, mesh: Mesh | None) -> Any:
    """ts.dist.stand_ins: see planning.py."""
    mesh = need_mesh(mesh)
    leaves, structure = tree.flatten(values)
    made = []
    for path, x in zip(tree.paths(structure), leaves, strict=True):
        if not isinstance(x, Tensor | TensorType):
            made.append(x)
            continue
        bare = as_stand_in(x)
        how = layout(path, x) if callable(layout) else layout
        where = resolve(how, mesh, bare.shape, bare.type)
        made.append(DistStandIn(Aval(tuple(bare.shape), bare.type), where, bare.is_param))
    return tree.unflatten(structure, made)


def plan_report(f: Callable, *args: Any, mesh: Mesh | None = None,
                fabric: str | Fabric | None = None, **kwargs: Any) -> Planned:
    """ts.dist.plan_report: see planning.py."""
    function = f if isinstance(f, JitFunction) else compile_function(f)
    given = tuple(tree.map_tree(as_stand_in, a) for a in args)
    named = {k: tree.map_tree(as_stand_in, v) for k, v in kwargs.items()}
    traced = function.traced(*given, **named)
    roles = roles_of(function, traced, given, named)
    if traced.layouts is not None:
        return _plan_global(function.name, traced, roles, fabric)
    found = mesh or current_mesh() or make_mesh(axes=("rank",), shape=(1,))
    graph = simplify(traced.graph)
    return plan_graph(function.name, graph, _roles_of(graph, roles), found, fabric_of(found,
                                                                                      fabric),
                      list(written_collectives(graph, found)))


def _plan_global(name: str, traced: TracedSignature, roles: Sequence[str],
                 fabric: str | Fabric | None
                 ) -> Planned:
    """Of distributed tensors: the graph of rank 0, which has the largest part of everything."""
    program = traced.program
    mesh = program.mesh
    graph, model = (ready(g, mesh) for g in (localize(program.made, 0), traced.graph))
    return plan_graph(name, graph, _roles_of(graph, roles), mesh, fabric_of(mesh, fabric),
                      list(program.plan), model)


def _roles_of(graph: Graph, roles: Sequence[str]) -> dict[Value, str]:
    return dict(zip(graph.given, roles, strict=False))


# --- what the arguments are -----------------------------------------------------------------------
def roles_of(function: JitFunction, traced: TracedSignature, args: tuple, kwargs: Mapping[str, Any]
             ) -> list[str]:
    """Per input and capture: "parameters", "optimizer" or "data".

    Parameters are what is a ts.param; without one, the first argument that comes back with the
    result, else argument 0. Other arguments that come back are the optimizer's.
    """
    leaves, structure = tree.flatten(function.bind(tuple(args), dict(kwargs))[0])
    named = [(path.partition(".")[0], x) for path, x in
             zip(tree.paths(structure), leaves, strict=True) if isinstance(x, Tensor)]
    flagged = any(x.is_param for _, x in named) or any(
        t.is_param for _, t in traced.graph.captures)
    back = _returned(traced.graph, named)
    order = list(dict.fromkeys(name for name, _ in named))
    first = next((n for n in order if n in back), order[0] if order else "")
    roles = []
    for name, x in named:
        is_parameter = x.is_param if flagged else name == first
        roles.append("parameters" if is_parameter else "optimizer" if name in back else "data")
    captured = ["parameters" if t.is_param else "data" for _, t in traced.graph.captures]
    return roles + captured


def _returned(graph: Graph, named: Sequence[tuple[str, Tensor]]) -> set[str]:
    """The arguments of whose every leaf's type there is a result; no argument of scalars alone."""
    left = [v.aval for v in graph.outputs]
    found = set()
    for name in dict.fromkeys(n for n, _ in named):
        mine = [Aval(tuple(x.shape), x.type) for n, x in named if n == name]
        if all(a.ndim == 0 for a in mine):
            continue
        rest = list(left)
        if all(a in rest and not rest.remove(a) for a in mine):  # type: ignore[func-returns-value]
            found.add(name)
            left = rest
    return found


# --- collectives that the program calls itself ----------------------------------------------------
@dataclass(frozen=True)
class TracedCollective:
    """A collective of a rank's own graph."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    why: str
    where: SourceLine | None
    times: int = 1


def written_collectives(graph: Graph, mesh: Mesh) -> Iterator[Issued]:
    """The collectives among a graph's nodes, as they are called by hand on a rank's own tensors."""
    for node in graph.nodes:
        if "collective" not in node.op.effects or node.op.name not in COSTS:
            continue
        axis = node.attrs.get("axis")
        axes = mesh.axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        size = max(sum(bytes_of(global_shape(v), v.aval.dtype) for v in values)
                   for values in (node.inputs, node.outputs))
        n = mesh.size(axes)
        if n > 1:
            yield TracedCollective(node.op.name, axes, round(size * bus_factor(node.op.name, n)),
                                   "called by the program", node.where)


def need_plan(made: Any, file: str) -> tuple[Callable, tuple]:
    """What a program's `plan(mesh)` gave: (function, arguments). Raises ArgumentError."""
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(
            made[1], tuple | list):
        return made[0], tuple(made[1])
    raise ArgumentError(f"plan(mesh) of {file} gave {type(made).__name__}",
                        hint="return (step, (params, state, tokens)): a function and a tuple of "
                        "its arguments, tensor types or ts.dist.stand_in")


__all__ = ["DistStandIn", "as_stand_in", "make_stand_in", "make_stand_ins", "need_plan",
           "plan_report", "roles_of", "written_collectives"]
