"""Partitioning ops that hold graphs: cond, scan and while_loop.

Their bodies are partitioned as graphs of their own, so that collectives happen inside, where the
values are: an iteration gathers what it uses. All ranks run the same iterations and take the same
branch, so they meet at the same collectives. A carry lies in one layout in all iterations: the one
that an iteration gives when it is given it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tessera.graph.expand import expand, expand_by
from tessera.graph.ir import Graph, Node, Value
from tessera.graph.simplify import PIPELINE

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..layout import Layout, Split, replicated
from ..partition import extents
from .collective_order import KEPT_BYTES, send_together, whole_bytes
from .partitioned_steps import LayoutHop, PartitionedOp, Together, merge_waiting
from .propagate import HELD, Propagated, propagate
from .rewrites import is_whole

Wanted = Sequence[Layout | None]  # where results must lie; None: where they are made
Outside = Mapping[Value, Layout]  # how inputs of a body lie outside that are gathered in front
Loop = tuple[list[Layout], Propagated]  # its carries, and an iteration
MOST_TRIES = 4  # layouts of the carries of a loop, before the last is imposed
KEPT_ON_HOSTS_BYTES = 32 << 20  # of parameters that are whole while a loop runs


@dataclass(frozen=True)
class Inside:
    """A node with its bodies on the mesh: how its operands must come, how its results lie.
    gradients: results that are sums of them, and wait for those of all ranks."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    bodies: tuple[Propagated, ...]
    gradients: tuple[int, ...] = ()


def ready(graph: Graph, mesh: Mesh | None = None) -> Graph:
    """A graph as it is partitioned: simplified, calls opened. On a mesh of GPUs, which have kernels
    for it, attention stays whole."""
    whole = mesh is not None and mesh.names_gpus
    key = "ready_for_gpus" if whole else "ready_for_mesh"
    if key not in graph.kept:
        made = graph
        for step in PIPELINE:
            made = _but_attention(made) if whole and step is expand else step(made)
        graph.kept[key] = made
    return graph.kept[key]


def _but_attention(graph: Graph) -> Graph:
    return expand_by(graph, lambda node: None if is_whole(node) else node.op.expand)


def partition(graph: Graph, given: Sequence[Layout], mesh: Mesh, wanted: Wanted = (),
              terms: Container[Value] = (), outside: Outside = MappingProxyType({})
              ) -> Propagated:
    """A held graph whose inputs lie as `given`; results may stay pending. terms, outside: see
    propagate."""
    made = propagate(graph, dict(zip(graph.inputs, given, strict=True)), mesh,
                     wanted or [None] * len(graph.outputs), terms, outside)
    steps = merge_waiting(made.steps) if mesh.names_gpus else send_together(made.steps, made.inputs)
    return replace(made, steps=tuple(steps))


def _at(body: Propagated) -> list[Layout]:
    return [layout for _, layout in body.outputs]


# --- cond ----------------------------------------------------------------------------------------
def _cond(node: Node, given: Sequence[Layout], mesh: Mesh, hints: Wanted) -> Inside:
    """Both branches give results in the layouts of the first, where they agree on them."""
    graphs = [ready(node.attrs[side], mesh) for side in ("on_true", "on_false")]
    bodies = [partition(g, given[1:], mesh) for g in graphs]
    if _at(bodies[0]) != _at(bodies[1]):
        wanted = [a if a == b else a.settled() for a, b in zip(*map(_at, bodies), strict=True)]
        bodies = [partition(g, given[1:], mesh, wanted) for g in graphs]
    return Inside((replicated(mesh, 0), *given[1:]), tuple(_at(bodies[0])), tuple(bodies))


# --- loops ---------------------------------------------------------------------------------------
def _scan(node: Node, given: Sequence[Layout], mesh: Mesh, hints: Wanted) -> Inside:
    """Sequences are whole along the dimension of the loop, results too."""
    body, n, m = ready(node.attrs["body"], mesh), node.attrs["n_carry"], node.attrs["n_xs"]
    xs = [_without_first(at, extents(v.aval))
          for at, v in zip(given[n:n + m], node.inputs[n:n + m], strict=True)]
    terms = {term for i in range(n) if (term := _added(
        body, body.inputs[1 + i], body.outputs[i])) is not None}

    def loop(constants: Sequence[Layout], outside: Outside) -> Loop:
        def run(carry: Sequence[Layout], wanted: Wanted) -> Propagated:
            return partition(body, [replicated(mesh, 0), *carry, *xs, *constants], mesh, wanted,
                             terms, outside)

        carry, made = _fixpoint(body, given[:n], run)
        scattered = [_scattered(at, hint, v) for at, hint, v in
                     zip(_at(made)[n:], hints[n:], node.outputs[n:], strict=True)]
        return carry, run(carry, [*carry, *scattered]) if any(scattered) else made

    constants, (carry, made) = _gathered_once(body, given[n + m:], mesh, loop)
    ins = (*carry, *map(_with_first, xs), *constants)
    aligned = {v for node in body.nodes if node.op.name == "shard_like" for v in node.outputs}
    gradients = tuple(i for i, at in enumerate(carry) if at.pending and _added(
        body, body.inputs[1 + i], body.outputs[i]) in aligned)
    return Inside(ins, (*carry, *map(_with_first, _at(made)[n:])), (made,), gradients)


def _while(node: Node, given: Sequence[Layout], mesh: Mesh, hints: Wanted) -> Inside:
    """The condition is whole on every rank: all go on, or none."""
    test, body = ready(node.attrs["test"], mesh), ready(node.attrs["body"], mesh)
    n, scalar = len(body.outputs), replicated(mesh, 0)

    def loop(constants: Sequence[Layout], outside: Outside) -> Loop:
        def run(carry: Sequence[Layout], wanted: Wanted) -> Propagated:
            return partition(body, [scalar, *carry, *constants], mesh, wanted, (), outside)

        return _fixpoint(body, given[:n], run, pending=False)

    constants, (carry, made) = _gathered_once(body, given[n:], mesh, loop)
    asked = partition(test, [scalar, *carry, *constants], mesh, [scalar])
    return Inside((*carry, *constants), tuple(carry), (asked, made))


def _gathered_once(body: Graph, constants: Sequence[Layout], mesh: Mesh,
                   loop: Callable[[Sequence[Layout], Outside], Loop]
                   ) -> tuple[list[Layout], Loop]:
    """What a loop is given in all its iterations, and the loop. Parameters that each iteration
    would gather anew are gathered in front of it, as far as there is room for them: such stay whole
    from one use to the next elsewhere too. constants: the last inputs of the body"""
    found, made, outside = list(constants), loop(constants, {}), dict[Value, Layout]()
    room = float(KEPT_BYTES if mesh.names_gpus else KEPT_ON_HOSTS_BYTES)
    inputs = body.inputs[len(body.inputs) - len(found):]
    gathers = _gathered_anew(made[1], inputs)
    for i, v in enumerate(inputs):
        whole = found[i].gathered(found[i].regather).unmarked() if v in gathers else None
        if whole is not None and (nbytes := whole_bytes((v, whole))) <= room:
            outside[v], found[i], room = found[i], whole, room - nbytes
    return found, loop(found, outside) if outside else made


def _gathered_anew(made: Propagated, inputs: Sequence[Value]) -> set[Value]:
    """The inputs that are gathered for a use, or casts and transposes of them."""
    source = {step.node.outputs[0]: step.node.inputs[0] for step in made.steps
              if isinstance(step, PartitionedOp) and len(step.node.inputs) == 1}
    moves = [move for step in made.steps
             for move in (step.moves if isinstance(step, Together) else (step,))
             if isinstance(move, LayoutHop) and move.anew and move.hop.kind == "all_gather"]
    found = set[Value]()
    for move in moves:
        v = move.value
        while v in source:
            v = source[v]
        found.add(v)
    return found.intersection(inputs)


def _scattered(at: Layout, hint: Layout | None, stack: Value) -> Layout | None:
    """Where a stacked result goes in each iteration, when its terms are to be scattered anyway: no
    rank then has the terms of all iterations whole."""
    if hint is None or at.op != "sum" or any(hint.dim_of(a) is None for a in at.pending):
        return None
    return _without_first(hint.unmarked(), extents(stack.aval)).unmarked()


def _fixpoint(body: Graph, start: Sequence[Layout],
              run: Callable[[Sequence[Layout], Wanted], Propagated], pending: bool = True
              ) -> tuple[list[Layout], Propagated]:
    """Layouts of the carries, the inputs of a body behind its first, that an iteration keeps."""
    n, carry = len(start), list(start)
    free = [None] * len(body.outputs)
    for _ in range(MOST_TRIES):
        made = run(carry, free)
        after = [at.settled() for at in _at(made)[:n]]
        if after == carry:
            break
        carry = after
    if pending:
        carry = _sums(body, carry, made)
    return carry, run(carry, [*carry, *free[n:]])


def _sums(body: Graph, carry: Sequence[Layout], made: Propagated) -> list[Layout]:
    """A carry to which each iteration only adds terms stays pending, and is reduced once, after
    the loop."""
    found = list(carry)
    homes = {v: at for step in made.steps for v, at in getattr(step, "makes", ())}
    for i, at in enumerate(carry):
        term = _added(body, body.inputs[1 + i], body.outputs[i])
        home = homes.get(term) if term is not None else None
        if home is not None and home.op == "sum" and (
                home.splits == at.splits or home.splits == at.gathered(home.pending).splits):
            found[i] = home
    return found


def _added(body: Graph, carry: Value, out: Value) -> Value | None:
    """The other operand of `out = carry + term`, when the carry has no other use."""
    users = [node for node in body.nodes if carry in node.inputs]
    if len(users) != 1 or users[0].op.name != "add" or users[0].outputs != (out,):
        return None
    others = [v for v in users[0].inputs if v is not carry]
    return others[0] if len(others) == 1 and others[0].aval == carry.aval else None


def _without_first(at: Layout, shape: Sequence[int]) -> Layout:
    """The layout of one element of a sequence. What splits the dimension of the loop splits another
    that is whole, where one has enough elements: stacked layers stay split, and are gathered one
    at a time where a layer is used whole."""
    axes, found = at.axes_of(0), at.with_split(0)
    free = [d for d in range(1, at.ndim)
            if not at.axes_of(d) and shape[d] >= at.mesh.size(axes)]
    if axes and free:
        found = replace(found.with_split(free[0], axes), regather=at.regather)
    return replace(found, splits=found.splits[1:])


def _with_first(at: Layout) -> Layout:
    return replace(at, splits=(Split(), *at.splits))


HELD.update({"cond": _cond, "scan": _scan, "while_loop": _while})

__all__ = ["Inside", "partition", "ready"]
