"""custom_jvp: a function whose derivative the user writes in forward mode, for both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph import functions as F
from ..graph.expand import inline
from ..graph.interpret import own_memory
from ..graph.op import Arg, Aval, GraphOp, Sample
from ..graph.ops.random import LoopKeys
from ..graph.signature import callable_name
from ..graph.trace import apply, aval_of, current_builder
from ..numerics import as_type
from ..tensor import Tensor
from .custom import CUSTOM_FUNCTION, Custom, Rules, batch_graphs, refuse_closed, with_rules
from .custom_tangents import push, rule_inputs, trace_tangents
from .reverse import backward, forward
from .subgraphs import (
    Result,
    check_inputs,
    close_together,
    is_float,
    run_graph,
    trace_body,
)
from .transform import need_function


class custom_jvp(Custom):
    """A function whose derivative is written by the user in forward mode.

        @ts.custom_jvp
        def f(x): ...
        f.defjvp(rule)

    rule(primals, tangents) -> (value, tangent), linear in the tangents; both are tuples with one
    entry per argument, tangents None where an argument has no derivative. Reverse mode transposes
    the rule. Inside the rule f runs without it; further derivatives of what the rule computes have
    the rule there again. Arguments as in ts.custom_vjp.
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
        op = self.op or CUSTOM_JVP
        of = self._rule_call(packed, op, keys)
        rule = trace_tangents(self, self.rule, of, values[0], primal, keys)
        # the captured tensors stand after the arguments and, in the rule, after the tangents
        n_closed = len(primal.captures)
        (primal, rule), captured = close_together(primal, rule)
        out = apply(op, *packed.tensors, *captured, primal=primal, rule=rule, n_closed=n_closed,
                    rules=of.rules)
        return values[0].build(out)


def _jvp_vjp(gs: tuple, ys: tuple, *xs: Tensor, wanted: tuple, **attrs: Any) -> tuple:
    """The tangent is linear in the tangents, so its reverse derivative is its transpose."""
    primal, n_args = attrs["primal"], attrs["rules"].n_args
    rule = with_rules(attrs["rule"], attrs)
    refuse_closed(primal, wanted[n_args: n_args + attrs["n_closed"]])
    floats = [i for i in range(n_args) if is_float(xs[i])]
    tape = forward(rule, rule_inputs(xs, [None] * n_args, n_args))
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
    return (Sample((Arg((3,)),), {"primal": primal, "rule": rule, "n_closed": 0,
                                  "rules": Rules("f", CUSTOM_FUNCTION, 1)}),)


CUSTOM_JVP = GraphOp(
    "custom_jvp_call",
    shape=lambda *xs, primal, **attrs: check_inputs(primal, xs),
    ref=lambda *arrays, primal, **attrs: own_memory(run_graph(primal, arrays), arrays),
    expand=lambda *xs, primal, **attrs: inline(primal, xs),
    vjp=_jvp_vjp,
    jvp=lambda ts, y, *xs, **attrs: push(ts, *xs, **attrs)[1],
    push=push,
    batch=lambda *a, **k: batch_graphs(CUSTOM_JVP, ("primal", "rule"))(*a, **k),
    multi=True,
    graph_attrs=("primal", "rule"),
    samples=_jvp_samples(),
    doc="a function with a forward-mode rule of the user's",
)
