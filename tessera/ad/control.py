"""Branches that depend on data: cond, an op that holds both as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import ArgumentError, DTypeError, ShapeError, UnsupportedTargetError
from ..graph import functions as F
from ..graph import tree
from ..graph.interpret import own_memory
from ..graph.ir import Graph, node_effects
from ..graph.op import OPS, Arg, Aval, GraphOp, Sample
from ..graph.signature import callable_name
from ..graph.simplify import KEEP_EFFECTS
from ..graph.trace import apply, aval_of, evaluate
from ..numerics import as_type
from ..tensor import Tensor, as_tensor
from .batching import batch_graph, stretch
from .forward import push_forward
from .reverse import backward, materialize
from .subgraphs import (
    Keeper,
    Packed,
    Result,
    check_inputs,
    close_together,
    is_float,
    run_graph,
    trace_body,
    zero_tangent,
)
from .transform import need_function


def cond(pred: Any, true_fn: Callable, false_fn: Callable, *operands: Any) -> Any:
    """true_fn(*operands) where pred holds, else false_fn(*operands); one of them runs.

    pred: a bool scalar. Both functions are traced and must return equal structures, shapes and
    types. Under vmap with a batched pred both run and the results are chosen by ts.where; a branch
    that is not finite outside its domain then needs ts.where on its operand too.
    Raises ShapeError naming the result that differs, DTypeError when pred is not a bool scalar.
    """
    for fn in (true_fn, false_fn):
        need_function(fn, "cond", ["operand"] * len(operands))
    p = need_predicate(as_tensor(pred), "cond: pred")
    packed = Packed(list(operands), numbers="constants")
    packed.need_unscaled("cond: operand")
    graphs: list[Graph] = []
    results: list[Result] = []
    for fn in (true_fn, false_fn):
        graph, result = _trace_branch(fn, packed, results[0] if results else None)
        graphs.append(graph)
        results.append(result)
    _check_branches(true_fn, false_fn, graphs, results)
    (on_true, on_false), captured = close_together(*graphs)
    out = apply(COND, p, *packed.tensors, *captured, on_true=on_true, on_false=on_false)
    for t, *kinds in zip(out, *(_tensor_kinds(r) for r in results), strict=False):
        t.is_param = "param" in kinds
    return results[0].build(out)


def _tensor_kinds(result: Result) -> list[str]:
    """Per tensor of a branch's result "tensor", "param", or those of a scaled one."""
    return [kind for how in result.rebuild if isinstance(how, str)
            for kind in ((how, "scale") if how == "scaled" else (how,))]


def need_predicate(p: Tensor, what: str) -> Tensor:
    if p.dtype.kind != "bool" or p.ndim:
        raise DTypeError(f"{what} must be a bool scalar, it is {p.type}{show_shape(p.shape)}",
                         hint="compare first (x > 0) and reduce (ts.any, ts.all); "
                         "ts.where chooses per element")
    return p


def _trace_branch(fn: Callable, packed: Packed, like: Result | None) -> tuple[Graph, Result]:
    box: list[Result] = []

    def branch(*tracers: Tensor) -> list[Tensor]:
        made = fn(*packed.build(tracers))
        if like is not None:
            leaves = tree.leaves_like(made, like.treedef, f"cond: the result of "
                                      f"{callable_name(fn)}, the false branch,")
            made = tree.unflatten(like.treedef, leaves)
        box.append(Result(made))
        return box[0].tensors

    graph = trace_body(branch, [aval_of(x) for x in packed.tensors], callable_name(fn))
    return graph, box[0]


def _check_branches(true_fn: Callable, false_fn: Callable, graphs: Sequence[Graph],
                    results: Sequence[Result]) -> None:
    a, b = results
    names = f"{callable_name(true_fn)} (true) and {callable_name(false_fn)} (false)"
    plain = [["tensor" if how == "param" else how for how in r.rebuild] for r in results]
    if plain[0] != plain[1]:
        raise ArgumentError(f"cond: {names} return different Python objects",
                            hint="what a branch returns must be tensors, or equal in both")
    labels = tree.paths(a.treedef, "result")
    for i, (x, y) in enumerate(zip(graphs[0].outputs, graphs[1].outputs, strict=True)):
        if x.aval != y.aval:
            label = labels[i] if len(labels) == len(graphs[0].outputs) else f"result {i}"
            raise ShapeError(f"cond: {names} differ: {label} is {x.aval} and {y.aval}",
                             hint="both branches return equal shapes and types: ts.cast, "
                             "ts.broadcast_to, ts.zeros_like", code="E_BRANCH")


def _cond_shape(p: Aval, *xs: Aval, on_true: Graph, on_false: Graph) -> tuple[Aval, ...]:
    outs = check_inputs(on_true, xs)
    other = check_inputs(on_false, xs)
    if outs != other:
        raise ShapeError("the branches return different types: "
                         f"{', '.join(map(str, outs))} and {', '.join(map(str, other))}")
    return outs


def _cond_ref(p: np.ndarray, *arrays: np.ndarray, on_true: Graph, on_false: Graph) -> tuple:
    return own_memory(run_graph(on_true if p else on_false, arrays), arrays)


def _branches(p: Tensor, operands: Sequence[Tensor], run: Callable, on_true: Graph,
              on_false: Graph, name: str) -> tuple[Tensor, ...]:
    """A cond whose branches are run(graph, *operands), for a derived program."""
    graphs = [
        trace_body(lambda *a, g=g, side=side: run(g, side, *a), [aval_of(x) for x in operands],
                   f"{g.name}_{name}")
        for side, g in enumerate((on_true, on_false))
    ]
    (a, b), captured = close_together(*graphs)
    return apply(COND, p, *operands, *captured, on_true=a, on_false=b)


def _keepers(on_true: Graph, on_false: Graph) -> list[Keeper]:
    """Branches are recomputed when reversed; only what may not happen twice is kept."""
    return [Keeper.of(on_true), Keeper.of(on_false)]


def _cond_residual(p: Tensor, *xs: Tensor, on_true: Graph, on_false: Graph) -> tuple[tuple, tuple]:
    n = len(on_true.outputs)
    extra = [[v.aval for v in k.graph.outputs[n:]] for k in _keepers(on_true, on_false)]
    if not any(extra):
        return apply(COND, p, *xs, on_true=on_true, on_false=on_false), ()

    def run(graph: Graph, side: int, *args: Tensor) -> list[Tensor]:
        out = evaluate(Keeper.of(graph).graph, args)
        none = [F.zeros(a.shape, a.type) for a in extra[1 - side]]
        return [*out, *none] if side == 0 else [*out[:n], *none, *out[n:]]

    out = _branches(p, xs, run, on_true, on_false, "kept")
    return tuple(out[:n]), tuple(out[n:])


def _cond_vjp(gs: tuple, ys: tuple, p: Tensor, *xs: Tensor, saved: tuple, wanted: tuple,
              on_true: Graph, on_false: Graph) -> tuple:
    places = [i for i, (w, x) in enumerate(zip(wanted[1:], xs, strict=True)) if w and is_float(x)]
    given = [j for j, g in enumerate(gs) if g is not None]
    n_true = len(_keepers(on_true, on_false)[0].graph.outputs) - len(on_true.outputs)

    def run(graph: Graph, side: int, *args: Tensor) -> list[Tensor]:
        inputs, rest = args[: len(xs)], args[len(xs):]
        kept, dy = rest[: len(saved)], rest[len(saved):]
        keeper = Keeper.of(graph)
        mine = kept[:n_true] if side == 0 else kept[n_true:]
        tape = keeper.resume(inputs, tree.unflatten(keeper.structure, mine))
        cts: list[Tensor | None] = [None] * len(graph.outputs)
        for j, g in zip(given, dy, strict=True):
            cts[j] = g
        wrt = [graph.inputs[i] for i in places]
        return [g if g is not None else zero_tangent(v.aval)
                for g, v in zip(backward(tape, cts, wrt), wrt, strict=True)]

    operands = [*xs, *saved, *(gs[j] for j in given)]
    found = iter(_branches(p, operands, run, on_true, on_false, "vjp"))
    grads: list[Tensor | None] = [None] * (1 + len(xs))
    for i in places:
        grads[1 + i] = next(found)
    return tuple(grads)


def _cond_push(ts: tuple, p: Tensor, *xs: Tensor, on_true: Graph, on_false: Graph) -> tuple:
    moved = [i for i, t in enumerate(ts[1:]) if t is not None]
    floats = [j for j, v in enumerate(on_true.outputs) if is_float(v)]

    def run(graph: Graph, side: int, *args: Tensor) -> list[Tensor]:
        tangents: list[Tensor | None] = [None] * len(xs)
        for i, t in zip(moved, args[len(xs):], strict=True):
            tangents[i] = t
        outs, touts = push_forward(graph, args[: len(xs)], tangents)
        return [*outs, *(materialize(touts[j], outs[j]) for j in floats)]

    out = _branches(p, [*xs, *(ts[1 + i] for i in moved)], run, on_true, on_false, "jvp")
    n = len(on_true.outputs)
    tangents: list[Tensor | None] = [None] * n
    for j, t in zip(floats, out[n:], strict=True):
        tangents[j] = t
    return tuple(out[:n]), tuple(tangents)


def _cond_batch(size: Any, batched: tuple, p: Tensor, *xs: Tensor, on_true: Graph,
                on_false: Graph) -> tuple:
    flags = batched[1:]
    if batched[0]:
        both = []
        for graph, on in ((on_true, p), (on_false, F.logical_not(p))):
            given, own = _rows_that_come(on, xs, flags)
            outs, marks = batch_graph(graph, size, given, own)
            both.append([stretch(y, size, b) for y, b in zip(outs, marks, strict=True)])
        return tuple(choose(p, a, b) for a, b in zip(*both, strict=True)), True

    def run(graph: Graph, side: int, *args: Tensor) -> list[Tensor]:
        outs, marks = batch_graph(graph, size, args, flags)
        return [stretch(y, size, b) for y, b in zip(outs, marks, strict=True)]

    return _branches(p, xs, run, on_true, on_false, "batch"), True


def _rows_that_come(on: Tensor, xs: Sequence[Tensor], flags: Sequence[bool]
                    ) -> tuple[list[Tensor], tuple[bool, ...]]:
    """Operands of a branch that all rows compute: those that do not take it have no share in their
    derivatives, where 0 times one that is infinite would be NaN. A number for all rows gets rows;
    a matrix stays one, whose products are then one."""
    own = tuple(b or (is_float(x) and not x.ndim) for x, b in zip(xs, flags, strict=True))
    given = []
    for x, batched, rows in zip(xs, flags, own, strict=True):
        x = F.broadcast_to(x, on.shape) if rows and not batched else x
        given.append(choose(on, x, F.stop_gradient(x)) if rows and is_float(x) else x)
    return given, own


def choose(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where p, else b; p [N] and a, b [N, ...] of one type, stored as they are."""
    p = F.reshape(p, (p.shape[0], *(1,) * (a.ndim - 1)))
    return apply(OPS["where"], p, a, b)


def _cond_samples() -> tuple[Sample, ...]:
    f32 = as_type("f32")
    avals = [Aval((3,), f32), Aval((), f32)]
    a = trace_body(lambda x, w: [F.sin(x) * w], avals, "a")
    b = trace_body(lambda x, w: [x * x + w], avals, "b")
    return (Sample((Arg((), "bool", False), Arg((3,)), Arg(())), {"on_true": a, "on_false": b}),)


def _cond_unroll(p: Tensor, *xs: Tensor, on_true: Graph, on_false: Graph) -> tuple[Tensor, ...]:
    """Both branches, and of each element the one that was meant. Raises UnsupportedTargetError for
    branches that do more than compute."""
    for node in (n for g in (on_true, on_false) for n in g.nodes):
        if node_effects(node) & KEEP_EFFECTS:
            raise UnsupportedTargetError(
                f"{node.op.name} in a branch of cond: both branches run here, and it would be done "
                "whichever is meant", where=node.where,
                hint='do it outside of the branch, or run the function with target="cpu"')
    return tuple(apply(OPS["where"], F.reshape(p, (1,) * a.ndim), a, b)
                 for a, b in zip(evaluate(on_true, xs), evaluate(on_false, xs), strict=True))


COND = GraphOp(
    "cond",
    shape=_cond_shape,
    ref=_cond_ref,
    unroll=_cond_unroll,
    vjp=_cond_vjp,
    jvp=lambda ts, y, *xs, **attrs: _cond_push(ts, *xs, **attrs)[1],
    push=_cond_push,
    batch=_cond_batch,
    residual=_cond_residual,
    multi=True,
    graph_attrs=("on_true", "on_false"),
    samples=_cond_samples(),
    doc="one of two graphs, chosen by a bool scalar",
)

__all__ = ["COND", "choose", "cond", "need_predicate"]
