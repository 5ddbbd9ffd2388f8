"""Which values of a graph are the same on all ranks of a mesh axis, and the seed of a gradient.

In the local view every rank has arrays of its own, and `ts.grad` is the gradient of the sum of the
losses of all ranks. A loss that n ranks hold n times is one loss: each of them seeds it with 1/n.
A value is replicated over an axis when a collective over that axis made it whose record says
`same_result` (all_reduce, all_gather, broadcast), or when it follows from such values and constants
alone. What comes in varies, unless `ts.dist.replicated` says that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tessera import hooks
from tessera.graph.ir import Graph, Node, Value, subgraphs
from tessera.graph.op import OPS
from tessera.graph.trace import GraphBuilder, Tracer

from ..device_mesh import Mesh
from ..world import transport
from .record import COLLECTIVES

# (mesh, axis) pairs over which a value is the same; None: on all ranks of the program.
Same = frozenset[tuple[Mesh, str]] | None
EVERYWHERE: Same = None
NOWHERE: Same = frozenset()


def intersect(*values: Same) -> Same:
    """Where a function of these values is the same: wherever all of them are."""
    known = [v for v in values if v is not None]
    return frozenset.intersection(*known) if known else EVERYWHERE


def replication(graph: Graph, inputs: Sequence[Same]) -> dict[Value, Same]:
    """Where each value of a graph is the same, given where its inputs are."""
    found = dict(zip(graph.inputs, inputs, strict=True))
    found |= _of_captured(graph.captures)
    _walk(graph.nodes, found)
    return found


def _of_captured(captures: Iterable[tuple[Value, Any]]) -> dict[Value, Same]:
    """Of values of the enclosing trace that which is known there; other tensors vary."""
    around: dict[GraphBuilder, dict[Value, Same]] = {}
    found: dict[Value, Same] = {}
    for value, tensor in captures:
        if not isinstance(tensor, Tracer):
            found[value] = NOWHERE
            continue
        if tensor.builder not in around:
            around[tensor.builder] = _so_far(tensor.builder)
        found[value] = around[tensor.builder][tensor.value]
    return found


def _so_far(builder: GraphBuilder) -> dict[Value, Same]:
    """Where each value of an unfinished trace is the same."""
    found: dict[Value, Same] = {v: NOWHERE for v in builder.inputs}
    found |= _of_captured(builder.captures.values())
    _walk(builder.nodes, found)
    return found


def _walk(nodes: Sequence[Node], found: dict[Value, Same]) -> None:
    for node in nodes:
        ins = [found[v] for v in node.inputs]
        rule = rule_of(node.op.name)
        outs = rule(node, ins) if rule else [intersect(*ins)] * len(node.outputs)
        found.update(zip(node.outputs, outs, strict=True))


# --- collectives ----------------------------------------------------------------------------------
def _of_mesh(where: Same, mesh: Mesh) -> frozenset:
    """The part that is about one mesh: its axes are independent of each other."""
    if where is None:
        return frozenset((mesh, axis) for axis in mesh.axes)
    return frozenset(pair for pair in where if pair[0] == mesh)


def _after_all_reduce(node: Node, ins: list[Same]) -> list[Same]:
    """The same along its axes, too: as of all_reduce."""
    mesh, axes = node.attrs["mesh"], node.attrs["axis"]
    if ins[0] is None or mesh is None:
        return [EVERYWHERE]
    found = _of_mesh(ins[0], mesh) | {(mesh, axis) for axis in axes}
    whole = mesh.ranks is None and len(found) == len(mesh.axes)
    return [EVERYWHERE if whole else found]


def _after_reduce_scatter(node: Node, ins: list[Same]) -> list[Same]:
    """Different along its axes: as of reduce_scatter."""
    mesh, axes = node.attrs["mesh"], node.attrs["axis"]
    if mesh is None:
        return [NOWHERE]
    return [frozenset(pair for pair in _of_mesh(ins[0], mesh) if pair[1] not in axes)]


# --- ops that hold graphs -------------------------------------------------------------------------
def _outputs(graph: Graph, inputs: Sequence[Same]) -> list[Same]:
    found = replication(graph, inputs)
    return [found[v] for v in graph.outputs]


def _scan(node: Node, ins: list[Same]) -> list[Same]:
    n, body = node.attrs["n_carry"], node.attrs["body"]
    carry, rest = ins[:n], ins[n:]
    while True:  # until what an iteration is given is what it hands on; it can only shrink
        outs = _outputs(body, [EVERYWHERE, *carry, *rest])
        after = [intersect(a, b) for a, b in zip(carry, outs[:n], strict=True)]
        if after == carry:
            return [*carry, *outs[n:]]
        carry = after


def _while(node: Node, ins: list[Same]) -> list[Same]:
    n = len(node.outputs)
    carry, rest = ins[:n], ins[n:]
    while True:
        go_on = intersect(*_outputs(node.attrs["test"], [EVERYWHERE, *carry, *rest]))
        outs = _outputs(node.attrs["body"], [EVERYWHERE, *carry, *rest])
        after = [intersect(a, b, go_on) for a, b in zip(carry, outs, strict=True)]
        if after == carry:
            return carry
        carry = after


def _cond(node: Node, ins: list[Same]) -> list[Same]:
    both = [_outputs(node.attrs[side], ins[1:]) for side in ("on_true", "on_false")]
    return [intersect(ins[0], a, b) for a, b in zip(*both, strict=True)]


Rule = Callable[[Node, list[Same]], list[Same]]
RULES: dict[str, Rule] = {  # of ops that are no collectives: the records of those say it
    "replicated": _after_all_reduce,
    "scan": _scan, "while_loop": _while, "cond": _cond,
    "checkpoint": lambda node, ins: _outputs(node.attrs["body"], ins),
}


def _primal(node: Node, ins: list[Same]) -> list[Same]:
    """Of a function with rules of the user's: what it computes."""
    return _outputs(node.attrs["primal"], ins)


def rule_of(op: str) -> Rule | None:
    """None: the result follows from the operands alone."""
    if op in COLLECTIVES:
        return _after_all_reduce if COLLECTIVES[op].same_result else _after_reduce_scatter
    if op in OPS and "primal" in OPS[op].graph_attrs:
        return _primal
    return RULES.get(op)


# --- the seed -------------------------------------------------------------------------------------
def seed(graph: Graph, loss: Value) -> float:
    """1/n for a loss that n ranks hold, this one among them."""
    if not _speaks(graph):
        return 1
    where = replication(graph, [NOWHERE] * len(graph.inputs))[loss]
    n = copies(where)
    return 1 / n if n > 1 else 1


hooks.seed.fill(seed)


def _speaks(graph: Graph) -> bool:
    """Whether a graph has a collective, or a value said to be replicated."""
    return any(node.op.name in COLLECTIVES or node.op.name == "replicated"
               or any(map(_speaks, subgraphs(node))) for node in graph.nodes)


def copies(where: Same) -> int:
    """How many ranks have what this rank has: those reached along the axes."""
    here = transport()
    if where is None:
        return here.size
    reached, fresh = {here.rank}, [here.rank]
    while fresh:
        rank = fresh.pop()
        for mesh, axis in where:
            world = mesh.world_ranks
            near = {world[r] for r in mesh.group(list(world).index(rank), axis)} - reached
            reached |= near
            fresh += near
    return len(reached)
