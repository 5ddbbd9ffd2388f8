"""custom_jvp: a function whose derivative the user writes in forward mode, for both modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dims import show_shape
from ..errors import GradError, ShapeError
from ..graph import functions as F
from ..graph import tree
from ..graph.expand import inline
from ..graph.interpret import own
from ..graph.ir import Graph
from ..graph.op import Arg, Aval, GraphOp, Sample
from ..graph.operand import convert
from ..graph.ops.random import LoopKeys
from ..graph.signature import callable_name
from ..graph.trace import apply, aval_of, current_builder, evaluate
from ..numerics import as_type
from ..tensor import Tensor, as_tensor
from .custom import Custom, batch_graphs, leaves_or_none, refuse_closed
from .reverse import backward, forward, materialize
from .subgraphs import (
    Packed,
    Result,
    check_inputs,
    close_together,
    is_float,
    run_graph,
    tangent_aval,
    trace_body,
    zero_tangent,
)
from .transform import need_function


class custom_jvp(Custom):
    """A function whose derivative is written by the user in forward mode.

        @ts.custom_jvp
        def f(x): ...
        f.defjvp(rule)

    rule(primals, tangents) -> (value, tangent), linear in the tangents; both are tuples with one
    entry per argument, tangents None where an argument has no derivative. Reverse mode transposes
    the rule. Inside the rule f runs without it. Arguments as in ts.custom_vjp.
    """

    kind = "custom_jvp"
    hint = "{0}.defjvp(rule): rule(primals, tangents) -> (value, tangent)"
    rule: Callable

    def defjvp(self, rule: Callable) -> Callable:
        """Set the rule; returns it, so that it may be used as a decorator."""
        need_function(rule, "defjvp")
        self.rule, self.ready = rule, True
        return rule

    def define(self, *rules: Callable) -> None:
        self.defjvp(*rules)

    def _record(self, args: tuple, kwargs: dict) -> Any:
        packed = self._arguments(args, kwargs)
        avals, name = [aval_of(x) for x in packed.tensors], callable_name(self.fn)
        values: list[Result] = []
        keys = LoopKeys(current_builder())
        primal = trace_body(self._primal(packed, values), avals, name, keys=keys)
        moving = [tangent_aval(x) for x in packed.tensors if is_float(x)]
        rule = trace_body(self._tangent_rule(packed, values[0], primal), [*avals, *moving],
                          f"{name}_jvp", keys=LoopKeys(current_builder(), like=keys))
        # the captured tensors stand after the arguments and, in the rule, after the tangents
        n_closed = len(primal.captures)
        (primal, rule), captured = close_together(primal, rule)
        out = apply(CUSTOM_JVP, *packed.tensors, *captured, primal=primal, rule=rule,
                    n_args=len(avals), n_closed=n_closed)
        return values[0].build(out)

    def _tangent_rule(self, packed: Packed, value: Result, primal: Graph) -> Callable:
        n = len(packed.tensors)

        def rule(*tracers: Tensor) -> list[Tensor]:
            it = iter(tracers[n:])
            moving = [next(it) if is_float(x) else None for x in packed.tensors]
            primals, tangents = packed.build(tracers[:n]), packed.replaced(moving)
            made = self._without_rule(
                lambda: self.rule(tuple(primals.values()), tuple(tangents.values())))
            return _value_and_tangent(made, value, primal, callable_name(self.rule))

        return rule


def _value_and_tangent(made: Any, value: Result, primal: Graph, rule: str) -> list[Tensor]:
    """[*values, *tangents of the floating ones] of a rule's result, checked."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise GradError(f"{rule} must return (value, tangent), it returns {type(made).__name__}")
    outs = [as_tensor(y) for y in tree.leaves_like(made[0], value.treedef, f"the value of {rule}")]
    tangents = leaves_or_none(made[1], value.treedef, f"the tangent of {rule}")
    full = []
    for y, t, v in zip(outs, tangents, primal.outputs, strict=True):
        if aval_of(y) != v.aval:
            raise GradError(f"{rule} returns a value {aval_of(y)}, {primal.name} returns {v.aval}")
        if not is_float(v):
            continue
        t = zero_tangent(v.aval) if t is None else as_tensor(t)
        if tuple(t.shape) != tuple(v.aval.shape):
            raise ShapeError(f"{rule} returns a tangent of shape {show_shape(t.shape)}, its value "
                             f"has {show_shape(v.aval.shape)}")
        full.append(convert(t, tangent_aval(v.aval).type))
    return [*outs, *full]


def _rule_inputs(xs: Sequence[Tensor], ts: Sequence[Tensor | None], n_args: int) -> list[Tensor]:
    moving = [materialize(t, x) for t, x in zip(ts[:n_args], xs[:n_args], strict=True)
              if is_float(x)]
    return [*xs[:n_args], *moving, *xs[n_args:]]


def _jvp_push(ts: tuple, *xs: Tensor, primal: Graph, rule: Graph, n_args: int, n_closed: int
              ) -> tuple[tuple, tuple]:
    refuse_closed(primal, [t is not None for t in ts[n_args: n_args + n_closed]])
    out = evaluate(rule, _rule_inputs(xs, ts, n_args))
    n = len(primal.outputs)
    moved = iter(out[n:])
    return tuple(out[:n]), tuple(next(moved) if is_float(v) else None for v in primal.outputs)


def _jvp_vjp(gs: tuple, ys: tuple, *xs: Tensor, wanted: tuple, primal: Graph, rule: Graph,
             n_args: int, n_closed: int) -> tuple:
    """The tangent is linear in the tangents, so its reverse derivative is its transpose."""
    refuse_closed(primal, wanted[n_args: n_args + n_closed])
    floats = [i for i in range(n_args) if is_float(xs[i])]
    tape = forward(rule, _rule_inputs(xs, [None] * n_args, n_args))
    cts = [None] * len(primal.outputs) + [g for g, v in zip(gs, primal.outputs, strict=True)
                                          if is_float(v)]
    found = backward(tape, cts, rule.inputs[n_args: n_args + len(floats)])
    grads: list[Tensor | None] = [None] * len(xs)
    for i, g in zip(floats, found, strict=True):
        grads[i] = g
    return tuple(grads)


def _jvp_samples() -> tuple[Sample, ...]:
    x = Aval((3,), as_type("f32"))
    primal = trace_body(lambda x: [F.sin(x)], [x], "f")
    rule = trace_body(lambda x, t: [F.sin(x), t * F.cos(x)], [x, x], "f_jvp")
    return (Sample((Arg((3,)),), {"primal": primal, "rule": rule, "n_args": 1, "n_closed": 0}),)


CUSTOM_JVP = GraphOp(
    "custom_jvp_call",
    shape=lambda *xs, primal, **attrs: check_inputs(primal, xs),
    ref=lambda *arrays, primal, **attrs: own(run_graph(primal, arrays), arrays),
    expand=lambda *xs, primal, **attrs: inline(primal, xs),
    vjp=_jvp_vjp,
    jvp=lambda ts, y, *xs, **attrs: _jvp_push(ts, *xs, **attrs)[1],
    push=_jvp_push,
    batch=lambda *a, **k: batch_graphs(CUSTOM_JVP, ("primal", "rule"))(*a, **k),
    multi=True,
    graph_attrs=("primal", "rule"),
    samples=_jvp_samples(),
    doc="a function with a forward-mode rule of the user's",
)
