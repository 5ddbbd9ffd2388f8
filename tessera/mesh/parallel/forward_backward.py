"""A function and its pullback as two compiled graphs, so that one may run long after the other.

The joint graph of f(params, x, ...) and of its gradients, given cotangents, is cut in two:

    forward(params, x, ...)       -> (f's results, kept values)
    backward(kept, cotangents)    -> gradients of params and x

What is kept is what the backward half reads of the forward half: its residuals. Parameters and
arguments are kept as they are, never copied. What follows from parameters alone by views and
elementwise ops (a transpose, a cast) is computed again instead of being kept per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.ad.api import vjp
from tessera.ad.reverse import is_differentiable
from tessera.ad.subgraphs import ONCE, Packed, Result, tangent_aval
from tessera.graph import functions as F
from tessera.graph import tree
from tessera.graph.captured_names import CapturedNames
from tessera.graph.ir import Graph, Node, Value, node_effects
from tessera.graph.jit import JitFunction
from tessera.graph.ops.record_amax import histories_among
from tessera.graph.signature import callable_name
from tessera.graph.trace import aval_of, current_builder, evaluate, place_among, trace
from tessera.open_trace import values_read
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..collectives.replicated import NOWHERE, Same, copies, replication
from .batches import trained_places


@dataclass(frozen=True)
class GraphHalves:
    """The two halves of a joint graph, as graphs.

    forward: inputs -> results, then other kept values   backward: kept inputs, kept values,
    cotangents -> gradients   inputs, outputs: which of the forward half's are kept
    """

    forward: Graph
    backward: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cut(joint: Graph, primals: int, results: int, fixed: int = 0) -> GraphHalves:
    """Cut a graph whose inputs are `primals` values and then cotangents, and whose outputs are
    `results` values and then gradients. The first `fixed` inputs are parameters.

    The forward half has what the results need, and every io and state effect that does not wait
    for a cotangent.
    """
    early = _needed(joint, primals, results)
    rest = [n for n in joint.nodes if n not in early]
    again = _cheap(joint, early, joint.inputs[:fixed])
    read = {v for n in rest for v in n.inputs} | set(joint.outputs[results:])
    for node in reversed(joint.nodes):
        if node in again and any(v in read for v in node.outputs):
            rest.insert(0, node)
            read.update(node.inputs)
    made = {v for n in joint.nodes if n in early and n not in again for v in n.outputs}
    kept = tuple(v for n in joint.nodes for v in n.outputs if v in made and v in read)
    inputs = tuple(i for i, v in enumerate(joint.inputs[:primals]) if v in read)
    own = joint.outputs[:results]
    given = own + tuple(v for v in kept if v not in own)
    forward = replace(joint, inputs=joint.inputs[:primals], outputs=given,
                      nodes=tuple(n for n in joint.nodes if n in early))
    backward = replace(joint, nodes=tuple(rest), outputs=joint.outputs[results:],
                       inputs=(*(joint.inputs[i] for i in inputs), *kept,
                               *joint.inputs[primals:]))
    return GraphHalves(_own_captures(forward), _own_captures(backward), inputs,
                       tuple(given.index(v) for v in kept))


def _needed(joint: Graph, primals: int, results: int) -> set[Node]:
    """The nodes of the forward half."""
    late = set(joint.inputs[primals:])
    for node in joint.nodes:
        if any(v in late for v in node.inputs):
            late.update(node.outputs)
    wanted, early = set(joint.outputs[:results]), set()
    for node in reversed(joint.nodes):
        waits = any(v in late for v in node.inputs)
        if any(v in wanted for v in node.outputs) or (node_effects(node) & ONCE and not waits):
            early.add(node)
            wanted.update(node.inputs)
    return early


def _cheap(joint: Graph, early: set[Node], params: Sequence[Value]) -> set[Node]:
    """Nodes of the forward half that the backward half runs again: constants, views of inputs, and
    elementwise ops of parameters, captured values and constants."""
    fixed = {*params, *(v for v, _ in joint.captures)}
    viewed = fixed | set(joint.inputs)
    again: set[Node] = set()
    for node in joint.nodes:
        if node not in early or node_effects(node) or node.op.graph_attrs:
            continue
        if all(v in fixed for v in node.inputs) and (
                not node.inputs or node.op.view or node.op.loop or node.op.name == "cast"):
            fixed.update(node.outputs)
        elif not (node.op.view and all(v in viewed for v in node.inputs)):
            continue
        viewed.update(node.outputs)
        again.add(node)
    return again


def _own_captures(graph: Graph) -> Graph:
    read = {v for n in graph.nodes for v in n.inputs} | set(graph.outputs)
    return replace(graph, captures=tuple((v, t) for v, t in graph.captures if v in read))


@dataclass(frozen=True)
class Residuals:
    """What one call of the forward half leaves for the backward half."""

    inputs: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the kept values; inputs belong to others."""
        return sum(t.nbytes for t in self.values)


class Halves:
    """The two halves of f(params, x, *rest) for one signature, compiled.

    Gradients are of what is trained of params, and of x, in the compute type, None for what has
    none. largest: of each of params, whether it holds no slope but the largest numbers of a call,
    as for a history of fp8 scales. `same` says along which mesh axes each tensor of x is the same;
    made_same that of the results (replicated.py).
    read: functions that fn calls beside its own, such as a loss.
    """

    def __init__(self, fn: Callable, params: Any, x: Any, rest: tuple = (),
                 same: Sequence[Same] = (), read: Sequence[Callable] = ()):
        packed, name = Packed([params, x, *rest]), callable_name(fn)
        packed.need_unscaled(f"{name}: argument")
        box: list[Any] = []

        def joint(*tracers: Tensor) -> list[Tensor]:
            values = packed.build(tracers)
            every, form = tree.flatten(values[0])
            trained = trained_places(every)

            def of_trained(chosen: list[Any], h: Any) -> Any:
                given = dict(zip(trained, chosen, strict=True))
                return fn(tree.unflatten(form, [given.get(i, p) for i, p in enumerate(every)]), h,
                          *values[2:])

            y, pull = vjp(of_trained, [every[i] for i in trained], values[1])
            leaves, structure = tree.flatten(y)
            builder = current_builder()
            assert builder is not None
            cts = [builder.add_input(tangent_aval(t)) if is_differentiable(t)
                   else F.zeros(()) for t in leaves]
            slopes, dx = pull(tree.unflatten(structure, cts))
            found = dict(zip(trained, slopes, strict=True))
            grads = tree.unflatten(form, [found.get(i) for i in range(len(every))]), dx
            places = [i for i in range(len(every)) if found.get(i) is not None]
            box.extend([structure, [is_differentiable(t) for t in leaves], grads, places])
            return Result((y, *grads)).tensors

        meshes = [t.layout.mesh for t in packed.tensors if t.layout is not None]
        with values_read() as values:
            graph = trace(joint, [aval_of(t) for t in packed.tensors], name,
                          mesh=meshes[0] if meshes else None, place=place_among(packed.tensors))
        self._names = CapturedNames([fn, *read], [*(t for _, t in graph.captures), *values]) or None
        self.structure, self.moves, (dp, dx), places = box
        histories = {packed.places[i] for i in histories_among(graph)}
        self.largest = tuple(i in histories for i in places)
        self.split = tree.flatten(dp)[1], tree.flatten(dx)[1]
        self.results = len(self.moves)
        count = len(Packed(params).tensors)
        made = cut(graph, len(packed.tensors), self.results, count)
        known: list[Same] = [NOWHERE] * len(graph.inputs)
        known[count:count + len(same)] = same
        where = replication(graph, known)
        self.made_same = [where[v] for v in graph.outputs[:self.results]]
        self.kept = made
        names = Packed({"params": params, "x": x, "targets": rest}).names()
        self.forward = _runner(made.forward, name, names)
        self.backward = _runner(made.backward, f"backward of {name}",
                                [names[i] for i in made.inputs])

    def outdated(self) -> bool:
        """Whether a name by which fn read something holds something else now."""
        return self._names is not None and self._names.rebound() is not None

    @property
    def copies(self) -> int:
        """How many ranks have the first result: a loss that n have is seeded with 1/n by each."""
        return copies(self.made_same[0])

    def run(self, params: Any, x: Any, *rest: Any) -> tuple[Any, Residuals]:
        """(f's value, residuals)."""
        given = Packed([params, x, *rest]).tensors
        out = self.forward(*given)
        value = tree.unflatten(self.structure, out[:self.results])
        return value, Residuals(tuple(given[i] for i in self.kept.inputs),
                                tuple(out[i] for i in self.kept.outputs))

    def pull(self, residuals: Residuals, cotangents: Sequence[Tensor]) -> tuple[Any, Any]:
        """(gradient of params, gradient of x), from the cotangents of f's floating results."""
        flat = self.backward(*residuals.inputs, *residuals.values, *cotangents)
        count = len(_leaves(self.split[0]))
        return (tree.unflatten(self.split[0], flat[:count]),
                tree.unflatten(self.split[1], flat[count:]))


def _leaves(structure: tree.TreeDef) -> list[str]:
    return tree.paths(structure)


def _runner(graph: Graph, name: str, arguments: Sequence[str]) -> JitFunction:
    run = JitFunction(lambda *flat: evaluate(graph, flat), name=name)
    run.argument_names = arguments
    return run
