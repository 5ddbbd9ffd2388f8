"""Graphs held by an op (the body of a scan, the branches of a cond): traced, closed, run.

Such a graph captures nothing: what its function closed over becomes trailing inputs of the op. It
draws no random stream either: its keys are derived from one drawn outside, so that running the
body again, in a backward pass or a recomputation, sees the same bits.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError, GraphError
from ..graph import functions as F
from ..graph import tree
from ..graph.execute import Executable
from ..graph.ir import Graph, Value, node_effects
from ..graph.iterations import repeats
from ..graph.op import Aval
from ..graph.operand import compute_type
from ..graph.ops.convert import RETYPE
from ..graph.ops.random import LoopKeys
from ..graph.ops.scaled import APART
from ..graph.signature import is_data, join_scales, split_result
from ..graph.simplify import merge_common
from ..graph.trace import apply, aval_of, current_builder, trace
from ..graph.weak_numbers import leaf_of, standing_for
from ..lazy_dataclass import dataclass
from ..numerics import NumericType
from ..tensor import Tensor, as_tensor
from .reverse import Tape, forward

BOOLS = (bool, np.bool_)  # they choose between programs, so Python sees them
ONCE = frozenset({"io", "state"})  # effects that must not happen again in a recomputation


def trace_body(fn: Callable, avals: Sequence[Aval], name: str, index: int | None = None,
               keys: LoopKeys | None = None) -> Graph:
    """The graph of fn, to be held by an op. index: the input that counts iterations. keys: of its
    draws, where others share them. What is computed twice is one value, as in any graph that
    reverse mode goes through, so that a cast rounds one cotangent."""
    outer = current_builder()

    def body(*tracers: Tensor) -> Sequence[Tensor]:
        builder = current_builder()
        assert builder is not None
        builder.rng = keys or LoopKeys(outer, None if index is None else tracers[index])
        return fn(*tracers)

    return merge_common(trace(body, avals, name, repeats=index is not None))


def close_together(*graphs: Graph) -> tuple[list[Graph], list[Tensor]]:
    """The graphs without captures, and the tensors they captured: trailing inputs of each."""
    captured: dict[int, Tensor] = {}
    for g in graphs:
        for _, t in g.captures:
            captured.setdefault(id(t), t)
    closed = []
    for g in graphs:
        own = {id(t): v for v, t in g.captures}
        extra = tuple(own.get(k) or Value(aval_of(t)) for k, t in captured.items())
        closed.append(replace(g, inputs=g.inputs + extra, captures=()))
    return closed, list(captured.values())


def close_graph(graph: Graph) -> tuple[Graph, list[Tensor]]:
    """The graph with its captured tensors as trailing inputs, and those tensors."""
    (closed,), captured = close_together(graph)
    return closed, captured


def run_graph(graph: Graph, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a closed graph, by an executable that the graph keeps."""
    if "executable" not in graph.kept:
        graph.kept["executable"] = Executable(graph, repeats())
    return graph.kept["executable"].run(arrays)


def run_iteration(body: Graph, index: int, carry: Sequence[np.ndarray],
                  others: Sequence[np.ndarray], first: bool) -> list[np.ndarray]:
    """The outputs of a loop's body (index, *carry, *others). They may take the memory of the carry:
    what an iteration made is the loop's own, and what the first one writes over is copied."""
    if "iteration" not in body.kept:
        body.kept["iteration"] = Executable(body, repeats(), range(1, 1 + len(carry)))
    made = body.kept["iteration"]
    if first:
        carry = [a.copy() if i in made.overwritten else a for i, a in enumerate(carry, 1)]
    return made.run([np.asarray(index, np.int64), *carry, *others])


def check_inputs(graph: Graph, given: Sequence[Aval]) -> tuple[Aval, ...]:
    """The types of a held graph's outputs. Raises GraphError unless it takes `given`."""
    want = tuple(v.aval for v in graph.inputs)
    if want != tuple(given):
        raise GraphError(f"graph {graph.name} takes ({', '.join(map(str, want))}), "
                         f"not ({', '.join(map(str, given))})")
    return tuple(v.aval for v in graph.outputs)


def is_float(x: Aval | Tensor | Value) -> bool:
    return (x.aval if isinstance(x, Value) else x).type.dtype.kind == "float"


def tangent_aval(x: Aval | Tensor) -> Aval:
    """The type of a cotangent or tangent of x: its extents in the compute type."""
    return Aval(tuple(x.shape), compute_type(x.type))


def zero_tangent(x: Aval | Tensor) -> Tensor:
    return F.zeros(tuple(x.shape), compute_type(x.type))


# --- keeping values of a graph that will be run again ------------------------------------------
@dataclass(frozen=True)
class Keeper:
    """A graph that will be run again in a backward pass, and what its first run keeps of it.

    `values` are kept, and with them all results of nodes whose effects must not happen twice.
    `graph` has the kept tensors as further outputs; `unpack` names them for `resume`.
    """

    body: Graph
    values: tuple[Value, ...]
    graph: Graph
    structure: tree.TreeDef

    @staticmethod
    def of(body: Graph, values: Sequence[Value] = ()) -> Keeper:
        once = [n for n in body.nodes if node_effects(n) & ONCE]
        every = tuple(dict.fromkeys([*values, *(v for n in once for v in n.outputs)]))
        places = [i for i, n in enumerate(body.nodes) if n in once and n.op.residual is not None]
        if not places:
            plain = tree.flatten({"values": [0] * len(every), "nested": {}})[1]
            return Keeper(body, every, replace(body, outputs=body.outputs + every), plain)
        return _keeper_of_nested(body, every, places)

    def split(self, outputs: Sequence[Tensor]) -> tuple[tuple, Any]:
        """(outputs of the body, what was kept) from the outputs of `graph`."""
        n = len(self.body.outputs)
        return tuple(outputs[:n]), tree.unflatten(self.structure, outputs[n:])

    def resume(self, args: Sequence[Tensor], kept: Any) -> Tape:
        """The body's tape, recomputed from its inputs and what was kept."""
        known = dict(zip(self.values, kept["values"], strict=True))
        nested = {self.body.nodes[i]: saved for i, saved in kept["nested"].items()}
        return forward(self.body, args, known, nested)


def _keeper_of_nested(body: Graph, values: tuple[Value, ...], places: list[int]) -> Keeper:
    """Nodes that hold graphs with such effects: what their own residuals save is kept too."""
    box: list[tree.TreeDef] = []

    def run(*args: Tensor) -> list[Tensor]:
        tape = forward(body, args)
        kept = {"values": [tape.values[v] for v in values],
                "nested": {i: tape.saved[body.nodes[i]] for i in places}}
        leaves, structure = tree.flatten(kept)
        box.append(structure)
        return [*tape.outputs, *leaves]

    graph = trace_body(run, [v.aval for v in body.inputs], body.name)
    if graph.captures:
        raise GraphError(f"graph {body.name} captures values when it is run to be reversed")
    return Keeper(body, values, graph, box[0])


# --- nested values as tensors -----------------------------------------------------------------
class Packed:
    """A nested value as a list of tensors, and how to rebuild it around others.

    Strings, bools and other Python objects stay as they are. Numbers are tensors, which have
    derivatives, or "weak": data that takes the type of the tensors beside it, as numbers do. As
    "constants" the known ones stay as they are, and the traced ones are weak.
    """

    def __init__(self, value: Any, numbers: Literal["tensors", "weak", "constants"] = "tensors"):
        self.flat, self.treedef = tree.flatten(value)
        fixed = (*BOOLS, int, float) if numbers == "constants" else BOOLS
        self.places = [
            i for i, x in enumerate(self.flat) if is_data(x) and not isinstance(x, fixed)
        ]
        made = as_tensor if numbers == "tensors" else leaf_of
        self.tensors = [made(self.flat[i]) for i in self.places]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value with fresh tracers in the place of its tensors, marked as those are."""
        flat = list(self.flat)
        for i, like, t in zip(self.places, self.tensors, tensors, strict=True):
            t.is_param, t.scale = like.is_param, like.scale
            flat[i] = standing_for(like, t)
        return tree.unflatten(self.treedef, flat)

    def replaced(self, leaves: Sequence[Any], rest: Any = None) -> Any:
        """The value with any objects in the place of its tensors, and `rest` for other leaves."""
        flat = [rest] * len(self.flat)
        for i, x in zip(self.places, leaves, strict=True):
            flat[i] = x
        return tree.unflatten(self.treedef, flat)

    def take_in(self, place: int) -> None:
        """A leaf that was to stay as it is, as a tensor too."""
        at = bisect(self.places, place)
        self.places.insert(at, place)
        self.tensors.insert(at, as_tensor(self.flat[place]))

    def after(self, leaves: Sequence[Tensor]) -> Any:
        """The value behind a loop that carries it: params stay params, as in each iteration, and
        what is no tensor is what it was."""
        flat = list(self.flat)
        for i, x, like in zip(self.places, leaves, self.tensors, strict=True):
            if x is not like:
                x.is_param = like.is_param
            flat[i] = x
        return tree.unflatten(self.treedef, flat)

    def names(self, prefix: str = "") -> list[str]:
        """A name per tensor."""
        every = tree.paths(self.treedef, prefix)
        return [every[i] for i in self.places]

    def need_unscaled(self, what: str) -> None:
        for name, t in zip(self.names(), self.tensors, strict=True):
            if t.scale is not None:
                raise ArgumentError(f"{what} {name} is a scaled tensor, {t.type}",
                                    hint=APART)


def _codes_of_calls(codes: Tensor, scale: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Codes of many calls along an axis, with their scales: what had one for all elements has one
    for each index of the axis."""
    axis %= codes.ndim
    ones = [1] * (codes.ndim - scale.ndim)
    scale = F.reshape(scale, (scale.shape[0], *ones, *scale.shape[1:]))
    policy = codes.type.policy
    if policy.custom is None:
        inside = policy.per_channel
        channel = axis if inside is None else inside + (axis <= inside)
        to = NumericType(codes.dtype, replace(policy, per_channel=channel))
        codes = apply(RETYPE, codes, to=to)
    return codes, F.moveaxis(scale, 0, axis) if axis else scale


class Result:
    """The result of a traced function: its tensors, and how to rebuild it around others."""

    def __init__(self, value: Any):
        flat, self.treedef = tree.flatten(value)
        self.tensors, self.rebuild = split_result(flat)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        return tree.unflatten(self.treedef, join_scales(tensors, self.rebuild))

    def stacked(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> Any:
        """The result of many calls at once, each of whose tensors has an axis for them, or none. Of
        codes with a scale that is the scale's first."""
        made, at = list(tensors), 0
        for how in self.rebuild:
            axis = axes[at] if how == "scaled" else None
            if axis is not None:
                made[at:at + 2] = _codes_of_calls(made[at], made[at + 1], axis)
            at += {"tensor": 1, "param": 1, "scaled": 2}.get(how, 0)
        return self.build(made)

    @property
    def plain(self) -> bool:
        """Whether every leaf is a tensor."""
        return all(how in ("tensor", "param") for how in self.rebuild)
