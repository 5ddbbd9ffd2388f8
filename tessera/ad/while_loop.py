"""Loops that run while a condition on data holds: while_loop, an op that holds two graphs, and
fori_loop, which is one where its bounds are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.host_loop import HostLoop
from ..graph.interpret import own_memory
from ..graph.ir import Graph
from ..graph.iterations import iterating
from ..graph.op import Arg, Aval, GraphOp, NoRule, Sample
from ..graph.operand import convert
from ..graph.signature import callable_name
from ..graph.trace import apply, aval_of, evaluate
from ..numerics import as_type
from ..tensor import Tensor, as_tensor
from .batching import batch_graph, stretch
from .control import choose, need_predicate
from .forward import push_forward
from .loops import carried_tensors, scan_named, trace_carrying
from .reverse import materialize
from .scan import INDEX, carry_flags, with_batch
from .subgraphs import (
    Packed,
    check_inputs,
    close_together,
    is_float,
    run_graph,
    run_iteration,
    trace_body,
)
from .transform import need_function


def while_loop(cond_fn: Callable, body_fn: Callable, init: Any) -> Any:
    """carry = init; while cond_fn(carry): carry = body_fn(carry).

    init: a nested value of tensors; body_fn keeps its structure, shapes and types; cond_fn gives a
    bool scalar. Forward mode and vmap work (under vmap until no element continues); reverse mode
    raises GradError, since the number of iterations is not known. Raises ShapeError, DTypeError.
    """
    need_function(cond_fn, "while_loop", ("carry",))
    need_function(body_fn, "while_loop", ("carry",))
    return _while((cond_fn, lambda index, carry: cond_fn(carry)),
                  (body_fn, lambda index, carry: body_fn(carry)), init, "while_loop")


Named = tuple[Callable, Callable[[Tensor, Any], Any]]  # what the user wrote, as (index, carry) -> _


def _while(condition: Named, body: Named, init: Any, what: str) -> Any:
    """carry = init; while condition(index, carry): carry = body(index, carry), index = 0, 1, ...

    what: the function that the user called, for messages
    """
    carry = Packed(init)
    carry.need_unscaled(f"{what}: carry")

    def test(index: Tensor, *args: Tensor) -> list[Tensor]:
        go = as_tensor(condition[1](index, carry.build(args)))
        return [need_predicate(go, f"{what}: the condition")]

    def step(index: Tensor, *args: Tensor) -> list[Tensor]:
        return carried_tensors(body[1](index, carry.build(args)), carry, what)

    def trace_it(fn: Callable, named: Callable) -> Graph:
        avals = [INDEX, *map(aval_of, carry.tensors)]
        return trace_body(fn, avals, callable_name(named), index=0)

    stepped = trace_carrying(lambda: trace_it(step, body[0]), carry, what)
    graphs = [trace_it(test, condition[0]), stepped]
    return carry.after(_run_while(graphs, carry.tensors, ()))


def fori_loop(lower: Any, upper: Any, body: Callable, init: Any) -> Any:
    """carry = body(i, carry) for i = lower, ... upper - 1.

    lower, upper: integers, and it is a scan over the indices, which has both derivatives; or
    tensors of one integer, such as a number that a compiled function is given by position, and it
    is a ts.while_loop, which has forward mode. Raises ArgumentError, ShapeError.
    """
    need_function(body, "fori_loop", ("i", "carry"))
    bounds = [_bound(b) for b in (lower, upper)]
    if any(isinstance(b, Tensor) for b in bounds):
        first, end = (convert(as_tensor(b), INDEX.type) for b in bounds)
        return _while((body, lambda index, carry: first + index < end),
                      (body, lambda index, carry: body(first + index, carry)), init, "fori_loop")
    start, stop = bounds

    def step(carry: Any, i: Tensor) -> tuple[Any, None]:
        return body(i, carry), None

    step.__name__ = callable_name(body)
    return scan_named(step, init, F.arange(start, max(start, stop)), None, False, "fori_loop")[0]


def _bound(bound: Any) -> int | Tensor:
    """A Python integer, or a tensor that holds one. Raises ArgumentError."""
    if isinstance(bound, Tensor) and bound.shape == () and bound.dtype.kind in ("int", "uint"):
        return bound
    if isinstance(bound, int | np.integer) and not isinstance(bound, bool):
        return int(bound)
    got = aval_of(bound) if isinstance(bound, Tensor) else repr(bound)
    raise ArgumentError(f"fori_loop needs integers as bounds, got {got}",
                        hint="ts.while_loop runs until a condition fails")


def _run_while(graphs: Sequence[Graph], carry: Sequence[Tensor], consts: Sequence[Tensor]
               ) -> tuple[Tensor, ...]:
    (test, body), captured = close_together(*graphs)
    return apply(WHILE, *carry, *consts, *captured, test=test, body=body)


def _while_shape(*xs: Aval, test: Graph, body: Graph) -> tuple[Aval, ...]:
    check_inputs(test, (INDEX, *xs))
    return check_inputs(body, (INDEX, *xs))


def _while_ref(*arrays: np.ndarray, test: Graph, body: Graph) -> tuple:
    n = len(body.outputs)
    carry, consts, i = list(arrays[:n]), arrays[n:], 0
    with iterating("while_loop", body, n) as begin:
        begin(i)
        while run_graph(test, [np.asarray(i, np.int64), *carry, *consts])[0]:
            carry = run_iteration(body, i, carry, consts, first=i == 0)
            i += 1
            begin(i)
    return own_memory(carry, arrays)


def _while_push(ts: tuple, *xs: Tensor, test: Graph, body: Graph) -> tuple:
    n = len(body.outputs)
    moved = [i for i in range(n) if is_float(xs[i])]
    t_consts = [i for i in range(n, len(xs)) if ts[i] is not None]
    a, b = n + len(moved), n + len(moved) + len(xs) - n

    def primal(args: Sequence[Tensor]) -> list[Tensor]:
        return [*args[:n], *args[a:b]]

    def run_test(index: Tensor, *args: Tensor) -> list[Tensor]:
        return evaluate(test, [index, *primal(args)])

    def step(index: Tensor, *args: Tensor) -> list[Tensor]:
        tangents: list[Tensor | None] = [None] * (1 + len(xs))
        for i, t in zip((*moved, *t_consts), (*args[n:a], *args[b:]), strict=True):
            tangents[1 + i] = t
        outs, touts = push_forward(body, [index, *primal(args)], tangents)
        return [*outs, *(materialize(touts[i], outs[i]) for i in moved)]

    carry = [*xs[:n], *(materialize(ts[i], xs[i]) for i in moved)]
    consts = [*xs[n:], *(ts[i] for i in t_consts)]
    avals = [INDEX, *map(aval_of, carry), *map(aval_of, consts)]
    graphs = [trace_body(run_test, avals, test.name, index=0),
              trace_body(step, avals, f"{body.name}_jvp", index=0)]
    out = _run_while(graphs, carry, consts)
    tangents: list[Tensor | None] = [None] * n
    for i, t in zip(moved, out[n:], strict=True):
        tangents[i] = t
    return tuple(out[:n]), tuple(tangents)


def _while_batch(size: Any, batched: tuple, *xs: Tensor, test: Graph, body: Graph) -> tuple:
    """Batched carries run until no element continues; those that have stopped keep their value."""
    n = len(body.outputs)
    w_flags = list(batched[n:])
    plain = [v.aval for v in body.inputs[1:]]
    stops: list[bool] = []
    marks: list[bool] = []

    def run_test(flags: list[bool], index: Tensor, args: Sequence[Tensor]) -> tuple[Tensor, bool]:
        (go,), (each,) = batch_graph(test, size, [index, *args], [False, *flags, *w_flags])
        return go, each

    def step_for(flags: list[bool]) -> Callable:
        def step(index: Tensor, *args: Tensor) -> list[Tensor]:
            go, each = run_test(flags, index, args)
            outs, found = batch_graph(body, size, [index, *args], [False, *flags, *w_flags])
            stops[:], marks[:] = [each], [f or each for f in found]
            full = [stretch(y, size, have) if want else y
                    for y, have, want in zip(outs, found, flags, strict=True)]
            if not each:
                return full
            return [choose(go, new, old) if want else new
                    for new, old, want in zip(full, args, flags, strict=False)]

        return step

    def flags_of(flags: list[bool]) -> list[bool]:
        trace_body(step_for(flags), [INDEX, *with_batch(plain, [*flags, *w_flags], size)],
                   body.name, index=0)
        return marks

    flags = carry_flags(n, batched[:n], flags_of)

    def test_any(index: Tensor, *args: Tensor) -> list[Tensor]:
        go, each = run_test(flags, index, args)
        return [F.any(go) if each else go]

    avals = [INDEX, *with_batch(plain, [*flags, *w_flags], size)]
    graphs = [trace_body(test_any, avals, test.name, index=0),
              trace_body(step_for(flags), avals, body.name, index=0)]
    carry = [stretch(c, size, have) if want else c
             for c, have, want in zip(xs[:n], batched[:n], flags, strict=True)]
    return _run_while(graphs, carry, xs[n:]), tuple(flags)


def _while_samples() -> tuple[Sample, ...]:
    """x <- x / 2 + w until the sum of squares is below 8."""
    f32 = as_type("f32")
    avals = [INDEX, Aval((2,), f32), Aval((), f32)]
    test = trace_body(lambda i, x, w: [F.greater(F.sum(x * x), 8.0)], avals, "test",
                      index=0)
    body = trace_body(lambda i, x, w: [x * 0.5 + w], avals, "body", index=0)
    args = (Arg((2,), "normal", False), Arg((), "unit", False))
    return (Sample(args, {"test": test, "body": body}),)


WHILE = GraphOp(
    "while_loop",
    shape=_while_shape,
    ref=_while_ref,
    repeats=lambda test, body: HostLoop(body, len(body.outputs), test=test),
    no_vjp=NoRule(
        "how many iterations must be kept is not known",
        "use ts.scan with the largest number of iterations and ts.where, or forward mode (ts.jvp); "
        "ts.stop_gradient when no gradient is meant",
    ),
    jvp=lambda ts, y, *xs, **attrs: _while_push(ts, *xs, **attrs)[1],
    push=_while_push,
    batch=_while_batch,
    multi=True,
    graph_attrs=("test", "body"),
    samples=_while_samples(),
    doc="a loop that runs while a condition on its carries holds",
)
