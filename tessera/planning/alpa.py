"""Choosing how parameters lie on a mesh, by a cost model and under a memory limit.

    g = ts.alpa_shard(step, mesh, memory_limit="80 GB")
    g.layouts(params, state, tokens)["params.blocks.0.qkv"]        a ShardSpec
    params, state, loss = g(params, state, tokens)                 runs with these layouts

For each parameter the candidates are: whole on every rank, or a dimension split over one or several
mesh axes, or two dimensions over one axis each; what is small stays whole. An assignment is priced
by propagating its layouts through the function's graph (propagate.py): the time of the collectives
that it needs on a fabric (fabric.py), and the bytes that a rank holds at the peak. The idea is
Alpa's intra-operator pass (Zheng et al. 2022, arXiv:2201.12023, section 4), which solves an integer
program where this searches (search.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from tessera.errors import ArgumentError, OutOfMemoryError, did_you_mean
from tessera.graph import tree
from tessera.graph.cpu.target import CPU
from tessera.graph.ir import Graph, Value
from tessera.graph.jit import JitFunction
from tessera.graph.jit import jit as compile_function
from tessera.graph.schedule.fuse import fuse
from tessera.numerics import DType
from tessera.tensor import Tensor

from ..graph.schedule.work import amount
from ..lazy_dataclass import dataclass
from ..mesh.device_mesh import Mesh
from ..mesh.layout import Layout, replicated
from ..mesh.partition import local_shape
from ..mesh.sharding.control_flow import ready
from ..mesh.sharding.partitioned_steps import (
    Held,
    PartitionedOp,
    Step,
    makes,
    merge_waiting,
    planned,
    reads,
)
from ..mesh.sharding.propagate import Propagated, propagate
from ..mesh.spec import ShardSpec
from ..mesh.tensor import distribute, resolve
from .fabric import DeviceModel, Fabric, bus_factor, fabric_of
from .flops import StoredTypes, bytes_of, storage_of
from .functions import DistStandIn, as_stand_in, roles_of
from .search import Cost, SearchResult, least, search
from .table_text import duration

OBJECTIVES = ("exchanges", "time")
WHOLE = ShardSpec(replicate=True)
SMALL = 1e-3  # of the bytes of all parameters: what has less stays whole, there is nothing to save
_UNITS = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10,
          "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True)
class Chosen:
    """What was chosen for one signature.

    specs: of each parameter, by its path   exchange_us: of all collectives of a call
    work_us: of its matmuls   bytes: that a rank holds at the peak   tried: assignments priced
    least_bytes: the least that any of them holds
    """

    specs: Mapping[str, ShardSpec]
    exchange_us: float
    work_us: float
    bytes: float
    limit: float
    tried: int
    mesh: Mesh

    def __str__(self) -> str:
        wide = max(map(len, self.specs), default=0)
        lines = [f"layouts on {self.mesh}: exchanges {duration(self.exchange_us)}, matmuls "
                 f"{duration(self.work_us)}, {amount(self.bytes, 'B')} of "
                 f"{amount(self.limit, 'B')} a rank; {self.tried} assignments priced"]
        return "\n".join([*lines, *(f"  {path:{wide}}  {show_spec(spec)}"
                                    for path, spec in self.specs.items())])


def show_spec(spec: ShardSpec) -> str:
    if not spec.partition:
        return "whole"
    return ", ".join(f"dim {d} over {a if isinstance(a, str) else '*'.join(a)}"
                     for d, a in zip(spec.partition, spec.mesh_axes, strict=True))


class Sharded:
    """A function that runs with the layouts chosen for its parameters. Made by ts.alpa_shard."""

    def __init__(self, f: JitFunction, mesh: Mesh, limit: float, fabric: Fabric, objective: str):
        self.f, self.mesh, self.limit = f, mesh, limit
        self.fabric, self.objective = fabric, objective
        self._chosen: dict[Any, Chosen] = {}

    def choose(self, *args: Any, **kwargs: Any) -> Chosen:
        """What is chosen for arguments like these: tensors, tensor types or stand-ins.

        Raises OutOfMemoryError when no assignment fits, saying what the least one needs.
        """
        problem = _Problem(self, args, kwargs)
        if problem.key not in self._chosen:
            self._chosen[problem.key] = problem.solve()
        return self._chosen[problem.key]

    def layouts(self, *args: Any, **kwargs: Any) -> dict[str, ShardSpec]:
        """The layout of each parameter, by its path among the arguments: "params.w"."""
        return dict(self.choose(*args, **kwargs).specs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """The arguments with parameters, and what goes with them, distributed as chosen."""
        problem = _Problem(self, args, kwargs)
        specs = self.choose(*args, **kwargs).specs
        where = problem.layouts({problem.group[p]: s for p, s in specs.items()})
        bound, *_ = self.f.bind(args, kwargs)
        leaves, structure = tree.flatten(bound)
        at = iter(where)
        moved = [_distributed(x, next(at)) if isinstance(x, Tensor) else x for x in leaves]
        placed = tree.unflatten(structure, moved)
        names = list(placed)
        return (tuple(placed[n] for n in names[:len(args)]),
                {n: placed[n] for n in names[len(args):]})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f on arguments that lie as chosen; those that do not are moved first."""
        placed, named = self.place(*args, **kwargs)
        return self.f(*placed, **named)

    @property
    def plan(self) -> Any:
        """The collectives of the last call."""
        return self.f.plan

    def __repr__(self) -> str:
        return f"<alpa_shard {self.f.name} on {self.mesh}>"


def _distributed(x: Tensor, layout: Layout) -> Tensor:
    if x.layout is None and layout.is_replicated:
        return x
    return x if x.layout == layout else distribute(x, layout)


def make_sharded(f: Callable, mesh: Mesh, memory_limit: float | str | None,
                 fabric: str | Fabric | None, objective: str) -> Sharded:
    """ts.alpa_shard: see planning.py."""
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective={objective!r}", hint=did_you_mean(objective, OBJECTIVES))
    found = fabric_of(mesh, fabric)
    found.need(mesh)
    limit = found.device_of(mesh).memory_bytes if memory_limit is None else to_bytes(memory_limit)
    function = f if isinstance(f, JitFunction) else compile_function(f)
    return Sharded(function, mesh, limit, found, objective)


def to_bytes(size: float | str) -> float:
    """A number of bytes from itself or from "80 GB". Raises ArgumentError."""
    if isinstance(size, int | float) and not isinstance(size, bool) and size > 0:
        return float(size)
    parts = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if parts is None or parts[2] not in _UNITS or parts[1].count(".") > 1:
        raise ArgumentError(f"memory_limit={size!r} is no amount of memory",
                            hint=f'bytes, or a number with one of {", ".join(filter(None, _UNITS))}'
                            ': "80 GB"')
    return float(parts[1]) * _UNITS[parts[2]]


# --- candidates -----------------------------------------------------------------------------------
def candidates(shape: Sequence[int], mesh: Mesh) -> list[ShardSpec]:
    """Whole; each dimension over each set of axes with enough elements; two over one axis each."""
    found = [WHOLE]
    axes = [a for a in mesh.axes if mesh.size(a) > 1]
    sets = [s for k in range(1, len(axes) + 1) for s in itertools.combinations(axes, k)]
    for d, extent in enumerate(shape):
        found += [ShardSpec((d,), (s if len(s) > 1 else s[0],)) for s in sets
                  if extent >= mesh.size(s)]
    for d, e in itertools.combinations(range(len(shape)), 2):
        found += [ShardSpec((d, e), (a, b)) for a, b in itertools.permutations(axes, 2)
                  if shape[d] >= mesh.size(a) and shape[e] >= mesh.size(b)]
    return found


# --- one signature --------------------------------------------------------------------------------
class _Problem:
    """A function and its arguments: the graph, which leaves are parameters, and their prices."""

    def __init__(self, owner: Sharded, args: tuple, kwargs: Mapping[str, Any]):
        self.owner, self.mesh, f = owner, owner.mesh, owner.f
        whole = lambda x: _on(self.mesh, as_stand_in(x))  # noqa: E731
        self.args = tuple(tree.map_tree(whole, a) for a in args)
        self.kwargs = {k: tree.map_tree(whole, v) for k, v in kwargs.items()}
        leaves, structure = tree.flatten(f.bind(self.args, self.kwargs)[0])
        pairs = [(p, x) for p, x in zip(tree.paths(structure), leaves, strict=True)
                 if isinstance(x, Tensor)]
        self.structure = structure
        self.paths, self.leaves = [p for p, _ in pairs], [x for _, x in pairs]

    def solve(self) -> Chosen:
        choices = {g: candidates(self.leaves[i].shape, self.mesh) if self._share(g) >= SMALL else
                   [WHOLE] for g, i in self._first_of_groups().items()}
        prices = _Prices(self)
        found = search(choices, prices, self.owner.limit)
        if found is None:
            self._infeasible(least(choices, prices))
        assert found is not None
        exchange, work, held = prices.of(found.assignment)
        specs = {p: found.assignment[g] for p, g in self.group.items()}
        return Chosen(specs, exchange, work, held, self.owner.limit, found.tried, self.mesh)

    def _infeasible(self, smallest: SearchResult) -> None:
        raise OutOfMemoryError(
            f"no layout of the parameters of {self.owner.f.name} on {self.mesh} fits into "
            f"{amount(self.owner.limit, 'B')} a rank; the least found needs "
            f"{amount(smallest.cost.bytes, 'B')}",
            hint=f"memory_limit={int(-(-smallest.cost.bytes // 1))} or more, more ranks, a smaller "
            "batch, or ts.checkpoint")

    # --- roles -----------------------------------------------------------------------------------
    @cached_property
    def traced(self) -> Any:
        return self.owner.f.traced(*self.args, **self.kwargs)

    @cached_property
    def roles(self) -> list[str]:
        return roles_of(self.owner.f, self.traced, self.args, self.kwargs)

    @cached_property
    def key(self) -> tuple:
        """What the choice depends on: not on how parameters lie now."""
        return self.structure, tuple(
            (tuple(x.shape), x.type, x.layout if role == "data" else None)
            for x, role in zip(self.leaves, self.roles, strict=False))

    @cached_property
    def group(self) -> dict[str, str]:
        """Of each parameter's path, the group whose layout it shares: layers that repeat."""
        return {p: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", p) + str(list(x.shape))
                for p, x, role in zip(self.paths, self.leaves, self.roles, strict=False)
                if role == "parameters"}

    def _first_of_groups(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for i, p in enumerate(self.paths):
            if p in self.group:
                found.setdefault(self.group[p], i)
        if not found:
            raise ArgumentError(f"{self.owner.f.name} has no parameters among these arguments",
                                hint="make them so: ts.param(x)")
        return found

    def _share(self, group: str) -> float:
        """Of the bytes of all parameters, the part that a group has."""
        sizes = {p: bytes_of(x.shape, x.dtype) for p, x in zip(self.paths, self.leaves, strict=True)
                 if p in self.group}
        return sum(n for p, n in sizes.items() if self.group[p] == group) / max(
            1, sum(sizes.values()))

    def layouts(self, assignment: Mapping[str, ShardSpec]) -> list[Layout]:
        """Of every leaf under an assignment of specs to groups."""
        group, roles, found = self.group, self.roles, []
        for path, x, role in zip(self.paths, self.leaves, roles, strict=False):
            owner = path if role == "parameters" else (
                self._parameter_of(path, x, group) if role == "optimizer" else None)
            found.append(x.layout if owner is None else
                         resolve(assignment[group[owner]], self.mesh, x.shape, x.type))
        return found

    def _parameter_of(self, path: str, x: Tensor, group: Mapping[str, str]) -> str | None:
        """The parameter that a leaf of the optimizer's state belongs to: of its shape, and with
        the path that ends most alike."""
        same = [p for p, y in zip(self.paths, self.leaves, strict=True)
                if p in group and tuple(y.shape) == tuple(x.shape)]
        return max(same, key=lambda p: _common_end(p, path), default=None)


def _on(mesh: Mesh, x: Any) -> Any:
    """A stand-in without a layout is whole on every rank of the mesh."""
    if isinstance(x, DistStandIn) and x.layout is None:
        x.layout = replicated(mesh, len(x.shape))
    return x


def _common_end(a: str, b: str) -> int:
    parts = zip(reversed(a.split(".")), reversed(b.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], parts))


# --- prices ---------------------------------------------------------------------------------------
class _Prices:
    """What an assignment costs: search.Cost of a call."""

    def __init__(self, problem: _Problem):
        self.problem, self.owner = problem, problem.owner
        traced = problem.traced
        self.graph = ready(traced.graph)
        self.captured = {v: t.layout for v, t in self.graph.captures if t.layout is not None}
        self.stored, self.inside = storage_of(self.graph), _inside(self.graph)
        self.device: DeviceModel = self.owner.fabric.device_of(problem.mesh)
        self.times: dict[tuple, float] = {}

    def __call__(self, assignment: Mapping[str, ShardSpec]) -> Cost:
        exchange, work, held = self.of(assignment)
        if self.owner.objective == "time":
            return Cost((exchange + work) * 1e-6, held)
        return Cost(exchange * 1e-6, held, work * 1e-6)

    def of(self, assignment: Mapping[str, ShardSpec]) -> tuple[float, float, float]:
        """(microseconds of collectives, of matmuls, bytes of a rank at the peak)"""
        mesh = self.problem.mesh
        where = dict(zip(self.graph.inputs, self.problem.layouts(assignment), strict=True))
        made = propagate(self.graph, where | self.captured, mesh)
        steps = merge_waiting(made.steps)
        made = replace(made, steps=tuple(steps))
        exchange = sum(c.times * self._time(c.op, c.axes, c.bytes) for c in planned(steps))
        work = self._works(steps)
        return exchange, work, held_bytes(made, self.stored, self.inside)

    def _time(self, op: str, axes: tuple[str, ...], received: int) -> float:
        key = (op, axes, received)
        if key not in self.times:
            mesh = self.problem.mesh
            size = received / max(bus_factor(op, mesh.size(axes)), 1e-30)
            self.times[key] = self.owner.fabric.time(op, size, mesh, axes).us
        return self.times[key]

    def _works(self, steps: Sequence[Step]) -> float:
        """Of the matmuls among steps, in held graphs too."""
        runs = [s for s in steps if isinstance(s, PartitionedOp)]
        return sum(self._work(s) + s.times * sum(self._works(b.steps) for b in s.bodies)
                   for s in runs)

    def _work(self, step: PartitionedOp) -> float:
        """Of a matmul on rank 0."""
        if step.node.op.name != "matmul":
            return 0.0
        a, out = step.node.inputs[0], step.node.outputs[0]
        k = _local(step.ins[0], a.aval.shape, a.aval.dtype)[-1]
        count = 2.0 * prod(_local(step.outs[0], out.aval.shape, out.aval.dtype)) * k
        kind = max((self.stored.dtype(v) for v in step.node.inputs), key=lambda t: t.bits)
        return 1e6 * count / (self.device.peak(kind) * self.device.matmul_efficiency)


@lru_cache(maxsize=16384)
def _local(layout: Layout, shape: tuple, dtype: DType) -> tuple[int, ...]:
    return local_shape(layout, shape, 0, dtype)


def _inside(graph: Graph) -> frozenset[Value]:
    """Values that stay inside a fused loop, and constants: they take no memory."""
    free = {v for n in graph.nodes if n.op.free for v in n.outputs}
    for unit in fuse(graph, CPU):
        if unit.call is None:
            free |= {v for n in unit.nodes for v in n.outputs} - set(unit.outputs)
    return frozenset(free - set(graph.outputs))


def held_bytes(made: Propagated, stored: StoredTypes, inside: frozenset[Value]) -> float:
    """Bytes that rank 0 holds at the peak of a partitioned graph: its arguments all the time, each
    other value in each layout from the step that makes it to the last that reads it. A result with
    an argument's type and layout is written over it."""
    total = float(sum(_size(v, at, stored) for v, at in made.inputs))
    given = set(made.inputs)
    over = _overwrites(made)
    born: dict[Held, int] = {}
    ends: dict[Held, int] = {}
    for i, step in enumerate(made.steps):
        reads, makes = _reads_and_makes(step, inside)
        for held in makes:
            if held not in given and held not in over and stored.owner(held[0]) is held[0]:
                born.setdefault(held, i)
        for held in (*reads, *makes):
            ends[stored.owner(held[0]), held[1]] = ends[held] = i
    for held in made.outputs:
        ends[held] = len(made.steps)
    change = [0.0] * (len(made.steps) + 2)
    for held, i in born.items():
        size = _size(*held, stored)
        change[i] += size
        change[ends[held] + 1] -= size
    return total + max(itertools.accumulate(change), default=0.0)


def _reads_and_makes(step: Step, inside: frozenset[Value]) -> tuple[list[Held], list[Held]]:
    op = isinstance(step, PartitionedOp)
    return reads(step), [(v, at) for v, at in makes(step) if not op or v not in inside]


def _overwrites(made: Propagated) -> set[Held]:
    free = [(v.aval, at) for v, at in made.inputs]
    over: set[Held] = set()
    for held in made.outputs:
        key = (held[0].aval, held[1])
        if key in free and held not in over:
            free.remove(key)
            over.add(held)
    return over


def _size(v: Value, at: Layout, stored: StoredTypes) -> int:
    dtype = stored.dtype(v)
    return bytes_of(_local(at, v.aval.shape, v.aval.dtype), dtype)


__all__ = ["Chosen", "Sharded", "candidates", "held_bytes", "make_sharded", "to_bytes"]
